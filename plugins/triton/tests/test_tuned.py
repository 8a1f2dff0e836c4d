"""What was measured on a machine is what dense, packed and block-sparse kernels are launched with (docs/tuning.md)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn import tuning
from polyattn.epoch import EPOCH
from polyattn.semantics import reference
from polyattn.tuning import Kernel
from polyattn_triton.kernels import backward, block_sparse, choices, forward
from polyattn_triton.records.tuned import BACKWARD, BLOCK_SPARSE, FORWARD

CPU = torch.device("cpu")
FLOAT = torch.float32


pytestmark = pytest.mark.usefixtures("own_store")


def measured(kernel: Kernel, key: tuple[Any, ...], value: dict[str, Any]) -> None:
    # Other tests of this process may have served.
    tuning.tune(kernel, key, [value], lambda candidate: 1.0, where=CPU, seconds=10, rounds=1, while_serving=True)


def made() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return tuple(torch.randn(1, 40, 2, 16, generator=draw) for _ in range(3))  # type: ignore[return-value]


def test_forward() -> None:
    value = {"m": 32, "n": 32, "warps": 8, "stages": 3, "tma": False}
    measured(FORWARD, ("float32", 16, 16, 64, False), value)
    assert forward._config(CPU, FLOAT, (16, 16), 64, False, EPOCH.value)._asdict() == value
    assert forward._config(CPU, FLOAT, (16, 24), 64, False, EPOCH.value).m == 64
    found = polyattn.attention(*made(), causal=True, backend="triton")
    torch.testing.assert_close(found, reference.attention(*made(), causal="bottom_right"))


def test_backward() -> None:
    value = {name: allowed[0] for name, allowed in BACKWARD.choices.items()}
    measured(BACKWARD, ("float32", 16, 16), value)
    assert backward._config(CPU, FLOAT, (16, 16), EPOCH.value) == backward.Config(**value)
    assert backward._config(CPU, FLOAT, (16, 24), EPOCH.value) != backward.Config(**value)


def test_block_sparse_tiles_are_no_larger_than_blocks() -> None:
    value = {"m": 128, "n": 128, "warps": 8, "stages": 1}
    measured(BLOCK_SPARSE, ("forward", "float32", 64, 128, 64), value)
    query = torch.empty(1, 1, 1, 64)
    assert block_sparse.tiles_for("forward", query, 128, 64) == block_sparse.Tiles(128, 64, 8, 1)


def test_the_store_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask = choices.kernel_config
    monkeypatch.setattr(
        choices, "kernel_config", lambda kernel, *rest: (asked.append(kernel.name), ask(kernel, *rest))[1]
    )
    for _ in range(2):
        tensors = [t.requires_grad_() for t in made()]
        polyattn.attention(*tensors, backend="triton").sum().backward()
    assert asked == ["triton.forward", "triton.backward"]
