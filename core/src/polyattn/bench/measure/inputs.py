"""Inputs of a workload, in as many sets as it takes to leave the last-level cache: no call finds its data there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ...dispatch.device_facts import device_facts
from ...testing.families import DTYPES
from .workload import CACHED, Workload

if TYPE_CHECKING:
    from ...serving import KVPool
    from ...serving.step.step import Step

__all__ = ["Inputs", "cache_bytes", "make_inputs"]

_PAST_CACHE = 3
"""The input sets are together at least so many times as large as the cache."""
_MOST_SETS = 32
_SEED = 20
_T = TypeVar("_T")


@dataclasses.dataclass
class Inputs:
    """Describes what a workload's calls are given.

    Attributes:
        tensors: for each set, by the names of the contract's arguments. extra: arguments of all sets: tables, lengths.
        dout, dlse: for each set, the gradients that come in; empty where nothing is trained.
        step, pool: of families over a cache, as an engine has them: what libraries plan from, and the caches.
        backward_only: where something is trained, the forward belongs to preparing, and a call is the backward.
        density: of a block map. known: what was worked out from these tensors (`remembered`).
        layer: of the pool, which set 0 is.
    """

    workload: Workload
    device: torch.device
    tensors: list[dict[str, Tensor]]
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    dout: list[Tensor] = dataclasses.field(default_factory=list)
    dlse: list[Tensor] = dataclasses.field(default_factory=list)
    step: Step | None = None
    pool: KVPool | None = None
    backward_only: bool = False
    density: float = 0.25
    known: dict[str, Any] = dataclasses.field(default_factory=dict)
    layer: int = 0

    def only(self, number: int) -> Inputs:
        """Return one of the sets, as set 0."""
        if number == 0:
            return self
        own = {name: getattr(self, name)[number : number + 1] for name in ("tensors", "dout", "dlse")}
        known: dict[str, Any] = self.remembered(f"set {number}", dict)
        return dataclasses.replace(self, **own, known=known, layer=self.layer + number)

    def remembered(self, name: str, make: Callable[[], _T]) -> _T:
        """Return what `make` finds from these tensors, found once: there are many to be checked, and one reference."""
        if name not in self.known:
            self.known[name] = make()
        found: _T = self.known[name]
        return found

    @property
    def count(self) -> int:
        """Return the number of sets."""
        return len(self.tensors)

    def digest(self) -> dict[str, int]:
        """A number for each tensor of set 0 that changes when somebody writes to it."""
        return {name: _sum_of_bytes(t) for name, t in self.tensors[0].items()}

    def renew(self) -> None:
        """Write everything anew, where it is: calls that were prepared with it are to find it as it was."""
        made = make_inputs(
            self.workload, self.device, self.count, density=self.density, backward_only=self.backward_only
        )
        with torch.no_grad():
            for mine, new in zip(self._written(), made._written(), strict=True):
                mine.copy_(new)

    def _written(self) -> Iterator[Tensor]:
        """Return what a call could write to."""
        tables = self.extra.get("tables")
        for tensors in (*self.tensors, self.extra, {} if tables is None else tables._asdict()):
            yield from (t for t in tensors.values() if isinstance(t, Tensor))
        yield from (*self.dout, *self.dlse)

    @property
    def grows(self) -> bool:
        """Return whether such calls come with one key more each time, as those of a loop that appends to K and V."""
        request = self.workload.request
        return request.family == "dense" and request.s_relation == "one" and not self.workload.training

    def growing(self, first: int, count: int) -> Inputs:
        """Return these sets with other numbers of keys each: `first` fewer, one fewer than that, and so on, down to
        half of them. They are views, as dense as tensors that were made so, and their values are in other places."""
        axis, s_k = 1 if self.workload.request.layout == "BSHD" else 2, self.workload.longest[1]
        sets = []
        for number in range(first, first + count):
            given, keys = self.tensors[number % self.count], s_k - number % max(s_k // 2, 1)
            axes = {"key": axis, "value": axis, "attn_mask": 3}
            sets.append({name: _cut(t, axes[name], keys) if name in axes else t for name, t in given.items()})
        return dataclasses.replace(self, tensors=sets, known={})

    def leaves(self, number: int) -> dict[str, Tensor]:
        """A set whose tensors require the gradients that the request wants."""
        wanted = {_ARGUMENT.get(name, name) for name in self.workload.request.grad}
        return {n: t.detach().requires_grad_() if n in wanted else t for n, t in self.tensors[number].items()}


def _cut(tensor: Tensor, axis: int, length: int) -> Tensor:
    """The first elements of a contiguous tensor, in its shape with another length."""
    shape = [length if i == axis else size for i, size in enumerate(tensor.shape)]
    return tensor.view(-1)[: math.prod(shape)].view(shape)


_ARGUMENT = {"mask": "attn_mask"}
"""Names of gradients -> arguments, where they differ."""


def _sum_of_bytes(tensor: Tensor) -> int:
    whole = tensor.detach()
    return int(whole.reshape(-1).contiguous().view(torch.uint8).sum()) if whole.numel() else 0


def cache_bytes(device: torch.device) -> int:
    """Return the bytes of the device's last-level cache; 0 where it is not known, as on a CPU."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def make_inputs(
    workload: Workload,
    device: torch.device,
    sets: int | None = None,
    *,
    density: float = 0.25,
    backward_only: bool = False,
) -> Inputs:
    """
    Args:
        sets: how many; None = as many as leave the cache. density: share of the blocks that a block map keeps.
        backward_only: as `Inputs`.

    Raises:
        UnsupportedRequestError: no inputs are made for such a request.
    """
    workload.check_makeable()
    request = dataclasses.replace(workload.request, **device_facts(device))
    workload = dataclasses.replace(workload, request=request)
    maker = Maker(workload, device, density)
    count = sets or _sets(workload, device)
    if request.family in CACHED:
        from .cached import cached_inputs  # it imports the serving side

        return cached_inputs(maker, count)
    lengths = maker.lengths()
    tensors = [maker.dense() for _ in range(count)]
    made = Inputs(workload, device, tensors, lengths, backward_only=backward_only, density=density)
    if workload.training:
        maker.gradients(made)
    return made


