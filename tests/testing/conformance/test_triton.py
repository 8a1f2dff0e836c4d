"""polyattn's own kernels, interpreted on the CPU where there is no accelerator: few cases, each of them slow."""

from __future__ import annotations

import dataclasses

import pytest

from polyattn.testing import AttentionConformance, Case
from polyattn.testing.generation import Level
from polyattn.testing.where import Place

pytest.importorskip("triton", reason="not run: the Triton package is not installed (it has no build for this platform)")


def small(case: Case) -> Case:
    """Two queries for each of two key heads instead of four: interpreted, every head is work of its own, and a group or
    a head that is mistaken for another shows at two as well."""
    request = case.request
    if (request.heads, request.kv_heads) != (8, 2):
        return case
    return dataclasses.replace(case, request=dataclasses.replace(request, heads=4))


@pytest.mark.slow(keep=45, quick="-refusal-")
class TestTriton(AttentionConformance):
    backend = "triton"
    dtypes, per_row = ("float32",), 2

    @classmethod
    def _cases(cls, here: Place, level: Level) -> tuple[Case, ...]:
        return tuple(dict.fromkeys(map(small, super()._cases(here, level))))


def test_groups_of_all_kinds_are_among_them() -> None:
    cases = TestTriton._cases(TestTriton._place(None, None), "quick")
    served = {(c.request.heads, c.request.kv_heads) for c in cases if c.check != "refusal"}
    assert served >= {(2, 2), (4, 2), (8, 1), (4, 1)}
    assert (8, 2) not in served
