"""FlashInfer's wrappers over their emulator: conformance, what they are called with, and where they work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.errors import BackendUnavailableError, GraphError
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library
from polyattn_cuda.flashinfer import paged, ragged, workbench
from polyattn_cuda.flashinfer.scales import HostScale, scale_of
from polyattn_cuda.flashinfer.workbench import Lender, Workbench, float_bytes

from .emulators import flashinfer as emulator

PAGED = Emulated("flashinfer", "flashinfer-python", "cuda:sm90@12.8")
AMPERE = Emulated("flashinfer", "flashinfer-python", "cuda:sm80@12.4")
RAGGED = Emulated("flashinfer", "ragged", "cuda:sm90@12.8")
LATENT = Emulated("flashinfer_mla", "flashinfer-python", "cuda:sm90@12.8")
HALF = ("bfloat16", "float16")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return emulator.library().install(monkeypatch)


@pytest.mark.parametrize("case", PAGED.cases(per_row=5, dtypes=HALF[:1]), ids=str)
def test_paged(case: Case, library: Library) -> None:
    PAGED.passes(case, library)


@pytest.mark.parametrize("case", AMPERE.cases(per_row=3, dtypes=HALF[1:]), ids=str)
def test_paged_before_hopper(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with the oldest library that is served."""
    AMPERE.passes(case, emulator.library("0.6.18.post1").install(monkeypatch))


@pytest.mark.parametrize("case", RAGGED.cases(per_row=5, dtypes=HALF), ids=str)
def test_ragged(case: Case, library: Library) -> None:
    RAGGED.passes(case, library)


@pytest.mark.parametrize("case", LATENT.cases(per_row=8, dtypes=HALF), ids=str)
def test_latent(case: Case, library: Library) -> None:
    LATENT.passes(case, library)


# ---------------------------------------------------------------------------------------------------------------- calls

STEP: dict[str, Any] = {"family": "paged", "layout": "THD", "heads": 8, "kv_heads": 2, "head_dim": 64, "page_size": 16}
EXTEND: dict[str, Any] = {**STEP, "phase": "extend", "s_relation": "fewer", "causal": "bottom_right"}


def call(target: Emulated, tokens: int = 3, **fields: Any) -> Any:
    """A call over a sequence of 20 keys."""
    request = {**EXTEND, **fields}
    given = {name: request.pop(name) for name in ("attn_mask", "k_scale", "v_scale", "out") if name in request}
    cache = torch.randn(4, 16, 2, 64).bfloat16()
    cache = cache.to(torch.float8_e4m3fn) if request.get("kv_dtype") == "fp8_e4m3" else cache
    lens = {"page_table": torch.tensor([[2, 1]], dtype=torch.int32), "seq_lens": torch.tensor([20], dtype=torch.int32)}
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    query = torch.randn(tokens, 8, 64).bfloat16()
    return target.bind(**request).forward(
        query, cache, cache, **lens, cu_seqlens_q=starts, max_seqlen_q=tokens, max_seqlen_k=20, **given
    )


def given(library: Library, end: str) -> dict[str, Any]:
    return dict(next(c.given for c in reversed(library.calls) if c.name.endswith(end)))


def test_the_template_is_named(library: Library) -> None:
    """What the wrappers choose by themselves depends on the version."""
    call(PAGED)
    assert given(library, "__init__")["backend"] == "fa3"
    call(PAGED, mask="bool", attn_mask=torch.ones(1, 1, 3, 20, dtype=torch.bool))
    assert given(library, "__init__")["backend"] == "fa2"
    call(PAGED, kv_dtype="fp8_e4m3")
    plan = given(library, ".plan")
    assert (plan["q_data_type"], plan["kv_data_type"]) == (torch.bfloat16, torch.float8_e4m3fn)
    # Its paged kernels find V where K is, so that pages of two widths are not for it.
    latent = {**EXTEND, "head_dim": 192, "v_head_dim": 128}
    assert paged.template(PAGED.request(**latent)) == "fa2"
    assert paged.template(PAGED.request(**{**latent, "family": "varlen"})) == "fa3"
    assert paged.template(AMPERE.request(**EXTEND)) == "fa2"
    assert paged.template(Emulated("flashinfer", "ragged", "cuda:sm90@12.1").request(**EXTEND)) == "fa2"
    assert not [c for c in library.calls if c.positional], "everything is given by name"


