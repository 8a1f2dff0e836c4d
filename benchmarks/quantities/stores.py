"""Costs of the tuning store, of many installed backends and of the command line's pages."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import polyattn
from polyattn import epoch, tuning
from polyattn.cli import main
from polyattn.contract import API_VERSION, AttentionRequest, BackendInfo, Provider, Range, hookimpl, row
from polyattn.registry.manager import PluginManager, register_plugin, reset_manager
from polyattn.selection.inspection import catalogue
from polyattn.selection.select import Policy, select
from polyattn.selection.tuned_policy import tuning_place
from polyattn.tuning import TuningStore, backend_row, request_key

from .common import Quantity

PER_REQUEST = 10
"""Measured lengths of a request."""
TIMES = {"torch_sdpa": 1.0, "reference": 2.0}
Operation = Callable[[], int]
_folder = tempfile.TemporaryDirectory(prefix="polyattn-scaling-")
_numbers = itertools.count()


def _stored(size: int) -> Path:
    """A store of so many measurements: requests of many head counts and widths, each at ten lengths."""
    path = Path(_folder.name) / f"{size}.sqlite3"
    if not path.exists():
        place = tuning_place("cpu")
        rows = []
        for number in range(size // PER_REQUEST):
            heads, head_dim = 1 + number % 500, 8 * (1 + number // 500)
            request = AttentionRequest(dtype="float32", layout="BHSD", heads=heads, kv_heads=heads, head_dim=head_dim)
            rows += [backend_row(place, request, (1, 1 << k, 1 << k), TIMES, "scaling") for k in range(PER_REQUEST)]
        TuningStore(path).record(*rows)
    return path


@contextlib.contextmanager
def _used(path: Path) -> Iterator[None]:
    before = os.environ.get("POLYATTN_TUNING_STORE")
    os.environ["POLYATTN_TUNING_STORE"] = str(path)
    tuning.reload()
    try:
        yield
    finally:
        del os.environ["POLYATTN_TUNING_STORE"]
        if before is not None:
            os.environ["POLYATTN_TUNING_STORE"] = before
        tuning.reload()


def _lookup(size: int) -> Operation:
    store, place = TuningStore(_stored(size)), tuning_place("cpu")
    key = request_key(AttentionRequest(dtype="float32", layout="BHSD", heads=4, kv_heads=4, head_dim=8))

    def operation() -> int:
        for _ in range(20):
            store.asked(place, key)
        return 20

    return operation


def _first_call(size: int) -> Operation:
    path = _stored(size)
    q = torch.randn(1, 4, 16, 8)

    def operation() -> int:
        with _used(path):
            polyattn.attention(q, q, q, layout="BHSD")
        return 1

    return operation


def _page(size: int) -> Operation:
    path = _stored(size)

    def operation() -> int:
        with _used(path), contextlib.redirect_stdout(io.StringIO()):
            code = main(["tune", "--show"])
        if code:
            raise RuntimeError(f"polyattn tune --show ended with {code}")
        return 1

    return operation


def _plugin(size: int) -> types.ModuleType:
    """So many more backends on the CPU, which take no float32, and a softcap in every third."""
    infos = []
    for number in range(size):
        more = {"softcap": True} if number % 3 == 0 else {}
        takes = row(
            family="dense", dtype=("bfloat16", "float16"), head_dim=Range(8, 256, 8), group=True, kv_heads=True,
            causal=("none", "bottom_right"), lse=True, scale=True, **more,
        )  # fmt: skip
        provider = Provider("kernels", (takes,), target="nowhere:Nothing")
        infos.append(BackendInfo(f"many_{number}", "cpu", (provider,), "one of many", 1, evidence="interpreter"))

    @hookimpl
    def polyattn_register_backends() -> list[BackendInfo]:
        return infos

    module = types.ModuleType(f"scaling_{size}")
    vars(module).update(POLYATTN_API_VERSION=API_VERSION, polyattn_register_backends=polyattn_register_backends)
    return module


def _loaded(module: types.ModuleType) -> PluginManager:
    """All plugins that are installed, and this one; the process has those that are installed again."""
    manager = PluginManager()
    reset_manager(manager)
    try:
        register_plugin(module)
        catalogue()
    finally:
        reset_manager()
    return manager


def _load(size: int) -> Operation:
    module = _plugin(size)

    def operation() -> int:
        _loaded(module)
        return 1

    return operation


def _chosen(*, bump: bool = False, **fields: Any) -> Callable[[int], Operation]:
    """Choices of requests that were not seen before, each after a new epoch or not."""

    def prepare(size: int) -> Operation:
        manager = _loaded(_plugin(size))

        def operation() -> int:
            reset_manager(manager)
            for _ in range(20):
                if bump:
                    epoch.bump()
                heads = next(_numbers) + 1
                select(AttentionRequest(heads=heads, kv_heads=heads, **fields), catalogue(), Policy())
            reset_manager()
            return 20

        return operation

    return prepare


ROWS, FEW_ROWS = (1_000, 10_000, 100_000), (100, 1_000, 10_000)
BACKENDS, FEW_BACKENDS = (20, 200, 2_000), (5, 50, 500)
PLAIN = _chosen(dtype="float32")
REWRITTEN = _chosen(dtype="bfloat16", head_dim=70, softcap=5.0)
EPOCH = _chosen(dtype="float32", bump=True)

QUANTITIES: tuple[Quantity, ...] = (
    Quantity("a request in the tuning store", "rows of the store", ROWS, FEW_ROWS, 0.3, _lookup),
    Quantity("first automatic call with a tuning store", "rows of the store", ROWS, FEW_ROWS, 0.3, _first_call),
    Quantity("a page of polyattn tune --show", "rows of the store", ROWS, FEW_ROWS, 0.5, _page),
    Quantity("a miss that is served as it is", "installed backends", BACKENDS, FEW_BACKENDS, 0.3, PLAIN),
    Quantity("a miss that is rewritten", "installed backends", BACKENDS, FEW_BACKENDS, 1.0, REWRITTEN),
    Quantity("loading backends", "installed backends", BACKENDS, FEW_BACKENDS, 1.0, _load),
    Quantity("a miss after an epoch bump", "installed backends", BACKENDS, FEW_BACKENDS, 0.3, EPOCH),
)
