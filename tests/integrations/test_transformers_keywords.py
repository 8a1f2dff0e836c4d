"""Every keyword that changes the result changes it as eager attention does, or is refused by name. None is dropped.

The oracle is softmax attention written down plainly, as the models' own eager functions have it.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

import polyattn
from polyattn.integrations.transformers import attention
from polyattn.integrations.transformers.attention import make_forward
from polyattn.integrations.transformers.keywords import HARMLESS, SEMANTIC

B, H, H_KV, S, D, D_V = 2, 4, 2, 7, 8, 6
GATE = 1e-5
LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Layer(torch.nn.Module):
    """What a model passes as itself."""

    def __init__(self, **facts):
        super().__init__()
        self.__dict__.update(facts)
        self.eval()


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def tensors(s_q=S, s_k=S):
    return draw(B, H, s_q, D, seed=1), draw(B, H_KV, s_k, D, seed=2), draw(B, H_KV, s_k, D_V, seed=3)


def oracle(q, k, v, allowed=None, bias=None, scaling=D**-0.5, softcap=None, sinks=None):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        column = (sinks if sinks.ndim == 4 else sinks.reshape(1, -1, 1, 1)).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2)


def rows(s_q=S, s_k=S):
    return torch.arange(s_q)[:, None], torch.arange(s_k)[None]


def causal(s_q=S, s_k=S):
    i, j = rows(s_q, s_k)
    return j <= i


def borders(*lengths):
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return number[:, None] == number


def lengths(*counts):
    starts = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
    longest = max(counts)
    return dict(zip(LENGTHS, (starts, starts.clone(), longest, longest), strict=True))


BOOL = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(5)) > 0.4
BOOL |= torch.eye(S, dtype=torch.bool)
FLOAT = draw(B, H, S, S, seed=6)
BIAS = draw(1, H, S, S, seed=7)
SINKS = draw(H, seed=8) + 1
SEQUENCES = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1]])
TOGETHER = (SEQUENCES[:, :, None] == SEQUENCES[:, None])[:, None]
i, j = rows()

# keyword under test -> [(what a model passes, what that means)]
USED = {
    "scaling": [({"scaling": 0.7}, {"scaling": 0.7, "allowed": causal()})],
    "softcap": [({"softcap": 0.5}, {"softcap": 0.5, "allowed": causal()})],
    "s_aux": [({"s_aux": SINKS}, {"sinks": SINKS, "allowed": causal()})],
    "sinks": [({"sinks": SINKS}, {"sinks": SINKS, "allowed": causal()})],
    "is_causal": [({"is_causal": False}, {})],
    "sliding_window": [
        ({"sliding_window": 3}, {"allowed": causal() & (j > i - 3)}),
        ({"sliding_window": 3, "is_causal": False}, {"allowed": (i - j).abs() < 3}),
        ({"sliding_window": 1}, {"allowed": i == j}),
    ],
    "attention_mask": [
        ({"attention_mask": BOOL}, {"allowed": BOOL}),
        ({"attention_mask": FLOAT}, {"bias": FLOAT}),
        ({"attention_mask": BOOL[:, :, :1]}, {"allowed": BOOL[:, :, :1]}),
        ({"attention_mask": FLOAT[:1, :1, :, :1] + 0 * FLOAT[:1, :1]}, {"bias": FLOAT[:1, :1, :, :1]}),
        # A mask says everything: what these keywords mean is in it already.
        ({"attention_mask": BOOL, "is_causal": True, "sliding_window": 2}, {"allowed": BOOL}),
    ],
    "position_bias": [
        ({"position_bias": BIAS}, {"bias": BIAS, "allowed": causal()}),
        ({"position_bias": BIAS, "is_causal": False}, {"bias": BIAS}),
        ({"position_bias": BIAS, "attention_mask": BOOL}, {"bias": BIAS, "allowed": BOOL}),
        ({"position_bias": BIAS, "attention_mask": FLOAT}, {"bias": BIAS + FLOAT}),
    ],
    "seq_idx": [
        ({"seq_idx": SEQUENCES}, {"allowed": TOGETHER & causal()}),
        ({"seq_idx": SEQUENCES, "attention_mask": BOOL}, {"allowed": TOGETHER & BOOL}),
        ({"seq_idx": SEQUENCES, "attention_mask": FLOAT}, {"allowed": TOGETHER, "bias": FLOAT}),
    ],
}
REFUSED = {
    "indices": (torch.zeros(B, S, 2, dtype=torch.long), "each query picks its own keys"),
    "block_indices": (torch.zeros(B, S, 2, dtype=torch.long), "each query picks its own blocks"),
    "cache": (object(), "only the pages of continuous batching are read"),
    "output_attentions": (True, "has no eager_attention_forward"),
}


def test_every_semantic_keyword_has_its_test():
    elsewhere = {"dropout", "deterministic"}
    assert {*USED, *LENGTHS, *REFUSED, *elsewhere} == SEMANTIC
    assert not SEMANTIC & HARMLESS


@pytest.mark.parametrize(
    "given, meaning", [case for cases in USED.values() for case in cases], ids=[k for k, v in USED.items() for _ in v]
)
def test_keyword_means_what_eager_makes_of_it(relative, given, meaning):
    q, k, v = tensors()
    out, weights = make_forward(None, HARMLESS)(Layer(), q, k, v, **given)
    wanted = oracle(q, k, v, **meaning)
    assert weights is None
    assert out.is_contiguous()
    assert relative(out, wanted) < GATE
    plain, _ = make_forward(None, HARMLESS)(Layer(), q, k, v)
    assert relative(plain, wanted) > 0.01, "the control does not depend on the keyword"


def test_the_mask_may_come_by_position():
    q, k, v = tensors()
    call = make_forward(None, HARMLESS)
    assert torch.equal(call(Layer(), q, k, v, BOOL)[0], call(Layer(), q, k, v, attention_mask=BOOL)[0])


def test_the_layer_says_whether_it_is_causal(relative):
    q, k, v = tensors()
    out, _ = make_forward(None, HARMLESS)(Layer(is_causal=False), q, k, v)
    assert relative(out, oracle(q, k, v)) < GATE
    out, _ = make_forward(None, HARMLESS)(Layer(is_causal=False), q, k, v, is_causal=True)
    assert relative(out, oracle(q, k, v, allowed=causal())) < GATE


class TextCrossAttention(Layer):
    """Mllama's says nothing about itself but its name."""


