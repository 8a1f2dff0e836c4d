"""`LatentAttention`: latent layers of a serving step, absorbed or not by the step's mode and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...errors import InvalidInputError
from .absorb import UpProjection, absorb, split_kv_b, value_up
from .companion import Companion, companion
from .lists import Index, TokenLists
from .policy import Decision, LatentPolicy, decide
from .prefill import Piece, attend, plan_pieces

if TYPE_CHECKING:
    from ..attention.backend import AttentionBackend
    from ..kv_cache.pool import KVPool
    from ..layer import AttentionLayer
    from ..step.batch import ForwardBatch
    from ..step.step import Step

__all__ = ["LatentAttention"]


class LatentAttention:
    """Serves the latent layers of a model from a KV pool of latent rows.

    Once per step, after `AttentionBackend.plan(batch)`, call `plan`; then each layer calls `forward`, which is also
    what `polyattn.integrations.transformers.latent.replaced` wants. Absorbed steps (decode, verify, short prefixes) go
    to the backend that was chosen for their phase; unabsorbed ones write their rows to the pool and call
    `polyattn.varlen_attention` (see `companion` for by whom).

    New rows are attended as the pool stores them, in every form: a prompt gives the same result in one piece or many.

    Args:
        backend: whose sessions serve the absorbed form. pool: where the rows are.
        policy: the limits, None = the defaults.
        unabsorbed_backend: for the unabsorbed form; None = that of the extend phase where it serves packed heads too,
            else as selection finds (`companion`).
    """

    def __init__(
        self,
        backend: AttentionBackend,
        pool: KVPool,
        policy: LatentPolicy | None = None,
        *,
        unabsorbed_backend: str | None = None,
    ) -> None:
        self.backend, self.pool, self.policy = backend, pool, policy or LatentPolicy()
        self._unabsorbed_backend = unabsorbed_backend
        self._companions: dict[tuple[Any, ...], Companion] = {}
        self._ups: dict[int, UpProjection] = {}
        self._decision: Decision | None = None
        self._lists = TokenLists(backend, pool)
        self._lens: tuple[Sequence[int], Sequence[int]] = ((), ())
        self._steps: Sequence[Step] = ()
        self._pieces: dict[int, list[Piece]] = {}
        self._longest = 0
        # Layers whose rows of the planned step this object has stored.
        self._written: set[int] = set()

    @property
    def decision(self) -> Decision:
        """The form of the step that was planned last, with its reason.

        Raises:
            InvalidInputError: nothing was planned.
        """
        if self._decision is None:
            raise InvalidInputError("LatentAttention has no step; call plan(batch, steps) before the layers")
        return self._decision

    def plan(self, batch: ForwardBatch, steps: Sequence[Step]) -> Decision:
        """Choose the form of a step, from host-known lengths.

        Args:
            batch: the step. steps: what `AttentionBackend.plan(batch)` gave, one for each group of the pool.
        """
        if self.backend.batch_invariant:
            self._decision = Decision(
                "absorbed", "the other forms are chosen, and cut, by the lengths of all sequences"
            )
        else:
            self._decision = decide(batch.mode.value, batch.prefix_lens, batch.query_lens, self.policy)
        self._lens, self._steps, self._pieces = (batch.prefix_lens, batch.query_lens), steps, {}
        self._written = set()
        self._lists.plan()
        self._longest = batch.max_seqlen_k
        return self._decision

    def forward(
        self,
        module: Any,
        q_nope: Tensor,
        q_pe: Tensor,
        rows: Tensor,
        layer: AttentionLayer,
        index: Index | None = None,
    ) -> Tensor:
        """Attend the new tokens of the step in one layer; stores their rows.

        Args:
            module: has `kv_b_proj`, the up-projection. q_nope: [T, H, D_nope]; q_pe: [T, H, D_r], after RoPE.
            rows: [T, D_c + D_r], the normalised latents and the rope keys after RoPE. layer: the latent layer.
            index: of a layer with `token_topk`, what its indexer made of the tokens; None = it takes the lists of the
                layer before it.

        Returns:
            [T, H, D_v]. Rows of padding tokens have no meaning.

        Raises:
            InvalidInputError: no step was planned, or its rows are stored already; gradients are wanted, or a weight
                cannot be absorbed.
        """
        decision = self.decision
        if torch.is_grad_enabled() and (q_nope.requires_grad or q_pe.requires_grad or rows.requires_grad):
            raise InvalidInputError(
                "serving a latent layer is inference only; run the model under torch.no_grad() or inference_mode()"
            )
        up = self._up(module.kv_b_proj.weight, q_nope, layer.layer_id)
        if layer.token_topk:
            self._lists.write(layer, index)
            if decision.form == "absorbed" or self._longest > layer.token_topk:
                lists = self._lists.of(layer, index)
                return value_up(self.backend.forward(absorb(q_nope, q_pe, up), rows, lists, layer), up)
        # A window leaves few keys to read, and chunks of a prefix have no place in it.
        if decision.form == "absorbed" or layer.window >= 0:
            return value_up(self.backend.forward(absorb(q_nope, q_pe, up), rows, None, layer), up)
        return self._unabsorbed(torch.cat([q_nope, q_pe], -1), rows, up, layer)

    def _up(self, weight: Tensor, q_nope: Tensor, layer_id: int) -> UpProjection:
        kept = self._ups.get(layer_id)
        # The halves are views: what they were made of cannot have been freed, so that one address is one weight.
        if kept is None or kept.w_uk.data_ptr() != weight.data_ptr():
            heads, nope = q_nope.shape[1:]
            kept = self._ups[layer_id] = split_kv_b(weight, nope, weight.shape[0] // heads - nope)
        return kept

    def _unabsorbed(self, query: Tensor, rows: Tensor, up: UpProjection, layer: AttentionLayer) -> Tensor:
        group = self.pool.group_of(layer.layer_id)
        pieces, slots = self._planned(group), self._steps[group].slots

        def read(where: Tensor) -> Tensor:
            found: Tensor = self.pool.read(layer.layer_id, where, rows.dtype)
            return found

        self.backend.check_layer(layer)
        if layer.layer_id in self._written:
            raise InvalidInputError(
                f"latent layer {layer.layer_id} is given rows a second time in one planned step, whose slots have the "
                f"first ones: plan every step"
            )
        self._written.add(layer.layer_id)
        self.pool.write(layer.layer_id, slots, rows)
        if self.pool.cache(layer.layer_id).tensors[0].dtype != rows.dtype:
            rows = read(slots)
        scale, tokens = cast(float, layer.scale), pieces[0].queries.stop
        backend = self.companion(query, up, layer).backend
        out = attend(pieces, query[:tokens], rows[:tokens], read, up, scale=scale, backend=backend)
        return out if tokens == query.shape[0] else pad(out, (0, 0, 0, 0, 0, query.shape[0] - tokens))

    def companion(self, query: Tensor, up: UpProjection, layer: AttentionLayer) -> Companion:
        """Return which backend serves the unabsorbed form of a layer, and why: asked once for layers of one shape.

        Args:
            query: [T, H, D_nope + D_r].
        """
        if self._unabsorbed_backend is not None:
            return Companion(self._unabsorbed_backend, "argument")
        key = (query.dtype, query.device, query.shape[1:], up.w_uv.shape[1], layer.scale)
        if key not in self._companions:
            prefill = self.backend.explain(layer.layer_id)["extend"]
            self._companions[key] = companion(prefill, query, up.w_uv.shape[1], cast(float, layer.scale))
        return self._companions[key]

    def _planned(self, group: int) -> list[Piece]:
        if group not in self._pieces:
            step, lens = self._steps[group], self._lens
            chunk = self.policy.chunk
            self._pieces[group] = plan_pieces(self.decision, *lens, step.page_table, step.page_size, chunk)
        return self._pieces[group]
