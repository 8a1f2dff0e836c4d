"""This module puts polyattn into diffusers' registry of attention backends, and takes it out again."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Iterator
from typing import Any

from ...errors import BackendUnavailableError, ConfigError, PolyattnError
from .. import transformers as transformers_host
from ..common.hosts import host_package
from ..common.names import backend_words, pinned, split_pin, unknown_pin
from ..common.patching import Patches
from .attention import Everything, make_attend, make_sdpa
from .names import add_members, drop_members
from .processors import attention_modules, calls_sdpa, direct, redirect, restore

__all__ = ["NAME", "dispatch", "install", "installed", "reset_on", "set_on", "uninstall"]

NAME = "polyattn"
VARIABLE = "DIFFUSERS_ATTN_BACKEND"
_members: dict[str, Any] = {}
"""Name -> member of diffusers' enum, while installed."""
_patches = Patches()
_left: list[bool] = []
"""Whether `uninstall` is to take the transformers host out too: this room put it in."""


def dispatch() -> Any:
    """Return diffusers' module of attention backends.

    Raises:
        BackendUnavailableError: diffusers is missing or too old.
    """
    host_package("diffusers")
    constants: Any = importlib.import_module("diffusers.utils.constants")
    wanted = constants.DIFFUSERS_ATTN_BACKEND
    if split_pin(wanted)[0] != NAME:
        return importlib.import_module("diffusers.models.attention_dispatch")
    # The module refuses a name that is not in its enum, which is there once it is imported.
    constants.DIFFUSERS_ATTN_BACKEND = "native"
    try:
        return importlib.import_module("diffusers.models.attention_dispatch")
    finally:
        constants.DIFFUSERS_ATTN_BACKEND = wanted


def install() -> tuple[str, ...]:
    """Teach diffusers the attention backends `polyattn` and `polyattn|NAME`, for every backend polyattn knows.

    They are names for `model.set_attention_backend`, for `attention_backend(...)` and for the variable
    DIFFUSERS_ATTN_BACKEND, which diffusers reads when a model is first imported: call this before. Layers that call
    torch's SDPA in their own code (SD3, CogVideoX, PixArt and others) are reached too. Text encoders are models of
    transformers; polyattn is installed there as well. Calling again refreshes the names.

    Returns:
        The names now registered.

    Raises:
        BackendUnavailableError: diffusers or transformers is missing or too old.
        ConfigError: DIFFUSERS_ATTN_BACKEND pins a backend that polyattn does not know.
    """
    if _members:
        _take_out()
    backends = dispatch()
    registry, kind = backends._AttentionBackendRegistry, backends.AttentionBackendName
    wanted: dict[str, str | None] = {NAME: None, **pinned(NAME, backend_words())}
    _members.update(add_members(kind, wanted))
    for name, member in _members.items():
        _patches.item(registry._backends, member, make_attend(wanted[name]))
        _patches.item(registry._constraints, member, [])
        _patches.item(registry._supported_arg_names, member, Everything(("query", "key", "value", "attn_mask")))
    registry._supports_context_parallel.update(wanted)
    base = importlib.import_module("diffusers.models.modeling_utils").ModelMixin
    for method, guard in _guarded(base).items():
        _patches.attribute(base, method, guard)
    said = os.environ.get(VARIABLE, "")
    if split_pin(said)[0] == NAME:
        if said not in _members:
            names = list(_members)
            _take_out()
            raise unknown_pin(VARIABLE, said, names)
        registry.set_active_backend(_members[said])
    if NAME not in transformers_host.installed():
        transformers_host.install(NAME)
        _left.append(True)
    return tuple(_members)


def uninstall() -> None:
    """Take the names back out, and polyattn out of transformers where `install` put it in.

    Models that still carry a name go back to diffusers' own choice by `reset_attention_backend()`.
    Undo `prepare` first, by `Prepared.remove()`. Without an `install` this does nothing.
    """
    _take_out()
    if _left:
        _left.clear()
        if NAME in transformers_host.installed():
            transformers_host.uninstall(NAME)


def installed() -> dict[str, str | None]:
    """Return every registered name with the backend it pins, None = chosen per call."""
    return {name: split_pin(name)[1] for name in _members}


def _take_out() -> None:
    if not _members:
        return
    backends = dispatch()
    registry = backends._AttentionBackendRegistry
    if registry._active_backend in _members.values():
        registry.set_active_backend(backends.AttentionBackendName.NATIVE)
    registry._supports_context_parallel.difference_update(_members)
    _patches.undo()
    drop_members(backends.AttentionBackendName, _members)
    _members.clear()


def _guarded(base: Any) -> dict[str, Any]:
    """Make two methods of diffusers' models: they also reach layers that no name of diffusers reaches, and say where a
    model has none that can be reached."""
    setter, resetter = base.set_attention_backend, base.reset_attention_backend

    @functools.wraps(setter)
    def set_attention_backend(self: Any, backend: str) -> None:
        group, pin = split_pin(str(backend).lower())
        if group == NAME and str(backend).lower() not in _members:
            raise unknown_pin("set_attention_backend", str(backend), _members)
        if group == NAME:
            _reachable(self, str(backend))
        setter(self, backend)
        _redirect(self, pin if group == NAME else None, on=group == NAME)

    @functools.wraps(resetter)
    def reset_attention_backend(self: Any) -> None:
        resetter(self)
        _redirect(self, None, on=False)

    return {"set_attention_backend": set_attention_backend, "reset_attention_backend": reset_attention_backend}


def _reachable(model: Any, name: str) -> None:
    layers = attention_modules(model)
    if not any(direct(module.processor) or calls_sdpa(module.processor) for _, module in layers):
        what = "computes attention in its own code" if layers else "has no attention layer of diffusers"
        raise ConfigError(
            f"{name!r} cannot reach {type(model).__name__}: it {what}. Leave this model as it is; calls of torch's "
            "SDPA in code of your own can be replaced by polyattn.scaled_dot_product_attention"
        )


_sdpas = functools.lru_cache(maxsize=None)(make_sdpa)


def _redirect(model: Any, pin: str | None, *, on: bool) -> None:
    for _, module in attention_modules(model):
        if direct(module.processor):
            continue
        if on and calls_sdpa(module.processor):
            redirect(module.processor, _sdpas(pin))
        else:
            restore(module.processor)


def set_on(model: Any, name: str) -> None:
    """Set a backend of diffusers, one of polyattn's or another, on a model; diffusers' active backend stays what it is.

    Raises:
        ConfigError: polyattn cannot reach the model.
        BackendUnavailableError: diffusers cannot use its own backend, such as one whose library is missing.
    """
    try:
        with _active_kept(), _quiet():
            model.set_attention_backend(name)
    except PolyattnError:
        raise
    except (RuntimeError, ValueError, ImportError, OSError) as exc:
        raise BackendUnavailableError(
            f"diffusers' own backend {name!r} cannot be used by {type(model).__name__} here: {exc} Or give a name of "
            "`polyattn list`"
        ) from exc


def reset_on(model: Any) -> None:
    """Give a model back the choice that diffusers makes by itself."""
    with _active_kept(), _quiet():
        model.reset_attention_backend()


@contextlib.contextmanager
def _active_kept() -> Iterator[None]:
    """Keep diffusers' active backend, which a model's own setting would change for all models."""
    registry = dispatch()._AttentionBackendRegistry
    before = registry._active_backend
    try:
        yield
    finally:
        registry.set_active_backend(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out diffusers' line that its attention backends are experimental, once for each component."""
    logger = importlib.import_module("diffusers.models.modeling_utils").logger
    before = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(before)
