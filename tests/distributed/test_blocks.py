"""What orders the copies of a ring's blocks with kernels and with other ranks, and torch's calls that are made."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._symmetric_memory import empty, rendezvous
from torch.utils._python_dispatch import TorchDispatchMode

from polyattn.distributed import blocks as blocks_module
from polyattn.distributed import ring as ring_module
from polyattn.distributed.blocks import OTHERS, Memory, blocks
from polyattn.distributed.plan import Plan
from polyattn.distributed.ranks import Ranks
from polyattn.distributed.ring import Ring, _Sum
from polyattn.semantics.merge_lse import merge

Clock = dict[str, int]


class Stream:
    """Work in order. clock: of each stream, how much of its work comes before what is launched here next."""

    def __init__(self, name: str) -> None:
        self.name, self.clock = name, {name: 0}

    def launched(self) -> Clock:
        self.clock[self.name] += 1
        return dict(self.clock)

    def record_event(self) -> Clock:
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        self.clock = {name: max(self.clock.get(name, 0), event.get(name, 0)) for name in {**self.clock, **event}}

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.clock)


class Device:
    """A device module whose streams do nothing by themselves, and a log of who reads and writes what memory when."""

    def __init__(self) -> None:
        self.main = self.current = Stream("kernels")
        self.log: list[tuple[str, str, Clock, tuple[int, int]]] = []

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802 - torch's name
        return Stream("copies")

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def did(self, what: str, *tensors: Tensor) -> None:
        """An access to each tensor, or something without one."""
        clock = self.current.launched()
        for one in tensors:
            start = one.data_ptr()
            self.log.append((what, self.current.name, clock, (start, start + one.numel() * one.element_size())))
        if not tensors:
            self.log.append((what, self.current.name, clock, (0, 0)))

    def unordered(self) -> list[tuple[str, str]]:
        """Accesses to the same memory, one of them a write, of which neither comes before the other."""
        found = []
        for i, (what, stream, clock, (start, stop)) in enumerate(self.log):
            for other, its, later, (low, high) in self.log[i + 1 :]:
                same = max(start, low) < min(stop, high)
                if same and "write" in (what, other) and stream != its and later.get(stream, 0) < clock[stream]:
                    found.append((what, other))
        return found


class Copies(TorchDispatchMode):
    """Every copy is logged."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            assert args[0].is_contiguous(), "a copy engine moves one piece"
            assert args[1].is_contiguous(), "a copy engine moves one piece"
            self.device.did("write", args[0])
            self.device.did("read", args[1])
        return func(*args, **(kwargs or {}))


class Peers:
    """A handle of symmetric memory, alone: the memory of the others is there already."""

    def __init__(self, device: Device, ranks: int, size: int) -> None:
        self.device, self.buffers = device, [torch.zeros(size, dtype=torch.uint8) for _ in range(ranks)]

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        assert timeout_ms == 5000
        self.device.did("barrier")

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        numbers = torch.Size(sizes).numel()
        return self.buffers[rank].view(dtype)[storage_offset : storage_offset + numbers].view(*sizes)


LENGTHS = ((6, 3, 5, 4), (6, 0, 5, 4), (0, 3, 5, 4), (7, 2), (1, 2, 3, 4, 5, 6))


