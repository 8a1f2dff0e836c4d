"""What the mark `slow` leaves out, and that nothing is left out under --polyattn-full."""

from __future__ import annotations

import ast
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


def collected(conftest, cases: dict[str, int | None], full: bool = False) -> list[str]:
    """The names of what runs of ten cases of each test, whose mark keeps so many; None = it has no mark."""

    def item(test: str, number: int, keep: int | None) -> Item:
        marker = None if keep is None else SimpleNamespace(kwargs={"keep": keep} if keep else {})
        return Item(nodeid=f"{test}[{number}]", get_closest_marker=lambda name: marker)

    items = [item(test, number, keep) for test, keep in cases.items() for number in range(10)]
    told: list[Item] = []
    config = SimpleNamespace(
        getoption=lambda name: full, hook=SimpleNamespace(pytest_deselected=lambda items: told.extend(items))
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
        assert [word.arg for word in call.keywords] == ["keep"], f"line {call.lineno}"
