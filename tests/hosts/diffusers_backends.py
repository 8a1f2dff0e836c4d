"""A plugin of pytest for diffusers' own tests: polyattn is one of the attention backends that they try.

    nox -s hosts -- PATH_OF_A_CHECKOUT_OF_DIFFUSERS

The checkout's tests are run as they are, against the diffusers that is installed.
"""

from __future__ import annotations

import importlib

import pytest

from polyattn.integrations import diffusers as host

TRIED = ("polyattn", "polyattn|torch_sdpa")


def pytest_configure(config: pytest.Config) -> None:
    """Add the names to the list that the tests are made from, before they are collected."""
    host.install()
    from diffusers.models.attention_dispatch import AttentionBackendName

    tests = importlib.import_module("tests.models.testing_utils.attention")
    tests._ALL_BACKEND_PARAMS += [pytest.param(AttentionBackendName(name), id=name) for name in TRIED]
