"""The scripts that measure what adapters and engines cost, in the smallest form, on the CPU."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """A benchmark's module, by name; what it set for its own process is undone."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    return importlib.import_module


def test_an_adapter_is_measured_beside_its_library(script):
    module = script("adapter_overhead")
    rows = {(row["kind"], row["library"]): row for row in module.measured(torch.device("cpu"), 3, 5)}
    assert len(rows) == sum(map(len, module.PAIRS.values()))
    sdpa = rows["dense", "torch SDPA, the kernel that torch picks"]
    assert list(sdpa["us"]) == ["by hand", "functional", "bound"]
    assert sdpa["us"]["by hand"]["added"] == 0 < sdpa["us"]["functional"]["call"]
    assert rows["dense", "FlashAttention 3, packed"]["not_here"] == "No module named 'vllm'"
    assert rows["paged", "FlashInfer, XQA"]["not_here"].endswith("has no backend on cpu (it is known on cuda)")
    text = module.markdown({**module.report.stamp("adapter-overhead"), "rows": list(rows.values())})
    assert "| torch SDPA, the kernel that torch picks | torch_sdpa |" in text
    assert "- FlashAttention 3, packed, dense: No module named 'vllm'" in text


def test_a_result_says_what_was_asked_and_not_where_it_went(script, monkeypatch):
    report = script("report")
    words = ["engine.py", "--json", "/somewhere/engine.json", "--requests", "32", "--resume", "--json=/elsewhere"]
    monkeypatch.setattr(sys, "argv", words)
    assert report.stamp("engine")["command"] == "python benchmarks/engine.py --requests 32"


def test_an_adapter_that_computes_something_else_is_not_timed(script):
    module = script("adapter_overhead")
    with pytest.raises(SystemExit, match=r"bound differs from the library by hand by 1\.0e.00; nothing is timed"):
        module.check({"by hand": lambda: torch.ones(3), "bound": lambda: torch.zeros(3)})


def test_a_layer_of_serving_costs_little_more_than_its_kernel(script, monkeypatch):
    module = script("serving_layer")
    import polyattn
    from polyattn.registry.manager import reset_manager

    device = torch.device("cpu")
    module.OUT[device] = torch.zeros(0)
    try:
        polyattn.register_plugin(module, name="nothing")
        found = module.measured(2, rounds=3, calls=20, device=device)
    finally:
        reset_manager()
    assert list(found) == ["kernel by hand", "forward_decode", "forward", "with new keys", "paged_attention", "step"]
    assert all(figures["us"] > 0 for name, figures in found.items() if name in ("kernel by hand", "step"))


PROGRAM = """
import torch, polyattn
x = torch.randn(1, 64, 2, 32)
for _ in range(2):
    polyattn.attention(x, x, x)
    print("attended in 0.125 s; done")
"""


@pytest.mark.slow
def test_a_program_is_traced_tuned_and_compared(script, monkeypatch, tmp_path, capsys):
    module = script("tuned_programs")
    program, path = tmp_path / "program.py", tmp_path / "tuned.json"
    program.write_text(PROGRAM)
    monkeypatch.setattr(sys, "argv", ["tuned_programs.py", "--json", str(path), str(program)])
    module.main()
    result = json.loads(path.read_text())
    (row,) = result["rows"]
    assert row["work"] == {"without": 0.125, "with": 0.125}
    assert all(seconds > 0 for seconds in row["process"].values())
    ((before, count),) = [(one["before"], one["count"]) for one in row["requests"]]
    assert (before, count) == ("torch_sdpa@cpu", 2)
    assert module.markdown(result) in capsys.readouterr().out


@pytest.mark.slow
def test_a_program_that_says_no_time_is_not_compared(script, tmp_path):
    module = script("tuned_programs")
    program = tmp_path / "program.py"
    program.write_text("import torch, polyattn; x = torch.randn(1, 64, 2, 32); polyattn.attention(x, x, x)")
    with pytest.raises(SystemExit, match=r"program.py was run twice and is to say .* how long it took; it said \[\]"):
        module.measured(program, tmp_path)
    program.write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit, match=r"polyattn trace .* ended with 3"):
        module.measured(program, tmp_path)


