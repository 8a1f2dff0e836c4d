"""Commands put models on the device that a flag names with this module."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError, did_you_mean

__all__ = ["device_of", "to_device"]


def device_of(name: str) -> str:
    """Name the device that `--device` says; auto is the GPU where there is one, else the CPU."""
    import torch

    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def to_device(model: Any, name: str) -> Any:
    """Put a model, a pipeline or a tensor on the device that `--device` says.

    Raises:
        ConfigError: torch does not know the device, or it is not here.
    """
    device = device_of(name)
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as exc:  # what torch raises for a device that it does not know or have
        near = did_you_mean(device, ("cpu", "cuda"))
        reason = str(exc).splitlines()[0].rstrip(".")
        raise ConfigError(f"--device {device!r}: {reason}.{near} Name a device that is here, such as cpu") from exc