@pytest.mark.parametrize("tokens", [3, 1])
def test_caches_of_unlike_strides_go_to_kernels_that_read_them(tokens: int, library: Library) -> None:
    """fa3, and decode without tensor cores, read V by the strides of K: the emulator refuses others as they do."""
    one = {"phase": "decode", "s_relation": "one", "causal": "none"} if tokens == 1 else {}
    key, value = torch.randn(4, 16, 8, 64).bfloat16(), torch.randn(4, 16, 8, 80).bfloat16()[..., :64]
    tables: dict[str, Any] = {"page_table": torch.tensor([[2, 1]], dtype=torch.int32), "max_seqlen_k": 20}
    tables |= {"seq_lens": torch.tensor([20], dtype=torch.int32), "max_seqlen_q": tokens}
    tables |= {"cu_seqlens_q": torch.tensor([0, tokens], dtype=torch.int32)}
    query, bound = torch.randn(tokens, 8, 64).bfloat16(), PAGED.bind(**{**EXTEND, **one, "kv_heads": 8})
    wanted = bound.forward(query, key, value.contiguous(), **tables)
    assert torch.equal(bound.forward(query, key, value, **tables), wanted)


def test_a_scale_of_zero_or_less_goes_into_the_queries(library: Library) -> None:
    for scale, wanted in ((-0.2, (0.2, -1.0)), (0.0, (1.0, 0.0)), (0.3, (0.3, None))):
        assert scale_of(PAGED.request(**EXTEND, scale=scale)) == wanted
        assert call(PAGED, scale=scale).isfinite().all()


def test_a_mask_for_each_head_is_a_call_for_each(library: Library) -> None:
    mask = torch.rand(1, 8, 3, 20) < 0.5
    call(PAGED, mask="bool", attn_mask=mask)
    planned = [c.given for c in library.calls if c.name.endswith(".plan")]
    assert [(p["num_qo_heads"], p["num_kv_heads"]) for p in planned] == [(1, 1)] * 8
    assert not any(p["causal"] for p in planned)
    seen = torch.ones(3, 20, dtype=torch.bool).tril(17)
    for head, plan in enumerate(planned):
        assert torch.equal(plan["custom_mask"].view(3, 20), mask[0, head] & seen)


def test_splits_depend_on_nothing_else_where_that_is_asked(library: Library) -> None:
    one = {"phase": "decode", "s_relation": "one", "causal": "none", "kv_heads": 2}
    call(PAGED, 1, **one)
    assert "disable_split_kv" not in given(library, "_plan_impl")
    call(PAGED, 1, **one, batch_invariant=True)
    assert given(library, "_plan_impl")["disable_split_kv"] is True


@pytest.mark.parametrize("counts", [(1, 0, 1), (0, 1, 1), (1, 1, 0)], ids=str)
@pytest.mark.parametrize("lse", [False, True])
def test_a_sequence_without_a_query_changes_no_other(counts: tuple[int, ...], lse: bool, library: Library) -> None:
    """The decode wrapper serves the others as it serves them alone."""
    one = {"phase": "decode", "s_relation": "one", "batch_invariant": True, "lse": lse}
    bound = PAGED.bind(**STEP, **one)
    caches = [torch.randn(9, 16, 2, 64).bfloat16() for _ in range(2)]
    table, lens = torch.randperm(9, dtype=torch.int32).view(3, 3), torch.tensor([20, 0, 40], dtype=torch.int32)
    starts = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
    query = torch.randn(2, 8, 64).bfloat16()
    most = {"max_seqlen_q": 1, "max_seqlen_k": 40}
    found = bound.forward(query, *caches, page_table=table, seq_lens=lens, cu_seqlens_q=starts, **most)
    assert given(library, "_plan_impl")["disable_split_kv"] is True
    assert not [c for c in library.calls if "Prefill" in c.name]
    row = torch.tensor([0, 1], dtype=torch.int32)
    for i, n in enumerate(n for n, count in enumerate(counts) if count):
        own = {"page_table": table[n : n + 1], "seq_lens": lens[n : n + 1], "cu_seqlens_q": row, **most}
        alone = bound.forward(query[i : i + 1], *caches, **own)
        for whole, part in zip(found if lse else (found,), alone if lse else (alone,), strict=True):
            assert torch.equal(whole[i : i + 1], part)


