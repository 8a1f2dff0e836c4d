"""polyattn in torch's slot of flash attention: torch's own calls, eager and compiled."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.varlen import varlen_attn

import polyattn
from polyattn.integrations import torch as host

BACKENDS = (None, "reference", "torch_sdpa")


@pytest.fixture(autouse=True)
def nothing_stays_installed() -> Iterator[None]:
    yield
    host.uninstall()
    assert current_flash_attention_impl() is None


def tensors(*shape: int, count: int = 3, grad: bool = True, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(sum(shape))
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for _ in range(count)]


def ranges(call: Any) -> set[str]:
    """Names of polyattn's ranges in a profile of a call."""
    with torch.profiler.profile() as profile:
        call()
    return {event.key for event in profile.key_averages() if event.key.startswith("polyattn")}


def results(call: Any, given: list[Tensor]) -> list[Tensor]:
    out = call(*given)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), given)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_and_its_gradients_are_torchs(backend: str | None, causal: bool) -> None:
    given = tensors(2, 4, 9, 16)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    want = results(call, given)
    assert host.install(backend) == current_flash_attention_impl() == host.installed()
    served = ranges(lambda: F.scaled_dot_product_attention(*given))
    assert any((backend or "torch_sdpa") in name for name in served), served
    for got, one in zip(results(call, given), want, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-5, atol=1e-5)
        assert got.stride() == one.stride()
    host.uninstall()
    assert not ranges(lambda: F.scaled_dot_product_attention(*given))
    for got, one in zip(results(call, given), want, strict=True):
        assert torch.equal(got, one)


PLACES = [("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.float16), ("cuda", torch.bfloat16)]


# What flash attention does not take, such as masks on a GPU, is plain mathematics, which stays torch's.
FLASH = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)


def exact(one: Any) -> Any:
    return one.double() if isinstance(one, Tensor) and one.dtype.is_floating_point else one


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("where, dtype", PLACES)
def test_torchs_own_samples_of_sdpa(device: Any, where: str, dtype: torch.dtype, backend: str | None) -> None:
    """Of numbers up to 9 the weights are 0 or 1, and gradients are what is left of roundings: those of torch's kernel
    are off as well. Both are measured by fp64, and ours may be off by twice as much."""
    pytest.importorskip("expecttest", reason="torch's own tests import it: pip install expecttest")
    if where != "cpu":
        device(where, what="torch's own samples of SDPA")
    from torch.testing._internal.common_methods_invocations import op_db

    (sdpa,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    samples, served = list(sdpa.sample_inputs(where, dtype, requires_grad=True)), 0
    assert len(samples) > 20
    for sample in samples:
        given = [sample.input, *(one for one in sample.args if isinstance(one, Tensor))]
        options = {name: value for name, value in sample.kwargs.items() if name != "dropout_p"}

        def call(given: list[Tensor], options: Any, *kernels: SDPBackend) -> list[Tensor]:
            given = [one.detach().requires_grad_(one.requires_grad) for one in given]
            with sdpa_kernel(list(kernels)):
                out = F.scaled_dot_product_attention(*given, **options)
            wanted = [one for one in given if one.requires_grad]
            return [out, *torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)]

        want = call(given, options, *FLASH)
        right = call([exact(one) for one in given], {n: exact(v) for n, v in options.items()}, SDPBackend.MATH)
        host.install(backend)
        got: list[Tensor] = []
        served += bool(ranges(lambda: got.extend(call(given, options, *FLASH))))  # noqa: B023
        host.uninstall()
        for ours, theirs, real in zip(got, want, right, strict=True):
            allowed = 2 * (theirs.double() - real).norm() + 4 * torch.finfo(dtype).eps * real.norm()
            assert (ours.double() - real).norm() <= allowed
    # On a GPU torch sends calls with a mask, and half of those without one, to other kernels before it asks the slot.
    assert served > (len(samples) // 4 if where == "cpu" else 3)


@pytest.mark.parametrize("mask", [torch.bool, torch.float32])
def test_masks_are_honoured(mask: torch.dtype) -> None:
    q, k, v = tensors(2, 4, 9, 16, grad=False)
    bias = torch.randn(2, 1, 9, 9) if mask != torch.bool else torch.rand(9, 9) > 0.3
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    host.install("reference")
    assert any("reference" in name for name in ranges(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=bias)))
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, attn_mask=bias), want)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("engine", ["aot_eager", "inductor"])
def test_compiled_calls_are_served_without_a_break(engine: str) -> None:
    given = tensors(2, 4, 9, 16)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True) + 1

    want = results(call, given)
    host.install("reference")
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend=engine)
    results(compiled, given)
    served = ranges(lambda: compiled(*given))
    assert any("reference" in name for name in served), served
    for got, one in zip(results(compiled, given), want, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-4)


def test_overrides_of_the_moment_decide_where_no_backend_was_named() -> None:
    q, k, v = tensors(1, 2, 4, 8, grad=False)
    host.install()
    with polyattn.use_backend("reference"):
        served = ranges(lambda: F.scaled_dot_product_attention(q, k, v))
    assert any("reference" in name for name in served)
    served = ranges(lambda: F.scaled_dot_product_attention(q, k, v))
    assert served
    assert not any("reference" in name for name in served)


def test_packed_attention_of_torch_is_served_on_a_cpu_too() -> None:
    q, k, v = tensors(9, 4, 16)
    lens = torch.tensor([0, 4, 9], dtype=torch.int32)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attn(q, k, v, lens, lens, 5, 5, window_size=(-1, 0))

    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = [
            F.scaled_dot_product_attention(*(t[a:b].transpose(0, 1) for t in (q, k, v)), is_causal=True).transpose(0, 1)
            for a, b in ((0, 4), (4, 9))
        ]
        return torch.cat(found)

    want = results(by_hand, [q, k, v])
    host.install()
    for got, one in zip(results(packed, [q, k, v]), want, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "asked", [{"alibi_slopes": torch.ones(4)}, {"seqused_k": torch.ones(2)}, {"num_splits": 1}, {"dropout_p": 0.5}]
)
def test_what_the_slot_can_say_and_is_not_served_is_refused_by_its_name(asked: dict[str, Any]) -> None:
    q, k, v = tensors(9, 4, 16, grad=False)
    lens = torch.tensor([0, 4, 9], dtype=torch.int32)
    host.install()
    (name,) = asked
    dropout = asked.get("dropout_p", 0.0)
    rest = {word: value for word, value in asked.items() if word != "dropout_p"}
    with pytest.raises(polyattn.UnsupportedRequestError, match=f"{name}=.*leave it out, or call"):
        torch.ops.aten._flash_attention_forward(q, k, v, lens, lens, 5, 5, dropout, False, False, **rest)


def test_a_name_that_no_backend_has_is_refused_and_changes_nothing() -> None:
    host.install("reference")
    with pytest.raises(polyattn.ConfigError, match=r"no backend has that name\. Did you mean 'reference'"):
        host.install("referense")
    assert host.installed() == "polyattn|reference"
    host.install("torch_sdpa@cpu")
    assert host.installed() == "polyattn|torch_sdpa@cpu"


def test_what_others_put_into_the_slot_is_left_alone() -> None:
    class Theirs:
        def remove(self) -> None: ...

    register_flash_attention_impl("theirs", register_fn=Theirs)
    host.install()
    activate_flash_attention_impl("theirs")
    assert host.installed() is None
    host.uninstall()
    assert current_flash_attention_impl() == "theirs"
    restore_flash_attention_impl()
    host.uninstall()


def test_installing_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        host.install()
        host.install("reference")
