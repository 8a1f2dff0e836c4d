"""`bind_part`: parts of the keys, merged, equal one call over all of them, forward and backward."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import polyattn
from polyattn.contract import AttentionRequest
from polyattn.errors import InvalidInputError, PluginError, UnsupportedRequestError
from polyattn.semantics.autograd import recomputed_backward
from polyattn.semantics.reference import attention as definition

B, S, H, G, D = 2, 48, 4, 2, 16
CUT = 20


def tensors(dtype: torch.dtype, layout: str = "BSHD", s_q: int = S, s_k: int = S) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((B, s_q, H, D), (B, s_k, G, D), (B, s_k, G, 8), (B, s_q, H, 8))
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [t.transpose(1, 2).contiguous() if layout == "BHSD" else t for t in made]


def expected(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> tuple[Any, ...]:
    """(out, dq, dk, dv) by the definition in float64."""
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out = definition(*leaves, **options)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout.double()))


def close(found: torch.Tensor, right: torch.Tensor) -> None:
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2}[found.dtype]
    torch.testing.assert_close(found.double(), right, atol=tolerance, rtol=tolerance)


def both(parts: Any, q: Any, dout: Any, keys: Any, layout: str, masks: Any = (None, None)) -> tuple[Any, ...]:
    """(out, dq, dk, dv) of two parts."""
    pairs = [part.forward(q, k, v, attn_mask=m) for part, (k, v), m in zip(parts, keys, masks, strict=True)]
    assert not any(t.requires_grad for pair in pairs for t in pair)
    out, lse = polyattn.merge(*zip(*pairs, strict=True), layout=layout)
    grads = [
        part.backward(dout, q, k, v, out, lse, attn_mask=m) for part, (k, v), m in zip(parts, keys, masks, strict=True)
    ]
    s = 1 if layout == "BSHD" else 2
    dq = grads[0][0] + grads[1][0]
    return out, dq, *(torch.cat([grads[0][i], grads[1][i]], s) for i in (1, 2))


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [None, "reference", "torch_native"])
def test_two_halves_of_the_keys_equal_one_call(backend: str | None, dtype: torch.dtype, layout: str) -> None:
    q, k, v, dout = tensors(dtype, layout)
    s = 1 if layout == "BSHD" else 2
    keys = [(k.narrow(s, a, n), v.narrow(s, a, n)) for a, n in ((0, CUT), (CUT, S - CUT))]
    part = polyattn.bind_part(layout=layout, backend=backend)
    for found, right in zip(
        both((part, part), q, dout, keys, layout), expected(q, k, v, dout, layout=layout), strict=True
    ):
        close(found, right)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_causal_call_is_a_part_of_the_past_and_a_part_of_the_present(backend: str | None) -> None:
    q, k, v, dout = tensors(torch.float32)
    keys = [(k[:, :CUT], v[:, :CUT]), (k[:, CUT:], v[:, CUT:])]
    # The first rows see no later key: their LSE in the second part is -inf.
    past = polyattn.bind_part(causal="top_left", backend=backend)
    present = polyattn.bind_part(causal=True, backend=backend)
    assert bool((present.forward(q, *keys[1])[1][:, :CUT] == float("-inf")).all())
    for found, right in zip(
        both((past, present), q, dout, keys, "BSHD"), expected(q, k, v, dout, causal=True), strict=True
    ):
        close(found, right)


def test_a_mask_is_cut_with_the_keys() -> None:
    q, k, v, dout = tensors(torch.float32)
    mask = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(1)) > 0.4
    keys = [(k[:, :CUT], v[:, :CUT]), (k[:, CUT:], v[:, CUT:])]
    part = polyattn.bind_part()
    found = both((part, part), q, dout, keys, "BSHD", (mask[..., :CUT], mask[..., CUT:]))
    for one, right in zip(found, expected(q, k, v, dout, attn_mask=mask), strict=True):
        close(one, right)


def test_an_empty_part_changes_nothing() -> None:
    q, k, v, dout = tensors(torch.float32)
    part = polyattn.bind_part()
    pairs = [part.forward(q, k, v), part.forward(q, k[:, :0], v[:, :0])]
    out, lse = polyattn.merge(*zip(*pairs, strict=True))
    close(out, expected(q, k, v, dout)[0])
    dq, dk, dv = part.backward(dout, q, k[:, :0], v[:, :0], out, lse)
    assert not dq.any()
    assert dk.shape == k[:, :0].shape
    assert dv.shape == v[:, :0].shape


@pytest.mark.parametrize("backend", [None, "reference"])
def test_packed_parts(backend: str | None) -> None:
    generator = torch.Generator().manual_seed(5)
    q_lens, k_lens = (7, 12), (9, 16)
    q, k, v, dout = (
        torch.randn(n, h, d, generator=generator)
        for n, h, d in ((sum(q_lens), H, D), (sum(k_lens), G, D), (sum(k_lens), G, D), (sum(q_lens), H, D))
    )
    cu_q, cu_k = torch.tensor([0, 7, 19], dtype=torch.int32), torch.tensor([0, 9, 25], dtype=torch.int32)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    whole = polyattn.varlen_attention(
        *leaves, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=12, max_seqlen_k=16, backend="reference"
    )
    right = (whole.detach(), *torch.autograd.grad(whole, leaves, dout.double()))

    # Every sequence is cut after its fourth key.
    spans = (((0, 4), (9, 13)), ((4, 9), (13, 25)))
    rows = [torch.cat([torch.arange(*span) for span in part]) for part in spans]
    cus = [torch.tensor([0, 4, 8], dtype=torch.int32), torch.tensor([0, 5, 17], dtype=torch.int32)]
    part = polyattn.bind_part(layout="THD", backend=backend)
    lens = [
        {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu, "max_seqlen_q": 12, "max_seqlen_k": n}
        for cu, n in zip(cus, (4, 12), strict=True)
    ]
    pairs = [part.forward(q, k[row], v[row], **one) for row, one in zip(rows, lens, strict=True)]
    out, lse = polyattn.merge(*zip(*pairs, strict=True), layout="THD")
    close(out, right[0])
    grads = [part.backward(dout, q, k[row], v[row], out, lse, **one) for row, one in zip(rows, lens, strict=True)]
    close(grads[0][0] + grads[1][0], right[1])
    for i, whole_grad in ((1, right[2]), (2, right[3])):
        for row, grad in zip(rows, grads, strict=True):
            close(grad[i], whole_grad[row])


def test_the_backward_of_a_part_takes_the_merged_result_and_not_its_own() -> None:
    q, k, v, dout = tensors(torch.float64)
    part = polyattn.bind_part()
    own = part.forward(q, k[:, :CUT], v[:, :CUT])
    alone = part.backward(dout, q, k[:, :CUT], v[:, :CUT], *own)
    out, lse = polyattn.merge(*zip(own, part.forward(q, k[:, CUT:], v[:, CUT:]), strict=True))
    share = part.backward(dout, q, k[:, :CUT], v[:, :CUT], out, lse)
    close(alone[2], expected(q, k[:, :CUT], v[:, :CUT], dout)[3])
    assert not torch.allclose(alone[2], share[2])


def test_sinks_come_in_with_the_last_merge() -> None:
    q, k, v, dout = tensors(torch.float64)
    sinks = torch.linspace(-1, 2, H, dtype=torch.float64)
    keys = [(k[:, :CUT], v[:, :CUT]), (k[:, CUT:], v[:, CUT:])]
    part = polyattn.bind_part()
    pairs = [part.forward(q, *pair) for pair in keys]
    out, lse = polyattn.merge(*zip(*pairs, strict=True), sinks=sinks)
    total = torch.logaddexp(lse, sinks)
    grads = [part.backward(dout, q, *pair, out, total) for pair in keys]
    right = expected(q, k, v, dout, sinks=sinks)
    close(out, right[0])
    close(grads[0][0] + grads[1][0], right[1])
    close(torch.cat([grads[0][1], grads[1][1]], 1), right[2])


def test_a_part_is_chosen_as_a_call_with_an_lse_and_gradients() -> None:
    q, k, v, _ = tensors(torch.float32)
    selection = polyattn.explain(polyattn.bind_part(causal=True), q, k, v)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    call = polyattn.explain(polyattn.attention, *leaves, causal=True, return_lse=True)
    assert (selection.backend, selection.request) == (call.backend, call.request)
    forward = polyattn.explain(polyattn.bind_part(causal=True, backward=False), q, k, v)
    assert forward.request.lse
    assert not forward.request.grad


def test_a_part_looks_its_kernel_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyattn.dispatch import part as module

    asked: list[AttentionRequest] = []
    choose: Callable[..., Any] = module.choose
    monkeypatch.setattr(
        module, "choose", lambda request, *rest, **kw: asked.append(request) or choose(request, *rest, **kw)
    )
    q, k, v, dout = tensors(torch.float32)
    part = polyattn.bind_part()
    for keys in (S, 33, 12):
        out, lse = part.forward(q[:, :5], k[:, :keys], v[:, :keys])
        part.backward(dout[:, :5], q[:, :5], k[:, :keys], v[:, :keys], out, lse)
    assert len(asked) == 1


def test_autocast_reaches_a_part_and_gradients_keep_the_dtypes_of_inputs() -> None:
    q, k, v, dout = tensors(torch.float32)
    part = polyattn.bind_part()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = part.forward(q, k, v)
        grads = part.backward(dout.bfloat16(), q, k, v, out, lse)
    assert out.dtype == torch.bfloat16
    assert {grad.dtype for grad in grads} == {torch.float32}
    torch.testing.assert_close(grads[2].double(), expected(q, k, v, dout)[3], atol=4e-2, rtol=4e-2)


def test_a_part_survives_pickle() -> None:
    q, k, v, _ = tensors(torch.float32)
    part = polyattn.bind_part(causal=True, backend="reference")
    again = pickle.loads(pickle.dumps(part))
    assert torch.equal(part.forward(q, k, v)[0], again.forward(q, k, v)[0])
    assert again.static == part.static


def test_a_part_works_beside_compiled_code() -> None:
    q, k, v, _ = tensors(torch.float32)
    part = polyattn.bind_part()

    def step(q: Any, k: Any, v: Any) -> Any:
        out, lse = part.forward(q * 1.0, k, v)
        return out + 1.0, lse

    out, lse = torch.compile(step, backend="eager")(q, k, v)
    right = part.forward(q, k, v)
    torch.testing.assert_close(out, right[0] + 1.0)
    torch.testing.assert_close(lse, right[1])


def test_a_kernel_with_a_backward_needs_no_gradient_through_the_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody gives one, the gradients of query, key and value are asked for alone."""
    from polyattn.dispatch import part as module

    choose: Callable[..., Any] = module.choose

    def refusing(request: AttentionRequest, *rest: Any, **kw: Any) -> Any:
        if "lse" in request.grad:
            raise UnsupportedRequestError("no gradient through an LSE here", {})
        return choose(request, *rest, **kw)

    monkeypatch.setattr(module, "choose", refusing)
    q, k, v, dout = tensors(torch.float32)
    part = polyattn.bind_part(backend="torch_sdpa")
    out, lse = part.forward(q, k, v)
    for found, right in zip(part.backward(dout, q, k, v, out, lse), expected(q, k, v, dout)[1:], strict=True):
        close(found, right)
    with pytest.raises(UnsupportedRequestError, match="no gradient through an LSE here"):
        polyattn.bind_part(backend="reference").forward(q, k, v)


