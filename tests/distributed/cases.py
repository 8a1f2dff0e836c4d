"""What the ranks of a job do together. Every case runs on all ranks of a world, and compares with one process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import math
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp

import polyattn
from polyattn.distributed import blocks as blocks_module
from polyattn.distributed import exchange as exchange_module
from polyattn.distributed import init_mesh
from polyattn.distributed import ring as ring_module
from polyattn.distributed.plan import pieces_of
from polyattn.errors import ConfigError, InvalidInputError, RankError, UnsupportedRequestError
from polyattn.nn import LocalAttention, RingAttention, UlyssesAttention, USPAttention
from polyattn.semantics.reference import attention as definition
from polyattn.serving.attention import over_ranks
from polyattn.serving.attention.backend import AttentionBackend
from polyattn.serving.attention.workspace import Limits
from polyattn.serving.kv_cache.pages import PageAllocator
from polyattn.serving.kv_cache.pool import KVCacheConfig, KVPool
from polyattn.serving.layer import AttentionLayer
from polyattn.serving.step.batch import ForwardBatch, ForwardMode
from polyattn.serving.step.requests import RequestTable
from polyattn.video import Place

B, D = 2, 16
DEVICE = torch.device("cpu")
"""Of the ranks' tensors; the whole is always computed on the CPU, in float64."""
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
    dims: tuple[int, int] = (D, 8)
    kv: str = "ring"

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
    (h, g), (d, e) = setting.heads, setting.dims
    own = [made(b, tokens, *rest) for rest in ((h, d), (g, d), (g, e))]
    text = [made(b, words, *rest) for rest in ((h, d), (g, d), (g, e))]
    douts = [made(b, tokens, h, e), made(b, tokens, h), made(b, words, h, e), made(b, words, h)]
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


def close(found: torch.Tensor, right: torch.Tensor, what: str, dtype: torch.dtype) -> None:
    """As near as inputs of a dtype allow."""
    tolerance = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 6e-2}[dtype]
    found, right = found.detach().cpu(), right.detach().double()
    if found.dtype == torch.bfloat16 and right.numel() > 10_000:  # enough for a lost block to show among the rounding
        far = float((found.double() - right).norm() / right.norm())
        assert far < 1e-2, f"{what}: relative error {far:.1e}"
        return
    torch.testing.assert_close(
        found.double(), right, atol=tolerance, rtol=tolerance, msg=lambda text: f"{what}: {text}"
    )


@functools.cache
def mesh_of(ring: int, ulysses: int) -> Any:
    """One for all cases: a mesh is groups of processes, and a device has room for so many."""
    return init_mesh(ring=ring, ulysses=ulysses)


def layer_of(setting: Setting, **options: Any) -> USPAttention:
    mesh = options.pop("mesh", None) or mesh_of(setting.ring, setting.ulysses)
    given: dict[str, Any] = {"causal": setting.causal, "return_lse": True, "order": setting.order, "kv": setting.kv}
    # On a GPU nobody else has gradients of float64.
    precise = "reference" if (setting.dtype, DEVICE.type) == (torch.float64, "cuda") else None
    given |= {"backend": setting.backend or precise, "timeout": 300.0, **options}
    return USPAttention(mesh, **given)


def run(setting: Setting, layer: Any = None, *, train: bool = True) -> None:
    """The call of this rank equals its rows of the whole, and so do the gradients."""
    rank = torch.distributed.get_rank()
    right = whole(setting)
    mine = positions(setting)[rank]
    if layer is None:
        layer = layer_of(setting, text_grad="share" if setting.share else "whole")
    own = [t[:, mine].to(DEVICE, copy=True).requires_grad_(train) for t in right.own]
    text = [t.to(DEVICE, copy=True).requires_grad_(train) for t in right.text]
    given: dict[str, Any] = {} if setting.text == "none" else {"text": tuple(text), "text_at": setting.text}
    if right.segments is not None:
        given["segments"] = right.segments[:, mine].to(DEVICE).contiguous()
    if setting.declared:
        given["lengths"] = setting.lengths
    # All that ranks do together comes first, so that one which then finds a difference leaves no other waiting.
    passes = [layer(*own, **given) for _ in range(2)]  # a first call, and one whose signature is known
    names = ("out", "lse", "text_out", "text_lse")[: len(passes[0])]
    grads: tuple[torch.Tensor, ...] = ()
    if train:
        # A share of the gradient of the text is given, so that all of them are the whole.
        few = setting.ranks if setting.share else 1
        douts = [d / few if n.startswith("text") else d[:, mine] for n, d in zip(names, right.douts, strict=False)]
        leaves = own + (text if setting.text != "none" else [])
        loss = sum((one * d.to(DEVICE)).sum() for one, d in zip(passes[-1], douts, strict=True))
        grads = torch.autograd.grad(loss, leaves)
        if setting.share:
            for grad in grads[3:]:
                torch.distributed.all_reduce(grad)
    for results in passes:
        for name, one in zip(names, results, strict=True):
            rows = right.results[name]
            close(one, rows if name.startswith("text") else rows[:, mine], name, setting.dtype)
    for name, grad, one in zip("qkv", grads[:3], right.grads["own"], strict=False):
        close(grad, one[:, mine], f"d{name}", setting.dtype)
    for name, grad, one in zip(("tq", "tk", "tv"), grads[3:], right.grads["text"], strict=False):
        close(grad, one, f"d{name}", setting.dtype)


