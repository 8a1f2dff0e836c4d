"""This module serves latent attention modules of a transformers model from latent rows.

A DeepSeek-shaped model makes keys and values of every head before it calls an attention function, so nothing that is
installed there can read latent rows instead. `replaced` gives those modules another forward, says which, and takes it
back. Modules are recognised by what they have and compute (`latent_check`), never by name.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, final

from torch import Tensor, nn

from ...contract import Keep
from ...dispatch.binding import dtype_name
from ...errors import ConfigError, InvalidInputError, UnsupportedRequestError
from ...serving.layer import AttentionLayer
from ...serving.mla.lists import INDEX
from .keywords import HARMLESS
from .latent_check import lists_tokens, looks_latent, nearest_rotary, rope_rule
from .latent_parts import compute_index, compute_parts, heads_of

__all__ = ["LatentForward", "LatentModule", "Replacement", "latent_modules", "replaced"]

LatentForward = Callable[..., Tensor]
"""(module, q_nope [T, H, D_nope], q_pe [T, H, D_r], rows [T, D_c + D_r], layer) -> [T, H, D_v], such as
`polyattn.serving.mla.LatentAttention.forward`; of a module with an indexer its `Index` follows."""


@dataclasses.dataclass(frozen=True, eq=False)
class LatentModule:
    """A module whose forward is replaced: its name in the model, itself, how it turns positions (`latent_parts.RULES`),
    and what serving knows of it. Its `layer_id` is the module's `layer_idx`. index_rope: as `rope`, of its indexer;
    empty where it has none."""

    name: str
    module: nn.Module
    rope: str
    layer: AttentionLayer
    index_rope: str = ""

    def __str__(self) -> str:
        made = self.layer
        latent = f"{made.heads} heads on rows of {made.v_head_dim} + {made.head_dim - made.v_head_dim}"
        return f"{self.name} ({type(self.module).__name__}): {latent}, rotation {self.rope}, scale {made.scale:.6g}"


def latent_modules(model: nn.Module) -> list[LatentModule]:
    """Find the latent attention modules of a model; none of them is changed yet.

    Each runs its own forward once on two random tokens.

    Raises:
        UnsupportedRequestError: there is none, or one that cannot be served; `rejected` has every reason by module.
    """
    found, refused = [], dict[str, list[str]]()
    for name, module in model.named_modules():
        if not looks_latent(module):
            continue
        rope, index_rope, reason = rope_rule(module, nearest_rotary(model, name))
        if reason:
            refused[name] = [reason]
        else:
            found.append(LatentModule(name, module, rope, _layer(module), index_rope))
    kind = type(model).__name__
    if refused:
        name, reasons = next(iter(refused.items()))
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise UnsupportedRequestError(
            f"{kind} has latent attention that cannot be served from latent rows: {name or 'the module itself'}{more}: "
            f"{reasons[0]}. Leave its forward as it is: its own attention function serves it from whole keys and "
            f"values",
            refused,
        )
    if not found:
        raise UnsupportedRequestError(
            f"{kind} has no latent attention (no module has kv_b_proj or kv_lora_rank); serve it as it is"
        )
    ids = [entry.layer.layer_id for entry in found]
    if len(set(ids)) < len(ids):
        double = next(entry for i, entry in enumerate(found) if entry.layer.layer_id in ids[:i])
        reason = f"layer_idx {double.layer.layer_id} is that of an earlier module too, and a cache has one place for it"
        raise UnsupportedRequestError(f"{double.name} of {kind} cannot be served: {reason}", {double.name: [reason]})
    return found


@final
class Replacement:
    """A replacement gives modules another forward until `restore()`, or the end of a `with`.

    Attributes:
        modules: which, in the order of the model.
    """

    def __init__(self, modules: list[LatentModule], forward: LatentForward) -> None:
        self.modules = tuple(modules)
        self._given = {entry.name: _forward(entry, forward) for entry in modules}
        for entry in modules:
            entry.module.forward = self._given[entry.name]

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """The layers, for a KV pool and an `AttentionBackend`."""
        return tuple(entry.layer for entry in self.modules)

    def restore(self) -> None:
        """Give the modules their own forwards back; a second call does nothing.

        Raises:
            ConfigError: somebody has replaced one since; it stays as it is, all others are taken back.
        """
        theirs = []
        for entry in self.modules:
            given = self._given.pop(entry.name, None)
            if given is None:
                continue
            if vars(entry.module).get("forward") is given:
                del entry.module.forward
            else:
                theirs.append(entry.name)
        if theirs:
            raise ConfigError(
                f"the forward of {', '.join(theirs)} was replaced by somebody else after polyattn replaced it, and "
                f"stays as it is; restore in the opposite order"
            )

    def __enter__(self) -> Replacement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __str__(self) -> str:
        return "\n".join(map(str, self.modules))


def replaced(model: nn.Module, forward: LatentForward) -> Replacement:
    """Give every latent attention module of a model a forward that hands query parts and latent rows to `forward`.

    At once; `restore()` or the end of a `with` takes it back. Positions, masks and caches are then the business of
    `forward`: a call that brings a mask or a cache of transformers' is refused. Tokens of a batch [B, S] are packed in
    order, T = B * S.

    Raises:
        UnsupportedRequestError: as `latent_modules`; nothing is replaced then.
    """
    return Replacement(latent_modules(model), forward)


def _layer(module: Any) -> AttentionLayer:
    indexer = getattr(module, "indexer", None)
    return AttentionLayer(
        layer_id=module.layer_idx,
        heads=heads_of(module),
        kv_heads=1,
        head_dim=module.kv_lora_rank + module.qk_rope_head_dim,
        v_head_dim=module.kv_lora_rank,
        scale=float(module.scaling),
        latent=True,
        token_topk=module.config.index_topk if lists_tokens(module) else 0,
        keeps=[]
        if indexer is None
        else [Keep(INDEX, "token", (indexer.head_dim,), dtype_name(indexer.wk.weight.dtype))],
    )


def _forward(entry: LatentModule, attend: LatentForward) -> Callable[..., tuple[Tensor | None, ...]]:
    module: Any = entry.module
    # Layers that share lists hand them on beside their result; here the step has them.
    more_results = (None,) if "prev_topk_indices" in inspect.signature(module.forward).parameters else ()

    def polyattn_latent_forward(
        hidden_states: Tensor,
        *,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **more: Any,
    ) -> tuple[Tensor | None, ...]:
        if position_embeddings is None:
            raise InvalidInputError(f"{entry.name} was called without position_embeddings; its rows need positions")
        if attention_mask is not None or past_key_values is not None:
            what, instead = (
                ("attention_mask", "an attn_implementation that has no mask function")
                if past_key_values is None
                else ("past_key_values", "use_cache=False")
            )
            raise InvalidInputError(
                f"{what} reached {entry.name}, which is served from latent rows: the step's batch says who sees what, "
                f"and the pool has the rows. Run the model with {instead}, or restore its own forward"
            )
        if unknown := sorted(k for k, v in more.items() if k not in HARMLESS and not (v is None or v is False)):
            raise UnsupportedRequestError(
                f"{', '.join(unknown)} reached {entry.name}, which is served from latent rows: it may change the "
                f"result, so it is not dropped. Leave it out, or restore the module's own forward",
                {name: ["unknown keyword"] for name in unknown},
            )
        parts = compute_parts(module, hidden_states, position_embeddings, entry.rope)
        if entry.index_rope:
            index = compute_index(module, hidden_states, position_embeddings, entry.index_rope)
            out = attend(module, *parts, entry.layer, index)
        else:
            out = attend(module, *parts, entry.layer)
        return module.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None, *more_results

    return polyattn_latent_forward
