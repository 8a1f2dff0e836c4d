"""Facts about a vendor's functions, taken from its published package: nothing of it is installed or run.

    python -m polyattn.testing.signatures take FILE KEY PACKAGE==VERSION MEMBER [--name NAME] [--from PATH]
    python -m polyattn.testing.signatures compare FILE [--package PACKAGE==VERSION] [--from PATH] [--write]

`take` reads one function out of a package and keeps it in FILE, with the version and the sha256 of the file it was read
from. `compare` reads all of FILE again, from the versions in it or from a newer one, and says what changed: it exits
with 1 if anything did; with `--write` FILE is then brought up to date. A package comes from the registry (`pip
download`), or from `--from`: a wheel, an sdist, a checkout, a file.

Python sources and stubs are read as syntax trees; schemas of torch operators as text, out of YAML, sources or compiled
libraries.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ..errors import ConfigError
from .emulators.signing import signature_of_text

__all__ = ["Change", "Source", "compared", "entry_of", "main", "parameters_of", "schema_of"]

_OTHER = "OTHER"
Facts = dict[str, dict[str, str]]


class Source:
    """The files of one version of a package.

    Args:
        path: a wheel (or any zip), an sdist (.tar.gz), a folder, or one file, which then stands for every member.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise ConfigError(f"--from {path}: there is no such file or folder")
        self.path = path

    def read(self, member: str) -> bytes:
        """The file that ends like `member`: the top folder of an sdist has the version in its name.

        Raises:
            ConfigError: there is no such file, or there are several.
        """
        if self.path.is_file() and not self.path.name.endswith((".whl", ".zip", ".tar.gz", ".tgz")):
            return self.path.read_bytes()
        wanted = PurePosixPath(member).parts
        names = {name: PurePosixPath(name).parts for name in self._names()}
        for tail in (wanted, wanted[1:]):
            found = [name for name, parts in names.items() if tail and parts[-len(tail) :] == tail]
            best = [name for name in found if len(names[name]) == min(len(names[other]) for other in found)]
            if len(best) == 1:
                return self._bytes(best[0])
            if best:
                raise ConfigError(f"{self.path.name} has several files {member}: {', '.join(sorted(best))}")
        raise ConfigError(f"{self.path.name} has no file {member}: it moved, or this is another package")

    def _names(self) -> list[str]:
        if self.path.is_dir():
            return [p.relative_to(self.path).as_posix() for p in self.path.rglob("*") if p.is_file()]
        if self.path.name.endswith((".whl", ".zip")):
            with zipfile.ZipFile(self.path) as archive:
                return archive.namelist()
        with tarfile.open(self.path) as archive:
            return [member.name for member in archive if member.isfile()]

    def _bytes(self, name: str) -> bytes:
        if self.path.is_dir():
            return (self.path / name).read_bytes()
        if self.path.name.endswith((".whl", ".zip")):
            with zipfile.ZipFile(self.path) as archive:
                return archive.read(name)
        with tarfile.open(self.path) as archive:
            file = archive.extractfile(name)
            assert file is not None
            return file.read()


def parameters_of(source: str, name: str) -> str:
    """The parameters of a function as Python text, annotations included, without `self`.

    Args:
        source: of a Python file or a stub. name: "function", or "Class.method".

    Raises:
        ConfigError: the file has no such function, or is no Python source.
    """
    try:
        body: Sequence[ast.stmt] = ast.parse(source).body
    except (SyntaxError, ValueError) as exc:
        raise ConfigError(f"{name} is looked for in a Python source, and this file is none: {exc}") from exc
    found: ast.stmt | None = None
    for part in name.split("."):
        named = [node for node in _statements(body) if getattr(node, "name", None) == part]
        if not named:
            raise ConfigError(f"no {name} in this file: it was removed or renamed")
        # Of overloads the last one is the function itself.
        found = named[-1]
        body = getattr(found, "body", [])
    if not isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
        raise ConfigError(f"{name} is no function in this file")
    return _text(found.args, method="." in name and not _static(found))


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Return the statements of a module or class, with those under its `if` and `try`."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try)):
                yield from _statements(getattr(node, inner, []))


def _static(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in function.decorator_list)


