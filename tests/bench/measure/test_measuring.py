"""Inputs, the check before the clock, and the clock."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import re
import types

import pytest
import torch

from polyattn.bench.measure import Anchors, Clock, Workload, candidates, check, checking, examine, make_inputs, measure
from polyattn.bench.measure.clock import _ISSUE_CYCLES, _ISSUE_MOST, Time, _until_issued, interleaved
from polyattn.bench.measure.device_rates import UNITS
from polyattn.bench.measure.inputs import _sets
from polyattn.bench.measure.running import estimated, without_folders
from polyattn.contract import AttentionRequest
from polyattn.errors import ConfigError, InvalidInputError, UnsupportedRequestError
from polyattn.selection.select import Selection
from polyattn.testing.tolerances import RELATIVE_L2

CPU = torch.device("cpu")
SERVING = {"family": "paged", "layout": "THD", "dtype": "bfloat16", "page_size": 16, "kv_layout": "NHD"}
SERVING |= {"save_kv_cache": False}
DECODE = {**SERVING, "phase": "decode", "s_relation": "one"}
EXTEND = {**SERVING, "phase": "extend", "s_relation": "fewer", "causal": "bottom_right"}
LATENT = {"family": "mla", "head_dim": 576, "v_head_dim": 512, "heads": 4, "kv_heads": 1, "scale": 192**-0.5}
QKV = ("query", "key", "value")
RAGGED = ((9, 70), (5, 5), (3, 33))

WORKLOADS = {
    "dense": ({"causal": "bottom_right"}, ((70, 70),) * 2),
    "dense BHSD, window, lse": (
        {"causal": "bottom_right", "window": (17, -1), "layout": "BHSD", "lse": True, "s_relation": "fewer"},
        ((40, 90),) * 2,
    ),
    "top left": ({"causal": "top_left", "s_relation": "fewer"}, ((40, 90),)),
    "bool mask": ({"mask": "bool", "s_relation": "fewer"}, ((40, 90),) * 2),
    "additive mask": ({"mask": "additive", "causal": "bottom_right"}, ((70, 70),) * 2),
    "sinks and softcap": ({"sinks": True, "softcap": 30.0, "dtype": "bfloat16"}, ((70, 70),)),
    "misaligned": ({"misaligned": True}, ((33, 33),)),
    "training": ({"causal": "bottom_right", "grad": QKV}, ((70, 70),) * 2),
    "training through the lse": ({"grad": (*QKV, "lse"), "lse": True}, ((70, 70),)),
    "training, long": ({"causal": "bottom_right", "grad": QKV, "heads": 2, "kv_heads": 1}, ((600, 600),)),
    "varlen": ({"family": "varlen", "layout": "THD", "causal": "bottom_right"}, ((70, 70), (7, 7), (33, 33))),
    "varlen, other keys": ({"family": "varlen", "layout": "THD", "s_relation": "more"}, RAGGED),
    "decode": (DECODE, ((1, 100), (1, 7), (1, 33))),
    "decode, shared prefix": ({**DECODE, "s_relation": "more", "kv_parts": 1}, ((1, 100), (1, 7))),
    "extend, fp8": ({**EXTEND, "kv_dtype": "fp8_e4m3", "kv_scales": "tensor"}, RAGGED),
    "extend, fp8 by head": ({**EXTEND, "kv_dtype": "fp8_e4m3", "kv_scales": "head"}, RAGGED),
    "extend, fp8 by token": ({**EXTEND, "kv_dtype": "fp8_e4m3", "kv_scales": "token", "kv_layout": "HND"}, RAGGED),
    "extend, fp4": ({**EXTEND, "kv_dtype": "fp4_e2m1", "kv_scales": "block16"}, RAGGED),
    "extend and write": ({**EXTEND, "save_kv_cache": True}, RAGGED),
    "verify a tree": (
        {**EXTEND, "phase": "verify", "causal": "none", "tree": True, "mask": "bool"},
        ((8, 70), (8, 33)),
    ),
    "latent": ({**DECODE, **LATENT, "kv_layout": "", "save_kv_cache": None, "page_size": 64}, ((1, 100), (1, 7))),
}


def workload(name: str) -> Workload:
    fields, lengths = WORKLOADS[name]
    given = {"dtype": "float32", "head_dim": 64, "heads": 4, "kv_heads": 2, "platform": "cpu", **fields}
    return Workload(AttentionRequest(**given), lengths, shared=48 if fields.get("kv_parts") else 0)


@pytest.mark.slow(keep=13)
@pytest.mark.parametrize("name", WORKLOADS)
def test_every_candidate_is_right(name):
    asked = workload(name)
    inputs = make_inputs(asked, CPU)
    assert inputs.count == 2
    able = candidates(asked, CPU)
    assert [c.chosen for c in able] == [True] + [False] * (len(able) - 1)
    for candidate in able:
        found = examine(inputs, candidate)
        assert (found.kind, found.reason) == ("", ""), candidate.name
        assert found.margin <= 1
        call = candidate.prepare(inputs)
        for number in range(inputs.count):
            verdict = check(inputs.only(number), call(number), whole=True)
            assert verdict.ok, (candidate.name, number, verdict.reason)


def test_candidates_are_what_selection_says():
    asked = workload("varlen")
    able = {c.name: c.selection for c in candidates(asked, CPU)}
    assert set(able) == {"torch_native", "torch_sdpa", "reference"}
    assert able["torch_sdpa"].lowerings == ("pack_sequences",) or "pad_sequences" in able["torch_sdpa"].lowerings
    assert "flex_attention" in {c.name for c in candidates(asked, CPU, by_name=True)}
    assert all(isinstance(selection, Selection) for selection in able.values())


@pytest.mark.parametrize("name", ["dense BHSD, window, lse", "sinks and softcap", "varlen", "extend, fp8", "latent"])
@pytest.mark.parametrize("wrong", ["zeros", "scale", "shift", "nan in the middle", "dtype"])
def test_a_wrong_result_is_found(name, wrong):
    asked = workload(name)
    inputs = make_inputs(asked, CPU, sets=1)
    result = candidates(asked, CPU)[0].prepare(inputs)(0)
    out = result[0] if isinstance(result, tuple) else result
    assert check(inputs, result).ok
    with torch.no_grad():
        made = {
            "zeros": torch.zeros_like(out),
            "scale": out * 1.02,
            "shift": out.roll(1, -1),
            "nan in the middle": out.clone(memory_format=torch.contiguous_format),
            "dtype": out.double(),
        }[wrong]
        if wrong.startswith("nan"):
            made.view(-1)[made.numel() // 3] = math.nan
    found = check(inputs, (made, result[1]) if isinstance(result, tuple) else made)
    assert not found.ok
    assert found.margin > 1
    assert found.reason.startswith("out: ")


def test_a_strict_end_is_looked_at_before_everybody():
    left = iter([False, False, True])
    found = interleaved({name: lambda: Time(1.0, 0.0, 1) for name in "abc"}, 3, lambda: next(left, True), strict=True)
    assert {name: took.rounds for name, took in found.items()} == {"a": 1, "b": 1}

    asked = workload("dense")
    able = candidates(asked, CPU)
    left = iter([False, False, True, False])
    found = measure(
        make_inputs(asked, CPU), able, clock=Clock(CPU, 0.001), rounds=1, late=lambda: next(left, True), strict=True
    )
    assert [found[one.name].kind for one in able] == ["", "late", "late"]
    assert found[able[1].name].reason == "the time was up before it was timed"
    assert found[able[0].name].time is not None


class Sleeps:
    """Its calls take so long for each query and key."""

    name = "sleeps"

    def __init__(self, seconds, host):
        self.seconds, self.host, self.lengths = seconds, host, []

    def prepare(self, inputs):
        def call(number):
            self.lengths.append(inputs.workload.longest[1])
            self.host.now += self.seconds * math.prod(inputs.workload.longest)

        return call


def test_a_long_call_is_estimated_by_shorter_ones(monkeypatch, host):
    monkeypatch.setattr("polyattn.bench.measure.running.time", host)
    request = AttentionRequest(dtype="float32", head_dim=16, heads=1, kv_heads=1)
    long, clock = Workload(request, ((4096, 4096),)), Clock(CPU)
    quick = Sleeps(1 / 4096**2, host)
    assert estimated(long, quick, clock, 20.0) == pytest.approx(1.0)
    assert quick.lengths == [64, 64, 512, 512]
    slow = Sleeps(200 / 4096**2, host)
    assert estimated(long, slow, clock, 20.0) == pytest.approx(200.0)
    assert slow.lengths == [64, 64], "longer ones take too long for an estimate"
    assert estimated(Workload(request, ((100, 100),)), slow, clock, 20.0) == 0.0
    fewer = AttentionRequest(dtype="float32", head_dim=16, heads=1, kv_heads=1, s_relation="fewer")
    assert estimated(Workload(fewer, ((4096, 4097),)), slow, clock, 20.0) == 0.0, "64, 64 is no such request"
    assert estimated(long, object(), clock, 20.0) == 0.0, "it is said where it is checked"


def test_a_wrong_lse_and_a_missing_one_are_found():
    asked = workload("dense BHSD, window, lse")
    inputs = make_inputs(asked, CPU, sets=1)
    out, lse = candidates(asked, CPU)[0].prepare(inputs)(0)
    assert check(inputs, (out, lse * 1.4426950408889634)).reason.startswith("lse: ")
    assert check(inputs, out).reason == "lse: it is not there"


@pytest.mark.parametrize("place, name", list(enumerate(QKV)))
def test_a_wrong_gradient_is_found(place, name):
    asked = workload("training")
    inputs = make_inputs(asked, CPU, sets=1)
    grads = list(candidates(asked, CPU)[0].prepare(inputs)(0))
    assert check(inputs, grads).ok
    grads[place] = grads[place] * 1.02
    assert check(inputs, grads).reason.startswith(f"grad {name}: ")
    grads[place] = torch.full_like(grads[place], math.inf)
    assert check(inputs, grads).reason == f"grad {name}: it has values that are not finite"


def test_a_dropped_block_of_keys_is_found():
    """64 keys of 4096, in one head of one sequence: what no look at the whole tensor would notice."""
    asked = Workload(AttentionRequest(dtype="bfloat16", head_dim=64, heads=2, kv_heads=2), ((64, 64),))
    asked = dataclasses.replace(
        asked, request=dataclasses.replace(asked.request, s_relation="fewer"), lengths=((64, 4096),)
    )
    inputs = make_inputs(asked, CPU, sets=1)
    q, k, v = (inputs.tensors[0][name].transpose(1, 2) for name in QKV)
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    assert check(inputs, whole).ok
    part = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :-64], v[:, :, :-64]).transpose(1, 2)
    assert not check(inputs, part).ok


@pytest.mark.parametrize("name", ["dense BHSD, window, lse", "top left", "varlen", "extend, fp8", "latent"])
def test_what_is_wrong_where_no_kernel_differs_is_found_in_the_whole(name):
    asked = workload(name)
    asked = (
        dataclasses.replace(asked, request=dataclasses.replace(asked.request, heads=6, kv_heads=3))
        if (asked.request.family != "mla")
        else dataclasses.replace(asked, lengths=((1, 40),) * 3)
    )
    inputs = make_inputs(asked, CPU, sets=1)
    result = candidates(asked, CPU)[0].prepare(inputs)(0)
    out, *more = result if isinstance(result, tuple) else (result,)
    axis = {"BSHD": 2, "BHSD": 1}.get(asked.request.layout, 1) if asked.request.family != "mla" else 0
    wrong = out.clone()
    wrong.narrow(axis, wrong.shape[axis] // 3, wrong.shape[axis] // 3).zero_()
    given = (wrong, *more) if more else wrong
    assert check(inputs, given).ok, "in no place that is looked at"
    assert check(inputs, result, whole=True).ok
    found = check(inputs, given, whole=True)
    assert re.fullmatch(
        r"out: largest error \S+, FlashAttention's rule allows \S+ \(.*\), at sequence \d, head \d, queries from 0",
        found.reason,
    )
    assert found.margin > 1


def test_where_plain_torch_is_off_the_whole_is_held_to_float64():
    """Single queries with large logits: plain torch rounds those, in bfloat16 to several percent of the result."""
    request = AttentionRequest(dtype="bfloat16", head_dim=64, heads=8, kv_heads=2, s_relation="one")
    inputs = make_inputs(Workload(request, ((1, 512),) * 9), CPU, sets=1)
    inputs.tensors[0]["query"] *= 12
    q, k, v = (inputs.tensors[0][name].transpose(1, 2) for name in QKV)
    exact = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), enable_gqa=True)
    right = exact.bfloat16().transpose(1, 2)
    plain = torch.stack(list(checking._plain_whole(inputs)))
    off = (plain.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    inner = off[1:-1, 1:-1, 0]
    assert inner.max() > checking._NEAR * RELATIVE_L2[torch.bfloat16] + 0.02, "where samples do not look either"
    assert check(inputs, right, whole=True).ok
    n, head = divmod(int(inner.argmax()), 6)
    wrong = right.clone()
    wrong[n + 1, 0, head + 1] *= 1.02
    assert check(inputs, wrong).ok
    found = check(inputs, wrong, whole=True)
    assert found.reason.endswith(f", at sequence {n + 1}, head {head + 1}, queries from 0")
    assert found.margin > 1


def test_where_plain_torch_overflows_the_whole_is_held_to_float64():
    request = AttentionRequest(dtype="float16", head_dim=64, heads=6, kv_heads=6)
    inputs = make_inputs(Workload(request, ((40, 40),)), CPU, sets=1)
    inputs.tensors[0]["query"][:, :, 2] *= 1e4  # finite, and its logits are not, in float16
    q, k, v = (inputs.tensors[0][name].transpose(1, 2) for name in QKV)
    assert q.isfinite().all()
    exact = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in (q, k, v)))
    (plain,) = checking._plain_whole(inputs)
    assert plain[2].isnan().any()
    assert not plain[3].isnan().any()
    right = exact.half().transpose(1, 2)
    assert check(inputs, right, whole=True).ok
    for head in (2, 3):
        wrong = right.clone()
        wrong[:, :, head] = 0
        assert check(inputs, wrong).ok
        assert f", at sequence 0, head {head}, queries from 0" in check(inputs, wrong, whole=True).reason


class Fickle:
    """An entrant that is right of set 0, and at first."""

    name = "fickle"

    def __init__(self, right, until):
        self.right, self.until, self.calls = right, until, 0

    def prepare(self, inputs):
        inner = self.right.prepare(inputs)

        def call(number):
            self.calls += 1
            out = inner(number)
            return out if number < self.until[0] and self.calls < self.until[1] else torch.zeros_like(out)

        return call


@pytest.mark.parametrize("until", [(1, 10**9), (10**9, 3)], ids=["of one set", "at first"])
@pytest.mark.parametrize("recorded", [False, True])
def test_who_is_right_only_where_it_was_looked_at_has_no_time(until, recorded):
    asked = workload("top left")
    inputs = make_inputs(asked, CPU)
    right = candidates(asked, CPU)[0]
    # Where there are no graphs, recording calls every set before the check.
    entrants = [right, Fickle(right, (until[0], until[1] + recorded * inputs.count))]
    found = measure(inputs, entrants, clock=Clock(CPU, 0.001), rounds=1, recorded=recorded)
    assert found[right.name].time is not None
    assert (found["fickle"].kind, found["fickle"].time) == ("wrong", None)
    assert found["fickle"].reason.startswith("when it had been timed, of the last input set: out: ")


def test_who_fails_when_it_has_been_timed_has_no_time(monkeypatch):
    asked = workload("top left")
    inputs = make_inputs(asked, CPU)
    monkeypatch.setattr(type(inputs), "only", lambda self, number: [][number])
    (found,) = measure(inputs, candidates(asked, CPU)[:1], clock=Clock(CPU, 0.001), rounds=1).values()
    assert (found.kind, found.time, found.reason) == ("failed", None, "IndexError: list index out of range")


def test_sets_are_as_many_as_what_is_read_of_them_takes(monkeypatch):
    """Of a cache behind a window that is little: as many sets as for the whole would stay in the device's cache."""
    monkeypatch.setattr("polyattn.bench.measure.inputs.cache_bytes", lambda device: 2**20)
    whole = Workload(AttentionRequest(**DECODE, head_dim=64, heads=4, kv_heads=2), ((1, 4096),) * 2)
    behind = dataclasses.replace(whole, request=dataclasses.replace(whole.request, window=(255, 0)))
    assert (_sets(whole, CPU), _sets(behind, CPU)) == (2, -(-3 * 2**20 // (2 * 256 * 2 * 128 * 2 + 2 * 4 * 64 * 2)))


def test_who_writes_to_an_input_is_found_and_harms_nobody_else(odd):
    odd("scribbles", "quick")
    asked = Workload(AttentionRequest(dtype="float32", head_dim=24, heads=2, kv_heads=2), ((50, 50),))
    found = measure(make_inputs(asked, CPU), candidates(asked, CPU), clock=Clock(CPU, 0.002), rounds=1)
    assert (found["scribbles"].kind, found["scribbles"].time) == ("wrong", None)
    assert found["scribbles"].reason == "it writes to key, which are not its to write"
    assert {name for name, said in found.items() if said.time} == {"torch_sdpa", "torch_native", "reference", "quick"}


@pytest.mark.parametrize("name", ["dense", "training", "extend, fp8 by head", "latent"])
def test_what_somebody_wrote_to_is_as_it_was_where_it_was(name):
    """Whoever was prepared before is checked once more, with the same tensors."""
    inputs = make_inputs(workload(name), CPU, 1)
    tensors = [*inputs.tensors[0].values(), *inputs.dout, *inputs.extra.values()]
    tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
    before = [t.clone() for t in tensors]
    for tensor in tensors:
        tensor.zero_()
    inputs.renew()
    for tensor, was in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor.float(), was.float(), rtol=0, atol=0)


@pytest.mark.parametrize("recorded", [False, True])
def test_who_was_right_before_an_input_was_written_to_is_right_afterwards(odd, recorded):
    odd("scribbles")
    asked = Workload(AttentionRequest(dtype="float32", head_dim=24, heads=2, kv_heads=2), ((50, 50),))
    fit = sorted(candidates(asked, CPU), key=lambda one: one.name == "scribbles")
    found = measure(make_inputs(asked, CPU, 1), fit, clock=Clock(CPU, 0.002), rounds=1, recorded=recorded)
    assert {name: said.kind for name, said in found.items() if said.kind} == {"scribbles": "wrong"}


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (
            "Error in 'operator()' at /somewhere/else/.cache/made/batch_decode.cu:63: no",
            "Error in 'operator()' at batch_decode.cu:63: no",
        ),
        ("TFLOP/s and/or https://example.org/a/b", "TFLOP/s and/or https://example.org/a/b"),
        ("'/a/b/c.py' is not here", "'c.py' is not here"),
    ],
)
def test_reasons_name_files_and_not_where_they_lie(said, kept):
    assert without_folders(said) == kept


