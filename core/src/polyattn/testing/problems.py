"""The tensors of a case: what a kernel is given, in the memory layouts and with the values that kernels trip over."""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..adapters.alignment import aligned
from ..contract import AttentionRequest
from .cases import Case
from .families import DTYPES, Family, family_of

__all__ = ["Maker", "Problem", "build", "off_boundary", "stored"]


_EARLY, _LATE = 0.5, 1.5
"""Times the usual size: the first and the last keys of a sequence whose logits grow."""

_SPREAD = 0.5
"""Times the usual size: what is added to numbers that are all far from 0. Less of it, and gradients would be made of
nothing but the rounding of sums that cancel; more, and a row would see a few keys only."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Holds everything that one case needs.

    Attributes:
        tensors: inputs by the call's argument names, `mask` standing for attn_mask; those in `request.grad` require
            gradients. extra: cu_seqlens, page tables and host ints.
        dout, dlse: upstream gradients, shaped like the output and the LSE.
    """

    case: Case
    tensors: Mapping[str, Tensor]
    extra: Mapping[str, Any]
    dout: Tensor
    dlse: Tensor

    @property
    def request(self) -> AttentionRequest:
        return self.case.request

    @property
    def family(self) -> Family:
        return family_of(self.case)

    @property
    def largest_value(self) -> float:
        """The largest magnitude among the values that outputs are averages of."""
        tensors = {name: t.detach() for name, t in self.tensors.items()}
        values = (part[2].float() for part in self.family.parts(self.case, tensors, self.extra))
        return max((float(v.abs().max()) for v in values if v.numel()), default=0.0)

    @property
    def through_lse(self) -> bool:
        """Return whether gradients are taken through the LSE: it depends neither on values nor on sinks."""
        return self.request.lse and not {"query", "key", "mask"}.isdisjoint(self.request.grad)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.case.request.dtype]


