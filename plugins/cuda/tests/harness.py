"""What the tests of adapters share: an adapter bound for a chip that is not here, run over an emulator of its library.

TARGET = Emulated("fa2", "flash-attn", arch="sm80")

@pytest.fixture
def library(monkeypatch): return emulators.fa2.library().install(monkeypatch)

@pytest.mark.parametrize("case", TARGET.cases(per_row=12), ids=str)
def test_conformance(case, library):
    TARGET.passes(case, library)

class TestFA2(OnDevice):
    backend = "fa2"
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from polyattn.errors import BackendUnavailableError
from polyattn.platforms import parse_platform
from polyattn.plugins import _import_target, get_manager
from polyattn.records import FAMILIES as ALL_FAMILIES
from polyattn.records import Accepted, AttentionRequest, judge
from polyattn.testing import FAMILIES, AttentionConformance, Case, OffChip, generate, run_case
from polyattn.testing.running import FLOATS
from polyattn.testing.where import AUTO, Place

from .emulators import Library

__all__ = ["Emulated", "OnDevice"]


class Emulated(OffChip):
    """One provider of a CUDA backend on an assumed chip, its library replaced by an emulator on the CPU.

    Args:
        name: of the backend. provider: of it. chip: as `--assume-platform` writes it. options: of the backend.
    """

    def __init__(
        self, name: str, provider: str, chip: str = "cuda:sm90@12.8", options: tuple[tuple[str, Any], ...] = ()
    ) -> None:
        super().__init__(name, "cuda", options)
        self.provider = next(p for p in self.info.providers if p.name == provider)
        self.info = dataclasses.replace(self.info, providers=(self.provider,))
        self.rows = self.provider.rows
        self.facts = {**parse_platform(chip)._asdict()}

    def cases(
        self,
        per_row: int = 12,
        *,
        families: Sequence[str] = ALL_FAMILIES,
        dtypes: Sequence[str] = FLOATS,
    ) -> list[Case]:
        """What the kit tries on a device: everything that the rows take as it is, but captures and huge tensors."""
        computed = [family for family in families if family in FAMILIES]
        made = generate(self.rows, self.facts, families=computed, dtypes=dtypes, per_row=per_row)
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

    def request(self, **fields: Any) -> AttentionRequest:
        """A request on this chip, in normal form."""
        return AttentionRequest(**{**self.facts, **fields}).normalised()

    def bind(self, **fields: Any) -> Any:
        """The adapter bound to `request(**fields)`."""
        adapter: Any = _import_target(self.provider.target)()
        return adapter.bind(self.request(**fields))


class OnDevice(AttentionConformance):
    """Conformance on the real device with the real library; not run, and said so, where either is missing."""

    @classmethod
    def _place(cls, backend: str | None, device: str | None) -> Place:
        try:
            return super()._place(backend, device)
        except BackendUnavailableError as missing:
            return Place(get_manager().backends[cls.backend.partition("@")[0], "cuda"], AUTO, str(missing))
