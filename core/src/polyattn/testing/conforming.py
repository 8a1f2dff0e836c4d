"""`AttentionConformance`: the conformance of a backend as tests of a plugin's own suite, one pytest test per case."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from ..errors import ConfigError
from .where import AUTO, Place, place
from .xfails import Expected, expected_of, no_unmatched, read_xfails

if TYPE_CHECKING:
    import pytest

    from .calls import Installed
    from .cases import Case
    from .generation import Level

__all__ = ["AttentionConformance"]

STRICT, FULL, BACKEND, DEVICE = (f"--polyattn-{word}" for word in ("strict-device", "full", "backend", "device"))
"""Options of `polyattn.testing.plugin`; without it they are off."""


class AttentionConformance:
    """Inherit from it in a test file; a class whose name starts with `Test` is collected by pytest.

        class TestAcme(AttentionConformance):
            backend = "acme"

    Every case is a test of its own: what is declared must pass, what is not must be refused with a reason, and the
    gates must reject the negative controls. Cases that the plugin's xfails.txt lists are expected to fail, strictly.
    Where the backend's device is missing, one test in the place of all says so: skipped, or failed under
    `--polyattn-strict-device` (option of `-p polyattn.testing.plugin`).

    Attributes:
        backend: its name, or name@platform. device: of torch; `auto` = its accelerator if that is here, else the CPU.
        level: `quick` or `full`; None = quick, or full under `--polyattn-full`.
        dtypes, families: those to look at, None = all. per_row: as `polyattn.testing.run`.
    """

    backend: ClassVar[str] = ""
    device: ClassVar[str] = AUTO
    level: ClassVar[Level | None] = None
    dtypes: ClassVar[Sequence[str] | None] = None
    families: ClassVar[Sequence[str] | None] = None
    per_row: ClassVar[int | None] = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make one test for each case when pytest collects."""
        if not {"case", "dtype"} & set(metafunc.fixturenames):
            return
        option = metafunc.config.getoption
        here = self._place(option(BACKEND, None), option(DEVICE, None))
        level: Level = self.level or ("full" if option(FULL, False) else "quick")
        name = "case" if "case" in metafunc.fixturenames else "dtype"
        if here.missing:
            why = _NotRun(f"not run: {here.missing}", option(STRICT, False) and not here.other)
            metafunc.parametrize(name, [why], ids=["not-run"])
        elif name == "case":
            lines = read_xfails(here.info)
            metafunc.parametrize(name, [_marked(case, lines) for case in self._cases(here, level)])
        else:
            served = (case for case in self._cases(here, level) if case.check not in ("refusal", "witness", "fault"))
            metafunc.parametrize(name, list(dict.fromkeys(case.request.dtype for case in served)))

    def test_case(self, case: Case | _NotRun) -> None:
        """The kit finds nothing wrong in this case."""
        from .checks import run_case

        if isinstance(case, _NotRun):
            case.say()
        outcome = run_case(_target(*self._where), case)
        assert not outcome.findings, str(outcome)

    def test_gates(self, dtype: str | _NotRun) -> None:
        """Check that the gates tell right from wrong on this device too."""
        from .families import DTYPES
        from .negative import controls

        if isinstance(dtype, _NotRun):
            dtype.say()
        target = _target(*self._where)
        found = controls(DTYPES[dtype], target.device, target.accuracy)
        wrong = [control.name for control in found if not control.held]
        assert not wrong

    _where: ClassVar[tuple[str, str]]

    @classmethod
    def _place(cls, backend: str | None, device: str | None) -> Place:
        name = cls.backend or backend
        if not name:
            raise ConfigError(
                f"{cls.__name__} names no backend: set its `backend`, or give {BACKEND} NAME (with "
                f"-p polyattn.testing.plugin)"
            )
        here = place(name, cls.device if cls.device != AUTO else device or AUTO)
        cls._where = here.info.name, here.device
        return here

    @classmethod
    def _cases(cls, here: Place, level: Level) -> tuple[Case, ...]:
        words = (None if some is None else tuple(some) for some in (cls.dtypes, cls.families))
        return _planned(here.info.name, here.device, level, *words, cls.per_row)


@dataclasses.dataclass(frozen=True)
class _NotRun:
    """Stands in for the cases of a backend whose device is not here."""

    reason: str
    strict: bool

    def say(self) -> NoReturn:
        import pytest

        if self.strict:
            pytest.fail(self.reason)
        pytest.skip(self.reason)


def _marked(case: Case, lines: Sequence[Expected]) -> Any:
    import pytest

    line = expected_of(case.id, lines)
    marks = [] if line is None else [pytest.mark.xfail(reason=f"{line.reason} ({line.where})", strict=True)]
    return pytest.param(case, id=case.id, marks=marks)


@functools.cache
def _target(name: str, device: str) -> Installed:
    from .calls import Installed

    return Installed(name, device)


@functools.cache
def _planned(
    name: str,
    device: str,
    level: Level,
    dtypes: tuple[str, ...] | None,
    families: tuple[str, ...] | None,
    per_row: int | None,
) -> tuple[Case, ...]:
    from .running import plan

    target = _target(name, device)
    cases = plan(target, dtypes=dtypes, level=level, families=families, per_row=per_row)
    if level == "full" and not (dtypes or families or per_row):
        no_unmatched(read_xfails(target.info), (case.id for case in cases), target.info)
    return tuple(cases)
