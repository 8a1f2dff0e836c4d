"""`polyattn generate`, with tiny models in a folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from polyattn.serving.engine import Engine

from .conftest import Run

WORDS = ["<unk>", "<end>", "once", "upon", "a", "time", "there", "was", "fox", "who", "ran", "home", "and", "slept"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"))


def saved(folder: Path, **changes: Any) -> Path:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.4,
        "eos_token_id": None,
        "bos_token_id": None,
        **changes,
    }
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).save_pretrained(folder)
    return folder


def expected(folder: Path, prompt: str, count: int) -> list[int]:
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return out[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def test_json_has_the_text_of_model_generate(run: Run, folder: Path) -> None:
    done = run("generate", "--model-path", str(folder), "--prompt", "once upon a", "--max-new-tokens", "8", "--json")
    assert done.code == 0, done.out
    (entry,) = done.data
    ids = expected(folder, "once upon a", 8)
    assert entry["token_ids"] == ids
    assert entry["text"] == " ".join(WORDS[i] for i in ids)
    assert entry["backend"] == {"prefill": "torch_native", "decode": "torch_native"}
    assert entry["tokens_per_second"] > 0
    assert (entry["prompt"], entry["finish_reason"]) == ("once upon a", "length")


def test_the_same_bits_in_any_batch_are_a_flag(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []

    class Seen(Engine):
        def __init__(self, runner: Any, config: Any) -> None:
            super().__init__(runner, config)
            made.append(self.memory.backend.batch_invariant)

    monkeypatch.setattr("polyattn.serving.engine.Engine", Seen)
    words = ("generate", "--model-path", str(folder), "--prompt", "once upon a", "--max-new-tokens", "4", "--json")
    texts = [run(*words, *more).data[0]["token_ids"] for more in ((), ("--batch-invariant",))]
    assert made == [False, True]
    assert texts[0] == texts[1]


def test_a_file_has_many_prompts_that_run_together(run: Run, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    lines = ["a fox ran", "there was a time", "home"]
    file.write_text("\n\n".join(lines), encoding="utf-8")
    words = ("--prompt-file", str(file), "--prompt", "once", "--max-new-tokens", "5", "--page-size", "4", "--json")
    done = run("generate", "--model-path", str(folder), *words)
    assert done.code == 0, done.out
    assert [entry["prompt"] for entry in done.data] == ["once", *lines]
    for entry in done.data:
        assert entry["token_ids"] == expected(folder, entry["prompt"], 5)


@pytest.mark.parametrize("topk", ["1", "2"])
def test_drafts_change_nothing_but_the_phases(run: Run, folder: Path, tmp_path: Path, topk: str) -> None:
    draft = saved(tmp_path, num_hidden_layers=1)
    words = (
        "--speculative-draft-model-path",
        str(draft),
        "--speculative-num-steps",
        "2",
        "--speculative-eagle-topk",
        topk,
    )
    mode = ("--speculative-attention-mode", "decode", "--decode-attention-backend", "torch_sdpa")
    shared = ("generate", "--model-path", str(folder), "--prompt", "once upon", "--max-new-tokens", "6", "--json")
    done = run(*shared, *words, *mode)
    assert done.code == 0, done.out
    assert done.data[0]["token_ids"] == expected(folder, "once upon", 6)
    assert done.data[0]["backend"] == {"prefill": "torch_native", "verify": "torch_sdpa"}


def test_an_end_token_of_the_model_ends_the_text(run: Run, folder: Path, tmp_path: Path) -> None:
    ids = expected(folder, "once upon a", 8)
    saved(tmp_path, eos_token_id=ids[3])
    done = run("generate", "--model-path", str(tmp_path), "--prompt", "once upon a", "--json")
    assert done.data[0]["token_ids"] == ids[: ids.index(ids[3]) + 1]
    assert done.data[0]["finish_reason"] == "stop"


def test_the_screen_has_the_text_and_the_speed(run: Run, folder: Path) -> None:
    done = run("generate", "--model-path", str(folder), "--prompt", "once upon a", "--max-new-tokens", "4")
    assert done.code == 0
    assert WORDS[expected(folder, "once upon a", 4)[0]] in done.out
    assert "tokens per second" in done.out
    assert "torch_native" in done.out


def test_a_seed_draws_the_same_text_again(run: Run, folder: Path) -> None:
    words = ("generate", "--model-path", str(folder), "--prompt", "a", "--temperature", "2", "--json")
    seeds = [run(*words, "--seed", seed).data[0]["token_ids"] for seed in ("1", "1", "2")]
    assert seeds[0] == seeds[1] != seeds[2]


def test_a_narrow_cache_runs(run: Run, folder: Path) -> None:
    words = ("--prompt", "once upon a", "--max-new-tokens", "3", "--kv-cache-dtype", "fp8_e4m3", "--json")
    done = run("generate", "--model-path", str(folder), *words)
    assert done.code == 0, done.out
    assert len(done.data[0]["token_ids"]) == 3


@pytest.mark.parametrize(
    "words, code, said",
    [
        ((), 2, "there is no prompt"),
        (("--prompt-file", "no-such-file"), 2, "--prompt-file no-such-file"),
        (("--prompt", "a", "--max-new-tokens", "0"), 2, "max_new_tokens=0"),
        (("--prompt", "a", "--max-new-tokens", "400"), 2, "more than the 128 positions"),
        (("--prompt", "a", "--page-size", "0"), 2, "page_size=0"),
        (("--prompt", "a", "--page-size", "99999999999999"), 2, "1 pages of 99999999999999 tokens needs more"),
        (("--prompt", "a", "--kv-cache-dtype", "fp8"), 2, "kv_cache_dtype='fp8'"),
        (("--prompt", "a", "--attention-backend", "torch_nativ"), 4, "torch_native"),
        (("--prompt", "a", "--attention-backend", "fa3"), 4, "fa3, asked for by the command line"),
        (("--prompt", "a", "--speculative-num-steps", "2"), 2, "--speculative-draft-model-path"),
        (("--prompt", "a", "--device", "cuba"), 2, "Did you mean 'cuda'? Name a device that is here, such as cpu"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(run: Run, folder: Path, words: tuple[str, ...], code: int, said: str) -> None:
    done = run("generate", "--model-path", str(folder), *words)
    assert done.code == code, done.err
    assert said in " ".join(done.err.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="not run: cuda is here")
def test_a_device_that_torch_knows_and_has_not(run: Run, folder: Path) -> None:
    done = run("generate", "--model-path", str(folder), "--prompt", "a", "--device", "cuda")
    assert done.code == 2
    said = " ".join(done.err.split())
    assert said.startswith("error: --device 'cuda': ")
    assert said.endswith(". Name a device that is here, such as cpu")
    assert "Did you mean" not in said


def test_a_folder_that_is_none(run: Run, tmp_path: Path) -> None:
    done = run("generate", "--model-path", str(tmp_path / "gone"), "--prompt", "a")
    assert done.code == 2
    assert "is not a folder" in " ".join(done.err.split())
    done = run("generate", "--model-path", str(tmp_path), "--prompt", "a")
    assert done.code == 2
    assert "cannot be loaded as" in " ".join(done.err.split())


def changed(folder: Path, to: Path, change: Any) -> Path:
    """A copy of a model whose weights are changed."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    file = to / "model.safetensors"
    weights = load_file(file)
    save_file(change(weights), file, metadata={"format": "pt"})
    return to


