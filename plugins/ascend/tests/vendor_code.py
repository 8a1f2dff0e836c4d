"""torch_npu's own operators on a machine without an NPU: schemas, argument checks and shape functions.

    python plugins/ascend/tests/vendor_code.py WHEEL [--write-evidence]

WHEEL is torch_npu for this Python and this torch (`pip download --no-deps torch-npu==2.13.0`, for torch 2.13). It is
unpacked, not installed; what its libraries want of CANN is made by a C compiler as functions that return 0. Then the
conformance cases of tests/test_fusion.py and tests/test_inference.py run over the emulators, and each call that an
adapter makes is made once more to the vendor's operator, on tensors without data: it must take the arguments, and give
the shapes and dtypes that the emulator gave. `--write-evidence` keeps the result beside the package.

Linux, with cc, nm and readelf.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def stubs(site: Path, folder: Path) -> None:
    """Libraries that define what those of an unpacked wheel want and nobody here has."""
    import torch

    folder.mkdir()
    libraries = [*site.glob("torch_npu/*.so"), *site.glob("torch_npu/lib/*.so"), *site.glob("torch_npu.libs/*")]
    wanted, needed = _symbols(libraries, undefined=True), _needed(libraries)
    known = Path(torch.__file__).parent / "lib"
    system = [Path(line.split(" => ")[1]) for line in _lines("ldconfig", "-p") if " => " in line]
    here = {path.name: path for path in [*system, *known.glob("*.so*"), *libraries]}
    have = _symbols([here[name] for name in needed if name in here], undefined=False)
    missing = sorted(name for name in wanted - have if not name.startswith(("_ZTH", "__", "_ITM", "Py", "_Py")))
    code = folder / "stub.c"
    code.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in missing))
    for number, name in enumerate(sorted(needed - here.keys())):
        source = [str(code)] if number == 0 else ["-xc", os.devnull]
        subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", str(folder / name), *source], check=True)


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def _symbols(libraries: list[Path], *, undefined: bool) -> set[str]:
    which = "--undefined-only" if undefined else "--defined-only"
    lines = [line for path in libraries for line in _lines("nm", "-D", which, str(path)) if line]
    return {line.split()[-1].split("@")[0] for line in lines}


def _needed(libraries: list[Path]) -> set[str]:
    lines = [line for path in libraries for line in _lines("readelf", "-d", str(path)) if "(NEEDED)" in line]
    return {line.split("[")[1].rstrip("]") for line in lines}


def check(*, keep: bool) -> int:
    """Every call of the cases, made once more to the vendor's operators. To be run where torch_npu can be imported."""
    import pytest
    import torch
    import torch_npu as vendor  # type: ignore[import-not-found]

    from polyattn.testing import run_case
    from polyattn.testing.machine import versions
    from polyattn.testing.recording import record_vendor_code

    # It warns of something once, from a function that is traced here.
    vendor.op_plugin.meta._meta_registrations._npu_fusion_attention_warning_printed = True
    operators = torch.ops.npu
    sys.path.insert(0, str(HERE.parent))
    from tests.emulators import torch_npu

    from tests import test_fusion, test_inference

    seen: set[str] = set()
    passed: dict[str, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        library = torch_npu.library(vendor.__version__.partition("+")[0])
        for name in [n for n in vars(library.modules["torch_npu"]) if n.startswith("npu_")]:
            follow(library, name, getattr(operators, name), seen)
        library.install(patch)
        for module in (test_fusion, test_inference):
            for case in module.TARGET.cases(per_row=2):
                outcome = run_case(module.TARGET, case)
                assert outcome.verdict == "passed", str(outcome)
                passed[module.TARGET.info.id] = passed.get(module.TARGET.info.id, 0) + 1
        calls = len(library.calls)
    print(f"torch-npu {vendor.__version__}: {calls} calls of {len(seen)} operators agree: {', '.join(sorted(seen))}")
    for backend in passed if keep else ():
        note = "its operators take every call and give these shapes and dtypes, on meta tensors; numbers: an emulator"
        used = {"torch-npu": vendor.__version__.partition("+")[0], **versions(torch.device("cpu"))}
        command = "python plugins/ascend/tests/vendor_code.py WHEEL --write-evidence"
        given = {"passed": passed[backend], "versions": used, "command": command, "note": note}
        print(record_vendor_code(backend, ("torch-npu",), **given).name)  # type: ignore[arg-type]
    return 0


def follow(library: Any, name: str, operator: Any, seen: set[str]) -> None:
    """Make each call of an emulated operator to the vendor's as well, and compare what comes back."""
    import torch

    emulated = getattr(library.modules["torch_npu"], name)

    def both(*args: Any, **kwargs: Any) -> Any:
        result = emulated(*args, **kwargs)
        with torch.no_grad():
            real = operator(*map(_without_data, args), **{n: _without_data(value) for n, value in kwargs.items()})
        for number, (mine, theirs) in enumerate(zip(result, real, strict=True)):
            if isinstance(mine, torch.Tensor) and mine.numel() > 1:
                facts = [(tuple(t.shape), t.dtype) for t in (mine, theirs)]
                assert facts[0] == facts[1], f"{name}, result {number}: {facts[0]} emulated, {facts[1]} the vendor's"
        seen.add(name)
        return result

    both.__signature__ = emulated.__signature__  # type: ignore[attr-defined]
    library.add("torch_npu", **{name: both})


def _without_data(value: Any) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def run(wheel: Path, environ: Mapping[str, str], *words: str) -> int:
    """`check` in a process that finds an unpacked wheel and the libraries it wants."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "site")
        stubs(folder / "site", folder / "stubs")
        paths = {
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(folder / "stubs"), environ.get("LD_LIBRARY_PATH")))),
            "PYTHONPATH": os.pathsep.join(filter(None, (environ.get("PYTHONPATH"), str(folder / "site")))),
        }
        # Without CANN it must not be imported together with torch.
        child = {**environ, **paths, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        return subprocess.run(
            [sys.executable, str(Path(__file__)), "--check", *words], env=child, check=False
        ).returncode


if __name__ == "__main__":
    given = sys.argv[1:]
    if given[:1] == ["--check"]:
        sys.exit(check(keep="--write-evidence" in given))
    if not given or given[1:] not in ([], ["--write-evidence"]):
        sys.exit(__doc__)
    sys.exit(run(Path(given[0]), os.environ, *given[1:]))
