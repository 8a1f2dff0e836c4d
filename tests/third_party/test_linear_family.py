"""A stranger's package brings linear attention: the adapter of docs/adapters.md, in a package from the template."""

from __future__ import annotations

import re
from collections.abc import Callable

from .conftest import ROOT, Fresh

SECTION = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8").partition("## Linear attention\n")[2]
KERNEL, ADAPTER = re.findall(r"^```python\n(.*?)^```$", SECTION, re.M | re.S)
CALLS = """
import torch
import polyattn
from polyattn import linear_attention
from polyattn.semantics.reference import gated_delta_rule

torch.manual_seed(0)
B, S, H, H_v, D, D_v = 3, 7, 2, 4, 16, 12
q, k = (torch.nn.functional.normalize(torch.randn(B, S, H, D), dim=-1) for _ in range(2))
v, state = torch.randn(B, S, H_v, D_v), torch.randn(B, H_v, D, D_v)
gate, beta = -torch.rand(B, S, H_v), torch.rand(B, S, H_v)
given = {"gate": gate, "beta": beta, "state": state}
right, last = gated_delta_rule(q, k, v, **given)


def near(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


for run in (linear_attention, torch.compile(linear_attention, backend="aot_eager", fullgraph=True)):
    for found, wanted in zip(run(q, k, v, **given, backend="acme"), (right, last)):
        near(found, wanted)
pool, slots = torch.zeros(5, H_v, D, D_v), torch.tensor([4, 0, 2])
pool[slots] = state
out, after = linear_attention(q, k, v, **{**given, "state": pool}, state_slots=slots, backend="acme")
assert after is pool
near(out, right)
near(pool[slots], last)
parents = torch.tensor([[-1, 0, 0, 1, 2, 2, 5]]).expand(B, S)
tree, states = linear_attention(q, k, v, **given, every_state=True, parents=parents, backend="acme")
for found, wanted in zip((tree, states), gated_delta_rule(q, k, v, **given, every_state=True, parents=parents)):
    near(found, wanted)
said = str(polyattn.explain(linear_attention, q, k, v, **given, every_state=True, parents=parents, backend="acme"))
assert "acme" in said and "draft_by_draft" in said, said
print("all calls are served")
"""


def test_a_package_brings_linear_attention(fresh: Callable[..., Fresh]) -> None:
    made = fresh()
    made.run(f'python3 -m venv .venv && . .venv/bin/activate && python -m pip install -q "{made.core}[cli,testing]"')
    made.run("polyattn new-plugin acme")
    folder = made.folder / "polyattn-acme" / "src" / "polyattn_acme"
    adapter, _, rows = ADAPTER.partition("\nLINEAR_ROWS = ")
    head = "import torch\n\nfrom polyattn.contract import Bound\n\n\n"
    (folder / "kernel.py").write_text(f"{head}{KERNEL}\n\n{adapter.replace('LinearAdapter', 'Adapter')}")
    plugin = (folder / "plugin.py").read_text()
    before, _, rest = plugin.partition("ROWS = (\n")
    (folder / "plugin.py").write_text(f"{before}ROWS = {rows}\n{rest.partition(chr(10) + ')' + chr(10))[2]}")
    made.run("python -m pip install -q -e ./polyattn-acme")
    (made.folder / "calls.py").write_text(CALLS)
    assert "all calls are served" in made.run("python -W error calls.py")
    report = made.run("polyattn conform acme --quick")
    assert "\nok, " in report
    assert "(linear)" in report