def test_weights_that_are_cut_off(run: Run, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    done = run("generate", "--model-path", str(tmp_path), "--prompt", "a")
    assert done.code == 2
    said = " ".join(done.err.split())
    assert "cannot be loaded as AutoModelForCausalLM: " in said
    assert said.endswith("save it again with save_pretrained")


def test_weights_that_are_missing_are_not_made_up(run: Run, folder: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    changed(folder, tmp_path, lambda weights: {key: value for key, value in weights.items() if key != name})
    done = run("generate", "--model-path", str(tmp_path), "--prompt", "a")
    assert done.code == 2
    assert f"lacks 1 of the model's weights, {name} among them, which would be random" in " ".join(done.err.split())


def test_weights_that_are_no_numbers(run: Run, folder: Path, tmp_path: Path) -> None:
    changed(folder, tmp_path, lambda weights: {key: value * float("nan") for key, value in weights.items()})
    done = run("generate", "--model-path", str(tmp_path), "--prompt", "a", "--json")
    assert done.code == 2
    assert "the model gives logits of NaN or infinity after 1 tokens" in done.data["error"]["message"]


def test_an_override_that_reaches_no_layer(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_COMPONENT_ATTENTION_BACKENDS", "text_encoder=reference")
    done = run("generate", "--model-path", str(folder), "--prompt", "a", "--json")
    assert done.code == 2
    assert done.data["error"]["type"] == "ConfigError"
    assert "component override text_encoder reached no layer" in done.data["error"]["message"]


def test_settings_of_components_and_backends_are_flags_too(run: Run, folder: Path) -> None:
    words = ("generate", "--model-path", str(folder), "--prompt", "a", "--json")
    done = run(*words, "--component-attention-backends", "text_encoder=reference")
    assert done.code == 2
    assert "component override text_encoder reached no layer" in done.data["error"]["message"]
    done = run(*words, "--attention-backend-config", "skip_time_steps=3", "--attention-backend", "torch_native")
    assert done.code == 2
    assert "skip_time_steps" in done.data["error"]["message"]


def test_a_model_that_pages_cannot_serve(run: Run, folder: Path, tmp_path: Path) -> None:
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    config = transformers.BloomConfig(vocab_size=len(WORDS), hidden_size=32, n_layer=2, n_head=4)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    done = run("generate", "--model-path", str(tmp_path), "--prompt", "a", "--json")
    assert done.code == 3
    assert done.data["error"]["type"] == "UnsupportedRequestError"
    assert "BloomForCausalLM" in done.data["error"]["message"]


def test_what_is_wrong_with_the_words_is_said_before_a_model_is_loaded(run: Run) -> None:
    done = run("generate", "--model-path", "nowhere", "--prompt", "a", "--temperature", "-1")
    assert (done.code, "temperature=-1.0" in done.err) == (2, True)


def test_a_model_whose_keys_change_is_served_below_that_length(run: Run, tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 16}
    folder = saved(tmp_path, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, **factors})
    words = ("generate", "--model-path", str(folder), "--prompt", "once upon a", "--json", "--max-new-tokens")
    done = run(*words, "8")
    assert done.code == 0, done.out
    assert done.data[0]["token_ids"] == expected(folder, "once upon a", 8)
    refused = run(*words, "20")
    assert refused.code == 3
    assert "max_positions=16" in refused.out + refused.err


@pytest.mark.filterwarnings("ignore:polyattn. prompts that begin alike are run anew:RuntimeWarning")
def test_a_hybrid_model_and_who_serves_its_linear_attention(run: Run, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, layer_types=["linear_attention", "full_attention"],
        max_position_embeddings=128, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, initializer_range=0.4, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = transformers.Qwen3_5ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    words = ("generate", "--prompt", "once upon a", "--max-new-tokens", "8", "--json")
    names = ("--linear-attn-prefill-backend", "torch_native", "--linear-attn-decode-backend", "reference")
    done = run(*words, "--model-path", str(tmp_path), *names)
    assert done.code == 0, done.err
    ids = torch.tensor([[2, 3, 4]])
    right = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert done.data[0]["token_ids"] == right[0, 3:].tolist()
    unknown = run(*words, "--model-path", str(tmp_path), "--linear-attn-backend", "torch_nativ")
    assert unknown.code != 0
    assert "torch_native" in unknown.out
    plain = run(*words, "--model-path", str(folder), "--linear-attn-backend", "torch_native")
    assert plain.code == 2
    assert "has no layer of linear attention" in plain.out