def test_an_lse_without_a_gradient_is_told() -> None:
    def forward(q: Any, k: Any, v: Any, **given: Any) -> Any:
        out, lse = definition(q, k, v, return_lse=True)
        return out, lse.detach()

    q, k, v, dout = tensors(torch.float64)
    out, lse = definition(q, k, v, return_lse=True)
    with pytest.raises(PluginError, match="declares grad lse"):
        recomputed_backward(forward)(dout, q, k, v, out, lse)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lse": lambda lse: lse.to(torch.bfloat16)}, "lse is torch.bfloat16"),
        ({"lse": lambda lse: lse.transpose(1, 2)}, r"lse is torch.float32 \[2, 4, 48\]"),
        ({"out": lambda out: out[..., :4]}, r"out is torch.float32 \[2, 48, 4, 4\]"),
        ({"dout": lambda dout: dout.double()}, "dout is torch.float64"),
        ({"dout": lambda dout: None}, "dout"),
    ],
)
def test_what_does_not_fit_is_told(change: Any, says: str) -> None:
    q, k, v, dout = tensors(torch.float32)
    part = polyattn.bind_part()
    out, lse = part.forward(q, k, v)
    given = {"dout": dout, "out": out, "lse": lse}
    given = {name: change[name](t) if name in change else t for name, t in given.items()}
    with pytest.raises(InvalidInputError, match=says):
        part.backward(given["dout"], q, k, v, given["out"], given["lse"])


