"""SageAttention 1, 2 and 3 and SpargeAttn: held to accuracy classes over emulators, and what they are really given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn import what_if
from polyattn.contract import Accuracy, AttentionRequest
from polyattn.errors import BackendUnavailableError, UnsupportedRequestError
from polyattn.semantics import reference
from polyattn.testing import Case, controls
from polyattn.testing.emulators import Emulated
from polyattn.testing.tolerances import compare_class
from polyattn_cuda.records.diffusion import FP4, INT8_FP8, INT8_FP16, SAGE_2_ARCHS
from polyattn_cuda.sage import KERNELS

from .devices import need
from .emulators import sage as emulator

SAGE1 = Emulated("sage_attn", "sage1", "cuda:sm80@12.8")
SAGE3 = Emulated("sage_attn_3", "sageattn3", "cuda:sm120@12.8")
SPARGE = Emulated("sparge_attn", "spas-sage-attn", "cuda:sm90@12.8", options=(("topk", 1.0), ("pvthreshd", 50)))


SPARGE_BLOCKS = Emulated("sparge_attn", "blocks", "cuda:sm89@12.8", options=(("topk", 0.5), ("pvthreshd", 50)))


def sage2(arch: str) -> Emulated:
    return Emulated("sage_attn", "sage2", f"cuda:{arch}@12.8")


SAGE2 = sage2("sm90")


@pytest.mark.parametrize("case", SAGE1.cases(per_row=16), ids=str)
def test_conformance_of_sage_1(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    SAGE1.passes(case, emulator.sage1().install(monkeypatch))


@pytest.mark.parametrize("case", SAGE2.cases(per_row=16), ids=str)
def test_conformance_of_sage_2(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    SAGE2.passes(case, emulator.sage2().install(monkeypatch))


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("arch", [arch for arch in SAGE_2_ARCHS if arch != "sm90"])
def test_conformance_of_sage_2_elsewhere(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, library = sage2(arch), emulator.sage2().install(monkeypatch)
    for case in target.cases(per_row=2):
        target.passes(case, library)


@pytest.mark.parametrize("case", SAGE3.cases(per_row=8), ids=str)
def test_conformance_of_sage_3(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    SAGE3.passes(case, emulator.sage3().install(monkeypatch))


@pytest.mark.parametrize("case", SPARGE.cases(per_row=8), ids=str)
def test_conformance_of_sparge_with_every_block(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    SPARGE.passes(case, emulator.sparge().install(monkeypatch))


@pytest.mark.parametrize("case", SPARGE_BLOCKS.cases(per_row=12), ids=str)
def test_conformance_of_sparge_with_lists(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    SPARGE_BLOCKS.passes(case, emulator.sparge().install(monkeypatch))


def test_sparge_is_given_the_blocks_that_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its flags are one for each block of each head; what sees nothing is shown a block, and is zeros."""
    library = emulator.sparge().install(monkeypatch)
    q, k, v = (t.transpose(1, 2).repeat(1, 2 if n == 0 else 1, 1, 1) for n, t in enumerate(tensors(300, 200)))
    request = {"family": "block_sparse", "layout": "BHSD", "block_map": True, "block_shape": (128, 64)}
    bound = SPARGE_BLOCKS.bind(**request, heads=4, kv_heads=2, head_dim=64, s_relation="more")
    counts, indices = torch.tensor([[[1, 0, 2]]]).int(), torch.tensor([[[[3, 0], [0, 0], [0, 2]]]]).int()
    out = bound.forward(q, k, v, block_counts=counts, block_indices=indices)
    flags = library.calls[-1].given["mask_id"]
    assert flags[0, 3].int().tolist() == [[0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 1, 0]]
    assert flags.shape == (1, 4, 3, 4)
    assert not out[:, :, 128:256].any()
    for rows, keys in ((slice(0, 128), [range(192, 200)]), (slice(256, 300), [range(64), range(128, 192)])):
        at = [n for some in keys for n in some]
        right = reference.attention(
            q[:, :, rows].double(),
            k[:, :, at].double(),
            v[:, :, at].double(),
            layout="BHSD",
            compute_dtype=torch.float64,
        )
        assert compare_class("out", out[:, :, rows], right, torch.bfloat16, INT8_FP8)[0] is None


