"""This module finds the limits of every backend by asking its capability rows: no cell of the support matrix is written
by hand.

A backend is asked on every architecture, phase and page size that its own rows name, for a plain request first and
then for the same request with one feature. A feature is *native* where it is accepted with no rewrite beyond the plain
request's, *lowered* where it needs one more, which a row names or selection's planner finds, else *no*.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..contract import BackendInfo, Has, OneOf, Provider, Rejected, Row
from ..contract.capability import taken
from ..contract.names import parts
from ..contract.request import made
from ..lowering import Plan, Planner, Stop, Ways
from ..registry.defects import Narrow, narrowing
from ..registry.manager import PluginManager, get_manager
from ..selection.aliases import is_of
from ..selection.inspection import catalogue, ordered_offers
from ..selection.offers import Offer
from ..selection.select import Catalogue
from .questions import MLA_SCALE, ONE_KIND_OF_SCALES, SCALES

__all__ = ["Limits", "Sheet", "limits", "shared_page"]

PAGES = (1, 16, 32, 64, 128, 256)
LLM = {"heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128}
LATENT = {"heads": 128, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "scale": MLA_SCALE}
UNABSORBED = {"heads": 128, "kv_heads": 128, "head_dim": 192, "v_head_dim": 128, "scale": None}

Lowerings = frozenset[str]
Place = tuple[str, str, int]
"""(architecture, phase, page size)."""
Ask = Callable[[Place, Mapping[str, Any]], Lowerings | None]
Asking = Callable[[Provider, Stop], Lowerings | None]
STEPS = 2
"""Rewrites in a row: one of the plain request, one more for a feature."""
PAGING = {
    "finer_pages": "multiples lowered: finer_pages",
    "page_table_to_tokens": "else lowered: page_table_to_tokens",
}
"""The rewrites of pages, and what a cell says of them."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """A line of a table: a backend, the platforms on which its cells are the same, and the cells."""

    name: str
    platforms: tuple[str, ...]
    planned: bool
    cells: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Sheet:
    """A sheet is one table of limits."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[Limits, ...]

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {
                "name": row.name,
                "platforms": list(row.platforms),
                "planned": row.planned,
                "cells": dict(zip(self.columns, row.cells, strict=True)),
            }
            for row in self.rows
        ]
        return {"title": self.title, "columns": list(self.columns), "rows": rows}


def limits() -> tuple[Sheet, ...]:
    """Make every table, over all registered backends, planned ones judged as if built. It takes seconds, once a process
    and set of plugins."""
    return _limits(get_manager(), get_manager().changes)


@functools.lru_cache(maxsize=2)
def _limits(manager: PluginManager, changes: int) -> tuple[Sheet, ...]:
    known = catalogue({})
    sheets = (
        ("dense", "Dense", "dense", tuple(DENSE_FEATURES), _dense("dense")),
        ("packed", "Packed (varlen)", "varlen", tuple(DENSE_FEATURES), _dense("varlen")),
        ("serving_mha", "Serving, MHA", "paged", ("page size", *MHA_FEATURES), _mha),
        ("serving_mla", "Serving, MLA", "mla", ("page size", *MLA_FEATURES), _mla),
        ("linear", "Linear attention (GDN and KDA)", "linear", tuple(LINEAR_PHASES), _linear),
    )
    return tuple(
        Sheet(key, title, columns, _merged(known, family, probe)) for key, title, family, columns, probe in sheets
    )


def _merged(known: Catalogue, family: str, probe: Probe) -> tuple[Limits, ...]:
    """Keep the backends that answer, built ones first; equal answers of one name share a line."""
    lines: dict[tuple[bool, str, tuple[str, ...]], list[str]] = {}
    ways: dict[str, Ways] = {}
    for offer in ordered_offers(known):
        if offer.info.platform not in ways:  # they come by platform: what was made for the one before is of no use
            ways = {offer.info.platform: Ways(lambda _: "another")}
        asked = _ProbedBackend(offer.info, family, known, ways[offer.info.platform], get_manager().narrows(offer.info))
        cells = probe(asked) if asked.providers else None
        if cells is not None:
            lines.setdefault((asked.planned, offer.info.name, cells), []).append(offer.info.platform)
    return tuple(
        Limits(name, tuple(lines[planned, name, cells]), planned, cells) for planned, name, cells in sorted(lines)
    )


