"""Whose kernels a backend's providers have, by what its aliases tell apart."""

from __future__ import annotations

import dataclasses

import pytest

from polyattn.contract import Alias, AttentionRequest, BackendInfo, Provider, row
from polyattn.errors import BackendUnavailableError
from polyattn.registry.lost_aliases import lost_aliases
from polyattn.registry.manager import get_manager
from polyattn.selection.aliases import is_of, kind_of, kinds_here, resolve
from polyattn.selection.inspection import catalogue, served_by
from polyattn.selection.select import Choice, Policy, select


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


def test_the_kernels_of_one_library_can_be_named():
    here, cuda = catalogue(), AttentionRequest(platform="cuda", arch="sm90")
    offer, kind, name = resolve("fa/fa4", cuda, here)
    assert (offer.info.id, kind, name) == ("fa@cuda", "fa4", "fa")
    assert resolve("fa/fa4@cuda", cuda, here)[1:] == ("fa4", "fa")
    assert resolve("fa/fa4", AttentionRequest(platform="cpu"), here) == (None, "", "fa")
    for given, said in (
        ("fa/fa5", "backend 'fa/fa5', asked for by a test: fa has none of 'fa5'; its kernels are those of fa3, fa4"),
        ("fa/", "no backend is named"),
        ("triton/x", "triton has none of 'x'; its kernels are of one library"),
        ("fa4/flash-attn-4", "fa4 has none of 'flash-attn-4'; its kernels are of one library"),
        ("tokenspeed_mla/x", "tokenspeed_mla has none of 'x'; its kernels are of one library"),
    ):
        with pytest.raises(BackendUnavailableError, match=said):
            resolve(given, cuda, here, "a test")


def test_libraries_that_are_not_here_or_not_shown_to_work_have_no_kernels():
    (offer,) = (one for one in catalogue().offers if one.info.id == "fa@cuda")
    shown = dataclasses.replace(offer, missing={}, evidence="hardware", levels={})
    assert kinds_here(shown) == ["fa3", "fa4", "fa2"]
    assert kinds_here(dataclasses.replace(shown, missing={"fa4/flash-attn-4": "it is not installed"})) == ["fa3", "fa2"]
    declared = dataclasses.replace(shown, levels={"fa2/flash-attn": "declared"})
    assert kinds_here(declared) == ["fa3", "fa4"]
    assert kinds_here(declared, by_name=True) == ["fa3", "fa4", "fa2"]


def test_who_serves_is_said_so_that_it_can_be_asked_for():
    request = AttentionRequest(platform="cuda", arch="sm90", head_dim=64, heads=8, kv_heads=8)
    here = catalogue({"vllm": "0.33.0", "flash-attn-4": "4.0", "torch": "2.11.0"})
    for asked, said in (("fa", "fa/fa3@cuda"), ("fa/fa4", "fa/fa4@cuda"), ("torch_sdpa", "torch_sdpa@cuda")):
        found = select(request, here, Policy(Choice(asked, "a test")))
        assert served_by(found) == said
        again = select(request, here, Policy(Choice(said, "a test")))
        assert (again.backend, again.provider) == (found.backend, found.provider)


@pytest.mark.parametrize(
    "platform, families, plugin, said",
    [
        ("cpu", (), "theirs", "of plugin theirs has it as its name. Rename the alias"),
        ("cpu", ("dense",), "theirs", "of plugin theirs has it as its name. Rename the alias"),
        ("cpu", (), "mine", "has it as its name in every family. Give the alias its families, or rename it"),
        ("cpu", ("dense",), "mine", ""),  # what its own plugin means by it there
        ("npu", (), "theirs", ""),  # a name is a backend's on its platform
    ],
)
def test_an_alias_that_another_backend_has_as_its_name_is_told(platform, families, plugin, said):
    provider = (Provider("own", (row(family="dense"),), "x:Y"),)
    one = BackendInfo("one", "cpu", provider, "a summary", aliases=(Alias("other", families), Alias("one")))
    other = BackendInfo("other", platform, provider, "a summary")
    found = lost_aliases([other, one], lambda info: plugin if info is other else "mine")
    start = f"plugin mine: the alias 'other' of one@cpu means nothing, because other@{platform} "
    assert found == ([start + said] if said else [])


def test_no_alias_here_is_lost():
    manager = get_manager()
    assert lost_aliases(manager.backends.values(), lambda info: manager.owner(info).name) == []
