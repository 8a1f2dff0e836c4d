"""Hooks that fail later, when a call needs them: contained, remembered for `polyattn doctor`, raised when asked for."""

from __future__ import annotations

import functools
import json

import pytest
import torch

import polyattn
from polyattn.contract import AttentionRequest, Bound
from polyattn.errors import BackendUnavailableError, InvalidInputError, PluginError, UnsupportedRequestError
from polyattn.registry.bound_check import checked
from polyattn.selection import inspection

FIRST = """
@hookimpl
def polyattn_register_backends():
    return [info("acme", evidence="hardware", priority=1000, auto=(AutoRule(1, "first of all"),), **MORE)]
"""
"""Chosen before anything else, if it can be."""


def first(more: str = "", target: str = "") -> str:
    record = f"MORE = {{'target': {target!r}}}\n" if target else "MORE = {}\n"
    return record + FIRST + more


def call(**named: str) -> torch.Tensor:
    q = torch.randn(1, 3, 2, 8)
    return polyattn.attention(q, q, q, **named)


def capability(body: str) -> str:
    return first(f"\n@hookimpl\ndef polyattn_report_capability(backend, request):\n    {body}\n")


def loads(body: str) -> str:
    return first(f"\n@hookimpl\ndef polyattn_load_forward(backend, provider, request):\n    {body}\n")


def evidence(**more: object) -> str:
    """The text of an evidence file that is fine as it stands."""
    return json.dumps({"backend": "acme", "platform": "cpu", "level": "hardware", **more})


def test_this_plugin_is_chosen_when_nothing_is_wrong(site):
    site.add("acme", first())
    site.use()
    request = AttentionRequest(dtype="float32")
    assert polyattn.explain(request).backend == "acme"


BROKEN_CAPABILITY = [
    ("raise RuntimeError('no such sku')", "its capability hook raised RuntimeError: no such sku", RuntimeError),
    ("raise SystemExit(5)", "its capability hook raised SystemExit: 5", SystemExit),
    ("return request.no_such_field", "its capability hook raised AttributeError", AttributeError),
    ("return True", "its capability hook returned True, neither Accepted nor Rejected nor None", PluginError),
    ("return False", "its capability hook returned False, neither Accepted nor Rejected nor None", PluginError),
    (
        "return Rejected([1, None])",
        "its capability hook returned Rejected(reasons=(1, None)), whose reasons are no sentences",
        PluginError,
    ),
    ("return 'no'", "its capability hook returned 'no', neither Accepted nor Rejected nor None", PluginError),
]


@pytest.mark.parametrize("body, reason, cause", BROKEN_CAPABILITY, ids=[c[0] for c in BROKEN_CAPABILITY])
def test_a_capability_hook_that_fails_is_a_refusal_with_its_text(site, body, reason, cause, caplog):
    site.add("acme", capability(body))
    manager = site.use()
    selection = polyattn.explain(AttentionRequest(dtype="float32"))
    assert selection.backend == "torch_sdpa"
    assert any(reason in said for said in selection.rejected["acme"])
    report = manager.plugins["acme"]
    assert isinstance(report.error, cause)
    assert report.reason.startswith(f"acme@cpu: {type(report.error).__name__}: ")
    assert type(report.error).__name__ in report.traceback
    assert "plugin acme (fake-acme 1.0): acme@cpu" in caplog.text
    assert torch.isfinite(call()).all()


@pytest.mark.parametrize("body, reason, cause", BROKEN_CAPABILITY, ids=[c[0] for c in BROKEN_CAPABILITY])
def test_by_name_a_failing_capability_hook_is_an_error_of_the_plugin(site, body, reason, cause):
    site.add("acme", capability(body))
    site.use()
    with pytest.raises(PluginError, match="acme, asked for by argument, cannot serve") as caught:
        call(backend="acme")
    assert reason in str(caught.value)
    assert "The plugin failed: see `polyattn doctor`" in str(caught.value)
    assert isinstance(caught.value.__cause__, cause)


@pytest.mark.parametrize("body", ["return None", "return Accepted()"])
def test_a_capability_hook_that_agrees(site, body):
    site.add("acme", capability(body))
    site.use()
    assert polyattn.explain(AttentionRequest(dtype="float32")).backend == "acme"


