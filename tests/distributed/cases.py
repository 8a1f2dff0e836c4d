"""What the ranks of a job do together. Every case runs on all ranks of a world, and compares with one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from polyattn.distributed import init_mesh
from polyattn.distributed.plan import pieces_of
from polyattn.nn import USPAttention
from polyattn.semantics.reference import attention as definition

B, D, DV = 2, 16, 8
CASES: dict[str, tuple[int, Callable[[], None]]] = {}
"""Name -> the number of ranks, and what each does."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A call, and how it is spread."""

    ring: int = 1
    ulysses: int = 1
    lengths: tuple[int, ...] = ()
    heads: tuple[int, int] = (4, 2)
    text: str = "none"
    causal: bool = False
    order: str = "consecutive"
    segments: bool = False
    share: bool = False
    batch: int = B
    dtype: torch.dtype = torch.float32
    declared: bool = False
    backend: str | None = None

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses


def positions(setting: Setting) -> list[torch.Tensor]:
    """Where the tokens of each rank lie in the whole sequence."""
    size = setting.ulysses
    groups = [sum(setting.lengths[r * size : (r + 1) * size]) for r in range(setting.ring)]
    found = []
    for r, spans in enumerate(pieces_of(groups, setting.order)):
        row = torch.cat([torch.arange(*span) for span in spans])
        found += row.split(list(setting.lengths[r * size : (r + 1) * size]))
    return found


@dataclasses.dataclass
class Whole:
    """The call on one process in float64, with all gradients."""

    own: list[torch.Tensor]
    text: list[torch.Tensor]
    douts: list[torch.Tensor]
    segments: torch.Tensor | None
    results: dict[str, torch.Tensor]
    grads: dict[str, list[torch.Tensor]]


TEXT = 5


def whole(setting: Setting) -> Whole:
    generator = torch.Generator().manual_seed(7)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(setting.dtype)

    tokens, words, b = sum(setting.lengths), 0 if setting.text == "none" else TEXT, setting.batch
    h, g = setting.heads
    own = [made(b, tokens, *rest) for rest in ((h, D), (g, D), (g, DV))]
    text = [made(b, words, *rest) for rest in ((h, D), (g, D), (g, DV))]
    douts = [made(b, tokens, h, DV), made(b, tokens, h), made(b, words, h, DV), made(b, words, h)]
    cuts = torch.randint(0, 2, (b, tokens), generator=generator).cumsum(1)
    segments = (cuts // 6).to(torch.int32) if setting.segments else None
    leaves = [t.detach().double().clone().requires_grad_() for t in (*own, *text)]
    front = setting.text == "front"
    q, k, v = (torch.cat([leaves[3 + i], leaves[i]] if front else [leaves[i], leaves[3 + i]], 1) for i in range(3))
    mask = None
    if segments is not None:
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]
    causal = "bottom_right" if setting.causal else "none"
    out, lse = definition(q, k, v, causal=causal, attn_mask=mask, return_lse=True)
    sizes = [words, tokens] if front else [tokens, words]
    parts = [*out.split(sizes, 1), *lse.split(sizes, 1)]
    if front:
        parts = [parts[1], parts[0], parts[3], parts[2]]
    results = dict(zip(("out", "text_out", "lse", "text_lse"), parts, strict=True))
    loss = sum(
        (results[name] * d.double()).sum()
        for name, d in zip(("out", "lse", "text_out", "text_lse"), douts, strict=True)
        if results[name].numel()
    )
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    full = [torch.zeros_like(t) if one is None else one for t, one in zip(leaves, grads, strict=True)]
    return Whole(own, text, douts, segments, results, {"own": full[:3], "text": full[3:]})


def close(found: torch.Tensor, right: torch.Tensor, what: str) -> None:
    tolerance = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 6e-2}[found.dtype]
    torch.testing.assert_close(
        found.double(), right.double(), atol=tolerance, rtol=tolerance, msg=lambda text: f"{what}: {text}"
    )


def layer_of(setting: Setting, **options: Any) -> USPAttention:
    mesh = init_mesh(ring=setting.ring, ulysses=setting.ulysses)
    given: dict[str, Any] = {"causal": setting.causal, "return_lse": True, "order": setting.order}
    given |= {"backend": setting.backend, "timeout": 30.0, **options}
    return USPAttention(mesh, **given)


