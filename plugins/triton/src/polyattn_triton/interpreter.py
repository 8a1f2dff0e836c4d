"""Whether this process interprets Triton's kernels, found out without importing Triton or torch.

Triton reads its switch where a kernel is declared: for its own library that is when it is first imported, by whoever
that is (transformers imports it, and so does torch before it compiles). Kernels that are declared later have to be
declared alike, because neither kind can call the other. That is why a person sets the switch before the program starts,
and this package never.
"""

from __future__ import annotations

import importlib.util
import os
import sys

__all__ = ["START", "SWITCH", "asked", "at_odds", "not_on_cpu"]

SWITCH = "TRITON_INTERPRET"
START = f"set {SWITCH}=1 before the program starts"


def asked() -> bool:
    """Whether the environment asks for the interpreter, as Triton reads it."""
    return os.environ.get(SWITCH, "").lower() in ("1", "true", "on", "yes", "y")


def _declared() -> bool | None:
    """Whether Triton's own library was declared to be interpreted; None: it is not imported yet."""
    library = sys.modules.get("triton.language.standard")
    if library is None:
        return None
    return any(type(entry).__name__ == "InterpretedFunction" for entry in vars(library).values())


def at_odds() -> tuple[str, str] | None:
    """Why no kernel can be declared in this process, and what to do; None where one can."""
    before, now = _declared(), asked()
    if before is None or before == now:
        return None
    if now:
        return f"it was imported before {SWITCH} was set, and now it can neither interpret nor compile", START
    return (
        f"it was imported while {SWITCH} was set, and since it is not it can neither interpret nor compile",
        f"leave {SWITCH} as it is while a program runs",
    )


def not_on_cpu() -> tuple[str, str] | None:
    """Why CPU tensors cannot be given to Triton in this process, and what to do; None where they can."""
    if not asked():
        return "CPUs run its kernels only under its interpreter, which is slow", START
    if importlib.util.find_spec("numpy") is None:
        return "its interpreter needs NumPy, which is not installed", "pip install numpy"
    return at_odds()
