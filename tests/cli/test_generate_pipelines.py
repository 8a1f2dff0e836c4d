"""`polyattn generate` with small random pipelines of diffusers in a folder."""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel

from polyattn.errors import ConfigError
from polyattn.integrations.diffusers import components, saving, uninstall
from polyattn.integrations.diffusers.folders import Folder

from .conftest import Result, Run

diffusers = pytest.importorskip("diffusers")
sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
import tiny_pipelines as tiny  # noqa: E402

SIZES = {
    "wan": ("--height", "32", "--width", "32", "--num-frames", "9", "--num-inference-steps", "3"),
    "wan22": ("--height", "32", "--width", "32", "--num-frames", "9", "--num-inference-steps", "16"),
    "cogvideox": ("--height", "32", "--width", "32", "--num-frames", "9", "--num-inference-steps", "2"),
    "flux": ("--height", "16", "--width", "16", "--num-inference-steps", "2"),
}


def build(name: str) -> Any:
    pipe = tiny.tiny(name)
    if name == "flux":  # it reads a prompt twice
        torch.manual_seed(0)
        clip = CLIPTextModel(tiny._clip().config)
        parts = {**pipe.components, "text_encoder": clip, "tokenizer": tiny._tokenizer()}
        pipe = diffusers.FluxPipeline(**parts)
    if name == "cogvideox":  # the pipeline pads its prompts to 226 words
        config = {**pipe.transformer.config, "max_text_seq_length": 226}
        pipe.register_modules(transformer=diffusers.CogVideoXTransformer3DModel.from_config(config))
    return pipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            build(name).save_pretrained(made[name])
        return made[name]

    return get


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    uninstall()


@pytest.fixture
def draw(run: Run, folder: Callable[[str], Path]) -> Callable[..., Result]:
    def call(name: str, *words: str) -> Result:
        return run("generate", "--model-path", str(folder(name)), "--prompt", "a cat", *SIZES[name], *words, "--json")

    return call


def by_hand(path: Path, name: str) -> list[Any]:
    pipe = diffusers.DiffusionPipeline.from_pretrained(path)
    pipe.set_progress_bar_config(disable=True)
    words = SIZES[name]
    sizes = {flag.removeprefix("--").replace("-", "_"): int(n) for flag, n in zip(words[::2], words[1::2], strict=True)}
    out = pipe("a cat", **sizes, generator=torch.Generator().manual_seed(3), output_type="pil")
    return list(out.frames[0] if hasattr(out, "frames") else out.images)


def rows(done: Result, component: str) -> list[tuple[Any, ...]]:
    assert done.code == 0, done.out
    found = [row for row in done.data["rows"] if row["component"] == component]
    return [(row["role"], tuple(row["layers"]), row["backend"].partition("@")[0], row["calls"]) for row in found]


# --------------------------------------------------------------------------------------------------- what comes out


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_frames_are_those_of_the_pipeline(draw: Any, folder: Any, tmp_path: Path, name: str) -> None:
    out = tmp_path / "frames"
    done = draw(
        name, "--seed", "3", "--output", f"{out}/", "--component-attention-backends", "transformer=torch_native"
    )
    assert done.code == 0, done.out
    wanted = by_hand(folder(name), name)
    files = sorted(out.iterdir())
    assert [file.name for file in files] == [f"{n:05}.png" for n in range(len(wanted))]
    for file, frame in zip(files, wanted, strict=True):
        # Another exact kernel: a value may round to the neighbouring one.
        assert np.abs(np.asarray(Image.open(file), int) - np.asarray(frame, int)).max() <= 1
    assert {key: done.data[key] for key in ("pipeline", "output", "width", "height", "frames", "seed", "steps")} == {
        "pipeline": type(build(name)).__name__,
        "output": str(out),
        "width": 32,
        "height": 32,
        "frames": len(wanted),
        "seed": 3,
        "steps": int(SIZES[name][-1]),
    }
    assert 0 < done.data["seconds_per_step"] < done.data["seconds"]
    assert {row[2] for row in rows(done, "transformer")} == {"torch_native"}
    other = draw(name, "--seed", "4", "--output", f"{tmp_path / 'other'}/")
    assert other.code == 0
    assert (tmp_path / "other" / files[0].name).read_bytes() != files[0].read_bytes()


