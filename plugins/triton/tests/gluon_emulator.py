"""Runs Gluon kernels for Hopper on the CPU: every warp specialised partition is a thread, and memory is torch's.

Triton's interpreter does not know Gluon. This one executes the kernels' own Python source: `emulated(module.attend)`
has the functions of a kernel's modules with another `gl`, on tensors. It is strict where hardware is treacherous:

- what is copied by TMA is NaN until the barrier that tells of it is waited for, and then as late as can be;
- a product is computed when it is waited for: a buffer that was given back too early has become NaN by then;
- reading or writing outside of a tensor, waiting for what never comes, or one arrival too many is an error.

Layouts of registers have no meaning here, and swizzles are taken to match: boxes are of 8 rows or more, as their
pattern. Blocks in shared memory lie as the hardware's tiles do: 64 columns of all rows, then the next 64.
"""

from __future__ import annotations

import ctypes
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

PATIENCE = 60.0
"""Seconds that a partition waits for the others before it is a deadlock."""


class Value(torch.Tensor):
    """A number, or a block of them in registers. Integers divide as Triton's do: towards zero."""

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else super().to(dtype)

    def __floordiv__(self, other: Any) -> Any:
        return torch.div(self, other, rounding_mode="trunc")

    def __rfloordiv__(self, other: Any) -> Any:
        return torch.div(value(other), self, rounding_mode="trunc")

    def __mod__(self, other: Any) -> Any:
        return torch.fmod(self, other)

    def __bool__(self) -> bool:
        return bool(self.item())

    # Names are assigned, never what they stand for.
    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __isub__(self, other: Any) -> Any:
        return self - other

    def __imul__(self, other: Any) -> Any:
        return self * other


def value(x: Any) -> Any:
    if isinstance(x, bool | int | float):
        x = torch.tensor(x, dtype=torch.float32 if isinstance(x, float) else None)
    return x.as_subclass(Value) if isinstance(x, torch.Tensor) else x


