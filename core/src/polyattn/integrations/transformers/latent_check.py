"""This module decides which modules of a model are latent attention that polyattn can serve: by what they have, then by
what they compute.

Attributes say what a module has, not all that its forward does with it: a factor on the queries, a norm more, a gate
after attention. So each module runs once on two random tokens, with an attention function that only looks, and what
arrived there is compared with what the parts give.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...semantics.token_index import index_scores
from ...serving.mla import expand, split_kv_b
from .latent_parts import RULES, compute_index, compute_parts, heads_of, rules_for
from .registry import interfaces

__all__ = ["lists_tokens", "looks_latent", "nearest_rotary", "rope_rule", "takes_no_positions"]

_NUMBERS = ("layer_idx", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "scaling")
_QUERY = ({"q_proj"}, {"q_a_proj", "q_a_layernorm", "q_b_proj"})
_OTHERS = {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
_INDEXER = (
    *("wq_b", "wk", "k_norm", "weights_proj", "n_heads", "head_dim", "qk_rope_head_dim", "softmax_scale"),
    *("index_topk", "config"),
)
_ARGUMENTS = {"hidden_states", "position_embeddings", "attention_mask", "past_key_values"}
_PROBE = "polyattn_latent_probe"
_POSITIONS = (5, 11)


def takes_no_positions(module: nn.Module) -> bool:
    """Return whether a module's forward is not told where its tokens are."""
    return "position_embeddings" not in inspect.signature(module.forward).parameters


def looks_latent(module: nn.Module) -> bool:
    """Tell whether a module must be served as latent attention, or refused."""
    return hasattr(module, "kv_b_proj") or hasattr(module, "kv_lora_rank")


def lists_tokens(module: nn.Module) -> bool:
    """Tell whether the queries of a module see listed tokens only: it has an indexer, or takes another's lists."""
    return hasattr(module, "indexer")


def nearest_rotary(model: nn.Module, name: str) -> nn.Module | str:
    """Find the module that makes the position embeddings of the module `name`, or say why there is none. It has
    `inv_freq` and is beside the nearest ancestor that has such a one."""
    parents = name.split(".")
    for depth in range(len(parents) - 1, -1, -1):
        children = model.get_submodule(".".join(parents[:depth])).children()
        found = [child for child in children if hasattr(child, "inv_freq")]
        if len(found) == 1:
            return found[0]
        if found:
            kinds = ", ".join(type(child).__name__ for child in found)
            return f"several modules make positions for it ({kinds}), and which is not known"
    return "no module above it makes rotary positions (none has inv_freq)"


def rope_rule(module: Any, rotary: Any) -> tuple[str, str, str]:
    """Return (name of its rotation in `RULES`, that of its indexer or "", "") for a module that can be served, ("", "",
    why not) for another."""
    reason = _structure(module)
    if reason:
        return "", "", reason
    if isinstance(rotary, str):
        return "", "", rotary
    try:
        rule, reason = _compare(module, rotary)
        index_rule = ""
        if not reason and getattr(module, "indexer", None) is not None:
            index_rule, reason = _index_rule(module, rotary)
    except (TypeError, ValueError, AttributeError, RuntimeError, LookupError) as exc:
        return "", "", f"running it on two tokens fails: {type(exc).__name__}: {exc}"
    return ("", "", reason) if reason else (rule, index_rule, "")


