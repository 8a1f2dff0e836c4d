"""Checks of a call's arguments: host-visible facts always, tensor contents where reading them is free (S1, S8, S9).

Every check raises InvalidInputError naming what, which value, what is allowed and the next step.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .. import envvars
from ..contract import PagedTables, scalars
from ..contract.overlap import shares_memory
from ..errors import InvalidInputError

__all__ = [
    "PackedCheck",
    "TensorGuards",
    "check_cu_seqlens",
    "check_dense",
    "check_dense_axis",
    "check_lengths",
    "check_new_keys",
    "check_out",
    "check_page_table",
    "check_paged",
    "check_plain",
    "check_serving_options",
    "check_statics",
    "check_tensor",
    "check_varlen",
    "contents_readable",
    "has_shapes_only",
    "local_only",
    "overlaps_itself",
    "shares_memory",
]

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LAYOUTS = ("BSHD", "BHSD")
TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
"""What torch.compile knows tensors again by, in one call; None: this torch has none."""


def local_only(name: str) -> str:
    return f"{name} is a DTensor; attention is local: pass {name}.to_local()"


def _tensor(name: str, value: Any, rank: int, shape: str) -> None:
    if not isinstance(value, Tensor):
        raise InvalidInputError(f"{name} is a {type(value).__name__}, a tensor {shape} is needed")
    if type(value) is not Tensor or value.is_nested or value.layout is not torch.strided:
        check_plain(name, value)
    if value.ndim != rank:
        raise InvalidInputError(f"{name} has {value.ndim} dimensions {tuple(value.shape)}, {rank} are needed: {shape}")


def check_plain(name: str, value: Tensor) -> None:
    """Check that a tensor has its numbers in one piece of this process's memory."""
    if value.is_nested:
        raise InvalidInputError(
            f"{name} is a nested tensor; pass packed sequences to varlen_attention instead "
            f"(its .values() and int32 .offsets())"
        )
    if type(value) is not Tensor and any(c.__name__ == "DTensor" for c in type(value).__mro__):
        raise InvalidInputError(local_only(name))
    if value.layout is not torch.strided:
        kind = str(value.layout).removeprefix("torch.").lstrip("_")
        raise InvalidInputError(f"{name} is a tensor of layout {kind}; a dense one is needed: pass {name}.to_dense()")


def check_tensor(name: str, value: Any, rank: int, shape: str) -> None:
    """Check that an argument is a plain tensor of so many dimensions. shape: in words, such as "[B, S, H, D]".

    Raises:
        InvalidInputError: it is not.
    """
    _tensor(name, value, rank, shape)


def check_out(out: Any, query: Tensor, shape: tuple[int, ...], inputs: tuple[Tensor, ...]) -> None:
    """Check a tensor for the output. shape: of the output. inputs: with which it may share no memory, and none of which
    may want a gradient.

    Raises:
        InvalidInputError: names what is wrong, its value and what is allowed.
    """
    _out(out, query, shape, inputs, ())


def check_statics(
    *,
    causal: Any,
    window: Any,
    softcap: Any,
    scale: Any,
    layout: Any,
    dropout_p: Any,
    layouts: tuple[str, ...] = LAYOUTS,
) -> tuple[int, int]:
    """Check the arguments that are no tensors but for flags; returns the window as a pair of ints."""
    by_name = isinstance(causal, str) and causal in ("top_left", "bottom_right")
    if not by_name and not scalars.is_flag(causal):
        raise InvalidInputError(
            f"causal={scalars.shown(causal)} must be True (bottom-right), False, 'top_left' or 'bottom_right'"
        )
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise InvalidInputError(
            f"window={scalars.shown(window)} must be a pair (left, right) of key counts, -1 = unlimited"
        )
    left, right = map(scalars.bound, window)
    if left is None or right is None:
        side = "left" if left is None else "right"
        raise InvalidInputError(
            f"window={scalars.shown(tuple(window))}: the {side} bound must be an integer >= 0, or -1 for "
            f"unlimited (a model's sliding window of W tokens is (W - 1, 0))"
        )
    if wrong := scalars.softcap(softcap):
        raise InvalidInputError(f"softcap={scalars.shown(softcap)} {wrong}")
    if scale is not None and (wrong := scalars.scale(scale)):
        raise InvalidInputError(f"scale={scalars.shown(scale)} {wrong}")
    if not isinstance(layout, str) or layout not in layouts:
        raise InvalidInputError(f"layout={scalars.shown(layout)} must be one of {', '.join(layouts)}")
    if not scalars.number(dropout_p) or not 0 <= dropout_p < 1:
        raise InvalidInputError(f"dropout_p={scalars.shown(dropout_p)} must be a probability, 0 <= p < 1")
    return left, right


