"""The fault set: whatever a plugin does wrong, the host goes on and says so, and asking for it gets the cause."""

from __future__ import annotations

import dataclasses
import re
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

import polyattn
from polyattn.errors import BackendUnavailableError, PluginError, UnsupportedRequestError
from polyattn.registry import foreign
from polyattn.registry.manager import get_manager, register_plugin, reset_manager

GOOD = """
@hookimpl
def polyattn_register_backends():
    return [info("acme")]
"""


def registers(what: str) -> str:
    return f"@hookimpl\ndef polyattn_register_backends():\n    {what}\n"


class Fault(NamedTuple):
    """A plugin that cannot be used: `reason` is searched in its report, `cause` is the exception behind it."""

    id: str
    source: str
    reason: str
    cause: type[BaseException] = PluginError
    state: str = "broken"


FAULTS = [
    Fault("raises at import", "raise RuntimeError('no driver 470')", "RuntimeError: no driver 470", RuntimeError),
    Fault("leaves at import", "raise SystemExit(3)", "SystemExit: 3", SystemExit),
    Fault("interrupts at import", "raise KeyboardInterrupt('x')", "KeyboardInterrupt: x", KeyboardInterrupt),
    Fault("closes at import", "raise GeneratorExit('x')", "GeneratorExit: x", GeneratorExit),
    Fault("its own kind of end", "class Odd(BaseException): ...\nraise Odd('x')", "Odd: x", BaseException),
    Fault(
        "backends hook interrupts", registers("raise KeyboardInterrupt('x')"), "KeyboardInterrupt: x", KeyboardInterrupt
    ),
    Fault("backends hook leaves", registers("raise SystemExit(4)"), "SystemExit: 4", SystemExit),
    Fault("does not parse", "def broken(:", "SyntaxError", SyntaxError),
    Fault("imports what is not there", "import acme_sdk_that_is_not_here", "acme_sdk", ModuleNotFoundError),
    Fault("backends hook raises", registers("raise OSError('no device')"), "OSError: no device", OSError),
    Fault(
        "platforms hook raises",
        "@hookimpl\ndef polyattn_register_platforms():\n    raise KeyError('x')\n" + GOOD,
        "KeyError",
        KeyError,
    ),
    Fault(
        "generator raises midway",
        registers("yield info('acme'); raise ValueError('second record')"),
        "ValueError: second record",
        ValueError,
    ),
    Fault("hook returns nothing", registers("pass"), "returned None, an iterable of records is needed"),
    Fault("hook returns text", registers("return 'acme'"), "returned 'acme', an iterable of records is needed"),
    Fault("hook returns one record", registers("return info('acme')"), "an iterable of records is needed"),
    Fault("record of another type", registers("return [{'name': 'acme'}]"), "a BackendInfo is needed"),
    Fault("second record is bad", registers("return [info('acme'), info('acme_b', 'toaster')]"), "no such platform"),
    Fault("two records of one id", registers("return [info('acme'), info('acme')]"), "acme@cpu is registered already"),
    Fault(
        "a backend of core's",
        registers("return [info('acme'), info('torch_sdpa')]"),
        "torch_sdpa@cpu is registered already by plugin 'core'; give it another name",
    ),
    Fault(
        "a platform of core's",
        "@hookimpl\ndef polyattn_register_platforms():\n    return [PlatformInfo('cpu', 'cpu', 'm:f')]\n" + GOOD,
        "platform 'cpu' is registered already by plugin 'core'",
    ),
    Fault(
        "tensors of a platform of core's",
        "@hookimpl\ndef polyattn_register_platforms():\n    return [PlatformInfo('board', 'cpu', 'm:f')]\n" + GOOD,
        "'board': device_type='cpu' is that of platform 'cpu' already .plugin 'core'.; give the device's own type",
    ),
    Fault(
        "a row on lengths",
        "rows = (row(family='dense', head_dim=Range(1), k_bucket=Range(1, 4096)),)\n"
        + registers("return [info('acme', providers=(Provider('own', rows, 'm:C'),))]"),
        "says k_bucket=.*; lengths decide nothing but which measurement is used",
    ),
    Fault(
        "measurements hook raises",
        GOOD + "@hookimpl\ndef polyattn_register_measurements():\n    raise OSError('no table')\n",
        "OSError: no table",
        OSError,
    ),
    Fault(
        "measurements that are no file of a package",
        GOOD + "@hookimpl\ndef polyattn_register_measurements():\n    return [{'a': 1.0}]\n",
        "registered .*1.0.*; a file of a package reads 'package:path'",
    ),
    Fault("unknown platform", registers("return [info('acme', 'cdua')]"), "acme@cdua: no such platform.*'cuda'"),
    Fault(
        "bad name", registers("return [info('Acme-3')]"), "'Acme-3' must be lower case letters, digits and underscor"
    ),
    Fault(
        "a defect of versions that are none",
        "from polyattn.contract import Defect\n"
        + registers(
            "p = info('x').providers[0]; bad = Defect('l', 'w', 's', 'refused', versions='newer than 2'); "
            "import dataclasses; return [info('acme', providers=(dataclasses.replace(p, defects=(bad,)),))]"
        ),
        "versions 'newer than 2' of a defect must read like '>=2,<3.1'",
    ),
    Fault("no provider", registers("return [info('acme', providers=())]"), "acme@cpu has no provider"),
    Fault(
        "two providers of one name",
        registers("p = info('x').providers; return [info('acme', providers=p * 2)]"),
        "two providers of one name: own, own",
    ),
    Fault(
        "no capability row",
        registers("return [info('acme', providers=(Provider('own', (), 'm:C'),))]"),
        "provider 'own' declares no capability row",
    ),
    Fault(
        "target without a class",
        registers("return [info('acme', target='acme.kernel')]"),
        "target 'acme.kernel' must read 'package.module:Class'",
    ),
    Fault(
        "rules, yet never automatic",
        registers("return [info('acme', priority=None, auto=(AutoRule(1, 'always'),))]"),
        "platform rules but is never automatic",
    ),
    Fault(
        "a rule that cannot be judged",
        registers("return [info('acme', auto=(AutoRule(1, 'new chips', conditions(arch=Range(80))),))]"),
        "TypeError: '>=' not supported between instances of 'str' and 'int'",
        TypeError,
    ),
    Fault(
        "row of an unknown field",
        registers("return [info('acme', providers=(Provider('own', (row(causl=True),)),))]"),
        "'causl', which is no request field. Did you mean 'causal'",
    ),
    Fault(
        "priority is no number",
        registers("return [info('acme', priority='high')]"),
        "acme@cpu: BackendInfo.priority='high' must be of type int",
    ),
    Fault(
        "rank is no number",
        registers("return [info('acme', auto=(AutoRule(None, 'always'),))]"),
        "acme@cpu: AutoRule.rank=None must be of type int",
    ),
    Fault(
        "evidence of no level",
        registers("return [info('acme', evidence='excellent')]"),
        "BackendInfo.evidence='excellent' must be one of 'hardware', .*'declared'",
    ),
    Fault(
        "an alias that is a string",
        registers("return [info('acme', aliases=('a',))]"),
        r"BackendInfo.aliases\[0\]='a' must be of type Alias",
    ),
    Fault(
        "one rule, no tuple of them",
        registers("return [info('acme', auto=AutoRule(1, 'always'))]"),
        r"BackendInfo.auto=AutoRule\(.* must be a tuple",
    ),
    Fault(
        "a condition that is no constraint",
        registers("return [info('acme', auto=(AutoRule(1, 'always', {'dtype': 'float32'}),))]"),
        r"AutoRule.when\['dtype'\]='float32' must be a constraint such as OneOf",
    ),
    Fault(
        "a condition on an unknown field",
        registers("return [info('acme', auto=(AutoRule(1, 'always', {'causl': OneOf((1,))}),))]"),
        "'causl', which is no request field. Did you mean 'causal'",
    ),
    Fault(
        "conditions that are no mapping",
        registers("return [info('acme', auto=(AutoRule(1, 'always', ('dtype',)),))]"),
        r"AutoRule.when=\('dtype',\) must be a mapping",
    ),
    Fault(
        "rows from a generator",
        registers("return [info('acme', providers=(Provider('own', (r for r in ()), 'm:C'),))]"),
        "Provider.rows=<generator .* must be a tuple",
    ),
    Fault(
        "a dtype by its short name",
        registers("return [info('acme', dtype=('fp32', 'bf16'))]"),
        r"acme@cpu: Row.allows says dtype='fp32', which no request has. Did you mean 'float32'\? Allowed: 'float64', "
        r".*'int8'; a word of a later polyattn needs that version",
    ),
    Fault(
        "a dtype of torch",
        registers("import torch; return [info('acme', dtype=(torch.float32,))]"),
        "Row.allows says dtype=torch.float32, which no request has",
    ),
    Fault(
        "a family that is none",
        registers("return [info('acme', providers=(Provider('own', (row(family='dens'),), 'm:C'),))]"),
        r"Row.when says family='dens', which no request has. Did you mean 'dense'\? Allowed: 'dense', .*'linear'",
    ),
    Fault(
        "a relation that is none",
        registers("return [info('acme', providers=(Provider('own', (row(s_relation=('same',)),), 'm:C'),))]"),
        "Row.allows says s_relation='same', which no request has. Allowed: 'equal', 'one', 'fewer', 'more'",
    ),
    Fault(
        "gradients of nothing",
        registers("return [info('acme', providers=(Provider('own', (row(grad=('query', 'keys')),), 'm:C'),))]"),
        "Row.allows says grad='keys', which no request has. Did you mean 'key'",
    ),
    Fault(
        "a range of nothing",
        registers("return [info('acme', providers=(Provider('own', (row(head_dim=Range(256, 8)),), 'm:C'),))]"),
        r"Row.allows says head_dim=Range\(low=256, high=8, .*\), and no number is from 256 to 8: swap them",
    ),
    Fault(
        "a rule for a dtype that is none",
        registers("return [info('acme', auto=(AutoRule(1, 'always', conditions(dtype='half')),))]"),
        "AutoRule.when says dtype='half', which no request has",
    ),
    Fault(
        "an alias in a family that is none",
        registers("return [info('acme', aliases=(Alias('a', ('dens',)),))]"),
        "Alias.families says family='dens', which no request has. Did you mean 'dense'",
    ),
    Fault(
        "a fallback in a family that is none",
        registers("return [info('acme', fallbacks=(Fallback('torch_sdpa', 'no kernel', family='pagd'),))]"),
        "Fallback.family says family='pagd', which no request has. Did you mean 'paged'",
    ),
    Fault(
        "a requirement that is a string",
        registers("return [info('acme', providers=needs('b'))]"),
        r"Provider.requires\[0\]='b' must be of type Requirement",
    ),
    Fault(
        "a requirement of nothing",
        registers("return [info('acme', providers=needs(Requirement('')))]"),
        "Requirement.distribution='' must be a distribution's name",
    ),
    Fault(
        "versions that are no specifier",
        registers("return [info('acme', providers=needs(Requirement('torch', 'at least 2')))]"),
        "Requirement.versions='at least 2' must read like '>=2,<3'",
    ),
    Fault(
        "a platform's plugin that is no name",
        "@hookimpl\ndef polyattn_register_platforms():\n    return [PlatformInfo('b', 'b', 'm:f', plugin=['acme'])]\n"
        + GOOD,
        r"plugin 'acme': PlatformInfo.plugin=\['acme'\] must be of type str",
    ),
    Fault(
        "misspelt hook",
        GOOD + "@hookimpl\ndef polyattn_report_capabilities(backend, request):\n    return None\n",
        "polyattn_report_capabilities is no hook of polyattn. Did you mean 'polyattn_report_capability'",
    ),
    Fault(
        "misspelt hook, not marked",
        "def polyattn_register_backend():\n    return []\n",
        "polyattn_register_backend is no hook of polyattn. Did you mean 'polyattn_register_backends'",
    ),
    Fault(
        "misspelt prefix", "@hookimpl\ndef polyatn_register_backends():\n    return []\n", "polyatn_register", Exception
    ),
    Fault(
        "hook not marked",
        "def polyattn_register_backends():\n    return [info('acme')]\n",
        "polyattn_register_backends is defined but not marked with polyattn.contract.hookspecs.hookimpl",
    ),
    Fault(
        "load_forward omits an argument",
        GOOD + "@hookimpl\ndef polyattn_load_forward(backend, request):\n    return None\n",
        "polyattn_load_forward must take every argument of its spec, it lacks provider",
    ),
    Fault(
        "report_capability omits an argument",
        GOOD + "@hookimpl\ndef polyattn_report_capability(request):\n    return None\n",
        "polyattn_report_capability must take every argument of its spec, it lacks backend",
    ),
    Fault(
        "an argument with a default is not taken",
        GOOD + "@hookimpl\ndef polyattn_report_capability(backend, request=None):\n    return None\n",
        "it lacks request",
    ),
    Fault(
        "an argument too many",
        GOOD + "@hookimpl\ndef polyattn_report_capability(backend, request, device):\n    return None\n",
        "device",
        Exception,
    ),
    Fault(
        "API too new",
        "POLYATTN_API_VERSION = 99\n" + GOOD,
        "speaks plugin API 99.*upgrade polyattn",
        PluginError,
        "incompatible",
    ),
    Fault(
        "API too old",
        "POLYATTN_API_VERSION = 0\n" + GOOD,
        "speaks plugin API 0.*upgrade the plugin",
        PluginError,
        "incompatible",
    ),
    Fault("API is no number", "POLYATTN_API_VERSION = '1'\n" + GOOD, "POLYATTN_API_VERSION='1' is not an integer"),
]
faults = pytest.mark.parametrize("fault", FAULTS, ids=[f.id for f in FAULTS])


