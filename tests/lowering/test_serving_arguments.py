"""What paged and latent calls say of wrong arguments of quantised caches, draft trees and further keys, and what they
ask for when the arguments are right.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import polyattn
from polyattn import KVPart
from polyattn.semantics import validation
from polyattn.semantics.kv_quant import fp4_scales, mla_pack_fp8, stored
from polyattn.semantics.reference import verify_mask

from .serving import int32

# Of the CPU backends the reference serves these, by exact rewrites.


def paged_arguments(**changes: Any) -> dict[str, Any]:
    """Two sequences with 1 and 2 queries and 5 and 7 keys in pages of 4; H_q=4, H_kv=2, D=16."""
    arguments = {
        "query": torch.ones(3, 4, 16),
        "key_cache": torch.ones(6, 4, 2, 16),
        "value_cache": torch.ones(6, 4, 2, 16),
        "page_table": int32([0, 1], [2, 3]),
        "seq_lens": int32(5, 7),
        "cu_seqlens_q": int32(0, 1, 3),
        "max_seqlen_q": 2,
        "max_seqlen_k": 7,
    }
    return {**arguments, **changes}


def paged(**changes: Any) -> Any:
    return polyattn.paged_attention(**paged_arguments(**changes))


def latent_arguments(width: int = 24, **changes: Any) -> dict[str, Any]:
    """The same over latent rows, D_c=16 of 24 numbers."""
    arguments = paged_arguments(query=torch.ones(3, 4, width), cache=torch.ones(6, 4, width), scale=0.3, v_head_dim=16)
    return {**{n: v for n, v in arguments.items() if n not in ("key_cache", "value_cache")}, **changes}


def latent(width: int = 24, **changes: Any) -> Any:
    return polyattn.mla_attention(**latent_arguments(width, **changes))


PAGES, SCALES = torch.zeros(6, 4, 2, 8, dtype=torch.uint8), torch.ones(6, 4, 2, 1)
ROWS = torch.zeros(6, 4, 656, dtype=torch.uint8)


def fp4(**changes: Any) -> Any:
    return paged(**{"key_cache": PAGES, "value_cache": PAGES, "k_scale": SCALES, "v_scale": SCALES, **changes})


def fp8_rows(**changes: Any) -> Any:
    return latent(576, **{"cache": ROWS, "v_head_dim": 512, **changes})


def tree_mask() -> torch.Tensor:
    """Drafts of 1 and 2 tokens after prefixes of 4 and 5."""
    mask = torch.zeros(2, 1, 2, 7, dtype=torch.bool)
    mask[0, 0, :1, :5], mask[1, 0, :2, :7] = verify_mask(4, [-1]), verify_mask(5, [-1, -1])
    return mask


def tree(**changes: Any) -> Any:
    return paged(**{"tree": True, "attn_mask": tree_mask(), **changes})


def part(**changes: Any) -> KVPart:
    """All three queries over the first five keys of pages 4 and 5."""
    return KVPart(int32([4, 5]), int32(5), int32(0, 3), 3, 5)._replace(**changes)


def parted(*parts: Any, **changes: Any) -> Any:
    return paged(kv_parts=list(parts), **changes)


POOL, HALVES = torch.ones(7, 4, 2, 16), torch.ones(6, 2, 4, 2, 16)


def saving(tokens: int = 3, **changes: Any) -> Any:
    """`paged` with new keys and values that are written."""
    new = {name: torch.ones(tokens, 2, 16) for name in ("key", "value")}
    longest = {"max_seqlen_q": max(tokens - 1, 2), "max_seqlen_k": 8}
    return paged(**{"query": torch.ones(tokens, 4, 16), **new, **longest, "save_kv_cache": True, **changes})


GOOD: dict[str, Callable[[], Any]] = {
    "saving": saving,
    "saving into one page from both ends": lambda: saving(page_table=int32([1, 0], [1, 0]), seq_lens=int32(1, 3)),
    "saving into halves of one pool": lambda: saving(key_cache=HALVES[:, 0], value_cache=HALVES[:, 1]),
    "saving beside a row of padding": lambda: saving(page_table=int32([1, 0], [1, 0]), seq_lens=int32(1, 0)),
    "new rows that are not saved": lambda: saving(key_cache=POOL, value_cache=POOL, save_kv_cache=False),
    "paged": paged,
    "latent": latent,
    "fp4": fp4,
    "fp8 rows": fp8_rows,
    "tree": tree,
    "parts": lambda: parted(part(), part()),
    "chunked": lambda: paged(chunked_prefix=True),
}


@pytest.mark.parametrize("good", GOOD.values(), ids=GOOD)
def test_the_calls_are_fine_without_the_changes(good):
    assert torch.isfinite(good()).all()


hidden = tree_mask()
hidden[1, 0, 1, 3] = False
own = {"key_cache": torch.ones(2, 4, 2, 16), "value_cache": torch.ones(2, 4, 2, 16)}
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "caches of two dtypes": (
        lambda: paged(value_cache=torch.ones(6, 4, 2, 16).half()),
        r"key_cache is torch.float32, value_cache torch.float16; one dtype is needed",
    ),
    "one scale": (lambda: paged(k_scale=torch.ones(1)), r"k_scale and v_scale go together: pass both, or none"),
    "a number": (
        lambda: paged(k_scale=1.0, v_scale=1.0),
        r"k_scale is a float; a float tensor on cpu is needed: one num",
    ),
    "scale shape": (
        lambda: paged(k_scale=torch.ones(3), v_scale=torch.ones(3)),
        r"k_scale has shape \(3,\); allowed: one number, \[2\] \(H_kv\) or \[6, 4, 2\] \(one per token and head\)",
    ),
    "two rows that write one slot": (
        lambda: saving(page_table=int32([1, 2], [3, 2]), seq_lens=int32(5, 6)),
        r"rows 0 and 1 both write slot 0 of page 2, and save_kv_cache=True would keep one of the two; give each row",
    ),
    "one row that writes one slot twice": (
        lambda: saving(page_table=int32([1, 1], [2, 3]), seq_lens=int32(8, 4), cu_seqlens_q=int32(0, 8, 9), tokens=9),
        r"rows 0 and 0 both write slot 0 of page 1",
    ),
    "one cache for keys and values": (
        lambda: saving(key_cache=POOL, value_cache=POOL),
        r"key_cache and value_cache share memory, and save_kv_cache=True writes keys and values into it; pass two",
    ),
    "caches that overlap": (
        lambda: saving(key_cache=POOL[:6], value_cache=POOL[1:]),
        r"key_cache and value_cache share memory",
    ),
    "a cache whose pages are one": (
        lambda: saving(value_cache=POOL[0].expand(6, 4, 2, 16)),
        r"value_cache has strides \(0, 32, 16, 1\), so that several places of it are one, .*value_cache.contiguous\(\)",
    ),
    "two granularities": (
        lambda: paged(k_scale=torch.ones(2), v_scale=torch.ones(())),
        r"k_scale has shape \(2,\), v_scale \(\); one granularity is needed: one number each, or \[2\] ",
    ),
    "fp4 width": (
        lambda: fp4(query=torch.ones(3, 4, 8), key_cache=PAGES[..., :4], value_cache=PAGES[..., :4]),
        r"holds FP4, two numbers a byte and one scale for each 16: head dim 8 is no multiple of 16; pad it, or keep",
    ),
    "fp4 without scales": (
        lambda: fp4(k_scale=None, v_scale=None),
        (
            r"k_scale is a NoneType; a cache of uint8 holds FP4, whose scales are \(6, 4, 2, 1\) of "
            r"float8_e4m3fn or float32 on cpu, one for each 16 numbers of a row"
        ),
    ),
    "fp4 scale shape": (
        lambda: fp4(k_scale=torch.ones(6, 4, 2), v_scale=torch.ones(6, 4, 2)),
        r"k_scale is \(6, 4, 2\) torch.float32 on cpu; a cache of uint8 holds FP4, whose scales are \(6, 4, 2, 1\)",
    ),
    "fp4 scale dtype": (lambda: fp4(v_scale=SCALES.half()), r"v_scale is \(6, 4, 2, 1\) torch.float16 on cpu"),
    "an fp8 cache as bytes": (
        lambda: fp4(key_cache=torch.cat([PAGES] * 2, -1)),
        (
            r"query has head dim 16, key 32; they must be equal \(uint8 holds FP4, two numbers a byte; an FP8 cache is "
            r".view\(torch.float8_e4m3fn\)\)"
        ),
    ),
    "fp4 new rows": (
        lambda: fp4(key=torch.ones(3, 2, 8), value=torch.ones(3, 2, 8)),
        r"\(3, 2, 16\) \(T_q, H_kv, D\) of",
    ),
    "latent query": (lambda: latent(query=torch.ones(3, 24)), r"query is \(3, 24\); a tensor \[T, H_q, D_c \+ D_r\]"),
    "latent dtypes": (
        lambda: latent(cache=torch.zeros(6, 4, 24, dtype=torch.uint8)),
        (
            r"query is torch.float32, cache torch.uint8 \[6, 4, 24\]; one dtype is needed, or rows of a format of "
            r"polyattn.semantics.kv_quant: uint8 \[pages, page_size, 656\], float8_e4m3fn \[pages, page_size, 24\]"
        ),
    ),
    "latent lists": (
        lambda: latent(token_indices=torch.zeros(3, 0, dtype=torch.int32)),
        r"token_indices is \(3, 0\) on cpu; \[3, topk\]",
    ),
    "latent lists, a token that is not there": (
        lambda: latent(token_indices=torch.full((3, 1), 99, dtype=torch.int32)),
        r"token_indices\[0\]: 99 is not -1, nor a token that it sees",
    ),
    "fp8 rows of another width": (
        lambda: fp8_rows(query=torch.ones(3, 4, 512)),
        r"query rows have 512 numbers and v_head_dim is 512; rows of fp8_e4m3 with scales by block128 hold 576",
    ),
    "fp8 rows, v_head_dim": (
        lambda: fp8_rows(v_head_dim=128),
        r"v_head_dim is 128; rows of fp8_e4m3 with scales by block128 hold 576",
    ),
    "latent rows": (
        lambda: latent(v_head_dim=25),
        r"query rows have 24 numbers, cache rows 24, v_head_dim is 25; rows must be equal and v_head_dim",
    ),
    "latent width, a fraction": (
        lambda: latent(v_head_dim=2.5),
        r"v_head_dim=2.5 is a float; give a whole number, the leading part of a row that is the value",
    ),
    "latent width, text": (lambda: latent(v_head_dim="8"), r"v_head_dim='8' is a str; give a whole number"),
    "latent width, none": (lambda: latent(v_head_dim=None), r"v_head_dim=None is a NoneType; give a whole number"),
    "latent cache elsewhere": (
        lambda: latent(cache=torch.ones(6, 4, 24, device="meta")),
        r"query is on cpu, cache on meta; move them to one device",
    ),
    "latent query, strided": (
        lambda: latent(query=torch.ones(3, 4, 48)[..., ::2]),
        r"query's last axis is not dense \(strides \(192, 48, 2\)\); pass query.contiguous\(\)",
    ),
    "tree without mask": (
        lambda: tree(attn_mask=None),
        r"tree=True goes with a bool attn_mask, not with None; make it with polyattn.semantics.reference.verify_mask",
    ),
    "tree with bias": (lambda: tree(attn_mask=torch.zeros(2, 1, 2, 7)), r"a bool attn_mask, not with torch.float32"),
    "tree and chunks": (
        lambda: tree(chunked_prefix=True),
        r"tree=True and chunked_prefix=True exclude each other: drafts",
    ),
    "tree and parts": (
        lambda: tree(kv_parts=[part()]),
        r"tree=True and kv_parts exclude each other: pass attn_mask over the call's own keys and leave tree out",
    ),
    "tree that hides the prefix": (
        lambda: tree(attn_mask=hidden),
        (
            r"every draft sees all keys before the drafts, but attn_mask hides key 3 from row 1 of sequence 1, which "
            r"has 5 of them; leave tree out for such a mask"
        ),
    ),
    "latent tree": (lambda: latent(tree=True), r"tree=True goes with a bool attn_mask, not with None"),
    "parts, no list": (lambda: paged(kv_parts=part()[0]), r"kv_parts is Tensor; a list of polyattn.KVPart is needed"),
    "parts, no part": (lambda: parted((1, 2)), r"kv_parts is tuple; a list of polyattn.KVPart is needed"),
    "parts and a window": (
        lambda: parted(part(), window=(3, 0)),
        r"window=\(3, 0\) and kv_parts exclude each other: a window counts positions, which parts do not have",
    ),
    "parts and a chunk": (
        lambda: parted(part(), chunk=4),
        r"chunk=4 and kv_parts exclude each other: a chunk counts positions, which parts do not have",
    ),
    "half a pool": (
        lambda: parted(part(key_cache=own["key_cache"])),
        r"kv_parts\[0\] has a pool of its own by key_cache; pass all or none of key_cache, value_cache",
    ),
    "a pool of another family": (
        lambda: latent(kv_parts=[part(**own)]),
        r"kv_parts\[0\] has a pool of its own by key_cache and value_cache; pass all or none of cache",
    ),
    "a pool of another dtype": (
        lambda: parted(part(), part(**{**own, "value_cache": own["value_cache"].half()})),
        (
            r"kv_parts\[1\].value_cache is \[2, 4, 2, 16\] torch.float16; one like the call's is needed: "
            r"\[pages, 4, 2, 16\] torch.float32 on cpu"
        ),
    ),
    "a pool of another page size": (
        lambda: parted(part(**{name: t.reshape(1, 8, 2, 16) for name, t in own.items()})),
        r"kv_parts\[0\].key_cache is \[1, 8, 2, 16\] torch.float32; one like the call's is needed",
    ),
    "a strided pool": (
        lambda: parted(part(**{**own, "key_cache": torch.ones(2, 4, 16, 2).mT[..., :16, :]})),
        r"kv_parts\[0\].key_cache's last axis is not dense; pass it .contiguous\(\)",
    ),
    "a pool without its scales": (
        lambda: parted(part(**own), k_scale=torch.ones(6, 4, 2), v_scale=torch.ones(6, 4, 2)),
        r"kv_parts\[0\] has a pool of its own, and k_scale \[6, 4, 2\] belongs to the tokens of the call's; keep",
    ),
    "tables of a part": (
        lambda: parted(part(), part(seq_lens=int32(9))),
        r"kv_parts\[1\]: max_seqlen_k=5 is less than seq_lens\[0\]=9",
    ),
    "pages of a part": (
        lambda: parted(part(page_table=int32([1, 2]), **own)),
        r"kv_parts\[0\]: page_table\[0, 1\]=2 is not a page of the cache, 0 to 1",
    ),
    "groups of a part": (
        lambda: parted(part(cu_seqlens_q=int32(0, 2))),
        r"kv_parts\[0\]: cu_seqlens_q ends at 2, .* 3 tok",
    ),
    "length of a part": (lambda: parted(part(seq_lens=int32(-1))), r"kv_parts\[0\]: seq_lens\[0\]=-1 is less than"),
}


@pytest.mark.parametrize("call, words", BAD.values(), ids=BAD)
def test_typed_error(call, words):
    with pytest.raises(polyattn.InvalidInputError, match=words):
        call()


@pytest.mark.parametrize("call, words", BAD.values(), ids=BAD)
def test_explain_says_the_same(call, words, monkeypatch):
    """What a call would raise, its explanation raises."""
    for name in ("paged_attention", "mla_attention"):
        public = getattr(polyattn, name)
        monkeypatch.setattr(polyattn, name, lambda *a, _public=public, **kw: polyattn.explain(_public, *a, **kw))
    with pytest.raises(polyattn.InvalidInputError, match=words):
        call()


def test_every_message_has_a_case():
    """A `raise` that somebody adds to the checks needs a line in the table above."""
    room = Path(validation.__file__).parent
    paths = [room / f"{name}.py" for name in ("stored", "tree", "kv_parts", "mla")]
    wanted = {
        (path, node.lineno)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise)
    }
    assert {path for path, _ in wanted} == set(paths)
    reached = set()
    for call, _ in BAD.values():
        with pytest.raises(polyattn.InvalidInputError) as caught:
            call()
        reached |= {(Path(entry.path), entry.lineno + 1) for entry in caught.traceback}
    assert wanted <= reached


# --------------------------------------------------------------------------------------------------- what is asked for


def asked(call: Any, **arguments: Any) -> dict[str, Any]:
    request = polyattn.explain(call, **arguments).request
    names = ("phase", "s_relation", "mask", "tree", "chunked_prefix", "kv_parts", "kv_dtype", "kv_scales", "head_dim")
    return {name: getattr(request, name) for name in (*names, "v_head_dim")}


STEP: dict[str, Any] = {
    "phase": "extend",
    "s_relation": "fewer",
    "mask": "none",
    "tree": False,
    "chunked_prefix": False,
}
STEP |= {"kv_parts": 0, "kv_dtype": "auto", "kv_scales": "", "head_dim": 16, "v_head_dim": 16}
ONE: dict[str, Any] = {"query": torch.ones(2, 4, 16), "cu_seqlens_q": int32(0, 1, 2), "max_seqlen_q": 1}
SINGLE = KVPart(int32([4], [5]), int32(3, 0), int32(0, 1, 2), 1, 3)
PAIR = KVPart(int32([4]), int32(3), int32(0, 2), 2, 3)
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "extend": ({}, {}),
    "decode": (ONE, {"phase": "decode", "s_relation": "one"}),
    "tree": ({"tree": True, "attn_mask": tree_mask()}, {"phase": "verify", "mask": "bool", "tree": True}),
    "chunked": ({"chunked_prefix": True}, {"chunked_prefix": True}),
    "chunked, one query": ({**ONE, "chunked_prefix": True}, {"chunked_prefix": True}),
    "parts": ({"kv_parts": (part(), part())}, {"kv_parts": 2, "s_relation": "more"}),
    "split decode": (
        {**ONE, "kv_parts": [SINGLE]},
        {"phase": "decode", "s_relation": "one", "kv_parts": 1},
    ),
    "shared prefix in decode": (
        {**ONE, "kv_parts": [SINGLE, PAIR]},
        {"phase": "decode", "s_relation": "more", "kv_parts": 2},
    ),
    "parts and a mask": (
        {"kv_parts": [part()], "attn_mask": torch.ones(2, 1, 2, 7, dtype=torch.bool)},
        {"kv_parts": 1, "s_relation": "more", "mask": "bool"},
    ),
    "fp4": (
        {"key_cache": PAGES, "value_cache": PAGES, "k_scale": SCALES, "v_scale": SCALES},
        {"kv_dtype": "fp4_e2m1", "kv_scales": "block16"},
    ),
    "one page, one head": (
        {
            "query": torch.ones(3, 1, 16),
            "page_table": int32([0], [0]),
            "seq_lens": int32(1, 2),
            "max_seqlen_k": 2,
            **{f"{n}_cache": torch.ones(1, 4, 1, 16).to(torch.float8_e4m3fn) for n in ("key", "value")},
            **{f"{n}_scale": torch.ones(1, 4, 1) for n in "kv"},
        },
        {"kv_dtype": "fp8_e4m3", "kv_scales": "token"},
    ),
}


@pytest.mark.parametrize("changes, fields", ASKED.values(), ids=ASKED)
def test_what_a_paged_call_asks_for(changes, fields):
    assert asked(polyattn.paged_attention, **paged_arguments(**changes)) == {**STEP, **fields}


def test_what_a_latent_call_over_fp8_rows_asks_for():
    arguments = latent_arguments(576, cache=ROWS, v_head_dim=512, chunked_prefix=True, kv_parts=[part()])
    fields = {"kv_dtype": "fp8_e4m3", "kv_scales": "block128", "head_dim": 576, "v_head_dim": 512}
    fields |= {"chunked_prefix": True, "kv_parts": 1, "s_relation": "more"}
    assert asked(polyattn.mla_attention, **arguments) == {**STEP, **fields}


def test_packed_numbers_are_those_of_the_helpers():
    """What `polyattn.semantics.kv_quant` packs, the calls read."""
    torch.manual_seed(0)
    rows = torch.randn(6, 4, 2, 16)
    scale = fp4_scales(rows)
    packed = stored(rows, scale, torch.uint8)
    got = fp4(key_cache=packed, value_cache=packed, k_scale=scale, v_scale=scale)
    near = paged(key_cache=rows, value_cache=rows)
    assert torch.nn.functional.cosine_similarity(got.flatten(), near.flatten(), 0) > 0.98
    latents = torch.randn(6, 4, 576)
    got = fp8_rows(cache=mla_pack_fp8(latents))
    near = latent(576, cache=latents, v_head_dim=512)
    assert torch.nn.functional.cosine_similarity(got.flatten(), near.flatten(), 0) > 0.99
