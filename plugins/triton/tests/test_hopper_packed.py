"""Packed prompts on Hopper: what is taken, the kernel of `hopper.extend` emulated over packed keys, and compiled."""

from __future__ import annotations

import dataclasses
import random
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.contract import AttentionRequest
from polyattn.testing.conforming import FULL
from polyattn.testing.tolerances import RELATIVE_L2
from polyattn_triton import dense
from polyattn_triton.hopper import extend as hopper

from .hopper_offline import elsewhere, overlaps
from .test_hopper_extend import SPILLED, emulated, one

__all__ = ["emulated"]


class Problem:
    """Sequences of (queries, keys), side by side; those of `poisoned` hold no numbers, and nobody else reads them."""

    def __init__(
        self, lens: list[tuple[int, int]], *, heads: tuple[int, int] = (8, 2), width: int = 64, causal: bool = True,
        left: int = -1, dtype: torch.dtype = torch.bfloat16, with_sinks: bool = False, poisoned: tuple[int, ...] = (),
        device: str = "cpu",
    ) -> None:  # fmt: skip
        torch.manual_seed(len(lens) + width)
        self.lens, self.causal, self.left, self.poisoned = lens, causal, left, poisoned
        T_q, T_k = (sum(length[i] for length in lens) for i in (0, 1))
        self.query = torch.randn(T_q, heads[0], width).to(dtype)
        self.key, self.value = torch.randn(2, T_k, heads[1], width).to(dtype)
        self.starts = [torch.tensor([0, *[length[i] for length in lens]]).cumsum(0).int() for i in (0, 1)]
        for n in poisoned:
            self.query[self.of(n, 0)] = float("nan")
            self.key[self.of(n, 1)] = self.value[self.of(n, 1)] = float("nan")
        self.sinks = torch.randn(heads[0]) if with_sinks else None
        self.out = torch.full_like(self.query, float("nan"))
        self.lse = torch.full((T_q, heads[0]), float("nan"))
        if device != "cpu":
            for name in ("query", "key", "value", "out", "lse", "sinks"):
                setattr(self, name, None if getattr(self, name) is None else getattr(self, name).to(device))
            self.starts = [x.to(device) for x in self.starts]

    def of(self, n: int, which: int) -> slice:
        starts = self.starts[which].tolist()
        return slice(starts[n], starts[n + 1])

    @property
    def lengths(self) -> dict[str, Any]:
        return {
            "cu_seqlens_q": self.starts[0],
            "cu_seqlens_k": self.starts[1],
            "max_seqlen_q": max(q for q, _ in self.lens),
        }

    def run(self, **options: Any) -> None:
        hopper.packed(
            self.query, self.key, self.value, **self.lengths, causal=self.causal, left=self.left, sinks=self.sinks,
            scale=self.query.shape[2] ** -0.5, out=self.out, lse=self.lse, **options,
        )  # fmt: skip

    def check(self) -> None:
        sinks = None if self.sinks is None else self.sinks.cpu()
        for n, (q, _) in enumerate(self.lens):
            if n in self.poisoned or not q:
                continue
            mine, keys = self.of(n, 0), self.of(n, 1)
            rows = (self.query[mine].cpu(), self.key[keys].cpu(), self.value[keys].cpu())
            wanted, lse = one(*rows, self.causal, self.left, None, sinks)
            found = self.out[mine].cpu().double()
            assert float((found - wanted).norm()) <= RELATIVE_L2[self.out.dtype] * float(wanted.norm()), f"sequence {n}"
            torch.testing.assert_close(self.lse[mine].cpu().double(), lse, rtol=0, atol=1e-3)


