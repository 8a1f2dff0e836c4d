"""A pool whose rows the kernels write holds, bit for bit, what one holds whose rows core writes."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

import polyattn
from polyattn.distributed.ranks import Ranks
from polyattn.distributed.ring import merge_over
from polyattn.registry import device_ops as registry
from polyattn.registry.device_ops import device_ops
from polyattn.serving import AttentionLayer, KVCacheConfig, KVPool
from polyattn_triton import plugin, runtime
from polyattn_triton.device_ops import DeviceOps
from polyattn_triton.kernels import launching, write

DEVICE = "cpu" if runtime.INTERPRETED else "cuda"
LAYERS = [AttentionLayer(0, 4, 2, 32, v_head_dim=16), AttentionLayer(1, 4, 1, 576, 512, scale=1.0, latent=True)]


def test_pools_on_gpus_are_written_by_them():
    assert plugin.POLYATTN_API_VERSION == 2
    ops = device_ops("cuda")
    assert ops is not None
    assert ops.name == "polyattn-triton"


@pytest.mark.parametrize(
    "kv_dtype, scales", [("auto", ""), ("fp8_e4m3", ""), ("fp8_e5m2", ""), ("fp4_e2m1", ""), ("int8", "token")]
)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_same_bits(kv_dtype, scales, layout, monkeypatch):
    layers = LAYERS[:1] if kv_dtype == "int8" else LAYERS  # of which latent rows have no format
    config = KVCacheConfig(kv_dtype, 4, layout, scales)
    pools = []
    for found in (None, device_ops("cuda")):
        monkeypatch.setattr("polyattn.serving.kv_cache.pool.device_ops", lambda device_type, found=found: found)
        pools.append(KVPool(layers, config, 8, dtype=torch.bfloat16, device=DEVICE))
    for layer in layers:
        assert [pool.writer(layer.layer_id) for pool in pools] == ["polyattn", "polyattn-triton"]
    slots = torch.tensor([9, 30, 4, 11, 12], device=DEVICE)
    given = {
        0: (torch.randn(2, 5, 32).to(DEVICE).bfloat16().transpose(0, 1), torch.randn(5, 2, 16).to(DEVICE).bfloat16())
    }
    given[1] = (torch.randn(576, 5).to(DEVICE).bfloat16().T, None)  # no dense last axis
    for pool in pools:
        for layer in layers:
            pool.make_scales(layer.layer_id, slots - 1, *given[layer.layer_id])
            pool.write(layer.layer_id, slots, *given[layer.layer_id])
    for layer in layers:
        for name in ("key_cache", "value_cache", "k_scale", "v_scale", "cache"):
            a, b = (getattr(pool.cache(layer.layer_id), name) for pool in pools)
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


class Compiled:
    """What Triton returns of a launch; of those that are repeated, the arguments are kept."""

    function, packed_metadata = 7, (4, 1)

    def __init__(self):
        self.ran = []

    def run(self, *given):
        self.ran.append((given[:3], given[9:]))

    def __getitem__(self, grid):
        return lambda *given: self.ran.append(("told", grid, given))


@pytest.fixture
def compiled(monkeypatch):
    """(a kernel, launches that Triton looked at), on a machine where it is compiled by nobody."""
    kernel, looked = Compiled(), []

    class Found:
        def __getitem__(self, grid):
            return lambda *given, **options: (looked.append((grid, given)), kernel)[1]

    driver = types.SimpleNamespace(active=types.SimpleNamespace(get_current_stream=lambda device: 11))
    monkeypatch.setattr(launching.triton.runtime, "driver", driver)
    monkeypatch.setattr(launching, "_current", lambda: None)
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(runtime, "check_device", lambda device: None)
    monkeypatch.setattr(write, "_write", Found())
    return kernel, looked


@pytest.mark.skipif(not runtime.INTERPRETED, reason="kernels that run are seen by test_rows_that_lie_otherwise")
def test_a_launch_is_looked_at_once(compiled):
    """Then what Triton compiled for is looked at: the arguments are those that it would be given, as addresses."""
    kernel, looked = compiled
    pool = KVPool(LAYERS[:1], KVCacheConfig("auto", 4), 8, dtype=torch.bfloat16, device=DEVICE)
    writer = DeviceOps().rows_writer(pool.cache(0), torch.bfloat16)
    slots = torch.arange(4, 36)

    def rows(tokens, *, wide=0, off=0):
        whole = torch.randn(2, off + tokens * (2 + wide) * 32).bfloat16()[:, off:].view(2, tokens, 2 + wide, 32)
        return whole[0, :, :2], whole[1, :, :2, :16]

    writer(slots[:5], *rows(5))
    assert (len(looked), kernel.ran) == (1, [])
    for tokens in (5, 32, 1):
        key, value = rows(tokens)
        writer(slots[:tokens], key, value)
        (grid, given) = kernel.ran.pop()
        assert grid == (-(-tokens * 2 // 64), 2, 1)
        write.write_kv(key, value, *pool.cache(0).tensors, slots=slots[:tokens], page_size=4)
        wanted = looked.pop()
        assert grid[:2] == wanted[0]
        assert list(given) == [
            a.data_ptr() if isinstance(a, torch.Tensor) else a or 0 if n < 15 else a for n, a in enumerate(wanted[1])
        ]
    for other in (rows(5, wide=1), rows(5, off=1), rows(5, off=1)):
        writer(slots[:5], *other)
        assert not kernel.ran
    assert len(looked) == 4
    writer(slots[:5], *rows(5, wide=1))
    assert (len(looked), len(kernel.ran)) == (4, 1), "those of other strides are known by now"


@pytest.mark.skipif(not runtime.INTERPRETED, reason="a kernel of Triton's own is launched there")
def test_a_repeated_launch_is_on_its_device_and_profilers_are_told(compiled, monkeypatch):
    kernel, device = compiled[0], [0]

    @contextlib.contextmanager
    def on(index):
        before, device[0] = device[0], index
        yield
        device[0] = before

    monkeypatch.setattr(launching, "_current", lambda: device[0])
    monkeypatch.setattr(launching.torch.accelerator, "device_index", on)
    monkeypatch.setattr(Compiled, "run", lambda self, *given: self.ran.append((device[0], given)))
    again = launching.Repeated(kernel, torch.device("cuda", 1))
    again((2, 1, 1), (5, 6))
    assert kernel.ran.pop() == (1, (2, 1, 1, 11, 7, (4, 1), None, None, None, 5, 6))
    assert device == [0]
    hook = launching.triton.knobs.runtime.launch_enter_hook
    hook.add(print)
    try:
        again((2, 1, 1), (5, 6))
    finally:
        hook.remove(print)
    assert kernel.ran.pop() == ("told", (2, 1, 1), (5, 6))


def test_rows_that_lie_otherwise(monkeypatch):
    """One writer, many steps: whatever rows lie like, and wherever, the bits are core's."""
    pools = []
    for found in (None, device_ops("cuda")):
        monkeypatch.setattr("polyattn.serving.kv_cache.pool.device_ops", lambda device_type, found=found: found)
        pools.append(KVPool(LAYERS[:1], KVCacheConfig("fp8_e4m3", 4), 16, dtype=torch.bfloat16, device=DEVICE))
    whole = torch.randn(9, 7, 32, device=DEVICE).bfloat16()
    odd = torch.randn(9 * 2 * 32 + 1, device=DEVICE).bfloat16()[1:].view(9, 2, 32)
    turned = torch.randn(9, 32, 2, device=DEVICE).bfloat16().mT
    given = [whole[:, :2], whole[:, 3:5], whole[:3, :2], whole[:1, :2], odd, odd, turned]
    slots = torch.arange(63, 4, -1, device=DEVICE)
    for n, key in enumerate((*given, *given)):
        at = slots[n : n + key.shape[0]]
        for pool in pools:
            pool.write(0, at, key, key[:, :, :16])
        for a, b in zip(*(pool.cache(0).tensors for pool in pools), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), n


