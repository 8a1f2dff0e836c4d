"""`polyattn generate` makes images and videos with pipelines of diffusers. All that can be wrong with the words is said
before a weight is read."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from ..errors import ConfigError, PolyattnError, did_you_mean
from ..registry.manager import get_manager
from ..selection import overrides
from ..selection.config import backend_names, check_settings
from .devices import device_of, to_device
from .options import Option, settings_of
from .rendering import facts, grid, progress, screen, show_json

if TYPE_CHECKING:
    import torch

    from ..integrations.diffusers.components import Wanted
    from ..integrations.diffusers.folders import Folder
    from ..integrations.diffusers.reports import PipelineReport
    from ..integrations.diffusers.saving import Target

__all__ = ["OWN", "draw", "is_pipeline"]

INDEX = "model_index.json"
BOTH = {
    *("model_path", "prompt", "seed", "device", "as_json", "strict"),
    *("attention_backend", "component_attention_backends", "attention_backend_config"),
}
"""Flags that causal LMs and pipelines have."""
DRAWN = "Images and videos"
OWN = (
    Option("negative_prompt", str, "What the image or the video is to be unlike.", "TEXT", DRAWN),
    *(
        Option(name, kind, text, metavar, DRAWN, usual="that of the pipeline")
        for name, kind, text, metavar in (
            ("height", int, "Rows of pixels.", "PIXELS"),
            ("width", int, "Columns of pixels.", "PIXELS"),
            ("num_frames", int, "Frames of a video.", "N"),
            ("num_inference_steps", int, "Steps of denoising.", "N"),
            ("guidance_scale", float, "How strongly the prompt guides.", "G"),
            ("true_cfg_scale", float, "The same for pipelines whose guidance_scale is an input of the model.", "G"),
        )
    ),
    *(
        Option(f"{name}_degree", int, f"Processes that {what}; started by torchrun.", "N", DRAWN, usual="1")
        for name, what in (("ulysses", "share the heads"), ("ring", "send keys and values around"))
    ),
    Option("fps", int, "Frames per second of the file.", "N", DRAWN, usual="that of the pipeline, or 16"),
    Option(
        "dtype",
        str,
        "The dtype of the models: bfloat16, float16 or float32.",
        "DTYPE",
        DRAWN,
        usual="bfloat16 on a GPU, float32 on the CPU",
    ),
    Option(
        "output",
        str,
        "Where it goes: .png for an image; .gif, .mp4 or a folder for PNGs for a video.",
        "PATH",
        DRAWN,
        usual="image.png or video.gif",
    ),
    Option(
        "dry_run",
        bool,
        "Say who would serve which component, layer and role, and why; no weights are read, and nothing is computed.",
        "",
        DRAWN,
    ),
)
"""Flags that only pipelines have."""
_ASIDE = ("ulysses_degree", "ring_degree", "fps", "dtype", "output", "dry_run")
OF_CALL = tuple(option.name for option in OWN if option.name not in _ASIDE)
"""Flags that are arguments of a pipeline's call."""
USUAL_RATE = 16
"""Frames per second where the pipeline says none."""
DTYPES = ("bfloat16", "float16", "float32")
WHO = "the command line"


def is_pipeline(path: Path, context: typer.Context) -> bool:
    """Tell whether a folder holds a pipeline, and not a causal LM.

    Raises:
        ConfigError: a flag is given that belongs to the other kind.
    """
    found = (path / INDEX).is_file()
    drawn = {option.name for option in OWN}
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        given = source is not None and source.name == "COMMANDLINE"
        if given and name not in BOTH and (name in drawn) != found:
            flag, holds = parameter.opts[0], "a pipeline of diffusers" if found else "a causal LM, not a pipeline"
            raise ConfigError(
                f"{flag} is a flag of {'causal LMs' if found else 'pipelines'}, and {path} holds {holds} "
                f"({INDEX} is {'' if found else 'not '}there); leave {flag} out"
            )
    return found