@pytest.mark.parametrize(
    "fields, lengths, message",
    [
        ({"dropout": 0.1}, ((5, 5),), "dropout is random"),
        ({"family": "linear", "method": "gdn"}, ((5, 5),), "family=linear is not measured"),
        ({**DECODE, "cross": True, "s_relation": "more"}, ((5, 3),), "cross=True is not measured"),
        ({**EXTEND, "mask": "bool"}, ((5, 9),), "a mask over a cache is not measured"),
        ({**DECODE, "s_relation": "more", "kv_parts": 3}, ((1, 9),), "only one prefix that all share is measured"),
    ],
)
def test_what_cannot_be_measured_says_so(fields, lengths, message):
    asked = Workload(AttentionRequest(**{"dtype": "float32", **fields}), lengths)
    with pytest.raises(UnsupportedRequestError, match=message):
        make_inputs(asked, CPU)


@pytest.mark.parametrize(
    "fields, lengths, shared, message",
    [
        ({}, (), 0, r"lengths=\[\]: one sequence or more"),
        ({}, ((0, 5),), 0, "with S_q and S_k above 0"),
        ({}, ((5, 5), (6, 6)), 0, "the sequences of family dense have one length"),
        ({}, ((5, 9),), 0, r"S_q, S_k = \(5, 9\) are fewer, the request says equal"),
        (EXTEND, ((5, 3),), 0, "S_k is S_q or more"),
        (DECODE, ((1, 9), (7, 9)), 0, "one query per sequence, and here S_q is 7: more are phase extend or verify"),
        (DECODE, ((1, 3),), 7, "shared=7 with kv_parts=0"),
        (
            {"heads": 4, "kv_heads": 3},
            ((5, 5),),
            0,
            "heads=4 is no multiple of kv_heads=3: every key head serves as many",
        ),
        ({}, ((10**19, 10**19),), 0, "a length of 10,000,000,000,000,000,000: no tensor has more than 9,223,372,036"),
    ],
)
def test_lengths_that_a_request_cannot_have(fields, lengths, shared, message):
    with pytest.raises(InvalidInputError, match=message):
        Workload(AttentionRequest(**fields), lengths, shared)


