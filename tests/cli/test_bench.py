"""`polyattn bench` from a shell."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from polyattn import tuning
from polyattn.bench.results import HEAD
from polyattn.bench.sheets import read

from .conftest import Run

SHEETS = Path(__file__).parents[2] / "benchmarks" / "sheets"
TINY = (
    "--quick",
    "--device",
    "cpu",
    "--seconds",
    "0.001",
    "--candidates",
    "torch_sdpa",
    "--candidates",
    "torch_native",
)


def test_a_quick_run_of_the_sheets(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    words = ("bench", str(SHEETS), *TINY, "--rows", "ltx_video", "--rows", "decode_8b/*B1 KV2048*", "--out", str(out))
    found = run(*words)
    assert found.code == 0, found.err
    assert "decode_8b/d128 H32 kv8 B1 KV2048 page 16  GB/s" in found.out
    assert "polyattn/torch_native █" in found.out
    assert "tuned choice" not in found.out, "the times of a quick run mean nothing"
    rows = json.loads(out.read_text())["rows"]
    assert [row["family"] for row in rows] == ["ltx_video", "decode_8b"]
    assert all(entry["us"] > 0 for row in rows for entry in row["entries"].values())

    again = run(*words)
    assert again.code == 2
    assert "result.json is there already: --resume goes on with it" in " ".join(again.err.split())
    resumed = run(*words, "--resume", "--plots", str(tmp_path / "plots"), "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.data["rows"] == rows, "nothing was left to measure"
    assert sorted(Path(path).name for path in resumed.data["plots"]) == [
        "dit_video.png",
        "dit_video.svg",
        "paged_decode.png",
        "paged_decode.svg",
    ]
    shown = run("bench", "--show", str(out))
    assert shown.code == 0
    assert "ltx_video/d64 H32 kv32 B2 S6144" in shown.out
    assert run("bench", "--show", str(out), "--json").data["verdicts"] == []
    # Of a run that was none of these the verdicts are shown.
    measured = {**json.loads(out.read_text()), "quick": False}
    said = {
        "bar": "tuned choice",
        "asked": "tuned: each 0.95",
        "rows": 2,
        "missing": [],
        "verdict": "met",
        "least": 1.0,
    }
    out.write_text(json.dumps({**measured, "verdicts": [said]}))
    assert "tuned choice" in run("bench", "--show", str(out)).out


def test_rows_that_were_not_begun_are_counted(run: Run, tmp_path: Path) -> None:
    words = ("bench", str(SHEETS), *TINY, "--rows", "ltx_video", "--limit", "0")
    found = run(*words, "--json")
    assert (found.code, found.data["rows"]) == (0, [])
    assert "1 of 1 rows were not begun: the time was up (--limit); with --out, --resume could" in found.err
    assert "(--limit); --resume goes on with them" in run(*words, "--out", str(tmp_path / "result.json")).err


def test_parts_of_a_run_are_joined(run: Run, tmp_path: Path) -> None:
    parts = [tmp_path / "0.json", tmp_path / "1.json"]
    for part, rows in zip(parts, ("sd3_5_large", "decode_8b/*B1 KV2048*"), strict=True):
        assert run("bench", str(SHEETS), *TINY, "--rows", rows, "--out", str(part)).code == 0
    out = tmp_path / "joined.json"
    named = [word for part in parts for word in ("--join", str(part))]
    found = run("bench", str(SHEETS), *named, "--out", str(out))
    assert found.code == 0, found.err
    assert "sd3_5_large/d64" in found.out  # a busy machine adds a word to the row, and it wraps
    joined = json.loads(out.read_text())
    assert joined["rows"] == [row for part in parts for row in json.loads(part.read_text())["rows"]]
    again = run("bench", str(SHEETS), *named, "--out", str(out))
    assert again.code == 2
    assert "joined.json is there already: name another file, or remove it" in " ".join(again.err.split())
    resumed = run("bench", str(SHEETS), *named, "--resume", "--out", str(out))
    assert "--join measures nothing, and takes no --resume: leave out one or the other" in " ".join(resumed.err.split())
    alone = run("bench", "--join", str(parts[0]))
    assert (alone.code, "--join needs the sheets of the run too" in " ".join(alone.err.split())) == (2, True)


@pytest.mark.parametrize(
    "words, said",
    [
        ((), "which rows? polyattn bench SHEET..."),
        ((str(SHEETS), "--quick", "--resume"), "--resume goes on with a result file: name it with --out"),
        (
            (str(SHEETS), "--quick", "--again"),
            "--again measures rows of a result once more: name it with --out, and add --resume",
        ),
        ((str(SHEETS), "--device", "cpu"), "take hours on a CPU: --quick"),
        ((str(SHEETS), "--quick", "--isolate", "never"), "--isolate says whom --tune tries in a process of its own"),
        ((str(SHEETS), "--quick", "--tune", "--isolate", "nevr"), "--isolate 'nevr'. Did you mean 'never'? Allowed:"),
        ((str(SHEETS), "--quick", "--rows", "fluxx"), "--rows 'fluxx' names no row. Did you mean 'flux'?"),
        ((str(SHEETS), "--quick", "--peers", "no_such_place"), "--peers no_such_place: neither a folder nor a module"),
        (("none.yaml", "--quick"), "none.yaml does not exist"),
        (
            (str(SHEETS / "all.yaml"), "--quick"),
            "no families, and so no rows, are in sheet all: name the sheets with the rows too, or their folder",
        ),
        (("--show", "none.json"), "result file none.json cannot be read"),
        (("--show", "none.json", "--out", "zz.json"), "--show measures nothing, and takes no --out: leave out one or"),
        (
            (str(SHEETS), "--show", "none.json", "--join", "x.json", "--rows", "flux", "--limit", "0", "--resume"),
            "--show measures nothing, and takes no SHEET, --join, --rows, --limit, --resume: leave out one or the",
        ),
        (
            (str(SHEETS), "--join", "none.json", "--tune", "--compile", "2", "--device", "cpu"),
            "--join measures nothing, and takes no --device, --tune, --compile: leave out one or the other",
        ),
        (
            (str(SHEETS), "--quick", "--candidates", "torch_sdpaa"),
            "--candidates 'torch_sdpaa' names none. Did you mean",
        ),
        ((str(SHEETS), "--quick", "--peer", "sdpa"), "--peer sdpa: which peers there are, --peers says"),
        ((str(SHEETS), "--quick", "--device", "meta"), "--device meta: torch has no such device here: it has cpu"),
        ((str(SHEETS), "--quick", "--device", "warp"), "--device warp: torch has no such device here: it has cpu"),
    ],
)
def test_what_does_not_fit_together_is_refused(run: Run, words: tuple[str, ...], said: str) -> None:
    found = run("bench", *words)
    assert found.code == 2
    assert said in " ".join(found.err.split())


@pytest.mark.parametrize("how", ["measure", "join", "show"])
@pytest.mark.parametrize(
    "flag, place, said",
    [
        ("--plots", "file", "--plots file: file is no folder that can be written to (File exists): name another"),
        ("--plots", "file/in", "--plots file/in: file/in is no folder that can be written to (Not a directory): name"),
        ("--out", "file/x.json", "--out file/x.json: file is no folder that can be written to (File exists): name"),
    ],
)
def test_places_are_made_before_anything_is_measured(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, place: str, said: str, how: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("here first")
    words = [str(SHEETS), *TINY, "--rows", "flux"]
    if how == "measure":
        monkeypatch.setattr("polyattn.bench.running.run", lambda *args: pytest.fail("that is too late"))
    else:
        Path("sheet.yaml").write_text("{title: No rows, families: {}}")
        head = dict.fromkeys(HEAD, "") | {"rows": [], "quick": True, "versions": {}, "settings": {}, "titles": {}}
        head |= {"sheets": dict(read([Path("sheet.yaml")]).digests), "libraries": {}, "lost": {}, "verdicts": []}
        Path("part.json").write_text(json.dumps({"benchmark": "polyattn bench", "format": 2, **head}))
        words = ["sheet.yaml", "--join", "part.json"] if how == "join" else ["--show", "part.json"]
    found = run("bench", *words, flag, place)
    assert found.code == 2, found.err
    said = "--show measures nothing, and takes no --out" if (how, flag) == ("show", "--out") else said
    assert said in " ".join(found.err.split())
    assert Path("file").read_text() == "here first"


def test_a_bar_that_names_nobody_here_is_said(run: Run, tmp_path: Path) -> None:
    (tmp_path / "sheet.yaml").write_text(
        "{title: Tiny, families: {few: {kind: dense, of: {heads: 2, kv_heads: 2, head_dim: 32, causal: true},"
        " rows: [{batch: 1, q_len: 8}]}}, bars: [{name: fast, of: [few], than: polyattn/torch_spda, each: 1.0}]}"
    )
    found = run("bench", str(tmp_path / "sheet.yaml"), *TINY, "--json")
    assert found.code == 0, found.err
    assert "bar fast: than 'polyattn/torch_spda' is no backend that is installed here. Did you mean" in found.err
    assert found.data["rows"], "it is measured all the same"


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("POLYATTN_TUNING", "off", "POLYATTN_TUNING=off reads no measurements, so none are made; unset it to tune"),
        ("POLYATTN_TUNING_STORE", "damaged", "the tuning store damaged cannot be read (file is not a database); name"),
        ("POLYATTN_TUNING_STORE", "damaged/in", "measurements cannot be written to damaged/in ("),
    ],
)
def test_what_could_not_be_kept_is_not_tuned(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("damaged").write_text("no store")
    monkeypatch.setattr("polyattn.bench.running.run", lambda *args: pytest.fail("that is too late"))
    monkeypatch.setenv(name, value)
    tuning.reload()
    found = [run(*words) for words in (("tune", "--request", "k=8"), ("bench", str(SHEETS), *TINY, "--tune"))]
    monkeypatch.undo()
    tuning.reload()
    assert [one.code for one in found] == [2, 2]
    assert all(said in " ".join(one.err.split()) for one in found)
    assert found[0].err == found[1].err, "in the words of polyattn tune"


@pytest.mark.slow
def test_what_is_tuned_is_kept(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_TUNING_STORE", str(tmp_path / "store.sqlite3"))
    tuning.reload()
    found = run("bench", str(SHEETS), *TINY, "--rows", "flux", "--tune", "--json")
    count = len(tuning.store().rows())
    monkeypatch.undo()
    tuning.reload()
    assert (found.code, count) == (0, len(found.data["rows"])), found.err


@pytest.mark.parametrize("flag", ["--show", "--join"])
def test_a_result_that_is_not_whole_is_refused(run: Run, tmp_path: Path, flag: str) -> None:
    (tmp_path / "part.json").write_text('{"benchmark": "polyattn bench", "format": 2}')
    sheets = [str(SHEETS)] if flag == "--join" else []
    found = run("bench", *sheets, flag, str(tmp_path / "part.json"))
    assert found.code == 2
    assert "is not whole: command, date, device, versions, settings, sheets," in " ".join(found.err.split())


def test_plots_need_matplotlib_before_anything_is_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = run("bench", str(SHEETS), *TINY, "--plots", "plots")
    assert found.code == 4
    assert "plots need matplotlib: pip install 'polyattn[plots]'" in found.err
