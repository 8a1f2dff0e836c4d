"""`polyattn new-plugin`: what it writes, and what it refuses. tests/third_party builds and installs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from polyattn import __version__
from polyattn.cli import new_plugin as module
from polyattn.registry.manager import PluginManager

from .conftest import Run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "plugins" / "_template"


@pytest.fixture(autouse=True)
def an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in module.template_files(folder)}


def project(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def test_under_its_own_name_it_is_the_template(run: Run, tmp_path: Path) -> None:
    assert run("new-plugin", "template").code == 0
    assert contents(tmp_path / "polyattn-template") == contents(TEMPLATE)


def test_what_is_written_is_said(run: Run, tmp_path: Path) -> None:
    shown = run("new-plugin", "acme")
    assert (shown.code, shown.err) == (0, "")
    files = contents(tmp_path / "polyattn-acme")
    assert set(files) <= set(shown.out.split())
    assert 'python -m pip install -e "./polyattn-acme[test]"' in shown.out
    assert "polyattn conform acme\n" in shown.out
    as_json = run("new-plugin", "acme", "--into", str(tmp_path / "polyattn-acme"), "--json")
    folder = str(tmp_path / "polyattn-acme" / "polyattn-acme")
    assert as_json.data == {
        "backend": "acme",
        "platform": "cpu",
        "distribution": "polyattn-acme",
        "module": "polyattn_acme",
        "folder": folder,
        "files": sorted(files),
        "next": [f'python -m pip install -e "{folder}[test]"', "polyattn conform acme"],
    }


@pytest.mark.parametrize(
    "name, distribution, backend",
    [("acme", "polyattn-acme", "acme"), ("my-chip2", "polyattn-my-chip2", "my_chip2"), ("a_b", "polyattn-a-b", "a_b")],
)
def test_only_the_name_changes(run: Run, tmp_path: Path, name: str, distribution: str, backend: str) -> None:
    assert run("new-plugin", name).code == 0
    made = contents(tmp_path / distribution)
    assert not [file for file, text in made.items() if b"template" in (file.encode() + text).lower()]
    back = {
        file.replace(backend, "template"): text.replace(distribution.encode(), b"polyattn-template").replace(
            backend.encode(), b"template"
        )
        for file, text in made.items()
    }
    assert back == contents(TEMPLATE)


def test_a_name_with_the_word_template_in_it(run: Run, tmp_path: Path) -> None:
    assert run("new-plugin", "my-template").code == 0
    made = project(tmp_path / "polyattn-my-template")
    assert made["name"] == "polyattn-my-template"
    assert made["entry-points"]["polyattn.backends"] == {"my_template": "polyattn_my_template.plugin"}


def test_its_metadata_are_those_of_a_plugin(run: Run, tmp_path: Path) -> None:
    assert run("new-plugin", "my-chip").code == 0
    folder = tmp_path / "polyattn-my-chip"
    made = project(folder)
    assert (made["name"], made["version"]) == ("polyattn-my-chip", "0.1.0")
    (needs,) = map(Requirement, made["dependencies"])
    assert needs.name == "polyattn"
    assert __version__ in needs.specifier
    assert "99.0" not in needs.specifier
    assert "license" not in made, "that is the author's to choose"
    jobs = yaml.safe_load((folder / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))["jobs"]
    commands = [step["run"] for step in jobs["tests"]["steps"] if "run" in step]
    assert commands == ['python -m pip install ".[test]"', "python -m pytest", "polyattn conform my_chip --quick"]


@pytest.mark.parametrize(
    "settings", [("--isolated",), ("--config", str(ROOT / "pyproject.toml"))], ids=["ruff", "ours"]
)
@pytest.mark.parametrize("name", ["a", "acme", "a-name-of-many-letters"])
def test_its_code_is_in_style(run: Run, name: str, settings: tuple[str, ...]) -> None:
    """Its author starts without complaints, by the defaults of ruff and by what this repository asks for."""
    assert run("new-plugin", name, "--platform", "cuda").code == 0
    for words in (("check",), ("format", "--check", "--diff")):
        command = [sys.executable, "-m", "ruff", *words, "--no-cache", *settings, f"polyattn-{name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("platform", ["cpu", "cuda", "npu"])
def test_the_platform_is_that_of_its_records(
    run: Run, tmp_path: Path, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"made_for_{platform}"
    assert run("new-plugin", name, "--platform", platform).code == 0
    monkeypatch.syspath_prepend(tmp_path / f"polyattn-made-for-{platform}" / "src")
    plugin = f"polyattn_{name}.plugin"
    manager = PluginManager({"POLYATTN_PLUGINS": name, "POLYATTN_EXTRA_PLUGINS": plugin}, __version__).load()
    report = manager.plugins[name]
    assert (report.state, report.reason, report.backends) == ("ready", "", (f"{name}@{platform}",))
    assert f"polyattn_{name}.kernel" not in sys.modules, "the records import no kernel"


@pytest.mark.parametrize("name", ["Acme", "3d", "_acme", "acme-", "a--b", "a.b", "acmé", "", "a b", "../acme"])
def test_what_is_no_name_is_refused(run: Run, tmp_path: Path, name: str) -> None:
    shown = run("new-plugin", "--json", "--", name)
    assert shown.code == 2
    assert shown.data["error"]["type"] == "ConfigError"
    assert shown.data["error"]["message"].startswith(f"{name!r} is no name for a backend: give lower-case letters")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words, message",
    [
        (("class",), "'class' is a keyword of Python: choose another name, such as 'class-attention'"),
        (("core",), "a plugin named 'core' is installed here: core (polyattn "),
        (("torch-sdpa",), "the name 'torch_sdpa' is taken on cpu, by torch_sdpa@cpu of plugin core (polyattn "),
        (("fa2", "--platform", "cuda"), "the name 'fa2' is taken on cuda, by fa"),
        (("acme", "--platform", "cudaa"), "--platform 'cudaa' is not known. Did you mean 'cuda'? Allowed: cpu, cuda, "),
        (("acme", "--into", "nowhere"), "nowhere/polyattn-acme cannot be written: No such file or directory."),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_what_is_refused_and_why(run: Run, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    shown = run("new-plugin", *words, "--json")
    assert shown.code == 2
    assert shown.data["error"]["type"] == "ConfigError"
    assert message in shown.data["error"]["message"]
    assert not list(tmp_path.iterdir())


def test_a_name_is_free_on_another_platform(run: Run) -> None:
    assert run("new-plugin", "fa2").code == 0, "every vendor may bring an fa2 of its own"


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_nothing_is_overwritten(run: Run, tmp_path: Path, kind: str) -> None:
    there = tmp_path / "polyattn-acme"
    if kind == "folder":
        there.mkdir()
    else:
        there.write_text("mine")
    shown = run("new-plugin", "acme")
    assert shown.code == 2
    assert "polyattn-acme is there already: move it away" in shown.err
    assert list(tmp_path.rglob("*")) == [there]


def test_a_folder_that_cannot_be_made(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    shown = run("new-plugin", "acme")
    assert shown.code == 2
    assert "polyattn-acme cannot be written: Permission denied. Choose another --into" in shown.err


def test_an_installation_without_the_files(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "a" / "b" / "polyattn" / "cli" / "new_plugin.py"))
    shown = run("new-plugin", "acme")
    assert shown.code == 2
    assert "the files to copy are not in this installation of polyattn" in " ".join(shown.err.split())
    assert not list(tmp_path.iterdir())


def test_what_work_leaves_behind_is_not_copied(tmp_path: Path) -> None:
    kept = ("pyproject.toml", "src/polyattn_template/evidence/README.md", "tests/test_conformance.py")
    left = (
        "dist/polyattn_template-0.1.0-py3-none-any.whl",
        "src/polyattn_template/__pycache__/plugin.cpython-311.pyc",
        "src/polyattn_template/evidence/template@cpu.json",
        ".pytest_cache/README.md",
    )
    for name in (*kept, *left):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert set(contents(tmp_path)) == set(kept)


def test_it_imports_no_torch() -> None:
    code = (
        "import sys; from polyattn.cli import main; "
        "code = main(['new-plugin', 'acme']); sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