def test_an_image_is_that_of_the_pipeline(draw: Any, folder: Any, tmp_path: Path) -> None:
    done = draw("flux", "--seed", "3", "--output", str(tmp_path / "cat.png"))
    (wanted,) = by_hand(folder("flux"), "flux")
    assert done.code == 0, done.out
    made = np.asarray(Image.open(tmp_path / "cat.png"), int)
    assert np.abs(made - np.asarray(wanted, int)).max() <= 1
    kinds = {one["name"]: one["served"] for one in done.data["components"]}
    assert kinds == {"vae": True, "text_encoder": True, "text_encoder_2": True, "transformer": True}


def test_a_gif_has_the_frames_and_their_rate(draw: Any, tmp_path: Path) -> None:
    done = draw("wan", "--output", str(tmp_path / "cat.gif"), "--fps", "20")
    assert done.code == 0, done.out
    with Image.open(tmp_path / "cat.gif") as made:
        assert (made.n_frames, made.size, made.info["duration"]) == (9, (32, 32), 50)  # type: ignore[attr-defined]


def test_an_mp4_has_the_frames_and_their_rate(draw: Any, tmp_path: Path) -> None:
    reader = pytest.importorskip("imageio_ffmpeg")
    done = draw("wan", "--output", str(tmp_path / "cat.mp4"), "--fps", "8")
    assert done.code == 0, done.out
    frames, seconds = reader.count_frames_and_secs(str(tmp_path / "cat.mp4"))
    assert (frames, seconds) == (9, pytest.approx(9 / 8, abs=0.02))


def test_an_mp4_without_an_encoder_says_what_to_install(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving.importlib.util, "find_spec", lambda name: None if name == "imageio_ffmpeg" else object())
    monkeypatch.setattr(Folder, "load", never)
    done = draw("wan", "--output", "cat.mp4")
    assert done.code == 2
    assert "imageio_ffmpeg is not installed, which writes .mp4; pip install 'polyattn[video]'" in message(done)


def test_the_screen_says_who_served_what(run: Run, folder: Any, tmp_path: Path) -> None:
    words = ("--prompt", "a cat", *SIZES["flux"], "--output", str(tmp_path / "cat.png"))
    done = run("generate", "--model-path", str(folder("flux")), *words)
    assert done.code == 0, done.err
    assert re.search(r"seconds per step +0\.", done.out)
    assert re.search(r"transformer +self +layers 0-3 +8 +torch_sdpa@cpu", done.out)


def test_a_name_in_the_cache_is_a_pipeline_too(run: Run, folder: Any, tmp_path: Path, monkeypatch: Any) -> None:
    home = tmp_path / "models--me--tiny"
    shutil.copytree(folder("flux"), home / "snapshots" / "abc")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    words = ("--prompt", "a cat", *SIZES["flux"], "--dry-run", "--json")
    done = run("generate", "--model-path", "me/tiny", *words)
    assert (done.code, done.data.get("pipeline")) == (0, "FluxPipeline"), done.out


# ------------------------------------------------------------------------------------------- who is to serve, by flags


def test_rules_come_in_the_config_beside_options(draw: Any, tmp_path: Path) -> None:
    rules = {"steps": {"0": "reference"}, "layers": {"-1": "torch_native"}, "roles": {"cross": "torch_sdpa"}}
    config = {"transformer": rules}
    done = draw("wan", "--attention-backend-config", json.dumps(config), "--output", str(tmp_path / "a.gif"))
    assert sorted(rows(done, "transformer")) == [
        ("cross", (0, 1), "torch_sdpa", 8),
        ("cross", (0, 1, 2), "reference", 6),
        ("cross", (2,), "torch_native", 4),
        ("self", (0, 1), "torch_sdpa", 8),
        ("self", (0, 1, 2), "reference", 6),
        ("self", (2,), "torch_native", 4),
    ]


