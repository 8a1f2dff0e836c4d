"""Latent attention to listed tokens, as the public call has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.errors import InvalidInputError, UnsupportedRequestError

LENS, NEW, H, D, VALUE, PAGE = (13, 5, 0), (4, 1, 1), 2, 24, 16, 4


def step(**changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    starts = [0, 4, 5, 6]
    table = torch.tensor([[3, 0, 5, 1], [2, 6, 0, 0], [0, 0, 0, 0]], dtype=torch.int32)
    found: dict[str, Any] = {
        "query": torch.randn(6, H, D, generator=generator),
        "cache": torch.randn(7, PAGE, D, generator=generator),
        "page_table": table,
        "seq_lens": torch.tensor(LENS, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor(starts, dtype=torch.int32),
        "max_seqlen_q": 4,
        "max_seqlen_k": 13,
        "scale": 0.2,
        "v_head_dim": VALUE,
        "return_lse": True,
    }
    return {**found, **changes}


def everything(topk: int) -> Tensor:
    """All that each query sees, from the last token on."""
    rows = []
    for keys, new in zip(LENS, NEW, strict=True):
        for n in range(new):
            seen = max(keys - new + n + 1, 0)
            rows.append([*range(seen)][::-1] + [-1] * (topk - seen))
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("backend", ["torch_native", "reference"])
def test_lists_of_all_tokens_are_dense_attention(backend: str) -> None:
    wanted = polyattn.mla_attention(**step(), backend="reference")
    for topk in (13, 20):
        found = polyattn.mla_attention(**step(token_indices=everything(topk)), backend=backend)
        for own, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def test_a_query_without_tokens_sees_nothing() -> None:
    lists = everything(13)
    lists[2] = -1
    out, lse = polyattn.mla_attention(**step(token_indices=lists))
    assert not out[2].any()
    assert lse[2].isneginf().all()
    assert lse[1].isfinite().all()


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ((0, 0), 11, r"token_indices\[0\]: 11 is not -1, nor a token that it sees; query 0 sees 10 tokens"),
        ((4, 3), 5, r"token_indices\[4\]: 5 is not -1, .* query 4 sees 5 tokens"),
        ((3, 0), -2, r"token_indices\[3\]: -2 is not -1"),
        ((5, 0), 0, r"token_indices\[5\]: 0 is not -1, .* query 5 sees 0 tokens"),
        ((1, 0), 3, r"token_indices\[1\]: 3 is listed twice"),
    ],
)
def test_lists_that_are_wrong(place: tuple[int, int], value: int, words: str) -> None:
    lists = everything(13)
    lists[place] = value
    with pytest.raises(InvalidInputError, match=words):
        polyattn.mla_attention(**step(token_indices=lists))


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        (torch.zeros(6, 0, dtype=torch.int32), r"token_indices is \(6, 0\) .* \[6, topk\] \(T_q, one token or more\)"),
        (torch.zeros(5, 3, dtype=torch.int32), r"token_indices is \(5, 3\)"),
        (torch.zeros(6, dtype=torch.int32), r"token_indices"),
        (torch.zeros(6, 3), r"token_indices"),
    ],
)
def test_lists_that_are_none(lists: Tensor, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        polyattn.mla_attention(**step(token_indices=lists))


def test_a_backend_that_reads_no_lists_refuses_them() -> None:
    with pytest.raises(UnsupportedRequestError, match=r"torch_sdpa.*token_topk=13 is not declared"):
        polyattn.mla_attention(**step(token_indices=everything(13)), backend="torch_sdpa")
