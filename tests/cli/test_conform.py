"""`polyattn conform`: verdicts, exit codes, JSON, the evidence it writes, and the planted bugs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from polyattn.cli import rendering
from polyattn.testing import Case, Outcome, catching, generation, running
from polyattn.testing.planted import BUGS

from .conftest import Run

PLUGIN = """
from polyattn.backends.reference_backend import Reference
from polyattn.contract import hookimpl
from polyattn.contract import *


class Acme(Reference):
    pass


@hookimpl
def polyattn_register_platforms():
    yield PlatformInfo("nowhere", device_type="nowhere", detect=f"{__name__}:find")


def find():
    return DeviceReport(present=False, detail="there is no such board")


@hookimpl
def polyattn_register_backends():
    known = {"causal": ("none", "bottom_right"), "lse": True, "s_relation": ("equal", "one", "fewer", "more")}
    rows = (row(family="dense", dtype=("float32", "bfloat16"), head_dim=Range(8, 64), **known),)
    provider = Provider("acme", rows, f"{__name__}:Acme")
    yield BackendInfo("acme", "cpu", (provider,), summary="Acme's")
    yield BackendInfo("board", "nowhere", (provider,), summary="Acme's board")
"""
WRONG = PLUGIN.replace(
    "    pass\n",
    """
    def bind(self, request):
        import dataclasses
        bound = super().bind(request)
        if not request.lse:
            return bound
        def forward(*tensors, **given):
            out, lse = bound.forward(*tensors, **given)
            return out, lse + 1
        return dataclasses.replace(bound, forward=forward)
