"""A sixth vendor: a device that torch knows by a made-up name only (PrivateUse1), and a package made from the template.

Nothing of core is changed: the package brings the platform, its detection and the backend.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .conftest import Fresh

HERE = Path(__file__).parent / "board"
PLATFORM = '''

def find_board() -> DeviceReport:
    """An emulated board is always there."""
    return DeviceReport(present=True, detail="emulated in host memory", archs=("b1",))


@hookimpl
def polyattn_register_platforms() -> Iterable[PlatformInfo]:
    """A device kind that polyattn does not know."""
    yield PlatformInfo("acme", device_type="acme", detect=f"{__name__}:find_board", archs=("b1",))


@hookimpl
def polyattn_register_backends('''


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that registers the device with torch: host memory under another name."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("not run: the emulated device needs a C++ compiler (CXX)")
    root, library = Path(torch.__file__).parent, tmp_path_factory.mktemp("board") / "board.so"
    include = [f"-I{root / 'include'}", f"-I{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    link = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    words = [compiler, "-O0", "-std=c++20", "-shared", "-fPIC", *include, str(HERE / "board.cpp"), "-o", str(library)]
    done = subprocess.run([*words, *link], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-4000:]
    return library


def edit(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{path.name} has no {old!r}, or several"
        text = text.replace(old, new)
    path.write_text(text)


def test_a_vendor_that_core_has_never_heard_of(device: Path, fresh: Callable[..., Fresh], core_wheel: Path) -> None:
    made = fresh()
    made.run(f'python3 -m venv .venv && . .venv/bin/activate && python -m pip install -q "{core_wheel}[cli,testing]"')
    made.run("polyattn new-plugin acme")
    edit(
        made.folder / "polyattn-acme" / "src" / "polyattn_acme" / "plugin.py",
        ('PLATFORM = "cpu"', 'PLATFORM = "acme"'),
        ("import BackendInfo, Provider", "import BackendInfo, DeviceReport, PlatformInfo, Provider"),
        ("\n@hookimpl\ndef polyattn_register_backends(", PLATFORM),
        ("        (provider,),\n", '        (provider,),\n        evidence="emulator",\n'),
    )
    made.run("python -m pip install -q -e ./polyattn-acme")
    listed = made.run("polyattn list --platform acme")
    assert "acme" in listed
    assert "available" in listed
    said = made.run(f'python -W error "{HERE / "on_the_board.py"}" "{device}"')
    assert "acme@acme on Acme board" in said
    assert "negative controls: 24 of 24 as they must be" in said
