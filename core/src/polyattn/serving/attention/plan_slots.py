"""Plan slots: the tables of a step, the sessions that plan from them, and the layers' calls that read them."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...contract import Session, Slot
from ...errors import InvalidInputError
from ..kv_cache.pages import whole
from ..kv_cache.pool import groups_of
from ..step.batch import ForwardBatch, ForwardMode
from ..step.step import Step, StepBuffers
from ..step.tree_windows import windowed_tree_mask
from .choosing import Served
from .chunk_calls import ChunkCalls
from .layer_calls import LayerCall, Run, StepOfLayers, Tokens
from .phases import ServingPhase
from .workspace import Limits, Workspaces

if TYPE_CHECKING:
    from ..kv_cache.pool import KVPool
    from ..layer import AttentionLayer
    from ..step.requests import RequestTable

__all__ = ["Buffers", "EncoderBatch", "PlanSlot", "Tables", "on_device", "part_of", "tokens_of"]


@dataclasses.dataclass(frozen=True)
class EncoderBatch:
    """Describes what cross layers attend: the encoder tokens of the sequences of a `ForwardBatch`, in its order.

    Attributes:
        rows: of the encoder table, one for each row of the batch; beams of one request may share one. seq_lens: encoder
            tokens of each.
        new: the sequences (0 is the first) whose encoder has just run: in this step the layers are given the keys and
            values of all their tokens, packed in this order. Empty: layers are given None.

    Raises:
        InvalidInputError: not as many lengths as rows, or a sequence that is not there.
    """

    rows: Sequence[int]
    seq_lens: Sequence[int]
    new: Sequence[int] = ()

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.seq_lens):
            raise InvalidInputError(
                f"EncoderBatch has {len(self.rows)} rows and {len(self.seq_lens)} seq_lens; one each"
            )
        if wrong := [i for i in self.new if not 0 <= whole("EncoderBatch: new", i) < len(self.rows)]:
            raise InvalidInputError(f"EncoderBatch: new={wrong[0]} of {len(self.rows)} sequences; 0 is the first")

    def attended(self, batch: ForwardBatch) -> ForwardBatch:
        """The step of cross layers: the batch's queries over these keys."""
        return dataclasses.replace(batch, rows=self.rows, seq_lens=self.seq_lens, tree=None, cross=True)

    def written(self) -> ForwardBatch | None:
        """The tokens whose keys are written, None = none."""
        some = [i for i in self.new if self.seq_lens[i]]
        lens = [self.seq_lens[i] for i in some]
        return ForwardBatch(ForwardMode.EXTEND, [self.rows[i] for i in some], lens, lens) if some else None


def part_of(batch: ForwardBatch, mode: ForwardMode, indices: Sequence[int]) -> ForwardBatch:
    """Some rows of a batch as a batch of their own."""
    rows, seq_lens, query_lens = (
        [given[i] for i in indices] for given in (batch.rows, batch.seq_lens, batch.query_lens)
    )
    return ForwardBatch(mode, rows, seq_lens, query_lens)


