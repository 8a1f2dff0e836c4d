"""The tuner: what it tries, what it keeps, whom it keeps out, and what it does when it is disturbed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint

import polyattn
from polyattn import tuning
from polyattn.bench.measure import Candidate, Measured, Time, Workload, entrants, marks, probe
from polyattn.bench.measure.clock import made_current
from polyattn.bench.measure.marks import Marks
from polyattn.bench.measure.probe import Prober
from polyattn.bench.measure.running import out_of_memory
from polyattn.bench.tuner import offline as tuner
from polyattn.bench.tuner import online
from polyattn.bench.tuner.offline import tune_all
from polyattn.contract import Alias, AttentionRequest
from polyattn.epoch import EPOCH
from polyattn.errors import ConfigError, InvalidInputError
from polyattn.selection.select import Policy
from polyattn.selection.tuned_policy import tuning_place
from polyattn.tuning import BACKEND, TuningStore

CPU = torch.device("cpu")
ODD = {"dtype": "float32", "head_dim": 24, "heads": 2, "kv_heads": 2}


def workload(length: int = 64, **fields) -> Workload:
    given = {"dtype": "float32", "head_dim": 32, "heads": 2, "kv_heads": 2, "causal": "bottom_right", **fields}
    return Workload(AttentionRequest(**given), ((length, length),))


@pytest.fixture(autouse=True)
def little_time(monkeypatch):
    """Times mean nothing here: the shortest that there are."""
    monkeypatch.setattr(tuner, "Clock", lambda device: tuner_clock(device))


def tuner_clock(device):
    from polyattn.bench.measure import Clock

    return Clock(device, 0.001)


def tune(*workloads, **options):
    return list(tune_all(workloads, CPU, rounds=1, **options))


def test_the_fastest_is_kept_and_used(store):
    (tried,) = tune(workload())
    assert tried.outcome == "measured"
    assert set(tried.times) == {"torch_sdpa", "torch_native", "reference"}
    assert tried.times[tried.best] <= tuning.SAME * min(tried.times.values())
    assert tried.host == {}, "on a CPU the times are of whole calls"
    assert (tried.rule, tried.trouble, tried.quarantined) == ("torch_sdpa", {}, ())
    assert tried.gain * tuning.SAME >= 1
    (row,) = TuningStore(store).rows(subject=BACKEND)
    assert row.value == {"backend": tried.best, "times": dict(tried.times), "rule": "torch_sdpa"}
    assert (row.key["batch"], row.key["q"], row.key["k"]) == (1, 64, 64)
    assert {"torch", "polyattn"} <= set(dict(row.place.versions))
    selection = polyattn.explain(workload().request)
    assert (selection.backend, selection.source) == (tried.best, "tuned")
    best = tried.times[tried.best]
    assert (f"{best:.3g} us" if best < 1000 else f"{best / 1000:.3g} ms") in selection.why
    assert "measured today" in selection.why


def test_whose_kernels_were_measured_is_kept(store, monkeypatch):
    """Where an alias tells the providers of a backend apart."""

    def told(offer):
        aliases = (Alias("another", provider="torch"),) if offer.info.name == "torch_sdpa" else ()
        return dataclasses.replace(offer, info=dataclasses.replace(offer.info, aliases=aliases))

    here = entrants.catalogue()
    changed = dataclasses.replace(here, offers=tuple(map(told, here.offers)))
    monkeypatch.setattr(entrants, "catalogue", lambda: changed)
    tune(workload())
    (row,) = TuningStore(store).rows(subject=BACKEND)
    assert len(row.value["times"]) == 3
    assert row.value["by"] == {"torch_sdpa": "torch"}


def test_each_library_of_a_backend_is_measured_and_chosen_by_itself(odd, store):
    odd("several")
    asked = Workload(AttentionRequest(**ODD), ((40, 40),))
    (tried,) = tune(asked)
    assert {name for name in tried.times if "several" in name} == {"several", "several/quick"}
    assert tried.times["several/quick"] < tried.times["several"]
    assert tried.trouble["several/lies"].startswith("wrong: out: largest error")
    assert tried.quarantined == ("several/lies",)
    (row,) = TuningStore(store).rows(subject=BACKEND)
    assert row.value["by"] == {"several": "sleepy"}, "the others say it in their names"
    able = {candidate.name: candidate for candidate in entrants.candidates(asked, CPU)}
    assert able["several"].selection.provider == "sleepy/odd"
    assert "several/sleepy" not in able, "that is what it has by itself"

    times = {"several/quick": 1.0, "torch_sdpa": 2.0, "several": 9.0}
    value = {**row.value, "backend": "several/quick", "times": times}
    tuning.record(dataclasses.replace(row, value=value))
    selection = polyattn.explain(asked.request)
    assert (selection.backend, selection.provider, selection.source) == ("several", "quick/odd", "tuned")
    assert selection.why.startswith("1 us (others: several 9 us with sleepy, torch_sdpa 2 us) at batch 1")
    assert any(note.startswith("several/lies is quarantined for such requests: wrong") for note in selection.notes)
    q, k, v = (torch.randn(1, 40, 2, 24) for _ in range(3))
    assert torch.equal(polyattn.attention(q, k, v), polyattn.attention(q, k, v, backend="several/quick"))
    assert not torch.equal(polyattn.attention(q, k, v), polyattn.attention(q, k, v, backend="several/lies"))
    assert TuningStore(":memory:").import_rows(TuningStore(store).export(), {"several", "torch_sdpa"}) == 1

    # What keeps out the backend keeps out each.
    (held,) = TuningStore(store).quarantined()
    assert tuning.release("several/quick") == 0
    assert tuning.release("several/lies") == 1
    tuning.quarantine(dataclasses.replace(held, backend="several"))
    assert polyattn.explain(asked.request).backend == "torch_sdpa"
    (again,) = tune(asked, again=True)
    assert {name for name in again.times if "several" in name} == set()


def test_a_library_that_misbehaves_keeps_out_no_other_of_its_backend(odd, store):
    odd("mixed")
    asked = Workload(AttentionRequest(**ODD), ((40, 40),))
    (tried,) = tune(asked)
    assert tried.quarantined == ("mixed",)
    assert "mixed/quick" in tried.times
    (held,) = TuningStore(store).quarantined()
    assert held.backend == "mixed/lies", "what it has by itself"
    (row,) = TuningStore(store).rows(subject=BACKEND)

    def served(**times):
        named = {name.replace("_quick", "/quick"): time for name, time in times.items()}
        value = {
            "backend": min(named, key=named.get),
            "times": named,
            "by": {"mixed": "lies"} if "mixed" in named else {},
        }
        tuning.record(dataclasses.replace(row, value=value))
        selection = polyattn.explain(asked.request)
        return selection.backend, selection.provider

    assert served(mixed_quick=1.0, torch_sdpa=2.0) == ("mixed", "quick/odd")
    assert served(mixed=1.0, torch_sdpa=2.0)[0] == "torch_sdpa", "the same kernels by another name"
    assert polyattn.explain(asked.request, backend="mixed").provider == "lies/odd", "by name it can be had"
    (again,) = tune(asked, again=True)
    assert (again.quarantined, {name for name in again.times if "mixed" in name}) == ((), {"mixed/quick"})
    assert tuning.release("mixed") == 1
    assert TuningStore(store).quarantined() == []


def test_the_second_start_does_no_work(monkeypatch):
    first = tune(workload(), workload(128))
    monkeypatch.setattr(tuner, "measure", None)
    monkeypatch.setattr(tuner, "make_inputs", None)
    second = tune(workload(), workload(128))
    assert [one.outcome for one in second] == ["known", "known"]
    assert [one.times for one in second] == [one.times for one in first]
    with pytest.raises(TypeError):
        tune(workload(), again=True)


def test_the_device_that_is_measured_is_the_current_one_meanwhile(monkeypatch):
    current = [0]
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current[0])
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: current.__setitem__(0, index))
    with made_current(torch.device("cuda", 1)):
        assert current == [1]
    with made_current(CPU):
        assert current == [0]


def test_equal_workloads_are_measured_once():
    assert [one.outcome for one in tune(workload(), workload(60), workload())] == ["measured", "known"]


def test_the_time_ends(monkeypatch):
    clock = iter([0.0, 1.0, *[99.0] * 9])
    monkeypatch.setattr(tuner.time, "monotonic", lambda: next(clock))
    found = tune(workload(), workload(128), seconds=50)
    assert [one.outcome for one in found] == ["measured", "not begun"]
    assert found[1].reason == "the time of 50 s was up"


@pytest.mark.parametrize("options", [{"seconds": 0}, {"rounds": 0}])
def test_no_time_and_no_rounds_are_refused(options):
    with pytest.raises(InvalidInputError, match="must be above 0"):
        list(tune_all([workload()], CPU, **options))


def test_nothing_is_tuned_while_tuning_is_off(monkeypatch):
    monkeypatch.setenv("POLYATTN_TUNING", "off")
    with pytest.raises(ConfigError, match="POLYATTN_TUNING=off reads no measurements"):
        tune(workload())


def test_what_nobody_else_takes_is_left_alone():
    (tried,) = tune(workload(softcap=30.0))
    assert (tried.outcome, tried.rule, tried.reason) == ("alone", "reference", "no other backend takes it")


def test_what_cannot_be_measured_is_refused(store):
    (tried,) = tune(workload(dropout=0.5))
    assert tried.outcome == "refused"
    assert "dropout is random" in tried.reason
    assert not store.exists()


@pytest.mark.parametrize(
    "fields", [{"sinks": True, "grad": ("sinks",)}, {"mask": "additive", "grad": ("mask",)}], ids=["sinks", "mask"]
)
def test_who_trains_sinks_or_a_mask_alone_is_measured(store, fields):
    (tried,) = tune(workload(9, **fields))
    assert tried.outcome in ("measured", "alone")
    assert not tried.quarantined
    assert not tried.trouble


@pytest.mark.parametrize(
    "odd_one",
    [
        workload(10**17),
        Workload(
            AttentionRequest(family="paged", phase="decode", s_relation="one", page_size=4, kv_scales="tensor"),
            ((1, 9),),
        ),
    ],
    ids=["too long", "no such cache"],
)
def test_what_cannot_be_made_keeps_nobody_from_being_measured(store, odd_one):
    refused, measured = tune(odd_one, workload(9))
    assert refused.outcome == "refused"
    assert "its inputs cannot be made" in refused.reason
    assert not refused.quarantined
    assert measured.outcome == "measured"


@pytest.mark.parametrize("captured", [False, "session"])
def test_the_host_counts_where_calls_are_not_recorded(monkeypatch, captured):
    """torch_native is faster on the device, and takes longer to be called than either takes there."""
    fields = {"family": "paged", "phase": "decode", "page_size": 16, "layout": "THD", "s_relation": "one"}
    request = AttentionRequest(dtype="float32", heads=2, kv_heads=2, **fields, graph_capture=captured)
    asked = []

    def measure(inputs, entrants, *, issued, recorded, **how):
        asked.append((issued, recorded))
        device = {"torch_sdpa": 28.8, "torch_native": 27.3, "reference": 500.0}
        host = {"torch_sdpa": 20.0, "torch_native": 180.0, "reference": 90.0}
        seconds = {one.name: (device[one.name] / 1e6, host[one.name] / 1e6) for one in entrants}
        times = {name: (Time(took, 0.0, 9), Time(of_host, 0.0, 9)) for name, (took, of_host) in seconds.items()}
        return {name: Measured(took, of_host if issued else None) for name, (took, of_host) in times.items()}

    monkeypatch.setattr(tuner, "measure", measure)
    monkeypatch.setattr(tuner, "make_inputs", lambda *args: None)
    # No backend of a CPU has a session that is recorded.
    said = polyattn.explain(dataclasses.replace(request, graph_capture=False))
    able = [Candidate(name, said, name == "torch_sdpa", name) for name in ("torch_sdpa", "torch_native", "reference")]
    monkeypatch.setattr(tuner, "candidates", lambda asked, device: able)
    (tried,) = tune(Workload(request, ((1, 64),)))
    assert asked == [(not captured, captured == "session")]
    if captured:
        assert (tried.best, tried.host) == ("torch_native", {})
        assert tried.gain == pytest.approx(28.8 / 27.3)
    else:
        assert (tried.best, tried.gain, tried.host["torch_native"]) == ("torch_sdpa", 1.0, 180.0)
    (again,) = tune(Workload(request, ((1, 64),)))
    assert (again.outcome, again.best, again.times, again.host) == ("known", tried.best, tried.times, tried.host)


# ---------------------------------------------------------------------------------------------------------- quarantine


def all_time_but(monkeypatch, hanging):
    """Who hangs is tried for as long as was asked; nobody else is late, however slow the machine is."""
    examine = Prober.examine

    def patient(self, workload, backend, *deadline):
        with pytest.MonkeyPatch.context() as patch:
            if backend != hanging:
                patch.setattr(self, "seconds", 1800.0)
            return examine(self, workload, backend, *deadline)

    monkeypatch.setattr(Prober, "examine", patient)


def test_who_misbehaves_is_quarantined_and_the_rest_is_measured(odd, store, monkeypatch):
    monkeypatch.setattr(probe, "HANG_SECONDS", 3.0)
    all_time_but(monkeypatch, "hangs")
    odd("aborts", "exits", "hangs", "lies", "raises", "scribbles", "quick")
    asked = Workload(AttentionRequest(**ODD), ((40, 40),))
    (tried,) = tune(asked, probe_seconds=3)
    assert set(tried.times) == {"torch_sdpa", "torch_native", "reference", "quick"}
    assert set(tried.quarantined) == {"aborts", "exits", "hangs", "lies", "raises", "scribbles"}
    for name, message in (
        ("aborts", "crashed: its process was ended by SIGABRT"),
        ("exits", "crashed: its process ended with exit code 3: so be it"),
        ("hangs", "hung: it did not finish within 3 s"),
        ("lies", "wrong: out: largest error"),
        ("raises", "failed: RuntimeError: an illegal memory access was encountered"),
        ("scribbles", "wrong: it writes to key"),
    ):
        assert tried.trouble[name].startswith(message)
    held = {one.backend: one for one in TuningStore(store).quarantined()}
    assert set(held) == set(tried.quarantined)
    assert held["lies"].reason.endswith("(at batch 1, S_q 40, S_k 40)")

    # Automatic choice leaves them out, whatever the lengths; explain says so; by name they can still be had.
    selection = polyattn.explain(asked.request)
    assert any(note.startswith("aborts is quarantined for such requests: crashed") for note in selection.notes)
    assert any("`polyattn tune --release hangs` lets it be chosen again" in note for note in selection.notes)
    assert polyattn.explain(asked.request, backend="lies").backend == "lies"

    # The second start tries nobody again, also where there is something new to measure.
    (again,) = tune(Workload(AttentionRequest(**ODD), ((90, 90),)), probe_seconds=3)
    assert set(again.times) == {"torch_sdpa", "torch_native", "reference", "quick"}
    assert again.trouble == {}

    assert tuning.release("hangs") == 1
    assert tuning.release() == 5
    assert polyattn.explain(asked.request).notes == ()


def test_who_crashes_later_than_at_first_does_so_in_the_other_process(odd):
    odd("second", "grows", "quick")
    asked = AttentionRequest(**ODD, s_relation="one")
    (tried,) = tune(Workload(asked, ((1, 64),)))
    assert "quick" in tried.times
    assert set(tried.quarantined) == {"second", "grows"}
    assert all(text.startswith("crashed: its process was ended by SIGABRT") for text in tried.trouble.values())


def test_verdicts_are_kept_before_anything_is_run_here(odd, store, monkeypatch):
    odd("lies", "quick")
    monkeypatch.setattr(tuner, "measure", None)
    with pytest.raises(TypeError):
        tune(Workload(AttentionRequest(**ODD), ((40, 40),)))
    assert [held.backend for held in TuningStore(store).quarantined()] == ["lies"]


@pytest.mark.slow
def test_who_ends_the_tuner_twice_is_left_out_from_then_on(odd, store):
    odd("later", "quick")
    for left in (2, 1):
        process = start(24, 40)
        out, err = process.communicate(timeout=1800)
        assert process.returncode == -signal.SIGABRT, err
        assert (out, TuningStore(store).quarantined()) == ("", []), f"{left} more"
    process = start(24, 40)
    out, err = process.communicate(timeout=1800)
    assert (process.returncode, out) == (0, "measured\n"), err
    (held,) = TuningStore(store).quarantined()
    assert held.backend == "later"
    assert held.reason.startswith("crashed: two processes that measured it ended while it ran, though it was right in")
    assert not store.with_name(store.name + ".running").exists()


def its_process_ends(of: Marks) -> None:
    """What the system does then, and what is forgotten."""
    marks._USED.discard(of)
    for _, handle in of._open.values():
        os.close(handle)


def test_a_mark_is_of_whoever_ran(tmp_path):
    """Who is killed while others run, or while nobody does, tells nothing; nor does who ends in order."""
    path, both = tmp_path / "store", {"a": "a of a request", "b": "b of a request"}
    folder = tmp_path / "store.running"
    for number in range(3):
        with Marks(path, both) as marks:
            assert marks.blamed == []
            with marks.running("a"):
                with Marks(path, both) as beside, beside.running("a"):
                    assert beside.blamed == [], "another process measures the same, which has the mark"
                held = {name: file.read_bytes() for name, (file, _) in marks._open.items()}
            assert {name: state[:1] for name, state in held.items()} == {"a": b"1", "b": b"0"}
            with contextlib.suppress(KeyError), marks.running("b"):
                raise KeyError(number)
        assert not folder.exists()
    for strikes in (1, 2):
        ended = Marks(path, both)
        ended.__enter__()
        assert ended.blamed == []
        os.pwrite(ended._open["a"][1], b"1", 0)
        its_process_ends(ended)
        assert len(list(folder.iterdir())) == 2, strikes
    with Marks(path, both) as marks:
        assert marks.blamed == ["a"]
    with Marks(path, both) as marks:
        assert marks.blamed == []


@pytest.mark.skipif(sys.platform == "win32", reason="there are no marks")
def test_a_damaged_mark_blames_nobody(tmp_path):
    path, one = tmp_path / "store", {"a": "a of a request"}
    ended = Marks(path, one)
    ended.__enter__()
    its_process_ends(ended)
    (mark,) = (tmp_path / "store.running").iterdir()
    mark.write_bytes(b"\0\0")
    with Marks(path, one) as marks:
        assert marks.blamed == []
        assert list(marks._open) == ["a"]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no marks")
def test_who_runs_when_a_program_is_interrupted_is_not_to_blame(on, monkeypatch, tmp_path):
    def interrupted(thread):
        raise KeyboardInterrupt

    for _ in range(3):
        ended = Marks(tmp_path / "store", {"a": "a of a request"})
        ended.__enter__()
        assert ended.blamed == []
        ((_, handle),) = ended._open.values()
        os.pwrite(handle, b"1", 0)
        with monkeypatch.context() as patch:
            patch.setattr(online, "BUDGET", online.Budget())
            patch.setattr(online, "_measure", lambda *args: None)
            patch.setattr(online.threading.Thread, "join", interrupted)
            with pytest.raises(KeyboardInterrupt):
                polyattn.attention(*tensors(64), causal=True)
        with ended.running("a"):
            assert os.pread(handle, 1, 0) == b"0", "nor is who is run after that"
        its_process_ends(ended)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no marks")
def test_who_runs_when_a_scheduler_ends_the_command_is_not_to_blame(tmp_path):
    code = """
