"""DeepSeek sparse attention: lists of tokens beside FlashMLA's sparse kernels and beside dense latent decode.

    python benchmarks/dsa.py [--json FILE]        # on a GPU
    python benchmarks/dsa.py --small              # tiny, on the CPU: that it runs. No figure counts
    python benchmarks/dsa.py --render FILE        # a result file as the table of docs/benchmarks.md

A decode step of 32 rows with 64k keys each and 2,048 listed, and a prompt's 4,096 tokens; 128 heads, pages of 64 in
random order, in bfloat16 and in FP8. Attention is compared with the gathered rows in float32, dense attention with a
softmax over all rows. Scores of the indexer are compared with their definition; of a list, what the scores of its
tokens add up to with those of `torch.topk`. `step` is scores, list and attention in one graph. Nothing that is wrong is
timed.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import report
import torch
from beside import beside, run, spread, times_as_fast
from torch import Tensor

import polyattn
from polyattn.backends.listed_latent import ListedLatent
from polyattn.bench.measure import Clock
from polyattn.contract import AttentionRequest, PagedTables
from polyattn.registry.device_ops import device_ops
from polyattn.semantics.kv_quant import mla_pack, mla_unpack
from polyattn.semantics.token_index import index_scores, pack_index, top_tokens, unpack_index

SCALE, DIMS, PAGE = 192**-0.5, (576, 512), 64
OWN, PEER, HAND = "dsa/polyattn-triton", "flashmla_sparse", "FlashMLA by hand"
SMALL_OWN = "torch_native"
"""Who serves on a CPU."""
DENSE = ("triton", "fa3", "flashmla")
MOST, NEAR = 0.02, 1e-3
"""Errors of attention in 16 bits, and of scores: of these as many are added up as there are heads."""
INDEXER = (64, 128)
"""Heads and width of the indexer's queries."""


class Size(NamedTuple):
    rows: int
    keys: int
    topk: int
    heads: int
    prompt: int
    rounds: int


FULL, SMALL = Size(32, 65536, 2048, 128, 4096, 9), Size(2, 256, 16, 4, 6, 1)


