"""AMD's own Triton kernel under Triton's interpreter on the CPU, run through polyattn's adapter and conformance kit.

    python plugins/rocm/tests/vendor_code.py
    python plugins/rocm/tests/vendor_code.py --source CHECKOUT --chip gfx950

Without `--source` it gets amd-aiter from the registry (about 40 MB; pip, no installation) and takes its files out of
the wheel. A checkout of https://github.com/ROCm/aiter has the newer kernel. The package itself is never imported, as
that compiles HIP code: its packages are empty here, and their paths the real ones.

The interpreter multiplies matrices of float16, not of bfloat16.

What is run: `unified_attention`, decode and extend, with everything that its rows declare, and two planted errors: a
window, and a promise about free slots that the kit does not keep. One JSON line per part.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

PACKAGE = "amd-aiter"
PACKAGES = (
    "aiter",
    "aiter.ops",
    "aiter.ops.triton",
    "aiter.ops.triton.attention",
    "aiter.ops.triton._triton_kernels",
    "aiter.ops.triton._triton_kernels.attention",
    "aiter.ops.triton._triton_kernels.flash_attn_triton_amd",
    "aiter.ops.triton.utils",
    "aiter.ops.triton.utils._triton",
)
FLASH_ATTN_KERNELS = PACKAGES[6]
PROVIDER = "amd-aiter/triton"


def downloaded(folder: Path) -> tuple[Path, str]:
    """(the root of the package, what it is), from the registry."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--pre", "--quiet", "-d", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("amd_aiter-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith("aiter/ops/triton/")])
    return folder, wheel.name


def prepare(root: Path, chip: str) -> Any:
    """The kernel's module, imported for a chip."""
    for dotted in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[dotted]
    for dotted in PACKAGES:
        package = sys.modules[dotted] = ModuleType(dotted)
        package.__path__ = [str(root.joinpath(*dotted.split(".")))]
        parent, _, name = dotted.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, package)
    arch: Any = ModuleType(f"{PACKAGES[-1]}.arch_info")
    arch.get_arch = lambda: chip
    sys.modules[arch.__name__] = sys.modules[PACKAGES[-1]].arch_info = arch  # type: ignore[attr-defined]
    new = (root / "aiter/ops/triton/attention/unified_attention.py").exists()
    module: Any = importlib.import_module(f"aiter.ops.triton.{'attention.' if new else ''}unified_attention")
    module.get_arch = lambda: SimpleNamespace(name=chip, is_rdna=chip.startswith("gfx1"))
    return module


# Compute units, what is planted among the arguments, what is promised of free slots, how many cases at most. Few units:
# one program for all keys of a query. Many: keys are split, and another kernel adds up.
PARTS: tuple[tuple[int, dict[str, Any], str, int | None], ...] = (
    (1, {}, "any", None),
    (304, {}, "any", None),
    (304, {"window_size": (7, 0)}, "any", 4),
    (304, {}, "finite", 4),
)


class Counted:
    """The kernel's calls, counted, and what is planted in their arguments."""

    def __init__(self, kernel: Any, planted: dict[str, Any]) -> None:
        self.kernel, self.planted, self.calls = kernel, planted, 0
        self.__signature__ = inspect.signature(kernel)

    def __call__(self, **given: Any) -> Any:
        self.calls += 1
        return self.kernel(**{**given, **self.planted})


def run(
    module: Any, chip: str, per_row: int, planted: dict[str, Any], promise: str, limit: int | None, **told: Any
) -> int:
    """The kit over one chip's rows; prints what came of it: how many cases passed, or -1 where that is not what
    should."""
    from polyattn.testing import run_case
    from polyattn.testing.emulators import Emulated
    from polyattn_rocm.aiter import serving, unified

    began = time.perf_counter()
    kernel = counted = Counted(module.unified_attention, planted)
    serving.Aiter.unified = unified.NEW if ".attention." in module.__name__ else unified.OLD
    module.unified_attention = counted
    try:
        target = Emulated("aiter", PROVIDER, f"rocm:{chip}", (("free_slots", promise),))
        cases = target.cases(per_row, families=("paged",), dtypes=("float16",))
        # The interpreter's e4m3 has no NaN, so that FP8 caches do not show what free slots do.
        cases = [case for case in cases if promise == "any" or case.request.kv_dtype == "auto"][:limit]
        outcomes = [run_case(target, case) for case in cases]
    finally:
        module.unified_attention = kernel.kernel
    failed = [str(outcome) for outcome in outcomes if outcome.verdict != "passed"]
    seconds = round(time.perf_counter() - began, 1)
    report = {
        **told, "chip": chip, "kernel": module.__name__, "planted": ", ".join(planted), "free_slots": promise,
        "cases": len(cases), "calls": counted.calls, "failed": len(failed), "seconds": seconds,
    }  # fmt: skip
    print(json.dumps({**report, "first": failed[:1]}), flush=True)
    wrong = bool(planted) or promise == "finite"
    return len(cases) - len(failed) if counted.calls and bool(failed) == wrong else -1


def keep(backend: str, provider: str, passed: int, vendor: dict[str, str], note: str) -> None:
    """Write the result as evidence of the backend."""
    from polyattn.testing.machine import versions
    from polyattn.testing.recording import record_vendor_code

    used = {**vendor, **versions(torch.device("cpu")), "triton": version("triton")}
    words = " ".join("CHECKOUT" if "/" in word else word for word in sys.argv[1:])
    command = f"python plugins/rocm/tests/{Path(sys.argv[0]).name} {words}"
    path = record_vendor_code(backend, (provider,), passed=passed, versions=used, command=command, note=note)
    print(json.dumps({"evidence": path.name}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a checkout of ROCm/aiter, in place of the registry's package")
    parser.add_argument("--chip", nargs="+", default=["gfx1201", "gfx950"], help="the chips that the kernel is told")
    parser.add_argument("--per-row", type=int, default=1, help="cases of combined fields for each row")
    parser.add_argument("--write-evidence", action="store_true", help="keep the result as evidence of the backend")
    words = parser.parse_args()
    torch.set_num_threads(1)
    good, passed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        root, what = (words.source, str(words.source)) if words.source else downloaded(Path(folder))
        for chip in words.chip:
            module = prepare(root, chip)
            for units, planted, promise, limit in PARTS:
                if promise == "finite" and not chip.startswith("gfx1"):
                    continue
                module.get_num_sms = lambda units=units: units
                found = run(module, chip, words.per_row, planted, promise, limit, package=what, units=units)
                good.append(found >= 0)
                passed += found if promise == "any" and not planted else 0
    if all(good) and words.write_evidence:
        new = "attention." in module.__name__
        note = f"its unified_attention, interpreted as {' and '.join(words.chip)}; float16"
        keep("aiter@rocm", PROVIDER, passed, {"amd-aiter": "0.1.20" if new else "0.1.7"}, note)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
