"""`step_launches` write in one launch the numbers that core's serving makes with torch operators."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from polyattn.errors import InvalidInputError
from polyattn.serving import DraftTree, ForwardBatch, ForwardMode, PageAllocator, RequestTable, StepBuffers
from polyattn_triton import runtime
from polyattn_triton.kernels import metadata
from polyattn_triton.kernels.metadata import View, step_launches

DEVICE = "cpu" if runtime.INTERPRETED else "cuda"
MOST = 96
NAMES = ("seq_lens", "page_table", "cu_seqlens_k", "kv_indptr", "kv_indices", "page_counts", "last_page_len")


def written(*tables, **tokens_and_views):
    for launch in step_launches(*tables, **tokens_and_views):
        launch()


def table_of(lens, page_size, *, in_order=False):
    """Rows of these lengths, whose pages lie in disorder, and the row numbers."""
    table = RequestTable(16, MOST, page_size, [-1], [PageAllocator(16 * (MOST // page_size) + 1)], DEVICE)
    if in_order:
        # Page 0 is nobody's: with one more page taken, rows begin on a multiple of four.
        table.extend(table.add(), 3 * page_size)
    rows = [table.add() for _ in lens]
    step = MOST if in_order else page_size + 1
    while any(table.length(row) < n for row, n in zip(rows, lens, strict=True)):
        for row, n in zip(rows, lens, strict=True):
            table.extend(row, min(step, n - table.length(row)))
    return table, rows[::-1] if not in_order else rows


def drawn(seed, page_size, mode, N=None):
    draw = random.Random(seed)
    N = N or draw.choice([1, 3, 7])
    query_lens = [1 if mode is ForwardMode.DECODE else draw.randint(1, 30) for _ in range(N)]
    table, rows = table_of([max(draw.randint(n, MOST) for n in query_lens)] * N, page_size)
    seq_lens = [draw.randint(n, table.length(row)) for n, row in zip(query_lens, rows, strict=True)]
    return table, ForwardBatch(mode, rows, seq_lens, query_lens)


def given(batch, padding=0):
    """rows, live, seq_lens, cu_seqlens_q on the device."""
    N = len(batch.rows)
    lists = ([*batch.rows, *[0] * padding], [1] * N + [0] * padding, [*batch.seq_lens, *[0] * padding])
    return [torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in (*lists, batch.cu_seqlens_q)]


def room(step, page_size, window=-1, kept=NAMES):
    """What is to be written for a view, with numbers in it that nobody wants."""

    def ints(*shape):
        return torch.full(shape, -7, dtype=torch.int32, device=DEVICE)

    N, columns = step.page_table.shape
    shapes = {"page_table": (N, columns), "kv_indices": (N * columns,), "cu_seqlens_k": (N + 1,), "kv_indptr": (N + 1,)}
    tensors = {name: ints(*shapes.get(name, (N,))) for name in kept}
    return View(page_size, window, **tensors, columns=0 if "page_table" in kept else columns)


def check(view, step):
    for name in NAMES:
        ours = getattr(view, name)
        if ours is None:
            continue
        theirs = getattr(step, name)
        if name == "kv_indices":
            count = int(step.kv_indptr[-1])
            assert (ours[count:] == -7).all(), "nothing past the last entry is written"
            ours, theirs = ours[:count], theirs[:count]
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_tables_and_tokens(seed, page_size, mode):
    table, batch = drawn(seed, page_size, mode)
    (step,) = StepBuffers(16, 512, table.tables[0].shape[1], device=DEVICE).build(batch, table)
    rows, _, seq_lens, cu = given(batch)
    view, T = room(step, page_size), batch.tokens
    positions, slots = torch.full((2, T + 2), -7, device=DEVICE)[:, :T]
    written(
        table.tables[0], rows, seq_lens, cu, page_size=page_size, tokens=T, positions=positions, slots=slots,
        views=[view], columns=step.page_table.shape[1],
    )  # fmt: skip
    check(view, step)
    assert torch.equal(positions, step.positions)
    assert torch.equal(slots, step.slots)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("window", [0, 5, 40, 1000])
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
def test_windows_and_finer_pages_in_the_same_launch(window, mode):
    for seed in range(2):
        table, batch = drawn(seed + 10, 8, mode)
        (step,) = StepBuffers(16, 512, table.tables[0].shape[1], device=DEVICE).build(batch, table)
        rows, _, seq_lens, cu = given(batch)
        steps = [step.windowed(window), step.windowed(window).at(2), step.at(1), step]
        views = [room(s, s.page_size, w) for s, w in zip(steps, (window, window, -1, -1), strict=True)]
        written(
            table.tables[0], rows, seq_lens, cu, page_size=8, tokens=batch.tokens, views=views,
            columns=step.page_table.shape[1],
        )  # fmt: skip
        for view, wanted in zip(views, steps, strict=True):
            check(view, wanted)


def test_coarser_pages():
    table, rows = table_of([32, 64, 64, 30], 4, in_order=True)
    batch = ForwardBatch(ForwardMode.EXTEND, rows[1:3], [64, 33], [5, 7])
    (step,) = StepBuffers(16, 512, table.tables[0].shape[1], device=DEVICE).build(batch, table)
    coarse = step.at(16)
    view = room(coarse, 16)
    numbers, _, seq_lens, cu = given(batch)
    written(
        table.tables[0], numbers, seq_lens, cu, page_size=4, tokens=12, views=[view], columns=step.page_table.shape[1]
    )
    # Past the pages of a row the table has whatever is there.
    for n, count in enumerate(coarse.page_counts.tolist()):
        assert torch.equal(view.page_table[n, :count], coarse.page_table[n, :count])
    check(View(16, **{name: getattr(view, name) for name in NAMES if name != "page_table"}), coarse)


def test_padding_rows():
    table, batch = drawn(3, 4, ForwardMode.DECODE)
    padded = dataclasses.replace(batch, padding=2)
    buffers = StepBuffers(16, 64, table.tables[0].shape[1], device=DEVICE, static=True)
    (step,) = buffers.build(padded, table)
    rows, live, seq_lens, cu = given(padded, padding=2)
    view = room(step, 4)
    positions, slots = torch.full((2, padded.tokens), -7, device=DEVICE)
    written(
        table.tables[0], rows, seq_lens, cu, page_size=4, tokens=padded.tokens, live=live, positions=positions,
        slots=slots, views=[view],
    )  # fmt: skip
    check(view, step)
    assert torch.equal(positions, step.positions)
    assert torch.equal(slots, step.slots)
    assert not slots[-2:].any()


def test_drafts_of_a_tree():
    table, rows = table_of([20, 9], 4)
    tree = DraftTree(torch.tensor([[-1, 0, 0, 2], [-1, 0, 1, 2]], dtype=torch.int32, device=DEVICE))
    batch = ForwardBatch(ForwardMode.TARGET_VERIFY, rows, [table.length(row) for row in rows], [4, 4], tree=tree)
    (step,) = StepBuffers(16, 64, table.tables[0].shape[1], device=DEVICE).build(batch, table)
    numbers, _, seq_lens, cu = given(batch)
    lag = (torch.arange(4, device=DEVICE) - tree.depths).int().flatten()
    positions, slots = torch.full((2, 8), -7, device=DEVICE)
    written(table.tables[0], numbers, seq_lens, cu, page_size=4, tokens=8, lag=lag, positions=positions, slots=slots)
    assert torch.equal(positions, step.positions)
    assert torch.equal(slots, step.slots)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("kept", [("kv_indices",), ("kv_indptr",), ("cu_seqlens_k", "last_page_len"), ("page_table",)])
def test_only_what_is_wanted(kept, monkeypatch):
    monkeypatch.setattr(metadata, "_COLUMNS", 4)  # several programs to a row
    monkeypatch.setattr(metadata, "_ROWS", 2)
    monkeypatch.setattr(metadata, "_TOKENS", 4)
    table, batch = drawn(2, 4, ForwardMode.EXTEND, N=5)
    (step,) = StepBuffers(16, 512, table.tables[0].shape[1], device=DEVICE).build(batch, table)
    view = room(step, 4, kept=kept)
    rows, _, seq_lens, cu = given(batch)
    slots = torch.full((batch.tokens,), -7, device=DEVICE)
    written(table.tables[0], rows, seq_lens, cu, page_size=4, tokens=batch.tokens, slots=slots, views=[view])
    check(view, step)
    assert torch.equal(slots, step.slots)


def test_no_rows():
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(4, 4, dtype=torch.int32, device=DEVICE)
    written(table, none, none, table[0, :1], page_size=4, tokens=0, views=[View(4, seq_lens=none)])


@pytest.mark.parametrize(
    "view, message",
    [
        (View(3), "pages of 4 tokens are read as pages of a divisor or a multiple of that; got 3"),
        (View(0), "got 0"),
        (View(4, page_table=torch.zeros(4, 2, dtype=torch.int32).T), "a page_table that is written is contiguous"),
        (View(4, kv_indices=torch.zeros(4, dtype=torch.int32)), "kv_indices without a page_table needs columns"),
    ],
)
def test_views_that_cannot_be_written(view, message):
    one = torch.ones(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(InvalidInputError, match=message):
        written(one[None], one[:1], one[:1], one, page_size=4, tokens=1, views=[view])
