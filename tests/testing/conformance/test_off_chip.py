"""Core's vendor-neutral adapters, bound for the platforms that are not here and run on CPU tensors.

What they record as "vendor code" is this: PyTorch's own code, through the paths an adapter takes elsewhere, the repair
of empty rows among them (kernels of other devices disagree on those; torch's CPU kernels are right by themselves).
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from polyattn import contract
from polyattn.contract.families import FAMILY_SPECS
from polyattn.registry.manager import get_manager
from polyattn.testing import FAMILIES, Case, OffChip, generate, run_case

PLATFORMS = ("rocm", "xpu", "musa", "npu", "mps")
DTYPES = ("float32", "bfloat16")
# FlexAttention uncompiled traces its functions anew in every call, and has no backward on the CPU.
PER_ROW = {"torch_sdpa": 24, "torch_native": 24, "reference": 8, "flex_attention": 2}
UNCOMPILED = {"flex_attention": (("compile", "never"),)}


def target(backend: str, platform: str) -> OffChip:
    return OffChip(backend, platform, UNCOMPILED.get(backend, ()))


def cases(backend: str, platform: str) -> list[Case]:
    rows, facts = target(backend, platform).rows, {"platform": platform}
    dtypes = DTYPES if backend != "flex_attention" else DTYPES[:1]
    found = generate(rows, facts, families=("dense", "varlen"), dtypes=dtypes, per_row=PER_ROW[backend])
    if backend != "reference":
        # Its definition reads every platform's tensors alike.
        found += generate(rows, facts, families=("paged", "mla"), dtypes=dtypes, per_row=PER_ROW[backend] // 4)
    possible = [c for c in found if c.check != "capture" and not c.request.large and not c.request.transform]
    return [c for c in possible if backend != "flex_attention" or not c.request.grad]


HERE = {
    (backend, platform): cases(backend, platform)
    for backend in PER_ROW
    for platform in PLATFORMS
    if (backend, platform) in get_manager().backends
}


@pytest.mark.slow(keep=350)
@pytest.mark.parametrize(
    "backend, platform, case",
    [(*where, case) for where, found in HERE.items() for case in found],
    ids=[f"{backend}@{platform}-{case.id}" for (backend, platform), found in HERE.items() for case in found],
)
def test_case(backend: str, platform: str, case: Case) -> None:
    outcome = run_case(target(backend, platform), case)
    assert outcome.verdict == "passed", str(outcome)


def test_every_platform_and_backend_is_covered() -> None:
    assert {platform for _, platform in HERE} == set(PLATFORMS)
    assert all(found for found in HERE.values())
    assert len(HERE) == 4 * len(PLATFORMS) - 1, "FlexAttention does not run on MPS"


@pytest.mark.parametrize("platform", PLATFORMS)
def test_repair_of_empty_rows_is_among_them(platform: str) -> None:
    sdpa = HERE["torch_sdpa", platform]
    assert any(c.closed_rows and c.request.grad for c in sdpa)
    assert any(c.request.causal == "bottom_right" and c.longest[0] > c.longest[1] for c in sdpa)


@pytest.mark.parametrize(
    ("family", "forward"),
    [
        ("dense", contract.DenseForward),
        ("varlen", contract.VarlenForward),
        ("paged", contract.PagedForward),
        ("mla", contract.MLAForward),
    ],
)
def test_an_adapter_is_handed_whatever_a_public_call_hands_it(family: str, forward: Any) -> None:
    """None included: an adapter that takes no `sinks` could be called here, and by nobody else."""
    said = inspect.signature(forward.__call__).parameters.values()
    given = {p.name for p in said if p.default is None} - {"place"}  # methods alone are given a place
    # What joined a family later is handed over where a row declares it.
    given -= {one.name for one in FAMILY_SPECS[family].added}
    assert {*FAMILIES[family].optional, "out"} == given
