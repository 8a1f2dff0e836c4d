"""The first call of a new signature: each fact is taken once, and few functions are called."""

from __future__ import annotations

import subprocess
import sys

import pytest

from polyattn.contract import ANY, AtLeast, AttentionRequest, Has, OneOf, Range, SubsetOf, Window
from polyattn.contract.capability import holds
from polyattn.contract.request import made

COUNT = """
import collections, sys
import torch
import polyattn

def call(d):
    q = torch.zeros(1, 8, 1, d)
    polyattn.attention(q, q, q, layout="BHSD")

for d in range(8, 16):
    call(d)
seen = collections.Counter()
sys.setprofile(lambda frame, event, arg: seen.update([frame.f_code.co_qualname]) if event == "call" else None)
call(17)
sys.setprofile(None)
print(sum(seen.values()), [(name, seen[name]) for name in sys.argv[1:]])
"""
ONCE = ("transform", "aligned", "capturing", "autocast_dtype", "mode", "relation", "dense_request")


def test_a_warm_miss_makes_few_calls_and_takes_each_fact_once() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT, *ONCE], capture_output=True, text=True, check=True)
    total, _, rest = done.stdout.strip().partition(" ")
    # 303 before each fact was taken once: this is half of them, and a few for other versions of torch and Python.
    assert int(total) <= 160, done.stdout
    assert all(count == 1 for _, count in eval(rest)), rest


@pytest.mark.parametrize(
    ("constraint", "value"),
    [
        *((OneOf((1, 2)), value) for value in (1, 3)),
        *((Range(8, 64, multiple_of=8), value) for value in (8, 12, 72, 4)),
        *((SubsetOf(("query",)), value) for value in ((), ("query",), ("key",))),
        *((Window(left=False), value) for value in ((-1, 0), (3, 0))),
        *((Has("amx"), value) for value in ((), ("amx",))),
        *((AtLeast((12, 1)), value) for value in ((), (12, 0), (13,))),
        (ANY, 7),
    ],
)
def test_what_is_allowed_is_what_no_reason_speaks_against(constraint: object, value: object) -> None:
    class Asked:
        field = value

    allowed = constraint.reason(value) is None  # type: ignore[attr-defined]
    assert holds({"field": constraint}, Asked()) is allowed  # type: ignore[dict-item, arg-type]
    if hasattr(constraint, "allows"):
        assert constraint.allows(value) is allowed


def test_a_condition_of_a_plugin_needs_no_allows() -> None:
    class Odd:
        def reason(self, value: int) -> str | None:
            return None if value % 2 else "is even"

        def describe(self) -> str:
            return "odd"

    assert holds({"heads": Odd()}, AttentionRequest(heads=3))
    assert not holds({"heads": Odd()}, AttentionRequest(heads=4))


def test_a_request_made_at_once_is_the_same_request() -> None:
    fields = {"dtype": "float16", "heads": 8, "causal": "bottom_right"}
    assert made(**fields) == AttentionRequest(**fields)  # type: ignore[arg-type]
    assert hash(made(**fields)) == hash(AttentionRequest(**fields))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="headz"):
        made(headz=8)
