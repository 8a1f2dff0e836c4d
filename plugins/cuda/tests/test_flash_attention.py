"""FlashAttention 2, 3 and 4: the kit over emulators of every build, and what each is really called with."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyattn import what_if
from polyattn.adapters import flash_attention
from polyattn.adapters import flash_split as flash_pieces
from polyattn.adapters import strides as axes_of_one
from polyattn.contract import AttentionRequest
from polyattn.errors import BackendUnavailableError, GraphError, PolyattnError
from polyattn.semantics import reference
from polyattn.semantics.merge_lse import merge
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library
from polyattn.testing.families.cached import in_tables
from polyattn_cuda.flash_attention import fa3

from .emulators import flash_attention as emulators

HOPPER, AMPERE, BLACKWELL = "cuda:sm90@12.8", "cuda:sm80@12.4", "cuda:sm100@13.0"
# build: (its emulator, the chip, provider of `fa`, serving backend and its provider)
BUILDS: dict[str, tuple[Callable[[], Library], str, str, tuple[str, str]]] = {
    "fa2": (emulators.fa2, AMPERE, "fa2/flash-attn", ("fa2", "flash-attn")),
    "fa3": (emulators.fa3, HOPPER, "fa3/flash-attn-3", ("fa3", "flash-attn-3")),
    "sgl": (emulators.sgl_kernel, HOPPER, "fa3/sgl-kernel", ("fa3", "sgl-kernel")),
    "vllm": (emulators.vllm, HOPPER, "fa3/vllm", ("fa3", "vllm")),
    "fa4": (emulators.fa4, HOPPER, "fa4/flash-attn-4", ("fa4", "flash-attn-4")),
    "fa4-blackwell": (lambda: emulators.fa4(arch=100), BLACKWELL, "fa4/flash-attn-4", ("fa4", "flash-attn-4")),
}
# Builds of whose chip one backend is tried.
ALONE: dict[str, tuple[Callable[[], Library], Emulated]] = {
    f"fa4-{chip}": (
        functools.partial(emulators.fa4, arch=int(chip[2:])),
        Emulated("fa", "fa4/flash-attn-4", f"cuda:{chip}@13.0"),
    )
    for chip in ("sm80", "sm120")
}
ALONE["sgl-sm80"] = functools.partial(emulators.sgl_kernel, arch=80), Emulated("fa3", "sgl-kernel", AMPERE)
TRAINING = ("fa2", "fa3", "fa4")
FUSED = {"sgl": "sinks", "vllm": "s_aux", "fa4": "learnable_sink"}


FA4_BLOCKS = {
    "hopper": (emulators.fa4, Emulated("fa4_block_sparse", "flash-attn-4", HOPPER)),
    "blackwell": (lambda: emulators.fa4(arch=100), Emulated("fa4_block_sparse", "flash-attn-4", BLACKWELL)),
}


def target(build: str, *, serving: bool) -> Emulated:
    _, chip, provider, cached = BUILDS[build]
    return Emulated(*cached, chip) if serving else Emulated("fa", provider, chip)


def targets(build: str) -> list[Emulated]:
    """All backends that a build is behind."""
    rounded = [Emulated("fa3_fp8", BUILDS[build][3][1], HOPPER)] if BUILDS[build][3][0] == "fa3" else []
    return [target(build, serving=False), target(build, serving=True), *rounded]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    full = metafunc.config.getoption("--polyattn-full")
    given: dict[str, Any] = {"per_row": 24} if full else {"per_row": 3, "dtypes": ("bfloat16",)}
    every = {build: targets(build) for build in BUILDS} | {build: [tried] for build, (_, tried) in ALONE.items()}
    metafunc.parametrize(
        ("build", "tried", "case"),
        [
            pytest.param(build, tried, case, id=f"{build}-{case.id}")
            for build, those in every.items()
            for tried in those
            for case in tried.cases(**given)
        ],
    )


@pytest.mark.slow(keep=347)
def test_conformance(build: str, tried: Emulated, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = BUILDS[build][0] if build in BUILDS else ALONE[build][0]
    tried.passes(case, emulator().install(monkeypatch))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Library]:
    return lambda build: BUILDS[build][0]().install(monkeypatch)


# ------------------------------------------------------------------------------------------------ dense and packed


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def dense(build: str, **fields: Any) -> Any:
    usual = {"heads": 4, "kv_heads": 2, "head_dim": 64, "causal": "bottom_right"}
    return target(build, serving=False).bind(**{**usual, **fields})


QKV = ((2, 9, 4, 64), (2, 9, 2, 64), (2, 9, 2, 64))
PACKED = {
    "cu_seqlens_q": torch.tensor([0, 4, 9], dtype=torch.int32),
    "cu_seqlens_k": torch.tensor([0, 4, 9], dtype=torch.int32),
    "max_seqlen_q": 5,
    "max_seqlen_k": 5,
}


# What an operator is given is bound by its schema, in which everything has a position.
@pytest.mark.parametrize("build", [build for build in BUILDS if build != "vllm"])
def test_only_tensors_are_given_by_position(build: str, install: Callable[[str], Library]) -> None:
    library = install(build)
    q, k, v = tensors(*QKV)
    dense(build).forward(q, k, v)
    dense(build, family="varlen").forward(q[0], k[0], v[0], **PACKED)
    cached(build).run()
    assert len(library.calls) == 3
    assert {call.positional for call in library.calls} == {3}


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_the_short_way_is_the_same_call(build: str, layout: str, install: Callable[[str], Library]) -> None:
    library = install(build)
    bound = dense(build, layout=layout, window=(3, -1))
    q, k, v = tensors(*QKV)
    if layout == "BHSD":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    assert torch.equal(bound.simple(q, k, v), bound.forward(q, k, v))
    short, long = ({n: str(a) for n, a in c.arguments.items() if n not in "qkv"} for c in library.calls)
    assert short == long
    assert dense(build, lse=True).simple is None


@pytest.mark.parametrize("build", TRAINING)
def test_gradients_of_a_part_from_the_merged_result(build: str, install: Callable[[str], Library]) -> None:
    install(build)
    q, k, v = tensors((1, 6, 4, 64), (1, 10, 2, 64), (1, 10, 2, 64))
    dout = tensors((1, 6, 4, 64))[0]
    bound = dense(build, causal="none", s_relation="fewer", grad=("query", "key", "value"))
    parts = [(k[:, :4], v[:, :4]), (k[:, 4:], v[:, 4:])]
    out, lse = merge(*zip(*(bound.forward(q, *part) for part in parts), strict=True))
    shares = [bound.backward(dout, q, *part, out, lse) for part in parts]
    whole = [t.double().requires_grad_() for t in (q, k, v)]
    reference.attention(*whole, layout="BSHD").backward(dout.double())
    found = (
        shares[0][0].double() + shares[1][0],
        *(torch.cat([a, b], 1).double() for a, b in zip(shares[0][1:], shares[1][1:], strict=True)),
    )
    for mine, right in zip(found, whole, strict=True):
        assert float((mine - right.grad).norm() / right.grad.norm()) < 8e-3


def test_deterministic_is_said_to_the_backward(install: Callable[[str], Library]) -> None:
    for build in TRAINING:
        library = install(build)
        for wanted in (False, True):
            bound = dense(build, grad=("query", "key", "value"), deterministic=wanted)
            q, k, v = tensors(*QKV)
            out, lse = bound.forward(q, k, v)
            bound.backward(out, q, k, v, out, lse)
            assert library.calls[-1].given["deterministic"] is wanted


@pytest.mark.parametrize("build", FUSED)
def test_sinks_that_the_kernel_takes_as_they_are(build: str, install: Callable[[str], Library]) -> None:
    library = install(build)
    q, k, v = tensors(*QKV)
    bound = dense(build, sinks=True)
    exact = torch.tensor([0.5, 1.0, -2.0, 3.0])
    bound.forward(q, k, v, sinks=exact.bfloat16())
    assert library.calls[-1].given[FUSED[build]].dtype == torch.bfloat16
    bound.forward(q, k, v, sinks=exact)
    fused = library.calls[-1].given.get(FUSED[build])
    # FA3 would have to round a float32 sink: it is applied from the LSE.
    assert (fused is None) is (build != "fa4")


def test_sequences_of_one_length_are_counted_once(
    install: Callable[[str], Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = install("sgl")
    q, k, v = tensors(*QKV)
    for name in ("_kept", "_in_graphs"):
        monkeypatch.setattr(flash_attention, name, {})
    eager, recorded = dense("sgl"), dense("sgl", graph_capture=True)
    # What a graph makes is its own; what was there before it is read by it, and outlives the others.
    for bound in (recorded, recorded, eager, eager, recorded):
        bound.forward(q, k, v)
    flash_attention._kept.clear()
    recorded.forward(q, k, v)
    first, second, *kept = (call.given["cu_seqlens_q"] for call in library.calls)
    assert first.tolist() == [0, 9, 18]
    assert len({id(t) for t in (first, second, *kept)}) == 3
    assert len({id(t) for t in kept}) == 1


def test_fewer_are_kept_than_there_may_be_lengths(
    install: Callable[[str], Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("sgl")
    monkeypatch.setattr(flash_attention, "_kept", {})
    monkeypatch.setattr(flash_attention, "_MOST_KEPT", 64)
    for length in range(1, 70):
        made = flash_attention.uniform_cu_seqlens(AttentionRequest(), 2, length, torch.device("cpu"))
        assert made.tolist() == [0, length, 2 * length]
    kept = dict(flash_attention._kept)
    assert len(kept) == 64
    again = flash_attention.uniform_cu_seqlens(AttentionRequest(), 2, 1, torch.device("cpu"))
    assert any(again is one for one in kept.values()), "what another stream may still read is not given back"


# What a bound call costs beside the library, at most: torch operations, and calls of Python functions of ours.
COSTS = {
    "fa2": {"dense": (0, 2), "varlen": (0, 3), "paged": (2, 3)},
    "fa3": {"dense": (0, 2), "varlen": (0, 4), "paged": (0, 4)},
    "sgl": {"dense": (4, 7), "varlen": (0, 3), "paged": (0, 4)},
    "vllm": {"dense": (0, 3), "varlen": (0, 5), "paged": (0, 6)},
    # Of these one is a kernel: the page table in parts of pages. The others are views.
    "fa4": {"dense": (0, 3), "varlen": (0, 3), "paged": (7, 4)},
}


class Operations(TorchDispatchMode):
    """Counts the operations of the adapter; those inside of an emulated operator are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame, inside = sys._getframe(), function.namespace == "_vllm_fa3_C"
        while frame is not None and not inside:
            inside, frame = frame.f_code.co_filename == emulators.__file__, frame.f_back
        self.count += not inside
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("build", "family"), [(b, family) for b, families in COSTS.items() for family in families])
def test_what_a_bound_call_costs_beside_the_library(build: str, family: str, install: Callable[[str], Library]) -> None:
    install(build)
    q, k, v = tensors(*QKV)
    if family == "dense":
        bound = dense(build)
        call = functools.partial(bound.simple or bound.forward, q, k, v)
    elif family == "varlen":
        call = functools.partial(dense(build, family="varlen").forward, q[0], k[0], v[0], **PACKED)
    else:
        call = cached(build, phase="decode", s_relation="one", causal="none").run
    call()
    with Operations() as operations:
        call()
    files = (flash_attention, axes_of_one, flash_pieces)
    ours = (str(Path(fa3.__file__).parents[1]), *(str(file.__file__) for file in files))
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame) if event == "call" else None)
    call()
    sys.setprofile(None)
    mine = [frame.f_code.co_name for frame in calls if frame.f_code.co_filename.startswith(ours)]
    most_operations, most_calls = COSTS[build][family]
    assert operations.count <= most_operations
    assert len(mine) <= most_calls, mine


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_vllm_reads_a_batch_where_it_lies(layout: str, install: Callable[[str], Library]) -> None:
    library = install("vllm")
    q, k, v = (t.transpose(1, 2) if layout == "BHSD" else t for t in tensors(*QKV))
    bound = dense("vllm", layout=layout)
    bound.simple(q, k, v)
    bound.simple(q, k, v)
    first, second = (call.given for call in library.calls)
    assert [first[name].data_ptr() for name in "qkv"] == [t.data_ptr() for t in (q, k, v)]
    assert first["seqused_k"].tolist() == [9, 9]
    assert first["seqused_k"] is second["seqused_k"]


