"""FlashInfer's plan-and-run wrappers.

Traps that are here as they are there: an LSE has base 2; sinks are dropped in silence; a row without keys and a scale
of 0 or less give no numbers (0.6.18 and before); queries are float16 unless a plan says otherwise; a plan holds for one
batch, and its workspace for one wrapper: two that are planned over one memory spoil each other, but for those of MLA;
recorded wrappers have one batch size and buffers that were given; a mask takes the place of the causal rule, and is one
for all heads; only the fa2 template reads V by strides of its own, by kernels that 0.7 loads when they are first
called. The fa3 template reads queries, and keys that are in no pages, by TMA, and has room for so many tiles; the fa2
template counts queries and outputs in 32 bits, and pairs of a mask in 31; MLA has room for so many work items.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.testing.emulators import Library
from polyattn.testing.emulators.arithmetic import lse_of, scores, weighted

from . import SIGNATURES

__all__ = ["attention", "library"]

DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = 8 << 20
"""Bytes of the integer workspace that a wrapper makes."""
REACH, PAIRS, WORKS = 1 << 32, 1 << 31, 16384
PROCESSORS = 132
"""Of an H100; the workspaces are sized for a CPU, which is one."""


def attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, seen: Tensor, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """One sequence: ([S_q, H_q, D_v], LSE of base 2 [S_q, H_q]), in float32; rows without keys are no numbers.

    Args:
        query: [S_q, H_q, D]; key: [S_k, H_kv, D]; value: [S_k, H_kv, D_v]; seen: bool [S_q, S_k].
    """
    logits = scores(query, key, scale, seen, softcap)
    lse = lse_of(logits).masked_fill(~seen.any(-1), torch.nan)
    return weighted(logits.softmax(-1), value), lse.T / math.log(2.0)


def visible(s_q: int, s_k: int, causal: bool, left: int) -> Tensor:
    """Who sees whom by position, from the end."""
    row, column = torch.arange(s_q)[:, None] + s_k - s_q, torch.arange(s_k)
    seen = torch.ones(s_q, s_k, dtype=torch.bool)
    if causal:
        seen &= column <= row
    if left >= 0:
        seen &= column >= row - left
    return seen


def check_out(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if out is not None and (tuple(out.shape) != shape or out.dtype != dtype):
        raise ValueError(f"Invalid out: expected {shape} {dtype}, got {tuple(out.shape)} {out.dtype}")
    if out is not None and out.data_ptr() % 16:
        raise RuntimeError("CUDA error: misaligned address")


def rows_of(cache: Tensor, layout: str, pages: Tensor, count: int) -> Tensor:
    """[S_k, H, D] of a sequence's pages."""
    taken = cache[pages.long()]
    taken = taken.transpose(1, 2) if layout == "HND" else taken
    return taken.flatten(0, 1)[:count]


def check_strides(caches: tuple[Tensor, Tensor], axes: tuple[int, ...]) -> None:
    """K and V are found by the same strides."""
    key, value = caches
    for axis in axes:
        if key.stride(axis) != value.stride(axis):
            found = f"{key.stride(axis)} vs. {value.stride(axis)}"
            raise RuntimeError(f"Check failed: K and V must have same stride of axis {axis} ({found})")


def by_tma(*tensors: Tensor) -> bool:
    """Whether TMA reads them: of strides it is told all, those of an axis of one too, and a wrong one is no error."""
    return not any(t.stride(axis) * t.itemsize % 16 for t in tensors for axis in range(t.dim() - 1))


def within_reach(query: Tensor, heads: int, width: int) -> bool:
    """Whether the fa2 template finds all queries and outputs: beyond, its offsets wrap around."""
    return query.shape[0] * max(query.stride(0), heads * width) <= REACH


