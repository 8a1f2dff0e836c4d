"""Exact rewrites in selection: when they are taken, in which order, and how they are told."""

from __future__ import annotations

import dataclasses

import pytest

from polyattn.contract import AttentionRequest, AutoRule, BackendInfo, Fallback, Provider, Range, Rejected, Row, row
from polyattn.errors import UnsupportedRequestError
from polyattn.selection.select import Catalogue, Choice, Offer, Policy, Selection, select

D64 = row(family="dense", dtype="float32", head_dim=64, scale=True, v_head_dim=True)
WIDE = row(family="dense", dtype="float32", head_dim=(128, 256), scale=True, v_head_dim=True)
ANY_DIM = row(family="dense", dtype="float32", head_dim=Range(1), scale=True, v_head_dim=True)
ODD = AttentionRequest(dtype="float32", head_dim=40)


def offer(name: str, *rows: Row, target: str = "made.up:A", priority: int | None = 10, **more: object) -> Offer:
    info = BackendInfo(name, "cpu", (Provider("own", rows, target),), summary=name, priority=priority, **more)  # type: ignore[arg-type]
    return Offer(info, name, "hardware")


def choose(*offers: Offer, request: AttentionRequest = ODD, full: bool = False, **policy: object) -> Selection:
    there = Catalogue(offers, {}, narrow=policy.pop("narrow", lambda backend, request: None))  # type: ignore[arg-type]
    return select(request, there, Policy(**policy), full=full)  # type: ignore[arg-type]


def named(name: str) -> Choice:
    return Choice(name, "argument")


def test_what_nothing_takes_is_served_through_the_cheapest_rewrite() -> None:
    selection = choose(offer("wide", WIDE, priority=90), offer("near", D64, priority=1))
    assert (selection.backend, selection.lowerings, selection.source) == ("near", ("pad_head_dim",), "lowering")
    assert selection.plan is not None
    assert selection.plan.inner[0].request.head_dim == 64
    assert "  via pad_head_dim: D 40 -> 64 (cost " in str(selection)
    assert selection.to_dict()["steps"] == selection.plan.lines()


def test_a_backend_that_takes_it_comes_first_whatever_its_priority() -> None:
    selection = choose(offer("near", D64, priority=90), offer("able", ANY_DIM, priority=0))
    assert (selection.backend, selection.lowerings, selection.source) == ("able", (), "priority")


def test_a_last_resort_comes_after_the_rewrites() -> None:
    selection = choose(offer("near", D64), offer("slow", ANY_DIM, priority=-100))
    assert selection.backend == "near"


def test_a_last_resort_may_be_rewritten_for_too() -> None:
    selection = choose(offer("slow", D64, priority=-100))
    assert (selection.backend, selection.lowerings) == ("slow", ("pad_head_dim",))


def test_equal_costs_are_decided_by_priority() -> None:
    assert choose(offer("a", D64, priority=1), offer("b", D64, priority=2)).backend == "b"


def test_a_named_backend_is_rewritten_for_before_its_documented_fallback() -> None:
    fallback = Fallback("able", "because")
    offers = (offer("near", D64, fallbacks=(fallback,)), offer("able", ANY_DIM))
    assert choose(*offers, choice=named("near")).lowerings == ("pad_head_dim",)
    assert choose(*offers, choice=named("near"), lowering=False).source == "fallback from near"


def test_without_rewrites_a_backend_refuses() -> None:
    with pytest.raises(UnsupportedRequestError, match="head_dim=40 is not 64"):
        choose(offer("near", D64), choice=named("near"), lowering=False)
    with pytest.raises(UnsupportedRequestError, match="head_dim=40 is not 64"):
        choose(offer("near", D64), lowering=False)


def test_a_planned_adapter_is_not_rewritten_for() -> None:
    """Nobody has run what is not built."""
    with pytest.raises(UnsupportedRequestError):
        choose(offer("later", D64, target=""), choice=named("later"), what_if=True)


def test_what_is_only_declared_is_not_rewritten_for_automatically() -> None:
    declared = dataclasses.replace(offer("near", D64), evidence="declared")
    with pytest.raises(UnsupportedRequestError):
        choose(declared)
    assert choose(declared, choice=named("near")).lowerings == ("pad_head_dim",)


