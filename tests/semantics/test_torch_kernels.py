"""Around the faults of the kernels that torch brings: what `torch_sdpa` hands to them, and to which."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.adapters.cudnn_faults import has_low_lse_fault
from polyattn.backends import flex_attention, torch_sdpa
from polyattn.contract import AttentionRequest

QKV = ("query", "key", "value")
SWITCHES = {
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}


class Spy:
    """Stands for SDPA and remembers how it was called, and which kernels were allowed."""

    def __init__(self) -> None:
        self.allowed: set[str] = set()
        self.given: tuple[Tensor, ...] = ()
        self.grouped = False

    def __call__(self, *tensors: Any, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
        self.allowed = {name for name, on in SWITCHES.items() if on()}
        self.given, self.grouped = tensors[:3], enable_gqa
        with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
            return torch.nn.functional.scaled_dot_product_attention(*tensors, scale=scale, enable_gqa=enable_gqa)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    found = Spy()
    monkeypatch.setattr(torch_sdpa, "_sdpa", found)
    return found


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    before = {name: on() for name, on in SWITCHES.items()}
    yield
    assert {name: on() for name, on in SWITCHES.items()} == before, "the caller's switches are as they were"


def run(s_q: int, s_k: int, *, heads: int = 2, attn_mask: Tensor | None = None, **fields: Any) -> Tensor:
    """A call as on a CUDA device, by CPU tensors [B, S, H, D]."""
    relation = "equal" if s_q == s_k else "one" if s_q == 1 else "fewer"
    usual: dict[str, Any] = {"platform": "cuda", "arch": "sm90", "dtype": "bfloat16", "head_dim": 8, "kv_heads": 2}
    asked = {**usual, "family": "dense", "heads": heads, "s_relation": relation, **fields}
    dtype = getattr(torch, asked["dtype"])
    bound = torch_sdpa.TorchSDPA().bind(AttentionRequest(**asked).normalised())
    q, k, v = (torch.randn(1, s, h, 8, dtype=dtype) for s, h in ((s_q, heads), (s_k, 2), (s_k, 2)))
    out: Tensor = bound.forward(q, k, v, attn_mask=attn_mask)
    return out


@pytest.mark.parametrize(("s_q", "s_k"), [(128, 192), (7, 64), (192, 320), (1, 64), (1, 128), (1, 256)])
@pytest.mark.parametrize("grad", [QKV, ("query",), ("value",)])
def test_gradients_at_lengths_where_cudnn_overflows_come_from_another_kernel(
    s_q: int, s_k: int, grad: tuple[str, ...], spy: Spy
) -> None:
    """pytorch#196678: NaN in dQ where S_k % 128 is 64; cudnn-frontend#1072: in dK and dV of one query."""
    assert has_low_lse_fault(s_q, s_k)
    run(s_q, s_k, grad=grad)
    assert "cudnn" not in spy.allowed
    assert spy.allowed


@pytest.mark.parametrize(
    ("s_q", "s_k", "fields"),
    [
        (128, 128, {"grad": QKV}),
        (2, 128, {"grad": QKV}),
        (128, 200, {"grad": QKV}),
        (1, 96, {"grad": QKV}),
        (128, 192, {"grad": ()}),
    ],
)
def test_other_calls_keep_what_torch_chooses(s_q: int, s_k: int, fields: dict[str, Any], spy: Spy) -> None:
    run(s_q, s_k, **fields)
    assert spy.allowed == {name for name, on in SWITCHES.items() if on()}


def test_kernels_that_the_caller_has_switched_off_stay_off(spy: Spy) -> None:
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]):
        run(128, 192, grad=QKV)
    assert spy.allowed == {"efficient"}
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.CUDNN_ATTENTION]):
        run(128, 192, grad=QKV)
    assert spy.allowed == {"math"}, "a finite gradient, by the one kernel that always can"