class _ProbedBackend:
    """A backend that is asked, with its providers that have anything to say about a family."""

    def __init__(self, info: BackendInfo, family: str, known: Catalogue, ways: Ways, narrows: bool) -> None:
        self.info, self.known, self._ways = info, known, ways
        rows = {p: tuple(row for row in p.rows if speaks_of(row, family)) for p in info.providers}
        spoken = {p: of_family for p, of_family in rows.items() if of_family}
        # What is planned answers only where nothing is built: a cell is of what can be called.
        self.providers = {p: of_family for p, of_family in spoken.items() if not p.planned} or spoken
        self.planned = all(p.planned for p in self.providers)
        self.archs = self._named("arch") or [""]
        told = [d.when["arch"] for p in info.providers for d in p.defects if "arch" in d.when]
        told += self._constraints("arch")
        first: dict[Any, str] = {}
        # Architectures that no row tells apart have one answer; a plugin's own say may be about any.
        self._asked_as = {
            arch: first.setdefault(arch if narrows else tuple(one.reason(arch) is None for one in told), arch)
            for arch in self.archs
        }
        self.features = tuple(dict.fromkeys(c.member for c in self._constraints("features") if isinstance(c, Has)))
        self.methods = ["", *self._named("method")]
        self._said: dict[tuple[Stop, str], Lowerings | None] = {}

    def _constraints(self, field: str) -> Iterator[Any]:
        for rows in self.providers.values():
            for row in rows:
                yield from (rule[field] for rule in (row.when, row.allows) if field in rule)

    def _named(self, field: str) -> list[str]:
        words = (w for c in self._constraints(field) if isinstance(c, OneOf) for w in c.values)
        return sorted(dict.fromkeys(w for w in words if w), key=lambda w: (len(w), w))

    def once(self, ask: Ask) -> Ask:
        """Ask once for the architectures that have one answer."""

        def answer(place: Place, feature: Mapping[str, Any]) -> Lowerings | None:
            place = (self._asked_as[place[0]], *place[1:])
            key = (place, *feature.items())
            if key not in said:
                said[key] = ask(place, feature)
            return said[key]

        said: dict[Any, Lowerings | None] = {}
        return answer

    def taken(self, **fields: Any) -> Lowerings | None:
        """Return the rewrites that rows declare for a request; None = they refuse it."""
        return self._said_of(fields, self._taken)

    def easiest(self, requests: Iterable[Mapping[str, Any]]) -> Lowerings | None:
        """Return the fewest rewrites over several ways to ask for one thing: those that rows declare, else the
        planner's."""
        ways = list(requests)
        for ask in (self._taken, self._rewritten):
            best: Lowerings | None = None
            for fields in ways:
                found = self._said_of(fields, ask)
                if found is not None and (best is None or len(found) < len(best)):
                    best = found
                if best is not None and not best:
                    break
            if best is not None:
                return best
        return None

    def _said_of(self, fields: Mapping[str, Any], ask: Asking) -> Lowerings | None:
        where = {"platform": self.info.platform, "features": self.features, **fields}
        methods = [fields["method"]] if fields.get("method") else self.methods
        for method in methods:
            stop = self._ways.at(made(**{**where, "method": method}).normalised())
            key = (stop, ask.__name__)
            if key not in self._said:
                answers = (ask(provider, stop) for provider in self.providers)
                self._said[key] = min((a for a in answers if a is not None), key=len, default=None)
            if (said := self._said[key]) is not None:
                return said
        return None

    def _taken(self, provider: Provider, stop: Stop) -> Lowerings | None:
        verdict = taken(self.providers[provider], stop.request, stop.active)
        if verdict is None:
            return None
        if not provider.planned and isinstance(self._narrow(provider)(stop.request), Rejected):
            return None
        if verdict.lowerings and not provider.planned and self._plan(provider, stop, verdict.lowerings) is None:
            return None
        return frozenset(verdict.lowerings)

    def _rewritten(self, provider: Provider, stop: Stop) -> Lowerings | None:
        plan = None if provider.planned else self._plan(provider, stop)
        return None if plan is None else frozenset(plan.names)

    def _plan(self, provider: Provider, stop: Stop, only: tuple[str, ...] | None = None) -> Plan | None:
        """Plan rewrites as selection would, in as many as a cell has words for."""
        narrow = self._narrow(provider)
        return Planner(provider.rows, narrow=narrow, only=only, ways=self._ways).plan_at(stop, STEPS)

    def _narrow(self, provider: Provider) -> Narrow:
        """Narrow with the faults of every version, as the matrix says the same on every machine."""
        return narrowing(self.known.narrow, self.info, provider.defects, named=True)


