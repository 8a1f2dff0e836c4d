"""flash-attn's Triton kernels for ROCm under Triton's interpreter on the CPU, run through polyattn's adapter and kit.

    python plugins/rocm/tests/vendor_flash_attn.py
    python -O plugins/rocm/tests/vendor_flash_attn.py --aiter CHECKOUT

It gets flash-attn's source from the registry (pip; nothing is built or installed) and imports its interface as
FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE does. With `--aiter`, a checkout of https://github.com/ROCm/aiter, the kernels
are AITER's, which newer source of flash-attn calls in place of its own; -O is for its assertion that tensors are on a
GPU. The interpreter multiplies matrices of float16, not of bfloat16.

Everything that the rows of the provider declare is run, and with the kernels of the release what one of their limits
is there for: a window, which it drops. One JSON line per part.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

os.environ |= {"TRITON_INTERPRET": "1", "FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE"}

import torch
import triton
import vendor_code

PACKAGE = "flash-attn==2.8.3.post2"
PACKAGES = ("flash_attn", "flash_attn.flash_attn_triton_amd")
KERNELS = "flash_attn.flash_attn_triton_amd.interface_fa"
UNUSED = ("einops", "flash_attn.layers", "flash_attn.layers.rotary")
"""Of the interface's imports: rotary embeddings of its own caches."""
PROVIDER = "fa2/flash-attn-triton"
CHIP = "gfx942"


class Driver:
    """What AITER asks Triton's driver for."""

    def get_current_target(self) -> Any:
        return SimpleNamespace(backend="hip", arch=CHIP)


def downloaded(folder: Path) -> Path:
    """The root of the package's source, from the registry."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    environ = {**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    subprocess.run([*pip, "--no-build-isolation", "-d", str(folder), PACKAGE], check=True, env=environ)
    (sdist,) = folder.glob("flash_attn-*.tar.gz")
    with tarfile.open(sdist) as archive:
        wanted = [m for m in archive.getmembers() if "/flash_attn/" in m.name and m.name.endswith(".py")]
        archive.extractall(folder, wanted, filter="data")
    return folder / sdist.name.removesuffix(".tar.gz")


def prepare(root: Path, newer: Path | None) -> str:
    """Import the interface over its kernels, or over AITER's: the name of their module."""
    for dotted in PACKAGES:
        package = sys.modules[dotted] = ModuleType(dotted)
        package.__path__ = [str(root.joinpath(*dotted.split(".")))]
    sys.modules.update({name: MagicMock(__spec__=None, __path__=[]) for name in UNUSED})
    custom_op, autotune = torch.library.custom_op, triton.autotune

    def everywhere(name: str, *args: Any, **options: Any) -> Any:
        """Its operators are registered for GPUs."""
        return custom_op(name, *args, **{k: v for k, v in options.items() if k != "device_types"})

    def first(configs: list[Any], key: list[str], **_: Any) -> Any:
        """Nothing is measured here, and newer versions of Triton do not take keys that are no arguments."""
        return autotune(configs[:1], [])

    torch.library.custom_op, triton.autotune = everywhere, first  # type: ignore[assignment]
    try:
        if newer is not None:
            vendor_code.prepare(newer, CHIP)
            triton.runtime.driver.set_active(Driver())
            chip: Any = importlib.import_module(f"{vendor_code.FLASH_ATTN_KERNELS}.utils")
            chip.GpuArch.cu_count = 304
            torch.cuda.current_device = lambda: 0
            kernels = importlib.import_module(f"{vendor_code.FLASH_ATTN_KERNELS}.interface_v2")
            sys.modules[KERNELS] = sys.modules[PACKAGES[1]].interface_fa = kernels  # type: ignore[attr-defined]
        interface: Any = importlib.import_module("flash_attn.flash_attn_interface")
    finally:
        torch.library.custom_op, triton.autotune = custom_op, autotune
    sys.modules["flash_attn"].flash_attn_interface = interface  # type: ignore[attr-defined]
    return str(interface.flash_attn_gpu.__name__)


def ran(kernels: str, part: str, cases: list[Any], target: Any, *, wrong: bool) -> int:
    """Run cases and print what came of them: how many passed, or -1 where that is not what should."""
    from polyattn.testing import run_case

    began = time.perf_counter()
    failed = [str(o) for o in (run_case(target, case) for case in cases) if o.verdict != "passed"]
    seconds = round(time.perf_counter() - began, 1)
    report = {"kernels": kernels, "part": part, "cases": len(cases), "failed": len(failed), "seconds": seconds}
    print(json.dumps({**report, "first": failed[:1]}), flush=True)
    return len(cases) - len(failed) if cases and bool(failed) == wrong else -1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiter", type=Path, help="a checkout of ROCm/aiter, whose kernels are run instead")
    parser.add_argument("--source", type=Path, help="an unpacked source of flash-attn, in place of the registry's")
    parser.add_argument("--per-row", type=int, default=2, help="cases of combined fields for each row")
    parser.add_argument("--write-evidence", action="store_true", help="keep the result as evidence of the backend")
    words = parser.parse_args()
    if words.aiter and not sys.flags.optimize:
        parser.error("--aiter goes with python -O")
    torch.set_num_threads(1)
    # The interpreter reads the sources again when a kernel is first run.
    with tempfile.TemporaryDirectory() as folder:
        kernels = prepare(words.source or downloaded(Path(folder)), words.aiter)
        return 0 if checked(kernels, words.per_row, keep=words.write_evidence) else 1


def checked(kernels: str, per_row: int, *, keep: bool) -> bool:
    """Run all parts: whether each came out as it should."""
    from polyattn.testing.emulators import Emulated
    from polyattn_rocm import flash_attention

    ours, ck = (Emulated("fa", name, f"rocm:{CHIP}") for name in (PROVIDER, "fa2/flash-attn"))
    passed = ran(kernels, "all that the rows declare", ours.cases(per_row, dtypes=("float16",)), ours, wrong=False)
    if passed > 0 and keep:
        vendor = {"flash-attn": PACKAGE.partition("==")[2]}
        vendor_code.keep("fa@rocm", PROVIDER, passed, vendor, f"{kernels}, interpreted; float16")
    if kernels != KERNELS:
        return passed > 0
    flash_attention._CK = kernels
    windows = [case for case in ck.cases(per_row, families=("dense",), dtypes=("float16",)) if "window=" in case.id]
    windows = [case for case in windows if not case.request.grad]
    return ran(kernels, "windows, which have no row", windows[:3], ck, wrong=True) >= 0 and passed > 0


if __name__ == "__main__":
    sys.exit(main())
