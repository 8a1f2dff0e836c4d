"""This module declares each flag that several commands share once: what it is called, what it sets, and which commands
take it.

`with_options` gives a command all flags of this table that name it. A flag of a setting has the setting's name.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..selection.config import load_settings

__all__ = [
    "OPTIONS",
    "Device",
    "Isolate",
    "Json",
    "Option",
    "options_of",
    "settings_of",
    "variables_of",
    "with_options",
]

WHO, CACHE, DRAFTS = "Which backend", "KV cache", "Speculative decoding"

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="A torch device; auto: a GPU or its like, else the CPU.")
]
Isolate = Annotated[
    str,
    typer.Option(
        metavar="WHO",
        help="Who is tried in a process of its own before it is timed: auto (other packages' backends), always, never.",
    ),
]


@dataclasses.dataclass(frozen=True)
class Option:
    """An option is one flag, as data.

    Attributes:
        name: the parameter, and the flag once its underscores are dashes.
        kind: type of the value; bool is a switch. A flag that is not given is None, a switch False.
        help: what it says, a sentence. usual: what is taken where it is not given. metavar: the word for its value.
        panel: heading of the help it stands under. commands: who takes it. also: other flags of the same meaning.
        default: the value where it is not given. least: the smallest that is taken.
        setting: whether it is a setting of `polyattn.selection.config.Settings`.
    """

    name: str
    kind: type
    help: str
    metavar: str = ""
    panel: str = WHO
    commands: frozenset[str] = frozenset()
    usual: str = ""
    also: tuple[str, ...] = ()
    setting: bool = False
    default: Any = None
    least: int | None = None

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def flags(self) -> tuple[str, ...]:
        return (self.flag, *self.also)

    def parameter(self) -> inspect.Parameter:
        """Make the flag a parameter of a typer command."""
        switch = self.kind is bool
        told = typer.Option(
            *self.flags,
            metavar=None if switch else self.metavar or None,
            help=f"{self.help} Default: {self.usual}." if self.usual else self.help,
            rich_help_panel=self.panel,
            min=self.least,
        )
        kind: Any = self.kind if switch or self.default is not None else self.kind | None
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if switch else self.default,
            annotation=Annotated[kind, told],
        )


_ENGINE = frozenset({"generate", "serve"})
_SETTINGS = _ENGINE | {"config check"}
_CHOICE = _SETTINGS | {"explain"}
_VARIABLES = frozenset({"trace"})
"""A command that runs another program tells it settings by their variables: it takes the flags that have one."""

OPTIONS: tuple[Option, ...] = (
    Option(
        "attention_backend",
        str,
        "The backend of all calls that name none.",
        "NAME",
        WHO,
        _CHOICE | _VARIABLES,
        setting=True,
    ),
    Option(
        "prefill_attention_backend",
        str,
        "The backend of prefill and extend; with --decode-attention-backend, the pair is checked before anything runs.",
        "NAME",
        WHO,
        _CHOICE,
        usual="that of --attention-backend",
        setting=True,
    ),
    Option(
        "decode_attention_backend",
        str,
        "The backend of decode; alone, prefill stays with --attention-backend.",
        "NAME",
        WHO,
        _CHOICE,
        usual="that of --attention-backend",
        setting=True,
    ),
    Option(
        "speculative_attention_mode",
        str,
        "The phase whose backend verifies drafts: prefill or decode.",
        "PHASE",
        WHO,
        _CHOICE,
        usual="prefill",
        setting=True,
    ),
    Option(
        "mm_attention_backend",
        str,
        "The backend of multimodal towers, where the model has any.",
        "NAME",
        WHO,
        _SETTINGS,
        setting=True,
    ),
    Option(
        "component_attention_backends",
        str,
        "Backends of single components: component=backend pairs, comma separated.",
        "PAIRS",
        WHO,
        _SETTINGS | _VARIABLES,
        setting=True,
    ),
    Option(
        "attention_backend_config",
        str,
        "Options of backends: a path, a JSON object, or key=value pairs.",
        "OPTIONS",
        WHO,
        _CHOICE | _VARIABLES,
        setting=True,
    ),
    *(
        Option(
            f"linear_attn_{phase}backend",
            str,
            f"The backend of linear attention{where}.",
            "NAME",
            WHO,
            _CHOICE,
            usual="that of --linear-attn-backend" if phase else "",
        )
        for phase, where in (("", ""), ("prefill_", " in prefill"), ("decode_", " in decode and of drafts"))
    ),
    Option(
        "rules",
        str,
        "Who chooses where nothing was measured: model, the cost model first, or seed, the platform rules alone.",
        "WHO",
        WHO,
        _CHOICE | _VARIABLES,
        usual="model",
        setting=True,
    ),
    Option("strict", bool, "Take a documented fallback for an error.", "", WHO, _CHOICE | _VARIABLES, setting=True),
    Option(
        "page_size",
        int,
        "Tokens per page of the KV cache.",
        "TOKENS",
        CACHE,
        _SETTINGS,
        usual="16, else the first of 64, 128, 32, 1 that all backends take, or that the platform's choice needs",
        setting=True,
    ),
    Option(
        "kv_cache_dtype",
        str,
        "The dtype of the KV cache: auto, bf16, fp16, fp8_e4m3, fp8_e5m2, int8, fp4_e2m1. int8 has no NaN: it stores a "
        "number instead, so that a model's NaN no longer shows.",
        "DTYPE",
        CACHE,
        _SETTINGS,
        usual="auto, that of the model",
        setting=True,
    ),
    Option(
        "kv_cache_scales",
        str,
        "Granularity of the scales of a quantised KV cache: tensor, head, token, block16, block128. For latent rows "
        "tensor is one scale.",
        "KIND",
        CACHE,
        _ENGINE,
        usual="that of the dtype",
    ),
    Option("disable_cuda_graph", bool, "Record no device graphs of decode and verify steps.", "", CACHE, _ENGINE),
    Option(
        "batch_invariant",
        bool,
        "Attention gives a request the same bits whatever is served beside it. Prompts then share no pages.",
        "",
        CACHE,
        _ENGINE,
    ),
    Option(
        "speculative_draft_model_path",
        Path,
        "A folder with a smaller causal LM of the same vocabulary, which drafts.",
        "DIR",
        DRAFTS,
        _ENGINE,
    ),
    Option("speculative_num_steps", int, "Levels that are drafted.", "N", DRAFTS, _ENGINE, usual="3"),
    Option(
        "speculative_eagle_topk",
        int,
        "Continuations of each node: 1 = a chain, more = a tree.",
        "K",
        DRAFTS,
        _ENGINE,
        usual="1",
    ),
    Option(
        "speculative_num_draft_tokens",
        int,
        "Nodes that are verified, the last accepted token among them.",
        "N",
        DRAFTS,
        _ENGINE,
        usual="steps * topk + 1",
    ),
)
"""The shared flags, in the order of the help."""


def options_of(command: str) -> tuple[Option, ...]:
    """Return the shared flags that a command takes, in the order of its help."""
    return tuple(option for option in OPTIONS if command in option.commands)


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the values of a command that are settings: setting -> value, None = not given."""
    names = (option.name for option in OPTIONS if option.setting and option.name in given)
    # A switch that is not given leaves its setting to the environment and the file.
    return {name: None if given[name] is False else given[name] for name in names}


def variables_of(given: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables that tell another process the settings a command was given.

    Raises:
        ConfigError: a value is none of its setting.
    """
    settings = {name: value for name, value in settings_of(given).items() if value is not None}
    load_settings(settings, environ={})
    return {f"POLYATTN_{name.upper()}": "1" if value is True else str(value) for name, value in settings.items()}


def with_options(command: str, more: Iterable[Option] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the shared flags that name it; it gets their values as `given`, name -> value.

    Args:
        command: as `OPTIONS` name it. more: further flags that come as data, told after the shared ones.
    """
    taken = (*options_of(command), *more)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**values: Any) -> None:
            given = {option.name: values.pop(option.name) for option in taken}
            function(given=given, **values)

        # typer reads the signature; what `wraps` kept would name the parameters of the function inside.
        del run.__wrapped__
        run.__annotations__ = {}
        run.__signature__ = _signature(function, taken)  # type: ignore[attr-defined]
        return run

    return decorate


def _signature(function: Callable[..., None], taken: Iterable[Option]) -> inspect.Signature:
    """Make the signature of a command: its own parameters, and one for each flag in the place of `given`."""
    own = []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.name == "given":
            own += [option.parameter() for option in taken]
        else:
            own.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    return inspect.Signature(own)
