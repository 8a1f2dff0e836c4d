"""Bad inputs: each raises a typed error that says what, which value, what is allowed and what to do next."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_upper_left

import polyattn
from polyattn import envvars
from polyattn.contract import AttentionRequest
from polyattn.dispatch import dense as dispatch
from polyattn.errors import (
    BackendUnavailableError,
    ConfigError,
    InvalidInputError,
    PolyattnError,
    UnsupportedRequestError,
)
from polyattn.semantics import validation as validate

CORE = Path(polyattn.__file__).parent


def dense(**changes: Any) -> Any:
    """A call that is fine but for the changes. B=2, S_q=3, S_k=4, H_q=4, H_kv=2, D=8."""
    arguments = {"query": torch.ones(2, 3, 4, 8), "key": torch.ones(2, 4, 2, 8), "value": torch.ones(2, 4, 2, 8)}
    return polyattn.attention(**{**arguments, **changes})


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(**changes: Any) -> Any:
    """Two sequences of 2 and 3 tokens; H_q=4, H_kv=2, D=8."""
    arguments = {
        "query": torch.ones(5, 4, 8),
        "key": torch.ones(5, 2, 8),
        "value": torch.ones(5, 2, 8),
        "cu_seqlens_q": int32(0, 2, 5),
        "cu_seqlens_k": int32(0, 2, 5),
        "max_seqlen_q": 3,
        "max_seqlen_k": 3,
    }
    return polyattn.varlen_attention(**{**arguments, **changes})


def paged(**changes: Any) -> Any:
    """Two sequences with 1 and 2 queries and 5 and 7 keys in pages of 4; H_q=4, H_kv=2, D=8."""
    arguments = {
        "query": torch.ones(3, 4, 8),
        "key_cache": torch.ones(6, 4, 2, 8),
        "value_cache": torch.ones(6, 4, 2, 8),
        "page_table": int32([0, 1], [2, 3]),
        "seq_lens": int32(5, 7),
        "cu_seqlens_q": int32(0, 1, 3),
        "max_seqlen_q": 2,
        "max_seqlen_k": 7,
        "backend": "reference",
    }
    return polyattn.paged_attention(**{**arguments, **changes})


def latent(**changes: Any) -> Any:
    """One sequence of 3 keys and 1 query over latent rows of 12 numbers, 8 of them the value."""
    arguments = {
        "query": torch.ones(1, 4, 12),
        "cache": torch.ones(2, 4, 12),
        "page_table": int32([1]),
        "seq_lens": int32(3),
        "cu_seqlens_q": int32(0, 1),
        "max_seqlen_q": 1,
        "max_seqlen_k": 3,
        "scale": 0.3,
        "v_head_dim": 8,
        "backend": "reference",
    }
    return polyattn.mla_attention(**{**arguments, **changes})


def sdpa(*shapes: tuple[int, ...], **named: Any) -> Any:
    return polyattn.scaled_dot_product_attention(*(torch.ones(s) for s in shapes), **named)


class DTensor(Tensor):
    """Stands for torch.distributed's class of this name, which needs a process group."""


QUERY, KEY = torch.ones(2, 3, 4, 8), torch.ones(2, 4, 2, 8)
GRAD = QUERY.clone().requires_grad_()
STRIDED = torch.ones(2, 3, 8, 4).transpose(2, 3)
NAN, INF = float("nan"), float("inf")
PAGES = torch.ones(6, 4, 2, 8)


def nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():  # torch calls them a prototype
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(3, 4, 8), torch.ones(2, 4, 8)], layout=layout)


Case = tuple[str, Callable[[], Any], str]

DENSE: list[Case] = [
    (
        "query is a list",
        lambda: dense(query=[1.0]),
        r"query is a list, a tensor \[B, S, H, D\] is needed",
    ),
    ("key is None", lambda: dense(key=None), "key is a NoneType, a tensor"),
    (
        "3-D",
        lambda: dense(query=QUERY[0]),
        r"query has 3 dimensions \(3, 4, 8\), 4 are needed: \[B, S, H, D\]",
    ),
    ("5-D", lambda: dense(value=KEY[None]), r"value has 5 dimensions .* 4 are needed"),
    ("layout BHSD is said", lambda: dense(query=QUERY[0], layout="BHSD"), r"needed: \[B, H, S, D\]"),
    (
        "nested",
        lambda: dense(query=nested(torch.strided)),
        "query is a nested tensor; pass packed .*varlen_attention",
    ),
    (
        "jagged",
        lambda: dense(value=nested(torch.jagged)),
        r"value is a nested tensor; .*\(its .values\(\) and int32 .offsets\(\)\)",
    ),
    (
        "DTensor",
        lambda: dense(key=KEY.as_subclass(DTensor)),
        r"key is a DTensor.*pass key.to_local\(\)",
    ),
    *(
        (
            f"{name} {layout}",
            lambda name=name, made=made: dense(**{name: made}),
            rf"^{name} is a tensor of layout {layout}; a dense one is needed: pass {name}.to_dense\(\)$",
        )
        for layout, made in (
            ("sparse_coo", KEY.to_sparse()),
            ("mkldnn", KEY.to_mkldnn()),
        )
        for name in ("query", "key", "value", "attn_mask", "sinks", "out")
    ),
    (
        "integers",
        lambda: dense(query=QUERY.int()),
        "query is torch.int32; float32, float16, bfloat16 or float64 is needed",
    ),
    ("complex", lambda: dense(value=KEY.to(torch.complex64)), "value is torch.complex64; float32"),
    (
        "mixed dtypes",
        lambda: dense(key=KEY.half()),
        "query is torch.float32, key torch.float16, value torch.float32; cast them to one dtype, or use autocast",
    ),
    (
        "two devices",
        lambda: dense(key=KEY.to("meta")),
        "key is on meta, query on cpu; move them to one device",
    ),
    (
        "last axis not dense",
        lambda: dense(query=STRIDED),
        r"query's last axis is not dense \(strides \(96, 32, 1, 4\)\); pass query.contiguous\(\)",
    ),
    (
        "head dims",
        lambda: dense(key=KEY[..., :6]),
        "query has head dim 8, key 6; they must be equal",
    ),
    (
        "no head dim",
        lambda: dense(value=KEY[..., :0]),
        "head dims are 8 and 0; both must be at least 1",
    ),
    (
        "H_q no multiple of H_kv",
        lambda: dense(query=torch.ones(2, 3, 5, 8)),
        "query has 5 heads, key and value 2: H_q must be a multiple of H_kv",
    ),
    (
        "BHSD without saying so",
        lambda: dense(query=torch.ones(2, 4, 3, 8), key=torch.ones(2, 2, 5, 8), value=torch.ones(2, 2, 5, 8)),
        r"query has 3 heads, key and value 5: .* of H_kv; tensors in \[B, H, S, D\] need layout='BHSD'$",
    ),
    (
        "BSHD as BHSD",
        lambda: dense(layout="BHSD"),
        r"query has 3 heads, key and value 4: .* of H_kv; tensors in \[B, S, H, D\] need layout='BSHD'$",
    ),
    (
        "heads that fit no layout",
        lambda: dense(query=torch.ones(2, 3, 5, 8)),
        "H_q must be a multiple of H_kv$",
    ),
    ("no heads", lambda: dense(query=QUERY[:, :, :0]), "query has 0 heads, key and value 2"),
    (
        "heads of key and value",
        lambda: dense(value=KEY[:, :, :1]),
        "key has 2 heads, value 1; they must be equal",
    ),
    (
        "batches",
        lambda: dense(key=KEY[:1]),
        "batch sizes differ: query 2, key 1, value 2; expand them",
    ),
    ("lengths", lambda: dense(value=KEY[:, :3]), "key has 4 positions, value 3; they must be equal"),
]

