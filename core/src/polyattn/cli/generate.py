"""`polyattn generate` writes text with a causal LM of transformers, on the engine of `polyattn.serving`. A pipeline of
diffusers makes an image or a video instead: `pipelines.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ..errors import ConfigError
from ..selection import overrides
from ..user_files import MEGABYTE, read_text
from . import pipelines
from .causal_lm import (
    check_tower,
    folder_of,
    linear_choice,
    load_images,
    load_model,
    load_tokenizer,
    runner_of,
    speculative_of,
    stop_tokens_of,
)
from .options import Device, Json, settings_of, with_options
from .rendering import facts, panel, progress, screen, show_json

if TYPE_CHECKING:
    from rich.console import Console

    from ..serving.engine import Engine, Output

__all__ = ["generate"]

MODEL = "What is said"
TOGETHER = 16
"""Prompts that run at a time; the others wait."""


@dataclasses.dataclass(frozen=True)
class _Said:
    """A prompt's answer: the output, and the seconds from the start of all prompts to its own end."""

    prompt: str
    text: str
    output: Output
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "text": self.text,
            "token_ids": self.output.token_ids,
            "backend": self.output.backends,
            "tokens_per_second": round(len(self.output.token_ids) / self.seconds, 2),
            "finish_reason": self.output.finish_reason,
        }


@with_options("generate", pipelines.OWN)
def generate(
    context: typer.Context,
    model_path: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="A causal LM and its tokenizer, or a pipeline of diffusers: a folder that save_pretrained wrote, or a "
            "name in Hugging Face's cache.",
            rich_help_panel=MODEL,
        ),
    ],
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A prompt; may be repeated.", rich_help_panel=MODEL)
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A UTF-8 text file with one prompt per line; empty lines are left out.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="An image that each prompt is about, for a model that reads some; may be repeated.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Tokens that each prompt is continued by, at most; the model's end tokens end it earlier.",
            rich_help_panel=MODEL,
        ),
    ] = 64,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="The temperature of the draws; 0 = greedy.", rich_help_panel=MODEL)
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            help="Draw only from the most probable tokens of this probability together; 1 = off.",
            rich_help_panel=MODEL,
        ),
    ] = 1.0,
    top_k: Annotated[
        int,
        typer.Option(metavar="K", help="Draw only from the K most probable tokens; 0 = off.", rich_help_panel=MODEL),
    ] = 0,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="The seed of the draws, or of the noise: the same seed gives the same, whatever runs beside it.",
            rich_help_panel=MODEL,
        ),
    ] = 0,
    device: Device = "auto",
    *,
    given: Mapping[str, Any],
    as_json: Json = False,
) -> None:
    """Continue prompts with a causal LM, or make an image or a video with a pipeline of diffusers.

    What the folder holds decides: one with model_index.json is a pipeline. A causal LM has continuous batching over a
    paged KV cache and one backend per phase, a pipeline a backend per component. Backends, page size and dtype that are
    not given come from the environment and the config file.
    """
    if not model_path.is_dir():
        with contextlib.suppress(ConfigError):  # what is in no cache either is told where the model is loaded
            model_path = folder_of(str(model_path))
    if pipelines.is_pipeline(model_path, context):
        pipelines.draw(model_path, prompt or [], seed, device, given, as_json=as_json)
        return
    prompts = _prompts(prompt, prompt_file)
    settings = overrides.configure_by("the command line", settings_of(given))
    levels = tuple(given[f"speculative_{name}"] for name in ("num_steps", "eagle_topk", "num_draft_tokens"))
    draft = given["speculative_draft_model_path"]
    if draft is None and any(level is not None for level in levels):
        raise ConfigError(
            "--speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens say how to draft; "
            "give --speculative-draft-model-path too, or leave them out"
        )
    from ..serving.engine import Engine, EngineConfig, SamplingParams  # it needs torch
    from .serve_plan import cache_for

    params = SamplingParams(max_new_tokens, temperature, top_p, top_k, seed)  # checked before anything is loaded
    model, tokenizer = load_model(model_path, device), load_tokenizer(model_path)
    params = dataclasses.replace(params, stop_token_ids=stop_tokens_of(model))
    reader, why_not = load_images(model_path, model, tokenizer)
    check_tower(given, why_not)
    read = [_read(text, image or [], tokenizer, reader, why_not) for text in prompts]
    ids = [one["input_ids"] for one in read]
    longest = max(map(len, ids)) + max_new_tokens
    needed = longest + (0 if draft is None else 3 if levels[0] is None else levels[0])
    runner = runner_of(model, needed)
    engine = Engine(
        runner,
        EngineConfig(
            cache=cache_for(runner, settings, given),
            max_requests=min(len(ids), TOGETHER),
            max_tokens=longest,
            linear=linear_choice(given, type(model).__name__, has=bool(runner.recurrent)),
            speculative=None if draft is None else speculative_of(load_model(draft, device), needed, *levels),
            graphs=not given["disable_cuda_graph"],
            batch_invariant=given["batch_invariant"],
        ),
    )
    overrides.check_components()  # every layer is built: what reached none never will
    console = screen()
    numbers = {
        engine.add(one["input_ids"], params, media=one.get("media"))[0]: number for number, one in enumerate(read)
    }
    said: list[_Said | None] = [None] * len(ids)
    start = time.perf_counter()
    with progress(console, quiet=as_json) as bar:
        task = bar.add_task("tokens", total=len(ids) * max_new_tokens)
        for output in _run(engine, lambda count: bar.update(task, completed=count)):
            text = tokenizer.decode(output.token_ids, skip_special_tokens=True)
            number = numbers[output.id]
            said[number] = _Said(prompts[number], text, output, time.perf_counter() - start)
    answers = [one for one in said if one is not None]
    if as_json:
        show_json([one.to_dict() for one in answers])
    else:
        _print(console, answers, time.perf_counter() - start)


