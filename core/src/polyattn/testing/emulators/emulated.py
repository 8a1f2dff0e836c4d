"""An adapter bound for a chip that is not here, run over an emulator of its library; and the same kit on the chip."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from ...contract import FAMILIES as ALL_FAMILIES
from ...contract import Accepted, AttentionRequest, BackendInfo, judge
from ...errors import BackendUnavailableError
from ...registry.manager import _import_target, get_manager
from ...registry.platforms import parse_platform
from ...selection.inspection import detect
from ..calls import OffChip
from ..cases import Case
from ..checks import run_case
from ..conforming import AttentionConformance
from ..families import FAMILIES
from ..generation import generate
from ..running import FLOATS
from ..where import AUTO, Place
from .library import Library, release

__all__ = ["Emulated", "OnDevice", "device_suites"]


class Emulated(OffChip):
    """Runs one provider of a backend on an assumed chip, with an emulator on the CPU in the place of its library.

    Args:
        name: of the backend. provider: of it. chip: as `--assume-platform` writes it. options: of the backend.
    """

    def __init__(self, name: str, provider: str, chip: str, options: tuple[tuple[str, Any], ...] = ()) -> None:
        assumed = parse_platform(chip, get_manager().platforms)
        super().__init__(name, assumed.platform, options)
        self.provider = next(p for p in self.info.providers if p.name == provider)
        self.info = dataclasses.replace(self.info, providers=(self.provider,))
        self.rows = self.provider.rows
        self.facts = {**assumed._asdict()}

    def cases(
        self,
        per_row: int = 12,
        *,
        families: Sequence[str] = ALL_FAMILIES,
        dtypes: Sequence[str] = FLOATS,
    ) -> list[Case]:
        """Return what the kit tries on a device: everything that the rows take as it is, but captures and huge
        tensors."""
        computed = [family for family in families if family in FAMILIES]
        made = generate(self.rows, self.facts, families=computed, dtypes=dtypes, per_row=per_row)
        # An LSE far from 0 is nothing for a kernel that quantises its scores.
        made = [case for case in made if not (case.far and self.accuracy)]
        return [case for case in made if case.check != "capture" and not case.request.large and self._takes(case)]

    def _takes(self, case: Case) -> bool:
        verdict = judge(self.rows, case.request.normalised())
        return isinstance(verdict, Accepted) and not verdict.lowerings

    def passes(self, case: Case, library: Library) -> None:
        """The kit finds nothing wrong in a case, and it was the library that computed it."""
        before = len(library.calls)
        outcome = run_case(self, case)
        assert outcome.verdict == "passed", str(outcome)
        assert len(library.calls) > before or case.request.zero_size, "the library was not called"

    def caught(self, cases: Iterable[Case]) -> list[str]:
        """Return what the kit finds wrong in these cases: with an error planted in adapter or emulator, not nothing."""
        outcomes = (run_case(self, case) for case in cases)
        return [str(outcome) for outcome in outcomes if outcome.verdict != "passed"]

    def request(self, **fields: Any) -> AttentionRequest:
        """A request on this chip, in normal form."""
        return AttentionRequest(**{**self.facts, **fields}).normalised()

    def bind(self, **fields: Any) -> Any:
        """The adapter bound to `request(**fields)`."""
        adapter: Any = _import_target(self.provider.target)()
        return adapter.bind(self.request(**fields))


class OnDevice(AttentionConformance):
    """Conformance on the real device with the real library; not run, and said so, where either is missing. What is
    for another architecture than that of the device is no failure under `--polyattn-strict-device` either.

    Attributes:
        backend: name@platform.
    """

    @classmethod
    def setup_class(cls) -> None:
        """Before its first case, which may load the real library."""
        release()

    @classmethod
    def _place(cls, backend: str | None, device: str | None) -> Place:
        try:
            return super()._place(backend, device)
        except BackendUnavailableError as missing:
            name, _, platform = cls.backend.partition("@")
            info = get_manager().backends[name, platform]
            here = detect(platform).archs
            named = [row.when.get("arch") for provider in info.providers for row in provider.rows]
            if here and all(arch and arch.reason(one) for arch in named for one in here):
                return Place(info, AUTO, f"{info.id} is for other architectures than {', '.join(here)}", other=True)
            return Place(info, AUTO, str(missing))


def device_suites(backends: Iterable[BackendInfo], module: str) -> dict[str, type[OnDevice]]:
    """Return one `OnDevice` for each of these backends that has an adapter: `globals().update(device_suites(...,
    __name__))`. What a vendor's import or compiler warns of is told, and fails no case where a test run makes errors of
    warnings.

    Args:
        backends: the records of a plugin. module: the test module that they become part of.
    """
    import pytest

    shared = {"__module__": module, "pytestmark": [pytest.mark.filterwarnings("default")]}
    suites = {}
    for info in backends:
        if not info.planned:
            title = "Test" + "".join(word.capitalize() for word in info.name.split("_"))
            suites[title] = type(title, (OnDevice,), {"backend": info.id, **shared})
    return suites
