"""`negotiate_layout`: one layout that the backends of all phases take."""

from __future__ import annotations

from typing import Any

import pytest

import polyattn
from polyattn.contract import (
    AttentionRequest,
    AutoRule,
    BackendInfo,
    Fallback,
    PlatformInfo,
    Provider,
    Range,
    conditions,
    row,
)
from polyattn.errors import BackendUnavailableError, InvalidInputError, UnsupportedRequestError
from polyattn.selection.select import Catalogue, Offer
from polyattn.serving.kv_cache.layout import negotiate_layout

PAGED: dict[str, Any] = {
    "family": "paged",
    "dtype": "float32",
    "head_dim": 64,
    "page_size": 16,
    "causal": "bottom_right",
    "layout": "THD",
}
EXTEND = AttentionRequest(**PAGED, phase="extend", s_relation="fewer")
DECODE = AttentionRequest(**PAGED, phase="decode", s_relation="one")
LATENT = AttentionRequest(family="mla", dtype="float32", head_dim=576, v_head_dim=512, phase="decode", page_size=64)
BOTH = (EXTEND, DECODE)


def offer(name: str, *layouts: str, phases: tuple[str, ...] = ("extend", "decode"), **fields: Any) -> Offer:
    """A backend that takes these layouts, and page sizes and lengths without end."""
    rows = row(
        family="paged",
        dtype="float32",
        head_dim=Range(1),
        phase=phases,
        causal=True,
        s_relation=True,
        page_size=fields.pop("page_size", Range(1)),
        kv_layout=layouts,
    )
    fields = {"summary": f"{name}'s summary", "priority": 10, **fields}
    return Offer(BackendInfo(name, "cpu", (Provider("own", (rows,), "made.up:Adapter"),), **fields), name, "hardware")


def negotiated(*offers: Offer, requests: Any = BOTH, **given: Any) -> tuple[str, tuple[str, ...]]:
    there = Catalogue(offers, {"cpu": PlatformInfo("cpu", "cpu", "made.up:detect")})
    return negotiate_layout(requests, there=there, **given)


ANY = offer("any", "", "NHD", "HND")
TOKENS = offer("tokens", "", "NHD", priority=5)
HEADS = offer("heads", "HND", priority=5)
FRACTAL = offer("fractal", "NZ", priority=5)
GROUPS = offer("groups", "vectorised", "HND", priority=5)


@pytest.mark.parametrize(
    "extend, decode, layout",
    [
        ("any", "any", "NHD"),
        ("tokens", "any", "NHD"),
        ("any", "heads", "HND"),
        ("heads", "heads", "HND"),
        ("groups", "any", "HND"),
        (None, "heads", "HND"),
        (None, None, "NHD"),
    ],
)
def test_a_layout_that_both_phases_take(extend, decode, layout):
    found, reasons = negotiated(ANY, TOKENS, HEADS, GROUPS, backends=(extend, decode))
    assert found == layout
    takes = {"any": "NHD, HND", "tokens": "NHD", "heads": "HND", "groups": "HND, vectorised"}
    sources = ["priority" if name is None else "argument" for name in (extend, decode)]
    names = [name or "any" for name in (extend, decode)]
    assert reasons == tuple(
        f"{phase}: {name} by {source} takes {takes[name]}"
        for phase, name, source in zip(("extend", "decode"), names, sources, strict=True)
    )


def test_a_layout_only_the_best_backend_takes_does_not_make_it_lose():
    """Selection for NHD would never see it: the backend is chosen first, as if the layout were free."""
    rule = (AutoRule(1, "the fastest here", conditions(family="paged")),)
    layout, reasons = negotiated(ANY, offer("fast", "HND", auto=rule))
    assert layout == "HND"
    assert [r.split(" takes ")[0] for r in reasons] == [
        "extend: fast by platform rule",
        "decode: fast by platform rule",
    ]


