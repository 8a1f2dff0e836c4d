"""The sparse video methods as the kit knows them: their masks over tokens, by plain rules."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ...contract import Like, Place
from ...methods.video import sla, sta, svg2, vsa, window
from ...methods.video.tiles import tiles_by_token
from ..cases import Case, Placed
from .placed import Called, PlacedCalls, leveled, repeated

if TYPE_CHECKING:
    from ..problems import Maker

__all__ = ["SLA", "STA", "SVG2", "VSA", "VMoBA", "Window"]


def _at(case: Case) -> Placed:
    assert case.place is not None
    return case.place


def _place(at: Placed) -> Place:
    return Place(grid=at.grid, text=at.text, valid_text=at.valid_text)


def _tiles(case: Case, tile: tuple[int, int, int]) -> Tensor:
    """int64 [S], the tile of each token; -1 of text."""
    numbers, _ = tiles_by_token(_place(_at(case)), tile, "")
    counts = numbers.amax(0) + 1
    found = (numbers[:, 0] * counts[1] + numbers[:, 1]) * counts[2] + numbers[:, 2]
    return found.masked_fill(numbers[:, 0] < 0, -1)


class Window(PlacedCalls):
    choices = ({"window_reach": (1, 0, 1)}, {"window_tile": (2, 4, 4), "window_reach": (0, 1, 0)})
    dense: ClassVar[Mapping[str, Any]] = {"window_reach": (9, 9, 9)}
    defaults: ClassVar[Mapping[str, Any]] = {"window_tile": (4, 4, 4), "window_reach": (1, 1, 1)}

    def mask(self, q: Tensor, k: Tensor, call: Called) -> Tensor:
        o = call.options
        return window.window_mask(_place(call.at), o["window_tile"], o["window_reach"], q.shape[1])


class STA(PlacedCalls):
    choices = ({}, {"sta_tile": (2, 4, 8)})
    dense: ClassVar[Mapping[str, Any]] = {"sta_tile": (2, 4, 4)}
    defaults: ClassVar[Mapping[str, Any]] = {"sta_tile": (4, 4, 4), "skip_time_steps": 0}
    untried = ("sta_mode: a search and what is tuned of it write files, which tests of the method read",)

    def mask(self, q: Tensor, k: Tensor, call: Called) -> Tensor:
        at, tile = call.at, call.options["sta_tile"]
        step = at.points[-1][0]
        windows = [self._window(at, tile, step, at.layer, head) for head in range(q.shape[1])]
        return sta.sta_mask(_place(at), tile, windows)

    def _window(self, at: Placed, tile: tuple[int, int, int], step: int, layer: int, head: int) -> tuple[int, int, int]:
        t, h, w = (-(-size // part) for size, part in zip(at.grid, tile, strict=True))
        if at.full:
            return t, h, w
        # Odd, or as long as the grid.
        tried = [(1, 1, 1), (1, h, 1), (t, 1, 1), (1, 1, w), (1, h, w)]
        return tried[(step + 2 * layer + head) % len(tried)]

    @contextlib.contextmanager
    def settled(self, case: Case, backend: str) -> Iterator[None]:
        with tempfile.TemporaryDirectory() as folder:
            self._file = Path(folder) / "strategy.json"
            with super().settled(case, backend):
                yield

    def configured(self, case: Case) -> dict[str, Any]:
        at, found = _at(case), super().configured(case)
        every = itertools.product(range(at.steps), range(at.layers), range(case.request.heads))
        windows = {f"{t}_{n}_{h}": self._window(at, found["sta_tile"], t, n, h) for t, n, h in every}
        self._file.write_text(json.dumps(windows))
        return {**found, "mask_strategy_file_path": str(self._file)}


class VSA(PlacedCalls):
    choices = (
        {"sparsity": 0.5},
        {"sparsity": 0.8, "coarse": "off"},
        {"sparsity": 0.7},
        {"sparsity": 0.5, "coarse": "one"},
    )
    dense: ClassVar[Mapping[str, Any]] = {"sparsity": 0.0, "coarse": "off"}
    defaults: ClassVar[Mapping[str, Any]] = {"coarse": "gate"}

    def groups(self, case: Case, name: str) -> Tensor:
        return _tiles(case, vsa.TILE)

    def learnt(self, case: Case) -> tuple[str, ...]:
        return (vsa.GATE,) if self.configured(case)["coarse"] == "gate" else ()

    def needs(self, case: Case, maker: Maker) -> dict[str, Tensor]:
        r, (B, S) = case.request, (len(case.lengths), case.longest[0])
        made = maker.normal(B, S, r.heads, r.dims[1])
        return {name: made.to(maker.dtype).to(maker.device) for name in self.learnt(case)}

    def computed(self, q: Tensor, k: Tensor, v: Tensor, call: Called, dtype: torch.dtype) -> Tensor:
        coarse, scale = call.options["coarse"], call.case.request.softmax_scale
        gate = call.learned.get(vsa.GATE) if coarse != "one" else q.new_ones(1, 1, 1, 1)
        k, v, place, kept = repeated(q, k), repeated(q, v), _place(call.at), call.options["sparsity"]
        with torch.no_grad():
            _, chosen = vsa.vsa_reference(q, k, v, place, sparsity=kept, scale=scale)
        given: dict[str, Any] = {"sparsity": kept, "gate": gate, "scale": scale, "chosen": chosen, "dtype": dtype}
        out, _ = vsa.vsa_reference(q, k, v, place, **given)
        return out


class SLA(PlacedCalls):
    padding = False
    choices = (
        {"topk_ratio": 0.5},
        {"topk_ratio": 0.4, "linear_scope": "complement", "feature_map": "elu", "BLKQ": 64},
        {"topk_ratio": 0.4, "feature_map": "relu", "BLKQ": 64},
    )
    dense: ClassVar[Mapping[str, Any]] = {"topk_ratio": 1.0, "linear_scope": "complement"}
    defaults: ClassVar[Mapping[str, Any]] = {
        "topk_ratio": 0.1,
        "feature_map": "softmax",
        "linear_scope": "all",
        "BLKQ": 128,
        "BLKK": 64,
    }

    def groups(self, case: Case, name: str) -> Tensor:
        size: int = self.configured(case)["BLKQ" if name == "query" else "BLKK"]
        return torch.arange(case.longest[0]) // size

    def learnt(self, case: Case) -> tuple[str, ...]:
        return (sla.WEIGHT,) if _at(case).full else (sla.WEIGHT, sla.BIAS)

    def needs(self, case: Case, maker: Maker) -> dict[str, Tensor]:
        width = case.request.dims[1]
        made = {sla.WEIGHT: maker.normal(width, width) * width**-0.5, sla.BIAS: maker.normal(width) / 4}
        return {name: made[name].to(maker.dtype).to(maker.device) for name in self.learnt(case)}

    def computed(self, q: Tensor, k: Tensor, v: Tensor, call: Called, dtype: torch.dtype) -> Tensor:
        o = call.options
        blocks = (o["BLKQ"], o["BLKK"])
        with torch.no_grad():
            rows, keys = (
                torch.stack([part.double().mean(2) for part in torch.split(t, size, 2)], 2)
                for t, size in ((q, blocks[0]), (repeated(q, k), blocks[1]))
            )
            kept = max(1, int(o["topk_ratio"] * keys.shape[2]))
            chosen = (rows @ keys.mT).topk(kept, -1).indices.sort(-1).values
        how = {"feature_map": o["feature_map"], "linear_scope": o["linear_scope"]}
        return sla.sla_reference(q, k, v, chosen, blocks, call.learned, dtype=dtype, **how)


class VMoBA(PlacedCalls):
    grid = (6, 4, 8)
    text = False
    choices = ({"moba_select_mode": "topk"}, {"moba_threshold": 0.3})
    dense: ClassVar[Mapping[str, Any]] = {"moba_threshold": 1.0}
    defaults: ClassVar[Mapping[str, Any]] = {
        "temporal_chunk_size": 4,
        "temporal_topk": 1,
        "spatial_chunk_size": (2, 4),
        "spatial_topk": 2,
        "st_chunk_size": (3, 2, 4),
        "st_topk": 3,
        "moba_select_mode": "threshold",
        "first_full_step": 0,
    }
    untried = ("moba_threshold_type but query_head: choices among scores of many queries hang on their last bits",)

    def _own(self, case: Case) -> tuple[Tensor, int]:
        """int64 [S], the chunk of each token; and how many a query keeps by number."""
        at, o = _at(case), self.configured(case)
        T, H, W = at.grid
        chunk, kept = (
            ((o["temporal_chunk_size"], H, W), o["temporal_topk"]),
            ((T, *o["spatial_chunk_size"]), o["spatial_topk"]),
            (o["st_chunk_size"], o["st_topk"]),
        )[at.layer % 3]
        return _tiles(case, chunk), kept

    def groups(self, case: Case, name: str) -> Tensor:
        return self._own(case)[0] if name == "key" else torch.arange(case.longest[0])

    def shaped(self, case: Case, name: str, values: Tensor) -> Tensor:
        if name != "query":
            return super().shaped(case, name, values)
        # Each query is scored by itself: only its side of the levels is set.
        moved = values.clone()
        moved[..., 0] = torch.where(moved[..., 0] < 0, -1.0, 1.0)
        return moved

    def mask(self, q: Tensor, k: Tensor, call: Called) -> Tensor:
        (own, kept), o, wide = self._own(call.case), call.options, repeated(q, k).double()
        own = own.to(q.device)
        chunks = int(own.max()) + 1
        means = torch.stack([wide[:, :, own == chunk].mean(2) for chunk in range(chunks)], 2)
        scores = (q.double() @ means.mT).tolist()
        mine, seen = own.tolist(), torch.zeros(*q.shape[:3], chunks, dtype=torch.bool)
        for b, h, s in itertools.product(*map(range, q.shape[:3])):
            row, first = scores[b][h][s], mine[s]
            others = sorted((c for c in range(chunks) if c != first), key=lambda c: -row[c])
            weights = [(x - min(row)) / (max(row) - min(row)) for x in row]
            reached, taken = weights[first], [first]
            for c in others:
                more = len(taken) < kept
                if o["moba_select_mode"] == "threshold":
                    more = o["moba_threshold"] >= 1 or reached < o["moba_threshold"] * sum(weights)
                if not more:
                    break
                taken.append(c)
                reached += weights[c]
            seen[b, h, s, taken] = True
        return seen.to(q.device)[..., own]


class SVG2(PlacedCalls):
    choices = (
        {"svg2_kmeans_iter_step": 0},
        {"svg2_min_kc_ratio": 0.7, "svg2_top_p_kmeans": 0.3},
    )
    dense: ClassVar[Mapping[str, Any]] = {"svg2_top_p_kmeans": 1.0}
    defaults: ClassVar[Mapping[str, Any]] = {
        "svg2_num_q_centroids": 4,
        "svg2_num_k_centroids": 6,
        "svg2_top_p_kmeans": 0.69,
        "svg2_min_kc_ratio": 0.0,
        "svg2_kmeans_iter_init": 5,
        "svg2_kmeans_iter_step": 2,
        "svg2_first_layers_fp": 0.0,
        "svg2_first_times_fp": 0.0,
        "svg2_zero_step_kmeans_init": False,
    }

    def groups(self, case: Case, name: str) -> Tensor:
        """Clusters of equal sizes. K-means begins with a token of each, where the method begins."""
        at, o = _at(case), self.configured(case)
        S, front, cells = case.longest[0], at.text[0], math.prod(at.grid)
        like = Like(1, 1, 1, S, 1, torch.float32, torch.device("cpu"))
        plan = svg2.SVG2(**o).plan(_place(at), like)
        first = plan.queries if name == "query" else plan.keys
        rest = torch.ones(cells, dtype=torch.bool)
        rest[first] = False
        labels = torch.zeros(cells, dtype=torch.int64)
        labels[first] = torch.arange(len(first))
        labels[rest] = torch.arange(cells - len(first)) % len(first)
        return torch.nn.functional.pad(labels, (front, S - cells - front), value=-1)

    def shaped(self, case: Case, name: str, values: Tensor) -> Tensor:
        """Clusters are far apart along axes that only one of queries and keys has: products do not know of that."""
        if name == "value":
            return values
        groups, turned = self.groups(case, name), case.request.layout == "BSHD"
        rows = values.transpose(1, 2) if turned else values
        rows = leveled(rows / 4, groups, name, len(case.id))
        rows[..., 0] *= 4.0 if name == "query" else 1.0
        first = 1 if name == "key" else 11
        there = groups >= 0
        rows[:, :, there, first + groups[there]] += 6.0
        return rows.transpose(1, 2) if turned else rows

    def mask(self, q: Tensor, k: Tensor, call: Called) -> Tensor:
        at, o, wide = call.at, call.options, repeated(q, k).double()
        sides = [self.groups(call.case, name).to(q.device) for name in ("query", "key")]
        rows, keys = (
            torch.stack([t[:, :, labels == n].double().mean(2) for n in range(int(labels.max()) + 1)], 2)
            for t, labels in zip((q, wide), sides, strict=True)
        )
        sizes = sides[1][sides[1] >= 0].bincount()
        shares = ((rows @ keys.mT * q.shape[-1] ** -0.5).exp() * sizes).tolist()
        seen = torch.zeros(*rows.shape[:3], keys.shape[2], dtype=torch.bool)
        for b, h, c in itertools.product(*map(range, rows.shape[:3])):
            row, before = shares[b][h][c], 0.0
            for number, one in enumerate(sorted(range(len(row)), key=lambda n: -row[n])):
                kept = number < int(o["svg2_min_kc_ratio"] * len(row)) or o["svg2_top_p_kmeans"] >= 1
                if not kept and before > o["svg2_top_p_kmeans"] * sum(row):
                    break
                seen[b, h, c, one] = True
                before += row[one]
        seen = torch.nn.functional.pad(seen.to(q.device), (0, 1, 0, 1), value=True)  # the last: text
        mask = seen[:, :, sides[0]][..., sides[1]]
        _, counts = tiles_by_token(_place(at), (1, 1, 1), "")
        counts = counts.to(q.device)
        return mask & (counts[:, None] == counts)
