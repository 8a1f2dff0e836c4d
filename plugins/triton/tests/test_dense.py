"""The dense and packed kernels: what the kit does not reach by a request, and that compilers of real devices take them.

What a request can ask for is the conformance kit's (`polyattn conform triton`)."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn import reference
from polyattn_triton.kernels.backward import Config as BackwardConfig
from polyattn_triton.kernels.backward import backward
from polyattn_triton.kernels.forward import Config, forward
from polyattn_triton.kernels.tiles import Spec, parts

B, H_Q, H_KV, D = 2, 4, 2, 24


def _tensors(S_q: int, S_k: int, D_v: int = D, heads: int = H_Q) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(S_q * 1000 + S_k)
    shapes = ((B, S_q, heads, D), (B, S_k, H_KV, D), (B, S_k, H_KV, D_v))
    return tuple(torch.randn(shape, generator=make) for shape in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("S_q", "S_k", "spec", "asked"),
    [
        (37, 70, {"right": 0}, {"causal": "bottom_right"}),
        (70, 37, {"right": 0, "top_left": True}, {"causal": "top_left"}),
        (50, 50, {"left": 9, "right": 3}, {"window": (9, 3)}),
        (40, 61, {"right": 0, "chunk": 16}, {"chunk": 16}),
        (3, 70, {"right": 0, "softcap": 2.0}, {"causal": "bottom_right", "softcap": 2.0}),
    ],
)
@pytest.mark.parametrize("persistent", [False, True])
def test_small_tiles_agree_with_the_reference(
    S_q: int, S_k: int, spec: dict[str, Any], asked: dict[str, Any], persistent: bool
) -> None:
    """Tiles much smaller than the sequences, so that every kind of block is met; one program for several tiles."""
    q, k, v = _tensors(S_q, S_k, 40)
    out, lse = torch.full((B, S_q, H_Q, 40), torch.nan), torch.full((B, S_q, H_Q), torch.nan)
    said = Spec(scale=D**-0.5, **spec)
    forward(q, k, v, out, lse, spec=said, layout="BSHD", config=Config(16, 16, 4, 1, persistent=persistent))
    expected, expected_lse = reference.attention(q, k, v, return_lse=True, **asked)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_backward_of_small_tiles_is_the_same_twice_and_agrees() -> None:
    q, k, v = _tensors(37, 45)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    expected, lse = reference.attention(q, k, v, causal="bottom_right", return_lse=True)
    dout = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    tensors = [t.detach() for t in (dout, q, k, v, expected, lse)]
    config = BackwardConfig(16, 16, 4, 1, 16, 16, 4, 1)
    spec = Spec(scale=D**-0.5, right=0)
    found = backward(*tensors, spec=spec, layout="BSHD", config=config)
    again = backward(*tensors, spec=spec, layout="BSHD", config=config)
    for gradient, repeated, right in zip(found, again, wanted, strict=True):
        assert torch.equal(gradient, repeated)
        torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-5)


def test_what_lies_between_and_beyond_sequences_is_not_read() -> None:
    """Keys and values of the next sequence are NaN: a product of 0 with one of them would show."""
    q, k, v = (t[0] for t in _tensors(20, 20))
    k[9:], v[9:] = torch.nan, torch.nan
    cu = torch.tensor([0, 9, 20], dtype=torch.int32)
    given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 11, "max_seqlen_k": 11}
    out, lse = polyattn.varlen_attention(q, k, v, causal=True, return_lse=True, backend="triton", **given)
    expected = reference.attention(q[None, :9], k[None, :9], v[None, :9], causal="bottom_right")
    torch.testing.assert_close(out[:9], expected[0])
    assert lse[:9].isfinite().all()
    assert out[9:].isnan().all()


def test_no_keys_give_zeros_and_an_lse_of_minus_infinity() -> None:
    q, k, v = _tensors(5, 0)
    out, lse = polyattn.attention(q, k, v, return_lse=True, backend="triton")
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("width", "cut"), [(64, (64, 0)), (72, (64, 16)), (96, (64, 32)), (112, (128, 0)), (24, (32, 0)), (192, (128, 64))]
)
def test_head_dims_are_cut_into_powers_of_two(width: int, cut: tuple[int, int]) -> None:
    assert parts(width) == cut


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from polyattn_triton.kernels import backward, forward
from polyattn_triton.kernels.tiles import parts

POINTERS = ("query", "key", "value", "k1", "k2", "v1", "v2", "dout", "out", "dquery", "dkey", "dvalue")


def compiled(kernel, target, D, E, M, N, tma, **more):
    (D1, D2), (E1, E2) = parts(D), parts(E)
    constants = dict(
        D=D, D1=D1, D2=D2, E=E, E1=E1, E2=E2, GROUP=4, PACK=1, TOP_LEFT=False, LEFT=True, RIGHT=True, CHUNK=False,
        SOFTCAP=False, MASK=0, FOLD=True, M=M, N=N, TMA=tma, STAGES=2, PERSISTENT=False, attn_mask=None, sinks=None,
        cu_q=None, cu_k=None, **more,
    )
    boxes = {}
    if tma:
        boxes = {"k1": (N, D1), "k2": (N, D2 or D1), "v1": (N, E1), "v2": (N, E2 or E1)}
        if kernel is backward._queries:
            boxes = {"key": (N, D1), "value": (N, E1)}
        elif kernel is backward._keys:
            boxes = {"query": (M, D1), "dout": (M, E1)}
    signature, divisible = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in boxes:
            signature[name] = "tensordesc<bf16[1,{},1,{}]>".format(*boxes[name])
            continue
        kind = "*bf16" if name in POINTERS else "*fp32" if name in ("lse", "statistics") else "i32"
        signature[name] = "fp32" if name in ("scale", "softcap", "factor") else kind
        if kind != "i32" or name[0] == "s" and len(name) == 3 and name not in ("s_q", "s_k"):
            divisible[(place,)] = [["tt.divisibility", 16]]
    fixed = {(kernel.arg_names.index(n),): c for n, c in constants.items() if n in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=divisible)
    return triton.compile(source, target=target, options={"num_warps": 4 if D < 128 else 8, "num_stages": 2})


kind, arch = sys.argv[1].split(":")
hopper = arch == "90"
target = GPUTarget("cuda", int(arch), 32) if kind == "cuda" else GPUTarget("hip", arch, 64)
found = [
    compiled(forward._forward, target, 128, 128, 128, 64, hopper),
    compiled(forward._forward, target, 72, 72, 64, 64, False),
    compiled(backward._queries, target, 64, 64, 64, 64, hopper),
    compiled(backward._keys, target, 64, 64, 64, 64, hopper),
]
if hopper:
    for kernel in found:
        assert "wgmma" in kernel.asm["ptx"], kernel.metadata.name
    assert "cp.async.bulk.tensor" in found[0].asm["ptx"]
    assert "cp.async.cg" in found[1].asm["ptx"]
print(" ".join(str(kernel.metadata.shared) for kernel in found))
"""


@pytest.mark.parametrize(("target", "shared"), [("cuda:90", 227), ("cuda:80", 163), ("hip:gfx942", 64)])
def test_compilers_of_devices_take_the_kernels(target: str, shared: int) -> None:
    """Offline, by Triton's own compiler: no device is needed, only a process that does not interpret.

    `shared`: KiB of shared memory that a program may have there.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run([sys.executable, "-c", COMPILE, target], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert max(map(int, done.stdout.split())) <= shared * 1024
