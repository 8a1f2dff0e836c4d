"""What a call says about its tensors: the pieces of a signature and the fields of a request, for every family."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import AttentionRequest, scalars
from ..contract.request import made
from ..errors import InvalidInputError
from ..selection.overrides import SCOPE, Scope
from ..semantics import validation
from ..semantics.autograd import differentiable
from .binding import Chosen, choose
from .bound_table import BoundTable
from .device_facts import device_facts, dtype_name

grad_on = torch.is_grad_enabled
# By a device's index its current stream: 0 is the default one, which no graph records, and is told sooner.
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)
torch_deterministic = getattr(torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)

LARGE = 2**31
SITES_KEPT = 10_240
"""The most call sites, of 4 KB each."""
NO_CHUNK = 0
Six = tuple[Any, Any, Any, Any, Any, Any]
"""(query, key, value, attn_mask, sinks, out)."""


def autocast_dtype(kind: str) -> torch.dtype | None:
    # Meta tensors have no autocast state of their own.
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def mask_key(mask: Tensor | None, batch: int, heads: int, s_q: int, s_k: int) -> Any:
    if mask is None:
        return None
    shape = tuple(mask.shape)
    fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads) and shape[2:] == (s_q, s_k)
    return (fits, mask.dtype, mask.device, mask.layout, mask.requires_grad, type(mask))


def sinks_key(sinks: Tensor | None) -> Any:
    if sinks is None:
        return None
    return (sinks.shape, sinks.dtype, sinks.device, sinks.layout, sinks.requires_grad, type(sinks))


def out_key(out: Tensor | None, shape: tuple[int, ...], inputs: tuple[Tensor, ...]) -> Any:
    if out is None:
        return None
    shares = any(validation.shares_memory(out, t) for t in inputs)
    placed = out.is_contiguous() or (out.stride()[-1:], validation.overlaps_itself(out))
    return (tuple(out.shape) == shape, out.dtype, out.device, placed, out.requires_grad, shares, type(out))


Added = Mapping[str, Tensor]
"""`FamilySpec.added` of a call by name, what was given of it."""
NOTHING: Added = {}


def added_tensors(alibi: Any, segments: Any) -> Added:
    """Arguments of a call as kernels take them, not checked yet. segments: of queries and keys, or a pair."""
    found = {} if alibi is None else {"alibi": alibi}
    if segments is None:
        return found
    pair = isinstance(segments, (tuple, list)) and len(segments) == 2
    return {**found, "q_segments": segments[0] if pair else segments, "k_segments": segments[1] if pair else segments}


def public(added: Added) -> dict[str, Any]:
    """The same as arguments of the public calls."""
    found: dict[str, Any] = {name: one for name, one in added.items() if name == "alibi"}
    if "q_segments" in added:
        queries, keys = added["q_segments"], added["k_segments"]
        found["segments"] = queries if queries is keys else (queries, keys)
    return found


def added_key(added: Added, query: Any, key: Any, layout: str) -> Any:
    """What decides of them, beside a dense call's signature, who serves the call."""
    if not added:
        return None
    s = 1 if layout == "BSHD" else 2
    sides = [(added[name], tokens) for name, tokens in (("q_segments", query), ("k_segments", key)) if name in added]
    try:
        said = [
            (one.shape == (tokens.shape[0], tokens.shape[s]), *sinks_key(one)[1:], one.stride()[-1:])
            for one, tokens in sides
        ]
        return sinks_key(added.get("alibi")), added.get("q_segments") is added.get("k_segments"), *said
    except AttributeError:  # no tensors, which are told once they are checked
        return object()


def added_fields(added: Added) -> dict[str, Any]:
    """Their request fields."""
    if not added:
        return {}
    queries = added.get("q_segments")
    how = "" if queries is None else "shared" if queries is added["k_segments"] else "pair"
    return {"alibi": "alibi" in added, "segments": how}


