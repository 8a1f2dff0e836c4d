"""The dense definition against an oracle that loops over every element with plain Python numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyattn.semantics.reference import attention, tree_mask, verify_mask, visible

F64 = torch.float64


def sees(i, j, S_q, S_k, causal, window, chunk):
    """The rules of S3 and S4 as the page states them, for one query row and one key."""
    p = i if causal == "top_left" else i + S_k - S_q
    left, right = window
    return (
        (causal == "none" or j <= p)
        and (left < 0 or p - j <= left)
        and (right < 0 or j - p <= right)
        and (not chunk or (j <= p and math.floor(j / chunk) == math.floor(p / chunk)))
    )


def oracle(
    q, k, v, causal="none", window=(-1, -1), chunk=0, softcap=0.0, sinks=None, attn_mask=None, alibi=None, scale=None
):
    """(out, lse) of BSHD tensors, one scalar at a time."""
    B, S_q, H_q, D = q.shape
    S_k, H_kv, D_v = k.shape[1], k.shape[2], v.shape[3]
    scale = 1 / math.sqrt(D) if scale is None else scale
    Q, K, V = q.tolist(), k.tolist(), v.tolist()
    out, lse = torch.zeros(B, S_q, H_q, D_v, dtype=F64), torch.full((B, S_q, H_q), -math.inf, dtype=F64)
    for b in range(B):
        for h in range(H_q):
            g = h // (H_q // H_kv)
            for i in range(S_q):
                scores = {}
                for j in range(S_k):
                    if not sees(i, j, S_q, S_k, causal, window, chunk):
                        continue
                    s = scale * math.fsum(x * y for x, y in zip(Q[b][i][h], K[b][j][g], strict=True))
                    if softcap:
                        s = softcap * math.tanh(s / softcap)
                    if alibi is not None:
                        p = i if causal == "top_left" else i + S_k - S_q
                        s -= float(alibi[h]) * abs(p - j)
                    if attn_mask is not None:
                        m = attn_mask[b % attn_mask.shape[0], h % attn_mask.shape[1], i, j].item()
                        if m is False or m == -math.inf:
                            continue
                        s += 0.0 if m is True else m
                    scores[j] = s
                if not scores:
                    continue
                keys = math.fsum(math.exp(s) for s in scores.values())
                lse[b, i, h] = math.log(keys)
                denominator = keys + (math.exp(float(sinks[h])) if sinks is not None else 0.0)
                for d in range(D_v):
                    out[b, i, h, d] = math.fsum(math.exp(s) * V[b][j][g][d] for j, s in scores.items()) / denominator
    return out, lse


def inputs(B=2, S_q=5, S_k=7, H_q=4, H_kv=2, D=3, D_v=5, seed=0, dtype=F64):
    gen = torch.Generator().manual_seed(seed)
    shapes = [(B, S_q, H_q, D), (B, S_k, H_kv, D), (B, S_k, H_kv, D_v)]
    return [torch.randn(s, generator=gen, dtype=F64).to(dtype) for s in shapes]


def check(q, k, v, **options):
    got, lse = attention(q, k, v, return_lse=True, **options)
    want, want_lse = oracle(q, k, v, **options)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


LENGTHS = [(5, 5), (1, 7), (3, 7), (7, 3)]
WINDOWS = [(-1, -1), (2, -1), (-1, 1), (1, 2), (0, 0), (3, 0)]


# S1


@pytest.mark.parametrize("H_q, H_kv, D, D_v", [(1, 1, 4, 4), (4, 1, 3, 5), (4, 2, 5, 3), (4, 4, 2, 1)])
def test_s1_gqa_and_value_width(H_q, H_kv, D, D_v):
    check(*inputs(H_q=H_q, H_kv=H_kv, D=D, D_v=D_v))


def test_s1_bhsd_is_a_view_of_bshd():
    q, k, v = inputs()
    options = {"causal": "bottom_right", "return_lse": True}
    out, lse = attention(q, k, v, **options)
    out_t, lse_t = attention(*(t.transpose(1, 2) for t in (q, k, v)), layout="BHSD", **options)
    assert out_t.shape == (2, 4, 5, 5)
    assert lse_t.shape == (2, 4, 5)
    assert torch.equal(out_t.transpose(1, 2), out)
    assert torch.equal(lse_t.transpose(1, 2), lse)


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_s1_strided_inputs_dense_output_inputs_untouched(layout):
    q, k, v = inputs()
    if layout == "BHSD":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    wide = [torch.randn(*t.shape[:-1], 2 * t.shape[-1], dtype=F64) for t in (q, k, v)]
    strided = [w[..., : t.shape[-1]].copy_(t) for w, t in zip(wide, (q, k, v), strict=True)]
    before = [w.clone() for w in wide]
    out = attention(*strided, layout=layout)
    torch.testing.assert_close(out, attention(q, k, v, layout=layout), rtol=1e-13, atol=1e-13)
    assert out.stride(-1) == 1
    assert all(torch.equal(a, b) for a, b in zip(wide, before, strict=True))
    taken = {t.untyped_storage().data_ptr() for t in wide}
    assert out.untyped_storage().data_ptr() not in taken


@pytest.mark.parametrize("empty", ["B", "S_q", "S_k"])
def test_s1_zero_sizes(empty):
    q, k, v = (t.requires_grad_() for t in inputs(**{empty: 0}))
    out, lse = attention(q, k, v, causal="bottom_right", return_lse=True)
    assert out.shape == (*q.shape[:3], 5)
    assert lse.shape == q.shape[:3]
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))
    out.sum().backward()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in (q, k, v))


# S2


def test_s2_scale_defaults_to_inverse_root_of_query_width():
    q, k, v = inputs()
    assert torch.equal(attention(q, k, v), attention(q, k, v, scale=3**-0.5))
    check(q, k, v, scale=0.3)
    check(q, k, v, scale=1.0)


def test_s2_scale_multiplies_fp32_logits_not_low_precision_inputs():
    q, k, v = inputs(dtype=torch.bfloat16, D=8)
    _, want = oracle(q.double(), k.double(), v.double(), scale=0.3)
    _, got = attention(q, k, v, scale=0.3, return_lse=True)
    _, early = attention(q * 0.3, k, v, scale=1.0, return_lse=True)
    assert (got - want).abs().max() < 1e-6
    assert (early - want).abs().max() > 1e-3


# S3, S4


@pytest.mark.parametrize("S_q, S_k", LENGTHS)
@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
def test_s3_causal_alignments(S_q, S_k, causal):
    check(*inputs(S_q=S_q, S_k=S_k), causal=causal)


def test_s3_alignments_agree_only_for_equal_lengths():
    assert torch.equal(visible(4, 4, causal="bottom_right"), visible(4, 4, causal="top_left"))
    assert visible(2, 4, causal="bottom_right").tolist() == [[True, True, True, False], [True] * 4]
    assert visible(2, 4, causal="top_left").tolist() == [[True, False, False, False], [True, True, False, False]]


def test_s3_decode_is_the_last_row_of_prefill():
    q, k, v = inputs(S_q=7)
    for options in ({}, {"window": (2, 0)}, {"window": (2, -1)}, {"chunk": 3}, {"window": (3, -1), "chunk": 4}):
        prefill = attention(q, k, v, causal="bottom_right", **options)
        for t in range(7):
            step = attention(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1], causal="bottom_right", **options)
            torch.testing.assert_close(step[:, 0], prefill[:, t], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("S_q, S_k", LENGTHS)
@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
@pytest.mark.parametrize("window", WINDOWS)
def test_s4_windows(S_q, S_k, causal, window):
    check(*inputs(B=1, H_q=2, H_kv=1, S_q=S_q, S_k=S_k), causal=causal, window=window)


def test_s4_a_model_window_of_w_tokens_is_left_w_minus_1():
    W = 3
    seen = visible(8, 8, causal="bottom_right", window=(W - 1, -1))
    assert seen.sum(1).tolist() == [min(i + 1, W) for i in range(8)]
    assert visible(1, 8, causal="bottom_right", window=(W - 1, -1)).sum().item() == W


def test_s4_window_is_bottom_right_also_without_causal():
    assert visible(2, 5, window=(1, 0)).tolist() == [
        [False, False, True, True, False],
        [False, False, False, True, True],
    ]
    assert visible(2, 5, window=(1, 0), causal="top_left").tolist() == [
        [True, False, False, False, False],
        [True, True, False, False, False],
    ]


def test_s4_no_rule_gives_no_mask():
    assert visible(3, 5) is None


@pytest.mark.parametrize("S_q, S_k", LENGTHS)
@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_s4_chunked_local(S_q, S_k, causal, chunk):
    check(*inputs(B=1, H_q=2, H_kv=1, S_q=S_q, S_k=S_k), causal=causal, chunk=chunk, window=(3, -1))


def test_s4_chunks_are_blocks_of_key_positions_and_causal():
    assert visible(6, 6, chunk=3).tolist() == [
        [True, False, False, False, False, False],
        [True, True, False, False, False, False],
        [True, True, True, False, False, False],
        [False, False, False, True, False, False],
        [False, False, False, True, True, False],
        [False, False, False, True, True, True],
    ]
    assert torch.equal(visible(2, 6, chunk=3), visible(6, 6, chunk=3)[-2:])
    assert torch.equal(visible(6, 6, chunk=6), visible(6, 6, causal="bottom_right"))


def test_s4_query_offset_moves_the_rows():
    whole = visible(6, 6, causal="bottom_right", window=(2, -1), chunk=4)
    assert torch.equal(visible(2, 6, causal="bottom_right", window=(2, -1), chunk=4, q_offset=1), whole[1:3])
    q, k, v = inputs(S_q=7)
    options = {"causal": "bottom_right", "window": (2, -1), "alibi": torch.rand(4)}
    part = attention(q[:, 2:4], k, v, q_offset=2, **options)
    torch.testing.assert_close(part, attention(q, k, v, **options)[:, 2:4], rtol=1e-12, atol=1e-12)


# S5


def test_s5_softcap():
    q, k, v = inputs()
    check(q * 5, k, v, softcap=2.0, causal="bottom_right")
    torch.testing.assert_close(attention(q, k, v, softcap=1e6), attention(q, k, v), rtol=1e-9, atol=1e-9)


def test_s5_softcap_comes_before_mask_and_alibi():
    q, k, v = inputs()
    bias = 3 * torch.randn(2, 1, 5, 7, dtype=F64)
    check(q, k, v, softcap=0.5, attn_mask=bias, alibi=torch.tensor([0.5, 0.1, 0.0, -0.2]))
    out, lse = attention(q, k, v, softcap=0.5, attn_mask=torch.full((1, 1, 5, 7), -100.0), return_lse=True)
    free, free_lse = attention(q, k, v, softcap=0.5, return_lse=True)
    torch.testing.assert_close(out, free, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, free_lse - 100, rtol=1e-9, atol=1e-9)


def test_s5_sinks_count_in_the_denominator_only():
    check(*inputs(), sinks=torch.tensor([0.3, -2.0, 4.0, 1.0], dtype=F64), causal="bottom_right", window=(2, -1))


def test_s5_sink_without_weight_and_sink_above_everything():
    q, k, v = inputs()
    plain = attention(q, k, v)
    assert torch.equal(attention(q, k, v, sinks=torch.full((4,), -math.inf, dtype=F64)), plain)
    for nats in (30.0, 80.0):
        got, lse = attention(q, k, v, sinks=torch.full((4,), nats, dtype=F64), return_lse=True)
        want, want_lse = oracle(q, k, v, sinks=torch.full((4,), nats, dtype=F64))
        torch.testing.assert_close(got, want, rtol=1e-10, atol=0)
        torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=0)
    single = attention(*(t.float() for t in (q, k, v)), sinks=torch.full((4,), 1e4))
    assert torch.equal(single, torch.zeros_like(single))


# S6


def test_s6_lse_is_natural_log_fp32_without_the_sink():
    q, k, v = inputs()
    _, plain = attention(q, k, v, return_lse=True)
    _, with_sink = attention(q, k, v, sinks=torch.full((4,), 3.0, dtype=F64), return_lse=True)
    assert torch.equal(plain, with_sink)
    torch.testing.assert_close(plain, oracle(q, k, v)[1], rtol=1e-12, atol=1e-12)
    assert plain.dtype == F64
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        low = [t.to(dtype) for t in (q, k, v)]
        out, lse = attention(*low, return_lse=True)
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        out, lse = attention(*low, return_lse=True, compute_dtype=F64)
        assert out.dtype == dtype
        assert lse.dtype == F64


# S7


def test_s7_a_row_that_sees_no_key():
    q, k, v = inputs(S_q=7, S_k=3)
    sinks = torch.zeros(4, dtype=F64)
    for options in ({}, {"sinks": sinks}, {"softcap": 2.0}, {"alibi": sinks + 1}):
        out, lse = attention(q, k, v, causal="bottom_right", return_lse=True, **options)
        assert torch.equal(out[:, :4], torch.zeros_like(out[:, :4]))
        assert torch.equal(lse[:, :4], torch.full_like(lse[:, :4], -math.inf))
        assert torch.isfinite(lse[:, 4:]).all()


def test_s7_a_very_negative_finite_mask_is_not_an_empty_row():
    q, k, v = inputs()
    mask = torch.full((1, 1, 5, 7), torch.finfo(F64).min, dtype=F64)
    out, lse = attention(q, k, v, attn_mask=mask, return_lse=True)
    assert torch.isfinite(lse).all()
    torch.testing.assert_close(out, v.mean(1, keepdim=True).repeat_interleave(2, 2).expand_as(out))


# S8


@pytest.mark.parametrize("B, H", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_s8_bool_and_additive_masks(B, H):
    gen = torch.Generator().manual_seed(1)
    keep = torch.rand(B, H, 5, 7, generator=gen) < 0.5
    keep[..., 2, :] = False
    bias = torch.randn(B, H, 5, 7, generator=gen, dtype=F64)
    check(*inputs(), attn_mask=keep)
    check(*inputs(), attn_mask=bias.masked_fill(~keep, -math.inf), causal="bottom_right", window=(3, -1))
    same = torch.zeros_like(bias).masked_fill(~keep, -math.inf)
    assert torch.equal(attention(*inputs(), attn_mask=keep), attention(*inputs(), attn_mask=same))


@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
def test_s8_alibi_is_distance_from_the_query(causal):
    check(*inputs(), alibi=torch.tensor([0.5, 0.25, 0.125, 0.0], dtype=F64), causal=causal)


PARENTS = [-1, 0, 0, 1, 2, 2, 4]


def test_s8_tree_mask_is_self_and_ancestors():
    mask = tree_mask(PARENTS)
    for node in range(len(PARENTS)):
        path, at = set(), node
        while at >= 0:
            path.add(at)
            at = PARENTS[at]
        assert {j for j in range(len(PARENTS)) if mask[node, j]} == path
    assert torch.equal(tree_mask(torch.tensor(PARENTS)), mask)
    assert torch.equal(tree_mask([-1, 0, 1]), visible(3, 3, causal="bottom_right"))
    assert tree_mask([-1, -1]).tolist() == [[True, False], [False, True]]


def test_s8_every_path_of_a_verified_tree_equals_decoding_it():
    prefix, nodes = 4, len(PARENTS)
    q, k, v = inputs(B=1, S_q=nodes, S_k=prefix + nodes)
    mask = verify_mask(prefix, PARENTS)
    assert mask.shape == (nodes, prefix + nodes)
    verified = attention(q, k, v, attn_mask=mask[None, None])
    for node in range(nodes):
        path, at = [], node
        while at >= 0:
            path.insert(0, prefix + at)
            at = PARENTS[at]
        keys = [*range(prefix), *path]
        alone = attention(q[:, node : node + 1], k[:, keys], v[:, keys])
        torch.testing.assert_close(verified[:, node], alone[:, 0], rtol=1e-12, atol=1e-12)


def test_s8_tree_whose_child_comes_first_is_refused():
    from polyattn.errors import InvalidInputError

    with pytest.raises(InvalidInputError, match=r"parents\[1\] = 2: .*must come before it.*number the nodes"):
        tree_mask([-1, 2, 0])


# Everything at once


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_s12_every_option_together(data):
    draw = data.draw
    H_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    S_q, S_k, B, H_q = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 2)), H_kv * group
    q, k, v = inputs(
        B, S_q, S_k, H_q, H_kv, draw(st.integers(1, 3)), draw(st.integers(1, 3)), seed=draw(st.integers(0, 99))
    )
    gen = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    mask = torch.randn(draw(st.sampled_from([1, B])), draw(st.sampled_from([1, H_q])), S_q, S_k, generator=gen)
    masks = {"none": None, "bool": mask < 0.7, "additive": mask.double().masked_fill(mask > 0.9, -math.inf)}
    check(
        q,
        k,
        v,
        causal=draw(st.sampled_from(["none", "bottom_right", "top_left"])),
        window=(draw(st.integers(-1, 4)), draw(st.integers(-1, 4))),
        chunk=draw(st.integers(0, 4)),
        softcap=draw(st.sampled_from([0.0, 1.5])),
        sinks=draw(st.sampled_from([None, torch.randn(H_q, generator=gen, dtype=F64)])),
        attn_mask=masks[draw(st.sampled_from(sorted(masks)))],
        alibi=draw(st.sampled_from([None, torch.rand(H_q, generator=gen, dtype=F64)])),
        scale=draw(st.sampled_from([None, 0.7])),
    )
