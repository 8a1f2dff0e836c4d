"""Dropout (S11), by statistics."""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any

import torch
from torch import Tensor

from ..calls import Target
from ..plain import in_float64, plainly
from ..problems import Problem
from .notes import Notes
from .one_call import run

__all__ = ["dropout"]


def dropout(target: Target, problem: Problem, notes: Notes) -> None:
    """Check dropout with queries of 0 and values of 1. Every key weighs the same then, and an output is the sum of the
    kept weights: mean 1, variance p / (1 - p) / keys. And the backward drops what the forward dropped: the output is
    linear in the values, so <dvalue, value> = <dout, out>."""
    request, p = problem.request, problem.request.dropout
    tensors: dict[str, Tensor] = dict(problem.tensors)
    tensors["query"] = torch.zeros_like(tensors["query"].detach()).requires_grad_("query" in request.grad)
    for name in tensors.keys() & {"value", "value_cache", "cache"}:
        tensors[name] = torch.ones_like(tensors[name].detach()).requires_grad_(name in request.grad)
    given = dataclasses.replace(problem, tensors=tensors)
    right = in_float64(given)
    device = problem.dout.device
    here: dict[str, Any] = {"devices": []}
    if device.type != "cpu":
        here = {"devices": [device.index or 0], "device_type": device.type}
    # Kernels draw from torch's own generator; a case draws the same every time, and leaves the process's as it was.
    with torch.random.fork_rng(**here):
        torch.manual_seed(zlib.crc32(problem.case.id.encode()))
        result = run(target, given, notes)
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
