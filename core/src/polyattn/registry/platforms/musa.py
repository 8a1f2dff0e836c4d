"""Moore Threads GPUs, from their device nodes."""

from __future__ import annotations

from ...contract import DeviceReport
from .machine import Machine, count_of, matching, visible

__all__ = ["detect_musa"]


def detect_musa(machine: Machine | None = None) -> DeviceReport:
    """Moore Threads GPUs from /dev/mtgpu*. Their architecture is not readable without initialising them."""
    here = machine or Machine()
    nodes = matching(here.root / "dev", "mtgpu*")
    if not nodes:
        return here.report(False, "no Moore Threads GPU: there is no /dev/mtgpu*")
    # One node per GPU carries its number (mtgpu.0); others, without, belong to the driver as a whole.
    numbered = [path for path in nodes if path.name[-1].isdigit()]
    every = [""] * len(numbered or nodes[:1])
    kept, problem = visible(every, "MUSA_VISIBLE_DEVICES", here.environ)
    gpus = count_of(len(kept or every), "Moore Threads GPU")
    if problem:
        return here.report(False, f"{gpus}, but {problem}")
    adapter = here.installed("torch-musa")
    if not adapter:
        detail = f"{gpus}, but torch-musa is not installed; install it from Moore Threads (it is not on PyPI)"
        return here.report(False, detail)
    if not here.torch.version:
        return here.report(False, here.without_build(gpus, "MUSA", "install the torch that torch-musa names"))
    return here.report(True, f"{gpus}, torch-musa {adapter}")
