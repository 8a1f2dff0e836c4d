"""What adapters are made and tested with: vendors' signatures are enforced, calls are recorded, what is loaded is held
to what it must take."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from polyattn import adapters
from polyattn.contract import DeviceReport, Requirement
from polyattn.errors import BackendUnavailableError, ConfigError
from polyattn.registry import distributions, evidence
from polyattn.registry.evidence import Evidence
from polyattn.registry.manager import get_manager
from polyattn.testing import AttentionConformance, recording
from polyattn.testing.emulators import OTHER, Emulated, Library, OnDevice, Signatures, device_suites, emulated
from polyattn.testing.where import Place

NEED = Requirement("acme-attn", module="acme.attn", hint="pip install acme-attn")
ENTRIES = {
    "acme.attend": {"parameters": "q, k, v, causal=False, window_size=(-1, -1), dtype=torch.float16, softcap=0.0"},
    "acme.swallow": {"parameters": "q, k, v, tensor_layout='HND', **kwargs"},
    "acme.typed": {
        "parameters": "q: torch.Tensor, /, k: 'Tensor', scale: float = None, lens: Optional[List[int]] = None, *rest, "
        "window: Tuple[int, int] = (-1, -1), mode: Literal['a', 'b'] = 'a', causal: bool = False, "
        "out: Tensor | None = None, layout: Layout = Layout.X"
    },
    "acme.Wrapper.plan": {"parameters": "indptr, *, causal=False"},
    "acme.op": {
        "schema": "acme::op(Tensor query, *, Tensor? atten_mask=None, SymInt[]? lengths=None, float scale=1., "
        'str input_layout="BSH", ScalarType? out_dtype=None) -> (Tensor, Tensor)'
    },
}


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    (tmp_path / "signatures.json").write_text(json.dumps(ENTRIES))
    signatures = Signatures(tmp_path / "signatures.json")
    library = Library("acme-attn", "1.2.3", "acme.attn", "torch.ops.acme", signatures=signatures)

    @library.function("acme.attn", "acme.attend")
    def attend(q: object, causal: bool, **_: object) -> tuple[object, bool]:
        return q, causal

    @library.function("acme.attn", "acme.swallow")
    def swallow(**_: object) -> None: ...

    @library.function("acme.attn", "acme.typed")
    def typed(**_: object) -> None: ...

    @library.function("torch.ops.acme", "acme.op")
    def op(query: torch.Tensor, scale: float, **_: object) -> torch.Tensor:
        return query * scale

    class Wrapper:
        @library.method("acme.Wrapper.plan")
        def plan(self, indptr: list[int], causal: bool) -> tuple[list[int], bool]:
            return indptr, causal

    library.add("acme.attn", Wrapper=Wrapper)
    return library.install(monkeypatch)


def test_a_call_is_bound_to_the_vendors_signature(acme: Library) -> None:
    attend = adapters.load(NEED, "acme.attn:attend")
    assert attend(1, 2, v=3, causal=True) == (1, True)
    call = acme.calls[-1]
    assert (call.name, call.positional, dict(call.given)) == ("attend", 2, {"q": 1, "k": 2, "v": 3, "causal": True})
    assert call.arguments["window_size"] == (-1, -1)
    assert call.arguments["dtype"] is OTHER
    with pytest.raises(TypeError, match="unexpected keyword argument 'sinks'"):
        attend(1, 2, 3, sinks=None)
    with pytest.raises(TypeError, match="missing a required argument: 'v'"):
        attend(1, 2)
    assert len(acme.calls) == 1


def test_a_keyword_that_would_be_swallowed_is_an_error(acme: Library) -> None:
    with pytest.raises(TypeError, match="would swallow return_lse"):
        adapters.load(NEED, "acme.attn:swallow")(q=1, k=2, v=3, return_lse=True)


def test_methods_are_held_too(acme: Library) -> None:
    wrapper = adapters.load(NEED, "acme.attn:Wrapper")()
    assert wrapper.plan([0, 3], causal=True) == ([0, 3], True)
    assert acme.calls[-1].name == "Wrapper.plan"
    with pytest.raises(TypeError, match="too many positional"):
        wrapper.plan([0, 3], True)


T = torch.ones(2)
FITTING = [
    {"scale": 1, "lens": (1, 2), "window": [3, 0], "mode": "b", "causal": True, "out": T, "layout": "anything"},
    {"scale": None, "lens": None, "out": None},
]
WRONG = [
    ({"scale": "1"}, r"scale is float, not str '1'"),
    ({"lens": T}, r"lens is Optional\[List\[int\]\], not Tensor$"),
    ({"lens": [1, T]}, r"lens is Optional\[List\[int\]\], not list"),
    ({"window": (1, 2, 3)}, r"window is Tuple\[int, int\], not tuple \(1, 2, 3\)"),
    ({"window": 3}, r"window is Tuple\[int, int\], not int 3"),
    ({"mode": "c"}, r"mode is Literal\['a', 'b'\], not str 'c'"),
    ({"causal": 1}, "causal is bool, not int 1"),
    ({"causal": None}, "causal is bool, not NoneType None"),
    ({"out": 2, "scale": T}, r"out is Tensor \| None, not int 2; scale is float, not Tensor|scale is .*; out is "),
]


@pytest.mark.parametrize("given", FITTING)
def test_what_fits_the_vendors_types(given: dict[str, object], acme: Library) -> None:
    adapters.load(NEED, "acme.attn:typed")(T, k=T, **given)
    assert acme.calls[-1].given["k"] is T


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_what_does_not_fit_them(given: dict[str, object], said: str, acme: Library) -> None:
    with pytest.raises(TypeError, match=said):
        adapters.load(NEED, "acme.attn:typed")(T, k=T, **given)
    assert not acme.calls


def test_operators_are_held_to_their_schema(acme: Library) -> None:
    op = adapters.load(NEED, "torch:ops.acme.op", {"lengths": "ragged batches"})
    assert torch.equal(op(T, scale=2.0, lengths=[1], out_dtype=torch.float32), 2 * T)
    assert acme.calls[-1].arguments["input_layout"] == "BSH"
    with pytest.raises(TypeError, match=r"lengths is Optional\[List\[int\]\], not Tensor"):
        op(T, lengths=T)
    with pytest.raises(TypeError, match="out_dtype is Optional"):
        op(T, out_dtype="float32")
    with pytest.raises(TypeError, match="too many positional"):
        op(T, None)
    with pytest.raises(BackendUnavailableError, match="takes no 'sinks', which sinks needs"):
        adapters.load(NEED, "torch:ops.acme.op", {"sinks": "sinks"})


def test_operators_make_room_for_those_of_the_real_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device both are met in one process, in any order."""
    schema = "fwd(Tensor q, float scale=1.) -> Tensor"
    entries = {"torch.ops.acme_kernels.fwd": {"schema": f"acme_kernels::{schema}"}}
    (tmp_path / "signatures.json").write_text(json.dumps(entries))
    library = Library("acme-attn", "1.2.3", "acme.attn", signatures=Signatures(tmp_path / "signatures.json"))

    @library.operator("torch.ops.acme_kernels.fwd")
    def fwd(q: torch.Tensor, scale: float) -> torch.Tensor:
        return q * scale

    suite = device_suites([get_manager().backends["torch_sdpa", "musa"]], __name__)["TestTorchSdpa"]
    real = torch.library.Library("acme_kernels", "DEF")
    try:
        for _ in range(2):
            library.install(monkeypatch)
            assert torch.equal(torch.ops.acme_kernels.fwd(T, scale=2.0), 2 * T)
            suite.setup_class()
            if not hasattr(torch.ops.acme_kernels, "fwd"):  # the first time
                real.define(schema)
                real.impl("fwd", lambda q, scale: q, "CUDA")
            with pytest.raises(NotImplementedError, match="CPU"):
                torch.ops.acme_kernels.fwd(T)
    finally:
        real._destroy()


