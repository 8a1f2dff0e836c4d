"""The toolkit of a plugin: what adapters of kernels share, whatever the library (docs/adapters.md has an example each).

- `loading`: functions of a library, checked when they are first needed.
- `flash_attention`: every family of calls by a kernel with FlashAttention's arguments; `flash_split`, its pieces.
- `gather_kv`, `new_rows`, `padding_rows`, `free_slots`, `pages`: caches in pages, for kernels that lack one of these.
- `scale_sign`, `alignment`, `strides`, `samples`: arguments that a kernel does not take as they are.
- `device`, `tuned`, `cudnn_faults`: graph capture, measured choices, known faults.

Names are imported when they are first used: importing this package imports no torch. What is here is promised, as
`polyattn.contract` is: it grows, and nothing in it changes its arguments. The modules behind it may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy as _lazy

_NAMES = {
    "alignment": "align16 aligned with_aligned_inputs",
    "cudnn_faults": "has_low_lse_fault low_lse_defect",
    "device": "capturing",
    "flash_attention": "FlashAttentionKernels OutAndLSE Packed bind_dropout bind_flash_attention constant_int32 "
    "dense_by_packed uniform_cu_seqlens",
    "free_slots": "without_free_slots",
    "gather_kv": "Padded empty_result finish_output split_kv write_new_kv",
    "loading": "Operator keywords load",
    "new_rows": "append_new_kv",
    "padding_rows": "give_padding_a_key padding_query_mask",
    "pages": "cut_pages",
    "samples": "launch_slices slice_samples",
    "scale_sign": "with_positive_scale",
    "strides": "normalise_unit_strides",
    "tuned": "EPOCH bump kernel_config",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_WHERE)

if TYPE_CHECKING:
    # isort: off
    from .alignment import align16 as align16, aligned as aligned, with_aligned_inputs as with_aligned_inputs
    from .cudnn_faults import has_low_lse_fault as has_low_lse_fault, low_lse_defect as low_lse_defect
    from .device import capturing as capturing
    from .flash_attention import FlashAttentionKernels as FlashAttentionKernels, OutAndLSE as OutAndLSE
    from .flash_attention import Packed as Packed, bind_dropout as bind_dropout
    from .flash_attention import bind_flash_attention as bind_flash_attention, constant_int32 as constant_int32
    from .flash_attention import dense_by_packed as dense_by_packed, uniform_cu_seqlens as uniform_cu_seqlens
    from .free_slots import without_free_slots as without_free_slots
    from .gather_kv import Padded as Padded, empty_result as empty_result, finish_output as finish_output
    from .gather_kv import split_kv as split_kv, write_new_kv as write_new_kv
    from .loading import Operator as Operator, keywords as keywords, load as load
    from .new_rows import append_new_kv as append_new_kv
    from .padding_rows import give_padding_a_key as give_padding_a_key, padding_query_mask as padding_query_mask
    from .pages import cut_pages as cut_pages
    from .samples import launch_slices as launch_slices, slice_samples as slice_samples
    from .scale_sign import with_positive_scale as with_positive_scale
    from .strides import normalise_unit_strides as normalise_unit_strides
    from .tuned import EPOCH as EPOCH, bump as bump, kernel_config as kernel_config
    # isort: on


if not TYPE_CHECKING:  # a checker would take every name for one that is here
    __getattr__, __dir__ = _lazy(__name__, _WHERE)
