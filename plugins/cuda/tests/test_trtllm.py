"""TensorRT-LLM's, CuTe DSL's and CUTLASS' kernels over their emulators."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.contract import Accepted, PagedTables, Rejected, Slot, judge
from polyattn.errors import BackendUnavailableError, UnsupportedRequestError
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated
from polyattn.testing.families.cached import in_tables
from polyattn_cuda.flashinfer import memory, trtllm
from polyattn_cuda.flashinfer.trtllm import drafts_mask

from .emulators import trtllm as emulator
from .emulators.gpus import Gpus

BLACKWELL, HOPPER, CONSUMER = "cuda:sm100@13.0", "cuda:sm90@12.8", "cuda:sm120@13.0"
HALF = ("bfloat16", "float16")
CHIPS = {100: BLACKWELL, 90: HOPPER, 120: CONSUMER}
MHA = {arch: Emulated("trtllm_mha", "flashinfer-python", chip) for arch, chip in CHIPS.items()}
MLA = {
    name: Emulated(name, provider, BLACKWELL)
    for name, provider in (
        ("trtllm_mla", "flashinfer-python"),
        ("cutedsl_mla", "cutedsl/flashinfer-python"),
        ("tokenspeed_mla", "flashinfer-python"),
        ("cutlass_mla", "sgl-kernel+flashinfer"),
    )
}
HEADS = [(arch, case) for arch, target in MHA.items() for case in target.cases(per_row=2, dtypes=HALF[:1])]
LATENT = [(name, case) for name, target in MLA.items() for case in target.cases(per_row=3, dtypes=HALF)]


@pytest.mark.slow(keep=31)
@pytest.mark.parametrize(("arch", "case"), HEADS, ids=str)
def test_heads(arch: int, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    MHA[arch].passes(case, emulator.library(arch=arch).install(monkeypatch))


@pytest.mark.slow(keep=37)
@pytest.mark.parametrize(("name", "case"), LATENT, ids=str)
def test_latent(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    library = emulator.library().install(monkeypatch)
    kernels = emulator.cutlass().install(monkeypatch)
    kernels.calls = library.calls
    MLA[name].passes(case, library)


# ---------------------------------------------------------------------------------------------------------------- calls

STEP: dict[str, Any] = {"family": "paged", "layout": "THD", "heads": 8, "kv_heads": 2, "head_dim": 64, "page_size": 16}
ONE = {"phase": "decode", "s_relation": "one"}
CHAIN = {"phase": "verify", "s_relation": "fewer", "causal": "bottom_right", "spec_topk": 1}
LATENTS: dict[str, Any] = {"family": "mla", "layout": "THD", "heads": 16, "head_dim": 576, "v_head_dim": 512}
LATENTS |= {"scale": 192**-0.5, "page_size": 64}


def run(target: Emulated, counts: tuple[int, ...], **fields: Any) -> Any:
    """A call with so many queries of each sequence, of 20 keys each; `k_scale` and `v_scale` are taken out."""
    given = {name: fields.pop(name) for name in ("k_scale", "v_scale", "out") if name in fields}
    latent, N = fields.get("family") == "mla", len(counts)
    request = {**(LATENTS if latent else STEP), **fields}
    width, size = request["head_dim"], request["page_size"]
    caches = [torch.randn((2 * N, size, width) if latent else (2 * N, size, 2, width)).bfloat16()]
    if request.get("kv_dtype") == "fp8_e4m3":
        caches = [cache.to(torch.float8_e4m3fn) for cache in caches]
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    table = torch.arange(2 * N, dtype=torch.int32).view(N, 2)
    query = torch.randn(int(starts[-1]), request["heads"], width).bfloat16()
    tables = PagedTables(table, torch.full((N,), 20, dtype=torch.int32), starts, max(counts), 20)
    return target.bind(**request).forward(query, *(caches if latent else caches * 2), tables=tables, **given)


def test_the_scale_is_given_with_those_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    library = emulator.library().install(monkeypatch)
    run(MHA[100], (1, 1), **ONE)
    assert (library.calls[-1].given["bmm1_scale"], library.calls[-1].given["bmm2_scale"]) == (64**-0.5, 1.0)
    scales = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(0.25)}
    run(MHA[100], (1, 1), **ONE, kv_dtype="fp8_e4m3", kv_scales="tensor", **scales)
    given = library.calls[-1].given
    assert [given[name].dtype for name in ("bmm1_scale", "bmm2_scale")] == [torch.float32] * 2
    assert (float(given["bmm1_scale"]), float(given["bmm2_scale"])) == (0.0625, 0.25)
    assert given["kv_layout"] == "NHD", "its own default is HND"
    assert not [call for call in library.calls if call.positional]


@pytest.mark.parametrize(
    ("counts", "wanted"), [((3, 3), {"q_len_per_req"}), ((3, 1), {"q_len_per_req", "max_q_len", "cum_seq_lens_q"})]
)
def test_drafts_of_one_number_or_of_several(
    counts: tuple[int, ...], wanted: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = emulator.library().install(monkeypatch)
    run(MHA[100], counts, **CHAIN)
    assert wanted == {"q_len_per_req", "max_q_len", "cum_seq_lens_q"} & set(library.calls[-1].given)


@pytest.mark.parametrize("counts", [(3, 3), (3, 1), (40, 40)], ids=str)
def test_drafts_of_xqa_are_a_packed_mask(counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    library = emulator.library(arch=90).install(monkeypatch)
    run(MHA[90], counts, **CHAIN)
    given = library.calls[-1].given
    assert given["q_len_per_req"] == max(counts)
    assert ("q_cu_seq_lens" in given) is (len(set(counts)) > 1)
    assert given["mask"].is_contiguous()


def test_a_step_of_xqa_in_which_a_sequence_has_no_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queries are packed then, and packed queries are drafts to it, two at least of a sequence."""
    library = emulator.library(arch=90).install(monkeypatch)
    run(MHA[90], (1, 0, 1), **ONE)
    given = library.calls[-1].given
    assert (given["q_len_per_req"], given["q_cu_seq_lens"].tolist()) == (2, [0, 1, 1, 2])


