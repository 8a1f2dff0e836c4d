"""What torch says of tensors and devices, in the words of a request."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import InvalidInputError, did_you_mean
from ..registry.manager import get_manager
from ..selection.inspection import detect

__all__ = ["device_facts", "dtype_name", "forward_mode", "transform", "transform_around"]

_functorch: Any = torch._C._functorch

_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
    torch.int8: "int8",
}


def dtype_name(dtype: torch.dtype) -> str:
    """The request's word for a torch dtype.

    Raises:
        InvalidInputError: no attention is defined on it.
    """
    if dtype not in _NAMES:
        raise InvalidInputError(f"{dtype} is no dtype of attention; allowed: {', '.join(map(str, _NAMES))}")
    return _NAMES[dtype]


@functools.lru_cache(maxsize=64)
def device_facts(device: torch.device) -> dict[str, Any]:
    """Request fields of a device: platform, arch, toolkit and features.

    Raises:
        InvalidInputError: no registered platform has tensors of this device type.
    """
    kind = device.type
    if kind == "meta":
        kind = "cpu"
    if kind == "cuda":
        if torch.version.hip:
            arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
            return _facts("rocm", arch, torch.version.hip)
        major, minor = torch.cuda.get_device_capability(device)
        return _facts("cuda", f"sm{major}{minor}", torch.version.cuda or "")
    platforms = {p.device_type: p.name for p in get_manager().platforms.values() if p.device_type != "cuda"}
    if kind not in platforms:
        raise InvalidInputError(
            f"tensors are on device type {kind!r}, no platform has it.{did_you_mean(kind, platforms)} Known: "
            f"{', '.join(sorted(platforms))}, cuda; a plugin registers others with polyattn_register_platforms"
        )
    name = platforms[kind]
    if name == "cpu":
        return {"platform": "cpu", "features": detect("cpu").features}
    report = detect(name)
    arch = report.archs[0] if report.archs else ""
    return {"platform": name, "arch": arch, "toolkit": report.toolkit, "features": report.features}


def _facts(platform: str, arch: str, version: str) -> dict[str, Any]:
    toolkit = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return {"platform": platform, "arch": arch, "toolkit": toolkit}


def transform(query: Tensor, key: Tensor, value: Tensor, *optional: Tensor | None) -> str:
    """The request's word for what is around a call: of several transforms the one that asks most of a kernel."""
    tensors = (query, key, value)
    if _functorch.peek_interpreter_stack() is not None or forward_mode(*tensors, *optional):
        return transform_around()
    plain = (Tensor, torch.nn.Parameter)
    known = ("FakeTensor", "FunctionalTensor")
    for tensor in tensors:
        if type(tensor) not in plain and type(tensor).__name__ not in known:
            return "subclass"
    return ""


def transform_around() -> str:
    """The same of the thread alone: under a dual level some tensors may have a tangent."""
    stack = _functorch.get_interpreter_stack()
    if stack is None:
        return "jvp" if forward_ad._current_level >= 0 else ""
    levels = [level.key().name.lower() for level in stack]
    if levels.count("grad") > 1 and "jvp" not in levels:
        return "gradgrad"
    return next((name for name in ("jvp", "grad", "vmap") if name in levels), "functionalize")


def forward_mode(*tensors: Tensor | None) -> bool:
    """Whether forward-mode AD goes through a call of these, under `forward_ad.dual_level` or torch.func.jvp."""
    if forward_ad._current_level < 0:
        return False
    if _functorch.peek_interpreter_stack() is not None:
        return transform_around() == "jvp"
    unpack: Any = forward_ad.unpack_dual
    return any(t is not None and unpack(t).tangent is not None for t in tensors)
