"""The toolkit of a plugin: what adapters of kernels share, whatever the library (docs/adapters.md has an example each).

- `loading`: functions of a library, checked when they are first needed.
- `flash_attention`: every family of calls by a kernel with FlashAttention's arguments; `flash_split`, its pieces.
- `gather_kv`, `new_rows`, `padding_rows`, `free_slots`, `pages`: caches in pages, for kernels that lack one of these.
- `scale_sign`, `alignment`, `strides`, `samples`: arguments that a kernel does not take as they are.
- `device`, `tuned`, `cudnn_faults`: graph capture, measured choices, known faults.

Names are imported when they are first used: importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy as _lazy

_WHERE = {
    "EPOCH": "tuned",
    "Kernels": "flash_attention",
    "Operator": "loading",
    "Packed": "flash_attention",
    "Padded": "gather_kv",
    "Result": "flash_attention",
    "aligned": "alignment",
    "blank": "padding_rows",
    "bump": "tuned",
    "capturing": "device",
    "cut_pages": "pages",
    "deliver": "gather_kv",
    "kernel_config": "tuned",
    "keywords": "loading",
    "load": "loading",
    "low_lse": "cudnn_faults",
    "low_lse_at": "cudnn_faults",
    "nothing": "gather_kv",
    "parts_of": "samples",
    "placed": "alignment",
    "placing": "alignment",
    "sides": "gather_kv",
    "signed": "scale_sign",
    "store": "gather_kv",
    "with_keys": "padding_rows",
    "with_new": "new_rows",
    "without_free_slots": "free_slots",
}

__all__ = sorted(_WHERE)

if TYPE_CHECKING:
    from .alignment import aligned as aligned
    from .alignment import placed as placed
    from .alignment import placing as placing
    from .cudnn_faults import low_lse as low_lse
    from .cudnn_faults import low_lse_at as low_lse_at
    from .device import capturing as capturing
    from .flash_attention import Kernels as Kernels
    from .flash_attention import Packed as Packed
    from .flash_attention import Result as Result
    from .free_slots import without_free_slots as without_free_slots
    from .gather_kv import Padded as Padded
    from .gather_kv import deliver as deliver
    from .gather_kv import nothing as nothing
    from .gather_kv import sides as sides
    from .gather_kv import store as store
    from .loading import Operator as Operator
    from .loading import keywords as keywords
    from .loading import load as load
    from .new_rows import with_new as with_new
    from .padding_rows import blank as blank
    from .padding_rows import with_keys as with_keys
    from .pages import cut_pages as cut_pages
    from .samples import parts_of as parts_of
    from .scale_sign import signed as signed
    from .tuned import EPOCH as EPOCH
    from .tuned import bump as bump
    from .tuned import kernel_config as kernel_config


if not TYPE_CHECKING:  # a checker would take every name for one that is here
    __getattr__, __dir__ = _lazy(__name__, _WHERE)
