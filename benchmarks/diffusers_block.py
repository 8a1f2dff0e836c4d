"""Models of diffusers with one block, at the sizes of real ones: polyattn beside every backend that diffusers has here.

    python benchmarks/diffusers_block.py [--models wan flux] [--layers 1] [--rounds 9] [--backends NAME ...] [--small]
                                         [--json FILE]
    python benchmarks/diffusers_block.py --render FILE

Wan 2.1 1.3B makes 81 frames at 480p (32,760 tokens), Flux an image at 1,024 pixels (4,096 tokens and 512 of text);
random weights, bfloat16. A forward of the model is timed: its block, and what is before and after it. Exact backends
must give what diffusers' native attention gives, or they are not timed; sparse methods must give something else.
All take turns in one run. What the adapter adds is the host's time of a small call, less that of `bind`. The command
ends with 1 where polyattn's own choice is slower than `BAR` allows.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import report
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import Tensor
from video.timing import Clock, timed

import polyattn
from polyattn.integrations import diffusers as host
from polyattn.integrations.diffusers.attention import make_attend

NATIVE = ("native", "_native_cudnn", "_native_flash", "_native_efficient", "flash", "_flash_3", "sage", "xformers")
EXACT = frozenset({*NATIVE, "polyattn"}) - {"sage"}
SPARSE = {"video_sparse_attn": {"sparsity": 0.9, "coarse": "off"}}
EVERY = (*NATIVE, "polyattn", *SPARSE)
WARM = 6
BAR = 0.99
"""The least rate of polyattn over the fastest backend of diffusers."""


class Pipeline:
    """What `prepare` needs of a pipeline: its components and its scheduler."""

    def __init__(self, model: Any) -> None:
        self.components, self.scheduler = {"transformer": model}, None


def wan(layers: int, *, small: bool) -> tuple[Any, dict[str, Any], tuple[int, ...]]:
    heads, (frames, height, width) = (2, (3, 16, 16)) if small else (12, (21, 60, 104))
    model = WanTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=128, text_dim=4096, freq_dim=256, ffn_dim=heads * 128 * 5,
        num_layers=layers,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 16, frames, height, width),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 512, 4096),
    }
    return model, inputs, (1, frames * height * width // 4, heads, 128)


def flux(layers: int, *, small: bool) -> tuple[Any, dict[str, Any], tuple[int, ...]]:
    heads, side = (2, 16) if small else (24, 64)
    model = FluxTransformer2DModel(
        num_layers=layers, num_single_layers=layers, num_attention_heads=heads, attention_head_dim=128,
        guidance_embeds=True,
    )  # fmt: skip
    rows = torch.arange(side).repeat_interleave(side)
    places = torch.stack([torch.zeros(side * side), rows, torch.arange(side).repeat(side)], 1)
    inputs = {
        "hidden_states": torch.randn(1, side * side, 64),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "encoder_hidden_states": torch.randn(1, 512, 4096),
        "pooled_projections": torch.randn(1, 768),
        "img_ids": places,
        "txt_ids": torch.zeros(512, 3),
    }
    return model, inputs, (1, side * side + 512, heads, 128)


MODELS: dict[str, Callable[..., tuple[Any, dict[str, Any], tuple[int, ...]]]] = {"wan": wan, "flux": flux}


def placed(inputs: dict[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    whole = {"img_ids", "txt_ids"}
    return {name: t.to(device, None if name in whole else dtype) for name, t in inputs.items()}


def calls_of(
    model: Any, inputs: dict[str, Any], backends: Sequence[str]
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """A forward for each way that works here and is right, and why the others are left out."""

    def forward() -> Tensor:
        found: Tensor = model(**inputs, return_dict=False)[0]
        return found

    pipe, right = Pipeline(model), forward()
    found: dict[str, Callable[[], Any]] = {}
    left: dict[str, str] = {}
    scale = right.float().norm()
    for name in backends:

        def use(name: str = name) -> None:
            host.prepare(pipe, None if name == "polyattn" else {"transformer": name}, SPARSE.get(name))

        try:
            use()
            got = forward()
        except (ImportError, RuntimeError, ValueError) as error:  # a missing library, a device that is too old
            left[name] = str(error).splitlines()[0]
            continue
        off = float((got.float() - right.float()).norm() / scale)
        if (name in EXACT and off > 0.02) or (name in SPARSE and not 1e-4 < off < 1):
            left[name] = f"its result differs from that of native attention by {off:.2g}"
            continue

        def call(use: Callable[[], None] = use) -> None:
            forward()

        call.use = use  # type: ignore[attr-defined]
        found[name] = call
    return found, left


def measured(
    name: str, layers: int, rounds: int, backends: Sequence[str], device: torch.device, *, small: bool
) -> dict[str, Any]:
    """One model: milliseconds of a forward by each backend, and the microseconds that the adapter adds to a call."""
    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model, inputs, shape = MODELS[name](layers, small=small)
    model = model.to(device, dtype).eval()
    inputs = placed(inputs, device, dtype)
    calls, left = calls_of(model, inputs, backends)
    clock, times = Clock(device), {backend: list[float]() for backend in calls}
    order = list(calls)
    for number in range(rounds):
        for backend in order[number % len(order) :] + order[: number % len(order)]:
            calls[backend].use()  # type: ignore[attr-defined]
            for _ in range(max(2, WARM // layers)):  # the first calls of a pipeline look who serves each layer
                calls[backend]()
            times[backend].append(clock.window(calls[backend], 1 if small else max(1, 5 // layers)))
    medians = {backend: statistics.median(found) for backend, found in times.items()}
    native = min((backend for backend in medians if backend in NATIVE), key=medians.__getitem__)
    host.uninstall()
    return {
        "model": name,
        "shape": list(shape),
        "ms": {backend: round(ms, 4) for backend, ms in medians.items()},
        "fastest_of_diffusers": native,
        "rate": {backend: round(medians[native] / ms, 3) for backend, ms in medians.items()},
        "added_us": added(shape, device, dtype),
        "left_out": left,
    }


def added(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Microseconds of the host that the adapter adds to a bound call, and diffusers' dispatcher to the adapter."""
    host.install()
    batch, _, heads, width = shape
    q, k, v = (torch.randn(batch, 64, heads, width, device=device, dtype=dtype) for _ in range(3))
    adapter, ours = make_attend(None), AttentionBackendName("polyattn")
    calls = {
        "bare": functools.partial(polyattn.bind(layout="BSHD"), q, k, v),
        "adapter": functools.partial(adapter, q, k, v),
        "dispatcher": functools.partial(dispatch_attention_fn, q, k, v, backend=ours),
    }
    found = {name: statistics.median(times) for name, times in timed(calls, Clock(torch.device("cpu")), 61).items()}
    host.uninstall()
    bare, with_adapter, whole = found.values()
    return {
        "adapter": round(1e3 * (with_adapter - bare), 2),
        "diffusers' dispatcher": round(1e3 * (whole - with_adapter), 2),
    }


