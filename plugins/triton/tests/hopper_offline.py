"""Compiles the Hopper kernels for sm_90 on any machine, and says what they cost.

Run as a script with the name of one of its functions and their arguments, as JSON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import pytest
import torch

SHARED_MEMORY = 227 * 1024
"""Bytes that a block may have."""


def compiled(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int = 4, aligned: Sequence[str] = ()
) -> dict[str, Any]:
    """Compiles a kernel, in a process that does not interpret. Arguments that are not named are integers; those named
    `aligned` are multiples of 16.

    Returns: `shared` bytes, `warps`, `registers` of a thread, `stack` bytes (spills) or None where Triton brings no
    cuobjdump, and `ptx`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    source = GluonASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else signature.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    registers, stack = _usage(done.asm["cubin"])
    return {
        "shared": done.metadata.shared, "warps": done.metadata.num_warps, "registers": registers, "stack": stack,
        "ptx": done.asm["ptx"],
    }  # fmt: skip


def _usage(cubin: bytes) -> tuple[int | None, int | None]:
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    if not os.path.exists(tool):
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def described(*box: int) -> str:
    """A tensor descriptor of such boxes."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    layout = NVMMASharedLayout(swizzle_byte_width=min(128, 2 * box[-1]), element_bitwidth=16, rank=len(box))
    return f"tensordesc<bf16{list(box)},{layout!r}>"


def extend(
    width: int, page_size: int, group: int, causal: bool, left: bool, tree: bool, sinks: bool, uniform: bool,
    parts: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """As `hopper.extend` launches it, for bfloat16 with an LSE. `page_size`: 0 of packed keys."""
    from polyattn_triton.hopper import extend as hopper
    from polyattn_triton.hopper.extend_kernel import attend

    config = hopper.config_for(torch.device("cpu"), torch.bfloat16, width, page_size, group)
    pages = described(hopper.piece_of(page_size, config.keys) if page_size else config.keys, 64)
    query = "*bf16" if 64 % group else described(64 // group, group, width)
    signature = {"q": query, "k": pages, "v": pages, "lse": "*fp32"}
    signature |= {
        "out": "*fp32" if parts else "*bf16",
        **({"table": "*i32"} if page_size else {}),
        "lens": "*i32",
        "starts": "*i32",
        "scale": "fp32",
    }
    optional = {
        "sinks": "*fp32" if sinks else None,
        "mask": "*i1" if tree else None,
        "queue": None if uniform else "*i32",
    }
    signature |= {name: kind for name, kind in optional.items() if kind}
    optional |= {} if page_size else {"table": None}
    constants = {name: None for name, kind in optional.items() if not kind} | {
        "CAUSAL": causal, "LEFT": left, "TREE": tree, "GROUP": group, "PAGE": page_size, "UNIFORM": uniform, "D": width,
        "BLOCK_N": config.keys, "WARPGROUPS": config.warpgroups, "STAGES": config.stages, "OVERLAP": config.overlap,
        "TURNS": config.turns, "REGISTERS": config.registers, "PARTS": parts,
    }  # fmt: skip
    # As of contiguous outputs.
    aligned = ("out", "out_part", "out_token", "out_head", *(("q",) if 64 % group else ()))
    return compiled(attend, signature, constants, aligned=aligned)


def dense(width: int, v_width: int, config: dict[str, Any], causal: bool, windowed: bool) -> dict[str, Any]:
    """As `hopper.forward.forward` launches it, for bfloat16 with an LSE; sinks where it is windowed."""
    from polyattn_triton.hopper.forward import Config
    from polyattn_triton.hopper.kernel import attend
    from polyattn_triton.kernels.tiles import parts

    made = Config(**config)
    rows = {"q": made.rows, "k": made.block_n, "v": made.block_n, "o": made.rows}
    widths = {"q": parts(width), "k": parts(width), "v": parts(v_width), "o": parts(v_width)}
    signature = {f"{x}_{i}": described(1, 1, rows[x], widths[x][i]) for x in "qkvo" for i in (0, 1) if widths[x][i]}
    signature |= {"lse": "*fp32", "scale": "fp32", "lse_b": "i64"} | ({"sinks": "*fp32"} if windowed else {})
    constants = {
        "CAUSAL": causal, "LEFT": windowed, "WARPGROUPS": made.warpgroups, "STAGES": made.stages,
        "OVERLAP": made.overlap, "TURNS": made.turns, "REGISTERS": made.registers, "APART": made.apart,
    }  # fmt: skip
    absent = {name: None for name in attend.arg_names if re.fullmatch(r"[qkvo]_1|sinks", name)}
    absent = {name: value for name, value in absent.items() if name not in signature}
    return compiled(attend, signature, constants | absent, 8 if made.warpgroups == 1 else 4)


def gradients(width: int, v_width: int, causal: bool, windowed: bool) -> dict[str, Any]:
    """As `hopper.backward.backward` launches it, for bfloat16."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    from polyattn_triton.hopper import backward as hopper
    from polyattn_triton.hopper.backward_kernel import differentiate

    columns = hopper.columns_of(width)
    plain = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    signature = {name: described(1, 1, hopper.ROWS, columns) for name in ("q", "dout")}
    signature |= {name: described(1, 1, hopper.KEYS, columns) for name in ("k", "v")}
    signature |= {"numbers": f"tensordesc<fp32[1, {2 * hopper.ROWS}],{plain!r}>", "scale": "fp32", "factor": "fp32"}
    signature |= {"dquery": f"tensordesc<fp32[{hopper.ROWS * columns // hopper.LINE}, {hopper.LINE}],{plain!r}>"}
    signature |= {"dkey": "*bf16", "dvalue": "*bf16"}
    constants = {
        "CAUSAL": causal, "LEFT": windowed, "ROTATE": not causal and not windowed, "STAGES": hopper.STAGES,
    }  # fmt: skip
    strides = tuple(f"{name}_{axis}" for name in ("dk", "dv") for axis in ("batch", "row", "head"))
    return compiled(differentiate, signature, constants, 8, ("dkey", "dvalue", *strides))


