"""This room checks what must hold for one case. Everything it finds is reported, not the first thing only."""

from __future__ import annotations

import dataclasses

from ...registry.foreign import Run
from ..calls import Installed, Target
from ..cases import Case
from ..problems import build
from ..threads import one_thread
from . import judged
from .capture import capture
from .dropout import dropout
from .notes import Notes, Outcome, Verdict
from .one_call import GRAD_ROUNDINGS, OUT_ROUNDINGS, values
from .relations import decode, pages, split

__all__ = ["CLEAR", "GRAD_ROUNDINGS", "OUT_ROUNDINGS", "Outcome", "Verdict", "run_case"]

_CHECKS = {
    "values": values,
    "decode": decode,
    "split": split,
    "pages": pages,
    "dropout": dropout,
    "capture": capture,
}
_BY_ROWS = ("values", "decode", "split", "pages")

CLEAR = 16.0
"""Times its allowance from which an error is wrong however few numbers it was measured on."""

_MORE = 8
"""Times the sequences on which an error that is not clear is measured again."""


def run_case(target: Target, case: Case) -> Outcome:
    """Run one case on a target.

    The largest of a handful of errors is a matter of luck, and so is that of plain torch which allows it: what exceeds
    its allowance by less than `CLEAR` is measured again on eight times the sequences, and that decides.

    An exception is a finding like any other, since what is declared must work; one that says that the device is lost
    (CUDA errors are sticky) is for the caller to notice: every later case will raise too.
    """
    if case.check == "refusal":
        return judged.refusal(target, case)
    if case.check == "witness":
        return judged.witness(target, case)
    if case.check == "fault":
        return judged.fault(target, case)
    if isinstance(target, Installed) and (refused := judged.narrowed(target, case)) is not None:
        return refused
    outcome = _measured(target, case)
    if case.check not in _BY_ROWS or not outcome.findings or max(f.excess for f in outcome.findings) >= CLEAR:
        return outcome
    more = _measured(target, dataclasses.replace(case, lengths=case.lengths * _MORE))
    return outcome if more.findings else dataclasses.replace(more, case=case)


def _measured(target: Target, case: Case) -> Outcome:
    problem = build(case, target.device)
    notes = Notes(case, problem.dtype, getattr(target, "accuracy", None))
    with Run() as run:
        try:
            with one_thread(), problem.family.settled(case, target.name):
                _CHECKS[case.check](target, problem, notes)
        except BaseException as exc:
            if run.ended_by_host(exc):
                raise
            # A declared case that cannot be run is what the kit is there to find, whatever the adapter raises.
            notes.wrong("call", f"raised {type(exc).__name__}: {exc}")
    verdict: Verdict = "failed" if notes.findings else "passed"
    return Outcome(case, verdict, tuple(notes.findings), notes.margins)
