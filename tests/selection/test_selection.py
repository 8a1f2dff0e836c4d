"""Selection is a pure function of (request, catalogue, policy): who wins, who is refused and what is said about it."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyattn.contract import (
    Accepted,
    Alias,
    AttentionRequest,
    AutoRule,
    BackendInfo,
    Fallback,
    PairRule,
    PlatformInfo,
    Provider,
    Range,
    Rejected,
    conditions,
    row,
)
from polyattn.errors import BackendUnavailableError, PluginError, UnsupportedRequestError
from polyattn.registry.manager import BrokenHook
from polyattn.selection.phase_pairs import select_pair
from polyattn.selection.select import Catalogue, Choice, Offer, Policy, Selection, select

PLATFORMS = {name: PlatformInfo(name, name, "made.up:detect") for name in ("cpu", "cuda", "rocm")}
APPLE = PlatformInfo("mps", "mps", "made.up:detect", fallback="sdpa", fallback_why="MPS runs SDPA only")
DENSE = {"family": "dense", "dtype": ("float32", "bfloat16"), "head_dim": Range(1, 256)}
REQUEST = AttentionRequest(dtype="float32", head_dim=64)


def provider(name: str = "own", *rows: dict[str, Any], target: str = "made.up:Adapter") -> Provider:
    return Provider(name, tuple(row(**{**DENSE, **r}) for r in rows or ({},)), target)


def offer(
    name: str,
    *providers: Provider,
    platform: str = "cpu",
    evidence: str = "hardware",
    missing: dict[str, str] | None = None,
    **fields: Any,
) -> Offer:
    """A backend that is here, shown to work, and takes every plain dense request, but for what is said."""
    fields = {"summary": f"{name}'s summary", **fields}
    return Offer(BackendInfo(name, platform, providers or (provider(),), **fields), name, evidence, missing or {})


def catalogue(*offers: Offer, **fields: Any) -> Catalogue:
    fields = {"platforms": {**PLATFORMS, "mps": APPLE}, **fields}
    return Catalogue(offers, **fields)


def chosen(*offers: Offer, request: AttentionRequest = REQUEST, full: bool = False, **policy: Any) -> Selection:
    return select(request, catalogue(*offers), Policy(**policy), full=full)


def asked(name: str, source: str = "argument") -> Choice:
    return Choice(name, source)


def rule(rank: int, why: str = "a rule", **when: Any) -> tuple[AutoRule, ...]:
    return (AutoRule(rank, why, conditions(**when)),)


EVERYBODY = (
    offer("by_name", priority=None),
    offer("by_tuning", priority=1),
    offer("by_rule", auto=rule(10), priority=2),
    offer("by_later_rule", auto=rule(20), priority=3),
    offer("by_priority", priority=90),
    offer("by_low_priority", priority=-5),
)


def test_precedence_from_the_top_down():
    """Each step takes away whoever won the step before."""
    left = list(EVERYBODY)
    policy: dict[str, Any] = {"choice": asked("by_name", "use_backend"), "tuned": (asked("by_tuning", "12 us"),)}
    for winner, source in (
        ("by_name", "use_backend"),
        ("by_tuning", "tuned"),
        ("by_rule", "platform rule"),
        ("by_later_rule", "platform rule"),
        ("by_priority", "priority"),
        ("by_low_priority", "priority"),
    ):
        selection = chosen(*left, **policy)
        assert (selection.backend, selection.source) == (winner, source)
        left = [o for o in left if o.info.name != winner]
        policy["choice"] = None


@given(st.permutations(EVERYBODY), st.sampled_from([(), ("by_tuning",), ("by_priority", "by_tuning"), ("nobody",)]))
def test_the_order_of_the_catalogue_decides_nothing(offers, tuned):
    names = tuple(asked(name, "measured") for name in tuned)
    expected = chosen(*EVERYBODY, tuned=names, full=True)
    found = chosen(*offers, tuned=names, full=True)
    assert (found.id, found.source, found.why, found.notes) == (
        expected.id,
        expected.source,
        expected.why,
        expected.notes,
    )
    assert set(found.others) == set(expected.others)
    assert found.fingerprint() == expected.fingerprint()


def test_nothing_is_changed_and_the_same_question_has_the_same_answer():
    offers = (offer("a", provider("own", {"dtype": "bfloat16"})), offer("b", auto=rule(1)), offer("c", priority=7))
    there = catalogue(*offers)
    before = repr(there)
    answers = {str(select(REQUEST, there, Policy(), full=True)) for _ in range(3)}
    assert len(answers) == 1
    assert repr(there) == before


def test_a_rule_applies_when_its_conditions_hold():
    ruled = offer("ruled", auto=rule(1, "wide heads", head_dim=(128,)), priority=0)
    plain = offer("plain", priority=1)
    assert chosen(ruled, plain).backend == "plain"
    wide = chosen(ruled, plain, request=dataclasses.replace(REQUEST, head_dim=128))
    assert (wide.backend, wide.source, wide.why) == ("ruled", "platform rule", "wide heads")


def test_a_rule_whose_backend_refuses_gives_way_to_the_next():
    first = offer("first", provider("own", {"dtype": "float16"}), auto=rule(1))
    second = offer("second", auto=rule(2, "second choice"))
    selection = chosen(first, second)
    assert (selection.backend, selection.why) == ("second", "second choice")
    assert selection.rejected == {"first": ["dtype='float32' is not float16"]}


def test_two_rules_of_one_rank_are_asked_by_name():
    assert chosen(offer("zeta", auto=rule(1)), offer("alpha", auto=rule(1))).backend == "alpha"


def test_a_tie_in_priority_goes_by_name_and_is_said():
    selection = chosen(offer("zeta", priority=5), offer("alpha", priority=5), offer("low", priority=1))
    assert selection.backend == "alpha"
    assert selection.notes == ("same priority as zeta; the first name in order wins",)
    assert chosen(offer("alpha", priority=5), offer("low", priority=1)).notes == ()


@pytest.mark.parametrize("tuned", ["unknown", "refuses", "declared", "lossy"])
def test_a_tuned_choice_that_cannot_be_taken_is_passed_over(tuned):
    offers = (
        offer("refuses", provider("own", {"dtype": "float16"})),
        offer("declared", evidence="declared"),
        offer("lossy", priority=None, lossy="cosine 0.99"),
        offer("plain", priority=-1),
    )
    assert chosen(*offers, tuned=(asked(tuned, "measured"),)).backend == "plain"


@pytest.mark.parametrize("heads, backend", [(8, "wide"), (16, "plain")])
def test_a_measurement_of_another_request_holds_for_who_serves_both_in_the_same_way(heads, backend):
    """`wide` takes 16 heads by a rewrite, or by another provider: that is not what was measured with 8."""
    request, like = (dataclasses.replace(REQUEST, heads=n, kv_heads=n) for n in (heads, 4))
    for providers in (
        (provider("own", {"heads": Range(1, 8)}, {"heads": Range(9, 64), "head_dim": 128}),),
        (provider("few", {"heads": Range(1, 8)}), provider("many", {"heads": Range(9, 64)})),
    ):
        offers = (offer("wide", *providers, priority=1), offer("plain", priority=2))
        found = chosen(*offers, request=request, tuned=(Choice("wide", "measured", like),))
        assert (found.backend, found.source) == (backend, "tuned" if backend == "wide" else "priority")
        assert chosen(*offers, request=request, tuned=(asked("wide", "measured"),)).backend == "wide"


@pytest.mark.parametrize(
    "missing, backend, served_by",
    [((), "many", "new/x"), (("new/x",), "many", "new/y"), (("new/x", "new/y"), "plain", "own")],
)
def test_a_measurement_is_of_the_kernels_that_were_measured(missing, backend, served_by):
    """`many` has the kernels of several libraries: a time with the new ones is none of the old ones."""
    kinds = tuple(provider(name) for name in ("old", "new/x", "new/y", "newer"))
    absent = dict.fromkeys(missing, "is not here")
    offers = (offer("many", *kinds, priority=9, missing=absent), offer("plain", priority=-1))
    for like in (None, dataclasses.replace(REQUEST, heads=4, kv_heads=4)):
        tuned = (Choice("many", "measured", like, "new"), Choice("plain", "measured"))
        found = chosen(*offers, tuned=tuned)
        assert (found.backend, found.provider, found.source) == (backend, served_by, "tuned")
    assert chosen(*offers, tuned=(Choice("many", "measured"),)).provider == "old"


def test_what_was_only_declared_is_never_picked_by_itself():
    declared = offer("declared", evidence="declared", auto=rule(1), priority=100)
    plain = offer("plain", evidence="emulator")
    assert chosen(declared, plain).backend == "plain"
    by_name = chosen(declared, plain, choice=asked("declared"))
    assert (by_name.backend, by_name.evidence) == ("declared", "declared")
    assert chosen(declared, plain, what_if=True).backend == "declared"


@pytest.mark.parametrize("evidence", ["hardware", "interpreter", "vendor code", "emulator", "compiled"])
def test_every_other_evidence_will_do_and_is_told(evidence):
    selection = chosen(offer("a", evidence=evidence))
    assert (selection.backend, selection.evidence) == ("a", evidence)


def test_evidence_of_one_family_shows_nothing_of_another():
    """What ran on softmax is no reason to choose the same backend's linear attention by itself."""
    families = ("dense", "linear")
    takes = provider("own", {"family": families, "dtype": REQUEST.dtype, "head_dim": Range(1, 256), "method": True})
    made = offer("shown", takes, evidence="hardware", priority=9)
    info = dataclasses.replace(made.info, evidence="declared")
    shown = dataclasses.replace(made, info=info, families=("dense", "varlen"))
    plain = offer("plain", takes, evidence="emulator")
    linear = dataclasses.replace(REQUEST, family="linear")
    assert chosen(shown, plain).backend == "shown"
    assert chosen(shown, plain).evidence == "hardware"
    assert chosen(shown, plain, request=linear).backend == "plain"
    assert chosen(shown, plain, request=linear, choice=asked("shown")).evidence == "declared"


