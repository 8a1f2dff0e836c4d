"""Settings: the layers, their precedence and provenance, and what `polyattn config check` finds."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polyattn import envvars
from polyattn.contract import DTYPES, Alias, BackendInfo, ConfigField, Provider
from polyattn.errors import ConfigError
from polyattn.selection.config import (
    KV_CACHE_DTYPES,
    Settings,
    backend_names,
    check_settings,
    load_settings,
    parse_components,
)

FILE = """
attention-backend: fa
prefill_attention_backend: flashinfer
decode-attention-backend: triton
speculative-attention-mode: decode
mm_attention_backend: torch_sdpa
kv-cache-dtype: bf16
page_size: 64
strict: true
component-attention-backends:
  text_encoder: torch_sdpa
  transformer: {cross: fa}
  vae: fa
attention-backend-config:
  sliding_tile_attn: {skip_time_steps: 9, sta_mode: STA_searching}
  flex_attention: {compile: true}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "polyattn.yaml"
    path.write_text(FILE)
    return path


def test_nothing_is_set_by_default() -> None:
    settings = load_settings(environ={})
    assert settings == Settings()
    assert settings.source("attention_backend") == "default"
    assert settings.strict is False
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.page_size = 4  # type: ignore[misc]


def test_a_file(file: Path) -> None:
    settings = load_settings(environ={}, file=file)
    source = f"config file {file}"
    wanted: dict[str, Any] = {
        "attention_backend": "fa",
        "prefill_attention_backend": "flashinfer",
        "decode_attention_backend": "triton",
        "speculative_attention_mode": "decode",
        "mm_attention_backend": "torch_sdpa",
        "kv_cache_dtype": "bfloat16",
        "page_size": 64,
        "strict": True,
        "component_attention_backends": {"text_encoder": "torch_sdpa", "transformer.cross": "fa", "vae": "fa"},
        "attention_backend_config": {
            "sliding_tile_attn": {"skip_time_steps": 9, "sta_mode": "STA_searching"},
            "flex_attention": {"compile": True},
        },
    }
    for name, value in wanted.items():
        assert getattr(settings, name) == value
        assert settings.source(name) == source
    assert settings.source("component_attention_backends.transformer.cross") == source
    assert settings.source("attention_backend_config.flex_attention.compile") == source


def test_command_line_over_environment_over_file(file: Path) -> None:
    environ = {
        "POLYATTN_CONFIG": str(file),
        "POLYATTN_ATTENTION_BACKEND": " flex_attention ",
        "POLYATTN_COMPONENT_ATTENTION_BACKENDS": "text_encoder=flex_attention,vae=flex_attention",
        "POLYATTN_ATTENTION_BACKEND_CONFIG": "compile=false",
        "POLYATTN_STRICT": "0",
    }
    cli = {
        "attention-backend": None,
        "page-size": 16,
        "component_attention_backends": "vae=torch_sdpa",
        "attention_backend_config": '{"sliding_tile_attn": {"skip_time_steps": 3}}',
    }
    settings = load_settings(cli, environ)
    in_file, variable = f"config file {file}", "environment POLYATTN_"
    assert settings.attention_backend == "flex_attention"
    assert settings.source("attention_backend") == f"{variable}ATTENTION_BACKEND"
    assert settings.prefill_attention_backend == "flashinfer"
    assert settings.source("prefill_attention_backend") == in_file
    assert settings.page_size == 16
    assert settings.source("page_size") == "command line"
    assert settings.strict is False
    assert settings.source("strict") == f"{variable}STRICT"
    assert settings.component_attention_backends == {
        "text_encoder": "flex_attention",
        "transformer.cross": "fa",
        "vae": "torch_sdpa",
    }
    parts = {k: settings.source(f"component_attention_backends.{k}") for k in settings.component_attention_backends}
    assert parts == {
        "text_encoder": f"{variable}COMPONENT_ATTENTION_BACKENDS",
        "transformer.cross": in_file,
        "vae": "command line",
    }
    assert settings.attention_backend_config == {
        "sliding_tile_attn": {"skip_time_steps": 3, "sta_mode": "STA_searching"},
        "flex_attention": {"compile": False},
    }
    options = "attention_backend_config"
    assert settings.source(f"{options}.sliding_tile_attn.skip_time_steps") == "command line"
    assert settings.source(f"{options}.sliding_tile_attn.sta_mode") == in_file
    assert settings.source(f"{options}.flex_attention.compile") == f"{variable}ATTENTION_BACKEND_CONFIG"
    assert settings.source(f"{options}.sliding_tile_attn") == f"command line, {in_file}"


