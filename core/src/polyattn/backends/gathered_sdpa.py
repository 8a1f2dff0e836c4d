"""SDPA on gathered keys, for queries that share key heads: folded rather than repeated.

G query heads of one key head are as good as G times as many queries of it: no kernel need know groups, keys are read
once, and one latent head serves 128 (decode on a CPU: 3 times faster at G = 4, 30 times for MLA).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import AttentionRequest, Bound
from ..contract.request import MaskKind
from .torch_sdpa import TorchSDPA

__all__ = ["GatheredSDPA"]


class GatheredSDPA:
    """SDPA of a request's platform over gathered keys, for a paged or latent request and before its sinks."""

    def __init__(self, request: AttentionRequest) -> None:
        self._request = request
        self._kernels: dict[tuple[MaskKind, bool], Bound] = {}

    def _kernel(self, mask: MaskKind, causal: bool) -> Bound:
        if (mask, causal) not in self._kernels:
            r = self._request
            dense = AttentionRequest(
                dtype=r.dtype,
                platform=r.platform,
                arch=r.arch,
                head_dim=r.head_dim,
                v_head_dim=r.v_head_dim,
                heads=r.heads if causal else r.kv_heads,
                kv_heads=r.kv_heads,
                layout="BHSD",
                causal="bottom_right" if causal else "none",
                s_relation="equal" if causal else "more",
                mask=mask,
                scale=r.scale,
                lse=r.lse or r.sinks,
                deterministic=r.deterministic,
                # Queries start wherever their sequence does; some widths put gathered rows off a boundary.
                misaligned=True,
            )
            self._kernels[mask, causal] = TorchSDPA().bind(dense.normalised())
        return self._kernels[mask, causal]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            query: [N, H_q, S_q, D]; key: [N, H_kv, S_k, D]; value: [N, H_kv, S_k, D_v].
            mask: [N|1, 1|H_q, S_q, S_k], bool or additive, everything there is to say; None = all is seen.
            causal: in place of a mask, for S_q = S_k.

        Returns:
            (out [N, H_q, S_q, D_v], lse [N, H_q, S_q], or None where neither LSE nor sinks are wanted).
        """
        if causal:
            result = self._kernel("none", True).forward(query, key, value)
            return result if isinstance(result, tuple) else (result, None)
        folds = (self._request.kv_heads, self._request.group)
        queries = torch.unflatten(query, 1, folds).flatten(2, 3)
        out, lse = self.folded(queries, key, value, None if mask is None else _folded(mask, folds))
        back = (self._request.group, query.shape[2])
        out = torch.unflatten(out, 2, back).flatten(1, 2)
        return out, None if lse is None else torch.unflatten(lse, 2, back).flatten(1, 2)

    def folded(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The same of queries that are folded: query [N, H_kv, G * S_q, D], mask [N|1, 1|H_kv, 1|G * S_q, S_k]; so are
        the results."""
        kind: MaskKind = "none" if mask is None else "bool" if mask.dtype == torch.bool else "additive"
        result = self._kernel(kind, False).forward(query, key, value, attn_mask=mask)
        return result if isinstance(result, tuple) else (result, None)


def _folded(mask: Tensor, folds: tuple[int, int]) -> Tensor:
    """[N|1, 1|H_q, S_q, S_k] for queries with G heads in S_q: [N|1, 1|H_kv, 1|G * S_q, S_k]."""
    group, one_row = folds[1], mask.shape[2] == 1
    if mask.shape[1] > 1:
        return torch.unflatten(mask, 1, folds).flatten(2, 3)
    # One row is every row.
    return mask if one_row or group == 1 else mask.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(2, 3)