def speaks_of(row: Row, family: str) -> bool:
    """Tell whether a row declares something for a family."""
    rule = row.when.get("family") or row.allows.get("family")
    return rule is not None and rule.reason(family) is None


Probe = Callable[[_ProbedBackend], "tuple[str, ...] | None"]

DENSE: dict[str, Any] = {"heads": 8, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128}
DENSE_FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"causal": "bottom_right"},
    "S_q != S_k": {"causal": "bottom_right", "s_relation": "fewer"},
    "GQA": {"kv_heads": 2},
    "window": {"causal": "bottom_right", "window": (127, -1)},
    "softcap": {"softcap": 50.0},
    "sinks": {"sinks": True},
    "mask": {"mask": "bool"},
    "LSE": {"lse": True},
    "gradients": {"grad": ("query", "key", "value")},
    "dropout": {"dropout": 0.1},
}


def _dense(family: str) -> Probe:
    def probe(asked: _ProbedBackend) -> tuple[str, ...] | None:
        @asked.once
        def ask(place: Place, feature: Mapping[str, Any]) -> Lowerings | None:
            plain = {**DENSE, "family": family, "arch": place[0]}
            return asked.easiest({**plain, "dtype": dtype, **feature} for dtype in ("bfloat16", "float16", "float32"))

        return _cells([(arch, "", 0) for arch in asked.archs], ask, DENSE_FEATURES)

    return probe


VERIFY = {"phase": "verify", "s_relation": "fewer", "causal": "bottom_right"}
MHA_FEATURES: dict[str, dict[str, Any]] = {
    "FP8 KV": {"kv_dtype": "fp8_e4m3"},
    "FP4 KV": {"kv_dtype": "fp4_e2m1"},
    "topk = 1": {**VERIFY, "spec_topk": 1},
    "topk > 1": {**VERIFY, "spec_topk": 4, "tree": True},
    "window": {"window": (127, -1)},
    "multimodal": {"multimodal": True},
}
MLA_FEATURES: dict[str, dict[str, Any]] = {
    **{name: MHA_FEATURES[name] for name in ("FP8 KV", "FP4 KV", "topk = 1", "topk > 1")},
    "chunked prefix": {"chunked_prefix": True},
}


def _mha(asked: _ProbedBackend) -> tuple[str, ...] | None:
    return _serving(asked, {"family": "paged", **LLM}, MHA_FEATURES, ({},))


def _mla(asked: _ProbedBackend) -> tuple[str, ...] | None:
    return _serving(asked, {"family": "mla", **LATENT}, MLA_FEATURES, ({}, UNABSORBED))