def _common(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    h_q: int,
    h_kv: int,
    h_v: int,
    kv_dtypes: bool = False,
    packed: int = 1,
    layout: str = "",
) -> None:
    names = (("query", query), ("key", key), ("value", value))
    for name, tensor in names:
        if tensor.dtype not in FLOATS and not (kv_dtypes and name != "query"):
            raise InvalidInputError(f"{name} is {tensor.dtype}; float32, float16, bfloat16 or float64 is needed")
        if tensor.device != query.device:
            raise InvalidInputError(f"{name} is on {tensor.device}, query on {query.device}; move them to one device")
        if tensor.stride(-1) != 1:
            check_dense_axis(name, tensor)
    if not kv_dtypes and not (query.dtype == key.dtype == value.dtype):
        raise InvalidInputError(
            f"query is {query.dtype}, key {key.dtype}, value {value.dtype}; cast them to one dtype, or use autocast"
        )
    if h_kv != h_v:
        raise InvalidInputError(f"key has {h_kv} heads, value {h_v}; they must be equal")
    if not h_q or not h_kv:
        raise InvalidInputError(f"query has {h_q} heads, key and value {h_kv}; one at least is needed of each")
    if h_q % h_kv:
        raise InvalidInputError(
            f"query has {h_q} heads, key and value {h_kv}: H_q must be a multiple of H_kv"
            f"{_other_layout(query, key, value, layout)}"
        )
    if key.shape[-1] * packed != query.shape[-1]:
        width = key.shape[-1] * packed
        hint = " (uint8 holds FP4, two numbers a byte; an FP8 cache is .view(torch.float8_e4m3fn))"
        more = hint if packed > 1 else ""
        raise InvalidInputError(f"query has head dim {query.shape[-1]}, key {width}; they must be equal{more}")
    if not query.shape[-1] or not value.shape[-1]:
        raise InvalidInputError(f"head dims are {query.shape[-1]} and {value.shape[-1]}; both must be at least 1")


def _other_layout(query: Tensor, key: Tensor, value: Tensor, layout: str) -> str:
    """The next step where the tensors of a dense call would fit in the other layout."""
    if not layout:
        return ""
    s, h = (2, 1) if layout == "BSHD" else (1, 2)
    h_q, h_kv = query.shape[h], key.shape[h]
    if not h_kv or h_q % h_kv or value.shape[h] != h_kv or key.shape[s] != value.shape[s]:
        return ""
    other, shape = ("BHSD", "[B, H, S, D]") if layout == "BSHD" else ("BSHD", "[B, S, H, D]")
    return f"; tensors in {shape} need layout={other!r}"


def check_dense(query: Any, key: Any, value: Any, attn_mask: Any, sinks: Any, out: Any, layout: str) -> None:
    """Check the tensors of a dense call."""
    bshd = layout == "BSHD"
    shape = "[B, S, H, D]" if bshd else "[B, H, S, D]"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _tensor(name, tensor, 4, shape)
    s, h = (1, 2) if bshd else (2, 1)
    _common(query, key, value, query.shape[h], key.shape[h], value.shape[h], layout=layout)
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise InvalidInputError(
            f"batch sizes differ: query {query.shape[0]}, key {key.shape[0]}, value {value.shape[0]}; expand them"
        )
    if key.shape[s] != value.shape[s]:
        raise InvalidInputError(f"key has {key.shape[s]} positions, value {value.shape[s]}; they must be equal")
    if attn_mask is not None:
        _mask(attn_mask, query, query.shape[0], query.shape[h], query.shape[s], key.shape[s], "S_q, S_k")
    if sinks is not None:
        _sinks(sinks, query, query.shape[h])
    if out is not None:
        _out(out, query, (*query.shape[:3], value.shape[-1]), (query, key, value), (attn_mask, sinks))


