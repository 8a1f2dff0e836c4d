"""Images in the engine, the server and `polyattn generate`: tokens equal to transformers' own."""

from __future__ import annotations

import base64
import io
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from torch.profiler import ProfilerActivity, profile

import polyattn
from polyattn.cli import main
from polyattn.cli.causal_lm import load_images, load_model, load_tokenizer
from polyattn.errors import BackendUnavailableError, InvalidInputError
from polyattn.integrations.transformers.images import ImageReader, no_images_because
from polyattn.integrations.transformers.serving import CausalLMRunner
from polyattn.serving.engine import Engine, EngineConfig, Media, SamplingParams, Speculative
from polyattn.serving.graphs.device_graphs import FakeGraph
from polyattn.serving.kv_cache.pool import KVCacheConfig

from .image_models import conversation, expected, picture, saved

PARAMS = SamplingParams(16)
TURNS = [
    conversation(picture(1), "w1 w2"),
    conversation("w3 w9", picture(2, 40, 24), "w1", picture(1), "w7"),
    conversation(picture(1), "w1 w2", picture(3, 16, 64)),
    conversation("w4 w5 w6 w7 w8"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_model(folder, "cpu")


@pytest.fixture(scope="module")
def reader(folder: Path, model: Any) -> ImageReader:
    found, why_not = load_images(folder, model, load_tokenizer(folder))
    assert not why_not
    return found  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[int]]:
    return [expected(folder, turns, 16) for turns in TURNS]


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    yield
    polyattn.configure()


def engine(model: Any, **changes: Any) -> Engine:
    sizes: dict[str, Any] = {"cache": KVCacheConfig(page_size=4), "max_tokens": 128, "max_requests": 4, **changes}
    return Engine(CausalLMRunner(model), EngineConfig(**sizes))


def ask(served: Engine, reader: ImageReader, turns: list[dict[str, Any]]) -> int:
    read = reader.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    return served.add(read["input_ids"], PARAMS, media=read.get("media"))[0]


def answers(served: Engine) -> dict[int, Any]:
    found = {}
    while served.unfinished:
        found.update({output.id: output for output in served.step()})
    served.check()
    return found


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("graphs", [False, FakeGraph], ids=["eager", "graphs"])
@pytest.mark.parametrize("chunk", [2048, 7, 1])
def test_tokens_are_those_of_generate(
    model: Any, reader: ImageReader, wanted: list[list[int]], chunk: int, graphs: Any
) -> None:
    served = engine(model, max_batch_tokens=chunk, graphs=graphs, backend="torch_sdpa")
    ids = [ask(served, reader, turns) for turns in TURNS]
    found = answers(served)
    assert [found[i].token_ids for i in ids] == wanted
    if graphs:
        assert served.memory.graphs is not None
        assert served.memory.graphs.recorded


def test_an_image_and_its_places_decide_what_is_said(model: Any, reader: ImageReader, wanted: list[list[int]]) -> None:
    others = [conversation(picture(9), "w1 w2"), conversation(picture(1, 36, 24), "w1 w2")]
    served = engine(model)
    ids = [ask(served, reader, turns) for turns in others]
    found = answers(served)
    assert wanted[0] not in [found[i].token_ids for i in ids]


def test_prefixes_are_shared_by_what_an_image_shows(model: Any, reader: ImageReader, wanted: list[list[int]]) -> None:
    served = engine(model)
    first = ask(served, reader, TURNS[0])
    assert answers(served)[first].cached_tokens == 0
    again, longer, other = (
        ask(served, reader, turns) for turns in (TURNS[0], TURNS[2], conversation(picture(9), "w1 w2"))
    )
    found = answers(served)
    # <|vision_start|>, 12 places, <|vision_end|>, w1, w2; the last token is always computed.
    assert (found[again].cached_tokens, found[again].token_ids) == (16 - 4, wanted[0])
    assert (found[longer].cached_tokens, found[longer].token_ids) == (16, wanted[2])
    assert found[other].cached_tokens == 0


def test_who_loses_its_pages_looks_at_its_images_again(
    model: Any, reader: ImageReader, wanted: list[list[int]]
) -> None:
    served = engine(model, pages=1 + 18, prefix_caching=False)
    ids = [ask(served, reader, turns) for turns in TURNS]
    found = answers(served)
    assert [found[i].token_ids for i in ids] == wanted
    assert any(output.preemptions for output in found.values())


def test_a_forked_answer_goes_on_with_its_parents_images(
    model: Any, reader: ImageReader, wanted: list[list[int]]
) -> None:
    served = engine(model, max_batch_tokens=8)
    parent = ask(served, reader, TURNS[0])
    while len(served.tokens_of(parent)) < 3:
        served.step()
    child = served.fork(parent)
    assert answers(served)[child].token_ids == wanted[0]


def test_the_towers_backend_is_asked_for_by_its_own_setting(model: Any) -> None:
    polyattn.configure(mm_attention_backend="nobody")
    with pytest.raises(BackendUnavailableError, match="nobody"):
        CausalLMRunner(model)
    polyattn.configure(mm_attention_backend="torch_sdpa", attention_backend="torch_native")
    with profile(activities=[ProfilerActivity.CPU]) as found:
        CausalLMRunner(model)
    # A call for each of the two blocks: windows and whole images are packed. Probing the text asks no backend.
    names = [event.name for event in found.events() if event.name.startswith("polyattn.")]
    assert names == ["polyattn.varlen_attention torch_sdpa@cpu"] * 2


def test_what_cannot_be_served_is_said(model: Any, reader: ImageReader) -> None:
    read = reader.apply_chat_template(TURNS[0], add_generation_prompt=True)
    ids, media = read["input_ids"], read["media"]
    text = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    ).eval()
    assert "reads text only" in no_images_because(text)
    with pytest.raises(InvalidInputError, match="reads tokens only"):
        engine(text).add(ids, media=media)
    with pytest.raises(InvalidInputError, match="draft model would not see"):
        engine(model, speculative=Speculative(CausalLMRunner(text))).add(ids, media=media)
    served = engine(model)
    with pytest.raises(InvalidInputError, match="one of each is needed"):
        served.add([*ids, 7], media=media)
    with pytest.raises(InvalidInputError, match="media is a dict"):
        served.add(ids, media={})  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="2 places for 1 images"):
        reader.apply_chat_template(conversation("<|image_pad|>", picture(1)), add_generation_prompt=True)
    with pytest.raises(InvalidInputError, match="refuses an image: absolute aspect ratio"):
        reader.apply_chat_template(conversation(picture(1, 2, 600)), add_generation_prompt=True)
    torch_rows = torch.zeros(3, len(ids), dtype=torch.int64)
    served.add(ids, SamplingParams(1), media=Media(media.inputs, media.at[:-1], media.keys, torch_rows))
    with pytest.raises(InvalidInputError, match="12 embeddings for 11 places"):
        served.step()


