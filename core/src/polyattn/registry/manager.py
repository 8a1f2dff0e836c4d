"""The plugin manager: find, check on metadata, load, verify, contain and report. It knows nothing of kernels.

A plugin that is not allowed, or needs another polyattn, is never imported. A plugin that fails is rolled back,
kept with its traceback, and named by `polyattn doctor`; the host goes on without it.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, Literal

import pluggy

from .. import envvars, epoch
from ..contract import (
    API_VERSION,
    Accepted,
    AttentionRequest,
    BackendInfo,
    Bound,
    DeviceOpsInfo,
    Kernel,
    PlatformInfo,
    Provider,
    Rejected,
    Verdict,
)
from ..contract.checks import file_of, typed
from ..contract.hookspecs import PROJECT, PolyattnSpecs
from ..errors import PluginError, PolyattnError, did_you_mean
from .bound_check import checked
from .distributions import distribution_version, is_specifier
from .foreign import OWN, OwnRun, Run, loading
from .lost_aliases import lost_aliases
from .result_check import checking
from .sources import CORE, Door, Source, announced, grouped, incompatible

__all__ = ["PluginManager", "PluginReport", "get_manager", "register_plugin", "reset_manager"]

log = logging.getLogger("polyattn.plugins")

State = Literal["ready", "not allowed", "incompatible", "duplicate", "broken"]
AGAIN = "call polyattn.registry.manager.reset_manager(), which forgets what was registered by hand"


@dataclasses.dataclass
class PluginReport:
    """Describes what became of one plugin.

    Attributes:
        name: entry name. distribution, version: where it comes from ("" for a module given by path).
        module: dotted module. origin: file it was loaded from.
        state: ready, not allowed, incompatible, duplicate or broken; reason: the sentence for people.
        error: the exception that broke it, with its traceback as text.
        backends: ids it registered. api: the version of the contract that it speaks.
    """

    name: str
    module: str
    distribution: str = ""
    version: str = ""
    origin: str = ""
    state: State = "ready"
    reason: str = ""
    error: BaseException | None = None
    traceback: str = ""
    backends: tuple[str, ...] = ()
    api: int = API_VERSION

    @property
    def label(self) -> str:
        source = f"{self.distribution} {self.version}".strip() or f"module {self.module}"
        return f"{self.name} ({source})"


class PluginManager:
    """Loads every allowed plugin once and answers for them one at a time.

    Args:
        environ: environment to read POLYATTN_* from; None = the process's.
        host_version: version plugins are checked against; None = the installed one.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, host_version: str | None = None) -> None:
        self.environ = environ
        self.host_version = host_version or distribution_version(PROJECT) or ""
        self.plugins: dict[str, PluginReport] = {}
        self.platforms: dict[str, PlatformInfo] = {}
        self.backends: dict[tuple[str, str], BackendInfo] = {}
        self._owner: dict[tuple[str, str], str] = {}
        self._platform_owner: dict[str, str] = {}
        self._hooks: dict[tuple[str, str], Callable[..., Any] | None] = {}
        self._lock = threading.RLock()
        self._loaded = False
        self.changes = 0
        self.unknown_words: list[tuple[str, str]] = []
        self._start_over()
        self._specs = {n: set(getattr(self._pm.hook, n).spec.argnames) for n in _spec_names()}

    def _start_over(self) -> None:
        # A load that strict mode ended half-way leaves nothing for the next one to stumble over.
        for table in (self.plugins, self.platforms, self.backends, self._owner, self._platform_owner):
            table.clear()
        self.measurements: tuple[tuple[str, str], ...] = ()
        self.device_ops: tuple[DeviceOpsInfo, ...] = ()
        self.kernels: dict[str, Kernel] = {}
        self._pm = pluggy.PluginManager(PROJECT)
        self._pm.add_hookspecs(PolyattnSpecs)

    def load(self) -> PluginManager:
        """Load everything once; later calls return at once.

        Raises:
            PluginError: under POLYATTN_STRICT, for the first plugin that is duplicate, incompatible or broken. Always,
                when a plugin asks while it is being loaded.
        """
        if self._loaded:
            return self
        _refuse_while_loading("calls polyattn")
        with self._lock:
            if not self._loaded:
                self._load()
                self._loaded = True
        return self

    def register(self, module: ModuleType | str, name: str | None = None) -> PluginReport:
        """Add a plugin by hand (a module or its dotted path), verified like any other.

        Raises:
            PluginError: it is broken or its name is taken; or a plugin asks while it is being loaded.
            InvalidInputError: `module` is neither.
        """
        source = Source.of(module, name)
        _refuse_while_loading("registers a plugin")
        self.load()
        with self._lock:
            known = self.plugins.get(source.name)
            if known is not None and known.state not in ("broken", "incompatible"):  # a repaired plugin may come again
                there = f"a plugin named {source.name!r} is there already ({known.state}): {known.label}. Give another"
                raise PluginError(f"{there} name=, or first {'uninstall it' if known.distribution else AGAIN}")
            if Door(self.environ).closed(source) == "POLYATTN_DISABLE":
                raise PluginError(f"plugin {source.name!r} is left out by POLYATTN_DISABLE; it was not imported")
            self._loaded = False  # until it is over: whoever asks waits, but for the plugin itself, which is refused
            try:
                report = self._load_one(source, None if isinstance(module, str) else module)
            finally:
                self._loaded = True
            self._check_aliases()
            self.changes += 1  # what is kept of the plugins compares it: other things move the epoch far more often
            epoch.bump()
        if report.error is not None:
            raise PluginError(f"plugin {report.label} is broken: {report.reason}") from report.error
        return report

    def owner(self, backend: BackendInfo) -> PluginReport:
        """The plugin that registered a backend."""
        return self.plugins[self._owner[backend.name, backend.platform]]

    def broken(self) -> Iterator[PluginReport]:
        """Plugins that were found but could not be used, deny-listed ones not included."""
        return (p for p in self.plugins.values() if p.state in ("broken", "duplicate", "incompatible"))

    def narrows(self, backend: BackendInfo) -> bool:
        """Return whether the owner has a `polyattn_report_capability`."""
        return self._implementation("polyattn_report_capability", backend) is not None

    def narrow(self, backend: BackendInfo, request: AttentionRequest) -> Verdict | None:
        """The owner's `polyattn_report_capability`; an exception is a refusal that carries it as `error`."""
        implementation = self._implementation("polyattn_report_capability", backend)
        if implementation is None:
            return None
        with self._run(self.owner(backend), "its capability hook, about", backend) as run:
            try:
                verdict: Verdict | None = implementation(backend=backend, request=request)
            except BaseException as exc:  # a stranger's hook may raise anything; it is kept and reported
                if run.ended_by_host(exc):
                    raise
                self.remember(backend, exc)
                return BrokenHook(f"its capability hook raised {type(exc).__name__}: {exc}", exc)
        mute = isinstance(verdict, Rejected) and not all(isinstance(reason, str) for reason in verdict.reasons)
        if mute or not (verdict is None or isinstance(verdict, (Accepted, Rejected))):
            what = "whose reasons are no sentences" if mute else "neither Accepted nor Rejected nor None"
            wrong = PluginError(f"its capability hook returned {verdict!r}, {what}")
            self.remember(backend, wrong)
            return BrokenHook(str(wrong), wrong)
        return verdict

    def load_forward(self, backend: BackendInfo, provider: Provider, request: AttentionRequest) -> Bound:
        """The functions that serve `request`, from the owner's hook or from `Provider.target`.

        Raises:
            PluginError: the hook or the adapter failed, or as `bound_check.checked`.
        """
        implementation = self._implementation("polyattn_load_forward", backend)
        owner = self.owner(backend)
        with self._run(owner, "loading", backend, provider.name) as run:
            try:
                bound = None
                if implementation is not None:
                    bound = implementation(backend=backend, provider=provider.name, request=request)
                if bound is None:
                    target: Any = _import_target(provider.target)
                    # A method has no bind of its own; the room that calls methods is above this one.
                    method = hasattr(target, "attend") and importlib.import_module(f"{PROJECT}.methods.bound")
                    bound = method.bind(target, backend, request) if method else target().bind(request)
            except BaseException as exc:
                if isinstance(exc, PolyattnError) or run.ended_by_host(exc):
                    raise
                self.remember(backend, exc)
                raise PluginError(
                    f"plugin {owner.label} could not load {backend.id} (provider {provider.name}): "
                    f"{type(exc).__name__}: {exc}. Name another backend, mend the plugin, or leave it out: "
                    f"POLYATTN_DISABLE={owner.name}"
                ) from exc
        who = f"plugin {owner.label}: {backend.id}"
        try:
            bound = checked(bound, request, who, owner.api)
        except PluginError as wrong:
            self.remember(backend, wrong)
            raise
        return checking(bound, request, who) if envvars.flag("POLYATTN_VALIDATE") else bound

    def _implementation(self, hook: str, backend: BackendInfo) -> Callable[..., Any] | None:
        owner = self._owner[backend.name, backend.platform]
        if (hook, owner) not in self._hooks:
            found = (one for one in getattr(self._pm.hook, hook).get_hookimpls() if one.plugin_name == owner)
            self._hooks[hook, owner] = next((one.function for one in found), None)
        return self._hooks[hook, owner]

    def _run(self, report: PluginReport, doing: str, backend: BackendInfo, provider: str = "") -> Run | OwnRun:
        """Code of a plugin that is to be run. Core's own is not watched: that costs a thread, and calls for signals."""
        if report.name == CORE:
            return OWN
        return self._watched(report, f"{doing} {backend.id}{f' (provider {provider})' if provider else ','}")

    def _watched(self, report: PluginReport, doing: str, *, load: bool = False) -> Run:
        advice = f"If it does not end, leave the plugin out: POLYATTN_DISABLE={report.name}"
        return Run("" if report.name == CORE else f"plugin {report.label}", doing, advice, load=load)

    def remember(self, backend: BackendInfo, exc: BaseException) -> None:
        """Keep the first failure of the owner of `backend`, for `polyattn doctor`, and say it."""
        report = self.owner(backend)
        if report.error is None:
            report.error, report.traceback = exc, _trace(exc)
            report.reason = f"{backend.id}: {type(exc).__name__}: {exc}"
            log.warning("plugin %s: %s", report.label, report.reason)

    def _load(self) -> None:
        self._start_over()
        door = Door(self.environ)
        strict = envvars.flag("POLYATTN_STRICT", self.environ)
        for group in grouped(announced(self.host_version, self.environ)):
            shut = {source: variable for source in group if (variable := door.closed(source))}
            wanted = [source for source in group if source not in shut]
            if len(wanted) > 1 and wanted[0].name != CORE:
                labels = " and ".join(f"{s.distribution or s.module} {s.version}".strip() for s in wanted)
                why = f"two plugins are named {wanted[0].name!r}: {labels}; none was loaded. "
                hint = f"Uninstall one, or leave one out: POLYATTN_DISABLE={wanted[0].distribution or wanted[0].module}"
                reports = [self._leave_out(wanted[0], "duplicate", why + hint)]
            else:
                # Whoever else takes core's name cannot take the host down with it.
                why = f"the name {CORE!r} belongs to polyattn itself; it was not imported. Rename its entry point"
                reports = [self._load_one(source) for source in wanted[:1]]
                reports += [self._leave_out(s, "duplicate", why, key=_report(s).label) for s in wanted[1:]]
            for source, variable in shut.items():
                key = _report(source).label if source.name in self.plugins else ""
                self._leave_out(source, "not allowed", f"left out by {variable}; it was not imported", key=key)
            for report in reports:
                if report.state in ("broken", "duplicate", "incompatible"):
                    if strict:
                        raise PluginError(f"plugin {report.label}: {report.reason}") from report.error
                    log.warning("plugin %s was left out: %s", report.label, report.reason)
        self.unknown_words = door.unknown()
        for _, sentence in self.unknown_words:
            log.warning("%s", sentence)
        self._check_aliases(strict)

    def _check_aliases(self, strict: bool = False) -> None:
        for lost in lost_aliases(self.backends.values(), lambda backend: self.owner(backend).name):
            if strict:
                raise PluginError(lost)
            log.warning("%s", lost)

    def _leave_out(self, source: Source, state: State, reason: str, key: str = "") -> PluginReport:
        report = self.plugins[key or source.name] = _report(source)
        report.state, report.reason = state, reason
        return report

    def _load_one(self, source: Source, module: ModuleType | None = None) -> PluginReport:
        report = self.plugins[source.name] = _report(source)
        if refusal := incompatible(source.requires, self.host_version):
            report.state, report.reason = "incompatible", f"{report.label} {refusal}"
            return report
        with self._watched(report, f"loading {source.module}", load=True) as run:
            try:
                module = module or importlib.import_module(source.module)
                report.origin = getattr(module, "__file__", "") or ""
                report.api = _checked_api(module)
                self._hooks.clear()
                self._pm.register(module, name=source.name)
                self._verify_hooks(source.name, module)
                self._pm.check_pending()
                backends = self._collect(source.name, run)
            except BaseException as exc:  # a stranger's module may raise anything; it is kept and reported
                if self._pm.has_plugin(source.name):
                    self._pm.unregister(name=source.name)
                    self._hooks.clear()
                if run.ended_by_host(exc):
                    del self.plugins[source.name]
                    raise
                report.state = "incompatible" if isinstance(exc, _IncompatibleError) else "broken"
                report.reason = str(exc) if isinstance(exc, PluginError) else f"{type(exc).__name__}: {exc}"
                report.error, report.traceback = exc, _trace(exc)
            else:
                report.backends = backends
        return report

    def _verify_hooks(self, name: str, module: ModuleType) -> None:
        for attribute in dir(module):
            if not attribute.startswith(f"{PROJECT}_") or attribute in self._specs:
                continue
            if callable(getattr(module, attribute)):  # an imported polyattn_* package is no hook
                raise PluginError(f"{attribute} is no hook of {PROJECT}.{did_you_mean(attribute, self._specs)}")
        for hook, expected in self._specs.items():
            implementations = [i for i in getattr(self._pm.hook, hook).get_hookimpls() if i.plugin_name == name]
            if not implementations and callable(getattr(module, hook, None)):
                raise PluginError(f"{hook} is defined but not marked with polyattn.contract.hookspecs.hookimpl")
            for implementation in implementations:
                if missing := sorted(expected - set(implementation.argnames)):
                    raise PluginError(f"{hook} must take every argument of its spec, it lacks {', '.join(missing)}")

    def _collect(self, name: str, run: Run) -> tuple[str, ...]:
        """Read the plugin's records, check them, and only then make any of them visible."""
        platforms = [typed(p, PlatformInfo, name) for p in self._call(name, "polyattn_register_platforms")]
        backends = [typed(b, BackendInfo, name) for b in self._call(name, "polyattn_register_backends")]
        files = [(name, file_of(f, name)) for f in self._call(name, "polyattn_register_measurements")]
        kernels = [typed(k, Kernel, name) for k in self._call(name, "polyattn_register_tunables")]
        ops = [typed(o, DeviceOpsInfo, name) for o in self._call(name, "polyattn_register_device_ops")]
        if run.refused is not None:  # it may have caught what it was told
            raise run.refused
        for platform in platforms:
            if platform.name in self.platforms:
                owner = self._platform_owner[platform.name]
                raise PluginError(f"platform {platform.name!r} is registered already by plugin {owner!r}")
            # Tensors of one type belong to one platform; those of "cuda" are told apart by torch's build.
            rivals = [p.name for p in self.platforms.values() if p.device_type == platform.device_type != "cuda"]
            if rivals:
                raise PluginError(
                    f"platform {platform.name!r}: device_type={platform.device_type!r} is that of platform "
                    f"{rivals[0]!r} already (plugin {self._platform_owner[rivals[0]]!r}); give the device's own type"
                )
        identities: set[tuple[str, str]] = set()
        for backend in backends:
            identity = (backend.name, backend.platform)
            if identity in identities or identity in self.backends:
                by = self._owner.get(identity, name)
                raise PluginError(f"backend {backend.id} is registered already by plugin {by!r}; give it another name")
            identities.add(identity)
            _check_backend(backend, {*self.platforms, *(p.name for p in platforms)})
        names = [kernel.name for kernel in kernels]
        if taken := [one for one in names if one in self.kernels or names.count(one) > 1]:
            raise PluginError(f"kernel {taken[0]!r} is registered already; names are 'package.kernel'")
        if wrong := [one.target for one in ops if ":" not in one.target]:
            raise PluginError(f"device ops: target {wrong[0]!r} must read 'package.module:Class'")
        for platform in platforms:
            self.platforms[platform.name] = platform
            self._platform_owner[platform.name] = name
        for backend in backends:
            self.backends[backend.name, backend.platform] = backend
            self._owner[backend.name, backend.platform] = name
        self.measurements += tuple(files)
        self.device_ops += tuple(ops)
        self.kernels.update((kernel.name, kernel) for kernel in kernels)
        return tuple(b.id for b in backends)

    def _call(self, name: str, hook: str) -> Iterable[Any]:
        for implementation in getattr(self._pm.hook, hook).get_hookimpls():
            if implementation.plugin_name == name:
                result = implementation.function()
                if result is None or isinstance(result, (str, bytes)) or not isinstance(result, Iterable):
                    raise PluginError(f"{hook} returned {result!r}, an iterable of records is needed")
                return list(result)
        return ()


