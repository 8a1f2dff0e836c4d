"""Steps in device graphs: batches are padded to few sizes, each recorded once and replayed from static buffers."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import GraphError, InvalidInputError
from .batch import ForwardBatch, ForwardMode
from .device_graphs import CudaGraph, DeviceGraph, FakeGraph, graphs_of
from .recording import validate_static
from .tree import DraftTree

__all__ = [
    "BUCKET_STEPS",
    "CudaGraph",
    "DeviceGraph",
    "FakeGraph",
    "GraphRunner",
    "PlansSteps",
    "batch_buckets",
    "graphs_of",
    "validate_static",
]

log = logging.getLogger("polyattn.serving")

BUCKET_STEPS = ((1, 1), (2, 2), (4, 4), (8, 8), (256, 16), (512, 32))
"""(from, step): recorded batch sizes are this far apart from here on."""

_DECODE: Mapping[ForwardMode, int] = MappingProxyType({ForwardMode.DECODE: 1})


def batch_buckets(limit: int) -> tuple[int, ...]:
    """The batch sizes to record, up to `limit`, which is one of them: 1, 2, 4, 8, 16, 24, 32, ...

    Raises:
        InvalidInputError: limit is below 1.
    """
    if limit < 1:
        raise InvalidInputError(f"limit={limit}: a batch of no sequence is nothing to record; 1 or more is needed")
    ends = [start for start, _ in BUCKET_STEPS[1:]] + [limit + 1]
    sizes = (size for (start, step), end in zip(BUCKET_STEPS, ends, strict=True) for size in range(start, end, step))
    return tuple(sorted({*(size for size in sizes if size < limit), limit}))


class PlansSteps(Protocol):
    """What a runner needs of the attention backend; `AttentionBackend` has it."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan and prepare an eager step."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Once, before the first capture: static buffers for so many sequences and tokens."""

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> None:
        """Plan a padded batch into the static buffers of its size, before the capture."""

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch) -> None:
        """The same before a replay: nothing that the capture read may move."""

    def prepare(self) -> None:
        """The device's part of the plan; recorded."""


@dataclasses.dataclass(frozen=True)
class _Recording:
    graph: DeviceGraph
    outputs: Any