def _serving(
    asked: _ProbedBackend,
    base: Mapping[str, Any],
    features: Mapping[str, Mapping[str, Any]],
    widths: tuple[Mapping[str, Any], ...],
) -> tuple[str, ...] | None:
    places = [(a, phase, page) for a in asked.archs for phase in ("extend", "decode") for page in PAGES]

    @asked.once
    def ask(place: Place, feature: Mapping[str, Any]) -> Lowerings | None:
        if feature.get("spec_topk") and "phase" in feature and ask(place, {"spec_topk": feature["spec_topk"]}) is None:
            # Every phase of a server that speculates is asked so: who refuses that cannot be named to verify.
            return None
        plain = {**base, **_step(place), **feature}
        stored = feature.get("kv_dtype", "")
        one = ONE_KIND_OF_SCALES.get((base["family"], stored))
        scales = (one,) if one else SCALES if stored else ("",)
        # Uncompressed heads are a way to serve a prefix, never a decode step.
        shapes = widths if feature.get("chunked_prefix") else widths[:1]
        return asked.easiest({**plain, **shape, "kv_scales": kind} for shape in shapes for kind in scales)

    plain = {place: found for place in places if (found := ask(place, {})) is not None}
    cells = _cells(places, ask, features)
    return None if cells is None else (_pages(plain), *cells)


def _step(place: Place) -> dict[str, Any]:
    """The fields of a request that say where it is served, in which phase and in which pages."""
    arch, phase, page = place
    relation, causal = ("one", "none") if phase == "decode" else ("fewer", "bottom_right")
    return {"arch": arch, "phase": phase, "s_relation": relation, "causal": causal, "page_size": page}


def shared_page(names: Mapping[str, str], platform: str, arch: str, sizes: Sequence[int]) -> int | None:
    """Return the first page size that all backends take which are named, as their rows and the planner say.

    Args:
        names: extend or decode -> the backend of that phase. platform, arch: who is asked, where the backend is of
            that platform and names that architecture; else any that it has may take a size.
        sizes: tokens per page, in the order of preference.

    Returns:
        None where no size is taken by all. A backend has a say in the phases that it serves in pages of some size, by
        its libraries that are installed here; where none is, by all.
    """
    said = []
    for phase, name in names.items():
        bare, kind = parts(name.partition("@")[0])
        named = [o for o in catalogue().offers if bare in (o.info.name, *(a.name for a in o.info.aliases))]
        named = [one for one in named if one.info.platform == platform] or named
        for family in ("paged", "mla"):
            said.append({size for offer in named for size in _sizes(offer, kind, family, phase, arch, sizes)})
    return next((size for size in sizes if all(size in some for some in said if some)), None)


def _sizes(offer: Offer, kind: str, family: str, phase: str, arch: str, sizes: Iterable[int]) -> set[int]:
    """Return the page sizes in which a backend serves a plain request, on an architecture if it names that one."""
    known, own = catalogue({}), [p for p in offer.info.providers if is_of(p.name, kind)]
    own = [p for p in own if p.name not in offer.missing] or own
    info = dataclasses.replace(offer.info, providers=tuple(own), aliases=())
    asked = _ProbedBackend(info, family, known, Ways(lambda _: "another"), get_manager().narrows(offer.info))
    base = {**(LLM if family == "paged" else LATENT), "family": family}
    archs = [arch] if arch in asked.archs else asked.archs
    return {s for s in sizes if any(asked.easiest([{**base, **_step((one, phase, s))}]) is not None for one in archs)}


def _pages(plain: Mapping[Place, Lowerings]) -> str:
    """Say which page sizes a kernel reads itself, by architecture where they differ, and what serves the others."""
    per_arch: dict[tuple[int, ...], list[str]] = {}
    for arch in dict.fromkeys(a for a, _, _ in plain):
        native = tuple(p for p in PAGES if any(not plain.get((arch, ph, p), {"-"}) for ph in ("extend", "decode")))
        per_arch.setdefault(native, []).append(arch)
    texts = []
    for native, archs in per_arch.items():
        words = "any" if native == PAGES else ", ".join(map(str, native)) or "none"
        texts.append(words + (f" ({', '.join(archs)})" if len(per_arch) > 1 else ""))
    found = {word for needs in plain.values() for word in needs}
    return "; ".join([*texts, *(said for name, said in PAGING.items() if name in found)])