def test_float64_stays_with_core(monkeypatch):
    monkeypatch.setattr("polyattn.serving.kv_cache.pool.device_ops", lambda device_type: registry.device_ops("cuda"))
    pool = KVPool(LAYERS[:1], KVCacheConfig("fp8_e4m3", 4), 8, dtype=torch.float64, device=DEVICE)
    assert pool.writer(0) == "polyattn"


@pytest.mark.parametrize("shape", [(3, 4, 24), (2, 3, 4, 24)])
@pytest.mark.parametrize("sunk", [False, True])
def test_results_of_ranks_are_merged(shape, sunk, monkeypatch):
    """Two ranks, one after another: what travels is in float32, the result in the dtype of the call."""
    outs = [torch.randn(shape, device=DEVICE).bfloat16() for _ in range(2)]
    lses = [torch.randn(shape[:-1], device=DEVICE) for _ in range(2)]
    lses[1][..., 2] = -torch.inf
    outs[1][..., 2, :] = 0
    sinks = torch.randn(4, device=DEVICE) if sunk else None
    found = []
    for ops in (None, device_ops("cuda")):
        monkeypatch.setattr("polyattn.distributed.ring.device_ops", lambda device_type, ops=ops: ops)

        def gathered(parts, packed, group):
            theirs = torch.cat([outs[1], lses[1].unsqueeze(-1)], -1)
            parts.copy_(torch.cat([packed, theirs]))

        for name in ("all_gather_into_tensor", "all_gather_single"):  # the new one is of torch 2.13
            monkeypatch.setattr(f"torch.distributed.{name}", gathered, raising=False)
        found.append(merge_over(Ranks(size=2), outs[0], lses[0], sinks=sinks))
    right = polyattn.merge([one.float() for one in outs], lses, sinks=sinks)
    for out, lse in found:
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(out.float(), right[0], atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(lse, right[1], atol=1e-5, rtol=1e-5)
