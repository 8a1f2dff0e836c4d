"""FlashMLA: conformance over an emulator of it, and what its three builds are really given."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn import what_if
from polyattn.contract import AttentionRequest, Slot
from polyattn.errors import BackendUnavailableError, UnsupportedRequestError
from polyattn.semantics.kv_quant import mla_pack_fp8
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library
from polyattn.testing.families.cached import in_tables
from polyattn_cuda import flashmla

from .emulators import flash_mla as emulator
from .sessions import InSession

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


@pytest.mark.slow(keep=35)
@pytest.mark.parametrize("case", GIT.cases(per_row=10), ids=str)
def test_conformance(case: Case, library: Library) -> None:
    GIT.passes(case, library)


@pytest.mark.parametrize("case", BLACKWELL.cases(per_row=3), ids=str)
def test_conformance_on_blackwell(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    BLACKWELL.passes(case, emulator.library(hopper=False).install(monkeypatch))


@pytest.mark.slow(keep=1)
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


def step_of(*lengths: tuple[int, int]) -> Any:
    """What a plan may ask about a step of such sequences."""
    return SimpleNamespace(listed={"query_lens": [queries for queries, _ in lengths]}.__getitem__)


def run(target: Emulated, *lengths: tuple[int, int], **fields: Any) -> Any:
    request = {**MLA, **fields}
    torch.manual_seed(0)
    rows = torch.randn(len(lengths), 64, 576).bfloat16()
    cache = mla_pack_fp8(rows.float()) if request.get("kv_dtype") == "fp8_e4m3" else rows
    query = torch.randn(sum(q for q, _ in lengths), 64, 576).bfloat16()
    return target.bind(**request).forward(query, cache, **in_tables(**tables(*lengths)))


def test_the_cache_is_read_where_it_lies(library: Library) -> None:
    cache, query = torch.randn(1, 64, 576).bfloat16(), torch.randn(2, 64, 576).bfloat16()
    asked = tables((2, 9))
    GIT.bind(**MLA).forward(query, cache, **in_tables(**asked))
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
        session.plan(step_of((1, length), (1, 20)))
        session.prepare(None)
        for _ in range(3):
            session.forward(query, cache, **in_tables(**tables((1, length), (1, 20))))
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
        session.forward(query, cache, **in_tables(**tables((1, 9), (1, 20))))
        seen.append(library.calls[-1].given["tile_scheduler_metadata"])
    assert [a is b for a, b in itertools.pairwise(seen)] == [True, False, True, False]


@pytest.mark.parametrize("scale", [-0.1, 0.0])
def test_a_scale_that_is_not_positive_goes_into_the_queries(scale: float, library: Library) -> None:
    cache, query = torch.randn(1, 64, 576).bfloat16(), torch.randn(1, 64, 576).bfloat16()
    out = GIT.bind(**{**MLA, "scale": scale}).forward(query, cache, **in_tables(**tables((1, 20))))
    weights = torch.softmax(scale * (query[0].float() @ cache[0, :20].float().T), -1)
    assert torch.allclose(out[0].float(), weights @ cache[0, :20, :512].float(), atol=0.02)
    assert library.calls[-1].given["softmax_scale"] > 0


def test_an_older_build_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library = emulator.library().install(monkeypatch)

    def flash_mla_with_kvcache(q: Tensor, k_cache: Tensor, block_table: Tensor) -> None: ...

    library.add("flash_mla.flash_mla_interface", flash_mla_with_kvcache=flash_mla_with_kvcache)
    with pytest.raises(BackendUnavailableError, match=r"flash-mla 1\.0\.0\+9241ae3 takes no 'cache_seqlens'"):
        GIT.bind(**MLA)


# ---------------------------------------------------------------------------------------------- several calls of a step

SIXTEEN_BIT = ("bfloat16",)
STEPS = InSession("flashmla", "flash-mla", "cuda:sm90@12.8")
CUT = [*GIT.cases(per_row=4, dtypes=SIXTEEN_BIT)]
CUT_STEPS = [*STEPS.cases(per_row=2, dtypes=SIXTEEN_BIT), *STEPS.recorded()]


def limit(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    """What the kernel takes, here and in the emulator."""
    if "_SEQUENCES" in limits:
        monkeypatch.setattr(emulator, "SHARED", 4 * (5 * limits["_SEQUENCES"] + 1))
    if "_ROWS" in limits:
        monkeypatch.setattr(emulator, "GRID", limits["_ROWS"])
    if "_NUMBERS" in limits:
        monkeypatch.setattr(emulator, "OFFSETS", limits["_NUMBERS"])
    for name, number in limits.items():
        monkeypatch.setattr(flashmla, name, number)


def sizes(library: Library) -> list[tuple[int, int]]:
    """(sequences, queries of each) of the kernel's calls."""
    return [tuple(call.given["q"].shape[:2]) for call in library.calls if "q" in call.given]


