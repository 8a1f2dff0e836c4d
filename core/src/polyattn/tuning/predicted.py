"""This module predicts the times of backends where nothing was measured, from what was measured on devices of the same
architecture.

A prediction is the roofline of the request on this device (its operations and bytes over the device's rates) times how
far the nearest measured requests were from theirs, averaged by nearness; and how the backends of each stood to one
another, averaged the same way. Rates of the device that was measured and of this one go into what is near: a request
that is bound by memory on one and by arithmetic on the other is not. `benchmarks/shipped_tables.py` says how good
choices by this are. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..contract import AttentionRequest
from ..contract.request import relation
from ..errors import ConfigError
from .keys import request_of
from .rows import Row, canonical
from .times import Lengths, Measured

__all__ = ["Model", "Rates", "rates_of"]

_POINTS, _LEAST = 16, 3
"""Measurements that a prediction is made of; a group of requests with fewer than the second is not predicted."""
_REACH = 0.5
"""Distance in which the weight of a measurement falls by e. Distances are about octaves, see `_place`."""
_LIGHT = 0.02
"""Measurements of less weight beside the nearest are left out."""
_FARTHEST, _FARTHEST_OF_FEW = 4.0, 3.0
"""A request that is farther than this from all that was measured is not predicted; the second where that is less than
`_POINTS`."""
_GRID = 16
"""Most lengths that are looked at where those of the calls are not known."""
_LAUNCH = 5.0
"""Microseconds that no kernel of a library is faster than by much."""
_SLOW = 4
"""Backends that always take more than so many times as long as the fastest are left out."""
_TILE = 64
_LARGE = 14
"""Log2 of tokens, and of microseconds of the roofline, from which on more of them change nothing about who is fast."""
_KEPT = 256
_as_text = json.JSONEncoder(sort_keys=True).encode
_Near = tuple[Sequence["_Point"], Sequence[tuple[float, ...]]]
"""Measurements, and their places."""
_Placed = tuple[tuple[float, ...], tuple[float, ...], float]
_BACKWARD = 3.5
"""Operations of a forward with its backward, in forwards."""
_HALVES = ("bfloat16", "float16")
_SIZES = ("heads", "kv_heads", "head_dim", "v_head_dim", "layout", "page_size", "window", "sinks", "softcap")
_IDLE = ("s_relation", "scale", "lse", "large", "multimodal", "save_kv_cache")
_SEEN = {*_SIZES, *_IDLE}
"""Fields that `_place` sees, or that hardly matter. All others tell groups apart, which say nothing of each other."""


class Rates(NamedTuple):
    """What a device does by its data sheet.

    Attributes:
        matmul: 10^12 operations a second of dense matrix products of 16-bit floats. read: 10^9 bytes a second from its
            memory. units: of it, such as streaming multiprocessors, each of which works on a tile.
    """

    matmul: float
    read: float
    units: int


def rates_of(data: Any, where: str) -> dict[str, Rates]:
    """The rates of devices by name, as a plugin's table of measurements has them.

    Raises:
        ConfigError: they are none; `where` begins the message.
    """
    found = {}
    for name, one in data.items() if isinstance(data, dict) else [("", data)]:
        if not isinstance(one, dict) or set(one) != set(Rates._fields) or not all(map(_is_rate, one.values())):
            raise ConfigError(
                f"{where}: the rates of {name or 'its devices'} are {one!r}; give for each device its "
                f"{', '.join(Rates._fields)}, numbers above 0"
            )
        found[name] = Rates(**one)
    return found


def _is_rate(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


class _Point(NamedTuple):
    """A measurement. at, flags: its place. base: ln of the time of its group's usual backend over the roofline; beside:
    of each backend, by its number in the group, ln of its time over that one's, and of the host's microseconds, 0 = not
    timed."""

    at: tuple[float, ...]
    flags: tuple[float, ...]
    text: str
    device: str
    lengths: Lengths
    base: float
    beside: Sequence[tuple[int, float, float]]
    rule: str


class _Group(NamedTuple):
    """Measurements that say something of each other. names: of backends. host: microseconds until a call returns, of
    all backends or, where nobody's was timed, of none. devices: that they are of, in words."""

    points: Sequence[_Point]
    names: Sequence[str]
    host: Mapping[str, float]
    devices: str