def copied(setting: Setting, *, train: bool = True) -> None:
    """The blocks of a ring are copied out of memory that ranks share."""
    with sharing():
        layer = layer_of(setting, transfers="copy")
        run(setting, layer, train=train)
        assert layer.transfers == "copied"


@contextlib.contextmanager
def sharing(**changes: Any) -> Iterator[Any]:
    """Memory that the ranks share: torch's where there is one, files that they map on a CPU. changes: of its functions
    on this rank."""
    shared: Any = None
    if DEVICE.type == "cpu":
        from shared import Shared  # beside the job

        shared, (rank, world) = Shared(), (torch.distributed.get_rank(), torch.distributed.get_world_size())
        own = [rank, *(one for one in range(world) if one != rank)]
        changes = {"library": lambda device: (shared, ""), "reach": lambda device: own} | changes
    with pytest.MonkeyPatch.context() as patch:
        for name, change in changes.items():
            patch.setattr(blocks_module, name, change)
        yield shared


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
        if ring > 1:
            for words, changes in several.items():
                if words in (
                    "plain",
                    "causal",
                    "zigzag",
                    "causal segments",
                    "text front causal",
                    "text back",
                    "heads 8:1",
                ):
                    found[f"{name} {words} gathered"] = dataclasses.replace(base, kv="gather", **changes)
        empty = (0, *base.lengths[1:]) if ring == 1 else (*base.lengths[:-1], 0)
        found[f"{name} empty"] = dataclasses.replace(base, lengths=empty)
        found[f"{name} empty causal text"] = dataclasses.replace(base, lengths=empty, causal=True, text="front")
    for ring, ulysses in ((2, 1), (1, 2)):
        base = Setting(ring=ring, ulysses=ulysses, lengths=(131, 70), heads=(8, 2), dtype=torch.bfloat16, batch=1)
        base = dataclasses.replace(base, dims=(64, 64))
        for words, changes in {"": {}, " causal": {"causal": True}, " text": {"text": "front"}}.items():
            found[f"large ring {ring} ulysses {ulysses}{words}"] = dataclasses.replace(base, **changes)
    found["ring 1 ulysses 4 fewer heads"] = Setting(ulysses=4, lengths=lengths[4], heads=(3, 3), text="front")
    found["ring 2 ulysses 2 6:2 heads"] = Setting(ring=2, ulysses=2, lengths=lengths[4], heads=(6, 2))
    found["ring 1 ulysses 4 6:2 heads"] = Setting(ulysses=4, lengths=lengths[4], heads=(6, 2))
    found["ring 2 ulysses 1 a token"] = Setting(ring=2, lengths=(1, 0), causal=True)
    found["ring 4 ulysses 1 a token"] = Setting(ring=4, lengths=(1, 0, 0, 0), causal=True)
    return found


SPREAD = _spread()
for _name, _setting in SPREAD.items():
    CASES[_name] = (_setting.ranks, functools.partial(run, _setting))
    if _name.endswith(("plain", "causal", "text front", "segments", "gathered", "empty")):
        CASES[f"{_name} inference"] = (_setting.ranks, functools.partial(run, _setting, train=False))
    if _setting.ring > 1 and not _name.endswith(("float64", "5 heads", "one row", "text share")):
        CASES[f"{_name} copied"] = (_setting.ranks, functools.partial(copied, _setting))


def compiled(setting: Setting) -> None:
    """One graph, forward and backward, which another layer of the same kind takes as it is."""
    torch._dynamo.reset()
    layers = [layer_of(setting) for _ in range(2)]
    run(setting, torch.compile(layers[0], backend="aot_eager", fullgraph=True))
    with torch._dynamo.config.patch(error_on_recompile=True):
        run(setting, torch.compile(layers[1], backend="aot_eager", fullgraph=True))
    plain = layer_of(setting, return_lse=False)
    inputs = tensors()
    found = torch.compile(plain, backend="aot_eager", fullgraph=True)(*inputs)
    torch.testing.assert_close(found, plain(*inputs))