class Pointer:
    """Addresses of elements of a tensor."""

    def __init__(self, tensor: torch.Tensor, at: Any = 0) -> None:
        self.tensor, self.at = tensor, value(at)
        size = tensor.untyped_storage().nbytes() // tensor.itemsize
        self.memory = tensor.as_strided((size,), (1,), 0)
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.at + offset)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.tensor, self.at[key])

    def places(self, mask: Any) -> torch.Tensor:
        """Where in memory; every place that is not masked is checked."""
        at = self.at.as_subclass(torch.Tensor).long() + self.tensor.storage_offset()
        wanted = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.as_subclass(torch.Tensor)
        at, wanted = torch.broadcast_tensors(at, wanted)
        outside = wanted & ((at < 0) | (at >= len(self.memory)))
        assert not bool(outside.any()), "a kernel addresses memory outside of a tensor"
        return torch.where(wanted, at, 0)


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all announced bytes are there."""

    def __init__(self, changed: threading.Condition) -> None:
        self.changed = changed
        self.arrivals = self.pending = self.bytes = self.phase = 0
        self.copies: list[Callable[[], None]] = []

    def start(self, count: int) -> None:
        self.arrivals = self.pending = count

    def arrive(self, count: int = 1, announced: int = 0) -> None:
        with self.changed:
            assert self.pending >= count, "more arrivals than a phase has"
            self.pending -= count
            self.bytes += announced
            self._settle()

    def copy(self, act: Callable[[], None], arrivals: int = 0, size: int = 0) -> None:
        """A copy that ends later than anything else, and is then so many arrivals, or so many bytes."""

        def end() -> None:
            act()
            self.pending, self.bytes = self.pending - arrivals, self.bytes - size
            assert self.pending >= 0, "more arrivals than a phase has"
            assert self.bytes >= 0, "more bytes came than were announced"
            self._settle()

        with self.changed:
            self.copies.append(end)
            self.changed.notify_all()

    def _settle(self) -> None:
        if not self.pending and not self.bytes:
            self.pending, self.phase = self.arrivals, self.phase ^ 1
            self.changed.notify_all()

    def wait(self, phase: int, stop: threading.Event) -> None:
        with self.changed:
            while self.phase == phase:
                if self.copies:
                    self.copies.pop(0)()
                elif stop.is_set() or not self.changed.wait(PATIENCE):
                    raise TimeoutError("a partition waits for a barrier that does not come")


class _Barriers:
    """Barriers in shared memory."""

    def __init__(self, barriers: list[Barrier]) -> None:
        self._barriers = barriers

    def index(self, i: Any) -> Barrier:
        return self._barriers[int(i)]


class Buffer:
    """Shared memory: numbers in the order in which they lie, and the shape they are seen in."""

    def __init__(self, memory: torch.Tensor, shape: Sequence[int], turned: bool = False) -> None:
        self.memory, self.shape, self.turned = memory, list(shape), turned
        self.dtype = memory.dtype

    def index(self, i: Any) -> Buffer:
        size = len(self.memory) // self.shape[0]
        i = int(i)
        assert 0 <= i < self.shape[0], "a stage that does not exist"
        return Buffer(self.memory[i * size : (i + 1) * size], self.shape[1:])

    def reshape(self, shape: Sequence[int]) -> Buffer:
        return Buffer(self.memory, shape)

    def permute(self, order: tuple[int, int]) -> Buffer:
        assert order == (1, 0)
        return Buffer(self.memory, self.shape[::-1], True)

    def slice(self, first: int, count: int, dim: int) -> Rows:
        assert dim == 0
        return Rows(self, first, count)

    def rows(self) -> torch.Tensor:
        """As rows of panels of columns that can be written to; leading axes are rows."""
        columns = self.shape[0 if self.turned else -1]
        panel = min(columns, 64)
        return self.memory.view(columns // panel, -1, panel).permute(1, 0, 2)

    def load(self, layout: Any = None) -> Any:
        return value(self.rows().reshape(self.shape).clone())

    def store(self, block: Any) -> None:
        assert block.dtype == self.dtype
        rows = self.rows()
        rows.copy_(block.as_subclass(torch.Tensor).reshape(rows.shape))

    def matrix(self) -> torch.Tensor:
        found = self.rows().flatten(1).clone()
        return found.T if self.turned else found


class Rows:
    """Some rows of a buffer."""

    def __init__(self, whole: Buffer, first: int, count: int) -> None:
        self.whole, self.first, self.count = whole, first, count

    def load(self, layout: Any = None) -> Any:
        assert len(self.whole.shape) == 1
        return value(self.whole.memory[self.first : self.first + self.count].clone())

    def store(self, block: Any) -> None:
        rows = self.whole.rows()[self.first : self.first + self.count]
        rows.copy_(block.as_subclass(torch.Tensor).reshape(rows.shape))


class Product:
    """`warpgroup_mma` that is in flight."""

    def __init__(self, a: Any, b: Buffer, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.found: Any = None
        self.type = types.SimpleNamespace(layout=None)

    def finish(self) -> None:
        left = self.a.matrix() if isinstance(self.a, Buffer) else self.a.as_subclass(torch.Tensor)
        assert left.dtype == self.b.dtype
        found = left.float() @ self.b.matrix().float()
        if self.use_acc:
            acc = self.acc.found if isinstance(self.acc, Product) else self.acc
            found = found + acc.as_subclass(torch.Tensor)
        self.found = value(found)


class _Descriptor:
    """A tensor descriptor over plain memory, filled up with zeros."""

    def __init__(self, made: Any) -> None:
        self.sizes, self.strides, self.block_shape = made.shape, made.strides, list(made.block_shape)
        self.dtype, self.layout = made.base.dtype, made.layout
        self.swizzled = made.layout.swizzle_byte_width > 0
        count = 1 + sum((n - 1) * step for n, step in zip(self.sizes, self.strides, strict=True))
        bytes_ = (ctypes.c_uint8 * (count * self.dtype.itemsize)).from_address(made.base.data_ptr())
        self.tensor = torch.frombuffer(bytes_, dtype=self.dtype).as_strided(self.sizes, self.strides)

    def box(self, coordinates: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Its part of the tensor, and of the box."""
        there, here = [], []
        for start, width, size in zip(map(int, coordinates), self.block_shape, self.sizes, strict=True):
            first, last = max(start, 0), max(min(start + width, size), max(start, 0))
            first = min(first, last)
            there.append(slice(min(first, size), min(last, size)))
            here.append(slice(first - start, first - start + there[-1].stop - there[-1].start))
        return tuple(there), tuple(here)