import os, signal, sys, time
from pathlib import Path
from polyattn.bench.measure.marks import Marks, orderly
with orderly(), Marks(Path(sys.argv[1]), {"a": "a of a request"}) as marks, marks.running("a"):
    assert marks.blamed == []
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], timeout=1800, check=False)
        assert done.returncode == 128 + signal.SIGTERM
        assert not (tmp_path / "store.running").exists()


def test_where_no_mark_can_be_made_one_measures_without(tmp_path):
    (tmp_path / "store.running").write_text("a file")
    for path in (None, tmp_path / "store"):
        with Marks(path, {"a": "a of a request"}) as marks, marks.running("a"):
            assert marks.blamed == []


PROBES = """
import sys, torch
from polyattn.bench.measure import Workload
from polyattn.bench.measure.probe import Prober
from polyattn.contract import AttentionRequest
asked = Workload(AttentionRequest(dtype="float32", head_dim=24, heads=2, kv_heads=2), ((40, 40),))
with Prober("cpu") as prober:
    prober.examine(asked, "quick")
    print(prober._process.pid, flush=True)
    prober.examine(asked, "hangs")
"""


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="asks Linux which processes there are")
@pytest.mark.slow
def test_the_other_process_ends_with_the_tuner(odd):
    odd("hangs", "quick")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", PROBES], env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = Path("/proc", process.stdout.readline().strip())
        assert child.is_dir()
        time.sleep(1)
        process.kill()
    # A process whose parent is gone may stay as a zombie where nobody collects it.
    for _ in range(6000):
        if not child.is_dir() or (child / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    os.kill(int(child.name), signal.SIGKILL)
    raise AssertionError("it goes on")


@pytest.mark.slow
def test_a_short_time_is_no_reason_to_quarantine(odd, store, monkeypatch):
    all_time_but(monkeypatch, "hangs")
    odd("hangs", "quick")
    (tried,) = tune(Workload(AttentionRequest(**ODD), ((40, 40),)), probe_seconds=3)
    assert "quick" in tried.times
    assert tried.trouble == {
        "hangs": "late: it did not finish within 3 s, and its process was ended; below 60 s that is no hang"
    }
    assert TuningStore(store).quarantined() == []


def test_who_prints_is_heard_all_the_same(odd):
    odd("chatty", "quick")
    (tried,) = tune(Workload(AttentionRequest(**ODD), ((40, 40),)), probe_seconds=1800)
    assert {"chatty", "quick"} <= set(tried.times)
    assert tried.trouble == {}


@pytest.mark.parametrize("seconds", [0, -1.0, math.inf, math.nan])
def test_a_process_of_ones_own_has_a_finite_time(seconds):
    with pytest.raises(InvalidInputError, match=rf"probe_seconds={seconds}: who is tried .*; 180 are usual"):
        tune(workload(), probe_seconds=seconds)


def test_the_longest_time_is_one(odd):
    odd("quick")
    with Prober("cpu", 1e12) as prober:
        assert prober.examine(Workload(AttentionRequest(**ODD), ((40, 40),)), "quick") == ("", "")


def test_what_the_other_process_cannot_make_out_says_nothing_about_the_backend():
    with Prober("cpu") as prober, pytest.raises(ConfigError, match="did not try nobody: it does not take"):
        prober.examine(workload(), "nobody")


@pytest.mark.parametrize("captured", [False, "session"])
def test_a_layer_of_a_recorded_step_can_be_tried_in_the_other_process(captured):
    fields = {"family": "paged", "phase": "decode", "page_size": 16, "layout": "THD", "s_relation": "one"}
    request = AttentionRequest(dtype="float32", heads=2, kv_heads=2, **fields, graph_capture=captured)
    asked = Workload(request, ((1, 64),))
    assert Workload.of(json.loads(json.dumps(asked.plain())), "probe").request == asked.request


def test_automatic_choice_avoids_the_quarantined(store):
    request = workload().request
    assert polyattn.explain(request).backend == "torch_sdpa"
    place = tuning_place("cpu")
    held = tuning.Quarantined(place, "torch_sdpa", tuning.request_key(request), "it lies", "2026-01-01")
    tuning.quarantine(held)
    selection = polyattn.explain(request)
    assert selection.backend == "torch_native"
    assert selection.notes[-1].startswith("torch_sdpa is quarantined for such requests: it lies")
    other = dataclasses.replace(request, softcap=0.0, window=(5, -1))
    assert polyattn.explain(other).backend == "torch_sdpa", "of other requests nothing is known"
    elsewhere = dataclasses.replace(place, device="another chip")
    tuning.release()
    tuning.quarantine(dataclasses.replace(held, place=elsewhere))
    assert polyattn.explain(request).backend == "torch_sdpa", "nor on this device"


def test_the_gain_is_of_what_decides():
    """The host issues a recorded call with its graph."""
    times, host = {"a": 10.0, "b": 20.0}, {"a": 100.0, "b": 20.0}
    gains = [
        tuner.Tried(workload(graph_capture=captured), "measured", times, host, "b").gain for captured in (False, True)
    ]
    assert gains == [0.2, 2.0]


def test_little_memory_is_no_misbehaviour(monkeypatch, store):
    def poor(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("polyattn.backends.torch_native.TorchNative.bind", poor)
    (tried,) = tune(workload())
    assert set(tried.times) == {"torch_sdpa", "reference"}
    assert "OutOfMemoryError" in tried.trouble["torch_native"]
    assert tried.quarantined == ()
    assert TuningStore(store).quarantined() == []


def test_a_cpu_that_has_no_memory_and_a_process_that_was_killed_are_no_misbehaviour(odd, store):
    odd("greedy", "killed", "quick")
    (tried,) = tune(Workload(AttentionRequest(**ODD), ((40, 40),)))
    assert "quick" in tried.times
    assert tried.trouble["greedy"].startswith("memory: RuntimeError: ")
    assert tried.trouble["killed"] == "memory: its process was ended by SIGKILL, as where memory runs out"
    assert tried.quarantined == ()


def test_inputs_that_do_not_fit_end_their_workload_only(monkeypatch):
    real = tuner.make_inputs

    def make(workload, device):
        if workload.longest == (64, 64):
            torch.empty(2**45)
        return real(workload, device)

    monkeypatch.setattr(tuner, "make_inputs", make)
    first, second = tune(workload(64), workload(128))
    assert (first.outcome, second.outcome) == ("refused", "measured")
    assert first.reason.startswith("no room for its inputs: RuntimeError: ")


def test_inputs_that_do_not_fit_in_the_other_process(odd):
    odd("quick")
    much = Workload(AttentionRequest(**ODD), ((2**20, 2**20),) * 2**12)
    endless = Workload(AttentionRequest(**ODD), ((2**61, 2**61),))
    with Prober("cpu") as prober:
        kind, reason = prober.examine(much, "quick")
        assert (kind, reason[:23]) == ("memory", "no room for its inputs:")
        kind, reason = prober.examine(endless, "quick")
        assert (kind, reason[:26]) == ("memory", "its inputs cannot be made:")


@pytest.mark.parametrize(
    "error, memory",
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("out of resource: shared memory"), False),
        (ValueError("DefaultCPUAllocator: "), False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.EACCES, "Permission denied"), False),
    ],
)
def test_which_errors_are_of_memory(error, memory):
    assert out_of_memory(error) is memory
    outer = RuntimeError("it failed")
    outer.__cause__ = error
    assert out_of_memory(outer) is memory


