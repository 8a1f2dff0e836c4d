"""`polyattn explain`: one row per pinned command line, and what every flag becomes."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from typing import Any

import pytest
import torch

import polyattn
from polyattn import AttentionRequest, ConfigError
from polyattn.cli.explain import assumed, here
from polyattn.cli.questions import ask
from polyattn.cli.reasons import reasons_table
from polyattn.cli.video_map import METHODS
from polyattn.contract import DeviceReport
from polyattn.contract.vocabulary import DTYPE_WORDS
from polyattn.selection.config import KV_CACHE_DTYPES
from polyattn.serving import AttentionLayer
from polyattn.serving.attention.phases import layer_request

from .conftest import Run

HOPPER = "--assume-platform cuda:sm90 --assume-installed flash-attn-3,flashinfer"
BLACKWELL = "--assume-platform cuda:sm100 --assume-installed flash-attn-4,flashinfer"

ANSWERS = [
    # The command line of the project's brief.
    (f"{HOPPER} --phase decode --kv-dtype fp8_e4m3 --page-size 64 --mla", "fa3", ["dequantise_kv"], False),
    (f"{HOPPER} --phase decode --family paged", "fa3", [], False),
    (f"{HOPPER} --phase verify --spec-topk 4", "flashinfer", [], False),
    (f"{HOPPER} --phase decode --kv-dtype fp8_e4m3", "flashinfer", [], False),
    (f"{BLACKWELL} --phase decode", "trtllm_mha", [], False),
    (f"{BLACKWELL} --mla --phase decode --kv-dtype fp8_e4m3", "trtllm_mla", ["dequantise_kv"], False),
    ("--assume-platform rocm:gfx942 --assume-installed amd-aiter --phase decode", "aiter", [], False),
    ("--assume-platform npu --assume-installed torch-npu --phase decode --page-size 128", "ascend", [], False),
    ("--assume-platform xpu --assume-installed sgl-kernel-xpu --phase decode", "intel_xpu", [], False),
    ("--assume-platform mps --head-dim 64", "torch_sdpa", [], False),
    ("--assume-platform cuda:sm90 --causal", "torch_sdpa", [], False),
    (f"{HOPPER} --causal --window 4095,0 --sinks", "triton", [], False),
    (f"{HOPPER} --causal --window 63,0 --sinks", "fa", ["sinks_from_lse"], False),
    ("--assume-platform npu --assume-installed torch-npu --lse", "fa", [], False),
    ("--assume-platform cuda:sm90 --family linear", "triton", [], False),
    ("--head-dim 64 --causal --window 63,0", "torch_sdpa", [], False),
    ("--softcap 50 --causal", "reference", [], False),
    ("--family varlen --causal", "torch_native", [], False),
]


@pytest.mark.slow(keep=17)
@pytest.mark.parametrize(("words", "backend", "lowerings", "planned"), ANSWERS, ids=[a[0] for a in ANSWERS])
def test_answers(run: Run, words: str, backend: str, lowerings: list[str], planned: bool) -> None:
    shown = run("explain", *shlex.split(words), "--json")
    assert shown.code == 0, shown.out
    data = shown.data
    assert (data["backend"], data["lowerings"], data["planned"]) == (backend, lowerings, planned)
    assert data["source"] in ("platform rule", "priority")
    assert all(reasons for reasons in data["rejected"].values())
    assert backend not in data["rejected"]


def test_json_has_the_pinned_keys(run: Run) -> None:
    data = run("explain", "--json").data
    assert {"backend", "lowerings", "source", "rejected", "planned", "notes"} <= set(data)


def test_text_says_who_why_and_who_not(run: Run) -> None:
    shown = " ".join(run("explain", *shlex.split(ANSWERS[0][0])).out.split())
    for part in ("fa3 on cuda", "emulator", "dequantise_kv", "platform rule", "MLA on Hopper", "trtllm_mla"):
        assert part in shown
    assert "arch='sm90' is not one of sm100, sm103" in shown


def test_nobody_is_told_to_install_what_would_not_serve(run: Run) -> None:
    """What a package lacks for this request stands in the place of how to get it."""
    words = ["--assume-platform", "cuda:sm90", "--assume-installed", "flash-attn-3", "--phase", "decode"]
    rejected = run("explain", *words, "--family", "paged", "--json").data["rejected"]
    assert all(" is not installed" not in reason for name in ("fa", "fa2", "fa4", "flashmla", "cutlass_mla")
               for reason in rejected[name])  # fmt: skip
    assert rejected["fa2"] == ["page_size=64 is not >= 256, a multiple of 256"]
    hints = [reason for reason in rejected["flashinfer"] if "is not installed; pip install" in reason]
    assert len(hints) == 1, "this one would serve"


def test_verbose_has_every_reason(run: Run) -> None:
    words = [*shlex.split(HOPPER), "--phase", "decode"]
    brief, full = run("explain", *words).out, run("explain", *words, "--verbose").out
    assert "it serves other families" in brief
    assert "it serves other families" not in full
    assert len(full) > len(brief)


def test_a_name_that_is_asked_for(run: Run) -> None:
    data = run("explain", "--attention-backend", "flex_attention", "--json").data
    assert (data["backend"], data["source"]) == ("flex_attention", "argument")
    data = run("explain", *shlex.split(HOPPER), "--phase", "decode", "--attention-backend", "flashinfer", "--json").data
    assert (data["backend"], data["source"]) == ("flashinfer", "argument")


def test_a_documented_fallback_and_strict(run: Run) -> None:
    words = ["explain", "--assume-platform", "cuda:sm90", "--attention-backend", "fa"]
    data = run(*words, "--json").data
    assert (data["backend"], data["source"]) == ("torch_sdpa", "fallback from fa")
    assert "replaced by torch_sdpa" in data["notes"][0]
    strict = run(*words, "--strict", "--json")
    assert strict.code == 3
    assert "is not taken in strict mode" in strict.data["error"]["message"]


def test_a_fallback_names_what_was_asked_for_and_advises_nothing_in_vain(run: Run) -> None:
    """No library of FlashAttention 3 serves an A100, so none is to be installed."""
    words = ["explain", "--assume-platform", "cuda:sm80", "--attention-backend", "fa3"]
    (note, *_) = run(*words, "--json").data["notes"]
    assert note.startswith("fa3 was asked for by argument and replaced by torch_sdpa")
    error = run(*words, "--strict", "--json").data["error"]["message"]
    assert error.startswith("fa3, asked for by argument, cannot serve dense prefill, cuda:sm80")
    for said in (note, error):
        assert "fa3/vllm: arch='sm80' is not sm90" in said
        assert "install" not in said.replace("FlashAttention is not installed or the call is outside its limits", "")


def test_a_call_of_its_own_advises_nothing_in_vain() -> None:
    """Selection for a call asks one backend; its message is that of `explain`."""
    from polyattn.contract import AttentionRequest
    from polyattn.selection.inspection import catalogue
    from polyattn.selection.select import Choice, Policy, select

    request = AttentionRequest(platform="cuda", arch="sm80")
    chosen = select(request, catalogue({"torch": ""}), Policy(Choice("fa3", "argument")))
    assert chosen.backend == "torch_sdpa"
    assert "arch='sm80' is not sm90" in chosen.notes[0]
    assert "pip install" not in chosen.notes[0]


def test_strict_from_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyattn import configure

    monkeypatch.setenv("POLYATTN_STRICT", "1")
    configure()
    assert run("explain", "--assume-platform", "cuda:sm90", "--attention-backend", "fa").code == 3


class TestPhases:
    words = ("explain", *shlex.split(HOPPER), "--json", "--prefill-attention-backend", "fa3")

    def test_own_backends(self, run: Run) -> None:
        words = (*self.words, "--decode-attention-backend", "flashinfer")
        data = run(*words, "--phase", "decode").data
        assert (data["backend"], data["source"]) == ("flashinfer", "decode argument")
        assert run(*words, "--phase", "extend").data["backend"] == "fa3"

    def test_one_alone_leaves_the_other_to_the_general_choice(self, run: Run) -> None:
        data = run(*self.words, "--phase", "decode", "--attention-backend", "flashinfer").data
        assert (data["backend"], data["source"]) == ("flashinfer", "argument")

    @pytest.mark.parametrize(("mode", "backend"), [("prefill", "fa3"), ("decode", "flashinfer")])
    def test_who_verifies(self, run: Run, mode: str, backend: str) -> None:
        words = (*self.words, "--decode-attention-backend", "flashinfer", "--spec-topk", "1")
        data = run(*words, "--speculative-attention-mode", mode).data
        assert (data["backend"], data["source"]) == (backend, f"speculative_attention_mode={mode}")

    @pytest.mark.parametrize(("mode", "backend"), [("prefill", "fa3"), ("decode", "flashinfer")])
    @pytest.mark.parametrize("phase", ["extend", "decode", "verify"])
    def test_a_tree_is_of_verify_alone(self, run: Run, mode: str, backend: str, phase: str) -> None:
        """The other phases of that server have no mask, and are asked for without one."""
        words = (*self.words, "--decode-attention-backend", "flashinfer", "--spec-topk", "4", "--phase", phase)
        found = run(*words, "--page-size", "64", "--speculative-attention-mode", mode)
        assert found.code == 0, found.err
        own = {"extend": "fa3", "decode": "flashinfer", "verify": backend}[phase]
        assert (found.data["backend"], found.data["request"].get("tree", False)) == (own, phase == "verify")

    def test_who_is_named_to_verify_serves_another_phase_too(self, run: Run) -> None:
        words = ("explain", "--phase", "verify", "--spec-topk", "4", "--page-size", "64", "--json")
        there = (*words, *shlex.split(BLACKWELL), "--attention-backend", "trtllm_mha")
        found = run(*there)
        assert found.code == 3
        assert "trtllm_mha cannot verify: every phase of a server asks" in found.data["error"]["message"]
        assert run(*there[:4], "1", *there[5:]).data["backend"] == "trtllm_mha"
        assert run(*words, "--attention-backend", "torch_sdpa").data["backend"] == "torch_sdpa"

    def test_a_pair_that_does_not_work(self, run: Run) -> None:
        words = ("--prefill-attention-backend", "fa4", "--decode-attention-backend", "trtllm_mha")
        found = run("explain", *shlex.split(BLACKWELL), *words, "--kv-dtype", "fp4_e2m1", "--json")
        assert found.code == 3
        assert "does not work with" in found.data["error"]["message"]

    @pytest.mark.parametrize("where", [(), shlex.split(HOPPER)], ids=["here", "elsewhere"])
    def test_only_serving_has_phases(self, run: Run, where: list[str]) -> None:
        found = run("explain", *where, "--family", "dense", "--decode-attention-backend", "fa3", "--json")
        assert found.code == 2
        assert "serving families paged and mla, not dense" in found.data["error"]["message"]

    def test_here_too(self, run: Run) -> None:
        words = ("explain", "--family", "paged", "--json", "--decode-attention-backend", "reference")
        data = run(*words, "--phase", "decode").data
        assert (data["backend"], data["source"]) == ("reference", "decode argument")
        assert run(*words, "--phase", "extend").data["source"] == "platform rule"
        verify = run(*words, "--spec-topk", "1", "--speculative-attention-mode", "decode").data
        assert verify["source"] == "speculative_attention_mode=decode"

    def test_an_unknown_mode(self, run: Run) -> None:
        found = run("explain", "--speculative-attention-mode", "both")
        assert found.code == 2
        assert "must be prefill or decode" in found.err


def test_this_machine_obeys_its_configuration(run: Run) -> None:
    from polyattn import configure

    configure(attention_backend="flex_attention")
    data = run("explain", "--json").data
    assert (data["backend"], data["source"]) == ("flex_attention", "configure()")


def test_installed_names_are_enough_to_ask_about_this_machine(run: Run) -> None:
    data = run("explain", "--assume-installed", "sgl-kernel-cpu", "--phase", "decode", "--json").data
    assert data["platform"] == "cpu"


@pytest.mark.parametrize(
    ("report", "fields", "words"),
    [
        (DeviceReport(True, "", ("sm90",), (12, 8)), {"platform": "cuda", "arch": "sm90"}, "cuda:sm90@12.8"),
        (DeviceReport(True, "", ("sm90",)), {"platform": "cuda", "toolkit": ()}, "cuda:sm90"),
        (DeviceReport(True, ""), {"platform": "cuda", "arch": ""}, "cuda"),
        (DeviceReport(False, "", ("sm90",)), {"platform": "cpu"}, "cpu:amx"),
    ],
)
def test_this_machine(
    monkeypatch: pytest.MonkeyPatch, report: DeviceReport, fields: dict[str, Any], words: str
) -> None:
    reports = {"cuda": report, "cpu": DeviceReport(True, "", features=("amx",))}
    absent = DeviceReport(False, "")
    monkeypatch.setattr("polyattn.cli.explain.detect", lambda name: reports.get(name, absent))
    found = here()
    assert {name: found[name] for name in fields} == fields
    assert assumed(found) == words


REQUESTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"family": "dense", "dtype": "bfloat16", "head_dim": 128, "heads": 32, "kv_heads": 32, "causal": "none"}),
    ({"phase": "decode"}, {"family": "paged", "s_relation": "one", "page_size": 64, "causal": "bottom_right"}),
    ({"phase": "extend"}, {"family": "paged", "phase": "extend", "s_relation": "fewer"}),
    ({"phase": "prefill"}, {"family": "paged", "phase": "prefill", "s_relation": "equal"}),
    ({"phase": "verify"}, {"family": "paged", "phase": "verify", "spec_topk": 1, "tree": False}),
    ({"spec_topk": 1}, {"phase": "verify", "tree": False}),
    ({"spec_topk": 4}, {"family": "paged", "phase": "verify", "tree": True, "s_relation": "fewer"}),
    ({"spec_topk": 4, "phase": "decode"}, {"phase": "decode", "tree": False, "spec_topk": 4}),
    ({"page_size": 1}, {"family": "paged", "page_size": 1}),
    ({"kv_dtype": "fp8_e4m3"}, {"family": "paged", "kv_dtype": "fp8_e4m3"}),
    ({"kv_dtype": "bf16"}, {"kv_dtype": "bfloat16"}),
    ({"family": "dense", "phase": "decode"}, {"family": "dense", "phase": "prefill", "s_relation": "one"}),
    ({"family": "paged", "causal": False}, {"causal": "none"}),
    ({"causal": True}, {"family": "dense", "causal": "bottom_right"}),
    ({"causal_alignment": "top_left"}, {"causal": "top_left"}),
    ({"mla": True}, {"family": "mla", "head_dim": 576, "v_head_dim": 512, "heads": 128, "kv_heads": 1}),
    ({"mla": True}, {"scale": 192**-0.5, "page_size": 64, "causal": "bottom_right"}),
    ({"mla": True, "head_dim": 192}, {"head_dim": 192, "v_head_dim": 128}),
    ({"mla": True, "scale": 0.1, "heads": 16}, {"scale": 0.1, "heads": 16}),
    ({"family": "mla", "mla": True}, {"family": "mla"}),
    ({"family": "linear"}, {"method": "gdn", "phase": "prefill"}),
    ({"family": "linear", "method": "kda", "phase": "decode"}, {"method": "kda", "phase": "decode"}),
    ({"window": "127,0"}, {"window": (127, 0)}),
    ({"window": " -1 , -1 "}, {"window": (-1, -1)}),
    ({"dtype": "fp16", "softcap": 30.0, "sinks": True, "mask": "bool"}, {"dtype": "float16", "softcap": 30.0}),
    ({"grad": "query, key"}, {"grad": ("query", "key")}),
    ({"heads": 8, "kv_heads": 2, "v_head_dim": 64}, {"heads": 8, "kv_heads": 2, "v_head_dim": 64}),
]


@pytest.mark.parametrize(("flags", "fields"), REQUESTS, ids=[str(flags) for flags, _ in REQUESTS])
def test_flags_become_fields(flags: dict[str, Any], fields: dict[str, Any]) -> None:
    request = ask(flags)
    assert {name: getattr(request, name) for name in fields} == fields


@pytest.mark.parametrize("word", ["auto", "bf16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"])
def test_the_pinned_cache_dtypes(run: Run, word: str) -> None:
    shown = run("explain", *shlex.split(HOPPER), "--phase", "decode", "--kv-dtype", word, "--json")
    assert shown.code == 0
    dtype = shown.data["request"]["kv_dtype"]
    assert dtype == ("auto" if word in ("auto", "bf16") else word)


def test_every_word_for_a_dtype_is_a_request_dtype() -> None:
    for words in (DTYPE_WORDS, KV_CACHE_DTYPES):
        for word in words:
            assert AttentionRequest(dtype=words[word]).dtype == words[word]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"family": "dens"}, "--family 'dens' is not known. Did you mean 'dense'? Allowed: dense, varlen"),
        ({"family": "dense", "mla": True}, "--mla means --family mla, but --family dense is given too"),
        ({"phase": "decoding"}, "--phase 'decoding' is not known. Did you mean 'decode'"),
        ({"dtype": "bf61"}, "--dtype 'bf61' is not known. Did you mean 'bf16'"),
        ({"kv_dtype": "fp8"}, "--kv-dtype 'fp8' is not known"),
        ({"kv_scales": "tensors", "phase": "decode"}, "--kv-scales 'tensors' is not known. Did you mean 'tensor'"),
        ({"mask": "boolean"}, "--mask 'boolean' is not known. Did you mean 'bool'"),
        ({"layout": "HSD"}, "--layout 'HSD' is not known"),
        ({"layout": "BHSD", "phase": "decode"}, "--layout is for family dense; of paged it is THD: leave it out"),
        ({"grad": "query,values"}, "--grad 'values' is not known. Did you mean 'value'"),
        ({"causal_alignment": "left"}, "--causal-alignment 'left' is not known"),
        ({"causal_alignment": "top_left", "causal": False}, "--causal-alignment top_left and --no-causal exclude each"),
        ({"window": "127"}, "--window '127' is not left,right"),
        ({"window": "-2,0"}, "-1 = no bound"),
        ({"heads": 32, "kv_heads": 5}, "--heads 32 is no multiple of --kv-heads 5"),
        ({"head_dim": 0}, "--head-dim 0 is too small: give a whole number, 1 or more"),
        ({"page_size": 0}, "--page-size 0 is too small"),
        ({"spec_topk": -1}, "--spec-topk -1 is too small"),
        ({"softcap": -1.0}, "--softcap -1 is not a number of 0 (off) or more"),
        ({"softcap": float("nan")}, "--softcap nan"),
        ({"scale": float("nan")}, "--scale nan is no finite number"),
        ({"scale": float("inf")}, "--scale inf is no finite number"),
        ({"dropout": 1.0}, "--dropout 1 is no probability below 1"),
        # Since these are backends of calls with a place, they are no method of block_sparse requests any more.
        ({"method": "sta"}, "--method sta is a backend, which serves calls with a place: leave it out, and add "),
        ({"method": "vsa", "family": "block_sparse"}, "add --attention-backend video_sparse_attn --grid T,H,W"),
        ({"grid": "21,45"}, "--grid '21,45' is not T,H,W: three numbers of tokens, 1 or more, such as 21,45,80"),
        ({"grid": "21,0,80"}, "--grid '21,0,80' is not T,H,W"),
        ({"grid": "21,45,80", "family": "varlen"}, "--grid is the place of a dense call, and this is varlen"),
        (
            {"family": "block_sparse", "block_starts": True},
            "--block-starts says that packed blocks of keys",
        ),
        ({"role": "crss"}, "--role 'crss' is not known. Did you mean 'cross'? Allowed: self, cross"),
        ({"method": "kda"}, "--method kda is a method of linear: add --family linear"),
        ({"method": "dual_chunk"}, "--method dual_chunk is a method of paged: add --family paged"),
        ({"method": "gdn", "family": "dense"}, "--method gdn is a method of linear, not of dense: use --family linear"),
        ({"method": "gdn", "mla": True}, "--method gdn is a method of linear, not of mla: use --family linear"),
        ({"kv_scales": "block128"}, "--kv-scales: family dense has no KV cache that this could be of: add"),
        ({"save_kv_cache": True}, "--save-kv-cache: family dense has no KV cache that this could be of: add"),
        ({"save_kv_cache": False}, "--no-save-kv-cache: family dense has no KV cache that this could be of: add"),
        ({"chunked_prefix": True}, "--chunked-prefix: family dense has no KV cache that this could be of: add"),
        ({"family": "dense", "page_size": 64}, "--page-size: family dense has no KV cache that this could be of: use"),
        ({"family": "linear", "page_size": 64, "kv_scales": "head"}, "--page-size, --kv-scales: family linear has no"),
    ],
)
def test_wrong_flags(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ask(flags)
    assert message in str(caught.value)


VIDEO = "--attention-backend sliding_tile_attn --assume-platform cuda:sm90 --assume-installed st-attn,flash-attn-3"


def test_options_of_a_backend_are_checked(run: Run) -> None:
    words = ("explain", "--attention-backend", "video_sparse_attn", "--grid", "4,4,8", "--attention-backend-config")
    assert run(*words, '{"sparsity": 0.9, "coarse": "off"}', "--json").data["backend"] == "video_sparse_attn"
    assert polyattn.selection.overrides.current_settings().attention_backend_config
    for given, said in (
        ('{"sparsty": 0.9}', "'sparsty'. Did you mean 'sparsity'"),
        ('{"sparsity": 2}', "sparsity"),
        ('{"video_spars_attn": {"sparsity": 0.5}}', "Did you mean 'video_sparse_attn'"),
    ):
        wrong = run(*words, given)
        assert wrong.code == 2, wrong.out
        assert said in " ".join(wrong.err.split())


@pytest.mark.parametrize(
    ("words", "backend", "source"),
    [
        ("--grid 30,48,80 --role self", "sliding_tile_attn", "argument"),
        ("--grid 30,48,80 --role cross", "fa", "rule of sliding_tile_attn"),
        ("--role cross --strict", "fa", "rule of sliding_tile_attn"),
        ("--strict", "fa", "rule of sliding_tile_attn"),
    ],
)
def test_a_method_is_asked_about_with_a_place(run: Run, words: str, backend: str, source: str) -> None:
    found = run("explain", *shlex.split(f"{VIDEO} {words}"), "--json").data
    assert (found["backend"], found["source"]) == (backend, source)
    assert found["request"]["cross"] is ("cross" in words)
    shown = run("explain", *shlex.split(f"{VIDEO} {words}"))
    assert (shown.code, source.split()[0] in shown.out) == (0, True)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("words", "served"), [("--role self --grid 21,45,80", True), ("--role cross", False)])
def test_methods_that_are_here(run: Run, name: str, words: str, served: bool) -> None:
    """With nothing installed but torch, on this machine's platform."""
    found = run("explain", "--attention-backend", name, *words.split(), "--assume-platform", "cpu", "--json").data
    assert (found["backend"] == name, found["source"]) == (served, "argument" if served else f"rule of {name}")
    assert run("explain", "--attention-backend", name, *words.split()).code == 0, "as the page has it"


