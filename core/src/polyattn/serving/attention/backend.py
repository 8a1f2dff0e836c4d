"""`AttentionBackend`: the attention of a serving engine, one backend for each phase, planned once per step.

The names of the seed pages (`init_forward_metadata`, `init_cuda_graph_state`, ...) are here too, as wrappers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import profiler as _profiler

from ...adapters.device import capturing
from ...errors import InvalidInputError, did_you_mean
from ...selection.inspection import served_by
from ...selection.select import Selection
from ...semantics.validation import contents_readable
from ...tuning import note_serving
from ..kv_cache.pool import attention_layers
from ..layer import AttentionLayer, StateLayer
from ..recurrent import LinearChoice
from ..step.batch import ForwardBatch, ForwardMode
from .choosing import choose_layers
from .layer_calls import Idle, Run, Split, Tokens
from .phases import RECORDED, Asked, ServingPhase, Verifier
from .plan_slots import Buffers, EncoderBatch, PlanSlot, Tables, on_device, part_of, tokens_of
from .workspace import Limits, Workspaces

if TYPE_CHECKING:
    from ..kv_cache.pool import KVPool
    from ..step.requests import RequestTable
    from ..step.step import Step, StepBuffers
    from .over_ranks import RanksOfKeys

__all__ = ["AttentionBackend"]

_NONE: Mapping[int, Run] = {}


def _profiled(
    batch: ForwardBatch | None, run: Run, q: Tensor, k: Tensor | None, v: Tensor | None, save: bool
) -> Tensor:
    """A layer's call, in a range of torch's profiler that says its step's phase, the layer and who serves it."""
    phase = "" if batch is None else f"{batch.mode.name.lower()} "
    with torch.profiler.record_function(f"polyattn.serving {phase}layer {run.layer.layer_id} {run.by}"):
        return run(q, k, v, save)


def _ranks_of_keys(mesh: Any, layers: Sequence[AttentionLayer]) -> RanksOfKeys:
    from .over_ranks import RanksOfKeys  # torch.distributed, which one device does without

    return RanksOfKeys(mesh, layers)


def _has_graphs(device: torch.device) -> bool:
    """Return whether backends must allow recording: a CPU has no graphs, and what stands for them there records
    anything."""
    return device.type != "cpu"


