"""This module owns what one model's requests keep on the device: pool, pages, tables, prefix cache, and the backend
that reads them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import profiler as _profiler

from ..errors import BackendUnavailableError, GraphError, InvalidInputError, UnsupportedRequestError
from .attention.backend import AttentionBackend
from .attention.phases import Asked, Verifier, layer_request
from .attention.plan_slots import on_device
from .attention.workspace import Limits
from .graphs.graphs import DeviceGraph, GraphRunner, graphs_of
from .kv_cache.layout import negotiate_layout
from .kv_cache.pages import PageAllocator, check_pages
from .kv_cache.pool import KVCacheConfig, KVPool, attention_layers
from .kv_cache.prefix_cache import PrefixCache
from .layer import AttentionLayer, StateLayer
from .speculative import Accepted, commit
from .step.batch import ForwardBatch, ForwardMode
from .step.requests import RequestTable
from .step.step import Step
from .step.tree import DraftTree

__all__ = ["Forward", "Memory", "Runner", "check_runner"]


class Forward(Protocol):
    """Runs one step of a model over packed tokens; its attention layers ask the backend it was made for."""

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        keep: Tensor | None,
        batch: ForwardBatch,
        steps: Sequence[Step],
        inserts: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Tensor:
        """
        Args:
            input_ids, positions: int64 [T]. keep: int64 [R], the tokens whose logits are wanted, None = all T.
            batch, steps: what the backend has planned.
            inserts: of a runner that encodes images: tokens int64 [R], and their embeddings [R, hidden]; positions are
                then int64 [3, T].

        Returns:
            logits [R, vocab_size].
        """
        ...


class Runner(Protocol):
    """A model as the engine drives it, such as `polyattn.integrations.transformers.serving.CausalLMRunner`."""

    @property
    def layers(self) -> Sequence[AttentionLayer | StateLayer]: ...

    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    max_positions: int
    """Positions the model knows, 0 = any."""
    # A runner whose model reads images has `encode(media) -> [R, hidden]` as well, on the device (`engine.media`).

    def serve(self, backend: AttentionBackend) -> Forward: ...


def check_runner(what: str, runner: Any) -> None:
    """
    Raises:
        InvalidInputError: it lacks something of a `Runner`.
    """
    wanted = ("layers", "dtype", "device", "vocab_size", "max_positions", "serve")
    if missing := [name for name in wanted if not hasattr(runner, name)]:
        raise InvalidInputError(
            f"{what} is a {type(runner).__name__} without {missing[0]}, and is run by a Runner: for a transformers "
            f"model polyattn.integrations.transformers.serving.CausalLMRunner(model)"
        )


class Memory:
    """The caches of one model and its requests' places in them.

    Args:
        runner: the model. cache: how its caches are kept; their layout is one that the phases' backends share.
        pages: of each group's pool, the padding page included. rows: requests at a time.
        max_tokens: of one request, drafts included. step_tokens: of one step.
        prefixes: keep the pages of prompts and outputs for requests that begin alike. Where layers keep a state by
            request it is off, which is said once: states are not cached with the pages.
        drafts: nodes of the trees that are verified, 0 = none. graphs: see `EngineConfig`.
        choices: backends, as `AttentionBackend` takes them.
    """

    def __init__(
        self,
        runner: Runner,
        cache: KVCacheConfig,
        *,
        pages: int,
        rows: int,
        max_tokens: int,
        step_tokens: int,
        prefixes: bool = True,
        drafts: int = 0,
        graphs: bool | Callable[[], DeviceGraph] = True,
        **choices: Any,
    ) -> None:
        cache = _in_shared_layout(runner, cache, pages, **{n: c for n, c in choices.items() if n != "linear"})
        self.pool = KVPool(
            runner.layers, cache, pages, dtype=runner.dtype, device=runner.device, requests=rows, drafts=drafts
        )
        states = self.pool.states
        if prefixes and states is not None:
            prefixes = False
            text = (
                "polyattn: prompts that begin alike are run anew each time: some layers of the model keep a state by "
                "request, which is not cached with the pages of a prefix"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        windows = [group.window for group in self.pool.groups]
        self.allocators = [PageAllocator(pages) for _ in windows]
        self.table = RequestTable(
            rows, max_tokens, cache.page_size, windows, self.allocators, runner.device, states=states
        )
        self.prefixes = PrefixCache(cache.page_size, windows, self.allocators) if prefixes else None
        limits = Limits(rows, max(step_tokens, rows), max_tokens)
        self.backend = AttentionBackend(runner.layers, self.pool, self.table, limits=limits, **choices)
        self._forward = runner.serve(self.backend)
        self.device = runner.device
        self._batch: ForwardBatch | None = None
        # Images move the positions of the tokens after them; with drafts there are none.
        self._planned = getattr(runner, "encode", None) is None or drafts > 0
        self._insists = not isinstance(graphs, bool)
        make = graphs_of(self.device) if isinstance(graphs, bool) else graphs
        self.graphs = None if make is None or graphs is False else self._graphs(rows, drafts, make)

    def _graphs(self, rows: int, drafts: int, make: Callable[[], DeviceGraph]) -> GraphRunner | None:
        """Return what replays decode and verify steps."""
        modes = {ForwardMode.TARGET_VERIFY: drafts} if drafts else {}

        def run(input_ids: Tensor, positions: Tensor) -> Tensor:
            assert self._batch is not None
            return self._forward(input_ids, positions, None, self._batch, ())

        try:
            return GraphRunner(
                self.backend, run, max_sequences=rows, device=self.device, modes=modes, graph=make,
                planned_positions=self._planned,
            )  # fmt: skip
        except UnsupportedRequestError as exc:
            self._eagerly(exc)
            return None

    def _eagerly(self, why: Exception) -> None:
        """Go on without graphs, which only cost time to miss, unless they were asked for by their maker."""
        if self._insists:
            raise why
        text = f"polyattn: steps are not recorded into device graphs but run eagerly, because {why}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        self.graphs = None

    def begin(self, tokens: Sequence[int], namespace: Hashable) -> int:
        """A row for these tokens that has the longest prefix of them that is cached."""
        row = self.table.add()
        if self.prefixes is not None:
            try:
                match = self.prefixes.match(tokens, namespace=namespace)
            except BaseException:
                self.table.remove(row)
                raise
            self.table.adopt(row, match)
            # The row holds the pages itself from here on.
            self.prefixes.release(match)
        return row

    def end(self, row: int, tokens: Sequence[int], namespace: Hashable) -> None:
        """Give a row back. Its full pages stay in the prefix cache until others need them."""
        self.remember(row, tokens, namespace)
        self.table.remove(row)

    def remember(self, row: int, tokens: Sequence[int], namespace: Hashable) -> None:
        """Let others begin with the pages of these tokens."""
        if self.prefixes is not None:
            computed = tokens[: self.table.length(row)]
            pages = [self.table.pages(row, group) for group in range(len(self.allocators))]
            self.prefixes.insert(computed, pages, namespace=namespace)

    def extend(self, rows: Sequence[int], tokens: int | Sequence[int], *, start: bool = False) -> None:
        """Slots for so many tokens more of each row, or of none; shared pages that they go to are copied. The prefix
        cache gives up pages for them.

        Args:
            start: of a request that is to start: the prefix cache gives up nothing where that is not enough. For one
                that runs it gives all it has.

        Raises:
            OutOfPagesError: see `RequestTable.extend_all`.
        """
        prefixes = self.prefixes
        make_room = None if prefixes is None else prefixes.make_room if start else self._evict
        for copy in self.table.extend_all(rows, tokens, make_room):
            self.pool.copy(copy.group, [copy.source], [copy.target])

    def _evict(self, lacking: Sequence[int]) -> None:
        assert self.prefixes is not None
        free = [allocator.free for allocator in self.allocators]
        for group, (pages, allocator) in enumerate(zip(lacking, self.allocators, strict=True)):
            if (more := pages - (allocator.free - free[group])) > 0:
                self.prefixes.evict(more, group)

    @property
    def supply(self) -> Hashable:
        """Return what stays the same while a request that could not start still cannot: nobody gave pages back, and no
        prefix is new."""
        inserted = 0 if self.prefixes is None else self.prefixes.inserted
        return inserted, *(allocator.returned for allocator in self.allocators)

    def most_pages(self, group: int, tokens: int, step_tokens: int) -> int:
        """Pages of a group that a request of so many tokens has at most at a time."""
        size, window = self.table.page_size, self.table.windows[group]
        if window >= 0:
            # Earlier keys of the window and one step, both cut somewhere inside a page.
            tokens = min(tokens, window + step_tokens + size)
        return -(-tokens // size)

    def forward(
        self,
        mode: ForwardMode,
        rows: Sequence[int],
        counts: Sequence[int],
        input_ids: Tensor | Sequence[int],
        *,
        keep: Sequence[int] | None = None,
        tree: DraftTree | None = None,
        positions: Tensor | None = None,
        inserts: Sequence[tuple[Sequence[int], Tensor]] = (),
    ) -> Tensor:
        """Run the last `counts` tokens of each row.

        Args:
            input_ids: of all rows, one after the other. keep: the tokens whose logits are wanted, None = all.
            positions, inserts: of prompts with images, see `engine.media.beside_words`; tokens without an insert have
                one position in all three.

        Returns:
            logits [R, V]; use them before the next step, whose graph may write there.
        """
        self._batch = batch = ForwardBatch(mode, rows, self.table.lengths(rows), counts, tree)
        ids = input_ids if isinstance(input_ids, Tensor) else self._tensor(input_ids)
        kept = None if keep is None or len(keep) == batch.tokens else self._tensor(keep)
        if self.graphs is not None and kept is None and not inserts and not self.graphs.eager_because(batch):
            try:
                where = None
                if not self._planned:
                    where = torch.tensor(batch.positions()) if positions is None else positions[0]
                logits: Tensor
                if not _profiler._is_profiler_enabled:
                    logits = self.graphs.run(batch, ids, where)
                    return logits
                with torch.profiler.record_function(f"polyattn.serving {self._replayed(mode)}"):
                    logits = self.graphs.run(batch, ids, where)
                    return logits
            except GraphError as exc:  # code of the model that waits for the device, such as some mixtures of experts
                self._eagerly(exc)
        steps = self.backend.plan(batch)
        self.backend.prepare()
        if positions is None:
            return self._forward(ids, self.backend.positions, kept, batch, steps)
        moved = [(self._tensor(at), features) for at, features in inserts]
        return self._forward(ids, positions.to(self.device), kept, batch, steps, moved)

    def _replayed(self, mode: ForwardMode) -> str:
        """Name a replayed step in a profile: its layers are ranges only while it is recorded."""
        found = self.backend.explain()["decode" if mode is ForwardMode.DECODE else "verify"]
        return f"{mode.name.lower()} replayed {found.id}"

    def slots(self, rows: Sequence[int], counts: Sequence[int]) -> list[Tensor]:
        """Return where the last `counts` tokens of each row are in the caches: per group int64, of all rows one after
        the other."""
        size, found = self.table.page_size, []
        for group in range(len(self.allocators)):
            slots: list[int] = []
            for row, count in zip(rows, counts, strict=True):
                pages, end = self.table.pages(row, group), self.table.length(row)
                slots += [pages[place // size] * size + place % size for place in range(end - count, end)]
            found.append(self._tensor(slots))
        return found

    def commit(self, rows: Sequence[int], counts: Sequence[int], accepted: Accepted) -> None:
        """Put the accepted drafts of a verified step where plain decoding would have: tokens in their pages, and what
        layers keep by request after the last of them. The rows are then to be truncated."""
        for group, slots in enumerate(self.slots(rows, counts)):
            self.pool.move(group, *commit(accepted, slots))
        if self.pool.states is not None:
            self.pool.states.commit(rows, accepted.last)

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return on_device(numbers, self.device)

    def check(self) -> None:
        """Prove that rows and tree are in order and that no page has leaked.

        Raises:
            InternalError: names the rule that is broken.
        """
        self.table.check()
        holders = [self.table]
        if self.prefixes is not None:
            self.prefixes.check()
            holders.append(self.prefixes)  # type: ignore[arg-type]
        check_pages(self.allocators, *holders)


def _in_shared_layout(
    runner: Runner,
    cache: KVCacheConfig,
    pages: int,
    *,
    backend: str | None = None,
    prefill_backend: str | None = None,
    decode_backend: str | None = None,
    verify: Verifier | None = None,
    topk: int = 0,
    batch_invariant: bool = False,
) -> KVCacheConfig:
    """The same cache in the layout that `negotiate_layout` finds."""
    asked = Asked(backend, prefill_backend, decode_backend, verify, topk, batch_invariant=batch_invariant)
    # Of one page: beside `large`, what a layer's cache says of itself in a request does not depend on its size.
    small = KVPool(attention_layers(runner.layers), cache, 1, requests=1, dtype=runner.dtype, device=runner.device)
    wanted = {
        layer_request(
            layer,
            small.cache(layer.layer_id).request_fields(pages),
            phase=phase,
            dtype=runner.dtype,
            device=small.device,
            topk=topk,
            batch_invariant=batch_invariant,
        ): asked.argument(phase)
        for layer in attention_layers(runner.layers)
        if not layer.kept[0].layout  # else it has its own, whatever the others share
        for phase in asked.phases
    }
    if not wanted:
        return cache
    try:
        layout, _ = negotiate_layout(list(wanted), backends=list(wanted.values()))
    except (UnsupportedRequestError, BackendUnavailableError):
        return cache  # `AttentionBackend` refuses too, and says it in the words of the flags
    return dataclasses.replace(cache, layout=layout)  # type: ignore[arg-type]
