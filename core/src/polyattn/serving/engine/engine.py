"""`Engine`: continuous batching over one model. Small on purpose: it shows that the parts fit; hosts have their own."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any, NoReturn

from ...contract import scalars
from ...errors import InternalError, InvalidInputError
from ..graphs.graphs import DeviceGraph
from ..kv_cache.pool import KVCacheConfig, attention_layers
from ..kv_cache.prefix_cache import check_namespace
from ..memory import Memory, Runner, check_runner
from ..recurrent import LinearChoice
from ..speculative import drawn_accept
from ..step.batch import ForwardMode
from ..step.tree import DraftTree
from .drafting import Drafter, Speculative
from .media import Media, beside_words
from .sampling import SamplingParams, sample, uniform
from .scheduler import Request, Scheduler, Work

__all__ = ["Engine", "EngineConfig", "Output"]

PHASES = {"extend": "prefill", "decode": "decode", "verify": "verify"}
"""Phases of a request -> the words of the command line's flags."""
_PIECE = 512
"""Tokens of a prompt that run together under `batch_invariant`, at most: a budget of 2,048 has room for four."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The sizes of an engine, and who attends.

    Attributes:
        cache: page size and dtype of the KV cache; its layout is negotiated between the phases' backends.
        pages: of each group of layers; 0 = as many as `max_requests` requests of `max_tokens` need.
        max_requests: that run at a time. max_tokens: of one request, prompt and output; 0 = all positions of the model.
        max_batch_tokens: of one step; longer prompts are run in chunks.
        prefix_caching: requests that begin alike share pages.
        backend, prefill_backend, decode_backend: as `AttentionBackend` takes them.
        linear: who serves layers of linear attention.
        speculative: None = plain decoding.
        graphs: replay decode and verify steps from device graphs, where the device has them; steps that cannot be
            recorded run eagerly, and a warning says why. Or what makes graphs: then that is an error.
        batch_invariant: the attention of a request's tokens has the same bits whatever else is served beside it: see
            `Scheduler`. Prefixes are then not shared. What the model computes beside attention is its own matter.
    """

    cache: KVCacheConfig = dataclasses.field(default_factory=KVCacheConfig)
    pages: int = 0
    max_requests: int = 8
    max_tokens: int = 0
    max_batch_tokens: int = 2048
    prefix_caching: bool = True
    backend: str | None = None
    prefill_backend: str | None = None
    decode_backend: str | None = None
    linear: LinearChoice = dataclasses.field(default_factory=LinearChoice)
    speculative: Speculative | None = None
    graphs: bool | Callable[[], DeviceGraph] = True
    batch_invariant: bool = False


@dataclasses.dataclass(frozen=True)
class Output:
    """A finished request.

    Attributes:
        id: of the request. number: which sample of its prompt. prompt: its tokens. token_ids: what came out.
        finish_reason: "stop" (a stop token, the last one), "length" or "cancelled".
        backends: phase ("prefill", "decode", "verify") -> the backend that read its cache, of the phases it went
            through. A latent prompt without a cached prefix has nothing to read: `polyattn.varlen_attention` serves it.
        cached_tokens: of its tokens, those whose keys and values others had made, at its last start.
        preemptions: how often it lost its pages and ran again.
    """

    id: int
    number: int
    prompt: list[int]
    token_ids: list[int]
    finish_reason: str
    backends: dict[str, str]
    cached_tokens: int
    preemptions: int