CASES: dict[str, dict[str, Any]] = {
    "one and many": {"lens": [(1, 1), (300, 300), (1, 1), (0, 0), (17, 17), (1, 1), (60, 60)], "heads": (7, 1)},
    "one length": {"lens": [(70, 70)] * 3, "heads": (4, 4)},
    "other keys": {"lens": [(40, 170), (50, 20), (3, 0), (0, 30), (1, 129)]},
    "full": {"lens": [(90, 333), (2, 50), (1, 1)], "causal": False, "heads": (6, 2)},
    "D 128": {"lens": [(40, 270), (3, 130)], "width": 128, "heads": (5, 1), "dtype": torch.float16},
    "D 256": {"lens": [(30, 170), (9, 9)], "width": 256, "heads": (6, 2)},
    "window": {"lens": [(70, 600), (70, 90), (5, 333)], "left": 100, "heads": (3, 1)},
    "window, full": {"lens": [(70, 400), (30, 20)], "left": 37, "causal": False, "heads": (12, 1)},
    "one head more than a box": {"lens": [(9, 9), (12, 140)], "heads": (24, 2), "width": 128},
    "heads that pass a tile": {"lens": [(9, 33), (5, 140)], "heads": (48, 1)},
}


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_emulated(emulated: None, name: str, with_sinks: bool) -> None:
    problem = Problem(**CASES[name], with_sinks=with_sinks)
    problem.run()
    problem.check()


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The counters of tiles that launches are given."""
    found: list[Tensor] = []
    zeros = torch.zeros

    def noted(*sizes: Any, **options: Any) -> Tensor:
        made = zeros(*sizes, **options)
        if sizes == (1,):
            found.append(made)
        return made

    monkeypatch.setattr(torch, "zeros", noted)
    return found


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", ["one and many", "D 128", "window"])
@pytest.mark.parametrize("programs", [1, 2, 5])
def test_programs_take_the_next_tile_of_all(
    emulated: None, counters: list[Tensor], name: str, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of many lengths: tiles after the first of each program are counted."""
    problem = Problem(**CASES[name])
    monkeypatch.setattr(hopper.runtime, "processors", lambda device: programs)
    problem.run()
    problem.check()
    heads = problem.key.shape[1]
    group = problem.query.shape[1] // heads
    config = hopper.config_for(torch.device("cpu"), problem.query.dtype, problem.query.shape[2], 0, group)
    there = (len(problem.query) * group // config.rows + len(problem.lens)) * heads
    # Each program asks once more than it gets; where all have one of their own, nobody asks.
    assert [int(x) for x in counters] == ([there] if there > programs else [])


def test_even_batches_count_nothing(emulated: None, counters: list[Tensor]) -> None:
    """Their tiles are dealt out, which costs no launch beside."""
    problem = Problem(**CASES["one length"])
    problem.run()
    problem.check()
    assert not counters


def drawn(seed: int) -> Problem:
    """A batch that nobody chose."""
    chance = random.Random(seed)
    group = chance.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
    lens = []
    for _ in range(chance.randint(1, 9)):
        q = chance.choice([0, 1, 1, chance.randint(2, 40), chance.randint(2, 40), chance.randint(60, 200)])
        lens.append((q, chance.choice([q, q, q, 0, q + chance.randint(0, 200), max(q - chance.randint(0, 50), 0)])))
    lens.append((chance.randint(1, 90), chance.randint(1, 300)))
    return Problem(
        lens, heads=(group * (kv := chance.choice([1, 2])), kv), width=chance.choice([64, 64, 128]),
        causal=chance.random() < 0.7, left=chance.choice([-1, -1, 0, 30, 150]), with_sinks=chance.random() < 0.4,
        dtype=chance.choice([torch.bfloat16, torch.float16]),
        poisoned=(chance.randrange(len(lens)),) if chance.random() < 0.6 and len(lens) > 1 else (),
    )  # fmt: skip


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("seed", range(24))
def test_emulated_as_drawn(emulated: None, seed: int) -> None:
    problem = drawn(seed)
    problem.run()
    problem.check()


NEIGHBOURS = {"lens": [(20, 20), (30, 30), (40, 40)], "poisoned": (0, 2)}


@pytest.mark.parametrize("left", [-1, 0, 7])
def test_neighbours_that_are_no_numbers_are_not_read(emulated: None, left: int) -> None:
    problem = Problem(**NEIGHBOURS, left=left, heads=(6, 2))
    problem.run()
    problem.check()


def test_what_lies_past_the_end_is_cleared(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Without that the neighbours' numbers are seen, by the emulator and by `check`."""
    extend_kernel = pytest.importorskip(
        "polyattn_triton.hopper.extend_kernel", reason="not run: the Hopper kernels", exc_type=ImportError
    )

    def leave(boxes: Any, stage: Any, first: Any, last: Any, CHUNKS: int, BLOCK_N: int) -> None:
        """Clears nothing."""

    monkeypatch.setattr(extend_kernel, "_clear", types.SimpleNamespace(fn=leave, arg_names=[]))
    request.getfixturevalue("emulated")
    problem = Problem(**NEIGHBOURS)
    problem.run()
    with pytest.raises(AssertionError, match="sequence 1"):
        problem.check()


def test_rows_are_of_their_own_head(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query that is taken from another head is told."""
    monkeypatch.setattr(hopper, "_placed", lambda query: (query, (query.stride(0), 0, 1)))
    problem = Problem([(20, 20)], heads=(3, 1))
    problem.run()
    with pytest.raises(AssertionError, match="sequence 0"):
        problem.check()


def test_views_of_one_projection(emulated: None) -> None:
    """Queries, keys and values side by side in a row."""
    problem = Problem([(40, 40), (70, 70)], heads=(6, 2))
    rows = torch.cat([problem.query, problem.key, problem.value], 1)
    problem.query, problem.key, problem.value = rows.split([6, 2, 2], 1)
    problem.run()
    problem.check()


def test_a_query_that_does_not_start_at_16_bytes_is_copied(emulated: None) -> None:
    problem = Problem([(40, 40)], heads=(6, 2))
    problem.query = torch.zeros(40, 6, 65, dtype=torch.bfloat16)[..., 1:].copy_(problem.query)
    problem.run()
    problem.check()


@pytest.mark.parametrize("config", [hopper.Config(128, 3), hopper.Config(64, 3, registers=160, warpgroups=3)], ids=str)
def test_emulated_with_other_consumers(emulated: None, config: hopper.Config) -> None:
    problem = Problem(**CASES["window"], with_sinks=True)
    problem.run(config=config)
    problem.check()


def test_same_bits_whatever_else_is_in_the_batch(emulated: None) -> None:
    together = Problem([(70, 70), (3, 9), (90, 190)], heads=(6, 2))
    together.run()
    for n, lens in enumerate(together.lens):
        alone = Problem([lens], heads=(6, 2))
        alone.query = together.query[together.of(n, 0)]
        alone.key, alone.value = (x[together.of(n, 1)] for x in (together.key, together.value))
        alone.run()
        assert torch.equal(alone.out, together.out[together.of(n, 0)])
        assert torch.equal(alone.lse, together.lse[together.of(n, 0)])


# What is taken -------------------------------------------------------------------------------------------------------

REQUEST = AttentionRequest(
    family="varlen", platform="cuda", dtype="bfloat16", head_dim=64, heads=6, kv_heads=2, causal="bottom_right",
    s_relation="equal", lse=True,
).normalised()  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({}, True),
        ({"dtype": "float16", "head_dim": 256, "v_head_dim": 256}, True),
        ({"heads": 24, "kv_heads": 1}, True),
        ({"heads": 71, "kv_heads": 1}, False),
        ({"dtype": "float32"}, False),
        ({"head_dim": 96, "v_head_dim": 96}, False),
        ({"v_head_dim": 128}, False),
        ({"causal": "none"}, True),
        ({"causal": "top_left"}, True),
        ({"causal": "top_left", "s_relation": "fewer"}, False),
        ({"window": (1024, -1)}, True),
        ({"window": (100, -1)}, False),
        ({"causal": "none", "window": (128, 5)}, False),
        ({"chunk": 128}, False),
        ({"softcap": 30.0}, False),
        ({"scale": -1.0}, False),
        ({"sinks": True}, True),
        ({"mask": "bool"}, False),
        ({"grad": frozenset({"query"})}, True),
    ],
    ids=lambda x: ",".join(map(str, x)) if isinstance(x, dict) else "",
)
def test_takes(changed: dict[str, Any], taken: bool) -> None:
    request = dataclasses.replace(REQUEST, **changed).normalised()
    assert hopper.takes_packed(request) is taken


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        (lambda p: None, True),
        (lambda p: setattr(p, "key", p.key[:0]), False),
        (lambda p: setattr(p, "query", p.query[:0]), False),
        (lambda p: setattr(p, "out", p.out.float()), False),
        (lambda p: setattr(p, "key", p.key.transpose(0, 1).contiguous().transpose(0, 1)), False),
        (lambda p: setattr(p, "value", torch.zeros(90 * 128 + 1).bfloat16()[1:].view(90, 2, 64)), False),
        (lambda p: setattr(p, "lens", [(21, 21)]), False),
        (lambda p: setattr(p, "lens", [(22, 22)]), True),
    ],
    ids=["", "no keys", "no queries", "another dtype", "head by head", "misaligned", "few rows", "enough rows"],
)
def test_fits(change: Any, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem([(20, 20), (70, 70)], heads=(6, 2))
    change(problem)
    given = (problem.query, problem.key, problem.value, problem.out, problem.lengths["max_seqlen_q"])
    assert not hopper.fits_packed(*given), "this is no Hopper"
    monkeypatch.setattr(hopper, "on_hopper", lambda device: True)
    assert hopper.fits_packed(*given) is fits


# In the adapter ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_the_adapter_chooses(emulated: None, monkeypatch: pytest.MonkeyPatch, sinks: bool) -> None:
    used: list[str] = []

    def noted(place: Any, name: str) -> None:
        kernel = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *args, **kwargs: (used.append(name), kernel(*args, **kwargs))[1])

    noted(hopper, "packed")
    noted(dense, "forward")
    monkeypatch.setattr(hopper, "on_hopper", lambda device: True)
    for lens, served in (([(20, 20), (70, 70)], True), ([(1, 1), (9, 9)], False)):
        used.clear()
        problem = Problem(lens, heads=(6, 2), with_sinks=sinks)
        bound = dense.Dense().bind(dataclasses.replace(REQUEST, sinks=sinks, scale=0.25))
        given = {"sinks": problem.sinks} if sinks else {}
        found: tuple[Tensor, Tensor] = bound.forward(
            problem.query, problem.key, problem.value, **problem.lengths, max_seqlen_k=max(k for _, k in lens), **given
        )
        assert used == (["packed"] if served else ["forward"])
        problem.out, problem.lse = found
        problem.query *= 2.0  # `check` has a scale of 1/8
        problem.check()


def test_gradients_are_of_what_it_leaves(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable backward takes its output and its LSE."""
    monkeypatch.setattr(hopper, "on_hopper", lambda device: True)
    problem = Problem([(20, 20), (1, 1), (40, 50)], heads=(6, 2))
    lengths = {**problem.lengths, "max_seqlen_k": 50}
    bound = dense.Dense().bind(dataclasses.replace(REQUEST, grad=("query", "key", "value"), lse=False))
    tensors = (problem.query, problem.key, problem.value)
    out, lse = bound.forward(*tensors, **lengths)
    dout = torch.randn_like(out)
    assert bound.backward is not None
    found = bound.backward(dout, *tensors, out, lse, **lengths)
    wide = [x.double().requires_grad_() for x in tensors]
    right = [
        one(*(x[problem.of(n, which)] for x, which in zip(wide, (0, 1, 1), strict=True)), True, -1, None, None)[0]
        for n in range(3)
    ]
    wanted = torch.autograd.grad(torch.cat(right), wide, dout.double())
    for gradient, expected in zip(found, wanted, strict=True):
        error = float((gradient.double() - expected).norm())
        assert error <= 2 * RELATIVE_L2[gradient.dtype] * float(expected.norm())


# For sm_90, and on one -----------------------------------------------------------------------------------------------

VARIANTS = {
    # D, group, causal, left window, sinks, all sequences of one length
    "D 128, 7 heads": (128, 7, True, False, False, False),
    "D 64, 6 heads": (64, 6, True, False, False, False),
    "D 64, 12 heads, all options": (64, 12, True, True, True, False),
    "D 128, 12 heads, full": (128, 12, False, False, False, False),
    "D 128, 4 heads": (128, 4, True, False, True, True),
    "D 256, 3 heads": (256, 3, True, True, True, False),
}
SHORT = ("D 128, 7 heads", "D 64, 6 heads")
"""Compiling takes seconds each: the others under --polyattn-full."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", VARIANTS if metafunc.config.getoption(FULL, False) else SHORT)


@pytest.mark.slow(keep=1)
def test_compiles_for_hopper(variant: str) -> None:
    width, group, causal, left, sinks, uniform = VARIANTS[variant]
    found = elsewhere("extend", width, 0, group, causal, left, False, sinks, uniform)
    config = hopper.config_for(torch.device("cpu"), torch.bfloat16, width, 0, group)
    assert found["warps"] == 4 * config.warpgroups + 4
    assert found["stack"] is None or found["stack"] <= SPILLED[config.warpgroups]
    assert found["registers"] is None or found["registers"] * found["warps"] * 32 <= 65536
    assert overlaps(found["ptx"]) == config.overlap
    # Outputs, and rows of queries that are no boxes, 16 bytes at a time.
    assert "st.global.v4.b32" in found["ptx"]
    assert ("ld.global.v4.b32" in found["ptx"]) == (64 % group != 0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_on_hopper(name: str, with_sinks: bool, on_hopper: None) -> None:
    problem = Problem(**CASES[name], with_sinks=with_sinks, device="cuda")
    problem.run()
    problem.check()
    first = problem.out.clone()
    problem.run()
    assert torch.equal(first, problem.out)