@pytest.mark.parametrize("s_k", [4, S, 12])
@pytest.mark.parametrize(
    "layer", [TextCrossAttention(), Layer(is_cross_attention=True, is_causal=True), Layer(is_causal=False)], ids=str
)
def test_cross_attention_without_a_mask_sees_every_key(relative, layer, s_k):
    q, k, v = tensors(S, s_k)
    out, _ = make_forward(None, HARMLESS)(layer, q, k, v)
    assert relative(out, oracle(q, k, v)) < GATE


@pytest.mark.parametrize("s_k", [4, 12])
def test_what_may_be_cross_attention_is_refused_where_nobody_says(relative, s_k):
    q, k, v = tensors(S, s_k)
    call = make_forward(None, HARMLESS)
    with pytest.raises(
        polyattn.InvalidInputError,
        match=rf"7 queries and {s_k} keys reached Layer .* without a mask, and neither .*is_causal: .*set is_causal on",
    ):
        call(Layer(), q, k, v)
    assert relative(call(Layer(), q[:, :, :1], k, v)[0], oracle(q[:, :, :1], k, v)) < GATE


@pytest.mark.parametrize("given", [{}, {"sliding_window": 3}, {"position_bias": draw(1, H, S, 12, seed=9)}], ids=str)
def test_a_static_cache_being_filled_counts_from_its_first_key(relative, given):
    q, k, v = tensors(S, 12)
    k[:, :, S:] = float("nan")  # not written yet
    v[:, :, S:] = float("nan")
    out, _ = make_forward(None, HARMLESS)(Layer(is_causal=True), q, k, v, **given)
    allowed = causal() & (j > i - given.get("sliding_window", S))
    bias = given["position_bias"][..., :S] if "position_bias" in given else None
    assert relative(out, oracle(q, k[:, :, :S], v[:, :, :S], allowed=allowed, bias=bias)) < GATE


def test_more_queries_than_keys_count_from_the_first_key(relative):
    q, k, v = tensors(S, 4)
    out, _ = make_forward(None, HARMLESS)(Layer(is_causal=True), q, k, v)
    assert relative(out, oracle(q, k, v, allowed=causal(S, 4))) < GATE


def test_one_query_sees_every_key(relative):
    q, k, v = tensors(1, S)
    out, _ = make_forward(None, HARMLESS)(Layer(), q, k, v)
    assert relative(out, oracle(q, k, v)) < GATE
    out, _ = make_forward(None, HARMLESS)(Layer(), q, k, v, sliding_window=3)
    assert relative(out, oracle(q, k[:, :, -3:], v[:, :, -3:])) < GATE


