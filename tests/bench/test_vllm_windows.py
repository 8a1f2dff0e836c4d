"""The count of wrong windows: a right library has none, a wrong one is told by kind."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def module():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("vllm_windows")


def library(module: Any, wider: int) -> Any:
    """A stand-in for vLLM's function, whose windows reach `wider` keys too far to the right."""

    def function(
        query: Tensor, key: Tensor, value: Tensor, *, causal: bool, window_size: list[int], **_: Any
    ) -> Tensor:
        (S_q, heads, dim), (S_k, kv_heads, _) = query.shape, key.shape
        left, right = window_size
        wide = (left, right + wider if right >= 0 else right)
        keep = module.allowed(module.Drawn(S_q, S_k, heads, kv_heads, dim, causal, wide), query.device)
        turned = (t.transpose(0, 1)[None] for t in (query, key, value))
        return scaled_dot_product_attention(*turned, attn_mask=keep, enable_gqa=True)[0].transpose(0, 1)

    return function


@pytest.mark.parametrize("wider", [0, 5])
def test_wrong_calls_are_counted_by_whether_a_defect_names_them(module, wider):
    rng = random.Random(7)
    drawn = [call for call in (module.draw(rng) for _ in range(400)) if call.S_k < 400]
    known = next(call for call in drawn if call.known)
    other = next(call for call in drawn if not call.known and call.window[1] >= 0)
    for call, foreseen in ((known, True), (other, False)):
        error = module.error(call, library(module, wider), torch.Generator().manual_seed(1))
        assert (error > 8e-3) is bool(wider)
        assert call.known is foreseen


def test_heads_of_64_and_short_windows_are_not_named(module):
    usual = {"S_q": 600, "S_k": 600, "heads": 4, "kv_heads": 4, "causal": True}
    assert module.Drawn(**usual, head_dim=128, window=(300, 0)).known
    assert not module.Drawn(**usual, head_dim=64, window=(300, 0)).known
    assert not module.Drawn(**usual, head_dim=128, window=(100, 0)).known
