"""The distributions agree with each other and with what the repository says of them. Needs no torch."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core"
NOXFILE = ROOT / "noxfile.py"
PLUGINS = sorted(p.parent for p in ROOT.glob("plugins/[!_]*/pyproject.toml"))
PACKAGES = [CORE, *PLUGINS]


def load(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def project(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = load(folder)["project"]
    return found


def source_of(folder: Path, dotted: str) -> Path | None:
    """The file under src/ that holds module `dotted`, if there is one."""
    path = folder / "src" / Path(*dotted.split("."))
    return next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()), None)


each_package = pytest.mark.parametrize("folder", PACKAGES, ids=lambda p: p.name)
each_plugin = pytest.mark.parametrize("folder", PLUGINS, ids=lambda p: p.name)


def test_the_vendor_plugins_are_there() -> None:
    assert {"cuda", "rocm", "ascend", "xpu", "musa", "triton"} <= {p.name for p in PLUGINS}


def test_the_root_is_not_a_distribution() -> None:
    assert not {"project", "build-system"} & set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")))


@each_package
def test_common_metadata(folder: Path) -> None:
    ours, core = project(folder), project(CORE)
    assert ours["version"] == core["version"], "all distributions are released together, with one version"
    assert ours["requires-python"] == core["requires-python"]
    assert ours["license"] == "Apache-2.0"
    assert ours["description"].strip()
    assert (folder / ours["readme"]).read_text(encoding="utf-8").startswith(f"# {ours['name']}")
    assert "END OF TERMS AND CONDITIONS" in (folder / "LICENSE").read_text(encoding="utf-8")
    assert load(folder)["build-system"]["build-backend"] == "hatchling.build"


@each_package
def test_package_is_typed_and_every_target_exists(folder: Path) -> None:
    ours = project(folder)
    (package,) = load(folder)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert (folder / package / "py.typed").is_file()
    for name, target in ours["entry-points"]["polyattn.backends"].items():
        assert target.split(".")[0] == Path(package).name
        assert source_of(folder, target), f"entry point {name} = {target!r} names no module under {folder}/src"
    for name, target in ours.get("scripts", {}).items():
        module, function = target.split(":")
        source = source_of(folder, module)
        assert source, f"script {name} = {target!r} names no module under {folder}/src"
        assert re.search(rf"^(def {function}\(|{function} =|from .* import .*\b{function}\b)", source.read_text(), re.M)


@each_plugin
def test_plugin_conventions(folder: Path) -> None:
    ours, module = project(folder), f"polyattn_{folder.name}"
    assert ours["name"] == f"polyattn-{folder.name}"
    assert ours["entry-points"]["polyattn.backends"] == {folder.name: f"{module}.plugin"}
    required = {canonicalize_name(r.name): r for r in map(Requirement, ours["dependencies"])}
    assert set(required) == {"polyattn"}, "a vendor SDK is an extra: it must not replace the user's torch"
    major, minor, _ = map(int, project(CORE)["version"].split("."))
    assert required["polyattn"].specifier.contains(project(CORE)["version"])
    assert not required["polyattn"].specifier.contains(f"{major}.{minor + 1}.0"), "until 1.0 a minor may break"


@each_plugin
def test_plugin_is_in_the_readme_table(folder: Path) -> None:
    table = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert any(f"`polyattn-{folder.name}`" in line and f"plugins/{folder.name}" in line for line in table)


def test_core_names_what_it_needs_and_its_extras() -> None:
    ours = project(CORE)
    assert {"torch", "pluggy", "packaging"} <= {Requirement(r).name for r in ours["dependencies"]}
    assert {"cli", "transformers", "demo", "testing", "all"} <= set(ours["optional-dependencies"])
    together = Requirement(ours["optional-dependencies"]["all"][0])
    assert together.extras == set(ours["optional-dependencies"]) - {"all"}


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(r.name): r for r in (Requirement(x) for x in lines if x.strip() and x[0] != "#")}


def test_constraints_pin_exactly_and_once() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert len(pins()) == sum(bool(line.strip()) and line[0] != "#" for line in lines)
    assert all(len(r.specifier) == 1 and next(iter(r.specifier)).operator == "==" for r in pins().values())


def test_the_main_job_runs_every_check() -> None:
    """Session `environment` is what the others stand on; those that are not run unless they are named are no checks."""
    names = re.findall(r"^@nox\.session\((?!.*default=False)(.*)\)\ndef (\w+)", NOXFILE.read_text(), re.MULTILINE)
    named = {(re.findall(r'name="([\w-]+)"', words) or [function])[0] for words, function in names}
    job = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    run = {word for line in re.findall(r"^ *for session in (.*); do", job, re.MULTILINE) for word in line.split()}
    assert {"tests", "resolve", "third-party", "lint"} <= named
    assert named <= run | {"tests"}, "session tests is the README's command"
    assert "nox -s tests" in job


def test_the_budget_of_the_main_job_is_said_alike() -> None:
    job = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (seconds,) = re.findall(r"^readonly BUDGET=(\d+)", job, re.MULTILINE)
    minutes = f"{int(seconds) // 60} minutes"
    assert f"more than {minutes}." in job
    assert f"budget of {minutes}" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_readme_names_the_versions_that_are_tested() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    tested = re.findall(r'"((?:torch|transformers)==[\d.]+)"', NOXFILE.read_text(encoding="utf-8"))
    assert len(tested) == 3
    assert not [pin for pin in (*tested, str(pins()["torch"])) if pin.replace("==", " ") not in text]
    (floor,) = (Requirement(r).specifier for r in project(CORE)["dependencies"] if r.startswith("torch"))
    oldest = next(pin for pin in tested if pin.startswith("torch")).removeprefix("torch==")
    assert str(floor) == f">={oldest.removesuffix('.0')}"


def test_what_core_needs_has_a_lower_bound_that_is_tried() -> None:
    core = project(CORE)
    asked = map(Requirement, [*core["dependencies"], *core["optional-dependencies"]["cli"]])
    assert not [str(r) for r in asked if sum(part.operator == ">=" for part in r.specifier) != 1]
    assert "def oldest(" in NOXFILE.read_text(encoding="utf-8")


def test_constraints_cover_every_direct_requirement() -> None:
    core = project(CORE)
    wanted = [*core["dependencies"], *(r for extra in core["optional-dependencies"].values() for r in extra)]
    tools = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    needed = {r.name: r for r in map(Requirement, wanted) if not r.marker and r.name != "polyattn"}
    needed |= {r.name: r for r in (Requirement(line) for line in tools if line.strip() and line[0] != "#")}
    assert not {name for name in needed if canonicalize_name(name) not in pins()}
    for name, requirement in needed.items():
        (pin,) = pins()[canonicalize_name(name)].specifier
        assert requirement.specifier.contains(pin.version), f"{requirement} does not admit the pinned {pin.version}"


def test_every_install_line_uses_the_constraints() -> None:
    files = [ROOT / ".ci" / "run", *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    lines = [(f.name, line) for f in files for line in f.read_text(encoding="utf-8").splitlines()]
    installs = [(name, line) for name, line in lines if re.search(r"\bpip install .*(\./(core|plugins)|\bnox\b)", line)]
    assert installs, "the README holds the commands that install polyattn"
    assert not [entry for entry in installs if "-c constraints.txt" not in entry[1]]


def test_contributing_maps_every_room() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = [p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith((".", "__"))]
    assert not [room for room in rooms if f"{room}/" not in text]
