"""Device graphs: a step recorded once and replayed on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...errors import GraphError
from .capture_checks import Watch, differences, refusal

__all__ = ["CudaGraph", "DeviceGraph", "FakeGraph", "graphs_of"]


class DeviceGraph(Protocol):
    """Records one device graph and replays it. An accelerator whose graphs are not torch.cuda's brings its own."""

    def capture(self, function: Callable[[], Any]) -> Any:
        """Record `function`, which takes nothing and reads tensors that stay where they are.

        Returns:
            What the function returned. Its tensors are the graph's: every replay writes them anew.
        """

    def replay(self) -> None:
        """Run the recording on what is now in the tensors it reads."""


class CudaGraph:
    """`torch.cuda.CUDAGraph`, on NVIDIA and AMD devices.

    Args:
        pool: memory that several graphs share (`torch.cuda.graph_pool_handle()`): right for graphs that never run at
            the same time and whose results are read before the next one runs. None = its own.
        warm_up: runs before the capture, on a side stream: what libraries make on first use cannot be recorded.
    """

    def __init__(self, pool: Any = None, warm_up: int = 2) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool, self._warm_up = pool, warm_up

    def capture(self, function: Callable[[], Any]) -> Any:
        """Record as `DeviceGraph.capture` does. The capture itself computes nothing: replay follows.

        Raises:
            GraphError: the function did what no graph can hold, such as waiting for the device.
        """
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(self._warm_up):
                function()
        torch.cuda.current_stream().wait_stream(side)
        try:
            # Other threads may use the device meanwhile: a tokeniser's, a loader's.
            with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
                return function()
        except RuntimeError as exc:
            raise GraphError(
                f"the step could not be recorded: {exc}. validate_static names the operator and the line; or leave the "
                f"mode out of GraphRunner's modes"
            ) from exc

    def replay(self) -> None:
        """Replay as `DeviceGraph.replay` does; nothing waits for it."""
        self._graph.replay()


class FakeGraph:
    """Describes what a device graph does, on any device: for tests, and for finding out why a step cannot be recorded.

    It records by running the function under a watch, and replays by running it again. Where a device graph would go on
    with stale memory or values, this one refuses: the function must call the same operators, on the same storages, with
    the same shapes and host values, and must not wait.

    Args:
        warm_up: runs before the recording, as `CudaGraph`.
    """

    def __init__(self, warm_up: int = 1) -> None:
        self._warm_up = warm_up
        self._function: Callable[[], Any] | None = None
        self._recorded = Watch("capture")
        self._outputs: list[Tensor] = []

    def capture(self, function: Callable[[], Any]) -> Any:
        """Record as `DeviceGraph.capture` does.

        Raises:
            GraphError: the function waits for the device, or runs what cannot be watched.
        """
        for _ in range(self._warm_up):
            function()
        try:
            with self._recorded:
                found = function()
        except RuntimeError as exc:  # without the watch, in the warm-up, it ran
            raise GraphError(
                f"the step cannot be watched: {exc}. torch watches nothing that it compiles, such as flex_attention: "
                f"choose another backend, or leave the mode out of GraphRunner's modes"
            ) from exc
        if self._recorded.broken:
            raise refusal("the step cannot be recorded", self._recorded.broken)
        self._function, self._outputs = function, _tensors(found)
        return found

    def replay(self) -> None:
        """Replay as `DeviceGraph.replay` does.

        Raises:
            GraphError: nothing is recorded, or the step is no longer the one that was recorded.
        """
        if self._function is None:
            raise GraphError("replay() of a graph without a recording; capture(function) first")
        now = Watch("replay")
        with now:
            found = self._function()
        if broken := [*now.broken, *differences(self._recorded, now)]:
            raise refusal("the recording does not hold for this step", broken)
        with torch.inference_mode():  # where tensors of both modes may be written
            for output, new in zip(self._outputs, _tensors(found), strict=True):
                output.copy_(new)


def graphs_of(device: torch.device) -> Callable[[], DeviceGraph] | None:
    """Return what makes graphs of a device, all in one memory pool; None where torch has none for it."""
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)


def _tensors(found: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
