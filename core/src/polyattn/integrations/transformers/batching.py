"""This module serves continuous batching of transformers (`generate_batch`): its pages, and the names that it admits.

Up to transformers 5.23 the layers hand their cache to the attention function, from 5.24 on they update it themselves.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...errors import UnsupportedRequestError
from ..common.keywords import asked_by
from .keywords import LENGTHS

__all__ = ["admitting", "from_pages", "manager"]


def from_pages(
    module: Any, key: Tensor, value: Tensor, masked: bool, given: dict[str, Any], backend: str | None
) -> tuple[Tensor, Tensor]:
    """Write a step's keys and values to the pages and read those of all its requests: [1, H_kv, T_k, D], [.., D_v].

    Args:
        key, value: [1, H_kv, T, D|D_v], the new ones. masked: continuous batching made a mask, which then says
            everything. given: the keywords of the call; those about pages are taken out, lengths become the layer's.

    Raises:
        UnsupportedRequestError: the pages are to be read by block tables, or the cache is of another kind.
    """
    cache = given.pop("cache")
    if given.pop("block_table", None) is not None or not {"read_index", "write_index"} <= given.keys():
        reason = "only the pages of continuous batching are read, by read_index and write_index"
        raise UnsupportedRequestError(
            f"cache ({type(cache).__name__}) reached {asked_by(module, backend)}: {reason}; leave block tables "
            f"(max_blocks_per_request) out of ContinuousBatchingConfig, or use generate() instead",
            {"cache": [reason]},
        )
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=given)
    if masked:
        for name in LENGTHS:
            given.pop(name, None)
    return key, value


def manager() -> Any:
    """Find the class that runs continuous batching; None where transformers has none or it asks no model for its
    name."""
    try:
        api = importlib.import_module("transformers.generation.continuous_batching.continuous_api")
    except ImportError:
        return None
    found = getattr(api, "ContinuousBatchingManager", None)
    return found if hasattr(found, "switch_to_cb_friendly_attn") else None


def admitting(owner: Any, ours: Callable[[str], bool]) -> dict[str, Callable[..., Any]]:
    """Make a method for `owner` to carry, which refuses all names but transformers' own: polyattn's names are admitted
    as they are."""
    original = owner.switch_to_cb_friendly_attn

    @functools.wraps(original)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return None if ours(model.config._attn_implementation) else original(self, model, *args, **kwargs)

    return {"switch_to_cb_friendly_attn": switch_to_cb_friendly_attn}
