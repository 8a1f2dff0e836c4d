"""Shared memory: a configuration that does not fit a device is never launched there, or another takes its place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources, PTXASError

import polyattn
from polyattn import tuning
from polyattn.contract import PagedTables
from polyattn.errors import UnsupportedRequestError
from polyattn.semantics import reference
from polyattn.testing.families.cached import in_tables
from polyattn_triton.hopper import extend as hopper_extend
from polyattn_triton.kernels import backward, block_sparse, choices, decode, extend, forward, latent, room, rules
from polyattn_triton.kernels.choices import EPOCH
from polyattn_triton.records.tuned import BLOCK_SPARSE, DECODE, FORWARD

CPU, BF16, FLOAT = torch.device("cpu"), torch.bfloat16, torch.float32
KIB = 1024
MACHINES = {
    # What is launched where: `choices.architecture`, bytes of shared memory.
    "sm80": ("cuda", 163 * KIB),
    "sm86": ("cuda", 99 * KIB),
    "sm90": ("hopper", 227 * KIB),
    "sm100": ("blackwell", 227 * KIB),
    "gfx942": ("other", 64 * KIB),
}
On = Callable[[str, "int | None"], None]


@pytest.fixture(autouse=True)
def afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No measurements, and nothing that a launch refused, before and after."""
    with monkeypatch.context() as patched:
        patched.setenv("POLYATTN_TUNING_STORE", str(tmp_path / "tuning.sqlite3"))
        patched.delenv("POLYATTN_TUNING", raising=False)
        patched.setattr(room, "_refused", {})
        tuning.reload()
        yield
    tuning.reload()


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> On:
    """Believe that CPU tensors are on a machine of this class, with so much shared memory."""

    def believe(where: str, limit: int | None) -> None:
        monkeypatch.setattr(rules, "INTERPRETED", False)
        for module in (choices, decode, extend, latent):
            monkeypatch.setattr(module, "architecture", lambda device: where)
        monkeypatch.setattr(latent, "_class", lambda device: {"cuda": "nvidia", "other": ""}.get(where, where))
        for module in (choices, decode):
            monkeypatch.setattr(module, "shared_memory", lambda device: limit)
        EPOCH.value += 1

    return believe


# ----------------------------------------------------------------------------------------------------- what is chosen

WIDTHS = (16, 24, 40, 64, 72, 96, 128, 136, 160, 192, 200, 256)


def _dense() -> dict[Any, Any]:
    """What the dense kernels are launched with, of everything that is declared and without a mask."""
    pairs = itertools.product(WIDTHS, WIDTHS)
    found: dict[Any, Any] = {}
    for dims, dtype in itertools.product(pairs, (BF16, FLOAT)):
        for few, loose in itertools.product((0, 16), (False, True) if dtype == BF16 else (False,)):
            found["forward", dims, dtype, few, loose] = forward._config(CPU, dtype, dims, few, loose, EPOCH.value)
        found["backward", dims, dtype] = backward._config(CPU, dtype, dims, EPOCH.value)
    for width, blocks in itertools.product((64, 128, 256), itertools.product((64, 128), (64, 128))):
        for kernel, dtype in itertools.product(("forward", "query", "key"), (BF16, FLOAT)):
            asked = (kernel, CPU, dtype, width, blocks, EPOCH.value)
            found["sparse", kernel, dtype, width, blocks] = block_sparse._tiles(*asked)
    return found


@pytest.mark.parametrize("machine", MACHINES)
def test_what_fits_is_what_the_tables_say(machine: str, on: On) -> None:
    """Of calls without a mask all do but the forward of D = D_v = 192 on a Hopper."""
    where, limit = MACHINES[machine]
    on(where, None)
    tables = _dense()
    on(where, limit)
    changed = {key for key, config in _dense().items() if config != tables[key]}
    assert changed == ({("forward", (192, 192), BF16, 0, False)} if machine == "sm90" else set())


def test_masks_take_room_of_their_own(on: On) -> None:
    on("hopper", 227 * KIB)
    table = forward.Config(128, 128, 8, 2, tma=True)

    def config(dims: tuple[int, int], mask: int) -> forward.Config:
        return forward._config(CPU, BF16, dims, 0, False, EPOCH.value, mask)

    assert [config((192, 128), mask).n for mask in (0, 1, 4)] == [128, 64, 64]
    assert [config((128, 128), mask) for mask in (0, 1, 4)] == [table] * 3
    on("cuda", 99 * KIB)
    assert [config((128, 128), mask).n for mask in (0, 1, 2, 4)] == [64, 64, 64, 32]