def check_room(integers: int, starts: Tensor, heads: int, width: int, rows: int | None) -> None:
    """Whether the schedule of the fa3 template fits: `PrefillSM90Plan`.

    Args:
        integers: bytes. starts: int [N+1], of queries. rows: the most queries of a recorded wrapper, None = not one.
    """
    tile, batch = 192 if width == 64 else 128, len(starts) - 1
    most = -(-(rows or int(starts[-1])) // tile) + batch - 1
    copies = 1 if most > 4096 else heads
    works = copies * (most if rows else int(((starts.diff() + tile - 1) // tile).sum()))
    arrays, taken = [works] * 6 + [PROCESSORS + 1, works], 0
    for count in arrays:
        taken = -(-taken // 16) * 16 + 4 * count
    if taken > integers:
        raise RuntimeError(
            f"Buffer overflow when allocating memory for batch_prefill_sm90: {taken} bytes of {integers}"
        )


def mla_works(queries: list[int], keys: list[int], heads: int, causal: bool) -> int:
    """Work items of `MLAPlan`, as its loops make them."""
    cluster = 2 if sum(queries) * heads // len(queries) > 64 else 1
    tile, clusters = 64 * cluster, PROCESSORS // cluster
    seen = []
    for s_q, s_k in zip(queries, keys, strict=True):
        tiles = -(-s_q * heads // tile)
        for index in range(tiles):
            upto = max(min(s_k - s_q - (-(index + 1) * tile // heads), s_k), 0)
            seen.append(upto if causal and index + 1 < tiles else s_k)
    average = max(-(-sum(seen) // clusters), 1)
    limit = next((size for most, size in ((8, 32), (16, 64), (32, 128), (64, 192)) if average <= most), None)
    limit = limit or -(-average // 256) * 256
    return sum(max(-(-s_k // limit), 1) for s_k in seen)


class Planned:
    """What the wrappers share."""

    whose = 0
    """Whose plans do not spoil each other over one memory: 0 = those of one wrapper."""

    capturing = False
    """Whether a graph is being recorded: set by tests."""
    strided = False
    """Whether the kernels of 0.7 for caches of unlike strides are loaded."""

    def load_strided(self, caches: tuple[Tensor, Tensor]) -> None:
        """Before the fa2 template runs."""
        if caches[0].stride() != caches[1].stride() and not self.strided:
            if self.capturing:
                raise RuntimeError("The lazy independent paged-KV-stride module cannot be compiled or loaded")
            self.strided = True

    def begin(self, workspace: Tensor, graph: bool) -> None:
        if workspace.dtype != torch.uint8 or workspace.data_ptr() % 16:
            raise ValueError("float_workspace_buffer must be 16-byte aligned")
        self.workspace, self.graph, self.plans, self.integers = workspace, graph, 0, INTEGERS

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Of all wrappers but that of MLA."""
        assert not (self.graph and self.plans), "what was recorded reads the workspace that it had"
        assert int_workspace_buffer.dtype == torch.uint8
        self.workspace, self.integers = float_workspace_buffer, int_workspace_buffer.numel()

    def stamp(self) -> None:
        """A plan takes the workspace."""
        self.plans += 1
        self._mark().fill_(self._name())

    def spoilt(self) -> bool:
        """Whether another wrapper was planned over this one's workspace."""
        return bool(self._mark() != self._name())

    def _name(self) -> int:
        return self.whose or id(self) % 2**40 + self.plans

    def _mark(self) -> Tensor:
        return self.workspace[64:72].view(torch.int64)

    def finish(
        self,
        outs: list[Tensor],
        lses: list[Tensor],
        like: Tensor,
        width: int,
        a: dict[str, Any],
        scale: float,
        legible: bool = True,
    ) -> Any:
        """What `run` returns. legible: whether the kernels find what they read and write."""
        shape = (*like.shape[:2], width)
        check_out(a["out"], shape, like.dtype)
        found = torch.cat(outs) if outs else torch.zeros(shape)
        lse = torch.cat(lses) if lses else torch.zeros(shape[:2])
        if self.spoilt() or scale <= 0 or not legible:
            found, lse = found * math.nan, lse * math.nan
        result = found.to(like.dtype)
        if a["out"] is not None:
            assert a["out"].is_contiguous(), "the kernels know no strides of out"
            result = a["out"].copy_(result)
        if a.get("lse") is not None:
            assert a["return_lse"]
            assert a["lse"].is_contiguous()
            assert a["lse"].dtype == torch.float32
            lse = a["lse"].copy_(lse)
        return (result, lse.contiguous()) if a["return_lse"] else result


def _beginning(lib: Library, key: str) -> Callable[..., None]:
    """The `__init__` of a wrapper that only keeps what it was made with."""

    @lib.method(f"{key}.__init__")
    def begin(self: Any, float_workspace_buffer: Tensor, use_cuda_graph: bool, **a: Any) -> None:
        self.begin(float_workspace_buffer, use_cuda_graph)
        self.made = a

    return begin


def check_csr(indptr: Tensor, indices: Tensor, last: Tensor, page_size: int) -> None:
    for tensor in (indptr, indices, last):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError("indptr, indices and last_page_len are contiguous int32")
    counts = indptr.diff()
    if (last > page_size).any() or ((last <= 0) & (counts > 0)).any():
        raise ValueError("last_page_len is in [1, page_size]")


def check_dtypes(p: dict[str, Any], q: Tensor, caches: tuple[Tensor, Tensor]) -> None:
    """Of a run against its plan."""
    planned = _dtype(p["q_data_type"]), _dtype(p["kv_data_type"])
    if (q.dtype, caches[0].dtype) != planned:
        raise ValueError(f"q and caches are not of the dtypes planned: {q.dtype}, {caches[0].dtype}, not {planned}")


def scale_given(a: dict[str, Any]) -> tuple[float, float]:
    """(of K, of V) of a run."""
    for name in ("k_scale", "v_scale"):
        if isinstance(a[name], Tensor):
            raise TypeError(f"Mismatched type on argument {name}: expected float, got Tensor")
    return a["k_scale"] or 1.0, a["v_scale"] or 1.0


def library(version: str = "0.7.2.post1") -> Library:
    """FlashInfer 0.7.2, or 0.6.18 without its MLA wrapper."""
    old = version.startswith("0.6")
    lib = Library(
        "flashinfer-python", version, "flashinfer", "flashinfer.prefill", "flashinfer.decode", signatures=SIGNATURES
    )
    where = "flashinfer@0.6.18" if old else "flashinfer"
    _prefill(lib, f"{where}.prefill.BatchPrefillWithPagedKVCacheWrapper", old)
    _ragged(lib, f"{where}.prefill.BatchPrefillWithRaggedKVCacheWrapper")
    _blocks(lib, "flashinfer.sparse.VariableBlockSparseAttentionWrapper")
    _decode(lib, f"{where}.decode.BatchDecodeWithPagedKVCacheWrapper", old)

    @lib.function("flashinfer", f"{where}.cascade.merge_state_in_place")
    def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: None) -> None:
        assert mask is None
        assert s.dtype == s_other.dtype == torch.float32
        assert all(t.is_contiguous() for t in (v, s, v_other, s_other))
        top = torch.maximum(s, s_other)
        a, b = torch.exp2(s - top), torch.exp2(s_other - top)
        v.copy_((v.float() * a[..., None] + v_other.float() * b[..., None]) / (a + b)[..., None])
        s.copy_(top + torch.log2(a + b))

    if not old:
        _latent(lib, "flashinfer.mla.BatchMLAPagedAttentionWrapper")
        _cascade(lib, "flashinfer.cascade.MultiLevelCascadeAttentionWrapper")
    return lib


def _prefill(lib: Library, key: str, old: bool) -> None:
    class BatchPrefillWithPagedKVCacheWrapper(Planned):
        strided = old

        if not old:

            @lib.method(f"{key}.prewarm_paged_kv_stride_variant")
            def prewarm_paged_kv_stride_variant(self, variant: str) -> None:
                assert variant == "independent"
                assert self.plans, "plan() must complete before prewarming a paged-KV-stride variant."
                if self.made["backend"] != "fa2":
                    raise RuntimeError("Paged-KV-stride prewarm requires a standard FA2 plan")
                self.strided = True

        @lib.method(f"{key}.__init__")
        def __init__(self, float_workspace_buffer: Tensor, use_cuda_graph: bool, **a: Any) -> None:
            self.begin(float_workspace_buffer, use_cuda_graph)
            self.made = a
            self.rows = 0
            if use_cuda_graph:
                for name in ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf"):
                    if a[name] is None:
                        raise ValueError(f"{name} should be a torch.Tensor in CUDA graph mode")

        @lib.method(f"{key}.plan")
        def plan(self, **a: Any) -> None:
            a = {**a, "q_data_type": _dtype(a["q_data_type"])}
            a["kv_data_type"] = a["kv_data_type"] or a["q_data_type"]
            a["head_dim_vo"] = a["head_dim_vo"] or a["head_dim_qk"]
            check_csr(a["paged_kv_indptr"], a["paged_kv_indices"], a["paged_kv_last_page_len"], a["page_size"])
            dims, made, masked = (a["head_dim_qk"], a["head_dim_vo"]), self.made, a["custom_mask"] is not None
            if dims not in DIMS:
                raise RuntimeError(f"no kernel for head dims {dims}")
            if made["backend"] == "fa3" and (masked or a["kv_data_type"] in FLOAT8):
                raise RuntimeError("fa3 takes neither masks nor FP8 caches beside 16-bit queries")
            batch, rows = len(a["qo_indptr"]) - 1, int(a["qo_indptr"][-1])
            if self.graph:
                self.rows = self.rows or rows
                if batch != len(made["qo_indptr_buf"]) - 1 or rows > self.rows:
                    raise ValueError("The batch size should be fixed during the lifecycle of the wrapper")
                room = made["paged_kv_indices_buf"]
                if len(a["paged_kv_indices"]) > len(room):
                    raise ValueError("The length of paged_kv_indices exceeds the allocated buffer size.")
                for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len"):
                    made[f"{name}_buf"].copy_(a[name])
                    a[name] = made[f"{name}_buf"]
                room[: len(a["paged_kv_indices"])].copy_(a["paged_kv_indices"])
                a["paged_kv_indices"] = room
                if masked:
                    sizes = a["qo_indptr"].diff() * _lens(a).to(torch.int32)
                    assert made["mask_indptr_buf"] is not None
                    assert int(((sizes + 7) // 8).sum()) <= len(made["custom_mask_buf"])
            if made["backend"] == "fa3":
                check_room(self.integers, a["qo_indptr"], a["num_qo_heads"], dims[1], self.rows if self.graph else None)
            if masked and (a["custom_mask"].dim() != 1 or a["custom_mask"].dtype != torch.bool):
                raise ValueError("custom_mask is a flat bool tensor")
            if masked:
                # Not what `run` takes for lengths: a sequence without pages counts less than nothing here.
                pages = a["paged_kv_indptr"].diff() - 1
                sizes = a["qo_indptr"].diff() * (pages * a["page_size"] + a["paged_kv_last_page_len"])
                a["mask_indptr"] = [0, *sizes.cumsum(0).tolist()]
                assert a["mask_indptr"][-1] < PAIRS, "mask_indptr is int32, and wraps around without a word"
            self.a = a
            self.stamp()

        @lib.method(f"{key}.run")
        def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], **a: Any) -> Any:
            p, layout = self.a, self.made["kv_layout"]
            check_dtypes(p, q, paged_kv_cache)
            starts, lens = p["qo_indptr"].tolist(), _lens(p).tolist()
            if q.shape[0] != starts[-1]:
                raise ValueError(f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1] ({starts[-1]})")
            assert q.data_ptr() % 16 == 0
            width = paged_kv_cache[1].shape[-1]
            if self.made["backend"] == "fa3":
                check_strides(paged_kv_cache, (0, 2 if layout == "HND" else 1))
                legible = by_tma(q)
            else:
                self.load_strided(paged_kv_cache)
                legible = within_reach(q, q.shape[1], max(q.shape[2], width))
            k_scale, v_scale = scale_given(a)
            outs, lses = [], []
            for n, s_k in enumerate(lens):
                queries = q[starts[n] : starts[n + 1]]
                s_q = queries.shape[0]
                pages = p["paged_kv_indices"][p["paged_kv_indptr"][n] : p["paged_kv_indptr"][n + 1]]
                k, v = (rows_of(cache, layout, pages, s_k) for cache in paged_kv_cache)
                if p["custom_mask"] is None:
                    seen = visible(s_q, s_k, p["causal"], p["window_left"])
                else:
                    at = p["mask_indptr"][n]
                    seen = p["custom_mask"][at : at + s_q * s_k].view(s_q, s_k)
                out, lse = attention(queries, k, v, p["sm_scale"] * k_scale, seen, p["logits_soft_cap"] or 0.0)
                outs.append(out * v_scale)
                lses.append(lse)
            return self.finish(outs, lses, q, width, a, p["sm_scale"], legible)

    lib.add("flashinfer", BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper)


def _cascade(lib: Library, key: str) -> None:
    class MultiLevelCascadeAttentionWrapper(Planned):
        """Of each level the keys of a group of queries; the last is causal, and windows count in each level anew."""

        __init__ = _beginning(lib, key)

        @lib.method(f"{key}.plan")
        def plan(self, **a: Any) -> None:
            levels = list(
                zip(
                    a["qo_indptr_arr"],
                    a["paged_kv_indptr_arr"],
                    a["paged_kv_indices_arr"],
                    a["paged_kv_last_page_len"],
                    strict=True,
                )
            )
            assert len(levels) == self.made["num_levels"]
            for starts, *pages in levels:
                check_csr(*pages, a["page_size"])
                assert len(starts) == len(pages[0])
                assert int(starts[-1]) == int(levels[0][0][-1])
            self.levels, self.a = levels, {**a, "kv_data_type": a["kv_data_type"] or a["q_data_type"]}
            self.stamp()

        # Not bound to its signature: that says Tensor where the documentation, and all of its examples, have a pair.
        def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Any:
            p, layout = self.a, self.made["kv_layout"]
            check_dtypes(p, q, paged_kv_cache)
            found: list[tuple[Tensor, Tensor]] = []
            for number, (starts, indptr, indices, last) in enumerate(self.levels):
                lens = _lens({"paged_kv_indptr": indptr, "page_size": p["page_size"], "paged_kv_last_page_len": last})
                parts = []
                for n, s_k in enumerate(lens.tolist()):
                    queries = q[starts[n] : starts[n + 1]]
                    k, v = (rows_of(one, layout, indices[indptr[n] : indptr[n + 1]], s_k) for one in paged_kv_cache)
                    causal = p["causal"] and number == len(self.levels) - 1
                    seen = visible(queries.shape[0], s_k, causal, p["window_left"])
                    parts.append(attention(queries, k, v, p["sm_scale"], seen, p["logits_soft_cap"] or 0.0))
                found.append((torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])))
            weights = torch.stack([lse for _, lse in found]).mul(math.log(2.0)).softmax(0)
            out = sum(out * weight[..., None] for (out, _), weight in zip(found, weights, strict=True))
            return self.finish([out], [], q, q.shape[-1], {"out": None, "return_lse": False}, p["sm_scale"])

    lib.add("flashinfer", MultiLevelCascadeAttentionWrapper=MultiLevelCascadeAttentionWrapper)


def _lens(p: dict[str, Any]) -> Tensor:
    """[N], keys by what a plan says of pages."""
    counts = p["paged_kv_indptr"].diff()
    return torch.where(counts > 0, (counts - 1) * p["page_size"] + p["paged_kv_last_page_len"], 0)


def _dtype(given: Any) -> torch.dtype:
    return getattr(torch, given) if isinstance(given, str) else given


def _decode(lib: Library, key: str, old: bool) -> None:
    class BatchDecodeWithPagedKVCacheWrapper(Planned):
        strided = old

        __init__ = _beginning(lib, key)

        @lib.method(f"{key}._plan_impl")
        def plan(self, **a: Any) -> None:
            a = {**a, "q_data_type": _dtype(a["q_data_type"])}
            a["kv_data_type"] = a["kv_data_type"] or a["q_data_type"]
            check_csr(a["indptr"], a["indices"], a["last_page_len"], a["page_size"])
            if (a["head_dim"], a["head_dim"]) not in DIMS:
                raise RuntimeError(f"no kernel for head dim {a['head_dim']}")
            if a["fixed_split_size"] is not None and not self.made["use_tensor_cores"]:
                raise ValueError("fixed_split_size is only supported by tensor core decode for now.")
            if self.graph:
                if len(a["last_page_len"]) != len(self.made["paged_kv_last_page_len_buffer"]):
                    raise ValueError("The batch size should be fixed in cudagraph mode")
                for name in ("indptr", "last_page_len"):
                    buffer = self.made[f"paged_kv_{name}_buffer"]
                    a[name] = buffer.copy_(a[name])
                room = self.made["paged_kv_indices_buffer"]
                room[: len(a["indices"])].copy_(a["indices"])
                a["indices"] = room
            self.a = a
            self.stamp()

        @lib.method(f"{key}.run")
        def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], **a: Any) -> Any:
            p, layout = self.a, self.made["kv_layout"]
            check_dtypes(p, q, paged_kv_cache)
            if q.shape[0] != len(p["last_page_len"]):
                raise ValueError("decode takes one query for each sequence")
            if self.made["use_tensor_cores"]:
                self.load_strided(paged_kv_cache)
            else:
                check_strides(paged_kv_cache, (0, 1, 2))
            k_scale, v_scale = scale_given(a)
            lens = (p["indptr"].diff() - 1).clamp(min=0) * p["page_size"] + p["last_page_len"]
            outs, lses = [], []
            for n, s_k in enumerate(lens.tolist()):
                pages = p["indices"][p["indptr"][n] : p["indptr"][n + 1]]
                k, v = (rows_of(cache, layout, pages, s_k) for cache in paged_kv_cache)
                seen = visible(1, s_k, False, p["window_left"])
                softcap = p["logits_soft_cap"] or 0.0
                out, lse = attention(q[n : n + 1], k, v, p["sm_scale"] * k_scale, seen, softcap)
                outs.append(out * v_scale)
                lses.append(lse)
            return self.finish(outs, lses, q, q.shape[-1], a, p["sm_scale"], within_reach(q, *q.shape[1:]))

    lib.add("flashinfer", BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper)

    @lib.method("flashinfer.decode.fast_decode_plan")
    def fast_decode_plan(wrapper: Any, global_override_indptr_cpu: Tensor | None, **a: Any) -> None:
        """The tables that a recorded wrapper reads are left to the caller."""
        assert wrapper.plans, "it uses the kernels that a plan has loaded"
        assert wrapper.graph, "the tables of a step that is not recorded would be these on the host"
        buffers = {name: wrapper.made[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")}
        if len(a["last_page_len"]) != len(buffers["last_page_len"]) or len(a["indices"]) > len(buffers["indices"]):
            raise ValueError("The batch size should be fixed in cudagraph mode")
        assert global_override_indptr_cpu is a["indptr"]
        kinds = {name: _dtype(a[name]) for name in ("q_data_type", "kv_data_type")}
        wrapper.a = {**wrapper.a, **a, **kinds, **buffers}
        wrapper.stamp()

    if not old:
        lib.add("flashinfer.decode", fast_decode_plan=fast_decode_plan)


def _ragged(lib: Library, key: str) -> None:
    class BatchPrefillWithRaggedKVCacheWrapper(Planned):
        __init__ = _beginning(lib, key)

        @lib.method(f"{key}.plan")
        def plan(self, **a: Any) -> None:
            if (a["head_dim_qk"], a["head_dim_vo"]) not in DIMS:
                raise RuntimeError("no kernel for these head dims")
            assert a["custom_mask"] is None
            assert all(a[name].dtype == torch.int32 for name in ("qo_indptr", "kv_indptr"))
            if self.made["backend"] == "fa3":
                check_room(self.integers, a["qo_indptr"], a["num_qo_heads"], a["head_dim_vo"], None)
            self.a = {**a, "q_data_type": _dtype(a["q_data_type"])}
            self.stamp()

        @lib.method(f"{key}.run")
        def run(self, q: Tensor, k: Tensor, v: Tensor, **a: Any) -> Any:
            p = self.a
            if q.dtype != p["q_data_type"]:
                raise ValueError("q is not of the dtype planned")
            q_starts, k_starts = p["qo_indptr"].tolist(), p["kv_indptr"].tolist()
            assert q.shape[0] == q_starts[-1]
            assert all(t.stride(-1) == 1 and t.data_ptr() % 16 == 0 for t in (q, k, v))
            fa3 = self.made["backend"] == "fa3"
            legible = by_tma(q, k, v) if fa3 else all(within_reach(t, *t.shape[1:]) for t in (q, k, v))
            outs, lses = [], []
            for n in range(len(q_starts) - 1):
                queries, of = q[q_starts[n] : q_starts[n + 1]], slice(k_starts[n], k_starts[n + 1])
                seen = visible(queries.shape[0], k[of].shape[0], p["causal"], p["window_left"])
                out, lse = attention(queries, k[of], v[of], p["sm_scale"], seen, p["logits_soft_cap"] or 0.0)
                outs.append(out)
                lses.append(lse)
            return self.finish(outs, lses, q, v.shape[-1], a, p["sm_scale"], legible)

    lib.add("flashinfer", BatchPrefillWithRaggedKVCacheWrapper=BatchPrefillWithRaggedKVCacheWrapper)


def _blocks(lib: Library, key: str) -> None:
    class VariableBlockSparseAttentionWrapper(Planned):
        """A plan lists keys one by one: heads lie one after the other, each as long as its sizes say."""

        @lib.method(f"{key}.__init__")
        def __init__(self, float_workspace_buffer: Tensor, backend: str) -> None:
            self.begin(float_workspace_buffer, False)
            self.made = {"backend": backend}

        @lib.method(f"{key}.reset_workspace_buffer")
        def reset_workspace_buffer(self, **a: Any) -> None:
            Planned.reset_workspace_buffer(self, **a)

        @lib.method(f"{key}.plan")
        def plan(self, block_mask_map: Tensor, block_row_sz: Tensor, block_col_sz: Tensor, **a: Any) -> None:
            heads, rows, columns = block_mask_map.shape
            assert a["num_qo_heads"] % a["num_kv_heads"] == 0
            assert heads == a["num_kv_heads"] == block_row_sz.shape[0] == block_col_sz.shape[0]
            assert (rows, columns) == (block_row_sz.shape[1], block_col_sz.shape[1])
            if a["causal"] or a["pos_encoding_mode"] != "NONE" or a["logits_soft_cap"]:
                raise NotImplementedError("no adapter wants these")
            if self.made["backend"] not in ("fa2", "fa3"):
                raise ValueError("the template is to be named")
            ends = block_col_sz.long().cumsum(1)
            listed = []
            for head, row in itertools.product(range(heads), range(rows)):
                first = int(ends[:head, -1].sum())
                spans = [
                    torch.arange(int(ends[head, c] - block_col_sz[head, c]), int(ends[head, c])) + first
                    for c in block_mask_map[head, row].nonzero().flatten().tolist()
                ]
                listed.append(torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64))
            if not sum(map(len, listed)):
                raise IndexError("index -1 is out of bounds for dimension 0 with size 0")
            starts = torch.cat([torch.zeros(1, dtype=torch.int32), block_row_sz.flatten().cumsum(0).int()])
            if self.made["backend"] == "fa3":
                check_room(self.integers, starts, a["num_qo_heads"] // heads, a["head_dim"], None)
            self.a = {**a, "q_data_type": _dtype(a["q_data_type"])}
            self.listed, self.starts = listed, starts.tolist()
            self.stamp()

        @lib.method(f"{key}.run")
        def run(self, q: Tensor, k: Tensor, v: Tensor, **a: Any) -> Any:
            p, heads = self.a, self.a["num_kv_heads"]
            if q.dtype != p["q_data_type"]:
                raise ValueError("q is not of the dtype planned")
            assert (q.shape[0], k.shape[0]) == (p["num_qo_heads"], heads)
            # Copied into rows of one head, whatever strides they had.
            flat = q.unflatten(0, (heads, -1)).transpose(1, 2).flatten(0, 1)
            keys, values = (t.flatten(0, 1)[:, None] for t in (k, v))
            assert self.starts[-1] == flat.shape[0]
            outs, lses = [], []
            for n, at in enumerate(self.listed):
                own = flat[self.starts[n] : self.starts[n + 1]]
                seen = torch.ones(own.shape[0], len(at), dtype=torch.bool)
                scale = 1.0 / math.sqrt(q.shape[-1]) if p["sm_scale"] is None else p["sm_scale"]
                out, lse = attention(own, keys[at], values[at], scale, seen)
                outs.append(out)
                lses.append(lse)
            found = self.finish(outs, lses, flat, v.shape[-1], {**a, "out": None, "lse": None}, scale)
            shaped = [
                t.unflatten(0, (heads, -1)).transpose(1, 2).flatten(0, 1).contiguous()
                for t in (found if a["return_lse"] else (found,))
            ]
            return tuple(shaped) if a["return_lse"] else shaped[0]

    lib.add("flashinfer", VariableBlockSparseAttentionWrapper=VariableBlockSparseAttentionWrapper)


def _latent(lib: Library, key: str) -> None:
    class MLAPlanMetadata:
        def __init__(self, **a: Any) -> None:
            self.a = a

        @classmethod
        @lib.method("flashinfer.mla.MLAPlanMetadata.csr")
        def csr(cls, **a: Any) -> Any:
            return cls(**a)

    class BatchMLAPagedAttentionWrapper(Planned):
        # Its plans are in integer workspaces only; a call leaves nothing in the other one.
        whose = 1

        __init__ = _beginning(lib, key)

        @lib.method(f"{key}.plan")
        def plan(self, metadata: Any, **a: Any) -> None:
            assert isinstance(metadata, MLAPlanMetadata), "flat metadata is deprecated"
            m = dict(metadata.a)
            counts = (m["kv_len_arr"] + a["page_size"] - 1) // a["page_size"]
            if not torch.equal(counts, m["kv_indptr"].diff()):
                raise ValueError("page counts in kv_indptr must equal ceil(kv_len_arr / page_size)")
            # Two tiles of 64 rows for each multiprocessor, of which a CPU is one: their output and their LSE.
            room = 2 * 64 * (2 * a["head_dim_ckv"] + 4)
            if self.workspace.numel() < room:
                raise RuntimeError(f"Buffer overflow when allocating memory for batch_mla: {room} bytes are needed")
            works = mla_works(m["qo_indptr"].diff().tolist(), m["kv_len_arr"].tolist(), a["num_heads"], a["causal"])
            if works > WORKS:
                raise ValueError(f"FA MLA needs {works} work items including KV splits; native capacity is {WORKS}.")
            if a["head_dim_ckv"] % 128 or a["head_dim_kpe"] % 64:
                raise ValueError("head_dim_ckv is a multiple of 128, head_dim_kpe of 64")
            if a["causal"] and 64 % a["num_heads"] and 128 % a["num_heads"]:
                raise ValueError("causal tile boundary is unsupported: native execution would omit a visible key")
            if self.graph:
                room = self.made["kv_indices"]
                room[: len(m["kv_indices"])].copy_(m["kv_indices"])
                m["kv_indices"] = room
                for name in ("qo_indptr", "kv_indptr", "kv_len_arr"):
                    if self.made[name].shape != m[name].shape:
                        raise ValueError(f"CUDA graph reserved {name} buffer has incompatible capacity.")
                    m[name] = self.made[name].copy_(m[name])
            self.a, self.m = a, m
            self.stamp()

        @lib.method(f"{key}.run")
        def run(self, query: Tensor, kv_cache: Tensor, **a: Any) -> Any:
            p, m = self.a, self.m
            assert a["q_nope"] is None, "separate tensors are deprecated"
            mode = ("basee" if a["return_lse_base_on_e"] else "base2") if a["return_lse"] else "none"
            if a["return_lse_base_on_e"] and not a["return_lse"]:
                mode = "basee"
            if mode != p["lse_mode"]:
                raise ValueError(f"MLA planned run argument LSE mode mismatch: planned {p['lse_mode']}, got {mode}")
            if query.ndim != 3 or kv_cache.ndim != 3 or query.dtype != p["q_data_type"]:
                raise ValueError("packed inputs have rank 3 and the dtype planned")
            starts, width = m["qo_indptr"].tolist(), p["head_dim_ckv"]
            if query.shape[0] != starts[-1] or len(m["kv_indices"]) < int(m["kv_indptr"][-1]):
                raise ValueError("query and kv_indices are those of the plan")
            outs, lses = [], []
            for n, s_k in enumerate(m["kv_len_arr"].tolist()):
                queries = query[starts[n] : starts[n + 1]]
                pages = m["kv_indices"][m["kv_indptr"][n] : m["kv_indptr"][n + 1]]
                rows = kv_cache[pages.long()].flatten(0, 1)[:s_k, None]
                seen = visible(queries.shape[0], s_k, p["causal"], -1)
                out, lse = attention(queries, rows, rows[..., :width], p["sm_scale"], seen)
                outs.append(out)
                lses.append(lse * math.log(2.0) if mode == "basee" else lse)
            return self.finish(outs, lses, query, width, a, p["sm_scale"])

    lib.add(
        "flashinfer.mla",
        MLAPlanMetadata=MLAPlanMetadata,
        BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper,
    )
