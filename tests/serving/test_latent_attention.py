"""`LatentAttention` over a real pool, table and backend: every form against attention over dense rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyattn.errors import InvalidInputError
from polyattn.semantics import reference
from polyattn.serving import AttentionLayer, PageAllocator, RequestTable
from polyattn.serving.attention.backend import AttentionBackend
from polyattn.serving.attention.workspace import Limits
from polyattn.serving.kv_cache.pool import KVCacheConfig, KVPool
from polyattn.serving.mla import Companion, LatentAttention, LatentPolicy, split_kv_b
from polyattn.serving.step.batch import ForwardBatch, ForwardMode
from polyattn.serving.step.tree import DraftTree

H, NOPE, ROPE, VALUE, PAGES, LONGEST = 2, 8, 4, 6, 40, 64
EXACT = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
LAYER = 5
"""Its layer_id: no index into anything."""


class Module(nn.Module):
    """What `LatentAttention` reads of a model's attention module."""

    def __init__(self, latent: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(latent, H * (NOPE + VALUE), bias=False, dtype=dtype).requires_grad_(False)
        nn.init.normal_(self.kv_b_proj.weight, std=latent**-0.5, generator=torch.Generator().manual_seed(9))


@dataclasses.dataclass
class Text:
    """Every token of one request: its query, and its latent row."""

    q_nope: Tensor
    q_pe: Tensor
    rows: Tensor


class World:
    """Requests over one latent layer."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        policy: LatentPolicy | None = None,
        page_size: int = 4,
        latent: int = 16,
        rope: int = ROPE,
        kv: str = "auto",
        shuffle: bool = False,
        window: int = -1,
        topk: int = 2,
        prefill_backend: str | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.dtype, self.latent, self.window = dtype, latent, window
        self.layer = AttentionLayer(LAYER, H, 1, latent + rope, latent, scale=0.3, window=window, latent=True)
        self.module = Module(latent, dtype)
        config = KVCacheConfig(dtype=kv, page_size=page_size)
        allocator = PageAllocator(PAGES)
        if shuffle:  # pages come back in another order than they were taken
            taken = allocator.allocate(PAGES - 1)
            allocator.release(taken[::2])
            allocator.release(taken[1::2])
        self.pool = KVPool([self.layer], config, PAGES, dtype=dtype)
        self.table = RequestTable(6, LONGEST, page_size, [window], [allocator])
        limits = Limits(6, 80, LONGEST)
        self.backend = AttentionBackend(
            [self.layer], self.pool, self.table, limits=limits, topk=topk, prefill_backend=prefill_backend,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        self.attention = LatentAttention(self.backend, self.pool, policy)
        self.texts: dict[int, Text] = {}

    def add(self, seed: int) -> int:
        row = self.table.add()
        generator = torch.Generator().manual_seed(seed)
        width = self.layer.head_dim

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype)

        text = Text(randn(LONGEST, H, NOPE), randn(LONGEST, H, width - self.latent), randn(LONGEST, width))
        self.texts[row] = text
        return row

    def step(self, mode: ForwardMode, new: dict[int, int], tree: DraftTree | None = None) -> dict[int, Tensor]:
        """Run the next tokens of some requests; what each of them gave."""
        for row, tokens in new.items():
            self.table.extend(row, tokens)
        rows, counts = list(new), list(new.values())
        batch = ForwardBatch(mode, rows, [self.table.length(row) for row in rows], counts, tree)
        steps = self.backend.plan(batch)
        self.backend.prepare()
        self.attention.plan(batch, steps)
        given = [self.some(row, n, self.table.length(row)) for row, n in new.items()]
        parts = [torch.cat([getattr(text, name) for text in given]) for name in ("q_nope", "q_pe", "rows")]
        out = self.attention.forward(self.module, *parts, self.layer)
        return dict(zip(new, out.split(counts), strict=True))

    def some(self, row: int, tokens: int, length: int) -> Text:
        text = self.texts[row]
        return Text(*(getattr(text, field.name)[length - tokens : length] for field in dataclasses.fields(Text)))

    def wanted(self, row: int, tokens: int, mask: Tensor | None = None) -> Tensor:
        """The last tokens of a request, from the definition over dense rows (as the pool rounds them)."""
        length = self.table.length(row)
        text, rows = self.texts[row], self.texts[row].rows[None, :length]
        own = slice(length - tokens, length)
        up = split_kv_b(self.module.kv_b_proj.weight, NOPE, VALUE)
        latent, rope = rows[..., : self.latent], rows[..., self.latent :]
        # fmt: off
        return reference.mla_unabsorbed_attention(
            text.q_nope[None, own], text.q_pe[None, own], latent, rope, *up, scale=0.3, causal="bottom_right",
            attn_mask=mask, window=(self.window, -1), compute_dtype=torch.float64,
        )[0]
        # fmt: on


def far(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


FORMS = {
    "absorbed": LatentPolicy(),
    "one_shot": LatentPolicy(threshold=1),
    "chunked": LatentPolicy(threshold=1, one_shot_tokens=0, chunk=7),
}


@DTYPES
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@torch.no_grad()
def test_a_prompt_in_pieces_and_decode_after_it(dtype, form, page_size):
    world = World(dtype, policy=FORMS[form], page_size=page_size)
    one, two, late = world.add(1), world.add(2), world.add(3)
    found = world.step(ForwardMode.EXTEND, {one: 9, two: 5})
    assert world.attention.decision.form == "unabsorbed"
    for row, got in found.items():
        assert far(got, world.wanted(row, len(got))) < EXACT[dtype]
    found = world.step(ForwardMode.EXTEND, {two: 11, late: 3, one: 2})
    assert world.attention.decision.form == form
    for row, got in found.items():
        assert far(got, world.wanted(row, len(got))) < EXACT[dtype]
    for _ in range(2):
        found = world.step(ForwardMode.DECODE, {one: 1, late: 1, two: 1})
        assert world.attention.decision.form == "absorbed"
        for row, got in found.items():
            assert far(got, world.wanted(row, 1)) < EXACT[dtype]


@DTYPES
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_decoded_row_is_the_last_row_of_prefill(dtype, form):
    decoding, filling = World(dtype), World(dtype, policy=FORMS[form])
    a, b = decoding.add(1), filling.add(1)
    decoding.step(ForwardMode.EXTEND, {a: 12})
    decoded = decoding.step(ForwardMode.DECODE, {a: 1})[a]
    filling.step(ForwardMode.EXTEND, {b: 6})
    filled = filling.step(ForwardMode.EXTEND, {b: 7})[b]
    assert far(decoded, filled[-1:]) < EXACT[dtype]


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_where_the_pages_are_does_not_matter(form):
    found = []
    for shuffle in (False, True):
        world = World(torch.float64, policy=FORMS[form], shuffle=shuffle)
        row = world.add(1)
        world.step(ForwardMode.EXTEND, {row: 13})
        found.append(world.step(ForwardMode.EXTEND, {row: 10})[row])
        found.append(torch.tensor(world.table.pages(row, 0)))
    assert not torch.equal(found[1], found[3])
    assert far(found[0], found[2]) < EXACT[torch.float64]


@DTYPES
@torch.no_grad()
def test_mixed_steps_are_absorbed(dtype):
    world = World(dtype, policy=FORMS["chunked"])
    one, two = world.add(1), world.add(2)
    world.step(ForwardMode.EXTEND, {one: 9})
    found = world.step(ForwardMode.MIXED, {one: 1, two: 7})
    assert world.attention.decision.form == "absorbed"
    for row, got in found.items():
        assert far(got, world.wanted(row, len(got))) < EXACT[dtype]


@torch.no_grad()
def test_batch_invariant_prompts_are_absorbed_whatever_runs_beside_them():
    world = World(torch.float32, policy=FORMS["chunked"], topk=0, batch_invariant=True)
    one, two = world.add(1), world.add(2)
    for new in ({one: 9, two: 4}, {one: 3, two: 17}):
        found = world.step(ForwardMode.EXTEND, new)
        assert world.attention.decision.form == "absorbed"
        assert all(far(got, world.wanted(row, len(got))) < EXACT[torch.float32] for row, got in found.items())


@torch.no_grad()
def test_drafts_are_absorbed_chain_and_tree():
    world = World(torch.float64, policy=FORMS["one_shot"])
    one, two = world.add(1), world.add(2)
    world.step(ForwardMode.EXTEND, {one: 9, two: 3})
    tree = DraftTree.from_parents(torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 0]], dtype=torch.int32))
    found = world.step(ForwardMode.TARGET_VERIFY, {one: 4, two: 4}, tree)
    assert world.attention.decision.form == "absorbed"
    for n, (row, got) in enumerate(found.items()):
        mask = torch.ones(4, world.table.length(row), dtype=torch.bool)
        mask[:, -4:] = tree.mask[n]
        assert far(got, world.wanted(row, 4, mask[None, None])) < EXACT[torch.float64]
    found = world.step(ForwardMode.DRAFT_EXTEND, {one: 2, two: 3})
    assert world.attention.decision.form == "absorbed"
    for row, got in found.items():
        assert far(got, world.wanted(row, len(got))) < EXACT[torch.float64]


@pytest.mark.parametrize("form", ["one_shot", "chunked"])
@torch.no_grad()
def test_a_layer_with_a_window_is_absorbed(form):
    world = World(torch.float64, policy=FORMS[form], window=5)
    row = world.add(1)
    world.step(ForwardMode.EXTEND, {row: 9})
    got = world.step(ForwardMode.EXTEND, {row: 6})[row]
    assert far(got, world.wanted(row, 6)) < EXACT[torch.float64]


@torch.no_grad()
def test_padding_after_the_rows():
    """Rows of padding follow those of the step, and their tokens change nothing."""
    world = World(torch.float64)
    row = world.add(1)
    world.table.extend(row, 5)
    batch = ForwardBatch(ForwardMode.EXTEND, [row], [5], [5], padding=2)
    steps = world.backend.plan(batch)
    world.backend.prepare()
    assert world.attention.plan(batch, steps).form == "unabsorbed"
    text = world.some(row, 5, 5)
    parts = [torch.cat([part, part, part]) for part in (text.q_nope, text.q_pe, text.rows)]
    out = world.attention.forward(world.module, *parts, world.layer)
    assert out.shape == (15, H, VALUE)
    assert far(out[:5], world.wanted(row, 5)) < EXACT[torch.float64]


@torch.no_grad()
def test_an_idle_step_has_no_tokens():
    world = World(torch.float32)
    batch = ForwardBatch(ForwardMode.IDLE, [], [], [])
    assert world.attention.plan(batch, world.backend.plan(batch)).form == "absorbed"
    width = world.layer.head_dim
    none = (torch.zeros(0, H, NOPE), torch.zeros(0, H, width - world.latent), torch.zeros(0, width))
    assert world.attention.forward(world.module, *none, world.layer).shape == (0, H, VALUE)


@torch.no_grad()
def test_a_weight_that_is_loaded_later_is_the_one_used():
    world = World(torch.float64)
    row = world.add(1)
    for tokens in (4, 3, 5):
        got = world.step(ForwardMode.EXTEND, {row: tokens})[row]
        assert far(got, world.wanted(row, tokens)) < EXACT[torch.float64]
        if tokens == 4:  # in place, then in other memory
            world.module.kv_b_proj.weight.mul_(-1.5)
        else:
            world.module.kv_b_proj.weight.data = world.module.kv_b_proj.weight.data * 0.7


# Who serves the unabsorbed form ---------------------------------------------------------------------------------------


def companion_of(world: World) -> Companion:
    up = split_kv_b(world.module.kv_b_proj.weight, NOPE, VALUE)
    return world.attention.companion(torch.zeros(1, H, NOPE + ROPE), up, world.layer)


def test_automatic_stays_automatic():
    assert companion_of(World(torch.float32)) == Companion(None, "automatic, as the prefill backend")


def test_a_prefill_backend_that_was_asked_for_serves_both_forms():
    world = World(torch.float32, prefill_backend="torch_native")
    assert companion_of(world) == Companion("torch_native@cpu", "argument names it for prefill")


def test_a_backend_for_latent_rows_only_gets_a_companion(monkeypatch):
    """A backend as FlashMLA's: asked for by name, and unable to take packed heads."""
    world = World(torch.float32, prefill_backend="torch_native")
    rows_only = dataclasses.replace(world.backend.explain(LAYER)["extend"], backend="dsa")
    monkeypatch.setattr(world.backend, "explain", lambda layer_id: {"extend": rows_only})
    found = companion_of(world)
    assert found.backend not in (None, rows_only.id)
    assert found.why.startswith(f"{rows_only.id} serves latent rows but not packed heads (")
    row = world.add(1)
    with torch.no_grad():
        assert far(world.step(ForwardMode.EXTEND, {row: 9})[row], world.wanted(row, 9)) < EXACT[torch.float32]


def test_an_argument_wins():
    world = World(torch.float32, prefill_backend="torch_native")
    named = LatentAttention(world.backend, world.pool, unabsorbed_backend="reference")
    world.attention = named
    assert companion_of(world) == Companion("reference", "argument")


# FP8 rows -------------------------------------------------------------------------------------------------------------


def _steps(world: World) -> dict[str, tuple[Tensor, Tensor]]:
    """Prefill, extend and decode of one request, each beside the definition over exact rows."""
    row = world.add(1)
    steps: Sequence[tuple[str, ForwardMode, int]] = (
        ("prefill", ForwardMode.EXTEND, 20), ("extend", ForwardMode.EXTEND, 12), ("decode", ForwardMode.DECODE, 1),
    )  # fmt: skip
    return {name: (world.step(mode, {row: tokens})[row], world.wanted(row, tokens)) for name, mode, tokens in steps}


def fp8(form: str, kv: str = "fp8_e4m3") -> World:
    return World(torch.bfloat16, policy=FORMS[form], latent=512, rope=64, kv=kv)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_fp8_rows_of_656_bytes(form, record_property):
    """The error of e4m3 with a scale for each 128 latents: 2^-4 at most for a number, about 2.6 % on average."""
    world = fp8(form)
    assert world.pool.cache(LAYER).tensors[0].shape[-1] == world.pool.bytes_per_token(0) == 656
    for name, (got, wanted) in _steps(world).items():
        error = far(got, wanted)
        record_property(f"relative L2 of {name}", error)
        assert 1e-3 < error < 4e-2, name
    for name, (got, wanted) in _steps(fp8(form, "bf16")).items():
        assert far(got, wanted) < EXACT[torch.bfloat16], name


@torch.no_grad()
def test_new_rows_are_attended_as_fp8_stores_them():
    """A prompt gives the same whether its first half is read back or was never away."""
    whole, halves = fp8("one_shot"), fp8("one_shot")
    a, b = whole.add(1), halves.add(1)
    once = whole.step(ForwardMode.EXTEND, {a: 20})[a]
    halves.step(ForwardMode.EXTEND, {b: 11})
    twice = halves.step(ForwardMode.EXTEND, {b: 9})[b]
    assert far(once[11:], twice) < EXACT[torch.bfloat16] / 4


# Errors ---------------------------------------------------------------------------------------------------------------


def test_a_layer_before_any_step_is_refused():
    world = World(torch.float32)
    with pytest.raises(InvalidInputError, match=r"LatentAttention has no step; call plan\(batch, steps\)"):
        world.attention.forward(world.module, *_parts(world), world.layer)


def test_gradients_are_refused():
    world = World(torch.float32)
    row = world.add(1)
    with torch.no_grad():
        world.step(ForwardMode.EXTEND, {row: 3})
    for i in range(3):
        parts = _parts(world)
        parts[i].requires_grad_()
        with pytest.raises(InvalidInputError, match=r"serving a latent layer is inference only; run the model under"):
            world.attention.forward(world.module, *parts, world.layer)


def _parts(world: World) -> list[Any]:
    width = world.layer.head_dim
    return [torch.zeros(3, H, NOPE), torch.zeros(3, H, width - world.latent), torch.zeros(3, width)]


STEPS = pytest.mark.parametrize("mode, tokens", [(ForwardMode.EXTEND, 4), (ForwardMode.DECODE, 1)])
"""Without a prefix the first is unabsorbed, the second never is."""


@STEPS
@torch.no_grad()
def test_the_rows_of_a_step_are_stored_once(mode, tokens):
    world = World(torch.float32)
    row = world.add(1)
    world.step(mode, {row: tokens})
    assert world.attention.decision.form == ("absorbed" if tokens == 1 else "unabsorbed")
    given = world.some(row, tokens, tokens)
    with pytest.raises(InvalidInputError, match=r"layer 5 is given .* a second time in one planned step"):
        world.attention.forward(world.module, given.q_nope, given.q_pe, given.rows, world.layer)


@STEPS
@torch.no_grad()
def test_a_latent_layer_of_the_same_number_is_the_same_layer(mode, tokens):
    world = World(torch.float32)
    row = world.add(1)
    world.layer = dataclasses.replace(world.layer)
    world.step(mode, {row: tokens})
    world.layer = dataclasses.replace(world.layer, scale=0.5)
    with pytest.raises(InvalidInputError, match=r"layer 5 is given with scale=0\.5, and the one of that number"):
        world.step(mode, {row: tokens})
    world.layer = dataclasses.replace(world.layer, layer_id=6)
    with pytest.raises(InvalidInputError, match="no attention layer 6 here"):
        world.step(mode, {row: tokens})
