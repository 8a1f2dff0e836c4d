"""polyattn as SGLang's backend. SGLang cannot be imported without its GPU packages: its classes are stood in for by the
few that the backend names, and where its package is here, the real ones are compared with them by their signatures."""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import polyattn
from polyattn.integrations import sglang as host

from .sglang_source import fields, parameters, real

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 4
LENGTHS = (7, 10)


class Base:
    """As `sglang.srt.layers.attention.base_attn_backend.AttentionBackend`: what ours calls and overrides."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None: ...

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None: ...

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kw: Any
    ) -> Any:
        run: Any = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kw)


class Loc(NamedTuple):
    """As `sglang.srt.mem_cache.memory_pool.KVWriteLoc`."""

    loc: Any
    swa_loc: Any = None


class Mode(enum.Enum):
    EXTEND, DECODE, IDLE, TARGET_VERIFY, DRAFT_EXTEND_V2 = range(5)

    def is_decode(self) -> bool:
        return self is Mode.DECODE

    def is_idle(self) -> bool:
        return self is Mode.IDLE

    def is_target_verify(self) -> bool:
        return self is Mode.TARGET_VERIFY


class Pool:
    """As SGLang's MHATokenToKVPool: [slots, H_kv, D] for each layer."""

    def __init__(self, slots: int, dtype: torch.dtype) -> None:
        self.buffers = [torch.zeros(slots, KV_HEADS, DIM, dtype=dtype) for _ in range(2)]

    def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        for buffer, rows in zip(self.buffers, (cache_k, cache_v), strict=True):
            buffer[loc_info.loc] = rows.view(-1, KV_HEADS, DIM).to(buffer.dtype)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.buffers[0]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.buffers[1]


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The modules that polyattn names, with its registry and its list of choices."""
    registry: dict[str, Any] = {}
    listed = ["triton"]
    parts: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.arg_groups": {},
        "sglang.srt.arg_groups.choices": {
            "ATTENTION_BACKEND_CHOICES": listed,
            "add_attention_backend_choices": listed.extend,
        },
        "sglang.srt.layers": {},
        "sglang.srt.layers.attention": {},
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": Base},
        "sglang.srt.layers.attention.attention_registry": {
            "register_attention_backend": lambda name: lambda create: registry.setdefault(name, create)
        },
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": Loc},
    }
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        above, _, own = name.rpartition(".")
        if above:
            setattr(sys.modules[above], own, module)
    monkeypatch.delitem(sys.modules, "polyattn.integrations.sglang.backend", raising=False)
    monkeypatch.setattr(host, "outdated", lambda name: "")
    yield {"registry": registry, "choices": listed}
    sys.modules.pop("polyattn.integrations.sglang.backend", None)


class Rig:
    """A runner with two requests, whose slots are scattered pages."""

    def __init__(self, page: int = PAGE, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        pages = torch.randperm(15)[:8] + 1
        self.table = torch.zeros(4, 16, dtype=torch.int32)
        for row, (at, length) in enumerate(zip((0, 4), LENGTHS, strict=True)):
            slots = (pages[at : at + 4, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
            self.table[row + 1, :length] = slots
        self.runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=Pool(17 * PAGE, dtype),
            page_size=page,
            dtype=torch.float32,
        )
        self.k, self.v = ([torch.randn(n, KV_HEADS, DIM) for n in LENGTHS] for _ in range(2))

    def batch(self, mode: Mode, before: tuple[int, ...], after: tuple[int, ...]) -> Any:
        loc = torch.cat([self.table[row + 1, a:b] for row, (a, b) in enumerate(zip(before, after, strict=True))])
        new = torch.tensor(after) - torch.tensor(before)
        return SimpleNamespace(
            forward_mode=mode, spec_info=None, encoder_lens=None, req_pool_indices=torch.tensor([1, 2]),
            seq_lens=torch.tensor(after), seq_lens_cpu=torch.tensor(after), out_cache_loc=loc.long(),
            extend_seq_lens=new, extend_seq_lens_cpu=new.tolist(),
        )  # fmt: skip

    def rows(self, rows: list[torch.Tensor], before: tuple[int, ...], after: tuple[int, ...]) -> torch.Tensor:
        return torch.cat([one[a:b] for one, a, b in zip(rows, before, after, strict=True)])


def layer(**changes: Any) -> Any:
    fields = {
        "layer_id": 0, "tp_q_head_num": HEADS, "tp_k_head_num": KV_HEADS, "qk_head_dim": DIM, "v_head_dim": DIM,
        "scaling": 0.3, "logit_cap": 0.0, "sliding_window_size": -1, "is_cross_attention": False,
        "attn_type": SimpleNamespace(value="decoder"), "k_scale": None, "v_scale": None, "xai_temperature_len": -1,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def served(rig: Rig, own: Any, **more: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What three steps give (a prompt, a chunk with cached keys before it, a decode), each with what it has to be."""
    from polyattn.integrations.sglang.backend import PolyattnAttnBackend

    backend: Any = PolyattnAttnBackend(rig.runner)
    steps = [(Mode.EXTEND, (0, 0), (4, 5)), (Mode.EXTEND, (4, 5), (6, 9)), (Mode.DECODE, (6, 9), (7, 10))]
    found = []
    for mode, before, after in steps:
        batch = rig.batch(mode, before, after)
        q = torch.randn(len(batch.out_cache_loc), HEADS * DIM)
        k, v = (rig.rows(rows, before, after).flatten(1) for rows in (rig.k, rig.v))
        backend.init_forward_metadata(batch)
        out = backend.forward(q, k, v, own, batch, **more)
        lens = [torch.tensor([0, *sizes]).cumsum(0).int() for sizes in (batch.extend_seq_lens.tolist(), list(after))]
        with polyattn.use_backend("reference"):
            want = polyattn.varlen_attention(
                q.view(-1, HEADS, DIM), rig.rows(rig.k, (0, 0), after), rig.rows(rig.v, (0, 0), after),
                cu_seqlens_q=lens[0], cu_seqlens_k=lens[1], max_seqlen_q=max(batch.extend_seq_lens_cpu),
                max_seqlen_k=max(after), causal=True, scale=own.scaling, window=(own.sliding_window_size, -1),
                softcap=own.logit_cap, sinks=more.get("sinks"),
            )  # fmt: skip
        found.append((out, want.flatten(1)))
    return found