class Engine:
    """Serves requests on one model: continuous batching with chunked prefill, shared prefixes, preemption and drafts.

    Args:
        runner: the model. config: sizes and choices.

    Attributes:
        backends: phase -> backend. stepped: the requests that the last step ran, or would have run where it failed.

    Raises:
        InvalidInputError: sizes that do not fit together. Others: as `AttentionBackend`.

    Example:
        engine = Engine(CausalLMRunner(model))
        outputs = engine.generate([[1, 5, 7], [1, 9]], SamplingParams(max_new_tokens=32))
    """

    def __init__(self, runner: Runner, config: EngineConfig | None = None) -> None:
        self.config = config = EngineConfig() if config is None else config
        check_runner("the model", runner)
        _check_kinds(config)
        self.vocab_size, spec = runner.vocab_size, config.speculative
        self._encode = getattr(runner, "encode", None)
        self._drafts = 0 if spec is None else spec.draft_tokens - 1
        _check(config, runner, self._drafts)
        self.max_tokens = _max_tokens(config, runner)
        size = config.cache.page_size
        room = self.max_tokens + self._drafts
        both: dict[str, Any] = {
            "rows": config.max_requests,
            "max_tokens": room,
            "step_tokens": config.max_batch_tokens,
            "graphs": config.graphs,
            "backend": config.backend,
            "prefill_backend": config.prefill_backend,
            "decode_backend": config.decode_backend,
            "linear": config.linear,
            "batch_invariant": config.batch_invariant,
        }
        self.memory = Memory(
            runner,
            config.cache,
            pages=config.pages or 1 + config.max_requests * -(-room // size),
            prefixes=config.prefix_caching and not config.batch_invariant,
            drafts=0 if spec is None else spec.draft_tokens,
            verify=None if spec is None else spec.verify,
            topk=0 if spec is None else spec.topk,
            **both,
        )
        self._drafter = None if spec is None else Drafter(spec, config.cache, **both)
        self._scheduler = Scheduler(
            self.memory,
            config.max_batch_tokens,
            self._drafts,
            self._released,
            _draft_until(spec, runner),
            _piece(config),
        )
        self._requests: dict[int, Request] = {}
        self._count = 0
        self._finished: list[Output] = []
        self._meanwhile: Callable[[], None] | None = None
        self.stepped: tuple[int, ...] = ()
        self.backends = {PHASES[p]: found.backend for p, found in self.memory.backend.explain().items()}

    # Requests ---------------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        namespace: Hashable = None,
        media: Media | None = None,
    ) -> list[int]:
        """Take a request in.

        Args:
            prompt: token ids, at least one. n: samples of it; they share the prompt's pages.
            namespace: prefixes are shared within it only (an adapter's name, a tenant).
            media: the images of the prompt.

        Returns:
            The ids of the n outputs.

        Raises:
            InvalidInputError: no tokens, tokens outside the vocabulary, a namespace that cannot be looked up, images
                that the model does not read, or a request that could never be run to its end, however long it waited.
        """
        params = _params(params) or SamplingParams()
        tokens = _token_ids(prompt)
        self._check_request(tokens, params, n, media)
        check_namespace(namespace)
        numbers = itertools.count()
        made = [self._made(tokens, len(tokens), params, numbers, namespace, media) for _ in range(n)]
        for sibling in made[1:]:
            made[0].siblings.append(sibling)
            sibling.parent = made[0]
        self._scheduler.add(made[0])
        return [request.id for request in made]

    def fork(self, request_id: int, params: SamplingParams | None = None) -> int:
        """Another output that goes on from what a request has now; they share their pages so far.

        Args:
            params: of the new one, None = the parent's; either way it draws by a number of its own.

        Returns:
            Its id.

        Raises:
            InvalidInputError: the request is unknown or finished, or params leave no token to be made.
        """
        parent = self._find(request_id)
        params = _params(params) or parent.params
        self._check_request(parent.tokens[: parent.prompt_tokens], params, 1)
        made = len(parent.tokens) - parent.prompt_tokens
        if params.max_new_tokens <= made:
            raise InvalidInputError(
                f"max_new_tokens={params.max_new_tokens} of a fork of request {request_id}, which has {made} new "
                f"tokens already; ask for more than it has"
            )
        child = self._made(parent.tokens, parent.prompt_tokens, params, parent.numbers, parent.namespace, parent.media)
        child.backends = dict(parent.backends)
        self._scheduler.fork(parent, child)
        return child.id

    def cancel(self, request_id: int) -> Output:
        """Stop a request; what it has so far is its output, which `step` does not give again.

        Raises:
            InvalidInputError: the request is unknown or finished.
        """
        return self._finish(self._find(request_id), "cancelled")

    def forget_prefixes(self) -> None:
        """Forget the keys and values of everything so far: after the weights of the model, or of the draft model, have
        changed. Requests that run keep their tokens, and are computed anew from them. Call it between steps."""
        self._scheduler.forget()

    @property
    def unfinished(self) -> int:
        """Outputs in the making."""
        return len(self._requests)

    @property
    def running(self) -> int:
        """Outputs in the making that have pages; the others wait."""
        return len(self._scheduler.running)

    @property
    def generated(self) -> int:
        """Tokens that unfinished requests have so far."""
        return sum(len(request.tokens) - request.prompt_tokens for request in self._requests.values())

    @functools.cached_property
    def longest(self) -> int:
        """Tokens that a request may have, prompt and new ones: `max_tokens`, or less where all pages hold no more."""

        def too_many(total: int) -> bool:
            total += self._drafts
            return any(
                self.memory.most_pages(group, total, self.config.max_batch_tokens) > allocator.capacity
                for group, allocator in enumerate(self.memory.allocators)
            )

        return bisect.bisect_left(range(1, self.max_tokens + 1), True, key=too_many)

    def tokens_of(self, request_id: int, start: int = 0) -> list[int]:
        """Return the tokens of an unfinished request so far, without its prompt, and without the first `start`."""
        request = self._find(request_id)
        return request.tokens[request.prompt_tokens + start :]

    def check_request(self, prompt: Sequence[int], params: SamplingParams, media: Media | None = None) -> None:
        """Refuse what `add` would refuse, and take nothing in. It may be called while another thread steps.

        Raises:
            InvalidInputError: as `add`.
        """
        self._check_request(_token_ids(prompt), params, 1, media)

    # Steps ------------------------------------------------------------------------------------------------------------

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[Output]:
        """Run one step: a token more for those that decode, the next chunk for those that prefill.

        Args:
            meanwhile: called once, when a device has been given the step's work and before its tokens are waited for.

        Returns:
            The outputs that finished in it.

        Raises:
            InternalError: there are requests, and none of them can go on.
            InvalidInputError: the model's logits are no numbers. Whatever else a step raises (a device's
                errors, an interrupt): the requests that it ran are in line again, with the tokens they had, and nothing
                that it may not have written is shared. Step again, or cancel them.
        """
        before = self._scheduler.lengths()
        self._meanwhile = meanwhile
        try:
            self._step()
            self._device_works()  # of a step that waits for no token
        except BaseException:
            self._scheduler.undo(before)
            raise
        finished, self._finished = self._finished, []
        return finished

    def _step(self) -> None:
        self.stepped = ()
        works = self._scheduler.schedule()
        self.stepped = tuple(work.request.id for work in works)
        if not works and self._requests:
            raise InternalError(
                f"{self.unfinished} requests wait, none runs and none can start, although each fits alone: pages are "
                f"held by nobody who runs (Engine.check() says by whom)"
            )
        if plain := [work for work in works if not work.drafts]:
            self._run(plain)
        if drafted := [work for work in works if work.drafts]:
            self._verify(drafted)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> list[Output]:
        """Run prompts to their end. Where one is refused or a step fails, none of them stays behind.

        Args:
            params: of all, or one for each. progress: called after each step with the tokens that are new.

        Returns:
            Outputs in the order of the prompts.

        Raises:
            InvalidInputError: not as many params as prompts. Others: as `add` and `step`.
        """
        prompts = _listed("prompts", prompts, "a list of prompts, each a list of token ids")
        one = params is None or isinstance(params, SamplingParams)
        wanted = "SamplingParams, or a list of them"
        each: list[Any] = [params] * len(prompts) if one else _listed("params", params, wanted)
        if len(each) != len(prompts):
            raise InvalidInputError(f"{len(each)} params for {len(prompts)} prompts; give one for all, or one for each")
        ids: list[int] = []
        others: list[Output] = []
        try:
            for prompt, own in zip(prompts, each, strict=True):
                ids += self.add(prompt, own)
            found = self._run_to_end(ids, others, progress)
        finally:
            for left in self._requests.keys() & ids:
                self.cancel(left)
            # Of requests that were there before; the next step gives them.
            asked = frozenset(ids)
            self._finished = [*others, *(output for output in self._finished if output.id not in asked)]
        return [found[i] for i in ids]

    def _run_to_end(
        self, ids: Sequence[int], others: list[Output], progress: Callable[[int], None] | None
    ) -> dict[int, Output]:
        """Step until these are finished; the outputs of others are added to `others`."""
        found: dict[int, Output] = {}
        made, asked = 0, frozenset(ids)
        while len(found) < len(ids):
            for output in self.step():
                if output.id in asked:
                    found[output.id] = output
                else:
                    others.append(output)
            if progress is not None:
                now = sum(len(found[i].token_ids) if i in found else len(self.tokens_of(i)) for i in ids)
                progress(now - made)
                made = now
        return found

    def check(self) -> None:
        """Prove that no page and no row has leaked (for tests: it costs time).

        Raises:
            InternalError: names the rule that is broken.
        """
        self.memory.check()
        if self._drafter is not None:
            self._drafter.memory.check()

    # ------------------------------------------------------------------------------------------------------------------

    def _run(self, works: Sequence[Work]) -> None:
        """Prefill and decode: one forward pass."""
        short = [work.count == 1 for work in works]
        mode = ForwardMode.DECODE if all(short) else ForwardMode.MIXED if any(short) else ForwardMode.EXTEND
        ids = [token for w in works for token in w.request.tokens[w.start : w.start + w.count]]
        ends = list(itertools.accumulate(work.count for work in works))
        last = [n for n, work in enumerate(works) if work.last]
        spans = [(work.request.media, work.start, work.count) for work in works]
        positions, inserts = beside_words(spans, self._encode)
        logits = self.memory.forward(
            mode, [w.request.row for w in works], [w.count for w in works], ids,
            keep=[ends[n] - 1 for n in last] or [0], positions=positions, inserts=inserts,
        )  # fmt: skip
        drawn: list[tuple[Request, int]] = []
        for at, work in enumerate(works[n] for n in last):
            request = work.request
            if work.count > 1:
                self.memory.remember(request.row, request.keys, request.namespace)
            if request.media is not None:
                request.media.features = None  # the caches have what came of it
            drawn.append((request, at))
            if request.siblings:
                drawn += [(r, at) for r in self._fork_samples(request)]
        for work in works:
            phase = "decode" if work.count == 1 and mode is not ForwardMode.EXTEND else "prefill"
            work.request.backends[phase] = self.backends[phase]
        self.memory.table.slide_all([work.request.row for work in works])
        if drawn:
            rows = logits if len(drawn) == len(last) else logits[[at for _, at in drawn]]
            points = [uniform(r.params, r.number, len(r.tokens)) for r, _ in drawn]
            sampled = sample(rows, [r.params for r, _ in drawn], points)
            self._device_works()
            tokens = sampled.tolist()
            if -1 in tokens:
                self._refuse_logits(drawn[tokens.index(-1)][0])
            for (request, _), token in zip(drawn, tokens, strict=True):
                self._append(request, [token])

    def _fork_samples(self, request: Request) -> list[Request]:
        """The samples that waited for this prefill and got a row; the others wait in line and find its pages cached."""
        forked = [child for child in self._freed(request) if self._scheduler.fork(request, child)]
        for child in forked:
            child.backends["prefill"] = self.backends["prefill"]
        return forked

    def _freed(self, request: Request) -> list[Request]:
        waiting, request.siblings = request.siblings, []
        for child in waiting:
            child.parent = None
        return waiting

    def _verify(self, works: Sequence[Work]) -> None:
        """Draft and verify: one forward pass of the target over the trees of all requests."""
        assert self._drafter is not None
        requests, wide = [work.request for work in works], self._drafts + 1
        tree, tokens = self._drafter.draft(requests)
        rows = [request.row for request in requests]
        counts = [wide] * len(rows)
        logits = self.memory.forward(ForwardMode.TARGET_VERIFY, rows, counts, tokens.flatten(), tree=tree)
        drawn = sample(logits, [r.params for r in requests for _ in range(wide)], _points(requests, tree))
        accepted = drawn_accept(tree, tokens, drawn.view_as(tokens))
        self._device_works()
        nodes, new_tokens = accepted.lists()
        for request, path, new in zip(requests, nodes, new_tokens, strict=True):
            if len(new) < len(path):
                self._refuse_logits(request)
        self.memory.commit(rows, counts, accepted)
        for work, new in zip(works, new_tokens, strict=True):
            self.memory.table.truncate(work.request.row, work.start + len(new))
            self.memory.table.slide(work.request.row)
            work.request.backends["verify"] = self.backends["verify"]
            self._append(work.request, new)

    def _device_works(self) -> None:
        """Do what the host has to do beside it, once a step."""
        todo, self._meanwhile = self._meanwhile, None
        if todo is not None:
            todo()

    def _refuse_logits(self, request: Request) -> NoReturn:
        raise InvalidInputError(
            f"the model gives logits of NaN or infinity after {len(request.tokens)} tokens of request {request.id}: no "
            f"token follows from them. Look for NaN among its weights, for numbers beyond its dtype (bfloat16 reaches "
            f"further than float16), or cancel the request"
        )

    def _append(self, request: Request, new: Sequence[int]) -> None:
        params, made = request.params, len(request.tokens) - request.prompt_tokens
        for token in new:
            request.tokens.append(token)
            made += 1
            reason = "stop" if token in params.stop_token_ids else "length" if made >= params.max_new_tokens else ""
            if reason:
                self._finished.append(self._finish(request, reason))
                return

    def _finish(self, request: Request, reason: str) -> Output:
        for sibling in self._freed(request):  # it is cancelled before they could fork
            self._scheduler.add(sibling)
        self._scheduler.remove(request)
        del self._requests[request.id]
        prompt, made = request.tokens[: request.prompt_tokens], request.tokens[request.prompt_tokens :]
        return Output(
            request.id, request.number, prompt, made, reason, request.backends, request.cached, request.preemptions
        )

    def _made(
        self,
        tokens: Sequence[int],
        prompt: int,
        params: SamplingParams,
        numbers: Iterator[int],
        namespace: Hashable,
        media: Media | None,
    ) -> Request:
        request = Request(
            self._count, list(tokens), prompt, params, numbers, next(numbers), namespace, media=media
        )  # fmt: skip
        self._requests[request.id] = request
        self._count += 1
        return request

    def _find(self, request_id: int) -> Request:
        if not isinstance(request_id, Hashable) or request_id not in self._requests:
            raise InvalidInputError(f"request {request_id!r} is not running here: it is unknown or has finished")
        return self._requests[request_id]

    def _released(self, request: Request) -> None:
        if self._drafter is not None:
            self._drafter.release(request)

    def _check_request(self, tokens: list[int], params: SamplingParams, n: int, media: Media | None = None) -> None:
        if media is not None:
            self._check_media(tokens, media)
        if not tokens or not isinstance(n, int) or n < 1:
            raise InvalidInputError(
                f"a request of {len(tokens)} prompt tokens and n={n!r} samples; give 1 or more of both"
            )
        if not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise InvalidInputError(
                f"token {wrong} of the prompt is not in the vocabulary of {self.vocab_size}, 0 to "
                f"{self.vocab_size - 1}; does the tokenizer belong to this model?"
            )
        total = len(tokens) + params.max_new_tokens
        asked = f"{len(tokens)} prompt tokens and max_new_tokens={params.max_new_tokens}"
        if total > self.max_tokens:
            raise InvalidInputError(
                f"{asked} are {total} tokens; a request may have {self.max_tokens} here (max_tokens, or the positions "
                f"of the model)"
            )
        for group, allocator in enumerate(self.memory.allocators):
            pages = self.memory.most_pages(group, total + self._drafts, self.config.max_batch_tokens)
            if pages > allocator.capacity:
                raise InvalidInputError(
                    f"{asked} need {pages} pages of {self.config.cache.page_size} tokens in group {group}, which has "
                    f"{allocator.capacity}: the request could never finish. Give the engine more pages"
                )

    def _check_media(self, tokens: list[int], media: Any) -> None:
        if not isinstance(media, Media):
            raise InvalidInputError(f"media is a {type(media).__name__}; Media(...) or None is needed")
        if self._encode is None:
            raise InvalidInputError(
                "the prompt has images, and the model of this engine reads tokens only; leave them out"
            )
        if self._drafter is not None:
            raise InvalidInputError(
                "the prompt has images, which the draft model would not see; leave them out, or serve without drafts"
            )
        if len(media.keys) != len(tokens) or media.positions.shape != (3, len(tokens)):
            raise InvalidInputError(
                f"media has {len(media.keys)} keys and positions {tuple(media.positions.shape)} for a prompt of "
                f"{len(tokens)} tokens; one of each is needed for each token"
            )