""",
    1,
)
Plugin = Callable[[str, str], str]


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(autouse=True)
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(generation.LEVELS, "quick", 2)  # type: ignore[attr-defined]
    monkeypatch.setitem(generation.LEVELS, "full", 5)  # type: ignore[attr-defined]


@pytest.fixture
def acme(plugin: Plugin, tmp_path: Path) -> Path:
    """A plugin that is named in POLYATTN_EXTRA_PLUGINS; its folder."""
    plugin("acme", PLUGIN)
    return tmp_path


def evidence(folder: Path) -> Path:
    return folder / "evidence" / "acme@cpu.json"


# --- verdicts


def test_it_ends_with_a_table_and_writes_evidence(run: Run, acme: Path) -> None:
    said = run("conform", "acme")
    assert said.code == 0, said
    lines = [line.split() for line in said.out.splitlines()]
    assert ["passed", "refused", "xfailed", "failed"] in lines
    (everything,) = [line for line in lines if line[:1] == ["all"]]
    assert said.out.startswith("acme@cpu on ")
    assert "negative controls: 24 of 24 as they must be" in said.out
    assert f"ok, {int(everything[1]) + int(everything[2])} cases in " in said.out
    assert "evidence written: " in said.out
    written = json.loads(evidence(acme).read_text())
    assert [str(written[word]) for word in ("passed", "refused", "xfailed")] == everything[1:4]
    assert written["command"] == "polyattn conform acme --full --device cpu"
    assert written["level"] == "hardware"
    assert {"device", "versions", "date"} <= {name for name, value in written.items() if value}
    listed = next(b for b in run("list", "--json").data if b["name"] == "acme")
    assert listed["evidence"].startswith("hardware (")
    assert run("matrix", "--json").data["cells"]["acme"]["cpu"]["evidence"] == listed["evidence"]


def test_a_backend_of_which_nothing_was_tried_does_not_conform(run: Run, plugin: Plugin, tmp_path: Path) -> None:
    """Everything that it does not declare is refused, and that alone shows nothing."""
    plugin("acme", PLUGIN.replace('("float32", "bfloat16")', '"int8"'))
    said = run("conform", "acme")
    assert said.code == 1, said
    assert "FAILED nothing that the rows declare was tried and passed; see which dtypes, families and" in said.out
    assert "evidence written" not in said.out
    assert not evidence(tmp_path).exists()
    data = run("conform", "acme", "--quick", "--write-evidence", "--json").data
    assert (data["ok"], data["passed"], data["findings"], data["evidence"]) == (False, 0, {}, None)
    assert data["refused"] > 0


def test_json_has_the_counts_the_device_and_the_versions(run: Run, acme: Path) -> None:
    said = run("conform", "acme", "--json")
    assert said.code == 0
    assert {"passed", "refused", "xfailed", "failed", "device", "versions"} <= set(said.data)
    assert said.data["ok"] is True
    assert said.data["passed"] > 10
    assert said.data["failed"] == said.data["xfailed"] == 0
    assert {"polyattn", "torch", "python"} <= set(said.data["versions"])
    assert said.data["evidence"] == "acme@cpu.json"
    assert said.err == ""


def test_a_backend_that_does_not_conform_is_one(
    run: Run, plugin: Plugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin("acme", WRONG)
    monkeypatch.setenv("COLUMNS", "40")
    said = run("conform", "acme")
    assert said.code == 1
    lines = said.out.splitlines()
    failed = {line.removeprefix("FAILED ") for line in lines if line.startswith("FAILED dense-float32-")}
    assert failed
    assert "lse: largest error 1, FlashAttention's rule allows" in said.out
    assert "evidence written" not in said.out
    assert not evidence(tmp_path).exists()
    data = run("conform", "acme", "--json").data
    assert data["ok"] is False
    assert data["failed"] == len(data["findings"]) > 0
    assert failed <= set(data["findings"]), "a name is whole, however narrow the pipe is"
    assert data["evidence"] is None


def test_expected_failures_are_counted_and_shown_everywhere(run: Run, plugin: Plugin, tmp_path: Path) -> None:
    plugin("acme", WRONG)
    lines = tmp_path / "xfails.txt"
    lines.write_text("acme:*-B*-lse*  # https://acme.example/1\nacme:dense-*-split-*  # the same\n")
    said = run("conform", "acme", "--json")
    assert said.code == 0, said.out
    assert said.data["xfailed"] == len(said.data["xfails"]) > 0
    assert json.loads(evidence(tmp_path).read_text())["xfailed"] == said.data["xfailed"]
    listed = next(b for b in run("list", "--json").data if b["name"] == "acme")
    assert f", {said.data['xfailed']} xfailed, up to " in listed["evidence"]
    lines.write_text("acme:dense-float33-*  # typo\n")
    said = run("conform", "acme")
    assert said.code == 2
    assert "matches none of the" in said.err


# --- evidence


def test_a_quick_run_writes_when_it_is_asked_to(run: Run, acme: Path) -> None:
    assert run("conform", "acme", "--quick").code == 0
    assert not evidence(acme).exists()
    assert run("conform", "acme", "--quick", "--write-evidence").code == 0
    assert json.loads(evidence(acme).read_text())["command"] == "polyattn conform acme --quick --device cpu"


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("more", [("--no-evidence",), ("--dtypes", "float32"), ("--families", "dense")])
def test_part_of_a_backend_is_no_evidence(run: Run, acme: Path, more: tuple[str, ...]) -> None:
    said = run("conform", "acme", *more, "--json")
    assert said.code == 0
    assert said.data["evidence"] is None
    assert not evidence(acme).exists()


def test_a_place_that_cannot_be_written_to_is_said_and_changes_nothing_else(run: Run, acme: Path) -> None:
    (acme / "evidence").write_text("a file where the folder would be")
    said = run("conform", "acme")
    assert said.code == 0
    assert "evidence is not written, its place is not writable: " in said.out
    data = run("conform", "acme", "--json").data
    assert data["evidence"] is None
    assert data["evidence_error"].startswith("evidence is not written")


def test_sources_that_are_in_no_file_are_said(run: Run, plugin: Plugin, tmp_path: Path) -> None:
    plugin("acme", PLUGIN.replace('f"{__name__}:Acme"', '"acme_made_by_hand:Acme"'))
    import types

    import acme_plugin  # type: ignore[import-not-found]

    by_hand = types.ModuleType("acme_made_by_hand")
    by_hand.Acme = acme_plugin.Acme  # type: ignore[attr-defined]
    sys.modules[by_hand.__name__] = by_hand
    try:
        said = run("conform", "acme")
    finally:
        del sys.modules[by_hand.__name__]
    assert said.code == 0, said
    words = " ".join(said.out.split())
    assert "evidence of acme@cpu is not written: the adapter 'acme_made_by_hand:Acme'" in words


# --- devices


def test_a_plugin_in_an_archive_is_run_and_said_to_keep_nothing(
    run: Run, plugin: Plugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = plugin("acme", PLUGIN)
    archive = tmp_path / "acme.whl"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.write(tmp_path / f"{module}.py", f"{module}.py")
    (tmp_path / f"{module}.py").unlink()
    monkeypatch.syspath_prepend(str(archive))
    said = run("conform", "acme")
    assert said.code == 0, said
    assert f"warning: its module is in the archive {archive}: evidence and xfails.txt beside it are neither" in said.out
    assert "evidence of acme@cpu is not written: its module is in the archive" in flat(said.out)
    assert "Install the package (`pip install`), or unpack it into a folder" in flat(said.out)
    data = run("conform", "acme", "--json").data
    assert (data["ok"], data["evidence"]) == (True, None)
    assert f"is not written: its module is in the archive {archive}" in data["evidence_error"]


NO_BACKWARD = PLUGIN.replace('"lse": True', '"lse": True, "grad": True').replace(
    "    pass\n",
    """
    def bind(self, request):
        import dataclasses
        import torch
        bound = super().bind(request)
        def forward(*tensors, **given):
            with torch.no_grad():
                return bound.forward(*tensors, **given)
        return dataclasses.replace(bound, forward=forward)