def checkpointed(setting: Setting) -> None:
    layer = layer_of(setting)

    def call(*own: torch.Tensor, **given: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(layer, *own, use_reentrant=False, **given)

    run(setting, call)


def autocasted(setting: Setting) -> None:
    inputs = [t.requires_grad_() for t in tensors(heads=4)]
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        out, _, words, _ = layer_of(setting)(*inputs, text=tensors(3, heads=4))
    assert out.dtype == words.dtype == torch.bfloat16
    (grad,) = torch.autograd.grad(out.float().sum(), inputs[:1])
    assert grad.dtype == torch.float32


for _ring, _ulysses in ((2, 1), (1, 2), (2, 2)):
    _base = Setting(ring=_ring, ulysses=_ulysses, lengths=(6, 3, 5, 4)[: _ring * _ulysses], heads=(5, 5))
    for _words, _changes in (("text", {"text": "back"}), ("causal segments", {"causal": True, "segments": True})):
        for _name, _run in (("compiled", compiled), ("checkpointed", checkpointed)):
            if _ring * _ulysses == 2 or (_name, _words) == ("compiled", "text"):
                _setting = dataclasses.replace(_base, **_changes)
                _label = f"ring {_ring} ulysses {_ulysses} {_words} {_name}"
                CASES[_label] = (_setting.ranks, functools.partial(_run, _setting))
    CASES[f"ring {_ring} ulysses {_ulysses} autocast"] = (_base.ranks, functools.partial(autocasted, _base))


# How blocks get to the ranks of a ring.


def agreed(words: str, **changes: Any) -> None:
    """Something is otherwise on the last rank: all send, say why, and get what is right."""
    setting = Setting(ring=2, lengths=(9, 7), causal=True)
    last = torch.distributed.get_rank() == 1
    blocks_module.link_of(layer_of(setting)._ranks.ring, DEVICE).memory = None
    with sharing(**(changes if last else {})):
        layer = layer_of(setting, transfers="copy")
        assert layer.transfers == "none: no call yet"
        with pytest.warns(RuntimeWarning, match=re.escape(words)):
            run(setting, layer)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            run(setting, by_itself := layer_of(setting))
        for one in (layer, by_itself):
            assert one.transfers.startswith("sent: "), one.transfers
            assert words in one.transfers, one.transfers
        polyattn.configure(strict=True)
        try:
            layer = layer_of(setting, transfers="copy", return_lse=False)
            raised(UnsupportedRequestError, words, "POLYATTN_STRICT", call=lambda: layer(*tensors()))
        finally:
            polyattn.configure()


@case(2)
def a_rank_that_cannot_share_memory() -> None:
    if DEVICE.type != "cpu":
        return  # a device's own library waits for all ranks
    with sharing() as shared:
        pass

    class Full:
        def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> Any:
            raise torch.OutOfMemoryError("no room")

        def rendezvous(self, tensor: torch.Tensor, group: Any) -> Any:
            raise AssertionError("nobody else comes")

    class Late(type(shared)):  # type: ignore[misc]
        def rendezvous(self, tensor: torch.Tensor, group: Any) -> Any:
            super().rendezvous(tensor, group)
            raise RuntimeError("no socket")

    none = "rank 1: torch 1.0 has no symmetric memory"
    agreed(none, library=lambda device: (None, none.removeprefix("rank 1: ")))
    agreed("ranks [0, 1] are in several hosts or containers", _host=lambda: "elsewhere")
    agreed("ranks [0, 1] have devices [0, 0]", reach=lambda device: [0, 1])
    agreed("the device of rank 1 does not see the memory of rank 0's", reach=lambda device: [1])
    agreed("cannot be had: rank 1: OutOfMemoryError: no room", library=lambda device: (Full(), ""))
    agreed("cannot be had: rank 1: RuntimeError: no socket", library=lambda device: (Late(), ""))
    copied(Setting(ring=2, lengths=(9, 7)))  # and goes on


@case(2)
def a_layer_that_sends() -> None:
    setting = Setting(ring=2, lengths=(9, 7))
    with sharing():
        layer = layer_of(setting, transfers="send")
        run(setting, layer)
        assert layer.transfers == 'sent: transfers="send"'
        other = layer_of(setting, transfers="copy")
        run(setting, other)
        run(setting, layer)
        assert other.transfers == "copied"
        assert layer.transfers == 'sent: transfers="send"'
        assert "transfers='copy'" in repr(other)
        one = torch.distributed.get_rank()
        disagreeing = layer_of(setting, transfers="copy" if one else "send")
        raised(InvalidInputError, "disagree in layer", call=lambda: disagreeing(*tensors()))
        run(setting, by_itself := layer_of(setting))
        assert by_itself.transfers == "copied"
        assert "transfers" not in repr(by_itself)
    assert layer_of(Setting(ulysses=2), transfers="copy").transfers == "none: there is no ring"
    raised(InvalidInputError, "transfers='sent'", "Did you mean 'send'", call=lambda: _odd("transfers", "sent"))


@case(2)
def memory_that_grows() -> None:
    small, large = Setting(ring=2, lengths=(9, 7)), Setting(ring=2, lengths=(30, 31))
    with sharing() as shared:
        link = blocks_module.link_of(layer_of(small)._ranks.ring, DEVICE)
        link.memory = None
        sizes = []
        for setting in (small, large, small, large):
            run(setting, layer := layer_of(setting, transfers="copy"))
            assert layer.transfers == "copied"
            sizes.append(link.memory.size)
        assert sizes[0] < sizes[1] == sizes[2] == sizes[3]
        assert shared is None or shared.made == 2


def recorded(ring: int, kv: str) -> None:
    """A device graph, replayed with other tensors, after the memory that it knows has been replaced by a larger one."""
    lengths = (40, 33, 0, 21)[:ring]
    rank = torch.distributed.get_rank()
    mine = lengths[rank]
    layer = layer_of(Setting(ring=ring, kv=kv), return_lse=False, transfers="copy")
    held = tensors(mine, dtype=torch.bfloat16)
    for _ in range(2):
        layer(*held, lengths=lengths)
    torch.cuda.synchronize()
    torch.distributed.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = layer(*held, lengths=lengths)
    assert layer.transfers == "copied"
    layer(*tensors(10 * mine, dtype=torch.bfloat16))
    for seed in range(3):
        torch.manual_seed(seed)
        for one in held:
            one.copy_(torch.randn(one.shape, device=DEVICE))
        graph.replay()
        torch.testing.assert_close(found, layer(*held, lengths=lengths), atol=1e-2, rtol=1e-2)


if torch.cuda.is_available():
    for _ring in (2, 4):
        for _kv in ("ring", "gather"):
            CASES[f"ring {_ring} {_kv} recorded"] = (_ring, functools.partial(recorded, _ring, _kv))


class Projected(torch.nn.Module):
    def __init__(self, attend: torch.nn.Module, heads: int = 3) -> None:
        super().__init__()
        self.attend = attend
        self.qkv, self.out = torch.nn.Linear(20, heads * 3 * 8), torch.nn.Linear(heads * 8, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, 8)).unbind(3)
        found: torch.Tensor = self.out(self.attend(q, k, v).flatten(2))
        return found


