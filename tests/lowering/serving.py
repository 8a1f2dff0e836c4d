"""Paged and latent calls for the tests of their lowerings, each with its answer.

Batches are ragged, with trees, quantised caches and further keys. What no sequence owns is poisoned, and tables hold
nonsense past the ends of sequences.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from polyattn.contract import AttentionRequest, KVPart, Row
from polyattn.lowering import bind
from polyattn.semantics import reference
from polyattn.semantics.kv_quant import fp4_scales, mla_pack_fp8, real, stored
from polyattn.testing.families import FAMILIES
from polyattn.testing.plain import plain_attention, reference_attention
from polyattn.testing.tolerances import compare

from .harness import Lowered

__all__ = ["Step", "cached", "close", "divided", "exact", "gates", "int32", "make", "run", "same", "steps", "words"]

NONSENSE = 10**6
DTYPES = {
    **{name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16", "int8")},
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp4_e2m1": torch.uint8,
}


def words(given: dict[str, Any]) -> dict[str, Any]:
    """The words of a public call as keywords of a bound function."""
    return FAMILIES["paged"].keywords(given)


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cached(family: str = "paged", **fields: Any) -> AttentionRequest:
    """A plain request over a cache, for tests of what is offered."""
    usual: dict[str, Any] = {"phase": "extend", "s_relation": "fewer", "causal": "bottom_right", "page_size": 8}
    usual |= {"layout": "THD", "dtype": "float32", "heads": 4, "kv_heads": 2, "head_dim": 16, "v_head_dim": 16}
    if family == "mla":
        usual |= {"kv_heads": 1, "head_dim": 24, "scale": 0.3}
    return AttentionRequest(family=family, **{**usual, **fields})


@dataclasses.dataclass(frozen=True, repr=False)
class Step:
    """One call.

    Attributes:
        request: what it asks for. lengths: (S_q, S_k) of each sequence. seed: of the values.
        tensors: query and caches. given: the keyword arguments.
        parts: (lengths of the groups, lengths of their rows) of each of `kv_parts`.
    """

    request: AttentionRequest
    lengths: tuple[tuple[int, int], ...]
    tensors: tuple[Tensor, ...]
    given: dict[str, Any]
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    seed: int = 0

    def __repr__(self) -> str:
        more = f", parts {self.parts}" if self.parts else ""
        return f"Step({self.request.summary()}, lengths {self.lengths}{more}, seed {self.seed})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.request.dtype]

    # ------------------------------------------------------------------------------------------------- the answer

    def answer(self, method: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out, lse) by a function of heads-first tensors, in `dtype`, over the keys that each query sees in the call
        and in the parts."""
        r, outs, lses = self.request, [torch.zeros(0, self.request.heads, self.request.dims[1], dtype=dtype)], []
        lses.append(outs[0][..., 0])
        simple = dataclasses.replace(r, causal="none", window=(-1, -1), chunk=0, lse=True)
        sinks = self.given.get("sinks")
        sinks = None if sinks is None else sinks.to(dtype)
        start = 0
        for n, (s_q, s_k) in enumerate(self.lengths):
            own, bias = self._sequence(n, dtype), self._bias(n, s_q, s_k, dtype)
            # Queries of one sequence may be in different groups of a part.
            for groups, found in itertools.groupby(range(s_q), lambda i, start=start: self._groups(start + i)):
                rows = list(found)
                more = [self._part(*at, dtype) for at in enumerate(groups)]
                k, v = (torch.cat(side).transpose(0, 1)[None] for side in zip(own, *more, strict=True))
                mask = torch.cat([bias[:, rows], bias.new_zeros(r.heads, len(rows), k.shape[2] - s_k)], -1)
                query = self.tensors[0][start : start + s_q][rows].to(dtype).transpose(0, 1)[None]
                out, lse = method(query, k, v, mask[None], sinks, simple)
                outs.append(out[0].transpose(0, 1))
                lses.append(lse[0].transpose(0, 1))
            start += s_q
        return torch.cat(outs), torch.cat(lses)

    def _bias(self, n: int, s_q: int, s_k: int, dtype: torch.dtype) -> Tensor:
        """[H_q, S_q, S_k] added to the logits of sequence n."""
        r, bias = self.request, torch.zeros(self.request.heads, s_q, s_k, dtype=dtype)
        mask = self.given.get("attn_mask")
        if mask is not None:
            mask = mask[n if mask.shape[0] > 1 else 0, :, :s_q, :s_k]
            bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask.to(dtype)
        seen = reference.visible(s_q, s_k, causal=r.causal, window=r.window, chunk=r.chunk)
        return bias if seen is None else bias.masked_fill(~seen, -torch.inf)

    def _sequence(self, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Real keys and values [S_k, H_kv, ...] of a sequence of the call, the new ones included."""
        s_q, s_k = self.lengths[n]
        sides = self._rows(self.tensors[1:], self.given["page_table"][n], s_k, dtype)
        if self.given.get("key") is None or not s_k:
            return sides
        start = sum(q for q, _ in self.lengths[:n])
        found = []
        for rows, name in zip(sides, ("key", "value"), strict=True):
            new = self._as_stored(name, n, self.given[name][start : start + s_q], dtype)
            found.append(torch.cat([rows[: s_k - s_q], new]))
        return found[0], found[1]

    def _as_stored(self, name: str, n: int, new: Tensor, dtype: torch.dtype) -> Tensor:
        cache, scale = self.tensors[1 if name == "key" else 2], self.given.get(f"{name[0]}_scale")
        s_q, s_k = self.lengths[n]
        factor = self._factor(scale, self.given["page_table"][n], range(s_k - s_q, s_k))
        return real(stored(new, factor, cache.dtype), factor, dtype)

    def _groups(self, token: int) -> tuple[int, ...]:
        """The group of a query token in each part."""
        return tuple(next(i for i in range(len(g)) if sum(g[: i + 1]) > token) for g, _ in self.parts)

    def _part(self, index: int, row: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Real keys and values of a row of a part."""
        part: KVPart = self.given["kv_parts"][index]
        own = (part.key_cache, part.value_cache) if self.request.family == "paged" else (part.cache,)
        caches = self.tensors[1:] if own[0] is None else own
        return self._rows(caches, part.page_table[row], self.parts[index][1][row], dtype)

    def _rows(
        self, caches: Sequence[Tensor | None], pages: Tensor, length: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        if self.request.family == "mla":
            cache = caches[0]
            assert cache is not None
            rows = reference.mla_unpack_fp8(cache) if cache.dtype == torch.uint8 else cache
            keys = rows[self._slots(pages, range(length))].to(dtype)[:, None]
            return keys, keys[..., : self.request.dims[1]]
        found = []
        for cache, name in zip(caches, ("k_scale", "v_scale"), strict=True):
            assert cache is not None
            view = cache.transpose(1, 2) if self.request.kv_layout == "HND" else cache
            factor = self._factor(self.given.get(name), pages, range(length))
            found.append(real(view[self._slots(pages, range(length))], factor, dtype))
        return found[0], found[1]

    def _factor(self, scale: Tensor | None, pages: Tensor, tokens: range) -> Tensor | None:
        """The scale of rows of tokens, broadcastable to [.., H_kv, ..]."""
        if scale is None or scale.ndim < 3:
            return scale if scale is None else scale.reshape(-1, 1)
        view = scale.transpose(1, 2) if self.request.kv_layout == "HND" else scale
        factor = view[self._slots(pages, tokens)]
        return factor if scale.ndim == 4 else factor.unsqueeze(-1)

    def _slots(self, pages: Tensor, tokens: range) -> tuple[Tensor, Tensor]:
        token = torch.tensor(list(tokens), dtype=torch.int64)
        size = self.request.page_size
        return pages[token // size].long(), token % size

    def written(self) -> tuple[Tensor, ...]:
        """The caches after the call, as the definition of S9 leaves them."""
        after = tuple(t.clone() for t in self.tensors[1:])
        token = 0
        for n, (s_q, s_k) in enumerate(self.lengths):
            for i in range(s_q):
                if self.request.save_kv_cache and s_k:
                    self._write(after, n, s_k - s_q + i, token)
                token += 1
        return after

    def _write(self, caches: Sequence[Tensor], n: int, position: int, token: int) -> None:
        pages = self.given["page_table"][n]
        for cache, name in zip(caches, ("key", "value"), strict=True):
            view = cache.transpose(1, 2) if self.request.kv_layout == "HND" else cache
            factor = self._factor(self.given.get(f"{name[0]}_scale"), pages, range(position, position + 1))
            row = stored(self.given[name][token][None], factor, cache.dtype)
            view[self._slots(pages, range(position, position + 1))] = row


# ---------------------------------------------------------------------------------------------------------- making


class _Maker:
    """Draws the tensors of a step."""

    def __init__(self, request: AttentionRequest, seed: int) -> None:
        self.request = request
        self.generator = torch.Generator().manual_seed(seed)
        self.free: list[int] = []

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def pool(self, pages: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """(caches, scales) of so many pages, all of them real numbers."""
        r, size = self.request, self.request.page_size
        if r.family == "mla":
            rows = self.normal(pages, size, r.head_dim)
            return ((mla_pack_fp8(rows) if r.kv_dtype == "fp8_e4m3" else rows.to(DTYPES[r.kv_storage])),), {}
        caches, scales = [], {}
        # Real values of order one, so that a relative error means something, over most of the range of integers.
        unit = 0.03 if r.kv_dtype == "int8" else 1.0
        for name, width in (("k_scale", r.head_dim), ("v_scale", r.dims[1])):
            rows = self.normal(pages, size, r.kv_heads, width)
            scale = {
                "": None,
                "tensor": torch.tensor(0.37 * unit),
                "head": (torch.rand(r.kv_heads, generator=self.generator) + 0.5) * unit,
                "token": (torch.rand(pages, size, r.kv_heads, generator=self.generator) + 0.5) * unit,
                "block16": fp4_scales(rows) if r.kv_scales == "block16" else None,
            }[r.kv_scales]
            factor = scale.unsqueeze(-1) if r.kv_scales == "token" and scale is not None else scale
            factor = factor.reshape(-1, 1) if r.kv_scales in ("tensor", "head") and factor is not None else factor
            cache = stored(rows, factor, DTYPES[r.kv_storage])
            if r.kv_layout == "HND":
                cache = cache.transpose(1, 2).contiguous()
                scale = scale.transpose(1, 2).contiguous() if scale is not None and scale.ndim > 2 else scale
            caches.append(cache)
            if scale is not None:
                scales[name] = scale
        return tuple(caches), scales

    def table(self, lengths: Sequence[int]) -> Tensor:
        """int32 [N, columns], from the free pages in random order; one more column than is needed, full of nonsense."""
        counts = [-(-n // self.request.page_size) for n in lengths]
        table = torch.full((len(lengths), max(counts, default=0) + 1), NONSENSE, dtype=torch.int32)
        for row, count in zip(table, counts, strict=True):
            row[:count] = int32(*(self.free.pop() for _ in range(count)))
        return table


def _poison(
    request: AttentionRequest, caches: Sequence[Tensor], tables: Iterable[tuple[Tensor, Sequence[int]]]
) -> None:
    """Fill what no row of the tables owns with what would be seen: NaN, or the largest number."""
    size = request.page_size
    used = torch.zeros(caches[0].shape[0], size, dtype=torch.bool)
    for table, lengths in tables:
        for pages, length in zip(table, lengths, strict=True):
            for t in range(length):
                used[int(pages[t // size]), t % size] = True
    for cache in caches:
        view = cache.transpose(1, 2) if request.kv_layout == "HND" else cache
        # 0x7f is NaN in both kinds of FP8, and in the scales of FP8 rows.
        view = view.view(torch.uint8) if view.dtype.itemsize == 1 else view
        view[~used] = 0x7F if view.dtype == torch.uint8 else torch.nan


def make(
    request: AttentionRequest,
    lengths: Sequence[tuple[int, int]],
    seed: int,
    *,
    new: bool = False,
    mask: str = "",
    parts: Sequence[tuple[Sequence[int], Sequence[int]]] = (),
    own_pools: bool = False,
) -> Step:
    """A step.

    Args:
        new: keys and values of the query tokens are given. mask: `tree`, or "" for a random one where one is asked for.
        parts: (lengths of the groups, lengths of their rows). own_pools: each has a pool of its own.
    """
    r, maker = request, _Maker(request, seed)
    needed = [k for _, k in lengths] + [k for _, rows in parts for k in rows]
    pages = sum(-(-k // r.page_size) for k in needed) + 3
    maker.free = torch.randperm(pages, generator=maker.generator).tolist()
    caches, scales = maker.pool(pages)
    table = maker.table([k for _, k in lengths])
    tables: list[tuple[Tensor, Sequence[int]]] = [(table, [k for _, k in lengths])]
    queries = [q for q, _ in lengths]
    made = []
    for groups, rows in parts:
        pool: tuple[Tensor, ...] = ()
        if own_pools:
            kept, maker.free = maker.free, torch.randperm(pages, generator=maker.generator).tolist()
            pool = maker.pool(pages)[0]
        own = maker.table(rows)
        if own_pools:
            maker.free = kept
            _poison(r, pool, [(own, rows)])
        else:
            tables.append((own, rows))
        starts = int32(0, *torch.tensor(list(groups)).cumsum(0).tolist())
        longest = (max(groups, default=0), max(rows, default=0))
        names = ("key_cache", "value_cache") if r.family == "paged" else ("cache",)
        made.append(KVPart(own, int32(*rows), starts, *longest, **dict(zip(names, pool, strict=False))))
    _poison(r, caches, tables)
    given: dict[str, Any] = {
        "page_table": table,
        "seq_lens": int32(*(k for _, k in lengths)),
        "cu_seqlens_q": int32(0, *torch.tensor(queries).cumsum(0).tolist()),
        "max_seqlen_q": max(queries, default=0),
        "max_seqlen_k": max((k for _, k in lengths), default=0),
        **scales,
    }
    dtype = DTYPES[r.dtype]
    if made:
        given["kv_parts"] = made
    if r.mask != "none":
        given["attn_mask"] = _mask(maker, lengths, given, tree=mask == "tree", dtype=dtype)
    if r.sinks:
        given["sinks"] = maker.normal(r.heads).to(dtype)
    if new:
        for name, width in (("key", r.head_dim), ("value", r.dims[1])):
            rows = maker.normal(sum(queries), r.kv_heads, width).to(dtype)
            given[name] = rows.masked_fill(_padding(lengths)[:, None, None], torch.nan)
    query = maker.normal(sum(queries), r.heads, r.head_dim).to(dtype)
    return Step(r, tuple(lengths), (query, *caches), given, tuple((tuple(g), tuple(k)) for g, k in parts), seed)


def _padding(lengths: Sequence[tuple[int, int]]) -> Tensor:
    """bool [T_q]: queries of padding rows, whose new keys nobody reads."""
    return torch.tensor([not k for q, k in lengths for _ in range(q)], dtype=torch.bool)


def _mask(
    maker: _Maker, lengths: Sequence[tuple[int, int]], given: dict[str, Any], *, tree: bool, dtype: torch.dtype
) -> Tensor:
    rows, columns = given["max_seqlen_q"], given["max_seqlen_k"]
    if not tree:
        keep = torch.rand(len(lengths), 1, rows, columns, generator=maker.generator) < 0.7
        if maker.request.mask == "bool":
            return keep
        return maker.normal(*keep.shape).masked_fill(~keep, -torch.inf).to(dtype)
    # Whatever is outside of a sequence's own rows and columns means nothing.
    mask = torch.rand(len(lengths), 1, rows, columns, generator=maker.generator) < 0.5
    for n, (s_q, s_k) in enumerate(lengths):
        if s_k:
            parents = [int(torch.randint(-1, node, (), generator=maker.generator)) for node in range(s_q)]
            mask[n, 0, :s_q, :s_k] = reference.verify_mask(s_k - s_q, parents)
    return mask


LENGTHS: dict[str, tuple[tuple[tuple[int, int], ...], ...]] = {
    "decode": (((1, 9), (1, 0), (1, 1)), ((1, 4), (1, 13), (1, 8)), ((1, 1),)),
    "extend": (((3, 8), (1, 5), (2, 0)), ((4, 4), (2, 17)), ((5, 11),), ((0, 3), (2, 2)), ((2, 0),)),
}
LENGTHS["prefill"] = LENGTHS["verify"] = LENGTHS["extend"]
"""(S_q, S_k): ends inside a page and at its end, single tokens, padding rows, sequences that ask nothing."""

LONG: dict[str, tuple[tuple[tuple[int, int], ...], ...]] = {
    "decode": (((1, 63), (1, 0), (1, 1), (1, 100), (1, 40), (1, 64)),),
    "extend": (((7, 64), (17, 50), (2, 0)), ((17, 17), (9, 90))),
}
LONG["prefill"] = LONG["verify"] = LONG["extend"]
"""The same for half precision: the largest of a handful of errors is a matter of luck, so there are more rows."""

USUAL: dict[str, tuple[Hashable, ...]] = {
    "family": ("paged",),
    "phase": ("extend", "decode"),
    "causal": ("bottom_right", "none"),
    "page_size": (4, 1, 6),
    "kv_heads": (1, 2),
    "group": (1, 3),
    "head_dim": (8, 16),
    "v_head_dim": (8, 5),
    "kv_layout": ("NHD", "HND"),
    "kv": (("auto", ""),),
    "softcap": (0.0, 2.0),
    "sinks": (False, True),
    "mask": ("none",),
    "lse": (False, True),
    "scale": (None, 0.3),
    "new": (False, True),
    "save_kv_cache": (False, True),
    "window": ((-1, -1),),
}
"""What each field is drawn from."""

LATENT: dict[str, tuple[Hashable, ...]] = {
    "kv_heads": (1,),
    "head_dim": (12,),
    "v_head_dim": (8,),
    "kv_layout": ("",),
    "sinks": (False,),
    "softcap": (0.0,),
    "new": (False,),
    "scale": (0.3,),
}


@st.composite
def steps(draw: st.DrawFn, dtype: str = "float64", **choices: Iterable[Hashable]) -> Step:
    """Steps of an engine; `choices` instead of the usual values of fields. `fixed` in it: fields as they are."""
    fixed: dict[str, Any] = dict(choices.pop("fixed", {}))  # type: ignore[call-overload]
    free = {**USUAL, **{name: tuple(values) for name, values in choices.items()}}
    family = draw(st.sampled_from(free.pop("family")))
    if family == "mla":
        free |= {**LATENT, **{name: tuple(v) for name, v in choices.items() if name in ("head_dim", "v_head_dim")}}
    v: dict[str, Any] = {
        n: values[0] if len(values) == 1 else draw(st.sampled_from(values)) for n, values in free.items()
    }
    v["kv_dtype"], v["kv_scales"] = kv = v.pop("kv")
    if family == "mla" and kv != ("auto", ""):
        v["kv_dtype"], v["kv_scales"] = "fp8_e4m3", "block128"
    new = v.pop("new")
    v["save_kv_cache"] = v["save_kv_cache"] if new else None
    if family == "mla" and v["kv_dtype"] == "fp8_e4m3":
        v["head_dim"], v["v_head_dim"] = 576, 512
    group = v.pop("group")
    relation = {"decode": "one", "prefill": "fewer"}.get(v["phase"], "fewer")
    fields = {"family": family, "dtype": dtype, "layout": "THD", "heads": v["kv_heads"] * group, "s_relation": relation}
    request = AttentionRequest(**{**fields, **v, **fixed})
    lengths = draw(st.sampled_from((LENGTHS if dtype == "float64" else LONG)[request.phase]))
    return make(request, lengths, draw(st.integers(0, 2**31)), new=new, mask="tree" if request.tree else "")


@st.composite
def divided(draw: st.DrawFn, dtype: str = "float64", **choices: Iterable[Hashable]) -> Step:
    """Steps with further keys: groups of any lengths over rows of any lengths, some of none."""
    step: Step = draw(steps(dtype, **choices))
    tokens = sum(q for q, _ in step.lengths)
    longest = 9 if dtype == "float64" else 90
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        groups = [1] * tokens if draw(st.booleans()) else _cut(draw, tokens)
        parts.append((groups, [draw(st.integers(0, longest)) for _ in groups]))
    grouped = any(max(groups, default=0) > 1 for groups, _ in parts)
    relation = "more" if grouped else step.request.s_relation
    request = dataclasses.replace(step.request, kv_parts=len(parts), s_relation=relation)
    by_token = request.kv_scales in ("token", "block16")
    options = {"new": step.given.get("key") is not None, "own_pools": not by_token and draw(st.booleans())}
    return make(request, step.lengths, step.seed, parts=parts, **options)


def _cut(draw: st.DrawFn, tokens: int) -> list[int]:
    """Lengths of consecutive groups, some of them perhaps empty."""
    ends = sorted(draw(st.lists(st.integers(0, tokens), max_size=3)))
    return [b - a for a, b in zip([0, *ends], [*ends, tokens], strict=True)]


# ------------------------------------------------------------------------------------------------------- properties


def run(step: Step, rows: Sequence[Row], names: Sequence[str], out: Tensor | None = None, **options: Any) -> Any:
    """The step by the reference behind the rewrites that lead to `rows`, which must be `names`."""
    target = Lowered(rows, "autograd", names, **options)
    given = {**step.given} if out is None else {**step.given, "out": out}
    return bind(target.plan(step.request), target.load, target.load).forward(*step.tensors, **words(given))


def exact(step: Step, rows: Sequence[Row], names: Sequence[str], **options: Any) -> None:
    """In float64 the numbers of the reference, relative to the largest of them (outputs are averages of both signs).

    The caches are as they should be after it, no other input is written to, and `out` is honoured.
    """
    right, lse = step.answer(reference_attention, torch.float64)
    caches = step.written()
    others = {name: t.clone() for name, t in _tensors(step)}
    out = torch.full_like(right, torch.nan)
    got = run(step, rows, names, out, **options)
    assert isinstance(got, tuple) == step.request.lse
    if step.request.lse:
        got, got_lse = got
        assert got_lse.dtype == torch.float64
        close("lse", got_lse, lse)
    assert got is out
    close("out", got, right)
    for name, before in others.items():
        after = dict(_tensors(step))[name]
        assert same(after, before), f"{name} was written to"
    for i, (after, want) in enumerate(zip(step.tensors[1:], caches, strict=True)):
        assert same(after, want), f"cache {i} is not as it should be"


def gates(step: Step, rows: Sequence[Row], names: Sequence[str], **options: Any) -> None:
    """In the step's dtype both gates of conformance."""
    right = step.answer(reference_attention, torch.float64)
    plain = step.answer(plain_attention, step.dtype)
    softcap = bool(step.request.softcap)
    got = run(step, rows, names, **options)
    results = got if isinstance(got, tuple) else (got,)
    for kind, actual, want, usual in zip(("out", "lse"), results, right, plain, strict=False):
        finding, _ = compare(kind, actual, want, usual, step.dtype, softcap, kind)  # type: ignore[arg-type]
        assert finding is None, str(finding)


def close(name: str, got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, {tuple(want.shape)} expected"
    finite = want.isfinite()
    assert torch.equal(got[~finite], want[~finite]), f"{name}: infinities"
    if finite.any():
        error, size = (got - want)[finite].abs().max(), want[finite].abs().max()
        # Also false for NaN.
        assert bool(error <= 1e-12 * size), f"{name}: off by {float(error):.3g} of {float(size):.3g}"


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))


def _tensors(step: Step) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the call but the caches."""
    yield "query", step.tensors[0]
    for name, value in step.given.items():
        if isinstance(value, Tensor):
            yield name, value
    for i, part in enumerate(step.given.get("kv_parts", ())):
        for name, value in part._asdict().items():
            if isinstance(value, Tensor):
                yield f"kv_parts[{i}].{name}", value
