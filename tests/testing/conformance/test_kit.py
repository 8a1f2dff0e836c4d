"""The kit as people meet it: run, report, command, evidence."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polyattn.contract import Accuracy, AttentionRequest, Provider, Rejected, Row, judge, row
from polyattn.errors import BackendUnavailableError, ConfigError, PluginError, UnsupportedRequestError
from polyattn.registry.evidence import Evidence, read_evidence, row_hash, write_evidence
from polyattn.registry.manager import get_manager
from polyattn.testing import Case, Installed, OffChip, Report, plan, record, refusals, run, run_case
from polyattn.testing.calls import out_of, sayable
from polyattn.testing.checks import Outcome
from polyattn.testing.poison import poisoned
from polyattn.testing.problems import build, off_boundary, stored
from polyattn.testing.recording import evidence_of
from polyattn.testing.running import _blank
from polyattn.testing.sources import sources_of
from polyattn.testing.tolerances import Finding

from .conftest import ADAPTER, Acme

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
EVIDENCE = sorted(path for part in ("core", "plugins/*") for path in ROOT.glob(f"{part}/src/**/evidence/*@*.json"))
SMALL = {"device": "cpu", "dtypes": ["float32"], "families": ["varlen"], "per_row": 3}


@pytest.fixture(scope="module")
def report() -> Report:
    return run("torch_native", **SMALL)


# --- run


def test_run_reports_what_it_did(report: Report) -> None:
    assert report.ok
    assert (report.backend, report.platform, report.level) == ("torch_native", "cpu", "quick")
    assert (report.dtypes, report.families) == (("float32",), ("varlen",))
    assert report.passed >= 4
    assert report.refused > 40
    assert report.failed == 0
    assert report.total == report.ran == report.passed + report.refused
    assert set(report.counts) == {"varlen float32", "refusals"}
    assert report.versions["torch"] == torch.__version__
    assert all(report.gates.values())
    assert len(report.gates) == 12
    assert {"out float32", "decode float32", "grad query float32"} <= set(report.margins)
    assert all(0 <= margin < 1 for margin, _ in report.margins.values())
    assert report.not_run == []


def test_providers_that_are_not_here_are_said() -> None:
    target = Installed("torch_native")
    target.providers = tuple(p for p in target.providers if p.name != "torch-serving")
    assert _blank(target, [], "quick", None).not_run[-1] == "providers that are not here: torch-serving"


def test_dtypes_have_the_short_names_that_every_command_takes() -> None:
    assert plan(Installed("torch_native"), dtypes=["fp32", "bf16"], per_row=1) == plan(
        Installed("torch_native"), dtypes=["float32", "bfloat16"], per_row=1
    )
    found = run("torch_native", **{**SMALL, "dtypes": ["fp32"]}, only=())
    assert found.dtypes == ("float32",)
    assert " --dtypes float32 " in found.command


def test_what_cannot_be_tried_is_said() -> None:
    found = run("reference", dtypes=["float32"], families=["mla"], per_row=1)
    assert any(reason.startswith("large: ") for reason in found.not_run)


def test_report_survives_json(report: Report) -> None:
    data = json.loads(report.to_json())
    assert data["ok"] is True
    assert data["passed"] == report.passed
    again = Report.from_dict(data)
    assert again == report
    assert str(again) == str(report)


def test_report_reads_like_a_table(report: Report) -> None:
    lines = str(report).splitlines()
    assert lines[0].startswith("torch_native@cpu on ")
    assert lines[-1].strip().startswith(f"ok, {report.ran} cases in ")
    assert any(line.split() == ["all", str(report.passed), str(report.refused), "0", "0"] for line in lines)
    assert any("negative controls: 12 of 12" in line for line in lines)


def test_parts_of_a_run_are_the_run(report: Report) -> None:
    parts = [run("torch_native", only=range(i, report.total, 3), **SMALL) for i in range(3)]
    assert sum(part.ran for part in parts) == report.ran
    whole = parts[0]
    assert not whole.ok
    assert f"NOT COMPLETE: {report.total - whole.ran} cases were not run" in str(whole)
    for part in parts[1:]:
        whole.absorb(part)
    assert whole.ok
    assert (whole.passed, whole.refused, whole.total) == (report.passed, report.refused, report.total)
    assert whole.counts == report.counts
    assert {name: margin for name, (margin, _) in whole.margins.items()} == {
        name: margin for name, (margin, _) in report.margins.items()
    }


def test_progress_is_told_before_each_case_and_results_after_it() -> None:
    told: list[tuple[int, int, str]] = []
    kept: list[tuple[int, int]] = []
    found = run(
        "torch_native",
        only=iter((2, 0)),
        progress=lambda *args: told.append(args),
        keep=lambda report, position: kept.append((report.ran, position)),
        **SMALL,
    )
    ids = [case.id for case in plan(Installed("torch_native"), dtypes=["float32"], families=["varlen"], per_row=3)]
    assert told == [(0, len(ids), ids[2]), (1, len(ids), ids[0]), (2, len(ids), "")]
    assert kept == [(1, 2), (2, 0)]
    assert (found.ran, found.total, found.ok) == (2, len(ids), False)


def test_a_lost_device_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(target: object, case: Case) -> Outcome:
        return Outcome(case, "failed", (Finding("call", "raised: an illegal memory access was encountered"),))

    monkeypatch.setattr("polyattn.testing.running.run_case", fails)
    monkeypatch.setattr("polyattn.testing.running.lost", lambda device: True)
    found = run("torch_native", **SMALL)
    assert found.ran == 1
    assert found.lost == next(iter(found.findings))
    assert not found.ok
    assert f"THE DEVICE WAS LOST after {found.lost}: {found.total - 1} cases were not run" in str(found)


def test_a_finding_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    real = run_case

    def one_fails(target: Installed, case: Case) -> Outcome:
        outcome = real(target, case)
        return Outcome(case, "failed", (Finding("out", "is wrong"),)) if case.check == "decode" else outcome

    monkeypatch.setattr("polyattn.testing.running.run_case", one_fails)
    found = run("torch_native", **SMALL)
    assert not found.ok
    assert found.failed == len(found.findings) > 0
    assert "out: is wrong" in str(found)
    with pytest.raises(ConfigError, match=r"evidence of torch_native@cpu is not written: \d of .* cases failed"):
        record(found)


def test_gates_that_do_not_hold_fail_the_run(report: Report) -> None:
    blind = dataclasses.replace(report, gates={**report.gates, "float32: zeros": False})
    assert not blind.ok
    assert "CONTROL FAILED float32: zeros" in str(blind)


def test_nothing_run_is_not_ok(report: Report) -> None:
    assert not dataclasses.replace(report, counts={}).ok


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"level": "quik"}, r"level 'quik' is not one of quick, full\. Did you mean 'quick'\?"),
        ({"dtypes": ["bf61"]}, "dtype 'bf61' is not one of float64, .*, float16. Did you mean 'bf16'"),
        ({"dtypes": ["fp8_e4m3"]}, r"dtype 'fp8_e4m3' is not one of float64, float32, bfloat16, float16\."),
        ({"dtypes": ["float31"]}, r"dtype 'float31' is not one of float64, float32, bfloat16, float16\."),
        ({"families": ["dens"]}, r"family 'dens' is not one of dense, .*Did you mean 'dense'\?"),
    ],
)
def test_wrong_words(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run("torch_sdpa", **wrong)


def test_unknown_and_unavailable_backends() -> None:
    with pytest.raises(BackendUnavailableError, match=r"no backend 'torch_spda' is registered for cpu\. Did you mean"):
        Installed("torch_spda")


def test_devices_that_are_not_here() -> None:
    with pytest.raises(ConfigError, match=r"device 'banana' is no device of torch: .* Give one such as cpu or cuda:0"):
        Installed("torch_sdpa", "banana")
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnavailableError, match="torch finds no CUDA or ROCm device here"):
            Installed("torch_sdpa", "cuda")


# --- refusals


class Lenient(Installed):
    """Accepts everything."""

    def refuse(self, case: Case) -> None:
        return None


class Vague(Installed):
    """Refuses without saying why."""

    def refuse(self, case: Case) -> UnsupportedRequestError:
        return UnsupportedRequestError("no")


def refusal() -> Case:
    return next(c for c in plan(Installed("torch_sdpa"), dtypes=["float32"]) if c.fields == ("alibi",))


def test_accepting_what_is_not_declared_is_found() -> None:
    (finding,) = run_case(Lenient("torch_sdpa"), refusal()).findings
    assert str(finding) == "refusal: alibi is not declared, and was accepted"


def test_refusing_without_a_reason_is_found() -> None:
    (finding,) = run_case(Vague("torch_sdpa"), refusal()).findings
    assert str(finding) == "refusal: no reason names alibi: no"


def test_a_pair_of_widths_is_refused_by_what_either_row_says_of_widths() -> None:
    """(192, 192) is outside of both rows, and the nearest one has a limit for one width."""
    common: dict[str, Any] = {"family": "dense", "dtype": "float32"}
    rows = row(**common, head_dim=(64, 128)), row(**common, dims=((192, 128),))

    class Judged(Installed):
        def refuse(self, case: Case) -> UnsupportedRequestError:
            verdict = judge(rows, case.request.normalised())
            assert isinstance(verdict, Rejected)
            return UnsupportedRequestError("; ".join(verdict.reasons))

    beyond = refusals(rows, {"platform": "cpu"}, families=("dense",), dtypes=("float32",))
    square = [case for case in beyond if case.request.dims == (192, 192)]
    assert square
    assert {run_case(Judged("torch_sdpa"), case).verdict for case in square} == {"refused"}


def test_adapters_off_chip_are_not_asked_to_refuse() -> None:
    with pytest.raises(TypeError, match="refusals are judged by selection"):
        run_case(OffChip("torch_sdpa", "rocm"), refusal())


# --- calls


def test_a_call_that_loses_a_field_is_found() -> None:
    class Forgetful(Installed):
        def asked(self, case: Case, tensors: object, extra: object) -> AttentionRequest:
            return dataclasses.replace(super().asked(case, tensors, extra), softcap=0.0)

    case = Case(request=AttentionRequest(dtype="float32", head_dim=64, softcap=2.0), lengths=((63, 63),))
    (finding,) = run_case(Forgetful("reference"), case).findings
    assert str(finding) == "request: the call asked for softcap=0.0, 2.0 was meant"


def test_what_the_public_calls_cannot_say() -> None:
    said = Case(request=AttentionRequest(dtype="float32", head_dim=64, softcap=2.0), lengths=((63, 63),))
    assert sayable(said)
    for change in ({"tree": True, "mask": "bool"}, {"cross": True}, {"phase": "decode"}):
        assert not sayable(dataclasses.replace(said, request=dataclasses.replace(said.request, **change)))


@pytest.mark.parametrize("kind, contiguous", [("contiguous", True), ("strided", False)])
def test_out_is_full_of_nan(kind: str, contiguous: bool) -> None:
    case = Case(request=AttentionRequest(), out=kind)
    out = out_of(case, (2, 3, 4, 8), torch.float32, CPU)
    assert out is not None
    assert out.isnan().all()
    assert out.is_contiguous() is contiguous
    assert out.stride(-1) == 1
    assert out_of(Case(request=AttentionRequest()), (2, 3), torch.float32, CPU) is None


# --- problems


@pytest.mark.parametrize("storage", ["contiguous", "gapped", "padded", "transposed", "misaligned", "expanded"])
def test_storage_changes_where_values_lie_and_not_what_they_are(storage: str) -> None:
    values = torch.randn(1, 5, 3, 8).expand(2, 5, 3, 8) if storage == "expanded" else torch.randn(2, 5, 3, 8)
    made = stored(values, storage, CPU)
    assert torch.equal(made, values)
    assert made.stride(-1) == 1
    assert made.is_contiguous() == (storage in ("contiguous", "misaligned"))
    request = AttentionRequest(dtype="float32", head_dim=8, v_head_dim=8, kv_heads=3, heads=3)
    case = Case(request=request, lengths=((5, 5),) * 2, storage=storage)
    assert off_boundary(case) == (storage in ("padded", "misaligned"))


def test_gaps_hold_nan() -> None:
    made = stored(torch.ones(2, 5, 3, 8), "padded", CPU)
    around = torch.empty(0).set_(made.untyped_storage())
    assert int(around.isnan().sum()) == around.numel() - made.numel()


def test_problems_follow_their_case_alone() -> None:
    case = Case(request=AttentionRequest(dtype="float32", head_dim=16), lengths=((7, 7),))
    one, again = build(case, CPU), build(case, CPU)
    assert torch.equal(one.tensors["query"], again.tensors["query"])
    other = build(dataclasses.replace(case, storage="gapped"), CPU)
    assert not torch.equal(one.tensors["query"], other.tensors["query"])


def test_closed_rows_see_nothing_and_others_something() -> None:
    request = AttentionRequest(dtype="float32", head_dim=16, mask="bool")
    case = Case(request=request, lengths=((20, 30),), closed_rows=True)
    seen = build(case, CPU).tensors["mask"].any(-1)
    assert not seen[..., ::5].any()
    opened = build(dataclasses.replace(case, closed_rows=False), CPU).tensors["mask"].any(-1)
    assert opened.all()


def test_dominant_sinks_are_30_nats_above_every_lse() -> None:
    from polyattn.testing.plain import in_float64

    request = AttentionRequest(dtype="float32", head_dim=64, heads=4, kv_heads=4, sinks=True)
    problem = build(Case(request=request, lengths=((63, 100),), sink="dominant"), CPU)
    assert float(problem.tensors["sinks"].min() - in_float64(problem).lse.max()) > 27
    off = build(Case(request=request, lengths=((63, 100),), sink="off"), CPU)
    assert off.tensors["sinks"].isinf().tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3),
        lambda: torch.empty_like(torch.zeros(3)),
        lambda: torch.empty_strided((3,), (1,)),
        lambda: torch.zeros(1).new_empty(3),
        lambda: torch.zeros(1).new_empty_strided((3,), (1,)),
    ],
)
def test_uninitialised_memory_is_nan(make: object) -> None:
    before = torch.empty
    with poisoned(CPU):
        assert make().isnan().all()  # type: ignore[operator]
        assert not torch.empty(3, dtype=torch.int32).is_floating_point()
    assert torch.empty is before
    assert "new_empty" not in vars(torch.Tensor)


def test_a_backend_has_the_process_s_threads_and_the_kit_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyattn.testing.checks import one_call

    seen: dict[str, int] = {}

    class Counting(Installed):
        def call(self, *words: object) -> object:
            seen["backend"] = torch.get_num_threads()
            return super().call(*words)  # type: ignore[arg-type]

    def plainly(problem: object) -> object:
        seen["kit"] = torch.get_num_threads()
        return real(problem)  # type: ignore[arg-type]

    real = one_call.plainly
    monkeypatch.setattr(one_call, "plainly", plainly)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        case = Case(request=AttentionRequest(dtype="float32", head_dim=16), lengths=((7, 7),))
        assert run_case(Counting("reference"), case).verdict == "passed"
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == {"backend": 3, "kit": 1}


# --- evidence


@pytest.fixture
def plugin_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The plugin of torch_native as if it had been loaded from another folder: tests leave the package alone."""
    manager = get_manager()
    owner = manager.owner(manager.backends["torch_native", "cpu"])
    monkeypatch.setattr(owner, "origin", str(tmp_path / "plugin.py"))
    yield tmp_path
    read_evidence.cache_clear()