@case(2)
def a_model_that_fsdp_shards_over_the_same_ranks() -> None:
    for name, kind in (("ring", RingAttention), ("ulysses", UlyssesAttention)):
        mesh = _mesh(name)
        torch.manual_seed(1)
        model, right = Projected(kind(mesh)).to(DEVICE), Projected(LocalAttention()).to(DEVICE)
        right.load_state_dict(model.state_dict())
        x = torch.randn(2, 11, 20, device=DEVICE)
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
        mine = x.split((6, 5), 1)[torch.distributed.get_rank()]
        model(mine).square().sum().backward()
        right(x).square().sum().backward()
        for one, other in zip(model.parameters(), right.parameters(), strict=True):
            # FSDP gives the mean over ranks of gradients that are shares of a sum.
            torch.testing.assert_close(2 * one.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-4)


@case(4)
def a_model_whose_heads_are_split_over_other_ranks() -> None:
    """torch's tensor parallelism along one dimension of a mesh, the sequence along the other."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for name, kind in (("ring", RingAttention), ("ulysses", UlyssesAttention)):
        mesh = torch.distributed.init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("heads", name))
        torch.manual_seed(1)
        model, right = Projected(kind(mesh[name]), 6).to(DEVICE), Projected(LocalAttention(), 6).to(DEVICE)
        right.load_state_dict(model.state_dict())
        x = torch.randn(2, 11, 20, device=DEVICE)
        split = {"qkv": ColwiseParallel(), "out": RowwiseParallel()}
        parallelize_module(model, mesh["heads"], split)
        mine = x.split((6, 5), 1)[mesh[name].get_local_rank()]
        found = model(mine)
        expected = right(x)
        torch.testing.assert_close(found, expected.split((6, 5), 1)[mesh[name].get_local_rank()], rtol=1e-4, atol=1e-4)
        found.square().sum().backward()
        expected.square().sum().backward()
        for one, other in zip(model.parameters(), right.parameters(), strict=True):
            assert isinstance(one, DTensor)
            grad = one.grad.full_tensor()
            torch.distributed.all_reduce(grad, group=mesh[name].get_group())
            torch.testing.assert_close(grad, other.grad, rtol=1e-4, atol=1e-4)


@case(2)
def a_model_that_is_copied() -> None:
    for one in both():
        model = torch.nn.Sequential(one)
        other = copy.deepcopy(model).eval()
        inputs = tensors()
        assert model.training
        torch.testing.assert_close(other[0](*inputs), one(*inputs))
        other[0].register_forward_hook(lambda *_: 1 / 0)
        one(*inputs)  # a hook of the copy is not the model's


# What goes wrong is told on every rank.


def raised(kind: type[Exception], *words: str, call: Callable[..., Any]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert caught.type is kind, caught.value
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def tensors(tokens: int = 4, heads: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(1, tokens, heads, D, dtype=dtype, device=DEVICE) for _ in range(3)]


def both() -> list[USPAttention]:
    return [layer_of(Setting(ring=2)), layer_of(Setting(ulysses=2))]


@case(2)
def ranks_that_disagree() -> None:
    rank = torch.distributed.get_rank()
    text = tuple(tensors(3 + rank))

    def tried(layer: USPAttention) -> None:
        wrong: dict[str, Callable[[], Any]] = {
            "dtype": lambda: layer(*tensors(dtype=torch.float64 if rank else torch.float32)),
            "heads": lambda: layer(*tensors(heads=4 + rank)),
            "batch": lambda: layer(*(t.expand(1 + rank, -1, -1, -1) for t in tensors())),
            "text": lambda: layer(*tensors(), text=text),
            "text_at": lambda: layer(*tensors(), text=tensors(3), text_at="back" if rank else "front"),
            "segments": lambda: layer(
                *tensors(), segments=torch.zeros(1, 4, dtype=torch.int32, device=DEVICE) if rank else None
            ),
            "grads": lambda: layer(*(t.requires_grad_(bool(rank)) for t in tensors())),
            "lengths": lambda: layer(*tensors(), lengths=(4, 4) if rank else None),
            "layer": lambda: layer_of(Setting(ulysses=2), softcap=float(rank))(*tensors()),
        }
        for name, call in wrong.items():
            raised(InvalidInputError, f"disagree in {name}", "rank 0", "rank 1", call=call)
        layer(*tensors())  # and goes on

    for layer in both():
        tried(layer)


@case(2)
def a_rank_that_refuses() -> None:
    rank = torch.distributed.get_rank()

    def tried(layer: USPAttention) -> None:
        bad = tensors()
        bad[1:] = [t[:, :2] for t in bad[1:]]
        raised(
            InvalidInputError if rank else RankError,
            *(("query has 4",) if rank else ("rank 1 refused", "InvalidInputError: query has 4")),
            call=lambda: layer(*(bad if rank else tensors())),
        )
        wrong = {"lengths=4; a list": {"lengths": 4}}
        if layer._ranks.ring.size == 1:
            wrong["place is a str"] = {"place": "front"}
        for words, given in wrong.items():
            raised(
                InvalidInputError if rank else RankError, words,
                call=lambda given=given: layer(*tensors(), **(given if rank else {})),
            )  # fmt: skip
        layer(*tensors())

    for layer in both():
        tried(layer)


@case(2)
def an_error_that_is_not_of_polyattn() -> None:
    """Of a plugin, say: the other ranks are told all the same."""
    rank = torch.distributed.get_rank()
    for layer in both():
        right = layer._agreement._selections
        if rank:
            layer._agreement._selections = lambda *_: [][1]
        raised(
            IndexError if rank else RankError, *(() if rank else ("rank 1 refused", "IndexError: ")),
            call=lambda layer=layer: layer(*tensors()),
        )  # fmt: skip
        layer._agreement._selections = right
        layer(*tensors())


@case(2)
def ranks_that_choose_otherwise() -> None:
    rank = torch.distributed.get_rank()
    for sizes in ({"ring": 2}, {"ulysses": 2}):
        layer = layer_of(Setting(**sizes, backend="reference" if rank else None))
        raised(
            ConfigError, "rank 0 would serve", f"and rank 1 by reference@{DEVICE.type}",
            call=lambda layer=layer: layer(*tensors()),
        )  # fmt: skip


@case(2)
def layers_that_name_different_backends() -> None:
    """Of heads that do not divide, ranks have different calls, and meet the backends' names in another order."""
    for heads, backend in ((5, None), (6, "reference")):
        layer_of(Setting(ulysses=2, backend=backend))(*tensors(heads=heads))
    few = tensors(3 * torch.distributed.get_rank(), heads=7)  # and here the first rank has none at all
    for backend in (None, "reference"):
        layer_of(Setting(ring=2, backend=backend))(*few)
        few = tensors(heads=7)


