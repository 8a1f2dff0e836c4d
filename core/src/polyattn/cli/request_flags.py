"""This module makes the flags of a request from the table of its fields: a field that is added has a flag by itself.

What a field's own type and text do not say stands in `SPELLINGS`. Fields that other words decide are in `DECIDED`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ..contract import AttentionRequest, request_fields
from ..contract.vocabulary import DTYPE_WORDS, WORDS
from ..errors import ConfigError, did_you_mean
from ..selection.config import KV_CACHE_DTYPES
from .options import Option

__all__ = ["DECIDED", "REQUEST", "RequestFlag", "given_fields", "one_of", "request_flags"]

REQUEST, SERVE, BLOCKS = "What is asked for", "Serving", "Block maps and recurrent states"
TENSORS = "What is special about the tensors"

DECIDED: Mapping[str, str] = {
    **dict.fromkeys(("platform", "arch", "toolkit", "features"), "--assume-platform, or this machine"),
    "s_relation": "--phase",
    "tree": "--spec-topk and --phase",
    "place": "--grid",
    "options": "the configuration of the backend",
    **dict.fromkeys(("q_bucket", "k_bucket", "batch_bucket"), "the lengths of a call"),
}
"""Fields without a flag -> what decides them."""

Kind = Literal["switch", "either", "whole", "number", "word", "pair", "words"]


@dataclasses.dataclass(frozen=True)
class Spelling:
    """A spelling is what the command line says of a field beyond its own type and text.

    Attributes:
        help: in the place of the field's text. metavar: the word for its value. usual: what a question takes where the
            flag is not given. panel: heading of the help. example: a value. also: other flags of the same meaning.
        least: the smallest whole number. below: numbers are from 0 up to it, itself not among them.
        words: allowed words -> their values; None = those that the field has.
        kind: how the value is written; None = as the field's type says.
    """

    help: str = ""
    metavar: str = ""
    usual: str = ""
    panel: str = REQUEST
    example: str = ""
    also: tuple[str, ...] = ()
    least: int = 0
    below: float | None = None
    words: Mapping[str, Any] | None = None
    kind: Kind | None = None


SPELLINGS: Mapping[str, Spelling] = {
    "family": Spelling(
        help="The family: dense, varlen, paged, mla, block_sparse or linear.",
        usual="paged when --phase, --page-size, --kv-dtype or --spec-topk is given, else dense",
        example="paged",
    ),
    "phase": Spelling(
        help="The phase: prefill, extend, decode or verify. It also says how many queries there are: as many as "
        "keys, fewer, one, fewer.",
        usual="prefill; verify with --spec-topk",
        example="decode",
    ),
    "dtype": Spelling(help="The dtype of the query: bf16, fp16, fp32, ...", usual="bf16", example="bf16"),
    "head_dim": Spelling(
        help="The width of query and key rows.", metavar="D", usual="128; 576 for mla", example="128", least=1
    ),
    "v_head_dim": Spelling(
        help="The width of value rows.",
        metavar="D_V",
        usual="as --head-dim; 512 for mla (128 with --head-dim 192)",
        example="128",
        least=1,
    ),
    "heads": Spelling(help="Heads of the queries.", metavar="H_Q", usual="32; 128 for mla", example="32", least=1),
    "kv_heads": Spelling(
        help="Heads of the keys, a divisor of --heads.",
        metavar="H_KV",
        usual="as --heads; 1 for mla",
        example="8",
        least=1,
    ),
    "causal": Spelling(help="The causal mask.", usual="causal for paged and mla", kind="either"),
    "layout": Spelling(
        help="The layout of dense calls: BSHD or BHSD.",
        usual="BSHD",
        example="BHSD",
        words={word: word for word in ("BSHD", "BHSD")},
    ),
    "window": Spelling(
        help="Keys that a row sees to each side, -1 = no bound; a sliding window of 128 tokens is 127,0.",
        metavar="LEFT,RIGHT",
        example="127,0",
        least=-1,
    ),
    "softcap": Spelling(metavar="CAP", example="30", below=math.inf),
    "mask": Spelling(help="The mask: none, bool or additive.", metavar="KIND", usual="none", example="bool"),
    "scale": Spelling(
        help="The factor on the logits.", metavar="X", usual="D ** -0.5; 192 ** -0.5 for mla", example="0.1"
    ),
    "dropout": Spelling(metavar="P", example="0.1", below=1.0),
    "grad": Spelling(metavar="A,B", example="query,key,value"),
    "method": Spelling(metavar="NAME", usual="gdn for linear", example="dsa"),
    "page_size": Spelling(
        help="Tokens per KV page.", metavar="TOKENS", usual="64 for paged and mla", panel=SERVE, example="64", least=1
    ),
    "kv_dtype": Spelling(
        help="The dtype of the KV cache: auto, bf16, fp8_e4m3, fp8_e5m2, fp4_e2m1, ...",
        usual="auto",
        panel=SERVE,
        example="fp8_e4m3",
        also=("--kv-cache-dtype",),
        words=KV_CACHE_DTYPES,
    ),
    "kv_layout": Spelling(
        help="The layout of a page: NHD, HND, vectorised or NZ.", usual="NHD for paged", panel=SERVE, example="HND"
    ),
    "kv_scales": Spelling(metavar="KIND", panel=SERVE, example="tensor"),
    "kv_parts": Spelling(metavar="N", panel=SERVE, example="1"),
    "save_kv_cache": Spelling(
        help="New keys and values are given, and the backend writes them.", usual="none are given", panel=SERVE
    ),
    "spec_topk": Spelling(
        help="Speculation: 1 = a chain, more = a tree (means --phase verify).",
        metavar="K",
        usual="1 in phase verify",
        panel=SERVE,
        example="4",
    ),
    "chunked_prefix": Spelling(help="MLA: a prefix is attended in chunks and merged.", panel=SERVE),
    "multimodal": Spelling(panel=SERVE),
    "graph_capture": Spelling(
        help="Recorded into a device graph: call = by itself, session = as a layer of a planned step.",
        usual="none",
        panel=SERVE,
        example="session",
        words={"none": False, "call": True, "session": "session"},
        kind="word",
    ),
    "block_map": Spelling(usual="given for block_sparse", panel=BLOCKS),
    "block_sizes": Spelling(panel=BLOCKS),
    "block_starts": Spelling(panel=BLOCKS),
    "block_shape": Spelling(
        help="Tokens of a block.",
        metavar="BLOCK_Q,BLOCK_K",
        usual="64,64 for block_sparse",
        panel=BLOCKS,
        example="128,64",
        least=1,
    ),
    "state_dtype": Spelling(help="The dtype of the recurrent state.", usual="fp32", panel=BLOCKS, example="bf16"),
    "state_layout": Spelling(
        help="The layout of the recurrent state: KV or VK.", usual="KV for linear", panel=BLOCKS, example="VK"
    ),
    "state_slots": Spelling(panel=BLOCKS),
    "state_out": Spelling(
        help="The states that come back: every = after each draft token.", usual="the last", panel=BLOCKS
    ),
    "raw_gates": Spelling(
        help="Gates are computed in the call: softplus or bounded.", usual="they are given", panel=BLOCKS
    ),
    "beta_range": Spelling(usual="1", panel=BLOCKS, example="2", least=1),
    "qk_norm": Spelling(panel=BLOCKS),
    **dict.fromkeys(("zero_size", "large", "misaligned", "transform"), Spelling(panel=TENSORS)),
}

_NO_FLAG = {"causal": "No causal mask.", "save_kv_cache": "New keys and values are given, attended and not written."}
"""What the flag says that begins with --no-, for switches with three answers."""


@dataclasses.dataclass(frozen=True)
class RequestFlag:
    """A request flag is one field of a request as the command line says it.

    Attributes:
        name: the field. kind: how its value is written. help, spelling: what is told of it.
        section: the section of docs/semantics.md that its text names, or empty.
    """

    name: str
    kind: Kind
    help: str
    section: str
    spelling: Spelling

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def words(self) -> Mapping[str, Any] | None:
        """Map allowed words to their values; None = any word. The word for nothing is leaving the flag out."""
        if self.spelling.words is not None:
            return self.spelling.words
        known = WORDS.get(self.name)
        if known is None:
            return None
        if "dtype" in self.name:
            return DTYPE_WORDS
        return {word: word for word in known if word}

    @property
    def example(self) -> str:
        """Give a value that the flag may have; empty for a switch."""
        if self.spelling.example or self.kind in ("switch", "either"):
            return self.spelling.example
        if self.words:
            return list(self.words)[-1]
        return {"whole": "1", "number": "0.5", "pair": "1,1"}.get(self.kind, "NAME")

    def options(self) -> tuple[Option, ...]:
        """Make the flag, or the two flags of a switch with three answers, for a command's table."""
        spelling = self.spelling
        kind = {"switch": bool, "either": bool, "whole": int, "number": float}.get(self.kind, str)
        metavar = spelling.metavar or ("N" if kind in (int, float) else self.name.rpartition("_")[2].upper())
        usual = "" if self.kind in ("switch", "either") and not spelling.usual else spelling.usual
        yes = Option(self.name, kind, self.help, metavar, spelling.panel, usual=usual, also=spelling.also)
        if self.kind != "either":
            return (yes,)
        # Two flags, since of one with two names the last that is typed would win in silence.
        return yes, Option(f"no_{self.name}", bool, _NO_FLAG.get(self.name, f"Not {self.flag}."), "", spelling.panel)

    def read(self, value: Any) -> Any:
        """Turn what was typed into the field's value.

        Raises:
            ConfigError: it is no such value.
        """
        spelling = self.spelling
        if self.kind == "whole":
            return _whole(self.flag, value, spelling.least)
        if self.kind == "number":
            return _number(self.flag, value, spelling.below)
        if self.kind == "pair":
            return _pair(self.flag, value, spelling.metavar or "A,B", spelling.least)
        if self.kind == "words":
            parts = [part.strip() for part in value.split(",") if part.strip()]
            return tuple(self._word(part) for part in parts)
        return self._word(value) if self.kind == "word" else value

    def _word(self, word: str) -> Any:
        return word if self.words is None else one_of(self.flag, word, self.words)