def test_an_optional_method_is_never_taken_by_itself() -> None:
    with pytest.raises(UnsupportedRequestError):
        choose(offer("lossy", D64, priority=None))


def test_explain_says_who_else_could_by_a_rewrite() -> None:
    selection = choose(offer("able", ANY_DIM), offer("near", D64), full=True)
    assert selection.rejected["near"] == ["head_dim=40 is not 64"]
    assert selection.rewritable["near"][0].startswith("pad_head_dim: D 40 -> 64")
    assert "  but near via pad_head_dim: D 40 -> 64" in str(selection)
    assert selection.to_dict()["rewritable"] == {"near": selection.rewritable["near"]}
    assert choose(offer("able", ANY_DIM), offer("near", D64)).rewritable == {}


def test_a_refusal_names_who_could_by_a_rewrite() -> None:
    softcap = dataclasses.replace(ODD, softcap=5.0)
    able = row(family="dense", dtype="float32", head_dim=64, scale=True, v_head_dim=True, softcap=Range(0.0))
    with pytest.raises(UnsupportedRequestError, match=r"Backends that can: near"):
        choose(offer("plain", D64), offer("near", able), request=softcap, choice=named("plain"))


LOWERED = row(
    family="dense", dtype="float32", head_dim=64, scale=True, v_head_dim=True, lowered={"head_dim": "pad_head_dim"}
)


def test_a_row_may_keep_its_rank_through_a_rewrite_it_names() -> None:
    selection = choose(offer("near", LOWERED, priority=90), offer("able", ANY_DIM, priority=1))
    assert (selection.backend, selection.lowerings, selection.source) == ("near", ("pad_head_dim",), "priority")
    assert selection.plan is not None
    rule = offer("near", LOWERED, priority=0, auto=(AutoRule(1, "first"),))
    assert choose(rule, offer("able", ANY_DIM)).source == "platform rule"


def test_a_row_whose_rewrite_leads_nowhere_is_told() -> None:
    wrong = row(family="dense", dtype="float32", head_dim=64, v_head_dim=True, lowered={"head_dim": "sinks_from_lse"})
    with pytest.raises(UnsupportedRequestError, match="its row is lowered by sinks_from_lse, which leads to nothing"):
        choose(offer("a", wrong), choice=named("a"), lowering=False)


def test_a_row_that_names_no_lowering_is_told() -> None:
    wrong = row(family="dense", dtype="float32", head_dim=64, lowered={"head_dim": "by_magic"})
    with pytest.raises(UnsupportedRequestError, match="names the lowering 'by_magic', which does not exist"):
        choose(offer("a", wrong))
    assert choose(offer("a", wrong), offer("able", ANY_DIM)).backend == "able"


def test_what_the_plugin_itself_refuses_may_be_rewritten_round() -> None:
    def narrow(backend: BackendInfo, request: AttentionRequest) -> Rejected | None:
        return Rejected("no 40") if request.head_dim == 40 else None

    selection = choose(offer("near", ANY_DIM), narrow=narrow)
    assert selection.lowerings == ("pad_head_dim",)
    assert selection.plan is not None
    assert selection.plan.inner[0].request.head_dim == 48


def test_ranks_that_rewrite_differently_have_different_fingerprints() -> None:
    one, other = choose(offer("a", D64)), choose(offer("a", ANY_DIM))
    assert one.fingerprint() != other.fingerprint()


class _Picky:
    """A stranger's constraint that fails on what it did not expect."""

    def reason(self, value: object) -> str | None:
        if value != 40:
            raise RuntimeError("only 40 was expected")
        return "is 40"

    def describe(self) -> str:
        return "picky"


def test_rows_that_fail_on_a_rewritten_request_are_a_refusal() -> None:
    picky = row(family="dense", dtype="float32", head_dim=_Picky(), scale=True, v_head_dim=True)
    selection = choose(offer("picky", picky), offer("slow", ANY_DIM, priority=-1))
    assert selection.backend == "slow"
    assert "failed on a rewritten request: RuntimeError: only 40" in selection.rejected["picky"][-1]
