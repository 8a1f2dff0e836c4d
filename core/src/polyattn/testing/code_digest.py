"""A digest of the code that an adapter runs. A move, a new name or a comment does not change it.

Counted are the adapter's class and every definition that it reaches by name: functions, classes, constants, and what
their modules do at import. Not counted are comments, docstrings, annotations and imports. A reference counts as the
digest of the definition it means, so that neither its name nor its module does. Definitions of other packages count by
name, and so do those of polyattn's rooms that compute no result (`NOT_COMPUTED`).
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..contract import Provider
from ..contract.hookspecs import PROJECT
from .sources import absolute, file_of, kernels_beside

__all__ = ["code_digest"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (*_FUNCTIONS, ast.ClassDef)
_NO_CODE = frozenset(("ctx", "kind", "type_comment", "type_params", "returns"))
"""Fields of syntax nodes that differ between versions of Python, or that change nothing."""

NOT_COMPUTED = frozenset(("contract", "envvars", "epoch", "errors", "registry", "selection", "tuning"))
"""Rooms of polyattn that decide and declare. They compute no result."""

COMPUTED = frozenset(("contract.scalars", "contract.lengths", "contract.overlap"))
"""Modules of these rooms that count all the same."""

Imported = tuple[str, str]
"""(module, name in it); the name is empty for the module itself."""


def code_digest(providers: Iterable[Provider]) -> str:
    """sha256 of what the adapters of `providers` reach, in 16 digits. An adapter in no file counts by name."""
    program = _Program()
    found = [
        f"{provider.name} {program.definition(*_split(provider.target))}"
        for provider in providers
        if not provider.planned
    ]
    for path in sorted({one for module in program.modules.values() for one in kernels_beside(module.path)}):
        found.append(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}")
    return _hash(sorted(found))


def _split(target: str) -> tuple[str, str]:
    module, _, name = target.partition(":")
    return module, name.partition(".")[0]


def _hash(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


class _Module:
    """The top of a file: what it defines, what it imports, and what it does when it is imported."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.definitions: dict[str, ast.stmt] = {}
        self.imports: dict[str, Imported] = {}
        self.shown: dict[str, Imported] = {}
        """What type checkers are told of a package whose names are imported when they are first used."""
        self.effects: list[ast.stmt] = []
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            self._read(node)

    def _read(self, node: ast.stmt) -> None:
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            for other in node.orelse:
                self._read(other)
            for told in node.body:
                if isinstance(told, (ast.Import, ast.ImportFrom)):
                    self.shown |= absolute(told, self.name, self.path)
            return
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self.imports |= absolute(node, self.name, self.path)
            return
        names = [*_bound(node)]
        if isinstance(node, (ast.If, ast.Try)):
            # Which of several imports or definitions counts is decided there: all of it does.
            for inner in ast.walk(node):
                if isinstance(inner, (ast.Import, ast.ImportFrom)):
                    self.imports |= absolute(inner, self.name, self.path)
        if names == ["__all__"] or _is_text(node):
            return
        self.definitions |= dict.fromkeys(names, node)
        if not names:
            self.effects.append(node)


class _Program:
    """Digests of definitions, each computed once."""

    def __init__(self) -> None:
        self.modules: dict[str, _Module] = {}
        self._digests: dict[Imported, str] = {}
        self._open: list[Imported] = []
        self.file_of = functools.lru_cache(maxsize=None)(file_of)

    def module(self, name: str) -> _Module | None:
        """The module, if its code counts."""
        if name not in self.modules:
            path = self.file_of(name)
            if path is None or not path.is_file() or path.suffix != ".py":
                return None
            self.modules[name] = _Module(name, path)
        return self.modules[name]

    def counts(self, name: str, package: str) -> bool:
        """Return whether code of module `name` counts for an adapter of `package`."""
        top, _, rest = name.partition(".")
        if top != PROJECT:
            return top == package
        return rest in COMPUTED or rest.partition(".")[0] not in NOT_COMPUTED

    def definition(self, module: str, name: str) -> str:
        """The digest of a definition of a module, or its name where its code does not count."""
        whole = (module, name)
        if whole in self._digests:
            return self._digests[whole]
        if whole in self._open:
            return f"open {len(self._open) - self._open.index(whole)}"
        here = self.module(module)
        if here is None:
            return name
        if name not in here.definitions:
            meaning = here.imports.get(name) or here.shown.get(name)
            return self.imported(here, meaning) if meaning else name
        self._open.append(whole)
        writer = _Writer(self, here)
        found = [writer.text(here.definitions[name], whole_file=True)]
        found += [writer.text(effect, whole_file=True) for effect in here.effects]
        self._open.pop()
        return self._digests.setdefault(whole, _hash(found))

    def imported(self, importer: _Module, what: Imported) -> str:
        """The digest, or the name, of what a module imports."""
        module, name = what
        package = importer.name.partition(".")[0]
        if not name:
            return module.rpartition(".")[2]
        if self.file_of(f"{module}.{name}") is not None:
            return name
        return self.definition(module, name) if self.counts(module, package) else name

    def attribute(self, importer: _Module, what: Imported, names: Sequence[str]) -> tuple[str, Sequence[str]] | None:
        """The digest of `names[0]` of an imported module, or of a module below it, and the names after that; None where
        `what` is no module whose code counts."""
        module = ".".join(filter(None, what))
        while names and self.file_of(f"{module}.{names[0]}") is not None:
            module, names = f"{module}.{names[0]}", names[1:]
        package = importer.name.partition(".")[0]
        if not names or self.file_of(module) is None or not self.counts(module, package):
            return None
        return self.definition(module, names[0]), names[1:]


