"""Peers are plugins of the benchmark: how they are found, and that the committed ones refuse what they would drop."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from polyattn.bench import Row
from polyattn.bench.measure import check, make_inputs
from polyattn.bench.peers import load, named, versions_of
from polyattn.bench.workloads import workload
from polyattn.errors import ConfigError, UnsupportedRequestError

PEERS = str(Path(__file__).parents[2] / "benchmarks" / "peers")
CPU = torch.device("cpu")
LISTED = "from polyattn.bench import Peer\n"


@pytest.fixture(scope="module")
def peers():
    return load([PEERS])


@pytest.fixture
def folder(tmp_path):
    def write(name, text):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        return str(tmp_path / name)

    return write


def test_targets_are_files_beside_the_list_and_nothing_is_imported(peers):
    assert "sdpa" in peers
    for peer in peers.values():
        module, _, function = peer.target.partition(":")
        text = (Path(PEERS) / f"{module.lstrip('.')}.py").read_text()
        assert f"\ndef {function}(inputs: Inputs) -> Call:" in text
        assert peer.library


def test_peers_are_selected_by_name(peers):
    assert named(peers, ["fa3", "sdpa_*"], "--peer") == ["sdpa_cudnn", "sdpa_flash", "sdpa_gathered", "fa3"]
    with pytest.raises(ConfigError, match=r"--peer 'fa5' names none\. Did you mean 'fla' or 'fa4'\? There are: sdpa, "):
        named(peers, ["fa5"], "--peer")


def test_versions_are_of_what_is_here(peers):
    one = dataclasses.replace(peers["sdpa"], distributions=("torch", "no-such-distribution"))
    # The wheel that PyPI has says which CUDA it is built for in the module alone.
    assert versions_of({"one": one}) in ({"torch": torch.__version__}, {"torch": Version(torch.__version__).public})


def test_places_that_list_no_peers_are_refused(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for place, said in (
        (str(tmp_path / "empty"), r"the folder has no __init__\.py that lists PEERS"),
        (folder("nothing", ""), "PEERS must be a mapping of names to polyattn.bench.Peer"),
        (folder("else", "PEERS = {'a': 3}"), "PEERS must be a mapping"),
        (folder("numbers", f"{LISTED}PEERS = {{3: Peer('.one:call', 'a library')}}"), "PEERS must be a mapping"),
        (".relative", "it raises TypeError when it is imported: the 'package' argument is required"),
        ("no_such_module_of_peers", "neither a folder nor a module that can be imported"),
    ):
        with pytest.raises(ConfigError, match=said):
            load([place])
    one = f"{LISTED}PEERS = {{'sdpa': Peer('.one:call', 'a library')}}\n"
    with pytest.raises(ConfigError, match="'sdpa' is taken, or has a slash in it"):
        load([PEERS, folder("again", one)])


@pytest.mark.parametrize(
    "text, cause",
    [
        ("import no_such_library", ModuleNotFoundError),
        ("from polyattn.bench import no_such_name", ImportError),
        ("PEERS = {", SyntaxError),
        ("raise KeyError('of the library')", KeyError),
    ],
)
@pytest.mark.parametrize("as_module", [False, True])
def test_a_broken_list_of_peers_says_what_broke(folder, tmp_path, monkeypatch, text, cause, as_module):
    place = folder("broken_peers", text)
    if as_module:
        monkeypatch.syspath_prepend(tmp_path)
        place = "broken_peers"
    before = set(sys.modules)
    said = rf"--peers .*broken_peers: it raises {cause.__name__} when it is imported: .*\. Repair it, or leave it out; "
    with pytest.raises(ConfigError, match=said) as caught:
        load([place])
    assert type(caught.value.__cause__) is cause
    assert "broken_peers" not in "".join(set(sys.modules) - before), "what is half imported is not kept"


# ------------------------------------------------------------------------------------------------------------- torch's

DENSE = Row(family="f", kind="dense", heads=4, kv_heads=2, head_dim=64, batch=2, q_len=72)
PAGED = Row(family="f", kind="paged", heads=4, kv_heads=2, head_dim=64, batch=2, q_len=1, kv_len=56, page_size=16)


def right(peer, row):
    inputs = make_inputs(workload(row, CPU), CPU)
    verdict = check(inputs, peer.prepare(inputs)(0))
    return verdict.ok, verdict.reason


@pytest.mark.parametrize(
    "row",
    [
        DENSE,
        dataclasses.replace(DENSE, causal=False, kv_len=40),
        dataclasses.replace(DENSE, kind="training"),
    ],
    ids=["causal", "cross", "training"],
)
def test_sdpa_serves_dense_rows(peers, row):
    assert right(peers["sdpa"], row) == (True, "")


@pytest.mark.parametrize("row", [PAGED, dataclasses.replace(PAGED, q_len=5), dataclasses.replace(PAGED, shared=16)])
def test_sdpa_serves_pages_that_it_gathered(peers, row):
    assert right(peers["sdpa_gathered"], row) == (True, "")


@pytest.mark.parametrize(
    "name, row, said",
    [
        ("sdpa", dataclasses.replace(DENSE, window=(15, 0)), "called here without window"),
        ("sdpa", dataclasses.replace(DENSE, sinks=True, softcap=20.0), "called here without softcap, sinks"),
        ("sdpa", PAGED, "takes dense rows, this one is paged"),
        ("sdpa", dataclasses.replace(DENSE, kv_len=96), "torch's causal mask begins at the top left"),
        ("sdpa_gathered", dataclasses.replace(PAGED, kv_dtype="fp8_e4m3"), "called here without kv_dtype, kv_scales"),
        ("sdpa_gathered", dataclasses.replace(PAGED, q_len=8, tree=True), "called here without mask, tree, spec_topk"),
        ("flex_attention", dataclasses.replace(DENSE, sinks=True), "called here without sinks"),
    ],
)
def test_what_a_peer_would_drop_it_refuses(peers, name, row, said):
    inputs = make_inputs(workload(row, CPU), CPU)
    with pytest.raises(UnsupportedRequestError) as caught:
        peers[name].prepare(inputs)
    assert said in str(caught.value)