def causes(error: BaseException | None) -> list[BaseException]:
    found = []
    while error is not None:
        found.append(error)
        error = error.__cause__
    return found


@faults
def test_the_host_survives_and_the_report_names_it(site, fault, caplog):
    site.add("acme", fault.source)
    site.add("zebra", registers("return [info('zebra')]"))
    manager = site.use()
    report = manager.plugins["acme"]
    assert (report.state, report.label) == (fault.state, "acme (fake-acme 1.0)")
    assert re.search(fault.reason, report.reason, re.DOTALL), report.reason
    assert isinstance(report.error, fault.cause)
    assert type(report.error).__name__ in report.traceback
    assert list(manager.broken()) == [report]
    assert "plugin acme (fake-acme 1.0) was left out" in caplog.text
    assert manager.plugins["zebra"].backends == ("zebra@cpu",), "a plugin after the broken one is not lost"
    q = torch.randn(1, 3, 2, 8)
    here = q.transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(here, here, here).transpose(1, 2)
    torch.testing.assert_close(polyattn.attention(q, q, q), expected)


@faults
def test_nothing_of_it_stays_behind(site, fault):
    site.add("acme", fault.source)
    manager = site.load()
    assert manager.plugins["acme"].backends == ()
    assert {b.id for b in manager.backends.values()} == set(manager.plugins["core"].backends)
    assert all(platform.detect.startswith("polyattn.registry.platforms:") for platform in manager.platforms.values())
    owners = {p.plugin_name for hook in vars(manager._pm.hook).values() for p in hook.get_hookimpls()}
    assert owners == {"core"}


