"""A paged cache as a matrix of rows, which tensor descriptors can read: where each page and head begins (S9)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Matrix", "Memory", "Pools", "packed_pools", "pools_of"]


class Memory(NamedTuple):
    """What a descriptor needs of a tensor, without keeping its memory."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


class Matrix(NamedTuple):
    """Rows and columns, and elements from row to row."""

    rows: int
    columns: int
    step: int

    @property
    def shape(self) -> list[int]:
        return [self.rows, self.columns]

    @property
    def strides(self) -> list[int]:
        return [self.step, 1]


class Pools(NamedTuple):
    """Pools of keys and values as matrices of rows: of head h, page p starts at row `p * page_rows + h * row` and
    column `h * column`, and its tokens are rows that follow each other."""

    key: Matrix
    value: Matrix
    page_rows: int
    row: int
    column: int


def pools_of(key_cache: Tensor, value_cache: Tensor, hnd: bool) -> Pools | None:
    """None where descriptors cannot read pools: rows of a width that is no power of two, tokens that are no equal steps
    apart, keys and values in different order, addresses that are no multiple of 16 bytes.

    Args:
        key_cache, value_cache: [pages, page_size, H_kv, D | D_v], or with `hnd` [pages, H_kv, page_size, D | D_v].
    """
    if (key_cache.data_ptr() | value_cache.data_ptr()) & 15:
        return None
    axes = ((x.shape, x.stride(), x.dtype.itemsize) for x in (key_cache, value_cache))
    return _pools(hnd, *axes)


def packed_pools(key: Tensor, value: Tensor) -> Pools | None:
    """As `pools_of`, of packed keys and values [T_k, H_kv, D | D_v]: one page that holds all tokens."""
    if (key.data_ptr() | value.data_ptr()) & 15:
        return None
    # No views are made: a call of few tokens is not to wait for the host.
    axes = (((1, *x.shape), (x.shape[0] * x.stride(0), *x.stride()), x.dtype.itemsize) for x in (key, value))
    return _pools(False, *axes)


_Axes = tuple[tuple[int, ...], tuple[int, ...], int]


@functools.lru_cache(maxsize=1024)
def _pools(hnd: bool, key: _Axes, value: _Axes) -> Pools | None:
    found = [_matrix(hnd, *axes) for axes in (key, value)]
    if found[0] is None or found[1] is None or found[0][1] != found[1][1]:
        return None
    return Pools(found[0][0], found[1][0], *found[0][1])


def _matrix(
    hnd: bool, sizes: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> tuple[Matrix, tuple[int, int, int]] | None:
    """A pool, and (rows from page to page, rows and columns from head to head)."""
    pages, heads, tokens, width = sizes if hnd else (sizes[0], sizes[2], sizes[1], sizes[3])
    page, head, token, one = strides if hnd else (strides[0], strides[2], strides[1], strides[3])
    if (
        width & (width - 1)
        or width < 16
        or one != 1
        or token <= 0
        or token * itemsize % 16
        or not pages
        or page % token
    ):
        return None
    if hnd and head % token == 0:
        place = (page // token, head // token, 0)
        matrix = Matrix((pages - 1) * place[0] + (heads - 1) * place[1] + tokens, width, token)
    elif not hnd and head == width and heads * width <= token:
        place = (page // token, 0, width)
        matrix = Matrix((pages - 1) * place[0] + tokens, heads * width, token)
    else:
        return None
    return (matrix, place) if 0 < matrix.rows < 2**31 else None