def test_batch_invariance_is_timed_beside_what_it_replaces(script, monkeypatch, tmp_path, capsys):
    module = script("batch_invariance")
    path = tmp_path / "invariance.json"
    monkeypatch.setattr(module, "ROWS", module.ROWS[:1])
    monkeypatch.setattr(sys, "argv", ["batch_invariance.py", "--quick", "--device", "cpu", "--json", str(path)])
    module.main()
    result = json.loads(path.read_text())
    (row,) = result["rows"]
    assert list(row["us"]) == list(module.WAYS)
    assert module.markdown(result) in capsys.readouterr().out
    lacking = {**row, "us": {"batch-invariant": 2.0}, "not_timed": {"as the batch fills the chip": "no memory"}}
    assert module.markdown({**result, "rows": [lacking]}).endswith("| - | 2.0 | - |")


def test_both_engines_run_in_the_quick_form(script, monkeypatch, tmp_path, capsys):
    module = script("engine")
    path = tmp_path / "engine.json"
    monkeypatch.setattr(sys, "argv", ["engine.py", "--quick", "--device", "cpu", "--json", str(path)])
    module.main()
    result = json.loads(path.read_text())
    (row,) = result["rows"]
    assert (row["requests"], row["replayed"]) == (2, False)
    assert set(row["tokens_per_second"]) | set(row["failed"]) == {"polyattn", "transformers sdpa"}
    assert set(row["backends"]) == {"prefill", "decode"}
    assert module.markdown(result) in capsys.readouterr().out


def test_the_best_of_transformers_counts(script):
    module = script("engine")
    rates = {"polyattn": 300.0, "transformers sdpa": 100.0, "transformers flash_attention_3": 200.0}
    row = {**module.begun(32, 128, 16), "tokens_per_second": rates, "failed": {"transformers x": "not here"}}
    row["replayed"] = True
    assert module.ratio(row) == (1.5, "transformers flash_attention_3")
    head = {**module.report.stamp("engine"), "parameters": 1.2e9, "context": 4096}
    text = module.markdown({**head, "rows": [row]})
    assert "| 32 | 128, 16 | 300 | 100 | 200 | 1.50 x transformers flash_attention_3 | 1.2 | yes |" in text
    assert text.endswith("- transformers x: not here")
    row["seconds"] = {"polyattn": [[1.0, 2.0], [1.0, 3.0]], "transformers flash_attention_3": [[1.0, 4.0], [1.0, 2.0]]}
    assert "| 1.50 x transformers flash_attention_3, by round 4.23 to 25.40 |" in module.markdown(
        {**head, "rows": [row]}
    )
    assert module.ratio({**row, "tokens_per_second": {"polyattn": 300.0}}) is None


def test_an_engine_result_has_the_versions_of_the_libraries_that_are_here(script, monkeypatch):
    module = script("engine")
    monkeypatch.setattr(module, "distribution_version", {"flash-attn": "2.8.3"}.get)
    assert module.libraries() == {"flash-attn": "2.8.3"}


