"""The package that `polyattn new-plugin` writes, in this process: it loads lazily, and does what its records declare.

tests/third_party builds it, installs it and follows docs/add-a-backend.md with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import polyattn
from polyattn.cli.new_plugin import check_name, write_package
from polyattn.contract import Accepted, AttentionRequest, judge
from polyattn.registry.manager import PluginManager, reset_manager

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginManager]:
    """A new package on the path, with the metadata that an installer would write from its pyproject.toml."""
    folder = tmp_path / "polyattn-acme"
    write_package(folder, check_name("acme", "cpu"), "cpu")
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / "src" / f"polyattn_acme-{project['version']}.dist-info"
    info.mkdir()
    needs = "".join(f"Requires-Dist: {text}\n" for text in project["dependencies"])
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head + needs)
    entries = project["entry-points"]["polyattn.backends"]
    lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
    (info / "entry_points.txt").write_text(f"[polyattn.backends]\n{lines}")
    monkeypatch.syspath_prepend(folder / "src")
    manager = PluginManager({"POLYATTN_PLUGINS": "acme"}, polyattn.__version__).load()
    reset_manager(manager)
    yield manager
    for name in [name for name in sys.modules if name.split(".")[0] == "polyattn_acme"]:
        del sys.modules[name]
    reset_manager()


def test_it_is_found_and_nothing_of_the_kernel_is_imported(acme):
    report = acme.plugins["acme"]
    assert (report.state, report.reason, report.backends) == ("ready", "", ("acme@cpu",))
    assert report.label == "acme (polyattn-acme 0.1.0)"
    assert "polyattn_acme.kernel" not in sys.modules
    assert polyattn.explain(AttentionRequest(dtype="float32"), backend="acme").backend == "acme"
    assert "polyattn_acme.kernel" not in sys.modules, "explaining runs nothing"


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("s_q, s_k", [(1, 1), (1, 200), (65, 65), (64, 129), (7, 130)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_what_it_declares_is_right(acme, s_q, s_k, causal, dtype, layout):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, s, 3, 32).to(dtype) for s in (s_q, s_k, s_k))
    if layout == "BHSD":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    call = {"causal": causal, "scale": 0.3, "layout": layout}
    out, lse = polyattn.attention(q, k, v, backend="acme", return_lse=True, **call)
    exact, exact_lse = polyattn.attention(
        q.double(), k.double(), v.double(), backend="reference", return_lse=True, **call
    )
    torch.testing.assert_close(out, exact.to(dtype))
    torch.testing.assert_close(lse, exact_lse.float())
    into = torch.empty_like(out)
    assert polyattn.attention(q, k, v, backend="acme", out=into, **call) is into
    assert torch.equal(into, out)


@pytest.mark.parametrize(
    "change",
    [
        {"s_relation": "more"},
        {"heads": 4, "kv_heads": 2},
        {"grad": ("query",)},
        {"causal": "top_left"},
        {"softcap": 30.0},
        {"head_dim": 60},
    ],
    ids=str,
)
def test_what_its_row_leaves_out_is_not_declared(acme, change):
    (provider,) = acme.backends["acme", "cpu"].providers
    plain = {"dtype": "float32", "head_dim": 64, "s_relation": "fewer"}
    assert isinstance(judge(provider.rows, AttentionRequest(**plain)), Accepted)
    assert not judge(provider.rows, AttentionRequest(**{**plain, **change}))