STATIC: list[Case] = [
    (
        "causal",
        lambda: dense(causal="left"),
        r"causal='left' must be True \(bottom-right\).*'top_left'",
    ),
    ("causal is 2", lambda: dense(causal=2), "causal=2 must be True"),
    ("causal tensor", lambda: dense(causal=torch.ones(())), "causal=tensor.* must be True"),
    (
        "window length",
        lambda: dense(window=(1, 2, 3)),
        r"window=\(1, 2, 3\) must be a pair \(left, right\)",
    ),
    ("causal array", lambda: dense(causal=np.array([1, 2])), r"^causal=array\(\[1, 2\]\) must be True"),
    ("window array", lambda: dense(window=np.array([3, 0])), r"^window=array\(\[3, 0\]\) must be a pair"),
    ("layout array", lambda: dense(layout=np.array(["BSHD", "a"])), "^layout=array.* must be one of BSHD, BHSD"),
    ("window int", lambda: dense(window=128), "window=128 must be a pair .* -1 = unlimited"),
    (
        "window negative",
        lambda: dense(window=(-2, 0)),
        r"window=\(-2, 0\): the left bound must be an integer >= 0",
    ),
    ("window list", lambda: dense(window=[3, -5]), r"the right bound .*of W tokens is \(W - 1, 0\)"),
    (
        "window float",
        lambda: dense(window=(2.5, 0)),
        "the left bound must be an integer >= 0, or -1",
    ),
    ("window of lists", lambda: dense(window=[[1], 0]), "the left bound must be an integer"),
    (
        "softcap negative",
        lambda: dense(softcap=-1.0),
        "softcap=-1.0 must be a finite number >= 0; 0 is off",
    ),
    ("softcap NaN", lambda: dense(softcap=NAN), "softcap=nan must be a finite number"),
    ("softcap None", lambda: dense(softcap=None), "softcap=None must be a finite number"),
    (
        "scale NaN",
        lambda: dense(scale=NAN),
        r"scale=nan must be a finite number, or None for D_qk \*\* -0.5",
    ),
    ("scale inf", lambda: dense(scale=INF), "scale=inf must be a finite number"),
    ("scale tensor", lambda: dense(scale=torch.ones(())), "scale=tensor.* must be a finite number"),
    ("scale text", lambda: dense(scale="8"), "scale='8' must be a finite number"),
    ("layout", lambda: dense(layout="SBHD"), "layout='SBHD' must be one of BSHD, BHSD"),
    ("dropout 1", lambda: dense(dropout_p=1.0), "dropout_p=1.0 must be a probability, 0 <= p < 1"),
    ("dropout < 0", lambda: dense(dropout_p=-0.1), "dropout_p=-0.1 must be a probability"),
    ("dropout True", lambda: dense(dropout_p=True), "dropout_p=True must be a probability"),
    ("bind", lambda: polyattn.bind(window=(0, -3)), r"window=\(0, -3\): the right bound"),
]