@dataclasses.dataclass(frozen=True)
class _Job:
    """What a pipeline is asked for, checked.

    Attributes:
        folder: of the pipeline. wanted: backends. call: arguments of its call. target: where the result goes.
        fps: of a video. dtype, device: of the models. seed: of the noise. notes: what a reader should know.
        degrees: (ulysses, ring), processes of the job.
    """

    folder: Folder
    wanted: Wanted
    call: Mapping[str, Any]
    target: Target
    fps: int
    dtype: torch.dtype
    device: str
    seed: int
    notes: tuple[str, ...]
    degrees: tuple[int, int] = (1, 1)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the call. The noise is drawn on the CPU, so that it is the same for each device."""
        import torch

        return {**self.call, "generator": torch.Generator().manual_seed(self.seed)}


def draw(path: Path, prompts: list[str], seed: int, device: str, given: Mapping[str, Any], *, as_json: bool) -> None:
    """Make an image or a video, or say who would serve it.

    Args:
        path: of the pipeline. prompts: one. seed: of the noise. device: as `--device`. given: values of shared flags.

    Raises:
        ConfigError: what is asked for cannot be. BackendUnavailableError: diffusers is missing or too old.
    """
    job = _job(path, prompts, seed, device, given)
    if given["dry_run"]:
        _plan(job, as_json=as_json)
    elif job.degrees == (1, 1):
        _run(job, as_json=as_json)
    else:
        from ..integrations.diffusers.parallel import started

        with started(job.degrees[0] * job.degrees[1]) as rank:
            _run(job, as_json=as_json, rank=rank)


def _job(path: Path, prompts: list[str], seed: int, device: str, given: Mapping[str, Any]) -> _Job:
    from ..integrations.diffusers.folders import read_folder
    from ..integrations.diffusers.saving import target_of

    folder = read_folder(path)
    wanted, notes = _wanted(folder, given)
    takes = folder.takes()
    call = _call(folder, takes, prompts, given)
    video = "num_frames" in takes
    output = given["output"] or ("video.gif" if video else "image.png")
    target = target_of(output, video=video)
    fps = given["fps"]
    if fps is not None and not (video and 1 <= fps <= 120):
        raise ConfigError(f"--fps {fps}: " + ("give 1 to 120" if video else f"{folder.pipeline} makes an image"))
    if "frame_rate" in takes:
        fps = fps or round(takes["frame_rate"].default or USUAL_RATE)
        call["frame_rate"] = fps
    ulysses, ring = (1 if given[f"{name}_degree"] is None else given[f"{name}_degree"] for name in ("ulysses", "ring"))
    for name, degree in (("ulysses", ulysses), ("ring", ring)):
        if degree < 1:
            raise ConfigError(f"--{name}-degree {degree}: give 1 or more")
    degrees = ulysses, ring
    if degrees != (1, 1) and given["dry_run"]:
        notes = (*notes, "the processes are not part of a dry run; polyattn parallel-plan predicts what they cost")
    dtype = _dtype(given["dtype"], device)
    return _Job(folder, wanted, call, target, fps or USUAL_RATE, dtype, device, seed, notes, degrees)


def _wanted(folder: Folder, given: Mapping[str, Any]) -> tuple[Wanted, tuple[str, ...]]:
    """Read the flags of backends, set those that are settings, and see that all of it is there."""
    from ..integrations.diffusers import components

    settings = settings_of(given)
    default, config = settings.pop("attention_backend"), settings.pop("attention_backend_config")
    known = tuple(folder.components)
    # Names first: with a wrong one nothing is imported.
    pairs = overrides.configure_by(WHO, settings).component_attention_backends
    components.check_names(known, pairs)
    ours = default is None or components.is_ours(default, "--attention-backend")
    overrides.configure_by(WHO, {**settings, "attention_backend": default if ours else None})
    wanted = components.read_wanted(known, pairs, config, WHO)
    wanted = dataclasses.replace(wanted, native=None if ours else default)
    components.check_backends(wanted)
    overrides.add_options(WHO, wanted.options)
    asked = dataclasses.replace(overrides.current_settings(), component_attention_backends={})
    if problems := check_settings(asked, backend_names(get_manager().backends.values())):
        raise ConfigError("\n".join(problems))
    named = {default, *(name for rules in wanted.rules.values() for name in rules.backends())} - {None}
    return wanted, tuple(
        f"{name}: polyattn and diffusers both have a backend of this name; polyattn's is taken"
        for name in components.known_to_both(sorted(named))
    )


def _call(
    folder: Folder, takes: Mapping[str, inspect.Parameter], prompts: list[str], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Make the arguments of a pipeline's call."""
    call = {name: given[name] for name in OF_CALL if given[name] is not None}
    if len(prompts) > 1 or (not prompts and "prompt" in takes):
        raise ConfigError(
            f"{len(prompts)} prompts are given, and a pipeline makes one image or video: give --prompt TEXT once"
        )
    call.update(prompt=prompts[0]) if prompts else None
    for name, value in call.items():
        if name not in takes:
            has = ", ".join(f"--{known.replace('_', '-')}" for known in ("prompt", *OF_CALL) if known in takes)
            raise ConfigError(
                f"--{name.replace('_', '-')}: {folder.pipeline} has no {name}.{did_you_mean(name, takes)} Of these "
                f"flags it takes {has or 'none'}"
            )
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} is too small: give 1 or more")
    needed = [name for name, one in takes.items() if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if lacking := [name for name in needed if name not in call]:
        raise ConfigError(
            f"{folder.pipeline} needs {lacking[0]}, which this command cannot give; use the pipeline from Python, with "
            "polyattn.integrations.diffusers.prepare(pipe)"
        )
    scale = "true_cfg_scale" if "true_cfg_scale" in takes else "guidance_scale"
    if "negative_prompt" in call and scale in takes and (call.get(scale, takes[scale].default) or 0) <= 1:
        raise ConfigError(
            f"--negative-prompt has no effect while {scale} is {call.get(scale, takes[scale].default)}; give "
            f"--{scale.replace('_', '-')} more than 1, or leave --negative-prompt out"
        )
    if "output_type" in takes:
        call["output_type"] = "pil"
    return call


def _dtype(word: str | None, device: str) -> torch.dtype:
    import torch

    if word is not None and word not in DTYPES:
        raise ConfigError(f"--dtype {word!r} is not one of {', '.join(DTYPES)}.{did_you_mean(word, DTYPES)}")
    if word is None:
        word = "float32" if device_of(device) == "cpu" else "bfloat16"
    found: torch.dtype = getattr(torch, word)
    return found


class _Steps:
    """Steps are what pipelines call as their progress bar. They are shown, counted and timed.

    Attributes:
        done: steps until now. seconds: in loops of steps.
    """

    def __init__(self, bar: Any, wait: Callable[[], None]) -> None:
        self.done, self.seconds = 0, 0.0
        self._bar, self._wait = bar, wait
        self._iterable: Any = ()

    def __call__(self, iterable: Any = None, total: int | None = None) -> _Steps:
        self._iterable = iterable
        self._task = self._bar.add_task("steps", total=total if iterable is None else len(iterable))
        return self

    def __enter__(self) -> _Steps:  # noqa: PYI034 - Self is not in Python 3.10
        self._wait()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._wait()
        self.seconds += time.perf_counter() - self._start

    def __iter__(self) -> Iterator[Any]:
        with self:
            for one in self._iterable:
                yield one
                self.update()

    def update(self, count: int = 1) -> None:
        self.done += count
        self._bar.update(self._task, advance=count)


def _quiet() -> None:
    """Leave out the bars that libraries show while they load."""
    import diffusers.utils.logging
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _run(job: _Job, *, as_json: bool, rank: int = 0) -> None:
    import torch

    from ..integrations.diffusers.components import apply
    from ..integrations.diffusers.parallel import spread
    from ..integrations.diffusers.reports import told

    _quiet()
    console = screen()
    pipe = to_device(job.folder.load(job.dtype), job.device)
    waits = pipe.device.type != "cpu" and torch.accelerator.is_available()
    start = time.perf_counter()
    with progress(console, quiet=as_json or rank > 0) as bar:
        steps = pipe.progress_bar = _Steps(bar, torch.accelerator.synchronize if waits else lambda: None)
        prepared = apply(pipe, job.wanted)
        if job.degrees != (1, 1):
            spread({part.name: pipe.components[part.name] for part in prepared.parts}, *job.degrees)
        try:
            found = pipe(**job.arguments())
        except PolyattnError:
            raise
        except ValueError as exc:  # what pipelines raise for arguments that they cannot take
            raise ConfigError(f"{job.folder.pipeline} refuses its arguments: {exc}") from exc
        except torch.OutOfMemoryError as exc:
            raise ConfigError(
                f"{job.folder.pipeline} needs more memory than {pipe.device} has: {exc}; make it smaller (--height, "
                "--width, --num-frames) or give --dtype bfloat16"
            ) from exc
    seconds = time.perf_counter() - start
    frames = found.frames[0] if hasattr(found, "frames") else getattr(found, "images", [])[:1]
    if len(frames) == 0:
        raise ConfigError(
            f"{job.folder.pipeline} made neither an image nor a video ({type(found).__name__}); use it from Python"
        )
    overrides.check_components()
    if rank:  # all processes have the same frames
        return
    job.target.save(frames, job.fps)
    silent = ("its sound is not written",) if getattr(found, "audio", None) is not None else ()
    width, height = frames[0].size
    data = {
        "pipeline": job.folder.pipeline,
        "output": str(job.target.path),
        "width": width,
        "height": height,
        "frames": len(frames),
        "seed": job.seed,
        "seconds": round(seconds, 3),
        "processes": job.degrees[0] * job.degrees[1],
        "steps": steps.done,
        "seconds_per_step": round(steps.seconds / steps.done, 4) if steps.done else None,
        "notes": [*job.notes, *silent],
    }
    _show(data, told(prepared), as_json=as_json)


def _plan(job: _Job, *, as_json: bool) -> None:
    import torch

    from ..integrations.diffusers.what_if import what_if

    _quiet()
    device = str(to_device(torch.empty(0), job.device).device)
    with progress(screen(), quiet=as_json) as bar:
        steps = _Steps(bar, lambda: None)
        report, assumed = what_if(
            job.folder, job.wanted, job.arguments(), dtype=job.dtype, device=device, progress=steps
        )
    dtype = str(job.dtype).removeprefix("torch.")
    data = {
        "pipeline": job.folder.pipeline,
        "device": device,
        "dtype": dtype,
        "steps": steps.done,
        "notes": [*job.notes, *assumed],
    }
    _show(data, report, as_json=as_json)


def _show(data: dict[str, Any], told: PipelineReport, *, as_json: bool) -> None:
    if as_json:
        show_json({**data, **told.to_dict()})
        return
    console = screen()
    notes = data.pop("notes")
    console.print(facts((name.replace("_", " "), str(value)) for name, value in data.items() if value is not None))
    table = grid("!component", "attention", ratios=(1, 3))
    for one in told.components:
        table.add_row(Text(one.name, style="name"), f"{one.kind}: {one.why}")
    console.print(table)
    if told.rows:
        table = grid("!component", "!role", "layers", "!calls", "served by", "why", ratios=(3, 1, 2, 1, 4, 5))
        for row in told.rows:
            density = "" if row.density is None else f", density {row.density:.3g}"
            who = f"{row.method}{density}; {row.backend}" if row.method else row.backend
            by = f"{row.source}: {row.why}" if row.source else row.why
            table.add_row(Text(row.component, style="name"), row.role, row.where, str(row.calls), who, by)
        console.print(table)
    for note in notes:
        console.print(Text(f"note: {note}", style="quiet"))