def test_nobody_may_be_picked_but_somebody_can_be_asked():
    offers = (offer("declared", evidence="declared"), offer("lossy", priority=None))
    with pytest.raises(UnsupportedRequestError, match="By name these can: declared, lossy"):
        chosen(*offers)


def test_approximate_methods_say_so():
    selection = chosen(offer("sage", priority=None, lossy="int8 QK", note="needs SM80"), choice=asked("sage"))
    assert selection.notes == ("needs SM80", "approximate: int8 QK")


PLANNED = provider("later", target="")


def test_a_planned_adapter_is_never_selected_and_named_as_planned():
    selection = chosen(offer("soon", PLANNED, auto=rule(1), priority=100), offer("plain"))
    assert selection.backend == "plain"
    assert selection.rejected["soon"] == ["planned: its adapter is not part of this version"]
    with pytest.raises(BackendUnavailableError, match=r"soon, asked for by argument, .*planned: its adapter"):
        chosen(offer("soon", PLANNED), offer("plain"), choice=asked("soon"))


def test_what_if_judges_a_planned_adapter_as_if_built_and_marks_it():
    selection = chosen(offer("soon", PLANNED, auto=rule(1)), offer("plain"), what_if=True)
    assert (selection.backend, selection.planned) == ("soon", True)
    assert "[planned]" in str(selection)
    refused = dataclasses.replace(REQUEST, softcap=5.0)
    with pytest.raises(UnsupportedRequestError, match=r"softcap=5\.0 is not declared"):
        chosen(offer("soon", PLANNED), request=refused, what_if=True)