OPTIONAL: list[Case] = [
    (
        "mask 2-D",
        lambda: dense(attn_mask=torch.ones(3, 4)),
        r"attn_mask has 2 dimensions .*\[2 or 1, 4 or 1, 3, 4\]",
    ),
    (
        "mask shape",
        lambda: dense(attn_mask=torch.ones(2, 2, 3, 4)),
        r"attn_mask has shape \(2, 2, 3, 4\), allowed: \[2 or 1, 4 or 1, 3, 4\] \(B\|1, H_q\|1, S_q, S_k\)",
    ),
    (
        "mask transposed",
        lambda: dense(attn_mask=torch.ones(1, 1, 4, 3)),
        r"attn_mask has shape \(1, 1, 4, 3\), allowed: ",
    ),
    *(
        (f"mask {shape}", lambda shape=shape: dense(attn_mask=torch.ones(shape)), rf"S_q, S_k\){re.escape(step)}$")
        for shape, step in (
            ((3, 4), "; pass attn_mask[None, None]"),
            ((1, 4), "; pass attn_mask[None, None].expand(-1, -1, 3, -1)"),
            ((2, 4), "; pass attn_mask[:, None, None].expand(-1, -1, 3, -1)"),
            ((4, 3, 4), "; pass attn_mask[None]"),
            ((2, 3, 4), "; pass attn_mask[:, None]"),
            ((2, 1, 1, 4), "; pass attn_mask.expand(-1, -1, 3, -1)"),
            ((3, 3, 4), ""),
            ((3, 1, 1, 4), ""),
            ((4,), ""),
        )
    ),
    (
        "mask of one batch",
        lambda: polyattn.attention(QUERY[:1], KEY[:1], KEY[:1], attn_mask=torch.ones(3, 5)),
        r"4 are needed: \[1, 4 or 1, 3, 4\]",
    ),
    (
        "mask dtype",
        lambda: dense(attn_mask=torch.ones(1, 1, 3, 4, dtype=torch.long)),
        r"attn_mask is torch.int64; bool \(True = attend\) or a float",
    ),
    (
        "mask device",
        lambda: dense(attn_mask=torch.ones(1, 1, 3, 4, device="meta")),
        "attn_mask is on meta, query on cpu; move it",
    ),
    ("mask is True", lambda: dense(attn_mask=True), "attn_mask is a bool, a tensor"),
    (
        "sinks length",
        lambda: dense(sinks=torch.ones(2)),
        "sinks has 2 entries, one per query head is needed: 4",
    ),
    ("alibi length", lambda: dense(alibi=torch.ones(2)), "alibi has 2 entries, one per query head is needed: 4"),
    ("alibi rank", lambda: dense(alibi=torch.ones(2, 4)), r"alibi has 2 dimensions .*\[4\] \(H_q\), one slope per"),
    ("alibi dtype", lambda: dense(alibi=torch.ones(4).int()), "alibi is torch.int32; a float dtype is needed"),
    ("alibi no tensor", lambda: dense(alibi=0.5), "alibi is a float, a tensor"),
    (
        "alibi trains",
        lambda: dense(alibi=torch.ones(4).requires_grad_()),
        r"alibi requires a gradient, and slopes have none; pass alibi.detach\(\)",
    ),
    ("alibi, packed", lambda: packed(alibi=torch.ones(3)), "alibi has 3 entries, one per query head is needed: 4"),
    ("alibi, paged", lambda: paged(alibi=torch.ones(3)), "alibi has 3 entries, one per query head is needed: 4"),
    ("chunk", lambda: dense(chunk=-1), "chunk=-1 must be a number of keys, an int from 1 to 1073741824; 0 is off"),
    ("chunk, too long", lambda: dense(chunk=2**63), "chunk=9223372036854775808 must be a number of keys"),
    ("chunk is a flag", lambda: dense(chunk=True), "chunk=True must be a number of keys"),
    ("chunk is None", lambda: dense(chunk=None), "chunk=None must be a number of keys"),
    ("chunk, packed", lambda: packed(chunk=2.0), "chunk=2.0 must be a number of keys"),
    ("chunk, paged", lambda: paged(chunk="4"), "chunk='4' must be a number of keys"),
    (
        "segments of other lengths",
        lambda: dense(segments=int32([0, 0, 1], [0, 1, 1])),
        r"segments of the key tokens have shape \(2, 3\), \[2, 4\] is needed; a pair",
    ),
    (
        "segments of a batch",
        lambda: dense(segments=(int32([0, 0, 1]), int32([0, 1, 1, 1]))),
        r"segments of the query tokens have shape \(1, 3\), \[2, 3\] is needed$",
    ),
    (
        "segments dtype",
        lambda: dense(segments=(torch.zeros(2, 3), torch.zeros(2, 4))),
        "segments of the query tokens is torch.float32; int32 is needed",
    ),
    (
        "segments of three",
        lambda: dense(segments=(torch.zeros(2, 3),) * 3),
        "segments of the query tokens is a tuple, a tensor",
    ),
    (
        "segments elsewhere",
        lambda: dense(segments=tuple(torch.zeros(2, n, dtype=torch.int32, device="meta") for n in (3, 4))),
        "segments of the query tokens are on meta, query on cpu; move them",
    ),
    (
        "segments of a packed part",
        lambda: polyattn.bind_part(layout="THD").forward(
            *(torch.ones(5, n, 8) for n in (4, 2, 2)),
            cu_seqlens_q=int32(0, 5),
            cu_seqlens_k=int32(0, 5),
            max_seqlen_q=5,
            max_seqlen_k=5,
            segments=int32([0] * 5),
        ),
        "segments are given to a part with layout='THD', whose cu_seqlens say the same",
    ),
    ("sinks 2-D", lambda: dense(sinks=torch.ones(1, 5)), r"sinks has 2 dimensions .*\[4\] \(H_q\)"),
    (
        "sinks dtype",
        lambda: dense(sinks=torch.ones(4).int()),
        "sinks is torch.int32; a float dtype is needed",
    ),
    (
        "sinks device",
        lambda: dense(sinks=torch.ones(4, device="meta")),
        "sinks is on meta, query on cpu",
    ),
    ("sinks number", lambda: dense(sinks=0.5), r"sinks is a float, a tensor \[4\]"),
    (
        "out shape",
        lambda: dense(out=torch.ones(2, 4, 3, 8)),
        r"out is \(2, 4, 3, 8\) torch.float32 on cpu; \(2, 3, 4, 8\) torch.float32 on cpu is needed",
    ),
    (
        "out dtype",
        lambda: dense(out=torch.ones(2, 3, 4, 8).half()),
        r"out is .* torch.float16 on cpu",
    ),
    ("out device", lambda: dense(out=QUERY.to("meta")), "out is .* on meta"),
    ("out strides", lambda: dense(out=STRIDED), "out's last axis is not dense .*strides"),
    (
        "out expanded",
        lambda: dense(out=torch.zeros(2, 1, 4, 8).expand(2, 3, 4, 8)),
        r"^out has several elements in one place \(strides \(32, 0, 8, 1\) of \(2, 3, 4, 8\)\), as an expanded tensor",
    ),
    (
        "out of overlapping rows",
        lambda: dense(out=torch.zeros(200).as_strided((2, 3, 4, 8), (96, 32, 4, 1))),
        "^out has several elements in one place",
    ),
    (
        "out is query",
        lambda: dense(query=QUERY, out=QUERY),
        "out shares memory with an input; pass a tensor of its own",
    ),
    (
        "out with gradients",
        lambda: dense(query=GRAD, out=torch.ones(2, 3, 4, 8)),
        r"out= cannot be used while gradients are wanted; drop it, or run under torch.no_grad\(\)",
    ),
    ("out is a list", lambda: dense(out=[]), "out is a list, a tensor"),
]

