"""Steps in device graphs: batches are padded to few sizes, each recorded once and replayed from static buffers."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ...errors import GraphError, InvalidInputError
from ..step.batch import ForwardBatch, ForwardMode
from ..step.tree import DraftTree
from .capture_checks import validate_static
from .device_graphs import CudaGraph, DeviceGraph, FakeGraph, graphs_of

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
    """Describes what a runner needs of the attention backend; `AttentionBackend` has it."""

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

    def grow(self) -> None:
        """The last of a recorded step, for the decode step that follows it; nothing in other modes."""

    def grown(self) -> None:
        """A replay with `grow` in it has begun."""

    @property
    def positions(self) -> Tensor:
        """int64 [T_q], of the new tokens of the step that was prepared; for `GraphRunner(planned_positions=True)`."""


@dataclasses.dataclass(frozen=True)
class _Recording:
    """inputs: what it reads of the runner's buffers. cuts: by the sequences of a batch, outputs that are one tensor."""

    graph: DeviceGraph
    outputs: Any
    inputs: tuple[Tensor, ...]
    cuts: dict[int, Tensor] = dataclasses.field(default_factory=dict)


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
        planned_positions: `forward` is given the positions of the planned step, which a graph makes by itself: `run`
            takes none, and a step has one copy less. Of drafts they are prefix + depth in the tree.

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
        planned_positions: bool = False,
    ) -> None:
        self._backend, self._forward, self._device = backend, forward, torch.device(device)
        self._planned_positions = planned_positions
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
        # Of all recordings: each reads the beginning.
        with torch.inference_mode(False):
            self._inputs = torch.zeros(1 if planned_positions else 2, tokens, dtype=torch.int64, device=self._device)
        if self._make is not None:
            backend.init_cuda_graph_state(self.buckets[-1], tokens)

    @property
    def input_ids(self) -> Tensor:
        """int64, what replays read: ids that are written to its beginning, such as by a sampler on the device, and
        given to `run` as that part of it, are not copied."""
        return self._inputs[0]

    @property
    def recorded(self) -> tuple[tuple[ForwardMode, int], ...]:
        """(mode, batch size) of every recording there is."""
        return tuple((mode, size) for mode, size, _ in self._recordings)

    def run(self, batch: ForwardBatch, input_ids: Tensor, positions: Tensor | None = None) -> Any:
        """Plan a step and run the model on it.

        Args:
            batch: without padding. input_ids, positions: int64 [T_q], on the device or in (better pinned) host memory;
                no positions where they are those of the plan.

        Returns:
            What `forward` returns, without the rows of padding. From a graph: views of its own memory.

        Raises:
            InvalidInputError: inputs that are not one for each token of the batch.
            GraphError: the step cannot be recorded, or its result has rows of another kind.
        """
        tokens = batch.tokens
        if (positions is None) is not self._planned_positions:
            raise InvalidInputError(
                "run() is given positions, and this runner has those of the plan (planned_positions=True): leave them "
                "out"
                if positions is not None
                else "run() is given no positions: give one for each token, or make the runner with "
                "planned_positions=True"
            )
        inputs = (input_ids,) if positions is None else (input_ids, positions)
        for name, given in zip(("input_ids", "positions"), inputs, strict=False):
            if given.shape != (tokens,):
                raise InvalidInputError(
                    f"{name} has shape {tuple(given.shape)}; one for each of the {tokens} tokens of the batch is "
                    f"needed, [T_q]"
                )
        make = self._make
        if (reason := self.eager_because(batch)) or make is None:
            if not self.eager_steps[reason]:
                log.info("a step of %d sequences runs eagerly: %s", batch.sequences, reason)
            self.eager_steps[reason] += 1
            self._backend.init_forward_metadata(batch)
            where = self._backend.positions if positions is None else positions.to(self._device)
            return self._forward(input_ids.to(self._device), where)
        padded = self.padded(batch)
        recording = self._recording(padded, make)
        for buffer, given in zip(recording.inputs, inputs, strict=True):
            if batch.padding != padded.padding:
                buffer[tokens:].zero_()
                buffer = buffer[:tokens]
            if given.data_ptr() != buffer.data_ptr() or not given.is_contiguous():
                buffer.copy_(given, non_blocking=True)
        self._backend.init_forward_metadata_replay_cuda_graph(padded)
        recording.graph.replay()
        self._backend.grown()
        return self._cut(recording, batch, padded)

    def eager_because(self, batch: ForwardBatch) -> str:
        """Say why a step runs eagerly, "" = it is replayed."""
        if self._make is None:
            return f"torch has no device graphs on {self._device.type}"
        if batch.mode not in self.modes:
            return f"steps of mode {batch.mode.name} are not recorded"
        if batch.sequences > self.buckets[-1]:
            return f"the largest recorded batch has {self.buckets[-1]} sequences"
        lens = batch.all_query_lens
        if lens.count(self.modes[batch.mode]) != len(lens):
            return f"recorded {batch.mode.name} steps have {self.modes[batch.mode]} tokens in each row"
        if batch.cross:
            return "steps over the keys of an encoder are not recorded"
        return ""

    def padded(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch at the size it is replayed with."""
        size = self.buckets[bisect.bisect_left(self.buckets, batch.sequences)]
        return batch.padded(size - len(batch.rows), self.modes[batch.mode])

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
            inputs = tuple(buffer[: padded.tokens] for buffer in self._inputs)
            there = self._inputs.clone()  # `input_ids` may have those of the step that it is recorded for
            self._inputs.zero_()

            def step() -> Any:
                self._backend.prepare()
                found = self._forward(*inputs, *((self._backend.positions,) if self._planned_positions else ()))
                self._backend.grow()
                return found

            graph = make()
            self._recordings[key] = _Recording(graph, graph.capture(step), inputs)
            self._inputs.copy_(there)
        return self._recordings[key]

    def _cut(self, recording: _Recording, batch: ForwardBatch, padded: ForwardBatch) -> Any:
        known = recording.cuts.get(batch.sequences)
        if known is not None:
            return known
        outputs = recording.outputs
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

        found = tree_map(cut, outputs)
        if isinstance(found, Tensor):  # a tree might be changed by whom it is given to
            recording.cuts[batch.sequences] = found
        return found


def _no_rows(drafts: int, device: torch.device) -> DraftTree:
    return DraftTree(torch.empty(0, drafts, dtype=torch.int32, device=device))