def test_a_method_that_no_plugin_here_knows_is_left_to_the_backends(run: Run) -> None:
    assert ask({"method": "acme"}).method == "acme"


@pytest.mark.parametrize("name", ["causal", "save-kv-cache"])
def test_the_two_flags_of_a_switch_exclude_each_other(run: Run, name: str) -> None:
    for words in ((f"--{name}", f"--no-{name}"), (f"--no-{name}", f"--{name}")):
        found = run("explain", *words)
        assert found.code == 2
        assert f"--{name} and --no-{name} exclude each other: leave one out" in " ".join(found.err.split())
    for word, value in ((f"--{name}", True), (f"--no-{name}", False)):
        words = ("--family", "paged", word, "--attention-backend", "reference", "--json")
        found = run("explain", *words).data["request"][name.replace("-", "_")]
        assert found == (value if name != "causal" else "bottom_right" if value else "none")


def test_the_flags_reach_the_request(run: Run) -> None:
    words = (
        "--dtype fp16 --head-dim 64 --v-head-dim 32 --heads 8 --kv-heads 2 --no-causal --window 3,5 --softcap 2 "
        "--sinks --mask additive --scale 0.5 --lse --grad query --cross --dropout 0.25 --deterministic"
    )
    request = run("explain", *shlex.split(words), "--attention-backend", "reference", "--json").data["request"]
    expected = {
        "dtype": "float16", "head_dim": 64, "v_head_dim": 32, "heads": 8, "kv_heads": 2, "causal": "none",
        "window": [3, 5], "softcap": 2.0, "sinks": True, "mask": "additive", "scale": 0.5, "lse": True,
        "grad": ["query"], "cross": True, "dropout": 0.25, "deterministic": True,
    }  # fmt: skip
    assert {name: request[name] for name in expected} == expected


