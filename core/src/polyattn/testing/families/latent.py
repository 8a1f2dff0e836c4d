"""Family `mla` in its absorbed form: one latent row per token for all heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ... import mla_attention
from ...semantics.kv_quant import MLA_WIDTHS, mla_pack_fp8
from ...semantics.reference import mla_unpack_fp8
from ..cases import Case
from .base import Call
from .cached import SERVING, Cached
from .packed import heads_first
from .public import keywords

if TYPE_CHECKING:
    from ..problems import Maker

__all__ = ["Latent"]


class Latent(Cached):
    """The first D_v numbers of a row are the value. Rows of FP8 are 656 bytes, of one width."""

    family = "mla"
    optional = ("attn_mask",)
    caches = ("cache",)
    says = SERVING - {"softcap", "sinks"}
    unmade: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "alibi": (True,),
        "segments": ("shared", "pair"),
        "kv_dtype": ("float32", "bfloat16", "float16", "fp8_e5m2", "fp4_e2m1", "int8"),
        "kv_scales": ("tensor", "head", "token", "block16"),
        "kv_layout": ("HND", "vectorised", "NZ"),
    }

    def axes(self, axes: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        return {
            **super().axes(axes),
            "new_rows": (False,),
            # A latent is written by its own call, so a request has nothing to say of it.
            "save_kv_cache": (None,),
            # There is no default: the scale is that of the uncompressed heads (S2).
            "scale": tuple(v for v in axes["scale"] if v is not None),
            "v_head_dim": tuple(v for v in (24, 0, 64, MLA_WIDTHS[1]) if v in axes["v_head_dim"]),
        }

    def repaired(self, values: Mapping[str, Any]) -> dict[str, Any]:
        v = super().repaired(values)
        packed = v["kv_dtype"] == "fp8_e4m3"
        v["kv_scales"] = "block128" if packed else ""
        if packed:
            v["head_dim"], v["v_head_dim"] = MLA_WIDTHS
        if v["v_head_dim"] > v["head_dim"]:
            v["v_head_dim"] = 0
        return v

    def kv_heads(self, group: int) -> int:
        return 1

    def public(self, call: Call) -> tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, Any]]:
        t = call.tensors
        options = {"v_head_dim": call.case.request.dims[1], **self.steps(call.case)}
        return mla_attention, (t["query"], t["cache"]), {**keywords(call), **options}

    def make(self, case: Case, maker: Maker) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        r = case.request
        tensors, lens = self.queries(case, maker)
        groups = self.groups(case, maker)
        tables, pages = self.tables(case, maker, groups)
        rows = maker.normal(pages, r.page_size, r.head_dim)
        rows = maker.keys(rows, lambda: self.places_of(case, tables, pages)[..., None]).to(maker.dtype).float()
        pools: list[dict[str, Tensor]] = [{} for _ in groups]
        apart = range(1, len(tables), 2)
        for which in ([n for n in range(len(tables)) if n not in apart], *([n] for n in apart)):
            owned = torch.zeros(pages, r.page_size, dtype=torch.bool)
            for place in (place for n in which for places in tables[n].slots for place in places):
                owned[place] = True
            blank = rows.masked_fill(~owned[..., None], float("nan"))
            cache = (mla_pack_fp8(blank) if r.kv_scales == "block128" else blank.to(maker.dtype)).to(maker.device)
            if which[0] == 0:
                tensors["cache"] = cache
            else:
                pools[which[0] - 1]["cache"] = cache
        return tensors, {**lens, **self.lens(tables, groups, maker, pools)}

    def sides(
        self, case: Case, tensors: Mapping[str, Tensor], pages: Tensor, length: int, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        token = torch.arange(length, device=pages.device)
        rows = tensors["cache"][pages[token // case.request.page_size].long(), token % case.request.page_size]
        return ((mla_unpack_fp8(rows) if rows.dtype == torch.uint8 else rows).to(dtype).unsqueeze(1),)

    def key_value(self, case: Case, sides: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        rows = heads_first(sides[0])
        return rows, rows[..., : case.request.dims[1]]
