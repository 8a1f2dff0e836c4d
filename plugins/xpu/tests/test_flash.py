"""Both FlashAttention libraries for Intel GPUs: the kit over emulators of them, and what each is really called with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn import what_if
from polyattn.contract import AttentionRequest, judge
from polyattn.errors import BackendUnavailableError, PolyattnError, UnsupportedRequestError
from polyattn.semantics import reference
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library
from polyattn.testing.families.cached import in_tables

from .emulators import sgl_kernel_xpu, vllm_xpu_kernels

# build: (its emulator, the chip, provider of `fa`, provider of `intel_xpu`)
BUILDS: dict[str, tuple[Callable[[], Library], str, str, str]] = {
    "sgl": (sgl_kernel_xpu.library, "xpu:bmg", "fa3/sgl-kernel-xpu", "sgl-kernel-xpu"),
    "vllm": (vllm_xpu_kernels.library, "xpu:pvc", "vllm-xpu-kernels", "vllm-xpu-kernels"),
}
SINKS = {"sgl": "sinks", "vllm": "s_aux"}
FINITE = (("free_slots", "finite"),)


def targets(build: str) -> list[Emulated]:
    """All backends that a build is behind."""
    _, chip, packed, paged = BUILDS[build]
    latent = [Emulated("intel_xpu", "sgl-kernel-xpu-mla", chip)] if build == "sgl" else []
    return [Emulated("fa", packed, chip), Emulated("intel_xpu", paged, chip), *latent]


def cases(target: Emulated, full: bool = False) -> list[Case]:
    """Sinks are in the dtype of the queries: others are refused, see below."""
    given: dict[str, Any] = {"per_row": 24} if full else {"per_row": 10, "dtypes": ("bfloat16",)}
    made = target.cases(**given)
    return [c for c in made if not c.request.sinks or c.sink == "usual" or "sinks" in target.rows[-1].lowered]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    full = metafunc.config.getoption("--polyattn-full")
    found = [(b, t, c) for b in BUILDS for t in targets(b) for c in cases(t, full)]
    metafunc.parametrize(
        ("build", "tried", "case"), [pytest.param(b, t, c, id=f"{b}-{t.provider.name}-{c.id}") for b, t, c in found]
    )


def test_conformance(build: str, tried: Emulated, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    tried.passes(case, BUILDS[build][0]().install(monkeypatch))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Library]:
    return lambda build: BUILDS[build][0]().install(monkeypatch)


# ------------------------------------------------------------------------------------------------------------- calls


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


class cached:  # noqa: N801 - reads as the call that it makes
    """A paged request of a build, and a cache to run it over: sequences of 30, 9 and 70 keys in pages of 64."""

    def __init__(self, build: str, queries: tuple[int, ...] = (1, 1, 1), **fields: Any) -> None:
        usual: dict[str, Any] = {
            "family": "paged",
            "layout": "THD",
            "phase": "extend",
            "s_relation": "fewer",
            "causal": "bottom_right",
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 64,
            "page_size": 64,
            "options": FINITE,
        }
        self.bound = Emulated("intel_xpu", BUILDS[build][3], BUILDS[build][1]).bind(**{**usual, **fields})
        self.query, self.keys, self.values = tensors((sum(queries), 4, 64), *[(6, 64, 2, 64)] * 2)
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        self.tables: dict[str, Any] = {
            "page_table": torch.tensor([[2, 5], [0, 5], [4, 1]], dtype=torch.int32),
            "seq_lens": torch.tensor([30, 9, 70], dtype=torch.int32),
            "cu_seqlens_q": starts,
            "max_seqlen_q": max(queries),
            "max_seqlen_k": 70,
        }

    def run(self, **more: Any) -> Tensor:
        result: Tensor = self.bound.forward(self.query, self.keys, self.values, **in_tables(**self.tables, **more))
        return result

    def right(self) -> Tensor:
        """What it must be, without options."""
        starts, found = self.tables["cu_seqlens_q"].tolist(), []
        for n, size in enumerate(self.tables["seq_lens"].tolist()):
            pages = self.tables["page_table"][n].long()
            q, k, v = (
                self.query[starts[n] : starts[n + 1]],
                *(t[pages].flatten(0, 1)[:size] for t in (self.keys, self.values)),
            )
            if len(q):
                found.append(reference.attention(*(t[None].double() for t in (q, k, v)), layout="BSHD", causal=True)[0])
        return torch.cat(found)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("queries", [(1, 0, 1), (3, 0, 1), (3, 1, 0), (0, 0, 2)])
def test_sequences_without_queries_spoil_no_others(
    build: str, queries: tuple[int, ...], install: Callable[[str], Library]
) -> None:
    install(build)
    call = cached(build, queries)
    room = torch.full_like(call.query, torch.nan)
    assert call.run(out=room) is room
    assert float((room.double() - call.right()).norm() / call.right().norm()) < 8e-3


@pytest.mark.parametrize("build", BUILDS)
def test_calls(build: str, install: Callable[[str], Library]) -> None:
    library = install(build)
    q, k, v = tensors((2, 9, 4, 64), (2, 9, 2, 64), (2, 9, 2, 64))
    packed = Emulated("fa", BUILDS[build][2], BUILDS[build][1])
    packed.bind(heads=4, kv_heads=2, head_dim=64, causal="bottom_right", scale=0.5).forward(q, k, v)
    cached(build, window=(17, -1)).run()
    dense, paged = (call.given for call in library.calls)
    assert {call.positional for call in library.calls} == {3}, "only tensors by position"
    assert (dense["softmax_scale"], dense["causal"], dense["max_seqlen_q"], dense["max_seqlen_k"]) == (0.5, True, 9, 9)
    assert paged["max_seqlen_k"] == 70, "a default of 0 would bound the windows"
    assert list(paged["window_size"]) == [17, -1]


@pytest.mark.parametrize("build", BUILDS)
def test_the_cache_is_copied_unless_free_slots_are_numbers(build: str, install: Callable[[str], Library]) -> None:
    library = install(build)
    for options, copied in ((FINITE, False), ((), True)):
        call = cached(build, options=options)
        call.run()
        given = list(library.calls[-1].arguments.values())
        assert (given[1].data_ptr() != call.keys.data_ptr()) is copied
        for blank in (call.keys, call.values):
            blank[0, 9:] = torch.nan
        assert bool(call.run().isnan().any()) is not copied, "the kernels multiply free slots by 0"


@pytest.mark.parametrize("build", BUILDS)
def test_sinks_in_another_dtype_are_refused(build: str, install: Callable[[str], Library]) -> None:
    library = install(build)
    call = cached(build, sinks=True)
    exact = torch.tensor([0.5, 1.0, -2.0, 3.0])
    call.run(sinks=exact.bfloat16())
    assert library.calls[-1].given[SINKS[build]].dtype == torch.bfloat16
    with pytest.raises(UnsupportedRequestError, match=r"sinks are torch\.float32, and the kernels .* pass sinks\.to\("):
        call.run(sinks=exact)


@pytest.mark.parametrize("build", BUILDS)
def test_scales_of_fp8_caches_lie_alone(build: str, install: Callable[[str], Library]) -> None:
    library = install(build)
    call = cached(build, kv_dtype="fp8_e4m3", kv_scales="tensor")
    call.keys, call.values = (t.to(torch.float8_e4m3fn) for t in (call.keys, call.values))
    both = torch.tensor([0.5, 2.0])
    call.run(k_scale=both[0], v_scale=both[1])
    scales = [library.calls[-1].given[f"{side}_descale"] for side in "kv"]
    assert [s.tolist() for s in scales] == [[0.5], [2.0]]
    assert all(s.untyped_storage().nbytes() == 4 for s in scales)


def test_vllm_never_mixes_decode_in(install: Callable[[str], Library]) -> None:
    library = install("vllm")
    cached("vllm", (3, 1, 1)).run()
    assert library.calls[-1].given["is_mix_batch"] is False
    assert library.calls[-1].given["seqused_k"].tolist() == [30, 9, 70]
    assert "cu_seqlens_k" not in library.calls[-1].given


def test_vllm_is_told_the_right_bound_of_more_queries_than_keys(install: Callable[[str], Library]) -> None:
    library = install("vllm")
    q, k, v = tensors((1, 30, 4, 64), (1, 9, 2, 64), (1, 9, 2, 64))
    bound = Emulated("fa", "vllm-xpu-kernels", "xpu:bmg").bind(
        heads=4, kv_heads=2, head_dim=64, window=(5, -1), s_relation="more"
    )
    found = bound.forward(q, k, v)
    right = reference.attention(*(t.double() for t in (q, k, v)), layout="BSHD", window=(5, -1))
    assert float((found.double() - right).norm() / right.norm()) < 8e-3
    assert library.calls[-1].given["window_size"] == [5, 30], "without it 9 keys to the right at most"


def test_sgl_kernel_reads_whole_pools_only(install: Callable[[str], Library]) -> None:
    install("sgl")
    call = cached("sgl")
    call.keys, call.values = torch.stack([call.keys, call.values], 1).unbind(1)
    with pytest.raises(UnsupportedRequestError, match=r"strides .* allocate keys and values apart from each other"):
        call.run()


def test_latent_tables_fill_whole_steps(install: Callable[[str], Library]) -> None:
    library = install("sgl")
    target = Emulated("intel_xpu", "sgl-kernel-xpu-mla", "xpu:bmg")
    bound = target.bind(
        family="mla", layout="THD", phase="decode", s_relation="one", heads=4, kv_heads=1, head_dim=576,
        v_head_dim=512, scale=192**-0.5, page_size=16, options=FINITE,
    )  # fmt: skip
    query, cache = tensors((2, 4, 576), (5, 16, 576))
    tables = {
        "page_table": torch.tensor([[3, 1, 0], [2, 4, 0]], dtype=torch.int32),
        "seq_lens": torch.tensor([33, 20], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32),
    }
    assert bool(bound.forward(query, cache, **in_tables(**tables, max_seqlen_q=1, max_seqlen_k=33)).isfinite().all())
    room, decode = library.calls[-2:]
    assert (room.name, decode.name) == ("flash_mla_get_workspace_size", "flash_mla_decode")
    assert decode.given["page_table"].shape == (2, 8)
    assert (room.given["max_seq_len"], decode.given["sm_scale"]) == (128, 192**-0.5)
    assert decode.given["kv_c_and_k_pe_cache"].data_ptr() == cache.data_ptr()


# ----------------------------------------------------------------------------------------------------- planted errors


def _plant(monkeypatch: pytest.MonkeyPatch, target: str, name: str, change: Callable[[Any], Any]) -> None:
    import importlib

    module = importlib.import_module(target)
    monkeypatch.setattr(module, name, change(getattr(module, name)))


def _without(*names: str, **more: Any) -> Callable[[Any], Any]:
    """The options of an adapter without some of them, or with others."""
    return lambda real: lambda request: {**{k: v for k, v in real(request).items() if k not in names}, **more}


def _given(**more: Any) -> Callable[[Any], Any]:
    """A call with other keywords."""
    return lambda real: lambda *args: __import__("functools").partial(real(*args), **more)


SGL, VLLM, BATCHES = (f"polyattn_xpu.{name}" for name in ("sgl_kernel", "vllm_kernels", "batches"))
PLANTED = [
    ("sgl", 0, SGL, "_options", _without("softmax_scale")),
    ("sgl", 0, SGL, "_options", _without("window_size")),
    ("sgl", 1, SGL, "_options", _without("causal")),
    ("sgl", 1, SGL, "_options", _without(causal=True, window_size=(16, 0))),
    ("sgl", 1, BATCHES, "blind", lambda real: lambda request, query, *_: torch.zeros(len(query), dtype=torch.bool)),
    ("sgl", 1, BATCHES, "without_free_slots", lambda real: lambda request, caches, table, *_: (caches, table)),
    ("sgl", 1, BATCHES, "_scalar", lambda real: lambda scale, device: torch.ones(1)),
    ("sgl", 2, SGL, "_Latent", lambda real: lambda request: real(dataclasses.replace(request, scale=None))),
    ("vllm", 0, VLLM, "_call", _given(softmax_scale=None)),
    ("vllm", 0, VLLM, "_call", _given(causal=False)),
    ("vllm", 0, BATCHES, "blind", lambda real: lambda request, query, *_: torch.zeros(len(query), dtype=torch.bool)),
    ("vllm", 1, VLLM, "_window", lambda real: lambda request, longest: None),
    ("vllm", 1, BATCHES, "_unscaled", lambda real: lambda rows, scale: rows),
]


@pytest.mark.parametrize(
    ("build", "which", "module", "name", "change"),
    PLANTED,
    ids=[f"{build}-{('fa', 'paged', 'mla')[which]}-{name}-{i}" for i, (build, which, _, name, _) in enumerate(PLANTED)],
)
def test_a_planted_error_is_found(
    build: str,
    which: int,
    module: str,
    name: str,
    change: Callable[[Any], Any],
    install: Callable[[str], Library],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(build)
    _plant(monkeypatch, module, name, change)
    target = targets(build)[which]
    assert any(target.caught([case]) for case in cases(target))


# ---------------------------------------------------------------------------------------------------------- refusals

PAGED = {"family": "paged", "page_size": 64, "phase": "decode", "s_relation": "one"}
MLA = {**PAGED, "family": "mla", "heads": 16, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "scale": 192**-0.5}
SGL_FA, VLLM_FA = ("fa", "fa3/sgl-kernel-xpu"), ("fa", "vllm-xpu-kernels")
SGL_PAGED, VLLM_PAGED = ("intel_xpu", "sgl-kernel-xpu"), ("intel_xpu", "vllm-xpu-kernels")
SGL_MLA = ("intel_xpu", "sgl-kernel-xpu-mla")
REFUSED: list[tuple[str, tuple[str, str], dict[str, Any], str]] = [
    ("xpu:bmg", SGL_FA, {"head_dim": 80}, "head_dim=80 is not one of 64, 96, 128, 192, 256"),
    ("xpu:bmg", SGL_FA, {"dtype": "float32"}, "dtype='float32' is not one of bfloat16, float16"),
    ("xpu:bmg", SGL_FA, {"softcap": 30.0}, "softcap=30.0 is not declared"),
    ("xpu:bmg", SGL_FA, {"lse": True}, "lse=True is not declared"),
    ("xpu:bmg", SGL_FA, {"sinks": True}, "sinks=True is not declared"),
    ("xpu:bmg", SGL_FA, {"heads": 32, "kv_heads": 1}, "group=32 is not 1 to 16"),
    ("xpu:bmg", SGL_FA, {"grad": ("query",)}, "grad=('query',) is not declared"),
    ("xpu:bmg", SGL_FA, {"v_head_dim": 64}, "v_head_dim=64 is not declared"),
    ("xpu:bmg", SGL_FA, {"dropout": 0.1}, "dropout=0.1 is not declared"),
    ("xpu:pvc", SGL_FA, {}, "arch='pvc' is not one of bmg"),
    ("xpu:bmg", VLLM_FA, {"head_dim": 72}, "head_dim=72 is not one of 64, 96, 128, 192, 256"),
    ("xpu:bmg", VLLM_FA, {"softcap": 30.0}, "softcap=30.0 is not declared"),
    ("xpu:bmg", VLLM_FA, {"alibi": True}, "alibi=True is not declared"),
    ("xpu:bmg", VLLM_FA, {"lse": True, "window": (17, -1)}, "is not declared"),
    ("xpu:bmg", SGL_PAGED, {**PAGED, "page_size": 16}, "page_size=16 is not one of 64, 128"),
    ("xpu:bmg", SGL_PAGED, {**PAGED, "head_dim": 80}, "head_dim=80 is not one of 64, 96, 128, 192, 256, 512"),
    ("xpu:bmg", SGL_PAGED, {**PAGED, "softcap": 30.0}, "softcap=30.0 is not declared"),
    ("xpu:bmg", SGL_PAGED, {**PAGED, "lse": True}, "lse=True is not declared"),
    ("xpu:bmg", SGL_PAGED, {**PAGED, "kv_layout": "HND"}, "kv_layout='HND' is not one of , NHD"),
    ("xpu:bmg", SGL_PAGED, {**PAGED, "sinks": True, "head_dim": 128}, "sinks=True is not declared"),
    ("xpu:bmg", SGL_PAGED, {**PAGED, "spec_topk": 4}, "spec_topk=4 is not 0 to 1"),
    ("xpu:bmg", SGL_PAGED, {**PAGED, "mask": "bool"}, "mask='bool' is not declared"),
    ("xpu:bmg", VLLM_PAGED, {**PAGED, "page_size": 48}, "page_size=48 is not one of 16, 32"),
    ("xpu:bmg", VLLM_PAGED, {**PAGED, "page_size": 160}, "page_size=160 is not one of 16, 32"),
    ("xpu:bmg", SGL_MLA, {**MLA, "page_size": 256}, "page_size=256 is not one of 16, 32, 64, 128"),
    ("xpu:bmg", SGL_MLA, {**MLA, "head_dim": 192, "v_head_dim": 128}, "dims=(192, 128) is not (576, 512)"),
    ("xpu:bmg", SGL_MLA, {**MLA, "heads": 256}, "group=256 is not 1 to 128"),
    ("xpu:bmg", SGL_MLA, {**MLA, "phase": "extend", "s_relation": "fewer"}, "causal='none' is not bottom_right"),
]
PASSED: list[tuple[str, tuple[str, str], dict[str, Any]]] = [
    *(("xpu:bmg", SGL_FA, {"head_dim": d, "dtype": "float16"}) for d in (64, 96, 128, 192, 256)),
    ("xpu", SGL_FA, {"heads": 32, "kv_heads": 2, "window": (17, 3)}),
    *(("xpu:pvc", VLLM_FA, {"head_dim": d, "lse": True}) for d in (64, 96, 128, 192, 256)),
    ("xpu:bmg", VLLM_FA, {"window": (17, 3)}),
    *(("xpu:bmg", SGL_PAGED, {**PAGED, "page_size": p, "head_dim": 512}) for p in (64, 128)),
    ("xpu:bmg", SGL_PAGED, {**PAGED, "sinks": True, "head_dim": 64, "window": (127, -1)}),
    ("xpu:bmg", SGL_PAGED, {**PAGED, "kv_dtype": "fp8_e5m2", "kv_scales": "tensor"}),
    *(("xpu:pvc", VLLM_PAGED, {**PAGED, "page_size": p, "sinks": True}) for p in (16, 32, 64, 192)),
    *(("xpu:bmg", SGL_MLA, {**MLA, "page_size": p}) for p in (16, 32, 64, 128)),
    ("xpu:bmg", SGL_MLA, {**MLA, "heads": 128, "phase": "extend", "s_relation": "fewer", "causal": "bottom_right"}),
]


def verdict(platform: str, provider: tuple[str, str], changes: dict[str, Any]) -> Any:
    target = Emulated(*provider, platform)
    return judge(target.rows, target.request(**changes))


@pytest.mark.parametrize(("platform", "provider", "changes", "words"), REFUSED)
def test_refused_outside_the_limits(
    platform: str, provider: tuple[str, str], changes: dict[str, Any], words: str
) -> None:
    found = verdict(platform, provider, changes)
    assert not found, "taken"
    assert words in "; ".join(found.reasons)


@pytest.mark.parametrize(("platform", "provider", "changes"), PASSED)
def test_served_within_the_limits(platform: str, provider: tuple[str, str], changes: dict[str, Any]) -> None:
    found = verdict(platform, provider, changes)
    assert found, found.reasons
    assert found.lowerings == ()


def test_versions() -> None:
    with pytest.raises(PolyattnError, match=r"vllm-xpu-kernels 0\.1\.2 is installed, >=0\.1\.16 is needed"):
        what_if(AttentionRequest(), platform="xpu", installed=("vllm-xpu-kernels==0.1.2",), backend="fa", strict=True)


def test_an_older_build_is_named(install: Callable[[str], Library]) -> None:
    def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor) -> None: ...

    install("sgl").add(sgl_kernel_xpu.FLASH, flash_attn_with_kvcache=flash_attn_with_kvcache)
    with pytest.raises(
        BackendUnavailableError, match=r"sgl-kernel-xpu 0\.11\.0 takes no 'max_seqlen_k', which windows"
    ):
        cached("sgl")
