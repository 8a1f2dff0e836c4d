"""The support tables, cell by cell: what the published matrices promise, and how it is served here.

Each cell reads "published: here". Published: yes, no, or what its page says. Here: `native` (the kernel does it),
`lowered` (an exact rewrite does it, named in the selection), or `refused` (with a reason). A published yes is never
refused; a published no may be exceeded. A is of names: where each is published, and where it is one here that can be
served. docs/hosts.md shows the cells of A, B and C (docs/tables.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from polyattn import what_if
from polyattn.contract import AttentionRequest, Provider, Row
from polyattn.errors import PolyattnError
from polyattn.registry.manager import get_manager

A_COLUMNS = ("cuda", "rocm", "xpu", "musa", "mps", "npu", "cpu")
# name: (its other names, where it is published, where it is here), y or n in the order of the columns.
A: dict[str, tuple[tuple[str, ...], str, str]] = {
    "torch_sdpa": ((), "yyyyyyy", "yyyyyyy"),
    "torch_native": ((), "yyyyyyy", "yyyyyyy"),
    "flex_attention": ((), "ynnnnnn", "yyyynyy"),
    "fa": ((), "yyyynyn", "yyyynyn"),
    "fa2": ((), "ynnnnnn", "ynnnnnn"),
    "fa3": ((), "ynnnnnn", "ynnynnn"),
    "fa4": ((), "ynnnnnn", "ynnnnnn"),
    "flashinfer": ((), "ynnnnnn", "ynnnnnn"),
    "flashinfer_mla": ((), "ynnnnnn", "ynnnnnn"),
    "triton": ((), "yynnnyy", "yyyynyy"),
    "trtllm_mha": ((), "ynnnnnn", "ynnnnnn"),
    "trtllm_mla": ((), "ynnnnnn", "ynnnnnn"),
    "cutedsl_mla": ((), "ynnnnnn", "ynnnnnn"),
    "tokenspeed_mla": ((), "ynnnnnn", "ynnnnnn"),
    "cutlass_mla": ((), "ynnnnnn", "ynnnnnn"),
    "flashmla": ((), "ynnnnnn", "ynnnnnn"),
    "hpc_ops": ((), "ynnnnnn", "ynnnnnn"),
    "dual_chunk_flash_attn": ((), "ynnnnnn", "yyyynyy"),
    "dsa": (("nsa",), "ynnnnnn", "yyyynyy"),
    "aiter": ((), "nynnnnn", "nynnnnn"),
    "aiter_sage": ((), "nynnnnn", "nynnnnn"),
    "wave": ((), "nynnnnn", "nynnnnn"),
    "ascend": ((), "nnnnnyn", "nnnnnyn"),
    "intel_xpu": ((), "nnynnnn", "nnynnnn"),
    "intel_amx": ((), "nnnnnny", "nnnnnny"),
    "sage_attn": ((), "ynnynnn", "ynnynnn"),
    "sage_attn_3": ((), "ynnnnnn", "ynnnnnn"),
    "sliding_tile_attn": ((), "ynnnnnn", "yyyynyy"),
    "video_sparse_attn": ((), "ynnnnnn", "yyyynyy"),
    "vmoba_attn": ((), "ynnnnnn", "yyyynyy"),
    "sla_attn": ((), "ynnnnnn", "yyyynyy"),
    "sage_sla_attn": ((), "ynnnnnn", "yyyynyy"),
    "sparse_video_gen_2_attn": ((), "ynnnnnn", "yyyynyy"),
    "cutedsl": ((), "ynnnnnn", "ynnnnnn"),
    "fla": ((), "ynnnnnn", "ynnnnnn"),
}

MHA: dict[str, Any] = {
    "family": "paged",
    "heads": 32,
    "kv_heads": 8,
    "phase": "extend",
    "s_relation": "fewer",
    "causal": "bottom_right",
    "save_kv_cache": True,
}
MLA: dict[str, Any] = {
    **MHA,
    "family": "mla",
    "save_kv_cache": None,
    "heads": 128,
    "kv_heads": 1,
    "head_dim": 576,
    "v_head_dim": 512,
    "scale": 192**-0.5,
}
CHAIN = {"phase": "verify", "spec_topk": 1}
TREE = {"phase": "verify", "spec_topk": 4, "tree": True}
DECODE = {"phase": "decode", "s_relation": "one", "causal": "none"}
FP8, FP4 = {"kv_dtype": "fp8_e4m3", "kv_scales": "tensor"}, {"kv_dtype": "fp4_e2m1", "kv_scales": "tensor"}
# What is built takes the scales that such a cache has; rows of what is planned name no granularity yet.
BLOCKS = {
    "FP4 KV": {"kv_dtype": "fp4_e2m1", "kv_scales": "block16"},
    "FP8": {"kv_dtype": "fp8_e4m3", "kv_scales": "block128"},
}
BUILT = (
    *("torch_native", "torch_sdpa", "flex_attention", "triton", "fa3", "fa4", "flashmla"),
    *("hpc_ops", "flashinfer", "trtllm_mha", "flashinfer_mla", "cutlass_mla", "trtllm_mla", "cutedsl_mla"),
    *("aiter", "wave", "ascend", "intel_xpu", "intel_amx"),
)

# Columns of B: what the cell asks for beyond the row's own request.
B_COLUMNS: dict[str, dict[str, Any]] = {
    "page>1": {"page_size": 64},
    "FP8 KV": FP8,
    "FP4 KV": FP4,
    "topk=1": CHAIN,
    "topk>1": TREE,
    "window": {"window": (127, -1)},
    "multimodal": {"multimodal": True},
}
# backend: (platform, installed, page of the row, cells in the order of the columns)
B = {
    "flashinfer": (
        ("cuda:sm90", "flashinfer", 1),
        ("yes: native", "yes: native", "no: lowered", "yes: native", "yes: native", "yes: native", "no: refused"),
    ),
    "fa3": (
        ("cuda:sm90", "flash-attn-3", 1),
        # By fa3_fp8, which rounds the queries too; in strict mode the pages are dequantised.
        ("yes: native", "yes: native", "no: lowered", "yes: native", "yes: lowered", "yes: native", "yes: native"),
    ),
    "fa4": (
        ("cuda:sm100", "flash-attn-4", 1),
        ("128: native", "no: lowered", "yes: lowered", "yes: native", "yes: lowered", "yes: native", "yes: native"),
    ),
    "triton": (
        ("cuda:sm90", "triton", 1),
        (
            "emulated: native",
            "yes: native",
            "yes: native",
            "yes: native",
            "yes: native",
            "yes: native",
            "yes: native",
        ),
    ),
    "torch_native": (
        ("cuda:sm90", "torch", 1),
        ("emulated: native", "yes: lowered", "yes: lowered", "no: native", "no: native", "no: native", "yes: native"),
    ),
    "torch_sdpa": (
        ("cuda:sm90", "torch", 1),
        ("no: native", "no: lowered", "no: lowered", "no: native", "no: native", "no: native", "no: native"),
    ),
    "flex_attention": (
        ("cuda:sm90", "torch", 1),
        ("emulated: native", "no: lowered", "yes: lowered", "no: native", "no: native", "no: native", "no: refused"),
    ),
    "trtllm_mha": (
        ("cuda:sm100", "flashinfer", 32),
        # Beside an FP8 cache its prefill kernels want FP8 queries.
        (
            "16,32,64: native",
            "yes: lowered",
            "yes: lowered",
            "yes: native",
            "no: refused",
            "yes: native",
            "no: refused",
        ),
    ),
    "dual_chunk_flash_attn": (
        ("cuda:sm90", "polyattn-triton", 1),
        ("yes: native", "no: lowered", "no: refused", "no: refused", "no: refused", "no: refused", "no: refused"),
    ),
    "hpc_ops": (
        ("cuda:sm90", "hpc-ops", 64),
        # Its own FP8 rounds the queries too.
        ("64: native", "yes: lowered", "no: lowered", "no: refused", "no: refused", "no: refused", "no: refused"),
    ),
    "aiter": (
        ("rocm:gfx942", "amd-aiter", 1),
        # gfx942's e4m3 is not that of a cache; gfx950 reads one, in pages of 16 or more.
        ("yes: native", "yes: lowered", "no: lowered", "yes: native", "yes: lowered", "yes: native", "yes: native"),
    ),
    "wave": (
        ("rocm:gfx942", "wave-lang sglang", 1),
        ("yes: native", "no: lowered", "no: lowered", "no: refused", "no: refused", "no: refused", "no: refused"),
    ),
    "ascend": (
        ("npu", "torch-npu", 128),
        ("yes: native", "no: lowered", "no: lowered", "yes: native", "no: refused", "yes: native", "yes: native"),
    ),
    "intel_xpu": (
        ("xpu", "sgl-kernel-xpu", 64),
        ("yes: native", "no: native", "no: lowered", "no: native", "no: refused", "yes: native", "no: refused"),
    ),
    "intel_amx": (
        ("cpu:amx", "sgl-kernel-cpu", 1),
        ("no: lowered", "no: lowered", "no: lowered", "no: refused", "no: refused", "no: refused", "no: refused"),
    ),
}
METHODS = {"dual_chunk_flash_attn": {"method": "dual_chunk"}}
PAGES_OF_B = {"ascend": {"page_size": 128}, "fa4": {"page_size": 128}}

# Columns of C; the page is the row's own, except that trees are asked for at the page the row names for them.
C_COLUMNS: dict[str, dict[str, Any]] = {
    "page": {},
    "FP8": FP8,
    "FP4": {**FP4, "kv_scales": "block16"},
    "chunked prefix": {"chunked_prefix": True},
    "topk=1": CHAIN,
    "topk>1": TREE,
}
C = {
    "flashinfer_mla": (
        ("cuda:sm90", "flashinfer", 1),
        ("1: native", "no: lowered", "yes: lowered", "yes: native", "yes: native", "no: refused"),
    ),
    "flashmla": (
        ("cuda:sm90", "sgl-flash-mla", 64),
        # Its own FP8 kernel decodes and verifies.
        ("64: native", "yes: lowered", "yes: lowered", "yes: native", "yes: native", "no: refused"),
    ),
    "cutlass_mla": (
        ("cuda:sm100", "sgl-kernel flashinfer", 128),
        ("128: native", "yes: lowered", "yes: lowered", "yes: native", "yes: native", "no: refused"),
    ),
    "trtllm_mla": (
        ("cuda:sm100", "flashinfer", 32),
        ("32,64: native", "yes: lowered", "yes: lowered", "yes: native", "yes: native", "no: refused"),
    ),
    "cutedsl_mla": (
        ("cuda:sm100", "flashinfer", 64),
        ("32,64: native", "yes: lowered", "no: lowered", "yes: native", "yes: native", "no: refused"),
    ),
    "tokenspeed_mla": (
        ("cuda:sm100", "flashinfer", 64),
        ("32,64: native", "required: native", "no: refused", "yes: native", "yes: native", "no: refused"),
    ),
    "fa3": (
        ("cuda:sm90", "flash-attn-3", 1),
        ("any: native", "no: lowered", "no: lowered", "yes: native", "yes: native", "page 1: lowered"),
    ),
    "triton": (
        ("cuda:sm90", "triton", 1),
        ("any: native", "no: native", "no: lowered", "no: native", "yes: native", "page 1: native"),
    ),
    "fa4": (
        ("cuda:sm100", "flash-attn-4", 1),
        ("1: native", "no: lowered", "yes: lowered", "yes: native", "no: refused", "no: refused"),
    ),
    "ascend": (
        ("npu", "torch-npu", 128),
        ("128: native", "no: lowered", "no: lowered", "no: refused", "no: native", "no: refused"),
    ),
}
BASES_OF_C = {"cutedsl_mla": DECODE, "tokenspeed_mla": {**DECODE, "kv_dtype": "fp8_e4m3"}}

GDN: dict[str, Any] = {"family": "linear", "heads": 32, "kv_heads": 16, "state_layout": "VK"}
FLASHINFER_GDN = "flashinfer-python==0.7.2"
LOW = "no: lowered"
D_COLUMNS: dict[str, dict[str, Any]] = {
    "decode": {"phase": "decode", "s_relation": "one"},
    "prefill": {"phase": "prefill"},
    "verify, chain": {"phase": "verify", "state_out": "every"},
    "verify, tree": {"phase": "verify", "state_out": "every", "tree": True},
}
# What the kernels of some of them compute themselves, and must be left to.
RAW = {"raw_gates": "softplus", "qk_norm": True}
# (backend, platform): (installed, methods, what calls ask beside, cells)
D: dict[tuple[str, str], tuple[str, tuple[str, ...], dict[str, Any], tuple[str, ...]]] = {
    ("triton", "cuda:sm90"): ("triton", ("gdn", "kda"), {}, ("yes: native",) * 4),
    ("triton", "rocm:gfx942"): ("triton", ("gdn", "kda"), {}, ("yes: native",) * 4),
    ("triton", "npu"): ("triton-ascend", ("gdn", "kda"), {}, ("yes: native",) * 2 + ("no: lowered",) * 2),
    ("triton", "cpu"): ("triton", ("gdn", "kda"), {}, ("yes: native",) * 2 + ("no: native",) * 2),
    ("cutedsl", "cuda:sm90"): (
        "sglang==0.5.23 nvidia-cutlass-dsl",
        ("gdn", "kda"),
        RAW,
        ("yes: native", "no: refused", "no: lowered", "no: lowered"),
    ),
    ("flashinfer", "cuda:sm90"): (FLASHINFER_GDN, ("gdn",), RAW, ("yes: native", "yes: lowered", "yes: native", LOW)),
    ("flashinfer", "cuda:sm100@13.0"): (
        FLASHINFER_GDN,
        ("gdn",),
        RAW,
        ("yes: native", "yes: lowered", "yes: native", LOW),
    ),
    ("fla", "cuda:sm90"): ("flash-linear-attention==0.6.0", ("gdn", "kda"), {}, ("yes: native",) * 2 + (LOW,) * 2),
}

# Platforms of E: cuda, rocm, xpu, musa, mps, npu.
E_COLUMNS = ("cuda:sm90", "rocm:gfx942", "xpu", "musa", "mps", "npu")
E_INSTALLED = (
    *("flash-attn-3", "amd-aiter", "sgl-kernel-xpu", "mate", "torch-npu", "sageattention==2.2.0", "sageattn3"),
    *("st-attn", "fastvideo-kernel", "vmoba", "flash-attn", "spas-sage-attn", "svg", "flashinfer", "triton-ascend"),
)
CUDA_ONLY = "ynnnnn"
E = {
    "fa": "yyyyny",
    "torch_sdpa": "yyyyyy",
    "sage_attn": "ynnynn",
    "aiter": "nynnnn",
    "aiter_sage": "nynnnn",
    "sage_attn_3": CUDA_ONLY,
    "sage_sla_attn": CUDA_ONLY,
    "sliding_tile_attn": CUDA_ONLY,
    "video_sparse_attn": CUDA_ONLY,
    "vmoba_attn": CUDA_ONLY,
    "sla_attn": CUDA_ONLY,
    "sparse_video_gen_2_attn": CUDA_ONLY,
}
# They serve calls of dense attention that have a place.
E_METHODS = {
    "sage_sla_attn",
    "sliding_tile_attn",
    "video_sparse_attn",
    "vmoba_attn",
    "sla_attn",
    "sparse_video_gen_2_attn",
}
# Where ours exceed the published table: methods with portable kernels, on every Triton device.
PORTABLE = E_METHODS


def served(name: str, platform: str, installed: str | tuple[str, ...], changes: dict[str, Any]) -> tuple[str, str]:
    """(native, lowered or refused; what a reader is told)."""
    packages = installed.split() if isinstance(installed, str) else installed
    try:
        selection = what_if(AttentionRequest(**changes), platform=platform, installed=packages, backend=name)
    except PolyattnError as error:
        return "refused", str(error)
    if selection.fallback:
        return "refused", selection.notes[0]
    return ("lowered" if selection.lowerings else "native"), ", ".join(selection.lowerings)


def check(cell: str, name: str, platform: str, installed: str | tuple[str, ...], changes: dict[str, Any]) -> None:
    published, _, here = cell.partition(": ")
    found, words = served(name, platform, installed, changes)
    assert found == here, words
    assert words or found == "native"
    assert published == "no" or found != "refused", "a published yes must be served"


def b_cells() -> list[Any]:
    cells = []
    for name, ((platform, installed, page), row) in B.items():
        for column, cell in zip(B_COLUMNS, row, strict=True):
            changes = {**MHA, "page_size": page, **METHODS.get(name, {}), **B_COLUMNS[column]}
            if column == "page>1":
                changes |= PAGES_OF_B.get(name, {})
            if name in BUILT:
                changes |= BLOCKS.get(column, {})
            cells.append(pytest.param(cell, name, platform, installed, changes, id=f"{name}, {column} {cell}"))
    return cells


def c_cells() -> list[Any]:
    cells = []
    for name, ((platform, installed, page), row) in C.items():
        for column, cell in zip(C_COLUMNS, row, strict=True):
            changes = {**MLA, "page_size": page, **BASES_OF_C.get(name, {}), **C_COLUMNS[column]}
            if name in BUILT:
                changes |= BLOCKS.get(column, {})
            if (name, column) == ("tokenspeed_mla", "FP8"):
                changes |= {"kv_scales": ""}  # one scale, of 1
            if "phase" in C_COLUMNS[column]:
                changes |= {"s_relation": "fewer", "causal": "bottom_right"}
            cells.append(pytest.param(cell, name, platform, installed, changes, id=f"{name}, {column} {cell}"))
    return cells


def d_cells() -> list[Any]:
    cells = []
    for (name, platform), (installed, methods, more, row) in D.items():
        for method in methods:
            for column, cell in zip(D_COLUMNS, row, strict=True):
                changes = {**GDN, "method": method, **more, **D_COLUMNS[column]}
                name_of_cell = f"{name}@{platform}, {method} {column} {cell}"
                cells.append(pytest.param(cell, name, platform, installed, changes, id=name_of_cell))
    return cells


def e_cells() -> list[Any]:
    cells = []
    for name, row in E.items():
        for platform, letter in zip(E_COLUMNS, row, strict=True):
            at = "cuda:sm120" if (name, platform) == ("sage_attn_3", "cuda:sm90") else platform
            cells.append(pytest.param(name, at, letter, id=f"{name}@{at} {letter}"))
    return cells


@pytest.mark.parametrize("name", A)
def test_a_names(name: str) -> None:
    aliases, published, here = A[name]
    for platform, before, now in zip(A_COLUMNS, published, here, strict=True):
        info = get_manager().backends.get((name, platform))
        built = info is not None and not info.planned
        assert built == (now == "y"), f"{name} on {platform}"
        assert built or before == "n", f"{name} is published on {platform}"
        assert info is None or set(aliases) <= {alias.name for alias in info.aliases}


@pytest.mark.parametrize(("cell", "name", "platform", "installed", "changes"), b_cells())
def test_b_serving_mha(cell: str, name: str, platform: str, installed: str, changes: dict[str, Any]) -> None:
    check(cell, name, platform, installed, changes)


@pytest.mark.parametrize(("cell", "name", "platform", "installed", "changes"), c_cells())
def test_c_serving_mla(cell: str, name: str, platform: str, installed: str, changes: dict[str, Any]) -> None:
    check(cell, name, platform, installed, changes)


@pytest.mark.parametrize(("cell", "name", "platform", "installed", "changes"), d_cells())
def test_d_linear(cell: str, name: str, platform: str, installed: str, changes: dict[str, Any]) -> None:
    check(cell, name, platform, installed, changes)


@pytest.mark.parametrize(("name", "platform", "letter"), e_cells())
def test_e_diffusion(name: str, platform: str, letter: str) -> None:
    changes = {"place": name in E_METHODS}
    found, words = served(name, platform, E_INSTALLED, changes)
    exceeded = name in PORTABLE and platform not in ("cuda:sm90", "mps")
    assert (found == "native") == (letter == "y" or exceeded), words


def test_cutlass_decodes_one_query_without_flashinfer() -> None:
    """It reads 16-bit rows only, so that the FP8 cell of the table is an exact rewrite; prefill is FlashInfer's."""
    rows = {**BLOCKS["FP8"], "page_size": 128}
    assert served("cutlass_mla", "cuda:sm100", "sgl-kernel", {**MLA, **DECODE, **rows})[0] == "lowered"
    found, words = served("cutlass_mla", "cuda:sm100", "sgl-kernel", {**MLA, "page_size": 128})
    assert found == "refused"
    assert "decode" in words


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
def test_aiter_says_why_it_has_no_trees_on_rdna(arch: str) -> None:
    """The published row is of AITER on MI chips, whose kernel returns an LSE; RDNA chips run another one."""
    found, words = served("aiter", f"rocm:{arch}", "amd-aiter", {**MHA, **TREE, "page_size": 16})
    assert found == "refused"
    assert "spec_topk=4 is not 0 to 1" in words
    assert (
        "no trees of drafts on RDNA chips: the kernel there returns no LSE"
        in get_manager().backends["aiter", "rocm"].note
    )


