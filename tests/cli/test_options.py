"""Flags come from tables: those of a request from its fields, the shared ones from `cli.options`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import polyattn
from polyattn import AttentionRequest, ConfigError
from polyattn.cli.app import app
from polyattn.cli.options import OPTIONS, Option, options_of, settings_of, variables_of, with_options
from polyattn.cli.questions import ask
from polyattn.cli.request_flags import DECIDED, given_fields, request_flags
from polyattn.contract import request_fields
from polyattn.contract.request import option
from polyattn.envvars import ENVVARS
from polyattn.selection.config import Settings

from .conftest import Run


def params_of(command: str) -> dict[str, Any]:
    found = typer.main.get_command(app)
    for word in command.split():
        found = found.commands[word]  # type: ignore[attr-defined]
    return {parameter.name: parameter for parameter in found.params}


# -------------------------------------------------------------------------------------------- a request's own flags


def test_every_field_of_a_request_is_a_flag_of_explain_or_is_decided_by_another_word() -> None:
    fields = [field.name for field in request_fields()]
    flags = [flag.name for flag in request_flags()]
    assert [name for name in fields if name not in DECIDED] == flags
    assert set(DECIDED) <= set(fields)
    params = params_of("explain")
    assert set(flags) <= set(params)
    for flag in request_flags():
        assert flag.flag in params[flag.name].opts


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Later(AttentionRequest):
    """A request of a later version."""

    colour: str = option("", doc="S5: the colour of the rows")
    shades: int = option(0, doc="how many shades")
    weights: tuple[int, int] = option((0, 0), doc="two weights")
    bright: bool = option(False, doc="bright rows")
    dim: bool | None = option(None, doc="dim rows")
    share: float = option(0.0, doc="a share")
    hues: tuple[str, ...] = option((), doc="hues")


LATER = {
    "colour": ("word", "red", "red"),
    "shades": ("whole", 3, 3),
    "weights": ("pair", "3, 4", (3, 4)),
    "bright": ("switch", True, True),
    "dim": ("either", False, False),
    "share": ("number", 0.5, 0.5),
    "hues": ("words", "a, b", ("a", "b")),
}


def test_a_field_that_is_added_has_a_flag_by_itself() -> None:
    flags = {flag.name: flag for flag in request_flags(_Later)}
    assert {name: flags[name].kind for name in LATER} == {name: kind for name, (kind, *_) in LATER.items()}
    assert (flags["colour"].help, flags["colour"].section) == ("The colour of the rows.", "S5")
    read = given_fields({name: typed for name, (_, typed, _) in LATER.items()}, _Later)
    assert read == {name: value for name, (*_, value) in LATER.items()}
    assert given_fields({"bright": False, "dim": None, "colour": None}, _Later) == {}
    told = [one.flag for one in flags["dim"].options()]
    assert told == ["--dim", "--no-dim"]
    assert all(flags[name].example for name, (kind, *_) in LATER.items() if kind not in ("switch", "either"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shades": -1}, "--shades -1 is too small: give a whole number, 0 or more"),
        ({"weights": "3"}, "--weights '3' is not a,b: give two whole numbers, each 0 or more"),
        ({"weights": "3,-1"}, "--weights '3,-1' is not a,b: give two whole numbers, each 0 or more"),
        ({"share": float("inf")}, "--share inf is no finite number"),
    ],
)
def test_what_such_a_flag_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        given_fields(given, _Later)
    assert message in str(caught.value)


@pytest.mark.parametrize("flag", [flag for flag in request_flags() if flag.example], ids=lambda flag: flag.name)
def test_the_example_of_a_flag_is_one_of_its_values(flag: Any) -> None:
    typed = {"whole": int, "number": float}.get(flag.kind, str)(flag.example)
    assert flag.read(typed) != getattr(AttentionRequest(), flag.name) or flag.name in ("head_dim", "dtype")


# --------------------------------------------------------------------- block-sparse and linear calls can be asked about


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ((), {"block_map": True, "block_shape": [64, 64], "layout": "BHSD"}),
        (("--block-shape", "128, 64", "--block-sizes"), {"block_shape": [128, 64], "block_sizes": True}),
        (("--lse", "--kv-heads", "8"), {"lse": True, "kv_heads": 8}),
    ],
)
def test_block_sparse_can_be_asked_about(run: Run, words: tuple[str, ...], fields: dict[str, Any]) -> None:
    data = run("explain", "--family", "block_sparse", "--json", *words).data
    assert {name: data["request"][name] for name in fields} == fields
    assert (data["backend"], data["lowerings"]) == ("torch_sdpa", ["expand_block_map"])


def test_a_block_sparse_question_elsewhere_has_its_kernels(run: Run) -> None:
    words = ("--family", "block_sparse", "--block-shape", "128,64", "--assume-platform", "cuda:sm90", "--json")
    assert run("explain", *words).data["backend"] == "triton"
    odd = run("explain", *words[:3], "48,48", *words[4:]).data
    assert (odd["lowerings"], odd["request"]["block_shape"]) == (["expand_block_map"], [48, 48])


def test_a_method_makes_the_map_itself() -> None:
    """So who asks about one asks about a call with a place."""
    with pytest.raises(ConfigError, match=r"--method sta is a backend, .* add --attention-backend sliding_tile_attn"):
        ask({"family": "block_sparse", "method": "sta"})


def test_a_question_about_a_block_sparse_call_is_what_it_asks() -> None:
    q, k = (torch.zeros(1, 128, heads, 64, dtype=torch.bfloat16) for heads in (8, 2))
    shape = {"block_map": torch.ones(1, 1, 2, 2, dtype=torch.bool), "block_shape": (64, 64)}
    wanted = polyattn.explain(polyattn.block_sparse_attention, q, k, k, **shape).request
    found = ask({"family": "block_sparse", "heads": 8, "kv_heads": 2, "head_dim": 64}, {"features": wanted.features})
    assert found.normalised() == dataclasses.replace(wanted, batch_bucket=0, q_bucket=0, k_bucket=0)


@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_a_question_about_a_linear_call_is_what_it_asks(layout: str) -> None:
    q, v = (torch.zeros(1, 8, heads, 64, dtype=torch.bfloat16) for heads in (2, 4))
    gate = torch.zeros(1, 8, 4)
    wanted = polyattn.explain(
        polyattn.linear_attention, q, q, v, gate=gate, beta=gate, state_layout=layout, backend="reference"
    ).request
    words = {"family": "linear", "heads": 4, "kv_heads": 2, "head_dim": 64, "state_layout": layout}
    found = ask(words, {"features": wanted.features})
    assert found.normalised() == dataclasses.replace(wanted, batch_bucket=0, q_bucket=0, k_bucket=0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"block_shape": "64,64"}, "--block-shape: family dense has no block map that this could be of: add --family"),
        ({"block_sizes": True, "family": "paged"}, "--block-sizes: family paged has no block map that this could be"),
        ({"block_shape": "64", "family": "block_sparse"}, "--block-shape '64' is not block_q,block_k: give two whole"),
        ({"block_shape": "0,64", "family": "block_sparse"}, "give two whole numbers, each 1 or more"),
        ({"state_layout": "VK"}, "--state-layout: family dense has no recurrent state that this could be of: add"),
        ({"state_layout": "KV", "family": "mla"}, "--state-layout: family mla has no recurrent state that this could"),
        ({"state_layout": "HV", "family": "linear"}, "--state-layout 'HV' is not known. Allowed: KV, VK"),
        ({"kv_layout": "HND"}, "--kv-layout: family dense has no KV cache that this could be of: add --family paged"),
        ({"transform": "vmapp"}, "--transform 'vmapp' is not known. Did you mean 'vmap'?"),
    ],
)
def test_wrong_flags(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ask(flags)
    assert message in str(caught.value)


def test_flags_that_no_list_here_names_reach_the_request(run: Run) -> None:
    words = ("--large", "--misaligned", "--transform", "vmap", "--batch-invariant", "--chunk", "64", "--alibi")
    found = run("explain", *words, "--json")
    assert found.code == 3
    for word in ("large", "misaligned", "transform=vmap", "batch_invariant", "chunk=64", "alibi"):
        assert word in found.data["error"]["message"]


def test_the_name_that_servers_have_for_it_is_taken_too(run: Run) -> None:
    words = ("--phase", "decode", "--attention-backend", "reference", "--json", "--kv-cache-dtype", "fp8_e4m3")
    assert run("explain", *words).data["request"]["kv_dtype"] == "fp8_e4m3"


# ------------------------------------------------------------------------------------------------- the shared flags


def test_every_setting_has_one_flag_and_config_check_takes_all() -> None:
    settings = {field.name for field in dataclasses.fields(Settings)} - {"sources"}
    flags = [one.name for one in OPTIONS if one.setting]
    assert sorted(flags) == sorted(settings)
    linear = {f"linear_attn_{phase}backend" for phase in ("", "prefill_", "decode_")}
    assert {one.name for one in options_of("config check")} == settings | linear
    assert len({flag for one in OPTIONS for flag in one.flags}) == sum(len(one.flags) for one in OPTIONS)


@pytest.mark.parametrize("command", sorted({command for one in OPTIONS for command in one.commands}))
def test_a_command_takes_what_the_table_says(command: str) -> None:
    params = params_of(command)
    shared = {one.name: one for one in OPTIONS}
    taken = {name for name in params if name in shared}
    own = {flag.name for flag in request_flags()} if command == "explain" else set()
    assert taken - own == {one.name for one in options_of(command)}
    for one in options_of(command):
        assert params[one.name].opts == list(one.flags)
        assert params[one.name].help.startswith(one.help)


def test_a_switch_that_is_not_given_leaves_its_setting_alone() -> None:
    assert settings_of({"strict": False, "page_size": None}) == {"strict": None, "page_size": None}
    assert settings_of({"strict": True, "disable_cuda_graph": True}) == {"strict": True}


def test_settings_for_another_process_are_its_variables() -> None:
    given = {"attention_backend": "fa3", "strict": True, "attention_backend_config": "a=1", "page_size": None}
    assert variables_of(given) == {
        "POLYATTN_ATTENTION_BACKEND": "fa3",
        "POLYATTN_STRICT": "1",
        "POLYATTN_ATTENTION_BACKEND_CONFIG": "a=1",
    }
    assert {f"POLYATTN_{one.name.upper()}" for one in options_of("trace")} <= set(ENVVARS)
    assert variables_of({"strict": False}) == {}


def test_strict_of_the_environment_stays(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_STRICT", "1")
    (entry,) = run("config", "check", "--json").data["settings"]
    assert (entry["value"], entry["source"]) == (True, "environment POLYATTN_STRICT")
    monkeypatch.setenv("POLYATTN_STRICT", "0")
    (entry,) = run("config", "check", "--strict", "--json").data["settings"]
    assert (entry["value"], entry["source"]) == (True, "command line")


@pytest.mark.parametrize("phase, own", [("prefill", "reference"), ("decode", "torch_native")])
def test_the_backend_of_linear_attention_is_said_for_each_phase(run: Run, phase: str, own: str) -> None:
    flags = ("--linear-attn-prefill-backend", "reference", "--linear-attn-backend", "torch_native")
    found = run("explain", "--family", "linear", "--phase", phase, *flags, "--json")
    assert found.data["backend"] == own
    refused = run("explain", *flags)
    assert refused.code == 2
    said = " ".join(refused.err.split())
    assert "is about linear attention, and the request is of family dense: add --family linear" in said


def test_one_file_says_what_a_command_takes() -> None:
    """A command made of nothing but the table: `serve` will be one."""
    seen: dict[str, Any] = {}
    mine = Option("colour", str, "The colour.", "NAME", "Own", usual="red", also=("--hue",))

    @with_options("generate", [mine])
    def command(*, given: Mapping[str, Any]) -> None:
        """Do it."""
        seen.update(given)

    small = typer.Typer()
    small.command()(command)
    result = CliRunner().invoke(small, ["--page-size", "4", "--hue", "blue", "--disable-cuda-graph"])
    assert result.exit_code == 0, result.output
    expected = {"page_size": 4, "colour": "blue", "disable_cuda_graph": True, "kv_cache_dtype": None}
    assert {name: seen[name] for name in expected} == expected
    assert set(seen) == {one.name for one in options_of("generate")} | {"colour"}
    assert "Do it." in CliRunner().invoke(small, ["--help"]).output
