"""polyattn's own kernels, interpreted on the CPU where there is no accelerator: few cases, each of them slow."""

from __future__ import annotations

import pytest

from polyattn.testing import AttentionConformance

pytest.importorskip("triton", reason="not run: the Triton package is not installed (it has no build for this platform)")


class TestTriton(AttentionConformance):
    backend = "triton"
    dtypes, per_row = ("float32",), 2
