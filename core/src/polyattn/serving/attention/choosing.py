"""This module chooses the backend of each layer and phase, and the one that writes its keys and values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...contract import AttentionRequest, Bound
from ...dispatch.binding import Chosen, bind_selection, choose
from ...errors import BackendUnavailableError, InvalidInputError, UnsupportedRequestError
from ...registry.device_ops import CORE
from ...selection.inspection import catalogue, served_by
from ...selection.overrides import Scope, current_settings
from ...selection.select import Choice, Policy, Selection, select
from ..dual_chunk import DUAL_CHUNK_BACKEND
from ..layer import AttentionLayer
from .phases import Asked, ServingPhase, choose_phases, layer_request

if TYPE_CHECKING:
    from torch import Tensor

    from ..kv_cache.pool import KVPool, LayerCache

__all__ = ["Served", "choose_layers", "layer_requests"]

STATIC_SCALES = ("", "tensor", "head")
"""Granularities whose scales are set before a token is written; others are made of the tokens, by the pool."""


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """A layer's kernel in one phase.

    Attributes:
        chosen: the choice, for calls without new keys and values. saver: the same kernel where it writes them too,
            None = the pool writes them before it. attending: makes the same kernel where it attends them and nobody
            writes them, which hosts rarely ask for.
        cache: of the layer, the pool's. earlier: who serves the calls over earlier chunks, None = there are none.
    """

    layer: AttentionLayer
    phase: ServingPhase
    chosen: Chosen
    saver: Bound | None
    attending: Callable[[], Bound]
    cache: LayerCache
    earlier: Served | None = None

    @property
    def parts(self) -> tuple[Served, ...]:
        """Return who serves each call of the layer: one, or those of `dual_chunk.PARTS`."""
        return (self,) if self.earlier is None else (self, self.earlier, self.earlier)

    @property
    def bound(self) -> Bound:
        """Return what a step of this phase runs."""
        return self.saver or self.chosen.bound

    @property
    def windowed(self) -> bool:
        """Return whether the layer sees nothing before its window, so that steps may leave those pages out."""
        return self.layer.kind == "decoder"

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The keywords of its calls that are the layer's own."""
        sinks = self.layer.sinks if self.chosen.request.sinks else None
        own = {"sinks": sinks, "k_scale": self.cache.k_scale, "v_scale": self.cache.v_scale}
        return {name: tensor for name, tensor in own.items() if tensor is not None}

    @property
    def selection(self) -> Selection:
        """The choice for people, with who writes."""
        by = "the kernel" if self.saver else "the pool, before the kernel runs"
        found = self.chosen.selection
        notes = (*found.notes, f"new keys and values are written by {by}")
        if self.earlier is not None:
            other = served_by(self.earlier.chosen.selection)
            notes += (f"dual chunk attention: three calls, merged by their LSE; those over earlier chunks by {other}",)
        return dataclasses.replace(found, notes=notes)


def choose_layers(
    layers: Iterable[AttentionLayer], pool: KVPool, asked: Asked, *, recorded: Collection[ServingPhase] = ()
) -> dict[ServingPhase, dict[int, Served]]:
    """The kernels of all layers, by phase and layer_id; layers that ask the same share one choice.

    Args:
        recorded: phases whose steps go into device graphs, which their backends must allow.

    Raises:
        UnsupportedRequestError, BackendUnavailableError: as `choose_phases`.
    """
    found: dict[ServingPhase, dict[int, Served]] = {phase: {} for phase in asked.phases}
    known: dict[tuple[AttentionRequest, ...], dict[ServingPhase, Chosen]] = {}
    savers: dict[AttentionRequest, Bound | None] = {}
    attending: dict[AttentionRequest, Callable[[], Bound]] = {}

    def serve(layer: AttentionLayer, earlier: bool = False) -> dict[ServingPhase, Served]:
        cache = pool.cache(layer.layer_id)
        requests = layer_requests(layer, cache.request_fields(), pool, asked, recorded, earlier)
        if (key := tuple(requests.values())) not in known:
            known[key] = choose_phases(requests, asked)
        served = {}
        for phase, chosen in known[key].items():
            request = requests[phase]
            if request not in savers:
                # Kernels that write rows need one launch, with places that a step has looked up once. An adapter whose
                # kernel only reads looks them up in every layer, with a dozen operators more.
                by_pool = pool.writer(layer.layer_id) != CORE or not _may_save(request)
                savers[request] = None if by_pool else _saver(request, chosen)
                attending[request] = functools.cache(functools.partial(_attending, request, chosen, asked.scope))
            served[phase] = Served(layer, phase, chosen, savers[request], attending[request], cache)
        return served

    for layer in layers:
        if layer.token_topk and asked.parted:
            what = f"layer {layer.layer_id} lists the tokens that it sees (token_topk={layer.token_topk})"
            raise UnsupportedRequestError(
                f"{what}, and with keys on several ranks no rank scores all of them: keep all keys of it on one rank",
                {"serving": [f"{what}: keys on several ranks"]},
            )
        own = serve(layer)
        if layer.dual_chunk is not None:
            _check_chunks(layer, pool, asked)
            others = serve(layer, earlier=True)
            own = {phase: dataclasses.replace(one, earlier=others[phase]) for phase, one in own.items()}
        for phase, one in own.items():
            found[phase][layer.layer_id] = one
    return found