def test_models_of_other_kinds_of_images_are_named() -> None:
    def kind(name: str, config: Any = None, **parts: Any) -> Any:
        return type(name, (), {"model": type("Inner", (), parts)(), "config": config})()

    assert "does not place the tokens" in no_images_because(kind("Llava", get_image_features=1))
    parts: dict[str, Any] = {"get_image_features": 1, "get_rope_index": 1}
    assert "Odd has no image_token_id" in no_images_because(kind("Odd", **parts))
    config = transformers.Qwen2_5_VLConfig()
    assert "Odd has no language_model" in no_images_because(kind("Odd", config, **parts))
    config.vision_config = transformers.LlamaConfig()
    assert "Odd has no spatial_merge_size" in no_images_because(kind("Odd", config, **parts))
    config = transformers.Qwen2_5_VLConfig()
    deep = type("Text", (), {"forward": lambda self, deepstack_visual_embeds: 0})()
    assert "several layers" in no_images_because(kind("Deep", config, **parts, language_model=deep))


def generate(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> tuple[int, str]:
    code = main(["generate", "--model-path", str(folder), "--prompt", "w1 w2", *words])
    said = capsys.readouterr()
    return code, said.out if "--json" in words else " ".join(f"{said.out} {said.err}".split())


def test_generate_reads_files(
    capsys: pytest.CaptureFixture[str], folder: Path, wanted: list[list[int]], tmp_path: Path
) -> None:
    picture(1).save(tmp_path / "a.png")
    words = ("--image", str(tmp_path / "a.png"), "--max-new-tokens", "16", "--json")
    code, out = generate(capsys, folder, *words, "--mm-attention-backend", "torch_sdpa")
    assert code == 0, out
    (answer,) = json.loads(out)
    assert answer["token_ids"] == wanted[0]
    picture(3, 16, 64).save(tmp_path / "b.png")
    code, out = generate(capsys, folder, *words, "--image", str(tmp_path / "b.png"))
    assert json.loads(out)[0]["token_ids"] == expected(
        folder, conversation(picture(1), picture(3, 16, 64), "w1 w2"), 16
    )


def test_generate_says_what_is_wrong(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    from .server_models import saved as saved_text

    (tmp_path / "a.png").write_bytes(b"no image")
    for words, said in [
        (("--image", str(tmp_path / "a.png")), "cannot identify image file"),
        (("--image", str(tmp_path / "b.png")), "No such file"),
        (("--mm-attention-backend", "nobody"), "nobody"),
    ]:
        code, out = generate(capsys, folder, *words)
        assert code
        assert said in out
    text = saved_text(tmp_path / "text")
    for words in (("--image", str(tmp_path / "a.png")), ("--mm-attention-backend", "torch_sdpa")):
        code, out = generate(capsys, text, *words)
        assert code == 2
        assert f"{words[0]} " in out
        assert "reads text only" in out
    bare = saved(tmp_path / "bare")
    (bare / "preprocessor_config.json").unlink()
    assert "has no preprocessor_config.json" in generate(capsys, bare, "--image", str(tmp_path / "a.png"))[1]


def url(number: int, kind: str = "png", **options: Any) -> str:
    data = io.BytesIO()
    picture(number).save(data, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(data.getvalue()).decode()}"


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    from .server_models import served

    pytest.importorskip("uvicorn", reason="pip install 'polyattn[serve]'")
    words = ("--served-model-name", "tiny", "--page-size", "4", "--mm-attention-backend", "torch_sdpa")
    with served(folder, *words) as (_, found):
        yield found


def part(number: int, kind: str = "png", **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(number, kind), **options}}


@pytest.mark.slow
def test_a_chat_with_images_says_what_generate_says(address: str, folder: Path) -> None:
    openai = pytest.importorskip("openai", reason="pip install 'polyattn[serve]'")
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=600)

    def ask(number: int) -> tuple[str, int]:
        content = [part(number), {"type": "text", "text": "w1 w2"}, part(number + 1, detail="auto")]
        messages = [
            {"role": "user", "content": content[: 2 + number % 2]},
            {"role": "assistant", "content": "w9"},
            {"role": "user", "content": [{"type": "text", "text": "w5"}]},
        ]
        if number % 3:
            done = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
            return done.choices[0].message.content, done.usage.prompt_tokens
        chunks = list(client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, stream=True))
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks[-1].usage.prompt_tokens

    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(ask, range(8)))
    tokenizer = load_tokenizer(folder)
    for number, (text, prompt) in enumerate(said):
        turns = [
            *conversation(picture(number), "w1 w2", *([picture(number + 1)] if number % 2 else [])),
            {"role": "assistant", "content": "w9"},
            {"role": "user", "content": "w5"},
        ]
        assert text == tokenizer.decode(expected(folder, turns, 8), skip_special_tokens=True)
        assert prompt == (18 if number % 2 == 0 else 32)


