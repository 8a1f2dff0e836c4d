"""Cross layers: queries of the decoder over keys of an encoder, which have pages of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.errors import InvalidInputError
from polyattn.serving.attention.backend import AttentionBackend
from polyattn.serving.attention.plan_slots import EncoderBatch
from polyattn.serving.layer import AttentionLayer
from polyattn.serving.step.batch import ForwardBatch, ForwardMode

from .rig import LIMITS, Rig, decoder, dense

EXTEND, DECODE, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED
CROSS = AttentionLayer(1, 4, 2, 16, v_head_dim=8, kind="cross")


class EncoderRig(Rig):
    """With the encoder's keys of each row."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__([*decoder(1), CROSS], **arguments)
        self.encoded: dict[int, tuple[int, Tensor, Tensor]] = {}

    def run(self, mode: ForwardMode, new: Mapping[int, int], encoded: Mapping[int, int] | None = None) -> None:
        """`encoded`: rows whose encoder has just run, with its tokens."""
        assert self.encoder_table is not None
        for row, tokens in (encoded or {}).items():
            place = self.encoder_table.add()
            self.encoder_table.extend(place, tokens)
            self.encoded[row] = (place, self.random(tokens, 2, 16), self.random(tokens, 2, 8))
        self.give(new)
        batch = self.batch_of(mode, new)
        here = [self.encoded[row] for row in new]
        order = [i for i, row in enumerate(new) if row in (encoded or {})]
        encoder = EncoderBatch([place for place, _, _ in here], [len(k) for _, k, _ in here], order)
        self.backend.init_forward_metadata(batch, encoder)
        self.check_layer(self.layers[0], batch, None, True)
        self.check_cross(batch, here, order)

    def check_cross(self, batch: ForwardBatch, here: Sequence[tuple[int, Tensor, Tensor]], order: list[int]) -> None:
        q = self.random(batch.tokens, 4, 16)
        k, v = (torch.cat([here[i][n] for i in order]) if order else None for n in (1, 2))
        out = self.backend.forward(q, k, v, CROSS)
        for n, (_, keys, values) in enumerate(here):
            span = slice(batch.cu_seqlens_q[n], batch.cu_seqlens_q[n + 1])
            torch.testing.assert_close(out[span], dense(CROSS, q[span], keys, values))


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"backend": "torch_sdpa"},
        {"backend": "flex_attention"},
        {"backend": "toy"},
        {"prefill_backend": "toy", "decode_backend": "toy_plain"},
    ],
)
def test_every_mode(arguments: dict[str, str], toys: Any) -> None:
    rig = EncoderRig(**arguments)
    a, b, c = rig.add(3)
    rig.run(EXTEND, {a: 6, b: 2}, {a: 9, b: 3})
    rig.run(DECODE, {b: 1, a: 1})
    rig.run(MIXED, {a: 1, c: 7, b: 1}, {c: 2})  # more queries than keys
    rig.run(DECODE, {a: 1, b: 1, c: 1})


def test_beams_share_the_keys_of_one_encoder(toys: Any) -> None:
    rig = EncoderRig()
    a, b = rig.add(2)
    rig.run(EXTEND, {a: 3}, {a: 9})
    rig.encoded[b] = rig.encoded[a]
    rig.run(MIXED, {a: 1, b: 4})
    rig.run(DECODE, {a: 1, b: 1})


def refused(words: str) -> Any:
    return pytest.raises(InvalidInputError, match=words)


def test_what_does_not_belong_together() -> None:
    rig = EncoderRig()
    (row,) = rig.add()
    rig.give({row: 2})
    batch = rig.batch_of(EXTEND, {row: 2})
    with refused("the model has cross layers: plan"):
        rig.backend.plan(batch)
    with refused("the EncoderBatch has 2 sequences, the batch 1"):
        rig.backend.plan(batch, EncoderBatch([0, 1], [0, 0]))
    with refused("has 2 rows and 1 seq_lens"):
        EncoderBatch([0, 1], [3])
    with refused("new=2 of 1 sequences"):
        EncoderBatch([0], [3], [2])
    with refused("EncoderBatch: new='a' is a str"):
        EncoderBatch([0], [3], ["a"])  # type: ignore[list-item]
    with refused("encoder_table is for models with cross layers"):
        AttentionBackend(rig.layers, rig.pool, rig.table, limits=LIMITS)
    plain = Rig(decoder())
    plain.give({plain.add()[0]: 2})
    with refused("an EncoderBatch is for models with cross layers"):
        plain.backend.plan(plain.batch_of(EXTEND, {0: 2}), EncoderBatch([0], [3]))


def test_keys_that_are_not_there_cannot_be_attended() -> None:
    rig = EncoderRig()
    (row,) = rig.add()
    rig.run(EXTEND, {row: 4}, {row: 3})
    q, k, v = rig.random(4, 4, 16), rig.random(3, 2, 16), rig.random(3, 2, 8)
    with refused("save_kv_cache=False with keys of another sequence"):
        rig.backend.forward(q, k, v, CROSS, save_kv_cache=False)
    with refused("no keys, and EncoderBatch.new says that encoders have just run: 3 tokens are to be written"):
        rig.backend.forward(q, None, None, CROSS)
