"""This module starts other engines with polyattn in them: it says in their words what `polyattn serve` was told."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ..errors import BackendUnavailableError, ConfigError
from ..selection.config import load_settings
from .options import options_of, settings_of, variables_of

__all__ = ["ENGINES", "command_of", "run_engine"]


@dataclasses.dataclass(frozen=True)
class _Engine:
    """An engine is a program that serves.

    Attributes:
        command: what runs it, the model's path last. chosen: its flags that choose polyattn. backend: what polyattn is
            called there, for drafts. flags: our name -> its flag, empty where it says nothing there; what is missing it
            does not have. words: values that it calls otherwise. asks: whether it asks polyattn which page sizes a
            layer takes; else it keeps the pages that it is told, of one token where it is told nothing.
    """

    command: tuple[str, ...]
    chosen: tuple[str, ...]
    backend: str
    flags: Mapping[str, str]
    words: Mapping[str, str] = dataclasses.field(default_factory=dict)
    asks: bool = False


_SAME = (
    *("host", "port", "served_model_name", "trust_remote_code", "context_length", "max_running_requests"),
    *("max_queued_requests", "chunked_prefill_size", "max_total_tokens", "mem_fraction_static", "page_size"),
    *(
        "kv_cache_dtype",
        "disable_cuda_graph",
        "disable_radix_cache",
        "mm_attention_backend",
        "speculative_attention_mode",
    ),
    *("speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk"),
    "speculative_num_draft_tokens",
)
_LINEAR = ("linear_attn_backend", "linear_attn_prefill_backend", "linear_attn_decode_backend")
_KINDS = {"full_attention": "POLYATTN", "sliding_window": "POLYATTN", "mla_attention": "POLYATTN_MLA"}
"""vLLM's kinds of caches -> polyattn's name there: a model may have several."""
_INSTALLED = {
    "sglang": _Engine(
        ("-m", "sglang.launch_server", "--model-path"),
        # Its backend has no graphs of whole steps.
        ("--attention-backend", "polyattn", "--disable-cuda-graph"),
        "polyattn",
        {
            # Its layers of linear attention run its own kernels.
            **{name: f"--{name.replace('_', '-')}" for name in (*_SAME, *_LINEAR)},
            "disable_cuda_graph": "",
        },
        {"bf16": "bfloat16"},
    ),
    "vllm": _Engine(
        ("-m", "vllm.entrypoints.cli.main", "serve"),
        ("--attention-config", json.dumps({"backend_per_kind": _KINDS})),
        "POLYATTN",
        {
            "host": "--host",
            "port": "--port",
            "served_model_name": "--served-model-name",
            "trust_remote_code": "--trust-remote-code",
            "context_length": "--max-model-len",
            "max_running_requests": "--max-num-seqs",
            "chunked_prefill_size": "--max-num-batched-tokens",
            "mem_fraction_static": "--gpu-memory-utilization",
            "disable_radix_cache": "--no-enable-prefix-caching",
            "page_size": "--block-size",
            "kv_cache_dtype": "--kv-cache-dtype",
            "disable_cuda_graph": "--enforce-eager",
            "speculative_draft_model_path": "--speculative-config",
            "speculative_num_steps": "",
        },
        words={"bf16": "bfloat16", "fp16": "float16"},
        asks=True,
    ),
}
ENGINES = ("polyattn", *_INSTALLED)
"""Who can run the model of `polyattn serve`."""
PAGE_SIZES = (1, 64, 128, 16, 32, 256)
"""Tried in this order for an engine that keeps pages of one token unless it is told: what SGLang sets for its own
backends, then smaller ones."""


def command_of(
    engine: str, model: str, own: Mapping[str, Any], given: Mapping[str, Any], more: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the words that start an engine, and the environment variables that tell polyattn in it what to choose.

    Args:
        engine: of `ENGINES`. model: its path or name. own, given: flags of the server, and those it shares. more:
            words that only the engine knows; they are passed on.

    Raises:
        ConfigError: a flag that the engine has nothing for; backends that share no page size.
    """
    kind = _INSTALLED[engine]
    given = {**given, **_cache(engine, given)}
    words = [sys.executable, *kind.command, model, *kind.chosen]
    # What this command calls settings of attention is polyattn's own in there too; the rest is the engine's.
    chosen = {option.name for option in options_of("serve") if option.setting} - set(_SAME)
    for name, value in {**own, **given}.items():
        if name in chosen or value is None or value is False:
            continue
        if name not in kind.flags:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value}: {engine} has no such flag; leave it out, or use --engine "
                f"{' or '.join(other for other in ENGINES if other != engine)}"
            )
        flag = kind.flags[name]
        if flag == "--speculative-config":
            words += [flag, json.dumps(_drafts(value, given, kind.backend))]
        elif flag:
            words += [flag] if isinstance(value, bool) else [flag, kind.words.get(str(value), str(value))]
    return [*words, *more], variables_of({name: value for name, value in given.items() if name in chosen})


def _cache(engine: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the engine has to be told of its cache and no flag says: what the config file has, and the pages
    that the backends need."""
    settings = load_settings(settings_of(given) or None)
    found: dict[str, Any] = {
        name: value
        for name in ("page_size", "kv_cache_dtype")
        if given.get(name) is None and (value := getattr(settings, name)) is not None
    }
    own = {"extend": settings.prefill_attention_backend, "decode": settings.decode_attention_backend}
    names = {phase: name for phase, one in own.items() if (name := one or settings.attention_backend)}
    if settings.page_size is not None or _INSTALLED[engine].asks or not names:
        return found
    from .explain import here
    from .probes import shared_page

    machine = here()
    size = shared_page(names, machine["platform"], machine["arch"], PAGE_SIZES)
    if size is None:
        raise ConfigError(
            f"--engine {engine} keeps a cache in pages of one size, and {' and '.join(dict.fromkeys(names.values()))} "
            f"share none of {', '.join(map(str, PAGE_SIZES))}: give --page-size, or name other backends; `polyattn "
            f"matrix` has the page sizes of each"
        )
    return found if size == 1 else {**found, "page_size": size}


def _drafts(model: Any, given: Mapping[str, Any], backend: str) -> dict[str, Any]:
    # Its drafts do not inherit the backend.
    steps = given["speculative_num_steps"]
    return {"model": str(model), "num_speculative_tokens": 3 if steps is None else steps, "attention_backend": backend}


def run_engine(engine: str, words: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Become the engine.

    Raises:
        BackendUnavailableError: it is not installed.
    """
    if importlib.util.find_spec(engine) is None:
        raise BackendUnavailableError(
            f"--engine {engine}: {engine} is not installed here; pip install {engine} beside polyattn, which it then "
            f"finds by itself, or leave --engine out"
        )
    os.execve(words[0], list(words), {**os.environ, **variables})
