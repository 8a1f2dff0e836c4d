"""benchmarks/sample_table.py and held_out.py: what random shapes showed, shipped and held out."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from polyattn.tuning.known import shipped_rows, shipped_samples
from polyattn.tuning.predicted import Model
from polyattn.tuning.rows import canonical, row_of

ROOT = Path(__file__).parents[2]


def read(*names: str) -> dict[str, Any]:
    found = {name: ROOT / "benchmarks" / "results" / f"{name}.json" for name in names}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in found.items()}


RESULTS = read("random-shapes-71", "random-shapes")
RESULT = RESULTS["random-shapes"]
TABLES = ROOT / "plugins" / "cuda" / "src" / "polyattn_cuda" / "measurements"
STALE = (
    "random-shapes-71:random_packed",
    "random-shapes-71:random_extend",
    "random-shapes-71:random_training",
    "random-shapes-71:random_decode",
    "random-shapes-71:random_decode_windows",
    "random-shapes-71:random_latent",
    "random-shapes-71:d64 H12 kv2 B1 S2247",
    "random-shapes-71:d64 H1 kv1 B44 S638 full",
    "random-shapes:random_training",
    "random-shapes:random_packed",
    "random-shapes:random_decode",
    "random-shapes:random_decode_windows",
    "random-shapes:random_latent",
    "random-shapes:d64 H2 kv2 B6 q99 KV7525 page 1",
)
"""What `triton` has other kernels for since (docs/tuning.md)."""
_SEEDS = ("111", "121", "111-121", "again", "131", "151", "111-151", "161")
OF_H200 = tuple(f"random-shapes-{seeds}" for seeds in _SEEDS)
STALE_OF_H200 = (
    "random-shapes-111-121:random_packed",
    "random-shapes-111-121:random_short",
    "random-shapes-111-121:random_latent",
    *(f"random-shapes-{seeds}:random_training" for seeds in ("111", "121", "131", "151")),
    *(f"random-shapes-{seeds}:random_extend" for seeds in ("111", "121", "111-121", "131", "151")),
    "random-shapes-121:d64 H20 kv4 B2 S526",
    "random-shapes-131:d64 H7 kv1 B51 S217 full",
    "random-shapes-131:d64 H24 kv8 B11 S244 full",
)
ALL, FEW = "everything here", "Triton and PyTorch"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module
    for name in ("held_out", "sample_table", "random_shapes", "report"):
        sys.modules.pop(name, None)


def first(kind: str) -> dict[str, Any]:
    return next(row for row in RESULT["rows"] if row["kind"] == kind and row.get("measurement"))


@pytest.mark.parametrize(
    ("table", "names", "stale"),
    [("nvidia-h100", tuple(RESULTS), STALE), ("nvidia-h200-sample", OF_H200, STALE_OF_H200)],
)
def test_the_shipped_tables_are_of_the_result_files(
    table: str, names: tuple[str, ...], stale: tuple[str, ...], benchmark: Callable[[str], ModuleType]
) -> None:
    results = read(*names)
    made = benchmark("sample_table").table(results, stale)
    file = TABLES / f"{table}.json"
    assert json.loads(file.read_text(encoding="utf-8")) == made, "python benchmarks/sample_table.py writes it"
    of = {result["machine"] for result in results.values()}
    assert {row.place.device for row in shipped_samples()} > of
    there = {canonical(row.plain()) for row in shipped_rows()}
    assert not there & {canonical(row) for row in made["measurements"]}, "a sample answers no request"


def test_a_measurement_keeps_what_was_drawn_and_where(benchmark: Callable[[str], ModuleType]) -> None:
    module = benchmark("sample_table")
    for kind in ("dense", "paged"):
        row, fields = first(kind), first(kind)["fields"]
        found = module.measurement({**row, "host": {"polyattn/triton": 12.5, "fa3": 3.0}})
        lengths = (fields["batch"], fields["q_len"], fields["kv_len"] or fields["q_len"])
        assert tuple(found.key[name] for name in ("batch", "q", "k")) == lengths
        assert found.value["host"] == {"triton": 12.5}, "libraries that were called by hand are none of the table's"
        assert (found.place, found.date) == (row_of(row["measurement"], "").place, row["measurement"]["date"])
    packed = first("packed")
    lengths = packed["fields"]["lengths"]
    key = module.measurement(packed).key
    assert (key["batch"], key["q"]) == (-(-sum(lengths) // max(lengths)), max(lengths))


def test_times_that_the_rounds_do_not_agree_on_are_none(benchmark: Callable[[str], ModuleType]) -> None:
    module = benchmark("sample_table")
    row = first("dense")
    best = row["measurement"]["value"]["backend"]
    name = f"polyattn/{best}"
    odd = {**row, "first": {**row["first"], name: row["us"][name] / 2}}
    assert module.unsteady(odd) == {name: (row["us"][name] / 2, row["us"][name])}
    found = module.measurement(odd)
    assert set(found.value["times"]) == set(row["measurement"]["value"]["times"]) - {best}
    assert found.microseconds == min(found.value["times"].values()) == found.value["times"][found.value["backend"]]
    assert module.unsteady({**row, "first": {**row["first"], name: row["us"][name] / 1.2}}) == {}
    (with_kind,) = row["measurement"]["value"]["by"]
    mine = f"polyattn/{with_kind}"
    kept = module.measurement({**row, "first": {**row["first"], mine: row["us"][mine] / 2}})
    assert "by" not in kept.value, "whose kernels they are is said of times that are there"
    all_odd = {**row, "first": {name: time / 2 for name, time in row["us"].items()}}
    assert module.table({"odd": {"rows": [all_odd]}})["measurements"] == []


def test_of_two_runs_the_later_counts(benchmark: Callable[[str], ModuleType], tmp_path: Path) -> None:
    row = first("dense")
    later = {**row, "measurement": {**row["measurement"], "date": "2027-01-01T00:00:00+00:00"}}
    for name, rows in (("a", [row, {"note": "not checked"}]), ("b", [later])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    out = tmp_path / "out.json"
    benchmark("sample_table").main([str(tmp_path / "a.json"), str(tmp_path / "b.json"), f"--out={out}"])
    (one,) = json.loads(out.read_text(encoding="utf-8"))["measurements"]
    assert one["date"].startswith("2027")


def test_what_has_other_kernels_is_left_out_whole(
    benchmark: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A family or a row of one file: the other file may have measured it since."""
    module = benchmark("sample_table")
    whole, left = (module.fresh(RESULTS, stale) for stale in ((), STALE))
    gone = {(row["model"][:6], row["family"]) for row in whole if row not in left}
    lone = {("seed 7", "random_prefill"), ("seed 7", "random_short"), ("seed 1", "random_extend")}
    assert gone == lone | {
        (seed, f"random_{family}")
        for seed, families in {
            "seed 7": ("packed", "extend", "training", "decode", "decode_windows", "latent"),
            "seed 1": ("training", "packed", "decode", "decode_windows", "latent"),
        }.items()
        for family in families
    }
    assert {row["model"][:6] for row in left if row["family"] == "random_extend"} == {"seed 1"}, "the later run's stay"
    file = tmp_path / "one.json"
    file.write_text(json.dumps(RESULT), encoding="utf-8")
    with pytest.raises(SystemExit):
        module.main([str(file), f"--out={tmp_path / 'out.json'}", "--stale", "one:random_packed", "random_packed"])
    assert "--stale random_packed: name a row, or one of the families one:random_decode, " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        module.main([f"--out={tmp_path / 'out.json'}"])
    assert "name a result file: python benchmarks/random_shapes.py" in capsys.readouterr().err