""",
    1,
)


def test_gradients_that_are_declared_without_a_backward_are_a_finding(run: Run, plugin: Plugin) -> None:
    plugin("acme", NO_BACKWARD)
    said = run("conform", "acme", "--json")
    assert said.code == 1
    found = {text for texts in said.data["findings"].values() for text in texts}
    (text,) = found
    assert text.startswith(
        "gradients: the row declares them, and what the call returned depends on no input: its Bound"
    )
    assert text.endswith("Hand over Bound(forward, backward), or take `grad` out of the row")
    assert all("grad=" in case for case in said.data["findings"])


def test_rows_that_leave_out_what_plain_calls_have_are_warned_of(run: Run, plugin: Plugin) -> None:
    """It conforms: everything that is listed works. Nobody's plain call is served."""
    more = '"lse": True, "phase": ("extend", "decode"), "page_size": (16,), "kv_scales": ("tensor", "head"),'
    paged = PLUGIN.replace('family="dense"', 'family="paged"').replace('"lse": True,', more)
    paged = paged.replace('dtype=("float32", "bfloat16")', 'dtype="float32", kv_dtype=("auto", "int8")')
    plugin("acme", f"{paged}\nPOLYATTN_API_VERSION = 2\n")
    said = run("conform", "acme", "--no-evidence", "--json")
    assert said.data["ok"], said.data["findings"]
    text, _ = said.data["warnings"]
    assert text == (
        "kv_scales: no row of family paged takes '', which is what calls have that do not ask for it, those of "
        "`polyattn generate` among them: they are refused or rewritten. If the kernel takes them, add '' to what "
        "the row lists"
    )
    plugin("acme", PLUGIN.replace('"lse": True,', '"lse": (True,), "softcap": (30.0,),'))
    found = run("conform", "acme", "--json").data["warnings"]
    assert [text.partition(":")[0] for text in found][:-1] == ["softcap", "lse"]


LEAN = PLUGIN.replace("from polyattn.backends.reference_backend import Reference\n", "")
LEAN = LEAN.replace("\n\nclass Acme(Reference):\n    pass\n", "")
LEAN = LEAN.replace('f"{__name__}:Acme"', '"polyattn.backends.reference_backend:Reference"')


def test_nothing_is_warned_of_a_backend_in_order(run: Run, plugin: Plugin) -> None:
    plugin("acme", LEAN)
    assert run("conform", "acme", "--json").data["warnings"] == []


