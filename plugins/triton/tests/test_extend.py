"""`extend` under the interpreter against core's definition: everything but a sequence's own rows is NaN or no page."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from polyattn.contract import PagedTables
from polyattn.semantics.kv_quant import fp4_scales, real, stored
from polyattn.semantics.reference import paged_attention, verify_mask
from polyattn.testing.families.cached import in_tables
from polyattn.testing.tolerances import RELATIVE_L2
from polyattn_triton.kernels.extend import Config, _boxes, _chosen, config_for, extend
from polyattn_triton.kernels.merge import merge

MIXED = ((3, 17), (1, 20), (0, 9), (11, 45), (2, 0))
"""(queries, keys): new tokens after a prefix, a decode, no queries, several tiles, padding."""
LARGEST = 2**30
"""No page has this number."""

SMALL = Config(M=16, N=16, warps=4, stages=1)
SPLIT = SMALL._replace(split=True)
BOXES = SMALL._replace(split=True, box=True)

DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "fp4_e2m1": torch.uint8,
}


@dataclasses.dataclass
class Pools:
    """Rows of all tokens in pages, in layout NHD: as stored, with their scales, and as real numbers."""

    page_table: torch.Tensor
    stored: list[torch.Tensor]
    scales: list[torch.Tensor | None]
    real: list[torch.Tensor]


def scales_of(kind, kv_scales, rows, generator):
    """Broadcastable to rows [pages, page_size, H, D] (`stored` and `real` take them), and as callers give them."""
    pages, size, heads, _ = rows.shape
    if kv_scales == "tensor":
        return torch.tensor([0.37]), torch.tensor(0.37)
    if kv_scales == "head":
        scale = torch.rand(heads, generator=generator) + 0.1
        return scale[:, None], scale
    if kv_scales == "token":
        scale = torch.rand(pages, size, heads, generator=generator) + 0.1
        return scale[..., None], scale
    if kv_scales == "block16":
        scale = fp4_scales(rows)
        return scale, scale
    return None, None


def pools_of(lens, page_size, heads, widths, dtype, kv_dtype="auto", kv_scales="", unread=0):
    """`unread`: pages of each sequence, from its first, that must not be read."""
    generator = torch.Generator().manual_seed(len(lens) + page_size)
    needed = [-(-keys // page_size) for _, keys in lens]
    pages = sum(needed) + 2
    table = torch.full((len(lens), max(needed) + 1), LARGEST, dtype=torch.int32)
    owned = torch.zeros(pages, page_size, dtype=torch.bool)
    order = iter(torch.randperm(pages, generator=generator).tolist())
    for n, (count, (_, keys)) in enumerate(zip(needed, lens, strict=True)):
        for column in range(count):
            table[n, column] = next(order)
            owned[table[n, column], : keys - column * page_size] = True
    kept, factors, numbers = [], [], []
    for width in widths:
        rows = torch.randn(pages, page_size, heads, width, generator=generator)
        broadcast, given = scales_of(kv_dtype, kv_scales, rows, generator)
        codes = stored(rows, broadcast, DTYPES.get(kv_dtype, dtype))
        numbers.append(real(codes, broadcast, torch.float32).masked_fill(~owned[..., None, None], float("nan")))
        if codes.is_floating_point():
            codes = codes.float().masked_fill(~owned[..., None, None], float("nan")).to(codes.dtype)
        else:
            codes = codes.masked_fill(~owned[..., None, None], 127)
        kept.append(codes)
        factors.append(given)
    for n in range(len(lens) if unread else 0):
        table[n, : min(unread, needed[n])] = LARGEST
    return Pools(table, kept, factors, numbers)


def hnd(tensor, yes):
    return tensor.transpose(1, 2).contiguous() if yes and tensor is not None and tensor.ndim > 2 else tensor


def check(
    lens=MIXED, page_size=5, heads=(4, 2), widths=(16, 16), dtype=torch.float32, config=None, layout="NHD",
    kv=("auto", ""), new_rows=False, causal=True, window=(-1, -1), chunk=0, softcap=0.0, sinks=None, attn_mask=None,
    tree=False, scale=0.3, with_lse=True, unread=0, cuts=0,
):  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    H_q, H_kv = heads
    pools = pools_of(lens, page_size, H_kv, widths, dtype, *kv)
    T_q = sum(queries for queries, _ in lens)
    tables = {
        "seq_lens": torch.tensor([keys for _, keys in lens], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, *itertools.accumulate(q for q, _ in lens)], dtype=torch.int32),
    }
    # Strided views, whose gaps must not be read.
    wide = torch.full((T_q, H_q, 2 * widths[0]), float("nan"), dtype=dtype)
    query = wide[..., : widths[0]]
    query.copy_(torch.randn(query.shape, generator=generator))
    given = {"attn_mask": attn_mask, "sinks": sinks, "window": window, "chunk": chunk}
    given |= {"softcap": softcap, "scale": scale}

    expected_pools = [rows.clone() for rows in pools.real]
    new = [None, None]
    caches = [codes.clone() for codes in pools.stored]
    if new_rows:
        new = [torch.randn(T_q, H_kv, width, generator=generator).to(dtype) for width in widths]
        start = 0
        for n, (queries, keys) in enumerate(lens):
            for i in range(queries):
                at = keys - queries + i
                for side in range(2):
                    if keys == 0:
                        new[side][start + i] = float("nan")
                        continue
                    where = pools.page_table[n, at // page_size], at % page_size
                    factor = pools.scales[side]
                    if factor is not None:
                        factor = factor[where] if factor.ndim > 2 else factor.reshape(-1, 1)
                        factor = factor[:, None] if kv[1] == "token" else factor
                    codes = stored(new[side][start + i].float(), factor, caches[side].dtype)
                    expected_pools[side][where] = real(codes, factor, torch.float32)
                    if caches[side].is_floating_point():
                        caches[side][where] = torch.full(caches[side].shape[2:], float("nan")).to(caches[side].dtype)
            start += queries
    expected, expected_lse = paged_attention(
        query, *expected_pools, page_table=pools.page_table, **tables, **given, return_lse=True,
        causal="bottom_right" if causal else "none",
    )  # fmt: skip
    if unread:
        pools.page_table[:, :unread] = LARGEST

    is_hnd = layout == "HND"
    out = torch.full((T_q, H_q, widths[1]), float("nan"), dtype=dtype)
    lse = torch.full((T_q, H_q), float("nan")) if with_lse else None
    before = [codes.contiguous().view(torch.uint8).clone() for codes in caches]
    whole, given = (out, lse, sinks), given | {"out": out, "lse": lse}
    if cuts:
        outs, lses = (torch.full((cuts, *x.shape), float("nan")) for x in (out, torch.empty(T_q, H_q)))
        given |= {"out": outs, "lse": lses, "sinks": None, "cuts": cuts}
    extend(
        query, *(hnd(codes, is_hnd) for codes in caches), **in_tables(page_table=pools.page_table, **tables,
        max_seqlen_q=max(q for q, _ in lens), max_seqlen_k=max(k for _, k in lens), page_size=page_size, hnd=is_hnd,
        causal=causal, **given, tree=tree, key=new[0], value=new[1], kv_dtype=kv[0], kv_scales=kv[1],
        k_scale=hnd(pools.scales[0], is_hnd), v_scale=hnd(pools.scales[1], is_hnd), config=config),
    )  # fmt: skip
    if cuts:
        merge(outs, lses, sinks=whole[2], out=whole[0], lse=whole[1])
    for codes, old in zip(caches, before, strict=True):
        assert torch.equal(codes.contiguous().view(torch.uint8), old)
    error = (out.float() - expected.float()).norm() / expected.float().norm()
    assert float(error) < RELATIVE_L2[dtype]
    if lse is not None:
        assert torch.equal(lse == float("-inf"), expected_lse == float("-inf"))
        torch.testing.assert_close(lse, expected_lse, atol=1e-3 if dtype == torch.bfloat16 else 1e-5, rtol=1e-5)
    return out


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("page_size, config, layout", [
    (1, SMALL, "NHD"), (5, SMALL, "HND"), (16, SMALL, "NHD"), (16, SPLIT, "HND"), (64, SPLIT, "NHD"),
    (64, BOXES, "NHD"), (16, BOXES, "HND"), (33, SPLIT, "NHD"), (5, None, "NHD"), (64, None, "HND"),
])  # fmt: skip
def test_s9_pages_of_any_size_in_both_layouts(page_size, config, layout):
    check(page_size=page_size, config=config, layout=layout)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("dtype, config, page_size", [
    (torch.bfloat16, SMALL, 5), (torch.bfloat16, BOXES, 32), (torch.float16, SPLIT, 16),
])  # fmt: skip
def test_half_precision(dtype, config, page_size):
    check(dtype=dtype, config=config, page_size=page_size)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("widths", [(24, 40), (72, 96), (32, 64)])
def test_head_dims_that_are_no_power_of_two_or_not_equal(widths):
    check(widths=widths, config=BOXES, page_size=16)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (5, 1)])
def test_groups_of_any_size_fill_a_tile(heads):
    check(heads=heads, config=SMALL)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("config", [SMALL, BOXES])
@pytest.mark.parametrize("rule", [
    {"causal": False},
    {"window": (7, -1)},
    {"window": (5, 3), "causal": False},
    {"window": (-1, 4), "causal": False},
    {"chunk": 11, "window": (8, -1)},
])  # fmt: skip
def test_s3_s4_who_sees_what(rule, config):
    check(page_size=16, config=config, **rule)


def test_s4_pages_before_a_window_are_not_read():
    for config in (SMALL, BOXES):
        check(lens=((3, 70), (2, 90)), page_size=16, config=config, window=(9, -1), unread=3)
        check(lens=((3, 70), (2, 90)), page_size=5, config=config, window=(9, -1), unread=10)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("numbers", [
    {"softcap": 1.5},
    {"sinks": torch.tensor([0.3, -2.0, float("-inf"), 30.0])},
    {"scale": -0.4},
    {"scale": 0.0},
    {"softcap": 0.7, "sinks": torch.tensor([0.3, -2.0, 4.0, 1.0]), "window": (12, -1)},
])  # fmt: skip
def test_s2_s5_scale_softcap_and_sinks(numbers):
    check(config=SPLIT, page_size=16, **numbers)


def masks(shape, additive):
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(shape, generator=generator) < 0.6
    mask[..., 0, :] = False  # a row without keys
    if not additive:
        return mask
    return torch.randn(shape, generator=generator).masked_fill(~mask, float("-inf"))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("shape", [(5, 4, 11, 45), (1, 1, 11, 45)])
def test_s8_masks(shape, additive):
    check(attn_mask=masks(shape, additive), causal=additive, config=SPLIT if shape[0] == 1 else SMALL)


def trees(lens):
    rows, columns = max(q for q, _ in lens), max(k for _, k in lens)
    # What lies outside of a sequence is False: reading it would show.
    mask = torch.zeros(len(lens), 1, rows, columns, dtype=torch.bool)
    for n, (queries, keys) in enumerate(lens):
        if keys:
            parents = [(i - 1) // 2 if i else -1 for i in range(queries)]
            mask[n, 0, :queries, :keys] = verify_mask(keys - queries, parents)
    return mask


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("lens", [((7, 50), (7, 7), (7, 41)), MIXED])
@pytest.mark.parametrize("config, page_size, causal", [(SMALL, 5, False), (SPLIT, 16, True), (BOXES, 32, False)])
def test_s8_trees(config, page_size, causal, lens):
    check(lens=lens, attn_mask=trees(lens), tree=True, causal=causal, config=config, page_size=page_size)


def test_s8_of_a_tree_only_the_last_columns_are_read():
    lens = ((7, 60), (7, 41))
    mask = trees(lens)
    for config in (SMALL, SPLIT):
        expected = check(lens=lens, attn_mask=mask, tree=True, config=config, causal=False)
        hidden = mask.clone()
        hidden[:, :, :, :32] = False
        pools = pools_of(lens, 5, 2, (16, 16), torch.float32)
        query = torch.randn(14, 4, 16, generator=torch.Generator().manual_seed(7))
        out, counts = torch.empty(14, 4, 16), torch.tensor([60, 41], dtype=torch.int32)
        starts = torch.tensor([0, 7, 14], dtype=torch.int32)
        extend(
            query, *pools.stored, tables=PagedTables(pools.page_table, counts, starts, 7, 60), page_size=5, hnd=False,
            causal=False, scale=0.3, attn_mask=hidden, tree=True, out=out, config=config,
        )  # fmt: skip
        torch.testing.assert_close(out, expected)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kv_dtype, kv_scales", [
    ("fp8_e4m3", "tensor"), ("fp8_e4m3", "token"), ("fp8_e5m2", "head"), ("int8", "head"), ("int8", "token"),
    ("fp8_e4m3", ""), ("fp4_e2m1", "block16"),
])  # fmt: skip
@pytest.mark.parametrize("new_rows", [False, True])
def test_s9_quantised_caches(kv_dtype, kv_scales, new_rows):
    check(kv=(kv_dtype, kv_scales), widths=(32, 48), new_rows=new_rows, page_size=5, config=SMALL)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kv", [("fp8_e4m3", "token"), ("fp4_e2m1", "block16"), ("int8", "tensor")])
def test_s9_quantised_caches_in_bfloat16(kv):
    check(kv=kv, widths=(32, 32), dtype=torch.bfloat16, page_size=32, config=BOXES, layout="HND", new_rows=True)
    check(kv=kv, widths=(96, 80), dtype=torch.bfloat16, page_size=16, config=SPLIT)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("config, page_size", [(SMALL, 5), (BOXES, 16)])
@pytest.mark.parametrize("rule", [
    {}, {"window": (6, -1)}, {"chunk": 9}, {"window": (3, 3), "causal": False, "sinks": torch.ones(4)},
])  # fmt: skip
def test_s9_new_rows_are_read_where_they_are(config, page_size, rule):
    check(new_rows=True, config=config, page_size=page_size, **rule)


RANGED = {
    "causal": {},
    "boxes": {"config": BOXES, "page_size": 16},
    "split, sinks": {"config": SPLIT, "page_size": 16, "sinks": torch.ones(4)},
    "window, new rows": {"config": SPLIT, "page_size": 16, "window": (20, -1), "new_rows": True},
    "chunk": {"config": SPLIT, "page_size": 5, "chunk": 30},
    "both ways": {"window": (30, 3), "causal": False},
    "new rows": {"new_rows": True, "lens": ((30, 70), (3, 17), (1, 90))},
    "more queries than keys": {"lens": ((40, 33), (9, 4)), "causal": False},
    "equal lengths": {"lens": ((20, 90),) * 2, "config": None},
    "FP8": {"kv": ("fp8_e4m3", "token"), "config": SPLIT, "page_size": 16},
}
"""What differs from causal float32 with pages of 5 tokens, for keys in ranges."""


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", RANGED)
def test_s5_s6_ranges_of_keys_are_parts_of_the_whole(name):
    """Sinks count once, when the parts are merged; a range without keys weighs nothing."""
    check(**{"lens": ((20, 90), (0, 9), (3, 40), (2, 0)), "config": SMALL, "cuts": 3, **RANGED[name]})


def test_s8_ranges_of_keys_of_a_tree():
    lens = ((11, 90), (5, 33))
    check(lens=lens, attn_mask=trees(lens), tree=True, causal=False, config=SPLIT, page_size=16, cuts=3)


def test_s9_new_rows_in_a_tree_and_under_a_mask():
    check(new_rows=True, attn_mask=trees(MIXED), tree=True, causal=False, config=SMALL)
    check(new_rows=True, attn_mask=masks((5, 4, 11, 45), True), config=SPLIT)


def test_s9_new_rows_are_rounded_as_the_cache_rounds():
    """A cache of another dtype than the queries: float32 rows attend as bfloat16."""
    lens = ((4, 20),)
    pools = pools_of(lens, 5, 2, (16, 16), torch.bfloat16)
    generator = torch.Generator().manual_seed(7)
    query, key, value = (torch.randn(4, heads, 16, generator=generator) for heads in (4, 2, 2))
    tables = {
        "page_table": pools.page_table,
        "seq_lens": torch.tensor([20], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 4], dtype=torch.int32),
    }
    expected = paged_attention(query, *pools.stored, key=key, value=value, **tables)
    out = torch.empty_like(query)
    extend(
        query, *pools.stored, tables=PagedTables(**tables, max_seqlen_q=4, max_seqlen_k=20), page_size=5, hnd=False,
        causal=True, scale=0.25, key=key, value=value, out=out,
    )  # fmt: skip
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_s6_no_lse_and_equal_lengths():
    lens = ((6, 30), (6, 50), (6, 6))
    for config in (SMALL, None):
        check(lens=lens, with_lse=False, config=config)


def test_s7_queries_before_all_keys_see_none():
    """Keys of an encoder, fewer than queries: without a diagonal all are seen."""
    check(lens=((9, 4), (3, 11)), causal=False, config=SMALL)


def test_no_queries_or_no_sequences():
    query = torch.empty(0, 4, 16)
    cache = torch.empty(2, 4, 2, 16)
    for N in (0, 3):
        extend(
            query, cache, cache, **in_tables(page_table=torch.zeros(N, 1, dtype=torch.int32),
            seq_lens=torch.zeros(N, dtype=torch.int32), cu_seqlens_q=torch.zeros(N + 1, dtype=torch.int32),
            max_seqlen_q=0, max_seqlen_k=0, page_size=4, hnd=False, causal=True, scale=1.0, out=torch.empty(0, 4, 16)),
        )  # fmt: skip


def test_s9_caches_may_be_strided_views():
    """Keys and values of a page side by side, and a page table that is a view."""
    lens = ((3, 20), (2, 33))
    pools = pools_of(lens, 16, 2, (16, 16), torch.float32)
    both = torch.stack(pools.stored, dim=1)
    query = torch.randn(5, 4, 16)
    tables = {
        "page_table": pools.page_table,
        "seq_lens": torch.tensor([20, 33], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 3, 5], dtype=torch.int32),
    }
    expected = paged_attention(query, *pools.stored, **tables)
    out = torch.empty(5, 2, 4, 16)[:, 0]
    for config in (SMALL, BOXES):
        out.fill_(float("nan"))
        extend(
            query, both[:, 0], both[:, 1], tables=PagedTables(**tables, max_seqlen_q=3, max_seqlen_k=33), page_size=16,
            hnd=False, causal=True, scale=0.25, out=out, config=config,
        )  # fmt: skip
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_the_table_has_a_config_for_every_dtype_and_width(monkeypatch):
    monkeypatch.setattr("polyattn_triton.kernels.rules.INTERPRETED", False)
    for where in ("hopper", "blackwell", "cuda", "other"):
        _chosen.cache_clear()
        monkeypatch.setattr("polyattn_triton.kernels.extend.architecture", lambda device, where=where: where)
        for dtype, cache_dtype, width in (
            (torch.bfloat16, torch.bfloat16, 64),
            (torch.float16, torch.int8, 96),
            (torch.float32, torch.float32, 256),
            (torch.bfloat16, torch.uint8, 256),
            (torch.float32, torch.float8_e4m3fn, 16),
        ):
            query, cache = torch.empty(1, 4, width, dtype=dtype), torch.empty(1, 1, 1, width, dtype=cache_dtype)
            for page_size, mask in itertools.product((1, 16, 64), ("", "tree", "bool", "additive")):
                many, few = (
                    config_for(query, cache, cache, rows, page_size=page_size, mask=mask) for rows in (4096, 4)
                )
                assert many.M >= few.M == 16
                # A box lies in one page, and FP4 is not read in boxes.
                assert not many.box or (page_size % many.N == 0 and cache_dtype != torch.uint8)


def test_descriptors_of_pools_are_kept_without_their_memory(monkeypatch):
    monkeypatch.setattr("polyattn_triton.kernels.rules.INTERPRETED", False)
    both = torch.empty(2, 3, 16, 2, 32, dtype=torch.bfloat16)
    pools, (key, value) = _boxes(both[0], both[1], False, 16)
    assert (pools.page_rows, pools.row, pools.column) == (16, 0, 32)
    assert (key.shape, key.strides, key.block_shape) == ([48, 64], [64, 1], [16, 32])
    assert value.base.data_ptr() == both[1].data_ptr()
    assert not isinstance(key.base, torch.Tensor)
    assert _boxes(both[0], both[1], False, 16)[1][0] is key
    assert _boxes(both[1], both[0], False, 16)[1][0] is not key
    # Rows that are no equal steps apart.
    apart = torch.empty(3, 2, 40, 32, dtype=torch.bfloat16)[:, :, :16].transpose(1, 2)[:, :, :, :24]
    assert _boxes(apart, apart, False, 16) is None