class Call:
    """Blocks of a rank, some of them computed by "kernels" that are only logged."""

    def __init__(self, lengths: tuple[int, ...], *, causal: bool, gathered: bool, rank: int = 0) -> None:
        self.device = Device()
        self.plan = Plan.of(lengths, len(lengths), (4, 2), 2, 0, "consecutive", balance=causal)
        self.key, self.value = torch.randn(2, sum(lengths), 2, 16), torch.randn(2, sum(lengths), 2, 8)
        start = sum(blocks_module._bytes(self.plan, self.key, self.value))
        self.peers = Peers(self.device, len(lengths), start)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "get_device_module", lambda device: self.device)
            memory = Memory(self.peers.buffers[rank], self.peers, rank, 5.0)
        ranks, part = Ranks(None, len(lengths), rank), None
        self.ring = Ring(self.plan, ranks, part, part, causal, False, gathered, memory)  # type: ignore[arg-type]
        for other in range(len(lengths)):
            if other != rank:
                for mine, one in zip(
                    memory._block(self.plan, other, (self.key, self.value)), self.of(other), strict=True
                ):
                    mine.copy_(one)

    def of(self, rank: int) -> tuple[Tensor, Tensor]:
        """The block of a rank."""
        rows = [torch.arange(*span) for span in self.plan.computed[rank]]
        if rank == OTHERS:
            rows = [torch.arange(*span) for span, _, _ in self.ring.others]
        at = torch.cat(rows) if rows else torch.arange(0)
        return self.key[:, at], self.value[:, at]

    def run(self) -> list[int]:
        """The blocks in their order; each is what it should be when it is there."""
        me, seen = self.ring.ranks.index, []
        with Copies(self.device):
            for block, k, v in blocks(self.ring, *self.of(me)):
                seen.append(block)
                rows = k.shape[1] if block == me else self.ring.reach(me, block)
                for got, right in zip((k, v), self.of(block), strict=True):
                    torch.testing.assert_close(got[:, :rows], right[:, :rows])
                self.device.did("read", *(one for one in (k, v) if one.numel()))
        return seen


@pytest.mark.slow(keep=18)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_copies_and_kernels_wait_for_each_other_where_they_share_memory(
    lengths: tuple[int, ...], gathered: bool, causal: bool
) -> None:
    for rank in range(len(lengths)):
        call = Call(lengths, causal=causal, gathered=gathered, rank=rank)
        order = [rank, OTHERS] if gathered else [(rank - step) % len(lengths) for step in range(len(lengths))]
        for _ in range(2):  # memory that a call had is filled again by the next
            assert call.run() == order
        assert not call.device.unordered()


@pytest.mark.parametrize("gathered", [False, True])
def test_a_rank_writes_between_two_barriers_and_fetches_after_them(gathered: bool) -> None:
    call = Call((6, 3, 5, 4), causal=False, gathered=gathered)
    call.run()
    own = call.peers.buffers[0]
    low, high = own.data_ptr(), own.data_ptr() + own.numel()
    words = []
    for what, stream, _, (start, _stop) in call.device.log:
        if what == "barrier":
            assert stream == "copies"
            words.append("barrier")
        elif what == "write" and low <= start < high:
            words.append("own")
        elif what == "write":
            words.append("fetched")
    assert words[:4] == ["barrier", "own", "own", "barrier"]
    assert set(words[4:]) == {"fetched"}
    barrier = [clock for what, _, clock, _ in call.device.log if what == "barrier"][-1]
    first = next(clock for _, stream, clock, _ in call.device.log if stream == "kernels")
    assert first.get("copies", 0) >= barrier["copies"], "a kernel may keep the barrier from the device"


def test_a_step_does_not_wait_for_what_is_fetched_meanwhile() -> None:
    """The copies of step 3 wait for the kernel of step 1; the kernel of step 2 must not wait for them."""
    call = Call((6, 3, 5, 4), causal=False, gathered=False)
    call.run()
    kernels = [clock for what, stream, clock, _ in call.device.log if (what, stream) == ("read", "kernels")]
    copies = [clock for what, stream, clock, _ in call.device.log if (what, stream) == ("write", "copies")]
    last = copies[-1]["copies"]
    waited = sorted({clock.get("copies", 0) for clock in kernels})
    assert waited[-1] >= last  # the last kernel waits for the last copy
    assert waited[-2] < copies[-2]["copies"] - 2  # and the one before it for none of that step


