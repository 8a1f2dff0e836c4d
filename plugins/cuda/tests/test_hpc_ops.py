"""HPC-Ops: conformance over an emulator of its kernels, free slots included, and what they are really given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn import what_if
from polyattn.errors import BackendUnavailableError, UnsupportedRequestError
from polyattn.records import AttentionRequest
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library

from .emulators import hpc_ops as emulator

TARGET = Emulated("hpc_ops", "hpc-ops", "cuda:sm90@12.8")
FINITE = {"options": (("free_slots", "finite"),)}
PAGED: dict[str, Any] = {
    "family": "paged",
    "layout": "THD",
    "heads": 8,
    "kv_heads": 2,
    "page_size": 64,
    "phase": "extend",
    "s_relation": "fewer",
    "causal": "bottom_right",
}
DECODE = {**PAGED, "phase": "decode", "s_relation": "one", "causal": "none"}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return emulator.library().install(monkeypatch)


@pytest.mark.parametrize("case", TARGET.cases(per_row=16), ids=str)
def test_conformance(case: Case, library: Library) -> None:
    TARGET.passes(case, library)


def run(blank: float = 0.0, out: Tensor | None = None, **fields: Any) -> Tensor:
    """One query to 9 keys in page 1 of 2; free slots hold `blank`."""
    caches = torch.randn(2, 2, 64, 2, 128).bfloat16()
    caches[:, 1, 9:] = blank
    tables: dict[str, Any] = {
        "page_table": torch.tensor([[1]], dtype=torch.int32),
        "seq_lens": torch.tensor([9], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
    }
    forward = TARGET.bind(**fields).forward
    result: Tensor = forward(
        torch.randn(1, 8, 128).bfloat16(), *caches, **tables, max_seqlen_q=1, max_seqlen_k=9, out=out
    )
    return result


@pytest.mark.parametrize("fields", [PAGED, DECODE])
def test_free_slots_reach_the_kernel_only_by_promise(fields: dict[str, Any], library: Library) -> None:
    assert bool(run(blank=torch.nan, **fields).isfinite().all())
    assert library.calls[-1].given["kcache"].shape[0] == 1, "the pages in the table, copied"
    assert bool(run(**fields, **FINITE).isfinite().all())
    assert library.calls[-1].given["kcache"].shape[0] == 2, "the cache itself"
    assert bool(run(blank=torch.nan, **fields, **FINITE).isnan().any())
    assert all(call.positional == 0 for call in library.calls)


@pytest.mark.parametrize("fields", [PAGED, DECODE], ids=["prefill", "decode"])
def test_lengths_and_tables_with_gaps_are_those_without(fields: dict[str, Any], library: Library) -> None:
    def gapped(numbers: list[int]) -> Tensor:
        return torch.tensor([[number, -9] for number in numbers], dtype=torch.int32)[:, 0]

    caches, query = torch.randn(2, 3, 64, 2, 128).bfloat16(), torch.randn(2, 8, 128).bfloat16()
    forward = TARGET.bind(**fields).forward
    plain = {"seq_lens": [9, 30], "cu_seqlens_q": [0, 1, 2]}
    table = torch.tensor([[1, -9], [2, -9]], dtype=torch.int32)
    sizes = {"max_seqlen_q": 1, "max_seqlen_k": 30}
    given = {name: torch.tensor(numbers, dtype=torch.int32) for name, numbers in plain.items()}
    wanted = forward(query, *caches, page_table=table[:, :1].contiguous(), **given, **sizes)
    given = {name: gapped(numbers) for name, numbers in plain.items()}
    assert torch.equal(forward(query, *caches, page_table=table[:, :1], **given, **sizes), wanted)


def test_rows_of_padding_are_zeros_in_a_prefill_too(library: Library) -> None:
    caches, query = torch.randn(2, 3, 64, 2, 128).bfloat16(), torch.randn(4, 8, 128).bfloat16()
    lens, starts = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([9, 0], [0, 2, 4]))
    table = torch.tensor([[1], [0]], dtype=torch.int32)
    sizes = {"max_seqlen_q": 2, "max_seqlen_k": 9}
    out = TARGET.bind(**PAGED).forward(query, *caches, page_table=table, seq_lens=lens, cu_seqlens_q=starts, **sizes)
    assert bool(out.isfinite().all())
    assert float(out[:2].abs().max()) > 0
    assert float(out[2:].abs().max()) == 0


def test_it_writes_into_the_output_it_is_given(library: Library) -> None:
    out = torch.full((1, 8, 128), torch.nan).bfloat16()
    assert run(out=out, **DECODE) is out
    assert library.calls[-1].given["output"] is out
    assert bool(out.isfinite().all())


def test_a_decode_step_skips_sequences_without_a_query(library: Library) -> None:
    """Its kernel has a query for each sequence."""
    caches, query = torch.randn(2, 3, 64, 2, 128).bfloat16(), torch.randn(2, 8, 128).bfloat16()
    table, lens = torch.tensor([[1], [0], [2]], dtype=torch.int32), torch.tensor([9, 30, 20], dtype=torch.int32)
    starts = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
    forward = TARGET.bind(**DECODE).forward
    found = forward(
        query, *caches, page_table=table, seq_lens=lens, cu_seqlens_q=starts, max_seqlen_q=1, max_seqlen_k=30
    )
    assert library.calls[-1].given["num_seq_kvcache"].tolist() == [9, 20]
    wanted = forward(
        query, *caches, page_table=table[::2], seq_lens=lens[::2].contiguous(), max_seqlen_q=1, max_seqlen_k=20,
        cu_seqlens_q=torch.arange(3, dtype=torch.int32),
    )  # fmt: skip
    assert torch.equal(found, wanted)


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"head_dim": 64}, "cuda:sm90", "head_dim=64"),
    ({"kv_heads": 8}, "cuda:sm90", "group"),
    ({"dtype": "float16"}, "cuda:sm90", "dtype='float16'"),
    ({"page_size": 16}, "cuda:sm90", "page_size=16"),
    ({"causal": "none"}, "cuda:sm90", "causal='none'"),
    ({"window": (127, -1)}, "cuda:sm90", "window"),
    ({"sinks": True}, "cuda:sm90", "sinks"),
    ({"lse": True}, "cuda:sm90", "lse"),
    ({"phase": "verify", "spec_topk": 1}, "cuda:sm90", "phase='verify'"),
    ({}, "cuda:sm100", "arch='sm100'"),
]


@pytest.mark.parametrize(("changes", "platform", "reason"), REFUSALS)
def test_limits(changes: dict[str, Any], platform: str, reason: str) -> None:
    request = AttentionRequest(**{**PAGED, **changes})
    with pytest.raises(UnsupportedRequestError) as refused:
        what_if(request, platform=platform, installed=("hpc-ops",), backend="hpc_ops")
    assert reason in str(refused.value)


def test_an_older_build_is_named(library: Library) -> None:
    def attention_decode_bf16(q: Tensor, kcache: Tensor, vcache: Tensor) -> None: ...

    library.add(emulator.MODULE, attention_decode_bf16=attention_decode_bf16)
    with pytest.raises(BackendUnavailableError, match=r"hpc-ops 0\.0\.1.* takes no 'block_ids'"):
        TARGET.bind(**DECODE)
