"""This module judges one call of one backend: does it agree with the reference, refuse with a reason, or fail?"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ...errors import BackendUnavailableError, PolyattnError, UnsupportedRequestError
from ...semantics.validation import contents_readable
from ..calls import out_of
from ..cases import Case
from ..checks import run_case
from ..families import FAMILIES, Call
from ..problems import build
from .deriving import CHANGED, changed_before_backward, derivable, derived
from .drawing import Drawn
from .saying import said_as
from .wrong import CONTENTS, spoil

__all__ = ["Calls", "Failure", "Verdict", "arguments", "judge"]

_TORCHS_OWN = ("modified by an inplace operation", "derivative for aten::")
"""What torch's autograd says of an input that was written to, and of a second derivative that its own kernel lacks."""

_DERIVATIVES_AGREE = 1e-6
"""In float64, of derivatives as a whole."""

REFUSALS = (UnsupportedRequestError, BackendUnavailableError)

Word = Literal["agreed", "refused", "rejected", "passed over", "failed"]


@dataclasses.dataclass(frozen=True)
class Failure:
    """Describes what is wrong with a call.

    Attributes:
        check: which check of the kit said so (`out`, `lse`, `grad key`, ...), `call` for an exception that should not
            be, `refusal` for one without a reason, `served` for an answer to a call that is wrong.
        message: the sentence. excess: times the error that is allowed; infinite where that is no number.
    """

    check: str
    message: str
    excess: float = float("inf")

    def __str__(self) -> str:
        return f"{self.check}: {self.message}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`agreed` with the reference; `refused` with a reason; `rejected`, as a wrong call must be; `passed over`, a call
    that cannot be spoilt in the way that was drawn; or `failed`."""

    word: Word
    failure: Failure | None = None


class Calls:
    """A backend (None: automatic selection) as everybody calls it. A target of the kit that keeps what was raised.

    Attributes:
        raised: what the last call raised.
    """

    def __init__(self, backend: str | None, device: torch.device | str) -> None:
        self.backend, self.name, self.device = backend, backend or "automatic", torch.device(device)
        self.raised: Exception | None = None

    def call(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any], out: Tensor | None) -> Any:
        self.raised = None
        call, positional, keywords = FAMILIES[case.request.family].public(Call(case, tensors, extra))
        try:
            return call(*positional, backend=self.backend, out=out, **keywords)
        except Exception as exc:
            self.raised = exc
            raise


def judge(drawn: Drawn, backend: str | None, device: torch.device) -> Verdict:
    """Make a call and compare what comes of it. The same call is judged alike whatever was judged before."""
    with _alone(drawn):
        if drawn.way:
            return _derived(drawn, backend, device)
        if drawn.wrong:
            return _spoilt(drawn, backend, device)
        otherwise = _said_otherwise(drawn, backend, device) if drawn.saying else None
        return otherwise or _compared(drawn.case, backend, device)


@contextlib.contextmanager
def _alone(drawn: Drawn) -> Iterator[None]:
    """Dropout draws from a seed of the call's own, and the warnings that selection is documented to give are none."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="polyattn: ", category=RuntimeWarning)
        if drawn.case.request.dropout:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.manual_seed(zlib.crc32(drawn.id.encode()))
        yield


def _compared(case: Case, backend: str | None, device: torch.device) -> Verdict:
    target = Calls(backend, device)
    outcome = run_case(target, case)
    if isinstance(target.raised, REFUSALS):
        return Verdict("refused") if _has_reasons(target.raised) else _failed("refusal", "refused without a reason")
    if outcome.verdict == "passed":
        return Verdict("agreed")
    worst = outcome.findings[0]
    return _failed(worst.check, worst.message, worst.excess)


