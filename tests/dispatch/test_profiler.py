"""torch's profiler shows which call of polyattn ran, and who served it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import polyattn


def ranges(call: Callable[[], Any]) -> Counter[str]:
    """The ranges of polyattn that one run of a call leaves in a profile, the custom ops of torch.compile left out."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    return Counter(e.name for e in found.events() if e.name.startswith("polyattn."))


def dense() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, 8, 4, 16) for _ in range(3))


def served(call: Any, *tensors: Any, **given: Any) -> str:
    return polyattn.explain(call, *tensors, **given).id


TOKENS = {
    "cu_seqlens_q": torch.tensor([0, 3, 8], dtype=torch.int32),
    "cu_seqlens_k": torch.tensor([0, 3, 8], dtype=torch.int32),
    "max_seqlen_q": 5,
    "max_seqlen_k": 5,
}
PAGES = {
    "page_table": torch.tensor([[2, 0], [1, 3]], dtype=torch.int32),
    "seq_lens": torch.tensor([5, 3], dtype=torch.int32),
    "cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32),
    "max_seqlen_q": 1,
    "max_seqlen_k": 5,
}
CALLS: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {
    "attention": (dense(), {"causal": True}),
    "varlen_attention": (tuple(torch.randn(8, 4, 16) for _ in range(3)), TOKENS),
    "paged_attention": ((torch.randn(2, 4, 16), torch.randn(4, 4, 2, 16), torch.randn(4, 4, 2, 16)), PAGES),
    "mla_attention": ((torch.randn(2, 4, 24), torch.randn(4, 4, 24)), {**PAGES, "scale": 0.2, "v_head_dim": 16}),
    "block_sparse_attention": (
        dense(),
        {"block_map": torch.ones(1, 1, 2, 2, dtype=torch.bool), "block_shape": (4, 4)},
    ),
    "linear_attention": (dense(), {"gate": -torch.rand(2, 8, 4), "beta": torch.rand(2, 8, 4)}),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_call_is_a_range_that_names_it_and_its_backend(name, backend):
    call, (tensors, given) = getattr(polyattn, name), CALLS[name]

    def run() -> Any:
        return call(*tensors, **given, backend=backend)

    want = {f"polyattn.{name} {served(call, *tensors, **given, backend=backend)}": 1}
    plain = run()  # bound, so that the range is no matter of a first call
    assert ranges(run) == want
    assert ranges(run) == want
    torch.testing.assert_close(run(), plain)


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 8, 8, dtype=torch.bool)], ids=["no mask", "mask"])
def test_a_bound_call_on_its_shortest_way_is_one_too(mask):
    site, inputs = polyattn.bind(), dense()
    for _ in range(4):
        site(*inputs, mask)
    assert (site._fast if mask is None else site._masked) is not None, "there is no shortest way to look at"
    name = f"polyattn.attention {served(polyattn.attention, *inputs, attn_mask=mask)}"
    assert ranges(lambda: [site(*inputs, mask) for _ in range(3)]) == {name: 3}


def test_nothing_enters_a_range_without_a_profiler(monkeypatch):
    def entered(*_: Any) -> None:
        raise AssertionError("a range was made")

    monkeypatch.setattr(torch.profiler, "record_function", entered)
    for name, (tensors, given) in CALLS.items():
        getattr(polyattn, name)(*tensors, **given)


def test_the_drop_in_and_gradients_are_ranges_of_the_call():
    inputs = tuple(t.requires_grad_() for t in dense())
    for call in (polyattn.attention, polyattn.scaled_dot_product_attention):
        found = ranges(lambda call=call: call(*inputs).sum().backward())
        assert list(found.values()) == [1]
        assert next(iter(found)).startswith("polyattn.attention ")


def test_under_vmap_a_range_is_kept():
    q, k, v = (t[None] for t in dense())
    call = functools.partial(polyattn.attention, backend="reference")
    assert list(ranges(lambda: torch.func.vmap(call)(q, k, v)).values()) == [1]


def test_a_compiled_call_of_an_opaque_kernel_is_a_range(opaque):
    inputs = dense()
    compiled = torch.compile(lambda *given: polyattn.attention(*given, backend="opaque"), backend="aot_eager")
    compiled(*inputs)
    assert ranges(lambda: compiled(*inputs)) == {"polyattn.attention opaque@cpu": 1}


def test_a_compiled_packed_call_is_a_range():
    tensors, given = CALLS["varlen_attention"]
    compiled = torch.compile(lambda *packed: polyattn.varlen_attention(*packed, **given), backend="aot_eager")
    compiled(*tensors)
    name = f"polyattn.varlen_attention {served(polyattn.varlen_attention, *tensors, **given)}"
    assert ranges(lambda: compiled(*tensors)) == {name: 1}
