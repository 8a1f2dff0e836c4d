"""From a request to a bound kernel: device facts, the override chain, selection, options, loading. The slow path."""

from __future__ import annotations

import dataclasses
import functools
import logging
import warnings
from collections.abc import Hashable
from typing import Any

import torch

from .config import check_options
from .contract import Bound
from .errors import InvalidInputError, did_you_mean
from .inspection import catalogue, detect
from .lowering import Plan, bind
from .overrides import Scope, current_choice, current_settings
from .plugins import get_manager
from .records import AttentionRequest, BackendInfo
from .selection import Policy, Selection, select

__all__ = ["Chosen", "choose", "device_facts", "dtype_name", "select_here"]

log = logging.getLogger("polyattn.selection")

_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
    torch.int8: "int8",
}


def dtype_name(dtype: torch.dtype) -> str:
    """The request's word for a torch dtype.

    Raises:
        InvalidInputError: no attention is defined on it.
    """
    if dtype not in _NAMES:
        raise InvalidInputError(f"{dtype} is no dtype of attention; allowed: {', '.join(map(str, _NAMES))}")
    return _NAMES[dtype]


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A choice made: the request it was made for, the selection with its reasons, and the functions."""

    request: AttentionRequest
    selection: Selection
    info: BackendInfo
    bound: Bound


@functools.lru_cache(maxsize=64)
def device_facts(device: torch.device) -> dict[str, Any]:
    """Request fields of a device: platform, arch, toolkit and features.

    Raises:
        InvalidInputError: no registered platform has tensors of this device type.
    """
    kind = device.type
    if kind == "meta":
        kind = "cpu"
    if kind == "cuda":
        if torch.version.hip:
            arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
            return _facts("rocm", arch, torch.version.hip)
        major, minor = torch.cuda.get_device_capability(device)
        return _facts("cuda", f"sm{major}{minor}", torch.version.cuda or "")
    platforms = {p.device_type: p.name for p in get_manager().platforms.values() if p.device_type != "cuda"}
    if kind not in platforms:
        raise InvalidInputError(
            f"tensors are on device type {kind!r}, no platform has it.{did_you_mean(kind, platforms)} Known: "
            f"{', '.join(sorted(platforms))}, cuda; a plugin registers others with polyattn_register_platforms"
        )
    name = platforms[kind]
    if name == "cpu":
        return {"platform": "cpu", "features": detect("cpu").features}
    report = detect(name)
    arch = report.archs[0] if report.archs else ""
    return {"platform": name, "arch": arch, "toolkit": report.toolkit, "features": report.features}


def _facts(platform: str, arch: str, version: str) -> dict[str, Any]:
    toolkit = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return {"platform": platform, "arch": arch, "toolkit": toolkit}


def select_here(request: AttentionRequest, argument: str | None, scope: Scope, *, full: bool = False) -> Selection:
    """Selection on this machine under the override chain."""
    policy = Policy(current_choice(argument, scope, request), strict=current_settings().strict)
    return select(request, catalogue(), policy, full=full)


def choose(request: AttentionRequest, argument: str | None, scope: Scope) -> Chosen:
    """Select a backend for a request and load its functions. Says once when something was replaced.

    Raises:
        BackendUnavailableError, UnsupportedRequestError, PluginError, ConfigError: see `polyattn.selection.select`,
            `PluginManager.load_forward` and the backend's typed options.
    """
    selection = select_here(request, argument, scope)
    _announce(selection)
    return _load(selection)


def _load(selection: Selection) -> Chosen:
    manager = get_manager()
    info = manager.backends[selection.backend, selection.platform]
    provider = next(p for p in info.providers if p.name == selection.provider)
    options = _options(info)

    def load(request: AttentionRequest) -> Bound:
        return manager.load_forward(info, provider, dataclasses.replace(request, options=options))

    bound = bind(selection.plan or Plan(selection.request), load, lambda helper: _load(helper).bound)
    return Chosen(dataclasses.replace(selection.request, options=options), selection, info, bound)


def _options(info: BackendInfo) -> tuple[tuple[str, Hashable], ...]:
    given, where = current_settings().options_of(info)
    if not given and not info.config:
        return ()
    checked = check_options(info, given, where, check_files=True)
    return tuple((name, _hashable(value)) for name, value in sorted(checked.items()))


def _hashable(value: Any) -> Hashable:
    return tuple(value) if isinstance(value, list) else value


_announced: set[str] = set()


def _announce(selection: Selection) -> None:
    """Documented fallbacks and the reference as last resort are said once per process and reason; exact rewrites, which
    change no result, are logged."""
    if selection.plan is not None:
        log.info("%s serves %s via %s", selection.id, selection.request.summary(), "; ".join(selection.steps()))
    if selection.fallback:
        text = f"polyattn: {selection.notes[0]}"
    elif selection.backend == "reference" and selection.source == "priority":
        reasons = "; ".join(f"{n}: {', '.join(r)}" for n, r in selection.rejected.items())
        text = f"polyattn: the slow reference serves {selection.request.summary()}, because {reasons}"
    else:
        return
    if text not in _announced:
        _announced.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