@case(2)
def second_derivatives() -> None:
    for layer in both():
        query, key, value = (t.requires_grad_() for t in tensors())
        out, _ = layer(query, key, value)
        raised(
            UnsupportedRequestError, "a second derivative", "LocalAttention",
            call=lambda out=out, query=query: torch.autograd.grad(out.square().sum(), query, create_graph=True),
        )  # fmt: skip


@case(2)
def a_backend_that_cannot() -> None:
    raised(
        UnsupportedRequestError,
        "flex_attention",
        call=lambda: layer_of(Setting(ring=2, backend="flex_attention"))(*(t.requires_grad_() for t in tensors())),
    )


@case(2)
def lengths_that_are_wrong() -> None:
    rank = torch.distributed.get_rank()
    layer = layer_of(Setting(ulysses=2))
    raised(InvalidInputError if rank else RankError, "lengths=[4, 5]", call=lambda: layer(*tensors(), lengths=(4, 5)))
    raised(InvalidInputError, "lengths", "[4, 4]", call=lambda: layer(*tensors(4 + rank), lengths=(4 + rank,) * 2))


@case(2)
def what_a_ring_refuses() -> None:
    for words, options in (
        ("window=(2, 2) on a ring", {"window": (2, 2)}),
        ("chunk=4 on a ring", {"chunk": 4, "causal": True}),
        ("causal='top_left' on a ring", {"causal": "top_left"}),
    ):
        given = {"causal": False, **options}
        raised(UnsupportedRequestError, words, "", call=lambda given=given: RingAttention(_mesh("ring"), **given))
    layer = RingAttention(_mesh("ring"), backend="window_video_attn")
    place = Place(grid=(2, 2, 2))
    raised(UnsupportedRequestError, "no rank of a ring has all of it", call=lambda: layer(*tensors(), place=place))
    segments = torch.zeros(1, 4, dtype=torch.int32, device=DEVICE)
    raised(UnsupportedRequestError, "text", call=lambda: layer(*tensors(), text=tensors(2), segments=segments))


