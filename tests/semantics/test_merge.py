"""`merge`: any split of the keys, in any order and grouping, gives the result over all keys, gradients included."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyattn.errors import InvalidInputError
from polyattn.semantics.merge_lse import merge, merge_rows
from polyattn.semantics.reference import attention

F64 = torch.float64
B, S_Q, S_K, H_Q, H_KV, D, D_V = 2, 3, 7, 4, 2, 3, 5


def tensors(seed=0, S_q=S_Q, dtype=F64):
    gen = torch.Generator().manual_seed(seed)
    shapes = [(B, S_q, H_Q, D), (B, S_K, H_KV, D), (B, S_K, H_KV, D_V)]
    return [torch.randn(s, generator=gen, dtype=F64).to(dtype) for s in shapes]


def partials(q, k, v, cuts, attn_mask=None, **options):
    """[(out, lse)] over the pieces of the keys between the cuts."""
    bounds = [0, *sorted(cuts), S_K]
    found = []
    for a, b in pairwise(bounds):
        mask = None if attn_mask is None else attn_mask[..., a:b]
        found.append(attention(q, k[:, a:b], v[:, a:b], attn_mask=mask, return_lse=True, **options))
    return found


def merged(parts, **options):
    return merge([out for out, _ in parts], [lse for _, lse in parts], **options)


def equal(got, want, tol=1e-12):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 20),
    cuts=st.lists(st.integers(0, S_K), max_size=4),
    data=st.data(),
    spread=st.sampled_from([1.0, 30.0, 300.0]),
)
def test_s6_any_split_order_and_grouping_is_one_shot(seed, cuts, data, spread):
    q, k, v = tensors(seed)
    q = q * spread
    mask = torch.rand(1, H_Q, S_Q, S_K, generator=torch.Generator().manual_seed(seed)) < 0.7
    mask[:, :, 1] = False
    want = attention(q, k, v, attn_mask=mask, return_lse=True)
    parts = data.draw(st.permutations(partials(q, k, v, cuts, attn_mask=mask)))
    equal(merged(parts), want)
    while len(parts) > 1:
        at = data.draw(st.integers(0, len(parts) - 2))
        parts[at : at + 2] = [merged(parts[at : at + 2])]
    equal(parts[0], want)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(values=st.lists(st.tuples(st.floats(-500, 500), st.floats(-9, 9)), min_size=3, max_size=3))
def test_s6_merge_is_associative_and_commutative(values):
    parts = [(torch.full((1, 1, 1), o, dtype=F64), torch.full((1, 1), s, dtype=F64)) for s, o in values]
    a, b, c = parts
    together = merged(parts)
    equal(merged([merged([a, b]), c]), together)
    equal(merged([a, merged([b, c])]), together)
    equal(merged([c, a, b]), together)


def test_s6_the_identity_is_an_empty_part_whatever_it_holds():
    part = attention(*tensors(), return_lse=True)
    nothing = (torch.full_like(part[0], math.nan), torch.full_like(part[1], -math.inf))
    equal(merged([part, nothing]), part, tol=0)
    equal(merged([nothing, part]), part, tol=0)
    equal(merged([part]), part, tol=0)


def test_s7_all_parts_empty():
    outs = [torch.full((2, 3, 4, 5), math.nan).requires_grad_() for _ in range(2)]
    lses = [torch.full((2, 3, 4), -math.inf).requires_grad_() for _ in range(2)]
    sinks = torch.zeros(4, requires_grad=True)
    out, lse = merge(outs, lses, sinks=sinks)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))
    (out.sum() + lse.exp().sum()).backward()
    for tensor in (*outs, *lses, sinks):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


@pytest.mark.parametrize("layout", ["BSHD", "BHSD", "THD", "packed"])
def test_s5_sinks_are_applied_once_after_the_merge(layout):
    q, k, v = tensors()
    sinks = torch.tensor([0.5, -1.0, 6.0, 2.0], dtype=F64)
    want, plain_lse = attention(q, k, v, sinks=sinks, return_lse=True)
    parts = partials(q, k, v, [2, 5])
    if layout == "BHSD":
        parts = [(out.transpose(1, 2), lse.transpose(1, 2)) for out, lse in parts]
        want, plain_lse = want.transpose(1, 2), plain_lse.transpose(1, 2)
    elif layout in ("THD", "packed"):
        parts = [(out.flatten(0, 1), lse.flatten(0, 1)) for out, lse in parts]
        want, plain_lse = want.flatten(0, 1), plain_lse.flatten(0, 1)
    out, lse = merged(parts, sinks=sinks, layout="BSHD" if layout == "packed" else layout)
    equal((out, lse), (want, plain_lse))
    early = [merged(parts[:2], sinks=sinks, layout="BHSD" if layout == "BHSD" else "BSHD"), parts[2]]
    twice, _ = merged(early, sinks=sinks, layout="BHSD" if layout == "BHSD" else "BSHD")
    assert (twice - want).norm() / want.norm() > 0.05


def test_s5_a_sink_far_above_or_below():
    q, k, v = (t.float() for t in tensors())
    parts = partials(q, k, v, [3])
    plain, _ = merged(parts)
    assert torch.equal(merged(parts, sinks=torch.full((H_Q,), -math.inf))[0], plain)
    assert torch.equal(merged(parts, sinks=torch.full((H_Q,), 1e5))[0], torch.zeros_like(plain))
    want = attention(q, k, v, sinks=torch.full((H_Q,), 30.0))
    torch.testing.assert_close(merged(parts, sinks=torch.full((H_Q,), 30.0))[0], want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_s6_arithmetic_is_fp32_and_the_dtype_is_that_of_the_first_part(dtype):
    q, k, v = tensors(dtype=dtype)
    out, lse = merged(partials(q, k, v, [2, 4]))
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    want = attention(*(t.double() for t in (q, k, v)))
    bound = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-6}[dtype]
    assert (out.double() - want).norm() / want.norm() < bound


@pytest.mark.parametrize("sinks", [None, "sinks"])
def test_s6_gradients_through_split_keys_equal_the_dense_ones(sinks):
    leaves = [t.requires_grad_() for t in tensors(S_q=S_K)]
    if sinks:
        leaves.append(torch.randn(H_Q, dtype=F64, requires_grad=True))
    q, k, v, *sink = leaves
    sink = sink[0] if sink else None
    causal = torch.ones(S_K, S_K, dtype=torch.bool).tril()[None, None]
    dense = attention(q, k, v, attn_mask=causal, sinks=sink, softcap=3.0, return_lse=True)
    parts = partials(q, k, v, [2, 5], attn_mask=causal, softcap=3.0)
    split = merged([merged(parts[1:]), parts[0]], sinks=sink)
    equal(split, dense)
    dout, dlse = torch.randn_like(dense[0]), torch.randn_like(dense[1])
    want = torch.autograd.grad(dense, leaves, (dout, dlse))
    got = torch.autograd.grad(split, leaves, (dout, dlse))
    equal(got, want, tol=1e-11)


def test_s6_gradcheck():
    outs = [torch.randn(2, 3, 2, 2, dtype=F64, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(2, 3, 2, dtype=F64, requires_grad=True) for _ in range(3)]
    sinks = torch.randn(2, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *t: merge(t[:3], t[3:6], sinks=t[6]), (*outs, *lses, sinks))


def test_s6_a_detached_lse_loses_half_of_the_gradient_and_is_refused(record_property):
    gen = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(4, 8, 2, 16, generator=gen, dtype=F64).requires_grad_() for _ in range(4))
    want = torch.autograd.grad(attention(q, k, v), (q, k, v), dout)
    outs, lses = zip(*[attention(q, k[:, h], v[:, h], return_lse=True) for h in (slice(4), slice(4, 8))], strict=True)
    detached = [lse.detach() for lse in lses]

    def error(lses):
        """Relative errors of dQ, dK, dV when the halves are merged with these LSEs, without `merge`'s check."""
        whole = torch.logsumexp(torch.stack(lses), 0)
        out = sum(out * (lse - whole).exp().unsqueeze(-1) for out, lse in zip(outs, lses, strict=True))
        torch.testing.assert_close(out, attention(q, k, v))
        got = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        return [((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]

    right, wrong = error(list(lses)), error(detached)
    record_property("relative error of dQ, dK, dV with a detached LSE", wrong)
    assert max(right) < 1e-12
    # The output is right, dV is right, and dQ and dK are off by half (0.47 and 0.55): nothing else would show it.
    assert wrong == pytest.approx([0.470, 0.546, 0.0], abs=1e-3)

    with pytest.raises(InvalidInputError, match=r"outs\[1\] requires a gradient but lses\[1\] does not.*Use a backend"):
        merge(outs, [lses[0], detached[1]])
    got = torch.autograd.grad(merge(outs, lses)[0], (q, k, v), dout)
    equal(got, want)
    with torch.no_grad():
        merge(outs, detached)
    equal(merge([out.detach() for out in outs], detached), attention(q, k, v, return_lse=True))


def test_merge_compiles_without_a_graph_break():
    parts = partials(*tensors(), [3])
    sinks = torch.zeros(H_Q, dtype=F64)
    traced = torch.compile(lambda outs, lses: merge(outs, lses, sinks=sinks), fullgraph=True, backend="aot_eager")
    outs = [out.requires_grad_() for out, _ in parts]
    lses = [lse.requires_grad_() for _, lse in parts]
    got, want = traced(outs, lses), merge(outs, lses, sinks=sinks)
    equal(got, want)
    equal(torch.autograd.grad(got[0].sum(), outs + lses), torch.autograd.grad(want[0].sum(), outs + lses))


def part(shape=(2, 3, 4, 5), lse_shape=(2, 3, 4), dtype=torch.float32, lse_dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(lse_shape, dtype=lse_dtype, device=device)


GOOD = part()
BAD = {
    "nothing": ([], [], {}, r"no partial results; pass at least one"),
    "counts": ([GOOD[0]], [GOOD[1]] * 2, {}, r"1 outs and 2 lses; pass one lse for each out"),
    "out shapes": (
        [GOOD[0], part((2, 3, 4, 6))[0]],
        [GOOD[1]] * 2,
        {},
        r"outs\[1\] has shape \[2, 3, 4, 6\], outs\[0\] \[2, 3, 4, 5\]",
    ),
    "lse shape": (
        [GOOD[0]],
        [part(lse_shape=(2, 4, 3))[1]],
        {},
        r"lses\[0\] has shape \[2, 4, 3\]; it must be \[2, 3, 4\].*transpose",
    ),
    "rank": ([torch.zeros(5)], [torch.zeros(())], {}, r"outs\[0\] has shape \[5\]; layout BSHD needs at least 2 axes"),
    "rank of BHSD": ([torch.zeros(4, 5)], [torch.zeros(4)], {"layout": "BHSD"}, r"layout BHSD needs at least 3 axes"),
    "out dtype": ([part(dtype=torch.int32)[0]], [GOOD[1]], {}, r"outs\[0\] has dtype torch.int32; pass float outputs"),
    "lse dtype": (
        [GOOD[0]],
        [part(lse_dtype=torch.bfloat16)[1]],
        {},
        r"lses\[0\] has dtype torch.bfloat16; an LSE is float32 or float64.*ask the kernel for float32",
    ),
    "devices": ([GOOD[0]], [part(device="meta")[1]], {}, r"outs\[0\] is on cpu, lses\[0\] on meta.*move them together"),
    "sinks shape": (
        [GOOD[0]],
        [GOOD[1]],
        {"sinks": torch.zeros(3)},
        r"sinks has shape \[3\]; outs have 4 heads.*\[4\]",
    ),
    "sinks of BHSD": (
        [GOOD[0]],
        [GOOD[1]],
        {"sinks": torch.zeros(4), "layout": "BHSD"},
        r"outs have 3 heads in layout BHSD: pass \[3\], one for each row, \[2, 3, 4\], or the layout",
    ),
    "sinks dtype": (
        [GOOD[0]],
        [GOOD[1]],
        {"sinks": torch.zeros(4, dtype=torch.int64)},
        r"sinks has dtype torch.int64.*pass a float dtype",
    ),
    "sinks device": (
        [GOOD[0]],
        [GOOD[1]],
        {"sinks": torch.zeros(4, device="meta")},
        r"sinks is on meta, outs\[0\] on cpu; move them together",
    ),
    "no lists": (None, None, {}, "^outs is None; a sequence of tensors is needed, one for each part"),
    "no list of lses": ([GOOD[0]], 3, {}, "^lses is 3; a sequence of tensors is needed"),
    "an array": ([GOOD[0].numpy()], [GOOD[1]], {}, r"outs\[0\] is a ndarray, .* pass torch.as_tensor\(outs\[0\]\)"),
    "an array of lses": (
        [GOOD[0]],
        [GOOD[1].numpy()],
        {},
        r"lses\[0\] is a ndarray, a tensor is needed: pass torch.as_",
    ),
    "numbers": ([[1.0]], [[1.0]], {}, r"outs\[0\] is a list, a tensor is needed: pass a torch tensor"),
    "sinks number": ([GOOD[0]], [GOOD[1]], {"sinks": 2}, "sinks is a int, a tensor is needed: pass a torch tensor"),
    "sinks array": ([GOOD[0]], [GOOD[1]], {"sinks": np.ones(4)}, r"sinks is a ndarray.* torch.as_tensor\(sinks\)"),
    "sparse": (
        [GOOD[0].to_sparse()],
        [GOOD[1]],
        {},
        r"outs\[0\] is a tensor of layout sparse_coo.*outs\[0\].to_dense\(\)",
    ),
    "sparse as one": (GOOD[0].to_sparse(), GOOD[1], {}, r"^outs is a tensor of layout sparse_coo"),
    "sparse sinks": (
        [GOOD[0]],
        [GOOD[1]],
        {"sinks": torch.ones(4).to_sparse()},
        "sinks is a tensor of layout sparse_coo",
    ),
    "layout list": ([GOOD[0]], [GOOD[1]], {"layout": ["BSHD"]}, r"layout=\['BSHD'\] is not one of BSHD, THD, BHSD"),
    "layout": (
        [GOOD[0]],
        [GOOD[1]],
        {"layout": "BSDH"},
        r"layout='BSDH' is not one of BSHD, THD, BHSD\. Did you mean 'BSHD'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_merge_refuses_what_cannot_be_merged(case):
    outs, lses, options, message = BAD[case]
    with pytest.raises(InvalidInputError, match=message):
        merge(outs, lses, **options)


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_s5_sinks_of_each_row(layout):
    """Row by row they are the sinks of a call with that one row."""
    q, k, v = (
        torch.randn(2, 5, H, 8, dtype=F64, generator=torch.Generator().manual_seed(n)) for n, H in enumerate((4, 2, 2))
    )
    sinks = 2 * torch.randn(2, 5, 4, dtype=F64, generator=torch.Generator().manual_seed(9))
    want = torch.stack(
        [
            torch.stack(
                [
                    attention(q[b : b + 1, i : i + 1], k[b : b + 1], v[b : b + 1], sinks=sinks[b, i])[0, 0]
                    for i in range(5)
                ]
            )
            for b in range(2)
        ]
    )
    out, lse = attention(q, k, v, return_lse=True)
    if layout == "BHSD":
        got = merge([out.transpose(1, 2)], [lse.transpose(1, 2)], sinks=sinks.transpose(1, 2), layout=layout)[
            0
        ].transpose(1, 2)
    else:
        got = merge([out], [lse], sinks=sinks)[0]
    torch.testing.assert_close(got, want)
    with pytest.raises(
        InvalidInputError, match=r"sinks has shape \[2, 4\]; outs have 4 heads .*pass \[4\], one for each row"
    ):
        merge([out], [lse], sinks=sinks[:, 0])


def test_rows_with_another_number_of_parts_each():
    """As `merge` of the parts of each row; a row without one, and one whose parts are empty, are those of S7."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor([2, 0, 2, 3, 0, 2, 4])
    outs, lses = torch.randn(7, 5, generator=generator).double(), torch.randn(7, generator=generator).double()
    lses[3] = float("-inf")
    outs[3] = float("nan")
    given = outs.requires_grad_(), lses.requires_grad_()
    out, lse = merge_rows(*given, rows, 5)
    for row in range(5):
        parts = (rows == row).nonzero().flatten().tolist()
        if not parts:
            assert (out[row].tolist(), lse[row].item()) == ([0.0] * 5, float("-inf"))
            continue
        right = merge([outs[i][None, None] for i in parts], [lses[i][None, None] for i in parts], layout="THD")
        torch.testing.assert_close((out[row], lse[row]), (right[0][0, 0], right[1][0, 0]))
    dout = torch.randn(out.shape, generator=generator).double()
    found = torch.autograd.grad(out, given, dout)
    assert all(one.isfinite().all() for one in found)
    assert (found[0][3] == 0).all()
    share = torch.softmax(lses[[0, 2, 5]], 0)
    torch.testing.assert_close(found[0][[0, 2, 5]], share.detach()[:, None] * dout[2])
    assert found[1][[0, 2, 5]].abs().sum() > 0
    with pytest.raises(InvalidInputError, match="requires a gradient but lses"):
        merge_rows(outs, lses.detach(), rows, 5)
    half, _ = merge_rows(outs.detach().bfloat16(), lses.detach().float(), rows, 5)
    assert half.dtype == torch.bfloat16
