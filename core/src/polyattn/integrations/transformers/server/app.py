"""This module is the server: routes of OpenAI's protocol over one model, health and metrics."""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import functools
import io
import json
import logging
import re
import time
import uuid
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from jinja2 import TemplateError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import Modality, get_response_template

from ....errors import BusyError, InvalidInputError
from ....serving.engine import Engine
from ....serving.engine.loop import EngineLoop, Tell, Update
from ..images import ImageReader
from .fields import CHAT, CHAT_WITH_IMAGES, COMPLETIONS, RefusedField, checked
from .manager import Manager, generation_config
from .metrics import Metrics

__all__ = ["BODY_LIMIT", "build_app"]

BODY_LIMIT = 16 * 2**20
"""Bytes of the longest body."""
FAILURES = 3
"""Steps that fail one after the other before a server calls itself ill."""

_log = logging.getLogger("polyattn.serve")
# transformers warns of every request that it got one.
logging.getLogger("transformers.cli.serving").setLevel(logging.ERROR)


class _OneModel:
    """What handlers ask a manager of models: there is one."""

    force_model = None

    def __init__(self, name: str, model: Any, tokenizer: Any) -> None:
        self.name, self.model, self.tokenizer = name, model, tokenizer

    def get_model_modality(self, model: Any, processor: Any = None) -> Modality:
        """Text."""
        return Modality.LLM


class _State:
    """What handlers ask for generation: there is one manager, for every request."""

    def __init__(self) -> None:
        self.manager: Manager | None = None

    def use_continuous_batching(self, model: Any, modality: Modality) -> bool:
        """Always: prompts stay lists."""
        return True

    def get_manager(self, model_id: str, use_cb: bool = False) -> Manager:
        """The engine's."""
        if self.manager is None:
            raise BusyError("the engine has not started yet; ask again")
        return self.manager


class _Ours:
    """What both handlers do otherwise than transformers': a body is checked before, and there is one model."""

    model_manager: _OneModel

    def _validate_request(self, body: dict[str, Any]) -> None:
        """Do nothing: `fields` has looked at it."""

    def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
        one = self.model_manager
        if body.get("model", one.name) != one.name:
            raise RefusedField(
                f"model={body['model']!r} is not here; this server has {one.name!r}", "model", status=404,
                code="model_not_found",
            )  # fmt: skip
        return one.name, one.model, one.tokenizer

    def _build_generation_config(self, body: dict[str, Any], usual: GenerationConfig, use_cb: bool = False) -> Any:
        return generation_config(body, usual)


_TEXT = "\x00text\x00"
"""Stands for a chunk's text in its form."""


@functools.lru_cache(maxsize=1024)
def _form(build: Callable[..., str], field: str, given: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    """Return what is before and after the text of a request's chunks, by what transformers makes of one of them."""
    head, _, tail = build(**dict(given), **{field: _TEXT}).partition(json.dumps(_TEXT))
    return head, tail


def _chunk(build: Callable[..., str], field: str, what: dict[str, Any], **given: str) -> str:
    """Return an event of a stream. A token costs no model of pydantic: chunks of a request differ in their text only.

    Args:
        build: transformers' own. field: its keyword for the text. what: keywords of the chunk. given: those of the
            request.
    """
    text = what.get(field)
    if len(what) > 1 or not isinstance(text, str):
        return build(**given, **what)
    head, tail = _form(build, field, tuple(given.items()))
    return head + json.dumps(text, ensure_ascii=False) + tail


class _Chat(_Ours, ChatCompletionHandler):  # type: ignore[misc]
    def _build_chunk_sse(  # type: ignore[override]
        self, request_id: str = "", *, model: str = "", **what: Any
    ) -> str:
        return _chunk(super()._build_chunk_sse, "content", what, request_id=request_id, model=model)

    async def handle_request(self, body: dict[str, Any], request_id: str) -> StreamingResponse | JSONResponse:
        """Answer a chat."""
        template = self.model_manager.tokenizer.chat_template
        if not template:
            raise RefusedField("this model has no chat template; use /v1/completions", "messages")
        if "tools" in body and "tools" not in str(template):
            raise RefusedField("the chat template of this model knows no tools; leave them out", "tools")
        try:
            return await super().handle_request(body, request_id)
        except TemplateError as exc:  # such as roles that do not alternate
            raise RefusedField(f"the chat template of this model refuses the messages: {exc}", "messages") from exc

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict[str, Any]], modality: Modality) -> list[dict[str, Any]]:
        """Put messages in the form that chat templates read: text in one piece unless there are images in it, arguments
        of calls as objects."""
        found = []
        for at, message in enumerate(messages):
            content, calls = message.get("content"), message.get("tool_calls")
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
            made = {**message, "content": " ".join(part.get("text", "") for part in parts)}
            if any(part["type"] == "image_url" for part in parts):
                made["content"] = [
                    part if part["type"] == "text" else _image(f"messages[{at}].content[{number}].image_url.url", part)
                    for number, part in enumerate(parts)
                ]
            if calls:
                made["tool_calls"] = [
                    {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
                    for call in calls
                ]
            found.append(made)
        return found


def _image(field: str, part: dict[str, Any]) -> dict[str, Any]:
    """Open the image of a part, which `fields` has looked at."""
    from PIL import Image

    try:
        data = base64.b64decode(part["image_url"]["url"].partition(";base64,")[2], validate=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data))
            image.load()
    except (ValueError, OSError, Image.DecompressionBombError, Image.DecompressionBombWarning) as exc:
        raise RefusedField(f"{field} is no image that can be read: {exc}", field) from exc
    return {"type": "image", "image": image}


