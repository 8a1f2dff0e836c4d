"""S12: a field that a later release adds to the request is refused by every backend that was written before it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from polyattn.errors import UnsupportedRequestError
from polyattn.plugins import get_manager
from polyattn.records import (
    Accepted,
    AtLeast,
    AttentionRequest,
    BackendInfo,
    Constraint,
    Has,
    OneOf,
    Range,
    Rejected,
    Row,
    judge,
    option,
    request_fields,
)
from polyattn.selection import Catalogue, Choice, Offer, Policy, select

BACKENDS = tuple(get_manager().backends.values())
ROWS = [(info, row) for info in BACKENDS for provider in info.providers for row in provider.rows]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Later(AttentionRequest):
    """The request of a release to come."""

    temperature: float = option(0.0, doc="a logit temperature, 0 = off")
    rotary: str = option("", off=lambda r: r.rotary in ("", "none"), doc="rotary embedding applied in the kernel")


ON = {"temperature": 0.5, "rotary": "neox"}


def candidates(name: str, constraint: Constraint) -> list[Any]:
    """Values of a field worth trying against a constraint, its default first."""
    found = [getattr(AttentionRequest(), name)]
    if isinstance(constraint, OneOf):
        found += constraint.values
    if isinstance(constraint, Range):
        step = constraint.multiple_of
        found += [-(-(edge or 0) // step) * step for edge in (constraint.low, 1, constraint.high, 4096)]
    if isinstance(constraint, AtLeast):
        found.append(constraint.low)
    if isinstance(constraint, Has):
        found.append((constraint.member,))
    return found


def witness(row: Row) -> Later:
    """A request that the row is meant for, as far as its own constraints say."""
    fields: dict[str, Any] = {}
    for name in {**row.allows, **row.when}:
        both = [c for c in (row.when.get(name), row.allows.get(name)) if c is not None]
        good = [v for c in both for v in candidates(name, c) if all(other.reason(v) is None for other in both)]
        assert good, f"{name}: no value satisfies {' and '.join(c.describe() for c in both)}"
        fields[name] = good[0]
    if "dims" in fields:
        fields["head_dim"], fields["v_head_dim"] = fields.pop("dims")
    if (group := fields.pop("group", 1)) != 1:
        fields["heads"], fields["kv_heads"] = group * fields.get("kv_heads", 1), fields.get("kv_heads", 1)
    if not fields.pop("same_dims", True):
        fields["v_head_dim"] = fields["head_dim"] + 1
    if "kv_storage" in fields:
        fields["kv_dtype"] = fields.pop("kv_storage")
    return Later(**fields)


@pytest.mark.parametrize("info, row", ROWS, ids=[f"{i}-{info.id}" for i, (info, _) in enumerate(ROWS)])
def test_every_row_refuses_a_field_it_does_not_know(info, row):
    known = witness(row)
    assert isinstance(judge((row,), known), Accepted), "a row that accepts nothing proves nothing"
    for name, value in ON.items():
        verdict = judge((row,), dataclasses.replace(known, **{name: value}))
        assert isinstance(verdict, Rejected)
        assert [r for r in verdict.reasons if name in r] == [f"{name}={value!r} is not declared"]
    assert isinstance(judge((row,), dataclasses.replace(known, rotary="none")), Accepted), "off is no demand"


@pytest.mark.parametrize("info", BACKENDS, ids=[b.id for b in BACKENDS])
def test_every_backend_refuses_it_by_name_in_a_selection(info: BackendInfo):
    """Whole backends, fallbacks aside: planned adapters as if built, everything installed."""
    alone = dataclasses.replace(info, fallbacks=(), aliases=())
    here = Catalogue((Offer(alone, "test", "hardware"),), get_manager().platforms)
    for row in (row for provider in info.providers for row in provider.rows):
        request = dataclasses.replace(witness(row), platform=info.platform)
        policy = Policy(Choice(info.name, "argument"), what_if=True)
        if info.platform != "mps":  # where whatever is asked for becomes SDPA
            assert select(request, here, policy).backend == info.name
        with pytest.raises(UnsupportedRequestError, match=r"temperature=0\.5 is not declared"):
            select(dataclasses.replace(request, temperature=0.5), here, Policy(None, what_if=True))


def test_a_row_that_knows_the_field_takes_it():
    fields = [f.name for f in request_fields(Later)]
    assert fields[-2:] == ["temperature", "rotary"]
    assert dict(Later(temperature=0.5, rotary="none").active()) == {"temperature": 0.5}
    assert {r.name for r in request_fields()} == set(fields[:-2])
