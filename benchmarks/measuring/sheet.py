"""The sheet: rows, peers and bars, read from YAML and checked. What it does not know it refuses."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

__all__ = ["KINDS", "OWN", "Bar", "Family", "Row", "Sheet", "SheetError", "read", "selected"]

OWN = "polyattn"
"""Name of polyattn's own entry in a row."""

_SIZES = ("heads", "kv_heads", "head_dim", "batch", "q_len")
KINDS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    kind: (frozenset(needed), frozenset(needed + allowed))
    for kind, needed, allowed in (
        ("dense", (*_SIZES, "causal"), ("v_head_dim",)),
        ("backward", (*_SIZES, "causal"), ("v_head_dim",)),
        ("paged", (*_SIZES, "kv_len", "page_size"), ("kv_dtype", "tree", "shared")),
        ("latent", (*_SIZES, "v_head_dim", "kv_len", "page_size"), ()),
        ("block_sparse", (*_SIZES, "block", "density"), ()),
    )
}
"""Kind of problem -> the fields of a row that it needs, and all that it takes."""


class SheetError(ValueError):
    """The sheet says something that this script does not know."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One problem. Lengths are tokens of a sequence; `kv_len` counts the new ones too; `shared` of it are the same
    pages for all sequences."""

    family: str
    kind: str
    peers: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    q_len: int
    v_head_dim: int = 0
    causal: bool = True
    kv_len: int = 0
    page_size: int = 0
    kv_dtype: str = "auto"
    tree: bool = False
    shared: int = 0
    block: int = 0
    density: float = 1.0

    @property
    def dims(self) -> tuple[int, int]:
        """(D, D_v)."""
        return self.head_dim, self.v_head_dim or self.head_dim

    @property
    def keys(self) -> int:
        """S_k."""
        return self.kv_len or self.q_len

    @property
    def recorded(self) -> bool:
        """Whether the row is replayed from a device graph: one new token for each sequence."""
        return self.kind in ("paged", "latent") and self.q_len == 1

    @property
    def unit(self) -> str:
        """Of the row's rates: bytes of keys and values, or operations."""
        return "GB/s" if self.recorded else "TFLOP/s"

    @property
    def name(self) -> str:
        """Unique within the family."""
        dims = "/".join(f"{d}" for d in dict.fromkeys(self.dims))
        parts = [f"d{dims}", f"H{self.heads}", f"kv{self.kv_heads}", f"B{self.batch}"]
        if self.kind in ("dense", "backward"):
            parts += ["causal" if self.causal else "full", f"S{self.q_len}"]
        elif self.kind == "block_sparse":
            parts += [f"S{self.q_len}", f"block {self.block}", f"density {self.density:g}"]
        else:
            parts += [f"q{self.q_len}"] if self.q_len > 1 else []
            parts += [f"KV{self.kv_len}", f"page {self.page_size}"]
            parts += [self.kv_dtype] if self.kv_dtype != "auto" else []
            parts += ["tree"] if self.tree else []
            parts += [f"shared {self.shared}"] if self.shared else []
        return " ".join(parts)

    def tiny(self) -> Row:
        """The same row as small as it can be: for the interpreter and for tests."""
        group = min(self.heads // self.kv_heads, 4)
        kv_heads = min(self.kv_heads, 2)
        small: dict[str, Any] = {"heads": kv_heads * group, "kv_heads": kv_heads, "batch": min(self.batch, 2)}
        if self.kind in ("dense", "backward"):
            small["q_len"] = 72
        elif self.kind == "block_sparse":
            small["q_len"] = 4 * self.block
        else:
            small["q_len"] = min(self.q_len, 8)
            small["shared"] = self.page_size if self.shared else 0
            small["kv_len"] = small["shared"] + 40
        return dataclasses.replace(self, **small)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """What the rows of some families must reach; the words are explained in the sheet."""

    name: str
    of: tuple[str, ...]
    than: str
    match: tuple[str, ...] = ()
    each: float | None = None
    geomean: float | None = None
    stretch: float | None = None
    spread: float | None = None
    work: str = ""


@dataclasses.dataclass(frozen=True)
class Family:
    """Rows that are measured together, as one part of a run."""

    name: str
    rows: tuple[Row, ...]


@dataclasses.dataclass(frozen=True)
class Sheet:
    """tolerance: "output" | "gradient" -> (whole, row). anchors_within: as in the sheet. digest: of its text."""

    tolerance: Mapping[str, tuple[float, float]]
    anchors_within: float
    families: tuple[Family, ...]
    bars: tuple[Bar, ...]
    digest: str


def read(path: Path, peers: Iterable[str]) -> Sheet:
    """The sheet of a file. peers: the names that rows may use.

    Raises:
        SheetError: an unknown key, a missing or ill-typed value, two rows that are one, or a bar on what is not there.
    """
    text = path.read_text(encoding="utf-8")
    top = _mapping("the sheet", yaml.safe_load(text), {"tolerance", "anchors_within", "families", "bars"})
    families = tuple(_family(name, given, frozenset(peers)) for name, given in top["families"].items())
    bars = tuple(_bar(given) for given in top["bars"])
    for bar in bars:
        _check_bar(bar, {family.name: family for family in families}, frozenset(peers))
    tolerance = {}
    for name, given in _mapping("tolerance", top["tolerance"], {"output", "gradient"}).items():
        limits = _mapping(f"tolerance of {name}", given, {"whole", "row"})
        tolerance[name] = (float(limits["whole"]), float(limits["row"]))
    return Sheet(
        tolerance, float(top["anchors_within"]), families, bars, hashlib.sha256(text.encode()).hexdigest()[:16]
    )


def selected(sheet: Sheet, patterns: Iterable[str]) -> tuple[Family, ...]:
    """The rows whose "family/name" or family one of the patterns names (`*` stands for anything).

    Raises:
        SheetError: a pattern that names none.
    """
    chosen: set[tuple[str, str]] = set()
    for pattern in patterns:
        found = {
            (family.name, row.name)
            for family in sheet.families
            for row in family.rows
            if fnmatch.fnmatch(family.name, pattern) or fnmatch.fnmatch(f"{family.name}/{row.name}", pattern)
        }
        if not found:
            names = ", ".join(family.name for family in sheet.families)
            raise SheetError(f"--rows {pattern!r} names no row; families: {names}; a row is FAMILY/NAME, * is anything")
        chosen |= found
    kept = (
        Family(family.name, tuple(row for row in family.rows if (family.name, row.name) in chosen))
        for family in sheet.families
    )
    return tuple(family for family in kept if family.rows)


def _mapping(where: str, given: Any, keys: set[str]) -> dict[str, Any]:
    """`given`, a mapping with exactly these keys."""
    if not isinstance(given, dict):
        raise SheetError(f"{where} is {given!r}; a mapping of {', '.join(sorted(keys))} is needed")
    if unknown := given.keys() - keys:
        raise SheetError(f"{where}: unknown {', '.join(sorted(map(str, unknown)))}; known: {', '.join(sorted(keys))}")
    if missing := keys - given.keys():
        raise SheetError(f"{where}: {', '.join(sorted(missing))} is missing")
    return given


def _family(name: str, given: Any, peers: frozenset[str]) -> Family:
    where = f"family {name}"
    given = _mapping(where, {"of": {}, **given} if isinstance(given, dict) else given, {"kind", "of", "peers", "rows"})
    kind = given["kind"]
    if kind not in KINDS:
        raise SheetError(f"{where}: kind {kind!r} is not known; known: {', '.join(KINDS)}")
    if unknown := set(given["peers"]) - peers:
        raise SheetError(f"{where}: no peer is called {', '.join(sorted(unknown))}; known: {', '.join(sorted(peers))}")
    rows = tuple(_row(where, name, kind, tuple(given["peers"]), {**given["of"], **row}) for row in given["rows"])
    if not rows:
        raise SheetError(f"{where} has no rows")
    if len({row.name for row in rows}) != len(rows):
        raise SheetError(f"{where}: two rows are the same")
    return Family(name, rows)


def _row(where: str, family: str, kind: str, peers: tuple[str, ...], given: dict[str, Any]) -> Row:
    needed, allowed = KINDS[kind]
    if unknown := given.keys() - allowed:
        raise SheetError(
            f"{where}: a {kind} row has no {', '.join(sorted(unknown))}; it takes {', '.join(sorted(allowed))}"
        )
    if missing := needed - given.keys():
        raise SheetError(f"{where}: a row lacks {', '.join(sorted(missing))}: {given}")
    for key, kind_of in typing.get_type_hints(Row).items():
        value = given.get(key)
        if value is not None and type(value) is not kind_of:
            raise SheetError(f"{where}: {key} is {value!r}; it is of type {kind_of.__name__}")
    row = Row(family=family, kind=kind, peers=peers, **given)
    if row.heads % row.kv_heads or row.q_len > row.keys or (row.shared and row.shared % row.page_size):
        raise SheetError(f"{where}: no attention has these sizes: {given}")
    return row


def _bar(given: Any) -> Bar:
    fields = {field.name for field in dataclasses.fields(Bar)}
    if not isinstance(given, dict) or {"name", "of", "than"} - given.keys():
        raise SheetError(f"a bar is {given!r}; it needs name, of and than")
    if unknown := given.keys() - fields:
        raise SheetError(
            f"bar {given['name']}: unknown {', '.join(sorted(unknown))}; known: {', '.join(sorted(fields))}"
        )
    return Bar(**{**given, "of": tuple(given["of"]), "match": tuple(given.get("match", ()))})


def _check_bar(bar: Bar, families: Mapping[str, Family], peers: frozenset[str]) -> None:
    where = f"bar {bar.name}"
    if unknown := [name for name in bar.of if name not in families]:
        raise SheetError(f"{where}: there is no family {', '.join(unknown)}")
    if bar.than not in {"best_peer", "one_another", *peers, *families}:
        raise SheetError(f"{where}: than {bar.than!r} is neither best_peer, one_another, a peer nor a family")
    if all(limit is None for limit in (bar.each, bar.geomean, bar.spread)):
        raise SheetError(f"{where} asks for nothing: give each, geomean or spread")
    if (bar.than in families) != bool(bar.match) or (bar.than == "one_another") != (bar.spread is not None):
        raise SheetError(f"{where}: match goes with a family, spread with one_another")
    names = {field.name for field in dataclasses.fields(Row)}
    if unknown := {*bar.match, *filter(None, [bar.work])} - names:
        raise SheetError(f"{where}: a row has no {', '.join(sorted(unknown))}")
