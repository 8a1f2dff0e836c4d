"""This module runs a causal LM of transformers as the engine drives it (`polyattn.serving.engine.Runner`).

The model's own code runs as it is, on one packed row of tokens without masks; its attention layers reach the
`AttentionBackend` of the step through a registered name. Layers with latent keys and values go through `latent.py`.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import warnings
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import InvalidInputError, UnsupportedRequestError
from ...serving.layer import AttentionLayer, StateLayer
from ...serving.mla import LatentAttention
from ...serving.recurrent import RecurrentLayers
from ..common.keywords import asked_by
from .chunks import Turning, chunks_of
from .images import Tower, no_images_because
from .latent import LatentModule, Replacement, latent_modules
from .latent_check import lists_tokens, looks_latent, takes_no_positions
from .probing import attending, configs_of, probe, reading
from .recurrent import calling
from .registry import interfaces

if TYPE_CHECKING:
    from ...serving.attention.backend import AttentionBackend
    from ...serving.step.batch import ForwardBatch
    from ...serving.step.step import Step

__all__ = ["SERVING", "CausalLMRunner"]

SERVING = "polyattn_serving"
"""No mask function is registered under it: transformers then makes no masks, and asks the device nothing."""

_step: contextvars.ContextVar[_Serving | None] = contextvars.ContextVar("polyattn_step", default=None)


class CausalLMRunner:
    """A runner makes forward passes of one model over packed tokens.

    Args:
        model: a causal LM of transformers 5.4 or newer, in eval mode, on one device.
        latent: serve latent attention (DeepSeek-shaped modules) from latent rows: True, False, or None = where every
            layer is such a module. Not so it is served from whole keys and values.
        max_positions: no token is served at this position or later; None = the config's `max_position_embeddings`. Less
            serves models whose keys change at some length, such as LongRoPE ones, up to that length.

    Attributes:
        layers: its attention layers, in the order of the pass, and then those of linear attention, `recurrent`.
        turning: of a model of dual chunk attention (its config has a `dual_chunk_attention_config`), None of others.
        replaced: the latent modules whose forward is replaced while a step runs. encode: computes the images of a
            prompt, None where it reads none. vocab_size, max_positions (0 = not
            said), dtype, device: of the model.

    Raises:
        InvalidInputError: the model is training, or max_positions is not within its positions.
        UnsupportedRequestError: it cannot be served from pages (`probe`), or not from latent rows where that was asked
            for (`latent_modules`).
    """

    def __init__(self, model: Any, *, latent: bool | None = None, max_positions: int | None = None) -> None:
        if model.training:
            raise InvalidInputError(f"{type(model).__name__} is in training mode; call model.eval() before serving it")
        interfaces()[0].register(SERVING, reading(_attend))
        config = model.config.get_text_config(decoder=True)
        self.model = model
        self.max_positions: int = _positions(getattr(config, "max_position_embeddings", 0) or 0, max_positions)
        chunks = chunks_of(config)
        self.turning = None if chunks is None else Turning(chunks, model)
        self.modules, self.recurrent = probe(model, self.max_positions, self.turning)
        self.configs = configs_of(model)
        self.replaced = _latent(model, self.modules, latent)
        attention: tuple[AttentionLayer, ...] = tuple(self.modules.values())
        if self.replaced:
            attention = tuple(entry.layer for entry in self.replaced)
        self.layers: tuple[AttentionLayer | StateLayer, ...] = (*attention, *self.recurrent)
        self.encode = None if no_images_because(model) else Tower(model).encode
        self.picks = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.vocab_size: int = config.vocab_size
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device

    def serve(self, backend: AttentionBackend) -> _Serving:
        """Put the model on the pool of a backend that was made for `layers`."""
        return _Serving(self, backend)


class _Serving:
    """A forward as `polyattn.serving.engine.Forward` describes it."""

    def __init__(self, runner: CausalLMRunner, backend: AttentionBackend) -> None:
        self.runner, self.backend = runner, backend
        self.latent = LatentAttention(backend, backend.pool) if runner.replaced else None
        states = backend.pool.states
        self.recurrent = None if states is None else RecurrentLayers(states, backend.linear)

    @torch.no_grad()
    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        keep: Tensor | None,
        batch: ForwardBatch,
        steps: Sequence[Step],
        inserts: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Tensor:
        runner, options = self.runner, {"input_ids": input_ids[None]}
        if inserts:
            embeddings = runner.model.get_input_embeddings()(input_ids)
            for at, features in inserts:
                embeddings[at] = features.to(embeddings.dtype)
            options = {"inputs_embeds": embeddings[None]}
        if keep is not None and runner.picks:
            options["logits_to_keep"] = keep
        replaced: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.latent is not None:
            self.latent.plan(batch, steps)
            replaced = Replacement(list(runner.replaced), self.latent.forward)
        if runner.turning is not None:
            positions = runner.turning.plan(positions)
        recurrent: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.recurrent is not None:
            self.recurrent.plan(batch, steps or self.backend.steps)
            recurrent = calling(runner.model, _Recurrent(self.recurrent, runner.recurrent))
        with attending(runner.configs, SERVING), replaced, recurrent:
            token = _step.set(self)
            try:
                out: Tensor = runner.model(position_ids=positions.unsqueeze(-2), use_cache=False, **options).logits[0]
            finally:
                _step.reset(token)
        return out if keep is None or runner.picks else out[keep]


class _Recurrent:
    """The recurrent layers of one pass, which come in their order."""

    def __init__(self, layers: RecurrentLayers, described: Sequence[StateLayer]) -> None:
        self._layers = layers
        self._convolved, self._ruled = ([layer.layer_id for layer in reversed(described)] for _ in range(2))

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._layers.conv(self._convolved.pop(), x[0], weight, bias)[None]

    def rule(
        self, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, method: str, qk_norm: bool
    ) -> Tensor:
        tensors = (t[0] for t in (query, key, value, gate, beta))
        return self._layers.rule(self._ruled.pop(), *tensors, method=method, qk_norm=qk_norm)[None]


def _positions(known: int, wanted: int | None) -> int:
    if wanted is None:
        return known
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1 or (known and wanted > known):
        most = f"from 1 to {known}, the positions of the model," if known else "of 1 or more"
        raise InvalidInputError(f"max_positions={wanted!r}; a whole number {most} is needed, or None")
    return wanted


def _latent(model: Any, modules: Collection[nn.Module], wanted: bool | None) -> tuple[LatentModule, ...]:
    """The modules that are served from latent rows."""
    lists = next((module for module in modules if lists_tokens(module)), None)
    if wanted is False and lists is not None:
        raise UnsupportedRequestError(
            f"latent=False for {type(model).__name__}, whose {type(lists).__name__} lists the tokens that its queries "
            f"see, which only latent rows are served with; leave latent at None",
            {"serving": ["whole keys and values with lists of tokens"]},
        )
    if wanted is False or (wanted is None and not all(looks_latent(module) for module in modules)):
        return ()
    try:
        return tuple(latent_modules(model))
    except UnsupportedRequestError as exc:
        # Layers without positions, as hybrid models have them, are right from whole keys too, with larger caches.
        if wanted or lists is not None or not all(takes_no_positions(module) for module in modules):
            raise
        text = f"polyattn: latent attention is served from whole keys and values, whose caches are larger: {exc}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
        return ()


def _attend(
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
    step = _step.get()
    if step is None:
        raise InvalidInputError(
            f"{asked_by(module, None)} was called under attn_implementation={SERVING!r} outside a step: that name is "
            f"for CausalLMRunner alone, which sets it while a step runs; give the model 'polyattn' or another one"
        )
    runner = step.runner
    q, k, v = query.squeeze(0).transpose(0, 1), key.squeeze(0).transpose(0, 1), value.squeeze(0).transpose(0, 1)
    if runner.turning is not None:
        q = runner.turning.queries(q)
    return step.backend.forward(q, k, v, runner.modules[module]).unsqueeze(0)
