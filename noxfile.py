# /// script
# dependencies = ["nox>=2025.2.9"]
# ///
"""Every check of this repository. `nox -l` lists them, `nox -s NAME` runs one.

Whatever needs torch runs in one shared environment (session `environment`), installed once. With `--no-venv` nothing
is installed: the same sessions use the interpreter that runs nox, and core and plugins run from source.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"

ROOT = Path(__file__).parent
PLUGINS = sorted(p.parent.name for p in ROOT.glob("plugins/[!_]*/pyproject.toml"))
MODULES = {name: f"polyattn_{name}" for name in PLUGINS}
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
"""The versions of Python that polyattn is for."""
EVERYTHING = (
    *("-r", "requirements-dev.txt", "-e", f"{ROOT / 'core'}[all]"),
    *(word for name in PLUGINS for word in ("-e", str(ROOT / "plugins" / name))),
)
"""What the shared environment has, as arguments of pip."""

ENDS = {
    "oldest": ("torch==2.11.0",),
    "newest": ("torch==2.14.1", "transformers==5.24.0"),
}
"""The versions beside those of constraints.txt that the tests of session `torch` pass with."""
SERVED = ("transformers_runner", "transformers_positions", "latent_transformers")
"""Tests of models of transformers on the engine, for the same session."""

# The interpreter of the shared environment and the variables it runs with; set by session `environment`.
_python: str | None = None
_env: dict[str, str | None] = {}


def install(session: nox.Session, *args: str) -> None:
    """`pip install` under the constraints; nothing under --no-venv, where `session.install` would raise."""
    if session.venv_backend != "none":
        session.install(*CONSTRAINTS, *args)


def tool(session: nox.Session, name: str, *args: str, env: dict[str, str | None] | None = None) -> None:
    """Run a tool of the session's environment; under --no-venv, of the interpreter that runs nox."""
    folder = Path(sys.executable).parent if session.venv_backend == "none" else Path(session.bin)
    session.run(str(folder / name), *args, env=env, external=True)


def from_source() -> dict[str, str | None]:
    """Variables that make core and the plugins importable without installing them."""
    sources = [ROOT / "core" / "src", *(ROOT / "plugins" / name / "src" for name in PLUGINS)]
    installed = {entry.value for entry in importlib.metadata.entry_points(group="polyattn.backends")}
    extra = [f"{module}.plugin" for module in MODULES.values() if f"{module}.plugin" not in installed]
    path = [*map(str, sources), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), "POLYATTN_EXTRA_PLUGINS": ",".join(extra)}


def shared(session: nox.Session, *args: str, env: dict[str, str | None] | None = None) -> None:
    """Run `python *args` in the shared environment, or from source under --no-venv."""
    if _python is None:
        session.error("session 'environment' has not run: leave out --no-dependencies")
    session.run(_python, *args, env={**_env, **(env or {})}, external=True)


def pytest(session: nox.Session, *args: str, parallel: bool = False) -> None:
    """pytest in the shared environment; `-- --strict-device` makes a missing chip a failure."""
    words = ["--polyattn-strict-device" if word == "--strict-device" else word for word in session.posargs]
    env: dict[str, str | None] = {}
    if parallel and _has_xdist():
        # A worker with nothing left to do takes what waits for another: a long test holds up nothing but itself.
        # pytest-benchmark, where it is installed, warns of workers, and a warning is an error here.
        args = (*args, "-n", str(min(os.cpu_count() or 1, 8)), "--dist", "worksteal", "-p", "no:benchmark")
        env = {"OMP_NUM_THREADS": "1"}  # one thread per worker: the workers already fill the machine
    shared(session, "-m", "pytest", *args, *words, env=env)


def _has_xdist() -> bool:
    return _python != sys.executable or importlib.util.find_spec("xdist") is not None


@nox.session(reuse_venv=True, default=False)
def environment(session: nox.Session) -> None:
    """Install torch, core, every plugin (editable) and the tools once, for the sessions that need torch."""
    global _python, _env
    if session.venv_backend == "none":
        _python, _env = sys.executable, from_source()
        session.log(f"--no-venv: {sys.executable}, with core and plugins from source")
        return
    packages = [ROOT / "core", *(ROOT / "plugins" / name for name in PLUGINS)]
    files = [ROOT / "constraints.txt", ROOT / "requirements-dev.txt", *(p / "pyproject.toml" for p in packages)]
    wanted = hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()
    stamp = Path(session.virtualenv.location) / "polyattn-installed"
    if not stamp.exists() or stamp.read_text() != wanted:
        install(session, *EVERYTHING)
        stamp.write_text(wanted)
    path = os.pathsep.join([session.bin, os.environ.get("PATH", "")])
    _python, _env = str(Path(session.bin) / "python"), {"PATH": path, "PYTHONPATH": None}