def test_a_workload_is_the_same_after_json():
    for name in WORKLOADS:
        asked = workload(name)
        again = Workload.of(json.loads(json.dumps(asked.plain())), "here")
        assert again == asked
        assert again.key() == asked.key()


@pytest.mark.parametrize(
    "data, message",
    [
        ([], "a workload has a request and lengths"),
        ({"request": {}, "lengths": [[1]]}, r"lengths is a list of \[S_q, S_k\]"),
        ({"request": {}, "lengths": [[1, True]]}, r"lengths is a list of \[S_q, S_k\]"),
        ({"request": {"head_dims": 4}, "lengths": [[1, 1]]}, r"no field 'head_dims'. Did you mean 'head_dim'"),
        ({"request": {"head_dim": "64"}, "lengths": [[1, 1]]}, "head_dim='64'; allowed: a whole number from 1 on"),
        ({"request": {"sinks": 1}, "lengths": [[1, 1]]}, "sinks=1; allowed: like False"),
        ({"request": {"family": "denser"}, "lengths": [[1, 1]]}, "family='denser'; allowed: dense, varlen"),
        ({"request": 5, "lengths": [[1, 1]]}, "a request is an object of fields; got 5"),
        ({"request": {}, "lengths": [[1, 5]]}, "are one, the request says equal"),
    ],
)
def test_what_is_no_workload(data, message):
    with pytest.raises(ConfigError, match=rf"here: .*{message}"):
        Workload.of(data, "here")