class _Completions(_Ours, CompletionHandler):  # type: ignore[misc]
    def _build_chunk_sse(self, request_id: str, model_id: str, **what: Any) -> str:  # type: ignore[override]
        return _chunk(super()._build_chunk_sse, "text", what, request_id=request_id, model_id=model_id)


def build_app(
    engine: Engine, model: Any, tokenizer: Any, name: str, *, waiting: int = 1024, drain: float = 120.0
) -> Starlette:
    """Build the server of one model.

    Args:
        engine: runs the model; it belongs to the server from its start on. tokenizer: a fast one, or an `ImageReader`
            over it. name: what clients
            call the model. waiting: requests that may wait; more get 429. drain: seconds that requests have to end
            in once the server shuts down.

    Returns:
        An ASGI app: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics.
    """
    loop = EngineLoop(engine, waiting=waiting)
    metrics, state = Metrics(loop), _State()
    there: Any = state
    manager = Manager(loop, metrics.first)
    one: Any = _OneModel(name, model, tokenizer)
    chat, completions = _Chat(one, there), _Completions(one, there)
    if (form := get_response_template(tokenizer, model)) is not None:
        getattr(tokenizer, "tokenizer", tokenizer).response_template = _anchored(form)
    served = CHAT_WITH_IMAGES if isinstance(tokenizer, ImageReader) else CHAT
    started = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        loop.start(_News(asyncio.get_running_loop()).hand)
        state.manager = manager
        yield
        await asyncio.to_thread(loop.close, drain)

    def health(request: Request) -> Response:
        if loop.alive and loop.failures < FAILURES:
            return JSONResponse({"status": "ok"})
        reason = "the engine has stopped" if not loop.alive else f"{loop.failures} steps failed: {loop.failure!r}"
        return JSONResponse({"status": "unhealthy", "reason": reason}, status_code=503)

    def models(request: Request) -> Response:
        entry = {"id": name, "object": "model", "created": started, "owned_by": "polyattn"}
        return JSONResponse({"object": "list", "data": [{**entry, "max_model_len": engine.longest}]})

    def read(request: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    async def on_chat(request: Request) -> Response:
        return await _answer(request, chat.handle_request, manager, served, "messages")

    async def on_completion(request: Request) -> Response:
        return await _answer(request, completions.handle_request, manager, COMPLETIONS, "prompt")

    return Starlette(
        lifespan=lifespan,
        routes=[
            Route("/v1/chat/completions", on_chat, methods=["POST"]),
            Route("/v1/completions", on_completion, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/metrics", read),
        ],
        exception_handlers={
            InvalidInputError: _refused,
            BusyError: _busy,
            HTTPException: _http,
            Exception: _failed,
        },
    )


def _anchored(form: Mapping[str, Any]) -> dict[str, Any]:
    """Return a form of answers that takes nothing of the prompt where the prompt never says that an answer begins.
    transformers takes all of it then, and a model with a chat template of its own would repeat what it was told."""
    words = form.get("start_anchor", ())
    literals = "|".join(re.escape(word) for word in ([words] if isinstance(words, str) else words))
    begins = form.get("start_anchor_pattern") or literals
    rest = {name: value for name, value in form.items() if name != "start_anchor"}
    return {**rest, "start_anchor_pattern": f"(?:{begins})|\\A(?!(?s:.*)(?:{begins}))(?s:.*)\\Z"}


class _News:
    """News on the way from an engine's thread to an event loop. While the loop is busy with news, those that come wait
    and become one event for each answer: the slower the loop, the less it has to do.

    Args:
        home: the event loop.
    """

    def __init__(self, home: asyncio.AbstractEventLoop) -> None:
        self._home, self._busy = home, False
        self._waiting: collections.deque[tuple[Tell, Update]] = collections.deque()

    def hand(self, news: list[tuple[Tell, Update]]) -> None:
        """Take news, on the engine's thread."""
        self._waiting.extend(news)
        if not self._busy:
            self._busy = True
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is there to be told
                self._home.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        joined: dict[Tell, Update] = {}
        while self._waiting:
            tell, update = self._waiting.popleft()
            if (before := joined.get(tell)) is not None and update.error is None:
                update = Update(before.tokens + update.tokens, update.output)
            elif before is not None:
                _tell_one(tell, before)
            joined[tell] = update
        for tell, update in joined.items():
            _tell_one(tell, update)
        self._home.call_soon(self._again)  # behind the streams that these news have woken

    def _again(self) -> None:
        self._busy = False
        if self._waiting:  # what came before that was left to this
            self._busy = True
            self._home.call_soon(self._tell)


def _tell_one(tell: Tell, update: Update) -> None:
    try:
        tell(update)
    except Exception:  # noqa: BLE001 - one answer's: the others' are told
        _log.exception("an answer could not be told")


Handler = Callable[[dict[str, Any], str], Awaitable[Response]]


class _Stream(StreamingResponse):
    """A stream of events, and what is done when it ends, however it does."""

    def __init__(self, parts: Any, end: Callable[[], None]) -> None:
        super().__init__(_events(parts), media_type="text/event-stream")
        self._end = end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


async def _answer(
    request: Request, handle: Handler, manager: Manager, served: Mapping[str, Any], needed: str
) -> Response:
    body = checked(await _body(request), served, needed)
    number = f"req-{uuid.uuid4().hex}"
    answering = asyncio.ensure_future(handle(body, number))
    # A stream ends by itself where its client has gone; what is answered in one piece would be made for nobody.
    gone = asyncio.ensure_future(asyncio.Event().wait() if body.get("stream") else request.receive())
    try:
        await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        answering.cancel()  # it does nothing where it is done
    try:
        response = await answering
    except asyncio.CancelledError:
        return Response(status_code=499)
    except RefusedField as exc:
        exc.field = exc.field or needed
        raise
    except (InvalidInputError, BusyError, HTTPException):
        raise
    except Exception as exc:  # noqa: BLE001 - answered here: what reaches the server closes the client's connection
        _log.error("a request failed", exc_info=exc)
        return _failed(request, exc)
    if isinstance(response, StreamingResponse):
        return _Stream(response.body_iterator, lambda: manager.end_stream(number))
    return response


async def _body(request: Request) -> Any:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        parts.append(part)
        if size > BODY_LIMIT:  # read to its end all the same: many clients look for an answer only then
            parts.clear()
    if size > BODY_LIMIT:
        raise RefusedField(f"the body has {size} bytes, more than {BODY_LIMIT}; send less", status=413)
    try:
        return json.loads(b"".join(parts))
    except ValueError as exc:
        raise RefusedField(f"the body is no JSON: {exc}") from exc


async def _events(parts: Any) -> AsyncIterator[str]:
    """Give the events of a handler in the form that clients of OpenAI know: its errors too, and a last word."""
    async with contextlib.aclosing(parts):
        async for part in parts:
            # Within a text these quotes would be escaped.
            before, mark, error = part.partition('data: {"error"')
            yield before
            if mark:
                message = json.loads('{"error"' + error)["error"]
                yield f"data: {json.dumps(_error(message, 'server_error'))}\n\n"
    yield "data: [DONE]\n\n"


def _error(message: str, kind: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def _refused(request: Request, exc: Exception) -> Response:
    field, status = getattr(exc, "field", None) or None, getattr(exc, "status", 400)
    return JSONResponse(_error(str(exc), "invalid_request_error", field, getattr(exc, "code", None)), status)


def _busy(request: Request, exc: Exception) -> Response:
    if getattr(exc, "passing", False):
        return JSONResponse(_error(str(exc), "rate_limit_error", code="queue_full"), 429, {"retry-after": "1"})
    return JSONResponse(_error(str(exc), "server_error", code="shutting_down"), 503)


def _http(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    return JSONResponse(_error(str(exc.detail), "invalid_request_error"), exc.status_code, exc.headers)


def _failed(request: Request, exc: Exception) -> Response:
    return JSONResponse(_error(f"{type(exc).__name__}: {exc}", "server_error"), 500)
