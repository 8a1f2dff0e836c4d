"""This module checks the process state that a backend must leave as it was: whatever it changes there, it changes for
its caller's program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["left_alone"]

_Part = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How to ask for a part, and how to put it back."""


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


_PARTS: dict[str, _Part] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "whether gradients are recorded": (torch.is_grad_enabled, torch.set_grad_enabled),
    "whether algorithms are deterministic": (
        _deterministic,
        lambda was: torch.use_deterministic_algorithms(was[0], warn_only=was[1]),
    ),
    # Not torch.get_float32_matmul_precision: that raises where somebody has set this one.
    "the precision of float32 products": (
        lambda: torch.backends.cuda.matmul.fp32_precision,
        lambda was: setattr(torch.backends.cuda.matmul, "fp32_precision", was),
    ),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    **{
        f"torch's switch of {name} attention": (
            getattr(torch.backends.cuda, f"{name}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{name}_sdp"),
        )
        for name in ("flash", "mem_efficient", "math", "cudnn")
    },
}


@contextlib.contextmanager
def left_alone(device: torch.device, wrong: Callable[[str], None], *, random: bool) -> Iterator[None]:
    """Call `wrong` with a sentence for each part that is another one afterwards, and put it back.

    Args:
        device: whose random numbers, current device and stream count too. random: numbers may be drawn, for dropout.
    """
    parts = {**_PARTS, **_of(device), **({} if random else _random(device))}
    before = {name: ask() for name, (ask, _) in parts.items()}
    try:
        yield
    finally:
        for name, (ask, put) in parts.items():
            if not _equal(ask(), was := before[name]):
                wrong(f"{name} is another one after the call")
                put(was)


def _of(device: torch.device) -> dict[str, _Part]:
    place = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if place is None or place.type != device.type or device.type == "mps":
        return {}
    of = torch.accelerator
    return {
        "the current device": (of.current_device_index, of.set_device_index),
        "the current stream": (lambda: of.current_stream(device), of.set_stream),
    }


def _random(device: torch.device) -> dict[str, _Part]:
    found: dict[str, _Part] = {"the state of torch's random numbers": (torch.get_rng_state, torch.set_rng_state)}
    if device.type == "mps":
        found["the state of the device's random numbers"] = (torch.mps.get_rng_state, torch.mps.set_rng_state)
    elif _of(device) and hasattr(module := torch.get_device_module(device), "get_rng_state"):
        found["the state of the device's random numbers"] = (
            lambda: module.get_rng_state(device),
            lambda was: module.set_rng_state(was, device),
        )
    return found


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)