def test_inputs_leave_the_cache_of_a_gpu(monkeypatch):
    asked = workload("dense")
    nbytes = 4 * 2 * 70 * 64 * (4 + 2 + 2)
    monkeypatch.setattr("polyattn.bench.measure.inputs.cache_bytes", lambda device: 5 * nbytes)
    assert _sets(asked, CPU) == 15
    monkeypatch.setattr("polyattn.bench.measure.inputs.cache_bytes", lambda device: 500 * nbytes)
    assert _sets(asked, CPU) == 32
    first, second = make_inputs(asked, CPU, sets=2).tensors
    assert not torch.equal(first["query"], second["query"])
    assert torch.equal(first["query"], make_inputs(asked, CPU, sets=1).tensors[0]["query"]), "always the same ones"


GROWING = {"s_relation": "one", "dtype": "float32", "heads": 4, "kv_heads": 2}


class Host:
    """The time module of a host where nothing takes time but what says so."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    perf_counter = monotonic


@pytest.fixture
def host(monkeypatch):
    made = Host()
    monkeypatch.setattr("polyattn.bench.measure.clock.time", made)
    return made


class Entrant:
    """Right, by torch, and it notes how many keys it was asked for: 30 us a call. delay: more seconds at lengths that
    were not met yet, of whomever they were."""

    def __init__(self, name, host, met=None, delay=0.0):
        self.name, self.host, self.met, self.delay, self.asked = name, host, set() if met is None else met, delay, []

    def prepare(self, inputs):
        axis = 1 if inputs.workload.request.layout == "BSHD" else 2

        def call(number):
            given = inputs.tensors[number]
            self.asked.append(given["key"].shape[axis])
            if self.asked[-1] not in self.met:
                self.met.add(self.asked[-1])
                self.host.now += self.delay
            self.host.now += 3e-5
            q, k, v = (given[name] if axis == 2 else given[name].transpose(1, 2) for name in QKV)
            mask = given.get("attn_mask")
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
            return out if axis == 2 else out.transpose(1, 2)

        return call


@pytest.mark.parametrize("fields", [{}, {"layout": "BHSD", "mask": "bool"}])
def test_what_a_new_length_costs_the_host_is_measured(host, fields):
    """Plans by length, that two libraries share: each pays at every new length, and not once for all."""
    inputs = make_inputs(Workload(AttentionRequest(**GROWING, **fields), ((1, 300),)), CPU)
    plans: set[int] = set()
    both = [Entrant("plans", host, plans, 0.07), Entrant("plans too", host, plans, 0.07), Entrant("plain", host)]
    found = measure(inputs, both, clock=Clock(CPU, 0.002), rounds=1, issued=True)
    for name, took in (("plans", 0.07003), ("plans too", 0.07003), ("plain", 3e-5)):
        assert found[name].time.seconds == pytest.approx(3e-5)
        assert found[name].host.seconds == pytest.approx(took)
    assert found["plain"].host.count == 27
    lengths = [{s_k for s_k in one.asked if s_k != 300} for one in both]
    assert [len(one) for one in lengths][2] >= 27 > min(map(len, lengths)) >= 9, "who is far slower is not asked again"
    assert not lengths[0] & lengths[1] | lengths[1] & lengths[2]
    assert all(151 <= s_k < 300 for one in lengths for s_k in one)


@pytest.mark.parametrize(("layout", "misaligned"), [("BSHD", False), ("BHSD", True)])
def test_few_keys_grow_within_what_there_are(layout, misaligned):
    request = AttentionRequest(**GROWING, layout=layout, misaligned=misaligned, mask="bool", head_dim=8, v_head_dim=4)
    inputs = make_inputs(Workload(request, ((1, 5),) * 2), CPU)
    sets, axis = inputs.growing(3, 4).tensors, 1 if layout == "BSHD" else 2
    assert [one["key"].shape[axis] for one in sets] == [one["value"].shape[axis] for one in sets] == [4, 5, 4, 5]
    assert [one["attn_mask"].shape for one in sets] == [(2, 1, 1, 4), (2, 1, 1, 5)] * 2
    for name, tensor in sets[0].items():
        assert tensor.data_ptr() == inputs.tensors[1][name].data_ptr(), "a view"
        assert tensor.is_contiguous(), "as the keys of a cache that grows by concatenation"


def test_the_host_of_a_call_that_is_waited_for_is_in_its_time(monkeypatch, host):
    inputs = make_inputs(Workload(AttentionRequest(**{**GROWING, "s_relation": "equal"}), ((9, 9),)), CPU)
    clock = Clock(CPU, 0.002)
    entrants = [Entrant("plain", host)]
    assert measure(inputs, entrants, clock=clock, rounds=1, issued=True)["plain"].host is None
    queue = Clock(CPU, 0.002)
    queue.on_gpu = True
    monkeypatch.setattr(queue, "calls", clock.calls)  # a device that has a queue, and no events here
    monkeypatch.setattr(queue, "synchronise", lambda: None)
    found = measure(inputs, entrants, clock=queue, rounds=1, issued=True)["plain"]
    assert found.host.seconds == pytest.approx(3e-5)
    assert measure(inputs, entrants, clock=queue, rounds=1)["plain"].host is None, "nobody asked"
    monkeypatch.setattr(queue, "calls", lambda calls: Time(0.02, 0.0, 9))
    found = measure(inputs, entrants, clock=queue, rounds=1, issued=True)["plain"]
    assert found.host is None, "it says nothing beside that"


@pytest.mark.parametrize("at", [300, 290, 280])
@pytest.mark.parametrize(
    ("error", "kind"), [(RuntimeError("no plan"), "failed"), (UnsupportedRequestError("no"), "refused")]
)
def test_who_fails_at_another_length_has_no_time(host, error, kind, at):
    """At once, in the first round, or in a later one."""

    class Fails(Entrant):
        def prepare(self, inputs):
            run = super().prepare(inputs)

            def call(number):
                if inputs.count > 2 and inputs.tensors[number]["key"].shape[1] == at:
                    raise error
                return run(number)

            return call

    inputs = make_inputs(Workload(AttentionRequest(**GROWING), ((1, 300),)), CPU)
    assert inputs.count == 2
    found = measure(
        inputs, [Fails("fails", host), Entrant("plain", host)], clock=Clock(CPU, 0.002), rounds=1, issued=True
    )
    assert (found["fails"].kind, found["fails"].time, found["fails"].host) == (kind, None, None)
    assert found["plain"].host.count == 27


def test_rounds_meet_everybody_alike():
    order = []

    def timing(name, seconds):
        def take():
            order.append(name)
            return Time(seconds.pop(0), 0.0, 1)

        return take

    drifting = {"a": timing("a", [1.0, 3.0, 2.0]), "b": timing("b", [1.1, 2.9, 9.0]), "slow": timing("slow", [5.0])}
    found = interleaved(drifting, 3)
    assert order[:3] == ["a", "b", "slow"]
    assert [set(order[3:5]), set(order[5:])] == [{"a", "b"}] * 2
    assert {name: time.seconds for name, time in found.items()} == {"a": 2.0, "b": 2.9, "slow": 5.0}
    assert found["a"].count == 3
    order.clear()
    interleaved({"a": timing("a", [1.0])}, 3, late=lambda: True)
    assert order == ["a"]


def test_who_ran_before_is_not_in_the_times():
    """A device governed by its power: who comes after an entry that takes little of it is 10% faster."""
    last = ["hot"]

    def timing(name):
        def take():
            faster, last[0] = last[0] == "cool", name
            return Time(0.9 if faster else 1.0, 0.0, 1)

        return take

    found = interleaved({name: timing(name) for name in ("a", "cool", "b", "c", "d")})
    assert all(time.seconds == pytest.approx(1.0, rel=0.02) for time in found.values())


def test_everybody_comes_after_everybody():
    order = []

    def timing(name):
        return lambda: (order.append(name), Time(1.0, 0.0, 1))[1]

    interleaved({name: timing(name) for name in range(8)}, 9)
    rounds = [tuple(order[start : start + 8]) for start in range(0, len(order), 8)]
    assert len(set(rounds)) == 9
    followed = collections.Counter(itertools.pairwise(order))
    assert max(followed.values()) <= 2, "of nine rounds, with seven others"


def test_one_kernel_under_two_names_takes_as_long():
    """Half the rounds at one speed of the device, half at another: the median would be the one or the other."""
    slow = {"a": {1, 3, 5, 7}, "b": {0, 2, 4, 6, 8}}

    def timing(name):
        number = itertools.count()
        return lambda: Time(1.08 if next(number) in slow[name] else 1.0, 0.0, 1)

    found = interleaved({name: timing(name) for name in slow})
    assert found["a"].seconds == pytest.approx(found["b"].seconds, rel=0.02)
    assert 1.02 < found["a"].seconds < 1.06


def test_an_interruption_is_not_in_the_times():
    number = itertools.count()
    assert interleaved({"a": lambda: Time(9.0 if next(number) in (2, 5) else 1.0, 0.0, 1)})["a"].seconds == 1.0
    assert Time.over([Time(1.0, 0.0, 1)] * 8 + [Time(math.inf, 0.0, 0)]).seconds == 1.0
    assert Time.over([Time(math.inf, 0.0, 0)] * 9).seconds == math.inf


def test_no_round_is_begun_after_a_while(monkeypatch):
    now = iter((0.0, 5.0, 11.0, 13.0))
    monkeypatch.setattr("polyattn.bench.measure.clock.time.monotonic", lambda: next(now))
    assert interleaved({"a": lambda: Time(1.0, 0.0, 1)})["a"].rounds == 5
    # One round is no comparison: everybody ran once, in one order.
    now = iter((0.0, 100.0))
    took = interleaved({"a": lambda: Time(1.0, 0.0, 1)})["a"]
    assert (took.rounds, took.count) == (3, 3)


def test_how_far_the_rounds_of_one_are_apart():
    found = iter((1.0, 1.1, 1.2))
    took = interleaved({"a": lambda: Time(next(found), 0.0, 1)}, 3)["a"]
    assert (took.seconds, took.rounds) == (1.1, 3)
    assert took.between == pytest.approx(0.2 / 1.1)
    assert interleaved({"a": lambda: Time(1.0, 0.0, 1)}, 1)["a"].between is None


def test_who_is_near_the_fastest_is_timed_until_the_rounds_agree():
    def timing(*seconds):
        given = itertools.cycle(seconds)
        return lambda: Time(next(given), 0.0, 1)

    noisy = {"a": timing(1.0, 1.2, 1.0), "b": timing(1.05), "slow": timing(2.0), "far": timing(9.0)}
    counts = {name: took.count for name, took in interleaved(noisy, 4, settle=True).items()}
    assert counts == {"a": 12, "b": 12, "slow": 4, "far": 1}
    counts = {name: took.count for name, took in interleaved(noisy, 4).items()}
    assert counts == {"a": 4, "b": 4, "slow": 4, "far": 1}
    calm = {"a": timing(1.0, 1.01), "b": timing(1.05), "slow": timing(2.0, 3.0)}
    assert {took.count for took in interleaved(calm, 4, settle=True).values()} == {4}
    alone = {"a": timing(1.0, 2.0, 3.0), "b": timing(3.0)}
    assert {took.count for took in interleaved(alone, 4, settle=True).values()} == {4}, "nothing is near it"


def test_a_slow_call_is_not_repeated_for_long():
    calls = []
    Clock(CPU, 0.0).calls([lambda: calls.append(1)])
    assert len(calls) == 3
    calls.clear()
    assert Clock(CPU, 0.05).calls([lambda: calls.append(1)]).count == 200


@pytest.mark.parametrize(("seconds", "runs", "count"), [(0.002, 9, 5), (0.05, 4, 3), (0.2, 2, 2)])
@pytest.mark.parametrize("recorded", [False, True])
def test_how_often_a_gpu_calls(monkeypatch, recorded, seconds, runs, count):
    """The longer a call, the fewer; what tells how long it takes is one of those of a long one, both of the longest."""
    now, calls = 0.0, []

    class Event:
        def __init__(self, enable_timing):
            self.at = None

        def record(self):
            self.at = now

        def elapsed_time(self, end):
            return (end.at - self.at) * 1e3

    def call():
        nonlocal now
        now += seconds
        calls.append(now)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    clock = Clock(CPU, 0.01)
    clock.on_gpu = True
    monkeypatch.setattr(clock, "synchronise", lambda: None)
    took = clock._replays(types.SimpleNamespace(replay=call), 1) if recorded else clock.calls([call])
    assert (len(calls), took.count) == (runs, count)
    assert took.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("count", "host", "cycles"),
    [
        (40, 20e-6, 40 * _ISSUE_CYCLES),
        (5, 1e-3, 5 * 2_500_000),  # a forward with its backward: by the least its last calls would be the host's time
        (200, 1e-3, _ISSUE_MOST),
    ],
)
def test_a_gpu_waits_until_its_calls_are_issued(count, host, cycles):
    assert _until_issued(count, host, _ISSUE_CYCLES) == cycles


def test_the_device_has_rates():
    look = Anchors(Clock(CPU, 0.002))
    found = look()
    assert set(found) == set(UNITS)
    assert min(found.values()) > 0


def test_all_looks_are_at_the_same_memory(monkeypatch):
    look = Anchors(Clock(CPU, 0.002))
    monkeypatch.setattr(torch, "randn", None)
    monkeypatch.setattr(torch, "empty_like", None)
    assert set(look()) == set(look()) == set(UNITS)


def test_products_are_timed_once_the_device_is_warm_and_steady(monkeypatch):
    from polyattn.bench.measure import device_rates

    asked = []

    class Metered:
        """A clock of a device that takes other seconds at each look."""

        on_gpu, device = True, CPU

        def __init__(self, device=CPU, seconds=0.0):
            self.seconds = seconds

        def calls(self, calls):
            asked.append(self.seconds)
            return Time(next(found), 0.0, 5)

    monkeypatch.setattr(device_rates, "Clock", Metered)
    found = iter([0.5, 1.0, 1.03, 1.05, 1.06, 9.0])
    assert device_rates._settled(Metered(), lambda: None) == pytest.approx(1.055)
    assert asked == [device_rates._HEAT] + [device_rates._WINDOW] * 4, "what is cold does not count"
    found = iter(2.0**n for n in range(99))
    assert device_rates._settled(Metered(), lambda: None) == 2.0**device_rates._LOOKS, "it is taken as it is"


def test_the_reference_is_worked_out_once_for_all_who_are_checked(monkeypatch):
    asked = []
    real = checking._solve
    monkeypatch.setattr(checking, "_solve", lambda *args, **how: [asked.append(1), real(*args, **how)][1])
    inputs = make_inputs(workload("dense"), CPU, 1)
    (first, *others) = candidates(inputs.workload, CPU)
    assert others
    assert not examine(inputs, first).kind
    once = len(asked)
    assert all(not examine(inputs, each).kind for each in others)
    assert len(asked) == once > 0
    inputs.tensors[0]["query"].zero_()
    inputs.renew()
    assert not examine(inputs, first).kind
    assert len(asked) == once, "they are what they were"
