"""This module reads what a model of transformers says beside query, key, value and mask.

It is used, known to be harmless and listed here, or refused by its name (`common/keywords.py` says why).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from ...errors import InvalidInputError
from ..common.keywords import asked_by, refuse_unknown, refused

__all__ = ["EAGER_STEP", "HARMLESS", "LENGTHS", "SEMANTIC", "More", "read_keywords"]

HARMLESS = frozenset(
    {
        # Positions are in the rotated queries and keys before attention is called (`borders.py` looks where they start
        # again).
        *("position_ids", "cache_position", "position_embeddings"),
        # Switches of the layers around attention.
        *("use_cache", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"),
        *("num_items_in_batch", "labels", "return_loss", "num_logits_to_keep"),
        # Inputs of the model, read before its first layer; a caller's extra ones travel along.
        *("input_ids", "decoder_input_ids", "inputs_embeds", "token_type_ids", "mm_token_type_ids", "pixel_values"),
        # What a tokenizer returns beside them.
        *("special_tokens_mask", "length", "overflow_to_sample_mapping"),
        # Of continuous batching: what becomes of the logits, and where pages are, once they were read and written.
        *("logits_indices", "logits_processor_args", "read_index", "write_index"),
    }
)
"""Keywords that say nothing about attention."""

EAGER_STEP = "load the model, or the part it concerns, with attn_implementation='eager'"
_SPARSE = "use attn_implementation='sdpa' or 'eager' for this model: under those names it puts the choice into its mask"

_REFUSED = {
    # The attention function of installed names has taken these two out before; layers served from pages have not.
    "output_attentions": ("attention over pages stores no weights, so none can be returned", "leave it out"),
    "cache": ("a layer served from the pages of an engine has no other cache", "leave it out"),
    "indices": ("each query picks its own keys, and no dense call of polyattn takes that list", _SPARSE),
    "block_indices": (
        "each query picks its own blocks of keys, and no dense call of polyattn takes that list",
        _SPARSE,
    ),
}

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")

SEMANTIC = frozenset(
    {
        *("attention_mask", "dropout", "scaling", "is_causal", "sliding_window", "softcap", "s_aux"),
        *("sinks", "position_bias", "seq_idx", "deterministic"),
        *LENGTHS,
        *_REFUSED,
    }
)
"""Keywords that change the result: used or refused, never dropped."""


@dataclasses.dataclass(frozen=True)
class More:
    """The keywords that few layers use.

    Attributes:
        sinks: [H_q] logits. row_sinks: [B|1, H_q, S_q, 1], one for each row and head instead.
        bias: [B|1, H_q|1, S_q, S_k], added to the logits.
        cu_q, cu_k: int32 [N+1], where the packed sequences begin; max_q, max_k: the longest of them.
        sequence: int [B, S], the packed sequence each token belongs to.
        deterministic: the same bits on every run.
    """

    sinks: Tensor | None = None
    row_sinks: Tensor | None = None
    bias: Tensor | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    max_q: int = 0
    max_k: int = 0
    sequence: Tensor | None = None
    deterministic: bool = False


_NOTHING = More()


def read_keywords(
    given: dict[str, Any], s_aux: Tensor | None, harmless: frozenset[str], module: Any, backend: str | None
) -> More:
    """Sort the keywords of one call. None means not given; `s_aux` is transformers' other word for sinks.

    Raises:
        UnsupportedRequestError: a keyword that changes the result and cannot be honoured, or one nobody knows.
        InvalidInputError: keywords that contradict each other or miss their partners.
    """
    rest = {k: v for k, v in given.items() if v is not None and k not in harmless}
    if not rest and s_aux is None:
        return _NOTHING  # nearly every call
    for name, (reason, step) in _REFUSED.items():
        # False and 0 switch these off.
        if name in rest and (isinstance(rest[name], Tensor) or rest[name]):
            raise refused(name, asked_by(module, backend), reason, step)
        rest.pop(name, None)
    lengths = {name: rest.pop(name) for name in LENGTHS if name in rest}
    sinks, bias, sequence = (rest.pop(name, None) for name in ("sinks", "position_bias", "seq_idx"))
    deterministic = bool(rest.pop("deterministic", False))
    if rest:
        refuse_unknown(rest, asked_by(module, backend), EAGER_STEP)
    if sinks is not None and s_aux is not None:
        raise InvalidInputError(f"both s_aux and sinks reached {asked_by(module, backend)}; pass one of them")
    by_row = sinks is not None and sinks.ndim == 4 and sinks.shape[3] == 1
    if sinks is not None and sinks.ndim != 1 and not by_row:
        reason = f"sinks of shape {tuple(sinks.shape)} are neither one per head, [H_q], nor per row, [B, H_q, S_q, 1]"
        raise refused("sinks", asked_by(module, backend), reason, EAGER_STEP)
    return More(
        sinks=s_aux if sinks is None else None if by_row else sinks,
        row_sinks=sinks if by_row else None,
        bias=bias,
        sequence=sequence,
        deterministic=deterministic,
        **_packed(lengths, module, backend),
    )


def _packed(lengths: dict[str, Any], module: Any, backend: str | None) -> dict[str, Any]:
    if not lengths:
        return {}
    if missing := [name for name in LENGTHS if name not in lengths]:
        raise InvalidInputError(
            f"{', '.join(lengths)} reached {asked_by(module, backend)} without {', '.join(missing)}; "
            f"packed sequences need all four, or none and a mask"
        )
    cu_q, cu_k, max_q, max_k = (lengths[name] for name in LENGTHS)
    int_q = _int32(cu_q)
    return {
        "cu_q": int_q,
        # One tensor tells the call that queries and keys have the same lengths.
        "cu_k": int_q if cu_k is cu_q else _int32(cu_k),
        "max_q": max_q if isinstance(max_q, int) else int(max_q),
        "max_k": max_k if isinstance(max_k, int) else int(max_k),
    }


def _int32(cu: Any) -> Any:
    return cu.int() if isinstance(cu, Tensor) else cu
