"""This module makes the mask function that transformers calls once per forward, and puts the masks of one layer
together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidInputError
from ...semantics.packed import sequence_ids
from ...semantics.validation import check_cu_seqlens, contents_readable, has_shapes_only
from ..common.keywords import asked_by
from .keywords import More

__all__ = ["fitted", "make_mask", "says_causal", "with_more"]


def make_mask(sdpa_mask: Callable[..., Any], eager_mask: Callable[..., Any], trust: Mapping[type, bool]) -> Any:
    """Make the mask function, which transformers calls once per forward and kind of layer.

    Args:
        sdpa_mask: transformers' own: bool (True = attend), or None where the causal flag of the layers says it all.
        eager_mask: transformers' own: float.
        trust: config class -> whether its models stand what `sdpa_mask` gives. Others get what their own code gets.
    """

    def polyattn_mask(*args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config")
        if not trust.get(type(config), False):
            # Their layers may not know whether they are causal: nothing is left to them.
            return eager_mask(*args, **{**kwargs, "allow_is_bidirectional_skip": False})
        # These models cut queries off after the masks are made. Without a mask, what is left of the queries would be
        # aligned to the first keys instead of the last (transformers takes the same care, but only of "sdpa").
        if getattr(config, "num_kv_shared_layers", None):
            kwargs["allow_is_causal_skip"] = False
        return sdpa_mask(*args, **kwargs)

    return polyattn_mask


def fitted(mask: Any, s_q: int, s_k: int, module: Any, backend: str | None) -> Any:
    """View a mask as [B|1, H|1, S_q, S_k]; models leave out axes of equal rows.

    Raises:
        InvalidInputError: it is no 4-D tensor, or its lengths are others.
    """
    if isinstance(mask, Tensor) and mask.ndim == 4:
        _, _, rows, columns = mask.shape
        if rows == s_q and columns == s_k:
            return mask
        if (rows == s_q or rows == 1) and (columns == s_k or columns == 1):
            return mask.expand(-1, -1, s_q, s_k)
    what = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    raise InvalidInputError(
        f"attention_mask of {asked_by(module, backend)} is {what}; a tensor that broadcasts to [B, H, {s_q}, {s_k}] is "
        f"needed, bool (True = attend) or a float that is added"
    )


def says_causal(module: Any, s_q: int, s_k: int, backend: str | None) -> bool:
    """Tell whether a layer without a mask is causal, by its own word.

    Raises:
        InvalidInputError: it has none, and the lengths allow both answers.
    """
    said = getattr(module, "is_causal", None)
    if s_q == 1:
        return said is not False
    # Some layers call themselves causal whatever they are used for.
    if getattr(module, "is_cross_attention", False):
        return False
    if said is not None:
        return bool(said)
    if "CrossAttention" in type(module).__name__:
        return False
    if s_q == s_k:
        return True  # what transformers takes such a layer for
    raise InvalidInputError(
        f"{s_q} queries and {s_k} keys reached {asked_by(module, backend)} without a mask, and neither the call nor "
        f"the layer has is_causal: it may be cross attention, or a cache that is being filled. Pass an attention_mask, "
        f"or set is_causal on the layer (False for cross attention)"
    )


def with_more(mask: Tensor | None, more: More, query: Tensor, key: Tensor, module: Any, backend: str | None) -> Any:
    """Join a mask with a layer's bias and with the borders of packed sequences: both must allow a key.

    Args:
        mask: as `fitted` takes it, or None. query: [B, H_q, S_q, D]. key: [B, H_kv, S_k, D].

    Returns:
        None, bool or float, broadcasting to [B, H_q, S_q, S_k]; what a bool mask hides becomes -inf in a float one.
    """
    if mask is not None and not isinstance(mask, Tensor):
        return mask  # which `fitted` refuses
    allowed = mask if mask is not None and mask.dtype == torch.bool else None
    added = mask if mask is not None and mask.dtype != torch.bool else None
    if more.bias is not None:
        added = more.bias if added is None else added + more.bias
    together = _same_sequence(more, query, key, module, backend)
    if together is not None:
        allowed = together if allowed is None else allowed & together
    if added is None or allowed is None:
        return allowed if added is None else added
    return torch.where(allowed, added, float("-inf"))


def _check_packed(cu_q: Tensor, cu_k: Tensor, more: More, s_q: int, s_k: int) -> None:
    """Check lengths as a packed call does: whether a model brings a mask does not decide what is taken (S1)."""
    if torch.compiler.is_compiling() or has_shapes_only(cu_q) or not contents_readable(cu_q):
        return
    for side, cu, tokens, longest in (("q", cu_q, s_q, more.max_q), ("k", cu_k, s_k, more.max_k)):
        check_cu_seqlens(f"cu_seq_lens_{side}", cu, tokens, longest, f"max_length_{side}")


def _same_sequence(more: More, query: Tensor, key: Tensor, module: Any, backend: str | None) -> Tensor | None:
    """Return a mask that is True where a query and a key belong to one packed sequence: [B|1, 1, S_q, S_k]."""
    rows, columns = more.sequence, more.sequence
    batch, s_q, s_k = query.shape[0], query.shape[2], key.shape[2]
    if more.cu_q is not None and more.cu_k is not None:
        if batch != 1:
            raise InvalidInputError(
                f"cu_seq_lens_q reached {asked_by(module, backend)} with a mask and a batch of {batch}; "
                f"pack into a batch of 1, or leave out one of the two"
            )
        _check_packed(more.cu_q, more.cu_k, more, s_q, s_k)
        rows, columns = sequence_ids(s_q, more.cu_q)[None], sequence_ids(s_k, more.cu_k)[None]
    if rows is None or columns is None:
        return None
    if not isinstance(rows, Tensor) or rows.ndim != 2:
        found = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise InvalidInputError(
            f"seq_idx of {asked_by(module, backend)} is {found}; a tensor [B, S] is needed, the sequence of each token"
        )
    if rows.shape[-1] != s_q or columns.shape[-1] != s_k:
        raise InvalidInputError(
            f"seq_idx of {asked_by(module, backend)} covers {rows.shape[-1]} tokens, there are {s_q} queries and {s_k} "
            f"keys; packed sequences cannot go with a KV cache"
        )
    return rows[:, None, :, None] == columns[:, None, None, :]