def _mesh(name: str) -> Any:
    return mesh_of(**{"ring": 1, "ulysses": 1, name: torch.distributed.get_world_size()})[name]


@case(2)
def meshes_that_do_not_fit() -> None:
    raised(InvalidInputError, "ring=3 times ulysses=1 is 3", "2 ranks", call=lambda: init_mesh(ring=3))
    raised(InvalidInputError, "ulysses=0", call=lambda: init_mesh(ulysses=0))
    raised(InvalidInputError, "('ring',)", "takes ulysses", call=lambda: UlyssesAttention(_mesh("ring")))
    raised(InvalidInputError, "takes ring x ulysses", call=lambda: USPAttention(_mesh("ring")))
    raised(InvalidInputError, "torch.distributed.DeviceMesh", call=lambda: RingAttention((0, 1)))
    nameless = torch.distributed.device_mesh.DeviceMesh("cpu", [[0, 1]])
    raised(InvalidInputError, "has no names", call=lambda: USPAttention(nameless))
    UlyssesAttention(torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1]))(*tensors())
    one = torch.distributed.device_mesh.DeviceMesh("cpu", [0], mesh_dim_names=("ring",))
    if torch.distributed.get_rank():
        raised(InvalidInputError, "rank 1 is not in the mesh", call=lambda: RingAttention(one))
    else:
        RingAttention(one)(*tensors())
    for name, words in (("order", "zigzag"), ("text_grad", "share")):
        raised(InvalidInputError, f"Did you mean '{words}'", call=lambda n=name, w=words: _odd(n, w[:-1]))
    raised(InvalidInputError, "timeout=0", call=lambda: RingAttention(_mesh("ring"), timeout=0))


def _odd(name: str, word: str) -> Any:
    return RingAttention(_mesh("ring"), **{name: word})


# What the comparisons must see.


def seen(setting: Setting, name: str, replacement: Any, owner: Any = ring_module) -> None:
    """A defect, planted, fails the comparison on every rank."""
    right = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        run(setting)
    except AssertionError:
        return
    finally:
        setattr(owner, name, right)
    raise AssertionError("the defect was not seen")


@case(2)
def text_that_is_joined_twice() -> None:
    def own(ring: Any) -> Any:
        return [ring_module._Own(("text", "own"), ("text", "own"), ring.masked)]

    seen(Setting(ring=2, lengths=(9, 7), text="front"), "own", own, ring_module.Ring)


@case(2)
def an_lse_that_is_detached() -> None:
    right = ring_module.attention_backward

    def backward(given: Any, dout: Any, dlse: Any, *rest: Any) -> Any:
        return right(given, dout, None, *rest)

    seen(Setting(ring=2, lengths=(9, 7)), "attention_backward", backward)


@case(2)
def a_block_that_is_left_out() -> None:
    right = ring_module.Ring.visible

    def visible(ring: Any, queries: int, keys: int) -> Any:
        return [] if keys == ring.ranks.size - 1 else right(ring, queries, keys)

    seen(Setting(ring=2, lengths=(9, 7)), "visible", visible, ring_module.Ring)


@case(2)
def heads_that_are_exchanged() -> None:
    """Key heads that several ranks have: their gradients are sums."""
    right = exchange_module._summed

    def summed(parts: Any, picks: Any, heads: int) -> Any:
        several = len([head for pick in picks for head in pick]) > heads
        return right(parts[:1] + [0 * part for part in parts[1:]] if several else parts, picks, heads)

    seen(Setting(ulysses=2, lengths=(9, 7), heads=(8, 1)), "_summed", summed, exchange_module)


# Methods, which see all tokens of the heads of a rank.


