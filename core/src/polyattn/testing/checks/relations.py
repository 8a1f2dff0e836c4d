"""Two ways to the same numbers: decode and prefill, parts and the whole, one page table and another."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...semantics.merge_lse import merge
from ..calls import Target
from ..families import Call
from ..plain import in_float64, plainly
from ..poison import poisoned
from ..problems import Problem
from .notes import Notes
from .one_call import Result, against, averaged, gradients, run

__all__ = ["decode", "pages", "split"]


def decode(target: Target, problem: Problem, notes: Notes) -> None:
    """S4: one query at the end sees what the last row of prefill sees."""
    right, plain = in_float64(problem), plainly(problem)
    single, index, axis = problem.family.last(Call(problem.case, problem.tensors, problem.extra))
    with poisoned(problem.dout.device):
        raw = target.call(single.case, single.tensors, single.extra, None)
    out, lse = problem.family.returned(single.case.request, raw)
    shape = problem.family.out_shape(single.case)
    if out.shape != shape:
        notes.wrong("decode", f"shape {tuple(out.shape)}, {shape} is expected")
        return

    def last(whole: Tensor) -> Tensor:
        return whole.index_select(axis, index)

    # One row a sequence is few: without the floor of every output, luck would decide.
    notes.compare("decode", out, last(right.out), last(plain.out), floor=lambda: last(averaged(problem, right)))
    if lse is not None:
        notes.compare("decode lse", lse, last(right.lse), last(plain.lse), "lse")


def split(target: Target, problem: Problem, notes: Notes) -> None:
    """Keys cut into parts, each served alone, merged by LSE: out, LSE and gradients of the whole, sinks once."""
    case, request, device = problem.case, problem.request, problem.dout.device
    sinks = None
    if case.sink == "dominant":
        sinks = torch.full((request.heads,), 30 + math.log(case.longest[1]), device=device)
    elif request.grad:
        sinks = torch.full((request.heads,), 4.0, device=device).requires_grad_()
    whole = _with_sinks(problem, sinks)
    right, plain = in_float64(whole), plainly(whole)
    with poisoned(device):
        pieces = problem.family.pieces(Call(case, problem.tensors, problem.extra))
        partial = [target.call(piece.case, piece.tensors, piece.extra, None) for piece in pieces]
        layout: Any = request.layout
        merged, lse = merge([out for out, _ in partial], [lse for _, lse in partial], sinks=sinks, layout=layout)
        wanted = [name for name in whole.request.grad if name != "lse"]
        grads: Sequence[Tensor] = ()
        if wanted:
            inputs = [whole.tensors[name] for name in wanted]
            upstream = [problem.dout, problem.dlse.to(lse.dtype)]
            grads = gradients([merged, lse], upstream, inputs, notes)
    if notes.findings:
        return
    against(whole, Result(merged, lse, dict(zip(wanted, grads, strict=True))), right, plain, notes)


def _with_sinks(problem: Problem, sinks: Tensor | None) -> Problem:
    if sinks is None:
        return problem
    grad = tuple(n for n in problem.request.grad if n != "lse")
    if sinks.requires_grad:
        grad = (*grad, "sinks")
    request = dataclasses.replace(problem.request, sinks=True, grad=(*grad, "lse") if grad else ())
    case = dataclasses.replace(problem.case, request=request)
    return dataclasses.replace(problem, case=case, tensors={**problem.tensors, "sinks": sinks})


def pages(target: Target, problem: Problem, notes: Notes) -> None:
    """The same content on other pages: the same bits. A kernel that gives other bits for the very same pages too, and
    does not claim to be deterministic, is held to the gates instead."""
    right, plain = in_float64(problem), plainly(problem)
    result = run(target, problem, notes)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{problem.case.id} other pages".encode()))
    moved = problem.family.repaged(Call(problem.case, problem.tensors, problem.extra), generator)
    other = run(target, dataclasses.replace(problem, tensors=moved.tensors, extra=moved.extra), notes)
    if notes.findings:
        return
    against(problem, result, right, plain, notes)
    against(problem, other, right, plain, notes)
    again = run(target, problem, notes)
    if all(torch.equal(tensor, again.named()[name]) for name, tensor in result.named().items()):
        notes.same("pages", "the same content on other pages gave other bits", result.named(), other.named())
    elif problem.request.deterministic:
        notes.wrong("deterministic", "a second run gave other bits")
