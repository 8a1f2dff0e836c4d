"""Family `mla` in its absorbed form: one latent row per token for all heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ... import mla_attention
from ...semantics.kv_quant import LATENT_FORMATS, MLA_WIDTHS, mla_pack, mla_unpack
from ..cases import Case
from .base import Call, Part
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
    says = (SERVING - {"softcap", "sinks"}) | {"token_topk"}
    unmade: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "alibi": (True,),
        "segments": ("shared", "pair"),
        "kv_dtype": ("float32", "bfloat16", "float16", "int8"),
        "kv_scales": ("tensor", "head", "token"),
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
        forms = [f for f in LATENT_FORMATS if f.kv_dtype == v["kv_dtype"]]
        form = next((f for f in forms if f.kv_scales == v["kv_scales"]), forms[0] if forms else None)
        v["kv_scales"] = form.kv_scales if form else ""
        if form and form.widths:
            v["head_dim"], v["v_head_dim"] = form.widths
        if form and v["head_dim"] % form.multiple_of:
            v["head_dim"] = 64
        if v["v_head_dim"] > v["head_dim"]:
            v["v_head_dim"] = 0
        if v["token_topk"]:
            v["kv_parts"] = 0  # lists speak of the call's own keys
        return v

    def kv_heads(self, group: int) -> int:
        return 1

    def parts(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> Iterator[Part]:
        lists, start = tensors.get("token_indices"), 0
        for query, key, value, mask in super().parts(case, tensors, extra):
            if lists is not None:
                s_q, s_k = query.shape[2], key.shape[2]
                seen = torch.zeros(s_q, s_k, dtype=torch.bool, device=query.device)
                for n, listed in enumerate(lists[start : start + s_q].tolist()):
                    seen[n, [place for place in listed if place >= 0]] = True
                start += s_q
                hidden = mask is None or mask.dtype == torch.bool
                mask = (seen if mask is None else seen & mask) if hidden else mask.masked_fill(~seen, -torch.inf)
                mask = mask[None, None] if mask.dim() == 2 else mask
            yield query, key, value, mask

    def _lists(self, case: Case, maker: Maker) -> Tensor:
        """Tokens that each query sees, in no order, places without one among them; some queries see none."""
        rows, topk = [], case.request.token_topk
        for s_q, s_k in case.lengths:
            for n in range(s_q):
                room = s_k - s_q + n + 1 if case.request.causal == "bottom_right" else s_k
                listed = list(maker.permutation(max(room, 0)))[:topk] if n % 5 != 3 else []
                blank = [-1] * (topk - len(listed))
                rows += [*listed[:2], *blank, *listed[2:]]
        return maker.integers(*rows).reshape(-1, topk)

    def public(self, call: Call) -> tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, Any]]:
        t = call.tensors
        options = {"v_head_dim": call.case.request.dims[1], **self.steps(call.case)}
        options["token_indices"] = t.get("token_indices")
        return mla_attention, (t["query"], t["cache"]), {**keywords(call), **options}

    def first(self, call: Call) -> tuple[Call, int]:
        found, rows = super().first(call)
        return self._with_lists(found, call, slice(rows)), rows

    def last(self, call: Call) -> tuple[Call, Tensor, int]:
        found, index, axis = super().last(call)
        return self._with_lists(found, call, index), index, axis

    def _piece(self, call: Call, span: slice) -> Call:
        found = super()._piece(call, span)
        if (lists := call.tensors.get("token_indices")) is None:
            return found
        inside = (lists >= span.start) & (lists < span.stop)
        return found._replace(tensors={**found.tensors, "token_indices": (lists - span.start).masked_fill(~inside, -1)})

    @staticmethod
    def _with_lists(found: Call, call: Call, rows: Any) -> Call:
        lists = call.tensors.get("token_indices")
        some = {} if lists is None else {"token_indices": lists[rows]}
        return found._replace(tensors={**found.tensors, **some})

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
            stored = r.kv_storage != r.dtype
            cache = (mla_pack(blank, r.kv_dtype, r.kv_scales) if stored else blank.to(maker.dtype)).to(maker.device)
            if which[0] == 0:
                tensors["cache"] = cache
            else:
                pools[which[0] - 1]["cache"] = cache
        if r.token_topk:
            tensors["token_indices"] = self._lists(case, maker)
        return tensors, {**lens, **self.lens(tables, groups, maker, pools)}

    def sides(
        self, case: Case, tensors: Mapping[str, Tensor], pages: Tensor, length: int, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        token = torch.arange(length, device=pages.device)
        rows = tensors["cache"][pages[token // case.request.page_size].long(), token % case.request.page_size]
        return (mla_unpack(rows).to(dtype).unsqueeze(1),)

    def key_value(self, case: Case, sides: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        rows = heads_first(sides[0])
        return rows, rows[..., : case.request.dims[1]]
