"""Packed, paged and latent forms against the dense definition."""

from __future__ import annotations

import math

import pytest
import torch

from polyattn.semantics.reference import (
    attention,
    mla_absorb,
    mla_attention,
    mla_unabsorbed_attention,
    mla_unpack_fp8,
    paged_attention,
    varlen_attention,
    verify_mask,
)

F64 = torch.float64
H_Q, H_KV, D, D_V, PAGE = 4, 2, 6, 5, 4
LENS_Q, LENS_K = [3, 1, 0, 5], [9, 4, 2, 5]
ALL = {
    "causal": "bottom_right",
    "window": (4, -1),
    "softcap": 2.0,
    "chunk": 5,
    "alibi": torch.rand(H_Q, dtype=F64),
    "sinks": torch.randn(H_Q, dtype=F64),
    "scale": 0.4,
}


def ends(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def packed(lens_q=LENS_Q, lens_k=LENS_K, seed=0, dtype=F64):
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(lens_q), H_Q, D, generator=gen, dtype=F64)
    k = torch.randn(sum(lens_k), H_KV, D, generator=gen, dtype=F64)
    v = torch.randn(sum(lens_k), H_KV, D_V, generator=gen, dtype=F64)
    return [t.to(dtype) for t in (q, k, v)]


def one_by_one(q, k, v, lens_q=LENS_Q, lens_k=LENS_K, attn_mask=None, **options):
    """The packed result, put together from dense calls."""
    outs, lses, a, b = [], [], 0, 0
    for n, (n_q, n_k) in enumerate(zip(lens_q, lens_k, strict=True)):
        if attn_mask is not None:
            options["attn_mask"] = attn_mask[n % attn_mask.shape[0]][None, :, :n_q, :n_k]
        rows = (q[a : a + n_q], k[b : b + n_k], v[b : b + n_k])
        out, lse = attention(*(t[None] for t in rows), return_lse=True, **options)
        outs.append(out[0])
        lses.append(lse[0])
        a, b = a + n_q, b + n_k
    return torch.cat(outs), torch.cat(lses)


