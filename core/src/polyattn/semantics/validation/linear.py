"""Checks of a linear attention call (S10)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contract import scalars
from ...contract.overlap import shares_memory
from ...errors import InvalidInputError, did_you_mean
from .common import check_out
from .tensors import FLOATS, check_tensor, contents_readable, overlaps_itself
from .varlen import check_cu_seqlens

METHODS = ("gdn", "kda")
LAYOUTS = ("KV", "VK")


class LinearOptions(NamedTuple):
    """The arguments of a call that are neither tensors nor its scale."""

    method: str = "gdn"
    state_layout: str = "KV"
    qk_norm: bool = False
    every_state: bool = False
    gate_bound: float = 0.0
    beta_range: int = 1

    def raw_gates(self, a_log: Any) -> str:
        """`AttentionRequest.raw_gates` of a call that has this a_log, or None."""
        return "" if a_log is None else "bounded" if self.gate_bound else "softplus"


def check_words(
    method: Any,
    state_layout: Any,
    qk_norm: Any,
    every_state: Any = False,
    gate_bound: Any = 0.0,
    beta_range: Any = 1,
) -> None:
    """Check the arguments that are neither tensors nor numbers.

    Raises:
        InvalidInputError: names the argument, its value and what is allowed.
    """
    for name, word, allowed in (("method", method, METHODS), ("state_layout", state_layout, LAYOUTS)):
        if word not in allowed:
            near = did_you_mean(word, allowed) if isinstance(word, str) else ""
            raise InvalidInputError(f"{name}={word!r} must be one of {', '.join(allowed)}.{near}")
    scalars.flag("qk_norm", qk_norm)
    scalars.flag("every_state", every_state)
    if not scalars.number(gate_bound) or not -math.inf < gate_bound <= 0:
        raise InvalidInputError(f"gate_bound={gate_bound!r}; a number below 0 is needed, or 0 for none")
    if not scalars.whole(beta_range) or beta_range not in (1, 2):
        raise InvalidInputError(f"beta_range={beta_range!r}; 1 or 2 is needed, 2 for negative eigenvalues")


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
    a_log: Any = None,
    dt_bias: Any = None,
    state_slots: Any = None,
    parents: Any = None,
    options: LinearOptions = LinearOptions(),  # noqa: B008 - a constant
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
    if not D or not D_v:
        raise InvalidInputError(f"head dims are {D} and {D_v}; both must be at least 1")
    if not query.dtype == key.dtype == value.dtype or query.dtype not in FLOATS:
        raise InvalidInputError(
            f"query is {query.dtype}, key {key.dtype}, value {value.dtype}; one of float32, float16, bfloat16 and "
            "float64 is needed: cast them, or use autocast"
        )
    check_gates(query, value, gate, beta, a_log, dt_bias, options)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.device != query.device:
            raise InvalidInputError(f"{name} is on {tensor.device}, query on {query.device}; move it")
    floats = (query, key, value, gate, beta, state, a_log, dt_bias)
    inputs = tuple(t for t in floats if isinstance(t, Tensor))
    check_out(out, value, (B, S, H_v, D_v), inputs)
    sequences = B if cu_seqlens is None else _check_packed(cu_seqlens, query)
    if state is not None:
        rows = (D, D_v) if options.state_layout == "KV" else (D_v, D)
        count = state.shape[0] if state_slots is not None and isinstance(state, Tensor) and state.ndim else sequences
        words = "H_v, D, D_v" if options.state_layout == "KV" else "H_v, D_v, D"
        first = f"[N, {words}], N={sequences}" if state_slots is None else f"[slots, {words}]"
        _beside(query, "state", state, (count, H_v, *rows), first)
        wanted = torch.float64 if value.dtype == torch.float64 else torch.float32
        if state.dtype != wanted:
            raise InvalidInputError(f"state is {state.dtype}; {wanted} is needed beside values of {value.dtype}")
    if state_slots is not None:
        _check_slots(state_slots, state, sequences, query)
        _check_pool(state, inputs, written=not options.every_state, looked_at=contents_readable(state_slots))
    _check_drafts(query, parents, cu_seqlens, options.every_state)


def check_gates(query: Any, value: Any, gate: Any, beta: Any, a_log: Any, dt_bias: Any, options: LinearOptions) -> None:
    """Check the gates of a call, raw or not. See `check_linear`."""
    B, S, _, D = query.shape
    H_v, by_channel = value.shape[2], options.method == "kda"
    widths = (H_v, D) if by_channel else (H_v,)
    _beside(query, "gate", gate, (B, S, *widths), "[B, S, H_v, D]" if by_channel else "[B, S, H_v]")
    _beside(query, "beta", beta, (B, S, H_v), "[B, S, H_v]")
    if a_log is not None:
        _beside(query, "a_log", a_log, widths[:1], "[H_v]")
        if dt_bias is not None:
            _beside(query, "dt_bias", dt_bias, widths, "[H_v, D]" if len(widths) > 1 else "[H_v]")
        return
    given = {
        "dt_bias": dt_bias is not None,
        "gate_bound": options.gate_bound != 0,
        "beta_range": options.beta_range > 1,
    }
    for name, there in given.items():
        if there:
            raise InvalidInputError(
                f"{name} is given without a_log; it is part of computing gates: give a_log, or drop it"
            )
    if contents_readable(gate) and gate.numel() and bool((gate > 0).any()):
        raise InvalidInputError(
            f"gate has {float(gate.detach().max()):g}; it is the logarithm of a decay, so that 0 is the most: give log "
            "decays, or raw gates with a_log"
        )


def check_traced_gates(said: tuple[Any, ...], options: LinearOptions) -> None:
    """Check the words of a call that is traced, and raw gates: what is computed of them shows nothing of their shapes.

    Args:
        said: (dtype, sizes) of query, value, gate and beta, without B and S, of a_log and dt_bias; None = not given.
    """
    check_words(*options)
    if said[4:] == (None, None) and not options.gate_bound and options.beta_range == 1:
        return  # the op looks at its gates itself
    query, value, gate, beta, a_log, dt_bias = (
        None if one is None else torch.empty((*(1, 1) * (n < 4), *one[1]), dtype=one[0], device="meta")
        for n, one in enumerate(said)
    )
    try:
        check_gates(query, value, gate, beta, a_log, dt_bias, options)
    except InvalidInputError as error:
        outside = "B and S are told as 1 here. Run the call once outside torch.compile for the exact sizes"
        raise InvalidInputError(f"{error}. {outside}") from None


def _check_slots(state_slots: Any, state: Any, sequences: int, query: Tensor) -> None:
    check_tensor("state_slots", state_slots, 1, "int32 or int64 [N]")
    if state is None:
        raise InvalidInputError("state_slots are given without state; give the pool, [slots, ...]")
    if state_slots.dtype not in (torch.int32, torch.int64) or state_slots.device != query.device:
        raise InvalidInputError(f"state_slots is {state_slots.dtype} on {state_slots.device}; integers beside query")
    _shape("state_slots", state_slots, (sequences,), f"[N], N={sequences}")
    if contents_readable(state_slots):
        slots = [slot for slot in state_slots.tolist() if slot != -1]
        if twice := [slot for slot in slots if slots.count(slot) > 1]:
            raise InvalidInputError(f"state_slots has {twice[0]} twice; every sequence has a slot of its own, or -1")
        if wrong := [slot for slot in slots if not 0 <= slot < state.shape[0]]:
            raise InvalidInputError(
                f"state_slots has {wrong[0]}; the pool has slots 0 to {state.shape[0] - 1}, -1 = none"
            )


def _check_pool(state: Tensor, inputs: tuple[Tensor, ...], *, written: bool, looked_at: bool) -> None:
    if any(tensor.requires_grad for tensor in inputs) and torch.is_grad_enabled():
        raise InvalidInputError(
            "state_slots cannot be used while gradients are wanted, as the pool is written in place: give states "
            "[N, ...], or call it under torch.no_grad()"
        )
    if not written:
        return
    if overlaps_itself(state):
        raise InvalidInputError(
            f"state has strides {state.stride()}, so that several places of it are one, and as a pool it is written; "
            "give it memory of its own for each: state.contiguous()"
        )
    # It is asked as rarely as contents are: an engine's step makes this call for every layer.
    if looked_at and any(tensor is not state and shares_memory(state, tensor) for tensor in inputs):
        raise InvalidInputError(
            "state shares memory with another input, and as a pool it is written; give it memory of its own"
        )


def _check_drafts(query: Tensor, parents: Any, cu_seqlens: Any, every_state: bool) -> None:
    if every_state and cu_seqlens is not None:
        raise InvalidInputError(
            "every_state with cu_seqlens: give draft tokens as [N, drafts, H, D], as many for each sequence"
        )
    if parents is None:
        return
    if not every_state:
        raise InvalidInputError("parents are of draft tokens, whose states all come back: give every_state=True")
    check_tensor("parents", parents, 2, "int32 or int64 [B, S]")
    if parents.dtype not in (torch.int32, torch.int64) or parents.device != query.device:
        raise InvalidInputError(f"parents is {parents.dtype} on {parents.device}; integers beside query are needed")
    _shape("parents", parents, tuple(query.shape[:2]), "[B, S]")
    if contents_readable(parents):
        order = torch.arange(parents.shape[1], device=parents.device)
        if bool(((parents < -1) | (parents >= order)).any()):
            raise InvalidInputError("parents has a token that is no earlier one of its row, nor -1: parents come first")


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
