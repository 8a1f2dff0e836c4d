"""The adapters over the vendors' own code on a CPU, where it is at hand: `python plugins/xpu/tests/vendor_code.py`.

vllm-xpu-kernels computes with a reference in PyTorch where a kernel is not compiled for a configuration: here none is.
Intel Extension for PyTorch imports beside torch 2.8, and is run there; beside another torch the one file that has its
packed attention is, which is plain PyTorch. SGLang's CPU kernels are run where `import sgl_kernel` registers them.
Nothing needs to be installed:

    pip download --no-deps -d wheels vllm-xpu-kernels==0.1.16.2 intel-extension-for-pytorch==2.8.0
    for wheel in wheels/*.whl; do unzip -q -d vendor "$wheel" '*.py' '*/METADATA'; done
    PYTHONPATH=vendor python plugins/xpu/tests/vendor_code.py
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from polyattn.registry.distributions import distribution_version
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated
from polyattn.testing.machine import versions
from polyattn.testing.recording import record_vendor_code

__all__ = ["RUNS", "Run"]

IPEX = "intel_extension_for_pytorch"
HALF = ("bfloat16", "float16")


@contextmanager
def vllm() -> Iterator[None]:
    """Its Python, with the kernels that it finds missing and warns of."""
    library = importlib.import_module("vllm_xpu_kernels.flash_attn_interface")

    def varlen_fwd(*_: Any) -> None:
        raise RuntimeError("varlen_fwd is not compiled for the CPU")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops, "_vllm_fa2_C", SimpleNamespace(varlen_fwd=varlen_fwd), raising=False)
        # Its short cut for verify has no reference.
        patch.setattr(library, "_SPEC_DECODE_MAX_QLEN", 0)
        patch.setattr(library, "_warned_missing_configs", {"varlen_fwd is not compiled for the CPU"})
        yield


def computed(case: Case) -> bool:
    """Whether its reference means what its kernels mean: it knows no window that ends at a row's own key. Sinks are in
    the queries' dtype."""
    return 0 not in case.request.window and (case.sink == "usual" or not case.request.sinks)


@contextmanager
def ipex() -> Iterator[None]:
    """The package, or the CPU's attention from its own file: the packages above it are not executed."""
    spec = importlib.util.find_spec(IPEX)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"no {IPEX} on the path")
    if torch.__version__.startswith("2.8."):
        importlib.import_module(IPEX)
        yield
        return
    root = Path(spec.submodule_search_locations[0])
    fusions = (".transformers", ".transformers.models", ".transformers.models.cpu", ".transformers.models.cpu.fusions")
    references = (".transformers.models.reference", ".transformers.models.reference.fusions")
    with pytest.MonkeyPatch.context() as patch:
        for part in ("", *fusions, *references):
            package = ModuleType(f"{IPEX}{part}")
            package.__path__ = [str(root.joinpath(*part.split(".")))]
            patch.setitem(sys.modules, package.__name__, package)
        found = importlib.import_module(f"{IPEX}.transformers.models.cpu.fusions.mha_fusion")
        patch.setattr("polyattn_xpu.ipex.load", lambda *_: found._IPEXVarlenScaledDotProductCPU.apply_function)
        yield


@contextmanager
def sgl_kernel() -> Iterator[None]:
    """A build of SGLang's CPU kernels, with AMX or without."""
    importlib.import_module("sgl_kernel")
    if not hasattr(torch.ops.sgl_kernel, "decode_attention_cpu"):
        raise ModuleNotFoundError("the sgl_kernel that is here is a build for another device")
    yield


class NotHereError(Exception):
    """The vendor's code is not installed, or is another build."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Conformance of a backend by a provider over what `library` puts in place.

    Attributes:
        distribution: of the vendor's code. note: what of it runs.
    """

    target: Emulated
    library: Callable[[], Any]
    distribution: str
    note: str
    dtypes: tuple[str, ...] = HALF
    takes: Callable[[Case], bool] = lambda case: True

    def cases(self) -> list[Case]:
        return [case for case in self.target.cases(per_row=8, dtypes=self.dtypes) if self.takes(case)]

    def failed(self) -> list[str]:
        """What is wrong, a sentence for each case.

        Raises:
            NotHereError: so the vendor's code is. An import that fails later is a failure.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(self.library())
            except ImportError as exc:
                raise NotHereError(str(exc)) from exc
            return self.target.caught(self.cases())


_REFERENCE = "the package's reference in PyTorch, which it falls back to where a kernel is not compiled"
RUNS: Mapping[str, Run] = {
    "fa": Run(Emulated("fa", "vllm-xpu-kernels", "xpu:bmg"), vllm, "vllm-xpu-kernels", _REFERENCE, takes=computed),
    "intel_xpu": Run(
        Emulated("intel_xpu", "vllm-xpu-kernels", "xpu:bmg"), vllm, "vllm-xpu-kernels", _REFERENCE, takes=computed
    ),
    "ipex": Run(
        Emulated("ipex", "intel-extension-for-pytorch", "cpu"),
        ipex,
        "intel-extension-for-pytorch",
        "the package itself beside torch 2.8, else its attention for the CPU from its own file",
        ("float32", "bfloat16"),
    ),
    "intel_amx": Run(
        Emulated("intel_amx", "sgl-kernel-cpu", "cpu:amx"),
        sgl_kernel,
        "sgl-kernel-cpu",
        "decode.cpp and extend.cpp as they were compiled, with AMX or without",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-evidence", action="store_true", help="keep what passed as evidence of its backend")
    keep: bool = parser.parse_args().write_evidence
    torch.set_num_threads(1)
    good = True
    for name, run in RUNS.items():
        began = time.perf_counter()
        try:
            failed = run.failed()
        except NotHereError as exc:
            print(json.dumps({"backend": name, "not run": str(exc)}))
            continue
        count, version = len(run.cases()), distribution_version(run.distribution) or ""
        told = {"backend": name, "code": f"{run.distribution} {version}", "torch": torch.__version__}
        seconds = round(time.perf_counter() - began, 1)
        print(json.dumps({**told, "cases": count, "failed": len(failed), "seconds": seconds, "first": failed[:1]}))
        good = good and not failed
        if keep and not failed:
            path = record_vendor_code(
                run.target.info.id,
                (run.target.provider.name,),
                passed=count,
                versions={run.distribution: version, **versions(torch.device("cpu"))},
                command="python plugins/xpu/tests/vendor_code.py --write-evidence",
                note=run.note,
            )
            print(json.dumps({"evidence": path.name}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
