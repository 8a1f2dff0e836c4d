"""What all emulators compute with is what the reference, which knows nothing of it, says."""

from __future__ import annotations

import pytest
import torch

from polyattn.semantics import reference
from polyattn.testing.emulators.arithmetic import band, gradients, lse_of, scores, weighted, weights_of


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("s_q", "s_k"), [(5, 9), (9, 5), (3, 0)])
@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (-1, 1), (3, -1)])
def test_numbers_are_those_of_the_reference(s_q: int, s_k: int, window: tuple[int, int], sinks: bool) -> None:
    random = torch.Generator().manual_seed(7)
    shapes = ((s_q, 4, 8), (s_k, 2, 8), (s_k, 2, 6), (s_q, 4, 6))
    q, k, v, dout = (torch.randn(shape, generator=random) for shape in shapes)
    sink = torch.randn(4, generator=random) if sinks else None
    wide = [t.double()[None].requires_grad_() for t in (q, k, v)]
    right, right_lse = reference.attention(
        *wide, window=window, softcap=1.5, scale=0.7, sinks=None if sink is None else sink.double(), return_lse=True
    )
    s = scores(q, k, 0.7, band(s_q, s_k, *window), 1.5)
    weights = weights_of(s, lse_of(s, sink))
    out = weighted(weights, v)
    close = {"rtol": 1e-5, "atol": 1e-6, "check_dtype": False}
    torch.testing.assert_close(out, right[0].detach(), **close)
    torch.testing.assert_close(lse_of(s), right_lse[0].T.detach(), **close)
    slope = 1 - (s.masked_fill(s == -torch.inf, 0.0) / 1.5).square()
    found = gradients(dout, q, k, v, out, weights, 0.7, slope=slope)
    wanted = torch.autograd.grad(right, wide, dout.double()[None])
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want[0], **close)


def test_a_batch_is_so_many_sequences() -> None:
    q, k, v, dout = (torch.randn(3, n, heads, 8).bfloat16() for n, heads in ((4, 6), (7, 2), (7, 2), (4, 6)))
    s = scores(q, k, 0.5, band(4, 7, 3, 0))
    weights = weights_of(s, lse_of(s))
    out = weighted(weights, v)
    found = gradients(dout, q, k, v, out, weights, 0.5, rounded=torch.bfloat16)
    for n in range(3):
        one = scores(q[n], k[n], 0.5, band(4, 7, 3, 0))
        assert torch.allclose(one, s[n])
        alone = gradients(dout[n], q[n], k[n], v[n], out[n], weights[n], 0.5, rounded=torch.bfloat16)
        for many, single in zip(found, alone, strict=True):
            assert many.dtype == torch.bfloat16
            torch.testing.assert_close(many[n], single)
