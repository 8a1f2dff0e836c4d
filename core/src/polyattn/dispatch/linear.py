"""`linear_attention`: gated delta rules with a recurrent state."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import AttentionRequest, scalars
from ..epoch import EPOCH
from ..errors import InvalidInputError, did_you_mean
from ..selection import overrides
from ..selection.select import Selection
from ..semantics import validation
from ..semantics.linear_reference import unit_rows
from .binding import remembered, select_here
from .call_key import Static, autocast_dtype, backend_name, cast, grad_on, request_facts, wanted_grads

__all__ = ["linear_attention"]

METHODS = ("gdn", "kda")
LAYOUTS = ("KV", "VK")


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    gate: Tensor,
    beta: Tensor,
    method: str = "gdn",
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    qk_norm: bool = False,
    state_layout: str = "KV",
    backend: str | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention by a gated delta rule (docs/semantics.md, S10).

    Today the reference serves it, token by token: by itself on a CPU, elsewhere where backend="reference" asks for it.
    The state decays before each update. It carries a sequence from one call to the next: a prompt in two calls gives
    what it gives in one.

    Args:
        query, key: [B, S, H, D]; value: [B, S, H_v, D_v]. Value head h reads query and key head h // (H_v / H).
        gate: log decay: [B, S, H_v] for method "gdn", [B, S, H_v, D] for "kda". beta: [B, S, H_v].
        method: "gdn" (Gated DeltaNet) or "kda" (Kimi Delta Attention).
        state: fp32 [N, H_v, D, D_v]; [N, H_v, D_v, D] with state_layout="VK". It is not written. None = zeros.
        cu_seqlens: int32 [N+1], with B = 1: N sequences behind each other. None: N = B.
        scale: factor of the queries, None = D ** -0.5. qk_norm: queries and keys are divided by their lengths first.
        backend, out: as `polyattn.attention`; out is [B, S, H_v, D_v].

    Returns:
        (out [B, S, H_v, D_v] in the dtype of value, the state after the last token, fp32). Both are fp64 where inputs
        are.

    Raises:
        InvalidInputError, UnsupportedRequestError, BackendUnavailableError: as `polyattn.attention`.
    """
    call = _Call(query, key, value, gate, beta, state, cu_seqlens, method, scale, qk_norm, state_layout, out)
    # As of block-sparse calls: a graph ends here.
    run = _between_graphs if torch.compiler.is_compiling() else _run
    result: tuple[Tensor, Tensor] = run(call, backend)
    return result


