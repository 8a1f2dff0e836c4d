"""What to say to who asked for a backend that nobody registered. Torch-free, and knows backends as names only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from ..contract.packages import bringing
from ..errors import did_you_mean

__all__ = ["unknown_backend"]

AUTOMATIC = ("auto", "automatic", "best", "default", "none")
ELSEWHERE = {
    **dict.fromkeys(("sdpa", "torch", "pytorch", "efficient", "mem_efficient"), "torch_sdpa"),
    **dict.fromkeys(("eager", "math", "naive"), "reference"),
    **dict.fromkeys(("flash", "flash_attn", "flash_attention", "flashattn", "flashattention"), "fa"),
    **dict.fromkeys((f"flash_{word}_{n}" for word in ("attn", "attention") for n in (2, 3, 4)), "fa"),
}
"""What other libraries call a backend -> its name here."""


def unknown_backend(
    name: str,
    source: str,
    platform: str,
    usable: Mapping[str, Sequence[str]],
    known: Iterable[str],
    broken: Mapping[str, str],
) -> str:
    """The message about a name that is no backend's.

    Args:
        source: who asked, "" where nobody can tell. platform: of the request.
        usable: what is built and installed there, the best first -> its aliases.
        known: every name and alias of any platform.
        broken: label -> reason of plugins that could not be used.
    """
    by, known = f", asked for by {source}" if source else "", set(known)
    faults = "; ".join(f"{label}: {reason}" for label, reason in broken.items())
    blame = f" These plugins could not be used and may be what you want: {faults}." if faults else ""
    word = name.lower().replace("-", "_")
    told = "".join(broken).replace("_", "-")
    lacking = [] if word in known else [package for package in bringing(word) if package not in told]
    bring = f" {' and '.join(lacking)} would bring it: pip install {lacking[0]}." if lacking else ""
    here = [*usable, *(alias for aliases in usable.values() for alias in aliases)]
    return (
        f"no backend is named {name!r}{by}.{bring or _advice(name, here, set(known))}{blame} "
        f"Usable on {platform}: {', '.join(usable) or 'none'}; `polyattn list` says what each of the others needs"
    )


def _advice(name: str, here: Sequence[str], known: set[str]) -> str:
    word = name.lower().replace("-", "_")
    if word in AUTOMATIC:
        return " Name none, and the choice is automatic."
    meant = word if word in known else ELSEWHERE.get(word)
    if meant in known:
        return f" Did you mean {meant!r}{'' if meant in here else ', not usable here'}?"
    if near := did_you_mean(word, here) or _by_part(word, here):
        return near
    far = did_you_mean(word, known)
    return f"{far.removesuffix('?')}, not usable here?" if far else ""


def _by_part(word: str, here: Sequence[str]) -> str:
    """`flx` is nearer to the first word of `flex_attention` than to the whole."""
    parts = {part: name for name in here for part in name.split("_")}
    near = difflib.get_close_matches(word, parts, n=1, cutoff=0.75)
    return f" Did you mean {parts[near[0]]!r}?" if near else ""
