"""What kernels that compute gates themselves read: rates in float32, everything else in one dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.contract import UnsupportedRequestError

__all__ = ["readable_gates"]


def readable_gates(
    name: str,
    dtype: torch.dtype,
    gate: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor | None,
    *,
    biases: tuple[torch.dtype, ...],
) -> dict[str, Tensor]:
    """Return `a`, `b`, `A_log` and `dt_bias` as such kernels name them.

    Args:
        name: of the backend. dtype: that of raw gates and betas. biases: those that dt_bias may have, the first is that
            of the zeros that stand for None.

    Raises:
        UnsupportedRequestError: one of them has another dtype, in which it would be read wrongly or rounded.
    """
    if dt_bias is None:
        # [H_v], for KDA [H_v, D]
        dt_bias = gate.new_zeros(gate.shape[2:], dtype=biases[0])
    for word, tensor, allowed in (("gate", gate, (dtype,)), ("beta", beta, (dtype,)), ("dt_bias", dt_bias, biases)):
        if tensor.dtype not in allowed:
            raise UnsupportedRequestError(
                f"{word} is {tensor.dtype}; the kernels of {name} read raw gates with {word} in "
                f"{' or '.join(str(one) for one in allowed)}: cast it, or give computed gates to another backend"
            )
    return {"a": gate.contiguous(), "b": beta.contiguous(), "A_log": a_log.float(), "dt_bias": dt_bias.contiguous()}
