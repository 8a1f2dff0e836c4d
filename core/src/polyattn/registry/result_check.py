"""Does a backend answer as the contract says, and leave its inputs alone? Asked at each call under POLYATTN_VALIDATE=1.

Without the variable nothing here is in the way of a call: functions are wrapped when they are loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest, Bound
from ..contract.families import FAMILY_SPECS
from ..contract.overlap import shares_memory
from ..errors import PluginError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MOST_BYTES", "checking"]

MOST_BYTES = 256 * 2**20
"""Inputs are compared with a copy of them; those of a call that are larger than this together are not."""

_VALUE = {"linear": "value"}
"""Families whose output is as wide as a tensor says, and not the request."""
_CACHES = ("key_cache", "value_cache", "cache")
_POSITIONAL = {spec.name: tuple(one.name for one in spec.positional) for spec in FAMILY_SPECS.values()}
_GRADIENT = ("dout", "query", "key", "value", "out", "lse")


def checking(bound: Bound, request: AttentionRequest, who: str) -> Bound:
    """`bound` with functions that look at what they are given and return, and raise PluginError where that is wrong.

    Args:
        who: the plugin and its backend, for messages.
    """
    if request.family not in _POSITIONAL:
        return bound
    names = _POSITIONAL[request.family]
    with_lse = request.family != "linear" and (request.lse or bool(bound.backward and request.grad))

    def answered(result: Any, given: Mapping[str, Any]) -> None:
        _check_result(result, given, request, with_lse, f"{who}: its {request.family} forward")

    def differentiated(result: Any, given: Mapping[str, Any]) -> None:
        _check_gradients(result, given, f"{who}: its {request.family} backward")

    def forward(function: Callable[..., Any]) -> Callable[..., Any]:
        return _wrapped(function, names, request, answered, f"{who}: its {request.family} forward")

    backward = bound.backward and _wrapped(
        bound.backward, _GRADIENT, request, differentiated, f"{who}: its {request.family} backward"
    )
    session = bound.session
    return dataclasses.replace(
        bound,
        forward=forward(bound.forward),
        backward=backward,
        # It is for calls without a backward of their own, and returns the output alone.
        simple=bound.simple and forward(bound.simple),
        session=session and (lambda slot: _Session(session(slot), forward)),
    )


class _Session:
    """A serving side whose forward is looked at."""

    def __init__(self, inner: Any, forward: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._inner = inner
        self.forward = forward(inner.forward)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _wrapped(
    function: Callable[..., Any],
    names: Sequence[str],
    request: AttentionRequest,
    check: Callable[[Any, Mapping[str, Any]], None],
    what: str,
) -> Callable[..., Any]:
    import torch

    is_compiling = torch.compiler.is_compiling

    def looked_at(*tensors: Any, **keywords: Any) -> Any:
        # A mode watches operators, as for a recording: those of a check are none of the call's.
        if is_compiling() or torch._C._len_torch_dispatch_stack():
            return function(*tensors, **keywords)
        given = {**dict(zip(names, tensors, strict=False)), **keywords}
        if (tables := given.pop("tables", None)) is not None:
            given |= tables._asdict()
        kept = _copies(given, request)
        result = function(*tensors, **keywords)
        if _readable(given.get("query")):
            check(result, given)
        for name, (tensor, before) in kept.items():
            if not _same_bits(tensor, before):
                raise PluginError(
                    f"{what} wrote to its input {name}, {_said(tensor)}; a function of a backend must not: it works on "
                    f"a copy"
                )
        return result

    return looked_at


def _readable(tensor: Any) -> bool:
    """Return whether a tensor is one with contents of its own, and neither recorded nor transformed."""
    import torch

    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta
    if not plain or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _copies(given: Mapping[str, Any], request: AttentionRequest) -> dict[str, tuple[Tensor, Tensor]]:
    """Copies of the inputs that must stay as they are."""
    written = ("out", "lse", *_CACHES) if request.save_kv_cache else ("out",)
    kept = {n: t for n, t in given.items() if _readable(t) and (n not in written or "dout" in given)}
    if sum(t.nbytes for t in kept.values()) > MOST_BYTES:
        return {}
    return {name: (tensor, tensor.detach().clone()) for name, tensor in kept.items()}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same, NaN being itself."""
    import torch

    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    with torch.no_grad():
        return torch.equal(a.detach().view(whole), b.view(whole))


def _check_result(result: Any, given: Mapping[str, Any], request: AttentionRequest, with_lse: bool, what: str) -> None:
    import torch

    query: Tensor = given["query"]
    pair = with_lse or request.family == "linear"
    if pair and not (isinstance(result, tuple) and len(result) == 2):
        raise PluginError(
            f"{what} returned {_said(result)}; a pair, (out, {'lse' if with_lse else 'state'}), is needed"
        )
    out = result[0] if pair else result
    width = given[_VALUE[request.family]].shape[-1] if request.family in _VALUE else request.dims[-1]
    heads = given["value"].shape[:-1] if request.family == "linear" else query.shape[:-1]
    _check_tensor(out, (*heads, width), query.dtype, query.device, f"{what} returned as out")
    asked = given.get("out")
    if asked is not None and out is not asked:
        raise PluginError(f"{what} was given out= and returned another tensor, {_said(out)}; out itself is needed")
    for name, tensor in given.items():
        if name != "out" and isinstance(tensor, torch.Tensor) and _readable(tensor) and shares_memory(out, tensor):
            raise PluginError(f"{what} returned its input {name}, or memory of it; the output is a tensor of its own")
    if with_lse:
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        _check_tensor(result[1], tuple(query.shape[:-1]), exact, query.device, f"{what} returned as lse", dense=False)


def _check_gradients(result: Any, given: Mapping[str, Any], what: str) -> None:
    if not (isinstance(result, tuple) and len(result) == 3):
        raise PluginError(f"{what} returned {_said(result)}; (dquery, dkey, dvalue) is needed")
    for name, gradient in zip(("query", "key", "value"), result, strict=True):
        wanted = given[name]
        shape, dtype = tuple(wanted.shape), wanted.dtype
        _check_tensor(gradient, shape, dtype, wanted.device, f"{what} returned as d{name}", dense=False)


def _check_tensor(
    found: Any, shape: tuple[int, ...], dtype: Any, device: Any, what: str, *, dense: bool = True
) -> None:
    import torch

    like = isinstance(found, torch.Tensor) and (tuple(found.shape), found.dtype, found.device) == (shape, dtype, device)
    if not like:
        raise PluginError(f"{what} {_said(found)}; {list(shape)} {_short(dtype)} on {device} is needed")
    if dense and shape[-1] != 1 and found.numel() and found.stride(-1) != 1:
        raise PluginError(f"{what} a tensor with strides {found.stride()}; a dense last axis is needed")


def _said(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {_short(value.dtype)} on {value.device}"
    inside = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"a {type(value).__name__}{inside}"


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