def refused(address: str, *content: dict[str, Any]) -> tuple[int, str, str]:
    body = json.dumps({"messages": [{"role": "user", "content": list(content)}], "max_tokens": 4}).encode()
    try:
        urllib.request.urlopen(urllib.request.Request(f"{address}/v1/chat/completions", body), timeout=600)
    except urllib.error.HTTPError as error:
        found = json.loads(error.read())["error"]
        return error.code, found["param"], found["message"]
    raise AssertionError("it was answered")


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}, ".image_url.url", "fetches nothing"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, ".image_url.url", "fetches nothing"),
    ({"type": "image_url", "image_url": {}}, ".image_url.url", "give the image itself"),
    ({"type": "image_url", "image_url": "data:image/png;base64,"}, ".image_url", "an object is needed"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}, ".image_url.url", "no image"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, ".image_url.url", "no image"),
    ({"type": "image_url", "image_url": {"url": url(1), "detail": "high"}}, ".image_url.detail", "not serve it"),
    ({"type": "video_url", "video_url": {"url": "x"}}, ".type", "text and images only"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda case: case[2])
def test_parts_that_are_no_image_are_refused_by_their_field(
    address: str, wrong: tuple[dict[str, Any], str, str]
) -> None:
    status, field, said = refused(address, {"type": "text", "text": "w1"}, wrong[0])
    assert (status, field) == (400, f"messages[0].content[1]{wrong[1]}")
    assert wrong[2] in said


def test_images_that_no_place_or_no_memory_takes_are_refused(address: str) -> None:
    data = io.BytesIO()
    picture(1, 2, 600).save(data, "png")
    line = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    status, _, said = refused(address, {"type": "image_url", "image_url": {"url": line}})
    assert (status, "aspect ratio" in said) == (400, True)
    status, _, said = refused(address, part(1), {"type": "text", "text": "<|image_pad|>"})
    assert (status, "2 places for 1 images" in said) == (400, True)
    bomb = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(bomb, "png")
    huge = f"data:image/png;base64,{base64.b64encode(bomb.getvalue()).decode()}"
    status, field, said = refused(address, {"type": "image_url", "image_url": {"url": huge}})
    assert (status, field) == (400, "messages[0].content[0].image_url.url")
    assert "exceeds limit" in said
