"""A warning about our own code fails a test; one about the code of strangers, which differs by version, does not."""

from __future__ import annotations

import warnings

import pytest

from polyattn.contract import AttentionRequest
from polyattn.dispatch import binding as choose
from polyattn.selection.select import Selection


@pytest.mark.parametrize(
    "module",
    ["polyattn.dispatch.binding", "polyattn_triton.dense", "tests.semantics.test_dense", "plugins.cuda.tests.test_fa"],
)
@pytest.mark.parametrize("category", [UserWarning, RuntimeWarning, DeprecationWarning, FutureWarning, SyntaxWarning])
def test_of_our_own_it_is_an_error(module: str, category: type[Warning]) -> None:
    with pytest.raises(category, match="it is old"):
        warnings.warn_explicit("it is old", category, "file.py", 1, module)


def test_what_a_call_says_is_an_error() -> None:
    announced = Selection(
        AttentionRequest(), "reference", "cpu", "own", source="fallback from x", notes=("to be seen",)
    )
    with pytest.raises(RuntimeWarning, match="polyattn: to be seen"):
        choose._announce(announced)
    choose._announced.discard("polyattn: to be seen")


@pytest.mark.parametrize("module", ["torch._subclasses.meta_utils", "transformers.utils.generic", "ast", "copyreg"])
@pytest.mark.parametrize("category", [UserWarning, DeprecationWarning, FutureWarning])
def test_of_a_strangers_it_is_a_warning(module: str, category: type[Warning]) -> None:
    with pytest.warns(category, match="it is old"):
        warnings.warn_explicit("it is old", category, "file.py", 1, module)
    warnings.warn_explicit("it is older", category, "file.py", 1, module)


def test_an_exception_that_nobody_could_catch_is_an_error() -> None:
    with pytest.raises(pytest.PytestUnraisableExceptionWarning):
        warnings.warn_explicit("lost", pytest.PytestUnraisableExceptionWarning, "file.py", 1, "_pytest.unraisable")
