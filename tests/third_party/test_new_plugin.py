"""`plugins/_template` built, installed from its wheel beside core's wheel, found and used; and every way to have it."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from polyattn.cli.new_plugin import template_files

from .conftest import ROOT, Fresh, build

TEMPLATE = ROOT / "plugins" / "_template"

CALL = """
import sys
import polyattn
assert "torch" not in sys.modules
import torch

torch.manual_seed(0)
q = torch.randn(2, 7, 4, 64)
k, v = torch.randn(2, 300, 4, 64), torch.randn(2, 300, 4, 64)
call = {"causal": True, "scale": 0.3, "return_lse": True}
out, lse = polyattn.attention(q, k, v, backend="template", **call)
expected, expected_lse = polyattn.attention(q, k, v, backend="reference", **call)
torch.testing.assert_close(out, expected)
torch.testing.assert_close(lse, expected_lse)
with polyattn.use_backend("template"):
    assert torch.equal(polyattn.attention(q, k, v, **call)[0], out)

chosen = polyattn.explain(polyattn.attention, q, k, v, causal=True)
assert chosen.backend == "torch_sdpa" and "template" in chosen.others, chosen
try:
    polyattn.attention(q, k, v, softcap=30.0, backend="template")
except polyattn.UnsupportedRequestError as error:
    assert error.rejected["template"] == ["softcap=30.0 is not declared"], error.rejected
else:
    raise AssertionError("a softcap was served by a kernel that has none")
"""


def copied(folder: Path) -> Path:
    """The template's files in a folder of their own, so that building leaves nothing in the checkout."""
    for file in template_files(TEMPLATE):
        (folder / file.relative_to(TEMPLATE)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / file.relative_to(TEMPLATE))
    return folder


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def wheel(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(package, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(fresh: Callable[..., Fresh], wheel: Path) -> Fresh:
    return fresh(wheel)


def test_its_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = TEMPLATE / "src"
    assert files == {f.relative_to(source).as_posix() for f in template_files(TEMPLATE) if f.is_relative_to(source)}
    assert {
        "polyattn_template/py.typed",
        "polyattn_template/xfails.txt",
        "polyattn_template/evidence/README.md",
    } < files


def test_list_shows_it(installed: Fresh) -> None:
    entries = {entry["name"]: entry for entry in installed.data("polyattn list --json")}
    assert {"torch_sdpa", "torch_native", "flex_attention", "reference"} < set(entries)
    assert [name for name, entry in entries.items() if entry["package"] != "polyattn"] == ["template"]
    ours = entries["template"]
    assert (ours["platforms"], ours["package"], ours["version"]) == (["cpu"], "polyattn-template", "0.1.0")
    assert (ours["status"], ours["evidence"], ours["reasons"]) == ("available", "declared", [])


def test_explain_shows_it(installed: Fresh) -> None:
    ask = "polyattn explain --dtype fp32 --head-dim 64 --json"
    assert "template" in installed.data(ask)["others"]
    named = installed.data(f"{ask} --attention-backend template")
    assert (named["backend"], named["provider"], named["evidence"]) == ("template", "template", "declared")
    assert named["source"] != "platform rule", "nothing but its name chose it"
    refused = installed.data(f"{ask} --softcap 30 --attention-backend template", code=3)
    assert refused["error"]["rejected"]["template"] == ["softcap=30.0 is not declared"]


def test_calls_are_served_and_refused(installed: Fresh) -> None:
    (installed.folder / "call.py").write_text(CALL)
    installed.run("python -W error call.py")


def test_it_conforms(installed: Fresh) -> None:
    found = installed.data("polyattn conform template --quick --strict-device --json")
    assert (found["failed"], found["xfailed"]) == (0, 0)
    assert found["passed"] > 0
    assert found["refused"] > 0


@pytest.fixture(scope="module")
def bare(fresh: Callable[..., Fresh]) -> Fresh:
    """An environment of its own that has no polyattn."""
    made = fresh()
    made.run(f'"{sys.executable}" -m venv .venv')
    return made


@pytest.mark.parametrize("way", ["by its published wheel", "by a wheel of the checkout", "editable", "not at all"])
def test_new_plugin_however_core_is_installed(way: str, bare: Fresh, core_wheel: Path, tmp_path: Path) -> None:
    core, environ = ROOT / "core", {}
    if way == "not at all":
        bare.run("python -m pip uninstall -q -y polyattn")
        environ["PYTHONPATH"] = os.pathsep.join([str(core / "src"), bare.environ["PYTHONPATH"]])
    else:
        what = f"-e '{core}'"
        if way != "editable":
            what = f"'{core_wheel if 'published' in way else build(core, tmp_path / 'wheel', '--wheel')}'"
        bare.run(f"python -m pip install -q --no-deps --force-reinstall {what}")
    where = bare.run("python -c 'import polyattn; print(polyattn.__file__)'", **environ).strip()
    assert Path(where).is_relative_to(core) is (way in ("editable", "not at all"))

    bare.run(f"python -m polyattn new-plugin template --into '{tmp_path}'", **environ)
    made = tmp_path / "polyattn-template"
    assert {f.relative_to(made): f.read_bytes() for f in template_files(made)} == {
        f.relative_to(TEMPLATE): f.read_bytes() for f in template_files(TEMPLATE)
    }
