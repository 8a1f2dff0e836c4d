"""What launches of the dense and packed kernels are given, forward and backward alike: sizes, strides, masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from polyattn_triton.kernels import rules  # first: it decides how Triton is imported
from polyattn_triton.kernels.tiles import Spec, architecture, parts

from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip

__all__ = [
    "MASKS",
    "Sizes",
    "Strides",
    "configured",
    "constants_of",
    "covers",
    "describable",
    "descriptor",
    "known_aligned",
    "mask_arguments",
    "near",
    "numbers_of",
    "sizes_of",
    "strides_of",
    "units_of",
]

_C = TypeVar("_C")
Strides = tuple[int, int, int]
"""Of (sequence, token, head)."""

_NEAR = 24 << 20
"""Bytes of keys and values that programs running at one time may share in the L2 cache."""


class Sizes(NamedTuple):
    """Sizes of a call; lengths of a packed one are those of its longest sequences."""

    batch: int
    heads: int
    heads_k: int
    s_q: int
    s_k: int
    width: int
    v_width: int

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.heads_k

    @property
    def widest(self) -> int:
        return max(self.width, self.v_width)


def sizes_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: str,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Sizes:
    """The sizes of a call. Tensors as `kernels.forward.forward`."""
    widths = query.shape[-1], value.shape[-1]
    if layout == "THD":
        assert cu_seqlens_q is not None
        batch, heads, heads_k = cu_seqlens_q.shape[0] - 1, query.shape[1], key.shape[1]
        return Sizes(batch, heads, heads_k, max_seqlen_q, max_seqlen_k, *widths)
    token, head = (1, 2) if layout == "BSHD" else (2, 1)
    at_q, at_k = query.shape, key.shape
    return Sizes(at_q[0], at_q[head], at_k[head], at_q[token], at_k[token], *widths)


def strides_of(tensor: Tensor, layout: str) -> Strides:
    """Strides of (sequence, token, head) for layout BSHD, BHSD or THD."""
    if layout == "BSHD":
        z, m, h, _ = tensor.stride()
        return z, m, h
    if layout == "BHSD":
        z, h, m, _ = tensor.stride()
        return z, m, h
    m, h, _ = tensor.stride()
    return 0, m, h


def units_of(*tensors: Tensor, layout: str) -> tuple[int, bool, list[int]]:
    """(unit, loose, strides in units): how kernels are told where rows lie.

    The compiler makes vectors of what it knows to start at 16 bytes, and of a number it knows at most whether it is a
    multiple of 16: 40, the stride of one head of 40, is not. So strides go in as numbers of 16 bytes, where they all
    are, and the kernel multiplies by the unit. `loose`: rows of 16-bit numbers that do not all start at 16 bytes.
    """
    itemsize = tensors[0].itemsize
    unit = 16 // itemsize
    found = [stride for tensor in tensors for stride in strides_of(tensor, layout)]
    if any(stride % unit for stride in found):
        return 1, itemsize == 2, found
    loose = itemsize == 2 and any(tensor.data_ptr() & 15 for tensor in tensors)
    return unit, loose, [stride // unit for stride in found]


def known_aligned(*rows: Tensor) -> bool:
    """Whether the compiler knows that rows begin at 16 bytes."""
    return not any(x.data_ptr() & 15 or any(step & 15 for step in x.stride()[:-1]) for x in rows)


MASKS = ("", "bool", "additive")
"""Names of the kinds of mask, as `mask_arguments` numbers them."""


def mask_arguments(attn_mask: Tensor | None) -> tuple[int, Tensor | None, tuple[int, int, int, int]]:
    """(kind, tensor, strides) of a mask [B|1, H|1, S_q, S_k]; an axis that is shared has a stride of 0."""
    if attn_mask is None:
        return 0, None, (0, 0, 0, 0)
    z, h, m, n = attn_mask.stride()
    strides = (z if attn_mask.shape[0] > 1 else 0, h if attn_mask.shape[1] > 1 else 0, m, n)
    if attn_mask.dtype == torch.bool:
        return 1, attn_mask.view(torch.uint8), strides
    return 2, attn_mask, strides


def descriptor(tensor: Tensor, layout: str, sizes: tuple[int, int, int], rows: int, width: int) -> Any:
    """A tensor descriptor [B, S, H, D] whose blocks are `rows` tokens of one head; sizes of (B, S, H)."""
    strides = strides_of(tensor, layout)
    return TensorDescriptor(tensor, [*sizes, tensor.shape[-1]], [*strides, 1], [1, rows, 1, width])


def describable(tensor: Tensor, layout: str) -> bool:
    """Whether a tensor can be described: the start and every stride on a boundary of 16 bytes."""
    z, m, h = strides_of(tensor, layout)
    return not (tensor.data_ptr() & 15 or (z | m | h) * tensor.itemsize & 15) and z > 0 and m > 0 and h > 0


def near(rows: int, sizes: Sizes, itemsize: int) -> int:
    """How many (sequence, head) pairs run together, where each keeps `rows` rows in the L2 cache."""
    return max(1, _NEAR // max(1, rows * (sizes.width + sizes.v_width) * itemsize))


def numbers_of(spec: Spec, sizes: Sizes) -> tuple[float, ...]:
    """s_q, s_k, left, right, chunk, scale, softcap as kernels take them."""
    return (sizes.s_q, sizes.s_k, spec.left, spec.right, spec.chunk, *rules.scales(spec.scale, spec.softcap))


def covers(width: int, loose: bool) -> tuple[int, int]:
    """Widths of the tiles that cover a head dim; why those of loose rows are wider: `constants_of`."""
    return parts((width + 63) // 64 * 64 if loose else width)


def constants_of(spec: Spec, sizes: Sizes, mask: int, unit: int, loose: bool) -> dict[str, Any]:
    """What a kernel is compiled for, besides its configuration. `mask`: see `mask_arguments`; `unit`: see `units_of`.

    Loose rows go to shared memory by way of registers, keys and values to the same place. Where they are wider or
    narrower than each other there, ptxas 12.8 (in Triton 3.6) mistakes a register that descriptors of `wgmma` are made
    from. It does not from 64 columns on: those are all laid out alike.
    """
    (d1, d2), (e1, e2) = covers(sizes.width, loose), covers(sizes.v_width, loose)
    return {
        "D": sizes.width, "D1": d1, "D2": d2, "E": sizes.v_width, "E1": e1, "E2": e2, "UNIT": unit,
        "GROUP": sizes.group, "TOP_LEFT": spec.top_left, "LEFT": spec.left >= 0, "RIGHT": spec.right >= 0,
        "CHUNK": spec.chunk > 0, "SOFTCAP": spec.softcap > 0, "MASK": mask,
        # A scale above 0 is left to the softmax; below, the largest product is not the largest logit.
        "FOLD": not spec.softcap and spec.scale > 0 and mask != 2,
    }  # fmt: skip


def configured(table: Mapping[tuple[str, int, int], _C], device: torch.device, itemsize: int, width: int) -> _C:
    """The entry of a table by (architecture, bytes of a number, widest head dim up to)."""
    where = architecture(device)
    size = 4 if where == "interpreter" else itemsize
    return next(
        found
        for name in (where, "")
        for (wanted, bytes_, widest), found in table.items()
        if wanted == name and bytes_ == size and width <= widest
    )
