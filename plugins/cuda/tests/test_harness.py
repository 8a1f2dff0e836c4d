"""The harness itself: vendor signatures are enforced, calls are recorded, and what an adapter loads is held to them."""

from __future__ import annotations

import sys

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