LINEAR_PHASES: dict[str, dict[str, Any]] = {
    "decode": {"phase": "decode", "s_relation": "one"},
    "prefill": {"phase": "prefill", "s_relation": "equal"},
    "verify, chain": {"phase": "verify", "s_relation": "equal", "state_out": "every"},
    "verify, tree": {"phase": "verify", "s_relation": "equal", "state_out": "every", "tree": True},
}
LINEAR_WAYS = tuple(
    {"state_layout": layout, **gates}
    for layout in ("KV", "VK")
    for gates in ({}, {"raw_gates": "softplus", "qk_norm": True})
)
"""The layout of a state, and who computes gates and norms, are for the caller to choose."""


def _linear(asked: _ProbedBackend) -> tuple[str, ...] | None:
    def ask(arch: str, method: str, phase: str) -> Lowerings | None:
        shape = {"family": "linear", "arch": arch, "method": method, "heads": 16, "kv_heads": 16, "head_dim": 128}
        return asked.easiest({**shape, **way, **LINEAR_PHASES[phase]} for way in LINEAR_WAYS)

    cells = []
    for phase in LINEAR_PHASES:
        found = {(a, m): needs for a in asked.archs for m in ("gdn", "kda") if (needs := ask(a, m, phase)) is not None}
        native = [place for place, needs in found.items() if not needs]
        archs, methods = ([*dict.fromkeys(place[i] for place in native or found)] for i in range(2))
        labels = [] if len(methods) == 2 else [m.upper() for m in methods]
        labels += [", ".join(archs)] if set(archs) != set(asked.archs) else []
        words = "native" if native else "lowered: " + ", ".join(sorted({word for n in found.values() for word in n}))
        cells.append("no" if not found else f"{words} ({'; '.join(labels)})" if labels else words)
    return None if all(cell == "no" for cell in cells) else tuple(cells)


def _cells(places: list[Place], ask: Ask, features: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...] | None:
    """Make one cell per feature, over the places where the plain request is served; None = it is served nowhere."""
    plain = {place: found for place in places if (found := ask(place, {})) is not None}
    if not plain:
        # Some kernels always need one feature (a causal mask, an FP8 cache): any of them makes the place one of theirs.
        plain = {p: frozenset() for p in places if any(ask(p, feature) is not None for feature in features.values())}
    if not plain:
        return None
    return tuple(_cell(plain, {p: ask(p, feature) for p in plain}) for feature in features.values())


def _cell(plain: Mapping[Place, Lowerings], found: Mapping[Place, Lowerings | None]) -> str:
    extra = {place: needs - plain[place] for place, needs in found.items() if needs is not None}
    if not extra:
        return "no"
    native = [place for place, more in extra.items() if not more]
    others = [place for place, more in extra.items() if more]
    names = ", ".join(sorted({word for more in extra.values() for word in more}))
    places = list(plain)
    if not others:
        return "native" + _only(native, places)
    if not native:
        return f"lowered: {names}{_only(others, places)}"
    if len(others) < len(native) and len(extra) == len(plain):
        return f"native; lowered: {names}{_only(others, places)}"
    return f"native{_only(native, places)}; else lowered: {names}"


def _only(places: list[Place], out_of: list[Place]) -> str:
    """Say where a feature is limited to: ' (sm90, decode, page 1)'; empty when it is limited to nothing."""
    labels = []
    for axis, name in enumerate(("", "", "page ")):
        mine = list(dict.fromkeys(place[axis] for place in places))
        if set(mine) != {place[axis] for place in out_of}:
            labels.append(name + ", ".join(map(str, mine)))
    return f" ({'; '.join(labels)})" if labels else ""
