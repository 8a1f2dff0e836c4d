"""Intel Extension for PyTorch 2.8.0 as transformers/models/cpu/fusions/mha_fusion.py of its wheel has
`VarlenAttention`: padded to one length, then torch's SDPA without the scale that it was given.

Traps: softmax_scale and pdropout are ignored; the causal flag starts in the upper left corner, and padding keys are
only hidden without it; a sequence without keys gets NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.testing.emulators import Library
from polyattn.testing.emulators.arithmetic import scores, weighted

from . import SIGNATURES

__all__ = ["library"]

MODULE = "intel_extension_for_pytorch.llm.modules"


def library() -> Library:
    lib = Library("intel-extension-for-pytorch", "2.8.0", MODULE, signatures=SIGNATURES)

    class VarlenAttention:
        @staticmethod
        @lib.function(MODULE, "intel_extension_for_pytorch.cpu.VarlenAttention.apply_function")
        def apply_function(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            out: Tensor,
            seqlen_q: Tensor,
            seqlen_k: Tensor,
            max_seqlen_q: int,
            max_seqlen_k: int,
            is_causal: bool,
            **more: object,
        ) -> Tensor:
            off = {
                "return_softmax": False,
                "gen_": None,
                "zero_tensors": False,
                "window_size_left": -1,
                "window_size_right": -1,
                "softcap": -1.0,
                "alibi_slopes": None,
            }
            for name, value_ in off.items():
                assert more[name] == value_, f"ipex do not support {name}"
            starts, ends = seqlen_q.tolist(), seqlen_k.tolist()
            for n in range(len(starts) - 1):
                rows, keys = slice(starts[n], starts[n + 1]), slice(ends[n], ends[n + 1])
                size = keys.stop - keys.start
                room = (0, 0, 0, 0, 0, max_seqlen_k - size)
                k, v = (torch.nn.functional.pad(t[keys], room) for t in (key, value))
                place = torch.arange(max_seqlen_k)
                seen = place <= torch.arange(rows.stop - rows.start)[:, None] if is_causal else place < size
                weights = scores(query[rows], k, query.shape[2] ** -0.5, seen).softmax(-1)
                out[rows] = weighted(weights, v).to(out.dtype)
            return out

    lib.add(MODULE, VarlenAttention=VarlenAttention)
    return lib