def method_on_ranks(
    name: str, options: dict[str, Any], grid: tuple[int, int, int], heads: int = 5, **learned: torch.Tensor
) -> None:
    """The same on ranks as on one, forward and backward, with heads that do not divide."""
    text = (2, 3)
    tokens = math.prod(grid) + 5
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(1, tokens, heads, 16, generator=generator) for _ in range(4)]
    sizes = (tokens - 20, 20)
    mine = torch.arange(tokens).split(sizes)[torch.distributed.get_rank()]
    place = Place(grid=grid, text=text, layer=0, layers=2, step=3, steps=5, tensors=learned)
    here = {n: t[:, mine].contiguous() if t.ndim == 4 and t.shape[1] == tokens else t for n, t in learned.items()}
    polyattn.configure(attention_backend_config={name: options})
    try:
        leaves = [t.clone().requires_grad_() for t in made[:3]]
        right = polyattn.attention(*leaves, backend=name, place=place)
        grads = torch.autograd.grad((right * made[3]).sum(), leaves)
        own = [t[:, mine].clone().requires_grad_() for t in made[:3]]
        layer = UlyssesAttention(_mesh("ulysses"), backend=name, timeout=300.0)
        found = layer(*own, place=dataclasses.replace(place, tensors=here))
        own_grads = torch.autograd.grad((found * made[3][:, mine]).sum(), own)
    finally:
        polyattn.configure()
    close(found, right[:, mine], name, torch.float32)
    for one, whole_grad in zip(own_grads, grads, strict=True):
        close(one, whole_grad[:, mine], f"gradient of {name}", torch.float32)


@case(2)
def windows_of_heads() -> None:
    reach = [1, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0]
    method_on_ranks("window_video_attn", {"window_reach": reach, "window_tile": [1, 2, 2]}, (3, 4, 5))


