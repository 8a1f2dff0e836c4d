"""How a KV pool keeps rows of tokens: dtypes, bytes, scales (S9), and a tensor of rows, read and written by slot.

What a row is in each dtype, and how numbers are rounded, is `polyattn.semantics.kv_quant`'s. This file says which dtype
a layer gets, how large that is, who makes the scales, and where a slot is in memory. Slot: page * page_size + place,
int64.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ...contract import Keep
from ...dispatch.binding import dtype_name
from ...errors import ConfigError, InvalidInputError, did_you_mean
from ...selection.config.settings import KV_CACHE_DTYPES
from ...semantics.kv_quant import (
    FP4_BLOCK,
    LATENT_FORMATS,
    LatentFormat,
    fp4_scales,
    mla_pack,
    mla_unpack,
    real,
    stored,
)
from ...semantics.states import TORCH_DTYPES
from ...semantics.validation import contents_readable
from ..layer import KV, AttentionLayer

__all__ = ["KVCacheConfig", "RowFormat", "Rows", "formats", "token_keeps", "token_scales"]

LAYOUTS = ("NHD", "HND")

_RAW = ("uint8", "int32", "int64", "bool")
"""Rows that are bytes or whole numbers of their owner's own format: they are stored and read as they are."""

_PER_NUMBER = ("tensor", "head", "token")
_SCALES = {
    "fp8_e4m3": _PER_NUMBER,
    "fp8_e5m2": _PER_NUMBER,
    # A static scale is 1 until somebody sets it, with which these are whole numbers and keep next to nothing.
    "int8": ("token", "tensor", "head"),
    "fp4_e2m1": ("block16",),
}
"""Of keys and values, the default first. Latent rows in FP8 hold their own scales: block128."""

OTHER_LAYOUTS = {
    "vectorised": "its 16-byte groups of tokens are made by the vendor's own cache-writing kernel",
    "NZ": "its fractal blocks are made by the device's own cache-writing kernel",
}
"""Layouts that a capability row may name and a pool does not make, and why."""


