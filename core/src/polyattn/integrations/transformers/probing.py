"""This module reads what attention a causal LM does, layer by layer, from a few small forward passes. It has no list of
model names.

The passes run under a name of their own: its attention function writes down the arguments, its mask function remembers
each mask and what it was made of, so that a layer's mask is known. What pages cannot serve is refused here, once.
Positions are tried in `probing_positions`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ...errors import UnsupportedRequestError
from ...serving.layer import AttentionLayer, StateLayer
from ..common.keywords import asked_by
from .chunks import Turning
from .keywords import HARMLESS, read_keywords
from .probing_positions import check_positions
from .recurrent import Shapes, calling
from .registry import interfaces

__all__ = ["PROBE", "attending", "configs_of", "probe", "reading"]

PROBE = "polyattn_probe"
TOKENS = 3
"""Tokens of the probe pass. There is more than one, so that masks are asked for."""

Attend = Callable[..., Tensor]


def configs_of(model: Any) -> list[Any]:
    """List every config that a part of the model reads."""
    return list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())


@contextlib.contextmanager
def attending(configs: Sequence[Any], name: str) -> Iterator[None]:
    """Set the attention implementation of models with these configs to `name` inside, and to what it was afterwards."""
    before = [(config, config._attn_implementation_internal) for config in configs]
    try:
        for config, _ in before:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, old in before:
            config._attn_implementation_internal = old


def reading(call: Attend, *, lists: bool = False) -> Callable[..., tuple[Tensor, None]]:
    """Make an attention function for transformers that sorts the keywords and asks `call(module, query, key, value,
    mask, scale, window, softcap, sinks)`; query, key and value are [B, H, S, D] as the layer gave them.

    Args:
        lists: a layer may list the tokens that its queries see, which `call` does not look at.
    """

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
        if lists:
            kwargs.pop("indices", None)
        more = read_keywords(kwargs, s_aux, HARMLESS, module, None)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if dropout or not causal or more.bias is not None or more.cu_q is not None or more.sequence is not None:
            odd = {"dropout": dropout, "is_causal=False": not causal, "position_bias": more.bias is not None}
            word = next((word for word, there in odd.items() if there), "packed sequences")
            raise _refused(f"{word} reached {asked_by(module, None)}", "a paged, causal layer has none")
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
    recurrent: Shapes = dataclasses.field(default_factory=Shapes)


_notes: list[_Notes] = []


def _mask(*, q_length: int, kv_length: int, mask_function: Any, local_size: int | None = None, **kwargs: Any) -> Tensor:
    window = -1 if local_size is None else local_size - 1
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=kwargs.get("device"))
    _notes[-1].masks[id(mask)] = (mask, window if _is_plain(mask_function, window) else None)
    return mask


class _OnHost(TorchFunctionMode):
    """Functions compute on the CPU, whatever device holds the tensors that they look things up in. An index behind the
    end is an error there; on a GPU it would end the process's use of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, Tensor.cpu, (args, kwargs or {}))
        return func(*args, **kwargs)


def _is_plain(function: Any, window: int) -> bool:
    """Tell whether a mask function is causal with this window, tried on the borders of a few windows and around
    them."""
    size = window + 1 if window > 0 else 1024
    rows = [r for n in range(4) for r in (n * size - 1, n * size, n * size + 1) if r >= 0]
    pairs = {(r, k) for r in rows for d in (0, 1, size - 1, size, size + 1) for k in (r - d, r + d) if k >= 0}
    q, k = (torch.tensor(side, device="cpu") for side in zip(*sorted(pairs), strict=True))
    zero = torch.zeros_like(q)
    try:
        with _OnHost():
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
    return _nothing(query, value)


def probe(
    model: Any, max_positions: int = 0, turning: Turning | None = None
) -> tuple[dict[nn.Module, AttentionLayer], tuple[StateLayer, ...]]:
    """Map each attention module to its `AttentionLayer`, in the order of the forward pass, and describe the layers of
    linear attention in their order.

    Args:
        max_positions: no position reaches it; 0 = not said. turning: of a model of dual chunk attention.

    Raises:
        UnsupportedRequestError: the model has layers that keep a state other than keys and values, masks other than
            causal ones, keys that depend on more than their token and its position, or attention that the name does
            not reach. BackendUnavailableError: see `interfaces`.
    """
    config = model.config.get_text_config(decoder=True)
    kind = type(model).__name__

    def keys(positions: Sequence[int]) -> list[tuple[Any, Tensor, Tensor, Tensor]]:
        seen: list[tuple[Any, Tensor, Tensor, Tensor]] = []

        def look(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
            seen.append((module, query, key, value))
            return _nothing(query, value)

        _run(model, positions, look)
        return seen

    notes = _run(model, range(TOKENS), _record)
    if not notes.layers:
        raise _refused(f"no attention call of {kind} reached polyattn", "it computes attention in its own code")
    recurrent = notes.recurrent.layers(len(notes.layers))
    if len(notes.layers) + len(recurrent) != config.num_hidden_layers:
        reason = f"{len(notes.layers)} of the {config.num_hidden_layers} layers of {kind} attend through the interface"
        raise _refused(reason, "what the others keep between steps is in no page")
    if shared := getattr(config, "num_kv_shared_layers", None):
        raise _refused(f"{shared} layers of {kind} use other layers' keys", "a layer has pages of its own")
    if turning is not None:
        max_positions = min(max_positions or turning.chunks.length, turning.chunks.length)
        turning.check(keys)
    if found := check_positions(keys, max_positions):
        raise _refused(*found)
    chunks = None if turning is None else turning.chunks
    return {m: dataclasses.replace(layer, dual_chunk=chunks) for m, layer in notes.layers.items()}, recurrent


def _run(model: Any, positions: Sequence[int], call: Attend) -> _Notes:
    """Run one pass over equal tokens at these positions, with `call` for attention."""
    functions, masks, _ = interfaces()
    functions.register(PROBE, reading(call, lists=True))
    masks.register(PROBE, _mask)
    notes = _Notes({}, {})
    _notes.append(notes)
    # A padding token may be all zeros, which say nothing wherever they are.
    token = 0 if getattr(model.config.get_text_config(decoder=True), "pad_token_id", None) else 1
    tokens = torch.full((1, len(positions)), token, device=model.device)
    where = torch.tensor([list(positions)], device=model.device)
    picked = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    try:
        with torch.no_grad(), attending(configs_of(model), PROBE), calling(model, notes.recurrent):
            model(input_ids=tokens, position_ids=where, use_cache=False, **picked)
    finally:
        _notes.pop()
        for registry in (functions, masks):
            registry._global_mapping.pop(PROBE, None)
    return notes


def _nothing(query: Tensor, value: Tensor) -> Tensor:
    """Return the zeros that every layer of a pass gives, [B, S_q, H_q, D_v]: no token hears of another."""
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def _refused(what: str, why: str, limit: str = "") -> UnsupportedRequestError:
    return UnsupportedRequestError(
        f"{what}: {why}, so this model cannot be served from pages{limit}; use model.generate() with "
        f"attn_implementation='polyattn' instead",
        {"serving": [f"{what}: {why}"]},
    )
