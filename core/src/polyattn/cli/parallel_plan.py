"""`polyattn parallel-plan` predicts what layers over several devices cost each rank, and says which mesh to take."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from ..distributed.costs import Cost, Machine, Shape, costs
from ..errors import ConfigError
from .options import Json
from .rendering import answer, grid, screen, show_json

__all__ = ["parallel_plan"]

_RATES = Machine()


def parallel_plan(
    devices: Annotated[int, typer.Option(min=1, max=4096, metavar="N", help="How many devices.")],
    tokens: Annotated[int, typer.Option(min=1, metavar="S", help="Tokens of the sequence, on all devices together.")],
    heads: Annotated[int, typer.Option(min=1, metavar="H", help="Query heads.")],
    head_dim: Annotated[int, typer.Option(min=1, metavar="D", help="The size of a head.")] = 128,
    kv_heads: Annotated[int | None, typer.Option(min=1, metavar="H", help="Key heads; without it: as many.")] = None,
    batch: Annotated[int, typer.Option(min=1, metavar="B", help="Sequences of a call.")] = 1,
    text: Annotated[int, typer.Option(min=0, metavar="T", help="Tokens of text, which all devices have.")] = 0,
    causal: Annotated[bool, typer.Option("--causal", help="Queries see the keys before them.")] = False,
    train: Annotated[bool, typer.Option("--train", help="Forward and backward.")] = False,
    per_host: Annotated[int, typer.Option(min=1, metavar="N", help="Devices of a host.")] = _RATES.per_host,
    tflops: Annotated[float, typer.Option(min=1e-3, help="TFLOP/s of a kernel.")] = _RATES.tflops,
    backward_tflops: Annotated[float, typer.Option(min=1e-3, help="The same, backward.")] = _RATES.backward_tflops,
    within: Annotated[float, typer.Option(min=1e-3, help="GB/s that a device sends within its host.")] = _RATES.within,
    between: Annotated[float, typer.Option(min=1e-3, help="GB/s that a device sends between hosts.")] = _RATES.between,
    memory: Annotated[float, typer.Option(min=1e-3, help="GB/s of a device's own memory.")] = _RATES.memory,
    copies: Annotated[bool, typer.Option("--copies", help='Blocks of a ring are copied: transfers="copy".')] = False,
    as_json: Json = False,
) -> None:
    """Predict what layers over several devices cost each rank, and say which mesh to take.

    Every mesh of a ring and of Ulysses groups is listed, the fastest first: what a rank sends, the memory of its
    tensors, and its time in kernels, waiting for others, and in copies. Rates that are not given are of H100, NVLink.
    """
    keys = heads if kv_heads is None else kv_heads
    if heads % keys:
        raise ConfigError(
            f"--heads {heads} is no multiple of --kv-heads {keys}: each key head serves as many query heads"
        )
    shape = Shape(tokens, heads, keys, head_dim, batch, text, causal, train)
    found = costs(shape, devices, Machine(per_host, tflops, backward_tflops, within, between, memory, copies))
    if as_json:
        show_json({"shape": dataclasses.asdict(shape), "meshes": [_data(one) for one in found]})
        return
    table = grid("ring", "ulysses", "sent MB", "memory MB", "kernels ms", "waiting ms", "copies ms", "total ms", "")
    for one in found:
        note = f"{one.idle_heads} without a head" if one.idle_heads else ""
        row = _data(one)
        table.add_row(
            *(str(row[name]) for name in ("ring", "ulysses")),
            *(
                f"{row[name]:,.1f}"
                for name in ("sent_mb", "memory_mb", "kernel_ms", "waiting_ms", "copying_ms", "total_ms")
            ),
            note,
        )
    screen().print(table)
    best = found[0]
    answer(f"Take init_mesh(ring={best.ring}, ulysses={best.ulysses}): {best.time * 1e3:,.1f} ms a call.")


def _data(one: Cost) -> dict[str, float]:
    return {
        "ring": one.ring,
        "ulysses": one.ulysses,
        "sent_mb": (one.exchanged + one.passed) / 1e6,
        "memory_mb": one.held / 1e6,
        "kernel_ms": one.kernel * 1e3,
        "waiting_ms": one.waiting * 1e3,
        "copying_ms": one.copying * 1e3,
        "total_ms": one.time * 1e3,
        "ranks_without_a_head": one.idle_heads * one.ring,
    }