def _prompts(given: list[str] | None, file: Path | None) -> list[str]:
    prompts = list(given or ())
    if file is not None:
        try:
            lines = read_text(file, 16 * MEGABYTE, pipes=True).splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"--prompt-file {file}: {exc}; give a UTF-8 text file with one prompt per line") from exc
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError("there is no prompt: give --prompt TEXT, or --prompt-file FILE with one per line")
    return prompts


def _read(text: str, files: list[Path], tokenizer: Any, reader: Any, why_not: str) -> Mapping[str, Any]:
    """Return the tokens of a prompt, and its images: with some it is a turn of a chat, images first."""
    if not files:
        return tokenizer(text)  # type: ignore[no-any-return]
    if reader is None:
        raise ConfigError(f"--image {files[0]}: {why_not}; leave it out, or choose another model")
    if not tokenizer.chat_template:
        raise ConfigError(f"--image {files[0]}: the tokenizer has no chat template, which says where images stand")
    from PIL import Image, UnidentifiedImageError

    parts: list[dict[str, Any]] = []
    for file in files:
        try:
            with Image.open(file) as opened:
                parts.append({"type": "image", "image": opened.convert("RGB")})
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as exc:
            raise ConfigError(f"--image {file}: {exc}; give a file with an image, such as a .png or .jpg") from exc
    turn = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return reader.apply_chat_template(turn, add_generation_prompt=True)  # type: ignore[no-any-return]


def _run(engine: Engine, tell: Any) -> Iterable[Output]:
    """Yield outputs as they finish; `tell` is given the tokens there are after each step."""
    finished = 0
    while engine.unfinished:
        outputs = engine.step()
        finished += sum(len(output.token_ids) for output in outputs)
        tell(finished + engine.generated)
        yield from outputs


def _print(console: Console, answers: list[_Said], seconds: float) -> None:
    for one in answers:
        console.print(panel(Text(one.prompt, style="name"), Text(one.text)))
    tokens = sum(len(one.output.token_ids) for one in answers)
    phases: dict[str, str] = {}
    for one in answers:
        phases.update(one.output.backends)
    console.print(
        facts(
            [
                ("tokens", f"{tokens} in {seconds:.1f} s"),
                ("tokens per second", Text(f"{tokens / seconds:.1f}", style="figure")),
                *((f"{phase} by", name) for phase, name in phases.items()),
            ]
        )
    )
