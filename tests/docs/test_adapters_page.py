"""docs/adapters.md: its five adapters are backends of a plugin here, and the conformance kit finds nothing wrong."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from polyattn import adapters
from polyattn.registry.evidence import read_evidence
from polyattn.registry.manager import PluginManager, get_manager, reset_manager
from polyattn.serving import (
    AttentionBackend,
    AttentionLayer,
    ForwardBatch,
    ForwardMode,
    KVCacheConfig,
    KVPool,
    Limits,
    PageAllocator,
    RequestTable,
)
from polyattn.testing import run

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
EXAMPLES = {"flash": "Flash", "paged": "Paged", "latent": "Latent", "block_sparse": "BlockSparse", "linear": "Linear"}
"""Name of the backend -> what the names of its adapter and rows begin with."""
CASES = 20
"""For each row and dtype."""
PLUGIN = """
from polyattn.contract import BackendInfo, Provider, hookimpl

import adapters_page.page as page

POLYATTN_API_VERSION = 2


@hookimpl
def polyattn_register_backends():
    for name, prefix in {examples}.items():
        rows = getattr(page, name.upper() + "_ROWS")
        provider = Provider("page", rows, target=f"adapters_page.page:{{prefix}}Adapter")
        yield BackendInfo("page_" + name, "cpu", (provider,), summary="an example of docs/adapters.md")
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's code as a package, registered; its file."""
    folder = tmp_path / "adapters_page"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "page.py").write_text("\n\n".join(BLOCKS), encoding="utf-8")
    (folder / "plugin.py").write_text(PLUGIN.format(examples=EXAMPLES), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    kept = get_manager()
    reset_manager(PluginManager(kept.environ, kept.host_version))
    get_manager().register("adapters_page.plugin", "adapters_page")
    yield folder / "page.py"
    reset_manager(kept)
    read_evidence.cache_clear()
    for name in [name for name in sys.modules if name.startswith("adapters_page")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_conforms(page: Path, name: str) -> None:
    report = run(f"page_{name}", device="cpu", per_row=CASES)
    assert report.ok, report
    assert report.passed > CASES, "the kit tried what the row declares"


def test_the_session_serves_an_engines_steps(page: Path) -> None:
    """Extend and decode, with new rows written by the adapter: as by torch_native."""

    def steps(backend: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = AttentionLayer(0, heads=4, kv_heads=2, head_dim=16)
        pool = KVPool([layer], KVCacheConfig(page_size=4), pages=16, dtype=torch.float32)
        table = RequestTable(2, 32, 4, [-1], [PageAllocator(16)])
        limits = Limits(max_sequences=2, max_tokens=32, max_seqlen=32)
        attention = AttentionBackend([layer], pool, table, limits=limits, backend=backend)
        rows, found = [table.add(), table.add()], []
        for mode, new in ((ForwardMode.EXTEND, [7, 2]), (ForwardMode.DECODE, [1, 1])):
            for row, count in zip(rows, new, strict=True):
                table.extend(row, count)
            batch = ForwardBatch(mode, rows=rows, seq_lens=[table.length(row) for row in rows], query_lens=new)
            attention.init_forward_metadata(batch)
            q, k, v = (torch.randn(batch.tokens, heads, 16) for heads in (4, 2, 2))
            found.append(attention.forward(q, k, v, layer))
        assert {selection.backend for selection in attention.explain().values()} == {backend}
        return found

    for mine, right in zip(steps("page_paged"), steps("torch_native"), strict=True):
        torch.testing.assert_close(mine, right)


def test_a_wrong_example_does_not(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The LSE stays in base 2."""
    monkeypatch.setattr("adapters_page.page.natural", lambda out, lse: (out, lse))
    assert not run("page_block_sparse", device="cpu", per_row=CASES, dtypes=("float32",)).ok


def test_the_page_names_what_is_there() -> None:
    shown = PAGE.read_text(encoding="utf-8")
    imported = re.search(r"^from polyattn\.adapters import (.+)$", shown, re.M)
    assert imported is not None
    assert {*imported[1].split(", ")} <= {*adapters.__all__}
    table = re.findall(r"`(\w+)`", shown.partition("Every Python block")[0].partition("|---")[2])
    assert {*table} - {"library"} <= {*adapters.__all__}
