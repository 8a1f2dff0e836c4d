"""Families `paged` and `mla` by npu_fused_infer_attention_score_v2 (op-plugin 7, torch-npu 2.11).

From its documents: scale defaults to 1; a mask's True hides; lengths are numbers of the host; pages with their tokens
first are [pages, page_size, H_kv * D], with their heads first [pages, H_kv, page_size, D], and those go with BNSD and
packed GQA queries only; packed queries have D = 128, or 192 with 128, or 64 where H_q = H_kv; the LSE is the natural
one, [N, H_q, S_q, 1] or [T_q, H_q, 1]. Latent rows come in two tensors, the latent and the rope part.

Sinks are applied from the LSE: the operator's own go with packed queries only, in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import align16, append_new_kv, empty_result, finish_output, load
from polyattn.contract import AttentionRequest, Bound, PagedTables, Slot
from polyattn.semantics.paged_kv import owned, renumbered

from .planning import Group, Lengths, groups
from .records.common import TORCH_NPU
from .records.inference import PAGE

__all__ = ["FusedInference"]

_OPERATOR = "torch_npu:npu_fused_infer_attention_score_v2"
_NEEDS = {
    **dict.fromkeys(("actual_seq_qlen", "actual_seq_kvlen", "block_table", "block_size"), "a cache"),
    **dict.fromkeys(("query_rope", "key_rope"), "a latent cache"),
}


class FusedInference:
    """Binds paged and latent requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed version lacks the operator, or what the request needs of it.
        """
        call = _Inference(request)

        def session(slot: Slot) -> _Session:
            return _Session(call)

        return Bound(call.forward, session=session)


class _Inference:
    """A request, and the operator that serves it."""

    def __init__(self, request: AttentionRequest) -> None:
        r = self.request = request
        self.operator = load(TORCH_NPU, _OPERATOR, _NEEDS)
        scale = r.softmax_scale
        # Logits are scaled before their largest is taken off; the sign of a scale goes into the queries all the same.
        self.scale, self.sign = abs(scale) or 1.0, None if scale > 0 else -1.0 if scale < 0 else 0.0
        self.latent = r.family == "mla"
        self.heads_first = r.kv_layout == "HND"
        self.packs = self.latent or _packs(r)
        self.with_lse = r.lse or r.sinks

    def plan(self, lens: Lengths, device: torch.device) -> list[Group]:
        return groups(self.request, lens, self.packs, device)

    def forward(
        self,
        query: Tensor,
        *caches: Tensor,
        tables: PagedTables,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: None = None,
        sinks: Tensor | None = None,
        k_scale: None = None,
        v_scale: None = None,
        out: Tensor | None = None,
        plan: list[Group] | None = None,
    ) -> Any:
        """`polyattn.contract.PagedForward` or `MLAForward`. plan: of a session, None = of this call alone."""
        r = self.request
        if not (query.shape[0] and tables.max_seqlen_k):
            return empty_result(r, query, out)
        if plan is None:
            plan = self.plan(Lengths.read(tables), query.device)
        if not plan:
            return empty_result(r, query, out)
        if key is not None:
            caches, tables = append_new_kv(r, query, caches, tables, key, value)
        keys, page_table = self._keys(caches, tables)
        query = query if self.sign is None else query * self.sign
        found = [self._attend(query, keys, page_table, group) for group in plan]
        result, lse = self._together(query, plan, found)
        return finish_output(r, result, lse, sinks, out)

    def _keys(self, caches: tuple[Tensor, ...], tables: PagedTables) -> tuple[dict[str, Tensor], Tensor]:
        """(keys and values as the operator reads pages, their table). Latent pages, and those of a cache with gaps, are
        copied: those in the table."""
        page_table = tables.page_table
        if self.latent or not all(cache.is_contiguous() for cache in caches):
            pages = owned(tables, PAGE)
            page_table, chosen = renumbered(pages), pages.flatten()
            if self.latent:
                (cache,), width = caches, self.request.dims[1]
                latent, rope = cache[..., :width][chosen], cache[..., width:][chosen]
                return {"key": latent, "value": latent, "key_rope": rope}, page_table
            caches = tuple(cache[chosen] for cache in caches)
        keys, values = caches if self.heads_first else (cache.flatten(2) for cache in caches)
        return {"key": keys, "value": values}, page_table

    def _attend(
        self, query: Tensor, keys: dict[str, Tensor], page_table: Tensor, group: Group
    ) -> tuple[Tensor, Tensor | None]:
        """(out [queries of the group, H_q, D_v], LSE [queries of the group, H_q] if it is needed)."""
        r, own = self.request, group.take(query)
        latent = {}
        if self.latent:
            width = r.dims[1]
            latent = {"query_rope": _held(own[..., width:]), "key_rope": keys["key_rope"]}
            own = own[..., :width]
        rule = {}
        if group.rule.mask is not None:
            mode, mask, before, after = group.rule
            rule = {"atten_mask": mask, "sparse_mode": mode, "pre_tokens": before, "next_tokens": after}
        result, lse = self.operator(
            _held(own),
            keys["key"],
            keys["value"],
            **latent,
            **group.lens,
            **rule,
            block_table=group.table(page_table),
            block_size=PAGE,
            num_query_heads=r.heads,
            num_key_value_heads=r.kv_heads,
            softmax_scale=self.scale,
            input_layout=group.layout,
            return_softmax_lse=self.with_lse,
        )
        if not self.with_lse:
            return group.packed(result), None
        lse = lse.squeeze(-1)
        # Heads come first there in every layout of padded queries.
        return group.packed(result), group.packed(lse if group.layout != "BSND" else lse.transpose(1, 2))

    def _together(
        self, query: Tensor, plan: list[Group], found: list[tuple[Tensor, Tensor | None]]
    ) -> tuple[Tensor, Tensor | None]:
        """The results of a step, those of queries that no group has included (S7)."""
        if len(plan) == 1 and plan[0].tokens is None:
            return found[0]
        result = query.new_zeros(*query.shape[:2], self.request.dims[1])
        lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32) if self.with_lse else None
        for group, (part, part_lse) in zip(plan, found, strict=True):
            places = group.places()
            assert places is not None
            result[places] = part
            if lse is not None and part_lse is not None:
                lse[places] = part_lse
        return result, lse


class _Session:
    """The serving side in one slot: the calls of a step, for all layers. Planned from the host's lengths, so that
    nothing waits for the device; steps are not recorded, since those lengths are part of each call."""

    def __init__(self, call: _Inference) -> None:
        self._call = call
        self._plan: list[Group] = []

    def plan(self, step: Any) -> None:
        self._plan = self._call.plan(Lengths.of(step), step.seq_lens.device)

    def prepare(self, step: Any) -> None:
        """Nothing to do on the device: tables and lengths are read by the calls."""

    def forward(self, *tensors: Tensor, **given: Any) -> Any:
        """The family's forward, of the step."""
        return self._call.forward(*tensors, **given, plan=self._plan)


def _packs(request: AttentionRequest) -> bool:
    """Whether packed queries are taken, of these widths and from such pages."""
    if request.group == 1:
        return request.kv_layout != "HND" and request.dims in ((64, 64), (128, 128), (192, 128))
    return request.dims in ((128, 128), (192, 128))


def _held(tensor: Tensor) -> Tensor:
    """As the operator wants tensors: contiguous, on a boundary."""
    return align16(tensor.contiguous())
