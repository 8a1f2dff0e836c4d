"""Whose kernels a backend's providers have, by what its aliases tell apart."""

from __future__ import annotations

from polyattn.names import is_of, kind_of
from polyattn.plugins import get_manager
from polyattn.records import Alias, BackendInfo, Provider, row


def test_aliases_tell_libraries_apart():
    providers = tuple(
        Provider(name, (row(family="dense"),), "x:Y") for name in ("new/x", "new/y", "new/y/z", "old", "own")
    )
    plain = BackendInfo("many", "cpu", providers, "a summary", aliases=(Alias("all_of_them"),))
    assert {kind_of(plain, one.name) for one in providers} == {""}
    aliases = (Alias("n", provider="new"), Alias("z", ("dense",), "new/y/z"), Alias("o", provider="old"))
    told = BackendInfo("many", "cpu", providers, "a summary", aliases=aliases)
    kinds = {one.name: kind_of(told, one.name) for one in providers}
    assert kinds == {"new/x": "new", "new/y": "new", "new/y/z": "new/y/z", "old": "old", "own": "own"}
    assert [is_of("newer", "new"), is_of("new", "new"), is_of("new/x", "new"), is_of("x", "")] == [
        False,
        True,
        True,
        True,
    ]


def test_no_kind_takes_a_provider_of_another():
    told = 0
    for info in get_manager().backends.values():
        kinds = {provider.name: kind_of(info, provider.name) for provider in info.providers}
        told += len({*kinds.values()}) > 1
        for kind in kinds.values():
            assert {name for name in kinds if is_of(name, kind)} == {name for name in kinds if kinds[name] == kind}, (
                info.id
            )
    assert told, "fa is here"
