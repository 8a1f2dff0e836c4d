"""`Run`: one denoising run, which tells calls their place, keeps what methods know, and says who served what.

A host says where the run is (`run.at`), and each layer says which it is (`place`). No torch.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Hashable, Mapping
from typing import Any

from ..contract import Place
from ..errors import InvalidInputError
from ..methods.points import Ahead, At, here
from ..selection import overrides

__all__ = ["LayerRow", "Run", "RunReport", "place"]

_GATE = "gate_compress"


@dataclasses.dataclass(frozen=True)
class LayerRow:
    """What one layer was served by, in the steps and branches that are alike.

    Attributes:
        layer: its number, None = not said. method: the one that was asked for.
        why: the rule by which calls were left dense; "" = the method served them. calls: how many.
        density: mean share of the pairs of tiles or tokens that were computed; 1 where calls were left dense, None =
            not said.
        kernels: who served the calls that the method made, in order, such as "block_sparse: triton@cuda".
        role: "self" or "cross", whose keys they are.
    """

    layer: int | None
    method: str
    why: str
    calls: int
    density: float | None
    kernels: tuple[str, ...]
    role: str = "self"


@dataclasses.dataclass(frozen=True)
class RunReport:
    """What a run has done until now. Its text is a line for each group of layers that are alike.

    Attributes:
        rows: by layer, in the order in which they were served first.
    """

    rows: tuple[LayerRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"rows": [dataclasses.asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        if not self.rows:
            return (
                "no call of this run asked for a method: name one (backend=, use_backend or configuration), and give "
                "calls a place"
            )
        groups: dict[tuple[Any, ...], list[LayerRow]] = {}
        for row in self.rows:
            density = None if row.density is None else round(row.density, 3)
            groups.setdefault((row.method, row.why, density, row.kernels), []).append(row)
        lines = []
        for (method, why, density, kernels), rows in groups.items():
            share = "density not said" if density is None else f"density {density:g}"
            what = f"left dense by a rule of {method}: {why}" if why else f"{method}, {share}"
            calls = sum(row.calls for row in rows)
            lines.append(f"{_layers(rows)}: {calls} call{'s' * (calls != 1)}, {what}; {', '.join(kernels)}")
        return "\n".join(lines)


def _layers(rows: list[LayerRow]) -> str:
    numbers = sorted({row.layer for row in rows if row.layer is not None})
    if not numbers:
        return "layers without a number"
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"layer{'s' * (len(numbers) > 1)} {words}"


class Run:
    """One run of denoising, from its first step to its last.

    ```python
    with Run(steps=50, layers=60) as run:
        for i, t in enumerate(timesteps):
            for branch in ("cond", "uncond"):
                with run.at(grid=(21, 45, 80), text=(0, 256), step=i, timestep=t, branch=branch):
                    noise = dit(x, t)  # each layer: attention(q, k, v, place=place(layer=number))
    print(run.explain())
    ```

    What methods keep for a layer and branch belongs to the run and ends with it. Of who served what it keeps numbers
    only, which `explain` reads also after the end.

    Args:
        steps: how many steps it has. layers: how many layers of attention the model has. None = not said.

    Raises:
        InvalidInputError: a number of them that is none.
    """

    def __init__(self, *, steps: int | None = None, layers: int | None = None) -> None:
        Place(steps=steps, layers=layers)
        self.steps, self.layers = steps, layers
        self._kept: dict[tuple[Hashable, str], dict[str, Any]] = {}
        self._numbers: dict[int, tuple[Any, Any, int]] = {}
        self._served: dict[tuple[Any, ...], list[Any]] = {}
        self._lock = threading.Lock()
        self._ended = False

    def __enter__(self) -> Run:  # noqa: PYI034 - Self is not in Python 3.10
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Forget all that methods kept. The run cannot be used any more; a second end does nothing."""
        self._ended = True
        for kept in self._kept.values():
            kept.clear()  # places that are still about hold them too
        self._kept.clear()
        self._numbers.clear()

    def at(
        self,
        *,
        grid: tuple[int, int, int] | None = None,
        text: tuple[int, int] = (0, 0),
        valid_text: tuple[int, int] | None = None,
        step: int | None = None,
        timestep: Any = None,
        branch: str = "",
    ) -> _Point:
        """Say where the run is: `with run.at(...):` around one pass of the model. Of two that are nested the inner one
        holds.

        Args:
            grid, text, valid_text, step, timestep, branch: see `polyattn.video.Place`.

        Raises:
            InvalidInputError: a value that no call can have, or the run has ended.
        """
        self._check_open()
        point = Place(
            grid=grid,
            text=text,
            valid_text=valid_text,
            step=step,
            steps=self.steps,
            timestep=timestep,
            branch=branch,
            layers=self.layers,
            run=self,
        )
        return _Point(self, point)

    def kept(self, layer: Hashable, branch: str = "") -> dict[str, Any]:
        """What methods keep of a layer and branch: the dict that calls there are given.

        Raises:
            InvalidInputError: the run has ended.
        """
        self._check_open()
        return self._kept.setdefault((layer, branch), {})

    def number(self, layer: Any) -> int | None:
        """The number of a layer, not checked. That of a tensor is read once, which waits for its device."""
        if layer is None or getattr(layer, "ndim", -1) != 0:
            return layer  # type: ignore[no-any-return]  # an int, or wrong: `Place` says so
        try:
            version = layer._version
        except (AttributeError, RuntimeError):  # a tensor of inference mode counts no changes
            return layer.item()  # type: ignore[no-any-return]
        found = self._numbers.get(id(layer))
        if found is None or found[1] != version:
            # The tensor is held, so that no other one gets its id.
            found = self._numbers[id(layer)] = (layer, version, layer.item())
        return found[2]

    def told(self, place: Place, method: str, kernels: tuple[str, ...], *, why: str = "", density: Any = None) -> None:
        """Note who served a call of this run. The calls themselves do it.

        Args:
            method, kernels, why, density: see `LayerRow`. A density may be a tensor without axes: it is read when
                somebody asks, and no call waits for its device.
        """
        role = place.role or "self"
        key = (self.number(place.layer), method, why, kernels, role, density is None and not why)
        with self._lock:
            noted = self._served.setdefault(key, [0, 0.0])
            noted[0] += 1
            noted[1] = noted[1] + (1.0 if why else 0.0 if density is None else density)

    def left(self, place: Place, selection: Any) -> None:
        """Note who served a call that its method left to others; one that nobody left is none.

        Args:
            selection: of the call, a `polyattn.Selection`.
        """
        if selection.rule:
            self.told(place, selection.rule, (f"{selection.request.family}: {selection.id}",), why=selection.why)

    def explain(self) -> RunReport:
        """Say who served what until now: for each layer the method, the density of its map, its kernels, and what went
        dense by which rule. Calls that asked for no method are not in it."""
        with self._lock:
            held = [(key, tuple(noted)) for key, noted in self._served.items()]
        rows = [
            LayerRow(layer, method, why, int(calls), None if unsaid else float(total) / calls, kernels, role)
            for (layer, method, why, kernels, role, unsaid), (calls, total) in held
        ]
        return RunReport(tuple(sorted(rows, key=lambda row: -1 if row.layer is None else row.layer)))

    def _check_open(self) -> None:
        if self._ended:
            raise InvalidInputError(
                "the run has ended, and what its methods kept is gone: make a polyattn.video.Run for the next run"
            )