def _points(requests: Sequence[Request], tree: DraftTree) -> list[float]:
    """Return what decides the token after each node: that of its place in the text, as in a step without drafts."""
    if all(request.params.greedy for request in requests):
        return [0.0] * tree.parents.numel()
    found: list[float] = []
    for request, depths in zip(requests, tree.depths.tolist(), strict=True):
        at = [uniform(request.params, request.number, len(request.tokens) + d) for d in range(max(depths) + 1)]
        found += [at[depth] for depth in depths]
    return found


def _max_tokens(config: EngineConfig, runner: Runner) -> int:
    known = runner.max_positions
    if not config.max_tokens and not known:
        raise InvalidInputError("the model names no number of positions; give EngineConfig(max_tokens=...)")
    if known and config.max_tokens > known:
        raise InvalidInputError(f"max_tokens={config.max_tokens} is more than the {known} positions of the model")
    return config.max_tokens or known


def _check_kinds(config: Any) -> None:
    if not isinstance(config, EngineConfig):
        raise InvalidInputError(f"config is a {type(config).__name__}; EngineConfig(...) or None is needed")
    for name, kind in (("cache", KVCacheConfig), ("speculative", Speculative)):
        value = getattr(config, name)
        if not isinstance(value, kind) and not (name == "speculative" and value is None):
            more = " or None" if name == "speculative" else ""
            raise InvalidInputError(f"EngineConfig {name}={value!r}; {kind.__name__}(...){more} is needed")
    if not isinstance(config.graphs, bool) and not callable(config.graphs):
        raise InvalidInputError(f"EngineConfig graphs={config.graphs!r}; True, False or what makes a graph is needed")


