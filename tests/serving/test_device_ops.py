"""Kernels of a package write the rows of a pool; where there are none, or none for its rows, core's operators do."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch

from polyattn.contract import DeviceOpsInfo
from polyattn.errors import InvalidInputError, PluginError
from polyattn.registry import device_ops
from polyattn.registry.manager import PluginManager, get_manager
from polyattn.serving import (
    AttentionBackend,
    AttentionLayer,
    ForwardBatch,
    ForwardMode,
    KVCacheConfig,
    KVPool,
    Limits,
    PageAllocator,
    RequestTable,
    StepBuffers,
)

LAYERS = [AttentionLayer(0, 2, 1, 16), AttentionLayer(1, 2, 1, 32)]
SLOTS = torch.tensor([5, 6])


class Ops:
    """Writes the caches of head dim 16."""

    name = "acme"

    def __init__(self):
        self.calls = []

    def rows_writer(self, cache, dtype):
        if cache.tensors[0].shape[-1] not in (8, 16) or dtype != torch.float32:
            return None
        return lambda slots, key, value=None, *, rows=True: self.calls.append((cache, slots, key, value, rows))


@pytest.fixture
def acme(monkeypatch):
    """A module whose `Ops` and `Other` can be registered."""
    module = types.ModuleType("acme_ops")
    module.Ops, module.Other = Ops, type("Other", (Ops,), {"name": "other"})
    monkeypatch.setitem(sys.modules, "acme_ops", module)
    monkeypatch.setattr(get_manager(), "device_ops", ())
    device_ops._first.cache_clear()
    yield module
    device_ops._first.cache_clear()


def announce(device_type, target, **more):
    """As a plugin's hook does."""
    get_manager().device_ops += (DeviceOpsInfo(device_type, target, **more),)


def pool(dtype=torch.float32, kv_dtype="auto"):
    return KVPool(LAYERS, KVCacheConfig(kv_dtype, 4), 4, dtype=dtype)


def rows(width, dtype=torch.float32):
    return torch.ones(2, 1, width, dtype=dtype)


def test_without_kernels_core_writes(acme):
    made = pool()
    assert made.writer(0) == made.writer(1) == "polyattn"
    made.write(0, SLOTS, rows(16), rows(16))
    assert made.read(0, SLOTS, torch.float32)[0].eq(1).all()


def test_kernels_write_what_they_say_they_do(acme):
    announce("cpu", "acme_ops:Ops")
    made = pool()
    assert (made.writer(0), made.writer(1)) == ("acme", "polyattn")
    key, value = rows(16), rows(16)
    made.write(0, SLOTS, key, value)
    made.make_scales(0, SLOTS, key, value)
    ((cache, slots, k, v, whole),) = device_ops.device_ops("cpu").calls
    assert cache is made.cache(0)
    assert (slots is SLOTS, k is key, v is value, whole) == (True, True, True, True)
    assert not made.read(0, SLOTS, torch.float32)[0].any(), "core wrote nothing"
    made.write(1, SLOTS, rows(32), rows(32))
    assert made.read(1, SLOTS, torch.float32)[0].eq(1).all(), "nor did the kernels write this layer"


def test_scales_alone_are_made_by_them_too(acme):
    announce("cpu", "acme_ops:Ops")
    pool(kv_dtype="fp4_e2m1").make_scales(0, SLOTS, rows(16), rows(16))
    assert [call[-1] for call in device_ops.device_ops("cpu").calls] == [False]


def test_a_backend_that_writes_too_leaves_it_to_them(acme):
    def written_by():
        table = RequestTable(4, 64, 4, [-1], [PageAllocator(4)])
        limits = Limits(max_sequences=4, max_tokens=8, max_seqlen=64)
        backend = AttentionBackend(LAYERS[:1], KVPool(LAYERS[:1], KVCacheConfig("auto", 4), 4, dtype=torch.float32),
                                   table, limits=limits, backend="torch_sdpa")  # fmt: skip
        return {selection.notes[-1].partition("written by ")[2] for selection in backend.explain().values()}

    assert written_by() == {"the kernel"}
    announce("cpu", "acme_ops:Ops")
    assert written_by() == {"the pool, before the kernel runs"}


def test_a_layer_gives_them_what_it_checked(acme):
    announce("cpu", "acme_ops:Ops")
    caches = KVPool(LAYERS[:1], KVCacheConfig("fp8_e4m3", 4), 9, dtype=torch.float32)
    table = RequestTable(4, 32, 4, [-1], [PageAllocator(9)])
    backend = AttentionBackend(LAYERS[:1], caches, table, limits=Limits(4, 8, 32), backend="torch_sdpa")
    table.extend(table.add(), 5)
    with torch.no_grad():
        backend.plan(ForwardBatch(ForwardMode.DECODE, [0], [5], [1]))
        backend.prepare()
        query, key, value = torch.randn(1, 2, 16), torch.randn(1, 1, 16), torch.randn(1, 1, 16)
        backend.forward(query, key, value, LAYERS[0])
        ((cache, slots, k, v, whole),) = device_ops.device_ops("cpu").calls
        assert (cache is caches.cache(0), k is key, v is value, whole) == (True, True, True, True)
        assert slots.tolist() == [table.pages(0, 0)[1] * 4]
        with pytest.raises(InvalidInputError, match="layer 0 has rows that were stored with the scales it has"):
            caches.set_scales(0, 2.0, 2.0)
        with pytest.raises(InvalidInputError, match="a key or value on meta; the pool is on cpu: move what is new th"):
            backend.forward(query, key, value.to("meta"), LAYERS[0])
        assert len(device_ops.device_ops("cpu").calls) == 1


