"""This module writes images and videos of a pipeline to files. What a file can be is asked before anything is made."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError, did_you_mean

__all__ = ["Target", "target_of"]

IMAGE, VIDEO = (".png",), (".mp4", ".gif")
ENCODER = ("imageio", "imageio_ffmpeg")
DIGITS = 5


@dataclasses.dataclass(frozen=True)
class Target:
    """A target is the file that an image or a video goes to, or the folder for the frames of a video.

    Attributes:
        path: of it. suffix: ".png", ".gif" or ".mp4"; "" = a folder with a PNG for each frame.
    """

    path: Path
    suffix: str

    def save(self, frames: Sequence[Any], fps: int) -> None:
        """Write frames.

        Args:
            frames: PIL images, one for an image. fps: frames per second of a video.

        Raises:
            ConfigError: the disk does not take them.
        """
        utils: Any = importlib.import_module("diffusers.utils")
        try:
            if self.suffix == ".gif":
                utils.export_to_gif(list(frames), os.fspath(self.path), fps)
            elif self.suffix == ".mp4":
                # Sizes that an encoder has no blocks for would be scaled: 2 is what the colours of a video need.
                utils.export_to_video(list(frames), os.fspath(self.path), fps, macro_block_size=2)
            elif self.suffix:
                frames[0].save(self.path)
            else:
                self.path.mkdir(exist_ok=True)
                for number, frame in enumerate(frames):
                    frame.save(self.path / f"{number:0{DIGITS}}.png")
        except OSError as exc:
            raise ConfigError(f"{self.path} cannot be written: {exc}; give another output") from exc


def target_of(output: str, *, video: bool) -> Target:
    """See where an image or a video can be written; nothing is.

    Args:
        output: a file by its suffix, or, for a video, a folder without one or with a slash at its end.

    Raises:
        ConfigError: the suffix, the folder around it or what is there already does not fit; the encoder is missing.
    """
    path, allowed = Path(output), VIDEO if video else IMAGE
    folder = output.endswith(("/", os.sep)) or not path.suffix
    forms = "a file .mp4 or .gif, or a folder for PNGs" if video else "a file .png"
    if not output or (folder and not video) or (not folder and path.suffix.lower() not in allowed):
        near = did_you_mean(path.suffix.lower(), allowed)
        raise ConfigError(f"output {output!r} is no form of {'a video' if video else 'an image'}.{near} Give {forms}")
    if not path.parent.is_dir():
        raise ConfigError(f"output {output!r}: {path.parent} is not a folder; make it first")
    if folder and path.exists() and not path.is_dir():
        raise ConfigError(f"output {output!r} is a file, and a folder is to hold the frames; give another name")
    if folder and path.is_dir() and any(path.iterdir()):
        raise ConfigError(
            f"output {output!r} is a folder with files in it, which frames would mix with; give a new one"
        )
    if not folder and path.is_dir():
        raise ConfigError(f"output {output!r} is a folder; give {forms}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"output {output!r} cannot be written: you may not write there; give another output")
    suffix = "" if folder else path.suffix.lower()
    if suffix == ".mp4" and (lacking := [name for name in ENCODER if importlib.util.find_spec(name) is None]):
        packages = " ".join(name.replace("_", "-") for name in ENCODER)
        raise ConfigError(
            f"output {output!r}: {lacking[0]} is not installed, which writes .mp4; pip install 'polyattn[video]', or "
            f"{packages}; a .gif or a folder of PNGs needs nothing more"
        )
    return Target(path, suffix)
