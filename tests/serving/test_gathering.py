"""Serving by gathered keys: what is read, what is refused, and that nothing waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from polyattn import explain, mla_attention, paged_attention
from polyattn.backends import like_lengths
from polyattn.backends.gathered_sdpa import GatheredSDPA
from polyattn.backends.paged_torch_native import PagedTorchNative
from polyattn.backends.torch_sdpa import TorchSDPA
from polyattn.contract import AttentionRequest, PagedTables
from polyattn.errors import UnsupportedRequestError
from polyattn.semantics import reference
from polyattn.testing.cases import Case
from polyattn.testing.problems import build

GATHERING = ("torch_sdpa", "torch_native", "flex_attention")
CPU = torch.device("cpu")
PAGED: dict[str, Any] = {
    "family": "paged",
    "layout": "THD",
    "dtype": "float32",
    "phase": "extend",
    "s_relation": "fewer",
    "causal": "bottom_right",
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "v_head_dim": 8,
    "page_size": 4,
}
MLA: dict[str, Any] = {**PAGED, "family": "mla", "kv_heads": 1, "head_dim": 24, "v_head_dim": 16, "scale": 0.3}


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pool(pages: int, size: int = 4, heads: int = 2, width: int = 16, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(pages * width)
    return torch.randn(pages, size, heads, width, generator=generator).to(dtype)


@pytest.mark.parametrize("backend", GATHERING)
@pytest.mark.parametrize("queries", [1, 3])
def test_pages_before_the_window_are_not_read(backend: str, queries: int) -> None:
    """A sliding cache gives them back: their entries say 0, a page in which anything may lie."""
    keys, values = pool(9), pool(9, width=8)
    keys[0] = values[0] = torch.nan
    query = torch.randn(2 * queries, 4, 16)
    lens: dict[str, Any] = {"seq_lens": int32(22, 9), "cu_seqlens_q": int32(0, queries, 2 * queries)}
    # Position 21 sees from 17 on, and so does every key of page 4: pages 0 to 2 of the first sequence are gone.
    table = int32([0, 0, 0, 4, 5, 6], [7, 8, 1, 0, 0, 0])
    whole = int32([2, 2, 2, 4, 5, 6], [7, 8, 1, 2, 2, 2])
    options: dict[str, Any] = {"window": (4, -1), "max_seqlen_q": queries, "max_seqlen_k": 22}
    if queries == 1:
        table[0, 3] = 0
    found = paged_attention(query, keys, values, page_table=table, **lens, **options, backend=backend)
    right = reference.paged_attention(query, keys, values, page_table=whole, **lens, window=(4, -1))
    torch.testing.assert_close(found, right)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # alignment is a fact of the host
@pytest.mark.parametrize("family", ["paged", "mla"])
@pytest.mark.parametrize("more", [{}, {"mask": "bool", "tree": True, "phase": "verify"}, {"window": (5, -1)}])
def test_sdpa_does_not_wait_for_the_device(family: str, more: dict[str, Any]) -> None:
    """Fake tensors have no contents: asking for one raises, as it would sync while a graph is recorded."""
    saved = {"save_kv_cache": True} if family == "paged" else {}
    # On another platform: the CPU has no graphs to record into, and its kernel for an LSE takes no fake tensors.
    fields = {**(PAGED if family == "paged" else MLA), **saved, **more, "platform": "rocm"}
    case = Case(request=AttentionRequest(**fields), lengths=((3, 30), (3, 8)), new_rows=family == "paged")
    problem = build(case, CPU)
    forward = TorchSDPA().bind(case.request.normalised()).forward
    with FakeTensorMode() as mode:
        given = {n: mode.from_tensor(t) for n, t in problem.tensors.items()}
        extra = {n: mode.from_tensor(t) if isinstance(t, Tensor) else t for n, t in problem.extra.items()}
        tensors = [given.pop(n) for n in problem.family.positional]
        mask = {"attn_mask": given.pop("mask")} if "mask" in given else {}
        assert forward(*tensors, **given, **problem.family.keywords(extra), **mask).shape == problem.dout.shape


@pytest.mark.parametrize("backend", ["torch_sdpa", "flex_attention"])
def test_a_batch_that_is_too_large_to_pad_is_refused(backend: str) -> None:
    cache = pool(2)
    lens: dict[str, Any] = {"seq_lens": int32(5, 3), "cu_seqlens_q": int32(0, 1, 2), "max_seqlen_q": 1}
    table = int32([0, 1], [0, 0])
    with pytest.raises(UnsupportedRequestError) as refused:
        paged_attention(
            torch.ones(2, 4, 16), cache, cache, page_table=table, **lens, max_seqlen_k=2**26, backend=backend
        )
    assert str(refused.value) == (
        "gathering 2 sequences of up to 67108864 keys makes a tensor of 4294967296 elements; kernels below take fewer "
        "than 2**31. Split the batch, or ask for torch_native, which gathers one sequence at a time"
    )


@pytest.mark.parametrize("backend", GATHERING)
def test_a_pool_of_more_than_two_to_the_31_elements(backend: str) -> None:
    """Lazily touched memory: only the rows of the last page are ever written."""
    size, width = 1024, 128
    pages = 2**31 // (size * width) + 2
    cache = torch.empty(pages, size, 1, width, dtype=torch.bfloat16)
    assert cache.numel() > 2**31
    small = pool(1, size=8, heads=1, width=width, dtype=torch.bfloat16)
    cache[-1, :8] = small[0]
    query, new = torch.randn(2, 4, width).bfloat16(), torch.randn(1, 1, width).bfloat16()
    lens: dict[str, Any] = {"cu_seqlens_q": int32(0, 2), "max_seqlen_q": 2, "max_seqlen_k": 8}
    found = paged_attention(
        query, cache, cache, page_table=int32([pages - 1]), seq_lens=int32(8), **lens, backend=backend
    )
    right = reference.paged_attention(
        query, small, small, page_table=int32([0]), seq_lens=int32(8), cu_seqlens_q=int32(0, 2)
    )
    torch.testing.assert_close(found, right, atol=2e-2, rtol=2e-2)
    lens = {"cu_seqlens_q": int32(0, 1), "max_seqlen_q": 1, "max_seqlen_k": 9, "key": new, "value": new}
    table, values = int32([pages - 1]), torch.empty_like(cache)
    values[-1, :8] = small[0]
    paged_attention(
        query[:1], cache, values, page_table=table, seq_lens=int32(9), **lens, save_kv_cache=True, backend=backend
    )
    assert torch.equal(cache[-1, 8], new[0])
    assert torch.equal(values[-1, 8], new[0])


@pytest.mark.parametrize("backend", ["torch_sdpa", "torch_native"])
@pytest.mark.parametrize("queries", [1, 5])
def test_latents_of_a_real_width(backend: str, queries: int) -> None:
    """One row of 576 for 16 heads, two sequences, pages of 64."""
    cache, query = pool(4, size=64, heads=1, width=576)[:, :, 0] * 0.1, torch.randn(2 * queries, 16, 576)
    lens: dict[str, Any] = {
        "page_table": int32([3, 1], [2, 0]),
        "seq_lens": int32(100, 17),
        "cu_seqlens_q": int32(0, queries, 2 * queries),
    }
    found = mla_attention(
        query, cache, **lens, max_seqlen_q=queries, max_seqlen_k=100, scale=192**-0.5, backend=backend
    )
    right = reference.mla_attention(query.double(), cache.double(), **lens, scale=192**-0.5)
    torch.testing.assert_close(found.double(), right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask", ["none", "one", "heads", "additive", "causal"])
@pytest.mark.parametrize("queries", [1, 6])
def test_folded_heads_are_the_same_attention(mask: str, queries: int) -> None:
    r = AttentionRequest(**{**PAGED, "dtype": "float64", "heads": 6, "kv_heads": 2, "lse": True})
    keys = queries if mask == "causal" else 9
    q, k, v = torch.randn(2, 6, queries, 16), torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 8)
    q, k, v = q.double(), k.double(), v.double()
    seen = torch.rand(2, 6 if mask == "heads" else 1, queries, keys) < 0.6
    seen[..., 0] = True
    given = {
        "none": None,
        "one": seen,
        "heads": seen,
        "causal": None,
        "additive": torch.randn(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf),
    }[mask]
    out, lse = GatheredSDPA(r)(q, k, v, given, causal=mask == "causal")
    options: dict[str, Any] = {"layout": "BHSD", "return_lse": True, "attn_mask": given}
    right, right_lse = reference.attention(q, k, v, causal="bottom_right" if mask == "causal" else "none", **options)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(lse, right_lse)


def test_serving_on_a_cpu_is_torch_native() -> None:
    cache = pool(2)
    lens: dict[str, Any] = {"page_table": int32([0, 1]), "seq_lens": int32(7), "cu_seqlens_q": int32(0, 3)}
    lens |= {"max_seqlen_q": 3, "max_seqlen_k": 7}
    tree = reference.verify_mask(4, [-1, 0, 0])[None, None]
    for more in ({}, {"attn_mask": tree, "tree": True}):
        selection = explain(paged_attention, torch.ones(3, 4, 16), cache, cache, **lens, **more)
        assert (selection.backend, selection.provider, selection.lowerings) == ("torch_native", "torch-serving", ())
        assert selection.source == "platform rule"
    latent = explain(mla_attention, torch.ones(3, 4, 24), torch.ones(2, 4, 24), **lens, scale=0.2, v_head_dim=16)
    assert (latent.backend, latent.lowerings) == ("torch_native", ())


@pytest.mark.parametrize("backend", GATHERING)
def test_what_is_not_native_is_rewritten(backend: str) -> None:
    """A quantised cache and a prefix in chunks, as rows say and as selection finds."""
    cache = pool(2).to(torch.float8_e4m3fn)
    one = torch.ones(1)
    lens: dict[str, Any] = {"page_table": int32([0, 1]), "seq_lens": int32(7), "cu_seqlens_q": int32(0, 3)}
    lens |= {"max_seqlen_q": 3, "max_seqlen_k": 7, "backend": backend}
    query = torch.ones(3, 4, 16)
    found = explain(paged_attention, query, cache, cache, k_scale=one, v_scale=one, **lens)
    assert found.lowerings == ("dequantise_kv",)
    found = explain(paged_attention, query, pool(2), pool(2), chunked_prefix=True, **lens)
    assert found.lowerings == ("chunked_prefix_by_lse",)


@pytest.mark.parametrize("fields", [PAGED, MLA], ids=["paged", "mla"])
def test_lengths_that_the_host_has_are_not_read_from_the_device(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch_native` reads them for every call; a step of an engine brings them as lists."""
    caches = [pool(4, width=width) for width in (16, 8)] if fields is PAGED else [pool(4, heads=1, width=24)[:, :, 0]]
    tables = PagedTables(int32([3, 1], [2, 0]), int32(7, 5), int32(0, 2, 3), 2, 7)
    forward = PagedTorchNative().bind(AttentionRequest(**fields).normalised()).forward
    query = torch.randn(3, 4, fields["head_dim"])
    wanted = forward(query, *caches, tables=tables)
    known = {"seq_lens": tables.seq_lens.tolist(), "cu_seqlens_q": tables.cu_seqlens_q.tolist()}
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "tolist", lambda *_: pytest.fail("a length was read from the device"))
        found = forward(query, *caches, tables=tables._replace(host=known.__getitem__))
    assert torch.equal(found, wanted)


