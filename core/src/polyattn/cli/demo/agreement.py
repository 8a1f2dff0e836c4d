"""Step 3 compares every backend that runs here with the float64 reference, within the tolerances of the conformance
kit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from rich.progress import Progress
from rich.text import Text

from ...contract import AttentionRequest, SRelation
from ...registry.manager import get_manager
from ...selection.inspection import list_backends
from ...testing.calls import Installed
from ...testing.cases import Case
from ...testing.plain import Solution, in_float64, plainly
from ...testing.problems import Problem, build
from ...testing.tolerances import RELATIVE_L2, compare, measure
from ..rendering import grid
from .step import Step

__all__ = ["CASES", "run"]

TITLE = "Every backend against the reference"
QKV = ("query", "key", "value")
SQUARE = ((33, 33),) * 2
LONGER = ((17, 49),) * 2


def _dense(lengths: tuple[tuple[int, int], ...] = SQUARE, **changes: Any) -> Case:
    fields: dict[str, Any] = {"dtype": "float32", "heads": 4, "kv_heads": 4, "head_dim": 64, **changes}
    s_q, s_k = lengths[0]
    relation: SRelation = "equal" if s_q == s_k else "one" if s_q == 1 else "fewer" if s_q < s_k else "more"
    return Case(request=AttentionRequest(s_relation=relation, **fields), lengths=lengths)


CASES: dict[str, Case] = {
    "full": _dense(),
    "causal, GQA 4:1": _dense(kv_heads=1, causal="bottom_right"),
    "causal, more keys": _dense(LONGER, causal="bottom_right"),
    "one query (decode)": _dense(((1, 65),) * 2, kv_heads=2),
    "rows without keys": _dense(((40, 9),) * 2, causal="bottom_right"),
    "sliding window": _dense(causal="bottom_right", window=(7, -1)),
    "softcap": _dense(softcap=5.0),
    "sinks": _dense(causal="bottom_right", sinks=True, kv_heads=1),
    "bool mask": _dense(mask="bool"),
    "additive mask": _dense(mask="additive"),
    "narrow values": _dense(v_head_dim=32),
    "with LSE": _dense(LONGER, causal="bottom_right", lse=True),
    "gradients": _dense(causal="bottom_right", kv_heads=2, grad=QKV),
    "packed, causal": Case(
        request=AttentionRequest(
            family="varlen", dtype="float32", heads=4, kv_heads=2, head_dim=64, causal="bottom_right"
        ),
        lengths=((17, 17), (1, 1), (30, 30)),
    ),
    "bfloat16, causal": _dense(dtype="bfloat16", head_dim=128, kv_heads=1, causal="bottom_right"),
    "bfloat16, full": _dense(((65, 65),), dtype="bfloat16", head_dim=128),
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer says what a backend made of a case: its largest relative L2 error (out, LSE, gradients), or why it was
    refused.

    Attributes:
        wrong: a gate that was not passed, in words; empty = passed.
    """

    error: float = 0.0
    refused: str = ""
    wrong: str = ""

    def cell(self) -> Text:
        if self.refused:
            return Text(self.refused, style="quiet")
        return Text(f"{self.error:.1e}{' WRONG' if self.wrong else ''}", style="bad" if self.wrong else "good")


def run(bar: Progress) -> Step:
    # A method is no backend of its own: it needs a place, and makes calls that the others serve.
    methods = {info.name for info in get_manager().backends.values() if all(p.is_method for p in info.providers)}
    here = [row.name for row in list_backends("cpu") if row.status == "available" and row.name not in methods]
    targets = [Installed(name, "cpu") for name in here]
    task = bar.add_task("checking backends", total=len(CASES))
    found: dict[str, dict[str, Answer]] = {}
    for name, case in CASES.items():
        problem = build(case, torch.device("cpu"))
        right, plain = in_float64(problem), plainly(problem)
        found[name] = {target.name: _ask(target, problem, right, plain) for target in targets}
        bar.advance(task)
    caught = _controls(targets)
    answers = [answer for row in found.values() for answer in row.values()]
    ran = [answer for answer in answers if not answer.refused]
    wrong = [answer for answer in ran if answer.wrong]
    failed = bool(wrong) or not all(caught.values()) or not ran
    refused = len(answers) - len(ran)
    control = f"{sum(caught.values())} of {len(caught)} deliberate mistakes caught"
    return Step(
        title=TITLE,
        note="largest relative L2 error of output, LSE and gradients",
        verdict="fail" if failed else "pass",
        figure=f"{len(ran) - len(wrong)} of {len(ran)} right, {refused} refused; {control}",
        parts=(_table(found, [t.name for t in targets]), _legend(caught)),
        data={
            "cases": {
                name: {backend: dataclasses.asdict(answer) for backend, answer in row.items()}
                for name, row in found.items()
            },
            "worst": _worst(found),
            "allowed": {str(dtype).removeprefix("torch."): bound for dtype, bound in RELATIVE_L2.items()},
            "mistakes_caught": caught,
        },
    )