def test_a_capability_hook_narrows_and_can_never_widen(site):
    site.add("acme", capability("return Rejected('head_dim=8 is slow') if request.head_dim == 8 else Accepted()"))
    site.use()
    assert polyattn.explain(AttentionRequest(dtype="float32", head_dim=16)).backend == "acme"
    narrow = polyattn.explain(AttentionRequest(dtype="float32", head_dim=8))
    assert (narrow.backend, narrow.rejected["acme"]) == ("torch_sdpa", ["head_dim=8 is slow"])
    # By name, an exact rewrite leads to what the plugin agrees to; where none does, its reason is told.
    named = polyattn.explain(AttentionRequest(dtype="float32", head_dim=8), backend="acme")
    assert "pad_head_dim" in named.lowerings
    wide = polyattn.explain(AttentionRequest(dtype="float16"))
    assert (wide.backend, wide.rejected["acme"]) == ("torch_sdpa", ["dtype='float16' is not float32"])


def test_what_a_capability_hook_refuses_of_every_rewrite_is_refused(site):
    site.add("acme", capability("return Rejected('three heads are slow') if request.heads == 3 else Accepted()"))
    site.use()
    with pytest.raises(UnsupportedRequestError, match="three heads are slow"):
        polyattn.explain(AttentionRequest(dtype="float32", head_dim=8, heads=3, kv_heads=3), backend="acme")


def test_a_capability_hook_is_asked_about_its_own_backends_only(site):
    site.add("acme", capability("assert backend.name == 'acme', backend"))
    manager = site.use()
    polyattn.explain(AttentionRequest(dtype="float32"))
    assert manager.plugins["acme"].error is None


def test_a_refusal_without_a_reason_is_told_as_that(site):
    site.add("acme", capability("return Rejected([])"))
    site.use()
    with pytest.raises(UnsupportedRequestError, match="its plugin refused without a reason"):
        call(backend="acme")


ADAPTER = "\nclass K:\n    def bind(self, request): "
BROKEN_LOAD = [
    ("raises", loads("raise OSError('libacme.so.3 is gone')"), "OSError: libacme.so.3 is gone", OSError),
    ("leaves", loads("raise SystemExit('no licence')"), "SystemExit: no licence", SystemExit),
    ("returns a function", loads("return print"), "acme@cpu returned builtin_function_or_method", None),
    (
        "binds no function",
        loads("from polyattn.contract import Bound; return Bound(None)"),
        "acme@cpu returned Bound(None), a polyattn.contract.Bound of a function is needed",
        None,
    ),
    ("target's module is missing", first(target="acme_gone.kernel:K"), "No module named 'acme_gone'", ImportError),
    ("target's class is missing", first(target="polyattn.errors:K"), "has no attribute 'K'", AttributeError),
    ("target is no adapter", first(target="polyattn.errors:did_you_mean"), "missing 2 required", TypeError),
    (
        "target's bind fails",
        first("\nclass K:\n    def bind(self, request): 1 / 0\n", "fake_acme:K"),
        "Zero",
        Exception,
    ),
    (
        "target's bind returns nothing",
        first("\nclass K:\n    def bind(self, request): pass\n", "fake_acme:K"),
        "None",
        None,
    ),
]


@pytest.mark.parametrize("source, reason, cause", [b[1:] for b in BROKEN_LOAD], ids=[b[0] for b in BROKEN_LOAD])
def test_a_plugin_that_cannot_load_its_forward(site, source, reason, cause):
    site.add("acme", source)
    manager = site.use()
    with pytest.raises(PluginError, match=r"plugin acme \(fake-acme 1.0\)") as caught:
        call(backend="acme")
    assert reason in str(caught.value)
    if cause is not None:
        assert "could not load acme@cpu (provider own)" in str(caught.value)
        assert "Name another backend, mend the plugin, or leave it out: POLYATTN_DISABLE=acme" in str(caught.value)
        assert isinstance(caught.value.__cause__, cause)
    report = manager.plugins["acme"]
    assert reason in report.reason
    assert report.traceback
    assert torch.isfinite(call(backend="torch_sdpa")).all()


LACKING = """
from polyattn.contract import Bound

class K:
    def bind(self, request):
        def forward(query, key, value, *, sinks=None):
            return value
        return Bound(forward)
"""


