"""How a chain of rewrites is found. Pure: nothing here touches a tensor."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from polyattn.contract import SESSION, Range, Rejected, row
from polyattn.errors import PluginError
from polyattn.lowering import LOWERINGS, MAX_STEPS, Planner, get_lowering, lowerings, refused_fields
from polyattn.lowering.base import Lowering, Rewrite

from .harness import dense, takes


def fake(name, cost, field="sinks", to=False, **changes):
    """A rewrite that sets a field to a value, for a price."""

    class Fake(Lowering):
        summary = f"{field} is {to}"

        def rewrites(self, request):
            if getattr(request, field) != to:
                yield Rewrite((dataclasses.replace(request, **{field: to}, **changes),), cost, detail=name)

        def bind(self, request, rewrite, inner, helpers):
            raise NotImplementedError

    Fake.name, Fake.fields = name, frozenset({field})
    return Fake()


@pytest.fixture
def only_these(monkeypatch):
    """`only_these(fakes)`: the catalogue holds nothing else."""
    return lambda *fakes: monkeypatch.setattr("polyattn.lowering.planning.lowerings", lambda: fakes)


def test_what_a_kernel_takes_needs_no_rewrite():
    request = dense(sinks=True)
    plan = Planner(takes()).plan(request)
    assert (plan.names, plan.cost, plan.length, plan.lines()) == ((), 0.0, 0, [])
    assert plan.request == request.normalised()


def test_what_no_rewrite_reaches_has_no_plan():
    assert Planner(takes(dropout=False)).plan(dense(dropout=0.1)) is None
    assert Planner(takes("linear")).plan(dense()) is None
    assert Planner(()).plan(dense()) is None


def test_the_cheapest_plan_is_chosen(only_these):
    only_these(fake("dear", 3.0), fake("cheap", 1.0), fake("dearest", 9.0))
    assert Planner(takes(sinks=False)).plan(dense(sinks=True)).names == ("cheap",)


def test_the_cheapest_is_that_of_the_whole_chain(only_these):
    # The first step is cheaper, and leads to a request that needs another.
    only_these(fake("first", 1.0, alibi=True), fake("then", 5.0, field="alibi"), fake("at once", 4.0))
    plan = Planner(takes(sinks=False, alibi=False)).plan(dense(sinks=True))
    assert (plan.names, plan.cost) == (("at once",), 4.0)
    plan = Planner(takes(sinks=False)).plan(dense(sinks=True))
    assert (plan.names, plan.cost) == (("first",), 1.0)


def test_of_equal_cost_the_shorter_chain_and_then_the_first_name_wins(only_these):
    two = (fake("first", 1.0, alibi=True), fake("then", 1.0, field="alibi"))
    rows = takes(sinks=False, alibi=False)
    only_these(*two, fake("at once", 2.0), fake("at once too", 2.0))
    assert Planner(rows).plan(dense(sinks=True)).names == ("at once",)
    only_these(fake("at once too", 2.0), fake("at once", 2.0), *two)
    assert Planner(rows).plan(dense(sinks=True)).names == ("at once too",)


def test_the_narrowest_width_costs_least():
    plan = Planner(takes(head_dim=(64, 128, 256))).plan(dense(head_dim=96))
    assert plan.lines()[0].startswith("pad_head_dim: D 96 -> 128 (cost ")
    assert plan.cost == plan.rewrite.cost


def test_costs_and_lines_are_those_of_every_step():
    plan = Planner(takes(layout="BHSD", head_dim=64, group=1)).plan(dense(head_dim=40, kv_heads=2))
    assert plan.names == ("layout", "pad_head_dim", "expand_gqa_heads")
    assert plan.length == 3
    steps = list(plan.steps())
    assert plan.cost == sum(step.rewrite.cost for step in steps) == pytest.approx(10.4)
    assert plan.lines() == [
        "layout: BSHD as BHSD (cost 0)",
        "pad_head_dim: D 40 -> 64 (cost 6.4)",
        "expand_gqa_heads: H_kv 2 -> 4 (cost 4)",
    ]


OPTIONS = ("sinks", "lse", "tree", "misaligned", "zero_size", "block_map", "block_sizes", "graph_capture")


@pytest.mark.parametrize("count", range(1, len(OPTIONS) + 1))
def test_a_chain_is_no_longer_than_it_may_be(only_these, count):
    """No rewrite is used twice, and what takes more of them than MAX_STEPS is refused."""
    names = OPTIONS[:count]
    only_these(*(fake(name, 1.0, field=name) for name in names))
    rows, request = takes(**dict.fromkeys(names, False)), dense(**dict.fromkeys(names, True))
    plan = Planner(rows).plan(request)
    assert (plan is not None) == (count <= MAX_STEPS)
    if plan is not None:
        assert plan.length == count
    for steps in range(count):
        assert Planner(rows).plan(request, steps) is None


def test_what_is_rewritten_is_recorded_by_itself():
    """A plan is of the tables of a step, and a rewrite reads others."""
    request = dense(head_dim=40, graph_capture="session")
    plan = Planner(takes(head_dim=64, graph_capture=True)).plan(request)
    assert [inner.request.graph_capture for inner in plan.inner] == [True]
    assert Planner(takes(head_dim=64, graph_capture=SESSION)).plan(request) is None
    assert Planner(takes(head_dim=(40, 64), graph_capture=SESSION)).plan(request).length == 0


def test_only_the_named_rewrites_are_used():
    rows = takes(layout="BHSD", head_dim=64)
    request = dense(head_dim=40)
    assert Planner(rows, only=("pad_head_dim",)).plan(request) is None
    assert Planner(rows, only=("pad_head_dim", "layout")).plan(request).length == 2
    assert Planner(rows, only=()).plan(request) is None
    assert Planner(rows, only=()).plan(dense(layout="BHSD")).length == 0


def test_an_unknown_name_is_the_plugins_mistake():
    with pytest.raises(PluginError, match=r"names the lowering 'pad_headdim', which does not exist.*pad_head_dim"):
        Planner(takes(), only=("pad_headdim",))
    with pytest.raises(PluginError, match="Known: layout, "):
        get_lowering("base")


def test_what_the_plugin_itself_refuses_may_be_rewritten():
    """A refusal of its own names no field: any rewrite may help, and what it leads to is asked again."""
    asked = []

    def narrow(request):
        asked.append(request)
        return Rejected("no BSHD today") if request.layout == "BSHD" else None

    plan = Planner(takes(), narrow=narrow).plan(dense(layout="BSHD"))
    assert plan.names == ("layout",)
    assert len(asked) == len(set(asked)), "each request is asked once"
    assert Planner(takes(), narrow=lambda request: Rejected("never")).plan(dense()) is None


def test_a_call_under_vmap_is_not_rewritten():
    rows = takes(layout="BHSD")
    assert Planner(rows).plan(dense(transform="vmap")) is None
    assert Planner(rows).plan(dense(transform="vmap", layout="BHSD")).length == 0
    assert Planner(rows).plan(dense(transform="subclass")).names == ("layout",)


def test_several_rows_are_several_ways():
    rows = (*takes(head_dim=256), *takes(head_dim=64, layout="BHSD"))
    assert Planner(rows).plan(dense(head_dim=40)).names == ("layout", "pad_head_dim")
    assert Planner(rows).plan(dense(head_dim=200)).names == ("pad_head_dim",)


def test_helpers_must_be_served_by_somebody(only_these):
    class Split(Lowering):
        name, summary, fields = "split", "two parts", frozenset({"tree"})

        def rewrites(self, request):
            inner = dataclasses.replace(request, tree=False)
            yield Rewrite((inner,), 1.0, helpers=(dataclasses.replace(inner, window=(-1, 0)),), detail="two parts")

        def bind(self, request, rewrite, inner, helpers):
            raise NotImplementedError

    only_these(Split())
    rows, request = takes(tree=False), dense(tree=True)
    assert Planner(rows).plan(request) is None
    asked = []
    plan = Planner(rows, helper=lambda wanted: asked.append(wanted) or "somebody").plan(request)
    assert plan.helpers == ("somebody",)
    assert plan.lines() == ["split: two parts (cost 1); the rest by somebody"]
    assert asked == [dense(causal="bottom_right").normalised()], "helpers are asked for in normal form"


def test_refused_fields_are_those_of_rows_in_reach():
    request = dense(sinks=True, head_dim=40, misaligned=True).normalised()
    assert refused_fields(takes(), request) is None
    assert refused_fields(takes(sinks=False, head_dim=64), request) == {"sinks", "head_dim"}
    assert refused_fields((*takes(sinks=False), *takes(head_dim=64)), request) == {"sinks", "head_dim"}
    assert refused_fields(takes("varlen"), request) == {"family"}
    assert refused_fields((row(family="dense", dtype="float32", head_dim=Range(8, 64)),), request) == {
        "sinks",
        "misaligned",
    }
    reachable = frozenset({"sinks"})
    assert refused_fields(takes(sinks=False, misaligned=False), request, reachable) == set(), "that is not mended"
    kept = dense(sinks=True, dropout=0.1)
    assert refused_fields(takes(sinks=False, dropout=False), kept) == set(), "nothing mends dropout"
    assert refused_fields(takes("varlen", dropout=False), kept) == set(), "in no family"
    pairs = (row(family="dense", dtype=True, dims=((64, 32),), sinks=True, dropout=True),)
    assert refused_fields(pairs, dense(head_dim=64, v_head_dim=32, sinks=True, dropout=0.1).normalised()) is None


def test_the_catalogue_is_complete():
    assert tuple(lowering.name for lowering in lowerings()) == LOWERINGS
    known = {f.name for f in dataclasses.fields(dense())} | {"group", "dims", "same_dims", "kv_storage"}
    for lowering in lowerings():
        assert lowering.summary
        assert lowering.summary == lowering.summary.strip(". ")
        assert lowering.fields
        assert lowering.fields <= known, lowering.name


def test_what_is_offered_is_in_normal_form_or_can_be_and_differs():
    """A rewrite that leads back to its own request would be a step for nothing."""
    lengths = {"window": (5, -1), "s_relation": "fewer", "causal": "bottom_right"}
    inputs = {"kv_heads": 2, "mask": "bool", "sinks": True, "misaligned": True}
    full = dense(head_dim=40, v_head_dim=320, scale=0.3, lse=True, **lengths, **inputs).normalised()
    for lowering in lowerings():
        for rewrite in lowering.rewrites(full):
            assert rewrite.cost >= 0
            assert rewrite.inner
            assert full not in {inner.normalised() for inner in rewrite.inner}, lowering.name


def test_planning_imports_no_torch():
    program = (
        "import sys\n"
        "from polyattn.lowering import Planner\n"
        "from polyattn.contract import AttentionRequest, row\n"
        "rows = (row(family='dense', dtype='bfloat16', head_dim=64, layout='BHSD', lse=True),)\n"
        "request = AttentionRequest(head_dim=40, heads=4, kv_heads=2, sinks=True)\n"
        "print(*Planner(rows).plan(request).names)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