@pytest.mark.parametrize("page", [1, PAGE])
@pytest.mark.parametrize("changes", [{}, {"sliding_window_size": 3}, {"logit_cap": 2.0}], ids=str)
def test_prompts_chunks_and_decodes_are_what_the_reference_gives(page: int, changes: dict[str, Any]) -> None:
    for out, want in served(Rig(page), layer(**changes)):
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def test_sinks_of_a_layer_are_honoured() -> None:
    for out, want in served(Rig(), layer(), sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])):
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def test_a_narrow_cache_is_read_by_its_scales() -> None:
    errors = [float((out - want).abs().max()) for out, want in served(Rig(dtype=torch.float8_e4m3fn), layer())]
    assert all(1e-5 < error < 0.2 for error in errors), errors


def test_a_pool_of_its_own_for_windows_is_refused_when_the_backend_is_made() -> None:
    from polyattn.integrations.sglang.backend import PolyattnAttnBackend

    rig = Rig()
    rig.runner.is_hybrid_swa = True
    with pytest.raises(polyattn.UnsupportedRequestError, match=r"--disable-hybrid-swa-memory.*choose another"):
        PolyattnAttnBackend(rig.runner)


@pytest.mark.parametrize(
    "what, changes, more",
    [
        ("the argument score_mod", {}, {"score_mod": 1}),
        ("attention of type", {"attn_type": SimpleNamespace(value="encoder_only")}, {}),
        ("attention of type", {"is_cross_attention": True}, {}),
        ("xai_temperature_len", {"xai_temperature_len": 5}, {}),
    ],
)
def test_layers_that_are_not_served_are_refused_by_name(
    what: str, changes: dict[str, Any], more: dict[str, Any]
) -> None:
    with pytest.raises(polyattn.UnsupportedRequestError, match=what):
        served(Rig(), layer(**changes), **more)