def test_phases_without_a_layout_in_common():
    with pytest.raises(UnsupportedRequestError) as error:
        negotiated(ANY, TOKENS, HEADS, backends=("tokens", "heads"))
    assert str(error.value) == (
        "the phases share no layout of the KV cache that a pool can have (NHD, HND): extend: tokens by argument takes "
        "NHD; decode: heads by argument takes HND. Choose another backend for one of the phases"
    )
    assert error.value.rejected == {"tokens": ["kv_layout: takes NHD"], "heads": ["kv_layout: takes HND"]}


@pytest.mark.parametrize(
    "name, takes, why",
    [
        ("fractal", "NZ", "Pools make no NZ caches: its fractal blocks are made by the device's own"),
        ("groups", "HND, vectorised", "Pools make no vectorised caches: its 16-byte groups of tokens are made by"),
    ],
)
def test_layouts_that_pools_do_not_make(name, takes, why):
    with pytest.raises(UnsupportedRequestError) as error:
        negotiated(TOKENS, FRACTAL, GROUPS, backends=("tokens", name))
    assert f"decode: {name} by argument takes {takes}" in str(error.value)
    assert why in str(error.value)


def test_automatic_choices_that_share_none_give_way_to_those_that_do():
    first = offer("first", "HND", phases=("decode",), priority=20)
    layout, reasons = negotiated(first, TOKENS)
    assert layout == "NHD"
    assert reasons == (
        "extend: tokens by priority takes NHD",
        "decode: tokens by priority takes NHD",
        "passed over, as the phases share no layout with it: decode: first by priority takes HND",
    )
    with pytest.raises(UnsupportedRequestError, match=r"decode: first by argument takes HND"):
        negotiated(first, TOKENS, backends=(None, "first"))


def test_fewer_rewrites_win_over_the_order_of_layouts():
    """Pages of 16 reach a kernel of pages of 4 by a rewrite; with pages it takes as they are it takes HND only."""
    both = BackendInfo(
        "both",
        "cpu",
        (
            Provider("small", offer("x", "", "NHD", page_size=4).info.providers[0].rows, "made.up:A"),
            Provider("large", offer("x", "HND", page_size=16).info.providers[0].rows, "made.up:B"),
        ),
        summary="both",
        priority=1,
    )
    layout, reasons = negotiated(Offer(both, "both", "hardware"))
    assert layout == "HND"
    assert reasons[0] == "extend: both by priority takes NHD (by exact rewrites), HND"


def test_a_documented_fallback_is_the_one_that_is_asked():
    step = Fallback("heads", "it cannot", conditions(phase="decode"))
    named = offer("named", "", "NHD", "HND", phases=("extend",), fallbacks=(step,))
    layout, reasons = negotiated(named, HEADS, backends=("named", "named"))
    assert layout == "HND"
    assert reasons[1] == "decode: heads by fallback from named takes HND"


def test_latent_rows_have_none():
    assert negotiated(ANY, requests=(LATENT,)) == ("NHD", ("latent rows have no layout",))
    layout, reasons = negotiated(HEADS, requests=(LATENT, EXTEND))
    assert (layout, reasons) == ("HND", ("extend: heads by priority takes HND",))


def test_a_phase_that_nothing_serves():
    with pytest.raises(UnsupportedRequestError, match="no backend can serve this call"):
        negotiated(offer("x", "NHD", phases=("extend",)))
    with pytest.raises(BackendUnavailableError, match="no backend is named 'other'"):
        negotiated(ANY, backends=("other",))


def test_a_name_too_many():
    with pytest.raises(InvalidInputError, match=r"backends has 3 names for 2 requests; one each, or None"):
        negotiated(ANY, backends=("any", "any", "any"))


def test_here_under_the_overrides_in_force():
    with polyattn.use_backend("reference"):
        layout, reasons = negotiate_layout(BOTH)
    assert layout == "NHD"
    assert reasons == tuple(f"{p}: reference by use_backend takes NHD, HND" for p in ("extend", "decode"))
    layout, reasons = negotiate_layout(BOTH, backends=(None, "reference"))
    assert reasons[1] == "decode: reference by argument takes NHD, HND"
