"""Put polyattn into transformers' registries, and take it out again."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable
from typing import Any

from ...errors import BackendUnavailableError, ConfigError, InvalidInputError, did_you_mean
from .. import OLDEST, outdated
from .attention import make_forward
from .batching import admitting, manager
from .guard import guarded
from .keywords import HARMLESS, SEMANTIC
from .masks import make_mask
from .names import TAKEOVER, check_name, pinned_names

__all__ = ["Entry", "entries", "install", "installed", "interfaces", "uninstall"]


@dataclasses.dataclass
class Entry:
    """A registered name: the backend it pins, its functions, and what stood there before."""

    backend: str | None
    harmless: frozenset[str]
    attention: Any
    mask: Any
    before: tuple[Any, Any]


_entries: dict[str, dict[str, Entry]] = {}
"""By the name given to `install`, then by registered name."""

_trust: dict[type, bool] = {}
"""Config class -> whether its models stand bool and missing masks. `sdpa` is asked of the model by transformers."""

_guards: dict[tuple[Any, str], tuple[Any, Any]] = {}
"""(transformers' class, name of its method) -> the method and the guard around it, while something is installed."""


def interfaces() -> tuple[Any, Any, Any]:
    """transformers' attention registry, its mask registry, and the base class of its models.

    Raises:
        BackendUnavailableError: transformers is missing or too old.
    """
    try:
        host = importlib.import_module("transformers")
    except ModuleNotFoundError as exc:
        if exc.name != "transformers":
            raise
        raise BackendUnavailableError(
            f"transformers is not installed; pip install 'polyattn[transformers]', or transformers "
            f"{OLDEST['transformers']} or newer"
        ) from exc
    if why := outdated("transformers", host.__version__):
        raise BackendUnavailableError(why)
    models = importlib.import_module("transformers.modeling_utils")
    masks = importlib.import_module("transformers.masking_utils")
    return models.AttentionInterface, masks.AttentionMaskInterface, models.PreTrainedModel


def install(name: str = "polyattn", *, harmless: Iterable[str] = ()) -> tuple[str, ...]:
    """Teach transformers the attention implementation `name`, for models loaded before and after.

    Beside the name itself, which follows polyattn's overrides and automatic choice, `name|backend` is registered for
    every backend polyattn knows: `attn_implementation="polyattn|fa3"` pins it. Calling again refreshes both.

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
    if isinstance(harmless, str):
        raise InvalidInputError(f"harmless={harmless!r} must be a list of keyword names: [{harmless!r}]")
    words = HARMLESS | frozenset(harmless)
    if spoken := sorted(words & SEMANTIC):
        raise ConfigError(f"harmless names {', '.join(spoken)}, which changes the result of attention; leave it out")
    functions, masks, base = interfaces()
    if name in _entries:
        uninstall(name)
    wanted: dict[str, str | None] = {name: None, **({} if name == TAKEOVER else pinned_names(name))}
    here = functions._global_mapping
    if taken := [n for n in wanted if n in here and n != TAKEOVER]:
        raise ConfigError(
            f"attention name {taken[0]!r} is already registered, by {here[taken[0]].__module__}; choose another name"
        )
    own = importlib.import_module("transformers.masking_utils")
    mask = own.sdpa_mask if name == TAKEOVER else make_mask(own.sdpa_mask, own.eager_mask, _trust)
    added = {}
    for registered, backend in wanted.items():
        before = (here.get(registered), masks._global_mapping.get(registered))
        added[registered] = Entry(backend, words, make_forward(backend, words), mask, before)
        functions.register(registered, added[registered].attention)
        masks.register(registered, mask)
    _entries[name] = added
    _guard(base)
    return tuple(added)


def uninstall(name: str | None = None) -> None:
    """Take the names back out, all of them or those of one `install`; what they replaced comes back.

    Models that still carry a name say so at their next call; give them another with `set_attn_implementation`.

    Raises:
        ConfigError: nothing was installed under that name.
    """
    if name is not None and name not in _entries:
        raise ConfigError(
            f"uninstall({name!r}): that name is not installed.{did_you_mean(str(name), _entries)} "
            f"Installed: {', '.join(_entries) or 'none'}"
        )
    if not _entries:
        return
    functions, masks, _ = interfaces()
    for group in [name] if name is not None else list(_entries):
        for registered, entry in _entries.pop(group).items():
            for registry, own, before in zip(
                (functions, masks), (entry.attention, entry.mask), entry.before, strict=True
            ):
                # Somebody may have registered over it since: then it is theirs.
                if registry._global_mapping.get(registered) is not own:
                    continue
                if before is None:
                    del registry._global_mapping[registered]
                else:
                    registry.register(registered, before)
    if not _entries:
        for (owner, method), (original, guard) in _guards.items():
            if getattr(owner, method) is guard:
                setattr(owner, method, original)
        _guards.clear()


def entries() -> dict[str, Entry]:
    """Every registered name with what stands behind it."""
    return {name: entry for group in _entries.values() for name, entry in group.items()}


def installed() -> dict[str, str | None]:
    """Every registered name with the backend it pins, None = chosen per call."""
    return {name: entry.backend for name, entry in entries().items()}


def _guard(base: Any) -> None:
    if _guards:
        return
    carried = {base: guarded(base, _needs_guard, _trust)}
    if (batching := manager()) is not None:
        carried[batching] = admitting(batching, _needs_guard)
    for owner, methods in carried.items():
        for method, guard in methods.items():
            _guards[owner, method] = (getattr(owner, method), guard)
            setattr(owner, method, guard)


def _needs_guard(name: str) -> bool:
    # Models handle "sdpa" themselves.
    if name == TAKEOVER:
        return False
    group, _, backend = name.partition("|")
    if group in _entries and name not in _entries[group]:
        known = [known.partition("|")[2] for known in _entries[group] if "|" in known]
        raise ConfigError(
            f"attn_implementation={name!r} is not installed: no backend {backend!r} can be pinned by name."
            f"{did_you_mean(backend, known)} Known: {', '.join(known) or 'none'}; polyattn.use_backend(...) reaches all"
        )
    return name in installed()
