"""What a backend's code looks like: one Protocol per family, and `Bound`, the pair of functions a plugin hands over.

Everything that is not a tensor (causal, window, scale, softcap, dropout, layout, ...) is in the request the plugin
was given when it built the `Bound`; the functions take tensors only. Shape letters: B batch, N sequences, S_q / S_k
lengths, T tokens of a packed batch, H_q / H_kv heads, D head dim of Q and K, D_v head dim of V.

Rules common to all families:

- a function has every keyword of its protocol: what a request does not have is None, or is left out;
- inputs are views with a dense last axis; a function must not write to them (K of some libraries is: copy it);
- `out`, when given, has the shape, dtype and device of the output, a dense last axis, and is returned;
- the output has the dtype of `query`, a dense last axis, and no overlap with an input;
- with `request.lse` the function returns (out, lse); lse is fp32 (fp64 for float64 inputs), natural log, without the
  sink (S5, S6), shaped like the output without its last axis;
- a row that sees no key gives out = 0 and lse = -inf (S7).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor, device, dtype

    from .place import Place

__all__ = [
    "API_VERSION",
    "BlockSparseBackward",
    "BlockSparseForward",
    "Bound",
    "DenseBackward",
    "DenseForward",
    "Inner",
    "KVPart",
    "Like",
    "LinearForward",
    "MLAForward",
    "Method",
    "PagedForward",
    "PagedTables",
    "Session",
    "Slot",
    "VarlenBackward",
    "VarlenForward",
]

API_VERSION = 2
"""Version of this contract. A version only grows; a plugin of an earlier one still runs, see `registry.version_1`."""


class DenseForward(Protocol):
    """Family `dense`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        alibi: Tensor | None = None,
        q_segments: Tensor | None = None,
        k_segments: Tensor | None = None,
        out: Tensor | None = None,
        place: Place | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """
        Args:
            query: [B, S_q, H_q, D] for layout BSHD, [B, H_q, S_q, D] for BHSD.
            key: [B, S_k, H_kv, D] or [B, H_kv, S_k, D].
            value: [B, S_k, H_kv, D_v] or [B, H_kv, S_k, D_v].
            attn_mask: [B|1, H_q|1, S_q, S_k], bool (True = attend) or additive float.
            sinks: [H_q] logits.
            alibi: [H_q] slopes, given only if request.alibi.
            q_segments, k_segments: int32 [B, S_q] and [B, S_k], given only if request.segments: a query sees keys of
                its own number alone. "shared": both are one tensor.
            out: [B, S_q, H_q, D_v] or [B, H_q, S_q, D_v].
            place: given only if request.place, which only rows that ask for it are given.

        Returns:
            out, or (out, lse [B, S_q, H_q] or [B, H_q, S_q]).
        """
        ...


