"""Compiles what calls launch on a device that is not here, and says what is wrong with it.

Triton's own launcher makes every decision, from the alignment of the tensors on: it is told of a driver for the device,
and compiles without launching. Run as a script with a target and problems, as JSON. Tensors are made on torch's default
device: `memcheck` runs the same calls on one that is here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

SHARED_MEMORY = {
    target: kib << 10
    for kib, targets in {
        227: ("cuda:90", "cuda:100", "cuda:103"),
        163: ("cuda:80", "cuda:87"),
        160: ("hip:gfx950",),
        99: ("cuda:86", "cuda:89", "cuda:120", "cuda:121"),
        64: ("cuda:75", "hip:gfx90a", "hip:gfx942", "hip:gfx1100", "hip:gfx1201"),
    }.items()
    for target in targets
}
"""Bytes that a block may have."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call. `call`: forward, backward, sparse (forward and backward), sage (sparse, with 8-bit scores), chosen
    (chunks of few keys, and of many), extend, ranges (extend in parts, of ranges of keys), decode, write (rows to a
    cache; and partial results are merged), dequantise (pages of every format of keys and of latent rows), gdn and kda
    (chunks forward and backward; H_q heads of values; their steps and convolutions too), latent, whose dims are
    (D_c, D_r) and whose rows are of 656 bytes with kv_scales block128, or dsa (scores of an indexer, lists, and latent
    attention to lists).

    Attributes:
        heads: (H_q, H_kv). queries: of each of two sequences of 300 keys.
        kv_dtype, kv_scales: as `AttentionRequest`. fresh: new rows are read beside the cache.
        off: elements by which tensors miss a boundary of 16 bytes. packed: THD, of forward and backward.
    """

    call: str
    dims: tuple[int, int]
    heads: tuple[int, int] = (8, 2)
    queries: int = 1
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    kv_scales: str = ""
    page_size: int = 16
    mask: str = ""
    fresh: bool = False
    off: int = 0
    softcap: float = 0.0
    batch_invariant: bool = False
    packed: bool = False

    def __str__(self) -> str:
        fields = dataclasses.fields(self)[1:]
        said = [f"{f.name}={getattr(self, f.name)}" for f in fields if getattr(self, f.name) != f.default]
        return "-".join([self.call, *said]).replace(" ", "")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel: its name, bytes of shared memory, whether it multiplies by `wgmma`, how rows come to shared memory
    (by descriptors: `tma`, `async`, or through registers: ``), what is wrong, how it is cut, and how many loads from
    memory bring a single byte."""

    name: str
    shared: int
    wgmma: bool
    copies: str
    wrong: tuple[str, ...]
    cut: dict[str, int]
    single_bytes: int


