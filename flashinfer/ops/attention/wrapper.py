"""The one wrapper: plan, run, CUDA-graph buffers and workspace of every batch attention class."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flashinfer._core import env
from flashinfer._core.backends import REPORTED_AS, variants_of
from flashinfer._core.checks import NoPlan, number, renamed, require, require_tensor
from flashinfer._core.literals import Backend, KvLayout
from flashinfer._core.tracing import is_traced
from flashinfer.ops.attention import traced
from flashinfer.ops.attention.caller_workspace import CallerWorkspace, device_of
from flashinfer.ops.attention.host_tables import (
    HostTables, TableStore, fill_buffers, host_lengths, lengths_in_buffers,
)  # fmt: skip
from flashinfer.ops.attention.kernels import Kernels, check_captured, kernels_of, means
from flashinfer.ops.attention.masks import check_mask, custom_mask_table
from flashinfer.ops.attention.operands import check_number, check_window, is_wider, with_lse
from flashinfer.ops.attention.options import PlanOptions, tile_rows
from flashinfer.ops.attention.plan import Plan
from flashinfer.ops.attention.problem import alibi_slopes
from flashinfer.ops.attention.replay import MOST_PLANS, PlanReplay, PlanReplays
from flashinfer.ops.attention.split import Limits
from flashinfer.ops.attention.tables import KV_INDPTR, NAMES, QO_INDPTR, Table
from flashinfer.ops.attention.variants import AttentionVariant
from flashinfer.ops.formats import KV_NAMES
from flashinfer.ops.kv_layout import check_layout, paged_views, ragged_views

# Fields of PlanOptions by their names in plan(), where they differ.
_AS_PLANNED = dict(q_dtype="q_data_type", kv_dtype="kv_data_type", o_dtype="o_data_type")
# Plans of other options, as the older forward() asks for, whose buffers are kept from plan to plan.
_MOST_KERNELS = 16


class AttentionWrapper(CallerWorkspace):
    """plan() and run() for a batch; public classes add their signatures.

    In CUDA-graph mode the given buffers hold the tables and are never replaced: plan() copies into them, so that a
    graph captured over run() serves every later batch of up to as many requests, pages and query rows. A smaller batch
    is padded with empty requests.

    The runs of one plan share its partial results and their counters: on different streams they have to be ordered.
    """

    _paged = True
    # What errors call the tables of a plan: the parameters of plan().
    _names = NAMES
    # The parameters of run() for queries, keys and values.
    _operands = "q", "paged_kv_cache[0]", "paged_kv_cache[1]"
    # And what they call its options, where plan() has other names.
    _renames: dict[str, str] = {}
    # Whether prefills come first in its batches and decodes last.
    _mixed = False
    # Whether the third of a plan's tables has numbers of keys, not of the tokens in last pages.
    _in_tokens = False
    # Whether every call asks for the log-sum-exp.
    _returns_lse = False

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: KvLayout, backend: Backend, buffers: Table | None,
        variant: AttentionVariant | None = None,
    ):  # fmt: skip
        check_layout(kv_layout)
        variants_of(backend)
        self.device = device_of(float_workspace_buffer)
        self._kv_layout: KvLayout = kv_layout
        self._views = partial(paged_views if self._paged else ragged_pair, kv_layout=kv_layout)
        self._float_workspace_buffer = float_workspace_buffer
        # Engines share and replace it; our work lists are small and live with the plan they belong to.
        self._int_workspace_buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._on_gpu, self._index = self.device.type == "cuda", self.device.index
        self._backend: Backend = backend
        self._variant = variant
        self._use_cuda_graph = buffers is not None
        # The tables in use; in CUDA-graph mode the fixed buffers.
        self._shown = Table() if buffers is None else buffers
        self._debug = env.DEBUG.is_on()
        self._forget()

    def _forget(self) -> None:
        """Be a wrapper without a plan."""
        # The plan from tables; what run() takes, which is None while a change by an engine waits to be taken up; and
        # those whose buffers may serve again: in CUDA-graph mode, all that a graph may have been captured over.
        self._base: Plan | None = None
        self._active: Plan | None = None
        self._plans: dict[Kernels, Plan] = {}
        self._store = TableStore(self.device, self._names, self._in_tokens, self._use_cuda_graph)
        # What the last plans from tables, which asked for the same, left for those that are like them.
        self._replays: PlanReplays | None = None
        # Options that an engine has set since the plan.
        self._options_set: dict = {}
        # Rows and KV entries of the first plan; -1 where only the device knew.
        self._first = -1, -1
        self._scratch: torch.Tensor | None = None
        self._number = traced.number_of(self)
        self._alibi: dict[tuple, torch.Tensor] = {}
        self._stream: int | None = None
        # What was looked up for the last plan in full: most ask for the same.
        self._last_checked: tuple = None, None
        self._last_kernels: tuple = None, None
        self._capturing = False
        # Options of a traced forward().
        self._changes: dict | None = None

    def __getstate__(self) -> dict:
        """What a copy has: all but the plan. Of two wrappers with one plan, each would fill the other's work lists."""
        bare = object.__new__(type(self))
        bare.__dict__.update(self.__dict__)
        bare._forget()
        bare._shown = replace(self._shown) if self._use_cuda_graph else Table()
        return bare.__dict__

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper keeps its tables in fixed buffers."""
        return self._use_cuda_graph

    @property
    def resolved_backend(self) -> str:
        """Upstream's name of the variant that the planned batch runs on; the asked-for name before plan()."""
        return self._backend if self._base is None else REPORTED_AS[self._planned().kernels.choice.variant.name]

    def _use_workspace(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        super()._use_workspace(float_workspace_buffer, int_workspace_buffer)
        if not self._use_cuda_graph:
            # Work lists of plans refer to the old one.
            self._plans, self._replays = {}, None

    def explain(self):
        """What the planned batch runs on, and why.

        Returns
        -------
        Choice
            Its variant, its config, and the reasons for which the others were refused.

        Raises
        ------
        ValueError
            Before plan().
        """
        return self._planned().kernels.choice

    def _plan(self, options: PlanOptions, tables: tuple, *, q_len: int = 0, longest_q: int = 0, likely_q: int = 0,
              custom_mask=None, packed_custom_mask=None) -> None:  # fmt: skip
        """Plan a batch from tables.

        Parameters
        ----------
        options : PlanOptions
            As the caller has them.
        tables : tuple of Tensor
            qo_indptr, kv_indptr, last_page_len or numbers of keys, kv_indices; None for what the batch does not have.
        q_len, longest_q : int
            The query length of every request, and a bound on query lengths; 0 where it is unknown.
        likely_q : int
            About the longest query, where no table and no bound has it: what the tile is chosen by.
        custom_mask, packed_custom_mask : Tensor, optional
        """
        if torch.compiler.is_compiling() or self._on_gpu and torch._C._cuda_getDevice() != self._index:
            return traced.plan_elsewhere(self, options, tables, q_len=q_len, longest_q=longest_q, likely_q=likely_q,
                                         custom_mask=custom_mask, packed_custom_mask=packed_custom_mask)  # fmt: skip
        masked = custom_mask is not None or packed_custom_mask is not None
        how = q_len, longest_q, likely_q, self._backend, masked
        kept = self._replays
        try:
            alike = kept is not None and (options, how) == kept.asked
            replay = kept.of(tables[KV_INDPTR].numel()) if alike else None
        except (AttributeError, RuntimeError):
            # A table that is no tensor, or an option that is one of several elements, which equals nothing: a plan in
            # full refuses both by name.
            replay = None
        if replay is not None:
            stream = torch._C._cuda_getCurrentRawStream(self._index)
            if stream == self._stream and not torch.cuda.is_current_stream_capturing():
                try:
                    repeated = replay.repeat(tables, stream, len(self._plans) == 1)
                except Exception:
                    if replay.broken and not self._use_cuda_graph:
                        self._base = self._active = None
                    raise
                if repeated:
                    self._base = self._active = plan = replay.plan
                    if not self._use_cuda_graph:
                        self._shown = plan.table
                    if self._options_set:
                        self._options_set = {}
                    return
        options = options.plain()
        host = self._plan_in_full(options, tables, q_len, longest_q, likely_q, (custom_mask, packed_custom_mask))
        if kept is None or (options, how) != kept.asked:
            # The buffers of CUDA-graph mode have what one number of requests has left there.
            kept = self._replays = PlanReplays((options, how), 1 if self._use_cuda_graph else MOST_PLANS)
        # Two plans alike leave what a third needs.
        comes_again = kept.comes_again(tables, host)
        ordered = self._on_gpu and not (self._capturing or self._debug)
        if ordered and comes_again and PlanReplay.may_follow(tables, host, self._base):
            fixed, tile_q = self._fixed_tables() if self._use_cuda_graph else None, self._tile_q(host, longest_q)
            kept.add(tables, PlanReplay(tables, host, tile_q or likely_q, self._base, fixed))

    def _plan_in_full(self, options: PlanOptions, tables: tuple, q_len: int, longest_q: int, likely_q: int,
                      mask: tuple) -> HostTables:  # fmt: skip
        """A plan that is not like the last. Returns the room of its host tables."""
        options, graph, old = self._checked(options), self._use_cuda_graph, self._base
        counts = host_lengths(tables, self._names, options.page_size, q_len)
        stream = self._look_at_stream(counts)
        if graph:
            fixed = self._fixed_tables()
            lengths = lengths_in_buffers(fixed, tables, counts, self._names, self._in_tokens)
        host = self._store.room(lengths if graph else counts, stream)
        rows, entries, first_row = self._check_on_host(tables, host, options.page_size, q_len)
        tile_q = q_len or self._tile_q(host, longest_q)
        if not graph:
            # The last plan may have its tables in the same room: where this one fails from here on, there is none.
            self._base = self._active = None
        given = fixed if graph else self._store.bring(tables, host, stream)
        table = Table(*given, names=self._names, operands=self._operands)
        table.rows, table.kv_entries, table.first_row = rows, entries, first_row
        table.longest_q, table.uniform_q_len = longest_q, q_len
        if self._in_tokens:
            table.kv_lens, table.last_page_len = table.last_page_len, None
        if q_len:
            requests = table.kv_indptr.shape[0] - 1
            table.qo_indptr = self._store.uniform_indptr(requests, q_len, stream, self._capturing)
        limits = table.limits(options.page_size)
        captured = graph and old is not None
        rows = old.kernels.problem.rows if captured else tile_rows(tile_q or likely_q, options.group)
        masked = any([given is not None for given in mask])
        kernels = self._kernels_of(options, rows, masked, self._backend)
        if captured:
            kernels, limits = self._captured(kernels, q_len, limits)
        elif graph and 0 <= limits.q_rows < table.batch_size:
            # Later plans may give each request that the buffers hold a query.
            limits = limits._replace(q_rows=table.batch_size)
        elif not graph and options.splits and host.counts[QO_INDPTR]:
            limits = limits._replace(longest_q=tile_q)
        pairs = host.pairs(options.page_size, q_len) if masked else None
        if graph and masked:
            # Before the buffers, which a captured graph reads, have other tables.
            check_mask(*mask, pairs, table.batch_size, self._shown)
        if graph:
            fill_buffers(fixed, tables, counts, host, stream, self._in_tokens, self._on_gpu)
        if masked:
            custom_mask_table(table, options.page_size, *mask, self._shown if graph else None, pairs)
        self._take_up(kernels, table, limits, stream)
        return host

    def _checked(self, options: PlanOptions) -> PlanOptions:
        """Options of a plan with what the wrapper adds."""
        key = options, self._backend
        if key != self._last_checked[0]:
            interleaved = self._backend == "trtllm-gen" and KV_NAMES.get(options.kv_dtype) == "nvfp4"
            if self._variant is not None or self._mixed or interleaved:
                options = options._replace(variant=self._variant, mixed=self._mixed, interleaved=interleaved)
            try:
                self._last_checked = key, options.checked()
            except ValueError as error:
                raise renamed(error, self._renames) from None
        return self._last_checked[1]

    def _check_on_host(self, tables: tuple, host: HostTables, page_size: int, q_len: int) -> tuple[int, int, int]:
        """Check tables on the host, in their room: (rows, kv_entries, first_row) of Table."""
        for i, table in enumerate(tables):
            if host.counts[i]:
                host.take(i, table)
        ids = tables[-1]
        page_ids = None if ids is None else ids.shape[0]
        known = (tables[KV_INDPTR].shape[0] - 1) * q_len if q_len else -1, -1, 0
        if self._debug:
            # Looking at tables on a GPU waits for it.
            counts = tuple(0 if t is None else t.shape[0] for t in tables)
            everything = HostTables(counts, torch.device("cpu"), self._names, self._in_tokens)
            for i, table in enumerate(tables):
                if table is not None:
                    everything.take(i, table.cpu())
            everything.check(page_size, page_ids, known)
        return host.check(page_size, page_ids, known)

    @staticmethod
    def _tile_q(host: HostTables, longest_q: int) -> int:
        """A bound on query lengths; 0 where it is unknown."""
        return host.longest_step(QO_INDPTR) if not longest_q and host.counts[QO_INDPTR] else longest_q

    def _fixed_tables(self) -> tuple[torch.Tensor | None, ...]:
        """The buffers of CUDA-graph mode, in the order of a plan's tables."""
        fixed = self._shown
        lens = fixed.kv_lens if self._in_tokens else fixed.last_page_len
        return fixed.qo_indptr, fixed.kv_indptr, lens, fixed.kv_indices

    def _captured(self, kernels: Kernels, q_len: int, limits: Limits) -> tuple[Kernels, Limits]:
        """Kernels and bounds of the plan that a graph may have been captured over; the new one must fit them all."""
        old = self._base
        try:
            check_captured(old.kernels, kernels)
        except ValueError as error:
            raise renamed(renamed(error, _AS_PLANNED), self._renames) from None
        was = old.table.each_q
        require(q_len == was, "q_len_per_req", q_len, f"{was}, as captured")
        for plan in self._plans.values():
            plan.bounded(limits, self._first)
        return old.kernels, old.bounded(limits, self._first)

    def _take_up(self, kernels: Kernels, table: Table, limits: Limits, stream: int | None) -> None:
        """Make a plan, in buffers of earlier ones where they suffice."""
        graph = self._use_cuda_graph
        # The buffers of earlier plans serve where work runs in order: on one stream, outside a capture.
        if not graph and (stream != self._stream or self._capturing or len(self._plans) > _MOST_KERNELS):
            self._plans = {}
            if self._replays is not None:
                self._replays.drop()
        self._stream = None if self._capturing else stream
        plan = self._plans.get(kernels)
        if plan is None:
            plan = self._plans[kernels] = self._new_plan(kernels, stream)
        plan.fill(table, limits)
        if graph:
            for other in self._plans.values():
                if other is not plan:
                    other.fill(table, other.bounded(limits, self._first))
        if self._base is None:
            self._first = table.rows, table.kv_entries
        self._base = self._active = plan
        self._options_set = {}
        if not graph:
            self._shown = table
        elif table.uniform_q_len and table.qo_indptr is not None:
            self._shown.qo_indptr = table.qo_indptr

    def _new_plan(self, kernels: Kernels, stream: int | None) -> Plan:
        slopes = self._slopes(kernels.options, stream) if kernels.options.pos_encoding_mode == "ALIBI" else None
        return Plan(kernels, self._partials, slopes, self._debug, self._use_cuda_graph, self._kv_layout)

    def _kernels_of(self, *key) -> Kernels:
        """The kernels for (options, rows, custom, backend)."""
        if key != self._last_kernels[0]:
            options, rows, custom, backend = key
            self._last_kernels = key, kernels_of(options, rows, custom, self.device, backend)
            self._last_kernels[1].expect(self._returns_lse)
        return self._last_kernels[1]

    def _look_at_stream(self, counts: tuple[int, ...]) -> int | None:
        """The current stream. Notes whether it is captured: a graph reads the tables again at every replay."""
        if not self._on_gpu:
            return None
        self._capturing = torch.cuda.is_current_stream_capturing()
        if self._capturing and any(counts):
            require(False, "plan", "tables on the host in a captured stream", f"tables on {self.device}")
        return torch._C._cuda_getCurrentRawStream(self._index)

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

    def _slopes(self, options: PlanOptions, stream: int | None) -> torch.Tensor:
        key = options.num_qo_heads, stream
        if key not in self._alibi:
            require(not self._capturing, "pos_encoding_mode", "ALIBI in a captured stream", "a plan before the capture")
            slopes = torch.tensor(alibi_slopes(options.num_qo_heads), dtype=torch.float32, device="cpu")
            self._alibi[key] = slopes.to(self.device, non_blocking=True)
        return self._alibi[key]

    def _run(self, q: torch.Tensor, kv, out, lse, return_lse, q_scale=None, k_scale=None, v_scale=None,
             window_left=None, **others) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Attention of the planned batch; see Plan.run."""
        if is_traced():
            options, changes = self._planned().options, self._changes
            given = dict(q=q, kv=kv, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, window_left=window_left,
                         changes=changes, **others)  # fmt: skip
            self._changes = None
            shape = q.shape[0], options.num_qo_heads, options.head_dim_vo
            return traced.run(self, "_run", out, lse, return_lse, shape, options.o_dtype, given)
        try:
            return (self._active or self._planned()).run(
                q, kv, self._views, out, lse, return_lse, q_scale, k_scale, v_scale, window_left, **others
            )
        except (AttributeError, TypeError):
            for name, value in dict(q=q, out=out, lse=lse, sinks=others.get("sinks")).items():
                require_tensor(name, value, optional=name != "q")
            for name, value in dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale).items():
                check_number(name, value)
            check_window(window_left)
            self._views(kv)
            raise
        except ValueError:
            if self._backend != "trtllm-gen" or not is_wider(window_left, self._planned().options.window_left):
                raise
            call = q, kv, out, lse, return_lse, q_scale, k_scale, v_scale
            return self._under_window(window_left, *call, **others)

    def _under_window(self, window_left: int, *call, **others):
        """`_run` under a window that is wider than the planned one, which the next run has again."""
        planned = self._planned().options.window_left
        self._change_plan(window_left=window_left)
        try:
            return self._run(*call, **others)
        finally:
            self._change_plan(window_left=planned)

    def _run_with_lse(self, lse_base: str, lse_layout: str, q: torch.Tensor, kv, out, lse, return_lse, *scales,
                      **others) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """`_run` with the log-sum-exp in another base or layout."""
        attend = lambda lse, return_lse: self._run(q, kv, out, lse, return_lse, *scales, **others)
        return with_lse(attend, q, lse, return_lse, lse_base, lse_layout)

    def _planned(self) -> Plan:
        if self._base is None:
            raise NoPlan(f"{type(self).__name__}.run: got no plan; allowed: after plan()")
        return self._active

    def _factors(self, kv_block_scales, kv_cache_sf=None) -> dict[str, Any]:
        """Factors of a cache in a format that has them, under either name, as Plan.run takes them."""
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
        if is_traced():
            # For the run that follows, which is one op of the trace.
            self._changes = changes
            return
        changes = {name: number(name, value) for name, value in changes.items()}
        current = self._planned()
        masked = current.table.mask is not None
        if means(current.kernels, changes, masked):
            return
        base = self._base
        options = current.options.changed(**changes)
        kernels = kernels_of(options, base.kernels.problem.rows, masked, self.device, self._backend)
        stream = self._look_at_stream(())
        # As for a plan: on another stream, or in a capture, it gets buffers of its own, which serve no other.
        ordered = self._use_cuda_graph or (stream == self._stream and not self._capturing)
        plan = self._plans.get(kernels) if ordered else None
        if plan is None:
            plan = self._new_plan(kernels, stream)
            if ordered:
                self._plans[kernels] = plan
        if plan.table is not base.table:
            plan.fill(base.table, base.limits)
        self._active = plan


def ragged_pair(kv: tuple[torch.Tensor, torch.Tensor], kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`ragged_views` of a pair."""
    return ragged_views(*kv, kv_layout)
