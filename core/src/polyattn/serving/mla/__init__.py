"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): one cached row per token for all heads.

A token's row is (latent [D_c], rope key [D_r]). The model's up-projection `kv_b_proj` makes keys and values of each
head from the latent; moved to the other side of the products, the rows themselves are keys and values ("absorbed").

- `absorb.py`: the two halves of `kv_b_proj`, on either side. `scale.py`: the factor on the logits.
- `policy.py`: which form a step takes, as data. `prefill.py`: the unabsorbed forms, in one piece or merged by LSE.
- `companion.py`: who serves the unabsorbed form beside a backend for latent rows.
- `lists.py`: the tokens that each query sees in DeepSeek sparse attention, as an indexer scores them.
- `attention.py`: `LatentAttention`, the decision and both forms behind one call per layer.

Shape letters: T tokens, H heads, D_nope, D_r, D_c, D_v widths. The absorbed kernel call is `polyattn.mla_attention`.
"""

from __future__ import annotations

from .absorb import UpProjection, absorb, expand, split_kv_b, value_up
from .attention import LatentAttention
from .companion import Companion, companion
from .lists import Index
from .policy import Decision, LatentPolicy, decide
from .prefill import Piece, attend, plan_pieces
from .scale import softmax_scale, yarn_mscale

__all__ = [
    "Companion",
    "Decision",
    "Index",
    "LatentAttention",
    "LatentPolicy",
    "Piece",
    "UpProjection",
    "absorb",
    "attend",
    "companion",
    "decide",
    "expand",
    "plan_pieces",
    "softmax_scale",
    "split_kv_b",
    "value_up",
    "yarn_mscale",
]
