"""Questions about choices, answered without running anything: explain and what-if.

Nothing here imports torch; a machine without any accelerator can ask about any other.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..contract import AttentionRequest
from ..contract.request_check import check_request
from ..errors import ConfigError, InvalidInputError, PolyattnError, did_you_mean
from ..registry.distributions import normalise_distribution
from ..registry.manager import get_manager
from ..registry.platforms import parse_platform
from ..tuning import Place, mode, shipped_devices
from .listing import BackendStatus, list_backends, ordered_offers, support_matrix
from .machine import catalogue, check_platform, detect, served_by
from .overrides import SCOPE
from .phase_pairs import both_phases, check_drafting, select_pair
from .select import Catalogue, Choice, Policy, Selection, select
from .tuned_policy import current_policy, shipped_policy

__all__ = [
    "BackendStatus",
    "catalogue",
    "detect",
    "explain",
    "list_backends",
    "ordered_offers",
    "served_by",
    "support_matrix",
    "what_if",
]

BUNDLED = ("torch", "triton")
"""What-if takes these as installed: torch is a requirement of polyattn, and torch's GPU builds bring Triton."""


def what_if(
    request: AttentionRequest,
    *,
    platform: str,
    installed: Iterable[str] = (),
    backend: str | None = None,
    prefill_backend: str | None = None,
    decode_backend: str | None = None,
    speculative_attention_mode: str = "prefill",
    strict: bool = False,
) -> Selection:
    """What would be chosen on another machine. Planned adapters are judged as if built and marked; a note says where a
    backend has no evidence there, which no machine chooses by itself.

    Args:
        request: what is asked for; its platform fields are replaced.
        platform: `cuda:sm90`, `cuda:sm90@12.3` (toolkit), `rocm:gfx942`, `npu`, `xpu`, `musa`, `mps`, `cpu:amx`.
        installed: distribution names, normalised, common names accepted, `name==version` for a version.
        backend, prefill_backend, decode_backend: explicit choices; a phase's own wins, one alone leaves the other
            phase with `backend` (or automatic). Who is named to verify drafts has to extend or decode with them too.
        speculative_attention_mode: which phase's backend verifies: prefill or decode.
        strict: a documented fallback is an error.

    Raises:
        ConfigError: unknown platform, distribution or mode. BackendUnavailableError, UnsupportedRequestError: as
            `polyattn.selection.select`. InvalidInputError: `request` is none, or has a value of another type.
    """
    if speculative_attention_mode not in ("prefill", "decode"):
        raise ConfigError(f"speculative_attention_mode={speculative_attention_mode!r} must be 'prefill' or 'decode'")
    check_request(request)
    known = tuple(get_manager().platforms)
    name, arch, toolkit, features = parse_platform(platform, known)
    here = dataclasses.replace(request, platform=name, arch=arch, toolkit=toolkit, features=features)
    there = catalogue(_assumed(installed))
    per_phase = {"prefill": prefill_backend, "decode": decode_backend}
    policies = {}
    for phase, own in per_phase.items():
        chosen = own or backend
        source = f"{phase} argument" if own else "argument"
        policies[phase] = Policy(Choice(chosen, source) if chosen else None, strict=strict, what_if=True)
    phase = {"decode": "decode", "verify": speculative_attention_mode}.get(here.phase, "prefill")
    if prefill_backend or decode_backend:
        if here.family not in ("paged", "mla"):
            raise ConfigError(
                f"prefill and decode backends are for the serving families paged and mla, not {here.family}; "
                f"use `backend` (--attention-backend)"
            )
        chosen_pair = select_pair(*both_phases(here), there, policies)
        if here.phase != "verify":
            return _with_notes(select(here, there, policies[phase], full=True), there, policies[phase])
        choice = Choice(chosen_pair[phase].backend, f"speculative_attention_mode={phase}")
        return select(here, there, dataclasses.replace(policies[phase], choice=choice), full=True)
    check_drafting(here, there, policies[phase])
    return _with_notes(select(here, there, policies[phase], full=True), there, policies[phase])