class DenseBackward(Protocol):
    """Gradient of `DenseForward`. `out` and `lse` may belong to a *merged* result of which this call is a part
    (ring, cascade, split K/V): the gradient is then exactly this part's share."""

    def __call__(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        attn_mask: Tensor | None = None,
        alibi: Tensor | None = None,
        q_segments: Tensor | None = None,
        k_segments: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dquery, dkey, dvalue) in the shapes of their inputs. Rows with lse = -inf get exact zeros."""
        ...


class VarlenForward(Protocol):
    """Family `varlen`: sequences packed along T."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        alibi: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """
        Args:
            query: [T_q, H_q, D]; key: [T_k, H_kv, D]; value: [T_k, H_kv, D_v].
            cu_seqlens_q, cu_seqlens_k: int32 [N+1], first 0, last T.
            max_seqlen_q, max_seqlen_k: host ints, at least the longest sequence.
            attn_mask: [N|1, H_q|1, max_seqlen_q, max_seqlen_k], read up to each sequence's lengths.
            sinks: [H_q]; out: [T_q, H_q, D_v]. alibi: [H_q] slopes, given only if request.alibi.

        Returns:
            out, or (out, lse [T_q, H_q]).
        """
        ...


class VarlenBackward(Protocol):
    """Gradient of `VarlenForward`; substituted (out, lse) as in `DenseBackward`."""

    def __call__(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        attn_mask: Tensor | None = None,
        alibi: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class PagedTables(NamedTuple):
    """The tables of a paged or latent call: which pages and how many keys each sequence has, and which queries (S9).

    Attributes:
        page_table: int32 [N, max_pages]. seq_lens: int32 [N], keys per sequence, new ones included; 0 = padding.
        cu_seqlens_q: int32 [N+1], first 0, last T_q. max_seqlen_q, max_seqlen_k: host ints, at least the longest.
        host: "seq_lens" or "cu_seqlens_q" -> the same numbers as a list, where the caller has them on the host; None
            where it does not, and in steps that are recorded. Read them through `listed`.
    """

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    host: Callable[[str], list[int]] | None = None

    def listed(self, name: str) -> list[int]:
        """The numbers of "seq_lens" or "cu_seqlens_q" as a list, not to be written: the caller's own list, or one read
        from the device, which waits for it."""
        found: list[int] = getattr(self, name).tolist() if self.host is None else self.host(name)
        return found

    def changed(self, **fields: Any) -> PagedTables:
        """The same tables with other values for `fields`. Lists on the host belong to the lengths as they were: with
        another `seq_lens` or `cu_seqlens_q` there are none."""
        lengths = "seq_lens" in fields or "cu_seqlens_q" in fields
        return self._replace(host=None, **fields) if lengths else self._replace(**fields)


class KVPart(NamedTuple):
    """More keys for the queries of a paged or latent call, in pages of their own (S9).

    The call's T_q packed queries are divided anew into N_p groups of consecutive queries, and every query of a group
    sees all keys of its row: neither causal nor a mask applies. A query sees the keys of the call and those of every
    part; sinks count once. One concept for a prefix that several sequences share (a group is the queries of those
    sequences; one part per level of a cascade) and for split KV (each part holds some tokens of every sequence).

    Attributes:
        page_table: int32 [N_p, max_pages]; seq_lens: int32 [N_p], keys of each row, 0 = none.
        cu_seqlens_q: int32 [N_p+1], first 0, last T_q. max_seqlen_q, max_seqlen_k: host ints, at least the longest
            group and row.
        key_cache, value_cache (paged), cache (latent): the pool that the pages are in, of the dtype, page size and
            layout of the call's; None = the call's own.
    """

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    key_cache: Tensor | None = None
    value_cache: Tensor | None = None
    cache: Tensor | None = None

    @property
    def tables(self) -> PagedTables:
        """The tables of a call over the keys of this part alone."""
        return PagedTables(*self[:5])


class PagedForward(Protocol):
    """Family `paged`: queries packed along T, keys and values in a paged cache (S9)."""

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        tables: PagedTables,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        kv_parts: Sequence[KVPart] = (),
        alibi: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """
        Args:
            query: [T_q, H_q, D].
            key_cache, value_cache: [pages, page_size, H_kv, D | D_v] for kv_layout NHD,
                [pages, H_kv, page_size, D | D_v] for HND; kv_dtype fp4_e2m1: uint8, two numbers a byte, D/2 wide.
            tables: pages and lengths of the N sequences.
            key, value: [T_q, H_kv, D | D_v], the rows of the query tokens, given where request.save_kv_cache is not
                None; written to the cache first if and only if it is True, and attended either way.
            attn_mask: [N|1, H_q|1, max_seqlen_q, max_seqlen_k]. With request.tree all of it is True but for the last
                S_q columns of each sequence, so that only those need be read.
            sinks: [H_q]; k_scale, v_scale: granularity request.kv_scales; out: [T_q, H_q, D_v].
            kv_parts: request.kv_parts of them, given only if that is not 0.
            alibi: [H_q] slopes, given only if request.alibi.

        Returns:
            out, or (out, lse [T_q, H_q]).
        """
        ...


class MLAForward(Protocol):
    """Family `mla`, absorbed form: one latent row per token serves all heads; V is the first D_c of the row."""

    def __call__(
        self,
        query: Tensor,
        cache: Tensor,
        *,
        tables: PagedTables,
        attn_mask: Tensor | None = None,
        kv_parts: Sequence[KVPart] = (),
        token_indices: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """
        Args:
            query: [T_q, H_q, D_c + D_r] (absorbed nope part, then rope part).
            cache: [pages, page_size, D_c + D_r], in float8 where kv_dtype is fp8_e4m3 or fp8_e5m2 without kv_scales;
                uint8 [pages, page_size, 656] for fp8_e4m3 with kv_scales block128, uint8 [pages, page_size, D/2 +
                D/16] for fp4_e2m1 with block16 (`polyattn.semantics.kv_quant.LATENT_FORMATS`).
            tables, attn_mask, kv_parts: as `PagedForward`.
            token_indices: int32 [T_q, request.token_topk], for rows that declare `token_topk`: the positions, in its
                own sequence, of the tokens that each query sees, in any order and none twice; -1 = none. Each is one
                that `causal` lets the query see, so that a kernel need not look. None = no lists.
            out: [T_q, H_q, D_c].

        Returns:
            out, or (out, lse [T_q, H_q]). The scale is always explicit: that of the uncompressed heads (S2).
        """
        ...


class BlockSparseForward(Protocol):
    """Family `block_sparse`: each block of queries sees a list of key blocks."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        block_counts: Tensor,
        block_indices: Tensor,
        block_valid: Tensor | None = None,
        block_starts: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """
        Args:
            query, key, value: as `DenseForward`, layout BHSD. request.block_shape (block_q, block_k) cuts them into
                nQ = ceil(S_q / block_q) and nK = ceil(S_k / block_k) blocks, of which the last may hold fewer tokens.
            block_counts: int32 [B|1, H_q|1, nQ], key blocks of each query block; 0 = its rows see no key.
            block_indices: int32 [B|1, H_q|1, nQ, max], their numbers, none twice; entries past the count are ignored
                and may hold anything.
            block_valid: int32 [nK], valid tokens of each key block, its first; None = all.
            block_starts: int32 [B|1, H_kv|1, nK], the first key of each block, for rows that declare `block_starts`:
                block_valid has its shape then, nK is free, and no key is in two blocks. None = the blocks cut S_k.
            out: [B, H_q, S_q, D_v].

        Returns:
            out, or (out, lse [B, H_q, S_q]).
        """
        ...


