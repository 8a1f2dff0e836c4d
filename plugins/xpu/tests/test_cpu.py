"""Backends of Intel CPUs: the kit over emulators of SGLang's CPU kernels and of Intel Extension for PyTorch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn import list_backends, what_if
from polyattn.contract import AttentionRequest, judge
from polyattn.errors import BackendUnavailableError, PolyattnError
from polyattn.registry import distributions
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library, signature_of_schema
from polyattn.testing.families.cached import in_tables
from polyattn_xpu.plugin import BACKENDS

from .emulators import SIGNATURES, ipex, sgl_kernel_cpu

AMX = Emulated("intel_amx", "sgl-kernel-cpu", "cpu:amx")
IPEX = Emulated("ipex", "intel-extension-for-pytorch", "cpu")
# build: (its emulator, target)
BUILDS: dict[str, tuple[Callable[[], Library], Emulated]] = {
    "0.3": (lambda: sgl_kernel_cpu.library("0.3"), AMX),
    "0.4": (lambda: sgl_kernel_cpu.library("0.4"), AMX),
    "0.4.5": (lambda: sgl_kernel_cpu.library("0.4.5"), AMX),
    "ipex": (ipex.library, IPEX),
}
PER_ROW = {"0.4.5": 3}
"""Cases for a row of a build that computes what another one does."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    full = metafunc.config.getoption("--polyattn-full")
    found = []
    for build, (_, target) in BUILDS.items():
        few: dict[str, Any] = {"per_row": PER_ROW.get(build, 8), "dtypes": ("bfloat16",)}
        given: dict[str, Any] = {"per_row": 24} if full else few
        found += [pytest.param(build, case, id=f"{build}-{case.id}") for case in target.cases(**given)]
    metafunc.parametrize(("build", "case"), found)


def test_conformance(build: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    library, target = BUILDS[build]
    target.passes(case, library().install(monkeypatch))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Library]:
    return lambda build: BUILDS[build][0]().install(monkeypatch)


# ------------------------------------------------------------------------------------------------------ AMX, the calls

PAGED: dict[str, Any] = {
    "family": "paged",
    "layout": "THD",
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "page_size": 1,
    "phase": "decode",
    "s_relation": "one",
}
EXTEND = {**PAGED, "phase": "extend", "s_relation": "fewer", "causal": "bottom_right"}


def run(queries: tuple[int, ...] = (1, 1), **fields: Any) -> tuple[Tensor, Tensor]:
    """(result, keys of the cache) of sequences of 3 and 5 keys, the last one maybe a padding row."""
    generator = torch.Generator().manual_seed(7)
    keys, values = torch.randn(2, 9, 1, 2, 64, generator=generator).bfloat16()
    lengths = [3, 5, 0][: len(queries)]
    tables: dict[str, Any] = {
        "page_table": torch.tensor(
            [[3, 1, 7, 0, 0], [2, 4, 0, 8, 5], [0, 0, 0, 0, 0]][: len(queries)], dtype=torch.int32
        ),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, *queries]).cumsum(0).int(),
    }
    query = torch.randn(sum(queries), 4, 64, generator=generator).bfloat16()
    forward = AMX.bind(**{**PAGED, **fields}).forward
    return forward(query, keys, values, **in_tables(**tables, max_seqlen_q=max(queries), max_seqlen_k=5)), keys


MORE = {
    "0.3": set(),
    "0.4": {"k_cache_scale", "is_cross_attn", "encoder_lens"},
    "0.4.5": {"is_cross_attn", "sliding_window_size", "encoder_lens", "sinks"},
}
"""What decode of a build wants to be told beyond the first one's arguments."""


@pytest.mark.parametrize("build", MORE)
def test_decode(build: str, install: Callable[[str], Library]) -> None:
    library = install(build)
    run(scale=0.5)
    given = library.calls[-1].given
    assert library.calls[-1].positional == 0, "names of arguments differ between builds, and so do their places"
    assert given["loc"].tolist() == [7, 5], "the slots of the last tokens"
    assert given["key"].dtype == torch.bfloat16
    assert given["seq_lens"].dtype == given["req_pool_indices"].dtype == torch.int64
    assert (given["sm_scale"], given["logit_cap"], given["attn_logits"].shape) == (0.5, 0.0, (2, 4, 8, 65))
    assert {"v_cahce", *MORE[build]} <= set(given)
    assert {given[name] for name in MORE[build]} <= {None, False}, "all of it is off"


