"""`python -m polyattn.testing.signatures`: facts from a published package, and what a newer version changed."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from polyattn.errors import ConfigError
from polyattn.testing import signatures
from polyattn.testing.emulators import Signatures
from polyattn.testing.signatures import Source, main, parameters_of, schema_of

OLD = """
import torch
from typing import Optional, overload

if True:
    @overload
    def attend(q): ...
    def attend(q: torch.Tensor, k, v: "Tensor", scale: float = 1.0, *, window=(-1, -1), dtype=torch.float16, **kw): ...

class Wrapper:
    def plan(self, indptr: Optional[torch.Tensor], /, causal: bool = False, *rest): ...
    @staticmethod
    def make(size=4): ...
    def __init__(self, workspace, layout="NHD"): ...
"""
NEW = (
    OLD.replace("scale: float = 1.0, *, window", "sinks=None, scale: Optional[float] = None, *, window")
    .replace("causal: bool = False, *rest", "*rest, causal: bool = False")
    .replace('workspace, layout="NHD"', 'layout="NHD", workspace=None')
    .replace("def make", "def build")
)
YAML = '- func: acme_attend(Tensor q, *, Tensor? mask=None, str layout="BSH", float scale=1.) -> (Tensor, Tensor)\n'
PIECES = (
    'm.def(\n    "acme_attend(Tensor q, *, Tensor? "\n    "mask=None, float scale=1.) "\n    "-> (Tensor, Tensor)");\n'
)
BINARY = b"\x7fELF\x00acme_attend(Tensor q, int heads) -> Tensor\x00other(Tensor q) -> Tensor\x00"
Pack = Callable[[str, str], Path]


def test_what_is_read_from_sources_and_stubs() -> None:
    assert parameters_of(OLD, "attend") == (
        "q: torch.Tensor, k, v: 'Tensor', scale: float = 1.0, *, window=(-1, -1), dtype=OTHER, **kw"
    )
    assert parameters_of(OLD, "Wrapper.plan") == ("indptr: Optional[torch.Tensor], /, causal: bool = False, *rest")
    assert parameters_of(OLD, "Wrapper.make") == "size=4"
    assert parameters_of("class A:\n    async def f(self, x: int | None = None) -> int: ...", "A.f") == (
        "x: int | None = None"
    )
    for name in ("gone", "Wrapper.gone"):
        with pytest.raises(ConfigError, match=f"no {name} in this file: it was removed or renamed"):
            parameters_of(OLD, name)
    with pytest.raises(ConfigError, match="attend is looked for in a Python source, and this file is none"):
        parameters_of("/* C++ */", "attend")
    with pytest.raises(ConfigError, match="Wrapper is no function"):
        parameters_of(OLD, "Wrapper")


def test_what_is_read_from_text_and_from_compiled_libraries() -> None:
    wanted = 'acme::acme_attend(Tensor q, *, Tensor? mask=None, str layout="BSH", float scale=1.) -> (Tensor, Tensor)'
    assert schema_of(YAML.encode(), "acme::acme_attend") == wanted
    assert schema_of(BINARY, "acme::acme_attend") == "acme::acme_attend(Tensor q, int heads) -> Tensor"
    assert schema_of(PIECES.encode(), "acme::acme_attend") == (
        "acme::acme_attend(Tensor q, *, Tensor? mask=None, float scale=1.) -> (Tensor, Tensor)"
    )
    with pytest.raises(ConfigError, match="no schema of acme::attend in this file"):
        schema_of(BINARY, "acme::attend")
    with pytest.raises(ConfigError, match="2 different schemas of acme::acme_attend"):
        schema_of(BINARY + YAML.encode(), "acme::acme_attend")


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """A wheel or an sdist of the package acme."""

    def make(name: str, source: str) -> Path:
        path = tmp_path / name
        if name.endswith(".whl"):
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("acme/attention.py", source)
                archive.writestr("acme/other/attention.py", "")
                archive.writestr("acme/ops.yaml", YAML)
        else:
            with tarfile.open(path, "w:gz") as archive:
                info = tarfile.TarInfo(f"{name.removesuffix('.tar.gz')}/acme/attention.py")
                info.size = len(source)
                archive.addfile(info, io.BytesIO(source.encode()))
        return path

    return make


KEYS = ("acme.attend", "acme.Wrapper.plan", "acme.Wrapper.__init__", "acme.Wrapper.make")


@pytest.fixture
def facts(pack: Pack, tmp_path: Path) -> Path:
    """Facts about acme 1.0, taken by the command."""
    wheel, file = pack("acme-1.0-py3-none-any.whl", OLD), tmp_path / "signatures.json"
    for key in KEYS:
        assert main(["take", str(file), key, "acme==1.0", "acme/attention.py", "--from", str(wheel)]) == 0
    words = ["acme.op", "acme", "acme/ops.yaml", "--name", "acme::acme_attend", "--from", str(wheel)]
    assert main(["take", str(file), *words]) == 0
    return file


def test_facts_hold_the_version_and_the_hash(facts: Path) -> None:
    entries = json.loads(facts.read_text())
    assert set(entries) == {*KEYS, "acme.op"}
    assert entries["acme.attend"] == {
        "package": "acme",
        "version": "1.0",
        "origin": "acme-1.0-py3-none-any.whl",
        "member": "acme/attention.py",
        "parameters": parameters_of(OLD, "attend"),
        "sha256": hashlib.sha256(OLD.encode()).hexdigest(),
    }
    assert (entries["acme.op"]["version"], entries["acme.op"]["name"]) == ("1.0", "acme::acme_attend")


def test_a_newer_version_says_what_changed(facts: Path, pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    before = facts.read_text()
    assert main(["compare", str(facts), "--from", str(pack("acme-1.0-py3-none-any.whl", OLD))]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "acme 1.0 -> 1.0: 5 functions, 0 changed"
    newer = pack("acme-2.0-py3-none-any.whl", NEW)
    assert main(["compare", str(facts), "--package", "acme==2.0", "--from", str(newer)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "acme 1.0 -> 2.0: 5 functions, 4 changed",
        "  acme.Wrapper.__init__: default of workspace: none -> None",
        "  acme.Wrapper.__init__: order: layout, workspace",
        "  acme.Wrapper.make: no Wrapper.make in this file: it was removed or renamed",
        "  acme.Wrapper.plan: causal is keyword only, was positional or keyword",
        "  acme.Wrapper.plan: order: indptr, rest, causal",
        "  acme.attend: added sinks=None at 3",
        "  acme.attend: default of scale: 1.0 -> None",
        "  acme.attend: type of scale: float -> Optional[float]",
    ]
    assert facts.read_text() == before
    assert main(["compare", str(facts), "--package", "acme==2.0", "--from", str(newer), "--write"]) == 1
    entries = json.loads(facts.read_text())
    assert entries["acme.attend"]["version"] == "2.0"
    assert entries["acme.attend"]["sha256"] == hashlib.sha256(NEW.encode()).hexdigest()
    assert entries["acme.Wrapper.make"]["version"] == "1.0", "what could not be read again stays as it was"


def test_types_are_compared_where_some_were_kept() -> None:
    old, new = ({"parameters": text, "sha256": "1"} for text in ("q, scale=1.0", "q: Tensor, scale: float = 1.0"))
    assert signatures.compared("acme.attend", old, new) is None
    back = signatures.compared("acme.attend", new, old)
    assert back is not None
    assert set(back.words) == {"type of q: Tensor -> none", "type of scale: float -> none"}
    moved = signatures.compared("acme.attend", old, {**old, "sha256": "2"})
    assert moved == ("acme.attend", ()), "only the file around it changed"


def test_sdists_checkouts_and_files(facts: Path, pack: Pack, tmp_path: Path) -> None:
    sdist = Source(pack("acme-1.0.tar.gz", OLD))
    assert sdist.read("acme/attention.py") == OLD.encode()
    (tmp_path / "checkout" / "src" / "acme").mkdir(parents=True)
    (tmp_path / "checkout" / "src" / "acme" / "attention.py").write_text(OLD)
    assert Source(tmp_path / "checkout").read("acme/attention.py") == OLD.encode()
    (tmp_path / "attention.py").write_text(OLD)
    assert Source(tmp_path / "attention.py").read("anything.py") == OLD.encode()
    with pytest.raises(ConfigError, match=r"has no file acme/gone\.py: it moved, or this is another package"):
        sdist.read("acme/gone.py")
    (tmp_path / "checkout" / "lib" / "acme").mkdir(parents=True)
    (tmp_path / "checkout" / "lib" / "acme" / "attention.py").touch()
    with pytest.raises(ConfigError, match=r"has several files acme/attention\.py"):
        Source(tmp_path / "checkout").read("acme/attention.py")
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        Source(tmp_path / "nowhere")


def test_the_registry_is_asked_through_pip(
    facts: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = pack("acme-2.0-py3-none-any.whl", OLD)
    asked: list[list[str]] = []

    class Done:
        stderr = "ERROR: No matching distribution found for acme==3.0\n"

        def __init__(self, code: int) -> None:
            self.returncode = code

    def pip(command: list[str], **_: object) -> Done:
        asked.append(command)
        if command[-1] == "acme==3.0":
            return Done(1)
        (Path(command[command.index("-d") + 1]) / wheel.name).write_bytes(wheel.read_bytes())
        return Done(0)

    monkeypatch.setattr(signatures.subprocess, "run", pip)
    assert main(["compare", str(facts), "--package", "acme"]) == 0
    assert asked[0][1:5] == ["-m", "pip", "download", "-q"]
    assert "--no-deps" in asked[0]
    assert "acme 1.0 -> 2.0: 5 functions, 0 changed" in capsys.readouterr().out
    assert main(["compare", str(facts), "--package", "acme==3.0"]) == 2
    assert "pip cannot download acme==3.0: ERROR: No matching" in capsys.readouterr().out
    assert main(["compare", str(facts), "--package", "other"]) == 2
    assert "has nothing of 'other'; it has acme" in capsys.readouterr().err


PLUGINS = Path(__file__).parents[2] / "plugins"
UNHASHED = {
    "sgl-kernel (cpu)": "one build is known by its text alone",
}
"""Packages with facts that have no hash yet. `compare --package NAME==VERSION --write` gives one."""


@pytest.mark.parametrize("file", sorted(PLUGINS.glob("*/tests/signatures.json")), ids=lambda file: file.parts[-3])
def test_the_facts_of_this_repository(file: Path) -> None:
    facts = Signatures(file)
    for key, entry in facts.entries.items():
        assert {"package", "version", "origin", "member"} <= set(entry), key
        assert ("parameters" in entry) != ("schema" in entry), key
        assert "sha256" in entry or entry["package"] in UNHASHED, f"{key}: take it with its hash"
        assert facts.signature(key).parameters or entry.get("parameters") == "", key