def _mask(attn_mask: Any, query: Tensor, batch: int, heads: int, s_q: int, s_k: int, axes: str) -> None:
    if attn_mask is None:
        return
    fits = (
        isinstance(attn_mask, Tensor)
        and not attn_mask.is_nested
        and attn_mask.ndim == 4
        and attn_mask.shape[0] in (1, batch)
        and attn_mask.shape[1] in (1, heads)
        and attn_mask.shape[2:] == (s_q, s_k)
    )
    allowed = "" if fits else _mask_shapes(attn_mask, batch, heads, s_q, s_k, axes)
    _tensor("attn_mask", attn_mask, 4, allowed)
    if not fits:
        raise InvalidInputError(f"attn_mask has shape {tuple(attn_mask.shape)}, allowed: {allowed}")
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in FLOATS:
        raise InvalidInputError(
            f"attn_mask is {attn_mask.dtype}; bool (True = attend) or a float to be added is needed"
        )
    if attn_mask.device != query.device:
        raise InvalidInputError(f"attn_mask is on {attn_mask.device}, query on {query.device}; move it")


def _mask_shapes(attn_mask: Any, batch: int, heads: int, s_q: int, s_k: int, axes: str) -> str:
    """The shapes that a mask may have, and how one that torch's SDPA would broadcast becomes one of them."""
    either = ", ".join("1" if n == 1 else f"{n} or 1" for n in (batch, heads))
    allowed = f"[{either}, {s_q}, {s_k}] (B|1, H_q|1, {axes})"
    if not isinstance(attn_mask, Tensor) or attn_mask.is_nested or not 2 <= attn_mask.ndim <= 4:
        return allowed
    shape = tuple(attn_mask.shape)
    rows = "" if shape[-2] == s_q else f".expand(-1, -1, {s_q}, -1)"
    if len(shape) == 2 and shape == (batch, s_k) != (s_q, s_k):
        step = f"[:, None, None].expand(-1, -1, {s_q}, -1)"
    elif shape[-2] not in (1, s_q) or shape[-1] != s_k:
        return allowed
    elif len(shape) == 3:
        # torch aligns on the right: three axes are [H_q, S_q, S_k]. Where only B fits, that is meant.
        step = f"[None]{rows}" if shape[0] in (1, heads) else f"[:, None]{rows}" if shape[0] == batch else ""
    elif len(shape) == 2:
        step = f"[None, None]{rows}"
    else:
        step = rows if shape[0] in (1, batch) and shape[1] in (1, heads) else ""
    return f"{allowed}; pass attn_mask{step}" if step else allowed


def _sinks(sinks: Any, query: Tensor, heads: int) -> None:
    if sinks is None:
        return
    if isinstance(sinks, Tensor) and 2 <= sinks.ndim <= 3 and heads in sinks.shape:
        raise InvalidInputError(
            f"sinks has shape {tuple(sinks.shape)}; a call takes one logit per query head, [{heads}] (H_q). Of one for "
            f"each row: call without sinks and with return_lse=True, then polyattn.merge([out], [lse], sinks=sinks)"
        )
    _tensor("sinks", sinks, 1, f"[{heads}] (H_q)")
    if sinks.shape[0] != heads:
        raise InvalidInputError(f"sinks has {sinks.shape[0]} entries, one per query head is needed: {heads}")
    if sinks.dtype not in FLOATS:
        raise InvalidInputError(f"sinks is {sinks.dtype}; a float dtype is needed")
    if sinks.device != query.device:
        raise InvalidInputError(f"sinks is on {sinks.device}, query on {query.device}; move it")