@pytest.mark.slow(keep=18)
@faults
def test_asking_for_it_by_name_raises_with_the_cause(site, fault):
    site.add("acme", fault.source)
    manager = site.use()
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(
        BackendUnavailableError, match=r"no backend is named 'acme'.*acme \(fake-acme 1.0\): "
    ) as caught:
        polyattn.attention(q, q, q, backend="acme")
    assert manager.plugins["acme"].error in causes(caught.value)


@pytest.mark.slow(keep=18)
@faults
def test_strict_raises_at_every_load(site, fault):
    site.add("acme", fault.source)
    manager = site.host(POLYATTN_STRICT="1")
    for _ in range(2):
        with pytest.raises(PluginError, match=r"plugin acme \(fake-acme 1.0\): ") as caught:
            manager.load()
        assert re.search(fault.reason, str(caught.value), re.DOTALL)
        assert isinstance(caught.value.__cause__, fault.cause)


@pytest.fixture
def terminal() -> Iterator[None]:
    """A process that a Ctrl-C ends: one that a shell has put into the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


PRESSED = "import signal\nsignal.raise_signal(signal.SIGINT)\n"
"""What a Ctrl-C of a person is to a process."""


@pytest.mark.parametrize(
    "source",
    [
        PRESSED,
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nfinally:\n    x = 1\n",
        "try:\n    import signal; signal.raise_signal(2)\nexcept KeyboardInterrupt:\n    raise SystemExit(1)\n",
    ],
    ids=["at once", "passed on", "turned into another"],
)
def test_the_interrupt_of_a_person_is_no_fault_of_the_plugin(site, source, terminal):
    module = site.add("acme", source)
    manager, handler = site.host(), signal.getsignal(signal.SIGINT)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        manager.load()
    assert signal.getsignal(signal.SIGINT) is handler
    (site.folder / f"{module}.py").write_text("")
    assert manager.load().plugins["acme"].state == "ready", "the next load starts over"


def test_what_a_signal_handler_of_the_host_raises_is_no_fault_of_the_plugin(site):
    class StopWorkerError(BaseException):
        pass

    def stop(number, frame):
        raise StopWorkerError

    site.add("acme", "import signal\nsignal.raise_signal(signal.SIGTERM)\n")
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(StopWorkerError):
            site.load()
        assert signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_the_plugin_installs_stays(site):
    before = signal.getsignal(signal.SIGINT)
    module = site.add("acme", "import signal\ndef own(number, frame): ...\nsignal.signal(signal.SIGINT, own)\n")
    try:
        assert site.load().plugins["acme"].state == "ready"
        assert signal.getsignal(signal.SIGINT) is sys.modules[module].own
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_the_plugin_raises_itself_is_its_own_in_every_thread(site):
    site.add("acme", "raise KeyboardInterrupt")
    found = []
    worker = threading.Thread(target=lambda: found.append(site.load().plugins["acme"].state))
    worker.start()
    worker.join()
    assert found == ["broken"]


AT_WORK = """
class Odd(BaseException): ...

