"""No lowering reads tensor contents on the host: each runs on tensors that have none, as a recorded graph would.

Fake tensors raise where a value is asked for (`.item()`, a boolean mask as an index, `nonzero`). The kernel is one that
allocates its outputs and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from polyattn.contract import AttentionRequest, Bound
from polyattn.contract.families import FAMILY_SPECS
from polyattn.lowering import LOWERINGS, get_lowering
from polyattn.testing.cases import Case
from polyattn.testing.families import FAMILIES
from polyattn.testing.problems import build

from .harness import CPU, dense

QKV = ("query", "key", "value")
PAGED: dict[str, Any] = {"family": "paged", "page_size": 4, "phase": "extend", "s_relation": "fewer"}
SQUARE = ((5, 5),) * 2

SAMPLES: dict[str, tuple[dict[str, Any], Any]] = {
    "layout": ({}, SQUARE),
    "realign": ({"misaligned": True}, SQUARE),
    "fold_scale": ({"scale": 0.3}, SQUARE),
    "additive_mask": ({"mask": "bool"}, SQUARE),
    "sinks_from_lse": ({"sinks": True}, SQUARE),
    "pad_head_dim": ({"head_dim": 40}, SQUARE),
    "pad_value_dim": ({"v_head_dim": 40}, SQUARE),
    "crop_value_dim": ({"v_head_dim": 128}, SQUARE),
    "expand_gqa_heads": ({"kv_heads": 2}, SQUARE),
    "align_causal": ({"causal": "bottom_right", "s_relation": "fewer"}, ((3, 8),) * 2),
    "trim_window": ({"window": (2, -1), "causal": "bottom_right", "s_relation": "fewer"}, ((3, 8),) * 2),
    "pack_sequences": ({}, SQUARE),
    "pad_sequences": ({"family": "varlen", "layout": "THD", "causal": "bottom_right"}, ((3, 3), (7, 7))),
    "expand_block_map": (
        {"family": "block_sparse", "layout": "BHSD", "block_map": True, "block_shape": (4, 4)},
        ((7, 9),) * 2,
    ),
    "finer_pages": ({**PAGED, "layout": "THD"}, ((3, 8), (1, 5))),
    "page_table_to_tokens": ({**PAGED, "layout": "THD"}, ((3, 8), (1, 5))),
    "write_new_rows": ({**PAGED, "layout": "THD", "save_kv_cache": False}, ((3, 8), (1, 5))),
    "dequantise_kv": ({**PAGED, "layout": "THD", "kv_dtype": "fp8_e4m3", "kv_scales": "head"}, ((3, 8), (1, 5))),
    "tree_by_lse": ({**PAGED, "layout": "THD", "phase": "verify", "mask": "bool", "tree": True}, ((3, 8), (3, 5))),
    "alibi_as_bias": ({"alibi": True}, SQUARE),
    "chunk_as_batch": ({"chunk": 4, "causal": "bottom_right"}, ((8, 8),) * 2),
    "segments_as_mask": ({"segments": "pair"}, SQUARE),
    "chunked_prefix_by_lse": ({**PAGED, "layout": "THD", "chunked_prefix": True}, ((3, 80), (1, 50))),
    "state_layout": ({"family": "linear", "method": "gdn", "state_layout": "VK"}, SQUARE),
    "compute_gates": ({"family": "linear", "method": "kda", "raw_gates": "bounded", "qk_norm": True}, SQUARE),
}
"""A request that each lowering rewrites, and its lengths. `kv_parts_by_lse` calls kernels and merges, no more; the kit
makes neither pools of states nor drafts, of which a test below is."""


class Allocates:
    """Binds kernels that read nothing."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, request: AttentionRequest) -> Bound:
        def result(query: Tensor) -> Any:
            self.calls += 1
            out = query.new_zeros((*query.shape[:-1], request.dims[1]))
            lse = query.new_zeros(query.shape[:-1], dtype=torch.float32)
            return (out, lse) if request.lse or request.grad else out

        def forward(query: Tensor, *rest: Tensor, out: Tensor | None = None, **given: Any) -> Any:
            if request.family == "linear":
                self.calls += 1
                return torch.zeros_like(rest[1]), torch.zeros_like(given["state"])
            found = result(query)
            if out is None:
                return found
            return (out.copy_(found[0]), found[1]) if isinstance(found, tuple) else out.copy_(found)

        def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **given: Any) -> Any:
            self.calls += 1
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

        return Bound(forward, backward if request.family in ("dense", "varlen") else None)


