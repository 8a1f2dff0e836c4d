"""Each check of the kit catches the fault it is for: a right kernel is bent in one way, and the kit must say so."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.registry.manager import get_manager
from polyattn.semantics import reference
from polyattn.testing import Case, Outcome, generate, run_case
from polyattn.testing.process import _PARTS, left_alone

Kernel = Callable[..., Any]


class Bent:
    """A backend that computes in float32 what the reference does, then passes through a fault."""

    name = "bent"
    device = torch.device("cpu")

    def __init__(self, fault: Callable[[Kernel], Kernel] | None = None) -> None:
        self.kernel: Kernel = honest if fault is None else fault(honest)

    def call(self, case: Case, tensors: dict[str, Tensor], extra: dict[str, Any], out: Tensor | None) -> Any:
        return self.kernel(case, dict(tensors), extra, out)


def honest(case: Case, tensors: dict[str, Tensor], extra: dict[str, Any], out: Tensor | None, **changes: Any) -> Any:
    r = case.request
    options: dict[str, Any] = {
        "causal": r.causal,
        "window": r.window,
        "chunk": r.chunk,
        "softcap": r.softcap,
        "scale": r.scale,
        "sinks": tensors.get("sinks"),
        "attn_mask": tensors.get("mask"),
        "alibi": tensors.get("alibi"),
        "dropout_p": r.dropout,
        "return_lse": r.lse,
        **changes,
    }
    inputs = (tensors["query"], tensors["key"], tensors["value"])
    if r.family == "varlen":
        result = reference.varlen_attention(*inputs, **extra, **options)
    else:
        result = reference.attention(*inputs, layout=r.layout, **options)
    if out is None:
        return result
    return (out.copy_(result[0]), result[1]) if isinstance(result, tuple) else out.copy_(result)


def on_result(change: Callable[[Case, Tensor], Tensor]) -> Callable[[Kernel], Kernel]:
    """A fault of the output."""

    def fault(kernel: Kernel) -> Kernel:
        def call(case: Case, tensors: Any, extra: Any, out: Any) -> Any:
            raw = kernel(case, tensors, extra, out)
            return (change(case, raw[0]), raw[1]) if isinstance(raw, tuple) else change(case, raw)

        return call

    return fault


def on_lse(change: Callable[[Case, Any, Tensor], Tensor]) -> Callable[[Kernel], Kernel]:
    """A fault of the LSE."""

    def fault(kernel: Kernel) -> Kernel:
        def call(case: Case, tensors: Any, extra: Any, out: Any) -> Any:
            raw = kernel(case, tensors, extra, out)
            return (raw[0], change(case, tensors, raw[1])) if isinstance(raw, tuple) else raw

        return call

    return fault


def asking(**changes: Callable[[Case, Any], Any]) -> Callable[[Kernel], Kernel]:
    """A fault of what is asked for: an argument that is dropped or changed on the way."""

    def fault(kernel: Kernel) -> Kernel:
        def call(case: Case, tensors: Any, extra: Any, out: Any) -> Any:
            found = {name: change(case, tensors) for name, change in changes.items()}
            return kernel(case, tensors, extra, out, **found)

        return call

    return fault


def with_tensors(change: Callable[[Case, dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Kernel], Kernel]:
    """A fault in reading the inputs."""

    def fault(kernel: Kernel) -> Kernel:
        return lambda case, tensors, extra, out: kernel(case, {**tensors, **change(case, tensors)}, extra, out)

    return fault


class _Scaled(torch.autograd.Function):
    """Right forward, gradient `factor` times what it should be."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def unwritten_row(case: Case, result: Tensor) -> Tensor:
    made = torch.empty_like(result)
    made[..., : result.shape[-1] // 2] = result[..., : result.shape[-1] // 2]
    return made


def transposed_last_axis(case: Case, result: Tensor) -> Tensor:
    return result.transpose(-1, -2).contiguous().transpose(-1, -2)


def writes_query(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    with torch.no_grad():
        tensors["query"].mul_(1.5)
    return {"query": tensors["query"] / 1.5}


def in_place(kernel: Kernel) -> Kernel:
    """The result takes the query's place."""

    def call(case: Case, tensors: Any, extra: Any, out: Any) -> Any:
        raw = kernel(case, tensors, extra, out)
        result = raw[0] if isinstance(raw, tuple) else raw
        query = tensors["query"].detach()
        if query.shape != result.shape:
            return raw
        query.copy_(result)
        return (query, raw[1]) if isinstance(raw, tuple) else query

    return call


def wobbles(kernel: Kernel) -> Kernel:
    calls = iter(range(10**9))
    return on_result(lambda case, result: result + (next(calls) % 2) * 1e-7)(kernel)


def knows_its_batch(case: Case, result: Tensor) -> Tensor:
    return result + 1e-7 * (len(case.lengths) > 1)


def interleaved_heads(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Query head h reads key head h % H_kv, not h // group."""
    r = case.request
    axis = 1 if r.layout in ("BHSD", "THD") else 2
    order = torch.arange(r.heads).view(r.kv_heads, r.group).T.flatten()
    return {n: tensors[n].repeat_interleave(r.group, axis).index_select(axis, order) for n in ("key", "value")}


def dropout_anew(kernel: Kernel) -> Kernel:
    """The backward draws its own dropout mask."""

    def call(case: Case, tensors: Any, extra: Any, out: Any) -> Any:
        result = kernel(case, {n: t.detach() for n, t in tensors.items()}, extra, out)
        again = kernel(case, tensors, extra, out)
        return again + (result - again).detach() if isinstance(result, Tensor) else (result[0], again[1])

    return call


def empty_rows_get(fill: float) -> Callable[[Kernel], Kernel]:
    def fault(kernel: Kernel) -> Kernel:
        def call(case: Case, tensors: Any, extra: Any, out: Any) -> Any:
            raw = kernel(case, tensors, extra, out)
            return (raw[0].masked_fill((raw[1] == float("-inf"))[..., None], fill), raw[1]) if case.request.lse else raw

        return call

    return fault


def changing(what: Callable[[], Any]) -> Callable[[Kernel], Kernel]:
    """A fault of the process."""

    def fault(kernel: Kernel) -> Kernel:
        def call(case: Case, tensors: Any, extra: Any, out: Any) -> Any:
            raw = kernel(case, tensors, extra, out)
            what()
            return raw

        return call

    return fault


FAULTS: dict[str, tuple[Callable[[Kernel], Kernel], str]] = {
    "output partly unwritten": (on_result(unwritten_row), "out"),
    "output in float32": (on_result(lambda case, out: out.float()), "out"),
    "output not dense": (on_result(transposed_last_axis), "out"),
    "output too long": (on_result(lambda case, out: torch.cat([out, out])), "out"),
    "output is an input": (in_place, "out"),
    "out= not used": (lambda kernel: lambda case, t, extra, out: kernel(case, t, extra, None), "out="),
    "inputs written to": (with_tensors(writes_query), "inputs"),
    "causal dropped": (asking(causal=lambda case, t: "none"), "out"),
    "causal aligned top-left": (
        asking(causal=lambda case, t: "top_left" if case.request.causal != "none" else "none"),
        "out",
    ),
    "window one key too wide": (
        asking(window=lambda case, t: tuple(n + (n >= 0) for n in case.request.window)),
        "out",
    ),
    "chunk dropped": (asking(chunk=lambda case, t: 0), "out"),
    "softcap dropped": (asking(softcap=lambda case, t: 0.0), "out"),
    "scale dropped": (asking(scale=lambda case, t: None), "out"),
    "scale off by 2 %": (
        asking(scale=lambda case, t: 1.02 * (case.request.scale or case.request.head_dim**-0.5)),
        "out",
    ),
    "mask dropped": (asking(attn_mask=lambda case, t: None), "out"),
    "sinks dropped": (asking(sinks=lambda case, t: None), "out"),
    "sinks scaled": (
        asking(sinks=lambda case, t: t["sinks"] * case.request.head_dim**-0.5 if "sinks" in t else None),
        "out",
    ),
    "heads interleaved": (with_tensors(interleaved_heads), "out"),
    "last key dropped": (
        asking(attn_mask=lambda case, t: _without_last_key(case, t)),
        "out",
    ),
    "empty rows NaN": (empty_rows_get(float("nan")), "out"),
    "empty rows not 0": (empty_rows_get(1e-30), "empty rows"),
    "LSE of empty rows 0": (on_lse(lambda case, t, lse: lse.masked_fill(lse == float("-inf"), 0.0)), "lse"),
    "LSE in log2": (on_lse(lambda case, t, lse: lse * 1.4426950408889634), "lse"),
    "LSE in half precision": (on_lse(lambda case, t, lse: lse.bfloat16()), "lse"),
    "LSE of another layout": (on_lse(lambda case, t, lse: lse.transpose(-1, -2)), "lse"),
    "LSE detached": (on_lse(lambda case, t, lse: lse.detach()), "call"),
    "LSE with half a gradient": (on_lse(lambda case, t, lse: _Scaled.apply(lse, 0.5)), "grad query"),
    "gradient of keys off by 2 %": (
        with_tensors(lambda case, t: {"key": _Scaled.apply(t["key"], 1.02)}),
        "grad key",
    ),
    "gradient of values lost": (with_tensors(lambda case, t: {"value": t["value"].detach()}), "grad value"),
    "gradient of the mask lost": (
        with_tensors(lambda case, t: {"mask": t["mask"].detach()} if "mask" in t else {}),
        "grad mask",
    ),
    "gradient of sinks lost": (
        with_tensors(lambda case, t: {"sinks": t["sinks"].detach()} if "sinks" in t else {}),
        "grad sinks",
    ),
    "not deterministic": (wobbles, "deterministic"),
    "not batch invariant": (on_result(knows_its_batch), "batch_invariant"),
    "dropout dropped": (asking(dropout_p=lambda case, t: 0.0), "dropout"),
    "dropout not rescaled": (
        on_result(lambda case, out: out * (1 - case.request.dropout)),
        "dropout",
    ),
    "dropout drawn anew in backward": (dropout_anew, "dropout"),
    "random numbers reseeded": (changing(lambda: torch.manual_seed(0)), "process"),
    "random numbers drawn": (changing(lambda: torch.rand(1)), "process"),
    "default dtype changed": (changing(lambda: torch.set_default_dtype(torch.float64)), "process"),
    "gradients switched off": (changing(lambda: torch.set_grad_enabled(False)), "process"),
    "threads taken": (changing(lambda: torch.set_num_threads(torch.get_num_threads() + 1)), "process"),
    "torch's kernels switched off": (changing(lambda: torch.backends.cuda.enable_flash_sdp(False)), "process"),
    "algorithms made deterministic": (changing(lambda: torch.use_deterministic_algorithms(True)), "process"),
    "it raises": (lambda kernel: lambda *args: 1 / 0, "call"),
    "it leaves": (lambda kernel: lambda *args: sys.exit(7), "call"),
}


def _without_last_key(case: Case, tensors: dict[str, Tensor]) -> Tensor | None:
    r, (s_q, s_k) = case.request, case.longest
    mask = tensors.get("mask")
    kept = torch.ones(1, 1, s_q, s_k, dtype=torch.bool) if mask is None else mask.clone()
    kept[..., -1:] = False if kept.dtype == torch.bool else float("-inf")
    return kept if r.family == "dense" else mask


@functools.cache
def cases() -> tuple[Case, ...]:
    """What the reference declares, and batch invariance with it."""
    info = get_manager().backends["reference", "cpu"]
    rows = [
        dataclasses.replace(row, allows={**row.allows, "batch_invariant": row.allows["deterministic"]})
        for row in info.providers[0].rows
    ]
    found = generate(
        rows, {"platform": "cpu"}, families=("dense", "varlen"), dtypes=("float32", "bfloat16"), per_row=60
    )
    # The definition has segments as a mask, which is tried with the rest.
    return tuple(case for case in found if not case.request.segments)


def caught(target: Bent, check: str) -> Outcome | None:
    """The first case in which that check finds something."""
    for case in cases():
        outcome = run_case(target, case)
        if any(finding.check == check for finding in outcome.findings):
            return outcome
    return None


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    fault, check = FAULTS[name]
    outcome = caught(Bent(fault), check)
    assert outcome is not None, f"no case of {len(cases())} noticed: {name}"
    assert outcome.verdict == "failed"


def test_a_right_kernel_passes() -> None:
    for case in cases():
        if not case.request.batch_invariant:
            assert run_case(Bent(), case).verdict == "passed", str(run_case(Bent(), case))


@pytest.mark.parametrize("name", _PARTS)
def test_every_part_of_the_process_is_seen_and_put_back(name: str) -> None:
    ask, put = _PARTS[name]
    before, wrong = ask(), list[str]()
    others = {torch.dtype: torch.float64, bool: not before, tuple: (True, True), str: "tf32"}
    other = others.get(type(before), torch.get_num_threads() + 1)
    with left_alone(torch.device("cpu"), wrong.append, random=False):
        pass
    assert not wrong
    with left_alone(torch.device("cpu"), wrong.append, random=False):
        put(other)
        assert ask() == other
    assert wrong == [f"{name} is another one after the call"]
    assert ask() == before
