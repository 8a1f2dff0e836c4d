"""FlashMLA: conformance over an emulator of it, and what its three builds are really given."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn import what_if
from polyattn.contract import Slot
from polyattn.errors import BackendUnavailableError, UnsupportedRequestError
from polyattn.quantised import mla_pack_fp8
from polyattn.records import AttentionRequest
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library

from .emulators import flash_mla as emulator

GIT, SGL, VLLM = (Emulated("flashmla", name, "cuda:sm90@12.8") for name in ("flash-mla", "sgl-flash-mla", "vllm"))
BLACKWELL = Emulated("flashmla", "flash-mla", "cuda:sm100@12.8")
MLA: dict[str, Any] = {
    "family": "mla",
    "layout": "THD",
    "phase": "extend",
    "s_relation": "fewer",
    "causal": "bottom_right",
    "heads": 64,
    "head_dim": 576,
    "v_head_dim": 512,
    "scale": 192**-0.5,
    "page_size": 64,
}
ROWS_OF_BYTES = {**MLA, "kv_dtype": "fp8_e4m3", "kv_scales": "block128", "phase": "verify"}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return emulator.library().install(monkeypatch)


@pytest.mark.parametrize("case", GIT.cases(per_row=10), ids=str)
def test_conformance(case: Case, library: Library) -> None:
    GIT.passes(case, library)


@pytest.mark.parametrize("case", BLACKWELL.cases(per_row=3), ids=str)
def test_conformance_on_blackwell(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    BLACKWELL.passes(case, emulator.library(hopper=False).install(monkeypatch))


@pytest.mark.parametrize("build", ["sgl", "vllm"])
def test_conformance_of_other_builds(build: emulator.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    target = {"sgl": SGL, "vllm": VLLM}[build]
    library = emulator.library(build).install(monkeypatch)
    for case in target.cases(per_row=2):
        target.passes(case, library)


def tables(*lengths: tuple[int, int]) -> dict[str, Any]:
    """Tables of sequences of (queries, keys), each of a page of its own."""
    queries, keys = zip(*lengths, strict=True)
    starts = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
    return {
        "page_table": torch.arange(len(lengths), dtype=torch.int32)[:, None],
        "seq_lens": torch.tensor(keys, dtype=torch.int32),
        "cu_seqlens_q": starts,
        "max_seqlen_q": max(queries),
        "max_seqlen_k": max(keys),
    }


def run(target: Emulated, *lengths: tuple[int, int], **fields: Any) -> Tensor:
    request = {**MLA, **fields}
    rows = torch.randn(len(lengths), 64, 576).bfloat16()
    cache = mla_pack_fp8(rows.float()) if request.get("kv_dtype") == "fp8_e4m3" else rows
    query = torch.randn(sum(q for q, _ in lengths), 64, 576).bfloat16()
    out: Tensor = target.bind(**request).forward(query, cache, **tables(*lengths))
    return out


def test_the_cache_is_read_where_it_lies(library: Library) -> None:
    cache, query = torch.randn(1, 64, 576).bfloat16(), torch.randn(2, 64, 576).bfloat16()
    asked = tables((2, 9))
    GIT.bind(**MLA).forward(query, cache, **asked)
    given = library.calls[-1].given
    assert library.calls[-1].positional == 0
    assert given["k_cache"].data_ptr() == cache.data_ptr()
    assert given["q"].data_ptr() == query.data_ptr(), "sequences of equally many queries are not copied"
    assert given["block_table"] is asked["page_table"]
    assert given["softmax_scale"] == pytest.approx(192**-0.5)


def test_shorter_sequences_keep_their_last_query_at_the_lower_right(library: Library) -> None:
    run(GIT, (1, 9), (3, 30))
    assert library.calls[-1].given["q"].shape == (2, 3, 64, 576)
    assert library.calls[-1].given["causal"]


def test_rows_of_bytes_are_named_one_by_one(library: Library) -> None:
    run(GIT, (2, 9), (2, 64), **ROWS_OF_BYTES)
    indices = library.calls[-1].given["indices"]
    assert indices.shape == (2, 2, 64)
    assert [[int((row >= 0).sum()) for row in sequence] for sequence in indices] == [[8, 9], [63, 64]]
    assert indices[1, 1].tolist() == list(range(64, 128))
    assert library.calls[-1].given["block_table"] is None


@pytest.mark.parametrize(("build", "legacy"), [("git", None), ("sgl", True), ("vllm", None)])
def test_kernels_of_a_build(build: emulator.Build, legacy: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    library = emulator.library(build).install(monkeypatch)
    run({"git": GIT, "sgl": SGL, "vllm": VLLM}[build], (1, 5))
    assert library.calls[-1].given.get("use_legacy") is legacy


def test_a_schedule_serves_one_step_of_all_layers(library: Library) -> None:
    bound = GIT.bind(**MLA)
    slot = Slot(torch.device("cpu"), 2, 2, 1, lambda name, size: torch.empty(size, dtype=torch.uint8))
    session = bound.session(slot)
    cache, query = torch.randn(2, 64, 576).bfloat16(), torch.randn(2, 64, 576).bfloat16()
    seen = []
    for length in (9, 12):
        session.plan(None)
        session.prepare(None)
        for _ in range(3):
            session.forward(query, cache, **tables((1, length), (1, 20)))
            seen.append(library.calls[-1].given["tile_scheduler_metadata"])
    assert [step is seen[0] for step in seen] == [True] * 3 + [False] * 3


def test_a_recording_has_a_schedule_of_its_own(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a warm-up holds for the lengths of the warm-up, and so would every replay."""
    recording: list[bool] = []
    monkeypatch.setattr("polyattn_cuda.flashmla.capturing", lambda kind: recording[-1])
    slot = Slot(torch.device("cpu"), 2, 2, 1, lambda name, size: torch.empty(size, dtype=torch.uint8), recorded=True)
    session = GIT.bind(**MLA).session(slot)
    cache, query, seen = torch.randn(2, 64, 576).bfloat16(), torch.randn(2, 64, 576).bfloat16(), []
    session.plan(None)
    session.prepare(None)
    for now in (False, False, True, True, False):
        recording.append(now)
        session.forward(query, cache, **tables((1, 9), (1, 20)))
        seen.append(library.calls[-1].given["tile_scheduler_metadata"])
    assert [a is b for a, b in itertools.pairwise(seen)] == [True, False, True, False]


