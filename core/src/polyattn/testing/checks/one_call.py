"""This module compares one call with the reference, and checks everything else that one call shows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..calls import Installed, Target, out_of, sayable
from ..families import Call
from ..plain import Solution, cancelling, in_float64, plainly
from ..poison import poisoned
from ..problems import Problem
from ..process import left_alone
from ..tolerances import Kind
from .notes import Notes

__all__ = ["GRAD_ROUNDINGS", "OUT_ROUNDINGS", "Result", "against", "averaged", "gradients", "run", "values"]

GRAD_ROUNDINGS = 32
"""float32 roundings that are forgiven of each term of a gradient. Weights are recomputed as exp(logit - lse): one
rounding of a logit or an LSE of several nats is several roundings of a weight, and fast exponentials add about 20."""

OUT_ROUNDINGS = 4
"""float32 roundings of the largest value that are forgiven of an output. It is an average of values and smaller than
they are; the errors of its weights are relative to them. Only float32 feels it."""


FAR_ROUNDINGS = 8
"""Roundings of a sum as large as `Case.far` that are forgiven of an LSE: a logit far from 0 is such a sum of many
products. The same of it is an error of the weights, and of all that is made with them."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Describes what a call returned: the output, what came beside it (`Family.second`), and the gradients by input
    name."""

    out: Tensor
    lse: Tensor | None
    grads: Mapping[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        """Return all parts of the result by name."""
        second = {} if self.lse is None else {"lse": self.lse}
        return {"out": self.out, **second, **{f"grad {name}": grad for name, grad in self.grads.items()}}


def values(target: Target, problem: Problem, notes: Notes) -> None:
    """The check `values`."""
    case, request = problem.case, problem.request
    right, plain = in_float64(problem), plainly(problem)
    before = {name: t.detach().clone() for name, t in problem.tensors.items()}
    out = out_of(case, tuple(problem.dout.shape), problem.dtype, problem.dout.device)
    # What a transform or a capture adds to a request is seen from inside it only.
    plainly_said = not (request.transform or request.graph_capture or case.place)
    if isinstance(target, Installed) and sayable(case) and plainly_said:
        _check_request(target, problem, notes)
    result = run(target, problem, notes, out)
    if notes.findings:
        return
    against(problem, result, right, plain, notes)
    _check_inputs(problem, before, notes)
    if request.deterministic:
        again = run(target, problem, notes, out)
        notes.same("deterministic", "a second run gave other bits", result.named(), again.named())
    if request.batch_invariant and len(case.lengths) > 1:
        _check_alone(target, problem, result, notes)


def run(target: Target, problem: Problem, notes: Notes, out: Tensor | None = None) -> Result:
    """Run one call, backward included, with poisoned memory, and check its form."""
    request, device = problem.request, problem.dout.device
    untouched = left_alone(device, functools.partial(notes.wrong, "process"), random=request.dropout > 0)
    with poisoned(device), untouched:
        lent = problem.family.lent(problem.extra)
        raw = target.call(problem.case, problem.tensors, lent, out)
        result, second = problem.family.returned(request, raw)
        if wrong := problem.family.misused(problem.case, problem.extra, lent, second):
            notes.wrong(problem.family.second, wrong)
        wanted = problem.family.differentiated(problem.case)
        grads: Sequence[Tensor] = ()
        if wanted:
            outputs, upstream = [result], [problem.dout]
            if second is not None and problem.through_lse:
                outputs.append(second)
                upstream.append(problem.dlse.to(second.dtype))
            grads = gradients(outputs, upstream, [problem.tensors[name] for name in wanted], notes)
    _check_form(problem, result, second, out, notes)
    return Result(result, second, dict(zip(wanted, grads, strict=bool(grads))))


def gradients(
    outputs: Sequence[Tensor], upstream: Sequence[Tensor], inputs: Sequence[Tensor], notes: Notes
) -> Sequence[Tensor]:
    """The gradients of inputs; none, and a finding, where what came back is cut off from them."""
    if not all(output.requires_grad or not output.numel() for output in outputs):
        notes.wrong(
            "gradients",
            "the row declares them, and what the call returned depends on no input: its Bound has no backward, and "
            "autograd cannot see into its forward. Hand over Bound(forward, backward), or take `grad` out of the row",
        )
        return ()
    return torch.autograd.grad(outputs, inputs, upstream, materialize_grads=True)


def _check_form(problem: Problem, result: Tensor, second: Tensor | None, out: Tensor | None, notes: Notes) -> None:
    """The contract on what is returned: dtype, shape, strides, memory."""
    shape = problem.dout.shape
    if result.dtype != problem.dtype:
        notes.wrong("out", f"dtype {result.dtype}, the query's {problem.dtype} is expected")
    if result.shape != shape:
        notes.wrong("out", f"shape {tuple(result.shape)}, {tuple(shape)} is expected")
    if result.shape[-1] > 1 and result.numel() and result.stride(-1) != 1:
        notes.wrong("out", f"its last axis is not dense: strides {tuple(result.stride())}")
    owned = {t.untyped_storage().data_ptr() for t in problem.tensors.values() if t.numel()}
    if out is None and result.numel() and result.untyped_storage().data_ptr() in owned:
        notes.wrong("out", "it shares memory with an input")
    if out is not None and (result.data_ptr() != out.data_ptr() or result.stride() != out.stride()):
        notes.wrong("out=", "the result is not the tensor that was given")
    form, dtypes = problem.family.second_form(problem.case)
    if second is not None and (second.dtype not in dtypes or second.shape != form):
        expected = str(dtypes[0]).removeprefix("torch.")
        notes.wrong(problem.family.second, f"{second.dtype} {tuple(second.shape)}, {expected} {form} is expected")


def _check_request(target: Installed, problem: Problem, notes: Notes) -> None:
    asked = target.asked(problem.case, problem.tensors, problem.extra)
    meant = target.request(problem.case)
    for field in dataclasses.fields(meant):
        if getattr(asked, field.name) != getattr(meant, field.name):
            said, wanted = getattr(asked, field.name), getattr(meant, field.name)
            notes.wrong("request", f"the call asked for {field.name}={said!r}, {wanted!r} was meant")


def against(problem: Problem, result: Result, right: Solution, plain: Solution, notes: Notes) -> None:
    """A result against the reference: both gates for everything, and rows that see no key exactly."""
    eps = torch.finfo(torch.promote_types(problem.dtype, torch.float32)).eps
    gap = _sink_gap(problem, right) + problem.case.far
    notes.compare("out", result.out, right.out, plain.out, floor=functools.partial(averaged, problem, right))
    second = problem.family.second
    if result.lse is not None:
        kind: Kind = "lse" if second == "lse" else "out"
        floor_of_lse = functools.partial(torch.full_like, right.lse, FAR_ROUNDINGS * eps * problem.case.far)
        notes.compare(second, result.lse, right.lse, plain.lse, kind, floor_of_lse)
    terms = functools.cache(lambda: cancelling(problem))

    def cancelled(name: str) -> Tensor:
        grad = result.grads[name]
        own = max(eps, torch.finfo(grad.dtype).eps) if grad.dtype == torch.float32 else eps
        floor = (GRAD_ROUNDINGS + gap) * own * terms()[name]
        if name == "sinks":
            # It is taken from the output as stored; the roundings of its many numbers add up like a random walk.
            count = max(result.out.numel() // problem.request.heads, 1)
            floor += torch.finfo(problem.dtype).eps * terms()[name] / count**0.5
        return floor

    for name, grad in result.grads.items():
        floor = functools.partial(cancelled, name)
        notes.compare(f"grad {name}", grad, right.grads[name], plain.grads[name], "grad", floor)
    empty = right.lse == float("-inf")
    if bool(empty.any()) and bool((result.out[empty] != 0).any()):
        notes.wrong("empty rows", "a query that sees no key does not give exactly 0")
    if bool(empty.any()) and "query" in result.grads and bool((result.grads["query"][empty] != 0).any()):
        notes.wrong("empty rows", "a query that sees no key has a gradient that is not exactly 0")


def averaged(problem: Problem, right: Solution) -> Tensor:
    """The error that is forgiven of each number of an output whatever plain torch's is, see `OUT_ROUNDINGS`."""
    eps = torch.finfo(torch.promote_types(problem.dtype, torch.float32)).eps
    kept = _kept_by_sinks(problem, right)
    averages = (OUT_ROUNDINGS + problem.case.far) * problem.largest_value * kept
    return eps * (averages + _sink_gap(problem, right) * right.out.abs())