@dataclasses.dataclass(frozen=True)
class KVCacheConfig:
    """How the caches of a model are kept, where a layer's keep does not say something else.

    Attributes:
        dtype: auto (that of the model) or what `--kv-cache-dtype` takes: bf16, fp16, fp8_e4m3, fp8_e5m2, fp4_e2m1, ...
            Kept as the name that requests use (bfloat16).
        page_size: tokens per page. layout: NHD or HND, see `negotiate_layout`; latent rows have none.
        scales: granularity of the scales of keys and values, "" = the usual of the dtype: tensor for fp8, token
            for int8 (the others of tensor, head and token are allowed too), block16 for fp4. Those by tensor and head
            are static, and 1 until `KVPool.set_scales`. Latent rows have those of `kv_quant.LATENT_FORMATS`: in
            fp8_e4m3 block128 where their widths allow it, else, and with "tensor", one scale of 1.

    Raises:
        ConfigError: a value that no cache has.
    """

    dtype: str = "auto"
    page_size: int = 16
    layout: Literal["NHD", "HND"] = "NHD"
    scales: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"KVCacheConfig: dtype={self.dtype!r} is not one of {', '.join(KV_CACHE_DTYPES)}."
                f"{did_you_mean(str(self.dtype), KV_CACHE_DTYPES)}"
            )
        object.__setattr__(self, "dtype", KV_CACHE_DTYPES[self.dtype])
        if not isinstance(self.page_size, int) or isinstance(self.page_size, bool) or self.page_size < 1:
            raise ConfigError(
                f"KVCacheConfig: page_size={self.page_size!r} is not a whole number of tokens >= 1, such as 16"
            )
        if self.layout not in LAYOUTS:
            why = OTHER_LAYOUTS.get(self.layout)
            because = f" ({why})" if why else ""
            raise ConfigError(
                f"KVCacheConfig: layout={self.layout!r} is not one that pools have{because}; allowed: "
                f"{', '.join(LAYOUTS)}.{did_you_mean(str(self.layout), LAYOUTS)} `negotiate_layout` finds one that the "
                f"phases' backends share"
            )
        known = ("", *_PER_NUMBER, "block16", "block128")
        if self.scales not in known:
            raise ConfigError(
                f"KVCacheConfig: scales={self.scales!r} is no granularity of scales; allowed: "
                f"{', '.join(repr(s) for s in known)}.{did_you_mean(str(self.scales), known)}"
            )


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """How rows of one kind (the keys, the values, or the latent rows of a layer) are kept.

    Attributes:
        kv_dtype: the request's word, never auto; of other rows it may also be uint8, int32, int64 or bool.
        scales: granularity, "" = none. heads, width: real numbers of a token, [H_kv, D].
        latent: one row serves all heads, as those of `mla`. layout: NHD or HND; latent rows have none.
    """

    kv_dtype: str
    scales: str
    heads: int
    width: int
    latent: bool = False
    layout: str = "NHD"

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the cache tensor."""
        return torch.uint8 if self.packed or self.kv_dtype == "fp4_e2m1" else TORCH_DTYPES[self.kv_dtype]

    @property
    def raw(self) -> bool:
        """Rows are stored and read as they are: no number is rounded."""
        return self.kv_dtype in _RAW

    @property
    def packed(self) -> bool:
        """A row is bytes that hold its own scales: latent rows in FP8 and FP4."""
        return self.latent and self.scales.startswith("block")

    @property
    def stored_width(self) -> int:
        """Entries of the last axis of the cache tensor."""
        if self.packed:
            return _latent_form(self.kv_dtype, self.scales).entries(self.width)
        return self.width // 2 if self.kv_dtype == "fp4_e2m1" else self.width

    @property
    def dynamic(self) -> bool:
        """Scales are made from the rows when they are written, and kept beside them."""
        return self.scales in ("token", "block16") and not self.packed

    @property
    def token_bytes(self) -> int:
        """Bytes of a token, with the scales that belong to it."""
        scales = {"token": 4, "block16": self.width // FP4_BLOCK}.get(self.scales, 0) if self.dynamic else 0
        return self.heads * (self.stored_width * self.dtype.itemsize + scales)

    def cache_shape(self, pages: int, page_size: int) -> tuple[int, ...]:
        if self.latent:
            return (pages, page_size, self.stored_width)
        return (pages, *self._inner(page_size), self.stored_width)

    def scale_shape(self, pages: int, page_size: int) -> tuple[int, ...] | None:
        """None: no scale tensor."""
        inner = self._inner(page_size)
        if self.packed:
            return None
        return {
            "tensor": (1,),
            "head": (self.heads,),
            "token": (pages, *inner),
            "block16": (pages, *inner, self.width // FP4_BLOCK),
        }.get(self.scales)

    def _inner(self, page_size: int) -> tuple[int, int]:
        return (self.heads, page_size) if self.layout == "HND" else (page_size, self.heads)


def formats(layer: AttentionLayer, config: KVCacheConfig, dtype: torch.dtype) -> tuple[RowFormat, ...]:
    """How a layer of a model in `dtype` keeps its (keys, values), or its (latent rows,), and after them what else it
    keeps by token: in the order of `token_keeps`.

    Raises:
        ConfigError: the layer's rows cannot be kept so. InvalidInputError: `dtype` is none of attention.
    """
    return tuple(_format(layer, keep, config, dtype) for keep in token_keeps(layer))


def token_keeps(layer: AttentionLayer) -> list[Keep]:
    """Return what a layer keeps by token: keys and values, or latent rows, first."""
    return [keep for keep in layer.kept if keep.per == "token"]


def _format(layer: AttentionLayer, keep: Keep, config: KVCacheConfig, dtype: torch.dtype) -> RowFormat:
    model, own = dtype_name(dtype), keep.name in KV
    # What a keep says is its own; the pool's dtype and scales are those of keys, values and latent rows.
    shared = config if own else KVCacheConfig(page_size=config.page_size)
    name = keep.dtype or (model if shared.dtype == "auto" else shared.dtype)
    wanted = keep.scales or ("" if keep.dtype else shared.scales)
    layout = keep.layout or config.layout
    if len(keep.shape) == 1:
        scales = _latent_scales(layer, wanted, name) if own else _no_scales(layer, keep, wanted, name)
        return RowFormat(name, scales, 1, keep.shape[0], latent=True, layout=layout)
    heads, width = keep.shape
    allowed = _SCALES.get(name, ("",))
    scales = wanted or allowed[0]
    if scales not in allowed:
        raise ConfigError(
            f"layer {layer.layer_id}: a cache in {name} has no scales by {scales}; allowed: "
            f"{', '.join(s or 'none' for s in allowed)}. Leave KVCacheConfig.scales empty for the usual one"
        )
    if name == "fp4_e2m1" and width % FP4_BLOCK:
        raise ConfigError(
            f"layer {layer.layer_id}: head dim {width} is no multiple of {FP4_BLOCK}, and fp4_e2m1 has one scale "
            f"for each {FP4_BLOCK} numbers of a row; keep the cache in fp8_e4m3"
        )
    return RowFormat(name, scales, heads, width, layout=layout)


def _no_scales(layer: AttentionLayer, keep: Keep, scales: str, name: str) -> str:
    """Rows of one's own, such as the keys of an indexer, have the scales that their owner puts into them."""
    if scales or name in _SCALES:
        by = scales or _SCALES[name][0]
        raise ConfigError(
            f"layer {layer.layer_id}: {keep.name} {list(keep.shape)} in {name} has scales by {by}, and rows "
            "for all heads other than latent ones have none: keep bytes (uint8) that hold their own scales, or rows by "
            "head, shape (H, D)"
        )
    return ""


