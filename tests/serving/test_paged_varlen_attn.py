"""torch's varlen_attn with a page table, bound to its real signature and run through an emulator of its kernel."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from polyattn import what_if
from polyattn.backends.paged_varlen_attn import PagedVarlenAttn
from polyattn.contract import AttentionRequest, PagedTables, Provider
from polyattn.errors import UnsupportedRequestError
from polyattn.registry.manager import get_manager
from polyattn.semantics import reference
from polyattn.testing import Case, OffChip, generate, run_case
from polyattn.testing.emulators.windows import fa2_window

SIGNATURE = inspect.signature(varlen.varlen_attn)
FACTS = {"platform": "cuda", "arch": "sm90"}
pytestmark = pytest.mark.skipif("block_table" not in SIGNATURE.parameters, reason="torch 2.12 brought block_table")


class Kernel:
    """What torch's FlashAttention-2 does with these arguments: its checks, its bottom-right windows, its LSE."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *args: Any, **kw: Any) -> tuple[Tensor, Tensor]:
        bound = SIGNATURE.bind(*args, **kw)
        bound.apply_defaults()
        a = bound.arguments
        self.calls.append(a)
        query, key, value = a["query"], a["key"], a["value"]
        batch, size, width = a["cu_seq_q"].numel() - 1, key.shape[1], query.shape[2]
        assert query.dtype in (torch.float16, torch.bfloat16)
        assert query.dtype == key.dtype == value.dtype
        assert key.shape == value.shape
        assert key.shape[3] == width
        assert width % 8 == 0
        assert width <= 256
        assert size % 256 == 0, "Paged KV cache block size must be divisible by 256"
        assert all(t.stride(-1) == 1 for t in (query, key, value, a["block_table"]))
        assert a["seqused_k"].shape == (batch,)
        for lens in (a["cu_seq_q"], a["cu_seq_k"], a["seqused_k"], a["block_table"]):
            assert lens is None or (lens.dtype == torch.int32 and lens.is_contiguous())
        if a["max_q"] == 1 and query.shape[1] > key.shape[2]:
            query.reshape(batch, key.shape[2], -1, width)
        assert a["enable_gqa"] or query.shape[1] == key.shape[2]
        left, right = a["window_size"]
        for queries, keys in zip(a["cu_seq_q"].diff().tolist(), a["seqused_k"].tolist(), strict=True):
            # A block of 64 queries without a key (flash-attention#2842).
            ahead = keys if (left, right) == (-1, -1) else 64 + keys - queries + max(right, 0)
            assert not queries or min(keys, ahead) > 0, "CUDA error: an illegal memory access was encountered"
        # The last key of a page table that is shorter than max_k, or keys past seqused_k, are never looked at.
        out, lse = reference.paged_attention(
            query,
            key,
            value,
            page_table=a["block_table"],
            seq_lens=a["seqused_k"],
            cu_seqlens_q=a["cu_seq_q"],
            causal="none",
            window=fa2_window(*a["window_size"], a["max_k"]),
            scale=a["scale"],
            return_lse=True,
        )
        lse = lse.masked_fill(lse == -torch.inf, torch.inf).transpose(0, 1).contiguous()
        assert a["return_aux"].lse
        return out, lse


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr(varlen, "varlen_attn", found)
    return found


def provider() -> Provider:
    return next(p for p in get_manager().backends["torch_native", "cuda"].providers if p.name == "varlen-attn")


def request_of(**fields: Any) -> AttentionRequest:
    usual: dict[str, Any] = {
        **FACTS,
        "family": "paged",
        "layout": "THD",
        "dtype": "bfloat16",
        "phase": "extend",
        "s_relation": "fewer",
        "causal": "bottom_right",
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 64,
        "page_size": 256,
    }
    return AttentionRequest(**{**usual, **fields}).normalised()


def cases() -> list[Case]:
    made = generate(provider().rows, FACTS, families=("paged",), dtypes=("bfloat16", "float16"), per_row=24)
    # Windows of 300 and pages of 512 mean something for these lengths only.
    long = ((5, 700), (1, 256), (3, 257), (1, 0), (0, 9), (2, 512))
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"window": (300, -1)},
        {"window": (17, -1), "kv_layout": "HND", "save_kv_cache": True},
        {"page_size": 512, "lse": True, "sinks": True},
        {"causal": "none", "window": (20, 5)},
        {"phase": "verify", "spec_topk": 1, "scale": -0.2},
    )
    decode = ((1, 700), (1, 0), (1, 256), (0, 3))
    one = {"phase": "decode", "s_relation": "one", "causal": "none"}
    made += [Case(request=request_of(**c), lengths=long, new_rows=bool(c.get("save_kv_cache"))) for c in changes]
    made += [Case(request=request_of(**one), lengths=decode[:count], new_rows=count == 3) for count in (3, 4)]
    return [c for c in made if c.check != "capture"]


CASES = cases()


