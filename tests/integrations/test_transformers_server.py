"""`polyattn serve` in a process of its own, asked by OpenAI's client."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .server_models import expected, saved, served

openai = pytest.importorskip("openai", reason="pip install 'polyattn[serve]'")
pytest.importorskip("uvicorn", reason="pip install 'polyattn[serve]'")

ROOT = Path(__file__).parents[2]
PROMPTS = [" ".join(f"w{(7 * n + 3 * i) % 62}" for i in range(1 + n % 9)) for n in range(32)]


LONG, LENGTH = 16_000, 16_384
"""Tokens that a server takes long to make: who goes in their midst has gone before the last one, on any machine. And
those that the model has positions for."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"), max_position_embeddings=LENGTH)


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder, "--served-model-name", "tiny", "--page-size", "4") as (_, found):
        yield found


@pytest.fixture
def client(address: str) -> Any:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=600)


def chat(client: Any, prompt: str, **options: Any) -> Any:
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": prompt}], **{"max_tokens": 8, **options}
    )


def post(address: str, body: bytes, path: str = "/v1/chat/completions") -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{address}{path}", body), timeout=600) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def metric(address: str, name: str) -> float:
    with urllib.request.urlopen(f"{address}/metrics", timeout=600) as answer:
        text = answer.read().decode()
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.M)
    assert found, text
    return float(found[1])


def eventually(true: Any) -> None:
    """Wait for what a server does by itself."""
    for _ in range(6000):
        if true():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come true")


def test_chat_and_completion_say_what_generate_says(client: Any, folder: Path) -> None:
    text = expected(folder, "w3 w1 w4", 8)
    answer = chat(client, "w3 w1 w4")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)
    plain = client.completions.create(model="tiny", prompt="w3 w1 w4", max_tokens=8)
    assert (plain.choices[0].text, plain.choices[0].finish_reason) == (text, "length")


def test_32_streams_at_a_time_say_what_generate_says(client: Any, folder: Path) -> None:
    def stream(number: int) -> str:
        parts = []
        for chunk in chat(client, PROMPTS[number], stream=True, max_tokens=5 + number % 7):
            parts.append(chunk.choices[0].delta.content or "")
        assert chunk.choices[0].finish_reason == "length"
        assert chunk.usage.completion_tokens == 5 + number % 7
        return "".join(parts)

    with ThreadPoolExecutor(32) as pool:
        said = list(pool.map(stream, range(32)))
    assert said == [expected(folder, prompt, 5 + number % 7) for number, prompt in enumerate(PROMPTS)]


def test_a_stop_string_ends_the_text_before_it(client: Any, folder: Path) -> None:
    words = expected(folder, "w3 w1 w4", 8).split()
    stop = f"{words[2]} {words[3]}"  # over a border of tokens
    before = " ".join(words[:2]) + " "
    answer = chat(client, "w3 w1 w4", stop=["never", stop])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (before, "stop")
    chunks = list(chat(client, "w3 w1 w4", stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == before
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_seed_draws_the_same_text_and_none_another(client: Any) -> None:
    def draw(**options: Any) -> str:
        return chat(client, "w3", temperature=2, max_tokens=24, **options).choices[0].message.content

    assert draw(seed=5) == draw(seed=5)
    assert draw() != draw()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n"),
    ({"logprobs": True}, "logprobs"),
    ({"logit_bias": {"3": 5}}, "logit_bias"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"temperature": 9}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"seed": 0.5}, "seed"),
    ({"stop": []}, "stop"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"stream_options": {"colour": 1}}, "stream_options.colour"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"temprature": 0.5}, "temprature"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "king", "content": "w1"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages[0].tool_calls[0]"),
    ({"messages": [{"role": "user", "content": "w1 " * (LENGTH + 88)}]}, "messages"),
    ({"max_tokens": LENGTH - 1}, "messages"),
]


@pytest.mark.parametrize("field", REFUSED, ids=lambda case: case[1])
def test_what_is_not_served_is_refused_by_its_name(address: str, field: tuple[dict[str, Any], str]) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 4, **field[0]}
    status, answer = post(address, json.dumps(body).encode())
    assert status == 400
    assert answer["error"]["param"] == field[1], answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"]


def test_neutral_values_of_such_fields_are_taken(client: Any) -> None:
    neutral = {"n": 1, "logprobs": False, "logit_bias": {}, "presence_penalty": 0, "user": "me", "tools": None}
    assert chat(client, "w1", **neutral).choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "body, said",
    [(b"{", "no JSON"), (b"[]", "a JSON object"), (b"{}", "messages is missing"), (b'"' + b"x" * 2**25, "bytes")],
)
def test_bodies_that_are_none(address: str, body: bytes, said: str) -> None:
    status, answer = post(address, body)
    assert status == (413 if said == "bytes" else 400)
    assert said in answer["error"]["message"]