def _text(args: ast.arguments, *, method: bool) -> str:
    plain = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(args.defaults)), *args.defaults]
    words = [_parameter(arg, default) for arg, default in zip(plain, defaults, strict=True)]
    if args.posonlyargs:
        words.insert(len(args.posonlyargs), "/")
    if method or (plain and plain[0].arg == "self"):
        # Some functions are made to be set as methods.
        words = words[1:]
    if args.vararg:
        words.append("*" + _parameter(args.vararg, None))
    elif args.kwonlyargs:
        words.append("*")
    words += [_parameter(arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        words.append("**" + _parameter(args.kwarg, None))
    return ", ".join(words)


def _parameter(arg: ast.arg, default: ast.expr | None) -> str:
    word = arg.arg if arg.annotation is None else f"{arg.arg}: {ast.unparse(arg.annotation)}"
    if default is None:
        return word
    try:
        value = repr(ast.literal_eval(default))
    except ValueError:
        value = _OTHER
    return f"{word}={value}" if arg.annotation is None else f"{word} = {value}"


def schema_of(content: bytes, name: str) -> str:
    """The schema of an operator, wherever it stands as text: YAML, a source (in one literal or several that follow
    each other), a compiled library.

    Args:
        name: "namespace::operator", or with ".overload".

    Raises:
        ConfigError: the file holds none, or several that differ.
    """
    content = re.sub(rb'"[ \t]*\r?\n\s*"', b"", content)
    namespace, _, bare = name.rpartition("::")
    inside = r'(?:[^\x00\n"]|"\w*")*'  # defaults may be quoted words
    pattern = rf'(?<![\w.])(?:{re.escape(namespace)}::)?{re.escape(bare)}(\({inside}\) *-> *[^\x00\n"]+)'
    found = {" ".join(match.group(1).decode().split()) for match in re.finditer(pattern.encode(), content)}
    if len(found) != 1:
        what = "no schema" if not found else f"{len(found)} different schemas"
        raise ConfigError(f"{what} of {name} in this file")
    return name + found.pop().rstrip("'")


def entry_of(source: Source, member: str, name: str) -> dict[str, str]:
    """Return what is kept of a function: `parameters` or `schema`, and the `sha256` of the file."""
    content = source.read(member)
    kept = {"schema": schema_of(content, name)} if "::" in name else {}
    if not kept:
        kept = {"parameters": parameters_of(content.decode("utf-8", "replace"), name)}
    return {**kept, "sha256": hashlib.sha256(content).hexdigest()}


class Change(NamedTuple):
    """Describes what is different about one function. `words` is empty where only the file around it changed."""

    key: str
    words: tuple[str, ...]


def compared(key: str, old: Mapping[str, str], new: Mapping[str, str]) -> Change | None:
    """Return what changed between two readings; types only where the older one kept some."""
    before, after = _facts(old), _facts(new)
    words = [f"removed {name}" for name in before if name not in after]
    words += [f"added {fact.word} at {list(after).index(name)}" for name, fact in after.items() if name not in before]
    typed = any(fact.type for fact in before.values())
    for name in before.keys() & after.keys():
        was, now = before[name], after[name]
        if was.default != now.default:
            words.append(f"default of {name}: {was.default or 'none'} -> {now.default or 'none'}")
        if was.kind != now.kind:
            words.append(f"{name} is {now.kind.replace('_', ' ').lower()}, was {was.kind.replace('_', ' ').lower()}")
        if typed and was.type != now.type:
            words.append(f"type of {name}: {was.type or 'none'} -> {now.type or 'none'}")
    common = [name for name in before if name in after]
    if common != [name for name in after if name in before]:
        words.append(f"order: {', '.join(after)}")
    if not words and old.get("sha256", new["sha256"]) == new["sha256"]:
        return None
    return Change(key, tuple(sorted(words)))


class _Fact(NamedTuple):
    word: str
    kind: str
    default: str
    type: str


def _facts(entry: Mapping[str, str]) -> dict[str, _Fact]:
    if "schema" in entry:
        from .emulators.signing import signature_of_schema

        signature = signature_of_schema(entry["schema"])
    else:
        signature = signature_of_text(entry["parameters"])
    found = {}
    for parameter in signature.parameters.values():
        bare = parameter.empty
        default = "" if parameter.default is bare else repr(parameter.default)
        kind = "" if parameter.annotation is bare else str(parameter.annotation)
        found[parameter.name] = _Fact(str(parameter), parameter.kind.name, default, kind)
    return found


def _name_in(key: str, entry: Mapping[str, str]) -> str:
    if "name" in entry or "schema" in entry:
        return entry.get("name") or entry["schema"].partition("(")[0]
    *path, last = key.split(".")
    return f"{path[-1]}.{last}" if path and path[-1][:1].isupper() else last


def _download(wanted: str, folder: Path) -> Source:
    """A wheel if there is one, else the sdist."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--pre", "-d", str(folder)]
    said = ""
    for how in (["--only-binary", ":all:"], ["--no-binary", ":all:", "--no-build-isolation"]):
        done = subprocess.run([*pip, *how, wanted], capture_output=True, text=True, check=False)
        if not done.returncode:
            return Source(next(folder.iterdir()))
        said = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""
    raise ConfigError(f"pip cannot download {wanted}: {said}. Get the file another way and give it with --from")


def _split(wanted: str) -> tuple[str, str]:
    package, _, version = wanted.partition("==")
    return package, version


def _version_of(source: Source, package: str) -> str:
    name = source.path.name
    return name.split("-")[1] if name.endswith(".whl") else re.sub(r"(\.tar\.gz|\.zip)$", "", name).rpartition("-")[2]


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 0 when nothing changed, 1 when something did, 2 when it could not be found out."""
    parser = argparse.ArgumentParser(prog="python -m polyattn.testing.signatures", description=_first(__doc__))
    actions = parser.add_subparsers(required=True, dest="action")
    take = actions.add_parser("take", help="read one function and keep it")
    take.add_argument("file", type=Path)
    take.add_argument("key", help="its name in FILE, package.module.function")
    take.add_argument("package", metavar="PACKAGE==VERSION")
    take.add_argument("member", help="the file in the package")
    take.add_argument("--name", help="function, Class.method or namespace::operator (default: the end of KEY)")
    take.add_argument("--origin", help='where the files are from, "git 0251105a" (default: the registry)')
    compare = actions.add_parser("compare", help="read everything again and say what changed")
    compare.add_argument("file", type=Path)
    compare.add_argument("--package", metavar="PACKAGE==VERSION", help="only this one, in this version")
    compare.add_argument("--write", action="store_true", help="bring FILE up to date")
    for action in (take, compare):
        action.add_argument("--from", dest="path", type=Path, help="a wheel, an sdist, a checkout or a file")
    args = parser.parse_args(argv)
    try:
        return _take(args) if args.action == "take" else _compare(args)
    except ConfigError as exc:
        print(exc, file=sys.stderr)
        return 2


def _first(doc: str | None) -> str:
    return (doc or "").partition("\n")[0]


def _take(args: argparse.Namespace) -> int:
    facts: Facts = json.loads(args.file.read_text("utf-8")) if args.file.exists() else {}
    package, version = _split(args.package)
    name = {"name": args.name} if args.name else {}
    with tempfile.TemporaryDirectory() as folder:
        source = Source(args.path) if args.path else _download(args.package, Path(folder))
        kept = entry_of(source, args.member, _name_in(args.key, name))
        version = version or _version_of(source, package)
    origin = args.origin or ("registry" if args.path is None else args.path.name)
    facts[args.key] = {"package": package, "version": version, "origin": origin, "member": args.member, **name, **kept}
    _write(args.file, facts)
    print(f"{args.key}: {kept.get('parameters') or kept['schema']}")
    return 0


def _compare(args: argparse.Namespace) -> int:
    facts: Facts = json.loads(args.file.read_text("utf-8"))
    package, version = _split(args.package or "")
    groups: dict[tuple[str, str], list[str]] = {}
    for key, entry in facts.items():
        if package in ("", entry["package"]):
            groups.setdefault((entry["package"], entry["version"]), []).append(key)
    if any(version == old for _, old in groups):
        # Facts of other versions are kept beside these on purpose: adapters serve those too.
        groups = {group: keys for group, keys in groups.items() if group[1] == version}
    if not groups:
        known = ", ".join(sorted({entry["package"] for entry in facts.values()}))
        raise ConfigError(f"{args.file} has nothing of {package!r}; it has {known}")
    changed, unread = 0, 0
    for (name, old), keys in sorted(groups.items()):
        wanted = version if args.package else old
        with tempfile.TemporaryDirectory() as folder:
            try:
                source = (
                    Source(args.path) if args.path else _download("==".join(filter(None, (name, wanted))), Path(folder))
                )
            except ConfigError as exc:
                unread += 1
                print(f"{name} {old}: not compared: {exc}")
                continue
            now = wanted or _version_of(source, name)
            changes = list(_reread(source, {key: facts[key] for key in keys}, now, write=args.write))
        told = [change for change in changes if change.words]
        changed += len(told)
        print(f"{name} {old} -> {now}: {len(keys)} functions, {len(told)} changed")
        for change in told:
            print(*(f"  {change.key}: {word}" for word in change.words), sep="\n")
    if args.write:
        _write(args.file, facts)
    return 1 if changed else 2 if unread else 0


def _reread(source: Source, entries: Facts, version: str, *, write: bool) -> Iterator[Change]:
    for key, entry in entries.items():
        try:
            new = entry_of(source, entry["member"], _name_in(key, entry))
        except ConfigError as exc:
            yield Change(key, (str(exc),))
            continue
        change = compared(key, entry, new)
        if write:
            entry.update(new, version=version)
        if change is not None:
            yield change


def _write(file: Path, facts: Facts) -> None:
    file.write_text(json.dumps(facts, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