def test_trtllm_mha_alone_says_that_it_verifies_no_trees() -> None:
    """Published: topk has to be 1 in either phase."""
    for tree in (False, True):
        changes = {**MHA, **TREE, "tree": tree, "page_size": 32}
        found, words = served("trtllm_mha", "cuda:sm100", "flashinfer", changes)
        assert found == "refused"
        assert "neither extends nor decodes with 4" in words


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_fa4_serves_both_phases_over_an_fp4_cache(phase: str) -> None:
    """Published: its prefill does, beside another backend's decode."""
    changes = {**MHA, **BLOCKS["FP4 KV"], "page_size": 128, **(DECODE if phase == "decode" else {})}
    assert served("fa4", "cuda:sm100", "flash-attn-4", changes) == ("lowered", "dequantise_kv")


def test_cutedsl_is_decode_only() -> None:
    found, words = served("cutedsl_mla", "cuda:sm100", "flashinfer", {**MLA, "page_size": 64})
    assert found == "refused"
    assert "phase='extend' is not" in words


def test_tokenspeed_requires_fp8() -> None:
    found, words = served("tokenspeed_mla", "cuda:sm100", "flashinfer", {**MLA, **DECODE, "page_size": 64})
    assert found == "refused"
    assert "kv_dtype" in words