def test_kernels_write_the_tables_of_steps(acme):
    """Made once for the steps of a kind, while nothing moves; they are told of all that is asked of a step."""
    made, calls = [], []

    def writer(ops, tables):
        made.append(tables)
        return lambda: calls.append(tables)

    acme.Ops.writer = writer
    try:
        announce("cpu", "acme_ops:Ops")
        table = RequestTable(4, 64, 4, [-1, 7], [PageAllocator(40), PageAllocator(40)])
        numbers = [table.add(), table.add()]
        for row in numbers:
            table.extend(row, 20)
        buffers = StepBuffers(4, 8, 16, 2)
        steps = buffers.build(ForwardBatch(ForwardMode.DECODE, numbers, [9, 6], [1, 1]), table)
        assert [one.table for one in made] == list(table.tables)
        assert (made[0].positions is steps[0].positions, made[1].positions) == (True, None)
        (view,) = made[1].views
        assert (view.page_size, view.window, view.columns, list(view.tensors)) == (4, -1, 3, ["page_table"])
        assert not steps[0].page_table.any(), "core wrote nothing"
        buffers.advance()
        assert (len(made), len(calls)) == (2, 4)
        indices = steps[1].windowed(7).at(2).kv_indices
        buffers.advance()
        assert (len(made), len(calls)) == (4, 6)
        _, windowed, finer = made[-1].views
        assert (windowed.page_size, windowed.window, list(windowed.tensors)) == (4, 7, ["page_table", "seq_lens"])
        assert (finer.page_size, finer.window, finer.columns) == (2, 7, 6)
        assert finer.tensors["kv_indices"].data_ptr() == indices.data_ptr()
    finally:
        del acme.Ops.writer


def test_rows_of_another_dtype_are_written_by_core(acme):
    announce("cpu", "acme_ops:Ops")
    made = pool()
    made.write(0, SLOTS, rows(16), rows(16, torch.float64))
    assert not device_ops.device_ops("cpu").calls
    assert pool(torch.bfloat16).writer(0) == "polyattn"


def test_the_lowest_rank_that_can_serve_does(acme):
    announce("cpu", "acme_ops:Ops", rank=50)
    announce("cpu", "acme_ops:Other", rank=10)
    announce("cpu", "acme_ops:Other", rank=10)
    announce("cpu", "nowhere:Ops", rank=1, requires=("no-such-distribution",))
    assert device_ops.device_ops("cpu").name == "other"
    assert device_ops.device_ops("xpu") is None


def test_kernels_that_cannot_be_imported_are_warned_about(acme):
    announce("cpu", "acme_ops:Missing", rank=1)
    announce("cpu", "acme_ops:Ops")
    with pytest.warns(
        RuntimeWarning, match=r"acme_ops:Missing: its kernels for serving on cpu cannot be used \(Attribute"
    ):
        assert pool().writer(0) == "acme"
    assert pool().writer(0) == "acme", "said once"


PLUGIN = """
from polyattn.contract import hookimpl
from polyattn.contract import DeviceOpsInfo, Kernel

@hookimpl
def polyattn_register_tunables():
    return [Kernel("acme.decode", ("n",), {"block_n": (16,)})]

@hookimpl
def polyattn_register_device_ops():
    return [DeviceOpsInfo("cpu", "acme_ops:Ops")]
"""
RAISES = (
    PLUGIN
    + """
@hookimpl
def polyattn_register_backends():
    raise OSError("no table")
"""
)


@pytest.mark.parametrize("source, kept", [(PLUGIN, True), (RAISES, False)])
def test_a_plugin_that_is_left_out_leaves_nothing_behind(source, kept, tmp_path, monkeypatch):
    """Its kernels would write caches although `doctor` says that it is not used."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "acme_device_plugin.py").write_text(source)
    sys.modules.pop("acme_device_plugin", None)
    manager = PluginManager({"POLYATTN_EXTRA_PLUGINS": "acme_device_plugin", "POLYATTN_PLUGINS": "acme_device_plugin"})
    manager.load()
    assert (manager.plugins["acme_device_plugin"].state == "ready") is kept
    assert [one.target for one in manager.device_ops if one.device_type == "cpu"] == ["acme_ops:Ops"] * kept
    assert ("acme.decode" in manager.kernels) is kept
    manager = PluginManager({"POLYATTN_PLUGINS": "core"})
    manager.load()
    assert not manager.device_ops, "another manager knows only its own plugins"
    assert not manager.kernels


def test_device_ops_name_a_class(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "acme_wrong_plugin.py").write_text(PLUGIN.replace("acme_ops:Ops", "acme_ops.Ops"))
    with pytest.raises(PluginError, match=r"device ops: target 'acme_ops.Ops' must read 'package.module:Class'"):
        PluginManager({}).register("acme_wrong_plugin")


def test_a_name_belongs_to_one_kernel(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    manager = PluginManager({})
    for name in ("acme_one_plugin", "acme_two_plugin"):
        (tmp_path / f"{name}.py").write_text(PLUGIN)
    manager.register("acme_one_plugin")
    with pytest.raises(PluginError, match=r"kernel 'acme.decode' is registered already; names are 'package.kernel'"):
        manager.register("acme_two_plugin")


def test_importing_imports_no_torch():
    code = "import sys, polyattn.registry.device_ops; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=1800)
