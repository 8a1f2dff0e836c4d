"""The records of polyattn-ascend: they load, and they say yes and no where the libraries do."""

from __future__ import annotations

from polyattn.testing import Asked, AttentionRecords
from polyattn_ascend.plugin import BACKENDS

PAGED, MLA = AttentionRecords.paged_decode, AttentionRecords.latent_decode


class TestRecords(AttentionRecords):
    plugin = "polyattn_ascend.plugin"
    names = ("ascend", "fa")
    asked = (
        Asked("fa", "npu", "fa", {"mask": "bool", "lse": True}),
        Asked("fa softcap", "npu", "fa", {"softcap": 30.0}, "softcap=30.0 is not declared"),
        Asked("ascend", "npu", "ascend", {**PAGED, "page_size": 128}),
        Asked("ascend pages", "npu", "ascend", PAGED, "page_size=64 is not 128"),
        Asked("D", "npu", "ascend", {**PAGED, "page_size": 128, "kv_heads": 32, "head_dim": 100}, "head_dim=100"),
        Asked("fa on 310P", "npu:ascend310p", "fa", {}, "arch='ascend310p' is not the 910B or later"),
        Asked(
            "on 910",
            "npu:ascend910",
            "ascend",
            {**PAGED, "page_size": 128},
            "arch='ascend910' is not the 910B or later",
        ),
        Asked("ascend on 910_93", "npu:ascend910_93", "ascend", {**PAGED, "page_size": 128}),
        Asked("MLA heads", "npu", "ascend", {**MLA, "page_size": 128, "heads": 24}, "heads=24 is not one of"),
    )


def test_every_backend_has_an_adapter_that_says_where_its_evidence_is_from() -> None:
    assert [(b.id, b.planned, b.evidence) for b in BACKENDS] == [
        ("fa@npu", False, "emulator"),
        ("ascend@npu", False, "emulator"),
    ]