def _check(config: EngineConfig, runner: Runner, drafts: int) -> None:
    for name, least in (("max_requests", 1), ("max_batch_tokens", 1 + drafts), ("pages", 0), ("max_tokens", 0)):
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidInputError(f"EngineConfig {name}={value!r}; {least} or more is needed, a whole number")
    spec = config.speculative
    if scalars.flag("EngineConfig batch_invariant", config.batch_invariant):
        _check_invariant(config, runner)
    if spec is not None and spec.runner.vocab_size != runner.vocab_size:
        raise InvalidInputError(
            f"the draft model has a vocabulary of {spec.runner.vocab_size}, the target of {runner.vocab_size}; drafts "
            f"are tokens of one vocabulary"
        )
    if spec is not None and spec.topk > runner.vocab_size:
        raise InvalidInputError(
            f"speculative topk={spec.topk} continuations of a vocabulary of {runner.vocab_size} cannot be had; lower "
            f"topk"
        )


def _check_invariant(config: EngineConfig, runner: Runner) -> None:
    if config.speculative is not None:
        raise InvalidInputError(
            "EngineConfig batch_invariant=True with speculative: which tokens are verified together follows from what "
            "else there is room for; leave one of them out"
        )
    if len(attention_layers(runner.layers)) < len(runner.layers):
        raise InvalidInputError(
            "EngineConfig batch_invariant=True, and the model has layers that keep a state (linear attention), of "
            "which it is not asked; leave it out"
        )


