"""The server's app in this process, where its engine can be made to fail, and models that answer in a form."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from polyattn.integrations.transformers.serving import CausalLMRunner
from polyattn.serving.engine import Engine, EngineConfig
from polyattn.serving.kv_cache.pool import KVCacheConfig

from .server_models import TEMPLATE, WORDS, saved

openai = pytest.importorskip("openai", reason="pip install 'polyattn[serve]'")
uvicorn = pytest.importorskip("uvicorn", reason="pip install 'polyattn[serve]'")

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@contextlib.contextmanager
def running(folder: Path, model: Any, pages: int = 0, **changes: Any) -> Iterator[tuple[Engine, Any, str]]:
    """An engine, a client of the server over it, and the address."""
    from polyattn.integrations.transformers.server import build_app

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    engine = Engine(CausalLMRunner(model), EngineConfig(cache=KVCacheConfig(page_size=4), pages=pages, max_tokens=64))
    app = build_app(engine, model, tokenizer, "tiny", drain=10)
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="critical", lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
        address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield engine, openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=600), address
    finally:
        server.should_exit = True
        thread.join()
    engine.check()
    assert engine.unfinished == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path)


def ask(client: Any, content: str = "w1 w2", **options: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return client.chat.completions.create(model="tiny", messages=messages, **{"max_tokens": 4, **options})


def health(address: str) -> int:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=600) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_failing_step_ends_its_requests_and_not_the_server(folder: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    with running(folder, model) as (engine, client, address):
        forward = engine.memory.forward

        def fails(*given: Any, **options: Any) -> Any:
            raise RuntimeError('the "device" is lost')

        engine.memory.forward = fails  # type: ignore[method-assign]
        with pytest.raises(openai.InternalServerError, match="a step of the engine failed: RuntimeError") as caught:
            ask(client)
        assert caught.value.status_code == 500
        with pytest.raises(openai.APIError, match='the "device" is lost'):
            list(ask(client, stream=True))
        assert health(address) == 200
        with pytest.raises(openai.InternalServerError):
            ask(client)
        assert health(address) == 503, "three in a row"
        engine.memory.forward = forward  # type: ignore[method-assign]
        assert ask(client).choices[0].finish_reason == "length"
        assert health(address) == 200


def test_logits_that_are_no_numbers_are_the_models_fault(folder: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with (
        running(folder, model) as (_, client, _),
        pytest.raises(openai.InternalServerError, match="the model failed: the model gives logits of NaN"),
    ):
        ask(client)


def qwen(folder: Path) -> Any:
    """A model of a kind whose answers transformers parses: `<think>` and `<tool_call>` are parts of their own."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "max_position_embeddings": 64}
    config = transformers.Qwen2Config(
        vocab_size=len(WORDS), num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, bos_token_id=None,
        initializer_range=0.4, **sizes,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config).eval()


def test_models_with_a_form_of_answers_stream_what_they_answer_in_one_piece(folder: Path) -> None:
    template = TEMPLATE + "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    with running(folder, qwen(folder), chat_template=template) as (_, client, _):
        whole = ask(client, tools=TOOLS, max_tokens=12).choices[0].message.content
        assert "w1 w2" not in whole, "the prompt is no part of the answer"
        parts = [chunk.choices[0].delta.content or "" for chunk in ask(client, tools=TOOLS, max_tokens=12, stream=True)]
        assert "".join(parts).strip() == whole.strip()
        assert whole
        stop = whole.split()[3]
        cut = ask(client, tools=TOOLS, max_tokens=12, stop=stop).choices[0]
        assert (cut.message.content.strip(), cut.finish_reason) == (whole[: whole.index(stop)].strip(), "stop")


