"""Chains of rewrites against the reference: what a narrow kernel lacks in several ways at once."""

from __future__ import annotations

import collections
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyattn.contract import AttentionRequest, Range
from polyattn.lowering import MAX_STEPS, Planner
from polyattn.testing.cases import Case

from .harness import EXACT, Lowered, dense, exact, gates, of_families, takes, tensors_of

TRAINED = {"grad": ("query", "key", "value", "lse"), "lse": True}
MORE: dict[str, Any] = {"causal": "bottom_right", "s_relation": "fewer"}

NARROWEST: dict[str, Any] = {
    "layout": "BHSD",
    "head_dim": 64,
    "v_head_dim": False,
    "scale": False,
    "group": 1,
    "sinks": False,
    "mask": ("none", "additive"),
}
"""One layout, one width, its own scale, no groups, no sinks, additive masks."""

CHAINS: dict[tuple[str, ...], tuple[dict[str, Any], dict[str, Any]]] = {
    ("layout", "pad_head_dim"): ({"layout": "BHSD", "head_dim": 64}, {"head_dim": 40}),
    ("additive_mask", "expand_gqa_heads"): (
        {"mask": ("none", "additive"), "group": 1},
        {"mask": "bool", "kv_heads": 2},
    ),
    ("fold_scale", "sinks_from_lse"): ({"scale": False, "sinks": False}, {"scale": 0.3, "sinks": True}),
    ("pad_head_dim", "pad_value_dim"): ({"dims": ((64, 64), (128, 128))}, {"head_dim": 40, "v_head_dim": 24}),
    ("crop_value_dim", "pad_value_dim"): ({"v_head_dim": (16,)}, {"head_dim": 16, "v_head_dim": 40}),
    # Padding brings a scale that is not that of the padded width.
    ("pad_head_dim", "fold_scale"): ({"head_dim": 64, "scale": False}, {"head_dim": 40}),
    ("layout", "pad_head_dim", "fold_scale"): (
        {"layout": "BHSD", "head_dim": 64, "scale": False},
        {"head_dim": 40, **MORE},
    ),
    ("layout", "sinks_from_lse", "expand_gqa_heads"): (
        {"layout": "BHSD", "sinks": False, "group": 1},
        {"sinks": True, "kv_heads": 1, "softcap": 2.0},
    ),
    # A view of odd rows is off the boundary.
    ("layout", "realign"): ({"layout": "BHSD", "misaligned": False}, {"head_dim": 5}),
    ("additive_mask", "pad_head_dim", "pad_value_dim", "expand_gqa_heads"): (
        {"mask": ("none", "additive"), "dims": ((64, 64),), "group": 1},
        {"mask": "bool", "head_dim": 40, "v_head_dim": 24, "kv_heads": 2, **MORE},
    ),
    ("layout", "additive_mask", "sinks_from_lse", "expand_gqa_heads"): (
        {"layout": "BHSD", "mask": ("none", "additive"), "sinks": False, "group": 1},
        {"mask": "bool", "sinks": True, "kv_heads": 2, "window": (9, -1), **MORE},
    ),
    ("layout", "additive_mask", "sinks_from_lse", "pad_head_dim", "fold_scale", "expand_gqa_heads"): (
        NARROWEST,
        {"head_dim": 40, "v_head_dim": 64, "mask": "bool", "sinks": True, "kv_heads": 2, **MORE},
    ),
}
"""The rewrites -> (what the kernel takes, what is asked for)."""


def case_of(fields: dict[str, Any], dtype: str) -> Case:
    request: AttentionRequest = dense(dtype=dtype, **fields)
    grad = request.grad if not (request.sinks and request.grad) else (*request.grad, "sinks")
    request = dense(dtype=dtype, **{**fields, "grad": grad})
    spans = (37, 65) if request.s_relation == "fewer" else (33, 33)
    return Case(request=request, lengths=(spans,) * 2, mask_shape="heads", closed_rows=request.mask == "bool")


@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("names", CHAINS, ids="-".join)
def test_chain(names, trained):
    limits, fields = CHAINS[names]
    fields = {**fields, **(TRAINED if trained else {})}
    plan = Planner(takes(**limits)).plan(dense(**fields))
    assert plan is not None
    assert set(plan.names) == set(names)
    assert plan.length == len(names)
    exact(case_of(fields, "float64"), takes(**limits), plan.names, only=plan.names)
    gates(case_of(fields, "bfloat16"), takes(**limits), plan.names, only=plan.names)


@pytest.mark.parametrize("names", CHAINS, ids="-".join)
def test_nothing_asks_the_device_for_a_number(names):
    """Tensors without contents go through: no value is read on the host, no shape depends on one (graph capture)."""
    limits, fields = CHAINS[names]
    request = dense(**fields, **TRAINED)
    inputs, given = tensors_of(request, *case_of(fields, "float32").longest, device="meta")
    inputs = [tensor.requires_grad_() for tensor in inputs]
    out, lse = Lowered(takes(**limits), "autograd", only=names).bound(request).forward(*inputs, **given)
    assert out.device.type == "meta"
    assert (out.shape, lse.shape) == ((*inputs[0].shape[:-1], request.dims[1]), inputs[0].shape[:-1])
    (out.sum() + lse.sum()).backward()
    assert [tensor.grad.shape for tensor in inputs] == [tensor.shape for tensor in inputs]


LIMITS: dict[str, tuple[Any, ...]] = {
    "layout": ("BHSD", "BSHD"),
    "head_dim": ((16,), Range(8, 64, multiple_of=8)),
    "v_head_dim": (False, Range(4, 16, multiple_of=4)),
    "group": (1,),
    "scale": (False,),
    "sinks": (False,),
    "mask": (("none", "additive"), ("none", "bool")),
    "misaligned": (False,),
    "causal": (("none", "bottom_right"),),
    "s_relation": (("equal",), ("equal", "one", "fewer")),
    "window": (False,),
    "lse": (False,),
    "family": (("dense",), ("varlen",)),
}
"""What a drawn kernel may lack."""

KERNELS = st.lists(st.sampled_from(sorted(LIMITS)), min_size=2, max_size=5, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(LIMITS[name]) for name in names})
)


def test_whatever_is_planned_is_right():
    """Over random kernels and requests: no chain that the planner finds changes a number."""
    found: collections.Counter[tuple[str, ...]] = collections.Counter()

    @EXACT
    @given(of_families("dense", "varlen", chunk=(0,)), KERNELS)
    def run(case, limits):
        rows = takes(**{"family": ("dense", "varlen"), **limits})
        plan = Planner(rows).plan(case.request)
        if plan is not None:
            found[plan.names] += 1
            exact(case, rows, plan.names, only=plan.names)

    run()
    assert sum(found.values()) > 150
    assert sum(count for names, count in found.items() if len(names) >= 2) > 50
    assert 4 <= max(map(len, found)) <= MAX_STEPS
