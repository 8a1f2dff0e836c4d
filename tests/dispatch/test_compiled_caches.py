"""`paged_attention` and `mla_attention` in one graph: each is an op that makes the eager call when the graph runs."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental import _config as shapes
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import polyattn
from polyattn.contract import AttentionRequest
from polyattn.contract.families import FAMILY_SPECS, Argument
from polyattn.dispatch import paged as calls
from polyattn.errors import BackendUnavailableError, InvalidInputError, UnsupportedRequestError

H, HK, D, WIDE, LATENT, PAGE, PAGES = 4, 2, 16, 24, 16, 4, 8


def int32(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def step(keys: tuple[int, ...] = (5, 7), new: tuple[int, ...] = (2, 3)) -> dict[str, Any]:
    """The queries and tables of a step: each sequence has pages of its own."""
    generator = torch.Generator().manual_seed(sum(keys) + 100 * sum(new))
    pages = torch.arange(PAGES - PAGES % len(keys), dtype=torch.int32).flip(0).view(len(keys), -1)
    return {
        "query": torch.randn(sum(new), H, D, generator=generator),
        "page_table": pages.contiguous(),
        "seq_lens": int32(*keys),
        "cu_seqlens_q": int32(0, *torch.tensor(new).cumsum(0).tolist()),
        "max_seqlen_q": max(new),
        "max_seqlen_k": max(keys),
    }


def paged(*lengths: Any, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    pools = {n: torch.randn(PAGES, PAGE, HK, D, generator=generator) for n in ("key_cache", "value_cache")}
    return {**step(*lengths), **pools, **changes}


def rows(count: int = 5) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    return {n: torch.randn(count, HK, D, generator=generator) for n in ("key", "value")}


def latent(*lengths: Any, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(6)
    given = step(*lengths)
    given["query"] = torch.randn(given["query"].shape[0], H, WIDE, generator=generator)
    cache = torch.randn(PAGES, PAGE, WIDE, generator=generator)
    return {**given, "cache": cache, "scale": 0.2, "v_head_dim": LATENT, **changes}


def part(**pools: Any) -> polyattn.KVPart:
    """Five more keys that all queries of a step see."""
    return polyattn.KVPart(int32([6, 7]), int32(5), int32(0, 5), 5, 5, **pools)


def heads_first() -> dict[str, Any]:
    given = paged(kv_layout="HND")
    return {**given, **{n: given[n].transpose(1, 2).contiguous() for n in ("key_cache", "value_cache")}}


def quantised() -> dict[str, Any]:
    given = paged(k_scale=torch.tensor([0.5, 0.25]), v_scale=torch.tensor([2.0, 0.5]))
    return {**given, **{n: given[n].to(torch.float8_e4m3fn) for n in ("key_cache", "value_cache")}}


def packed_fp4() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(8)
    pools = torch.randint(0, 256, (2, PAGES, PAGE, HK, D // 2), generator=generator, dtype=torch.uint8)
    scales = torch.rand(2, PAGES, PAGE, HK, D // 16, generator=generator)
    return paged(key_cache=pools[0], value_cache=pools[1], k_scale=scales[0], v_scale=scales[1])


def narrow() -> dict[str, Any]:
    given = paged(scale=0.3)
    return {**given, "value_cache": given["value_cache"][..., :8].contiguous()}


MASK = torch.rand(2, 1, 3, 7, generator=torch.Generator().manual_seed(9)) > 0.3


def drafts() -> Tensor:
    """Of two and three drafts each sees itself, and all keys before them."""
    mask = torch.ones(2, 1, 3, 7, dtype=torch.bool)
    mask[0, 0, :2, 3:5], mask[1, 0, :, 4:] = torch.eye(2).bool(), torch.eye(3).bool()
    return mask


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "paged": paged,
    "decode": lambda: paged((5, 7), (1, 1)),
    "no queries": lambda: paged((0, 0), (0, 0), max_seqlen_q=1, max_seqlen_k=1),
    "heads first": heads_first,
    "values of another width": narrow,
    "saving": lambda: paged(**rows(), save_kv_cache=True),
    "new keys": lambda: paged(**rows()),
    "fp8": quantised,
    "fp4": packed_fp4,
    "float64": lambda: {n: t.double() if n in ("query", "key_cache", "value_cache") else t for n, t in paged().items()},
    "window": lambda: paged(window=(3, 0)),
    "window as a list": lambda: paged(window=[3, 0]),
    "softcap": lambda: paged(softcap=2.0, causal="top_left"),
    "sinks": lambda: paged(sinks=torch.linspace(-1, 1, H)),
    "mask": lambda: paged(attn_mask=MASK, causal=False),
    "chunk": lambda: paged(chunk=4),
    "alibi": lambda: paged(alibi=torch.linspace(0.1, 0.5, H)),
    "part": lambda: paged(kv_parts=[part()]),
    "parts": lambda: paged(kv_parts=(part(), part(**{n: paged()[n] * 2 for n in ("key_cache", "value_cache")}))),
    "tree": lambda: paged(attn_mask=drafts(), tree=True, causal=False),
    "chunked prefix": lambda: paged(chunked_prefix=True),
    "by name": lambda: paged(backend="reference"),
    "latent": latent,
    "latent decode": lambda: latent((5, 7), (1, 1)),
    "latent window": lambda: latent(window=(3, 0)),
    "latent mask": lambda: latent(attn_mask=MASK, causal=False),
    "latent part": lambda: latent(kv_parts=[part(), part(cache=latent()["cache"] * 2)]),
    "listed": lambda: latent(token_indices=int32([0, 1], [3, 0], [4, -1], [-1, -1], [6, 2])),
    "latent by name": lambda: latent(backend="reference"),
}


def call_of(given: dict[str, Any]) -> Callable[..., Any]:
    return polyattn.mla_attention if "cache" in given else polyattn.paged_attention


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {name: one.clone() if isinstance(one, Tensor) else one for name, one in given.items()}


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, **{"backend": "aot_eager", "fullgraph": True, **options})  # type: ignore[no-any-return]


def same_bits(found: Any, right: Any) -> None:
    assert isinstance(found, tuple) is isinstance(right, tuple)
    for one, other in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, right)), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_call_over_a_cache_is_one_graph_of_the_same_bits(case: str, return_lse: bool) -> None:
    given = {**CASES[case](), "return_lse": return_lse}
    eager, traced = copied(given), copied(given)
    call = call_of(given)
    same_bits(compiled(lambda **kw: call(**kw))(**traced), call(**eager))
    for name in ("key_cache", "value_cache", "cache"):
        if name in given and given[name].dtype.is_floating_point:
            assert torch.equal(traced[name].float(), eager[name].float())
            assert torch.equal(eager[name].float(), given[name].float()) is (case != "saving" or name == "cache")


@pytest.mark.parametrize("make", [paged, latent])
@pytest.mark.parametrize("return_lse", [False, True])
def test_out_is_written_and_returned(make: Any, return_lse: bool) -> None:
    given = make(return_lse=return_lse)
    call = call_of(given)
    right = call(**given)
    out = torch.full((5, H, LATENT), float("nan"))
    found = compiled(lambda **kw: call(**kw))(**given, out=out)
    same_bits(found, right)
    same_bits(out, right[0] if return_lse else right)


LENGTHS = [((5, 7), (2, 3)), ((9, 8), (4, 2)), ((3, 2, 6), (2, 2, 3)), ((8, 2, 7, 5), (5, 1, 2, 1))]


def saving(keys: tuple[int, ...], new: tuple[int, ...]) -> dict[str, Any]:
    return paged(keys, new, **rows(sum(new)), save_kv_cache=True)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("make", [paged, saving, latent])
def test_no_lengths_compile_anything_again(make: Any) -> None:
    """Neither contents, nor counts of sequences, queries and pages, nor the longest lengths."""
    run = compiled(lambda **given: call_of(given)(**given), dynamic=True)
    for number, lengths in enumerate(LENGTHS):
        given = make(*lengths)
        with torch._dynamo.config.patch(error_on_recompile=number > 0), shapes.patch(use_duck_shape=False):
            found = run(**copied(given))
        same_bits(found, call_of(given)(**copied(given)))


@pytest.mark.parametrize("make", [paged, latent])
def test_contents_of_tables_compile_nothing_again(make: Any) -> None:
    """Decode: nothing but the lengths in `seq_lens` grows, below a bound of the longest."""
    run = compiled(lambda **given: call_of(given)(**given))
    for number in range(4):
        given = make((3 + number, 5 + 2 * number), (1, 1), max_seqlen_k=16)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            same_bits(run(**given), call_of(given)(**given))


def test_caches_that_are_halves_of_one_tensor_are_written_in_place() -> None:
    given = {**paged(), **rows(), "save_kv_cache": True}
    pool = torch.stack([given.pop("key_cache"), given.pop("value_cache")])
    pools = [pool.clone(), pool.clone()]

    def call(pool: Tensor) -> Tensor:
        keys, values = pool.unbind(0)
        out: Tensor = polyattn.paged_attention(key_cache=keys, value_cache=values, **given)
        return out + polyattn.paged_attention(key_cache=keys, value_cache=values, **{**given, "save_kv_cache": False})

    same_bits(compiled(call)(pools[0]), call(pools[1]))
    same_bits(*pools)
    assert not torch.equal(pools[0], pool)


def test_a_part_in_the_call_s_own_caches_sees_what_the_call_writes() -> None:
    """Whether its caches are left out or given once more."""
    given = paged(**rows(), save_kv_cache=True)
    pools = {n: given.pop(n) for n in ("key_cache", "value_cache")}
    written = polyattn.KVPart(given["page_table"][:1, 1:2], int32(1), int32(0, 5), 5, 5)

    def call(again: bool, pools: dict[str, Tensor]) -> Any:
        return polyattn.paged_attention(**pools, **given, kv_parts=[written._replace(**pools) if again else written])

    wanted = call(False, copied(pools))
    for again in (False, True):
        mine = copied(pools)
        same_bits(call(again, copied(pools)), wanted)
        same_bits(compiled(call)(again, mine), wanted)
        assert not torch.equal(mine["key_cache"], pools["key_cache"])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[AttentionRequest, Any, Any, str]]:
    """What calls ask for: (request, the backend that is named, the scope, who serves)."""
    found: list[tuple[AttentionRequest, Any, Any, str]] = []
    remembered = calls.remembered

    def watched(request: Any, backend: Any, scope: Any, epoch: Any) -> Any:
        chosen = remembered(request, backend, scope, epoch)
        found.append((request, backend, scope, chosen.selection.backend))
        return chosen

    monkeypatch.setattr(calls, "remembered", watched)
    return found


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("case", CASES)
def test_a_graph_asks_for_what_the_eager_call_asks_for(case: str, asked: list[Any]) -> None:
    given = CASES[case]()
    call = call_of(given)
    with polyattn.component("decoder"):
        call(**copied(given))
        run = compiled(lambda **kw: call(**kw))
        run(**copied(given))
    assert len(asked) == 2
    assert asked[0] == asked[1]


def test_scopes_hold_around_and_inside_of_a_graph(asked: list[Any]) -> None:
    given = paged()

    def call(**given: Any) -> Any:
        with polyattn.use_backend("reference"):
            inside = polyattn.paged_attention(**given)
        return inside, polyattn.paged_attention(**given)

    run = compiled(call)
    run(**given)
    with polyattn.use_backend("torch_native"):
        run(**given)
    assert [scope[0] for _, _, scope, _ in asked] == ["reference", "", "reference", "torch_native"]


def test_settings_of_later_reach_a_graph(asked: list[Any]) -> None:
    given = paged()
    run = compiled(lambda **kw: polyattn.paged_attention(**kw))
    run(**given)
    with polyattn.global_force_attn_backend_context_manager("reference"):
        run(**given)
    assert [one[-1] for one in asked] == ["torch_native", "reference"]


@pytest.mark.parametrize("make", [paged, latent])
@pytest.mark.parametrize("backend", ["reference", "torch_native"])
def test_autocast_changes_no_bit(make: Any, backend: str) -> None:
    given = make(backend=backend)
    call = call_of(given)
    right = call(**given)

    def within(**given: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(**given)

    same_bits(within(**given), right)
    same_bits(compiled(within)(**given), right)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same_bits(compiled(lambda **kw: call(**kw), backend="eager")(**given), right)


WRONG: list[tuple[str, Callable[[], dict[str, Any]], type[Exception], str]] = [
    (
        "gradient",
        lambda: paged(query=torch.ones(5, H, D, requires_grad=True)),
        InvalidInputError,
        "inference only; run",
    ),
    ("sinks", lambda: paged(sinks=torch.ones(H, requires_grad=True)), InvalidInputError, "inference only; run"),
    ("latent", lambda: latent(cache=latent()["cache"].requires_grad_()), InvalidInputError, "inference only; run"),
    ("query", lambda: paged(query=3), InvalidInputError, "^query of a compiled call over a cache must be a tensor"),
    ("table", lambda: latent(seq_lens=None), InvalidInputError, "^seq_lens of a compiled call .* must be a tensor"),
    ("scales", lambda: paged(k_scale=2.0, v_scale=2.0), InvalidInputError, "^k_scale of a compiled call"),
    ("parts", lambda: paged(kv_parts=None), InvalidInputError, "^kv_parts of .* a list of polyattn.KVPart"),
    ("part", lambda: paged(kv_parts=[3]), InvalidInputError, "^kv_parts of .* a list of polyattn.KVPart"),
    ("out", lambda: paged(out=torch.ones(5, H, 8)), InvalidInputError, r"^out must be \[T_q, H_q, D_v\]"),
    ("out dtype", lambda: latent(out=torch.ones(5, H, LATENT).half()), InvalidInputError, "^out must be .* dtype"),
    ("out twice", lambda: paged(out=torch.ones(1, H, D).expand(5, H, D)), InvalidInputError, "not expanded"),
    ("static", lambda: paged(softcap=-1.0), InvalidInputError, "softcap=-1"),
    ("backend", lambda: latent(backend=3), InvalidInputError, "backend=3 is a int"),
]
LATER: list[tuple[str, Callable[[], dict[str, Any]], type[Exception], str]] = [
    ("layout", lambda: paged(kv_layout="NZ"), InvalidInputError, "kv_layout='NZ' must be NHD or HND"),
    ("page", lambda: paged(page_table=int32([0, 1], [2, 99])), InvalidInputError, "page_table"),
    ("lengths", lambda: latent(max_seqlen_k=6), InvalidInputError, r"max_seqlen_k=6 is less than seq_lens\[1\]=7"),
    ("scale", lambda: latent(scale=None), InvalidInputError, "mla_attention needs an explicit scale"),
    ("unknown", lambda: paged(backend="nobody"), BackendUnavailableError, "nobody"),
    ("unsupported", lambda: latent(backend="flex_attention"), UnsupportedRequestError, "cannot serve mla"),
]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("make", "kind", "says"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_a_call_that_cannot_be_traced_says_so_while_it_is(make: Any, kind: Any, says: str) -> None:
    given = make()
    torch._dynamo.reset()
    run = torch.compile(lambda: call_of(given)(**given), backend="eager")
    with pytest.raises(kind, match=says):
        run()
    whole = compiled(lambda: call_of(given)(**given))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"it raises {kind.__name__}: .*{says.lstrip('^')}"):
        whole()


@pytest.mark.parametrize(("make", "kind", "says"), [case[1:] for case in LATER], ids=[case[0] for case in LATER])
def test_what_the_eager_call_refuses_is_refused_when_the_graph_runs(make: Any, kind: Any, says: str) -> None:
    given = make()
    call = call_of(given)
    with pytest.raises(kind, match=says) as eager:
        call(**given)
    with pytest.raises(kind, match=says) as found:
        compiled(lambda **kw: call(**kw))(**given)
    assert str(found.value) == str(eager.value)


def test_without_gradients_a_leaf_is_served() -> None:
    given = paged(query=torch.ones(5, H, D, requires_grad=True))
    run = compiled(lambda **kw: polyattn.paged_attention(**kw))
    with torch.no_grad():
        same_bits(run(**given), polyattn.paged_attention(**given))


def test_no_transform_looks_into_a_call_over_a_cache() -> None:
    given = paged()
    query = given.pop("query")

    def loss(query: Tensor) -> Tensor:
        return polyattn.paged_attention(query, **given).sum()  # type: ignore[no-any-return]

    for around, tensor in ((torch.func.grad, query), (torch.func.vmap, query[None])):
        torch._dynamo.reset()
        with pytest.raises(UnsupportedRequestError, match=rf"torch.func transform \({around.__name__}\)"):
            torch.compile(around(loss), backend="eager")(tensor)


class Paged(torch.nn.Module):
    def forward(self, **given: Any) -> Any:
        return polyattn.paged_attention(**given, max_seqlen_q=3, max_seqlen_k=16, return_lse=True)


class Latent(torch.nn.Module):
    def forward(self, **given: Any) -> Any:
        given["scale"], given["v_head_dim"] = 0.2, LATENT
        return polyattn.mla_attention(**given, max_seqlen_q=3, max_seqlen_k=16)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("family", ["paged", "mla"])
def test_an_exported_call_holds_the_op_and_is_saved(family: str, strict: bool) -> None:
    module: torch.nn.Module = Paged() if family == "paged" else Latent()
    given = paged() if family == "paged" else latent()
    given = {name: one for name, one in given.items() if isinstance(one, Tensor)}
    program = torch.export.export(module, (), given, strict=strict)
    assert any(node.target == getattr(torch.ops.polyattn, family).default for node in program.graph.nodes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    same_bits(torch.export.load(file).module()(**given), module(**given))


def declared(one: Argument) -> str:
    """The arguments of an op that stand for one of a family, in torch's words."""
    tables = "Tensor page_table, Tensor seq_lens, Tensor cu_seqlens_q, SymInt max_seqlen_q, SymInt max_seqlen_k"
    special = {"tables": tables, "parts": "Tensor?[] kv_parts, SymInt[] part_lengths"}
    return special.get(one.kind, f"{'Tensor?' if one.kind == 'optional' else 'Tensor'} {one.name}")


