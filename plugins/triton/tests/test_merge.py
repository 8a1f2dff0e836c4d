"""`kernels.merge` against `polyattn.merge`, which defines it."""

from __future__ import annotations

import pytest
import torch

from polyattn import merge as reference
from polyattn_triton.kernels.merge import merge


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sink", [False, True])
def test_partials_are_merged_as_core_merges_them(dtype: torch.dtype, sink: bool) -> None:
    torch.manual_seed(0)
    outs, lses = torch.randn(3, 7, 4, 40).to(dtype), torch.randn(3, 7, 4) * 3
    lses[1, 2], outs[1, 2] = -torch.inf, 0.0  # a part without keys
    lses[:, 5], outs[:, 5] = -torch.inf, 0.0  # a row without any
    lses[0, 6] += 90.0
    sinks = torch.tensor([-torch.inf, 0.0, 30.0, -5.0]) if sink else None
    out, lse = torch.full((7, 4, 40), torch.nan, dtype=dtype), torch.full((7, 4), torch.nan)
    merge(outs, lses, sinks=sinks, out=out, lse=lse)
    expected, expected_lse = reference(list(outs.double()), list(lses.double()), sinks=sinks, layout="THD")
    bound = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


def test_strided_partials_of_one_part() -> None:
    outs, lses = torch.randn(1, 2, 5, 16).transpose(1, 2), torch.zeros(1, 2, 5).transpose(1, 2)
    out = torch.full((5, 2, 16), torch.nan)
    merge(outs, lses, out=out)
    torch.testing.assert_close(out, outs[0])


def test_no_rows() -> None:
    merge(torch.zeros(2, 0, 4, 16), torch.zeros(2, 0, 4), out=torch.zeros(0, 4, 16))
