"""Wave: the kit over an emulator of SGLang's calls, and its planted errors."""

from __future__ import annotations

from typing import Any

import pytest

from polyattn import what_if
from polyattn.contract import AttentionRequest
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library
from polyattn_rocm import wave

from .emulators import wave as emulator

TARGET = Emulated("wave", "wave-lang", "rocm:gfx942")
CASES = TARGET.cases(6, dtypes=("bfloat16",))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return emulator.library().install(monkeypatch)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conformance(case: Case, library: Library) -> None:
    TARGET.passes(case, library)


def test_both_kernels_were_met(library: Library) -> None:
    for relation in ("s_relation=one", "s_relation=fewer"):
        TARGET.passes(next(case for case in CASES if relation in case.id), library)
    assert {"decode_attention_wave", "extend_attention_wave"} <= {call.name for call in library.calls}
    assert all(call.positional == 0 for call in library.calls)


def test_the_scale_of_decode_is_folded_into_the_queries() -> None:
    fields: dict[str, Any] = {"family": "paged", "heads": 8, "kv_heads": 2, "page_size": 16, "scale": 0.1}
    where: dict[str, Any] = {"platform": "rocm:gfx942", "installed": ("wave-lang", "sglang"), "backend": "wave"}
    decode = AttentionRequest(**fields, phase="decode", s_relation="one")
    assert what_if(decode, **where).lowerings == ("fold_scale",)
    extend = AttentionRequest(**fields, phase="extend", s_relation="fewer", causal="bottom_right")
    assert what_if(extend, **where).lowerings == ()


@pytest.mark.parametrize("relation", ["one", "fewer"])
def test_planted_tokens_off_by_one_are_found(relation: str, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    right = wave.token_lists

    def shifted(*args: Any) -> Any:
        caches, found = right(*args)
        return caches, found._replace(indices=found.indices.roll(1))

    monkeypatch.setattr(wave, "token_lists", shifted)
    assert TARGET.caught([case for case in CASES if f"s_relation={relation}" in case.id][:3])
