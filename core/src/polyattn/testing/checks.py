"""What must hold for one case. Everything it finds is reported, not the first thing only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..merging import merge
from .calls import Installed, Target, out_of, sayable
from .cases import Case
from .families import FAMILIES
from .plain import Solution, cancelling, in_float64, plainly
from .poison import poisoned
from .problems import Problem, build
from .tolerances import Finding, Kind, compare

__all__ = ["GRAD_ROUNDINGS", "OUT_ROUNDINGS", "Outcome", "run_case"]

GRAD_ROUNDINGS = 32
"""float32 roundings that are forgiven of each term of a gradient. Weights are recomputed as exp(logit - lse): one
rounding of a logit or an LSE of several nats is several roundings of a weight, and fast exponentials add about 20."""

OUT_ROUNDINGS = 4
"""float32 roundings of the largest value that are forgiven of an output. It is an average of values and smaller than
they are; the errors of its weights are relative to them. Only float32 feels it."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one case.

    Attributes:
        margins: for each check, how much of its allowance was used (1 = all of it).
    """

    case: Case
    verdict: Literal["passed", "refused", "failed"]
    findings: tuple[Finding, ...] = ()
    margins: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return "\n  ".join([f"{self.case.id}: {self.verdict}", *map(str, self.findings)])


class _Notes:
    """Collects findings and margins of one case."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        self.findings: list[Finding] = []
        self.margins: dict[str, float] = {}

    def wrong(self, check: str, message: str) -> None:
        self.findings.append(Finding(check, message))

    def compare(
        self, name: str, actual: Tensor, right: Tensor, plain: Tensor, kind: Kind = "out", floor: Tensor | float = 0.0
    ) -> None:
        softcap = self.case.request.softcap > 0
        # Sinks may be float32 beside float64 queries: their gradient is no finer than they are.
        coarse = actual.dtype == torch.float32 and kind == "grad" and self.dtype == torch.float64
        dtype = torch.float32 if coarse else self.dtype
        finding, margin = compare(name, actual, right, plain, dtype, softcap, kind, floor)
        self.margins[name] = max(margin, self.margins.get(name, 0.0))
        if finding is not None:
            self.findings.append(finding)


def run_case(target: Target, case: Case) -> Outcome:
    """Run one case on a target.

    An exception is a finding like any other, since what is declared must work; one that says that the device is lost
    (CUDA errors are sticky) is for the caller to notice: every later case will raise too.
    """
    if case.check == "refusal":
        return _refusal(target, case)
    problem = build(case, target.device)
    notes = _Notes(case, problem.dtype)
    try:
        _CHECKS[case.check](target, problem, notes)
    except Exception as exc:  # noqa: BLE001
        # A declared case that cannot be run is what the kit is there to find, whatever the adapter raises.
        notes.wrong("call", f"raised {type(exc).__name__}: {exc}")
    verdict: Literal["passed", "failed"] = "failed" if notes.findings else "passed"
    return Outcome(case, verdict, tuple(notes.findings), notes.margins)


def _refusal(target: Target, case: Case) -> Outcome:
    if not isinstance(target, Installed):
        raise TypeError(f"refusals are judged by selection, which {type(target).__name__} does not go through")
    error = target.refuse(case)
    if error is None:
        asked = " with ".join(case.fields)
        return Outcome(case, "failed", (Finding("refusal", f"{asked} is not declared, and was accepted"),))
    if not any(field in str(error) for field in case.fields):
        named = " or ".join(case.fields)
        return Outcome(case, "failed", (Finding("refusal", f"no reason names {named}: {error}"),))
    return Outcome(case, "refused")


@dataclasses.dataclass(frozen=True)
class _Result:
    out: Tensor
    lse: Tensor | None
    grads: Mapping[str, Tensor]


def _run(target: Target, problem: Problem, notes: _Notes, out: Tensor | None = None) -> _Result:
    """One call, backward included, with poisoned memory, checked for its form."""
    request = problem.request
    with poisoned(problem.dout.device):
        raw = target.call(problem.case, problem.tensors, problem.extra, out)
        result, lse = raw if request.lse else (raw, None)
        wanted = [name for name in request.grad if name != "lse"]
        grads: Sequence[Tensor] = ()
        if wanted:
            outputs, upstream = [result], [problem.dout]
            if lse is not None and problem.through_lse:
                outputs.append(lse)
                upstream.append(problem.dlse.to(lse.dtype))
            inputs = [problem.tensors[name] for name in wanted]
            grads = torch.autograd.grad(outputs, inputs, upstream, materialize_grads=True)
    _check_form(problem, result, lse, out, notes)
    return _Result(result, lse, dict(zip(wanted, grads, strict=True)))