def test_kernels_write_where_they_can(library: Library) -> None:
    out = torch.empty(3, 8, 64).bfloat16()
    assert call(PAGED, out=out) is out
    assert given(library, ".run")["out"] is out
    off = torch.empty(3 * 8 * 64 + 1).bfloat16()[1:].view(3, 8, 64)
    assert call(PAGED, out=off) is off
    assert given(library, ".run")["out"] is None, "they write 16 bytes at a time"
    strided = torch.empty(3, 8, 70).bfloat16()[..., :64]
    assert call(PAGED, out=strided) is strided
    assert given(library, ".run")["out"] is None


def test_a_dense_call_is_planned_once_for_its_lengths(library: Library) -> None:
    bound = RAGGED.bind(family="dense", heads=4, kv_heads=2, head_dim=64, causal="bottom_right")
    q, k = torch.randn(2, 9, 4, 64).bfloat16(), torch.randn(2, 9, 2, 64).bfloat16()
    for _ in range(3):
        bound.forward(q, k, k)
    assert sum(c.name.endswith(".plan") for c in library.calls) == 1
    bound.forward(q[:, :5], k, k)
    bound.forward(q, k, k)
    assert sum(c.name.endswith(".plan") for c in library.calls) == 3


def test_what_is_not_served_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.library("0.6.18.post1").install(monkeypatch)
    latent = {"family": "mla", "heads": 16, "head_dim": 576, "v_head_dim": 512, "scale": 0.07, "page_size": 1}
    with pytest.raises(
        BackendUnavailableError, match=r"flashinfer-python 0\.6\.18\.post1 has no usable flashinfer\.mla"
    ):
        LATENT.bind(**latent)


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_a_call_by_itself_is_not_recorded(capturing: None) -> None:
    with pytest.raises(GraphError, match="plans on the host"), Lender().lend(GPU):
        pass


def test_a_scale_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[float] = []
    monkeypatch.setattr(Tensor, "__float__", lambda t: reads.append(1.0) or t.item())  # type: ignore[func-returns-value]
    host, scale = HostScale(), torch.tensor(0.5)
    assert [host(scale), host(scale), host(None)] == [0.5, 0.5, None]
    assert len(reads) == 1
    scale.fill_(0.25)
    assert host(scale) == 0.25


def test_a_scale_that_is_not_known_is_not_read_while_recording(capturing: None) -> None:
    class OnGPU(Tensor):
        is_cuda = True

    with pytest.raises(GraphError, match="run the step once before it is recorded"):
        HostScale()(torch.tensor(0.5).as_subclass(OnGPU))


@pytest.fixture
def lender(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lender]:
    fresh = Lender()
    monkeypatch.setattr(paged, "LENDER", fresh)
    monkeypatch.setattr(ragged, "LENDER", fresh)
    return fresh


def test_a_workbench_has_one_user_at_a_time(lender: Lender) -> None:
    with lender.lend(CPU) as first:
        with lender.lend(CPU) as second:
            assert first is not second
            assert first.workspace(64).data_ptr() != second.workspace(64).data_ptr()
        with lender.lend(CPU) as third:
            assert third is second
    assert not first.workspace(64).any(), "new memory is zero"


def test_threads_do_not_share_plans(lender: Lender, library: Library) -> None:
    """The emulator spoils a plan over whose workspace another was made before it was run."""
    meeting, failed = threading.Barrier(2, timeout=20), []
    prefill = library.modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper
    plan = prefill.plan

    def slowly(self: Any, **a: Any) -> None:
        plan(self, **a)
        meeting.wait()

    def work() -> None:
        try:
            for _ in range(3):
                assert call(PAGED).isfinite().all()
        except BaseException as exc:
            failed.append(exc)
            raise

    slowly.__signature__ = plan.__signature__  # type: ignore[attr-defined]
    prefill.plan = slowly
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    memory = {c.given["float_workspace_buffer"].data_ptr() for c in library.calls if c.name.endswith("__init__")}
    assert len(memory) == 2