def test_launchers_over_caches_ask_too(on: On) -> None:
    """Each of these ended in `OutOfResources`."""
    on("cuda", 99 * KIB)
    wide = decode.config_for(CPU, BF16, 16, (256, 256), 64, EPOCH.value)
    assert (wide.M, wide.N, wide.stages) == (64, 32, 2)
    assert decode.config_for(CPU, FLOAT, 32, (256, 256), 64, EPOCH.value).stages == 1
    assert decode.config_for(CPU, BF16, 16, (256, 256), 16, EPOCH.value).stages == 3
    tensors = (torch.empty(8, 4, 256), torch.empty(1, 16, 1, 256), torch.empty(1, 16, 1, 256))
    assert extend.config_for(*tensors, 256, page_size=16) == extend.Config(32, 32, 4, 1)
    for stored in ("block128", "fp8_e4m3"):
        # Rows of 8 bits are cut to no fewer keys than tensor cores multiply at a time.
        assert latent.config_for(CPU, BF16, (512, 64), 64, stored=stored)[:2] == (16, 32)
    assert latent.config_for(CPU, FLOAT, (512, 64), 64, stored="fp8_e4m3").keys == 16
    assert latent.config_for(CPU, BF16, (512, 64), 64).keys == 32
    on("hopper", 227 * KIB)
    assert [latent.config_for(CPU, BF16, (512, rope), 64).keys for rope in (64, 128)] == [64, 32]
    assert hopper_extend.config_for(CPU, BF16, 256, 64, 1) == hopper_extend.Config(64, 2)


def test_a_mask_of_a_planned_step_takes_its_room_from_the_pipeline(on: On) -> None:
    """A session plans without knowing of it, and its tiles are settled by then."""
    on("cuda", 99 * KIB)
    config = decode.config_for(CPU, BF16, 16, (128, 128), 64, EPOCH.value)
    given = (CPU, BF16, (128, 128), (4, 1), 16, 16, "auto", "", False, (-1, -1), 0, 1.0, 0.0)
    stages = [decode._fixed(*given, m, size, False, 1, False, config)[1]["STAGES"] for m, size in ((0, 0), (2, 4))]
    assert stages == [config.stages, config.stages - 1]


def test_a_measurement_that_does_not_fit_is_refused(on: On) -> None:
    """As one of another machine may be: the table serves."""
    tuned = {"m": 128, "n": 128, "warps": 8, "stages": 4, "tma": True}
    tuning.tune(
        FORWARD, ("bfloat16", 128, 128, 0, False), [tuned], lambda candidate: 1.0, where=CPU, seconds=10, rounds=1,
        while_serving=True,
    )  # fmt: skip
    for limit, expected in ((999 * KIB, forward.Config(**tuned)), (227 * KIB, forward.Config(128, 128, 8, 2, True))):
        on("hopper", limit)
        assert forward._config(CPU, BF16, (128, 128), 0, False, EPOCH.value) == expected


def test_a_smaller_one_keeps_its_pipeline_as_long_as_it_can() -> None:
    config, seen = forward.Config(128, 64, 8, 3), []
    while config := room.smaller(config, forward._SHRINKS):  # type: ignore[assignment]
        seen.append((config.stages, config.n, config.m))
    assert seen == [(2, 64, 128), (2, 32, 128), (2, 32, 64), (1, 32, 64), (1, 16, 64), (1, 16, 32), (1, 16, 16)]


# ----------------------------------------------------------------------------------- what a launch refuses all the same


class _Little:
    """A kernel on a device that has room for tiles of `most` columns."""

    def __init__(self, kernel: Any, most: int, error: Exception | None = None) -> None:
        self.kernel, self.most, self.asked = kernel, most, []  # type: ignore[var-annotated]
        self.error = error or OutOfResources(245760, 232448, "shared memory")

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> Any:
            self.asked.append(kwargs["N"])
            if kwargs["N"] > self.most:
                raise self.error
            return self.kernel[grid](*args, **kwargs)

        return launch


def _little(monkeypatch: pytest.MonkeyPatch, module: Any, kernel: str, most: int, error: Any = None) -> list[int]:
    little = _Little(getattr(module, kernel), most, error)
    monkeypatch.setattr(module, kernel, little)
    return little.asked


def _made(*shape: int, count: int = 3) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(1)
    return tuple(torch.randn(*shape, generator=draw) for _ in range(count))


