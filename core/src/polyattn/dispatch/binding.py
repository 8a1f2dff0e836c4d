"""From a request to a bound kernel: device facts, the override chain, selection, options, loading. The slow path."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.autograd import profiler as _profiler

from ..contract import AttentionRequest, BackendInfo, Bound
from ..contract.lengths import Extent, extent_of
from ..errors import InvalidInputError
from ..lowering import bind
from ..registry.manager import get_manager
from ..selection.aliases import names_method
from ..selection.config import check_options
from ..selection.inspection import catalogue, served_by
from ..selection.overrides import SCOPE, Scope, current_choice, current_settings, note_left
from ..selection.select import Policy, Selection, select
from ..selection.tuned_policy import compiled_policy, current_policy
from ..tuning import with_lengths
from .bound_table import SIGNATURES_KEPT
from .by_length import settled
from .device_facts import device_facts, dtype_name
from .trace_requests import observed, opaque

__all__ = ["Asked", "Chosen", "asks_method", "bind_selection", "choose", "explained_by", "load", "remembered"]
__all__ += ["device_facts", "dtype_name", "select_here"]

log = logging.getLogger("polyattn.selection")


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A choice made: the request it was made for, the selection with its reasons, and the functions. `at`: who serves a
    call of these lengths, where that depends on them."""

    request: AttentionRequest
    selection: Selection
    info: BackendInfo
    bound: Bound
    at: Callable[[Extent], str] | None = None

    def ranged(self, call: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`; while torch's profiler is on, in a range that names the public call and who serves it."""
        return functools.partial(self.profiled, call, run) if _profiler._is_profiler_enabled else run

    def profiled(self, call: str, run: Callable[..., Any], /, *tensors: Any, **keywords: Any) -> Any:
        """`run`, called in such a range."""
        by = served_by(self.selection) if self.at is None else self.at(extent_of(self.request)(*tensors, **keywords))
        with torch.profiler.record_function(f"polyattn.{call} {by}"):
            return run(*tensors, **keywords)


def asks_method(argument: str | None, scope: Scope) -> bool:
    """Whether the backend asked for here serves calls with a place only; nobody else looks at one."""
    choice = current_choice(argument, scope)
    return choice is not None and names_method(choice.name, catalogue())


def select_here(
    request: AttentionRequest, argument: str | None, scope: Scope, extent: Extent, *, full: bool = False
) -> Selection:
    """Selection on this machine under the override chain, for a call of these lengths."""
    policy = current_policy(argument, scope, with_lengths(request, *extent))
    return select(request, catalogue(), policy, full=full)


Asked = tuple[AttentionRequest, str | None, Extent]
"""What a call asks for: its request, the backend that it names, and its lengths."""


def explained_by(call: Any, asked: Callable[..., Asked | Selection]) -> None:
    """Let `polyattn.explain` answer for a public call.

    Args:
        asked: the call's arguments by name -> what it asks for, or who serves it where more than that decides.
    """
    signature = inspect.signature(call)

    def explain(*args: Any, **kwargs: Any) -> Selection:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        answer = asked(**given.arguments)
        if isinstance(answer, Selection):
            return answer
        request, backend, extent = answer
        return select_here(request, backend, SCOPE.get(), extent, full=True)

    call.__polyattn_explain__ = explain


def choose(
    request: AttentionRequest, argument: str | None, scope: Scope, *, eager: bool = True, planned: bool = False
) -> Chosen:
    """Select a backend for a request and load its functions. Says once when something was replaced.

    Args:
        eager: the functions are called as they are; False: torch.compile looks into them.
        planned: they are planned for, or recorded, before lengths are known: one backend serves all of them.

    Raises:
        BackendUnavailableError, UnsupportedRequestError, PluginError, ConfigError: see `polyattn.selection.select`,
            `PluginManager.load_forward` and the backend's typed options. InvalidInputError: under torch.jit.trace.
    """
    if torch._C._get_tracing_state() is not None:
        # Sizes are tensors there, and what a choice decides would be written into the trace.
        raise InvalidInputError(
            "attention is called under torch.jit.trace, which cannot record how a call depends on its sizes; use "
            "torch.export.export or torch.compile"
        )
    policy = (current_policy if eager else compiled_policy)(argument, scope, request)
    selection = select(request, catalogue(), policy)
    return bind_selection(request, selection, policy, eager=eager, planned=planned)


def bind_selection(
    request: AttentionRequest, selection: Selection, policy: Policy, *, eager: bool = True, planned: bool = False
) -> Chosen:
    """Load the functions of a backend that was selected for a request by a policy. The rest is as `choose` has it."""
    _announce(selection)
    if policy.choice is not None and selection.rule:
        note_left(selection.rule, selection.why)
    chosen = load(selection)
    chosen = settled(chosen, policy, load, by_length=eager and not planned)
    if chosen.request.place:  # the calls that a method makes are recorded, and it is not
        return chosen
    bound = observed(chosen.bound, request, chosen.at or selection) if eager else opaque(chosen.bound)
    return chosen if bound is chosen.bound else dataclasses.replace(chosen, bound=bound)


@functools.lru_cache(maxsize=SIGNATURES_KEPT)
def remembered(request: AttentionRequest, argument: str | None, scope: Scope, epoch: int) -> Chosen:
    """`choose`, asked once while nothing that decides changes (`epoch`)."""
    return choose(request, argument, scope)


def load(selection: Selection) -> Chosen:
    """Load the functions of a selection.

    Raises:
        PluginError, ConfigError: see `choose`.
    """
    manager = get_manager()
    info = manager.backends[selection.backend, selection.platform]
    provider = info.providers[0]
    for one in info.providers:
        if one.name == selection.provider:
            provider = one
    options = _options(info)
    if selection.plan is None:
        request = selection.request
        if request.options != options:
            request = dataclasses.replace(request, options=options)
        return Chosen(request, selection, info, manager.load_forward(info, provider, request))

    def configured(request: AttentionRequest) -> AttentionRequest:
        return request if request.options == options else dataclasses.replace(request, options=options)

    def forward_of(request: AttentionRequest) -> Bound:
        return manager.load_forward(info, provider, configured(request))

    bound = bind(selection.plan, forward_of, lambda helper: load(helper).bound)
    return Chosen(configured(selection.request), selection, info, bound)


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