def _check_chunks(layer: AttentionLayer, pool: KVPool, asked: Asked) -> None:
    """
    Raises:
        InvalidInputError: pages that a chunk cuts. UnsupportedRequestError: drafts, or keys on several ranks.
    """
    what = f"layer {layer.layer_id} has dual chunk attention ({layer.dual_chunk})"
    if (length := layer.dual_chunk.length if layer.dual_chunk else 0) % pool.page_size:
        raise InvalidInputError(
            f"{what}, and the pool pages of {pool.page_size} tokens: a chunk has whole pages, a divisor of {length}"
        )
    if asked.topk or asked.parted:
        odd = "drafts to verify" if asked.topk else "keys on several ranks"
        raise UnsupportedRequestError(
            f"{what}, which is not served with {odd}: build without {'speculation' if asked.topk else 'ranks'}",
            {"serving": [f"dual chunk attention with {odd}"]},
        )


def layer_requests(
    layer: AttentionLayer, stored: Mapping[str, Any], pool: KVPool, asked: Asked, recorded: Collection[ServingPhase],
    earlier: bool = False,
) -> dict[ServingPhase, AttentionRequest]:  # fmt: skip
    """Return what a layer asks for in each phase.

    Args:
        stored: how its cache stores. pool: has the dtype and device of the queries. recorded: phases whose steps go
            into device graphs. earlier: of dual chunk attention, the call over earlier chunks.
    """

    def request(phase: ServingPhase) -> AttentionRequest:
        found = layer_request(
            layer, stored, phase=phase, dtype=pool.dtype, device=pool.device, topk=asked.topk,
            recorded=phase in recorded, parted=asked.parted, earlier=earlier, batch_invariant=asked.batch_invariant,
        )  # fmt: skip
        if layer.dual_chunk is not None and asked.name(phase, found) == DUAL_CHUNK_BACKEND:
            return dataclasses.replace(found, method="dual_chunk").normalised()
        return found

    return {phase: request(phase) for phase in asked.phases}


def _may_save(request: AttentionRequest) -> bool:
    # The new keys of a cross layer are not those of the query's tokens, which is what a kernel writes.
    return request.family == "paged" and not request.cross and request.kv_scales in STATIC_SCALES


def _saver(request: AttentionRequest, chosen: Chosen) -> Bound | None:
    """The chosen kernel where it writes keys and values as well, without a rewrite more than it needs anyway."""
    saving = dataclasses.replace(request, save_kv_cache=True)
    policy = Policy(Choice(served_by(chosen.selection), "argument"), strict=current_settings().strict)
    try:
        selection = select(saving, catalogue(), policy)
    except (UnsupportedRequestError, BackendUnavailableError):
        return None
    same = ("backend", "platform", "provider", "lowerings")
    if any(getattr(selection, field) != getattr(chosen.selection, field) for field in same):
        return None
    return bind_selection(saving, selection, policy, planned=True).bound


def _attending(request: AttentionRequest, chosen: Chosen, scope: Scope) -> Bound:
    """The chosen kernel where it attends new keys and values that are not stored, by a rewrite if it takes none.

    Raises:
        UnsupportedRequestError: neither it nor a rewrite does.
    """
    unsaved = dataclasses.replace(request, save_kv_cache=False)
    return choose(unsaved, served_by(chosen.selection), scope, planned=True).bound
