"""Step 1 shows six workloads, who serves them here and why, and what other machines would choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.progress import Progress
from rich.text import Text
from torch import Tensor

from ... import attention, explain, varlen_attention, what_if
from ...errors import PolyattnError
from ...registry.distributions import normalise_distribution
from ...registry.manager import get_manager
from ...selection.inspection import list_backends
from ...selection.select import Selection
from ..rendering import grid, standing
from .step import Step

__all__ = ["MACHINES", "run", "workloads"]

TITLE = "What is chosen, and why"
MACHINES: dict[str, tuple[str, ...]] = {
    "cuda:sm90": ("flash-attn-3", "flashinfer-python"),
    "cuda:sm100": ("flash-attn-4", "flashinfer-python"),
    "rocm:gfx942": ("amd-aiter",),
    "npu": ("torch-npu",),
}
"""Other machines -> the vendor libraries taken as installed there."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A workload is a call with its tensors. `asks`: its options in words."""

    name: str
    asks: str
    call: Callable[..., Any]
    tensors: tuple[Tensor, Tensor, Tensor]
    options: Mapping[str, Any]


def workloads() -> list[Workload]:
    """Make the attention of six kinds of model, with their heads and widths, on short sequences."""

    def dense(s_q: int, s_k: int, heads: int, kv_heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        q = torch.randn(1, s_q, heads, width, dtype=torch.bfloat16)
        k, v = (torch.randn(1, s_k, kv_heads, width, dtype=torch.bfloat16) for _ in "kv")
        return q, k, v

    lengths = torch.tensor([0, 17, 64, 96], dtype=torch.int32)
    packed = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "max_seqlen_q": 47, "max_seqlen_k": 47}
    flat = [t[0] for t in dense(96, 96, 32, 8, 128)]
    return [
        Workload("LLM prefill", "causal, 32 heads on 8", attention, dense(64, 64, 32, 8, 128), {"causal": True}),
        Workload("LLM decode", "one query, 4096 keys", attention, dense(1, 4096, 32, 8, 128), {"causal": True}),
        Workload(
            "Gemma-2 layer",
            "softcap 50, window 4096",
            attention,
            dense(64, 64, 8, 4, 256),
            {"causal": True, "softcap": 50.0, "window": (4095, 0)},
        ),
        Workload(
            "gpt-oss layer",
            "sinks, window 128",
            attention,
            dense(64, 64, 64, 8, 64),
            {"causal": True, "window": (127, 0), "sinks": torch.randn(64)},
        ),
        Workload("DiT block", "full, 24 heads of 128", attention, dense(256, 256, 24, 24, 128), {}),
        Workload(
            "Packed batch",
            "3 sequences, causal",
            varlen_attention,
            (flat[0], flat[1], flat[2]),
            {"causal": True, **packed},
        ),
    ]


def run(bar: Progress) -> Step:
    items = workloads()
    task = bar.add_task("six workloads", total=len(items))
    usable = _kernels() & {b.name for b in list_backends("cpu") if b.status == "available"}
    here = grid("workload", "asks for", "served by", "because")
    elsewhere = grid("workload", *MACHINES)
    found = []
    with torch.no_grad():
        for item in items:
            selection = explain(item.call, *item.tensors, **item.options)
            served = bool(torch.isfinite(item.call(*item.tensors, **item.options)).all())
            other = {machine: _what_if(selection, machine) for machine in MACHINES}
            here.add_row(item.name, item.asks, Text(selection.backend, style="name"), _because(selection, usable))
            elsewhere.add_row(item.name, *(standing(mark) for mark in other.values()))
            found.append(
                {
                    "name": item.name,
                    "asks": item.asks,
                    "served": served,
                    "selection": selection.to_dict(),
                    "elsewhere": {machine: mark[2:] for machine, mark in other.items()},
                }
            )
            bar.advance(task)
    good = sum(1 for entry in found if entry["served"])
    installed = "; ".join(f"{machine} with {' and '.join(names)}" for machine, names in MACHINES.items())
    legend = Text(f"The same six elsewhere: {installed}.\n● its adapter is in this version, ○ planned", style="quiet")
    return Step(
        title=TITLE,
        note="automatic, on this CPU, in bfloat16",
        verdict="pass" if good == len(items) else "fail",
        figure=f"{good} of {len(items)} workloads served",
        parts=(here, legend, elsewhere),
        data={"workloads": found},
    )


def _kernels() -> set[str]:
    """Name the backends that are more than methods: no call here has a place, so one that wants it is no reason."""
    known = get_manager().backends.values()
    return {info.name for info in known if not all(provider.is_method for provider in info.providers)}


def _because(selection: Selection, usable: set[str]) -> str:
    """Name the rule that decided; for the reference, why the faster backends that are here could not serve."""
    if selection.backend != "reference":
        return selection.why
    refused = [
        f"{name}: {'; '.join(reasons)}"
        for name, reasons in selection.rejected.items()
        if name in usable and not any("family=" in reason for reason in reasons)
    ]
    by_name = f"; by name: {', '.join(selection.others)}" if selection.others else ""
    return f"{', '.join(refused) or selection.why}{by_name}"


def _what_if(selection: Selection, machine: str) -> str:
    """Mark the adapter's state and name the backend that another machine would choose."""
    known = {
        normalise_distribution(name)
        for info in get_manager().backends.values()
        for provider in info.providers
        for need in provider.requires
        for name in (need.distribution, *need.also)
    }
    installed = [name for name in MACHINES[machine] if name in known]
    try:
        there = what_if(selection.request, platform=machine, installed=installed)
    except PolyattnError:
        return "- none"
    return f"{'○' if there.planned else '●'} {there.backend}"