def test_the_serving_flags_reach_the_request(run: Run) -> None:
    words = (
        "--mla --phase extend --page-size 32 --kv-dtype fp8_e4m3 --kv-scales head --save-kv-cache --chunked-prefix "
        "--multimodal --graph-capture session --token-topk 64 --assume-platform cuda:sm90"
    )
    found = run("explain", *shlex.split(words), "--json")
    assert found.code == 3
    message = found.data["error"]["message"]
    for word in ("page_size=32", "kv_scales=head", "save_kv_cache", "chunked_prefix", "multimodal", "token_topk=64"):
        assert word in message
    assert "graph_capture" in message


def test_latent_rows_of_one_scale_can_be_asked_for(run: Run) -> None:
    """`tokenspeed_mla` reads no other FP8 rows, and `serve --kv-cache-scales tensor` makes these."""
    words = (
        "explain --attention-backend tokenspeed_mla --mla --phase decode --kv-dtype fp8_e4m3 --kv-scales tensor "
        "--assume-platform cuda:sm100 --assume-installed flashinfer --json"
    )
    found = run(*shlex.split(words))
    assert (found.code, found.data["backend"], found.data["lowerings"]) == (0, "tokenspeed_mla", []), found
    assert "kv_scales" not in found.data["request"]
    usual = run(*shlex.split(words.replace("--kv-scales tensor", "")))
    assert "kv_scales='block128' is not declared" in usual.data["error"]["message"]


