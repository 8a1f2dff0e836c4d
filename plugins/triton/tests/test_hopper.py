"""The Hopper kernels: they compile for sm_90 on any machine, and on a Hopper they are core's definition."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from polyattn.block_maps import visible_keys
from polyattn.reference import attention
from polyattn.testing.tolerances import RELATIVE_L2
from polyattn_triton.hopper import block_sparse
from polyattn_triton.hopper.forward import Config, config_for, forward, supports
from polyattn_triton.kernels.block_sparse import Lists
from polyattn_triton.kernels.tiles import Spec, parts

SHARED_MEMORY = 227 * 1024
DIMS = [(64, 64), (128, 128), (256, 256), (192, 128), (72, 72), (96, 96)]
TOGETHER = Config(warpgroups=1, block_n=128, stages=2, turns=False)
PLAIN = Config(warpgroups=2, block_n=128, stages=2, overlap=False, turns=False)
VARIANTS = [
    *(pytest.param(d, config_for(*d), True, False, id=f"{d[0]}-{d[1]}") for d in DIMS),
    pytest.param((128, 128), config_for(128, 128), False, True, id="window and sinks"),
    pytest.param((128, 128), TOGETHER, True, False, id="no producer"),
    pytest.param((128, 128), PLAIN, False, False, id="no overlap"),
    pytest.param((128, 128), Config(3, 64, 2, registers=160), True, False, id="three warpgroups"),
    pytest.param((128, 128), Config(2, 128, 2, apart=False), True, False, id="output through the query's buffers"),
]
LISTED = [
    # D, block_q, block_k, valid sizes
    (64, 64, 64, True),
    (64, 128, 64, False),
    (128, 64, 64, False),
    (128, 64, 128, True),
    (128, 128, 128, False),
    (128, 128, 64, True),
    (256, 128, 128, False),
]
SHORT = {"96-96", "window and sinks", "no producer", "128-64-64-False"}
"""Compiling takes seconds each: the others under --polyattn-full."""


def descriptor(rows: int, columns: int) -> str:
    from triton.experimental.gluon.language import NVMMASharedLayout

    layout = NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=4)
    return f"tensordesc<bf16[1, 1, {rows}, {columns}],{layout!r}>"


def compiled(kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int = 4) -> dict[str, object]:
    """Compiles a kernel for sm_90, in a process that does not interpret. Arguments that are not named are integers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    source = GluonASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else signature.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={},
    )
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return {"shared": done.metadata.shared, "warps": done.metadata.num_warps, "ptx": done.asm["ptx"]}


def dense(dims: tuple[int, int], config: Config, causal: bool, windowed: bool) -> dict[str, object]:
    from polyattn_triton.hopper.kernel import attend

    rows = {"q": config.rows, "k": config.block_n, "v": config.block_n, "o": config.rows}
    widths = {"q": parts(dims[0]), "k": parts(dims[0]), "v": parts(dims[1]), "o": parts(dims[1])}
    signature = {f"{x}_{i}": descriptor(rows[x], widths[x][i]) for x in "qkvo" for i in (0, 1) if widths[x][i]}
    signature |= {"lse": "*fp32", "scale": "fp32", "lse_b": "i64"} | ({"sinks": "*fp32"} if windowed else {})
    constants = {
        "CAUSAL": causal,
        "LEFT": windowed,
        "WARPGROUPS": config.warpgroups,
        "STAGES": config.stages,
        "OVERLAP": config.overlap,
        "TURNS": config.turns,
        "REGISTERS": config.registers,
        "APART": config.apart,
    }
    constants |= {name: None for name in attend.arg_names if re.fullmatch(r"[qkvo]_1|sinks", name)}
    constants = {name: value for name, value in constants.items() if name not in signature}
    return compiled(attend, signature, constants, 8 if config.warpgroups == 1 else 4)


def listed(width: int, block_q: int, block_k: int, sizes: bool) -> dict[str, object]:
    from polyattn_triton.hopper.listed import attend_listed

    config = block_sparse.config_for(width, block_q)
    unit = min(config.keys, block_k)
    boxes = {"q": (64, width), "k": (unit, 64), "v": (unit, 64), "o": (64, width)}
    signature = {name: descriptor(*box) for name, box in boxes.items()}
    signature |= {"lse": "*fp32", "counts": "*i32", "indices": "*i32", "valid": "*i32", "scale": "fp32"}
    constants = {
        "BLOCK_Q": block_q,
        "BLOCK_K": block_k,
        "COUNT": config.keys // unit,
        "SLOTS": config.slots,
        "PARTLY": sizes,
        "APART": config.apart,
    }
    return compiled(attend_listed, signature, constants | ({} if sizes else {"valid": None}))


