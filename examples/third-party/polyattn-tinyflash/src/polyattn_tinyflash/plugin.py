"""What polyattn reads to know the kernel: records only, no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from polyattn.contract import BackendInfo, ConfigField, Provider, Range, Requirement, Window, row
from polyattn.contract.hookspecs import hookimpl

from .tools import missing

POLYATTN_API_VERSION = 2

# What the kernel honours. Whatever a call asks for beyond this (a mask, sinks, dropout, another dtype) is refused, or
# rewritten exactly by polyattn, before the kernel sees it.
HONOURED: dict[str, Any] = {
    "dtype": ("float32", "bfloat16"),
    "head_dim": Range(1, 256),
    "v_head_dim": Range(1, 256),
    "group": True,
    "causal": ("none", "bottom_right"),
    "window": Window(),
    "softcap": Range(0.0),
    "scale": True,
    "lse": True,
    "grad": ("query", "key", "value", "lse"),
    # Each sum has one order, whatever the threads do and whoever else is in the batch.
    "deterministic": True,
    "batch_invariant": True,
    "s_relation": ("equal", "one", "fewer", "more"),
    "cross": True,
    "zero_size": True,
    "misaligned": True,
}


@hookimpl
def polyattn_register_backends() -> Iterable[BackendInfo]:
    """One backend for the CPU, dense and packed."""
    provider = Provider(
        "tinyflash",
        (row(family="dense", **HONOURED), row(family="varlen", **HONOURED)),
        target="polyattn_tinyflash.adapter:TinyFlash",
        requires=(Requirement("torch", ">=2.11"), *missing()),
    )
    yield BackendInfo(
        "tinyflash",
        "cpu",
        (provider,),
        summary="a small FlashAttention-2 in C++ and OpenMP, built at first use",
        # Below torch's own, which are as fast or faster on most calls (README.md has the figures): it is for those who
        # ask for it by name, and automatically where those refuse, once conformance has left evidence here.
        priority=20,
        config=(ConfigField("threads", "int", 0, "threads of one call; 0 = as many as torch uses", low=0, high=1024),),
        upstream="FlashAttention-2, Dao 2023",
    )
