"""`linear_attention`: gated delta rules with a recurrent state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import AttentionRequest
from ..contract.lengths import extent_of
from ..selection import overrides
from ..semantics.validation import LinearOptions, check_linear, check_words, has_shapes_only
from .binding import Asked, explained_by
from .bound_table import BoundTable
from .call_key import CallKey, Found, Static, autocasted, backend_name, found, grad_on, request_of, without_autocast
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
    state_slots: Tensor | None = None,
    every_state: bool = False,
    parents: Tensor | None = None,
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate_bound: float = 0.0,
    beta_range: int = 1,
) -> tuple[Tensor, Tensor]:
    """Linear attention by a gated delta rule (docs/semantics.md, S10).

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
        state_slots: integers [N]: `state` is a pool, [slots, ...], and sequence n has slot state_slots[n], which is
            updated in place. -1: it has none; all that is returned of it is 0.
        every_state: the tokens are drafts: the states after each of them come back, and none is written.
        parents: integers [B, S], the draft token that each follows, an earlier one, or -1, the state. None = a chain.
        a_log: [H_v]: gate and beta are raw, and computed in the call: the log decay is -exp(a_log) * softplus(gate +
            dt_bias), beta is beta_range (1 or 2) * sigmoid(beta). dt_bias: [H_v], for "kda" [H_v, D].
        gate_bound: below 0: the log decay is gate_bound * sigmoid(exp(a_log) * (gate + dt_bias)), never below it.

    Returns:
        (out [B, S, H_v, D_v] in the dtype of value, the state after the last token, fp32). With state_slots the second
        is the pool, with every_state all states, [B, S, H_v, D, D_v]. The state is fp64 where values are.

    Raises:
        InvalidInputError, UnsupportedRequestError, BackendUnavailableError: as `polyattn.attention`.
    """
    four = (query, key, value, out)
    given = {"gate": gate, "beta": beta, "state": state, "cu_seqlens": cu_seqlens}
    more = {"state_slots": state_slots, "parents": parents, "a_log": a_log, "dt_bias": dt_bias}
    options = LinearOptions(method, state_layout, qk_norm, every_state, gate_bound, beta_range)
    if torch.compiler.is_compiling() or counted() or has_shapes_only(query):
        traced: tuple[Tensor, Tensor] = trace_linear(four, given, more, scale, options, backend)
        return traced
    call = _Call.of(four, given, more, scale, options)
    scope, backend = overrides.SCOPE.get(), backend_name(backend)
    entry = found(_table, (*call.signature(), backend, scope), call.request, backend, scope)
    run = entry.chosen.ranged("linear_attention", entry.run)
    result: tuple[Tensor, Tensor] = without_autocast(run, *call.tensors, **call.given)
    return result


class _Call(NamedTuple):
    """A checked call, as a kernel takes it."""

    tensors: tuple[Tensor, Tensor, Tensor]
    given: dict[str, Any]
    options: LinearOptions
    static: Static
    key: CallKey

    @classmethod
    def of(
        cls, four: Sequence[Any], given: dict[str, Any], more: dict[str, Any], scale: Any, options: LinearOptions
    ) -> _Call:
        """four: query, key, value, out. given: gate, beta, state, cu_seqlens. more: what the call has beside, None = it
        has not."""
        query, key, value, out = four
        check_words(*options)
        static = Static(scale=scale).checked()
        query, key, value = autocasted(query, key, value)
        given = {**given, "out": out}
        check_linear(query, key, value, **given, **more, options=options)
        given.update((name, tensor) for name, tensor in more.items() if tensor is not None)
        if options.gate_bound:
            given["gate_bound"] = float(options.gate_bound)
        said = CallKey._make(dense_signature("BSHD", query, key, value, None, None, None))
        return cls((query, key, value), given, options._replace(qk_norm=bool(options.qk_norm)), static, said)

    def _trains_more(self) -> bool:
        return grad_on() and any(isinstance(t, Tensor) and t.requires_grad for t in self.given.values())

    def _one_token(self) -> bool:
        return self.tensors[0].shape[1] == 1 and self.given["cu_seqlens"] is None

    def signature(self) -> tuple[Any, ...]:
        """All that decides who serves the call."""
        given = self.given
        there = ("state_slots" in given, "parents" in given, "a_log" in given)
        return self.static, self.options, there, self._trains_more(), self._one_token(), self.key

    def request(self) -> AttentionRequest:
        """What it asks for."""
        key, one, (method, layout, norm, every, _, beta_range) = self.key, self._one_token(), self.options
        if self._trains_more():  # the request has no words for these: a backward that gives them gives all three
            key = key._replace(grads=(True, True, True))
        return request_of(
            key._replace(query_heads=key.value_heads, key_heads=key.query_heads, relation="one" if one else "equal"),
            self.static,
            family="linear",
            method=method,
            phase="verify" if every else "decode" if one else "prefill",
            state_layout=layout,
            state_slots="state_slots" in self.given,
            state_out="every" if every else "",
            tree="parents" in self.given,
            raw_gates=self.options.raw_gates(self.given.get("a_log")),
            beta_range=beta_range,
            qk_norm=norm,
        )


def _asked(backend: Any, query: Any, key: Any, value: Any, out: Any, scale: Any, **given: Any) -> Asked:
    options = LinearOptions(**{name: given.pop(name) for name in LinearOptions._fields})
    more = {name: given.pop(name) for name in ("state_slots", "parents", "a_log", "dt_bias")}
    call = _Call.of((query, key, value, out), given, more, scale, options)
    request = call.request()
    return request, backend_name(backend), extent_of(request)(*call.tensors, **call.given)


explained_by(linear_attention, _asked)
