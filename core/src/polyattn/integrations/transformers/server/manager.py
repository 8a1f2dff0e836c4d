"""This module puts an engine in the place of transformers' generation: its handlers ask for a manager, and get one that
hands requests to an `EngineLoop` and makes text of what comes back."""

from __future__ import annotations

import asyncio
import copy
import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import GenerationConfig
from transformers.cli.serving.utils import BaseGenerateManager, _StreamError, response_events_to_chunks

from ....errors import InvalidInputError
from ....serving.engine import SamplingParams
from ....serving.engine.loop import EngineLoop, Ticket, Update
from .fields import RefusedField

__all__ = ["FailedStep", "Manager", "generation_config"]


SEED = "polyattn_seed"
"""The attribute of a configuration that has the seed of the draws; transformers' has none."""


class FailedStep(RuntimeError):  # noqa: N818 - of the server alone
    """A step of the engine failed while it ran a request."""


def generation_config(body: dict[str, Any], usual: GenerationConfig) -> GenerationConfig:
    """Return what a request asks for; what it leaves out is the model's own, as in `generate`.

    Args:
        body: checked by `fields`. usual: the model's.
    """
    config = copy.deepcopy(usual)
    for name in ("temperature", "top_p"):
        if name in body:
            setattr(config, name, float(body[name]))
    if "top_k" in body:
        config.top_k = max(body["top_k"], 0)
    if any(name in body for name in ("temperature", "top_p", "top_k")):
        config.do_sample = body.get("temperature") != 0
    config.max_new_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
    config.stop_strings = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop")
    # One that is not given must not make every answer to a prompt the same.
    setattr(config, SEED, body.get("seed", secrets.randbits(63)))
    if body.get("ignore_eos"):
        config.eos_token_id = None
    return config


class _Words:
    """Text that grows token by token, up to a stop string.

    Args:
        tokenizer: of the `tokenizers` library. stops: strings that end the text; they are not part of it.
        special: keep special tokens, which a parser of answers looks for.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], *, special: bool) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._stream = DecodeStream([], skip_special_tokens=not special)
        self._held = ""
        self.stopped = False

    def add(self, tokens: Sequence[int]) -> str:
        """Return what can be told of the text now: what may become a stop string is held back."""
        self._held += "".join(self._stream.step(self._tokenizer, token) or "" for token in tokens)
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._cut(min(found))
        most = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        return self._cut(len(self._held) - most)

    def rest(self) -> str:
        """Return what was held back, at the end."""
        return "" if self.stopped else self._cut(len(self._held))

    def _cut(self, at: int) -> str:
        told, self._held = self._held[:at], self._held[at:]
        return told


def _overlap(text: str, stop: str) -> int:
    """Return how many of the last characters of a text begin the stop string."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class _Answer:
    """A request in the making: what handlers call a streamer.

    Attributes:
        total_tokens: made so far.
    """

    def __init__(self, manager: Manager, config: GenerationConfig, words: _Words) -> None:
        self._manager, self._config, self.words = manager, config, words
        self.total_tokens = 0
        self.ticket: Ticket | None = None

    def cancel(self, how: str = "cancelled") -> None:
        """Stop it; it does nothing where it has ended."""
        if self.ticket is not None:
            self._manager.loop.cancel(self.ticket, how)

    def take(self, update: Update) -> tuple[str, bool]:
        """Return the new text and whether it is the last."""
        self.total_tokens += len(update.tokens)
        text = self.words.add(update.tokens)
        if self.words.stopped:
            self.cancel("stop")
        ended = self.words.stopped or update.output is not None
        if self.words.stopped or (update.output is not None and update.output.finish_reason == "stop"):
            self._config.max_new_tokens = None  # by which handlers tell "length" from "stop"
        return (text + self.words.rest() if ended else text), ended


