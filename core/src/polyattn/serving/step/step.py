"""A step's metadata, built once on the device and read by every backend and layer.

buffers = StepBuffers(max_sequences=256, max_tokens=8192, max_pages=table.tables[0].shape[1])
(step,) = buffers.build(batch, table)  # stage(), host side, then prepare(), device side
step.page_table, step.seq_lens, step.slots, step.kv_indptr, step.windowed(127).page_table, ...
(step,) = buffers.advance()  # the next decode step, in place
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...contract import StepTables, StepView, StepWriter
from ...errors import InvalidInputError
from ...registry.device_ops import device_ops
from .batch import ForwardBatch
from .staging import Memory, Staging
from .step_metadata import Step

if TYPE_CHECKING:
    from .requests import RequestTable

__all__ = ["Step", "StepBuffers"]

_ROOM = 64
"""Entries in front of the page tables."""


class _Written(NamedTuple):
    """Describes what writes the steps of one kind, while what it was made for stays."""

    made_for: tuple[object, ...]
    writers: list[Callable[[], None]]
    steps: frozenset[Step]


class StepBuffers:
    """Device memory that steps are written into, one step at a time.

    Args:
        max_sequences, max_tokens: rows and new tokens of the largest step, padding included.
        max_pages: pages of the longest row.
        groups: of the request table.
        device: of its tables.
        static: for graphs. Shapes depend on N, T_q and the mode only, addresses never change, and `max_seqlen_k` is the
            capacity; steps of one shape are one object, so that what was asked of it is made again by `prepare`.
        padding_seq_len: keys of a row of padding: 0, or for kernels that cannot take 0 some of the padding page (as
            many as the row has new tokens, at least).

    Raises:
        InvalidInputError: a count is too small.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        max_sequences: int,
        max_tokens: int,
        max_pages: int,
        groups: int = 1,
        device: torch.device | str = "cpu",
        *,
        static: bool = False,
        padding_seq_len: int = 0,
    ) -> None:
        counts = {"max_sequences": max_sequences, "max_tokens": max_tokens, "max_pages": max_pages, "groups": groups}
        for name, count in counts.items():
            if count < 1:
                raise InvalidInputError(f"{name}={count}: step buffers have room for 1 or more")
        if padding_seq_len < 0:
            raise InvalidInputError(f"padding_seq_len={padding_seq_len}: it counts keys, 0 or more")
        self.max_sequences, self.max_tokens, self.max_pages = max_sequences, max_tokens, max_pages
        self.groups, self.static, self.padding_seq_len = groups, static, padding_seq_len
        S, T = max_sequences, max_tokens
        self._staging = Staging(4 * S + 1, torch.empty(0, device=device).device)
        received = self._staging.received
        self.device = received.device
        self._rows, self._live, self._seq_lens, self._cu = (received[i * S : (i + 1) * S + (i == 3)] for i in range(4))
        self._growing: dict[int, tuple[Tensor, Tensor]] = {}
        self._grown = False
        self._memory = Memory(self.device, static, S)
        self._sequence, self._places, self._cells, self._page_of, self._rest = torch.zeros(
            5, T, dtype=torch.int32, device=self.device
        )
        self._base = torch.zeros(S, dtype=torch.int32, device=self.device)
        self._positions = torch.zeros(T, dtype=torch.int64, device=self.device)
        self._slots = torch.zeros(groups, T, dtype=torch.int64, device=self.device)
        # With room in front: there are kernels that ask for pages before the first, of queries that see no key.
        tables = torch.zeros(_ROOM + groups * S * max_pages, dtype=torch.int32, device=self.device)
        self._page_tables = tables[_ROOM:].view(groups, S * max_pages)
        self._memory.counting(max(S, T))
        self._known: dict[Hashable, tuple[Step, ...]] = {}
        self._key: Hashable = None
        self._written: dict[Hashable, _Written] = {}
        self._steps: tuple[Step, ...] = ()
        self._batch: ForwardBatch | None = None
        self._table: RequestTable | None = None

    @property
    def batch(self) -> ForwardBatch | None:
        """The batch of the current step; None before the first."""
        return self._batch

    @property
    def steps(self) -> tuple[Step, ...]:
        """The current step, for each group."""
        return self._steps

    # ---------------------------------------------------------------------------------------------------- host side

    def build(self, batch: ForwardBatch, table: RequestTable) -> tuple[Step, ...]:
        """The metadata of a step, for each group of the table: `stage`, then `prepare`."""
        steps = self.stage(batch, table)
        self.prepare()
        return steps

    def advance(self) -> tuple[Step, ...]:
        """The decode step after the current one, once every row of the table has a slot for one more token: the same
        objects, updated in place.

        Raises:
            InvalidInputError: there is no current step, it is no decode step, or a row has no slot for its next token.
        """
        if self._batch is None or self._table is None:
            raise InvalidInputError("advance() continues a decode step, and none was built: call build() first")
        return self.build(self._batch.next(), self._table)

    def stage(self, batch: ForwardBatch, table: RequestTable) -> tuple[Step, ...]:
        """Host side of a step, never recorded in a graph: bring the batch and what changed in the table to the device.
        A decode step after the last one costs no copy of the batch. `prepare` is to follow.

        Returns:
            The step, for each group. Its host facts are those of the new batch, its tensors follow with `prepare`.

        Raises:
            InvalidInputError: the batch does not fit these buffers or the table.
        """
        self._check(batch, table)
        table.flush()
        N = batch.sequences
        if self._batch is not None and table is self._table and batch.follows(self._batch):
            if not self._grown:
                self.grow()
        else:
            self._send(batch)
            self._steps = self._steps_of(batch)
        self._batch, self._table, self._memory.staged, self._grown = batch, table, True, False
        lens = [*batch.seq_lens, *self._padding_keys(batch)]
        longest = self.max_pages * table.page_size if self.static else self._longest(batch)
        columns = max(-(-longest // table.page_size), 1)
        for group, step in enumerate(self._steps):
            step.window, step.page_size = table.windows[group], table.page_size
            step._queries, step._starts = batch.all_query_lens, batch.cu_seqlens_q
            step.max_seqlen_k, step._lens = longest, lens
            if step.page_table_shape != (N, columns):
                step.page_table_shape = (N, columns)
                step.page_table = self._page_tables[group, : N * columns].view(N, columns)
            step._pages = functools.partial(_pages_of, table, group, batch.rows, step)
            step._page_lists = functools.partial(_page_lists_of, table, group, batch.rows, step)
            step.replan()
        return self._steps

    def _padding_keys(self, batch: ForwardBatch) -> list[int]:
        """Keys of the rows of padding."""
        if not batch.padding:
            return []
        keys = max(self.padding_seq_len, batch.padding_query_len or 0) if self.padding_seq_len else 0
        return [keys] * batch.padding

    def _longest(self, batch: ForwardBatch) -> int:
        return max(batch.max_seqlen_k, *self._padding_keys(batch)[:1], 0)

    def _check(self, batch: ForwardBatch, table: RequestTable) -> None:
        if batch.sequences > self.max_sequences or batch.tokens > self.max_tokens:
            what, count, room = "rows", batch.sequences, self.max_sequences
            if count <= room:
                what, count, room = "new tokens", batch.tokens, self.max_tokens
            raise InvalidInputError(
                f"the batch has {count} {what}, padding included, and these buffers have room for {room}: split the "
                "batch, or build larger buffers"
            )
        tables = table.tables
        if len(tables) != self.groups or tables[0].device != self.device or tables[0].shape[1] < self.max_pages:
            raise InvalidInputError(
                f"the table has {len(tables)} groups on {tables[0].device} with {tables[0].shape[1]} pages for each "
                f"row; these buffers were built for {self.groups} on {self.device} with {self.max_pages}"
            )
        room = self.max_pages * table.page_size
        if self._longest(batch) > room:
            raise InvalidInputError(
                f"a row has {self._longest(batch)} keys, and these buffers have room for {room} ({self.max_pages} "
                f"pages of {table.page_size}): build them with a larger max_pages"
            )
        if (short := table.first_shorter(batch.rows, batch.seq_lens)) is not None:
            row, keys = batch.rows[short], batch.seq_lens[short]
            raise InvalidInputError(
                f"row {row} has {keys} keys in the batch and slots for {table.length(row)}: call "
                f"table.extend({row}, tokens) before the step is built"
            )
        if batch.tree is not None and batch.tree.parents.device != self.device:
            raise InvalidInputError(
                f"the tree is on {batch.tree.parents.device} and these buffers on {self.device}: move its parents there"
            )

    def _send(self, batch: ForwardBatch) -> None:
        S, padding = self.max_sequences, [0] * batch.padding
        real = [1] * len(batch.rows)
        lens = [*batch.seq_lens, *self._padding_keys(batch)]
        parts = ([*batch.rows, *padding], [*real, *padding], lens, batch.cu_seqlens_q)
        self._staging.send((i * S, part) for i, part in enumerate(parts))
        if batch.tree is not None:
            mask, lag = self._tree_buffers(batch)
            mask[: len(real)].copy_(batch.tree.mask)
            # Padding rows may see anything, but must see something: some kernels return NaN for empty rows.
            mask[len(real) :].fill_(True)
            torch.sub(self._memory.counting(mask.shape[1]), batch.tree.depths, out=lag[: len(real)])
            lag[len(real) :].zero_()

    def _tree_buffers(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """bool [N, N_d, N_d] and int32 [N, N_d]: how far a draft is from the prefix, less its depth."""
        N, N_d = batch.sequences, batch.tree.draft_tokens if batch.tree is not None else 0
        mask = self._memory.take(("tree_mask", N_d), torch.bool, N, N_d, N_d)
        return mask, self._memory.take(("tree_lag", N_d), torch.int32, N, N_d)

    def _steps_of(self, batch: ForwardBatch) -> tuple[Step, ...]:
        """Step objects of the kind of a batch, where buffers are static of its shape too: those of the last time, which
        know what is asked of them."""
        N, T = batch.sequences, batch.tokens
        drafts = 0 if batch.tree is None else batch.tree.draft_tokens
        sizes = (N, T, batch.max_seqlen_q) if self.static else ()
        self._key = (batch.mode, drafts, batch.cross, *sizes)
        steps = self._known.get(self._key)
        if steps is None:
            steps = self._known[self._key] = tuple(Step(self._memory, (group,)) for group in range(self.groups))
        for group, step in enumerate(steps):
            step.mode, step.phase, step.group = batch.mode, batch.mode.phase, group
            if (step.sequences, step.tokens) != (N, T):
                step.sequences, step.tokens = N, T
                step.seq_lens, step.cu_seqlens_q = self._seq_lens[:N], self._cu[: N + 1]
                step.requests = self._rows[:N], self._live[:N]
                step._slots = None if batch.cross else self._slots[group, :T]
                step._positions = None if batch.cross else self._positions[:T]
            step.padding, step.max_seqlen_q = batch.padding, batch.max_seqlen_q
            step.tree_mask = None if batch.tree is None else self._tree_buffers(batch)[0]
        return steps

    # -------------------------------------------------------------------------------------------------- device side

    def grow(self) -> None:
        """Add one key to each row that is a request: what the decode step after this one begins with. `stage` calls
        it, unless a graph does, as its last work; `grown` says that the graph runs."""
        lens, live = self._growing_lens()
        lens.add_(live)

    def _growing_lens(self) -> tuple[Tensor, Tensor]:
        """int32 [N] each: keys of the rows, and how many more the next step has."""
        rows = 0 if self._batch is None else self._batch.sequences
        found = self._growing.get(rows)
        if found is None:
            found = self._growing[rows] = self._seq_lens[:rows], self._live[:rows]
        return found

    def grown(self) -> None:
        """A graph that ends with `grow` is replayed: the tensors of this step have the lengths of the next one."""
        self._grown = True

    def prepare(self) -> None:
        """Device side of the step that was staged: tables, slots, positions and every view that was asked of this step
        so far, in place. A graph may record it: it waits for nothing and allocates nothing but the memory of a view
        that is new or, where buffers are not static, has grown.

        Raises:
            InvalidInputError: nothing was staged.
        """
        if self._batch is None or self._table is None:
            raise InvalidInputError("prepare() writes the step that was staged, and none was: call stage() first")
        batch, table = self._batch, self._table
        if self._grown:  # a step that was replayed is prepared once more
            lens, live = self._growing_lens()
            lens.sub_(live)
        self._memory.staged = self._grown = False
        steps: Collection[Step]
        ops: Any = device_ops(self.device.type)
        if batch.sequences and hasattr(ops, "writer"):
            steps = self._write(ops, batch, table)
        else:
            self._compute(batch, table)
            steps = ()
        for step in self._steps:
            step.refresh(steps)

    def _write(self, ops: StepWriter, batch: ForwardBatch, table: RequestTable) -> Collection[Step]:
        """The same by the kernels of a package, and what else they can write; returns the steps that are then done."""
        made_for = (table, batch.sequences, batch.tokens, batch.max_seqlen_q, self._steps[0].page_table_shape,
                    bool(batch.padding), self._memory.changed)  # fmt: skip
        known = self._written.get(self._key)
        if known is None or known.made_for != made_for:
            writers, steps = [], []
            for group, step in enumerate(self._steps):
                found = list(step.from_table())
                steps += [one for one, _ in found]
                writers.append(ops.writer(self._tables(batch, table, group, tuple(view for _, view in found))))
            known = self._written[self._key] = _Written(made_for, writers, frozenset(steps))
        for write in known.writers:
            write()
        return known.steps

    def _tables(self, batch: ForwardBatch, table: RequestTable, group: int, views: tuple[StepView, ...]) -> StepTables:
        N, step, drafts = batch.sequences, self._steps[group], batch.tree
        return StepTables(
            table.tables[group],
            table.page_size,
            step.page_table.shape[1],
            self._rows[:N],
            step.seq_lens,
            step.cu_seqlens_q,
            batch.tokens,
            self._live[:N] if self.static or batch.padding else None,
            None if drafts is None else self._tree_buffers(batch)[1].view(-1),
            None if group else step._positions,
            step._slots,
            views,
        )

    def _compute(self, batch: ForwardBatch, table: RequestTable) -> None:
        """Tables, slots and positions by torch's operators."""
        N, T, size = batch.sequences, batch.tokens, table.page_size
        if N and not batch.cross:
            self._locate(batch, size, self._steps[0].page_table.shape[1])
        for group, step in enumerate(self._steps):
            columns = step.page_table.shape[1]
            if N:
                torch.index_select(table.tables[group][:, :columns], 0, self._rows[:N], out=step.page_table)
                if self.static or batch.padding:
                    step.page_table.mul_(self._live[:N, None])
            if N and not batch.cross:
                page = torch.index_select(step.page_table.view(-1), 0, self._cells[:T], out=self._page_of[:T])
                # In int32: a table counts pages in it, and no pool has 2**31 tokens.
                torch.add(self._rest[:T], page, alpha=size, out=step.slots)

    def _locate(self, batch: ForwardBatch, page_size: int, columns: int) -> None:
        """Return where the new tokens are: among the cells of the page table, in their pages, in their texts."""
        N, T = batch.sequences, batch.tokens
        places, seq_lens, counting = self._places[:T], self._seq_lens[:N], self._memory.counting
        if batch.max_seqlen_q == 1:
            sequence = counting(N)
            torch.sub(seq_lens, 1, out=places)
        else:
            ends = self._cu[1 : N + 1]
            sequence = torch.searchsorted(ends, counting(T), right=True, out_int32=True, out=self._sequence[:T])
            base = torch.sub(seq_lens, ends, out=self._base[:N])
            torch.index_select(base, 0, sequence, out=places).add_(counting(T))
        if self.static or batch.padding:
            places.clamp_(min=0)  # of rows without keys
        positions = self._positions[:T].copy_(places)
        if batch.tree is not None:
            positions.sub_(self._tree_buffers(batch)[1].view(-1)).clamp_(min=0)
        cells = torch.div(places, page_size, rounding_mode="floor", out=self._cells[:T])
        cells.add_(sequence, alpha=columns)
        torch.remainder(places, page_size, out=self._rest[:T])


def _pages_of(table: RequestTable, group: int, rows: Sequence[int], step: Step) -> list[Tensor]:
    """Pages of every row of a step as the host knows them."""
    counts, N = step._page_counts(), len(rows)
    padding = [torch.zeros(count, dtype=torch.int32, device="cpu") for count in counts[N:]]
    return [*table.first_pages(rows, group, counts[:N]), *padding]


def _page_lists_of(table: RequestTable, group: int, rows: Sequence[int], step: Step) -> list[list[int]]:
    """The same as lists."""
    counts, N = step._page_counts(), len(rows)
    return [*table.first_page_lists(rows, group, counts[:N]), *[[0] * count for count in counts[N:]]]
