"""This module decides which form of latent attention a step takes: a rule over host-known lengths, with its reason.

The rule is SGLang's: a prompt without a prefix is ordinary attention; a short prefix is cheaper to read as latent rows;
a long one is up-projected, in one piece while that fits, else chunk by chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from ...errors import InvalidInputError, did_you_mean

__all__ = ["MODES", "Decision", "Form", "LatentPolicy", "decide"]

Form = Literal["absorbed", "unabsorbed", "one_shot", "chunked"]

MODES: dict[str, str] = {
    "decode": "one query per sequence reads each row once",
    "target_verify": "a few drafts per sequence read each row once",
    "draft_extend": "a few drafts per sequence read each row once",
    "mixed": "rows that decode are among them, whose prefixes would be up-projected for one query each",
    "idle": "there are no tokens",
    "extend": "",
}
"""Modes of a step (`ForwardMode`, in lower case) -> why it is absorbed whatever its lengths; "" = it depends."""


@dataclasses.dataclass(frozen=True)
class LatentPolicy:
    """The limits of the rule.

    Attributes:
        threshold: prefix tokens of all sequences together from which on they are up-projected.
        one_shot_tokens: keys of all sequences, new ones included, up to which that is done in one piece.
        chunk: prefix tokens that are up-projected at once where they do not fit in one piece. They take
            H * (D_nope + D_r + D_v) numbers each.
        queries: new tokens that read a prefix token, on average, for up-projecting to be considered. In
            multiply-adds it pays from (D_nope + D_v) * D_c / (2 * D_c - D_nope - D_v) on, 171 for DeepSeek-V3; 1 = the
            thresholds alone decide.

    Raises:
        InvalidInputError: a limit that is no whole number, or too small.
    """

    threshold: int = 8192
    one_shot_tokens: int = 131072
    chunk: int = 131072
    queries: int = 1

    def __post_init__(self) -> None:
        for name, least in (("threshold", 0), ("one_shot_tokens", 0), ("chunk", 1), ("queries", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidInputError(
                    f"LatentPolicy {name}={value!r}; a whole number of tokens, at least {least}, is needed"
                )


@dataclasses.dataclass(frozen=True)
class Decision:
    """The form of a step, and why.

    Attributes:
        form: "absorbed"; "unabsorbed" (no prefix); "one_shot" (prefix and new tokens up-projected together); "chunked"
            (the new tokens, then the prefix in chunks, merged by LSE).
    """

    form: Form
    reason: str

    def __str__(self) -> str:
        return f"{self.form}: {self.reason}"


def decide(
    mode: str, prefix_lens: Sequence[int], query_lens: Sequence[int], policy: LatentPolicy | None = None
) -> Decision:
    """Choose the form of a step.

    Args:
        mode: a name of `MODES`. prefix_lens, query_lens: [N] each, keys before the new tokens, and new tokens.
        policy: None = the defaults.

    Raises:
        InvalidInputError: an unknown mode.
    """
    limits = policy or LatentPolicy()
    if mode not in MODES:
        raise InvalidInputError(f"mode={mode!r} is not one of {', '.join(MODES)}.{did_you_mean(str(mode), MODES)}")
    if MODES[mode]:
        return Decision("absorbed", f"mode {mode}: {MODES[mode]}")
    prefix, new = sum(prefix_lens), sum(query_lens)
    if not prefix:
        return Decision("unabsorbed", "no sequence has a prefix")
    if prefix < limits.threshold:
        return Decision("absorbed", f"prefixes of {prefix} tokens in all are below the threshold, {limits.threshold}")
    reads = sum(p * q for p, q in zip(prefix_lens, query_lens, strict=True)) / prefix
    if reads < limits.queries:
        return Decision("absorbed", f"{reads:.1f} new tokens read a prefix token, {limits.queries} are needed")
    keys = prefix + new
    if keys <= limits.one_shot_tokens:
        return Decision("one_shot", f"{keys} keys in all, {prefix} of them prefix: at most {limits.one_shot_tokens}")
    return Decision(
        "chunked", f"{keys} keys in all are above {limits.one_shot_tokens}: prefixes in chunks of {limits.chunk}"
    )