# ----------------------------------------------------------------------------------------------------------- disturbed

ONE = """
import sys, torch
from polyattn.bench.measure import Workload
from polyattn.bench.measure import Clock
from polyattn.bench.tuner import offline as tuner
from polyattn.contract import AttentionRequest
tuner.Clock = lambda device: Clock(device, 0.001)
request = AttentionRequest(dtype="float32", head_dim=int(sys.argv[1]), heads=2, kv_heads=2)
asked = [Workload(request, ((n, n),)) for n in map(int, sys.argv[2:])]
for one in tuner.tune_all(asked, torch.device("cpu"), rounds=1):
    print(one.outcome, flush=True)
"""


def start(*words):
    command = [sys.executable, "-c", ONE, *map(str, words)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_lose_nothing(store):
    lengths = (4, 8, 16, 32, 64)
    both = [start(16, *lengths), start(48, *lengths)]
    said = [process.communicate(timeout=1800) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    rows = TuningStore(store).rows(subject=BACKEND)
    found = {(row.key["request"]["head_dim"], row.key["q"]) for row in rows}
    assert found == {(dim, length) for dim in (16, 48) for length in lengths}


def test_a_killed_tuner_leaves_a_valid_store(store):
    process = start(16, *(2**n for n in range(1, 12)))
    assert process.stdout is not None
    assert process.stdout.readline() == "measured\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = TuningStore(store).rows(subject=BACKEND)
    assert before
    again = start(16, 2, 4)
    out, _ = again.communicate(timeout=1800)
    assert out.splitlines()[0] == "known"
    assert len(TuningStore(store).rows(subject=BACKEND)) >= 2


def test_a_store_of_another_device_is_ignored_with_a_reason(store):
    tune(workload())
    (row,) = TuningStore(store).rows(subject=BACKEND)
    store.unlink()
    versions = {**dict(row.place.versions), "torch": "1.13"}
    for place in (
        dataclasses.replace(row.place, device="NVIDIA H200", arch="sm90"),
        dataclasses.replace(row.place, versions=tuple(sorted(versions.items()))),
    ):
        TuningStore(store).record(
            dataclasses.replace(row, place=place, value={"backend": "reference", "times": {"reference": 1.0}})
        )
    tuning.reload()
    selection = polyattn.explain(workload().request)
    assert (selection.backend, selection.source) == ("torch_sdpa", "platform rule")
    assert selection.notes[-1].startswith("2 measurements of such requests are not used: of ")
    assert "of NVIDIA H200 (sm90), which this machine has not" in selection.notes[-1]
    assert "of torch 1.13, which this machine has not" in selection.notes[-1]
    assert tune(workload())[0].outcome == "measured"


def test_an_exported_store_serves_elsewhere(store, tmp_path):
    (tried,) = tune(workload())
    data = json.loads(json.dumps(tuning.store().export()))
    other = TuningStore(tmp_path / "other.sqlite3")
    with pytest.raises(ConfigError, match="no backend 'torch_native' is registered here"):
        other.import_rows(data, ["torch_sdpa", "reference"])
    assert other.import_rows(data, ["torch_sdpa", "torch_native", "reference"]) == 1
    os.replace(tmp_path / "other.sqlite3", store)
    tuning.reload()
    assert polyattn.explain(workload().request).backend == tried.best


# ------------------------------------------------------------------------------------------------------ calls by length


def measured(length: int, best: str, by=None, **fields) -> None:
    asked = workload(length, platform="cpu", **fields)
    rest = {"torch_sdpa": 20.0, "torch_native": 30.0, "reference": 400.0}
    times = {**rest, best: 10.0}
    tuning.record(tuning.backend_row(tuning_place("cpu"), asked.request, asked.buckets, times, "a test", by=by))


def tensors(length: int, grad: bool = False):
    return [torch.randn(1, length, 2, 32, requires_grad=grad) for _ in range(3)]


@pytest.fixture
def served(monkeypatch):
    """Who served each call."""
    from polyattn.backends import torch_native, torch_sdpa

    names: list[str] = []
    inside: list[str] = []
    for name, adapter in (("torch_sdpa", torch_sdpa.TorchSDPA), ("torch_native", torch_native.TorchNative)):

        def bind(self, request, name=name, before=adapter.bind):
            bound = before(self, request)

            def forward(*args, **kw):
                if inside:  # torch_native calls torch_sdpa
                    return bound.forward(*args, **kw)
                names.append(name)
                inside.append(name)
                try:
                    return bound.forward(*args, **kw)
                finally:
                    inside.pop()

            return dataclasses.replace(bound, forward=forward, simple=None)

        monkeypatch.setattr(adapter, "bind", bind)
    polyattn.registry.manager.reset_manager()
    return names


def test_each_call_is_served_by_who_was_fastest_at_its_lengths(served):
    measured(64, "torch_sdpa")
    measured(1024, "torch_native")
    site = polyattn.bind(causal=True)
    for length in (64, 1000, 64, 33, 2000, 1):
        q, k, v = tensors(length)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True
        )
        torch.testing.assert_close(site(q, k, v), wanted.transpose(1, 2))
    # 1 is far from all that was measured: there the rule decides.
    assert served == ["torch_sdpa", "torch_native", "torch_sdpa", "torch_sdpa", "torch_native", "torch_sdpa"]


def test_a_profile_names_who_serves_calls_of_these_lengths(served):
    measured(64, "torch_sdpa")
    measured(1024, "torch_native")
    site = polyattn.bind(causal=True)
    with torch.profiler.profile() as found:
        for length in (64, 1000, 33):
            site(*tensors(length))
    names = [event.name for event in found.events() if event.name.startswith("polyattn.")]
    assert names == [f"polyattn.attention {name}@cpu" for name in served]
    assert served == ["torch_sdpa", "torch_native", "torch_sdpa"]


def test_a_call_that_was_not_measured_is_served_as_one_like_it(served):
    measured(64, "torch_native", heads=4, kv_heads=4)
    measured(1024, "torch_sdpa", heads=4, kv_heads=4)
    request = workload(64, platform="cpu").request
    for length in (64, 1000):
        polyattn.attention(*tensors(length), causal=True)
        said = polyattn.explain(tuning.with_lengths(request, 1, length, length))
        assert (said.backend, said.source) == (served[-1], "tuned")
        assert "of a request like this one with heads=4, kv_heads=4" in said.why
    assert served == ["torch_native", "torch_sdpa"]


def test_the_short_way_of_a_kernel_is_taken_where_it_serves(monkeypatch):
    from polyattn.backends import torch_sdpa

    short: list[int] = []

    def bind(self, request, before=torch_sdpa.TorchSDPA.bind):
        bound = before(self, request)

        def simple(query, key, value):
            short.append(query.shape[1])
            return bound.forward(query, key, value)

        return dataclasses.replace(bound, simple=simple)

    monkeypatch.setattr(torch_sdpa.TorchSDPA, "bind", bind)
    polyattn.registry.manager.reset_manager()
    measured(64, "torch_sdpa")
    measured(1024, "torch_native")  # by a rewrite, which has no short way
    site = polyattn.bind(causal=True)
    for _ in range(2):
        site(*tensors(64))
    assert short == [], "the third call of a kind is the first that may take it"
    for length in (64, 1000, 33):
        site(*tensors(length))
    assert short == [64, 33]


@pytest.mark.parametrize("way", ["store", "shipped", "online"])
@pytest.mark.parametrize("packed", [False, True])
def test_keys_that_grow_are_chosen_for_once_in_a_bucket(served, monkeypatch, way, packed):
    """A decode loop: no call has the lengths of another, and a choice holds for all that share a bucket."""
    fields = {"s_relation": "one", "platform": "cpu"}
    if packed:
        fields |= {"family": "varlen", "layout": "THD"}
    rows = []
    for length, best in ((64, "torch_native"), (1024, "torch_sdpa")):
        given = AttentionRequest(dtype="float32", head_dim=32, heads=2, kv_heads=2, **fields)
        times = {"torch_sdpa": 20.0, "torch_native": 30.0, "reference": 400.0, best: 10.0}
        asked = Workload(given, ((1, length),))
        rows.append(tuning.backend_row(tuning_place("cpu"), asked.request, asked.buckets, times, "a test"))
    if way == "shipped":
        monkeypatch.setattr(tuning.known, "shipped_rows", lambda: rows)
        tuning.reload()
    else:
        tuning.record(*rows)
    if way == "online":
        monkeypatch.setenv("POLYATTN_TUNING", "online")
    selections = []
    for module in (polyattn.dispatch.by_length, polyattn.dispatch.binding):
        real = module.select
        monkeypatch.setattr(module, "select", lambda *args, real=real, **how: [selections.append(1), real(*args)][1])
    site = polyattn.bind()

    def decode(*lengths):
        selections.clear()
        for s_k in lengths:
            query, (key, value) = torch.randn(1, 1, 2, 32), torch.randn(2, 1, s_k, 2, 32)
            if not packed:
                site(query, key, value)
                continue
            starts = [torch.tensor([0, tokens], dtype=torch.int32) for tokens in (1, s_k)]
            polyattn.varlen_attention(
                query[0], key[0], value[0], cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=1,
                max_seqlen_k=s_k,
            )  # fmt: skip
        return len(selections)

    decode(33, 34)
    assert decode(*range(35, 64)) == 0
    assert decode(*range(65, 100)) == 1
    assert decode(*range(513, 530)) == 1
    assert served == ["torch_native"] * (2 + 29 + 35) + ["torch_sdpa"] * 17


@pytest.mark.parametrize("predicts, chosen", [(False, 1), (True, 3)])
def test_where_predictions_may_choose_keys_that_grow_are_chosen_for_in_steps(monkeypatch, predicts, chosen):
    measured(64, "torch_native")
    measured(1024, "torch_sdpa")
    here = tuning.known.known
    model = object() if predicts else None
    monkeypatch.setattr(
        polyattn.dispatch.by_length, "known", lambda *asked: dataclasses.replace(here(*asked), model=model)
    )
    found, real = [], polyattn.dispatch.by_length._at
    monkeypatch.setattr(polyattn.dispatch.by_length, "_at", lambda *asked: [found.append(asked[-1]), real(*asked)][1])
    site = polyattn.bind(causal=True)
    for length in range(65, 100):
        site(*tensors(length))
    assert [lengths[1] for lengths in found] == [65, 81, 97][:chosen]


def test_explain_of_a_call_knows_its_lengths():
    measured(64, "torch_sdpa")
    measured(1024, "torch_native")
    short, long, none = (polyattn.explain(polyattn.attention, *tensors(n), causal=True) for n in (64, 900, 1))
    assert (short.backend, short.source) == ("torch_sdpa", "tuned")
    assert (long.backend, long.source) == ("torch_native", "tuned")
    assert "at batch 1, S_q 1024, S_k 1024" in long.why
    assert (none.backend, none.source) == ("torch_sdpa", "platform rule")
    overall = polyattn.explain(dataclasses.replace(workload().request, q_bucket=0, k_bucket=0, batch_bucket=0))
    assert overall.source == "tuned"
    assert overall.why == "1.41 x the fastest over 2 measured lengths, measured today"


def test_gradients_flow_through_whoever_serves(served):
    for length, best in ((64, "torch_sdpa"), (1024, "torch_native")):
        measured(length, best, grad=("query", "key", "value"))
    for length in (64, 1000):
        inputs = tensors(length, grad=True)
        found = torch.autograd.grad(polyattn.attention(*inputs, causal=True).square().sum(), inputs)
        wanted = torch.autograd.grad(
            torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in inputs), is_causal=True)
            .square()
            .sum(),
            inputs,
        )
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert served == ["torch_sdpa", "torch_native"]


