"""What a backend declares and hands over: everything that a plugin's records and hooks need, in one import.

- `request.py`: what a call asks for; `place.py`: where in a model it is. `capability.py`: rows, what a kernel takes.
  `backend.py`: backends, their providers, aliases, rules, options. `kernels.py`: kernels whose choices can be measured,
  and device ops (`device_ops.py`).
- `protocols.py`: the functions that serve a call, one protocol per family. `hookspecs.py`: the hooks of a plugin.

Importing this package imports no torch. The errors that a plugin may raise are here too.
"""

from .. import errors
from ..errors import *  # noqa: F403
from . import backend, capability, device_ops, hookspecs, keeps, kernels, place, protocols, request
from .backend import *  # noqa: F403
from .capability import *  # noqa: F403
from .device_ops import *  # noqa: F403
from .hookspecs import *  # noqa: F403
from .keeps import *  # noqa: F403
from .kernels import *  # noqa: F403
from .place import *  # noqa: F403
from .protocols import *  # noqa: F403
from .request import *  # noqa: F403

__all__ = [
    *backend.__all__,
    *capability.__all__,
    *device_ops.__all__,
    *(name for name in errors.__all__ if name.endswith("Error")),
    *(name for name in hookspecs.__all__ if name != "API_VERSION"),
    *keeps.__all__,
    *kernels.__all__,
    *place.__all__,
    *protocols.__all__,
    *request.__all__,
]