def test_rows_without_keys_never_reach_the_kernels(install: Callable[[str], Library]) -> None:
    library = install("0.4")
    for queries, fields in (((1, 1, 1), PAGED), ((2, 3, 1), EXTEND), ((1, 0, 1), PAGED), ((0, 3, 1), EXTEND)):
        result, _ = run(queries, **fields)
        assert bool((result[-1] == 0).all())
        assert bool(result.isfinite().all())
        present = [n for n, count in enumerate(queries[:2]) if count]
        assert library.calls[-1].given["req_pool_indices"].tolist() == present


def test_extend_gives_the_new_keys_apart(install: Callable[[str], Library]) -> None:
    library = install("0.3")
    _, keys = run((2, 3), **EXTEND)
    given = library.calls[-1].given
    assert torch.equal(given["k_extend"], keys[:, 0][[1, 7, 0, 8, 5]])
    assert given["extend_seq_lens"].tolist() == [2, 3]
    assert given["extend_start_loc"].tolist() == [0, 2]
    assert given["extend_seq_lens"].dtype == given["req_to_token"].dtype == torch.int32


def newer(lib: Library, more: str) -> None:
    """The decode operator of a build with arguments of another, and one name spelt right."""
    schema = SIGNATURES.entries["sgl_kernel_cpu@0.3.decode_attention_cpu"]["schema"].replace(
        ") -> ()", f", {more}) -> ()"
    )
    schema = schema.replace("v_cahce", "v_cache")
    body = lib.modules[sgl_kernel_cpu.OPS].decode_attention_cpu.__wrapped__

    def decode_attention_cpu(**given: Any) -> None:
        body(**given)

    lib.add(
        sgl_kernel_cpu.OPS,
        decode_attention_cpu=lib.held("decode_attention_cpu", signature_of_schema(schema), decode_attention_cpu),
    )


def test_what_a_newer_build_wants_is_switched_off(install: Callable[[str], Library]) -> None:
    library = install("0.3")
    newer(library, "float k_scale, int sliding_window_size, Tensor? sinks, bool is_causal, bool is_cross, int n=3")
    assert bool(run()[0].isfinite().all())
    off = {"k_scale": 1.0, "sliding_window_size": 0, "sinks": None, "is_causal": True, "is_cross": False}
    given = library.calls[-1].given
    assert {name: given[name] for name in off} == off
    assert "n" not in given
    assert "v_cache" in given