def _attend(**given: Any) -> None:
    tensors = _made(1, 40, 2, 16)
    found = polyattn.attention(*tensors, causal=True, backend="triton", **given)
    torch.testing.assert_close(found, reference.attention(*tensors, causal="bottom_right", **given))


def test_dense_goes_on_with_the_next_smaller_one_and_remembers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _little(monkeypatch, forward, "_forward", 32)
    for _ in range(2):
        _attend()
    assert asked == [64, 32, 32]


def test_gradients_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {name: _little(monkeypatch, backward, name, 32) for name in ("_queries", "_keys")}
    tensors = [t.requires_grad_() for t in _made(1, 40, 2, 16)]
    expected = torch.autograd.grad(reference.attention(*tensors, causal="bottom_right").sum(), tensors)
    found = polyattn.attention(*tensors, causal=True, backend="triton")
    torch.testing.assert_close(torch.autograd.grad(found.sum(), tensors), expected)
    # What was refused of the one kernel does not shrink the other.
    assert asked == {"_queries": [64, 32, 32, 32], "_keys": [64, 64, 32]}


def test_block_sparse_too(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("_forward", "_backward_query", "_backward_key")
    asked = [_little(monkeypatch, block_sparse, name, 32) for name in names]
    query, key, value, dout = _made(1, 1, 64, 64, count=4)
    out, lse = torch.empty_like(query), torch.empty(1, 1, 64)
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    lists = block_sparse.Lists(one, one.new_zeros(1, 1, 1, 1), None, 64, 64)
    block_sparse.forward(query, key, value, lists, scale=0.125, out=out, lse=lse)
    grads = block_sparse.backward(dout, query, key, value, out, lse, lists, scale=0.125)
    tensors = [t.requires_grad_() for t in (query, key, value)]
    expected = torch.softmax(query @ key.mT * 0.125, -1) @ value
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, tensors, dout))
    assert all(sizes[0] == 64 and sizes[-1] == 32 for sizes in asked)


def _serve(launcher: Any, **given: Any) -> None:
    """Two queries of a sequence of 20 keys in two pages."""
    query, caches = _made(2, 2, 16, count=1)[0], _made(2, 16, 1, 16, count=2)
    out = torch.empty_like(query)
    table, lens, starts = (torch.tensor(t, dtype=torch.int32) for t in ([[0, 1]], [20], [0, 2]))
    launcher(
        query, *caches, tables=PagedTables(table, lens, starts, 2, 20), page_size=16, hnd=False, causal=True,
        scale=0.25, out=out, **given,
    )  # fmt: skip
    keys, values = (cache.flatten(0, 1)[None, :20].expand(-1, -1, 2, -1) for cache in caches)
    expected = reference.attention(query[None], keys, values, causal="bottom_right", scale=0.25)
    torch.testing.assert_close(out, expected[0])


