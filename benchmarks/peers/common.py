"""What the peers share: who refuses what, training by autograd, and a step of serving as libraries plan from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyattn.bench.measure import Call, Inputs
from polyattn.contract import AttentionRequest
from polyattn.errors import UnsupportedRequestError

__all__ = ["PlainStep", "called", "csr", "heads_first", "only", "plain_step", "scale_of", "window_of"]

_ALWAYS = frozenset({"phase", "s_relation", "page_size", "graph_capture", "group", "scale", "large", "kv_layout"})
"""Options that say what kind of row it is; every peer is told them by what it is called with."""


def only(inputs: Inputs, families: Sequence[str], *options: str) -> AttentionRequest:
    """The request of a problem that a peer can take.

    Args:
        families: that it serves. options: of the request that it takes, beside those that make the row.

    Raises:
        UnsupportedRequestError: another family, or an option that would be dropped.
    """
    request = inputs.workload.request
    if request.family not in families:
        raise UnsupportedRequestError(f"takes {' and '.join(families)} rows, this one is {request.family}")
    if more := [name for name, _ in request.active() if name not in _ALWAYS | set(options)]:
        raise UnsupportedRequestError(f"called here without {', '.join(more)}")
    if request.kv_layout not in ("", "NHD"):
        raise UnsupportedRequestError(f"called here with caches in NHD, not {request.kv_layout}")
    return request


def scale_of(request: AttentionRequest) -> float:
    """Of the logits (S2)."""
    return float(request.head_dim**-0.5) if request.scale is None else request.scale


def window_of(request: AttentionRequest) -> tuple[int, int]:
    """(left, right) as FlashAttention takes it: a causal mask is right = 0 there, and said apart."""
    left, right = request.window
    return left, 0 if request.causal != "none" and left >= 0 else right


def heads_first(inputs: Inputs, number: int) -> tuple[Tensor, ...]:
    """Query, key and value of a dense set as [B, H, S, D], contiguous."""
    names = ("query", "key", "value")
    return tuple(inputs.tensors[number][name].transpose(1, 2).contiguous() for name in names)


def called(inputs: Inputs, forward: Callable[..., Tensor], sets: Sequence[Sequence[Tensor]], *, first: bool) -> Call:
    """A forward pass as a call; where gradients are wanted, it with its backward, or the backward alone.

    Args:
        forward: query, key, value -> out. sets: these three, for each input set.
        first: whether heads come before tokens in them, as torch has it and polyattn does not.
    """

    def back(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2) if first else tensor

    if not inputs.workload.training:
        return lambda number: back(forward(*sets[number]))
    leaves = [tuple(t.detach().requires_grad_() for t in some) for some in sets]
    douts = [dout.transpose(1, 2).contiguous() if first else dout for dout in inputs.dout]
    if inputs.backward_only:
        outs = [forward(*some) for some in leaves]

        def alone(number: int) -> tuple[Tensor, ...]:
            found = torch.autograd.grad(outs[number], leaves[number], douts[number], retain_graph=True)
            return tuple(back(grad) for grad in found)

        return alone

    def both(number: int) -> tuple[Tensor, ...]:
        found = torch.autograd.grad(forward(*leaves[number]), leaves[number], douts[number])
        return tuple(back(grad) for grad in found)

    return both


@dataclasses.dataclass(frozen=True)
class PlainStep:
    """A step over pages, for a library that knows no shared prefix: each sequence has all of its pages.

    Attributes:
        page_table: int32 [B, max_pages]. seq_lens: int32 [B]. cu_seqlens_q: int32 [B + 1]. q_len, kv_len: the longest.
        kv_indptr: int32 [B + 1]. kv_indices: int32 [pages]. last_page_len: int32 [B].
    """

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    q_len: int
    kv_len: int
    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor

    @property
    def batch(self) -> int:
        return self.seq_lens.shape[0]


def plain_step(inputs: Inputs) -> PlainStep:
    """Of a problem over a cache.

    Raises:
        UnsupportedRequestError: the lengths of the sequences differ.
    """
    if len(set(inputs.workload.lengths)) > 1:
        raise UnsupportedRequestError("called here with sequences of one length")
    extra, size = inputs.extra, inputs.workload.request.page_size
    table, lens, starts = extra["tables"][:3]
    for part in extra.get("kv_parts", ()):
        # Whole pages: those of a sequence follow them.
        table = torch.cat([part.page_table.expand(table.shape[0], -1), table], 1).contiguous()
        lens = lens + part.seq_lens
    q_len, kv_len = inputs.workload.longest
    return PlainStep(table, lens, starts, q_len, kv_len + inputs.workload.shared, *csr(table, lens, size))


def csr(table: Tensor, lens: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pages one behind another: (where those of a sequence begin [B + 1], all of them, tokens in the last [B]), int32.

    Args:
        table: int32 [B, max_pages]. lens: int32 [B], above 0. size: tokens of a page.
    """
    pages = (lens + size - 1) // size
    starts = torch.nn.functional.pad(pages.cumsum(0, dtype=torch.int32), (1, 0))
    used = table[torch.arange(table.shape[1], device=table.device) < pages[:, None]]
    return starts, used, lens - (pages - 1) * size