@nox.session(venv_backend="none", requires=["environment"])
def tests(session: nox.Session) -> None:
    """Run the tests of core and of every plugin; arguments after `--` go to pytest."""
    elsewhere = ("testing/conformance", "docs", "packaging", "third_party")  # sessions of their own
    pytest(session, *(f"--ignore=tests/{room}" for room in elsewhere), parallel=True)


def _test_plugin(name: str) -> None:
    def run(session: nox.Session) -> None:
        pytest(session, f"plugins/{name}/tests", parallel=True)  # on a chip thousands of cases, each a host's work

    run.__doc__ = f"Run the tests of polyattn-{name}; `-- --strict-device` fails when its chip is missing."
    nox.session(run, name=f"test-{name}", venv_backend="none", requires=["environment"], default=False)


for _name in PLUGINS:
    _test_plugin(_name)


@nox.session(venv_backend="none", requires=["environment"])
def conformance(session: nox.Session) -> None:
    """Check some of what the backends that run here declare against the reference, and that the checks catch faults."""
    pytest(session, "tests/testing/conformance", parallel=True)


@nox.session(venv_backend="none", requires=["environment"])
def fuzz(session: nox.Session) -> None:
    """Give random calls to every backend for half a minute. That the fuzzer finds planted bugs is among the tests."""
    words = ("--seconds", "30", "--seed", "0", "--out", ".nox/polyattn-fuzz")
    shared(session, "-m", "polyattn", "fuzz", *words, env={"TRITON_INTERPRET": "1"})  # its tensors are the CPU's


