"""Who is let in, decided on metadata: what is not allowed, too new, too old or ambiguous is never imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import polyattn
from polyattn.contract import AttentionRequest
from polyattn.errors import BackendUnavailableError, ConfigError, InvalidInputError, PluginError
from polyattn.registry.distributions import normalise_distribution
from polyattn.registry.manager import PluginManager, get_manager, register_plugin, reset_manager

GOOD = """
@hookimpl
def polyattn_register_backends():
    return [info(BACKEND)]
"""


def good(backend: str = "acme") -> str:
    return f"BACKEND = {backend!r}\n{GOOD}"


def refusal(backend: str = "acme") -> str:
    """What a call that asks for the backend by name is told."""
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(BackendUnavailableError) as caught:
        polyattn.attention(q, q, q, backend=backend)
    return str(caught.value)


def test_a_good_plugin_serves(site):
    module = site.add("acme", good(), requires=("polyattn>=0.1", "torch"))
    manager = site.use()
    report = manager.plugins["acme"]
    assert (report.state, report.reason, report.error, report.backends) == ("ready", "", None, ("acme@cpu",))
    assert (report.distribution, report.version, report.module) == ("fake-acme", "1.0", module)
    assert report.origin == str(site.folder / f"{module}.py")
    q = torch.randn(1, 3, 2, 8)
    out = polyattn.attention(q, q, q, backend="acme")
    torch.testing.assert_close(out, polyattn.attention(q, q, q, backend="reference"))


@pytest.mark.parametrize(
    "requires, reason",
    [
        ("polyattn>=99", "needs polyattn>=99, found 0.1.0; install matching versions"),
        ("polyattn <0.1", "needs polyattn<0.1, found 0.1.0; install matching versions"),
        ("PolyAttn[cli]~=3.0; python_version >= '3.0'", "needs polyattn~=3.0, found 0.1.0"),
    ],
    ids=["too new", "too old", "spelt otherwise"],
)
def test_a_plugin_for_another_polyattn_is_not_imported(site, requires, reason):
    module = site.add("acme", good(), requires=("numpy", requires))
    manager = site.use()
    report = manager.plugins["acme"]
    assert (report.state, report.label) == ("incompatible", "acme (fake-acme 1.0)")
    assert report.reason.startswith(f"acme (fake-acme 1.0) {reason}")
    assert module not in sys.modules
    assert reason in refusal()
    with pytest.raises(PluginError, match=r"found 0\.1\.0"):
        site.load(POLYATTN_STRICT="1")


@pytest.mark.parametrize(
    "requires",
    [
        "polyattn>=99; python_version < '3'",
        "polyattn>=99; extra == 'dev'",
        "polyattn-tools>=99",
        "this is ] no requirement",
        "polyattn==0.1.*",
        "polyattn",
    ],
)
def test_requirements_that_say_nothing_against_this_host(site, requires):
    site.add("acme", good(), requires=(requires,))
    assert site.load().plugins["acme"].state == "ready"


@pytest.mark.parametrize(
    "requires, host, fine",
    [
        ("polyattn>=0.1,<0.2", "0.2.0rc1", True),
        ("polyattn>=0.2,<0.3", "0.2.0rc1", True),
        ("polyattn>=0.1", "0.2.0rc1", True),
        ("polyattn>=0.3", "0.2.0rc1", False),
        ("polyattn<0.1", "0.2.0rc1", False),
        ("polyattn>=0.1,<0.2", "0.2.0", False),
        ("polyattn>=0.2,<0.3", "0.1.9", False),
    ],
)
def test_a_candidate_takes_plugins_of_the_release_before_and_of_its_own(site, requires, host, fine):
    site.add("acme", good(), requires=(requires,))
    manager = PluginManager(environ={"POLYATTN_PLUGINS": "acme"}, host_version=host).load()
    assert manager.plugins["acme"].state == ("ready" if fine else "incompatible")


def test_a_pre_release_of_the_host_counts_as_that_version(site):
    site.add("acme", good(), requires=("polyattn>=0.1",))
    manager = PluginManager(environ={"POLYATTN_PLUGINS": "acme"}, host_version="0.2.0.dev3").load()
    assert manager.plugins["acme"].state == "ready"


@pytest.mark.parametrize(
    "environ, variable",
    [
        ({"POLYATTN_DISABLE": "acme"}, "POLYATTN_DISABLE"),
        ({"POLYATTN_DISABLE": " other , acme,"}, "POLYATTN_DISABLE"),
        ({"POLYATTN_PLUGINS": ""}, "POLYATTN_PLUGINS"),
        ({"POLYATTN_PLUGINS": "zebra"}, "POLYATTN_PLUGINS"),
        ({"POLYATTN_PLUGINS": "acme", "POLYATTN_DISABLE": "acme"}, "POLYATTN_DISABLE"),
        ({"POLYATTN_DISABLE": "acme", "POLYATTN_STRICT": "1"}, "POLYATTN_DISABLE"),
    ],
)
def test_a_plugin_that_is_not_allowed_is_never_imported(site, environ, variable):
    # Importing it would not go unnoticed.
    module = site.add("acme", "raise RuntimeError('imported')")
    manager = site.use(**environ)
    report = manager.plugins["acme"]
    assert (report.state, report.reason) == ("not allowed", f"left out by {variable}; it was not imported")
    assert module not in sys.modules
    assert not list(manager.broken())
    assert f"acme (fake-acme 1.0): left out by {variable}" in refusal()
    assert module not in sys.modules


def test_core_needs_no_permission(site):
    manager = site.load(POLYATTN_PLUGINS="")
    assert [p.name for p in manager.plugins.values() if p.state == "ready"] == ["core"]
    assert {p.state for p in manager.plugins.values()} <= {"ready", "not allowed"}


def test_a_list_that_names_nobody_is_told(site, caplog):
    site.add("acme", good())
    site.load(POLYATTN_PLUGINS="acme,acmee", POLYATTN_DISABLE="coer")
    assert "no plugin is named 'acmee'. Did you mean 'acme'?" in caplog.text
    assert "no plugin is named 'coer'. Did you mean 'core'?" in caplog.text


def test_two_distributions_with_one_entry_name(site):
    modules = [site.add("acme", good(), distribution=d) for d in ("acme-kernels", "acme-fork")]
    manager = site.use()
    report = manager.plugins["acme"]
    assert report.state == "duplicate"
    assert "two plugins are named 'acme': acme-fork 1.0 and acme-kernels 1.0; none was loaded" in report.reason
    assert not set(modules) & set(sys.modules)
    assert "two plugins are named 'acme'" in refusal()
    with pytest.raises(PluginError, match=r"acme-fork 1\.0 and acme-kernels 1\.0"):
        site.load(POLYATTN_STRICT="1")


def test_what_the_report_of_a_duplicate_advises_works(site):
    for distribution in ("acme-kernels", "acme-fork"):
        site.add("acme", good(), distribution=distribution)
    assert site.load().plugins["acme"].reason.endswith("leave one out: POLYATTN_DISABLE=acme-fork")
    manager = site.load(POLYATTN_DISABLE="acme-fork", POLYATTN_STRICT="1")
    assert (manager.plugins["acme"].state, manager.plugins["acme"].distribution) == ("ready", "acme-kernels")
    assert manager.plugins["acme (acme-fork 1.0)"].state == "not allowed"
    assert "acme_fork" not in sys.modules
    manager = site.load(POLYATTN_DISABLE="acme", POLYATTN_STRICT="1")
    assert {manager.plugins[name].state for name in ("acme", "acme (acme-kernels 1.0)")} == {"not allowed"}


def test_two_distributions_that_bring_one_module(site):
    """Which of the two would be imported is the luck of the path, and so is whose version would be checked."""
    module = site.add("acme", good(), module="acme_both", distribution="acme-kernels")
    site.add("acme", good(), module="acme_both", distribution="acme-fork", requires=("polyattn>=99",))
    assert site.load().plugins["acme"].state == "duplicate"
    assert module not in sys.modules


def test_one_distribution_seen_twice_counts_once(site, tmp_path, monkeypatch):
    module = site.add("acme", good())
    other = tmp_path / "second"
    info = other / "Fake_Acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Fake_Acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[polyattn.backends]\nacme = {module}\n")
    monkeypatch.syspath_prepend(other)
    assert site.load().plugins["acme"].state == "ready"


def test_whoever_takes_the_name_of_core_cannot_take_the_host_down(site):
    module = site.add("core", good(), distribution="evil")
    manager = site.use()
    report = manager.plugins["core (evil 1.0)"]
    assert (report.state, manager.plugins["core"].state) == ("duplicate", "ready")
    assert "the name 'core' belongs to polyattn itself; it was not imported" in report.reason
    assert module not in sys.modules
    q = torch.randn(1, 3, 2, 8)
    assert polyattn.attention(q, q, q).shape == q.shape
    with pytest.raises(PluginError, match=r"core \(evil 1.0\)"):
        site.load(POLYATTN_STRICT="1")


def test_the_order_on_the_path_decides_nothing(site, tmp_path, monkeypatch):
    """Two plugins bring one backend: the first name in order has it, whichever folder comes first."""
    for name in ("alpha", "beta"):
        site.folder = tmp_path / name
        site.folder.mkdir()
        site.add(name, good("shared"))
    for order in (("alpha", "beta"), ("beta", "alpha")):
        for name in order:
            monkeypatch.syspath_prepend(tmp_path / name)
        manager = site.load()
        assert manager.plugins["alpha"].backends == ("shared@cpu",)
        assert manager.plugins["beta"].state == "broken"
        assert "shared@cpu is registered already by plugin 'alpha'" in manager.plugins["beta"].reason


def test_a_dangling_entry_point(site):
    site.add("acme", good(), entry="acme_module_that_is_gone")
    report = site.load().plugins["acme"]
    assert (report.state, type(report.error)) == ("broken", ModuleNotFoundError)


def test_extra_plugins_are_module_paths(site):
    module = site.module("polyattn_solo", good())
    manager = PluginManager({"POLYATTN_PLUGINS": "solo", "POLYATTN_EXTRA_PLUGINS": f"{module}, "}, "0.1.0").load()
    report = manager.plugins["solo"]
    assert (report.state, report.distribution, report.label) == ("ready", "", "solo (module polyattn_solo)")
    denied = PluginManager({"POLYATTN_DISABLE": "solo", "POLYATTN_EXTRA_PLUGINS": module}, "0.1.0").load()
    assert denied.plugins["solo"].state == "not allowed"


@pytest.mark.parametrize(
    "word",
    ["ACME", "polyattn-acme", "Polyattn_Acme", "Fake.Acme", "fake-acme", "fake_acme.plugin", "fake_acme", "a.c_me"],
)
def test_a_plugin_is_left_out_under_every_name_it_has(site, word, caplog):
    """Another case, the distribution, the module: an entry that means somebody must not let him in."""
    package = site.folder / "fake_acme"
    package.mkdir()
    (package / "__init__.py").write_text("")
    site.add(
        "a-c-me" if word == "a.c_me" else "acme",
        "",
        distribution="fake-acme",
        module="unused",
        entry="fake_acme.plugin",
    )
    (package / "plugin.py").write_text("raise RuntimeError('imported')")
    (report,) = [p for p in site.load(POLYATTN_DISABLE=word).plugins.values() if p.module == "fake_acme.plugin"]
    assert (report.state, report.reason) == ("not allowed", "left out by POLYATTN_DISABLE; it was not imported")
    assert not {"fake_acme", "fake_acme.plugin"} & set(sys.modules)
    assert "no plugin is named" not in caplog.text


@pytest.mark.parametrize("word", ["acm", "polyattn-acme2", "fake", "polyattn_acme.other", "acme.plugin"])
def test_a_word_that_means_another_plugin_leaves_nobody_out(site, word, caplog):
    module = site.module("polyattn_solo", good())
    site.add("acme", good(), module="polyattn_acme")
    manager = site.load(POLYATTN_DISABLE=word, POLYATTN_EXTRA_PLUGINS=module, POLYATTN_PLUGINS="Polyattn.Acme,Solo")
    assert [manager.plugins[name].state for name in ("acme", "solo")] == ["ready", "broken"], "both bring acme@cpu"
    assert f"POLYATTN_DISABLE: no plugin is named {word!r}" in caplog.text
    assert [variable for variable, _ in manager.unknown_words] == ["POLYATTN_DISABLE"]


@pytest.mark.parametrize("word", ["core", "CORE", "polyattn-core", "polyattn", "polyattn.backends.plugin"])
def test_core_cannot_be_left_out_under_any_name(word):
    with pytest.raises(ConfigError, match="core cannot be left out"):
        PluginManager({"POLYATTN_DISABLE": word}).load()


def test_a_module_path_beside_an_entry_point_of_another_name_is_that_plugin(site, caplog):
    module = site.add("acme", good(), module="vendor_kernels")
    core = "polyattn.backends.plugin"
    manager = site.load(POLYATTN_EXTRA_PLUGINS=f"{core},{module},{module}", POLYATTN_STRICT="1")
    ready = {name: report.module for name, report in manager.plugins.items() if report.state == "ready"}
    assert ready == {"core": core, "acme": module}
    assert not caplog.records


@pytest.mark.parametrize("module", [3, None, "", " ", ("polyattn_x",)])
def test_what_is_no_module_cannot_be_registered(module):
    with pytest.raises(
        InvalidInputError, match=r"is no plugin: give a module, or its dotted path such as 'polyattn_ac"
    ):
        register_plugin(module)


@pytest.mark.parametrize("name", [3, "", " "])
def test_a_plugin_is_not_registered_under_what_is_no_name(name):
    with pytest.raises(InvalidInputError, match=r"name=.* is no name of a plugin: give a word, or None to derive it"):
        register_plugin("polyattn_x", name)


def test_the_module_path_of_an_installed_plugin_is_that_plugin(site):
    module = site.add("acme", good(), module="polyattn_acme")
    report = site.load(POLYATTN_EXTRA_PLUGINS=module).plugins["acme"]
    assert (report.state, report.distribution) == ("ready", "fake-acme")


def test_importing_packages_named_like_polyattn_is_no_misspelt_hook(site):
    site.add("acme", f"import polyattn_acme_kernels\n{good()}")
    (site.folder / "polyattn_acme_kernels.py").write_text("")
    assert site.load().plugins["acme"].state == "ready"


PLATFORM = """
@hookimpl
def polyattn_register_platforms():
    return [PlatformInfo("board", "board", "polyattn.registry.platforms:detect_cpu", plugin="board_kernels")]

