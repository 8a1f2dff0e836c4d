"""`sinks_from_lse` against the reference: sinks by kernels that know none."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given

from polyattn.semantics.reference import attention
from polyattn.testing.cases import Case

from .harness import EXACT, GATES, KINDS, Lowered, cases, dense, exact, families_of, gates, of_families, offers, takes

ROWS = takes(("dense", "varlen", "paged"), sinks=False)
SINKS = {"sinks": (True,), "sink": ("usual", "dominant", "off"), "closed_rows": (False, True)}


@EXACT
@given(of_families("dense", "varlen", "paged", **SINKS))
def test_numbers_are_those_of_the_reference(case):
    exact(case, ROWS, ("sinks_from_lse",))


@GATES
@given(cases(dtype="bfloat16", head_dim=(64,), **SINKS))
def test_gates_hold_in_half_precision(case):
    gates(case, ROWS, ("sinks_from_lse",))


def tensors(dtype, sinks):
    """Three rows, of which the first two see nothing (S7)."""
    made = {name: torch.randn(1, n, 2, 8, dtype=dtype) for name, n in (("query", 3), ("key", 1), ("value", 1))}
    made["sinks"] = sinks
    return {name: tensor.detach().requires_grad_() for name, tensor in made.items()}


def case_of(dtype):
    shape = {"head_dim": 8, "heads": 2, "kv_heads": 2, "causal": "bottom_right", "s_relation": "more"}
    request = dense(dtype=dtype, sinks=True, lse=True, grad=("query", "key", "value", "sinks", "lse"), **shape)
    return Case(request=request, lengths=((3, 1),))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", [-float("inf"), -30.0, 30.0, 300.0])
def test_rows_without_keys_give_no_nan_whatever_the_sink_is(kind, level):
    """lse - sink is -inf + inf there, and its gradient would be NaN for every row of the head."""
    sinks = torch.tensor([level, 0.5])
    given = tensors(torch.float32, sinks)
    out, lse = Lowered(ROWS, kind, ("sinks_from_lse",)).call(case_of("float32"), given, {}, None)
    (out.sum() + lse[lse.isfinite()].sum()).backward()
    assert torch.equal(out[:, :2], torch.zeros_like(out[:, :2]))
    assert bool((lse[:, :2] == -float("inf")).all())
    for name, tensor in given.items():
        assert tensor.grad is not None, name
        assert bool(tensor.grad.isfinite().all()), name
    assert bool((given["query"].grad[:, :2] == 0).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sinks_of_another_dtype_get_their_gradient_in_it(kind, dtype):
    given = tensors(torch.float32, torch.randn(2, dtype=dtype))
    out, _ = Lowered(ROWS, kind, ("sinks_from_lse",)).call(case_of("float32"), given, {}, None)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert given["sinks"].grad.dtype == dtype
    right = {name: t.detach().clone().requires_grad_() for name, t in given.items()}
    attention(
        right["query"], right["key"], right["value"], sinks=right["sinks"], causal="bottom_right"
    ).sum().backward()
    for name in ("query", "sinks"):
        torch.testing.assert_close(
            given[name].grad, right[name].grad, rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=0
        )


def test_gradients_flow_through_the_lse_as_far_as_it_depends_on_them():
    def inner(*grad):
        (rewrite,) = offers("sinks_from_lse", dense(sinks=True, grad=grad))
        return rewrite.inner[0].grad

    assert inner("query", "key", "value", "sinks") == ("query", "key", "value", "lse")
    assert inner("mask") == ("mask", "lse")
    assert inner("query", "lse") == ("query", "lse")
    assert inner("value", "sinks") == ("value",)
    assert inner("value", "lse") == ("value", "lse")
    assert inner("sinks") == inner("sinks", "lse") == inner() == ()


def test_a_kernel_whose_lse_has_no_gradient_does_not_train_queries():
    rows = takes(sinks=False, grad=("query", "key", "value"))
    target = Lowered(rows, "explicit")
    with pytest.raises(AssertionError, match="there is no plan"):
        target.plan(dense(sinks=True, grad=("query",)))
    assert target.plan(dense(sinks=True, grad=("value", "sinks"))).names == ("sinks_from_lse",)


def test_sinks_alone_train_without_the_kernels_backward():
    bound = Lowered(takes(sinks=False, grad=()), "explicit").bound(dense(sinks=True, grad=("sinks",)))
    assert bound.backward is None


def test_what_it_offers():
    (rewrite,) = offers("sinks_from_lse", dense(sinks=True))
    inner = rewrite.inner[0]
    assert (inner.sinks, inner.lse) == (False, True)
    assert dataclasses.replace(inner, sinks=True, lse=False) == dense(sinks=True).normalised()
    assert families_of("sinks_from_lse", sinks=True) == {"dense", "varlen", "paged"}
    assert families_of("sinks_from_lse") == set()
