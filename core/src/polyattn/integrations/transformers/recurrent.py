"""This module puts linear attention under a model of transformers: its functions are names in the module of a model,
which are given others while a step runs.

Layers are found by what they call in a pass, in the order of their calls: a convolution, then the rule. No list of
model names is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from ...errors import UnsupportedRequestError
from ...serving.layer import StateLayer
from ...serving.recurrent import linear_layer

__all__ = ["Recurrent", "Shapes", "calling", "has_recurrent"]

CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
RULES = {
    **dict.fromkeys(("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"), "gdn"),
    **dict.fromkeys(("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"), "kda"),
}
"""transformers' names of the functions -> the rule they compute."""


class Recurrent(Protocol):
    """What is called in the place of a model's functions."""

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x: [1, T, C]; weight: [C, W] -> [1, T, C]."""

    def rule(
        self, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, method: str, qk_norm: bool
    ) -> Tensor:
        """query, key: [1, T, H, D]; value: [1, T, H_v, D_v] -> out like value."""


def _modules_of(model: nn.Module) -> list[Any]:
    """The Python modules of a model's parts that have such functions."""
    names = {type(part).__module__ for part in model.modules()}
    found = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    return [module for module in found if any(hasattr(module, name) for name in RULES)]


def has_recurrent(model: nn.Module) -> bool:
    """Return whether parts of a model could call such functions."""
    return bool(_modules_of(model))


@contextlib.contextmanager
def calling(model: nn.Module, served: Recurrent) -> Iterator[None]:
    """Call `served` in the place of the model's functions inside. Of a process, one thread at a time."""
    before = []
    try:
        for module in _modules_of(model):
            for name, made in (
                *((name, _convolving(served)) for name in CONVOLUTIONS),
                *((name, _ruling(served, method)) for name, method in RULES.items()),
            ):
                if hasattr(module, name):
                    before.append((module, name, getattr(module, name)))
                    setattr(module, name, made)
        yield
    finally:
        for module, name, old in reversed(before):
            setattr(module, name, old)


def _convolving(served: Recurrent) -> Callable[..., Tensor]:
    def conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **_: Any) -> Tensor:
        if activation not in ("silu", "swish"):
            raise _refused(f"a convolution with activation {activation!r}", "silu is served")
        return served.conv(x.mT, weight, bias).mT

    return conv


def _ruling(served: Recurrent, method: str) -> Callable[..., tuple[Tensor, None]]:
    def rule(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool = False,
        initial_state: Any = None, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        return served.rule(query, key, value, g, beta, method, use_qk_l2norm_in_kernel), None

    return rule


@dataclasses.dataclass
class Shapes:
    """The recurrent layers of one pass, by their calls. Nothing is computed: every token's output is 0.

    Attributes:
        convolutions: (C, W) of each. states: (H_v, D, D_v) of each.
    """

    convolutions: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    states: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.convolutions.append((weight.shape[0], weight.shape[1]))
        return x.new_zeros(x.shape)

    def rule(
        self, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, method: str, qk_norm: bool
    ) -> Tensor:
        self.states.append((value.shape[2], query.shape[3], value.shape[3]))
        if len(self.states) != len(self.convolutions):
            raise _refused("a layer of linear attention without one convolution before it", "the two are served as one")
        return value.new_zeros(value.shape)

    def layers(self, first: int) -> tuple[StateLayer, ...]:
        """Describe the layers, numbered from `first`."""
        return tuple(
            linear_layer(first + i, heads=heads, head_dim=D, v_head_dim=D_v, channels=channels, width=width)
            for i, ((channels, width), (heads, D, D_v)) in enumerate(zip(self.convolutions, self.states, strict=True))
        )


def _refused(what: str, why: str) -> UnsupportedRequestError:
    return UnsupportedRequestError(
        f"{what}: {why}, so this model cannot be served by the engine; use model.generate() instead",
        {"serving": [f"{what}: {why}"]},
    )