class BrokenHook(Rejected):
    """A refusal that stands for a failure of the plugin itself."""

    def __init__(self, reason: str, error: BaseException | None) -> None:
        super().__init__(reason)
        object.__setattr__(self, "error", error)


class _IncompatibleError(PluginError):
    """A plugin that speaks another version of the plugin API."""


def _spec_names() -> list[str]:
    return [n for n in vars(PolyattnSpecs) if n.startswith(f"{PROJECT}_")]


def _report(source: Source) -> PluginReport:
    return PluginReport(source.name, source.module, source.distribution, source.version)


def _refuse_while_loading(what: str) -> None:
    """A plugin that is half loaded would load the others a second time, and itself never."""
    if (run := loading()) is not None:
        run.refused = PluginError(
            f"{run.who} {what} while it is being loaded. Its import and its register hooks only declare: do that in a "
            f"function that runs later"
        )
        raise run.refused


def _checked_api(module: ModuleType) -> int:
    """The version of the contract that a plugin speaks: one that says nothing is as old as the contract itself."""
    wanted = getattr(module, "POLYATTN_API_VERSION", 1)
    if not isinstance(wanted, int) or isinstance(wanted, bool):
        raise PluginError(f"POLYATTN_API_VERSION={wanted!r} is not an integer; this host speaks {API_VERSION}")
    if wanted > API_VERSION:
        raise _IncompatibleError(f"speaks plugin API {wanted}, this host speaks {API_VERSION}; upgrade polyattn")
    if wanted < 1:
        raise _IncompatibleError(f"speaks plugin API {wanted}, the oldest supported is 1; upgrade the plugin")
    return wanted


