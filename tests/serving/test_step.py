"""Step metadata: every view equals its definition in plain Python, whatever was in the buffers before."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import polyattn
from polyattn.contract import PagedTables
from polyattn.errors import InvalidInputError, UnsupportedRequestError
from polyattn.semantics import reference
from polyattn.serving.kv_cache.pages import PageAllocator
from polyattn.serving.step.batch import ForwardBatch, ForwardMode
from polyattn.serving.step.requests import RequestTable
from polyattn.serving.step.step import Step, StepBuffers
from polyattn.serving.step.tree import DraftTree

MAX_TOKENS, ROWS = 192, 8
SETTINGS = settings(max_examples=40, deadline=None)


def table_of(lens: Sequence[int], page_size: int, windows: Sequence[int] = (-1,)) -> tuple[RequestTable, list[int]]:
    """A request table with rows of these lengths, whose pages lie in disorder; and the rows."""
    allocators = [PageAllocator(ROWS * (MAX_TOKENS // page_size) + 1) for _ in windows]
    table = RequestTable(ROWS, MAX_TOKENS, page_size, windows, allocators)
    gone = table.add()
    rows = [table.add() for _ in lens]
    while any(table.length(row) < n for row, n in zip(rows, lens, strict=True)):
        for row, n in zip(rows, lens, strict=True):
            table.extend(row, min(page_size + 1, n - table.length(row)))
        if table.length(gone) < MAX_TOKENS - page_size:
            table.extend(gone, page_size)
    table.remove(gone)
    return table, rows


def buffers_for(table: RequestTable, **options: object) -> StepBuffers:
    return StepBuffers(ROWS, ROWS * MAX_TOKENS, table.tables[0].shape[1], len(table.windows), **options)


@dataclasses.dataclass
class Plain:
    """A step in plain Python: what each row has."""

    lens: list[int]
    queries: list[int]
    pages: list[list[int]]
    page_size: int

    @classmethod
    def of(cls, batch: ForwardBatch, table: RequestTable, group: int = 0, padding_keys: int = 0) -> Plain:
        lens = [*batch.seq_lens, *[padding_keys] * batch.padding]
        pages = [table.pages(row, group) for row in batch.rows] + [[0] * MAX_TOKENS] * batch.padding
        size = table.page_size
        used = [row[: -(-keys // size)] for row, keys in zip(pages, lens, strict=True)]
        return cls(lens, batch.all_query_lens, used, size)

    def windowed(self, window: int) -> Plain:
        first = [
            max(keys - new - window, 0) // self.page_size for keys, new in zip(self.lens, self.queries, strict=True)
        ]
        lens = [keys - page * self.page_size for keys, page in zip(self.lens, first, strict=True)]
        return dataclasses.replace(
            self, lens=lens, pages=[row[page:] for row, page in zip(self.pages, first, strict=True)]
        )

    def at(self, size: int) -> Plain:
        """By the tokens: token t of a row is in page t // size."""
        slots = [
            [row[t // self.page_size] * self.page_size + t % self.page_size for t in range(keys)]
            for row, keys in zip(self.pages, self.lens, strict=True)
        ]
        return dataclasses.replace(self, page_size=size, pages=[[s // size for s in row[::size]] for row in slots])

    def check(self, step: Step) -> None:
        """Compare every view of a step, on the device and on the host."""
        lens, queries, size = self.lens, self.queries, self.page_size
        assert (step.sequences, step.tokens, step.page_size) == (len(lens), sum(queries), size)
        assert step.max_seqlen_q >= max(queries, default=0)
        assert step.max_seqlen_k >= max(lens, default=0)
        counts = [-(-keys // size) for keys in lens]
        flat = [page for row in self.pages for page in row]
        last = [(keys - 1) % size + 1 if keys else 0 for keys in lens]
        want = {
            "seq_lens": lens,
            "cu_seqlens_q": [0, *accumulate(queries)],
            "cu_seqlens_k": [0, *accumulate(lens)],
            "kv_indptr": [0, *accumulate(counts)],
            "kv_indices": flat,
            "last_page_len": last,
        }
        for name, values in want.items():
            found = getattr(step, name)
            assert found.dtype == torch.int32, name
            assert found.tolist()[: len(values) if name == "kv_indices" else None] == values, name
            host = step.host(name)
            assert host.device.type == "cpu"
            assert host.dtype == torch.int32
            assert host.tolist() == values, name
        assert step.page_counts.tolist() == counts
        assert step.host("query_lens").tolist() == queries
        assert step.page_table.dtype == torch.int32
        assert step.page_table.is_contiguous()
        assert step.page_table.shape[0] == len(lens)
        owned = zip(step.page_table.tolist(), step.host("page_table").tolist(), self.pages, strict=True)
        for device, host_row, row in owned:
            assert device[: len(row)] == row
            assert host_row == row + [0] * (len(device) - len(row))

    def check_new_tokens(self, step: Step, depths: Sequence[Sequence[int]] | None = None) -> None:
        """Compare slots and positions of the new tokens."""
        slots, positions = [], []
        for n, (keys, new) in enumerate(zip(self.lens, self.queries, strict=True)):
            for i in range(new):
                place = max(keys - new + i, 0) if keys else 0
                page = self.pages[n][place // self.page_size] if keys else 0
                slots.append(page * self.page_size + place % self.page_size)
                depth = i if depths is None or n >= len(depths) else depths[n][i]
                positions.append(max(keys - new + depth, 0) if keys else 0)
        assert step.slots.dtype == step.positions.dtype == torch.int64
        assert step.slots.tolist() == slots
        assert step.positions.tolist() == positions


@st.composite
def batches(
    draw, mode: ForwardMode | None = None, padded: bool = True
) -> tuple[list[int], list[int], ForwardMode, int]:
    """(lens, queries, mode, padding)."""
    mode = mode or draw(st.sampled_from([ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY]))
    n = draw(st.integers(1, 5))
    lens = [draw(st.integers(1, 150)) for _ in range(n)]
    if mode is ForwardMode.EXTEND:
        queries = [draw(st.integers(1, keys)) for keys in lens]
    else:
        queries = [1 if mode is ForwardMode.DECODE else draw(st.integers(1, min(4, *lens, 150)))] * n
    uniform = len(set(queries)) == 1
    return lens, queries, mode, draw(st.integers(0, 3)) if padded and uniform else 0


PAGE_SIZES = st.sampled_from([1, 16, 64])


@SETTINGS
@given(
    batches(),
    PAGE_SIZES,
    st.booleans(),
    st.sampled_from([0, 1]),
    st.integers(0, 80),
    st.lists(batches(), max_size=2),
)
def test_every_view_is_its_definition(given_, page_size, static, padding_seq_len, window, earlier):
    lens, queries, mode, padding = given_
    most = [max(lens_) for lens_ in ([150],)] * ROWS
    table, rows = table_of(most[:5], page_size, windows=(-1, 40))
    buffers = buffers_for(table, static=static, padding_seq_len=padding_seq_len)
    for lens_, queries_, mode_, padding_ in earlier:  # what they leave behind must not show
        for step in buffers.build(ForwardBatch(mode_, rows[: len(lens_)], lens_, queries_, padding=padding_), table):
            _ = step.kv_indices, step.last_page_len, step.windowed(window).kv_indices, step.at(1).kv_indices
    batch = ForwardBatch(mode, rows[: len(lens)][::-1], lens, queries, padding=padding)
    steps = buffers.build(batch, table)
    assert [step.group for step in steps] == [0, 1]
    assert [step.window for step in steps] == [-1, 40]
    padding_keys = max(1, batch.padding_query_len or 0) if padding_seq_len else 0
    for group, step in enumerate(steps):
        plain = Plain.of(batch, table, group, padding_keys)
        plain.check(step)
        plain.check_new_tokens(step)
        plain.windowed(window).check(step.windowed(window))
        for size in (1, page_size // 2 or 1, page_size):
            plain.at(size).check(step.at(size))
            plain.windowed(window).at(size).check(step.windowed(window).at(size))
        assert step.windowed(-1) is step
        assert step.at(page_size) is step
        assert step.windowed(window) is step.windowed(window)
        assert step.kv_indices is step.kv_indices
        assert step.tables is step.tables
        assert step.tables.page_table is step.page_table
        assert (step.tables.host is None) is static, "a length of the step would be in the graph"
        for name in ("seq_lens", "cu_seqlens_q"):
            assert step.windowed(window).tables.listed(name) == getattr(step.windowed(window), name).tolist()
        if static:
            assert step.max_seqlen_k == buffers.max_pages * page_size
            assert step.page_table.shape[1] == buffers.max_pages


@SETTINGS
@given(batches(ForwardMode.DECODE), PAGE_SIZES, st.booleans(), st.integers(1, 20), st.integers(0, 40))
def test_advance_is_rebuild(given_, page_size, static, count, window):
    lens, queries, mode, padding = given_
    table, rows = table_of(lens, page_size)
    buffers = buffers_for(table, static=static)
    batch = ForwardBatch(mode, rows, lens, queries, padding=padding)
    (step,) = buffers.build(batch, table)
    asked = [step, step.windowed(window), step.at(1)]
    for view in asked:
        _ = view.kv_indices, view.last_page_len, view.cu_seqlens_k
    for _ in range(count):
        for row in rows:
            table.extend(row, 1)
        (after,) = buffers.advance()
    assert after is step
    assert [step, step.windowed(window), step.at(1)] == asked
    batch = ForwardBatch(mode, rows, [keys + count for keys in lens], queries, padding=padding)
    assert buffers.batch == batch
    plain = Plain.of(batch, table)
    (rebuilt,) = buffers_for(table, static=static).build(batch, table)
    for one in (step, rebuilt):
        for found, want in ((one, plain), (one.windowed(window), plain.windowed(window)), (one.at(1), plain.at(1))):
            want.check(found)
        plain.check_new_tokens(one)
    assert step.max_seqlen_k == rebuilt.max_seqlen_k
    assert step.page_table.shape == rebuilt.page_table.shape


def test_a_decode_step_after_the_last_is_not_sent_again(monkeypatch):
    table, rows = table_of([5, 9], 4)
    buffers = buffers_for(table)
    batch = ForwardBatch(ForwardMode.DECODE, rows, [4, 8], [1, 1])
    (step,) = buffers.build(batch, table)
    sent = []
    monkeypatch.setattr(buffers._staging, "send", lambda lists: sent.append(list(lists)))
    assert buffers.build(ForwardBatch(ForwardMode.DECODE, rows, [5, 9], [1, 1]), table) == (step,)
    assert step.seq_lens.tolist() == [5, 9]
    assert not sent
    buffers.build(ForwardBatch(ForwardMode.DECODE, rows[::-1], [9, 5], [1, 1]), table)
    assert len(sent) == 1


def test_a_new_page_shows_after_advance():
    table, (row,) = table_of([16], 16)
    buffers = buffers_for(table)
    (step,) = buffers.build(ForwardBatch(ForwardMode.DECODE, [row], [16], [1]), table)
    assert step.page_table.shape == (1, 1)
    table.extend(row, 1)
    buffers.advance()
    assert step.page_table.tolist() == [table.pages(row, 0)]
    assert step.slots.tolist() == [table.pages(row, 0)[1] * 16]


def test_pages_that_a_sliding_group_gave_back_are_not_in_its_windowed_step():
    table, (row,) = table_of([60], 4, windows=(-1, 9))
    table.slide(row)
    table.extend(row, 1)
    full, sliding = buffers_for(table).build(ForwardBatch(ForwardMode.DECODE, [row], [61], [1]), table)
    assert 0 in sliding.page_table.tolist()[0]
    assert 0 not in full.page_table.tolist()[0]
    windowed = sliding.windowed(sliding.window)
    assert windowed.seq_lens.tolist() == [61 - 12 * 4]  # keys 51 to 60 are seen, and page 12 begins with key 48
    assert windowed.kv_indices.tolist() == table.pages(row, 1)[12:]
    assert 0 not in windowed.kv_indices.tolist()


@settings(max_examples=25, deadline=None)
@given(st.data(), st.booleans(), st.integers(0, 2), st.sampled_from([0, 1]))
def test_a_step_with_a_tree(data, static, padding, padding_seq_len):
    nodes, n = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    listed = [[data.draw(st.integers(-1, i - 1)) for i in range(nodes)] for _ in range(n)]
    prefixes = [data.draw(st.integers(0, 30)) for _ in range(n)]
    tree = DraftTree.from_parents(listed)
    table, rows = table_of([p + nodes for p in prefixes], 4)
    buffers = buffers_for(table, static=static, padding_seq_len=padding_seq_len)
    chain = ForwardBatch(ForwardMode.TARGET_VERIFY, rows, [p + nodes for p in prefixes], [nodes] * n, padding=padding)
    (step,) = buffers.build(chain, table)
    assert step.attn_mask is step.tree_mask is None
    assert list(step.keywords) == ["tables"]
    batch = dataclasses.replace(chain, tree=tree)
    (step,) = buffers.build(batch, table)
    plain = Plain.of(batch, table, padding_keys=nodes if padding_seq_len else 0)
    plain.check(step)
    plain.check_new_tokens(step, tree.depths.tolist())
    assert torch.equal(step.tree_mask[:n], tree.mask)
    for view in (step, step.windowed(7), step.at(1)):
        mask = view.attn_mask
        assert mask is view.keywords["attn_mask"]
        assert mask.shape == (n + padding, 1, nodes, view.max_seqlen_k)
        for i, row in enumerate(listed):
            keys = int(view.seq_lens[i])
            assert torch.equal(mask[i, 0, :, :keys], reference.verify_mask(keys - nodes, row))
    assert step.at(1).attn_mask is step.attn_mask


def public(step):
    """What a public call says of a step."""
    tables = {name: getattr(step.tables, name) for name in PagedTables._fields[:5]}
    return {**tables, **{name: given for name, given in step.keywords.items() if name != "tables"}}


def test_tables_are_the_keywords_of_a_call():
    """Verify of a tree, a windowed decode and an extend, by the step's own tables, against dense attention."""
    page, lens = 4, [9, 21]
    table, rows = table_of(lens, page)
    generator = torch.Generator().manual_seed(1)
    count = int(max(t.max() for t in table.tables)) + 1
    table.flush()
    count = int(table.tables[0].max()) + 1
    key, value = torch.randn(2, count, page, 2, 8, generator=generator, dtype=torch.float64)
    buffers = buffers_for(table)

    def dense(n, query, **given):
        gathered = (t[torch.tensor(table.pages(rows[n], 0))].flatten(0, 1)[None, : lens[n]] for t in (key, value))
        return polyattn.attention(query[None], *gathered, backend="reference", **given)[0]

    tree = DraftTree.from_parents([[-1, 0, 0, 1], [-1, 0, 1, 1]])
    batch = ForwardBatch(ForwardMode.TARGET_VERIFY, rows, lens, [4, 4], tree=tree)
    (step,) = buffers.build(batch, table)
    query = torch.randn(8, 4, 8, generator=generator, dtype=torch.float64)
    out = polyattn.paged_attention(query, key, value, **public(step), tree=True, backend="reference")
    for n, parents in enumerate(tree.parents.tolist()):
        mask = reference.verify_mask(lens[n] - 4, parents)[None, None]
        torch.testing.assert_close(out[4 * n : 4 * n + 4], dense(n, query[4 * n : 4 * n + 4], attn_mask=mask))

    (step,) = buffers.build(ForwardBatch(ForwardMode.DECODE, rows, lens, [1, 1]), table)
    for view in (step, step.windowed(6), step.windowed(6).at(2)):
        caches = (t.view(-1, view.page_size, 2, 8) for t in (key, value))
        out = polyattn.paged_attention(query[:2], *caches, **public(view), window=(6, -1), backend="reference")
        for n in range(2):
            torch.testing.assert_close(out[n : n + 1], dense(n, query[n : n + 1], window=(6, -1), causal=True))

    (step,) = buffers.build(ForwardBatch(ForwardMode.EXTEND, rows, lens, [5, 3]), table)
    out = polyattn.paged_attention(query, key, value, **public(step), backend="reference")
    torch.testing.assert_close(out[:5], dense(0, query[:5], causal=True))
    torch.testing.assert_close(out[5:], dense(1, query[5:], causal=True))


def test_slots_are_where_the_reference_writes():
    table, rows = table_of([9, 21], 4)
    (step,) = buffers_for(table).build(ForwardBatch(ForwardMode.EXTEND, rows, [9, 21], [5, 3]), table)
    count = int(table.tables[0].max()) + 1
    key, value = torch.zeros(2, count, 4, 2, 8)
    new = torch.randn(8, 2, 8)
    polyattn.paged_attention(
        torch.ones(8, 2, 8), key, value, key=new, value=-new, **public(step), save_kv_cache=True, backend="reference"
    )
    want = torch.zeros(count * 4, 2, 8)
    want[step.slots] = new
    assert torch.equal(key.flatten(0, 1), want)
    assert torch.equal(value.flatten(0, 1), -want)


@pytest.mark.parametrize("static", [False, True])
def test_views_may_be_asked_for_before_prepare(static):
    """As a backend's plan does, on the host: what they hold is written by `prepare`."""
    table, rows = table_of([30, 40], 4)
    buffers = buffers_for(table, static=static)
    for batch in (
        ForwardBatch(ForwardMode.EXTEND, rows, [30, 40], [3, 9]),
        ForwardBatch(ForwardMode.DECODE, rows, [5, 6], [1, 1]),
        ForwardBatch(ForwardMode.DECODE, rows[:1], [26], [1]),
        ForwardBatch(ForwardMode.DECODE, rows[:1], [27], [1]),
        ForwardBatch(ForwardMode.TARGET_VERIFY, rows, [4, 5], [4, 4], tree=DraftTree.chain(2, 4)),
    ):
        (step,) = buffers.stage(batch, table)
        windowed, finer, plain = step.windowed(9), step.at(2), Plain.of(batch, table)
        assert step.host("kv_indices").tolist() == [page for row in plain.pages for page in row]
        indices = windowed.kv_indices
        _ = step.kv_indices, finer.kv_indices, windowed.attn_mask, step.attn_mask
        buffers.prepare()
        assert windowed.kv_indices.data_ptr() == indices.data_ptr()
        plain.windowed(9).check(windowed)
        plain.at(2).check(finer)


def test_an_idle_step_is_empty():
    table, _ = table_of([4], 4)
    for static in (False, True):
        (step,) = buffers_for(table, static=static).build(ForwardBatch(ForwardMode.IDLE, [], [], []), table)
        Plain([], [], [], 4).check(step)
        assert step.phase == "decode"
        assert step.slots.shape == step.positions.shape == (0,)
        Plain([], [], [], 4).check(step.windowed(3))
        Plain([], [], [], 1).check(step.at(1))
        (padded,) = buffers_for(table, static=static).build(
            ForwardBatch(ForwardMode.IDLE, [], [], [], padding=2), table
        )
        assert padded.slots.tolist() == [0, 0]
        assert padded.seq_lens.tolist() == [0, 0]


def test_a_cross_step_reads_the_keys_of_an_encoder():
    table, rows = table_of([6, 3], 4)
    (step,) = buffers_for(table).build(ForwardBatch(ForwardMode.EXTEND, rows, [6, 3], [2, 5], cross=True), table)
    Plain([6, 3], [2, 5], [table.pages(row, 0) for row in rows], 4).check(step)
    for name in ("slots", "positions"):
        with pytest.raises(InvalidInputError, match=f"cross attention has no {name}: its keys are those of an encoder"):
            getattr(step, name)
    with pytest.raises(InvalidInputError, match="window=3 for a step of cross attention"):
        step.windowed(3)


def test_static_buffers_keep_addresses_and_refill_what_was_asked():
    table, rows = table_of([30, 40, 50], 4, windows=(-1, 9))
    buffers = buffers_for(table, static=True)
    names = ("cu_seqlens_k", "kv_indptr", "kv_indices", "last_page_len")
    base = ("page_table", "seq_lens", "cu_seqlens_q", "slots", "positions")

    def views(step):
        return [step, step.windowed(9), step.at(2), step.windowed(9).at(1)]

    def places(steps):
        tensors = [getattr(view, name) for step in steps for view in views(step) for name in (*names, *base)]
        return [(t.data_ptr(), t.shape) for t in tensors], tensors

    first = buffers.build(ForwardBatch(ForwardMode.DECODE, rows[:2], [30, 40], [1, 1], padding=1), table)
    before, tensors = places(first)
    other = buffers.build(ForwardBatch(ForwardMode.DECODE, rows[:1], [12], [1]), table)
    _ = [view.kv_indices for step in other for view in views(step)]
    batch = ForwardBatch(ForwardMode.DECODE, rows, [30, 31, 49], [1] * 3)
    again = buffers.build(batch, table)
    assert again == first
    # The very tensors that a graph would have recorded hold the new step, without being asked for.
    fresh = StepBuffers(ROWS, 99, buffers.max_pages, 2, static=True).build(batch, table)
    for found, want in zip(tensors, places(fresh)[1], strict=True):
        assert torch.equal(found, want)
    assert places(again)[0] == before


@pytest.mark.parametrize("padding", [0, 2])
def test_a_replayed_step_leaves_the_lengths_of_the_next(padding):
    """`grow` is recorded, so that of a step that follows nothing is brought to the device."""
    table, rows = table_of([30, 40], 4)
    buffers = buffers_for(table, static=True)
    batch = ForwardBatch(ForwardMode.DECODE, rows, [20, 31], [1, 1], padding=padding)
    for turn in range(4):
        (step,) = buffers.stage(batch, table)
        assert step.seq_lens.tolist() == [*batch.seq_lens, *[0] * padding]
        for _ in range(1 + turn % 2):  # a step is prepared once more, after its replay too
            buffers.prepare()
            want = StepBuffers(ROWS, 99, buffers.max_pages, static=True).build(batch, table)[0]
            for name in ("seq_lens", "slots", "positions", "page_table", "kv_indptr"):
                assert torch.equal(getattr(step, name), getattr(want, name)), name
            buffers.grow()
            buffers.grown()
        batch = batch.next() if turn != 2 else ForwardBatch(ForwardMode.DECODE, rows, [9, 9], [1, 1], padding=padding)


# ---------------------------------------------------------------------------------------------------------- coarser


def runs(*pages: list[int], given_back: int = 0) -> RequestTable:
    """A table whose rows have exactly these pages of 4 tokens."""
    table = RequestTable(len(pages), 64, 4, [-1], [PageAllocator(99)])
    for row in pages:
        index = table.add()
        table.extend(index, 4 * len(row))
        table._row(index).pages[0][:] = row
    return table


def coarse(table: RequestTable, lens: Sequence[int], size: int) -> Step:
    rows = list(range(len(lens)))
    (step,) = StepBuffers(4, 4, 16).build(ForwardBatch(ForwardMode.DECODE, table.rows, lens, [1] * len(rows)), table)
    return step.at(size)


@pytest.fixture
def no_flush(monkeypatch):
    """Tables are written from rows whose pages a test sets by hand."""

    def flush(table):
        for row in table.rows:
            pages = table.pages(row, 0)
            table.tables[0][row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)

    monkeypatch.setattr(RequestTable, "flush", flush)


@pytest.mark.usefixtures("no_flush")
def test_coarser_pages_are_whole_aligned_runs():
    step = coarse(runs([4, 5, 6, 7, 12, 13], [20, 21]), [23, 7], 8)
    Plain([23, 7], [1, 1], [[2, 3, 6], [10]], 8).check(step)
    Plain([23, 7], [1, 1], [[1, 3], [5]], 16).check(coarse(runs([4, 5, 6, 7, 12, 13], [20, 21]), [23, 7], 16))
    Plain([16], [1], [[0, 3]], 8).check(coarse(runs([0, 0, 6, 7]), [16], 8))


@pytest.mark.usefixtures("no_flush")
@pytest.mark.parametrize(
    ("pages", "shown"), [([5, 6], r"\[5, 6\]"), ([4, 6], r"\[4, 6\]"), ([4, 5, 7], r"\[7\]"), ([0, 5], r"\[0, 5\]")]
)
def test_other_pages_cannot_be_read_as_coarser_ones(pages, shown):
    with pytest.raises(UnsupportedRequestError, match=f"row 0 has pages {shown} of 4 tokens, no aligned run of 2"):
        coarse(runs(pages), [4 * len(pages)], 8)


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("options", [{"max_sequences": 0}, {"max_tokens": 0}, {"max_pages": 0}, {"groups": 0}])
def test_buffers_have_room(options):
    ((name, count),) = options.items()
    arguments = {"max_sequences": 1, "max_tokens": 1, "max_pages": 1, "groups": 1}
    with pytest.raises(InvalidInputError, match=f"{name}={count}: step buffers have room for 1 or more"):
        StepBuffers(**{**arguments, **options})


def test_padding_has_keys_or_none():
    with pytest.raises(InvalidInputError, match="padding_seq_len=-1: it counts keys"):
        StepBuffers(1, 1, 1, padding_seq_len=-1)


@pytest.mark.parametrize(
    ("sizes", "batch", "message"),
    [
        ((1, 9, 4), {"padding": 1}, "the batch has 2 rows, padding included, and these buffers have room for 1"),
        ((4, 2, 4), {"query_lens": [3]}, "the batch has 3 new tokens, padding included, .* room for 2: split"),
        ((4, 9, 1), {}, r"a row has 9 keys, and these buffers have room for 4 \(1 pages of 4\)"),
        ((4, 9, 99), {}, "the table has 1 groups on cpu with 48 pages for each row; these buffers .* 1 on cpu with 99"),
        ((4, 9, 4, 2), {}, "the table has 1 groups .* were built for 2 on cpu"),
        (
            (4, 9, 4),
            {"seq_lens": [12]},
            r"row 1 has 12 keys in the batch and slots for 9: call table.extend\(1, tokens",
        ),
        ((4, 9, 4), {"rows": [5]}, "row 5 is no request"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(sizes, batch, message):
    table, (row,) = table_of([9], 4)
    assert row == 1
    given = {"mode": ForwardMode.EXTEND, "rows": [row], "seq_lens": [9], "query_lens": [1], **batch}
    buffers = StepBuffers(*sizes)
    with pytest.raises(InvalidInputError, match=message):
        buffers.build(ForwardBatch(**given), table)
    assert buffers.batch is None


def test_padding_may_need_more_room_than_the_rows():
    table, (row,) = table_of([9], 4)
    batch = ForwardBatch(ForwardMode.DECODE, [row], [4], [1], padding=1)
    StepBuffers(4, 4, 1, padding_seq_len=4).build(batch, table)
    with pytest.raises(InvalidInputError, match="a row has 5 keys, and these buffers have room for 4"):
        StepBuffers(4, 4, 1, padding_seq_len=5).build(batch, table)


def test_a_tree_elsewhere_is_refused():
    table, (row,) = table_of([9], 4)
    tree = DraftTree(torch.empty(1, 2, dtype=torch.int32, device="meta"))
    with pytest.raises(InvalidInputError, match="the tree is on meta and these buffers on cpu: move its parents there"):
        buffers_for(table).build(ForwardBatch(ForwardMode.TARGET_VERIFY, [row], [9], [2], tree=tree), table)


def test_nothing_is_continued_before_it_began():
    with pytest.raises(InvalidInputError, match=r"advance\(\) continues a decode step, and none was built"):
        StepBuffers(1, 1, 1).advance()
    with pytest.raises(InvalidInputError, match=r"prepare\(\) writes the step that was staged, and none was"):
        StepBuffers(1, 1, 1).prepare()


def test_advance_needs_slots():
    table, (row,) = table_of([4], 4)
    buffers = buffers_for(table)
    (step,) = buffers.build(ForwardBatch(ForwardMode.DECODE, [row], [4], [1]), table)
    with pytest.raises(InvalidInputError, match="row 1 has 5 keys in the batch and slots for 4"):
        buffers.advance()
    assert step.seq_lens.tolist() == [4]


def test_views_that_are_not_there():
    table, (row,) = table_of([9], 4)
    (step,) = buffers_for(table).build(ForwardBatch(ForwardMode.DECODE, [row], [9], [1]), table)
    for size in (0, 3, 6):
        with pytest.raises(
            InvalidInputError, match=f"page_size={size}: pages of 4 tokens are read as pages of a divisor"
        ):
            step.at(size)
    with pytest.raises(InvalidInputError, match="window=-2 for this step: a window counts earlier keys"):
        step.windowed(-2)
    with pytest.raises(InvalidInputError, match=r"host\('slots'\): there is no such copy; seq_lens, query_lens"):
        step.host("slots")
