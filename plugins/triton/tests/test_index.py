"""Index scores in pages, under Triton's interpreter, against their definition."""

from __future__ import annotations

import pytest
import torch

from polyattn.semantics import token_index
from polyattn_triton.kernels.index import index_scores

PAGE, LENS, NEW = 16, (200, 33, 0, 5), (20, 1, 1, 5)


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