def tokens_of(batch: ForwardBatch, indices: Sequence[int], device: torch.device) -> Tokens:
    """The packed tokens of some rows: a slice where they are neighbours, else int64 [T] on the device."""
    starts = batch.cu_seqlens_q
    if list(indices) == list(range(indices[0], indices[-1] + 1)):
        return slice(starts[indices[0]], starts[indices[-1] + 1])
    places = [token for i in indices for token in range(starts[i], starts[i + 1])]
    return on_device(places, device)


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64, by a copy that nobody waits for."""
    if numbers and device.type == "cpu":
        return torch.frombuffer(array("q", numbers), dtype=torch.int64)  # a third of what `tensor` takes
    found = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return found.to(device, non_blocking=True)


class Tables:
    """Describes what the steps of a serving context are built from: the pool's groups and the request tables.

    Attributes:
        group: layer_id -> index in `pool.groups`. own: the groups of `table`, in its order. cross: the group of cross
            layers, None where there are none.

    Raises:
        InvalidInputError: they do not belong together.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        pool: KVPool,
        table: RequestTable,
        encoder_table: RequestTable | None,
        limits: Limits,
    ) -> None:
        self.pool, self.table, self.encoder_table = pool, table, encoder_table
        groups_of(layers)  # at least one, and none twice
        for layer in layers:
            pool.check_layer(layer)
        self.group = {layer.layer_id: pool.group_of(layer.layer_id) for layer in layers}
        self.own = [g for g, group in enumerate(pool.groups) if not group.cross]
        self.cross = next((g for g, group in enumerate(pool.groups) if group.cross), None)
        windows = tuple(pool.groups[g].window for g in self.own)
        if tuple(table.windows) != windows:
            raise InvalidInputError(
                f"the request table has groups with windows {list(table.windows)}, the pool {list(windows)}: build it "
                f"with [group.window for group in pool.groups if not group.cross]"
            )
        if table.states is not pool.states:
            raise InvalidInputError(
                "the pool and the request table have other states by request, and rows would begin with what others "
                "left: build the table with RequestTable(..., states=pool.states)"
            )
        groups = 0 if encoder_table is None else len(encoder_table.windows)
        if groups != (self.cross is not None):
            raise InvalidInputError(
                "encoder_table is for models with cross layers, which need it: a RequestTable of one group, or None"
            )
        for name, given in (("table", table), ("encoder_table", encoder_table)):
            if given is not None and given.page_size != pool.page_size:
                raise InvalidInputError(f"{name} has pages of {given.page_size} tokens, the pool of {pool.page_size}")
        cross = [] if encoder_table is None or self.cross is None else [(self.cross, encoder_table.allocators[0])]
        for g, allocator in (*zip(self.own, table.allocators, strict=True), *cross):
            if allocator.pages > pool.pages[g]:
                raise InvalidInputError(
                    f"the allocator of group {g} gives out pages up to {allocator.pages - 1}, and the pool has "
                    f"{pool.pages[g]} of that group: build it with PageAllocator({pool.pages[g]})"
                )
        for layer in layers:
            if layer.sinks is not None and layer.sinks.device != pool.cache(layer.layer_id).tensors[0].device:
                raise InvalidInputError(
                    f"the sinks of layer {layer.layer_id} are on {layer.sinks.device}, the pool on {pool.device}"
                )
        if limits.max_seqlen > table.max_tokens:
            raise InvalidInputError(
                f"limits.max_seqlen={limits.max_seqlen} is more than the request table holds of one request, "
                f"{table.max_tokens}"
            )

    def columns(self, group: int) -> int:
        """Pages of one sequence in a group."""
        table = self.encoder_table if group == self.cross and self.encoder_table else self.table
        return table.tables[0].shape[1]