def test_an_explicit_choice_is_never_overruled(served):
    measured(64, "torch_native")
    polyattn.attention(*tensors(64), causal=True, backend="torch_sdpa")
    with polyattn.use_backend("torch_sdpa"):
        polyattn.attention(*tensors(64), causal=True)
    polyattn.attention(*tensors(64), causal=True)
    assert served == ["torch_sdpa", "torch_sdpa", "torch_native"]


@pytest.fixture
def selected(monkeypatch):
    """Whom selection chose, each time it was asked."""
    names: list[str] = []
    real = polyattn.dispatch.binding.select

    def select(*args, **options):
        found = real(*args, **options)
        names.append(found.backend)
        return found

    monkeypatch.setattr(polyattn.dispatch.binding, "select", select)
    return names


def compile_attention(**options):
    torch._dynamo.reset()  # it counts what other tests compiled
    return torch.compile(lambda *t: polyattn.attention(*t, causal=True, **options), backend="eager", fullgraph=True)


def test_compiled_code_has_the_choice_for_all_lengths(served):
    for length, best in ((64, "torch_native"), (1024, "torch_native"), (4096, "torch_sdpa")):
        measured(length, best)
    compiled = compile_attention()
    for length in (64, 4096):
        q, k, v = tensors(length)
        found, wanted = compiled(q, k, v), polyattn.attention(q, k, v, causal=True)
        torch.testing.assert_close(found, wanted)
    # Compiled code first, each time, and then the call that looks at its lengths.
    assert served == ["torch_native", "torch_native", "torch_native", "torch_sdpa"]