@pytest.mark.parametrize("case", CUT, ids=str)
def test_conformance_of_small_calls(case: Case, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence is cut, no call has more than two, and hardly a row is filled up."""
    limit(monkeypatch, _SEQUENCES=2, _ROWS=3, _SPARE=0)
    GIT.passes(case, library)


@pytest.mark.parametrize("case", CUT_STEPS, ids=str)
def test_steps_of_small_calls(case: Case, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, _SEQUENCES=2, _ROWS=3, _SPARE=0)
    STEPS.passes(case, library)


def test_limits_are_those_of_the_kernel(library: Library) -> None:
    ints = emulator.SHARED // 4
    assert 5 * flashmla._SEQUENCES + 1 <= ints < 5 * (flashmla._SEQUENCES + 1) + 1
    assert flashmla._ROWS == emulator.GRID
    # Accumulators are as large as the outputs of so many sequences, and of one more for each part but the first.
    limits = flashmla._Limits(128 * 512)
    for queries in (1, 8, 2048, 30_000):
        parts = max(132 // -(-queries * 128 // 64), 1)
        assert (limits.sequences(queries) + parts - 1) * queries * 128 * 512 <= emulator.OFFSETS


@pytest.mark.parametrize("fields", [{}, ROWS_OF_BYTES], ids=["dense", "rows of bytes"])
def test_more_sequences_than_a_schedule_has_room_for(
    fields: dict[str, Any], library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one call they would end the process."""
    asked = ((2, 9), (2, 30), (2, 64), (2, 2), (2, 7))
    whole = run(GIT, *asked, **fields, lse=True)
    limit(monkeypatch, _SEQUENCES=2)
    parts = run(GIT, *asked, **fields, lse=True)
    assert sizes(library) == [(5, 2), (2, 2), (2, 2), (1, 2)]
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("fields", [{}, {"causal": "none"}], ids=["causal", "full"])
def test_a_prompt_beside_decodes_is_a_call_of_its_own(
    fields: dict[str, Any], library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filled up they would be 160 rows, of 43 that are queries."""
    asked = ((1, 9), (20, 30), (1, 64), (0, 5), (1, 2), (1, 7), (18, 40), (1, 1))
    whole = run(GIT, *asked, **fields, lse=True)
    assert sizes(library) == [(8, 20)], "160 rows are not worth a second call"
    limit(monkeypatch, _SPARE=0)
    parts = run(GIT, *asked, **fields, lse=True)
    assert sizes(library)[1:] == [(5, 1), (2, 20)]
    assert all(torch.allclose(a, b, atol=2e-3) for a, b in zip(whole, parts, strict=True))


def test_what_is_filled_up_is_bounded(library: Library) -> None:
    """A prompt of 700 tokens among 15 decodes: 16 times 700 rows otherwise."""
    run(GIT, *[(1, 9)] * 8, (700, 64), *[(1, 30)] * 7)
    assert sizes(library) == [(15, 1), (1, 700)]


def test_offsets_of_outputs_stay_below_their_type(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ((4, 9), (4, 30), (4, 64))
    whole = run(GIT, *asked)
    limit(monkeypatch, _NUMBERS=2 * 4 * 64 * 512)
    assert torch.equal(run(GIT, *asked), whole)
    assert sizes(library)[1:] == [(2, 4), (1, 4)]
    limit(monkeypatch, _NUMBERS=3 * 64 * 512)
    torch.testing.assert_close(run(GIT, *asked), whole)
    assert max(n * count for n, count in sizes(library)[3:]) == 3


def test_offsets_of_places_stay_below_their_type(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of 700 pages for each query are longer than its output."""
    keys = 64 * 700
    caches = mla_pack_fp8(torch.randn(2, 64, 576))
    asked = {**tables((2, 9), (2, 64)), "max_seqlen_k": keys}
    asked["page_table"] = torch.nn.functional.pad(asked["page_table"], (0, 699))
    query, bound = torch.randn(4, 64, 576).bfloat16(), GIT.bind(**ROWS_OF_BYTES)
    whole = bound.forward(query, caches, **in_tables(**asked))
    limit(monkeypatch, _NUMBERS=3 * keys)
    assert torch.equal(bound.forward(query, caches, **in_tables(**asked)), whole)
    assert sizes(library) == [(2, 2), (1, 2), (1, 2)]


def test_a_sequence_of_more_queries_than_a_grid_has_blocks(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last query of a piece sees nothing of what comes behind it."""
    asked = ((5, 9), (7, 64))
    whole = run(GIT, *asked, lse=True)
    limit(monkeypatch, _ROWS=3)
    parts = run(GIT, *asked, lse=True)
    assert max(count for _, count in sizes(library)[1:]) == 3
    assert all(torch.allclose(a, b, atol=2e-3) for a, b in zip(whole, parts, strict=True))


def test_a_step_in_several_calls_is_taken_apart_once(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the host's numbers, which the device is not asked for."""
    limit(monkeypatch, _SPARE=0)
    bound, lengths = GIT.bind(**MLA), ((1, 9), (20, 30), (1, 64))
    slot = Slot(torch.device("cpu"), 3, 22, 1, lambda name, size: torch.empty(size, dtype=torch.uint8))
    session, cache, query = bound.session(slot), torch.randn(3, 64, 576).bfloat16(), torch.randn(22, 64, 576).bfloat16()
    session.plan(step_of(*lengths))
    session.prepare(None)
    monkeypatch.setattr(Tensor, "diff", None, raising=False)
    for _ in range(2):
        session.forward(query, cache, **in_tables(**tables(*lengths)))
    schedules = [call.given["tile_scheduler_metadata"] for call in library.calls if "q" in call.given]
    assert sizes(library) == [(2, 1), (1, 20)] * 2
    assert schedules[:2] == schedules[2:]
    assert schedules[0] is not schedules[1]


def test_a_recording_never_asks_for_lengths(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, _SPARE=0)
    monkeypatch.setattr(flashmla, "capturing", lambda kind: True)
    run(GIT, (1, 9), (20, 30), (1, 64))
    assert sizes(library) == [(3, 20)], "shapes of a recording do not depend on lengths"
    limit(monkeypatch, _SEQUENCES=2)
    run(GIT, (3, 9), (3, 30), (3, 64))
    assert sizes(library)[1:] == [(2, 3), (1, 3)], "equal numbers are known"
    with pytest.raises(UnsupportedRequestError, match=r"3 sequences of up to 20 queries: its kernel takes up to 65376"):
        run(GIT, (1, 9), (20, 30), (1, 64))
    limit(monkeypatch, _ROWS=2)
    with pytest.raises(UnsupportedRequestError, match=r"2 queries of a sequence, and 2 sequences of so many"):
        run(GIT, (3, 9))


# ---------------------------------------------------------------------------------------------------------------- rows

REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"page_size": 32}, "cuda:sm90", "page_size=32"),
    ({"window": (127, -1)}, "cuda:sm90", "window"),
    ({"softcap": 30.0}, "cuda:sm90", "softcap"),
    ({"head_dim": 192, "v_head_dim": 128}, "cuda:sm90", "dims"),
    ({"phase": "verify"}, "cuda:sm100", "kv_dtype"),
    ({"phase": "verify", "spec_topk": 4, "tree": True}, "cuda:sm90", "flashmla cannot verify: every phase of a server"),
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
    ],
)
def test_what_its_rows_and_exact_rewrites_serve(changes: dict[str, Any], lowerings: tuple[str, ...]) -> None:
    request = AttentionRequest(**changes)
    assert what_if(request, platform="cuda:sm90", installed=("flash-mla",), backend="flashmla").lowerings == lowerings
