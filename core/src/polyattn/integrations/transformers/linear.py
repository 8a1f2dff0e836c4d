"""This module puts `polyattn.linear_attention` under models that compute gated delta rules, in training and generation.

Models call functions of their module by name, so that a name is given another function: in modules that are loaded when
something is installed, and in that of a model that is built later.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ...dispatch.linear import linear_attention
from ...errors import InvalidInputError, UnsupportedRequestError
from ...semantics.linear_conv import causal_conv
from ..common.patching import Patches
from ..common.reports import Recorder
from .borders import refuse_borders, starts_of
from .recurrent import RULES

__all__ = ["reach", "reach_all", "recorded"]

CONVOLUTION = "causal_conv1d_fn"


def reach_all(patches: Patches) -> None:
    """Reach every module of transformers' models that is loaded."""
    for name in sorted(sys.modules):
        if name.startswith("transformers.models."):
            reach(sys.modules[name], patches)


def reach(module: Any, patches: Patches) -> None:
    """Put polyattn's functions under the names of a module that has such rules. A second call does nothing."""
    found = [name for name in RULES if hasattr(module, name)]
    if not found or getattr(getattr(module, found[0]), "polyattn", False):
        return
    for name in found:
        patches.attribute(module, name, _rule(RULES[name]))
    if hasattr(module, CONVOLUTION):
        patches.attribute(module, CONVOLUTION, _convolution(getattr(module, CONVOLUTION)))
    parts = [part for part in vars(module).values() if isinstance(part, type) and issubclass(part, nn.Module)]
    takes = {p: inspect.signature(p.forward).parameters.keys() for p in parts if p.__module__ == module.__name__}
    told = [part for part, words in takes.items() if {"hidden_states", "position_ids"} <= words]
    wrapped = _with_positions if told else _without_positions
    for part in told or [part for part, words in takes.items() if {"inputs_embeds", "position_ids"} <= words]:
        patches.attribute(part, "forward", wrapped(part.forward))


_positions: ContextVar[tuple[Any, Any] | None] = ContextVar("polyattn positions", default=None)
"""The positions and the mask of the layer that runs: layers hand their linear attention the mask alone."""


_traced: list[tuple[Any, Any]] = []
"""The same while a model is compiled, which sees no context variables."""


def _with_positions(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward, whose positions are known inside: also where a backward computes it again."""

    @functools.wraps(forward)
    def told(self: nn.Module, *given: Any, **more: Any) -> Any:
        said = more.get("position_ids"), more.get("attention_mask")
        if torch.compiler.is_compiling():
            _traced.append(said)
            try:
                return forward(self, *given, **more)
            finally:
                _traced.pop()
        before = _positions.set(said)
        try:
            return forward(self, *given, **more)
        finally:
            _positions.reset(before)

    return told


_recorders: list[Callable[..., Any]] = []
"""Who makes the calls instead, the last one."""


@contextlib.contextmanager
def recorded(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Let a recorder make the calls of a model's linear attention while it lasts, each under the layer that runs."""
    running: list[nn.Module] = []

    def begins(module: nn.Module, _: Any) -> None:
        running.append(module)

    def ends(*_: Any) -> None:
        running.pop()

    def call(*given: Any, method: str, **options: Any) -> Any:
        return recorder.call(linear_attention, running[-1], method, *given, method=method, **options)

    hooks = [part.register_forward_pre_hook(begins) for part in model.modules()]
    hooks += [part.register_forward_hook(ends, always_call=True) for part in model.modules()]
    _recorders.append(call)
    try:
        yield
    finally:
        _recorders.pop()
        for hook in hooks:
            hook.remove()


def _attend(*given: Any, **options: Any) -> Any:
    call = _recorders[-1] if _recorders else linear_attention
    return call(*given, **options)


def _without_positions(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's forward, which refuses packed rows that only positions tell apart: its layers never see positions."""

    @functools.wraps(forward)
    def told(self: nn.Module, *given: Any, **more: Any) -> Any:
        if more.get("cu_seq_lens_q") is None and more.get("seq_idx") is None:
            said = more.get("position_ids"), more.get("attention_mask")
            if torch.compiler.is_compiling():
                refuse_borders(*said)
            elif starts_of(*said) is not None:
                raise InvalidInputError(
                    f"position_ids start again at 0 within a row, and {type(self).__name__} hands them to no layer, so "
                    f"that packed sequences would mix: give cu_seq_lens_q and its partners, or a row for each sequence"
                )
        return forward(self, *given, **more)

    return told


def _rule(method: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As transformers' functions of this name. What else a layer is told is about softmax."""
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        out, last = _attend(
            query,
            key,
            value,
            gate=g,
            beta=beta,
            method=method,
            state=None if initial_state is None else initial_state.to(wide),
            cu_seqlens=_starts(cu_seq_lens_q if cu_seqlens is None else cu_seqlens, seq_idx),
            qk_norm=use_qk_l2norm_in_kernel,
        )
        return out, last if output_final_state else None

    rule.polyattn = True  # type: ignore[attr-defined]
    return rule


def _convolution(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """transformers' own convolution, but of packed sequences: without a package that it looks for it has none."""

    def convolution(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        starts = _starts(cu_seq_lens_q, seq_idx)
        if starts is None:
            return original(hidden_states, weight, bias, activation=activation, **more)
        if activation not in ("silu", "swish"):
            reason = f"a convolution of packed sequences with activation {activation!r}: silu is computed"
            raise UnsupportedRequestError(f"{reason}. Give the sequences in rows of their own", {"polyattn": [reason]})
        tokens = hidden_states.shape[2]
        if hidden_states.shape[0] != 1 or int(starts[-1]) != tokens:
            raise InvalidInputError(
                f"packed sequences of {int(starts[-1])} tokens reached a convolution over {hidden_states.shape[0]} "
                f"row(s) of {tokens}; pack them into one row, and give use_cache=False"
            )
        return causal_conv(hidden_states.mT, weight, bias, cu_seqlens=starts)[0].mT

    return convolution


def _starts(cu_seqlens: Tensor | None, seq_idx: Tensor | None) -> Tensor | None:
    """Return where packed sequences begin, int32 [N+1]; None where there is one in each row. Where nothing says it, the
    positions of the layer that runs do."""
    if cu_seqlens is not None:
        return cu_seqlens.to(torch.int32)
    if seq_idx is None:
        said = _traced[-1] if _traced else None
        if not torch.compiler.is_compiling():  # also where the graph of a layer is broken
            return starts_of(*(_positions.get() or said or (None, None)))
        if said is not None:
            refuse_borders(*said)
        return None
    if seq_idx.ndim != 2 or seq_idx.shape[0] != 1:
        raise InvalidInputError(
            f"seq_idx has the shape {tuple(seq_idx.shape)}; [1, S] is needed: pack all sequences into one row"
        )
    edges = (seq_idx[0, 1:] != seq_idx[0, :-1]).nonzero().flatten() + 1
    ends = edges.new_tensor([0]), edges, edges.new_tensor([seq_idx.shape[1]])
    return torch.cat(ends).to(torch.int32)