def _latent_scales(layer: AttentionLayer, scales: str, name: str) -> str:
    if name not in _SCALES:
        if scales not in ("", "block128"):
            raise ConfigError(f"layer {layer.layer_id}: latent rows in {name} have no scales; leave scales empty")
        return ""
    known = [form for form in LATENT_FORMATS if form.kv_dtype == name]
    if not known:
        raise ConfigError(
            f"layer {layer.layer_id}: no format of latent rows in {name} is defined; take one of "
            f"{', '.join(dict.fromkeys(form.kv_dtype for form in LATENT_FORMATS))}, or bf16"
        )
    # One scale for all rows is 1.
    asked = [form for form in known if not scales or form.kv_scales == scales.replace("tensor", "")]
    fitting = [form for form in asked if form.takes(layer.dims)]
    if not fitting:
        how = f" with scales by {scales}" if scales else ""
        others = [form for form in known if form.takes(layer.dims)]
        instead = "Leave scales empty for the one that fits, or keep" if others else "Keep"
        raise ConfigError(
            f"layer {layer.layer_id}: no format of {name}{how} holds latent rows of (D_c + D_r, D_c) = {layer.dims}; "
            f"those of {name}: {'; '.join(map(_described, known))}. {instead} this model's cache "
            "in its own dtype (auto)"
        )
    return fitting[0].kv_scales


def _described(form: LatentFormat) -> str:
    free = f"widths that are multiples of {form.multiple_of}" if form.multiple_of > 1 else "any width"
    widths = f"{form.widths} only" if form.widths else free
    return f"{form.kv_scales or 'tensor (one scale of 1)'}, {widths}"


def _latent_form(kv_dtype: str, scales: str) -> LatentFormat:
    return next(form for form in LATENT_FORMATS if (form.kv_dtype, form.kv_scales) == (kv_dtype, scales))


def token_scales(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales float32 [..., H] for rows [..., H, D] in an 8-bit dtype: what makes the largest number of a row the
    largest of `dtype`; 1 for a row of zeros."""
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    largest = rows.abs().amax(-1).float()
    scale = (largest / limits.max).clamp(min=torch.finfo(torch.float32).tiny)
    return scale.where(largest > 0, 1.0)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros: a kernel that gathers whole pages multiplies numbers nobody wrote by weights of 0, and NaN stays NaN.
    On the CPU memory comes from the system as it is first touched: a pool is made for the worst case."""
    count = math.prod(shape)
    if device.type != "cpu" or not count:
        return torch.zeros(*shape, dtype=dtype, device=device)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, count * dtype.itemsize, **private)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)


Index = tuple[Tensor, ...]
"""(slot,) where the tokens of a pool follow each other in memory, else (page, place in it); int64 [T]."""


def _put(where: Tensor, index: Index, rows: Tensor) -> None:
    rows = rows.view(torch.uint8) if where.dtype == torch.uint8 else rows
    if len(index) == 1:
        where.index_copy_(0, *index, rows)
    else:
        where[index] = rows


def _take(where: Tensor, index: Index) -> Tensor:
    return where.index_select(0, *index) if len(index) == 1 else where[index]


