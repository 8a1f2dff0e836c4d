"""`polyattn.tuning`: what is measured is kept, shared between processes, and looked up without a wait."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from polyattn import tuning
from polyattn.contract import hookimpl
from polyattn.epoch import EPOCH
from polyattn.errors import ConfigError, InvalidInputError, UnsupportedRequestError
from polyattn.registry.manager import get_manager, register_plugin, reset_manager
from polyattn.tuning import Kernel, Place, Row, TuningStore, current, offline, places
from polyattn.tuning.store import SCHEMA

CPU = torch.device("cpu")
KERNEL = Kernel(
    "test.decode",
    key=("dtype", "head_dim", "k_bucket"),
    choices={"block_n": (16, 32, 64), "num_warps": (2, 4), "split": (False, True)},
    versions=("pluggy",),
)
DEFAULT = {"block_n": 16, "num_warps": 4, "split": False}
FAST = {"block_n": 64, "num_warps": 2, "split": True}
KEY = ("bfloat16", 128, 4096)
HERE = Place("chip", "sm90", (("torch", "2.11"),))


def row(**changed):
    whole = Row(HERE, "kernel:test.decode", KERNEL.named(KEY), FAST, 12.5, "2026-01-02T00:00:00+00:00", "a test")
    return dataclasses.replace(whole, **changed)


BACKEND_ROW = row(
    subject="backend",
    key={"request": {"family": "dense"}, "batch": 1, "q": 64, "k": 64},
    value={"backend": "torch_sdpa", "times": {"torch_sdpa": 12.5}},
)


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    path = tmp_path / "caches" / "tuning.sqlite3"
    monkeypatch.setenv("POLYATTN_TUNING_STORE", str(path))
    monkeypatch.delenv("POLYATTN_TUNING", raising=False)
    monkeypatch.setattr(get_manager(), "kernels", {KERNEL.name: KERNEL})
    monkeypatch.setattr(offline, "_serving", [])
    monkeypatch.setattr(current._state, "watched", {})  # what other tests compiled reads the store at each change
    tuning.reload()
    yield path
    tuning.reload()


# ------------------------------------------------------------------------------------------------------------- kernels


@pytest.mark.parametrize("length, rounded", [(0, 0), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192)])
def test_buckets_are_powers_of_two(length, rounded):
    assert tuning.bucket(length) == rounded


@pytest.mark.parametrize(
    "length, rounded", [(0, 0), (1, 1), (3, 3), (7, 7), (9, 10), (1024, 1024), (1025, 1280), (1280, 1280), (1793, 2048)]
)
def test_fine_buckets_are_four_steps_to_a_power_of_two(length, rounded):
    assert tuning.fine_bucket(length) == rounded


def test_lengths_of_a_fine_bucket_share_a_bucket():
    assert all(tuning.bucket(tuning.fine_bucket(length)) == tuning.bucket(length) for length in range(5000))


def test_kernels_are_those_that_plugins_announce(monkeypatch):
    assert dict(tuning.registered_kernels()) == {"test.decode": KERNEL}
    plugin = types.ModuleType("acme_kernels")
    other = dataclasses.replace(KERNEL, name="acme.decode")
    plugin.polyattn_register_tunables = hookimpl(specname="polyattn_register_tunables")(lambda: [other])
    kept = get_manager()
    try:
        reset_manager()
        register_plugin(plugin)
        assert tuning.registered_kernels()["acme.decode"] is other
        reset_manager()
        assert "acme.decode" not in tuning.registered_kernels()
    finally:
        reset_manager(kept)


@pytest.mark.parametrize(
    "value, message",
    [
        ({**FAST, "blok_n": 1}, r"has no choice 'blok_n'. Did you mean 'block_n'\? It has block_n, num_warps, split"),
        ({"block_n": 16}, r"'num_warps' is missing; its choices are block_n, num_warps, split"),
        ({**FAST, "num_warps": 10**9}, r"num_warps=1000000000; allowed: 2, 4"),
        ({**FAST, "num_warps": "4"}, r"num_warps='4'; allowed: 2, 4"),
        ({**FAST, "num_warps": 4.0}, r"num_warps=4.0; allowed: 2, 4"),
        ({**FAST, "split": 1}, r"split=1; allowed: False, True"),
    ],
)
def test_what_is_no_choice_is_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        KERNEL.check(value)


def test_a_key_has_all_its_values():
    with pytest.raises(InvalidInputError, match=r"a key of 2 values; it has 3: dtype, head_dim, k_bucket"):
        tuning.kernel_config(KERNEL, KEY[:2], DEFAULT, CPU)


# --------------------------------------------------------------------------------------------------------------- store


@pytest.mark.parametrize("in_memory", [False, True])
def test_what_is_recorded_is_found(own_store, in_memory):
    store = TuningStore(None if in_memory else own_store)
    assert store.rows() == []
    assert store.lookup(HERE, "kernel:test.decode", KERNEL.named(KEY)) is None
    store.record(row())
    again = store if in_memory else TuningStore(own_store)
    assert again.lookup(HERE, "kernel:test.decode", KERNEL.named(KEY)) == row()
    assert own_store.exists() is not in_memory


@pytest.mark.parametrize(
    "other", [Place("another chip", "sm90", HERE.versions), Place("chip", "sm90", (("torch", "2.12"),))]
)
def test_another_device_or_version_has_none(own_store, other):
    store = TuningStore(own_store)
    store.record(row())
    assert store.lookup(other, "kernel:test.decode", KERNEL.named(KEY)) is None
    assert store.rows(other) == []
    assert store.rows(HERE, "backend") == []
    assert store.rows(HERE) == store.rows() == [row()]


@pytest.mark.parametrize("in_memory", [False, True])
def test_what_is_measured_here_replaces_what_is_there(own_store, in_memory):
    store = TuningStore(None if in_memory else own_store)
    store.record(row(value=DEFAULT, microseconds=99.0, date="2999-01-03T00:00:00+00:00"))
    store.record(row())
    assert store.rows() == [row()], "whatever the clock was that dated the other"


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize(
    "date, later",
    [
        ("2026-01-01T23:59:59+00:00", False),
        ("2026-01-02T00:00:01+00:00", True),
        ("2026-01-02T00:30:00+01:00", False),
        ("2026-01-01T23:30:00-01:00", True),
        ("2026-01-01", False),
        ("2026-01-03", True),
    ],
)
def test_the_later_of_two_measurements_stays_after_an_import(own_store, in_memory, date, later):
    store = TuningStore(None if in_memory else own_store)
    other = row(value=DEFAULT, microseconds=99.0, date=date)
    store.record(row())
    store.import_rows({"format": "polyattn tuning 1", "measurements": [other.plain()]})
    assert store.rows() == [other if later else row()]


def test_what_does_not_fit_is_not_recorded(own_store):
    store = TuningStore(own_store)
    with pytest.raises(ConfigError, match=r"record: no kernel 'test.decod' .* Did you mean 'test.decode'\?"):
        store.record(row(), row(subject="kernel:test.decod"))
    assert store.rows() == []


WRITER = """
import sys
from polyattn.tuning import *
from polyattn.registry.manager import get_manager
kernel = Kernel("test.decode", ("n",), {"block_n": (16,)})
get_manager().kernels[kernel.name] = kernel
store = TuningStore(sys.argv[1])
for i in range(40):
    key, value = {"n": f"{sys.argv[2]} {i}"}, {"block_n": 16}
    store.record(Row(Place("chip", ""), kernel.subject, key, value, 1.0, "2026-01-02"))