def test_what_if_does_not_ask_the_hook_of_an_adapter_that_is_not_there():
    def narrow(backend: BackendInfo, request: AttentionRequest) -> Rejected:
        raise AssertionError(backend)

    there = catalogue(offer("soon", PLANNED), narrow=narrow)
    assert select(REQUEST, there, Policy(what_if=True)).backend == "soon"


def test_a_missing_provider_gives_its_reason_and_the_next_one_serves():
    two = offer(
        "fa", provider("fa3"), provider("fa2"), missing={"fa3": "flash-attn-3 is not installed; pip install it"}
    )
    assert chosen(two).provider == "fa2"
    none = offer("fa", provider("fa3"), missing={"fa3": "flash-attn-3 is not installed; pip install it"})
    assert chosen(none, offer("plain")).rejected["fa"] == ["flash-attn-3 is not installed; pip install it"]
    with pytest.raises(BackendUnavailableError, match="flash-attn-3 is not installed; pip install it"):
        chosen(none, offer("plain"), choice=asked("fa"))


def test_a_provider_that_is_here_and_refuses_is_a_limit_not_a_missing_package():
    half = offer("fa", provider("fa3"), provider("fa2", {"dtype": "float16"}), missing={"fa3": "is not installed; x"})
    with pytest.raises(UnsupportedRequestError, match="fa3: is not installed; x; fa2: dtype='float32' is not float16"):
        chosen(half, offer("plain"), choice=asked("fa"))


def test_providers_are_asked_in_order():
    assert chosen(offer("a", provider("one"), provider("two"))).provider == "one"


FA = offer(
    "fa",
    provider("fa2"),
    provider("fa3/jit", {"lse": True}),
    provider("fa3/wheel"),
    aliases=(Alias("fa3", ("dense",), "fa3"), Alias("fa2", (), "fa2"), Alias("flash")),
)
FA3 = offer("fa3", provider("own", {"family": "paged"}))


