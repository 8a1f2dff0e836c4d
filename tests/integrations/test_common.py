"""The hosts' common room: what every host's adapter stands on, without any host."""

from __future__ import annotations

import dataclasses
import importlib
import math
import types
from typing import Any

import pytest
import torch

import polyattn
from polyattn import (
    AttentionRequest,
    BackendUnavailableError,
    ConfigError,
    InvalidInputError,
    UnsupportedRequestError,
)
from polyattn.integrations.common import hosts, keywords, names
from polyattn.integrations.common.capabilities import reasons_against
from polyattn.integrations.common.lse import lse_from_base, lse_to_base
from polyattn.integrations.common.patching import Patches
from polyattn.integrations.common.reports import Recorder

WHO = "Layer on polyattn (fa3)"


class Layer(torch.nn.Module):
    pass


# ------------------------------------------------------------------------------------------------------------- hosts


def test_a_host_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hosts.OLDEST, "no_such_host", "2.1")
    with pytest.raises(BackendUnavailableError) as caught:
        hosts.host_package("no_such_host")
    assert str(caught.value) == (
        "no_such_host is not installed; pip install 'polyattn[no_such_host]', or no_such_host 2.1 or newer"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_host_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    host = types.SimpleNamespace(__version__="2.0")
    monkeypatch.setattr(importlib, "import_module", lambda name: host)
    monkeypatch.setitem(hosts.OLDEST, "some_host", "2.1")
    with pytest.raises(BackendUnavailableError, match=r"some_host 2\.0 is installed, 2\.1 or newer is needed"):
        hosts.host_package("some_host")
    host.__version__ = "2.1"
    assert hosts.host_package("some_host") is host


def test_what_a_host_lacks_itself_is_not_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'other'", name="other")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="other"):
        hosts.host_package("transformers")


# ------------------------------------------------------------------------------------------------------------- names


def test_names_pin_a_backend() -> None:
    words = names.backend_words()
    assert {"torch_sdpa", "flex_attention", "reference"} <= set(words)
    assert words == sorted(set(words))
    assert names.pinned("own", ["torch_sdpa"]) == {"own|torch_sdpa": "torch_sdpa"}
    assert names.split_pin("own|torch_sdpa") == ("own", "torch_sdpa")
    assert names.split_pin("own") == ("own", None)
    assert names.split_pin("own|") == ("own", "")


def test_a_pin_that_is_not_there() -> None:
    error = names.unknown_pin("backend", "own|torch_spda", ["own", *names.pinned("own", ["torch_sdpa", "fa3"])])
    assert isinstance(error, ConfigError)
    assert str(error) == (
        "backend='own|torch_spda' is not installed: no backend 'torch_spda' can be pinned by name. Did you mean "
        "'torch_sdpa'? Known: torch_sdpa, fa3; polyattn.use_backend(...) reaches all"
    )
    assert "Known: none;" in str(names.unknown_pin("backend", "own|x", ["own"]))


# ---------------------------------------------------------------------------------------------------------- keywords


def test_who_asks_and_what_was_given() -> None:
    assert keywords.asked_by(Layer(), "fa3") == WHO
    assert keywords.asked_by(Layer(), None) == "Layer on polyattn (automatic backend)"
    assert keywords.shown(torch.zeros(2, 3)) == "tensor (2, 3) torch.float32"
    assert keywords.shown("a" * 99) == "'" + "a" * 56 + "..."
    assert keywords.shown(3) == "3"


def test_unknown_keywords_are_refused_by_name() -> None:
    keywords.refuse_unknown({}, WHO, "ask another")
    with pytest.raises(UnsupportedRequestError) as caught:
        keywords.refuse_unknown({"tilt": 3}, WHO, "ask another")
    assert str(caught.value).startswith(
        f"unknown keyword tilt (3) reached {WHO}: it may change the result, so it is not dropped. If it says nothing "
        "about attention, install(harmless=['tilt']); else ask another"
    )
    assert caught.value.rejected == {"tilt": ["unknown keyword"]}
    error = keywords.refused("cache", WHO, "there is none", "leave it out")
    assert (str(error), error.rejected) == (
        f"cache reached {WHO}: there is none; leave it out",
        {"cache": ["there is none"]},
    )


def test_what_a_caller_may_call_harmless() -> None:
    known, semantic = frozenset({"labels"}), frozenset({"softcap"})
    assert keywords.harmless_words(known, ["mine"], semantic) == {"labels", "mine"}
    with pytest.raises(ConfigError, match="harmless names softcap, which changes the result of attention; leave"):
        keywords.harmless_words(known, ["softcap"], semantic)
    with pytest.raises(InvalidInputError, match=r"harmless='mine' must be a list of keyword names: \['mine'\]"):
        keywords.harmless_words(known, "mine", semantic)


# ------------------------------------------------------------------------------------------------------ capabilities

TEMPLATE = AttentionRequest(family="paged", page_size=16, kv_layout="NHD", layout="THD", heads=8, kv_heads=2)


def phases(template: AttentionRequest) -> list[AttentionRequest]:
    relations = {"prefill": "equal", "decode": "one"}
    return [dataclasses.replace(template, phase=p, s_relation=r) for p, r in relations.items()]  # type: ignore[arg-type]


def test_a_request_that_is_served_has_no_reason_against_it() -> None:
    assert reasons_against(phases(TEMPLATE)) == ()
    assert reasons_against(phases(TEMPLATE), "torch_native") == ()


def test_what_a_layer_asks_and_nobody_serves_has_its_reasons_once() -> None:
    reasons = reasons_against(phases(dataclasses.replace(TEMPLATE, dropout=0.1)), "torch_native")
    assert "torch-serving: dropout=0.1 is not declared" in reasons
    assert "torch: family='paged' is not varlen" in reasons
    assert len(set(reasons)) == len(reasons), "each once, though both phases ask"
    everybody = reasons_against([dataclasses.replace(TEMPLATE, dropout=0.1)])
    assert len(everybody) == 1
    assert "dropout" in everybody[0]


def test_a_documented_fallback_does_not_count_as_the_backend_that_was_named() -> None:
    request = AttentionRequest(platform="cuda", arch="sm90", head_dim=64)
    here = polyattn.explain(request, backend="fa")
    assert here.source == "fallback from fa", "torch's kernels would serve it"
    assert reasons_against([request], "torch_sdpa") == ()
    assert any("is not installed" in reason for reason in reasons_against([request], "fa"))


def test_a_backend_that_nobody_knows() -> None:
    (reason,) = reasons_against([TEMPLATE], "torch_nativ")
    assert "torch_nativ" in reason
    assert "Did you mean 'torch_native'" in reason


# ---------------------------------------------------------------------------------------------------------- patching


class Host:
    kept = "kept"

    def method(self) -> str:
        return "host"


class Child(Host):
    pass


def test_what_was_there_comes_back() -> None:
    registry: dict[str, Any] = {"old": 1}
    before = dict(vars(Host))
    patches = Patches()
    assert not patches
    patches.attribute(Host, "method", lambda self: "ours")
    patches.attribute(Child, "method", lambda self: "a child's")
    patches.attribute(Host, "added", 3)
    patches.item(registry, "old", 2)
    patches.item(registry, "new", 3)
    patches.item(registry, "new", 4)
    assert patches
    assert (Host().method(), Child().method(), Host.added) == ("ours", "a child's", 3)  # type: ignore[attr-defined]
    assert registry == {"old": 2, "new": 4}
    patches.undo()
    assert dict(vars(Host)) == before
    assert "method" not in vars(Child)
    assert registry == {"old": 1}
    assert not patches
    patches.undo()
    assert registry == {"old": 1}


def test_what_somebody_changed_since_is_theirs() -> None:
    registry: dict[str, Any] = {"old": 1, "gone": 1}
    patches = Patches()
    for name in ("old", "gone", "kept"):
        patches.item(registry, name, object())
    theirs = registry["old"] = object()
    del registry["gone"]
    patches.undo()
    assert registry == {"old": theirs}


# ----------------------------------------------------------------------------------------------------- report and LSE


def test_a_report_of_who_serves_which_layer() -> None:
    model = torch.nn.ModuleDict({"first": Layer(), "second": Layer()})
    recorder = Recorder(model)
    q = torch.zeros(1, 4, 2, 8)
    for layer in (*model.values(), Layer()):
        out = recorder.call(polyattn.attention, layer, "own|torch_sdpa", q, q, q, backend="torch_sdpa")
        assert torch.equal(out, torch.zeros_like(q))
    assert [one.layer for one in recorder.found] == ["first", "second", "Layer"]
    assert str(recorder.found[0]).startswith("first (Layer, own|torch_sdpa): torch_sdpa@cpu by argument: ")
    assert recorder.found[0].selection.rejected
    assert Recorder().found == []


def test_the_lse_in_the_base_of_a_host() -> None:
    scores = torch.tensor([[1.0, 2.0, -3.0], [0.5, 0.25, 8.0]])
    lse = scores.logsumexp(-1)
    assert lse_to_base(lse, "e") is lse
    assert lse_from_base(lse, "e") is lse
    base2 = lse_to_base(lse, "2")
    torch.testing.assert_close(base2, torch.log2(scores.exp().sum(-1)))
    torch.testing.assert_close(lse_from_base(base2, "2"), lse)
    assert base2.dtype == torch.float32
    empty = torch.tensor([-math.inf])
    assert lse_to_base(empty, "2").item() == lse_from_base(empty, "2").item() == -math.inf