def test_a_plugin_that_imports_torch_when_it_is_loaded_is_warned_of(run: Run, plugin: Plugin) -> None:
    plugin("acme", LEAN.replace("from polyattn.contract", "import torch\nfrom polyattn.contract", 1))
    said = run("conform", "acme", "--no-evidence")
    assert "warning: plugin acme_plugin (module acme_plugin) imports torch when it is loaded" in said.out
    assert run("conform", "acme", "--json").data["warnings"]


def test_there_is_a_line_of_progress_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendering, "EVERY", 10.0)
    now = [0.0]
    bar = rendering.progress(rendering.screen(), quiet=True, lines=True, clock=lambda: now[0])
    with bar:
        task = bar.add_task("starting", total=None)
        for number in range(35):
            now[0] += 1.0
            bar.update(task, completed=number, total=35, description=f"case {number}")
    lines = [f"polyattn: {number} of 35: case {number}" for number in (9, 19, 29)]
    assert tuple(capsys.readouterr()) == ("", "\n".join([*lines, ""]))


def test_progress_without_a_terminal_is_lines_that_spoil_nothing(
    run: Run, acme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "EVERY", 0.0)
    for words in ((), ("--json",)):
        said = run("conform", "acme", *words)
        assert re.search(r"^polyattn: 0 of \d+: dense-float32-", said.err, re.M), said.err
        assert "polyattn: " not in said.out
    assert said.data["ok"]
    monkeypatch.setattr(rendering, "EVERY", float("inf"))
    assert run("conform", "acme").err == ""


def test_a_device_that_is_not_here_is_not_run(run: Run, acme: Path) -> None:
    said = run("conform", "board")
    assert (said.code, said.err) == (0, "")
    assert "board@nowhere: not run: no device of board is here: nowhere (there is no such board)" in said.out
    said = run("conform", "board", "--json")
    assert said.code == 0
    counts = {name: said.data[name] for name in ("passed", "refused", "xfailed", "failed", "ok", "device")}
    assert counts == {"passed": 0, "refused": 0, "xfailed": 0, "failed": 0, "ok": False, "device": ""}
    assert said.data["versions"]["polyattn"]
    assert said.data["not_run"] == ["no device of board is here: nowhere (there is no such board)"]


def test_under_strict_device_that_is_a_failure(run: Run, acme: Path) -> None:
    assert run("conform", "board", "--strict-device").code == 1
    assert run("conform", "board", "--strict-device", "--json").code == 1