def test_an_alias_may_be_bound_to_a_provider():
    assert chosen(FA, choice=asked("fa")).provider == "fa2"
    assert chosen(FA, choice=asked("flash")).provider == "fa2"
    assert chosen(FA, choice=asked("fa2")).provider == "fa2"
    assert chosen(FA, choice=asked("fa3")).provider == "fa3/jit"


def test_an_alias_never_becomes_another_provider():
    gone = dataclasses.replace(FA, missing={"fa3/jit": "no jit", "fa3/wheel": "no wheel"})
    with pytest.raises(BackendUnavailableError, match=r"fa3, asked for by argument, .*no jit; fa3/wheel: no wheel"):
        chosen(gone, offer("plain"), choice=asked("fa3"))
    assert chosen(gone, choice=asked("fa")).provider == "fa2"


def test_an_alias_holds_in_its_families_only():
    paged = dataclasses.replace(REQUEST, family="paged", page_size=0)
    assert chosen(FA, dataclasses.replace(FA3, plugin=FA.plugin), choice=asked("fa3")).backend == "fa"
    assert chosen(FA, FA3, request=paged, choice=asked("fa3")).backend == "fa3"


def test_an_alias_to_a_provider_that_is_not_there():
    odd = offer("fa", provider("fa2"), aliases=(Alias("fa9", (), "fa9"),))
    with pytest.raises(BackendUnavailableError, match="it has no provider 'fa9'"):
        chosen(odd, choice=asked("fa9"))


def test_a_name_may_say_its_platform():
    here, there = offer("fa"), offer("fa", platform="rocm")
    assert chosen(here, there, choice=asked("fa@cpu")).id == "fa@cpu"
    with pytest.raises(BackendUnavailableError, match=r"fa@rocm, asked for by argument, has no backend on cpu"):
        chosen(here, there, choice=asked("fa@rocm"))
    with pytest.raises(
        BackendUnavailableError,
        match=r"backend 'fa@rcom', asked for by argument: no platform 'rcom'\. Did you mean 'rocm'",
    ):
        chosen(here, there, choice=asked("fa@rcom"))


def test_a_name_known_elsewhere_says_where_and_who_can():
    with pytest.raises(
        BackendUnavailableError,
        match=r"aiter, asked for by environment X, has no backend on cpu \(it is known on rocm\)\. .*call: plain",
    ):
        chosen(offer("plain"), offer("aiter", platform="rocm"), choice=asked("aiter", "environment X"))


def test_an_alias_known_elsewhere_or_in_another_family_says_so():
    """An alias is a name too: messages about one look where messages about a backend's own name do."""
    for name, said in (
        ("acme3", r"acme3, asked for by argument, has no backend on cpu \(it is known on rocm\)\. .*call: plain"),
        ("old", r"old, asked for by argument, is a name for calls of family mla only\. .*call: plain"),
    ):
        elsewhere = offer("acme", platform="rocm", aliases=(Alias("acme3"),))
        with pytest.raises(BackendUnavailableError, match=said):
            chosen(
                offer("plain"),
                elsewhere,
                offer("new", aliases=(Alias("old", ("mla",)),), priority=None),
                choice=asked(name),
            )


def test_an_unknown_name_offers_the_nearest_and_blames_broken_plugins():
    error = OSError("libacme.so.3")
    there = catalogue(
        offer("plain"), broken={"acme (acme 1.0)": "OSError: libacme.so.3"}, errors={"acme (acme 1.0)": error}
    )
    with pytest.raises(
        BackendUnavailableError,
        match=r"no backend is named 'plian', asked for by argument\. Did you mean 'plain'\? These plugins could not be "
        r"used and may be what you want: acme \(acme 1\.0\): OSError: libacme\.so\.3\. Usable on cpu: plain; `polyattn",
    ) as caught:
        select(REQUEST, there, Policy(asked("plian")))
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("flx", r" Did you mean 'flex_plain'\?"),
        ("FLEX-PLAIN", r" Did you mean 'flex_plain'\?"),
        ("Old_Name", r" Did you mean 'old_name'\?"),
        ("SDPA", r" Did you mean 'torch_sdpa'\?"),
        ("flash_attention_2", r" Did you mean 'fa', not usable here\?"),
        ("fly", r" Did you mean 'fla', not usable here\?"),
        ("Auto", r" Name none, and the choice is automatic\."),
        ("zebra", ""),
    ],
)
def test_an_unknown_name_is_answered_with_what_can_be_used(name, advice):
    offers = (
        offer("flex_plain", aliases=(Alias("old_name"),)),
        offer("torch_sdpa", auto=rule(1)),
        offer("fla", platform="rocm"),
        offer("fa", missing={"own": "fa is not installed"}),
    )
    with pytest.raises(BackendUnavailableError) as caught:
        chosen(*offers, choice=asked(name, "environment X"))
    assert re.fullmatch(
        rf"no backend is named '{name}', asked for by environment X\.{advice} Usable on cpu: flex_plain, torch_sdpa; "
        r"`polyattn list` says what each of the others needs",
        str(caught.value),
    ), caught.value