@pytest.mark.parametrize("accuracy", [INT8_FP16, INT8_FP8, FP4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_classes_tell_right_from_wrong(accuracy: Accuracy, dtype: torch.dtype) -> None:
    found = controls(dtype, torch.device("cpu"), accuracy)
    assert len(found) == 7
    assert not [control.name for control in found if not control.held]


def tensors(s_q: int, s_k: int, heads: int = 2, width: int = 64) -> list[Tensor]:
    return [torch.randn(1, size, heads, width).bfloat16() for size in (s_q, s_k, s_k)]


def test_keys_are_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these libraries centres the keys that it is given, two of them in place."""
    for target, library in (
        (SAGE1, emulator.sage1()),
        (SAGE2, emulator.sage2()),
        (SAGE3, emulator.sage3()),
        (SPARGE, emulator.sparge()),
    ):
        library.install(monkeypatch)
        q, k, v = tensors(128, 128)
        before = k.clone()
        target.bind(heads=2, kv_heads=2, head_dim=64).forward(q, k, v)
        assert torch.equal(k, before)
        assert library.calls[-1].positional in (0, 3), "nothing without a keyword but q, k and v"


@pytest.mark.parametrize(
    ("arch", "kernel", "granularity", "accumulator"),
    [
        # What `sageattn` of 2.2 dispatches to; SM100, which it does not know, as SGLang does.
        ("sm80", "qk_int8_pv_fp16_cuda", "", "fp32"),
        ("sm86", "qk_int8_pv_fp16_triton", "", ""),
        ("sm89", "qk_int8_pv_fp8_cuda", "per_thread", "fp32+fp16"),
        ("sm90", "qk_int8_pv_fp8_cuda_sm90", "per_thread", "fp32+fp32"),
        ("sm100", "qk_int8_pv_fp8_cuda", "per_thread", "fp32+fp16"),
        ("sm120", "qk_int8_pv_fp8_cuda", "per_warp", "fp32+fp16"),
        ("sm121", "qk_int8_pv_fp8_cuda", "per_warp", "fp32+fp16"),
    ],
)
def test_each_architecture_has_its_kernel(
    arch: str, kernel: str, granularity: str, accumulator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = emulator.sage2().install(monkeypatch)
    sage2(arch).bind(heads=2, kv_heads=2, head_dim=64, scale=0.3).forward(*tensors(5, 9))
    assert library.calls[-1].name == f"sageattn_{kernel}"
    given = library.calls[-1].given
    assert (given["sm_scale"], given["smooth_k"]) == (0.3, True)
    assert given.get("qk_quant_gran", "") == granularity
    assert given.get("pv_accum_dtype", "") == accumulator


def test_no_architecture_is_without_a_kernel() -> None:
    assert set(KERNELS) == set(SAGE_2_ARCHS)


def test_the_lse_is_of_keys_that_were_not_centred(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.sage2().install(monkeypatch)
    q, k, v = tensors(5, 200)
    k += 2.0
    out, lse = SAGE2.bind(heads=2, kv_heads=2, head_dim=64, lse=True, s_relation="fewer").forward(q, k, v)
    right = reference.attention(q.double(), k.double(), v.double(), return_lse=True, compute_dtype=torch.float64)
    assert out.shape == (1, 5, 2, 64)
    assert lse.shape == (1, 5, 2)
    assert float((lse - right[1]).abs().max()) < 0.05


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("name", ["sage_attn", "sparge_attn"])
def test_a_scale_of_0_or_less_goes_into_the_queries(name: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = name == "sparge_attn"
    library = (emulator.sparge() if sparse else emulator.sage2()).install(monkeypatch)
    target, options = (SPARGE, (("topk", 1.0),)) if sparse else (SAGE2, ())
    q, k, v = tensors(130, 200, width=128)
    bound = target.bind(heads=2, kv_heads=2, head_dim=128, s_relation="fewer", scale=scale, options=options)
    out = bound.forward(q, k, v)
    right = reference.attention(q.double(), k.double(), v.double(), scale=scale, compute_dtype=torch.float64)
    assert compare_class("out", out, right, torch.bfloat16, INT8_FP8)[0] is None
    assert len(library.calls) == 1


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("name", ["sage_attn", "sparge_attn"])
def test_a_channel_of_zeros_is_one_of_zeros(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaled by its largest element it would be NaN."""
    sparse = name == "sparge_attn"
    library = (emulator.sparge() if sparse else emulator.sage2()).install(monkeypatch)
    target, kv = (SPARGE, 4) if sparse else (SAGE2, 2)
    q, k, v = (torch.randn(1, 200, heads, 64).bfloat16() for heads in (4, kv, kv))
    v[:, :, 1, 5] = 0.0
    right = reference.attention(q.double(), k.double(), v.double(), compute_dtype=torch.float64)
    given = [t.transpose(1, 2).contiguous() if layout == "BHSD" else t for t in (q, k, v)]
    options = ((("topk", 1.0),)) if sparse else ()
    out = target.bind(heads=4, kv_heads=kv, head_dim=64, layout=layout, options=options).forward(*given)
    out = out.transpose(1, 2) if layout == "BHSD" else out
    assert compare_class("out", out, right, torch.bfloat16, INT8_FP8)[0] is None
    assert float(out[..., (2 if kv == 2 else 1), 5].abs().max()) == 0.0
    assert len(library.calls) == 1


@pytest.mark.filterwarnings("default")  # a vendor's own
@pytest.mark.parametrize("name", ["sage_attn", "sparge_attn"])
def test_zeros_and_tiny_scales_on_a_device(name: str, request: pytest.FixtureRequest) -> None:
    need(f"{name}@cuda", request)
    q, k, v = (torch.randn(1, 500, 4, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    v[:, :, 1, 5] = 0.0
    polyattn.configure(attention_backend_config={"sparge_attn": {"topk": 1.0}})
    try:
        found = {scale: polyattn.attention(q, k, v, scale=scale, backend=name) for scale in (None, 1e-6)}
        nothing = polyattn.attention(q, k, torch.zeros_like(v), backend=name)
    finally:
        polyattn.configure(attention_backend_config={"sparge_attn": {"topk": 0.5}})
    for scale, out in found.items():
        right = reference.attention(q.double(), k.double(), v.double(), scale=scale, compute_dtype=torch.float64)
        assert compare_class("out", out, right, torch.bfloat16, INT8_FP8)[0] is None
        assert float(out[:, :, 1, 5].abs().max()) == 0.0
    assert float(nothing.abs().max()) == 0.0


@pytest.mark.parametrize("scale", [1e-5, 1e-6, 1e-30])
@pytest.mark.parametrize("name", ["sage_attn", "sparge_attn"])
def test_a_scale_that_lets_masked_keys_back_in_goes_into_the_queries(
    name: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse = name == "sparge_attn"
    library = (emulator.sparge() if sparse else emulator.sage2()).install(monkeypatch)
    target, options = (SPARGE, (("topk", 1.0),)) if sparse else (SAGE2, ())
    q, k, v = tensors(130, 130)
    v += 1.0
    out = target.bind(heads=2, kv_heads=2, head_dim=64, scale=scale, options=options).forward(q, k, v)
    right = reference.attention(q.double(), k.double(), v.double(), scale=scale, compute_dtype=torch.float64)
    assert compare_class("out", out, right, torch.bfloat16, INT8_FP8)[0] is None
    given = library.calls[-1].given
    assert 1e-4 <= given.get("sm_scale", given.get("scale")) < 2e-4


@pytest.mark.parametrize(("s_k", "calls"), [(64, 1), (128, 1), (65, 2), (1, 2)])
def test_sage_1_is_right_for_any_number_of_keys(s_k: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    library = emulator.sage1().install(monkeypatch)
    q, k, v = tensors(9, s_k)
    out = SAGE1.bind(heads=2, kv_heads=2, head_dim=64, s_relation="fewer").forward(q, k, v)
    right = reference.attention(q.double(), k.double(), v.double(), compute_dtype=torch.float64)
    assert compare_class("out", out, right, torch.bfloat16, INT8_FP16)[0] is None
    assert len(library.calls) == calls
    assert all(not call.given["smooth_k"] for call in library.calls)


def test_the_share_of_sparge_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    library = emulator.sparge().install(monkeypatch)
    target = Emulated("sparge_attn", "spas-sage-attn", "cuda:sm90@12.8")
    target.bind(heads=2, kv_heads=2).forward(*tensors(5, 9, width=128))
    assert library.calls[-1].given["topk"] == 0.5
    assert library.calls[-1].given["q"].shape[2] == 128
    assert library.calls[-1].given["output_dtype"] == torch.bfloat16


REFUSALS: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("sage_attn", "sageattention==2.2.0", {"head_dim": 192}, "cuda:sm90", "head_dim=192"),
    ("sage_attn", "sageattention==2.2.0", {"dtype": "float32"}, "cuda:sm90", "dtype='float32'"),
    ("sage_attn", "sageattention==2.2.0", {"softcap": 20.0}, "cuda:sm90", "softcap"),
    ("sage_attn", "sageattention==2.2.0", {"family": "varlen"}, "cuda:sm90", "family"),
    ("sage_attn", "sageattention==2.2.0", {}, "cuda:sm103", "arch='sm103'"),
    ("sage_attn", "sageattention==1.0.6", {"lse": True}, "cuda:sm80", "lse"),
    ("sage_attn_3", "sageattn3", {"lse": True}, "cuda:sm120", "lse"),
    ("sage_attn_3", "sageattn3", {}, "cuda:sm100", "arch='sm100'"),
    ("sparge_attn", "spas-sage-attn", {"causal": "bottom_right"}, "cuda:sm90", "causal"),
    ("sparge_attn", "spas-sage-attn", {"head_dim": 256}, "cuda:sm90", "head_dim=256"),
]


@pytest.mark.parametrize(("name", "installed", "changes", "platform", "reason"), REFUSALS)
def test_limits(name: str, installed: str, changes: dict[str, Any], platform: str, reason: str) -> None:
    request = AttentionRequest(**changes)
    with pytest.raises(UnsupportedRequestError) as refused:
        what_if(request, platform=platform, installed=(installed,), backend=name, strict=True)
    assert reason in str(refused.value)


def test_a_version_between_them_is_neither() -> None:
    selection = what_if(
        AttentionRequest(), platform="cuda:sm90", installed=("sageattention==2.0.1",), backend="sage_attn"
    )
    assert selection.backend != "sage_attn"
    assert "sageattention 2.0.1 is installed" in "; ".join(selection.rejected["sage_attn"])


def test_an_older_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library = emulator.sage2().install(monkeypatch)

    def older(q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND") -> None: ...

    library.add("sageattention.core", **{KERNELS["sm90"][0]: older})
    with pytest.raises(BackendUnavailableError, match=r"sageattention 2\.2\.0 takes no 'qk_quant_gran'"):
        SAGE2.bind(heads=2, kv_heads=2, head_dim=64)