def test_a_forward_without_a_keyword_is_named_before_it_is_called(site):
    site.add("acme", first(LACKING, "fake_acme:K"))
    manager = site.use()
    with pytest.raises(PluginError) as caught:
        call(backend="acme")
    assert str(caught.value) == (
        "plugin acme (fake-acme 1.0): acme@cpu: its dense forward, K.bind.<locals>.forward, cannot be given attn_mask, "
        "out: it takes every keyword of polyattn.contract.DenseForward, also of what it does not declare. Add "
        "attn_mask=None, out=None; docs/hooks.md, polyattn_load_forward, says what they are"
    )
    assert manager.plugins["acme"].error is caught.value


def accepts(family: str, forward: object, backward: object = None, **request: object) -> bool:
    """Whether what a plugin hands over has the keywords of its protocol."""
    try:
        checked(Bound(forward, backward), AttentionRequest(family=family, **request), "acme")
    except PluginError:
        return False
    return True


def test_which_functions_have_the_keywords_of_their_protocol():
    def dense(query, key, value, attn_mask=None, sinks=None, out=None): ...
    def anything(*tensors, **given): ...
    def latent(query, cache, *, tables, attn_mask, out): ...
    def gradient(dout, query, key, value, out, lse): ...

    assert accepts("dense", dense)
    assert accepts("dense", functools.partial(anything, 1))
    assert not accepts("varlen", dense)
    assert accepts("mla", latent)
    assert not accepts("mla", latent, kv_parts=1), "a keyword that is given to who declares it"
    assert not accepts("dense", dense, gradient)
    assert accepts("block_sparse", anything, anything)
    assert not accepts("block_sparse", anything, gradient), "it is given the lists of the forward"
    assert accepts("dense", max), "what is built in C shows no signature"

    class Kernel:
        def __call__(self, query, key, value, *, attn_mask=None, sinks=None, out=None): ...
        def run(self, query, key, value, *, out=None): ...

    assert accepts("dense", Kernel())
    assert not accepts("dense", Kernel().run)


def test_the_first_failure_is_the_one_that_is_kept(site):
    site.add("acme", loads("raise OSError(f'call with {request.head_dim}')"))
    manager = site.use()
    for dim in (8, 16):
        q = torch.randn(1, 3, 2, dim)
        with pytest.raises(PluginError, match=f"call with {dim}"):
            polyattn.attention(q, q, q)
    assert manager.plugins["acme"].reason == "acme@cpu: OSError: call with 8"


def test_a_typed_refusal_while_loading_stays_what_it_is(site):
    source = "from polyattn.errors import InvalidInputError\n"
    site.add("acme", source + loads("raise InvalidInputError('this build wants D <= 4')"))
    manager = site.use()
    with pytest.raises(InvalidInputError, match="this build wants D <= 4"):
        call(backend="acme")
    assert manager.plugins["acme"].error is None


def test_none_leaves_the_loading_to_the_target(site):
    site.add("acme", loads("return None"))
    site.use()
    q = torch.randn(1, 3, 2, 8)
    reference = polyattn.attention(q, q, q, backend="reference")
    assert torch.equal(polyattn.attention(q, q, q, backend="acme"), reference)


def test_the_hook_is_given_the_provider_that_was_chosen(site):
    site.add("acme", loads("raise LookupError(f'{backend.id} by {provider} for {request.dtype}')"))
    site.use()
    with pytest.raises(PluginError, match="acme@cpu by own for float32"):
        call()


def test_rows_that_fail_to_judge_are_a_refusal_and_by_name_an_error(site):
    """`Range` cannot compare the default scale, None."""
    rows = "(row(family='dense', dtype='float32', head_dim=Range(1), scale=Range(0.1, 1.0)),)"
    record = f"[info('acme', evidence='hardware', priority=1000, providers=(Provider('own', {rows}, 'm:C'),))]"
    site.add("acme", f"@hookimpl\ndef polyattn_register_backends():\n    return {record}\n")
    site.use()
    selection = polyattn.explain(AttentionRequest(dtype="float32"))
    assert selection.backend == "torch_sdpa"
    assert selection.rejected["acme"][0].startswith("its capability rows failed: TypeError")
    with pytest.raises(PluginError, match="its capability rows failed") as caught:
        polyattn.explain(AttentionRequest(dtype="float32"), backend="acme")
    assert isinstance(caught.value.__cause__, TypeError)