def run(setting: Setting, layer: Any = None, *, train: bool = True) -> None:
    """The call of this rank equals its rows of the whole, and so do the gradients."""
    rank = torch.distributed.get_rank()
    right = whole(setting)
    mine = positions(setting)[rank]
    layer = layer or layer_of(setting, text_grad="share" if setting.share else "whole")
    own = [t[:, mine].clone().requires_grad_(train) for t in right.own]
    text = [t.clone().requires_grad_(train) for t in right.text]
    given: dict[str, Any] = {} if setting.text == "none" else {"text": tuple(text), "text_at": setting.text}
    if right.segments is not None:
        given["segments"] = right.segments[:, mine].contiguous()
    if setting.declared:
        given["lengths"] = setting.lengths
    for _ in range(2):  # first what is learned at a first call, then what was
        results = layer(*own, **given)
        names = ("out", "lse", "text_out", "text_lse")[: len(results)]
        for name, one in zip(names, results, strict=True):
            rows = right.results[name]
            close(one, rows if name.startswith("text") else rows[:, mine], name)
    if not train:
        return
    douts = [d if name.startswith("text") else d[:, mine] for name, d in zip(names, right.douts, strict=False)]
    if setting.share:  # a share of the gradient is given, so that all of them are the whole
        douts = [d / setting.ranks if name.startswith("text") else d for name, d in zip(names, douts, strict=True)]
    leaves = own + (text if setting.text != "none" else [])
    loss = sum((one * d).sum() for one, d in zip(results, douts, strict=True))
    grads = torch.autograd.grad(loss, leaves)
    for name, grad, one in zip("qkv", grads[:3], right.grads["own"], strict=True):
        close(grad, one[:, mine], f"d{name}")
    for name, grad, one in zip(("tq", "tk", "tv"), grads[3:], right.grads["text"], strict=False):
        if setting.share:
            torch.distributed.all_reduce(grad)
        close(grad, one, f"d{name}")


def case(world: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(function: Callable[[], None]) -> Callable[[], None]:
        CASES[function.__name__] = (world, function)
        return function

    return add


def _spread() -> dict[str, Setting]:
    lengths = {2: (9, 7), 4: (6, 3, 5, 4)}
    found: dict[str, Setting] = {}
    for ring, ulysses in ((2, 1), (1, 2), (4, 1), (1, 4), (2, 2)):
        base = Setting(ring=ring, ulysses=ulysses, lengths=lengths[ring * ulysses])
        name = f"ring {ring} ulysses {ulysses}"
        several = {"5 heads": {"heads": (5, 5)}, "causal": {"causal": True}, "segments": {"segments": True}}
        several |= {f"text {at}": {"text": at} for at in ("front", "back")}
        several |= {f"text {at} causal": {"text": at, "causal": True} for at in ("front", "back")}
        several |= {"causal segments": {"causal": True, "segments": True}, "heads 8:1": {"heads": (8, 1)}}
        several |= {"zigzag": {"order": "zigzag", "causal": True}, "text share": {"text": "front", "share": True}}
        several |= {"one row": {"batch": 1}, "float64": {"dtype": torch.float64}, "plain": {}}
        several |= {"bfloat16": {"dtype": torch.bfloat16}, "declared": {"declared": True}}
        for words, changes in several.items():
            found[f"{name} {words}"] = dataclasses.replace(base, **changes)
        empty = (0, *base.lengths[1:]) if ring == 1 else (*base.lengths[:-1], 0)
        found[f"{name} empty"] = dataclasses.replace(base, lengths=empty)
        found[f"{name} empty causal text"] = dataclasses.replace(base, lengths=empty, causal=True, text="front")
    found["ring 1 ulysses 4 fewer heads"] = Setting(ulysses=4, lengths=lengths[4], heads=(3, 3), text="front")
    found["ring 2 ulysses 2 6:2 heads"] = Setting(ring=2, ulysses=2, lengths=lengths[4], heads=(6, 2))
    found["ring 1 ulysses 4 6:2 heads"] = Setting(ulysses=4, lengths=lengths[4], heads=(6, 2))
    found["ring 4 ulysses 1 a token"] = Setting(ring=4, lengths=(1, 0, 0, 0), causal=True)
    return found


SPREAD = _spread()
for _name, _setting in SPREAD.items():
    CASES[_name] = (_setting.ranks, lambda setting=_setting: run(setting))  # type: ignore[misc]
    CASES[f"{_name} inference"] = (_setting.ranks, lambda setting=_setting: run(setting, train=False))  # type: ignore[misc]
