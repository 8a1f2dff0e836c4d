"""The rules that live in the request rather than in arithmetic, and the page that numbers all of them."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import polyattn
from polyattn.contract import Accepted, AttentionRequest, Range, Rejected, judge, option, row
from polyattn.dispatch.dense import DenseSite
from polyattn.nn import LocalAttention

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "semantics.md"
DENSE = row(family="dense", dtype=("float32",), head_dim=Range(8, 256), phase="prefill")
LINEAR = row(family="linear", dtype=("bfloat16",), head_dim=Range(8, 256), method=("gdn",), state_layout=("KV",))


def test_s10_linear_state_is_fp32_unless_declared_and_its_layout_is_part_of_the_type():
    request = AttentionRequest(family="linear", dtype="bfloat16", method="gdn", state_layout="KV")
    assert isinstance(judge([LINEAR], request), Accepted)
    assert isinstance(judge([LINEAR], dataclasses.replace(request, state_dtype="float32")), Accepted)
    for change, field in (({"state_dtype": "bfloat16"}, "state_dtype"), ({"state_layout": "VK"}, "state_layout")):
        verdict = judge([LINEAR], dataclasses.replace(request, **change))
        assert isinstance(verdict, Rejected)
        assert any(field in reason for reason in verdict.reasons)


@pytest.mark.parametrize(
    "change",
    [
        {"causal": "bottom_right"},
        {"window": (3, -1)},
        {"chunk": 8},
        {"softcap": 30.0},
        {"sinks": True},
        {"mask": "bool"},
        {"alibi": True},
        {"scale": 0.5},
        {"dropout": 0.1},
        {"lse": True},
        {"grad": ("query",)},
        {"kv_heads": 1, "heads": 2},
    ],
    ids=lambda c: next(iter(c)),
)
def test_s12_an_undeclared_field_is_refused_with_its_name(change):
    request = AttentionRequest(dtype="float32")
    assert isinstance(judge([DENSE], request), Accepted)
    verdict = judge([DENSE], dataclasses.replace(request, **change))
    assert isinstance(verdict, Rejected)
    name = "group" if "kv_heads" in change else next(iter(change))
    assert any(name in reason for reason in verdict.reasons)


def test_s12_a_field_added_later_is_refused_by_every_backend_that_does_not_know_it():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Later(AttentionRequest):
        temperature: float = option(0.0, doc="a field of the next release")

    assert isinstance(judge([DENSE], Later(dtype="float32")), Accepted)
    verdict = judge([DENSE], Later(dtype="float32", temperature=0.5))
    assert isinstance(verdict, Rejected)
    assert "temperature=0.5 is not declared" in verdict.reasons


def test_the_page_has_every_number_once_in_order_and_every_number_has_a_test():
    numbers = re.findall(r"^## S(\d+) ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert numbers == [str(n) for n in range(1, 13)]
    tests = "".join(path.read_text(encoding="utf-8") for path in HERE.glob("test_*.py"))
    cited = set(re.findall(r"def test_s(\d+)_", tests))
    assert cited == set(numbers)


CALLS = {
    **{name: getattr(polyattn, name) for name in ("attention", "varlen_attention", "paged_attention", "mla_attention")},
    "block_sparse_attention": polyattn.block_sparse_attention,
    "linear_attention": polyattn.linear_attention,
    "scaled_dot_product_attention": polyattn.scaled_dot_product_attention,
    "bind": polyattn.bind,
    "bind(...)": DenseSite.__call__,
    "nn.LocalAttention": LocalAttention,
    "nn.LocalAttention(...)": LocalAttention.forward,
}


def spelt(call, kind):
    """The arguments of a kind, as the page writes them."""
    parameters = inspect.signature(call).parameters.values()
    found = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters if p.kind is kind]
    return f"`{', '.join(name for name in found if name != 'self')}`".replace("``", "")


def test_the_page_shows_the_arguments_of_every_call():
    rows = re.findall(r"^\| `(\S+)` \| (.*?) ?\| (.*?) ?\|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    by_name = {name: (given, keywords) for name, given, keywords in rows if name in CALLS}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    assert by_name == {name: tuple(spelt(call, kind) for kind in kinds) for name, call in CALLS.items()}
