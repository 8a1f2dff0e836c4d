"""What the tests of the fuzzer share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

import polyattn
from polyattn.contract import AttentionRequest, BackendInfo, Bound, Provider, hookimpl, row
from polyattn.registry.manager import PluginManager, get_manager, reset_manager

CPU = torch.device("cpu")

Forward = Callable[..., Any]
Registered = Callable[[Callable[[AttentionRequest], Forward]], AbstractContextManager[str]]


@pytest.fixture(autouse=True)
def nothing_is_configured() -> Iterator[None]:
    polyattn.configure()
    yield
    polyattn.configure()


@pytest.fixture
def registered() -> Registered:
    """`with registered(bind) as name`: a dense CPU backend that says it does everything plain, chosen by name only."""

    @contextmanager
    def register(bind: Callable[[AttentionRequest], Forward]) -> Iterator[str]:
        every = dict.fromkeys(("head_dim", "v_head_dim", "group", "s_relation", "misaligned"), True)
        rows = (row(family="dense", dtype=("float32",), **every),)
        info = BackendInfo("acme", "cpu", (Provider("acme", rows, "acme:Acme"),), "acme's kernel", priority=None)

        def polyattn_register_backends() -> list[BackendInfo]:
            return [info]

        def polyattn_load_forward(backend: BackendInfo, provider: str, request: AttentionRequest) -> Bound:
            return Bound(bind(request))

        module = ModuleType("acme")
        module.polyattn_register_backends = hookimpl(polyattn_register_backends)  # type: ignore[attr-defined]
        module.polyattn_load_forward = hookimpl(polyattn_load_forward)  # type: ignore[attr-defined]
        before = get_manager()
        reset_manager(PluginManager())
        try:
            get_manager().register(module, "acme")
            yield "acme"
        finally:
            reset_manager(before)

    return register
