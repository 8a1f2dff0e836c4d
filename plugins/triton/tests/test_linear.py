"""Kernels of linear attention against the recurrence that defines it: decode, prompts, drafts, slots, raw gates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.semantics.delta_rule import chunked_delta_rule
from polyattn.semantics.reference import gated_delta_rule
from polyattn_triton.kernels import delta_chunks
from polyattn_triton.kernels.delta_chunks import Cut, chunk_of, prepare, through
from polyattn_triton.kernels.delta_gradients import gradients

from .test_metadata import DEVICE

B, S, H, H_V, D, D_V = 3, 5, 2, 4, 12, 10
LONG = 41
"""Tokens that are taken in chunks: more than one of them, and no whole number."""


def inputs(method: str, S: int = S, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(9)
    gates = (B, S, H_V, D) if method == "kda" else (B, S, H_V)
    drawn = {
        "query": torch.randn(B, S, H, D),
        "key": torch.nn.functional.normalize(torch.randn(B, S, H, D), dim=-1),
        "value": torch.randn(B, S, H_V, D_V),
        "gate": -torch.rand(gates),
        "beta": torch.rand(B, S, H_V),
    }
    return {**{name: tensor.to(DEVICE, dtype) for name, tensor in drawn.items()}, "method": method}


def both(given: dict[str, Any], tolerance: float = 1e-5, **options: Any) -> tuple[Tensor, Tensor]:
    """The kernels' answer, which must be the reference's."""
    found = polyattn.linear_attention(**given, **copied(options), backend="triton")
    right = polyattn.linear_attention(**given, **copied(options), backend="reference")
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    return found


def copied(options: dict[str, Any]) -> dict[str, Any]:
    return {n: o.clone() if isinstance(o, Tensor) else o for n, o in options.items()}


def states(count: int, layout: str = "KV") -> Tensor:
    return torch.randn(count, H_V, *((D, D_V) if layout == "KV" else (D_V, D)), device=DEVICE)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize("method", ["gdn", "kda"])
def test_prompts_and_decode(method: str, layout: str) -> None:
    both(inputs(method), state=states(B, layout), state_layout=layout, scale=0.4)
    both(inputs(method, LONG), state=states(B, layout), state_layout=layout, scale=0.4)
    both(inputs(method, LONG))
    both(inputs(method))
    both(inputs(method, 1), state=states(B, layout), state_layout=layout, qk_norm=True)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("S", [S, LONG])
@pytest.mark.parametrize("method", ["gdn", "kda"])
def test_halves(method: str, S: int, dtype: torch.dtype) -> None:
    out, state = both(
        inputs(method, S, dtype), 2e-2 if S == LONG and dtype == torch.bfloat16 else 8e-3, state=states(B)
    )
    assert (out.dtype, state.dtype) == (dtype, torch.float32)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("bound, beta_range", [(0.0, 1), (-5.0, 2)])
@pytest.mark.parametrize("S", [S, LONG])
@pytest.mark.parametrize("method", ["gdn", "kda"])
def test_raw_gates(method: str, S: int, bound: float, beta_range: int) -> None:
    given = inputs(method, S)
    given["gate"], given["beta"] = torch.randn_like(given["gate"]) * 30, torch.randn_like(given["beta"]) * 30
    bias = torch.randn((H_V, D) if method == "kda" else (H_V,), device=DEVICE)
    learned = {"a_log": torch.rand(H_V, device=DEVICE) - 3, "dt_bias": bias}
    both({**given, **learned}, gate_bound=bound, beta_range=beta_range, qk_norm=True, state=states(B))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("S", [S, LONG])
def test_slots_are_updated_where_they_are(S: int) -> None:
    # Slots of a table lie apart.
    pool, slots = states(5), torch.tensor([[4, 0], [-1, 0], [1, 0]], device=DEVICE)[:, 0]
    given = inputs("gdn", S)
    found, right = pool.clone(), pool.clone()
    out, back = polyattn.linear_attention(**given, state=found, state_slots=slots, backend="triton")
    expected, _ = polyattn.linear_attention(**given, state=right, state_slots=slots, backend="reference")
    assert back is found
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[[0, 2, 3]], pool[[0, 2, 3]])
    assert (out[1] == 0).all()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("method", ["gdn", "kda"])
def test_packed_sequences(method: str) -> None:
    given = inputs(method, LONG)
    flat = {n: t.reshape(1, B * LONG, *t.shape[2:]) if isinstance(t, Tensor) else t for n, t in given.items()}
    cu = torch.tensor([0, 33, 33, 34, 100, B * LONG], dtype=torch.int32, device=DEVICE)
    _, last = both(flat, cu_seqlens=cu, state=(first := states(5)), qk_norm=True)
    assert torch.equal(last[1], first[1])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("trained", [False, True])
def test_lengths_that_are_a_column(trained: bool) -> None:
    flat = {n: t.reshape(1, B * S, *t.shape[2:]) if isinstance(t, Tensor) else t for n, t in inputs("gdn").items()}
    flat["value"].requires_grad_(trained)
    cu = torch.tensor([[0, 7], [4, 9], [B * S, 8]], dtype=torch.int32, device=DEVICE)[:, 0]
    found, expected = (
        polyattn.linear_attention(**flat, cu_seqlens=one, backend="triton") for one in (cu, cu.contiguous())
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize("tree", [False, True])
def test_every_draft_leaves_its_state(tree: bool, layout: str) -> None:
    parents = torch.tensor([[-1, 0, 0, 1, -1], [-1, 0, 1, 2, 3], [-1, -1, 1, 1, 2]], device=DEVICE)
    options = {"parents": parents} if tree else {}
    pool = states(4, layout)
    slots = torch.tensor([2, -1, 0], device=DEVICE)
    both(inputs("gdn"), every_state=True, state=states(B, layout), state_layout=layout, **options)
    out, found = polyattn.linear_attention(
        **inputs("gdn"),
        every_state=True,
        state=pool,
        state_slots=slots,
        state_layout=layout,
        backend="triton",
        **options,
    )
    alone = {n: t[2:] if isinstance(t, Tensor) else t for n, t in inputs("gdn").items()}
    options = {"parents": parents[2:]} if tree else {}
    right = polyattn.linear_attention(
        **alone, every_state=True, state=pool[:1], state_layout=layout, backend="reference", **options
    )
    torch.testing.assert_close((out[2:], found[2:]), right, rtol=1e-5, atol=1e-5)
    assert (out[1] == 0).all()


def differentiated(given: dict[str, Any], state: Tensor, backend: str, **options: Any) -> tuple[Tensor, ...]:
    leaves = [state, *(t for t in given.values() if isinstance(t, Tensor))]
    out, last = polyattn.linear_attention(**given, state=state, backend=backend, **options)
    return torch.autograd.grad(out.float().sin().sum() + last.cos().sum(), leaves)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("S", [S, LONG])
@pytest.mark.parametrize("method", ["gdn", "kda"])
def test_gradients(method: str, S: int) -> None:
    given = {n: t.requires_grad_() if isinstance(t, Tensor) else t for n, t in inputs(method, S).items()}
    state = states(B, "VK").requires_grad_()
    found, right = (differentiated(given, state, name, state_layout="VK") for name in ("triton", "reference"))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["gdn", "kda"])
def test_gradients_of_packed_sequences(method: str, dtype: torch.dtype) -> None:
    """Of zero betas and of channels that decay at once as well."""
    drawn = {n: t for n, t in inputs(method, LONG, dtype).items() if isinstance(t, Tensor)}
    drawn["beta"][:, ::3] = 0
    drawn["gate"][:, ::5] *= 200
    given = {n: t.reshape(1, B * LONG, *t.shape[2:]).requires_grad_() for n, t in drawn.items()}
    cu = torch.tensor([0, 33, 33, 34, 100, B * LONG], dtype=torch.int32, device=DEVICE)
    state, options = states(5).requires_grad_(), {"method": method, "cu_seqlens": cu, "scale": 0.5}
    found, right = (differentiated(given, state, name, **options) for name in ("triton", "reference"))
    assert [t.dtype for t in found] == [t.dtype for t in right]
    for one, other in zip(found, right, strict=True):
        assert (one - other).float().norm() <= (1e-4 if dtype == torch.float32 else 2e-2) * other.float().norm()


def test_strided_rows_and_widths_of_one() -> None:
    given = inputs("gdn")
    wide = torch.randn(B, S, H, 2 * D + 3, device=DEVICE)
    given["query"], given["key"] = (
        wide[..., 1 : D + 1],
        torch.nn.functional.normalize(wide[..., D + 2 : 2 * D + 2], dim=-1),
    )
    given["value"] = given["value"].transpose(1, 2).contiguous().transpose(1, 2)
    both(given)
    both({**given, "value": given["value"][..., :1], "query": given["query"][..., :1], "key": given["key"][..., :1]})


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("method", ["gdn", "kda"])
def test_chunks_are_the_recurrence_however_fast_channels_decay(method: str, chunk: int) -> None:
    """Some decay by e^-300 a token, others not at all: to the rounding of sums of such exponents in float32."""
    given = {n: t for n, t in inputs(method, 70).items() if isinstance(t, Tensor)}
    given["gate"] = torch.where(torch.rand_like(given["gate"]) < 0.3, 300 * given["gate"], 0.1 * given["gate"])
    given["gate"][:, 40:] *= 0
    given["beta"][:, ::3] = 0
    first = states(B)
    query, key, value, gate, beta = given.values()
    made = prepare(query, key, gate, beta, scale=0.3, chunk=chunk)
    out, last = torch.full_like(value, float("nan")), torch.full_like(first, float("nan"))
    through(query, key, value, first, made, scale=0.3, turned=False, out=out, last=last)
    wide = {n: t.double() for n, t in given.items()}
    right = gated_delta_rule(**wide, state=first.double(), scale=0.3)
    for one, other in zip((out, last), right, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("method", ["gdn", "kda"])
def test_a_state_that_is_forgotten_leaves_the_decays_after_it_exact(method: str) -> None:
    given = inputs(method, LONG)
    given["gate"][:, 3::20, ::2] = float("-inf")
    given["gate"][:, 6::20, 1::2] = -1e6
    leaves = [tensor.requires_grad_() for tensor in given.values() if isinstance(tensor, Tensor)]
    out, last = both(given)
    right = polyattn.linear_attention(**given, backend="reference")
    found, wanted = (torch.autograd.grad(o.sum() + s.sum(), leaves) for o, s in ((out, last), right))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    given["gate"] = given["gate"].detach().clone()
    given["gate"][:, 5] = float("nan")
    assert polyattn.linear_attention(**given, backend="triton")[1].isnan().all()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("cut", [Cut(16, 4, 3), Cut(32, 4, 3), Cut(64, 4, 2), Cut(32, 4, 2), Cut(64, 8, 2)])
@pytest.mark.parametrize("method", ["gdn", "kda"])
def test_however_a_state_is_cut_its_columns_are_the_same(method: str, cut: Cut) -> None:
    """In halves, whose products are other instructions for each width, and of widths that fill a tile."""
    torch.manual_seed(3)
    query, key = (torch.nn.functional.normalize(torch.randn(1, 90, 1, 128), dim=-1) for _ in range(2))
    gate = -torch.rand((1, 90, 2, 128) if method == "kda" else (1, 90, 2)).to(DEVICE)
    drawn = (query, key, torch.randn(1, 90, 2, 128), torch.rand(1, 90, 2))
    query, key, value, beta = (t.to(DEVICE, torch.bfloat16) for t in drawn)
    first = torch.randn(1, 2, 128, 128, device=DEVICE)
    made = prepare(query, key, gate, beta, scale=0.3, chunk=chunk_of(query))
    given = {"scale": 0.3, "turned": False, "cut": cut}
    out, last = torch.full_like(value, float("nan")), torch.full_like(first, float("nan"))
    through(query, key, value, first, made, out=out, last=last, **given)
    changes = gradients(value, first, query, key, value, gate, beta, first, made, collect=Cut(64, 4, 2), **given)
    leaves = [t.double().requires_grad_() for t in (query, key, value, gate, beta, first)]
    q, k, v, g, b, s = leaves
    right = chunked_delta_rule(q, k, v, gate=g, beta=b, state=s, scale=0.3)
    wanted = torch.autograd.grad(right, leaves, (value.double(), first.double()))
    for one, other in zip((out, last, *changes), (*right, *wanted), strict=True):
        assert (one - other).norm() <= 8e-3 * other.norm()


def test_no_tokens_keep_the_state() -> None:
    first = states(B)
    out, last = polyattn.linear_attention(**inputs("gdn", 0), state=first, backend="triton")
    assert out.shape == (B, 0, H_V, D_V)
    assert torch.equal(last, first)


@pytest.mark.parametrize("method", ["gdn", "kda"])
def test_no_sequences_have_gradients_too(method: str) -> None:
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    given = {n: t[:1] if isinstance(t, Tensor) else t for n, t in inputs(method, 0).items()}
    leaves = [tensor.requires_grad_() for tensor in given.values() if isinstance(tensor, Tensor)]
    out, last = polyattn.linear_attention(**given, cu_seqlens=none, backend="triton")
    assert (out.shape, last.shape) == ((1, 0, H_V, D_V), (0, H_V, D, D_V))
    assert all(not grad.numel() for grad in torch.autograd.grad(out.sum() + last.sum(), leaves))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_that_go_by_way_of_registers_are_multiplied_without_descriptors(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper alone; what compilers make of it, `test_launched_offline` sees."""
    rows, cut = torch.zeros(2, 80, 2, 64, dtype=dtype), Cut(64, 4, 2)
    loose = torch.zeros(rows.numel() + 1, dtype=dtype)[1:].view(rows.shape)
    assert delta_chunks.narrowed(cut, rows, loose, D_V=24) == cut
    monkeypatch.setattr(delta_chunks, "architecture", lambda device: "hopper")
    assert delta_chunks.narrowed(cut, rows, rows, D_V=24) == cut
    assert delta_chunks.narrowed(cut, rows.float(), loose.float(), D_V=24) == cut, "no tensor core takes float32"
    assert delta_chunks.narrowed(cut, rows, loose, D_V=24) == Cut(32, 2, 2)
    assert delta_chunks.narrowed(cut, loose, rows).warps == 2
    assert delta_chunks.narrowed(cut, rows, rows, D_V=511).warps == 2
    assert delta_chunks.narrowed(cut, rows, rows, D_V=24, held=True).warps == 2
    assert delta_chunks.narrowed(cut, rows[..., :48], rows).warps == 4
    assert delta_chunks.narrowed(cut, rows[..., :43], rows).warps == 2
