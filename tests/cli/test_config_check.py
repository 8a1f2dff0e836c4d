"""`polyattn config check`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import polyattn
from polyattn.cli.options import options_of
from polyattn.registry.manager import reset_manager

from .conftest import Run

CHECK = ("config", "check")
SOURCE = Path(polyattn.__file__).parent


def test_nothing_is_configured(run: Run) -> None:
    shown = run(*CHECK, "--json")
    assert (shown.code, shown.data) == (0, {"settings": [], "problems": [], "warnings": []})
    assert "Nothing is configured" in run(*CHECK).out


def test_settings_and_their_sources(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "polyattn.toml"
    file.write_text(
        'attention-backend = "flex_attention"\npage-size = 64\n[component-attention-backends]\nvae = "torch_spda"\n'
    )
    monkeypatch.setenv("POLYATTN_ATTENTION_BACKEND", "torch_sdpa")
    words = (*CHECK, "--file", str(file), "--component-attention-backends", "text_encoder=flex_attention", "--json")
    shown = run(*words)
    found = {entry["name"]: (entry["value"], entry["source"]) for entry in shown.data["settings"]}
    assert found == {
        "attention_backend": ("torch_sdpa", "environment POLYATTN_ATTENTION_BACKEND"),
        "page_size": (64, f"config file {file}"),
        "component_attention_backends.vae": ("torch_spda", f"config file {file}"),
        "component_attention_backends.text_encoder": ("flex_attention", "command line"),
    }
    assert shown.code == 4  # there is none of that name
    assert [problem.partition(" (")[0] for problem in shown.data["problems"]] == [
        "component_attention_backends.vae='torch_spda'"
    ]


def test_options_of_backends(run: Run) -> None:
    words = (*CHECK, "--attention-backend", "flex_attention", "--attention-backend-config", "compile=never")
    shown = run(*words, "--json")
    assert shown.code == 0
    names = [entry["name"] for entry in shown.data["settings"]]
    assert names == ["attention_backend", "attention_backend_config.flex_attention.compile"]
    text = run(*words)
    assert text.code == 0
    assert "No problem found." in text.out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--attention-backend", "torch_spda"), "is not a known backend. Did you mean 'torch_sdpa'"),
        (("--component-attention-backends", "vae=torch_spda"), "component_attention_backends.vae='torch_spda'"),
        (
            ("--attention-backend", "flex_attention", "--attention-backend-config", "compil=never"),
            "has no option 'compil'. Did you mean 'compile'",
        ),
        (
            ("--attention-backend-config", "flex_attention.compile=sometimes"),
            "compile='sometimes' is not one of",
        ),
        (
            ("--attention-backend-config", "sliding_tile_attn.mask_strategy_file_path=/nowhere.json"),
            "mask_strategy_file_path='/nowhere.json' does not exist",
        ),
        (
            ("--attention-backend", "sliding_tile_attn"),
            "[t, h, w]; where there is none, sta_mode=STA_searching begins one",
        ),
        (
            ("--component-attention-backends", "transformer=sliding_tile_attn"),
            "needs the option 'mask_strategy_file_path' (path) where sta_mode='STA_inference'",
        ),
        (
            ("--attention-backend-config", "sliding_tile_attn.sta_mode=STA_searching"),
            "needs the option 'sta_search_path' (str) where sta_mode='STA_searching': folder of the losses of a search",
        ),
        (
            ("--linear-attn-backend", "torch_natve"),
            "linear_attn_backend='torch_natve' (command line) is not a known backend. Did you mean 'torch_native'",
        ),
        (
            ("--linear-attn-decode-backend", "torch_sdpa"),
            "linear_attn_decode_backend='torch_sdpa' (command line) serves no linear attention: name ",
        ),
        (("--linear-attn-prefill-backend", "fla!"), "linear_attn_prefill_backend='fla!' (command line) is not a known"),
    ],
)
def test_what_parses_and_is_wrong_is_4(run: Run, words: tuple[str, ...], problem: str) -> None:
    shown = run(*CHECK, *words, "--json")
    assert shown.code == 4
    assert any(problem in found for found in shown.data["problems"])
    text = run(*CHECK, *words)
    assert text.code == 4
    assert "wrong " in text.out
    assert "No problem found." not in text.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--component-attention-backends", "vae"), "is not component=backend"),
        (("--attention-backend-config", "{broken"), "attention_backend_config (command line)"),
        (("--kv-cache-dtype", "fp8"), "kv_cache_dtype='fp8'"),
        (("--speculative-attention-mode", "both"), "is not 'prefill' or 'decode'"),
        (("--file", "/nowhere/polyattn.yaml"), "/nowhere/polyattn.yaml"),
        (("--attention-backend-config", "sparsity=0.5"), "selects no backend"),
    ],
)
def test_what_does_not_parse_is_2(run: Run, words: tuple[str, ...], message: str) -> None:
    shown = run(*CHECK, *words, "--json")
    assert (shown.code, shown.data["error"]["type"]) == (2, "ConfigError")
    assert message in shown.data["error"]["message"]


WRONG = {
    "POLYATTN_TUNING": ("on", "POLYATTN_TUNING='on' is not known. Allowed: use, off, online"),
    "POLYATTN_VALIDATE": ("maybe", "POLYATTN_VALIDATE='maybe' is not a switch: use 1 or 0"),
    "POLYATTN_SGLANG_DIFFUSION": ("maybe", "POLYATTN_SGLANG_DIFFUSION='maybe' is not a switch: use 1 or 0"),
    "POLYATTN_STRICT": ("maybe", "POLYATTN_STRICT='maybe' is not a switch: use 1 or 0"),
    "POLYATTN_REFERENCE_MEMORY_GB": ("lots", "POLYATTN_REFERENCE_MEMORY_GB='lots' is not a positive number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_variable_that_does_not_parse_is_2(name: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is no setting: a call raises it."""
    value, message = WRONG[name]
    monkeypatch.setenv(name, value)
    shown = run(*CHECK, "--json")
    assert (shown.code, shown.data["error"]["type"]) == (2, "ConfigError")
    assert shown.data["error"]["message"].startswith(message)
    assert "No problem found." not in run(*CHECK).out