@pytest.mark.parametrize("build", BUILDS)
def test_one_query_of_some_sequences(build: str, install: Callable[[str], Library]) -> None:
    """FA2 would take the queries for [N, H_q, D], which they are not where a sequence has none."""
    install(build)
    q, k, v = tensors((2, 4, 64), (9, 2, 64), (9, 2, 64))
    bound = dense(build, family="varlen", s_relation="one", causal="none")
    where = {"max_seqlen_q": 1, "max_seqlen_k": 4}
    starts = ([0, 1, 1, 2], [0, 3, 5, 9])
    some = {
        f"cu_seqlens_{side}": torch.tensor(given, dtype=torch.int32) for side, given in zip("qk", starts, strict=True)
    }
    found = bound.forward(q, k, v, **some, **where)
    for row, keys in ((0, slice(0, 3)), (1, slice(5, 9))):
        right = reference.attention(q[None, row : row + 1].double(), *(t[None, keys].double() for t in (k, v)))
        assert float((found[row].double() - right[0, 0]).norm() / right.norm()) < 8e-3


def test_fa4_is_told_none_for_no_bound(install: Callable[[str], Library]) -> None:
    library = install("fa4")
    dense("fa4", window=(17, -1)).forward(*tensors(*QKV))
    given = library.calls[-1].given
    assert (given["window_size_left"], given["window_size_right"]) == (17, None)