def test_compiled_code_is_traced_anew_only_where_its_choice_changes(selected):
    compiled, given = compile_attention(), tensors(64)

    def traced():
        selected.clear()
        compiled(*given)
        return selected[:]

    assert traced() == ["torch_sdpa"]
    for heads in range(1, 13):  # torch.compile gives up after 8
        tuning.reload()
        assert traced() == [], "nothing was measured"
        measured(64, "torch_native", heads=2 * heads, kv_heads=2 * heads, v_head_dim=48)
        polyattn.attention(*torch.randn(3, 1, 64, heads + 2, 8), causal=True)
        measured(64, "torch_native", heads=heads + 2, kv_heads=heads + 2, head_dim=8)
        assert traced() == [], "others were"
    measured(64, "torch_native", heads=4, kv_heads=4)
    assert traced() == ["torch_native"], "one like it was"
    measured(64, "torch_sdpa")
    assert traced() == ["torch_sdpa"]
    measured(64, "torch_native")
    assert traced() == ["torch_native"]
    measured(64, "torch_native")
    assert traced() == [], "the same once more"
    measured(64, "torch_native", by={"torch_native": "another library"})
    assert traced() == ["torch_sdpa"]
    measured(64, "torch_native")
    assert traced() == ["torch_native"]
    request, place = workload().request, tuning_place("cpu")
    tuning.quarantine(tuning.Quarantined(place, "torch_native", tuning.request_key(request), "it lies", "2026-01-01"))
    assert traced() == ["torch_sdpa"]
    tuning.release()
    assert traced() == ["torch_native"]