@case(2)
def sliding_tiles_of_a_strategy() -> None:
    windows = [(1, 2, 2), (1, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2)]
    table = {
        f"{t}_{layer}_{h}": list(windows[(h + layer) % 5]) for t in range(5) for layer in range(2) for h in range(5)
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "strategy.json"
        file.write_text(json.dumps(table))
        method_on_ranks("sliding_tile_attn", {"mask_strategy_file_path": str(file), "skip_time_steps": 0}, (6, 16, 16))


@case(2)
def tiles_with_a_gate() -> None:
    gate = torch.randn(1, 261, 5, 16, generator=torch.Generator().manual_seed(9))
    method_on_ranks("video_sparse_attn", {"sparsity": 0.4}, (4, 8, 8), gate_compress=gate)


@case(2)
def a_gate_of_another_size() -> None:
    layer = UlyssesAttention(_mesh("ulysses"), backend="video_sparse_attn", timeout=300.0)
    place = Place(grid=(2, 2, 2), tensors={"gate_compress": torch.ones(1, 3, 4, D)})
    raised(InvalidInputError, "'gate_compress' [1, 3, 4, 16]", call=lambda: layer(*tensors(), place=place))


# Decoding over ranks that hold parts of the keys.


class Decoding:
    """A pool, a table and a backend on each rank, with this rank's keys of two requests."""

    lengths = ((5, 9), (7, 1))
    """Of each rank, the keys of each request before the step."""

    def __init__(self, *, sinks: bool = False, latent: bool = False, backend: str | None = None) -> None:
        torch.manual_seed(3)
        layer: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16}
        if latent:
            layer = {"heads": 4, "kv_heads": 1, "head_dim": 24, "v_head_dim": 16, "scale": 0.2, "latent": True}
        self.layer = AttentionLayer(0, **layer, sinks=torch.randn(4, device=DEVICE) if sinks else None)
        self.rank = torch.distributed.get_rank()
        self.pool = KVPool([self.layer], KVCacheConfig(page_size=4), 32, dtype=torch.float32, device=DEVICE)
        self.table = RequestTable(4, 64, 4, [-1], [PageAllocator(32)], DEVICE)
        self.backend = AttentionBackend(
            [self.layer], self.pool, self.table, limits=Limits(max_sequences=4, max_tokens=16, max_seqlen=64),
            ranks=_mesh("ring"), backend=backend,
        )  # fmt: skip
        width = (24,) if latent else (2, 16)
        self.keys = [[torch.randn(n, *width) for n in lengths] for lengths in self.lengths]
        self.values = [[torch.randn(n, *width) for n in lengths] for lengths in self.lengths]
        self.rows = [self.table.add() for _ in range(2)]
        for i, row in enumerate(self.rows):
            self.give(row, self.keys[self.rank][i], self.values[self.rank][i])

    def give(self, row: int, key: torch.Tensor, value: torch.Tensor) -> None:
        first = self.table.length(row)
        self.table.extend(row, len(key))
        pages = self.table.pages(row, 0)
        slots = torch.tensor([pages[t // 4] * 4 + t % 4 for t in range(first, first + len(key))], device=DEVICE)
        self.pool.write(0, slots, key.to(DEVICE), None if self.layer.latent else value.to(DEVICE))

    def step(self) -> None:
        """A token for each request, which rank 0 keeps, equals attention to all keys on one process."""
        query = torch.randn(2, 4, self.layer.head_dim)
        new = [torch.randn(2, *one[0].shape[1:]) for one in (self.keys[0], self.values[0])]
        if self.rank == 0:
            for row in self.rows:
                self.table.extend(row, 1)
        batch = ForwardBatch(ForwardMode.DECODE, self.rows, [self.table.length(row) for row in self.rows], [1, 1])
        self.backend.init_forward_metadata(batch)
        given = (None, None) if self.rank else (new[0].to(DEVICE), None if self.layer.latent else new[1].to(DEVICE))
        found = self.backend.forward_decode(query.to(DEVICE), *given, self.layer, batch)
        for i in range(2):
            key = torch.cat([self.keys[0][i], self.keys[1][i], new[0][i : i + 1]])
            value = torch.cat([self.values[0][i], self.values[1][i], new[1][i : i + 1]])
            if self.layer.latent:
                key, value = key[:, None], key[:, None, :16]
            sinks = None if self.layer.sinks is None else self.layer.sinks.cpu().double()
            given_right = (query[i : i + 1][None], key[None], value[None])
            right = definition(*(t.double() for t in given_right), sinks=sinks, scale=self.layer.scale)[0]
            close(found[i : i + 1], right, f"request {i}", torch.float32)
        # Of the parts a rank has what it was given: the next step sees this one's token.
        for i in range(2):
            self.keys[0][i] = torch.cat([self.keys[0][i], new[0][i : i + 1]])
            self.values[0][i] = torch.cat([self.values[0][i], new[1][i : i + 1]])


@case(2)
def decoding_over_ranks() -> None:
    for given in ({}, {"sinks": True}, {"latent": True}, {"backend": "torch_native"}):
        decoding = Decoding(**given)
        for _ in range(3):
            decoding.step()


def unequal(decoding: Decoding) -> None:
    with pytest.raises(AssertionError, match="request"):
        decoding.step()


@case(2)
def an_lse_of_another_base_on_a_rank() -> None:
    decoding = Decoding()
    right = over_ranks.merge_over
    over_ranks.merge_over = lambda ranks, out, lse, sinks: right(ranks, out, lse * 1.4427, sinks)
    try:
        unequal(decoding)
    finally:
        over_ranks.merge_over = right


@case(2)
def sinks_on_each_rank() -> None:
    decoding = Decoding(sinks=True)
    right = over_ranks.merge_over

    def early(ranks: Any, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> Any:
        share = torch.sigmoid(lse - sinks).unsqueeze(-1)
        return right(ranks, out * share, torch.logaddexp(lse, sinks), None)

    over_ranks.merge_over = early
    try:
        unequal(decoding)
    finally:
        over_ranks.merge_over = right


@case(2)
def what_decoding_over_ranks_refuses() -> None:
    rank = torch.distributed.get_rank()
    decoding = Decoding()
    rows, lengths = decoding.rows, [decoding.table.length(row) for row in decoding.rows]
    batch = ForwardBatch(ForwardMode.EXTEND, rows, lengths, [1, 1])
    raised(UnsupportedRequestError, "mode EXTEND", call=lambda: decoding.backend.plan(batch))

    def built(**layer: Any) -> Any:
        one = AttentionLayer(0, **{"heads": 4, "kv_heads": 2, "head_dim": 16, **layer})
        return AttentionBackend(
            [one], decoding.pool, decoding.table, limits=Limits(max_sequences=4, max_tokens=16, max_seqlen=64),
            ranks=_mesh("ring"),
        )  # fmt: skip

    raised(UnsupportedRequestError, "window=4", call=lambda: built(window=4))
    other = (RankError, "rank 1 cannot") if rank == 0 else (UnsupportedRequestError, "window=4")
    raised(*other, call=lambda: built(window=4 if rank else -1))
    raised(InvalidInputError, "build the same model", call=lambda: built(softcap=float(rank)))


@case(2)
def a_rank_that_does_not_come_in_time() -> None:
    """Who waited says so, who comes later is told, and both can go on."""
    layer = layer_of(Setting(ulysses=2), timeout=0.5)
    store = torch.distributed.distributed_c10d._get_default_store()
    if torch.distributed.get_rank():
        store.wait(["tests/gave up"])
        raised(RankError, "rank 0 refused", "it gave up, since", "[1] did not come", call=lambda: layer(*tensors()))
    else:
        raised(RankError, "[1] did not come to a call of attention within 0.5 s", call=lambda: layer(*tensors()))
        store.set("tests/gave up", "yes")
    layer_of(Setting(ulysses=2))(*tensors())


@case(2)
def z_a_wrong_call_with_declared_lengths() -> None:
    """The others know the lengths, and do not look again: whoever is wrong finds its own error all the same. It is the
    last case: ranks have made different numbers of rounds afterwards."""
    layer = layer_of(Setting(ulysses=2))
    layer(*tensors(), lengths=(4, 4))
    layer._agreement._timeout = 0.5
    bad = tensors()
    bad[1:] = [t[:, :2] for t in bad[1:]]
    if torch.distributed.get_rank():
        raised(InvalidInputError, "query has 4", call=lambda: layer(*bad, lengths=(4, 4)))
