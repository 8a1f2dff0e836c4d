"""The request: its normal form keeps the meaning, and every field says how it is judged."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyattn.contract import DTYPES, FAMILIES, PHASES, AttentionRequest, request_fields

ALIGNMENTS = ("none", "bottom_right", "top_left")


def sees(causal: str, window: tuple[int, int], s_q: int, s_k: int) -> list[list[bool]]:
    """S3 and S4 written down literally: which key each row sees."""
    offset = 0 if causal == "top_left" else s_k - s_q
    left, right = window

    def one(i: int, j: int) -> bool:
        at = i + offset
        return (
            (causal == "none" or j <= at) and (left < 0 or j >= at - left) and (right < 0 or j <= at + right)
        )  # fmt: skip

    return [[one(i, j) for j in range(s_k)] for i in range(s_q)]


def relation(s_q: int, s_k: int) -> str:
    return "equal" if s_q == s_k else "one" if s_q == 1 else "fewer" if s_q < s_k else "more"


bounds = st.integers(-1, 6)
lengths = st.integers(1, 6)


@given(st.sampled_from(ALIGNMENTS), bounds, bounds, lengths, lengths)
def test_the_normal_form_sees_the_same_keys(causal, left, right, s_q, s_k):
    request = AttentionRequest(causal=causal, window=(left, right), s_relation=relation(s_q, s_k))
    normal = request.normalised()
    assert sees(normal.causal, normal.window, s_q, s_k) == sees(causal, (left, right), s_q, s_k)


requests = st.builds(
    AttentionRequest,
    dtype=st.sampled_from(DTYPES[:4]),
    head_dim=st.sampled_from((64, 128)),
    v_head_dim=st.sampled_from((0, 64, 128)),
    kv_dtype=st.sampled_from(("auto", "bfloat16", "fp8_e4m3")),
    scale=st.sampled_from((None, 0.125, 128**-0.5)),
    causal=st.sampled_from(ALIGNMENTS),
    window=st.tuples(bounds, bounds),
    s_relation=st.sampled_from(("equal", "one", "fewer", "more")),
)


@given(requests)
def test_the_normal_form_is_one_spelling(request):
    normal = request.normalised()
    assert normal.normalised() is normal
    assert hash(normal) == hash(request.normalised())
    assert normal.dims == request.dims
    assert normal.kv_storage == request.kv_storage
    assert normal.same_dims == request.same_dims
    effective = request.head_dim**-0.5 if request.scale is None else request.scale
    assert normal.softmax_scale == request.softmax_scale == effective
    assert not (normal.causal != "none" and normal.window[1] >= 0), "under causal a right bound says nothing"


SAME = [
    ({"causal": "top_left"}, {"causal": "bottom_right"}),
    ({"window": (7, 0)}, {"causal": "bottom_right", "window": (7, -1)}),
    ({"causal": "bottom_right", "window": (7, 3)}, {"causal": "bottom_right", "window": (7, -1)}),
    ({"causal": "bottom_right", "s_relation": "one"}, {"s_relation": "one"}),
    ({"window": (3, 0), "s_relation": "one"}, {"window": (3, -1), "s_relation": "one"}),
    ({"head_dim": 64, "scale": 0.125}, {"head_dim": 64}),
    ({"head_dim": 64}, {"head_dim": 64, "v_head_dim": 64}),
    ({"dtype": "float16", "kv_dtype": "float16"}, {"dtype": "float16", "kv_dtype": "auto"}),
]


@pytest.mark.parametrize("one, other", SAME, ids=[str(s[0]) for s in SAME])
def test_two_spellings_of_one_request(one, other):
    assert AttentionRequest(**one).normalised() == AttentionRequest(**other).normalised()


DIFFERENT = [
    ({"causal": "top_left", "s_relation": "fewer"}, {"causal": "bottom_right", "s_relation": "fewer"}),
    ({"causal": "top_left", "s_relation": "one"}, {"s_relation": "one"}),
    ({"window": (7, 1)}, {"causal": "bottom_right", "window": (7, -1)}),
    ({"head_dim": 128, "scale": 0.125}, {"head_dim": 128}),
    ({"dtype": "float16", "kv_dtype": "bfloat16"}, {"dtype": "float16"}),
]


@pytest.mark.parametrize("one, other", DIFFERENT, ids=[str(d[0]) for d in DIFFERENT])
def test_two_requests_that_only_look_alike(one, other):
    assert AttentionRequest(**one).normalised() != AttentionRequest(**other).normalised()


def test_a_request_is_frozen_hashable_and_by_keyword_only():
    request = AttentionRequest(head_dim=64)
    assert request == AttentionRequest(head_dim=64)
    assert len({request, AttentionRequest(head_dim=64), AttentionRequest(head_dim=65)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.head_dim = 128
    with pytest.raises(TypeError):
        AttentionRequest("dense")


def test_a_plain_request_demands_nothing():
    assert AttentionRequest().active() == ()
    assert AttentionRequest().normalised().active() == ()


OFF = {
    "phase": "decode",
    "kv_dtype": "fp8_e4m3",
    "v_head_dim": 64,
    "causal": "bottom_right",
    "window": (7, -1),
    "chunk": 8,
    "softcap": 30.0,
    "sinks": True,
    "mask": "bool",
    "alibi": True,
    "segments": "shared",
    "tree": True,
    "scale": 0.5,
    "dropout": 0.1,
    "lse": True,
    "grad": ("query",),
    "deterministic": True,
    "batch_invariant": True,
    "graph_capture": True,
    "s_relation": "fewer",
    "cross": True,
    "multimodal": True,
    "page_size": 16,
    "kv_layout": "HND",
    "kv_scales": "tensor",
    "save_kv_cache": True,
    "kv_parts": 1,
    "spec_topk": 1,
    "chunked_prefix": True,
    "token_topk": 8,
    "method": "sta",
    "block_map": True,
    "block_sizes": True,
    "block_starts": True,
    "block_shape": (64, 64),
    "state_dtype": "bfloat16",
    "state_layout": "KV",
    "state_slots": True,
    "state_out": "every",
    "raw_gates": "softplus",
    "beta_range": 2,
    "qk_norm": True,
    "zero_size": True,
    "large": True,
    "misaligned": True,
    "transform": "vmap",
}
"""Every option with a value that is not off."""


def test_every_option_is_a_demand_as_soon_as_it_is_not_off():
    assert set(OFF) == {f.name for f in request_fields() if f.kind == "option"}
    for name, value in OFF.items():
        assert AttentionRequest(**{name: value}).active() == ((name, value),)
        assert AttentionRequest(**{name: value}).normalised().active() == ((name, value),)


@pytest.mark.parametrize(
    "spelling",
    [
        {"kv_dtype": "bfloat16"},
        {"v_head_dim": 128},
        {"kv_layout": "NHD"},
        {"state_dtype": "float32"},
    ],
    ids=str,
)
def test_another_spelling_of_off_is_no_demand(spelling):
    assert AttentionRequest(**spelling).active() == ()


def test_grouped_heads_are_a_demand():
    request = AttentionRequest(heads=32, kv_heads=8)
    assert (request.group, request.active()) == (4, (("group", 4),))
    assert AttentionRequest(heads=8, kv_heads=8).group == 1


def test_derived_values():
    request = AttentionRequest(head_dim=192, v_head_dim=128, dtype="float16", kv_dtype="fp8_e5m2")
    assert (request.dims, request.same_dims, request.kv_storage) == ((192, 128), False, "fp8_e5m2")
    assert AttentionRequest(head_dim=64).dims == (64, 64)
    for scale, factor in ((None, 0.125), (0.0, 0.0), (-2.0, -2.0)):
        assert AttentionRequest(head_dim=64, scale=scale).softmax_scale == factor
    assert AttentionRequest(dtype="float16").kv_storage == "float16"


def test_every_field_says_how_it_is_judged_and_what_it_is():
    fields = request_fields()
    assert [f.name for f in fields] == [f.name for f in dataclasses.fields(AttentionRequest)]
    for field in fields:
        assert field.kind in ("required", "option", "context")
        assert field.doc
    assert [f.name for f in fields if f.kind == "required"] == ["family", "dtype", "head_dim"]
    numbers = {int(n) for f in fields for n in re.findall(r"\bS(\d+)\b", f.doc)}
    assert numbers <= set(range(1, 13))
    assert numbers >= {1, 2, 3, 4, 5, 6, 8, 9, 10, 11}, "a rule of the semantics has lost its field"


def test_the_words_are_the_ones_of_the_command_line():
    assert FAMILIES == ("dense", "varlen", "paged", "mla", "block_sparse", "linear")
    assert PHASES == ("prefill", "extend", "decode", "verify")


def test_the_summary_shows_what_is_not_off():
    request = AttentionRequest(platform="cuda", arch="sm90", heads=32, kv_heads=8, softcap=30.0, sinks=True)
    assert request.summary() == "dense prefill, cuda:sm90, bfloat16, H=32/8 D=128, softcap=30.0, sinks"
    mixed = AttentionRequest(head_dim=192, v_head_dim=128, causal="bottom_right")
    assert mixed.summary() == "dense prefill, cpu, bfloat16, H=1/1 D=192/128, causal=bottom_right"
