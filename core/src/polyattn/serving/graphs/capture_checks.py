"""This module checks what a recorded step may do: torch's operators as they are called, with the line of code.

A device graph repeats kernels on fixed addresses with fixed host values. So between the plan of a step and the end of
its replay nothing may wait for the device, and nothing the graph reads may move. Capture itself reports part of this as
a crash, and part of it not at all: memory that moved is read where it was. `validate_static` reports all of it, on a
machine without any accelerator too.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...errors import GraphError, InvalidInputError

__all__ = ["READS", "WAITS", "Watch", "differences", "refusal", "storages", "validate_static"]

_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, __file__)

WAITS = frozenset(
    {
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"),
        # The shape of the result is a value on the device.
        *("nonzero", "nonzero_numpy", "masked_select", "bincount"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
    }
)
"""Operators that bring a value to the host, by their name in aten."""

READS = frozenset({"tolist", "cpu", "numpy", "__array__", "__format__", "__repr__"})
"""Methods of a tensor that read it on the host without an operator of their own, or with none on the CPU."""


@dataclasses.dataclass(frozen=True)
class _Used:
    """A tensor given to an operator: its memory, as a number of the run or an address, and how it lies there."""

    memory: Hashable
    layout: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Called:
    """An operator as it was called."""

    operator: str
    where: str
    arguments: tuple[Any, ...]


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the operators of one run.

    Attributes:
        calls: in order. broken: sentences about operators that wait, or that moved the memory of an argument.
    """

    def __init__(self, stage: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stage = stage
        self.calls: list[Called] = []
        self.broken: list[str] = []
        # Weak references keep the identity of a storage from being used again, not its memory.
        self._names: dict[int, tuple[StorageWeakRef, Hashable]] = {}
        self._made: list[tuple[StorageWeakRef, str]] = []
        self._reads = _Reads(self)

    def __enter__(self) -> Watch:  # noqa: PYI034 - Self is not in Python 3.10
        self._reads.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:  # noqa: PYI036 - as torch's
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._reads.__exit__(*exc)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":  # a range, which no graph records
            return func(*args, **kwargs)
        where, name = _caller(), func._schema.name.removeprefix("aten::")
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        constant = name == "lift_fresh"
        if constant:
            self._made_here(tensors[0], func, where)
            leaves.append(tensors[0].tolist() if not tensors[0].ndim else None)
        self.calls.append(Called(str(func), where, tuple(map(self._described, leaves))))
        if reason := _waits(name, func, args, kwargs):
            self.report(f"{func} at {where} {reason}")
        addresses = [(tensor, _address(tensor)) for tensor in tensors]
        out = func(*args, **kwargs)
        for tensor, address in addresses:
            if _address(tensor) != address and not constant:
                self.report(f"{func} at {where} gave an argument new memory: {_text(tensor)} had to grow")
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._made_here(tensor, func, where)
        return out

    def report(self, text: str) -> None:
        self.broken.append(f"{self.stage}: {text}")

    def outlived(self, returned: Any) -> Iterator[str]:
        """Sentences about memory that was allocated in the run and is still held, beside what the run returned."""
        kept = {storage._cdata for storage in storages(returned)}
        if any(self._lives(made, kept) for made in self._made):
            gc.collect()
        for made in self._made:
            if self._lives(made, kept):
                yield f"{self.stage}: {made[1]} and is still held when {self.stage} is over"

    @staticmethod
    def _lives(made: tuple[StorageWeakRef, str], kept: set[int]) -> bool:
        return not made[0].expired() and made[0].cdata not in kept  # type: ignore[no-untyped-call]

    def _made_here(self, tensor: Tensor, func: Any, where: str) -> None:
        for storage in storages(tensor):
            if storage._cdata not in self._names:
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._names[storage._cdata] = (reference, len(self._made))
                self._made.append((reference, f"{func} at {where} allocated {_text(tensor)}"))

    def _described(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf if isinstance(leaf, Hashable) else repr(leaf)
        layout = (leaf.dtype, tuple(leaf.shape), tuple(leaf.stride()), leaf.storage_offset())
        for storage in storages(leaf):
            known = self._names.get(storage._cdata)
            if known is None:
                known = (StorageWeakRef(storage), ("outside", storage._cdata, storage.data_ptr()))  # type: ignore[no-untyped-call]
                self._names[storage._cdata] = known
            return _Used(known[1], layout)
        return _Used(None, layout)


class _Reads(TorchFunctionMode):
    """Sees the methods that no operator tells of."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self._watch.report(f"Tensor.{name} at {_caller()} reads a tensor on the host")
        return func(*args, **(kwargs or {}))


def validate_static(
    prepare: Callable[[], Any], replay: Callable[[], Any], *, plans: Sequence[Callable[[], Any]]
) -> None:
    """Run steps and hold them to the contract of recorded ones.

    For each of `plans`: plan(), then prepare(), then replay(), the latter two watched. One unwatched step goes before,
    so that what is made on first use is there. The rules, for all that torch's dispatcher sees between a plan and the
    end of its replay:

    1. No wait. No operator brings a value to the host (`WAITS`, `repeat_interleave` without `output_size`, an index by
       a bool mask), no copy goes to the host, or from host memory that is not pinned, and no tensor is read there
       (`READS`). A list made into a tensor counts: on a device it is such a copy.
    2. No allocation that lasts. Memory that an operator allocates in `prepare` or `replay` is free again when that
       function returns, unless `replay` returned it. A temporary is no violation: in a recorded step it comes from the
       graph's own pool, at one address for all replays. What lasts would be memory that other code keeps and only this
       run filled. An argument that an operator resizes (`out=` of another shape) is a violation too.
    3. The same step each time. Compared with the first watched step, every later one calls the same operators, on the
       same storages where they are not the step's own, with the same shapes and the same host values. A buffer that a
       plan replaced, or a length that became an argument of a kernel, is seen here.

    What kernels do inside themselves (workspaces, synchronisation) is not seen: on a device, capture refuses that.

    Args:
        prepare, replay: as an engine calls them; replay may be the function that is recorded.
        plans: the host part of each step, at least two that differ, such as in lengths.

    Raises:
        GraphError: naming for each violation the rule's reason, the operator and the line that called it.
        InvalidInputError: fewer than two plans.
    """
    if len(plans) < 2:
        raise InvalidInputError(f"plans has {len(plans)}; two steps or more are needed, to see what differs")
    broken: list[str] = []
    recorded: list[Watch] = []
    with torch.no_grad():
        for number, plan in enumerate((plans[0], *plans)):
            plan()
            if number == 0:
                prepare()
                replay()
                continue
            run = [Watch("prepare"), Watch("replay")]
            for watch, function in zip(run, (prepare, replay), strict=True):
                with watch:
                    returned = function()
                broken += [*watch.broken, *watch.outlived(returned if function is replay else None)]
                del returned
            recorded = recorded or run
            for before, now in zip(recorded, run, strict=True):
                broken += differences(before, now)
    if broken:
        raise refusal("this step cannot be recorded", broken)


def refusal(what: str, broken: Sequence[str]) -> GraphError:
    """An error that lists what was found, each once."""
    found = list(dict.fromkeys(broken))
    return GraphError(
        f"{what}: {'; '.join(found)}. Choose another backend for the phase, as by decode_backend=, or repair the line; "
        f"a mode but DECODE may be left out of GraphRunner(modes=)",
        found,
    )


def differences(recorded: Watch, now: Watch) -> Iterator[str]:
    """A sentence about the first thing that a run did otherwise than the one recorded; the rest follows from it."""
    for before, after in zip(recorded.calls, now.calls, strict=False):
        if before.operator != after.operator:
            yield (
                f"{now.stage}: {after.operator} at {after.where} runs where {before.operator} at {before.where} was "
                f"recorded: host code took another way"
            )
            return
        if before.arguments == after.arguments:
            continue
        yield f"{now.stage}: {after.operator} at {after.where} {_changed(before.arguments, after.arguments)}"
        return
    if len(recorded.calls) != len(now.calls):
        yield f"{now.stage}: {len(now.calls)} operators ran where {len(recorded.calls)} were recorded"


def _changed(before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    for position, (old, new) in enumerate(zip(before, after, strict=False)):
        if old == new:
            continue
        if isinstance(old, _Used) and isinstance(new, _Used):
            if old.layout != new.layout:
                return f"has as argument {position} a tensor {_shown(new.layout)}; recorded was {_shown(old.layout)}"
            return (
                f"reads as argument {position} a tensor {_shown(new.layout)} in other memory than was recorded: it was "
                f"replaced, not written in place"
            )
        return f"has the host value {new!r} as argument {position}; recorded was {old!r}"
    return f"has {len(after)} arguments; recorded were {len(before)}"


def _shown(layout: tuple[Any, ...]) -> str:
    dtype, shape, strides, offset = layout
    return f"{shape} {dtype} strides {strides} offset {offset}"


def _text(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def storages(values: Any) -> list[torch.UntypedStorage]:
    """The storages of the tensors in a tree of values; wrappers and fake tensors have none."""
    found = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and torch._C._has_storage(leaf):
            found.append(leaf.untyped_storage())
    return found


def _address(tensor: Tensor) -> Hashable:
    return tuple(storage.data_ptr() for storage in storages(tensor))


def _waits(name: str, func: Any, args: Any, kwargs: Any) -> str:
    """Say why an operator waits for the device, "" = it does not."""
    if name in WAITS:
        return "brings a value to the host"
    if name == "repeat_interleave" and func._overloadname == "Tensor" and kwargs.get("output_size") is None:
        return "reads the length of its result on the host: give output_size"
    if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"):
        masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)]
        return "has a mask as an index, whose hits are counted on the host: use where" if masks else ""
    if name == "lift_fresh" and args[0].ndim:
        return "makes a tensor of a list: on a device a copy from host memory, which waits"
    if name in ("copy_", "_to_copy"):
        return _copy_waits(name, args, kwargs)
    return ""


def _copy_waits(name: str, args: Any, kwargs: Any) -> str:
    if name == "copy_":
        source, target = args[1].device, args[0].device
        waits_not = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        from_host = args[1]
    else:
        source, target = args[0].device, kwargs.get("device") or args[0].device
        waits_not, from_host = kwargs.get("non_blocking", False), args[0]
    if source.type == target.type:
        return ""
    if target.type == "cpu":
        return f"copies from {source} to the host"
    if source.type == "cpu" and from_host.ndim and not (waits_not and from_host.is_pinned()):
        return f"copies host memory to {target} and waits: use pinned memory and non_blocking=True"
    return ""


def _caller() -> str:
    """The innermost line that is neither torch's nor this file's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
