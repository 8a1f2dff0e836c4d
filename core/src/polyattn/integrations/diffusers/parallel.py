"""This module serves diffusers' context parallelism: `model.enable_parallelism(config=ContextParallelConfig(...))`.

diffusers moves heads and keys between ranks and merges what the ranks computed. It asks a backend for two functions:
one that attends some of the keys, and its backward, which is given the merged result.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ...dispatch.call_key import SITES_KEPT
from ...dispatch.part import Part, bind_part
from ...errors import ConfigError
from ...selection.overrides import Scope, restored
from ..common.keywords import refused

__all__ = ["attend_parallel", "spread", "started"]

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


@contextlib.contextmanager
def started(ranks: int) -> Iterator[int]:
    """Join the other processes that torchrun started, and leave them at the end.

    Args:
        ranks: how many there are to be.

    Yields:
        The number of this one.

    Raises:
        ConfigError: torchrun did not start this process, or started another number of them.
    """
    there = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if there != ranks:
        raise ConfigError(
            f"ulysses_degree times ring_degree is {ranks}, and the processes of this job are {there}: start it by "
            f"torchrun --nproc-per-node {ranks} -m polyattn generate ..."
        )
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if gpu else "gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def spread(models: dict[str, Any], ulysses: int, ring: int) -> None:
    """Spread models over the ranks of the process group.

    Args:
        models: of a pipeline, by component; those that diffusers has a plan for are spread.

    Raises:
        ConfigError: it has a plan for none of them.
    """
    from diffusers import ContextParallelConfig

    planned = {name: model for name, model in models.items() if getattr(model, "_cp_plan", None) is not None}
    if not planned:
        kinds = ", ".join(sorted(type(model).__name__ for model in models.values())) or "no model"
        raise ConfigError(
            f"diffusers has no plan of context parallelism for {kinds}; leave ulysses_degree and ring_degree out"
        )
    config: Any = ContextParallelConfig
    with contextlib.ExitStack() as stack:
        if not torch.accelerator.is_available():
            # diffusers counts the devices of an accelerator, of which a CPU has none.
            stack.enter_context(mock.patch.object(torch.accelerator, "device_count", return_value=1))
        for model in planned.values():
            model.enable_parallelism(config=config(ulysses_degree=ulysses, ring_degree=ring))