def test_torch_is_loaded_when_something_is_run() -> None:
    code = (
        "import sys; from polyattn.cli import main; assert main(['conform', 'torch_spda']) == 4;"
        "assert main(['conform', 'torch_sdpa@npu']) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# --- usage


@pytest.mark.parametrize(
    "words, code, message",
    [
        (("torch_spda",), 4, "no backend is named 'torch_spda'. Did you mean 'torch_sdpa'"),
        (("intel_amx",), 4, "intel_amx@cpu is unavailable: sgl-kernel-cpu is not installed"),
        (("torch_sdpa", "--device", "banana"), 2, "--device banana: torch has no such device here: it has cpu"),
        (("torch_sdpa", "--device", "meta"), 2, "--device meta: torch has no such device here: it has cpu"),
        (("torch_sdpa", "--device", "cpu:3"), 2, "--device cpu:3: torch has no such device here: it has one cpu"),
        (("acme", "--device", "cuda"), 4, "there is no acme on device cuda. acme is registered as: acme@cpu (cpu)"),
        ((), 2, "which backend? polyattn conform BACKEND; `polyattn list` shows them"),
        (("acme", "--quick", "--full"), 2, "--quick and --full exclude each other: leave one out"),
        (
            ("acme", "--write-evidence", "--no-evidence"),
            2,
            "--write-evidence and --no-evidence exclude each other: leave one out",
        ),
        (
            ("acme", "--write-evidence", "--dtypes", "float32"),
            2,
            "--write-evidence with --dtypes or --families: part of a backend is no evidence for it. Leave these out",
        ),
        (("--refresh", "--quick"), 2, "--refresh runs nothing: give it a backend or nothing, and --json"),
        (("nobody", "--refresh"), 4, "no backend is named 'nobody'"),
        (("acme", "--planted-bugs"), 2, "--planted-bugs tries the kit itself, not acme: leave one of the two out"),
        (("acme", "--dtypes", "float31"), 2, "--dtypes 'float31' is not known. Did you mean 'float32'"),
        (("acme", "--dtypes", "fp32,fp8_e4m3"), 2, "--dtypes 'fp8_e4m3' is not known. Allowed: fp64, bf16, fp16, fp32"),
        (("acme", "--families", "dens"), 2, "--families 'dens' is not known. Did you mean 'dense'? Allowed: dense,"),
        (("acme", "--dtypes", ""), 2, "--dtypes '' names none; leave it out for all"),
        (("acme", "--families", ","), 2, "--families ',' names none; leave it out for all"),
    ],
)
def test_wrong_words(run: Run, acme: Path, words: tuple[str, ...], code: int, message: str) -> None:
    said = run("conform", *words)
    assert said.code == code
    assert message in " ".join(said.err.split())
    said = run("conform", *words, "--json")
    assert said.code == code
    assert message in said.data["error"]["message"]


def test_help_says_how_much_more_a_full_run_is(run: Run) -> None:
    assert "up to ten times as many combinations" in " ".join(run("conform", "--help").out.split())


# --- the kit itself


def test_evidence_follows_its_code(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    said = run("conform", "torch_native", "--refresh")
    assert "nothing to refresh: evidence that reads stale is of other code, and is run again" in said.out
    moved = Path("torch_native@cpu.json")
    monkeypatch.setattr(
        "polyattn.testing.recording.refresh", lambda name, platform: moved if platform == "cpu" else None
    )
    said = run("conform", "torch_native", "--refresh")
    assert said.out.splitlines() == ["torch_native@cpu: torch_native@cpu.json says where its code is now"]
    assert run("conform", "torch_native@cpu", "--refresh", "--json").data == {
        "refreshed": {"torch_native@cpu": "torch_native@cpu.json"}
    }


@pytest.mark.slow
def test_planted_bugs_are_listed_with_what_caught_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: BUGS[name] for name in ("zeros", "log2_lse")}
    monkeypatch.setattr(catching, "BUGS", few)
    said = run("conform", "--planted-bugs")
    assert said.code == 0, said
    head = next(line.split() for line in said.out.splitlines() if line.startswith("bug"))
    assert head == ["bug", "family", "caught", "by", "case"]
    rows = {tuple(line.split()[:3]) for line in said.out.splitlines()}
    assert ("none", "dense", "nothing") in rows
    assert ("zeros", "mla", "out") in {(a, b, c.rstrip(",")) for a, b, c in (r for r in rows if len(r) == 3)}
    assert ("log2_lse", "paged", "lse") in rows
    data = run("conform", "--planted-bugs", "--json").data
    assert data["ok"] is True
    assert {bug["bug"] for bug in data["bugs"]} == {"none", *few}
    assert all(bug["case"] for bug in data["bugs"] if bug["bug"] != "none")
    assert {"bug", "what", "family", "caught_by", "case", "good"} == set(data["bugs"][0])


def test_a_bug_that_is_not_caught_is_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catching, "BUGS", {"merged_detached": BUGS["merged_detached"]})

    def blind(target: object, case: Case) -> Outcome:
        return Outcome(case, "passed")

    monkeypatch.setattr(catching, "run_case", blind)
    said = run("conform", "--planted-bugs")
    assert said.code == 1
    assert "NOT AS IT MUST BE: merged_detached (dense)" in said.out
    assert run("conform", "--planted-bugs", "--json").data["ok"] is False


def test_interrupting_a_run_is_no_verdict(run: Run, acme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(target: object, case: Case) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "run_case", interrupted)
    assert run("conform", "acme").code == 130
    assert not evidence(acme).exists()
