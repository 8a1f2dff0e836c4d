"""Whether a method gives, on a small grid, what its reference in float64 gives."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import polyattn
from polyattn.methods.video import sla, sta, strategy, svg2, vmoba, vsa, window
from polyattn.testing.tolerances import RELATIVE_L2
from polyattn.video import Place

from .inputs import Call, Row, Shape, sets_of, small_strategy

GRADIENTS = 2e-2
"""Bound on the relative L2 error of gradients, which go through two roundings of bfloat16 and more."""


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
