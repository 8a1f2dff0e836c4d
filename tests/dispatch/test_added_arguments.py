"""`alibi`, `chunk` and `segments` through every public call: numbers, gradients, one graph, explain."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.contract import AttentionRequest
from polyattn.dispatch.compile import op_plans
from polyattn.errors import UnsupportedRequestError
from polyattn.nn import LocalAttention
from polyattn.semantics import reference
from polyattn.video import Place

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0], dtype=torch.float64)
DOCUMENTS = torch.tensor([[0, 0, 0, 2, 2, 2, 2, 5, 5], [1, 0, 1, 0, 7, 7, 0, 1, 1]], dtype=torch.int32)
OTHERS = torch.tensor([[0, 2, 2, 5, 9, 0, 2], [7, 7, 1, 1, 0, 3, 0]], dtype=torch.int32)

CASES: dict[str, dict[str, Any]] = {
    "alibi": {"alibi": SLOPES},
    "alibi, causal": {"alibi": SLOPES, "causal": True, "return_lse": True},
    "alibi, top-left": {"alibi": SLOPES, "causal": "top_left"},
    "chunk": {"chunk": 4},
    "chunk, window": {"chunk": 4, "window": (2, -1), "return_lse": True},
    "chunk of all": {"chunk": 100},
    "alibi, chunk": {"alibi": SLOPES, "chunk": 3},
    "segments": {"segments": DOCUMENTS},
    "segments, causal": {"segments": DOCUMENTS, "causal": True, "return_lse": True},
    "segments, window": {"segments": DOCUMENTS, "window": (3, 1)},
    "segments, all": {"segments": DOCUMENTS, "alibi": SLOPES, "chunk": 6},
    "pair": {"segments": (DOCUMENTS, OTHERS)},
    "pair, causal": {"segments": (DOCUMENTS, OTHERS), "causal": True, "return_lse": True},
}


def qkv(case: dict[str, Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    s_k = 7 if isinstance(case.get("segments"), tuple) else 9
    shapes = ((2, 9, 4, 8), (2, s_k, 2, 8), (2, s_k, 2, 6))
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def defined(tensors: list[Tensor], case: dict[str, Any]) -> Any:
    """The reference, in float64."""
    given = dict(case)
    segments = given.pop("segments", None)
    if segments is not None:
        pair = segments if isinstance(segments, tuple) else (segments, segments)
        given |= dict(zip(("q_segments", "k_segments"), pair, strict=True))
    given["causal"] = {True: "bottom_right", False: "none"}.get(given.get("causal", False), "top_left")
    return reference.attention(*tensors, **given)


def same(run: Any, tensors: list[Tensor], case: dict[str, Any]) -> None:
    """Outputs, LSE and gradients of `run` are the reference's."""
    found, right = run(*tensors), defined(tensors, case)
    results = list(zip(*(r if isinstance(r, tuple) else (r,) for r in (found, right)), strict=True))
    for got, want in results:
        torch.testing.assert_close(got, want)
    weights = torch.linspace(0.5, 1.5, results[0][0].numel(), dtype=torch.float64).reshape(results[0][0].shape)
    mine, theirs = (
        torch.autograd.grad([(r[0] * weights).sum(), *(x[x.isfinite()].sum() for x in r[1:])], tensors)
        for r in zip(*results, strict=True)
    )
    for got, want in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_dense_call_is_the_reference(case: dict[str, Any]) -> None:
    same(lambda *t: polyattn.attention(*t, **case), qkv(case), case)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_heads_first_by_a_layer_and_a_bound_call(case: dict[str, Any]) -> None:
    beside = {name: case[name] for name in ("alibi", "segments") if name in case}
    static = {name: value for name, value in case.items() if name not in beside}
    for bound in (polyattn.bind(layout="BHSD", **static), LocalAttention(layout="BHSD", **static)):

        def run(*tensors: Tensor, bound: Any = bound) -> Any:
            found = bound(*(t.transpose(1, 2) for t in tensors), **beside)
            return tuple(t.transpose(1, 2) for t in found) if isinstance(found, tuple) else found.transpose(1, 2)

        for _ in range(2):  # found, and found again
            same(run, qkv(case), case)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_one_graph(case: dict[str, Any]) -> None:
    torch._dynamo.reset()
    same(torch.compile(lambda *t: polyattn.attention(*t, **case), backend="aot_eager", fullgraph=True), qkv(case), case)
    layer = LocalAttention(**{name: one for name, one in case.items() if name not in ("alibi", "segments")})
    beside = {name: case[name] for name in ("alibi", "segments") if name in case}
    same(torch.compile(lambda *t: layer(*t, **beside), backend="aot_eager", fullgraph=True), qkv(case), case)