def test_the_model_has_not_seen_what_is_held_out(benchmark: Callable[[str], ModuleType]) -> None:
    module = benchmark("held_out")
    rows = [module.Timed.of(row) for row in benchmark("sample_table").fresh(RESULTS, STALE)]

    def seen(model: Model) -> set[tuple[str, Any]]:
        return {(point.text, point.lengths) for group in model.groups.values() for point in group.points}

    def place(one: Any) -> tuple[str, Any]:
        key = one.measured.key
        return canonical(key["request"]), (key["batch"], key["q"], key["k"])

    for held, count in (("all", 1), ("its seed", 5), ("its family", len({one.row["family"] for one in rows}))):
        same = module.HELD[held]
        made = module.models(rows, same)
        assert len(made) == count
        for value, model in made.items():
            assert not seen(model) & {place(one) for one in rows if same(one.row) == value}
            others = {place(one) for one in rows if same(one.row) != value}
            assert bool(seen(model) & others) == bool(others)


def test_a_row_is_chosen_for_by_what_it_is_judged_by(benchmark: Callable[[str], ModuleType]) -> None:
    """With the host's times of a call they count in the prediction too, and without them they do not."""
    module = benchmark("held_out")

    class Said:
        def at(self, *asked: Any) -> Any:
            from polyattn.tuning import Measured

            times, host = {"triton": 10.0, "torch_sdpa": 20.0}, {"triton": 90.0, "torch_sdpa": 5.0}
            return Measured((1, 1, 1), times, "", host=host, predicted="from a test")

    asked = module.Timed.of({**first("dense"), "host": {}})
    bare, timed = (asked.counted(what, Said()) for what in module.COUNTED)
    assert bare.choose(Said(), bare.machines[ALL]) == "polyattn/triton"
    assert timed.choose(Said(), timed.machines[ALL]) == "polyattn/torch_sdpa"
    assert timed.row["host"] == {"polyattn/triton": 90.0, "polyattn/torch_sdpa": 5.0}, "the run took none"
    taken = module.Timed.of({**first("dense"), "host": {"polyattn/triton": 30.0}})
    assert taken.counted("device or host", Said()).row["host"] == {"polyattn/triton": 30.0}
    assert taken.counted("the device", Said()).row["host"] == {}


def test_the_tables_say_who_was_chosen_where_it_is_low(benchmark: Callable[[str], ModuleType]) -> None:
    module = benchmark("held_out")
    rows = [
        {
            "row": f"short: {name}",
            "counted": counted,
            "installed": where,
            "held": held,
            "chosen": "triton",
            "speed": speed,
            "unsteady": unsteady,
        }
        for where in (ALL, FEW)
        for counted in module.COUNTED
        for held in ("rules", *module.HELD)
        for name, unsteady, speed in (
            ("a", "", 1.0),
            ("b", "", 0.5 if (where, counted, held) == (ALL, "the device", "its seed") else None),
            ("c", "triton 1 and 9 us", 0.2),
            ("d", "triton 9 and 1 us", None),
        )
    ]
    head = {"date": "2026-01-02", "machine": "a CPU", "versions": {"torch": "2"}, "device": "H", "timed": "2026-01-01"}
    said = module.markdown({**head, "rows": rows})
    assert f"| {ALL} | the device | its seed | 2 | 0.707 | 0.50 | 1 | 1 |" in said
    assert f"| {FEW} | device or host | its family | 1 | 1.000 | 1.00 | 0 | 0 |" in said
    assert said.count("| short: ") == 3
    assert "| short: c | triton 1 and 9 us | triton | 0.20 |" in said
    assert "| short: d | triton 9 and 1 us | triton | not timed |" in said
    assert f"| short: b | {ALL} | the device | its seed | triton | 0.50 |" in said
