"""`polyattn.serving.kv_cache.storage`: what a cache may be, how large it is, and which scales it has."""

from __future__ import annotations

import pytest
import torch

from polyattn.errors import ConfigError
from polyattn.semantics.kv_quant import real, stored
from polyattn.serving.kv_cache.pool import KVPool
from polyattn.serving.kv_cache.storage import KVCacheConfig, RowFormat, formats, token_scales
from polyattn.serving.layer import AttentionLayer

LLAMA = AttentionLayer(0, 32, 8, 128)
WIDE = AttentionLayer(1, 32, 8, 192, v_head_dim=128)
MLA = AttentionLayer(2, 16, 1, 576, v_head_dim=512, scale=192**-0.5, latent=True)
NARROW = AttentionLayer(5, 4, 1, 48, v_head_dim=32, scale=0.2, latent=True)


def token_bytes(layer: AttentionLayer, dtype: str, scales: str = "") -> int:
    return sum(f.token_bytes for f in formats(layer, KVCacheConfig(dtype, scales=scales), torch.bfloat16))


@pytest.mark.parametrize("layer", [LLAMA, WIDE], ids=["one width", "two widths"])
def test_bytes_of_a_token(layer):
    plain = token_bytes(layer, "auto")
    assert plain == layer.kv_heads * sum(layer.dims) * 2
    assert token_bytes(layer, "bf16") == token_bytes(layer, "fp16") == plain
    for dtype in ("fp8_e4m3", "fp8_e5m2", "int8"):
        assert 2 * token_bytes(layer, dtype, "tensor") == 2 * token_bytes(layer, dtype, "head") == plain
        assert token_bytes(layer, dtype, "token") == plain // 2 + layer.kv_heads * 2 * 4
        usual = "token" if dtype == "int8" else "tensor"
        assert token_bytes(layer, dtype) == token_bytes(layer, dtype, usual)
    assert token_bytes(layer, "fp4_e2m1") / plain == 0.28125, "half a byte each, and a scale byte for each 16"


def test_bytes_of_a_latent_row():
    assert token_bytes(MLA, "auto") == 1152
    assert token_bytes(MLA, "fp8_e4m3") == 656
    assert token_bytes(MLA, "fp8_e4m3", "tensor") == token_bytes(MLA, "fp8_e5m2") == 576
    assert token_bytes(MLA, "fp4_e2m1") == 288 + 36
    assert token_bytes(NARROW, "fp8_e4m3") == 48


def test_latent_rows_beside_others_have_their_own_scales():
    config = KVCacheConfig("fp8_e4m3", scales="head")
    with pytest.raises(ConfigError, match=r"layer 2: no format of fp8_e4m3 with scales by head holds latent"):
        formats(MLA, config, torch.bfloat16)
    assert [f.scales for f in formats(LLAMA, config, torch.bfloat16)] == ["head", "head"]
    for scales in ("", "block128"):
        (rows,) = formats(MLA, KVCacheConfig("fp8_e4m3", scales=scales), torch.bfloat16)
        assert (rows.scales, rows.dtype, rows.stored_width) == ("block128", torch.uint8, 656)


@pytest.mark.parametrize(
    ("dtype", "scales", "kept"),
    [
        *((f"fp8_{kind}", scales, "itself") for kind in ("e4m3", "e5m2") for scales in ("tensor", "head", "token")),
        ("fp4_e2m1", "block16", "its block"),
        *(("int8", scales, "nothing") for scales in ("tensor", "head", "token")),
    ],
)
def test_nan_is_kept_by_every_format_but_int8(dtype, scales, kept):
    """docs/semantics.md says so: int8 has no code for it."""
    layer, slots = AttentionLayer(0, 2, 2, 32), torch.arange(4, 7)
    pool = KVPool([layer], KVCacheConfig(dtype, 4, scales=scales), 2, dtype=torch.float32, device="cpu")
    rows = torch.ones(3, 2, 32)
    rows[1, 0, 20] = float("nan")
    pool.write(0, slots, rows, rows)
    wanted = torch.zeros(3, 2, 32, dtype=torch.bool)
    wanted[1, 0, {"itself": slice(20, 21), "its block": slice(16, 32), "nothing": slice(0)}[kept]] = True
    for found in pool.read(0, slots, torch.float32):
        assert torch.equal(found.isnan(), wanted)
        assert not found.isinf().any()


