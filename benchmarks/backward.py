"""Backward of dense attention: the Triton package's two launches and, on a Hopper, its one, beside libraries.

    python benchmarks/backward.py [--json FILE]     # on a GPU
    python benchmarks/backward.py --small           # tiny, on the CPU: that it runs. No figure counts
    python benchmarks/backward.py --render FILE     # a result file as a table

Backward alone, in bfloat16. All are compared with the definition in float32 before they are timed. The one launch adds
dQ up in float32 in any order, so calls that ask for the same bits every time have the two launches in any case.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from beside import beside, error, run, times_as_fast
from report import caption
from torch import Tensor

import polyattn
from polyattn.bench.measure import Clock
from polyattn.contract import Causal
from polyattn.semantics.reference import attention

MUST, STRETCH, MOST = 0.8, 0.9, 0.02
LIBRARIES = ("fa4", "fa3", "fa", "cudnn", "torch_sdpa")
OURS = ("two launches", "one launch")


class Row(NamedTuple):
    """A call: sizes, (query heads, key heads), and who sees what."""

    batch: int
    tokens: int
    heads: tuple[int, int]
    head_dim: int
    causal: bool = True
    window: tuple[int, int] = (-1, -1)

    def __str__(self) -> str:
        kind = f"window {self.window[0]}" if self.window[0] >= 0 else "causal" if self.causal else "full"
        return f"d{self.head_dim} H{self.heads[0]} kv{self.heads[1]} B{self.batch} S{self.tokens} {kind}"

    @property
    def work(self) -> float:
        """Floating-point operations of the five products, of the pairs that are seen."""
        seen = self.tokens * self.tokens / (2 if self.causal else 1)
        if self.window[0] >= 0:
            seen = self.tokens * min(self.window[0] + 1, self.tokens)
        return 10.0 * self.batch * self.heads[0] * self.head_dim * seen


FULL = (
    Row(4, 4096, (32, 8), 128),
    Row(4, 4096, (32, 32), 128),
    Row(4, 4096, (32, 8), 128, causal=False),
    Row(1, 16384, (32, 8), 128),
    Row(16, 1024, (16, 16), 128, causal=False),
    Row(2, 8192, (32, 8), 128, window=(1023, 0)),
    Row(4, 4096, (24, 24), 96, causal=False),
    Row(32, 512, (12, 12), 64, causal=False),
    Row(1, 2048, (16, 4), 128),
    Row(4, 4096, (32, 8), 64),
    Row(4, 4096, (16, 16), 64, causal=False),
)
SMALL = (Row(1, 40, (2, 1), 8), Row(1, 40, (2, 2), 8, causal=False))


class Problem:
    """Tensors of a row, and what differentiates them: each call gives ((dquery, dkey, dvalue),)."""

    def __init__(self, row: Row, device: torch.device) -> None:
        torch.manual_seed(0)
        self.row = row
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

        def made(heads: int) -> Tensor:
            return torch.randn(row.batch, row.tokens, heads, row.head_dim, dtype=self.dtype, device=device)

        self.query, self.key, self.value, self.dout = (made(row.heads[n]) for n in (0, 1, 1, 0))
        inputs = self.query, self.key, self.value
        out = torch.empty_like(self.query, dtype=torch.float32)
        self.lse = out.new_empty(out.shape[:-1])
        self.right = [torch.empty_like(x, dtype=torch.float32) for x in inputs]
        group = row.heads[0] // row.heads[1]
        for batch, head in itertools.product(range(row.batch), range(row.heads[1])):  # all scores at a time are many
            keys = (slice(batch, batch + 1), slice(None), slice(head, head + 1))
            queries = (*keys[:2], slice(head * group, (head + 1) * group))
            places = queries, keys, keys
            given = [x[at].float().requires_grad_() for x, at in zip(inputs, places, strict=True)]
            causal: Causal = "bottom_right" if row.causal else "none"
            found = attention(*given, causal=causal, window=row.window, return_lse=True)
            gradients = torch.autograd.grad(found[0], given, self.dout[queries].float())
            out[queries], self.lse[queries] = (x.detach() for x in found)
            for gradient, at, right in zip(gradients, places, self.right, strict=True):
                right[at] = gradient
        self.out = out.to(self.dtype)

    def _part(self, backend: str) -> polyattn.Part:
        return polyattn.bind_part(causal=self.row.causal, window=self.row.window, backend=backend)

    def calls(self, libraries: Sequence[str]) -> dict[str, Callable[[], Any]]:
        tensors = (self.dout, self.query, self.key, self.value, self.out, self.lse)

        def of(differentiate: Callable[..., Any]) -> Callable[[], Any]:
            return lambda: (differentiate(*tensors),)

        found = {name: of(made) for name, made in self._ours().items()}
        return found | {name: of(self._part(name).backward) for name in libraries}

    def _ours(self) -> dict[str, Callable[..., Any]]:
        from polyattn_triton.hopper import backward as hopper
        from polyattn_triton.kernels import backward
        from polyattn_triton.kernels.rules import bounds
        from polyattn_triton.kernels.tiles import Spec

        left, right = bounds(self.row.causal, self.row.window, 0)
        given: dict[str, Any] = {"spec": Spec(self.row.head_dim**-0.5, left=left, right=right), "layout": "BSHD"}
        tensors = self.query, self.key, self.value, self.dout
        found: dict[str, Callable[..., Any]] = {"two launches": functools.partial(backward.backward, **given)}
        if hopper.takes(self.dtype, *[self.row.head_dim] * 2, **given) and hopper.fits(*tensors, **given):
            found["one launch"] = functools.partial(hopper.backward, **given)
        return found

    def far(self, found: Sequence[Tensor]) -> float:
        """The largest error of the three gradients."""
        return max(error(one, right) for one, right in zip(found, self.right, strict=True))


def measure(rows: Sequence[Row], clock: Clock) -> Iterator[dict[str, Any]]:
    polyattn.configure(strict=True)  # a library's fallback is not the library
    for row in rows:
        problem = Problem(row, clock.device)
        calls = problem.calls(LIBRARIES if clock.on_gpu else LIBRARIES[-1:])
        found = beside(calls, problem.far, MOST, clock, 7 if clock.on_gpu else 1)
        yield {"row": str(row), "head_dim": row.head_dim, "work": row.work, "calls": found}


def speed(row: dict[str, Any], name: str) -> str:
    """TFLOP/s of a call, where it has a time."""
    found = row["calls"].get(name, {})
    return f"{row['work'] / found['us'] / 1e6:.0f}" if "us" in found else "-"


def markdown(result: dict[str, Any]) -> str:
    """A result file as a table: TFLOP/s, and the best of ours over the best library."""
    names = (*OURS, *LIBRARIES)
    lines = [
        f"{caption(result)}.",
        "",
        f"| TFLOP/s of | {' | '.join(names)} | best of ours over the best library, {MUST:g} or {STRETCH:g} asked |",
        "|---|" + "---:|" * len(names) + "---|",
    ]
    bests = []
    for row in result["rows"]:
        ours = [name for name in OURS if "us" in row["calls"].get(name, {})]
        ratios = [times_as_fast(row["calls"], name, *LIBRARIES) for name in ours]
        best = max((ratio for ratio in ratios if ratio is not None), default=None)
        bests += [] if best is None else [best]
        said = "-" if best is None else f"{best:.2f}: {'met' if best >= MUST else 'missed'}"
        lines.append(f"| {row['row']} | {' | '.join(speed(row, name) for name in names)} | {said} |")
    if bests:
        lines += ["", f"Over the best library, geometric mean: {statistics.geometric_mean(bests):.2f}."]
    calls = [(row["row"], name, found) for row in result["rows"] for name, found in row["calls"].items()]
    why = [f"- {row}, {name}: {found['not_timed']}" for row, name, found in calls if "not_timed" in found]
    return "\n".join([*lines, *([""] if why else []), *why])


def main() -> None:
    run("backward", __doc__, markdown, measure, (SMALL, FULL))


if __name__ == "__main__":
    main()