def _kind_of(annotation: Any) -> Kind:
    """Say how a value of a type is written on the command line."""
    parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        if parts == [bool]:
            return "either"
        return _kind_of(parts[0]) if len(parts) == 1 else "word"
    if typing.get_origin(annotation) is tuple:
        return "words" if parts[-1] is Ellipsis else "pair"
    return {bool: "switch", int: "whole", float: "number"}.get(annotation, "word")  # type: ignore[return-value]


def request_flags(kind: type[AttentionRequest] = AttentionRequest) -> tuple[RequestFlag, ...]:
    """Make the flags of a request type in the order of its fields, all but those of `DECIDED`."""
    hints = typing.get_type_hints(kind)
    flags = []
    for field in request_fields(kind):
        if field.name in DECIDED:
            continue
        section, text = re.fullmatch(r"(?:(S\d+): )?(.*)", field.doc, re.S).groups()  # type: ignore[union-attr]
        spelling = SPELLINGS.get(field.name, Spelling())
        how = spelling.kind or _kind_of(hints[field.name])
        told = spelling.help or f"{text if '_' in text.partition(' ')[0] else text[:1].upper() + text[1:]}."
        flags.append(RequestFlag(field.name, how, told, section or "", spelling))
    return tuple(flags)


def given_fields(given: Mapping[str, Any], kind: type[AttentionRequest] = AttentionRequest) -> dict[str, Any]:
    """Read the fields that a command line gives.

    Args:
        given: field -> what was typed; None = not given, and so is False for a switch.

    Raises:
        ConfigError: a value is none of its field.
    """
    found = {}
    for flag in request_flags(kind):
        value = given.get(flag.name)
        if value is not None and not (flag.kind == "switch" and value is False):
            found[flag.name] = flag.read(value)
    return found


