"""MATE's FlashAttention: conformance over an emulator of it, what it is really called with, and planted errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyattn.contract import PagedTables
from polyattn.errors import BackendUnavailableError
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library
from polyattn_musa import flash

from .emulators import mate as emulator

CHIP = "musa:mp31"
FA, FA3 = Emulated("fa", "fa3/mate", CHIP), Emulated("fa3", "mate", CHIP)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return emulator.library().install(monkeypatch)


@pytest.mark.slow(keep=52)
@pytest.mark.parametrize("case", FA.cases(per_row=8), ids=str)
def test_conformance(case: Case, library: Library) -> None:
    FA.passes(case, library)


@pytest.mark.slow(keep=101)
@pytest.mark.parametrize("case", FA3.cases(per_row=8), ids=str)
def test_conformance_of_caches(case: Case, library: Library) -> None:
    FA3.passes(case, library)


DENSE: dict[str, Any] = {"family": "dense", "head_dim": 64, "heads": 4, "kv_heads": 2}


@pytest.mark.parametrize(
    ("fields", "backend"),
    [
        ({"s_relation": "equal", "causal": "bottom_right"}, "auto"),
        ({"s_relation": "fewer"}, "auto"),
        ({"s_relation": "more"}, "auto"),
        ({"s_relation": "fewer", "causal": "bottom_right"}, "mutlass"),
        ({"s_relation": "more", "causal": "bottom_right"}, "mutlass"),
        ({"s_relation": "equal", "window": (5, 0)}, "auto"),
    ],
)
def test_the_compiled_kernels_get_what_they_document(fields: dict[str, Any], backend: str, library: Library) -> None:
    size = {"equal": 9, "more": 5, "fewer": 13}[fields["s_relation"]]
    q, k = torch.randn(1, 9, 4, 64).half(), torch.randn(1, size, 2, 64).half()
    FA.bind(**DENSE, dtype="float16", **fields).forward(q, k, k)
    given = library.calls[-1].given
    assert given["backend"] == backend
    assert library.calls[-1].positional == 3


def test_a_right_window_of_zero_is_given_as_causal(library: Library) -> None:
    q = torch.randn(1, 9, 4, 64).bfloat16()
    FA.bind(**{**DENSE, "kv_heads": 4}, window=(3, 0)).forward(q, q, q)
    given = library.calls[-1].given
    assert (given["causal"], given["window_size"]) == (True, (3, -1))


def test_a_schedule_for_each_latent_call(library: Library) -> None:
    fields = {"family": "mla", "dims": (576, 512), "head_dim": 576, "v_head_dim": 512, "heads": 4, "kv_heads": 1}
    step = {"page_size": 64, "phase": "decode", "s_relation": "one", "scale": 0.1}
    fields.pop("dims")
    bound = FA3.bind(**fields, **step)
    tables = {
        "page_table": torch.tensor([[1]], dtype=torch.int32),
        "seq_lens": torch.tensor([9], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
    }
    for _ in range(2):
        query, cache = torch.randn(1, 4, 576).bfloat16(), torch.randn(2, 64, 576).bfloat16()
        bound.forward(query, cache, tables=PagedTables(**tables, max_seqlen_q=1, max_seqlen_k=9))
    first, second = (call.given["scheduler_metadata"] for call in library.calls[-2:])
    assert first[0] is not second[0]
    assert (first[1], library.calls[-1].given["softmax_scale"]) == (False, 0.1)


def test_an_older_mate_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Library("mate", "0.1.0", emulator.MODULE).install(monkeypatch)
    with pytest.raises(BackendUnavailableError, match=r"mate 0\.1\.0 has no usable mate\.mha_interface:flash_attn_var"):
        FA.bind(**DENSE)


# ------------------------------------------------------------------------------------------------------ planted errors


def _with(change: Callable[..., None]) -> Callable[[pytest.MonkeyPatch], None]:
    """The adapter's kernels with `change(kernels)` done to each after it was made."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        made = flash._Kernels.__init__

        def changed(self: Any, request: Any) -> None:
            made(self, request)
            change(self)

        monkeypatch.setattr(flash._Kernels, "__init__", changed)

    return plant


def _keyword(name: str, value: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(kernels: Any) -> None:
        for attribute in ("_attend", "_cached"):
            if call := getattr(kernels, attribute, None):
                keywords = {**call.keywords, name: value(call.keywords.get(name))}
                setattr(kernels, attribute, functools.partial(call.func, **keywords))

    return change


def _log2(monkeypatch: pytest.MonkeyPatch) -> None:
    both = flash._both

    def planted(result: Any, lse: bool) -> Any:
        out, found = both(result, lse)
        return out, None if found is None else found * 1.4426950408889634

    monkeypatch.setattr(flash, "_both", planted)


def _flat_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    made = flash._by_sequence
    monkeypatch.setattr(flash, "_by_sequence", lambda lse, where: made(lse, where).roll(1, -1))


PLANTED: dict[str, tuple[Emulated, str, Callable[[pytest.MonkeyPatch], None]]] = {
    "scale dropped": (FA, "dense", _with(_keyword("softmax_scale", lambda _: None))),
    "mask dropped": (FA, "dense", _with(_keyword("causal", lambda _: False))),
    "window one key wider": (FA, "dense", _with(_keyword("window_size", lambda w: (w[0] + (w[0] >= 0), w[1])))),
    "softcap dropped": (FA, "varlen", _with(_keyword("softcap", lambda _: 0.0))),
    "compiled kernels for all": (FA, "varlen", _with(_keyword("backend", lambda _: "auto"))),
    "log2 LSE": (FA, "varlen", _log2),
    "LSE of the wrong row": (FA, "varlen", _flat_lse),
    "scale of the latent dropped": (FA3, "mla", _with(_keyword("softmax_scale", lambda _: None))),
    "mask of the cache dropped": (FA3, "paged", _with(_keyword("causal", lambda _: False))),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_found(name: str, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    target, family, plant = PLANTED[name]
    cases = target.cases(per_row=8, families=(family,), dtypes=("bfloat16",))
    plant(monkeypatch)
    assert next((found for case in cases for found in target.caught([case])), ""), f"{len(cases)} cases passed"