def test_streams_do_not_share_memory(lender: Lender, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of two streams run at once: alternating between them, and between libraries, each keeps its own."""
    current = [7]
    monkeypatch.setattr(workbench, "_stream", lambda device: current[0])
    dense = RAGGED.bind(family="dense", heads=4, kv_heads=2, head_dim=64)
    q = torch.randn(1, 9, 4, 64).bfloat16()
    benches: dict[int, set[int]] = {}
    for stream in (7, 8, 7, 8):
        current[0] = stream
        assert call(PAGED).isfinite().all()
        assert dense.forward(q, q[:, :, :2], q[:, :, :2]).isfinite().all()
        with lender.lend(CPU) as bench:
            benches.setdefault(stream, set()).add(id(bench))
    assert [len(found) for found in benches.values()] == [1, 1]
    assert benches[7].isdisjoint(benches[8])


def test_memory_that_grows_makes_new_wrappers() -> None:
    bench, made = Workbench(CPU), []
    for nbytes in (1 << 10, 1 << 10, (128 << 20) + 16):
        bench.wrapper("kind", lambda workspace: made.append(workspace.numel()) or object(), nbytes)
    assert made == [128 << 20, (128 << 20) + 16]


def test_a_plan_waits_until_the_last_one_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are copied from pinned memory, which the next plan writes over."""
    said: list[str] = []

    class Event:
        def record(self, stream: Any) -> None:
            said.append(f"record on {stream}")

        def synchronize(self) -> None:
            said.append("wait")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    bench = Workbench(GPU)
    for _ in range(2):
        with bench.planning(object()):
            said.append("plan")
    assert said == ["plan", "record on stream", "wait", "plan", "record on stream"]


def test_a_plan_that_fails_is_no_plan() -> None:
    bench, wrapper, other = Workbench(CPU), object(), object()
    with bench.planning(wrapper, "first"):
        pass
    assert bench.holds("first")
    assert bench.planned(wrapper)
    with pytest.raises(ValueError, match="no kernel"), bench.planning(other, "second"):
        raise ValueError("no kernel")
    assert not bench.holds("first")
    assert not bench.planned(other), "the next plan is its first"


def tile_of(packed: int) -> int:
    return 128 if packed > 64 else 64 if packed > 16 else 16


def partial_tiles(lengths: tuple[int, ...], keys: int, group: int, most: int) -> tuple[int, int]:
    """(tiles, rows of one) of an eager step whose keys are split, (0, 0) of one whose are not: `PrefillSplitQOKVIndptr`
    and `PrefillBinarySearchKVChunkSize` of FlashInfer's scheduler.cuh, for pages of one token."""
    tile = tile_of(sum(lengths) * group // len(lengths))
    tiles = [-(-length * group // tile) for length in lengths]
    low, high = 128, keys
    while low < high:
        mid = (low + high) // 2
        low, high = (mid + 1, high) if sum(tiles) * -(-keys // mid) > most else (low, mid)
    return (sum(tiles) * -(-keys // low), tile) if low < keys else (0, 0)


@pytest.mark.parametrize("lengths", [(1,), (1,) * 40, (1, 300, 7), (16,) * 9, (2048,), (1,) * 300], ids=str)
@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (64, 1)], ids=str)
def test_the_workspace_is_never_too_small(
    lengths: tuple[int, ...], heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what FlashInfer's planner takes for partial results of as many keys as one likes."""
    monkeypatch.setattr(workbench, "processors", lambda device: 132)
    request = PAGED.request(**{**EXTEND, "heads": heads[0], "kv_heads": heads[1]})
    group, tokens, sequences = heads[0] // heads[1], sum(lengths), len(lengths)
    row = 4 * heads[0] * (64 + 1)
    eager = float_bytes(request, GPU, sequences, tokens)
    for keys in (200, 4096, 100_000):
        tiles, rows = partial_tiles(lengths, keys, group, 2 * 132 // heads[1])
        assert tiles * rows * row <= eager
    tile = tile_of((tokens - sequences + 1) * group)
    tiles = max(2 * 132 // heads[1], -(-tokens * group // tile) + sequences - 1)
    assert tiles * tile * row <= float_bytes(request, GPU, sequences, tokens, recorded=True)
    assert eager < 600 << 20, "however long the step is"