class Rows:
    """A cache tensor with its scales, read and written by slot.

    Attributes:
        cache: [pages, page_size, H_kv, D] (NHD), [pages, H_kv, page_size, D] (HND) or [pages, page_size, D] (latent);
            D as stored. scale: None, [1], [H_kv], or one per token in the cache's layout (block16: D/16 wide).
    """

    @torch.inference_mode(False)
    def __init__(self, form: RowFormat, pages: int, page_size: int, device: torch.device) -> None:
        self.form, self.page_size = form, page_size
        self._flat = form.latent or form.layout == "NHD"
        self.cache = _zeros(form.cache_shape(pages, page_size), form.dtype, device)
        shape = form.scale_shape(pages, page_size)
        self.scale: Tensor | None = None
        if shape is not None:
            kind = torch.float8_e4m3fn if form.scales == "block16" else torch.float32
            self.scale = _zeros(shape, kind, device) if form.dynamic else torch.ones(shape, dtype=kind, device=device)
        scale = self.scale.unsqueeze(-1) if self.scale is not None and form.scales == "token" else self.scale
        # What lies token by token, as numbers that every device can copy.
        self._stored = self._by_token(self.cache)
        self._scales = self._by_token(scale) if scale is not None and form.dynamic else None
        self._static = scale.view(-1, 1) if scale is not None and not form.dynamic else None

    def _by_token(self, tensor: Tensor) -> Tensor:
        """A view that an `Index` picks rows [T, H_kv, ...] of."""
        tensor = tensor.unsqueeze(2) if self.form.latent else tensor
        tensor = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        return tensor.view(-1, *tensor.shape[2:]) if self._flat else tensor.transpose(1, 2)

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def index(self, slots: Tensor) -> Index:
        """Return where slots [T] are, for this cache and all of its page size that are as `flat`."""
        return (slots,) if self._flat else (slots // self.page_size, slots % self.page_size)

    @property
    def flat(self) -> bool:
        """Return whether the tokens of the pool follow each other in memory, so that a slot is an index."""
        return self._flat

    def write(self, index: Index, new: Tensor) -> None:
        """Store rows [T, H_kv, D]; scales that belong to tokens are made here."""
        new = new.detach() if new.requires_grad else new
        if self.form.packed:
            _put(self._stored, index, mla_pack(new, self.form.kv_dtype, self.form.scales))
        elif self.form.raw:
            _put(self._stored, index, new)
        else:
            _put(self._stored, index, stored(new, self.make_scales(index, new), self.form.dtype))

    def make_scales(self, index: Index, new: Tensor) -> Tensor | None:
        """Store the scales of rows [T, H_kv, D] where they belong to tokens; the scales, broadcastable (block16: D/16)
        to the rows."""
        if self._scales is None:
            return self._static
        by_block = self.form.scales == "block16"
        scale = fp4_scales(new) if by_block else token_scales(new, self.form.dtype).unsqueeze(-1)
        _put(self._scales, index, scale)
        return scale

    def read(self, index: Index, dtype: torch.dtype) -> Tensor:
        """Real values [T, H_kv, D]; raw rows as they are stored, whatever `dtype` says."""
        rows, form = _take(self._stored, index), self.form
        if form.raw:
            return rows.view(form.dtype)
        if form.packed:
            return mla_unpack(rows).to(dtype)
        scale = self._static
        if self._scales is not None:
            taken = _take(self._scales, index)
            scale = taken.view(torch.float8_e4m3fn) if form.scales == "block16" else taken
        return real(rows.view(form.dtype), scale, dtype)

    def move(self, sources: Index, targets: Index) -> None:
        """Copy tokens as they are stored. All are read before one is written."""
        for tensor in (self._stored, self._scales):
            if tensor is not None:
                _put(tensor, targets, _take(tensor, sources))

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages [M] to pages [M]."""
        for tensor in (self.cache, self.scale if self.form.dynamic else None):
            if tensor is not None:
                plain = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
                plain.index_copy_(0, targets, plain.index_select(0, sources))

    def check_scale(self, name: str, value: float | Tensor) -> None:
        """Check a static scale, [1] or [H_kv].

        Raises:
            InvalidInputError: another shape, numbers that are no scales, or a cache that has none.
        """
        form = self.form
        if self._static is None:
            made = "made as rows are written" if form.dynamic else "none"
            raise InvalidInputError(
                f"{name}: the scales of this cache in {form.kv_dtype} are {made}; static ones go with fp8 or int8 and "
                f"KVCacheConfig(scales='tensor') or 'head'"
            )
        if not isinstance(value, (int, float, Tensor)) or isinstance(value, bool):
            raise InvalidInputError(f"{name} is a {type(value).__name__}; give a number or a float tensor")
        given = value if isinstance(value, Tensor) else torch.tensor(float(value))
        one = form.scales == "tensor"
        if not given.is_floating_point() or not (given.numel() == 1 if one else tuple(given.shape) == (form.heads,)):
            allowed = "one number" if one else f"[{form.heads}] (H_kv)"
            raise InvalidInputError(
                f"{name} is {list(given.shape)} {given.dtype}; with scales by {form.scales} a float tensor of "
                f"{allowed} is needed"
            )
        if contents_readable(given) and not bool(((given > 0) & given.isfinite()).all()):
            raise InvalidInputError(
                f"{name} has {given.flatten().tolist()[:8]}; a scale is finite and above 0: a stored number times its "
                f"scale is the real value"
            )

    def set_scale(self, value: float | Tensor) -> None:
        """Set a static scale that was checked, in place."""
        if self._static is not None:
            given = value if isinstance(value, Tensor) else torch.tensor(float(value))
            self._static.copy_(given.reshape(-1, 1))