def elsewhere(target: str, *problems: Problem, room_only: bool = False) -> list[list[Compiled]]:
    """What the problems launch, compiled by a process of its own: Triton decides once whether it interprets.

    `room_only`: no further than to where shared memory is known, which takes a third of the time.
    """
    problems_given = json.dumps([dataclasses.asdict(p) for p in problems])
    done = subprocess.run(
        [sys.executable, __file__, target, problems_given, *(["room"] if room_only else [])],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [
        [Compiled(**{**kernel, "wrong": tuple(kernel["wrong"])}) for kernel in launched]
        for launched in json.loads(done.stdout.splitlines()[-1])
    ]


# --------------------------------------------------------------------------------------------------- in that process


class _Driver:
    """What Triton asks of the device of a process."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _pretend(target: str) -> list[Any]:
    """Let this process believe that CPU tensors are on such a device; the list receives what is launched."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from polyattn_triton import latent, paged  # noqa: F401 all modules whose facts are replaced below
    from polyattn_triton.kernels import pairs

    kind, arch = target.split(":")
    capability = int(arch) if kind == "cuda" else 0
    driver.set_active(_Driver(GPUTarget("cuda", capability, 32) if capability else GPUTarget("hip", arch, 64)))
    name = {9: "hopper", 10: "blackwell"}.get(capability // 10, "cuda" if capability else "other")
    facts = {
        "shared_memory": lambda device: SHARED_MEMORY[target],
        "processors": lambda device: 132,
        "native_fp8": lambda device: capability >= 89,
        "nvidia": lambda device: capability > 0,
        "native": lambda device, kind: (
            capability >= 89 if kind == "fp8_e4m3" else kind in pairs.IN_PAIRS and capability > 0
        ),
        "_class": lambda device: {"cuda": "nvidia", "other": ""}.get(name, name),
    }
    for module in [module for key, module in sys.modules.items() if key.startswith("polyattn_triton.kernels.")]:
        for fact, replacement in facts.items():
            if hasattr(module, fact):
                setattr(module, fact, replacement)
        if getattr(getattr(module, "architecture", None), "__module__", "").endswith(".choices"):
            module.architecture = lambda device: name
    paged.runtime.processors = facts["processors"]
    paged.runtime.check_device = lambda device: None
    launched: list[Any] = []

    def compiles(kernel: Any, grid: Any) -> Any:
        def compile_it(*args: Any, **kwargs: Any) -> None:
            cut = {name: kwargs[name] for name in ("M", "N", "STAGES", "num_warps") if name in kwargs}
            launched.append((kernel, kernel.run(*args, grid=grid, warmup=True, **kwargs), cut))

        return compile_it

    JITFunction.__getitem__ = compiles
    return launched


def _tensor(problem: Problem, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Memory that nothing reads, off its boundary as the problem says."""
    dtype = getattr(torch, problem.dtype) if dtype is None else dtype
    size = 1
    for n in shape:
        size *= n
    return torch.zeros(size + problem.off, dtype=torch.uint8).repeat_interleave(dtype.itemsize).view(dtype)[
        problem.off :
    ].view(shape)  # fmt: skip


def _mask(problem: Problem) -> torch.Tensor | None:
    if not problem.mask:
        return None
    return torch.zeros(2, 1, problem.queries, 300).to(torch.float32 if problem.mask == "additive" else torch.bool)


def _tables(problem: Problem) -> dict[str, Any]:
    from polyattn.contract import PagedTables

    tables = PagedTables(
        torch.arange(2 * -(-300 // problem.page_size), dtype=torch.int32).view(2, -1),
        torch.full((2,), 300, dtype=torch.int32),
        torch.arange(3, dtype=torch.int32) * problem.queries,
        problem.queries,
        300,
    )
    return {"tables": tables, "attn_mask": _mask(problem), "tree": problem.mask == "tree"}


_STORED = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8, "fp4_e2m1": torch.uint8}


def _paged(problem: Problem) -> None:
    from polyattn_triton.kernels.decode import decode
    from polyattn_triton.kernels.extend import extend

    (H_q, H_kv), T = problem.heads, 2 * problem.queries
    pages = 2 * -(-300 // problem.page_size)
    stored = _STORED.get(problem.kv_dtype, getattr(torch, problem.dtype))
    caches, scales = [], []
    for width in problem.dims:
        packed = width // 2 if problem.kv_dtype == "fp4_e2m1" else width
        caches.append(_tensor(problem, pages, problem.page_size, H_kv, packed, dtype=stored))
        sizes = {
            "tensor": (1,),
            "head": (H_kv,),
            "token": (pages, problem.page_size, H_kv),
            "block16": (pages, problem.page_size, H_kv, width // 16),
        }
        kind = torch.float8_e4m3fn if problem.kv_scales == "block16" else torch.float32
        scales.append(torch.ones(sizes[problem.kv_scales]).to(kind) if problem.kv_scales else None)
    new = [_tensor(problem, T, H_kv, width) if problem.fresh else None for width in problem.dims]
    more: dict[str, Any] = {"invariant": problem.batch_invariant} if problem.call == "decode" else {}
    made = torch.empty(T, H_q, problem.dims[1], dtype=getattr(torch, problem.dtype)), torch.empty(T, H_q)
    if problem.call == "ranges":
        made, more = tuple(torch.empty(3, *x.shape) for x in made), {"cuts": 3}
    (decode if problem.call == "decode" else extend)(
        _tensor(problem, T, H_q, problem.dims[0]), *caches, **_tables(problem),
        page_size=problem.page_size, hnd=False, causal=problem.mask == "", scale=0.1,
        softcap=problem.softcap, key=new[0], value=new[1], kv_dtype=problem.kv_dtype, kv_scales=problem.kv_scales,
        k_scale=scales[0], v_scale=scales[1], out=made[0], lse=made[1], **more,
    )  # fmt: skip


def _write_and_merge(problem: Problem) -> None:
    """New rows are written to the cache; partial results are merged."""
    from polyattn_triton.kernels.merge import merge
    from polyattn_triton.kernels.merge_parts import merge_parts
    from polyattn_triton.kernels.write import write_kv

    H_kv, T, dtype = problem.heads[1], 2 * problem.queries, getattr(torch, problem.dtype)
    pages, stored = 2 * -(-300 // problem.page_size), _STORED.get(problem.kv_dtype, dtype)
    caches = [torch.zeros(pages, problem.page_size, H_kv, d).to(stored) for d in problem.dims]
    rows = [_tensor(problem, T, H_kv, d) for d in problem.dims]
    scale = torch.ones(1) if problem.kv_scales else None
    write_kv(
        *rows, *caches, tables=_tables(problem)["tables"], page_size=problem.page_size, kv_dtype=problem.kv_dtype,
        kv_scales=problem.kv_scales, k_scale=scale, v_scale=scale,
    )  # fmt: skip
    outs, lses = torch.empty(2, T, problem.heads[0], problem.dims[1]), torch.empty(2, T, problem.heads[0])
    merge(outs, lses, out=outs[0].to(dtype), lse=lses[0])
    for parts in ([outs[0].to(dtype)] * 4, [outs[0], outs[1].to(dtype)]):
        merge_parts(parts, [lses[0]] * len(parts), out=outs[0], lse=lses[0])


def _dequantise(problem: Problem) -> None:
    """Every kind of cache as numbers: keys of heads, and latent rows of 576."""
    from polyattn.contract import AttentionRequest
    from polyattn.semantics.kv_quant import LATENT_FORMATS
    from polyattn_triton.kernels.dequantise import dequantised

    page_table, seq_lens = _tables(problem)["tables"][:2]
    columns, size, H, D = page_table.shape[1], problem.page_size, problem.heads[1], problem.dims[0]
    sizes = {"": (), "tensor": (1,), "head": (H,), "token": (2 * columns, size, H)}
    how = {"dtype": problem.dtype, "page_size": size, "head_dim": D}
    for kind, stored in _STORED.items():
        for scales, shape in ({"block16": ()} if kind == "fp4_e2m1" else sizes).items():
            request = AttentionRequest(family="paged", kv_dtype=kind, kv_scales=scales, **how)
            cache = torch.zeros(2 * columns, size, H, D // 2 if scales == "block16" else D).to(stored)
            scale = torch.zeros(2 * columns, size, H, D // 16).to(torch.float8_e4m3fn)
            given = scale if scales == "block16" else torch.zeros(shape) if scales else None
            dequantised(request, cache, given, page_table, seq_lens)
    for one in LATENT_FORMATS:
        cache = torch.zeros(2 * columns, size, one.entries(576)).to(one.dtype)
        said = {**how, "kv_dtype": one.kv_dtype, "kv_scales": one.kv_scales, "head_dim": 576, "v_head_dim": 512}
        dequantised(AttentionRequest(family="mla", **said), cache, None, page_table, seq_lens)


def _latent(problem: Problem) -> None:
    from polyattn_triton.kernels import latent

    heads, T, (d_c, d_r) = problem.heads[0], 2 * problem.queries, problem.dims
    pages, dtype = 2 * -(-300 // problem.page_size), getattr(torch, problem.dtype)
    stored = problem.kv_scales or ("" if problem.kv_dtype == "auto" else problem.kv_dtype)
    if stored == "block128":
        cache = torch.zeros(pages, problem.page_size, 656, dtype=torch.uint8)
    else:
        cache = _tensor(problem, pages, problem.page_size, d_c + d_r, dtype=_STORED.get(stored))
    launch = latent.launch_for(
        torch.get_default_device(), dtype, heads, problem.dims, 2, problem.queries, 300, problem.batch_invariant,
        additive=problem.mask == "additive", stored=stored,
    )  # fmt: skip
    shares = torch.zeros(max(launch.numbers(2), 1), dtype=torch.int32)
    given = _tables(problem)
    if launch.parts:
        latent.plan(launch, *given["tables"][1:3], causal=True, out=shares)
    rows = launch.pieces(2)
    latent.attend(
        _tensor(problem, T, heads, d_c + d_r), cache, **given, causal=True, scale=0.1,
        out=torch.empty(T, heads, d_c, dtype=dtype), lse=torch.empty(T, heads), launch=launch, shares=shares,
        pieces=(torch.empty(rows, d_c), torch.empty(rows)),
    )  # fmt: skip


def _dsa(problem: Problem) -> None:
    from polyattn_triton.kernels import index, listed, top

    heads, T, (d_c, d_r), dtype = problem.heads[0], 2 * problem.queries, problem.dims, getattr(torch, problem.dtype)
    pages, fp8 = 2 * -(-300 // problem.page_size), problem.kv_dtype == "fp8_e4m3"
    tables = _tables(problem)["tables"]
    keys = (
        torch.zeros(pages, problem.page_size, 132, dtype=torch.uint8)
        if fp8
        else _tensor(problem, pages, problem.page_size, 128)
    )
    index.index_scores(_tensor(problem, T, 64, 128), torch.empty(T, 64), keys, *tables[:4])
    lists = top.top_tokens(torch.zeros(T, 2 * top.SPAN), torch.full((T,), 300), 128)
    cache = (
        torch.zeros(pages, problem.page_size, 656, dtype=torch.uint8)
        if fp8
        else _tensor(problem, pages, problem.page_size, d_c + d_r)
    )
    for parts in (1, 2):
        listed.attend(
            _tensor(problem, T, heads, d_c + d_r), cache, lists, tables=tables, scale=0.1, parts=parts,
            out=torch.empty(T, heads, d_c, dtype=dtype), lse=torch.empty(T, heads),
        )  # fmt: skip


def _dense(problem: Problem) -> None:
    from polyattn_triton.kernels import backward, forward
    from polyattn_triton.kernels.tiles import Spec

    (H_q, H_kv), (D, D_v), S_q = problem.heads, problem.dims, problem.queries
    query, dout = _tensor(problem, 2, S_q, H_q, D), _tensor(problem, 2, S_q, H_q, D_v)
    key, value = _tensor(problem, 2, 300, H_kv, D), _tensor(problem, 2, 300, H_kv, D_v)
    out, lse, mask = torch.empty_like(dout), torch.empty(2, S_q, H_q), _mask(problem)
    given: dict[str, Any] = {"spec": Spec(0.1, problem.softcap, right=-1 if problem.mask else 0), "layout": "BSHD"}
    if problem.packed:
        query, dout, key, value, out, lse = (x.flatten(0, 1) for x in (query, dout, key, value, out, lse))
        starts = torch.arange(3, dtype=torch.int32)
        given |= {"layout": "THD", "cu_seqlens_q": starts * S_q, "cu_seqlens_k": starts * 300}
        given |= {"max_seqlen_q": S_q, "max_seqlen_k": 300}
    if problem.call == "forward":
        forward.forward(query, key, value, out, lse, attn_mask=mask, **given)
        return
    backward.backward(dout, query, key, value, out, lse, attn_mask=mask, **given)


def _sparse(problem: Problem) -> None:
    from polyattn_triton.kernels import block_sparse

    (H_q, H_kv), D, S_q = problem.heads, problem.dims[0], problem.queries
    query, dout, out = (_tensor(problem, 2, H_q, S_q, D) for _ in range(3))
    key, value = (_tensor(problem, 2, H_kv, 300, D) for _ in range(2))
    for block in (64, 128) if S_q > 128 else (128,):
        rows, columns = -(-S_q // block), -(-300 // block)
        counts = torch.full((1, 1, rows), columns, dtype=torch.int32)
        indices = torch.arange(columns, dtype=torch.int32).expand(1, 1, rows, columns)
        lists = block_sparse.Lists(counts, indices, None, block, block)
        block_sparse.forward(query, key, value, lists, scale=0.1, out=out, lse=torch.empty(2, H_q, S_q))
        block_sparse.backward(dout, query, key, value, out, torch.empty(2, H_q, S_q), lists, scale=0.1)


def _sage(problem: Problem) -> None:
    from polyattn_triton.kernels import block_sparse, eight_bits

    (H_q, H_kv), D, S_q = problem.heads, problem.dims[0], problem.queries
    query, key, value = (_tensor(problem, 2, heads, S_q, D) for heads in (H_q, H_kv, H_kv))
    for block_q, block_k in ((64, 64), (128, 64), (128, 128)):
        rows, columns = -(-S_q // block_q), -(-S_q // block_k)
        counts = torch.full((1, 1, rows), columns, dtype=torch.int32)
        indices = torch.arange(columns, dtype=torch.int32).expand(1, 1, rows, columns)
        lists = block_sparse.Lists(counts, indices, None, block_q, block_k)
        eight_bits.attend(query, key, value, lists, scale=0.1)


def _chosen(problem: Problem) -> None:
    from polyattn_triton.kernels import chunks

    (H_q, H_kv), (D, D_v) = problem.heads, problem.dims
    query, key, value = (_tensor(problem, 2, 600, H, d).transpose(1, 2) for H, d in ((H_q, D), (H_kv, D), (H_kv, D_v)))
    for count in (6, 2):
        sizes = torch.full((count,), 600 // count, dtype=torch.int32)
        means, own = torch.zeros(2, H_kv, count, D), (torch.arange(600) // (600 // count)).to(torch.int32)
        lists = (own, sizes.cumsum(0, dtype=torch.int32) - sizes, sizes, own)
        chunks.attend_chosen(query, key, value, means, lists, 600 // count, 2, None, 0.1, None)
    chunks.choose(query, means, own, 2, None)


def _linear(problem: Problem) -> None:
    from polyattn_triton.kernels import delta_chunks, delta_gradients, linear_recurrent

    (H_v, H), (D, D_v), T = problem.heads, problem.dims, problem.queries
    query, key = (_tensor(problem, 2, T, H, D) for _ in range(2))
    value, beta = _tensor(problem, 2, T, H_v, D_v), _tensor(problem, 2, T, H_v)
    gate, state = torch.empty(2, T, H_v, *((D,) if problem.call == "kda" else ())), torch.empty(2, H_v, D, D_v)
    made = delta_chunks.prepare(query, key, gate, beta, scale=0.1, chunk=delta_chunks.chunk_of(query))
    given = {"scale": 0.1, "turned": False}
    delta_chunks.through(
        query, key, value, state, made, out=torch.empty_like(value), last=torch.empty_like(state), **given
    )
    delta_gradients.gradients(value, state, query, key, value, gate, beta, state, made, **given)
    out, last = torch.empty_like(value), torch.empty_like(state)
    linear_recurrent.recurrent(query, key, value, gate, beta, state, out=out, last=last, **given)
    _conv(problem, T)


def _conv(problem: Problem, T: int) -> None:
    """Of prompts, packed ones, steps and drafts."""
    from polyattn_triton.kernels.short_conv import causal_conv

    weight, slots = _tensor(problem, 300, 4), torch.arange(2)
    tails, drafted = _tensor(problem, 2, 300, 3), _tensor(problem, 2, 5, 300, 3)
    parents = torch.zeros(2, 5, dtype=torch.int64)
    for tokens in (T, 1):
        causal_conv(_tensor(problem, 2, tokens, 300), weight, None, tails, slots)
    causal_conv(_tensor(problem, 1, T, 300), weight, weight[:, 0], tails, slots, cu_seqlens=torch.tensor([0, 9, T]))
    for tree in (None, parents):
        causal_conv(_tensor(problem, 2, 5, 300), weight, None, tails, slots, parents=tree, drafted=drafted)


@functools.cache
def _disassembler() -> str:
    import triton

    return os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "nvdisasm")


def _sass(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_disassembler(), "-c", file.name], capture_output=True, text=True, check=True).stdout


def wrong_descriptors(sass: str) -> Iterator[str]:
    """Descriptors of `wgmma` whose upper word is a constant plus something: their address is 14 bits of the lower word,
    so nothing but 0 is ever above it. ptxas 12.8 adds a register that has another meaning, to both words.
    """
    before: dict[str, str] = {}
    for line in re.sub(r"/\*.*?\*/", "", sass).splitlines():
        found = re.match(r"\s*(?:@!?U?P\w+ +)?(\S+) +(?:UP\w+, )?(UR\d+), (.*?) *;", line)
        if not found:
            continue
        operation, target, sources = found.groups()
        added = re.match(r"(UR\w+), (-?0x[0-9a-f]+),", sources)
        if operation == "UIADD3.X" and added:
            constant = int(added[2], 16) & 0xFFFFFFFF
            # Bits 30 and 31: the swizzle. Below: the stride between groups of rows, in units of 16 bytes.
            descriptor = constant >> 30 and not constant & 0x3FFFC000 and 0 < constant & 0x3FFF <= 1024
            if descriptor and added[1] != "URZ" and before.get(added[1]) != "UMOV URZ":
                yield line.strip()
        before[target] = f"{operation} {sources}"


def mistaken_products(ttgir: str) -> Iterator[str]:
    """Products by `mma.sync` of too few numbers: `cached.least`."""
    left = r"tt\.dot .*?tensor<\d+x(\d+)x\w+, #ttg\.dot_op<\{opIdx = 0, parent = #mma\d*, kWidth = (\d+)"
    for found in re.finditer(left, ttgir):
        if int(found[1]) < 8 * int(found[2]):
            yield f"a sum of {found[1]} numbers where threads hold {found[2]} side by side"


def _copies(ptx: str) -> str:
    return "tma" if "cp.async.bulk.tensor" in ptx else "async" if "cp.async.c" in ptx else ""


def _judged(kernel: Any, done: Any, cut: dict[str, int], limit: int, room_only: bool) -> dict[str, Any]:
    shared, wrong = done.metadata.shared, []
    if shared > limit:
        wrong.append(f"{shared} bytes of shared memory, there are {limit}")
    if (getattr(done.metadata, "tmem_size", 0) or 0) > 512:
        wrong.append(f"{done.metadata.tmem_size} columns of tensor memory, there are 512")
    if done.metadata.target.backend == "cuda":
        wrong += mistaken_products(done.asm["ttgir"])
    if not room_only and "wgmma" in done.asm.get("ptx", "") and os.path.exists(_disassembler()):
        wrong += wrong_descriptors(_sass(done.asm["cubin"]))
    return {
        "name": kernel.__name__, "shared": shared, "wgmma": "wgmma.mma" in done.asm.get("ptx", ""),
        "copies": _copies(done.asm.get("ptx", "")), "wrong": wrong, "cut": cut,
        "single_bytes": len(re.findall(r"ld\.global\S*\.b8\b", done.asm.get("ptx", ""))),
    }  # fmt: skip


def _no_further() -> None:
    """Compile to LLVM's language only: by then shared memory is known."""
    from triton import knobs

    def stages(backend: Any = None, made: Any = None, *options: Any) -> Any:
        if made is None:
            return "room", "room"  # what is cached is not what is launched elsewhere

        def named(source: Any, metadata: dict[str, Any]) -> str:
            metadata["name"] = "none"
            return ""

        last, binary = list(made)[-2:]
        made[last], made[binary] = named, lambda source, metadata: b""
        return None

    if hasattr(knobs.runtime, "add_stages_inspection_hook"):
        knobs.runtime.add_stages_inspection_hook = stages


_CALLS = {"latent": _latent, "extend": _paged, "decode": _paged, "sage": _sage, "sparse": _sparse, "chosen": _chosen}
_CALLS |= {"gdn": _linear, "kda": _linear, "write": _write_and_merge, "dsa": _dsa}
_CALLS |= {"dequantise": _dequantise, "ranges": _paged}


def call(problem: Problem) -> None:
    """Make the call of a problem."""
    _CALLS.get(problem.call, _dense)(problem)


def main(target: str, problems: list[dict[str, Any]], room_only: bool = False) -> None:
    launched = _pretend(target)
    if room_only:
        _no_further()
    found = []
    for fields in problems:
        problem = Problem(**{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()})
        del launched[:]
        with contextlib.redirect_stdout(sys.stderr):
            call(problem)
        found.append([_judged(*each, SHARED_MEMORY[target], room_only) for each in launched])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:] == ["room"])
