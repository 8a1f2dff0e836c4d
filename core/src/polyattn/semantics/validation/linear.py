"""Checks of a linear attention call (S10)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...contract import scalars
from ...errors import InvalidInputError, did_you_mean
from .common import check_out
from .tensors import FLOATS, check_tensor, contents_readable
from .varlen import check_cu_seqlens

METHODS = ("gdn", "kda")
LAYOUTS = ("KV", "VK")


def check_words(method: Any, state_layout: Any, qk_norm: Any) -> None:
    """Check the arguments that are neither tensors nor numbers.

    Raises:
        InvalidInputError: names the argument, its value and what is allowed.
    """
    for name, word, allowed in (("method", method, METHODS), ("state_layout", state_layout, LAYOUTS)):
        if word not in allowed:
            near = did_you_mean(word, allowed) if isinstance(word, str) else ""
            raise InvalidInputError(f"{name}={word!r} must be one of {', '.join(allowed)}.{near}")
    scalars.flag("qk_norm", qk_norm)


def check_linear(
    query: Any,
    key: Any,
    value: Any,
    *,
    gate: Any,
    beta: Any,
    state: Any = None,
    cu_seqlens: Any = None,
    out: Any = None,
    method: str = "gdn",
    state_layout: str = "KV",
) -> None:
    """Check the tensors of a call: see `polyattn.linear_attention` for their shapes.

    Raises:
        InvalidInputError: names what is wrong, its value and what is allowed.
    """
    for name, tensor, shape in (
        ("query", query, "[B, S, H, D]"),
        ("key", key, "[B, S, H, D]"),
        ("value", value, "[B, S, H_v, D_v]"),
    ):
        check_tensor(name, tensor, 4, shape)
    B, S, H, D = query.shape
    H_v, D_v = value.shape[2:]
    _shape("key", key, (B, S, H, D), "that of the query, [B, S, H, D]")
    _shape("value", value, (B, S, H_v, D_v), "[B, S, H_v, D_v], B and S those of the query")
    if not H or not H_v or H_v % H:
        raise InvalidInputError(f"value has {H_v} heads, query and key {H}; a multiple of theirs is needed")
    if not query.dtype == key.dtype == value.dtype or query.dtype not in FLOATS:
        raise InvalidInputError(
            f"query is {query.dtype}, key {key.dtype}, value {value.dtype}; one of float32, float16, bfloat16 and "
            "float64 is needed: cast them, or use autocast"
        )
    gates = (B, S, H_v) if method == "gdn" else (B, S, H_v, D)
    _beside(query, "gate", gate, gates, "[B, S, H_v]" if method == "gdn" else "[B, S, H_v, D]")
    _beside(query, "beta", beta, (B, S, H_v), "[B, S, H_v]")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.device != query.device:
            raise InvalidInputError(f"{name} is on {tensor.device}, query on {query.device}; move it")
    inputs = tuple(t for t in (query, key, value, gate, beta, state) if isinstance(t, Tensor))
    check_out(out, value, (B, S, H_v, D_v), inputs)
    sequences = B if cu_seqlens is None else _check_packed(cu_seqlens, query)
    if state is not None:
        rows = (D, D_v) if state_layout == "KV" else (D_v, D)
        words = "[N, H_v, D, D_v]" if state_layout == "KV" else "[N, H_v, D_v, D]"
        _beside(query, "state", state, (sequences, H_v, *rows), f"{words}, N={sequences}")
        wanted = torch.float64 if value.dtype == torch.float64 else torch.float32
        if state.dtype != wanted:
            raise InvalidInputError(f"state is {state.dtype}; {wanted} is needed beside values of {value.dtype}")


def _beside(query: Tensor, name: str, tensor: Any, sizes: tuple[int, ...], words: str) -> None:
    check_tensor(name, tensor, len(sizes), words)
    _shape(name, tensor, sizes, words)
    if tensor.device != query.device:
        raise InvalidInputError(f"{name} is on {tensor.device}, query on {query.device}; move it")
    if tensor.dtype not in FLOATS:
        raise InvalidInputError(f"{name} is {tensor.dtype}; a float is needed")


def _shape(name: str, tensor: Tensor, sizes: tuple[int, ...], words: str) -> None:
    if tuple(tensor.shape) != sizes:
        raise InvalidInputError(f"{name} has the shape {tuple(tensor.shape)}; needed is {sizes}: {words}")


def _check_packed(cu_seqlens: Any, query: Tensor) -> int:
    """The number of sequences."""
    check_tensor("cu_seqlens", cu_seqlens, 1, "int32 [N+1]")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.device != query.device or cu_seqlens.shape[0] < 1:
        raise InvalidInputError(
            f"cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)} on {cu_seqlens.device}; torch.int32 [N+1] on "
            f"{query.device} is needed"
        )
    if query.shape[0] != 1:
        raise InvalidInputError(
            f"cu_seqlens with a batch of {query.shape[0]}: lay the sequences behind each other, B = 1"
        )
    if contents_readable(cu_seqlens):
        check_cu_seqlens("cu_seqlens", cu_seqlens, query.shape[1], query.shape[1], "S")
    sequences: int = cu_seqlens.shape[0] - 1
    return sequences
