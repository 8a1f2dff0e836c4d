"""`dequantised` copies the pages that a step reads bit for bit as core's operators do, and it touches nothing else."""

from __future__ import annotations

import pytest
import torch

import polyattn
from polyattn.contract import AttentionRequest, PagedTables
from polyattn.lowering import dequantise_kv
from polyattn.registry.device_ops import device_ops
from polyattn.semantics.kv_quant import LATENT_FORMATS, fp4_scales, mla_pack, stored
from polyattn.semantics.paged_kv import Pool, owned
from polyattn.testing.poison import poisoned
from polyattn_triton import runtime
from polyattn_triton.device_ops import DeviceOps
from polyattn_triton.kernels import dequantise
from polyattn_triton.kernels.dequantise import dequantised

DEVICE = torch.device("cpu" if runtime.INTERPRETED else "cuda")
NONSENSE = 10**6
LENGTHS = ([9], [5, 12], [0, 7, 3], [1, 0, 16, 11], [6, 13, 0, 8, 2])
"""Odd ones, rows of padding and pages that are full, of one to five sequences."""
TORCH = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8, "fp4_e2m1": torch.uint8}
SCALED = [(kind, scales) for kind in ("fp8_e4m3", "fp8_e5m2", "int8") for scales in ("", "tensor", "head", "token")]
FORMATS = [(one.kv_dtype, one.kv_scales) for one in LATENT_FORMATS]


def draw(*shape, most=256):
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.uint8)


