"""What a stranger does with a device that torch and polyattn have never heard of: `python on_the_board.py LIBRARY`."""

import sys
import types

import pytest
import torch

import polyattn
from polyattn.selection.inspection import list_backends
from polyattn.testing import run

torch.ops.load_library(sys.argv[1])
torch.utils.rename_privateuse1_backend("acme")
module = types.ModuleType("torch.acme")
module.is_available = lambda: True
module.device_count = lambda: 1
module.current_device = lambda: 0
module.get_device_name = lambda device=None: "Acme board"
torch._register_device_module("acme", module)

# Discovered: by its entry point, with its platform.
(found,) = list_backends("acme")
assert (found.name, found.package, found.status) == ("acme", "polyattn-acme", "available"), found

# Selected: by itself, for tensors of the device, with reasons for what it does not take.
query = torch.randn(1, 7, 4, 64).to("acme")
key = torch.randn(1, 30, 4, 64).to("acme")
chosen = polyattn.explain(polyattn.attention, query, key, key, causal=True)
assert (chosen.backend, chosen.request.platform, chosen.request.arch) == ("acme", "acme", "b1"), chosen
out = polyattn.attention(query, key, key, causal=True)
assert (out.device.type, type(out)) == ("acme", torch.Tensor)
expected = polyattn.attention(query.cpu(), key.cpu(), key.cpu(), causal=True, backend="reference")
torch.testing.assert_close(out.cpu(), expected)
with pytest.raises(polyattn.UnsupportedRequestError) as refused:
    polyattn.attention(query, key, key, softcap=30.0)
assert refused.value.rejected["acme"] == ["softcap=30.0 is not declared"]

# Conforming: on the device, gates included.
report = run("acme", device="acme", level="quick", per_row=2, dtypes=("float32", "bfloat16"))
print(report)
assert report.ok, report
assert (report.platform, report.device) == ("acme", "Acme board")
assert report.passed > 5, report
assert report.refused > 50, report
