"""`expand_block_map` against the definition: block maps by kernels that only take masks."""

from __future__ import annotations

import pytest
import torch

from polyattn.contract import AttentionRequest
from polyattn.lowering.expand_block_map import ExpandBlockMap
from polyattn.semantics.autograd import differentiable
from polyattn.semantics.block_maps import visible_keys
from polyattn.semantics.reference import attention

from .harness import KINDS, kernel, offers

QKV = ("query", "key", "value")


def request(**more):
    usual = {"family": "block_sparse", "dtype": "float64", "head_dim": 8, "heads": 2, "kv_heads": 1, "layout": "BHSD"}
    return AttentionRequest(**{**usual, "block_map": True, "block_shape": (4, 8), **more}).normalised()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [False, True])
def test_numbers_and_gradients_are_those_of_the_mask(kind, sizes):
    asked = request(grad=(*QKV, "lse"), lse=True, block_sizes=sizes)
    (rewrite,) = offers("expand_block_map", asked)
    (dense,) = rewrite.inner
    assert (dense.family, dense.mask, dense.block_map, dense.block_shape) == ("dense", "bool", False, (0, 0))
    bound = ExpandBlockMap().bind(asked, rewrite, [kernel(kind)(dense)], [])
    assert (bound.backward is None) == (kind == "autograd")
    torch.manual_seed(1)
    tensors = [torch.randn(2, h, 19, 8, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1)]
    lists = {
        "block_counts": torch.randint(0, 3, (2, 2, 5), dtype=torch.int32),
        "block_indices": torch.rand(2, 2, 5, 3).argsort(-1).int(),
        "block_valid": torch.tensor([8, 2, 1], dtype=torch.int32) if sizes else None,
    }
    forward = bound.forward if bound.backward is None else differentiable(bound, True)
    out, lse = forward(*tensors, **lists)
    mask = visible_keys((4, 8), 19, 19, **lists)
    right, right_lse = attention(*tensors, attn_mask=mask, layout="BHSD", return_lse=True)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(lse, right_lse)
    grads, rights = (torch.autograd.grad(o.sum() + s.nan_to_num(neginf=0.0).sum(), tensors) for o, s in
                     ((out, lse), (right, right_lse)))  # fmt: skip
    for found, wanted in zip(grads, rights, strict=True):
        torch.testing.assert_close(found, wanted)


def test_it_offers_nothing_for_other_families_methods_and_calls_without_a_map():
    assert offers("expand_block_map", request(family="dense", block_map=False, block_shape=(0, 0))) == []
    assert offers("expand_block_map", request(method="vsa")) == []
    assert offers("expand_block_map", request(block_map=False)) == []
