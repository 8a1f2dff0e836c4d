"""`dequantise_kv`: a quantised cache by a kernel that reads none."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..contract import AttentionRequest, Bound, PagedTables
from ..contract.request import changed
from ..registry.device_ops import device_ops
from .base import Lowering, Rewrite
from .widths import BYTES

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DequantiseKV"]

_SCALED = ("tensor", "head", "token")
_PER_NUMBER = ("", *_SCALED)
_SCALES = {
    ("paged", "fp8_e4m3"): _PER_NUMBER,
    ("paged", "fp8_e5m2"): _PER_NUMBER,
    ("paged", "int8"): _PER_NUMBER,
    ("paged", "fp4_e2m1"): ("block16",),
    ("mla", "fp8_e4m3"): ("block128", ""),
    ("mla", "fp8_e5m2"): ("",),
    ("mla", "fp4_e2m1"): ("block16",),
}
_FLOATS = ("bfloat16", "float16", "float32", "float64")
_NARROWER = {"float32": ("bfloat16", "float16"), "float64": ("float32", "bfloat16", "float16")}
"""What a cache may be in that a wider query reads without rounding."""


def _readable(request: AttentionRequest) -> bool:
    storage, family = request.kv_storage, request.family
    if request.dtype not in _FLOATS:
        return False
    if family == "mla" and request.kv_scales == "block128" and request.dims != (576, 512):
        return False
    scales = _SCALES.get((family, storage), ())
    if storage == request.dtype:
        # Nothing is stored in fewer bits, but the numbers are not those that the kernel would read.
        scales = _SCALED if family == "paged" else ()
    elif family in ("paged", "mla") and storage in _NARROWER.get(request.dtype, ()):
        scales = _PER_NUMBER if family == "paged" else ("",)
    return request.kv_scales in scales


class DequantiseKV(Lowering):
    """The pages that the table names are dequantised into a cache of the query's dtype, which the kernel reads.

    New rows are attended as the cache would round them (S9). With `save_kv_cache` they are stored in the caller's cache
    first, as it rounds them; else they are written into the dequantised one.
    """

    name = "dequantise_kv"
    summary = "the pages in the table are dequantised into a cache of the query's dtype"
    fields = frozenset({"kv_dtype", "kv_scales", "kv_storage", "save_kv_cache"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        if request.kv_parts or not _readable(request):
            return
        plain = changed(request, kv_dtype="auto", kv_scales="", save_kv_cache=None)
        scales = f" with scales by {request.kv_scales}" if request.kv_scales else ""
        # Of K and V each: read, written, and read by the kernel in the wider dtype.
        moved = 1 + 2 * BYTES[request.dtype] / BYTES.get(request.kv_storage, 1)
        told = f"each call moves {moved:.2g} times the bytes of the pages that it names"
        yield Rewrite((plain,), 5.0, detail=f"cache {request.kv_storage}{scales} -> {request.dtype}; {told}")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        from .lengths import check_size
        from .pages import Pool, Tokens, in_use, owned, renumbered

        kernel, size = inner[0], request.page_size
        width = request.kv_heads * max(request.dims)
        # One launch by the kernel of a package where it has one: core's operators are several passes over the pages.
        ops = functools.cache(lambda device_type: getattr(device_ops(device_type), "dequantised", None))

        def forward(
            query: Tensor,
            *caches: Tensor,
            tables: PagedTables,
            key: Tensor | None = None,
            value: Tensor | None = None,
            k_scale: Tensor | None = None,
            v_scale: Tensor | None = None,
            **given: Any,
        ) -> Any:
            read = in_use(tables, size)
            check_size(request, "dequantising the cache", read.numel() * size * width)
            table, copied = renumbered(read), ops(query.device.type)
            tokens = None if key is None else Tokens.of(query, tables)
            pages = functools.cache(lambda: owned(tables, size).flatten())  # of keys and values

            def numbers(cache: Tensor, scale: Tensor | None) -> Tensor:
                made = copied(request, cache, scale, read, tables.seq_lens) if copied else None
                if made is None:
                    return Pool(request, cache, scale).pages(pages(), query.dtype)
                return cast("Tensor", made)

            def plain(cache: Tensor, new: Tensor | None, scale: Tensor | None) -> Tensor:
                if new is None or tokens is None:
                    return numbers(cache, scale)
                pool, slots = Pool(request, cache, scale), tokens.slots(tables.page_table, size)
                if request.save_kv_cache:
                    pool.write(slots, new)
                readable = numbers(cache, scale)
                if not request.save_kv_cache:
                    rows = pool.rows(slots, query.dtype, new)
                    Pool(rewrite.inner[0], readable).write(tokens.slots(table, size), rows)
                return readable

            sides = zip(caches, (key, value), (k_scale, v_scale), strict=False)
            plains = [plain(*side) for side in sides]
            return kernel.forward(query, *plains, tables=tables.changed(page_table=table), **given)

        # torch.compile traces into no kernel of a package.
        return Bound(forward, traceable=False)