ODD_RULE = """
class Odd:
    def reason(self, value): return None if value == "bfloat16" else str(1 / 0)
    def describe(self): return "odd"

@hookimpl
def polyattn_register_backends():
    return [info("acme", evidence="hardware", auto=(AutoRule(1, "odd dtypes", conditions(dtype=Odd())),))]
"""


def test_a_rule_that_fails_on_a_later_request_is_a_refusal(site):
    site.add("acme", ODD_RULE)
    site.use()
    selection = polyattn.explain(AttentionRequest(dtype="float32"))
    assert selection.backend == "torch_sdpa"
    assert selection.rejected["acme"] == ["its rule 'odd dtypes' failed: ZeroDivisionError: division by zero"]
    assert torch.isfinite(call()).all()
    assert polyattn.explain(AttentionRequest(dtype="float32"), backend="acme").backend == "acme"


PROVIDER = """
ROWS = (row(family="dense", dtype="float32", head_dim=Range(1)),)

@hookimpl
def polyattn_register_backends():
    return [info("acme", providers=(Provider("own", ROWS, "m:C", (Requirement(**{}),)),))]
"""


@pytest.mark.parametrize(
    "need, reason",
    [
        ({"distribution": "acme-sdk"}, "acme-sdk is not installed; pip install acme-sdk"),
        ({"distribution": "acme-sdk", "versions": ">=2"}, "acme-sdk>=2 is not installed; pip install acme-sdk>=2"),
        ({"distribution": "acme-sdk", "hint": "see acme.example"}, "acme-sdk is not installed; see acme.example"),
        (
            {"distribution": "acme-sdk", "impostor": "a cartoon, not the SDK"},
            "acme-sdk is not installed; the registry has a cartoon, not the SDK; pip install acme-sdk",
        ),
        ({"distribution": "fake-acme", "versions": ">=2"}, "fake-acme 1.0 is installed, >=2 is needed"),
        (
            {"distribution": "fake-acme", "module": "acme.kernels"},
            "the installed fake-acme 1.0 is fake-acme without acme.kernels",
        ),
        (
            {"distribution": "fake-acme", "module": "acme.kernels", "impostor": "a cartoon, not the SDK"},
            "the installed fake-acme 1.0 is a cartoon, not the SDK",
        ),
    ],
)
def test_a_provider_that_is_not_installed_says_what_to_do(site, need, reason):
    site.add("acme", PROVIDER.replace("{}", repr(need)))
    site.use()
    with pytest.raises(BackendUnavailableError, match="acme, asked for by argument, cannot serve") as caught:
        call(backend="acme")
    assert reason in str(caught.value)
    assert [s.status for s in polyattn.list_backends("cpu") if s.name == "acme"] == ["unavailable"]


@pytest.mark.parametrize("need", [{}, {"versions": ">=1,<2"}, {"module": "fake_acme"}, {"module": "polyattn.records"}])
def test_a_provider_that_is_installed(site, need):
    need = {"distribution": "sdk-of-acme", "also": ("fake-acme",), **need}
    site.add("acme", PROVIDER.replace("{}", repr(need)))
    site.use()
    assert polyattn.explain(AttentionRequest(dtype="float32"), backend="acme").provider == "own"


CHECK = """
def usable():
    BODY
"""


@pytest.mark.parametrize(
    "body, reason",
    [
        ("return 'it was started otherwise', 'start again'", "is installed, but it was started otherwise; start again"),
        (
            "raise OSError('no /dev/board')",
            "but fake_acme:usable, which knows if it can be used, failed: OSError: no /dev/board; mend its plugin",
        ),
        ("raise SystemExit(2)", "failed: SystemExit: 2; mend its plugin, or leave it out (POLYATTN_DISABLE)"),
        ("return 1, 2", "but fake_acme:usable returned (1, 2), not None or (why, what to do); mend its plugin"),
        ("return True", "but fake_acme:usable, which knows if it can be used, failed: TypeError: "),
    ],
)
def test_what_is_installed_and_of_no_use_to_this_process_is_unavailable(site, body, reason):
    need = {"distribution": "fake-acme", "check": "fake_acme:usable"}
    site.add("acme", PROVIDER.replace("{}", repr(need)) + CHECK.replace("BODY", body))
    site.use()
    (listed,) = [status for status in polyattn.list_backends("cpu") if status.name == "acme"]
    assert listed.status == "unavailable"
    assert listed.reasons[0].startswith("fake-acme 1.0 is installed, but ")
    assert reason in listed.reasons[0]
    with pytest.raises(BackendUnavailableError, match="acme, asked for by argument, cannot serve") as caught:
        call(backend="acme")
    assert reason in str(caught.value)
    assert polyattn.explain(AttentionRequest(dtype="float32")).backend != "acme"
    # Of another machine nothing is known but what is said to be installed there.
    there = polyattn.what_if(AttentionRequest(dtype="float32"), platform="cpu", installed=["fake-acme"], backend="acme")
    assert there.provider == "own"