VARLEN: list[Case] = [
    ("4-D", lambda: packed(query=QUERY), r"query has 4 dimensions .* 3 are needed: \[T, H, D\]"),
    ("key is text", lambda: packed(key="k"), "key is a str, a tensor"),
    (
        "tokens",
        lambda: packed(value=torch.ones(4, 2, 8)),
        "key has 5 tokens, value 4; they must be equal",
    ),
    (
        "cu_seqlens is a list",
        lambda: packed(cu_seqlens_q=[0, 2, 5]),
        "cu_seqlens_q is a list, a tensor",
    ),
    (
        "cu_seqlens int64",
        lambda: packed(cu_seqlens_k=torch.tensor([0, 2, 5])),
        r"cu_seqlens_k is torch.int64; int32 is needed: cu_seqlens_k.to\(torch.int32\)",
    ),
    (
        "cu_seqlens with gaps",
        lambda: packed(cu_seqlens_k=int32([0, 9], [2, 9], [5, 9])[:, 0]),
        r"cu_seqlens_k's last axis is not dense \(strides \(2,\)\); pass cu_seqlens_k.contiguous\(\)",
    ),
    (
        "cu_seqlens empty",
        lambda: packed(cu_seqlens_q=int32()),
        "cu_seqlens_q is empty; it has one entry more than there are sequences",
    ),
    (
        "cu_seqlens device",
        lambda: packed(cu_seqlens_q=int32(0, 2, 5).to("meta")),
        "cu_seqlens_q is on meta, query on cpu; move it",
    ),
    (
        "cu_seqlens starts",
        lambda: packed(cu_seqlens_q=int32(1, 2, 5)),
        "cu_seqlens_q starts with 1; it must start with 0",
    ),
    (
        "cu_seqlens under vmap",
        lambda: torch.func.vmap(lambda cu: packed(cu_seqlens_q=cu))(int32([0, 2, 5], [0, 3, 5])),
        r"cu_seqlens_q cannot be read on the host: .*set of lengths \(in_dims=None for cu_seqlens_q\), or call once",
    ),
    (
        "cu_seqlens ends short",
        lambda: packed(cu_seqlens_k=int32(0, 2, 4)),
        r"cu_seqlens_k ends at 4, the packed batch has 5 tokens; .*, cut it off and pass key\[:4\] and value\[:4\]$",
    ),
    (
        "cu_seqlens of queries ends short",
        lambda: packed(cu_seqlens_q=int32(0, 2, 4)),
        r"cu_seqlens_q ends at 4, .* pass query\[:4\]$",
    ),
    (
        "cu_seqlens ends past T",
        lambda: packed(cu_seqlens_q=int32(0, 2, 9)),
        "cu_seqlens_q ends at 9, the packed batch has 5 tokens; they must agree$",
    ),
    (
        "cu_seqlens falls",
        lambda: packed(cu_seqlens_q=int32(0, 7, 5)),
        "cu_seqlens_q falls from 7 to 5 at 1; it must not decrease",
    ),
    (
        "cu_seqlens of two lengths",
        lambda: packed(cu_seqlens_k=int32(0, 5)),
        "cu_seqlens_q has 3 entries, cu_seqlens_k 2; make them equal",
    ),
    (
        "max_seqlen small",
        lambda: packed(max_seqlen_k=2),
        "max_seqlen_k=2 is less than the longest sequence, 3",
    ),
    (
        "max_seqlen tensor",
        lambda: packed(max_seqlen_q=torch.tensor(3)),
        r"max_seqlen_q=tensor\(3\) must be a Python int >= 0 \(a tensor would cost a device sync\)",
    ),
    ("max_seqlen negative", lambda: packed(max_seqlen_k=-1), "max_seqlen_k=-1 must be a Python int"),
    ("layout", lambda: packed(window=(0,)), r"window=\(0,\) must be a pair"),
    ("mask", lambda: packed(attn_mask=torch.ones(2, 4, 5, 5)), r"allowed: \[2 or 1, 4 or 1, 3, 3\]"),
    (
        "sinks",
        lambda: packed(sinks=torch.ones(5)),
        "sinks has 5 entries, one per query head is needed: 4",
    ),
    ("out", lambda: packed(out=torch.ones(5, 4, 4)), r"out is \(5, 4, 4\) .*\(5, 4, 8\)"),
]