def test_words_of_the_command_line_are_those_of_requests():
    assert KVCacheConfig("bf16") == KVCacheConfig("bfloat16")
    (keys, values) = formats(LLAMA, KVCacheConfig(), torch.float32)
    assert keys == values == RowFormat("float32", "", 8, 128)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"dtype": "fp8_e4m4"}, r"dtype='fp8_e4m4' is not one of auto, bf16.*Did you mean 'fp8_e4m3'"),
        ({"page_size": 0}, r"page_size=0 is not a whole number of tokens >= 1, such as 16"),
        ({"page_size": True}, r"page_size=True is not a whole number"),
        (
            {"layout": "HDN"},
            r"layout='HDN' is not one that pools have; allowed: NHD, HND\. Did you mean .*\? `neg",
        ),
        ({"layout": "hnd"}, r"layout='hnd' is not one that pools have.*allowed: NHD, HND"),
        ({"layout": "NZ"}, r"layout='NZ' .*its fractal blocks are made by the device's own cache-writing kernel"),
        ({"layout": "vectorised"}, r"layout='vectorised' .*16-byte groups .* the vendor's own cache-writing kernel"),
        ({"scales": "tokens"}, r"scales='tokens' is no granularity.*Did you mean 'token'"),
    ],
)
def test_what_no_cache_has_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        KVCacheConfig(**given)


@pytest.mark.parametrize(
    "layer, given, message",
    [
        (LLAMA, {"scales": "head"}, r"layer 0: a cache in bfloat16 has no scales by head; allowed: none"),
        (
            LLAMA,
            {"dtype": "fp8_e4m3", "scales": "block16"},
            r"fp8_e4m3 has no .* block16; allowed: tensor, head, token",
        ),
        (LLAMA, {"dtype": "fp4_e2m1", "scales": "tensor"}, r"fp4_e2m1 has no .* tensor; allowed: block16"),
        (
            AttentionLayer(3, 4, 4, 72),
            {"dtype": "fp4_e2m1"},
            r"layer 3: head dim 72 is no multiple of 16.*keep the cache in fp8_e4m3",
        ),
        (
            MLA,
            {"dtype": "int8"},
            r"layer 2: no format of latent rows in int8 is defined; take one of fp8_e4m3, fp8_e5m2",
        ),
        (
            MLA,
            {"dtype": "fp4_e2m1", "scales": "tensor"},
            r"those of fp4_e2m1: block16, widths that are multiples of 16",
        ),
        (MLA, {"dtype": "bf16", "scales": "tensor"}, r"layer 2: latent rows in bfloat16 have no scales"),
        (
            AttentionLayer(4, 4, 1, 40, v_head_dim=32, scale=0.2, latent=True),
            {"dtype": "fp8_e4m3", "scales": "block128"},
            r"= \(40, 32\); those of fp8_e4m3: block128, \(576, 512\) only; tensor \(one scale of 1\), any width",
        ),
        (
            AttentionLayer(4, 4, 1, 40, v_head_dim=32, scale=0.2, latent=True),
            {"dtype": "fp4_e2m1"},
            r"no format of fp4_e2m1 holds latent rows .* = \(40, 32\); .* of 16\. Keep this model's cache in its own",
        ),
    ],
)
def test_what_a_layer_cannot_have_is_refused(layer, given, message):
    with pytest.raises(ConfigError, match=message):
        formats(layer, KVCacheConfig(**given), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_scales_of_tokens_use_the_whole_range(dtype):
    torch.manual_seed(0)
    rows = torch.randn(5, 3, 64) * torch.logspace(-15, 15, 15).view(5, 3, 1)
    rows[2, 1] = 0
    scale = token_scales(rows, dtype)
    assert scale.shape == (5, 3)
    assert scale[2, 1] == 1
    largest = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    numbers = stored(rows, scale.unsqueeze(-1), dtype)
    assert numbers.float().abs().amax(-1).where(rows.any(-1), largest).eq(largest).all()
    back = real(numbers, scale.unsqueeze(-1), torch.float32)
    error = (back - rows).norm(dim=-1) / rows.norm(dim=-1).clamp(min=1e-30)
    assert error.max() < 0.07