@pytest.mark.parametrize(("module", "kernel"), [(decode, "_decode"), (extend, "_extend")])
def test_calls_over_caches_too(module: Any, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _little(monkeypatch, module, kernel, 16)
    for _ in range(2):
        _serve(getattr(module, kernel.removeprefix("_")))
    assert asked == [32, 16, 16]


def test_a_step_that_was_planned_keeps_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[int] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                stages.append(kwargs["STAGES"])
                if kwargs["STAGES"] > 1:
                    raise OutOfResources(2, 1, "shared memory")
                kernel[grid](*args, **kwargs)

            return launch

    kernel = decode._decode
    monkeypatch.setattr(decode, "_decode", Kernel())
    config = decode.Config(16, 32, 4, 3, 1, 1)
    lens, starts = torch.tensor([20], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    sizes = {"heads": (2, 1), "sequences": 1, "max_seqlen_q": 2, "max_seqlen_k": 20, "window": (-1, 0), "chunk": 0}
    for _ in range(2):
        plan = decode.items_for((16, 16), FLOAT, CPU, **sizes, config=config)  # type: ignore[arg-type]
        plan[0].share_out(lens, starts)
        _serve(decode.decode, plan=plan)
    assert stages == [3, 2, 1] * 2
    assert decode.Config(16, 32, 4, 3, 1, 1) in room.refused(DECODE, ("float32", 32, 16, 16, 16), None, CPU)


def test_latent_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    def launch(*args: Any) -> None:
        launched.append(args[-2].config.stages)
        if launched[-1] > 1:
            raise OutOfResources(253956, 232448, "shared memory")

    monkeypatch.setattr(latent, "_launch", launch)
    query, cache = torch.zeros(1, 2, 48), torch.zeros(1, 16, 48)
    one = torch.ones(1, dtype=torch.int32)
    given: dict[str, Any] = {
        "page_table": one[None] - 1, "seq_lens": one, "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
        "causal": True, "scale": 1.0, "out": torch.empty(1, 2, 32),
    }  # fmt: skip
    latent.attend(query, cache, **in_tables(**given, launch=latent.Launch(latent.Config(16, 32, 4, 3), 1)))
    assert launched == [3, 2, 1]
    monkeypatch.setattr(latent, "_launch", lambda *args: (_ for _ in ()).throw(OutOfResources(2, 1, "shared memory")))
    with pytest.raises(
        UnsupportedRequestError, match=r"triton\.latent at D=48, D_v=32 in float32 on cpu needs 2 bytes"
    ):
        latent.attend(query, cache, **in_tables(**given, launch=latent.Launch(latent.Config(16, 32, 4, 3), 1)))


# ------------------------------------------------------------------------------------------------ where nothing is left


def test_the_end_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which kernel, for what and where, what was needed and what there is, and what to do."""
    asked = _little(monkeypatch, forward, "_forward", 0)
    reason = (
        "kernel triton.forward at D=16, D_v=16 in float32 on cpu needs 245,760 bytes of shared memory, and a program "
        "may have 232,448 there"
    )
    for _ in range(2):
        with pytest.raises(UnsupportedRequestError) as caught:
            _attend()
        assert str(caught.value) == (
            f"triton: {reason}. Choose another backend: polyattn.explain lists those that can serve this call"
        )
        assert caught.value.rejected == {"triton": [reason]}
    assert asked == [64, 32, 16, 16, 16], "once each, and none again"


def test_what_the_assembler_refuses_is_such_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "ptxas error   : Entry function 'f' uses too much shared data (0x3c000 bytes, 0x38c00 max)"
    error = PTXASError(f"Internal Triton PTX codegen error\n`ptxas` stderr:\n{said}\n\nRepro command: ptxas -v a.ptx")
    _little(monkeypatch, forward, "_forward", 0, error)
    with pytest.raises(UnsupportedRequestError, match=r"on cpu does not compile there: ptxas error .* too much shared"):
        _attend()


def test_what_is_no_matter_of_size_is_not_tried_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    error = PTXASError("`ptxas` stderr:\nptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'\n")
    asked = _little(monkeypatch, forward, "_forward", 0, error)
    with pytest.raises(PTXASError, match="sm_121a"):
        _attend()
    assert asked == [64]


def test_two_threads_may_learn_the_same() -> None:
    config, key = forward.Config(64, 64, 4, 2, False), ("float32", 16, 16, 0, False)
    error = PTXASError("too much shared data")
    for _ in range(2):
        room.refuse(FORWARD, key, "two threads", CPU, config, error)
    assert room.refused(FORWARD, key, "two threads", CPU) == {
        config: (0, "does not compile there: PTXAS error: too much shared data")
    }


def test_a_configuration_that_was_given_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuner measures what it asks for, or learns that it does not fit."""
    asked = _little(monkeypatch, block_sparse, "_forward", 32)
    query, key, value = _made(1, 1, 64, 64)
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    lists = block_sparse.Lists(one, one.new_zeros(1, 1, 1, 1), None, 64, 64)
    tiles = block_sparse.Tiles(64, 64, 4, 1)
    with pytest.raises(UnsupportedRequestError, match=r"triton\.block_sparse at D=64, D_v=64 in float32"):
        block_sparse.forward(query, key, value, lists, scale=1.0, out=torch.empty_like(query), tiles=tiles)
    assert asked == [64]
    assert not room.refused(BLOCK_SPARSE, ("forward", "float32", 64, 64, 64), None, CPU)


def test_nothing_is_kept_of_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception would keep the tensors of its frames."""
    _little(monkeypatch, forward, "_forward", 32)
    _attend()
    assert [[type(why) for _, why in found.values()] for found in room._refused.values()] == [[str]]


# -------------------------------------------------------------------------------------------------------------- devices


def test_a_device_says_what_it_has(device: Callable[..., Any]) -> None:
    """And the table that offline tests compile by says the same."""
    from .launched_offline import SHARED_MEMORY

    device("cuda", what="the shared memory of a GPU")
    if torch.version.hip:
        target = "hip:" + torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
    else:
        target = "cuda:{}{}".format(*torch.cuda.get_device_capability(0))
    assert room.shared_memory(torch.device("cuda", 0)) == SHARED_MEMORY[target]


def test_the_interpreter_has_no_bound() -> None:
    assert room.shared_memory(CPU) is None