@pytest.mark.parametrize("body", ["return None", "return '', ''"])
def test_what_is_installed_and_can_be_used_serves(site, body):
    need = {"distribution": "fake-acme", "check": "fake_acme:usable"}
    site.add("acme", PROVIDER.replace("{}", repr(need)) + CHECK.replace("BODY", body))
    site.use()
    assert polyattn.explain(AttentionRequest(dtype="float32"), backend="acme").provider == "own"


def test_what_is_not_installed_is_not_asked_if_it_can_be_used(site):
    need = {"distribution": "acme-sdk", "check": "acme_sdk:usable"}
    site.add("acme", PROVIDER.replace("{}", repr(need)))
    site.use()
    (listed,) = [status for status in polyattn.list_backends("cpu") if status.name == "acme"]
    assert listed.reasons == ("acme-sdk is not installed; pip install acme-sdk",)


@pytest.mark.parametrize(
    "detection, reason",
    [
        ("def find(): raise OSError('no /dev/board')", "its detection failed: OSError: no /dev/board"),
        ("def find(): raise SystemExit(2)", "its detection failed: SystemExit: 2"),
        ("def find(): return True", "TypeError: fake_board:find returned True, a DeviceReport is needed"),
        ("", "its detection failed: AttributeError"),
    ],
)
def test_a_platform_whose_detection_fails_is_a_device_that_is_not_here(site, detection, reason):
    platform = (
        "@hookimpl\ndef polyattn_register_platforms():\n    return [PlatformInfo('board', 'board', 'fake_board:find')]"
    )
    backends = "@hookimpl\ndef polyattn_register_backends():\n    return [info('plain', 'board')]"
    site.add("board", f"{detection}\n{platform}\n{backends}\n")
    site.use()
    inspection.detect.cache_clear()
    (status,) = polyattn.list_backends("board")
    assert status.status == "unavailable"
    assert reason in status.reasons[0]
    assert any(s.status == "available" for s in polyattn.list_backends("cpu"))
    inspection.detect.cache_clear()


@pytest.mark.parametrize(
    "text, reason",
    [
        ("[]", "acme@cpu.json is not an evidence file: 'list' object has no attribute 'get'"),
        ("[" * 100_000, "acme@cpu.json is not an evidence file: maximum recursion depth"),
        (evidence(others=5), "acme@cpu.json is not an evidence file: 'int' object is not iterable"),
        (evidence(device=5), "acme@cpu.json: Evidence.device=5 must be of type str; run `polyattn conform acme` again"),
        (evidence(level="great"), "acme@cpu.json: level 'great' is not one of hardware, "),
        (evidence(others=[json.loads(evidence(level="great"))]), "acme@cpu.json: level 'great' is not one of hardware"),
    ],
    ids=["a list", "deep", "others is no list", "a number for a name", "a level of its own", "another's level"],
)
def test_evidence_that_cannot_be_read_shows_nothing_and_stops_nobody(site, text, reason, caplog):
    site.add("acme", first().replace(', evidence="hardware"', ""))
    (site.folder / "evidence").mkdir()
    (site.folder / "evidence" / "acme@cpu.json").write_text(text)
    manager = site.use()
    assert polyattn.explain(AttentionRequest(dtype="float32")).backend == "torch_sdpa"
    assert torch.isfinite(call(backend="acme")).all()
    assert [s.evidence for s in polyattn.list_backends("cpu") if s.name == "acme"] == ["declared"]
    assert reason in manager.plugins["acme"].reason
    assert caplog.text.count("plugin acme (fake-acme 1.0): acme@cpu: PluginError: acme@cpu.json") == 1
