"""Who serves which phase: inheritance, the override chain, and every rule of a pair said before a kernel runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import polyattn
from polyattn.contract import AttentionRequest
from polyattn.dispatch import binding
from polyattn.errors import BackendUnavailableError, InvalidInputError, UnsupportedRequestError
from polyattn.selection import phase_pairs
from polyattn.selection.inspection import catalogue
from polyattn.selection.select import Policy, select
from polyattn.serving.attention import choosing, phases
from polyattn.serving.attention.phases import Asked, choose_phases, layer_request
from polyattn.serving.layer import AttentionLayer
from polyattn.serving.step.batch import ForwardMode

from .rig import Rig, decoder


def served(**arguments: Any) -> dict[str, str]:
    return {phase: found.backend for phase, found in Rig(decoder(), **arguments).backend.explain().items()}


INHERITANCE = {
    "one for all": ({"backend": "toy"}, {}, ("toy", "toy", "toy")),
    "both": ({"prefill_backend": "toy", "decode_backend": "toy_chain"}, {}, ("toy", "toy_chain", "toy")),
    "decode's own": ({"backend": "toy", "decode_backend": "toy_chain"}, {}, ("toy", "toy_chain", "toy")),
    "prefill's own": ({"backend": "toy", "prefill_backend": "toy_chain"}, {}, ("toy_chain", "toy", "toy_chain")),
    "mode decode": (
        {"backend": "toy", "decode_backend": "toy_chain", "verify": "decode"},
        {},
        ("toy", "toy_chain", "toy_chain"),
    ),
    "mode by setting": (
        {"backend": "toy", "decode_backend": "toy_chain"},
        {"speculative_attention_mode": "decode"},
        ("toy", "toy_chain", "toy_chain"),
    ),
    "mode by argument over the setting": (
        {"backend": "toy", "decode_backend": "toy_chain", "verify": "prefill"},
        {"speculative_attention_mode": "decode"},
        ("toy", "toy_chain", "toy"),
    ),
    "settings": (
        {},
        {"prefill_attention_backend": "toy_chain", "decode_attention_backend": "toy"},
        ("toy_chain", "toy", "toy_chain"),
    ),
    "a setting inherits": (
        {},
        {"attention_backend": "toy", "decode_attention_backend": "toy_chain"},
        ("toy", "toy_chain", "toy"),
    ),
    "an argument over a setting": (
        {"decode_backend": "toy"},
        {"attention_backend": "toy_chain"},
        ("toy_chain", "toy", "toy_chain"),
    ),
    "settings, mode by argument": (
        {"verify": "decode"},
        {"prefill_attention_backend": "toy_chain", "decode_attention_backend": "toy"},
        ("toy_chain", "toy", "toy"),
    ),
}


@pytest.mark.parametrize("arguments, configured, expected", INHERITANCE.values(), ids=INHERITANCE)
def test_inheritance(
    arguments: dict[str, Any], configured: dict[str, Any], expected: tuple[str, ...], toys: Any, settings: Any
) -> None:
    settings(**configured)
    assert tuple(served(topk=1, **arguments).values()) == expected


def test_the_verifier_nobody_named_is_the_best_at_verifying(toys: Any, settings: Any) -> None:
    """Mode prefill by argument, where the settings name a decode backend and mode decode."""
    settings(decode_attention_backend="toy_chain", speculative_attention_mode="decode")
    found = served(topk=1, verify="prefill")
    assert found["decode"] == "toy_chain"
    assert found["verify"] not in ("toy_chain", "toy_plain")
    assert served(topk=1, verify="decode")["verify"] == "toy_chain"


def test_scopes_are_captured_when_the_backend_is_made(toys: Any) -> None:
    with polyattn.use_backend("toy"):
        rig = Rig(decoder(), topk=1)
    assert {found.backend for found in rig.backend.explain().values()} == {"toy"}
    assert {found.source for found in rig.backend.explain().values()} == {"use_backend"}


def test_explain_says_where_a_choice_came_from_and_who_writes(toys: Any, settings: Any) -> None:
    settings(decode_attention_backend="toy")
    found = Rig([*decoder(1), AttentionLayer(1, 4, 2, 16, window=3)], prefill_backend="toy_saves").backend
    assert (found.explain()["extend"].source, found.explain()["decode"].source) == ("argument", "configure()")
    assert found.explain()["extend"].notes[-1] == "new keys and values are written by the kernel"
    assert found.explain()["decode"].notes[-1].endswith("by the pool, before the kernel runs")
    assert (found.explain(0)["decode"].request.window, found.explain(1)["decode"].request.window) == ((-1, -1), (3, -1))
    with pytest.raises(InvalidInputError, match=r"no attention layer 7 here.* Known: \[0, 1\]"):
        found.explain(7)


@pytest.mark.parametrize(
    ("arguments", "answers"),
    [
        # The pool writes for the toy, which is one that cannot: whether it can is asked too.
        ({"backend": "toy"}, 4),
        ({"backend": "toy_saves"}, 4),
        ({"prefill_backend": "toy_saves", "decode_backend": "toy"}, 4),
        ({}, 4),
        ({"backend": "toy", "topk": 1}, 6),
        ({"topk": 1}, 6),
    ],
)
def test_each_answer_is_selected_once(
    arguments: dict[str, Any], answers: int, toys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who serves each phase, and whether that kernel writes too: of layers that ask the same, once for all of them."""
    asked: list[AttentionRequest] = []

    def counted(request: AttentionRequest, *rest: Any, **more: Any) -> Any:
        asked.append(request)
        return select(request, *rest, **more)

    for module in (phase_pairs, binding, phases, choosing):
        monkeypatch.setattr(module, "select", counted)
    Rig(decoder(3), **arguments)
    assert len(asked) == len(set(asked)) == answers


