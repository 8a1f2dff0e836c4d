"""Conformance of every CUDA backend that has an adapter, with the real library on a GPU; not run, and said so, where
either is missing."""

from __future__ import annotations

from polyattn_cuda.plugin import BACKENDS

from .harness import OnDevice

BUILT = sorted(info.name for info in BACKENDS if not info.planned)

for _name in BUILT:
    _title = "Test" + "".join(word.capitalize() for word in _name.split("_"))
    globals()[_title] = type(_title, (OnDevice,), {"backend": f"{_name}@cuda", "__module__": __name__})


def test_flash_attention_is_among_them() -> None:
    assert {"fa", "fa2", "fa3", "fa4"} <= set(BUILT)
