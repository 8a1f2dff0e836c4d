"""FlashMLA's sparse kernels behind `dsa`: conformance over an emulator, and what they are really given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyattn import what_if
from polyattn.contract import AttentionRequest
from polyattn.semantics.kv_quant import mla_pack_fp8
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library
from polyattn.testing.families.cached import in_tables

from .emulators import flash_mla as emulator
from .test_flashmla import MLA, tables

BUILDS: dict[emulator.Build, Emulated] = {
    "git": Emulated("dsa", "flashmla_sparse/flash-mla", "cuda:sm90@12.8"),
    "sgl": Emulated("dsa", "flashmla_sparse/sgl-flash-mla", "cuda:sm90@12.8"),
    "vllm": Emulated("dsa", "flashmla_sparse/vllm", "cuda:sm90@12.8"),
}
GIT = BUILDS["git"]
LISTED: dict[str, Any] = {**MLA, "token_topk": 5}
OF_BYTES = {**LISTED, "kv_dtype": "fp8_e4m3", "kv_scales": "block128"}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return emulator.library().install(monkeypatch)


@pytest.mark.slow(keep=16)
@pytest.mark.parametrize("case", GIT.cases(per_row=8), ids=str)
def test_conformance(case: Case, library: Library) -> None:
    GIT.passes(case, library)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("build", ["sgl", "vllm"])
def test_conformance_of_other_builds(build: emulator.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    library = emulator.library(build).install(monkeypatch)
    for case in BUILDS[build].cases(per_row=2):
        BUILDS[build].passes(case, library)


def run(**fields: Any) -> Any:
    torch.manual_seed(0)
    asked = {**LISTED, **fields}
    rows = torch.randn(2, 64, 576).bfloat16()
    cache = mla_pack_fp8(rows.float()) if "kv_dtype" in fields else rows
    lists = torch.tensor([[3, -1, 0, 2, -1], [-1] * 5, [8, 1, 0, 7, 2]], dtype=torch.int32)
    query = torch.randn(3, 64, 576).bfloat16()
    given = in_tables(**tables((1, 5), (2, 9)), token_indices=lists)
    return GIT.bind(**asked).forward(query, cache, **given)


@pytest.mark.parametrize(("fields", "block"), [({}, 128), (OF_BYTES, 64)])
def test_lists_are_places_of_the_cache(fields: dict[str, Any], block: int, library: Library) -> None:
    run(**fields)
    (call,) = [call for call in library.calls if "indices" in call.given]
    indices = call.given["indices"].flatten(1)
    assert indices.shape == (3, block)
    assert indices[0, :5].tolist() == [3, -1, 0, 2, -1]
    assert indices[2, :5].tolist() == [72, 65, 64, 71, 66]
    assert (indices[1] == -1).all()
    assert (indices[:, 5:] == -1).all()


@pytest.mark.parametrize("fields", [{}, OF_BYTES])
def test_a_query_without_tokens(fields: dict[str, Any], library: Library) -> None:
    out, lse = run(lse=True, **fields)
    assert not out[1].any()
    assert lse[1].isneginf().all()
    assert lse[[0, 2]].isfinite().all()


@pytest.mark.parametrize("scale", [-0.1, 0.0])
def test_scales_of_any_sign(scale: float, library: Library) -> None:
    out, lse = run(lse=True, scale=scale)
    assert out.isfinite().all()
    given = library.calls[-1].given
    assert given["sm_scale"] > 0
    if not scale:
        torch.testing.assert_close(lse[2], torch.full((64,), torch.log(torch.tensor(5.0))))


def test_each_of_its_libraries_has_a_name() -> None:
    """`flashmla_sparse` is FlashMLA's, `dsa/polyattn-triton` the portable kernels, `dsa` whoever comes first."""
    request = AttentionRequest(**{**LISTED, "platform": "cuda", "arch": "sm90"})
    for name, served in {
        "dsa": "flashmla_sparse/vllm",
        "flashmla_sparse": "flashmla_sparse/vllm",
        "dsa/flashmla_sparse": "flashmla_sparse/vllm",
        "dsa/polyattn-triton": "polyattn-triton",
    }.items():
        installed = ("vllm", "polyattn-triton", "triton")
        found = what_if(request, platform="cuda:sm90", installed=installed, backend=name)
        assert (found.backend, found.provider) == ("dsa", served), name
