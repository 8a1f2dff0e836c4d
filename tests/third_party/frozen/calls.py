"""What the frozen wheel serves, against the reference: tests for an interpreter that has both of them installed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import polyattn

BACKENDS = ("tinyflash", "reference")
close = torch.testing.assert_close


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def test_choosing_it_needs_no_torch():
    code = (
        "import polyattn, sys\n"
        "asked = polyattn.AttentionRequest(dtype='float32')\n"
        "assert polyattn.explain(asked, backend='tinyflash').backend == 'tinyflash'\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_forward_and_backward_with_all_it_declares(layout):
    made = tensors((2, 70, 4, 40), (2, 130, 2, 40), (2, 130, 2, 24))
    if layout == "BHSD":
        made = [t.detach().transpose(1, 2).requires_grad_() for t in made]
    rules = {"causal": True, "window": (60, 0), "softcap": 20.0, "scale": 0.3, "layout": layout, "return_lse": True}
    found = []
    for backend in BACKENDS:
        out, lse = polyattn.attention(*made, **rules, backend=backend)
        found.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), made)))
    for ours, right in zip(*found, strict=True):
        close(ours, right)


def test_rows_without_keys_and_a_place_for_the_output():
    q, k, v = (t.detach() for t in tensors((1, 9, 2, 16), (1, 4, 2, 16), (1, 4, 2, 16)))
    into = torch.full_like(q, float("nan"))
    out, lse = polyattn.attention(q, k, v, causal=True, return_lse=True, out=into, backend="tinyflash")
    assert out is into
    assert (out[:, :5] == 0).all()
    assert (lse[:, :5] == float("-inf")).all()
    close(out, polyattn.attention(q, k, v, causal=True, backend="reference"))


def test_a_packed_batch_trains():
    starts = torch.tensor([0, 5, 5, 75], dtype=torch.int32)
    lens = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 70, "max_seqlen_k": 70}
    made = tensors((75, 4, 32), (75, 1, 32), (75, 1, 32))
    found = []
    for backend in BACKENDS:
        out = polyattn.varlen_attention(*made, **lens, causal=True, backend=backend)
        found.append((out, *torch.autograd.grad(out.square().sum(), made)))
    for ours, right in zip(*found, strict=True):
        close(ours, right)


def test_parts_merged_by_lse_train_like_the_whole():
    """The backward is given the (out, lse) of the merged result."""
    q, k, v = tensors((1, 33, 2, 16), (1, 90, 2, 16), (1, 90, 2, 16))
    call = polyattn.bind(return_lse=True, backend="tinyflash")
    parts = [call(q, k[:, span], v[:, span]) for span in (slice(0, 37), slice(37, 90))]
    merged, _ = polyattn.merge([out for out, _ in parts], [lse for _, lse in parts])
    whole = polyattn.attention(q, k, v, backend="reference")
    close(merged, whole)
    for ours, right in zip(*(torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (merged, whole)), strict=True):
        close(ours, right)


def test_its_option_the_scopes_and_a_compiled_call_reach_it():
    q, k, v = (t.detach() for t in tensors((1, 33, 2, 16), (1, 90, 2, 16), (1, 90, 2, 16)))
    polyattn.configure(attention_backend="tinyflash", attention_backend_config="threads=1")
    one = polyattn.attention(q, k, v)
    polyattn.configure()
    compiled = torch.compile(lambda q, k, v: polyattn.attention(q, k, v), fullgraph=True, backend="eager")
    with polyattn.use_backend("tinyflash"):
        assert torch.equal(polyattn.attention(q, k, v), one)
        assert torch.equal(compiled(q, k, v), one)


def test_what_it_does_not_declare_is_refused():
    q = torch.randn(1, 3, 1, 8).half()
    with pytest.raises(polyattn.UnsupportedRequestError) as caught:
        polyattn.attention(q, q, q, backend="tinyflash")
    assert caught.value.rejected["tinyflash"] == ["dtype='float16' is not one of float32, bfloat16"]
