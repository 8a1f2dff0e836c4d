"""A server's two phases, each with a backend of its own, and the rules between them (`PairRule`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .errors import UnsupportedRequestError
from .records import AttentionRequest
from .selection import Catalogue, Policy, Selection, holds, select

__all__ = ["in_phase", "select_pair"]


def in_phase(request: AttentionRequest, phase: str) -> AttentionRequest:
    """A server's request as its extend or decode would make it. Only a verify step has a tree, and the mask it comes
    as."""
    relation, mask = "one" if phase == "decode" else "fewer", "none" if request.tree else request.mask
    return dataclasses.replace(request, phase=phase, s_relation=relation, tree=False, mask=mask)  # type: ignore[arg-type]


def select_pair(
    prefill: AttentionRequest, decode: AttentionRequest, catalogue: Catalogue, policies: Mapping[str, Policy]
) -> dict[str, Selection]:
    """Choose for both phases of a server and check the rules between them (`PairRule`).

    Args:
        prefill, decode: the two phases' requests. policies: by phase, `prefill` and `decode`.

    Raises:
        UnsupportedRequestError: the two do not work together, or one phase has no backend.
    """
    requests = {"prefill": prefill, "decode": decode}
    chosen = {phase: select(request, catalogue, policies[phase]) for phase, request in requests.items()}
    by_id = {o.info.id: o.info for o in catalogue.offers}
    for phase, selection in chosen.items():
        for rule in by_id[selection.id].pairs:
            other = chosen.get(rule.other_phase)
            if rule.phase != phase or other is None or other.backend not in rule.others:
                continue
            if holds(rule.when, requests[phase]):
                raise UnsupportedRequestError(
                    f"{selection.backend} for {phase} does not work with {other.backend} for {rule.other_phase}: "
                    f"{rule.why}. Choose another backend for one of the two phases",
                    {selection.backend: [rule.why]},
                )
    return chosen
