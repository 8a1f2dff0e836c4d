"""The former name of `polyattn.contract`, which packages of contract 1 import: it stays, and warns of nothing."""

from __future__ import annotations

from polyattn.contract import backend, capability, kernels, request
from polyattn.contract.backend import *  # noqa: F403
from polyattn.contract.capability import *  # noqa: F403
from polyattn.contract.kernels import *  # noqa: F403
from polyattn.contract.request import *  # noqa: F403

__all__ = [*backend.__all__, *capability.__all__, *kernels.__all__, *request.__all__]