@dataclasses.dataclass(frozen=True)
class Model:
    """Predicts times on one device.

    Attributes:
        groups: what was measured, by what no prediction crosses. rates: of this device.
    """

    groups: Mapping[str, _Group]
    rates: Rates
    _near: dict[tuple[str, tuple[float, ...], str], _Near] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Row], rates: Mapping[str, Rates], device: str, arch: str) -> Model | None:
        """Build the model of a device from measurements; None where none is of a device of its architecture with known
        rates. A device without rates is taken for the one that most were measured on."""
        groups: dict[str, list[Row]] = {}
        for row in rows:
            if arch and row.place.arch == arch and row.place.device in rates:
                groups.setdefault(_group(row.key["request"]), []).append(row)
        read = {name: _read(some, rates) for name, some in groups.items() if len(some) >= _LEAST}
        kept = {name: group for name, group in read.items() if len(group.points) >= _LEAST}
        if not kept:
            return None
        devices = Counter(point.device for group in kept.values() for point in group.points)
        return cls(kept, rates[device if device in rates else devices.most_common(1)[0][0]])

    def at(
        self, request: AttentionRequest, key: Mapping[str, Any], lengths: Lengths, *, own: bool = True
    ) -> Measured | None:
        """Predict the times of a request at lengths of it, None where too little is known.

        Args:
            key: its `request_key`. own: False leaves out what was measured of this very request.
        """
        group = _group(key)
        if group not in self.groups:
            return None
        return self._predict(group, request, lengths, "" if own else canonical(key))

    def grid(self, request: AttentionRequest, key: Mapping[str, Any], *, own: bool = True) -> Sequence[Measured]:
        """Predict the times of a request at lengths that others like it were measured at, the arguments as `at`."""
        group = _group(key)
        if group not in self.groups:
            return ()
        but = "" if own else canonical(key)
        points = self.groups[group].points
        lengths = Counter(p.lengths for p in points if relation(*p.lengths[1:]) == request.s_relation)
        some = [self._predict(group, request, one, but) for one, _ in lengths.most_common(_GRID)]
        return [one for one in some if one is not None]

    def _candidates(self, group: str, flags: tuple[float, ...], but: str) -> _Near:
        """Those that differ least in what is or is not, as few of such kinds as have enough measurements."""
        key = (group, flags, but)
        if key not in self._near:
            if len(self._near) >= _KEPT:
                self._near.clear()
            points = [p for p in self.groups[group].points if p.text != but]
            points.sort(key=lambda p: math.dist(flags, p.flags))
            enough = len(points) >= _LEAST
            last = math.dist(flags, points[min(_POINTS, len(points)) - 1].flags) if enough else 0.0
            near = [p for p in points if math.dist(flags, p.flags) <= last] if enough else []
            # Where all that is or is not is the same, sizes alone tell how far they are.
            self._near[key] = near, [p.at if last else p.at[: len(p.at) - len(flags)] for p in near]
        return self._near[key]

    def _predict(self, group: str, request: AttentionRequest, lengths: Lengths, but: str) -> Measured | None:
        here, flags, roof = _place(request, lengths, self.rates)
        points, places = self._candidates(group, flags, but)
        if not points:
            return None
        offs = list(map(math.dist, places, itertools.repeat(here[: len(places[0])])))
        order = sorted(range(len(offs)), key=offs.__getitem__)[:_POINTS]
        nearest = offs[order[0]]
        farthest = _FARTHEST if len(points) >= _POINTS else _FARTHEST_OF_FEW
        if nearest > farthest or all(points[i].flags[0] != flags[0] for i in order):
            return None
        _, names, host, devices = self.groups[group]
        total, base, count = 0.0, 0.0, 0
        # By the numbers of backends: a prediction is made for every new length.
        above, below = [0.0] * len(names), [0.0] * len(names)
        issued, known = [0.0] * len(names), [0.0] * len(names)
        for i in order:
            weight = math.exp((nearest - offs[i]) / _REACH)
            if weight < _LIGHT:
                break
            point = points[i]
            count += 1
            total += weight
            base += weight * point.base
            for number, value, host_value in point.beside:
                above[number] += weight * value
                below[number] += weight
                if host_value:
                    issued[number] += weight * host_value
                    known[number] += weight
        base = roof + base / total
        times, took = {}, {}
        for name, x, y, issue, timed in zip(names, above, below, issued, known, strict=True):
            if y:
                times[name] = math.exp(base + x / y)
                # Who has several kernels may need more of the host for one than for another.
                if timed:
                    took[name] = math.exp(issue / timed)
                elif name in host:
                    took[name] = host[name]
        said = f"from {count} measurement{'s' if count > 1 else ''} on {devices}"
        return Measured(lengths, times, "", True, took, points[order[0]].rule, predicted=said)


