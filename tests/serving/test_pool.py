"""`polyattn.serving.kv_cache.pool`: what is written is what the reference writes, and nothing else moves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import polyattn
from polyattn.errors import ConfigError, InvalidInputError
from polyattn.semantics.kv_quant import mla_pack_fp8
from polyattn.semantics.reference import mla_unpack_fp8
from polyattn.serving.kv_cache.pool import CacheGroup, KVPool, groups_of, pages_for
from polyattn.serving.kv_cache.storage import KVCacheConfig
from polyattn.serving.layer import AttentionLayer

KINDS = [
    ("auto", ""),
    ("fp16", ""),
    *((dtype, scales) for dtype in ("fp8_e4m3", "fp8_e5m2", "int8") for scales in ("tensor", "head", "token")),
    ("fp4_e2m1", "block16"),
]
LAYER = AttentionLayer(0, 4, 2, 48, v_head_dim=32)
MLA = AttentionLayer(0, 4, 1, 576, v_head_dim=512, scale=192**-0.5, latent=True)
ERROR = {"auto": 0.0, "fp16": 4e-4, "fp8_e4m3": 0.03, "fp8_e5m2": 0.06, "int8": 0.02, "fp4_e2m1": 0.12}
"""Relative L2 of what is read back, with scales that fit."""


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)


def pool_of(*layers, kind=("auto", ""), pages=6, dtype=torch.float32, layout="NHD", page_size=4):
    config = KVCacheConfig(kind[0], page_size, layout, kind[1])
    return KVPool(layers or (LAYER,), config, pages, dtype=dtype)


def new_rows(tokens, layer=LAYER, dtype=torch.float32):
    return tuple(torch.randn(tokens, layer.kv_heads, width).to(dtype) for width in layer.dims)


def same(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def contents(pool, *layer_ids):
    """Copies of everything that is stored of tokens."""
    found = []
    for i in layer_ids:
        cache = pool.cache(i)
        scales = (cache.k_scale, cache.v_scale) if cache.dynamic else ()
        found += [t.clone() for t in (*cache.tensors, *scales) if t is not None]
    return found


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_it_writes_what_the_reference_writes(kind, dtype, layout):
    """Sequences of 7 and 3 tokens of which 5 and 1 are new, in pages out of order."""
    pool = pool_of(kind=kind, dtype=dtype, layout=layout)
    if kind[1] == "tensor":
        pool.set_scales(0, 0.5, torch.tensor(0.25))
    elif kind[1] == "head":
        pool.set_scales(0, torch.tensor([0.5, 2.0]), torch.tensor([0.3, 0.7]))
    pool.write(0, torch.tensor([16, 17, 20, 21]), *new_rows(4, dtype=dtype))
    key, value = new_rows(6, dtype=dtype)
    key[0], value[1], key[2] = 3e4, -3e4, 0  # beyond the largest number of most dtypes, and nothing
    cache = pool.cache(0)
    before = [t.clone() for t in cache.tensors]
    pool.write(0, torch.tensor([18, 19, 8, 9, 10, 22]), key, value)
    assert not same(cache.key_cache, before[0])
    assert not same(cache.value_cache, before[1])
    call = {
        "page_table": torch.tensor([[4, 2], [5, 0]], dtype=torch.int32),
        "seq_lens": torch.tensor([7, 3], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 5, 6], dtype=torch.int32),
        "max_seqlen_q": 5,
        "max_seqlen_k": 7,
        "k_scale": cache.k_scale,
        "v_scale": cache.v_scale,
        "kv_layout": layout,
        "backend": "reference",
    }
    query = torch.randn(6, 4, 48).to(dtype)
    out = polyattn.paged_attention(query, *before, key=key, value=value, save_kv_cache=True, **call)
    assert all(same(a, b) for a, b in zip(cache.tensors, before, strict=True))
    torch.testing.assert_close(polyattn.paged_attention(query, *cache.tensors, **call), out)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_rows_that_are_attended_and_not_stored_are_rounded_alike(kind, layout):
    """save_kv_cache=False: the call needs the scales of its new rows, and only those."""
    key, value = new_rows(2)
    slots = torch.tensor([9, 10])
    outs, query = [], torch.randn(2, 4, 48)
    for store in (False, True):
        pool = pool_of(kind=kind, layout=layout)
        cache = pool.cache(0)
        (pool.write if store else pool.make_scales)(0, slots, key, value)
        assert store or not any(t.view(torch.uint8).any() for t in cache.tensors)
        outs.append(
            polyattn.paged_attention(
                query,
                *cache.tensors,
                page_table=torch.tensor([[2]], dtype=torch.int32),
                seq_lens=torch.tensor([3], dtype=torch.int32),
                cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32),
                max_seqlen_q=2,
                max_seqlen_k=3,
                k_scale=cache.k_scale,
                v_scale=cache.v_scale,
                kv_layout=layout,
                backend="reference",
                **({} if store else {"key": key, "value": value}),
            )
        )
    assert outs[0].isfinite().all()
    torch.testing.assert_close(*outs, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_it_says_of_a_cache_what_a_call_finds(kind, layout):
    pool = pool_of(kind=kind, layout=layout)
    cache = pool.cache(0)
    found = polyattn.explain(
        polyattn.paged_attention,
        torch.randn(1, 4, 48),
        *cache.tensors,
        page_table=torch.zeros(1, 1, dtype=torch.int32),
        seq_lens=torch.ones(1, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        max_seqlen_q=1,
        max_seqlen_k=1,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        kv_layout=layout,
        backend="reference",
    ).request
    fields = cache.request_fields()
    assert fields == {name: getattr(found, name) for name in fields}
    assert cache.dynamic == (kind[1] in ("token", "block16"))


def test_it_says_of_a_latent_cache_what_a_call_finds():
    for dtype, kind in ((torch.bfloat16, "auto"), (torch.float32, "fp8_e4m3")):
        cache = pool_of(MLA, kind=(kind, ""), dtype=dtype).cache(0)
        found = polyattn.explain(
            polyattn.mla_attention,
            torch.randn(1, 4, 576).to(dtype),
            *cache.tensors,
            page_table=torch.zeros(1, 1, dtype=torch.int32),
            seq_lens=torch.ones(1, dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
            max_seqlen_q=1,
            max_seqlen_k=1,
            scale=192**-0.5,
            backend="reference",
        ).request
        fields = cache.request_fields()
        assert fields == {name: getattr(found, name) for name in fields}
        assert (cache.key_cache, cache.value_cache, cache.k_scale, cache.v_scale) == (None,) * 4


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_what_is_read_is_what_was_written(kind, layout):
    pool = pool_of(kind=kind, layout=layout)
    if kind[1] in ("tensor", "head"):
        largest = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0}[kind[0]]
        pool.set_scales(0, *(torch.full((1 if kind[1] == "tensor" else 2,), 5 / largest) for _ in range(2)))
    slots = torch.tensor([7, 4, 20, 13])
    new = new_rows(4)
    pool.write(0, slots, *new)
    for dtype in (torch.float32, torch.bfloat16):
        for wanted, got in zip(new, pool.read(0, slots, dtype), strict=True):
            assert got.dtype == dtype
            assert (got.float() - wanted).norm() / wanted.norm() <= ERROR[kind[0]] + (dtype == torch.bfloat16) * 4e-3
    assert all(t.eq(0).all() for t in pool.read(0, torch.tensor([0, 5, 23]), torch.float32)), "nobody wrote there"


@pytest.mark.parametrize("kind", ["auto", "bf16", "fp8_e4m3"])
def test_latent_rows(kind):
    pool = pool_of(MLA, kind=(kind, ""))
    rows, slots = torch.randn(3, 576), torch.tensor([9, 4, 21])
    pool.write(0, slots, rows)
    cache = pool.cache(0).cache
    stored = mla_pack_fp8(rows) if kind == "fp8_e4m3" else rows.to(cache.dtype)
    assert same(cache.view(-1, cache.shape[-1])[slots], stored)
    wanted = mla_unpack_fp8(stored) if kind == "fp8_e4m3" else stored
    assert torch.equal(pool.read(0, slots, torch.float32), wanted.float())
    assert pool.bytes_per_token(0) == {"auto": 2304, "bf16": 1152, "fp8_e4m3": 656}[kind]
    assert pool.cache(0).dynamic == (kind == "fp8_e4m3")


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "int8", "fp4_e2m1"])
def test_the_usual_scales_keep_rows_that_nobody_gave_a_scale_for(dtype):
    """As an engine is started by a flag: a static scale of 1 would leave whole numbers of these in int8."""
    pool, slots = pool_of(kind=(dtype, "")), torch.tensor([9, 10, 21])
    written = tuple(rows * 0.3 for rows in new_rows(3))
    pool.write(0, slots, *written)
    for got, wanted in zip(pool.read(0, slots, torch.float32), written, strict=True):
        assert (got - wanted).norm() / wanted.norm() <= ERROR[dtype]


def test_latent_rows_are_what_latent_attention_reads():
    pool = pool_of(MLA, kind=("fp8_e4m3", ""), dtype=torch.bfloat16)
    rows = torch.randn(7, 576).bfloat16()
    pool.write(0, torch.tensor([8, 9, 10, 11, 20, 21, 22]), rows)
    plain = torch.zeros(6, 4, 576)
    plain.view(-1, 576)[torch.tensor([8, 9, 10, 11, 20, 21, 22])] = mla_unpack_fp8(mla_pack_fp8(rows))
    call = {
        "page_table": torch.tensor([[2, 5]], dtype=torch.int32),
        "seq_lens": torch.tensor([7], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32),
        "max_seqlen_q": 2,
        "max_seqlen_k": 7,
        "scale": 192**-0.5,
        "backend": "reference",
    }
    query = torch.randn(2, 4, 576)
    got = polyattn.mla_attention(query, pool.cache(0).cache, **call)
    torch.testing.assert_close(got, polyattn.mla_attention(query, plain, **call))


HYBRID = (
    AttentionLayer(0, 4, 2, 16, window=7),
    AttentionLayer(1, 4, 4, 32, v_head_dim=16),
    AttentionLayer(2, 4, 2, 16, window=7),
    AttentionLayer(3, 4, 1, 48, v_head_dim=32, scale=0.2, latent=True),
    AttentionLayer(4, 4, 2, 16, window=3),
    AttentionLayer(5, 4, 2, 16, kind="cross"),
)


def test_layers_with_one_window_share_page_tables():
    groups = (CacheGroup(7, (0, 2)), CacheGroup(-1, (1, 3)), CacheGroup(3, (4,)), CacheGroup(-1, (5,), cross=True))
    assert groups_of(HYBRID) == groups
    pool = pool_of(*HYBRID, pages=(4, 9, 3, 2))
    assert pool.groups == groups
    assert [pool.group_of(i) for i in range(6)] == [0, 1, 0, 1, 2, 3]
    assert [pool.cache(i).tensors[0].shape[0] for i in range(6)] == [4, 9, 4, 9, 3, 2]
    bytes_ = [2 * 2 * 32 * 4, 4 * 48 * 4 + 48 * 4, 2 * 32 * 4, 2 * 32 * 4]
    assert [pool.bytes_per_token(g) for g in range(4)] == bytes_
    assert pool.nbytes == sum(4 * n * b for n, b in zip(pool.pages, bytes_, strict=True))


def filled(*layers, kind=("auto", ""), layout="NHD", pages=6):
    """A pool that holds something else in every slot of every layer."""
    pool = pool_of(*layers, kind=kind, layout=layout, pages=pages)
    for layer in layers:
        tokens = torch.arange(pool.pages[pool.group_of(layer.layer_id)] * 4)
        if layer.latent:
            pool.write(layer.layer_id, tokens, torch.randn(len(tokens), layer.head_dim))
        else:
            pool.write(layer.layer_id, tokens, *new_rows(len(tokens), layer))
    return pool


def by_token(pool, layer_id):
    """What is stored, token by token: [slots, ...]."""
    heads_first = pool.cache(layer_id).kv_layout == "HND"
    return [(t.transpose(1, 2) if heads_first else t).flatten(0, 1) for t in contents(pool, layer_id)]


TWO = (LAYER, dataclasses.replace(LAYER, layer_id=1, kv_heads=4, window=5), dataclasses.replace(LAYER, layer_id=2))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", [("auto", ""), ("fp8_e4m3", "token"), ("fp4_e2m1", "block16")], ids="-".join)
def test_pages_are_copied_in_all_layers_of_their_group(kind, layout):
    pool = filled(*TWO, kind=kind, layout=layout)
    before = {i: contents(pool, i) for i in range(3)}
    pool.copy(0, [2, 5], [4, 1])
    order = torch.tensor([0, 5, 2, 3, 2, 5])
    for i in (0, 2):
        assert all(same(new, old[order]) for new, old in zip(contents(pool, i), before[i], strict=True))
    assert all(same(new, old) for new, old in zip(contents(pool, 1), before[1], strict=True)), "another group"


def test_copies_are_made_one_after_another():
    pool = filled(LAYER)
    before = pool.cache(0).key_cache.clone()
    pool.copy(0, [1, 2, 3, 5, 4], [2, 3, 5, 4, 4])
    assert same(pool.cache(0).key_cache, before[[0, 1, 1, 1, 1, 1]])
    pool.copy(0, [], [])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", [("auto", ""), ("int8", "token"), ("fp4_e2m1", "block16")], ids="-".join)
def test_tokens_are_moved_as_they_are_stored(kind, layout):
    """All are read before one is written: accepted drafts move to the front of where they were."""
    pool = filled(*TWO, kind=kind, layout=layout)
    before = {i: by_token(pool, i) for i in range(3)}
    sources, targets = [12, 14, 17, 0], [12, 13, 14, 0]
    pool.move(0, torch.tensor(sources), torch.tensor(targets))
    order = torch.arange(24)
    order[torch.tensor(targets)] = torch.tensor(sources)
    for i in (0, 2):
        assert all(same(new, old[order]) for new, old in zip(by_token(pool, i), before[i], strict=True))
    assert all(same(new, old) for new, old in zip(by_token(pool, 1), before[1], strict=True)), "another group"
    again = filled(LAYER)
    want = by_token(again, 0)[0][[0, 3, 1, *range(3, 24)]]
    again.move(0, [1, 3], [2, 1])
    assert same(by_token(again, 0)[0], want)


def test_latent_rows_are_copied_and_moved():
    pool = filled(MLA, kind=("fp8_e4m3", ""))
    before = by_token(pool, 0)[0]
    pool.move(0, [3], [9])
    pool.copy(0, [2], [5])
    order = list(range(24))
    order[9] = 3
    order[20:24] = order[8:12]
    assert same(by_token(pool, 0)[0], before[order])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([("auto", ""), ("fp8_e4m3", "token"), ("fp4_e2m1", "block16")]),
    st.sampled_from(["NHD", "HND"]),
    st.lists(
        st.tuples(
            st.sampled_from(["write", "move", "copy"]),
            st.lists(
                st.tuples(st.integers(0, 23), st.integers(4, 23)), min_size=1, max_size=4, unique_by=lambda p: p[1]
            ),
        ),
        max_size=6,
    ),
)
def test_any_order_of_writes_moves_and_copies(kind, layout, steps):
    """Beside a dictionary of slots, every number of which is exact in every dtype."""
    pool = pool_of(kind=kind, layout=layout)
    model = [0.0] * 24
    values = iter([6.0, -3.0, 1.5, 12.0, -0.75, 24.0, -6.0, 3.0] * 10)
    for what, pairs in steps:
        if what == "write":
            new = [next(values) for _ in pairs]
            blocks = torch.tensor(new)[:, None, None]
            rows = tuple(blocks.expand(-1, 2, width).clone() for width in LAYER.dims)
            pool.write(0, torch.tensor([slot for _, slot in pairs]), *rows)
            for (_, slot), value in zip(pairs, new, strict=True):
                model[slot] = value
        elif what == "move":
            pool.move(0, *map(list, zip(*pairs, strict=True)))
            for (_, slot), value in zip(pairs, [model[source] for source, _ in pairs], strict=True):
                model[slot] = value
        else:
            pages = [(source // 4, target // 4) for source, target in pairs]
            pool.copy(0, *map(list, zip(*pages, strict=True)))
            for source, target in pages:
                model[4 * target : 4 * target + 4] = model[4 * source : 4 * source + 4]
    for rows in pool.read(0, torch.arange(24), torch.float32):
        want = torch.tensor(model)[:, None, None].expand_as(rows)
        torch.testing.assert_close(rows, want, rtol=1e-5 if kind[1] == "token" else 0, atol=0)


def test_padding_tokens_write_to_page_0():
    pool = pool_of()
    pool.write(0, torch.tensor([5, 0, 0, 0]), *new_rows(4))
    key, _ = pool.read(0, torch.arange(24), torch.float32)
    assert key.flatten(1).any(1).nonzero().flatten().tolist() == [0, 5]
    pool.write(0, torch.zeros(0, dtype=torch.int64), *new_rows(0))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_pool_of_more_than_2_to_the_31_numbers(layout):
    """Memory is taken as it is touched: 2 GiB of FP8 keys of which a few pages are."""
    layer = AttentionLayer(0, 16, 16, 256, v_head_dim=1)
    pages = 2**31 // (64 * 16 * 256) + 8
    config = KVCacheConfig("fp8_e4m3", 64, layout)
    pool = KVPool((layer,), config, pages, dtype=torch.bfloat16)
    cache = pool.cache(0)
    assert cache.key_cache.numel() > 2**31
    assert cache.request_fields()["large"]
    last = pages * 64 - 1
    slots = torch.tensor([64, last - 1, last])
    key = torch.randint(-8, 9, (3, 16, 256)).bfloat16()
    pool.write(0, slots, key, key[..., :1])
    read = pool.read(0, slots, torch.bfloat16)
    assert torch.equal(read[0], key)
    assert torch.equal(read[1], key[..., :1])
    heads, places = (0, slice(-2, None)) if layout == "HND" else (slice(-2, None), 0)
    assert torch.equal(cache.key_cache[-1][heads, places].bfloat16(), key[1:, 0]), "where the layout says"
    pool.move(0, torch.tensor([last]), torch.tensor([last - 70]))
    pool.copy(0, [pages - 1], [pages - 3])
    got, _ = pool.read(0, torch.tensor([last - 70, last - 128, last - 129]), torch.bfloat16)
    assert torch.equal(got, key[[2, 2, 1]])
    assert pool.read(0, torch.tensor([2**31 // 4096, 128]), torch.float32)[0].eq(0).all()
    call = {
        "page_table": torch.tensor([[pages - 1]], dtype=torch.int32),
        "seq_lens": torch.tensor([64], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
        "max_seqlen_q": 1,
        "max_seqlen_k": 64,
        "k_scale": cache.k_scale,
        "v_scale": cache.v_scale,
        "window": (1, -1),
        "kv_layout": layout,
        "backend": "reference",
    }
    out = polyattn.paged_attention(torch.zeros(1, 16, 256).bfloat16(), *cache.tensors, **call)
    torch.testing.assert_close(out[0], key[1:, :, :1].mean(0))


class _NoSync(TorchDispatchMode):
    """Fails where the host would wait for a value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        assert not any(word in name for word in ("local_scalar", "nonzero", "item", "equal", "unique")), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_nothing_waits_for_the_device(kind, layout):
    pool = pool_of(kind=kind, layout=layout)
    slots, new = torch.tensor([4, 9]), new_rows(2)
    addresses = [t.data_ptr() for t in pool.cache(0).tensors]
    with _NoSync():
        pool.write(0, slots, *new)
        pool.move(0, slots, slots + 1)
        pool.read(0, slots, torch.bfloat16)
    assert addresses == [t.data_ptr() for t in pool.cache(0).tensors]


