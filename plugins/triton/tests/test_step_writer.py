"""Serving steps whose tables are written by `DeviceOps.writer`: what core's own operators write, in one launch."""

from __future__ import annotations

import pytest
import torch

from polyattn.contract import DeviceOpsInfo
from polyattn.registry import device_ops as registry
from polyattn.registry.manager import get_manager
from polyattn.serving import DraftTree, ForwardBatch, ForwardMode, StepBuffers
from polyattn_triton import runtime
from polyattn_triton.kernels import metadata

from .test_metadata import DEVICE, table_of

VIEWS = ("cu_seqlens_k", "page_counts", "kv_indptr", "kv_indices", "last_page_len")


@pytest.fixture
def launches(monkeypatch):
    """Steps of DEVICE are written by kernels; the launches, as they are made."""
    made = []
    call = metadata.Launch.__call__
    monkeypatch.setattr(metadata.Launch, "__call__", lambda self: (made.append(self), call(self))[1])
    ours = DeviceOpsInfo(DEVICE, "polyattn_triton.device_ops:DeviceOps", requires=("triton",))
    monkeypatch.setattr(get_manager(), "device_ops", (ours,))
    registry._first.cache_clear()
    yield made
    registry._first.cache_clear()


def asked(step):
    """What sessions may ask of a step, by name. Pages of a windowed step in finer pages are not written from the table
    alone. A list of pages is read up to its last entry."""
    found = {}
    steps = [step]
    if step._slots is not None:
        steps += [step.windowed(5).at(2), step.at(1).windowed(9)]
        found = {"slots": step.slots, "positions": step.positions}
    for n, one in enumerate(steps):
        views = {name: getattr(one, name) for name in ("page_table", "seq_lens", *VIEWS)}
        views["kv_indices"] = views["kv_indices"][: int(views["kv_indptr"][-1])]
        found |= {f"{n} {name}": view for name, view in views.items()}
    return found if step.attn_mask is None else {**found, "attn_mask": step.attn_mask}


def plain(batch, table, static):
    """By torch's operators."""
    buffers = StepBuffers(8, 64, table.tables[0].shape[1], device=DEVICE, static=static)
    buffers._write = lambda ops, *step: (buffers._compute(*step), ())[1]
    return asked(buffers.build(batch, table)[0])


def batches(table, rows):
    a, b, c = (table.length(row) for row in rows)
    tree = DraftTree(torch.tensor([[-1, 0, 0], [-1, 0, 1]], dtype=torch.int32, device=DEVICE))
    decode = ForwardBatch(ForwardMode.DECODE, rows, [a - 3, b - 3, c - 3], [1, 1, 1], padding=1)
    return [
        decode,
        decode.next(),
        ForwardBatch(ForwardMode.TARGET_VERIFY, rows[:2], [a, b], [3, 3], tree=tree, padding=1),
        ForwardBatch(ForwardMode.EXTEND, rows, [a, b, c], [3, 1, 7]),
        ForwardBatch(ForwardMode.EXTEND, rows[1:], [b, c], [3, 2]),
        ForwardBatch(ForwardMode.EXTEND, rows[:1], [a], [2], cross=True),
    ]


@pytest.mark.parametrize("static", [False, True])
def test_steps_are_what_core_makes(static, launches):
    table, rows = table_of([10, 7, 14], 4)
    buffers = StepBuffers(8, 64, table.tables[0].shape[1], device=DEVICE, static=static)
    for batch in batches(table, rows):
        want = plain(batch, table, static)
        for asked_before in (False, True):
            found = asked(buffers.build(batch, table)[0])
            wrong = [name for name, tensor in want.items() if not torch.equal(found[name], tensor)]
            assert not wrong, (batch, asked_before)
            assert found.keys() == want.keys()
    assert launches


def test_a_decode_step_is_one_launch_that_is_made_once(launches):
    table, rows = table_of([30, 17], 16)
    buffers = StepBuffers(8, 64, table.tables[0].shape[1], device=DEVICE)
    batch = ForwardBatch(ForwardMode.DECODE, rows, [9, 25], [1, 1])
    for _ in range(2):  # the first makes the view when it is asked for
        (step,) = buffers.build(batch, table)
        assert step.kv_indices is not None
    del launches[:]
    for _ in range(4):
        (step,) = buffers.advance()
        assert step.kv_indices.tolist() == table.pages(rows[0], 0)[:1] + table.pages(rows[1], 0)[:2]
    assert len(launches) == 4
    assert len(set(map(id, launches))) == 1
    table.extend(rows[1], 20)
    buffers.build(ForwardBatch(ForwardMode.DECODE, rows, [14, 50], [1, 1]), table)
    assert launches[-1] is not launches[0], "a wider table"


@pytest.mark.skipif(runtime.INTERPRETED, reason="nothing is compiled by the interpreter")
def test_a_repeated_launch_skips_the_search_for_its_kernel(launches):
    table, rows = table_of([30], 16)
    buffers = StepBuffers(8, 64, table.tables[0].shape[1], device=DEVICE)
    buffers.build(ForwardBatch(ForwardMode.DECODE, rows, [25], [1]), table)
    (again,) = buffers.advance()
    assert launches[-1]._again is not None
    assert again.slots.tolist() == [table.pages(rows[0], 0)[1] * 16 + 9]
