"""States that layers keep between calls, outside pages: one for each request (`RequestStates`) or run (`RunStates`).

Both are built from the layers' keeps and have one life cycle: allocate, reset, fork, commit, drop. A recurrent layer of
a served model keeps its state and the tail of its convolution by request; a method of a denoising model keeps what it
found by run, layer and branch. Pages of a cache are another matter: `polyattn.serving.KVPool`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..contract import Keep
from ..contract.scalars import whole
from ..errors import InvalidInputError, did_you_mean
from .validation import contents_readable

__all__ = ["TORCH_DTYPES", "Keeps", "RequestStates", "RunStates", "state_bytes"]

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
"""The words that a keep may name a dtype by, but for fp4_e2m1, of which two numbers share a byte."""

Keeps = Mapping[Hashable, Sequence[Keep]]
"""What each layer keeps, by its number."""

Values = Mapping[tuple[Hashable, str], Tensor]
"""A state for each (layer, name of a keep), without an axis for requests."""


def _torch_dtype(keep: Keep, dtype: torch.dtype) -> torch.dtype:
    if not keep.dtype:
        return dtype
    if keep.dtype not in TORCH_DTYPES:
        raise InvalidInputError(
            f"Keep {keep.name!r}: dtype={keep.dtype!r} of a state, which has no scales; allowed: "
            f"{', '.join(TORCH_DTYPES)}"
        )
    return TORCH_DTYPES[keep.dtype]


def state_bytes(keeps: Keeps, dtype: torch.dtype, drafts: int = 0) -> int:
    """Bytes of one request's states in all layers, with those of the `drafts` nodes of a step that is verified."""
    kept = [keep for own in keeps.values() for keep in own if keep.per == "request"]
    return (1 + drafts) * sum(math.prod(keep.shape) * _torch_dtype(keep, dtype).itemsize for keep in kept)


class _Known:
    """The keeps of one kind, looked up by layer and name."""

    def __init__(self, keeps: Keeps, per: str) -> None:
        self.by_layer: dict[Hashable, dict[str, Keep]] = {}
        for layer, own in keeps.items():
            some = [keep for keep in own if keep.per == per]
            names = [keep.name for keep in some]
            if twice := [name for name in names if names.count(name) > 1]:
                raise InvalidInputError(f"layer {layer!r} keeps {twice[0]!r} twice; name each keep of a layer once")
            if some:
                self.by_layer[layer] = dict(zip(names, some, strict=True))
        if not self.by_layer:
            raise InvalidInputError(
                f'no layer keeps anything by {per}: declare it, such as Keep("state", "{per}", (heads, head_dim, '
                f"v_head_dim))"
            )

    def of(self, layer: Hashable) -> dict[str, Keep]:
        """
        Raises:
            InvalidInputError: there is no such layer.
        """
        own = self.by_layer.get(layer) if isinstance(layer, Hashable) else None
        if own is None:
            raise InvalidInputError(f"layer {layer!r} keeps nothing here; those that do: {list(self.by_layer)}")
        return own

    def find(self, layer: Hashable, name: str) -> Keep:
        """
        Raises:
            InvalidInputError: there is no such layer, or it keeps nothing of that name.
        """
        own = self.of(layer)
        if name in own:
            return own[name]
        raise InvalidInputError(
            f"layer {layer!r} keeps no {name!r}.{did_you_mean(str(name), own)} It keeps: {', '.join(own)}"
        )

    def __iter__(self) -> Iterator[tuple[Hashable, Keep]]:
        return ((layer, keep) for layer, own in self.by_layer.items() for keep in own.values())


def _check_values(known: _Known, values: Values, dtype: torch.dtype, device: torch.device) -> None:
    for key, value in values.items():
        if not isinstance(key, tuple) or len(key) != 2:
            raise InvalidInputError(f"values has the key {key!r}; each is (layer, name of a keep)")
        keep = known.find(*key)
        wanted = _torch_dtype(keep, dtype)
        if (
            not isinstance(value, Tensor)
            or tuple(value.shape) != keep.shape
            or value.dtype != wanted
            or value.device != device
        ):
            shown = type(value).__name__
            if isinstance(value, Tensor):
                shown = f"{list(value.shape)} {value.dtype} on {value.device}"
            raise InvalidInputError(
                f"layer {key[0]!r}: {keep.name} is {shown}; {list(keep.shape)} {wanted} on {device} is needed, as its "
                f"keep says"
            )