def test_all_that_does_not_parse_is_told_at_once(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "polyattn.yaml"
    file.write_text("page-size: sixty\nkv-cache-dtype: fp8\nstrict: maybe\n")
    for name, (value, _) in WRONG.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("POLYATTN_PLUGIN", "cuda")
    lines = run(*CHECK, "--file", str(file), "--json").data["error"]["message"].split("\n")
    begins = ("kv_cache_dtype='fp8'", "page_size='sixty'", "strict='maybe'", *WRONG, "environment POLYATTN_PLUGIN")
    assert len(lines) == len(begins)
    assert all(any(line.startswith(begin) for line in lines) for begin in begins)


def test_every_variable_that_is_parsed_is_checked() -> None:
    """Whoever reads a further switch or number adds it to READ_LATER."""
    read = re.compile(r"\b(?:flag|number)\(\s*\"(POLYATTN_\w+)\"")
    found = {name for path in SOURCE.rglob("*.py") for name in read.findall(path.read_text(encoding="utf-8"))}
    assert found == set(WRONG) - {"POLYATTN_TUNING"}


def test_a_variable_that_nothing_reads_is_4(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_PLUGIN", "cuda")
    shown = run(*CHECK, "--json")
    assert shown.code == 4
    (problem,) = shown.data["problems"]
    assert problem.startswith("environment POLYATTN_PLUGIN is set, but polyattn does not read it.")
    assert problem.endswith("Did you mean 'POLYATTN_PLUGINS' or 'POLYATTN_EXTRA_PLUGINS'?")


def test_the_file_that_the_environment_names(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "polyattn.json"
    file.write_text('{"strict": true}')
    monkeypatch.setenv("POLYATTN_CONFIG", str(file))
    (entry,) = run(*CHECK, "--json").data["settings"]
    assert entry == {"name": "strict", "value": True, "source": f"config file {file}"}


ABSENT = """
from polyattn.contract import hookimpl
from polyattn.contract import *

ROWS = (row(family="dense", dtype="float32", head_dim=64),)


@hookimpl
def polyattn_register_platforms():
    yield PlatformInfo("board", device_type="board", detect=f"{__name__}:find")
    yield PlatformInfo("card", device_type="card", detect=f"{__name__}:find")


def find():
    return DeviceReport(present=False, detail="there is no such board")


@hookimpl
def polyattn_register_backends():
    here = Provider("here", ROWS, "polyattn.backends.reference_backend:Reference")
    gone = Provider("gone", ROWS, "m:C", (Requirement("acme-attention", hint="pip install acme-attention"),))
    yield BackendInfo("acme", "cpu", (here, gone), summary="Acme's", aliases=(Alias("acme_two", ("dense",), "gone"),))
    yield BackendInfo("lacking", "cpu", (gone,), summary="its library is not here")
    yield BackendInfo("onboard", "board", (gone,), summary="its device is not here")
    yield BackendInfo("everywhere", "board", (here,), summary="on two devices")
    yield BackendInfo("everywhere", "card", (here,), summary="on two devices")
"""


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("acme", ""),
        ("acme@cpu", ""),
        ("acme_two", "acme-attention is not installed; pip install acme-attention"),
        ("acme/gone", "acme-attention is not installed; pip install acme-attention"),
        ("acme/gone@cpu", "acme-attention is not installed; pip install acme-attention"),
        ("acme/here", ""),
        ("lacking", "acme-attention is not installed; pip install acme-attention"),
        ("onboard", "no board device: there is no such board"),
        ("everywhere", "there is no device of board, card"),
    ],
)
def test_a_backend_that_cannot_be_used_here_is_a_warning(
    run: Run, monkeypatch: pytest.MonkeyPatch, plugin: Callable[[str, str], str], backend: str, why: str
) -> None:
    plugin("acme", ABSENT)
    monkeypatch.setenv("POLYATTN_ATTENTION_BACKEND", backend)
    named = f"attention_backend={backend!r} (environment POLYATTN_ATTENTION_BACKEND)"
    warning = f"{named} cannot be used on this machine: {why}; fine if the run is elsewhere"
    for command in (CHECK, ("doctor",)):
        shown = run(*command, "--json")
        assert (shown.code, shown.data["problems"]) == (0, [])
        assert [said for said in shown.data["warnings"] if "attention_backend=" in said] == [warning] * bool(why)
    assert ("No problem found." in run(*CHECK).out) is not bool(why)


def test_backends_of_linear_attention_are_checked_as_a_run_names_them(run: Run) -> None:
    words = ("--linear-attn-backend", "torch_native", "--linear-attn-decode-backend", "fla")
    shown = run(*CHECK, *words, "--json")
    assert (shown.code, shown.data["problems"]) == (0, [])
    assert {entry["name"]: (entry["value"], entry["source"]) for entry in shown.data["settings"]} == {
        "linear_attn_backend": ("torch_native", "command line"),
        "linear_attn_decode_backend": ("fla", "command line"),
    }
    (warning,) = shown.data["warnings"]
    assert warning.startswith("linear_attn_decode_backend='fla' (command line) cannot be used on this machine: ")


def test_all_that_chooses_a_backend_in_a_run_is_checked() -> None:
    taken = {command: {option.name for option in options_of(command)} for command in ("serve", "generate")}
    named = {name for names in taken.values() for name in names if "backend" in name}
    assert named <= {option.name for option in options_of("config check")}


def test_components_are_warned_of_too(run: Run, plugin: Callable[[str, str], str]) -> None:
    plugin("acme", ABSENT)
    words = ("--component-attention-backends", "vae=lacking", "--attention-backend", "acme")
    shown = run(*CHECK, *words)
    assert shown.code == 0
    assert "warning  component_attention_backends.vae='lacking' (command line) cannot be used" in shown.out
    assert "No problem beside the warnings." in shown.out


def test_a_plugin_to_leave_out_that_nobody_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slip there lets in what was to stay out. Who is to be allowed may be installed elsewhere."""
    monkeypatch.setenv("POLYATTN_DISABLE", "ROCM, polyattn-cdua")
    monkeypatch.setenv("POLYATTN_PLUGINS", "cuda,polyattn-triton,acme")
    reset_manager()
    try:
        shown = run(*CHECK, "--json")
        assert shown.code == 4
        (problem,) = shown.data["problems"]
        assert problem.startswith("POLYATTN_DISABLE: no plugin is named 'polyattn-cdua'. Did you mean 'cuda'? Known: ")
        assert any("POLYATTN_PLUGINS: no plugin is named 'acme'" in warning for warning in shown.data["warnings"])
        examined = run("doctor", "--json")
        assert problem in examined.data["problems"]
        states = {one["name"]: one["state"] for one in examined.data["plugins"]}
        assert (states["rocm"], states["triton"], states["cuda"]) == ("not allowed", "ready", "ready")
    finally:
        monkeypatch.undo()
        reset_manager()