@pytest.mark.parametrize("name", ["alibi", "segments", "pair"])
def test_a_custom_op_takes_what_was_added(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not traceable goes through the op, whose own arguments hide nothing from autograd."""
    from polyattn.dispatch.compile import trace

    monkeypatch.setattr(trace, "_traceable", lambda chosen: False)
    torch._dynamo.reset()
    case = CASES[name]
    same(torch.compile(lambda *t: polyattn.attention(*t, **case), backend="aot_eager", fullgraph=True), qkv(case), case)


def test_a_graph_of_before_calls_the_op_without_them() -> None:
    tensors = qkv({})
    chosen = polyattn.explain(polyattn.attention, *tensors, backend="reference")
    plan = op_plans.op_plan(chosen.request, chosen)
    out, _ = torch.ops.polyattn.dense(*tensors, None, None, plan)
    torch.testing.assert_close(out, defined(tensors, {}))
    (out * out).sum().backward()
    want = torch.autograd.grad((defined(tensors, {}) ** 2).sum(), tensors)
    torch.testing.assert_close([t.grad for t in tensors], list(want))


@pytest.mark.parametrize("case", [{"alibi": SLOPES}, {"chunk": 2}, {"alibi": SLOPES, "chunk": 2, "causal": True}])
def test_a_packed_call_counts_along_each_sequence(case: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(9, n, 8, generator=generator, dtype=torch.float64).requires_grad_() for n in (4, 2, 2))
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    lens: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 5, "max_seqlen_k": 5}

    def whole(*tensors: Tensor) -> Tensor:
        spans = (slice(0, 4), slice(4, 9))
        return torch.cat([defined([t[None, span] for t in tensors], case)[0] for span in spans])

    def call(*tensors: Tensor) -> Tensor:
        return polyattn.varlen_attention(*tensors, **lens, **case)

    torch._dynamo.reset()
    for run in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        torch.testing.assert_close(run(q, k, v), whole(q, k, v))
        mine, theirs = (torch.autograd.grad((f(q, k, v) ** 2).sum(), (q, k, v)) for f in (run, whole))
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", [{"alibi": SLOPES.float()}, {"chunk": 4}, {"alibi": SLOPES.float(), "chunk": 3}])
def test_a_paged_call_counts_along_each_sequence(case: dict[str, Any], causal: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    keys, values = (torch.randn(6, 4, 2, 8, generator=generator) for _ in range(2))
    query = torch.randn(3, 4, 8, generator=generator)
    table = torch.tensor([[5, 1], [2, 3]], dtype=torch.int32)
    tables: dict[str, Any] = {
        "page_table": table,
        "seq_lens": torch.tensor([6, 7], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1, 3], dtype=torch.int32),
        "max_seqlen_q": 2,
        "max_seqlen_k": 7,
    }
    found = polyattn.paged_attention(query, keys, values, **tables, causal=causal, **case)
    spans, lengths = (slice(0, 1), slice(1, 3)), (6, 7)
    for span, pages, length in zip(spans, table.tolist(), lengths, strict=True):
        rows = [cache[pages].flatten(0, 1)[None, :length].double() for cache in (keys, values)]
        given = {**case, "causal": causal}
        right = defined([query[None, span].double(), *rows], given)
        torch.testing.assert_close(found[span], right[0].float())
    chosen = polyattn.explain(polyattn.paged_attention, query, keys, values, **tables, causal=causal, **case)
    assert (chosen.request.alibi, chosen.request.chunk) == ("alibi" in case, case.get("chunk", 0))


def test_a_latent_call_takes_chunks() -> None:
    cache, query = torch.randn(3, 4, 24), torch.randn(2, 4, 24)
    tables: dict[str, Any] = {
        "page_table": torch.tensor([[2, 0]], dtype=torch.int32),
        "seq_lens": torch.tensor([7], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32),
        "max_seqlen_q": 2,
        "max_seqlen_k": 7,
    }
    found = polyattn.mla_attention(query, cache, **tables, scale=0.3, v_head_dim=16, chunk=3)
    rows = cache[[2, 0]].flatten(0, 1)[None, :7, None]
    right = reference.attention(query[None], rows, rows[..., :16], causal="bottom_right", chunk=3, scale=0.3)
    torch.testing.assert_close(found, right[0])


@pytest.mark.parametrize("name", ["alibi, causal", "chunk, window", "segments, causal", "pair, causal"])
def test_a_part_takes_them_forward_and_backward(name: str) -> None:
    case = {k: v for k, v in CASES[name].items() if k != "return_lse"}
    beside = {name: case[name] for name in ("alibi", "segments") if name in case}
    part = polyattn.bind_part(**{name: value for name, value in case.items() if name not in beside})
    tensors = qkv(case)
    out, lse = part.forward(*tensors, **beside)
    right, right_lse = defined(tensors, {**case, "return_lse": True})
    torch.testing.assert_close((out, lse), (right.detach(), right_lse.detach()))
    grads = part.backward(torch.ones_like(out), *tensors, out, lse, **beside)
    torch.testing.assert_close(grads, torch.autograd.grad(right.sum(), tensors))
    assert polyattn.explain(part, *tensors, **beside).request.alibi == ("alibi" in case)


def test_explain_says_which_rewrite_serves_segments() -> None:
    tensors = [t.detach() for t in qkv({})]
    sorted_ = polyattn.explain(polyattn.attention, *tensors, segments=DOCUMENTS)
    assert sorted_.lowerings == ("segments_as_sequences",)
    written = polyattn.explain(polyattn.attention, *tensors, segments=DOCUMENTS, window=(3, 0))
    assert written.lowerings == ("segments_as_mask",)
    assert polyattn.explain(polyattn.attention, *tensors, alibi=SLOPES).lowerings == ("alibi_as_bias",)


def test_a_backend_that_cannot_says_why() -> None:
    tensors = [t.detach() for t in qkv({})]
    with pytest.raises(UnsupportedRequestError, match="window_video_attn"):
        polyattn.attention(*tensors, segments=DOCUMENTS, backend="window_video_attn", place=Place())
    request = AttentionRequest(family="mla", alibi=True, head_dim=576, v_head_dim=512, page_size=64, scale=0.1)
    with pytest.raises(UnsupportedRequestError, match="alibi=True is not declared"):
        polyattn.explain(request)
    found = polyattn.explain(dataclasses.replace(AttentionRequest(), segments="pair"))
    assert found.request.segments == "pair"


def test_their_kinds_are_apart_in_the_table_of_a_site() -> None:
    site, tensors = polyattn.bind(), [t.detach() for t in qkv({})]
    plain, sloped, in_parts = site(*tensors), site(*tensors, alibi=SLOPES), site(*tensors, segments=DOCUMENTS)
    for _ in range(3):
        torch.testing.assert_close(site(*tensors), plain, rtol=0, atol=0)
        torch.testing.assert_close(site(*tensors, alibi=SLOPES), sloped, rtol=0, atol=0)
        torch.testing.assert_close(site(*tensors, segments=DOCUMENTS), in_parts, rtol=0, atol=0)
    with pytest.raises(polyattn.InvalidInputError, match="segments of the query tokens have shape"):
        site(*tensors, segments=DOCUMENTS[:, :5])
    with pytest.raises(polyattn.InvalidInputError, match="last axis is not dense"):
        site(*tensors, segments=DOCUMENTS.t().contiguous().t())
    with pytest.raises(polyattn.InvalidInputError, match="int32 is needed"):
        site(*tensors, segments=DOCUMENTS.long())


def test_gradients_are_zero_where_no_query_shares_a_segment_with_a_key() -> None:
    query = torch.full((1, 4, 1, 8), float("nan"), requires_grad=True)
    segments = torch.zeros(1, 4, dtype=torch.int32)
    out = polyattn.attention(query, query, query, segments=(segments, segments + 1))
    out.sum().backward()
    assert out.eq(0).all()
    assert query.grad is not None
    assert query.grad.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masks_of_large_numbers_keep_their_digits(dtype: torch.dtype) -> None:
    """S8: a float mask is added to the logits in float32, whatever the dtype of the tensors."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 256, 2, 64).to(dtype).requires_grad_() for _ in range(3))
    far = (torch.arange(256)[:, None] - torch.arange(256)).abs().float()
    mask = 100.0 - 0.5 * far[None, None]
    found, right = (
        polyattn.attention(q, k, v, attn_mask=mask, backend=name, return_lse=True) for name in (None, "reference")
    )
    assert polyattn.explain(polyattn.attention, q, k, v, attn_mask=mask).backend == "torch_sdpa"
    torch.testing.assert_close(found[0], right[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found[1], right[1], atol=1e-2, rtol=0)
    upstream = torch.randn_like(found[0])
    for one, other in zip(*(torch.autograd.grad(out, (q, k, v), upstream) for out, _ in (found, right)), strict=True):
        assert float((one - other).float().norm() / other.float().norm()) < 2e-2