def test_another_models_name_and_another_path(client: Any, address: str) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.chat.completions.create(model="huge", messages=[{"role": "user", "content": "w1"}])
    assert post(address, b"{}", "/v1/images")[0] == 404
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("tiny", LENGTH)


def test_metrics_count_and_name_the_backends(client: Any, address: str) -> None:
    before = metric(address, "polyattn_generated_tokens_total")
    chat(client, "w1 w2 w3 w4 w5 w6 w7 w8 w9", max_tokens=6)
    hits = metric(address, "polyattn_prefix_hit_tokens_total")
    chat(client, "w1 w2 w3 w4 w5 w6 w7 w8 w10", max_tokens=6)
    assert metric(address, "polyattn_generated_tokens_total") == before + 12
    assert metric(address, "polyattn_prefix_hit_tokens_total") == hits + 8
    assert metric(address, 'polyattn_backend_info{backend="torch_native",phase="decode"}') == 1
    assert metric(address, "polyattn_requests_running") == metric(address, "polyattn_requests_waiting") == 0
    assert metric(address, "polyattn_time_to_first_token_seconds_count") >= 2


def test_a_client_that_is_killed_gives_its_pages_back(address: str) -> None:
    cancelled = 'polyattn_requests_total{how="cancelled"}'
    chat(openai.OpenAI(base_url=f"{address}/v1", api_key="none"), "w1", max_tokens=1)
    program = (
        "import openai, sys\n"
        "client = openai.OpenAI(base_url=sys.argv[1], api_key='none')\n"
        "options = {'model': 'tiny', 'messages': [{'role': 'user', 'content': 'w5'}], 'max_tokens': int(sys.argv[2])}\n"
        "for chunk in client.chat.completions.create(stream=True, **options): print('got', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, f"{address}/v1", str(LONG)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == b"got\n"
        process.kill()
    eventually(lambda: metric(address, "polyattn_requests_running") == 0)
    assert metric(address, cancelled) >= 1


def test_who_waits_for_a_whole_answer_and_goes_is_cancelled_too(address: str) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "w7"}], "max_tokens": LONG}).encode()
    made = metric(address, "polyattn_generated_tokens_total")
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as plug:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        plug.sendall(head.encode() + body)
        eventually(lambda: metric(address, "polyattn_generated_tokens_total") > made)
    eventually(lambda: metric(address, "polyattn_requests_running") == 0)
    assert metric(address, "polyattn_generated_tokens_total") < made + LONG


CURL = [
    line[2:]
    for line in (ROOT / "docs" / "serve.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("$ curl ")
]


@pytest.mark.parametrize("line", CURL)
def test_the_pages_curl_lines_are_answered(address: str, line: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{line} --fail-with-body"],
        env={**os.environ, "SERVER": address},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("data: [DONE]\n\n") == ('"stream": true' in line)


def test_sigterm_lets_a_stream_end_and_then_the_process(folder: Path) -> None:
    with served(folder, "--drain-seconds", "1800") as (server, found):
        client = openai.OpenAI(base_url=f"{found}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(model=str(folder), prompt="w3 w1 w4", max_tokens=300, stream=True)
        parts = [next(iter(stream)).choices[0].text]
        server.send_signal(signal.SIGTERM)
        parts += [chunk.choices[0].text for chunk in stream]
        assert "".join(parts) == expected(folder, "w3 w1 w4", 300)
        assert server.wait(timeout=600) == 0


def test_an_address_that_is_taken_is_said(address: str, folder: Path) -> None:
    words = ("serve", "--model-path", str(folder), "--port", address.rpartition(":")[2])
    done = subprocess.run([sys.executable, "-m", "polyattn", *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert "cannot be listened at: another program may have it" in " ".join(done.stderr.split())


def test_a_full_queue_is_said_and_passes(folder: Path) -> None:
    words = ("--max-running-requests", "1", "--max-queued-requests", "1")
    with served(folder, *words) as (_, found):
        client = openai.OpenAI(base_url=f"{found}/v1", api_key="none", max_retries=0, timeout=600)

        def ask(**options: Any) -> Any:
            return client.completions.create(model=str(folder), prompt="w1", **options)

        with ThreadPoolExecutor(1) as pool:
            running = ask(max_tokens=LONG, stream=True)
            assert next(iter(running)).choices[0].text
            waiting = pool.submit(ask, max_tokens=2)
            eventually(lambda: metric(found, "polyattn_requests_waiting") == 1)
            with pytest.raises(openai.RateLimitError) as caught:
                ask(max_tokens=2)
            assert caught.value.body["code"] == "queue_full"  # type: ignore[index]
            running.close()
            assert waiting.result().choices[0].text
        assert ask(max_tokens=2).choices[0].text
