"""The records of the contract: requests, capability rows, backends and platforms. Torch-free data."""

from . import backend, capability, kernels, place, request
from .backend import *  # noqa: F403
from .capability import *  # noqa: F403
from .kernels import *  # noqa: F403
from .place import *  # noqa: F403
from .request import *  # noqa: F403

__all__ = [*backend.__all__, *capability.__all__, *kernels.__all__, *place.__all__, *request.__all__]
