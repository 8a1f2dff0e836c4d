"""This module reads pipelines of diffusers from folders: first the names in model_index.json, later the weights."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import ConfigError, did_you_mean
from ...user_files import MEGABYTE, read_text
from ..common.hosts import host_package

__all__ = ["INDEX", "Folder", "read_folder"]

INDEX = "model_index.json"


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder holds a pipeline, as `save_pretrained` writes it.

    Attributes:
        path: of the folder. pipeline: name of the pipeline's class. components: name -> (library, class), of those that
            are there. absent: names of those that the pipeline was saved without.
    """

    path: Path
    pipeline: str
    components: Mapping[str, tuple[str, str]]
    absent: tuple[str, ...] = ()

    def kind(self) -> type[Any]:
        """Return the class of the pipeline.

        Raises:
            ConfigError: the installed diffusers has none. BackendUnavailableError: diffusers is missing or too old.
        """
        diffusers = host_package("diffusers")
        kind = getattr(diffusers, self.pipeline, None)
        if not (isinstance(kind, type) and issubclass(kind, diffusers.DiffusionPipeline)):
            near = did_you_mean(self.pipeline, [name for name in dir(diffusers) if name.endswith("Pipeline")])
            raise ConfigError(
                f"{self.path / INDEX} names the pipeline {self.pipeline!r}, which diffusers {diffusers.__version__} "
                f"does not have.{near} Install the version of diffusers that the pipeline was made for"
            )
        return kind

    def takes(self) -> dict[str, inspect.Parameter]:
        """Return what a run of the pipeline takes, by name. Errors as `kind`."""
        known = inspect.signature(self.kind().__call__).parameters
        return {name: known[name] for name in known if name != "self"}

    def models(self) -> Iterator[tuple[str, type[Any]]]:
        """Yield the components that are models, each with its class.

        Raises:
            ConfigError: a class is not there.
        """
        utils: Any = importlib.import_module("diffusers.pipelines.pipeline_loading_utils")
        for name, (library, word) in self.components.items():
            try:
                kind = utils.simple_get_class_obj(library, word)
            except (AttributeError, ImportError, ValueError) as exc:
                raise ConfigError(
                    f"{self.path / INDEX} names {library}.{word} for {name}, which is not installed ({exc}); install "
                    "the versions of diffusers and transformers that the pipeline was made for"
                ) from exc
            if isinstance(kind, type) and issubclass(kind, torch.nn.Module):
                yield name, kind

    def assemble(self, part: Callable[[str, type[Any]], Any], dtype: torch.dtype) -> Any:
        """Make the pipeline. Nothing is downloaded.

        Args:
            part: makes a model from its name and class. dtype: of the rest.

        Raises:
            ConfigError: what is in the folder cannot be read.
        """
        parts = {name: part(name, kind) for name, kind in self.models()}
        with _telling(self.path, self.pipeline):
            return self.kind().from_pretrained(
                self.path, dtype=dtype, local_files_only=True, **parts, **dict.fromkeys(self.absent)
            )

    def load(self, dtype: torch.dtype) -> Any:
        """Load the pipeline with its weights, on the CPU. dtype: of the models.

        Raises:
            ConfigError: what is in the folder cannot be read, or weights are missing.
        """

        def part(name: str, kind: type[Any]) -> Any:
            with _telling(self.path / name, kind.__name__):
                model, loaded = kind.from_pretrained(
                    self.path / name, dtype=dtype, local_files_only=True, output_loading_info=True
                )
            if missing := sorted(loaded["missing_keys"]):
                raise ConfigError(
                    f"{self.path / name} lacks {len(missing)} of the model's weights, {missing[0]} among them, which "
                    "would be random numbers; save the pipeline again with save_pretrained"
                )
            return model

        return self.assemble(part, dtype)


@contextlib.contextmanager
def _telling(path: Path, kind: str) -> Iterator[None]:
    """Turn what a library raises while it reads a folder into an error that names the folder."""
    try:
        yield
    except Exception as exc:  # every format of weights has errors of its own
        reason = str(exc).strip() or type(exc).__name__
        raise ConfigError(
            f"{path} cannot be loaded as {kind}: {reason}; save the pipeline again with save_pretrained"
        ) from exc


def read_folder(path: Path) -> Folder:
    """Read which components a pipeline has; nothing is loaded.

    Args:
        path: the folder.

    Raises:
        ConfigError: it is no folder of a pipeline, or one with code of its own.
    """
    index = path / INDEX
    try:
        given = json.loads(read_text(index, MEGABYTE))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{index}: {exc}; give a folder of a pipeline that save_pretrained wrote") from exc
    pipeline = given.get("_class_name") if isinstance(given, dict) else None
    if not isinstance(pipeline, str):
        own = f"names code of its own, {pipeline!r}" if pipeline else "names no pipeline"
        raise ConfigError(f"{index} {own}; give a pipeline whose _class_name is a class of diffusers")
    pairs = {
        name: tuple(value)
        for name, value in given.items()
        if not name.startswith("_") and isinstance(value, list) and len(value) == 2
    }
    found = {name: value for name, value in pairs.items() if all(isinstance(word, str) for word in value)}
    return Folder(path, pipeline, found, tuple(name for name in pairs if name not in found))
