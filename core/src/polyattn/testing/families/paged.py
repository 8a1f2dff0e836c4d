"""Family `paged`: keys and values of each head in a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ... import paged_attention
from ...semantics.kv_quant import FP4_BLOCK, real, stored
from ..cases import Case
from .base import DTYPES, Call
from .cached import SERVING, Cached, Table
from .packed import starts_of
from .public import keywords

if TYPE_CHECKING:
    from ..problems import Maker

__all__ = ["Paged"]

_STORED = {**DTYPES, "int8": torch.int8, "fp4_e2m1": torch.uint8}


class Paged(Cached):
    """Places that no sequence owns hold NaN, or in a cache of integers the largest of them."""

    family = "paged"
    optional = ("key", "value", "attn_mask", "sinks", "k_scale", "v_scale")
    caches = ("key_cache", "value_cache")
    scales = ("k_scale", "v_scale")
    says = SERVING | {"alibi", "kv_layout", "save_kv_cache"}
    unmade: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "segments": ("shared", "pair"),
        "kv_layout": ("vectorised", "NZ"),
        "kv_scales": ("block128",),
    }

    def axes(self, axes: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        # Another word for the off value: the one that the public call uses.
        layouts = tuple(dict.fromkeys((*axes["kv_layout"], "NHD"))) if axes["kv_layout"] else ()
        # Whether there are new rows is what `save_kv_cache` says.
        return {**super().axes(axes), "kv_layout": layouts, "new_rows": (False,)}

    def kv_heads(self, group: int) -> int:
        return 2  # a cache scaled by head needs two of them

    def repaired(self, values: Mapping[str, Any]) -> dict[str, Any]:
        v = super().repaired(values)
        v["new_rows"] = v["save_kv_cache"] is not None
        if v["kv_dtype"] == "fp4_e2m1":
            v["kv_scales"] = "block16"
            if v["head_dim"] % FP4_BLOCK or v["v_head_dim"] % FP4_BLOCK:
                v["head_dim"], v["v_head_dim"] = 64, 0
        elif v["kv_scales"] == "block16":
            v["kv_scales"] = ""
        return v

    def step(self, saved: bool | None, layout: str) -> dict[str, Any]:
        return {"save_kv_cache": saved, "kv_layout": layout}

    def sayable(self, case: Case) -> bool:
        return super().sayable(case) and case.request.kv_layout != ""

    def public(self, call: Call) -> tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, Any]]:
        r, t = call.case.request, call.tensors
        options: dict[str, Any] = {
            name: t.get(name) for name in ("key", "value", "k_scale", "v_scale", "sinks", "alibi")
        }
        options |= {"softcap": r.softcap, "kv_layout": r.kv_layout or "NHD", "save_kv_cache": bool(r.save_kv_cache)}
        caches = (t["query"], t["key_cache"], t["value_cache"])
        return paged_attention, caches, {**keywords(call), **options, **self.steps(call.case)}

    def make(self, case: Case, maker: Maker) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        r = case.request
        tensors, lens = self.queries(case, maker)
        groups = self.groups(case, maker)
        tables, pages = self.tables(case, maker, groups)
        # Every second part has a pool of its own, unless the scales are those of the tokens of one pool.
        apart = [n for n in range(1, len(tables), 2) if r.kv_scales in ("", "tensor", "head")]
        pools: list[dict[str, Tensor]] = [{} for _ in groups]
        for name, width, scale in (("key", r.head_dim, "k_scale"), ("value", r.dims[1], "v_scale")):
            factor = self._scale(case, maker, pages, width)
            values = maker.normal(pages, r.page_size, r.kv_heads, width)
            if name == "key":
                values = maker.keys(values, lambda: self.places_of(case, tables, pages)[..., None, None])
            values = values.to(maker.dtype).float()
            kind = maker.dtype if r.kv_dtype == "auto" else _STORED[r.kv_dtype]
            rows = stored(values, _broadcast(factor), kind)
            if case.new_rows:
                values = real(rows, _broadcast(factor), maker.dtype)
                tensors[name] = self._new_rows(case, tables[0], values).to(maker.device)
            tensors[scale] = None if factor is None else _laid_out(case, factor).contiguous().to(maker.device)
            together = [n for n in range(len(tables)) if n not in apart]
            cache = self._pool(case, rows, [tables[n] for n in together], case.new_rows)
            tensors[f"{name}_cache"] = cache.to(maker.device)
            for n in apart:
                pools[n - 1][f"{name}_cache"] = self._pool(case, rows, [tables[n]], False).to(maker.device)
        return tensors, {**lens, **self.lens(tables, groups, maker, pools)}

    def _scale(self, case: Case, maker: Maker, pages: int, width: int) -> Tensor | None:
        """Scales in layout NHD: powers of two, so that a new row is exactly what the cache can hold of it."""
        r = case.request
        tokens = (pages, r.page_size, r.kv_heads)
        if r.kv_scales == "token":
            return _powers(maker.uniform(*tokens) * 3)
        if r.kv_scales == "block16":
            return _powers(maker.uniform(*tokens, width // FP4_BLOCK) * 3).to(torch.float8_e4m3fn)
        return {"": None, "tensor": torch.tensor(0.5), "head": _powers(torch.arange(r.kv_heads) % 3)}[r.kv_scales]

    def _new_rows(self, case: Case, table: Table, values: Tensor) -> Tensor:
        """[T_q, H_kv, D], the last rows of each sequence. That of a padding query is there and is read by nobody."""
        fresh = []
        for (s_q, _), places in zip(case.lengths, table.slots, strict=True):
            fresh += [values[place] for place in places[len(places) - s_q :]] if places else []
            fresh += [torch.full_like(values[0, 0], float("nan"))] * (0 if places else s_q)
        return torch.stack(fresh)

    def _pool(self, case: Case, rows: Tensor, tables: Sequence[Table], without_new: bool) -> Tensor:
        """A cache that holds the rows of these tables and nothing else."""
        owned = torch.zeros(rows.shape[:2], dtype=torch.bool)
        for place in (place for table in tables for places in table.slots for place in places):
            owned[place] = True
        if without_new:
            for (s_q, _), places in zip(case.lengths, tables[0].slots, strict=True):
                for place in places[len(places) - s_q :]:
                    owned[place] = False
        if rows.dtype.is_floating_point:
            blank = rows.float().masked_fill(~owned[..., None, None], float("nan")).to(rows.dtype)
        else:
            blank = rows.masked_fill(~owned[..., None, None], torch.iinfo(rows.dtype).max)
        return _laid_out(case, blank).contiguous()

    def sides(
        self, case: Case, tensors: Mapping[str, Tensor], pages: Tensor, length: int, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        token = torch.arange(length, device=pages.device)
        where = (pages[token // case.request.page_size].long(), token % case.request.page_size)
        found = []
        for name, scale in (("key_cache", "k_scale"), ("value_cache", "v_scale")):
            cache, factor = _laid_out(case, tensors[name]), tensors.get(scale)
            found.append(real(cache[where], _of_rows(case, factor, where), dtype))
        return tuple(found)

    def own(self, case: Case, tensors: Mapping[str, Tensor], sides: tuple[Tensor, ...], n: int) -> tuple[Tensor, ...]:
        s_q, s_k = case.lengths[n]
        if not case.new_rows or not s_k:
            return sides
        start = starts_of([q for q, _ in case.lengths])[n]
        new = (tensors["key"][start : start + s_q], tensors["value"][start : start + s_q])
        return tuple(torch.cat([old[: s_k - s_q], rows]) for old, rows in zip(sides, new, strict=True))

    def written(self, call: Call) -> dict[str, Tensor]:
        names = ("key", "value") if call.case.request.save_kv_cache else ()
        return {f"{name}_cache": self._written(call, name) for name in names}

    def _written(self, call: Call, name: str) -> Tensor:
        """The cache after this call's rows were stored (S9)."""
        case, new = call.case, call.tensors[name]
        cache, factor = call.tensors[f"{name}_cache"].clone(), call.tensors.get(f"{name[0]}_scale")
        view, size = _laid_out(case, cache), case.request.page_size
        row = 0
        for n, (s_q, s_k) in enumerate(case.lengths):
            for t in range(s_k - s_q, s_k) if s_k else ():
                where = (int(call.extra["page_table"][n, t // size]), t % size)
                view[where] = stored(new[row + t - s_k + s_q], _of_rows(case, factor, where), cache.dtype)
            row += s_q
        return cache


def _powers(exponents: Tensor) -> Tensor:
    """1/2, 1/4, 1/8."""
    powers: Tensor = 2.0 ** -(1 + exponents.floor())
    return powers


def _laid_out(case: Case, pages: Tensor) -> Tensor:
    """Pages, or the scales of their tokens, from NHD to the layout of the case, or back."""
    return pages.transpose(1, 2) if case.request.kv_layout == "HND" and pages.dim() > 2 else pages


def _broadcast(factor: Tensor | None) -> Tensor | None:
    """Scales in layout NHD as they broadcast to rows [pages, page_size, H_kv, D], or [H_kv, D]."""
    if factor is None or factor.dim() == 4:
        return factor
    return factor.unsqueeze(-1) if factor.dim() == 3 else factor.reshape(-1, 1)


def _of_rows(case: Case, factor: Tensor | None, where: Any) -> Tensor | None:
    """The scales of some rows, broadcastable to [..., H_kv, D]."""
    scale = None if factor is None else _broadcast(_laid_out(case, factor))
    return scale[where] if scale is not None and scale.dim() == 4 else scale
