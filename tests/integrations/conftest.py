"""Small models in the shapes that hosts serve, and polyattn installed into transformers for the length of a test."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.library import Library

import polyattn
from polyattn.integrations import transformers as host

os.environ.setdefault("HF_HUB_OFFLINE", "1")


KEPT: list[Library] = []


def torchvision_beside_another_torch() -> None:
    """The wheel of torchvision that engines import is of torch's CUDA build. Beside a CPU build its operators do not
    load, and two of them are looked for at import. Nobody here calls any."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        operators = Library("torchvision", "DEF")  # as long as it lives
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        KEPT.append(operators)
        importlib.import_module("torchvision")


torchvision_beside_another_torch()

# The size of everything that a configuration may name.
SMALL = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": -1,
}


@pytest.fixture
def installed() -> Iterator[tuple[str, ...]]:
    """polyattn in transformers' registries; gives the names."""
    yield host.install()
    host.uninstall()
    polyattn.configure()


def rough(model: torch.nn.Module) -> torch.nn.Module:
    """Weights large enough that attention is not a plain average, sinks that matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
            elif name.endswith("sinks"):
                weight.copy_(torch.randn(weight.shape, generator=generator))
    return model.eval()


@pytest.fixture
def build() -> Callable[..., torch.nn.Module]:
    """`build("llama", sliding_window=4)`: a small causal model of that type with weights that make a difference."""

    transformers = pytest.importorskip("transformers")

    def make(kind: str, **sizes: object) -> torch.nn.Module:
        if kind not in transformers.CONFIG_MAPPING:
            pytest.skip(f"not run: {kind} (transformers {transformers.__version__} has none)")
        config = transformers.AutoConfig.for_model(kind)
        for key, value in {**SMALL, **sizes}.items():
            if key in sizes or hasattr(config, key):
                setattr(config, key, value)
        return rough(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))

    return make


@pytest.fixture
def relative() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """Relative L2 distance of the first from the second."""

    def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
        assert got.shape == wanted.shape
        assert got.isfinite().all()
        return ((got - wanted).norm() / wanted.norm()).item()

    return distance