MIXED = ((1, 100), (3, 90), (1, 95), (1, 0), (0, 50), (1, 99), (1, 30), (1, 1), (1, 60))
"""(S_q, S_k): 100, 99 and 95 are about one length, so are 60, 30 and 1, which are few."""


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("window", [(-1, -1), (20, -1), (0, 0)])
def test_decoding_sequences_of_like_length_are_attended_together(
    kv_layout: str, window: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With others in between, and whatever lies past their ends and before their windows."""
    queries, lengths = [q for q, _ in MIXED], [k for _, k in MIXED]
    pages = [-(-k // 4) for k in lengths]
    keys, values = pool(sum(pages) + 1), pool(sum(pages) + 1, width=8)
    table, given = torch.zeros(len(MIXED), max(pages), dtype=torch.int32), iter(torch.randperm(sum(pages)) + 1)
    for n, count in enumerate(pages):
        table[n, :count] = torch.tensor([int(next(given)) for _ in range(count)], dtype=torch.int32)
    lens: dict[str, Any] = {"page_table": table, "seq_lens": int32(*lengths)}
    lens["cu_seqlens_q"] = int32(0, *torch.tensor(queries).cumsum(0).tolist())
    query = torch.randn(sum(queries), 4, 16)
    right = reference.paged_attention(query, keys, values, **lens, window=window)
    for n, count in enumerate(lengths):
        slot = table[n, count // 4] if count % 4 else 0
        keys[slot, count % 4 :] = values[slot, count % 4 :] = torch.nan
    together: list[int] = []
    folded = GatheredSDPA.folded

    def counted(self: Any, query: Tensor, *rest: Any) -> Any:
        together.append(len(query))
        return folded(self, query, *rest)

    monkeypatch.setattr(GatheredSDPA, "folded", counted)
    caches = [t.transpose(1, 2).contiguous() if kv_layout == "HND" else t for t in (keys, values)]
    more: dict[str, Any] = {"kv_layout": kv_layout, "max_seqlen_q": 3, "max_seqlen_k": 100, "window": window}
    found = paged_attention(query, *caches, **lens, **more, backend="torch_native")
    torch.testing.assert_close(found, right)
    assert together == ([3, 3, 1] if window[0] < 0 else [6, 1]), "the last one has three queries"


def test_what_a_group_gathers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(like_lengths, "MOST", 2 * 100 * 2 * (16 + 8))
    request = AttentionRequest(**{**PAGED, "phase": "decode", "s_relation": "one"}).normalised()
    lengths, table = [100, 80, 90, 99, 400], torch.arange(500, dtype=torch.int32).view(5, 100)
    groups = like_lengths.groups_of(request, range(5), range(6), lengths, table, None)
    assert [group.sequences for group in groups] == [[4], [0, 3], [2, 1]]
    assert [group.slots.page.shape[1] for group in groups] == [400, 100, 90]
    sliding = AttentionRequest(**{**PAGED, "phase": "decode", "s_relation": "one", "window": (6, -1)}).normalised()
    (group,) = like_lengths.groups_of(sliding, range(5), range(6), lengths, table, None)
    assert group.slots.page.shape[1] <= 7 + 3, "seven keys are seen, and pages have four"


def test_a_result_that_the_batch_must_not_change_is_made_one_by_one() -> None:
    fields = {**PAGED, "phase": "decode", "s_relation": "one"}
    for more, grouped in (({}, True), ({"batch_invariant": True}, False), ({"save_kv_cache": False}, False)):
        assert like_lengths.may_be_grouped(AttentionRequest(**fields, **more).normalised()) is grouped