class Manager(BaseGenerateManager):
    """Generates by an engine that runs.

    Args:
        loop: of the engine. first: called with the seconds from a request's arrival to its first token.
    """

    def __init__(self, loop: EngineLoop, first: Callable[[float], None] = lambda seconds: None) -> None:
        self.loop, self._first = loop, first
        self._streams: dict[str, _Answer] = {}

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], Any]:
        """Hand a request in, and return the queue of its text with what cancels it.

        Raises:
            RefusedField, InvalidInputError: it could never be served. BusyError: not now.
        """
        items: asyncio.Queue[Any] = asyncio.Queue()

        def put(text: str) -> None:
            for item in [text] if response_parser is None else response_events_to_chunks(response_parser.feed(text)):
                items.put_nowait(item)

        def tell(update: Update) -> None:
            if answer.words.stopped:
                return
            if update.error is not None:
                # A handler puts the message between quotes.
                items.put_nowait(_StreamError(json.dumps(str(_failed(update.error)))[1:-1]))
                return
            text, ended = answer.take(update)
            if text:
                put(text)
            if ended:
                for item in _last_events(response_parser):
                    items.put_nowait(item)
                items.put_nowait(None)

        if response_parser is not None:
            for item in response_events_to_chunks(response_parser.initial_events):
                items.put_nowait(item)
        answer = self._submit(processor, inputs, gen_config, tell, special=response_parser is not None)
        self._streams[request_id] = answer
        return items, answer

    def end_stream(self, request_id: str) -> None:
        """Stop a streaming request, if it has not ended: nobody reads it any more."""
        if (answer := self._streams.pop(request_id, None)) is not None:
            answer.cancel()

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Return the text of a request, how long its prompt is, and its tokens.

        Raises:
            FailedStep: a step failed. Others: as `generate_streaming`.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        parts: list[str] = []
        tokens: list[int] = []

        def tell(update: Update) -> None:
            if done.done():
                return
            if update.error is not None:
                done.set_exception(_failed(update.error))
                return
            tokens.extend(update.tokens)
            text, ended = answer.take(update)
            parts.append(text)
            if ended:
                done.set_result(None)

        answer = self._submit(processor, inputs, gen_config, tell, special=False)
        try:
            await done
        except asyncio.CancelledError:  # the client has gone
            answer.cancel()
            raise
        text = "".join(parts)
        if answer.words.stopped:  # handlers of models with a template of answers read the tokens, not the text
            tokens = processor(text, add_special_tokens=False)["input_ids"]
        return text, len(inputs["input_ids"]), tokens

    def stop(self) -> None:
        """Do nothing: the loop is closed by who made it."""

    def _submit(
        self,
        processor: Any,
        inputs: Any,
        config: GenerationConfig,
        tell: Callable[[Update], None],
        *,
        special: bool,
    ) -> _Answer:
        prompt = inputs["input_ids"]
        words = _Words(processor._tokenizer, config.stop_strings or (), special=special)
        answer = _Answer(self, config, words)
        clock = asyncio.get_running_loop().time
        arrived, first = clock(), True

        def told(update: Update) -> None:
            nonlocal first
            if first and update.tokens:
                first = False
                self._first(clock() - arrived)
            tell(update)

        params = self._params(config, len(prompt))
        answer.ticket = self.loop.submit(prompt, params, told, media=inputs.get("media"))
        return answer

    def _params(self, config: GenerationConfig, prompt: int) -> SamplingParams:
        """Return what an engine is asked for: all that there is room for, where the request names no number."""
        room = self.loop.engine.longest - prompt
        asked = config.max_new_tokens
        if not prompt:
            raise RefusedField("the prompt has no tokens; give some text")
        if room < (asked or 1):
            wanted = "" if asked is None else f" and {asked} new ones"
            raise RefusedField(
                f"the prompt has {prompt} tokens{wanted}; this server has room for {prompt + room} together: shorten "
                f"the prompt, or ask for less",
                code="context_length_exceeded",
            )
        config.max_new_tokens = asked = asked or room
        ends = config.eos_token_id
        return SamplingParams(
            asked,
            float(1.0 if config.temperature is None else config.temperature) if config.do_sample else 0.0,
            1.0 if config.top_p is None else config.top_p,
            config.top_k or 0,
            getattr(config, SEED),
            () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends),
        )


def _last_events(parser: Any) -> list[Any]:
    """Return what a parser of answers makes of their end."""
    if parser is None:
        return []
    try:
        return list(response_events_to_chunks(parser.finalize()[1]))
    except (ValueError, RuntimeError):  # the text ended inside a structure, such as a call of a tool
        return []


def _failed(error: BaseException) -> Exception:
    if isinstance(error, InvalidInputError):
        return FailedStep(f"the model failed: {error}")
    return FailedStep(f"a step of the engine failed: {type(error).__name__}: {error}")
