"""Lowerings say which fields they relieve of. The table of docs/lowerings.md is written by docs/tables.py."""

from __future__ import annotations

from polyattn.contract import AttentionRequest
from polyattn.lowering import lowerings


def test_every_lowering_relieves_of_fields_that_exist() -> None:
    names = {
        *(f for f in vars(AttentionRequest()) if not f.startswith("_")),
        "group",
        "dims",
        "same_dims",
        "kv_storage",
    }
    for lowering in lowerings():
        assert lowering.fields, lowering.name
        assert lowering.fields <= names, lowering.name
