"""This module serves diffusers' context parallelism: `model.enable_parallelism(config=ContextParallelConfig(...))`.

diffusers moves heads and keys between ranks and merges what the ranks computed. It asks a backend for two functions:
one that attends some of the keys, and its backward, which is given the merged result.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from ...dispatch.call_key import SITES_KEPT
from ...dispatch.part import Part, bind_part
from ...selection.overrides import Scope, restored
from ..common.keywords import refused

__all__ = ["attend_parallel"]

_WHO = "context parallelism of diffusers on polyattn"


@functools.lru_cache(maxsize=SITES_KEPT)
def _part(scope: Scope, backend: str | None, scale: float | None, trained: bool) -> Part:
    with restored(scope):
        return bind_part(layout="BSHD", scale=scale, backward=trained, backend=backend)


def attend_parallel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    return_lse: bool,
    config: Any,
    backend: str | None,
    scope: Scope,
) -> Any:
    """Attend what this rank has, as a model asks that runs on several.

    Args:
        query, key, value: of this rank, [B, S, H, D]. mask: [B|1, 1|H, S_q|1, S_k] of the whole sequence.
        config: diffusers' ParallelConfig. backend: the one that is named. scope: of overrides.

    Returns:
        out [B, S, H, D_v], or (out, lse [B, S, H]).

    Raises:
        UnsupportedRequestError: a mask where keys go around a ring.
    """
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention

    if mask is not None and config.context_parallel_config.ring_degree > 1:
        raise refused(
            "attn_mask", _WHO, "in a ring each step has other keys, and diffusers passes the same mask to all",
            "take ulysses_degree in place of ring_degree",
        )  # fmt: skip
    name = backend, scope
    return _templated_context_parallel_attention(
        query, key, value, mask, 0.0, False, scale, False, return_lse,
        forward_op=functools.partial(_forward, name), backward_op=functools.partial(_backward, name),
        _parallel_config=config,
    )  # fmt: skip


def _forward(
    name: tuple[str | None, Scope],
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config: Any = None,
) -> Any:
    backend, scope = name
    trained = any(t.requires_grad for t in (query, key, value))
    out, lse = _part(scope, backend, scale, trained).forward(query, key, value, attn_mask=attn_mask)
    if _save_ctx:
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.polyattn = attn_mask, scale
    return (out, lse) if return_lse else out


def _backward(
    name: tuple[str | None, Scope],
    ctx: Any,
    grad_out: Tensor,
    *_: Any,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    # A ring gives each block of keys and the merged result, Ulysses nothing: there what was saved is all.
    given = (query, key, value, out, lse)
    q, k, v, whole, norm = (
        one if one is not None else kept for one, kept in zip(given, ctx.saved_tensors, strict=True)
    )
    mask, scale = ctx.polyattn
    backend, scope = name
    return _part(scope, backend, scale, True).backward(grad_out, q, k, v, whole, norm, attn_mask=mask)
