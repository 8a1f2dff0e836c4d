"""Plugins of version 1 of the contract: their functions are given the tables of a call as five keywords, by core."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

import polyattn
from polyattn.contract import (
    API_VERSION,
    AttentionRequest,
    BackendInfo,
    Bound,
    PagedTables,
    PluginError,
    Provider,
    Range,
    hookimpl,
    row,
)
from polyattn.registry.bound_check import checked
from polyattn.registry.manager import PluginManager, reset_manager
from polyattn.registry.version_1 import TABLES, as_version_2

PAGED = AttentionRequest(family="paged")
FIVE = PagedTables(torch.zeros(2, 3), torch.ones(2), torch.arange(3), 4, 5, host=list)
"""With a field that version 1 does not know."""


def test_a_forward_is_given_the_five_keywords_and_nothing_else_of_the_tables():
    seen: dict[str, Any] = {}

    def forward(query, *caches, page_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, **given):
        seen.update(caches=caches, page_table=page_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, given=given)
        return max_seqlen_q, max_seqlen_k

    found = as_version_2(Bound(forward, traceable=True))
    assert found.forward("query", "keys", "values", tables=FIVE, sinks="sinks") == (4, 5)
    assert seen["caches"] == ("keys", "values")
    assert all(seen[name] is getattr(FIVE, name) for name in TABLES[:3])
    assert seen["given"] == {"sinks": "sinks"}
    assert (found.traceable, found.session) == (True, None)


def test_a_session_plans_as_it_did_and_is_given_them_too():
    told: list[Any] = []

    class Session:
        def __init__(self, slot: Any) -> None:
            told.append(slot)

        def plan(self, step: Any) -> None:
            told.append(("plan", step))

        def prepare(self, step: Any) -> None:
            told.append(("prepare", step))

        def forward(self, *tensors: Any, **given: Any) -> str:
            told.append((tensors, sorted(given)))
            return "out"

    session = as_version_2(Bound(max, session=Session)).session("slot")
    session.plan(1)
    session.prepare(2)
    assert session.forward("query", "cache", tables=FIVE, attn_mask=None) == "out"
    assert told == ["slot", ("plan", 1), ("prepare", 2), (("query", "cache"), sorted((*TABLES, "attn_mask")))]


def five(query, key_cache, value_cache, *, page_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, key, value,
         attn_mask, sinks, k_scale, v_scale, out):  # fmt: skip
    return "five"


def one(query, key_cache, value_cache, *, tables, key, value, attn_mask, sinks, k_scale, v_scale, out):
    return "one"


def test_what_a_plugin_hands_over_is_judged_by_the_version_that_it_speaks():
    given = dict.fromkeys(("key", "value", "attn_mask", "sinks", "k_scale", "v_scale", "out"))
    assert checked(Bound(five), PAGED, "acme", 1).forward(0, 0, 0, tables=FIVE, **given) == "five"
    assert checked(Bound(one), PAGED, "acme", 2).forward(0, 0, 0, tables=FIVE, **given) == "one"
    assert checked(Bound(one), PAGED, "acme").forward is one, "the version of today"
    dense = Bound(lambda query, key, value, attn_mask=None, sinks=None, out=None: query)
    assert checked(dense, AttentionRequest(), "acme", 1) is dense, "dense calls are the same in both"


WRONG = [
    (five, 2, r"cannot be given tables: .* Add tables; .* It has page_table: tables takes the place of these five"),
    (one, 1, r"cannot be given page_table, seq_lens, .*It has tables, which POLYATTN_API_VERSION = 2 in the plugin's"),
    (lambda query, *caches, out: 0, 1, r"cannot be given page_table, .*, say what they are$|what they are$"),
]


@pytest.mark.parametrize(("forward", "version", "message"), WRONG)
def test_the_other_version_is_named_where_a_function_is_of_it(forward, version, message):
    with pytest.raises(PluginError, match=message):
        checked(Bound(forward), PAGED, "acme", version)


def module(**more: Any) -> types.ModuleType:
    """A plugin of one paged backend, `acme`, whose forward takes the five keywords."""
    made: Any = types.ModuleType("polyattn_acme_v1")

    class Kernel:
        def bind(self, request: AttentionRequest) -> Bound:
            return Bound(five)

    @hookimpl
    def polyattn_register_backends() -> tuple[BackendInfo, ...]:
        rows = row(family="paged", dtype="float32", head_dim=Range(1), phase="decode", s_relation="one",
                   page_size=Range(1), causal=("none", "bottom_right"), group=True)  # fmt: skip
        provider = Provider("own", (rows,), "polyattn_acme_v1:Kernel")
        return (BackendInfo("acme", "cpu", (provider,), summary="made for a test"),)

    made.Kernel, made.polyattn_register_backends = Kernel, polyattn_register_backends
    vars(made).update(more)
    return made


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = PluginManager(environ={"POLYATTN_PLUGINS": ""})

    def use(plugin: types.ModuleType) -> Any:
        monkeypatch.setitem(__import__("sys").modules, plugin.__name__, plugin)
        reset_manager(found)
        return polyattn.register_plugin(plugin, "acme")

    yield use
    reset_manager()


@pytest.mark.parametrize(("said", "spoken"), [({}, 1), ({"POLYATTN_API_VERSION": 1}, 1)], ids=["nothing", "1"])
def test_a_plugin_that_says_no_version_is_one_of_version_1(said, spoken, manager):
    assert manager(module(**said)).api == spoken
    int32 = torch.int32
    found = polyattn.paged_attention(
        torch.ones(1, 1, 8), *torch.ones(2, 2, 4, 1, 8), page_table=torch.zeros(1, 1, dtype=int32),
        seq_lens=torch.ones(1, dtype=int32), cu_seqlens_q=torch.arange(2, dtype=int32), max_seqlen_q=1, max_seqlen_k=1,
        backend="acme",
    )  # fmt: skip
    assert found == "five"


def test_a_plugin_of_a_later_version_is_refused_with_both_versions(manager):
    later = API_VERSION + 1
    with pytest.raises(PluginError, match=f"speaks plugin API {later}, this host speaks {API_VERSION}; upgrade"):
        manager(module(POLYATTN_API_VERSION=later))


def test_tables_forget_lists_of_the_host_with_the_lengths_that_they_were_of():
    lens, starts = torch.tensor([3, 4], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    known = {"seq_lens": [3, 4], "cu_seqlens_q": [0, 1, 2]}
    tables = PagedTables(torch.zeros(2, 1), lens, starts, 1, 4, known.__getitem__)
    assert tables.listed("seq_lens") is known["seq_lens"]
    assert tables.changed(page_table=torch.ones(2, 1), max_seqlen_k=9).listed("seq_lens") is known["seq_lens"]
    for fields in ({"seq_lens": lens + 1}, {"cu_seqlens_q": 2 * starts}):
        other = tables.changed(**fields)
        assert other.host is None
        assert other.listed("seq_lens") == (lens + ("seq_lens" in fields)).tolist()
    assert tables.listed("cu_seqlens_q") is known["cu_seqlens_q"], "the tables themselves are as they were"


def test_a_part_has_the_tables_of_a_call_over_its_keys():
    part = polyattn.KVPart(torch.zeros(1, 2), torch.ones(1), torch.arange(2), 6, 7, cache=torch.zeros(1))
    assert part.tables == PagedTables(*part[:5])
    assert part.tables.host is None