def _ask(target: Installed, problem: Problem, right: Solution, plain: Solution) -> Answer:
    """Run a case and compare output, LSE and gradients with both gates of the kit; keep the reason of a refusal."""
    case, request = problem.case, problem.request
    if (refusal := target.refuse(case)) is not None:
        reasons = getattr(refusal, "rejected", {}).get(target.name, [str(refusal)])
        return Answer(refused=_short(reasons))
    raw = target.call(case, problem.tensors, problem.extra, None)
    out, lse = raw if request.lse else (raw, None)
    results: list[tuple[str, Any, Any, Any, Any]] = [("out", out, right.out, plain.out, "out")]
    if lse is not None:
        results.append(("lse", lse, right.lse, plain.lse, "lse"))
    if wanted := [name for name in request.grad if name != "lse"]:
        grads = torch.autograd.grad(out, [problem.tensors[name] for name in wanted], problem.dout)
        results += [(n, g, right.grads[n], plain.grads[n], "grad") for n, g in zip(wanted, grads, strict=True)]
    error, wrong = 0.0, []
    for name, actual, good, ordinary, kind in results:
        finding, _ = compare(name, actual, good, ordinary, problem.dtype, request.softcap > 0, kind)
        if finding is not None:
            wrong.append(str(finding))
        seen = ~good.isinf()
        error = max(error, measure(actual[seen], good[seen], ordinary[seen], problem.dtype, kind=kind).relative)
    return Answer(error=error, wrong="; ".join(wrong))


def _short(reasons: list[str]) -> str:
    """Name the field that decided: `softcap=5.0 is not declared` is `no softcap`, another family `-`."""
    word = reasons[0].partition("=")[0].rpartition(": ")[2]
    return {"family": "-", "grad": "no gradients", "lse": "no LSE"}.get(word, f"no {word}")


def _controls(targets: list[Installed]) -> dict[str, bool]:
    """Make mistakes on purpose and tell whether the gates noticed. A gate that lets one pass would prove nothing
    above."""
    case = CASES["full"]
    problem = build(case, torch.device("cpu"))
    right, plain = in_float64(problem), plainly(problem)
    target = targets[0]

    def call(**changes: Any) -> Any:
        other = dataclasses.replace(case, request=dataclasses.replace(case.request, **changes))
        return target.call(other, problem.tensors, problem.extra, None)

    mistakes: dict[str, Callable[[], Any]] = {
        "scale off by 2 %": lambda: call(scale=1.02 * case.request.head_dim**-0.5),
        "a causal mask too many": lambda: call(causal="bottom_right"),
        "zeros": lambda: torch.zeros_like(right.out),
    }
    return {
        name: compare("out", mistake(), right.out, plain.out, problem.dtype)[0] is not None
        for name, mistake in mistakes.items()
    }


def _worst(found: dict[str, dict[str, Answer]]) -> dict[str, dict[str, float]]:
    """Find the largest error: backend -> dtype -> error."""
    worst: dict[str, dict[str, float]] = {}
    for name, row in found.items():
        for backend, answer in row.items():
            if not answer.refused:
                dtype = CASES[name].request.dtype
                errors = worst.setdefault(backend, {})
                errors[dtype] = max(errors.get(dtype, 0.0), answer.error)
    return worst


def _table(found: dict[str, dict[str, Answer]], backends: list[str]) -> Any:
    table = grid("!case", *(f"!{name}" for name in backends))
    for name, row in found.items():
        table.add_row(name, *(row[backend].cell() for backend in backends))
    worst = _worst(found)
    table.add_section()
    for dtype in dict.fromkeys(case.request.dtype for case in CASES.values()):
        bound = RELATIVE_L2[getattr(torch, dtype)]
        cells = (f"{worst[b][dtype]:.1e}" if dtype in worst.get(b, {}) else "-" for b in backends)
        table.add_row(f"worst {dtype} (allowed {bound:g})", *cells, style="figure")
    return table


def _legend(caught: dict[str, bool]) -> Text:
    words = ", ".join(f"{name}: {'caught' if seen else 'MISSED'}" for name, seen in caught.items())
    return Text(
        f"no ...: refused with that reason, never computed without it; -: a call of another family.\n"
        f"Deliberate mistakes: {words}.",
        style="quiet",
    )
