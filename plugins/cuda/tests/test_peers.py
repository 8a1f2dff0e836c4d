"""The libraries that the benchmark calls by hand, over their emulators: right where they serve, refused elsewhere."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from polyattn.bench import Row
from polyattn.bench.measure import check, make_inputs
from polyattn.bench.peers import load
from polyattn.bench.workloads import workload
from polyattn.errors import UnsupportedRequestError

from .emulators.flash_attention import fa4, vllm
from .emulators.trtllm import library as flashinfer

PEERS = Path(__file__).parents[3] / "benchmarks" / "peers"
CPU = torch.device("cpu")
PAGED = Row(family="f", kind="paged", heads=8, kv_heads=2, head_dim=64, batch=3, q_len=1, kv_len=56, page_size=16)
DENSE = Row(family="f", kind="dense", heads=8, kv_heads=2, head_dim=64, batch=2, q_len=40)
PACKED = Row(family="f", kind="packed", heads=8, kv_heads=2, head_dim=64, lengths=(40, 9, 17))


def of(row: Row, **changed: object) -> Row:
    return dataclasses.replace(row, **changed)  # type: ignore[arg-type]


CHUNK = of(PAGED, q_len=7)
FP8 = of(PAGED, kv_dtype="fp8_e4m3")
SHARED = of(PAGED, shared=32, kv_len=72)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch):
    for library in (flashinfer(arch=90), vllm(), fa4()):
        library.install(monkeypatch)
    yield load([str(PEERS)])
    for name in [name for name in sys.modules if name.startswith("polyattn_bench_peers")]:
        del sys.modules[name]  # it has imported emulators


SERVED = [
    *(("flashinfer", row) for row in (PAGED, FP8, SHARED, CHUNK, DENSE, PACKED, of(PAGED, window=(15, 0)))),
    *(("flashinfer_fa2", row) for row in (PAGED, FP8, CHUNK, of(FP8, q_len=7), of(CHUNK, softcap=20.0))),
    *(("flashinfer_fa3", row) for row in (CHUNK, DENSE, of(DENSE, causal=False, kv_len=24), of(SHARED, q_len=5))),
    *(("flashinfer_cascade", row) for row in (SHARED, of(SHARED, q_len=5), of(SHARED, softcap=20.0))),
    ("xqa", PAGED),
    *(("fa3", row) for row in (DENSE, of(DENSE, sinks=True, window=(15, 0)))),
    *(("fa4", row) for row in (DENSE, of(DENSE, kind="training"), of(DENSE, sinks=True), of(PACKED, sinks=True))),
]


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize("name, row", SERVED, ids=lambda value: value if isinstance(value, str) else value.name)
def test_a_library_called_by_hand_is_right(peers, name, row):
    inputs = make_inputs(workload(row, CPU), CPU)
    call = peers[name].prepare(inputs)
    for number in range(inputs.count):
        verdict = check(inputs.only(number), call(number))
        assert (verdict.ok, verdict.reason) == (True, ""), f"of set {number}"


@pytest.mark.parametrize(
    "name, row, said",
    [
        ("flashinfer", of(PAGED, sinks=True), "called here without sinks"),
        ("flashinfer_fa3", of(FP8, q_len=7), "called here without kv_dtype, kv_scales"),
        ("flashinfer_cascade", PAGED, "takes rows with a prefix that all sequences share"),
        ("flashinfer_cascade", of(SHARED, window=(15, 0)), "called here without window"),
        ("flashinfer_cascade", DENSE, "takes paged rows, this one is dense"),
        ("xqa", CHUNK, "called here without causal"),
        ("xqa", of(PAGED, heads=66), "takes up to 32 query heads for a key head, this row has 33"),
        ("flashinfer", of(DENSE, head_dim=72), r"takes head dims \(64, 64\), \(128, 128\), \(256, 256\), \(192, 128\)"),
        ("flashinfer_fa2", of(PAGED, head_dim=96), r"this row has \(96, 96\)"),
        ("fa4", of(DENSE, kind="training", sinks=True), "called here without sinks"),
    ],
)
def test_what_a_library_called_by_hand_would_drop_it_refuses(peers, name, row, said):
    inputs = make_inputs(workload(row, CPU), CPU)
    with pytest.raises(UnsupportedRequestError, match=said):
        peers[name].prepare(inputs)