class Machine:
    """One kernel and what its source calls: `machine[grid](*args, **options)` as a JIT function."""

    def __init__(self, kernel: Any) -> None:
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._local = threading.local()
        self._named: dict[int, list[int]] = {}
        self._spaces: dict[str, dict[str, Any]] = {}
        self._language = self._gl()
        self._others = {
            "gl": self._language,
            "mbarrier": types.SimpleNamespace(
                MBarrierLayout=lambda: "barrier", init=Barrier.start, expect=self._expect,
                wait=lambda bar, phase: bar.wait(int(phase), self._stop),
                arrive=lambda bar, count=1: bar.arrive(count),
            ),
            "hopper": types.SimpleNamespace(
                warpgroup_mma=self._mma, warpgroup_mma_wait=self._mma_wait, warpgroup_mma_init=lambda acc: acc
            ),
            "async_copy": types.SimpleNamespace(mbarrier_arrive=self._copied),
            "tma": types.SimpleNamespace(store_wait=self._left),
            "fence_async_shared": lambda: None,
            "load": self._copy, "load_rows": self._copy_rows, "store": self._leave, "add_to": self._add_to,
            "barrier": lambda: None,
            "viewed": lambda buffer, dtype, shape, layout: Buffer(buffer.memory, shape),
        }  # fmt: skip
        self._kernel = self.function(kernel)
        self._names = kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int = 4, **options: Any) -> None:
            given = [self._argument(x) for x in args]
            for pid in range(grid[0]):
                self._program = (value(pid), value(grid[0]))
                self._kernel(*given, **options)

        return launch

    @staticmethod
    def _argument(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return Pointer(x)
        return _Descriptor(x) if hasattr(x, "block_shape") else value(x)

    def function(self, jitted: Any) -> Any:
        """The Python function behind a Gluon one, among its own module's names as they are here."""
        plain = jitted.fn
        name = plain.__module__
        if name not in self._spaces:
            space = self._spaces[name] = dict(self._others)
            for key, found in plain.__globals__.items():
                if key in self._others:
                    continue
                if hasattr(found, "fn") and hasattr(found, "arg_names"):
                    space[key] = self.function(found)
                else:
                    # Constants are constexpr.
                    space[key] = getattr(found, "value", found)
        return types.FunctionType(plain.__code__, self._spaces[name], plain.__name__, plain.__defaults__)

    # What kernels call -----------------------------------------------------------------------------------------------

    def _gl(self) -> Any:
        def pairwise(act: Callable[..., torch.Tensor]) -> Callable[..., Any]:
            return lambda a, b: value(act(*torch.broadcast_tensors(value(a), value(b))))

        def where(condition: Any, a: Any, b: Any) -> Any:
            return value(torch.where(value(condition), value(a), value(b)))

        def reduced(act: Callable[..., torch.Tensor]) -> Callable[..., Any]:
            return lambda x, axis: value(act(x, axis))

        return types.SimpleNamespace(
            constexpr=None, float32=torch.float32, int32=torch.int32, int64=torch.int64,
            uint8=torch.uint8, float8e4nv=torch.float8_e4m3fn, join=lambda a, b: torch.stack((a, b), -1),
            program_id=lambda axis: self._program[0], num_programs=lambda axis: self._program[1],
            minimum=pairwise(torch.minimum), maximum=pairwise(torch.maximum), where=where,
            exp2=lambda x: value(torch.exp2(x)), log2=lambda x: value(torch.log2(x)),
            sum=reduced(torch.sum), max=reduced(torch.amax), static_range=range, load=self._load, store=self._store,
            full=lambda shape, x, dtype, layout: value(torch.full(shape, x, dtype=dtype)),
            atomic_add=self._atomic_add,
            arange=lambda first, last, layout: value(torch.arange(first, last, dtype=torch.int32)),
            convert_layout=lambda x, layout, assert_trivial=False: x,
            allocate_shared_memory=self._allocate, inline_asm_elementwise=self._asm, warp_specialize=self._specialize,
            SliceLayout=lambda *a: None, NVMMADistributedLayout=lambda *a: None, BlockedLayout=lambda *a: None,
            NVMMASharedLayout=lambda *a, **k: None, DotOperandLayout=lambda *a: None,
            SwizzledSharedLayout=lambda *a: None,
        )  # fmt: skip

    def _allocate(self, dtype: Any, shape: Sequence[int], layout: Any) -> Any:
        if layout == "barrier":
            return _Barriers([Barrier(self._changed) for _ in range(shape[0])])
        size = 1
        for n in shape:
            size *= int(n)
        nothing = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
        return Buffer(torch.full((size,), nothing, dtype=dtype), [int(n) for n in shape])

    def _load(self, pointer: Pointer, mask: Any = None, other: Any = None) -> Any:
        found = pointer.memory[pointer.places(mask)].clone()
        if mask is not None and other is not None:
            found = torch.where(mask.as_subclass(torch.Tensor), found.to(torch.int8 if found.dtype == torch.bool else
                                found.dtype), other)  # fmt: skip
        return value(found)

    def _store(self, pointer: Pointer, block: Any, mask: Any = None) -> None:
        places = pointer.places(mask)
        block = value(block).as_subclass(torch.Tensor)
        assert block.dtype == pointer.memory.dtype
        wanted = torch.ones_like(places, dtype=torch.bool) if mask is None else mask.as_subclass(torch.Tensor)
        places, block, wanted = torch.broadcast_tensors(places, block, wanted)
        pointer.memory[places[wanted]] = block[wanted]

    def _atomic_add(self, pointer: Pointer, block: Any, mask: Any = None, sem: str | None = None) -> Any:
        places = pointer.places(mask)
        block = value(block).as_subclass(torch.Tensor).to(pointer.memory.dtype)
        assert mask is None
        with self._changed:
            before = pointer.memory[places].clone()
            pointer.memory.index_add_(0, places.flatten(), block.flatten())
        return value(before)

    def _expect(self, bar: Barrier, size: Any, pred: Any = True) -> None:
        if bool(pred):
            bar.arrive(1, int(size))

    def _copy(self, descriptor: _Descriptor, coordinates: Any, bar: Barrier, buffer: Buffer, pred: Any = True) -> None:
        if not bool(pred):
            return
        rows = len(buffer.memory) // buffer.shape[-1]
        assert rows % 8 == 0 or not descriptor.swizzled, "a box of fewer rows than the swizzle's pattern"
        assert buffer.shape == descriptor.block_shape
        there, here = descriptor.box(coordinates)
        buffer.memory.fill_(float("nan"))

        def act() -> None:
            block = torch.zeros(descriptor.block_shape, dtype=descriptor.dtype)
            block[here] = descriptor.tensor[there]
            buffer.store(value(block))

        bar.copy(act, size=len(buffer.memory) * descriptor.dtype.itemsize)

    def _copy_rows(self, buffer: Buffer, pointer: Pointer, mask: Any = None) -> None:
        """cp.async: of a mask, what is not loaded becomes zeros."""
        found = self._load(pointer, mask, None if mask is None else 0.0)
        buffer.store(value(torch.full_like(found, float("nan"))))
        self._local.copies = [*getattr(self._local, "copies", []), lambda: buffer.store(found)]

    def _copied(self, bar: Barrier, increment_count: bool) -> None:
        """All threads of a warpgroup arrive when what they copied so far is there."""
        assert not increment_count
        copies, self._local.copies = self._local.copies, []
        bar.copy(lambda: [copy() for copy in copies] and None, arrivals=128)

    def _leave(self, descriptor: _Descriptor, coordinates: Any, buffer: Buffer) -> None:
        there, here = descriptor.box(coordinates)
        descriptor.tensor[there] = buffer.load().as_subclass(torch.Tensor).reshape(descriptor.block_shape)[here]

    def _add_to(self, descriptor: _Descriptor, coordinates: Any, buffer: Buffer) -> None:
        """What is added up is read as late as can be: when somebody waits for it."""
        there, here = descriptor.box(coordinates)
        assert not descriptor.swizzled  # rows lie whole

        def act() -> None:
            block = buffer.memory.view(descriptor.block_shape)[here]
            with self._changed:
                descriptor.tensor[there] += block

        self._local.leaving = [*getattr(self._local, "leaving", []), act]

    def _left(self, count: int) -> None:
        """At most `count` boxes that were to be added up have not left shared memory."""
        leaving = getattr(self._local, "leaving", [])
        while len(leaving) > count:
            leaving.pop(0)()

    def _mma(self, a: Any, b: Buffer, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        self._local.flying = [*getattr(self._local, "flying", []), Product(a, b, acc, use_acc)]
        return self._local.flying[-1]

    def _mma_wait(self, count: int, deps: Sequence[Any]) -> Any:
        flying = getattr(self._local, "flying", [])
        while len(flying) > count:
            flying.pop(0).finish()
        # One that is still in flight is no number: nothing but another product or wait takes it.
        found = tuple(x.found if isinstance(x, Product) and x.found is not None else x for x in deps)
        return found[0] if len(found) == 1 else found

    def _asm(self, text: str, constraints: str, args: Sequence[Any], **options: Any) -> Any:
        if "bar.sync" in text or "bar.arrive" in text:
            with self._changed:
                # Of a named barrier: warpgroups that have come, and how often it was full.
                state = self._named.setdefault(int(args[0]), [0, 0])
                state[0] += 1
                assert state[0] <= 2, "three come to a barrier of two"
                full = state[1] + 1
                if state[0] == 2:
                    state[:] = [0, full]
                    self._changed.notify_all()
                while "bar.sync" in text and state[1] < full:
                    if self._stop.is_set() or not self._changed.wait(PATIENCE):
                        raise TimeoutError("a warpgroup waits for a turn that does not come")
        return value(0) if "mov.b32 $0, 0;" in text else args[0]

    def _specialize(self, partitions: Sequence[tuple[Any, Sequence[Any]]], *_: Any) -> None:
        raised: list[BaseException] = []
        self._named.clear()
        self._stop.clear()

        def run(act: Any, args: Sequence[Any]) -> None:
            try:
                act(*args)
            except BaseException as exc:  # noqa: BLE001  raised again below
                raised.append(exc)
                self._stop.set()
                with self._changed:
                    self._changed.notify_all()

        threads = [threading.Thread(target=run, args=part) for part in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if raised:
            raise raised[0]