def test_dropout_leaves_the_gradient_to_the_library(install: Callable[[str], Library]) -> None:
    library = install("fa2")
    bound = dense("fa2", dropout=0.25, grad=("query", "key", "value"))
    assert bound.backward is None
    q, k, v = (t.requires_grad_() for t in tensors(*QKV))
    bound.forward(q, k, v).sum().backward()
    assert library.calls[-1].given["dropout_p"] == 0.25
    assert all(bool(t.grad.isfinite().all()) for t in (q, k, v))


def odd_axis_of_one(shape: tuple[int, ...], axis: int) -> Tensor:
    """A tensor whose stride along `axis`, which has one entry, is no multiple of 16 bytes."""
    tensor = tensors(shape)[0]
    strides = [*tensor.stride()]
    strides[axis] = 12_345
    return tensor.as_strided(shape, strides)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(("shape", "axis"), [((1, 9, 4, 64), 0), ((2, 1, 4, 64), 1), ((2, 9, 1, 64), 2)])
def test_axes_of_one_have_a_stride_that_tma_takes(
    build: str, shape: tuple[int, ...], axis: int, install: Callable[[str], Library]
) -> None:
    install(build)
    heads = shape[2]
    q, k, v = (odd_axis_of_one(shape, axis) for _ in "qkv")
    for bound in (dense(build, heads=heads, kv_heads=heads), dense(build, heads=heads, kv_heads=heads, lse=True)):
        found = bound.forward(q, k, v)
        wanted = bound.forward(*(t.clone(memory_format=torch.contiguous_format) for t in (q, k, v)))
        assert all(map(torch.equal, *(r if isinstance(r, tuple) else (r,) for r in (found, wanted))))
    short = dense(build, heads=heads, kv_heads=heads).simple
    assert torch.equal(short(q, k, v), wanted[0])