def _check_form(problem: Problem, result: Tensor, lse: Tensor | None, out: Tensor | None, notes: _Notes) -> None:
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
    # S6: float32, and in float64 the reference's own precision is welcome.
    allowed = (torch.float32, torch.float64) if problem.dtype == torch.float64 else (torch.float32,)
    if lse is not None and (lse.dtype not in allowed or lse.shape != shape[:-1]):
        notes.wrong("lse", f"{lse.dtype} {tuple(lse.shape)}, float32 {tuple(shape[:-1])} is expected")


def _values(target: Target, problem: Problem, notes: _Notes) -> None:
    """The result against the reference, and everything else that one call shows."""
    case, request = problem.case, problem.request
    right, plain = in_float64(problem), plainly(problem)
    before = {name: t.detach().clone() for name, t in problem.tensors.items()}
    out = out_of(case, tuple(problem.dout.shape), problem.dtype, problem.dout.device)
    # What a transform or a capture adds to a request is seen from inside it only.
    if isinstance(target, Installed) and sayable(case) and not request.transform and not request.graph_capture:
        _check_request(target, problem, notes)
    result = _run(target, problem, notes, out)
    if notes.findings:
        return
    _check_solution(problem, result, right, plain, notes)
    _check_inputs(problem, before, notes)
    if request.deterministic:
        _check_same(result, _run(target, problem, notes, out), "deterministic", "a second run gave other bits", notes)
    if request.batch_invariant and request.family == "dense":
        _check_alone(target, problem, result, notes)


def _check_request(target: Installed, problem: Problem, notes: _Notes) -> None:
    asked = target.asked(problem.case, problem.tensors, problem.extra)
    meant = target.request(problem.case)
    for field in dataclasses.fields(meant):
        if getattr(asked, field.name) != getattr(meant, field.name):
            said, wanted = getattr(asked, field.name), getattr(meant, field.name)
            notes.wrong("request", f"the call asked for {field.name}={said!r}, {wanted!r} was meant")