class _Call(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor
    beta: Tensor
    state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    method: str = "gdn"
    scale: float | None = None
    qk_norm: bool = False
    state_layout: str = "KV"
    out: Tensor | None = None

    def prepared(self) -> tuple[_Call, AttentionRequest]:
        """The call as a kernel takes it, and what it asks for."""
        _check_words(self)
        call = self
        if isinstance(call.query, Tensor) and autocast_dtype(call.query.device.type) is not None:
            query, key, value = cast(call.query, call.key, call.value)
            call = call._replace(query=query, key=key, value=value)
        _check(call)
        if call.qk_norm:
            call = call._replace(query=unit_rows(call.query), key=unit_rows(call.key), qk_norm=False)
        return call, _request(call)


def _run(given: _Call, backend: str | None) -> tuple[Tensor, Tensor]:
    call, request = given.prepared()
    chosen = remembered(request, backend_name(backend), overrides.SCOPE.get(), EPOCH.value)
    tensors = {name: getattr(call, name) for name in ("gate", "beta", "state", "cu_seqlens", "out")}
    kind = call.query.device.type
    with torch.autocast(kind, enabled=False):
        forward = chosen.ranged("linear_attention", chosen.bound.forward)
        result: tuple[Tensor, Tensor] = forward(call.query, call.key, call.value, **tensors)
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
def _between_graphs(call: _Call, backend: str | None) -> tuple[Tensor, Tensor]:
    return _run(call, backend)


def _request(call: _Call) -> AttentionRequest:
    q, k, v = call.query, call.key, call.value
    facts = request_facts(Static(scale=call.scale), q, k, v, None, None, v.shape[2], q.shape[2])
    wanted = wanted_grads({"query": q, "key": k, "value": v}, False)
    if grad_on() and any(t is not None and t.requires_grad for t in (call.gate, call.beta, call.state)):
        # The request has no words for these: a backward that gives them gives the others too.
        wanted = ("query", "key", "value")
    one = q.shape[1] == 1 and call.cu_seqlens is None
    return AttentionRequest(
        family="linear",
        method=call.method,
        phase="decode" if one else "prefill",
        s_relation="one" if one else "equal",
        state_layout=call.state_layout,
        **{**facts, "grad": wanted},
    ).normalised()


def _check_words(call: _Call) -> None:
    for name, word, allowed in (
        ("method", call.method, METHODS),
        ("state_layout", call.state_layout, LAYOUTS),
    ):
        if word not in allowed:
            near = did_you_mean(word, allowed) if isinstance(word, str) else ""
            raise InvalidInputError(f"{name}={word!r} must be one of {', '.join(allowed)}.{near}")
    scalars.flag("qk_norm", call.qk_norm)
    Static(scale=call.scale).checked()


def _check(call: _Call) -> None:
    """Check the tensors of a call.

    Raises:
        InvalidInputError: names what is wrong, its value and what is allowed.
    """
    q, k, v = call.query, call.key, call.value
    for name, tensor, shape in (
        ("query", q, "[B, S, H, D]"),
        ("key", k, "[B, S, H, D]"),
        ("value", v, "[B, S, H_v, D_v]"),
    ):
        validation.check_tensor(name, tensor, 4, shape)
    B, S, H, D = q.shape
    H_v, D_v = v.shape[2:]
    _shape("key", k, (B, S, H, D), "that of the query, [B, S, H, D]")
    _shape("value", v, (B, S, H_v, D_v), "[B, S, H_v, D_v], B and S those of the query")
    if not H or not H_v or H_v % H:
        raise InvalidInputError(f"value has {H_v} heads, query and key {H}; a multiple of theirs is needed")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in validation.FLOATS:
        raise InvalidInputError(
            f"query is {q.dtype}, key {k.dtype}, value {v.dtype}; one of float32, float16, bfloat16 and float64 is "
            "needed: cast them, or use autocast"
        )
    gates = (B, S, H_v) if call.method == "gdn" else (B, S, H_v, D)
    _of(call, "gate", gates, "[B, S, H_v]" if call.method == "gdn" else "[B, S, H_v, D]")
    _of(call, "beta", (B, S, H_v), "[B, S, H_v]")
    for name, tensor in (("key", k), ("value", v)):
        if tensor.device != q.device:
            raise InvalidInputError(f"{name} is on {tensor.device}, query on {q.device}; move it")
    _check_out(call, (B, S, H_v, D_v))
    sequences = B
    if call.cu_seqlens is not None:
        sequences = _check_packed(call.cu_seqlens, q)
    if call.state is not None:
        rows = (D, D_v) if call.state_layout == "KV" else (D_v, D)
        words = "[N, H_v, D, D_v]" if call.state_layout == "KV" else "[N, H_v, D_v, D]"
        _of(call, "state", (sequences, H_v, *rows), f"{words}, N={sequences}")
        wanted = torch.float64 if v.dtype == torch.float64 else torch.float32
        if call.state.dtype != wanted:
            raise InvalidInputError(f"state is {call.state.dtype}; {wanted} is needed beside values of {v.dtype}")


def _check_out(call: _Call, sizes: tuple[int, ...]) -> None:
    tensors = (call.query, call.key, call.value, call.gate, call.beta, call.state)
    inputs = tuple(t for t in tensors if isinstance(t, Tensor))
    validation.check_out(call.out, call.value, sizes, inputs)


def _of(call: _Call, name: str, sizes: tuple[int, ...], words: str) -> None:
    tensor = getattr(call, name)
    validation.check_tensor(name, tensor, len(sizes), words)
    _shape(name, tensor, sizes, words)
    if tensor.device != call.query.device:
        raise InvalidInputError(f"{name} is on {tensor.device}, query on {call.query.device}; move it")
    if tensor.dtype not in validation.FLOATS:
        raise InvalidInputError(f"{name} is {tensor.dtype}; a float is needed")


def _shape(name: str, tensor: Tensor, sizes: tuple[int, ...], words: str) -> None:
    if tuple(tensor.shape) != sizes:
        raise InvalidInputError(f"{name} has the shape {tuple(tensor.shape)}; needed is {sizes}: {words}")


def _check_packed(cu_seqlens: Any, query: Tensor) -> int:
    """The number of sequences."""
    validation.check_tensor("cu_seqlens", cu_seqlens, 1, "int32 [N+1]")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.device != query.device or cu_seqlens.shape[0] < 1:
        raise InvalidInputError(
            f"cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)} on {cu_seqlens.device}; torch.int32 [N+1] on "
            f"{query.device} is needed"
        )
    if query.shape[0] != 1:
        raise InvalidInputError(
            f"cu_seqlens with a batch of {query.shape[0]}: lay the sequences behind each other, B = 1"
        )
    if validation.contents_readable(cu_seqlens):
        validation.check_cu_seqlens("cu_seqlens", cu_seqlens, query.shape[1], query.shape[1], "S")
    sequences: int = cu_seqlens.shape[0] - 1
    return sequences


def _explain(query: Tensor, key: Tensor, value: Tensor, *, backend: str | None = None, **given: Any) -> Selection:
    call, request = _Call(query, key, value, **given).prepared()
    sequences = call.query.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    extent = (sequences, call.query.shape[1], call.query.shape[1])
    return select_here(request, backend_name(backend), overrides.SCOPE.get(), extent, full=True)


linear_attention.__polyattn_explain__ = _explain  # type: ignore[attr-defined]
