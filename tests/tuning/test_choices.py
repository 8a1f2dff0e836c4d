"""What measurements say about backends: by lengths, near and far, from here and elsewhere, shipped or quarantined."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import re
import sqlite3
import sys
import types
import warnings
from typing import Any

import pytest
import torch

from polyattn import tuning
from polyattn.contract import AttentionRequest, request_fields
from polyattn.contract.request_json import plain_request, read_request
from polyattn.errors import ConfigError
from polyattn.registry.manager import PluginReport
from polyattn.selection import tuned_policy as policies
from polyattn.selection.select import Policy
from polyattn.tuning import (
    BACKEND,
    Place,
    Quarantined,
    Row,
    TuningStore,
    advise,
    advising,
    current,
    known,
    request_key,
    request_of,
)
from polyattn.tuning.choices import NOTHING, backend_row, measured, shipped_advice, with_lengths
from polyattn.tuning.rows import canonical
from polyattn.tuning.similarity import distance, numbers_of
from polyattn.tuning.times import age

HERE = Place("chip", "chip1", (("torch", "2.11"),))
REQUEST = AttentionRequest(dtype="bfloat16", heads=8, kv_heads=2, causal="bottom_right")


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    path = tmp_path / "tuning.sqlite3"
    monkeypatch.setenv("POLYATTN_TUNING_STORE", str(path))
    monkeypatch.delenv("POLYATTN_TUNING", raising=False)
    monkeypatch.setattr(current._state, "watched", {})  # what other tests compiled is asked for where this really is
    tuning.reload()
    yield path
    tuning.reload()


def here():
    return HERE


def put(lengths, times, request=REQUEST, place=HERE):
    tuning.record(backend_row(place, request, lengths, times, "a test"))


def order(lengths=(0, 0, 0), request=REQUEST):
    said = advise(with_lengths(request, *lengths), here)
    return [name for name, _ in said.order]


def like(**changed):
    return dataclasses.replace(REQUEST, **changed)


def test_nothing_measured_says_nothing(shipped):
    shipped()
    assert advise(REQUEST, lambda: pytest.fail("nobody asks where this is")) == NOTHING


def test_the_fastest_comes_first_and_says_why():
    put((4, 1024, 1024), {"b": 1520.0, "a": 12.34})
    ((name, why), _) = advise(with_lengths(REQUEST, 3, 1000, 1000), here).order
    assert name == "a"
    assert why == "12.3 us (others: b 1.52 ms) at batch 4, S_q 1024, S_k 1024, measured today"


def test_lengths_that_were_not_measured_have_the_choice_of_the_nearest():
    put((1, 1024, 1024), {"a": 1.0, "b": 2.0})
    put((1, 8192, 8192), {"b": 1.0, "a": 2.0})
    assert order((1, 1024, 1024)) == order((1, 700, 700)) == order((4, 1024, 1024)) == ["a", "b"]
    assert order((1, 8192, 8192)) == order((1, 30000, 30000)) == ["b", "a"]
    assert order((1, 256, 256)) == ["a", "b"]
    assert order((1, 64, 64)) == order((16, 1024, 1024)) == ["a", "b"], "nothing is nearer"
    assert order((1, 32, 32)) == order((32, 1024, 1024)) == order((1, 2**20, 2**20)) == [], "too far"
    assert order((0, 1024, 1024)) == []


def test_what_is_near_of_another_request_goes_before_what_is_far_of_its_own():
    put((1, 1024, 1024), {"a": 1.0, "b": 2.0})
    put((1, 256, 256), {"b": 1.0, "a": 2.0}, like(dtype="float16"))
    assert order((1, 256, 256)) == ["a", "b"], "its own is as near"
    assert order((1, 128, 128)) == ["b", "a"]


def test_a_tree_has_the_choice_of_its_own_size():
    """Who is fast for 16 drafts was slow for 64."""
    tree = like(tree=True)
    put((4, 16, 1024), {"a": 1.0, "b": 2.0}, tree)
    assert order((4, 16, 1024), tree) == order((1, 16, 4096), tree) == ["a", "b"]
    assert order((4, 32, 1024), tree) == order((4, 8, 1024), tree) == []
    assert order((4, 16, 1024), like()) == []
    half = like(tree=True, dtype="float16")
    assert order((4, 16, 1024), half) == ["a", "b"]
    assert (order(request=tree), order(request=half)) == (["a", "b"], []), "of unknown size"


@pytest.mark.parametrize(("least", "own", "others"), [(97.0, "ab", "ab"), (98.5, "ab", "ba"), (99.5, "ba", "ba")])
def test_another_request_has_to_say_it_louder(least, own, others):
    costly((1, 64, 64), {"a": least, "b": 100.0}, {}, rule="b")
    assert order((1, 64, 64)) == [*own]
    assert order((1, 64, 64), like(dtype="float16")) == [*others]
    costly((1, 128, 128), {"a": least, "b": 100.0}, {}, rule="b")
    assert (order(), order(request=like(dtype="float16"))) == ([*own], [*others]), "over both"


def test_whose_kernels_were_measured_is_kept_and_said(monkeypatch):
    """Of a backend with kernels of several libraries."""

    def put_by(length, times, by):
        row = backend_row(HERE, REQUEST, (1, length, length), times, "a test", by=by)
        assert row.value.get("by", {}) == {name: kind for name, kind in by.items() if kind and name in times}
        tuning.record(row)

    put_by(1024, {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": "new", "b": "", "absent": "x"})
    said = advise(with_lengths(REQUEST, 1, 1024, 1024), here)
    assert (said.by, advise(REQUEST, here).by) == ({"a": "new"}, {"a": "new"})
    assert said.order[0][1].startswith("1 us with new (others: b 2 us, c 3 us) at")
    assert said.order[1][1].startswith("2 us (others: a 1 us with new, c 3 us) at")
    monkeypatch.setattr(policies, "tuning_place", lambda platform: HERE)
    (known,) = advising(REQUEST, here)
    for policy in (policies.measured_policy(Policy(), REQUEST), policies.policy_of(Policy(), REQUEST, known)):
        assert [(one.name, one.kind) for one in policy.tuned] == [("a", "new"), ("b", ""), ("c", "")]
    put_by(8192, {"a": 1.0, "b": 2.0, "c": 9.0}, {"a": "new"})
    said = advise(REQUEST, here)
    assert said.order[0] == ("a", "with new, 1.00 x the fastest over 2 measured lengths, measured today")
    assert (said.by, order()) == ({"a": "new"}, ["a", "b", "c"])
    put_by(65536, {"a": 1.0, "b": 2.0, "c": 9.0}, {"a": "old"})
    assert (advise(REQUEST, here).by, order()) == ({}, ["b", "c"]), "times of two libraries are no backend's"
    assert advise(with_lengths(REQUEST, 1, 65536, 65536), here).by == {"a": "old"}


def test_what_is_not_said_is_no_other_library(shipped):
    """Rows from before that was written down; and shipped ones of a library that was not measured here."""
    put((1, 1024, 1024), {"a": 1.0, "b": 2.0})
    put_by = functools.partial(backend_row, HERE, REQUEST, times={"a": 1.0, "b": 2.0}, source="a test")
    tuning.record(put_by(lengths=(1, 8192, 8192), by={"a": "new"}))
    assert (order(), advise(REQUEST, here).by) == (["a", "b"], {"a": "new"})
    shipped(put_by(lengths=(1, 65536, 65536), by={"a": "other"}))
    said = advise(REQUEST, here)
    assert (order(), said.by) == (["a", "b"], {"a": "new"})
    assert "2 measured lengths" in said.order[0][1]


def test_without_lengths_it_is_who_loses_least():
    put((1, 1024, 1024), {"a": 1.0, "b": 3.0, "c": 9.0})
    put((1, 2048, 2048), {"b": 1.0, "a": 2.0})
    found = advise(REQUEST, here).order
    assert [name for name, _ in found] == ["a", "b"], "c was not measured everywhere"
    assert found[0][1] == "1.41 x the fastest over 2 measured lengths, measured today"


@pytest.mark.parametrize(
    "same",
    [{"scale": 0.5}, {"softcap": 20.0}, {"graph_capture": True}, {"options": (("x", 1),)}, {"arch": "sm80"}],
)
def test_what_does_not_tell_measurements_apart(same):
    base = dataclasses.replace(REQUEST, scale=0.3, softcap=50.0)
    assert request_key(dataclasses.replace(base, **same)) == request_key(base)


@pytest.mark.parametrize(
    "other",
    [
        *({"dtype": "float16"}, {"heads": 16}, {"window": (128, -1)}, {"grad": ("query",)}, {"layout": "BHSD"}),
        *({"scale": 0.5}, {"softcap": 20.0}, {"s_relation": "fewer"}, {"misaligned": True}),
    ],
)
def test_what_tells_measurements_apart(other):
    assert request_key(dataclasses.replace(REQUEST, **other)) != request_key(REQUEST)


HOST = {"a": 150.0, "b": 20.0}


def costly(lengths, times, host=HOST, rule="", request=REQUEST):
    tuning.record(backend_row(HERE, request, lengths, times, "a test", host=host, rule=rule))


def test_a_call_costs_what_device_or_host_take_longer_for_unless_it_is_recorded():
    costly((1, 64, 64), {"a": 27.3, "b": 40.0, "c": 300.0})
    recorded = dataclasses.replace(REQUEST, graph_capture=True)
    assert order((1, 64, 64)) == order() == ["b", "a", "c"]
    assert order((1, 64, 64), recorded) == order(request=recorded) == ["a", "b", "c"]
    said = dict(advise(with_lengths(REQUEST, 1, 64, 64), here).order)
    assert said["b"].startswith("40 us (others: a 27.3 us, 150 us of the host, c 300 us) at batch 1")
    costly((1, 1024, 1024), {"a": 900.0, "b": 1000.0, "c": 1100.0})
    assert order((1, 1024, 1024)) == ["a", "b", "c"], "the device takes longer than any host"
    assert (order()[0], order(request=recorded)[0]) == ("b", "a"), "over both"


@pytest.mark.parametrize("least, first", [(98.5, "ab"), (99.5, "ba")])
def test_the_rule_stays_where_nothing_is_faster_by_more_than_measurements_differ(least, first):
    costly((1, 64, 64), {"a": least, "b": 100.0, "c": 400.0}, {}, rule="b")
    (row,) = tuning.store().rows(subject=BACKEND)
    assert (row.value["backend"], row.microseconds) == (first[0], row.value["times"][first[0]])
    assert order((1, 64, 64)) == order() == [*first, "c"]
    costly((1, 128, 128), {"a": least, "b": 100.0}, {}, rule="b")
    assert order() == [*first], "over both"


def test_rows_from_before_the_host_was_timed_are_read(own_store):
    put((1, 64, 64), {"b": 2.0, "a": 1.99})
    (row,) = TuningStore(own_store).rows(subject=BACKEND)
    assert row.value == {"backend": "a", "times": {"a": 1.99, "b": 2.0}}
    (found,) = measured(REQUEST, here)
    assert (found.host, found.rule) == ({}, "")
    assert order((1, 64, 64)) == ["a", "b"]


def test_spellings_of_one_request_share_measurements():
    assert request_key(dataclasses.replace(REQUEST, causal="none", window=(-1, 0))) == request_key(REQUEST)


def test_measurements_of_elsewhere_are_named_and_not_used():
    put((1, 64, 64), {"a": 1.0}, place=dataclasses.replace(HERE, device="other chip", arch="sm100"))
    put((1, 64, 64), {"a": 1.0}, place=dataclasses.replace(HERE, versions=(("driver", "5"), ("torch", "2.12"))))
    said = advise(REQUEST, here)
    assert said.order == ()
    (note,) = said.notes
    assert note == (
        "2 measurements of such requests are not used: of driver 5, torch 2.12, which this machine has not; of other "
        "chip (sm100), which this machine has not"
    )
    put((1, 64, 64), {"b": 1.0})
    assert advise(REQUEST, here).notes == ()


def test_the_quarantined_are_avoided_with_their_reason():
    put((1, 64, 64), {"a": 1.0, "b": 2.0})
    held = Quarantined(HERE, "a", request_key(REQUEST), "it lies", "2026-01-01")
    tuning.quarantine(held)
    said = advise(REQUEST, here)
    assert ([name for name, _ in said.order], said.avoid) == (["b"], ("a",))
    assert said.notes == (
        "a is quarantined for such requests: it lies; `polyattn tune --release a` lets it be chosen again",
    )
    assert advise(dataclasses.replace(REQUEST, heads=16), here).avoid == ()
    assert tuning.release("b") == 0
    assert tuning.release("a") == 1
    assert advise(REQUEST, here).avoid == ()


def test_a_device_that_has_no_others_of_its_kind_has_no_index_to_ask_for(monkeypatch):
    """torch.mps has no current_device."""
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    assert policies._device("mps") == torch.device("mps", 0)


@pytest.mark.parametrize("in_memory", [False, True])
def test_quarantine_is_kept(own_store, in_memory):
    store = TuningStore(None if in_memory else own_store)
    held = Quarantined(HERE, "a", {"dtype": "float32"}, "it lies", "2026-01-01")
    store.quarantine(held, dataclasses.replace(held, backend="b"))
    store.quarantine(dataclasses.replace(held, reason="it hangs"))
    again = store if in_memory else TuningStore(own_store)
    assert [(one.backend, one.reason) for one in again.quarantined(HERE)] == [("a", "it hangs"), ("b", "it lies")]
    assert again.quarantined(dataclasses.replace(HERE, arch="sm80")) == []
    assert again.release() == 2
    assert again.quarantined() == []


@pytest.mark.parametrize("in_memory", [False, True])
def test_who_is_released_is_measured_where_it_was_left_out(own_store, in_memory):
    store = TuningStore(None if in_memory else own_store)
    with_a, without = {"a": 1.0, "b": 2.0}, {"b": 2.0}
    other = dataclasses.replace(REQUEST, heads=16)
    elsewhere = dataclasses.replace(HERE, arch="sm80")
    kept = [
        backend_row(HERE, REQUEST, (1, 64, 64), with_a, "before it was quarantined"),
        backend_row(HERE, other, (1, 128, 128), without, "another request"),
        backend_row(elsewhere, REQUEST, (1, 128, 128), without, "another place"),
    ]
    store.record(*kept, backend_row(HERE, REQUEST, (1, 128, 128), without, "it was left out"))
    store.quarantine(Quarantined(HERE, "a", request_key(REQUEST), "it lies", "2026-01-01"))
    assert store.release("b") == 0
    assert len(store.rows()) == 4
    assert store.release("a") == 1
    assert {row.source for row in store.rows()} == {row.source for row in kept}


def test_a_library_that_is_released_took_part_under_its_backends_name(own_store):
    store = TuningStore(own_store)
    times = {"a": 1.0, "b": 2.0}
    store.record(
        backend_row(HERE, REQUEST, (1, 64, 64), times, "with it", by={"a": "x"}),
        backend_row(HERE, REQUEST, (1, 128, 128), times, "with another", by={"a": "y"}),
    )
    store.quarantine(Quarantined(HERE, "a/x", request_key(REQUEST), "it lies", "2026-01-01"))
    assert store.release("a/x") == 1
    assert [row.source for row in store.rows()] == ["with it"]


def test_a_file_of_the_first_version_is_read_and_grows(own_store):
    store = TuningStore(own_store)
    put((1, 64, 64), {"a": 1.0})
    with sqlite3.connect(own_store) as connection:
        connection.execute("DROP TABLE quarantine")
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    store = TuningStore(own_store)
    assert (len(store.rows()), store.quarantined()) == (1, [])
    store.quarantine(Quarantined(HERE, "a", {}, "it lies", "2026-01-01"))
    assert (len(TuningStore(own_store).rows()), len(TuningStore(own_store).quarantined())) == (1, 1)


def test_measurements_can_be_taken_out(own_store):
    put((1, 64, 64), {"a": 1.0})
    put((1, 64, 64), {"a": 1.0}, place=dataclasses.replace(HERE, arch="sm80"))
    store = TuningStore(own_store)
    assert store.forget(BACKEND, HERE) == 1
    assert [row.place.arch for row in store.rows()] == ["sm80"]
    assert store.forget("kernel:x") == 0


@pytest.mark.parametrize(
    "value, message",
    [
        ({"backend": "c", "times": {"c": 1.0}}, "no backend 'c' is registered here"),
        ({"backend": "a", "times": {"a": 1.0}, "rule": "rm -rf"}, "no backend 'rm -rf' is registered here"),
        ({"backend": "a", "times": {"a": -1.0}}, "the time of a is -1.0; a time is finite and above 0"),
        ({"backend": "a", "times": [1]}, r"times is \[1\]; microseconds by backend it is"),
        ({"backend": "a", "host": [1]}, r"host is \[1\]; microseconds by backend it is"),
        ({"backend": "a", "times": {"a": 1.0}, "host": {"c": 1.0}}, "no backend 'c' is registered here"),
        ({"backend": "a", "times": {"a": 1.0}, "host": {"a": 0}}, "the time of a is 0; a time is finite and above 0"),
    ],
)
def test_an_import_names_only_backends_that_are_here(own_store, value, message):
    row = backend_row(HERE, REQUEST, (1, 64, 64), {"a": 1.0, "b": 2.0}, "a test")
    data = {"format": "polyattn tuning 1", "measurements": [{**row.plain(), "value": value}]}
    with pytest.raises(ConfigError, match=message):
        TuningStore(own_store).import_rows(data, ["a", "b"])


ROW = backend_row(HERE, REQUEST, (1, 64, 64), {"a": 1.0, "b": 2.0}, "a test").plain()
LENGTH = "; a whole number from 1 to 2\\^62 it is"
WRONG = [
    ({"key": {}}, "a key of a request has exactly request, batch, q, k; got"),
    ({"key": {**ROW["key"], "batch": "x"}}, f"batch is 'x'{LENGTH}"),
    ({"key": {**ROW["key"], "batch": True}}, f"batch is True{LENGTH}"),
    ({"key": {**ROW["key"], "q": -64}}, f"q is -64{LENGTH}"),
    ({"key": {**ROW["key"], "k": float("nan")}}, f"k is nan{LENGTH}"),
    ({"key": {**ROW["key"], "k": 10**400}}, f"k is 10*...{LENGTH}"),
    ({"key": {**ROW["key"], "request": [1]}}, r"request is \[1\]; an object of its fields it is"),
    ({"value": {"backend": "a"}}, "backend is 'a'; one of those with a time it is"),
    ({"value": {"backend": "a", "times": {}}}, "backend is 'a'; one of those with a time it is"),
    ({"value": {"backend": "c", "times": {"a": 1.0}}}, "backend is 'c'; one of those with a time it is: a"),
    ({"value": {**ROW["value"], "rule": ["x"]}}, r"rule is \['x'\]; the name of a backend it is"),
    (
        {"value": {**ROW["value"], "by": ["x"]}},
        r"by is \['x'\]; whose kernels were measured, by backends with a time, it is",
    ),
    (
        {"value": {**ROW["value"], "by": {"c": "x"}}},
        r"by is {'c': 'x'}; whose kernels were measured, by backends with a time, it is",
    ),
    (
        {"value": {**ROW["value"], "by": {"a": 1}}},
        r"by is {'a': 1}; whose kernels were measured, by backends with a time, it is",
    ),
    (
        {"value": {**ROW["value"], "late": "a"}},
        "late is 'a'; a list of the backends that there was no time for it is",
    ),
    (
        {"value": {**ROW["value"], "late": [1]}},
        r"late is \[1\]; a list of the backends that there was no time for it is",
    ),
    ({"value": {"backend": "a", "times": {"a": 10**400}}}, "the time of a is 10*...; a time is finite and above 0"),
    ({"value": []}, r"value is \[\]; dict it is"),
    ({"date": "zzzz"}, "date is 'zzzz'; ISO 8601 it is, such as 2026-11-22T"),
    ({"date": "2026-02-30"}, "date is '2026-02-30'; ISO 8601 it is"),
    ({"date": "20260102"}, "date is '20260102'; ISO 8601 it is"),
]


UNKEPT = [
    ({"source": "\ud800"}, r"source is '\\ud800'; characters that UTF-8 can write it has"),
    ({"device": "H\ud800"}, r"device is 'H\\ud800'; characters that UTF-8 can write it has"),
    ({"microseconds": 10**30}, "microseconds is 10*; a time is finite and above 0"),
]
"""What no store can keep."""


@pytest.mark.parametrize("change, message", [*WRONG, *UNKEPT])
def test_an_import_is_checked_whole(own_store, change, message):
    data = {"format": "polyattn tuning 1", "measurements": [ROW, {**ROW, **change}]}
    with pytest.raises(ConfigError, match=f"import: measurement 1: {message}"):
        TuningStore(own_store).import_rows(data, ["a", "b"])
    assert not own_store.exists()


def spoil(path, **columns):
    with sqlite3.connect(path) as connection:
        for name, value in columns.items():
            connection.execute(f"UPDATE measurement SET {name} = ? WHERE microseconds = 1.0", [value])
    connection.close()


@pytest.mark.parametrize("change, message", [*WRONG, ({"value": "no json"}, "Expecting value")])
def test_a_row_that_is_none_costs_no_call_and_no_other_row(own_store, recwarn, change, message):
    put((1, 64, 64), {"a": 1.0, "b": 2.0})
    put((1, 1024, 1024), {"b": 3.0, "a": 4.0})
    spoil(own_store, **{name: v if isinstance(v, str) else json.dumps(v) for name, v in change.items()})
    tuning.reload()
    assert order((1, 1024, 1024)) == order() == ["b", "a"]
    assert [row.microseconds for row in tuning.store().rows()] == [3.0]
    (said,) = [str(w.message) for w in recwarn if w.category is RuntimeWarning]
    assert re.search(rf"has a row that is none \(.*{message}.*move it away: .* Such rows are not used", said)


def test_a_quarantine_that_is_none_is_not_used(own_store, recwarn):
    for name in ("a", "b"):
        tuning.quarantine(Quarantined(HERE, name, request_key(REQUEST), "it lies", "2026-01-01"))
    with sqlite3.connect(own_store) as connection:
        connection.execute("UPDATE quarantine SET key = '[]' WHERE backend = 'a'")
    connection.close()
    tuning.reload()
    assert advise(REQUEST, here).avoid == ("b",)
    assert [one.backend for one in tuning.store().quarantined()] == ["b"]
    (said,) = [str(w.message) for w in recwarn if w.category is RuntimeWarning]
    assert "has a row that is none (what a is quarantined for is []; a request it is)" in said


def test_a_quarantine_of_no_text_is_not_used(own_store, recwarn):
    tuning.quarantine(Quarantined(HERE, "a", request_key(REQUEST), "it lies", "2026-01-01"))
    with sqlite3.connect(own_store) as connection:
        connection.execute("INSERT INTO quarantine VALUES ('d', 'a', '{}', x'ff', '{}', 'r', 'd')")
    connection.close()
    tuning.reload()
    assert advise(REQUEST, here).avoid == ("a",)
    assert [one.backend for one in tuning.store().quarantined()] == ["a"]
    (said,) = [str(w.message) for w in recwarn if w.category is RuntimeWarning]
    assert r"a quarantine of b'\xff' at 'd', 'a' has something that is no text" in said


# --------------------------------------------------------------------------------------------------- requests like this

PAGED = dataclasses.replace(
    REQUEST, family="paged", layout="THD", phase="decode", s_relation="one", page_size=16, window=(1023, -1)
)
SHARD = dataclasses.replace(PAGED, heads=4, kv_heads=1)


@pytest.mark.parametrize(
    "other",
    [
        *(
            {"heads": 16},
            {"heads": 4},
            {"heads": 4, "kv_heads": 1},
            {"heads": 64, "kv_heads": 16},
            {"dtype": "float16"},
        ),
        *({"head_dim": 64}, {"head_dim": 256}, {"head_dim": 80}),
        *({"page_size": 4}, {"page_size": 64}, {"window": (255, -1)}, {"window": (4095, -1)}, {"lse": True}),
        *({"large": True}, {"multimodal": True}, {"save_kv_cache": True}),
    ],
)
def test_a_request_that_was_not_measured_has_the_choice_of_one_like_it(other):
    asked = dataclasses.replace(PAGED, **other)
    batch = 8 * PAGED.kv_heads // asked.kv_heads
    put((8, 1, 4096), {"a": 1.0, "b": 2.0}, request=PAGED)
    put((8, 1, 4096), {"b": 1.0}, request=dataclasses.replace(asked, sinks=True))
    assert order((batch, 1, 4096), asked) == order((0, 0, 0), asked) == ["a", "b"]
    assert measured(asked, here) == ()
    assert [one.lengths for one in advising(asked, here)] == [(batch, 1, 4096)]
    put((batch, 1, 4096), {"b": 1.0, "a": 2.0}, request=asked)
    assert order((batch, 1, 4096), asked) == order((0, 0, 0), asked) == ["b", "a"], "its own says more"
    assert order((8, 1, 4096), PAGED) == ["a", "b"]


@pytest.mark.parametrize(
    "other",
    [
        *(
            {"heads": 32},
            {"heads": 2},
            {"dtype": "float32"},
            {"page_size": 128},
            {"window": (127, -1)},
            {"head_dim": 56},
        ),
        *({"window": (-1, -1)}, {"window": (8191, -1)}, {"sinks": True}, {"softcap": 30.0}, {"scale": 0.5}),
        *({"kv_dtype": "fp8_e4m3"}, {"kv_layout": "HND"}, {"phase": "extend"}, {"kv_parts": 1}, {"misaligned": True}),
        *({"batch_invariant": True}, {"mask": "bool"}, {"v_head_dim": 64}, {"cross": True}, {"spec_topk": 4}),
    ],
)
def test_what_runs_other_kernels_or_is_far_off_says_nothing(other):
    put((8, 1, 4096), {"a": 1.0, "b": 2.0}, request=PAGED)
    asked = dataclasses.replace(PAGED, **other)
    assert order((8, 1, 4096), asked) == order((0, 0, 0), asked) == []
    assert advising(asked, here) == ()


@pytest.mark.parametrize("other", [{"grad": ("query",)}, {"causal": "none"}, {"mask": "bool"}])
def test_nor_do_other_gradients_and_masks(other):
    put((8, 64, 64), {"a": 1.0, "b": 2.0})
    assert order((8, 64, 64), like(**other)) == []


def test_the_other_layout_of_whole_tensors_is_as_far_as_twice_the_heads():
    put((8, 64, 64), {"a": 1.0, "b": 2.0})
    swapped = like(layout="BHSD")
    assert order((8, 64, 64), swapped) == ["a", "b"]
    said = advise(with_lengths(swapped, 8, 64, 64), here)
    assert (said.kin.fields, said.kin.off) == ({"layout": "BSHD"}, 1.0)
    put((8, 64, 64), {"b": 1.0, "a": 2.0}, like(layout="BHSD", head_dim=96))
    assert order((8, 64, 64), swapped) == ["b", "a"], "another head dim is nearer"


def test_who_was_like_it_is_said():
    put((8, 1, 4096), {"a": 1.0, "b": 2.0}, request=PAGED)
    said = advise(with_lengths(dataclasses.replace(SHARD, page_size=32), 16, 1, 4000), here)
    whose = "of a request like this one with heads=8, kv_heads=2, page_size=16"
    assert said.order[0][1] == f"1 us (others: b 2 us) at batch 8, S_q 1, S_k 4096, measured today, {whose}"
    assert (said.kin.fields, said.kin.off) == ({"heads": 8, "kv_heads": 2, "page_size": 16}, 1.0)
    put((8, 1, 1024), {"a": 1.0, "b": 3.0}, request=PAGED)
    said = advise(SHARD, here).order[0][1]
    whose = "of a request like this one with heads=8, kv_heads=2"
    assert said == f"1.00 x the fastest over 2 measured lengths, measured today, {whose}"


def test_the_nearest_is_asked():
    put((8, 1, 4096), {"b": 1.0, "a": 2.0}, request=dataclasses.replace(PAGED, page_size=64))
    put((8, 1, 4096), {"a": 1.0, "b": 2.0}, request=dataclasses.replace(PAGED, page_size=32))
    assert order((8, 1, 4096), PAGED) == order((0, 0, 0), PAGED) == ["a", "b"]
    put((8, 1, 65536), {"b": 1.0, "a": 2.0}, request=PAGED)
    assert order((8, 1, 4096), PAGED) == ["a", "b"], "its own are too far off"
    assert order((8, 1, 32768), PAGED) == order((0, 0, 0), PAGED) == ["b", "a"]


def test_who_is_quarantined_where_it_was_measured_is_not_taken_from_there():
    put((8, 1, 4096), {"a": 1.0, "b": 2.0}, request=PAGED)
    tuning.quarantine(Quarantined(HERE, "a", request_key(PAGED), "it lies", "2026-01-01"))
    assert order((16, 1, 4096), SHARD) == ["b"]
    assert advise(SHARD, here).avoid == (), "for other requests it was not"
    tuning.quarantine(Quarantined(HERE, "b", request_key(PAGED), "it hangs", "2026-01-01"))
    assert order((16, 1, 4096), SHARD) == []


def test_what_is_measured_while_a_program_runs_says_nothing_of_its_other_requests(monkeypatch, shipped):
    shipped(backend_row(HERE, dataclasses.replace(PAGED, page_size=64), (8, 1, 4096), {"b": 1.0, "a": 2.0}, "authors"))
    put((8, 1, 4096), {"a": 1.0, "b": 2.0}, request=PAGED)
    assert order((16, 1, 4096), SHARD) == ["a", "b"]
    monkeypatch.setenv("POLYATTN_TUNING", "online")
    assert order((16, 1, 4096), SHARD) == ["b", "a"], "tables do not change"
    assert order((8, 1, 4096), PAGED) == ["a", "b"]


def test_of_two_that_are_equally_near_the_one_of_this_machine_counts(shipped):
    shipped(backend_row(HERE, REQUEST, (1, 1024, 1024), {"a": 1.0, "b": 2.0}, "authors"))
    put((1, 4096, 4096), {"b": 1.0, "a": 2.0})
    assert order((1, 2048, 2048)) == ["b", "a"]
    assert order((1, 1024, 1024)) == ["a", "b"], "this one is nearer"


def test_what_is_not_used_is_said_beside_what_was_shipped(shipped):
    shipped(backend_row(HERE, REQUEST, (1, 1024, 1024), {"a": 1.0, "b": 2.0}, "authors"))
    put((1, 1024, 1024), {"b": 1.0, "a": 2.0}, place=dataclasses.replace(HERE, versions=(("torch", "2.10"),)))
    said = advise(with_lengths(REQUEST, 1, 1024, 1024), here)
    assert said.order[0][0] == "a"
    assert said.notes == ("1 measurements of such requests are not used: of torch 2.10, which this machine has not",)
    put((1, 1024, 1024), {"b": 1.0, "a": 2.0})
    assert advise(with_lengths(REQUEST, 1, 1024, 1024), here).notes == ()


def test_batches_count_with_their_key_heads():
    small = dataclasses.replace(PAGED, heads=4, kv_heads=1)
    put((1, 1, 4096), {"a": 1.0, "b": 2.0}, request=small)
    put((1024, 1, 4096), {"b": 1.0, "a": 2.0}, request=small)
    asked = dataclasses.replace(PAGED, heads=16, kv_heads=4)
    of = {batch: order((batch, 1, 4096), asked) for batch in (1, 4, 8, 16, 64, 256)}
    assert of == {1: ["a", "b"], 4: ["a", "b"], 8: [], 16: ["b", "a"], 64: ["b", "a"], 256: ["b", "a"]}
    wide = dataclasses.replace(PAGED, heads=128, kv_heads=32)
    assert order((2, 1, 4096), wide) == ["b", "a"]
    assert [one.kin.batch for one in advising(wide, here)] == [32], "one sequence has 32 times what was measured of one"
    assert order((1, 1, 4096), dataclasses.replace(PAGED, heads=2**18, kv_heads=2**16)) == []


def test_what_was_shipped_stays_for_requests_like_it_while_a_program_measures(monkeypatch, shipped):
    shipped(backend_row(HERE, PAGED, (8, 1, 4096), {"b": 1.0, "a": 2.0}, "authors"))
    monkeypatch.setenv("POLYATTN_TUNING", "online")
    assert order((16, 1, 4096), SHARD) == ["b", "a"]
    put((8, 1, 4096), {"a": 1.0, "b": 2.0}, request=PAGED)
    tuning.quarantine(Quarantined(HERE, "b", request_key(PAGED), "it lies", "2026-01-01"))
    assert order((16, 1, 4096), SHARD) == ["b", "a"]
    assert order((8, 1, 4096), PAGED) == ["a"]
    monkeypatch.delenv("POLYATTN_TUNING")
    assert order((16, 1, 4096), SHARD) == ["a"]


def test_measurements_with_nobody_left_leave_it_to_others():
    put((8, 1, 4096), {"a": 1.0}, request=PAGED)
    put((8, 1, 4096), {"b": 1.0, "c": 2.0}, request=dataclasses.replace(PAGED, page_size=64))
    tuning.quarantine(Quarantined(HERE, "a", request_key(PAGED), "it lies", "2026-01-01"))
    assert order((8, 1, 4096), PAGED) == order((0, 0, 0), PAGED) == ["b", "c"]


@pytest.mark.parametrize("times", [*range(1, 300, 7), 5, 10, 66])
def test_twice_is_near_whatever_the_numbers(times):
    of = {n: numbers_of({"heads": n * times, "kv_heads": times})[1] for n in (1, 2)}
    assert distance(of[1], of[2]) == pytest.approx(1.0)
    assert distance(numbers_of({"heads": 2 * times})[1], numbers_of({"heads": times})[1]) is not None
    pages = {size: numbers_of({"page_size": size})[1] for size in (times, 4 * times, 4 * times + 1)}
    assert distance(pages[times], pages[4 * times]) is not None
    assert distance(pages[times], pages[4 * times + 1]) is None


def test_who_is_quarantined_has_no_say_in_the_order():
    for length in (64, 256):
        costly((1, length, length), {"bad": 1.0, "x": 2.0, "rule": 2.01}, {}, rule="rule")
    tuning.quarantine(Quarantined(HERE, "bad", request_key(REQUEST), "it lies", "2026-01-01"))
    assert order((1, 64, 64)) == order() == ["rule", "x"]
    assert all("bad" not in one.times for one in advising(REQUEST, here))


def test_what_is_known_of_requests_like_one_is_kept_for_a_while(monkeypatch):
    monkeypatch.setattr(known, "_MOST", 4)
    put((8, 1, 4096), {"a": 1.0, "b": 2.0}, request=PAGED)
    for left in range(1000, 1020):
        assert order((8, 1, 4096), dataclasses.replace(PAGED, window=(left, -1))) == ["a", "b"]
    (found,) = (one for name, one in current._state.read.items() if name[0] == "backends")
    assert 0 < len(found._kin) <= 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"heads": 0},
        {"kv_heads": -2},
        {"heads": "x"},
        {"page_size": 1.5},
        {"window": 5},
        {"window": [1]},
        {"window": [True, 0]},
        {"lse": [1]},
        {"lse": "yes"},
        {"save_kv_cache": []},
        {"dtype": "half"},
        {"heads": 8, "kv_heads": 3},
        {"heads": 10**400},
        {"kv_heads": 10**400},
        {"heads": 10**400, "kv_heads": 10**400},
        {"window": [10**400, -1]},
        {"page_size": 10**400},
    ],
)
def test_a_row_with_numbers_that_no_request_has_is_like_none(wrong):
    row = backend_row(HERE, REQUEST, (8, 64, 64), {"a": 1.0, "b": 2.0}, "a test")
    tuning.record(dataclasses.replace(row, key={**row.key, "request": {**row.key["request"], **wrong}}))
    assert order((8, 64, 64), like(heads=4)) == []


def test_shipped_tables_can_be_asked_what_they_say_of_a_request_that_is_not_in_them(shipped):
    shipped(
        backend_row(HERE, PAGED, (8, 1, 4096), {"a": 1.0, "b": 2.0}, "the authors"),
        backend_row(HERE, SHARD, (16, 1, 4096), {"b": 1.0, "a": 2.0}, "the authors"),
    )
    asked = with_lengths(SHARD, 16, 1, 4096)
    assert [[name for name, _ in shipped_advice(asked, here, own=own).order] for own in (True, False)] == [
        ["b", "a"],
        ["a", "b"],
    ]


# ------------------------------------------------------------------------------------------------------ shipped tables


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    def ship(*rows: Row, text: str = "", files: tuple[str, ...] = ("acme_chips:chip.json",), **more: Any) -> None:
        folder = tmp_path / "acme_chips"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
        data = {"format": "polyattn tuning 1", "measurements": [row.plain() for row in rows], **more}
        (folder / "chip.json").write_text(text or json.dumps(data))
        plugin = PluginReport("acme", "acme_chips.plugin", "acme-chips", "1.0")
        manager = types.SimpleNamespace(measurements=tuple(("acme", file) for file in files), plugins={"acme": plugin})
        monkeypatch.setattr(known, "get_manager", lambda: manager)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "acme_chips", raising=False)
        known._read_tables.cache_clear()
        tuning.reload()

    return ship


def test_a_measurement_is_of_all_lengths_that_share_its_buckets():
    put((1, 2048, 2048), {"a": 1.0, "b": 2.0})
    put((1, 4096, 4096), {"b": 1.0, "a": 2.0})
    assert order((1, 2048, 2048)) == ["a", "b"]
    assert order((1, 2049, 2049)) == order((1, 4096, 4096)) == ["b", "a"], "though 2048 is nearer"


def test_a_shipped_table_serves_such_a_device_whatever_its_versions(shipped):
    other = dataclasses.replace(HERE, versions=(("torch", "2.9"),))
    shipped(
        backend_row(other, REQUEST, (1, 1024, 1024), {"a": 1.0, "b": 2.0}, "the authors"),
        backend_row(dataclasses.replace(other, arch="sm80"), REQUEST, (1, 32, 32), {"c": 1.0}, "the authors"),
    )
    ((name, why), _) = advise(with_lengths(REQUEST, 1, 1024, 1024), here).order
    assert (name, why) == ("a", "1 us (others: b 2 us) at batch 1, S_q 1024, S_k 1024, shipped with a plugin")
    assert order((1, 32, 32)) == []
    put((1, 1024, 1024), {"b": 1.0, "a": 2.0})
    assert order((1, 1024, 1024)) == ["b", "a"], "what was measured here is nearer"
    assert [one.shipped for one in measured(REQUEST, here)] == [False]
    assert [name for name, _ in shipped_advice(with_lengths(REQUEST, 1, 1024, 1024), here).order] == ["a", "b"], (
        "what polyattn ships says the same"
    )
    assert shipped_advice(dataclasses.replace(REQUEST, sinks=True), here) == NOTHING


def test_what_another_plugin_ships_is_read_anew(shipped):
    shipped(backend_row(HERE, REQUEST, (1, 64, 64), {"a": 1.0, "b": 2.0}, "the authors"))
    assert order((1, 64, 64)) == ["a", "b"]
    known.get_manager().measurements = ()
    assert order((1, 64, 64)) == []


def test_of_two_shipped_measurements_the_later_one_counts(shipped):
    row = backend_row(HERE, REQUEST, (1, 64, 64), {"a": 1.0, "b": 2.0}, "the authors")
    value = {"backend": "b", "times": {"b": 1.0, "a": 2.0}}
    older = dataclasses.replace(row, value=value, date="2025-01-01T00:00:00+00:00")
    shipped(row, dataclasses.replace(older, place=dataclasses.replace(HERE, versions=(("torch", "9"),))))
    assert order((1, 64, 64)) == ["a", "b"]


def test_measurements_of_kernels_in_a_shipped_file_are_not_of_requests(shipped):
    row = backend_row(HERE, REQUEST, (1, 64, 64), {"a": 1.0, "b": 2.0}, "the authors")
    kernel = dataclasses.replace(row, subject="kernel:acme.decode", key={"k_bucket": 64}, value={"block_n": 64})
    shipped(row, kernel)
    assert order((1, 64, 64)) == ["a", "b"]


@pytest.mark.parametrize("body", ["raise RuntimeError('no driver')", "raise SystemExit(3)", "def broken(:"])
def test_a_package_that_cannot_be_imported_costs_no_call(shipped, recwarn, tmp_path, body):
    warnings.simplefilter("always")
    shipped()
    (tmp_path / "acme_chips" / "__init__.py").write_text(body)
    assert order((1, 64, 64)) == order() == []
    assert len([w for w in recwarn if "the measurements of plugin acme" in str(w.message)]) == 1
    tuning.reload()
    assert order() == []
    assert len([w for w in recwarn if "the measurements of plugin acme" in str(w.message)]) == 1, "said once"


BROKEN = [
    ("{", "Expecting property name"),
    ("[]", "acme_chips:chip.json is no export of `polyattn tune`, which has format 'polyattn tuning 1'"),
    ('{"format": "else", "measurements": []}', "is no export of `polyattn tune`"),
    ('{"format": "polyattn tuning 1"}', "is no export of `polyattn tune`"),
    ('{"format": "polyattn tuning 1", "measurements": [1]}', "acme_chips:chip.json: measurement 0: a measurement has"),
    (
        '{"format": "polyattn tuning 1", "measurements": [], "sample": "yes"}',
        "acme_chips:chip.json: sample is 'yes'; true it is",
    ),
]


@pytest.mark.parametrize("text, why", BROKEN)
def test_a_shipped_file_that_is_none_costs_no_call_and_is_said_once(shipped, recwarn, text, why):
    shipped(text=text)
    put((1, 64, 64), {"a": 1.0, "b": 2.0})
    assert order((1, 64, 64)) == order() == ["a", "b"]
    (said,) = [str(w.message) for w in recwarn if w.category is RuntimeWarning]
    assert said.startswith("the measurements of plugin acme (acme-chips 1.0) are not used: ")
    assert why in said


def test_a_shipped_sample_answers_no_request_and_teaches_the_model(shipped):
    place = dataclasses.replace(HERE, device="Acme A1", arch="sm80")
    lengths = [(1, length, length) for length in (100, 300, 700, 1500, 3000)]
    rows = [backend_row(place, REQUEST, one, {"a": 1.0, "b": 2.0}, "the authors") for one in lengths]
    asked = with_lengths(REQUEST, 1, 700, 700)
    shipped(*rows, sample=True)
    assert shipped_advice(asked, lambda: place) == NOTHING, "without the rates of its device it says nothing"
    shipped(*rows, sample=True, rates={"Acme A1": {"matmul": 300, "read": 2000, "units": 108}})
    said = shipped_advice(asked, lambda: place)
    assert [name for name, _ in said.order] == ["a", "b"]
    assert said.predicted, "it is a prediction, though this very request is in the sample"
    assert known.shipped_rows() == ()


@pytest.mark.parametrize("file", ["acme_chips:gone.json", "no_such_package:chip.json", "chip.json", ""])
def test_a_shipped_file_that_is_not_there_costs_no_other(shipped, recwarn, file):
    row = backend_row(HERE, REQUEST, (1, 64, 64), {"a": 1.0, "b": 2.0}, "the authors")
    shipped(row, files=(file, "acme_chips:chip.json"))
    assert order((1, 64, 64)) == ["a", "b"]
    assert len([w for w in recwarn if "the measurements of plugin acme" in str(w.message)]) == 1


def test_the_tables_of_the_package_can_be_read():
    rows = known.shipped_rows()
    assert {(row.subject, row.place.device, row.place.arch) for row in rows} >= {(BACKEND, "NVIDIA H200", "sm90")}
    h200 = Place("NVIDIA H200", "sm90")
    row = next(r for r in rows if r.place.device == h200.device)
    asked = request_of(row.key["request"])
    assert canonical(request_key(asked)) == canonical(row.key["request"])
    said = shipped_advice(with_lengths(asked, row.key["batch"], row.key["q"], row.key["k"]), lambda: h200)
    assert {name for name, _ in said.order} == set(row.value["times"])


def test_a_store_that_cannot_be_read_is_said_once(own_store, recwarn):
    own_store.write_text("this is no database, and it is long enough to be seen as none" * 20)
    tuning.reload()
    for _ in range(3):
        assert advise(REQUEST, here).order == ()
    (said,) = [w for w in recwarn.list if w.category is RuntimeWarning]
    assert "nothing measured decides about backends: the tuning store" in str(said.message)


@pytest.mark.parametrize("days, words", [(0, "today"), (1, "1 day ago"), (40, "40 days ago")])
def test_measurements_have_an_age(days, words):
    then = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=days)
    assert age(then.isoformat()) == age(then.replace(tzinfo=None).isoformat()) == words
    assert age("long ago") == "on long ago"


def test_what_was_read_is_kept_until_something_changes(monkeypatch):
    put((1, 64, 64), {"a": 1.0})
    assert order((1, 64, 64)) == ["a"]
    monkeypatch.setattr(current, "TuningStore", None)
    monkeypatch.setattr("sqlite3.connect", None)
    assert order((1, 64, 64)) == ["a"]


def test_what_is_recorded_while_the_file_is_read_is_not_missed(monkeypatch):
    put((1, 64, 64), {"a": 1.0, "b": 2.0})
    real = known._read

    def slow(place):
        found = real(place)
        monkeypatch.setattr(known, "_read", real)
        tuning.quarantine(Quarantined(HERE, "a", request_key(REQUEST), "it lies", "2026-01-01"))  # by another thread
        return found

    monkeypatch.setattr(known, "_read", slow)
    assert order() == ["a", "b"], "asked before"
    assert order() == ["b"]


# ----------------------------------------------------------------------------------------------- requests as plain data


def test_a_request_is_the_same_after_json():
    changed = dataclasses.replace(
        REQUEST, window=(5, -1), grad=("query", "lse"), scale=0.25, save_kv_cache=False, toolkit=(12, 8), phase="decode"
    )
    assert read_request(json.loads(json.dumps(plain_request(changed))), "here") == changed
    assert plain_request(AttentionRequest()) == {}


@pytest.mark.parametrize("captured", [False, True, "session"])
def test_how_a_call_is_recorded_is_the_same_after_json(captured):
    changed = dataclasses.replace(REQUEST, graph_capture=captured)
    assert read_request(json.loads(json.dumps(plain_request(changed))), "here") == changed


@pytest.mark.parametrize("captured", [1, "call"])
def test_other_words_for_a_recording_are_refused(captured):
    with pytest.raises(ConfigError, match=r"graph_capture=.*; allowed: False, True, session"):
        read_request({"graph_capture": captured}, "here")


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("head_dim", 0, "a whole number from 1 on"),
        ("kv_heads", -1, "a whole number from 1 on"),
        ("page_size", -16, "a whole number from 0 on"),
        ("heads", True, "a whole number from 1 on"),
        ("window", ["a"], r"like \(-1, -1\)"),
        ("window", ["a", "b"], r"like \(-1, -1\)"),
        ("window", 5, r"like \(-1, -1\)"),
        ("block_shape", [64], r"like \(0, 0\)"),
        ("sinks", 1, "like False"),
        ("softcap", True, r"like 0\.0"),
    ],
)
def test_values_that_no_request_has_are_refused(name, value, allowed):
    with pytest.raises(ConfigError, match=f"here: {name}=.*; allowed: {allowed}"):
        read_request({name: value}, "here")


def test_lists_in_lists_without_end_are_refused():
    with pytest.raises(ConfigError, match=r"here: window is lists in lists in lists; allowed: like \(-1, -1\)"):
        read_request({"window": json.loads("[" * 600 + "]" * 600)}, "here")


def test_every_field_of_a_request_may_be_left_out():
    names = {field.name for field in dataclasses.fields(AttentionRequest)}
    assert {field.name for field in request_fields()} <= names
    assert all(field.default is not dataclasses.MISSING for field in dataclasses.fields(AttentionRequest))


def test_a_date_that_is_to_come_is_told_as_it_is():
    assert age("2199-01-01T00:00:00+00:00") == "on 2199-01-01T00:00:00+00:00"
