"""`polyattn serve` without a server: what it would do, what it refuses, and other engines. tests/integrations asks a
running one."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from polyattn.cli import probes, serve_plan
from polyattn.cli.engines import PAGE_SIZES
from polyattn.cli.probes import shared_page

from .conftest import Run
from .launch_commands import MANY_DEVICES, ONE_DEVICE, here

INSTALLED = "sgl-kernel,flashinfer-python,triton,flash-attn-4,torch_npu,wave-lang,sglang"


def asked_for(words: list[str], phase: str) -> str | None:
    """The backend that a command names for a phase."""
    flags = dict(itertools.pairwise(words))
    return flags.get(f"--{phase}-attention-backend", flags.get("--attention-backend"))


def machine(platform: str) -> tuple[str, ...]:
    return ("--assume-platform", platform, "--assume-installed", INSTALLED, "--dry-run", "--json")


@pytest.mark.slow(keep=9)
@pytest.mark.parametrize("command, platform", ONE_DEVICE.items())
def test_launch_commands_for_one_device_say_who_would_serve(
    run: Run, tmp_path: Path, command: str, platform: str
) -> None:
    words = here(command, tmp_path)
    done = run("serve", *words, *machine(platform))
    assert done.code == 0, done.out
    found = {entry["phase"]: entry["backend"] for entry in done.data["phases"]}
    assert found == {phase: asked_for(words, phase) for phase in ("prefill", "decode")}
    assert done.data["note"] == "", "the model's own config is read"
    assert done.data["page_size"] == {"npu": 128, "xpu": 64}.get(platform, 128 if "128" in words else 16)
    # Here, where the chip is not: the same flag answers.
    done = run("serve", *words, "--dry-run")
    backend = asked_for(words, "decode")
    if done.code == 0:
        # The last two with Triton's interpreter.
        assert backend in ("torch_native", "flex_attention", "triton", "dual_chunk_flash_attn")
        assert f"decode by {backend} on cpu" in done.out
    else:
        assert done.code in (3, 4)
        assert f"--decode-attention-backend {backend}" in " ".join(done.err.split())


@pytest.mark.parametrize("command", MANY_DEVICES)
def test_launch_commands_for_many_devices_name_the_flag_and_the_engines_that_have_it(
    run: Run, tmp_path: Path, command: str
) -> None:
    words = here(command, tmp_path)
    done = run("serve", *words, "--dry-run")
    assert done.code == 2
    said = " ".join(done.err.split())
    assert f"--tp {words[words.index('--tp') + 1]}" in said
    assert "--engine sglang or --engine vllm" in said


@pytest.mark.parametrize("command", MANY_DEVICES)
def test_sglang_gets_every_flag_of_its_launch_commands(run: Run, tmp_path: Path, command: str) -> None:
    given = here(command, tmp_path)
    done = run("serve", "--engine", "sglang", *given, "--dry-run", "--json")
    assert done.code == 0, done.out
    words, environment = done.data["command"], done.data["environment"]
    assert words[:4] == [sys.executable, "-m", "sglang.launch_server", "--model-path"]
    assert words[5:7] == ["--attention-backend", "polyattn"]
    for flag, value in zip(given, [*given[1:], ""], strict=True):
        if flag in ("--model", "--model-path"):
            assert words[4] == value
        elif flag.endswith("attention-backend"):
            assert environment[f"POLYATTN_{flag[2:].replace('-', '_').upper()}"] == value
        elif flag.startswith("--"):
            assert flag in words
            assert value.startswith("--") or not value or value == words[words.index(flag) + 1]
    assert "--disable-cuda-graph" in words, "its backend there has none"


NAMED = ("--prefill-attention-backend", "--decode-attention-backend")


@pytest.mark.parametrize(
    "words, settings, said",
    [
        ("--attention-backend flashmla", {}, "64"),
        ("--attention-backend fa2", {}, "256"),
        ("--attention-backend ascend", {}, "128"),
        ("--attention-backend trtllm_mha", {}, "64"),
        ("--attention-backend trtllm_mha@cuda", {}, "64"),
        ("--attention-backend trtllm_mha --page-size 32", {}, "32"),
        ("--attention-backend trtllm_mha", {"CONFIG": "page-size: 16"}, "16"),
        ("--attention-backend intel_xpu", {}, "64"),
        ("", {"ATTENTION_BACKEND": "flashmla"}, "64"),
        ("--decode-attention-backend flashmla", {}, "64"),
        (f"{NAMED[0]} ascend {NAMED[1]} trtllm_mha", {}, "128"),
        (f"{NAMED[0]} fa3 {NAMED[1]} flashinfer", {"ATTENTION_BACKEND": "flashmla"}, None),
        ("--attention-backend triton", {}, None),
        ("--attention-backend nobodys", {}, None),
        ("", {}, None),
    ],
)
def test_sglang_is_told_the_pages_that_the_backends_need(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, settings: dict[str, str], said: str | None
) -> None:
    for name, value in settings.items():
        (tmp_path / "settings.yaml").write_text(value)
        monkeypatch.setenv(f"POLYATTN_{name}", value if name != "CONFIG" else str(tmp_path / "settings.yaml"))
    done = run("serve", "--engine", "sglang", "--model", "m", *words.split(), "--dry-run", "--json")
    assert done.code == 0, done.err
    command = done.data["command"]
    assert dict(itertools.pairwise(command)).get("--page-size") == said
    assert command.count("--page-size") == (said is not None)
    done = run("serve", "--engine", "vllm", "--model", "m", *words.split(), "--dry-run", "--json")
    asked = said if "CONFIG" in settings or "--page-size" in words else None
    assert dict(itertools.pairwise(done.data["command"])).get("--block-size") == asked, "vLLM asks polyattn itself"


def test_an_architecture_of_this_machine_decides_on_pages() -> None:
    names = {"extend": "fa4", "decode": "fa4"}
    assert shared_page(names, "cuda", "sm100", PAGE_SIZES) == 1
    assert shared_page(names, "cuda", "sm90", PAGE_SIZES) == 128, "fa4 reads pages of 128 there"


def test_backends_without_a_page_size_in_common_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"extend": {32}, "decode": {64}}
    monkeypatch.setattr(probes, "_sizes", lambda offer, kind, family, phase, arch, sizes: own[phase])
    words = (NAMED[0], "fa2", NAMED[1], "flashmla")
    done = run("serve", "--engine", "sglang", "--model", "m", *words, "--dry-run")
    assert done.code == 2
    said = " ".join(done.err.split())
    assert "fa2 and flashmla share none of 1, 64, 128, 16, 32, 256: give --page-size, or name other backends" in said


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_engines_are_told_what_the_config_file_says_of_the_cache(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str
) -> None:
    (tmp_path / "settings.yaml").write_text("kv-cache-dtype: bf16")
    monkeypatch.setenv("POLYATTN_CONFIG", str(tmp_path / "settings.yaml"))
    done = run("serve", "--engine", engine, "--model", "m", "--dry-run", "--json")
    assert dict(itertools.pairwise(done.data["command"]))["--kv-cache-dtype"] == "bfloat16"


def test_vllm_gets_its_own_words(run: Run) -> None:
    words = (
        "--page-size 64 --kv-cache-dtype bf16 --context-length 4096 --max-running-requests 8 --disable-radix-cache "
        "--speculative-draft-model-path d --speculative-num-steps 2 --tensor-parallel-size 2 --mem-fraction-static 0.5"
    )
    done = run("serve", "--engine", "vllm", "--model", "m", *words.split(), "--dry-run", "--json")
    command = done.data["command"]
    pairs = dict(itertools.pairwise(command))
    assert pairs["--block-size"] == "64"
    assert pairs["--kv-cache-dtype"] == "bfloat16"
    assert (pairs["--max-model-len"], pairs["--max-num-seqs"]) == ("4096", "8")
    assert pairs["--gpu-memory-utilization"] == "0.5"
    assert pairs["--tensor-parallel-size"] == "2"
    assert "--no-enable-prefix-caching" in command
    kinds = json.loads(pairs["--attention-config"])["backend_per_kind"]
    assert kinds == {"full_attention": "POLYATTN", "sliding_window": "POLYATTN", "mla_attention": "POLYATTN_MLA"}
    drafts = json.loads(pairs["--speculative-config"])
    assert drafts == {"model": "d", "num_speculative_tokens": 2, "attention_backend": "POLYATTN"}


@pytest.mark.parametrize(
    "words, code, said",
    [
        (("--engine", "vlm"), 2, "Did you mean 'vllm'?"),
        (("--engine", "vllm", "--max-total-tokens", "99"), 2, "--max-total-tokens 99: vllm has no such flag"),
        (("--engine", "vllm", "--speculative-eagle-topk", "4"), 2, "--speculative-eagle-topk 4: vllm has no such flag"),
        (("--engine", "sglang"), 4, "sglang is not installed here; pip install sglang"),
        (("--atention-backend", "fa3"), 2, "Did you mean '--attention-backend'"),
        (("--assume-platform", "cuda:sm90"), 2, "add --dry-run"),
        (("--json",), 2, "add --dry-run"),
        (("--mem-fraction-static", "1.5"), 2, "give a share between 0 and 1"),
        (("--port", "99999"), 2, "--port 99999: give 0 to 65535"),
        (("--port", "-1"), 2, "--port -1: give 0 to 65535"),
        (("--drain-seconds", "-1"), 2, "--drain-seconds -1: give 0 or more"),
        (("--served-model-name", ""), 2, "--served-model-name '': give a name"),
        (("--context-length", "0"), 2, "--context-length 0: give 1 or more"),
        (("--max-queued-requests", "-1"), 2, "--max-queued-requests -1: give 0 or more"),
        (("--speculative-num-steps", "2"), 2, "give --speculative-draft-model-path too"),
        (("--attention-backend", "fa33"), 4, "fa3"),
    ],
)
def test_what_is_wrong_is_said(run: Run, words: tuple[str, ...], code: int, said: str) -> None:
    dry = ("--dry-run",) if words[0] in ("--attention-backend", "--speculative-num-steps") else ()
    done = run("serve", "--model", "nobody/nothing", *words, *dry)
    assert said in " ".join(f"{done.out} {done.err}".split())
    assert done.code == code


def test_a_model_that_is_not_here_is_not_downloaded(run: Run) -> None:
    pytest.importorskip("uvicorn", reason="pip install 'polyattn[serve]'")
    done = run("serve", "--model", "nobody/nothing")
    assert done.code == 2
    assert "neither a folder nor a model in Hugging Face's cache" in " ".join(done.err.split())


def test_an_installed_engine_is_become(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[Any] = []

    def become(*given: Any) -> None:
        became.extend(given)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", become)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    run("serve", "--engine", "sglang", "--model", "m", "--attention-backend", "fa3")
    assert became[0] == sys.executable
    assert became[1][1:3] == ["-m", "sglang.launch_server"]
    assert became[2]["POLYATTN_ATTENTION_BACKEND"] == "fa3"
    assert became[2]["PATH"] == os.environ["PATH"]


CONFIGS: list[tuple[Any, list[dict[str, Any]]]] = [
    (
        transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, dtype="float16"),
        [{"family": "paged", "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float16"}],
    ),
    (
        transformers.Gemma2Config(
            hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, sliding_window=8,
            layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2, attn_logit_softcapping=None,
        ),
        [{"window": (-1, -1), "head_dim": 32}, {"window": (7, -1), "head_dim": 32}],
    ),
    (
        transformers.DeepseekV3Config(num_attention_heads=8, kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=32),
        [{"family": "mla", "heads": 8, "head_dim": 80, "v_head_dim": 64}],
    ),
]  # fmt: skip


@pytest.mark.parametrize("config, wanted", CONFIGS, ids=lambda value: getattr(value, "model_type", ""))
def test_a_plan_asks_what_the_models_layers_ask(
    run: Run, tmp_path: Path, config: Any, wanted: list[dict[str, Any]]
) -> None:
    config.save_pretrained(tmp_path)
    done = run("serve", "--model-path", str(tmp_path), "--dry-run", "--json", "--page-size", "64")
    assert done.code == 0, done.out
    asked = [entry["request"] for entry in done.data["phases"] if entry["phase"] == "prefill"]
    assert done.data["note"] == ""
    assert len(asked) == len(wanted)
    for request, fields in zip(asked, wanted, strict=True):
        assert {name: request[name] for name in fields} == json.loads(json.dumps(fields))


def test_phases_and_drafts_are_planned_by_their_own_flags(run: Run, tmp_path: Path) -> None:
    transformers.LlamaConfig(hidden_size=64, num_attention_heads=4).save_pretrained(tmp_path)
    words = ("--prefill-attention-backend", "torch_sdpa", "--decode-attention-backend", "torch_native")
    drafts = ("--speculative-draft-model-path", str(tmp_path), "--speculative-attention-mode", "decode")
    done = run("serve", "--model-path", str(tmp_path), *words, *drafts, "--dry-run", "--json")
    assert done.code == 0, done.out
    chosen = {entry["phase"]: entry["backend"] for entry in done.data["phases"]}
    assert chosen == {"prefill": "torch_sdpa", "decode": "torch_native", "verify": "torch_native"}


@pytest.mark.parametrize(
    ("kind", "platform", "size", "backend"),
    [
        ("mha", "npu", 128, "ascend"),
        ("mha", "xpu", 64, "intel_xpu"),
        ("mla", "npu", 128, "ascend"),
        ("mla", "cuda:sm100", 64, "trtllm_mla"),
        ("mha", "cuda:sm100", 16, "trtllm_mha"),
        ("mha", "cuda:sm90", 16, "fa3"),
    ],
)
def test_pages_are_those_of_the_platforms_choice(
    run: Run, tmp_path: Path, kind: str, platform: str, size: int, backend: str
) -> None:
    """Nobody names a backend: one that the rule prefers is not lost because it does not take pages of 16."""
    heads: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 16, "num_hidden_layers": 1}
    if kind == "mla":
        transformers.DeepseekV3Config(**heads, q_lora_rank=64).save_pretrained(tmp_path)
    else:
        transformers.LlamaConfig(**heads, num_key_value_heads=4, head_dim=128).save_pretrained(tmp_path)
    words = ("serve", "--model-path", str(tmp_path), "--assume-platform", platform, "--dry-run", "--json")
    installed = ("--assume-installed", f"{INSTALLED},sgl-kernel-xpu")
    done = run(*words, *installed)
    assert done.code == 0, done.out
    assert {entry["backend"] for entry in done.data["phases"]} == {backend}
    assert done.data["page_size"] == size
    if size > 16:  # who asks for pages gets them
        done = run(*words, *installed, "--page-size", "16")
        assert {entry["backend"] for entry in done.data["phases"]}.isdisjoint({backend})


def test_pages_of_a_run_are_judged_by_the_backends_that_were_asked() -> None:
    """A run asks no backend after the one that serves; a plan for another machine asks all."""

    def choose(size: int) -> list[Any]:
        small = SimpleNamespace(backend="any", source="priority", rejected={"wide": ("page_size=16 is not 64",)})
        return [SimpleNamespace(backend="wide", source="platform rule", rejected={}) if size == 64 else small]

    nothing: Any = SimpleNamespace(page_size=None)
    assert serve_plan.fitting_pages(nothing, choose, list)[0] == 64
    assert serve_plan.fitting_pages(nothing, lambda size: choose(16), list)[0] == 16
    asked: Any = SimpleNamespace(page_size=16)
    assert serve_plan.fitting_pages(asked, choose, list)[0] == 16
    alone = [SimpleNamespace(backend="wide", source="platform rule", rejected={"any": ("page_size=64 is not 16",)})]
    assert serve_plan.fitting_pages(nothing, lambda size: alone if size == 64 else choose(16), list)[0] == 16


def test_a_plan_asks_for_the_same_bits_in_any_batch(run: Run, tmp_path: Path) -> None:
    transformers.LlamaConfig(hidden_size=64, num_attention_heads=4).save_pretrained(tmp_path)
    words = ("serve", "--model-path", str(tmp_path), "--dry-run", "--json")
    for more, wanted in ((), False), (("--batch-invariant",), True):
        done = run(*words, *more)
        assert done.code == 0, done.out
        assert [entry["request"]["batch_invariant"] for entry in done.data["phases"]] == [wanted, wanted]
    done = run("serve", "--engine", "vllm", "--model", "m", "--batch-invariant", "--dry-run")
    assert done.code == 2
    assert "vllm has no such flag" in " ".join(done.err.split())


def test_a_plan_says_who_computes_images(run: Run, tmp_path: Path) -> None:
    heads = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen2_5_VLConfig(text_config=heads, vision_config={"hidden_size": 160, "num_heads": 2})
    config.save_pretrained(tmp_path)
    words = ("--mm-attention-backend", "torch_sdpa", "--attention-backend", "torch_native")
    done = run("serve", "--model-path", str(tmp_path), *words, "--dry-run", "--json")
    assert done.code == 0, done.out
    chosen = {entry["phase"]: (entry["backend"], entry["request"]["family"]) for entry in done.data["phases"]}
    assert chosen["images"] == ("torch_sdpa", "varlen")
    assert chosen["prefill"] == chosen["decode"] == ("torch_native", "paged")
    (images,) = (entry for entry in done.data["phases"] if entry["phase"] == "images")
    assert (images["request"]["heads"], images["request"]["head_dim"]) == (2, 80)
    words = ("--mm-attention-backend", "fa3", *machine("cuda:sm90"))
    done = run("serve", "--model-path", str(tmp_path), *words)
    assert {entry["phase"]: entry["provider"] for entry in done.data["phases"]}["images"] == "fa3/sgl-kernel"


def test_a_plan_says_who_computes_linear_attention(run: Run, tmp_path: Path) -> None:
    sizes = {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    kinds = ["linear_attention", "full_attention"]
    heads = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "layer_types": kinds}
    transformers.Qwen3NextConfig(**heads, **sizes).save_pretrained(tmp_path)
    words = ("serve", "--model-path", str(tmp_path))
    done = run(*words, "--attention-backend", "flex_attention", "--dry-run", "--json")
    assert done.code == 0, "a setting of softmax attention says nothing of the other kind"
    found = {entry["phase"]: entry["backend"] for entry in done.data["phases"]}
    linear = {"linear prefill": "torch_native", "linear decode": "torch_native"}
    assert found == {**linear, "prefill": "flex_attention", "decode": "flex_attention"}
    more = ("--linear-attn-decode-backend", "reference", "--speculative-draft-model-path", "d")
    done = run(*words, *more, *machine("cuda:sm90"))
    found = {entry["phase"]: entry["backend"] for entry in done.data["phases"] if "linear" in entry["phase"]}
    assert found == {"linear prefill": "triton", "linear decode": "reference", "linear verify": "reference"}
    asked = {entry["phase"]: entry["request"]["phase"] for entry in done.data["phases"] if "linear" in entry["phase"]}
    assert asked == {"linear prefill": "prefill", "linear decode": "decode", "linear verify": "verify"}
    done = run(*words, "--linear-attn-backend", "trito", "--dry-run")
    assert done.code == 4
    assert "no backend is named 'trito'" in " ".join(done.err.split())


@pytest.mark.parametrize("flag", ["--linear-attn-backend", "--linear-attn-decode-backend", "--mm-attention-backend"])
def test_a_plan_refuses_a_flag_that_reaches_no_layer(run: Run, tmp_path: Path, flag: str) -> None:
    transformers.LlamaConfig(hidden_size=64, num_attention_heads=4).save_pretrained(tmp_path)
    done = run("serve", "--model-path", str(tmp_path), flag, "torch_native", "--dry-run")
    assert done.code == 2, "as a server would, once it has the model"
    assert f"{flag} torch_native: the config of {tmp_path} has no " in " ".join(done.err.split())


def test_a_plan_lists_the_tokens_of_a_sparse_model(run: Run, tmp_path: Path) -> None:
    transformers.DeepseekV32Config(num_hidden_layers=2).save_pretrained(tmp_path)
    done = run("serve", "--model-path", str(tmp_path), "--attention-backend", "dsa", *machine("cuda:sm90"))
    assert done.code == 0, done.out
    found = [(entry["backend"], entry["request"]["token_topk"]) for entry in done.data["phases"]]
    assert found == [("dsa", 2048), ("dsa", 2048)]


def test_sglang_runs_its_own_linear_attention(run: Run) -> None:
    words = ("--linear-attn-backend", "triton", "--linear-attn-decode-backend", "cutedsl")
    done = run("serve", "--engine", "sglang", "--model", "m", *words, "--dry-run", "--json")
    assert done.code == 0, done.out
    pairs = dict(itertools.pairwise(done.data["command"]))
    assert (pairs[words[0]], pairs[words[2]]) == (words[1], words[3])
    assert done.data["environment"] == {}


def test_the_assumed_shape_is_a_layer() -> None:
    layers, dtype, note = serve_plan._layers("nobody/nothing")
    assert (layers[0].heads, layers[0].kv_heads, layers[0].head_dim, dtype) == (32, 8, 128, torch.bfloat16)
    assert "32" in note


MLA = ("serve", "--dry-run", "--json", "--kv-cache-dtype", "fp8_e4m3", "--assume-platform", "cuda:sm100")
LATENT_PAIR = (
    *("--prefill-attention-backend", "trtllm_mla", "--decode-attention-backend", "tokenspeed_mla"),
    *("--assume-installed", "flashinfer-python,nvidia-cutlass-dsl"),
)


def test_latent_rows_may_have_one_scale(run: Run, tmp_path: Path) -> None:
    transformers.DeepseekV3Config().save_pretrained(tmp_path)
    asked = (*MLA, *LATENT_PAIR, "--model-path", str(tmp_path))
    done = run(*asked, "--kv-cache-scales", "tensor", "--page-size", "64")
    assert done.code == 0, done.out
    assert [entry["backend"] for entry in done.data["phases"]] == ["trtllm_mla", "tokenspeed_mla"]
    for pages in ((), ("--page-size", "64")):
        refused = run(*asked, *pages)
        assert refused.code != 0
        assert "kv_scales='block128' is not declared" in refused.data["error"]["message"], (
            "not the size of a page that nobody asked for"
        )
    wrong = run(*asked, "--kv-cache-scales", "tensors")
    assert "scales='tensors' is no granularity" in wrong.data["error"]["message"]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_another_machine_is_assumed_for_our_own_engine_only(run: Run, engine: str) -> None:
    done = run("serve", "--model-path", "m", "--engine", engine, "--dry-run", "--assume-platform", "cuda:sm90")
    assert done.code != 0
    assert f"--engine {engine} makes its choices when it runs" in " ".join(done.err.split())