def _sink_gap(problem: Problem, right: Solution) -> float:
    """How many nats the sinks are from the LSEs at most: exp(lse - sink) is exact to that many roundings."""
    sinks = problem.tensors.get("sinks")
    if sinks is None:
        return 0.0
    lse = right.lse[right.lse.isfinite()].double()
    level = sinks.detach()[sinks.detach().isfinite()].double()
    return float((level.max() - lse.min()).abs()) if lse.numel() and level.numel() else 0.0


def _kept_by_sinks(problem: Problem, right: Solution) -> Tensor | float:
    """The part of an output that its sink leaves, to be multiplied with something of the output's shape."""
    sinks = problem.tensors.get("sinks")
    if sinks is None:
        return 1.0
    level = sinks.detach().double()
    kept = torch.sigmoid(right.lse - (level[:, None] if problem.request.layout == "BHSD" else level))
    return kept.nan_to_num(0.0).unsqueeze(-1)


def _check_inputs(problem: Problem, before: Mapping[str, Tensor], notes: Notes) -> None:
    """Check that the call wrote nothing but a cache that it was asked to write."""
    expected = {**before, **problem.family.written(Call(problem.case, before, problem.extra))}
    for name, tensor in problem.tensors.items():
        if not torch.equal(tensor.detach().double().nan_to_num(7e7), expected[name].double().nan_to_num(7e7)):
            notes.wrong("inputs", f"{name} is not what it must be after the call")


def _check_alone(target: Target, problem: Problem, result: Result, notes: Notes) -> None:
    """Batch invariance: the first sequence alone gives the same bits."""
    given = {name: t.detach() for name, t in problem.tensors.items()}
    alone, count = problem.family.first(Call(problem.case, given, problem.extra))
    case = dataclasses.replace(alone.case, request=dataclasses.replace(alone.case.request, grad=()), out="")
    with poisoned(problem.dout.device):
        raw = target.call(case, alone.tensors, problem.family.lent(alone.extra), None)
        out, second = problem.family.returned(case.request, raw)
    whole = Result(result.out[:count], None if result.lse is None else result.lse[:count], {})
    message = "a sequence alone gave other bits than in its batch"
    single = Result(out, None if second is None else second[:count], {})
    notes.same("batch_invariant", message, whole.named(), single.named())
