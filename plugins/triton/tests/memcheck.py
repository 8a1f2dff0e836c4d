"""One small call of each kernel on the GPU that is here, to be run under a checker of memory accesses:

    compute-sanitizer --tool memcheck --error-exitcode 9 python plugins/triton/tests/memcheck.py

With arguments I and N it makes every N-th call from the I-th on: N processes without a checker compile it all first.
Lengths end inside blocks and pages, so that what is masked lies past the end of an allocation: every tensor has one of
its own. Results are for other tests. On a Hopper the Gluon kernels run too. It prints what it called; a failed launch
ends it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

# Read when torch first allocates: a tensor is then what was asked of the driver, to the byte.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

sys.path.insert(0, str(Path(__file__).parent))
from launched_offline import Problem, call

from polyattn.contract import PagedTables
from polyattn_triton.hopper import block_sparse, extend, forward
from polyattn_triton.kernels.block_sparse import Lists
from polyattn_triton.kernels.merge import merge
from polyattn_triton.kernels.merge_parts import merge_parts
from polyattn_triton.kernels.tiles import Spec
from polyattn_triton.kernels.write import write_kv, write_latent

PORTABLE = (
    Problem("forward", (64, 64), queries=63),
    Problem("forward", (96, 40), queries=3, mask="bool", off=1, softcap=30.0),
    Problem("backward", (128, 128), queries=300),
    Problem("backward", (40, 16), queries=63, off=1),
    Problem("sparse", (64, 64), queries=200),
    Problem("extend", (128, 128), queries=64, page_size=64),
    Problem("extend", (64, 64), queries=64, mask="tree"),
    Problem("extend", (72, 40), queries=70, fresh=True, mask="additive", page_size=5),
    Problem("extend", (64, 64), queries=64, kv_dtype="fp8_e4m3", kv_scales="token"),
    Problem("decode", (128, 128)),
    Problem("decode", (64, 64), page_size=1, fresh=True, batch_invariant=True),
    Problem("decode", (128, 128), queries=4, kv_dtype="fp8_e4m3", kv_scales="head", page_size=64),
    Problem("decode", (64, 64), kv_dtype="fp4_e2m1", kv_scales="block16"),
    Problem("decode", (40, 24), kv_dtype="int8", kv_scales="tensor", mask="bool"),
    Problem("latent", (512, 64), heads=(128, 1), page_size=64),
    Problem("latent", (512, 64), heads=(16, 1), queries=3, kv_dtype="fp8_e4m3", kv_scales="block128", page_size=64),
    Problem("latent", (512, 64), heads=(16, 1), queries=3, kv_dtype="fp8_e5m2", page_size=64),
    Problem("dequantise", (64, 64), page_size=5),
    Problem("latent", (128, 32), heads=(8, 1), mask="additive"),
)


def _rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def _lens(queries: int) -> PagedTables:
    """Two sequences of 300 keys over pages of 16, the last of them not full."""
    pages, lens = torch.arange(38, dtype=torch.int32).view(2, 19), torch.full((2,), 300, dtype=torch.int32)
    return PagedTables(pages, lens, torch.arange(3, dtype=torch.int32) * queries, queries, 300)


def _written() -> None:
    caches = [torch.zeros(38, 16, 2, 64, dtype=torch.float8_e4m3fn) for _ in "kv"]
    scales = {"k_scale": torch.ones(38, 16, 2), "v_scale": torch.ones(38, 16, 2)}
    how = {"page_size": 16, "kv_dtype": "fp8_e4m3", "kv_scales": "token", "make_scales": True}
    write_kv(_rows(10, 2, 64), _rows(10, 2, 64), *caches, tables=_lens(5), **scales, **how)
    rows = torch.zeros(38, 16, 656, dtype=torch.uint8)
    write_latent(_rows(10, 576), rows, tables=_lens(5), page_size=16)


def _merged() -> None:
    merge(torch.randn(3, 7, 5, 72), torch.randn(3, 7, 5), out=_rows(7, 5, 72), lse=torch.empty(7, 5))
    parts = [torch.randn(7, 5, 72) for _ in range(3)]
    merge_parts(parts, [torch.randn(5, 7).T] * 3, out=_rows(7, 5, 72), lse=torch.empty(7, 5))


def _hopper_forward(width: int) -> None:
    query, out, key, value = _rows(2, 100, 8, width), _rows(2, 100, 8, width), *(_rows(2, 333, 2, width) for _ in "kv")
    spec = Spec(width**-0.5, left=77, right=0)
    assert forward.supports(query, key, value, out, spec=spec, layout="BSHD")
    forward.forward(query, key, value, out, torch.empty(2, 100, 8), spec=spec, layout="BSHD", sinks=torch.randn(8))


def _hopper_extend(width: int) -> None:
    query, caches = _rows(140, 8, width), [_rows(38, 16, 2, width) for _ in "kv"]
    mask = torch.ones(1, 1, 70, 300, dtype=torch.bool).tril(230)
    for more in ({"causal": True, "left": 100}, {"causal": False, "attn_mask": mask}):
        extend.extend(
            query, *caches, tables=_lens(70), page_size=16, hnd=False, scale=0.1, **more,
            out=torch.empty_like(query), lse=torch.empty(140, 8),
        )  # fmt: skip
    extend.extend(
        query, *caches, tables=_lens(70), page_size=16, hnd=False, scale=0.1, causal=False, cuts=3,
        out=torch.empty(3, 140, 8, width), lse=torch.empty(3, 140, 8),
    )  # fmt: skip


def _hopper_packed(width: int) -> None:
    query, key, value = _rows(140, 6, width), *(_rows(333, 2, width) for _ in "kv")
    starts = [torch.tensor(x, dtype=torch.int32) for x in ([0, 69, 70, 140], [0, 200, 200, 333])]
    extend.packed(
        query, key, value, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=70, causal=True, scale=0.1,
        sinks=torch.randn(6), out=torch.empty_like(query), lse=torch.empty(140, 6),
    )  # fmt: skip


def _hopper_sparse(block: int) -> None:
    query, out = (_rows(2, 4, 300, 128) for _ in range(2))
    key, value = (_rows(2, 2, 333, 128) for _ in range(2))
    rows, columns = -(-300 // block), -(-333 // block)
    counts = torch.full((1, 1, rows), columns, dtype=torch.int32)
    indices = torch.arange(columns, dtype=torch.int32).expand(1, 1, rows, columns)
    lists = Lists(counts, indices, None, block, block)
    block_sparse.forward(query, key, value, lists, scale=0.1, out=out, lse=torch.empty(2, 4, 300))


def calls() -> Iterator[tuple[str, Callable[[], None]]]:
    for problem in PORTABLE:
        yield str(problem), partial(call, problem)
    yield "write", _written
    yield "merge", _merged
    if torch.cuda.get_device_capability() == (9, 0):
        for width in (64, 128):
            yield f"hopper forward {width}", partial(_hopper_forward, width)
            yield f"hopper extend {width}", partial(_hopper_extend, width)
            yield f"hopper packed {width}", partial(_hopper_packed, width)
            yield f"hopper block-sparse {width}", partial(_hopper_sparse, width)


if __name__ == "__main__":
    torch.set_default_device("cuda")
    first, step = map(int, sys.argv[1:] or (0, 1))
    for name, run in [*calls()][first::step]:
        run()
        torch.cuda.synchronize()
        print(name, flush=True)
