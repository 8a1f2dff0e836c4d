"""Capability as data: rows of constraints, the shorthand that builds them, and the verdict with its reasons."""

from __future__ import annotations

import pytest

from polyattn.contract import (
    ANY,
    SESSION,
    Accepted,
    AtLeast,
    AttentionRequest,
    Has,
    OneOf,
    Range,
    Rejected,
    SubsetOf,
    Window,
    conditions,
    judge,
    row,
)
from polyattn.errors import PluginError

PLAIN = {"family": "dense", "dtype": ("float16", "bfloat16"), "head_dim": Range(8, 256, multiple_of=8)}

CONSTRAINTS = [
    (ANY, [1, "x", None], [], "any"),
    (OneOf(("a", "b")), ["a", "b"], ["c", None], "one of a, b"),
    (OneOf((64,)), [64], [128], "64"),
    (OneOf(((192, 128),)), [(192, 128)], [(128, 128)], "(192, 128)"),
    (Range(8, 256), [8, 256, 80], [7, 257], "8 to 256"),
    (Range(8), [8, 10**6], [7], ">= 8"),
    (Range(high=4), [4, -1], [5], "<= 4"),
    (Range(8, 256, 8), [8, 248], [12, 260], "8 to 256, a multiple of 8"),
    (Range(multiple_of=16), [16, 32], [8], "any number, a multiple of 16"),
    (Range(0.0, 0.999), [0.0, 0.5], [1.0], "0.0 to 0.999"),
    (SubsetOf(("query", "key")), [(), ("key",), ("query", "key")], [("value",), ("key", "lse")], "of query, key"),
    (AtLeast((12, 3)), [(12, 3), (13, 0), ()], [(12, 2), (11,)], ">= 12.3"),
    (Has("amx"), [("amx",), ("avx512", "amx")], [(), ("avx512",)], "with amx"),
    (Has("amx", present=False), [()], [("amx",)], "without amx"),
    (Window(), [(-1, -1), (3, 4)], [], "both bounds"),
    (Window(right=False), [(-1, -1), (3, -1)], [(3, 4), (-1, 0)], "left bound"),
    (Window(left=False), [(-1, 4)], [(3, -1)], "right bound"),
    (SESSION, [False, "session"], [True], "planned steps of polyattn.serving"),
]


@pytest.mark.parametrize("constraint, good, bad, words", CONSTRAINTS, ids=[c[3] for c in CONSTRAINTS])
def test_a_constraint_allows_or_ends_the_sentence(constraint, good, bad, words):
    assert constraint.describe() == words
    assert [constraint.reason(value) for value in good] == [None] * len(good)
    for value in bad:
        assert constraint.reason(value).split(" ")[0] in ("is", "includes", "has")


def test_reasons_name_field_value_and_what_is_allowed():
    verdict = judge((row(**PLAIN, grad=("query",)),), AttentionRequest(dtype="float32", head_dim=12, grad=("value",)))
    assert isinstance(verdict, Rejected)
    assert verdict.reasons == (
        "dtype='float32' is not one of float16, bfloat16",
        "head_dim=12 is not 8 to 256, a multiple of 8",
        "grad=('value',) includes value, allowed: query",
    )


def test_the_shorthand_of_a_row():
    built = row(
        **PLAIN, when={"arch": "sm90"}, causal=True, sinks=False, layout={"BSHD", "BHSD"}, grad=["query"], note="page 3"
    )
    assert built.when == {"family": OneOf(("dense",)), "arch": OneOf(("sm90",))}
    assert built.allows["causal"] is ANY
    assert "sinks" not in built.allows
    assert built.allows["layout"] == OneOf(("BHSD", "BSHD"))
    assert built.allows["grad"] == SubsetOf(("query",))
    assert built.note == "page 3"


def test_in_a_condition_true_and_false_are_values():
    """A `False` that meant 'not declared' here would make the condition hold always."""
    assert conditions(cross=True, sinks=False) == {"cross": OneOf((True,)), "sinks": OneOf((False,))}
    built = row(**PLAIN, when={"lse": False})
    assert isinstance(judge((built,), AttentionRequest()), Accepted)
    assert judge((built,), AttentionRequest(lse=True)).reasons == ("lse=True is not False",)


@pytest.mark.parametrize(
    "build",
    [
        lambda: row(**PLAIN, causl=True),
        lambda: row(**PLAIN, when={"causl": "none"}),
        lambda: row(**PLAIN, lowered={"causl": "trim"}),
        lambda: conditions(causl="none"),
    ],
    ids=["allows", "when", "lowered", "conditions"],
)
def test_a_field_that_does_not_exist(build):
    with pytest.raises(PluginError, match=r"'causl', which is no request field\. Did you mean 'causal'"):
        build()


