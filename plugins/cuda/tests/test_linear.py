"""Linear attention by fla, FlashInfer and SGLang's CuTe DSL: conformance over emulators, and what they are given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn import what_if
from polyattn.contract import AttentionRequest
from polyattn.errors import BackendUnavailableError, UnsupportedRequestError
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library

from .emulators import cutedsl, fla, flashinfer_gdn

FLA = Emulated("fla", "flash-linear-attention", "cuda:sm90@12.8")
HOPPER = Emulated("flashinfer", "gdn", "cuda:sm90@12.8")
BLACKWELL = Emulated("flashinfer", "gdn", "cuda:sm100@13.0")
CUTEDSL = Emulated("cutedsl", "sglang", "cuda:sm90@12.8")
Made = Callable[[], Library]

LINEAR: dict[str, Any] = {"family": "linear", "heads": 4, "kv_heads": 2, "method": "gdn", "state_layout": "VK"}
RAW: dict[str, Any] = {**LINEAR, "raw_gates": "softplus", "qk_norm": True, "phase": "decode", "s_relation": "one"}


def every_case() -> list[Any]:
    targets = ((FLA, fla.library, 16), (HOPPER, flashinfer_gdn.library, 12), (BLACKWELL, flashinfer_gdn.library, 3),
               (CUTEDSL, cutedsl.library, 12))  # fmt: skip
    return [
        pytest.param(target, made, case, id=f"{target.name} {case}")
        for target, made, per_row in targets
        for case in target.cases(per_row=per_row)
    ]


@pytest.mark.slow(keep=83)
@pytest.mark.parametrize(("target", "made", "case"), every_case())
def test_conformance(target: Emulated, made: Made, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    target.passes(case, made().install(monkeypatch))


def tensors(B: int, S: int, method: str = "gdn", *, raw: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(0)
    rows = {name: torch.randn(B, S, heads, 128).bfloat16() for name, heads in (("query", 2), ("key", 2), ("value", 4))}
    gates = (B, S, 4, 128) if method == "kda" else (B, S, 4)
    found = {**rows, "gate": -torch.rand(gates).bfloat16(), "beta": torch.rand(B, S, 4).bfloat16() / 128}
    if raw:
        found |= {"a_log": torch.rand(4), "dt_bias": torch.randn(gates[2:]).bfloat16()}
    return found


def run(target: Emulated, request: dict[str, Any], given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    positional = [given[name] for name in ("query", "key", "value")]
    rest = {name: tensor for name, tensor in given.items() if name not in ("query", "key", "value")}
    found: tuple[Tensor, Tensor] = target.bind(**request).forward(*positional, **rest)
    return found


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Library:
    """The emulator of fla, in the place of the library."""
    return fla.library().install(monkeypatch)


def test_fla_is_given_packed_tokens_and_states_as_they_are(emulated: Library) -> None:
    state, starts = torch.randn(2, 4, 128, 128), torch.tensor([0, 3, 8], dtype=torch.int32)
    given: dict[str, Any] = {**tensors(1, 8), "state": state, "cu_seqlens": starts}
    out, last = run(FLA, LINEAR, given)
    call = emulated.calls[-1]
    assert call.name == "chunk_gated_delta_rule"
    assert call.given["initial_state"] is state
    assert call.given["state_v_first"] is True
    assert call.given["cu_seqlens"].dtype == torch.int64
    alone, after = run(FLA, LINEAR, {**{n: t[:, 3:] for n, t in tensors(1, 8).items()}, "state": state[1:]})
    assert torch.equal(out[:, 3:], alone)
    assert torch.equal(last[1:], after)


@pytest.mark.parametrize(("grad", "kernel"), [((), "fused_recurrent_kda"), (("query",), "chunk_kda")])
def test_fla_has_other_kernels_for_single_tokens_unless_they_train(
    grad: tuple[str, ...], kernel: str, emulated: Library
) -> None:
    request = {**LINEAR, "method": "kda", "phase": "decode", "s_relation": "one", "grad": grad}
    run(FLA, request, tensors(2, 1, "kda"))
    assert [call.name for call in emulated.calls] == [kernel]


@pytest.mark.usefixtures("emulated")
def test_fla_without_an_argument_that_a_call_has_is_refused_before_the_call(monkeypatch: pytest.MonkeyPatch) -> None:

    def older(
        q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any, initial_state: Any, output_final_state: Any,
        use_qk_l2norm_in_kernel: Any, state_v_first: Any, cu_seqlens: Any, use_gate_in_kernel: Any,
        use_beta_sigmoid_in_kernel: Any, A_log: Any, dt_bias: Any,
    ) -> None: ...  # fmt: skip

    monkeypatch.setattr("fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule", older)
    FLA.bind(**RAW)
    with pytest.raises(BackendUnavailableError, match="takes no 'allow_neg_eigval', which a beta up to 2 needs"):
        FLA.bind(**RAW, beta_range=2)


def test_flashinfer_is_given_decays_and_not_their_logarithms(monkeypatch: pytest.MonkeyPatch) -> None:
    library = flashinfer_gdn.library().install(monkeypatch)
    given = tensors(2, 3)
    run(HOPPER, LINEAR, given)
    call = library.calls[-1].given
    assert torch.equal(call["g"], given["gate"].float().exp().flatten(0, 1))
    assert call["cu_seqlens"].tolist() == [0, 3, 6]


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_that_its_chunks_do_not_take_is_given_to_the_queries(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    flashinfer_gdn.library().install(monkeypatch)
    one, _ = run(HOPPER, {**LINEAR, "scale": 0.5}, tensors(1, 4))
    other, _ = run(HOPPER, {**LINEAR, "scale": scale}, tensors(1, 4))
    assert torch.equal(other, one * (scale / 0.5))


@pytest.mark.parametrize(("target", "made"), [(HOPPER, flashinfer_gdn.library), (CUTEDSL, cutedsl.library)])
def test_a_state_that_is_given_is_not_written_and_a_pool_is(
    target: Emulated, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = made().install(monkeypatch)
    state = torch.randn(3, 4, 128, 128)
    before, given = state.clone(), tensors(3, 1, raw=True)
    out, last = run(target, RAW, {**given, "state": state})
    assert torch.equal(state, before)
    slots = torch.tensor([2, -1, 0], dtype=torch.int32)
    pooled, pool = run(target, {**RAW, "state_slots": True}, {**given, "state": state.flip(0), "state_slots": slots})
    assert not pooled[1].any()
    assert torch.equal(pooled[::2], out[::2])
    assert torch.equal(pool[[2, 0]], last[[0, 2]])
    # One that the kernel cannot address is copied, and written all the same.
    odd = torch.empty(state.numel() + 1)[1:].view(state.shape).copy_(state.flip(0))
    found, moved = run(target, {**RAW, "state_slots": True}, {**given, "state": odd, "state_slots": slots})
    assert moved.data_ptr() == odd.data_ptr()
    assert torch.equal(odd, pool)
    assert torch.equal(found, pooled)
    assert len(library.calls) == 3


@pytest.mark.parametrize(("target", "made"), [(HOPPER, flashinfer_gdn.library), (CUTEDSL, cutedsl.library)])
@pytest.mark.parametrize("name", ["gate", "beta", "dt_bias"])
def test_raw_gates_of_a_dtype_that_would_be_misread_are_refused(
    target: Emulated, made: Made, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made().install(monkeypatch)
    given = tensors(1, 1, raw=True)
    given[name] = given[name].double()
    with pytest.raises(UnsupportedRequestError, match=f"{name} is torch.float64; the kernels of .* cast it"):
        run(target, RAW, given)


def test_gates_without_a_bias_have_one_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    library = cutedsl.library().install(monkeypatch)
    given = tensors(1, 1, "kda", raw=True)
    del given["dt_bias"]
    run(CUTEDSL, {**RAW, "method": "kda"}, given)
    bias = library.calls[-1].given["dt_bias"]
    assert bias.shape == (4, 128)
    assert bias.dtype == torch.bfloat16
    assert not bias.any()


def test_what_cutedsl_would_drop_it_is_not_asked_for() -> None:
    installed = ("sglang==0.5.23", "nvidia-cutlass-dsl")
    for change, word in (
        ({"qk_norm": False}, "qk_norm"),
        ({"scale": 0.5}, "scale"),
        ({"raw_gates": ""}, "raw_gates"),
        ({"raw_gates": "bounded"}, "raw_gates"),
        ({"beta_range": 2}, "beta_range"),
        ({"phase": "prefill", "s_relation": "equal"}, "phase"),
    ):
        request = AttentionRequest(**{**RAW, "dtype": "bfloat16", "head_dim": 128, **change})
        with pytest.raises(UnsupportedRequestError, match=word):
            what_if(request, platform="cuda:sm90", installed=installed, backend="cutedsl")


TRAINED = AttentionRequest(
    **{**LINEAR, "state_layout": "KV", "dtype": "bfloat16", "head_dim": 128, "grad": ("query", "key", "value")}
)


@pytest.mark.parametrize("triton", ["3.4.0", "3.6.0", "3.7.0"])
def test_gradients_of_gdn_on_hopper_need_another_triton(triton: str) -> None:
    fla = "flash-linear-attention==0.6.0"

    def chosen(request: AttentionRequest, version: str, arch: str = "sm90") -> str:
        installed = (fla, f"triton=={version}")
        return what_if(request, platform=f"cuda:{arch}", installed=installed, backend="fla").backend

    with pytest.raises(UnsupportedRequestError, match=r"triton>=3\.4,<3\.7\.1: .* take Triton 3\.7\.1 or newer"):
        chosen(TRAINED, triton)
    assert chosen(TRAINED, "3.3.1") == chosen(TRAINED, "3.7.1") == "fla"
    for right in (dataclasses.replace(TRAINED, grad=()), dataclasses.replace(TRAINED, method="kda")):
        assert chosen(right, triton) == "fla"
    assert chosen(TRAINED, triton, "sm80") == "fla"


@pytest.mark.parametrize(("D", "D_v"), [(255, 24), (128, 17), (120, 128)])
def test_fla_has_gradients_of_whole_sixteens(D: int, D_v: int) -> None:
    request = dataclasses.replace(TRAINED, method="kda", head_dim=D, v_head_dim=D_v)
    installed = ("flash-linear-attention==0.6.0", "triton==3.6.0")
    assert what_if(
        dataclasses.replace(request, grad=()), platform="cuda:sm90", installed=installed, backend="fla"
    ).backend == "fla"  # fmt: skip
    with pytest.raises(UnsupportedRequestError, match="fla, asked for by argument, cannot serve"):
        what_if(request, platform="cuda:sm90", installed=installed, backend="fla")


def test_log_decays_that_fla_would_lose_digits_by_are_held_back(emulated: Library) -> None:
    given = tensors(1, 4)
    given["gate"][:, 1:3, :2] = torch.tensor([-1e6, float("-inf")]).bfloat16()
    run(FLA, LINEAR, given)
    assert emulated.calls[-1].given["g"].amin() == -104
    assert emulated.calls[-1].given["g"].dtype == torch.bfloat16
    assert torch.equal(emulated.calls[-1].given["g"][:, ::3], given["gate"][:, ::3])


@pytest.mark.parametrize(
    ("backend", "installed", "needs"),
    [
        ("fla", ("flash-linear-attention==0.5.0",), "0.6"),
        ("flashinfer", ("flashinfer-python==0.7.1",), "0.7.2"),
        ("cutedsl", ("sglang==0.5.23",), "nvidia-cutlass-dsl"),
    ],
)
def test_a_library_that_is_too_old_or_absent_is_named(backend: str, installed: tuple[str, ...], needs: str) -> None:
    request = AttentionRequest(**{**RAW, "dtype": "bfloat16", "head_dim": 128})
    with pytest.raises((BackendUnavailableError, UnsupportedRequestError), match=needs):
        what_if(request, platform="cuda:sm90", installed=installed, backend=backend)
