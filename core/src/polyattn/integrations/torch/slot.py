"""This module puts polyattn into torch's slot of flash attention, and takes it out."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ...errors import BackendUnavailableError, ConfigError, did_you_mean
from ..common.names import PIN, backend_words
from .kernels import DEVICES, kernels

__all__ = ["install", "installed", "uninstall"]

NAME = "polyattn"


class _Handle:
    """Holds the operators that are ours, until torch removes them."""

    def __init__(self, backend: str | None) -> None:
        self._libraries: list[Any] = []
        for device in DEVICES:
            made: Any = torch.library.Library
            library = made("aten", "IMPL", device)
            for name, run in kernels(device, backend):
                with warnings.catch_warnings():
                    # It is what the slot is for, and torch's own implementations do it before Python can be warned.
                    warnings.filterwarnings("ignore", "(?s).*[Oo]verrid", UserWarning)
                    library.impl(name, _not_twice(run, _torchs_own(name, device)), device, with_keyset=True)
            self._libraries.append(library)

    def remove(self) -> None:
        """Give torch's own operators back."""
        for library in self._libraries:
            library._destroy()
        self._libraries.clear()


_inside = threading.local()


def _torchs_own(name: str, device: str) -> Any:
    """Return torch's kernel of an operator, None where it has none."""
    try:
        return torch.library.get_kernel(f"aten::{name}", device)
    except RuntimeError:
        return None


def _not_twice(run: Callable[..., Any], own: Any) -> Callable[..., Any]:
    """Serve an operator, and leave it to torch where the backend that serves it calls it itself."""

    @functools.wraps(run)
    def serve(keys: Any, *given: Any, **options: Any) -> Any:
        if getattr(_inside, "here", False) and own is not None:
            return own.call_boxed(keys, *given, **options)
        _inside.here = True
        try:
            return run(*given, **options)
        finally:
            _inside.here = False

    return serve


def install(backend: str | None = None) -> str:
    """Serve `torch.nn.functional.scaled_dot_product_attention` by polyattn, wherever torch would take flash attention.

    torch decides first: what it sends to its other kernels (masks on a GPU, dropout on a CPU, head dims that flash
    attention has not) stays there. It goes for compiled calls too, and for `torch.nn.attention.varlen.varlen_attn`.

    Args:
        backend: serves all of them; None = as everywhere: `use_backend`, configuration, then the best for each call.

    Returns:
        The name under which torch lists it (`torch.nn.attention.current_flash_attention_impl()`). A second call takes
        the place of the first.

    Raises:
        ConfigError: no backend has such a name. BackendUnavailableError: this torch has no such slot.
    """
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl") or not hasattr(torch.library, "get_kernel"):
        raise BackendUnavailableError(
            f"torch {torch.__version__} has no slot for flash attention that can be given back; pip install -U torch, "
            f"or call polyattn.scaled_dot_product_attention"
        )
    if backend is not None:
        words = backend_words()
        if backend.partition("@")[0].partition("/")[0] not in words:
            raise ConfigError(
                f"install(backend={backend!r}): no backend has that name.{did_you_mean(backend, words)} "
                f"`polyattn list --all` shows them"
            )
    name = NAME if backend is None else f"{NAME}{PIN}{backend}"
    slot: Any = torch.nn.attention
    slot.register_flash_attention_impl(name, register_fn=functools.partial(_Handle, backend))
    slot.activate_flash_attention_impl(name)
    return name


def installed() -> str | None:
    """Return the name under which polyattn is in the slot, None = it is not."""
    name = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    return name if name is not None and name.partition(PIN)[0] == NAME else None


def uninstall() -> None:
    """Give the slot back to torch. It does nothing where something else is in it."""
    if installed() is not None:
        torch.nn.attention.restore_flash_attention_impl()
