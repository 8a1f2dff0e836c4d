"""`write_kv` and `write_latent` store, bit for bit, what core's torch code stores."""

from __future__ import annotations

import itertools

import pytest
import torch

from polyattn.contract import AttentionRequest, PagedTables
from polyattn.errors import InvalidInputError, UnsupportedRequestError
from polyattn.semantics.kv_quant import LATENT_FORMATS, fp4_scales, mla_unpack, stored
from polyattn.semantics.paged_kv import Pool, Tokens
from polyattn.serving.kv_cache.pool import KVPool
from polyattn.serving.kv_cache.storage import KVCacheConfig
from polyattn.serving.layer import AttentionLayer
from polyattn_triton import runtime
from polyattn_triton.kernels.write import write_kv, write_latent

DEVICE = "cpu" if runtime.INTERPRETED else "cuda"
QUERY_LENS, SEQ_LENS = [3, 1, 0, 6, 1, 2], [9, 1, 5, 6, 0, 12]
"""A row without queries, and a row of padding: a query and no keys."""


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert torch.equal(bits(a), bits(b))


def rows(T, H, D, dtype=torch.bfloat16, seed=0):
    """Numbers over many binades, with zeros of both signs, ties, a row of zeros and numbers past every range."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, H, D, generator=generator) * 2.0 ** torch.randint(-12, 5, (T, H, D), generator=generator)
    flat = x.view(-1)
    ties = torch.tensor([0.0, -0.0, 0.25, -0.75, 1.25, 2.5, -3.5, 5.0, 6.0, 1e6, -3e4, 448, 464, 2.5 / 2**9])
    flat[: len(ties)] = ties
    x[-1, -1] = 0
    return x.to(DEVICE, dtype)


class Call:
    def __init__(self, page_size, seq_lens=None, query_lens=None):
        self.seq_lens = torch.tensor(seq_lens or SEQ_LENS, dtype=torch.int32, device=DEVICE)
        lens = query_lens or QUERY_LENS
        self.cu = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=DEVICE)
        self.T, N = sum(lens), len(lens)
        columns = -(-int(self.seq_lens.max()) // page_size)
        self.pages = N * columns + 2
        order = torch.randperm(self.pages - 1, generator=torch.Generator().manual_seed(1)) + 1
        wide = torch.zeros(N, columns + 2, dtype=torch.int32, device=DEVICE)
        self.page_table = wide[:, :columns]
        self.page_table.copy_(order[: N * columns].view(N, columns))
        self.page_size, self.longest = page_size, max(lens)

    @property
    def keywords(self):
        return {"tables": self.tables, "page_size": self.page_size}

    @property
    def tables(self):
        return PagedTables(self.page_table, self.seq_lens, self.cu, self.longest, int(self.seq_lens.max()))

    def tokens(self):
        return Tokens.of(torch.empty(self.T, device=DEVICE), self.tables)

    def slots(self):
        at = self.tokens().slots(self.page_table, self.page_size)
        return at.page * self.page_size + at.place

    def cache(self, hnd, H, width, dtype):
        """A view with strides of its own, full of something."""
        inner = (H, self.page_size) if hnd else (self.page_size, H)
        whole = torch.full((self.pages, 2, *inner, width), 3, dtype=torch.uint8).repeat_interleave(dtype.itemsize, -1)
        return whole.to(DEVICE).view(dtype)[:, 1]


def request(hnd, kv_dtype, kv_scales, page_size):
    return AttentionRequest(
        family="paged", kv_layout="HND" if hnd else "NHD", kv_dtype=kv_dtype, kv_scales=kv_scales, page_size=page_size
    )


TORCH = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8, "fp4_e2m1": torch.uint8}
KINDS = [(dtype, scales) for dtype in ("fp8_e4m3", "fp8_e5m2", "int8") for scales in ("", "tensor", "head", "token")]
KINDS.append(("fp4_e2m1", "block16"))


def given_scales(call, hnd, scales, H, width, dtype=torch.float32):
    inner = (H, call.page_size) if hnd else (call.page_size, H)
    shape = {"tensor": (1,), "head": (H,), "token": (call.pages, *inner)}.get(scales, (call.pages, *inner, width // 16))
    return (torch.rand(shape, generator=torch.Generator().manual_seed(2)) * 2 + 0.01).to(DEVICE, dtype)


@pytest.mark.parametrize("hnd", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_numbers_as_they_are(hnd, page_size, dtype):
    call, H, D, D_v = Call(page_size), 2, 80, 24
    fused = rows(call.T, 2 * H, D, dtype)
    key, value = fused[:, H:], rows(call.T, H, D_v, dtype, seed=1)
    caches = [call.cache(hnd, H, width, dtype) for width in (D, D_v)]
    wanted = [cache.clone() for cache in caches]
    slots = call.tokens().slots(call.page_table, page_size)
    for cache, new in zip(wanted, (key, value), strict=True):
        Pool(request(hnd, "auto", "", page_size), cache).write(slots, new)
    write_kv(key, value, *caches, **call.keywords, hnd=hnd)
    for a, b in zip(caches, wanted, strict=True):
        same(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_rows_in_a_narrower_cache(dtype):
    call, H, D = Call(4), 1, 16
    key, cache = rows(call.T, H, D, torch.float32).clamp(-6e4, 6e4), call.cache(False, H, D, dtype)
    wanted = cache.clone()
    Pool(request(False, "auto", "", 4), wanted).write(call.tokens().slots(call.page_table, 4), key)
    write_kv(key, None, cache, None, **call.keywords, kv_dtype="float16")
    same(cache, wanted)


@pytest.mark.parametrize("hnd", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype, scales", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantised_by_the_scales_that_are_there(hnd, kv_dtype, scales, dtype):
    call, H, D, D_v, P = Call(3), 2, 48, 32, 3
    new = rows(call.T, H, D, dtype), rows(call.T, H, D_v, dtype, seed=1)
    stored_widths = [w // 2 if kv_dtype == "fp4_e2m1" else w for w in (D, D_v)]
    caches = [call.cache(hnd, H, width, TORCH[kv_dtype]) for width in stored_widths]
    by = [given_scales(call, hnd, scales, H, w) if scales else None for w in (D, D_v)]
    wanted = [cache.clone() for cache in caches]
    slots = call.tokens().slots(call.page_table, P)
    for cache, values, scale in zip(wanted, new, by, strict=True):
        Pool(request(hnd, kv_dtype, scales, P), cache, scale).write(slots, values)
    write_kv(*new, *caches, **call.keywords, hnd=hnd, kv_dtype=kv_dtype, kv_scales=scales, k_scale=by[0], v_scale=by[1])
    for a, b in zip(caches, wanted, strict=True):
        same(a, b)


def test_fp4_by_given_scales_in_e4m3():
    call, H, D = Call(4), 2, 32
    key, cache = rows(call.T, H, D), call.cache(False, H, D // 2, torch.uint8)
    scale = given_scales(call, False, "block16", H, D, torch.float8_e4m3fn)
    wanted = cache.clone()
    Pool(request(False, "fp4_e2m1", "block16", 4), wanted, scale).write(call.tokens().slots(call.page_table, 4), key)
    write_kv(key, None, cache, None, **call.keywords, kv_dtype="fp4_e2m1", kv_scales="block16", k_scale=scale)
    same(cache, wanted)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    "kv_dtype, scales",
    [("fp8_e4m3", "token"), ("fp8_e5m2", "token"), ("int8", "token"), ("fp4_e2m1", "block16"), ("fp8_e4m3", "head")],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_as_a_pool_writes_with_scales_made_on_the_way(layout, kv_dtype, scales, dtype):
    call, H, D, D_v = Call(4), 2, 48, 32
    layer, config = AttentionLayer(0, 4, H, D, v_head_dim=D_v), KVCacheConfig(kv_dtype, 4, layout, scales)
    pools = [KVPool([layer], config, call.pages, dtype=dtype, device=DEVICE) for _ in range(3)]
    key, value = rows(call.T, H, D, dtype), rows(call.T, H, D_v, dtype, seed=1)
    # The row of padding is written to the padding page: by core as the last token of page 0.
    slots = call.slots()
    pools[0].write(0, slots, key, value)
    pools[1].make_scales(0, slots, key, value)
    options = {"page_size": 4, "hnd": layout == "HND", "kv_dtype": kv_dtype, "kv_scales": scales}
    ours, theirs = pools[2].cache(0), pools[0].cache(0)
    keywords = {**options, "slots": slots, "make_scales": scales != "head", "k_scale": ours.k_scale,
                "v_scale": ours.v_scale}  # fmt: skip
    if scales != "head":
        write_kv(key, value, *ours.tensors, **keywords, rows=False)
        same(ours.k_scale, pools[1].cache(0).k_scale)
        assert not bits(ours.key_cache).any()
    write_kv(key, value, *ours.tensors, **keywords)
    for name in ("key_cache", "value_cache", "k_scale", "v_scale"):
        same(getattr(ours, name), getattr(theirs, name))


LATENT = [("auto", ""), *((one.kv_dtype, one.kv_scales or "tensor") for one in LATENT_FORMATS)]
"""Of a cache of latent rows, and how its configuration is said."""


@pytest.mark.parametrize(("kv_dtype", "scales"), LATENT)
@pytest.mark.parametrize("by", ["tables", "slots"])
def test_latent_rows(kv_dtype, scales, by):
    call, D = Call(4), 576
    layer = AttentionLayer(0, 16, 1, D, v_head_dim=512, scale=1.0, latent=True)
    config = KVCacheConfig(kv_dtype, 4, scales=scales)
    pools = [KVPool([layer], config, call.pages, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    new = rows(call.T, 1, D).squeeze(1)
    new[0, :128] = 0
    slots = call.slots()
    if by == "tables":
        real = call.tokens().real
        pools[0].write(0, slots[real], new[real])
        write_latent(new, pools[1].cache(0).cache, **call.keywords)
    else:
        pools[0].write(0, slots, new)
        write_latent(new, pools[1].cache(0).cache, slots=slots, page_size=4)
    same(pools[1].cache(0).cache, pools[0].cache(0).cache)


@pytest.mark.parametrize(("kv_dtype", "scales"), LATENT)
def test_a_latent_row_that_is_no_number_is_read_as_none(kv_dtype, scales):
    layer = AttentionLayer(0, 16, 1, 576, v_head_dim=512, scale=1.0, latent=True)
    config = KVCacheConfig(kv_dtype, 4, scales=scales)
    pools = [KVPool([layer], config, 2, dtype=torch.float32, device=DEVICE) for _ in range(2)]
    new, slots = rows(3, 1, 576, torch.float32).squeeze(1), torch.arange(4, 7, device=DEVICE)
    new[1, 5] = torch.nan
    pools[0].write(0, slots, new)
    write_latent(new, pools[1].cache(0).cache, slots=slots, page_size=4)
    found, wanted = (mla_unpack(pool.cache(0).cache)[1, :3] for pool in (pools[1], pools[0]))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert found.isnan().any(-1).tolist() == [False, True, False]


def test_one_query_each():
    call = Call(4, seq_lens=[5, 0, 9], query_lens=[1, 1, 1])
    key, cache = rows(3, 2, 32), call.cache(False, 2, 32, torch.bfloat16)
    wanted = cache.clone()
    Pool(request(False, "auto", "", 4), wanted).write(call.tokens().slots(call.page_table, 4), key)
    write_kv(key, None, cache, None, **call.keywords)
    same(cache, wanted)


@pytest.mark.parametrize("N", [1, 2, 3, 7, 8, 33])
def test_every_token_finds_its_sequence(N):
    generator = torch.Generator().manual_seed(N)
    lens = torch.randint(0, 4, (N,), generator=generator).tolist()
    lens[-1] += 1
    call = Call(2, [n + 3 for n in lens], lens)
    key, cache = rows(call.T, 1, 16), call.cache(False, 1, 16, torch.bfloat16)
    wanted = cache.clone()
    Pool(request(False, "auto", "", 2), wanted).write(call.tokens().slots(call.page_table, 2), key)
    write_kv(key, None, cache, None, **call.keywords)
    same(cache, wanted)


# ------------------------------------------------------------------------------------------------------------ rotation


def rotated(x, position, cos, sin, interleaved, start=0):
    R = 2 * cos.shape[1]
    part = x[..., start : start + R].float()
    c, s = cos[position].float()[:, None], sin[position].float()[:, None]
    if interleaved:
        a, b = part[..., ::2], part[..., 1::2]
        turned = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    else:
        a, b = part.chunk(2, -1)
        turned = torch.cat([a * c - b * s, b * c + a * s], -1)
    out = x.clone()
    out[..., start : start + R] = turned.to(x.dtype)
    return out


def table(positions, R):
    angle = torch.arange(positions)[:, None] / 100 ** (torch.arange(R // 2) / (R // 2))
    return angle.cos().to(DEVICE), angle.sin().to(DEVICE)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("R", [48, 16])
@pytest.mark.parametrize("kv_dtype, scales", [("auto", ""), ("fp8_e4m3", "token"), ("fp4_e2m1", "block16")])
def test_rotated_keys_and_queries(interleaved, R, kv_dtype, scales):
    call, H, H_q, D = Call(4), 2, 6, 48
    layer = AttentionLayer(0, H_q, H, D)
    pools = [
        KVPool([layer], KVCacheConfig(kv_dtype, 4), call.pages, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)
    ]
    if scales == "token":
        pools = [
            KVPool([layer], KVCacheConfig(kv_dtype, 4, scales=scales), call.pages, dtype=torch.bfloat16, device=DEVICE)
            for _ in range(2)
        ]
    key, value, query = rows(call.T, H, D), rows(call.T, H, D, seed=1), rows(call.T, H_q, D, seed=2)
    tokens, (cos, sin) = call.tokens(), table(32, R)
    slots, real, out = call.slots(), call.tokens().real, torch.empty_like(query)
    turned = rotated(key, tokens.position, cos, sin, interleaved)
    pools[0].write(0, slots[real], turned[real], value[real])
    ours, theirs = pools[1].cache(0), pools[0].cache(0)
    write_kv(
        key, value, *ours.tensors, **call.keywords, kv_dtype=kv_dtype, kv_scales=scales, k_scale=ours.k_scale,
        v_scale=ours.v_scale, make_scales=scales != "", cos=cos, sin=sin, interleaved=interleaved, query=query,
        query_out=out,
    )  # fmt: skip
    same(ours.key_cache, theirs.key_cache)
    same(ours.value_cache, theirs.value_cache)
    same(out, rotated(query, tokens.position, cos, sin, interleaved))


@pytest.mark.parametrize(("kv_dtype", "scales"), LATENT)
def test_rotated_latent_rows_at_positions_of_their_own(kv_dtype, scales):
    call, D = Call(4), 576
    layer = AttentionLayer(0, 16, 1, D, v_head_dim=512, scale=1.0, latent=True)
    config = KVCacheConfig(kv_dtype, 4, scales=scales)
    pools = [KVPool([layer], config, call.pages, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    new, slots, (cos, sin) = rows(call.T, 1, D).squeeze(1), call.slots(), table(64, 64)
    positions = torch.arange(call.T, device=DEVICE) * 3
    turned = rotated(new.unsqueeze(1), positions, cos, sin, True, 512).squeeze(1)
    pools[0].write(0, slots, turned)
    write_latent(
        new, pools[1].cache(0).cache, slots=slots, page_size=4, cos=cos, sin=sin, interleaved=True, positions=positions
    )
    same(pools[1].cache(0).cache, pools[0].cache(0).cache)


# ------------------------------------------------------------------------------------------------------------- limits


def test_nothing_to_write():
    cache = torch.zeros(0, 4, 1, 16, device=DEVICE)
    call = Call(4)
    key = rows(call.T, 1, 16, torch.float32)
    write_kv(key, None, cache, None, **call.keywords)
    write_kv(key[:0], None, cache, None, slots=torch.zeros(0, device=DEVICE).long(), page_size=4)


@pytest.mark.parametrize(
    "given, error, message",
    [
        (
            {"kv_dtype": "fp6"},
            UnsupportedRequestError,
            r"kv_dtype='fp6' says nothing of a cache in torch.uint8; say auto",
        ),
        ({"kv_dtype": "fp8_e4m3", "key": torch.zeros(1, 1, 16).double()}, UnsupportedRequestError, "float64 .* fp8"),
        ({"make_scales": True}, InvalidInputError, r"make_scales with kv_scales=''; token and block16 are made"),
        ({"value": torch.zeros(1, 1, 16)}, InvalidInputError, "values go with a value_cache"),
        ({"kv_scales": "tensor"}, InvalidInputError, "kv_scales with k_scale and v_scale"),
        ({"kv_dtype": "fp4_e2m1"}, InvalidInputError, r"scales by block16 and head dims .* got '', 16"),
        ({"slots": None}, InvalidInputError, "is said by slots, or by tables"),
        ({"cos": torch.zeros(4, 8), "sin": torch.zeros(4, 8)}, InvalidInputError, "need positions where slots are"),
        ({"query": torch.zeros(1, 1, 16)}, InvalidInputError, "query is rotated into query_out, by cos and sin"),
    ],
)
def test_what_does_not_fit_is_refused(given, error, message):
    cache = torch.zeros(2, 4, 1, 16, dtype=torch.uint8 if "kv_dtype" in given else torch.float32)
    key, value = given.pop("key", torch.zeros(1, 1, 16)), given.pop("value", None)
    options = {"slots": torch.zeros(1, device=DEVICE).long(), "page_size": 4, **given}
    with pytest.raises(error, match=message):
        write_kv(key.to(DEVICE), value, cache, None, **options)


@pytest.mark.parametrize(
    "D, dtype, given, error, message",
    [
        (
            320,
            torch.float32,
            {},
            InvalidInputError,
            "FP8 rows hold 576 numbers in 656 bytes, FP4 rows a multiple of 16 .* got 320 for 656",
        ),
        (576, torch.float64, {}, UnsupportedRequestError, "rows in float64 are not stored as fp8_e4m3"),
        (
            576,
            torch.float32,
            {"cos": torch.zeros(4, 16), "sin": torch.zeros(4, 16), "positions": torch.zeros(1).long()},
            InvalidInputError,
            "FP8 rows rotate 64 numbers, cos has 32",
        ),
    ],
)
def test_latent_rows_that_are_none(D, dtype, given, error, message):
    cache = torch.zeros(2, 4, 656, dtype=torch.uint8)
    with pytest.raises(error, match=message):
        write_latent(
            torch.zeros(1, D, dtype=dtype, device=DEVICE), cache, slots=torch.zeros(1).long(), page_size=4, **given
        )


def test_scales_are_those_of_core():
    """A negative control of these tests: another scale is another byte."""
    x = rows(4, 1, 16)
    wrong = fp4_scales(x).float() * 1.125
    assert not torch.equal(stored(x, fp4_scales(x), torch.uint8), stored(x, wrong, torch.uint8))
