"""How blocks of keys and values get to the ranks of a ring: copied out of each other's memory, or sent.

Kernels that send take multiprocessors from the kernel of attention, so one of the two waits for the other. Where
devices of one host see each other's memory, copy engines serve instead: each rank puts its block into memory that the
others see (torch's symmetric memory; multicast is not used), and fetches theirs while kernels run. One stream of each
rank does all of that in order, with two barriers: nobody writes a block before all have fetched the last one, nobody
fetches one before all have written theirs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from .plan import Plan
from .ranks import MeshRanks, Ranks
from .rounds import tell

if TYPE_CHECKING:
    from .ring import Ring

__all__ = ["OTHERS", "TRANSFERS", "Link", "Memory", "blocks", "connect", "link_of", "offer", "room", "transfer"]

OTHERS = -1
"""In the place of a rank: all others, whose keys are gathered."""
TRANSFERS = ("auto", "copy", "send")
"""Of a ring's blocks: copied where the devices can and else sent, copied or else told, sent."""
_Pair = tuple[Tensor, Tensor]
_Piece = tuple[int, tuple[int, int], int]
"""A rank, rows [start, stop) of its block, and the row that the first of them gets."""
_ALIGNED = 256
_RECORDED: set[Any] = set()
"""Memory that a device graph knows: it is never given back."""