@pytest.mark.parametrize("missing", ["after_kernels", "put", "arrived"])
def test_what_is_left_out_is_seen(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call((6, 3, 5, 4), causal=False, gathered=False)
    if missing == "after_kernels":
        monkeypatch.setattr(Memory, "after_kernels", lambda self: None)
    elif missing == "put":
        monkeypatch.setattr(Stream, "wait_stream", lambda self, other: None)
    else:
        monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    call.run()
    assert call.device.unordered()


def parameters(function: Any) -> list[str]:
    """The names of a C++ function's parameters, as pybind11 writes them."""
    return re.findall(r"(\w+): ", re.sub(r"\[[^][]*\]", "", function.__doc__.split("\n")[0]))


def test_torch_has_the_functions_that_are_called() -> None:
    inspect.signature(empty).bind(5, dtype=torch.uint8, device=torch.device("cpu"))
    inspect.signature(rendezvous).bind(torch.empty(0), "name")
    handle = torch._C._distributed_c10d._SymmetricMemory
    spec = importlib.util.spec_from_file_location("shared_memory", Path(__file__).with_name("shared.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for stand_in in (Peers, module.Handle):
        for name in ("barrier", "get_buffer"):
            ours = list(inspect.signature(getattr(stand_in, name)).parameters)
            assert parameters(getattr(handle, name)) == ours
    for real, ours in ((empty, module.Shared.empty), (rendezvous, module.Shared.rendezvous)):
        assert list(inspect.signature(ours).parameters)[1:] == list(inspect.signature(real).parameters)


class Kernels:
    """Of a device: what is merged at once."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def merge_parts(self, outs: list[Tensor], lses: list[Tensor], *, out: Tensor, lse: Tensor) -> None:
        self.calls.append(len(outs))
        assert len(outs) <= 4
        found = merge(outs, lses, layout="THD")
        out.copy_(merge([one.float() for one in outs], lses, layout="THD")[0])
        lse.copy_(found[1])


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("parts", range(9))
@pytest.mark.parametrize("cut", [(), (1,), (0, 3, 4), (2, 5)])
def test_parts_of_all_rows_and_of_some_are_summed(
    parts: int, cut: tuple[int, ...], kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one merge in float64 has it, in bfloat16 rounded once."""
    torch.manual_seed(parts)
    ops = Kernels() if kernels else None
    monkeypatch.setattr(ring_module, "device_ops", lambda kind: ops)
    query, value = torch.empty(2, 6, 3, 16, dtype=torch.bfloat16), torch.empty(2, 6, 3, 8, dtype=torch.bfloat16)
    total = _Sum(query, value)
    outs, lses = [torch.zeros(2, 6, 3, 8).double()], [torch.full((2, 6, 3), -torch.inf).double()]
    for part in range(parts):
        rows = (2, 5) if part in cut else (0, 6)
        out, lse = torch.randn(2, rows[1] - rows[0], 3, 8).bfloat16(), 3 * torch.randn(2, 3, rows[1] - rows[0])
        total.add(rows, out, lse.transpose(1, 2))
        outs.append(outs[0].clone())
        lses.append(lses[0].clone())
        outs[-1][:, rows[0] : rows[1]], lses[-1][:, rows[0] : rows[1]] = out.double(), lse.transpose(1, 2).double()
    right, right_lse = merge(outs, lses)
    for dtype, bound in ((torch.bfloat16, 4e-3), (torch.float32, 1e-5)):
        out, lse = total.result(dtype)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), right, atol=bound, rtol=bound)
        torch.testing.assert_close(lse.double(), right_lse, atol=1e-5, rtol=1e-5)
    if ops and not cut:
        each = {0: [], 1: [], 2: [2], 3: [3], 4: [4], 5: [4, 2], 6: [4, 3], 7: [4, 4], 8: [4, 4, 2]}[parts]
        last = each[-1:] * 4  # two results of two rows of a batch
        assert ops.calls == [count for count in each[:-1] for _ in range(2)] + last