def _derived(drawn: Drawn, backend: str | None, device: torch.device) -> Verdict:
    if not derivable(drawn.case):
        return Verdict("passed over")

    def result(name: str | None) -> Tensor:
        call, given = arguments(drawn.case, device)
        given = {key: one.detach() if isinstance(one, Tensor) else one for key, one in given.items()}
        one = functools.partial(call, backend=name)
        if drawn.way != CHANGED:
            return derived(drawn.way, one, given)
        return derived("grad", one, given) if name == "reference" else changed_before_backward(one, given)

    try:
        got = result(backend)
    except REFUSALS as exc:
        return Verdict("refused") if _has_reasons(exc) else _failed("refusal", "refused without a reason")
    except Exception as exc:  # noqa: BLE001 - as below
        if isinstance(exc, RuntimeError) and any(words in str(exc) for words in _TORCHS_OWN):
            return Verdict("refused")
        return _failed("call", f"raised {type(exc).__name__}: {exc}; a refusal or the derivative is needed")
    want = result("reference") if backend != "reference" or drawn.way == CHANGED else got
    error = float((got.double() - want.double()).norm() / (1 + want.double().norm()))
    if error <= _DERIVATIVES_AGREE:
        return Verdict("agreed")
    excess = error / _DERIVATIVES_AGREE
    return _failed(f"derivative {drawn.way}", f"is {error:.3g} away from the reference's", excess)


def _said_otherwise(drawn: Drawn, backend: str | None, device: torch.device) -> Verdict | None:
    """Return what is wrong with the call where its scalars have other types; None: nothing is, or the plain call fails
    too."""

    def result(saying: str) -> tuple[Tensor, ...]:
        # Made anew: a call over a cache may write to it.
        call, given = arguments(drawn.case, device)
        raw = call(**(said_as(saying, given) if saying else given), backend=backend)
        return tuple(part.detach() for part in (raw if isinstance(raw, tuple) else (raw,)))

    if drawn.saying == "numpy" and importlib.util.find_spec("numpy") is None:
        return None
    try:
        plain = result("")
    except Exception:  # noqa: BLE001 - the plain call is judged by itself
        return None
    try:
        said = result(drawn.saying)
    except Exception as exc:  # noqa: BLE001 - whatever a type that is not expected raises in somebody's code
        return _failed("call", f"raised {type(exc).__name__}: {exc}; with Python's numbers and flags it is answered")
    same = len(said) == len(plain) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
        for a, b in zip(said, plain, strict=True)
    )
    return None if same else _failed(f"said with {drawn.saying}", "another answer than with Python's numbers and flags")


def _has_reasons(refusal: Exception) -> bool:
    rejected: Mapping[str, list[str]] = getattr(refusal, "rejected", {})
    return bool(str(refusal).strip()) and all(any(reasons) for reasons in rejected.values())


def _spoilt(drawn: Drawn, backend: str | None, device: torch.device) -> Verdict:
    call, given = arguments(drawn.case, device)
    given.pop("out", None)
    unread = drawn.wrong in CONTENTS and not contents_readable(given["query"])
    spoilt = None if unread else spoil(drawn.case.request.family, drawn.wrong, given)
    if spoilt is None:
        return Verdict("passed over")
    try:
        call(**{"backend": backend, **spoilt})
    except PolyattnError as exc:
        return Verdict("rejected") if str(exc).strip() else _failed("refusal", "refused without a reason")
    except Exception as exc:  # noqa: BLE001 - whatever a bad argument raises in somebody's code is what is looked for
        return _failed("call", f"raised {type(exc).__name__}: {exc}; a PolyattnError that says what is wrong is needed")
    return _failed("served", f"a call that is wrong ({drawn.wrong}) was answered")


def _failed(check: str, message: str, excess: float = float("inf")) -> Verdict:
    return Verdict("failed", Failure(check, message, excess))


def arguments(case: Case, device: torch.device) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(the public call, its arguments by name but for `backend`)."""
    problem = build(case, device)
    family = FAMILIES[case.request.family]
    call, positional, keywords = family.public(Call(case, problem.tensors, problem.extra))
    given = {**dict(zip(family.positional, positional, strict=True)), **keywords}
    out = out_of(case, tuple(problem.dout.shape), problem.dtype, device)
    return call, given if out is None else {**given, "out": out}