@pytest.mark.parametrize("drafts", [1, 3])
def test_xqa_is_given_what_it_can_find_its_way_in(drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator says what: it reads the query as one block, and both caches by the keys' strides in whole rows."""
    library = emulator.library(arch=90).install(monkeypatch)
    bound = MHA[90].bind(**STEP, **(ONE if drafts == 1 else CHAIN))
    wide = [torch.randn(4, 16, 2, 80).bfloat16() for _ in range(2)]
    caches = [wide[0][..., :64], wide[1][..., :64]], [wide[0][..., :64].contiguous(), wide[1][..., :64]]
    # One block of both, as a pool may have it: read where it lies.
    pool = torch.stack([wide[0][..., :64], wide[1][..., :64]], 1)
    query = torch.randn(2 * drafts, 8, 96).bfloat16()[..., :64]
    tables = {"page_table": torch.arange(4, dtype=torch.int32).view(2, 2), "max_seqlen_q": drafts, "max_seqlen_k": 20}
    tables |= {"seq_lens": torch.full((2,), 20, dtype=torch.int32)}
    tables |= {"cu_seqlens_q": torch.arange(3, dtype=torch.int32) * drafts}
    wanted = bound.forward(query.contiguous(), *(t.contiguous() for t in caches[0]), **in_tables(**tables))
    for given in (*caches, pool.unbind(1)):
        assert torch.equal(bound.forward(query, *given, **in_tables(**tables)), wanted)
    assert library.calls[-1].given["kv_cache"][0].data_ptr() == pool.data_ptr()


@pytest.mark.slow(keep=7)
@pytest.mark.parametrize("counts", [(12, 12), (12, 2), (2, 2)], ids=str)
@pytest.mark.parametrize(("group", "filled"), [(3, 4), (8, 8), (31, 32)])
def test_sinks_of_xqa_are_those_of_their_heads(
    group: int, filled: int, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the group: the last draft of a sequence gives what decoding it gives. The emulator takes the head of a
    sink from the row in a tile of 32 where there are drafts, as the kernel does."""
    library = emulator.library(arch=90).install(monkeypatch)
    fields = {**STEP, "heads": 2 * group, "sinks": True}
    caches = [torch.randn(4, 16, 2, 64).bfloat16() for _ in range(2)]
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    query, sinks = torch.randn(int(starts[-1]), 2 * group, 64).bfloat16(), 3 * torch.randn(2 * group)
    tables: dict[str, Any] = {"page_table": torch.arange(4, dtype=torch.int32).view(2, 2), "max_seqlen_k": 20}
    tables |= {"seq_lens": torch.tensor([20, 17], dtype=torch.int32), "sinks": sinks}
    out = torch.empty_like(query)
    found = MHA[90].bind(**fields, **CHAIN).forward(
        query, *caches, **in_tables(cu_seqlens_q=starts, max_seqlen_q=max(counts), out=out, **tables)
    )  # fmt: skip
    ends = starts[1:].long() - 1
    alone = {"cu_seqlens_q": torch.arange(3, dtype=torch.int32), "max_seqlen_q": 1}
    wanted = MHA[90].bind(**fields, **ONE).forward(query[ends], *caches, **in_tables(**alone, **tables))
    assert found is out
    torch.testing.assert_close(found[ends], wanted)
    asked = [call.given["query"].shape[-2] // 2 for call in library.calls]
    assert asked == [filled if max(counts) * group > 32 else group, group], "as it is where no tile cuts it"


def test_a_group_is_one_tile_of_xqa() -> None:
    heads = {"heads": 66, "kv_heads": 2}
    assert isinstance(judge(MHA[90].rows, MHA[90].request(**{**STEP, **ONE, **heads})), Rejected)
    assert isinstance(judge(MHA[90].rows, MHA[90].request(**{**STEP, **ONE, **heads, "heads": 64})), Accepted)


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("trtllm_mla", (1, 20, 64, 128), {65: "heads=65 is not", 127: "heads=127 is not", 192: "heads=192 is not"}),
        ("cutedsl_mla", (1, 65, 127, 128), {129: "heads=129 is not 1 to 128"}),
        ("cutlass_mla", (1, 65, 127, 128), {129: "heads=129 is not 1 to 128"}),
    ],
)
def test_latent_kernels_have_a_tile_for_so_many_heads(name: str, taken: tuple[int, ...], refused: Any) -> None:
    fields = {**LATENTS, **ONE, "page_size": 128 if name == "cutlass_mla" else 64}
    for heads in taken:
        assert isinstance(judge(MLA[name].rows, MLA[name].request(**{**fields, "heads": heads})), Accepted)
    for heads, words in refused.items():
        assert words in str(judge(MLA[name].rows, MLA[name].request(**{**fields, "heads": heads})))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({**ONE, "heads": 129, "kv_heads": 1}, "group=129 is not 1 to 128"),
        ({"phase": "extend", "s_relation": "more", "causal": "bottom_right"}, "s_relation='more' is not"),
    ],
)
def test_what_trtllm_gen_does_not_say(fields: dict[str, Any], words: str) -> None:
    assert words in str(judge(MHA[100].rows, MHA[100].request(**{**STEP, **fields})))


def test_an_encoder_may_have_fewer_keys_than_there_are_queries() -> None:
    fields = {"phase": "extend", "s_relation": "more", "cross": True}
    assert isinstance(judge(MHA[100].rows, MHA[100].request(**{**STEP, **fields})), Accepted)


EXTEND = {"phase": "extend", "s_relation": "fewer", "causal": "bottom_right"}


@pytest.mark.parametrize("step", [ONE, CHAIN, EXTEND], ids=["decode", "verify", "extend"])
def test_queries_of_trtllm_gen_may_have_strides(step: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.library().install(monkeypatch)
    bound, count = MHA[100].bind(**STEP, **step, kv_layout="NHD"), 1 if step is ONE else 3
    caches, query = torch.randn(2, 4, 16, 2, 64).bfloat16(), torch.randn(2 * count, 8, 64).bfloat16()
    tables: dict[str, Any] = {"page_table": torch.arange(4, dtype=torch.int32).view(2, 2), "max_seqlen_k": 20}
    tables |= {"seq_lens": torch.tensor([20, 9], dtype=torch.int32), "max_seqlen_q": count}
    tables |= {"cu_seqlens_q": torch.arange(3, dtype=torch.int32) * count}
    heads_first = query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(
        bound.forward(heads_first, *caches, **in_tables(**tables)), bound.forward(query, *caches, **in_tables(**tables))
    )


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("step", [ONE, CHAIN, EXTEND], ids=["decode", "verify", "extend"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_trtllm_gen_is_given_what_it_can_find_its_way_in(
    layout: str, step: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """V by the strides of K, and rows on 16-byte boundaries, as the emulator says."""
    library = emulator.library().install(monkeypatch)
    bound, count = MHA[100].bind(**STEP, **step, kv_layout=layout), 1 if step is ONE else 3
    shape = (4, 16, 2) if layout == "NHD" else (4, 2, 16)
    key, value = (torch.randn(*shape, 64).bfloat16() for _ in range(2))
    wide = [torch.nn.functional.pad(cache, (0, 16))[..., :64] for cache in (key, value)]
    odd = [torch.nn.functional.pad(cache, (0, 3))[..., :64] for cache in (key, value)]
    off = [torch.nn.functional.pad(cache.flatten(), (1, 0))[1:].view_as(cache) for cache in (key, value)]
    tables: dict[str, Any] = {"page_table": torch.arange(4, dtype=torch.int32).view(2, 2), "max_seqlen_k": 20}
    tables |= {"seq_lens": torch.tensor([20, 9], dtype=torch.int32), "max_seqlen_q": count}
    tables |= {"cu_seqlens_q": torch.arange(3, dtype=torch.int32) * count}
    query = torch.randn(2 * count, 8, 64).bfloat16()
    wanted = bound.forward(query, key, value, **in_tables(**tables))
    for given in ((key, wide[1]), (wide[0], value), odd, off, wide):
        assert torch.equal(bound.forward(query, *given, **in_tables(**tables)), wanted)
    assert library.calls[-1].given["kv_cache"][1].data_ptr() == wide[1].data_ptr(), "as it lies where it can be read"


@pytest.mark.parametrize("step", [CHAIN, EXTEND], ids=["verify", "extend"])
def test_the_lse_of_many_queries_has_a_workspace(step: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """trtllm-gen keeps room for it by the longest sequence that it is told of."""
    library = emulator.library().install(monkeypatch)
    bound, caches = MHA[100].bind(**STEP, **step, lse=True), [torch.randn(4, 16, 2, 64).bfloat16() for _ in range(2)]
    tables: dict[str, Any] = {"page_table": torch.arange(4, dtype=torch.int32).view(2, 2), "max_seqlen_k": 20}
    tables |= {"seq_lens": torch.tensor([20, 9], dtype=torch.int32)}
    tables |= {"cu_seqlens_q": torch.tensor([0, 3, 4], dtype=torch.int32)}
    query, found = torch.randn(4, 8, 64).bfloat16(), []
    for longest, room in ((3, 128 << 20), (1 << 20, 256 << 20)):
        found += bound.forward(query, *caches, **in_tables(**tables, max_seqlen_q=longest))
        assert library.calls[-1].given["workspace_buffer"].numel() == room
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


@pytest.mark.parametrize("arch", [100, 90])
@pytest.mark.parametrize("counts", [(1, 1), (3, 3), (3, 1)], ids=str)
def test_lengths_and_sinks_may_have_strides(
    arch: int, counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels read them one after another."""
    emulator.library(arch=arch).install(monkeypatch)
    step = ONE if max(counts) == 1 else CHAIN
    bound = MHA[arch].bind(**STEP, **step, sinks=True)
    caches = [torch.randn(4, 16, 2, 64).bfloat16() for _ in range(2)]
    tables: dict[str, Any] = {"page_table": torch.arange(4, dtype=torch.int32).view(2, 2), "sinks": torch.randn(8)}
    tables |= {"seq_lens": torch.tensor([20, 9], dtype=torch.int32)}
    tables |= {"cu_seqlens_q": torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)}
    most, query = {"max_seqlen_q": max(counts), "max_seqlen_k": 20}, torch.randn(sum(counts), 8, 64).bfloat16()
    strided = {name: t.repeat_interleave(2, -1)[..., ::2] for name, t in tables.items()}
    wanted = bound.forward(query, *caches, **in_tables(**tables, **most))
    assert torch.equal(bound.forward(query, *caches, **in_tables(**strided, **most)), wanted)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", list(MLA))
@pytest.mark.parametrize("counts", [(1, 1), (3, 1)], ids=str)
def test_latent_rows_and_tables_may_lie_anywhere(
    name: str, counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.library().install(monkeypatch)
    emulator.cutlass().install(monkeypatch)
    step = ONE if max(counts) == 1 else CHAIN
    size = 128 if name == "cutlass_mla" else 64
    bound = MLA[name].bind(**{**LATENTS, **step, "page_size": size})
    cache, query = torch.randn(4, size, 576).bfloat16(), torch.randn(sum(counts), 16, 576).bfloat16()
    tables: dict[str, Any] = {"page_table": torch.arange(4, dtype=torch.int32).view(2, 2)}
    tables |= {"seq_lens": torch.tensor([20, 9], dtype=torch.int32)}
    tables |= {"cu_seqlens_q": torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)}
    most = {"max_seqlen_q": max(counts), "max_seqlen_k": 20}
    wanted = bound.forward(query, cache, **in_tables(**tables, **most))
    strided = {name: t.repeat_interleave(2, -1)[..., ::2] for name, t in tables.items()}
    off = {name: torch.nn.functional.pad(t.flatten(), (1, 0))[1:].view_as(t) for name, t in tables.items()}
    for rows in (torch.nn.functional.pad(cache, (0, 16))[..., :576], torch.nn.functional.pad(cache, (0, 3))[..., :576]):
        for given in (strided, off):
            assert torch.equal(bound.forward(query, rows, **in_tables(**given, **most)), wanted)


def bits(mask: Tensor) -> Tensor:
    """What a packed mask says, [drafts, drafts]."""
    rows = (mask.to(torch.int32)[..., None] >> torch.arange(16)) & 1
    return rows.flatten(1)[:, : len(mask)].bool()


@pytest.mark.parametrize("drafts", [2, 16, 17, 33])
def test_packed_masks(drafts: int) -> None:
    cpu = torch.device("cpu")
    assert torch.equal(bits(drafts_mask(drafts, True, cpu)), torch.ones(drafts, drafts, dtype=torch.bool).tril())
    assert bits(drafts_mask(drafts, False, cpu)).all()
    assert drafts_mask(drafts, True, cpu).shape == (drafts, 2 * -(-drafts // 32))


def test_a_latent_lse_is_asked_for_in_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    library = emulator.library().install(monkeypatch)
    for name, base in (("trtllm_mla", "trtllm-gen"), ("cutedsl_mla", "cute-dsl")):
        run(MLA[name], (1, 1), family="mla", **ONE, lse=True)
        given = library.calls[-1].given
        assert (given["backend"], given["return_lse_base"]) == (base, "basee")


@pytest.mark.parametrize("name", ["trtllm_mla", "cutedsl_mla"])
def test_a_latent_decode_skips_sequences_without_a_query(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With numbers of queries that differ trtllm-gen has no LSE."""
    library = emulator.library().install(monkeypatch)
    found, lse = run(MLA[name], (1, 0, 1), family="mla", **ONE, lse=True)
    given = library.calls[-1].given
    assert "cum_seq_lens_q" not in given
    assert given["block_tables"].tolist() == [[0, 1], [4, 5]]
    assert given["seq_lens"].tolist() == [20, 20]
    assert (found.shape, lse.shape) == ((2, 16, 512), (2, 16))


def test_an_older_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library = emulator.library().install(monkeypatch)
    library.version = "0.7.0"
    older = library.modules["flashinfer.mla"].trtllm_batch_decode_with_kv_cache_mla
    found = older.__signature__.parameters
    less = [parameter for name, parameter in found.items() if name != "return_lse_base"]
    older.__signature__ = older.__signature__.replace(parameters=less)
    wanted = r"of flashinfer-python .* takes no 'return_lse_base', which a natural LSE needs"
    with pytest.raises(BackendUnavailableError, match=wanted):
        MLA["trtllm_mla"].bind(**LATENTS, **ONE)


def test_cutlass_pads_nothing_and_skips_sequences_without_a_query(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = emulator.cutlass().install(monkeypatch)
    emulator.library().install(monkeypatch)
    run(MLA["cutlass_mla"], (1, 0, 1), family="mla", **ONE, page_size=128)
    given = kernels.calls[-1].given
    assert given["page_table"].tolist() == [[0, 1], [4, 5]]
    assert given["num_kv_splits"] == 1


# --------------------------------------------------------------------------------------------------------------- memory


def test_a_stream_has_a_workspace_and_a_recorded_call_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Stream:
        cuda_stream = 1

    def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        made.append(str(device))
        return torch.empty(1, dtype=dtype).expand(size)

    recording = [False]
    monkeypatch.setattr(memory, "_kept", {})
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording[0])
    gpu = torch.device("cuda", 0)
    first = memory.workspace_of(gpu)
    assert memory.workspace_of(gpu) is first
    monkeypatch.setattr(Stream, "cuda_stream", 2)
    assert memory.workspace_of(gpu) is not first
    recording[0] = True
    assert memory.workspace_of(gpu) is not memory.workspace_of(gpu)
    assert len(made) == 4
    recording[0] = False
    larger = memory.workspace_of(gpu, 2 * memory.WORKSPACE)
    assert larger.numel() == 2 * memory.WORKSPACE
    assert memory.workspace_of(gpu) is larger


def test_threads_of_a_stream_do_not_take_memory_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread makes the usual workspace, another asks for a larger one."""
    found: dict[int, Tensor] = {}
    begun, stored = threading.Event(), threading.Event()
    many = 2 * memory.WORKSPACE

    class Kept(dict[Any, Tensor]):
        def __setitem__(self, key: Any, made: Tensor) -> None:
            super().__setitem__(key, made)
            stored.set()

    def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if size < many:
            begun.set()
            stored.wait(0.2)  # where the other does not wait for this one
        return torch.empty(1, dtype=dtype).expand(size)

    def ask(size: int) -> None:
        found[size] = memory.workspace_of(torch.device("cuda", 0), size)

    monkeypatch.setattr(memory, "_kept", Kept())
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    usual = threading.Thread(target=ask, args=(memory.WORKSPACE,))
    usual.start()
    assert begun.wait(600)
    ask(many)
    usual.join()
    assert (found[memory.WORKSPACE].numel(), found[many].numel()) == (memory.WORKSPACE, many)
    assert [made.numel() for made in memory._kept.values()] == [many]


# ---------------------------------------------------------------------------------------------------- devices, launches

PLAIN: dict[str, Any] = {"page_table": torch.arange(2, dtype=torch.int32)[:, None], "max_seqlen_q": 1}
PLAIN |= {"seq_lens": torch.tensor([9, 16], dtype=torch.int32), "max_seqlen_k": 16}
PLAIN |= {"cu_seqlens_q": torch.arange(3, dtype=torch.int32)}


def session_of(target: Emulated, **fields: Any) -> Any:
    bound = target.bind(**STEP, **fields)
    assert bound.session is not None
    return bound.session(Slot(torch.device("cpu"), 2, 2, 1, lambda name, size: torch.zeros(size, dtype=torch.uint8)))


def step_of(tables: dict[str, Any], **changes: Any) -> Any:
    """What a plan may ask about a step with these tables."""
    lengths = {"seq_lens": tables["seq_lens"].tolist()}
    return SimpleNamespace(**{**tables, "sequences": 2, "tokens": 2, "listed": lengths.__getitem__, **changes})


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which XQA was never called."""
    monkeypatch.setattr(trtllm, "_first", {})


@pytest.mark.usefixtures("first")
@pytest.mark.parametrize("arch", [90, 120])
def test_xqa_is_launched_where_its_tensors_are(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.library(arch=arch).install(monkeypatch)
    gpus = Gpus(monkeypatch)
    for counts in ((1, 1), (3, 3), (3, 1)):
        run(MHA[arch], counts, **(ONE if max(counts) == 1 else CHAIN))
    session, query = session_of(MHA[arch], **ONE), torch.randn(2, 8, 64).bfloat16()
    caches = torch.randn(2, 2, 16, 2, 64).bfloat16()
    step = step_of(PLAIN)
    session.plan(step)
    session.prepare(step)
    found = []
    for gpus.current in (0, 1):
        found.append(session.forward(query, *caches, **in_tables(**PLAIN)))
    assert torch.equal(*found)


@pytest.mark.usefixtures("first")
def test_xqa_serves_one_device_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels ask for their shared memory once."""
    emulator.library(arch=90).install(monkeypatch)
    gpus = Gpus(monkeypatch, here=1, current=1)
    run(MHA[90], (1, 1), **ONE)
    gpus.here = gpus.current = 0
    wanted = r"serves one device of a process, and this one has called it on cuda:1: a call on cuda:0 needs a process"
    with pytest.raises(UnsupportedRequestError, match=wanted):
        run(MHA[90], (1, 1), **ONE)
    with pytest.raises(UnsupportedRequestError, match=wanted):
        session_of(MHA[90], **ONE).plan(step_of(PLAIN))


@pytest.mark.usefixtures("first")
def test_trtllm_gen_serves_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.library().install(monkeypatch)
    gpus = Gpus(monkeypatch)
    for gpus.here in (0, 1):
        run(MHA[100], (1, 1), **ONE)


def test_xqa_takes_as_many_sequences_as_a_grid_has_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    library = emulator.library(arch=90).install(monkeypatch)
    assert emulator.GRID == trtllm._MOST
    for module, name in ((emulator, "GRID"), (trtllm, "_MOST")):
        monkeypatch.setattr(module, name, 2)
    run(MHA[90], (1, 1), **ONE)
    wanted = "takes up to 2 sequences in a call on this device .XQA., and this one has 3: split the batch"
    with pytest.raises(UnsupportedRequestError, match=wanted):
        run(MHA[90], (1, 1, 1), **ONE)
    with pytest.raises(UnsupportedRequestError, match=wanted):
        session_of(MHA[90], **ONE).plan(step_of(PLAIN, sequences=3))
    assert len(library.calls) == 1


@pytest.mark.parametrize(("drafts", "room"), [(220, 128 << 20), (240, (8 << 20) + 132 * 60 * (64 * 256 + 256))])
@pytest.mark.parametrize("in_session", [False, True])
def test_many_drafts_have_scratch(drafts: int, room: int, in_session: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """XQA keeps parts of every tile of 32 rows, as many as there are processors where a sequence is alone."""
    library = emulator.library(arch=90).install(monkeypatch)
    monkeypatch.setattr(trtllm, "_processors", lambda device: emulator.PROCESSORS)
    fields = {**STEP, **CHAIN, "heads": 8, "kv_heads": 1, "head_dim": 256, "page_size": 64}
    bound = MHA[90].bind(**fields)
    tables: dict[str, Any] = {"page_table": torch.arange(600, dtype=torch.int32)[None] % 4, "max_seqlen_k": 250}
    tables |= {"seq_lens": torch.tensor([250], dtype=torch.int32), "max_seqlen_q": drafts}
    tables |= {"cu_seqlens_q": torch.tensor([0, drafts], dtype=torch.int32)}
    forward = bound.forward
    if in_session:
        assert bound.session is not None
        slot = Slot(torch.device("cpu"), 1, 240, 600, lambda name, size: torch.zeros(size, dtype=torch.uint8))
        session, step = bound.session(slot), step_of(tables, sequences=1, tokens=drafts)
        session.plan(step)
        session.prepare(step)
        forward = session.forward
    forward(torch.randn(drafts, 8, 256).bfloat16(), *torch.randn(2, 4, 64, 1, 256).bfloat16(), **in_tables(**tables))
    assert library.calls[-1].given["workspace_buffer"].numel() == room


def test_many_sequences_need_no_scratch() -> None:
    assert memory.scratch_bytes(66, 1, 2048, 256, 132) == 2 * 66 * 64 * (64 * 256 + 256)
    assert memory.scratch_bytes(67, 1, 2048, 256, 132) == 0, "no sequence is in parts then"
