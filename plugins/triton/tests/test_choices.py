"""The tuning store and the device, as the launchers over caches ask for them."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polyattn import tuning
from polyattn.testing.families.cached import in_tables
from polyattn.tuning import current
from polyattn_triton import runtime
from polyattn_triton.kernels import choices, decode, extend, latent
from polyattn_triton.records.tuned import DECODE, EXTEND, LATENT

CPU = torch.device("cpu")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("POLYATTN_TUNING_STORE", str(tmp_path / "tuning.sqlite3"))
    monkeypatch.setenv("POLYATTN_TUNING", "use")
    tuning.reload()
    yield
    monkeypatch.undo()
    tuning.reload()


def _recorded(kernel: tuning.Kernel, key: tuple[Any, ...], **measured: Any) -> dict[str, Any]:
    """As if a tuner had found `measured` to be the best, beside the first of each other choice."""
    value = {name: allowed[0] for name, allowed in kernel.choices.items()} | measured
    place = tuning.place_of(CPU, kernel.versions, kernel.revision)
    tuning.record(
        tuning.Row(place, kernel.subject, kernel.named(key), value, 12.5, "2026-01-02T00:00:00+00:00", "a test")
    )
    return value


def _decode() -> decode.Config:
    return decode.config_for(CPU, BF16, 16, (128, 64), 4, choices.EPOCH.value)


def _extend() -> extend.Config:
    query, keys, values = (
        torch.empty(8, 4, 128, dtype=BF16),
        *(torch.empty(1, 16, 4, w, dtype=BF16) for w in (128, 64)),
    )
    return extend.config_for(query, keys, values, 256, page_size=16)


def _latent() -> latent.Config:
    return latent.config_for(CPU, BF16, (512, 64), 16)


ASKED = [
    pytest.param(DECODE, ("bfloat16", 16, 128, 64, 16), _decode, {"N": 64, "warps": 8}, id="decode"),
    pytest.param(
        EXTEND, ("bfloat16", 16, 128, 64, 16, True, "", False), _extend, {"M": 64, "split": True}, id="extend"
    ),
    pytest.param(LATENT, ("bfloat16", 512, 64, 16, False), _latent, {"keys": 64, "stages": 3}, id="latent"),
]


@pytest.mark.parametrize(("kernel", "key", "ask", "measured"), ASKED)
def test_what_was_measured_takes_the_place_of_the_table(kernel: Any, key: Any, ask: Any, measured: Any) -> None:
    default = ask()
    # Another shape changes nothing.
    _recorded(kernel, (*key[:1], *(n * 2 for n in key[1:3]), *key[3:]))
    assert ask() == default
    value = _recorded(kernel, key, **measured)
    assert ask() == default._replace(**value) != default


@pytest.mark.parametrize(("kernel", "key", "ask", "measured"), ASKED)
def test_the_store_is_asked_once(
    kernel: Any, key: Any, ask: Any, measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    real = choices.kernel_config
    monkeypatch.setattr(choices, "kernel_config", lambda *a: asked.append(a[0].name) or real(*a))
    choices.EPOCH.value += 1
    for _ in range(3):
        ask()
    assert asked == [kernel.name]
    tuning.reload()
    ask()
    assert asked == [kernel.name] * 2, "the store may have something else to say"


def test_every_entry_of_the_tables_is_a_choice() -> None:
    for config in {c for pair in extend._CONFIGS.values() for c in pair} | {*extend._MASKED.values()}:
        EXTEND.check({name: getattr(config, name) for name in EXTEND.choices})
    for kind, configs in latent._TABLE.items():
        if kind != "interpreter":
            for config in configs:
                LATENT.check({name: getattr(config, name) for name in LATENT.choices})
    for warps, stages, resident, shortest in decode._CONFIGS.values():
        DECODE.check({"N": 64, "warps": warps, "stages": stages, "resident": resident, "least": shortest})


def test_a_measurement_cannot_ask_for_too_few_keys() -> None:
    """`cached.least`: fewer would be multiplied wrongly."""
    _recorded(DECODE, ("bfloat16", 4, 128, 128, 16), N=16)
    assert decode.config_for(CPU, BF16, 4, (128, 128), 4, choices.EPOCH.value).N == 64


def test_nothing_of_a_batch_is_in_a_key() -> None:
    for kernel in (DECODE, EXTEND, LATENT):
        assert not {"sequences", "k_bucket", "tokens", "max_seqlen_k"} & set(kernel.key)


# ------------------------------------------------------------------------------------------------------------- device


class _Elsewhere:
    device = torch.device("cuda", 1)


def test_launches_are_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    now, entered = [0], []

    class Index:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)

        def __exit__(self, *_: object) -> None:
            entered.append(-1)

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: now[0])
    monkeypatch.setattr(torch.accelerator, "device_index", Index)
    with runtime.device_of(_Elsewhere()):  # type: ignore[arg-type]
        assert entered == [1]
    assert entered == [1, -1]
    now[0] = 1
    with runtime.device_of(_Elsewhere()), runtime.device_of(torch.empty(0)):  # type: ignore[arg-type]
        assert entered == [1, -1], "where it is already, nothing is switched"


def test_every_launcher_switches_to_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are replaced: what is asked is the order."""
    from polyattn_triton.kernels import merge, splits

    order: list[str] = []

    class Switch:
        def __enter__(self) -> None:
            order.append("device")

        def __exit__(self, *_: object) -> None:
            order.append("back")

    class Kernel:
        def __getitem__(self, grid: object) -> Any:
            return lambda *args, **kwargs: order.append("launch")

    def pretend(module: Any, kernel: str) -> None:
        monkeypatch.setattr(module, kernel, Kernel())
        if hasattr(module, "device_of"):
            monkeypatch.setattr(module, "device_of", lambda tensor: Switch())

    monkeypatch.setattr(runtime, "device_of", lambda tensor: Switch())
    for module, kernel in ((decode, "_decode"), (splits, "_share_out"), (extend, "_extend"), (merge, "_merge")):
        pretend(module, kernel)
    for kernel in ("_attend", "_plan", "_merge"):
        pretend(latent, kernel)
    caches = torch.empty(2, 4, 16, 1, 16, dtype=BF16)
    tables: dict[str, Any] = {
        "page_table": torch.zeros(1, 2, dtype=torch.int32),
        "seq_lens": torch.ones(1, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
    }
    query = torch.empty(1, 2, 16, dtype=BF16)
    sizes = {"max_seqlen_q": 1, "max_seqlen_k": 20, "page_size": 16, "hnd": False, "causal": True, "scale": 1.0}
    for launcher in (decode.decode, extend.extend):
        launcher(query, caches[0], caches[1], **in_tables(**tables, **sizes), out=torch.empty_like(query))
    merge.merge(torch.empty(2, 1, 2, 16), torch.empty(2, 1, 2), out=torch.empty_like(query))
    launch = latent.launch_for(CPU, BF16, 2, (16, 0), 1, 1, 20)
    latent.plan(launch, tables["seq_lens"], tables["cu_seqlens_q"], causal=True, out=torch.empty(99, dtype=torch.int32))
    assert order == ["device", "launch", "back"] * (len(order) // 3)
    assert order.count("launch") == 5


def test_what_launches_runs_on_the_device_of_its_first_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []

    @contextlib.contextmanager
    def switched(tensor: torch.Tensor) -> Iterator[None]:
        order.append(tensor)
        yield
        order.append("back")

    @runtime.on_its_device
    def launch(query: torch.Tensor, /, *rest: int, scale: float) -> float:
        order.append((query, *rest))
        return scale

    monkeypatch.setattr(runtime, "device_of", switched)
    query = torch.empty(0)
    assert launch(query, 7, scale=0.5) == 0.5
    assert order == [query, (query, 7), "back"]


def _unplaced(node: ast.AST, placed: bool = False) -> Iterator[int]:
    """Lines with launches, `kernel[grid](...)`, on what device happens to be the current one."""
    if isinstance(node, ast.With):
        placed = placed or any("device_of(" in ast.unparse(item) for item in node.items)
    if isinstance(node, ast.FunctionDef):
        decorators = " ".join(map(ast.unparse, node.decorator_list))
        if "jit" in decorators:
            return
        placed = placed or "on_its_device" in decorators
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and not placed:
        yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from _unplaced(child, placed)


def test_no_kernel_is_launched_on_what_device_happens_to_be_current() -> None:
    assert list(_unplaced(ast.parse("def f(q):\n  kernel[(1,)](q)"))) == [2]
    package = Path(runtime.__file__).parent
    files = {str(path.relative_to(package)): ast.parse(path.read_text("utf-8")) for path in package.rglob("*.py")}
    # `Repeated` asks for the device itself, which is cheaper.
    found = {name: lines for name, tree in files.items() if (lines := list(_unplaced(tree)))}
    assert list(found) == ["kernels/launching.py"], found


def test_the_store_of_the_process_is_the_one_that_is_asked() -> None:
    assert choices.kernel_config is current.kernel_config