def test_signatures_that_are_not_there(acme: Library) -> None:
    with pytest.raises(KeyError, match=r"signatures\.json has no entry 'acme\.gone'"):
        acme.function("acme.attn", "acme.gone")(lambda: None)
    with pytest.raises(TypeError, match="was made without signatures="):
        Library("acme-attn", "1", "acme").function("acme", "acme.attend")(lambda: None)


def test_a_missing_keyword_names_the_version_and_the_need(acme: Library) -> None:
    with pytest.raises(BackendUnavailableError) as lacking:
        adapters.load(NEED, "acme.attn:attend", {"causal": "causal calls", "return_attn_probs": "the LSE"})
    assert str(lacking.value) == (
        "acme.attn:attend of acme-attn 1.2.3 takes no 'return_attn_probs', which the LSE needs. Install one that "
        "does: pip install acme-attn, or go on without it: POLYATTN_WITHOUT=acme-attn"
    )


def test_what_cannot_be_imported(acme: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailableError, match=r"acme-attn 1\.2\.3 has no usable acme\.attn:gone: Attr"):
        adapters.load(NEED, "acme.attn:gone")
    monkeypatch.setitem(sys.modules, "acme.attn", None)
    with pytest.raises(BackendUnavailableError, match=r"has no usable acme\.attn:attend: Modu") as broken:
        adapters.load(NEED, "acme.attn:attend")
    assert isinstance(broken.value.__cause__, ImportError)