def test_a_kernel_that_plans_is_recorded_in_steps_only(run: Run) -> None:
    words = "--family paged --phase decode --assume-platform cuda:sm90 --assume-installed flashinfer-python"
    for kind, code in (("none", 0), ("session", 0), ("call", 3)):
        found = run(
            "explain", *shlex.split(words), "--attention-backend", "flashinfer", "--graph-capture", kind, "--json"
        )
        assert found.code == code, found
    message = found.data["error"]["message"]
    assert "graph_capture=True is a call by itself" in message
    assert "record a step of polyattn.serving" in message
    assert "Backends that can: " in message


class TestReasons:
    planned = "planned: its adapter is not part of this version"

    def gist(self, *reasons: str, everything: bool = False) -> str:
        table = reasons_table({"x": list(reasons)}, everything=everything)
        return str(next(iter(table.columns[1].cells)))

    def test_limits_come_first(self) -> None:
        assert self.gist("fa3: head_dim=512 is not 8 to 256", "fa2: flash-attn is not installed; pip install x") == (
            "fa3: head_dim=512 is not 8 to 256"
        )

    def test_one_way_to_install(self) -> None:
        reasons = [f"p{i}: d{i} is not installed; pip install d{i}" for i in range(3)]
        assert self.gist(*reasons) == "d0 is not installed; pip install d0 (or 2 other ways: --verbose)"
        assert self.gist(*reasons[:2]).endswith("(or 1 other way: --verbose)")
        assert self.gist(reasons[0]) == "d0 is not installed; pip install d0"

    def test_planned_and_other_families(self) -> None:
        assert self.gist("family='mla' is not dense", f"paged: {self.planned}") == self.planned
        assert self.gist("family='mla' is not dense") == "it serves other families"

    def test_everything(self) -> None:
        assert self.gist("family='mla' is not dense", self.planned, everything=True) == (
            f"family='mla' is not dense; {self.planned}"
        )

    def test_equal_answers_share_a_line(self) -> None:
        table = reasons_table({"a": ["family='mla' is not dense"], "b": ["family='mla' is not paged"]})
        assert [str(cell) for cell in table.columns[0].cells] == ["a, b"]


