"""This module describes what one step of an engine runs: which requests, how many keys and how many new tokens each,
and in which mode."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from ...errors import InvalidInputError

if TYPE_CHECKING:
    from .tree import DraftTree

__all__ = ["ForwardBatch", "ForwardMode"]


class ForwardMode(enum.Enum):
    """Describes what the rows of a batch do.

    EXTEND: prompts or chunks of them, over cached prefixes or none. DECODE: one token each. MIXED: some extend, some
    decode. TARGET_VERIFY: the target model runs drafts, a chain or a tree. DRAFT_EXTEND: the draft model takes in the
    tokens that were accepted. IDLE: no row, while other ranks run a step.
    """

    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"
    IDLE = "idle"

    # Of the object, as its equality: that of Enum is a function of Python's, called for every step a few times.
    __hash__ = object.__hash__

    @property
    def phase(self) -> Literal["extend", "decode", "verify"]:
        """`AttentionRequest.phase` of such a step."""
        if self in (ForwardMode.DECODE, ForwardMode.IDLE):
            return "decode"
        return "verify" if self is ForwardMode.TARGET_VERIFY else "extend"


@dataclasses.dataclass(frozen=True)
class ForwardBatch:
    """Describes one step, on the host. The new tokens of a row are the last of its keys; they are packed in the order
    of rows.

    Attributes:
        mode: see `ForwardMode`.
        rows: of the request table.
        seq_lens: keys of each row, its new tokens included.
        query_lens: new tokens of each row.
        tree: drafts of each row, N_d of them in every row; only in mode TARGET_VERIFY, where None is a chain.
        padding: rows that follow and belong to no request, in the fixed shapes of graphs.
        padding_query_len: new tokens of each of those; None: as many as every row has.
        cross: the keys are those of an encoder (`seq_lens`) and the new tokens are not among them.

    Raises:
        InvalidInputError: a count, a length or the tree does not fit.

    Example:
        >>> batch = ForwardBatch(ForwardMode.EXTEND, rows=[0, 3], seq_lens=[5, 8], query_lens=[5, 2])
        >>> batch.tokens, batch.prefix_lens, batch.positions()
        (7, [0, 6], [0, 1, 2, 3, 4, 6, 7])
    """

    mode: ForwardMode
    rows: Sequence[int]
    seq_lens: Sequence[int]
    query_lens: Sequence[int]
    tree: DraftTree | None = None
    padding: int = 0
    padding_query_len: int | None = None
    cross: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.mode, ForwardMode):
            allowed = ", ".join(mode.name for mode in ForwardMode)
            raise InvalidInputError(f"mode={self.mode!r} is no ForwardMode: use one of {allowed}")
        rows, seq_lens, query_lens = self.rows, self.seq_lens, self.query_lens
        if not len(rows) == len(seq_lens) == len(query_lens):
            given = f"{len(rows)} rows, {len(seq_lens)} seq_lens, {len(query_lens)} query_lens"
            raise InvalidInputError(f"a batch has one row, one sequence length and one query length each, not {given}")
        # A scheduler's own lists go on changing, and the step after this one is told by what this one ran.
        for name, numbers in (("rows", rows), ("seq_lens", seq_lens), ("query_lens", query_lens)):
            kind = type(numbers)
            if kind not in (list, tuple) or not _are_ints(numbers):
                object.__setattr__(self, name, self._numbers(name, numbers))
            elif kind is list:
                object.__setattr__(self, name, list(numbers))
        if self.padding < 0:
            raise InvalidInputError(f"padding={self.padding}: it counts rows, 0 or more")
        self._check_rows()
        self._check_mode()
        if self.tree is not None:
            self._check_tree(self.tree)
        if self.padding and self.padding_query_len is None:
            object.__setattr__(self, "padding_query_len", self._common_query_len())
        if self.padding_query_len is not None and self.padding_query_len < 1:
            raise InvalidInputError(f"padding_query_len={self.padding_query_len}: a row of padding has 1 token or more")
        fixed = 1 if self.mode is ForwardMode.DECODE else None if self.tree is None else self.tree.draft_tokens
        if self.padding and fixed is not None and self.padding_query_len != fixed:
            raise InvalidInputError(
                f"padding_query_len={self.padding_query_len}: every row of this {self.mode.name} batch has {fixed} new "
                f"tokens, those of padding too; leave it out"
            )

    @staticmethod
    def _numbers(name: str, given: Sequence[int]) -> list[int]:
        """Return the numbers as ints: host numbers, not those of a device, which would be waited for."""
        if hasattr(given, "data_ptr"):  # a tensor, and no import of torch to say so
            raise InvalidInputError(f"{name} is a tensor, and a batch is made of host numbers: pass {name}.tolist()")
        try:
            return [operator.index(number) for number in given]
        except TypeError as exc:
            raise InvalidInputError(f"{name}={given!r}: {exc}; a batch is made of whole numbers") from exc

    def _check_rows(self) -> None:
        # Several sequences may attend one encoder's keys, which they only read.
        if (len(set(self.rows)) < len(self.rows) and not self.cross) or min(self.rows, default=0) < 0:
            raise InvalidInputError(
                f"rows={list(self.rows)}: every row is 0 or more and comes once; its tokens of one step go together"
            )
        if (
            min(self.query_lens, default=1) >= 1
            and min(self.seq_lens, default=0) >= 0
            and (self.cross or not any(map(operator.lt, self.seq_lens, self.query_lens)))
        ):
            return
        for n, (keys, new) in enumerate(zip(self.seq_lens, self.query_lens, strict=True)):
            if new < 1 or (keys < new and not self.cross) or keys < 0:
                raise InvalidInputError(
                    f"row {self.rows[n]} has seq_len {keys} and query_len {new}: a row has 1 new token or more, and "
                    "seq_len counts all its keys, the new tokens included (cross=True: the keys of an encoder)"
                )

    def _check_mode(self) -> None:
        if self.mode is ForwardMode.IDLE and self.rows:
            raise InvalidInputError(f"an IDLE batch has no rows, not {len(self.rows)}; padding may follow")
        if self.mode is ForwardMode.DECODE and max(self.query_lens, default=1) > 1:
            raise InvalidInputError(
                f"a DECODE batch has 1 new token for each row, not {max(self.query_lens)}: use EXTEND, MIXED, or "
                "TARGET_VERIFY for drafts"
            )

    def _check_tree(self, tree: DraftTree) -> None:
        if self.mode is not ForwardMode.TARGET_VERIFY:
            raise InvalidInputError(
                f"a tree goes with mode TARGET_VERIFY, not with {self.mode.name}: leave it out, or change the mode"
            )
        if tree.sequences != len(self.rows) or any(new != tree.draft_tokens for new in self.query_lens):
            raise InvalidInputError(
                f"the tree has {tree.draft_tokens} drafts for each of {tree.sequences} rows, the batch "
                f"{len(self.rows)} rows with query_lens {sorted(set(self.query_lens))}: they must agree"
            )

    def _common_query_len(self) -> int:
        if self.tree is not None:
            return self.tree.draft_tokens
        lengths = set(self.query_lens) or {1}
        if len(lengths) > 1:
            raise InvalidInputError(
                f"query_lens are {sorted(lengths)}, and rows of padding need a length: give padding_query_len"
            )
        return lengths.pop()

    @functools.cached_property
    def sequences(self) -> int:
        """N, padding included."""
        return len(self.rows) + self.padding

    @functools.cached_property
    def all_query_lens(self) -> list[int]:
        """New tokens of each of the N rows, padding included."""
        if not self.padding and isinstance(self.query_lens, list):
            return self.query_lens
        return [*self.query_lens, *[self.padding_query_len or 0] * self.padding]

    @functools.cached_property
    def tokens(self) -> int:
        """T_q, padding included."""
        return self.sequences if self.mode is ForwardMode.DECODE else sum(self.all_query_lens)

    @property
    def prefix_lens(self) -> list[int]:
        """Keys of each row before its new tokens."""
        return [keys - new for keys, new in zip(self.seq_lens, self.query_lens, strict=True)]

    @functools.cached_property
    def max_seqlen_q(self) -> int:
        return max(self.all_query_lens, default=0)

    @functools.cached_property
    def max_seqlen_k(self) -> int:
        """A bound on the keys of a row: those of the longest, and no fewer than `max_seqlen_q`."""
        return max(max(self.seq_lens, default=0), self.max_seqlen_q)

    @functools.cached_property
    def cu_seqlens_q(self) -> list[int]:
        """[N+1], the first token of each row, and T_q."""
        if self.mode is ForwardMode.DECODE:
            return list(range(self.sequences + 1))
        return [0, *accumulate(self.all_query_lens)]

    def positions(self) -> list[int]:
        """Return where each of the T_q tokens is in its text, for rotary embeddings: 0 in padding; for a tree prefix +
        depth, so that siblings are at one position (this waits for the device that the tree is on)."""
        if self.tree is not None:
            depths = self.tree.depths.tolist()
            found = [prefix + d for prefix, row in zip(self.prefix_lens, depths, strict=True) for d in row]
        else:
            found = [
                position
                for keys, new in zip(self.seq_lens, self.query_lens, strict=True)
                for position in range(keys - new, keys)
            ]
        return found + [0] * (self.tokens - len(found))

    def next(self) -> ForwardBatch:
        """The decode step after this one: every row has one key more.

        Raises:
            InvalidInputError: this is no decode step.
        """
        if self.mode is not ForwardMode.DECODE:
            raise InvalidInputError(
                f"what follows a step in mode {self.mode.name} is not known; only a DECODE step is followed by one "
                "more token for each row: make a new batch"
            )
        # One more key keeps every rule.
        found = self._changed(seq_lens=[keys + 1 for keys in self.seq_lens], _after=self._mark)
        if self.rows and not self.cross:
            found.__dict__["max_seqlen_k"] = self.max_seqlen_k + 1
        return found

    def padded(self, padding: int, query_len: int) -> ForwardBatch:
        """The same batch with so many more rows of padding behind it, of `query_len` tokens each: as many as every row
        has where a mode fixes that."""
        if not padding:
            return self
        if padding < 0 or self.padding or (query_len != 1 and self.mode is ForwardMode.DECODE):
            return dataclasses.replace(self, padding=self.padding + padding, padding_query_len=query_len)
        # Rows of padding break no rule of the others, and what follows what stays.
        after = self.__dict__.get("_after")
        return self._changed(_COUNTED, padding=padding, padding_query_len=query_len, _mark=self._mark, _after=after)

    def follows(self, other: ForwardBatch) -> bool:
        """Return whether this is `other.next()`, or equal to it."""
        if (self.padding, self.cross) != (other.padding, other.cross):
            return False
        after = self.__dict__.get("_after")
        if after is not None and after is other.__dict__.get("_mark"):
            return True
        return (
            self.mode is other.mode is ForwardMode.DECODE
            and list(self.rows) == list(other.rows)
            and list(self.seq_lens) == [keys + 1 for keys in other.seq_lens]
        )

    @functools.cached_property
    def _mark(self) -> object:
        """Return a mark that this batch shares with its padded forms. The next step recognises the batch by it."""
        return object()

    def _changed(self, forget: Sequence[str] = ("_mark",), **fields: Any) -> ForwardBatch:
        """Another batch that needs no check, with what was computed of this one and still holds."""
        found = object.__new__(ForwardBatch)
        kept = found.__dict__
        kept.update(self.__dict__)
        for name in ("max_seqlen_k", *forget):
            kept.pop(name, None)
        kept.update(fields)
        return found


def _are_ints(numbers: Sequence[Any]) -> bool:
    """Return whether every one is an int: their sum is of another kind where one of them is, and adding is quick."""
    try:
        return type(sum(numbers)) is int
    except TypeError:
        return False


_COUNTED = ("sequences", "all_query_lens", "tokens", "max_seqlen_q", "cu_seqlens_q")
"""What is counted with the rows of padding."""