def test_evidence_is_written_and_goes_stale(plugin_elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (plugin_elsewhere / "adapter.py").write_text("import torch\n")
    monkeypatch.setattr("polyattn.testing.running.sources_of", lambda origin, providers: ("adapter.py",))
    found = dataclasses.replace(run("torch_native", **SMALL), not_run=["what was not"])
    path = record(found)
    assert path == plugin_elsewhere / "evidence" / "torch_native@cpu.json"
    evidence = read_evidence(str(plugin_elsewhere / "plugin.py"), "torch_native", "cpu")
    assert (evidence.level, evidence.passed, evidence.refused) == ("hardware", found.passed, found.refused)
    asked = "--quick --device cpu --dtypes float32 --families varlen"
    assert evidence.command == f"polyattn conform torch_native {asked}"
    assert evidence.note == "families: varlen; dtypes: float32; not run: what was not"
    assert evidence.families == ("varlen",)
    assert not evidence.stale

    (plugin_elsewhere / "adapter.py").write_text("import torch  # changed\n")
    read_evidence.cache_clear()
    assert read_evidence(str(plugin_elsewhere / "plugin.py"), "torch_native", "cpu").stale
    with pytest.raises(
        ConfigError, match=r"torch_native@cpu is not written: adapter\.py are not what ran on .* Run again"
    ):
        record(found)


def test_evidence_goes_stale_when_something_else_is_declared(
    plugin_elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plugin_elsewhere / "adapter.py").write_text("import torch\n")
    monkeypatch.setattr("polyattn.testing.running.sources_of", lambda origin, providers: ("adapter.py",))
    found = run("torch_native", **SMALL)
    record(found)
    info = get_manager().backends["torch_native", "cpu"]
    evidence = read_evidence(str(plugin_elsewhere / "plugin.py"), "torch_native", "cpu")
    assert evidence.rows
    assert not evidence.beside(info.providers).stale

    first, *rest = info.providers
    more = row(family="dense", dtype="float32", alibi=True)
    wider = (dataclasses.replace(first, rows=(*first.rows, more)), *rest)
    assert evidence.beside(wider).stale
    assert not dataclasses.replace(evidence, rows="").beside(wider).stale, "from before rows were kept"
    monkeypatch.setitem(get_manager().backends, ("torch_native", "cpu"), dataclasses.replace(info, providers=wider))
    with pytest.raises(ConfigError, match=r"it declares other capabilities than were tried on .* Run again"):
        evidence_of(found)


def test_what_counts_as_declared() -> None:
    rows = (
        row(when={"arch": ("sm90", "sm100")}, family="dense", dtype="float16", head_dim=(64, 128)),
        row(when={"arch": "sm80"}, family="dense", dtype="float16", head_dim=64, lowered={"sinks": "sinks_from_lse"}),
    )

    def hashed(*changed: Row, arch: str = "sm90") -> str:
        return row_hash([Provider("acme", changed)], arch)

    assert hashed(rows[1], rows[0]) == hashed(*rows) == hashed(rows[0]), "neither order nor rows of another arch"
    assert hashed(*rows, arch="") != hashed(rows[0], arch="")
    assert hashed(dataclasses.replace(rows[0], note="why")) == hashed(rows[0])
    others = (
        row(when={"arch": "sm90"}, family="varlen", dtype="float16", head_dim=(64, 128)),
        row(when={"arch": "sm90"}, family="dense", dtype="float16", head_dim=(64, 96, 128)),
        row(when={"arch": "sm90"}, family="dense", dtype="float16", head_dim=(64, 128), lse=True),
        row(when={"arch": "sm90"}, family="dense", dtype="float16", head_dim=(64, 128), lowered={"mask": "any"}),
    )
    assert len({hashed(rows[0]), *map(hashed, others)}) == 5
    looser = dataclasses.replace(Provider("acme", rows), accuracy=Accuracy(0.99, 0.1))
    assert row_hash([looser], "sm90") != hashed(*rows)


def test_evidence_of_a_later_polyattn_is_read(plugin_elsewhere: Path) -> None:
    (plugin_elsewhere / "evidence").mkdir()
    said = {"backend": "torch_native", "platform": "cpu", "level": "hardware", "passed": 7, "of a later time": [1]}
    (plugin_elsewhere / "evidence" / "torch_native@cpu.json").write_text(json.dumps(said))
    assert read_evidence(str(plugin_elsewhere / "plugin.py"), "torch_native", "cpu").passed == 7


def test_runs_of_one_provider_after_the_other_are_kept_together(plugin_elsewhere: Path) -> None:
    """Where two builds of a library take the same calls, a run has the first of them only."""
    origin, sources = str(plugin_elsewhere / "plugin.py"), {"old": "old.py", "new": "new.py", "third": "third.py"}
    providers = [Provider(n, (row(family="dense", dtype="float16", head_dim=64),), target="acme:Acme") for n in sources]
    for name in sources.values():
        (plugin_elsewhere / name).write_text(f"import {name[:-3]}\n")

    def ran(name: str, passed: int, *beside: str) -> None:
        absent = tuple(other for other in sources if other not in (name, *beside))
        rows = row_hash([provider for provider in providers if provider.name not in absent])
        given: dict[str, Any] = {"passed": passed, "sources": (sources[name],), "absent": absent, "rows": rows}
        write_evidence(origin, Evidence("acme", "cpu", "hardware", **given))

    def known() -> Evidence:
        return read_evidence(origin, "acme", "cpu").beside(providers)

    ran("old", 1)
    assert (known().unseen, known().others) == (("new", "third"), ())
    ran("new", 2)
    assert (known().passed, [one.passed for one in known().others], known().unseen) == (2, [1], ("third",))
    assert "in part" in str(known())
    ran("third", 3)
    assert ([one.passed for one in known().others], known().unseen) == ([2, 1], ())
    assert "in part" not in str(known())
    ran("new", 4)
    assert ([one.passed for one in known().others], known().unseen) == ([3, 1], ()), "the run before it is replaced"

    (plugin_elsewhere / "old.py").write_text("import another\n")
    read_evidence.cache_clear()
    assert (known().stale, known().unseen) == (False, ("old",))
    providers[2] = dataclasses.replace(providers[2], rows=(row(family="dense", dtype="float32", head_dim=64),))
    assert known().unseen == ("old", "third"), "it declares something else now"
    ran("third", 5)
    assert [one.passed for one in known().others] == [4], "what is stale is not kept"
    ran("third", 6, "old", "new")
    assert [one.passed for one in known().others] == [5, 4], "beside others, `new` may have been asked for nothing"
    (plugin_elsewhere / "evidence" / "acme@cpu.json").write_text("{")
    read_evidence.cache_clear()
    ran("new", 7)
    assert (known().passed, known().others) == (7, ())


def test_a_run_of_some_families_leaves_what_is_known_of_others(plugin_elsewhere: Path) -> None:
    origin = str(plugin_elsewhere / "plugin.py")
    owners = {"soft": ("dense", "varlen"), "cached": ("paged",), "delta": ("linear",)}
    providers = [
        Provider(name, (row(family=families, dtype="float16", head_dim=64),), target="acme:Acme")
        for name, families in owners.items()
    ]

    def changed(name: str) -> None:
        file = plugin_elsewhere / f"{name}.py"
        file.write_text(file.read_text() + "#\n" if file.exists() else "import torch\n")
        read_evidence.cache_clear()

    def ran(*names: str, keys: int = 1100) -> None:
        families = tuple(family for name in names for family in owners[name])
        tried = [provider for provider in providers if provider.name in names]
        given: dict[str, Any] = {
            "sources": tuple(f"{name}.py" for name in names),
            "absent": tuple(name for name in owners if name not in names),
            "rows": row_hash(tried),
            "families": families,
            "reached": {name: {"queries": 1, "keys": keys if name != "linear" else 77, "grid": 1} for name in families},
        }
        write_evidence(origin, Evidence("acme", "cpu", "hardware", passed=len(names), **given))

    def known() -> Evidence:
        return read_evidence(origin, "acme", "cpu").beside(providers)

    def said() -> list[tuple[tuple[str, ...], bool]]:
        return [(one.families, one.stale) for one in (known(), *known().others)]

    for name in owners:
        changed(name)
    ran("soft", "cached")
    assert (known().partial, known().unseen) == (True, ("delta",))
    ran("delta")
    assert said() == [(("dense", "varlen", "paged"), False), (("linear",), False)], "most families first"
    assert (known().partial, known().unseen, known().outdated) == (False, (), False), "77 are enough for chunks of 64"
    changed("cached")
    assert said() == [(("dense", "varlen", "paged"), True), (("linear",), False)]
    assert known().outdated
    assert known().unseen == (), "what is stale is known to be, and shows what it did"
    ran("cached")
    assert said() == [(("dense", "varlen"), True), (("paged",), False), (("linear",), False)]
    assert {*known().reached} == {"dense", "varlen"}
    assert known().outdated, "that run read the other file too"
    ran("soft")
    assert said() == [(("dense", "varlen"), False), (("paged",), False), (("linear",), False)]
    assert (known().unseen, known().outdated) == ((), False)
    ran("cached", keys=100)
    assert known().outdated, "fewer keys than a kernel reads at once, of a family that no other run has"
    changed("delta")
    assert said()[-1] == (("linear",), True)


@pytest.mark.parametrize("path", EVIDENCE, ids=lambda path: path.name)
def test_committed_evidence_says_what_was_declared(path: Path) -> None:
    evidence = json.loads(path.read_text())
    assert evidence["rows"], f"run {evidence['command']} again"
    for one in (evidence, *evidence.get("others", ())):
        said = one["note"].partition(";")[0]
        tried = one.get("families", [])
        ran = said.removeprefix("families: ").split(", ") if said.startswith("families: ") else tried
        assert {*tried} <= {*ran}, "a later run took families from it, none were added"


def test_kernels_interpreted_on_a_cpu_are_evidence_of_that(acme: Acme) -> None:
    acme('CLAIMS = {"evidence": "interpreter"}')
    path = record(run("acme", device="cpu", dtypes=["float32"], per_row=1))
    assert json.loads(path.read_text())["level"] == "interpreter"


def test_what_compiles_gets_fewer_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Installed("torch_native")
    many = plan(target, families=["varlen"], dtypes=["float32"])
    monkeypatch.setattr(target, "info", dataclasses.replace(target.info, compiles=True))
    assert len(plan(target, families=["varlen"], dtypes=["float32"])) < len(many)


def test_a_file_that_is_no_evidence(plugin_elsewhere: Path) -> None:
    (plugin_elsewhere / "evidence").mkdir()
    (plugin_elsewhere / "evidence" / "torch_native@cpu.json").write_text("{")
    again = r"run `polyattn conform torch_native` again"
    with pytest.raises(PluginError, match=rf"torch_native@cpu\.json is not an evidence file: .*; {again}"):
        read_evidence(str(plugin_elsewhere / "plugin.py"), "torch_native", "cpu")


def test_padding_rows_are_served_by_the_public_calls() -> None:
    """S9: a sequence of no keys beside its query. The plan must hold such a case that goes through validation."""
    cases = plan(Installed("reference"), families=["paged"], dtypes=["float32"])
    padded = [c for c in cases if (1, 0) in c.lengths]
    assert any(sayable(c) for c in padded)
    assert all(run_case(Installed("reference"), c).verdict == "passed" for c in padded if sayable(c))


def names(backend: str) -> set[str]:
    info = get_manager().backends[backend, "cpu"]
    origin = get_manager().owner(info).origin
    return set(sources_of(origin, [p for p in info.providers if not p.planned]))


def test_sources_are_what_computes() -> None:
    shared = {"torch_sdpa.py", "../semantics/masks.py", "../semantics/reference/visibility.py"}
    assert shared <= names("torch_sdpa")
    assert shared | {"torch_native.py", "../semantics/autograd.py"} <= names("torch_native")
    assert {"flex_attention.py", "../semantics/validation/tensors.py"} <= names("flex_attention")
    assert {f"../semantics/reference/{name}.py" for name in ("dense", "varlen", "paged", "mla", "linear")} | {
        "reference_backend.py"
    } <= names("reference")
    for backend in ("torch_sdpa", "torch_native", "flex_attention", "reference"):
        assert not {"../contract/__init__.py", "../contract/request.py", "../errors.py", "plugin.py"} & names(backend)


def test_sources_of_a_stranger_s_package(acme: Acme) -> None:
    """Everything that the adapter imports of its own package, and kernels beside it that are no Python."""
    folder = acme(adapter=ADAPTER + "from . import tiles\n")
    (folder / "tiles.py").write_text("import numpy\n")
    (folder / "unused.py").write_text("import torch\n")
    (folder / "csrc").mkdir()
    (folder / "csrc" / "kernel.cu").write_text("__global__ void attend() {}")
    (folder / "csrc" / "readme.txt").write_text("no kernel")
    importlib.invalidate_caches()
    info = get_manager().backends["acme", "cpu"]
    origin = get_manager().owner(info).origin
    assert sources_of(origin, info.providers) == ("__init__.py", "adapter.py", "csrc/kernel.cu", "tiles.py")


def test_a_run_whose_sources_are_in_no_file_is_no_evidence(acme: Acme, monkeypatch: pytest.MonkeyPatch) -> None:
    acme()

    def nowhere(origin: str, providers: object) -> tuple[str, ...]:
        raise PluginError("the adapter is in no file")

    monkeypatch.setattr("polyattn.testing.running.sources_of", nowhere)
    found = run("acme", device="cpu", dtypes=["float32"], per_row=1)
    assert found.ok
    assert found.unrecorded == "the adapter is in no file"
    with pytest.raises(ConfigError, match="evidence of acme@cpu is not written: the adapter is in no file"):
        record(found)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lost": "case 5"}, "the device was lost after case 5. Repair that case and run again"),
        ({"gates": {"float32: zeros": False}}, r"the gates do not tell right from wrong on this device \(float32: zer"),
        ({"findings": {"case 5": ["out: is wrong"]}}, "0 of .* cases failed. Repair them and run again"),
        (
            {"counts": {"refusals": {"refused": 5}}, "total": 5},
            "nothing that the rows declare was tried and passed; see",
        ),
        (
            {"counts": {}, "total": 0},
            "nothing that the rows declare was tried and passed; see which dtypes, families and",
        ),
    ],
)
def test_what_is_not_ok_is_no_evidence(report: Report, change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"evidence of torch_native@cpu is not written: {message}"):
        record(dataclasses.replace(report, **change))  # type: ignore[arg-type]


def test_an_adapter_without_a_file() -> None:
    nowhere = Provider("gone", (row(family="dense", dtype="float32", head_dim=64),), "polyattn.backends.gone:Gone")
    with pytest.raises(
        PluginError, match=r"the adapter 'polyattn\.backends\.gone:Gone' of provider 'gone' is in no file"
    ):
        sources_of(__file__, [nowhere])
