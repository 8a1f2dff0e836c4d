"""`torch_sdpa` on MPS, over what PyTorch's own SDPA does there (aten/src/ATen/native/mps/operations/Attention.mm, with
the routing of transformers/attention.cpp), with the defects of the versions that polyattn runs on.

Without gradients and dropout SDPA is the MPS operator, else torch's composite. The operator refuses float64, dropout,
and a mask beside the causal flag; in half precision the flag hid keys by groups of four queries (pytorch#195910); V was
taken for as wide as Q (pytorch#176767); the kernel of at most 8 queries read a mask that heads share in the wrong place
(pytorch#184180); a row without keys is NaN (pytorch#167515); no tensor may be empty.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.backends import torch_sdpa
from polyattn.contract import judge
from polyattn.registry.manager import get_manager
from polyattn.testing import Case, OffChip, generate, run_case

MPS = OffChip("torch_sdpa", "mps")
VECTOR = (64, 96, 128, 256)
composite = torch.nn.functional.scaled_dot_product_attention


def mps_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """SDPA of tensors that would lie on an MPS device."""
    if query.dtype == torch.float64:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")
    if dropout_p or (torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))):
        return composite(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if any(not t.numel() for t in (query, key, value)):
        raise RuntimeError("Placeholder tensor is empty!")
    if is_causal and attn_mask is not None:
        raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
    if value.shape[-1] != query.shape[-1]:
        return torch.full((*query.shape[:3], value.shape[-1]), torch.nan, dtype=query.dtype)
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    scores = query.float() @ key.float().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        row = torch.arange(scores.shape[2])
        row = row if query.dtype == torch.float32 else row | 3
        scores = scores.masked_fill(torch.arange(scores.shape[3]) > row[:, None], -torch.inf)
    if attn_mask is not None:
        mask = attn_mask
        if query.shape[2] <= 8 and query.shape[2] <= key.shape[2] and query.shape[-1] in VECTOR:
            shared = mask.dim() == 4 and (mask.shape[1] < query.shape[1] or 0 in mask.stride()[:2])
            mask = mask[:1] if shared else mask
        bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask.float()
        scores = scores + bias
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


@pytest.fixture(autouse=True)
def _on_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_sdpa, "_sdpa", mps_sdpa)


def cases(*families: str, per_row: int = 24) -> list[Case]:
    found = generate(MPS.rows, MPS.facts, families=families, dtypes=("float32", "bfloat16"), per_row=per_row)
    return [c for c in found if c.check != "capture" and not c.request.large and not c.request.transform]


@pytest.mark.parametrize("case", [*cases("dense", per_row=10), *cases("paged", "mla", per_row=1)], ids=str)
def test_conformance(case: Case) -> None:
    outcome = run_case(MPS, case)
    assert outcome.verdict == "passed", str(outcome)


def of_few_queries(heads: int) -> Any:
    """(queries, keys, values, a mask for each batch): 2 batches of 8 queries."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 4, 8, 64, generator=generator) for _ in range(3))
    return q, k, v, torch.rand(2, heads, 8, 8, generator=generator) > 0.4


@pytest.mark.parametrize("heads", [1, 4])
def test_a_mask_shared_by_heads_is_spelt_out_for_few_queries(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, mask = of_few_queries(heads)
    mask = mask | torch.eye(8, dtype=torch.bool)
    request = MPS_REQUEST | {"heads": 4, "kv_heads": 4, "mask": "bool", "layout": "BHSD"}
    forward = torch_sdpa.TorchSDPA().bind(_request(**request)).forward
    right = composite(q, k, v, mask)
    torch.testing.assert_close(forward(q, k, v, attn_mask=mask), right)
    monkeypatch.setattr(torch_sdpa, "_VECTOR_ROWS", 0)
    assert torch.allclose(forward(q, k, v, attn_mask=mask), right, atol=1e-4) is (heads == 4), "the defect is there"


MPS_REQUEST: dict[str, Any] = {"platform": "mps", "dtype": "float32", "head_dim": 64}


def _request(**fields: Any) -> Any:
    from polyattn.contract import AttentionRequest

    return AttentionRequest(**fields).normalised()


PLANTED: list[tuple[str, Any, dict[str, Any]]] = [
    ("open_empty_rows", lambda mask: (mask, None), {"closed_rows": True}),
    ("_math", mps_sdpa, {"zero_size": True}),
    ("position_kind", lambda request: "all", {"causal": "bottom_right"}),
]


@pytest.mark.parametrize(("name", "change", "fields"), PLANTED, ids=[name for name, *_ in PLANTED])
def test_each_mend_is_needed(name: str, change: Any, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_sdpa, name, change)
    tried = [
        case
        for case in cases("dense")
        if all(getattr(case, field, getattr(case.request, field, None)) == value for field, value in fields.items())
    ]
    assert any(run_case(MPS, case).verdict != "passed" for case in tried)


REFUSED = [
    ({"dtype": "float64"}, "dtype='float64' is not one of float32, float16, bfloat16"),
    ({"dropout": 0.1}, "dropout=0.1 is not declared"),
    ({"lse": True}, "lse=True is not declared"),
    ({"sinks": True}, "sinks=True is not declared"),
    ({"softcap": 30.0}, "softcap=30.0 is not declared"),
    ({"grad": ("mask",), "mask": "additive"}, "grad=('mask',) includes mask, allowed: query, key, value"),
    ({"graph_capture": True}, "graph_capture=True is not declared"),
    ({"deterministic": True}, "deterministic=True is not declared"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_refused_outside_the_limits(changes: dict[str, Any], words: str) -> None:
    verdict = judge(MPS.rows, _request(**{**MPS_REQUEST, **changes}))
    assert not verdict
    assert words in "; ".join(verdict.reasons)


PASSED: list[dict[str, Any]] = [
    *({"head_dim": d, "dtype": t} for d in (40, 64, 80, 96, 128, 256, 576) for t in ("float32", "float16", "bfloat16")),
    {"v_head_dim": 24},
    {"heads": 32, "kv_heads": 4},
    {"mask": "bool", "causal": "bottom_right", "window": (17, -1)},
    {"mask": "additive", "causal": "top_left", "grad": ("query", "key", "value")},
]


@pytest.mark.parametrize("changes", PASSED)
def test_served_within_the_limits(changes: dict[str, Any]) -> None:
    verdict = judge(MPS.rows, _request(**{**MPS_REQUEST, **changes}))
    assert verdict
    assert verdict.lowerings == ()


def test_flex_attention_is_not_there() -> None:
    assert {name for name, platform in get_manager().backends if platform == "mps"} >= {"torch_sdpa", "torch_native"}
    assert ("flex_attention", "mps") not in get_manager().backends
