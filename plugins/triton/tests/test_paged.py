"""The paged adapter: which kernel serves, what is written, further parts, and the sessions of an engine."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn import KVPart, paged_attention
from polyattn.contract import AttentionRequest, Slot
from polyattn.errors import BackendUnavailableError
from polyattn.testing.families.cached import in_tables
from polyattn_triton import paged, runtime
from polyattn_triton.paged import Paged

REQUEST = AttentionRequest(
    family="paged",
    dtype="float32",
    head_dim=32,
    heads=4,
    kv_heads=2,
    causal="bottom_right",
    phase="extend",
    s_relation="fewer",
    page_size=16,
    kv_layout="NHD",
    save_kv_cache=False,
    lse=True,
).normalised()
DECODE = dataclasses.replace(REQUEST, phase="decode", s_relation="one").normalised()


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are called from now on."""
    names: list[str] = []

    def noted(name: str) -> Any:
        kernel = getattr(paged, name)

        def call(*args: Any, **kwargs: Any) -> None:
            names.append(name)
            kernel(*args, **kwargs)

        return call

    for name in ("decode", "extend", "merge", "write_kv"):
        monkeypatch.setattr(paged, name, noted(name))
    return names


def problem(lens: list[tuple[int, int]], *, new: bool = False) -> tuple[list[Tensor], dict[str, Any]]:
    """(query, key_cache, value_cache) and the keywords of a call."""
    torch.manual_seed(len(lens))
    tokens, columns = sum(q for q, _ in lens), max(-(-k // 16) for _, k in lens)
    order = torch.randperm(len(lens) * columns + 1, dtype=torch.int32)
    caches = [torch.randn(len(order), 16, 2, 32) for _ in range(2)]
    tables: dict[str, Any] = {
        "page_table": order[:-1].view(len(lens), columns),
        "seq_lens": torch.tensor([k for _, k in lens], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, *[q for q, _ in lens]], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        "max_seqlen_q": max(q for q, _ in lens),
        "max_seqlen_k": max(k for _, k in lens),
    }
    if new:
        tables |= {name: torch.randn(tokens, 2, 32) for name in ("key", "value")}
    return [torch.randn(tokens, 4, 32), *caches], tables


def same(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def reference(tensors: list[Tensor], tables: dict[str, Any], **options: Any) -> Any:
    return paged_attention(*(t.clone() for t in tensors), **tables, **options, return_lse=True, backend="reference")


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("lens", "request_", "kernel"), [
    ([(1, 40), (1, 7)], DECODE, "decode"),
    ([(3, 40), (2, 7)], REQUEST, "decode"),
    ([(33, 40), (2, 7)], REQUEST, "extend"),
], ids=["decode", "short extend", "extend"])  # fmt: skip
def test_few_queries_are_decoded_and_many_extended(
    used: list[str], lens: list[tuple[int, int]], request_: AttentionRequest, kernel: str
) -> None:
    tensors, tables = problem(lens)
    same(Paged().bind(request_).forward(*tensors, **in_tables(**tables)), reference(tensors, tables))
    assert used == [kernel]


def test_one_long_prefix_is_split_whatever_the_queries(used: list[str]) -> None:
    """Two tiles of rows would leave most of a device idle."""
    call = paged._Call(REQUEST)
    device = torch.device("cpu")
    assert call.few(device, 1, 1, 1, (100, 100_000))
    assert not call.few(device, 1, 1, 1, (100, 100))
    assert not call.few(device, 8, 2, 4, (100, 100_000))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("queries", "changed", "kernels"),
    [
        (35, {}, ["extend", "merge"]),
        (35, {"window": (900, -1)}, ["extend", "merge"]),
        (35, {"window": (60, -1)}, ["decode"]),  # where a window is short, few keys are seen by all queries
        (33, {}, ["extend", "merge"]),
        (32, {}, ["decode"]),
        (20, {"batch_invariant": True}, ["extend"]),
    ],
)
def test_keys_are_cut_where_tiles_of_queries_are_few(
    used: list[str], monkeypatch: pytest.MonkeyPatch, queries: int, changed: dict[str, Any], kernels: list[str]
) -> None:
    monkeypatch.setattr(paged.runtime, "processors", lambda device: 132)
    request = dataclasses.replace(REQUEST, sinks=True, **changed).normalised()
    tensors, tables = problem([(queries, 1100)])
    options = {"sinks": torch.tensor([0.0, 1.0, -torch.inf, 5.0])}
    found = Paged().bind(request).forward(*tensors, **in_tables(**tables, **options))
    same(found, reference(tensors, tables, **options, window=request.window))
    assert used == kernels


@pytest.mark.parametrize(
    ("changed", "cut"),
    [
        ({"page_size": 1}, False),
        ({"page_size": 2}, True),
        ({"page_size": 1, "head_dim": 96}, True),  # `decode` computes what fills a head of no power of two
        ({"page_size": 1, "kv_dtype": "fp8_e4m3"}, True),
    ],
)
def test_keys_with_a_page_each_are_decoded(changed: dict[str, Any], cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged.runtime, "processors", lambda device: 132)
    call = paged._Call(dataclasses.replace(REQUEST, **changed).normalised())
    batch = (torch.device("cpu"), 1, 2, 2, (100, 8000))
    assert (call.ranges(*batch) > 1) is cut
    assert call.few(*batch)


@pytest.mark.parametrize(("request_", "few"), [(DECODE, True), (REQUEST, False)], ids=["decode", "extend"])
def test_batch_invariance_chooses_by_the_request_alone(request_: AttentionRequest, few: bool) -> None:
    call = paged._Call(dataclasses.replace(request_, batch_invariant=True))
    lengths = [(1, 10), (1, 100_000), (500, 1000)]
    assert {call.few(torch.device("cpu"), n, 2, 4, longest) for n in (1, 64) for longest in lengths} == {few}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("save", [False, True])
def test_s9_new_rows_are_written_if_and_only_if_asked(used: list[str], save: bool) -> None:
    request = dataclasses.replace(REQUEST, save_kv_cache=save)
    tensors, tables = problem([(3, 40), (1, 0), (2, 17)], new=True)
    expected_tensors = [t.clone() for t in tensors]
    expected = paged_attention(*expected_tensors, **tables, save_kv_cache=save, return_lse=True, backend="reference")
    same(Paged().bind(request).forward(*tensors, **in_tables(**tables)), expected)
    assert used == (["write_kv"] if save else []) + ["decode"]
    for cache, right in zip(tensors[1:], expected_tensors[1:], strict=True):
        assert torch.equal(cache, right)


def test_cascade_reads_a_shared_prefix_once_for_its_group(used: list[str]) -> None:
    """Two levels: one prefix of all sequences, one of the last two."""
    tensors, tables = problem([(1, 20), (1, 33), (1, 5)])
    whole, pair = (torch.randint(0, 5, (n, 3), dtype=torch.int32) for n in (1, 2))
    parts = (
        KVPart(whole, torch.tensor([40], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32), 3, 40),
        KVPart(pair, torch.tensor([0, 21], dtype=torch.int32), torch.tensor([0, 1, 3], dtype=torch.int32), 2, 21),
    )
    sinks = torch.tensor([0.0, 1.0, -torch.inf, 5.0])
    request = dataclasses.replace(DECODE, kv_parts=2, s_relation="more", sinks=True, causal="bottom_right")
    found = Paged().bind(request).forward(*tensors, **in_tables(**tables, kv_parts=parts, sinks=sinks))
    same(found, reference(tensors, tables, kv_parts=parts, sinks=sinks))
    assert used == ["decode", "decode", "decode", "merge"]


def test_parts_in_a_pool_of_their_own() -> None:
    tensors, tables = problem([(1, 20), (1, 33)])
    pools = [torch.randn(4, 16, 2, 32) for _ in range(2)]
    part = KVPart(
        torch.tensor([[3, 1]], dtype=torch.int32), torch.tensor([30], dtype=torch.int32),
        torch.tensor([0, 2], dtype=torch.int32), 2, 30, key_cache=pools[0], value_cache=pools[1],
    )  # fmt: skip
    request = dataclasses.replace(DECODE, kv_parts=1, s_relation="more")
    same(
        Paged().bind(request).forward(*tensors, **in_tables(**tables, kv_parts=(part,))),
        reference(tensors, tables, kv_parts=[part]),
    )


def test_no_queries() -> None:
    tensors, tables = problem([(1, 20)])
    tensors[0] = tensors[0][:0]
    tables["cu_seqlens_q"] = torch.zeros(2, dtype=torch.int32)
    out, lse = Paged().bind(dataclasses.replace(DECODE, zero_size=True)).forward(*tensors, **in_tables(**tables))
    assert out.shape == (0, 4, 32)
    assert lse.shape == (0, 4)


# Sessions -----------------------------------------------------------------------------------------------------------


def slot(memory: dict[str, Tensor]) -> Slot:
    def workspace(name: str, size: int) -> Tensor:
        if name not in memory or memory[name].numel() < size:
            memory[name] = torch.full((size,), 255, dtype=torch.uint8)
        return memory[name][:size]

    return Slot(torch.device("cpu"), 8, 64, 16, workspace)


def step(tables: dict[str, Any]) -> Any:
    return SimpleNamespace(**tables, sequences=tables["seq_lens"].shape[0])


def test_a_session_shares_a_step_out_once(used: list[str]) -> None:
    memory: dict[str, Tensor] = {}
    bound = Paged().bind(DECODE)
    assert bound.session is not None
    session = bound.session(slot(memory))
    for lens in ([(1, 200), (1, 3)], [(1, 40), (1, 0), (1, 90)]):
        tensors, tables = problem(lens)
        session.plan(step(tables))
        session.prepare(step(tables))
        for _ in range(2):  # layers
            same(session.forward(*tensors, **in_tables(**tables)), reference(tensors, tables))
    assert used == ["decode"] * 4
    assert memory.keys() == {"items", "counters", "outs", "lses"}


def test_a_recorded_step_follows_the_lengths_on_the_device() -> None:
    """Only `prepare` and `forward` are replayed: the plan is of the first lengths."""
    tensors, tables = problem([(1, 200), (1, 150)])
    make = Paged().bind(DECODE).session
    assert make is not None
    session = make(slot({}))
    session.plan(step(tables))
    for lengths in ((200, 150), (1, 199), (0, 33)):
        tables["seq_lens"].copy_(torch.tensor(lengths))
        session.prepare(step(tables))
        same(session.forward(*tensors, **in_tables(**tables)), reference(tensors, tables))


def test_a_session_extends_without_a_plan(used: list[str]) -> None:
    tensors, tables = problem([(33, 40), (2, 7)])
    make = Paged().bind(REQUEST).session
    assert make is not None
    session = make(slot({}))
    session.plan(step(tables))
    session.prepare(step(tables))
    same(session.forward(*tensors, **in_tables(**tables)), reference(tensors, tables))
    assert used == ["extend"]


def test_a_process_that_compiles_takes_no_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    with pytest.raises(BackendUnavailableError, match="set TRITON_INTERPRET=1"):
        Paged().bind(DECODE)
