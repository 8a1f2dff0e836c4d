"""FlashInfer's wrappers over their emulator: conformance, what they are called with, and where they work."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyattn.errors import BackendUnavailableError, GraphError, UnsupportedRequestError
from polyattn.semantics import reference
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library
from polyattn.testing.families.cached import in_tables
from polyattn_cuda.flashinfer import block_sparse, latent, lengths, paged, ragged, scales, workbench
from polyattn_cuda.flashinfer.lengths import Lengths, cut, flattened, mask_rule, tree_rule
from polyattn_cuda.flashinfer.scales import HostScale, scale_of
from polyattn_cuda.flashinfer.workbench import Lender, Workbench, float_bytes, int_bytes

from .emulators import flashinfer as emulator

PAGED = Emulated("flashinfer", "flashinfer-python", "cuda:sm90@12.8")
AMPERE = Emulated("flashinfer", "flashinfer-python", "cuda:sm80@12.4")
RAGGED = Emulated("flashinfer", "ragged", "cuda:sm90@12.8")
BLOCKS = Emulated("flashinfer_block_sparse", "flashinfer-python", "cuda:sm90@12.8")
BLOCKS_BEFORE = Emulated("flashinfer_block_sparse", "flashinfer-python", "cuda:sm80@12.4")
LATENT = Emulated("flashinfer_mla", "flashinfer-python", "cuda:sm90@12.8")
HALF = ("bfloat16", "float16")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return emulator.library().install(monkeypatch)


@pytest.mark.slow(keep=51)
@pytest.mark.parametrize("case", PAGED.cases(per_row=5, dtypes=HALF[:1]), ids=str)
def test_paged(case: Case, library: Library) -> None:
    PAGED.passes(case, library)


@pytest.mark.parametrize("case", AMPERE.cases(per_row=3, dtypes=HALF[1:]), ids=str)
def test_paged_before_hopper(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with the oldest library that is served."""
    AMPERE.passes(case, emulator.library("0.6.18.post1").install(monkeypatch))


@pytest.mark.slow(keep=103)
@pytest.mark.parametrize("case", RAGGED.cases(per_row=5, dtypes=HALF), ids=str)
def test_ragged(case: Case, library: Library) -> None:
    RAGGED.passes(case, library)


@pytest.mark.parametrize("case", LATENT.cases(per_row=8, dtypes=HALF), ids=str)
def test_latent(case: Case, library: Library) -> None:
    LATENT.passes(case, library)


@pytest.mark.parametrize("case", BLOCKS.cases(per_row=10, dtypes=HALF), ids=str)
def test_blocks(case: Case, library: Library) -> None:
    BLOCKS.passes(case, library)


@pytest.mark.parametrize("case", BLOCKS_BEFORE.cases(per_row=3, dtypes=HALF[:1]), ids=str)
def test_blocks_before_hopper(case: Case, library: Library) -> None:
    BLOCKS_BEFORE.passes(case, library)


@pytest.mark.parametrize("shared", [True, False])
def test_heads_of_a_group_share_keys_where_they_share_a_map(shared: bool, library: Library) -> None:
    """Keys are repeated for maps of their own alone; blocks that see nothing cost the first block, and give zeros."""
    q, k, v = (torch.randn(2, heads, 200, 64).bfloat16() for heads in (4, 2, 2))
    lists = (torch.tensor([2, 0, 1, 1]).int().expand(1, 1 if shared else 4, 4), torch.zeros(1, 1, 4, 2).int())
    lists[1][..., 1] = 2
    bound = BLOCKS.bind(family="block_sparse", layout="BHSD", heads=4, kv_heads=2, head_dim=64, block_map=True,
                        block_shape=(64, 64), lse=True)  # fmt: skip
    out, lse = bound.forward(q, k, v, block_counts=lists[0].contiguous(), block_indices=lists[1])
    plan = given(library, "Wrapper.plan")
    assert (plan["num_qo_heads"], plan["num_kv_heads"]) == (8, 4 if shared else 8)
    assert plan["block_mask_map"].sum(-1).unique(dim=0).tolist() == [[2, 1, 1, 1]]
    assert plan["block_col_sz"][0].tolist() == [64, 64, 64, 8]
    assert not out[:, :, 64:128].any()
    assert (lse[:, :, 64:128] == -torch.inf).all()
    right = reference.attention(q[:, :, 128:], k[:, :, :64], v[:, :, :64], layout="BHSD", compute_dtype=torch.float64)
    torch.testing.assert_close(out[:, :, 128:].double(), right.double(), rtol=2e-2, atol=2e-2)


