"""The settings of the command line, the environment and a file: their types, their merging, their problems."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ... import envvars
from ...contract import BackendInfo
from ...contract.vocabulary import DTYPE_WORDS
from ...errors import ConfigError, did_you_mean
from ..aliases import own_names
from .options import check_options, resolve_options
from .reading import parse_backend_config, read_config_file
from .words import show

__all__ = [
    "KV_CACHE_DTYPES",
    "Settings",
    "backend_names",
    "check_settings",
    "load_settings",
    "named_backends",
    "parse_components",
]

KV_CACHE_DTYPES: dict[str, str] = {"auto": "auto", **{w: name for w, name in DTYPE_WORDS.items() if w != "fp64"}}
"""What `--kv-cache-dtype` accepts -> the dtype name that requests use."""

RULES = ("model", "seed")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command line, the environment and a file say together. None or empty: not set.

    Attributes:
        attention_backend: backend of every call that names none.
        prefill_attention_backend, decode_attention_backend: per phase; one alone leaves the other phase to
            `attention_backend`.
        speculative_attention_mode: "prefill" or "decode": whose backend verifies drafts.
        mm_attention_backend: backend of multimodal towers.
        kv_cache_dtype: "auto" or a dtype of `records.DTYPES`.
        page_size: tokens per page, >= 1.
        component_attention_backends: "component" or "component.role" -> backend.
        attention_backend_config: backend -> its options, merged option by option, not yet checked.
        strict: a documented fallback, or a broken plugin, is an error.
        rules: who chooses where nothing was measured: "model", the cost model before the platform rules, or "seed",
            the platform rules alone.
        sources: where each came from: a field's name, "component_attention_backends.NAME",
            "attention_backend_config.BACKEND" or "attention_backend_config.BACKEND.OPTION" -> "command line",
            "environment POLYATTN_...", "config file PATH". What several layers gave names all, the strongest first.
    """

    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    speculative_attention_mode: str | None = None
    mm_attention_backend: str | None = None
    kv_cache_dtype: str | None = None
    page_size: int | None = None
    component_attention_backends: Mapping[str, str] = dataclasses.field(default_factory=dict)
    attention_backend_config: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    strict: bool = False
    rules: str = "model"
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def source(self, name: str) -> str:
        """Where a setting came from, "default" when nothing set it."""
        return self.sources.get(name, "default")

    def options_of(self, backend: BackendInfo) -> tuple[dict[str, Any], str]:
        """The options given for a backend under each of its names (the last wins), unchecked.

        Returns:
            (options, the words that name their source in messages).
        """
        names = _names(backend) if self.attention_backend_config else []  # asked at each first call
        given = [name for name in names if name in self.attention_backend_config]
        options = {key: value for name in given for key, value in self.attention_backend_config[name].items()}
        origins = dict.fromkeys(self.source(f"{_OPTIONS}.{name}") for name in given)
        return options, f"{_OPTIONS} of {' and '.join(given) or backend.name} ({', '.join(origins) or 'default'})"


_BACKEND = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(?:/[A-Za-z0-9_.-]+)*(?:@[A-Za-z0-9_-]+)?")


def _backend(name: str, value: Any, source: str) -> str:
    word = value.strip() if isinstance(value, str) else ""
    if not _BACKEND.fullmatch(word):
        raise ConfigError(f"{name}={show(value)} ({source}) is not a backend name, such as fa or fa@cuda")
    return word


def _mode(name: str, value: Any, source: str) -> str:
    if value not in ("prefill", "decode"):
        near = did_you_mean(str(value), ("prefill", "decode"))
        raise ConfigError(f"{name}={show(value)} ({source}) is not 'prefill' or 'decode'.{near}")
    return str(value)


def _rules(name: str, value: Any, source: str) -> str:
    if value not in RULES:
        near = did_you_mean(str(value), RULES)
        raise ConfigError(f"{name}={show(value)} ({source}) is not {' or '.join(map(repr, RULES))}.{near}")
    return str(value)


