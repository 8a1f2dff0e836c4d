"""`kernels.merge_parts` against `polyattn.merge`, which defines it."""

from __future__ import annotations

import pytest
import torch

from polyattn import merge as reference
from polyattn_triton.kernels.merge_parts import MOST, merge_parts


def made(parts: int, dtype: torch.dtype, width: int = 40) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parts that lie apart, LSEs with the heads first, as kernels give them."""
    torch.manual_seed(parts)
    outs = [torch.randn(7, 4, width).to(dtype) for _ in range(parts)]
    lses = [(torch.randn(4, 7) * 3).T for _ in range(parts)]
    lses[-1][2], outs[-1][2] = -torch.inf, 0.0  # a part without keys
    lses[0][6] += 90.0
    for out, lse in zip(outs, lses, strict=True):
        lse[5], out[5] = -torch.inf, 0.0  # a row without any
    return outs, lses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", range(1, MOST + 1))
def test_parts_are_merged_as_core_merges_them(dtype: torch.dtype, parts: int) -> None:
    outs, lses = made(parts, dtype)
    out, lse = torch.full((7, 4, 40), torch.nan, dtype=dtype), torch.full((7, 4), torch.nan)
    merge_parts(outs, lses, out=out, lse=lse)
    expected, expected_lse = reference([one.double() for one in outs], [one.double() for one in lses], layout="THD")
    bound = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


def test_rows_of_a_float32_sum_take_a_part_in_place() -> None:
    (first, second), (lse, more) = made(2, torch.bfloat16, 16)
    total, weights = torch.randn(9, 4, 16), torch.randn(9, 4)
    total[2:], weights[2:] = first.float(), lse
    before = total[:2].clone(), weights[:2].clone()
    expected, expected_lse = reference([total[2:], second.float()], [lse, more], layout="THD")
    merge_parts([total[2:], second], [weights[2:], more], out=total[2:], lse=weights[2:])
    torch.testing.assert_close(total[2:], expected)
    torch.testing.assert_close(weights[2:], expected_lse)
    torch.testing.assert_close((total[:2], weights[:2]), before)


def test_parts_whose_last_axis_is_not_the_inner_one() -> None:
    outs = [torch.randn(16, 2, 5).permute(2, 1, 0) for _ in range(2)]
    lses = [torch.zeros(5, 2), torch.full((5, 2), -torch.inf)]
    out, lse = torch.full((5, 2, 16), torch.nan), torch.empty(5, 2)
    outs[1].zero_()
    merge_parts(outs, lses, out=out, lse=lse)
    torch.testing.assert_close(out, outs[0].contiguous())


def test_no_rows() -> None:
    none = torch.zeros(0, 4, 16), torch.zeros(0, 4)
    merge_parts([none[0]], [none[1]], out=none[0], lse=none[1])


@pytest.mark.parametrize("parts", range(1, MOST + 1))
def test_what_is_no_number_stays_so(parts: int) -> None:
    """An LSE of -inf would be read as a row without keys, whose numbers nobody reads."""
    outs, lses = made(parts, torch.float32)
    lses[-1][3, 1] = torch.nan
    out, lse = torch.empty(7, 4, 40), torch.empty(7, 4)
    merge_parts(outs, lses, out=out, lse=lse)
    expected, expected_lse = reference(outs, lses, layout="THD")
    torch.testing.assert_close(out, expected, equal_nan=True)
    torch.testing.assert_close(lse, expected_lse, equal_nan=True)
    assert lse.isnan().sum() == 1


def test_a_result_in_place_whose_last_axis_is_not_the_inner_one() -> None:
    outs = [torch.randn(16, 2, 5).permute(2, 1, 0) for _ in range(2)]
    lses = [torch.randn(5, 2) for _ in range(2)]
    expected, expected_lse = reference(outs, lses, layout="THD")
    merge_parts(outs, lses, out=outs[0], lse=lses[0])
    torch.testing.assert_close((outs[0], lses[0]), (expected, expected_lse))
