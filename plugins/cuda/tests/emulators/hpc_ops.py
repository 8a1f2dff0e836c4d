"""HPC-Ops as src/attention/entry.cc and its tests say. Free slots of a page are multiplied by 0, not skipped."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.testing.emulators import Library
from polyattn.testing.emulators.arithmetic import scores, weighted

from . import SIGNATURES

__all__ = ["library"]

MODULE = "hpc.attention"


def library() -> Library:
    lib = Library("hpc-ops", "0.0.1.dev0+g6e2eced", MODULE, signatures=SIGNATURES)

    @lib.function(MODULE, "hpc.attention_decode_bf16")
    def attention_decode_bf16(
        q: Tensor,
        kcache: Tensor,
        vcache: Tensor,
        block_ids: Tensor,
        num_seq_kvcache: Tensor,
        mtp: int,
        new_kv_included: bool,
        output: Tensor | None,
        **more: object,
    ) -> Tensor:
        assert new_kv_included
        assert more == {"splitk": True, "task_map": None, "split_flag": None}
        _check(q.shape[0] // num_seq_kvcache.shape[0] == mtp + 1, "every request num_seq_q must be mtp + 1")
        _check(block_ids.is_contiguous() and num_seq_kvcache.is_contiguous(), "must be contiguous")
        starts = list(range(q.shape[0] + 1))
        return _attend(q, kcache, vcache, block_ids, starts, num_seq_kvcache.tolist(), output)

    @lib.function(MODULE, "hpc.attention_with_kvcache_prefill_bf16")
    def attention_with_kvcache_prefill_bf16(
        q: Tensor,
        kcache: Tensor,
        vcache: Tensor,
        cu_seqlens_q: Tensor,
        block_ids: Tensor,
        seqlens_kvcache: Tensor,
        max_seqlens_q: int,
        output: Tensor | None,
    ) -> Tensor:
        for given in (cu_seqlens_q, block_ids, seqlens_kvcache):
            # Read as they lie in memory: with gaps between them the numbers are others.
            assert given.is_contiguous(), "strided lengths are read wrongly"
        assert max_seqlens_q >= int(cu_seqlens_q.diff().max())
        late = (cu_seqlens_q.diff() >= 128) & (seqlens_kvcache < cu_seqlens_q.diff())
        assert not late.any(), "the consumers of a tile without keys wait for ever"
        return _attend(q, kcache, vcache, block_ids, cu_seqlens_q.tolist(), seqlens_kvcache.tolist(), output)

    return lib


def _check(held: bool, message: str) -> None:
    if not held:
        raise RuntimeError(message)


def _attend(
    q: Tensor,
    kcache: Tensor,
    vcache: Tensor,
    block_ids: Tensor,
    starts: list[int],
    lengths: list[int],
    output: Tensor | None,
) -> Tensor:
    _check(q.dtype == kcache.dtype == vcache.dtype == torch.bfloat16, "bfloat16")
    _check(q.shape[2] == 128 and vcache.shape[3] == 128, "expected dim_qk=128 and dim_v=128")
    _check(q.stride()[1:] == (128, 1), "heads of a token lie one after the other")
    for given in (q, kcache, vcache, *([] if output is None else [output])):
        # An axis of one included: TMA is told its stride.
        odd = given.data_ptr() % 16 or any(stride * given.itemsize % 16 for stride in given.stride()[:-1])
        assert not odd, "a TMA descriptor that is none, and is used"
    _check(kcache.shape[1] == 64, "kvcache paged blocksize")
    _check(q.shape[1] // kcache.shape[2] in (4, 8), "we only support num_head_q / num_head_k == 4 or 8.")
    _check(block_ids.dtype == torch.int32, "block_ids dtype must be int32")
    _check(output is None or output.is_contiguous(), "output tensor must be contiguous")
    y = torch.empty_like(q) if output is None else output
    for n, length in enumerate(lengths):
        rows = slice(starts[n], starts[n + 1])
        pages = block_ids[n, : -(-length // 64)].long()
        keys, values = (cache[pages].flatten(0, 1) for cache in (kcache, vcache))
        last = torch.arange(rows.stop - rows.start) + length - (rows.stop - rows.start)
        logits = scores(q[rows], keys, 128**-0.5, torch.arange(keys.shape[0]) <= last[:, None])
        # Of no keys at all 0 / 0.
        y[rows] = weighted(logits.softmax(-1).bfloat16().float(), values).bfloat16() if length else torch.nan
    return y