@pytest.mark.parametrize("build", BUILDS)
def test_packed_axes_of_one(build: str, install: Callable[[str], Library]) -> None:
    install(build)
    where = {**PACKED, "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32), "max_seqlen_q": 1}
    where |= {"cu_seqlens_k": where["cu_seqlens_q"], "max_seqlen_k": 1}
    bound = dense(build, family="varlen", kv_heads=4)
    one = odd_axis_of_one((1, 4, 64), 0)
    assert torch.equal(bound.forward(one, one, one, **where), one)
    call = cached(build, (1, 0), phase="decode", heads=1, kv_heads=1)
    call.query, call.keys, call.values = odd_axis_of_one((1, 1, 64), 1), call.keys[:, :, :1], call.values[:, :, :1]
    assert bool(call.run().isfinite().all())


@pytest.mark.parametrize("build", TRAINING)
def test_gradients_of_an_axis_of_one(build: str, install: Callable[[str], Library]) -> None:
    install(build)
    bound = dense(build, kv_heads=4, lse=True, grad=("query", "key", "value"))
    given = [odd_axis_of_one((1, 9, 4, 64), 0) for _ in range(4)]
    out, lse = bound.forward(*given[1:])
    assert all(bool(g.isfinite().all()) for g in bound.backward(*given, out, lse))


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid has room for three samples, and calls have too."""
    monkeypatch.setattr(emulators, "GRID", 3)
    for module in (flash_attention, flash_pieces):
        monkeypatch.setattr(module, "MOST", 3)


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_more_samples_than_a_grid_has_blocks(
    build: str, lse: bool, layout: str, install: Callable[[str], Library]
) -> None:
    library = install(build)
    q, k, v = tensors(*((7, *shape[1:]) for shape in QKV))
    bound = dense(build, layout=layout, lse=lse)
    given = [t.transpose(1, 2) if layout == "BHSD" else t for t in (q, k, v)]
    found = bound.forward(*given)
    assert len(library.calls) == 3
    one_by_one = [bound.forward(*(t[i : i + 1] for t in given)) for i in range(7)]
    for whole, parts in zip(found, zip(*one_by_one, strict=True), strict=True) if lse else [(found, one_by_one)]:
        assert torch.equal(whole, torch.cat(parts))
    room = torch.empty_like(found[0] if lse else found)
    bound.forward(*given, out=room)
    assert torch.equal(room, found[0] if lse else found)
    if not lse:
        assert torch.equal(bound.simple(*given), found)


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("build", FUSED)
def test_sinks_of_more_samples_than_a_grid_has_blocks(build: str, install: Callable[[str], Library]) -> None:
    install(build)
    q, k, v, sinks = tensors(*((7, *shape[1:]) for shape in QKV), (4,))
    bound = dense(build, sinks=True)
    parts = [bound.forward(*(t[i : i + 1] for t in (q, k, v)), sinks=sinks) for i in range(7)]
    assert torch.equal(bound.forward(q, k, v, sinks=sinks), torch.cat(parts))


SEVEN = {
    "cu_seqlens_q": torch.tensor([0, 2, 2, 2, 2, 3, 7, 9], dtype=torch.int32),
    "cu_seqlens_k": torch.tensor([0, 2, 5, 6, 6, 6, 7, 9], dtype=torch.int32),
    "max_seqlen_q": 4,
    "max_seqlen_k": 3,
}
"""Sequences without queries, without keys, with more of them than keys; and pieces of three without any query."""


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("room", [False, True])
def test_more_sequences_than_a_grid_has_blocks(
    build: str, room: bool, install: Callable[[str], Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(build)
    q, k, v = (t[0] for t in tensors(*QKV))
    bound = dense(build, family="varlen", lse=True, s_relation="more")
    out = torch.full_like(q, torch.nan) if room else None
    found = bound.forward(q, k, v, **SEVEN, out=out)
    monkeypatch.setattr(emulators, "GRID", 7)
    monkeypatch.setattr(flash_attention, "MOST", 7)
    wanted = dense(build, family="varlen", lse=True, s_relation="more").forward(q, k, v, **SEVEN)
    assert all(map(torch.equal, found, wanted))
    assert out is None or torch.equal(out, wanted[0])


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("family", ["dense", "varlen"])
@pytest.mark.parametrize("build", TRAINING)
def test_gradients_of_more_samples_than_a_grid_has_blocks(
    build: str, family: str, install: Callable[[str], Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(build)
    gradients_in_pieces_are_those_of_a_whole(build, family, monkeypatch)


def gradients_in_pieces_are_those_of_a_whole(build: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = family == "varlen"
    fields: dict[str, Any] = {"family": family, "lse": True, "grad": ("query", "key", "value")}
    fields["s_relation"] = "more" if packed else "equal"
    dout, q, k, v = (t[0] if packed else t for t in tensors(*((1 if packed else 7, *s[1:]) for s in (QKV[0], *QKV))))
    where = SEVEN if packed else {}
    found = []
    for most in (None, 7):
        if most:
            monkeypatch.setattr(emulators, "GRID", most)
            monkeypatch.setattr(emulators, "OFFSETS", 2**31)
            monkeypatch.setattr(flash_pieces, "_OFFSETS", 2**31)
            for module in (flash_attention, flash_pieces):
                monkeypatch.setattr(module, "MOST", most)
        bound = dense(build, **fields)
        result = bound.forward(q, k, v, **where)
        found.append(bound.backward(dout, q, k, v, *result, **where))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("family", ["dense", "varlen"])
def test_sums_of_dq_beyond_an_offset_of_32_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulators.fa2("2.8.3").install(monkeypatch)
    # Room for two samples of up to 128 queries.
    most = 2 * 128 * 4 * 64 + (64 if family == "varlen" else 1)
    monkeypatch.setattr(emulators, "OFFSETS", most)
    monkeypatch.setattr(flash_pieces, "_OFFSETS", most)
    gradients_in_pieces_are_those_of_a_whole("fa2", family, monkeypatch)


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("family", ["dense", "varlen"])
def test_dropout_of_more_samples_than_a_grid_has_blocks(family: str, install: Callable[[str], Library]) -> None:
    library = install("fa2")
    packed = family == "varlen"
    bound = dense("fa2", family=family, dropout=0.25, grad=("query", "key", "value"), s_relation="equal")
    given = [(t[0] if packed else t).requires_grad_() for t in tensors(*((1 if packed else 7, *s[1:]) for s in QKV))]
    out = bound.forward(*given, **(SEVEN if packed else {}))
    out.sum().backward()
    assert out.shape == given[0].shape
    assert len(library.calls) > 1
    assert all(bool(t.grad.isfinite().all()) for t in given)


def test_one_sequence_is_one_call(install: Callable[[str], Library], monkeypatch: pytest.MonkeyPatch) -> None:
    """However long: there is nothing to cut, and nothing to ask the device."""
    library = install("fa4")  # of 64-bit offsets
    monkeypatch.setattr(flash_pieces, "_OFFSETS", 1)
    monkeypatch.setattr(flash_pieces, "_piece", lambda *_: pytest.fail("it was cut"))
    dout, q, k, v = (t[0] for t in tensors(*((1, *shape[1:]) for shape in (QKV[0], *QKV))))
    starts = torch.tensor([0, 9], dtype=torch.int32)
    one = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 9, "max_seqlen_k": 9}
    bound = dense("fa4", family="varlen", lse=True, grad=("query", "key", "value"))
    assert all(bool(g.isfinite().all()) for g in bound.backward(dout, q, k, v, *bound.forward(q, k, v, **one), **one))
    assert len(library.calls) == 2


@pytest.mark.usefixtures("three")
def test_pieces_are_not_cut_while_a_graph_is_recorded(
    install: Callable[[str], Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("fa2")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    q, k, v = (t[0] for t in tensors(*QKV))
    with pytest.raises(GraphError, match=r"7 sequences of 9 queries are more .* pass at most 3 sequences"):
        dense("fa2", family="varlen").forward(q, k, v, **SEVEN)


# ------------------------------------------------------------------------------------------------------ over a cache


class cached:  # noqa: N801 - reads as the call that it makes
    """A paged request of a build, and a cache to run it over: sequences of 30 and 9 keys in pages of 256."""

    def __init__(self, build: str, queries: tuple[int, int] = (1, 1), pages: int = 3, **fields: Any) -> None:
        page = 256 if build == "fa2" else 128
        usual: dict[str, Any] = {
            "family": "paged",
            "layout": "THD",
            "phase": "extend",
            "s_relation": "fewer",
            "causal": "bottom_right",
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 64,
            "page_size": page,
        }
        self.fields = {**usual, **fields}
        self.bound = target(build, serving=True).bind(**self.fields)
        self.query, self.keys, self.values = tensors((sum(queries), 4, 64), *[(pages, page, 2, 64)] * 2)
        self.tables: dict[str, Any] = {
            "page_table": torch.tensor([[2], [0]], dtype=torch.int32),
            "seq_lens": torch.tensor([30, 9], dtype=torch.int32),
            "cu_seqlens_q": torch.tensor([0, queries[0], sum(queries)], dtype=torch.int32),
            "max_seqlen_q": max(queries),
            "max_seqlen_k": 30,
        }

    def run(self, **more: Any) -> Any:
        return self.bound.forward(self.query, self.keys, self.values, **in_tables(**self.tables, **more))


@pytest.mark.parametrize("build", ["fa2", "fa3", "sgl", "vllm"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_cache_is_read_where_it_lies(build: str, layout: str, install: Callable[[str], Library]) -> None:
    library = install(build)
    call = cached(build, kv_layout=layout)
    if layout == "HND":
        call.keys, call.values = (t.transpose(1, 2).contiguous() for t in (call.keys, call.values))
    call.run()
    given = library.calls[-1].given
    assert given["k" if "k" in given else "k_cache"].data_ptr() == call.keys.data_ptr()
    assert given["v" if "v" in given else "v_cache"].data_ptr() == call.values.data_ptr()


def test_fa2_splits_the_keys_of_a_decode_and_packs_the_rest(install: Callable[[str], Library]) -> None:
    library = install("fa2")
    decode = cached("fa2", phase="decode", s_relation="one", causal="none")
    decode.run()
    assert library.calls[-1].name == "flash_attn_with_kvcache"
    cached("fa2", queries=(3, 1)).run()
    assert library.calls[-1].name == "flash_attn_varlen_func"
    assert library.calls[-1].given["cu_seqlens_k"].tolist() == [0, 30, 39]
    # One query each, but for a sequence without one in this step.
    call = cached("fa2", queries=(0, 1))
    call.run()
    assert library.calls[-1].name == "flash_attn_with_kvcache"
    assert library.calls[-1].given["cache_seqlens"].tolist() == [9]


@pytest.mark.parametrize("length", [0, 9])
def test_fa2_gives_no_packed_call_over_pages_a_block_without_keys(
    length: int, install: Callable[[str], Library]
) -> None:
    """Its LSE would be written over other memory: such steps are refused, and one query goes another way."""
    library = install("fa2")
    call = cached("fa2", queries=(0, 1), lse=True)
    call.tables["seq_lens"][1] = length
    out, lse = call.run()
    assert bool((lse == -torch.inf).all()) is bool((out == 0).all()) is (length == 0)
    wrong = cached("fa2", queries=(95, 1))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        wrong.run()
    # Rows of padding, drafts of a recorded step among them.
    call = cached("fa2", queries=(3, 3), lse=True)
    call.tables["seq_lens"][1] = length
    out, lse = call.run()
    assert library.calls[-1].given["cu_seqlens_k"].tolist() == [0, 30, 30 + (length or 3)]
    assert bool((lse[3:] == -torch.inf).all()) is bool((out[3:] == 0).all()) is (length == 0)


@pytest.mark.parametrize("build", ["fa3", "sgl", "vllm"])
def test_batch_invariance_is_one_split(build: str, install: Callable[[str], Library]) -> None:
    library = install(build)
    cached(build).run()
    assert library.calls[-1].arguments["num_splits"] == 0
    cached(build, batch_invariant=True).run()
    assert library.calls[-1].arguments["num_splits"] == 1


@pytest.mark.parametrize("build", ["fa3", "sgl"])
def test_chunks_are_causal(build: str, install: Callable[[str], Library]) -> None:
    library = install(build)
    cached(build, chunk=16, causal="none").run()
    given = library.calls[-1].given
    assert (given["attention_chunk"], given["causal"]) == (16, True)


def test_vllm_writes_where_it_is_told_if_it_can(install: Callable[[str], Library]) -> None:
    library = install("vllm")
    call = cached("vllm")
    room = torch.empty(2, 4, 64, dtype=torch.bfloat16)
    assert call.run(out=room) is room
    assert library.calls[-1].given["out"] is room
    gapped = torch.empty(2, 4, 67, dtype=torch.bfloat16)[..., :64]
    assert torch.equal(call.run(out=gapped), room)
    assert "out" not in library.calls[-1].given


def test_the_latent_goes_in_as_qv(install: Callable[[str], Library]) -> None:
    names = {"fa3": "qv", "sgl": "qv", "vllm": "q_v", "fa4-blackwell": "qv"}
    for build, name in names.items():
        library = install(build)
        fields = {"head_dim": 576, "v_head_dim": 512, "kv_heads": 1, "scale": 192**-0.5}
        page = 1 if build.startswith("fa4") else 16
        call = cached(build, family="mla", page_size=page, **fields)
        query, cache = tensors((2, 4, 576), (40, page, 576))
        call.tables["page_table"] = torch.arange(60, dtype=torch.int32).view(2, 30) % 40
        call.bound.forward(query, cache, **in_tables(**call.tables))
        given = library.calls[-1].given
        assert given[name].shape == (2, 4, 512)
        assert given["q"].shape == (2, 4, 64)
        assert given["softmax_scale"] == 192**-0.5
        assert given["v" if "v" in given else "v_cache"].data_ptr() == cache.data_ptr()


# What makes a tile of keys as large as a page, in the builds that load such pages whole (hopper/tile_size.h).
WHOLE = {
    "latent": (("fa3", "sgl", "vllm"), {"head_dim": 576, "v_head_dim": 512, "family": "mla", "page_size": 64}),
    "64, causal": (("fa3", "sgl", "vllm"), {"page_size": 128}),
    "64": (("vllm",), {"page_size": 192, "causal": "none"}),
    "96": (("fa3",), {"page_size": 144, "head_dim": 96}),
    "128, window": (("fa3", "sgl"), {"page_size": 128, "head_dim": 128, "window": (9, -1)}),
    "192 and 128": (("vllm",), {"page_size": 256, "head_dim": 192, "v_head_dim": 128}),
    "256": (("vllm",), {"page_size": 80, "head_dim": 256}),
    "256, window": (("sgl",), {"page_size": 64, "head_dim": 256, "window": (9, -1)}),
}


@pytest.mark.parametrize(
    ("build", "fields"), [pytest.param(b, f, id=f"{b} {name}") for name, (builds, f) in WHOLE.items() for b in builds]
)
def test_rows_that_no_sequence_has_are_not_read(
    build: str, fields: dict[str, Any], install: Callable[[str], Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(build)
    latent, page, width = fields.get("family") == "mla", fields["page_size"], fields.get("head_dim", 64)
    heads = {"heads": 4, "kv_heads": 1, "scale": 0.1} if latent else {"heads": 8, "kv_heads": 2, "scale": 0.1}
    bound = cached(build, **{**heads, **fields}).bound
    widths = (width, fields.get("v_head_dim", width))
    query, *caches = tensors((60, heads["heads"], width), *((2, page, heads["kv_heads"], w) for w in widths))
    if latent:
        caches[1] = caches[0][..., : widths[1]]
    length = page + 60
    for cache in caches:
        cache[0, 60:] = torch.nan
    given: dict[str, Any] = {
        "page_table": torch.tensor([[1, 0]], dtype=torch.int32),
        "seq_lens": torch.tensor([length], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 60], dtype=torch.int32),
        "max_seqlen_q": 60,
        "max_seqlen_k": length,
    }
    inputs = (caches[0].squeeze(2),) if latent else caches
    found = bound.forward(query, *inputs, **in_tables(**given))
    rows = (cache[[1, 0]].flatten(0, 1)[None, :length].double() for cache in caches)
    said = {"causal": "bottom_right", "window": (-1, -1), "scale": 0.1}
    said |= {name: value for name, value in fields.items() if name in said}
    right = reference.attention(query.double()[None], *rows, **said)[0]
    assert float((found.double() - right).norm() / right.norm()) < 8e-3
    monkeypatch.setattr(fa3._Kernels, "padding", lambda self, where: None)
    assert not bound.forward(query, *inputs, **in_tables(**given)).isfinite().all()
    # A tile holds so few queries: no TMA.
    given |= {"cu_seqlens_q": torch.tensor([0, 10], dtype=torch.int32), "max_seqlen_q": 10}
    assert bound.forward(query[:10], *inputs, **in_tables(**given)).isfinite().all()


@pytest.mark.parametrize(
    ("queries", "fields", "alone"),
    [
        pytest.param((1, 1), {}, True, id="one of each sequence"),
        pytest.param((1, 1), {"lse": True}, True, id="and the LSE"),
        pytest.param((2, 0), {}, False, id="two of one"),
        pytest.param((0, 1), {}, False, id="one of one"),
        pytest.param((1, 1), {"batch_invariant": True}, False, id="the same bits beside a sequence without a query"),
    ],
)
def test_fa4_is_given_single_queries_as_a_batch(
    queries: tuple[int, int], fields: dict[str, Any], alone: bool, install: Callable[[str], Library]
) -> None:
    library = install("fa4")
    call = cached("fa4", queries=queries, **fields)
    found = call.run()
    given = library.calls[-1].given
    assert given["q"].shape == ((2, 1, 4, 64) if alone else (sum(queries), 4, 64))
    assert ("cu_seqlens_q" in given) is not alone
    # FlashAttention 3 is told whose they are.
    install("sgl")
    call.bound = target("sgl", serving=True).bind(**call.fields)
    torch.testing.assert_close(call.run(), found)


@pytest.mark.parametrize("step", [4, 8])
def test_fa4_is_given_parts_of_pages_that_it_would_load_whole(step: int, install: Callable[[str], Library]) -> None:
    library = install("fa4")
    call = cached("fa4", queries=(2, 3))
    pool = torch.stack([call.keys, call.values], 1) if step == 8 else None
    if pool is not None:
        # Keys and values of a page side by side.
        call.keys, call.values = pool.unbind(1)
    for cache in (call.keys, call.values):
        cache[2, 30:], cache[0, 9:], cache[1] = torch.nan, torch.nan, torch.nan
    assert call.run().isfinite().all()
    given = library.calls[-1].given
    assert given["k"].shape[1] == 32
    assert given["k"].data_ptr() == call.keys.data_ptr()
    assert given["page_table"].tolist() == [[2 * step + i for i in range(4)], [0, 1, 2, 3]]
    call.bound = target("fa4", serving=True).bind(**{**call.fields, "options": (("free_slots", "finite"),)})
    assert not call.run().isfinite().all()
    assert library.calls[-1].given["k"].shape[1] == 128


@pytest.mark.parametrize(
    ("queries", "keys", "fields"),
    [
        pytest.param((2, 3), (0, 9), {}, id="an empty first sequence"),
        pytest.param((300, 3), (9, 9), {"s_relation": "more"}, id="300 queries of 9 keys"),
        pytest.param((300, 3), (0, 9), {"s_relation": "more", "causal": "none", "window": (9, 4)}, id="a window"),
    ],
)
def test_fa4_asks_the_table_for_no_page_before_it(
    queries: tuple[int, int], keys: tuple[int, int], fields: dict[str, Any], install: Callable[[str], Library]
) -> None:
    """With pages that are read as they are: the emulator does so for queries that see no key."""
    library = install("fa4")
    call = cached("fa4", queries=queries, **fields)
    call.tables |= {"seq_lens": torch.tensor(keys, dtype=torch.int32), "max_seqlen_k": max(keys)}
    wanted = call.run()
    call.bound = target("fa4", serving=True).bind(**{**call.fields, "options": (("free_slots", "finite"),)})
    assert torch.equal(call.run(), wanted)
    given = library.calls[-1].given
    assert given["k"].shape[1] == 128
    assert torch.equal(given["page_table"], call.tables["page_table"])
    before = given["page_table"].as_strided((2, 1), (given["page_table"].stride(0), 1), 0)
    assert not before.any(), "the page before a row is the first of the cache"
    table = call.tables["page_table"]
    spacious = torch.nn.functional.pad(table.flatten(), (64, 0))[64:].view(table.shape)
    call.tables["page_table"] = spacious
    assert torch.equal(call.run(), wanted)
    assert library.calls[-1].given["page_table"].data_ptr() == spacious.data_ptr(), "there is something before it"


def test_queries_beside_an_e4m3_cache_have_a_scale_for_each_sequence_and_head(
    install: Callable[[str], Library],
) -> None:
    library = install("fa3")
    call = cached("fa3", queries=(2, 3))
    bound = Emulated("fa3_fp8", "flash-attn-3", HOPPER).bind(
        family="paged", layout="THD", phase="extend", s_relation="fewer", causal="bottom_right", heads=4, kv_heads=2,
        head_dim=64, page_size=128, kv_dtype="fp8_e4m3", kv_scales="head",
    )  # fmt: skip
    call.query[:2] *= 100
    keys, values = (t.to(torch.float8_e4m3fn) for t in (call.keys, call.values))
    k_scale, v_scale = torch.tensor([0.5, 2.0]), torch.tensor([1.0, 3.0])
    bound.forward(call.query, keys, values, **in_tables(**call.tables, k_scale=k_scale, v_scale=v_scale))
    given = library.calls[-1].given
    assert given["q"].dtype == torch.float8_e4m3fn
    largest = torch.stack([part.abs().unflatten(1, (2, 2)).amax((0, 2, 3)) for part in call.query.split([2, 3])])
    assert torch.allclose(given["q_descale"], largest.float() / 448)
    assert given["k_descale"].tolist() == [k_scale.tolist()] * 2
    assert given["v_descale"].tolist() == [v_scale.tolist()] * 2


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("window", [(-1, 9), (2, -1), (2, 9)])
def test_fa2_has_other_windows_before_the_first_key(window: tuple[int, int], install: Callable[[str], Library]) -> None:
    install("fa2")
    q, k, v = tensors((1, 14, 4, 64), (1, 6, 2, 64), (1, 6, 2, 64))
    found = dense("fa2", causal="none", window=window, s_relation="more").forward(q, k, v).double()
    right = reference.attention(q.double(), k.double(), v.double(), window=window)
    wrong = (found - right).abs().amax((0, 2, 3)) > 0.05
    assert wrong.any()
    assert not wrong[8:].any(), "queries among the keys"


def test_the_beta_of_fa3_has_no_lse_and_no_such_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    emulators.fa3("sdist").install(monkeypatch)
    dense("fa3").forward(*tensors(*QKV))
    with pytest.raises(BackendUnavailableError, match=r"flash-attn-3 3\.0\.0b1 takes no 'return_attn_probs', which th"):
        dense("fa3", lse=True)
    with pytest.raises(BackendUnavailableError, match=r"flash-attn-3 3\.0\.0b1 takes no"):
        dense("fa3", grad=("query", "key", "value"))
    out, lse = cached("fa3", lse=True).run()
    assert lse.shape == out.shape[:2]


def test_both_versions_of_sgl_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.3.21", "0.4.10"):
        library = emulators.sgl_kernel(version).install(monkeypatch)
        dense("sgl", sinks=True).forward(*tensors(*QKV), sinks=torch.zeros(4, dtype=torch.bfloat16))
        cached("sgl").run()
        assert [call.name for call in library.calls] == ["flash_attn_varlen_func", "flash_attn_with_kvcache"]


MORE = {"s_relation": "more", "window": (9, -1)}
MORE_PAGED = {"s_relation": "more", "family": "paged", "layout": "THD", "page_size": 256, "phase": "extend"}
CHUNKED = {**MORE_PAGED, "s_relation": "fewer", "chunk": 64}
FA4_PAGED = {"family": "paged", "layout": "THD", "page_size": 128, "phase": "decode", "s_relation": "one"}
FA4_TRAINS = {"head_dim": 256, "grad": ("query",)}
FA4_MLA = {"head_dim": 192, "v_head_dim": 128, "heads": 8, "kv_heads": 8, "grad": ("query",)}
FA4_ABSORBED = {**FA4_PAGED, "family": "mla", "head_dim": 576, "v_head_dim": 512, "heads": 16, "scale": 192**-0.5}
FA4_WIDTHS = "is not one of 16, 32, 48, 64, 112, 128, 192, 256"
REFUSED: list[tuple[str, str, str, dict[str, Any], str]] = [
    ("cuda:sm80", "fa", "flash-attn", MORE, "s_relation='more' is not one of equal, one, fewer"),
    (
        "cuda:sm80",
        "fa2",
        "flash-attn",
        {**MORE_PAGED, "causal": "bottom_right"},
        "s_relation='more' is not one of equal, one, fewer",
    ),
    ("cuda:sm80", "fa2", "flash-attn", {**MORE_PAGED, "window": (9, -1)}, "s_relation='more' is not one of"),
    # What sgl-kernel's build makes of both is another window: an H200 showed it.
    ("cuda:sm90", "fa3", "sgl-kernel", {**CHUNKED, "window": (8, -1)}, "is not declared"),
    ("cuda:sm80", "fa", "flash-attn==2.6.3", {}, "flash-attn 2.6.3 is installed, >=2.7,<3 is needed"),
    ("cuda:sm90", "fa", "flash-attn-4==4.0.0b30", {}, "flash-attn-4 4.0.0b30 is installed, >=4.0.0b36 is needed"),
    ("cuda:sm80", "fa", "flash-attn", {"alibi": True}, "alibi=True is not declared"),
    ("cuda:sm80", "fa", "flash-attn", {"dropout": 0.1, "softcap": 30.0}, "dropout=0.1 is not declared"),
    ("cuda:sm90", "fa", "flash-attn-3", {"dropout": 0.1}, "dropout=0.1 is not declared"),
    ("cuda:sm90", "fa", "flash-attn-3", {"mask": "bool"}, "mask='bool' is not declared"),
    (
        "cuda:sm90",
        "fa",
        "flash-attn-3",
        {"head_dim": 256, "grad": ("query",), "deterministic": True},
        "fa3/flash-attn-3: grad=('query',) is not declared",
    ),
    ("cuda:sm90", "fa", "sgl-kernel", {"grad": ("query",)}, "grad=('query',) is not declared"),
    # Widths whose rows FA4's loads without TMA misplace: 96 and 240 gave wrong results on an H200.
    ("cuda:sm90", "fa4", "flash-attn-4", {**FA4_PAGED, "head_dim": 96}, f"head_dim=96 {FA4_WIDTHS}"),
    ("cuda:sm90", "fa4", "flash-attn-4", {**FA4_PAGED, "head_dim": 240}, f"head_dim=240 {FA4_WIDTHS}"),
    ("cuda:sm100", "fa", "flash-attn-4", {"head_dim": 264}, "head_dim=264 is not 8 to 128"),
    # Its Blackwell backward at 256 knows neither.
    (
        "cuda:sm100",
        "fa",
        "flash-attn-4",
        {**FA4_TRAINS, "softcap": 30.0},
        "flash-attn-4: grad=('query',) is not declared",
    ),
    ("cuda:sm100", "fa", "flash-attn-4", {**FA4_TRAINS, "window": (9, -1)}, "flash-attn-4: grad=('query',) is not"),
    # Of its kernels before Hopper.
    ("cuda:sm80@12.4", "fa3", "sgl-kernel", {**FA4_PAGED, "head_dim": 192, "v_head_dim": 128}, "v_head_dim=128"),
    # Which of its two absorbed kernels serves, and so the order of its sums, follows from the batch.
    ("cuda:sm100", "fa4", "flash-attn-4", {**FA4_ABSORBED, "batch_invariant": True}, "batch_invariant=True"),
    ("cuda:sm100", "fa4", "flash-attn-4", {**FA4_ABSORBED, "heads": 40}, "heads=40 is not one of 1, 2, 4, 8"),
]


@pytest.mark.parametrize(("platform", "name", "installed", "changes", "words"), REFUSED)
def test_refusals(platform: str, name: str, installed: str, changes: dict[str, Any], words: str) -> None:
    request = AttentionRequest(**changes)
    try:
        selection = what_if(request, platform=platform, installed=(installed,), backend=name, strict=True)
    except PolyattnError as error:
        said = str(error)
    else:
        said = f"served by {selection.id} with {selection.lowerings}"
    assert words in said


@pytest.mark.parametrize(
    ("platform", "kv_heads", "steps"),
    [("cuda:sm90", 8, ()), ("cuda:sm90", 2, ("pad_value_dim",)), ("cuda:sm100", 2, ())],
)
def test_fa4_trains_192_and_128_on_hopper_as_it_is_with_keys_for_each_head(
    platform: str, kv_heads: int, steps: tuple[str, ...]
) -> None:
    request = AttentionRequest(**{**FA4_MLA, "kv_heads": kv_heads})
    selection = what_if(request, platform=platform, installed=("flash-attn-4",), backend="fa", strict=True)
    assert (selection.provider, selection.lowerings) == ("fa4/flash-attn-4", steps)


def test_a_cache_in_fp8_is_read_with_rounded_queries_only_where_that_is_said() -> None:
    fields: dict[str, Any] = {"family": "paged", "page_size": 64, "phase": "decode", "s_relation": "one"}
    request = AttentionRequest(**fields, kv_dtype="fp8_e4m3", kv_scales="head")
    where: dict[str, Any] = {"platform": "cuda:sm90", "installed": ("flash-attn-3",)}
    assert what_if(request, **where, backend="fa3", strict=True).lowerings == ("dequantise_kv",)
    named = what_if(request, **where, backend="fa3")
    assert (named.backend, named.source) == ("fa3_fp8", "argument, before fa3")
    assert what_if(request, **where).backend == "triton"


@pytest.mark.parametrize(("width", "given"), [(72, 96), (80, 96), (104, 128), (88, 88), (128, 128)])
def test_fa4_trains_on_hopper_only_at_widths_that_its_passes_round_alike(width: int, given: int) -> None:
    request = AttentionRequest(head_dim=width, grad=("query", "key", "value"))
    selection = what_if(request, platform="cuda:sm90", installed=("flash-attn-4",), backend="fa")
    detail = selection.plan.rewrite.detail if selection.plan else "as it is"
    assert detail == ("as it is" if given == width else f"D {width} -> {given}")


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({}, "as it is"),
        ({"window": (9, -1)}, "D 40 -> 64"),
        ({"family": "varlen", "layout": "THD"}, "D 40 -> 64"),
    ],
)
def test_fa4_trains_on_blackwell_only_where_its_zeros_stay_in_their_row(fields: dict[str, Any], given: str) -> None:
    request = AttentionRequest(head_dim=40, grad=("query", "key", "value"), **fields)
    selection = what_if(request, platform="cuda:sm100", installed=("flash-attn-4",), backend="fa")
    assert (selection.plan.rewrite.detail if selection.plan else "as it is") == given


def test_fa4_writes_zeros_beyond_its_width_on_blackwell(install: Callable[[str], Library]) -> None:
    """What the rows above avoid: the first sequence has no query, and its keys' zeros reach into the second's."""
    library = install("fa4-blackwell")
    generator = torch.Generator().manual_seed(7)
    module = library.modules["flash_attn.cute.interface"]
    where = {
        "cu_seqlens_q": torch.tensor([0, 0, 5], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 4, 9], dtype=torch.int32),
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
    }
    for width in (40, 64):
        q, k, v = (torch.randn(length, 2, width, generator=generator).bfloat16() for length in (5, 9, 9))
        out, lse = module.flash_attn_varlen_func(q, k, v, **where, return_lse=True)
        _, dk, dv = module._flash_attn_bwd(q, k, v, out, out, lse, **where)
        for gradient in (dk, dv):
            assert not gradient[:4].any()
            assert int((gradient[4, 0] == 0).sum()) == -width % 32
            assert bool(gradient[4, 1].all())


@pytest.mark.parametrize("chip", ["sm80", "sm120"])
def test_sinks_of_fa4_are_made_from_the_lse_where_its_kernel_knows_none(
    chip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ALONE[f"fa4-{chip}"][0]().install(monkeypatch).modules["flash_attn.cute.interface"]
    request = AttentionRequest(sinks=True, head_dim=64)
    selection = what_if(request, platform=f"cuda:{chip}", installed=("flash-attn-4",), backend="fa")
    assert selection.lowerings == ("sinks_from_lse",)
    with pytest.raises(AssertionError, match="Learnable sink is not supported in this kernel"):
        module.flash_attn_func(*tensors(*QKV), learnable_sink=torch.zeros(4))


def test_sinks_of_sgl_kernel_are_made_from_the_lse_where_its_kernel_does_not_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build, tried = ALONE["sgl-sm80"]
    library = build().install(monkeypatch)
    request = AttentionRequest(**FA4_PAGED, sinks=True)
    for chip, lowerings in (("cuda:sm80@12.4", ("sinks_from_lse",)), (HOPPER, ())):
        selection = what_if(request, platform=chip, installed=("sgl-kernel",), backend="fa3")
        assert selection.lowerings == lowerings
    call = cached("sgl", sinks=True)
    sinks = torch.full((4,), 9.0, dtype=torch.bfloat16)
    with_sinks = call.run(sinks=sinks)
    assert library.calls[-1].given["sinks"] is sinks
    call.bound = tried.bind(**call.fields)
    assert torch.equal(call.run(), with_sinks), "which it did not read"


# ---------------------------------------------------------------------------------------------------- FA4 over blocks


@pytest.mark.parametrize(
    ("chip", "blocks"),
    [(chip, case) for chip, (_, one) in FA4_BLOCKS.items() for case in one.cases(per_row=8, dtypes=("bfloat16",))],
    ids=str,
)
def test_fa4_over_blocks(chip: str, blocks: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    library, one = FA4_BLOCKS[chip]
    one.passes(blocks, library().install(monkeypatch))


def test_fa4_is_given_ascending_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cuts off the last of a list alone, where the keys end: a last block in front would let others be read."""
    library = emulators.fa4().install(monkeypatch)
    q, k, v = (torch.randn(1, 2, n, 64).bfloat16() for n in (256, 200, 200))
    fields = {
        "family": "block_sparse",
        "layout": "BHSD",
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 64,
        "s_relation": "more",
    }
    bound = FA4_BLOCKS["hopper"][1].bind(**fields, block_map=True, block_shape=(128, 128), lse=True)
    counts, indices = torch.tensor([[[2, 0]]]).int(), torch.tensor([[[[1, 0], [0, 0]]]]).int()
    out, lse = bound.forward(q, k, v, block_counts=counts, block_indices=indices)
    given = library.calls[-1].given["block_sparse_tensors"]
    assert given.block_size == (128, 128)
    assert not given.mask_block_cnt.any()
    assert given.full_block_cnt.tolist() == [[[2, 1]]]
    assert given.full_block_idx[0, 0, 0].tolist() == [0, 1]
    assert not out[:, :, 128:].any()
    assert (lse[:, :, 128:] == -torch.inf).all()
    right, level = reference.attention(q[:, :, :128], k, v, layout="BHSD", return_lse=True, compute_dtype=torch.float64)
    torch.testing.assert_close(out[:, :, :128].double(), right.double(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse[:, :, :128].double(), level.double(), rtol=1e-3, atol=1e-3)
