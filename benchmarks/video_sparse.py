"""What the sparse video methods cost on one GPU, beside dense attention, and whether they reach what is asked of them.

    python benchmarks/video_sparse.py --sta-strategy FILE [--json FILE] [--only WORDS] [--profile]
    python benchmarks/video_sparse.py --cpu-smoke           # tiny, on the CPU: does everything run? No figure counts
    python benchmarks/video_sparse.py --render FILE         # a result file as a table

Rows, bars and inputs are in sheets/video_sparse.yaml. A row is timed as a model calls it, `polyattn.attention` on
[B, S, H, D] at a place: permutes, maps, kernels and branches. It is not timed unless its result on a small grid is that
of its reference in float64. All rows of one grid, and the dense kernels, are timed by turns.

What `--profile` adds says which kernels the time goes to.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import report
import torch
import yaml
from torch import Tensor

import polyattn
from polyattn.errors import PolyattnError
from polyattn.methods import bound
from polyattn.methods.video import sla, sta, strategy, svg2, vmoba, vsa, window
from polyattn.testing.tolerances import RELATIVE_L2
from polyattn.video import Place

SHEET = Path(__file__).parent / "sheets" / "video_sparse.yaml"
GRADIENTS = 2e-2
"""Bound on the relative L2 error of gradients, which go through two roundings of bfloat16 and more."""
ROUNDS, SECONDS = 12, 0.03
NEAR = 1.15
"""Dense kernels so many times slower than the fastest are timed once."""
BELOW = 0.03
"""How far a map may be below the density that its bar is for."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A method on a grid: what `at` of a sheet's row says is `must` and `stretch` here.

    Attributes:
        inputs: {} = normal; else centres, strength, spread and region of planted clusters (`planted`).
        layers: whose calls are timed together. samples: places of a strategy file that are.
        density: what the bar is for; 0 = any. branch: a word in the names of a branch's kernels, which are no map.
    """

    name: str
    method: str
    grid: tuple[int, int, int]
    options: Mapping[str, Any]
    small: Mapping[str, Any]
    direction: str = "forward"
    text: tuple[int, int] = (0, 0)
    inputs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layers: tuple[int, ...] = (0,)
    samples: int = 0
    density: float = 0.0
    branch: str = ""
    must: float | None = None
    stretch: float | None = None
    rest: float | None = None

    @property
    def tokens(self) -> int:
        return math.prod(self.grid) + sum(self.text)

    def tiny(self) -> Row:
        """The row on the grid that is compared with the reference."""
        more = {name: {**getattr(self, name), **self.small.get(name, {})} for name in ("options", "inputs")}
        grid, text = tuple(self.small["grid"]), tuple(self.small.get("text", (0, 0)))
        return dataclasses.replace(self, grid=grid, text=text, samples=min(self.samples, 2), **more)


@dataclasses.dataclass(frozen=True)
class Shape:
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def rows_of(sheet: Mapping[str, Any]) -> list[Row]:
    """The rows of a sheet.

    Raises:
        TypeError: a key that no row has. KeyError: a grid that is not among the sheet's.
    """
    found = []
    for name, given in sheet["rows"].items():
        more = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if key != "at"}
        for where, bar in given["at"].items():
            there = sheet["grids"][where]
            must, stretch = bar or (None, None)
            limits = {"must": must, "stretch": stretch, "rest": there["rest"]}
            found.append(Row(f"{name}/{where}", grid=tuple(there["grid"]), **more, **limits))
    return found


# ------------------------------------------------------------------------------------------------------------- inputs


def planted(
    row: Row, shape: Shape, centres: int, strength: float, spread: float, region: Sequence[int], steps: int = 1
) -> list[tuple[Tensor, ...]]:
    """Tokens near centres: strength * centre + spread * noise, for queries and keys apart; values are normal.

    Args:
        centres: how many each head has, of queries and of keys. region: tokens along time, height and width that share
            a centre. steps: sets of inputs, of which each is the first with other noise of a tenth of `spread`.
    """
    draw = torch.Generator(shape.device).manual_seed(0)
    where = {"device": shape.device, "generator": draw}
    T, H, W = (-(-size // step) for size, step in zip(row.grid, region, strict=True))
    front, back = row.text
    sides = []
    for _ in range(2):
        labels = torch.randint(centres, (T, H, W), **where)
        for axis, (size, step) in enumerate(zip(row.grid, region, strict=True)):
            labels = labels.repeat_interleave(step, axis).narrow(axis, 0, size)
        labels = torch.nn.functional.pad(labels.flatten(), (front, back))
        means = strength * torch.randn(centres, shape.heads, shape.head_dim, **where)
        sides.append(means[labels] + spread * torch.randn(row.tokens, shape.heads, shape.head_dim, **where))
    value = torch.randn(row.tokens, shape.heads, shape.head_dim, **where)
    made = []
    for number in range(steps):
        moved = [one + 0.1 * spread * number * torch.randn(one.shape, **where) for one in sides]
        made.append(tuple(one.to(shape.dtype)[None].contiguous() for one in (*moved, value)))
    return made


def normal(row: Row, shape: Shape) -> list[tuple[Tensor, ...]]:
    draw = torch.Generator(shape.device).manual_seed(0)
    size = (1, row.tokens, shape.heads, shape.head_dim)
    return [tuple(torch.randn(size, generator=draw, device=shape.device).to(shape.dtype) for _ in range(3))]


def sets_of(row: Row, shape: Shape) -> list[tuple[Tensor, ...]]:
    """Sets of query, key and value [1, S, H, D]. k-means goes on from step to step: it is given two, by turns."""
    if row.inputs:
        return planted(row, shape, **row.inputs, steps=2 if row.method == svg2.NAME else 1)
    return normal(row, shape)


def learned(row: Row, shape: Shape) -> dict[str, Tensor]:
    """What a model learned for the method."""
    draw = torch.Generator(shape.device).manual_seed(1)
    more = {"generator": draw, "device": shape.device}
    if row.method == vsa.NAME:
        return {vsa.GATE: torch.randn(1, row.tokens, shape.heads, shape.head_dim, **more).to(shape.dtype)}
    if row.method == sla.SLA.name:
        return {sla.WEIGHT: torch.randn(shape.head_dim, shape.head_dim, **more) / shape.head_dim**0.5}
    return {}


def places_of(row: Row, tensors: Mapping[str, Tensor], path: str) -> list[Place]:
    """Where the row's calls are, a place for each."""
    given: dict[str, Any] = {"grid": row.grid, "text": row.text, "tensors": tensors}
    if not row.samples:
        return [Place(**given, layer=layer, layers=60, step=20, steps=50, kept={}) for layer in row.layers]
    file = strategy.read_strategy(path)
    every = list(itertools.product(range(row.options["skip_time_steps"], file.steps), range(file.layers)))
    some = [every[number * len(every) // row.samples] for number in range(row.samples)]
    sizes = {"layers": file.layers, "steps": file.steps}
    return [Place(**given, **sizes, step=step, layer=layer) for step, layer in some]


def small_strategy(row: Row, heads: int, folder: Path) -> str:
    """A file for the small grid: a window for each head, others in each layer."""
    counts = [-(-size // step) for size, step in zip(row.grid, (6, 8, 8), strict=True)]
    some = [[1, 1, counts[2]], [1, counts[1], 1], [counts[0], 1, 1]]
    skip = row.options["skip_time_steps"]
    keys = itertools.product(range(skip + 1), range(2), range(heads))
    path = folder / "strategy.json"
    path.write_text(json.dumps({f"{t}_{layer}_{h}": some[(layer + h) % 3] for t, layer, h in keys}))
    return str(path)


def options_of(row: Row, path: str) -> dict[str, Any]:
    return {**row.options, **({"mask_strategy_file_path": path} if row.samples else {})}


# ------------------------------------------------------------------------------------------------------------ the call


class Call:
    """A row as a model calls it, at all of its places in turn. The options of its method are configured before.

    Attributes:
        places: where it is called. held: bytes of what a call is given.
    """

    def __init__(self, row: Row, shape: Shape, path: str, sets: Sequence[tuple[Tensor, ...]]) -> None:
        self.row, self.settings, self.backward = row, options_of(row, path), row.direction == "backward"
        self.tensors, self.sets = learned(row, shape), list(sets)
        if self.backward:
            self.sets = [tuple(t.detach().requires_grad_() for t in some) for some in sets]
            self.tensors = {name: t.requires_grad_() for name, t in self.tensors.items()}
        self.places = places_of(row, self.tensors, path)
        self.held = sum(t.nbytes for t in (*self.sets[0], *self.tensors.values()))
        self._number = 0
        self._run = self.forward
        if self.backward:
            self._run = backward_of(self.forward, (*self.sets[0], *self.tensors.values()))

    def forward(self) -> Tensor:
        some = self.sets[self._number % len(self.sets)]
        self._number += 1
        return [polyattn.attention(*some, backend=self.row.method, place=place) for place in self.places][-1]

    def __call__(self) -> Any:
        with torch.set_grad_enabled(self.backward):
            return self._run()


def backward_of(forward: Callable[[], Tensor], wanted: Sequence[Tensor]) -> Callable[[], Any]:
    """The backward pass alone: the first call makes its graph, which is kept."""
    kept: list[tuple[Tensor, Tensor]] = []

    def call() -> Any:
        if not kept:
            out = forward()
            kept.append((out, torch.randn_like(out)))
        ((out, dout),) = kept
        return torch.autograd.grad(out, wanted, dout, retain_graph=True)

    return call


def dense_call(name: str, some: Sequence[Tensor], direction: str) -> Callable[[], Any]:
    """A dense kernel by its name, on the inputs of a row."""
    if direction == "forward":
        return lambda: polyattn.attention(*some, backend=name)
    leaves = tuple(t.detach().requires_grad_() for t in some)
    return backward_of(lambda: polyattn.attention(*leaves, backend=name), leaves)


# --------------------------------------------------------------------------------------------------------- conformance


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention under a mask in float64, [B, H, S, D]."""
    logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    return logits.softmax(-1).nan_to_num() @ v


def expected(call: Call, some: Sequence[Tensor], tensors: Mapping[str, Tensor], place: Place, map_: Any) -> Tensor:
    """What the definition of the method says in float64 on the CPU.

    Args:
        some: query, key, value [B, S, H, D] in float64. map_: of `mapped`, for a method whose map k-means decides.
    """
    row, given = call.row, call.settings
    q, k, v = (t.transpose(1, 2) for t in some)
    if row.method == vsa.NAME:
        out, _ = vsa.vsa_reference(q, k, v, place, sparsity=given["sparsity"], gate=tensors[vsa.GATE])
    elif row.method == sla.SLA.name:
        blocks = (128, 64)
        kept = max(1, int(given["topk_ratio"] * -(-row.tokens // blocks[1])))
        chosen = sla.top_blocks(q, k, blocks, kept).long()
        how = {"feature_map": "softmax", "linear_scope": given["linear_scope"]}
        out = sla.sla_reference(q, k, v, chosen, blocks, tensors, **how)
    elif row.method == vmoba.NAME:
        method = vmoba.VMoBA(**resolved(row.method, given))
        cut = method.cut_of(place)
        chunks = vmoba.chunks_of(row.grid, cut.chunk, q.device)
        scores = vmoba.chunk_scores(q, k, chunks)
        seen = vmoba.select_chunks(scores, chunks.own, cut.kept, method.threshold, method.scope)
        out = masked(q, k, v, vmoba.vmoba_mask(seen, chunks.own))
    elif row.method == sta.NAME:
        windows = strategy.read_strategy(given["mask_strategy_file_path"]).windows[place.step, place.layer]
        out = masked(q, k, v, sta.sta_mask(place, (6, 8, 8), windows))
    elif row.method == window.NAME:
        out = masked(q, k, v, window.window_mask(place, (4, 4, 4), (1, 1, 1)))
    else:
        rows, keys, seen = map_
        at = seen.gather(2, rows[..., None].expand(-1, -1, -1, seen.shape[3]))
        out = masked(q, k, v, at.gather(3, keys[:, :, None].expand(-1, -1, rows.shape[2], -1)))
    return out.transpose(1, 2)


def resolved(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a method: those given, and defaults."""
    from polyattn.methods.video.records import PORTABLE

    return {field.name: given.get(field.name, field.default) for field in PORTABLE[method].config}


@contextlib.contextmanager
def mapped() -> Iterator[list[Any]]:
    """The maps that k-means decides while this is open: (row labels, key labels, clusters that clusters see)."""
    found: list[Any] = []
    real = svg2.clustered_attention

    def call(query: Any, key: Any, value: Any, rows: Any, keys: Any, seen: Any, *more: Any, **given: Any) -> Any:
        found.append((rows.cpu().long(), keys.cpu().long(), seen.cpu()))
        return real(query, key, value, rows, keys, seen, *more, **given)

    with mock.patch.object(svg2, "clustered_attention", call):
        yield found


def errors_of(row: Row, shape: Shape, folder: Path) -> dict[str, float]:
    """Relative L2 errors of a row's small form, by result."""
    tiny = row.tiny()
    small = dataclasses.replace(shape, heads=2)
    path = small_strategy(tiny, small.heads, folder) if tiny.samples else ""
    call = Call(tiny, small, path, sets_of(tiny, small))
    polyattn.configure(attention_backend_config={tiny.method: call.settings})
    found: dict[str, float] = {}
    for number, place in enumerate(call.places):
        some = call.sets[0]
        with mapped() as maps:
            out = polyattn.attention(*some, backend=tiny.method, place=place)
        exact = [t.detach().cpu().double().requires_grad_(call.backward) for t in some]
        tensors = {n: t.detach().cpu().double().requires_grad_(call.backward) for n, t in call.tensors.items()}
        with torch.set_grad_enabled(call.backward):
            right = expected(call, exact, tensors, place, maps[0] if maps else None)
        found[f"out {number}"] = relative(out, right)
        if call.backward:
            draw = torch.Generator().manual_seed(3)
            dout = torch.randn(right.shape, generator=draw).to(out.dtype)
            grads = torch.autograd.grad(out, (*some, *call.tensors.values()), dout.to(out.device))
            wanted = torch.autograd.grad(right, (*exact, *tensors.values()), dout.double())
            names = ("query", "key", "value", *tensors)
            found |= {f"gradient of {n}": relative(a, b) for n, a, b in zip(names, grads, wanted, strict=True)}
    return found


def relative(found: Tensor, right: Tensor) -> float:
    return float((found.detach().cpu().double() - right.detach()).norm() / right.detach().norm())


def wrong(row: Row, shape: Shape) -> str:
    """Why a row is not timed: its small form is not what the reference says. "" = it is."""
    with tempfile.TemporaryDirectory() as folder:
        found = errors_of(row, shape, Path(folder))
    far = {
        name: error
        for name, error in found.items()
        if not error <= (max(RELATIVE_L2[shape.dtype], GRADIENTS) if "grad" in name else RELATIVE_L2[shape.dtype])
    }
    said = ", ".join(f"{name} {error:.2g}" for name, error in far.items())
    return f"differs from its reference on a small grid (relative L2 error): {said}" if far else ""


# --------------------------------------------------------------------------------------------------------------- timing


class Clock:
    """Milliseconds on a device by its events, on the CPU by its clock."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"

    def mark(self) -> Any:
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """The end has been waited for."""
        return float(start.elapsed_time(end)) if self.gpu else 1e3 * (end - start)

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def window(self, call: Callable[[], Any], count: int) -> float:
        """Milliseconds of a call: one that does not count, then so many after one another."""
        call()
        start = self.mark()
        for _ in range(count):
            call()
        end = self.mark()
        self.wait()
        return self.between(start, end) / count


def timed(calls: Mapping[str, Callable[[], Any]], clock: Clock, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call in each round, rounds in ever other orders."""
    counts = {name: max(1, min(20, round(1e3 * SECONDS / clock.window(call, 1)))) for name, call in calls.items()}
    dice, found = random.Random(0), {name: list[float]() for name in calls}
    for _ in range(rounds):
        for name in dice.sample(list(calls), len(calls)):
            found[name].append(clock.window(calls[name], counts[name]))
    return found


@dataclasses.dataclass
class Inner:
    """A call of a family that a method made: when, and how many pairs of queries and keys are computed."""

    kind: str
    start: Any
    end: Any
    pairs: float


@contextlib.contextmanager
def watched(clock: Clock, *, count: bool) -> Iterator[list[Inner]]:
    """The calls of families that methods make while this is open. count: their pairs, which waits for the device."""
    found: list[Inner] = []
    real = bound._Inner._call

    def call(self: Any, function: Any, query: Tensor, key: Tensor, value: Tensor, given: Mapping[str, Any]) -> Any:
        start = clock.mark()
        result = real(self, function, query, key, value, given)
        end = clock.mark()
        found.append(Inner(function.__name__, start, end, pairs_of(query, key, given) if count else 0.0))
        return result

    with mock.patch.object(bound._Inner, "_call", call):
        yield found


def pairs_of(query: Tensor, key: Tensor, given: Mapping[str, Any]) -> float:
    """Pairs of rows and keys that a call of a family computes, those of rows that fill up a block among them."""
    if "cu_seqlens_q" in given:
        rows, keys = (given[f"cu_seqlens_{side}"].diff().double() for side in "qk")
        return float((rows * keys).sum()) * query.shape[1]
    (B, H, S_q), S_k = query.shape[:3], key.shape[2]
    if "block_shape" not in given:
        return float(B * H * S_q * S_k)
    block_q, block_k = given["block_shape"]
    rows = (S_q - torch.arange(0, S_q, block_q, device=query.device)).clamp(max=block_q).double()
    sizes = given.get("block_valid")
    if sizes is None:
        sizes = (S_k - torch.arange(0, S_k, block_k, device=query.device)).clamp(max=block_k)
    sizes = sizes.double().expand(B, key.shape[1], -1).repeat_interleave(H // key.shape[1], 1)
    if given.get("lists") is None:
        seen = given["block_map"].expand(B, H, -1, -1).double() @ sizes[..., None]
        return float((seen[..., 0] * rows).sum())
    counts, indices = given["lists"]
    total = 0.0
    for h in range(H):  # a head at a time: lists of all in 64 bits are large
        listed = indices[:, min(h, indices.shape[1] - 1)].long()
        there = torch.arange(listed.shape[-1], device=query.device) < counts[:, min(h, counts.shape[1] - 1), :, None]
        keys = sizes[:, h, None].expand(-1, listed.shape[1], -1).gather(-1, listed.clamp(0, sizes.shape[-1] - 1))
        total += float(((keys * there).sum(-1) * rows).sum())
    return total * (B if indices.shape[0] == 1 else 1)


def beside(row: Row, shape: Shape, settings: Mapping[str, Any]) -> float:
    """Operations of a forward call that are not attention of pairs of tokens: branches, scores of maps, k-means."""
    S, H, D = row.tokens, shape.heads, shape.head_dim
    if row.method == sla.SLA.name:
        return H * S * D * (4.0 * (D + 1) + 2 * D) + 2.0 * H * D * (S / 128) * (S / 64)
    if row.method == vsa.NAME:
        tiles = math.prod(-(-size // 4) for size in row.grid)
        return 4.0 * H * D * tiles**2
    if row.method == svg2.NAME:
        given = resolved(row.method, settings)
        clusters = given["svg2_num_q_centroids"] + given["svg2_num_k_centroids"]
        return 2.0 * H * D * S * clusters * (given["svg2_kmeans_iter_step"] + 1)
    if row.method == vmoba.NAME:
        method = vmoba.VMoBA(**resolved(row.method, settings))
        sizes = [len(vmoba.chunks_of(row.grid, cut.chunk, torch.device("cpu")).sizes) for cut in method.cuts]
        return 2.0 * H * D * S * sum(sizes) / len(sizes)
    return 0.0


def peak_of(call: Callable[[], Any], held: int, clock: Clock) -> int | None:
    """Bytes of device memory that a first call takes at most, with its inputs and all that it keeps."""
    if not clock.gpu:
        call()
        return None
    clock.wait()
    before = torch.cuda.memory_allocated()
    result = call()
    del result
    clock.wait()
    kept = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    now = torch.cuda.memory_allocated()
    result = call()
    del result
    clock.wait()
    return held + kept + torch.cuda.max_memory_allocated() - now


def kernels_of(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of one call by the names of kernels, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        call()
        torch.cuda.synchronize()
    total: dict[str, float] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            total[event.name] = total.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e3
    return dict(sorted(total.items(), key=lambda one: -one[1]))


# ----------------------------------------------------------------------------------------------------------------- rows


def groups_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that are timed by turns: of one length and direction. A method has one set of options at a time."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        alike = (row.grid, row.text, row.direction)
        number = next(n for n in itertools.count() if row.method not in {r.method for r in groups.get((alike, n), ())})
        groups.setdefault((alike, number), []).append(row)
    return list(groups.values())


def measured(
    rows: Sequence[Row], shape: Shape, sheet: Mapping[str, Any], args: argparse.Namespace, folder: Path
) -> list[dict[str, Any]]:
    """The results of one group, with dense attention of the same run."""
    clock, sets = Clock(shape.device), dict[str, list[tuple[Tensor, ...]]]()
    said = {row.name: head(row) for row in rows}
    made: dict[str, Call] = {}
    memory: dict[str, int | None] = {}
    for row in rows:
        with refusing(said[row.name]):
            if why := wrong(row, shape):
                raise SystemExit(why)
            path = small_strategy(row, shape.heads, folder) if args.cpu_smoke and row.samples else args.sta_strategy
            if row.samples and not path:
                raise SystemExit("its windows are read from a file: give --sta-strategy FILE")
            alike = json.dumps(dict(row.inputs))
            if alike not in sets:
                sets[alike] = sets_of(row, shape)
            made[row.name] = Call(row, shape, str(path), sets[alike])
    polyattn.configure(attention_backend_config={call.row.method: call.settings for call in made.values()})
    for name, call in list(made.items()):
        with refusing(said[name]):
            memory[name] = peak_of(call, call.held, clock)
        if "not_timed" in said[name]:
            del made[name]
    if not made:
        return list(said.values())
    calls: dict[str, Callable[[], Any]] = dict(made)
    dense: dict[str, dict[str, Any]] = {}
    some = next(iter(made.values())).sets[0]
    for name in sheet["dense"] if clock.gpu else ["torch_sdpa"]:
        dense[name] = {}
        with refusing(dense[name]):
            call = dense_call(name, some, rows[0].direction)
            memory[name] = peak_of(call, sum(t.nbytes for t in some), clock)
            dense[name], calls[name] = {"ms": clock.window(call, 1)}, call
    least = min((one["ms"] for one in dense.values() if "ms" in one), default=math.inf)
    for name, one in dense.items():
        if one.get("ms", 0.0) > NEAR * least:
            del calls[name]
    found = timed(calls, clock, args.rounds)
    dense |= {name: figures(found[name], 1) for name in dense if name in found}
    fastest = min((name for name in dense if name in found), key=lambda name: dense[name]["ms"], default=None)
    for name, call in made.items():
        said[name] |= figures(found[name], len(call.places)) | {"dense": dense, "fastest": fastest}
        said[name] |= parts_of(call, shape, clock, args)
        if fastest is not None and not args.cpu_smoke:
            judge(said[name], call.row, shape, sheet["limits"], (memory[name], memory[fastest]))
    return list(said.values())


@contextlib.contextmanager
def refusing(result: dict[str, Any]) -> Iterator[None]:
    """What is raised while this is open is why a row or a dense kernel is not timed."""
    try:
        yield
    except SystemExit as exc:
        result["not_timed"] = str(exc)
    except (PolyattnError, RuntimeError) as exc:  # a device out of memory is a RuntimeError
        result["not_timed"] = f"{type(exc).__name__}: {str(exc).splitlines()[0]}"


def head(row: Row) -> dict[str, Any]:
    """What a row is."""
    kept = ("name", "method", "grid", "text", "tokens", "direction", "options", "inputs", "layers", "samples")
    return {name: getattr(row, name) for name in kept}


def figures(found: Sequence[float], parts: int) -> dict[str, Any]:
    """The rounds of a call that makes so many calls of attention, for one of these."""
    low, middle, high = statistics.quantiles([one / parts for one in found], n=4)
    return {"ms": round(middle, 4), "spread": round((high - low) / middle, 4), "rounds": len(found)}


def parts_of(call: Call, shape: Shape, clock: Clock, args: argparse.Namespace) -> dict[str, Any]:
    """What of a row's time is attention over its lists, what the rest is, and how much is computed."""
    row, parts = call.row, len(call.places)
    found: dict[str, Any] = {}
    with watched(clock, count=True) as seen, mapped() as maps, torch.no_grad():
        call.forward()
    pairs = sum(one.pairs for one in seen) / parts
    square = float(shape.heads * row.tokens**2)
    passes = 2.5 if call.backward else 1.0
    flop = (4.0 * pairs * shape.head_dim + beside(row, shape, call.settings)) * passes
    density = statistics.mean(map(share_of, maps)) if maps else pairs / square
    found |= {"density": round(density, 4), "executed": round(pairs / square, 4), "tflop": round(flop / 1e12, 4)}
    found["dense_tflop"] = round(4e-12 * square * shape.head_dim * passes, 4)
    found["served_by"] = served_by(call)
    if not call.backward:
        shares = []
        for _ in range(max(3, args.rounds // 2)):
            with watched(clock, count=False) as seen, torch.no_grad():
                start = clock.mark()
                call.forward()
                end = clock.mark()
                clock.wait()
            inner = sum(clock.between(one.start, one.end) for one in seen)
            shares.append((inner / parts, (clock.between(start, end) - inner) / parts))
        found["inner_ms"], found["rest_ms"] = (round(statistics.median(some), 4) for some in zip(*shares, strict=True))
    if clock.gpu and (args.profile or row.branch):
        kernels = kernels_of(call)
        branch = sum(ms for name, ms in kernels.items() if row.branch and row.branch in name)
        if row.branch:
            found["branch_ms"] = round(branch / parts, 4)
        if args.profile:
            found["kernels"] = {name: round(ms / parts, 4) for name, ms in itertools.islice(kernels.items(), 16)}
    return found


def share_of(map_: tuple[Tensor, Tensor, Tensor]) -> float:
    """The share of the pairs of tokens that a map of clusters keeps. Its blocks are filled up, and hold more."""
    rows, keys, seen = map_
    sizes = [
        torch.nn.functional.one_hot(t, n).sum(2).double() for t, n in zip((rows, keys), seen.shape[2:], strict=True)
    ]
    kept = (sizes[0][:, :, None] @ seen.double() @ sizes[1][..., None]).sum()
    return float(kept / rows.shape[2] ** 2 / (rows.shape[0] * rows.shape[1]))


def served_by(call: Call) -> list[str]:
    """The kernels of a call, as a run tells them."""
    with polyattn.video.Run(steps=call.places[0].steps, layers=call.places[0].layers) as run:
        place = dataclasses.replace(call.places[0], run=run, kept={})
        polyattn.attention(*call.sets[0], backend=call.row.method, place=place)
        return [kernel for row in run.explain().rows for kernel in row.kernels]


def judge(
    result: dict[str, Any],
    row: Row,
    shape: Shape,
    limits: Mapping[str, float],
    memory: tuple[int | None, int | None],
) -> None:
    """Hold a row to its bars: what it reaches, and of each bar met, stretch or missed."""
    speed = result["dense"][result["fastest"]]["ms"] / result["ms"]
    result["times_dense"] = round(speed, 3)
    verdicts: dict[str, str] = {}
    if row.must is not None and row.stretch is not None:
        verdicts[f"speed {row.must:g} / {row.stretch:g}"] = reached(speed, row.must, row.stretch)
        if result["density"] < row.density - BELOW:
            verdicts[f"density {row.density:g}"] = "missed"  # fewer pairs than the bar is for
    if "rest_ms" in result and row.rest is not None and row.must is not None:
        rest = (result["rest_ms"] - result.get("branch_ms", 0.0)) / result["inner_ms"]
        result["rest_share"] = round(rest, 3)
        verdicts[f"map and permutes {row.rest:.0%}"] = "met" if rest <= row.rest else "missed"
    mine, other = memory
    if mine is not None and other is not None:
        result["memory_gib"], result["dense_memory_gib"] = round(mine / 2**30, 3), round(other / 2**30, 3)
        result["times_memory"] = round(mine / other, 3)
        if row.must is not None:
            most, best = limits["memory"], limits["memory_stretch"]
            verdicts[f"memory {most:g} / {best:g}"] = reached(other / mine, 1 / most, 1 / best)
    result["verdicts"] = verdicts


def reached(found: float, must: float, stretch: float) -> str:
    return "stretch" if found >= stretch else "met" if found >= must else "missed"


def markdown(result: dict[str, Any]) -> str:
    """A result file as a table."""
    lines = [f"{report.caption(result)}.", ""]
    if result["smoke"]:
        lines += ["Tiny grids on a CPU: the figures mean nothing.", ""]
    titles = "| row | tokens | density | ms | TFLOP | dense | ms | times | rest | memory | verdicts |"
    lines += [titles, "|---|---:|---:|---:|---:|---|---:|---:|---:|---:|---|"]
    refused = []
    for row in result["rows"]:
        if "not_timed" in row:
            refused.append(f"- {row['name']}: {row['not_timed']}")
            continue
        name = row["fastest"]
        other = "-" if name is None else f"{row['dense'][name]['ms']:.3f}"
        words = "; ".join(f"{bar}: {said}" for bar, said in row.get("verdicts", {}).items())
        share, memory = row.get("rest_share"), row.get("times_memory")
        cells = (
            *(row["name"], f"{row['tokens']:,}", f"{row['density']:.3f}", f"{row['ms']:.3f}", f"{row['tflop']:.2f}"),
            *(name or "-", other, f"{row['times_dense']:.2f}" if "times_dense" in row else "-"),
            *("-" if share is None else f"{share:.0%}", "-" if memory is None else f"{memory:.2f}", words or "-"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    clusters = [
        f"- {row['name']}: {', '.join(f'{name} {value}' for name, value in row['inputs'].items())}; density "
        f"{row['density']:.3f} of the pairs, {row['executed']:.3f} with what fills up blocks"
        for row in result["rows"]
        if row["inputs"] and "ms" in row
    ]
    if clusters:
        lines += ["", "Inputs of planted clusters, the others are normal:", "", *clusters]
    if refused:
        lines += ["", "Not timed:", "", *refused]
    missing = {
        f"- {n}: {d['not_timed']}" for r in result["rows"] for n, d in r.get("dense", {}).items() if "not_timed" in d
    }
    if missing:
        lines += ["", "Dense kernels that are not here:", "", *sorted(missing)]
    return "\n".join(lines)


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--sheet", type=Path, default=SHEET)
    parser.add_argument(
        "--sta-strategy", type=Path, help="a mask strategy file of sliding tile attention, .json or .json.gz"
    )
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="WORDS", help="rows whose names have one, * is anything"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--profile", action="store_true", help="say which kernels the time goes to")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny grids on the CPU: the figures mean nothing")
    args = report.arguments(parser, markdown)
    if args is None:
        return 0
    sheet = yaml.safe_load(args.sheet.read_text())
    every = rows_of(sheet)
    rows = [row for row in every if any(fnmatch.fnmatchcase(row.name, f"*{word}*") for word in args.only)]
    if not rows:
        parser.error(f"--only {' '.join(args.only)} names no row; rows: {', '.join(row.name for row in every)}")
    if args.cpu_smoke:
        first = {row.name.partition("/")[0]: row.tiny() for row in reversed(rows)}  # grids share their small one
        rows, args.rounds = list(first.values()), 2
        shape = Shape(2, 32, torch.float32, torch.device("cpu"))
    elif torch.cuda.is_available():
        shape = Shape(sheet["shape"]["heads"], sheet["shape"]["head_dim"], torch.bfloat16, torch.device("cuda"))
    else:
        parser.error("no CUDA device is here; --cpu-smoke tries the program on the CPU")
    results: list[dict[str, Any]] = []
    result = {**report.stamp("video-sparse", shape.device), "smoke": args.cpu_smoke, "rows": results}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for group in groups_of(rows):
            for row in measured(group, shape, sheet, args, Path(folder)):
                results.append(row)
                said = (
                    row.get("not_timed") or f"{row['ms']:.3f} ms, {row.get('times_dense', '-')} times {row['fastest']}"
                )
                print(f"{time.monotonic() - began:6.1f} s  {row['name']}: {said}", file=sys.stderr)
            report.save(result, args.json)
            if shape.device.type == "cuda":
                torch.cuda.empty_cache()
    report.finish(result, markdown, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
