"""The digest of an adapter's code: what a kernel does changes it, how its text is arranged does not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from polyattn.contract import Provider, row
from polyattn.registry.evidence import evidence_file, read_evidence
from polyattn.registry.manager import get_manager
from polyattn.testing import run
from polyattn.testing.code_digest import code_digest
from polyattn.testing.recording import record, refresh

from .conftest import Acme

ADAPTER = '''
"""An adapter."""
import torch
from polyattn.contract import AttentionRequest
from . import tiles
from .helpers import scaled as by_scale

LIMIT = 4


class Kernel:
    """A kernel."""

    def bind(self, request: AttentionRequest):
        # A comment.
        return by_scale(request) + tiles.width(LIMIT) + unused()


def unused():
    return [tiles for tiles in (1, 2)]
'''
HELPERS = '''
from polyattn.adapters.samples import launch_slices

FACTOR = 2


def scaled(x):
    """Scale."""
    return twice(x) if x else launch_slices(1, 2)


def twice(x):
    return FACTOR * x if x > 9 else scaled(x - 1)


def stranger():
    return 5
'''
TILES = """
def width(n):
    from .deep import inner
    return inner(n)
"""
DEEP = """
def inner(n):
    return n
"""
FILES = {"__init__.py": "", "adapter.py": ADAPTER, "helpers.py": HELPERS, "tiles.py": TILES, "deep.py": DEEP}

Digest = Callable[[Mapping[str, str]], str]


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Digest]:
    """The digest of a package with these files."""
    count = 0

    def made(files: Mapping[str, str]) -> str:
        nonlocal count
        count += 1
        folder = tmp_path / str(count) / "stranger_attn"
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        for name in [name for name in sys.modules if name.partition(".")[0] == "stranger_attn"]:
            del sys.modules[name]
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(folder.parent))
            importlib.invalidate_caches()
            rows = (row(family="dense", dtype="float32", head_dim=64),)
            return code_digest([Provider("stranger", rows, "stranger_attn.adapter:Kernel")])

    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] == "stranger_attn"]:
        del sys.modules[name]


def changed(name: str, *pairs: tuple[str, str], **more: str) -> dict[str, str]:
    text = FILES[name]
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return {**FILES, name: text, **{key.replace("_py", ".py"): value for key, value in more.items()}}


SAME = {
    "comment": changed("adapter.py", ("# A comment.", "# Another.")),
    "docstring": changed("helpers.py", ('"""Scale."""', '"""Scale it."""')),
    "annotation": changed("adapter.py", ("request: AttentionRequest)", "request: object) -> int")),
    "unreached": changed("helpers.py", ("return 5", "return 6")),
    "layout": changed("helpers.py", ("return FACTOR * x if", "return (FACTOR\n        * x) if")),
    "renamed helper": changed("helpers.py", ("twice", "doubled")),
    "renamed constant": changed("adapter.py", ("LIMIT", "MOST")),
    "renamed import": changed("adapter.py", ("by_scale", "scale_by")),
    "renamed at both ends": {
        **changed("adapter.py", ("import scaled as", "import times as")),
        "helpers.py": HELPERS.replace("scaled", "times"),
    },
    "moved": {
        **changed("adapter.py", ("from .helpers import", "from .far.away import")),
        "helpers.py": "",
        "far/__init__.py": "",
        "far/away.py": HELPERS,
    },
    "moved module": {
        **changed("adapter.py", ("from . import tiles", "from .far import tiles")),
        "far/__init__.py": "",
        "far/tiles.py": TILES.replace("from .deep", "from ..deep"),
    },
    "for checkers": changed(
        "adapter.py",
        ("LIMIT = 4", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor\nLIMIT = 4"),
    ),
}
OTHER = {
    "constant": changed("adapter.py", ("LIMIT = 4", "LIMIT = 5")),
    "method": changed("adapter.py", ("+ unused()", "- unused()")),
    "helper": changed("helpers.py", ("x > 9", "x > 8")),
    "constant of a helper": changed("helpers.py", ("FACTOR = 2", "FACTOR = 3")),
    "through a module and a local import": changed("deep.py", ("return n", "return n + 1")),
    "another helper": changed("helpers.py", ("return twice(x)", "return stranger()")),
    "core's helper": changed("helpers.py", ("launch_slices(1, 2)", "len((1, 2))")),
    "at import": changed("helpers.py", ("FACTOR = 2", "FACTOR = 2\nprint(FACTOR)")),
    "decorator": changed("helpers.py", ("def twice", "@staticmethod\ndef twice")),
    "default": changed("helpers.py", ("def twice(x)", "def twice(x=1)")),
    "for Triton": changed("helpers.py", ("def twice(x)", "def twice(x: 'tl.constexpr')")),
    "a kernel": {**FILES, "kernel.cu": "__global__ void attend() {}"},
    "base": changed("adapter.py", ("class Kernel:", "class Kernel(dict):")),
    "for checkers, or else": changed(
        "adapter.py",
        (
            "LIMIT = 4",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    LIMIT = 4\nelse:\n    LIMIT = 7",
        ),
    ),
}


@pytest.mark.parametrize("files", SAME.values(), ids=SAME)
def test_what_changes_no_result_does_not_count(digest: Digest, files: Mapping[str, str]) -> None:
    assert digest(files) == digest(FILES)


@pytest.mark.parametrize("files", OTHER.values(), ids=OTHER)
def test_what_may_change_a_result_counts(digest: Digest, files: Mapping[str, str]) -> None:
    assert digest(files) != digest(FILES)


FACE = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from .helpers import scaled as scaled
def __getattr__(name):
    from . import helpers
    return getattr(helpers, name)
"""
"""A package whose names are imported when they are first used."""