@pytest.mark.parametrize("build", MORE)
def test_real_operators_of_torch(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same schemas, registered with torch: their arguments are read, and they are called, as a build's would be."""
    emulated = sgl_kernel_cpu.library(build)
    monkeypatch.setitem(sys.modules, "sgl_kernel", emulated.modules["sgl_kernel"])
    with torch.library._scoped_library("sgl_kernel", "FRAGMENT") as registry:
        for name in ("decode_attention_cpu", "extend_attention_cpu"):
            body = getattr(emulated.modules[sgl_kernel_cpu.OPS], name)
            registry.define(SIGNATURES.entries[f"sgl_kernel_cpu@{build}.{name}"]["schema"].partition("::")[2])
            registry.impl(name, lambda *args, body=body: body(*args), "CPU")
        for queries, fields in (((1, 1), PAGED), ((2, 3), EXTEND)):
            assert bool(run(queries, **fields)[0].isfinite().all())
    assert [call.name for call in emulated.calls] == ["decode_attention_cpu", "extend_attention_cpu"]


def test_what_is_not_known_is_refused(install: Callable[[str], Library]) -> None:
    newer(install("0.3"), "int head_block")
    with pytest.raises(
        BackendUnavailableError, match=r"wants head_block \(int\), which this version of polyattn does not"
    ):
        run()


# ---------------------------------------------------------------------------------------------- IPEX, never by itself


def test_ipex_is_never_automatic() -> None:
    info = next(info for info in BACKENDS if info.name == "ipex")
    assert (info.priority, info.auto) == (None, ())
    installed = ("intel-extension-for-pytorch==2.8.0", "torch==2.8.0")
    chosen = what_if(AttentionRequest(family="varlen"), platform="cpu:amx", installed=installed)
    assert chosen.backend != "ipex"
    asked = what_if(AttentionRequest(family="varlen"), platform="cpu:amx", installed=installed, backend="ipex")
    assert asked.backend == "ipex"
    assert "archived" in info.note
    assert "security advisories" in info.note


def test_the_doctor_warns_of_ipex(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor = importlib.import_module("polyattn.cli.doctor")
    assert not [sentence for sentence in doctor.examine()["warnings"] if "intel" in sentence]
    real = distributions.distribution_version

    def with_ipex(name: str) -> str | None:
        return "2.8.0" if name == "intel-extension-for-pytorch" else real(name)

    for module in (distributions, doctor):
        monkeypatch.setattr(module, "distribution_version", with_ipex)
    (said,) = [sentence for sentence in doctor.examine()["warnings"] if "intel" in sentence]
    assert said.startswith("intel-extension-for-pytorch 2.8.0 is installed: its project was archived")
    assert "security issues" in said


def test_ipex_needs_a_torch_of_its_own() -> None:
    with pytest.raises(PolyattnError, match=r"torch .* is installed, >=2\.8,<2\.9 is needed"):
        what_if(
            AttentionRequest(family="varlen"),
            platform="cpu",
            installed=("intel-extension-for-pytorch==2.8.0", "torch==2.13.0"),
            backend="ipex",
            strict=True,
        )


def test_ipex_is_told_what_it_ignores(install: Callable[[str], Library]) -> None:
    library = install("ipex")
    request = {"family": "varlen", "layout": "THD", "heads": 4, "kv_heads": 2, "head_dim": 32, "dtype": "float32"}
    verdict = judge(IPEX.rows, IPEX.request(**request, scale=0.5))
    assert verdict
    assert verdict.lowerings == ("fold_scale",)
    query, key, value = torch.randn(5, 4, 32), torch.randn(7, 2, 32), torch.randn(7, 2, 32)
    starts = torch.tensor([0, 2, 5]).int(), torch.tensor([0, 3, 7]).int()
    tables = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))
    IPEX.bind(**request, s_relation="fewer").forward(query, key, value, **tables, max_seqlen_q=3, max_seqlen_k=4)
    given = library.calls[-1].given
    assert (given["softmax_scale"], given["is_causal"], given["pdropout"]) == (32**-0.5, False, 0.0)
    # The public method has no defaults, and says Tensor where the one behind it takes None alone.
    public = SIGNATURES.signature("intel_extension_for_pytorch.VarlenAttention.apply_function")
    assert set(public.bind(**given).arguments) == set(public.parameters)


# ----------------------------------------------------------------------------------------------------- planted errors

CPU, IPEX_MODULE = "polyattn_xpu.sgl_kernel_cpu", "polyattn_xpu.ipex"