def test_the_pinned_command_line_as_a_shell_splits_it(run: Run) -> None:
    line = (
        "explain --assume-platform cuda:sm90 --assume-installed flash-attn-3,flashinfer --phase decode "
        "--kv-dtype fp8_e4m3 --page-size 64 --mla --json"
    )
    shown = run(*line.split())
    assert shown.code == 0
    data = json.loads(shown.out)
    assert data["request"]["family"] == "mla"
    assert data["request"]["arch"] == "sm90"


# ------------------------------------------------------------------------------------- the requests that calls make

LAYER = {"heads": 32, "kv_heads": 8}


@pytest.mark.parametrize(
    "flags, layer, phase, topk",
    [
        *(({**LAYER, "phase": phase, "page_size": 16}, {}, phase, 0) for phase in ("extend", "decode")),
        *(({**LAYER, "spec_topk": topk, "page_size": 16}, {}, "verify", topk) for topk in (1, 4)),
        *(({"mla": True, "phase": phase}, {"latent": True}, phase, 0) for phase in ("extend", "decode")),
        ({"mla": True, "spec_topk": 1}, {"latent": True}, "verify", 1),
    ],
)
def test_a_question_about_serving_is_what_a_layer_asks(flags, layer, phase, topk) -> None:
    """Else neither explain nor what `polyattn tune --request` measures is about any call."""
    latent = bool(layer)
    shape = (0, 128, 1, 576, 512) if latent else (0, 32, 8, 128, 128)
    made = AttentionLayer(*shape, scale=192**-0.5 if latent else None, **layer)
    stored = {"page_size": 64} if latent else {"page_size": 16, "kv_layout": "NHD"}
    wanted = layer_request(made, stored, phase=phase, dtype=torch.bfloat16, device=torch.device("cpu"), topk=topk)
    found = ask(flags, {"features": wanted.features})
    assert found.normalised() == wanted


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_a_question_about_a_dense_call_is_what_it_asks(layout: str) -> None:
    q, k = torch.zeros(1, 4, 32, 128, dtype=torch.bfloat16), torch.zeros(1, 4, 8, 128, dtype=torch.bfloat16)
    if layout == "BHSD":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    wanted = polyattn.explain(polyattn.attention, q, k, k, causal=True, layout=layout).request
    found = ask({**LAYER, "causal": True, "layout": layout}, {"features": wanted.features})
    assert found.normalised() == dataclasses.replace(wanted, batch_bucket=0, q_bucket=0, k_bucket=0)


