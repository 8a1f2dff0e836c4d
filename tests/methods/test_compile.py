"""torch.compile: layers that share their graphs, gradients, scopes; exact attention is traced, place or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.nn import LocalAttention
from polyattn.video import Place

NAME = "window_video_attn"
OPTIONS = {NAME: {"window_tile": [2, 2, 2], "first_full_layer": 1}}


@pytest.fixture(autouse=True)
def small() -> None:
    torch._dynamo.reset()
    polyattn.configure(attention_backend_config=OPTIONS)


def tensors(keys: int = 128) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, 4, 16, generator=generator) for n in (128, keys, keys)]


class Block(torch.nn.Module):
    """A layer whose number is a tensor, as blocks that are compiled once for all layers hold it."""

    number: Tensor

    def __init__(self, layer: int, **given: Any) -> None:
        super().__init__()
        self.attention = LocalAttention(**given)
        self.register_buffer("number", torch.tensor(layer), persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = Place(grid=(4, 4, 8), layer=self.number, layers=3, role="self")
        out: Tensor = self.attention(q * 1.5, k, v, place=place)
        return out + 1


@pytest.mark.parametrize("how", ["layer", "scope"])
def test_layers_share_their_graphs(how: str) -> None:
    """Layers differ by a tensor alone: they share the graphs, and the first of them still runs dense."""
    blocks = [Block(layer, **({"backend": NAME} if how == "layer" else {})) for layer in range(3)]
    q, k, v = tensors()
    with polyattn.use_backend(None if how == "layer" else NAME):
        if how == "scope":  # layers capture the scope that they are built in
            blocks = [Block(layer) for layer in range(3)]
        right = [block(q, k, v) for block in blocks]
        assert not torch.allclose(right[0], right[1])
        found = []
        for number, block in enumerate(blocks):
            compiled = torch.compile(block, backend="eager")
            with torch._dynamo.config.patch(error_on_recompile=number > 1):
                found.append(compiled(q, k, v))
    for got, want in zip(found, right, strict=True):
        torch.testing.assert_close(got, want)


def test_gradients_through_a_compiled_method() -> None:
    block = Block(1, backend=NAME)
    grads = []
    for run in (block, torch.compile(block, backend="aot_eager")):
        q, k, v = (t.requires_grad_() for t in tensors())
        grads.append(torch.autograd.grad(run(q, k, v).square().sum(), (q, k, v)))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


def test_the_call_itself_under_a_scope() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = polyattn.attention(q, k, v, place=Place(grid=(4, 4, 8), layer=2))
        return out * 2

    qkv = tensors()
    with polyattn.use_backend(NAME):
        right = run(*qkv)
        found = torch.compile(run, backend="eager")(*qkv)
    torch.testing.assert_close(found, right)
    assert not torch.allclose(found, torch.compile(run, backend="eager")(*qkv))


def test_no_transform_looks_into_a_method() -> None:
    q, k, v = tensors()

    def run(q: Tensor) -> Tensor:
        place = Place(grid=(4, 4, 8), layer=2, layers=3)
        return polyattn.attention(q, k, v, place=place, backend=NAME).sum()  # type: ignore[no-any-return]

    for around, tensor in ((torch.func.grad, q), (torch.func.vmap, q[None])):
        torch._dynamo.reset()
        with pytest.raises(polyattn.UnsupportedRequestError, match=rf"torch.func transform \({around.__name__}\)"):
            torch.compile(around(run), backend="eager")(tensor)


def test_exact_attention_stays_in_one_graph() -> None:
    """Hosts give a place with every call; it must not cost those who do not look at it their graph."""
    block = torch.compile(Block(1), backend="eager", fullgraph=True)
    qkv = tensors()
    torch.testing.assert_close(block(*qkv), Block(1)(*qkv))

    def crossing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = polyattn.attention(q, k, v, place=Place(role="cross"))
        return out

    qkv = tensors(keys=40)
    torch.testing.assert_close(torch.compile(crossing, backend="eager", fullgraph=True)(*qkv), crossing(*qkv))


def test_a_rule_without_a_place_stays_in_one_graph() -> None:
    layer = LocalAttention(backend=NAME, role="cross")
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    qkv = tensors(keys=40)
    torch.testing.assert_close(compiled(*qkv), layer(*qkv))


def test_symbolic_trace_keeps_the_place() -> None:
    block = torch.fx.symbolic_trace(Block(2, backend=NAME))
    qkv = tensors()
    torch.testing.assert_close(block(*qkv), Block(2, backend=NAME)(*qkv))
    layer = torch.fx.symbolic_trace(LocalAttention(role="cross"))
    qkv = tensors(keys=40)
    torch.testing.assert_close(layer(*qkv), polyattn.attention(*qkv))