def test_a_method_serves_and_leaves_by_its_own_rules(draw: Any, tmp_path: Path) -> None:
    words = ("--attention-backend", "video_sparse_attn", "--attention-backend-config", "sparsity=0.5,coarse=off")
    done = draw("wan", *words, "--output", str(tmp_path / "a.gif"))
    served = [row for row in done.data["rows"] if row["role"] == "self" and row["component"] == "transformer"]
    assert [row["method"] for row in served] == ["video_sparse_attn"], done.out
    planned = draw("wan", *words, "--dry-run")
    assert [(row["method"], row["calls"]) for row in planned.data["rows"] if row["method"]] == [
        (row["method"], row["calls"]) for row in done.data["rows"] if row["method"]
    ]


def test_names_that_only_diffusers_knows_pass_through(draw: Any, tmp_path: Path) -> None:
    done = draw("wan", "--attention-backend", "_native_math", "--output", str(tmp_path / "a.gif"))
    assert done.code == 0, done.out
    why = {one["name"]: one["why"] for one in done.data["components"]}
    assert why["transformer"] == "diffusers' own backend '_native_math', as asked"
    assert why["text_encoder"].startswith("polyattn in transformers")
    assert done.data["rows"] == []
    done = draw("wan", "--component-attention-backends", "transformer=native", "--output", str(tmp_path / "a.gif"))
    assert done.code == 0, done.out
    assert "diffusers' own backend 'native'" in done.out


def test_a_library_that_diffusers_misses_is_an_error_of_ours(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components.dispatch(), "_CAN_USE_XFORMERS_ATTN", False)
    done = draw("wan", "--attention-backend", "xformers", "--dry-run")
    assert (done.code, done.data["error"]["type"]) == (4, "BackendUnavailableError"), done.out
    assert "Please install `xformers" in message(done)