class Static(NamedTuple):
    """The arguments of a call that are no tensors, in the order of `attention`. `checked` ones are right."""

    causal: Any = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    layout: str = "BSHD"
    dropout_p: float = 0.0
    return_lse: bool = False
    deterministic: bool = False
    chunk: int = 0
    role: str | None = None
    batch_invariant: bool = False

    def checked(self, layouts: tuple[str, ...] = validation.LAYOUTS) -> Static:
        names = ("causal", "window", "softcap", "scale", "layout", "dropout_p", "chunk")
        window = validation.check_statics(**{name: getattr(self, name) for name in names}, layouts=layouts)
        if self.role not in (None, "self", "cross"):
            raise InvalidInputError(f"role={scalars.shown(self.role)} must be 'self', 'cross' or None")
        lse, exact = scalars.flag("return_lse", self.return_lse), scalars.flag("deterministic", self.deterministic)
        alike = scalars.flag("batch_invariant", self.batch_invariant)
        return self._replace(
            window=window, return_lse=lse, deterministic=exact, chunk=int(self.chunk), batch_invariant=alike
        )

    def fields(self, exact: bool | None = None) -> dict[str, Any]:
        """As request fields. exact: torch's deterministic switch; None = ask."""
        causal = self.causal if isinstance(self.causal, str) else ("bottom_right" if self.causal else "none")
        return {
            "causal": causal,
            "window": self.window,
            "chunk": self.chunk,
            "softcap": float(self.softcap),
            "scale": None if self.scale is None else float(self.scale),
            "layout": self.layout,
            "dropout": float(self.dropout_p),
            "lse": bool(self.return_lse),
            "deterministic": bool(self.deterministic) or (torch_deterministic() if exact is None else exact),
            "batch_invariant": self.batch_invariant,
            "cross": self.role == "cross",
        }


class CallKey(NamedTuple):
    """What a signature holds, in order. Signatures are bare tuples of it, which are made faster.

    Attributes:
        exact_types: all three are plain tensors. lengths_agree: batches, and the lengths of key and value.
        large: 2**31 elements or more. dense_axes: last axes of the three. grads: of the three; None = grad mode is off.
        mask, sinks, out: as `mask_key`, `sinks_key` and `out_key`.
    """

    exact_types: bool
    query_dtype: torch.dtype
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    query_device: torch.device
    key_device: torch.device
    value_device: torch.device
    query_heads: int
    key_heads: int
    value_heads: int
    query_dim: int
    key_dim: int
    value_dim: int
    relation: str
    lengths_agree: bool
    zero_size: bool
    large: bool
    dense_axes: tuple[bool, bool, bool]
    aligned: bool
    grads: tuple[bool, bool, bool] | None
    mask: Any
    sinks: Any
    out: Any
    autocast: torch.dtype | None
    capture: bool
    transform: str
    deterministic: bool

    def wanted(self, return_lse: bool) -> tuple[str, ...]:
        """The gradients that a call wants."""
        if self.grads is None or (not any(self.grads) and self.mask is None and self.sinks is None):
            return ()
        optional = (given is not None and given[4] for given in (self.mask, self.sinks))
        flags = zip(("query", "key", "value", "mask", "sinks"), (*self.grads, *optional), strict=True)
        names = tuple([name for name, on in flags if on])
        return (*names, "lse") if names and return_lse else names


def request_of(key: CallKey, static: Static, *, family: str = "dense", **fields: Any) -> AttentionRequest:
    """What a checked call asks for. fields: what its key does not say, or the family says otherwise.

    Raises:
        InvalidInputError: no platform has tensors of this device.
    """
    said = {
        "family": family,
        "s_relation": key.relation,
        **static.fields(key.deterministic),
        **device_facts(key.query_device),
        "dtype": dtype_name(key.query_dtype),
        "heads": key.query_heads,
        "kv_heads": key.key_heads,
        "head_dim": key.query_dim,
        "v_head_dim": key.value_dim,
        "mask": "none" if key.mask is None else "bool" if key.mask[1] == torch.bool else "additive",
        "sinks": key.sinks is not None,
        "grad": key.wanted(static.return_lse),
        "graph_capture": key.capture,
        "zero_size": key.zero_size,
        "large": key.large,
        "misaligned": not key.aligned,
        "transform": key.transform,
        **fields,
    }
    return made(**said).normalised()


def cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Autocast as torch's SDPA does it: floats but float64 go to the autocast dtype."""
    dtype = autocast_dtype(tensors[0].device.type)
    skip = (torch.float64, dtype)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype not in skip else t for t in tensors)


def autocasted(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """The three as they are attended: `cast` under autocast. What is no tensor is left to the checks."""
    if not isinstance(query, Tensor) or autocast_dtype(query.device.type) is None:
        return query, key, value
    q, k, v = cast(query, key, value) if isinstance(key, Tensor) and isinstance(value, Tensor) else (query, key, value)
    return q, k, v


def runner(chosen: Chosen, return_lse: bool, autocast: bool, head_axis: int) -> Callable[..., Any]:
    """What a signature calls: the bound forward, made differentiable and autocast where that is asked for."""
    bound = chosen.bound
    forward = bound.forward
    if bound.backward is not None and chosen.request.grad:
        forward = differentiable(bound, return_lse, head_axis)
    if not autocast:
        return forward

    def call(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, **kw: Any) -> Any:
        query, key, value = cast(query, key, value)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(query.dtype)
        with torch.autocast(query.device.type, enabled=False):
            return forward(query, key, value, attn_mask=attn_mask, **kw)

    return call


def site_of(kind: Callable[..., Any], static: tuple[Any, ...], backend: Any = None, scope: Scope | None = None) -> Any:
    """`kind(Static(*static), backend, scope)`, the same for the same arguments. scope: None = the one in force here.

    Raises:
        InvalidInputError: an argument is wrong.
    """
    scope = SCOPE.get() if scope is None else scope
    try:
        left, right = static[1]
        return _known_site(left, right, kind, backend, scope, *static)
    except (TypeError, ValueError):  # a window as a list is fine, the rest is told below
        pass
    return kind(Static(*static), backend, scope)


@functools.lru_cache(maxsize=SITES_KEPT, typed=True)
def _known_site(left: Any, right: Any, kind: Any, backend: Any, scope: Scope, *static: Any) -> Any:
    # By their types too, since 1, 1.0 and True are one key of a dict: the bounds are there for those in a tuple.
    return kind(Static(*static), backend, scope)


class Found(NamedTuple):
    """What a signature calls: the choice, its function with everything optional as keywords, and the short way of three
    tensors where there is one."""

    chosen: Chosen
    run: Callable[..., Any]
    simple: Callable[..., Any] | None = None


def found(
    table: BoundTable[Found],
    signature: Any,
    request: Callable[[], AttentionRequest],
    backend: str | None,
    scope: Scope,
    head_axis: int = 1,
    autocast: bool = False,
) -> Found:
    """The entry of a signature, made where there is none. request: what the call asks for. head_axis: of the LSE."""
    entry = table.get(signature)
    if entry is None:
        chosen = choose(request(), backend, scope)
        entry = table.put(signature, Found(chosen, runner(chosen, chosen.request.lse, autocast, head_axis)))
    return entry


def without_autocast(run: Any, query: Tensor, /, *tensors: Any, **given: Any) -> Any:
    """Call `run` on tensors that were `cast` already."""
    if autocast_dtype(query.device.type) is None:
        return run(query, *tensors, **given)
    with torch.autocast(query.device.type, enabled=False):
        return run(query, *tensors, **given)


def backend_name(backend: Any) -> str | None:
    if backend is not None and not isinstance(backend, str):
        raise InvalidInputError(f"backend={backend!r} is a {type(backend).__name__}; give a name as a string, or None")
    return backend