def tables(lengths, page_size):
    """A table with nonsense behind what sequences own, which has columns that nobody uses."""
    columns = -(-max(lengths) // page_size)
    table = torch.full((len(lengths), columns + 2), NONSENSE, dtype=torch.int32)
    free = torch.randperm(len(lengths) * columns, generator=torch.Generator().manual_seed(1)).to(torch.int32) + 1
    for row, length in enumerate(lengths):
        count = -(-length // page_size)
        table[row, :count] = free[row * columns : row * columns + count]
    lens = torch.tensor(lengths, dtype=torch.int32)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    return PagedTables(table.to(DEVICE), lens.to(DEVICE), starts.to(DEVICE), 1, max(lengths)), len(free) + 1


def keys(pages, page_size, hnd, heads, width, kind, scales):
    """(a cache whose bytes are all that there are, a view with strides of its own; its scales)."""
    inner = (heads, page_size) if hnd else (page_size, heads)
    scale = {"tensor": (1,), "head": (heads,), "token": (pages, *inner), "block16": (pages, *inner, width // 16)}
    by = torch.rand(scale[scales], generator=torch.Generator().manual_seed(2)) * 3 if scales else None
    entries = width // 2 if kind == "fp4_e2m1" else width
    if kind == "auto":
        return torch.randn(pages, 2, *inner, width)[:, 1].to(DEVICE), None if by is None else by.to(DEVICE)
    cache = draw(pages, 2, *inner, entries).to(DEVICE).view(TORCH[kind])[:, 1]
    return cache, None if by is None else by.to(DEVICE)


def asked(dtype, kind, scales, page_size, hnd=False, **fields):
    layout = "HND" if hnd else "NHD"
    said = {"kv_dtype": kind, "kv_scales": scales, "page_size": page_size, "kv_layout": layout}
    return AttentionRequest(**{"family": "paged", "dtype": str(dtype)[6:], **said, **fields})


def check(request, cache, scale, tables, hnd=False):
    """The op over a step, beside core's operators."""
    size, dtype = request.page_size, getattr(torch, request.dtype)
    pages = owned(tables, size)
    wanted = Pool(request, cache, scale).pages(pages.flatten(), dtype)
    with poisoned(DEVICE):
        found = dequantised(request, cache, scale, tables.page_table[:, : pages.shape[1]], tables.seq_lens)
    assert (found.dtype, found.shape) == (dtype, wanted.shape)
    # By sequence, then tokens in their order.
    found, wanted = (x.unflatten(0, pages.shape) for x in (found, wanted))
    found, wanted = (x.transpose(2, 3) if hnd else x for x in (found, wanted))
    found, wanted = (x.flatten(1, 2) for x in (found, wanted))
    real = torch.arange(found.shape[1], device=DEVICE) < tables.seq_lens[:, None]
    assert real.sum() == tables.seq_lens.sum()
    assert found[~real].isnan().all(), "what lies behind the last token is written"
    found, wanted = found[real], wanted[real]
    assert torch.equal(found.isnan(), wanted.isnan())
    as_bits = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    some = ~wanted.isnan()
    assert torch.equal(found[some].view(as_bits), wanted[some].view(as_bits))
    return found


@pytest.mark.slow(keep=9)
@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
@pytest.mark.parametrize("hnd", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("kind, scales", [*SCALED, ("fp4_e2m1", "block16")], ids=lambda word: word or "plain")
def test_keys(kind, scales, hnd, lengths):
    """Any byte that a cache may hold, in each dtype and in pages of each size."""
    for dtype, page_size, heads, width in (
        (torch.bfloat16, 4, 2, 64),
        (torch.float16, 1, 1, 48),
        (torch.float32, 16, 3, 16),
        (torch.bfloat16, 5, 2, 144),
    ):
        step, pages = tables(lengths, page_size)
        cache, scale = keys(pages, page_size, hnd, heads, width, kind, scales)
        check(asked(dtype, kind, scales, page_size, hnd), cache, scale, step, hnd)


@pytest.mark.slow(keep=7)
@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
@pytest.mark.parametrize("kind, scales", FORMATS, ids=lambda word: word or "plain")
@pytest.mark.parametrize(
    "dtype, page_sizes", [(torch.bfloat16, (4, 64)), (torch.float16, (7,)), (torch.float32, (1,))], ids=str
)
def test_latent_rows(dtype, page_sizes, kind, scales, lengths):
    for page_size in page_sizes:
        step, pages = tables(lengths, page_size)
        for width in [576] if scales == "block128" else [576, 48] if len(lengths) == 2 else [144]:
            rows = torch.randn(pages, page_size, width, generator=torch.Generator().manual_seed(3)) * 4
            cache = mla_pack(rows, kind, scales).to(DEVICE)
            request = asked(dtype, kind, scales, page_size, family="mla", head_dim=width, v_head_dim=width - 16)
            check(request, cache, None, step)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("kind, scales", FORMATS, ids=lambda word: word or "plain")
def test_latent_rows_of_any_bytes(kind, scales):
    """Scales that are no numbers, and numbers that are none."""
    step, pages = tables([6, 13, 0, 8, 2], 4)
    entries = {"": 576, "block16": 324, "block128": 656}[scales]
    cache = draw(pages, 3, 4, entries).to(DEVICE).view(torch.uint8 if scales else TORCH[kind])[:, 1]
    if scales == "block128":
        # Rotated numbers are in bfloat16, whose smallest ones the interpreter makes smaller.
        cache[..., 528:] = torch.randn(pages, 4, 64).bfloat16().view(torch.uint8).to(DEVICE)
    request = asked(torch.float32, kind, scales, 4, family="mla", head_dim=576, v_head_dim=512)
    assert check(request, cache, None, step).isnan().any()


def test_fp4_keys_by_scales_in_e4m3():
    step, pages = tables([6, 13, 0, 8, 2], 4)
    cache, _ = keys(pages, 4, False, 2, 48, "fp4_e2m1", "block16")
    scale = draw(pages, 4, 2, 3).to(DEVICE).view(torch.float8_e4m3fn)
    check(asked(torch.bfloat16, "fp4_e2m1", "block16", 4), cache, scale, step)


@pytest.mark.parametrize("scales", ["", "tensor", "head", "token"])
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16, torch.float32])
def test_floats(narrow, scales):
    """What is not quantised and yet is not what a kernel reads: narrower numbers, and such with scales."""
    step, pages = tables([6, 13, 0, 8, 2], 4)
    cache, scale = keys(pages, 4, False, 2, 40, "auto", scales)
    check(asked(torch.float32, str(narrow)[6:], scales, 4), cache.to(narrow), scale, step)
    rows = torch.randn(pages, 4, 72, device=DEVICE).to(narrow)
    if not scales:
        check(asked(torch.float32, str(narrow)[6:], "", 4, family="mla", head_dim=72, v_head_dim=64), rows, None, step)


def test_no_keys_at_all():
    step, pages = tables([0, 0], 4)
    cache, _ = keys(pages + 1, 4, False, 2, 32, "int8", "")
    request = asked(torch.bfloat16, "int8", "", 4)
    for table, pool in ((step.page_table[:, :1], cache), (step.page_table[:, :0], cache), (step.page_table, cache[:0])):
        made = dequantised(request, pool, None, table, step.seq_lens)
        assert made.shape == (table.numel(), 4, 2, 32)


def test_longer_sequences_than_the_table_has_columns_for():
    """As a recorded step may have while it is made: its lengths are anything."""
    step, pages = tables([8, 8], 4)
    cache, _ = keys(pages, 4, False, 2, 32, "int8", "")
    request = asked(torch.bfloat16, "int8", "", 4)
    made = dequantised(request, cache, None, step.page_table[:, :2], step.seq_lens + NONSENSE)
    assert torch.equal(made, Pool(request, cache).pages(step.page_table[:, :2].flatten().long(), torch.bfloat16))


def test_what_is_left_to_core():
    step, pages = tables([6, 13], 4)
    cache, scale = keys(pages, 4, False, 2, 32, "fp8_e4m3", "token")
    given = step.page_table, step.seq_lens
    assert dequantised(asked(torch.float64, "fp8_e4m3", "token", 4), cache, scale, *given) is None
    small = scale.to(torch.float8_e4m3fn)
    assert dequantised(asked(torch.float32, "fp8_e4m3", "token", 4), cache, small, *given) is None
    packed, by = keys(pages, 4, False, 2, 32, "fp4_e2m1", "block16")
    turned = by.mT.contiguous().mT
    assert dequantised(asked(torch.float32, "fp4_e2m1", "block16", 4), packed, turned, *given) is None
    rows = draw(pages * 4 * 657).to(DEVICE)[: pages * 4 * 657].view(pages, 4, 657)[..., 1:]
    request = asked(torch.float32, "fp8_e4m3", "block128", 4, family="mla", head_dim=576, v_head_dim=512)
    assert dequantised(request, rows, None, *given) is None


def test_tiles():
    """No columns are left over where rows allow it, and rows are of one page where that costs nothing."""
    assert dequantise._tile(128, 64 * 8) == (128, 64)
    assert dequantise._tile(576, 64) == (64, 64)
    assert dequantise._tile(576, 128) == (64, 128)
    assert dequantise._tile(576, 16) == (64, 128)
    assert dequantise._tile(192, 512) == (64, 128)
    assert dequantise._tile(96, 512) == (128, 64)
    assert dequantise._tile(8, 512) == (16, 512)


# --------------------------------------------------------------------------------------------------------- the lowering


def same(call, monkeypatch):
    """What a call gives where core's operators copy pages and where the kernel does, and how often it is asked."""
    made = []

    class Counting(DeviceOps):
        def dequantised(self, *given):
            made.append(dequantised(*given))
            return made[-1]

    results = []
    for ops in (None, Counting()):
        monkeypatch.setattr(dequantise_kv, "device_ops", lambda device_type, ops=ops: ops)
        polyattn.configure()
        results.append(call())
    return results, made


def test_gpus_have_it():
    assert device_ops("cuda").dequantised is dequantised


@pytest.mark.parametrize("saved", [None, True, False])
@pytest.mark.parametrize("kind, scales", [("fp8_e4m3", "head"), ("int8", "token"), ("fp4_e2m1", "block16")])
def test_calls_over_keys(kind, scales, saved, monkeypatch):
    step, pages = tables([6, 13, 0, 8, 2], 4)
    words = dict(zip(PagedTables._fields[:5], step, strict=False))
    numbers = torch.randn(2, pages, 4, 2, 32, device=DEVICE)
    by = {
        "head": torch.full((2,), 0.02, device=DEVICE),
        "token": torch.full((pages, 4, 2), 0.02, device=DEVICE),
        "block16": fp4_scales(numbers[0]).float(),
    }[scales]
    caches = [stored(x, by if scales != "head" and scales != "token" else by[..., None], TORCH[kind]) for x in numbers]
    query = torch.randn(5, 4, 32, device=DEVICE)
    new = {} if saved is None else {"save_kv_cache": saved, "key": query[:, :2], "value": query[:, 2:]}
    written = []

    def call():
        own = [cache.clone() for cache in caches]
        written.append(own)
        return polyattn.paged_attention(
            query, *own, k_scale=by, v_scale=by, backend="torch_sdpa", return_lse=True, **words, **new
        )

    (plain, kernel), made = same(call, monkeypatch)
    assert len(made) == 2
    for a, b in (*zip(plain, kernel, strict=True), *zip(*written, strict=True)):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("kind, scales", FORMATS, ids=lambda word: word or "plain")
def test_calls_over_latent_rows(kind, scales, monkeypatch):
    step, pages = tables([6, 13, 0, 8, 2], 4)
    words = dict(zip(PagedTables._fields[:5], step, strict=False))
    cache = mla_pack(torch.randn(pages, 4, 576, device=DEVICE), kind, scales)
    query = torch.randn(5, 4, 576, device=DEVICE)
    call = lambda: polyattn.mla_attention(query, cache, scale=0.1, backend="torch_sdpa", **words)  # noqa: E731
    (plain, kernel), made = same(call, monkeypatch)
    assert len(made) == 1
    assert torch.equal(plain, kernel)