def _read(rows: Sequence[Row], rates: Mapping[str, Rates]) -> _Group:
    """The measurements of a group, without those that lack the backend which most of them have. Of several such it is
    the one nearest to the fastest: who takes as long for little work as for much is no measure of others.

    Lengths are rounded to powers of two: that error is one of all backends of a measurement, and not in how they stand
    to each other.
    """
    named = [{_whole(row, name): time for name, time in row.value["times"].items()} for row in rows]
    losses: dict[str, list[float]] = {}
    for times in named:
        for name, time in times.items():
            losses.setdefault(name, []).append(math.log(time / min(times.values())))
    usual = max(losses, key=lambda name: (len(losses[name]), -statistics.median(losses[name])))
    quick = {usual, *(name for times in named for name, time in times.items() if time <= _SLOW * min(times.values()))}
    numbers = {name: number for number, name in enumerate(sorted(quick))}
    hosts: dict[str, list[float]] = {}
    found = []
    for row, times in zip(rows, named, strict=True):
        try:
            request = request_of(row.key["request"])
        except ConfigError:
            continue
        if usual not in times:
            continue
        lengths = (row.key["batch"], row.key["q"], row.key["k"])
        at, flags, roof = _place(request, lengths, rates[row.place.device])
        issued = {_whole(row, name): time for name, time in row.value.get("host", {}).items()}
        for name, time in issued.items():
            hosts.setdefault(name, []).append(time)
        found.append(
            _Point(
                at,
                flags,
                canonical(row.key["request"]),
                row.place.device,
                lengths,
                math.log(times[usual]) - roof,
                [
                    (numbers[name], math.log(time / times[usual]), math.log(issued.get(name, 1.0)))
                    for name, time in times.items()
                    if name in numbers
                ],
                _whole(row, row.value.get("rule", "")),
            )
        )
    host = {name: statistics.median(some) for name, some in hosts.items()}
    if host:
        # Who was measured only where no host was timed is not taken for one that costs none: it has the others' median.
        usually = statistics.median(host.values())
        host |= {name: usually for name in losses if name not in host}
    return _Group(found, tuple(numbers), host, " and ".join(dict.fromkeys(point.device for point in found)))


def _whole(row: Row, name: str) -> str:
    """NAME/KIND where that was written down."""
    by = row.value.get("by", {})
    return f"{name}/{by[name]}" if name in by else name


def _group(key: Mapping[str, Any]) -> str:
    """What no prediction crosses, as text."""
    kept = {name: value for name, value in key.items() if name not in _SEEN}
    if kept.get("causal") in ("none", "bottom_right"):
        del kept["causal"]
    if kept.get("kv_layout") == "NHD":  # as where nothing is said
        del kept["kv_layout"]
    if "grad" in kept:  # that of the LSE is a number more for each row
        kept["grad"] = [name for name in kept["grad"] if name != "lse"]
    if kept.get("dtype", "bfloat16") in _HALVES:
        kept["dtype"] = "half"
    if str(kept.get("kv_dtype", "")).startswith("fp8") and kept.get("kv_scales") in (None, "", "tensor"):
        kept = {name: value for name, value in kept.items() if name not in ("kv_dtype", "kv_scales")}
    return _as_text(kept)


def _place(request: AttentionRequest, lengths: Lengths, rates: Rates) -> _Placed:
    """Where a request stands among others, in numbers that tell kernels apart by about as much where they differ by
    one; those of them that only say what is or is not, once more; and ln of the microseconds of the roofline."""
    log2 = math.log2
    batch, s_q, s_k = lengths
    heads, kv_heads, dim, page = request.heads, request.kv_heads, request.head_dim, request.page_size
    v_dim, left, right = request.v_head_dim or dim, *request.window
    causal = request.causal != "none"
    keys: float = s_k  # that a query sees
    if causal and s_q > 1:
        keys = s_k - (s_q - 1) / 2 if s_k >= s_q else s_k / 2
    if left >= 0:
        keys = min(keys, left + 1 + (0 if causal else max(right, 0)))
    touched = min(s_k, s_q + left) if left >= 0 else s_k
    eight = request.kv_dtype.startswith("fp8")
    operations = 2.0 * batch * heads * s_q * keys * (dim + v_dim) * (_BACKWARD if request.grad else 1)
    width = dim if request.family == "mla" else dim + v_dim
    read = batch * kv_heads * touched * width * (1 if eight else 2) + batch * heads * s_q * (dim + v_dim) * 2
    compute, memory = operations / rates.matmul / 1e6, read / rates.read / 1e3
    bound, group = max(compute, memory), heads / kv_heads
    tiles = batch * kv_heads * max(1.0, s_q * group / _TILE)
    flags = (
        4.0 * eight,  # other kernels altogether: `_predict` wants to have seen some
        2.0 * causal,
        2.0 * (left >= 0),
        2.0 * request.sinks,
        2.0 * (request.softcap != 0),
        2.0 * (v_dim != dim),
        float(s_q > s_k),
        2.0 * (s_q == 1),
    )
    sizes = (
        0.35 * min(log2(bound), _LARGE),
        0.3 * max(min(log2(compute / memory), 3.0), -6.0),
        max(min(log2(tiles / rates.units), 4.0), -6.0),
        log2(dim),
        float(dim & (dim - 1) != 0),
        0.7 * log2(group),
        0.5 * (not log2(group).is_integer()),
        0.8 * min(log2(s_q), _LARGE),
        0.5 * (log2(s_k) if s_q == 1 else min(log2(s_k), _LARGE)),
        0.3 * (request.layout == "BHSD"),
        0.1 * log2(max(page, 16)),
        0.3 * log2(left + 2) if left >= 0 else 0.0,
    )
    return (*sizes, *flags), flags, math.log(bound + _LAUNCH)
