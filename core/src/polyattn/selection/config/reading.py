"""Read options from any of their forms: a path (JSON, YAML, TOML), a JSON object, or `key=value,key=value`."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ...errors import ConfigError
from ...user_files import MEGABYTE, read_bytes
from .pairs import parse_pairs
from .words import FORMS, show

__all__ = ["parse_backend_config", "read_config_file"]

SUFFIXES = (".json", ".yaml", ".yml", ".toml")
MOST = MEGABYTE // 8
"""Bytes of a file. Readers of YAML need seconds for more."""
MOST_NODES = 50_000
"""Values of a YAML file with its aliases written out: a few lines of them can stand for more than memory holds."""
MOST_DIGITS = 1_000
"""Characters of a YAML value that is no text, and of the parts of a TOML key: readers are slow with more."""
MOST_PARTS = 100


def parse_backend_config(
    config: str | Mapping[str, Any] | os.PathLike[str], *, where: str = "--attention-backend-config"
) -> dict[str, Any]:
    """The options in `config`, whatever its form.

    Args:
        config: a mapping (returned as a dict), a path object, or text. Text is, in this order: JSON when it begins
            with '{'; a file when it exists or looks like a path and holds no '='; else `key=value,key=value`.
        where: names the source at the start of each message.

    Returns:
        Nested dict with string keys; values are bool, int, float, str, None, lists and dicts.

    Raises:
        ConfigError: with the position, the offending piece and what is allowed.

    Example:
        >>> parse_backend_config("sparsity=0.5, spatial_chunk_size=[-4, 13], a.b=true")
        {'sparsity': 0.5, 'spatial_chunk_size': [-4, 13], 'a': {'b': True}}
    """
    if isinstance(config, Mapping):
        return _named(config, where)
    if isinstance(config, os.PathLike):
        return read_config_file(config, where=where)
    if not isinstance(config, str):
        raise ConfigError(f"{where}: {show(config)} is a {type(config).__name__}; give {FORMS}")
    text = config.strip()
    if not text:
        raise ConfigError(f"{where} is empty; give {FORMS}")
    if text.startswith("{"):
        return _named(_json(text, where), where)
    if text.startswith("["):
        raise ConfigError(f"{where}: {show(text)} is a list; give {FORMS}")
    if _is_path(text):
        return read_config_file(text, where=where)
    return parse_pairs(text, where)


def _is_path(text: str) -> bool:
    """Pairs often end in '.json' (`mask_strategy_file_path=/m.json`): text with '=' is a path only if it exists."""
    known = text.lower().endswith(SUFFIXES)
    # `expanduser` looks a name up, which has no NUL; a path with one is said to be none when it is read.
    exists = "\0" not in text and os.path.exists(os.path.expanduser(text))
    return exists and known if "=" in text else exists or known or os.sep in text


def read_config_file(path: str | os.PathLike[str], *, where: str = "config file") -> dict[str, Any]:
    """The mapping in a JSON, YAML (safe-loaded) or TOML file, by suffix. An empty YAML or TOML file is {}.

    Raises:
        ConfigError: missing, unreadable, no regular file, larger than 128 KiB, not UTF-8, wrong suffix, malformed (with
            line and column), aliases or keys that stand for more than a configuration has, not a mapping.
    """
    named = os.fspath(path)
    file = Path(named if "\0" in named else os.path.expanduser(named))
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        if not file.exists():
            raise ConfigError(f"{where}: {file} does not exist; name a file with one of: {', '.join(SUFFIXES)}")
        raise ConfigError(f"{where}: {file} has the suffix {file.suffix!r}; allowed: {', '.join(SUFFIXES)}")
    try:
        text = read_bytes(file, MOST).decode("utf-8-sig")
    except FileNotFoundError as cause:
        hint = "" if file.is_absolute() else "; relative paths start at the working directory"
        raise ConfigError(f"{where}: {file} does not exist{hint}") from cause
    except UnicodeDecodeError as cause:
        raise ConfigError(f"{where}: {file} is not UTF-8 at byte {cause.start}; save it as UTF-8") from cause
    except (OSError, ValueError) as cause:  # ValueError: a NUL in the path
        raise ConfigError(f"{where}: {show(str(file))} cannot be read: {cause}") from cause
    reader = {".json": _json, ".toml": _toml}.get(suffix, _yaml)
    try:
        found = reader(text, f"{where}: {file}")
    except RecursionError as cause:
        raise ConfigError(f"{where}: {file} is nested too deeply") from cause
    return _named({} if found is None and reader is _yaml else found, f"{where}: {file}")


def _named(found: Any, where: str) -> dict[str, Any]:
    """`found` as a dict, after checking that it and every mapping inside has string keys."""
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where} holds {show(found)}, a {type(found).__name__}; it must hold a mapping of options")
    # YAML aliases can make a graph with cycles, or a tree of exponential size: visit each object once.
    visited: set[int] = set()
    stack: list[Any] = [found]
    while stack:
        value = stack.pop()
        if id(value) in visited or not isinstance(value, (Mapping, list, tuple)):
            continue
        visited.add(id(value))
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    raise ConfigError(f"{where}: the key {show(key)} is a {type(key).__name__}; keys are strings")
            stack.extend(value.values())
        else:
            stack.extend(value)
    return dict(found)


def _json(text: str, where: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise ConfigError(f"{where}: the key {twice!r} is given twice")
        return out

    def constant(name: str) -> NoReturn:
        raise ConfigError(f"{where}: {name} is not a JSON value; write a finite number or null")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as cause:
        near = show(text[cause.pos : cause.pos + 20]) if cause.pos < len(text) else "the end"
        raise ConfigError(
            f"{where} is not JSON: {cause.msg} at line {cause.lineno} column {cause.colno}, near {near}; "
            'JSON looks like {"sparsity": 0.5}'
        ) from cause
    except RecursionError as cause:
        raise ConfigError(f"{where} is nested too deeply") from cause
    except ConfigError:
        raise
    except ValueError as cause:  # an integer beyond Python's digit limit
        raise ConfigError(f"{where}: {cause}") from cause


def _yaml(text: str, where: str) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ModuleNotFoundError as cause:
        raise ConfigError(f"{where}: YAML needs pyyaml: pip install 'polyattn[cli]', or write it as JSON") from cause

    def construct_mapping(self: Any, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            # '<<' may repeat (it merges); every other repeated key would silently lose its first value.
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return yaml.SafeLoader.construct_mapping(self, node, deep)

    loader = type("StrictSafeLoader", (yaml.SafeLoader,), {"construct_mapping": construct_mapping})
    # YAML 1.1 reads 1e-3 as a string because it has no dot; nobody who writes it means that.
    exponent = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+\Z")
    loader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, list("-+0123456789"))  # type: ignore[attr-defined]
    try:
        reader = loader(text)
        node = reader.get_single_node()
        if node is None:
            return None
        _check_nodes(yaml, node, where)
        return reader.construct_document(node)
    except yaml.YAMLError as cause:
        mark = getattr(cause, "problem_mark", None)
        at = f" at line {mark.line + 1} column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{where} is not YAML: {getattr(cause, 'problem', None) or cause}{at}") from cause
    except ConfigError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as cause:
        # What pyyaml lets through where a tag or a date does not fit its text: 2026-13-45, !!bool x.
        raise ConfigError(f"{where} is not YAML: a value does not fit its type ({cause})") from cause


def _check_nodes(yaml: Any, root: Any, where: str) -> None:
    """Of a document as it was parsed, before values are made of it, which is when aliases are written out."""
    sizes: dict[int, int] = {}
    stack: list[tuple[Any, bool]] = [(root, False)]
    open_: set[int] = set()
    while stack:
        node, inside = stack.pop()
        at = f"line {node.start_mark.line + 1}"
        if isinstance(node, yaml.ScalarNode):
            if node.tag != "tag:yaml.org,2002:str" and len(node.value) > MOST_DIGITS:
                raise ConfigError(
                    f"{where}: the value in {at} has {len(node.value)} characters; quote it if it is text"
                )
            sizes[id(node)] = 1
            continue
        parts = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
        if inside:
            open_.discard(id(node))
            sizes[id(node)] = 1 + sum(sizes[id(part)] for part in parts)
            if sizes[id(node)] > MOST_NODES:
                raise ConfigError(
                    f"{where}: what begins in {at} holds more than {MOST_NODES} values with its aliases written out; "
                    f"write what is meant without them"
                )
        elif id(node) not in sizes:
            open_.add(id(node))
            stack.append((node, True))
            for part in parts:
                if id(part) in open_:
                    raise ConfigError(
                        f"{where}: what begins in {at} holds itself, by an alias; write out what is meant"
                    )
                if id(part) not in sizes:
                    stack.append((part, False))


def _toml(text: str, where: str) -> Any:
    for name in ("tomllib", "tomli"):
        try:
            toml = importlib.import_module(name)
            break
        except ModuleNotFoundError:
            continue
    else:
        raise ConfigError(f"{where}: TOML on Python 3.10 needs tomli: pip install tomli, or write it as JSON")
    bare = re.sub(r'"[^"\n]*"|\'[^\'\n]*\'', "q", text)
    for number, line in enumerate(bare.split("\n"), 1):
        keys = (sum(map(bool, map(str.strip, piece.split(".")))) for piece in re.split(r"[=,{}\[\]]", line))
        if max(keys) > MOST_PARTS:
            raise ConfigError(f"{where}: a key in line {number} has more than {MOST_PARTS} parts between dots")
    try:
        return toml.loads(text)
    except toml.TOMLDecodeError as cause:
        raise ConfigError(f"{where} is not TOML: {cause}") from cause
    except ValueError as cause:  # an integer beyond Python's digit limit, a date that is none
        raise ConfigError(f"{where}: {cause}") from cause