def test_a_cache_is_no_part_of_a_graph_of_gradients():
    pool = pool_of()
    pool.write(0, torch.tensor([4]), *(t.requires_grad_() for t in new_rows(1)))
    assert not any(t.requires_grad for t in pool.cache(0).tensors)


@pytest.mark.parametrize("kind", [("fp8_e4m3", "tensor"), ("fp8_e5m2", "head"), ("int8", "head")], ids="-".join)
def test_static_scales_are_set_once_and_in_place(kind):
    pool = pool_of(kind=kind)
    cache = pool.cache(0)
    n = 1 if kind[1] == "tensor" else 2
    assert torch.equal(cache.k_scale, torch.ones(n))
    pool.set_scales(0, torch.arange(1.0, n + 1), torch.full((n,), 0.5).double())
    assert (cache.k_scale.tolist(), cache.v_scale.tolist()) == ([1.0, 2.0][:n], [0.5] * n)
    with pytest.raises(InvalidInputError, match=r"layer 0 has rows .* or they were set before; set them once"):
        pool.set_scales(0, *torch.ones(2, n))
    written = pool_of(kind=kind)
    written.write(0, torch.tensor([4]), *new_rows(1))
    with pytest.raises(InvalidInputError, match=r"layer 0 has rows that were stored with the scales it has"):
        written.set_scales(0, *torch.ones(2, n))