def blocks(ring: Ring, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The blocks of the other ranks as they come, each while another is computed; its own first, so that a rank has
    something to do meanwhile. Copied blocks have the rows that this rank's queries see."""
    steps = [(ring.ranks.index - step) % ring.ranks.size for step in range(1, ring.ranks.size)]
    if not steps:
        yield ring.ranks.index, key, value
    elif ring.memory is None:
        yield from (_all_sent if ring.gathered else _sent)(ring, key, value)
    elif ring.gathered:
        reach, pieces, row = ring.reach(ring.ranks.index, OTHERS), [], 0
        for _, rank, (start, stop) in ring.others:
            rows = min(stop - start, reach - row)
            if rows > 0:
                pieces.append((rank, (start, start + rows), row))
            row += stop - start
        yield from _copied(ring, ring.memory, key, value, [(OTHERS, pieces, reach)])
    else:
        reaches = [(rank, ring.reach(ring.ranks.index, rank)) for rank in steps]
        yield from _copied(
            ring, ring.memory, key, value, [(rank, [(rank, (0, rows), 0)], rows) for rank, rows in reaches]
        )


def _sent(ring: Ring, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each block goes on to the next rank, while it is computed here."""
    ranks, held = ring.ranks, (key, value)
    for step in range(1, ranks.size + 1):
        works, coming = [], held
        if step < ranks.size:
            coming = room(Plan.tokens(ring.plan.computed[(ranks.index - step) % ranks.size]), key, value)
            works = transfer(ranks, {1: held}, {-1: coming})
        yield (ranks.index - step + 1) % ranks.size, *held
        for work in works:
            work.wait()
        held = coming


def _all_sent(ring: Ring, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The own block, while all others come; then those as one."""
    ranks, computed = ring.ranks, ring.plan.computed
    steps = range(1, ranks.size)
    coming = {step: room(Plan.tokens(computed[(ranks.index + step) % ranks.size]), key, value) for step in steps}
    works = transfer(ranks, dict.fromkeys(steps, (key, value)), coming)
    yield ranks.index, key, value
    for work in works:
        work.wait()
    found = {(ranks.index + step) % ranks.size: pair for step, pair in coming.items()}
    k, v = (ring.sorted_others({rank: pair[i] for rank, pair in found.items()}) for i in range(2))
    yield OTHERS, k, v


def _copied(
    ring: Ring, memory: Memory, key: Tensor, value: Tensor, steps: Sequence[tuple[int, list[_Piece], int]]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The own block, then those of the steps (name, pieces, rows), fetched two steps ahead into two places in turn."""
    most = max(rows for _, _, rows in steps)
    # Made before the stream of the copies is joined: what had this memory before is done then.
    places = [room(most, key, value) for _ in steps[:2]]
    memory.put(ring.plan, key, value)

    def fetched(number: int) -> tuple[Callable[[], None], _Pair]:
        _, pieces, rows = steps[number]
        k, v = (
            one.view(-1)[: rows * one[:, :1].numel()].view(one.shape[0], rows, *one.shape[2:]) if most else one
            for one in places[number % 2]
        )
        return memory.fetch(ring.plan, pieces, (k, v)) if rows else lambda: None, (k, v)

    coming = [fetched(number) for number in range(len(places))]
    yield ring.ranks.index, key, value
    for number, (name, _, _) in enumerate(steps):
        arrived, pair = coming[number]
        arrived()
        yield name, *pair
        if number + 2 < len(steps):
            memory.after_kernels()  # which read the place that is filled again
            coming.append(fetched(number + 2))


def room(tokens: int, key: Tensor, value: Tensor) -> _Pair:
    """For keys and values that come."""
    k, v = (one.new_empty(one.shape[0], tokens, *one.shape[2:]) for one in (key, value))
    return k, v


def transfer(ranks: Ranks, sent: Mapping[int, Any], coming: Mapping[int, Any]) -> list[Any]:
    """Send tensors to the ranks that are so many steps further, and receive others. What is empty is not sent."""
    ops = [
        dist.P2POp(dist.isend, t, ranks.peer(to), ranks.group) for to, some in sent.items() for t in some if t.numel()
    ]
    ops += [
        dist.P2POp(dist.irecv, t, ranks.peer(at), ranks.group) for at, some in coming.items() for t in some if t.numel()
    ]
    works: list[Any] = dist.batch_isend_irecv(ops) if ops else []
    return works


class Memory:
    """Memory of this rank that the others of its ring see, and theirs.

    Args:
        own, handle: of torch's symmetric memory. index: of this rank. timeout: seconds that ranks wait for each other
            on the device.
    """

    def __init__(self, own: Tensor, handle: Any, index: int, timeout: float) -> None:
        self.size = own.numel()
        self._own, self._handle, self._index, self._milliseconds = own, handle, index, int(timeout * 1000)
        self._device = torch.get_device_module(own.device)
        self._stream = self._device.Stream(own.device)

    def put(self, plan: Plan, key: Tensor, value: Tensor) -> None:
        """Show the others the block of this rank, [B, S, h, D | D_v], and wait until all have."""
        self.after_kernels()
        if getattr(self._device, "is_current_stream_capturing", bool)():
            _RECORDED.add(self)
        with self._device.stream(self._stream):
            self._handle.barrier(timeout_ms=self._milliseconds)
            if key.shape[1]:
                for mine, one in zip(self._block(plan, self._index, (key, value)), (key, value), strict=True):
                    mine.copy_(one)
            self._handle.barrier(timeout_ms=self._milliseconds)
        # A kernel that takes all multiprocessors would keep the barrier out.
        self._device.current_stream(self._own.device).wait_stream(self._stream)

    def fetch(self, plan: Plan, pieces: Sequence[_Piece], into: _Pair) -> Callable[[], None]:
        """Copy rows of the others' blocks; what makes kernels wait until they are here. Rows of one sequence lie in one
        piece, which a copy engine moves."""
        with self._device.stream(self._stream):
            for rank, (start, stop), row in pieces:
                for theirs, mine in zip(self._block(plan, rank, into), into, strict=True):
                    for b in range(mine.shape[0]):
                        mine[b, row : row + stop - start].copy_(theirs[b, start:stop])
            done = self._stream.record_event()
        return lambda: self._device.current_stream(self._own.device).wait_event(done)

    def after_kernels(self) -> None:
        """What is fetched from now on waits for the kernels that were launched."""
        self._stream.wait_stream(self._device.current_stream(self._own.device))

    def _block(self, plan: Plan, rank: int, like: _Pair) -> Iterator[Tensor]:
        """The keys and values of a rank."""
        tokens = Plan.tokens(plan.computed[rank])
        for one, start in zip(like, (0, _bytes(plan, *like)[0]), strict=True):
            shape = (one.shape[0], tokens, *one.shape[2:])
            yield self._handle.get_buffer(rank, shape, one.dtype, start // one.element_size())


def _bytes(plan: Plan, key: Tensor, value: Tensor) -> tuple[int, int]:
    """Bytes of the keys and of the values of the largest block of any rank."""
    numbers = plan.batch * max(map(plan.tokens, plan.computed)) * max(len(one.keys) for one in plan.heads)
    k, v = (-(-numbers * one.shape[-1] * one.element_size() // _ALIGNED) * _ALIGNED for one in (key, value))
    return k, v


# Ranks agree on whether there is such memory: all of a ring copy, or all of them send.


@dataclasses.dataclass
class Link:
    """Between the ranks of a ring on a device. memory: None = they send, and `why` says why they do."""

    memory: Memory | None = None
    why: str = "there is nothing to copy"

    def serves(self, plan: Plan, key: Tensor, value: Tensor) -> Memory | None:
        """What copies the blocks of a plan."""
        fits = self.memory is not None and 0 < sum(_bytes(plan, key, value)) <= self.memory.size
        return self.memory if fits else None


_LINKS: weakref.WeakKeyDictionary[Any, dict[torch.device, Link]] = weakref.WeakKeyDictionary()


def link_of(ranks: Ranks, device: torch.device) -> Link:
    """Of the ranks of a ring; all layers share it."""
    return _LINKS.setdefault(ranks.group, {}).setdefault(device, Link())


def library(device: torch.device) -> tuple[Any, str]:
    """torch's symmetric memory, or why there is none for a device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None, f"torch's symmetric memory is used on CUDA devices only, and this is {device.type}"
    try:
        from torch.distributed import _symmetric_memory as found

        return (found.empty, found.rendezvous) and found, ""
    except (ImportError, AttributeError) as error:
        return None, f"torch {torch.__version__} has no symmetric memory ({error})"


def reach(device: torch.device) -> list[int]:
    """The devices of the host whose memory a device sees, itself first."""
    own = device.index
    others = (one for one in range(torch.cuda.device_count()) if one != own)
    return [own, *(one for one in others if torch.cuda.can_device_access_peer(own, one))]


def _host() -> str:
    """Equal for processes that can hand memory to each other: of one system, of one container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return "/".join([boot, *(os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "pid"))])
    except OSError:
        return socket.gethostname()


def offer(ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """What the other ranks need to know to decide, in JSON."""
    why = library(device)[1]
    if why or ranks.size == 1:
        return {"why": why}
    memory = link_of(ranks, device).memory
    size = 0 if memory is None else memory.size
    return {"why": "", "host": _host(), "devices": reach(device), "size": size}


def _refusal(offers: Mapping[int, Mapping[str, Any]]) -> str:
    """Why ranks of a ring send; "" = they can copy. offers: by rank."""
    for rank, one in offers.items():
        if one["why"]:
            return f"rank {rank}: {one['why']}"
    if len({one["host"] for one in offers.values()}) > 1:
        return f"ranks {list(offers)} are in several hosts or containers"
    devices = [one["devices"][0] for one in offers.values()]
    if len(set(devices)) < len(offers):
        return (
            f"ranks {list(offers)} have devices {devices} as they number them: let each process see all devices, and "
            "choose its own"
        )
    for rank, one in offers.items():
        hidden = [other for other, its in offers.items() if its["devices"][0] not in one["devices"]]
        if hidden:
            return f"the device of rank {rank} does not see the memory of rank {hidden[0]}'s"
    return ""


def connect(
    mesh: MeshRanks, plan: Plan, like: _Pair, device: torch.device, offers: Sequence[dict[str, Any]], timeout: float
) -> str:
    """Give each ring of a mesh memory for the blocks of a plan. All ranks come.

    Args:
        like: keys and values, of which the dtype and the last axis count. offers: of all ranks, as `offer`.

    Returns:
        Why a ring sends, "" where all copy; equal on all ranks.
    """
    ring, stride = mesh.ring, len(mesh.ranks) // mesh.ring.size
    if ring.size == 1:
        return ""
    need = sum(_bytes(plan, *like))
    rings = [range(first, len(mesh.ranks), stride) for first in range(stride)]
    refusals = [_refusal({mesh.ranks[i]: offers[i] for i in members}) for members in rings]
    grows = [
        not why and any(offers[i]["size"] < need for i in members) for members, why in zip(rings, refusals, strict=True)
    ]
    mine, link = mesh.index % stride, link_of(ring, device)
    if refusals[mine]:
        link.memory = None

    def all_did(what: Callable[[], Any]) -> Any:
        """Its result; a ring of which it went wrong on a rank has its reason then."""
        found, wrong = None, ""
        try:
            found = what() if grows[mine] and not refusals[mine] else None
        except Exception as error:  # noqa: BLE001 - of a driver: ranks send then, and say so
            wrong = f"{type(error).__name__}: {error}"
        said = tell(mesh, {"why": wrong}, timeout)
        for number, members in enumerate(rings):
            for i in members:
                if said[i]["why"] and not refusals[number]:
                    why = f"rank {mesh.ranks[i]}: {said[i]['why']}"
                    refusals[number] = f"memory of {need} bytes that the ranks share cannot be had: {why}"
        return found

    if any(grows):
        torchs = library(device)[0]
        own = all_did(lambda: torchs.empty(need, dtype=torch.uint8, device=device))
        with _without_multicast():
            handle = all_did(lambda: torchs.rendezvous(own, ring.group.group_name))
        if grows[mine] and not refusals[mine]:
            link.memory = Memory(own, handle, ring.index, timeout)
    link.why = refusals[mine] or Link.why
    return next(filter(None, refusals), "")


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """Multicast is not used here, takes memory, and on some hosts cannot be set up."""
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