def test_a_name_that_both_know_is_polyattns(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = components.backend_words
    monkeypatch.setattr(components, "dispatch", lambda: _Native("torch_sdpa", "native"))
    assert "torch_sdpa" in real()
    done = draw("flux", "--attention-backend", "torch_sdpa", "--dry-run")
    assert done.code == 0, done.out
    assert done.data["notes"][0].startswith(
        "torch_sdpa: polyattn and diffusers both have a backend of this name; polya"
    )


class _Native:
    """diffusers' module of backends, with these names."""

    def __init__(self, *names: str) -> None:
        self.AttentionBackendName = [type("Member", (), {"value": name}) for name in names]


def test_overrides_of_the_environment_count(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_COMPONENT_ATTENTION_BACKENDS", "transformer.cross=reference")
    done = draw("wan", "--dry-run")
    assert {row[:3] for row in rows(done, "transformer")} == {
        ("self", (0, 1, 2), "torch_sdpa"),
        ("cross", (0, 1, 2), "reference"),
    }
    monkeypatch.setenv("POLYATTN_COMPONENT_ATTENTION_BACKENDS", "transformers=reference")
    done = draw("wan", "--dry-run")
    assert (done.code, "no component 'transformers'. Did you mean 'transformer'?" in message(done)) == (2, True)


def test_an_override_that_no_step_reaches_is_an_error(draw: Any, tmp_path: Path) -> None:
    """The second transformer of Wan 2.2 makes the last steps; of one step the first makes all."""
    words = ("--num-inference-steps", "1", "--component-attention-backends", "transformer_2=reference")
    for more in (("--dry-run",), ("--output", str(tmp_path / "a.gif"))):
        done = draw("wan22", *words, *more)
        assert done.code == 2, done.out
        assert "component override transformer_2 reached no layer" in message(done)


# ------------------------------------------------------------------------------------------------------- the dry run


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", list(SIZES))
def test_a_dry_run_says_what_the_run_says(draw: Any, tmp_path: Path, name: str) -> None:
    config = {"transformer": {"steps": {"0": "reference"}, "layers": {"0": "torch_native"}}}
    words = ("--attention-backend-config", json.dumps(config))
    ran = draw(name, *words, "--output", str(tmp_path / ("a.png" if name == "flux" else "a.gif")))
    planned = draw(name, *words, "--dry-run")
    for component in ("transformer", "transformer_2"):
        assert sorted(rows(planned, component)) == sorted(rows(ran, component))
    assert {row[2] for row in rows(planned, "transformer")} == {"reference", "torch_native", "torch_sdpa"}
    encoder = "text_encoder"
    assert [row[:3] for row in rows(planned, encoder)] == [("self", (0, 1), "torch_sdpa")]
    assert planned.data["components"] == ran.data["components"]
    assert planned.data["steps"] == ran.data["steps"]


def never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("weights are read")


def test_a_dry_run_reads_no_weights(draw: Any, folder: Any, run: Run, tmp_path: Path) -> None:
    shutil.copytree(folder("wan"), tmp_path, dirs_exist_ok=True)
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    done = run("generate", "--model-path", str(tmp_path), "--prompt", "a cat", *SIZES["wan"], "--dry-run", "--json")
    assert done.code == 0, done.out
    assert rows(done, "transformer") == rows(draw("wan", "--dry-run"), "transformer")
    assert "the weights are not read" in done.data["notes"][0]
    assert done.data["notes"][1].startswith("vae is not run")


def test_a_dry_run_of_a_size_that_no_laptop_runs(run: Run, folder: Any) -> None:
    words = ("--height", "512", "--width", "512", "--num-frames", "81", "--num-inference-steps", "50")
    done = run("generate", "--model-path", str(folder("wan")), "--prompt", "a", *words, "--dry-run", "--json")
    assert rows(done, "transformer") == [
        ("self", (0, 1, 2), "torch_sdpa", 300),
        ("cross", (0, 1, 2), "torch_sdpa", 300),
    ]


def test_a_dry_run_says_why_a_backend_would_refuse(draw: Any) -> None:
    done = draw("wan", "--dry-run", "--component-attention-backends", "transformer=fa3")
    assert (done.code, done.data["error"]["type"]) == (4, "BackendUnavailableError")
    assert "fa3, asked for by argument, has no backend on cpu" in message(done)


def test_a_model_that_looks_at_numbers_cannot_be_planned(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = diffusers.WanTransformer3DModel.forward

    def looks(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        float(hidden_states.sum())
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(diffusers.WanTransformer3DModel, "forward", looks)
    done = draw("wan", "--dry-run")
    assert (done.code, done.data["error"]["type"]) == (2, "ConfigError")
    assert "who would serve WanPipeline cannot be said without running it" in message(done)


# -------------------------------------------------------------------------------------- what is wrong, before a weight


def message(done: Result) -> str:
    return str(done.data["error"]["message"])


@pytest.mark.parametrize(
    "name, words, said",
    [
        ("wan", ("--max-new-tokens", "3"), "--max-new-tokens is a flag of causal LMs, and"),
        ("wan", ("--prefill-attention-backend", "fa3"), "--prefill-attention-backend is a flag of causal LMs, and"),
        ("wan", ("--page-size", "16"), "--page-size is a flag of causal LMs, and"),
        ("wan", ("--prompt", "a dog"), "2 prompts are given, and a pipeline makes one image or video"),
        ("flux", ("--num-frames", "9"), "--num-frames: FluxPipeline has no num_frames. Of these flags it takes --pro"),
        ("flux", ("--fps", "9"), "--fps 9: FluxPipeline makes an image"),
        ("wan", ("--fps", "0"), "--fps 0: give 1 to 120"),
        ("wan", ("--true-cfg-scale", "3"), "WanPipeline has no true_cfg_scale. Of these flags it takes --prompt, "),
        ("flux", ("--negative-prompt", "dog"), "--negative-prompt has no effect while true_cfg_scale is 1.0; give --t"),
        ("wan", ("--negative-prompt", "dog", "--guidance-scale", "1"), "no effect while guidance_scale is 1.0"),
        ("wan", ("--height", "0"), "--height 0 is too small: give 1 or more"),
        ("wan", ("--dtype", "bf16"), "--dtype 'bf16' is not one of bfloat16, float16, float32"),
        ("wan", ("--component-attention-backends", "transfomer=torch_sdpa"), "Did you mean 'transformer'?"),
        ("wan", ("--component-attention-backends", "text_encoder_2=torch_sdpa"), "Did you mean 'text_encoder'?"),
        ("wan", ("--component-attention-backends", "transformer.crosss=torch_sdpa"), "Did you mean 'cross'?"),
        ("wan", ("--component-attention-backends", "transformer=torch_sdp"), "Did you mean 'torch_sdpa'?"),
        ("wan", ("--component-attention-backends", "transformer.cross=native"), "'native' is a backend of diffusers"),
        ("wan", ("--attention-backend", "_flash_3_hubb"), "Did you mean '_flash_3_hub'"),
        ("wan", ("--attention-backend", "slidng_tile_attn"), "Did you mean 'sliding_tile_attn'"),
        ("wan", ("--attention-backend", "torch_sdpa", "--attention-backend-config", "sparsity=1"), "no option"),
        ("wan", ("--attention-backend-config", '{"transformer": {"step": {"0": "fa"}}}'), "Did you mean 'steps'?"),
        ("wan", ("--attention-backend-config", '{"transfomer": {"steps": {"0": "fa"}}}'), "'transfomer' is not a back"),
        ("wan", ("--output", "cat.mp5"), "output 'cat.mp5' is no form of a video. Did you mean '.mp4'? Give"),
        ("wan", ("--output", "cat.png"), "is no form of a video"),
        ("flux", ("--output", "cat.gif"), "output 'cat.gif' is no form of an image. Give a file .png"),
        ("flux", ("--output", "cat"), "is no form of an image"),
        ("wan", ("--output", "no/such/cat.gif"), "no/such is not a folder; make it first"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_a_weight_is_read(
    draw: Any, monkeypatch: pytest.MonkeyPatch, name: str, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(Folder, "load", never)
    done = draw(name, *words)
    assert (done.code, done.data["error"]["type"]) == (2, "ConfigError"), done.out
    assert said in message(done)


def test_what_is_there_already_is_not_mixed_with(draw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Folder, "load", never)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    (tmp_path / "named.gif").mkdir()
    (tmp_path / "file").write_text("mine")
    for output, said in (
        ("full", "is a folder with files in it"),
        ("named.gif", "named.gif' is a folder; give a file"),
        ("file", "file' is a file, and a folder is to hold the frames"),
    ):
        done = draw("wan", "--output", str(tmp_path / output))
        assert (done.code, said in message(done)) == (2, True), done.out
    may = saving.os.access
    monkeypatch.setattr(saving.os, "access", lambda path, mode: path != tmp_path and may(path, mode))
    done = draw("wan", "--output", str(tmp_path / "a.gif"))
    assert "you may not write there" in message(done)


def test_a_disk_that_is_full_says_so(tmp_path: Path) -> None:
    class Frame:
        def save(self, path: Path) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(saving.ConfigError, match=r"a\.png cannot be written: .*No space left"):
        saving.Target(tmp_path / "a.png", ".png").save([Frame()], 16)


def test_flags_of_pipelines_are_none_of_causal_lms(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for words in (("--height", "32"), ("--dry-run",), ("--output", "a.png")):
        done = run("generate", "--model-path", str(tmp_path), "--prompt", "a", *words, "--json")
        assert done.code == 2
        assert f"{words[0]} is a flag of pipelines, and {tmp_path} holds a causal LM, not a pipeline" in message(done)


@pytest.mark.parametrize(
    "index, said",
    [
        ("{", "Expecting property name"),
        ("[]", "names no pipeline; give a pipeline whose _class_name is a class of diffusers"),
        ('{"_class_name": ["mine", "Mine"]}', "names code of its own"),
        ('{"_class_name": "WanPipelin"}', "Did you mean 'WanPipeline'"),
        ('{"_class_name": "WanTransformer3DModel"}', "names the pipeline 'WanTransformer3DModel', which diffusers"),
        ('{"_class_name": "WanImageToVideoPipeline"}', "needs image, which this command cannot give"),
        (
            '{"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer4D"]}',
            "diffusers.WanTransformer4D",
        ),
        ('{"_class_name": "WanPipeline", "vae": ["os", "AutoencoderKLWan"]}', "os.AutoencoderKLWan for vae"),
    ],
)
def test_a_folder_that_holds_no_pipeline(run: Run, tmp_path: Path, index: str, said: str) -> None:
    (tmp_path / "model_index.json").write_text(index)
    done = run(
        "generate", "--model-path", str(tmp_path), "--prompt", "a", "--json", "--output", str(tmp_path / "a.gif")
    )
    assert (done.code, done.data["error"]["type"]) == (2, "ConfigError"), done.out
    assert said in message(done)


def test_weights_that_are_missing_or_cut_off(run: Run, folder: Any, tmp_path: Path) -> None:
    words = ("generate", "--model-path", str(tmp_path), "--prompt", "a", *SIZES["wan"], "--json")
    output = ("--output", str(tmp_path / "a.gif"))
    for part, file in (("transformer", "diffusion_pytorch_model.safetensors"), ("text_encoder", "model.safetensors")):
        shutil.copytree(folder("wan"), tmp_path, dirs_exist_ok=True)
        weights = load_file(tmp_path / part / file)
        gone = next(name for name in weights if name.endswith("weight") and "shared" not in name)
        save_file({k: v for k, v in weights.items() if k != gone}, tmp_path / part / file, metadata={"format": "pt"})
        done = run(*words, *output)
        assert (done.code, done.data["error"]["type"]) == (2, "ConfigError"), done.out
        assert f"{part} lacks 1 of the model's weights, {gone} among them, which would be random" in message(done)
        (tmp_path / part / file).write_bytes(b"cut")
        assert "cannot be loaded as" in message(run(*words, *output))


def test_what_the_pipeline_itself_refuses(draw: Any, tmp_path: Path) -> None:
    for more in (("--dry-run",), ("--output", str(tmp_path / "a.gif"))):
        done = draw("wan", "--height", "33", *more)
        assert (done.code, done.data["error"]["type"]) == (2, "ConfigError"), done.out
        assert "WanPipeline refuses its arguments: `height` and `width` have to be divisible by 16" in message(done)


@pytest.mark.parametrize(
    "raised, said",
    [
        (
            torch.OutOfMemoryError("tried 9 GiB"),
            "WanPipeline needs more memory than cpu has: tried 9 GiB; make it smaller",
        ),
        (ValueError("odd words"), "WanPipeline refuses its arguments: odd words"),
    ],
)
def test_what_a_run_may_end_with(
    draw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, said: str
) -> None:
    def fails(self: Any, prompt: Any = None, num_frames: int = 1, **others: Any) -> Any:
        raise raised

    monkeypatch.setattr(diffusers.WanTransformer3DModel, "forward", fails)
    done = draw("wan", "--output", str(tmp_path / "a.gif"))
    assert (done.code, done.data["error"]["type"]) == (2, "ConfigError"), done.out
    assert said in message(done)


def test_what_is_no_image_and_what_is_not_written(draw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = diffusers.FluxPipeline.__call__

    def sings(self: Any, *args: Any, **given: Any) -> Any:
        found = real(self, *args, **given)
        found.audio = torch.zeros(1)
        return found

    monkeypatch.setattr(diffusers.FluxPipeline, "__call__", functools.wraps(real)(sings))
    done = draw("flux", "--output", str(tmp_path / "a.png"))
    assert (done.code, done.data["notes"]) == (0, ["its sound is not written"]), done.out
    monkeypatch.setattr(diffusers.FluxPipeline, "__call__", functools.wraps(real)(lambda self, **given: object()))
    done = draw("flux", "--output", str(tmp_path / "a.png"))
    assert (done.code, "FluxPipeline made neither an image nor a video (object)" in message(done)) == (2, True)


def test_a_decoder_may_have_an_override_that_only_a_run_reaches(draw: Any, tmp_path: Path) -> None:
    words = ("--component-attention-backends", "vae=reference")
    assert draw("flux", "--dry-run", *words).code == 0
    assert {row[2] for row in rows(draw("flux", "--output", str(tmp_path / "a.png"), *words), "vae")} == {"reference"}


def test_a_device_that_is_not_here(draw: Any, tmp_path: Path) -> None:
    for more in (("--dry-run",), ("--output", str(tmp_path / "a.gif"))):
        done = draw("wan", "--device", "cuba", *more)
        assert (done.code, "Did you mean 'cuda'?" in message(done)) == (2, True), done.out


# ------------------------------------------------------------------------- commands as pages of other engines have them

COMMANDS = (
    'sglang generate --model-path {path} --prompt "..." --attention-backend fa',
    'sglang generate --model-path {path} --prompt "..." --attention-backend torch_sdpa',
    (
        'sglang generate --model-path {path} --prompt "..." --attention-backend torch_sdpa '
        "--component-attention-backends text_encoder=torch_sdpa"
    ),
    (
        'sglang generate --model-path {path} --prompt "..." --attention-backend sliding_tile_attn '
        '--attention-backend-config "mask_strategy_file_path={path}/mask_strategy.json"'
    ),
)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_sglang_parse(run: Run, folder: Any, command: str, tmp_path: Path) -> None:
    path = folder("wan")
    (path / "mask_strategy.json").write_text("{}")
    words = shlex.split(command.format(path=path))[1:]
    done = run(*words, *SIZES["wan"], "--dry-run", "--json")
    if "fa" in words:  # which is none for a CPU, in a run as well
        assert (done.code, "fa, asked for by the command line, has no backend on cpu" in message(done)) == (4, True)
    else:
        assert done.code in (0, 2), done.out
        if done.code:
            assert "mask_strategy" in message(done)


def test_it_works_without_diffusers_for_causal_lms() -> None:
    """What is imported with the command is light."""
    program = "import polyattn.cli.generate, sys; print([m for m in ('torch', 'diffusers', 'PIL') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow(keep=1)
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize("degree", ["ulysses", "ring"])
def test_two_processes_make_the_frames_of_one(draw: Any, folder: Any, tmp_path: Path, degree: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert draw("wan", "--output", str(one)).code == 0
    words = ("generate", "--model-path", str(folder("wan")), "--prompt", "a cat", *SIZES["wan"], "--output", str(two))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [*torchrun, "-m", "polyattn", *words, f"--{degree}-degree", "2", "--json"],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout)  # of one process alone
    assert said["processes"] == 2
    assert {(row["role"], row["backend"]) for row in said["rows"] if row["component"] == "transformer"} == {
        ("self", "torch_sdpa@cpu"),
        ("cross", "torch_sdpa@cpu"),
    }
    names = sorted(file.name for file in one.iterdir())
    assert names == sorted(file.name for file in two.iterdir())
    for name in names:
        pair = [np.asarray(Image.open(place / name)).astype(int) for place in (one, two)]
        assert np.abs(pair[0] - pair[1]).max() <= 1, "a sum in another order may round a pixel otherwise"


def test_processes_are_started_by_torchrun(draw: Any) -> None:
    done = draw("wan", "--ulysses-degree", "2", "--ring-degree", "2")
    assert done.code == 2
    said = done.data["error"]["message"]
    assert "is 4, and the processes of this job are 1: start it by torchrun --nproc-per-node 4" in said
    done = draw("wan", "--ring-degree", "0")
    assert done.code == 2
    assert "--ring-degree 0: give 1 or more" in done.data["error"]["message"]
    done = draw("wan", "--ring-degree", "2", "--dry-run")
    assert "the processes are not part of a dry run" in done.out


def test_a_model_without_a_plan_cannot_be_spread() -> None:
    from polyattn.integrations.diffusers.parallel import spread

    with pytest.raises(ConfigError, match="no plan of context parallelism for Linear; leave ulysses_degree"):
        spread({"transformer": torch.nn.Linear(2, 2)}, 2, 1)