@pytest.mark.parametrize(
    "kind, scale, message",
    [
        (("fp8_e4m3", "tensor"), torch.ones(2), r"layer 0: v is \[2\] torch.float32; .* by tensor .* one number"),
        (("fp8_e4m3", "head"), torch.ones(3), r"v is \[3\] torch.float32; with scales by head .* \[2\] \(H_kv\)"),
        (("fp8_e4m3", "head"), torch.ones(6, 4, 2), r"v is \[6, 4, 2\] torch.float32; with scales by head"),
        (("fp8_e4m3", "head"), 1.0, r"v is \[\] torch.float32; with scales by head"),
        (("fp8_e4m3", "tensor"), torch.ones(1, dtype=torch.int32), r"v is \[1\] torch.int32; .* a float tensor"),
        (("fp8_e4m3", "tensor"), "1", r"v is a str; give a number or a float tensor"),
        (("fp8_e4m3", "tensor"), True, r"v is a bool; give a number or a float tensor"),
        (("fp8_e4m3", "tensor"), 0.0, r"v has \[0.0\]; a scale is finite and above 0"),
        (("fp8_e4m3", "head"), torch.tensor([1.0, float("nan")]), r"v has \[1.0, nan\]; a scale is finite"),
        (("fp8_e4m3", "token"), 1.0, r"k: the scales of this cache in fp8_e4m3 are made as rows are written"),
        (("fp4_e2m1", ""), torch.ones(6, 4, 2, 3), r"k: the scales of this cache in fp4_e2m1 are made as rows are"),
        (("auto", ""), 1.0, r"k: the scales of this cache in float32 are none; static ones go with fp8 or int8"),
    ],
)
def test_wrong_scales_are_refused_and_none_is_set(kind, scale, message):
    pool = pool_of(kind=kind)
    good = torch.full((2,), 3.0) if kind[1] == "head" else 3.0
    with pytest.raises(InvalidInputError, match=message):
        pool.set_scales(0, good, scale)
    cache = pool.cache(0)
    assert cache.k_scale is None or cache.dynamic or cache.k_scale.eq(1).all()


