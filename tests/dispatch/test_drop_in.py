"""`polyattn.scaled_dot_product_attention` beside torch's own, argument by argument (S3)."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import polyattn

SHAPES = {
    "2-D": ((5, 16), (7, 16), (7, 8)),
    "3-D": ((3, 5, 16), (3, 7, 16), (3, 7, 8)),
    "4-D": ((2, 4, 5, 16), (2, 4, 7, 16), (2, 4, 7, 8)),
    "4-D one batch of keys": ((2, 4, 5, 16), (1, 4, 7, 16), (1, 4, 7, 8)),
    "5-D": ((2, 3, 4, 5, 16), (2, 3, 4, 7, 16), (2, 3, 4, 7, 8)),
}


def inputs(name, dtype=torch.float32):
    torch.manual_seed(len(name))
    return [torch.randn(s, dtype=dtype) for s in SHAPES[name]]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_every_rank(name, options):
    q, k, v = inputs(name)
    wide = (q, k.expand(*q.shape[:-2], *k.shape[-2:]), v.expand(*q.shape[:-2], *v.shape[-2:]))
    want = F.scaled_dot_product_attention(*wide, **options)
    torch.testing.assert_close(polyattn.scaled_dot_product_attention(q, k, v, **options), want)


@pytest.mark.parametrize(
    ("name", "rank"),
    [(name, rank) for name in ("2-D", "3-D", "4-D", "5-D") for rank in (1, 2, 3) if (name, rank) != ("2-D", 3)],
)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_broadcast(name, rank, kind):
    q, k, v = inputs(name)
    lead = q.shape[:-2]
    shape = {1: (7,), 2: (5, 7), 3: (*lead[-1:], 5, 7)}[rank]
    mask = torch.rand(shape) > 0.3
    mask[..., 0] = True
    mask = mask if kind == "bool" else torch.zeros(shape).masked_fill(~mask, -3.0)
    wide = mask.expand(*lead, 5, 7)
    got = polyattn.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, wide))


def test_causal_is_top_left_with_more_keys():
    """S3: the first query sees the first key alone."""
    q, k, v = inputs("4-D")
    out = polyattn.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0])


@pytest.mark.parametrize("backend", ["torch_sdpa", "reference"])
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_a_bias_of_torchs_is_an_alignment(bias, backend):
    """S3: a `CausalBias` holds no numbers, so that read as a mask it would give any result."""
    q, k, v = inputs("4-D")
    want = F.scaled_dot_product_attention(q, k, v, bias(5, 7))
    with polyattn.use_backend(backend):
        torch.testing.assert_close(polyattn.scaled_dot_product_attention(q, k, v, bias(5, 7)), want)
        found = polyattn.explain(polyattn.scaled_dot_product_attention, q, k, v, bias(5, 7))
    assert found.request.causal == ("top_left" if bias is causal_upper_left else "bottom_right")


def test_in_the_place_of_torchs_own():
    """Programs that call torch's function are given this one by putting it there, before anything else is called."""
    program = """
import torch, torch.nn.functional as F, polyattn
q = torch.randn(1, 2, 5, 8)
want = F.scaled_dot_product_attention(q, q, q, is_causal=True)
F.scaled_dot_product_attention = polyattn.scaled_dot_product_attention
torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q, is_causal=True), want)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_gqa_is_asked_for():
    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 7, 16), torch.randn(2, 2, 7, 16)
    want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(polyattn.scaled_dot_product_attention(q, k, v, enable_gqa=True), want)
    with pytest.raises(polyattn.InvalidInputError, match="enable_gqa=True"):
        polyattn.scaled_dot_product_attention(q, k, v)


def test_dropout_is_drawn_like_torchs():
    q, k, v = inputs("4-D")
    torch.manual_seed(7)
    want = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
    torch.manual_seed(7)
    torch.testing.assert_close(polyattn.scaled_dot_product_attention(q, k, v, dropout_p=0.4), want)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k, v: (q, k, v, torch.ones(5, 7, dtype=torch.bool), 0.0, True), "exclude each other"),
        (lambda q, k, v: (q, k, v, torch.ones(5, 6, dtype=torch.bool)), "must broadcast"),
        (lambda q, k, v: (q, k, v, causal_upper_left(5, 7), 0.0, True), "exclude each other"),
        (lambda q, k, v: (q[0, 0, 0], k, v), "2 dimensions or more"),
        (lambda q, k, v: ("q", k, v), "2 dimensions or more"),
        (lambda q, k, v: (q[0, 0, 0], k, v, causal_upper_left(5, 7)), "2 dimensions or more"),
        (lambda q, k, v: (torch.cat([q, q, q]), torch.cat([k, k]), v), "do not broadcast"),
        (lambda q, k, v: (q, k[:, :2], v[:, :2]), "query has 4 heads, key 2; pass enable_gqa=True"),
        (lambda q, k, v: (q, k, v[:, :2]), "query has 4 heads, key 4, value 2; pass enable_gqa=True"),
        (lambda q, k, v: (q, k[:, :3], v[:, :2], None, 0.0, False, None, True), "key has 3 heads, value 2"),
        (lambda q, k, v: (q, k, v, None, 0.0, "no"), "is_causal='no' is a str; it must be True or False"),
        (lambda q, k, v: (q, k, v, None, 0.0, None), "is_causal=None is a NoneType"),
        (lambda q, k, v: (q, k, v, None, 0.0, torch.tensor(True)), "is_causal=tensor.* is a Tensor"),
        (lambda q, k, v: (q, k, v, None, 0.0, False, None, "no"), "enable_gqa='no' is a str; it must be True or"),
        (lambda q, k, v: (q, k, v, None, 1.5), "dropout_p=1.5 must be a probability"),
        (lambda q, k, v: (q, k, v, None, 0.0, False, torch.ones(2)), "scale=tensor.* must be a finite number"),
        (
            lambda q, k, v: (q, k, v, torch.ones(5, 7).to_sparse()),
            "attn_mask is a tensor of layout sparse_coo",
        ),
        (lambda q, k, v: (q.to_sparse(), k, v), r"query is a tensor of layout sparse_coo.* pass query.to_dense\(\)"),
    ],
    ids=[
        *("mask and causal", "mask shape", "bias and causal", "rank", "type", "rank and bias", "batch", "heads"),
        *("heads of value", "heads that differ", "is_causal text", "is_causal None", "is_causal tensor"),
        *("enable_gqa text", "dropout", "scale tensor", "sparse mask", "sparse query"),
    ],
)
def test_refusals(call, message):
    q, k, v = inputs("4-D")
    with pytest.raises(polyattn.InvalidInputError, match=message):
        polyattn.scaled_dot_product_attention(*call(q, k, v))


def test_explain():
    q, k, v = inputs("3-D")
    found = polyattn.explain(polyattn.scaled_dot_product_attention, q, k, v, is_causal=True)
    assert found.backend == "torch_sdpa"
    assert found.request.causal == "top_left"


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((5, 8), (0, 8), (0, 8)),
        ((2, 0, 8), (2, 3, 8), (2, 3, 8)),
        ((1, 5, 8), (0, 3, 8), (1, 3, 8)),
        ((2, 1, 3, 0, 8), (2, 1, 3, 4, 8), (2, 1, 3, 4, 8)),
        ((2, 3, 4, 8), (2, 3, 5, 8), (1, 3, 5, 8)),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_sizes_of_zero_and_one_broadcast_as_in_torch(q, k, v, masked):
    args = [torch.randn(shape) for shape in (q, k, v)]
    mask = torch.ones(q[-2], k[-2], dtype=torch.bool) if masked else None
    lead = torch.broadcast_shapes(q[:-2], k[:-2], v[:-2])
    expected = F.scaled_dot_product_attention(*(t.expand(*lead, *t.shape[-2:]) for t in args), mask)
    out = polyattn.scaled_dot_product_attention(*args, mask)
    assert out.shape == (*lead, q[-2], v[-1])
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("q", "k", "v", "gqa"),
    [
        ((2, 4, 5, 16), (2, 1, 7, 16), (2, 1, 7, 8), False),
        ((2, 4, 5, 16), (2, 4, 7, 16), (2, 1, 7, 8), False),
        ((2, 4, 5, 16), (2, 1, 7, 16), (2, 4, 7, 8), False),
        ((2, 1, 5, 16), (2, 4, 7, 16), (2, 4, 7, 8), False),
        ((2, 1, 5, 16), (1, 1, 7, 16), (2, 4, 7, 8), False),
        ((2, 4, 5, 16), (7, 16), (7, 8), False),
        ((5, 16), (2, 4, 7, 16), (4, 7, 8), False),
        ((2, 4, 5, 16), (4, 7, 16), (1, 1, 7, 8), False),
        ((3, 5, 16), (7, 16), (1, 7, 8), False),
        ((1, 2, 3, 4, 5, 16), (2, 1, 4, 7, 16), (1, 1, 1, 1, 7, 8), False),
        ((2, 4, 5, 16), (2, 2, 7, 16), (2, 1, 7, 8), True),
        ((2, 4, 5, 16), (1, 2, 7, 16), (2, 2, 7, 8), True),
        ((4, 5, 16), (2, 7, 16), (2, 7, 8), True),
        ((3, 2, 4, 5, 16), (3, 1, 2, 7, 16), (1, 2, 2, 7, 8), True),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.arange(7) % 3 > 0}], ids=str)
def test_leading_axes_broadcast_as_in_torch(q, k, v, gqa, options):
    torch.manual_seed(7)
    args = [torch.randn(shape) for shape in (q, k, v)]
    want = F.scaled_dot_product_attention(*args, enable_gqa=gqa, **options)
    got = polyattn.scaled_dot_product_attention(*args, enable_gqa=gqa, **options)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want)
    found = polyattn.explain(polyattn.scaled_dot_product_attention, *args, enable_gqa=gqa, **options)
    assert found.backend == "torch_sdpa"


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("name", ["2-D", "4-D"])
def test_a_last_axis_that_is_not_dense(name, which):
    """torch copies such a tensor, and so does its drop-in; `attention` says that it must be copied (S1)."""
    args = inputs(name)
    want = F.scaled_dot_product_attention(*args)
    for i in which:
        args[i] = args[i].mT.contiguous().mT
    torch.testing.assert_close(polyattn.scaled_dot_product_attention(*args), want)


@pytest.mark.parametrize("one", [1.0, 1, True, torch.tensor(1.0)], ids=str)
def test_dropout_of_everything(one):
    q, k, v = (t.requires_grad_() for t in inputs("4-D"))
    want = F.scaled_dot_product_attention(q, k, v, dropout_p=one)
    got = polyattn.scaled_dot_product_attention(q, k, v, dropout_p=one)
    torch.testing.assert_close(got, want)
    assert not got.any()
    for gradient in torch.autograd.grad(got.sum(), (q, k, v)):
        assert not gradient.any()
    assert polyattn.explain(polyattn.scaled_dot_product_attention, q, k, v, dropout_p=one).backend == "torch_sdpa"


@pytest.mark.parametrize(
    "options",
    [
        {"dropout_p": False},
        {"dropout_p": 0},
        {"dropout_p": torch.tensor(0.0)},
        {"scale": torch.tensor(0.3)},
        {"scale": True},
        {"scale": np.float32(0.5)},
        {"scale": 2},
    ],
    ids=str,
)
def test_numbers_are_read_as_torch_reads_them(options):
    q, k, v = inputs("4-D")
    want = F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(polyattn.scaled_dot_product_attention(q, k, v, **options), want)
    polyattn.explain(polyattn.scaled_dot_product_attention, q, k, v, **options)


@pytest.mark.parametrize("yes", [np.True_, 1], ids=repr)
def test_flags_of_numpy(yes):
    q, k, v = inputs("4-D")
    want = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True)
    got = polyattn.scaled_dot_product_attention(q, k[:, :2], v[:, :2], is_causal=yes, enable_gqa=yes)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("place", range(4))
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_told_where_to_go(layout, place):
    nested = torch.nested.nested_tensor([torch.ones(5, 2, 8), torch.ones(4, 2, 8)], layout=layout)
    args = [torch.ones(2, 5, 2, 8)] * 3 + [None]
    args[place] = nested
    name = ("query", "key", "value", "attn_mask")[place]
    with pytest.raises(polyattn.InvalidInputError, match=f"{name} is a nested tensor; pass packed sequences"):
        polyattn.scaled_dot_product_attention(*args)