PAGED: list[Case] = [
    ("query 4-D", lambda: paged(query=QUERY), r"query has 4 dimensions .*\[T, H_q, D\]"),
    (
        "cache 3-D",
        lambda: paged(key_cache=PAGES[0]),
        r"key_cache has 3 dimensions .*\[pages, page_size, H_kv, D\]",
    ),
    (
        "caches differ",
        lambda: paged(value_cache=PAGES[:5]),
        r"value_cache \(5, 4, 2, 8\); pages must agree",
    ),
    (
        "cache dtype",
        lambda: paged(key_cache=PAGES.int(), value_cache=PAGES.int()),
        "torch.int32 is no dtype of attention; allowed: ",
    ),
    ("kv_layout", lambda: paged(kv_layout="NZ"), "kv_layout='NZ' must be NHD or HND"),
    ("kv_layout array", lambda: paged(kv_layout=np.array(["NHD", "HND"])), "^kv_layout=array.* must be NHD or HND"),
    ("sparse pages", lambda: paged(key_cache=PAGES.to_sparse()), "^key_cache is a tensor of layout sparse_coo"),
    ("sparse table", lambda: paged(page_table=int32([0, 1], [2, 3]).to_sparse()), "^page_table is .*sparse_coo"),
    (
        "sparse scales",
        lambda: paged(k_scale=torch.ones(2).to_sparse(), v_scale=torch.ones(2)),
        r"^k_scale is a tensor of layout sparse_coo; a dense one is needed: pass k_scale.to_dense\(\)",
    ),
    ("kv_parts None", lambda: paged(kv_parts=None), "^kv_parts is NoneType; a list of polyattn.KVPart is needed"),
    ("kv_parts 3", lambda: latent(kv_parts=3), "^kv_parts is int; a list of polyattn.KVPart is needed"),
    ("sparse rows", lambda: latent(cache=torch.ones(2, 4, 12).to_sparse()), "^cache is a tensor of layout sparse_coo"),
    ("nested rows", lambda: latent(query=nested(torch.strided)), "^query is a nested tensor"),
    (
        "page_table dtype",
        lambda: paged(page_table=torch.zeros(2, 2)),
        r"page_table is torch.float32; int32 is needed: page_table.to\(torch.int32\)",
    ),
    (
        "seq_lens with gaps",
        lambda: paged(seq_lens=int32([5, 9], [7, 9])[:, 0]),
        "seq_lens's last axis is not dense",
    ),
    (
        "page_table with gaps",
        lambda: paged(page_table=int32([1, 9, 2, 9], [3, 9, 0, 9])[:, ::2]),
        r"page_table's last axis is not dense \(strides \(4, 2\)\)",
    ),
    ("seq_lens 2-D", lambda: paged(seq_lens=int32([5, 7])), r"seq_lens has 2 dimensions .*\[N\]"),
    (
        "tables of two sizes",
        lambda: paged(seq_lens=int32(5)),
        r"page_table has 2 rows, seq_lens 1 entries, cu_seqlens_q 3; N, N and N \+ 1 are needed",
    ),
    (
        "table device",
        lambda: paged(page_table=int32([0, 1], [2, 3]).to("meta")),
        "page_table is on meta, query on cpu; move it",
    ),
    (
        "tables without contents",
        lambda: paged(
            **{name: torch.ones(6, 4, 2, 8, device="meta") for name in ("key_cache", "value_cache")},
            query=torch.ones(3, 4, 8, device="meta"),
            **{
                name: torch.ones(shape, dtype=torch.int32, device="meta")
                for name, shape in (("page_table", (2, 2)), ("seq_lens", (2,)), ("cu_seqlens_q", (3,)))
            },
        ),
        "page_table is a meta or fake tensor, and calls over a cache read what is in it: pass tensors with contents",
    ),
    (
        "page id past the cache",
        lambda: paged(page_table=int32([0, 1], [2, 6])),
        r"page_table\[1, 1\]=6 is not a page of the cache, 0 to 5",
    ),
    (
        "page id negative",
        lambda: paged(page_table=int32([-1, 1], [2, 3])),
        r"page_table\[0, 0\]=-1 is not a page of the cache, 0 to 5",
    ),
    (
        "seq_lens needs more pages",
        lambda: paged(seq_lens=int32(5, 9), max_seqlen_k=9),
        r"seq_lens\[1\]=9 needs 3 pages of 4, page_table has 2",
    ),
    ("max_seqlen_k", lambda: paged(max_seqlen_k=6), r"max_seqlen_k=6 is less than seq_lens\[1\]=7"),
    (
        "max_seqlen_q",
        lambda: paged(max_seqlen_q=1),
        "max_seqlen_q=1 is less than the longest sequence, 2",
    ),
    (
        "more queries than keys",
        lambda: paged(seq_lens=int32(5, 1)),
        r"seq_lens\[1\]=1 is less than its 2 queries; it counts all keys, new ones included",
    ),
    (
        "cu_seqlens_q",
        lambda: paged(cu_seqlens_q=int32(0, 1, 2)),
        "cu_seqlens_q ends at 2, .* 3 tokens",
    ),
    (
        "k_scale alone",
        lambda: paged(k_scale=torch.ones(())),
        "k_scale and v_scale go together: pass both, or none",
    ),
    (
        "scale shape",
        lambda: paged(k_scale=torch.ones(3), v_scale=torch.ones(3)),
        r"k_scale has shape \(3,\); allowed: one number, \[2\] \(H_kv\) or \[6, 4, 2\] \(one per token and head\)",
    ),
    (
        "scale number",
        lambda: paged(k_scale=2.0, v_scale=2.0),
        "k_scale is a float; a float tensor on cpu is needed: one number",
    ),
    (
        "scale dtype",
        lambda: paged(k_scale=int32(1), v_scale=int32(1)),
        "k_scale is torch.int32 on cpu; a float tensor on cpu is needed",
    ),
    (
        "pages of no token",
        lambda: paged(key_cache=torch.ones(6, 0, 2, 8), value_cache=torch.ones(6, 0, 2, 8)),
        "the pages of the cache hold 0 tokens; a page holds 1 or more",
    ),
    (
        "latent pages of no token",
        lambda: latent(cache=torch.ones(2, 0, 12)),
        "the pages of the cache hold 0 tokens; a page holds 1 or more",
    ),
    (
        "sinks of each row",
        lambda: paged(sinks=torch.ones(3, 4)),
        r"sinks has shape \(3, 4\); a call takes one logit per query head, \[4\] .*polyattn.merge\(\[out\], \[lse\]",
    ),
    (
        "nothing to save",
        lambda: paged(save_kv_cache=True),
        r"save_kv_cache=True writes new keys and values: pass key and value \[T_q, H_kv, D\]",
    ),
    (
        "key alone",
        lambda: paged(key=torch.ones(3, 2, 8)),
        "key and value go together: pass both, or none",
    ),
    (
        "new keys",
        lambda: paged(key=torch.ones(3, 4, 8), value=torch.ones(3, 2, 8), save_kv_cache=True),
        r"key is \(3, 4, 8\) torch.float32 on cpu; \(3, 2, 8\) \(T_q, H_kv, D\) of a float dtype on cpu is needed",
    ),
    (
        "gradients",
        lambda: paged(query=torch.ones(3, 4, 8, requires_grad=True)),
        r"over a paged cache is inference only; run it under torch.no_grad\(\), or train with attention\(\)",
    ),
    (
        "tangents",
        lambda: torch.func.jvp(lambda q: paged(query=q), (torch.ones(3, 4, 8),), (torch.ones(3, 4, 8),)),
        r"and forward-mode AD \(.*\) goes through this call; give it tensors without a tangent, or use attention\(\)",
    ),
    ("mask", lambda: paged(attn_mask=torch.ones(2, 4, 2, 5)), r"allowed: \[2 or 1, 4 or 1, 2, 7\]"),
    (
        "sinks",
        lambda: paged(sinks=torch.ones(7)),
        "sinks has 7 entries, one per query head is needed: 4",
    ),
    ("out", lambda: paged(out=torch.ones(3, 4, 7)), r"out is \(3, 4, 7\) .*\(3, 4, 8\)"),
    ("backend", lambda: paged(backend=3), "backend=3 is a int; give a name as a string, or None"),
    (
        "mla without scale",
        lambda: latent(scale=None),
        r"mla_attention needs an explicit scale: that of the uncompressed heads",
    ),
    (
        "mla query",
        lambda: latent(query=torch.ones(4, 12)),
        r"query is \(4, 12\); a tensor \[T, H_q, D_c \+ D_r\] is needed",
    ),
    (
        "mla cache",
        lambda: latent(cache=None),
        r"cache is NoneType; a tensor \[pages, page_size, D_c \+ D_r\] is needed",
    ),
    (
        "mla dtypes",
        lambda: latent(cache=torch.zeros(2, 4, 12, dtype=torch.uint8)),
        r"query is torch.float32, cache torch.uint8 \[2, 4, 12\]; one dtype is needed, .*kv_quant",
    ),
    (
        "mla rows",
        lambda: latent(query=torch.ones(1, 4, 16)),
        "query rows have 16 numbers, cache rows 12, v_head_dim is 8; rows must be equal",
    ),
    ("mla v_head_dim", lambda: latent(v_head_dim=13), "v_head_dim is 13; .* the leading part of them"),
    (
        "mla page",
        lambda: latent(page_table=int32([2])),
        r"page_table\[0, 0\]=2 is not a page of the cache, 0 to 1",
    ),
    ("mla mask", lambda: latent(attn_mask=torch.ones(3)), "attn_mask has 1 dimensions"),
    ("mla out", lambda: latent(out=torch.ones(1, 4, 12)), r"out is \(1, 4, 12\) .*\(1, 4, 8\)"),
    ("mla backend", lambda: latent(backend=["fa"]), r"backend=\['fa'\] is a list; give a name"),
]

