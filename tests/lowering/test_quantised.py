"""`polyattn.semantics.kv_quant`: stored numbers and real ones."""

from __future__ import annotations

import itertools

import pytest
import torch

from polyattn.semantics.kv_quant import FP4_BLOCK, MLA_BYTES, fp4_scales, mla_pack_fp8, real, stored
from polyattn.semantics.reference import mla_unpack_fp8


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODES = [sign * value for sign in (1, -1) for value in E2M1]


def test_a_byte_holds_two_numbers_the_first_in_its_low_bits():
    rows = torch.arange(256, dtype=torch.uint8)[:, None]
    want = [(CODES[byte & 15], CODES[byte >> 4]) for byte in range(256)]
    assert real(rows, None, torch.float32).tolist() == [list(pair) for pair in want]
    assert torch.equal(stored(torch.tensor(want), None, torch.uint8), rows)


def test_rounding_is_to_the_nearest_and_ties_to_the_even_code():
    values = torch.linspace(-7, 7, 2 * 7 * 64 + 1)[:-1].double()
    got = real(stored(values.view(-1, 2), None, torch.uint8), None, torch.float64).flatten()
    for value, rounded in zip(values.tolist(), got.tolist(), strict=True):
        nearest = min(abs(abs(value) - v) for v in E2M1)
        allowed = [i for i, v in enumerate(E2M1) if abs(abs(value) - v) == nearest]
        assert E2M1.index(abs(rounded)) == next((i for i in allowed if i % 2 == 0), allowed[0])
        assert rounded == 0 or (rounded > 0) == (value > 0)


def test_what_is_too_large_becomes_the_largest():
    huge = torch.tensor([[1e30, -1e30]])
    assert real(stored(huge, None, torch.uint8), None, torch.float32).tolist() == [[6.0, -6.0]]
    for dtype, largest in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        assert real(stored(huge, None, dtype), None, torch.float32).tolist() == [[largest, -largest]]
    assert stored(huge, None, torch.int8).tolist() == [[127, -128]]


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float32])
def test_every_16_numbers_have_a_scale(kind):
    rows = torch.randn(3, 2, 48, dtype=torch.float64) * torch.tensor([1.0, 100.0, 0.01]).repeat_interleave(FP4_BLOCK)
    scale = fp4_scales(rows).to(kind)
    assert scale.shape == (3, 2, 3)
    packed = stored(rows, scale, torch.uint8)
    assert packed.shape == (3, 2, 24)
    back = real(packed, scale, torch.float64)
    blocks = (rows - back).unflatten(-1, (-1, FP4_BLOCK)).norm(dim=-1) / rows.unflatten(-1, (-1, FP4_BLOCK)).norm(
        dim=-1
    )
    assert blocks.max() < 0.3, "each block keeps its own magnitude"
    assert torch.equal(stored(back, scale, torch.uint8) & 0x77, packed & 0x77), "what is stored stays"


def test_scales_of_nothing_are_no_zeros():
    assert fp4_scales(torch.zeros(1, 16)).float().item() > 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_a_scale_is_a_factor(dtype):
    rows, scale = torch.tensor([[3.0, -5.0]]), torch.tensor([[0.25]])
    back = real(stored(rows, scale, dtype), scale, torch.float32)
    assert back.tolist() == [[3.0, -5.0]]
    assert stored(rows, scale, dtype).float().tolist() == [[12.0, -20.0]]


def test_products_are_rounded_once():
    """In half precision the product is made in float32: neither factor is rounded first."""
    rows, scale = torch.full((1, 1), 1.125).to(torch.float8_e4m3fn), torch.full((1, 1), 1.0078125)
    assert real(rows, scale, torch.bfloat16).item() == torch.tensor(1.125 * 1.0078125).bfloat16().item()


def test_latent_rows_come_back():
    rows = torch.randn(4, 3, 576) * torch.logspace(-3, 3, 576)
    packed = mla_pack_fp8(rows)
    assert packed.shape == (4, 3, MLA_BYTES)
    back = mla_unpack_fp8(packed)
    groups = [(rows - back)[..., i : i + 128].norm() / rows[..., i : i + 128].norm() for i in range(0, 512, 128)]
    assert max(groups) < 0.03
    assert torch.equal(back[..., 512:], rows[..., 512:].bfloat16().float())
    assert mla_unpack_fp8(mla_pack_fp8(torch.zeros(1, 1, 576))).eq(0).all()


def test_every_code_of_two_numbers_is_a_fixed_point():
    for pair in itertools.product(CODES, repeat=2):
        assert real(stored(torch.tensor([pair]), None, torch.uint8), None, torch.float32).tolist() == [list(pair)]