OLD = offer("old", provider("own", {"dtype": "bfloat16"}), fallbacks=(Fallback("plain", "old knows bfloat16 only"),))


def test_a_documented_fallback_is_taken_and_told():
    selection = chosen(OLD, offer("plain", auto=rule(1)), choice=asked("old", "command line"))
    assert (selection.backend, selection.source, selection.fallback) == ("plain", "fallback from old", True)
    assert selection.why == "old knows bfloat16 only"
    assert selection.notes[0] == (
        "old was asked for by command line and replaced by plain (old knows bfloat16 only): "
        "dtype='float32' is not bfloat16"
    )
    assert selection.rejected["old"] == ["dtype='float32' is not bfloat16"]


def test_it_is_an_error_in_strict_mode():
    with pytest.raises(
        UnsupportedRequestError,
        match=r"old, asked for by argument, cannot serve .* Its documented fallback plain is not taken in strict "
        r"mode; ask for plain, or leave strict mode \(--strict, POLYATTN_STRICT, `strict` in the configuration\)",
    ) as caught:
        chosen(OLD, offer("plain"), choice=asked("old"), strict=True)
    assert caught.value.rejected == {"old": ["dtype='float32' is not bfloat16"]}


def test_nothing_falls_back_that_can_serve_or_was_not_asked_for():
    half = dataclasses.replace(REQUEST, dtype="bfloat16")
    assert chosen(OLD, offer("plain"), request=half, choice=asked("old"), strict=True).source == "argument"
    assert chosen(OLD, offer("plain", priority=-1)).source == "priority"


def test_a_fallback_has_conditions_and_the_first_that_holds_is_taken():
    steps = (
        Fallback("wide", "wide heads", conditions(head_dim=(128,))),
        Fallback("plain", "float32", conditions(dtype="float32")),
    )
    picky = offer("picky", provider("own", {"dtype": "float16"}), fallbacks=steps)
    others = (offer("wide"), offer("plain"))
    assert chosen(picky, *others, choice=asked("picky")).backend == "plain"
    wide = dataclasses.replace(REQUEST, head_dim=128)
    assert chosen(picky, *others, request=wide, choice=asked("picky")).backend == "wide"
    neither = dataclasses.replace(REQUEST, dtype="bfloat16")
    with pytest.raises(UnsupportedRequestError, match=r"Backends that can: wide, plain|Backends that can: plain, wide"):
        chosen(picky, *others, request=neither, choice=asked("picky"))


def test_a_fallback_may_fall_back_and_everybody_is_named():
    chain = offer("newest", provider("own", {"dtype": "float16"}), fallbacks=(Fallback("old", "an older one"),))
    selection = chosen(chain, OLD, offer("plain"), choice=asked("newest"))
    assert (selection.backend, selection.source) == ("plain", "fallback from newest")
    assert [note.split(" ")[0] for note in selection.notes] == ["newest", "old"]
    assert set(selection.rejected) >= {"newest", "old"}


def test_a_ring_of_fallbacks_ends():
    ring = [
        offer(name, provider("own", {"dtype": "float16"}), fallbacks=(Fallback(to, "the other one"),))
        for name, to in (("a", "b"), ("b", "c"), ("c", "a"))
    ]
    with pytest.raises(
        UnsupportedRequestError, match="c, asked for by argument, as the fallback of a, as the fallback"
    ):
        chosen(*ring, offer("plain"), choice=asked("a"))


def test_a_replacement_that_cannot_serve_either_is_told_as_such():
    picky = offer("plain", provider("own", {"dtype": "float16"}))
    with pytest.raises(
        UnsupportedRequestError,
        match=r"^old, asked for by argument, cannot serve it: .+\. Nor can its fallback: plain, asked "
        r"for by argument, as the fallback of old, cannot serve",
    ) as refused:
        chosen(OLD, picky, choice=asked("old"))
    assert {"old", "plain"} <= set(refused.value.rejected)


