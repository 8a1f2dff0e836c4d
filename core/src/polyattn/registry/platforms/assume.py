"""`--assume-platform`: a platform named by a person instead of found."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ...contract.platforms import CORE_PLATFORMS
from ...errors import ConfigError, did_you_mean
from .cpu import CPU_FEATURES
from .machine import version_of
from .xpu import XPU_FEATURES

__all__ = ["AssumedPlatform", "parse_platform"]


class AssumedPlatform(NamedTuple):
    """A platform to judge requests for. Empty arch, toolkit or features: nothing assumed about them."""

    platform: str
    arch: str = ""
    toolkit: tuple[int, ...] = ()
    features: tuple[str, ...] = ()


_ARCHS = {
    "cuda": r"sm\d{2,3}",
    "rocm": r"gfx[0-9a-f]{3,4}",
    "xpu": r"[a-z][a-z0-9_]*",
    "musa": r"mp\d{2}",
    "npu": r"ascend\d[a-z0-9_]*",
}
_CORE_NAMES = tuple(info.name for info in CORE_PLATFORMS)
_PREFIXES = {"cuda": "sm", "rocm": "gfx", "musa": "mp", "npu": "ascend"}
_ANY_ARCH = r"[a-z0-9][a-z0-9_.-]*"
_SYNTAX = "PLATFORM, PLATFORM:ARCH or PLATFORM:ARCH@TOOLKIT, such as cuda:sm90@12.3, and cpu:FEATURE+FEATURE"


def parse_platform(text: str, known: Iterable[str] = _CORE_NAMES) -> AssumedPlatform:
    """`--assume-platform`: "cuda:sm90", "cuda:sm90@12.3" (toolkit), "rocm:gfx942", "npu", "cpu:amx+avx512".

    Args:
        text: the argument; case does not matter.
        known: names of registered platforms.

    Raises:
        ConfigError: an unknown platform (with the near match), a malformed architecture or toolkit, an unknown feature.

    Example:
        >>> parse_platform("cuda:sm90@12.3")
        AssumedPlatform(platform='cuda', arch='sm90', toolkit=(12, 3), features=())
    """
    names = tuple(known)
    body, at, toolkit = text.strip().lower().partition("@")
    name, colon, arch = body.partition(":")
    if name not in names:
        said = f"{text!r}" if text == name else f"{text!r}: {name!r}"
        raise ConfigError(
            f"{said} is not a platform.{did_you_mean(name, names)} Known: {', '.join(names)}; an architecture "
            f"may follow, as in cuda:sm90"
        )
    if (colon and not arch) or (at and not re.fullmatch(r"\d+(\.\d+)*", toolkit)):
        raise ConfigError(f"{text!r} is not a platform: give {_SYNTAX}")
    if name == "cpu":
        return _assumed_cpu(text, arch, toolkit)
    if name == "mps" and (arch or at):
        raise ConfigError(f"{text!r}: mps has no architectures or toolkits; give mps")
    if arch and not re.fullmatch(_ARCHS.get(name, _ANY_ARCH), arch):
        examples = _examples(name)
        looks = f"; {name} architectures look like {', '.join(examples)}" if examples else ""
        raise ConfigError(f"{text!r}: {arch!r} is not an architecture of {name}{looks}.{_near_arch(name, arch)}")
    features = XPU_FEATURES.get(arch, ()) if name == "xpu" else ()
    return AssumedPlatform(name, arch, version_of(toolkit), features)


def _near_arch(name: str, arch: str) -> str:
    """sm_90, 9.0, 90 and sm90a all mean sm90, 910b means ascend910b. A product name (h100) says nothing about the
    number."""
    prefix = _PREFIXES.get(name, "")
    letters = "0-9a-z_" if name == "npu" else "0-9a-f."
    match = re.match(rf"(?:{prefix})?[_-]?(\d[{letters}]*)", arch) if prefix else None
    if match is None:
        return ""
    kept = {"rocm": r"[^0-9a-f]", "npu": r"[^0-9a-z_]"}.get(name, r"\D")
    guess = prefix + re.sub(kept, "", match[1])
    # Names of Ascend chips follow no pattern by which a guess could be told from a chip.
    known = guess in _examples(name) if name == "npu" else re.fullmatch(_ARCHS[name], guess)
    return f" Did you mean '{name}:{guess}'?" if known else ""


def _examples(name: str) -> tuple[str, ...]:
    return next((p.archs for p in CORE_PLATFORMS if p.name == name), ())


def _assumed_cpu(text: str, features: str, toolkit: str) -> AssumedPlatform:
    if toolkit:
        raise ConfigError(f"{text!r}: cpu has no toolkit; give cpu or cpu:FEATURE+FEATURE, such as cpu:amx+avx512")
    parts = tuple(dict.fromkeys(features.split("+"))) if features else ()
    for part in parts:
        if part not in CPU_FEATURES:
            near = did_you_mean(part, CPU_FEATURES)
            raise ConfigError(f"{text!r}: {part!r} is not a CPU feature.{near} Known: {', '.join(CPU_FEATURES)}.")
    return AssumedPlatform("cpu", "", (), parts)