@pytest.mark.parametrize("given", [{}, {"is_causal": False}, {"sliding_window": 2}, {"s_aux": SINKS}], ids=str)
def test_packed_lengths(relative, given):
    q, k, v = (t[:1] for t in tensors())
    together = borders(3, 4)
    allowed = together if given.get("is_causal") is False else together & causal()
    allowed = allowed & (j > i - given.get("sliding_window", S))
    wanted = oracle(q, k, v, allowed=allowed, sinks=given.get("s_aux"))
    out, _ = make_forward(None, HARMLESS)(Layer(), q, k, v, **lengths(3, 4), **given)
    assert relative(out, wanted) < GATE
    plain, _ = make_forward(None, HARMLESS)(Layer(), q, k, v, **given)
    assert given.get("sliding_window") or relative(plain, wanted) > 0.01


def test_packed_lengths_across_a_batch(relative):
    q, k, v = tensors()
    out, _ = make_forward(None, HARMLESS)(Layer(), q, k, v, **lengths(S, 3, 4))
    wanted = [
        oracle(q[n : n + 1], k[n : n + 1], v[n : n + 1], causal() & m) for n, m in enumerate((True, borders(3, 4)))
    ]
    assert relative(out, torch.cat(wanted)) < GATE


def test_packed_lengths_meet_a_mask(relative):
    q, k, v = (t[:1] for t in tensors())
    call = make_forward(None, HARMLESS)
    out, _ = call(Layer(), q, k, v, BOOL[:1], **lengths(3, 4))
    assert relative(out, oracle(q, k, v, allowed=BOOL[:1] & borders(3, 4))) < GATE
    out, _ = call(Layer(), q, k, v, **lengths(3, 4), position_bias=BIAS)
    assert relative(out, oracle(q, k, v, allowed=borders(3, 4) & causal(), bias=BIAS)) < GATE
    with pytest.raises(
        polyattn.InvalidInputError, match=r"cu_seq_lens_q reached Layer .* with a mask and a batch of 2"
    ):
        call(Layer(), *tensors(), BOOL, **lengths(S, S))


@pytest.mark.parametrize("given", [{}, {"attention_mask": BOOL[:1]}, {"position_bias": BIAS}], ids=["none", *"mb"])
def test_lengths_that_end_before_a_tail_are_refused_with_a_mask_and_without(given):
    call, tensors_of_one = make_forward(None, HARMLESS), [t[:1] for t in tensors()]
    with pytest.raises(polyattn.InvalidInputError, match=r"ends at 5, the packed batch has 7 tokens; .* cut it off"):
        call(Layer(), *tensors_of_one, **{"attention_mask": None, **given}, **lengths(3, 2))
    with pytest.raises(polyattn.InvalidInputError, match="_q=2 is less than the longest sequence, 4"):
        call(Layer(), *tensors_of_one, **{"attention_mask": None, **given}, **{**lengths(3, 4), "max_length_q": 2})


@pytest.mark.parametrize("missing", LENGTHS)
def test_packed_lengths_come_together(missing):
    given = {k: v for k, v in lengths(3, 4).items() if k != missing}
    with pytest.raises(polyattn.InvalidInputError, match=rf"reached Layer .* without {missing}; .* all four"):
        make_forward(None, HARMLESS)(Layer(), *tensors(), **given)


def test_packed_lengths_are_the_calls_to_check():
    given = {**lengths(3, 4), "max_length_q": 2}
    with pytest.raises(polyattn.InvalidInputError, match="max_seqlen_q=2 is less than the longest"):
        make_forward(None, HARMLESS)(Layer(), *(t[:1] for t in tensors()), **given)


def test_dropout_only_while_training(relative):
    q, k, v = tensors()
    call = make_forward(None, HARMLESS)
    plain, _ = call(Layer(), q, k, v)
    assert torch.equal(call(Layer(), q, k, v, dropout=0.5)[0], plain)
    layer = Layer().train()
    torch.manual_seed(0)
    out = call(layer, *(t.repeat(2000, 1, 1, 1) for t in (q, k, v)), dropout=0.5)[0].unflatten(0, (2000, B))
    assert relative(out[0], plain) > 0.1
    assert relative(out.mean(0), plain) < 0.1


def test_deterministic_reaches_the_choice():
    q, k, v = tensors()
    out, _ = make_forward(None, HARMLESS)(Layer(), q, k, v, deterministic=False)
    assert torch.equal(out, make_forward(None, HARMLESS)(Layer(), q, k, v)[0])
    with pytest.raises(polyattn.UnsupportedRequestError, match=r"flex_attention.*deterministic"):
        make_forward("flex_attention", HARMLESS)(Layer(), q, k, v, deterministic=True)


