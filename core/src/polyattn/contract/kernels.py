"""What a plugin brings beside backends: kernels with choices that can be measured, and kernels that serving calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from ..errors import ConfigError, InvalidInputError, did_you_mean

__all__ = ["Choices", "DeviceOpsInfo", "Kernel", "Key"]

Key = tuple[Any, ...]
"""Values of `Kernel.key`, in its order: str, int, bool, float or None."""
Choices = Mapping[str, Any]
"""One candidate: a value for each of `Kernel.choices`, a choice of backend, or whatever a subject means by it."""


@dataclasses.dataclass(frozen=True)
class DeviceOpsInfo:
    """Kernels for one kind of device beside attention: those of serving (`DeviceOps`), or of methods (`BlockOps`).

    Attributes:
        device_type: of torch: cuda (ROCm too), xpu, ...
        target: "package.module:Class" of a `DeviceOps` or `BlockOps`, imported when somebody on such a device asks.
        requires: distributions without which it is not imported. rank: the lowest of those that can serve does.
        area: serving = a `DeviceOps`, methods = a `BlockOps`.
    """

    device_type: str
    target: str
    requires: tuple[str, ...] = ()
    rank: int = 100
    area: Literal["serving", "methods"] = "serving"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel with choices that change its speed and nothing else.

    Attributes:
        name: "package.kernel", such as `triton.decode`.
        key: names of what decides which choice is fast; lengths enter as buckets.
        choices: allowed values of each choice; a choice from anywhere else is refused.
        versions: distributions whose version a measurement belongs to, besides torch.
        revision: raised when the kernel changes so that old measurements say nothing.
    """

    name: str
    key: tuple[str, ...]
    choices: Mapping[str, tuple[Any, ...]]
    versions: tuple[str, ...] = ()
    revision: int = 1

    @property
    def subject(self) -> str:
        """What its measurements are filed under."""
        return f"kernel:{self.name}"

    def __hash__(self) -> int:
        return hash(self.name)

    def named(self, key: Key) -> dict[str, Any]:
        """A key with its names.

        Raises:
            InvalidInputError: it has another number of values, or one that no store can keep.
        """
        if len(key) != len(self.key):
            raise InvalidInputError(
                f"kernel {self.name!r}: a key of {len(key)} values; it has {len(self.key)}: {', '.join(self.key)}"
            )
        for name, value in zip(self.key, key, strict=True):
            if value is not None and type(value) not in (str, int, float, bool):
                raise InvalidInputError(
                    f"kernel {self.name!r}: {name}={value!r} is a {type(value).__name__}; a key has str, int, "
                    f"float, bool and None, such as str(dtype)"
                )
        return dict(zip(self.key, key, strict=True))

    def check(self, value: Choices) -> None:
        """Refuse what is no choice of this kernel.

        Raises:
            ConfigError: a choice that is missing, unknown, or has a value that is not allowed.
        """
        if unknown := sorted(set(value) - set(self.choices)):
            near = did_you_mean(unknown[0], self.choices)
            raise ConfigError(f"kernel {self.name!r} has no choice {unknown[0]!r}.{near} It has {_list(self.choices)}")
        for name, allowed in self.choices.items():
            if name not in value:
                raise ConfigError(f"kernel {self.name!r}: {name!r} is missing; its choices are {_list(self.choices)}")
            # True == 1 == 1.0, and a kernel is compiled for each.
            if not any(type(value[name]) is type(one) and value[name] == one for one in allowed):
                raise ConfigError(f"kernel {self.name!r}: {name}={value[name]!r}; allowed: {_list(allowed)}")


def _list(values: Any) -> str:
    return ", ".join(map(str, values))
