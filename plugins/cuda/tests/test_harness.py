"""The harness itself: vendor signatures are enforced, calls are recorded, and what an adapter loads is held to them."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch

from polyattn.errors import BackendUnavailableError
from polyattn.records import Requirement
from polyattn.testing import AttentionConformance
from polyattn.testing.where import Place
from polyattn_cuda import vendor

from .emulators import Library
from .harness import OnDevice

NEED = Requirement("acme-attn", module="acme.attn", hint="pip install acme-attn")


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library("acme-attn", "1.2.3", "acme.attn")

    @library.function("acme.attn", "flash_attn_interface@sdist.flash_attn_func", name="attend")
    def attend(q: object, causal: bool, **_: object) -> tuple[object, bool]:
        return q, causal

    @library.function("acme.attn", "sageattention@1.sageattn", name="swallow")
    def swallow(**_: object) -> None: ...

    return library.install(monkeypatch)


def test_a_call_is_bound_to_the_vendors_signature(acme: Library) -> None:
    attend = vendor.load(NEED, "acme.attn:attend")
    assert attend(1, 2, v=3, causal=True) == (1, True)
    call = acme.calls[-1]
    assert (call.name, call.positional, dict(call.given)) == ("attend", 2, {"q": 1, "k": 2, "v": 3, "causal": True})
    assert call.arguments["window_size"] == (-1, -1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sinks'"):
        attend(1, 2, 3, sinks=None)
    assert len(acme.calls) == 1


def test_a_keyword_that_would_be_swallowed_is_an_error(acme: Library) -> None:
    with pytest.raises(TypeError, match="would swallow return_lse"):
        vendor.load(NEED, "acme.attn:swallow")(q=1, k=2, v=3, return_lse=True)


def test_a_library_that_is_not_here_is_not_run_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> Place:
        raise BackendUnavailableError("fa2@cuda is unavailable: flash-attn is not installed")

    class Suite(OnDevice):
        backend = "fa2@cuda"

    monkeypatch.setattr(AttentionConformance, "_place", absent)
    assert Suite._place(None, None).missing == "fa2@cuda is unavailable: flash-attn is not installed"


def test_a_missing_keyword_names_the_version_and_the_need(acme: Library) -> None:
    with pytest.raises(BackendUnavailableError) as lacking:
        vendor.load(NEED, "acme.attn:attend", {"causal": "causal calls", "return_attn_probs": "the LSE"})
    assert str(lacking.value) == (
        "acme.attn:attend of acme-attn 1.2.3 takes no 'return_attn_probs', which the LSE needs. Install one that "
        "does: pip install acme-attn"
    )


def test_what_cannot_be_imported(acme: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailableError, match=r"acme-attn 1\.2\.3 has no usable acme\.attn:gone: Attr"):
        vendor.load(NEED, "acme.attn:gone")
    monkeypatch.setitem(sys.modules, "acme.attn", None)
    with pytest.raises(BackendUnavailableError, match=r"has no usable acme\.attn:attend: Modu") as broken:
        vendor.load(NEED, "acme.attn:attend")
    assert isinstance(broken.value.__cause__, ImportError)


def test_operators_show_their_keywords_in_their_schema(acme: Library) -> None:
    @torch.library.custom_op("polyattn_harness::scaled", mutates_args=())
    def scaled(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        return x * by

    acme.add("acme.attn", scaled=scaled)
    assert vendor.load(NEED, "acme.attn:scaled", {"by": "scaling"}) is scaled
    with pytest.raises(BackendUnavailableError, match="takes no 'window'"):
        vendor.load(NEED, "acme.attn:scaled", {"window": "windows"})


def test_an_operator_is_called_in_the_order_of_its_schema(acme: Library) -> None:
    with torch.library._scoped_library("acme_operators", "FRAGMENT") as fragment:
        fragment.define("fwd(Tensor q, Tensor k, Tensor? sinks, bool causal, int? ring, Tensor? v) -> Tensor[]")

        def body(q: Any, k: Any, sinks: Any, causal: bool, ring: int | None, v: Any) -> list[Any]:
            return [q + k * causal + (ring or 0), k if v is None else v]

        fragment.impl("fwd", body, "CPU")
        target = "acme.attn:acme_operators.fwd"
        operator = vendor.Operator(NEED, target, {"causal": True}, {"sinks": "the sinks"})
        one, two = torch.ones(2), torch.full((2,), 2.0)
        assert operator.taking()(one, two)[0].tolist() == [3, 3]
        found = operator.taking("v", "ring")(one, two, one, 4)
        assert found[0].tolist() == [7, 7]
        assert found[1] is one
        assert operator.taking("v")(one, two, one, ring=5)[0].tolist() == [8, 8]
        assert operator.rest(ring=3) == (None, True, 3, None)
        assert operator.function(one, two, *operator.rest(ring=3))[0].tolist() == [6, 6]
        assert operator.taking()(one, two)[0].tolist() == [3, 3]
        for fixed, needs, message in (
            ({"causal": True}, {"alibi": "ALiBi"}, "acme-attn 1.2.3 takes no 'alibi', which ALiBi needs. Install one"),
            ({"scale": 1.0}, {}, "acme-attn 1.2.3 takes no 'scale', which every call needs"),
            ({}, {}, f"{target} of acme-attn 1.2.3 needs 'causal', which polyattn does not know. Install one"),
        ):
            with pytest.raises(BackendUnavailableError, match=re.escape(message)):
                vendor.Operator(NEED, target, fixed, needs)
    with pytest.raises(BackendUnavailableError, match=r"no usable acme.attn:acme_operators.bwd: AttributeError"):
        vendor.Operator(NEED, "acme.attn:acme_operators.bwd", {}, {})