@hookimpl
def polyattn_register_backends():
    return [info("acme")]

@hookimpl
def polyattn_{hook}(**_):
    {does}
"""


@pytest.mark.parametrize("does", ["raise Odd('x')", "raise GeneratorExit('x')", "raise KeyboardInterrupt('x')"])
@pytest.mark.parametrize(
    "hook, kind",
    [
        ("report_capability(backend, request", UnsupportedRequestError),
        ("load_forward(backend, provider, request", PluginError),
    ],
)
def test_a_hook_may_raise_what_is_no_exception(site, hook, kind, does):
    name, _, arguments = hook.partition("(")
    site.add("acme", AT_WORK.replace("{hook}(**_)", f"{name}({arguments})").replace("{does}", does))
    site.use()
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises((kind, PluginError), match=r"(Odd|GeneratorExit|KeyboardInterrupt): x"):
        polyattn.attention(q, q, q, backend="acme")
    assert torch.isfinite(polyattn.attention(q, q, q)).all()


def test_ctrl_c_in_a_hook_is_a_persons(site, terminal):
    source = AT_WORK.replace("{hook}(**_)", "load_forward(backend, provider, request)")
    site.add("acme", source.replace("{does}", "import signal; signal.raise_signal(signal.SIGINT)"))
    site.use()
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(KeyboardInterrupt):
        polyattn.attention(q, q, q, backend="acme")


CALLS = """
import polyattn
x = __import__("torch").randn(1, 3, 2, 8)
{call}
@hookimpl
def polyattn_register_backends():
    return [info("acme")]
