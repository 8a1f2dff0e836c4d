"""This module serves layers that keep a recurrent state and the tail of a convolution for each request, such as those
of linear attention: `RecurrentLayers`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..contract import Keep
from ..dispatch.linear import linear_attention
from ..errors import BackendUnavailableError, InvalidInputError
from ..registry.device_ops import CORE, device_ops
from ..semantics.linear_conv import causal_conv
from ..semantics.validation import unread
from .layer import StateLayer
from .step.batch import ForwardBatch, ForwardMode

if TYPE_CHECKING:
    from ..semantics.states import RequestStates
    from .step.step import Step

__all__ = ["LinearChoice", "RecurrentLayers", "linear_layer"]

CONV, STATE = "conv", "state"


def linear_layer(layer_id: int, *, heads: int, head_dim: int, v_head_dim: int, channels: int, width: int) -> StateLayer:
    """Describe a layer of linear attention: its state [H_v, D, D_v] in float32, and the last inputs of its convolution
    [C, W - 1] in the dtype of the model.

    Args:
        heads: H_v. channels, width: C and W of the convolution.
    """
    tail, state = (channels, width - 1), (heads, head_dim, v_head_dim)
    return StateLayer(layer_id, (Keep(STATE, "request", state, "float32"), Keep(CONV, "request", tail)))


@dataclasses.dataclass(frozen=True)
class LinearChoice:
    """Who serves linear attention, by name; a phase's own wins. None = whoever is chosen automatically.

    Attributes:
        backend: of all phases. prefill: of prompts and their chunks. decode: of single tokens and of drafts.
        conv: of the convolution before the rule: `polyattn`, torch's operators, or a package's kernels for the device,
            `polyattn-triton`. Those were not timed on a GPU yet, and never serve unless they are asked for.
    """

    backend: str | None = None
    prefill: str | None = None
    decode: str | None = None
    conv: str = CORE

    def of(self, mode: ForwardMode) -> str | None:
        """Return the name for a step of this mode."""
        own = self.decode if mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY) else self.prefill
        return own or self.backend


class RecurrentLayers:
    """The recurrent layers of one model over the states of a pool. Call `plan` for each step, then `conv` and `rule`
    once per layer; both read and write the states of the step's rows. A step that is verified leaves the states of all
    its drafts, of which `RequestStates.commit` takes one.

    Args:
        states: of the pool (`KVPool.states`). choice: who serves.

    Raises:
        BackendUnavailableError: nobody of the name in `choice.conv` has a convolution for the device.
    """

    def __init__(self, states: RequestStates, choice: LinearChoice) -> None:
        self.states, self.choice = states, choice
        self._kernel = None if choice.conv == CORE else _kernel(choice.conv, states.device)
        self._batch: ForwardBatch | None = None

    def plan(self, batch: ForwardBatch, steps: Sequence[Step]) -> None:
        """Take the step that `AttentionBackend.plan` gave steps for, or `AttentionBackend.steps` of a recorded one: all
        that is read of it later has the size of the recording, and lies where each replay finds it."""
        step = steps[0]
        self._batch, self._rows = batch, step.sequences
        self._slots, self._cu_seqlens = step.state_slots, step.cu_seqlens_q
        self._parents = None if batch.tree is None else batch.tree.parents
        if step.fixed:
            self._parents = None if step.tree_mask is None else _parents(step.tree_mask)
        # Rows of one length are a batch, whose lengths nobody has to read.
        self._uniform = step.fixed or (len(set(batch.query_lens)) == 1 and not batch.padding)

    def conv(self, layer_id: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The causal convolution of the new tokens. x: [T, C]. Returns [T, C]."""
        states, verifies = self.states.tensor(layer_id, CONV), self._verifies()
        tokens, cu_seqlens = (self._by_row(x), None) if verifies else self._packed(x)
        parents = self._parents if verifies else None
        if self._kernel is not None:
            drafted = self.states.drafted(layer_id, CONV) if verifies else None
            shared = {"cu_seqlens": cu_seqlens, "parents": parents, "drafted": drafted}
            return self._kernel(tokens, weight, bias, states, self._slots, **shared).flatten(0, 1)
        out, tails = causal_conv(
            tokens, weight, bias, states[self._slots], cu_seqlens=cu_seqlens, every_state=verifies, parents=parents
        )
        if verifies:
            self._leave(layer_id, CONV, tails)
        else:
            states.index_copy_(0, self._slots % len(states), tails.to(states.dtype))
        return out.flatten(0, 1)

    def rule(
        self, layer_id: int, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, **options: Any
    ) -> Tensor:
        """The gated delta rule of the new tokens.

        Args:
            query, key: [T, H, D]; value: [T, H_v, D_v]; gate: [T, H_v] or [T, H_v, D]; beta: [T, H_v].
            options: method, scale, qk_norm, ... of `polyattn.linear_attention`.

        Returns:
            [T, H_v, D_v].
        """
        tensors: tuple[Tensor, ...] = (query, key, value, gate, beta)
        verifies = self._verifies()
        assert self._batch is not None
        if verifies:
            tensors, cu_seqlens = tuple(map(self._by_row, tensors)), None
        else:
            (query, cu_seqlens), *rest = (self._packed(t) for t in tensors)
            tensors = (query, *(t for t, _ in rest))
        with unread():  # slots and parents are the pool's and the tree's own
            out, states = linear_attention(
                *tensors[:3],
                gate=tensors[3],
                beta=tensors[4],
                state=self.states.tensor(layer_id, STATE),
                state_slots=self._slots,
                cu_seqlens=cu_seqlens,
                every_state=verifies,
                parents=self._parents if verifies else None,
                backend=self.choice.of(self._batch.mode),
                **options,
            )
        if verifies:
            self._leave(layer_id, STATE, states)
        return out.flatten(0, 1)

    def _verifies(self) -> bool:
        if self._batch is None:
            raise InvalidInputError("no step is planned: call plan(batch, steps) before the layers of a step")
        return self._batch.mode is ForwardMode.TARGET_VERIFY

    def _by_row(self, x: Tensor) -> Tensor:
        return x.view(self._rows, x.shape[0] // self._rows, *x.shape[1:])

    def _packed(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(tokens as the calls take them, where sequences of different lengths begin)."""
        if self._uniform:
            return self._by_row(x), None
        return x[None], self._cu_seqlens

    def _leave(self, layer_id: int, name: str, states: Tensor) -> None:
        drafted = self.states.drafted(layer_id, name)
        drafted[:, : states.shape[1]].index_copy_(0, self._slots % len(drafted), states.to(drafted.dtype))


def _kernel(name: str, device: torch.device) -> Callable[..., Tensor]:
    ops: Any = device_ops(device.type)
    found = getattr(ops, "causal_conv", None)
    if found is None or ops.name != name:
        known = [CORE] if found is None else [CORE, ops.name]
        raise BackendUnavailableError(
            f"LinearChoice.conv={name!r}: nobody of that name has a causal convolution on {device.type}. "
            f"Known there: {', '.join(known)}"
        )
    return cast("Callable[..., Tensor]", found)


def _parents(tree_mask: Tensor) -> Tensor:
    """The parents that a tree's mask says, int64 [N, N_d]: of the drafts that each sees beside itself the last."""
    earlier = tree_mask.tril(-1) * torch.arange(1, tree_mask.shape[1] + 1, device=tree_mask.device)
    return earlier.amax(-1) - 1
