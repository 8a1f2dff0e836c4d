"""`polyattn matrix`: three formats of one answer, and limits that agree with the rows they are derived from."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from polyattn import what_if
from polyattn.cli.matrix import Cell, Support, gather, markdown
from polyattn.cli.probes import LATENT, LLM, VERIFY, Limits, Sheet, limits
from polyattn.contract import AttentionRequest
from polyattn.errors import UnsupportedRequestError
from polyattn.registry.manager import get_manager
from polyattn.selection.inspection import support_matrix
from polyattn.selection.phase_pairs import both_phases

from .conftest import Run

PAGE = Path(__file__).parents[2] / "docs" / "support-matrix.md"


@pytest.fixture(scope="module")
def support() -> Support:
    return gather()


def cell(support: Support, sheet: str, name: str, platform: str, column: str) -> str:
    (found,) = [s for s in support.sheets if s.key == sheet]
    (line,) = [row for row in found.rows if row.name == name and platform in row.platforms]
    return line.cells[found.columns.index(column)]


# The tables of the serving pages that polyattn must equal or exceed: "yes" there is never "no" here.
# name, platform, FP8 KV, FP4 KV, topk = 1, topk > 1, window, multimodal
MHA = [
    ("flashinfer", "cuda", "yes yes yes yes yes no"),
    ("fa3", "cuda", "yes no yes yes yes yes"),
    ("fa4", "cuda", "no yes yes yes yes yes"),
    ("triton", "cuda", "yes yes yes yes yes yes"),
    ("torch_native", "cuda", "yes yes no no no yes"),
    ("flex_attention", "cuda", "no yes no no no no"),
    ("trtllm_mha", "cuda", "yes yes yes no yes no"),
    ("hpc_ops", "cuda", "yes no no no no no"),
    ("aiter", "rocm", "yes no yes yes yes yes"),
    ("wave", "rocm", "no no no no no no"),
    ("ascend", "npu", "no no yes no yes yes"),
    ("intel_xpu", "xpu", "no no no no yes no"),
]
MHA_COLUMNS = ("FP8 KV", "FP4 KV", "topk = 1", "topk > 1", "window", "multimodal")
# name, platform, FP8 KV, FP4 KV (none: there, of a format that no cache has here), chunked prefix, topk = 1, topk > 1
MLA = [
    ("flashinfer_mla", "cuda", "no none yes yes no"),
    ("flashmla", "cuda", "yes none yes yes no"),
    ("cutlass_mla", "cuda", "yes none yes yes no"),
    ("trtllm_mla", "cuda", "yes none yes yes no"),
    ("cutedsl_mla", "cuda", "yes no yes yes no"),
    ("fa3", "cuda", "no no yes yes yes"),
    ("triton", "cuda", "no no no yes yes"),
    ("fa4", "cuda", "no none yes no no"),
]
MLA_COLUMNS = ("FP8 KV", "FP4 KV", "chunked prefix", "topk = 1", "topk > 1")
FINER = "; multiples lowered: finer_pages"
PAGES = [
    ("serving_mha", "flashinfer", "cuda", "any"),
    ("serving_mha", "fa3", "cuda", "any"),
    ("serving_mha", "fa4", "cuda", "128 (sm90); any (sm100, sm103)" + FINER),
    ("serving_mha", "triton", "cuda", "any"),
    ("serving_mha", "flex_attention", "cuda", "any"),
    ("serving_mha", "trtllm_mha", "cuda", "16, 32, 64" + FINER),
    ("serving_mha", "hpc_ops", "cuda", "64" + FINER),
    ("serving_mla", "flashmla", "cuda", "64" + FINER),
    ("serving_mla", "cutlass_mla", "cuda", "128" + FINER),
    ("serving_mla", "trtllm_mla", "cuda", "32, 64" + FINER),
    ("serving_mla", "cutedsl_mla", "cuda", "32, 64" + FINER),
    ("serving_mla", "ascend", "npu", "128" + FINER),
    ("serving_mla", "fa3", "cuda", "any"),
]


@pytest.mark.parametrize(("name", "platform", "upstream"), MHA, ids=[m[0] for m in MHA])
def test_serving_mha_equals_or_exceeds(support: Support, name: str, platform: str, upstream: str) -> None:
    for column, theirs in zip(MHA_COLUMNS, upstream.split(), strict=True):
        ours = cell(support, "serving_mha", name, platform, column)
        assert theirs == "no" or ours != "no", f"{name}: {column}"


@pytest.mark.parametrize(("name", "platform", "upstream"), MLA, ids=[m[0] for m in MLA])
def test_serving_mla_equals_or_exceeds(support: Support, name: str, platform: str, upstream: str) -> None:
    for column, theirs in zip(MLA_COLUMNS, upstream.split(), strict=True):
        ours = cell(support, "serving_mla", name, platform, column)
        assert theirs in ("no", "none") or ours != "no", f"{name}: {column}"


@pytest.mark.parametrize(("sheet", "name", "platform", "pages"), PAGES, ids=[f"{p[0]} {p[1]}" for p in PAGES])
def test_page_sizes(support: Support, sheet: str, name: str, platform: str, pages: str) -> None:
    assert cell(support, sheet, name, platform, "page size") == pages


def test_cells_that_are_limited_say_to_what(support: Support) -> None:
    assert cell(support, "serving_mla", "triton", "cuda", "topk > 1") == "native"
    assert cell(support, "serving_mla", "fa3", "cuda", "topk > 1") == "lowered: tree_by_lse"
    # Of two libraries one is not built: the cell is of the other.
    assert cell(support, "serving_mla", "cutedsl_mla", "cuda", "FP8 KV") == "lowered: dequantise_kv"
    assert cell(support, "serving_mha", "fa3", "cuda", "FP8 KV") == "lowered: dequantise_kv"
    found = cell(support, "serving_mha", "aiter", "rocm", "FP8 KV")
    assert found.startswith("native (gfx950")
    assert found.endswith("lowered: dequantise_kv")
    assert cell(support, "linear", "cutedsl", "cuda", "prefill") == "no"
    assert cell(support, "linear", "triton", "cpu", "verify, chain") == "native"
    assert cell(support, "linear", "triton", "npu", "verify, chain") == "lowered: draft_by_draft"
    # Its kernels of drafts compute gates themselves, and know one of the two rules.
    assert cell(support, "linear", "flashinfer", "cuda", "verify, chain") == "native (GDN)"


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("causal", {"causal": "bottom_right"}),
    ("window", {"causal": "bottom_right", "window": (127, -1)}),
    ("softcap", {"softcap": 50.0}),
    ("sinks", {"sinks": True}),
    ("mask", {"mask": "bool"}),
    ("LSE", {"lse": True}),
    ("dropout", {"dropout": 0.1}),
    ("gradients", {"grad": ("query", "key", "value")}),
]


@pytest.mark.parametrize(("column", "fields"), CALLS, ids=[c[0] for c in CALLS])
@pytest.mark.parametrize("backend", ["torch_sdpa", "flex_attention", "reference"])
def test_a_cell_is_what_selection_says(support: Support, backend: str, column: str, fields: dict[str, Any]) -> None:
    for platform in ("cpu", "cuda", "rocm"):
        request = AttentionRequest(heads=8, kv_heads=8, **fields)
        try:
            what_if(request, platform=platform, backend=backend)
            verdict = "native"
        except NotImplementedError:
            verdict = "no"
        found = cell(support, "dense", backend, platform, column)
        if platform == "cuda" and backend == "torch_sdpa":
            continue  # rows of other architectures may say more
        assert found == verdict, f"{platform}: {column}"


SERVED: list[tuple[str, str, str, str, dict[str, Any], tuple[str, ...]]] = [
    ("serving_mha", "fa3", "flash-attn-3", "sm90", {"page_size": 64}, ("tree_by_lse",)),
    ("serving_mha", "fa4", "flash-attn-4", "sm100", {"page_size": 1}, ("tree_by_lse",)),
    ("serving_mha", "trtllm_mha", "flashinfer-python", "sm100", {"page_size": 128}, ("finer_pages",)),
    ("serving_mha", "hpc_ops", "hpc-ops", "sm90", {"page_size": 128}, ("finer_pages",)),
    ("serving_mla", "fa3", "flash-attn-3", "sm90", {"page_size": 1}, ("tree_by_lse",)),
]
CHAINS_ONLY = [
    ("serving_mha", "fa2", "flash-attn", "sm90", 256),
    ("serving_mha", "fa4", "flash-attn-4", "sm90", 128),
    ("serving_mha", "flashinfer_cudnn", "flashinfer-python,nvidia-cudnn-frontend", "sm90", 16),
    ("serving_mha", "trtllm_mha", "flashinfer-python", "sm100", 16),
    ("serving_mla", "flashinfer_mla", "flashinfer-python", "sm90", 1),
    ("serving_mla", "flashmla", "sgl-flash-mla", "sm90", 64),
]
"""They would verify a tree by `tree_by_lse`, and extend and decode for no server that drafts trees."""


@pytest.mark.parametrize(
    ("sheet", "name", "library", "arch", "fields", "plan"), SERVED, ids=[f"{s[1]} {s[5][0]}" for s in SERVED]
)
def test_a_cell_has_the_rewrites_that_selection_finds(
    support: Support,
    sheet: str,
    name: str,
    library: str,
    arch: str,
    fields: dict[str, Any],
    plan: tuple[str, ...],
) -> None:
    tree = plan == ("tree_by_lse",)
    verify = {**VERIFY, "spec_topk": 4, "tree": True, "mask": "bool"}
    step = verify if tree else {"phase": "decode", "s_relation": "one"}
    shape: dict[str, Any] = {"family": "paged", **LLM} if sheet == "serving_mha" else {"family": "mla", **LATENT}
    request = AttentionRequest(**{**shape, **step, **fields, "layout": "THD"})
    chosen = what_if(request, platform=f"cuda:{arch}", installed=library.split(","), backend=name)
    assert (chosen.backend, chosen.lowerings) == (name, plan)
    assert plan[0] in cell(support, sheet, name, "cuda", "topk > 1" if tree else "page size")


@pytest.mark.parametrize(
    ("sheet", "name", "library", "arch", "page"), CHAINS_ONLY, ids=[f"{s[0][8:]} {s[1]}" for s in CHAINS_ONLY]
)
def test_trees_are_for_who_serves_every_phase_of_them(
    support: Support, sheet: str, name: str, library: str, arch: str, page: int
) -> None:
    """A server asks each phase for the same `spec_topk`: what it refuses, neither the matrix nor explain offers."""
    shape: dict[str, Any] = {"family": "paged", **LLM} if sheet == "serving_mha" else {"family": "mla", **LATENT}
    request = AttentionRequest(**{**shape, **VERIFY, "page_size": page, "layout": "THD", "spec_topk": 4, "tree": True})
    where: dict[str, Any] = {"platform": f"cuda:{arch}", "installed": library.split(",")}
    for phase in both_phases(request):
        with pytest.raises(UnsupportedRequestError):
            what_if(phase, backend=name, **where)
    with pytest.raises(UnsupportedRequestError, match=f"{name} cannot verify: .* neither extends nor decodes with 4"):
        what_if(request, backend=name, **where)
    found = cell(support, sheet, name, "cuda", "topk > 1")
    assert found == "no" or (found.startswith("lowered: tree_by_lse (") and arch not in found)


def test_a_cache_that_no_rewrite_is_for_is_no_cell(support: Support) -> None:
    request = AttentionRequest(
        **{"family": "mla", **LATENT, "phase": "decode", "s_relation": "one", "page_size": 64, "kv_dtype": "int8"}
    )
    with pytest.raises(NotImplementedError, match="kv_dtype='int8' is not fp8_e4m3"):
        what_if(request, platform="cuda:sm90", installed=("sgl-flash-mla",), backend="flashmla")
    assert cell(support, "serving_mla", "flashmla", "cuda", "FP4 KV") == "lowered: dequantise_kv"


def test_planned_is_said_per_family(support: Support) -> None:
    (mha,) = [s for s in support.sheets if s.key == "serving_mha"]
    (dense,) = [s for s in support.sheets if s.key == "dense"]
    served = {row.name: row.planned for row in mha.rows}
    assert served["reference"] is False
    assert served["flashinfer"] is False
    assert served["dual_chunk_flash_attn"] is False
    assert {row.name: row.planned for row in dense.rows}["torch_sdpa"] is False


def test_every_registered_backend_has_its_cells(support: Support) -> None:
    pairs = {(name, platform) for name, row in support.cells.items() for platform in row}
    assert pairs == set(get_manager().backends)
    assert support.platforms == ("cuda", "rocm", "xpu", "musa", "npu", "mps", "cpu")


def test_json_has_all_of_it(run: Run) -> None:
    shown = run("matrix", "--json")
    assert (shown.code, shown.err) == (0, "")
    assert shown.data == run("matrix", "--format", "json").data
    assert shown.data["cells"]["dsa"]["rocm"] == {"adapter": "available", "evidence": "declared"}
    assert shown.data["cells"]["torch_sdpa"]["cpu"]["adapter"] == "available"
    assert set(shown.data["limits"]) == {"dense", "packed", "serving_mha", "serving_mla", "linear"}
    rows = shown.data["limits"]["serving_mha"]["rows"]
    (hpc_ops,) = [row for row in rows if row["name"] == "hpc_ops"]
    assert (hpc_ops["platforms"], hpc_ops["planned"], hpc_ops["cells"]["page size"]) == (["cuda"], False, "64" + FINER)
    assert {b["name"] for b in shown.data["backends"]} == {b["name"] for b in support_matrix()}


def test_text_has_every_backend_and_the_legend(run: Run) -> None:
    shown = run("matrix").out
    first = shown.partition("Dense")[0]
    for name, _ in get_manager().backends:
        assert f"\n{name} " in first
    for words in ("● available", "○ planned", "native", "Serving, MHA", "Serving, MLA", "Linear attention"):
        assert words in shown


def test_the_page_is_current(support: Support) -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(support) + "\n", (
        "run: polyattn matrix --format markdown > docs/support-matrix.md"
    )


def test_the_page_has_whole_tables(support: Support) -> None:
    widths = []
    for line in markdown(support).splitlines():
        widths.append(line.count("|") if line.startswith("|") else 0)
    assert all(b in (a, 0) or a == 0 for a, b in itertools.pairwise(widths))
    assert len(markdown(support).splitlines()) > 150


def fake(evidence: str) -> Support:
    sheet = Sheet("dense", "Dense", ("causal",), (Limits("x", ("cpu",), False, ("native",)),))
    return Support(("cuda", "cpu"), [], {"x": {"cpu": Cell("available", evidence)}}, (sheet,))


def test_evidence_that_says_more_than_its_level(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = "hardware (NVIDIA H200, 2026-11-21), stale"
    monkeypatch.setattr("polyattn.cli.matrix.gather", lambda: fake(evidence))
    assert f"| `x` | - | available · {evidence} |" in run("matrix", "--format", "markdown").out
    shown = run("matrix").out
    assert "● hardware stale" in shown
    assert f"x@cpu  {evidence}" in shown


def test_every_sheet_has_its_backends() -> None:
    sheets = limits()
    assert [len(sheet.rows) > 3 for sheet in sheets] == [True] * 5