def test_steps_of_drafts_and_graphs_are_refused_with_what_to_do() -> None:
    from polyattn.integrations.sglang.backend import PolyattnAttnBackend

    rig = Rig()
    backend: Any = PolyattnAttnBackend(rig.runner)
    batch = rig.batch(Mode.DECODE, (4, 5), (5, 6))
    batch.spec_info = SimpleNamespace(kv_indptr=torch.zeros(3))
    with pytest.raises(polyattn.UnsupportedRequestError, match="--speculative-draft-attention-backend triton"):
        backend.init_forward_metadata(batch)
    with pytest.raises(polyattn.UnsupportedRequestError, match="--disable-cuda-graph"):
        backend.init_cuda_graph_state(8, 8)


def by_hand(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """One sequence in fp64: q [S, H, D], keys and values [L, H, *], seen [S, L]."""
    logits = torch.einsum("ihd,jhd->hij", q.double(), keys.double()) * scale
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, values.double()).flatten(1)


def close(out: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


def made(rig: Rig) -> Any:
    from polyattn.integrations.sglang.backend import PolyattnAttnBackend

    return PolyattnAttnBackend(rig.runner)


DRAFTS, BEFORE, AFTER = 3, (4, 7), (7, 10)
# Which drafts each draft sees: of a tree whose root has two children, and of a chain.
TREES = {2: [[1, 0, 0], [1, 1, 0], [1, 0, 1]], 1: [[1, 0, 0], [1, 1, 0], [1, 1, 1]]}


def verifying(rig: Rig, topk: int) -> tuple[Any, list[torch.Tensor]]:
    """A step that verifies drafts, as SGLang says it: lengths are those before, and a mask has a row of all keys for
    each draft. And what each draft of each sequence sees."""
    batch = rig.batch(Mode.TARGET_VERIFY, BEFORE, AFTER)
    batch.seq_lens = batch.seq_lens_cpu = torch.tensor(BEFORE)
    tree = torch.tensor(TREES[topk], dtype=torch.bool)
    seen = [torch.cat([torch.ones(DRAFTS, n, dtype=torch.bool), tree], 1) for n in BEFORE]
    mask = torch.cat([one.flatten() for one in seen])
    batch.spec_info = SimpleNamespace(topk=topk, draft_token_num=DRAFTS, custom_mask=mask)
    return batch, seen


@pytest.mark.parametrize("topk", TREES)
def test_drafts_are_verified_by_their_tree(topk: int) -> None:
    rig = Rig()
    backend = made(rig)
    first = rig.batch(Mode.EXTEND, (0, 0), BEFORE)
    k, v = (rig.rows(rows, (0, 0), BEFORE).flatten(1) for rows in (rig.k, rig.v))
    backend.init_forward_metadata(first)
    backend.forward(torch.randn(len(k), HEADS * DIM), k, v, layer(), first)
    batch, seen = verifying(rig, topk)
    q = torch.randn(2 * DRAFTS, HEADS, DIM)
    backend.init_forward_metadata(batch)
    k, v = (rig.rows(rows, BEFORE, AFTER).flatten(1) for rows in (rig.k, rig.v))
    out = backend.forward(q.flatten(1), k, v, layer(), batch)
    assert batch.seq_lens.tolist() == list(BEFORE), "SGLang's lengths stay"
    for row, length in enumerate(AFTER):
        heads = (one[row][:length].repeat_interleave(HEADS // KV_HEADS, 1) for one in (rig.k, rig.v))
        some = slice(row * DRAFTS, (row + 1) * DRAFTS)
        close(out[some], by_hand(q[some], *heads, seen[row], 0.3))


def test_an_extension_of_drafts_is_an_extend_step() -> None:
    rig, q = Rig(), torch.randn(9, HEADS * DIM)
    k, v = (rig.rows(rows, (0, 0), (4, 5)).flatten(1) for rows in (rig.k, rig.v))
    found = []
    for mode in (Mode.EXTEND, Mode.DRAFT_EXTEND_V2):
        backend, batch = made(rig), rig.batch(mode, (0, 0), (4, 5))
        batch.spec_info = None if mode is Mode.EXTEND else SimpleNamespace()
        backend.init_forward_metadata(batch)
        found.append(backend.forward(q, k, v, layer(), batch))
    torch.testing.assert_close(*found)


LATENT, ROPE = 24, 8


class LatentPool:
    """As SGLang's MLATokenToKVPool: [slots, 1, D_c + D_r]."""

    def __init__(self, slots: int, dtype: torch.dtype = torch.float32) -> None:
        self.buffer = torch.zeros(slots, 1, LATENT + ROPE, dtype=dtype)

    def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        self.buffer[loc_info.loc] = cache_k

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.buffer


def latent_rig(page: int = PAGE) -> tuple[Rig, Any, list[torch.Tensor]]:
    """A runner of latent attention, its absorbed layer, and the rows of both requests."""
    rig = Rig(page)
    rig.runner.use_mla_backend, rig.runner.token_to_kv_pool = True, LatentPool(17 * PAGE)
    absorbed = layer(tp_k_head_num=1, qk_head_dim=LATENT + ROPE, v_head_dim=LATENT)
    return rig, absorbed, [torch.randn(n, 1, LATENT + ROPE) for n in LENGTHS]


def absorbed_by_hand(q: torch.Tensor, row: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    keys = row.expand(-1, HEADS, -1)
    return by_hand(q, keys, keys[..., :LATENT], seen, 0.3)


@pytest.mark.parametrize("page", [1, PAGE])
def test_absorbed_latent_attention_reads_the_rows(page: int) -> None:
    rig, own, rows = latent_rig(page)
    backend = made(rig)
    steps = [(Mode.EXTEND, (0, 0), (4, 5)), (Mode.EXTEND, (4, 5), (6, 9)), (Mode.DECODE, (6, 9), (7, 10))]
    for mode, before, after in steps:
        batch, k = rig.batch(mode, before, after), rig.rows(rows, before, after)
        q = torch.randn(len(k), HEADS, LATENT + ROPE)
        backend.init_forward_metadata(batch)
        out, at = backend.forward(q, k, k[..., :LATENT], own, batch), 0
        for row, first, last in zip(rows, before, after, strict=True):
            some = slice(at, at := at + last - first)
            seen = torch.ones(last - first, last, dtype=torch.bool).tril(first)
            close(out[some], absorbed_by_hand(q[some], row[:last], seen))


def test_drafts_of_latent_attention_are_verified_by_their_tree() -> None:
    rig, own, rows = latent_rig()
    backend = made(rig)
    first, k = rig.batch(Mode.EXTEND, (0, 0), BEFORE), rig.rows(rows, (0, 0), BEFORE)
    backend.init_forward_metadata(first)
    backend.forward(torch.randn(len(k), HEADS, LATENT + ROPE), k, k[..., :LATENT], own, first)
    batch, seen = verifying(rig, 2)
    k, q = rig.rows(rows, BEFORE, AFTER), torch.randn(2 * DRAFTS, HEADS, LATENT + ROPE)
    backend.init_forward_metadata(batch)
    out = backend.forward(q, k, k[..., :LATENT], own, batch)
    for n, row in enumerate(rows):
        some = slice(n * DRAFTS, (n + 1) * DRAFTS)
        close(out[some], absorbed_by_hand(q[some], row[: AFTER[n]], seen[n]))


def test_prompts_of_latent_attention_come_as_dense_heads() -> None:
    rig, _, _ = latent_rig()
    backend = made(rig)
    dense = layer(tp_k_head_num=HEADS, qk_head_dim=DIM, v_head_dim=8)
    batch = rig.batch(Mode.EXTEND, (0, 0), (4, 5))
    batch.extend_prefix_lens_cpu = [0, 0]
    q, k, v = torch.randn(9, HEADS, DIM), torch.randn(9, HEADS, DIM), torch.randn(9, HEADS, 8)
    backend.init_forward_metadata(batch)
    out = backend.forward(q, k, v, dense, batch, save_kv_cache=False)
    for some in (slice(0, 4), slice(4, 9)):
        seen = torch.ones(some.stop - some.start, some.stop - some.start, dtype=torch.bool).tril()
        close(out[some], by_hand(q[some], k[some], v[some], seen, 0.3))
    batch.extend_prefix_lens_cpu = [0, 3]
    with pytest.raises(polyattn.UnsupportedRequestError, match="dense heads of prompts that have a cached prefix"):
        backend.forward(q, k, v, dense, batch, save_kv_cache=False)


def test_latent_attention_with_narrow_rows_or_sinks_is_refused() -> None:
    for dtype, sinks, what in (
        (torch.float8_e4m3fn, None, r"rows of torch\.float8_e4m3fn"),
        (torch.float32, torch.zeros(HEADS), "sinks"),
    ):
        rig, own, _ = latent_rig()
        rig.runner.token_to_kv_pool = LatentPool(17 * PAGE, dtype)
        backend, batch = made(rig), rig.batch(Mode.DECODE, (6, 9), (7, 10))
        backend.init_forward_metadata(batch)
        with pytest.raises(polyattn.UnsupportedRequestError, match=f"latent attention with {what}"):
            backend.forward(torch.randn(2, HEADS, LATENT + ROPE), None, None, own, batch, sinks=sinks)


def test_a_backend_that_cannot_serve_says_why_at_the_first_layer() -> None:
    with (
        polyattn.use_backend("fa3"),
        pytest.raises(polyattn.UnsupportedRequestError, match=r"layer 0 of the model is not served by polyattn: .*fa3"),
    ):
        served(Rig(), layer())


def test_it_registers_once_however_often_it_is_called(sglang: dict[str, Any]) -> None:
    host.register()
    host.register()
    assert sglang["choices"] == ["triton", "polyattn"]
    made = sglang["registry"]["polyattn"](Rig().runner)
    assert type(made).__name__ == "PolyattnAttnBackend"


def test_an_older_sglang_is_warned_of_and_left_alone(monkeypatch: pytest.MonkeyPatch, sglang: dict[str, Any]) -> None:
    monkeypatch.setattr(host, "outdated", lambda name: "sglang 0.4 is installed, 0.5.23 or newer is needed")
    with pytest.warns(RuntimeWarning, match=r"not among SGLang's attention backends: sglang 0\.4"):
        host.register()
    assert sglang["registry"] == {}


@pytest.mark.parametrize(
    "name", ["init_forward_metadata_out_graph", "init_cuda_graph_state", "forward_decode", "forward_extend"]
)
def test_methods_have_the_parameters_of_sglangs_own(name: str) -> None:
    from polyattn.integrations.sglang.backend import PolyattnAttnBackend

    tree = real("sglang/srt/layers/attention/base_attn_backend.py")
    theirs = parameters(tree, f"AttentionBackend.{name}")
    ours = [
        p.name
        for p in inspect.signature(getattr(PolyattnAttnBackend, name)).parameters.values()
        if p.kind != p.VAR_KEYWORD
    ]
    assert ours == theirs


@pytest.mark.parametrize(
    "module, name, members",
    [
        ("speculative/eagle_info.py", "EagleVerifyInput", ("custom_mask", "draft_token_num", "topk")),
        ("model_executor/forward_batch_info.py", "ForwardMode", ("is_target_verify", "is_decode", "is_idle")),
        ("mem_cache/memory_pool.py", "MLATokenToKVPool", ("set_kv_buffer", "get_key_buffer")),
    ],
)
def test_what_is_read_of_sglangs_objects_is_there(module: str, name: str, members: tuple[str, ...]) -> None:
    assert set(members) <= fields(real(f"sglang/srt/{module}"), name)