# What does not go together -------------------------------------------------------------------------------------------


def refused(error: type[Exception] = UnsupportedRequestError, *, words: str, **arguments: Any) -> None:
    with pytest.raises(error, match=words):
        Rig(decoder(), **arguments)


def test_a_pair_rule_names_both_flags(toys: Any) -> None:
    config = {"dtype": "fp8_e4m3"}
    words = (
        "--prefill-attention-backend toy_plain with --decode-attention-backend toy: toy_plain for prefill does not "
        "work with toy for decode: made for a test"
    )
    refused(words=words, prefill_backend="toy_plain", decode_backend="toy", config=config)
    Rig(decoder(), prefill_backend="toy_plain", decode_backend="toy")
    Rig(decoder(), prefill_backend="toy", decode_backend="toy_plain", config=config)


@pytest.mark.parametrize("pair", [("toy", "toy_chain"), ("toy_chain", "toy"), ("toy_chain", "toy_chain")])
def test_either_phase_must_take_the_drafts(pair: tuple[str, str], toys: Any) -> None:
    words = (
        f"--prefill-attention-backend {pair[0]} with --decode-attention-backend {pair[1]}, "
        f"--speculative-eagle-topk 4: .*spec_topk=4 is not"
    )
    refused(words=words, prefill_backend=pair[0], decode_backend=pair[1], topk=4)
    Rig(decoder(), prefill_backend=pair[0], decode_backend=pair[1], topk=1)


def test_a_backend_that_is_not_there(toys: Any) -> None:
    words = "--prefill-attention-backend toi with --decode-attention-backend .automatic.: .*'toi'"
    refused(BackendUnavailableError, words=words, prefill_backend="toi")


