"""What attention a causal LM does, layer by layer, read from one small forward pass: no list of model names.

The pass runs under a name of its own: its attention function writes down the arguments, its mask function remembers
each mask and what it was made of, so that a layer's mask is known. What pages cannot serve is refused here, once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedRequestError
from ...serving.layer import AttentionLayer
from .keywords import HARMLESS, asked_by, read_keywords
from .registry import interfaces

__all__ = ["PROBE", "attending", "configs_of", "probe", "reading"]

PROBE = "polyattn_probe"
TOKENS = 3
"""Of the probe pass: more than one, so that masks are asked for."""

Attend = Callable[..., Tensor]


def configs_of(model: Any) -> list[Any]:
    """Every config that a part of the model reads."""
    return list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())


@contextlib.contextmanager
def attending(configs: Sequence[Any], name: str) -> Iterator[None]:
    """The attention implementation of models with these configs is `name` inside, and what it was afterwards."""
    before = [(config, config._attn_implementation_internal) for config in configs]
    try:
        for config, _ in before:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, old in before:
            config._attn_implementation_internal = old


def reading(call: Attend) -> Callable[..., tuple[Tensor, None]]:
    """An attention function for transformers that sorts the keywords and asks `call(module, query, key, value, mask,
    scale, window, softcap, sinks)`; query, key and value are [B, H, S, D] as the layer gave them."""

    def polyattn_serving(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        more = read_keywords(kwargs, s_aux, HARMLESS, module, None)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        odd = {
            "dropout": bool(dropout),
            "is_causal=False": not causal,
            "position_bias": more.bias is not None,
            "packed sequences": more.cu_q is not None or more.sequence is not None,
        }
        if wrong := [word for word, there in odd.items() if there]:
            raise _refused(f"{wrong[0]} reached {asked_by(module, None)}", "a paged, causal layer has none")
        return call(
            module, query, key, value, attention_mask, scaling, sliding_window, softcap or 0.0, more.sinks
        ), None

    return polyattn_serving


@dataclasses.dataclass
class _Notes:
    masks: dict[int, tuple[Tensor, int | None]]
    """id of a mask -> the mask (kept, so that its id stays its own) and its window, -1 = none; None = it is no causal
    mask, which is a reason to refuse only if a layer gets it."""
    layers: dict[nn.Module, AttentionLayer]


_notes: list[_Notes] = []


def _mask(*, q_length: int, kv_length: int, mask_function: Any, local_size: int | None = None, **kwargs: Any) -> Tensor:
    device = kwargs.get("device")
    window = -1 if local_size is None else local_size - 1
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    _notes[-1].masks[id(mask)] = (mask, window if _is_plain(mask_function, window, device) else None)
    return mask


def _is_plain(function: Any, window: int, device: Any) -> bool:
    """Whether a mask function is causal with this window, tried on the borders of a few windows and around them."""
    size = window + 1 if window > 0 else 1024
    rows = [r for n in range(4) for r in (n * size - 1, n * size, n * size + 1) if r >= 0]
    pairs = {(r, k) for r in rows for d in (0, 1, size - 1, size, size + 1) for k in (r - d, r + d) if k >= 0}
    q, k = (torch.tensor(side, device=device) for side in zip(*sorted(pairs), strict=True))
    zero = torch.zeros_like(q)
    try:
        found = function(zero, zero, q, k)
    except (IndexError, RuntimeError, TypeError):
        return False  # it looks something up by position: no rule of distances
    expected = (k <= q) & ((k >= q - window) if window >= 0 else True)
    return bool((found == expected).all())


def _record(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scale: Any,
    window: Any,
    softcap: float,
    sinks: Any,
) -> Tensor:
    notes = _notes[-1]
    if module in notes.layers:
        raise _refused(f"{type(module).__name__} attends twice in one pass", "a layer has one place in the cache")
    # Where there is a mask it says everything about positions; a layer's own word counts only where there is none.
    earlier = -1 if window is None else window - 1
    if mask is not None:
        known, made_of = notes.masks.get(id(mask), (None, None))
        if made_of is None:
            whose = "a mask of its own making" if known is None else "a mask that is not causal, or in chunks,"
            raise _refused(f"{whose} reached {asked_by(module, None)}", "paged layers see all earlier keys or a window")
        earlier = made_of
    notes.layers[module] = AttentionLayer(
        layer_id=len(notes.layers),
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=query.shape[3],
        v_head_dim=value.shape[3],
        scale=scale,
        window=earlier,
        softcap=softcap,
        sinks=None if sinks is None else sinks.detach(),
    )
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def probe(model: Any) -> dict[nn.Module, AttentionLayer]:
    """Attention module -> its `AttentionLayer`, in the order of the forward pass.

    Raises:
        UnsupportedRequestError: the model has layers that keep a state other than keys and values, masks other than
            causal ones, or attention that the name does not reach. BackendUnavailableError: see `interfaces`.
    """
    functions, masks, _ = interfaces()
    functions.register(PROBE, reading(_record))
    masks.register(PROBE, _mask)
    notes = _Notes({}, {})
    _notes.append(notes)
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device=model.device)
    try:
        with torch.no_grad(), attending(configs_of(model), PROBE):
            model(input_ids=tokens, position_ids=torch.arange(TOKENS, device=model.device)[None], use_cache=False)
    finally:
        _notes.pop()
        for registry in (functions, masks):
            registry._global_mapping.pop(PROBE, None)
    config = model.config.get_text_config(decoder=True)
    kind = type(model).__name__
    if not notes.layers:
        raise _refused(f"no attention call of {kind} reached polyattn", "it computes attention in its own code")
    if len(notes.layers) != config.num_hidden_layers:
        reason = f"{len(notes.layers)} of the {config.num_hidden_layers} layers of {kind} attend through the interface"
        raise _refused(reason, "what the others keep between steps is in no page")
    if shared := getattr(config, "num_kv_shared_layers", None):
        raise _refused(f"{shared} layers of {kind} use other layers' keys", "a layer has pages of its own")
    return notes.layers


def _refused(what: str, why: str) -> UnsupportedRequestError:
    return UnsupportedRequestError(
        f"{what}: {why}, so this model cannot be served from pages; use model.generate() with "
        f"attn_implementation='polyattn' instead",
        {"serving": [f"{what}: {why}"]},
    )