def test_the_replacement_of_a_sparse_method_is_asked_as_dense():
    sparse = dataclasses.replace(REQUEST, family="block_sparse", method="sta", block_map=True, block_sizes=True)
    step = Fallback("plain", "cross-attention is dense", conditions(cross=(True,)), family="dense")
    method = offer("sta", provider("own", {"family": "block_sparse", "method": "sta"}), fallbacks=(step,))
    cross = dataclasses.replace(sparse, cross=True)
    plain = offer("plain", provider("own", {"cross": True}))
    selection = chosen(method, plain, request=cross, choice=asked("sta"))
    assert (selection.backend, selection.request.family, selection.request.method) == ("plain", "dense", "")
    assert not selection.request.block_map
    assert not selection.request.block_sizes


def test_a_platform_may_serve_with_one_backend_what_is_asked_for_by_name():
    """MPS: names without a backend there become SDPA, so does what else core would choose there; the reason is kept.
    The reference and a stranger's backend for MPS are what was meant."""
    request = dataclasses.replace(REQUEST, platform="mps")
    core = (
        offer("sdpa", platform="mps"),
        offer("native", platform="mps", priority=1),
        offer("ref", platform="mps", priority=None),
    )
    core = tuple(dataclasses.replace(one, plugin="core") for one in core)
    offers = (*core, offer("strange", platform="mps", priority=1), offer("sage", platform="cuda"))
    for name in ("ref", "strange"):
        assert chosen(*offers, request=request, choice=asked(name), strict=True).backend == name
    for name in ("native", "sage"):
        selection = chosen(*offers, request=request, choice=asked(name))
        assert (selection.backend, selection.source) == ("sdpa", f"fallback from {name}")
        assert selection.why == "MPS runs SDPA only"
        with pytest.raises(UnsupportedRequestError, match=r"MPS runs SDPA only.*not taken in strict mode"):
            chosen(*offers, request=request, choice=asked(name), strict=True)
    assert chosen(*offers, request=request, choice=asked("sdpa"), strict=True).source == "argument"
    with pytest.raises(BackendUnavailableError, match="no backend is named 'sgae'"):
        chosen(*offers, request=request, choice=asked("sgae"))


def test_an_explicit_choice_that_cannot_serve_names_argument_value_backend_and_who_can():
    with pytest.raises(
        UnsupportedRequestError,
        match=r"picky, asked for by use_backend, cannot serve dense prefill, cpu, float32, H=1/1 D=64, softcap=5\.0: "
        r"dtype='float32' is not float16; softcap=5\.0 is not declared\. Backends that can: able",
    ) as caught:
        chosen(
            offer("picky", provider("own", {"dtype": "float16"})),
            offer("able", provider("own", {"softcap": Range(0.0)})),
            request=dataclasses.replace(REQUEST, softcap=5.0),
            choice=asked("picky", "use_backend"),
        )
    assert caught.value.rejected == {"picky": ["dtype='float32' is not float16", "softcap=5.0 is not declared"]}


def test_when_nothing_serves_everybody_gives_reasons_and_the_nearest_miss_comes_first():
    far = offer("far", provider("own", {"dtype": "float16", "head_dim": 128}))
    near = offer("near", provider("own", {"dtype": "float16"}))
    gone = offer("gone", missing={"own": "acme is not installed; pip install acme"})
    with pytest.raises(
        UnsupportedRequestError,
        match=r"no backend can serve this call: .*Nearest miss: near \(dtype='float32' is not flo",
    ) as caught:
        chosen(far, near, gone)
    assert set(caught.value.rejected) == {"far", "near", "gone"}
    assert "\n  gone: acme is not installed; pip install acme" in str(caught.value)


def test_a_platform_without_backends():
    with pytest.raises(
        UnsupportedRequestError, match=r"No backend is registered for 'cuda' \(known: cpu, cuda, mps, rocm\)"
    ):
        chosen(offer("plain"), request=dataclasses.replace(REQUEST, platform="cuda"))


def narrowing(answer: Callable[[BackendInfo], Any]) -> Catalogue:
    return catalogue(offer("picky", auto=rule(1)), offer("plain"), narrow=lambda backend, request: answer(backend))


def test_the_plugin_may_narrow():
    refuses = narrowing(lambda b: Rejected("slow at D=64") if b.name == "picky" else None)
    selection = select(REQUEST, refuses, Policy())
    assert (selection.backend, selection.rejected) == ("plain", {"picky": ["slow at D=64"]})
    with pytest.raises(UnsupportedRequestError, match="slow at D=64"):
        select(REQUEST, refuses, Policy(asked("picky")))
    assert select(REQUEST, narrowing(lambda b: Accepted()), Policy()).backend == "picky"


