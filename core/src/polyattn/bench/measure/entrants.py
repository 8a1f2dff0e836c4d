"""This module lists what is measured: polyattn's own candidates, bound as a call or an engine would, and anybody who
brings a function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ...contract.lengths import head_axis
from ...contract.names import parts
from ...dispatch.binding import Chosen, choose
from ...dispatch.call_key import runner
from ...dispatch.device_facts import device_facts
from ...errors import PolyattnError, UnsupportedRequestError
from ...selection.aliases import kinds_here, whole
from ...selection.inspection import catalogue
from ...selection.select import Choice, Policy, Selection, may_be_automatic, select
from ...serving.attention.workspace import Limits, Workspaces
from ...testing.families import FAMILIES
from .inputs import Inputs
from .workload import Workload

__all__ = ["Call", "Candidate", "Entrant", "candidates"]

Call = Callable[[int], Any]
"""From the number of a set to its result: out or (out, lse) in the workload's layout; for training the gradients in the
order of `request.grad`, without "lse"."""

_NO_SCOPE = ("", "", "")


class Entrant(Protocol):
    """Somebody who can serve a workload.

    `prepare` plans what is planned once per step, and returns what is timed. It raises UnsupportedRequestError for what
    it has no kernel for.
    """

    @property
    def name(self) -> str: ...

    def prepare(self, inputs: Inputs) -> Call: ...


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Describes one of polyattn's backends, with the exact rewrites that lead to it.

    Attributes:
        name: of the backend; with kernels of another library than it has by itself, NAME/KIND.
        selection: what it would be if it were asked for. chosen: it is what is chosen without any measurement.
        whole: the name that means these kernels and no others (`polyattn.selection.aliases.whole`).
    """

    name: str
    selection: Selection
    chosen: bool
    whole: str

    @property
    def kind(self) -> str:
        """Return the library whose kernels it has."""
        return parts(self.whole)[1]

    def prepare(self, inputs: Inputs) -> Call:
        request = inputs.workload.request
        chosen = choose(request, self.name, _NO_SCOPE)
        if chosen.selection.backend != self.selection.backend:
            raise UnsupportedRequestError(f"{self.name} is replaced by {chosen.selection.id}: {chosen.selection.why}")
        if inputs.step is not None:
            return _served(chosen, inputs)
        run = runner(chosen, request.lse, False, head_axis(request))
        return _trained(run, inputs) if inputs.workload.training else _called(run, inputs)


def candidates(workload: Workload, device: torch.device, *, by_name: bool = False) -> tuple[Candidate, ...]:
    """Every backend that accepts a workload, with the kernels of each of its libraries.

    What is chosen without measuring comes first.

    Args:
        by_name: also those that only a person chooses: approximate ones, and ones that were only declared.

    Raises:
        UnsupportedRequestError, BackendUnavailableError: nobody does.
    """
    request = dataclasses.replace(workload.request, **device_facts(device)).normalised()
    here, automatic = catalogue(), Policy()
    today = select(request, here, automatic, full=True)
    able = dict.fromkeys((today.backend, *today.others, *today.rewritable))
    offers = here.on(today.platform, request.arch, request.family)
    allowed = {o.info.name: o for o in offers if by_name or may_be_automatic(o, automatic)}
    found = []
    for backend in (n for n in able if n in allowed):
        # By itself it has the kernels of the first library that takes the request.
        met = set[str]()
        for name in (backend, *(f"{backend}/{kind}" for kind in kinds_here(allowed[backend], by_name=by_name) if kind)):
            try:
                selection = select(request, here, Policy(Choice(name, "measuring"), strict=True))
            except PolyattnError:
                continue  # it was accepted as part of a documented fallback only, or another of its libraries takes it
            these = whole(allowed[backend].info, selection.provider)
            if these not in met:
                found.append(Candidate(name, selection, name == today.backend, these))
            met.add(these)
    return tuple(found)


def _positional(inputs: Inputs, tensors: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
    """(positional arguments, keywords) of a call with a set."""
    names = FAMILIES[inputs.workload.request.family].positional
    rest = {name: tensor for name, tensor in tensors.items() if name not in names}
    return [tensors[name] for name in names], {**rest, **inputs.extra}


def _called(run: Callable[..., Any], inputs: Inputs) -> Call:
    sets = [_positional(inputs, tensors) for tensors in inputs.tensors]

    def call(number: int) -> Any:
        positional, keywords = sets[number]
        return run(*positional, **keywords)

    return call


def _trained(run: Callable[..., Any], inputs: Inputs) -> Call:
    """The forward and its backward, or the backward alone."""
    leaves = [inputs.leaves(number) for number in range(inputs.count)]
    sets = [_positional(inputs, tensors) for tensors in leaves]
    names = ["attn_mask" if name == "mask" else name for name in inputs.workload.request.grad if name != "lse"]

    def forward(number: int) -> list[Tensor]:
        positional, keywords = sets[number]
        result = run(*positional, **keywords)
        return list(result) if isinstance(result, tuple) else [result]

    kept = [forward(number) for number in range(inputs.count)] if inputs.backward_only else []

    def call(number: int) -> tuple[Tensor, ...]:
        outputs = kept[number] if kept else forward(number)
        upstream = [inputs.dout[number], *(d[number].to(outputs[-1].dtype) for d in [inputs.dlse] if d)]
        wanted = [leaves[number][name] for name in names]
        return torch.autograd.grad(
            outputs[: len(upstream)], wanted, upstream, retain_graph=bool(kept), materialize_grads=True
        )

    return call


def _served(chosen: Chosen, inputs: Inputs) -> Call:
    """Call as an engine runs a step: planned once, one call for each layer."""
    workload, step = inputs.workload, inputs.step
    if chosen.bound.session is None or workload.shared:
        return _called(chosen.bound.forward, inputs)
    assert step is not None
    limits = Limits(workload.batch, workload.tokens, workload.longest[1])
    slot = Workspaces(inputs.device).slot("measuring", 0, limits, step.page_table.shape[1])
    session = chosen.bound.session(slot)
    session.plan(step)
    session.prepare(step)
    return _called(session.forward, inputs)
