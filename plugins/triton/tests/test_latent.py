"""Latent attention: its kernels against core's reference, however the keys are cut, and the memory of a session."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from polyattn.contract import AttentionRequest, Slot
from polyattn.errors import InvalidInputError
from polyattn.semantics import reference
from polyattn.semantics.kv_quant import mla_pack
from polyattn.testing.families.cached import in_tables
from polyattn_triton import runtime
from polyattn_triton.kernels import latent
from polyattn_triton.latent import Latent

NAN = float("nan")
RAGGED = ((1, 63), (1, 0), (1, 1), (1, 100))
ROWS, E4M3, E5M2 = ("fp8_e4m3", "block128"), ("fp8_e4m3", ""), ("fp8_e5m2", "")
EXTEND = ((7, 64), (1, 9), (0, 30), (20, 100))


@dataclasses.dataclass
class Call:
    """The tensors of one call. Every row that no sequence owns is not a number."""

    lengths: tuple[tuple[int, int], ...]
    heads: int = 4
    widths: tuple[int, int] = (32, 16)
    page: int = 16
    dtype: torch.dtype = torch.float32
    kind: tuple[str, str] = ("", "")
    """kv_dtype and kv_scales of rows in fewer bits."""

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.queries = [q for q, _ in self.lengths]
        counts = [-(-k // self.page) for _, k in self.lengths]
        pages = torch.randperm(sum(counts) + 2, generator=draw).int()
        rows = torch.full((len(pages), self.page, sum(self.widths)), NAN)
        self.page_table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for n, (count, mine) in enumerate(zip(counts, pages.split([*counts, 2]), strict=False)):
            self.page_table[n, :count] = mine
            for t in range(self.lengths[n][1]):
                rows[mine[t // self.page], t % self.page] = torch.randn(rows.shape[2], generator=draw)
        self.cache = mla_pack(rows, *self.kind) if self.kind[0] else rows.to(self.dtype)
        self.query = torch.randn(sum(self.queries), self.heads, rows.shape[2], generator=draw).to(self.dtype)
        self.seq_lens = torch.tensor([k for _, k in self.lengths], dtype=torch.int32)
        self.cu_seqlens_q = torch.tensor([0, *self.queries]).cumsum(0).int()
        self.most = (max(self.queries), max(k for _, k in self.lengths))

    @property
    def tables(self) -> dict[str, Any]:
        return {n: getattr(self, n) for n in ("page_table", "seq_lens", "cu_seqlens_q")}

    def launch(self, **options: Any) -> latent.Launch:
        kind = (self.query.device, self.query.dtype, self.heads, self.widths)
        stored = latent.stored_as(self.cache.dtype)
        assert stored == (self.kind[1] or self.kind[0])
        return latent.launch_for(*kind, len(self.lengths), *self.most, stored=stored, **options)

    def run(self, launch: latent.Launch, **options: Any) -> tuple[Tensor, Tensor]:
        rows = launch.pieces(len(self.lengths))
        pieces = (torch.full((rows, self.widths[0]), NAN), torch.full((rows,), NAN)) if rows else None
        out = torch.full((*self.query.shape[:2], self.widths[0]), NAN, dtype=self.dtype)
        lse = torch.full(self.query.shape[:2], NAN)
        options = {"causal": True, "scale": 0.2, **self.tables, **options}
        shares = None
        if numbers := launch.numbers(len(self.lengths)):
            shares = torch.full((numbers,), -1, dtype=torch.int32)
            rule = {name: options[name] for name in ("causal", "window", "chunk") if name in options}
            latent.plan(launch, self.seq_lens, self.cu_seqlens_q, **rule, out=shares)
        latent.attend(
            self.query,
            self.cache,
            **in_tables(out=out, lse=lse, launch=launch, shares=shares, pieces=pieces, **options),
        )
        return out, lse

    def check(self, found: tuple[Tensor, Tensor], **options: Any) -> None:
        causal = "bottom_right" if options.pop("causal", True) else "none"
        options = {"scale": 0.2, "v_head_dim": self.widths[0], "causal": causal, **self.tables, **options}
        out, lse = reference.mla_attention(self.query, self.cache, return_lse=True, **options)
        exact = self.dtype == torch.float32
        torch.testing.assert_close(found[0], out, rtol=1e-5 if exact else 2e-2, atol=1e-5 if exact else 1e-2)
        torch.testing.assert_close(found[1], lse, rtol=1e-5, atol=1e-5 if exact else 1e-2)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("call", "options"),
    [
        pytest.param(Call(RAGGED), {}, id="decode"),
        pytest.param(Call(RAGGED, page=5), {}, id="pages that no block divides"),
        pytest.param(Call(RAGGED, page=64), {}, id="blocks that divide a page"),
        pytest.param(Call(EXTEND), {}, id="extend"),
        pytest.param(Call(EXTEND, page=1), {"causal": False}, id="not causal"),
        pytest.param(Call(EXTEND), {"window": (17, -1)}, id="window"),
        pytest.param(Call(EXTEND), {"window": (8, 5), "causal": False}, id="window on both sides"),
        pytest.param(Call(EXTEND), {"chunk": 16}, id="chunks"),
        pytest.param(Call(EXTEND, widths=(48, 0)), {"scale": -0.1}, id="no rope, negative scale"),
        pytest.param(Call(RAGGED, heads=20, widths=(24, 40)), {}, id="odd widths and heads"),
        pytest.param(Call(RAGGED, dtype=torch.bfloat16), {}, id="bfloat16"),
        pytest.param(Call(RAGGED, dtype=torch.bfloat16, kind=ROWS, widths=(512, 64)), {"scale": 0.05}, id="fp8 rows"),
        pytest.param(Call(RAGGED, dtype=torch.bfloat16, kind=E4M3, widths=(512, 64)), {"scale": 0.05}, id="e4m3"),
        pytest.param(Call(RAGGED, kind=E4M3, page=5), {}, id="e4m3 in pages that no block divides"),
        pytest.param(Call(EXTEND, kind=E5M2, widths=(24, 40)), {"window": (17, -1)}, id="e5m2"),
        pytest.param(Call(EXTEND, dtype=torch.float16, kind=E5M2, widths=(48, 0)), {}, id="e5m2 without rope"),
    ],
)
def test_values(call: Call, options: dict[str, Any]) -> None:
    call.check(call.run(call.launch(), **options), **options)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kind", ["bool", "added"])
def test_masks(kind: str) -> None:
    call = Call(EXTEND)
    draw = torch.randn(4, call.heads, *call.most, generator=torch.Generator().manual_seed(1))
    mask = draw > 0 if kind == "bool" else draw
    if kind == "bool":
        mask[:, :, ::5] = False
    call.check(call.run(call.launch(), attn_mask=mask), attn_mask=mask)
    one = mask[:1, :1].expand(4, call.heads, -1, -1)
    call.check(call.run(call.launch(), attn_mask=mask[:1, :1]), attn_mask=one)


def test_of_a_tree_only_its_own_columns_are_read() -> None:
    call = Call(((4, 50), (4, 4)))
    tree = reference.tree_mask([-1, 0, 0, 1])
    mask = torch.ones(2, 1, 4, 50, dtype=torch.bool)
    mask[0, 0, :, 46:50] = tree
    mask[1, 0, :, :4] = tree
    blind = mask.clone()
    blind[0, 0, :, :46] = False
    found = call.run(call.launch(), attn_mask=blind, tree=True, causal=False)
    call.check(found, attn_mask=mask, causal=False)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("parts", [2, 3, 7, 40])
@pytest.mark.parametrize("lengths", [RAGGED, EXTEND, ((1, 0), (1, 300), (1, 0)), ((1, 0), (1, 0))])
def test_shares_of_any_number(lengths: tuple[tuple[int, int], ...], parts: int) -> None:
    """What is dealt out to programs meets no boundary of a sequence, or every one."""
    call = Call(lengths)
    launch = dataclasses.replace(call.launch(), parts=parts, tiles=-(-call.heads * call.most[0] // 16))
    launch = dataclasses.replace(launch, config=launch.config._replace(rows=16))
    call.check(call.run(launch))


@pytest.mark.slow
def test_more_sequences_than_a_program_looks_at_together() -> None:
    call = Call(tuple((1, n % 3) for n in range(latent.LANES.value + 5)), heads=1, page=4, widths=(16, 0))
    for parts in (0, 2):
        call.check(call.run(dataclasses.replace(call.launch(), parts=parts)))


def test_a_request_has_the_same_bits_in_any_batch() -> None:
    batch = Call(((1, 150), (3, 70), (12, 40), (1, 0)))
    launch = batch.launch(batch_invariant=True)
    assert launch.cuts > 1
    out, lse = batch.run(launch)
    batch.check((out, lse))
    for n, (s_q, _) in enumerate(batch.lengths):
        start = int(batch.cu_seqlens_q[n])
        alone = Call((batch.lengths[n],))
        alone.cache, alone.query = batch.cache, batch.query[start : start + s_q]
        alone.page_table = batch.page_table[n : n + 1]
        found = alone.run(alone.launch(batch_invariant=True))
        assert torch.equal(found[0], out[start : start + s_q])
        assert torch.equal(found[1], lse[start : start + s_q])


@pytest.mark.slow
def test_a_request_has_the_same_bits_beside_many_rows() -> None:
    """Pieces are put together in one way: sums in another order are other bits."""
    batch = Call(((1, 300),) * 6, heads=64)
    launch = batch.launch(batch_invariant=True)
    assert launch.cuts > 1
    out, lse = batch.run(launch)
    for n in (0, 5):
        alone = Call(batch.lengths[:1], heads=64)
        alone.cache, alone.query, alone.page_table = batch.cache, batch.query[n : n + 1], batch.page_table[n : n + 1]
        found = alone.run(alone.launch(batch_invariant=True))
        assert torch.equal(found[0], out[n : n + 1])
        assert torch.equal(found[1], lse[n : n + 1])


@pytest.mark.parametrize(
    ("sequences", "most", "parts", "blocks", "wide"),
    [
        (1, 128, 66, 256, True),  # a long cache of 128 heads
        (2, 128, 66, 53, True),
        (16, 128, 66, 16, False),  # as much work, in few pieces of many rows
        (5, 128, 66, 3, False),
        (13, 32, 132, 3, False),
        (3, 16, 132, 48, True),
    ],
)
def test_rows_with_many_pieces_are_put_together_by_small_programs(
    sequences: int, most: int, parts: int, blocks: int, wide: bool
) -> None:
    launch = latent.Launch(latent.Config(64, 64, 8, 2), tiles=2, parts=parts, blocks=blocks)
    assert latent.merging(launch, sequences, most)[3] == (32 if wide else 2)


class Step(NamedTuple):
    """What a session reads of a step."""

    sequences: int
    max_seqlen_q: int
    max_seqlen_k: int
    seq_lens: Tensor
    cu_seqlens_q: Tensor


def test_a_session_deals_out_the_keys_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a recorded step needs no memory but what the slot gave when the session was made."""
    call = Call(RAGGED, dtype=torch.bfloat16)
    request = AttentionRequest(
        family="mla", head_dim=48, v_head_dim=32, heads=4, kv_heads=1, phase="decode", s_relation="one", page_size=16,
        scale=0.2, layout="THD", lse=True,
    )  # fmt: skip
    asked: list[str] = []

    def workspace(name: str, nbytes: int) -> Tensor:
        asked.append(name)
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    bound = Latent().bind(request)
    assert bound.session is not None
    session = bound.session(Slot(call.query.device, 4, 4, 7, workspace, recorded=True))
    asked.clear()
    with pytest.raises(InvalidInputError, match="follows plan"):
        session.forward(call.query, call.cache, **in_tables(**call.tables, max_seqlen_q=1, max_seqlen_k=100))
    first = Step(4, 1, 1, torch.tensor([1, 0, 1, 1], dtype=torch.int32), call.cu_seqlens_q)
    session.plan(first)
    session.prepare(first)
    step = Step(4, 1, 100, call.seq_lens, call.cu_seqlens_q)
    session.plan(step)
    session.prepare(step)
    expected = bound.forward(call.query, call.cache, **in_tables(**call.tables, max_seqlen_q=1, max_seqlen_k=100))
    monkeypatch.setattr(latent, "plan", None)
    for _ in range(2):
        found = session.forward(call.query, call.cache, **in_tables(**call.tables, max_seqlen_q=1, max_seqlen_k=100))
        call.check(found)
        assert all(map(torch.equal, found, expected))
    assert not asked


