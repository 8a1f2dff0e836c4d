"""What the documentation shows is run: Python blocks, commands, examples; and its links lead somewhere.

A block fenced as `python` runs, after the blocks above it on the same page. One that needs hardware or another
package is fenced as `python no-run` and must still compile. In a `console` block, lines `$ polyattn ...` are run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("core/*.md"), *ROOT.glob("plugins/*/*.md")])
# Files of examples and packages, whose blocks have tests of their own, are read by people too.
LINKED = sorted({*PAGES, *(p for room in ("examples", "plugins", "tests") for p in ROOT.glob(f"{room}/**/*.md"))})
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```", re.M | re.S)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line number, code) of each block whose fence says exactly `language`."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, m.start()) + 2, textwrap.dedent(m[3]))
        for m in FENCE.finditer(text)
        if m[2].strip() == language
    ]


def commands(page: Path) -> list[str]:
    lines = [line for _, block in blocks(page, "console") for line in block.splitlines()]
    return [line[2:] for line in lines if line.startswith("$ polyattn ") and not line.startswith("$ polyattn demo")]


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    # Not named after the page alone: docs/transformers.md would be what `import transformers` finds.
    script = tmp_path / f"page_{page.stem}.py"
    lines: list[str] = []
    for line, code in blocks(page, "python"):
        # Blank lines keep the page's own line numbers in a traceback.
        lines += [""] * (line - 1 - len(lines)) + code.splitlines()
    script.write_text("\n".join(lines), encoding="utf-8")
    run(sys.executable, str(script))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python no-run")], ids=name)
def test_other_python_blocks_compile(page: Path) -> None:
    for line, code in blocks(page, "python no-run"):
        compile("\n" * (line - 1) + code, str(page), "exec")


MINUTES = ("polyattn verify ", "polyattn conform torch_native --families ")
"""How commands begin that take minutes. Their tests in tests/cli, and conformance, call what they call."""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] if command.startswith(MINUTES) else [])
        for command in sorted({c for p in PAGES for c in commands(p)})
    ],
)
def test_commands_run(command: str, tmp_path: Path) -> None:
    if re.match(r"polyattn conform \S+ --quick", command):
        # All of its cases are tests of their own in tests/testing/conformance: here, that the command is right.
        command += " --families dense,varlen --dtypes float32"
    if command.startswith("polyattn verify"):  # it leaves a folder, in the one it is called in unless told otherwise
        command += f" --out {shlex.quote(str(tmp_path / 'verified'))}"
    run("bash", "-c", command.replace("polyattn", f'"{sys.executable}" -m polyattn', 1))


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_examples_run(example: Path) -> None:
    run(sys.executable, name(example))


@pytest.mark.parametrize("page", LINKED, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    local = {link for link in LINK.findall(text) if not re.match(r"[a-z]+:", link)}
    broken = [link for link in local if not _exists(page, link)]
    assert not broken


def _exists(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path) if path else page
    if not os.path.exists(target):
        return False
    return not anchor or target.suffix != ".md" or anchor in _anchors(target)


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    explicit = set(re.findall(r'<a (?:id|name)="([^"]+)"', page.read_text(encoding="utf-8")))
    return explicit | {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}
