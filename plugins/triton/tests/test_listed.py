"""Listed-token latent attention under Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch

from polyattn.contract import PagedTables, UnsupportedRequestError
from polyattn.semantics import reference
from polyattn.semantics.kv_quant import mla_pack_fp8
from polyattn_triton.kernels import listed
from polyattn_triton.kernels.room import TOO_LARGE

PAGE, LENS, NEW = 16, (70, 5, 0), (3, 1, 1)


def lists(topk: int, generator: torch.Generator) -> torch.Tensor:
    rows = []
    for keys, new in zip(LENS, NEW, strict=True):
        for n in range(new):
            seen = max(keys - new + n + 1, 0)
            some = torch.randperm(seen, generator=generator)[:topk].tolist()
            rows.append([-1] * (topk - len(some)) + some)
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("heads", "width", "d_c", "fp8", "dtype"),
    [(5, 40, 24, False, torch.float32), (20, 576, 512, True, torch.bfloat16), (2, 64, 64, False, torch.float16)],
)
def test_listed_tokens(heads: int, width: int, d_c: int, fp8: bool, dtype: torch.dtype, parts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(5, heads, width, generator=generator).to(dtype)
    cache = torch.randn(8, PAGE, width, generator=generator).to(dtype)
    cache[6:] = float("nan")  # nobody's
    cache = mla_pack_fp8(cache) if fp8 else cache
    table = torch.tensor([[3, 0, 5, 1, 4], [2, 0, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.int32)
    lens, starts = torch.tensor(LENS, dtype=torch.int32), torch.tensor([0, 3, 4, 5], dtype=torch.int32)
    tables, indices = PagedTables(table, lens, starts, 3, 70), lists(66, generator)
    wanted, wanted_lse = reference.mla_attention(
        query.double(), cache if fp8 else cache.double(), page_table=table, seq_lens=lens, cu_seqlens_q=starts,
        scale=0.1, v_head_dim=d_c, token_indices=indices, return_lse=True,
    )  # fmt: skip
    out, lse = torch.empty(5, heads, d_c, dtype=dtype), torch.empty(5, heads)
    listed.attend(query, cache, indices, tables=tables, scale=0.1, out=out, lse=lse, parts=parts)
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), wanted, rtol=limit, atol=limit)
    torch.testing.assert_close(lse.double(), wanted_lse.double(), rtol=limit, atol=limit)


def test_one_token_of_each_row() -> None:
    """A decode step: each token has its own row of the page table."""
    generator = torch.Generator().manual_seed(0)
    query, cache = torch.randn(3, 5, 40, generator=generator), torch.randn(8, PAGE, 40, generator=generator)
    table = torch.tensor([[3, 0], [5, 1], [2, 4]], dtype=torch.int32)
    lens, starts = torch.tensor([2 * PAGE, 7, 0], dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    indices = torch.stack([torch.arange(2 * PAGE), torch.arange(2 * PAGE), torch.full((2 * PAGE,), -1)]).to(torch.int32)
    indices[1, 7:] = -1
    wanted = reference.mla_attention(
        query.double(), cache.double(), page_table=table, seq_lens=lens, cu_seqlens_q=starts, scale=0.1,
        v_head_dim=24, token_indices=indices,
    )  # fmt: skip
    out = torch.empty(3, 5, 24)
    tables = PagedTables(table, lens, starts, 1, 2 * PAGE)
    listed.attend(query, cache, indices, tables=tables, scale=0.1, out=out, lse=None, parts=1)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    class Small:
        def __getitem__(self, grid: object) -> object:
            def launch(*args: object, M: int, N: int, STAGES: int, num_warps: int, **given: object) -> None:
                launched.append(M * N * STAGES)
                if launched[-1] > room:
                    raise TOO_LARGE[0](launched[-1], room, "shared memory")

            return launch

    monkeypatch.setattr(listed, "_attend", Small())
    monkeypatch.setattr(listed, "_SMALLER", {})
    table, starts = torch.zeros(2, 1, dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    tables = PagedTables(table, torch.ones(2, dtype=torch.int32), starts, 1, 1)
    given = (torch.zeros(2, 64, 32), torch.zeros(1, PAGE, 32), torch.zeros(2, 4, dtype=torch.int32))
    asked = {"tables": tables, "scale": 1.0, "out": torch.empty(2, 64, 24), "lse": None, "parts": 1}
    room = 16 * 32 * 2
    for _ in range(2):
        listed.attend(*given, **asked)
    assert launched == [64 * 32 * 2, 32 * 32 * 2, room, room], "what fitted is kept"
    room = 0
    with pytest.raises(UnsupportedRequestError, match="float32"):
        listed.attend(*given, **asked)


def test_parts_fill_a_chip() -> None:
    device = torch.device("cpu")
    assert listed.parts_for(device, 0, 128, 2048) == listed.parts_for(device, 10**6, 128, 2048) == 1
    assert listed.parts_for(device, 1, 16, 2048) <= 2048 // listed.LEAST