def test_what_another_package_has_replaced_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two distributions with one folder: the one that was installed first has the files of the other."""
    lines = []
    for name in ("__init__", "attn", "kept", "gone"):
        file = tmp_path / "polyattn_shared" / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
        digest = base64.urlsafe_b64encode(hashlib.sha256(b"").digest()).decode().rstrip("=")
        lines.append(f"polyattn_shared/{name}.py,sha256={digest},0")
    info = tmp_path / "polyattn_shared-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: polyattn-shared\nVersion: 1.2.3\n")
    (info / "RECORD").write_text("\n".join([*lines, "polyattn_shared-1.2.3.dist-info/RECORD,,"]) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    need = Requirement("polyattn-shared", module="polyattn_shared.attn", hint="pip install polyattn-shared")

    for hint in ("pip install polyattn-shared", ""):  # without a hint: the same, from its name
        said = "AttributeError: .* Install one that does: pip install polyattn-shared, or go on without it: POLY"
        with pytest.raises(BackendUnavailableError, match=said):
            adapters.load(dataclasses.replace(need, hint=hint), "polyattn_shared.attn:attend")

    (tmp_path / "polyattn_shared" / "attn.py").write_text("raise RuntimeError('of another')")
    (tmp_path / "polyattn_shared" / "gone.py").unlink()
    distributions.changed_files.cache_clear()
    monkeypatch.delitem(sys.modules, "polyattn_shared.attn")
    with pytest.raises(BackendUnavailableError) as broken:
        adapters.load(need, "polyattn_shared.attn:attend")
    assert str(broken.value) == (
        "polyattn-shared 1.2.3 has no usable polyattn_shared.attn:attend: RuntimeError: of another. It is not as it "
        "was installed: another package has replaced or removed polyattn_shared/attn.py and 1 more. Install it again, "
        "last: pip install --force-reinstall --no-deps polyattn-shared==1.2.3, or go on without it: "
        "POLYATTN_WITHOUT=polyattn-shared"
    )
    distributions.changed_files.cache_clear()
    distributions.distribution_version.cache_clear()
    assert distributions.changed_files("polyattn-not-there") == ()


def test_real_operators_show_their_keywords_in_their_schemas(acme: Library) -> None:
    @torch.library.custom_op("polyattn_harness::scaled", mutates_args=())
    def scaled(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        return x * by

    acme.add("acme.attn", scaled=scaled)
    packet = torch.ops.polyattn_harness.scaled
    found = [adapters.load(NEED, "acme.attn:scaled", {"by": "scaling"})]
    found += [adapters.load(NEED, f"torch:ops.polyattn_harness.scaled{x}", {"by": "scaling"}) for x in ("", ".default")]
    assert found == [scaled, packet, packet.default]
    for target in (
        "acme.attn:scaled",
        "torch:ops.polyattn_harness.scaled",
        "torch:ops.polyattn_harness.scaled.default",
    ):
        with pytest.raises(BackendUnavailableError, match="takes no 'window'"):
            adapters.load(NEED, target, {"window": "windows"})


def test_a_library_that_is_not_here_is_not_run_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> Place:
        raise BackendUnavailableError("fa2@cuda is unavailable: flash-attn is not installed")

    class Suite(OnDevice):
        backend = "torch_sdpa@cuda"

    monkeypatch.setattr(AttentionConformance, "_place", absent)
    assert Suite._place(None, None).missing == "fa2@cuda is unavailable: flash-attn is not installed"


@pytest.mark.parametrize(
    ("archs", "missing", "other"),
    [
        (("sm90",), "trtllm_mla@cuda is for other architectures than sm90", True),
        (("sm90", "sm100"), "it is not installed", False),
        ((), "it is not installed", False),
    ],
)
def test_no_device_of_this_machine_is_asked_for_what_is_for_others(
    monkeypatch: pytest.MonkeyPatch, archs: tuple[str, ...], missing: str, other: bool
) -> None:
    """A strict run on one chip wants the libraries of that chip, not those of its successors."""

    def absent(*_: object) -> Place:
        raise BackendUnavailableError("it is not installed")

    class Suite(OnDevice):
        backend = "trtllm_mla@cuda"

    monkeypatch.setattr(AttentionConformance, "_place", absent)
    monkeypatch.setattr(emulated, "detect", lambda platform: DeviceReport(bool(archs), "", archs))
    found = Suite._place(None, None)
    assert (found.missing, found.other) == (missing, other)


def test_a_suite_for_each_backend_with_an_adapter() -> None:
    mine = [info for info in get_manager().backends.values() if info.platform == "musa"]
    suites = device_suites(mine, "somewhere")
    assert suites["TestTorchSdpa"].backend == "torch_sdpa@musa"
    assert suites["TestTorchSdpa"].__module__ == "somewhere"
    assert [mark.name for mark in suites["TestTorchSdpa"].pytestmark] == ["filterwarnings"]


def test_the_chip_says_the_platform() -> None:
    target = Emulated("torch_sdpa", "torch", "musa:mp31")
    assert (target.platform, target.facts["arch"]) == ("musa", "mp31")
    cases = target.cases(per_row=1, families=("dense",), dtypes=("bfloat16",))[:2]
    assert cases
    assert not target.caught(cases)


def test_an_operator_is_called_in_the_order_of_its_schema(acme: Library) -> None:
    with torch.library._scoped_library("acme_operators", "FRAGMENT") as fragment:
        fragment.define("fwd(Tensor q, Tensor k, Tensor? sinks, bool causal, int? ring, Tensor? v) -> Tensor[]")

        def body(q: Any, k: Any, sinks: Any, causal: bool, ring: int | None, v: Any) -> list[Any]:
            return [q + k * causal + (ring or 0), k if v is None else v]

        fragment.impl("fwd", body, "CPU")
        target = "acme.attn:acme_operators.fwd"
        operator = adapters.Operator(NEED, target, {"causal": True}, {"sinks": "the sinks"})
        one, two = torch.ones(2), torch.full((2,), 2.0)
        assert operator.taking()(one, two)[0].tolist() == [3, 3]
        found = operator.taking("v", "ring")(one, two, one, 4)
        assert found[0].tolist() == [7, 7]
        assert found[1] is one
        assert operator.taking("v")(one, two, one, ring=5)[0].tolist() == [8, 8]
        assert operator.rest(ring=3) == (None, True, 3, None)
        assert operator.function(one, two, *operator.rest(ring=3))[0].tolist() == [6, 6]
        assert operator.taking()(one, two)[0].tolist() == [3, 3]
        for fixed, needs, message in (
            ({"causal": True}, {"alibi": "ALiBi"}, "acme-attn 1.2.3 takes no 'alibi', which ALiBi needs. Install one"),
            ({"scale": 1.0}, {}, "acme-attn 1.2.3 takes no 'scale', which every call needs"),
            ({}, {}, f"{target} of acme-attn 1.2.3 needs 'causal', which polyattn does not know. Install one"),
        ):
            with pytest.raises(BackendUnavailableError, match=re.escape(message)):
                adapters.Operator(NEED, target, fixed, needs)
    with pytest.raises(BackendUnavailableError, match=r"no usable acme.attn:acme_operators.bwd: AttributeError"):
        adapters.Operator(NEED, "acme.attn:acme_operators.bwd", {}, {})


def test_a_run_of_vendor_code_becomes_evidence_of_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Evidence] = []

    def write(origin: str, evidence: Evidence) -> Path:
        written.append(evidence)
        return tmp_path / "evidence.json"

    monkeypatch.setattr(recording, "write_evidence", write)
    told: dict[str, Any] = {"versions": {"amd-aiter": "0.1.20"}, "command": "python run.py", "note": "interpreted"}
    recording.record_vendor_code("aiter@rocm", ("amd-aiter/triton",), passed=56, **told)
    (found,) = written
    assert (found.level, found.passed, found.absent) == ("vendor code", 56, ("amd-aiter", "amd-aiter-0.1.7"))
    assert "aiter/unified.py" in found.sources
    assert str(dataclasses.replace(found, date="2026-11-22")) == "vendor code (2026-11-22, in part)"
    for providers, passed in ((("amd-aiter/triton",), 0), (("gone",), 3)):
        with pytest.raises(ConfigError, match=f"evidence of aiter@rocm is not written: {passed} cases of "):
            recording.record_vendor_code("aiter@rocm", providers, passed=passed, **told)
    with pytest.raises(ConfigError, match="there is some of the device itself, which shows more"):
        recording.record_vendor_code("fa@cuda", ("fa2/flash-attn",), passed=3, **told)


def test_kernels_that_were_compiled_become_evidence_of_each_chip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "evidence" / "aiter@rocm.json"
    monkeypatch.setattr(evidence, "evidence_file", lambda origin, backend, platform: kept)
    origin = recording._origin_of("aiter@rocm")
    told: dict[str, Any] = {"versions": {"triton": "3.7.1"}, "command": "python run.py", "note": "compiled"}
    path = recording.record_compiled(
        "aiter@rocm", ("amd-aiter/triton",), ("paged",), kernels={"gfx942": 3, "gfx950": 4}, **told
    )
    assert path == kept
    found = evidence.read_evidence(origin, "aiter", "rocm")
    evidence.read_evidence.cache_clear()
    (other,) = found.others
    assert [(one.level, one.arch, one.passed, one.families, one.stale) for one in (found, other)] == [
        ("compiled", "gfx942", 3, ("paged",), False),
        ("compiled", "gfx950", 4, ("paged",), False),
    ]
    assert found.unseen == ("amd-aiter", "amd-aiter-0.1.7")
    for kernels, words in (({}, "compiled for no architecture"), ({"gfx942": 0}, "0 cases of amd-aiter/triton passed")):
        with pytest.raises(ConfigError, match=words):
            recording.record_compiled("aiter@rocm", ("amd-aiter/triton",), ("paged",), kernels=kernels, **told)