class AttentionBackend:
    """The attention of all layers of a model over one pool, on one device and one stream at a time.

    Every step: `plan` (host) and `prepare` (device), then `forward` once per layer. Backends are chosen when this is
    made, for each layer and phase; the overrides in force then (`use_backend`, the component) are captured.

    Args:
        layers: of the model, those of `pool`; those without pages are left to the model. pool: their caches.
        table: the requests' pages in the pool's groups (those of cross layers apart). limits: what no step exceeds.
        backend, prefill_backend, decode_backend: by name; a phase's own wins, one alone leaves the other phase to
            `backend`. None = `use_backend`, configuration, then automatic.
        verify: whose backend verifies drafts, "prefill" or "decode"; None = configuration, then "prefill".
        topk: of speculative decoding: 0 none, 1 a chain, more a tree.
        encoder_table: the pages of encoder tokens, for cross layers: a table of one group.
        ranks: a `torch.distributed.DeviceMesh` of one dimension, `ring`, whose ranks each hold a part of the keys of
            every request, at least one, in a pool and a table of their own. Steps are decode steps of the same rows on
            all of them; `seq_lens` counts the keys of this rank. The rank that keeps the new tokens is given their keys
            and values, the others None; all get the same results.
        linear: who serves layers of linear attention, which the model hands to `RecurrentLayers`.
        batch_invariant: a row gets the same bits whatever else is in its step, its own queries and keys being the same.
            The decoding rows of a mixed step then run apart from those that extend.

    Raises:
        UnsupportedRequestError, BackendUnavailableError: no backend serves a phase, or the phases' do not go together;
            both flags are named. InvalidInputError: layers, pool and tables that do not belong together.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer | StateLayer],
        pool: KVPool,
        table: RequestTable,
        *,
        limits: Limits,
        backend: str | None = None,
        prefill_backend: str | None = None,
        decode_backend: str | None = None,
        verify: Verifier | None = None,
        topk: int = 0,
        encoder_table: RequestTable | None = None,
        ranks: Any = None,
        linear: LinearChoice | None = None,
        batch_invariant: bool = False,
    ) -> None:
        note_serving("AttentionBackend")
        layers = attention_layers(layers)
        self._ranks = None if ranks is None else _ranks_of_keys(ranks, layers)
        self._tables = Tables(layers, pool, table, encoder_table, limits)
        self.layers = {layer.layer_id: layer for layer in layers}
        self.pool, self.limits, self.linear = pool, limits, linear or LinearChoice()
        self._asked = Asked(backend, prefill_backend, decode_backend, verify, topk, ranks is not None, batch_invariant)
        self._served = choose_layers(layers, pool, self._asked)
        self._workspaces = Workspaces(pool.device)
        self._buffers: dict[str, Buffers] = {}
        self._slots: dict[Hashable, PlanSlot] = {}
        self._recorded: Limits | None = None
        self._recording: frozenset[ServingPhase] = frozenset()
        self._whole = next((layer.layer_id for layer in layers if layer.kind == "encoder_only"), None)
        self._idle: Mapping[int, Run] = {i: Idle(layer) for i, layer in self.layers.items()}
        self._batch: ForwardBatch | None = None
        self._planned: list[tuple[PlanSlot, Tokens | None]] = []
        # Where the recorded step was planned, if it is prepared by its recording.
        self._again: tuple[PlanSlot, ServingPhase] | None = None
        # The layers' calls once the step is prepared: under any name, and under the name of its mode.
        self._any = self._decode = self._extend = _NONE

    @property
    def batch_invariant(self) -> bool:
        """Return whether rows get the same bits whatever else is in their step."""
        return self._asked.batch_invariant

    # A step -----------------------------------------------------------------------------------------------------------

    def plan(self, batch: ForwardBatch, encoder: EncoderBatch | None = None) -> tuple[Step, ...]:
        """Build the step's tables and let every backend plan from them. On the host; never recorded.

        Args:
            batch: what is run. encoder: what cross layers attend, where the model has such.

        Returns:
            The step of each group of the pool; of a mixed batch that runs in two parts, the extending part's first. Its
            tensors are filled by `prepare`.

        Raises:
            InvalidInputError: a batch that this server was not built for: longer rows than `limits`, drafts without
                `topk`, a part of a sequence where a layer is encoder-only.
        """
        return self._plan(batch, encoder, None)

    def prepare(self) -> None:
        """The device's part of the plan: neither waits nor allocates, may be recorded, and may be repeated."""
        if self._batch is None:
            raise InvalidInputError(
                "prepare() is the device's part of a plan, and no step is planned: plan(batch) first"
            )
        if self._batch.mode is ForwardMode.IDLE:
            return
        recorded = capturing(self.pool.device.type)
        for slot, _ in self._planned:
            slot.prepare()
            slot.prepare_recorded |= recorded
        calls = self._split() if len(self._planned) > 1 else self._planned[0][0].calls
        if self._ranks is not None:
            calls = {i: self._ranks.around(run) for i, run in calls.items()}
        decode = self._batch.mode is ForwardMode.DECODE
        self._any, self._decode, self._extend = calls, calls if decode else _NONE, _NONE if decode else calls

    def advance(self, encoder: EncoderBatch | None = None) -> tuple[Step, ...]:
        """`plan` for the decode step after this one, of the same rows, each one token longer; without a copy of it."""
        if self._batch is None:
            raise InvalidInputError("advance() goes on from a planned decode step, and none is planned: plan(batch)")
        return self._plan(self._batch.next(), encoder, None)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """Attention of one layer under the planned step.

        Args:
            q: [T_q, H_q, D]. k, v: [T_q, H_kv, D], [T_q, H_kv, D_v], the new keys and values, None when the cache has
                them; of a cross layer, those of the encoder's new tokens. Latent: q [T_q, H_q, D_c + D_r] absorbed, k
                the rows [T_q, D_c + D_r], v None, or the lists int32 [T_q, token_topk] of a layer with such.
            save_kv_cache: write k and v. If not, they are attended all the same; a latent layer's are taken to be in
                the cache.

        Returns:
            [T_q, H_q, D_v] (latent: D_c). Rows of padding tokens have no meaning.

        Raises:
            InvalidInputError: no step is planned, a layer that is not of this model, shapes that do not fit, or keys
                and values for a step that has them: each is planned, or prepared again to be repeated.
        """
        try:
            run = self._any.get(layer.layer_id)
        except AttributeError:
            self._no_layer(layer)
        if run is None:
            self._refuse("forward", layer)
        if run.layer is not layer:
            self._check_same(run.layer, layer)
        if _profiler._is_profiler_enabled:
            return _profiled(self._batch, run, q, k, v, save_kv_cache)
        return run(q, k, v, save_kv_cache)

    def check_layer(self, layer: AttentionLayer) -> None:
        """Check that a layer is the one of its number here, as every `forward` does.

        Raises:
            InvalidInputError: there is none, or it says something else.
        """
        if (known := self.layers.get(layer.layer_id)) is None:
            self._unknown(layer.layer_id)
        if known is not layer:
            self._check_same(known, layer)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch | None = None,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """`forward` of a decode step."""
        try:
            run = self._decode.get(layer.layer_id)
        except AttributeError:
            self._no_layer(layer)
        if run is None or (batch is not self._batch and batch is not None):
            self._refuse("forward_decode", layer, batch)
        if run.layer is not layer:
            self._check_same(run.layer, layer)
        if _profiler._is_profiler_enabled:
            return _profiled(self._batch, run, q, k, v, save_kv_cache)
        return run(q, k, v, save_kv_cache)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch | None = None,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """`forward` of any other step: prefill, extend, mixed, target-verify, draft-extend."""
        try:
            run = self._extend.get(layer.layer_id)
        except AttributeError:
            self._no_layer(layer)
        if run is None or (batch is not self._batch and batch is not None):
            self._refuse("forward_extend", layer, batch)
        if run.layer is not layer:
            self._check_same(run.layer, layer)
        if _profiler._is_profiler_enabled:
            return _profiled(self._batch, run, q, k, v, save_kv_cache)
        return run(q, k, v, save_kv_cache)

    # The seed pages' names --------------------------------------------------------------------------------------------

    def init_forward_metadata(self, batch: ForwardBatch, encoder: EncoderBatch | None = None) -> None:
        """`plan` and `prepare`: once per forward."""
        self.plan(batch, encoder)
        self.prepare()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Once, before the first capture: the recorded phases (`phases.RECORDED`) get static buffers of this size and,
        where torch has device graphs, backends that can be recorded; elsewhere they keep those they have.

        Raises:
            UnsupportedRequestError: a backend asked for cannot be recorded; the flags are named.
        """
        limits = dataclasses.replace(self.limits, max_sequences=max_bs, max_tokens=max_num_tokens)
        self._record(RECORDED)
        self._recorded, self._workspaces = limits, Workspaces(self.pool.device)
        self._slots.clear()
        self._buffers.clear()
        self._forget(None)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Keys of a row of padding: `Limits.padding_seq_len`."""
        return self.limits.padding_seq_len

    def init_forward_metadata_capture_cuda_graph(
        self, batch: ForwardBatch, encoder: EncoderBatch | None = None
    ) -> None:
        """Before a capture: plan a padded batch in the buffers of its size; `forward` then reads only those. The
        `prepare` in here is not part of the capture. A runner may record `prepare()` too; then replays need none."""
        slot = self._plan_recorded(batch, encoder)
        if slot is not None:
            slot.prepare_recorded = False
        self.prepare()

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch, encoder: EncoderBatch | None = None) -> None:
        """Before a replay: plan a batch of the captured size in the buffers that the capture reads, and prepare it
        unless the recording does."""
        if self._again is not None and encoder is None and self._batch is not None and batch.follows(self._batch):
            # The step after the last: in the same slot, by the same kernels.
            slot, phase = self._again
            self._batch = None
            self._check_batch(batch)
            slot.plan(phase, self._served[phase], batch, None)
            self._batch = batch
            return
        planned = self._plan_recorded(batch, encoder)
        if planned is None or not planned.prepare_recorded:
            self.prepare()
        else:
            self._again = planned, self._phase(batch)

    def grow(self) -> None:
        """The last of a recorded decode step, beside `prepare`, its first: it leaves the lengths of the step after it
        on the device, which is then planned without a launch. Who replays a recording with this in it calls `grown`
        each time. Of other steps nothing is to be left."""
        if (buffers := self._growing()) is not None:
            buffers.grow()

    def grown(self) -> None:
        """A recording with `grow` in it is replayed."""
        if (buffers := self._growing()) is not None:
            buffers.grown()

    def _growing(self) -> StepBuffers | None:
        decode = self._batch is not None and self._batch.mode is ForwardMode.DECODE
        return self._planned[0][0].buffers.own if decode else None

    def _record(self, phases: frozenset[ServingPhase]) -> None:
        """Have these phases served by what can be recorded."""
        if not _has_graphs(self.pool.device):
            return
        recording = self._recording | phases
        served = choose_layers(self.layers.values(), self.pool, self._asked, recorded=recording)
        self._recording = recording
        self.__dict__.pop("_differ", None)
        for phase in phases & served.keys():
            self._served[phase] = served[phase]
            for slot in self._slots.values():
                slot.forget(phase)

    def _plan_recorded(self, batch: ForwardBatch, encoder: EncoderBatch | None) -> PlanSlot | None:
        """Plan a recorded step; returns its slot, None for an idle one."""
        if self._recorded is None:
            raise InvalidInputError(
                "recorded steps need their buffers first: call init_cuda_graph_state(max_bs, tokens)"
            )
        if (phase := self._phase(batch)) not in self._recording:
            self._record(frozenset({phase}))
        self._plan(batch, encoder, self._recorded)
        return self._planned[0][0] if self._planned else None

    # What was chosen --------------------------------------------------------------------------------------------------

    def explain(self, layer_id: int | None = None) -> dict[str, Selection]:
        """Return which backend serves each phase of a layer and which one writes its keys and values, with reasons.

        Args:
            layer_id: None = the first layer.
        """
        found = next(iter(self.layers)) if layer_id is None else layer_id
        if found not in self.layers:
            self._unknown(found)
        return {phase: layers[found].selection for phase, layers in self._served.items()}

    def steps_of(self, layer_id: int) -> list[tuple[Step, Tokens]]:
        """Return the planned step of a layer, with its tokens among those of the batch: in two parts where the phases
        of a mixed batch have other backends."""
        return [(slot.step_of(layer_id), slice(None) if tokens is None else tokens) for slot, tokens in self._planned]

    @property
    def batch(self) -> ForwardBatch | None:
        """The batch that is planned."""
        return self._batch

    @property
    def positions(self) -> Tensor:
        """int64 [T_q]: where the new tokens of the planned step are in their texts, as `Step.positions`.

        Raises:
            InvalidInputError: no step is planned.
        """
        if self._batch is None:
            raise InvalidInputError("positions are those of a planned step, and none is planned: plan(batch) first")
        if len(self._planned) == 1:
            return self._planned[0][0].positions
        # Idle, or in two parts.
        return on_device(self._batch.positions(), self.pool.device)

    @property
    def steps(self) -> tuple[Step, ...]:
        """What `plan` gave for the planned step: in a recorded one, tensors that no replay moves."""
        return tuple(step for slot, _ in self._planned for step in slot.steps)

    @property
    def nbytes(self) -> int:
        """Bytes of workspaces."""
        return self._workspaces.nbytes

    # ------------------------------------------------------------------------------------------------------------------

    def _forget(self, batch: ForwardBatch | None) -> None:
        """Forget what held for the step before."""
        self._batch, self._planned, self._again = batch, [], None
        self._any = self._decode = self._extend = _NONE

    def _plan(self, batch: ForwardBatch, encoder: EncoderBatch | None, recorded: Limits | None) -> tuple[Step, ...]:
        self._forget(None)
        if batch.mode is ForwardMode.IDLE:
            self._batch = batch
            self._any = self._decode = self._extend = self._idle
            return ()
        self._check_batch(batch)
        steps: list[Step] = []
        for name, phase, part, tokens in self._parts(batch, recorded is not None):
            slot = self._slot(name, recorded, part)
            steps += slot.plan(phase, self._served[phase], part, encoder)
            self._planned.append((slot, tokens))
        self._batch = batch
        return tuple(steps)

    def _check_batch(self, batch: ForwardBatch) -> None:
        if self._ranks is not None:
            self._ranks.check(batch)
        if self._whole is not None and list(batch.query_lens) != list(batch.seq_lens):
            self._refuse_part(batch, self._whole)
        if batch.max_seqlen_k > self.limits.max_seqlen:
            raise InvalidInputError(
                f"the batch has a row of {batch.max_seqlen_k} keys, and limits.max_seqlen={self.limits.max_seqlen} is "
                f"the most that backends plan for: refuse the request, or build with larger Limits"
            )

    @staticmethod
    def _refuse_part(batch: ForwardBatch, layer_id: int) -> NoReturn:
        n = next(n for n, prefix in enumerate(batch.prefix_lens) if prefix)
        raise InvalidInputError(
            f"row {batch.rows[n]} has {batch.query_lens[n]} new tokens of {batch.seq_lens[n]}, and layer {layer_id} is "
            f"encoder-only: each of its tokens sees all others of the sequence, those before would have to be run "
            f"again. Give the whole sequence in one step: no chunks, no cached prefix, no decode"
        )

    def _parts(
        self, batch: ForwardBatch, recorded: bool
    ) -> list[tuple[Hashable, ServingPhase, ForwardBatch, Tokens | None]]:
        """(plan slot, phase, what it runs, its tokens): two where the phases of a mixed batch have other backends."""
        phase = self._phase(batch)
        if recorded:
            return [((phase, batch.sequences, batch.tokens), phase, self._drafts(batch), None)]
        mixed = batch.mode is ForwardMode.MIXED and self._differ
        whole = bool(batch.padding) or self._tables.cross is not None
        if mixed and whole and self.batch_invariant:
            raise InvalidInputError(
                "batch_invariant: a mixed batch with padding or with cross layers is one call, in which rows that "
                "decode get other bits than in a decode batch; run the rows that decode in a batch of their own"
            )
        apart = mixed and not whole
        decode = [i for i, count in enumerate(batch.query_lens) if count == 1] if apart else []
        if not decode:
            return [("eager", phase, self._drafts(batch), None)]
        if len(decode) == len(batch.rows):
            return [("eager", "decode", part_of(batch, ForwardMode.DECODE, decode), None)]
        extend = [i for i, count in enumerate(batch.query_lens) if count > 1]
        device = self.pool.device
        return [
            ("eager", "extend", part_of(batch, ForwardMode.EXTEND, extend), tokens_of(batch, extend, device)),
            ("decoding part", "decode", part_of(batch, ForwardMode.DECODE, decode), tokens_of(batch, decode, device)),
        ]

    @functools.cached_property
    def _differ(self) -> bool:
        """Return whether some layer extends and decodes by different backends, or would give a row that decodes other
        bits beside one that extends."""
        if self._asked.batch_invariant:
            return True
        pairs = zip(self._served["extend"].values(), self._served["decode"].values(), strict=True)
        return any(served_by(a.chosen.selection) != served_by(b.chosen.selection) for a, b in pairs)

    def _split(self) -> Mapping[int, Run]:
        def parts(i: int) -> list[tuple[Run, Tokens]]:
            return [(slot.calls[i], tokens) for slot, tokens in self._planned if tokens is not None]

        return {i: Split(layer, parts(i)) for i, layer in self.layers.items()}

    def _drafts(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch as the kernels of `topk` see it: a chain needs no tree, its drafts see those before them."""
        if batch.mode is not ForwardMode.TARGET_VERIFY:
            return batch
        if self._asked.topk > 1 and batch.tree is None:
            raise InvalidInputError("topk > 1 verifies trees: give the batch its tree (a chain: DraftTree.chain)")
        if self._asked.topk > 1 or batch.tree is None:
            return batch
        parents = batch.tree.parents
        if contents_readable(parents) and not bool(
            (parents == torch.arange(-1, parents.shape[1] - 1, device=parents.device)).all()
        ):
            raise InvalidInputError(
                "topk=1 verifies chains, and the batch has a tree that is none; build with topk > 1"
            )
        return dataclasses.replace(batch, tree=None)

    def _phase(self, batch: ForwardBatch) -> ServingPhase:
        phase: ServingPhase = batch.mode.phase
        if phase not in self._served:
            raise InvalidInputError(
                f"a batch of mode {batch.mode.name} in a server without speculation: build AttentionBackend with "
                f"topk=1 (a chain) or more (a tree)"
            )
        return phase

    def _slot(self, name: Hashable, recorded: Limits | None, batch: ForwardBatch) -> PlanSlot:
        if name not in self._slots:
            # Recorded sizes share buffers: of them one is planned at a time, and each is planned before it is replayed.
            shared = "recorded" if recorded else str(name)
            limits = recorded or self.limits
            if shared not in self._buffers:
                self._buffers[shared] = Buffers(self._tables, limits, static=recorded is not None)
            if recorded:
                limits = dataclasses.replace(limits, max_sequences=batch.sequences, max_tokens=batch.tokens)
            self._slots[name] = PlanSlot(name, self._tables, self._workspaces, self._buffers[shared], limits)
        return self._slots[name]

    def _refuse(self, name: str, layer: AttentionLayer, batch: ForwardBatch | None = None) -> NoReturn:
        if layer.layer_id not in self.layers:
            self._unknown(layer.layer_id)
        if self._batch is None or self._any is _NONE:
            raise InvalidInputError(f"{name}: no step is planned and prepared; call init_forward_metadata(batch) first")
        if batch is not None and batch is not self._batch:
            raise InvalidInputError(
                f"{name}: the batch given is not the one planned; call init_forward_metadata(batch)"
            )
        right = "forward_decode" if self._batch.mode is ForwardMode.DECODE else "forward_extend"
        raise InvalidInputError(
            f"{name}: the planned batch is of mode {self._batch.mode.name}; call {right} or forward"
        )

    @staticmethod
    def _check_same(known: AttentionLayer, given: AttentionLayer) -> None:
        """A layer that is not the one of its number here is as good where it says the same."""
        if (name := known.differs(given)) is not None:
            raise InvalidInputError(
                f"layer {known.layer_id} is given with {name}={getattr(given, name)!r}, and the one of that number "
                f"here has {name}={getattr(known, name)!r}: pass the layer that this backend was made with"
            )

    def _no_layer(self, layer: Any) -> NoReturn:
        raise InvalidInputError(
            f"layer={layer!r} is no AttentionLayer: the layer itself is needed, one of this backend's "
            f"`layers`, {list(self.layers)}"
        )

    def _unknown(self, layer_id: Any) -> NoReturn:
        near = did_you_mean(str(layer_id), map(str, self.layers))
        raise InvalidInputError(f"there is no attention layer {layer_id!r} here.{near} Known: {list(self.layers)}")