def test_scopes_reach_the_call_and_leave_it():
    q, k, v = tensors()
    call = make_forward(None, HARMLESS)
    plain, _ = call(Layer(), q, k, v)
    with (
        polyattn.use_backend("flex_attention"),
        pytest.raises(polyattn.UnsupportedRequestError, match="by use_backend"),
    ):
        call(Layer(), q, k, v.requires_grad_())
    assert torch.equal(call(Layer(), q, k, v)[0], plain)
    with polyattn.use_backend("flex_attention"), pytest.raises(polyattn.BackendUnavailableError, match="nobody"):
        make_forward("nobody", HARMLESS)(Layer(), q, k, v)


def test_settings_that_never_repeat_are_not_all_kept(monkeypatch, relative):
    monkeypatch.setattr(attention, "SITES_KEPT", 4)
    kept = attention._Sites(None)
    q, k, v = tensors()
    for scaling in (0.1, 0.2, 0.3, 0.1):
        site = kept[("", "", ""), False, (-1, -1), 0.0, scaling, 0.0, False]
        assert relative(site(q, k, v).transpose(1, 2), oracle(q, k, v, scaling=scaling)) < GATE
        assert len(kept) <= 2, "half of them are young"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused(name):
    value, reason = REFUSED[name]
    with pytest.raises(polyattn.UnsupportedRequestError) as error:
        make_forward("torch_sdpa", HARMLESS)(Layer(), *tensors(), **{name: value})
    assert re.match(
        rf"{name} .*reached Layer on polyattn \(torch_sdpa\): .*{reason}.*; .*(attn_implementation=|generate\(\))",
        str(error.value),
    )
    assert error.value.rejected[name]


def test_switches_that_are_off_are_fine():
    q, k, v = tensors()
    call = make_forward(None, HARMLESS)
    given = {"output_attentions": False, "cache": None, "indices": None, "unheard_of": None, "position_ids": i}
    assert torch.equal(call(Layer(), q, k, v, **given)[0], call(Layer(), q, k, v)[0])


def test_an_unknown_keyword_is_refused_by_name_until_it_is_declared():
    q, k, v = tensors()
    with pytest.raises(
        polyattn.UnsupportedRequestError,
        match=r"unknown keyword tilt \(tensor \(7, 7\) torch.bool\) reached Layer .*automatic.*harmless=\['tilt'\]",
    ):
        make_forward(None, HARMLESS)(Layer(), q, k, v, tilt=causal())
    with pytest.raises(polyattn.UnsupportedRequestError, match=r"tilt \('a+\.\.\.\)"):
        make_forward(None, HARMLESS)(Layer(), q, k, v, tilt="a" * 99)
    out, _ = make_forward(None, HARMLESS | {"tilt"})(Layer(), q, k, v, tilt=causal())
    assert torch.equal(out, make_forward(None, HARMLESS)(Layer(), q, k, v)[0])


def test_sinks_come_once_and_per_head():
    q, k, v = tensors()
    call = make_forward(None, HARMLESS)
    with pytest.raises(polyattn.InvalidInputError, match="both s_aux and sinks reached Layer"):
        call(Layer(), q, k, v, s_aux=SINKS, sinks=SINKS)
    with pytest.raises(
        polyattn.UnsupportedRequestError, match=r"shape \(2, 4, 7\) are neither one per head, .* nor per"
    ):
        call(Layer(), q, k, v, sinks=draw(B, H, S))
    with pytest.raises(polyattn.InvalidInputError, match=r"sinks of shape \(2, 4, 6, 1\) .*S_q, 1\] = \[2, 4, 7, 1\]"):
        call(Layer(), q, k, v, sinks=draw(B, H, S - 1, 1))


