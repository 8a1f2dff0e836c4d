"""Latent decode on Hopper: its kernel emulated, and compiled for sm_90."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyattn.contract import PagedTables
from polyattn.semantics.kv_quant import mla_pack_fp8, mla_unpack
from polyattn.semantics.reference import attention, mla_attention
from polyattn.testing.tolerances import RELATIVE_L2
from polyattn_triton.hopper import latent as hopper
from polyattn_triton.kernels import latent, listed

from .hopper_offline import elsewhere

SCALE = 192**-0.5


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> list[Any]:
    """The launcher launches the emulated kernel, and is asked as if on a Hopper. What it launched."""
    from polyattn_triton.hopper import latent_kernel

    from .gluon_emulator import Machine

    monkeypatch.setattr(latent_kernel, "attend", Machine(latent_kernel.attend))
    monkeypatch.setattr(hopper, "on_hopper", lambda device: True)
    launched: list[Any] = []
    attend = hopper.attend

    def noted(*args: Any) -> None:
        launched.append(args)
        attend(*args)

    monkeypatch.setattr(hopper, "attend", noted)
    return launched


CASES = {
    # lengths, queries of a sequence, heads, page size, causal
    "ragged": ([300, 1, 77], 1, 64, 64, False),
    "whole pairs": ([256, 128], 1, 64, 128, False),
    "an empty one, few heads": ([65, 0, 200], 1, 16, 64, False),
    "pages of 16": ([150, 64], 1, 64, 16, False),
    "drafts": ([2, 130, 300], 2, 48, 64, True),
}


FP8 = {"ragged": torch.bfloat16, "whole pairs": torch.float16, "pages of 1": torch.bfloat16, "drafts": torch.float16}
STORED = (torch.float8_e4m3fn, torch.uint8)
"""Without scales, and with them."""


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("name", "dtype", "stored"),
    [
        *((name, torch.bfloat16, torch.bfloat16) for name in CASES),
        *((name, dtype, stored) for name, dtype in FP8.items() for stored in STORED),
    ],
)
def test_emulated(emulated: list[Any], name: str, dtype: torch.dtype, stored: torch.dtype) -> None:
    lens, queries, heads, page_size, causal = CASES.get(name) or ([70, 0, 131], 1, 24, 1, False)
    torch.manual_seed(len(name))
    columns = -(-max(lens) // page_size)
    order = torch.randperm(len(lens) * columns)
    table = order.view(len(lens), columns)
    if stored == torch.uint8:
        cache = torch.full((len(order), page_size, 656), 255, dtype=stored)
    else:
        cache = torch.full((len(order), page_size, 576), float("nan")).to(stored)
    rows = []
    for n, k in enumerate(lens):
        i = torch.arange(k)
        drawn = torch.randn(k, 576).bfloat16()
        if stored == torch.uint8:
            # Groups of a row have scales that differ.
            packed = mla_pack_fp8(drawn * (torch.arange(576) // 128 * 0.5 + 0.5))
            cache[table[n, i // page_size], i % page_size] = packed
            rows.append(mla_unpack(packed).to(dtype))
        else:
            cache[table[n, i // page_size], i % page_size] = drawn.to(stored)
            rows.append(drawn.to(stored).to(dtype))
    query = torch.randn(len(lens) * queries, heads, 576).to(dtype)
    out = torch.full((len(query), heads, 512), float("nan"), dtype=dtype)
    lse = torch.full((len(query), heads), float("nan"))
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    starts = torch.arange(0, len(query) + 1, queries, dtype=torch.int32)
    config = latent.Config(64, 64, 8, 2, least=2)
    launch = latent.launch_for(
        query.device, query.dtype, heads, (512, 64), len(lens), queries, max(lens), config=config
    )
    shares = torch.empty(max(launch.numbers(len(lens)), 1), dtype=torch.int32)
    latent.plan(launch, seq_lens, starts, causal=causal, out=shares)
    pieces = torch.empty(launch.pieces(len(lens)), 512), torch.empty(launch.pieces(len(lens)))
    latent.attend(
        query, cache, tables=PagedTables(table.int(), seq_lens, starts, 1, 1), causal=causal, scale=SCALE, out=out,
        lse=lse, launch=launch, shares=shares, pieces=pieces,
    )  # fmt: skip
    assert len(emulated) == 1
    for n, key in enumerate(rows):
        here = slice(n * queries, (n + 1) * queries)
        wanted, wanted_lse = attention(
            query[here].double()[None],
            key.double()[None, :, None],
            key[:, :512].double()[None, :, None],
            scale=SCALE,
            causal="bottom_right" if causal else "none",
            return_lse=True,
        )
        assert float((out[here] - wanted[0]).norm()) <= RELATIVE_L2[out.dtype] * float(wanted.norm())
        torch.testing.assert_close(lse[here].double(), wanted_lse[0], rtol=0, atol=1e-3)


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(
    ("heads", "topk", "page_size", "parts", "new", "fp8"),
    [
        (64, 300, 64, 2, (2, 1, 1), ""),
        (16, 65, 16, 1, (2, 1, 1), ""),
        (80, 130, 64, 3, (1, 1, 1), ""),
        (64, 256, 64, 1, (2, 1, 1), ""),
        (16, 65, 1, 1, (1, 1, 1), ""),
        # Rows of FP8, and the query's dtype.
        (64, 300, 64, 2, (2, 1, 1), "bfloat16"),
        (80, 130, 16, 3, (1, 1, 1), "float16"),
        (16, 65, 1, 1, (2, 1, 1), "float16"),
        (64, 256, 64, 1, (2, 1, 1), "bfloat16"),
    ],
)
def test_lists_emulated(
    monkeypatch: pytest.MonkeyPatch, interpreted: None, heads: int, topk: int, page_size: int, parts: int,
    new: tuple[int, ...], fp8: str,
) -> None:  # fmt: skip
    from polyattn_triton.hopper import latent_kernel

    from .gluon_emulator import Machine

    machine = Machine(latent_kernel.attend)
    monkeypatch.setattr(latent_kernel, "attend", machine)
    monkeypatch.setattr(hopper, "on_hopper", lambda device: True)
    monkeypatch.setattr(hopper, "listed_parts", lambda *_: parts)
    monkeypatch.setattr(hopper.runtime, "processors", lambda device: 3)
    torch.manual_seed(topk)
    lens, T = (400, 90, 0), sum(new)
    columns = -(-max(lens) // page_size)
    table = torch.randperm(3 * columns).to(torch.int32).view(3, columns)
    dtype = getattr(torch, fp8 or "bfloat16")
    cache = rows = torch.randn(3 * columns, page_size, 576).bfloat16()
    cache[table[2].long()] = float("nan")
    if fp8:
        # Groups of a row have scales that differ.
        cache = mla_pack_fp8(rows * (torch.arange(576) // 128 * 0.5 + 0.5))
        cache[table[2].long()] = 255
        rows = mla_unpack(cache).to(dtype)
    query = torch.randn(T, heads, 576).to(dtype)
    lists = torch.full((T, topk), -1, dtype=torch.int32)
    for n, seen in enumerate((399, 400, 90, 0)[-T:]):
        some = torch.randperm(seen)[:topk]
        lists[n, torch.randperm(topk)[: len(some)]] = some.int()
    starts, seq_lens = torch.tensor([0, *new]).cumsum(0, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)
    wanted, wanted_lse = mla_attention(
        query.double(), rows.double(), page_table=table, seq_lens=seq_lens, cu_seqlens_q=starts, scale=SCALE,
        v_head_dim=512, token_indices=lists, return_lse=True,
    )  # fmt: skip
    out = torch.full((T, heads, 512), float("nan"), dtype=dtype)
    lse = torch.full((T, heads), float("nan"))
    tables = PagedTables(table, seq_lens, starts, max(new), max(lens))
    monkeypatch.setattr(listed, "_attend", None)  # the portable kernel is not asked
    listed.attend(query, cache, lists, tables=tables, scale=SCALE, out=out, lse=lse, parts=1)
    assert float((out - wanted).norm()) <= RELATIVE_L2[out.dtype] * float(wanted.norm())
    assert not out[-1].any()
    torch.testing.assert_close(lse.double(), wanted_lse.double(), rtol=0, atol=1e-3)


def test_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    query, cache = torch.zeros(3, 16, 576, dtype=torch.bfloat16), torch.zeros(5, 64, 576, dtype=torch.bfloat16)
    out = torch.zeros(3, 16, 512, dtype=torch.bfloat16)
    assert not hopper.takes(query, cache, out, 64, 64), "this is no Hopper"
    monkeypatch.setattr(hopper, "on_hopper", lambda device: True)
    assert hopper.takes(query, cache, out, 64, 64)
    assert hopper.takes(query, torch.zeros(5, 16, 576, dtype=torch.bfloat16), out, 64, 64)
    wide = torch.zeros(5, 64, 584, dtype=torch.bfloat16)[..., :576]
    assert hopper.takes(query, wide, out, 64, 64)
    fp8 = torch.zeros(5, 1, 576).to(torch.float8_e4m3fn)
    assert hopper.takes(query, fp8, out, 64, 64), "pages of any size"
    for refused in (
        (query, torch.zeros(5, 48, 576, dtype=torch.bfloat16), out, 64, 64),
        (query, torch.zeros(5, 8, 576, dtype=torch.bfloat16), out, 64, 64),
        (query, cache.half(), out, 64, 64),
        (query.float(), cache.float(), out, 64, 64),
        (query, cache, out, 32, 64),
        (query, fp8.to(torch.float8_e5m2), out, 64, 64),
        (query, torch.zeros(5, 2, 576).to(torch.float8_e4m3fn)[:, :1], out, 64, 64),
        # What is no multiple of 16 is compiled for numbers of any kind, and cp.async for none of two bytes.
        (torch.zeros(3, 16, 584, dtype=torch.bfloat16)[..., :576], cache, out, 64, 64),
        (torch.zeros(3, 16, 577, dtype=torch.bfloat16)[..., 1:], cache, out, 64, 64),
    ):
        assert not hopper.takes(*refused)


def test_takes_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    query, out = torch.zeros(3, 16, 576, dtype=torch.bfloat16), torch.zeros(3, 16, 512, dtype=torch.bfloat16)
    fp8 = torch.zeros(5, 64, 656, dtype=torch.uint8)
    assert not hopper.takes_listed(query, fp8, out), "this is no Hopper"
    monkeypatch.setattr(hopper, "on_hopper", lambda device: True)
    wide = torch.zeros(5, 64, 672, dtype=torch.uint8)
    for cache in (fp8, fp8[:, :1].contiguous(), wide[..., :656], wide[..., 16:]):
        assert hopper.takes_listed(query, cache, out)
        assert hopper.takes_listed(query.half(), cache, out.half())
    for page_size in (64, 48, 1):
        assert hopper.takes_listed(query, torch.zeros(5, page_size, 576, dtype=torch.bfloat16), out)
    assert hopper.takes(query, fp8, out, 64, 64)
    for refused in (
        (query.float(), fp8, out),
        (query, torch.zeros(5, 64, 576, dtype=torch.float16), out),
        # Rows of FP4, rows that begin within 16 bytes, pages that do not follow each other.
        (query, torch.zeros(5, 64, 324, dtype=torch.uint8), out),
        (query, wide[..., 8:664], out),
        (query, torch.zeros(5, 64, 664, dtype=torch.uint8)[..., :656], out),
        (query, fp8[:, :16], out),
        (query, torch.zeros(1, dtype=torch.uint8).expand(2**25, 64, 656), out),
    ):
        assert not hopper.takes_listed(*refused)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("page_size", "fp8"), [(16, ""), (64, ""), (64, "bf16")])
def test_compiles_for_hopper(page_size: int, fp8: str) -> None:
    found = elsewhere("latent", page_size, True, fp8)
    # Two consumers and a warpgroup that copies.
    assert found["warps"] == 12
    assert found["stack"] is None or found["stack"] <= 64
    assert found["registers"] is None or found["registers"] * found["warps"] * 32 <= 65536
    assert "cp.async.cg.shared.global" in found["ptx"]
    if fp8:
        # A thread converts two numbers at a time, of the 64 x 576 of two blocks.
        assert found["ptx"].count("cvt.rn.f16x2.e4m3x2") == 2 * 64 * 576 // 128 // 2


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("wide", "fp8"), [(False, ""), (True, ""), (False, "fp16"), (True, "bf16")])
def test_lists_compile_for_hopper(wide: bool, fp8: str) -> None:
    found = elsewhere("listed_latent", 64, wide, fp8)
    assert found["warps"] == 12
    assert found["stack"] is None or found["stack"] <= 64
    assert "cp.async.cg.shared.global" in found["ptx"]
    if fp8:
        # A thread converts two numbers at a time, a quarter of the 64 x 512 of two blocks.
        assert found["ptx"].count("cvt.rn.f16x2.e4m3x2") == 2 * 64 * 512 // 128 // 2
        assert "ld.global.v4" in found["ptx"]
        assert "st.shared.v4" in found["ptx"]
