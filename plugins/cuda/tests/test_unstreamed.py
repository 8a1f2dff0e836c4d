"""Whose stream a kernel runs on: libraries that name none are called in turn with the current one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import polyattn
from polyattn.contract import BackendInfo
from polyattn_cuda.plugin import BACKENDS
from polyattn_cuda.unstreamed import on_default_stream

from .devices import need


def serves_dense(info: BackendInfo) -> bool:
    rows = (row for provider in info.providers for row in provider.rows)
    return any(not limit.reason("dense") for row in rows if (limit := row.allows.get("family", row.when.get("family"))))


DENSE = [info for info in BACKENDS if not info.planned and serves_dense(info)]


class Recorder:
    """torch.cuda's streams, and a tensor on its device, that write down what is asked of them."""

    is_cuda = True

    def __init__(self, current: str) -> None:
        self.said: list[str] = []
        self.current = current

    def stream(self, name: str) -> Any:
        recorder = self

        class Stream:
            label = name

            def __eq__(self, other: object) -> bool:
                return self.label == getattr(other, "label", None)

            __hash__ = None  # type: ignore[assignment]

            def wait_stream(self, other: Any) -> None:
                recorder.said.append(f"{self.label} waits for {other.label}")

        return Stream()

    @contextlib.contextmanager
    def made_current(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.label
        yield
        self.current = before

    def record_stream(self, stream: Any) -> None:
        self.said.append(f"used on {stream.label}")

    def kernel(self, *tensors: Any, double: bool = False) -> Any:
        self.said.append(f"runs on {self.current}")
        return (self, self) if double else self

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Recorder:
        monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream(self.current))
        monkeypatch.setattr(torch.cuda, "default_stream", lambda: self.stream("default"))
        monkeypatch.setattr(torch.cuda, "stream", self.made_current)
        return self


@pytest.mark.parametrize("double", [False, True])
def test_another_stream_waits_and_is_waited_for(double: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Recorder("side").install(monkeypatch)
    on_default_stream(cuda.kernel, cuda, cuda, cuda, double=double)  # type: ignore[arg-type]
    turns = ["default waits for side", "runs on default", "side waits for default"]
    assert cuda.said == turns + ["used on side"] * (1 + double)
    assert cuda.current == "side"


def test_on_the_default_stream_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Recorder("default").install(monkeypatch)
    on_default_stream(cuda.kernel, cuda)  # type: ignore[arg-type]
    assert cuda.said == ["runs on default"]


@pytest.mark.filterwarnings("default")  # a vendor's own
@pytest.mark.parametrize("info", DENSE, ids=lambda info: info.name)
def test_inputs_that_come_late_on_another_stream(info: BackendInfo, request: pytest.FixtureRequest) -> None:
    """The stream is busy when the call is made, and the inputs are NaN until it gets to them."""
    need(info.id, request)
    tensors = [torch.randn(1, 256, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    want = polyattn.attention(*tensors, backend=info.name)
    late = [torch.full_like(tensor, torch.nan) for tensor in tensors]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        for tensor, right in zip(late, tensors, strict=True):
            tensor.copy_(right)
        found = polyattn.attention(*late, backend=info.name)
    side.synchronize()
    assert not found.isnan().any(), "its kernels did not wait for the stream that they were called on"
    torch.testing.assert_close(found, want, rtol=0.02, atol=0.02)