def test_a_verifier_that_cannot(toys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both phases take the drafts, and the one that verifies has no verify phase."""
    asked = Asked(prefill="toy", decode="toy", topk=1)
    requests = _requests(decoder(1)[0], topk=1)
    requests["verify"] = dataclasses.replace(requests["verify"], batch_invariant=True)
    words = "--speculative-attention-mode prefill with --prefill-attention-backend toy, --speculative-eagle-topk 1: .*"
    with pytest.raises(UnsupportedRequestError, match=words + "batch_invariant"):
        choose_phases(requests, asked)


def _requests(layer: AttentionLayer, *, topk: int = 0, recorded: bool = False, **stored: Any) -> dict[Any, Any]:
    fields = {"page_size": 64, "kv_layout": "NHD", **stored}
    return {
        phase: layer_request(
            layer, fields, phase=phase, dtype=torch.float32, device=torch.device("cpu"), topk=topk, recorded=recorded
        )
        for phase in Asked(topk=topk).phases
    }


WIDE = AttentionLayer(0, 32, 8, 128)
LATENT = AttentionLayer(0, 128, 1, 576, v_head_dim=512, scale=192**-0.5, latent=True)
FP4 = {"kv_dtype": "fp4_e2m1", "kv_scales": "block16"}
SEEDS_G: dict[str, tuple[str, AttentionLayer, dict[str, Any], tuple[str, str], int, str]] = {
    "trtllm_mha decodes, topk 4": (
        "sm100", WIDE, {}, ("flashinfer", "trtllm_mha"), 4, "trtllm_mha.*spec_topk=4 is not 0 to 1"),
    "trtllm_mha prefills, topk 4": (
        "sm100", WIDE, {}, ("trtllm_mha", "flashinfer"), 4, "trtllm_mha.*spec_topk=4 is not 0 to 1"),
    "fa4 prefills FP4, trtllm_mha decodes": ("sm100", WIDE, FP4, ("fa4", "trtllm_mha"), 0, "FP4 cache that fa4"),
    "flashmla, page 32": ("sm90", LATENT, {"page_size": 32}, ("flashmla", "flashmla"), 0, "page_size=32 is not 64"),
    # Pages of 128 are its pages of 64, by a view.
    "trtllm_mha, page 24": (
        "sm100", WIDE, {"page_size": 24}, ("trtllm_mha", "trtllm_mha"), 0, "page_size=24 is not one of 16, 32, 64"),
}  # fmt: skip


@pytest.fixture
def vendors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vendors declare for their own devices, judged as if it were built and installed."""
    names = ("flash-attn-3", "flash-attn-4", "flashinfer-python", "sgl-kernel", "sgl-flash-mla")
    installed = {**dict.fromkeys((*names, "torch", "triton", "polyattn"), "")}
    monkeypatch.setattr(phases, "catalogue", lambda: catalogue(installed))
    monkeypatch.setattr(phases, "Policy", functools.partial(Policy, what_if=True))


def on_cuda(arch: str, layer: AttentionLayer, topk: int, stored: Mapping[str, Any]) -> dict[Any, Any]:
    there = {"platform": "cuda", "arch": arch, "dtype": "bfloat16", "features": ()}
    requests = _requests(layer, topk=topk, **stored)
    return {phase: dataclasses.replace(request, **there).normalised() for phase, request in requests.items()}


@pytest.mark.parametrize("arch, layer, stored, pair, topk, words", SEEDS_G.values(), ids=SEEDS_G)
def test_the_rules_of_vendors_backends(
    arch: str,
    layer: AttentionLayer,
    stored: Mapping[str, Any],
    pair: tuple[str, str],
    topk: int,
    words: str,
    vendors: None,
) -> None:
    flags = f"--prefill-attention-backend {pair[0]} with --decode-attention-backend {pair[1]}"
    with pytest.raises(UnsupportedRequestError, match=f"{flags}.*{words}"):
        choose_phases(on_cuda(arch, layer, topk, stored), Asked(prefill=pair[0], decode=pair[1], topk=topk))


GOOD: dict[str, tuple[str, AttentionLayer, dict[str, Any], tuple[str, str], int]] = {
    "fa4 prefills FP4, triton decodes": ("sm100", WIDE, FP4, ("fa4", "triton"), 0),
    "fa4 prefills bf16, trtllm_mha decodes": ("sm100", WIDE, {}, ("fa4", "trtllm_mha"), 0),
    "trtllm_mha, topk 1": ("sm100", WIDE, {}, ("trtllm_mha", "trtllm_mha"), 1),
    "flashinfer, topk 4, page 64": ("sm90", WIDE, {}, ("flashinfer", "flashinfer"), 4),
    "fa3 MLA, topk 4, page 1": ("sm90", LATENT, {"page_size": 1}, ("fa3", "fa3"), 4),
}


@pytest.mark.parametrize("arch, layer, stored, pair, topk", GOOD.values(), ids=GOOD)
def test_pairs_of_vendors_backends_that_work(
    arch: str,
    layer: AttentionLayer,
    stored: Mapping[str, Any],
    pair: tuple[str, str],
    topk: int,
    vendors: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As far as loading, which needs the device."""

    class Loaded(Exception):  # noqa: N818 - no error
        pass

    def load(*args: Any, planned: bool) -> None:
        assert planned
        raise Loaded

    monkeypatch.setattr(phases, "bind_selection", load)
    with pytest.raises(Loaded):
        choose_phases(on_cuda(arch, layer, topk, stored), Asked(prefill=pair[0], decode=pair[1], topk=topk))


# Requests ------------------------------------------------------------------------------------------------------------


def test_what_a_layer_asks_for() -> None:
    layer = AttentionLayer(3, 8, 2, 64, v_head_dim=32, window=127, softcap=30.0, sinks=torch.zeros(8), scale=0.1)
    extend, decode, verify = _requests(layer, topk=4).values()
    same = {
        "family": "paged", "dtype": "float32", "heads": 8, "kv_heads": 2, "head_dim": 64, "v_head_dim": 32,
        "window": (127, -1), "softcap": 30.0, "sinks": True, "scale": 0.1, "page_size": 64, "spec_topk": 4,
        "layout": "THD", "graph_capture": False,
    }  # fmt: skip
    for request in (extend, decode):
        assert {name: getattr(request, name) for name in same} == same
    assert (extend.phase, extend.s_relation, extend.causal, extend.tree) == ("extend", "fewer", "bottom_right", False)
    assert (decode.phase, decode.s_relation, decode.causal) == ("decode", "one", "none")
    assert (verify.phase, verify.tree, verify.mask, verify.window) == ("verify", False, "bool", (-1, -1))
    full = _requests(dataclasses.replace(layer, window=-1), topk=4)["verify"]
    assert (full.phase, full.tree, full.mask) == ("verify", True, "bool")
    chain = _requests(layer, topk=1)["verify"]
    assert (chain.phase, chain.tree, chain.mask, chain.spec_topk) == ("verify", False, "none", 1)


def test_what_other_kinds_of_layers_ask_for() -> None:
    cross = _requests(AttentionLayer(0, 4, 2, 16, kind="cross"))
    assert {r.causal for r in cross.values()} == {"none"}
    assert all(r.cross for r in cross.values())
    assert [r.s_relation for r in cross.values()] == ["more", "one"]
    whole = _requests(AttentionLayer(0, 4, 2, 16, kind="encoder_only", window=4))["extend"]
    assert (whole.causal, whole.window, whole.cross) == ("none", (4, 4), False)
    latent = _requests(LATENT)["decode"]
    assert (latent.family, latent.scale, latent.dims) == ("mla", 192**-0.5, (576, 512))


def test_decode_and_verify_are_recorded_and_extend_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever verifies: so prefill's backend is recorded in mode prefill only."""
    assert {"decode", "verify"} == phases.RECORDED
    rig = Rig(decoder())
    seen: dict[str, bool | str] = {}

    def judged(requests: Mapping[str, AttentionRequest], asked: Asked) -> Any:
        seen.update({phase: request.graph_capture for phase, request in requests.items()})
        raise UnsupportedRequestError("asked")

    from polyattn.serving.attention import choosing

    monkeypatch.setattr(choosing, "choose_phases", judged)
    with pytest.raises(UnsupportedRequestError, match="asked"):
        choosing.choose_layers(rig.layers, rig.pool, Asked(topk=1), recorded=phases.RECORDED)
    assert seen == {"extend": False, "decode": "session", "verify": "session"}


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"verify": "decoder"}, "verify='decoder'; it is 'prefill', 'decode' or None. Did you mean 'decode'"),
        ({"topk": -1}, "topk=-1; it is 0"),
        ({"topk": 1.5}, "topk=1.5; it is 0"),
    ],
)
def test_arguments_that_mean_nothing(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        Rig(decoder(), **arguments)


def test_a_server_without_speculation_verifies_nothing() -> None:
    rig = Rig(decoder())
    (row,) = rig.add()
    with pytest.raises(InvalidInputError, match="mode TARGET_VERIFY in a server without speculation"):
        rig.step(ForwardMode.TARGET_VERIFY, {row: 2})