def _piece(config: EngineConfig) -> int:
    """Tokens of a prompt in a step under `batch_invariant`, 0 = as many as there is room for: there is always room
    for so many beside all others that decode."""
    if not config.batch_invariant:
        return 0
    return max(min(_PIECE, config.max_batch_tokens - config.max_requests + 1), 1)


def _draft_until(spec: Speculative | None, runner: Runner) -> int | None:
    """Tokens of the longest request that can have drafts, None = any: drafts go `steps` positions beyond the last
    token in the target, and one less in the draft model."""
    if spec is None:
        return None
    ends = [(runner.max_positions, spec.steps), (spec.runner.max_positions, spec.steps - 1)]
    return min((positions - more for positions, more in ends if positions), default=None)


def _params(params: Any) -> SamplingParams | None:
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidInputError(f"params is a {type(params).__name__}; SamplingParams(...) or None is needed")
    return params


def _listed(name: str, given: Any, wanted: str) -> list[Any]:
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise InvalidInputError(f"{name} is a {type(given).__name__}; needed is {wanted}")
    return list(given)


def _token_ids(prompt: Any) -> list[int]:
    prompt = _listed("the prompt", prompt, "a list of token ids, such as a tokenizer makes of a text")
    if set(map(type, prompt)) <= {int}:  # as usual: a prompt may have tens of thousands
        return prompt  # type: ignore[no-any-return]
    for token in prompt:
        if not isinstance(token, Integral):
            raise InvalidInputError(
                f"the prompt has a {type(token).__name__} among its tokens; token ids are whole numbers: pass a list "
                f"of them (of a tensor, tokens.tolist())"
            )
    return [int(token) for token in prompt]
