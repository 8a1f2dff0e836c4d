"""The records of polyattn-musa: they load, and they say yes and no where the libraries do."""

from __future__ import annotations

from polyattn.testing import Asked, AttentionRecords

PAGED, MLA = AttentionRecords.paged_decode, AttentionRecords.latent_decode


class TestRecords(AttentionRecords):
    plugin = "polyattn_musa.plugin"
    names = ("fa", "fa3", "sage_attn")
    asked = (
        Asked("fa", "musa:mp31", "fa", {"window": (127, 0), "softcap": 30.0}),
        Asked("before MP31", "musa:mp22", "fa", {}, "arch='mp22' is not one of"),
        Asked("packed batches train", "musa:mp31", "fa", {"family": "varlen", "grad": ("query",)}),
        Asked("dense ones packed", "musa:mp31", "fa", {"grad": ("query",)}),
        Asked(
            "without a softcap",
            "musa:mp31",
            "fa",
            {"grad": ("query",), "softcap": 9.0},
            "grad=('query',) is not declared",
        ),
        Asked("the widest", "musa:mp31", "fa", {"head_dim": 512}),
        Asked("wider", "musa:mp31", "fa", {"head_dim": 520}, "head_dim=520"),
        Asked("float32", "musa:mp31", "fa", {"dtype": "float32"}, "dtype='float32'"),
        Asked(
            "wide training",
            "musa:mp31",
            "fa",
            {"family": "varlen", "grad": ("query",), "head_dim": 264},
            "grad=('query',)",
        ),
        Asked("any page", "musa:mp31", "fa3", {**PAGED, "page_size": 1}),
        Asked("latent pages", "musa:mp31", "fa3", {**MLA, "page_size": 32}, "page_size=32"),
        Asked("sage", "musa:mp31", "sage_attn", {"head_dim": 128, "causal": "bottom_right"}),
        Asked("sage width", "musa:mp31", "sage_attn", {"head_dim": 136}, "head_dim=136"),
        Asked("no LSE", "musa:mp31", "sage_attn", {"lse": True}, "lse=True is not declared"),
        Asked("sage, the narrower", "musa:mp31", "sage_attn", {"head_dim": 64, "dtype": "float16"}),
        Asked("sage, a window", "musa:mp31", "sage_attn", {"window": (9, -1)}, "window=(9, -1) is not declared"),
        Asked("sage, training", "musa:mp31", "sage_attn", {"grad": ("query",)}, "grad=('query',) is not declared"),
        Asked("K wider than V", "musa:mp31", "fa", {"head_dim": 192, "v_head_dim": 128, "lse": True}),
        Asked("a mask", "musa:mp31", "fa", {"mask": "bool"}, "mask='bool' is not declared"),
        Asked("ALiBi", "musa:mp31", "fa", {"alibi": True}, "alibi=True is not declared"),
        Asked("dropout", "musa:mp31", "fa", {"dropout": 0.1}, "dropout=0.1 is not declared"),
        Asked(
            "training, causal is square",
            "musa:mp31",
            "fa",
            {"causal": "bottom_right", "s_relation": "fewer", "family": "varlen", "grad": ("query",)},
            "grad=('query',) is not declared",
        ),
        Asked("the widest, paged", "musa:mp31", "fa3", {**PAGED, "head_dim": 512, "page_size": 48}),
        Asked("wider, paged", "musa:mp31", "fa3", {**PAGED, "head_dim": 520}, "head_dim=520"),
        Asked("HND", "musa:mp31", "fa3", {**PAGED, "kv_layout": "HND"}, "kv_layout='HND' is not declared"),
        Asked("float32, paged", "musa:mp31", "fa3", {**PAGED, "dtype": "float32"}, "dtype='float32'"),
        Asked("paged before MP31", "musa:mp22", "fa3", PAGED, "arch='mp22' is not one of"),
        Asked(
            "latent of 128, any page", "musa:mp31", "fa3", {**MLA, "head_dim": 192, "v_head_dim": 128, "page_size": 16}
        ),
        Asked("latent window", "musa:mp31", "fa3", {**MLA, "window": (9, -1)}, "window=(9, -1) is not declared"),
        Asked("latent softcap", "musa:mp31", "fa3", {**MLA, "softcap": 9.0}, "softcap=9.0 is not declared"),
        Asked("paged", "musa:mp31", "fa3", PAGED),
        Asked("latent", "musa:mp31", "fa3", MLA),
    )
