"""A row of a sheet: one problem, by its sizes; what it does and how much of it (`work`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["KINDS", "Row", "Work", "visible"]

_HEADS = ("heads", "kv_heads", "head_dim")
_SCORES = ("window", "softcap", "sinks", "dtype", "model", "source")
_DENSE = (*_HEADS, "batch", "q_len", "causal")
_CACHE = (*_HEADS, "batch", "q_len", "kv_len", "page_size")

KINDS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    kind: (frozenset(needed), frozenset((*needed, *_SCORES, *allowed)))
    for kind, needed, allowed in (
        ("dense", _DENSE, ("v_head_dim", "kv_len")),
        ("training", _DENSE, ("v_head_dim", "kv_len")),
        ("backward", _DENSE, ("v_head_dim", "kv_len")),
        ("packed", (*_HEADS, "lengths", "causal"), ("v_head_dim",)),
        ("paged", _CACHE, ("kv_dtype", "tree", "shared")),
        ("latent", (*_CACHE, "v_head_dim"), ("kv_dtype",)),
        ("block_sparse", (*_HEADS, "batch", "q_len", "block", "density"), ()),
    )
}
"""Kind of problem -> the fields of a row that it needs, and all that it takes."""

LATENT_FP8_ROW = 656
"""Bytes of a latent row in FP8: `polyattn.semantics.kv_quant.MLA_BYTES`, which needs PyTorch to be read."""

_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "fp4_e2m1": 0.5,
}


@dataclasses.dataclass(frozen=True)
class Work:
    """Describes what one call has to do at least.

    Attributes:
        operations: floating-point operations. bytes: of the keys and values that are read.
        unit: what the row's rates are in: TFLOP/s, or GB/s where reading the cache is what takes the time.
    """

    operations: float
    bytes: float
    unit: str

    def rate(self, seconds: float) -> float:
        """Return the rate in `unit`."""
        return self.bytes / seconds / 1e9 if self.unit == "GB/s" else self.operations / seconds / 1e12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Describes one problem.

    Attributes:
        family: the family of the sheet. sheet: the name of its file. kind: a key of `KINDS`.
        model, source: whose shape it is, and where that is written.
        heads, kv_heads, head_dim, v_head_dim: H_q, H_kv, D, D_v (0: D).
        batch: sequences. q_len, kv_len: S_q, S_k of each; S_k counts the new tokens too, 0: S_q.
        lengths: S of each packed sequence.
        causal, window, softcap, sinks: S3 to S5; causal is bottom-right.
        page_size; kv_dtype: of the cache, auto = `dtype`; tree: the new tokens are a tree of drafts.
        shared: tokens at the start of a sequence that are the same pages for all.
        block, density: tokens of a block, the share of blocks that each block of queries sees.
    """

    family: str
    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    batch: int = 1
    q_len: int = 0
    kv_len: int = 0
    lengths: tuple[int, ...] = ()
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: bool = False
    dtype: str = "bfloat16"
    page_size: int = 0
    kv_dtype: str = "auto"
    tree: bool = False
    shared: int = 0
    block: int = 0
    density: float = 1.0
    model: str = ""
    source: str = ""
    sheet: str = ""

    @property
    def dims(self) -> tuple[int, int]:
        """(D, D_v)."""
        return self.head_dim, self.v_head_dim or self.head_dim

    @property
    def keys(self) -> int:
        """S_k."""
        return self.kv_len or self.q_len

    @property
    def serving(self) -> bool:
        """Return whether keys and values are in a paged cache."""
        return self.kind in ("paged", "latent")

    @property
    def recorded(self) -> bool:
        """Return whether the row is replayed from a device graph: one new token for each sequence."""
        return self.serving and self.q_len == 1

    @property
    def id(self) -> str:
        """Unique within the sheets of a run."""
        return f"{self.family}/{self.name}"

    @property
    def name(self) -> str:
        """Unique within the family."""
        parts = ["d" + "/".join(f"{d}" for d in dict.fromkeys(self.dims)), f"H{self.heads}", f"kv{self.kv_heads}"]
        parts += self._lengths()
        parts += ["full"] if not self.causal and self.kind != "block_sparse" else []
        parts += [f"window {self.window[0]},{self.window[1]}"] if self.window != (-1, -1) else []
        parts += [f"softcap {self.softcap:g}"] if self.softcap else []
        parts += ["sinks"] if self.sinks else []
        parts += [self.dtype] if self.dtype != "bfloat16" else []
        return " ".join(parts)

    def _lengths(self) -> list[str]:
        if self.kind == "packed":
            return [f"N{len(self.lengths)}", f"T{sum(self.lengths)}", f"longest {max(self.lengths)}"]
        if self.kind == "block_sparse":
            return [f"B{self.batch}", f"S{self.q_len}", f"block {self.block}", f"density {self.density:g}"]
        if not self.serving:
            return [f"B{self.batch}", f"S{self.q_len}" + (f"x{self.keys}" if self.keys != self.q_len else "")]
        parts = [f"B{self.batch}", *([f"q{self.q_len}"] if self.q_len > 1 else []), f"KV{self.kv_len}"]
        parts += [f"page {self.page_size}", *([self.kv_dtype] if self.kv_dtype != "auto" else [])]
        return [*parts, *(["tree"] if self.tree else []), *([f"shared {self.shared}"] if self.shared else [])]

    def fields(self) -> dict[str, Any]:
        """Return what a result file keeps of it: what a row of its kind may say, as JSON has it."""
        values = ((name, getattr(self, name)) for name in sorted(KINDS[self.kind][1]))
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values}

    def tiny(self) -> Row:
        """The same row as small as it can be: for CPUs, interpreters and tests."""
        kv_heads = min(self.kv_heads, 2)
        small: dict[str, Any] = {"heads": kv_heads * min(self.heads // self.kv_heads, 4), "kv_heads": kv_heads}
        small["batch"] = min(self.batch, 2)
        if self.kind == "packed":
            small["lengths"] = (40, 7)
        elif self.kind == "block_sparse":
            small["q_len"] = 4 * self.block
        elif self.serving:
            small["q_len"] = min(self.q_len, 8)
            small["shared"] = self.page_size if self.shared else 0
            small["kv_len"] = small["shared"] + 40
        else:
            small["q_len"] = 72
            small["kv_len"] = 0 if self.keys == self.q_len else 40 if self.keys < self.q_len else 96
        if self.window[0] > 0:
            small["window"] = (min(self.window[0], 15), min(self.window[1], 15))
        return dataclasses.replace(self, **small)

    def work(self) -> Work:
        """Two products of every query with the keys that it sees, 2 operations for each pair and number: forward
        2 (D + D_v) a pair, backward 2.5 times that (five products), training both. Bytes: the rows of the cache, or
        of keys and values, that some query sees, in their stored width, scales apart; a prefix that sequences share is
        one. Block-sparse rows do what their lists say."""
        d, d_v = self.dims
        width = self.head_dim if self.kind == "latent" else d + d_v
        if self.kind == "block_sparse":
            blocks = self.q_len // self.block
            pairs = self.batch * self.q_len * max(round(self.density * blocks), 1) * self.block
            read = self.batch * self.q_len
        elif self.kind == "packed":
            pairs = sum(visible(n, n, self.causal, self.window) for n in self.lengths)
            read = sum(self.lengths)
        else:
            q_len, keys = self.q_len, self.keys
            # A tree sees its prefix and, of the new tokens, about what a chain would.
            pairs = self.batch * visible(q_len, keys, self.causal or self.serving, self.window)
            left = self.window[0]
            read = self.batch * (min(keys, left + q_len) if left >= 0 and self.serving else keys)
            read -= (self.batch - 1) * self.shared
        times = {"backward": 2.5, "training": 3.5}.get(self.kind, 1.0)
        stored = _BYTES[self.dtype if self.kv_dtype == "auto" else self.kv_dtype]
        row_bytes = LATENT_FP8_ROW if self.kind == "latent" and stored == 1 else width * stored
        return Work(
            operations=2.0 * times * self.heads * pairs * (d + d_v),
            bytes=float(read * self.kv_heads * row_bytes),
            unit="GB/s" if self.recorded else "TFLOP/s",
        )


def visible(S_q: int, S_k: int, causal: bool, window: tuple[int, int]) -> int:
    """Pairs of a query and a key that it sees; causal and window end at the bottom right (S3, S4)."""
    left, right = window
    right = 0 if causal else right
    if left < 0 and right < 0:
        return S_q * S_k
    seen = 0
    for place in range(S_k - S_q, S_k):
        first = max(place - left, 0) if left >= 0 else 0
        last = min(place + right, S_k - 1) if right >= 0 else S_k - 1
        seen += max(last - first + 1, 0)
    return seen