def test_what_a_part_refuses() -> None:
    q, k, v, dout = tensors(torch.float32)
    part = polyattn.bind_part(backward=False)
    out, lse = part.forward(q, k, v)
    with pytest.raises(InvalidInputError, match="bound with backward=False"):
        part.backward(dout, q, k, v, out, lse)
    with pytest.raises(InvalidInputError, match="max_seqlen_k are given to a part with layout='BSHD'"):
        part.forward(q, k, v, max_seqlen_k=7)
    with pytest.raises(InvalidInputError, match="cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k are missing"):
        polyattn.bind_part(layout="THD").forward(q[0], k[0], v[0])
    with pytest.raises(InvalidInputError, match="layout"):
        polyattn.bind_part(layout="SBHD")
    with pytest.raises(InvalidInputError, match="backward"):
        polyattn.bind_part(backward="yes")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="key has 3 heads, value 2"):
        part.forward(q, k[:, :, :1].expand(-1, -1, 3, -1), v)


def test_a_part_whose_segments_meet_nothing_changes_nothing() -> None:
    q, k, v, dout = tensors(torch.float32)
    part = polyattn.bind_part()
    ones, twos = (torch.full((B, S), n, dtype=torch.int32) for n in (1, 2))
    pairs = [part.forward(q, k, v), part.forward(q, k, v, segments=(ones, twos))]
    out, lse = polyattn.merge(*zip(*pairs, strict=True))
    close(out, expected(q, k, v, dout)[0])
    assert not any(grad.any() for grad in part.backward(dout, q, k, v, out, lse, segments=(ones, twos)))


def test_a_part_in_the_body_of_a_custom_op_has_its_gradients() -> None:
    """Such a body runs below autograd, where a backward that runs the forward again must record it all the same."""
    q, k, v, dout = tensors(torch.float32)
    part = polyattn.bind_part()
    documents = torch.zeros(B, S, dtype=torch.int32)
    segments = (documents, documents.clone())
    out, lse = part.forward(q, k, v, segments=segments)

    @torch.library.custom_op("tests::part_backward", mutates_args=())
    def backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        return list(part.backward(dout, q, k, v, out, lse, segments=segments))

    for found, right in zip(backward(dout, q, k, v), expected(q, k, v, dout)[1:], strict=True):
        close(found, right)