def test_a_template_may_refuse_messages(folder: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    with (
        running(folder, model, chat_template=template) as (_, client, _),
        pytest.raises(openai.BadRequestError, match="roles must alternate") as caught,
    ):
        ask(client)
    assert caught.value.body["param"] == "messages"


def test_a_model_without_a_template_completes_only(folder: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    with running(folder, model, chat_template=None) as (_, client, _):
        with pytest.raises(openai.BadRequestError, match="no chat template; use /v1/completions"):
            ask(client)
        assert client.completions.create(model="tiny", prompt="w1", max_tokens=2).choices[0].text
        with pytest.raises(openai.BadRequestError, match="the prompt has no tokens"):
            client.completions.create(model="tiny", prompt="", max_tokens=2)


def test_parts_of_text_and_calls_of_tools_reach_the_template(folder: Path) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments.at }} {% endfor %}"
    template = "{% for m in messages %}{{ m.content }} " + calls + "{% endfor %}"
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    with running(folder, model, chat_template=template) as (_, client, _):
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "w5"}'}}
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "w1"}, {"type": "text", "text": "w2"}]},
            {"role": "assistant", "content": "w3", "tool_calls": [call]},
            {"role": "tool", "content": "w4", "tool_call_id": "1"},
        ]
        said = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6).choices[0].message.content
        plain = client.completions.create(model="tiny", prompt="w1 w2 w3 w5 w4", max_tokens=6).choices[0].text
        assert said == plain


def test_a_cache_smaller_than_the_context_is_what_requests_have_room_for(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with running(folder, model, pages=5) as (engine, client, _):
        assert client.models.list().data[0].max_model_len == engine.longest == 16
        answer = client.completions.create(model="tiny", prompt="w1 w2", extra_body={"ignore_eos": True})
        assert (answer.choices[0].finish_reason, answer.usage.total_tokens) == ("length", 16)
        with pytest.raises(openai.BadRequestError, match="room for 16 together") as refused:
            client.completions.create(model="tiny", prompt="w1 w2", max_tokens=15)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="the prompt has no tokens") as refused:
            client.completions.create(model="tiny", prompt="")
        assert refused.value.param == "prompt"


@pytest.mark.parametrize("text", ["word", 'said "so"\n\u00e9\u2028\x00 </s>'], ids=["plain", "escaped"])
def test_events_that_carry_text_are_those_of_transformers(text: str) -> None:
    from polyattn.integrations.transformers.server import app

    for handler, given, word in (
        (app._Chat, {"request_id": 'r"1', "model": "m"}, "content"),
        (app._Completions, {"request_id": 'r"1', "model_id": "m"}, "text"),
    ):
        for what in ({word: text}, {word: text, "finish_reason": "stop"}, {"finish_reason": "length"}):
            found, want = (
                build(object.__new__(handler), **given, **what)
                for build in (handler._build_chunk_sse, handler.__mro__[2]._build_chunk_sse)
            )
            assert found.endswith("\n\n")
            mine, theirs = (json.loads(event.removeprefix("data: ")) for event in (found, want))
            assert mine.pop("created") <= theirs.pop("created")
            assert mine == theirs


def test_news_that_wait_for_a_busy_event_loop_become_one_event() -> None:
    from polyattn.integrations.transformers.server.app import _News
    from polyattn.serving.engine.loop import Update

    async def told() -> list[Any]:
        one: list[Any] = []
        other: list[Any] = []
        news = _News(asyncio.get_running_loop())
        failed, left = RuntimeError("a step"), {"tell": other.append}
        for update in (Update([1]), Update([2, 3]), Update([], error=failed)):
            news.hand([(one.append, update), (left["tell"], Update([9]))])
        assert not one, "nothing is told on the engine's thread"
        for _ in range(3):
            await asyncio.sleep(0)
        assert other == [Update([9, 9, 9])]
        news.hand([(one.append, Update([4]))])
        for _ in range(3):
            await asyncio.sleep(0)
        assert one == [Update([1, 2, 3]), Update([], error=failed), Update([4])]
        return one

    asyncio.run(told())
