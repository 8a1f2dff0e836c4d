"""This module decides which backend serves which phase of a server: the rule of prefill, decode and verify, checked
before a kernel runs.

Inheritance: a phase's own backend, else `backend` (`--attention-backend`), else automatic. Drafts are verified by the
backend of `--speculative-attention-mode`, prefill unless said otherwise. What a combination cannot do is said by data:
the capability rows (with `spec_topk` and `page_size` in every phase's request) and `PairRule`s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, get_args

import torch

from ...contract import AttentionRequest, scalars
from ...contract.scalars import ENDLESS
from ...dispatch.binding import Chosen, bind_selection, device_facts, dtype_name
from ...errors import BackendUnavailableError, InvalidInputError, UnsupportedRequestError, did_you_mean
from ...selection.inspection import catalogue
from ...selection.overrides import SCOPE, Scope, current_choice, current_settings
from ...selection.phase_pairs import select_pair
from ...selection.select import Choice, Policy, select
from ...selection.tuned_policy import measured_policy
from ..layer import AttentionLayer

__all__ = ["RECORDED", "Asked", "ServingPhase", "choose_phases", "layer_request"]

ServingPhase = Literal["extend", "decode", "verify"]
Verifier = Literal["prefill", "decode"]

RECORDED: frozenset[ServingPhase] = frozenset({"decode", "verify"})
"""The phases whose steps go into device graphs: decode always, verify by the backend that verifies. So the prefill
backend is recorded in mode prefill only."""

_FLAGS: Mapping[ServingPhase, str] = {"extend": "--prefill-attention-backend", "decode": "--decode-attention-backend"}
_STEPS: Mapping[ServingPhase, dict[str, Any]] = {
    "extend": {"phase": "extend", "s_relation": "fewer"},
    "decode": {"phase": "decode", "s_relation": "one"},
    "verify": {"phase": "verify", "s_relation": "fewer"},
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """Describes what a serving context was asked for by argument; what is None comes from the override chain.

    Attributes:
        backend: of both phases. prefill, decode: of one; it wins over `backend`.
        verify: whose backend verifies drafts, "prefill" or "decode".
        topk: of speculation: 0 = none, 1 = chain, more = tree.
        parted: decoding requests have their keys on several ranks.
        batch_invariant: rows get the same bits whatever else is in their step.
        scope: the `with` forms in force when the context was made.
    """

    backend: str | None = None
    prefill: str | None = None
    decode: str | None = None
    verify: Verifier | None = None
    topk: int = 0
    parted: bool = False
    batch_invariant: bool = False
    scope: Scope = dataclasses.field(default_factory=SCOPE.get)

    def __post_init__(self) -> None:
        if self.verify not in (None, *get_args(Verifier)):
            near = did_you_mean(str(self.verify), get_args(Verifier))
            raise InvalidInputError(f"verify={self.verify!r}; it is 'prefill', 'decode' or None.{near}")
        if not isinstance(self.topk, int) or self.topk < 0:
            raise InvalidInputError(f"topk={self.topk!r}; it is 0 (no speculation), 1 (a chain) or more (a tree)")
        scalars.flag("batch_invariant", self.batch_invariant)

    def argument(self, phase: ServingPhase) -> str | None:
        """The backend named for a phase."""
        by = self.verifier if phase == "verify" else phase
        return (self.decode if by == "decode" else self.prefill) or self.backend

    def name(self, phase: ServingPhase, request: AttentionRequest) -> str | None:
        """The backend that a phase is to have, by argument or by the override chain."""
        choice = current_choice(self.argument(phase), self.scope, request)
        return None if choice is None else choice.name

    @property
    def verifier(self) -> ServingPhase:
        """The phase whose backend verifies."""
        mode = self.verify or current_settings().speculative_attention_mode or "prefill"
        return "decode" if mode == "decode" else "extend"

    @property
    def phases(self) -> tuple[ServingPhase, ...]:
        return ("extend", "decode", "verify") if self.topk else ("extend", "decode")


def layer_request(
    layer: AttentionLayer,
    stored: Mapping[str, Any],
    *,
    phase: ServingPhase,
    dtype: torch.dtype,
    device: torch.device,
    topk: int = 0,
    recorded: bool = False,
    parted: bool = False,
    earlier: bool = False,
    batch_invariant: bool = False,
) -> AttentionRequest:
    """Return what a layer asks for in a phase.

    Args:
        stored: the fields that say how its cache stores (`LayerCache.request_fields()`).
        dtype, device: of the queries. topk: as `Asked`. recorded: the phase's steps go into device graphs.
        parted: the keys of a decoding request lie on several ranks, and results are merged by their LSE; sinks belong
            to the last merge. earlier: the call over earlier chunks, of which some rows see fewer keys than they have
            queries; calls of a layer with chunks are merged by their LSE too. batch_invariant: as `Asked`.
    """
    tree, parts = phase == "verify" and topk > 1, parted and phase == "decode"
    # A tree under a window is a mask of positions (`tree_windows`); the kernel's own window counts places.
    by_mask = tree and layer.window >= 0
    left = -1 if by_mask or layer.window >= ENDLESS else layer.window
    return AttentionRequest(
        **{
            **device_facts(device),
            **_STEPS[phase],
            "family": "mla" if layer.latent else "paged",
            "dtype": dtype_name(dtype),
            "layout": "THD",
            "heads": layer.heads,
            "kv_heads": layer.kv_heads,
            "head_dim": layer.head_dim,
            "v_head_dim": layer.dims[1],
            "causal": "bottom_right" if layer.kind == "decoder" and not earlier else "none",
            "window": (left, left if layer.kind == "encoder_only" else -1),
            "cross": layer.kind == "cross",
            # An encoder may be shorter than what attends to it.
            **({"s_relation": "more"} if (layer.kind == "cross" or earlier) and phase != "decode" else {}),
            "softcap": float(layer.softcap),
            "sinks": layer.sinks is not None and not parts,
            "lse": parts or layer.dual_chunk is not None,
            "scale": None if layer.scale is None else float(layer.scale),
            "spec_topk": topk,
            "tree": tree and not by_mask,
            "token_topk": layer.token_topk,
            "mask": "bool" if tree else "none",
            "graph_capture": "session" if recorded else False,
            "batch_invariant": batch_invariant,
            **stored,
        }
    ).normalised()


def choose_phases(requests: Mapping[ServingPhase, AttentionRequest], asked: Asked) -> dict[ServingPhase, Chosen]:
    """A bound backend for each phase of a layer.

    Args:
        requests: of `extend` and `decode`, and of `verify` where `asked.topk`.

    Raises:
        UnsupportedRequestError: a phase has no backend, or the phases' do not work together (SEEDS G).
        BackendUnavailableError: a backend asked for is not here. Both name the flags.
    """
    try:
        policies = {"prefill": _policy(requests, asked, "extend"), "decode": _policy(requests, asked, "decode")}
        pair = select_pair(requests["extend"], requests["decode"], catalogue(), policies)
    except (UnsupportedRequestError, BackendUnavailableError) as exc:
        _refuse(exc, f"{_said(requests, asked, 'extend')} with {_said(requests, asked, 'decode')}{_drafts(asked)}")
    names: tuple[tuple[ServingPhase, str], ...] = (("extend", "prefill"), ("decode", "decode"))
    chosen = {phase: bind_selection(requests[phase], pair[name], policies[name], planned=True) for phase, name in names}
    if "verify" in requests:
        chosen["verify"] = _verifier(requests, asked)
    return {phase: chosen[phase] for phase in requests}  # in the order of the requests


def _verifier(requests: Mapping[ServingPhase, AttentionRequest], asked: Asked) -> Chosen:
    """The backend of the verifying phase; where nobody named that one, whichever is best at verifying."""
    request, policy = requests["verify"], _policy(requests, asked, asked.verifier)
    try:
        # Not by `choose`: the settings may name a backend for the phase that does not verify here.
        return bind_selection(request, select(request, catalogue(), policy), policy, planned=True)
    except (UnsupportedRequestError, BackendUnavailableError) as exc:
        mode = "decode" if asked.verifier == "decode" else "prefill"
        by = _said(requests, asked, asked.verifier)
        _refuse(exc, f"--speculative-attention-mode {mode} with {by}{_drafts(asked)}")


def _choice(requests: Mapping[ServingPhase, AttentionRequest], asked: Asked, phase: ServingPhase) -> Choice | None:
    return current_choice(asked.argument(phase), asked.scope, requests[phase])


def _policy(requests: Mapping[ServingPhase, AttentionRequest], asked: Asked, phase: ServingPhase) -> Policy:
    policy = Policy(_choice(requests, asked, phase), strict=current_settings().strict)
    return policy if policy.choice is not None else measured_policy(policy, requests[phase])


def _said(requests: Mapping[ServingPhase, AttentionRequest], asked: Asked, phase: ServingPhase) -> str:
    choice = _choice(requests, asked, phase)
    return f"{_FLAGS[phase]} {choice.name if choice else '(automatic)'}"


def _drafts(asked: Asked) -> str:
    return f", --speculative-eagle-topk {asked.topk}" if asked.topk else ""


def _refuse(exc: UnsupportedRequestError | BackendUnavailableError, what: str) -> NoReturn:
    if isinstance(exc, UnsupportedRequestError):
        raise UnsupportedRequestError(f"{what}: {exc}", exc.rejected) from exc
    raise BackendUnavailableError(f"{what}: {exc}") from exc
