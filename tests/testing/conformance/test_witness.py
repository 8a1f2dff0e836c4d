"""A hook that narrows its rows: every kind of refusal has a witness, and every witness is one."""

from __future__ import annotations

import pytest

from polyattn.contract import AttentionRequest, Rejected, Witness
from polyattn.errors import PluginError
from polyattn.registry.manager import get_manager
from polyattn.testing import Case, Installed, OffChip, Outcome, Report, plan, run, run_case
from polyattn.testing.checks.judged import kind_of

from .conftest import Acme

IMPORTS = "from polyattn.contract import AttentionRequest, Witness"
WITNESS = f"""
{IMPORTS}
NARROWED = [Witness(AttentionRequest(dtype="bfloat16", head_dim=96), "bfloat16 needs head_dim <= 64")]
"""
HOOK = """
@hookimpl
def polyattn_report_capability(backend, request):
    if request.dtype == "bfloat16" and request.head_dim > 64:
        return Rejected(f"head_dim={request.head_dim} is more than 64, the limit for 'bfloat16'")
"""


def tried() -> Report:
    return run("acme", device="cpu", per_row=10)


def outcome() -> Outcome:
    """Of the witness."""
    target = Installed("acme")
    (case,) = [case for case in plan(target) if case.check == "witness"]
    return run_case(target, case)


def said() -> str:
    (finding,) = outcome().findings
    return str(finding)


def test_a_witnessed_narrowing_is_a_refusal(acme: Acme) -> None:
    acme(WITNESS, HOOK)
    report = tried()
    assert report.ok, report
    assert report.counts["witnesses"] == {"refused": 1}
    assert report.counts["dense bfloat16"]["refused"] > 0, "cases that the rows declare and the hook refuses"
    assert report.counts["dense bfloat16"]["passed"] > 0
    assert "refused" not in report.counts["dense float32"]


def test_narrowing_without_a_witness_is_found(acme: Acme) -> None:
    acme(behind=HOOK)
    report = tried()
    assert not report.ok
    assert report.failed == len(report.findings) > 0
    for case, (message,) in report.findings.items():
        assert case.startswith("dense-bfloat16")
        assert message.startswith("narrowing without a witness: the rows accept it, the hook says: head_dim=")


def test_another_kind_of_refusal_needs_a_witness_of_its_own(acme: Acme) -> None:
    more = HOOK + '    if request.lse:\n        return Rejected("lse is not built")\n'
    acme(WITNESS, more)
    found = {message for messages in tried().findings.values() for message in messages}
    assert found == {"narrowing without a witness: the rows accept it, the hook says: lse is not built"}


def test_kinds_differ_in_more_than_numbers_and_quoted_values() -> None:
    one, other = "head_dim=96 > 64 for 'bfloat16' (1e-3)", "head_dim=128 > 64.5 for 'float16' (-2)"
    assert kind_of(one) == kind_of(other) == "head_dim=# > # for # (#)"
    assert kind_of(one) != kind_of(one.replace("head_dim", "v_head_dim"))


def test_a_refusal_without_any_reason_is_found(acme: Acme) -> None:
    acme(WITNESS, HOOK.replace("return Rejected(f", "return Rejected([]) if request.head_dim > 96 else Rejected(f"))
    found = {message for messages in tried().findings.values() for message in messages}
    assert found == {"narrowing without a witness: the rows accept it, the hook says: no reason at all"}


def test_a_hook_that_refuses_everything_makes_the_rows_untrue(acme: Acme) -> None:
    acme(WITNESS, HOOK.replace(" and request.head_dim > 64", "") + "\n")
    report = tried()
    count = report.counts["dense bfloat16"]["failed"]
    assert report.findings == {
        "dense bfloat16": [
            f"narrowing: the hook refuses all {count} cases that the rows declare. Declare less",
        ]
    }
    assert not report.ok


def test_a_hook_that_raises_is_a_finding_of_each_case(acme: Acme) -> None:
    acme(WITNESS, HOOK.replace("return Rejected(f", "raise ValueError(f"))
    report = tried()
    messages = [message for messages in report.findings.values() for message in messages]
    assert any(m.startswith("call: it is declared, and was refused: ") and "ValueError" in m for m in messages)
    assert any(m.startswith("witness: the hook failed: ") and "ValueError" in m for m in messages)


def test_a_witness_without_a_hook(acme: Acme) -> None:
    acme(WITNESS)
    assert said() == (
        "witness: the plugin has no polyattn_report_capability, so nothing is narrowed: bfloat16 needs head_dim <= 64"
    )


def test_a_witness_that_the_rows_refuse(acme: Acme) -> None:
    acme(WITNESS.replace("head_dim=96", "head_dim=99"), HOOK)
    assert said() == (
        "witness: the rows do not accept it, so it shows nothing about the hook: bfloat16 needs head_dim <= 64"
    )


def test_a_witness_that_the_hook_accepts(acme: Acme) -> None:
    acme(WITNESS.replace("head_dim=96", "head_dim=64"), HOOK)
    assert said() == "witness: the hook accepts it: bfloat16 needs head_dim <= 64"


def test_a_witness_that_is_refused_without_a_reason(acme: Acme) -> None:
    acme(WITNESS, HOOK.replace("return Rejected(f", 'return Rejected(" ") if backend else Rejected(f'))
    assert said() == "witness: the hook refuses it without a reason: bfloat16 needs head_dim <= 64"


def test_a_witness_of_another_architecture_keeps_it(acme: Acme) -> None:
    """A limit of a chip can be shown on any machine: the hook judges a request."""
    before = WITNESS.replace('dtype="bfloat16", head_dim=96', 'dtype="bfloat16", head_dim=96, arch="old"')
    acme(before, HOOK.replace("request.head_dim > 64", 'request.arch == "old"'))
    assert outcome().verdict == "refused"


def test_witnesses_are_asked_of_the_families_and_dtypes_of_a_run(acme: Acme) -> None:
    acme(WITNESS, HOOK)
    assert "witnesses" not in run("acme", device="cpu", per_row=1, dtypes=["float32"]).counts


def test_what_is_no_witness_is_refused_at_registration(acme: Acme) -> None:
    with pytest.raises(PluginError, match=r"acme@cpu: BackendInfo\.narrowed\[0\]='bfloat16' must be of type Witness"):
        acme('NARROWED = ["bfloat16"]')


def test_only_installed_backends_have_hooks() -> None:
    case = Case(request=AttentionRequest(), check="witness", fields=("x",))
    with pytest.raises(TypeError, match="witnesses are judged by the plugin's hook, which OffChip does not ask"):
        run_case(OffChip("torch_sdpa", "rocm"), case)


def test_no_backend_here_narrows_without_a_witness() -> None:
    """Of every plugin that is installed, planned backends too: a witness says what its hook adds to the rows."""
    manager = get_manager()
    for info in manager.backends.values():
        assert not info.narrowed or manager.narrows(info), info.id
        for witness in info.narrowed:
            assert isinstance(witness, Witness)
            assert witness.why
            assert isinstance(manager.narrow(info, witness.request.normalised()), Rejected), f"{info.id}: {witness}"
