"""The kit's cases through the sessions of a backend: each call is a step, planned, prepared and run for one layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from polyattn.testing import Case, generate
from polyattn.testing.emulators import Emulated
from polyattn.testing.steps import planned

__all__ = ["InSession"]


class InSession(Emulated):
    """As `Emulated`, by `Bound.session` wherever a request has one and its step can be planned."""

    def cases(self, per_row: int = 12, **which: Any) -> list[Case]:
        made = [c for c in super().cases(per_row, **which) if c.check == "values"]
        # Parts are calls of their own, masks that are no trees the layers'; and no page here is that of padding.
        made = [c for c in made if not c.request.kv_parts and (c.request.tree or c.request.mask == "none")]
        return [c for c in made if not c.request.zero_size and not (c.new_rows and any(not k for _, k in c.lengths))]

    def recorded(self) -> list[Case]:
        """The steps that the kit records on a device: here they are run, in the memory of recorded steps."""
        made = generate(self.rows, self.facts, families=("paged", "mla"), dtypes=("bfloat16",), per_row=1)
        steps = [case for case in made if case.request.graph_capture == "session"]
        return [dataclasses.replace(case, check="values") for case in steps]

    def call(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any], out: Tensor | None) -> Any:
        bound = self.bind(**_fields(case))
        new_rows = case.new_rows and not case.request.save_kv_cache
        if bound.session is None or new_rows:
            return super().call(case, tensors, extra, out)
        recorded = case.request.graph_capture == "session"
        return planned(bound.session, case, tensors, extra, recorded=recorded)(out=out)


def _fields(case: Case) -> dict[str, Any]:
    """The case's request without the facts of a machine."""
    names = (field.name for field in dataclasses.fields(case.request))
    return {n: getattr(case.request, n) for n in names if n not in ("platform", "arch", "toolkit", "features")}