def test_an_argument_names_the_file_before_the_environment_does(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text('page-size = 1\ncomponent_attention_backends."transformer.cross" = "fa"\n')
    settings = load_settings(environ={"POLYATTN_CONFIG": str(file)}, file=other)
    assert (settings.page_size, settings.attention_backend) == (1, None)
    assert settings.component_attention_backends == {"transformer.cross": "fa"}
    assert settings.source("page_size") == f"config file {other}"


def test_empty_variables_are_unset() -> None:
    assert load_settings(environ=dict.fromkeys(envvars.ENVVARS, " ")) == Settings()


def test_a_caller_may_name_its_own_layer() -> None:
    settings = load_settings({"page_size": 4}, {}, cli_source="configure()")
    assert settings.source("page_size") == "configure()"
    with pytest.raises(ConfigError, match=r"^configure\(\): there is no setting 'page_sise'"):
        load_settings({"page_sise": 4}, {}, cli_source="configure()")


def test_flat_options_follow_the_backend_of_their_own_layer() -> None:
    environ = {"POLYATTN_ATTENTION_BACKEND": "video_sparse_attn", "POLYATTN_ATTENTION_BACKEND_CONFIG": "sparsity=0.5"}
    settings = load_settings({"attention_backend": "fa"}, environ)
    assert settings.attention_backend == "fa"
    assert settings.attention_backend_config == {"video_sparse_attn": {"sparsity": 0.5}}
    with pytest.raises(ConfigError) as error:
        load_settings({"attention_backend_config": "sparsity=0.5"}, {"POLYATTN_ATTENTION_BACKEND": "video_sparse_attn"})
    assert str(error.value).startswith(
        "attention_backend_config (command line) gives sparsity, but the same layer of configuration selects no backend"
    )


def test_layers_do_not_share_what_they_hold() -> None:
    mine = {"fa": {"a": 1}}
    settings = load_settings({"attention_backend_config": mine}, {})
    mine["fa"]["a"] = 2
    assert settings.attention_backend_config == {"fa": {"a": 1}}


@pytest.mark.parametrize("name", KV_CACHE_DTYPES)
def test_kv_cache_dtypes(name: str) -> None:
    assert load_settings({"kv_cache_dtype": name}, {}).kv_cache_dtype in ("auto", *DTYPES)


@pytest.mark.parametrize(
    ("cli", "message"),
    [
        (
            {"atention-backend": "fa"},
            "command line: there is no setting 'atention-backend'. Did you mean 'attention_backend'",
        ),
        ({"sources": {}}, "command line: there is no setting 'sources'."),
        (
            {"page-size": 1, "page_size": 2},
            "command line: the setting 'page_size' is given twice, with dashes and with underscores",
        ),
        (
            {"attention_backend": ""},
            "attention_backend='' (command line) is not a backend name, such as fa or fa@cuda",
        ),
        ({"mm_attention_backend": 3}, "mm_attention_backend=3 (command line) is not a backend name"),
        ({"decode_attention_backend": "fa 3"}, "decode_attention_backend='fa 3' (command line) is not a backend name"),
        (
            {"speculative_attention_mode": "prefil"},
            "speculative_attention_mode='prefil' (command line) is not 'prefill' or 'decode'. Did you mean 'prefill'?",
        ),
        (
            {"kv_cache_dtype": "fp8_e4m4"},
            (
                "kv_cache_dtype='fp8_e4m4' (command line) is not one of auto, bf16, fp16, fp32, float64, float32, "
                "bfloat16, float16, fp8_e4m3, fp8_e5m2, fp4_e2m1, int8. Did you mean 'fp8_e4m3'"
            ),
        ),
        ({"kv_cache_dtype": ["auto"]}, "kv_cache_dtype=['auto'] (command line) is not one of auto, "),
        ({"page_size": 0}, "page_size=0 (command line) is not a whole number of tokens >= 1, such as 64"),
        ({"page_size": True}, "page_size=True (command line) is not a whole number of tokens >= 1"),
        ({"page_size": 16.0}, "page_size=16.0 (command line) is not a whole number of tokens >= 1"),
        ({"strict": "yes"}, "strict='yes' (command line) is not true or false"),
        (
            {"component_attention_backends": "text_encoder"},
            (
                "component_attention_backends (command line): 'text_encoder' is not component=backend; "
                "give for example text_encoder=torch_sdpa,transformer.cross=fa"
            ),
        ),
        (
            {"attention_backend_config": "a=1,a=2"},
            "attention_backend_config (command line): the key 'a' is given twice",
        ),
    ],
)
def test_wrong_settings(cli: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_settings(cli, {})
    assert str(error.value).startswith(message)


RUN = """
import torch
import polyattn

q = torch.randn(1, 4, 2, 8)
polyattn.attention(q, q, q)
polyattn.configure(strict=True)
polyattn.attention(q, q, q, causal=True)
torch.compile(polyattn.attention, fullgraph=True, backend="eager")(q, q, q, softcap=2.0)
"""
COMPILED = """
import torch
import polyattn

q = torch.randn(1, 4, 2, 8)
torch.compile(polyattn.attention, fullgraph=True, backend="eager")(q, q, q)
"""


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("program", [RUN, COMPILED])
def test_a_run_warns_once_of_a_variable_that_nothing_reads(program: str) -> None:
    environ = {**os.environ, "POLYATTN_ATENTION_BACKEND": "reference"}
    said = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    warned = "environment POLYATTN_ATENTION_BACKEND is set, but polyattn does not read it. Did you mean"
    assert said.stderr.count("UserWarning: ") == said.stderr.count(warned) == 1, said.stderr


def test_what_is_known_is_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tests and tools too: a warning is an error here, and settings are read in every one of them."""
    for name in envvars.ENVVARS:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(envvars, "_told", set())
    load_settings()
    monkeypatch.setenv("POLYATTN_PLUGIN", "cuda")
    load_settings(environ={})
    with pytest.warns(UserWarning, match="environment POLYATTN_PLUGIN is set, but"):
        load_settings()
    load_settings()


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("page-size: sixty\nkv-cache-dtype: fp8\nstrict: maybe\npagesize: 1\n")
    environ = {"POLYATTN_STRICT": "on and off", "POLYATTN_ATTENTION_BACKEND": "f a"}
    cli = {"attention_backend": "f b", "attention_backend_config": "splits=2", "component_attention_backends": "vae"}
    with pytest.raises(ConfigError) as error:
        load_settings(cli, environ, path)
    assert [line.partition(" is not ")[0].partition(". ")[0] for line in str(error.value).split("\n")] == [
        f"config file {path}: there is no setting 'pagesize'",
        f"kv_cache_dtype='fp8' (config file {path})",
        f"page_size='sixty' (config file {path})",
        f"strict='maybe' (config file {path})",
        "POLYATTN_STRICT='on and off'",
        "attention_backend='f a' (environment POLYATTN_ATTENTION_BACKEND)",
        "attention_backend='f b' (command line)",
        "component_attention_backends (command line): 'vae'",
    ]
    assert isinstance(error.value.__cause__, ConfigError)
    with pytest.raises(ConfigError, match=r"attention_backend_config .* 'x' is not key=value"):
        load_settings({**cli, "attention_backend_config": "x"}, {})


def test_messages_name_the_variable_or_the_file(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^attention_backend='f a' \(environment POLYATTN_ATTENTION_BACKEND\) is not"
    ):
        load_settings(environ={"POLYATTN_ATTENTION_BACKEND": "f a"})
    with pytest.raises(
        ConfigError, match=r"^attention_backend_config \(environment POLYATTN_ATTENTION_BACKEND_CONFIG\)"
    ):
        load_settings(environ={"POLYATTN_ATTENTION_BACKEND_CONFIG": "x"})
    with pytest.raises(ConfigError, match=r"^POLYATTN_STRICT='maybe' is not a switch"):
        load_settings(environ={"POLYATTN_STRICT": "maybe"})
    with pytest.raises(ConfigError, match=r"^POLYATTN_CONFIG: absent.yaml does not exist"):
        load_settings(environ={"POLYATTN_CONFIG": "absent.yaml"})
    path = tmp_path / "a.json"
    path.write_text('{"pagesize": 1}')
    with pytest.raises(ConfigError) as error:
        load_settings(environ={}, file=path)
    assert str(error.value).startswith(f"config file {path}: there is no setting 'pagesize'. Did you mean 'page_size'?")


def test_components() -> None:
    assert parse_components("text_encoder=torch_sdpa, transformer.cross = fa@cuda") == {
        "text_encoder": "torch_sdpa",
        "transformer.cross": "fa@cuda",
    }
    assert parse_components({"transformer": {"cross": "fa", "self": "flex_attention"}, "vae": "fa"}) == {
        "transformer.cross": "fa",
        "transformer.self": "flex_attention",
        "vae": "fa",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "HERE: '' is not component=backend"),
        ("a=fa,", "HERE: '' is not component=backend"),
        ("a=fa,b", "HERE: 'b' is not component=backend"),
        ("=fa", "HERE: '' is not a component; give the pipeline's module name, such as text_encoder"),
        ("a.b.c=fa", "HERE: 'a.b.c' is not a component; give"),
        ({1: "fa"}, "HERE: 1 is not a component; give"),
        ("a=fa,a=fa3", "HERE: the component 'a' is given twice"),
        ({"a": {"b": "fa"}, "a.b": "fa"}, "HERE: the component 'a.b' is given twice"),
        ("a=", "a='' (HERE) is not a backend name"),
        ({"a": {"b": {"c": "fa"}}}, "a.b={'c': 'fa'} (HERE) is not a backend name"),
        (3, "HERE: 3 is a int; give component=backend pairs"),
    ],
)
def test_wrong_components(text: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_components(text, where="HERE")
    assert str(error.value).startswith(message)


def backend(name: str, platform: str = "cuda", target: str = "m:C", **fields: Any) -> BackendInfo:
    return BackendInfo(name, platform, (Provider(name, (), target=target),), name, **fields)


FA = backend("fa", aliases=(Alias("fa3", ("dense",), "p"), Alias("fa3", ("varlen",), "p")))
FA_ROCM = backend("fa", "rocm", config=(ConfigField("splits", "int", 1),))
STA = backend("sliding_tile_attn", config=(ConfigField("mask", "path"), ConfigField("steps", "int", 15, low=0)))
PLANNED = backend("cutlass_mla", target="")
KNOWN = backend_names((FA, FA_ROCM, STA, PLANNED))


def test_backend_names() -> None:
    assert KNOWN == {
        "fa": (FA, FA_ROCM),
        "fa@cuda": (FA,),
        "fa@rocm": (FA_ROCM,),
        "fa3": (FA,),
        "fa/fa": (FA,),
        "fa/fa@cuda": (FA,),
        "sliding_tile_attn": (STA,),
        "sliding_tile_attn@cuda": (STA,),
        "cutlass_mla": (PLANNED,),
        "cutlass_mla@cuda": (PLANNED,),
    }


def test_options_of_a_backend_come_under_all_its_names() -> None:
    file = {"fa": {"a": 1, "b": 1, "c": 1}, "fa3": {"b": 2}, "fa@rocm": {"a": 9}}
    cli = {"attention_backend_config": {**file, "fa@cuda": {"c": 3}}}
    options, where = load_settings(cli, {}).options_of(FA)
    assert options == {"a": 1, "b": 2, "c": 3}
    assert where == "attention_backend_config of fa and fa3 and fa@cuda (command line)"
    assert load_settings(cli, {}).options_of(FA_ROCM)[0] == {"a": 9, "b": 1, "c": 1}
    assert Settings().options_of(FA) == ({}, "attention_backend_config of fa (default)")


def test_flat_options_for_an_alias_reach_its_backend() -> None:
    for name in ("fa3", "fa/fa", "fa/fa@cuda"):
        settings = load_settings({"attention_backend": name, "attention_backend_config": "splits=2"}, {})
        assert settings.options_of(FA)[0] == {"splits": 2}


def test_settings_without_problems(tmp_path: Path) -> None:
    mask = tmp_path / "mask.json"
    mask.write_text("{}")
    cli = {
        "attention_backend": "fa3",
        "decode_attention_backend": "fa@rocm",
        "component_attention_backends": "vae=sliding_tile_attn",
        "attention_backend_config": {"fa@rocm": {"splits": 2}, "sliding_tile_attn": {"mask": str(mask)}},
    }
    assert check_settings(load_settings(cli, {}), KNOWN) == []
    assert check_settings(Settings(), {}) == []


def test_problems_of_settings() -> None:
    environ = {"POLYATTN_ATTENTION_BACKEND": "fla", "POLYATTN_COMPONENT_ATTENTION_BACKENDS": "vae=slidin_tile_attn"}
    cli = {
        "decode_attention_backend": "cutlass_mla",
        "attention_backend_config": {
            "fa": {"split": 2},
            "sliding_tile_attn": {"mask": "/absent.json", "steps": -1},
            "flex": {"compile": True},
            "cutlass_mla": {},
        },
    }
    settings = load_settings(cli, environ)
    rest = "`polyattn list` shows all; `polyattn generate` knows those of diffusers too."
    assert check_settings(settings, KNOWN) == [
        (
            "attention_backend='fla' (environment POLYATTN_ATTENTION_BACKEND) is not a known backend. "
            f"Did you mean 'fa' or 'fa3'? {rest}"
        ),
        (
            "decode_attention_backend='cutlass_mla' (command line) is planned: it has no adapter yet and is never "
            "selected. `polyattn list` shows what is available."
        ),
        (
            "component_attention_backends.vae='slidin_tile_attn' (environment POLYATTN_COMPONENT_ATTENTION_BACKENDS) "
            f"is not a known backend. Did you mean 'sliding_tile_attn'? {rest}"
        ),
        f"attention_backend_config of flex (command line): 'flex' is not a known backend. {rest}",
        (
            "attention_backend_config of fa (command line): fa@rocm has no option 'split'. "
            "Did you mean 'splits'? Its options: splits."
        ),
        "attention_backend_config of sliding_tile_attn (command line): mask='/absent.json' does not exist",
        "attention_backend_config of sliding_tile_attn (command line): steps=-1 is out of bounds, expected >= 0",
    ]


def test_a_backend_asked_for_without_its_required_options() -> None:
    settings = load_settings({"component_attention_backends": "vae=sliding_tile_attn"}, {})
    assert check_settings(settings, KNOWN) == [
        (
            "attention_backend_config of sliding_tile_attn (default): "
            "sliding_tile_attn@cuda needs the option 'mask' (path)"
        )
    ]


def test_required_options_may_come_under_several_names(tmp_path: Path) -> None:
    (tmp_path / "mask").write_text("")
    config: dict[str, dict[str, Any]] = {
        "sliding_tile_attn@cuda": {"mask": str(tmp_path / "mask")},
        "sliding_tile_attn": {"steps": 1},
    }
    settings = load_settings({"attention_backend": "sliding_tile_attn", "attention_backend_config": config}, {})
    assert check_settings(settings, KNOWN) == []
    config["sliding_tile_attn"]["steps"] = -1
    settings = load_settings({"attention_backend": "sliding_tile_attn", "attention_backend_config": config}, {})
    assert check_settings(settings, KNOWN) == [
        (
            "attention_backend_config of sliding_tile_attn and sliding_tile_attn@cuda (command line): "
            "steps=-1 is out of bounds, expected >= 0"
        )
    ]


def test_a_near_match_with_a_platform() -> None:
    (problem,) = check_settings(load_settings({"attention_backend": "fa@cud"}, {}), KNOWN)
    assert "is not a known backend. Did you mean 'fa@cuda'" in problem


def test_a_name_on_one_platform_may_be_given_without_a_sequence() -> None:
    settings = load_settings({"attention_backend": "fa", "attention_backend_config": {"fa": {"splits": "x"}}}, {})
    assert check_settings(settings, {"fa": FA_ROCM}) == [
        "attention_backend_config of fa (command line): splits='x': got str, expected int"
    ]


def test_a_platform_that_takes_the_options_is_enough() -> None:
    settings = load_settings({"attention_backend": "fa", "attention_backend_config": "splits=2"}, {})
    assert check_settings(settings, {"fa": (FA, FA_ROCM)}) == []
