"""The requests that a device's table is made of: they can be measured, and most models' are like one of them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

from polyattn import tuning
from polyattn.bench.measure.traces import read_trace
from polyattn.bench.sheets import read
from polyattn.bench.workloads import workload
from polyattn.tuning import Place, advise, backend_row
from polyattn.tuning.rows import canonical

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")
HERE = Place("chip", "a1")


@pytest.fixture(scope="module")
def module():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("table_requests")


def test_every_request_can_be_measured_and_is_there_once(module):
    found = module.workloads(CPU)
    for one in found:
        one.check_makeable()
    assert len({canonical(one.key()) for one in found}) == len(found)
    assert {one.request.layout for one in found} == {"BSHD", "BHSD", "THD"}
    assert {one.request.family for one in found} == {"dense", "varlen", "paged", "mla"}
    assert any(one.request.tree for one in found)


def test_it_is_a_trace(module, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["table_requests.py"])
    module.main()
    path = tmp_path / "requests.jsonl"
    path.write_text(capsys.readouterr().out)
    assert [one.workload for one in read_trace([path])] == module.workloads(CPU)
    assert {json.loads(line)["backend"] for line in path.read_text().splitlines()} == {""}


UNLIKE = {
    "MQA over heads of 64": ("gqa_prefill_mqa", "gqa_decode_mqa"),
    "a shared prefix": ("decode_shared_8b",),
    "training with a softcap": ("train_gemma2_9b",),
}
"""What no request of the table is like."""


@pytest.fixture
def empty_store(monkeypatch, tmp_path):
    monkeypatch.setenv("POLYATTN_TUNING_STORE", str(tmp_path / "store.sqlite3"))
    monkeypatch.delenv("POLYATTN_TUNING", raising=False)
    monkeypatch.setattr("polyattn.tuning.known.shipped_rows", list)
    tuning.reload()
    yield
    tuning.reload()


@pytest.mark.usefixtures("empty_store")
def test_the_requests_of_public_models_are_like_one_of_them(module):
    tuning.record(
        *(backend_row(HERE, one.request, one.buckets, {"a": 1.0, "b": 2.0}, "a test") for one in module.workloads(CPU))
    )
    rows = [row for family in read([BENCHMARKS / "sheets"]).families for row in family.rows]
    asked = {row.id: (row.family, workload(row, CPU).request) for row in rows}
    assert all(request.k_bucket for _, request in asked.values()), "with their lengths"
    lacking = {family for family, request in asked.values() if not advise(request, lambda: HERE).order}
    assert lacking == {family for families in UNLIKE.values() for family in families}
