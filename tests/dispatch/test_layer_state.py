"""A layer goes where modules go: copied, pickled and saved, before and after it has served calls."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import polyattn
from polyattn.nn import LocalAttention


def saved(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved])
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_layer_is_the_same_wherever_it_goes(again, calls):
    q, k, v = (torch.randn(2, 5, 4, 16) for _ in range(3))
    with polyattn.use_backend("reference"):
        layer = LocalAttention(causal=True, window=(3, 0), dropout_p=0.5).eval()
    for _ in range(calls):
        layer(q, k, v)
    other = again(layer)
    assert repr(other) == repr(layer)
    assert "dropout_p=0.5" in repr(other)
    assert other.training is False
    torch.testing.assert_close(other(q, k, v), layer(q, k, v))
    assert polyattn.explain(other, q, k, v).backend == "reference"


class Own(torch.nn.Module):
    """Of somebody who binds a call by themselves."""

    def __init__(self):
        super().__init__()
        self.attend = polyattn.bind(causal=True, backend="reference")


def test_what_bind_returns_goes_with_the_layer_that_holds_it():
    q, k, v = (torch.randn(2, 5, 4, 16) for _ in range(3))
    layer = Own()
    for _ in range(3):
        expected = layer.attend(q, k, v)
    for other in (copy.deepcopy(layer), saved(layer)):
        torch.testing.assert_close(other.attend(q, k, v), expected)
        assert polyattn.explain(other.attend, q, k, v).backend == "reference"
