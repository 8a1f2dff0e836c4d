"""HPC-Ops: conformance over an emulator of its kernels, free slots included, and what they are really given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn import what_if
from polyattn.contract import AttentionRequest, PagedTables
from polyattn.errors import BackendUnavailableError, UnsupportedRequestError
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library
from polyattn.testing.families.cached import in_tables

from .devices import need
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
        torch.randn(1, 8, 128).bfloat16(), *caches, **in_tables(**tables, max_seqlen_q=1, max_seqlen_k=9, out=out)
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
    wanted = forward(query, *caches, **in_tables(page_table=table[:, :1].contiguous(), **given, **sizes))
    given = {name: gapped(numbers) for name, numbers in plain.items()}
    assert torch.equal(forward(query, *caches, **in_tables(page_table=table[:, :1], **given, **sizes)), wanted)


def test_rows_of_padding_are_zeros_in_a_prefill_too(library: Library) -> None:
    caches, query = torch.randn(2, 3, 64, 2, 128).bfloat16(), torch.randn(4, 8, 128).bfloat16()
    lens, starts = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([9, 0], [0, 2, 4]))
    table = torch.tensor([[1], [0]], dtype=torch.int32)
    sizes = {"max_seqlen_q": 2, "max_seqlen_k": 9}
    out = TARGET.bind(**PAGED).forward(
        query, *caches, **in_tables(page_table=table, seq_lens=lens, cu_seqlens_q=starts, **sizes)
    )
    assert bool(out.isfinite().all())
    assert float(out[:2].abs().max()) > 0
    assert float(out[2:].abs().max()) == 0


def test_it_writes_into_the_output_it_is_given(library: Library) -> None:
    out = torch.full((1, 8, 128), torch.nan).bfloat16()
    assert run(out=out, **DECODE) is out
    assert library.calls[-1].given["output"] is out
    assert bool(out.isfinite().all())


def misplaced(shape: tuple[int, ...]) -> Tensor:
    """Contiguous, and 2 bytes behind where TMA could begin."""
    count = torch.Size(shape).numel()
    return torch.zeros(count + 1, dtype=torch.bfloat16)[1:].view(shape)


@pytest.mark.parametrize("fields", [PAGED, DECODE], ids=["prefill", "decode"])
def test_what_tma_cannot_address_is_copied(fields: dict[str, Any], library: Library) -> None:
    """The emulator refuses it."""
    query, caches = torch.randn(1, 8, 128).bfloat16(), torch.randn(2, 2, 64, 2, 128).bfloat16()
    tables: dict[str, Any] = {
        "page_table": torch.tensor([[1]], dtype=torch.int32),
        "seq_lens": torch.tensor([9], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
        "max_seqlen_q": 1,
        "max_seqlen_k": 9,
    }
    forward = TARGET.bind(**fields, **FINITE).forward
    wanted = forward(query, *caches, **in_tables(**tables))
    odd = torch.empty(1025, dtype=torch.bfloat16).as_strided((1, 8, 128), (1025, 128, 1)).copy_(query)
    assert odd.is_contiguous()
    out = misplaced((1, 8, 128))
    moved = [misplaced((2, 64, 2, 128)).copy_(cache) for cache in caches]
    assert forward(odd, *moved, **in_tables(**tables, out=out)) is out
    assert torch.equal(out, wanted)
    assert library.calls[-1].given["output"] is None


def test_queries_of_padding_have_keys_to_wait_for(library: Library) -> None:
    """The emulator says where the kernel would wait for ever."""
    query, caches = torch.randn(260, 8, 128).bfloat16(), torch.randn(2, 4, 64, 2, 128).bfloat16()
    lens, starts = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([150, 0], [0, 130, 260]))
    table = torch.tensor([[3, 1, 2], [0, 0, 0]], dtype=torch.int32)
    sizes = {"max_seqlen_q": 130, "max_seqlen_k": 150}
    for options in ({}, FINITE):
        forward = TARGET.bind(**PAGED, **options).forward
        out = forward(query, *caches, **in_tables(page_table=table, seq_lens=lens, cu_seqlens_q=starts, **sizes))
        assert bool(out.isfinite().all())
        assert float(out[:130].abs().min(-1).values.max()) > 0
        assert float(out[130:].abs().max()) == 0


def test_more_queries_than_it_can_count_are_refused(library: Library) -> None:
    forward = TARGET.bind(**PAGED).forward
    query = torch.empty(1, dtype=torch.bfloat16).expand(2**21, 8, 128)
    message = (
        r"hpc_ops counts .* in 32 bits, and \[2097152, 8, 128\] has 2147483648; plan steps of fewer than 2097152 to"
    )
    with pytest.raises(UnsupportedRequestError, match=message):
        forward(
            query,
            query,
            query,
            **in_tables(page_table=query, seq_lens=query, cu_seqlens_q=query, max_seqlen_q=1, max_seqlen_k=1),
        )


def test_a_decode_step_skips_sequences_without_a_query(library: Library) -> None:
    """Its kernel has a query for each sequence."""
    caches, query = torch.randn(2, 3, 64, 2, 128).bfloat16(), torch.randn(2, 8, 128).bfloat16()
    table, lens = torch.tensor([[1], [0], [2]], dtype=torch.int32), torch.tensor([9, 30, 20], dtype=torch.int32)
    starts = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
    forward = TARGET.bind(**DECODE).forward
    found = forward(
        query,
        *caches,
        **in_tables(page_table=table, seq_lens=lens, cu_seqlens_q=starts, max_seqlen_q=1, max_seqlen_k=30),
    )
    assert library.calls[-1].given["num_seq_kvcache"].tolist() == [9, 20]
    alone = PagedTables(table[::2], lens[::2].contiguous(), torch.arange(3, dtype=torch.int32), 1, 20)
    wanted = forward(query, *caches, tables=alone)
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
    ({"phase": "verify", "spec_topk": 1}, "cuda:sm90", "hpc_ops cannot verify: every phase of a server asks for"),
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


SIZES: list[tuple[str, list[int], list[int], int]] = [
    ("tiles of many sequences", [512, 700, 512], [512, 130, 512], 32),
    ("a sequence of padding", [512, 512, 0, 900], [512, 512, 512, 512], 32),
    ("few sequences, many keys", [5000, 4097, 64, 1], [1, 1, 1, 1], 32),
    ("many sequences, more keys", [9000 - 31 * n for n in range(40)], [1] * 40, 64),
    ("groups of 4, long and short", [1, 63, 64, 65, 3000], [1] * 5, 8),
]


@pytest.mark.filterwarnings("default")  # a vendor's own
@pytest.mark.parametrize(("lens", "news", "heads"), [size[1:] for size in SIZES], ids=[size[0] for size in SIZES])
@pytest.mark.parametrize("slots", ["any", "finite"])
def test_sizes_that_lead_to_its_other_kernels(
    lens: list[int], news: list[int], heads: int, slots: str, request: pytest.FixtureRequest
) -> None:
    """Conformance is small: those of few tiles and of unsplit rows serve it."""
    need("hpc_ops@cuda", request)
    kv_heads = 8 if heads > 8 else 2
    pages = [-(-length // 64) for length in lens]
    caches = torch.randn(2, sum(pages) + 1, 64, kv_heads, 128, dtype=torch.bfloat16, device="cuda")
    table, first = torch.zeros(len(lens), max(pages), dtype=torch.int32), 1
    for n, count in enumerate(pages):
        table[n, :count] = torch.arange(first, first + count)
        first += count
    query = torch.randn(sum(news), heads, 128, dtype=torch.bfloat16, device="cuda")
    given = {
        "page_table": table.cuda(),
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device="cuda"),
        "cu_seqlens_q": torch.tensor([0, *news], device="cuda").cumsum(0, dtype=torch.int32),
        "max_seqlen_q": max(news),
        "max_seqlen_k": max(lens),
    }
    polyattn.configure(attention_backend_config={"hpc_ops": {"free_slots": slots}})
    try:
        found = polyattn.paged_attention(query, *caches, **given, backend="hpc_ops")
    finally:
        polyattn.configure(attention_backend_config={"hpc_ops": {"free_slots": "any"}})
    want = polyattn.paged_attention(query, *caches, **given, backend="torch_native")
    torch.testing.assert_close(found, want, rtol=0.02, atol=0.02)
