"""The device kinds that core knows, as records."""

from __future__ import annotations

from typing import Any

from .backend import PlatformInfo

__all__ = ["CORE_PLATFORMS"]


def _core(name: str, **fields: Any) -> PlatformInfo:
    fields.setdefault("device_type", name)
    return PlatformInfo(name, detect=f"polyattn.registry.platforms:detect_{name}", **fields)


CORE_PLATFORMS: tuple[PlatformInfo, ...] = (
    _core("cuda", plugin="cuda", archs=("sm80", "sm86", "sm89", "sm90", "sm100", "sm120")),
    _core("rocm", device_type="cuda", plugin="rocm", archs=("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")),
    _core("xpu", plugin="xpu", archs=("pvc", "bmg")),
    _core("musa", plugin="musa", archs=("mp22", "mp31")),
    _core("npu", plugin="ascend", archs=("ascend910b", "ascend910_93", "ascend310p")),
    _core("mps", fallback="torch_sdpa", fallback_why="on MPS that name stands for torch_sdpa"),
    _core("cpu"),
)
"""The device kinds that core knows. A plugin may register more."""