"""


def test_several_processes_lose_nothing(own_store):
    command = [sys.executable, "-c", WRITER, str(own_store)]
    running = [subprocess.Popen([*command, name], stderr=subprocess.PIPE, text=True) for name in "abc"]
    errors = [process.communicate(timeout=1800)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], errors
    assert len(TuningStore(own_store).rows()) == 120


def test_a_file_that_is_made_while_it_is_looked_at_is_no_other_programs(own_store):
    own_store.parent.mkdir()

    class Slow:
        """Between two looks at a file, another process makes it."""

        def __init__(self, path, turn):
            self.connection, self.turns = CONNECT(path), turn

        def execute(self, statement):
            found = self.connection.execute(statement)
            line = found.fetchone()
            self.turns -= 1
            if not self.turns:
                TuningStore(own_store).record(row())
            return types.SimpleNamespace(fetchone=lambda: line)

    for turn in (1, 2):
        own_store.unlink(missing_ok=True)
        slow = Slow(own_store, turn)
        assert TuningStore()._version(slow) in (0, SCHEMA)
        slow.connection.close()


KILLED = WRITER.replace(
    "for i in range(40):", "import itertools\nfor i in itertools.count():\n    print(i, flush=True)"
)


def test_a_killed_writer_leaves_a_valid_store(own_store):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(own_store), "a"], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line == "20\n":
            break
    process.kill()
    process.communicate()
    assert len(TuningStore(own_store).rows()) >= 20
    TuningStore(own_store).record(row())
    assert row() in TuningStore(own_store).rows()


def damaged(path):
    path.write_bytes(b"these are not the bytes of a database" * 200)


def of_a_later_polyattn(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE x (y)")
        connection.execute("PRAGMA application_id = 0x706F6C79")
        connection.execute("PRAGMA user_version = 9")
    connection.close()


def of_another_program(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE x (y)")
    connection.close()


UNREADABLE = [
    (damaged, r"cannot be read \(file is not a database\)"),
    (of_a_later_polyattn, r"has tables of version 9, and this polyattn knows 3"),
    (of_another_program, r"is a database of another program"),
]


@pytest.mark.parametrize("make, ours", [(damaged, False), (of_another_program, False), (of_a_later_polyattn, True)])
def test_only_a_store_may_be_moved_away(own_store, make, ours):
    own_store.parent.mkdir()
    make(own_store)
    with pytest.raises(ConfigError) as error:
        TuningStore(own_store)
    assert ("or move it away: nothing but measurements is in it" in str(error.value)) is ours


@pytest.mark.parametrize("make, message", UNREADABLE)
def test_a_file_that_is_none_is_an_error_or_begun_anew(own_store, make, message):
    own_store.parent.mkdir()
    make(own_store)
    with pytest.raises(ConfigError, match=rf"tuning.sqlite3 {message}; name another file with POLYATTN_TUNING_STORE"):
        TuningStore(own_store)
    with pytest.raises(ConfigError, match=rf"tuning.sqlite3 {message}; name another file with --merge\.$"):
        TuningStore(own_store, by="--merge")
    with pytest.warns(
        RuntimeWarning, match=rf"{message}.* It was moved to .*tuning.sqlite3.old, and a new one is begun"
    ):
        store = TuningStore(own_store, rebuild=True)
    store.record(row())
    assert TuningStore(own_store).rows() == [row()]
    assert own_store.with_name("tuning.sqlite3.old").exists()
    own_store.unlink()
    make(own_store)
    with pytest.warns(RuntimeWarning, match=r"moved to .*tuning.sqlite3.old2, and a new one is begun"):
        TuningStore(own_store, rebuild=True)
    assert {path.name for path in own_store.parent.glob("*.old*")} == {"tuning.sqlite3.old", "tuning.sqlite3.old2"}


def test_a_store_that_was_begun_anew_took_its_journal_along(own_store):
    own_store.parent.mkdir()
    connection = sqlite3.connect(own_store)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE x (y)")
    with pytest.warns(RuntimeWarning, match="It was moved to"):
        TuningStore(own_store, rebuild=True)
    assert own_store.with_name("tuning.sqlite3.old-wal").stat().st_size
    assert not own_store.with_name("tuning.sqlite3-wal").exists()
    connection.close()


def test_a_file_is_whole_once_nobody_has_it_open(own_store, tmp_path):
    """Also where somebody who reads closes it last: a copy of the file alone has every measurement."""
    store = TuningStore(own_store)
    store.record(row())
    with store._reading(own_store):
        store.record(row(key={**row().key, "k_bucket": 1 << 20}))
    assert not own_store.with_name("tuning.sqlite3-wal").exists()
    shutil.copy(own_store, tmp_path / "copy")
    assert len(TuningStore(tmp_path / "copy").rows()) == 2


def test_a_journal_that_cannot_be_opened_is_said(own_store, monkeypatch):
    store = TuningStore(own_store)
    store.record(row())
    own_store.with_name("tuning.sqlite3-wal").write_bytes(b"x")
    connect = sqlite3.connect

    def connected(name, **options):
        if "immutable=1" not in str(name):
            raise sqlite3.OperationalError("unable to open database file")
        return connect(name, **options)

    monkeypatch.setattr(sqlite3, "connect", connected)
    with pytest.warns(RuntimeWarning, match="are not read: they are in tuning.sqlite3-wal, which can be opened only"):
        assert TuningStore(own_store).rows() == [row()]


@pytest.mark.parametrize("make, message", UNREADABLE)
def test_kernels_are_launched_all_the_same(own_store, make, message):
    own_store.parent.mkdir()
    make(own_store)
    tuning.reload()
    with pytest.warns(RuntimeWarning, match=rf"nothing measured is used for test.decode: .*{message}"):
        assert tuning.kernel_config(KERNEL, KEY, DEFAULT, CPU) is DEFAULT
    assert tuning.kernel_config(KERNEL, KEY, DEFAULT, CPU) is DEFAULT, "said once"


NOWHERE = [
    ("~nobody-has-this-name/x", r"tuning store ~nobody-has-this-name/x is nowhere \(.*\); name a file with POLYATTN_"),
    ("x" * 300, r"tuning store x* cannot be read \(.*File name too long.*\); name another file with POLYATTN_"),
]


@pytest.mark.parametrize("name, message", NOWHERE)
def test_a_path_that_cannot_be_looked_at_is_an_error(name, message):
    with pytest.raises(ConfigError, match=message):
        TuningStore(name)


def test_a_user_without_a_home_is_told_what_to_name(monkeypatch):
    monkeypatch.delenv("POLYATTN_TUNING_STORE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pytest.importorskip("pwd"), "getpwuid", {}.__getitem__)  # there is no such user
    with pytest.raises(ConfigError, match=r"~/.cache is nowhere \(.*\); name a file with POLYATTN_TUNING_STORE"):
        tuning.default_path()


@pytest.mark.parametrize("name, message", NOWHERE)
def test_calls_are_served_wherever_the_store_would_be(monkeypatch, recwarn, name, message):
    import polyattn

    monkeypatch.setenv("POLYATTN_TUNING_STORE", name)
    tuning.reload()
    for heads in (1, 2):
        assert polyattn.attention(*torch.randn(3, 1, 8, heads, 8)).shape == (1, 8, heads, 8)
        assert tuning.kernel_config(KERNEL, ("float16", 64, heads), DEFAULT, CPU) is DEFAULT
    of_backends, of_kernels = (str(one.message) for one in recwarn if "nothing measured" in str(one.message))
    assert re.search(f"nothing measured decides about backends: .*{message}", of_backends)
    assert re.search(f"nothing measured is used for test.decode: .*{message}", of_kernels)


def test_a_file_that_becomes_damaged_is_an_error_to_who_writes(own_store):
    store = TuningStore(own_store)
    own_store.parent.mkdir()
    damaged(own_store)
    with pytest.raises(ConfigError, match="cannot be read"):
        store.record(row())


def test_a_locked_file_is_an_error_to_who_writes(own_store, monkeypatch):
    store = TuningStore(own_store)
    store.record(row())
    monkeypatch.setattr(sqlite3, "connect", quick)
    other = CONNECT(own_store, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ConfigError, match=r"was locked by others for 30 s, and nothing was recorded; try again"):
        store.record(row())
    assert store.rows() == [row()], "readers do not wait"
    other.close()


CONNECT = sqlite3.connect


def quick(*given, **options):
    return CONNECT(*given, **{**options, "timeout": 0.01})


def test_what_cannot_be_written_stays_in_memory(tmp_path):
    (tmp_path / "file").write_text("")
    store = TuningStore(tmp_path / "file" / "tuning.sqlite3")
    with pytest.warns(
        RuntimeWarning, match=r"cannot be written to .* kept for this process only. POLYATTN_TUNING_STORE"
    ):
        store.record(row())
    store.record(row(key=KERNEL.named(("float16", 64, 1))))
    assert len(store.rows()) == 2


def test_rows_are_counted_once_where_the_commit_fails(own_store, monkeypatch):
    class Full(sqlite3.Connection):
        def __exit__(self, *raised):
            if not self.total_changes:
                return super().__exit__(*raised)
            self.rollback()
            raise sqlite3.OperationalError("database or disk is full")

    store = TuningStore(own_store)
    store.record(row(microseconds=9.0))
    data = {"format": "polyattn tuning 1", "measurements": [row(key=KERNEL.named(("float16", 64, 1))).plain()]}
    monkeypatch.setattr(sqlite3, "connect", lambda *given, **options: CONNECT(*given, factory=Full, **options))
    with pytest.warns(RuntimeWarning, match=r"disk is full.* kept for this process only"):
        assert store.import_rows(data) == 1
    assert len(store.rows()) == 2


def test_who_insists_gets_an_error_instead(tmp_path):
    (tmp_path / "file").write_text("")
    store = TuningStore(tmp_path / "file" / "tuning.sqlite3")
    for change in (store.require_persistence, lambda: store.record(row())):
        with pytest.raises(ConfigError, match=r"cannot be written to .*; POLYATTN_TUNING_STORE names another file"):
            change()
    assert store.rows() == []
    TuningStore().require_persistence()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_that_cannot_be_written_is_read(own_store):
    TuningStore(own_store).record(row())
    own_store.chmod(0o444)
    own_store.parent.chmod(0o555)
    try:
        store = TuningStore(own_store)
        assert store.rows() == [row()]
        with pytest.warns(RuntimeWarning, match="kept for this process only"):
            store.record(row(microseconds=1.0))
        assert store.rows() == [row(microseconds=1.0)]
    finally:
        own_store.parent.chmod(0o755)


# ---------------------------------------------------------------------------------------------------- export and import


def test_an_export_is_imported_elsewhere(own_store, tmp_path):
    store = TuningStore(own_store)
    store.record(row(), BACKEND_ROW)
    data = json.loads(json.dumps(store.export()))
    other = TuningStore(tmp_path / "other.sqlite3")
    other.record(row(microseconds=1.0, date="2026-02-01"))
    assert other.import_rows(data, backends=["torch_sdpa"]) == 1, "one is here, and later"
    assert other.import_rows(data, backends=["torch_sdpa"]) == 0
    assert TuningStore().import_rows({**data, "measurements": data["measurements"] * 2}) == 2, "in memory too"
    assert {r.subject: r.microseconds for r in other.rows()} == {"backend": 12.5, "kernel:test.decode": 1.0}


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"subject": "kernel:acme.decode"}, r"no kernel 'acme.decode' is registered here. .*Known: test.decode"),
        ({"subject": "shell"}, r"subject='shell'; allowed: backend, kernel:NAME"),
        ({"value": {**FAST, "num_warps": 999}}, r"kernel 'test.decode': num_warps=999; allowed: 2, 4"),
        ({"key": {"dtype": "bfloat16"}}, r"kernel 'test.decode' has keys of dtype, head_dim, k_bucket; got dtype"),
        (
            {**BACKEND_ROW.plain(), "value": {"backend": "torch_sdp", "times": {"torch_sdp": 1.0}}},
            r"no backend 'torch_sdp' .* 'torch_sdpa'\?",
        ),
        ({**BACKEND_ROW.plain(), "value": {}}, r"backend is None; one of those with a time it is"),
        ({"microseconds": 0}, r"microseconds is 0; a time is finite and above 0"),
        ({"microseconds": float("nan")}, r"microseconds is nan"),
        ({"microseconds": True}, r"microseconds is True; int or float it is"),
        ({"date": 5}, r"date is 5; str it is"),
        ({"more": 1}, r"a measurement has exactly device, arch, versions, .*; got \{"),
    ],
)
def test_an_import_names_only_what_is_known(own_store, changed, message):
    data = {"format": "polyattn tuning 1", "measurements": [row().plain(), {**row().plain(), **changed}]}
    store = TuningStore(own_store)
    with pytest.raises(ConfigError, match=rf"import: measurement 1: .*{message}"):
        store.import_rows(data, backends=["torch_sdpa"])
    assert store.rows() == [], "all or nothing"


@pytest.mark.parametrize("data", [[], {}, {"format": "polyattn tuning 2", "measurements": []}, {"format": "x"}])
def test_other_data_is_no_export(data):
    found = f" (format {data['format']!r})" if "format" in data else ""
    said = re.escape(f"no export of measurements{found}; one has format 'polyattn tuning 1'")
    with pytest.raises(ConfigError, match=said):
        TuningStore().import_rows(data)


# ------------------------------------------------------------------------------------------------------------- lookups


def here(**changed):
    return row(place=tuning.place_of(CPU, KERNEL.versions), **changed)


def test_defaults_serve_until_somebody_measures(own_store):
    epoch = EPOCH.value
    assert tuning.kernel_config(KERNEL, KEY, DEFAULT, CPU) is DEFAULT
    assert not own_store.exists(), "a lookup makes no file"
    tuning.record(here())
    assert tuning.kernel_config(KERNEL, KEY, DEFAULT, CPU) == FAST
    assert tuning.kernel_config(KERNEL, ("float16", 128, 4096), DEFAULT, CPU) is DEFAULT
    assert EPOCH.value > epoch, "cached choices start over"


def test_a_lookup_reads_no_file(own_store, monkeypatch):
    tuning.record(here())
    tuning.kernel_config(KERNEL, KEY, DEFAULT, CPU)
    monkeypatch.setattr(sqlite3, "connect", None)
    assert tuning.kernel_config(KERNEL, KEY, DEFAULT, CPU) == FAST
    assert tuning.kernel_config(KERNEL, ("float16", 64, 1), DEFAULT, CPU) is DEFAULT
    monkeypatch.setattr(current, "_MOST", 2)
    for bucket in range(5):
        tuning.kernel_config(KERNEL, ("float16", 64, bucket), DEFAULT, CPU)
    assert len(current._state.known) <= 2


def test_what_others_measured_is_seen_after_a_reload(own_store):
    assert tuning.kernel_config(KERNEL, KEY, DEFAULT, CPU) is DEFAULT
    TuningStore(own_store).record(here())
    assert tuning.kernel_config(KERNEL, KEY, DEFAULT, CPU) is DEFAULT
    tuning.reload()
    assert tuning.kernel_config(KERNEL, KEY, DEFAULT, CPU) == FAST


def test_a_choice_that_the_kernel_no_longer_has_is_not_used(own_store):
    tuning.record(here())
    fewer = dataclasses.replace(KERNEL, choices={**KERNEL.choices, "block_n": (16, 32)})
    get_manager().kernels[fewer.name] = fewer
    tuning.reload()
    with pytest.warns(RuntimeWarning, match=r"nothing measured is used for test.decode: .*block_n=64; allowed: 16, 32"):
        assert tuning.kernel_config(fewer, KEY, DEFAULT, CPU) is DEFAULT


def test_what_is_recorded_while_the_file_is_read_is_not_missed(own_store, monkeypatch):
    real = current._read

    def slow(*given):
        found = real(*given)
        tuning.record(here())  # by another thread
        return found

    monkeypatch.setattr(current, "_read", slow)
    assert tuning.kernel_config(KERNEL, KEY, DEFAULT, CPU) is DEFAULT, "asked before"
    monkeypatch.setattr(current, "_read", real)
    assert tuning.kernel_config(KERNEL, KEY, DEFAULT, CPU) == FAST


def test_compiled_code_stands_on_what_was_said_first(monkeypatch):
    monkeypatch.setattr(current._state, "watched", {})
    said, token = ["a"], EPOCH.token
    tuning.watch("a request", lambda: said[0])
    tuning.reload()
    assert EPOCH.token == token, "it says the same"
    said[0] = "b"
    tuning.watch("a request", lambda: said[0])  # by another thread, before what changed is compared
    tuning.reload()
    assert EPOCH.token != token
    token = EPOCH.token
    said[0] = "c"
    tuning.reload()
    assert EPOCH.token == token, "nobody traced anew yet"


def test_a_row_that_is_none_is_not_used(own_store):
    tuning.record(here(), here(key=KERNEL.named(("float16", 64, 1))))
    with sqlite3.connect(own_store) as connection:
        connection.execute("UPDATE measurement SET value = '[]' WHERE key LIKE '%bfloat16%'")
    connection.close()
    tuning.reload()
    with pytest.warns(RuntimeWarning, match=r"has a row that is none \(a row: value is \[\]; dict it is\)"):
        assert tuning.kernel_config(KERNEL, KEY, DEFAULT, CPU) is DEFAULT
    assert tuning.kernel_config(KERNEL, ("float16", 64, 1), DEFAULT, CPU) == FAST


def test_a_revised_kernel_forgets(own_store):
    tuning.record(here())
    revised = dataclasses.replace(KERNEL, revision=2)
    assert tuning.kernel_config(revised, KEY, DEFAULT, CPU) is DEFAULT


def test_off_reads_nothing(own_store, monkeypatch):
    tuning.record(here())
    monkeypatch.setenv("POLYATTN_TUNING", "off")
    tuning.reload()
    assert tuning.mode() == "off"
    assert tuning.kernel_config(KERNEL, KEY, DEFAULT, CPU) is DEFAULT


def test_a_mode_that_is_none(monkeypatch):
    monkeypatch.setenv("POLYATTN_TUNING", "on")
    with pytest.raises(ConfigError, match=r"POLYATTN_TUNING='on' is not known. Allowed: use, off, online"):
        tuning.mode()


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.delenv("POLYATTN_TUNING_STORE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.default_path() == tmp_path / "polyattn" / "tuning.sqlite3"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tuning.default_path() == Path.home() / ".cache" / "polyattn" / "tuning.sqlite3"


def test_the_place_of_this_process():
    place = tuning.place_of(CPU, ("pluggy", "no-such-distribution"), 3)
    versions = dict(place.versions)
    # The wheel that PyPI has says which CUDA it is built for in the module alone.
    assert versions["torch"] in (torch.__version__, Version(torch.__version__).public)
    assert versions["pluggy"]
    assert (versions["no-such-distribution"], versions["revision"]) == ("", "3")
    assert place.device
    assert f"torch {versions['torch']}" in str(place)


# -------------------------------------------------------------------------------------------------------------- tuning

CANDIDATES = [DEFAULT, {**DEFAULT, "block_n": 32}, FAST]


def test_the_fastest_candidate_is_recorded(own_store):
    order = []

    def measure(candidate):
        order.append(candidate["block_n"])
        if candidate["block_n"] == 32:
            raise RuntimeError("out of shared memory")
        return {16: 9.0, 64: 5.0}[candidate["block_n"]] + len(order) / 100

    found = tuning.tune(KERNEL, KEY, CANDIDATES, measure, where=CPU, source="this test")
    assert order == [16, 32, 64, 16, 64, 16, 64], "each once in each round, and what failed not again"
    assert found.row.value == FAST
    assert (found.row.source, found.complete) == ("this test", True)
    assert found.trials[1].failure == "RuntimeError: out of shared memory"
    assert found.row.microseconds == found.trials[2].microseconds == 5.05
    assert tuning.kernel_config(KERNEL, KEY, DEFAULT, CPU) == FAST
    assert TuningStore(own_store).rows() == [found.row]


def test_no_measurement_begins_after_the_limit(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(offline, "time", types.SimpleNamespace(monotonic=lambda: now[0]))

    def measure(candidate):
        now[0] += 20.0
        return 5.0 if candidate == DEFAULT else 1.0

    found = tuning.tune(KERNEL, KEY, CANDIDATES, measure, where=CPU, seconds=10.0)
    assert not found.complete
    assert [len(trial.times) for trial in found.trials] == [1, 0, 0]
    assert found.row.value == DEFAULT


def test_candidates_that_all_fail_are_an_error(own_store):
    def measure(candidate):
        return 0.0 if candidate == FAST else float("nan")

    with pytest.raises(UnsupportedRequestError, match=r"not one of 3 candidates .*'test.decode'") as caught:
        tuning.tune(KERNEL, KEY, CANDIDATES, measure, where=CPU)
    assert all("microseconds are finite and above 0" in why for (why,) in caught.value.rejected.values())
    assert not own_store.exists()


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"candidates": []}, InvalidInputError, r"tune: 0 candidates; 1 to 256 are measured"),
        ({"candidates": [DEFAULT] * 257}, InvalidInputError, r"tune: 257 candidates"),
        ({"seconds": 0}, InvalidInputError, r"tune: seconds=0 must be above 0"),
        ({"rounds": 0}, InvalidInputError, r"rounds=0"),
        ({"candidates": [{}]}, ConfigError, r"'block_n' is missing"),
        ({"key": ()}, InvalidInputError, r"a key of 0 values"),
        (
            {"key": (torch.bfloat16, 64, 1)},
            InvalidInputError,
            r"dtype=torch.bfloat16 is a dtype; a key has str, int, float, bool and None, such as str\(dtype\)",
        ),
    ],
)
def test_what_cannot_be_tuned(given, error, message):
    options = {"key": KEY, "candidates": CANDIDATES, **given}
    with pytest.raises(error, match=message):
        tuning.tune(KERNEL, options.pop("key"), options.pop("candidates"), lambda _: 1.0, where=CPU, **options)


def test_a_process_that_serves_is_left_alone():
    tuning.note_serving("an attention backend")
    tuning.note_serving("an attention backend")
    with pytest.raises(
        UnsupportedRequestError, match=r"in a process that serves \(an attention backend\): its requests"
    ):
        tuning.tune(KERNEL, KEY, CANDIDATES, lambda _: 1.0, where=CPU)
    assert tuning.tune(KERNEL, KEY, CANDIDATES, lambda _: 1.0, where=CPU, while_serving=True).complete


def test_an_attention_backend_serves():
    from polyattn.serving import (
        AttentionBackend,
        AttentionLayer,
        KVCacheConfig,
        KVPool,
        Limits,
        PageAllocator,
        RequestTable,
    )

    layers = [AttentionLayer(0, heads=1, kv_heads=1, head_dim=8)]
    pool = KVPool(layers, KVCacheConfig(page_size=4), pages=4, dtype=torch.float32)
    table = RequestTable(1, 8, 4, [-1], [PageAllocator(4)])
    AttentionBackend(layers, pool, table, limits=Limits(max_sequences=1, max_tokens=4, max_seqlen=8))
    with pytest.raises(UnsupportedRequestError, match=r"a process that serves \(AttentionBackend\)"):
        tuning.tune(KERNEL, KEY, CANDIDATES, lambda _: 1.0, where=CPU)


def test_importing_it_imports_no_torch_and_makes_no_file(own_store):
    code = "import sys, polyattn; polyattn.tuning.mode(); assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=1800)
    assert not own_store.exists()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the system does not list open files")
def test_no_connection_is_left_open(own_store):
    store = TuningStore(own_store)
    store.record(row())
    store.rows()
    opened = {os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()}
    assert not [name for name in opened if "tuning.sqlite3" in name]


ARM = """processor	: 0
BogoMIPS	: 243.75
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x3
CPU part	: 0xd0c

processor	: 1
CPU part	: 0xd4f
"""


def test_processors_are_told_apart(monkeypatch):
    monkeypatch.setattr(places.platform, "machine", lambda: "aarch64")
    assert places._model(ARM) == "aarch64 implementer 0x41, part 0xd0c, variant 0x3"
    assert places._model("vendor_id\t: x\nmodel name\t: AMD EPYC: 7B13\nmodel name\t: other\n") == "AMD EPYC: 7B13"
    assert places._model("") == ""