@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_xpu_flash_widths(width: int, dtype: str) -> None:
    assert served("fa", "xpu", "sgl-kernel-xpu", {"head_dim": width, "dtype": dtype})[0] == "native"


def _portable(name: str, platform: str) -> tuple[Row, ...]:
    info = get_manager().backends[name, platform]
    (provider,) = [p for p in info.providers if p.name in ("polyattn", "polyattn-triton")]
    found: Provider = provider
    return found.rows


@pytest.mark.parametrize("name", [*sorted(PORTABLE), "dsa", "dual_chunk_flash_attn"])
def test_portable_kernels_have_one_set_of_limits(name: str) -> None:
    """polyattn-cuda lists them beside the vendors' kernels; two packages must not drift apart."""
    platforms = ["cuda", "rocm", "xpu", "musa", "npu", "cpu"]
    if name == "sage_sla_attn":
        platforms.remove("cpu")  # which emulates it, in more dtypes and widths than a kernel takes
    everywhere = []
    for platform in platforms:  # graphs are of cuda and rocm, which has a test of its own
        rows = _portable(name, platform)
        allows = [{field: given for field, given in r.allows.items() if field != "graph_capture"} for r in rows]
        everywhere.append([(r.when, found, r.lowered) for r, found in zip(rows, allows, strict=True)])
    assert all(rows == everywhere[0] for rows in everywhere)
    configs = {get_manager().backends[name, platform].config for platform in platforms}
    assert len(configs) == 1


def test_every_lowering_that_a_row_names_is_known() -> None:
    known = {
        "page_table_to_tokens",
        "dequantise_kv",
        "sinks_from_lse",
        "tree_by_lse",
        "expand_gqa_heads",
        "chunked_prefix_by_lse",
        "fold_scale",
    }
    backends = get_manager().backends.values()
    named = {how for b in backends for p in b.providers for r in p.rows for how in r.lowered.values()}
    assert named == known
