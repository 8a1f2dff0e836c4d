"""cuDNN on paged caches: conformance over an emulator of FlashInfer's two functions, and what they are really given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn import what_if
from polyattn.contract import AttentionRequest
from polyattn.errors import BackendUnavailableError, UnsupportedRequestError
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library
from polyattn.testing.families.cached import in_tables

from .emulators import flashinfer_cudnn as emulator
from .emulators.gpus import Gpus

FINITE = {"options": (("free_slots", "finite"),)}
TARGET = Emulated("flashinfer_cudnn", "flashinfer-python", "cuda:sm90@12.8")
STEP: dict[str, Any] = {
    "family": "paged",
    "layout": "THD",
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 64,
    "page_size": 16,
    "phase": "extend",
    "s_relation": "fewer",
    "causal": "bottom_right",
}
ONE = {**STEP, "phase": "decode", "s_relation": "one", "causal": "none"}
BOTH = ("flashinfer-python==0.7.2", "nvidia-cudnn-frontend==1.32.0")
DECODE, PREFILL = (f"cudnn_batch_{name}_with_kv_cache" for name in ("decode", "prefill"))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return emulator.library().install(monkeypatch)


@pytest.mark.slow(keep=61)
@pytest.mark.parametrize("case", TARGET.cases(per_row=16), ids=str)
def test_conformance(case: Case, library: Library) -> None:
    TARGET.passes(case, library)


def run(counts: tuple[int, ...], blank: float = 0.0, caches: Tensor | None = None, **fields: Any) -> Any:
    """So many queries of sequences of 20 keys in two pages; free slots and the rest of the tables hold anything."""
    torch.manual_seed(0)
    random = torch.randn(2, 2 * len(counts), 16, 2, 64).bfloat16()
    caches = random if caches is None else caches
    caches[:, 1::2, 4:] = blank
    table = torch.arange(2 * len(counts), dtype=torch.int32).view(-1, 2)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    return TARGET.bind(**fields).forward(
        torch.randn(sum(counts), 8, 64).bfloat16(),
        *caches,
        **in_tables(
            page_table=torch.nn.functional.pad(table, (0, 3), value=-1),
            seq_lens=torch.full((len(counts),), 20, dtype=torch.int32),
            cu_seqlens_q=starts,
            max_seqlen_q=max(counts),
            max_seqlen_k=20,
        ),
    )


@pytest.mark.parametrize(("arch", "fields"), [("sm90", STEP), ("sm100", STEP), ("sm100", ONE)])
def test_pages_are_read_where_they_lie_if_free_slots_are_numbers(
    arch: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = emulator.library(arch).install(monkeypatch)
    counts = (1, 1) if fields is ONE else (3, 2)
    for blank in (0.0, torch.nan):
        found = run(counts, blank, **fields, arch=arch)
        assert library.calls[-1].given["k_cache"].is_contiguous() is False, "[pages, H, size, D], a view"
        assert torch.equal(found, run(counts, **fields, **FINITE, arch=arch))
    assert run(counts, torch.nan, **fields, **FINITE, arch=arch).isnan().any(), "what was promised was not true"


def test_on_hopper_a_decode_step_copies_no_pages(library: Library) -> None:
    caches = torch.randn(2, 4, 16, 2, 64).bfloat16()
    run((1, 1), torch.nan, **ONE, caches=caches)
    assert library.calls[-1].given["k_cache"].data_ptr() == caches[0].data_ptr()
    run((3, 2), torch.nan, **STEP, caches=caches)
    assert library.calls[-1].given["k_cache"].data_ptr() != caches[0].data_ptr()


def test_the_same_bits_each_time_come_from_the_other_graph(library: Library) -> None:
    for fields in (ONE, STEP):
        found = [run((1, 1), **fields, lse=True, deterministic=True) for _ in range(2)]
        assert library.calls[-1].name.endswith(PREFILL)
        assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))
        found = [run((1, 1), **fields, lse=True) for _ in range(2)]
        assert library.calls[-1].name.endswith(DECODE)
        assert not torch.equal(found[0][1], found[1][1])


def test_a_graph_serves_until_a_sequence_outgrows_its_room(library: Library) -> None:
    run((1, 1), **ONE, **FINITE)
    given = library.calls[-1].given
    assert given["block_tables"].shape == (2, 128)
    assert given["max_sequence_kv"] == 2048
    assert given["k_cache"].shape == (4, 2, 16, 64)
    for most in (3, 4):
        run((most, 2), **STEP, **FINITE)
        assert library.calls[-1].given["max_token_per_sequence"] == 4


def test_a_step_of_one_query_each_is_decoded(library: Library) -> None:
    """Also a step of another phase, and one in which some sequence has no query."""
    for counts, fields in (((1, 1), ONE), ((1, 1), STEP), ((1, 0, 1), ONE)):
        found, lse = run(counts, **fields, lse=True)
        call = library.calls[-1]
        assert call.name.endswith(DECODE)
        assert call.given["block_tables"].shape[0] == 2
        assert (found.shape, lse.shape) == ((2, 8, 64), (2, 8))
    out, lse = run((2, 1), **STEP, lse=True)
    call = library.calls[-1]
    assert call.name.endswith(PREFILL)
    assert call.given["lse_base"] == "ln"
    assert (out.shape, lse.shape) == ((3, 8, 64), (3, 8))


def test_the_lse_is_asked_for_only_where_it_is_wanted(library: Library) -> None:
    for counts, fields in (((1, 1), ONE), ((3, 2), STEP)):
        assert isinstance(run(counts, **fields), Tensor)
        assert library.calls[-1].given["return_lse"] is False


def test_the_device_of_the_tensors_is_current(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch)
    for counts, fields in (((1, 1), ONE), ((3, 2), STEP)):
        run(counts, **fields)
    assert [call.name.rpartition(".")[2] for call in library.calls] == [DECODE, PREFILL]
    assert gpus.current == 0


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({**STEP, "window": (7, -1)}, "cuda:sm90", "window"),
    ({**ONE, "head_dim": 256}, "cuda:sm90", "head_dim=256"),
    ({**ONE, "page_size": 8}, "cuda:sm90", "page_size=8"),
    ({**ONE, "window": (7, -1), "deterministic": True}, "cuda:sm90", "deterministic=True is not declared"),
    ({**ONE, "softcap": 20.0}, "cuda:sm90", "softcap"),
    ({**STEP, "spec_topk": 4, "phase": "verify"}, "cuda:sm90", "spec_topk=4"),
    (ONE, "cuda:sm75", "arch='sm75'"),
]


@pytest.mark.parametrize(("fields", "platform", "reason"), REFUSALS)
def test_limits(fields: dict[str, Any], platform: str, reason: str) -> None:
    with pytest.raises(UnsupportedRequestError) as refused:
        what_if(AttentionRequest(**fields), platform=platform, installed=BOTH, backend="flashinfer_cudnn")
    assert reason in str(refused.value)


def test_it_needs_the_front_end_too() -> None:
    """Without it FlashInfer would run kernels that take bfloat16 for everything."""
    asked: dict[str, Any] = {"platform": "cuda:sm90", "backend": "flashinfer_cudnn"}
    with pytest.raises(BackendUnavailableError, match="pip install nvidia-cudnn-frontend"):
        what_if(AttentionRequest(**ONE), installed=("flashinfer-python==0.7.2",), **asked)
    assert what_if(AttentionRequest(**ONE), installed=BOTH, **asked).backend == "flashinfer_cudnn"


def test_it_is_taken_by_name_only() -> None:
    assert what_if(AttentionRequest(**ONE), platform="cuda:sm90", installed=BOTH).backend != "flashinfer_cudnn"


def test_an_older_signature_is_named(library: Library) -> None:
    def older(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None: ...

    library.add(emulator.MODULE, **{PREFILL: older})
    with pytest.raises(BackendUnavailableError, match=r"takes no 'batch_offsets_units', which lengths in tokens needs"):
        TARGET.bind(**STEP)