def _sets(workload: Workload, device: torch.device) -> int:
    nbytes = _input_bytes(workload)
    least = -(-_PAST_CACHE * cache_bytes(device) // nbytes)
    return min(max(least, 2 if nbytes < 2**31 else 1), _MOST_SETS)


def _input_bytes(workload: Workload) -> int:
    """Return what a call reads of one set: queries, keys and values, those of a cache as far as a window sees them."""
    r, left = workload.request, workload.request.window[0]
    bound = left if r.family in CACHED and left >= 0 else math.inf
    keys = workload.shared + sum(min(s_k, bound + s_q) for s_q, s_k in workload.lengths)
    d, d_v = r.dims
    width = r.head_dim if r.family == "mla" else r.kv_heads * (d + d_v)
    size = DTYPES[r.dtype].itemsize
    stored = 1 if r.kv_storage not in ("float64", "float32", "bfloat16", "float16") else size
    return int(workload.tokens * r.heads * d * size + keys * width * stored)


class Maker:
    """Makes tensors on the device, always the same ones for the same workload."""

    def __init__(self, workload: Workload, device: torch.device, density: float) -> None:
        self.workload, self.device, self.density = workload, device, density
        self.request, self.dtype = workload.request, DTYPES[workload.request.dtype]
        self.random = torch.Generator(device).manual_seed(_SEED)

    def normal(self, *shape: int) -> Tensor:
        if self.dtype.itemsize == 1:
            return torch.randn(shape, device=self.device, generator=self.random).to(self.dtype)
        return torch.randn(shape, dtype=self.dtype, device=self.device, generator=self.random)

    def integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def starts(self, lengths: Sequence[int]) -> Tensor:
        """int32 [N+1]: cumulative lengths from 0."""
        return self.integers([0, *torch.tensor(lengths).cumsum(0).tolist()])

    def dense(self) -> dict[str, Tensor]:
        """Make one set of families dense, varlen and block_sparse."""
        r, w = self.request, self.workload
        tokens = {"query": (w.tokens, r.heads, r.head_dim)}
        keys = sum(s_k for _, s_k in w.lengths)
        tokens |= {"key": (keys, r.kv_heads, r.head_dim), "value": (keys, r.kv_heads, r.dims[1])}
        made = {name: self._laid_out(self.normal(*shape)) for name, shape in tokens.items()}
        return {**made, **self.options()}

    def _laid_out(self, packed: Tensor) -> Tensor:
        """Rows [B * S, H, D] in the layout of the request."""
        if self.request.family == "varlen":
            return self._placed(packed)
        rows = torch.unflatten(packed, 0, (self.workload.batch, -1))
        return self._placed(rows.transpose(1, 2).contiguous() if self.request.layout == "BHSD" else rows)

    def _placed(self, tensor: Tensor) -> Tensor:
        if not self.request.misaligned:
            return tensor
        room = tensor.new_empty(tensor.numel() + 1)
        return room[1:].view(tensor.shape).copy_(tensor)

    def options(self) -> dict[str, Tensor]:
        """The mask and the sinks of a set."""
        r, (s_q, s_k) = self.request, self.workload.longest
        made: dict[str, Tensor] = {}
        if r.sinks:
            made["sinks"] = self.normal(r.heads)
        if r.mask != "none" and r.family not in CACHED:
            seen = torch.rand(self.workload.batch, 1, s_q, s_k, device=self.device, generator=self.random) < 0.7
            # Everybody sees the first key: a row that sees none is a case of conformance, not of speed.
            seen[..., 0] = True
            bias = torch.zeros((), dtype=self.dtype, device=self.device).expand_as(seen)
            made["attn_mask"] = seen if r.mask == "bool" else bias.masked_fill(~seen, float("-inf"))
        return made

    def lengths(self) -> dict[str, Any]:
        """Return what a call says of its lengths, or of its blocks."""
        r, w = self.request, self.workload
        if r.family == "block_sparse":
            return self._blocks()
        if r.family != "varlen":
            return {}
        s_q, s_k = w.longest
        starts = self.starts([q for q, _ in w.lengths])
        # One tensor for both says that the lengths are equal.
        same = r.s_relation == "equal"
        keys = starts if same else self.starts([k for _, k in w.lengths])
        return {"cu_seqlens_q": starts, "cu_seqlens_k": keys, "max_seqlen_q": s_q, "max_seqlen_k": s_k}

    def _blocks(self) -> dict[str, Tensor]:
        """A map that keeps its share of the blocks, other ones for each row of blocks."""
        r, w, (s_q, s_k) = self.request, self.workload, self.workload.longest
        rows, columns = (-(-s // block) for s, block in zip((s_q, s_k), r.block_shape, strict=True))
        most = max(round(columns * self.density), 1)
        order = torch.rand(w.batch, r.heads, rows, columns, device=self.device, generator=self.random).argsort(-1)
        made = {
            "block_counts": torch.full((w.batch, r.heads, rows), most, dtype=torch.int32, device=self.device),
            "block_indices": order[..., :most].sort(-1).values.int(),
        }
        if r.block_starts:
            starts = torch.arange(columns, dtype=torch.int32, device=self.device) * r.block_shape[1]
            made["block_starts"] = starts.view(1, 1, -1)
            made["block_valid"] = (s_k - made["block_starts"]).clamp(max=r.block_shape[1])
        elif r.block_sizes:
            sizes = torch.full((columns,), r.block_shape[1], dtype=torch.int32, device=self.device)
            sizes[-1] = s_k - (columns - 1) * r.block_shape[1]
            made["block_valid"] = sizes
        return made

    def gradients(self, inputs: Inputs) -> None:
        """The gradients that come in, and the mask as an input of its own where it is trained."""
        query, value = inputs.tensors[0]["query"], inputs.tensors[0]["value"]
        shape = (*query.shape[:-1], value.shape[-1])
        inputs.dout = [self.normal(*shape) for _ in range(inputs.count)]
        if "lse" in self.request.grad:
            inputs.dlse = [self.normal(*shape[:-1]).float() for _ in range(inputs.count)]