def test_latent_rows_have_no_scales_to_set():
    with pytest.raises(InvalidInputError, match=r"layer 0 is latent: its rows hold their own scales"):
        pool_of(MLA).set_scales(0, 1.0, 1.0)


def fresh():
    return filled(*TWO)


TOKEN = torch.tensor([4])
ROW = torch.ones(1, 2, 48), torch.ones(1, 2, 32)
WRONG = [
    (lambda: groups_of(()), r"at least one layer; got none"),
    (lambda: groups_of((LAYER, LAYER)), r"two layers have layer_id 0; number the layers"),
    (lambda: pool_of(*TWO, pages=(4,)), r"pages has 1 numbers, the layers make 2 groups \(full, window 5\)"),
    (lambda: pool_of(HYBRID[5], pages=(4, 4)), r"the layers make 1 groups \(cross\)"),
    (lambda: pool_of(pages=0), r"pages=0; a group has a whole number of them, at least the padding page"),
    (lambda: pool_of(*TWO, pages=(4, 2.5)), r"pages=2.5; a group has a whole number of them"),
    (lambda: pool_of(pages=2.5), r"pages=2.5; a group has a whole number of them"),
    (lambda: pool_of(dtype=torch.int32), r"torch.int32 is no dtype of attention"),
    (lambda: fresh().cache(7), r"the pool has no layer 7; it was made for 0, 1, 2"),
    (lambda: fresh().group_of(7), r"no layer 7"),
    (lambda: fresh().bytes_per_token(2), r"group 2 of 2 \(full, window 5\); 0 is the first"),
    (lambda: fresh().bytes_per_token(-1), r"group -1 of 2"),
    (lambda: fresh().write(0, TOKEN.int(), *ROW), r"slots is \[1\] torch.int32 on cpu; int64 \[T\] on cpu is needed"),
    (lambda: fresh().write(0, [4], *ROW), r"slots is a list; int64 \[T\] on cpu is needed: page \* page_size \+ place"),
    (lambda: fresh().write(0, TOKEN, ROW[0]), r"layer 0: value is None; .* \[T, H_kv, D\] = \[1, 2, 32\]"),
    (lambda: fresh().write(0, TOKEN, *ROW[::-1]), r"layer 0: key is \[1, 2, 32\] torch.float32 .* \[1, 2, 48\] on cpu"),
    (lambda: fresh().write(0, TOKEN, ROW[0].int(), ROW[1]), r"key is \[1, 2, 48\] torch.int32 on cpu; a float tensor"),
    (lambda: fresh().write(0, torch.tensor([4, 5]), *ROW), r"= \[2, 2, 48\] on cpu is needed"),
    (lambda: pool_of(MLA).write(0, TOKEN, torch.ones(1, 576), ROW[1]), r"layer 0 is latent: .* pass rows only"),
    (lambda: pool_of(MLA).write(0, TOKEN, torch.ones(1, 512)), r"layer 0: rows is .* \[T, D_c \+ D_r\] = \[1, 576\]"),
    (lambda: pool_of(MLA).write(0, TOKEN, torch.ones(576)), r"layer 0: rows is \[576\] torch.float32"),
    (lambda: fresh().read(0, TOKEN[None], torch.float32), r"slots is \[1, 1\] torch.int64 on cpu; int64 \[T\]"),
    (lambda: fresh().copy(2, [1], [2]), r"group 2 of 2"),
    (lambda: fresh().copy(0, [1], []), r"1 sources for 0 targets; give as many of both"),
    (lambda: fresh().copy(0, [6], [2]), r"sources has page 6; group 0 has 6 pages, 0 to 5 are allowed"),
    (lambda: fresh().copy(0, [1], [0]), r"targets has page 0; group 0 has 6 pages, 1 to 5 are allowed"),
    (lambda: fresh().move(0, [1, 2], [3]), r"2 sources for 1 targets; give as many of both"),
    (lambda: fresh().move(0, TOKEN.int(), TOKEN), r"sources is \[1\] torch.int32 on cpu; int64 \[T\]"),
    (lambda: fresh().move(5, [1], [2]), r"group 5 of 2"),
    (lambda: fresh().set_scales(9, 1.0, 1.0), r"no layer 9"),
]


@pytest.mark.parametrize("call, message", WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_what_a_pool_refuses(call, message):
    with pytest.raises(InvalidInputError, match=message):
        call()


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_a_pool_is_as_large_as_its_memory_allows(kind):
    config = KVCacheConfig(kind[0], 16, scales=kind[1])
    for nbytes in (200_000, 1_000_001):
        pages = pages_for(nbytes, TWO, config, torch.bfloat16)
        sizes = [KVPool(TWO, config, n, dtype=torch.bfloat16).nbytes for n in (pages, pages + 1)]
        assert sizes[0] <= nbytes < sizes[1]


def test_too_little_memory_for_a_pool():
    with pytest.raises(
        ConfigError, match=r"1000 bytes do not hold a KV cache: a page of 16 tokens takes \d+ bytes in 3"
    ):
        pages_for(1000, TWO, KVCacheConfig(), torch.bfloat16)
