"""This module chooses the backend of each layer and phase, and the one that writes its keys and values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...contract import AttentionRequest, Bound
from ...dispatch.binding import Chosen, bind_selection, choose
from ...errors import BackendUnavailableError, UnsupportedRequestError
from ...registry.device_ops import CORE
from ...selection.inspection import catalogue, served_by
from ...selection.overrides import Scope, current_settings
from ...selection.select import Choice, Policy, Selection, select
from ..layer import AttentionLayer
from .phases import Asked, ServingPhase, choose_phases, layer_request

if TYPE_CHECKING:
    from torch import Tensor

    from ..kv_cache.pool import KVPool, LayerCache

__all__ = ["Served", "choose_layers"]

STATIC_SCALES = ("", "tensor", "head")
"""Granularities whose scales are set before a token is written; others are made of the tokens, by the pool."""


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """A layer's kernel in one phase.

    Attributes:
        chosen: the choice, for calls without new keys and values. saver: the same kernel where it writes them too,
            None = the pool writes them before it. attending: makes the same kernel where it attends them and nobody
            writes them, which hosts rarely ask for.
        cache: of the layer, the pool's.
    """

    layer: AttentionLayer
    phase: ServingPhase
    chosen: Chosen
    saver: Bound | None
    attending: Callable[[], Bound]
    cache: LayerCache

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
        return dataclasses.replace(found, notes=(*found.notes, f"new keys and values are written by {by}"))


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
    for layer in layers:
        cache = pool.cache(layer.layer_id)
        requests = _requests(layer, cache.request_fields(), pool, asked, recorded)
        if (key := tuple(requests.values())) not in known:
            known[key] = choose_phases(requests, asked)
        for phase, chosen in known[key].items():
            request = requests[phase]
            if request not in savers:
                # Kernels that write rows need one launch, with places that a step has looked up once. An adapter whose
                # kernel only reads looks them up in every layer, with a dozen operators more.
                by_pool = pool.writer(layer.layer_id) != CORE or not _may_save(request)
                savers[request] = None if by_pool else _saver(request, chosen)
                attending[request] = functools.cache(functools.partial(_attending, request, chosen, asked.scope))
            served = Served(layer, phase, chosen, savers[request], attending[request], cache)
            found[phase][layer.layer_id] = served
    return found


def _requests(
    layer: AttentionLayer, stored: Mapping[str, Any], pool: KVPool, asked: Asked, recorded: Collection[ServingPhase]
) -> dict[ServingPhase, AttentionRequest]:
    def request(phase: ServingPhase) -> AttentionRequest:
        return layer_request(
            layer, stored, phase=phase, dtype=pool.dtype, device=pool.device, topk=asked.topk,
            recorded=phase in recorded, parted=asked.parted,
        )  # fmt: skip

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
