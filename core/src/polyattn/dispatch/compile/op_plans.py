"""What a custom op's `plan` says: a choice as text, bound again by whichever process runs the graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler as _profiler

from ...contract import AttentionRequest, BackendInfo, Bound, Provider
from ...contract.request_json import plain_request, read_request
from ...epoch import EPOCH
from ...errors import BackendUnavailableError, PluginError, did_you_mean
from ...lowering import Plan, Planner, bind
from ...registry.defects import affecting, narrowing
from ...registry.manager import PluginManager, get_manager
from ...selection.aliases import whole
from ...selection.select import Selection
from ...semantics.autograd import attention_backward, refuse_second
from ..trace_requests import observed

__all__ = ["backward", "dense_axes", "forward", "op_plan", "outputs", "refuse_second"]


def op_plan(request: AttentionRequest, selection: Selection) -> str:
    """A choice as text, for the `plan` argument of the ops."""
    return json.dumps(
        {
            "backend": selection.backend,
            "platform": selection.platform,
            "provider": selection.provider,
            "lowerings": selection.lowerings,
            "request": plain_request(request),
        },
        sort_keys=True,
    )


@functools.lru_cache(maxsize=512)
def _bound(text: str, epoch: int) -> tuple[AttentionRequest, Bound]:
    """Bind a plan's kernel; `epoch` makes a plugin that was replaced be asked again, and a kernel for its choices."""
    data = json.loads(text)
    request = read_request(data["request"], "a compiled graph")
    manager = get_manager()
    info, provider = _served_by(manager, data)
    plan = Plan(request)
    if data["lowerings"]:
        narrow = narrowing(manager.narrow, info, affecting(provider), named=True)
        planner = Planner(provider.rows, narrow=narrow, only=data["lowerings"])
        found = planner.plan(dataclasses.replace(request, options=()))
        if found is None:
            raise PluginError(
                f"{info.id} no longer takes what a compiled graph was made for by {', '.join(data['lowerings'])}; "
                f"compile it again"
            )
        plan = found

    def load(inner: AttentionRequest) -> Bound:
        return manager.load_forward(info, provider, dataclasses.replace(inner, options=request.options))

    return request, observed(bind(plan, load, _no_helper), request, info.id)


def _served_by(manager: PluginManager, data: dict[str, str]) -> tuple[BackendInfo, Provider]:
    """The backend and provider that a plan names, where this process has them.

    Raises:
        BackendUnavailableError: no plugin here has the backend, or it has lost the provider.
    """
    name, platform, wanted = data["backend"], data["platform"], data["provider"]
    info = manager.backends.get((name, platform))
    if info is None:
        here = sorted({backend for backend, where in manager.backends if where == platform})
        raise BackendUnavailableError(
            f"a saved or compiled graph calls backend {name!r} on platform {platform!r}, which no plugin of this "
            f"process has.{did_you_mean(name, here)} Here are, on {platform}: {', '.join(here) or 'none'}. Install the "
            f"package that has it (`polyattn doctor` lists those that were left out), or export again with one of these"
        )
    provider = next((one for one in info.providers if one.name == wanted), None)
    if provider is None:
        raise BackendUnavailableError(
            f"a saved or compiled graph calls provider {wanted!r} of {info.id}, which has only "
            f"{', '.join(one.name for one in info.providers)}. Install the version of the package that it was made "
            f"with, or export again"
        )
    return info, provider


def _no_helper(helper: Any) -> Bound:
    raise PluginError(f"{helper} helps calls over a cache only, which are not compiled")


def dense_axes(*tensors: Tensor) -> list[Tensor]:
    """Strides are the compiler's choice; kernels need a dense last axis (S1)."""
    return [t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in tensors]


def forward(plan: str, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    bound = _bound(plan, EPOCH.value)[1]
    with _range(plan) if _profiler._is_profiler_enabled else contextlib.nullcontext():
        result = bound.forward(query, key, value, **given)
    out, lse = result if isinstance(result, tuple) else (result, query.new_empty(0, dtype=torch.float32))
    inputs = (query, key, value)
    lse = lse.to(_lse_dtype(query)) if lse.numel() else lse
    # The op promises contiguous outputs that alias no input, whatever the kernel gave.
    out = out.contiguous()
    return (out.clone() if any(out.data_ptr() == t.data_ptr() for t in inputs) else out), lse.contiguous()


def _range(plan: str) -> torch.profiler.record_function:
    """As `Chosen.ranged`: what torch's profiler shows of a compiled call."""
    data = json.loads(plan)
    call = "varlen_attention" if _bound(plan, EPOCH.value)[0].family == "varlen" else "attention"
    info, provider = _served_by(get_manager(), data)
    return torch.profiler.record_function(f"polyattn.{call} {whole(info, provider.name)}@{info.platform}")


def _gives_lse(plan: str) -> bool:
    request, bound = _bound(plan, EPOCH.value)
    return request.lse or (bound.backward is not None and bool(request.grad))


def outputs(plan: str, query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    shape: Sequence[Any] = query.shape[:-1] if _gives_lse(plan) else (0,)
    return out, query.new_empty(shape, dtype=_lse_dtype(query) if _gives_lse(plan) else torch.float32)


def _lse_dtype(query: Tensor) -> torch.dtype:
    """S6: fp32, and fp64 for float64 inputs."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def backward(
    plan: str,
    dout: Tensor | None,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    given: dict[str, Any],
) -> list[Tensor]:
    request, bound = _bound(plan, EPOCH.value)
    query, key, value = dense_axes(query, key, value)
    axis = 2 if request.family == "dense" and request.layout == "BSHD" else 1
    if bound.backward is not None:
        found: tuple[Tensor | None, ...] = attention_backward(
            bound.backward, dout, dlse, query, key, value, out, lse, sinks, axis, given
        )
    else:
        found = _recompute(bound, dout, dlse, query, key, value, sinks, given)
    shaped = (query, key, value) if sinks is None else (query, key, value, sinks)
    return [
        torch.zeros(t.shape, dtype=t.dtype, device=t.device) if g is None else g.contiguous().clone()
        for g, t in zip(found, shaped, strict=False)
    ]


def _recompute(
    bound: Bound,
    dout: Tensor | None,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    given: dict[str, Any],
) -> tuple[Tensor | None, ...]:
    """Gradients of a forward built from torch ops, by running it again with autograd on."""
    leaves = [t.detach().requires_grad_() for t in (query, key, value, *(() if sinks is None else (sinks,)))]
    with contextlib.ExitStack() as stack:
        # An op's body runs below autograd; recording a graph in it means including those keys again.
        for name in ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView"):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(getattr(torch._C.DispatchKey, name), False))
        stack.enter_context(torch.enable_grad())
        result = bound.forward(*leaves[:3], sinks=leaves[3] if sinks is not None else None, **given)
        results = result if isinstance(result, tuple) else (result,)
        pairs = [(r, g) for r, g in zip(results, (dout, dlse), strict=False) if g is not None]
        if not pairs:
            return (None, None, None, None)
        return torch.autograd.grad([r for r, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
