"""How a request is decided here: who was asked for, else what was measured on this device, and how strictly."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest
from ..registry.distributions import distribution_version
from ..registry.manager import PluginManager, get_manager
from ..tuning import NOTHING, Advice, Measured, Place, advise, driver, mode, place_of, shipped_advice, watch
from .overrides import Scope, current_choice, current_settings
from .select import Choice, Policy

if TYPE_CHECKING:
    from torch import device

__all__ = ["compiled_policy", "current_policy", "measured_policy", "policy_of", "shipped_policy", "tuning_place"]


def current_policy(argument: str | None, scope: Scope, request: AttentionRequest) -> Policy:
    """What decides about a request in this process.

    Args:
        argument: the backend that the call or layer names. scope: of the `with` forms.
    """
    strict, choice = current_settings().strict, current_choice(argument, scope, request)
    if choice is not None:
        return Policy(choice, strict=strict)
    return measured_policy(Policy(strict=strict, tuning=mode()), request)


def compiled_policy(argument: str | None, scope: Scope, request: AttentionRequest) -> Policy:
    """`current_policy` for code that is being compiled: where nobody chose, it is traced anew once measurements put the
    backends into another order, or keep another one out."""

    def said() -> tuple[list[tuple[str, str | None]], tuple[str, ...], Any]:
        found = advise(request, functools.partial(tuning_place, request.platform))
        return [(name, found.by.get(name)) for name, _ in found.order], found.avoid, found.kin and found.kin.fields

    if current_choice(argument, scope, request) is None:
        watch(("compiled", request), said)
    return current_policy(argument, scope, request)


def measured_policy(policy: Policy, request: AttentionRequest) -> Policy:
    """A policy with what measurements say of a request that nobody chose a backend for."""
    said = advise(request, functools.partial(tuning_place, request.platform), policy.tuning)
    return policy if said is NOTHING else _advised(policy, request, said)


def policy_of(policy: Policy, request: AttentionRequest, one: Measured) -> Policy:
    """A policy with what one measurement says, whatever the lengths."""
    order = tuple((name, "measured") for name in one.costs(recorded=bool(request.graph_capture)))
    return _advised(policy, request, Advice(order, policy.avoid, policy.notes, one.kin, one.by, bool(one.predicted)))


def shipped_policy(
    policy: Policy, request: AttentionRequest, *, own: bool = True, place: Place | None = None
) -> Policy:
    """A policy with what plugins ship of measurements on such a device, and with nothing that was measured here.

    Args:
        own: False leaves out what they ship of this very request: what one gets that nobody has measured.
        place: the device, None = the current one.
    """
    said = shipped_advice(request, lambda: place or tuning_place(request.platform), own=own)
    return _advised(policy, request, said)


def _advised(policy: Policy, request: AttentionRequest, said: Advice) -> Policy:
    said = said.by_rules(current_settings().rules)
    if not (said.order or said.avoid or said.notes):
        return policy
    like = None if said.kin is None else dataclasses.replace(request, **said.kin.fields).normalised()
    tuned = tuple(Choice(name, why, like, kind, said.how) for name, why, kind in said.choices())
    return dataclasses.replace(policy, tuned=tuned, avoid=said.avoid, notes=said.notes)


@dataclasses.dataclass(frozen=True)
class _Host:
    """The CPU as `torch.device` would say it, without torch."""

    type: str = "cpu"
    index: int | None = None


def tuning_place(platform: str, where: device | None = None) -> Place:
    """The place that measurements about backends belong to: a device, its driver, and every library that takes part.

    Args:
        platform: of the backends. where: the device, None = the current one of the platform.
    """
    manager = get_manager()
    versions = _libraries(manager, platform, manager.changes)
    if where is None:
        found = _device(manager.platforms[platform].device_type)
        if found is None:
            return Place(f"a machine without {platform}", "")
        where = found
    place = place_of(where, versions)
    if release := driver(platform):
        place = dataclasses.replace(place, versions=tuple(sorted((*place.versions, ("driver", release)))))
    return place


def _device(kind: str) -> Any:
    if kind == "cpu":
        return _Host()
    import torch

    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        return None
    return torch.device(kind, getattr(module, "current_device", int)())  # MPS, which is one device, does not say


@functools.lru_cache(maxsize=32)
def _libraries(manager: PluginManager, platform: str, changes: int) -> tuple[str, ...]:
    """Distributions that are here and have to do with the platform's backends."""
    names = {"polyattn"}
    for info in manager.backends.values():
        if info.platform != platform or info.planned:
            continue
        names.add(manager.owner(info).distribution)
        for need in (need for p in info.providers if not p.planned for need in p.requires):
            names.update(name for name in (need.distribution, *need.also) if distribution_version(name))
    return tuple(sorted(names - {"", "torch"}))