def listed(width: int, block_q: int, block_k: int, sizes: bool, packed: bool = False) -> dict[str, Any]:
    """As `hopper.block_sparse.forward` launches it, for bfloat16 with an LSE."""
    from polyattn_triton.hopper import block_sparse
    from polyattn_triton.hopper.listed import attend_listed

    config = block_sparse.config_for(width, block_q)
    unit = 16 if packed else min(config.keys, block_k)
    wide = (4 * unit if packed else unit, 64)
    boxes = {"q": (64, width), "k": (unit, 64), "v": (unit, 64), "k_four": wide, "v_four": wide, "o": (64, width)}
    signature = {name: described(1, 1, *box) for name, box in boxes.items()}
    signature |= {"lse": "*fp32", "counts": "*i32", "indices": "*i32", "valid": "*i32", "scale": "fp32"}
    constants = {
        "BLOCK_Q": block_q, "BLOCK_K": unit if packed else block_k, "COUNT": config.keys // unit,
        "SLOTS": config.slots, "PARTLY": sizes, "APART": config.apart, "GROUPS": packed,
    }  # fmt: skip
    return compiled(attend_listed, signature, constants | ({} if sizes else {"valid": None}))


def latent(page_size: int, causal: bool, fp8: str = "") -> dict[str, Any]:
    """As `hopper.latent.attend` launches it, for bfloat16 and 128 heads; fp8: of FP8 rows, for a query of this
    dtype."""
    from polyattn_triton.hopper import latent as hopper
    from polyattn_triton.hopper.latent_kernel import attend

    numbers = ("page_table", "seq_lens", "cu_seqlens_q", "shares")
    signature = {"query": "*bf16", "cache": "*bf16", "out": "*bf16", "scale": "fp32"} | dict.fromkeys(numbers, "*i32")
    signature |= dict.fromkeys(("lse", "piece_out", "piece_lse"), "*fp32")
    constants = {"HEADS": 128, "ROW": 576, "PAGE": page_size, "CAUSAL": causal, "REGISTERS": hopper.REGISTERS}
    constants |= dict.fromkeys(("listed", "sequence_of", "scales", "rope"))
    if fp8:
        signature |= {"query": f"*{fp8}", "cache": "*i32", "out": f"*{fp8}"}
        constants |= {"ROW": 144, "REGISTERS": hopper.FP8_REGISTERS}
    return compiled(attend, signature, constants, aligned=("query", "cache", "query_token", "query_head", "cache_page"))


def listed_latent(page_size: int, wide: bool, fp8: str = "") -> dict[str, Any]:
    """As `hopper.latent.attend_listed` launches it, for bfloat16 and 128 heads; wide: pieces, in float32, of a decode
    step, whose tokens have a row of the page table each. fp8: of FP8 rows, for a query of this dtype."""
    from polyattn_triton.hopper import latent as hopper
    from polyattn_triton.hopper.latent_kernel import attend

    numbers = ("page_table", "listed", *(() if wide else ("sequence_of",)))
    signature = {"query": "*bf16", "cache": "*bf16", "scale": "fp32", "lse": "*fp32"} | dict.fromkeys(numbers, "*i32")
    signature["out"] = "*fp32" if wide else "*bf16"
    constants = {"HEADS": 128, "ROW": 576, "PAGE": page_size, "CAUSAL": False, "REGISTERS": hopper.LISTED_REGISTERS}
    constants |= dict.fromkeys(
        ("seq_lens", "cu_seqlens_q", "shares", "piece_out", "piece_lse", *(("sequence_of",) if wide else ()))
    )
    aligned = ["query", "cache", "query_token", "query_head", "cache_page"]
    if fp8:
        signature |= {"query": f"*{fp8}", "cache": "*i32", "scales": "*fp32", "rope": "*bf16"}
        signature["out"] = "*fp32" if wide else f"*{fp8}"
        constants |= {"ROW": 164, "REGISTERS": hopper.FP8_REGISTERS}
        aligned += ["scales", "rope"]
    else:
        constants |= dict.fromkeys(("scales", "rope"))
    return compiled(attend, signature, constants, aligned=aligned)


def elsewhere(kernel: str, *arguments: Any) -> dict[str, Any]:
    """A kernel by the name of its function here, compiled by a process of its own: Triton decides once whether it
    interprets."""
    for needed in ("triton.backends.nvidia", "triton.experimental.gluon.language.nvidia.hopper"):
        # Tritons that vendors build for their own chips leave these out; the one in constraints.txt has both.
        pytest.importorskip(needed, reason=f"not run: the Hopper kernels (this Triton has no {needed})")
    done = subprocess.run(
        [sys.executable, __file__, json.dumps([kernel, *arguments])],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["shared"] <= SHARED_MEMORY
    assert "wgmma.mma_async" in found["ptx"]
    return found


def overlaps(ptx: str) -> bool:
    """Whether some wait leaves products in flight."""
    return any(int(n) > 0 for n in re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", ptx))


if __name__ == "__main__":
    name, *given = json.loads(sys.argv[1])
    kernels = (dense, extend, gradients, latent, listed, listed_latent)
    print(json.dumps({kernel.__name__: kernel for kernel in kernels}[name](*given)))
