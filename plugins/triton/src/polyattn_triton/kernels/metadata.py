"""A step's tables in one launch: what core makes of the request table with a dozen small operators, or more.

Each row of the step has programs of its own, which sum up the lengths of the rows before it themselves: for hundreds of
rows that is cheaper than a second launch. New tokens have programs beside them. The numbers are those of
`polyattn.serving.Step` and its `windowed(window).at(page_size)`; past the pages of a row a table holds what core's
does, and past the last entry `kv_indices` keeps what it had.

Floor: one launch. All of it is a few hundred kilobytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from polyattn.contract import InvalidInputError
from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

from .launching import Repeated, repeated

__all__ = ["Launch", "View", "step_launches"]

_COLUMNS, _TOKENS, _ROWS = 256, 128, 256
"""Of a program: columns of a table, new tokens, rows that are summed at once."""
_NAMES = ("seq_lens", "page_table", "cu_seqlens_k", "kv_indptr", "kv_indices", "page_counts", "last_page_len")


@dataclasses.dataclass(frozen=True)
class View:
    """The step in pages of one size, in a window or not: what is written of it. None: not wanted.

    Attributes:
        page_size: a divisor or a multiple of the request table's. Multiples take every n-th page: the pages of a row
            lie in whole, aligned runs.
        window: earlier keys that a query sees; rows begin with the first page of the table that a new token sees.
            -1: with page 0.
        seq_lens: int32 [N], keys of the rows as they begin here.
        page_table: int32 [N, columns], contiguous; columns says how much of the rows is wanted.
        cu_seqlens_k, kv_indptr: int32 [N+1]. page_counts, last_page_len: int32 [N].
        kv_indices: int32, room for the pages of all rows; columns covers them: without page_table give `columns`.
        columns: pages of the longest row; 0 = as page_table.
    """

    page_size: int
    window: int = -1
    seq_lens: Tensor | None = None
    page_table: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None
    page_counts: Tensor | None = None
    last_page_len: Tensor | None = None
    columns: int = 0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, name) for name in _NAMES)


@triton.jit
def _kept(n, inside, seq_lens, cu_seqlens, window, PAGE: tl.constexpr):
    """Keys of rows n from the first page on that a new token sees, and that page. 0 where not `inside`."""
    length = tl.load(seq_lens + n, mask=inside, other=0)
    new = tl.load(cu_seqlens + n + 1, mask=inside, other=0) - tl.load(cu_seqlens + n, mask=inside, other=0)
    first = tl.where(window < 0, 0, tl.maximum(length - new - window, 0) // PAGE)
    return length - first * PAGE, first


@triton.jit
def _view(
    i, table, rows, live, seq_lens, cu_seqlens, sequences, table_columns, table_stride,
    o_lens, o_table, o_cu, o_indptr, o_indices, o_counts, o_last, columns, window,
    PAGE: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program i of a view in pages of SIZE."""
    tiles = tl.maximum((columns + COLUMNS - 1) // COLUMNS, 1)
    n, tile = i // tiles, i % tiles
    if n < sequences:
        kept, first = _kept(n, n >= 0, seq_lens, cu_seqlens, window, PAGE)
        count = (kept + SIZE - 1) // SIZE
        keys, pages = n * 0, n * 0
        if (o_cu is not None) or (o_indptr is not None) or (o_indices is not None):
            for start in range(0, n, ROWS):
                m = start + tl.arange(0, ROWS)
                before, _first = _kept(m, m < n, seq_lens, cu_seqlens, window, PAGE)
                keys += tl.sum(before)
                pages += tl.sum((before + SIZE - 1) // SIZE)
        c = tile * COLUMNS + tl.arange(0, COLUMNS)
        if SIZE <= PAGE:
            TIMES: tl.constexpr = PAGE // SIZE
            source = first + c // TIMES
        else:
            RUN: tl.constexpr = SIZE // PAGE
            source = first + c * RUN
        line = tl.load(rows + n).to(tl.int64) * table_stride
        # Past its end a windowed table repeats the last column.
        page = tl.load(table + line + tl.minimum(source, table_columns - 1), mask=c < columns, other=0)
        if live is not None:
            page = page * tl.load(live + n)
        if SIZE <= PAGE:
            page = page * TIMES + c % TIMES
        else:
            page = page // RUN
        if o_table is not None:
            tl.store(o_table + n.to(tl.int64) * columns + c, page, mask=c < columns)
        if o_indices is not None:
            tl.store(o_indices + pages + c, page, mask=c < tl.minimum(count, columns))
        if tile == 0:
            if o_lens is not None:
                tl.store(o_lens + n, kept)
            if o_counts is not None:
                tl.store(o_counts + n, count)
            if o_last is not None:
                # A row without keys has no last page.
                tl.store(o_last + n, tl.minimum(kept - count * SIZE + SIZE, kept))
            if o_cu is not None:
                tl.store(o_cu + n + 1, keys + kept)
                tl.store(o_cu, 0, mask=n == 0)
            if o_indptr is not None:
                tl.store(o_indptr + n + 1, pages + count)
                tl.store(o_indptr, 0, mask=n == 0)


@triton.jit
def _tokens(
    i, table, rows, live, seq_lens, cu_seqlens, lag, positions, slots, tokens, sequences, highest, table_columns,
    table_stride, PAGE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Where the new tokens of program i are in their texts and in the cache."""
    t = i * TOKENS + tl.arange(0, TOKENS)
    inside = t < tokens
    # How many rows end at or before the token, from the highest bit of that number down.
    n, step = t * 0, highest
    while step > 0:
        end = tl.load(cu_seqlens + n + step, mask=n + step <= sequences, other=2147483647)
        n = tl.where(end <= t, n + step, n)
        step = step // 2
    inside = inside & (n < sequences)
    end = tl.load(cu_seqlens + n + 1, mask=inside, other=0)
    place = tl.maximum(tl.load(seq_lens + n, mask=inside, other=0) - (end - t), 0)
    if positions is not None:
        position = place
        if lag is not None:
            position = tl.maximum(place - tl.load(lag + t, mask=inside, other=0), 0)
        tl.store(positions + t, position.to(tl.int64), mask=inside)
    if slots is not None:
        line = tl.load(rows + n, mask=inside, other=0).to(tl.int64) * table_stride
        page = tl.load(table + line + tl.minimum(place // PAGE, table_columns - 1), mask=inside, other=0)
        if live is not None:
            page = page * tl.load(live + n, mask=inside, other=0)
        tl.store(slots + t, page.to(tl.int64) * PAGE + place % PAGE, mask=inside)


@triton.jit(
    do_not_specialize=[
        "tokens", "sequences", "highest", "table_columns", "table_stride", "columns_a", "window_a", "columns_b",
        "window_b", "columns_c", "window_c",
    ],
    do_not_specialize_on_alignment=["rows", "live", "seq_lens", "cu_seqlens", "lag", "positions", "slots"],
)  # fmt: skip
def _metadata(
    table, rows, live, seq_lens, cu_seqlens, lag, positions, slots, tokens, sequences, highest, table_columns,
    table_stride,
    lens_a, table_a, cu_a, indptr_a, indices_a, counts_a, last_a, columns_a, window_a,
    lens_b, table_b, cu_b, indptr_b, indices_b, counts_b, last_b, columns_b, window_b,
    lens_c, table_c, cu_c, indptr_c, indices_c, counts_c, last_c, columns_c, window_c,
    PAGE: tl.constexpr, SIZE_A: tl.constexpr, SIZE_B: tl.constexpr, SIZE_C: tl.constexpr,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid [programs of the largest part, 4]: three views, a size of 0 is none, and the tokens."""
    i, part = tl.program_id(0), tl.program_id(1)
    views = (
        (lens_a, table_a, cu_a, indptr_a, indices_a, counts_a, last_a, columns_a, window_a),
        (lens_b, table_b, cu_b, indptr_b, indices_b, counts_b, last_b, columns_b, window_b),
        (lens_c, table_c, cu_c, indptr_c, indices_c, counts_c, last_c, columns_c, window_c),
    )
    sizes: tl.constexpr = (SIZE_A, SIZE_B, SIZE_C)
    # Two questions each: the first is answered when the kernel is compiled.
    for n in tl.static_range(3):
        if sizes[n] > 0:  # noqa: SIM102
            if part == n:
                _view(
                    i, table, rows, live, seq_lens, cu_seqlens, sequences, table_columns, table_stride, *views[n],
                    PAGE, sizes[n], COLUMNS, ROWS,
                )  # fmt: skip
    if (positions is not None) or (slots is not None):  # noqa: SIM102
        if (part == 3) & (i * TOKENS < tokens):
            _tokens(
                i, table, rows, live, seq_lens, cu_seqlens, lag, positions, slots, tokens, sequences, highest,
                table_columns, table_stride, PAGE, TOKENS,
            )  # fmt: skip


_NONE = View(0)


class Launch:
    """A launch that is called again and again while its tensors stay where they are."""

    def __init__(self, programs: int, arguments: tuple[Any, ...]) -> None:
        self._grid, self._arguments = (programs, 4, 1), arguments
        self._addresses = tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)
        self._again: Repeated | None = None

    def __call__(self) -> None:
        if self._again is not None:
            self._again(self._grid, self._addresses)
            return
        table = self._arguments[0]
        with runtime.device_of(table):
            self._again = repeated(_metadata[self._grid](*self._arguments, num_warps=4), table.device)


def step_launches(
    table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    page_size: int,
    tokens: int,
    columns: int = 0,
    live: Tensor | None = None,
    lag: Tensor | None = None,
    positions: Tensor | None = None,
    slots: Tensor | None = None,
    views: Sequence[View] = (),
) -> list[Launch]:
    """What writes the tables of a step, three views and what is asked of its tokens in each launch. None waits for the
    device.

    Args:
        table: int32 [requests, max_pages], pages of all requests, dense last axis. rows: int32 [N], which of them.
        seq_lens: int32 [N], keys, new ones included. cu_seqlens_q: int32 [N+1].
        page_size: of the table. tokens: T_q. columns: how many of the table's the step has, 0 = all.
        live: int32 [N], 0 for a row of padding: its pages are all page 0.
        lag: int32 [T_q], how far a draft's place among the keys is from its position in the text.
        positions, slots: int64 [T_q], to be written. 0 and a slot of the first page in a row without keys.
        views: what else is written.

    Raises:
        InvalidInputError: a page size that neither divides that of the table nor is a multiple of it, a table that is
            not contiguous, or indices of rows whose length is not said.
    """
    runtime.check_device(table.device)
    for view in views:
        if view.page_size < 1 or (page_size % view.page_size and view.page_size % page_size):
            raise InvalidInputError(
                f"step_launches: pages of {page_size} tokens are read as pages of a divisor or a multiple of that; got "
                f"{view.page_size}"
            )
        if view.page_table is not None and not view.page_table.is_contiguous():
            raise InvalidInputError("step_launches: a page_table that is written is contiguous; make it with new_empty")
        if view.page_table is None and view.kv_indices is not None and not view.columns:
            raise InvalidInputError("step_launches: kv_indices without a page_table needs columns, of the longest row")
    N, wanted = rows.shape[0], positions is not None or slots is not None
    launches: list[Launch] = []
    if not N:
        return launches
    for at in range(0, max(len(views), 1), 3):
        some = [*views[at : at + 3], _NONE, _NONE, _NONE][:3]
        widths = [v.columns or (0 if v.page_table is None else v.page_table.shape[1]) for v in some]
        programs = max(N * max(triton.cdiv(width, _COLUMNS), 1) for width in widths)
        now = wanted and at == 0
        if now:
            programs = max(programs, triton.cdiv(tokens, _TOKENS))
        (a, b, c), (width_a, width_b, width_c) = some, widths
        arguments = (
            table, rows, live, seq_lens, cu_seqlens_q, lag, positions if now else None, slots if now else None,
            tokens, N, 1 << N.bit_length() >> 1, columns or table.shape[1], table.stride(0),
            *a.tensors, width_a, a.window, *b.tensors, width_b, b.window, *c.tensors, width_c, c.window,
            page_size, a.page_size, b.page_size, c.page_size, _COLUMNS, _TOKENS, _ROWS,
        )  # fmt: skip
        launches.append(Launch(programs, arguments))
    return launches