def bound(name: str, request: AttentionRequest, kernel: Allocates) -> Bound:
    """The functions of the first rewrite that one lowering offers."""
    lowering = get_lowering(name)
    rewrite = next(iter(lowering.rewrites(request)))
    inner = [kernel(r.normalised()) for r in rewrite.inner]
    return lowering.bind(request, rewrite, inner, [kernel(r.normalised()) for r in rewrite.helpers])


on_the_host = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
"""Alignment is a fact of the host. torch warns once in a process, whichever test is the first."""


def without_contents(name: str, fields: Mapping[str, Any], lengths: Sequence[Any], grad: tuple[str, ...] = ()) -> None:
    request = dense(**fields, grad=grad, dtype="float32" if grad else "bfloat16").normalised()
    storage, new = "misaligned" if request.misaligned else "contiguous", request.save_kv_cache is not None
    case = Case(request=request, lengths=tuple(lengths), storage=storage, new_rows=new)
    problem = build(case, CPU)
    kernel = Allocates()
    functions = bound(name, request, kernel)
    plain = {n: t.detach() for n, t in problem.tensors.items()}
    with FakeTensorMode() as mode:
        given = {n: mode.from_tensor(t) for n, t in plain.items()}
        extra = {n: mode.from_tensor(t) if isinstance(t, Tensor) else t for n, t in problem.extra.items()}
        caches = {"paged": ("query", "key_cache", "value_cache"), "mla": ("query", "cache")}
        tensors = [given.pop(n) for n in caches.get(request.family, QKV)]
        mask = {"attn_mask": given.pop("mask")} if "mask" in given else {}
        found = functions.forward(*tensors, **given, **FAMILIES[request.family].keywords(extra), **mask)
        out, lse = found if isinstance(found, tuple) else (found, None)
        assert out.shape == FAMILIES[request.family].out_shape(case)
        if grad:
            assert functions.backward is not None
            added = {one.name: given[one.name] for one in FAMILY_SPECS[request.family].added if one.name in given}
            grads = functions.backward(torch.zeros_like(out), *tensors, out, lse, **extra, **mask, **added)
            assert [g.shape for g in grads] == [t.shape for t in tensors]
    assert kernel.calls > 0


@on_the_host
@pytest.mark.parametrize("name", SAMPLES)
def test_forward(name: str) -> None:
    fields, lengths = SAMPLES[name]
    without_contents(name, fields, lengths)


@on_the_host
@pytest.mark.parametrize(
    "name", [n for n, (f, _) in SAMPLES.items() if f.get("family", "dense") in ("dense", "varlen", "block_sparse")]
)
def test_backward(name: str) -> None:
    fields, lengths = SAMPLES[name]
    without_contents(name, fields, lengths, QKV)


def test_every_lowering_is_tried() -> None:
    # These read what they are given: how many tokens a segment has. They refuse to be recorded.
    reading = {"segments_as_sequences"}
    assert {*SAMPLES, "kv_parts_by_lse", "gather_states", "draft_by_draft", *reading} == set(LOWERINGS)


@pytest.mark.parametrize("name", ["gather_states", "draft_by_draft"])
def test_slots_and_parents_are_not_read_on_the_host(name: str) -> None:
    drafts = name == "draft_by_draft"
    asked = {"state_out": "every", "tree": True, "phase": "verify"} if drafts else {"state_slots": True}
    request = dense(family="linear", method="gdn", state_layout="KV", dtype="float32", **asked).normalised()
    kernel = Allocates()
    functions = bound(name, request, kernel)
    with FakeTensorMode():
        shape, D = (2, 5, request.heads), request.head_dim
        rows = [torch.empty(2, 5, request.kv_heads, D) for _ in range(2)] + [torch.empty(*shape, D)]
        given = {"gate": torch.empty(shape), "beta": torch.empty(shape), "state": torch.empty(4, shape[2], D, D)}
        if drafts:
            given |= {"state": given["state"][:2], "parents": torch.empty(2, 5, dtype=torch.int64)}
        else:
            given["state_slots"] = torch.empty(2, dtype=torch.int32)
        out, state = functions.forward(*rows, **given)
        assert out.shape == (*shape, D)
        assert state.shape == ((2, 5, shape[2], D, D) if drafts else (4, shape[2], D, D))
    assert kernel.calls > 0


def test_a_lowering_that_reads_contents_would_be_seen() -> None:
    with FakeTensorMode() as mode, pytest.raises(DynamicOutputShapeException):
        mode.from_tensor(torch.ones(3)).nonzero()