def test_an_engine_run_goes_on_where_it_was_stopped(script, monkeypatch, tmp_path):
    module = script("engine")
    path = tmp_path / "engine.json"
    head = {**module.report.stamp("engine"), "parameters": 1e9, "context": 9, "quick": False}
    model = argparse.Namespace(config=argparse.Namespace(vocab_size=9), device=torch.device("cpu"))
    engine = argparse.Namespace(backends={"prefill": "a"}, memory=argparse.Namespace(graphs=None))
    args = argparse.Namespace(
        requests=(2,),
        context=9,
        new=5,
        their_new=3,
        rounds=2,
        implementations=("sdpa",),
        backend=None,
        quick=False,
        json=path,
    )
    runs = []

    def seconds_of(run, new, count):
        if len(runs) == stop:
            raise KeyboardInterrupt
        runs.append((run, new))
        return {1: 1.0, 3: 1.0 + len(runs), 5: 1.0 + len(runs)}[new]

    monkeypatch.setattr(module, "seconds_of", seconds_of)
    monkeypatch.setattr(module, "ours", lambda *_: ("ours", engine))
    monkeypatch.setattr(module, "theirs", lambda model, prompts, name, new, more: name)
    stop = 4  # one run to be warm, a round of ours, half of one of theirs
    with pytest.raises(KeyboardInterrupt):
        module.run({**head, "rows": []}, model, args)
    stopped = module.before(path, head)
    assert stopped["rows"][0]["seconds"] == {"polyattn": [[1.0, 4.0]]}
    runs.clear()
    stop = 99
    module.run({**head, "rows": stopped["rows"]}, model, args)
    assert runs == [("ours", 5), ("sdpa", 1), ("sdpa", 3), ("ours", 1), ("ours", 5), ("sdpa", 1), ("sdpa", 3)]
    (row,) = module.before(path, head)["rows"]
    assert row["tokens_per_second"] == {"polyattn": 2.7, "transformers sdpa": 1.3}, "of the fastest rounds"
    runs.clear()
    module.run(module.before(path, head), model, args)
    assert not runs, "all is there"
    other = tmp_path / "other.json"
    module.report.save({**head, "rows": [{**row, "requests": 1}]}, other)
    assert [each["requests"] for each in module.joined([path, other])["rows"]] == [1, 2]
    module.report.save({**head, "context": 8, "rows": []}, other)
    with pytest.raises(SystemExit, match=r"other\.json is of another context: rows measured apart"):
        module.joined([path, other])


def test_a_run_that_stops_early_is_an_error(script):
    module = script("engine")
    with pytest.raises(RuntimeError, match=r"4 tokens of each of 2 requests are wanted; got \[4, 3\]"):
        module.seconds_of(lambda new: ([[0] * new, [0] * (new - 1)], 1.0), 4, 2)


def test_the_server_is_measured_beside_its_engine(script, monkeypatch, tmp_path, capsys):
    pytest.importorskip("uvicorn", reason="pip install 'polyattn[serve]'")
    module = script("http_serving")
    path = tmp_path / "http.json"
    monkeypatch.setattr(sys, "argv", ["http_serving.py", "--quick", "--device", "cpu", "--json", str(path)])
    module.main()
    result = json.loads(path.read_text())
    assert [row["requests"] for row in result["rows"]] == [1, 4]
    assert all(row["alike"] and len(row["engine"]) == len(row["http"]) == 2 for row in result["rows"])
    assert module.markdown(result) in capsys.readouterr().out


def test_what_is_asked_of_http_stands_beside_what_it_gives(script):
    module = script("http_serving")
    head = {**module.report.stamp("http-serving"), "parameters": 1.2e9, "context": 4096, "backends": {"decode": "a"}}
    one = {"requests": 1, "new_tokens": 10, "engine": [[0.5, 1.0]], "http": [[0.504, 1.25]], "alike": True}
    many = {**one, "requests": 32, "engine": [[1, 4], [1, 2]], "http": [[1, 2.5], [2, 5]], "alike": None}
    text = module.markdown({**head, "rows": [one, many]})
    assert "| 1 | 10 | 10 | 8 | 0.80 |  | +4.0 ms | 5 ms | yes |" in text
    assert "| 32 | 10 | 160 | 128 | 0.80 | 0.9 |  |  | not compared |" in text
    assert "|  | no |" in module.markdown({**head, "rows": [{**many, "alike": False}]})


def test_a_trace_names_phase_layer_and_backend(script, monkeypatch, tmp_path, capsys):
    module = script("http_serving")
    path = tmp_path / "trace.json"
    words = ["http_serving.py", "--quick", "--device", "cpu", "--backend", "torch_sdpa", "--trace", str(path)]
    monkeypatch.setattr(sys, "argv", words)
    module.main()
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"polyattn.serving {phase} layer {n} torch_sdpa@cpu" for phase in ("extend", "decode") for n in range(2)
    ]
    assert {event["name"] for event in json.loads(path.read_text())["traceEvents"]} >= set(said)