def test_the_plugin_is_asked_once_and_only_about_what_its_rows_accept():
    calls = []
    there = narrowing(lambda b: calls.append(b.name))
    select(REQUEST, there, Policy(), full=True)
    assert sorted(calls) == ["picky", "plain"]
    calls.clear()
    with pytest.raises(UnsupportedRequestError):
        select(dataclasses.replace(REQUEST, dtype="float64"), there, Policy(), full=True)
    assert not calls


def test_a_plugin_that_fails_while_narrowing_is_passed_over_and_by_name_an_error():
    broken = narrowing(lambda b: BrokenHook("its hook raised", OSError("x")) if b.name == "picky" else None)
    assert select(REQUEST, broken, Policy()).backend == "plain"
    with pytest.raises(PluginError, match=r"its hook raised.*see `polyattn doctor`") as caught:
        select(REQUEST, broken, Policy(asked("picky")))
    assert isinstance(caught.value.__cause__, OSError)


def test_the_broken_plugin_of_this_very_device_is_an_error_unless_something_is_named():
    label, error = "acme (acme 1.0)", ImportError("libacme.so.3")
    there = catalogue(
        offer("plain"),
        offer("plain", platform="cuda"),
        broken={label: "ImportError: libacme.so.3"},
        errors={label: error},
        vendor_broken={"cuda": label},
    )
    on_cuda = dataclasses.replace(REQUEST, platform="cuda")
    with pytest.raises(
        BackendUnavailableError,
        match=r"the plugin of this device, acme \(acme 1\.0\), is broken: ImportError: libacme\.so\.3\. Repair it",
    ) as caught:
        select(on_cuda, there, Policy())
    assert caught.value.__cause__ is error
    assert select(REQUEST, there, Policy()).backend == "plain"
    assert select(on_cuda, there, Policy(asked("plain"))).backend == "plain"


def phase(name: str) -> AttentionRequest:
    return AttentionRequest(family="paged", phase=name, dtype="bfloat16", head_dim=64, page_size=64)


PAGED = {"family": "paged", "phase": ("prefill", "decode"), "page_size": Range(1), "kv_dtype": ("auto", "fp4_e2m1")}
FIXED = PairRule("prefill", "decode", ("trtllm",), "its FP4 layout is another", conditions(kv_dtype="fp4_e2m1"))
SERVERS = (
    offer("fa4", provider("own", PAGED), pairs=(FIXED,)),
    offer("trtllm", provider("own", PAGED)),
    offer("triton", provider("own", PAGED)),
)


def pair(prefill: str, decode: str, **changes: Any) -> dict[str, Selection]:
    requests = [dataclasses.replace(phase(p), **changes) for p in ("prefill", "decode")]
    policies = {"prefill": Policy(asked(prefill)), "decode": Policy(asked(decode))}
    return select_pair(*requests, catalogue(*SERVERS), policies)


def test_two_phases_may_have_two_backends():
    found = pair("fa4", "trtllm")
    assert {k: v.backend for k, v in found.items()} == {"prefill": "fa4", "decode": "trtllm"}


def test_a_pair_that_does_not_work_is_refused_before_anything_runs():
    with pytest.raises(
        UnsupportedRequestError,
        match=r"fa4 for prefill does not work with trtllm for decode: its FP4 layout is another. Choose another",
    ) as caught:
        pair("fa4", "trtllm", kv_dtype="fp4_e2m1")
    assert caught.value.rejected == {"fa4": ["its FP4 layout is another"]}


@pytest.mark.parametrize("names", [("fa4", "triton"), ("trtllm", "fa4"), ("fa4", "fa4"), ("trtllm", "trtllm")])
def test_the_rule_binds_this_pair_in_this_order_only(names):
    assert pair(*names, kv_dtype="fp4_e2m1")["decode"].backend == names[1]


def test_a_rule_about_one_phase_says_nothing_about_the_other():
    """Alone in both phases it does not work; as the decode half of a pair it does."""
    selfish = PairRule("prefill", "decode", ("solo",), "its own decode wants another layout")
    there = catalogue(offer("solo", provider("own", PAGED), pairs=(selfish,)), offer("triton", provider("own", PAGED)))
    requests = (phase("prefill"), phase("decode"))
    mixed = {"prefill": Policy(asked("triton")), "decode": Policy(asked("solo"))}
    assert select_pair(*requests, there, mixed)["decode"].backend == "solo"
    with pytest.raises(UnsupportedRequestError, match="solo for prefill does not work with solo for decode"):
        select_pair(*requests, there, {p: Policy(asked("solo")) for p in ("prefill", "decode")})