@hookimpl
def polyattn_register_backends():
    return [info("plain", "board", evidence="hardware")]
"""


def test_the_broken_plugin_of_the_device_in_use_is_an_error(site):
    site.add("board", PLATFORM)
    site.add("board_kernels", "raise ImportError('libacme.so.3: cannot open shared object file')")
    manager = site.use()
    request = AttentionRequest(platform="board", dtype="float32")
    with pytest.raises(BackendUnavailableError, match=r"the plugin of this device, board_kernels .*libacme") as caught:
        polyattn.explain(request)
    assert caught.value.__cause__ is manager.plugins["board_kernels"].error
    assert polyattn.explain(AttentionRequest(platform="cpu")).backend == "torch_sdpa", "other devices go on"
    assert polyattn.explain(request, backend="plain").backend == "plain", "and so does what is asked for by name"


def test_the_plugin_of_the_device_left_out_on_purpose_is_no_error(site):
    site.add("board", PLATFORM)
    site.add("board_kernels", "raise RuntimeError('imported')")
    site.use(POLYATTN_DISABLE="board_kernels")
    assert polyattn.explain(AttentionRequest(platform="board", dtype="float32")).backend == "plain"


def test_the_refusal_to_leave_core_out_says_what_to_do():
    with pytest.raises(ConfigError, match=r"POLYATTN_DISABLE='x,core': core cannot be left out.* Take it out of the"):
        PluginManager({"POLYATTN_DISABLE": "x, core"}).load()


def test_a_switch_that_is_no_switch():
    with pytest.raises(ConfigError, match="POLYATTN_STRICT='maybe' is not a switch: use 1 or 0"):
        PluginManager({"POLYATTN_STRICT": "maybe"}).load()


def test_registering_by_hand(site):
    module = site.add("unused", good(), module="polyattn_byhand")
    reset_manager(PluginManager({"POLYATTN_PLUGINS": ""}, "0.1.0"))
    report = register_plugin(module)
    assert (report.name, report.state, report.backends) == ("byhand", "ready", ("acme@cpu",))
    assert get_manager().plugins["byhand"] is report
    assert polyattn.explain(AttentionRequest(dtype="float32"), backend="acme").backend == "acme"
    again = r"a plugin named 'byhand' is there already \(ready\): byhand .*\. Give another name=, or first call "
    with pytest.raises(
        PluginError, match=rf"{again}polyattn\.registry\.manager\.reset_manager\(\), which forgets what was reg"
    ):
        register_plugin(module)
    reset_manager(PluginManager({"POLYATTN_PLUGINS": ""}, "0.1.0"))
    assert register_plugin(module).state == "ready", "what the message says helps"


def test_registering_what_is_installed(site):
    module = site.add("acme", good())
    site.use()
    with pytest.raises(PluginError, match=r"'acme' is there already .*\. Give another name=, or first uninstall it$"):
        register_plugin(module, name="acme")


def test_registering_a_broken_plugin_raises_and_a_repaired_one_may_come_again(site):
    module = site.add("unused", "raise RuntimeError('not yet')", module="polyattn_byhand")
    reset_manager(PluginManager({"POLYATTN_PLUGINS": ""}, "0.1.0"))
    with pytest.raises(PluginError, match=r"plugin byhand \(module polyattn_byhand\) is broken: .*not yet") as caught:
        register_plugin(module)
    assert isinstance(caught.value.__cause__, RuntimeError)
    (site.folder / f"{module}.py").write_text("POLYATTN_API_VERSION = 1  # repaired, and longer than it was before")
    assert register_plugin(module).state == "ready"


@pytest.mark.parametrize("name", ["unused", "byhand"])
def test_registering_what_is_not_allowed(site, name):
    module = site.add("unused", good(), module="polyattn_byhand")
    reset_manager(PluginManager({"POLYATTN_DISABLE": "unused,byhand"}, "0.1.0"))
    with pytest.raises(PluginError, match=r"not allowed|left out by POLYATTN_DISABLE; it was not imported"):
        register_plugin(module, name)
    assert module not in sys.modules


def test_a_plugin_loads_without_torch(site):
    site.add("acme", good())
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from polyattn.registry.manager import PluginManager\n"
        "manager = PluginManager({'POLYATTN_PLUGINS': 'acme'}, '0.1.0').load()\n"
        "assert manager.plugins['acme'].state == 'ready', manager.plugins['acme']\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(site.folder)], check=True, timeout=1800)


@pytest.mark.parametrize("name", ["Acme_Kernels", "acme.kernels", "acme--kernels", "ACME-_.kernels"])
def test_distribution_names_are_compared_as_the_registry_does(name):
    assert normalise_distribution(name) == "acme-kernels"


ALIASED = good().replace("(BACKEND", "(BACKEND, aliases=(Alias('zebra'),)", 1)


@pytest.mark.parametrize("first", ["acme", "zoo"])
def test_an_alias_that_is_another_plugin_s_backend_is_told_and_takes_nothing(site, caplog, first):
    """Whichever is loaded first: the name is the other's, whose plugin goes on."""
    site.add(first, ALIASED)
    site.add("middle", good("zebra"))
    manager = site.use()
    assert {p.state for name, p in manager.plugins.items() if name in (first, "middle")} == {"ready"}
    said = f"plugin {first}: the alias 'zebra' of acme@cpu means nothing, because zebra@cpu of plugin middle has it"
    assert said in caplog.text
    with pytest.raises(PluginError, match="the alias 'zebra' of acme@cpu means nothing"):
        site.load(POLYATTN_STRICT="1")


def test_a_plugin_added_by_hand_is_told_too(site, caplog):
    site.add("middle", good("zebra"))
    manager = site.use()
    module = site.add("acme", ALIASED)
    manager.register(module, "by_hand")
    assert "plugin by_hand: the alias 'zebra' of acme@cpu means nothing" in caplog.text
