"""docs/configuration.md says what the code does: its values, command lines and files.

Its tables of settings and variables are written by docs/tables.py, and its Python blocks are run by tests/docs.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from polyattn.registry.platforms import CORE_PLATFORMS
from polyattn.selection.config import Settings, load_settings, parse_backend_config

PAGE = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    return str(found)


def rows(title: str) -> list[list[str]]:
    """The cells of the body of the only table of a section."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def block(language: str, title: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", section(title), re.M | re.S)
    return str(found)


def test_the_table_of_values_is_the_code() -> None:
    shown = [(pair.strip("`"), ast.literal_eval(value.strip("`"))) for pair, value in rows("Options of backends")]
    assert len(shown) > 8
    for pair, value in shown:
        read = parse_backend_config(f"{pair},last=1")
        assert read == {"a": value, "last": 1}
        assert type(read["a"]) is type(value)


def command_lines() -> list[dict[str, Any]]:
    lines = [line for text in re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S) for line in text.splitlines()]
    found = []
    for line in lines:
        words = shlex.split(line)
        found.append({name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)})
    return found


@pytest.mark.parametrize("cli", command_lines(), ids=lambda cli: cli["attention-backend-config"][:40])
def test_the_command_lines_parse(cli: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "options.yaml").write_text("skip_time_steps: 10\n")
    options = load_settings(cli, {}).attention_backend_config
    selected = cli.get("attention-backend")
    assert set(options) == ({selected} if selected else {"sliding_tile_attn", "video_sparse_attn"})
    assert all(options.values())


def test_the_two_ways_to_nest_are_one() -> None:
    nested = [cli for cli in command_lines() if "attention-backend" not in cli]
    assert len(nested) == 2
    assert load_settings(nested[0], {}) == load_settings(nested[1], {})


@pytest.mark.parametrize("language", ["yaml", "toml"])
def test_the_config_files(tmp_path: Path, language: str) -> None:
    file = tmp_path / f"polyattn.{language}"
    file.write_text(block(language, "Config file"))
    settings = load_settings(environ={"POLYATTN_CONFIG": str(file)})
    assert settings == Settings(
        attention_backend="torch_sdpa",
        decode_attention_backend="torch_native",
        kv_cache_dtype="bfloat16",
        page_size=64,
        strict=True,
        component_attention_backends={"text_encoder": "torch_sdpa", "transformer.cross": "flex_attention"},
        attention_backend_config={
            "sliding_tile_attn": {"mask_strategy_file_path": "/abs/path/to/mask_strategy.json", "skip_time_steps": 10},
            "video_sparse_attn": {"sparsity": 0.5},
        },
        sources=settings.sources,
    )


def test_the_table_of_platforms_is_complete() -> None:
    assert {row[0].strip("`") for row in rows("Devices")} == {info.name for info in CORE_PLATFORMS}
