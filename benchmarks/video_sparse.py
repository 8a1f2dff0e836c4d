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
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import report
import torch
import yaml
from torch import Tensor
from video.checks import mapped, wrong
from video.inputs import Call, Row, Shape, dense_call, rows_of, sets_of, small_strategy
from video.timing import Clock, beside, kernels_of, peak_of, timed, watched

import polyattn
from polyattn.errors import PolyattnError
from polyattn.methods.video import vmoba

SHEET = Path(__file__).parent / "sheets" / "video_sparse.yaml"
ROUNDS = 12
NEAR = 1.15
"""Dense kernels so many times slower than the fastest are timed once."""
BELOW = 0.03
"""How far a map may be below the density that its bar is for."""


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
    pairs, square = sum(one.pairs for one in seen) / parts, float(shape.heads * row.tokens**2)
    if row.attention:
        pairs = square * statistics.mean(float((place.kept or {})[vmoba.DENSITY]) for place in call.places)
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
                for _ in range(2):
                    call.forward()  # so that the device is behind, and no time of the host's counts as its own
                seen.clear()
                start = clock.mark()
                call.forward()
                end = clock.mark()
                clock.wait()
            inner = sum(clock.between(one.start, one.end) for one in seen)
            shares.append((inner / parts, (clock.between(start, end) - inner) / parts))
        found["inner_ms"], found["rest_ms"] = (round(statistics.median(some), 4) for some in zip(*shares, strict=True))
    if clock.gpu and (args.profile or row.branch or row.attention):
        kernels = kernels_of(call)
        if row.attention:
            own = sum(ms for name, ms in kernels.items() if name in row.attention) / parts
            found["rest_ms"] = round(found["rest_ms"] - own, 4)
            found["inner_ms"] = round(found["inner_ms"] + own, 4)
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
