"""The records of polyattn-xpu: they load, and they say yes and no where the libraries do."""

from __future__ import annotations

from polyattn.testing import Asked, AttentionRecords

PAGED = {**AttentionRecords.paged_decode, "heads": 8, "kv_heads": 2}


class TestRecords(AttentionRecords):
    plugin = "polyattn_xpu.plugin"
    names = ("fa", "intel_xpu", "intel_amx", "ipex")
    asked = (
        Asked("fa", "xpu:bmg", "fa", {"head_dim": 64}, lowerings=()),
        Asked("fa, 80 wide", "xpu:bmg", "fa", {"head_dim": 80}, lowerings=("pad_head_dim", "pad_value_dim")),
        Asked("fa, a softcap", "xpu:bmg", "fa", {"softcap": 30.0}, "softcap=30.0 is not declared"),
        Asked("fa in float32", "xpu:bmg", "fa", {"dtype": "float32"}, "dtype='float32' is not one of"),
        Asked("pages on a GPU", "xpu:bmg", "intel_xpu", PAGED),
        Asked("pages on a CPU with AMX", "cpu:amx", "intel_amx", {**PAGED, "page_size": 1}),
        Asked("AMX, 272 wide", "cpu:amx", "intel_amx", {**PAGED, "head_dim": 272}, "head_dim=272 is not 32 to 256"),
    )