def one_of(flag: str, word: str, known: Iterable[str]) -> Any:
    """Return `word`, or what it stands for where `known` is a mapping.

    Raises:
        ConfigError: it is not known.
    """
    words = list(known)
    if word not in words:
        raise ConfigError(f"{flag} {word!r} is not known.{did_you_mean(word, words)} Allowed: {', '.join(words)}")
    return known[word] if isinstance(known, Mapping) else word


def _whole(flag: str, value: int, least: int) -> int:
    if value < least:
        raise ConfigError(f"{flag} {value} is too small: give a whole number, {least} or more")
    return value


def _number(flag: str, value: float, below: float | None) -> float:
    if below is None:
        if not math.isfinite(value):
            raise ConfigError(f"{flag} {value:g} is no finite number")
    elif not 0 <= value < below:
        if below == 1:
            raise ConfigError(f"{flag} {value:g} is no probability below 1: give 0 (off) to 0.999")
        raise ConfigError(f"{flag} {value:g} is not a number of 0 (off) or more")
    return value


def _pair(flag: str, text: str, metavar: str, least: int) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(-?\d{1,18})\s*,\s*(-?\d{1,18})\s*", text)
    if match is None or min(int(match[1]), int(match[2])) < least:
        form = metavar.lower()
        if least < 0:
            raise ConfigError(
                f"{flag} {text!r} is not {form}: two whole numbers of keys besides the row's own, -1 = no bound. A "
                f"model's sliding window of 128 tokens is {flag} 127,0"
            )
        raise ConfigError(f"{flag} {text!r} is not {form}: give two whole numbers, each {least} or more")
    return (int(match[1]), int(match[2]))