@pytest.mark.parametrize(("second", "each"), [(96, 100), (80, 90)])
def test_shares_are_whole_sequences_where_that_costs_little(second: int, each: int) -> None:
    launch = latent.Launch(latent.Config(16, 16, 4, 1), tiles=1, parts=2)
    shares = torch.empty(launch.numbers(2), dtype=torch.int32)
    seq_lens = 16 * torch.tensor([100, second], dtype=torch.int32)
    latent.plan(launch, seq_lens, torch.arange(3, dtype=torch.int32), causal=True, out=shares)
    assert shares[:9:3].tolist() == [0, each, 100 + second]
    assert shares[9:].view(2, 2)[:, 1].tolist() == ([1, 1] if each == 100 else [2, 1])


@pytest.mark.parametrize("invariant", [False, True])
def test_no_call_needs_more_memory_than_is_planned_for(monkeypatch: pytest.MonkeyPatch, invariant: bool) -> None:
    monkeypatch.setattr(runtime, "processors", lambda device: 132)
    monkeypatch.setattr(latent, "_class", lambda device: "hopper")
    kind = (torch.device("cpu"), torch.bfloat16)
    for heads in (1, 16, 20, 128):
        for sequences, tokens in ((1, 1), (1, 40), (3, 5), (128, 1), (500, 2)):
            launch = latent.launch_for(*kind, heads, (512, 64), sequences, tokens, 10**6, invariant)
            pieces, numbers = latent.most(kind[0], heads, sequences, sequences * tokens, invariant)
            assert launch.pieces(sequences) <= pieces, (heads, sequences, tokens)
            assert launch.numbers(sequences) <= numbers, (heads, sequences, tokens)