def markdown(result: dict[str, Any]) -> str:
    """A result file as the table of docs/benchmarks.md."""
    lines = [
        report.caption(result) + ".",
        "",
        "| model | tokens, heads | backend | ms | times as fast as diffusers' fastest |",
        "|---|---|---|---:|---:|",
    ]
    for row in result["rows"]:
        _, tokens, heads, _ = row["shape"]
        for backend, ms in sorted(row["ms"].items(), key=lambda item: item[1]):
            fastest = " (fastest of diffusers)" if backend == row["fastest_of_diffusers"] else ""
            lines.append(
                f"| {row['model']} | {tokens:,}, {heads} | {backend}{fastest} | {ms:.2f} | {row['rate'][backend]:.3f} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backends", nargs="+", choices=EVERY, default=EVERY, help="native must be among them")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU can afford")
    args = report.arguments(parser, markdown)
    if args is None:
        return 0
    if "native" not in args.backends:
        parser.error("--backends: native must be among them; what the others give is compared with it")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad():
        rows = [
            measured(name, args.layers, args.rounds, args.backends, device, small=args.small) for name in args.models
        ]
    result = {**report.stamp("diffusers-block", device), "bar": BAR, "layers": args.layers, "rows": rows}
    report.finish(result, markdown, args.json)
    for row in rows:
        print(f"{row['model']}: us that are added: {row['added_us']}; left out: {row['left_out'] or 'nobody'}")
    return int(any(row["rate"].get("polyattn", 0) < BAR for row in rows))


if __name__ == "__main__":
    sys.exit(main())