class _Point(At):
    """A point of a run that has not ended."""

    def __init__(self, run: Run, place: Place) -> None:
        super().__init__(place)
        self.run = run

    def __enter__(self) -> None:
        self.run._check_open()
        super().__enter__()


def place(*, layer: Any = None, gate: Any = None, tensors: Mapping[str, Any] | None = None, **given: Any) -> Place:
    """The place of a layer where the run of this task is: what a layer gives with its call.

    Outside of every `run.at` it is what is given alone: exact attention takes it, and methods say what they miss.

    Args:
        layer: number of the layer, from 0: an int, or an integer tensor without axes, where layers are compiled once
            for all. gate: of the coarse branch of `video_sparse_attn`, [B, S, H, D].
        tensors: what the model learned for a method, by name.
        given: other fields of `polyattn.video.Place`; they win over those of the run.

    Raises:
        InvalidInputError: a value that no call can have, an unknown field, or the run has ended.
    """
    if unknown := given.keys() - _FIELDS:
        raise InvalidInputError(f"place() has no field {min(unknown)!r}; there are {', '.join(sorted(_FIELDS))}")
    named = {} if tensors is None else dict(tensors)
    if gate is not None:
        if _GATE in named:
            raise InvalidInputError(f"place() is given gate and tensors[{_GATE!r}], which are the same; leave one out")
        named[_GATE] = gate
    if overrides.tracing():
        # Where the run is would be a constant of a graph: every step, branch and layer would be compiled again.
        return Place(layer=layer, tensors=named, run=Ahead(tuple(given)), **given)
    return here(layer, named, given)


_FIELDS = {field.name for field in dataclasses.fields(Place)} - {"layer", "tensors", "run"}
