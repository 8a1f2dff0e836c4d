"""This module says who would serve a pipeline that is not run.

The pipeline's own code runs: it counts the prompt, makes the steps and calls its models. The models are built from
their configurations without weights, their tensors have shapes and no numbers (torch's fake tensors), and they answer
zeros.
So every call of attention comes with its shape, layer, role, step and branch, of families that nobody knows too.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only

from ...errors import ConfigError, PolyattnError
from ...selection import overrides
from ..common.reports import Recorder
from ..transformers.layers import recording
from .components import Prepared, Wanted, apply
from .folders import Folder
from .places import HERE, Part, placed
from .reports import PipelineReport, Row, told

__all__ = ["what_if"]

ASSUMED = (
    "the weights are not read and no number is computed: models answer zeros, and where values would decide, zeros do"
)


def what_if(
    folder: Folder, wanted: Wanted, call: Mapping[str, Any], *, dtype: torch.dtype, device: str, progress: Any
) -> tuple[PipelineReport, tuple[str, ...]]:
    """Say who would serve the attention of a pipeline on this machine, and why.

    Args:
        folder: of the pipeline. wanted: as of `read_wanted`. call: arguments of its call. dtype, device: of its models.
        progress: stands for the pipeline's progress bar.

    Returns:
        The report, as of a run, and what it assumes.

    Raises:
        ConfigError: the pipeline refuses its arguments, an override reaches no layer, or a model needs numbers. What a
            run would raise of selection.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    pipe = _from_configs(mode, folder, dtype, device)
    pipe.progress_bar = progress
    prepared = apply(pipe, wanted)
    models = {name: pipe.components[name] for name in (one.name for one in prepared.components)}
    parts = {part.name: part for part in prepared.parts}
    recorders = {name: Recorder(model, compute=False) for name, model in models.items() if name not in parts}
    for name, model in models.items():
        note = _Passes(parts[name], model.forward) if name in parts else _recorded(recorders[name], model.forward)
        model.forward = _pretending(mode, note)
    if "output_type" in folder.takes():
        call = {**call, "output_type": "latent"}
    _run(folder, pipe, call)
    return _told(pipe, prepared, recorders, wanted), (ASSUMED, *_left_out(models))


def _from_configs(mode: FakeTensorMode, folder: Folder, dtype: torch.dtype, device: str) -> Any:
    """Make a pipeline whose models have no weights."""

    def part(name: str, kind: type[Any]) -> Any:
        path = folder.path / name
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with mode, torch.device(device):
                if hasattr(kind, "load_config"):
                    return kind.from_config(kind.load_config(path, local_files_only=True)).eval()
                return kind(kind.config_class.from_pretrained(path, local_files_only=True)).eval()
        except Exception as exc:  # every model has errors of its own
            raise _lost(folder, f"{name} ({kind.__name__}) cannot be built without weights", exc) from exc
        finally:
            torch.set_default_dtype(before)

    return folder.assemble(part, dtype)


def _run(folder: Folder, pipe: Any, call: Mapping[str, Any]) -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)  # what it tells with a traceback is told below in one line
    try:
        pipe(**call)
    except PolyattnError:
        raise
    except ValueError as exc:  # what pipelines raise for arguments that they cannot take
        raise ConfigError(f"{folder.pipeline} refuses its arguments: {exc}") from exc
    except Exception as exc:  # code that looks at numbers
        raise _lost(folder, "it cannot be followed without numbers", exc) from exc
    finally:
        logger.setLevel(before)


def _lost(folder: Folder, what: str, error: Exception) -> ConfigError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ConfigError(
        f"who would serve {folder.pipeline} cannot be said without running it: {what} ({reason}); run it with "
        "few steps and a small size, and read its report"
    )


Forward = Callable[..., Any]


def _pretending(mode: FakeTensorMode, forward: Forward) -> Forward:
    """Let a model compute on shapes alone. Whole numbers stay real: masks and positions decide what is computed."""

    def fake(tensor: Tensor) -> Tensor:
        return mode.from_tensor(tensor) if tensor.is_floating_point() and type(tensor) is Tensor else tensor

    def zeros(tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            args, kwargs = tree_map_only(Tensor, fake, (args, kwargs))
            return tree_map_only(FakeTensor, zeros, forward(*args, **kwargs))

    return run


def _recorded(recorder: Recorder, forward: Forward) -> Forward:
    """Record who would serve the calls of a model of transformers."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with recording(recorder):
            return forward(*args, **kwargs)

    return run


class _Passes:
    """The passes of a component. One that is like an earlier one is not made again: its calls are told again, since the
    step may decide who serves them."""

    def __init__(self, part: Part, forward: Forward) -> None:
        self._part, self._forward = part, forward
        self._known: dict[Any, tuple[list[tuple[Any, ...]], Any]] = {}
        self._calls: list[tuple[Any, ...]] = []
        part.pretend = self._attend
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        deciding = {name: value for name, value in kwargs.items() if name != "timestep"}
        alike = str([_alike(one) for one in tree_flatten((args, deciding))[0]])
        self._calls = []
        if alike not in self._known:
            output = self._forward(*args, **kwargs)
            self._known[alike] = self._calls, output
            return output
        calls, output = self._known[alike]
        for role, layer, call in calls:
            HERE.role, HERE.layer = role, layer
            HERE.backend = self._part.named(self._part.run.number(layer), role)
            placed(*call)
        HERE.role, HERE.layer, HERE.backend = "", None, None
        return output

    def _attend(self, *call: Any) -> Tensor:
        self._calls.append((HERE.role, HERE.layer, call))
        query, _, value = call[:3]
        output: Tensor = query.new_empty((*query.shape[:-1], value.shape[-1]))
        return output


def _alike(given: Any) -> Any:
    """What two passes have alike that make the same calls: of tensors with numbers all, of others the shape."""
    if not isinstance(given, Tensor):
        return given
    told = tuple(given.shape), given.dtype, given.device
    return told if isinstance(given, FakeTensor) else (*told, given.tolist())


def _told(pipe: Any, prepared: Prepared, recorders: Mapping[str, Recorder], wanted: Wanted) -> PipelineReport:
    """Make the report, and see as after a run that every override reached a layer."""
    found = told(prepared)
    rows = [row for name, recorder in recorders.items() for row in _rows(name, recorder, wanted)]
    for name, model in pipe.components.items():
        if hasattr(model, "decode"):  # it is not run here, which says nothing about overrides
            overrides.reach(("", name, ""))
    overrides.check_components()
    return dataclasses.replace(found, rows=(*rows, *found.rows))


def _rows(name: str, recorder: Recorder, wanted: Wanted) -> list[Row]:
    """Make the rows of a model of transformers. Its layers are counted as they come."""
    layers: dict[str, int] = {}
    alike: dict[tuple[str, ...], list[int]] = {}
    for one in recorder.found:
        number = layers.setdefault(one.layer, len(layers))
        chosen = one.selection
        who = wanted.source if name in wanted.rules else "use_backend"
        told_by = (chosen.id, *(text.replace("use_backend", who) for text in (chosen.source, chosen.why)))
        alike.setdefault(told_by, []).append(number)
    return [
        Row(name, tuple(sorted(set(numbers))), "self", backend, source, why, len(numbers))
        for (backend, source, why), numbers in alike.items()
    ]


def _left_out(models: Mapping[str, Any]) -> Iterator[str]:
    """Say which models were not run."""
    for name, model in models.items():
        if hasattr(model, "decode"):
            yield f"{name} is not run, so its calls of attention are not in the list"
