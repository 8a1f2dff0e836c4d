"""What a trace says of a call's tensors, as constants: a plan is made of these (`polyattn.dispatch.compile.trace`).

dynamo inlines these functions. A comparison of sizes becomes a guard where it decides a branch, and stays a symbol
where it is a result; so results are words that a branch gives.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ...semantics.validation import LinearOptions, local_only
from ..call_key import LARGE, Added, Six, Static

__all__ = [
    *("TensorFacts", "added_facts", "constants", "counted", "fixed", "fixed_int"),
    *("map_fits", "mask_fits", "out_fits", "tensor_facts"),
]


class TensorFacts(NamedTuple):
    """What `tensor_facts` says, in order. dynamo hands it over as a bare tuple.

    Attributes:
        misplaced: what is wrong with where the tensors are, or nothing. mask: its dtype. sinks: ("fits" or not, dtype).
        out: ("fits", or what it does not; dtype). grads: of query, key, value, mask and sinks. switches: torch's
            deterministic one, and whether this is an export. sizes: (no elements, 2**31 or more).
    """

    device: str
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    misplaced: str
    mask: torch.dtype | None
    sinks: tuple[str, torch.dtype] | None
    out: tuple[str, torch.dtype] | None
    grads: tuple[bool, ...]
    autocast: torch.dtype | None
    switches: tuple[bool, bool]
    sizes: tuple[bool, bool]


def counted() -> bool:
    """Whether torch's FLOP counter looks on: it sees operators alone, so a kernel that is none is called through ours.
    (Torch's guards hold for no tensor under such a mode, so calls come by here.)"""
    return bool(torch._C._len_torch_dispatch_stack()) and any(
        type(mode).__name__ == "_FlopCounterMode" for mode in _get_current_dispatch_mode_stack()
    )


def fixed(*sizes: int) -> tuple[int, ...]:
    """Sizes that must be constants (heads, head dims): the length of a range is where dynamo fixes a symbol."""
    return tuple([len(range(size)) for size in sizes])


def constants(static: Static) -> tuple[Any, ...]:
    """The static arguments with their numbers fixed: dynamo may hold a float attribute or default as a symbol, and
    `math.ldexp(x, 0)`, which is exactly x, is where it becomes a constant."""
    window: Any = static.window
    if isinstance(window, (tuple, list)):
        window = tuple([fixed_int(side) for side in window])
    return (
        *(static.causal, window, fixed_number(static.softcap), fixed_number(static.scale)),
        *(static.layout, fixed_number(static.dropout_p), static.return_lse, static.deterministic),
        *(fixed_int(static.chunk), static.role, static.batch_invariant),
    )


def gate_facts(options: LinearOptions, *tensors: Any) -> tuple[LinearOptions, tuple[Any, ...]]:
    """The options with their numbers fixed, and what `check_traced_gates` looks at: of query, value, gate, beta, a_log
    and dt_bias."""
    options = options._replace(gate_bound=fixed_number(options.gate_bound), beta_range=fixed_int(options.beta_range))
    said = [None if t is None else (t.dtype, fixed(*t.shape[2 * (n < 4) :])) for n, t in enumerate(tensors)]
    return options, tuple(said)


def fixed_int(number: Any) -> Any:
    return int(math.ldexp(number, 0)) if _small(number) else number


def fixed_number(number: Any) -> Any:
    """What is no number is left to the check that eager calls make."""
    return math.ldexp(number, 0) if isinstance(number, float) or _small(number) else number


def _small(number: Any) -> bool:
    """Whether it is an int, and a float holds it. A bool is none, here as in that check."""
    return isinstance(number, int) and not isinstance(number, bool) and -(2**53) < number < 2**53


def mask_fits(attn_mask: Tensor, query: Tensor, h: int, s_q: int, s_k: int) -> bool:
    return (
        attn_mask.ndim == 4
        and (attn_mask.shape[0] == 1 or attn_mask.shape[0] == query.shape[0])
        and (attn_mask.shape[1] == 1 or attn_mask.shape[1] == query.shape[h])
        and attn_mask.shape[2] == s_q
        and attn_mask.shape[3] == s_k
    )


def map_fits(block_map: Tensor, query: Tensor, key: Tensor, block_shape: tuple[int, int]) -> bool:
    """Heads first. The lists that are made of the map are checked when the graph runs, but for the number of keys."""
    return (
        block_map.ndim == 4
        and block_map.shape[2] == (query.shape[2] + block_shape[0] - 1) // block_shape[0]
        and block_map.shape[3] == (key.shape[2] + block_shape[1] - 1) // block_shape[1]
    )


def out_fits(out: Tensor, query: Tensor, d_v: int) -> str:
    fits = out.ndim == query.ndim and out.shape[:-1] == query.shape[:-1] and out.shape[-1] == d_v
    if not fits:
        return "does not fit"
    # Only a stride of 0: a comparison of others would be a guard on lengths.
    expanded = [True for stride, size in zip(out.stride(), out.shape, strict=True) if stride == 0 and size != 1]
    return "fits" if expanded == [] else "is expanded"


def _fits(tensor: Any, like: Tensor, *shape: int) -> str:
    """ "fits" for a tensor of this shape beside `like`."""
    if not isinstance(tensor, Tensor) or tensor.device != like.device or tensor.ndim != len(shape):
        return "does not fit"
    wrong = [True for size, wanted in zip(tensor.shape, shape, strict=True) if size != wanted]
    return "fits" if wrong == [] else "does not fit"


def added_facts(added: Added, query: Tensor, key: Tensor, heads: int, length: int) -> tuple[Any, Any]:
    """(of `alibi`, of segments), each None where none is given: whether it fits, its dtype, and of slopes whether they
    want a gradient, of segments how they are shared. heads, length: axes of the query and the key."""
    alibi, queries, keys = added.get("alibi"), added.get("q_segments"), added.get("k_segments")
    slopes = how = None
    if alibi is not None:
        trains = torch.is_grad_enabled() and getattr(alibi, "requires_grad", False)
        slopes = (_fits(alibi, query, query.shape[heads]), getattr(alibi, "dtype", None), trains)
    if queries is not None:
        fits = _fits(queries, query, query.shape[0], query.shape[length]) == "fits"
        fits = fits and _fits(keys, query, key.shape[0], key.shape[length]) == "fits"
        dtypes = (getattr(queries, "dtype", None), getattr(keys, "dtype", None))
        how = ("fits" if fits else "does not fit", dtypes, "shared" if queries is keys else "pair")
    return slopes, how


def _sizes(query: Tensor, key: Tensor, value: Tensor) -> tuple[bool, bool]:
    """Whether a tensor has no elements, and whether one has 2**31 or more. Of sizes that nobody knows while tracing,
    neither is assumed; an export is held to no bound for the second."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

    counts = (query.numel(), key.numel(), value.numel())
    known = statically_known_true if torch.compiler.is_exporting() else guard_or_false
    return (
        guard_or_false(counts[0] == 0) or guard_or_false(counts[1] == 0) or guard_or_false(counts[2] == 0),
        known(counts[0] >= LARGE) or known(counts[1] >= LARGE) or known(counts[2] >= LARGE),
    )


def _misplaced(six: Six) -> str:
    """What is wrong with where the tensors are, or nothing."""
    for name, tensor in zip(("query", "key", "value", "attn_mask", "sinks", "out"), six, strict=True):
        if tensor is None:
            continue
        if type(tensor).__name__ == "DTensor":
            return local_only(name)
        if tensor.device != six[0].device:
            return "the tensors of the call are on different devices; move them to one"
    return ""


def tensor_facts(six: Six, heads: int, like: Tensor | None = None) -> tuple[Any, ...]:
    """`TensorFacts` of a call. heads: axis of H_q in the query. like: has the shape of the output but for its last
    axis; None = the query."""
    query, key, value, attn_mask, sinks, out = six
    kind = query.device.type
    grad = torch.is_grad_enabled()
    return (
        str(query.device),
        (query.dtype, key.dtype, value.dtype),
        _misplaced(six),
        None if attn_mask is None else attn_mask.dtype,
        None if sinks is None else (_fits(sinks, query, query.shape[heads]), sinks.dtype),
        None if out is None else (out_fits(out, query if like is None else like, value.shape[-1]), out.dtype),
        (
            grad and query.requires_grad,
            grad and key.requires_grad,
            grad and value.requires_grad,
            grad and attn_mask is not None and attn_mask.requires_grad,
            grad and sinks is not None and sinks.requires_grad,
        ),
        torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None,
        (torch.are_deterministic_algorithms_enabled(), torch.compiler.is_exporting()),
        _sizes(query, key, value),
    )
