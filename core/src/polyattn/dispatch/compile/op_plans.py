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
from ...contract.families import FAMILY_SPECS, FamilySpec
from ...contract.request_json import plain_request, read_request
from ...epoch import EPOCH
from ...errors import BackendUnavailableError, PluginError, did_you_mean
from ...lowering import Plan, Planner, bind
from ...registry.defects import affecting, narrowing
from ...registry.manager import PluginManager, get_manager
from ...selection.aliases import whole
from ...selection.select import Selection
from ...semantics import validation
from ...semantics.autograd import attention_backward, recording, refuse_second
from ...semantics.block_maps import check_block_map
from ...semantics.validation import LinearOptions, check_linear
from ..trace_requests import observed

__all__ = [
    "backward",
    "dense_axes",
    "differentiable",
    "forward",
    "op_plan",
    "outputs",
    "refuse_second",
    "returned",
    "wide_dtype",
]


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


def differentiable(family: str) -> tuple[int, ...]:
    """Places of the arguments of a family's op that its gradient is for."""
    return tuple(place for place, one in enumerate(FAMILY_SPECS[family].arguments) if one.grad)


def forward(plan: str, family: str, arguments: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """What the op of a family returns: (output, LSE or state); an LSE that nobody asked for is empty."""
    spec = FAMILY_SPECS[family]
    request, bound = _bound(plan, EPOCH.value)
    given = _by_name(spec, arguments)
    query, key, value = dense_axes(*(given.pop(name) for name in ("query", "key", "value")))
    _check(request, query, key, value, given)
    with _range(plan) if _profiler._is_profiler_enabled else contextlib.nullcontext():
        result = bound.forward(query, key, value, **given)
    return returned(result, query, [t for t in (query, key, value, *given.values()) if isinstance(t, Tensor)])


def returned(result: Any, query: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A kernel's result as an op gives it: contiguous outputs that alias no input, whatever the kernel gave."""
    out, second = result if isinstance(result, tuple) else (result, query.new_empty(0, dtype=torch.float32))
    second = second.to(wide_dtype(query)) if second.numel() else second
    return _own(out.contiguous(), inputs), _own(second.contiguous(), inputs)


def _by_name(spec: FamilySpec, arguments: Sequence[Any]) -> dict[str, Any]:
    """The arguments of an op by name. What was added later is left out where it is None, as by an eager call."""
    every = zip((*spec.arguments, *spec.added), arguments, strict=True)
    return {one.name: given for one, given in every if given is not None or one not in spec.added}


def _own(result: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    return result.clone() if any(result.data_ptr() == t.data_ptr() for t in inputs) else result


def _check(request: AttentionRequest, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> None:
    """What a trace could not: it sees neither contents nor the counts that become known when the graph runs."""
    if request.family == "varlen":
        validation.check_varlen(q, k, v, **{**given, "out": None})
        validation.check_lengths(q, k, **{name: n for name, n in given.items() if "seqlen" in name})
    elif request.family == "block_sparse":
        check_block_map(q, k, request.block_shape, **given)
    elif request.family == "linear":
        check_linear(q, k, v, **given, options=LinearOptions(request.method, request.state_layout or "KV"))


def _range(plan: str) -> torch.profiler.record_function:
    """As `Chosen.ranged`: what torch's profiler shows of a compiled call."""
    data = json.loads(plan)
    call = FAMILY_SPECS[_bound(plan, EPOCH.value)[0].family].call
    info, provider = _served_by(get_manager(), data)
    return torch.profiler.record_function(f"polyattn.{call} {whole(info, provider.name)}@{info.platform}")


def _gives_lse(plan: str) -> bool:
    request, bound = _bound(plan, EPOCH.value)
    return request.lse or (bound.backward is not None and bool(request.grad))


def outputs(plan: str, family: str, arguments: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Empty tensors like those that `forward` returns."""
    query, _, value = arguments[:3]
    if family == "linear":
        cu_seqlens = arguments[6]
        count = query.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        sizes = (query.shape[3], value.shape[3])
        state = sizes if _bound(plan, EPOCH.value)[0].state_layout != "VK" else sizes[::-1]
        shape: Sequence[Any] = (count, value.shape[2], *state)
        return value.new_empty(value.shape), query.new_empty(shape, dtype=wide_dtype(query))
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    shape = query.shape[:-1] if _gives_lse(plan) else (0,)
    return out, query.new_empty(shape, dtype=wide_dtype(query) if _gives_lse(plan) else torch.float32)


def wide_dtype(query: Tensor) -> torch.dtype:
    """S6, S10: fp32, and fp64 for float64 inputs."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def backward(
    plan: str,
    family: str,
    arguments: Sequence[Any],
    dout: Tensor | None,
    dsecond: Tensor | None,
    out: Tensor,
    second: Tensor,
) -> list[Tensor]:
    """A gradient for each differentiable argument that is given, in order."""
    request, bound = _bound(plan, EPOCH.value)
    spec = FAMILY_SPECS[family]
    given = _by_name(spec, arguments)
    given |= dict(zip(given, dense_axes(*arguments[:3]), strict=False))
    trained = {one.name: given[one.name] for one in spec.differentiable if given[one.name] is not None}
    if bound.backward is not None:
        taken = [one.name for one in spec.keywords if one.backward] + [one.name for one in spec.added]
        extra = {name: given[name] for name in taken if name in given}
        tensors = (given["query"], given["key"], given["value"], out, second, given.get("sinks"))
        found: tuple[Tensor | None, ...] = attention_backward(
            bound.backward, dout, dsecond, *tensors, spec.head_axis(request.layout), extra
        )
    else:
        found = _recompute(bound, dout, dsecond, given, trained)
    return [
        torch.zeros(t.shape, dtype=t.dtype, device=t.device) if g is None else g.contiguous().clone()
        for g, t in zip(found, trained.values(), strict=False)
    ]


def _recompute(
    bound: Bound, dout: Tensor | None, dsecond: Tensor | None, given: dict[str, Any], trained: dict[str, Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients of a forward built from torch ops, by running it again with autograd on."""
    leaves = {name: t.detach().requires_grad_() for name, t in trained.items()}
    with recording():
        query, key, value, *rest = {**given, **leaves}.values()
        result = bound.forward(query, key, value, **dict(zip(list(given)[3:], rest, strict=True)))
        results = result if isinstance(result, tuple) else (result,)
        pairs = [(r, g) for r, g in zip(results, (dout, dsecond), strict=False) if g is not None and r.requires_grad]
        if not pairs:
            return (None,) * len(leaves)
        return torch.autograd.grad([r for r, _ in pairs], [*leaves.values()], [g for _, g in pairs], allow_unused=True)
