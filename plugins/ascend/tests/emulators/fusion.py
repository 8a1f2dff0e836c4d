"""npu_fusion_attention and its backward, from op-plugin 517f2e7: docs/zh/custom_APIs/torch_npu/
torch_npu-npu_fusion_attention.md and op_plugin/ops/opapi/FlashAttentionKernelNpuOpApi.cpp (checks, layouts, shapes).

Traps that are in here: scale 1.0 unless told; True hides; running sums without the 0, as host numbers; statistics eight
times each, of packed sequences heads first in the shape of tokens first unless softmax_layout says TND; without a mask
no mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from polyattn.testing.emulators import Library
from polyattn.testing.emulators.arithmetic import gradients

from .arithmetic import Rows, attend, check, hidden, scores

__all__ = ["register"]

MODULE = "torch_npu"
_HEADS = {"BNSD": 1, "BSND": 2, "TND": 1}


def register(lib: Library) -> None:
    """Both operators, as members of a library."""

    @lib.function(MODULE, "torch_npu.npu_fusion_attention")
    def npu_fusion_attention(
        query: Tensor, key: Tensor, value: Tensor, keep_prob: float, softmax_layout: str, **given: Any
    ) -> tuple[Any, ...]:
        assert all(given.pop(name) is None for name in ("pse", "padding_mask", "prefix", "sink", "dropout_mask"))
        check(0 < keep_prob <= 1, f"The keep_prob value must be in range of (0, 1], but got {keep_prob}")
        _checked(query, key, value, softmax_layout, given)
        lens = given["actual_seq_qlen"], given["actual_seq_kvlen"]
        sides = (query, lens[0]), (key, lens[1]), (value, lens[1])
        found = [_forward(*part, given, keep_prob=keep_prob) for part in _parts(given, *sides)]
        packed, layout = given["input_layout"] == "TND", given["input_layout"]
        out = torch.cat([_back(rows.out, layout) for rows in found])
        stats = [torch.cat([getattr(rows, name) for rows in found], 2 if packed else 0) for name in ("top", "total")]
        stats = [t.unsqueeze(-1).expand(*t.shape, 8).contiguous() for t in stats]
        if packed and softmax_layout == "TND":
            stats = [t[0].transpose(0, 1).contiguous() for t in stats]
        elif packed:
            stats = [t.reshape(query.shape[0], query.shape[1], 8) for t in stats]
        return (out, *stats, query.new_empty(0), 0, 0, 0)

    @lib.function(MODULE, "torch_npu.npu_fusion_attention_grad")
    def npu_fusion_attention_grad(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dy: Tensor,
        softmax_max: Tensor,
        softmax_sum: Tensor,
        attention_in: Tensor,
        scale_value: float,
        keep_prob: float,
        softmax_layout: str,
        **given: Any,
    ) -> tuple[Tensor, ...]:
        assert all(given.pop(name) is None for name in ("pse", "padding_mask", "prefix", "sink", "softmax_in"))
        assert keep_prob == 1.0
        given["scale"] = scale_value
        _checked(query, key, value, softmax_layout, given)
        check(dy.shape == attention_in.shape and dy.dtype == attention_in.dtype == query.dtype, "dy and attention_in")
        layout, lens = given["input_layout"], (given["actual_seq_qlen"], given["actual_seq_kvlen"])
        stats = []
        for stat in (softmax_max, softmax_sum):
            check(stat.dtype == torch.float32 and stat.shape[-1] == 8 and stat.is_contiguous(), "softmax_max and _sum")
            check(bool((stat == stat[..., :1]).all()), "eight copies of each statistic")
            own = stat[..., :1]
            if layout == "TND" and softmax_layout != "TND":
                own = own.reshape(query.shape[1], query.shape[0], 1).transpose(0, 1)
            stats.append(own if layout == "TND" else own.transpose(1, 2) if layout == "BSND" else own)
        sides = [(t, lens[0]) for t in (query, dy, attention_in, *stats)] + [(t, lens[1]) for t in (key, value)]
        grads = [_backward(*part, given) for part in _parts(given, *sides)]
        dq, dk, dv = (torch.cat([_back(g, layout) for g in own]) for own in zip(*grads, strict=True))
        return dq, dk, dv, query.new_empty(0), query.new_empty(0)


def _checked(query: Tensor, key: Tensor, value: Tensor, softmax_layout: str, given: dict[str, Any]) -> None:
    layout, heads = given["input_layout"], given["head_num"]
    check(layout in _HEADS, f"The input_layout should be BSH/SBH/BNSD/BSND/TND, but got {layout}; BSH, SBH not here")
    check(query.dim() == len(layout), f"The shapes of the input query should be those of {layout}")
    check(softmax_layout in ("", "TND"), "only supported softmax_layout=TND")
    check(softmax_layout == "" or layout == "TND", "softmax_layout=TND only supported when input_layout_str=TND")
    axis = _HEADS[layout]
    check(query.dtype == key.dtype == value.dtype, "one dtype")
    check(query.dtype in (torch.float16, torch.bfloat16, torch.float32), "float16, bfloat16 or float32")
    check(query.shape[axis] == heads and 1 <= heads <= 256, "head_num is the queries'")
    check(key.shape[:-1] == value.shape[:-1] and heads % key.shape[axis] == 0, "heads of key and value")
    dims = [t.shape[-1] for t in (query, key, value)]
    check(1 <= dims[0] <= 768 and dims[0] == dims[1] >= dims[2], "Dq = Dk >= Dv, 1 to 768")
    check(given["sparse_mode"] in range(5), "the modes that are emulated")
    check(min(query.numel(), key.numel(), value.numel()) > 0, "S is 1 to 1M")
    lens = given["actual_seq_qlen"], given["actual_seq_kvlen"]
    if layout != "TND":
        check(query.shape[0] == key.shape[0], "B must be equal")
        assert lens == (None, None)
        return
    both = all(lens) and len(lens[0]) == len(lens[1])
    check(both, "the size of actual_seq_qlen and actual_seq_kvlen must be the same and cannot be empty.")
    for ends, tensor in zip(lens, (query, key), strict=True):
        check(ends == sorted(ends) and ends[-1] == tensor.shape[0], "running sums that end with T")
        check(len(ends) <= 1024, "at most 1K sequences")
    if given["atten_mask"] is not None:
        check(given["atten_mask"].dim() == 2, "packed sequences take masks [S, S] only")


def _parts(given: dict[str, Any], *sides: tuple[Tensor, list[int] | None]) -> Iterator[list[Tensor]]:
    """[B, N, S, D] of what is computed together: all, or each packed sequence."""
    layout = given["input_layout"]
    if layout != "TND":
        yield [t if layout == "BNSD" else t.transpose(1, 2) for t, _ in sides]
        return
    count = len(given["actual_seq_qlen"])
    for n in range(count):
        part = []
        for tensor, ends in sides:
            assert ends is not None
            part.append(tensor[(ends[n - 1] if n else 0) : ends[n]].transpose(0, 1)[None])
        yield part


def _back(tensor: Tensor, layout: str) -> Tensor:
    if layout == "TND":
        return tensor[0].transpose(0, 1)
    return tensor if layout == "BNSD" else tensor.transpose(1, 2)


def _unseen(given: dict[str, Any], s_q: int, s_k: int) -> Tensor | None:
    mask, mode = given["atten_mask"], given["sparse_mode"]
    return hidden(mode, mask, given["pre_tockens"], given["next_tockens"], s_q, s_k)


def _shaped(unseen: Tensor | None, logits: Tensor) -> Tensor | None:
    """Masks are [B, N, S, S], [B, 1, S, S], [1, 1, S, S] or [S, S]."""
    if unseen is not None and unseen.dim() == 4:
        B, N = logits.shape[:2]
        check(tuple(unseen.shape[:2]) in ((B, N), (B, 1), (1, 1)), f"atten_mask of shape {list(unseen.shape)}")
    return unseen


def _forward(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any], keep_prob: float) -> Rows:
    s_q, s_k = query.shape[2], key.shape[2]
    logits = scores(query, key, given["scale"])
    if not s_k:
        # No key at all: not written.
        blank = query.new_full((*query.shape[:3], value.shape[3]), torch.nan)
        return Rows(blank, *(blank[..., 0].float(),) * 2)
    unseen = _shaped(_unseen(given, s_q, s_k), logits)
    repaired = given["inner_precise"] == 2 or (given["sparse_mode"] == 3 and s_q > s_k)
    return attend(logits, value, unseen, repaired=repaired, keep=keep_prob, rounded=query.dtype)


def _backward(
    query: Tensor,
    dy: Tensor,
    attention_in: Tensor,
    top: Tensor,
    total: Tensor,
    key: Tensor,
    value: Tensor,
    given: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    logits = scores(query, key, given["scale"])
    weights = torch.exp(logits - top) / total
    unseen = _shaped(_unseen(given, query.shape[2], key.shape[2]), logits)
    if unseen is not None:
        weights = weights.masked_fill(unseen.expand(weights.shape), 0.0)
    sides = (t.transpose(1, 2) for t in (dy, query, key, value, attention_in))
    dq, dk, dv = gradients(*sides, weights, given["scale"], rounded=query.dtype)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