class Buffers:
    """The step buffers of plan slots that are never planned at the same time.

    Args:
        static: for recorded steps: everything at capacity, nothing moves.
    """

    def __init__(self, tables: Tables, limits: Limits, *, static: bool) -> None:
        self._tables, self.limits, self.static = tables, limits, static
        self._own = self._make(tables.table, limits.max_tokens)
        self._encoder: tuple[RequestTable, StepBuffers, StepBuffers] | None = None
        if (table := tables.encoder_table) is not None:
            new = self._make(table, limits.max_sequences * table.max_tokens)
            self._encoder = table, self._make(table, limits.max_tokens), new
        self._used: list[StepBuffers] = []
        self._none = torch.empty(0, dtype=torch.int64, device=tables.pool.device)

    def _make(self, table: RequestTable, tokens: int) -> StepBuffers:
        pages, device = table.tables[0].shape[1], self._tables.pool.device
        sequences, groups = self.limits.max_sequences, len(table.tables)
        fill = self.limits.padding_seq_len
        return StepBuffers(sequences, tokens, pages, groups, device, static=self.static, padding_seq_len=fill)

    def stage(self, batch: ForwardBatch, encoder: EncoderBatch | None) -> tuple[dict[int, Step], Tensor]:
        """The step of each of the pool's groups, in their order, and the slots of the encoder's new tokens."""
        tables = self._tables
        if (encoder is None) is not (tables.cross is None):
            raise InvalidInputError(
                "the model has cross layers: plan(batch, EncoderBatch(...)) says what they attend"
                if encoder is None
                else "an EncoderBatch is for models with cross layers, and this one has none"
            )
        self._used = [self._own]
        steps = dict(zip(tables.own, self._own.stage(batch, tables.table), strict=True))
        if encoder is None or self._encoder is None or tables.cross is None:
            return steps, self._none
        if len(encoder.rows) != len(batch.rows):
            raise InvalidInputError(
                f"the EncoderBatch has {len(encoder.rows)} sequences, the batch {len(batch.rows)}; they are the same"
            )
        table, attended, written = self._encoder
        (steps[tables.cross],) = attended.stage(encoder.attended(batch), table)
        steps = dict(sorted(steps.items()))
        self._used.append(attended)
        new = encoder.written()
        if new is None:
            return steps, self._none
        self._used.append(written)
        return steps, written.stage(new, table)[0].slots

    def prepare(self) -> None:
        for buffers in self._used:
            buffers.prepare()

    @property
    def own(self) -> StepBuffers:
        """Return the tables of the model's own tokens."""
        return self._own


_Part = tuple[int, int] | None
"""Of a call over chunks: tokens of a chunk, and which of `dual_chunk.PARTS` it is."""
_Key = tuple[int, bool, _Part]
"""Of layers that see one step: their group, whether it begins with their window, and which part of it they see."""


class _Planned(NamedTuple):
    phase: ServingPhase
    steps: dict[int, Step]
    new_slots: Tensor


class _Phase:
    """Describes what a plan slot has for one phase.

    Attributes:
        calls: by layer_id. steps: what those read of a step, for each kind of layer. sessions: by what they were asked.
    """

    def __init__(self) -> None:
        self.calls: dict[int, Run] = {}
        self.steps: dict[tuple[_Key, Hashable], StepOfLayers] = {}
        self.sessions: dict[Hashable, tuple[Session, _Key]] = {}
        self.keys: tuple[_Key, ...] = ()


