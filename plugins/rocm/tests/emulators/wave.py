"""Wave kernels behind SGLang's calls: sglang/srt/layers/attention/wave_ops/{decode,extend}_attention.py, and the
templates that they compile (wave_lang/kernel/wave/templates/{paged_decode_attention,extend_attention}.py).

Decode is not told the scale. What is hidden has -1e6 added to its logit, in base 2. Extend does not read the masks that
it is given, and its own keys are those of its queries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.testing.emulators import Library

from . import SIGNATURES
from .attention import Rule, attend, parts

__all__ = ["library"]

_OPS = "sglang.srt.layers.attention.wave_ops"
TILE = 64


def _check(a: dict[str, Any], *names: str) -> None:
    for name in names:
        assert a[name].is_contiguous(), f"{name}: memory of a static layout"
    assert a[names[0]].dtype in (torch.float16, torch.bfloat16), "Unsupported input datatype"


def library() -> Library:
    decode, extend = f"{_OPS}.decode_attention", f"{_OPS}.extend_attention"
    lib = Library("sglang", "0.5.23", decode, extend, signatures=SIGNATURES)

    @lib.function(decode, "sglang.wave_ops.decode_attention_intermediate_arrays_shapes")
    def shapes(num_seqs: int, head_size_kv: int, num_query_heads: int, max_kv_splits: int) -> Any:
        heads = (max_kv_splits, num_seqs, num_query_heads)
        return (*heads, head_size_kv), heads

    @lib.function(decode, "sglang.wave_ops.decode_attention_wave")
    def decode_attention_wave(**a: Any) -> None:
        _check(a, "q", "k_buffer", "v_buffer", "o", "b_req_idx", "req_to_token")
        q, tokens = a["q"], a["req_to_token"].long()
        splits = (a["max_kv_splits"], *q.shape[:2])
        assert a["attn_logits"].shape == (*splits, q.shape[2])
        assert a["attn_logits_max"].shape == splits
        rule = Rule(q.shape[2] ** -0.5, False, softcap=a["logit_cap"])
        ones = torch.arange(q.shape[0] + 1, dtype=torch.int32)
        for x, y in parts(ones, a["b_req_idx"]):
            read = tokens[y.start : y.start - (y.start - y.stop) // TILE * TILE]
            found, _ = attend(q[x], a["k_buffer"][tokens[y]], a["v_buffer"][read], rule)
            a["o"][x] = found.to(q.dtype)

    @lib.function(extend, "sglang.wave_ops.extend_attention_wave")
    def extend_attention_wave(**a: Any) -> None:
        _check(a, "q_extend", "k_extend", "v_extend", "k_buffer", "v_buffer", "output", "kv_indices")
        q, tokens = a["q_extend"], a["kv_indices"].long()
        pairs = (("k_buffer", "k_extend"), ("v_buffer", "v_extend"))
        rule = Rule(a["layer_scaling"] or q.shape[2] ** -0.5, a["is_causal"], softcap=a["logit_cap"])
        for x, y in parts(a["qo_indptr"], a["kv_indptr"]):
            assert x.stop - x.start <= a["max_seq_len"]
            sides: list[Tensor] = [torch.cat([a[pool][tokens[y]], a[own][x]]) for pool, own in pairs]
            a["output"][x] = attend(q[x], *sides, rule)[0].to(q.dtype)

    return lib
