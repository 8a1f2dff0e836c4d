"""The chunked form of the gated delta rules is their recurrence, in float64 and wherever exponents could overflow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyattn.semantics.delta_rule import chunked_delta_rule
from polyattn.semantics.reference import gated_delta_rule

METHODS = ("gdn", "kda")
B, D, D_V = 2, 6, 5


def inputs(method: str, S: int, H: int = 2, H_v: int = 4, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(11)
    gates = (B, S, H_v, D) if method == "kda" else (B, S, H_v)
    return {
        "query": torch.randn(B, S, H, D, dtype=dtype),
        "key": torch.nn.functional.normalize(torch.randn(B, S, H, D, dtype=dtype), dim=-1),
        "value": torch.randn(B, S, H_v, D_V, dtype=dtype),
        "gate": -torch.rand(gates, dtype=dtype),
        "beta": torch.rand(B, S, H_v, dtype=dtype),
        "state": torch.randn(B, H_v, D, D_V, dtype=dtype),
    }


def close(found: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], tolerance: float = 1e-12) -> None:
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("S, chunk", [(77, 16), (64, 64), (65, 64), (3, 64), (1, 16), (17, 1), (130, 0), (0, 0)])
@pytest.mark.parametrize("method", METHODS)
def test_chunks_are_the_recurrence(method: str, S: int, chunk: int) -> None:
    given = inputs(method, S)
    close(chunked_delta_rule(**given, chunk=chunk), gated_delta_rule(**given))


@pytest.mark.parametrize("H", [4, 2, 1])
@pytest.mark.parametrize("method", METHODS)
def test_value_heads_share_queries_and_keys(method: str, H: int) -> None:
    given = inputs(method, 9, H)
    close(chunked_delta_rule(**given, chunk=4, scale=0.3), gated_delta_rule(**given, scale=0.3))


@pytest.mark.parametrize("method", METHODS)
def test_packed_sequences_of_any_lengths(method: str) -> None:
    given = inputs(method, 20)
    flat = {name: t.reshape(1, 2 * 20, *t.shape[2:]) for name, t in given.items() if name != "state"}
    cu = torch.tensor([0, 7, 7, 8, 15, 16, 40], dtype=torch.int32)
    flat["state"] = torch.randn(6, 4, D, D_V, dtype=torch.float64)
    close(chunked_delta_rule(**flat, cu_seqlens=cu, chunk=4), gated_delta_rule(**flat, cu_seqlens=cu))


@pytest.mark.parametrize("method", METHODS)
def test_a_decay_beyond_every_float_is_a_decay_to_zero(method: str) -> None:
    """exp(-G) of a chunk overflows float32 after one token here: it must not be computed."""
    given = inputs(method, 40, dtype=torch.float32)
    steep = torch.zeros_like(given["gate"])
    steep[:, 5::7] = -200.0
    given["gate"] = steep
    found = chunked_delta_rule(**given)
    assert all(torch.isfinite(t).all() for t in found)
    close(found, gated_delta_rule(**given), 2e-5)


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("gate", [-1e3, -1e6, -3e38, float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_a_state_that_is_forgotten_leaves_the_decays_after_it_exact(
    method: str, dtype: torch.dtype, gate: float
) -> None:
    """Sums of log decays keep no more digits than the largest has, and have none of an infinite one."""
    given = inputs(method, 90, dtype=dtype)
    given["gate"][:, 3::20, ::2] = gate
    leaves = {name: t.requires_grad_() for name, t in given.items()}
    tolerance = 2e-4 if dtype == torch.float32 else 1e-11
    found, right = chunked_delta_rule(**leaves), gated_delta_rule(**leaves)
    close(found, right, tolerance)
    close(*(torch.autograd.grad(o.sin().sum() + s.sum(), list(leaves.values())) for o, s in (found, right)), tolerance)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_those_of_the_recurrence(method: str) -> None:
    given = {name: t.requires_grad_() for name, t in inputs(method, 21).items()}

    def gradients(rule) -> tuple[Tensor, ...]:
        out, state = rule(**given)
        return torch.autograd.grad(out.sin().sum() + state.cos().sum(), list(given.values()))

    right = gradients(gated_delta_rule)
    for chunk in (8, 64):
        found = gradients(lambda **tensors: chunked_delta_rule(**tensors, chunk=chunk))  # noqa: B023
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