class PlanSlot:
    """Holds one plan slot: eager steps, a part of split mixed steps, or the recorded steps of one size.

    Layers of one group that ask the same share one session here; no two groups, phases or slots do.

    Args:
        limits: of its steps; recorded steps are all of this size.

    Attributes:
        calls: of the planned step, by layer_id. prepare_recorded: replays prepare by themselves. buffers: of its steps.
    """

    def __init__(
        self, name: Hashable, tables: Tables, workspaces: Workspaces, buffers: Buffers, limits: Limits
    ) -> None:
        self.calls: Mapping[int, Run] = {}
        self.prepare_recorded = False
        self._name, self._tables, self._workspaces = name, tables, workspaces
        self.buffers, self._limits = buffers, limits
        self._made: dict[ServingPhase, _Phase] = {}
        self._seen: dict[_Key, Step] = {}
        self._planned: _Planned

    def plan(
        self,
        phase: ServingPhase,
        served: Mapping[int, Served],
        batch: ForwardBatch,
        encoder: EncoderBatch | None,
    ) -> tuple[Step, ...]:
        """Plan a step for all layers; returns it for each group of the pool."""
        steps, new_slots = self.buffers.stage(batch, encoder)
        made = self._made.get(phase)
        if made is None:
            with torch.inference_mode(False):  # what sessions keep is written in any mode
                made = self._made[phase] = self._make(served)
        elif self.buffers.static:
            self._workspaces.fix(self._name)  # this phase was recorded
        self._seen = {key: self._view(steps[key[0]], *key) for key in made.keys}
        for session, key in made.sessions.values():
            if not self._seen[key].empty:
                session.plan(self._seen[key])
        self._planned = _Planned(phase, steps, new_slots)
        return tuple(steps.values())

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return what `plan` gave last."""
        return tuple(self._planned.steps.values())

    @property
    def positions(self) -> Tensor:
        """Return the positions of the planned step's new tokens, which are the same in every group of the request
        table."""
        return self._planned.steps[self._tables.own[0]].positions

    def step_of(self, layer_id: int) -> Step:
        """Return the planned step of a layer's group."""
        return self._planned.steps[self._tables.group[layer_id]]

    def forget(self, phase: ServingPhase) -> None:
        """A phase is served by others from now on."""
        self._made.pop(phase, None)

    def prepare(self) -> None:
        """The device's part of the plan, and the tensors it made into the layers' calls."""
        self.buffers.prepare()
        phase, steps, new_slots = self._planned
        made, cross = self._made[phase], self._tables.cross
        for session, key in made.sessions.values():
            if not self._seen[key].empty:
                session.prepare(self._seen[key])
        for (key, _), layers in made.steps.items():
            group = key[0]
            step = steps[group]
            slots = new_slots if group == cross else step.slots
            keywords = self._keywords_of(self._seen[key], *key)
            layers.take(keywords, slots, step.tokens, slots.shape[0], recorded=self.buffers.static)
            layers.empty = self._seen[key].empty
        self.calls = made.calls

    def _view(self, step: Step, group: int, windowed: bool, part: _Part) -> Step:
        """A step as layers see it: without the pages before a window, which may be another request's by now."""
        if part is not None:
            return step.chunked(*part)
        window = self._tables.pool.groups[group].window
        return step.windowed(window) if windowed and window >= 0 else step

    def _keywords_of(self, step: Step, group: int, windowed: bool, _: _Part) -> Mapping[str, Any]:
        window = self._tables.pool.groups[group].window
        if step.tree_mask is None or not windowed or window < 0:
            return step.keywords
        return {"tables": step.tables, "attn_mask": windowed_tree_mask(step, step.tree_mask, window)}

    def _make(self, served: Mapping[int, Served]) -> _Phase:
        made = _Phase()
        for i, layer in served.items():
            calls = []
            for part, one in enumerate(layer.parts):
                chunks = layer.layer.dual_chunk
                key = self._tables.group[i], layer.windowed, None if chunks is None else (chunks.length, part)
                shared = made.steps.setdefault((key, StepOfLayers.shape(layer.layer)), StepOfLayers(layer.layer))
                calls.append(self._call(made, one, key, shared))
            made.calls[i] = calls[0] if len(calls) == 1 else ChunkCalls(calls)
        made.keys = tuple(dict.fromkeys(key for key, _ in made.steps))
        return made

    def _call(self, made: _Phase, served: Served, key: _Key, step: StepOfLayers) -> LayerCall:
        bound, plain = served.bound, served.chosen.bound
        forward, reader = bound.forward, plain.forward
        without = reader
        if bound.session is not None:
            forward = without = self._session(made, served, key, bound.session).forward
            reader = forward if bound is plain else reader

        def attend() -> Callable[..., Any]:
            # A kernel that plans, and takes new rows as it is, has its plan for calls that write nothing.
            taking = served.attending()
            return reader if bound is plain and taking.session is not None else taking.forward

        return LayerCall(served, self._tables.pool, step, forward, reader, without, attend)

    def _session(self, made: _Phase, served: Served, key: _Key, make: Callable[[Slot], Session]) -> Session:
        name = (*key, served.chosen.request)
        if name not in made.sessions:
            limits, part = self._limits, key[2]
            if part is not None and not self.buffers.static:
                # A row is cut at the borders of chunks that it crosses.
                rows = 2 * limits.max_sequences + limits.max_tokens // part[0]
                limits = dataclasses.replace(limits, max_sequences=rows)
            slot = self._workspaces.slot(
                self._name, (served.phase, name), limits, self._tables.columns(key[0]), recorded=self.buffers.static
            )
            made.sessions[name] = make(slot), key
        return made.sessions[name][0]
