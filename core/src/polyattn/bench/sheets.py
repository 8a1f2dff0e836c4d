"""Sheets: rows in families, and bars that they must reach, read from YAML and checked. What is not known is refused.

A sheet is a mapping of `title`, `families` and `bars`. A family is rows of one kind; `of` is what they have in common:

    families:
      decode:
        kind: paged
        of: {model: Llama 3.1 8B, source: its config.json, heads: 32, kv_heads: 8, head_dim: 128, q_len: 1}
        rows:
          - {batch: 1, kv_len: 8192, page_size: 16}

`rows.Row` and `bars.Bar` say what the words mean. A file that names a `program` is not of this kind: that program reads
it, and a folder is read without it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..contract.request import DTYPES
from ..errors import ConfigError, did_you_mean
from ..selection.config.reading import read_config_file
from .bars import OBJECTS, OWN, SUBJECTS, Bar
from .rows import KINDS, Row

__all__ = ["QUERY_DTYPES", "Family", "Sheet", "read", "selected"]

QUERY_DTYPES = ("float64", "float32", "bfloat16", "float16")
"""What queries are in: those that a call takes (`FLOATS` of `polyattn.semantics.validation`, which needs PyTorch)."""
_WORDS = {"dtype": QUERY_DTYPES, "kv_dtype": ("auto", *DTYPES)}
"""Fields of a row that take one of a few words. Which of them a cache of latent rows can be in, its format says when
the row is planned."""

LARGEST = 2**31 - 1
"""What no size of a row is above: kernels count in 32 bits, and a row's lengths are a list of as many numbers."""


@dataclasses.dataclass(frozen=True)
class Family:
    """Rows of one kind that are shown together."""

    name: str
    rows: tuple[Row, ...]


@dataclasses.dataclass(frozen=True)
class Sheet:
    """Several files as one. digests: name of a file -> of its text. titles: name of a file -> its title."""

    families: tuple[Family, ...]
    bars: tuple[Bar, ...]
    digests: Mapping[str, str]
    titles: Mapping[str, str]


def read(paths: Sequence[Path]) -> Sheet:
    """The sheets of files, and of the `.yaml` files of folders.

    Raises:
        ConfigError: a file that cannot be read, or is another program's; an unknown key, a missing or ill-typed value;
            two rows or two families that are one; a bar on what is not there.
    """
    families: dict[str, Family] = {}
    bars: list[Bar] = []
    across: list[tuple[str, Bar]] = []
    digests, titles = {}, {}
    files = _files(paths)
    for path in files:
        where = f"sheet {path}"
        text = read_config_file(path, where="sheet")
        if "program" in text:
            if path in paths:
                raise ConfigError(
                    f"{where} is measured by a program of its own: python {text['program']} --sheet {path}"
                )
            continue
        top = _mapping(where, {"families": {}, "bars": [], **text}, {"title", "families", "bars"})
        own = _mapping(f"{where}: families", top["families"])
        for name, given in own.items():
            if name in families:
                raise ConfigError(
                    f"{where}: family {name} is in sheet {families[name].rows[0].sheet} too: rename one of them"
                )
            families[name] = _family(f"{where}: family {name}", path.stem, name, given)
        found = [_bar(where, given) for given in _list(f"{where}: bars", top["bars"])]
        # A bar is on families of its own sheet; one that has none is about those of all sheets.
        if own:
            for bar in found:
                _check_bar(f"{where}: bar {bar.name}", bar, {name: families[name] for name in own}, "this sheet")
            found = [dataclasses.replace(bar, of=_families_of(bar, list(own))) for bar in found]
        else:
            across += [(f"{where}: bar {bar.name}", bar) for bar in found]
        bars += found
        digests[path.stem] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        titles[path.stem] = _typed(f"{where}: title", top["title"], str)
    some = _some_left_out(files)
    for where, bar in across:
        _check_bar(where, bar, families, "these sheets", partial=some)
    return Sheet(tuple(families.values()), tuple(bars), digests, titles)


def selected(sheet: Sheet, patterns: Iterable[str]) -> tuple[Family, ...]:
    """The rows whose "family/name" or family one of the patterns names (`*` stands for anything).

    Raises:
        ConfigError: a pattern that names none, or there are none.
    """
    if not sheet.families:
        raise ConfigError(
            f"no families, and so no rows, are in sheet {', '.join(sheet.digests)}: name the sheets with the rows "
            f"too, or their folder"
        )
    chosen: set[str] = set()
    for pattern in patterns:
        rows = (row for family in sheet.families for row in family.rows)
        found = {row.id for row in rows if any(fnmatch.fnmatchcase(name, pattern) for name in (row.family, row.id))}
        if not found:
            names = [family.name for family in sheet.families]
            raise ConfigError(
                f"--rows {pattern!r} names no row.{did_you_mean(pattern, names)} Families: {', '.join(names)}; a row "
                f"is FAMILY/NAME, and * is anything"
            )
        chosen |= found
    kept = (
        dataclasses.replace(family, rows=tuple(row for row in family.rows if row.id in chosen))
        for family in sheet.families
    )
    return tuple(family for family in kept if family.rows)


