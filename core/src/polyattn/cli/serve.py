"""`polyattn serve` answers OpenAI's protocol, on polyattn's engine or on another one that has polyattn in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BackendUnavailableError, ConfigError, did_you_mean
from ..selection import overrides
from .causal_lm import (
    check_tower,
    folder_of,
    linear_choice,
    load_images,
    load_model,
    load_tokenizer,
    runner_of,
    speculative_of,
)
from .engines import ENGINES, command_of, run_engine
from .options import Device, Json, Option, options_of, settings_of, with_options
from .rendering import facts, panel, screen, show_json

if TYPE_CHECKING:
    from pathlib import Path

    from ..selection.config import Settings
    from ..serving.engine import Engine
    from ..serving.kv_cache.pool import KVCacheConfig

__all__ = ["serve"]

SERVER, SIZES, PLAN = "Server", "Sizes", "Without running"

OWN = (
    Option(
        "context_length",
        int,
        "Tokens of one request, prompt and answer.",
        "TOKENS",
        SIZES,
        usual="the positions of the model",
        least=1,
    ),
    Option("max_running_requests", int, "Requests that run at a time.", "N", SIZES, default=32, least=1),
    Option(
        "max_queued_requests",
        int,
        "Requests that may wait; more are answered with 429.",
        "N",
        SIZES,
        default=1024,
        least=0,
    ),
    Option(
        "chunked_prefill_size",
        int,
        "Tokens of one step; longer prompts run in chunks.",
        "TOKENS",
        SIZES,
        default=2048,
        least=1,
    ),
    Option(
        "max_total_tokens",
        int,
        "Tokens that the KV cache holds.",
        "TOKENS",
        SIZES,
        usual="what all running requests need at full length; on a GPU no more than --mem-fraction-static allows",
        least=1,
    ),
    Option(
        "mem_fraction_static",
        float,
        "The share of a GPU's memory for weights and KV cache.",
        "SHARE",
        SIZES,
        usual="0.88",
    ),
    Option("disable_radix_cache", bool, "Share no pages between prompts that begin alike.", "", SIZES),
)
"""Flags of sizes, which only a server has."""

serve = typer.Typer(add_completion=False, rich_markup_mode="rich")


@serve.command("serve", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@with_options("serve", OWN)
def serve_command(
    context: typer.Context,
    model_path: Annotated[
        str,
        typer.Option(
            "--model-path",
            "--model",
            metavar="MODEL",
            help="A folder with a causal LM and its tokenizer, or the name of a model in Hugging Face's cache.",
            rich_help_panel=SERVER,
        ),
    ],
    host: Annotated[
        str, typer.Option(metavar="HOST", help="The address to listen at; 0.0.0.0: all.", rich_help_panel=SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", help="The port; 0: any that is free.", rich_help_panel=SERVER)
    ] = 30000,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What clients call the model. Default: what --model-path says.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="ENGINE",
            help="Who runs the model: polyattn, or vllm or sglang where they are installed, with polyattn in them.",
            rich_help_panel=SERVER,
        ),
    ] = "polyattn",
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run code that comes with the model.", rich_help_panel=SERVER)
    ] = False,
    log_level: Annotated[
        str, typer.Option(metavar="LEVEL", help="How much the server says of itself.", rich_help_panel=SERVER)
    ] = "warning",
    drain_seconds: Annotated[
        int,
        typer.Option(
            metavar="S",
            help="Seconds that requests have to end in after SIGTERM; the others are cancelled.",
            rich_help_panel=SERVER,
        ),
    ] = 120,
    device: Device = "auto",
    dry_run: Annotated[
        bool,
        typer.Option(
            help="Say who would serve each phase and why, or what would be run, and run nothing.", rich_help_panel=PLAN
        ),
    ] = False,
    assume_platform: Annotated[
        str | None,
        typer.Option(
            metavar="PLATFORM",
            help="With --dry-run: the machine that is asked about, as in explain. Default: this machine.",
            rich_help_panel=PLAN,
        ),
    ] = None,
    assume_installed: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="With --dry-run: distributions that count as installed there, comma separated.",
            rich_help_panel=PLAN,
        ),
    ] = None,
    *,
    given: Mapping[str, Any],
    as_json: Json = False,
) -> None:
    """Serve a causal LM over OpenAI's protocol: continuous batching over a paged KV cache, one backend per phase.

    Backends, page size and dtype that are not given come from the environment and the config file. Flags that only
    --engine vllm or sglang has are passed on to it.
    """
    share = given["mem_fraction_static"]
    if share is not None and not 0 < share < 1:
        raise ConfigError(f"--mem-fraction-static {share}: give a share between 0 and 1, such as 0.88")
    for flag, value, fine, allowed in (
        ("--port", port, 0 <= port < 2**16, "0 to 65535; 0 is any that is free"),
        ("--drain-seconds", drain_seconds, drain_seconds >= 0, "0 or more"),
        ("--served-model-name", "''", served_model_name != "", "a name, or leave it out"),
    ):
        if not fine:
            raise ConfigError(f"{flag} {value}: give {allowed}")
    name = served_model_name or model_path
    if engine not in ENGINES:
        raise ConfigError(f"--engine {engine!r}: allowed are {', '.join(ENGINES)}.{did_you_mean(engine, ENGINES)}")
    if engine != "polyattn":
        if assume_platform or assume_installed:
            raise ConfigError(
                f"--assume-platform and --assume-installed are for plans of polyattn's own engine: --engine {engine} "
                f"makes its choices when it runs. Leave them out, or ask `polyattn explain`"
            )
        own = {
            "host": host, "port": port, "served_model_name": served_model_name, "trust_remote_code": trust_remote_code,
        }  # fmt: skip
        usual = {option.name: option.default for option in OWN}
        asked = {flag: value for flag, value in given.items() if value != usual.get(flag)}
        words, variables = command_of(engine, model_path, own, asked, context.args)
        if dry_run:
            _print_command(words, variables, as_json)
            return
        run_engine(engine, words, variables)
    _check_left(context.args)
    if not dry_run and (assume_platform or assume_installed):
        raise ConfigError("--assume-platform and --assume-installed are about another machine: add --dry-run")
    settings = overrides.configure_by("the command line", settings_of(given))
    levels = tuple(given[f"speculative_{word}"] for word in ("num_steps", "eagle_topk", "num_draft_tokens"))
    _check_drafts(given, levels)
    if dry_run:
        from .serve_plan import print_plan

        print_plan(model_path, given, settings, assume_platform, assume_installed, as_json=as_json)
        return
    if as_json:
        raise ConfigError("--json is the form of --dry-run's answer: add --dry-run, or leave it out")
    _serve(
        folder_of(model_path), name, given, settings, levels,
        device=device, host=host, port=port, log_level=log_level, drain=drain_seconds, trust=trust_remote_code,
    )  # fmt: skip


def _check_left(words: list[str]) -> None:
    """Refuse what no flag of this command takes."""
    if not words:
        return
    flag = words[0].partition("=")[0]
    shown = words[0] if len(words) == 1 or words[1].startswith("-") else f"{words[0]} {words[1]}"
    known = [one for option in (*options_of("serve"), *OWN) for one in option.flags]
    raise ConfigError(
        f"{shown}: polyattn's own engine has no flag {flag}.{did_you_mean(flag, known)} It runs a model on one device "
        f"as it was saved; add --engine sglang or --engine vllm, which pass their flags on to those engines, or leave "
        f"it out"
    )


def _check_drafts(given: Mapping[str, Any], levels: tuple[int | None, ...]) -> None:
    if given["speculative_draft_model_path"] is None and any(level is not None for level in levels):
        raise ConfigError(
            "--speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens say how to draft; "
            "give --speculative-draft-model-path too, or leave them out"
        )


def _serve(
    folder: Path,
    name: str,
    given: Mapping[str, Any],
    settings: Settings,
    levels: tuple[int | None, ...],
    *,
    device: str,
    host: str,
    port: int,
    log_level: str,
    drain: int,
    trust: bool,
) -> None:
    server = _server_parts()
    more = {"trust_remote_code": True} if trust else {}
    model, tokenizer = load_model(folder, device, **more), load_tokenizer(folder, **more)
    reader, why_not = load_images(folder, model, tokenizer)
    check_tower(given, why_not)
    engine = _engine(model, given, settings, levels, device, more)
    overrides.check_components()  # every layer is built: what reached none never will
    app = server.build_app(
        engine, model, tokenizer if reader is None else reader, name, waiting=given["max_queued_requests"], drain=drain
    )
    console = screen(errors=True)
    for said in _unserved(model):
        console.print(f"note: {said}")
    server.run_app(
        app, host, port, log_level=log_level, drain=drain,
        ready=lambda at: console.print(
            panel(
                name,
                facts(
                    [
                        ("answers at", at),
                        *((f"{phase} by", backend) for phase, backend in engine.backends.items()),
                        ("context", f"{engine.longest} tokens"),
                        ("KV cache", f"{_tokens(engine)} tokens in pages of {engine.config.cache.page_size}"),
                    ]
                ),
            )
        ),
    )  # fmt: skip


def _server_parts() -> Any:
    try:
        from ..integrations.transformers import server

        server.check()
    except ImportError as exc:
        raise BackendUnavailableError(
            f"the server needs {exc.name or exc}, which is not here: pip install 'polyattn[serve]'"
        ) from exc
    return server


def _engine(
    model: Any,
    given: Mapping[str, Any],
    settings: Settings,
    levels: tuple[int | None, ...],
    device: str,
    more: Mapping[str, Any],
) -> Engine:
    from ..serving.engine import Engine, EngineConfig
    from .serve_plan import cache_for

    draft = given["speculative_draft_model_path"]
    steps = 0 if draft is None else 3 if levels[0] is None else levels[0]
    asked = given["context_length"]
    runner = runner_of(model, asked + steps if asked else 0)
    length = asked or max(runner.max_positions - steps, 0)
    cache = cache_for(runner, settings, given)
    return Engine(
        runner,
        EngineConfig(
            cache=cache,
            pages=_pages(runner, cache, given, length),
            max_requests=given["max_running_requests"],
            max_tokens=length,
            max_batch_tokens=given["chunked_prefill_size"],
            prefix_caching=not given["disable_radix_cache"],
            linear=linear_choice(given, type(model).__name__, has=bool(runner.recurrent)),
            speculative=None
            if draft is None
            else speculative_of(load_model(draft, device, **more), length + steps, *levels),
            graphs=not given["disable_cuda_graph"],
            batch_invariant=given["batch_invariant"],
        ),
    )


def _pages(runner: Any, cache: KVCacheConfig, given: Mapping[str, Any], length: int) -> int:
    """Return the pages of each group, 0 = as many as the running requests need at full length."""
    import torch

    from ..serving.kv_cache.pool import KVPool, attention_layers

    share = given["mem_fraction_static"]
    if given["max_total_tokens"] is not None:
        return 1 + -(-int(given["max_total_tokens"]) // cache.page_size)
    if runner.device.type != "cuda":
        if share is not None:
            raise ConfigError(
                f"--mem-fraction-static {share}: {runner.device} has no memory of its own to take "
                f"a share of; give --max-total-tokens"
            )
        return 0
    layers = attention_layers(runner.layers)
    # Of one page: what a page of all layers takes.
    small = KVPool(layers, cache, 1, requests=1, dtype=runner.dtype, device=runner.device)
    page = sum(tensor.nbytes for layer in layers for tensor in small.cache(layer.layer_id).tensors)
    free, total = torch.cuda.mem_get_info(runner.device)
    room = int(total * (share or 0.88)) - (total - free)
    wanted = 1 + given["max_running_requests"] * -(-length // cache.page_size)
    pages = min(room // page, wanted)
    if pages < 2:
        raise ConfigError(
            f"--mem-fraction-static leaves {max(room, 0)} bytes for the KV cache, a page takes {page}; raise it, or "
            f"choose a smaller model"
        )
    return int(pages)


def _tokens(engine: Engine) -> int:
    return min(allocator.capacity for allocator in engine.memory.allocators) * engine.config.cache.page_size


def _unserved(model: Any) -> list[str]:
    """Say which of the model's own wishes for its text this engine does not serve."""
    config, found = model.generation_config, []
    usual: dict[str, tuple[Any, ...]] = {
        "repetition_penalty": (None, 1.0),
        "no_repeat_ngram_size": (None, 0),
        "min_p": (None, 0.0),
        "typical_p": (None, 1.0),
        "num_beams": (None, 1),
        "bad_words_ids": (None,),
        "suppress_tokens": (None,),
    }
    for field, plain in usual.items():
        if (value := getattr(config, field, None)) not in plain:
            found.append(f"generation_config.json asks for {field}={value}, which this engine does not serve")
    return found


def _print_command(words: list[str], variables: Mapping[str, str], as_json: bool) -> None:
    if as_json:
        show_json({"command": words, "environment": dict(variables)})
        return
    console = screen()
    for variable, value in variables.items():
        console.print(f"{variable}={value}", soft_wrap=True)
    console.print(" ".join(words), soft_wrap=True)