class BlockSparseBackward(Protocol):
    """Gradient of `BlockSparseForward`; substituted (out, lse) as in `DenseBackward`."""

    def __call__(
        self, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, **lists: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dquery, dkey, dvalue). `lists`: block_counts, block_indices, block_valid and block_starts of the forward."""
        ...


class LinearForward(Protocol):
    """Family `linear`: gated delta rules with a recurrent state (S10)."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        gate: Tensor,
        beta: Tensor,
        state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        a_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        gate_bound: float | None = None,
        state_slots: Tensor | None = None,
        parents: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            query, key: [B, T, H_k, D]; value: [B, T, H_v, D_v].
            gate: log decay, down to -inf, [B, T, H_v] (GDN) or [B, T, H_v, D] (KDA); beta: [B, T, H_v].
            state: fp32 [N, H_v, D, D_v] for state_layout KV, [N, H_v, D_v, D] for VK; None = zeros.
            cu_seqlens: int32 [N+1] with B = 1; out: [B, T, H_v, D_v].
            a_log, dt_bias, gate_bound: given only if request.raw_gates: gate and beta are what S10 computes gates of.
                [H_v]; [H_v], for KDA [H_v, D], or None; a number below 0 with "bounded".
            state_slots: integers [N], given only if request.state_slots: the state of sequence n is
                state[state_slots[n]], which is updated in place. -1: it has none, and all that is returned of it is 0.
            parents: integers [B, T], given only if request.tree: the draft token that each follows, -1 = the state.

        Returns:
            (out, the state after the last token), with request.state_slots the pool. With request.state_out "every" the
            states after each token [B, T, H_v, D, D_v] in the layout, and neither state nor pool is written.
        """
        ...


class Like(NamedTuple):
    """What a method may know of a call while it plans: its sizes, and where its tensors are.

    Attributes:
        batch: B. heads, kv_heads: H_q and H_kv. tokens: S. head_dim: D.
        dtype, device: of the tensors.
    """

    batch: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    dtype: dtype
    device: device


class Inner(Protocol):
    """The calls that a method makes: whoever would be chosen without a name serves them, the scale is the caller's, and
    `polyattn.explain` shows them below the method. Tensors and results are heads first, [B, H, S, D].

    Attributes:
        scale: of the caller's logits, for what a method computes itself; None = D ** -0.5.
    """

    scale: float | None

    def dense(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        """`polyattn.attention`; `given`: its keywords but layout and backend."""

    def varlen(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        """`polyattn.varlen_attention`, packed: [T, H, D]; `given`: its keywords but backend."""

    def block_sparse(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        """`polyattn.block_sparse_attention`; `given`: its keywords but layout and backend."""

    def linear(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        """`polyattn.linear_attention`, tokens first; `given`: its keywords but backend."""


class Method(Protocol):
    """A method turns one dense call that has a place into calls of families: sliding tiles, chosen blocks, and others.

    It is the target of a `Provider` whose rows are of family dense with `when={"place": True}`. It is made once for
    each kind of call, as `Target(**options)` with the backend's own checked options, and must be made of operations
    that autograd goes through. The place is checked before: grid and text add up to S. What it may have beside these
    functions: `density(plan, place)` (docs/methods.md); `reads`, the names of tensors of the place that it knows, by
    which a slip of a name is found; `own_kernels`, what a run is told of kernels that it launches itself: names, or a
    function of the place, the `Like` and whether gradients are wanted, which returns them; `plans_by_step`, False where
    a plan holds for all steps and branches.
    """

    def leaves_dense(self, place: Place) -> str:
        """Why the method leaves this layer or step dense, as a sentence for people; "" = it serves it."""

    def plan(self, place: Place, like: Like) -> Any:
        """What calls of one grid, text, step and branch share, whatever their layer and tensors: permutations, lists.

        Made once for them and kept; `place.layer`, `place.tensors` and `place.kept` are another in each call.
        """

    def attend(
        self, plan: Any, query: Tensor, key: Tensor, value: Tensor, *, place: Place, kept: dict[str, Any], inner: Inner
    ) -> Tensor:
        """
        Args:
            plan: of `plan`. query: [B, H_q, S, D]; key: [B, H_kv, S, D]; value: [B, H_kv, S, D_v].
            kept: `place.kept`, or an empty dict that ends with the call.
            inner: the calls of families.

        Returns:
            out [B, H_q, S, D_v].
        """


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a `Session` lives: what its plans may assume, and the memory they may use.

    A serving context has one slot for eager steps and one for each size of recorded steps. Eager steps exceed none of
    these numbers; recorded steps have exactly `max_sequences` rows and `max_tokens` tokens, padding included.

    Attributes:
        device: of all tensors.
        max_sequences: N of any step. max_tokens: T_q. max_pages: pages of one sequence, the width of a page table.
        workspace: (name, nbytes) -> uint8 [nbytes], aligned to 256 bytes. The same name gives the same memory for as
            long as it is not asked to grow; it belongs to the serving context, no other session sees it, and it does
            not move once steps of the slot are recorded.
        recorded: steps of this slot are recorded into a device graph: tensors that `forward` reads must stay where
            they are from plan to plan, and host numbers it uses must not depend on the step.
    """

    device: device
    max_sequences: int
    max_tokens: int
    max_pages: int
    workspace: Callable[[str, int], Tensor]
    recorded: bool = False