def _kv_dtype(name: str, value: Any, source: str) -> str:
    if not isinstance(value, str) or value not in KV_CACHE_DTYPES:
        near = did_you_mean(str(value), KV_CACHE_DTYPES)
        raise ConfigError(f"{name}={show(value)} ({source}) is not one of {', '.join(KV_CACHE_DTYPES)}.{near}")
    return KV_CACHE_DTYPES[value]


def _page_size(name: str, value: Any, source: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={show(value)} ({source}) is not a whole number of tokens >= 1, such as 64")
    return value


def _strict(name: str, value: Any, source: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={show(value)} ({source}) is not true or false")
    return value


_SCALARS: dict[str, Callable[[str, Any, str], Any]] = {
    "attention_backend": _backend,
    "prefill_attention_backend": _backend,
    "decode_attention_backend": _backend,
    "speculative_attention_mode": _mode,
    "mm_attention_backend": _backend,
    "kv_cache_dtype": _kv_dtype,
    "page_size": _page_size,
    "strict": _strict,
    "rules": _rules,
}
_COMPONENTS, _OPTIONS = "component_attention_backends", "attention_backend_config"
_NAMES = tuple(field.name for field in dataclasses.fields(Settings) if field.name != "sources")
_COMPONENT = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(?:\.[A-Za-z_][A-Za-z0-9_-]*)?")


def parse_components(text: str | Mapping[str, Any], *, where: str = "--component-attention-backends") -> dict[str, str]:
    """`component=backend` pairs: "text_encoder=torch_sdpa,transformer.cross=fa", or a mapping.

    A mapping may nest the role, as TOML's dotted keys do: {"transformer": {"cross": "fa"}}.

    Returns:
        "component" or "component.role" -> backend name.
    """
    pairs: list[tuple[Any, Any]] = []
    if isinstance(text, str):
        for piece in text.split(","):
            name, equals, backend = (part.strip() for part in piece.partition("="))
            if not equals:
                raise ConfigError(
                    f"{where}: {piece.strip()!r} is not component=backend; give for example "
                    "text_encoder=torch_sdpa,transformer.cross=fa"
                )
            pairs.append((name, backend))
    elif isinstance(text, Mapping):
        for name, backend in text.items():
            if isinstance(backend, Mapping):
                pairs += [(f"{name}.{role}", chosen) for role, chosen in backend.items()]
            else:
                pairs.append((name, backend))
    else:
        raise ConfigError(f"{where}: {show(text)} is a {type(text).__name__}; give component=backend pairs")
    found: dict[str, str] = {}
    for name, backend in pairs:
        if not isinstance(name, str) or not _COMPONENT.fullmatch(name):
            raise ConfigError(
                f"{where}: {name!r} is not a component; give the pipeline's module name, such as text_encoder, "
                "or component.role, such as transformer.cross"
            )
        if name in found:
            raise ConfigError(f"{where}: the component {name!r} is given twice")
        found[name] = _backend(name, backend, where)
    return found


class _Problems:
    """What is wrong in several places, raised as one error: whoever repairs it sees all of it."""

    def __init__(self) -> None:
        self.found: list[ConfigError] = []

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as problem:
            self.found.append(problem)

    def end(self) -> None:
        """Raise what was found, if anything was, one line for each."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            raise ConfigError("\n".join(map(str, self.found))) from self.found[0]


def load_settings(
    cli: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: str | os.PathLike[str] | None = None,
    *,
    cli_source: str = "command line",
) -> Settings:
    """The settings of the command line, the environment and a config file, in this order of precedence.

    Components and backend options are merged key by key, everything else is replaced.

    Args:
        cli: setting -> value; dashes or underscores; None = not given.
        environ: os.environ unless given, and then variables that nothing reads are warned of, once per process. A
            variable set to an empty string counts as unset.
        file: config file; without it POLYATTN_CONFIG names one, or there is none.
        cli_source: what `sources` and messages call the first layer (`configure()` passes its own name).

    Raises:
        ConfigError: unknown keys (with the near match) and wrong values of all layers, with their sources, a line each.
    """
    if environ is None:
        envvars.warn_unknown()
    env = os.environ if environ is None else environ
    layers: list[_Layer] = []
    problems = _Problems()
    with problems.kept():
        layers.append(_from_file(env, file))
    with problems.kept():
        layers.append(_from_environ(env))
    with problems.kept():
        layers.append(_from_mapping(cli or {}, cli_source))
    problems.end()
    values: dict[str, Any] = {_COMPONENTS: {}, _OPTIONS: {}}
    sources: dict[str, str] = {}
    for layer in layers:
        for name, (value, source) in layer.items():
            sources[name] = source
            if name == _COMPONENTS:
                values[name].update(value)
                sources.update({f"{name}.{component}": source for component in value})
            elif name == _OPTIONS:
                for backend, options in value.items():
                    values[name].setdefault(backend, {}).update(options)
                    sources.update({f"{name}.{backend}.{option}": source for option in options})
                    weaker = sources.get(f"{name}.{backend}")
                    sources[f"{name}.{backend}"] = f"{source}, {weaker}" if weaker else source
            else:
                values[name] = value
    return Settings(**values, sources=sources)


_Layer = dict[str, tuple[Any, str]]


def _from_file(env: Mapping[str, str], file: str | os.PathLike[str] | None) -> _Layer:
    if file is not None:
        return _from_mapping(read_config_file(file), f"config file {os.fspath(file)}")
    path = (envvars.text("POLYATTN_CONFIG", env) or "").strip()
    return _from_mapping(read_config_file(path, where="POLYATTN_CONFIG"), f"config file {path}") if path else {}


def _from_environ(env: Mapping[str, str]) -> _Layer:
    given = {name: (envvars.text(name, env) or "").strip() for name in envvars.ENVVARS}
    layer: _Layer = {}
    problems = _Problems()
    for name in _NAMES:
        variable = f"POLYATTN_{name.upper()}"
        if given.get(variable):
            with problems.kept():
                value = envvars.flag(variable, env) if name == "strict" else given[variable]
                layer[name] = (value, f"environment {variable}")
    return _checked_layer(layer, problems)


def _from_mapping(raw: Mapping[str, Any], source: str) -> _Layer:
    layer: _Layer = {}
    problems = _Problems()
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        with problems.kept():
            if name not in _NAMES:
                raise ConfigError(
                    f"{source}: there is no setting {key!r}.{did_you_mean(name, _NAMES)} Settings: {', '.join(_NAMES)}."
                )
            if name in layer:
                raise ConfigError(f"{source}: the setting {name!r} is given twice, with dashes and with underscores")
            if value is not None:
                layer[name] = (value, source)
    return _checked_layer(layer, problems)


def _checked_layer(layer: _Layer, problems: _Problems) -> _Layer:
    """Values in their final types. Flat options find their backend here, within the layer.

    Raises:
        ConfigError: of all `problems`, those that were found before among them.
    """
    out: _Layer = {}
    for name, check in _SCALARS.items():
        if name in layer:
            value, source = layer[name]
            with problems.kept():
                out[name] = (check(name, value, source), source)
    if _COMPONENTS in layer:
        value, source = layer[_COMPONENTS]
        with problems.kept():
            out[_COMPONENTS] = (parse_components(value, where=f"{_COMPONENTS} ({source})"), source)
    if _OPTIONS in layer:
        value, source = layer[_OPTIONS]
        where = f"{_OPTIONS} ({source})"
        with problems.kept():
            options = parse_backend_config(value, where=where)
            # Whose they are cannot be said where the backend's name is no name: one problem, told once.
            if "attention_backend" in out or "attention_backend" not in layer:
                selected = out["attention_backend"][0] if "attention_backend" in out else None
                out[_OPTIONS] = (resolve_options(options, selected, where), source)
    problems.end()
    return out


def backend_names(backends: Iterable[BackendInfo]) -> dict[str, tuple[BackendInfo, ...]]:
    """Every word that names a backend (name, alias, name/kind, with @platform) -> the backends it can mean."""
    found: dict[str, list[BackendInfo]] = {}
    for info in backends:
        for name in _names(info):
            found.setdefault(name, []).append(info)
    return {name: tuple(infos) for name, infos in found.items()}


def _names(info: BackendInfo) -> list[str]:
    """What people call a backend, from what may be several to what is one."""
    own = own_names(info)
    aliases = (alias.name for alias in info.aliases)
    return list(dict.fromkeys((info.name, *aliases, *own, *(f"{name}@{info.platform}" for name in own))))


def named_backends(settings: Settings) -> list[tuple[str, str]]:
    """(setting, the backend that it names), of every setting and component that names one."""
    fields = [name for name, check in _SCALARS.items() if check is _backend and getattr(settings, name) is not None]
    components = settings.component_attention_backends.items()
    return [*((name, getattr(settings, name)) for name in fields), *((f"{_COMPONENTS}.{k}", v) for k, v in components)]


def check_settings(
    settings: Settings,
    known_backends: Mapping[str, BackendInfo | Sequence[BackendInfo]],
    more: Sequence[tuple[str, str]] = (),
) -> list[str]:
    """What is wrong with settings that parsed: unknown or planned backends, options against their schemas, files.

    Args:
        known_backends: name -> the backend, or the backends of that name on all platforms (`backend_names`). Options
            are fine when the schema of one of them takes them.
        more: (what names it, the backend), of whatever else names one; `settings.sources` has where it comes from.

    Returns:
        One sentence per problem, each with its source; empty = fine.
    """
    known = {k: (v,) if isinstance(v, BackendInfo) else tuple(v) for k, v in known_backends.items()}
    asked = [*named_backends(settings), *more]
    problems: list[str] = []
    for name, backend in asked:
        if problem := _backend_problem(backend, known):
            problems.append(f"{name}={backend!r} ({settings.source(name)}) {problem}")
    for backend in settings.attention_backend_config:
        if backend not in known:
            where = f"{_OPTIONS} of {backend} ({settings.source(f'{_OPTIONS}.{backend}')})"
            problems.append(f"{where}: {backend!r} {_unknown(backend, known)}")
    # A backend that is asked for and given no options may lack required ones.
    for backend in dict.fromkeys((*settings.attention_backend_config, *(backend for _, backend in asked))):
        if backend in known:
            # The platform that comes nearest speaks; of several, one that takes options at all.
            found = [(_option_problems(info, *settings.options_of(info)), not info.config) for info in known[backend]]
            nearest, _ = min(found, key=lambda pair: (len(pair[0]), pair[1]))
            problems += [problem for problem in nearest if problem not in problems]
    return problems


def _unknown(backend: str, known: Mapping[str, Any]) -> str:
    near = did_you_mean(backend, [name for name in known if ("@" in name) == ("@" in backend)])
    return f"is not a known backend.{near} `polyattn list` shows all; `polyattn generate` knows those of diffusers too."


def _backend_problem(backend: str, known: Mapping[str, Sequence[BackendInfo]]) -> str:
    if backend not in known:
        return _unknown(backend, known)
    if all(info.planned for info in known[backend]):
        return "is planned: it has no adapter yet and is never selected. `polyattn list` shows what is available."
    return ""


def _option_problems(info: BackendInfo, options: Mapping[str, Any], where: str) -> list[str]:
    try:
        check_options(info, options, where, check_files=True)
    except ConfigError as problem:
        return str(problem).split("\n")
    return []