def equal(got, want, tol=1e-12):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def in_pages(k, v, lens_k=LENS_K, layout="NHD", spare=3, dtype=None, fill=math.nan):
    """(key_cache, value_cache, page_table) with pages in random order; whatever no token owns is `fill`."""
    counts = [-(-n // PAGE) for n in lens_k]
    pages = sum(counts) + spare
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(7)).tolist()
    table = torch.full((len(lens_k), max(counts) + 1), 10**6, dtype=torch.int32)
    caches = [torch.full((pages, PAGE, *t.shape[1:]), fill, dtype=F64).to(dtype or t.dtype) for t in (k, v)]
    start = 0
    for n, length in enumerate(lens_k):
        mine = [order.pop() for _ in range(counts[n])]
        table[n, : counts[n]] = torch.tensor(mine, dtype=torch.int32)
        for token in range(length):
            for cache, rows in zip(caches, (k, v), strict=True):
                cache[mine[token // PAGE], token % PAGE] = rows[start + token].to(cache.dtype)
        start += length
    if layout == "HND":
        caches = [c.transpose(1, 2).contiguous() for c in caches]
    return *caches, table


def lengths(lens_q=LENS_Q, lens_k=LENS_K):
    return {"seq_lens": torch.tensor(lens_k, dtype=torch.int32), "cu_seqlens_q": ends(lens_q)}


@pytest.mark.parametrize(
    "options", [{}, {"causal": "bottom_right"}, {"causal": "top_left", "window": (1, 2)}, ALL], ids=len
)
def test_s1_varlen_is_dense_sequence_by_sequence(options):
    q, k, v = packed()
    got = varlen_attention(
        q,
        k,
        v,
        cu_seqlens_q=ends(LENS_Q),
        cu_seqlens_k=ends(LENS_K),
        max_seqlen_q=5,
        max_seqlen_k=9,
        return_lse=True,
        **options,
    )
    assert got[0].shape == (9, H_Q, D_V)
    assert got[1].shape == (9, H_Q)
    equal(got, one_by_one(q, k, v, **options))


@pytest.mark.parametrize("N, H", [(1, 1), (4, H_Q)])
def test_s8_varlen_masks_are_read_up_to_each_length(N, H):
    q, k, v = packed()
    mask = torch.rand(N, H, 5, 9) < 0.6
    got = varlen_attention(
        q,
        k,
        v,
        cu_seqlens_q=ends(LENS_Q),
        cu_seqlens_k=ends(LENS_K),
        max_seqlen_q=5,
        max_seqlen_k=9,
        attn_mask=mask,
        return_lse=True,
    )
    equal(got, one_by_one(q, k, v, attn_mask=mask))


def test_s1_varlen_without_any_sequence():
    q, k, v = packed([], [])
    zero = torch.zeros(1, dtype=torch.int32)
    out, lse = varlen_attention(
        q, k, v, cu_seqlens_q=zero, cu_seqlens_k=zero, max_seqlen_q=0, max_seqlen_k=0, return_lse=True
    )
    assert out.shape == (0, H_Q, D_V)
    assert lse.shape == (0, H_Q)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("options", [{"causal": "none"}, {"causal": "bottom_right"}, ALL], ids=len)
def test_s9_permuted_pages_equal_dense(layout, options):
    q, k, v = packed()
    key_cache, value_cache, table = in_pages(k, v, layout=layout)
    got = paged_attention(
        q, key_cache, value_cache, page_table=table, kv_layout=layout, return_lse=True, **lengths(), **options
    )
    equal(got, one_by_one(q, k, v, **options))


def test_s9_queries_are_the_last_tokens_unless_said_otherwise():
    q, k, v = packed()
    key_cache, value_cache, table = in_pages(k, v)
    got = paged_attention(q, key_cache, value_cache, page_table=table, **lengths())
    equal([got], one_by_one(q, k, v, causal="bottom_right")[:1])


def test_s9_padding_rows_of_a_decode_batch():
    q, k, v = packed([1, 1, 1], [3, 0, 5])
    key_cache, value_cache, table = in_pages(k, v, [3, 0, 5])
    before = [c.clone() for c in (key_cache, value_cache)]
    out, lse = paged_attention(
        q,
        key_cache,
        value_cache,
        page_table=table,
        key=torch.stack([k[2], k[2], k[7]]),
        value=torch.stack([v[2], v[2], v[7]]),
        save_kv_cache=True,
        return_lse=True,
        **lengths([1, 1, 1], [3, 0, 5]),
    )
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(lse[1], torch.full_like(lse[1], -math.inf))
    equal((out, lse), one_by_one(q, k, v, [1, 1, 1], [3, 0, 5], causal="bottom_right"))
    for cache, old in zip((key_cache, value_cache), before, strict=True):
        torch.testing.assert_close(cache, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("save", [True, False])
def test_s9_save_kv_cache_decides_who_writes_and_nothing_else(layout, save):
    q, k, v = packed()
    full = in_pages(k, v, layout=layout)
    # The same cache before the new tokens: their slots hold NaN.
    new = torch.zeros(sum(LENS_K), dtype=torch.bool)
    for n, (n_q, stop) in enumerate(zip(LENS_Q, ends(LENS_K)[1:].tolist(), strict=True)):
        new[stop - n_q : stop] = True
        assert n_q <= LENS_K[n]
    stale = in_pages(*(t.masked_fill(new[:, None, None], math.nan) for t in (k, v)), layout=layout)
    untouched = [t.clone() for t in stale[:2]]
    got = paged_attention(
        q,
        *stale[:2],
        page_table=stale[2],
        kv_layout=layout,
        key=k[new],
        value=v[new],
        save_kv_cache=save,
        return_lse=True,
        **lengths(),
    )
    equal(got, one_by_one(q, k, v, causal="bottom_right"))
    expected = full[:2] if save else untouched
    for cache, want in zip(stale[:2], expected, strict=True):
        torch.testing.assert_close(cache, want, rtol=0, atol=0, equal_nan=True)


def test_s9_saving_without_new_rows_writes_nothing():
    q, k, v = packed()
    key_cache, value_cache, table = in_pages(k, v, fill=0.0)
    before = key_cache.clone(), value_cache.clone()
    paged_attention(q, key_cache, value_cache, page_table=table, save_kv_cache=True, **lengths())
    assert torch.equal(key_cache, before[0])
    assert torch.equal(value_cache, before[1])


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
@pytest.mark.parametrize("granularity", ["tensor", "head", "token"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_s9_quantised_cache_equals_its_dequantised_values(stored, granularity, layout):
    q, k, v = packed()
    raw = [t.to(stored).double() for t in (k * 20, v * 20)]
    raw = [torch.nan_to_num(t) for t in raw]
    key_cache, value_cache, table = in_pages(*raw, layout=layout, dtype=stored, fill=0.0)
    pages = key_cache.shape[0]
    shape = {"tensor": (), "head": (H_KV,), "token": (pages, PAGE, H_KV)}[granularity]
    scales = [torch.rand(shape) + 0.01 for _ in "kv"]
    # The same caches in real units and without scales.
    wide = [
        c.double() * (s.double() if s.dim() == 0 else s.double().unsqueeze(-1))
        for c, s in zip(
            (c.transpose(1, 2) if layout == "HND" else c for c in (key_cache, value_cache)), scales, strict=True
        )
    ]
    want = paged_attention(q, *wide, page_table=table, return_lse=True, **lengths())
    if layout == "HND" and granularity == "token":
        scales = [s.transpose(1, 2).contiguous() for s in scales]
    got = paged_attention(
        q,
        key_cache,
        value_cache,
        page_table=table,
        kv_layout=layout,
        k_scale=scales[0],
        v_scale=scales[1],
        return_lse=True,
        **lengths(),
    )
    equal(got, want)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
@pytest.mark.parametrize("granularity", ["tensor", "head", "token"])
def test_s9_new_rows_are_rounded_the_same_way_whoever_writes(stored, granularity):
    lens_q, lens_k = [1, 2], [5, 2]
    q, k, v = packed(lens_q, lens_k)
    k[4] *= 1e6  # far outside what the cache can hold
    outs = []
    for save in (True, False):
        key_cache, value_cache, table = in_pages(
            torch.zeros_like(k), torch.zeros_like(v), lens_k, dtype=stored, fill=0.0
        )
        pages = key_cache.shape[0]
        shape = {"tensor": (1,), "head": (H_KV,), "token": (pages, PAGE, H_KV)}[granularity]
        gen = torch.Generator().manual_seed(3)
        k_scale, v_scale = (torch.rand(shape, generator=gen) * 0.01 + 0.01 for _ in "kv")
        arguments = {"page_table": table, "k_scale": k_scale, "v_scale": v_scale, **lengths(lens_q, lens_k)}
        new = {"key": k[4:], "value": v[4:]}
        outs.append(paged_attention(q, key_cache, value_cache, save_kv_cache=save, **new, **arguments))
        assert bool(key_cache.float().any()) is save
        if save:
            assert torch.isfinite(key_cache.float()).all()
            outs.append(paged_attention(q, key_cache, value_cache, **arguments))
    assert torch.isfinite(outs[0]).all()
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_s8_tree_verification_over_a_paged_prefix():
    parents, prefix = [-1, 0, 0, 1], 5
    lens_q, lens_k = [4, 4], [prefix + 4, prefix + 4]
    q, k, v = packed(lens_q, lens_k)
    mask = verify_mask(prefix, parents)[None, None]
    key_cache, value_cache, table = in_pages(k, v, lens_k)
    got = paged_attention(
        q,
        key_cache,
        value_cache,
        page_table=table,
        attn_mask=mask,
        causal="none",
        return_lse=True,
        **lengths(lens_q, lens_k),
    )
    equal(got, one_by_one(q, k, v, lens_q, lens_k, attn_mask=mask))


def test_s11_paged_output_keeps_the_query_dtype():
    q, k, v = packed(dtype=torch.bfloat16)
    key_cache, value_cache, table = in_pages(k, v)
    out, lse = paged_attention(q, key_cache, value_cache, page_table=table, return_lse=True, **lengths())
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert torch.isfinite(out).all()


# MLA

HEADS, NOPE, LATENT, ROPE, OUT = 3, 4, 8, 2, 5


def latent_inputs(lens_q, lens_k):
    gen = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=gen, dtype=F64)

    T_q, T_k = sum(lens_q), sum(lens_k)
    q_nope, q_rope = draw(T_q, HEADS, NOPE), draw(T_q, HEADS, ROPE)
    latent, k_rope = draw(T_k, LATENT), draw(T_k, ROPE)
    return q_nope, q_rope, latent, k_rope, draw(HEADS, NOPE, LATENT), draw(HEADS, OUT, LATENT)


@pytest.mark.parametrize(
    "options",
    [{}, {"window": (3, -1)}, {"softcap": 1.5, "sinks": torch.linspace(-1.0, 1.0, HEADS, dtype=F64)}],
    ids=["plain", "window", "softcap and sinks"],
)
def test_s2_mla_absorbed_equals_unabsorbed_at_the_uncompressed_scale(options):
    lens_q, lens_k = [2, 1, 6], [7, 4, 6]
    q_nope, q_rope, latent, k_rope, w_uk, w_uv = latent_inputs(lens_q, lens_k)
    scale = (NOPE + ROPE) ** -0.5
    rows = torch.cat([latent, k_rope], -1)[:, None]
    cache, _, table = in_pages(rows, rows, lens_k)
    out, lse = mla_attention(
        mla_absorb(q_nope, q_rope, w_uk),
        cache.squeeze(2),
        page_table=table,
        scale=scale,
        v_head_dim=LATENT,
        return_lse=True,
        **lengths(lens_q, lens_k),
        **options,
    )
    assert out.shape == (9, HEADS, LATENT)
    a = b = 0
    for n_q, n_k in zip(lens_q, lens_k, strict=True):
        want, want_lse = mla_unabsorbed_attention(
            q_nope[None, a : a + n_q],
            q_rope[None, a : a + n_q],
            latent[None, b : b + n_k],
            k_rope[None, b : b + n_k],
            w_uk,
            w_uv,
            scale=scale,
            causal="bottom_right",
            return_lse=True,
            **options,
        )
        up = torch.einsum("thc,hdc->thd", out[a : a + n_q], w_uv)
        equal((up, lse[a : a + n_q]), (want[0], want_lse[0]))
        a, b = a + n_q, b + n_k


def test_s9_mla_fp8_rows_are_512_latents_4_scales_64_rope():
    gen = torch.Generator().manual_seed(0)
    latent = torch.randn(3, PAGE, 512, generator=gen).to(torch.float8_e4m3fn)
    scales = torch.rand(3, PAGE, 4, generator=gen) + 0.1
    rope = torch.randn(3, PAGE, 64, generator=gen).bfloat16()
    cache = torch.cat([t.view(torch.uint8) for t in (latent, scales, rope)], -1)
    assert cache.shape == (3, PAGE, 656)
    real = torch.cat([latent.float() * scales.repeat_interleave(128, -1), rope.float()], -1)
    assert torch.equal(mla_unpack_fp8(cache), real)
    q = torch.randn(2, 4, 576, generator=gen)
    arguments = {"page_table": torch.tensor([[2, 0]]), "scale": 192**-0.5, **lengths([2], [7])}
    assert torch.equal(mla_attention(q, cache, **arguments), mla_attention(q, real, **arguments))