def test_one_sequence_fills_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "processors", lambda device: 132)
    monkeypatch.setattr(latent, "_class", lambda device: "hopper")
    kind = (torch.device("cpu"), torch.bfloat16, 128, (512, 64))
    for own in (False, True):
        launch = latent.launch_for(*kind, 1, 1, 4096, own=own)
        assert 132 - launch.tiles < launch.tiles * launch.parts <= 132
        assert not latent.launch_for(*kind, 600, 1, 4096, own=own).cut


@pytest.mark.parametrize(
    ("sequences", "heads", "keys", "stored", "own", "rows"),
    [
        (7, 96, 131, "fp8_e5m2", False, 16), (15, 128, 213, "fp8_e5m2", False, 16),
        (32, 128, 500, "fp8_e5m2", False, 64),
        (4, 128, 3000, "fp8_e5m2", False, 64), (32, 16, 4000, "fp8_e5m2", False, 16), (32, 32, 16000, "", False, 32),
        (7, 96, 131, "fp8_e4m3", True, 16), (15, 128, 213, "fp8_e4m3", True, 64), (30, 96, 70, "fp8_e4m3", True, 64),
        (8, 24, 2693, "fp8_e4m3", True, 64), (1, 16, 4000, "fp8_e4m3", True, 16), (4, 40, 1534, "fp8_e4m3", True, 64),
        (8, 32, 400, "", True, 16), (32, 16, 16000, "", True, 64), (64, 8, 1000, "", True, 64),
        (1, 32, 4000, "", True, 16), (600, 16, 4000, "", True, 16),
    ],
)  # fmt: skip
def test_rows_of_a_tile_on_a_hopper(
    sequences: int, heads: int, keys: int, stored: str, own: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was fastest on an H200, or cannot be what the Hopper kernel takes."""
    monkeypatch.setattr(runtime, "processors", lambda device: 132)
    monkeypatch.setattr(latent, "_class", lambda device: "hopper")
    kind = (torch.device("cpu"), torch.bfloat16, heads, (512, 64))
    assert latent.launch_for(*kind, sequences, 1, keys, stored=stored, own=own).config.rows == rows


def test_masks_that_are_added_leave_room_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float32, with blocks of 64 keys, they need 245764 bytes on Hopper, which has 232448."""
    monkeypatch.setattr(runtime, "processors", lambda device: 132)
    monkeypatch.setattr(latent, "_class", lambda device: "hopper")
    kind = (torch.device("cpu"), torch.bfloat16, 128, (512, 64), 1, 1, 4096)
    assert [latent.launch_for(*kind, additive=added).config.keys for added in (False, True)] == [64, 32]