def test_a_plan_of_many_blocks_has_room(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of queries of a head is a sequence to the planner, whose schedule may need more than a wrapper brings."""
    for module, name in ((emulator, "INTEGERS"), (workbench, "_STAGED")):
        monkeypatch.setattr(module, name, 4096)
    monkeypatch.setattr(block_sparse, "LENDER", Lender())
    q, k, v = (torch.randn(1, 2, 300, 64).bfloat16() for _ in range(3))
    counts, indices = torch.ones(1, 1, 300).int(), torch.zeros(1, 1, 300, 1).int()
    bound = BLOCKS.bind(family="block_sparse", layout="BHSD", heads=2, kv_heads=2, head_dim=64, block_map=True,
                        block_shape=(1, 300))  # fmt: skip
    found = bound.forward(q, k, v, block_counts=counts, block_indices=indices)
    right = reference.attention(q, k, v, layout="BHSD", compute_dtype=torch.float64)
    torch.testing.assert_close(found.double(), right.double(), rtol=2e-2, atol=2e-2)
    assert given(library, "Wrapper.reset_workspace_buffer")["int_workspace_buffer"].numel() > 4096


# ---------------------------------------------------------------------------------------------------------------- calls

STEP: dict[str, Any] = {"family": "paged", "layout": "THD", "heads": 8, "kv_heads": 2, "head_dim": 64, "page_size": 16}
EXTEND: dict[str, Any] = {**STEP, "phase": "extend", "s_relation": "fewer", "causal": "bottom_right"}


def call(target: Emulated, tokens: int = 3, **fields: Any) -> Any:
    """A call over a sequence of 20 keys."""
    request = {**EXTEND, **fields}
    given = {name: request.pop(name) for name in ("attn_mask", "k_scale", "v_scale", "out") if name in request}
    cache = torch.randn(4, 16, 2, 64).bfloat16()
    cache = cache.to(torch.float8_e4m3fn) if request.get("kv_dtype") == "fp8_e4m3" else cache
    lens = {"page_table": torch.tensor([[2, 1]], dtype=torch.int32), "seq_lens": torch.tensor([20], dtype=torch.int32)}
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    query = request.pop("query", None)
    query = torch.randn(tokens, 8, 64).bfloat16() if query is None else query
    return target.bind(**request).forward(
        query, cache, cache, **in_tables(**lens, cu_seqlens_q=starts, max_seqlen_q=tokens, max_seqlen_k=20, **given)
    )


def given(library: Library, end: str) -> dict[str, Any]:
    return dict(next(c.given for c in reversed(library.calls) if c.name.endswith(end)))


def test_the_template_is_named(library: Library) -> None:
    """What the wrappers choose by themselves depends on the version."""
    call(PAGED)
    assert given(library, "__init__")["backend"] == "fa3"
    call(PAGED, mask="bool", attn_mask=torch.ones(1, 1, 3, 20, dtype=torch.bool))
    assert given(library, "__init__")["backend"] == "fa2"
    call(PAGED, kv_dtype="fp8_e4m3")
    plan = given(library, ".plan")
    assert (plan["q_data_type"], plan["kv_data_type"]) == (torch.bfloat16, torch.float8_e4m3fn)
    # Its paged kernels find V where K is, so that pages of two widths are not for it.
    latent = {**EXTEND, "head_dim": 192, "v_head_dim": 128}
    assert paged.template(PAGED.request(**latent)) == "fa2"
    assert paged.template(PAGED.request(**{**latent, "family": "varlen"})) == "fa3"
    assert paged.template(AMPERE.request(**EXTEND)) == "fa2"
    assert paged.template(Emulated("flashinfer", "ragged", "cuda:sm90@12.1").request(**EXTEND)) == "fa2"
    assert not [c for c in library.calls if c.positional], "everything is given by name"


@pytest.mark.parametrize("tokens", [3, 1])
def test_caches_of_unlike_strides_go_to_kernels_that_read_them(tokens: int, library: Library) -> None:
    """fa3, and decode without tensor cores, read V by the strides of K: the emulator refuses others as they do."""
    one = {"phase": "decode", "s_relation": "one", "causal": "none"} if tokens == 1 else {}
    key, value = torch.randn(4, 16, 8, 64).bfloat16(), torch.randn(4, 16, 8, 80).bfloat16()[..., :64]
    tables: dict[str, Any] = {"page_table": torch.tensor([[2, 1]], dtype=torch.int32), "max_seqlen_k": 20}
    tables |= {"seq_lens": torch.tensor([20], dtype=torch.int32), "max_seqlen_q": tokens}
    tables |= {"cu_seqlens_q": torch.tensor([0, tokens], dtype=torch.int32)}
    query, bound = torch.randn(tokens, 8, 64).bfloat16(), PAGED.bind(**{**EXTEND, **one, "kv_heads": 8})
    wanted = bound.forward(query, key, value.contiguous(), **in_tables(**tables))
    assert torch.equal(bound.forward(query, key, value, **in_tables(**tables)), wanted)


def test_a_scale_of_zero_or_less_goes_into_the_queries(library: Library) -> None:
    for scale, wanted in ((-0.2, (0.2, -1.0)), (0.0, (1.0, 0.0)), (0.3, (0.3, None))):
        assert scale_of(PAGED.request(**EXTEND, scale=scale)) == wanted
        assert call(PAGED, scale=scale).isfinite().all()


def test_a_mask_for_each_head_is_a_call_for_each(library: Library) -> None:
    mask = torch.rand(1, 8, 3, 20) < 0.5
    call(PAGED, mask="bool", attn_mask=mask)
    planned = [c.given for c in library.calls if c.name.endswith(".plan")]
    assert [(p["num_qo_heads"], p["num_kv_heads"]) for p in planned] == [(1, 1)] * 8
    assert not any(p["causal"] for p in planned)
    seen = torch.ones(3, 20, dtype=torch.bool).tril(17)
    for head, plan in enumerate(planned):
        assert torch.equal(plan["custom_mask"].view(3, 20), mask[0, head] & seen)


def test_splits_depend_on_nothing_else_where_that_is_asked(library: Library) -> None:
    one = {"phase": "decode", "s_relation": "one", "causal": "none", "kv_heads": 2}
    call(PAGED, 1, **one)
    assert "disable_split_kv" not in given(library, "_plan_impl")
    call(PAGED, 1, **one, batch_invariant=True)
    assert given(library, "_plan_impl")["disable_split_kv"] is True


@pytest.mark.parametrize("counts", [(1, 0, 1), (0, 1, 1), (1, 1, 0)], ids=str)
@pytest.mark.parametrize("lse", [False, True])
def test_a_sequence_without_a_query_changes_no_other(counts: tuple[int, ...], lse: bool, library: Library) -> None:
    """The decode wrapper serves the others as it serves them alone."""
    one = {"phase": "decode", "s_relation": "one", "batch_invariant": True, "lse": lse}
    bound = PAGED.bind(**STEP, **one)
    caches = [torch.randn(9, 16, 2, 64).bfloat16() for _ in range(2)]
    table, lens = torch.randperm(9, dtype=torch.int32).view(3, 3), torch.tensor([20, 0, 40], dtype=torch.int32)
    starts = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
    query = torch.randn(2, 8, 64).bfloat16()
    most = {"max_seqlen_q": 1, "max_seqlen_k": 40}
    found = bound.forward(query, *caches, **in_tables(page_table=table, seq_lens=lens, cu_seqlens_q=starts, **most))
    assert given(library, "_plan_impl")["disable_split_kv"] is True
    assert not [c for c in library.calls if "Prefill" in c.name]
    row = torch.tensor([0, 1], dtype=torch.int32)
    for i, n in enumerate(n for n, count in enumerate(counts) if count):
        own = {"page_table": table[n : n + 1], "seq_lens": lens[n : n + 1], "cu_seqlens_q": row, **most}
        alone = bound.forward(query[i : i + 1], *caches, **in_tables(**own))
        for whole, part in zip(found if lse else (found,), alone if lse else (alone,), strict=True):
            assert torch.equal(whole[i : i + 1], part)


def test_kernels_write_where_they_can(library: Library) -> None:
    out = torch.empty(3, 8, 64).bfloat16()
    assert call(PAGED, out=out) is out
    assert given(library, ".run")["out"] is out
    off = torch.empty(3 * 8 * 64 + 1).bfloat16()[1:].view(3, 8, 64)
    assert call(PAGED, out=off) is off
    assert given(library, ".run")["out"] is None, "they write 16 bytes at a time"
    strided = torch.empty(3, 8, 70).bfloat16()[..., :64]
    assert call(PAGED, out=strided) is strided
    assert given(library, ".run")["out"] is None


def test_a_dense_call_is_planned_once_for_its_lengths(library: Library) -> None:
    bound = RAGGED.bind(family="dense", heads=4, kv_heads=2, head_dim=64, causal="bottom_right")
    q, k = torch.randn(2, 9, 4, 64).bfloat16(), torch.randn(2, 9, 2, 64).bfloat16()
    for _ in range(3):
        bound.forward(q, k, k)
    assert sum(c.name.endswith(".plan") for c in library.calls) == 1
    bound.forward(q[:, :5], k, k)
    bound.forward(q, k, k)
    assert sum(c.name.endswith(".plan") for c in library.calls) == 3


# What the kernels read by TMA, and how far they reach.


def odd_token(heads: int = 8, width: int = 64) -> Tensor:
    """[1, heads, width] of a buffer whose rows are no whole 16 bytes: contiguous by torch, and its axis of one odd."""
    token = torch.randn(2, heads * width + 4).bfloat16()[:, : heads * width].unflatten(1, (heads, width))[:1]
    assert token.is_contiguous()
    assert token.stride(0) % 8
    return token


def test_a_token_of_odd_rows_is_copied_for_tma(library: Library) -> None:
    """The emulator reads garbage where a stride is no multiple of 16 bytes, as TMA does, that of an axis of one too."""
    assert call(PAGED, 1, query=odd_token()).isfinite().all()
    wrapper = given(library, "__init__")
    assert (wrapper["backend"], given(library, ".run")["q"].stride()) == ("fa3", (512, 64, 1))
    even = torch.randn(1, 8, 64).bfloat16()
    call(PAGED, 1, query=even)
    assert given(library, ".run")["q"] is even


@pytest.mark.parametrize("what", ["query", "key", "value"])
def test_ragged_tensors_of_odd_strides_are_copied_for_tma(what: str, library: Library) -> None:
    """One head of those that are padded to an odd width, or one token."""
    tensors = {name: torch.randn(9, 1, 64).bfloat16() for name in ("query", "key", "value")}
    tensors[what] = torch.randn(9, 8, 65).bfloat16()[:, :1, :64]
    assert tensors[what].stride() == (520, 65, 1)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    lens: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 5, "max_seqlen_k": 5}
    bound = RAGGED.bind(family="varlen", layout="THD", heads=1, kv_heads=1, head_dim=64)
    wanted = bound.forward(*(tensor.contiguous().clone() for tensor in tensors.values()), **lens)
    assert given(library, "__init__")["backend"] == "fa3"
    assert torch.equal(bound.forward(*tensors.values(), **lens), wanted)
    one = {**lens, "cu_seqlens_q": torch.tensor([0, 0, 1], dtype=torch.int32)}
    assert bound.forward(odd_token(1), *list(tensors.values())[1:], **one).isfinite().all()


def test_queries_out_of_reach_are_copied(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32-bit offsets: the emulator reads garbage beyond."""
    for module in (emulator, scales, paged):
        monkeypatch.setattr(module, "REACH", 3 * 8 * 64)
    wide = torch.randn(3, 8, 128).bfloat16()[..., :64]
    assert call(AMPERE, query=wide).isfinite().all()
    assert given(library, ".run")["q"].is_contiguous()
    mask = torch.ones(1, 8, 3, 20, dtype=torch.bool)
    assert call(AMPERE, query=wide, mask="bool", attn_mask=mask).isfinite().all()
    monkeypatch.setattr(emulator, "REACH", 3 * 64)
    monkeypatch.setattr(scales, "REACH", 3 * 64)
    assert call(AMPERE, mask="bool", attn_mask=mask).isfinite().all(), "a head by itself, with the stride of all"


DECODING: dict[str, Any] = {"phase": "decode", "s_relation": "one", "causal": "none"}


@pytest.mark.parametrize("fields", [{}, {"mask": "bool"}, DECODING, {**DECODING, "kv_heads": 8}], ids=str)
def test_more_tokens_than_fa2_reaches_are_refused(
    fields: dict[str, Any], library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = 1 if "phase" in fields else 3
    monkeypatch.setattr(paged, "REACH", tokens * 8 * 64 - 1)
    if "mask" in fields:
        fields = {**fields, "attn_mask": torch.ones(1, 1, 3, 20, dtype=torch.bool)}
    message = rf"has {tokens} tokens of 8 heads of 64: it takes at most {tokens - 1} tokens at once\. Call it for fewer"
    with pytest.raises(UnsupportedRequestError, match=message):
        call(AMPERE, tokens, **fields)
    assert not [c for c in library.calls if "plan" in c.name]
    assert call(PAGED).isfinite().all(), "fa3 counts in 64 bits"


@pytest.mark.parametrize("side", ["queries", "keys"])
@pytest.mark.parametrize("family", ["dense", "varlen"])
def test_packed_tokens_that_fa2_does_not_reach_are_refused(
    family: str, side: str, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = (9, 3) if side == "queries" else (1, 9)
    heads = 8 if side == "queries" else 2
    monkeypatch.setattr(paged, "REACH", 9 * heads * 64 - 1)
    bound = Emulated("flashinfer", "ragged", "cuda:sm80@12.4").bind(
        family=family, heads=8, kv_heads=2, head_dim=64, causal="none", s_relation="fewer"
    )
    q, k, v = torch.randn(long, 8, 64).bfloat16(), *torch.randn(2, short, 2, 64).bfloat16()
    where: dict[str, Any] = {}
    if family == "varlen":
        where = {f"cu_seqlens_{n}": torch.tensor([0, t.shape[0]], dtype=torch.int32) for n, t in (("q", q), ("k", k))}
        where |= {"max_seqlen_q": long, "max_seqlen_k": short}
    given = (q, k, v) if where else (q[None], k[None], v[None])
    with pytest.raises(UnsupportedRequestError, match=rf"has 9 tokens of {heads} heads of 64: it takes at most 8"):
        bound.forward(*given, **where)
    assert not [c for c in library.calls if "plan" in c.name]


# Masks.


@pytest.mark.parametrize("fields", [{}, {"causal": "none"}, {"window": (4, -1)}], ids=str)
@pytest.mark.parametrize("tree", [False, True])
def test_a_mask_of_blocks_is_that_of_one(tree: bool, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sequences of which one is without queries, one without keys, and one has more queries than keys."""
    request, lens = (
        PAGED.request(**{**EXTEND, "mask": "bool", **fields}),
        batch(((3, 20), (0, 5), (7, 33), (2, 0), (4, 2))),
    )
    mask = torch.rand(5, 7, 7) < 0.6 if tree else torch.rand(5, 1, 7, 33) < 0.4
    flat, alive = [], []
    for n, (s_q, s_k) in enumerate(zip(lens.queries.tolist(), lens.seq_lens.tolist(), strict=True)):
        drafts = mask[n, :s_q, max(s_q - s_k, 0) : s_q] if tree else None
        prefix = torch.ones(s_q, max(s_k - s_q, 0), dtype=torch.bool)
        seen = mask[n, 0, :s_q, :s_k] if drafts is None else torch.cat([prefix, drafts], 1)
        seen = seen & emulator.visible(s_q, s_k, request.causal != "none", request.window[0])
        flat.append(seen.flatten())
        alive.append(seen.any(1))
    for block in (1, 7, 60, 1 << 20):
        monkeypatch.setattr(lengths, "_BLOCK", block)
        found = flattened(request, lens, (tree_rule if tree else mask_rule)(mask), CPU)
        assert torch.equal(found.flat, torch.cat(flat))
        assert torch.equal(found.alive, torch.cat(alive))


class _Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operation of torch makes, but for those of bool."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.dtype != torch.bool:
            self.nbytes = max(self.nbytes, found.nbytes)
        return found


def test_a_long_mask_takes_little_memory_beside_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "_BLOCK", 1 << 12, raising=False)
    rule = mask_rule(torch.ones(1, 1, 300, 400, dtype=torch.bool))
    with _Largest() as largest:
        flattened(PAGED.request(**EXTEND, mask="bool"), batch([(300, 400)]), rule, CPU)
    assert largest.nbytes <= 4 << 12, "int32 over a block"


def test_more_pairs_than_a_mask_may_have_are_refused(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lengths._PAIRS == emulator.PAIRS
    mask = torch.ones(1, 1, 3, 20, dtype=torch.bool)
    monkeypatch.setattr(lengths, "_PAIRS", 61)
    assert call(PAGED, mask="bool", attn_mask=mask).isfinite().all()
    monkeypatch.setattr(lengths, "_PAIRS", 60)
    message = r"the sequences of this call have 60: it takes fewer than 60 at once\. Call it for fewer sequences"
    with pytest.raises(UnsupportedRequestError, match=message):
        call(PAGED, mask="bool", attn_mask=mask)


# Latent attention in pieces.

WIDE: dict[str, Any] = {"family": "mla", "layout": "THD", "heads": 128, "head_dim": 576, "v_head_dim": 512}
WIDE |= {"scale": 0.07, "page_size": 4, "phase": "extend", "s_relation": "any"}


def batch(rows: Iterable[tuple[int, int]], page_size: int = 4) -> Lengths:
    """Of sequences (queries, keys)."""
    counts, keys = zip(*rows, strict=True)
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    return Lengths.paged(starts, torch.tensor(keys, dtype=torch.int32), page_size)


BATCHES = {
    "one prompt": [(16384, 16384)],
    "a prompt after a prefix": [(16300, 100_000)],
    "short rows": [(1, 7)] * 16_000 + [(9, 30_000)],
    "long rows": [(1, 1 << 20)] * 40,
    "no keys": [(5, 0), (0, 9), (7, 3), (1, 900)],
    "many": [(n % 50, 13 * n) for n in range(1, 600)],
}


@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=list(BATCHES))
def test_work_is_counted_as_the_planner_does(
    rows: list[tuple[int, int]], causal: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent, "_MOST_WORK", 1 << 30)
    request, lens = LATENT.request(**{**WIDE, "heads": heads, "causal": causal}), batch(rows)
    wanted = emulator.mla_works(lens.queries.tolist(), lens.seq_lens.tolist(), heads, causal != "none")
    assert latent._work(request, lens, emulator.PROCESSORS) == wanted
    bound = lens.tokens * heads // 64 + len(rows) + emulator.PROCESSORS
    assert wanted <= bound, "what is known without a look at each sequence"


@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_a_batch_is_cut_into_pieces_that_fit(causal: str, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator, "PROCESSORS", 7)
    request = LATENT.request(**{**WIDE, "heads": heads, "causal": causal})
    rows = [(9, 40), (0, 6), (1, 1), (260, 270), (3, 0), (0, 8), (300, 4), (1, 999), (0, 3)]
    lens, room = batch(rows), 5
    pieces = cut(request, lens, room, 64)
    assert len(pieces) > 1
    tokens, sequence = 0, [n for n, (s_q, _) in enumerate(rows) for _ in range(s_q)]
    for piece in pieces:
        of, page = piece.lens, piece.pages.start
        works = emulator.mla_works(of.queries.tolist(), of.seq_lens.tolist(), heads, causal != "none")
        assert works <= room + emulator.PROCESSORS
        assert (piece.tokens.start, piece.tokens.stop) == (tokens, tokens + of.tokens)
        for s_q, s_k in zip(of.queries.tolist(), of.seq_lens.tolist(), strict=True):
            for at in range(tokens, tokens + s_q):
                n = sequence[at]
                last, whole = int(lens.cu_seqlens_q[n + 1]) - 1, rows[n][1]
                assert page == lens.kv_indptr[n]
                # Keys that the query sees, here and in the whole batch.
                here, there = (s_k - (tokens + s_q - 1 - at), whole - (last - at)) if causal != "none" else (s_k, whole)
                assert max(here, 0) == max(there, 0)
            tokens += s_q
            page += -(-s_k // 4)
        assert page == piece.pages.stop
    assert tokens == len(sequence)


def in_pieces(monkeypatch: pytest.MonkeyPatch, most: int = 12, processors: int = 3) -> None:
    """Let plans have little room, in the emulator too."""
    monkeypatch.setattr(latent, "_MOST_WORK", most)
    monkeypatch.setattr(emulator, "WORKS", most)
    monkeypatch.setattr(emulator, "PROCESSORS", processors)
    monkeypatch.setattr(latent, "processors", lambda device: processors)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_more_work_than_a_plan_has_room_for_is_planned_in_pieces(
    causal: str, lse: bool, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    lens = batch([(9, 40), (0, 6), (11, 0), (14, 3), (1, 30), (20, 20)])
    bound = LATENT.bind(**WIDE, causal=causal, lse=lse)
    query, cache = torch.randn(lens.tokens, 128, 576).bfloat16(), torch.randn(80, 4, 576).bfloat16()
    table = torch.randperm(80)[:60].int().view(6, 10)
    given: dict[str, Any] = {"page_table": table, "seq_lens": lens.seq_lens, "cu_seqlens_q": lens.cu_seqlens_q}
    given |= {"max_seqlen_q": 20, "max_seqlen_k": 40}
    whole = bound.forward(query, cache, **in_tables(**given))
    assert sum(c.name.endswith("Wrapper.plan") for c in library.calls) == 1
    in_pieces(monkeypatch)
    out = torch.empty(lens.tokens, 128, 512).bfloat16()
    for target in (None, out):
        found = bound.forward(query, cache, **in_tables(**given, out=target))
        for part, wanted in zip(found, whole, strict=True) if lse else [(found, whole)]:
            torch.testing.assert_close(part, wanted, rtol=1e-2, atol=1e-2)
        assert target is None or (found[0] if lse else found) is target
    assert sum(c.name.endswith("Wrapper.plan") for c in library.calls) > 5


def test_work_that_fits_to_the_last_item_is_planned_at_once(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 heads a work item is a token."""
    assert latent._MOST_WORK == emulator.WORKS
    in_pieces(monkeypatch, processors=2)
    planner = latent._Call(LATENT.request(**WIDE, causal="bottom_right"))
    assert len(planner._pieces(batch([(12, 12)]), CPU, recorded=True)) == 1
    assert len(planner._pieces(batch([(13, 13)]), CPU, recorded=False)) > 1


# The schedule of the fa3 template.

SCHEDULES = {"of two tiles": (1200, 129), "of many": (4096, 1), "long": (1, 300_000), "one for all": (5000, 9)}


@pytest.mark.parametrize(("sequences", "length"), SCHEDULES.values(), ids=list(SCHEDULES))
@pytest.mark.parametrize("heads", [64, 128])
def test_a_schedule_of_many_heads_has_room(heads: int, sequences: int, length: int, library: Library) -> None:
    """The emulator counts the planner's arrays, and refuses what is larger than the integer workspace."""
    fields: dict[str, Any] = {"heads": heads, "kv_heads": 8, "head_dim": 128, "causal": "bottom_right"}
    starts, ones = torch.arange(sequences + 1, dtype=torch.int32) * length, torch.ones(sequences, dtype=torch.int32)
    lens, pages, bench = Lengths.paged(starts, ones, 16), torch.zeros(sequences, dtype=torch.int32), Workbench(CPU)
    request = PAGED.request(**{**EXTEND, **fields})
    wrapper = [paged._Call(request).plan(bench, lens, pages, 1 << 20) for _ in range(2)][-1]
    assert bench.planned(wrapper)
    needed = int_bytes(request, sequences, int(starts[-1]))
    assert needed <= wrapper.integers <= 16 << 20
    assert heads > 64 or wrapper.integers == emulator.INTEGERS, "what a wrapper makes for itself is enough"
    unpaged = RAGGED.request(family="varlen", layout="THD", **fields)
    assert ragged._Call(unpaged)._planned(bench, lens).integers == wrapper.integers


def test_an_integer_workspace_only_grows(library: Library) -> None:
    assert workbench._STAGED == emulator.INTEGERS
    bench, wrapper = Workbench(CPU), library.modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper
    made, other = (
        bench.wrapper(name, lambda workspace: wrapper(float_workspace_buffer=workspace), 1 << 10) for name in "ab"
    )
    sizes = []
    for nbytes in (1 << 20, 9 << 20, 8 << 20, (16 << 20) + 1):
        bench.stage(made, nbytes)
        sizes.append(made.integers >> 20)
    assert sizes == [8, 16, 16, 32]
    assert made.workspace is bench.workspace(1 << 10)
    bench.stage(other, 9 << 20)
    assert other.integers == 16 << 20, "each has its own"


def test_what_is_not_served_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.library("0.6.18.post1").install(monkeypatch)
    latent = {"family": "mla", "heads": 16, "head_dim": 576, "v_head_dim": 512, "scale": 0.07, "page_size": 1}
    with pytest.raises(
        BackendUnavailableError, match=r"flashinfer-python 0\.6\.18\.post1 has no usable flashinfer\.mla"
    ):
        LATENT.bind(**latent)


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_a_call_by_itself_is_not_recorded(capturing: None) -> None:
    with pytest.raises(GraphError, match="plans on the host"), Lender().lend(GPU):
        pass


def test_a_scale_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[float] = []
    monkeypatch.setattr(Tensor, "__float__", lambda t: reads.append(1.0) or t.item())  # type: ignore[func-returns-value]
    host, scale = HostScale(), torch.tensor(0.5)
    assert [host(scale), host(scale), host(None)] == [0.5, 0.5, None]
    assert len(reads) == 1
    scale.fill_(0.25)
    assert host(scale) == 0.25


def test_threads_take_turns_to_remember_scales() -> None:
    host, scales = HostScale(), [torch.tensor(0.5), torch.tensor(0.25)]
    host(scales[0])
    with host._writing:
        other = threading.Thread(target=host, args=(scales[1],))
        other.start()
        other.join(0.2)
        assert other.is_alive()
        assert len(host._known) == 1
    other.join()
    assert [known[2] for known in host._known.values()] == [0.5, 0.25]
    scales.pop()
    host(torch.tensor(0.125))
    assert 0.25 not in [known[2] for known in host._known.values()], "a tensor that is gone is forgotten"


def test_a_scale_that_is_not_known_is_not_read_while_recording(capturing: None) -> None:
    class OnGPU(Tensor):
        is_cuda = True

    with pytest.raises(GraphError, match="run the step once before it is recorded"):
        HostScale()(torch.tensor(0.5).as_subclass(OnGPU))


@pytest.fixture
def lender(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lender]:
    fresh = Lender()
    monkeypatch.setattr(paged, "LENDER", fresh)
    monkeypatch.setattr(ragged, "LENDER", fresh)
    return fresh


def test_a_workbench_has_one_user_at_a_time(lender: Lender) -> None:
    with lender.lend(CPU) as first:
        with lender.lend(CPU) as second:
            assert first is not second
            assert first.workspace(64).data_ptr() != second.workspace(64).data_ptr()
        with lender.lend(CPU) as third:
            assert third is second
    assert not first.workspace(64).any(), "new memory is zero"


def test_threads_do_not_share_plans(lender: Lender, library: Library) -> None:
    """The emulator spoils a plan over whose workspace another was made before it was run."""
    meeting, failed = threading.Barrier(2, timeout=1800), []
    prefill = library.modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper
    plan = prefill.plan

    def slowly(self: Any, **a: Any) -> None:
        plan(self, **a)
        meeting.wait()

    def work() -> None:
        try:
            for _ in range(3):
                assert call(PAGED).isfinite().all()
        except BaseException as exc:
            failed.append(exc)
            raise

    slowly.__signature__ = plan.__signature__  # type: ignore[attr-defined]
    prefill.plan = slowly
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    memory = {c.given["float_workspace_buffer"].data_ptr() for c in library.calls if c.name.endswith("__init__")}
    assert len(memory) == 2


def test_streams_do_not_share_memory(lender: Lender, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of two streams run at once: alternating between them, and between libraries, each keeps its own."""
    current = [7]
    monkeypatch.setattr(workbench, "_stream", lambda device: current[0])
    dense = RAGGED.bind(family="dense", heads=4, kv_heads=2, head_dim=64)
    q = torch.randn(1, 9, 4, 64).bfloat16()
    benches: dict[int, set[int]] = {}
    for stream in (7, 8, 7, 8):
        current[0] = stream
        assert call(PAGED).isfinite().all()
        assert dense.forward(q, q[:, :, :2], q[:, :, :2]).isfinite().all()
        with lender.lend(CPU) as bench:
            benches.setdefault(stream, set()).add(id(bench))
    assert [len(found) for found in benches.values()] == [1, 1]
    assert benches[7].isdisjoint(benches[8])


def test_memory_that_grows_makes_new_wrappers() -> None:
    bench, made = Workbench(CPU), []
    for nbytes in (1 << 10, 1 << 10, (128 << 20) + 16):
        bench.wrapper("kind", lambda workspace: made.append(workspace.numel()) or object(), nbytes)
    assert made == [128 << 20, (128 << 20) + 16]


def test_a_plan_waits_until_the_last_one_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are copied from pinned memory, which the next plan writes over."""
    said: list[str] = []

    class Event:
        def record(self, stream: Any) -> None:
            said.append(f"record on {stream}")

        def synchronize(self) -> None:
            said.append("wait")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    bench = Workbench(GPU)
    for _ in range(2):
        with bench.planning(object()):
            said.append("plan")
    assert said == ["plan", "record on stream", "wait", "plan", "record on stream"]


def test_a_plan_that_fails_is_no_plan() -> None:
    bench, wrapper, other = Workbench(CPU), object(), object()
    with bench.planning(wrapper, "first"):
        pass
    assert bench.holds("first")
    assert bench.planned(wrapper)
    with pytest.raises(ValueError, match="no kernel"), bench.planning(other, "second"):
        raise ValueError("no kernel")
    assert not bench.holds("first")
    assert not bench.planned(other), "the next plan is its first"


def tile_of(packed: int) -> int:
    return 128 if packed > 64 else 64 if packed > 16 else 16


def partial_tiles(lengths: tuple[int, ...], keys: int, group: int, most: int) -> tuple[int, int]:
    """(tiles, rows of one) of an eager step whose keys are split, (0, 0) of one whose are not: `PrefillSplitQOKVIndptr`
    and `PrefillBinarySearchKVChunkSize` of FlashInfer's scheduler.cuh, for pages of one token."""
    tile = tile_of(sum(lengths) * group // len(lengths))
    tiles = [-(-length * group // tile) for length in lengths]
    low, high = 128, keys
    while low < high:
        mid = (low + high) // 2
        low, high = (mid + 1, high) if sum(tiles) * -(-keys // mid) > most else (low, mid)
    return (sum(tiles) * -(-keys // low), tile) if low < keys else (0, 0)


@pytest.mark.parametrize("lengths", [(1,), (1,) * 40, (1, 300, 7), (16,) * 9, (2048,), (1,) * 300], ids=str)
@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (64, 1)], ids=str)
def test_the_workspace_is_never_too_small(
    lengths: tuple[int, ...], heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what FlashInfer's planner takes for partial results of as many keys as one likes."""
    monkeypatch.setattr(workbench, "processors", lambda device: 132)
    request = PAGED.request(**{**EXTEND, "heads": heads[0], "kv_heads": heads[1]})
    group, tokens, sequences = heads[0] // heads[1], sum(lengths), len(lengths)
    row = 4 * heads[0] * (64 + 1)
    eager = float_bytes(request, GPU, sequences, tokens)
    for keys in (200, 4096, 100_000):
        tiles, rows = partial_tiles(lengths, keys, group, 2 * 132 // heads[1])
        assert tiles * rows * row <= eager
    tile = tile_of((tokens - sequences + 1) * group)
    tiles = max(2 * 132 // heads[1], -(-tokens * group // tile) + sequences - 1)
    assert tiles * tile * row <= float_bytes(request, GPU, sequences, tokens, recorded=True)
    assert eager < 600 << 20, "however long the step is"