def _out(
    out: Any, query: Tensor, shape: tuple[int, ...], inputs: tuple[Tensor, ...], optional: tuple[Tensor | None, ...]
) -> None:
    if out is None:
        return
    _tensor("out", out, len(shape), str(list(shape)))
    if tuple(out.shape) != shape or out.dtype != query.dtype or out.device != query.device:
        raise InvalidInputError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}; {shape} {query.dtype} on {query.device} is needed"
        )
    if out.stride(-1) != 1 and out.shape[-1] != 1:
        raise InvalidInputError(f"out's last axis is not dense (strides {tuple(out.stride())})")
    if overlaps_itself(out):
        raise InvalidInputError(
            f"out has several elements in one place (strides {tuple(out.stride())} of {shape}), as an expanded tensor "
            f"has; pass a tensor with memory for each"
        )
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*inputs, *optional)):
        raise InvalidInputError("out= cannot be used while gradients are wanted; drop it, or run under torch.no_grad()")
    if any(shares_memory(out, t) for t in inputs):
        raise InvalidInputError("out shares memory with an input; pass a tensor of its own")


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may be in one place: an axis steps less far than those within it reach."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and tensor.numel():
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def contents_readable(tensor: Tensor) -> bool:
    """Whether tensor contents are checked: always on the CPU, on a device only under POLYATTN_VALIDATE=1."""
    if tensor.device.type == "cpu":
        return True
    # Only torch's CUDA builds can be asked whether they capture.
    return envvars.flag("POLYATTN_VALIDATE") and not (
        tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    )


def has_shapes_only(tensor: Any) -> bool:
    """Whether a tensor, meta or fake, has no contents: a packed call then gives what its custom op gives in a trace."""
    return getattr(tensor, "is_meta", False) or type(tensor).__name__ == "FakeTensor"


def _index(name: str, value: Any, rank: int, shape: str) -> None:
    _tensor(name, value, rank, shape)
    if value.dtype != torch.int32:
        raise InvalidInputError(f"{name} is {value.dtype}; int32 is needed: {name}.to(torch.int32)")
    check_dense_axis(name, value)


def check_dense_axis(name: str, tensor: Tensor) -> None:
    """Of the strides the last one has to be 1 (S1)."""
    if tensor.shape[-1] != 1 and tensor.stride(-1) != 1 and tensor.numel():
        raise InvalidInputError(
            f"{name}'s last axis is not dense (strides {tuple(tensor.stride())}); pass {name}.contiguous()"
        )


def check_lengths(query: Tensor, key: Tensor, **lens: Any) -> None:
    """Check the contents of a packed call's lengths, where they can be read."""
    if contents_readable(lens["cu_seqlens_q"]):
        for side, tensor in (("q", query), ("k", key)):
            longest, cu = lens[f"max_seqlen_{side}"], lens[f"cu_seqlens_{side}"]
            check_cu_seqlens(f"cu_seqlens_{side}", cu, tensor.shape[0], longest, f"max_seqlen_{side}")


def check_cu_seqlens(name: str, cu: Tensor, tokens: int, longest: int, max_name: str) -> list[int]:
    """Check the contents of cumulative lengths [N+1]; returns them."""
    try:
        starts: list[int] = cu.tolist()
    except RuntimeError as exc:  # vmap batches it
        raise InvalidInputError(
            f"{name} cannot be read on the host: {exc}; under vmap map over tensors of one set of lengths "
            f"(in_dims=None for {name}), or call once for each set"
        ) from exc
    if starts[0] != 0:
        raise InvalidInputError(f"{name} starts with {starts[0]}; it must start with 0")
    if starts[-1] != tokens:
        raise InvalidInputError(
            f"{name} ends at {starts[-1]}, the packed batch has {tokens} tokens; they must agree"
            f"{_without_tail(name, starts[-1]) if 0 <= starts[-1] < tokens else ''}"
        )
    lengths = [b - a for a, b in pairwise(starts)]
    if min(lengths, default=0) < 0:
        at = next(i for i, n in enumerate(lengths) if n < 0)
        raise InvalidInputError(f"{name} falls from {starts[at]} to {starts[at + 1]} at {at}; it must not decrease")
    if max(lengths, default=0) > longest:
        raise InvalidInputError(f"{max_name}={longest} is less than the longest sequence, {max(lengths)}")
    return starts


def _without_tail(name: str, end: int) -> str:
    """The next step where tokens of padding are behind the last sequence."""
    rows = {"cu_seqlens_q": f"query[:{end}]", "cu_seqlens_k": f"key[:{end}] and value[:{end}]"}
    tensors = rows.get(name, f"[:, :{end}] of each tensor of tokens")
    return f". If padding is behind the last sequence, cut it off and pass {tensors}"