class Session(Protocol):
    """The serving side of a backend that plans: one object for all layers that ask the same of it, in one slot.

    A step has: mode, phase; sequences N, tokens T_q, max_seqlen_q, max_seqlen_k, page_size (host ints); page_table
    int32 [N, max_pages], seq_lens int32 [N], cu_seqlens_q int32 [N+1], slots and positions int64 [T_q]; made on first
    use and kept for all: cu_seqlens_k and kv_indptr int32 [N+1], kv_indices int32 (pages one after the other),
    last_page_len int32 [N], at(page_size) (the same step in other pages), host(name) (a copy on the host) and
    listed(name) (the same as a list of int).
    """

    def plan(self, step: Any) -> None:
        """On the host, once per step, never recorded: it may allocate, wait for the device and read lengths."""

    def prepare(self, step: Any) -> None:
        """On the device, after `plan`, and recorded with the step, so any number of times: it neither waits nor
        allocates. Before it the step's tensors hold the step before; `step.host(name)` is the plan's way to read."""

    def forward(self, *tensors: Any, **keywords: Any) -> Any:
        """Once per layer: the family's forward, with `tables` of the step that was planned last. A layer that has no
        new keys brings none, also where the request says that there are."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """A backend bound to one request.

    Attributes:
        forward: the family's `...Forward`.
        backward: the family's `...Backward`, or None when `forward` is differentiable by autograd itself
            (built from torch ops) or trains nothing. With a backward, `forward` returns (out, lse) whenever the
            request's `grad` is not empty, whatever `request.lse` says: the backward needs it.
        traceable: torch.compile may trace into `forward`. False: it is called through a custom op.
        simple: `forward` for calls without mask, sinks, out and without a backward of its own, taking (query, key,
            value) only: the shortest way to the kernel. None = use `forward`.
        session: paged and mla, for kernels that plan: a new serving side for a slot. `forward` works all the same, for
            a single call. None = stateless: `forward` is given the tables of each step.
        exportable: while torch.export traces, `forward` is made of public operators that autograd goes through, and
            gives an LSE only where the request has one. False: an export of a kernel that has a backward holds the
            custom op.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    traceable: bool = False
    simple: Callable[..., Any] | None = None
    session: Callable[[Slot], Session] | None = None
    exportable: bool = False
