"""Rewrites of paged and latent calls never wait for a device: they can be recorded into a CUDA graph.

On the CPU that is shown with tensors that have no values: whatever would read one fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from polyattn.contract import AttentionRequest, Bound, KVPart
from polyattn.lowering import Plan, bind
from polyattn.lowering.chunked_prefix_by_lse import ChunkedPrefixByLSE
from polyattn.semantics import reference
from polyattn.semantics.kv_quant import real
from polyattn.testing.plain import reference_attention

from .harness import Lowered, takes
from .serving import Step, cached, make, words

LENGTHS = ((3, 8), (1, 5), (2, 0), (4, 16))
KERNEL = takes(
    ("paged", "mla"),
    page_size=4,
    kv_dtype="auto",
    kv_scales="",
    tree=False,
    mask=False,
    kv_layout=("", "NHD"),
    chunked_prefix=False,
    kv_parts=False,
    sinks=False,
    save_kv_cache=False,
    phase=("extend", "decode"),
)
VERIFY = {"phase": "verify", "tree": True, "mask": "bool"}
FP8_ROWS = {"kv_dtype": "fp8_e4m3", "kv_scales": "block128", "head_dim": 576, "v_head_dim": 512}
STEPS: dict[str, Callable[[], Step]] = {
    "finer_pages": lambda: make(cached(page_size=8), LENGTHS, 0),
    "dequantise_kv": lambda: make(cached(kv_dtype="fp8_e4m3", kv_scales="head", page_size=4), LENGTHS, 0, new=True),
    "dequantise_kv, written": lambda: make(
        cached(kv_dtype="fp8_e4m3", kv_scales="token", page_size=4, save_kv_cache=True), LENGTHS, 0, new=True
    ),
    "dequantise_kv, fp4 written": lambda: make(
        cached(kv_dtype="fp4_e2m1", kv_scales="block16", page_size=4, save_kv_cache=True), LENGTHS, 0, new=True
    ),
    "dequantise_kv, latent": lambda: make(cached("mla", page_size=4, **FP8_ROWS), LENGTHS, 0),
    "tree_by_lse": lambda: make(
        cached(page_size=4, save_kv_cache=True, sinks=True, lse=True, **VERIFY), LENGTHS, 0, new=True, mask="tree"
    ),
    "tree_by_lse, latent": lambda: make(cached("mla", page_size=4, **VERIFY), LENGTHS, 0, mask="tree"),
    "chunked_prefix_by_lse": lambda: make(cached(page_size=4, chunked_prefix=True), LENGTHS, 0),
    "kv_parts_by_lse": lambda: make(
        cached(page_size=4, kv_parts=2, s_relation="more", sinks=True),
        LENGTHS,
        0,
        parts=[([4, 6], [5, 9]), ([10], [3])],
    ),
    "all of a cascade in fp8": lambda: make(
        cached(page_size=8, kv_dtype="fp8_e5m2", kv_scales="tensor", kv_parts=1, s_relation="more", sinks=True),
        LENGTHS,
        0,
        parts=[([10], [16])],
    ),
}


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkedPrefixByLSE, "tokens", 4)


def bound(plan: Plan, load: Callable[[AttentionRequest], Bound]) -> Callable[..., Any]:
    return bind(plan, load, load).forward


def moved(value: Any, to: Callable[[Tensor], Any]) -> Any:
    """A value with every tensor in it moved."""
    if isinstance(value, KVPart):
        return KVPart(*(moved(v, to) for v in value))
    if isinstance(value, (list, tuple)):
        return [moved(v, to) for v in value]
    return to(value) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_no_value_is_read_and_no_shape_depends_on_one(step):
    step = step()

    def load(request: AttentionRequest) -> Bound:
        def forward(query: Tensor, *tensors: Tensor, **given: Any) -> Any:
            out = query.new_empty(*query.shape[:-1], request.dims[1])
            return (out, out[..., 0].float()) if request.lse else out

        return Bound(forward)

    forward = bound(Lowered(KERNEL, "autograd").plan(step.request), load)
    with FakeTensorMode() as mode:
        given = {name: moved(value, mode.from_tensor) for name, value in step.given.items()}
        result = forward(*moved(step.tensors, mode.from_tensor), **words(given))
    out = result[0] if step.request.lse else result
    assert out.shape == (10, step.request.heads, step.request.dims[1])


# --------------------------------------------------------------------------------------------------------- a device


def without_waiting(request: AttentionRequest) -> Bound:
    """A kernel of torch operations that can be recorded: every sequence padded to the longest."""

    def forward(query: Tensor, *tensors: Tensor, out: Tensor | None = None, **given: Any) -> Any:
        if request.family == "dense":
            result = reference.attention(query, *tensors, scale=request.scale, return_lse=True, **given)
            return result if request.lse else result[0]
        page_table, seq_lens, starts, s_q, s_k = given["tables"][:5]
        token = torch.arange(s_k, device=query.device)
        column = (token // request.page_size).clamp(max=page_table.shape[1] - 1)
        inside = token < seq_lens[:, None]
        pages = page_table.long()[:, column].where(inside, 0)
        rows = [t[pages, token % request.page_size].masked_fill(~inside.view(*inside.shape, *[1] * (t.ndim - 2)), 0)
                for t in tensors]  # fmt: skip
        if request.family == "mla":
            rows = [rows[0].unsqueeze(2), rows[0].unsqueeze(2)[..., : request.dims[1]]]
        row = torch.arange(s_q, device=query.device)
        seen = inside[:, None, :].expand(-1, s_q, -1)
        if request.causal != "none":
            seen = seen & (token <= (row + (seq_lens - starts.diff())[:, None])[..., None])
        index = (starts[:-1, None] + row).clamp(max=query.shape[0] - 1)
        padded = reference.attention(
            query[index], *rows, attn_mask=seen[:, None], scale=request.scale, softcap=request.softcap, return_lse=True
        )
        mine = torch.arange(query.shape[0], device=query.device, dtype=torch.int32)
        sequence = torch.searchsorted(starts[1:].contiguous(), mine, right=True)
        result, lse = (part[sequence, mine - starts[sequence]] for part in padded)
        result = result if out is None else out.copy_(result)
        return (result, lse) if request.lse else result

    return Bound(forward)


def compared(got: Any, step: Step) -> None:
    right = step.answer(reference_attention, torch.float64)
    for actual, want in zip(got if step.request.lse else (got,), right, strict=False):
        torch.testing.assert_close(actual.cpu().double(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_kernel_of_the_next_test_is_right(step):
    step = step()
    compared(
        bound(Lowered(KERNEL, "autograd").plan(step.request), without_waiting)(*step.tensors, **words(step.given)), step
    )


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_it_is_recorded_into_a_graph_and_replayed(step, device):
    """Recorded with one content of the tensors, replayed with another."""
    device("cuda", "rocm", what="device graphs")
    step = step()
    other = dataclasses.replace(step, tensors=tuple(t.clone() for t in step.tensors))
    other.tensors[0].mul_(0.5)
    forward = bound(Lowered(KERNEL, "autograd").plan(step.request), without_waiting)
    tensors = moved(step.tensors, Tensor.cuda)
    given = words({name: moved(value, Tensor.cuda) for name, value in step.given.items()})
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        forward(*tensors, **given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        result = forward(*tensors, **given)
    for wanted in (step, other):
        tensors[0].copy_(wanted.tensors[0])
        graph.replay()
        torch.cuda.synchronize()
        compared(result, wanted)


def test_what_is_stored_on_a_device_is_what_is_stored_on_the_cpu(device):
    device("cuda", "rocm", what="quantised caches on a device")
    for name in ("dequantise_kv, written", "dequantise_kv, fp4 written", "tree_by_lse"):
        step = STEPS[name]()
        forward = bound(Lowered(KERNEL, "autograd").plan(step.request), without_waiting)
        tensors = moved(step.tensors, Tensor.cuda)
        forward(*tensors, **{n: moved(value, Tensor.cuda) for n, value in step.given.items()})
        for got, want in zip(tensors[1:], step.written(), strict=True):
            if want.dtype == torch.uint8:
                assert torch.equal(got.cpu(), want), name
            else:
                got, want = (real(t.nan_to_num(0), None, torch.float32) for t in (got.cpu().float(), want.float()))
                assert torch.equal(got, want), name