def test_what_another_process_quarantined_is_out_after_a_reload(selected, store):
    compiled, given = compile_attention(), tensors(64)
    compiled(*given)
    held = tuning.Quarantined(
        tuning_place("cpu"), "torch_sdpa", tuning.request_key(workload().request), "it lies", "2026-01-01"
    )
    TuningStore(store).quarantine(held)
    tuning.reload()
    selected.clear()
    compiled(*given)
    assert selected == ["torch_native"]


def test_compiled_code_with_a_backend_by_name_is_not_traced_anew(selected):
    compiled, given = compile_attention(backend="torch_sdpa"), tensors(64)
    compiled(*given)
    measured(64, "torch_native")
    selected.clear()
    compiled(*given)
    assert selected == []


def test_a_mode_that_is_none_is_an_error_of_compiled_code_too(monkeypatch):
    compiled, given = compile_attention(), tensors(64)
    compiled(*given)
    monkeypatch.setenv("POLYATTN_TUNING", "on")
    tuning.reload()
    with pytest.raises(Exception, match=r"POLYATTN_TUNING='on' is not known. Allowed: use, off, online"):
        compiled(*given)


def test_an_engine_is_bound_to_what_was_measured():
    from polyattn import serving

    def engine():
        layers = [serving.AttentionLayer(0, 4, 2, 64)]
        pool = serving.KVPool(layers, serving.KVCacheConfig(page_size=16), 8, dtype=torch.bfloat16, device=CPU)
        table = serving.RequestTable(2, 64, 16, [-1], [serving.PageAllocator(8)])
        return serving.AttentionBackend(layers, pool, table, limits=serving.Limits(2, 8, 64)).explain(0)

    before = engine()
    assert {selection.backend for selection in before.values()} == {"torch_native"}
    request, place = before["decode"].request, tuning_place("cpu")
    for length in (32, 1024):
        times = {"torch_sdpa": 10.0, "torch_native": 20.0, "reference": 99.0}
        tuning.record(tuning.backend_row(place, request, (2, 1, length), times, "a test"))
    after = engine()
    assert (after["decode"].backend, after["decode"].source) == ("torch_sdpa", "tuned")
    assert after["extend"].backend == "torch_native"


def test_one_backend_serves_an_engine_whatever_the_lengths(monkeypatch):
    """It was planned for, and may be recorded: a latent cache, whose keys the pool writes itself."""
    from polyattn import serving
    from polyattn.dispatch import binding as choose

    layers = [serving.AttentionLayer(0, 4, 1, 96, 64, scale=0.1, latent=True)]

    def engine():
        pool = serving.KVPool(layers, serving.KVCacheConfig(page_size=16), 64, dtype=torch.float32, device=CPU)
        table = serving.RequestTable(2, 1024, 16, [-1], [serving.PageAllocator(64)], device=CPU)
        return table, serving.AttentionBackend(layers, pool, table, limits=serving.Limits(2, 8, 1024))

    request = engine()[1].explain(0)["decode"].request
    for length, times in ((32, (100.0, 10.0)), (1024, (10.0, 1000.0))):
        found = dict(zip(("torch_native", "torch_sdpa"), times, strict=True))
        tuning.record(tuning.backend_row(tuning_place("cpu"), request, (1, 1, length), found, "a test"))
    served, load = [], choose.load

    def watched(selection):
        chosen = load(selection)

        def forward(*tensors, **given):
            served.append(selection.backend)
            return chosen.bound.forward(*tensors, **given)

        def session(slot):
            made = chosen.bound.session(slot)

            def noted(*tensors, **given):
                served.append(selection.backend)
                return made.forward(*tensors, **given)

            return types.SimpleNamespace(plan=made.plan, prepare=made.prepare, forward=noted)

        bound = dataclasses.replace(chosen.bound, forward=forward, session=chosen.bound.session and session)
        return dataclasses.replace(chosen, bound=bound)

    monkeypatch.setattr(choose, "load", watched)
    table, attention = engine()
    for length in (20, 700):
        row = table.add()
        table.extend(row, length)
        table.flush()
        attention.init_forward_metadata(serving.ForwardBatch(serving.ForwardMode.DECODE, [row], [length], [1]))
        served.clear()
        attention.forward(torch.randn(1, 4, 96), torch.randn(1, 96), None, layers[0])
        assert served[:1] == ["torch_native"], "it loses least over both"
        table.remove(row)


def test_off_uses_nothing(monkeypatch):
    measured(64, "torch_native")
    assert polyattn.explain(workload().request).backend == "torch_native"
    monkeypatch.setenv("POLYATTN_TUNING", "off")
    tuning.reload()
    assert (polyattn.explain(workload().request).backend) == "torch_sdpa"


# --------------------------------------------------------------------------------------------------------------- online


@pytest.fixture
def on(monkeypatch):
    monkeypatch.setenv("POLYATTN_TUNING", "online")
    # Time enough on any machine; a test of what is done without it says how much there is.
    monkeypatch.setattr(online, "BUDGET", online.Budget(3600.0, 1800.0))
    monkeypatch.setattr(online, "_OPERATIONS", 2 * 2 * 2 * 64 * 64 * 32)
    tuning.reload()
    return online.BUDGET


def rows():
    return {(row.key["q"], row.key["k"]) for row in tuning.store().rows(subject=BACKEND)}


