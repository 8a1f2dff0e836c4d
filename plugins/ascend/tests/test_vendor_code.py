"""The adapters' calls, made to torch_npu's own operators on tensors without data, where a wheel of it is at hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from polyattn.testing.emulators import Emulated
from polyattn.testing.signatures import schema_of

from . import vendor_code
from .emulators import SIGNATURES, torch_npu

TARGET = Emulated("fa", "torch-npu", "npu:ascend910b@8.5")


def test_every_call_is_one_that_torch_npu_takes() -> None:
    wheel = os.environ.get("TORCH_NPU_WHEEL")
    if not wheel:
        pytest.skip("set TORCH_NPU_WHEEL to a wheel of torch-npu for this Python and torch")
    assert vendor_code.run(Path(wheel), os.environ) == 0


@pytest.mark.parametrize(
    ("copies", "dtype", "held"), [(8, torch.float32, True), (1, torch.float32, False), (8, torch.half, False)]
)
def test_another_shape_or_dtype_is_seen(copies: int, dtype: torch.dtype, held: bool, monkeypatch: Any) -> None:
    library = torch_npu.library().install(monkeypatch)

    def operator(query: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
        assert query.is_meta
        stats = query.new_empty(2, 4, 5, copies, dtype=dtype)
        return torch.empty_like(query), stats, stats, query.new_empty(0), 0, 0, 0

    seen: set[str] = set()
    vendor_code.follow(library, "npu_fusion_attention", operator, seen)
    bound = TARGET.bind(heads=4, kv_heads=4, head_dim=64)
    tensors = [torch.randn(2, 5, 4, 64).bfloat16() for _ in range(3)]
    if not held:
        with pytest.raises(AssertionError, match=r"npu_fusion_attention, result 1: .* emulated, .* the vendor's"):
            bound.forward(*tensors)
        return
    bound.forward(*tensors)
    assert seen == {"npu_fusion_attention"}


@pytest.mark.parametrize("key", SIGNATURES.entries)
def test_schemas_are_read_out_of_the_vendors_yaml_as_they_are(key: str) -> None:
    """Defaults in quotes and all."""
    entry = SIGNATURES.entries[key]
    line = f"- func: {entry['schema'].removeprefix('npu::')}\n  variants: function\n"
    assert schema_of(line.encode(), entry["name"]) == entry["schema"]
