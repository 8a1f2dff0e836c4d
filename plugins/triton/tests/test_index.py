"""Index scores in pages, under Triton's interpreter, against their definition."""

from __future__ import annotations

import pytest
import torch

from polyattn.semantics import token_index
from polyattn_triton.kernels import index
from polyattn_triton.kernels.index import index_scores

PAGE, LENS, NEW = 16, (200, 33, 0, 5), (20, 1, 1, 5)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("heads", "width", "dtype"), [(3, 40, torch.float32), (20, 128, torch.bfloat16)])
def test_scores_in_pages(heads: int, width: int, dtype: torch.dtype, packed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(sum(NEW), heads, width, generator=generator).to(dtype)
    weights = torch.randn(sum(NEW), heads, generator=generator)
    table = torch.randperm(4 * 13, generator=generator).to(torch.int32).view(4, 13)
    rows = torch.randn(4 * 13, PAGE, width, generator=generator).to(dtype)
    cache = token_index.pack_index(rows) if packed else rows
    real = token_index.unpack_index(cache) if packed else rows.float()
    starts = torch.tensor([0, *NEW]).cumsum(0, dtype=torch.int32)
    starts, lens = (
        torch.stack([starts, starts + 1], 1)[:, 0],
        torch.tensor([*zip(LENS, NEW, strict=True)], dtype=torch.int32)[:, 0],
    )
    scores = index_scores(query, weights, cache, table, lens, starts, max(NEW))
    assert scores.shape == (sum(NEW), 13 * PAGE)
    for n, (keys, new) in enumerate(zip(LENS, NEW, strict=True)):
        some = slice(int(starts[n]), int(starts[n + 1]))
        own = real[table[n].long()].flatten(0, 1)[:keys]
        wanted = token_index.index_scores(query[some].float(), own, weights[some])
        for m in range(new):
            seen = max(keys - new + m + 1, 0)
            limit = 1e-4 if dtype == torch.float32 and not packed else 2e-2
            torch.testing.assert_close(scores[some][m, :seen], wanted[m, :seen], rtol=limit, atol=limit * width**0.5)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("page", "width", "dtype"), [(64, 128, torch.bfloat16), (48, 40, torch.float32)])
def test_one_query_goes_through_several_tiles_of_keys(page: int, width: int, dtype: torch.dtype, packed: bool) -> None:
    """Lengths that end inside a tile, at its end and before it begins, pages of whole tiles and of parts of them; rows
    that nobody wrote are no numbers."""
    generator = torch.Generator().manual_seed(0)
    lens, columns = (40 * page - 1, 9 * 64, 65, 0, 1), 40
    query = torch.randn(len(lens), 20, width, generator=generator).to(dtype)
    weights = torch.randn(len(lens), 20, generator=generator)
    table = torch.randperm(len(lens) * columns, generator=generator).to(torch.int32).view(len(lens), columns)
    rows = torch.randn(table.numel(), page, width, generator=generator).to(dtype)
    cache = token_index.pack_index(rows) if packed else rows
    real = token_index.unpack_index(cache) if packed else rows.float()
    for n, keys in enumerate(lens):
        own = torch.arange(columns * page) >= keys
        at = table[n].long().repeat_interleave(page)[own], torch.arange(page).repeat(columns)[own]
        cache[at] = 0x7F if packed else torch.nan
    starts = torch.arange(len(lens) + 1, dtype=torch.int32)
    scores = index_scores(query, weights, cache, table, torch.tensor(lens, dtype=torch.int32), starts, 1)
    for n, keys in enumerate(lens):
        own = real[table[n].long()].flatten(0, 1)[:keys]
        wanted = token_index.index_scores(query[n : n + 1].float(), own, weights[n : n + 1])
        limit = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(scores[n : n + 1, :keys], wanted, rtol=limit, atol=limit * width**0.5)


def test_a_score_is_the_same_however_many_tiles_its_program_has(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    query, weights = torch.randn(2, 3, 32, generator=generator), torch.randn(2, 3, generator=generator)
    cache = token_index.pack_index(torch.randn(80, 64, 32, generator=generator))
    table, lens = torch.arange(80, dtype=torch.int32).view(2, 40), torch.tensor([2500, 700], dtype=torch.int32)
    found = []
    for most in (1, 8):
        monkeypatch.setattr(index, "TILES", most)
        found.append(index_scores(query, weights, cache, table, lens, torch.arange(3, dtype=torch.int32), 1))
    for n, keys in enumerate(lens.tolist()):
        assert torch.equal(found[0][n, :keys], found[1][n, :keys])
