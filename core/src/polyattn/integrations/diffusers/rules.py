"""This module reads which backend serves which steps, layers, branches and roles of a component.

    {"default": "sage_attn", "steps": {"0-3": "fa"}, "layers": {"0,1,-1": "fa"}, "roles": {"cross": "torch_sdpa"}}

Where several hold, steps win over layers, layers over branches, branches over roles, and roles over the default.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError, did_you_mean

__all__ = ["KINDS", "ROLES", "Rule", "Rules", "read_rules"]

KINDS = ("steps", "layers", "branches", "roles")
"""What a rule may be about, the strongest first."""
ROLES = ("self", "cross")
_SPAN = re.compile(r"(\d+)-(\d+)|(-?\d+)")


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule names the backend of some calls.

    Attributes:
        kind: of `KINDS`. spoken: as it was written, "0-3" for example. spans: (first, last) of numbers, negative ones
            counted from the end; empty for a word.
    """

    kind: str
    spoken: str
    backend: str
    spans: tuple[tuple[int, int], ...] = ()

    def holds(self, value: int | str | None, count: int | None) -> bool:
        """Tell whether it speaks of a step, layer, branch or role. count: how many steps or layers there are, None =
        not known, where what is counted from the end is not found."""
        if value is None or not self.spans:
            return value == self.spoken
        return any(first <= value <= last for first, last in map(functools.partial(_counted, count), self.spans))  # type: ignore[operator]

    def beyond(self, count: int) -> bool:
        """Tell whether some of its numbers are none of `count`."""
        ends = [_counted(count, span) for span in self.spans]
        return any(first < 0 or last >= count for first, last in ends)

    def __str__(self) -> str:
        return f"{self.kind} {self.spoken}: {self.backend}"


def _counted(count: int | None, span: tuple[int, int]) -> tuple[int, int]:
    first, last = span
    return (first, last) if first >= 0 else (count + first, count + last) if count is not None else (-1, -2)


@dataclasses.dataclass(frozen=True)
class Rules:
    """Rules name the backends of a component.

    Attributes:
        default: of calls that no rule speaks of; None = overrides and automatic choice. others: the strongest first.
    """

    default: str | None = None
    others: tuple[Rule, ...] = ()

    def pick(
        self, *, step: int | None, steps: int | None, layer: int | None, layers: int, branch: str, role: str
    ) -> str | None:
        """Name the backend of a call, None where none is named. Arguments as `polyattn.video.Place`; a call without a
        layer is of attention beside the blocks of the model."""
        values: dict[str, tuple[Any, int | None]] = {
            "steps": (step, steps),
            "layers": (layer, layers),
            "branches": (branch, None),
            "roles": (role, None),
        }
        found = (rule.backend for rule in self.others if rule.holds(*values[rule.kind]))
        return next(found, self.default)

    def backends(self) -> tuple[str, ...]:
        """List the backends that are named, each once."""
        named = (self.default, *(rule.backend for rule in self.others))
        return tuple(dict.fromkeys(name for name in named if name is not None))

    def moves(self) -> bool:
        """Tell whether two calls of one role may have different backends."""
        return any(rule.kind != "roles" for rule in self.others)


def read_rules(component: str, given: Any) -> Rules:
    """Read the rules of a component.

    Args:
        given: the name of a backend, or a mapping as at the top of this module.

    Raises:
        ConfigError: what is given is neither, a word is unknown, or a number is none.
    """
    if isinstance(given, str) and given:
        return Rules(given)
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{component}={given!r} names no backend; give a name, or a mapping of 'default' and {', '.join(KINDS)}"
        )
    known = ("default", *KINDS)
    if unknown := [key for key in given if key not in known]:
        raise ConfigError(
            f"the rules of {component} have no key {unknown[0]!r}.{did_you_mean(str(unknown[0]), known)} "
            f"Known: {', '.join(known)}"
        )
    found = []
    for kind in KINDS:
        spoken_of = given.get(kind, {})
        if not isinstance(spoken_of, Mapping):
            raise ConfigError(
                f"{component}.{kind}={spoken_of!r} is no mapping; say which and who, for example "
                f'{{"{"cross" if kind == "roles" else "uncond" if kind == "branches" else "0-3"}": "torch_sdpa"}}'
            )
        for spoken, backend in spoken_of.items():
            found.append(_rule(component, kind, str(spoken), backend))
    default = given.get("default")
    for backend in (default, *(rule.backend for rule in found)):
        if backend is not None and (not isinstance(backend, str) or not backend):
            raise ConfigError(f"a rule of {component} names {backend!r} for its backend; give a name, torch_sdpa say")
    return Rules(default, tuple(found))


def _rule(component: str, kind: str, spoken: str, backend: Any) -> Rule:
    if kind in ("branches", "roles"):
        if kind == "roles" and spoken not in ROLES:
            raise ConfigError(
                f"{component} has no role {spoken!r}.{did_you_mean(spoken, ROLES)} Roles: {', '.join(ROLES)}"
            )
        return Rule(kind, spoken, backend)
    spans = []
    for part in spoken.split(","):
        match = _SPAN.fullmatch(part.strip())
        if match is None or (match[1] and int(match[1]) > int(match[2])):
            raise ConfigError(
                f"{component}.{kind} {spoken!r}: {part.strip()!r} is no number and no range; write '0-3', '0,1' or "
                "'-1', which is the last one"
            )
        spans.append((int(match[1]), int(match[2])) if match[1] else (int(match[3]), int(match[3])))
    return Rule(kind, spoken, backend, tuple(spans))
