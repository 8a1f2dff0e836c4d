"""Steps are built, advanced and prepared without a look at the device's contents and, once warm, without allocation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyattn.serving.kv_cache.pages import PageAllocator
from polyattn.serving.step.batch import ForwardBatch, ForwardMode
from polyattn.serving.step.requests import RequestTable
from polyattn.serving.step.step import Step, StepBuffers
from polyattn.serving.step.tree import DraftTree

WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "bincount"}


class Strict(TorchDispatchMode):
    """Fails at an operator that waits for the device, or whose result is not in memory of its arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in WAITS, f"{func} waits for the device"
        found = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.numel():
                assert tensor.untyped_storage().data_ptr() in known, f"{func} allocates"
        return found


def table_of(
    lens: list[int], windows: tuple[int, ...] = (-1, 9), device: str = "cpu"
) -> tuple[RequestTable, list[int]]:
    table = RequestTable(8, 96, 16, windows, [PageAllocator(64) for _ in windows])
    rows = [table.add() for _ in lens]
    for row, keys in zip(rows, lens, strict=True):
        table.extend(row, keys)
    table.flush()
    return table, rows


def every_view(step: Step) -> list[Tensor]:
    """All of a step, by itself, windowed and in other pages."""
    found: list[Tensor] = []
    for view in (step, step.windowed(20), step.at(4), step.windowed(20).at(1)):
        found += [view.page_table, view.seq_lens, view.cu_seqlens_q, view.slots, view.positions]
        found += [view.cu_seqlens_k, view.kv_indptr, view.kv_indices, view.last_page_len]
        found += [] if view.attn_mask is None else [view.attn_mask]
    return found


def batches(rows: list[int]) -> list[ForwardBatch]:
    """One of every kind that differs in how it is written."""
    tree = DraftTree.from_parents([[-1, 0, 0], [-1, 0, 1]])
    _ = tree.mask, tree.depths
    verify = ForwardBatch(ForwardMode.TARGET_VERIFY, rows[:2], [29, 18], [3, 3], padding=1)
    return [
        ForwardBatch(ForwardMode.EXTEND, rows, [30, 17, 60], [30, 2, 9]),
        ForwardBatch(ForwardMode.DECODE, rows, [25, 12, 50], [1, 1, 1], padding=2),
        verify,
        dataclasses.replace(verify, tree=tree),
        ForwardBatch(ForwardMode.EXTEND, rows, [30, 17, 60], [30, 2, 9], cross=True),
        ForwardBatch(ForwardMode.IDLE, [], [], [], padding=1),
    ]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", range(6))
def test_a_warm_build_waits_for_nothing_and_allocates_nothing(kind, static):
    table, rows = table_of([30, 20, 60])
    buffers = StepBuffers(8, 96, 6, 2, static=static)
    batch = batches(rows)[kind]

    def build() -> None:
        for step in buffers.build(batch, table):
            if batch.cross:
                _ = step.kv_indices, step.last_page_len, step.at(4).kv_indices
            else:
                every_view(step)

    build()
    with Strict():
        build()


@pytest.mark.parametrize("static", [False, True])
def test_a_warm_advance_waits_for_nothing_and_allocates_nothing(static):
    table, rows = table_of([30, 20, 60])
    buffers = StepBuffers(8, 96, 6, 2, static=static)
    for step in buffers.build(ForwardBatch(ForwardMode.DECODE, rows, [20, 12, 50], [1, 1, 1], padding=1), table):
        every_view(step)
    with Strict():
        for _ in range(8):
            for step in buffers.advance():
                every_view(step)
    assert [step.seq_lens.tolist() for step in buffers.steps] == [[28, 20, 58, 0]] * 2


def test_prepare_by_itself_makes_all_again():
    """What a graph records of a step."""
    table, rows = table_of([30, 20, 60])
    buffers = StepBuffers(8, 96, 6, 2, static=True)
    batch = batches(rows)[1]
    views = [tensor for step in buffers.build(batch, table) for tensor in every_view(step)]
    want = [tensor.clone() for tensor in views]
    derived = [t for step in buffers.steps for t in (step.page_table, step.slots, step.kv_indices, step.positions)]
    for tensor in derived:
        tensor.fill_(-7)
    with Strict():
        buffers.prepare()
    for tensor, kept in zip(views, want, strict=True):
        assert torch.equal(tensor, kept)


class Nowhere:
    """Staging to fake tensors, which hold nothing."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.received = torch.zeros(count, dtype=torch.int32, device=device)

    def send(self, lists: Any) -> None:
        assert list(lists)


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", range(6))
def test_no_view_reads_what_is_in_a_tensor(kind, static, monkeypatch):
    """Fake tensors have no contents."""
    monkeypatch.setattr("polyattn.serving.step.step.Staging", Nowhere)
    monkeypatch.setattr(RequestTable, "flush", lambda table: None)  # brings real numbers from the host
    monkeypatch.setattr("polyattn.serving.step.tree.contents_readable", lambda tensor: False)
    with FakeTensorMode():
        table, rows = table_of([30, 20, 60])
        buffers = StepBuffers(8, 96, 6, 2, static=static)
        batch = batches(rows)[kind]
        for step in buffers.build(batch, table):
            if not batch.cross:
                every_view(step)
            assert isinstance(step.kv_indices, FakeTensor)
        if batch.mode is ForwardMode.DECODE:
            for step in buffers.advance():
                every_view(step)


def test_what_is_forbidden_would_be_seen():
    tensor = torch.arange(4)
    with Strict(), pytest.raises(AssertionError, match="waits for the device"):
        tensor.select(0, 1).item()
    with Strict(), pytest.raises(AssertionError, match=r"aten.add.Tensor allocates"):
        tensor + 1
    with FakeTensorMode() as mode, pytest.raises(DataDependentOutputException):
        mode.from_tensor(tensor).select(0, 1).item()
