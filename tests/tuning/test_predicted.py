"""Times that are predicted where nothing was measured."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

import polyattn
from polyattn import tuning
from polyattn.contract import AttentionRequest
from polyattn.errors import ConfigError
from polyattn.selection.inspection import catalogue
from polyattn.selection.select import Choice, Policy, Selection, select
from polyattn.selection.tuned_policy import shipped_policy
from polyattn.tuning import Place, backend_row, request_key, request_of, with_lengths
from polyattn.tuning.known import shipped, shipped_rates, shipped_rows, shipped_samples
from polyattn.tuning.predicted import Model, Rates, rates_of
from polyattn.tuning.times import Measured

H200, H100 = Place("NVIDIA H200", "sm90"), Place("NVIDIA H100 80GB HBM3", "sm90")
SERVED = {"family": "paged", "layout": "THD", "page_size": 16, "platform": "cuda", "arch": "sm90"}
DECODE = AttentionRequest(phase="decode", s_relation="one", heads=32, kv_heads=8, **SERVED).normalised()
ENCODER = AttentionRequest(heads=16, kv_heads=16, head_dim=64, platform="cuda", arch="sm90").normalised()


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYATTN_TUNING_STORE", str(tmp_path / "tuning.sqlite3"))
    monkeypatch.delenv("POLYATTN_TUNING", raising=False)
    tuning.reload()
    yield
    tuning.reload()


def model(device: str = H100.device, **more: Rates) -> Model:
    found = Model.of(shipped_rows(), {**shipped_rates(), **more}, device, "sm90")
    assert found is not None
    return found


def predicted(request: AttentionRequest, lengths: tuple[int, int, int], device: str = H100.device) -> dict[str, float]:
    one = model(device).at(request, request_key(request), lengths)
    return {} if one is None else dict(one.times)


def chosen(request: AttentionRequest, place: Place = H100, policy: Policy | None = None) -> Selection:
    versions = {name: version for row in shipped_rows() for name, version in row.place.versions}
    return select(request, catalogue(versions), shipped_policy(policy or Policy(), request, place=place))


def test_another_device_of_the_architecture_gets_a_prediction_with_its_figures():
    said = chosen(with_lengths(ENCODER, 64, 512, 512))
    assert (said.backend, said.source) == ("triton", "cost model")
    assert said.why.startswith("predicted ")
    assert " against " in said.why
    assert re.search(
        rf"at batch 64, S_q 512, S_k 512, from \d+ measurements on NVIDIA H200 and {H100.device}$", said.why
    )


def test_a_cache_of_eight_bits_goes_to_who_was_fast_with_one():
    eight = dataclasses.replace(DECODE, heads=64, kv_dtype="fp8_e4m3", kv_scales="tensor").normalised()
    times = predicted(eight, (32, 1, 8192))
    assert 2 * times["triton"] < times["fa3"]
    assert min(times, key=lambda name: times[name]) == "triton"


def test_what_was_measured_is_found_again():
    """Who is fastest in a measurement is predicted within a few percent of it, nearly everywhere."""
    off = []
    here = model(H200.device)
    for row in shipped_rows():
        key = row.key["request"]
        one = here.at(request_of(key), key, (row.key["batch"], row.key["q"], row.key["k"]))
        best = row.value["backend"]
        if one is not None and best in one.times:
            off.append(abs(one.times[best] / row.value["times"][best] - 1))
    assert len(off) > 150
    assert sorted(off)[len(off) // 2] < 0.1


def test_a_prediction_is_of_lengths_that_differ_by_a_quarter_at_most():
    """Of the work at the end of the powers of two, 35 sequences of 185 tokens have less than a third."""
    said = chosen(with_lengths(ENCODER, 35, 185, 185)).why
    assert "at batch 40, S_q 192, S_k 192, from " in said
    assert predicted(ENCODER, (40, 192, 192))["triton"] < 0.6 * predicted(ENCODER, (64, 256, 256))["triton"]


def test_what_is_bound_by_memory_scales_with_its_rate_and_what_is_not_does_not():
    slow = {
        name: time / predicted(DECODE, (64, 1, 32768), H200.device)[name]
        for name, time in predicted(DECODE, (64, 1, 32768)).items()
    }
    assert slow["triton"] == pytest.approx(4800 / 3350, rel=0.1)
    long = dataclasses.replace(ENCODER, head_dim=128).normalised()
    same = predicted(long, (1, 32768, 32768))["triton"] / predicted(long, (1, 32768, 32768), H200.device)["triton"]
    assert same == pytest.approx(1, rel=0.05)


def test_a_device_without_rates_is_taken_for_the_one_that_was_measured():
    assert predicted(DECODE, (8, 1, 4096), "a new one") == predicted(DECODE, (8, 1, 4096), H200.device)


@pytest.mark.parametrize(
    "changed",
    [{"alibi": True}, {"deterministic": True}, {"kv_dtype": "int8", "kv_scales": "token"}, {"kv_layout": "HND"}],
)
def test_nothing_is_said_of_requests_of_which_nothing_is_known(changed):
    asked = dataclasses.replace(DECODE, **changed).normalised()
    assert predicted(asked, (8, 1, 4096)) == {}
    assert model().grid(asked, request_key(asked)) == ()


def test_who_takes_as_long_for_little_as_for_much_is_no_measure_of_others():
    packed = AttentionRequest(family="varlen", layout="THD", heads=16, kv_heads=16, platform="cuda", arch="sm90")
    rows = []
    for batch, length, has_fa in ((8, 8192, False), (4, 8192, True), (8, 4096, True), (4, 4096, True), (2, 4096, True)):
        triton = batch * length / 100
        times = {"torch_native": 600.0, "triton": triton, **({"fa": 0.8 * triton} if has_fa else {})}
        rows.append(backend_row(H200, packed, (batch, length, length), times, "a test"))
    assert next(iter(rows[0].value["times"])) == "torch_native"
    made = Model.of(rows, shipped_rates(), H200.device, "sm90")
    assert made is not None
    one = made.at(packed, request_key(packed), (8, 8192, 8192))
    assert one is not None
    assert one.times["fa"] == pytest.approx(0.8 * one.times["triton"])


def test_who_has_no_time_of_a_host_is_not_taken_for_one_without_a_host():
    """A sample without times of hosts has a backend that no other row of the group has."""
    packed = AttentionRequest(family="varlen", layout="THD", heads=16, kv_heads=16, platform="cuda", arch="sm90")
    rows = []
    for batch in (1, 2, 3, 4, 5):
        times = {"triton": 10.0 * batch, "fa": 9.0 * batch}
        host = {"triton": 70.0, "fa": 30.0}
        rows.append(backend_row(H200, packed, (batch, 512, 512), times, "a test", host=host))
        rows.append(backend_row(H100, packed, (batch, 500, 500), {**times, "cudnn": 5.0 * batch}, "a test"))
    made = Model.of(rows, shipped_rates(), H100.device, "sm90")
    one = made.at(packed, request_key(packed), (2, 512, 512))
    assert one.host == pytest.approx({"triton": 70.0, "fa": 30.0, "cudnn": 50.0})
    assert next(iter(one.costs(recorded=False))) == "fa"
    assert next(iter(one.costs(recorded=True))) == "cudnn"
    bare = Model.of([row for row in rows if "host" not in row.value], shipped_rates(), H100.device, "sm90")
    assert bare.at(packed, request_key(packed), (2, 512, 512)).host == {}, "nobody's is known"


def test_a_prediction_with_a_host_as_slow_as_the_device_costs_more_than_either():
    """A kernel of 98 us whose host takes 95, each give or take a third, is slower than one of 100 with a host of 20."""
    times, host = {"triton": 98.0, "fa": 100.0}, {"triton": 95.0, "fa": 20.0}
    measured = Measured((2, 512, 512), times, "2026-11-29T00:00:00+00:00", host=host)
    assert measured.costs(recorded=False) == {"triton": 98.0, "fa": 100.0}
    guessed = dataclasses.replace(measured, predicted="from a test")
    assert list(guessed.costs(recorded=False)) == ["fa", "triton"]
    assert guessed.costs(recorded=False) == pytest.approx({"fa": 100.04, "triton": 114.79}, rel=1e-3)
    assert guessed.costs(recorded=True) == {"triton": 98.0, "fa": 100.0}
    slow = dataclasses.replace(guessed, host={"triton": 980.0, "fa": 20.0})
    assert slow.costs(recorded=False)["triton"] == pytest.approx(980, rel=1e-3), "the slower of both, where they differ"


def test_the_host_of_one_kernel_is_not_that_of_another():
    """A backend whose long calls need several launches: what is near says what its host takes."""
    packed = AttentionRequest(family="varlen", layout="THD", heads=16, kv_heads=16, platform="cuda", arch="sm90")
    rows = []
    for batch, length, host in ((1, 128, 60.0), (2, 128, 60.0), (1, 8192, 300.0), (2, 8192, 300.0)):
        times = {"triton": batch * length / 100, "fa": batch * length / 90}
        rows.append(
            backend_row(H200, packed, (batch, length, length), times, "a test", host={"triton": host, "fa": 40})
        )
    made = Model.of(rows, shipped_rates(), H200.device, "sm90")
    for length, host in ((128, 60.0), (8192, 300.0)):
        one = made.at(packed, request_key(packed), (1, length, length))
        assert one.host == pytest.approx({"triton": host, "fa": 40}, rel=0.05)


def test_long_training_is_as_far_as_sixteen_thousand_tokens_and_parts_train_like_the_whole():
    """Layers of video models over several devices: nobody measured so many tokens, and parts have a gradient of the LSE
    too."""
    train = AttentionRequest(
        heads=24, kv_heads=24, head_dim=128, grad=("query", "key", "value"), platform="cuda", arch="sm90"
    ).normalised()
    part = dataclasses.replace(train, grad=("query", "key", "value", "lse"), lse=True).normalised()
    made = Model.of([*shipped_rows(), *shipped_samples()], shipped_rates(), H200.device, "sm90")
    for tokens in (16_384, 115_200):
        whole, of_part = (made.at(one, request_key(one), (1, tokens, tokens)) for one in (train, part))
        assert whole is not None
        assert whole.times == of_part.times
        assert whole.times["triton"] < whole.times["torch_sdpa"]


def test_one_shipped_request_like_it_comes_after_the_model_and_one_of_this_machine_before():
    asked = with_lengths(ENCODER, 32, 512, 512)
    assert chosen(asked, H200).source == "cost model"
    like = dataclasses.replace(ENCODER, heads=8, kv_heads=8).normalised()
    tuning.record(backend_row(H200, like, (64, 512, 512), {"torch_sdpa": 1.0, "triton": 9.0}, "a test"))
    said = tuning.advise(asked, lambda: H200)
    assert (said.order[0][0], said.how) == ("torch_sdpa", "tuned")
    assert said.kin is not None


def test_other_architectures_are_not_predicted():
    assert Model.of(shipped_rows(), shipped_rates(), "NVIDIA B200", "sm100") is None
    assert Model.of(shipped_rows(), {}, H200.device, "sm90") is None
    assert Model.of((), shipped_rates(), H200.device, "sm90") is None


def test_quantised_caches_are_not_guessed_from_others():
    plain = [row for row in shipped_rows() if "kv_dtype" not in row.key["request"]]
    found = Model.of(plain, shipped_rates(), H100.device, "sm90")
    eight = dataclasses.replace(DECODE, kv_dtype="fp8_e4m3", kv_scales="tensor").normalised()
    assert found is not None
    assert found.at(eight, request_key(eight), (8, 1, 4096)) is None
    assert found.at(DECODE, request_key(DECODE), (8, 1, 4096)) is not None


def test_what_was_measured_and_what_was_asked_for_come_before():
    asked = with_lengths(ENCODER, 32, 512, 512)
    assert chosen(asked, policy=Policy(Choice("fa", "argument"))).source == "argument"
    tuning.record(backend_row(H100, ENCODER, (32, 512, 512), {"flex_attention": 1.0, "triton": 2.0}, "a test"))
    assert [name for name, _ in tuning.advise(asked, lambda: H100).order] == ["flex_attention", "triton"]
    assert not tuning.advise(asked, lambda: H100).predicted


def test_who_is_quarantined_is_not_predicted_to_be_fast():
    asked = with_lengths(ENCODER, 32, 512, 512)
    first = tuning.advise(asked, lambda: H100).order[0][0]
    tuning.quarantine(tuning.Quarantined(H100, first, request_key(ENCODER), "wrong", "2026-11-27"))
    said = tuning.advise(asked, lambda: H100)
    assert said.predicted
    assert first not in [name for name, _ in said.order]


def test_without_lengths_it_is_the_best_over_those_of_others_like_it():
    said = chosen(ENCODER)
    assert said.source == "cost model"
    assert "predicted lengths" in said.why
    assert len(tuning.advising(ENCODER, lambda: H100)) > 5
    assert all(one.predicted for one in tuning.advising(ENCODER, lambda: H100))


def test_nothing_is_predicted_where_measurements_are_off(monkeypatch):
    monkeypatch.setenv("POLYATTN_TUNING", "off")
    assert tuning.advise(with_lengths(ENCODER, 32, 512, 512), lambda: H100) == tuning.NOTHING


def test_a_model_that_was_not_measured_is_left_to_the_others():
    """`own=False` leaves out all measurements of the request."""
    key = json.loads(next(iter(shipped(lambda: H200).tables.measured)))
    request = request_of(key)
    here = model(H200.device)
    lengths = next(p.lengths for group in here.groups.values() for p in group.points if json.loads(p.text) == key)
    with_it, without = (here.at(request, key, lengths, own=own) for own in (True, False))
    assert with_it is not None
    assert without is not None
    assert with_it.times != without.times


@pytest.mark.parametrize(
    "data",
    [
        [],
        {"x": 1},
        {"x": {"matmul": 1, "read": 1}},
        {"x": {"matmul": 0, "read": 1, "units": 1}},
        {"x": {"matmul": True, "read": 1, "units": 1}},
    ],
)
def test_rates_that_are_none_are_refused(data):
    with pytest.raises(ConfigError, match=r"^a file: the rates of .*; give for each device its matmul, read, units"):
        rates_of(data, "a file")


def test_the_seeds_rules_can_be_asked_for(monkeypatch):
    asked = with_lengths(ENCODER, 32, 512, 512)
    monkeypatch.setenv("POLYATTN_RULES", "seed")
    try:
        polyattn.configure()
        assert chosen(asked).source == "platform rule"
        assert chosen(ENCODER).source == "platform rule"
        assert chosen(asked, H200).source == "tuned", "what was measured counts all the same"
        monkeypatch.setenv("POLYATTN_RULES", "fast")
        with pytest.raises(ConfigError, match=r"rules='fast' \(environment POLYATTN_RULES\) is not 'model' or 'seed'"):
            polyattn.configure()
    finally:
        monkeypatch.delenv("POLYATTN_RULES")
        polyattn.configure()
