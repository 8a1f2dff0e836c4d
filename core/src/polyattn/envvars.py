"""Every POLYATTN_* environment variable: one table, one strict parser per kind."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

from .errors import ConfigError, did_you_mean

__all__ = ["ENVVARS", "flag", "names", "number", "text", "unknown", "warn_unknown"]

ENVVARS: dict[str, str] = {
    "POLYATTN_PLUGINS": "allow-list of plugins, named as for POLYATTN_DISABLE; set but empty loads none but core",
    "POLYATTN_DISABLE": "plugins that are never imported, comma separated: names, distributions or modules; not core",
    "POLYATTN_EXTRA_PLUGINS": "plugin modules to load by path (machines without entry points), comma separated",
    "POLYATTN_WITHOUT": "distributions that count as not installed, comma separated: those of another build serve then",
    "POLYATTN_STRICT": "1: a broken plugin, or a documented fallback being taken, is an error",
    "POLYATTN_VALIDATE": "1: also check tensor contents (cu_seqlens, page ids) that live on a device, and what "
    "backends return and write to",
    "POLYATTN_CONFIG": "path of a JSON, YAML or TOML configuration file",
    "POLYATTN_ATTENTION_BACKEND": "backend for every call that names none",
    "POLYATTN_COMPONENT_ATTENTION_BACKENDS": "component=backend pairs, comma separated; also component.role=backend",
    "POLYATTN_ATTENTION_BACKEND_CONFIG": "options of the backends, in any form of --attention-backend-config",
    "POLYATTN_SGLANG_DIFFUSION": "1: the attention backends that SGLang's image and video models name are polyattn's",
    "POLYATTN_RULES": "who chooses where nothing was measured: model (default), the cost model before the platform "
    "rules; seed, the platform rules alone",
    "POLYATTN_TUNING": "use (default): choices measured on this device are used; off: those measurements are not read; "
    "online: what nobody measured is, at its first large call",
    "POLYATTN_TRACE": "file that the requests of this process are added to; `polyattn trace` sets it",
    "POLYATTN_TUNING_STORE": "file of the measurements (default polyattn/tuning.sqlite3 in the user's cache folder)",
    "POLYATTN_REFERENCE_MEMORY_GB": "memory cap of the reference backend per call, GiB (default 4)",
}

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}


def text(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The raw value, or None when unset. `name` must be in `ENVVARS`."""
    if name not in ENVVARS:
        raise ConfigError(f"{name} is not an environment variable of polyattn.{did_you_mean(name, ENVVARS)}")
    try:
        return (os.environ if environ is None else environ)[name]  # os.environ.get is a call more
    except KeyError:
        return None


def flag(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """A switch. Unset is off; anything but 1/0/true/false/yes/no/on/off raises ConfigError."""
    value = (text(name, environ) or "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ConfigError(f"{name}={value!r} is not a switch: use 1 or 0 (also true/false, yes/no, on/off)")


def names(name: str, environ: Mapping[str, str] | None = None) -> tuple[str, ...] | None:
    """A comma separated list; None when unset, () when set but empty."""
    value = text(name, environ)
    if value is None:
        return None
    return tuple(part.strip() for part in value.split(",") if part.strip())


def number(name: str, default: float, environ: Mapping[str, str] | None = None) -> float:
    """A positive number, or `default` when unset."""
    value = text(name, environ)
    if value is None or not value.strip():
        return default
    try:
        parsed = float(value)
    except ValueError:
        parsed = -1.0
    if not parsed > 0:
        raise ConfigError(f"{name}={value!r} is not a positive number, for example {name}={default:g}")
    return parsed


def unknown(environ: Mapping[str, str] | None = None) -> list[str]:
    """One sentence per POLYATTN_* variable that nothing reads: most often a slip."""
    env = os.environ if environ is None else environ
    names = sorted(k for k in env if k.startswith("POLYATTN_") and k not in ENVVARS)
    return [f"environment {name} is set, but polyattn does not read it.{did_you_mean(name, ENVVARS)}" for name in names]


_told: set[str] = set()


def warn_unknown() -> None:
    """Warn of the variables that nothing reads, of each once per process: a slip would otherwise pass in silence."""
    new = [sentence for sentence in unknown() if sentence not in _told]
    _told.update(new)
    for sentence in new:
        warnings.warn(sentence, stacklevel=2)
