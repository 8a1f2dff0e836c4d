"""This module tells a host why a backend cannot serve a layer. A host asks once, when the layer is built, not at its
first call.

Hosts such as vLLM ask a backend's class for each property of a layer. Here the whole request is judged by the rows that
judge real calls, so that the answer and the call cannot differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ...contract import AttentionRequest
from ...errors import BackendUnavailableError, UnsupportedRequestError
from ...selection.inspection import catalogue
from ...selection.overrides import SCOPE
from ...selection.select import select
from ...selection.tuned_policy import current_policy

__all__ = ["reasons_against"]


def reasons_against(requests: Iterable[AttentionRequest], backend: str | None = None) -> tuple[str, ...]:
    """Say why these requests are not served here, each reason once; empty where all of them are.

    Args:
        requests: what the layer will ask for, one for each phase; build them from one template with
            `dataclasses.replace`. backend: the backend that is named, None = whoever is chosen. A documented fallback
            does not count as the backend that was named: the host has fallbacks of its own.

    Example:
        >>> template = AttentionRequest(family="paged", page_size=16, phase="decode", s_relation="one")
        >>> reasons_against([template], "torch_native")
        ()
    """
    found: dict[str, None] = {}
    for request in requests:
        policy = dataclasses.replace(current_policy(backend, SCOPE.get(), request), strict=True)
        try:
            select(request, catalogue(), policy)
        except UnsupportedRequestError as refusal:
            found.update(dict.fromkeys(_own_reasons(refusal, backend) or [str(refusal)]))
        except BackendUnavailableError as absent:
            found[str(absent)] = None
    return tuple(found)


def _own_reasons(refusal: UnsupportedRequestError, backend: str | None) -> list[str]:
    """Pick the reasons of the backend that was named; empty where none was, or where it goes by another name."""
    word = (backend or "").partition("@")[0]
    for name in (backend, word, word.partition("/")[0]):
        if name and name in refusal.rejected:
            return refusal.rejected[name]
    return []
