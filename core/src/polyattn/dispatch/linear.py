"""`linear_attention`: gated delta rules with a recurrent state."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import AttentionRequest
from ..contract.lengths import extent_of
from ..selection import overrides
from ..semantics.reference import unit_rows
from ..semantics.validation import check_linear, check_words, has_shapes_only
from .binding import Asked, explained_by
from .bound_table import BoundTable
from .call_key import (
    CallKey,
    Found,
    Static,
    autocasted,
    backend_name,
    found,
    grad_on,
    request_of,
    without_autocast,
)
from .compile.facts import counted
from .compile.trace import trace_linear
from .dense import dense_signature

__all__ = ["linear_attention"]

_table: BoundTable[Found] = BoundTable()


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
    given = {"gate": gate, "beta": beta, "state": state, "cu_seqlens": cu_seqlens}
    words = (method, state_layout, qk_norm)
    if torch.compiler.is_compiling() or counted() or has_shapes_only(query):
        traced: tuple[Tensor, Tensor] = trace_linear(query, key, value, out, given, scale, words, backend)
        return traced
    call = _Call.of(query, key, value, out, given, scale, words)
    scope, backend = overrides.SCOPE.get(), backend_name(backend)
    entry = found(_table, (*call.signature(), backend, scope), call.request, backend, scope)
    run = entry.chosen.ranged("linear_attention", entry.run)
    result: tuple[Tensor, Tensor] = without_autocast(run, *call.tensors, **call.given)
    return result


class _Call(NamedTuple):
    """A checked call, as a kernel takes it."""

    tensors: tuple[Tensor, Tensor, Tensor]
    given: dict[str, Tensor | None]
    method: str
    state_layout: str
    static: Static
    key: CallKey

    @classmethod
    def of(
        cls, query: Any, key: Any, value: Any, out: Any, given: dict[str, Any], scale: Any, words: tuple[Any, Any, Any]
    ) -> _Call:
        """given: gate, beta, state, cu_seqlens. words: method, state_layout, qk_norm."""
        method, state_layout, qk_norm = words
        check_words(method, state_layout, qk_norm)
        static = Static(scale=scale).checked()
        query, key, value = autocasted(query, key, value)
        given = {**given, "out": out}
        check_linear(query, key, value, method=method, state_layout=state_layout, **given)
        if qk_norm:
            query, key = unit_rows(query), unit_rows(key)
        said = CallKey._make(dense_signature("BSHD", query, key, value, None, None, None))
        return cls((query, key, value), given, method, state_layout, static, said)

    def _trains_more(self) -> bool:
        return grad_on() and any(t is not None and t.requires_grad for t in self.given.values())

    def _one_token(self) -> bool:
        return self.tensors[0].shape[1] == 1 and self.given["cu_seqlens"] is None

    def signature(self) -> tuple[Any, ...]:
        """All that decides who serves the call."""
        return self.static, self.method, self.state_layout, self._trains_more(), self._one_token(), self.key

    def request(self) -> AttentionRequest:
        """What it asks for."""
        key, one = self.key, self._one_token()
        if self._trains_more():  # the request has no words for these: a backward that gives them gives all three
            key = key._replace(grads=(True, True, True))
        return request_of(
            key._replace(query_heads=key.value_heads, key_heads=key.query_heads, relation="one" if one else "equal"),
            self.static,
            family="linear",
            method=self.method,
            phase="decode" if one else "prefill",
            state_layout=self.state_layout,
        )


def _asked(backend: Any, query: Any, key: Any, value: Any, out: Any, scale: Any, **given: Any) -> Asked:
    words = (given.pop("method"), given.pop("state_layout"), given.pop("qk_norm"))
    call = _Call.of(query, key, value, out, given, scale, words)
    request = call.request()
    return request, backend_name(backend), extent_of(request)(*call.tensors, **call.given)


explained_by(linear_attention, _asked)