class Maker:
    """Makes the tensors of one case. Values are drawn on the CPU, so that every device gets the same ones."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device, self.family = case, device, family_of(case)
        self.dtype = DTYPES[case.request.dtype]
        self._generator = torch.Generator().manual_seed(zlib.crc32(case.id.encode()))

    def normal(self, *shape: int) -> Tensor:
        """float32 values on the CPU."""
        return torch.randn(shape, generator=self._generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator)

    def integers(self, *values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def permutation(self, count: int) -> list[int]:
        order: list[int] = torch.randperm(count, generator=self._generator).tolist()
        return order

    def input(self, name: str, *shape: int) -> Tensor:
        """A query, key or value in the case's dtype and storage."""
        values = self.family.shaped(self.case, name, self.normal(*shape))
        if name == "query":
            values = self.away(values)
        elif name == "key":
            values = self.keys(values, lambda: self.family.places(self.case))
        return stored(values.to(self.dtype), _storage(self.case, name), self.device)

    def keys(self, values: Tensor, places: Callable[[], Tensor]) -> Tensor:
        """Keys, or latent rows, of which the logits are as the case asks.

        Args:
            values: normal ones. places: tells where each lies in its sequence, from 0 to 1, to be multiplied with them.
        """
        if self.case.logits == "late":
            return values * (_EARLY + (_LATE - _EARLY) * places())
        return self.away(values, -1.0 if self.case.logits == "low" else 1.0)

    def away(self, values: Tensor, sign: float = 1.0) -> Tensor:
        """Queries (or with a sign keys) of which the products lie `Case.far` from 0. Of a row that is wider than its
        value, as a latent one may be, that is done by the rest of it: an output far from 0 would hide its errors."""
        r, far = self.case.request, self.case.far
        if not far:
            return values
        first = r.dims[1] if r.family == "mla" and r.dims[1] < r.head_dim else 0
        level = math.sqrt(far / (abs(r.softmax_scale) * (r.head_dim - first)))
        moved = values.clone()
        moved[..., first:] = _SPREAD * values[..., first:] + sign * level
        return moved

    def mask(self, batch: int, heads: int, s_q: int, s_k: int) -> Tensor | None:
        """attn_mask [B|1, H|1, S_q, S_k] as the case asks for it; None without one."""
        case, kind = self.case, self.case.request.mask
        if kind == "none":
            return None
        if case.request.tree:
            return self._tree(s_q, s_k)
        shape = (
            batch if case.mask_shape in ("full", "batch") else 1,
            heads if case.mask_shape in ("full", "heads") else 1,
            s_q,
            s_k,
        )
        keep = self.uniform(*shape) < 0.7
        if case.closed_rows:
            keep[:, :, ::5] = False
        else:
            keep[..., :1] = True
        values = keep if kind == "bool" else self.normal(*shape).masked_fill(~keep, float("-inf"))
        if kind == "additive":
            values = values.to(self.dtype if case.mask_dtype == "same" else torch.float32)
        if case.mask_shape == "expanded":
            return values.to(self.device).expand(batch, heads, s_q, s_k)
        storage = case.storage if case.storage in ("gapped", "padded", "misaligned") else "contiguous"
        return stored(values, storage, self.device)

    def _tree(self, s_q: int, s_k: int) -> Tensor:
        from ..semantics.reference import verify_mask

        parents = [-1] + [int(self.uniform(1) * node) for node in range(1, s_q)]
        return verify_mask(s_k - s_q, parents)[None, None].to(self.device)

    def alibi(self, heads: int) -> Tensor | None:
        """[H_q] slopes, a head without any among them: 0.5, 0.25, ... and 0."""
        if not self.case.request.alibi:
            return None
        slopes = [0.5 ** (1 + head % 4) if head % 5 else 0.0 for head in range(1, heads + 1)]
        return torch.tensor(slopes, dtype=torch.float32, device=self.device)

    def segments(self, batch: int, tokens: int) -> Tensor:
        """int32 [B, S], documents of a few tokens each: behind one another in every other row, else in any order."""
        found = (self.uniform(batch, tokens) * (1 + tokens // 9)).int()
        found[::2] = found[::2].sort(-1).values
        return found.to(self.device)

    def sinks(self, heads: int, longest: int) -> Tensor | None:
        """[H_q] logits: of the size of the others, 30 nats above any LSE, or (first head) switched off by -inf."""
        if not self.case.request.sinks:
            return None
        values = self.normal(heads)
        if self.case.sink == "dominant":
            return (values + 30 + math.log(max(longest, 1)) + 3).to(self.device)
        if self.case.sink == "off":
            values[0] = float("-inf")
            return values.to(self.device)
        return values.to(self.dtype).to(self.device)


def _storage(case: Case, name: str) -> str:
    # Keys and values may be shared along an axis, queries are not.
    return "contiguous" if case.storage == "expanded" and name == "query" else case.storage


def stored(values: Tensor, storage: str, device: torch.device) -> Tensor:
    """`values` on a device in one of the memory layouts of S1, all with a dense last axis; gaps hold NaN.

    Args:
        values: [B, S, H, D], [B, H, S, D] or [T, H, D].
        storage: `contiguous`; `gapped`, a gap behind each row that keeps rows on 16-byte boundaries; `padded`, one that
            does not; `transposed`, the axes of heads and positions swapped in memory; `misaligned`, a start off a
            16-byte boundary; `expanded`, one sample for the whole batch, or one head for all, by stride 0.
    """
    values = values.to(device)
    if storage in ("gapped", "padded"):
        width = values.shape[-1]
        wide = width + 3 if storage == "padded" else -(-width // 16) * 16 + 16
        sizes = [*(n + 1 for n in values.shape[:-1]), wide]
        buffer = torch.full(sizes, _fill(values), dtype=values.dtype, device=device)
        return buffer[tuple(slice(n) for n in values.shape)].copy_(values)
    if storage == "transposed":
        return values.transpose(-3, -2).contiguous().transpose(-3, -2)
    if storage == "misaligned":
        buffer = torch.full((values.numel() + 1,), _fill(values), dtype=values.dtype, device=device)
        return buffer[1:].view(values.shape).copy_(values)
    if storage == "expanded":
        return values.narrow(0 if values.dim() == 4 else 1, 0, 1).contiguous().expand(values.shape)
    return values.contiguous()


def _fill(values: Tensor) -> Any:
    return True if values.dtype == torch.bool else float("nan")


def off_boundary(case: Case) -> bool:
    """Return whether an input of the case, or a row of it, is off a 16-byte boundary: `AttentionRequest.misaligned`."""
    if case.storage in ("contiguous", "misaligned") or not case.lengths:
        return case.storage == "misaligned"
    dtype, shapes = DTYPES[case.request.dtype], family_of(case).shapes(case)
    return not all(_on_boundary(tuple(shape), dtype, _storage(case, name)) for name, shape in shapes.items())


@functools.lru_cache(maxsize=4096)
def _on_boundary(shape: tuple[int, ...], dtype: torch.dtype, storage: str) -> bool:
    meta = torch.device("meta")
    return aligned(stored(torch.empty(shape, dtype=dtype, device=meta), storage, meta))


def build(case: Case, device: torch.device) -> Problem:
    """The problem of a case. The same case gives the same values on every device."""
    family = family_of(case)
    maker = Maker(case, device)
    made, extra = family.make(case, maker)
    tensors = {name: t for name, t in made.items() if t is not None}
    for name in family.differentiated(case):
        tensors[name] = tensors[name].detach().requires_grad_()
    shape = family.out_shape(case)
    dout = maker.normal(*shape).to(maker.dtype).to(device)
    return Problem(case, tensors, extra, dout, maker.normal(*family.second_form(case)[0]).to(device))
