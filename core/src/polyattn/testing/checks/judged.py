"""This module checks what can be judged without a run: refusals, and what a plugin's hook takes from its own rows."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from ...contract import AttentionRequest, Rejected, Witness
from ...contract.capability import holds
from ...errors import PluginError
from ...registry.manager import BrokenHook
from ..calls import Installed, Target
from ..cases import Case
from ..tolerances import Finding
from ..values import declared
from .notes import Outcome

__all__ = ["NARROWING", "fault", "kind_of", "narrowed", "refusal", "witness", "witness_cases"]

NARROWING = "narrowing without a witness"


def refusal(target: Target, case: Case) -> Outcome:
    """The check `refusal`: what is not declared is refused, and a reason names the field."""
    if not isinstance(target, Installed):
        raise TypeError(f"refusals are judged by selection, which {type(target).__name__} does not go through")
    error = target.refuse(case)
    if error is None:
        asked = " with ".join(case.fields)
        return Outcome(case, "failed", (Finding("refusal", f"{asked} is not declared, and was accepted"),))
    if isinstance(error, PluginError) or not any(field in str(error) for field in case.fields):
        named = " or ".join(case.fields)
        return Outcome(case, "failed", (Finding("refusal", f"no reason names {named}: {error}"),))
    return Outcome(case, "refused")


def narrowed(target: Installed, case: Case) -> Outcome | None:
    """Return what becomes of a declared case that the backend refuses after all; None where it takes it.

    A known fault of its library may refuse it, or the plugin's own hook for a reason of a kind that one of its
    witnesses stands for.
    """
    error = target.refuse(case)
    if error is None:
        return None
    if target.faulty(target.request(case)):
        return Outcome(case, "refused")
    verdict = target.narrowed(target.request(case))
    if verdict is None or isinstance(verdict, BrokenHook):
        return Outcome(case, "failed", (Finding("call", f"it is declared, and was refused: {error}"),))
    known = {kind_of(reason) for w in target.info.narrowed for reason in _reasons(target, w)}
    missing = [reason for reason in verdict.reasons if kind_of(reason) not in known]
    if missing or not verdict.reasons:
        why = "; ".join(missing) or "no reason at all"
        return Outcome(case, "failed", (Finding(NARROWING, f"the rows accept it, the hook says: {why}"),))
    return Outcome(case, "refused")


def witness_cases(target: Installed) -> list[Case]:
    """A case for each witness of a backend, and for each known fault that its libraries have on this machine."""
    own = [Case(request=_here(target, w), check="witness", fields=(w.why,)) for w in target.info.narrowed]
    faults = dict.fromkeys(d for found in target.defects.values() for d in found if d.witness and d.done == "refused")
    shown = [(dataclasses.replace(d.witness, **target.facts).normalised(), d) for d in faults if d.witness]
    return own + [
        Case(request=request, check="fault", fields=(d.what,)) for request, d in shown if holds(d.when, request)
    ]


def fault(target: Target, case: Case) -> Outcome:
    """The check `fault`: a request that runs into a known fault of the library is refused, or goes another way."""
    if not isinstance(target, Installed):
        raise TypeError(f"known faults are of installed libraries, which {type(target).__name__} does not ask")
    request, why = case.request, "; ".join(case.fields)
    if not declared(target.rows, request):
        message = f"the rows do not accept it, so the fault is one of nobody's requests: {why}"
    elif (refused := target.refuse(case)) is None and target.faulty(request):
        message = f"it runs into a known fault, and was accepted: {why}"
    elif refused is not None and not target.faulty(request):
        message = f"another provider has not that fault, and it was refused: {refused}"
    else:
        return Outcome(case, "refused")
    return Outcome(case, "failed", (Finding("fault", message),))


def witness(target: Target, case: Case) -> Outcome:
    """The check `witness`: the rows accept it, the hook refuses it, and says why."""
    if not isinstance(target, Installed):
        raise TypeError(f"witnesses are judged by the plugin's hook, which {type(target).__name__} does not ask")
    request, why = case.request.normalised(), "; ".join(case.fields)
    if not target.narrows:
        message = f"the plugin has no polyattn_report_capability, so nothing is narrowed: {why}"
    elif not declared(target.rows, request):
        message = f"the rows do not accept it, so it shows nothing about the hook: {why}"
    else:
        verdict = target.narrowed(request)
        if verdict is None:
            message = f"the hook accepts it: {why}"
        elif isinstance(verdict, BrokenHook):
            message = f"the hook failed: {'; '.join(verdict.reasons)}"
        elif not any(reason.strip() for reason in verdict.reasons):
            message = f"the hook refuses it without a reason: {why}"
        else:
            return Outcome(case, "refused")
    return Outcome(case, "failed", (Finding("witness", message),))


def kind_of(reason: str) -> str:
    """A reason without its numbers and quoted values: refusals that differ in those alone are of one kind."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", "#", reason)


def _here(target: Installed, witness: Witness) -> AttentionRequest:
    """Its request on this platform; on this very machine where it names no architecture."""
    facts = {"platform": target.platform} if witness.request.arch else target.facts
    return dataclasses.replace(witness.request, **facts).normalised()


def _reasons(target: Installed, witness: Witness) -> Iterable[str]:
    verdict: Rejected | None = target.narrowed(_here(target, witness))
    return () if verdict is None else verdict.reasons