@pytest.mark.parametrize("scale", [-0.1, 0.0])
def test_a_scale_that_is_not_positive_goes_into_the_queries(scale: float, library: Library) -> None:
    cache, query = torch.randn(1, 64, 576).bfloat16(), torch.randn(1, 64, 576).bfloat16()
    out = GIT.bind(**{**MLA, "scale": scale}).forward(query, cache, **tables((1, 20)))
    weights = torch.softmax(scale * (query[0].float() @ cache[0, :20].float().T), -1)
    assert torch.allclose(out[0].float(), weights @ cache[0, :20, :512].float(), atol=0.02)
    assert library.calls[-1].given["softmax_scale"] > 0


def test_an_older_build_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library = emulator.library().install(monkeypatch)

    def flash_mla_with_kvcache(q: Tensor, k_cache: Tensor, block_table: Tensor) -> None: ...

    library.add("flash_mla.flash_mla_interface", flash_mla_with_kvcache=flash_mla_with_kvcache)
    with pytest.raises(BackendUnavailableError, match=r"flash-mla 1\.0\.0\+9241ae3 takes no 'cache_seqlens'"):
        GIT.bind(**MLA)


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"page_size": 32}, "cuda:sm90", "page_size=32"),
    ({"window": (127, -1)}, "cuda:sm90", "window"),
    ({"softcap": 30.0}, "cuda:sm90", "softcap"),
    ({"head_dim": 192, "v_head_dim": 128}, "cuda:sm90", "dims"),
    ({"phase": "verify"}, "cuda:sm100", "kv_dtype"),
    ({}, "cuda:sm80", "arch='sm80'"),
]


@pytest.mark.parametrize(("changes", "platform", "reason"), REFUSALS)
def test_limits(changes: dict[str, Any], platform: str, reason: str) -> None:
    with pytest.raises(UnsupportedRequestError) as refused:
        what_if(AttentionRequest(**{**MLA, **changes}), platform=platform, installed=("flash-mla",), backend="flashmla")
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "lowerings"),
    [
        (ROWS_OF_BYTES, ()),
        ({**ROWS_OF_BYTES, "heads": 16}, ("dequantise_kv",)),
        ({**ROWS_OF_BYTES, "phase": "extend"}, ("dequantise_kv",)),
        ({**MLA, "phase": "verify", "spec_topk": 4, "tree": True}, ("tree_by_lse",)),
    ],
)
def test_what_its_rows_and_exact_rewrites_serve(changes: dict[str, Any], lowerings: tuple[str, ...]) -> None:
    request = AttentionRequest(**changes)
    assert what_if(request, platform="cuda:sm90", installed=("flash-mla",), backend="flashmla").lowerings == lowerings
