"""Memory and bounds of a serving context: `Limits`, and the workspaces that `contract.Slot` hands to sessions."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import torch
from torch import Tensor

from ...contract import Slot
from ...errors import InvalidInputError

__all__ = ["Limits", "Workspaces"]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Describes what no step of a serving context exceeds.

    Attributes:
        max_sequences: N, padding rows included. max_tokens: T_q of a step, padding included.
        max_seqlen: keys of one sequence, the new ones included.
        padding_seq_len: keys of a padding row, for kernels that cannot take 0: then they are those of the padding page.

    Raises:
        InvalidInputError: a number that is none, or too small.
    """

    max_sequences: int
    max_tokens: int
    max_seqlen: int
    padding_seq_len: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "padding_seq_len" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidInputError(f"Limits: {field.name}={value!r}; a whole number of at least {least} is needed")


class Workspaces:
    """The workspaces of one serving context, which runs on one device and one stream at a time.

    A workspace belongs to one slot, and so to one session: a plan written there is never overwritten by the plan of
    another group, phase or graph size before it was run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[tuple[Hashable, Hashable, str], Tensor] = {}
        self._fixed: set[Hashable] = set()

    def slot(
        self, plan_slot: Hashable, session: Hashable, limits: Limits, max_pages: int, *, recorded: bool = False
    ) -> Slot:
        """The slot of one session of a plan slot."""

        def workspace(name: str, nbytes: int) -> Tensor:
            return self._take(plan_slot, session, name, nbytes)

        return Slot(self._device, limits.max_sequences, limits.max_tokens, max_pages, workspace, recorded)

    def fix(self, plan_slot: Hashable) -> None:
        """Fix the memory of this plan slot: from now on nothing of it may move: its steps are recorded."""
        self._fixed.add(plan_slot)

    @property
    def nbytes(self) -> int:
        return sum(memory.numel() for memory in self._memory.values())

    def _take(self, plan_slot: Hashable, session: Hashable, name: str, nbytes: int) -> Tensor:
        have = self._memory.get((plan_slot, session, name))
        if have is not None and have.numel() >= nbytes:
            return have[:nbytes]
        if plan_slot in self._fixed:
            raise InvalidInputError(
                f"workspace {name!r} of a recorded step is asked for {nbytes} bytes and has "
                f"{0 if have is None else have.numel()}: it may not move after the capture. Ask for all that the "
                f"slot's bounds can need when the session is made"
            )
        # Allocators of devices align to 256 bytes or more; the CPU's to 64.
        with torch.inference_mode(False):  # written in any mode from here on
            made = torch.empty(nbytes + 255, dtype=torch.uint8, device=self._device)
        start = -made.data_ptr() % 256
        self._memory[plan_slot, session, name] = made = made[start : start + nbytes]
        return made
