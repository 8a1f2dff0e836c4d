"""What the mark `slow` leaves out, and that nothing is left out under --polyattn-full."""

from __future__ import annotations

import ast
import gc
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
TESTS = sorted(
    path
    for folder in ("tests", "plugins")
    for path in (ROOT / folder).rglob("test_*.py")
    if "mark.slow" in path.read_text(encoding="utf-8") and path != Path(__file__)
)


class Item(SimpleNamespace):
    __hash__ = object.__hash__


def collected(
    conftest,
    cases: dict[str, int | None],
    full: bool = False,
    args: tuple[str, ...] = (),
    numbers: range = range(10),
    **words: str,
) -> list[str]:
    """The names of what runs of ten cases of each test, whose mark keeps so many; None = it has no mark."""

    def item(test: str, number: int, keep: int | None) -> Item:
        marker = None if keep is None else SimpleNamespace(kwargs={**words, **({"keep": keep} if keep else {})})
        return Item(nodeid=f"{test}[{number}]", get_closest_marker=lambda name: marker)

    items = [item(test, number, keep) for test, keep in cases.items() for number in numbers]
    told: list[Item] = []
    config = SimpleNamespace(
        args=args, getoption=lambda name: full, hook=SimpleNamespace(pytest_deselected=lambda items: told.extend(items))
    )
    before = [one.nodeid for one in items]
    conftest.pytest_collection_modifyitems(config, items)
    left = [one.nodeid for one in items]
    assert sorted(left + [one.nodeid for one in told]) == sorted(before), "what is left out is told to pytest"
    return left


@pytest.fixture
def conftest(pytestconfig: pytest.Config):
    (found,) = (
        plugin
        for plugin in pytestconfig.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(ROOT / "conftest.py")
    )
    return found


def test_some_cases_are_kept_and_the_same_ones_each_time(conftest) -> None:
    cases = {"a.py::usual": None, "a.py::some": 3, "b.py::none": 0, "b.py::more": 20}
    left = collected(conftest, cases)
    assert {test: sum(name.startswith(f"{test}[") for name in left) for test in cases} == {
        "a.py::usual": 10,
        "a.py::some": 3,
        "b.py::none": 0,
        "b.py::more": 10,
    }
    assert left == collected(conftest, cases)


def test_a_case_that_is_kept_of_all_is_kept_of_some(conftest) -> None:
    kept = collected(conftest, {"a.py::some": 3})
    some = collected(conftest, {"a.py::some": 3}, numbers=range(5))
    assert {name for name in kept if int(name[-2]) < 5} <= set(some)


def test_what_is_quick_runs(conftest) -> None:
    left = collected(conftest, {"a.py::refusal": 2, "b.py::some": 2}, quick="refusal")
    assert len(left) == 12


def test_what_is_named_runs(conftest) -> None:
    cases = {"a.py::none": 0, "a.py::none_of_it": 0, "b.py::some": 1}
    assert collected(conftest, cases, args=("tests/a.py::none[3]",))[0] == "a.py::none[3]"
    left = collected(conftest, cases, args=("tests/a.py::none",))
    assert [name for name in left if name.startswith("a.py")] == [f"a.py::none[{n}]" for n in range(10)]


def test_the_garbage_collector_is_on_again() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_nothing_is_left_out_in_the_long_version(conftest) -> None:
    assert len(collected(conftest, {"a.py::some": 3, "b.py::none": 0}, full=True)) == 20


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_mark_names_how_many_cases_are_kept(path: Path) -> None:
    """`slow(3)` or `slow(kept=3)` would keep none, and say nothing."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "slow"
    ]
    for call in calls:
        assert not call.args, f"line {call.lineno}"
        assert "keep" in (words := {word.arg for word in call.keywords}), f"line {call.lineno}"
        assert words <= {"keep", "quick"}, f"line {call.lineno}"
