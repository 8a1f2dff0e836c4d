"""This module makes the keys that measurements are stored under: the fields of a request that decide which backend is
fast, besides the lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..contract import AttentionRequest
from ..contract.request_json import plain_request, read_request

__all__ = ["request_key", "request_of"]

_WHERE = {"platform", "arch", "toolkit", "features"}
"""Fields that say which machine it is: the place of a measurement does."""
_FREE = {"options", "graph_capture", "batch_bucket", "q_bucket", "k_bucket"}
"""Fields that do not tell one measurement from another. A recorded call runs the kernel of the one that is not."""
_SWITCHES = {"scale": 0.3, "softcap": 50.0, "dropout": 0.5}
"""Fields whose value changes nothing but the result, beside a value that is no default of theirs."""


def request_key(request: AttentionRequest) -> dict[str, Any]:
    """Return what of a request decides which backend is fast, besides the lengths."""
    found = {name: v for name, v in plain_request(request.normalised()).items() if name not in _WHERE | _FREE}
    return {name: True if name in _SWITCHES else value for name, value in found.items()}


def request_of(key: Mapping[str, Any]) -> AttentionRequest:
    """A request that has such a key. Where any value of a field does, it has one.

    Raises:
        ConfigError: no request has.
    """
    return read_request({name: _SWITCHES.get(name, value) for name, value in key.items()}, "a measurement")