SDPA: list[Case] = [
    ("1-D", lambda: sdpa((8,), (8,), (8,)), r"query is \(8,\); a tensor of 2 dimensions or more"),
    (
        "no tensor",
        lambda: polyattn.scaled_dot_product_attention(1, 2, 3),
        r"query is int; a tensor of 2 dimensions or more",
    ),
    (
        "batches",
        lambda: sdpa((2, 3, 8), (3, 4, 8), (3, 4, 8)),
        r"batch axes of query, key and value do not broadcast: sizes \(2, 3, 3\)",
    ),
    (
        "mask and is_causal",
        lambda: sdpa((3, 8), (4, 8), (4, 8), attn_mask=torch.ones(3, 4), is_causal=True),
        "attn_mask and is_causal=True exclude each other, as in torch; pass one of them",
    ),
    (
        "grouped heads unasked",
        lambda: sdpa((1, 4, 3, 8), (1, 2, 4, 8), (1, 2, 4, 8)),
        "query has 4 heads, key 2; pass enable_gqa=True for grouped heads",
    ),
    (
        "mask does not broadcast",
        lambda: sdpa((2, 3, 8), (2, 4, 8), (2, 4, 8), attn_mask=torch.ones(3, 3, 4)),
        r"attn_mask has shape \(3, 3, 4\), it must broadcast to \(2, 3, 4\)",
    ),
    ("head dims", lambda: sdpa((3, 8), (4, 6), (4, 6)), "query has head dim 8, key 6"),
    (
        "bias of other lengths",
        lambda: sdpa((3, 8), (4, 8), (4, 8), attn_mask=causal_upper_left(3, 3)),
        r"attn_mask is a CausalBias for lengths \(3, 3\), query and key have \(3, 4\); make it for those",
    ),
    ("mask no tensor", lambda: sdpa(*[(3, 8)] * 3, attn_mask=[[True]]), "attn_mask is a list; a tensor, bool or float"),
]

NAMES: list[tuple[str, Callable[[], Any], type[PolyattnError], str]] = [
    (
        "unknown backend",
        lambda: dense(backend="tourch_sdpa"),
        BackendUnavailableError,
        "no backend is named 'tourch_sdpa', asked for by argument. Did you mean 'torch_sdpa'.*Usable on cpu: .*refer",
    ),
    (
        "unknown platform",
        lambda: dense(backend="fa@cdua"),
        BackendUnavailableError,
        "no platform 'cdua'. Did you mean 'cuda'",
    ),
    (
        "of another platform",
        lambda: dense(backend="torch_sdpa@cuda"),
        BackendUnavailableError,
        r"has no backend on cpu \(it is known on .*cuda.*\). Backends that can serve this call: .*torch_sdpa",
    ),
    (
        "cannot serve",
        lambda: dense(backend="torch_sdpa", softcap=5.0),
        UnsupportedRequestError,
        "torch_sdpa, asked for by argument, cannot serve .*: softcap=5.0 is not declared. Backends that can: ",
    ),
    ("number", lambda: dense(backend=3), InvalidInputError, "backend=3 is a int; give a name as a string, or None"),
    (
        "list",
        lambda: dense(backend=["fa", "torch_sdpa"]),
        InvalidInputError,
        r"backend=\['fa', 'torch_sdpa'\] is a list",
    ),
    ("varlen number", lambda: packed(backend=3), InvalidInputError, "backend=3 is a int"),
    ("bind", lambda: polyattn.bind(backend=b"fa"), InvalidInputError, "backend=b'fa' is a bytes"),
    (
        "use_backend",
        lambda: polyattn.use_backend(3),
        InvalidInputError,
        "use_backend=3 is a int; give a name as a string, or None",
    ),
    ("force_backend", lambda: polyattn.force_backend(3), InvalidInputError, "force_backend=3 is a int"),
    ("component", lambda: polyattn.component(3), InvalidInputError, "component=3 is a int"),
    ("role", lambda: polyattn.component("vae", 3), InvalidInputError, "role=3 is a int"),
    (
        "explain a number",
        lambda: polyattn.explain(3),
        InvalidInputError,
        r"explain\(\) takes an AttentionRequest or one of polyattn's calls, not a int; for example explain\(polyattn",
    ),
    (
        "explain a bad call",
        lambda: polyattn.explain(polyattn.attention, QUERY, KEY[0], KEY),
        InvalidInputError,
        "key has 3 dimensions",
    ),
    (
        "explain with torch's keywords",
        lambda: polyattn.explain(polyattn.attention, QUERY, KEY, KEY, is_causal=True, mask=None, enable_gqa=True),
        InvalidInputError,
        r"attention, ...\): .* 'is_causal'; attention takes .*_invariant\. torch's .*; the mask is attn_mask .*; en",
    ),
    (
        "explain with a misspelt keyword",
        lambda: polyattn.explain(polyattn.varlen_attention, QUERY, KEY, KEY, widow=(3, 0)),
        InvalidInputError,
        r"explain\(varlen_attention, ...\): .*; varlen_attention takes .*, batch_invariant\. Did you mean 'window'\?",
    ),
    (
        "explain a layer",
        lambda: polyattn.explain(polyattn.nn.LocalAttention(), QUERY, KEY),
        InvalidInputError,
        r"explain\(LocalAttention, ...\): missing .*: 'value'; LocalAttention takes query, .*, alibi, segments\.$",
    ),
    (
        "explain a name",
        lambda: polyattn.explain(AttentionRequest(), backend=3),
        InvalidInputError,
        "backend=3 is a int",
    ),
    (
        "list_backends",
        lambda: polyattn.list_backends("cdua"),
        BackendUnavailableError,
        "no platform 'cdua'. Did you mean 'cuda'.* Known: .*cpu, cuda",
    ),
    (
        "unknown setting",
        lambda: polyattn.configure(atention_backend="reference"),
        ConfigError,
        "there is no setting 'atention_backend'. Did you mean 'attention_backend'",
    ),
    (
        "setting's type",
        lambda: polyattn.configure(attention_backend=3),
        ConfigError,
        "attention_backend=3 .* is not a backend name, such as fa",
    ),
    ("strict", lambda: polyattn.configure(strict="maybe"), ConfigError, "strict='maybe' .* is not true or false"),
]

INPUTS = {
    "dense": DENSE,
    "static": STATIC,
    "optional": OPTIONAL,
    "varlen": VARLEN,
    "paged": PAGED,
    "sdpa": SDPA,
}
ALL = [
    *(
        pytest.param(c[1], InvalidInputError, c[2], id=f"{room}: {c[0]}")
        for room, cases in INPUTS.items()
        for c in cases
    ),
    *(pytest.param(*case[1:], id=f"names: {case[0]}") for case in NAMES),
]