class RequestStates:
    """The states that layers keep for each request, in slots: the slot of a request is its row of the request table.

    Changes of who has a slot are made on the host, like those of a `RequestTable`, which makes them by itself when it
    is given these states. What is in a slot is written by kernels, or by the holder of `tensor`. Nothing here waits for
    a device, and `commit` with tensors may be recorded into a device graph.

    Args:
        keeps: what each layer keeps; only what is per="request" counts.
        requests: slots. drafts: nodes of the steps that are verified, for which kernels leave a state each; 0 = none.
        dtype: of the model, that of keeps without one. device: of the tensors.

    Attributes:
        requests, drafts, device: as given. padding: the slot of padding rows, which no request has and nobody reads;
            it is the last one, so that -1 is a name of it.

    Raises:
        InvalidInputError: no layer keeps anything by request, a count is none, or a keep's dtype cannot be had.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        keeps: Keeps,
        requests: int,
        *,
        drafts: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        for what, count, least in (("requests", requests, 1), ("drafts", drafts, 0)):
            if not whole(count) or count < least:
                raise InvalidInputError(f"{what}={count!r}; a whole number of at least {least} is needed")
        self._known = _Known(keeps, "request")
        self.requests, self.drafts, self.padding, self._dtype = int(requests), int(drafts), int(requests), dtype
        # Keeps of one shape and dtype are one tensor over all layers: a life cycle's step is one launch for them.
        alike: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[Hashable, str]]] = {}
        for layer, keep in self._known:
            alike.setdefault((keep.shape, _torch_dtype(keep, dtype)), []).append((layer, keep.name))
        slots = self.requests + 1
        self._all: list[Tensor] = []
        self._drafted: list[Tensor] = []
        self._tensors: dict[tuple[Hashable, str], Tensor] = {}
        self._nodes: dict[tuple[Hashable, str], Tensor] = {}
        for (shape, kind), names in alike.items():
            self._all.append(torch.zeros(len(names), slots, *shape, dtype=kind, device=device))
            self._tensors.update(zip(names, self._all[-1], strict=True))
            if drafts:
                self._drafted.append(torch.zeros(len(names), slots, self.drafts, *shape, dtype=kind, device=device))
                self._nodes.update(zip(names, self._drafted[-1], strict=True))
        self.device = self._all[0].device  # "cuda" has become cuda:0
        self._live: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of all states, those of drafts and of padding included."""
        return sum(tensor.nbytes for tensor in (*self._all, *self._drafted))

    @property
    def live(self) -> list[int]:
        """The slots that requests have."""
        return sorted(self._live)

    def tensor(self, layer: Hashable, name: str) -> Tensor:
        """The states of a layer, [requests + 1, *shape], to be read and written at slots. It stays the same tensor.

        Raises:
            InvalidInputError: the layer keeps nothing of that name.
        """
        self._known.find(layer, name)
        return self._tensors[layer, name]

    def drafted(self, layer: Hashable, name: str) -> Tensor:
        """Return where a verifying step leaves the state after each of its nodes, [requests + 1, drafts, *shape].

        Raises:
            InvalidInputError: the layer keeps nothing of that name, or there are no drafts.
        """
        self._known.find(layer, name)
        if not self.drafts:
            raise InvalidInputError(
                f"layer {layer!r}: states of drafts are asked for, and these were built without: give the number of "
                f"nodes, drafts=..."
            )
        return self._nodes[layer, name]

    def allocate(self, slot: int, values: Values | None = None) -> None:
        """Give a slot to a request, with zeros in it, or `values` where there are some.

        Raises:
            InvalidInputError: the slot is in use or not there, or values that do not fit the keeps.
        """
        self._check_free(slot)
        self._fill([slot], values or {})
        self._live.add(slot)

    def reset(self, slots: Sequence[int], values: Values | None = None) -> None:
        """Set the states of requests to zero, or to `values` where there are some: (layer, name) -> [*shape].

        Raises:
            InvalidInputError: a slot that no request has, or values that do not fit the keeps.
        """
        self._check_live(slots)
        self._fill(slots, values or {})

    def fork(self, source: int, target: int) -> None:
        """Give slot `target` to a new request, with the states of `source`.

        Raises:
            InvalidInputError: no request has `source`, such as one that was dropped, or `target` is not free.
        """
        self._check_live([source])
        self._check_free(target)
        for states in self._all:
            _plain(states)[:, target].copy_(_plain(states)[:, source])
        self._live.add(target)

    def commit(self, slots: Sequence[int] | Tensor, nodes: Sequence[int] | Tensor) -> None:
        """Make the state after one node of a verified step the state of its request, in all layers at once.

        Args:
            slots, nodes: int64 [N], on the host or the device. A node counts from 0; -1 leaves the state as it is. Slot
                -1 is padding. Numbers on a device are not read by the host: those of a device tensor are limited to
                what there is.

        Raises:
            InvalidInputError: there are no drafts, a node that is none, a slot that no request has, or not as many of
                both.
        """
        if not self.drafts:
            raise InvalidInputError(
                "commit picks one of the states that a verified step left, and these were built without: give the "
                "number of nodes, drafts=..."
            )
        where, picked = (self._numbers(name, given) for name, given in (("slots", slots), ("nodes", nodes)))
        if where.shape != picked.shape:
            raise InvalidInputError(f"{where.numel()} slots for {picked.numel()} nodes; give one node for each slot")
        for (name, given), tensor in zip((("slots", slots), ("nodes", nodes)), (where, picked), strict=True):
            if not isinstance(given, Tensor) or contents_readable(given):
                numbers = tensor.tolist() if isinstance(given, Tensor) else list(given)
                if name == "slots":
                    self._check_live([slot for slot in numbers if slot not in (-1, self.padding)])
                elif wrong := [node for node in numbers if not -1 <= node < self.drafts]:
                    raise InvalidInputError(
                        f"nodes has {wrong[0]}; the step has {self.drafts}, so that 0 to {self.drafts - 1} are "
                        f"allowed, or -1 to leave a state as it is"
                    )
        where = where.where(where >= 0, self.padding).clamp(max=self.padding)
        node = picked.clamp(0, self.drafts - 1)
        for states, drafted in zip(self._all, self._drafted, strict=True):
            plain, left = _plain(states), _plain(drafted)
            old = plain.index_select(1, where)
            kept = (picked >= 0).view(1, -1, *[1] * (old.ndim - 2))
            plain.index_copy_(1, where, left[:, where, node].where(kept, old))

    def drop(self, slot: int) -> None:
        """Take a slot back. What is in it is forgotten: whoever is given the slot next begins with zeros.

        Raises:
            InvalidInputError: no request has it.
        """
        self._check_live([slot])
        self._live.discard(slot)

    def snapshot(self, slot: int) -> dict[tuple[Hashable, str], Tensor]:
        """A copy of a request's states, which `allocate` and `reset` take as `values`.

        Raises:
            InvalidInputError: no request has the slot.
        """
        self._check_live([slot])
        return {key: states[slot].clone() for key, states in self._tensors.items()}

    def _fill(self, slots: Sequence[int], values: Values) -> None:
        _check_values(self._known, values, self._dtype, self.device)
        if not len(slots):
            return
        index = self._numbers("slots", slots)
        for states in self._all:
            _plain(states).index_fill_(1, index, 0)
        for key, value in values.items():
            _plain(self._tensors[key]).index_copy_(0, index, _plain(value).expand(len(slots), *value.shape))

    def _numbers(self, name: str, given: Any) -> Tensor:
        if not isinstance(given, Tensor):
            if wrong := [number for number in given if not whole(number)]:
                raise InvalidInputError(
                    f"{name} has {wrong[0]!r}, a {type(wrong[0]).__name__}; whole numbers are needed"
                )
            made = torch.tensor(list(given), dtype=torch.int64, pin_memory=self.device.type == "cuda")
            return made.to(self.device, non_blocking=True)
        if given.dtype != torch.int64 or given.ndim != 1 or given.device != self.device:
            raise InvalidInputError(
                f"{name} is {list(given.shape)} {given.dtype} on {given.device}; int64 [N] on {self.device} is needed"
            )
        return given

    def _check_live(self, slots: Sequence[int]) -> None:
        if wrong := [slot for slot in slots if slot not in self._live]:
            raise InvalidInputError(
                f"slot {wrong[0]!r} is no request's: it was dropped, or never allocated. Slots in use: {self.live}"
            )

    def _check_free(self, slot: int) -> None:
        if not whole(slot) or not 0 <= slot < self.requests:
            raise InvalidInputError(
                f"slot {slot!r} of {self.requests}; 0 to {self.requests - 1} are rows of the request table"
            )
        if slot in self._live:
            raise InvalidInputError(f"slot {slot} is in use: drop it first, or take another")


