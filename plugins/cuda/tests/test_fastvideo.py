"""fastvideo-kernel over its emulator: conformance, gradients, and what it is really given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn import what_if
from polyattn.contract import AttentionRequest
from polyattn.errors import UnsupportedRequestError
from polyattn.semantics import reference
from polyattn.semantics.block_maps import visible_keys
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library

from .emulators import fastvideo as emulator

BLOCKS = Emulated("fastvideo", "fastvideo-kernel", "cuda:sm90@12.8")
REQUEST: dict[str, Any] = {
    "family": "block_sparse",
    "layout": "BHSD",
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "block_map": True,
    "block_sizes": True,
    "block_shape": (64, 64),
}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return emulator.library().install(monkeypatch)


@pytest.mark.parametrize("case", BLOCKS.cases(per_row=16, dtypes=("bfloat16",)), ids=str)
def test_conformance(case: Case, library: Library) -> None:
    BLOCKS.passes(case, library)


def tensors() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 200, 64, generator=draw).bfloat16() for heads in (4, 2, 2)]


def test_blocks_without_keys_and_queries_without_blocks(library: Library) -> None:
    """Neither reaches the library, where they are no numbers; gradients of what is blanked are 0."""
    counts, indices = torch.tensor([[[2, 0, 1, 1]]]).int(), torch.tensor([[[[1, 3], [0, 0], [1, 0], [2, 0]]]]).int()
    valid = torch.tensor([64, 0, 33, 8]).int()
    lists = {"block_counts": counts, "block_indices": indices, "block_valid": valid}
    q, k, v = (t.requires_grad_() for t in tensors())
    out = BLOCKS.bind(**REQUEST, grad=("query", "key", "value")).forward(q, k, v, **lists)
    given = library.calls[-1].given
    assert given["variable_block_sizes"].tolist() == [64, 0, 33, 8]
    assert given["block_map"][1, 3].int().tolist() == [[0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]]
    assert not out[:, :, 64:192].any()
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    mask = visible_keys((64, 64), 200, 200, **lists)
    right = reference.attention(*wide, attn_mask=mask, layout="BHSD", compute_dtype=torch.float64)
    torch.testing.assert_close(out.double(), right, rtol=2e-2, atol=2e-2)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    found, wanted = torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(right, wide, dout.double())
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=5e-2, atol=5e-2)


def test_no_key_at_all(library: Library) -> None:
    lists = {"block_counts": torch.ones(1, 1, 4).int(), "block_indices": torch.zeros(1, 1, 4, 1).int()}
    out = BLOCKS.bind(**REQUEST).forward(*tensors(), **lists, block_valid=torch.zeros(4).int())
    assert library.calls
    assert not out.any()


def test_what_its_kernels_do_not_take_is_refused() -> None:
    def chosen(**changes: Any) -> str:
        fields = {name: value for name, value in REQUEST.items() if name != "layout"}
        request = AttentionRequest(**fields, **changes)
        return what_if(request, platform="cuda:sm90", installed=["fastvideo-kernel"], backend="fastvideo").backend

    assert chosen() == chosen(grad=("query", "key")) == "fastvideo"
    for changes in ({"scale": 0.5}, {"lse": True}, {"dtype": "float16"}, {"s_relation": "more"}):
        with pytest.raises(UnsupportedRequestError, match=next(iter(changes))):
            chosen(**changes)