class GraphRunner:
    """Run the steps of a model, from a device graph where there is one for them.

    A step is recorded if its mode is in `modes`, its rows all have the tokens of the mode, and it fits the largest
    bucket. It is padded to the next bucket: the further rows read and write page 0, the padding page. Everything else
    runs eagerly; `eager_steps` counts why, and the first of each kind is logged.

    Graphs share memory: use the result of a step before the next one runs.

    Args:
        backend: plans the steps. forward: (input_ids [T_q], positions [T_q]) -> a tensor or a tree of tensors with a
            row for each token (T_q) or each sequence (N); it runs the model on the planned step.
        max_sequences: N of the largest recorded batch.
        device: of the model.
        modes: recorded modes -> tokens of each row. Decode is always one of them; TARGET_VERIFY with N_d tokens and
            DRAFT_EXTEND belong here when an engine speculates, EXTEND where its chunks have one length.
        buckets: recorded batch sizes, None = `batch_buckets(max_sequences)`.
        graph: makes a graph, None = those of the device; without any every step is eager. `FakeGraph` on a CPU.

    Raises:
        InvalidInputError: modes or buckets that cannot be recorded.
    """

    def __init__(
        self,
        backend: PlansSteps,
        forward: Callable[[Tensor, Tensor], Any],
        *,
        max_sequences: int,
        device: torch.device | str,
        modes: Mapping[ForwardMode, int] = _DECODE,
        buckets: Sequence[int] | None = None,
        graph: Callable[[], DeviceGraph] | None = None,
    ) -> None:
        self._backend, self._forward, self._device = backend, forward, torch.device(device)
        self.modes = {**_DECODE, **modes}
        self.buckets = batch_buckets(max_sequences) if buckets is None else tuple(sorted(set(buckets)))
        for mode, tokens in self.modes.items():
            one = mode is ForwardMode.DECODE
            if mode in (ForwardMode.MIXED, ForwardMode.IDLE) or tokens < 1 or (one and tokens > 1):
                raise InvalidInputError(
                    f"modes has {mode.name}: {tokens}; a recorded mode has one number of tokens for all rows, 1 in "
                    f"DECODE, and neither MIXED nor IDLE is one: leave it out, such steps run eagerly"
                )
        if not self.buckets or not 1 <= self.buckets[0] <= self.buckets[-1] <= max_sequences:
            raise InvalidInputError(
                f"buckets={list(self.buckets)}; batch sizes from 1 to max_sequences={max_sequences} are needed"
            )
        self._make = graph or graphs_of(self._device)
        self._recordings: dict[tuple[ForwardMode, int, bool], _Recording] = {}
        self.eager_steps: collections.Counter[str] = collections.Counter()
        tokens = self.buckets[-1] * max(self.modes.values())
        self._ids = torch.zeros(tokens, dtype=torch.int64, device=self._device)
        self._positions = torch.zeros_like(self._ids)
        if self._make is not None:
            backend.init_cuda_graph_state(self.buckets[-1], tokens)

    @property
    def recorded(self) -> tuple[tuple[ForwardMode, int], ...]:
        """(mode, batch size) of every recording there is."""
        return tuple((mode, size) for mode, size, _ in self._recordings)

    def run(self, batch: ForwardBatch, input_ids: Tensor, positions: Tensor) -> Any:
        """Plan a step and run the model on it.

        Args:
            batch: without padding. input_ids, positions: int64 [T_q], on the device or in (better pinned) host memory.

        Returns:
            What `forward` returns, without the rows of padding. From a graph: views of its own memory.

        Raises:
            InvalidInputError: inputs that are not one for each token of the batch.
            GraphError: the step cannot be recorded, or its result has rows of another kind.
        """
        for name, given in (("input_ids", input_ids), ("positions", positions)):
            if tuple(given.shape) != (batch.tokens,):
                raise InvalidInputError(
                    f"{name} has shape {tuple(given.shape)}; one for each of the {batch.tokens} tokens of the batch is "
                    f"needed, [T_q]"
                )
        make = self._make
        if (reason := self.eager_because(batch)) or make is None:
            if not self.eager_steps[reason]:
                log.info("a step of %d sequences runs eagerly: %s", batch.sequences, reason)
            self.eager_steps[reason] += 1
            self._backend.init_forward_metadata(batch)
            return self._forward(input_ids.to(self._device), positions.to(self._device))
        padded = self.padded(batch)
        recording = self._recording(padded, make)
        for buffer, given in ((self._ids, input_ids), (self._positions, positions)):
            buffer[: batch.tokens].copy_(given, non_blocking=True)
            buffer[batch.tokens : padded.tokens].zero_()
        self._backend.init_forward_metadata_replay_cuda_graph(padded)
        recording.graph.replay()
        return self._cut(recording.outputs, batch, padded)

    def eager_because(self, batch: ForwardBatch) -> str:
        """Why a step runs eagerly, "" = it is replayed."""
        if self._make is None:
            return f"torch has no device graphs on {self._device.type}"
        if batch.mode not in self.modes:
            return f"steps of mode {batch.mode.name} are not recorded"
        if batch.sequences > self.buckets[-1]:
            return f"the largest recorded batch has {self.buckets[-1]} sequences"
        if any(count != self.modes[batch.mode] for count in batch.all_query_lens):
            return f"recorded {batch.mode.name} steps have {self.modes[batch.mode]} tokens in each row"
        if batch.cross:
            return "steps over the keys of an encoder are not recorded"
        return ""

    def padded(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch at the size it is replayed with."""
        size = next(size for size in self.buckets if size >= batch.sequences)
        return dataclasses.replace(batch, padding=size - len(batch.rows), padding_query_len=self.modes[batch.mode])

    def capture(self, trees: Mapping[ForwardMode, int] | None = None) -> None:
        """Record every mode at every bucket now, the largest first, so that smaller ones fit into its memory. Without
        this, each is recorded when it is first needed.

        Args:
            trees: modes whose steps have a tree -> N_d. TARGET_VERIFY without one is a chain.
        """
        make = self._make
        if make is None:
            return
        for size in reversed(self.buckets):
            for mode, tokens in self.modes.items():
                drafts = (trees or {}).get(mode)
                tree = None if drafts is None else _no_rows(drafts, self._device)
                self._recording(ForwardBatch(mode, [], [], [], tree, size, tokens), make)

    def _recording(self, padded: ForwardBatch, make: Callable[[], DeviceGraph]) -> _Recording:
        key = padded.mode, padded.sequences, padded.tree is not None
        if key not in self._recordings:
            tree = None if padded.tree is None else _no_rows(padded.tree.draft_tokens, self._device)
            # Only padding runs while it is recorded: no request's keys are touched.
            empty = ForwardBatch(padded.mode, [], [], [], tree, padded.sequences, self.modes[padded.mode])
            self._backend.init_forward_metadata_capture_cuda_graph(empty)
            ids, positions = self._ids[: padded.tokens], self._positions[: padded.tokens]
            ids.zero_()
            positions.zero_()

            def step() -> Any:
                self._backend.prepare()
                return self._forward(ids, positions)

            graph = make()
            self._recordings[key] = _Recording(graph, graph.capture(step))
        return self._recordings[key]

    def _cut(self, outputs: Any, batch: ForwardBatch, padded: ForwardBatch) -> Any:
        rows = {padded.sequences: batch.sequences, padded.tokens: batch.tokens}

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if not leaf.ndim or leaf.shape[0] not in rows:
                raise GraphError(
                    f"forward returned a tensor of shape {tuple(leaf.shape)} for {padded.tokens} tokens of "
                    f"{padded.sequences} sequences; a row for each token or each sequence is needed, so that those of "
                    f"padding can be left out"
                )
            return leaf[: rows[leaf.shape[0]]]

        return tree_map(cut, outputs)


def _no_rows(drafts: int, device: torch.device) -> DraftTree:
    return DraftTree(torch.empty(0, drafts, dtype=torch.int32, device=device))