def _check_backend(backend: BackendInfo, platforms: set[str]) -> None:
    if backend.platform not in platforms:
        raise PluginError(f"{backend.id}: no such platform.{did_you_mean(backend.platform, platforms)}")
    if backend.name != backend.name.lower() or not backend.name.replace("_", "").isalnum():
        raise PluginError(f"backend name {backend.name!r} must be lower case letters, digits and underscores")
    if not backend.providers:
        raise PluginError(f"{backend.id} has no provider")
    names = [p.name for p in backend.providers]
    if len(set(names)) != len(names):
        raise PluginError(f"{backend.id} has two providers of one name: {', '.join(names)}")
    for provider in backend.providers:
        if not provider.rows:
            raise PluginError(f"{backend.id}: provider {provider.name!r} declares no capability row")
        if provider.target and ":" not in provider.target:
            raise PluginError(f"{backend.id}: target {provider.target!r} must read 'package.module:Class'")
    rules = [r.when for r in backend.auto] + [f.when for f in backend.fallbacks] + [p.when for p in backend.pairs]
    for defect in (defect for provider in backend.providers for defect in provider.defects):
        rules.append(defect.when)
        if not is_specifier(defect.versions):
            raise PluginError(f"{backend.id}: versions {defect.versions!r} of a defect must read like '>=2,<3.1'")
    for when in rules:
        for name, constraint in when.items():
            constraint.reason(getattr(AttentionRequest(), name))  # one that raises does so here, not in every selection
    if backend.priority is None and backend.auto:
        raise PluginError(f"{backend.id} has platform rules but is never automatic (priority=None)")


def _import_target(target: str) -> Callable[[], Any]:
    module, _, attribute = target.partition(":")
    there = sys.modules.get(module)
    # To ask for a module that is here costs four calls; one that another thread is importing is not here yet.
    if there is None or getattr(there.__spec__, "_initializing", False):
        there = importlib.import_module(module)
    adapter: Callable[[], Any] = getattr(there, attribute)
    return adapter


def _trace(exc: BaseException) -> str:
    return "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))


_manager: PluginManager | None = None
_manager_lock = threading.Lock()


def get_manager() -> PluginManager:
    """The process's plugin manager, loaded."""
    global _manager
    if _manager is None:
        with _manager_lock:
            if _manager is None:
                _manager = PluginManager()
    return _manager if _manager._loaded else _manager.load()


def reset_manager(manager: PluginManager | None = None) -> None:
    """Replace the process's manager (None = build a new one at next use). Cached choices become stale."""
    global _manager
    _refuse_while_loading("resets polyattn's plugins")
    _manager = manager
    distribution_version.cache_clear()
    epoch.bump()


def register_plugin(module: ModuleType | str, name: str | None = None) -> PluginReport:
    """Add a plugin module (or its dotted path) to this process: `PluginManager.register`."""
    return get_manager().register(module, name)