"""


@pytest.mark.parametrize("caught", [False, True], ids=["raised", "caught"])
@pytest.mark.parametrize(
    "call, what",
    [
        ("polyattn.attention(x, x, x)", "calls polyattn"),
        ("polyattn.list_backends()", "calls polyattn"),
        ("polyattn.registry.manager.register_plugin('zebra_too')", "calls polyattn"),
        ("polyattn.registry.manager._manager.register('zebra_too')", "registers a plugin"),
        ("polyattn.registry.manager.reset_manager(); polyattn.attention(x, x, x)", "resets polyattn's plugins"),
    ],
)
@pytest.mark.parametrize("by_hand", [False, True], ids=["entry point", "by hand"])
def test_a_plugin_that_asks_polyattn_while_it_is_loaded_is_the_one_that_is_broken(site, call, what, caught, by_hand):
    """It would load the others a second time, who then are "registered already"."""
    if caught:
        call = f"try:\n    {call}\nexcept Exception:\n    pass"
    site.module("zebra_too", "")
    site.add("zebra", registers("return [info('zebra')]"))
    source = CALLS.replace("{call}", f"import polyattn.registry.manager\n{call}")
    wrong = rf"{what} while it is being loaded\. Its import and its register hooks only declare: do that in a function"
    if by_hand:
        reset_manager(site.load())
        with pytest.raises(PluginError, match=wrong):
            register_plugin(site.module("acme_by_hand", source), "acme")
        manager = get_manager()
    else:
        site.add("acme", source)
        manager = site.host()
        reset_manager(manager)
        manager.load()
    states = {name: report.state for name, report in manager.plugins.items() if report.state != "not allowed"}
    assert states == {"core": "ready", "acme": "broken", "zebra": "ready"}
    assert re.search(rf"plugin acme .* {wrong}", manager.plugins["acme"].reason)
    assert ("acme", "cpu") not in manager.backends
    q = torch.randn(1, 3, 2, 8)
    assert torch.isfinite(polyattn.attention(q, q, q)).all(), "and afterwards everybody may ask"


WAITS = """
import logging, threading
told = threading.Event()

