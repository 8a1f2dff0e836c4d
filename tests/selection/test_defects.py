"""Known faults of libraries are obeyed by selection, and said by explain."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from polyattn import what_if
from polyattn.contract import (
    FAMILIES,
    AttentionRequest,
    BackendInfo,
    Defect,
    NotEmpty,
    Provider,
    Range,
    Requirement,
    WiderThan,
    conditions,
    judge,
    row,
)
from polyattn.contract.capability import holds
from polyattn.errors import UnsupportedRequestError
from polyattn.lowering import Plan, Planner
from polyattn.registry.defects import affecting, mended, narrowing, refusal
from polyattn.registry.manager import get_manager

pytest.importorskip("polyattn_cuda")

DEFECTS = [
    pytest.param(info, provider, defect, id=f"{info.id}-{provider.name}-{index}")
    for info in get_manager().backends.values()
    for provider in info.providers
    for index, defect in enumerate(provider.defects)
]


def asked(**fields: Any) -> AttentionRequest:
    usual: dict[str, Any] = {"dtype": "bfloat16", "heads": 4, "kv_heads": 4, "head_dim": 128, "family": "dense"}
    return AttentionRequest(**{**usual, **fields})


def chosen(request: AttentionRequest, *installed: str, platform: str = "cuda:sm90@12.8", **how: Any) -> str:
    return what_if(request, platform=platform, installed=installed, **how).provider


CAUSAL: dict[str, Any] = {"causal": "bottom_right"}
WRONG: list[dict[str, Any]] = [
    {**CAUSAL, "window": (300, -1)},
    {**CAUSAL, "window": (128, -1)},
    {**CAUSAL, "window": (96, -1), "head_dim": 192},
    {**CAUSAL, "window": (64, -1), "head_dim": 256},
    {"window": (300, 0)},
    {"window": (300, 40)},
    {"window": (40, 300)},
    {"window": (100, 28)},
    {**CAUSAL, "window": (300, -1), "s_relation": "fewer"},
    {**CAUSAL, "window": (300, -1), "head_dim": 72},
    {**CAUSAL, "window": (300, -1), "softcap": 20.0},
]
RIGHT: list[dict[str, Any]] = [
    CAUSAL,
    {},
    {**CAUSAL, "window": (127, -1)},
    {**CAUSAL, "window": (95, -1), "head_dim": 192},
    {**CAUSAL, "window": (63, -1), "head_dim": 256},
    {**CAUSAL, "window": (4095, -1), "head_dim": 64},
    {"window": (300, -1)},
    {"window": (-1, 300)},
    {"window": (100, 27)},
    {"window": (300, -1), "s_relation": "one"},
]


@pytest.mark.parametrize("family", ["dense", "varlen", "paged"])
@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_windows_that_vllms_flash_attention_3_gets_wrong_are_refused(fields: dict[str, Any], family: str) -> None:
    request = served(fields, family)
    with pytest.raises(UnsupportedRequestError) as refused:
        what_if(request, platform="cuda:sm90@12.8", installed=("vllm==0.33.0",), backend="fa3", strict=True)
    assert "known defect of vllm: under a window on both sides" in str(refused.value)
    assert "8f468e7d" in str(refused.value), "the source is named"
    assert "vllm" not in chosen(request, "vllm==0.33.0")


@pytest.mark.parametrize("family", ["dense", "varlen", "paged"])
@pytest.mark.parametrize("fields", RIGHT, ids=str)
def test_windows_that_it_gets_right_are_served(fields: dict[str, Any], family: str) -> None:
    request = served(fields, family)
    assert chosen(request, "vllm==0.33.0", backend="fa3", strict=True) in ("fa3/vllm", "vllm")


def served(fields: dict[str, Any], family: str) -> AttentionRequest:
    paged: dict[str, Any] = {"page_size": 16, "phase": "decode" if fields.get("s_relation") == "one" else "extend"}
    return asked(**fields, family=family, **(paged if family == "paged" else {}))


def test_every_window_over_fp8_caches_that_is_wider_than_a_tile_is_refused() -> None:
    fields = {"family": "paged", "page_size": 16, "phase": "extend", "kv_dtype": "fp8_e4m3", **CAUSAL}
    for head_dim in (64, 128, 256):
        request = asked(**fields, head_dim=head_dim, window=(64, -1))
        with pytest.raises(UnsupportedRequestError, match="known defect of vllm"):
            chosen(request, "vllm", backend="fa3_fp8", strict=True)
        narrow = dataclasses.replace(request, window=(63, -1))
        assert chosen(narrow, "vllm", backend="fa3_fp8", strict=True) == "vllm"


@pytest.mark.parametrize("library", ["flash-attn-3", "sgl-kernel"])
def test_wide_windows_on_other_builds_are_had_by_name_only(library: str) -> None:
    request = asked(**CAUSAL, window=(300, -1))
    assert library not in chosen(request, library)
    assert chosen(request, library, backend="fa3") == f"fa3/{library}"
    assert chosen(asked(**CAUSAL, window=(100, -1)), library) == f"fa3/{library}"
    said = what_if(request, platform="cuda:sm90@12.8", installed=(library,)).rejected["fa"]
    assert any("not chosen by itself for this, and can be asked for by name" in reason for reason in said)


@pytest.mark.parametrize("more", [{"misaligned": True}, {"head_dim": 100}, {"sinks": True}], ids=str)
def test_who_asks_by_name_is_served_by_a_rewrite_too(more: dict[str, Any]) -> None:
    request = asked(**{**CAUSAL, "window": (300, -1), **more})
    selection = what_if(request, platform="cuda:sm90@12.8", installed=("flash-attn-3",), backend="fa3", strict=True)
    assert (selection.provider, bool(selection.lowerings)) == ("fa3/flash-attn-3", True)
    assert "flash-attn-3" not in chosen(request, "flash-attn-3")


def test_a_window_that_flash_attention_does_not_serve_goes_to_a_kernel_that_skips_what_it_hides() -> None:
    selection = what_if(asked(**CAUSAL, window=(300, -1)), platform="cuda:sm90@12.8", installed=("vllm",))
    assert (selection.backend, selection.source) == ("triton", "platform rule")


@pytest.mark.parametrize(
    ("platform", "family", "served"), [("cuda:sm90", "dense", True), ("cuda:sm80", "dense", False)]
)
def test_flashinfers_fa2_template_takes_no_windows_without_a_causal_mask(
    platform: str, family: str, served: bool
) -> None:
    request = asked(family=family, window=(300, -1))
    how: dict[str, Any] = {"platform": f"{platform}@12.8", "installed": ("flashinfer-python",), "backend": "flashinfer"}
    assert what_if(dataclasses.replace(request, **CAUSAL), **how).provider == "ragged"
    if served:
        assert what_if(request, **how).provider == "ragged"
    else:
        with pytest.raises(UnsupportedRequestError, match=r"known defect of flashinfer-python: .*#4972"):
            what_if(request, **how)


def test_gradients_of_flash_attention_3_are_not_declared_deterministic() -> None:
    request = asked(grad=("query", "key", "value"), deterministic=True)
    with pytest.raises(UnsupportedRequestError, match="deterministic"):
        chosen(request, "flash-attn-3", backend="fa3", strict=True)
    assert chosen(dataclasses.replace(request, deterministic=False), "flash-attn-3", backend="fa3")
    assert chosen(dataclasses.replace(request, grad=()), "flash-attn-3", backend="fa3")


@pytest.mark.parametrize(("info", "provider", "defect"), DEFECTS)
def test_every_defect_is_one_of_requests_that_there_are(info: Any, provider: Provider, defect: Defect) -> None:
    assert defect.what
    assert defect.source
    assert (defect.how != "") is (defect.done == "mended"), "what is mended says how, and nothing else does"
    assert defect.done in ("refused", "by name", "mended", "undeclared")
    if defect.witness is None:
        assert defect.done not in ("by name",)
        return
    arch = defect.when["arch"].values[0] if "arch" in defect.when else "sm90"  # type: ignore[attr-defined]
    request = dataclasses.replace(defect.witness, platform=info.platform, arch=arch).normalised()
    assert holds(defect.when, request), "its own witness"
    assert refusal([defect], request) is not None
    assert (refusal([defect], request, named=True) is None) is (defect.done == "by name")


@pytest.mark.parametrize("info", get_manager().backends.values(), ids=str)
def test_the_witness_of_a_refusal_is_accepted_by_some_row(info: BackendInfo) -> None:
    """What no row takes needs no defect to be refused."""
    for defect in {defect for provider in info.providers for defect in provider.defects if defect.witness}:
        rows = [r for provider in info.providers if defect in provider.defects for r in provider.rows]
        arch = defect.when["arch"].values[0]  # type: ignore[attr-defined]
        families = [f for f in FAMILIES if any(r.when["family"].reason(f) is None for r in rows)]
        paged = {"page_size": 16, "phase": "extend"}
        found = [
            dataclasses.replace(defect.witness, family=f, arch=arch, **(paged if f == "paged" else {}))
            for f in families
        ]
        assert any(judge(rows, request.normalised()) for request in found), defect


# How they are judged ------------------------------------------------------------------------------------------------

FAULT = Defect("acme", "it is wrong", "acme#1", "refused", conditions(softcap=Range(1.0)), versions=">=2,<3")
PROVIDER = Provider(
    "acme",
    (row(family="dense", dtype="bfloat16", head_dim=Range(8, 256, multiple_of=8), softcap=True, causal=True),),
    "acme:Adapter",
    (Requirement("acme", also=("acme-cu13",)),),
    defects=(FAULT,),
)


@pytest.mark.parametrize(
    ("installed", "has"),
    [
        ({"acme": "2.1"}, True),
        ({"acme": "3.0"}, False),
        ({"acme": "1.9"}, False),
        ({"acme-cu13": "2.0"}, True),
        ({"acme-cu13": "3.1"}, False),
        ({"acme": ""}, True),
        ({"acme": "main-abc"}, True),
        ({}, True),
    ],
)
def test_a_defect_is_of_versions(installed: dict[str, str], has: bool) -> None:
    assert affecting(PROVIDER, installed) == ((FAULT,) if has else ())


def test_no_rewrite_leads_to_a_defect() -> None:
    """An odd width is padded to the next that is right."""
    fault = dataclasses.replace(FAULT, when=conditions(head_dim=64))
    rows = (row(family="dense", dtype="bfloat16", head_dim=(64, 128)),)
    for faults, width in (((), 64), ((fault,), 128)):
        narrow = narrowing(lambda info, request: None, None, faults)  # type: ignore[arg-type]
        plan = Planner(rows, narrow=narrow).plan(asked(head_dim=60))
        assert plan is not None
        assert {kernel.request.head_dim for kernel in kernels(plan)} == {width}


def kernels(plan: Plan) -> Iterator[Plan]:
    if plan.rewrite is None:
        yield plan
    for inner in plan.inner:
        yield from kernels(inner)


def test_what_is_mended_is_noted() -> None:
    fault = dataclasses.replace(FAULT, done="mended", how="it goes another way", when=conditions(grad=NotEmpty()))
    assert mended([fault], asked()) == []
    (note,) = mended([fault], asked(grad=("query",)))
    assert note == "known defect of acme>=2,<3: it is wrong (acme#1); mended here: it goes another way"
    assert refusal([fault], asked(grad=("query",))) is None


def test_explain_notes_what_is_mended() -> None:
    request = asked(grad=("query", "key", "value"))
    selection = what_if(request, platform="cuda:sm90", installed=("nvidia-cudnn-frontend",), backend="cudnn")
    assert any("#196678" in note and "mended here" in note for note in selection.notes)


@pytest.mark.parametrize(
    ("constraint", "window", "within"),
    [
        (WiderThan(100), (101, -1), True),
        (WiderThan(100), (100, -1), False),
        (WiderThan(100), (-1, 300), False),
        (WiderThan(100), (60, 41), True),
        (WiderThan(100, right=True), (300, -1), False),
        (WiderThan(100, right=True), (60, 41), True),
        (WiderThan(100, right=True), (60, 40), False),
    ],
)
def test_wider_than(constraint: WiderThan, window: tuple[int, int], within: bool) -> None:
    assert (constraint.reason(window) is None) is within