class Problem:
    """Queries of a decode step, or of a prompt's chunk, their lists, and a cache."""

    def __init__(self, size: Size, device: torch.device, *, prompt: bool, fp8: bool) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.rows = 1 if prompt else size.rows
        self.tokens, self.keys, self.topk = size.prompt if prompt else size.rows, size.keys, size.topk
        self.step = spread(self.rows, self.keys, PAGE, device)
        if prompt:
            self.step |= {"max_seqlen_q": self.tokens}
            self.step["cu_seqlens_q"] = torch.tensor([0, self.tokens], dtype=torch.int32, device=device)
        pages = self.step["page_table"].numel()
        cache = torch.randn(pages, PAGE, DIMS[0], dtype=dtype, device=device)
        self.cache = torch.cat([mla_pack(part, "fp8_e4m3", "block128") for part in cache.split(512)]) if fp8 else cache
        self.query = torch.randn(self.tokens, size.heads, DIMS[0], dtype=dtype, device=device)
        seen = self.keys - self.tokens // self.rows
        some = [torch.randperm(seen, device=device)[: self.topk] for _ in range(self.tokens)]
        self.lists = torch.stack(some).to(torch.int32)
        self.lists[0, self.topk // 2 :] = -1

    def attend(self, backend: str, lists: Tensor | None) -> Tensor:
        given = {"token_indices": lists} if lists is not None else {}
        out: Tensor = polyattn.mla_attention(self.query, self.cache, scale=SCALE, backend=backend, **given, **self.step)
        return out

    def right(self) -> Tensor:
        """The gathered rows in float32."""
        request = AttentionRequest(
            family="mla",
            layout="THD",
            dtype="float32",
            head_dim=DIMS[0],
            v_head_dim=DIMS[1],
            heads=self.query.shape[1],
            scale=SCALE,
            page_size=PAGE,
            token_topk=self.topk,
        )
        tables = PagedTables(*self.step.values())
        out: Tensor = (
            ListedLatent()
            .bind(request)
            .forward(self.query.float(), self.cache, tables=tables, token_indices=self.lists)
        )
        return out

    def dense(self) -> Tensor:
        """A softmax over all rows of each sequence, in float32; of a decode step."""
        outs = []
        for query, pages in zip(self.query.float(), self.step["page_table"].long(), strict=True):
            rows = mla_unpack(self.cache[pages]).float().flatten(0, 1)
            outs.append((query @ rows.T * SCALE).softmax(-1) @ rows[:, : DIMS[1]])
        return torch.stack(outs)


def by_hand(problem: Problem) -> Callable[[], Any]:
    """FlashMLA's kernel itself, whose lists are places in the cache, made before."""
    library = importlib.import_module("vllm.third_party.flashmla.flash_mla_interface")
    tables = PagedTables(*problem.step.values())
    row = torch.arange(problem.tokens, device=problem.query.device) // (problem.tokens // problem.rows)
    page = tables.page_table[row[:, None], (problem.lists.clamp(min=0) // PAGE).long()]
    places = torch.where(problem.lists >= 0, page * PAGE + problem.lists % PAGE, -1).to(torch.int32)[:, None]
    if problem.cache.dtype == torch.uint8:
        schedule = library.get_mla_metadata()[0]
        return lambda: library.flash_mla_with_kvcache(
            q=problem.query[:, None],
            k_cache=problem.cache[:, :, None],
            block_table=None,
            cache_seqlens=None,
            head_dim_v=DIMS[1],
            tile_scheduler_metadata=schedule,
            softmax_scale=SCALE,
            is_fp8_kvcache=True,
            indices=places,
        )[0][:, 0]
    rows = problem.cache.flatten(0, 1)[:, None]
    return lambda: library.flash_mla_sparse_fwd(q=problem.query, kv=rows, indices=places, sm_scale=SCALE, d_v=DIMS[1])


def listed(problem: Problem, clock: Clock, rounds: int) -> dict[str, dict[str, Any]]:
    """Attention to lists, ours beside the peer's, with what they compute and read."""
    names = (OWN, PEER) if clock.on_gpu else (SMALL_OWN,)
    calls: dict[str, Any] = {name: functools.partial(problem.attend, name, problem.lists) for name in names}
    if clock.on_gpu and importlib.util.find_spec("vllm") is not None:
        calls[HAND] = by_hand(problem)
    found = beside(calls, problem.right(), MOST, clock, rounds)
    pairs = problem.tokens * problem.query.shape[1] * problem.topk
    for one in found.values():
        if "us" in one:
            one["tflop_s"] = round(2e-6 * pairs * sum(DIMS) / one["us"], 1)
            one["gb_s"] = round(1e-3 * problem.tokens * problem.topk * problem.cache[0, 0].nbytes / one["us"], 1)
    return found


def chosen(problem: Problem, size: Size, clock: Clock) -> Iterator[dict[str, Any]]:
    """A decode step from the indexer's queries on, and each of its parts; beside dense attention."""
    device, ops, own = clock.device, device_ops(clock.device.type), OWN if clock.on_gpu else SMALL_OWN
    heads, width = INDEXER if clock.on_gpu else (2, 16)
    query = torch.randn(size.rows, heads, width, dtype=problem.query.dtype, device=device)
    weights = torch.rand(size.rows, heads, device=device)
    rows = torch.randn(problem.cache.shape[0], PAGE, width, dtype=problem.query.dtype, device=device)
    lens, table = problem.step["seq_lens"], problem.step["page_table"]
    for name, keys in (("bfloat16" if clock.on_gpu else "float32", rows), ("fp8", pack_index(rows))):

        def by_torch(keys: Tensor = keys) -> Tensor:
            real = unpack_index(keys) if keys.dtype == torch.uint8 else keys
            return index_scores(query[:, None], real[table.long()].flatten(1, 2), weights[:, None])[:, 0]

        kernel = getattr(ops, "index_scores", None)
        by_kernel = functools.partial(
            kernel or (lambda *_, by_torch=by_torch: by_torch()),
            *(query, weights, keys, table, lens, problem.step["cu_seqlens_q"], 1),
        )
        right = by_torch()
        scores = {"torch": by_torch, "kernel": by_kernel} if kernel else {"torch": by_torch}
        yield {"what": f"scores of {name} keys", "calls": beside(scores, right, NEAR, clock, size.rounds)}

        def far(lists: Tensor, right: Tensor = right) -> float:
            """How far what a list's tokens score is from the most that so many can."""
            best = right.topk(problem.topk, -1).values.double().sum()
            return float(abs(best - right.gather(-1, lists.long()).double().sum()) / best)

        lister = getattr(ops, "top_tokens", None) or top_tokens
        tops = {"torch": functools.partial(top_tokens, right, lens, problem.topk)}
        if lister is not top_tokens:
            tops["kernel"] = functools.partial(lister, right, lens, problem.topk)
        yield {"what": f"lists from scores of {name} keys", "calls": beside(tops, far, 1e-6, clock, size.rounds)}

        def step(by_kernel: Any = by_kernel, lister: Any = lister) -> Tensor:
            return problem.attend(own, lister(by_kernel(), lens, problem.topk))

        problem_lists = problem.lists
        problem.lists = top_tokens(right, lens, problem.topk)
        wanted, problem.lists = problem.right(), problem_lists
        calls = {"step": step, "attention": functools.partial(problem.attend, own, problem_lists)}
        dense = {
            f"dense {one}": functools.partial(problem.attend, one, None) for one in (DENSE if clock.on_gpu else ())
        }
        # What is listed may differ where scores are equal but for rounding, and then so does the output.
        full = {**calls, **dense}
        limits = {"step": 0.1, **dict.fromkeys(("attention", *dense), MOST)}
        rights = {
            "step": wanted,
            "attention": problem.right(),
            **(dict.fromkeys(dense, problem.dense()) if dense else {}),
        }
        found = measured(full, rights, limits, clock, size.rounds)
        row: dict[str, Any] = {"what": f"decode step, {name} index keys", "calls": found}
        for part, must in (("attention", 8.0), ("step", 4.0)):
            ratio = times_as_fast(found, part, *dense)
            if ratio is not None:
                row.setdefault("times_dense", {})[part] = {"times": round(ratio, 2), "must": must}
        yield row


def measured(
    calls: dict[str, Any], rights: dict[str, Tensor], limits: dict[str, float], clock: Clock, rounds: int
) -> dict[str, dict[str, Any]]:
    """As `beside`, of calls with a right result each."""
    checked = {name: beside({name: call}, rights[name], limits[name], clock, 1)[name] for name, call in calls.items()}
    timed = {name: call for name, call in calls.items() if "us" in checked[name]}
    again = beside(timed, None, 0.0, clock, rounds)
    return {name: {**one, **again.get(name, {})} for name, one in checked.items()}


def measure(size: Size, clock: Clock) -> Iterator[dict[str, Any]]:
    for fp8 in (False, True):
        for prompt in (False, True):
            problem = Problem(size, clock.device, prompt=prompt, fp8=fp8)
            what = f"{'prompt' if prompt else 'decode'}, {'fp8' if fp8 else str(problem.cache.dtype)[6:]} rows"
            calls = listed(problem, clock, size.rounds)
            row: dict[str, Any] = {"what": f"lists of {what}", "tokens": problem.tokens, "calls": calls}
            if (ratio := times_as_fast(calls, OWN, HAND)) is not None:
                row["times_peer"] = {"times": round(ratio, 2), "must": 0.6, "stretch": 0.8}
            yield row
            if not fp8 and not prompt:
                yield from chosen(problem, size, clock)
            del problem


def markdown(result: dict[str, Any]) -> str:
    """A result file as the table of docs/benchmarks.md."""
    lines = [
        f"{report.caption(result)}.",
        "",
        "| what | who | us | error | TFLOP/s | GB/s |",
        "|---|---|---:|---:|---:|---:|",
    ]
    verdicts = []
    for row in result["rows"]:
        for name, one in row["calls"].items():
            cells = [
                f"{one['us']:.1f}" if "us" in one else "not timed",
                f"{one['error']:.1e}" if "error" in one else "-",
            ]
            cells += [f"{one[key]:.0f}" if key in one else "-" for key in ("tflop_s", "gb_s")]
            lines.append(f"| {row['what']} | `{name}` | {' | '.join(cells)} |")
            if "not_timed" in one:
                verdicts.append(f"- {row['what']}, `{name}`, is not timed: {one['not_timed']}")
        if said := row.get("times_peer"):
            reached = said["times"] >= said["must"]
            verdicts.append(
                f"- {row['what']}: {said['times']:.2f} times as fast as FlashMLA; asked {said['must']:g}, "
                f"{said['stretch']:g} at best: {'met' if reached else 'missed'}"
            )
        for part, said in row.get("times_dense", {}).items():
            verdicts.append(
                f"- {row['what']}, {part}: {said['times']:.2f} times as fast as the fastest dense decode; asked "
                f"{said['must']:g}: {'met' if said['times'] >= said['must'] else 'missed'}"
            )
    return "\n".join([*lines, *([""] if verdicts else []), *verdicts])


def main() -> None:
    run("dsa", __doc__, markdown, measure, (SMALL, FULL))


if __name__ == "__main__":
    main()
