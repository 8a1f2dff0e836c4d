"""A store with many measurements: what is asked for is found by an index, which a file of a former format is given."""

from __future__ import annotations

import dataclasses
import os
import sqlite3
import threading
import warnings

import pytest

from polyattn.contract import AttentionRequest
from polyattn.tuning import BACKEND, Place, Quarantined, TuningStore, backend_row, request_key
from polyattn.tuning.store import MOST_ALIKE, MOST_ROWS

HERE = Place("a chip", "sm90", (("torch", "2"),))
OTHER = dataclasses.replace(HERE, device="another chip")
REQUEST = AttentionRequest(dtype="bfloat16", heads=8, kv_heads=8, head_dim=64)
KEY = request_key(REQUEST)


def measured(request=REQUEST, lengths=(1, 64, 64), place=HERE):
    return backend_row(place, request, lengths, {"a": 1.0, "b": 2.0}, "a test")


def of(rows):
    return [(row.key["request"]["heads"], row.key["k"]) for row in rows]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tuning.sqlite3"


@pytest.fixture(params=[False, True], ids=["file", "memory"])
def store(request, path):
    return TuningStore(None if request.param else path)


def former(path):
    """Take the index of a file away, as it was before there was one."""
    with sqlite3.connect(path) as connection:
        for table in ("request", "lengths"):
            connection.execute(f"DROP TABLE {table}")
        connection.execute("PRAGMA user_version = 2")
    connection.close()


def version(path):
    with sqlite3.connect(path) as connection:
        (found,) = connection.execute("PRAGMA user_version").fetchone()
    connection.close()
    return found


def test_a_request_is_found_with_those_like_it_and_those_of_other_places(store):
    like = dataclasses.replace(REQUEST, heads=16, kv_heads=16)
    unlike = dataclasses.replace(REQUEST, causal="bottom_right")
    store.record(
        *(measured(lengths=(1, 64, k)) for k in (64, 128)),
        *(measured(lengths=(1, 64, k), place=OTHER) for k in (64, 128, 256)),
        measured(like),
        measured(unlike),
        measured(like, place=OTHER),
    )
    found = store.asked(HERE, KEY)
    assert of(found.own) == [(8, 64), (8, 128)]
    assert found.elsewhere == [(OTHER, 3)]
    assert (16, 64) in of(found.alike)
    assert store.asked(dataclasses.replace(HERE, arch="sm80"), KEY).own == []
    assert store.lookup(HERE, BACKEND, measured().key).source == "a test"
    assert store.lookup(HERE, BACKEND, {**measured().key, "k": 4096}) is None


def test_the_nearest_are_looked_at_and_no_other_row_is_read(path, monkeypatch):
    def shard(heads, head_dim=64, layout="BSHD"):
        return measured(dataclasses.replace(REQUEST, heads=heads, kv_heads=8, head_dim=head_dim, layout=layout))

    store = TuningStore(path)
    far = [shard(8, head_dim) for head_dim in range(65, 65 + 2 * MOST_ALIKE)]
    store.record(*far, shard(16), shard(8, layout="BHSD"), shard(32), shard(8, 200))
    read = []
    whole = TuningStore._row
    monkeypatch.setattr(TuningStore, "_row", lambda self, line: read.append(line) or whole(self, line))
    near = store.asked(HERE, KEY).alike
    assert len(read) == len(near) == MOST_ALIKE
    dims = {row.key["request"].get("head_dim", 128) for row in near}
    assert dims <= {*range(65, 65 + MOST_ALIKE), 64}, "the nearest"
    # Twice the group, and the other layout, are as far as twice the width.
    assert of(near)[0] == (8, 64)


def test_of_requests_with_many_lengths_few_are_looked_at(path):
    store = TuningStore(path)
    alike = [dataclasses.replace(REQUEST, heads=heads, kv_heads=heads) for heads in (1, 2, 4, 16)]
    store.record(*(measured(one, (1, 64, k)) for one in alike for k in range(1, MOST_ROWS)))
    assert len(store.asked(HERE, KEY).alike) == 2 * (MOST_ROWS - 1)


@pytest.mark.parametrize("index", [True, False])
def test_what_is_taken_out_is_found_no_more(path, index):
    store = TuningStore(path)
    store.record(measured(), measured(lengths=(1, 64, 128), place=OTHER))
    if index:
        store.quarantine(Quarantined(HERE, "c", KEY, "it lies", "2026-01-01"))
        assert store.release("c") == 1, "c was not measured"
    else:
        assert store.forget(BACKEND, HERE) == 1
    assert store.asked(HERE, KEY).own == []
    assert store.asked(OTHER, KEY).elsewhere == []
    assert store.count() == {BACKEND: 1}


def test_a_former_file_is_converted_once_and_says_so(path):
    TuningStore(path).record(measured(), measured(place=OTHER))
    former(path)
    store = TuningStore(path)
    assert len(store.rows()) == 2, "it is read as it is"
    with pytest.warns(RuntimeWarning, match=r"tuning.sqlite3 has a former format and is converted, once"):
        found = store.asked(HERE, KEY)
    assert (of(found.own), found.elsewhere) == ([(8, 64)], [(OTHER, 1)])
    assert version(path) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert of(TuningStore(path).asked(HERE, KEY).own) == [(8, 64)]


def test_who_records_converts_a_former_file_too(path):
    TuningStore(path).record(measured())
    former(path)
    with pytest.warns(RuntimeWarning, match="is converted, once"):
        TuningStore(path).record(measured(lengths=(1, 64, 128)))
    assert of(TuningStore(path).asked(HERE, KEY).own) == [(8, 64), (8, 128)]


def test_a_former_file_that_cannot_be_written_is_read_whole_and_says_so(path, monkeypatch):
    TuningStore(path).record(measured())
    former(path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    store = TuningStore(path)
    with pytest.warns(RuntimeWarning, match="has a former format and cannot be written: each process reads it whole"):
        found = store.asked(HERE, KEY)
    assert of(found.own) == [(8, 64)]
    assert version(path) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert of(store.asked(HERE, KEY).own) == [(8, 64)]


@pytest.mark.filterwarnings("ignore:.*is converted, once")
def test_several_may_convert_a_file_at_a_time(path):
    TuningStore(path).record(*(measured(lengths=(1, 64, k)) for k in range(1, 200)))
    former(path)
    found = []
    threads = [threading.Thread(target=lambda: found.append(TuningStore(path).asked(HERE, KEY))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(one.own) for one in found] == [199] * 4


def test_pages_follow_one_another(store):
    store.record(*(measured(lengths=(1, 64, k)) for k in range(1, 8)))
    pages = [store.page(first, 3) for first in (0, 3, 6, 9)]
    assert [len(page) for page in pages] == [3, 3, 1, 0]
    assert {row.key["k"] for page in pages for row in page} == {*range(1, 8)}
    assert store.count() == {BACKEND: 7}
