"""This room puts polyattn into Hugging Face diffusers (0.42 or newer): `install()`, then
`pipe.transformer.set_attention_backend("polyattn")`, or `prepare(pipe)` for all components of a pipeline.

- `registry.py`: install and uninstall. `names.py`: members of diffusers' enum. `attention.py`: the function every layer
  calls. `processors.py`: layers whose code calls torch's SDPA itself.
- `families.py`: where a model puts its video and its text. `places.py`: hooks that tell a call its place.
- `rules.py`: other backends for some steps, layers, roles and branches. `components.py`: `prepare`. `reports.py`:
  `report`. `what_if.py`: who would serve a pipeline that is not run. `folders.py`: pipelines in folders, read with and
  without their weights. `saving.py`: files of images and videos.

What it does and refuses: docs/diffusers.md.
"""

from __future__ import annotations

from .components import Prepared, prepare
from .registry import install, installed, uninstall
from .reports import PipelineReport, report

__all__ = ["PipelineReport", "Prepared", "install", "installed", "prepare", "report", "uninstall"]
