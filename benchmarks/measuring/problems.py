"""The problem of a row: its inputs, in as many sets as it takes to leave the L2 cache, its work, and its check.

Inputs are made from a seed, so that the parts of a run, and runs, have the same ones. Peers get the tensors of the
problem and bring them into their own layout before anything is timed.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn.quantised import stored
from polyattn.serving import (
    AttentionLayer,
    DraftTree,
    ForwardBatch,
    ForwardMode,
    KVCacheConfig,
    KVPool,
    PageAllocator,
    RequestTable,
)
from polyattn.serving.step import Step, StepBuffers

from .reference import attention, distance, gradients
from .sheet import Row

__all__ = ["Backward", "BlockSparse", "Dense", "Latent", "Paged", "Problem", "problem_of"]

_TYPE = torch.bfloat16
_PAST_CACHE = 3
"""The input sets of a problem are together at least so many times as large as the L2 cache."""
_MOST_SETS = 32
_SLICE = 64
"""Queries of a sequence that are checked: so many at its start, in its middle and at its end."""


def cache_bytes(device: torch.device) -> int:
    """Of the device's L2 cache; 0 on a CPU, whose times nobody reads."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


class Problem(abc.ABC):
    """
    Attributes:
        row, device. sets: how many input sets there are; a call is given one of them by number.
        tolerance: which of the sheet's its results are held to.
    """

    tolerance = "output"

    def __init__(self, row: Row, device: torch.device, sets: int | None = None) -> None:
        self.row, self.device = row, device
        least = -(-_PAST_CACHE * cache_bytes(device) // self.input_bytes())
        self.sets = sets or min(max(least, 2 if self.input_bytes() < 2**31 else 1), _MOST_SETS)
        self._random = torch.Generator(device).manual_seed(20)

    @abc.abstractmethod
    def input_bytes(self) -> int:
        """Of one input set."""

    @abc.abstractmethod
    def work(self) -> float:
        """Floating-point operations, or bytes of the cache, of one call."""

    @abc.abstractmethod
    def errors(self, result: Any) -> tuple[float, float]:
        """How far the result of set 0 is from float64, in rows that stand for all: `reference.distance`."""

    def rate(self, seconds: float) -> float:
        """Work per second, in the row's unit."""
        return self.work() / seconds / (1e9 if self.row.recorded else 1e12)

    def normal(self, *shape: int, dtype: torch.dtype = _TYPE) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=self.device, generator=self._random)

    def spread(self, length: int) -> Tensor:
        """Rows to check of `length` ones, int64."""
        middle = length // 2
        starts = (0, max(middle - _SLICE // 2, 0), max(length - _SLICE, 0))
        return torch.cat([torch.arange(s, min(s + _SLICE, length)) for s in starts]).unique().to(self.device)


class Dense(Problem):
    """query [B, S, H_q, D], key [B, S, H_kv, D], value [B, S, H_kv, D_v]; results [B, S, H_q, D_v]."""

    def __init__(self, row: Row, device: torch.device, sets: int | None = None) -> None:
        super().__init__(row, device, sets)
        (d, d_v), (b, s) = row.dims, (row.batch, row.q_len)
        shapes = ((b, s, row.heads, d), (b, s, row.kv_heads, d), (b, s, row.kv_heads, d_v))
        self.inputs = [tuple(self.normal(*shape) for shape in shapes) for _ in range(self.sets)]

    def input_bytes(self) -> int:
        row, (d, d_v) = self.row, self.row.dims
        return 2 * row.batch * row.q_len * (row.heads * d + row.kv_heads * (d + d_v))

    def work(self) -> float:
        """Two products; a causal mask leaves half of them."""
        row = self.row
        return 2 * row.batch * row.heads * row.q_len**2 * sum(row.dims) * (0.5 if row.causal else 1)

    @property
    def scale(self) -> float:
        return self.row.head_dim**-0.5

    def heads_first(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Set `number` as [B, H, S, D], contiguous."""
        q, k, v = (t.transpose(1, 2).contiguous() for t in self.inputs[number])
        return q, k, v

    @functools.cached_property
    def wanted(self) -> list[tuple[int, int, Tensor]]:
        """(batch, head, float64 [R, D_v])."""
        (q, k, v), rows = self.inputs[0], self.spread(self.row.q_len)
        seen = torch.arange(self.row.q_len, device=self.device) <= rows[:, None] if self.row.causal else None
        found = []
        for b, h in {(0, 0), (self.row.batch - 1, self.row.heads - 1)}:
            kv = h * self.row.kv_heads // self.row.heads
            found.append((b, h, attention(q[b, rows, h], k[b, :, kv], v[b, :, kv], self.scale, seen)))
        return found

    def errors(self, result: Tensor) -> tuple[float, float]:
        rows = self.spread(self.row.q_len)
        return _worst([distance(result[b, rows, h], wanted) for b, h, wanted in self.wanted])


class Backward(Dense):
    """As `Dense`, with the gradient of the output; results are (dquery, dkey, dvalue)."""

    tolerance = "gradient"

    def __init__(self, row: Row, device: torch.device, sets: int | None = None) -> None:
        super().__init__(row, device, sets)
        shape = (row.batch, row.q_len, row.heads, row.dims[1])
        self.douts = [self.normal(*shape) for _ in range(self.sets)]

    def work(self) -> float:
        """Five products where the forward has two."""
        return 2.5 * super().work()

    @functools.cached_property
    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the last KV head of the last sequence, float64: [G, S, D], [S, D], [S, D_v]."""
        (q, k, v), group = self.inputs[0], self.row.heads // self.row.kv_heads
        heads = (t[-1, :, -group:].transpose(0, 1) for t in (self.douts[0], q))
        return gradients(*heads, k[-1, :, -1], v[-1, :, -1], self.scale, self.row.causal)

    def errors(self, result: tuple[Tensor, Tensor, Tensor]) -> tuple[float, float]:
        group = self.row.heads // self.row.kv_heads
        dq, dk, dv = result
        found = (dq[-1, :, -group:].transpose(0, 1), dk[-1, :, -1], dv[-1, :, -1])
        return _worst([distance(f, w) for f, w in zip(found, self.gradients, strict=True)])


class Serving(Problem):
    """A step over a paged pool as `polyattn.serving` keeps it: an input set is a layer with its own cache; all share
    the page tables, as the layers of a model do. Pages of the sequences are mixed, as they are after a while."""

    latent = False

    def __init__(self, row: Row, device: torch.device, sets: int | None = None) -> None:
        super().__init__(row, device, sets)
        (d, d_v), scale = row.dims, self.scale
        self.layers = [
            AttentionLayer(i, row.heads, row.kv_heads, d, d_v, scale=scale, latent=self.latent)
            for i in range(self.sets)
        ]
        own = -(-(row.kv_len - row.shared) // row.page_size)
        self.pages = 1 + row.batch * own + row.shared // row.page_size
        config = KVCacheConfig(dtype=row.kv_dtype, page_size=row.page_size)
        self.pool = KVPool(self.layers, config, self.pages, dtype=_TYPE, device=device)
        self._fill()
        self.table, numbers = self._table()
        self.queries = [self.normal(row.batch * row.q_len, row.heads, d) for _ in range(self.sets)]
        mode = ForwardMode.TARGET_VERIFY if row.tree else ForwardMode.DECODE if row.q_len == 1 else ForwardMode.EXTEND
        self.batch = ForwardBatch(
            mode, numbers, [row.kv_len] * row.batch, [row.q_len] * row.batch, self._tree() if row.tree else None
        )
        columns = self.table.tables[0].shape[1]
        self._buffers = StepBuffers(row.batch, row.batch * row.q_len, columns, device=device)
        self.step: Step = self._buffers.build(self.batch, self.table)[0]

    def _fill(self) -> None:
        for layer in self.layers:
            cache = self.pool.cache(layer.layer_id)
            for tensor in cache.tensors:
                if tensor.dtype == _TYPE:
                    tensor.normal_(generator=self._random)
                else:
                    for page in tensor.split(4096):
                        page.copy_(stored(self.normal(*page.shape), None, tensor.dtype))
            for factor in (cache.k_scale, cache.v_scale):
                if factor is not None:
                    factor.fill_(0.75)

    def _table(self) -> tuple[RequestTable, list[int]]:
        row = self.row
        table = RequestTable(
            row.batch + 1, row.kv_len, row.page_size, [-1], [PageAllocator(self.pages)], device=self.device
        )
        numbers = [table.add()]
        table.extend(numbers[0], row.shared)
        numbers += [table.fork(numbers[0]) for _ in range(row.batch - 1)]
        step = max(row.page_size, 64)
        for start in range(row.shared, row.kv_len, step):
            for number in numbers:
                table.extend(number, min(step, row.kv_len - start))
        table.flush()
        return table, numbers

    def _tree(self) -> DraftTree:
        """Each node below one of the four before it: deep and bushy."""
        nodes = torch.arange(self.row.q_len, device=self.device)
        back = torch.randint(1, 5, (self.row.batch, self.row.q_len), device=self.device, generator=self._random)
        return DraftTree.from_parents((nodes - back).clamp(min=0).where(nodes > 0, -1))

    @property
    def scale(self) -> float:
        return float(self.row.head_dim**-0.5)

    def row_bytes(self) -> float:
        """Of one token in one layer, scales apart."""
        return sum(t.itemsize * t.numel() / (self.pages * self.row.page_size) for t in self.pool.cache(0).tensors)

    def input_bytes(self) -> int:
        row, width = self.row, sum(self.row.dims) if not self.latent else self.row.head_dim
        size = 1 if row.kv_dtype.startswith("fp8") else 2
        return (row.batch * (row.kv_len - row.shared) + row.shared) * row.kv_heads * width * size

    def work(self) -> float:
        """Bytes of all keys and values that a decode step sees, shared ones once for each sequence; of other steps
        the operations."""
        row = self.row
        if row.recorded:
            return row.batch * row.kv_len * self.row_bytes()
        prefix = row.kv_len - row.q_len
        return 2 * row.batch * row.heads * sum(row.dims) * (row.q_len * prefix + row.q_len * (row.q_len + 1) / 2)

    @abc.abstractmethod
    def keys_of(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Float64 keys and values of a sequence in set 0: [H_kv, S_k, D], [H_kv, S_k, D_v]."""

    def pages_of(self, tensor: Tensor, sequence: int) -> Tensor:
        """Stored rows of a sequence: [S_k, ...]."""
        pages = self.step.page_table[sequence, : -(-self.row.kv_len // self.row.page_size)].long()
        return tensor[pages].flatten(0, 1)[: self.row.kv_len]

    @functools.cached_property
    def wanted(self) -> list[tuple[int, Tensor]]:
        """(sequence, float64 [R, H_q, D_v])."""
        row, rows, found = self.row, self.spread(self.row.q_len), []
        places = torch.arange(row.kv_len, device=self.device)
        for n in sorted({0, row.batch - 1}):
            if self.batch.tree is None:
                seen = places <= rows[:, None] + row.kv_len - row.q_len
            else:
                prefix = torch.ones(row.q_len, row.kv_len - row.q_len, dtype=torch.bool, device=self.device)
                seen = torch.cat([prefix, self.batch.tree.mask[n]], 1)[rows]
            query = self.queries[0].unflatten(0, (row.batch, row.q_len))[n, rows].transpose(0, 1)
            query = query.unflatten(0, (row.kv_heads, -1))  # [H_kv, G, R, D]
            key, value = (t.unsqueeze(1) for t in self.keys_of(n))
            found.append((n, attention(query, key, value, self.scale, seen).flatten(0, 1).transpose(0, 1)))
        return found

    def errors(self, result: Tensor) -> tuple[float, float]:
        row = self.row
        out = result.view(row.batch, row.q_len, row.heads, row.dims[1])
        rows = self.spread(row.q_len)
        return _worst([distance(out[n, rows], wanted) for n, wanted in self.wanted])


class Paged(Serving):
    """queries [T_q, H_q, D], caches [pages, page_size, H_kv, D]; results [T_q, H_q, D]."""

    def caches(self, number: int) -> tuple[Tensor, Tensor]:
        key, value = self.pool.cache(number).tensors
        return key, value

    def keys_of(self, sequence: int) -> tuple[Tensor, Tensor]:
        cache = self.pool.cache(0)
        rows = (self.pages_of(t, sequence).double().transpose(0, 1) for t in self.caches(0))
        factors = (1.0 if f is None else f.double() for f in (cache.k_scale, cache.v_scale))
        key, value = (r * f for r, f in zip(rows, factors, strict=True))
        return key, value


class Latent(Serving):
    """queries [T_q, H_q, 576], cache [pages, page_size, 576]; results [T_q, H_q, 512]."""

    latent = True

    @property
    def scale(self) -> float:
        """Of DeepSeek's uncompressed heads."""
        return float(192**-0.5)

    def cache(self, number: int) -> Tensor:
        return self.pool.cache(number).tensors[0]

    def keys_of(self, sequence: int) -> tuple[Tensor, Tensor]:
        rows = self.pages_of(self.cache(0), sequence).double().unsqueeze(0)
        return rows, rows[..., : self.row.v_head_dim]


class BlockSparse(Problem):
    """query, key, value [B, H, S, D]; block_counts int32 [B, H, S / block], block_indices [..., most]."""

    def __init__(self, row: Row, device: torch.device, sets: int | None = None) -> None:
        super().__init__(row, device, sets)
        heads = (row.heads, row.kv_heads, row.kv_heads)
        self.inputs = [
            tuple(self.normal(row.batch, h, row.q_len, row.head_dim) for h in heads) for _ in range(self.sets)
        ]
        blocks = row.q_len // row.block
        self.most = max(round(row.density * blocks), 1)
        order = self.normal(row.batch, row.heads, blocks, blocks, dtype=torch.float32).argsort(-1)
        self.indices = order[..., : self.most].sort(-1).values.int()
        self.counts = torch.full(self.indices.shape[:3], self.most, dtype=torch.int32, device=device)

    def input_bytes(self) -> int:
        row = self.row
        return 2 * row.batch * row.q_len * row.head_dim * (row.heads + 2 * row.kv_heads)

    def work(self) -> float:
        row = self.row
        return 4 * row.batch * row.heads * row.q_len * self.most * row.block * row.head_dim

    def errors(self, result: Tensor) -> tuple[float, float]:
        (q, k, v), row, found = self.inputs[0], self.row, []
        blocks = row.q_len // row.block
        for h, block in {(0, 0), (row.heads // 2, blocks // 2), (row.heads - 1, blocks - 1)}:
            kv, rows = h * row.kv_heads // row.heads, slice(block * row.block, (block + 1) * row.block)
            places = torch.arange(row.block, device=self.device)
            keys = (self.indices[-1, h, block].long()[:, None] * row.block + places).flatten()
            wanted = attention(q[-1, h, rows], k[-1, kv, keys], v[-1, kv, keys], row.head_dim**-0.5)
            found.append(distance(result[-1, h, rows], wanted))
        return _worst(found)


def _worst(found: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return max(f[0] for f in found), max(f[1] for f in found)


_KINDS: dict[str, type[Problem]] = {
    "dense": Dense,
    "backward": Backward,
    "paged": Paged,
    "latent": Latent,
    "block_sparse": BlockSparse,
}


def problem_of(row: Row, device: torch.device, sets: int | None = None) -> Problem:
    """sets: input sets, None = as many as leave the cache."""
    return _KINDS[row.kind](row, device, sets)
