"""examples/third-party/polyattn-tinyflash: built, installed beside core's wheel, and everything its README says tried.

The kernel is compiled here, into a folder of the test: a C++ compiler and ninja are needed.
"""

from __future__ import annotations

import re
import shutil
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import ROOT, Fresh, build

EXAMPLE = ROOT / "examples" / "third-party" / "polyattn-tinyflash"
PAGES = (EXAMPLE.parent / "README.md", EXAMPLE / "README.md")
README = PAGES[1].read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that building leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("example") / EXAMPLE.name
    return Path(shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache")))


@pytest.fixture(scope="module")
def wheel(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(package, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(fresh: Callable[..., Fresh], core_wheel: Path, wheel: Path) -> Fresh:
    made = fresh()
    made.run("python3 -m venv .venv")
    made.run(f"python -m pip install -q --no-deps --no-index '{core_wheel}' '{wheel}'")
    made.environ["TORCH_EXTENSIONS_DIR"] = str(made.folder / "kernels")
    return made


def test_its_wheel_is_for_every_machine_and_has_the_source(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = EXAMPLE / "src"
    kept = (f for f in source.rglob("*") if f.is_file() and f.parent.name != "__pycache__")
    assert files == {f.relative_to(source).as_posix() for f in kept}
    assert "polyattn_tinyflash/kernel.cpp" in files


def test_it_is_there_and_nobody_is_given_it_unasked(installed: Fresh) -> None:
    (ours,) = [b for b in installed.data("polyattn list --json") if b["name"] == "tinyflash"]
    assert (ours["package"], ours["status"], ours["evidence"]) == ("polyattn-tinyflash", "available", "declared")
    asked = "polyattn explain --dtype fp32 --head-dim 64 --causal --window 63,0 --softcap 30 --family dense --json"
    assert installed.data(asked)["backend"] != "tinyflash"
    named = installed.data(f"{asked} --attention-backend tinyflash")
    assert (named["backend"], named["lowerings"]) == ("tinyflash", [])


def test_its_own_tests_are_green(installed: Fresh, package: Path) -> None:
    """Conformance among them, by `polyattn.testing.AttentionConformance`."""
    said = installed.run(f"cd '{package}' && python -m pytest -q -p no:cacheprovider -W error tests")
    assert re.search(r"^\d{3,} passed in", said, re.M), said


def test_the_kernel_is_compiled_once(installed: Fresh) -> None:
    call = "import polyattn, torch; q = torch.randn(1, 3, 1, 8); polyattn.attention(q, q, q, backend='tinyflash')"
    (installed.folder / "call.py").write_text(call)
    installed.run("python -W error call.py")
    kernels = list((installed.folder / "kernels").glob("*/*.so"))
    before = [file.stat().st_mtime_ns for file in kernels]
    installed.run("python -W error call.py")
    assert len(kernels) == 1
    assert [file.stat().st_mtime_ns for file in kernels] == before


def test_the_code_of_its_readme_runs(installed: Fresh) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    (installed.folder / "page.py").write_text(code)
    installed.run("python -W error page.py")


def test_the_commands_of_its_readme_run(installed: Fresh, package: Path) -> None:
    (block,) = re.findall(r"^```console\n(.*?)^```", README, re.M | re.S)
    lines = [line.removeprefix("$ ") for line in block.splitlines()]
    assert lines[0] == 'python -m pip install -e ".[test]"'
    assert lines[-1] == "python -m pytest"
    for line in lines[1:-1]:  # the first asks an index for what is borrowed here, the last is tried above
        installed.run(line)


def rows(text: str) -> list[list[str]]:
    """The body of the table with the speeds."""
    # A kernel that takes two seconds to load is named meanwhile, on the error stream, which is read here too.
    text = re.sub(r"^plugin tinyflash .* has taken .*\n", "", text, flags=re.M)
    lines = re.findall(r"^\| call .*\n\|-.*\n((?:\|.*\n)+)", text, re.M)
    assert len(lines) == 1, text
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()]


def test_the_table_of_its_readme_has_the_rows_of_the_benchmark(installed: Fresh, package: Path) -> None:
    (package / "listing.py").write_text(
        "import json, bench\nprint(json.dumps([[c.label, c.dtype_name, f'`{c.other}`'] for c in bench.CASES]))"
    )
    cases = installed.data(f"python -W error '{package}/listing.py'")
    shown = rows(README)
    assert [[call, dtype, by] for call, dtype, _, _, by, _ in shown] == cases
    for call, _, ours, other, _, ratio in shown:
        assert float(ratio) == pytest.approx(float(ours) / float(other), abs=0.1), call


def test_the_benchmark_prints_its_table(installed: Fresh, package: Path) -> None:
    said = installed.run(f"python -W error '{package}/bench.py' --seconds 0.01 --only packed")
    ((call, dtype, ours, other, by, _),) = rows(said)
    assert (call, dtype, by) == ("packed, N 8, T 1672, H 8, D 64", "float32", "`torch_native`")
    assert float(ours) > 0
    assert float(other) > 0


def test_the_benchmark_times_nothing_that_is_wrong(installed: Fresh, package: Path) -> None:
    spoilt = """
        import dataclasses, runpy, sys
        from polyattn_tinyflash.adapter import TinyFlash

        right = TinyFlash.bind
        TinyFlash.bind = lambda self, request: right(self, dataclasses.replace(request, scale=1.02 / 8))
        sys.argv = ["bench.py", "--only", "no mask"]
        runpy.run_path(BENCH, run_name="__main__")
    """
    code = textwrap.dedent(spoilt).replace("BENCH", repr(str(package / "bench.py")))
    (installed.folder / "spoilt.py").write_text(code)
    said = installed.run("python spoilt.py", code=1)
    assert "tinyflash is wrong by" in said
    assert "nothing is timed" in said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
    assert links
    assert not [link for link in links if not (page.parent / link).exists()]
