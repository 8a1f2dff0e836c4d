"""This module puts polyattn into transformers' registries, and takes it out again."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable
from typing import Any

from ...errors import ConfigError, did_you_mean
from ..common.hosts import host_package
from ..common.keywords import harmless_words
from ..common.names import split_pin, unknown_pin
from ..common.patching import Patches
from .attention import make_forward
from .batching import admitting, manager
from .guard import guarded
from .keywords import HARMLESS, SEMANTIC
from .linear import reach, reach_all
from .masks import make_mask
from .names import TAKEOVER, check_name, pinned_names

__all__ = ["Entry", "entries", "install", "installed", "interfaces", "uninstall"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry is a registered name: the backend it pins, and the keywords that it leaves unread."""

    backend: str | None
    harmless: frozenset[str]


@dataclasses.dataclass(frozen=True)
class _Group:
    """A group is one `install`: its names, and what was put into transformers for them."""

    entries: dict[str, Entry]
    patches: Patches = dataclasses.field(default_factory=Patches)


_groups: dict[str, _Group] = {}
"""The groups, by the name given to `install`."""

_trust: dict[type, bool] = {}
"""Config class -> whether its models stand bool and missing masks. `sdpa` is asked of the model by transformers."""

_guards = Patches()
"""What is put into transformers while something is installed, whatever its name: guarded methods of classes, and the
functions of linear attention."""


def interfaces() -> tuple[Any, Any, Any]:
    """Return transformers' attention registry, its mask registry, and the base class of its models.

    Raises:
        BackendUnavailableError: transformers is missing or too old.
    """
    host_package("transformers")
    models = importlib.import_module("transformers.modeling_utils")
    masks = importlib.import_module("transformers.masking_utils")
    return models.AttentionInterface, masks.AttentionMaskInterface, models.PreTrainedModel


def install(name: str = "polyattn", *, harmless: Iterable[str] = ()) -> tuple[str, ...]:
    """Teach transformers the attention implementation `name`, for models loaded before and after.

    Beside the name itself, which follows polyattn's overrides and automatic choice, `name|backend` is registered for
    every backend polyattn knows: `attn_implementation="polyattn|fa3"` pins it. Calling again refreshes both.

    Linear attention has no such names: models that compute gated delta rules call `polyattn.linear_attention` while
    something is installed, whatever their attention implementation is.

    Args:
        name: what `attn_implementation=` will say. "sdpa" replaces transformers' own SDPA function for every model,
            without pinned names.
        harmless: more keywords of your models that say nothing about attention (others are refused by name).

    Returns:
        The names now registered.

    Raises:
        ConfigError: the name means something else to transformers, or is taken; or harmless names what is not.
        InvalidInputError: harmless is one string. BackendUnavailableError: see `interfaces`.
    """
    check_name(name)
    words = harmless_words(HARMLESS, harmless, SEMANTIC)
    functions, masks, base = interfaces()
    if name in _groups:
        uninstall(name)
    wanted: dict[str, str | None] = {name: None, **({} if name == TAKEOVER else pinned_names(name))}
    here = functions._global_mapping
    if taken := [n for n in wanted if n in here and n != TAKEOVER]:
        raise ConfigError(
            f"attention name {taken[0]!r} is already registered, by {here[taken[0]].__module__}; choose another name"
        )
    own = importlib.import_module("transformers.masking_utils")
    mask = own.sdpa_mask if name == TAKEOVER else make_mask(own.sdpa_mask, own.eager_mask, _trust)
    group = _Group({registered: Entry(backend, words) for registered, backend in wanted.items()})
    for registered, backend in wanted.items():
        group.patches.item(here, registered, make_forward(backend, words))
        group.patches.item(masks._global_mapping, registered, mask)
    _groups[name] = group
    _guard(base)
    return tuple(wanted)


def uninstall(name: str | None = None) -> None:
    """Take the names back out, all of them or those of one `install`; what they replaced comes back.

    Models that still carry a name say so at their next call; give them another with `set_attn_implementation`.

    Raises:
        ConfigError: nothing was installed under that name.
    """
    if name is not None and name not in _groups:
        raise ConfigError(
            f"uninstall({name!r}): that name is not installed.{did_you_mean(str(name), _groups)} "
            f"Installed: {', '.join(_groups) or 'none'}"
        )
    for group in [name] if name is not None else list(_groups):
        _groups.pop(group).patches.undo()
    if not _groups:
        _guards.undo()


def entries() -> dict[str, Entry]:
    """Return every registered name with what stands behind it."""
    return {name: entry for group in _groups.values() for name, entry in group.entries.items()}


def installed() -> dict[str, str | None]:
    """Return every registered name with the backend it pins, None = chosen per call."""
    return {name: entry.backend for name, entry in entries().items()}


def _guard(base: Any) -> None:
    if _guards:
        return
    reach_all(_guards)
    carried = {base: guarded(base, _needs_guard, _trust, lambda module: reach(module, _guards))}
    if (batching := manager()) is not None:
        carried[batching] = admitting(batching, _needs_guard)
    for owner, methods in carried.items():
        for method, guard in methods.items():
            _guards.attribute(owner, method, guard)


def _needs_guard(name: str) -> bool:
    # Models handle "sdpa" themselves.
    if name == TAKEOVER:
        return False
    group, _ = split_pin(name)
    if group in _groups and name not in _groups[group].entries:
        raise unknown_pin("attn_implementation", name, _groups[group].entries)
    return name in installed()
