"""The one wrapper: plan, run, CUDA-graph buffers and workspace of every batch attention class."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from flashinfer._core import env
from flashinfer._core.backends import REPORTED_AS, variants_of
from flashinfer._core.checks import require, require_tensor
from flashinfer._core.kv_layout import check_layout, paged_views, ragged_views
from flashinfer.ops.attention import traced
from flashinfer.ops.attention.again import LastFixedPlan, LastPlan
from flashinfer.ops.attention.batch import Batch, limits_of
from flashinfer.ops.attention.buffers import GraphBuffers, Replaceable, device_of
from flashinfer.ops.attention.captured import Captured
from flashinfer.ops.attention.kind import Kind, kind_of, means
from flashinfer.ops.attention.lse_form import in_form
from flashinfer.ops.attention.masks import custom_mask_table
from flashinfer.ops.attention.options import NVFP4_NAMES, PlanOptions, tile_rows
from flashinfer.ops.attention.problem import Table, alibi_slopes
from flashinfer.ops.attention.request import Request
from flashinfer.ops.attention.split import Limits
from flashinfer.ops.attention.tables import KV_INDICES, LENGTHS, NAMES, QO_INDPTR, Stage
from flashinfer.ops.attention.variants import AttentionVariant

# Room is kept for tables of so many sets of lengths, an engine's batch sizes, with so many elements at most.
_MOST_STAGES, _MOST_KEPT = 256, 1 << 14
# Batches of other options, as the older forward() asks for, whose buffers are kept from plan to plan.
_MOST_BATCHES = 16
# Page ids of a batch grow from step to step: room for them is made in steps of so many, 4 KiB.
_MORE_PAGES = 1024


class AttentionWrapper(Captured, Replaceable):
    """plan() and run() for a batch; public classes add their signatures.

    In CUDA-graph mode the given buffers hold the tables and are never replaced: plan() copies into them, so that a
    graph captured over run() serves every later batch of up to as many requests, pages and query rows. A smaller batch
    is padded with empty requests.

    Engines copy into the tables, replace them, and plan again from what lies there: flashinfer/compat has the names,
    `Replaceable` what comes of it.

    The runs of one plan share its partial results and their counters: on different streams they have to be ordered.
    """

    _paged = True
    # What errors call the tables of a plan: the parameters of plan().
    _names = NAMES
    # Whether prefills come first in its batches and decodes last.
    _mixed = False
    # Whether the third of a plan's tables has numbers of keys, not of the tokens in last pages.
    _lengths_in_tokens = False
    # Whether every call asks for the log-sum-exp.
    _tells_lse = False

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str, backend: str, buffers: GraphBuffers | None,
        variant: AttentionVariant | None = None,
    ):  # fmt: skip
        check_layout(kv_layout)
        variants_of(backend)
        self.device = device_of(float_workspace_buffer)
        self._kv_layout = kv_layout
        self._views = partial(paged_views if self._paged else ragged_pair, kv_layout=kv_layout)
        self._float_workspace_buffer = float_workspace_buffer
        # Engines share and replace it; our work lists are small and live with the batch they belong to.
        self._int_workspace_buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._on_gpu = self.device.type == "cuda"
        self._backend = backend
        self._variant = variant
        self._use_cuda_graph = buffers is not None
        # The batch that was planned; what run() takes, which is None while a change by an engine waits to be taken up;
        # and those whose buffers may serve again: in CUDA-graph mode, all that a graph may have been captured over.
        self._base: Batch | None = None
        self._batch: Batch | None = None
        self._batches: dict[Kind, Batch] = {}
        # The tables in use; in CUDA-graph mode the fixed buffers.
        self._shown = Table() if buffers is None else buffers.table()
        # What the last plan from tables was asked for, and what it left for one that is like it.
        self._asked: tuple = None, None
        self._last: LastPlan | None = None
        # Options that an engine has set since the plan.
        self._told: dict = {}
        # Rows and KV entries of the first plan; -1 where only the device knew.
        self._first = -1, -1
        self._scratch: torch.Tensor | None = None
        self._debug = env.DEBUG.is_on()
        self._number = traced.number_of(self)
        self._stages: dict[tuple, Stage] = {}
        # Constants on the device, by stream: work on another may not have written them yet.
        self._uniform: dict[tuple, torch.Tensor] = {}
        self._alibi: dict[tuple, torch.Tensor] = {}
        self._stream: int | None = None
        self._last_kind: tuple = None, None
        self._capturing = False

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper keeps its tables in fixed buffers."""
        return self._use_cuda_graph

    @property
    def resolved_backend(self) -> str:
        """Upstream's name of the variant that the planned batch runs on; the asked-for name before plan()."""
        return self._backend if self._base is None else REPORTED_AS[self._planned().kind.choice.variant.name]

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replace the workspace buffers; takes effect at the next plan()."""
        device = device_of(float_workspace_buffer)
        require(device == self.device, "float_workspace_buffer", f"a tensor on {device}", str(self.device))
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer

    def explain(self):
        """The Choice of the planned batch: variant, config, and why the others were refused."""
        return self._planned().kind.choice

    def _partials(self, count: int) -> torch.Tensor:
        """Scratch for partial results: the caller's workspace if it is large enough, else ours.

        Ours only grows, and a buffer that a captured graph uses stays alive in the work list that refers to it.
        """
        given = self._float_workspace_buffer
        given = given.view(torch.uint8) if given.is_contiguous() else given.new_empty(0, dtype=torch.uint8)
        if given.numel() >= count and given.data_ptr() % 16 == 0:
            return given[:count]
        if self._scratch is None or self._scratch.numel() < count or self._capturing:
            self._scratch = torch.empty(count, dtype=torch.uint8, device=self.device)
        return self._scratch[:count]

    def _plan(self, options: PlanOptions, tables: tuple, *, q_len: int = 0, longest_q: int = 0, likely_q: int = 0,
              custom_mask=None, packed_custom_mask=None) -> None:  # fmt: skip
        """Plan a batch from tables.

        Parameters
        ----------
        options : PlanOptions
            As the caller has them.
        tables : tuple of Tensor
            qo_indptr, kv_indptr, last_page_len or numbers of keys, kv_indices; None for what the batch does not have.
        q_len, longest_q, custom_mask, packed_custom_mask
            As Request has them.
        likely_q : int
            About the longest query, where no table and no bound tells it: what the tile is chosen by.
        """
        if self._on_gpu and torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self._plan(options, tables, q_len=q_len, longest_q=longest_q, likely_q=likely_q,
                                  custom_mask=custom_mask, packed_custom_mask=packed_custom_mask)  # fmt: skip
        masked = custom_mask is not None or packed_custom_mask is not None
        options = options.plain()
        asked = options, q_len, longest_q, likely_q, self._backend, masked
        if self._last is not None and asked == self._asked[0] and self._plan_again(tables):
            return
        lens, by_keys = tables[LENGTHS], self._lengths_in_tokens
        request = Request(
            self._checked(options), *tables[:LENGTHS], None if by_keys else lens, tables[KV_INDICES], custom_mask,
            packed_custom_mask, q_len, longest_q, kv_lens=lens if by_keys else None, names=self._names,
        )  # fmt: skip
        counts = request.lengths_on_host()
        if q_len:
            request.rows = request.batch_size * q_len
        stream = self._look_at_stream(counts)
        old, graph = self._base, self._use_cuda_graph
        stage = self._stage_for(self._room(request, counts) if graph else counts, stream)
        tile_q = self._take(request, stage) or likely_q
        table = Table(*self._tables_fixed) if graph else self._bring(request, stage, stream)
        if by_keys:
            table.kv_lens, table.last_page_len = table.last_page_len, None
        if q_len:
            table.qo_indptr = self._uniform_indptr(table.kv_indptr.shape[0] - 1, q_len, stream)
        limits = limits_of(request, table)
        rows = old.kind.problem.rows if graph and old is not None else tile_rows(tile_q, request.options.group)
        kind = self._kind_of(request.options, rows, masked, self._backend)
        if graph and old is not None:
            kind, limits = self._captured(request, kind, limits)
        elif graph and 0 <= limits.q_rows < table.batch_size:
            # Later plans may give each request that the buffers hold a query.
            limits = limits._replace(q_rows=table.batch_size)
        elif not graph and request.options.fixed_split_size and stage.counts[QO_INDPTR]:
            limits = limits._replace(longest_q=tile_q)
        if graph:
            self._fill_buffers(request, counts, stage, stream)
        if masked:
            self._add_mask(request, table)
        self._take_up(kind, request, table, limits, stream)
        self._keep_plan(asked, tables, stage, tile_q)

    def _plan_again(self, tables: tuple) -> bool:
        """Plan a batch that is like the last in all but what its tables hold; False where it is not."""
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if stream != self._stream or torch.cuda.is_current_stream_capturing():
            return False
        if not self._last.repeat(tables, stream, len(self._batches) == 1):
            return False
        self._batch = self._base
        if not self._use_cuda_graph:
            self._shown = self._base.table
        if self._told:
            self._told = {}
        return True

    def _keep_plan(self, asked: tuple, tables: tuple, stage: Stage, tile_q: int) -> None:
        """Keep what a plan like this one needs, once there were two of them."""
        before, self._asked = self._asked, (asked, stage)
        ordered = self._on_gpu and not (self._capturing or self._debug)
        if ordered and before == self._asked and LastPlan.may_follow(tables, stage, self._base):
            what = tables, stage, tile_q, self._base
            self._last = LastFixedPlan(*what, self._tables_fixed) if self._use_cuda_graph else LastPlan(*what)

    def _checked(self, options: PlanOptions) -> PlanOptions:
        """Options of a plan with what the wrapper adds."""
        interleaved = self._backend == "trtllm-gen" and options.kv_dtype in NVFP4_NAMES
        return options.changed(variant=self._variant, mixed=self._mixed, interleaved=interleaved)

    def _take_up(self, kind: Kind, request: Request, table: Table, limits: Limits, stream: int | None) -> None:
        """Make the batch of a plan, in buffers of earlier ones where they suffice."""
        graph = self._use_cuda_graph
        # The buffers of earlier plans serve where work runs in order: on one stream, outside a capture.
        if not graph and (stream != self._stream or self._capturing or len(self._batches) > _MOST_BATCHES):
            self._batches = {}
        self._stream = None if self._capturing else stream
        batch = self._batches.get(kind)
        if batch is None:
            batch = self._batches[kind] = self._new_batch(kind, stream)
        batch.fill(request, table, limits)
        if graph:
            for other in self._batches.values():
                if other is not batch:
                    other.fill(replace(request, options=other.options), table, self._bounded(other, limits))
        if self._base is None:
            self._first = request.rows, request.kv_entries
        self._base = self._batch = batch
        self._told, self._last = {}, None
        if not graph:
            self._shown = table
        elif request.q_len and table.qo_indptr is not None:
            self._shown.qo_indptr = table.qo_indptr

    def _new_batch(self, kind: Kind, stream: int | None) -> Batch:
        options = kind.options
        slopes = self._slopes(options, stream) if options.pos_encoding_mode == "ALIBI" else None
        batch = Batch(kind, self._partials, slopes, self._debug, self._use_cuda_graph)
        batch.kv_layout = self._kv_layout
        return batch

    def _kind_of(self, *key) -> Kind:
        """The kind for (options, rows, custom, backend): most plans ask for that of the last."""
        if key != self._last_kind[0]:
            options, rows, custom, backend = key
            self._last_kind = key, self._new_kind(options, rows, custom, backend)
            self._last_kind[1].expect(self._tells_lse)
        return self._last_kind[1]

    def _new_kind(self, options: PlanOptions, rows: int, custom: bool, backend: str) -> Kind:
        return kind_of(options, rows, custom, self.device, backend)

    def _look_at_stream(self, counts: tuple[int, ...]) -> int | None:
        """The current stream. Notes whether it is captured: a graph reads the tables again at every replay."""
        if not self._on_gpu:
            return None
        self._capturing = torch.cuda.is_current_stream_capturing()
        if self._capturing and any(counts):
            require(False, "plan", "tables on the host in a captured stream", f"tables on {self.device}")
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def _take(self, request: Request, stage: Stage) -> int:
        """Check tables on the host, in their room. Returns a bound on query lengths; 0 where it is unknown."""
        for i, table in enumerate(request.tables):
            if stage.counts[i]:
                stage.take(i, table)
        ids = request.kv_indices
        page_ids = None if ids is None else ids.shape[0]
        request.rows, request.kv_entries = request.check(stage, page_ids)
        if self._debug:
            # Looking at tables on a GPU waits for it.
            counts = tuple(0 if t is None else t.shape[0] for t in request.tables)
            everything = Stage(counts, torch.device("cpu"), self._names)
            for i, table in enumerate(request.tables):
                if table is not None:
                    everything.take(i, table.cpu())
            request.check(everything, page_ids)
        longest = request.q_len or request.longest_q
        return stage.longest_step(QO_INDPTR) if not longest and stage.counts[QO_INDPTR] else longest

    def _stage_for(self, lengths: tuple[int, ...], stream: int | None) -> Stage:
        *others, pages = lengths
        if pages % _MORE_PAGES:
            lengths = *others, pages + -pages % _MORE_PAGES
        stage = self._stages.get((lengths, stream))
        if stage is None:
            # In CUDA-graph mode the buffers are the caller's.
            stage = Stage(lengths, torch.device("cpu") if self._use_cuda_graph else self.device, self._names)
            if sum(lengths) <= _MOST_KEPT:
                if len(self._stages) >= _MOST_STAGES:
                    self._stages.clear()
                self._stages[lengths, stream] = stage
        return stage

    def _bring(self, request: Request, stage: Stage, stream: int | None) -> Table:
        """The request's tables as int32 on the compute device; those on the host in one copy."""
        if stage.parts:
            stage.send(stream)
        tables = []
        for i, table in enumerate(request.tables):
            if stage.parts and stage.counts[i]:
                n = table.shape[0]
                table = stage.parts[i] if n == stage.counts[i] else stage.parts[i][:n]
            elif table is not None and (table.device != self.device or table.dtype != torch.int32):
                here = not table.is_cuda or table.device == self.device
                require(here, request.names[i], f"a tensor on {table.device}", f"the host, or {self.device}")
                table = table.to(self.device, torch.int32)
            tables.append(table if table is None or table.is_contiguous() else table.contiguous())
        return Table(*tables)

    def _uniform_indptr(self, rows: int, q_len: int, stream: int | None) -> torch.Tensor:
        """Offsets of `rows` requests of `q_len` queries each. What a graph was captured over is never replaced."""
        key = rows, q_len, None if self._use_cuda_graph else stream
        indptr = self._uniform.get(key)
        if indptr is None or (self._capturing and not self._use_cuda_graph):
            indptr = torch.arange(0, (rows + 1) * q_len, q_len, dtype=torch.int32, device=self.device)
            if not self._capturing:
                self._uniform[key] = indptr
        return indptr

    def _slopes(self, options: PlanOptions, stream: int | None) -> torch.Tensor:
        key = options.num_qo_heads, stream
        if key not in self._alibi:
            require(not self._capturing, "pos_encoding_mode", "ALIBI in a captured stream", "a plan before the capture")
            slopes = torch.tensor(alibi_slopes(options.num_qo_heads), dtype=torch.float32, device="cpu")
            self._alibi[key] = slopes.to(self.device, non_blocking=True)
        return self._alibi[key]

    def _add_mask(self, request: Request, table: Table) -> None:
        """The custom mask as packed bits; in CUDA-graph mode in its fixed buffers."""
        fixed = self._shown
        if self._use_cuda_graph and fixed.mask is None:
            require(False, "custom_mask", "a mask", "None in CUDA-graph mode without custom_mask_buf")
        custom_mask_table(request, table)
        if not self._use_cuda_graph:
            return
        most = fixed.mask.shape[0]
        length = table.mask.shape[0]
        if request.custom_mask is not None:
            # pack() pads for the worst rounding; what is past the bits is zero and may be left out.
            length = min(length, (request.custom_mask.shape[0] + 7) // 8 + table.batch_size)
        require(length <= most, "custom_mask", f"{length} bytes packed", f"at most {most}, custom_mask_buf's length")
        fixed.mask[:length].copy_(table.mask[:length])
        fixed.mask_indptr[: table.mask_indptr.shape[0]].copy_(table.mask_indptr)
        table.mask, table.mask_indptr = fixed.mask, fixed.mask_indptr

    def _run(self, q: torch.Tensor, kv, out, lse, numbers: tuple, **others):
        """Attention of the planned batch; see Batch.call."""
        if torch.compiler.is_compiling():
            return traced.run(self, q, kv, out, lse, numbers, **others)
        try:
            return (self._batch or self._planned()).call(q, kv, self._views, out, lse, numbers, **others)
        except (AttributeError, TypeError):
            for name, value in dict(q=q, out=out, lse=lse).items():
                require_tensor(name, value, optional=name != "q")
            self._views(kv)
            raise

    def _run_in_form(self, q: torch.Tensor, kv, out, lse, numbers: tuple, lse_base: str, lse_layout: str = "NH",
                     **others):  # fmt: skip
        """`_run` with the log-sum-exp in another base or layout."""
        return_lse, *rest = numbers
        attend = lambda lse, return_lse: self._run(q, kv, out, lse, (return_lse, *rest), **others)
        return in_form(attend, q, lse, return_lse, lse_base, lse_layout)

    def _planned(self) -> Batch:
        if self._base is None:
            raise ValueError(f"{type(self).__name__}.run: got no plan; allowed: after plan()")
        if self._batch is None:
            self._replan()
        return self._batch

    def _factors(self, kv_block_scales, kv_cache_sf=None) -> dict:
        """Block scales of an nvfp4 cache, under either name, as Batch.run takes them."""
        name = "kv_block_scales"
        if kv_cache_sf is not None:
            require(kv_block_scales is None, "kv_cache_sf", "kv_block_scales too", "one of the two")
            name, kv_block_scales = "kv_cache_sf", kv_cache_sf
        if kv_block_scales is None:
            return {}
        k_factors, v_factors = paged_views(kv_block_scales, self._kv_layout, name)
        return dict(k_factors=k_factors, v_factors=v_factors)

    def _change_plan(self, **changes) -> None:
        """What the older forward() takes over from plan(): the same tables under other options."""
        current = self._planned()
        masked = current.table.mask is not None
        if means(current.kind, changes, masked):
            return
        base, changed = self._base, current.options.changed(**changes)
        kind = kind_of(changed, base.kind.problem.rows, masked, self.device, self._backend)
        stream = self._look_at_stream(())
        # As for a plan: on another stream, or in a capture, it gets buffers of its own, which serve no other.
        ordered = self._use_cuda_graph or (stream == self._stream and not self._capturing)
        batch = self._batches.get(kind) if ordered else None
        if batch is None:
            batch = self._new_batch(kind, stream)
            if ordered:
                self._batches[kind] = batch
        if batch.table is not base.table:
            batch.fill(replace(base.request, options=changed), base.table, base.limits)
        self._batch = batch

    def end_forward(self) -> None:
        """Kept for callers of older versions; there is nothing to release."""


def ragged_pair(kv: tuple[torch.Tensor, torch.Tensor], kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`ragged_views` of a pair."""
    return ragged_views(*kv, kv_layout)