def check_varlen(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    attn_mask: Any,
    sinks: Any,
    out: Any,
) -> None:
    """Check the host-visible facts of a packed call."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _tensor(name, tensor, 3, "[T, H, D]")
    _common(query, key, value, query.shape[1], key.shape[1], value.shape[1])
    if key.shape[0] != value.shape[0]:
        raise InvalidInputError(f"key has {key.shape[0]} tokens, value {value.shape[0]}; they must be equal")
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _index(name, cu, 1, "[N+1]")
        if cu.shape[0] < 1:
            raise InvalidInputError(f"{name} is empty; it has one entry more than there are sequences")
        if cu.device != query.device:
            raise InvalidInputError(f"{name} is on {cu.device}, query on {query.device}; move it")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise InvalidInputError(
            f"cu_seqlens_q has {cu_seqlens_q.shape[0]} entries, cu_seqlens_k {cu_seqlens_k.shape[0]}; make them equal"
        )
    _lengths(max_seqlen_q, max_seqlen_k)
    _mask(attn_mask, query, cu_seqlens_q.shape[0] - 1, query.shape[1], max_seqlen_q, max_seqlen_k, "max_q, max_k")
    _sinks(sinks, query, query.shape[1])
    _out(out, query, (*query.shape[:2], value.shape[-1]), (query, key, value), (attn_mask, sinks))


class PackedCheck:
    """`check_varlen` for the calls of one site: tensors like those that passed twice are known by torch's guards, and
    only what these do not see is looked at."""

    __slots__ = ("_like", "_seen")

    def __init__(self) -> None:
        self._like: dict[bool, Any] = {}
        self._seen: Any = None

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        attn_mask: Any,
        sinks: Any,
        out: Any,
    ) -> None:
        one = cu_seqlens_q is cu_seqlens_k
        tensors = (query, key, value, cu_seqlens_q) if one else (query, key, value, cu_seqlens_q, cu_seqlens_k)
        plain = attn_mask is sinks is out is None
        if (
            plain
            and (alike := self._like.get(one)) is not None
            and alike(*tensors)
            and key.shape[0] == value.shape[0]
            and 0 < cu_seqlens_q.shape[0] == cu_seqlens_k.shape[0]
            and type(max_seqlen_q) is type(max_seqlen_k) is int
            and max_seqlen_q >= 0 <= max_seqlen_k
        ):
            return
        check_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, attn_mask, sinks, out)
        seen = one, *((t.dtype, t.shape[1:], t.requires_grad) for t in tensors)
        # Guards never hold for one tensor passed twice, and those of calls that take turns would be made each time.
        if seen == self._seen and plain and TensorGuards is not None and query is not key is not value is not query:
            sizes = [[None, *t.shape[1:]] for t in tensors]
            strides = [[*[None] * (t.ndim - 1), 1] for t in tensors]
            self._like[one] = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        self._seen = seen


def _lengths(max_seqlen_q: Any, max_seqlen_k: Any) -> None:
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        scalars.length(name, longest)


def check_paged(query: Any, key_cache: Any, value_cache: Any, tables: PagedTables, kv_layout: str) -> None:
    """Check a paged call, contents included where they are readable."""
    if not isinstance(kv_layout, str) or kv_layout not in ("NHD", "HND"):
        raise InvalidInputError(f"kv_layout={scalars.shown(kv_layout)} must be NHD or HND")
    _tensor("query", query, 3, "[T, H_q, D]")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        _tensor(name, cache, 4, "[pages, page_size, H_kv, D]" if kv_layout == "NHD" else "[pages, H_kv, page_size, D]")
    h, p = (2, 1) if kv_layout == "NHD" else (1, 2)
    heads = (query.shape[1], key_cache.shape[h], value_cache.shape[h])
    # Two numbers of FP4 share a byte.
    _common(query, key_cache, value_cache, *heads, kv_dtypes=True, packed=2 if key_cache.dtype == torch.uint8 else 1)
    if key_cache.shape[:3] != value_cache.shape[:3]:
        raise InvalidInputError(
            f"key_cache is {tuple(key_cache.shape)}, value_cache {tuple(value_cache.shape)}; pages must agree"
        )
    check_page_table(query, tables, key_cache.shape[0], key_cache.shape[p])


def check_new_keys(query: Tensor, key: Any, value: Any, heads: int, v_head_dim: int) -> None:
    """Check the keys and values of the query tokens, [T_q, H_kv, D | D_v]."""
    if (key is None) != (value is None):
        raise InvalidInputError("key and value go together: pass both, or none")
    for name, new, width in (("key", key, query.shape[2]), ("value", value, v_head_dim)):
        if new is None:
            continue
        shape = (query.shape[0], heads, width)
        _tensor(name, new, 3, "[T_q, H_kv, D]")
        if tuple(new.shape) != shape or new.dtype not in FLOATS or new.device != query.device:
            raise InvalidInputError(
                f"{name} is {tuple(new.shape)} {new.dtype} on {new.device}; {shape} (T_q, H_kv, D) of a float dtype on "
                f"{query.device} is needed"
            )


def check_serving_options(
    query: Tensor,
    sequences: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    attn_mask: Any,
    sinks: Any,
    out: Any,
    v_head_dim: int,
    inputs: tuple[Tensor, ...],
) -> None:
    """Check what a paged or latent call may bring besides its tables."""
    _mask(attn_mask, query, sequences, query.shape[1], max_seqlen_q, max_seqlen_k, "max_q, max_k")
    _sinks(sinks, query, query.shape[1])
    _out(out, query, (*query.shape[:2], v_head_dim), inputs, ())


def check_page_table(query: Tensor, tables: PagedTables, pages: int, page_size: int, grouped: bool = False) -> None:
    """Check the tables of a paged or latent call against a cache of `pages` pages.

    `grouped`: they are those of a `KVPart`, whose queries are not the last tokens of its rows.
    """
    page_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k = tables[:5]
    _index("page_table", page_table, 2, "[N, max_pages]")
    _index("seq_lens", seq_lens, 1, "[N]")
    _index("cu_seqlens_q", cu_seqlens_q, 1, "[N+1]")
    for name, table in (("page_table", page_table), ("seq_lens", seq_lens), ("cu_seqlens_q", cu_seqlens_q)):
        if table.device != query.device:
            raise InvalidInputError(f"{name} is on {table.device}, query on {query.device}; move it")
    _lengths(max_seqlen_q, max_seqlen_k)
    if page_size < 1:
        raise InvalidInputError("the pages of the cache hold 0 tokens; a page holds 1 or more")
    count = page_table.shape[0]
    if seq_lens.shape[0] != count or cu_seqlens_q.shape[0] != count + 1:
        raise InvalidInputError(
            f"page_table has {count} rows, seq_lens {seq_lens.shape[0]} entries, cu_seqlens_q {cu_seqlens_q.shape[0]}; "
            f"N, N and N + 1 are needed"
        )
    if has_shapes_only(page_table):
        raise InvalidInputError(
            "page_table is a meta or fake tensor, and calls over a cache read what is in it: pass tensors with contents"
        )
    if not contents_readable(seq_lens):
        return
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, query.shape[0], max_seqlen_q, "max_seqlen_q")
    starts = cu_seqlens_q.tolist()
    rows = page_table.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        new = starts[i + 1] - starts[i]
        needed = -(-length // page_size)
        if length < 0 or (0 < length < new and not grouped):  # 0 marks a padding row, whatever its queries
            raise InvalidInputError(
                f"seq_lens[{i}]={length} is less than its {new} queries; it counts all keys, new ones included"
            )
        if length > max_seqlen_k:
            raise InvalidInputError(f"max_seqlen_k={max_seqlen_k} is less than seq_lens[{i}]={length}")
        if needed > page_table.shape[1]:
            raise InvalidInputError(
                f"seq_lens[{i}]={length} needs {needed} pages of {page_size}, page_table has {page_table.shape[1]}"
            )
        for column in range(needed):
            if not 0 <= rows[i][column] < pages:
                raise InvalidInputError(
                    f"page_table[{i}, {column}]={rows[i][column]} is not a page of the cache, 0 to {pages - 1}"
                )