@pytest.mark.slow(keep=59)
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_case(case: Case, kernel: Kernel) -> None:
    outcome = run_case(OffChip("torch_native", "cuda"), case)
    assert outcome.verdict == "passed", str(outcome)
    assert kernel.calls or case.request.zero_size, "another provider served it"


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run(kernel: Kernel, **fields: Any) -> dict[str, Any]:
    request = request_of(**fields)
    cache = torch.randn(2, 256, 2, 64).bfloat16()
    query = torch.randn(4, 8, 64).bfloat16()
    tables = PagedTables(int32([1], [0]), int32(9, 30), int32(0, 2, 4), 2, 30)
    PagedVarlenAttn().bind(request).forward(query, cache, cache, tables=tables)
    return kernel.calls[-1]


def test_the_cache_is_read_where_it_lies(kernel: Kernel) -> None:
    cache = torch.randn(3, 256, 2, 64).bfloat16()
    request = request_of()
    tables = PagedTables(int32([2]), int32(5), int32(0, 1), 1, 5)
    PagedVarlenAttn().bind(request).forward(torch.randn(1, 8, 64).bfloat16(), cache, cache, tables=tables)
    assert kernel.calls[0]["key"] is cache
    assert torch.equal(kernel.calls[0]["block_table"], tables.page_table)


def test_batch_invariance_is_one_split(kernel: Kernel) -> None:
    assert run(kernel)["num_splits"] is None
    assert run(kernel, batch_invariant=True)["num_splits"] == 1


def test_starts_of_keys_are_for_flash_attention_2_alone(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(kernel)["cu_seq_k"].tolist() == [0, 9, 39]
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    assert run(kernel)["cu_seq_k"] is None


def test_its_pages_come_before_gathering() -> None:
    # As an engine's calls are: without an installed vendor kernel, asked for by name.
    where = {"platform": "cuda:sm90", "installed": ("torch==2.13.0",), "backend": "torch_native"}
    assert what_if(request_of(arch=""), **where).provider == "varlen-attn"
    for other in ({"page_size": 64}, {"dtype": "float32"}, {"v_head_dim": 128}, {"head_dim": 576, "v_head_dim": 512}):
        assert what_if(request_of(arch="", **other), **where).provider == "torch-serving"
    old = {**where, "platform": "cuda:sm75"}
    assert what_if(request_of(arch=""), **old).provider == "torch-serving"


def test_its_limits_are_named() -> None:
    request = request_of(arch="", page_size=64, sinks=True)
    with pytest.raises(UnsupportedRequestError) as refused:
        what_if(request, platform="cuda:sm90", installed=("torch==2.13.0",), backend="torch_native")
    assert "varlen-attn: page_size=64 is not >= 256, a multiple of 256" in str(refused.value)


@pytest.mark.parametrize("window", [(9, -1), (-1, 9)])
def test_windows_of_queries_before_the_first_key_are_not_its_own(window: tuple[int, int]) -> None:
    where: dict[str, Any] = {"platform": "cuda:sm90", "installed": ("torch==2.13.0",), "backend": "torch_native"}
    request = request_of(arch="", s_relation="more", causal="none", window=window)
    assert what_if(request, **where).provider == "torch-serving"
    assert what_if(dataclasses.replace(request, s_relation="fewer"), **where).provider == "varlen-attn"


def test_a_block_of_queries_before_the_first_key_is_none_of_its() -> None:
    where: dict[str, Any] = {"platform": "cuda:sm90", "installed": ("torch==2.13.0",), "backend": "torch_native"}
    for causal, provider in (("bottom_right", "torch-serving"), ("none", "varlen-attn")):
        assert what_if(request_of(arch="", s_relation="more", causal=causal), **where).provider == provider


def test_a_row_of_padding_has_keys_of_page_0_and_gives_nothing(kernel: Kernel) -> None:
    """As many as queries, however few columns the table has."""
    cache = torch.full((2, 256, 2, 64), torch.nan).bfloat16()
    cache[1] = 1.0
    request = request_of(lse=True)
    tables = PagedTables(int32([1], [-7]), int32(9, 0), int32(0, 1, 301), 300, 9)
    out, lse = PagedVarlenAttn().bind(request).forward(torch.randn(301, 8, 64).bfloat16(), cache, cache, tables=tables)
    given = kernel.calls[-1]
    assert (given["seqused_k"].tolist(), given["cu_seq_k"].tolist(), given["max_k"]) == ([9, 300], [0, 9, 309], 300)
    assert given["block_table"].tolist() == [[1, 0], [0, 0]]
    assert torch.equal(out[0], torch.ones_like(out[0]))
    assert not out[1:].any()
    assert bool((lse[1:] == -torch.inf).all())
    assert bool(lse[0].isfinite().all())


def test_an_older_torch_gathers() -> None:
    where: dict[str, Any] = {"platform": "cuda:sm90", "installed": ("torch==2.11.0",), "backend": "torch_native"}
    assert what_if(request_of(arch=""), **where).provider == "torch-serving"
