"""Planted bugs: backends that are right but for one mistake, each of a kind that kernels and adapters really make.

They show that the checks find something: `polyattn conform --planted-bugs` and the tests of `polyattn fuzz` run over
them. A bug is planted in the reference, so that nothing else can be what was found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..backends.reference_backend import Reference
from ..contract import API_VERSION, AttentionRequest, BackendInfo, Bound
from ..contract.hookspecs import hookimpl
from ..errors import InvalidInputError, did_you_mean
from ..registry.manager import PluginManager, get_manager, reset_manager
from ..semantics import reference
from ..semantics.merge_lse import merge
from .tiled import FAULTS, TILES, in_tiles

__all__ = ["BUGS", "NO_BUG", "Bug", "planted"]

BLOCK = 64
"""Keys that a kernel reads at a time."""

Forward = Callable[..., Any]
Plant = Callable[[AttentionRequest], Forward]


@dataclasses.dataclass(frozen=True)
class Bug:
    """Describes one mistake.

    Attributes:
        name: short, as `planted` takes it. what: the mistake in one sentence.
        families: where it shows; a backend with the bug serves the other families as it should.
        tile: no more keys than these, and it does not show.
    """

    name: str
    what: str
    families: tuple[str, ...]
    _plant: Plant = dataclasses.field(repr=False)
    tile: int = 0

    def bind(self, request: AttentionRequest) -> Bound:
        """The functions of a backend that has this bug."""
        plant = self._plant if request.family in self.families else _honest
        return Bound(plant(request), traceable=request.family == "dense" and not self.tile)


def _honest(request: AttentionRequest) -> Forward:
    return Reference().bind(request).forward


def _asking(change: Callable[[AttentionRequest], Mapping[str, Any]]) -> Plant:
    """Plant a bug that changes the request on its way to the kernel."""
    return lambda request: _honest(dataclasses.replace(request, **change(request)))


def _given(change: Callable[[AttentionRequest, tuple[Tensor, ...], Mapping[str, Any]], Mapping[str, Any]]) -> Plant:
    """Plant a bug that changes an optional tensor on its way to the kernel: (request, tensors, keywords) -> other
    keywords."""

    def plant(request: AttentionRequest) -> Forward:
        honest = _honest(request)
        return lambda *tensors, **given: honest(*tensors, **{**given, **change(request, tensors, given)})

    return plant


def _returned(change: Callable[[AttentionRequest, Tensor, Tensor | None, Tensor | None], tuple[Any, ...]]) -> Plant:
    """Plant a bug that changes the result: (request, out, lse, sinks) -> (out, lse)."""

    def plant(request: AttentionRequest) -> Forward:
        honest = _honest(request)

        def forward(*tensors: Tensor, out: Tensor | None = None, **given: Any) -> Any:
            raw = honest(*tensors, **given)
            right, lse = raw if request.lse else (raw, None)
            result, lse = change(request, right, lse, given.get("sinks"))
            result = result if out is None else out.copy_(result)
            return (result, lse) if request.lse else result

        return forward

    return plant


def _on_lse(change: Callable[[AttentionRequest, Tensor, Tensor | None], Tensor]) -> Plant:
    """The LSE is wrong: (request, lse, sinks) -> lse."""
    return _returned(lambda request, out, lse, sinks: (out, lse if lse is None else change(request, lse, sinks)))


def _without_a_block(
    request: AttentionRequest, tensors: tuple[Tensor, ...], given: Mapping[str, Any]
) -> Mapping[str, Any]:
    if request.family == "dense":
        axis = 1 if request.layout == "BSHD" else 2
        rows, columns = tensors[0].shape[axis], tensors[1].shape[axis]
    else:
        rows, columns = given["max_seqlen_q"], given["max_seqlen_k"]
    kept = torch.ones(1, 1, rows, columns, dtype=torch.bool, device=tensors[0].device)
    kept[..., BLOCK : 2 * BLOCK] = False
    mask = given.get("attn_mask")
    if mask is None:
        return {"attn_mask": kept}
    return {"attn_mask": mask & kept if mask.dtype == torch.bool else mask.masked_fill(~kept, float("-inf"))}


def _next_block(request: AttentionRequest, tensors: tuple[Tensor, ...], given: Mapping[str, Any]) -> Mapping[str, Any]:
    mask = given.get("attn_mask")
    if mask is None or mask.dtype != torch.bool or mask.shape[-1] <= BLOCK:
        return {}
    return {"attn_mask": mask.roll(-BLOCK, -1)}


def _twice(request: AttentionRequest, tensors: tuple[Tensor, ...], given: Mapping[str, Any]) -> Mapping[str, Any]:
    sinks = given.get("sinks")
    return {} if sinks is None else {"sinks": sinks + math.log(2)}


def _with_sink(request: AttentionRequest, lse: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return lse
    level = sinks.to(lse.dtype)
    return torch.logaddexp(lse, level[:, None] if request.layout == "BHSD" else level)


def _merged_detached(request: AttentionRequest) -> Forward:
    """Keys in two halves, merged with weights that carry no gradient."""
    honest = _honest(request)
    if request.sinks or request.chunk or request.dropout:
        return honest
    options: dict[str, Any] = {
        name: getattr(request, name) for name in ("causal", "window", "softcap", "scale", "layout")
    }

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        out: Tensor | None = None,
        **_: Any,
    ) -> Any:
        axis = 1 if request.layout == "BSHD" else 2
        s_q, s_k = query.shape[axis], key.shape[axis]
        offset = 0 if request.causal == "top_left" else s_k - s_q
        outs, lses = [], []
        for start, stop in ((0, s_k // 2), (s_k // 2, s_k)):
            part, lse = reference.attention(
                query,
                key.narrow(axis, start, stop - start),
                value.narrow(axis, start, stop - start),
                attn_mask=None if attn_mask is None else attn_mask[..., start:stop],
                q_offset=offset - start,
                return_lse=True,
                **options,
            )
            outs.append(part)
            lses.append(lse)
        # Rows that are empty in both halves have no shares: 0 divided by 0.
        shares = torch.softmax(torch.stack(lses).detach(), 0).nan_to_num(0.0)
        merged = (shares.unsqueeze(-1) * torch.stack(outs)).sum(0).to(query.dtype)
        merged = merged if out is None else out.copy_(merged)
        if not request.lse:
            return merged
        layout: Any = request.layout
        return merged, merge([part.detach() for part in outs], lses, layout=layout)[1]

    return forward


def _tiled(fault: str, tile: int) -> Plant:
    """The kernel reads keys in tiles, and makes a mistake from one to the next."""

    def plant(request: AttentionRequest) -> Forward:
        honest = _honest(request)

        def forward(*tensors: Tensor, **given: Any) -> Any:
            with in_tiles(tile, fault):
                return honest(*tensors, **given)

        return forward

    return plant


_ALL = ("dense", "varlen", "paged", "mla")
_SINKS = ("dense", "varlen", "paged")
_TRAINED = ("dense", "varlen")

BUGS: Mapping[str, Bug] = {
    bug.name: bug
    for bug in (
        Bug(
            "zeros",
            "the output is never written: zeros",
            _ALL,
            _returned(lambda request, out, lse, sinks: (out * 0, lse)),
        ),
        Bug("dropped_block", "the second block of 64 keys is skipped", _ALL, _given(_without_a_block)),
        Bug("shifted_map", "a bool mask is read one block of 64 keys further", _ALL, _given(_next_block)),
        Bug("scale_off", "the scale is 2 % too large", _ALL, _asking(lambda r: {"scale": 1.02 * r.softmax_scale})),
        Bug(
            "merged_detached",
            "the kernel merges two halves of the keys by LSEs that carry no gradient",
            ("dense",),
            _merged_detached,
        ),
        Bug(
            "detached_lse",
            "the LSE it returns carries no gradient",
            _TRAINED,
            _on_lse(lambda request, lse, sinks: lse.detach()),
        ),
        Bug("log2_lse", "the LSE is in log2", _ALL, _on_lse(lambda request, lse, sinks: lse / math.log(2))),
        Bug("lse_with_sink", "the LSE has the sink in it", _SINKS, _on_lse(_with_sink)),
        Bug(
            "lse_zero",
            "the LSE of a row that sees no key is 0",
            _ALL,
            _on_lse(lambda request, lse, sinks: lse.masked_fill(lse == float("-inf"), 0.0)),
        ),
        Bug(
            "wide_window",
            "a sliding window takes one key too many",
            _ALL,
            _asking(lambda r: {"window": tuple(bound + (bound >= 0) for bound in r.window)}),
        ),
        Bug(
            "top_left_causal",
            "the causal mask is aligned to the top left",
            _ALL,
            _asking(lambda r: {"causal": "none" if r.causal == "none" else "top_left"}),
        ),
        Bug("dropped_softcap", "the softcap has no effect", _SINKS, _asking(lambda r: {"softcap": 0.0})),
        Bug("double_sink", "the sink is applied twice", _SINKS, _given(_twice)),
        *(
            Bug(
                f"{fault}_{tile}",
                f"in tiles of {tile} keys, {what}",
                _TRAINED if fault == "lost_dv" else _ALL,
                _tiled(fault, tile),
                tile,
            )
            for fault, what in FAULTS.items()
            for tile in TILES
        ),
    )
}
"""Every planted bug by name: the negative controls of `polyattn.testing.controls`, and what adapters get wrong."""

NO_BUG = "none"
"""The name of a backend like the others without any bug: nothing may be found in it."""


@contextlib.contextmanager
def planted(name: str) -> Iterator[str]:
    """Within: a backend with one bug is registered for the CPU; yields its name.

    It declares what the reference declares and is chosen by name only. Afterwards the process has the plugins it had
    before; within, those that were registered by hand are away.

    Args:
        name: of `BUGS`, or `none` for a backend without a bug.

    Raises:
        InvalidInputError: no bug has this name.
    """
    known = {**BUGS, NO_BUG: Bug(NO_BUG, "nothing is wrong", (), _honest)}
    if name not in known:
        raise InvalidInputError(
            f"no planted bug is named {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}"
        )
    before = get_manager()
    backend = f"planted_{name}"
    try:
        reset_manager(PluginManager(before.environ, before.host_version))
        get_manager().register(_plugin(known[name], backend), backend)
        yield backend
    finally:
        reset_manager(before)


def _plugin(bug: Bug, backend: str) -> ModuleType:
    """A plugin of one backend that binds the bug."""
    like = get_manager().backends["reference", "cpu"]
    info = dataclasses.replace(
        like, name=backend, summary=f"planted: {bug.what}", priority=None, auto=(), fallbacks=(), aliases=()
    )

    def polyattn_register_backends() -> list[BackendInfo]:
        return [info]

    def polyattn_load_forward(backend: BackendInfo, provider: str, request: AttentionRequest) -> Bound:
        return bug.bind(request)

    module = ModuleType(backend)
    module.POLYATTN_API_VERSION = API_VERSION  # type: ignore[attr-defined]
    for hook in (polyattn_register_backends, polyattn_load_forward):
        setattr(module, hook.__name__, hookimpl(hook))
    return module