def test_grouped_heads_with_a_mask_stay_with_a_fused_kernel(spy: Spy) -> None:
    """The one that is left takes masks and no groups."""
    keep = torch.rand(1, 1, 128, 192) < 0.8
    run(128, 192, heads=4, attn_mask=keep, mask="bool", grad=QKV)
    assert [t.shape[1] for t in spy.given] == [4, 4, 4]
    assert not spy.grouped
    run(128, 192, heads=4, grad=QKV)
    assert [t.shape[1] for t in spy.given] == [4, 2, 2]
    assert spy.grouped


@pytest.mark.parametrize("masked", ["no", "one", "each"])
def test_more_samples_than_a_backward_takes_are_several_calls(
    masked: str, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN's backward refuses 65,537 of them; with two heads the limit here is two samples."""
    monkeypatch.setattr("polyattn.adapters.samples.MOST", 5)
    q, k, v = (torch.randn(5, 2, 7, 8, dtype=torch.bfloat16) for _ in range(3))
    keep = None if masked == "no" else torch.rand(5 if masked == "each" else 1, 1, 7, 7) < 0.8
    asked = AttentionRequest(
        platform="cuda",
        arch="sm90",
        dtype="bfloat16",
        family="dense",
        layout="BHSD",
        head_dim=8,
        heads=2,
        kv_heads=2,
        grad=QKV,
        mask="none" if keep is None else "bool",
    )
    sizes: list[int] = []

    def counted(*tensors: Any, **kw: Any) -> Tensor:
        sizes.append(tensors[0].shape[0])
        return spy(*tensors, **kw)

    monkeypatch.setattr(torch_sdpa, "_sdpa", counted)
    out = torch_sdpa.TorchSDPA().bind(asked.normalised()).forward(q, k, v, attn_mask=keep)
    assert sizes == [2, 2, 1]
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, keep)
    # Parts and whole may be summed in another order: two roundings of bfloat16.
    assert torch.allclose(out.float(), whole.float(), rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("grad", [(), QKV])
def test_expanded_inputs_of_calls_that_want_gradients_are_copied(dtype: str, grad: tuple[str, ...], spy: Spy) -> None:
    """torch's fused backward lays the gradient of an input out as the input, where several numbers share a place."""
    request = AttentionRequest(
        platform="cuda",
        arch="sm90",
        family="dense",
        layout="BHSD",
        dtype=dtype,
        head_dim=8,
        heads=2,
        kv_heads=2,
        grad=grad,
    )
    q = torch.randn(3, 2, 5, 8, dtype=getattr(torch, dtype))
    shared = torch.randn(1, 2, 5, 8, dtype=q.dtype).expand(3, 2, 5, 8)
    torch_sdpa.TorchSDPA().bind(request).forward(q, shared, shared)
    assert all(torch.equal(given, tensor) for given, tensor in zip(spy.given, (q, shared, shared), strict=True))
    assert (0 in spy.given[1].stride()) is not bool(grad)
    assert spy.given[0] is q or dtype == "float32"


def odd(sizes: tuple[int, int, int, int]) -> Tensor:
    """A tensor whose axes of one have strides that are not of whole 16 bytes."""
    wide = torch.randn(sizes[0], sizes[1], sizes[2], sizes[3] + 3)
    return wide[..., : sizes[3]]


@pytest.mark.parametrize("grad", [(), QKV])
def test_float32_is_given_strides_of_whole_16_bytes_along_axes_of_one(grad: tuple[str, ...], spy: Spy) -> None:
    """torch's fused kernel looks at them too: "cutlassF: no kernel found to launch!"."""
    request = AttentionRequest(
        platform="cuda", arch="sm90", family="dense", dtype="float32", head_dim=4, heads=1, kv_heads=1, grad=grad
    )
    q, k, v = (odd((1, 1, 1, 4)) for _ in range(3))
    assert any(stride % 4 for stride in q.stride()[:-1])
    out = torch_sdpa.TorchSDPA().bind(request).forward(q, k, v)
    assert all(stride * t.itemsize % 16 == 0 for t in spy.given for stride in t.stride()[:-1])
    assert all(torch.equal(given.flatten(), t.flatten()) for given, t in zip(spy.given, (q, k, v), strict=True))
    assert torch.equal(out, v)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("grad", [(), QKV])
def test_a_query_that_sees_the_first_key_alone_is_given_no_other(dtype: str, grad: tuple[str, ...], spy: Spy) -> None:
    run(1, 6, dtype=dtype, grad=grad, causal="top_left")
    query, key, value = spy.given
    assert (query.shape[2], key.shape[2], value.shape[2]) == (1, 1, 1)
    run(1, 6, dtype=dtype, grad=grad)
    assert spy.given[1].shape[2] == 6
    run(3, 6, dtype=dtype, grad=grad, causal="top_left")
    assert spy.given[1].shape[2] == 6


def test_entries_that_share_a_place_keep_their_own_gradients_in_float32(spy: Spy) -> None:
    """The gradient of `as_strided` is the mean over the entries of a place."""
    request = AttentionRequest(
        platform="cuda", arch="sm90", family="dense", dtype="float32", head_dim=1, heads=1, kv_heads=1, grad=("value",)
    )
    q, k = (torch.randn(2, 1, 1, 1) for _ in range(2))
    value = torch.randn(1, 1, 1, 1).expand(2, 1, 1, 1).detach().requires_grad_()
    out = torch_sdpa.TorchSDPA().bind(request).forward(q, k, value)
    upstream = torch.tensor([1.0, 3.0]).view(2, 1, 1, 1)
    (found,) = torch.autograd.grad(out, value, upstream)
    assert torch.equal(found, upstream)


@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
@pytest.mark.parametrize("lse", [False, True])
def test_more_samples_than_a_grid_of_flex_attention_has_are_several_calls(
    mask: str, lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its grid has samples times heads along the second axis, which ends at 65,535."""
    request = AttentionRequest(
        platform="cuda",
        arch="sm90",
        family="dense",
        layout="BHSD",
        dtype="float32",
        head_dim=16,
        heads=2,
        kv_heads=2,
        lse=lse,
        mask=mask,
        causal="bottom_right",
    )
    q, k, v = (torch.randn(3, 2, 5, 16) for _ in range(3))
    keep = {"none": None, "bool": torch.rand(3, 1, 5, 5) < 0.7, "additive": torch.randn(1, 2, 5, 5)}[mask]
    # It is called without a compiler on purpose.
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    sizes: list[int] = []

    def eager(*tensors: Tensor, **given: Any) -> Any:
        sizes.append(tensors[0].shape[0])
        return flex_attention.flex_attention(*tensors, **given)

    found = []
    for most in (65_535, 4):
        monkeypatch.setattr("polyattn.adapters.samples.MOST", most)
        result = flex_attention.dense(request, eager, q, k, v, attn_mask=keep)
        found.append(result if lse else (result,))
    assert sizes == [3, 2, 1]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))


def test_a_compiler_learns_of_the_batch_only_that_it_fits() -> None:
    """A slice for each part of a batch would be compiled anew for each size."""
    frames = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal frames
        frames += 1
        return graph

    kernel = torch_sdpa._trained(torch.nn.functional.scaled_dot_product_attention)
    compiled = torch.compile(kernel, backend=counting, fullgraph=True)
    for batch in range(2, 10):
        q, k, v = (torch.randn(batch, 2, 5, 8) for _ in range(3))
        assert compiled(q, k, v).shape == q.shape
    assert frames <= 2


def test_switches_are_set_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the process's: two threads that put back what they found may leave cuDNN switched off."""
    inside, most = 0, 0
    lock, q = threading.Lock(), torch.randn(1, 2, 64, 8)

    def slow(*tensors: Any, **given: Any) -> Tensor:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        started.wait(0.2)
        with lock:
            inside -= 1
        return tensors[0]

    started = threading.Event()
    monkeypatch.setattr(torch_sdpa, "_sdpa", slow)
    threads = [threading.Thread(target=torch_sdpa._without_cudnn, args=(q, q, q)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
