"""The words that a request's fields may have, and the short names of dtypes that people type.

Fields that are not among these are open: platforms, architectures and methods belong to plugins, numbers to models.
"""

from __future__ import annotations

from typing import Any, get_args

from ..errors import did_you_mean
from .request import DTYPES, FAMILIES, PHASES, Causal, MaskKind, Segments, SRelation

__all__ = ["DTYPE_WORDS", "WORDS", "nearest"]

WORDS: dict[str, tuple[Any, ...]] = {
    "family": FAMILIES,
    "dtype": DTYPES,
    "phase": PHASES,
    "layout": ("BSHD", "BHSD", "THD"),
    "kv_dtype": ("auto", *DTYPES),
    "kv_storage": DTYPES,
    "causal": get_args(Causal),
    "mask": get_args(MaskKind),
    "segments": get_args(Segments),
    "grad": ("query", "key", "value", "mask", "sinks", "lse"),
    "graph_capture": (False, True, "session"),
    "s_relation": get_args(SRelation),
    "kv_layout": ("", "NHD", "HND", "vectorised", "NZ"),
    "kv_scales": ("", "tensor", "head", "token", "block16", "block128"),
    "state_dtype": ("", *DTYPES),
    "state_layout": ("", "KV", "VK"),
    "state_out": ("", "every"),
    "raw_gates": ("", "softplus", "bounded"),
    "transform": ("", "subclass", "functionalize", "vmap", "grad", "gradgrad", "jvp"),
}
"""Of `grad`, a tuple, the words are its members."""

DTYPE_WORDS: dict[str, str] = {
    "fp64": "float64",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    **{name: name for name in DTYPES},
}
"""What a person may call a dtype -> the word of requests."""


def nearest(name: str, word: object) -> str:
    """`did_you_mean` for a word that a field does not have: of a short name the dtype it stands for."""
    if "dtype" in name and word in DTYPE_WORDS:
        return f" Did you mean {DTYPE_WORDS[str(word)]!r}?"
    return did_you_mean(str(word), (known for known in WORDS[name] if isinstance(known, str)))