@pytest.fixture(autouse=True)
def nothing_is_configured() -> Iterator[None]:
    polyattn.configure()
    yield
    polyattn.configure()


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (4, 3, 4), (2, 1, 1, 4), (1, 4, 1, 4)])
def test_the_step_that_a_masks_error_gives_is_what_torch_does(shape):
    torch.manual_seed(0)
    query, key, mask = torch.randn(2, 3, 4, 8), torch.randn(2, 4, 2, 8), torch.randn(shape)
    with pytest.raises(InvalidInputError) as caught:
        dense(query=query, key=key, value=key, attn_mask=mask)
    step = str(caught.value).partition("; pass ")[2]
    out = dense(query=query, key=key, value=key, attn_mask=eval(step, {"attn_mask": mask}))
    q, k = query.transpose(1, 2), key.transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize("good", [dense, packed, paged, latent])
def test_the_calls_are_fine_without_the_changes(good):
    assert torch.isfinite(good()).all()


@pytest.mark.parametrize("call, error, words", ALL)
def test_typed_error(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert re.search(words, str(caught.value), re.DOTALL), str(caught.value)


def test_typed_errors_are_also_the_builtin_ones_people_catch():
    with pytest.raises(ValueError, match="softcap"):
        dense(softcap=-1.0)
    with pytest.raises(NotImplementedError, match="softcap"):
        dense(backend="torch_sdpa", softcap=5.0)
    with pytest.raises(RuntimeError, match="fa_of_tomorrow"):
        dense(backend="fa_of_tomorrow")


def raises(module: str) -> dict[int, str]:
    """First line -> code of each `raise` in a module of core; a bare re-raise is nobody's message."""
    tree = ast.parse((CORE / f"{module}.py").read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    return {node.lineno: ast.unparse(node) for node in found}


CHECKS = [f"semantics/validation/{name}" for name in ("tensors", "statics", "common", "dense", "varlen", "paged")]


@pytest.fixture(scope="module")
def reached() -> set[tuple[Path, int]]:
    """(file, line) of the `raise` that each case ends in."""
    lines = set()
    for case in ALL:
        with pytest.raises(PolyattnError) as caught:
            case.values[0]()
        lines.add((Path(caught.traceback[-1].path), caught.traceback[-1].lineno + 1))
    return lines


@pytest.mark.parametrize("module", [*CHECKS, "dispatch/paged", "dispatch/sdpa"])
def test_every_message_has_a_case(module, reached):
    """A `raise` that somebody adds needs a line in the tables above."""
    wanted = raises(module)
    assert wanted
    missing = [code for line, code in wanted.items() if (CORE / f"{module}.py", line) not in reached]
    assert not missing


SHIFTED = torch.ones(2 * 4 * 2 * 8 + 1)[1:].view(2, 4, 2, 8)
ONE_FACT = [
    ("batch", {"key": torch.ones(1, 4, 2, 8), "value": torch.ones(1, 4, 2, 8)}, "batch sizes differ"),
    ("lengths", {"value": torch.ones(2, 5, 2, 8)}, "key has 4 positions, value 5"),
    ("heads", {"value": torch.ones(2, 4, 1, 8)}, "key has 2 heads, value 1"),
    ("head dim", {"key": torch.ones(2, 4, 2, 9)}, "query has head dim 8, key 9"),
    ("query heads", {"query": torch.ones(2, 3, 5, 8)}, "query has 5 heads"),
    ("dtype", {"value": KEY.double()}, "value torch.float64"),
    ("dtype of all", {"query": QUERY.int(), "key": KEY.int(), "value": KEY.int()}, "query is torch.int32"),
    ("device", {"key": KEY.to("meta")}, "key is on meta"),
    ("strides", {"query": STRIDED}, "query's last axis is not dense"),
    ("rank", {"query": QUERY[0]}, "query has 3 dimensions"),
    ("type", {"key": [0.0]}, "key is a list"),
    ("nested", {"value": nested(torch.jagged)}, "value is a nested tensor"),
    ("subclass", {"key": KEY.as_subclass(DTensor)}, "key is a DTensor"),
    ("sparse", {"key": KEY.to_sparse()}, "key is a tensor of layout sparse_coo"),
]
WITH_MASK = [
    ("mask rows", {"attn_mask": torch.ones(1, 1, 4, 4)}, "attn_mask has shape"),
    ("mask heads", {"attn_mask": torch.ones(1, 2, 3, 4)}, "attn_mask has shape"),
    ("mask rank", {"attn_mask": torch.ones(3, 4)}, "attn_mask has 2 dimensions"),
    ("mask sparse", {"attn_mask": torch.ones(1, 1, 3, 4).to_sparse()}, "attn_mask is a tensor of layout sparse_coo"),
    ("mask device", {"attn_mask": torch.ones(1, 1, 3, 4, device="meta")}, "attn_mask is on meta"),
    ("mask dtype", {"attn_mask": torch.ones(1, 1, 3, 4).long()}, "attn_mask is torch.int64"),
    ("key shorter", {"key": KEY[:, :3], "value": KEY[:, :3]}, "attn_mask has shape"),
]
WITH_SINKS = [
    ("sinks length", {"sinks": torch.ones(2)}, "sinks has 2 entries"),
    ("sinks dtype", {"sinks": torch.ones(4).int()}, "sinks is torch.int32"),
    ("sinks device", {"sinks": torch.ones(4, device="meta")}, "sinks is on meta"),
    ("sinks sparse", {"sinks": torch.ones(4).to_sparse()}, "sinks is a tensor of layout sparse_coo"),
]
WITH_OUT = [
    ("out shape", {"out": torch.ones(2, 3, 4, 9)}, "out is"),
    ("out dtype", {"out": torch.ones(2, 3, 4, 8).double()}, "out is"),
    ("out strides", {"out": STRIDED}, "out's last axis"),
    ("out is query", {"query": QUERY, "out": QUERY}, "out shares memory"),
    ("out expanded", {"out": torch.empty(1, 3, 4, 8).expand(2, 3, 4, 8)}, "out has several elements in one place"),
    ("out sparse", {"out": QUERY.to_sparse()}, "out is a tensor of layout sparse_coo"),
    ("gradients", {"query": GRAD}, "out= cannot be used while gradients are wanted"),
]
GOOD = {"query": torch.ones(2, 3, 4, 8), "key": torch.ones(2, 4, 2, 8), "value": torch.ones(2, 4, 2, 8)}
AFTERWARDS = [
    pytest.param({**GOOD, **extra}, bad, words, id=name)
    for cases, extra in (
        (ONE_FACT, {}),
        (WITH_MASK, {"attn_mask": torch.ones(1, 1, 3, 4)}),
        (WITH_SINKS, {"sinks": torch.ones(4)}),
        (WITH_OUT, {"out": torch.empty(2, 3, 4, 8)}),
    )
    for name, bad, words in cases
]


@pytest.mark.parametrize("good, bad, words", AFTERWARDS)
def test_a_call_site_that_has_served_checks_the_next_call_as_well(good, bad, words):
    site = polyattn.bind()
    for _ in range(4):  # the second call of a signature is found in the dict, later ones by a guard
        site(**good)
    with pytest.raises(InvalidInputError, match=re.escape(words)):
        site(**{**good, **bad})
    assert torch.isfinite(site(**good)).all(), "and goes on serving"


def test_the_checks_above_met_a_guard():
    """Else all of them went through the dict: from its third time on, a call is found by torch's guards."""
    site = polyattn.bind()
    for _ in range(3):
        site(**GOOD)
    assert (site._fast is not None) == (dispatch._Guards is not None)


AFTER_PACKED = [
    ("cu_seqlens_q", {"cu_seqlens_q": int32(0, 2, 4)}, "cu_seqlens_q ends at 4"),
    ("cu_seqlens_k", {"cu_seqlens_k": int32(0, 6, 5)}, "cu_seqlens_k falls from 6 to 5"),
    ("max_seqlen_q", {"max_seqlen_q": 2}, "max_seqlen_q=2 is less than the longest sequence, 3"),
    ("max_seqlen_k", {"max_seqlen_k": 2.0}, "max_seqlen_k=2.0 must be a Python int"),
    ("dtype", {"cu_seqlens_q": torch.tensor([0, 2, 5])}, "cu_seqlens_q is torch.int64"),
    (
        "gaps",
        {"cu_seqlens_q": int32([0, 9], [2, 9], [5, 9])[:, 0]},
        "cu_seqlens_q's last axis is not dense",
    ),
    ("value", {"value": torch.ones(4, 2, 8)}, "key has 5 tokens, value 4"),
    ("sinks", {"sinks": torch.ones(3)}, "sinks has 3 entries"),
    ("mask", {"attn_mask": torch.ones(2, 1, 3, 4)}, "attn_mask has shape"),
    ("length", {"max_seqlen_k": -1}, "max_seqlen_k=-1 must be a Python int"),
    ("a switch", {"max_seqlen_q": True}, "max_seqlen_q=True must be a Python int"),
    ("sequences", {"cu_seqlens_q": int32(0, 2, 4, 5)}, "cu_seqlens_q has 4 entries, cu_seqlens_k 3"),
    ("none", dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), int32()), "cu_seqlens_q is empty"),
    ("place", {"cu_seqlens_k": int32(0, 2, 5).to("meta")}, "cu_seqlens_k is on meta"),
    ("heads", {"key": torch.ones(5, 3, 8)}, "key has 3 heads, value 2"),
    ("rank", {"query": torch.ones(1, 5, 4, 8)}, "query has 4 dimensions"),
    ("strides", {"query": torch.ones(5, 4, 16)[..., ::2]}, "query's last axis is not dense"),
    ("type", {"value": [0.0]}, "value is a list"),
    ("subclass", {"key": torch.ones(5, 2, 8).as_subclass(DTensor)}, "key is a DTensor"),
]


