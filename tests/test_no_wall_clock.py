"""No test says how fast something is: a loaded machine is no defect. Benchmarks measure; tests count steps and calls,
under a clock of their own where they need one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLACES = ("tests/**/*.py", "plugins/*/tests/**/*.py", "examples/**/test_*.py")
TESTS = sorted({file for place in PLACES for file in ROOT.glob(place)})
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "time", "time_ns"}
WORDS = ("seconds", "elapsed", "duration", "took")
LEAST = 600
"""Seconds that a subprocess, a thread or a lock has at least before a test gives it up as hung. Those of tests take up
to thirty, and ten times that on a loaded machine."""
WAITS = {"run", "communicate", "wait", "join", "check_call", "check_output", "Barrier", "result", "acquire"}
WAITS |= {"urlopen", "OpenAI"}
PLAIN = {"wait", "join", "result"}
"""Those that take their seconds without a name too: `event.wait(600)`."""
PAUSE = 1
"""Seconds below which a wait without a name only gives a fault time to show: where it is too short, nothing fails."""
OF_A_MADE_CLOCK = {
    # Times that the test itself made up.
    ("test_measuring.py", "test_one_kernel_under_two_names_takes_as_long"),
}


def clocked(node: ast.AST) -> bool:
    """Whether an expression asks a clock: `time.monotonic()`, or `perf_counter()` by itself."""
    for call in (found for found in ast.walk(node) if isinstance(found, ast.Call)):
        function = call.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            if function.value.id == "time" and function.attr in CLOCKS:
                return True
        elif isinstance(function, ast.Name) and function.id in CLOCKS - {"time"}:
            return True
    return False


def speeds(function: ast.FunctionDef) -> Iterator[int]:
    """Lines of assertions that something took less than so long."""
    since: set[str] = set()
    for statement in ast.walk(function):
        if isinstance(statement, ast.Assign) and clocked(statement.value):
            since |= {
                name.id for target in statement.targets for name in ast.walk(target) if isinstance(name, ast.Name)
            }
    for statement in ast.walk(function):
        if not isinstance(statement, ast.Assert):
            continue
        for compared in (found for found in ast.walk(statement.test) if isinstance(found, ast.Compare)):
            sides = [compared.left, *compared.comparators]
            for less, more, how in zip(sides, sides[1:], compared.ops, strict=False):
                if isinstance(how, (ast.Gt, ast.GtE)):
                    less, more = more, less
                elif not isinstance(how, (ast.Lt, ast.LtE)):
                    continue
                if clocked(less) or named(less) & since or words(less):
                    yield statement.lineno


def named(node: ast.AST) -> set[str]:
    return {found.id for found in ast.walk(node) if isinstance(found, ast.Name)}


def words(node: ast.AST) -> bool:
    """Whether it is a duration by its name: `seconds`, `report.seconds`, `took`."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return any(word in name.split("_") for word in WORDS)


def impatient(tree: ast.AST) -> Iterator[int]:
    """Lines that give something up sooner than a loaded machine would be done with it."""
    for call in (found for found in ast.walk(tree) if isinstance(found, ast.Call)):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        for keyword in call.keywords:
            given = keyword.value
            short = isinstance(given, ast.Constant) and isinstance(given.value, (int, float)) and given.value < LEAST
            if keyword.arg == "timeout" and name in WAITS and short:
                yield call.lineno
        plain = name in PLAIN and isinstance(call.func, ast.Attribute) and len(call.args) == 1
        if plain and PAUSE <= constant(call.args[0]) < LEAST:
            yield call.lineno
    for loop in (found for found in ast.walk(tree) if isinstance(found, ast.For)):
        rounds = loop.iter.args[-1:] if isinstance(loop.iter, ast.Call) and named(loop.iter.func) == {"range"} else ()
        for call in (found for each in (loop.body if rounds else ()) for found in ast.walk(each)):
            slept = isinstance(call, ast.Call) and ast.unparse(call.func) == "time.sleep"
            if slept and 0 < constant(rounds[0]) * constant(call.args[0]) < LEAST:
                yield call.lineno


def constant(node: ast.AST) -> float:
    """A number that is written out; 0 for anything else."""
    value = node.value if isinstance(node, ast.Constant) else 0
    return value if isinstance(value, (int, float)) else 0


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_asserts_how_long_something_took(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = [
        f"line {line} asserts a duration: count calls, or give the code a clock of the test"
        for function in functions
        if (path.name, function.name) not in OF_A_MADE_CLOCK
        for line in speeds(function)
    ]
    found += [f"line {line}: a timeout below {LEAST} s fails on a loaded machine" for line in impatient(tree)]
    assert not found, "\n".join([str(path.relative_to(ROOT)), *found])


@pytest.mark.parametrize(
    "text, lines",
    [
        ("began = time.monotonic()\n    work()\n    assert time.monotonic() - began < 8", [4]),
        ("took = perf_counter() - begin\n    assert 2 > took", [3]),
        ("result, seconds = shown\n    assert seconds < 120", [3]),
        ("assert report.seconds <= 3 * other.seconds", [2]),
        ("end = time.time() + 9\n    assert end < 4", [3]),
        ("assert report.seconds >= 4\n    assert 0 < seconds", []),  # that it is no less cannot fail by load
        ("assert milliseconds < 4\n    assert calls < 9", []),
    ],
)
def test_what_counts_as_a_duration(text: str, lines: list[int]) -> None:
    (function,) = ast.parse(f"def test():\n    {text}\n").body
    assert isinstance(function, ast.FunctionDef)
    assert list(speeds(function)) == lines


@pytest.mark.parametrize(
    "text, lines",
    [
        (
            "subprocess.run([], timeout=60)\nprocess.communicate(timeout=1800)\nRun(timeout=60.0)\nx.wait(timeout=y)",
            [1],
        ),
        ("urlopen(address, timeout=60)\nopenai.OpenAI(timeout=120)\nurlopen(address, timeout=600)", [1, 2]),
        (
            "done.wait(60)\nthread.join(30)\ndone.wait(600)\ndone.wait(0.2)\nwords.join('ab')\nwait(9)\nx.wait(y)",
            [1, 2],
        ),
        ("for _ in range(100):\n    if true():\n        break\n    time.sleep(0.1)", [4]),
        ("for _ in range(6000):\n    time.sleep(0.1)\nfor one in many:\n    time.sleep(0.1)\ntime.sleep(0.1)", []),
    ],
)
def test_what_counts_as_impatient(text: str, lines: list[int]) -> None:
    assert list(impatient(ast.parse(text))) == lines
