"""The plugin contract: seven hooks, in the order they are called, and nothing else.

A plugin is a module named by an entry point of the group ``polyattn.backends``::

    [project.entry-points."polyattn.backends"]
    acme = "polyattn_acme.plugin"

Its hooks are functions marked with ``polyattn.contract.hookimpl``. Every hook takes exactly the arguments shown here (a
partial signature is rejected), imports neither torch nor a vendor SDK at module level, and touches no device. The host
asks one plugin at a time, by name: pluggy's call order never picks a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from .backend import BackendInfo, PlatformInfo
from .capability import Verdict
from .kernels import DeviceOpsInfo, Kernel
from .protocols import API_VERSION, Bound
from .request import AttentionRequest

__all__ = ["API_VERSION", "ENTRY_POINT_GROUP", "PROJECT", "PolyattnSpecs", "hookimpl", "hookspec"]

PROJECT = "polyattn"
ENTRY_POINT_GROUP = "polyattn.backends"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class PolyattnSpecs:
    """The hook specs. All are optional; a plugin that registers no backend is reported as empty."""

    @hookspec
    def polyattn_register_platforms(self) -> Iterable[PlatformInfo]:
        """Announce device kinds the core does not know.

        Called once per process, when backends are first needed. Return records only. `PlatformInfo.detect` names
        a function that recognises the device without initialising it; it is imported when the platform is probed.

        Example:
            >>> @hookimpl
            ... def polyattn_register_platforms():
            ...     return [PlatformInfo("acme", device_type="acme", detect="polyattn_acme.detect:devices")]
        """
        return ()

    @hookspec
    def polyattn_register_backends(self) -> Iterable[BackendInfo]:
        """Announce the backends of this plugin.

        Called once per process, right after the platforms. Return records only; `Provider.target` is imported at
        the first selected call. (name, platform) must be unique across plugins.

        Example:
            >>> @hookimpl
            ... def polyattn_register_backends():
            ...     rows = (row(family="dense", dtype=("float32",), head_dim=Range(8, 256), causal=True),)
            ...     yield BackendInfo("acme", "cpu", (Provider("acme", rows, target="polyattn_acme.kernel:Acme"),),
            ...                       summary="Acme's CPU kernel")
        """
        return ()

    @hookspec
    def polyattn_register_measurements(self) -> Iterable[str]:
        """Announce which backends were fastest on the vendor's devices: files of the package that `polyattn tune
        --export` wrote, as "package:path".

        Called once per process, right after the backends. Files are read when the first request is to be decided. They
        hold on devices with the name and architecture of their measurements, whatever the versions; what was measured
        on the machine itself goes before them. They may name backends of any plugin: those that are not here, or
        refuse a request, are passed over.

        Example:
            >>> @hookimpl
            ... def polyattn_register_measurements():
            ...     return ["polyattn_acme:measurements/acme-a1.json"]
        """
        return ()

    @hookspec
    def polyattn_register_tunables(self) -> Iterable[Kernel]:
        """Announce kernels of the package whose choices can be measured (`polyattn.tuning`).

        Called once per process, right after the measurements. Return records only. A name belongs to one plugin; what
        is stored about a kernel is read only while its plugin is here.

        Example:
            >>> @hookimpl
            ... def polyattn_register_tunables():
            ...     return [Kernel("acme.decode", key=("dtype",), choices={"block_n": (32, 64)})]
        """
        return ()

    @hookspec
    def polyattn_register_device_ops(self) -> Iterable[DeviceOpsInfo]:
        """Announce kernels for what is done on a device beside attention: serving writes rows of a cache and the tables
        of a step, methods move tokens in blocks.

        Called once per process, right after the tunables. Return records only; `DeviceOpsInfo.target` is imported
        when somebody on such a device asks. Without any, core's torch operators serve.

        Example:
            >>> @hookimpl
            ... def polyattn_register_device_ops():
            ...     return [DeviceOpsInfo("acme", "polyattn_acme.device_ops:DeviceOps")]
        """
        return ()

    @hookspec
    def polyattn_report_capability(self, backend: BackendInfo, request: AttentionRequest) -> Verdict | None:
        """Narrow what the capability rows accepted.

        Called only for this plugin's own backends, only when the rows accept, once per distinct request. Cheap, no
        side effects, no device access. Return None or `Accepted()` to agree, `Rejected(reasons)` to refuse; a
        plugin can never widen its rows here. An exception counts as a refusal with its text, and as a PluginError
        when the backend was asked for by name.
        """
        return None

    @hookspec
    def polyattn_load_forward(self, backend: BackendInfo, provider: str, request: AttentionRequest) -> Bound | None:
        """Hand over the functions that serve `request`.

        Called once per distinct request, in the process and thread of the first such call; from here on imports of
        torch and of the vendor library are welcome. `provider` is the name of the provider that was chosen. Return
        None to let the host import `Provider.target`, construct it with no arguments and call its
        `bind(request) -> Bound` (the usual case: a plugin then needs no hook here at all).
        """
        return None