@pytest.mark.parametrize("bad, words", [c[1:] for c in AFTER_PACKED], ids=[c[0] for c in AFTER_PACKED])
def test_a_packed_call_that_has_served_checks_the_next_one_as_well(bad, words):
    for _ in range(3):
        packed()
    with pytest.raises(InvalidInputError, match=re.escape(words)):
        packed(**bad)


def test_contents_on_a_device_are_read_only_when_asked_for(monkeypatch):
    elsewhere = torch.empty(3, dtype=torch.int32, device="meta")
    monkeypatch.delenv("POLYATTN_VALIDATE", raising=False)
    assert validate.contents_readable(int32(0, 5))
    assert not validate.contents_readable(elsewhere)
    monkeypatch.setenv("POLYATTN_VALIDATE", "1")
    assert validate.contents_readable(elsewhere)
    monkeypatch.setenv("POLYATTN_VALIDATE", "perhaps")
    with pytest.raises(ConfigError, match="POLYATTN_VALIDATE='perhaps' is not a switch: use 1 or 0"):
        validate.contents_readable(elsewhere)


def test_an_option_of_the_backend_that_does_not_exist():
    polyattn.configure(attention_backend="flex_attention", attention_backend_config="compyle=never")
    with pytest.raises(ConfigError, match=r"flex_attention.* no option 'compyle'\. Did you mean 'compile'\?"):
        dense()


@pytest.mark.parametrize("value", ["0", "-1", "lots"])
def test_a_memory_cap_that_is_no_number(monkeypatch, value):
    monkeypatch.setenv("POLYATTN_REFERENCE_MEMORY_GB", value)
    polyattn.configure()
    with pytest.raises(ConfigError, match=f"_MEMORY_GB='{value}' is not a positive number, for example"):
        dense(backend="reference", window=(1, 1))


def test_more_than_the_memory_cap(monkeypatch):
    monkeypatch.setenv("POLYATTN_REFERENCE_MEMORY_GB", "1e-9")
    polyattn.configure()
    with pytest.raises(UnsupportedRequestError, match="POLYATTN_REFERENCE_MEMORY_GB"):
        dense(backend="reference", window=(2, 1))


def test_a_variable_that_is_no_variable():
    with pytest.raises(ConfigError, match=r"POLYATTN_PLUGIN is not .*Did you mean 'POLYATTN_PLUGINS'"):
        envvars.text("POLYATTN_PLUGIN")
    (sentence,) = envvars.unknown({"POLYATTN_ATENTION_BACKEND": "fa", "POLYATTN_STRICT": "1", "OTHER": "1"})
    assert sentence == (
        "environment POLYATTN_ATENTION_BACKEND is set, but polyattn does not read it. Did you mean "
        "'POLYATTN_ATTENTION_BACKEND' or 'POLYATTN_ATTENTION_BACKEND_CONFIG'?"
    )


@pytest.mark.parametrize("name", ["key", "value"])
def test_what_is_no_tensor_is_told_under_autocast_too(name: str) -> None:
    ones = {"query": torch.ones(1, 4, 2, 8), "key": torch.ones(1, 4, 2, 8), "value": torch.ones(1, 4, 2, 8)}
    gates = {"gate": torch.zeros(1, 4, 2), "beta": torch.zeros(1, 4, 2)}
    blocks: dict[str, Any] = {"block_map": torch.ones(1, 1, 1, 1, dtype=torch.bool), "block_shape": (16, 16)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for call, more in ((polyattn.block_sparse_attention, blocks), (polyattn.linear_attention, gates)):
            with pytest.raises(InvalidInputError, match=f"{name} is a NoneType, a tensor"):
                call(**{**ones, name: None}, **more)