class _Writer:
    """Code as text, without what does not count. Names of the module are written as digests."""

    def __init__(self, program: _Program, module: _Module) -> None:
        self.program, self.module = program, module
        self.scopes: list[dict[str, Imported | None]] = []

    def text(self, node: ast.AST, whole_file: bool = False) -> str:
        """whole_file: a definition at the top of a file, whose own name does not count."""
        if whole_file and not isinstance(node, _SCOPES):
            self.scopes.append(dict.fromkeys(_comprehended(node)))
            text = self._fields(node, skip=("targets", "target") if _is_one_name(node) else ())
            self.scopes.pop()
            return text
        return self._node(node, named=not whole_file)

    def _value(self, value: Any) -> str:
        if isinstance(value, ast.AST):
            return self._node(value)
        if isinstance(value, list):
            return f"[{' '.join(self._value(one) for one in value if not _is_import(one) and not _is_text(one))}]"
        return repr(value)

    def _node(self, node: ast.AST, named: bool = True) -> str:
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node) or self._fields(node)
        if isinstance(node, ast.arg):
            # Triton compiles by this one.
            return f"{node.arg}{'!' if node.annotation and 'constexpr' in ast.dump(node.annotation) else ''}"
        if isinstance(node, _FUNCTIONS):
            self.scopes.append(_locals(node, self.module))
            text = self._fields(node, skip=() if named else ("name",))
            self.scopes.pop()
            return text
        if isinstance(node, ast.AnnAssign):
            return self._fields(node, skip=("annotation", "simple"))
        return self._fields(node, skip=() if named else ("name",))

    def _fields(self, node: ast.AST, skip: Sequence[str] = ()) -> str:
        parts = [
            f"{name}={self._value(value)}"
            for name, value in ast.iter_fields(node)
            if name not in _NO_CODE and name not in skip and value not in (None, [])
        ]
        return f"{type(node).__name__}({', '.join(parts)})"

    def _attribute(self, node: ast.Attribute) -> str | None:
        """`a.b.c` of an imported module a, or None where `a` is something else."""
        names: list[str] = []
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            names.insert(0, root.attr)
            root = root.value
        meant = self._meaning(root.id) if isinstance(root, ast.Name) else None
        if meant is None or not isinstance(root, ast.Name):
            return None
        if not meant[1] and meant[0].startswith(f"{root.id}."):
            meant = (root.id, "")  # `import a.b` binds a.
        found = self.program.attribute(self.module, meant, names)
        return found and ".".join((found[0], *found[1]))

    def _meaning(self, name: str) -> Imported | None:
        """Return what an imported name stands for."""
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None if name in self.module.definitions else self.module.imports.get(name)

    def _name(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                meant = scope[name]
                return name if meant is None else self.program.imported(self.module, meant)
        if name in self.module.definitions or name in self.module.imports:
            return self.program.definition(self.module.name, name)
        return name


def _is_import(node: Any) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def _is_text(node: Any) -> bool:
    """A docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def _is_one_name(node: ast.AST) -> bool:
    """Return whether it gives one name a value."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return len(targets) == 1 and isinstance(targets[0], ast.Name)


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that a statement binds in its own scope, imports apart."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
        return
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    if isinstance(node, ast.ExceptHandler) and node.name:
        yield node.name
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return
    for child in ast.iter_child_nodes(node):
        yield from _bound(child)


def _comprehended(node: ast.AST) -> Iterator[str]:
    """Names that comprehensions and lambdas bind, at any depth."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.comprehension):
            yield from (one.id for one in ast.walk(inner.target) if isinstance(one, ast.Name))


def _locals(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, module: _Module) -> dict[str, Imported | None]:
    """Names of a function's own: arguments, what it binds and what it imports."""
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    found: dict[str, Imported | None] = {one.arg: None for one in every}
    body = node.body if isinstance(node.body, list) else [node.body]
    for statement in body:
        found |= dict.fromkeys(_bound(statement))
        found |= dict.fromkeys(_comprehended(statement))
        for inner in ast.walk(statement):
            if isinstance(inner, (ast.Import, ast.ImportFrom)):
                found |= absolute(inner, module.name, module.path)
            elif isinstance(inner, (ast.Global, ast.Nonlocal)):
                for name in inner.names:
                    found.pop(name, None)
    return found