def _check_solution(problem: Problem, result: _Result, right: Solution, plain: Solution, notes: _Notes) -> None:
    eps = torch.finfo(torch.promote_types(problem.dtype, torch.float32)).eps
    gap = _sink_gap(problem, right)
    averaged = OUT_ROUNDINGS * problem.largest_value * _kept_by_sinks(problem, right)
    notes.compare("out", result.out, right.out, plain.out, floor=eps * (averaged + gap * right.out.abs()))
    if result.lse is not None:
        notes.compare("lse", result.lse, right.lse, plain.lse, "lse")
    terms = cancelling(problem) if result.grads else {}
    for name, grad in result.grads.items():
        own = max(eps, torch.finfo(grad.dtype).eps) if grad.dtype == torch.float32 else eps
        floor = (GRAD_ROUNDINGS + gap) * own * terms[name]
        if name == "sinks":
            # It is taken from the output as stored; the roundings of its many numbers add up like a random walk.
            count = max(result.out.numel() // problem.request.heads, 1)
            floor += torch.finfo(problem.dtype).eps * terms[name] / count**0.5
        notes.compare(f"grad {name}", grad, right.grads[name], plain.grads[name], "grad", floor)
    empty = right.lse == float("-inf")
    if bool(empty.any()) and bool((result.out[empty] != 0).any()):
        notes.wrong("empty rows", "a query that sees no key does not give exactly 0")
    if bool(empty.any()) and "query" in result.grads and bool((result.grads["query"][empty] != 0).any()):
        notes.wrong("empty rows", "a query that sees no key has a gradient that is not exactly 0")


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


def _check_inputs(problem: Problem, before: Mapping[str, Tensor], notes: _Notes) -> None:
    """Nothing was written to but a cache that this call was asked to write."""
    expected = dict(before)
    if problem.request.save_kv_cache:
        for name in ("key", "value"):
            expected[f"{name}_cache"] = _written(problem, before, name)
    for name, tensor in problem.tensors.items():
        if not torch.equal(tensor.detach().double().nan_to_num(7e7), expected[name].double().nan_to_num(7e7)):
            notes.wrong("inputs", f"{name} is not what it must be after the call")


def _written(problem: Problem, before: Mapping[str, Tensor], name: str) -> Tensor:
    """The cache after this call's rows were stored (S9)."""
    request, new = problem.request, before[name]
    cache, scale = before[f"{name}_cache"].clone(), before.get(f"{name[0]}_scale")
    view = cache.transpose(1, 2) if request.kv_layout == "HND" else cache
    if scale is not None and scale.dim() == 3 and request.kv_layout == "HND":
        scale = scale.transpose(1, 2)
    row = 0
    for n, (s_q, s_k) in enumerate(problem.case.lengths):
        if not s_k:
            row += s_q
        for t in range(s_k - s_q, s_k) if s_k else ():
            page = int(problem.extra["page_table"][n, t // request.page_size])
            place = t % request.page_size
            factor = torch.ones(()) if scale is None else scale[page, place] if scale.dim() == 3 else scale
            view[page, place] = (new[row] / factor.reshape(-1, 1).to(new.device)).to(cache.dtype)
            row += 1
    return cache


def _check_same(first: _Result, second: _Result, check: str, message: str, notes: _Notes) -> None:
    pairs = {"out": (first.out, second.out), **{f"grad {n}": (g, second.grads[n]) for n, g in first.grads.items()}}
    if first.lse is not None and second.lse is not None:
        pairs["lse"] = (first.lse, second.lse)
    for name, (a, b) in pairs.items():
        if not torch.equal(a, b):
            notes.wrong(check, f"{name}: {message}")


def _check_alone(target: Target, problem: Problem, result: _Result, notes: _Notes) -> None:
    """Batch invariance: the first sample alone gives the same bits."""
    case = problem.case
    alone = {name: t.detach() if name == "sinks" else t.detach()[:1] for name, t in problem.tensors.items()}
    request = dataclasses.replace(case.request, grad=())
    single = dataclasses.replace(case, request=request, lengths=case.lengths[:1], out="")
    raw = target.call(single, alone, problem.extra, None)
    out, lse = raw if request.lse else (raw, None)
    whole = _Result(result.out[:1], None if result.lse is None else result.lse[:1], {})
    message = "a sample alone gave other bits than in its batch"
    _check_same(whole, _Result(out, lse, {}), "batch_invariant", message, notes)


def _decode(target: Target, problem: Problem, notes: _Notes) -> None:
    """S4: one query at the end sees what the last row of prefill sees."""
    case, family = problem.case, FAMILIES[problem.request.family]
    right, plain = in_float64(problem), plainly(problem)
    request = dataclasses.replace(case.request, s_relation="one")
    alive = [n for n, (s_q, _) in enumerate(case.lengths) if s_q]
    single = dataclasses.replace(case, request=request, lengths=tuple((min(q, 1), k) for q, k in case.lengths))
    if request.family == "dense":
        axis = 1 if request.layout == "BSHD" else 2
        last = torch.tensor([case.longest[0] - 1], device=problem.dout.device)
    else:
        axis = 0
        ends = torch.tensor([q for q, _ in case.lengths]).cumsum(0) - 1
        last = ends[alive].to(problem.dout.device)
    decoding = build(single, target.device)
    tensors = {**problem.tensors, "query": problem.tensors["query"].index_select(axis, last)}
    extra = decoding.extra
    if request.family == "varlen":
        extra = {**extra, "cu_seqlens_k": problem.extra["cu_seqlens_k"], "max_seqlen_k": case.longest[1]}
    with poisoned(problem.dout.device):
        raw = target.call(single, tensors, extra, None)
    out, lse = raw if request.lse else (raw, None)
    if out.shape != family.out_shape(single):
        notes.wrong("decode", f"shape {tuple(out.shape)}, {family.out_shape(single)} is expected")
        return
    notes.compare("decode", out, right.out.index_select(axis, last), plain.out.index_select(axis, last))
    if lse is not None:
        notes.compare("decode lse", lse, right.lse.index_select(axis, last), plain.lse.index_select(axis, last), "lse")


def _split(target: Target, problem: Problem, notes: _Notes) -> None:
    """Keys cut in two, each part served alone, merged by LSE: out, LSE and gradients of the whole, sinks once."""
    case, request = problem.case, problem.request
    device = problem.dout.device
    heads = request.heads
    sinks = None
    if case.sink == "dominant":
        sinks = torch.full((heads,), 30 + math.log(case.longest[1]), device=device)
    elif request.grad:
        sinks = torch.full((heads,), 4.0, device=device).requires_grad_()
    whole = _with_sinks(problem, sinks)
    right, plain = in_float64(whole), plainly(whole)
    tensors = dict(problem.tensors)
    axis = 1 if request.layout == "BSHD" else 2
    outs, lses = [], []
    cut = 37
    with poisoned(device):
        for span in (slice(0, cut), slice(cut, case.longest[1])):
            out, lse = _part(target, case, tensors, axis, span)
            outs.append(out)
            lses.append(lse)
        merged, lse = merge(outs, lses, sinks=sinks, layout="BSHD" if request.layout == "BSHD" else "BHSD")
        wanted = [name for name in whole.request.grad if name != "lse"]
        grads: Sequence[Tensor] = ()
        if wanted:
            inputs = [whole.tensors[name] for name in wanted]
            upstream = [problem.dout, problem.dlse.to(lse.dtype)]
            grads = torch.autograd.grad([merged, lse], inputs, upstream, materialize_grads=True)
    result = _Result(merged, lse, dict(zip(wanted, grads, strict=True)))
    _check_solution(whole, result, right, plain, notes)


def _with_sinks(problem: Problem, sinks: Tensor | None) -> Problem:
    if sinks is None:
        return problem
    grad = tuple(n for n in problem.request.grad if n != "lse")
    if sinks.requires_grad:
        grad = (*grad, "sinks")
    request = dataclasses.replace(problem.request, sinks=True, grad=(*grad, "lse") if grad else ())
    case = dataclasses.replace(problem.case, request=request)
    return dataclasses.replace(problem, case=case, tensors={**problem.tensors, "sinks": sinks})


def _part(target: Target, case: Case, tensors: Mapping[str, Tensor], axis: int, span: slice) -> Any:
    s_q, s_k = case.longest[0], span.stop - span.start
    relation: Any = "equal" if s_q == s_k else "fewer" if s_q < s_k else "more"
    request = dataclasses.replace(case.request, s_relation=relation)
    part = dataclasses.replace(case, request=request, lengths=((s_q, s_k),) * len(case.lengths))
    index = (slice(None),) * axis + (span,)
    cut: dict[str, Tensor] = {"query": tensors["query"], "key": tensors["key"][index], "value": tensors["value"][index]}
    if "mask" in tensors:
        cut["mask"] = tensors["mask"][..., span]
    return target.call(part, cut, {}, None)


def _dropout(target: Target, problem: Problem, notes: _Notes) -> None:
    """S11, by statistics. With queries of 0 every key weighs the same, and with values of 1 an output is the sum of the
    kept weights: mean 1, variance p / (1 - p) / keys. And the backward drops what the forward dropped: the output is
    linear in the values, so <dvalue, value> = <dout, out>."""
    request, p = problem.request, problem.request.dropout
    tensors: dict[str, Tensor] = dict(problem.tensors)
    tensors["query"] = torch.zeros_like(tensors["query"].detach()).requires_grad_("query" in request.grad)
    for name in tensors.keys() & {"value", "value_cache", "cache"}:
        tensors[name] = torch.ones_like(tensors[name].detach()).requires_grad_(name in request.grad)
    given = dataclasses.replace(problem, tensors=tensors)
    right = in_float64(given)
    result = _run(target, given, notes)
    alive = right.lse != float("-inf")
    keys = torch.exp(right.lse)
    sums = result.out.detach().double()[..., 0]
    deviation = ((sums - 1) * (keys * (1 - p) / p).sqrt())[alive]
    count = deviation.numel()
    # Kernels draw by blocks, so rows are not quite independent; scaling by the wrong factor is tens of deviations off.
    if abs(float(deviation.mean())) > 10 / math.sqrt(count):
        notes.wrong("dropout", f"the kept weights sum to {float(sums[alive].mean()):.4f} on average, not to 1")
    spread = float(deviation.square().mean())
    if not 0.7 < spread < 1.4:
        notes.wrong("dropout", f"the variance of the kept weights is {spread:.3f} times that of dropping with p={p}")
    if result.lse is not None:
        notes.compare("lse", result.lse, right.lse, plainly(given).lse, "lse")
    if "value" in result.grads:
        by_value = float(result.grads["value"].double().sum())
        by_out = float((problem.dout.double() * result.out.detach().double()).sum())
        scale = float((problem.dout.double() * result.out.detach().double()).abs().sum())
        if abs(by_value - by_out) > 1e-2 * scale / math.sqrt(count):
            sums_differ = f"<dvalue, value> = {by_value:.4f}, <dout, out> = {by_out:.4f}"
            notes.wrong("dropout", f"the backward dropped other weights: {sums_differ}")


def _capture(target: Target, problem: Problem, notes: _Notes) -> None:
    """Recorded into a CUDA graph and replayed on other inputs: the result is that of the inputs at replay."""
    tensors = dict(problem.tensors)
    final = tensors["query"].clone()
    tensors["query"].zero_()
    stream = torch.cuda.Stream(problem.dout.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(problem.dout.device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            target.call(problem.case, tensors, problem.extra, None)
    torch.cuda.current_stream(problem.dout.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        raw = target.call(problem.case, tensors, problem.extra, None)
    result, lse = raw if problem.request.lse else (raw, None)
    result.fill_(float("nan"))
    tensors["query"].copy_(final)
    graph.replay()
    _check_solution(problem, _Result(result, lse, {}), in_float64(problem), plainly(problem), notes)


_CHECKS = {"values": _values, "decode": _decode, "split": _split, "dropout": _dropout, "capture": _capture}
