"""S12: a field that a later release adds to the request is refused by every backend that was written before it.

Every backend means every row of every package of this repository, on its own platform: built ones here, planned ones as
if they were built and everything was installed.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from polyattn.contract import (
    FAMILIES,
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
from polyattn.errors import UnsupportedRequestError
from polyattn.registry.manager import get_manager
from polyattn.registry.platforms import CORE_PLATFORMS
from polyattn.selection.inspection import what_if
from polyattn.selection.select import Catalogue, Choice, Offer, Policy, select

BACKENDS = tuple(get_manager().backends.values())
ROWS = [(info, row) for info in BACKENDS for provider in info.providers for row in provider.rows]
PLATFORMS = tuple(info.name for info in CORE_PLATFORMS)
PACKAGES = {p.parent.name for p in Path(__file__).parents[2].glob("plugins/[!_]*/pyproject.toml")}


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


def witness(row: Row, family: str = "") -> Later:
    """A request that the row is meant for, as far as its own constraints say; of `family` where several are."""
    fields: dict[str, Any] = {}
    for name in {**row.allows, **row.when}:
        both = [c for c in (row.when.get(name), row.allows.get(name)) if c is not None]
        # Of what a rewrite relieves the kernel, the row is meant for what it names, not for what the kernel takes.
        both = [row.when[name]] if name in row.when and name in row.lowered else both
        good = [v for c in both for v in candidates(name, c) if all(other.reason(v) is None for other in both)]
        assert good, f"{name}: no value satisfies {' and '.join(c.describe() for c in both)}"
        fields[name] = good[0]
    if family:
        fields["family"] = family
    if "dims" in fields:
        fields["head_dim"], fields["v_head_dim"] = fields.pop("dims")
    if (group := fields.pop("group", 1)) != 1:
        fields["heads"], fields["kv_heads"] = group * fields.get("kv_heads", 1), fields.get("kv_heads", 1)
    if not fields.pop("same_dims", True):
        fields["v_head_dim"] = fields["head_dim"] + 1
    if "kv_storage" in fields:
        fields["kv_dtype"] = fields.pop("kv_storage")
    return Later(**fields)


def families(row: Row) -> list[str]:
    named = [c for c in (row.when.get("family"), row.allows.get("family")) if c is not None]
    return [family for family in FAMILIES if all(c.reason(family) is None for c in named)]


def test_every_package_platform_and_family_is_among_them():
    """What follows would say nothing of a package that is not installed."""
    plugins = get_manager().plugins
    absent = [name for name in sorted(PACKAGES) if name not in plugins or plugins[name].state != "ready"]
    assert not absent, f"install plugins/{', plugins/'.join(absent)} first, or name them in POLYATTN_EXTRA_PLUGINS"
    assert {info.platform for info in BACKENDS} >= set(PLATFORMS)
    assert {family for _, row in ROWS for family in families(row)} == set(FAMILIES)
    assert {provider.planned for info in BACKENDS for provider in info.providers} == {True, False}


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
def test_every_backend_refuses_it_in_a_selection(info: BackendInfo):
    """Alone on its platform, so without fallbacks; by name and automatically, exact rewrites included."""
    alone = dataclasses.replace(info, fallbacks=(), aliases=())
    here = Catalogue((Offer(alone, "test", "hardware"),), get_manager().platforms)
    for row in (row for provider in info.providers for row in provider.rows):
        request = dataclasses.replace(witness(row), platform=info.platform)
        named = Policy(Choice(info.name, "argument"), what_if=True)
        # Nobody is given a place without being named.
        policies = [] if request.place else [Policy(None, what_if=True)]
        if info.platform != "mps":  # where whatever is asked for becomes SDPA
            assert select(request, here, named).backend == info.name
            policies.append(named)
        for policy in policies:
            for name, value in ON.items():
                with pytest.raises(UnsupportedRequestError) as caught:
                    select(dataclasses.replace(request, **{name: value}), here, policy)
                assert f"{name}={value!r} is not declared" in "; ".join(caught.value.rejected[info.name])


def spelt(request: AttentionRequest) -> str:
    """A request's machine in the words of `--assume-platform`."""
    words = request.arch or "+".join(request.features)
    toolkit = "@" + ".".join(map(str, request.toolkit)) if request.toolkit else ""
    return request.platform + (f":{words}" if words else "") + toolkit


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_nobody_on_any_platform_takes_it(platform: str, family: str):
    """As people ask it, `polyattn.what_if` with everything installed: all backends at once, with their fallbacks."""
    here = [info for info in BACKENDS if info.platform == platform]
    needs = {need.distribution for info in here for provider in info.providers for need in provider.requires}
    for info in here:
        rows = [row for provider in info.providers for row in provider.rows if family in families(row)]
        for row in rows[:1]:
            request = dataclasses.replace(witness(row, family), platform=platform)
            asked: dict[str, Any] = {"platform": spelt(request), "installed": needs}
            by_name = () if platform == "mps" else (info.name,)
            assert [what_if(request, **asked, backend=name).backend for name in by_name] == list(by_name)
            # Nobody is given a place without being named.
            for backend in by_name if request.place else (None, *by_name):
                with pytest.raises(UnsupportedRequestError) as caught:
                    what_if(dataclasses.replace(request, temperature=0.5), **asked, backend=backend)
                assert "temperature=0.5 is not declared" in "; ".join(caught.value.rejected[info.name])


def test_a_row_that_knows_the_field_takes_it():
    fields = [f.name for f in request_fields(Later)]
    assert fields[-2:] == ["temperature", "rotary"]
    assert dict(Later(temperature=0.5, rotary="none").active()) == {"temperature": 0.5}
    assert {r.name for r in request_fields()} == set(fields[:-2])
