"""The kit under pytest: a plugin's own test class, the suite for any backend, the options; each in a fresh pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from polyattn.contract import BackendInfo, Provider, Requirement
from polyattn.errors import BackendUnavailableError, ConfigError
from polyattn.registry.distributions import Availability
from polyattn.testing import Asked, AttentionRecords, suite

from .conftest import ADAPTER, PLUGIN

PLUGIN_OPTION = ("-p", "polyattn.testing.plugin")
MINE = """
from polyattn.testing import AttentionConformance


class TestAcme(AttentionConformance):
    backend = "acme"
    per_row = 2
    dtypes = ("float32",)
"""
WRONG = (
    ADAPTER
    + """
    def bind(self, request):
        import dataclasses

        bound = super().bind(request)

        def forward(*tensors, **given):
            out, lse = bound.forward(*tensors, **given)
            return out, lse + 1

        return dataclasses.replace(bound, forward=forward) if request.lse else bound
"""
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a vendor's package and its tests."""
    package = tmp_path / "acme_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "adapter.py").write_text(ADAPTER)
    (package / "plugin.py").write_text("NARROWED = ()\n" + PLUGIN)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings =\n    error\n")
    (tmp_path / "test_acme.py").write_text(MINE)
    return tmp_path


def run(project: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of pytest in a vendor's folder."""
    path = os.pathsep.join([str(project), *filter(None, [os.environ.get("PYTHONPATH")])])
    others = [name for name in os.environ.get("POLYATTN_EXTRA_PLUGINS", "").split(",") if name]
    env = {**os.environ, "PYTHONPATH": path, "POLYATTN_EXTRA_PLUGINS": ",".join([*others, "acme_kernels.plugin"])}
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def counts(said: str) -> dict[str, int]:
    return {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|xfailed)", said)}


def test_a_class_of_a_plugin_s_own_tests(project: Path) -> None:
    """One test per case, each with its id, without any option or plugin of pytest."""
    code, said = run(project, "-vv")
    assert code == 0, said
    assert re.search(r"test_acme\.py::TestAcme::test_case\[dense-float32-B\S+\] PASSED", said)
    assert re.search(r"test_acme\.py::TestAcme::test_case\[dense-float32-refusal-\S+\] PASSED", said)
    assert "test_acme.py::TestAcme::test_gates[float32] PASSED" in said
    assert counts(said)["passed"] > 60


RECORDS = """
from polyattn.testing import Asked, AttentionRecords


class TestRecords(AttentionRecords):
    plugin = "acme_kernels.plugin"
    names = ("acme",)
    asked = (
        Asked("plain", "cpu", "acme", {"dtype": "float32"}, lowerings=()),
        Asked("a softcap", "cpu", "acme", {"dtype": "float32", "softcap": 9.0}, "softcap=9.0 is not declared"),
    )
"""


def test_the_records_of_a_plugin(project: Path) -> None:
    (project / "test_acme.py").write_text(RECORDS)
    plugin = project / "acme_kernels" / "plugin.py"
    plugin.write_text(plugin.read_text().replace("summary=", 'upstream="https://acme.example", summary=', 1))
    code, said = run(project)
    assert (code, counts(said)) == (0, {"passed": 6}), said


def test_the_libraries_of_one_platform_are_not_those_of_another() -> None:
    """`fa@cuda` and `fa@rocm` of one plugin: each is asked about with what it needs itself."""

    def info(platform: str) -> BackendInfo:
        provider = Provider("own", (), "m:C", (Requirement(f"lib-{platform}"),))
        return BackendInfo("fa", platform, (provider,), "made for a test")

    class Records(AttentionRecords):
        _backends = staticmethod(lambda: [info("cuda"), info("rocm")])

    assert Records._libraries(Asked("", "cuda:sm90", "fa", {})) == {"lib-cuda"}
    assert Records._libraries(Asked("", "rocm", "fa", {})) == {"lib-rocm"}


def test_a_package_that_only_has_the_name_must_be_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = Requirement("acme-lib", module="acme_lib.attention", hint="build it", impostor="acme-lib, a game")

    class Records(AttentionRecords):
        _backends = staticmethod(lambda: [BackendInfo("fa", "cpu", (Provider("own", (), "m:C", (need,)),), "")])

    Records().test_a_package_that_only_has_the_name_is_recognised(tmp_path / "a", monkeypatch)
    monkeypatch.setattr("polyattn.testing.declaring.availability", lambda provider: Availability(True, "9.0"))
    with pytest.raises(AssertionError, match=r"acme-lib 9\.0 was taken for the vendor's"):
        Records().test_a_package_that_only_has_the_name_is_recognised(tmp_path / "b", monkeypatch)


def test_records_that_say_something_else_fail_with_what_they_say(project: Path) -> None:
    wrong = RECORDS.replace('names = ("acme",)', 'names = ("other",)').replace("lowerings=()", 'lowerings=("fold",)')
    wrong = wrong.replace('"softcap": 9.0}, "softcap=9.0 is not declared"', '"softcap": 9.0}')
    extra = ("refused", '{"dtype": "float32"}', '"never said"'), ("else", '{"softcap": 9.0}', '"never said"')
    more = "\n".join(f'        Asked("{name}", "cpu", "acme", {fields}, {refusal}),' for name, fields, refusal in extra)
    (project / "test_acme.py").write_text(wrong.replace("\n    )\n", f"\n{more}\n    )\n"))
    code, said = run(project, *PLUGIN_OPTION)
    assert code == 1
    assert counts(said) == {"failed": 6, "passed": 2}, said
    for words in ("{'acme'} == {'other'}", "upstream", "softcap=9.0 is not declared", "served, as it is"):
        assert words in said


def test_workers_share_it(project: Path) -> None:
    pytest.importorskip("xdist")
    code, said = run(project, "-n", "2", *PLUGIN_OPTION)
    assert code == 0, said
    assert counts(said)["passed"] > 60


def test_a_wrong_backend_fails_with_the_findings(project: Path) -> None:
    (project / "acme_kernels" / "adapter.py").write_text(WRONG)
    code, said = run(project, *PLUGIN_OPTION)
    assert code == 1
    assert counts(said)["failed"] > 0
    assert counts(said)["passed"] > 40
    assert "lse: largest error 1, FlashAttention's rule allows" in said


def test_assertions_are_rewritten(project: Path) -> None:
    """With the plugin they explain themselves; without it they are plain."""
    (project / "acme_kernels" / "adapter.py").write_text(WRONG)
    explained = "where (Finding(check='lse'"
    code, said = run(project, *PLUGIN_OPTION, "-k", "float32-split")
    assert code == 1
    assert explained in said
    code, said = run(project, "-k", "float32-split")
    assert code == 1
    assert explained not in said


def test_expected_failures_are_strict(project: Path) -> None:
    (project / "acme_kernels" / "adapter.py").write_text(WRONG)
    lines = project / "acme_kernels" / "xfails.txt"
    lines.write_text("acme:dense-float32-B*-lse*  # https://acme.example/1\ndense-float32-split-*  # the same\n")
    code, said = run(project, *PLUGIN_OPTION)
    assert code == 0, said
    assert counts(said)["xfailed"] > 0
    assert "https://acme.example/1 (xfails.txt, line 1)" in said
    lines.write_text("acme:dense-float32-*  # everything\n")
    code, said = run(project, *PLUGIN_OPTION)
    assert code == 1
    assert "[XPASS(strict)] everything (xfails.txt, line 1)" in said


def test_a_line_without_a_case_stops_a_full_run(project: Path) -> None:
    (project / "acme_kernels" / "xfails.txt").write_text("dense-float33-*  # typo\n")
    (project / "test_acme.py").write_text(MINE.replace("    per_row = 2\n", "").replace('("float32",)', "None"))
    code, said = run(project, *PLUGIN_OPTION, "--polyattn-full", "--collect-only")
    assert code != 0
    assert "'dense-float33-*' matches none of the" in said


def test_the_suite_for_a_named_backend(project: Path) -> None:
    words = ("--pyargs", suite.__name__, *PLUGIN_OPTION)
    code, said = run(project, *words, "--polyattn-backend", "acme", "-k", "float32-B1 or gates", "-vv")
    assert code == 0, said
    assert re.search(r"TestConformance::test_case\[dense-float32-B1\S+\] PASSED", said)


def test_the_suite_needs_a_backend_that_there_is() -> None:
    with pytest.raises(ConfigError, match="TestConformance names no backend: set its `backend`, or give --polyattn-ba"):
        suite.TestConformance._place(None, None)
    with pytest.raises(BackendUnavailableError, match="no backend is named 'torch_sdqa'"):
        suite.TestConformance._place("torch_sdqa", None)


def test_a_device_that_is_not_here_is_skipped_or_strictly_a_failure(project: Path) -> None:
    text = PLUGIN.replace('"acme", "cpu"', '"acme", "nowhere"') + (
        "\n\ndef find():\n    return DeviceReport(present=False, detail='there is no such board')\n\n\n"
        "@hookimpl\ndef polyattn_register_platforms():\n"
        "    yield PlatformInfo('nowhere', device_type='nowhere', detect=f'{__name__}:find')\n"
    )
    (project / "acme_kernels" / "plugin.py").write_text("NARROWED = ()\n" + text)
    reason = "not run: no device of acme is here: nowhere (there is no such board)"
    code, said = run(project, *PLUGIN_OPTION)
    assert code == 0, said
    assert counts(said) == {"skipped": 2}
    assert reason in said
    code, said = run(project, *PLUGIN_OPTION, "--polyattn-strict-device")
    assert code == 1
    assert counts(said) == {"failed": 2}
    assert reason in said


DEVICE_TEST = """
def test_chip(device):
    device("rocm", "musa", what="these kernels")


def test_cpu(device):
    assert device("musa", "cpu", what="these kernels").present
"""


def test_the_device_fixture(project: Path) -> None:
    (project / "test_acme.py").write_text(DEVICE_TEST)
    code, said = run(project, *PLUGIN_OPTION)
    assert code == 0, said
    assert counts(said) == {"passed": 1, "skipped": 1}
    assert re.search(r"not run: these kernels \(no rocm device: .*; no musa device: ", said.replace("\n", " "))
    code, said = run(project, *PLUGIN_OPTION, "--polyattn-strict-device")
    assert counts(said) == {"passed": 1, "failed": 1}