@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("given", [{}, {"sliding_window": 3}, {"softcap": 5.0}, {"mask": True}], ids=str)
def test_sinks_of_each_row(given, batch):
    q, k, v = (t.requires_grad_() for t in tensors())
    sinks = (2 * draw(batch, H, S, 1)).requires_grad_()
    more = {name: value for name, value in given.items() if name != "mask"}
    i, j = rows()
    allowed = causal() & (i - j < given.get("sliding_window", S))
    if "mask" in given:
        allowed = (i + j) % 3 != 0
        more["attention_mask"] = allowed.expand(B, 1, S, S)
    out, _ = make_forward(None, HARMLESS)(Layer(), q, k, v, sinks=sinks, **more)
    wanted = oracle(q, k, v, allowed=allowed, softcap=given.get("softcap"), sinks=sinks)
    torch.testing.assert_close(out, wanted)
    gradient = draw(*out.shape)
    for got, want in zip(*(torch.autograd.grad(t, (q, k, v, sinks), gradient) for t in (out, wanted)), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_sinks_of_each_row_of_packed_sequences():
    q, k, v = (t[:1] for t in tensors())
    sinks, allowed = 2 * draw(1, H, S, 1), causal() & borders(3, 4)
    out, _ = make_forward(None, HARMLESS)(Layer(), q, k, v, sinks=sinks, **lengths(3, 4))
    torch.testing.assert_close(out, oracle(q, k, v, allowed=allowed, sinks=sinks))


@pytest.mark.parametrize(
    "mask, what",
    [
        (torch.ones(B, S, dtype=torch.bool), r"\(2, 7\)"),
        (torch.ones(B, 1, S, 5, dtype=torch.bool), r"\(2, 1, 7, 5\)"),
        (object(), "object"),
    ],
    ids=["2-D", "lengths", "no tensor"],
)
def test_masks_of_another_form_are_refused(mask, what):
    with pytest.raises(polyattn.InvalidInputError, match=rf"attention_mask of Layer .* is {what}; .*\[B, H, 7, 7\]"):
        make_forward(None, HARMLESS)(Layer(), *tensors(), mask)


def test_what_is_no_mask_is_refused_beside_other_keywords():
    with pytest.raises(polyattn.InvalidInputError, match=r"attention_mask of Layer .* is object; "):
        make_forward(None, HARMLESS)(Layer(), *tensors(), object(), seq_idx=SEQUENCES)


def test_a_window_holds_a_key():
    with pytest.raises(polyattn.InvalidInputError, match=r"sliding_window=0 reached Layer .*1 key or more"):
        make_forward(None, HARMLESS)(Layer(), *tensors(), sliding_window=0)


def test_sequence_numbers_go_without_a_cache():
    q, k, v = tensors(S, 12)
    with pytest.raises(
        polyattn.InvalidInputError, match=r"seq_idx of Layer .* covers 7 tokens, there are 7 queries and 12"
    ):
        make_forward(None, HARMLESS)(Layer(is_causal=False), q, k, v, seq_idx=SEQUENCES)


@pytest.mark.parametrize("given, found", [("x", "str"), (torch.zeros(S), rf"\({S},\)")], ids=["word", "1-D"])
def test_sequence_numbers_are_those_of_a_batch(given, found):
    with pytest.raises(
        polyattn.InvalidInputError, match=rf"seq_idx of Layer .* is {found}; a tensor \[B, S\] is needed"
    ):
        make_forward(None, HARMLESS)(Layer(), *tensors(), seq_idx=given)


def test_a_last_axis_that_is_not_dense_is_copied(relative):
    q, k, v = (t.transpose(2, 3).contiguous().transpose(2, 3) for t in tensors())
    assert q.stride(-1) != 1
    out, _ = make_forward(None, HARMLESS)(Layer(), q, k, v, position_bias=BIAS)
    assert relative(out, oracle(q, k, v, allowed=causal(), bias=BIAS)) < GATE
    with pytest.raises(polyattn.InvalidInputError, match="batch sizes differ"):
        make_forward(None, HARMLESS)(Layer(), q, k[:1], v)


def test_gradients_reach_the_bias(relative):
    q, k, v = tensors()
    grads = []
    for call in (lambda b: make_forward(None, HARMLESS)(Layer(), q, k, v, BOOL, position_bias=b)[0],
                 lambda b: oracle(q, k, v, allowed=BOOL, bias=b)):  # fmt: skip
        bias = BIAS.clone().requires_grad_()
        call(bias).square().sum().backward()
        grads.append(bias.grad)
    assert relative(*grads) < GATE


def test_every_keyword_of_every_model_is_known():
    """Whatever the models of this transformers pass is used, known to be harmless or refused with a reason."""
    models = Path(inspect.getfile(pytest.importorskip("transformers"))).parent / "models"
    passed = {}
    for file in models.glob("*/modeling_*.py"):
        text = file.read_text(encoding="utf-8")
        for match in re.finditer(r"= attention_interface\(", text):
            end, depth = match.end(), 1
            while depth:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            call = ast.parse(f"f({text[match.end() : end]}").body[0].value
            passed |= {word.arg: file.parent.name for word in call.keywords if word.arg}
    assert len(passed) > 10, "the models no longer call attention_interface(...)"
    known = SEMANTIC | HARMLESS | {"query", "key", "value"}
    assert not {word: model for word, model in passed.items() if word not in known}
