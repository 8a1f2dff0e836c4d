"""Requests that are written by hand, for `explain` and `what_if`: what cannot be judged is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

import polyattn
from polyattn.contract import AttentionRequest
from polyattn.errors import BackendUnavailableError, InvalidInputError


@pytest.mark.parametrize(
    "fields, wrong",
    [
        ({"head_dim": "x"}, r"AttentionRequest.head_dim='x' is a str; it must be a int, as in 128"),
        ({"head_dim": 64.0}, r"head_dim=64.0 is a float; it must be a int"),
        ({"heads": True}, r"heads=True is a bool; it must be a int"),
        ({"heads": 0}, r"AttentionRequest.heads=0 must be 1 or more"),
        ({"window": "x"}, r"window='x' is a str; it must be a pair of int, as in \(-1, -1\)"),
        ({"window": (1,)}, r"window=\(1,\) is a tuple; it must be a pair of int"),
        ({"window": (1.0, 0)}, r"window=\(1.0, 0\) is a tuple; it must be a pair of int"),
        ({"scale": "x"}, r"scale='x' is a str; it must be a float, or None"),
        ({"softcap": "x"}, r"softcap='x' is a str; it must be a float, as in 0.0"),
        ({"sinks": 1}, r"sinks=1 is a int; it must be a bool, as in False"),
        ({"platform": 3}, r"platform=3 is a int; it must be a str, as in 'cpu'"),
    ],
)
def test_a_field_of_another_type(fields: dict[str, Any], wrong: str) -> None:
    with pytest.raises(InvalidInputError, match=wrong):
        polyattn.explain(AttentionRequest(**fields))
    with pytest.raises(InvalidInputError, match=wrong):
        polyattn.what_if(AttentionRequest(**fields), platform="cpu")


def test_what_is_no_request() -> None:
    with pytest.raises(
        InvalidInputError, match=r"3 is no AttentionRequest; for example AttentionRequest\(head_dim=64\)"
    ):
        polyattn.what_if(3, platform="cpu")  # type: ignore[arg-type]


def test_an_unknown_platform() -> None:
    with pytest.raises(BackendUnavailableError, match=r"no platform 'cdua'. Did you mean 'cuda'\? Known: cpu, cuda, "):
        polyattn.explain(AttentionRequest(platform="cdua"))