def _plain(states: Tensor) -> Tensor:
    """The same memory in a dtype that every device indexes."""
    return states.view(torch.uint8) if states.dtype.itemsize == 1 else states


class RunStates:
    """The states that layers keep for one run, such as the denoising of a video: one for each layer and branch.

    A state is allocated when it is first asked for, with zeros in it. Branches are whatever is computed side by side
    and must not mix, such as the two of classifier-free guidance. When the run ends (`drop()`, or the end of `with`)
    all is gone, and a later use is refused.

    ```python
    with RunStates({0: [Keep("centroids", "run", (heads, 64, head_dim))]}) as run:
        centroids = run.tensor(0, "centroids", branch="cond")
    ```

    Args:
        keeps: what each layer keeps; only what is per="run" counts.
        dtype: of the model, that of keeps without one. device: of the tensors.

    Raises:
        InvalidInputError: no layer keeps anything by run, or a keep's dtype cannot be had.
    """

    def __init__(self, keeps: Keeps, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        self._known, self._dtype = _Known(keeps, "run"), dtype
        self._device = torch.empty(0, device=device).device  # "cuda" has become cuda:0
        for _, keep in self._known:
            _torch_dtype(keep, dtype)
        self._branches: dict[Hashable, dict[tuple[Hashable, str], Tensor]] = {}
        self._ended = False

    def __enter__(self) -> RunStates:  # noqa: PYI034 - Self is not in Python 3.10
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ended:
            self.drop()

    @property
    def branches(self) -> list[Hashable]:
        """Return the branches that have states, the oldest first."""
        return list(self._branches)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(tensor.nbytes for states in self._branches.values() for tensor in states.values())

    def tensor(self, layer: Hashable, name: str, branch: Hashable = "") -> Tensor:
        """The state of a layer in a branch, [*shape], to be read and written in place. It stays the same tensor until
        its branch or the run is dropped.

        Raises:
            InvalidInputError: the layer keeps nothing of that name, or the run has ended.
        """
        self._check_open()
        keep = self._known.find(layer, name)
        states = self._branches.setdefault(branch, {})
        if (found := states.get((layer, name))) is None:
            with torch.inference_mode(False):  # written in any mode from here on
                found = torch.zeros(keep.shape, dtype=_torch_dtype(keep, self._dtype), device=self._device)
            states[layer, name] = found
        return found

    def of(self, layer: Hashable, branch: Hashable = "") -> dict[str, Tensor]:
        """Return all states of a layer in a branch by name, as `tensor` has them: what one call of the layer is given.

        Raises:
            InvalidInputError: the layer keeps nothing by run, or the run has ended.
        """
        return {name: self.tensor(layer, name, branch) for name in self._known.of(layer)}

    def reset(self, branch: Hashable = "", values: Values | None = None) -> None:
        """Set the states of a branch to zero, or to `values` where there are some: (layer, name) -> [*shape].

        Raises:
            InvalidInputError: the run has ended, or values that do not fit the keeps.
        """
        self._check_open()
        _check_values(self._known, values or {}, self._dtype, self._device)
        for state in self._branches.setdefault(branch, {}).values():
            state.zero_()
        for (layer, name), value in (values or {}).items():
            self.tensor(layer, name, branch).copy_(value)

    def fork(self, source: Hashable, target: Hashable) -> None:
        """Begin branch `target` with copies of the states of `source`.

        Raises:
            InvalidInputError: the run has ended, `source` is no branch, or `target` is one.
        """
        states = self._states(source)
        if target in self._branches:
            raise InvalidInputError(f"branch {target!r} is there: drop it first, or take another name")
        self._branches[target] = {key: state.clone() for key, state in states.items()}

    def commit(self, branch: Hashable, chosen: Hashable) -> None:
        """Make the states of a fork those of `branch`, in place, and drop the fork: a step that was tried is kept. What
        the fork does not have becomes zero.

        Raises:
            InvalidInputError: the run has ended, or either is no branch.
        """
        states, taken = self._states(branch), self._states(chosen)
        if branch == chosen:
            return
        for key, state in states.items():
            state.copy_(taken[key]) if key in taken else state.zero_()
        states.update({key: state for key, state in taken.items() if key not in states})
        del self._branches[chosen]

    def drop(self, branch: Hashable | None = None) -> None:
        """Forget a branch; None: all of them, which ends the run.

        Raises:
            InvalidInputError: the run has ended, or there is no such branch.
        """
        if branch is not None:
            self._states(branch)
            del self._branches[branch]
            return
        self._check_open()
        self._branches.clear()
        self._ended = True

    def _states(self, branch: Hashable) -> dict[tuple[Hashable, str], Tensor]:
        self._check_open()
        if branch not in self._branches:
            self._no_branch(branch)
        return self._branches[branch]

    def _no_branch(self, branch: Hashable) -> NoReturn:
        near = did_you_mean(str(branch), map(str, self._branches))
        raise InvalidInputError(
            f"there is no branch {branch!r} in this run: it was dropped, or nothing was asked of it.{near} Known: "
            f"{self.branches}"
        )

    def _check_open(self) -> None:
        if self._ended:
            raise InvalidInputError("the run has ended and its states are gone: make new RunStates for the next run")