@pytest.mark.parametrize("family", ["paged", "mla"])
def test_the_ops_are_those_of_the_families(family: str) -> None:
    spec = FAMILY_SPECS[family]
    op = getattr(torch.ops.polyattn, family).default
    added = [f"{declared(one)}=None" for one in spec.added]
    given = ", ".join([*map(declared, spec.arguments), "str plan", *added])
    assert str(op._schema) == f"polyattn::{family}({given}) -> (Tensor, Tensor)"


def test_the_schemas_of_saved_graphs_stay() -> None:
    """Saved programs name these: a changed one could not be loaded any more. What is added gets a default."""
    tables = "Tensor page_table, Tensor seq_lens, Tensor cu_seqlens_q, SymInt max_seqlen_q, SymInt max_seqlen_k"
    optional = "Tensor? key, Tensor? value, Tensor? attn_mask, Tensor? sinks, Tensor? k_scale, Tensor? v_scale"
    rest = "Tensor?[] kv_parts, SymInt[] part_lengths, str plan"
    reads = f"{tables}, {optional}, {rest}, Tensor? alibi=None) -> (Tensor, Tensor)"
    ops = torch.ops.polyattn
    assert str(ops.paged.default._schema) == (
        f"polyattn::paged(Tensor query, Tensor key_cache, Tensor value_cache, {reads}"
    )
    assert str(ops.paged_saving.default._schema) == (
        f"polyattn::paged_saving(Tensor query, Tensor(a!) key_cache, Tensor(b!) value_cache, {reads}"
    )
    assert str(ops.mla.default._schema) == (
        f"polyattn::mla(Tensor query, Tensor cache, {tables}, Tensor? attn_mask, {rest}, Tensor? token_indices=None) "
        "-> (Tensor, Tensor)"
    )


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("case", ["paged", "saving", "parts", "alibi", "fp4", "latent", "listed", "latent part"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_opcheck(case: str, return_lse: bool) -> None:
    given = {**CASES[case](), "return_lse": return_lse}
    call = call_of(given)
    seen: list[Any] = []

    def keep(graph: torch.fx.GraphModule, example: Any) -> Any:
        def run(*inputs: Any) -> Any:
            values = dict(zip([n for n in graph.graph.nodes if n.op == "placeholder"], inputs, strict=True))
            (node,) = [n for n in graph.graph.nodes if "polyattn" in str(n.target)]
            seen.append((node.target, torch.fx.map_arg(node.args, values.__getitem__), dict(node.kwargs)))
            return graph(*inputs)

        return run

    compiled(lambda **kw: call(**kw), backend=keep)(**copied(given))
    ((op, args, _),) = seen
    opcheck(op.default if hasattr(op, "default") else op, args)


@pytest.mark.parametrize("case", ["paged", "saving", "part", "latent", "fp4"])
def test_torchs_counter_sees_calls_over_a_cache(case: str) -> None:
    given = CASES[case]()
    right = call_of(given)(**copied(given))
    with FlopCounterMode(display=False) as counter:
        same_bits(call_of(given)(**given), right)
    pairs = 2 * 5 + 3 * 7 + (5 * 5 if case == "part" else 0)
    width = WIDE + LATENT if case == "latent" else 2 * D
    assert counter.get_total_flops() == 2 * H * pairs * width


def test_what_cannot_be_read_counts_as_the_longest() -> None:
    given = {name: one for name, one in paged().items() if isinstance(one, Tensor)}
    program = torch.export.export(Paged(), (), given)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, FlopCounterMode(display=False) as counter:
        program.graph_module(*map(mode.from_tensor, given.values()))
    assert counter.get_total_flops() == 2 * H * 2 * 3 * 16 * 2 * D


def test_a_call_between_graphs_says_so() -> None:
    query = torch.randn(1, 3, 2, 8)
    forward = polyattn.bind_part(backward=False).forward
    with pytest.raises(torch._dynamo.exc.Unsupported, match="between two graphs: leave fullgraph=True out"):
        compiled(lambda: forward(query, query, query))()