def test_a_machine_that_is_only_described_says_what_measurements_of_its_devices_choose(run: Run) -> None:
    words = f"explain {HOPPER} --heads 28 --kv-heads 4 --causal --json"
    data = run(*words.split()).data
    (said,) = (note for note in data["notes"] if note.startswith("on NVIDIA H200: "))
    assert (data["backend"], data["source"]) == ("fa", "platform rule"), "other devices of its kind have the rules"
    assert re.match(
        r"on NVIDIA H200: triton, \d+ us \(others: .*\) at batch 4, S_q 4096, S_k 4096, shipped with a p", said
    )
    halved = run(*words.replace("28", "14").replace("4 --causal", "2 --causal").split()).data["notes"]
    assert any(note.endswith("of a request like this one with heads=28, kv_heads=4") for note in halved)
    for named in ("--attention-backend fa3", "--attention-backend triton"):
        assert not any("H200" in note for note in run(*words.split(), *named.split()).data["notes"])
    assert not any("H200" in note for note in run(*words.replace("sm90", "sm100").split()).data["notes"])


def test_what_dequantising_costs_and_who_does_not(run: Run) -> None:
    shown = run(
        *("explain", "--assume-platform", "cuda:sm90@12.8", "--assume-installed", "flash-attn-3,triton"),
        *("--phase", "decode", "--kv-dtype", "fp8_e4m3", "--page-size", "64", "--kv-heads", "8"),
        *("--attention-backend", "fa3", "--strict"),
    )
    told = " ".join(line.strip("│ ") for line in shown.out.splitlines())
    assert "each call moves 5 times the bytes of the pages that it names" in told
    row = next(line for line in shown.out.splitlines() if "without it" in line)
    assert "torch_sdpa" in row
    assert "fa3_fp8" in told