def elsewhere(*task: Any) -> dict[str, Any]:
    """Compiled by a process of its own: this one interprets its kernels, and Triton decides once."""
    for lacking in ("triton.backends.nvidia", "triton.experimental.gluon.language.nvidia.hopper"):
        if importlib.util.find_spec(lacking) is None:
            pytest.skip(f"not run: the Hopper kernels (this Triton has no {lacking})")
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(task)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["shared"] <= SHARED_MEMORY
    assert "wgmma.mma_async" in found["ptx"]
    assert "cp.async.bulk.tensor.4d" in found["ptx"]
    return found


def overlaps(ptx: str) -> bool:
    """Whether some wait leaves products in flight."""
    return any(int(n) > 0 for n in re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", ptx))


@pytest.mark.parametrize(("dims", "config", "causal", "windowed"), VARIANTS)
def test_compiles_for_hopper(
    dims: tuple[int, int], config: Config, causal: bool, windowed: bool, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.id not in SHORT and not request.config.getoption("--polyattn-full"):
        pytest.skip("not run: all variants of the Hopper kernel (give --polyattn-full)")
    found = elsewhere("dense", dims, dataclasses.asdict(config), causal, windowed)
    if config.warpgroups > 1:
        # A producer beside the consumers takes a warpgroup's place, and gives them its registers.
        assert found["warps"] == 4 * (config.warpgroups + 1)
        assert f"setmaxnreg.inc.sync.aligned.u32 \t{config.registers}" in found["ptx"]
    assert overlaps(found["ptx"]) or not config.overlap


@pytest.mark.parametrize("task", LISTED, ids=lambda task: "-".join(map(str, task)))
def test_lists_compile_for_hopper(task: tuple[int, int, int, bool], request: pytest.FixtureRequest) -> None:
    if request.node.callspec.id not in SHORT and not request.config.getoption("--polyattn-full"):
        pytest.skip("not run: all variants of the Hopper kernels (give --polyattn-full)")
    found = elsewhere("listed", *task)
    # With query blocks of 64 there are two producers; both are in the place of one warpgroup.
    assert found["warps"] == 12
    assert overlaps(found["ptx"])


def test_supports_only_hopper() -> None:
    x = torch.zeros(1, 128, 2, 64, dtype=torch.bfloat16)
    assert not supports(x, x, x, x, spec=Spec(1.0), layout="BSHD")


CASES = [
    # B, S_q, S_k, H_q, H_kv, D, D_v, causal, window, sinks, layout, dtype
    (2, 333, 451, 6, 2, 128, 128, "none", (-1, -1), False, "BSHD", torch.bfloat16),
    (2, 333, 451, 6, 2, 128, 128, "bottom_right", (-1, -1), True, "BHSD", torch.bfloat16),
    (1, 451, 333, 4, 4, 64, 64, "bottom_right", (-1, -1), False, "BSHD", torch.float16),
    (1, 333, 451, 4, 1, 256, 256, "top_left", (-1, -1), False, "BSHD", torch.bfloat16),
    (2, 700, 700, 6, 3, 96, 96, "bottom_right", (100, 0), True, "BHSD", torch.float16),
    (1, 700, 900, 2, 1, 80, 80, "none", (257, -1), False, "BSHD", torch.bfloat16),
    (1, 300, 300, 2, 1, 72, 72, "none", (50, 70), False, "BSHD", torch.bfloat16),
    (1, 500, 500, 4, 4, 192, 128, "bottom_right", (-1, -1), False, "BSHD", torch.bfloat16),
    (2, 2048, 2048, 16, 4, 128, 128, "bottom_right", (-1, -1), False, "BSHD", torch.bfloat16),
]


@pytest.mark.parametrize("config", [None, TOGETHER, PLAIN], ids=["table", "no producer", "no overlap"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_hopper(case, config, device) -> None:
    device("cuda", what="the Hopper prefill kernel")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not run: the Hopper prefill kernel (this GPU is no Hopper)")
    batch, s_q, s_k, heads, heads_k, width, v_width, causal, window, with_sinks, layout, dtype = case
    if config is not None and width + v_width > 256:
        pytest.skip("not a configuration for this head dim: it needs more shared memory than there is")

    def made(*sizes: int) -> torch.Tensor:
        b, s, h, d = sizes
        shape = (b, s, h, d) if layout == "BSHD" else (b, h, s, d)
        return torch.randn(shape, device="cuda").to(dtype)

    torch.manual_seed(3)
    query, key = made(batch, s_q, heads, width), made(batch, s_k, heads_k, width)
    value, out = made(batch, s_k, heads_k, v_width), made(batch, s_q, heads, v_width).fill_(float("nan"))
    lse = torch.full(out.shape[:-1], float("nan"), device="cuda")
    sinks = torch.randn(heads, device="cuda") if with_sinks else None
    right = 0 if causal != "none" else window[1]
    spec = Spec(width**-0.5, left=window[0], right=right, top_left=causal == "top_left")
    assert supports(query, key, value, out, spec=spec, layout=layout)
    forward(query, key, value, out, lse, spec=spec, layout=layout, sinks=sinks, config=config)
    wanted, wanted_lse = attention(
        *(x.double() for x in (query, key, value)),
        causal=causal,
        window=window,
        sinks=sinks,
        layout=layout,
        return_lse=True,
    )
    assert float((out - wanted).norm() / wanted.norm()) < RELATIVE_L2[dtype]
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=1e-3)
    again = torch.full_like(out, float("nan"))
    forward(query, key, value, again, lse, spec=spec, layout=layout, sinks=sinks, config=config)
    assert torch.equal(out, again)


SPARSE = [
    # B, H_q, H_kv, S_q, S_k, D, block_q, block_k, valid sizes, one map for all, dtype
    (2, 4, 2, 700, 1100, 128, 64, 64, False, False, torch.bfloat16),
    (2, 4, 2, 700, 1100, 128, 64, 64, True, False, torch.float16),
    (1, 2, 1, 1, 130, 64, 64, 64, True, True, torch.bfloat16),
    (1, 4, 4, 1100, 700, 64, 128, 64, False, True, torch.bfloat16),
    (1, 4, 1, 1100, 700, 128, 64, 128, True, False, torch.bfloat16),
    (1, 16, 8, 2048, 2048, 128, 128, 128, False, False, torch.bfloat16),
    (1, 4, 4, 1100, 700, 128, 128, 64, True, False, torch.bfloat16),
    (1, 4, 4, 1100, 700, 256, 128, 128, True, False, torch.bfloat16),
]


@pytest.mark.parametrize("case", SPARSE, ids=str)
def test_lists_on_hopper(case: tuple[Any, ...], device: Any) -> None:
    device("cuda", what="the Hopper block-sparse kernel")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not run: the Hopper block-sparse kernel (this GPU is no Hopper)")
    batch, heads, heads_k, s_q, s_k, width, block_q, block_k, sizes, one_map, dtype = case
    torch.manual_seed(5)
    shapes = ((heads, s_q), (heads_k, s_k), (heads_k, s_k))
    query, key, value = (torch.randn(batch, h, s, width, device="cuda").to(dtype) for h, s in shapes)
    rows, columns = -(-s_q // block_q), -(-s_k // block_k)
    shape = (1, 1, rows) if one_map else (batch, heads, rows)
    counts = (torch.rand(shape, device="cuda") * (columns + 1)).int()
    counts.view(-1)[-1], counts.view(-1)[0] = 0, columns
    indices = torch.rand(*shape, columns, device="cuda").argsort(-1).int()
    indices[torch.arange(columns, device="cuda") >= counts[..., None]] = 2**31 - 1
    valid = (torch.rand(columns, device="cuda") * (block_k + 1)).int() if sizes else None
    lists, scale = Lists(counts, indices, valid, block_q, block_k), width**-0.5
    out, lse = torch.full_like(query, float("nan")), torch.full(query.shape[:3], float("nan"), device="cuda")
    assert block_sparse.takes(dtype, width, (block_q, block_k), scale)
    assert block_sparse.fits(query, key, value, out)
    block_sparse.forward(query, key, value, lists, scale=scale, out=out, lse=lse)
    mask = visible_keys((block_q, block_k), s_q, s_k, counts, indices, valid).expand(batch, heads, s_q, s_k)
    tensors = (x.double() for x in (query, key, value))
    wanted, wanted_lse = attention(*tensors, attn_mask=mask, layout="BHSD", return_lse=True)
    assert float((out - wanted).norm() / wanted.norm().clamp(min=1e-9)) < RELATIVE_L2[dtype]
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=1e-3)
    again = torch.full_like(out, float("nan"))
    block_sparse.forward(query, key, value, lists, scale=scale, out=again, lse=lse)
    assert torch.equal(out, again)


if __name__ == "__main__":
    kind, *task = json.loads(sys.argv[1])
    if kind == "dense":
        dims, config, *rest = task
        print(json.dumps(dense(tuple(dims), Config(**config), *rest)))
    else:
        print(json.dumps(listed(*task)))