def _batch(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A batch that tells the kernels something else."""

    def change(real: Any) -> Any:
        class Batch(real):  # type: ignore[misc]
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                self.given.update({name: function(self) for name, function in changes.items()})

        return Batch

    return change


def _given(**more: Any) -> Callable[[Any], Any]:
    """Functions of a library that `load` finds, called with other keywords."""

    def change(real: Any) -> Any:
        def load(*args: Any) -> Any:
            function = real(*args)
            return lambda **given: function(**{**given, **more})

        return load

    return change


def _zeros(real: Any) -> Any:
    """What SGLang hands to decode: parts that get no keys have an LSE of 0."""

    class Operator(real):  # type: ignore[misc]
        def __call__(self, **given: Any) -> None:
            super().__call__(**{n: torch.zeros_like(t) if n == "attn_logits" else t for n, t in given.items()})

    return Operator


PLANTED: list[tuple[str, str, str, Callable[[Any], Any]]] = [
    ("0.3", CPU, "_Operator", _zeros),
    ("0.4", CPU, "_Batch", _batch(sm_scale=lambda batch: 1.0)),
    ("0.4", CPU, "_Batch", _batch(req_pool_indices=lambda batch: batch.mine.flip(0))),
    ("0.4", CPU, "_Batch", _batch(req_to_token=lambda batch: batch.table.roll(1, 1))),
    ("0.4", CPU, "_Batch", _batch(logit_cap=lambda batch: 0.0)),
    ("0.4", CPU, "_rows", lambda real: lambda request, caches: tuple(t.roll(1, 0) for t in real(request, caches))),
    ("0.3", CPU, "_extend", lambda real: lambda operator, batch, result: None),
    ("ipex", IPEX_MODULE, "load", _given(is_causal=False)),
]


@pytest.mark.parametrize(("build", "module", "name", "change"), PLANTED, ids=[str(i) for i in range(len(PLANTED))])
def test_a_planted_error_is_found(
    build: str,
    module: str,
    name: str,
    change: Callable[[Any], Any],
    install: Callable[[str], Library],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(build)
    found = importlib.import_module(module)
    monkeypatch.setattr(found, name, change(getattr(found, name)))
    target = BUILDS[build][1]
    assert any(target.caught([case]) for case in target.cases(per_row=16, dtypes=("bfloat16",)))


# ------------------------------------------------------------------------------------------------------------- limits

REFUSED: list[tuple[Emulated, dict[str, Any], str]] = [
    (AMX, {**PAGED, "head_dim": 80}, "head_dim=80 is not 32 to 256, a multiple of 32"),
    (AMX, {**PAGED, "dtype": "float32"}, "dtype='float32' is not bfloat16"),
    (AMX, {**EXTEND, "dtype": "float16"}, "dtype='float16' is not bfloat16"),
    (AMX, {**PAGED, "window": (17, -1)}, "window=(17, -1) is not declared"),
    (AMX, {**PAGED, "sinks": True}, "sinks=True is not declared"),
    (AMX, {**PAGED, "lse": True}, "lse=True is not declared"),
    (AMX, {**PAGED, "kv_layout": "HND"}, "kv_layout='HND'"),
    (AMX, {**EXTEND, "causal": "none"}, "causal='none' is not bottom_right"),
    (AMX, {**EXTEND, "softcap": 30.0}, "softcap=30.0 is not declared"),
    (AMX, {**EXTEND, "phase": "verify", "spec_topk": 1}, "phase='verify'"),
    (Emulated("intel_amx", "sgl-kernel-cpu", "cpu"), PAGED, "features=() is not with amx"),
    (IPEX, {"family": "varlen", "causal": "bottom_right", "s_relation": "fewer"}, "s_relation='fewer' is not equal"),
    (IPEX, {"family": "varlen", "window": (17, -1)}, "window=(17, -1) is not declared"),
    (IPEX, {"family": "varlen", "softcap": 30.0}, "softcap=30.0 is not declared"),
    (IPEX, {"family": "varlen", "dropout": 0.1}, "dropout=0.1 is not declared"),
    (IPEX, {"family": "varlen", "lse": True}, "lse=True is not declared"),
    (IPEX, {"family": "varlen", "v_head_dim": 64}, "v_head_dim=64 is not declared"),
]


@pytest.mark.parametrize(("target", "changes", "words"), REFUSED)
def test_refused_outside_the_limits(target: Emulated, changes: dict[str, Any], words: str) -> None:
    verdict = judge(target.rows, target.request(**changes))
    assert not verdict
    assert words in "; ".join(verdict.reasons)


PASSED: list[tuple[Emulated, dict[str, Any]]] = [
    *((AMX, {**PAGED, "head_dim": d, "softcap": 30.0}) for d in (32, 64, 96, 128, 256)),
    (AMX, {**PAGED, "head_dim": 192, "v_head_dim": 128}),
    (AMX, {**PAGED, "family": "mla", "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "scale": 0.1}),
    (IPEX, {"family": "varlen", "head_dim": 80, "causal": "bottom_right"}),
]


@pytest.mark.parametrize(("target", "changes"), PASSED)
def test_served_within_the_limits(target: Emulated, changes: dict[str, Any]) -> None:
    verdict = judge(target.rows, target.request(**changes))
    assert verdict
    assert verdict.lowerings == ()


def test_without_amx_it_is_torch_native() -> None:
    request = AttentionRequest(family="paged", page_size=16, phase="decode", s_relation="one")
    assert (
        what_if(request, platform="cpu", installed=("sgl-kernel-cpu",), backend="intel_amx").backend == "torch_native"
    )
    assert what_if(request, platform="cpu:amx", installed=("sgl-kernel-cpu",)).backend == "intel_amx"
    status = {s.name: s for s in list_backends("cpu")}["intel_amx"]
    assert status.evidence.startswith("hardware")
