"""A server's two phases, each with a backend of its own, and the rules between them (`PairRule`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..contract import AttentionRequest
from ..errors import UnsupportedRequestError
from .select import Catalogue, Policy, Selection, holds, select

__all__ = ["both_phases", "check_drafting", "select_pair"]


def both_phases(request: AttentionRequest) -> tuple[AttentionRequest, AttentionRequest]:
    """What a server asks in prefill and in decode that makes this request in one of them, or to verify drafts. Only
    such a step has a tree, and the mask it comes as."""
    mask = "none" if request.tree else request.mask
    # One query at the end sees all keys without a mask; several do not.
    causal = request.causal if request.cross else "bottom_right"
    extend = dataclasses.replace(request, phase="extend", s_relation="fewer", causal=causal, tree=False, mask=mask)
    decode = dataclasses.replace(request, phase="decode", s_relation="one", tree=False, mask=mask)
    if request.phase == "decode":
        return extend, request
    return (request if request.phase in ("prefill", "extend") else extend), decode


def check_drafting(request: AttentionRequest, catalogue: Catalogue, policy: Policy) -> None:
    """Check that who was named to verify drafts can be: every phase of a server that speculates asks for the same
    `spec_topk`, and one of them has to be that backend's.

    Raises:
        UnsupportedRequestError: it neither extends nor decodes so.
    """
    if policy.choice is None or request.phase != "verify" or request.family not in ("paged", "mla"):
        return
    refused = None
    for asked in both_phases(request):
        try:
            select(asked, catalogue, policy)
        except UnsupportedRequestError as exc:
            refused = refused or exc
        else:
            return
    if refused is not None:
        raise UnsupportedRequestError(
            f"{policy.choice.name} cannot verify: every phase of a server asks for the same spec_topk, and it neither "
            f"extends nor decodes with {request.spec_topk}. {refused}",
            refused.rejected,
        ) from refused


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