@pytest.mark.parametrize("lacking", ["dtype", "head_dim", "family"])
def test_a_row_must_declare_what_is_required(lacking):
    fields = {k: v for k, v in PLAIN.items() if k != lacking}
    verdict = judge((row(**fields),), AttentionRequest())
    assert verdict == Rejected(f"the capability row does not declare {lacking}")


def test_a_pair_of_dims_declares_both():
    mla = row(family="dense", dtype="bfloat16", dims=((192, 128), (128, 128)))
    assert judge((mla,), AttentionRequest(head_dim=192, v_head_dim=128))
    assert judge((mla,), AttentionRequest(head_dim=128))
    verdict = judge((mla,), AttentionRequest(head_dim=192))
    assert verdict.reasons == ("dims=(192, 192) is not one of (192, 128), (128, 128)",)


def test_an_option_that_is_not_declared_is_refused_whatever_the_rest_says():
    verdict = judge((row(**PLAIN),), AttentionRequest(softcap=30.0, sinks=True, heads=4, kv_heads=2))
    assert verdict.reasons == (
        "softcap=30.0 is not declared",
        "sinks=True is not declared",
        "group=2 is not declared",
    )


def test_a_condition_declares_its_option_too():
    built = row(**PLAIN, when={"phase": "decode"})
    assert judge((built,), AttentionRequest(phase="decode"))
    assert judge((built,), AttentionRequest()).reasons == ("phase='prefill' is not decode",)


def test_context_is_judged_where_it_is_mentioned():
    request = AttentionRequest(arch="gfx942", toolkit=(6, 4), layout="BHSD")
    assert judge((row(**PLAIN),), request)
    assert judge((row(**PLAIN, arch="gfx950"),), request).reasons == ("arch='gfx942' is not gfx950",)


def test_rows_are_alternatives():
    rows = (row(**PLAIN, softcap=Range(0.0)), row(**PLAIN, sinks=True))
    assert judge(rows, AttentionRequest(softcap=30.0)).row is rows[0]
    assert judge(rows, AttentionRequest(sinks=True)).row is rows[1]
    assert not judge(rows, AttentionRequest(softcap=30.0, sinks=True))


def test_the_nearest_row_explains_a_refusal():
    far = row(**{**PLAIN, "dtype": "float32", "head_dim": 64})
    near = row(**{**PLAIN, "head_dim": 64})
    elsewhere = row(**PLAIN, when={"arch": "sm90"})
    for rows in ((far, near, elsewhere), (elsewhere, near, far)):
        assert judge(rows, AttentionRequest()).reasons == ("head_dim=128 is not 64",)


def test_rows_that_want_other_values_of_one_field_are_told_together():
    rows = [row(**PLAIN, when={"arch": archs}) for archs in ("sm90", ("sm80", "sm90"), ("sm100",))]
    asked = AttentionRequest(arch="sm86")
    assert judge(rows, asked).reasons == ("arch='sm86' is not one of sm90, sm80, sm100",)
    other = row(**PLAIN, when={"arch": "sm120", "cross": True})
    assert judge([*rows, other], asked).reasons == ("arch='sm86' is not one of sm90, sm80, sm100",)
    bounded = row(**PLAIN, when={"head_dim": Range(256)})
    assert judge([bounded, row(**PLAIN, when={"head_dim": 192})], asked).reasons == ("head_dim=128 is not >= 256",)


def test_where_no_row_applies_the_nearest_condition_explains_it():
    rows = (row(**PLAIN, when={"arch": "sm90", "cross": True}), row(**PLAIN, when={"arch": "sm100"}))
    assert judge(rows, AttentionRequest(arch="sm80")).reasons == ("arch='sm80' is not sm100",)
    assert judge((), AttentionRequest()).reasons == ("no capability row is declared",)


def test_lowerings_are_taken_where_nothing_better_is_there():
    padded = row(**{**PLAIN, "head_dim": Range(8, 256, 64)}, lowered={"head_dim": "pad_head_dim"})
    direct = row(**PLAIN)
    request = AttentionRequest(head_dim=80)
    assert judge((padded,), request).lowerings == ("pad_head_dim",)
    for rows in ((padded, direct), (direct, padded)):
        verdict = judge(rows, request)
        assert (verdict.lowerings, verdict.row) == ((), direct)
    assert judge((padded,), AttentionRequest(head_dim=64)).lowerings == ()


def test_an_option_may_be_lowered_as_a_whole():
    built = row(**PLAIN, lowered={"sinks": "sinks_from_lse"})
    assert judge((built,), AttentionRequest(sinks=True)).lowerings == ("sinks_from_lse",)
    assert judge((built,), AttentionRequest()).lowerings == ()


def test_verdicts_are_truth_values():
    assert Accepted()
    assert not Rejected("no")
    assert Rejected("no") == Rejected(["no"])
    assert Rejected("no").reasons == ("no",)