def _files(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
        if not inside:
            raise ConfigError(f"sheet {path} is a folder without .yaml files; name files, or a folder with some")
        found += inside
    names = [path.stem for path in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two sheets are called {', '.join(twice)}: rename one of them, or give one at a time")
    return found


def _some_left_out(files: Sequence[Path]) -> bool:
    """Return whether a sheet beside those that are read is not. Bars on all sheets of a folder may then be on families
    of that one: who measures some of the sheets with them is not to be refused, and where all are read none is
    elsewhere."""
    named = {path.resolve() for path in files}
    return any(other.resolve() not in named for path in files for other in path.parent.glob("*.yaml"))


def _mapping(where: str, given: Any, keys: set[str] | None = None) -> dict[str, Any]:
    """`given`, a mapping; with exactly these keys."""
    if not isinstance(given, dict):
        raise ConfigError(f"{where} is {given!r}; it must be a mapping")
    if keys is None:
        return given
    if unknown := given.keys() - keys:
        named = f"{'key' if len(unknown) == 1 else 'keys'} {', '.join(sorted(map(repr, unknown)))}"
        raise ConfigError(f"{where}: unknown {named}; allowed: {_words(keys)}")
    if missing := keys - given.keys():
        raise ConfigError(f"{where}: {_words(missing)} is missing")
    return given


def _list(where: str, given: Any) -> list[Any]:
    if not isinstance(given, list):
        raise ConfigError(f"{where} is {given!r}; it must be a list")
    return given


def _words(words: Iterable[str]) -> str:
    return ", ".join(sorted(words))


def _family(where: str, sheet: str, name: str, given: Any) -> Family:
    given = _mapping(where, {"of": {}, **_mapping(where, given)}, {"kind", "of", "rows"})
    kind = _known(where, "kind", given["kind"], sorted(KINDS))
    common = _mapping(f"{where}: of", given["of"])
    rows = tuple(
        _row(where, sheet, name, kind, {**common, **_mapping(f"{where}: a row", row)})
        for row in _list(f"{where}: rows", given["rows"])
    )
    if not rows:
        raise ConfigError(f"{where} has no rows")
    names = [row.name for row in rows]
    if twice := next((one for one in names if names.count(one) > 1), None):
        raise ConfigError(f"{where}: two rows are the same: {twice}")
    return Family(name, rows)


def _row(where: str, sheet: str, family: str, kind: str, given: dict[str, Any]) -> Row:
    needed, allowed = KINDS[kind]
    if unknown := given.keys() - allowed:
        raise ConfigError(f"{where}: a {kind} row has no {_words(unknown)}; it takes {_words(allowed)}")
    if missing := needed - given.keys():
        raise ConfigError(f"{where}: a row lacks {_words(missing)}: {given}")
    hints = typing.get_type_hints(Row)
    values = {key: _typed(f"{where}: {key}", value, hints[key]) for key, value in given.items()}
    for key, words in _WORDS.items():
        if key in values:
            _known(where, key, values[key], words)
    row = Row(family=family, sheet=sheet, kind=kind, **values)
    if wrong := _wrong(row):
        raise ConfigError(f"{where}: {wrong}: {given}")
    return row


def _typed(where: str, value: Any, kind: Any) -> Any:
    """`value` as a field of that type takes it; lists of whole numbers become tuples."""
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list) or not all(type(one) is int for one in value):
            raise ConfigError(f"{where} is {value!r}; it is a list of whole numbers")
        value, length = tuple(value), typing.get_args(kind)
        if Ellipsis not in length and len(value) != len(length):
            raise ConfigError(f"{where} is {list(value)}; it is {len(length)} whole numbers")
        return value
    if kind is float and type(value) in (int, float):
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise ConfigError(f"{where} is {value}; it is a finite number")
        return value
    if type(value) is not kind:
        raise ConfigError(f"{where} is {value!r}; it is of type {kind.__name__}")
    return value


def _known(where: str, key: str, value: Any, words: Sequence[str]) -> str:
    """`value`, one of the words."""
    if value not in words:
        raise ConfigError(
            f"{where}: {key} {value!r} is not known.{did_you_mean(str(value), words)} Known: {', '.join(words)}"
        )
    return str(value)


def _names(where: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not given or not all(isinstance(one, str) and one for one in given):
        raise ConfigError(f"{where} is {given!r}; it is a list of names, one or more")
    return tuple(given)


def _wrong(row: Row) -> str:
    """Return what of a row's sizes no attention has, if anything."""
    sizes = {
        "heads": row.heads,
        "kv_heads": row.kv_heads,
        "head_dim": row.head_dim,
        "batch": row.batch,
        **({"page_size": row.page_size, "kv_len": row.kv_len} if row.serving else {}),
        **({"lengths": min(row.lengths, default=0)} if row.kind == "packed" else {"q_len": row.q_len}),
    }
    if small := [f"{name} {size}" for name, size in sizes.items() if size < 1]:
        return f"{', '.join(small)} is below 1"
    most = {**sizes, "lengths": max(row.lengths, default=0), "v_head_dim": row.v_head_dim, "kv_len": row.kv_len}
    if large := [f"{name} {size}" for name, size in most.items() if size > LARGEST]:
        return f"{', '.join(large)} is above {LARGEST}, which no device holds"
    # 0 is where nothing is given: they are what another size says, or off.
    others = {"v_head_dim": row.v_head_dim, "kv_len": row.kv_len, "shared": row.shared, "softcap": row.softcap}
    if small := [f"{name} {size:g}" for name, size in others.items() if size < 0]:
        return f"{', '.join(small)} is below 0"
    if row.heads % row.kv_heads:
        return f"{row.heads} query heads are no multiple of {row.kv_heads} key heads"
    if row.shared and (row.shared % row.page_size or row.shared >= row.kv_len):
        return f"shared {row.shared} must be whole pages of {row.page_size}, and less than kv_len {row.kv_len}"
    if row.serving and row.q_len > row.kv_len - row.shared:
        after = f", after the {row.shared} that are shared" if row.shared else ""
        return f"kv_len {row.kv_len} counts the {row.q_len} new tokens too{after}"
    if min(row.window) < -1:
        return f"window {list(row.window)}: left and right keys besides the row's own, -1 is no bound"
    if row.kind == "block_sparse" and (row.q_len % max(row.block, 1) or row.block < 1 or not 0 < row.density <= 1):
        return "q_len must be whole blocks, and density above 0, at most 1"
    return ""


def _bar(where: str, given: Any) -> Bar:
    fields = {field.name: field for field in dataclasses.fields(Bar)}
    given = _mapping(f"{where}: a bar", given)
    if unknown := given.keys() - fields:
        raise ConfigError(f"{where}: a bar has no {_words(unknown)}; it takes {_words(fields)}")
    if missing := {"name", "of", "than"} - given.keys():
        raise ConfigError(f"{where}: a bar lacks {_words(missing)}: {given}")
    hints = typing.get_type_hints(Bar)
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key in ("of", "match"):
            values[key] = _names(f"{where}: {key} of bar {given['name']}", value)
        elif key in ("each", "geomean", "stretch", "spread"):
            values[key] = _typed(f"{where}: {key} of bar {given['name']}", value, float)
        else:
            values[key] = _typed(f"{where}: {key} of bar {given['name']}", value, hints[key])
    return Bar(**values)


def _families_of(bar: Bar, own: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in own if any(fnmatch.fnmatchcase(name, pattern) for pattern in bar.of))


def _check_bar(where: str, bar: Bar, families: Mapping[str, Family], whose: str, *, partial: bool = False) -> None:
    """families: those that the bar may be on, of `whose` sheets. partial: and of others, which are not read."""
    for pattern in () if partial else bar.of:
        if not fnmatch.filter(families, pattern):
            near = did_you_mean(pattern, families)
            raise ConfigError(
                f"{where}: no family of {whose} is called {pattern}.{near} There are: {_words(families) or 'none'}"
            )
    if bar.who not in SUBJECTS and not _is_candidate(bar.who):
        raise ConfigError(f"{where}: who {bar.who!r} is neither {', '.join(SUBJECTS)} nor polyattn/BACKEND")
    # Which peers there are is known when a run starts (`unknown_targets`): any name without a slash may be one.
    if not bar.than or ("/" in bar.than and bar.than not in families and not _is_candidate(bar.than)):
        raise ConfigError(
            f"{where}: than {bar.than!r} is neither {', '.join(OBJECTS)}, polyattn/BACKEND, a family nor a peer, whose "
            f"names have no slash"
        )
    limits = {"each": bar.each, "geomean": bar.geomean, "stretch": bar.stretch, "spread": bar.spread}
    for name, limit in limits.items():
        if limit is not None and limit <= 0:
            raise ConfigError(f"{where}: {name} {limit:g} is no limit: give a number above 0")
    if all(limit is None for limit in (bar.each, bar.geomean, bar.spread)):
        raise ConfigError(f"{where} asks for nothing: give each, geomean or spread")
    if (bar.than in families) != bool(bar.match) or (bar.than == "one_another") != (bar.spread is not None):
        raise ConfigError(f"{where}: match goes with a family, spread with one_another")
    _check_fields(where, bar, families)


def _check_fields(where: str, bar: Bar, families: Mapping[str, Family]) -> None:
    """Check that rows have every field that a bar reads: a field that neither of two rows has would make them the
    same."""
    read_of = {name: {*bar.match, *filter(None, [bar.work])} for name in _families_of(bar, list(families))}
    read_of[bar.than] = read_of.get(bar.than, set()) | set(bar.match)
    for name, fields in read_of.items():
        kind = families[name].rows[0].kind if name in families else ""
        if kind and (unknown := fields - KINDS[kind][1]):
            raise ConfigError(f"{where}: a {kind} row, of family {name}, has no {_words(unknown)}")
    if bar.work and typing.get_type_hints(Row).get(bar.work) not in (int, float):
        raise ConfigError(f"{where}: work {bar.work!r} is no number of a row: another's time is multiplied by it")


def _is_candidate(name: str) -> bool:
    return name.startswith(OWN) and name != OWN
