"""Compiles the `triton` backend's softmax kernels for AMD chips that are not here, and records that as evidence.

python -m plugins.triton.tests.compiled_evidence     # minutes; writes evidence/triton@rocm.json
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator

from .launched_offline import Problem, elsewhere

CHIPS = ("gfx942", "gfx950")
PROVIDERS = ("dense", "paged", "block_sparse", "latent")
FAMILIES = ("dense", "varlen", "paged", "block_sparse", "mla")
_STORED = (("auto", ""), ("fp8_e4m3", "token"), ("fp8_e5m2", "tensor"), ("int8", "head"), ("fp4_e2m1", "block16"))


def problems() -> Iterator[Problem]:
    """Every kernel of `PROVIDERS`, in the dtypes, widths, masks and stored numbers by which a kernel is another one."""
    for dtype in ("bfloat16", "float16", "float32"):
        for dims in ((64, 64), (128, 128), (192, 128), (256, 256), (72, 72)):
            yield Problem("forward", dims, queries=256, dtype=dtype)
        yield Problem("backward", (128, 128), queries=256, dtype=dtype)
        yield Problem("sparse", (128, 128), queries=256, dtype=dtype)
        for call, queries in (("decode", 1), ("extend", 64)):
            yield from (Problem(call, (d, d), queries=queries, dtype=dtype) for d in (64, 128, 256))
        yield Problem("latent", (512, 64), heads=(16, 1), dtype=dtype)
    for mask in ("bool", "additive"):
        for call in ("forward", "backward"):
            yield Problem(call, (128, 128), queries=256, mask=mask, packed=True)
        for call, queries in (("decode", 8), ("extend", 64), ("latent", 4)):
            one = {"dims": (512, 64), "heads": (128, 1)} if call == "latent" else {"dims": (128, 128)}
            yield Problem(call, queries=queries, mask=mask, **one)  # type: ignore[arg-type]
    yield Problem("extend", (128, 128), queries=64, mask="tree", softcap=30.0)
    for kind, scales in _STORED:
        for call, queries in (("decode", 1), ("extend", 64)):
            yield Problem(call, (128, 128), queries=queries, kv_dtype=kind, kv_scales=scales)
        yield Problem(call, (128, 128), queries=64, kv_dtype=kind, kv_scales=scales, fresh=True)
    yield from (Problem("write", (128, 128), queries=8, kv_dtype=kind) for kind in ("auto", "fp8_e4m3"))
    yield Problem("write", (128, 128), queries=8, kv_dtype="int8", kv_scales="tensor")
    yield Problem("latent", (512, 64), heads=(128, 1), queries=4, kv_dtype="fp8_e4m3", page_size=64)
    yield Problem("latent", (512, 64), heads=(16, 1), batch_invariant=True)
    yield Problem("decode", (128, 128), batch_invariant=True)


def main() -> None:
    from polyattn.testing.recording import record_compiled

    asked = tuple(problems())
    kernels: dict[str, int] = {}
    for chip in CHIPS:
        found = elsewhere(f"hip:{chip}", *asked)
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
