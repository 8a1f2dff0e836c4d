"""`video_sparse_attn`: each tile of a video sees the tiles that score highest, beside a coarse branch over all of them.

Video sparse attention, arXiv 2505.13389. With q', k', v' the means of tiles of 4 x 4 x 4 tokens:

    s = scale * q' k'^T, a score for each pair of tiles
    fine = attention of a tile's tokens to those of its best tiles
    coarse = softmax(s) v', one row for each tile
    out = fine + gate * coarse

Text is this project's addition: every query sees it, it sees every key, and the coarse branch neither has nor sees it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contract import Inner, Like, Place
from ...errors import ConfigError, InvalidInputError
from .grids import Triple
from .rows import best, check_beside, scored
from .tiles import Cut, cut, scale_of, tiles_by_token

__all__ = ["VideoSparse", "tiles_kept", "vsa_reference"]

NAME = "video_sparse_attn"
GATE = "gate_compress"
TILE: Triple = (4, 4, 4)
BLOCK = math.prod(TILE)


class _Plan(NamedTuple):
    cut: Cut
    keep: int
    counts: Tensor
    text: Tensor


class VideoSparse:
    """A `polyattn.contract.Method`.

    Args:
        sparsity: share of the key tiles that the fine branch drops, below 1.
        coarse: "gate": the coarse branch is weighed by the tensor `gate_compress` of the place, [B, S, H_q, D_v] or 1
            in place of a size; "off": it is left out; "one": its weight is 1.

    Raises:
        ConfigError: a sparsity that keeps nothing.
    """

    reads = (GATE,)
    plans_by_step = False

    def __init__(self, *, sparsity: float, coarse: str) -> None:
        if sparsity >= 1:
            raise ConfigError(f"{NAME}: sparsity={sparsity:g} keeps no tile; give a share below 1, such as 0.9")
        self.sparsity, self.coarse = sparsity, coarse

    def leaves_dense(self, place: Place) -> str:
        return ""

    def plan(self, place: Place, like: Like) -> _Plan:
        found = cut(place, TILE, BLOCK, like, NAME)
        keep, device = tiles_kept(self.sparsity, found.count), like.device
        counts = torch.full((1, 1, found.count), keep + found.text, dtype=torch.int32, device=device)
        text = torch.arange(found.count, found.count + found.text, dtype=torch.int32, device=device)
        return _Plan(found, keep, counts, text)

    def density(self, plan: _Plan, place: Place) -> float:
        return plan.keep / plan.cut.count

    def attend(
        self,
        plan: _Plan,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        place: Place,
        kept: dict[str, Any],
        inner: Inner,
    ) -> Tensor:
        gate = self._gate(place, query, value)
        found, group = plan.cut, query.shape[1] // key.shape[1]
        (q, q_means), (k, k_means) = found.queries.gather(query, means=True), found.keys.gather(key, means=True)
        v, v_means = found.keys.gather(value, means=gate is not None)
        assert q_means is not None
        assert k_means is not None
        with torch.set_grad_enabled(torch.is_grad_enabled() and gate is not None):
            video = slice(found.count)
            v_means = None if v_means is None else v_means[:, :, video].contiguous()
            scale = scale_of(inner, query)
            scores, coarse = scored(q_means, k_means[:, :, video].contiguous(), v_means, scale, group)
        chosen = best(scores, plan.keep)
        del scores
        if found.text:
            chosen = torch.cat([chosen, plan.text.expand(*chosen.shape[:-1], -1)], -1)
        out = found.fine(q, k, v, (plan.counts, chosen), inner)
        del q, k, v  # before the result takes memory
        return found.joined(out, query, key, value, inner, gate=gate, coarse=coarse)

    def _gate(self, place: Place, query: Tensor, value: Tensor) -> Tensor | None:
        """The weight of the coarse branch, [B|1, H|1, S|1, D_v|1]; None = there is no such branch.

        Raises:
            InvalidInputError: there is no gate, or one of other sizes or of another device.
        """
        if self.coarse == "off":
            return None
        if self.coarse == "one":
            return query.new_ones(1, 1, 1, 1)
        gate = place.tensors.get(GATE)
        if gate is None:
            raise InvalidInputError(
                f"{NAME} needs the gate of its coarse branch, and the place has none: give place(gate=...), "
                f"[B, S, H, D], as the model learned it. For a model without one set the option coarse: 'off' leaves "
                "the branch out, 'one' adds it with weight 1"
            )
        (B, H, S), D = query.shape[:3], value.shape[-1]
        sizes = tuple(getattr(gate, "shape", ()))
        if len(sizes) != 4 or any(n not in (1, full) for n, full in zip(sizes, (B, S, H, D), strict=True)):
            shown = list(sizes) if isinstance(gate, Tensor) else type(gate).__name__
            raise InvalidInputError(f"{NAME}: {GATE} is {shown}; a tensor [B, S, H, D] = {[B, S, H, D]} is needed")
        check_beside(NAME, GATE, gate, value)
        return gate.transpose(1, 2)  # type: ignore[no-any-return]


def tiles_kept(sparsity: float, tiles: int) -> int:
    """How many key tiles each tile sees, by the published rule: at least one."""
    return max(1, min(tiles, math.ceil((1 - sparsity) * tiles)))


def vsa_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    place: Place,
    *,
    sparsity: float,
    gate: Tensor | None = None,
    scale: float | None = None,
    chosen: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The definition of the method in float64 (or another `dtype`), over an explicit mask, token by token.

    Args:
        query: [B, H, S, D]; key: [B, H, S, D]; value: [B, H, S, D_v]. gate: [B, S, H, D_v] or sizes of 1, None = no
            coarse branch. chosen: bool [B, H, tiles, tiles], the map to compute with; None = by the scores.

    Returns:
        (out [B, H, S, D_v], chosen).
    """
    q, k, v = query.to(dtype), key.to(dtype), value.to(dtype)
    numbers, counts = (t.to(q.device) for t in tiles_by_token(place, TILE, NAME))
    video = (numbers >= 0).all(-1)
    most = numbers.amax(0) + 1
    tile = (numbers[video, 0] * most[1] + numbers[video, 1]) * most[2] + numbers[video, 2]
    tiles = int(most.prod())
    belongs = torch.nn.functional.one_hot(tile, tiles).to(dtype)  # [cells, tiles]
    share = belongs / belongs.sum(0)
    coarse_q, coarse_k, coarse_v = (torch.einsum("bhsd,sn->bhnd", t[:, :, video], share) for t in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * coarse_q @ coarse_k.transpose(-1, -2)
    if chosen is None:
        best = scores.topk(tiles_kept(sparsity, tiles), dim=-1).indices
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
    mask = torch.ones(*q.shape[:3], q.shape[2], dtype=torch.bool, device=q.device)
    places = video.nonzero()[:, 0]
    mask[:, :, places[:, None], places] = chosen[:, :, tile][..., tile]
    logits = (scale * q @ k.transpose(-1, -2)).masked_fill(~(mask & counts), -torch.inf)
    out = logits.softmax(-1) @ v
    if gate is not None:
        rows = torch.zeros_like(out).index_copy(2, places, (scores.softmax(-1) @ coarse_v)[:, :, tile])
        out = out + rows * gate.to(dtype).transpose(1, 2)
    return out, chosen
