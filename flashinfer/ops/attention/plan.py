"""A planned batch: lengths on the device, a work list, and launches that replay for every layer that shares it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from flashinfer._core.alike import like
from flashinfer._core.checks import require
from flashinfer._core.dispatch import Choice
from flashinfer._core.replay import recording
from flashinfer._core.target import target_of
from flashinfer.ops.attention import operands
from flashinfer.ops.attention.kernels import Kernels
from flashinfer.ops.attention.replay import Replay, extents_of, identity, keep, lie_apart
from flashinfer.ops.attention.split import Limits, SplitPolicy
from flashinfer.ops.attention.tables import Table
from flashinfer.ops.attention.variants import identity_of

# Sizes of batches whose launches are kept: requests come and go.
_MOST_SIZES = 64


class Filling(NamedTuple):
    """What a Plan has alike for all batches of as many requests and rows.

    Attributes
    ----------
    lists : dict
        The Plan's work lists. It makes a new dict where buffers do not suffice, and for another list.
    cuts, launches : list
        Each work list, and what it is cut to; and what fills it.
    needs, replays
        As the Plan's.
    """

    lists: dict
    cuts: list[tuple]
    launches: list[Callable[..., None]]
    needs: tuple[int, int]
    replays: dict[tuple, list[Replay]]


class Plan:
    """A planned batch on one device: ragged, paged, sparse, mixed or latent.

    `run` is attention's; that of latent attention is `mla.operands.run_latent`.

    Parameters
    ----------
    kernels : Kernels
    scratch : callable (bytes) -> uint8 Tensor
        Where partial results go.
    slopes : float32 Tensor [num_qo_heads], optional
        Of ALiBi.
    debug : bool
        Check what only the device knows, at every call.
    padded : bool
        Whether q may have more rows than the plan has, whose outputs are then those of rows without keys: in CUDA-graph
        mode, where the tensors of a capture serve smaller batches. Elsewhere such rows are refused.
    kv_layout : str
        As the caller has it; views of it are all alike.
    direct : bool
        Whether each batch is run once: kernels may then read its lengths in the place of a work list.

    Attributes
    ----------
    options : PlanOptions
        Of `kernels`.
    table : Table
    limits : Limits
    needs : (int, int)
        Rows that q, and ragged k and v, must have at least; -1 where only the device knows.
    replays : dict
        Of calls, by what is equal in those that are alike.
    filling : Filling, optional
        Of the batch, once a replay has asked for it.
    pages_at : int
        Address of the page ids.
    gaps : bool
        Whether some rows of q may be of no request.
    scratch_bytes : int
        The most that partial results took.
    """

    def __init__(self, kernels: Kernels, scratch, slopes: torch.Tensor | None = None, debug: bool = False,
                 padded: bool = False, kv_layout: str = "NHD", direct: bool = False):  # fmt: skip
        self.kernels, self.options, self.device = kernels, kernels.options, kernels.device
        self.slopes, self.debug, self.padded, self.kv_layout = slopes, debug, padded, kv_layout
        self._direct = direct
        # On a CPU, looking at tables waits for nothing.
        self.looks = debug or kernels.device.type == "cpu"
        self.table = Table()
        self.limits: Limits | None = None
        self.needs = -1, -1
        self.pages_at = self.scratch_bytes = 0
        self.gaps = False
        self.filling: Filling | None = None
        self.replays: dict[tuple, list[Replay]] = {}
        self._scratch = scratch
        # A work list is cut to the tiles of one config. What a call brings may need another config than was planned
        # with (narrower tiles for rows that are not aligned), and so a work list of its own.
        self._lists: dict = {}
        # Replays, of batches of each size.
        self._replays_of: dict[tuple, dict] = {}

    def fill(self, table: Table, limits: Limits) -> None:
        """Describe a batch, or another one in the buffers of the last, where they suffice.

        Replays stay if nothing that they refer to has changed.

        Parameters
        ----------
        table : Table
            Its tensors on the compute device.
        limits : Limits
            Bounds to allocate by.
        """
        if not limits.known or limits != self.limits:
            # Bounds that only the call will know may be larger than those that the buffers were made for.
            if not (limits.known and all([work.fits(limits) for work in self._lists.values()])):
                self._lists = {}
        if not (self._lists and _same_masks(table, self.table)):
            self._replays_of, self.replays = {}, {}
        rows = limits.batch * table.each_q if table.each_q else table.rows
        self.needs = rows, -1 if self.options.page_size else table.kv_entries
        self.table, self.limits, self.filling = table, limits, None
        self.gaps = self.padded or table.first_row > 0
        self.pages_at = 0 if table.kv_indices is None else table.kv_indices.data_ptr()
        for work in self._lists.values():
            work.fill(table)
        if not self._lists and limits.known:
            self._list_of(self.kernels.latest)
        size = self._size()
        replays = self._replays_of.get(size)
        if replays is None:
            if len(self._replays_of) >= _MOST_SIZES:
                self._replays_of.clear()
            replays = self._replays_of[size] = {}
        self.replays = replays

    def keep_filling(self) -> Filling:
        """What `refill` takes for batches like the one that `fill` has described."""
        works = self._lists.values()
        cuts, launches = [(work, work.cut) for work in works], [work.refill for work in works]
        self.filling = Filling(self._lists, cuts, launches, self.needs, self.replays)
        return self.filling

    def refill(self, table: Table, limits: Limits, addresses: list[int], filling: Filling) -> bool:
        """Describe a batch of as many requests and rows as one before, in tables of its encoding at `addresses`. False
        where there are other work lists since then; then nothing has changed."""
        lists, cuts, launches, needs, replays = filling
        if lists is not self._lists:
            return False
        if filling is not self.filling:
            self.filling, self.needs, self.replays = filling, needs, replays
            for work, cut in cuts:
                work.cut = cut
        self.table, self.limits = table, limits
        self.gaps = self.padded or table.first_row > 0
        self.pages_at = 0 if table.kv_indices is None else table.kv_indices.data_ptr()
        for launch in launches:
            launch(*addresses)
        return True

    def bounded(self, limits: Limits, first: tuple[int, int]) -> Limits:
        """The bounds that a graph may have been captured with; the new ones must fit them.

        `first` are rows and KV entries of the first plan; -1 where only the device knew.
        """
        old = self.limits
        if not old.known:
            return limits
        bounds = [("qo_indptr", limits.q_rows, old.q_rows, first[0])]
        if self.options.splits:
            bounds.append(("kv_indptr", limits.kv_tokens, old.kv_tokens, first[1]))
        for name, now, most, at_first in bounds:
            bound = f"at most {most} rows, what this CUDA-graph wrapper was first planned for"
            require(now <= most, name, f"{now} rows", bound)
            require(now >= 0 or at_first < 0, name, "a tensor on the device", f"one on the host: {bound}")
        return old

    @property
    def is_scheduled(self) -> bool:
        """Whether a launch has filled its work list."""
        return bool(self._lists) and self.table.batch_size > 0

    def _size(self) -> tuple:
        """What replays hang on: grids on the sizes of work lists, launches on where lists are, checks on the rows that
        are needed, and which kernels read a list."""
        lists = self._lists.values()
        return self.needs, *[(work.size, work.requests, work.items.data_ptr()) for work in lists]

    def _list_of(self, choice: Choice):
        """The work list of the tiles that `choice` has, made at its first use; None for the reference."""
        if choice.variant.name == "reference":
            return None
        work = self._lists.get(choice.config)
        if work is None:
            work = self._new_list(choice)
            self._lists = {**self._lists, choice.config: work}
            work.fill(self.table)
            self._replays_of[self._size()] = self.replays
        return work

    def _new_list(self, choice: Choice):
        from flashinfer.ops.attention.worklist import WorkList

        o, problem, config = self.options, self.kernels.problem, choice.config
        reads_lengths = self._direct and choice.variant.name == "sm80" and problem.mask != "custom"
        policy = SplitPolicy()
        if problem.split:
            policy = SplitPolicy.of(config, target_of(self.device).sms, o.num_kv_heads, config.block_n, o.splits)
        return WorkList(
            problem, config, policy, self.limits, o.num_kv_heads, self._take, self.device, o.window_left, o.mixed,
            reads_lengths and bool(problem.page_size) and not problem.variant and not o.mixed,
            # Hopper's latent attention has a launch that combines splits.
            not (o.source == "latent" and choice.variant.name == "sm90"),
        )  # fmt: skip

    def _take(self, count: int) -> torch.Tensor:
        # Work lists take turns in one buffer.
        self.scratch_bytes = max(self.scratch_bytes, count)
        return self._scratch(count)

    def run(self, q: torch.Tensor, kv, views, out=None, lse=None, return_lse=False, q_scale=None, k_scale=None,
            v_scale=None, window_left=None, *, sinks=None, params=None, k_factors=None, v_factors=None
            ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Attention of `q`. Returns out, or (out, lse) with return_lse; those given are written and returned.

        `kv` is the cache as the caller has it, one tensor or a pair, and `views(kv)` gives k and v as `Inputs` takes
        them. Calls that are alike in all a kernel or a check depends on are checked once per plan.
        """
        q_at, out_at = q.data_ptr(), 0 if out is None else out.data_ptr()
        in_one = isinstance(kv, torch.Tensor)
        if in_one:
            k_at = v_at = kv.data_ptr()
            read, given = (q, kv, kv), (q, kv)
        else:
            k, v = kv if len(kv) == 2 else views(kv)
            k_at, v_at = k.data_ptr(), v.data_ptr()
            read = given = (q, k, v)
        low, more, new_out, new_lse = (q_at | k_at | v_at | out_at) % 16, None, out is None, lse is None
        if not (new_out and new_lse):
            given += (out,) if new_lse else (lse,) if new_out else (out, lse)
        if sinks is not None or params is not None or k_factors is not None or v_factors is not None:
            more = identity(sinks), identity_of(params), identity(k_factors), identity(v_factors)
        key = return_lse, q_scale, k_scale, v_scale, window_left, in_one, new_out, new_lse, low, more
        for replay in self.replays.get(key, ()):
            if (
                replay.like(*given)
                and (new_out or lie_apart(replay.extents, out_at, q_at, k_at, v_at))
                and (new_lse or lie_apart(replay.of_lse, lse.data_ptr(), q_at, k_at, v_at, out_at))
            ):
                break
        else:
            x, facts = operands.check(
                self, q, *views(kv), out, lse, return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
                window_left=window_left, sinks=sinks, params=params, k_factors=k_factors, v_factors=v_factors,
            )  # fmt: skip
            # The call cannot be replayed if a value was read or copied from a tensor, which may change.
            stays = x.sinks is sinks and not any(isinstance(t, torch.Tensor) for t in (q_scale, k_scale, v_scale))
            like_q = x.out.shape == q.shape and x.out.dtype == q.dtype and q.is_contiguous()
            offset = x.v.data_ptr() - x.k.data_ptr() if in_one else 0
            extents, of_lse = extents_of(out, *read), extents_of(lse, *read, out)
            stays = stays and (new_out or lie_apart(extents, out_at, q_at, k_at, v_at))
            stays = stays and (new_lse or lie_apart(of_lse, lse.data_ptr(), q_at, k_at, v_at, out_at))
            self.first_call(
                x, facts, key if stays else None, given, new_out, new_lse, v_offset=offset, like_q=like_q,
                extents=extents, of_lse=of_lse,
            )  # fmt: skip
            return (x.out, x.lse) if return_lse else x.out
        if new_out:
            out = torch.empty_like(q) if replay.like_q else self.new_out(q.shape[0])
            out_at = out.data_ptr()
        if self.gaps:
            if new_lse and return_lse:
                lse = self.new_lse(q.shape[0])
            self.fill_gaps(out, lse, new_out, new_lse)
        if lse is None:
            if not return_lse:
                replay.launch(q_at, k_at, v_at + replay.v_offset, out_at, 0, self.pages_at)
                return out
            lse = self.new_lse(q.shape[0])
        replay.launch(q_at, k_at, v_at + replay.v_offset, out_at, lse.data_ptr(), self.pages_at)
        return (out, lse) if return_lse else out

    def first_call(self, x, facts: dict[str, bool], key: tuple | None, given, new_out: bool, new_lse: bool,
                   **replayed) -> None:  # fmt: skip
        """A call that no replay serves: bound to a kernel and launched, and kept for those that are alike.

        Parameters
        ----------
        x : Inputs, or mla's
            Checked. It gets its work list.
        facts : dict
            What a kernel is compiled for that only a call knows.
        key : tuple, optional
            What is equal in calls that are alike; None where nothing may be kept.
        given : sequence of Tensor
            Those that are looked at in calls with this key.
        new_out, new_lse : bool
            Whether x.out and x.lse are ours.
        replayed
            Further fields of Replay.
        """
        if not self.limits.known:
            keys = self.limits.kv_tokens
            self.limits = self.limits._replace(q_rows=x.out.shape[0], kv_tokens=x.k.shape[0] if keys < 0 else keys)
        x.schedule = self._list_of(self.kernels.chosen(**facts)) if self._direct else None
        reads_lengths = x.schedule is not None and x.schedule.requests > 0
        if reads_lengths:
            facts = facts | dict(requests=x.schedule.requests)
        kernel, choice = self.kernels.bind(**facts)
        x.schedule = self._list_of(choice)
        if self.gaps:
            self.fill_gaps(x.out, x.lse, new_out, new_lse)
        if not x.out.shape[0] or not self.table.batch_size:
            return
        if x.schedule is None:
            with torch.no_grad():
                kernel(x)
            return
        launch = kernel.hold(x)
        # A launch that reads lengths serves no other batch: calls without a plan have replays of their own.
        if key is not None and not self.debug and not reads_lengths:
            keep(self.replays, key, Replay(launch, like(*given), **replayed))
        launch(*x.addresses())
        recorded = recording()
        if recorded is not None and key is not None:
            recorded.add_kept(launch, list(x.moving()))
        elif recorded is not None:
            recorded.refuse()

    def bind_again(self) -> None:
        """Have the next call bound as one that no replay serves, so that its launch is one of its own."""
        self.replays = {}

    def fill_gaps(self, out: torch.Tensor, lse: torch.Tensor | None, new_out: bool, new_lse: bool) -> None:
        """Give the rows of no request what rows without keys have, in outputs that are new.

        With `padded`, those past the last request are written in any output. In a captured stream, and where only the
        device knows the last request's end, that is all rows, before the kernel writes its own: a later plan may have
        fewer. Of latent attention, whose outputs are large, a captured run leaves those as they are.
        """
        rows = self.needs[0]
        if self.padded and not self.table.each_q and self.device.type == "cuda":
            captured = torch.cuda.is_current_stream_capturing()
            if self.options.source != "latent" if captured else rows < 0:
                rows = 0
        for x, is_new, blank in ((out, new_out, 0), (lse, new_lse, -math.inf)):
            if x is None:
                continue
            x = x.view(torch.uint8) if x.element_size() == 1 else x
            if 0 <= rows < x.shape[0] and (is_new or self.padded):
                x[rows:] = blank
            if is_new and self.table.first_row:
                x[: self.table.first_row] = blank

    def new_out(self, rows: int) -> torch.Tensor:
        shape = rows, self.options.num_qo_heads, self.options.head_dim_vo
        return torch.empty(shape, dtype=self.options.o_dtype, device=self.device)

    def new_lse(self, rows: int) -> torch.Tensor:
        return torch.empty((rows, self.options.num_qo_heads), dtype=torch.float32, device=self.device)


def _same_masks(a: Table, b: Table) -> bool:
    """Whether what launches refer to of the tables of two batches is in the same memory. Page ids may move."""
    if a.mask is None and b.mask is None:
        return True
    pairs = (a.mask, b.mask), (a.mask_indptr, b.mask_indptr)
    return all([x is y or (x is not None and y is not None and x.data_ptr() == y.data_ptr()) for x, y in pairs])