def test_names_that_are_imported_when_used_count_as_what_they_mean(digest: Digest) -> None:
    by_face = ADAPTER.replace("from .helpers import", "from .face import")
    assert by_face != ADAPTER
    faced = {**FILES, "adapter.py": by_face, "face.py": FACE}
    assert digest(faced) == digest(FILES)
    assert digest({**faced, "helpers.py": HELPERS.replace("FACTOR = 2", "FACTOR = 3")}) != digest(FILES)


def test_core_s_own_helpers_count(digest: Digest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of modules without torch too."""
    from polyattn.testing import code_digest as module

    before, real = digest(FILES), module.file_of
    edited = tmp_path / "samples.py"
    path = real("polyattn.adapters.samples")
    assert path is not None
    edited.write_text(path.read_text().replace("def launch_slices(", "def launch_slices(_more=0, *"))
    monkeypatch.setattr(module, "file_of", lambda name: edited if name == "polyattn.adapters.samples" else real(name))
    assert digest(FILES) != before


# --- evidence that follows its code


def recorded(acme: Acme) -> tuple[Path, Callable[[], bool]]:
    """The folder of a plugin with evidence, and whether that reads stale now."""
    folder = acme()
    info = get_manager().backends["acme", "cpu"]
    origin = get_manager().owner(info).origin
    file = record(run("acme", device="cpu", dtypes=["float32"], per_row=1))
    assert len(read_evidence(origin, "acme", "cpu").code) == 16
    assert file == evidence_file(origin, "acme", "cpu")

    def stale() -> bool:
        read_evidence.cache_clear()
        return read_evidence(origin, "acme", "cpu").stale

    assert not stale()
    return folder, stale


def test_evidence_follows_code_that_was_moved(acme: Acme) -> None:
    folder, stale = recorded(acme)
    assert refresh("acme", "cpu") is None
    text = (folder / "adapter.py").read_text()
    (folder / "old.py").write_text(text.replace('"""The reference under another name."""', '"""Moved."""'))
    (folder / "adapter.py").write_text("from .old import Acme\n")
    importlib.invalidate_caches()
    assert stale()
    assert refresh("acme", "cpu") is not None
    assert not stale()
    assert refresh("acme", "cpu") is None


def test_evidence_does_not_follow_other_code(acme: Acme) -> None:
    folder, stale = recorded(acme)
    path = folder / "adapter.py"
    path.write_text(path.read_text() + "\n    more = 5\n")
    assert stale()
    assert refresh("acme", "cpu") is None
    assert stale()


def test_evidence_of_a_run_that_kept_no_code_stays_stale(acme: Acme) -> None:
    folder, stale = recorded(acme)
    file = folder / "evidence" / "acme@cpu.json"
    file.write_text(file.read_text().replace('"code": "', '"before": "'))
    (folder / "adapter.py").write_text((folder / "adapter.py").read_text() + "# more\n")
    assert stale()
    assert refresh("acme", "cpu") is None


def test_the_evidence_of_this_repository_follows_its_code() -> None:
    manager = get_manager()
    behind = []
    for info in manager.backends.values():
        origin = manager.owner(info).origin
        found = read_evidence(origin, info.name, info.platform)
        for one in (found, *found.others):
            tried = [p for p in info.providers if p.name not in one.absent and not p.planned]
            if one.stale and one.code and one.code == code_digest(tried):
                behind.append(info.id)
    assert not behind, "run: polyattn conform --refresh"
