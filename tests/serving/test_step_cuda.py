"""Steps on a CUDA device: no sync, one staging copy that is not overtaken, and `prepare` in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from polyattn.serving.kv_cache.pages import PageAllocator
from polyattn.serving.step.batch import ForwardBatch, ForwardMode
from polyattn.serving.step.requests import RequestTable
from polyattn.serving.step.step import Step, StepBuffers
from polyattn.serving.step.tree import DraftTree

from .syncs import no_sync

LENS = [300, 200, 600]


@pytest.fixture(autouse=True)
def gpu(device):
    device("cuda", what="steps on a device")


def table_on(device: str) -> tuple[RequestTable, list[int]]:
    table = RequestTable(8, 1024, 16, (-1, 99), [PageAllocator(512) for _ in range(2)], device)
    rows = [table.add() for _ in LENS]
    for row, keys in zip(rows, LENS, strict=True):
        table.extend(row, keys)
    table.flush()
    return table, rows


def every_view(step: Step) -> list[torch.Tensor]:
    found = []
    for view in (step, step.windowed(99), step.at(4), step.windowed(99).at(1)):
        found += [view.seq_lens, view.cu_seqlens_q, view.slots, view.positions, view.cu_seqlens_k, view.kv_indptr]
        found += [view.last_page_len, view.page_table, view.kv_indices]
        found += [] if view.attn_mask is None else [view.attn_mask]
    return found


def decode(*lens: int, padding: int = 0) -> ForwardBatch:
    return ForwardBatch(ForwardMode.DECODE, range(len(lens)), lens, [1] * len(lens), padding=padding)


def verify(device: str, *lens: int) -> ForwardBatch:
    tree = DraftTree.from_parents([[-1, 0, 0, 1]] * len(lens), device=device)
    return ForwardBatch(ForwardMode.TARGET_VERIFY, range(len(lens)), lens, [4] * len(lens), tree=tree)


def same(device: list[torch.Tensor], host: list[torch.Tensor]) -> None:
    for found, want in zip(device, host, strict=True):
        assert torch.equal(found.cpu(), want)


@pytest.mark.parametrize("static", [False, True])
def test_steps_are_those_of_the_cpu_without_a_sync(static):
    found = []
    for where in ("cuda", "cpu"):
        table, _ = table_on(where)
        mixed = ForwardBatch(ForwardMode.MIXED, [2, 0, 1], [600, 90, 200], [1, 90, 1])
        batches = (mixed, verify(where, 300, 150, 600), decode(298, 100, 520, padding=2))
        tensors = []
        with no_sync():
            buffers = StepBuffers(8, 1024, 64, 2, where, static=static)
            for batch in batches:
                for step in buffers.build(batch, table):
                    tensors += [t.clone() for t in every_view(step)]
            for _ in range(2):
                for step in buffers.advance():
                    tensors += [t.clone() for t in every_view(step)]
        found.append(tensors)
    same(*found)


def test_a_sync_would_be_seen():
    with no_sync(), pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones(1, device="cuda").item()


def test_a_step_that_waits_on_the_device_keeps_its_numbers():
    """The host runs ahead of a busy device and writes the lists of the next steps."""
    table, rows = table_on("cuda")
    buffers = StepBuffers(8, 1024, 64, 2, "cuda")
    kept = []
    for i in range(6):
        torch.cuda._sleep(20_000_000)
        lens = [10 * i + n + 1 for n in range(3)]
        (step, _) = buffers.build(ForwardBatch(ForwardMode.DECODE, rows, lens, [1] * 3), table)
        kept.append((lens, step.seq_lens.clone()))
    for lens, tensor in kept:
        assert tensor.tolist() == lens


@pytest.mark.parametrize("kind", ["decode", "verify"])
def test_prepare_is_recorded_once_and_replayed_for_other_rows(kind):
    def batch(where: str, *lens: int) -> ForwardBatch:
        return verify(where, *lens) if kind == "verify" else decode(*lens)

    table, _ = table_on("cuda")
    buffers = StepBuffers(8, 1024, 64, 2, "cuda", static=True)

    def record() -> list[torch.Tensor]:
        buffers.prepare()
        return [tensor for step in buffers.steps for tensor in every_view(step)]

    buffers.stage(batch("cuda", 20, 30, 40), table)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        record()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensors = record()
    for lens in ((300, 150, 555), (299, 151, 556), (17, 200, 4)):
        buffers.stage(batch("cuda", *lens), table)
        graph.replay()
        cpu = StepBuffers(8, 1024, 64, 2, static=True)
        steps = cpu.build(batch("cpu", *lens), table_on("cpu")[0])
        same(tensors, [tensor for step in steps for tensor in every_view(step)])