def test_the_first_large_call_is_measured(on):
    polyattn.attention(*tensors(32), causal=True)
    assert rows() == set(), "it is small"
    polyattn.attention(*tensors(64), causal=True)
    assert rows() == {(64, 64)}
    assert on.left < on.seconds
    assert tuning.store().rows(subject=BACKEND)[0].source == "POLYATTN_TUNING=online"
    assert polyattn.explain(polyattn.attention, *tensors(64), causal=True).source == "tuned"
    left = on.left
    polyattn.attention(*tensors(60), causal=True)
    assert on.left == left, "once"
    inputs = tensors(100, grad=True)
    polyattn.attention(*inputs, causal=True).sum().backward()
    assert rows() == {(64, 64), (128, 128)}
    assert all(tensor.grad is not None for tensor in inputs)


def test_what_is_not_measured_online(on, monkeypatch):
    polyattn.attention(*tensors(64), causal=True, backend="torch_sdpa")
    with polyattn.use_backend("torch_native"):
        polyattn.attention(*tensors(64), causal=True)
    torch.compile(lambda q, k, v: polyattn.attention(q, k, v, causal=True), backend="eager")(*tensors(64))
    tuning.note_serving("a test")
    polyattn.attention(*tensors(64), causal=True)
    monkeypatch.setattr(tuning.offline, "_serving", [])
    on.left = 0.0
    polyattn.attention(*tensors(64), causal=True)
    assert rows() == set()


def test_what_is_computed_anew_is_not_measured_before_or_after(on):
    """Activation checkpointing compares what a recomputation saves with what the forward did."""
    inputs = tensors(64, grad=True)
    seen = torch.utils.checkpoint.checkpoint(
        lambda *given: polyattn.attention(*given, causal=True), *inputs, use_reentrant=False
    )
    polyattn.attention(*inputs, causal=True)  # of a layer that is not checkpointed
    seen.sum().backward()
    assert rows() == set()
    assert tuning.store().quarantined() == []
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        polyattn.attention(*tensors(100, grad=True))
    assert len(packed) < 20
    polyattn.attention(*tensors(64), causal=True)
    assert rows() == {(64, 64)}, "of another request, which keeps nothing for a backward"


def test_nothing_is_measured_while_a_mode_looks_on(on):
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.overrides import TorchFunctionMode
    from torch.utils.flop_counter import FlopCounterMode

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with FlopCounterMode(display=False):
        polyattn.attention(*tensors(64))
    make_fx(lambda q, k, v: polyattn.attention(q, k, v))(*tensors(64))
    with Seen():
        polyattn.attention(*tensors(64))
    assert rows() == set()
    with torch.device("meta"):  # says where new tensors are, and nothing else
        polyattn.attention(*[t.to("cpu") for t in torch.randn(3, 1, 64, 2, 32, device="cpu")])
    assert rows() == {(64, 64)}


def test_what_is_measured_online_has_nothing_of_the_callers_thread(on, monkeypatch):
    seen = []

    def look(*args, **options):
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled(), torch.empty(0).device.type))
        raise RuntimeError("it is broken")

    monkeypatch.setattr(online, "tune_one", look)
    given = tensors(64)
    with torch.autocast("cpu"), torch.inference_mode(), torch.device("meta"):
        with pytest.raises(RuntimeError, match="it is broken"):
            polyattn.attention(*given)
        polyattn.attention(*given)
    assert seen == [(False, False, "cpu")]
    assert not on.lock.locked()


def test_somebody_is_left_to_serve(monkeypatch, store):
    """What fails for everybody is nobody's fault."""

    def broken(*args, **options):
        raise RuntimeError("no such device")

    monkeypatch.setattr(Candidate, "prepare", broken)
    (tried,) = tune(workload())
    assert (tried.outcome, tried.reason) == ("refused", "not one backend could be measured")
    assert set(tried.quarantined) == {"torch_native", "reference"}
    assert tried.trouble["torch_sdpa"] == (
        "failed: RuntimeError: no such device; it is not quarantined, for nobody else is left"
    )
    assert polyattn.explain(workload().request).backend == "torch_sdpa"


def test_a_call_that_cannot_be_measured_is_served_all_the_same(on, monkeypatch):
    monkeypatch.setattr(online, "tune_one", lambda *args, **options: (_ for _ in ()).throw(ConfigError("locked")))
    with pytest.warns(RuntimeWarning, match="nothing was measured for dense prefill.*: locked"):
        assert polyattn.attention(*tensors(64), causal=True).shape == (1, 64, 2, 32)


def seconds_slept(monkeypatch):
    """How long each sleep is, from here on: so many calls of slow backends, whatever else the machine does."""
    slept, sleep = [], time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
    return slept


def test_slow_backends_have_no_more_than_the_time_for_one_request(on, odd, monkeypatch):
    odd("slow", "slower", "slowest")
    on.each, on.isolation = 2.5, "never"
    slept = seconds_slept(monkeypatch)
    with pytest.warns(RuntimeWarning, match=r"nothing was measured for .*: the time of \S+ s was up before two"):
        polyattn.attention(*torch.randn(3, 1, 100, 2, 24))
    assert slept.count(1) <= 4, "calls of a second each: none is begun once the time is up"
    assert rows() == set()
    assert tuning.store().quarantined() == []


@pytest.mark.slow
def test_a_backend_that_hangs_leaves_time_for_the_others(on, odd, monkeypatch):
    """It would hang for hours; a small part of the time for one request is for trying it."""
    odd("hangs", "quick")
    monkeypatch.setattr(tuner, "_PROBING", 0.005)
    on.each = on.left = 1600.0
    polyattn.attention(*torch.randn(3, 1, 100, 2, 24))
    (row,) = tuning.store().rows(subject=BACKEND)
    assert {"torch_sdpa", "torch_native", "reference"} <= set(row.value["times"])
    assert tuning.store().quarantined() == []


def test_without_a_time_of_the_rules_choice_nobody_replaces_it(on, odd, monkeypatch):
    odd("sleepy")
    on.isolation = "never"
    monkeypatch.setattr(tuner, "_too_slow", lambda *args: {"sleepy": ("late", "it compiles")})
    with pytest.warns(RuntimeWarning, match=r"was up before sleepy, the choice without measuring, was timed"):
        polyattn.attention(*tensors(100))
    assert rows() == set()


def test_where_no_process_can_be_started_a_call_is_served_all_the_same(on, odd, monkeypatch):
    odd("quick")
    for nothing in ("/nowhere/python", None):
        monkeypatch.setattr(online, "BUDGET", online.Budget())
        monkeypatch.setattr(sys, "executable", nothing)
        with pytest.warns(RuntimeWarning, match=r"no process can be started to try backends in: .* cannot be run \("):
            assert polyattn.attention(*torch.randn(3, 1, 100, 2, 24)).shape == (1, 100, 2, 24)


def test_who_is_too_slow_for_the_time_is_left_out(on, odd, monkeypatch):
    """It is tried once, and would be called six times more."""
    odd("slow")
    on.isolation = "never"
    monkeypatch.setattr(tuner, "_CALLS", 6000)
    on.each = on.left = 1600.0
    slept = seconds_slept(monkeypatch)
    polyattn.attention(*torch.randn(3, 1, 256, 2, 24))
    assert slept.count(1) <= 2
    (row,) = tuning.store().rows(subject=BACKEND)
    assert set(row.value["times"]) == {"torch_sdpa", "torch_native", "reference"}
    assert row.value["late"] == ["slow"]