def _index_rule(module: Any, rotary: Any) -> tuple[str, str]:
    """Return (how the module's indexer turns its rows, "") or ("", why it is not known): the tokens that it lists are
    compared with those of the highest scores."""
    indexer, count = module.indexer, 24
    weight = indexer.wk.weight
    hidden = torch.randn(1, count, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(weight)
    where = torch.arange(0, 7 * count, 7, device=hidden.device)[None]
    mask = torch.ones(1, count, count, dtype=torch.bool, device=hidden.device).tril()
    kept = indexer.index_topk
    with torch.no_grad():
        positions = rotary(hidden, where)
        try:
            indexer.index_topk = 4
            residual = module.q_a_layernorm(module.q_a_proj(hidden))
            listed = indexer(hidden, residual, positions, mask, where)[0, 4:].long()
        finally:
            indexer.index_topk = kept
        for rule in rules_for(positions):
            index = compute_index(module, hidden, positions, rule)
            scores = index_scores(index.query, index.key, index.weights).masked_fill(~mask[0], -torch.inf)[4:]
            # The worst that is listed is no worse than the best that is not, but for rounding.
            worst = scores.gather(1, listed).amin(1)
            best = scores.scatter(1, listed, -torch.inf).amax(1)
            spread = scores.masked_fill(~mask[0, 4:], 0.0).abs().amax(1)
            if bool((worst >= best - _limit(weight.dtype) * spread).all()):
                return rule, ""
    return "", f"its {type(indexer).__name__} lists other tokens than its parts, by each of {', '.join(RULES)}"


def _structure(module: Any) -> str:
    """Say why the attributes of a module do not fit, or nothing."""
    missing = [name for name in _NUMBERS if not isinstance(getattr(module, name, None), (int, float))]
    if missing:
        return f"it has no {', '.join(missing)}"
    children = {name for name, child in module.named_children() if child is not None}
    queries = [names for names in _QUERY if names <= children]
    if not queries or _OTHERS - children:
        lack = sorted(_OTHERS - children) or ["q_proj, or q_a_proj with q_a_layernorm and q_b_proj"]
        return f"it has no {', '.join(lack)}"
    own = {name for name, _ in module.named_parameters(recurse=False)}
    own |= {name for name, _ in module.named_buffers(recurse=False)}
    known = {"indexer"} if all(hasattr(getattr(module, "indexer", None), name) for name in _INDEXER) else set()
    if more := sorted((children - queries[0] - _OTHERS - known) | own):
        return f"it also has {', '.join(more)}, of which latent attention knows nothing"
    if "forward" in vars(module):
        return f"its forward has been replaced already, by {getattr(module.forward, '__qualname__', 'another')}"
    named = inspect.signature(module.forward).parameters
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = {name for name, p in named.items() if p.default is p.empty and p.kind not in open_ended}
    if more := sorted(required - _ARGUMENTS):
        return f"its forward needs {', '.join(more)}"
    if takes_no_positions(module):
        return "its forward takes no position_embeddings, so its rows have no positions"
    if module.training:
        return "it is in training mode; call model.eval() first"
    return _weights(module)


def _weights(module: Any) -> str:
    weight, each = getattr(module.kv_b_proj, "weight", None), module.qk_nope_head_dim + module.v_head_dim
    if not isinstance(weight, Tensor) or getattr(module.kv_b_proj, "bias", None) is not None:
        return "its kv_b_proj is no matrix without a bias, which is all that can be absorbed"
    if weight.is_meta:
        return "its weights are not loaded (device meta)"
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        return f"its kv_b_proj is {weight.dtype}: dequantise it to the model's dtype when the model is loaded"
    if weight.ndim != 2 or weight.shape[0] % each or weight.shape[1] != module.kv_lora_rank:
        return f"its kv_b_proj is {list(weight.shape)}, not [H * {each}, {module.kv_lora_rank}]"
    return ""


def _compare(module: Any, rotary: Any) -> tuple[str, str]:
    """Run the module's own forward on two tokens and compare each step with ours."""
    weight = module.kv_b_proj.weight
    generator = torch.Generator().manual_seed(0)
    size = module.hidden_size if hasattr(module, "hidden_size") else module.kv_a_proj_with_mqa.in_features
    hidden = torch.randn(1, len(_POSITIONS), size, generator=generator).to(weight)
    made = torch.randn(1, len(_POSITIONS), heads_of(module), module.v_head_dim, generator=generator).to(weight)
    with torch.no_grad():
        positions = rotary(hidden, torch.tensor([_POSITIONS], device=hidden.device))
        seen, out = _look(module, hidden, positions, made)
        if not seen:
            return "", "its forward never asks transformers for an attention function"
        if reason := _options(module, seen):
            return "", reason
        wanted, reasons = [seen["query"], seen["key"], seen["value"]], []
        for rule in rules_for(positions):
            parts = compute_parts(module, hidden, positions, rule)
            up = split_kv_b(weight, module.qk_nope_head_dim, module.v_head_dim)
            key, value = expand(parts.rows, up)
            reason = _difference(module, [torch.cat(parts[:2], -1), key, value], wanted)
            if not reason:
                far = _distance(module.o_proj(made.flatten(2)), out)
                return (rule, "") if far < _limit(out.dtype) else ("", _says("output", far))
            reasons.append(f"{reason} (rotation {rule})")
        known = ", ".join(RULES)
        return "", "; ".join(reasons) or f"its position embeddings are {type(positions).__name__}, for none of {known}"


def _look(module: Any, hidden: Tensor, positions: Any, made: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Return what the module hands to its attention function, and its output when that returns `made`."""
    seen: dict[str, Any] = {}

    def looking(_: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **options: Any) -> Any:
        seen.update(query=query, key=key, value=value, options={"attention_mask": mask, **options})
        return made, None

    given: dict[str, Any] = {"attention_mask": None}
    if lists_tokens(module):
        # Of so few tokens an indexer lists all.
        count = hidden.shape[1]
        given["attention_mask"] = torch.ones(1, 1, count, count, dtype=torch.bool, device=hidden.device).tril()
        given["position_ids"] = torch.arange(count, device=hidden.device)[None]
        if module.indexer is None:
            given["prev_topk_indices"] = torch.zeros(1, count, count, dtype=torch.int32, device=hidden.device)
    with _implementation(module.config, looking):
        result = module(hidden, position_embeddings=positions, **given)
    return seen, result[0] if isinstance(result, tuple) else result


@contextlib.contextmanager
def _implementation(config: Any, function: Any) -> Iterator[None]:
    functions, before = interfaces()[0], config._attn_implementation
    functions.register(_PROBE, function)
    try:
        # "" is this configuration alone: a plain name would reach the configurations of its parts.
        config._attn_implementation = {"": _PROBE}
        yield
    finally:
        config._attn_implementation = {"": before}
        del functions._global_mapping[_PROBE]


def _options(module: Any, seen: dict[str, Any]) -> str:
    known = {"dropout", "scaling", *(("indices", "attention_mask", "position_ids") if lists_tokens(module) else ())}
    given = {k: v for k, v in seen["options"].items() if v is not None and k not in known}
    if given:
        return f"it hands {', '.join(sorted(given))} to its attention function"
    scale = seen["options"].get("scaling")
    return "" if scale == module.scaling else f"its scale is {scale}, its attribute scaling {module.scaling}"


def _difference(module: Any, ours: list[Tensor], theirs: list[Tensor]) -> str:
    """Name the first of query, key and value in which the two differ; query and key by their two parts."""
    for what, own, other in zip(("query", "key", "value"), ours, theirs, strict=True):
        other = other.transpose(1, 2).flatten(0, 1)
        if other.shape != own.shape:
            return f"its {what} is {list(other.shape)}, its parts make {list(own.shape)}"
        ends = (0, own.shape[-1]) if what == "value" else (0, module.qk_nope_head_dim, own.shape[-1])
        for start, stop in pairwise(ends):
            far = _distance(own[..., start:stop], other[..., start:stop])
            if not far < _limit(own.dtype):
                return _says(what, far)
    return ""


def _distance(own: Tensor, other: Tensor) -> float:
    """Return the relative L2 distance; not a number where there is nothing to compare."""
    return float((own.double() - other.double()).norm() / other.double().norm())


def _limit(dtype: torch.dtype) -> float:
    return 1e-3 if dtype.itemsize >= 4 else 2e-2


def _says(what: str, far: float) -> str:
    return f"its {what} is not what its parts make (relative distance {far:.2g})"