def _with_notes(selection: Selection, there: Catalogue, policy: Policy) -> Selection:
    """What nobody chose by name, with a note where it is only declared, and one for each device of its architecture
    that measurements choose for."""
    request, notes = selection.request, []
    if policy.choice is None and selection.evidence == "declared" and not selection.planned:
        try:
            instead = select(request, there, dataclasses.replace(policy, what_if=False)).id
        except PolyattnError:
            instead = "none"
        notes.append(
            f"declared: it was not shown to work on such a chip, so {instead} is chosen there until `polyattn conform "
            f"{selection.backend}` has passed; by name ({selection.backend}) it can be had"
        )
    asked = policy.choice is not None or mode() == "off" or not request.arch
    for device in () if asked else shipped_devices(request.arch):
        measured = shipped_policy(policy, request, place=Place(device, request.arch))
        tuned = select(request, there, measured)
        if tuned.source in ("tuned", "cost model"):
            notes.append(f"on {device}: {tuned.backend}, {tuned.why}")
    return dataclasses.replace(selection, notes=(*selection.notes, *notes))


def _assumed(installed: Iterable[str]) -> dict[str, str]:
    manager = get_manager()
    names: dict[str, str] = {}
    for backend in manager.backends.values():
        for provider in backend.providers:
            for need in provider.requires:
                for alias in (need.distribution, *need.also):
                    names[normalise_distribution(alias)] = normalise_distribution(need.distribution)
    assumed = dict.fromkeys((*BUNDLED, "polyattn"), "")
    assumed.update({normalise_distribution(p.distribution): p.version for p in manager.plugins.values()})
    assumed.update({f"polyattn-{p.name}": p.version for p in manager.plugins.values()})
    for text in installed:
        name, _, version = text.partition("==")
        normal = normalise_distribution(name)
        if normal not in names and normal not in assumed:
            raise ConfigError(
                f"--assume-installed {name!r} is a distribution no backend asks for.{did_you_mean(normal, names)} "
                f"Known: {', '.join(sorted(names))}"
            )
        assumed[normal] = version
    return assumed


def explain(request_or_call: AttentionRequest | Callable[..., Any], *args: Any, **kwargs: Any) -> Selection:
    """Which backend serves a request or a call here, and why not the others. Nothing is run.

    Args:
        request_or_call: an `AttentionRequest`, or one of polyattn's calls followed by its arguments:
            `polyattn.explain(polyattn.attention, q, k, v, causal=True)`. A layer or `bind(...)` object works too.

    Raises:
        BackendUnavailableError, UnsupportedRequestError, InvalidInputError: what the call itself would raise.
    """
    if isinstance(request_or_call, AttentionRequest):
        check_platform(check_request(request_or_call).platform)
        policy = current_policy(kwargs.pop("backend", None), SCOPE.get(), request_or_call)
        return select(request_or_call, catalogue(), policy, full=True)
    asker = getattr(request_or_call, "__polyattn_explain__", None)
    if asker is None:
        raise InvalidInputError(
            f"explain() takes an AttentionRequest or one of polyattn's calls, not a {type(request_or_call).__name__}; "
            f"for example explain(polyattn.attention, q, k, v)"
        )
    _check_arguments(request_or_call, args, kwargs)
    selection: Selection = asker(*args, **kwargs)
    return selection


_OF_TORCH = {
    "is_causal": "torch's is_causal=True is causal='top_left' here (S3)",
    "enable_gqa": "enable_gqa is not needed: query may have more heads than key and value (S1)",
    "mask": "the mask is attn_mask (S8)",
}


def _check_arguments(call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    signature = inspect.signature(getattr(call, "forward", call))
    try:
        signature.bind(*args, **kwargs)
    except TypeError as exc:
        name = getattr(call, "__name__", type(call).__name__)
        unknown = [word for word in kwargs if word not in signature.parameters]
        hints = [_OF_TORCH[word] for word in unknown if word in _OF_TORCH]
        near = " " + "; ".join(hints) if hints else "".join(did_you_mean(w, signature.parameters) for w in unknown[:1])
        takes = f"{name} takes {', '.join(signature.parameters)}"
        raise InvalidInputError(f"explain({name}, ...): {exc}; {takes}.{near}") from exc
