"""`AttentionRecords`: what a plugin's records say, as tests of its own suite, without torch and without a device."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..contract import AttentionRequest, BackendInfo, Provider
from ..errors import PolyattnError
from ..registry.distributions import availability, distribution_version
from ..registry.manager import PluginManager, PluginReport
from ..selection.inspection import what_if

if TYPE_CHECKING:
    import pytest

__all__ = ["Asked", "AttentionRecords"]


class Asked(NamedTuple):
    """A request, and what the records must answer on a machine that has all that the backend can use.

    Attributes:
        name: of the test. platform: as `polyattn.what_if` takes it. backend: who is asked for.
        fields: of the request, others than those of a plain dense one.
        refusal: words of the reason for which it is refused; "" = it is served.
        lowerings: the exact rewrites by which it is served; None = by whichever.
    """

    name: str
    platform: str
    backend: str
    fields: Mapping[str, Any]
    refusal: str = ""
    lowerings: tuple[str, ...] | None = None


class AttentionRecords:
    """Inherit from it in a test file; a class whose name starts with `Test` is collected by pytest.

        class TestRecords(AttentionRecords):
            plugin = "polyattn_acme.plugin"
            names = ("acme",)
            asked = (
                Asked("a window", "cuda:sm90", "acme", {"window": (127, 0)}),
                Asked("float32", "cuda:sm90", "acme", {"dtype": "float32"}, refusal="dtype='float32' is not"),
            )

    Attributes:
        plugin: its module. names: the backends that it must register. asked: what it must say yes and no to.
        paged_decode, latent_decode: usual fields of a decode step, to build `Asked.fields` from.
    """

    paged_decode: ClassVar[Mapping[str, Any]] = {
        "family": "paged",
        "heads": 32,
        "kv_heads": 8,
        "page_size": 64,
        "phase": "decode",
        "s_relation": "one",
    }
    latent_decode: ClassVar[Mapping[str, Any]] = {
        "family": "mla",
        "heads": 128,
        "head_dim": 576,
        "v_head_dim": 512,
        "scale": 192**-0.5,
        "page_size": 64,
        "phase": "decode",
        "s_relation": "one",
    }

    plugin: ClassVar[str] = ""
    names: ClassVar[Collection[str]] = ()
    asked: ClassVar[Sequence[Asked]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make one test for each request."""
        if "one" in metafunc.fixturenames:
            metafunc.parametrize("one", self.asked, ids=[one.name for one in self.asked])

    def test_every_name_is_registered(self) -> None:
        """Check that the plugin alone registers every name."""
        report = self._report()
        assert report.state == "ready", report.traceback or report.reason
        assert {name.partition("@")[0] for name in report.backends} == {*self.names}

    def test_every_backend_says_what_it_needs_and_where_it_comes_from(self) -> None:
        """Summaries, sources, and for each requirement the one thing to do when it is missing."""
        backends = self._backends()
        assert not [info.id for info in backends if not (info.summary and info.upstream)]
        providers = [(info.id, provider) for info in backends for provider in info.providers]
        assert not [f"{name}: {p.name}" for name, p in providers if not all(need.hint for need in p.requires)]

    def test_approximate_methods_are_never_automatic(self) -> None:
        """Check that a method that computes something else is chosen by name only."""
        assert not [info.id for info in self._backends() if info.lossy and (info.priority is not None or info.auto)]

    def test_what_is_served_and_what_is_refused(self, one: Asked) -> None:
        """Check which requests are served and refused if everything is installed, without a fallback."""
        request = AttentionRequest(**one.fields)
        try:
            said = what_if(
                request, platform=one.platform, installed=self._libraries(one), backend=one.backend, strict=True
            )
        except PolyattnError as refused:
            reasons = "; ".join([str(refused), *getattr(refused, "rejected", {}).get(one.backend, ())])
            assert one.refusal, reasons
            assert one.refusal in reasons
            return
        assert not one.refusal, f"served, {said.steps() or 'as it is'}"
        assert said.backend == one.backend
        assert one.lowerings is None or said.lowerings == one.lowerings

    def test_a_package_that_only_has_the_name_is_recognised(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where a registry has another package of a library's name (`Requirement.impostor`), users are told.

        Tried with an empty package, so only where the requirement names a module inside of one.
        """
        providers = [provider for info in self._backends() for provider in info.providers]
        for need in dict.fromkeys(
            need for p in providers for need in p.requires if need.impostor and "." in need.module
        ):
            name = (need.distribution, *need.also)[-1]
            folder = tmp_path / name
            module, info = folder / need.module.partition(".")[0], folder / f"{name.replace('-', '_')}-9.0.dist-info"
            for made in (module, info):
                made.mkdir(parents=True, exist_ok=True)
            (module / "__init__.py").touch()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.0\n", encoding="utf-8")
            monkeypatch.syspath_prepend(folder)
            distribution_version.cache_clear()
            try:
                assert distribution_version(name) == "9.0", f"the package made up for {name} is not seen"
                found = availability(Provider("probe", (), requires=(need,)))
            finally:
                distribution_version.cache_clear()
            assert not found.ok, f"{name} 9.0 was taken for the vendor's"
            assert need.impostor in found.reason
            assert need.hint in found.hint

    @classmethod
    def _backends(cls) -> list[BackendInfo]:
        return list(importlib.import_module(cls.plugin).polyattn_register_backends())

    @classmethod
    def _report(cls) -> PluginReport:
        names = {"POLYATTN_PLUGINS": cls.plugin, "POLYATTN_EXTRA_PLUGINS": cls.plugin}
        plugins = PluginManager(environ=names).load().plugins
        return next(report for report in plugins.values() if report.module == cls.plugin)

    @classmethod
    def _libraries(cls, one: Asked) -> set[str]:
        """Distributions that any provider of the backend needs on the platform that is asked about."""
        platform = one.platform.partition(":")[0]
        found = [info for info in cls._backends() if (info.name, info.platform) == (one.backend, platform)]
        return {need.distribution for info in found for p in info.providers for need in p.requires}
