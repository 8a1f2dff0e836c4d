"""Is a request that somebody wrote by hand one that can be judged? Calls make theirs from checked arguments."""

from __future__ import annotations

import typing
from typing import Any

from ..errors import InvalidInputError
from .request import AttentionRequest

__all__ = ["check_request"]

_KINDS: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}
_PAIRS = ("window", "block_shape")


def check_request(request: Any) -> AttentionRequest:
    """`request`, when the types of its fields are those of `AttentionRequest`.

    Raises:
        InvalidInputError: it is another thing, or a field has a value of another type.
    """
    if not isinstance(request, AttentionRequest):
        raise InvalidInputError(f"{request!r} is no AttentionRequest; for example AttentionRequest(head_dim=64)")
    for name, hint in typing.get_type_hints(AttentionRequest).items():
        value, allowed = getattr(request, name), _KINDS.get(hint)
        if allowed and not (isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool))):
            raise _wrong(name, value, hint.__name__)
        if name in _PAIRS and not (isinstance(value, tuple) and [type(one) for one in value] == [int, int]):
            raise _wrong(name, value, "pair of int")
    if not (request.scale is None or (isinstance(request.scale, (int, float)) and not isinstance(request.scale, bool))):
        raise _wrong("scale", request.scale, "float, or None")
    for name in ("head_dim", "heads", "kv_heads"):
        if getattr(request, name) < 1:
            raise InvalidInputError(f"AttentionRequest.{name}={getattr(request, name)} must be 1 or more")
    return request


def _wrong(name: str, value: Any, wanted: str) -> InvalidInputError:
    return InvalidInputError(
        f"AttentionRequest.{name}={value!r:.80} is a {type(value).__name__}; it must be a {wanted}, as in "
        f"{getattr(AttentionRequest(), name)!r}"
    )
