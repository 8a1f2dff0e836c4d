"""A small engine loop over the parts of `polyattn.serving`: it proves that they fit, on real models.

- `engine.py`: `Engine`, what a caller sees. `scheduler.py`: who runs, chunked prefill, preemption.
- `media.py`: the images of a prompt. `sampling.py`: from logits to tokens.
- `drafting.py`: the draft model of speculative decoding.

Models come as a `polyattn.serving.memory.Runner`; `polyattn.integrations.transformers.serving` has the one for
transformers.
"""

from __future__ import annotations

from ..memory import Forward, Runner
from .drafting import Speculative
from .engine import Engine, EngineConfig, Output
from .media import Media
from .sampling import SamplingParams

__all__ = ["Engine", "EngineConfig", "Forward", "Media", "Output", "Runner", "SamplingParams", "Speculative"]
