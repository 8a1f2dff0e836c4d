"""What a call says about its tensors: the pieces of a signature and the fields of a request, for every family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..adapters.alignment import aligned
from ..adapters.device import capturing
from ..contract import scalars
from ..errors import InvalidInputError
from ..semantics import validation
from ..semantics.autograd import differentiable
from .binding import Chosen, device_facts, dtype_name
from .device_facts import transform

grad_on = torch.is_grad_enabled
# By a device's index its current stream: 0 is the default one, which no graph records, and is told sooner.
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)
torch_deterministic = getattr(torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)

LARGE = 2**31
SITES_KEPT = 10_240
"""The most call sites of a family, of 4 KB each."""


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


def wanted_grads(named: dict[str, Tensor | None], return_lse: bool) -> tuple[str, ...]:
    if not grad_on():
        return ()
    wanted = [name for name, tensor in named.items() if tensor is not None and tensor.requires_grad]
    if wanted and return_lse:
        wanted.append("lse")
    return tuple(wanted)


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
    role: str | None = None

    def checked(self, layouts: tuple[str, ...] = validation.LAYOUTS) -> Static:
        window = validation.check_statics(
            causal=self.causal,
            window=self.window,
            softcap=self.softcap,
            scale=self.scale,
            layout=self.layout,
            dropout_p=self.dropout_p,
            layouts=layouts,
        )
        if self.role not in (None, "self", "cross"):
            raise InvalidInputError(f"role={scalars.shown(self.role)} must be 'self', 'cross' or None")
        lse, exact = scalars.flag("return_lse", self.return_lse), scalars.flag("deterministic", self.deterministic)
        return self._replace(window=window, return_lse=lse, deterministic=exact)

    def fields(self, exact: bool | None = None) -> dict[str, Any]:
        """As request fields. exact: torch's deterministic switch; None = ask."""
        causal = self.causal if isinstance(self.causal, str) else ("bottom_right" if self.causal else "none")
        return {
            "causal": causal,
            "window": self.window,
            "softcap": float(self.softcap),
            "scale": None if self.scale is None else float(self.scale),
            "layout": self.layout,
            "dropout": float(self.dropout_p),
            "lse": bool(self.return_lse),
            "deterministic": bool(self.deterministic) or (torch_deterministic() if exact is None else exact),
            "cross": self.role == "cross",
        }


def request_facts(
    static: Static, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Any, heads: int, kv: int
) -> dict[str, Any]:
    """Request fields shared by the dense and packed calls."""
    kind = q.device.type
    autocast = autocast_dtype(kind)
    dtype = autocast if autocast is not None and q.dtype != torch.float64 else q.dtype
    named = {"query": q, "key": k, "value": v, "mask": mask, "sinks": sinks}
    return {
        **static.fields(),
        **device_facts(q.device),
        "dtype": dtype_name(dtype),
        "heads": heads,
        "kv_heads": kv,
        "head_dim": q.shape[-1],
        "v_head_dim": v.shape[-1],
        "mask": "none" if mask is None else "bool" if mask.dtype == torch.bool else "additive",
        "sinks": sinks is not None,
        "grad": wanted_grads(named, static.return_lse),
        "graph_capture": capturing(kind),
        "zero_size": not (q.numel() and k.numel() and v.numel()),
        "large": max(q.numel(), k.numel(), v.numel()) >= LARGE,
        "misaligned": not ((type(q) is not Tensor and validation.has_shapes_only(q)) or aligned(q, k, v)),
        "transform": transform(q, k, v, mask, sinks),
    }


def cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Autocast as torch's SDPA does it: floats but float64 go to the autocast dtype."""
    dtype = autocast_dtype(tensors[0].device.type)
    skip = (torch.float64, dtype)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype not in skip else t for t in tensors)


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


def no_autocast(query: Any) -> bool:
    """Whether a call's tensors are taken as they are."""
    return not isinstance(query, Tensor) or autocast_dtype(query.device.type) is None
