"""Both sides of every documented limit, provider by provider: what its rows take, and what they refuse in which words.

`test_records.py` has whole selections, among them what exact rewrites serve beyond these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from polyattn.contract import Accepted, Rejected, judge
from polyattn.testing.emulators import Emulated

PAGED = {"family": "paged", "layout": "THD", "heads": 32, "kv_heads": 8, "page_size": 64, "phase": "extend"}
EXTEND = {**PAGED, "s_relation": "fewer", "causal": "bottom_right"}
DECODE = {**PAGED, "s_relation": "one", "phase": "decode"}
MLA = {**DECODE, "family": "mla", "heads": 128, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "scale": 0.07}
PACKED = {"family": "varlen", "layout": "THD"}
E4M3 = {"kv_dtype": "fp8_e4m3", "kv_scales": "tensor"}
OF_192 = {"head_dim": 192, "v_head_dim": 128}
MORE_RIGHT = {"window": (-1, 9), "s_relation": "more"}

Taken = list[dict[str, Any]]
Refused = list[tuple[dict[str, Any], str]]


class Limits(NamedTuple):
    """Of one provider on one chip: changes of a request that it takes as they are, and those that it refuses."""

    name: str
    provider: str
    chip: str
    usual: dict[str, Any]
    taken: Taken
    refused: Refused


# What every provider of dense and packed batches says alike.
HALVES: Refused = [
    ({"dtype": "float32"}, "dtype='float32' is not one of bfloat16, float16"),
    ({"head_dim": 264}, "head_dim=264 is not 8 to 256, a multiple of 8"),
    ({"head_dim": 100}, "head_dim=100 is not 8 to 256, a multiple of 8"),
    ({"alibi": True}, "alibi=True is not declared"),
    ({"mask": "bool"}, "mask='bool' is not declared"),
    ({"causal": "top_left", "s_relation": "fewer"}, "causal='top_left' is not one of none, bottom_right"),
    ({"dropout": 0.1, "lse": True}, "dropout=0.1 is not declared"),
    ({"softcap": 30.0}, "softcap=30.0 is not declared"),
    (MORE_RIGHT, "window=(-1, 9) has a right bound"),
]
WIDTHS: Taken = [{"head_dim": 8}, {"head_dim": 256}, {"dtype": "float16", "dropout": 0.1, "grad": ("query",)}]

TABLE = [
    Limits(
        "fa",
        "aiter",
        "gfx942",
        {},
        [
            *WIDTHS,
            {**OF_192, "lse": True, "grad": ("query", "lse")},
            {"sinks": True},
            {"window": (-1, 9), "s_relation": "fewer"},
            {**PACKED, "softcap": 30.0, "lse": True},
        ],
        [
            *HALVES,
            ({**PACKED, "softcap": 30.0, "grad": ("query",)}, "softcap=30.0 is not declared"),
            ({"head_dim": 128, "v_head_dim": 64}, "v_head_dim=64 is not declared"),
        ],
    ),
    Limits("fa", "aiter", "gfx1100", {}, [], [({}, "arch='gfx1100' is not one of gfx90a, gfx942, gfx950")]),
    Limits(
        "fa",
        "aiter-0.1.7",
        "gfx942",
        {},
        [*WIDTHS, OF_192],
        [*HALVES, ({**PACKED, "softcap": 30.0}, "softcap=30.0 is not declared")],
    ),
    Limits(
        "fa",
        "fa2/flash-attn",
        "gfx1201",
        {},
        [*WIDTHS, {"window": (8, 8)}, {**PACKED, "window": (8, -1), "s_relation": "more", "lse": True}],
        [*HALVES, (OF_192, "v_head_dim=128 is not declared")],
    ),
    Limits("fa", "fa2/flash-attn", "gfx1030", {}, [], [({}, "arch='gfx1030' is not one of gfx90a, gfx942, gfx950")]),
    Limits(
        "fa",
        "fa2/flash-attn-triton",
        "gfx1201",
        {},
        [
            {"head_dim": 256, "lse": True, "grad": ("query",)},
            {"head_dim": 128, "s_relation": "more", "causal": "bottom_right"},
            {"head_dim": 96, "s_relation": "fewer", "causal": "bottom_right"},
            {**PACKED, "s_relation": "more", "lse": True, "grad": ("key",)},
        ],
        [
            ({"head_dim": 264}, "head_dim=264 is not 8 to 256"),
            (
                {"head_dim": 96, "s_relation": "more", "causal": "bottom_right"},
                "head_dim=96 is not one of 16, 32, 64, 128, 256",
            ),
            ({"window": (127, -1)}, "window=(127, -1) is not declared"),
            ({"softcap": 30.0}, "softcap=30.0 is not declared"),
            ({"dropout": 0.1}, "dropout=0.1 is not declared"),
            ({**PACKED, "causal": "bottom_right"}, "causal='bottom_right' is not none"),
        ],
    ),
    Limits(
        "aiter",
        "amd-aiter",
        "gfx90a",
        EXTEND,
        [
            {"page_size": 1},
            {"page_size": 48, "lse": True},
            {"page_size": 1024, "sinks": True},
            {"head_dim": 8},
            {"head_dim": 256, "softcap": 30.0, "window": (17, -1)},
            {**DECODE, "causal": "none", "graph_capture": True},
        ],
        [
            ({"head_dim": 264}, "head_dim=264 is not 8 to 256, a multiple of 8"),
            ({"dtype": "float32"}, "dtype='float32' is not one of bfloat16, float16"),
            ({"kv_layout": "HND"}, "kv_layout='HND' is not declared"),
            (OF_192, "v_head_dim=128 is not declared"),
            ({**MORE_RIGHT, "causal": "none"}, "window=(-1, 9) has a right bound"),
            ({"mask": "bool"}, "mask='bool' is not declared"),
            (MLA, "arch='gfx90a' is not"),
        ],
    ),
    *(
        Limits(
            "aiter",
            "amd-aiter",
            chip,
            MLA,
            [*({"heads": n} for n in heads), {"lse": True, "graph_capture": True}, {"page_size": 48}],
            [
                *(({"heads": n}, f"heads={n} is not one of {', '.join(map(str, heads))}") for n in (4, 24, *others)),
                ({"dtype": "float16"}, "dtype='float16' is not bfloat16"),
                ({"window": (9, -1)}, "window=(9, -1) is not declared"),
                ({"softcap": 30.0}, "softcap=30.0 is not declared"),
                ({"head_dim": 192, "v_head_dim": 128}, "dims=(192, 128) is not (576, 512)"),
                ({"spec_topk": 4, "phase": "verify"}, "spec_topk=4 is not 0 to 1"),
            ],
        )
        for chip, heads, others in (("gfx942", (8, 16, 32, 128), (64,)), ("gfx950", (8, 16, 32, 64, 128), ()))
    ),
    Limits(
        "aiter",
        "amd-aiter-0.1.7",
        "gfx942",
        MLA,
        [{"heads": 16}, {"heads": 128}],
        [
            ({"heads": 32}, "heads=32 is not one of 16, 128"),
            ({"lse": True}, "lse=True is not declared"),
            ({"graph_capture": True}, "graph_capture=True is not declared"),
        ],
    ),
    Limits(
        "aiter",
        "amd-aiter/triton",
        "gfx1201",
        EXTEND,
        [
            *({"page_size": n} for n in (16, 32, 64, 128, 256)),
            {"head_dim": 16, "sinks": True},
            {"head_dim": 256, "softcap": 30.0, "window": (17, -1)},
            {**DECODE, "causal": "none"},
            E4M3,
        ],
        [
            *(({"page_size": n}, f"page_size={n} is not one of 16, 32, 64, 128, 256") for n in (1, 8, 48, 512)),
            ({"head_dim": 8}, "head_dim=8 is not 16 to 256"),
            ({"head_dim": 264}, "head_dim=264 is not 16 to 256"),
            ({"causal": "none"}, "s_relation='fewer' is not one"),
            ({"causal": "none", "window": (-1, 3)}, "window=(-1, 3) has a right bound"),
            ({"lse": True}, "lse=True is not declared"),
            ({"spec_topk": 4, "tree": True, "phase": "verify"}, "spec_topk=4 is not 0 to 1"),
        ],
    ),
    Limits(
        "aiter",
        "amd-aiter/triton",
        "gfx950",
        EXTEND,
        [E4M3, {**E4M3, "kv_scales": ""}],
        [
            ({**E4M3, "kv_scales": "head"}, "kv_scales='head' is not"),
            ({"kv_dtype": "fp8_e5m2", "kv_scales": "tensor"}, "kv_dtype='fp8_e5m2' is not fp8_e4m3"),
            ({}, "kv_dtype='auto' is not fp8_e4m3"),
            ({**E4M3, "page_size": 8}, "page_size=8 is not one of 16, 32, 64, 128, 256"),
        ],
    ),
    Limits("aiter", "amd-aiter/triton", "gfx942", EXTEND, [], [(E4M3, "arch='gfx942' is not one of gfx950, gfx1200")]),
    Limits(
        "aiter_sage",
        "amd-aiter",
        "gfx950",
        {},
        [{"head_dim": 64, "lse": True}, {"head_dim": 128, "causal": "bottom_right", "s_relation": "fewer"}],
        [
            ({"head_dim": 96}, "head_dim=96 is not one of 64, 128"),
            ({"dtype": "float32"}, "dtype='float32' is not one of bfloat16, float16"),
            ({"s_relation": "more"}, "s_relation='more' is not one of equal, one, fewer"),
            ({"window": (9, -1)}, "window=(9, -1) is not declared"),
            ({"softcap": 30.0}, "softcap=30.0 is not declared"),
            ({"grad": ("query",)}, "grad=('query',) is not declared"),
            (PACKED, "family='varlen' is not dense"),
        ],
    ),
    Limits("aiter_sage", "amd-aiter", "gfx90a", {}, [], [({}, "arch='gfx90a' is not one of gfx942, gfx950")]),
    Limits(
        "wave",
        "wave-lang",
        "gfx942",
        EXTEND,
        [{"head_dim": 64, "page_size": 1}, {"head_dim": 128, "softcap": 30.0, "scale": 0.1}, DECODE],
        [
            ({"head_dim": 96}, "head_dim=96 is not one of 64, 128"),
            ({"dtype": "float32"}, "dtype='float32' is not one of bfloat16, float16"),
            ({"window": (9, -1)}, "window=(9, -1) is not declared"),
            ({"sinks": True}, "sinks=True is not declared"),
            ({"lse": True}, "lse=True is not declared"),
            ({"phase": "verify"}, "phase='verify' is not one of prefill, extend, decode"),
            ({"graph_capture": True}, "graph_capture=True is not declared"),
            ({"kv_layout": "HND"}, "kv_layout='HND' is not declared"),
        ],
    ),
    Limits("wave", "wave-lang", "gfx90a", EXTEND, [], [({}, "arch='gfx90a' is not one of gfx942, gfx950")]),
]


def cases() -> Iterator[Any]:
    for limits in TABLE:
        target = Emulated(limits.name, limits.provider, f"rocm:{limits.chip}")
        for changes, words in (*((changes, "") for changes in limits.taken), *limits.refused):
            told = ", ".join(f"{name}={value}" for name, value in changes.items() if limits.usual.get(name) != value)
            title = f"{limits.name}: {limits.provider} on {limits.chip}: {told or 'usual'}"
            yield pytest.param(target, {**limits.usual, **changes}, words, id=title)


@pytest.mark.parametrize(("target", "fields", "words"), [*cases()])
def test_each_limit_from_both_sides(target: Emulated, fields: dict[str, Any], words: str) -> None:
    """Taken as it is where `words` is empty."""
    verdict = judge(target.rows, target.request(**fields))
    if not words:
        assert isinstance(verdict, Accepted), "; ".join(verdict.reasons)
        assert not verdict.lowerings
    else:
        assert isinstance(verdict, Rejected)
        assert words in "; ".join(verdict.reasons)