def test_the_answer_is_complete_when_it_is_asked_in_full():
    offers = (offer("winner", auto=rule(1)), offer("able"), offer("picky", provider("own", {"dtype": "float16"})))
    quick = chosen(*offers)
    assert (quick.others, quick.rejected) == ((), {})
    full = chosen(*offers, full=True)
    assert (full.others, full.rejected) == (("able",), {"picky": ["dtype='float32' is not float16"]})


def test_the_answer_is_about_the_request_in_normal_form():
    selection = chosen(offer("a"), request=dataclasses.replace(REQUEST, scale=64**-0.5, kv_dtype="float32"))
    assert selection.request == REQUEST.normalised()


def test_the_answer_is_plain_data_and_text():
    offers = (offer("winner", auto=rule(1, "for a reason")), offer("picky", provider("own", {"dtype": "float16"})))
    selection = chosen(*offers, full=True)
    data = json.loads(json.dumps(selection.to_dict()))
    assert (data["backend"], data["platform"], data["provider"]) == ("winner", "cpu", "own")
    assert (data["source"], data["why"], data["planned"]) == ("platform rule", "for a reason", False)
    assert data["rejected"] == {"picky": ["dtype='float32' is not float16"]}
    assert (data["request"]["head_dim"], data["request"]["dtype"]) == (64, "float32")
    assert str(selection).splitlines() == [
        "winner@cpu (own) by platform rule: for a reason",
        "  not picky: dtype='float32' is not float16",
    ]


def test_a_fingerprint_tells_choices_apart_and_nothing_else():
    plain = chosen(offer("a"))
    assert plain.fingerprint() == chosen(offer("a"), offer("b", priority=-1), full=True).fingerprint()
    others = [
        chosen(offer("b")),
        chosen(offer("a", provider("other"))),
        chosen(offer("a"), request=dataclasses.replace(REQUEST, head_dim=32)),
    ]
    assert len({s.fingerprint() for s in (plain, *others)}) == 4


def test_many_backends_in_any_order():
    """The winner of a hundred is the one with the highest priority among those that can."""
    drawn = random.Random(0)
    offers = [offer(f"b{i:03}", provider("own", {"head_dim": i + 1}), priority=i % 7) for i in range(100)]
    for dim in (1, 50, 100):
        drawn.shuffle(offers)
        assert chosen(*offers, request=dataclasses.replace(REQUEST, head_dim=dim)).backend == f"b{dim - 1:03}"


@pytest.mark.parametrize(("plugin", "winner"), [("other", "mine"), ("mine", "thief")])
def test_a_strangers_alias_cannot_take_over_a_name(plugin: str, winner: str) -> None:
    """Its own plugin may say that in a family the name means another backend (`fa3` in diffusion is `fa`)."""
    thief = dataclasses.replace(offer("thief", aliases=(Alias("mine"), Alias("mine", ("dense",)))), plugin=plugin)
    assert chosen(thief, offer("mine"), choice=asked("mine")).backend == winner


def test_an_alias_of_two_plugins_is_nobodys() -> None:
    """Which one answered would hang on who was found first."""
    both = (offer("orbit", aliases=(Alias("quick"),)), offer("comet", aliases=(Alias("quick", ("dense",)),)))
    with pytest.raises(BackendUnavailableError) as caught:
        chosen(*both, choice=asked("quick"))
    assert str(caught.value) == (
        "backend 'quick', asked for by argument, is an alias of several: orbit@cpu of plugin orbit, comet@cpu of "
        "plugin comet. Ask for one by its name"
    )
    assert chosen(*both, choice=asked("comet")).backend == "comet"
    packed = dataclasses.replace(REQUEST, family="varlen", layout="THD")
    orbit = offer("orbit", provider("own", {"family": "varlen"}), aliases=(Alias("quick"),))
    assert chosen(orbit, both[1], request=packed, choice=asked("quick")).backend == "orbit", "of one family only"
    away = dataclasses.replace(both[1], missing={"own": "its library is not installed"})
    assert chosen(both[0], away, choice=asked("quick")).backend == "orbit", "the other is not here"
    own = dataclasses.replace(both[1], plugin="orbit")
    assert chosen(both[0], own, choice=asked("quick")).backend == "orbit", "one author may say it twice"