@nox.session(venv_backend="none", requires=["environment"])
def scaling(session: nox.Session) -> None:
    """Check how costs grow with use: an exponent above what its quantity allows fails. A time never does."""
    shared(session, "benchmarks/scaling.py", "--small", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def hosts(session: nox.Session) -> None:
    """Run a host's own attention tests with polyattn among its backends: `-- PATH` of a checkout of diffusers."""
    if not session.posargs:
        session.error("name a checkout of diffusers: nox -s hosts -- PATH [arguments of pytest]")
    checkout, *more = session.posargs
    tests = Path(checkout).resolve() / "tests" / "models" / "transformers"
    if not tests.is_dir():
        session.error(f"{checkout} has no folder tests/models/transformers; name a checkout of diffusers")
    given = [place for place in (_env.get("PYTHONPATH"),) if place]
    places = os.pathsep.join([*given, str(ROOT / "tests" / "hosts"), str(tests.parents[2])])
    words = ("-p", "diffusers_backends", "-p", "no:benchmark", "-k", "polyattn", *(more or [str(tests)]))
    with session.chdir(tests.parents[2]):
        shared(session, "-m", "pytest", *words, env={"PYTHONPATH": places})


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff."""
    install(session, "ruff")
    tool(session, "ruff", "check", ".")
    tool(session, "ruff", "format", "--check", ".")


@nox.session(venv_backend="none", requires=["environment"])
def typing(session: nox.Session) -> None:
    """Check the types of core, and of what people write (tests/typing/uses.py), with mypy --strict."""
    shared(session, "-m", "mypy")


@nox.session(reuse_venv=True)
def imports(session: nox.Session) -> None:
    """Check that no layer of core imports a layer above it."""
    install(session, "import-linter")
    tool(session, "lint-imports", env={"PYTHONPATH": str(ROOT / "core" / "src")})


@nox.session(reuse_venv=True)
def packaging(session: nox.Session) -> None:
    """Build each wheel, install all in a fresh environment without torch, load each entry point, compare metadata."""
    if session.venv_backend == "none":
        session.skip("builds and installs wheels, which needs an environment of its own: run it without --no-venv")
    install(session, "build", "hatchling", "pytest")
    session.run("python", "-m", "pytest", "tests/packaging", "--confcutdir=tests/packaging", "-p", "no:cacheprovider")

    tmp = Path(session.create_tmp())
    wheels = tmp / "wheels"
    for old in wheels.glob("*"):
        old.unlink()
    for folder in ("core", *(f"plugins/{name}" for name in PLUGINS)):
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(wheels), folder, silent=True)

    session.run("python", "-m", "venv", "--clear", str(tmp / "fresh"))
    python = str(tmp / "fresh" / "bin" / "python")
    files = sorted(map(str, wheels.glob("*.whl")))
    session.run(python, "-m", "pip", "install", "-q", *CONSTRAINTS, "pluggy", "packaging", external=True)
    session.run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", *files, external=True)
    session.run(python, "-I", "tests/packaging/check_installed.py", *PLUGINS, external=True)


OF_A_CONNECTION = ("CACHE_DIR", "CERT", "CLIENT_CERT", "DEFAULT_TIMEOUT", "PROXY", "RETRIES", "TIMEOUT", "TRUSTED_HOST")


def _as_strangers_have_it() -> dict[str, str | None]:
    """Variables under which pip knows no index, folder or constraint of this machine, but still its way to the net."""
    ours = [name for name in os.environ if name.startswith("PIP_") and name[4:] not in OF_A_CONNECTION]
    return {**dict.fromkeys(ours), "PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": None}


def _interpreters() -> Iterator[tuple[str, str]]:
    """(version, path) of each Python in PYTHONS that is on the PATH, or that pyenv has."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for version in PYTHONS:
        name = f"python{version}"
        found = [shutil.which(name, path=folder) for folder in os.get_exec_path()]
        found += sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/{name}")))
        for path in filter(None, found):
            # A shim of pyenv may stand for a version that is not switched on.
            asked = subprocess.run([path, "-c", "import venv"], capture_output=True, check=False)
            if asked.returncode == 0:
                yield version, path
                break


def _readme_installs() -> Iterator[list[str]]:
    """What the README's commands give to `pip install`."""
    lines = re.findall(r"^\$ python -m pip install (-c .*?) && ", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    for line in lines:
        yield [path for word in shlex.split(line) for path in (sorted(glob.glob(word, root_dir=ROOT)) or [word])]


def _built(session: nox.Session) -> Callable[[str], str]:
    """From a folder of ours, as pip is given it, to a wheel of it, which asks for the same: each is built only once."""
    wheels = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    folders = {ROOT / "core": "polyattn", **{ROOT / "plugins" / name: MODULES[name] for name in PLUGINS}}
    session.run("python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), *map(str, folders))

    def wheel(word: str) -> str:
        path, bracket, extras = word.partition("[")
        name = folders.get((ROOT / path).resolve())
        return word if name is None else f"{next(wheels.glob(f'{name}-*.whl'))}{bracket}{extras}"

    return wheel


@nox.session(reuse_venv=True)
def resolve(session: nox.Session) -> None:
    """Ask PyPI's own wheels, with the oldest and the newest Python that is here, if the README's commands can be
    installed. Nothing is."""
    if session.venv_backend == "none":
        session.skip("asks PyPI, with a pip of its own: run it without --no-venv")
    installs = list(_readme_installs())
    if len(installs) != 2:
        session.error(f"README.md has {len(installs)} lines that install and then run something, not two")
    pythons = dict(_interpreters())
    if not pythons:
        session.error(f"none of these Pythons is on the PATH: {', '.join(PYTHONS)}")
    asked = [version for version in PYTHONS if version in pythons]
    built = _built(session)
    report = Path(session.create_tmp()) / "report.json"
    quiet = ("--dry-run", "--ignore-installed", "--quiet", "--disable-pip-version-check", "--report", str(report))
    for version in dict.fromkeys((asked[0], asked[-1])):
        for words in (*installs, [*CONSTRAINTS, *EVERYTHING]):
            pip = ("python", "-m", "pip", "--python", pythons[version], "install", *quiet)
            session.run(*pip, *(built(word) for word in words if word != "-e"), env=_as_strangers_have_it())
            found = {
                one["metadata"]["name"].lower(): (one["metadata"]["version"], one["download_info"]["url"])
                for one in json.loads(report.read_text("utf-8"))["install"]
            }
            number, url = found.get("torch", ("", "https:"))
            if "+" in number or not url.startswith("https:"):
                session.error(f"torch {number} of {url} is not the wheel that PyPI has")
            told = (f"{name} {found[name][0]}" for name in ("nox", "torch", "triton", "transformers") if name in found)
            session.log(f"Python {version}: {len(found)} packages, {', '.join(told)}")
    if left := [version for version in PYTHONS if version not in (asked[0], asked[-1])]:
        session.log(f"not asked: Python {', '.join(left)}")


@nox.session(reuse_venv=True, default=False)
@nox.parametrize("end", list(ENDS), ids=list(ENDS))
def torch(session: nox.Session, end: str) -> None:
    """Run the tests that torch and transformers decide with the oldest or newest versions: `nox -s "torch(oldest)"`."""
    if session.venv_backend == "none":
        session.skip("installs a torch of its own: run it without --no-venv")
    free = {"torch", "triton", "transformers"}
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    kept = Path(session.create_tmp()) / "constraints.txt"
    kept.write_text("\n".join(pin for pin in pins if pin.partition("==")[0] not in free), "utf-8")
    session.install("-c", str(kept), *ENDS[end], *EVERYTHING)
    rooms = ("semantics", "dispatch", "selection", "registry", "integrations")
    serving = (f"tests/serving/test_{name}.py" for name in SERVED)
    session.run("python", "-m", "pytest", *(f"tests/{room}" for room in rooms), *serving, "-n", "2", *session.posargs)


ENGINES = ("vllm==0.33.0", "sglang==0.5.23")
BESIDE_ENGINES = (
    *("addict", "aiohappyeyeballs", "aiohttp", "aiosignal", "apache-tvm-ffi", "cachetools"),
    *("cbor2", "compressed-tensors", "dill", "einops", "frozenlist", "gguf"),
    *("ipython", "llguidance", "loguru", "msgspec", "multidict", "openai-harmony"),
    *("orjson", "partial-json-parser", "propcache", "psutil", "py-cpuinfo", "pybase64"),
    *("pyzmq", "sentencepiece", "torchvision==0.28.0", "traitlets", "uvloop"),
    *("xgrammar==0.2.8", "yarl"),
)
"""What the layers of both import. Their own lists would bring another torch, and kernels for GPUs."""


@nox.session(reuse_venv=True, default=False)
def engines(session: nox.Session) -> None:
    """Install vLLM and SGLang without what needs a GPU, and drive their own classes with polyattn behind them."""
    if session.venv_backend == "none":
        session.skip("installs engines of 400 MB: run it without --no-venv")
    install(session, *EVERYTHING)
    session.install("--no-deps", *ENGINES, *BESIDE_ENGINES)
    names = ("vllm", "sglang", "sglang_diffusion", "sglang_real")
    session.run("python", "-m", "pytest", *(f"tests/integrations/test_{name}.py" for name in names), *session.posargs)


@nox.session(python="3.11", reuse_venv=True, default=False)
def oldest(session: nox.Session) -> None:
    """Run the command line with the oldest pluggy, packaging, typer, rich and PyYAML that core's metadata admit."""
    # Python 3.11 is the newest that wheels of all of them are for. The oldest torch and transformers: session torch.
    ours = nox.project.load_toml(ROOT / "core" / "pyproject.toml")["project"]
    asked = [Requirement(line) for line in (*ours["dependencies"], *ours["optional-dependencies"]["cli"])]
    floors = {
        one.name: next(part.version for part in one.specifier if part.operator == ">=")
        for one in asked
        if one.name != "torch" and not one.marker
    }
    free = {*floors, "click", "pytest"}  # each has an age that fits
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    kept = Path(session.create_tmp()) / "constraints.txt"
    kept.write_text("\n".join(pin for pin in pins if pin.partition("==")[0] not in free), "utf-8")
    plugins = (word for name in PLUGINS for word in ("-e", str(ROOT / "plugins" / name)))
    old = (f"{name}=={version}" for name, version in floors.items())
    session.install("-c", str(kept), *old, "pytest", "-e", str(ROOT / "core"), *plugins)
    for words in (("--version",), ("--help",), ("list",), ("explain",)):
        session.run("polyattn", *words)
    files = (f"tests/cli/test_{name}.py" for name in ("main", "list", "cli_page", "config_check"))
    session.run("python", "-m", "pytest", *files, *session.posargs)


@nox.session(name="third-party", venv_backend="none", requires=["environment"])
def third_party(session: nox.Session) -> None:
    """Write, build, install and use plugins as strangers do, each in a fresh environment beside core's wheel."""
    pytest(session, "tests/third_party", parallel=True)


@nox.session(venv_backend="none", requires=["environment"])
def docs(session: nox.Session) -> None:
    """Run the documentation's code and commands, the docstrings' examples and examples/, and follow the links."""
    sources = ["core/src", *(f"plugins/{name}/src" for name in PLUGINS)]
    # Rooms of hosts that are not installed here import them.
    absent = (f"--ignore=core/src/polyattn/integrations/{host}" for host in ("sglang", "vllm"))
    pytest(session, "tests/docs", "--doctest-modules", *sources, *absent, parallel=True)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def bench(session: nox.Session) -> None:
    """Measure import time and dispatch cost; a report, not a gate."""
    for name in ("import_time.py", "dispatch.py"):
        shared(session, f"benchmarks/{name}")


@nox.session(venv_backend="none", requires=["environment"], default=False)
def full(session: nox.Session) -> None:
    """Run every test in its long version: all slow cases, and many more of conformance."""
    pytest(session, "--ignore=tests/packaging", "--polyattn-full", parallel=True)