class Listener(logging.Handler):
    def emit(self, record):
        told.set()

def wait():
    listener = Listener()
    logging.getLogger("polyattn.plugins").addHandler(listener)
    try:
        if not told.wait(600):
            raise RuntimeError("nobody is named")
    finally:
        logging.getLogger("polyattn.plugins").removeHandler(listener)

{at_import}

@hookimpl
def polyattn_register_backends():
    {in_register}
    return [info("acme")]

@hookimpl
def polyattn_report_capability(backend, request):
    {in_capability}

@hookimpl
def polyattn_load_forward(backend, provider, request):
    {in_load}
"""


@pytest.mark.parametrize(
    "place, doing",
    [
        ("at_import", "loading fake_acme"),
        ("in_register", "loading fake_acme"),
        ("in_capability", "its capability hook, about acme@cpu,"),
        ("in_load", r"loading acme@cpu \(provider own\)"),
    ],
)
def test_a_plugin_that_does_not_come_back_is_named_meanwhile(site, place, doing, monkeypatch, caplog):
    monkeypatch.setattr(foreign, "SLOW_S", 0.01)
    source = WAITS
    for one in ("at_import", "in_register", "in_capability", "in_load"):
        source = source.replace(f"{{{one}}}", "wait()" if one == place else "None")
    site.add("acme", source)
    assert site.use().plugins["acme"].state == "ready"
    q = torch.randn(1, 3, 2, 8)
    polyattn.attention(q, q, q, backend="acme")
    assert re.search(
        rf"plugin acme \(fake-acme 1.0\): {doing} has taken 0.01 s so far. If it does not end, leave the plugin out: "
        "POLYATTN_DISABLE=acme",
        caplog.text,
    )
    assert not [thread for thread in threading.enumerate() if thread.name == "polyattn-slow-plugin"]


def test_a_host_that_has_no_more_threads_only_loses_the_line(site, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    site.add("acme", GOOD)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert site.load().plugins["acme"].state == "ready"


@pytest.mark.parametrize("module", ["..odd", "polyattn_"])
def test_a_plugin_without_a_name_is_no_devices_vendor(site, module):
    """The CPU has no vendor's plugin: "" is nobody's name."""
    manager = site.use(POLYATTN_EXTRA_PLUGINS=module, POLYATTN_PLUGINS=",")
    manager.plugins[""] = dataclasses.replace(manager.plugins[""], state="broken", reason="no such module")
    q = torch.randn(1, 3, 2, 8)
    assert torch.isfinite(polyattn.attention(q, q, q)).all()
