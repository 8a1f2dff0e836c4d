"""Compiles the `triton` backend's softmax kernels for AMD chips that are not here, and records that as evidence.

python -m plugins.triton.tests.compiled_evidence     # minutes; writes evidence/triton@rocm.json
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from .launched_offline import Problem, elsewhere

CHIPS = ("gfx942", "gfx950")
PROVIDERS = ("dense", "paged", "block_sparse", "latent")
FAMILIES = ("dense", "varlen", "paged", "block_sparse", "mla")
_WIDTH = (128, 128)
_STORED = (("fp8_e4m3", "token"), ("fp8_e5m2", "tensor"), ("int8", "head"), ("fp4_e2m1", "block16"))


def problems() -> Iterator[Problem]:
    """Every kernel of `PROVIDERS`: in bfloat16 and float32, of each kind of stored numbers, with each kind of mask."""
    for dtype in ("bfloat16", "float32"):
        yield Problem("forward", _WIDTH, queries=256, dtype=dtype)
        yield Problem("decode", _WIDTH, dtype=dtype)
        yield Problem("extend", _WIDTH, queries=64, dtype=dtype)
    yield Problem("forward", (64, 64), queries=256, dtype="float16")
    yield Problem("forward", (192, 128), queries=256, mask="bool", packed=True)
    yield Problem("backward", _WIDTH, queries=256)
    yield Problem("backward", (64, 64), queries=256, mask="additive", packed=True)
    yield Problem("sparse", (64, 64), queries=256)
    for kind, scales in _STORED:
        yield Problem("decode", _WIDTH, kv_dtype=kind, kv_scales=scales)
        yield Problem("extend", _WIDTH, queries=64, kv_dtype=kind, kv_scales=scales)
    yield Problem("decode", (64, 64), queries=8, mask="bool", fresh=True)
    yield Problem("decode", _WIDTH, batch_invariant=True)
    yield Problem("extend", (64, 64), queries=64, mask="tree", softcap=30.0)
    yield Problem("extend", (64, 64), queries=64, mask="additive", fresh=True)
    yield from (Problem("write", _WIDTH, queries=8, kv_dtype=kind) for kind in ("auto", "fp8_e4m3"))
    yield Problem("write", _WIDTH, queries=8, kv_dtype="int8", kv_scales="tensor")
    yield Problem("latent", (512, 64), heads=(16, 1))
    yield Problem("latent", (512, 64), heads=(16, 1), batch_invariant=True)
    yield Problem("latent", (512, 64), heads=(128, 1), queries=4, mask="additive")
    yield Problem(
        "latent", (512, 64), heads=(128, 1), queries=4, page_size=64, kv_dtype="fp8_e4m3", kv_scales="block128"
    )
    yield from (Problem("latent", (512, 64), heads=(16, 1), kv_dtype=kind) for kind in ("fp8_e4m3", "fp8_e5m2"))


def main() -> None:
    from polyattn.testing.recording import record_compiled

    asked = tuple(problems())
    kernels: dict[str, int] = {}
    with ThreadPoolExecutor() as pool:
        every = list(pool.map(lambda chip: elsewhere(f"hip:{chip}", *asked), CHIPS))
    for chip, found in zip(CHIPS, every, strict=True):
        wrong = [
            f"{problem} on {chip}: {kernel.name}: {what}"
            for problem, launched in zip(asked, found, strict=True)
            for kernel in launched
            for what in kernel.wrong
        ]
        if wrong:
            raise SystemExit("\n".join(wrong))
        kernels[chip] = sum(map(len, found))
        print(f"{chip}: {kernels[chip]} kernels of {len(asked)} calls")
    note = f"families: {', '.join(FAMILIES)}; {len(asked)} calls compiled to code objects, none of them run"
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    command = "python -m plugins.triton.tests.compiled_evidence"
    print(
        record_compiled(
            "triton@rocm", PROVIDERS, FAMILIES, kernels=kernels, versions=versions, command=command, note=note
        )
    )


if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")
    main()