def test_whom_a_call_had_no_time_for_is_measured_by_who_has(on, monkeypatch):
    on.isolation = "never"
    monkeypatch.setattr(tuner, "_too_slow", lambda *args: {"reference": ("late", "it is slow")})
    polyattn.attention(*tensors(64), causal=True)
    (row,) = tuning.store().rows(subject=BACKEND)
    assert row.value["late"] == ["reference"]
    monkeypatch.setattr(online, "BUDGET", online.Budget())
    with monkeypatch.context() as nobody:
        nobody.setattr(tuner, "measure", None)
        polyattn.attention(*tensors(64), causal=True)  # as another process would: it has no more time either
    (tried,) = tune(workload())
    assert (tried.outcome, set(tried.times)) == ("measured", {"torch_sdpa", "torch_native", "reference"})
    (tried,) = tune(workload())
    assert tried.outcome == "known"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_process_that_was_forked_while_another_thread_measures_measures_too():
    code = """
import os
from polyattn.bench.tuner import online
online.BUDGET.lock.acquire()
child = os.fork()
if not child:
    os._exit(0 if online.BUDGET.lock.acquire(blocking=False) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    # Whether torch has threads of its own by then is not what is asked.
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=1800, check=False).returncode == 0


def test_a_call_that_leaves_no_room_for_measuring_says_so(on, monkeypatch):
    monkeypatch.setattr(tuner, "make_inputs", lambda *args: torch.empty(2**45))
    with pytest.warns(RuntimeWarning, match="nothing was measured for dense prefill.*: no room for its inputs"):
        polyattn.attention(*tensors(64), causal=True)


# ---------------------------------------------------------------------------------------------------------------- ranks

RANK = """
import os, sys, torch
import torch.distributed as dist
import polyattn
from polyattn import tuning
from polyattn.bench.measure import Workload
from polyattn.selection.tuned_policy import tuning_place
from polyattn.contract import AttentionRequest
rank, port, best, later = int(sys.argv[1]), *sys.argv[2:]
asked = Workload(AttentionRequest(dtype="float32", head_dim=32, heads=2, kv_heads=2), ((64, 64),))
def put(best):
    times = {"torch_sdpa": 20.0, "torch_native": 20.0, best: 10.0}
    tuning.record(tuning.backend_row(tuning_place("cpu"), asked.request, asked.buckets, times, "a test"))
def call():
    q = torch.randn(1, 64, 2, 32)
    try:
        polyattn.attention(q, q.clone(), q.clone())
        print("served", *(row.source for row in tuning.store().rows() if row.source != "a test"))
    except polyattn.errors.ConfigError as exc:
        print(exc)
if best: put(best)
if os.environ.get("BEFORE"): call()
if tuning.mode() == "online":
    from polyattn.bench.tuner import online
    call()  # small: it is chosen for before there are ranks
    online._OPERATIONS = 1
    online.BUDGET.isolation = "never"
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
dist.init_process_group("gloo", rank=rank, world_size=2)
if os.environ.get("BEFORE"):
    q = torch.randn(1, 64, 4, 32)
    polyattn.attention(q, q.clone(), q.clone(), causal=True, backend="torch_sdpa")
    polyattn.attention(q, q.clone(), q.clone(), causal=True)
call()
dist.barrier()
if later:
    put(later)
    call()
dist.barrier()
dist.destroy_process_group()
"""


def ranks(
    tmp_path: Path, *best: str, later: tuple[str, str] = ("", ""), modes: tuple[str, str] = ("use", "use")
) -> list[str]:
    """What two ranks say that measured `best`, and that measure `later` after the first call."""
    running, port = [], free_port()
    for rank, name in enumerate(best):
        environ = {
            **os.environ,
            "POLYATTN_TUNING_STORE": str(tmp_path / f"rank{rank}.sqlite3"),
            "POLYATTN_TUNING": modes[rank],
        }
        command = [sys.executable, "-c", RANK, str(rank), str(port), name, later[rank]]
        running.append(
            subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    said = [process.communicate(timeout=1800) for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    return [out.strip() for out, _ in said]


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("modes", [("use", "use"), ("use", "off")])
def test_ranks_with_different_stores_raise(tmp_path, modes):
    best = ("torch_native", "torch_native" if modes[1] == "off" else "")
    said = ranks(tmp_path, *best, modes=modes)
    assert sorted(text == "served" for text in said) == [False, True], said
    (error,) = [text for text in said if text != "served"]
    assert "ranks of one job choose alike" in error
    assert "torch_native@cpu (tuned: 10 us" in error
    assert "POLYATTN_TUNING_STORE" in error


def test_ranks_with_equal_stores_are_served(tmp_path):
    assert ranks(tmp_path, "torch_native", "torch_native") == ["served", "served"]


@pytest.mark.slow
def test_ranks_whose_stores_lead_to_the_same_are_served(tmp_path):
    assert ranks(tmp_path, "torch_sdpa", "") == ["served", "served"]


@pytest.mark.slow
def test_what_one_rank_measures_later_changes_nothing_in_silence(tmp_path):
    same, other = ranks(tmp_path, "", "", later=("torch_sdpa", "torch_native"))
    assert same == "served\nserved"
    first, error = other.split("\n")
    assert first == "served"
    assert error.startswith("rank 1 would serve dense")
    assert "by torch_native@cpu (tuned: 10 us" in error
    assert "began with torch_sdpa@cpu (platform rule" in error
    assert "measure before the job" in error


def test_outcomes_are_equal_where_calls_of_all_lengths_are():
    def outcome(of="", **best):
        found = tuple(((1, int(name[1:]), int(name[1:])), of, who) for name, who in best.items())
        return polyattn.dispatch.by_length._outcome("rule" if best else None, found, "rule")

    assert outcome() == outcome(_64="rule") == outcome(_64="rule", _1024="rule") == ("rule", [])
    assert outcome(_64="fast") == outcome(_64="fast", _32768="rule") == ("rule", [((1, 64, 64), "", "fast")])
    assert outcome(_64="fast") != outcome(_64="fast", _1024="rule"), "lengths of 256 have the choice of either"
    assert outcome(_64="fast") != outcome(_64="fast", _1024="fast")
    assert outcome(_64="fast") != outcome(_64="fast", of="a request like it")


def test_what_was_measured_reaches_less_far_where_it_is_of_another_request():
    """Two ranks, by `POLYATTN_TUNING_STORE`: between the lengths of both rows one has the other's choice."""
    request = workload(64, platform="cpu").request

    def told():
        found = polyattn.dispatch.by_length._choices(request, Policy(), EPOCH.value)
        return polyattn.dispatch.by_length._outcome(*found, ("torch_sdpa", "torch", ()))

    measured(1024, "torch_native")
    measured(128, "torch_sdpa", heads=4, kv_heads=4)
    by_kin = told(), polyattn.explain(tuning.with_lengths(request, 1, 256, 256)).backend
    measured(128, "torch_sdpa")
    own = told(), polyattn.explain(tuning.with_lengths(request, 1, 256, 256)).backend
    assert (by_kin[1], own[1]) == ("torch_native", "torch_sdpa")
    assert by_kin[0] != own[0]


def test_each_request_like_one_leads_where_it_leads(served):
    """Two of them at one bucket of batches: the nearer one hides the other there, and not at smaller batches."""
    request = workload(64, platform="cpu").request
    for heads, batch, best in ((5, 8, "torch_native"), (8, 8, "torch_sdpa")):
        like = dataclasses.replace(request, heads=heads, kv_heads=heads)
        times = {"torch_sdpa": 20.0, "torch_native": 20.0, best: 10.0}
        tuning.record(tuning.backend_row(tuning_place("cpu"), like, (batch, 64, 64), times, "a test"))
    who = {}
    for batch in (8, 16, 32, 64):
        q, k, v = (torch.randn(batch, 64, 2, 32) for _ in range(3))
        polyattn.attention(q, k, v, causal=True)
        who[batch] = served[-1]
        assert polyattn.explain(tuning.with_lengths(request, batch, 64, 64)).backend == served[-1], batch
    assert set(who.values()) == {"torch_native", "torch_sdpa"}


@pytest.mark.slow
def test_what_was_chosen_before_the_job_is_compared_within_it(tmp_path, monkeypatch):
    """As soon as anything is chosen there."""
    monkeypatch.setenv("BEFORE", "1")
    first, second = sorted(ranks(tmp_path, "torch_native", ""), key=len)
    assert first == "served\nserved"
    before, error = second.split("\n")
    assert before == "served"
    assert "ranks of one job choose alike" in error
    assert ranks(tmp_path, "torch_native", "torch_native") == ["served\nserved"] * 2


def test_no_rank_measures(tmp_path):
    """Nor for a choice that was made before there were ranks."""
    assert ranks(tmp_path, "", "", modes=("online", "online")) == ["served\nserved"] * 2
