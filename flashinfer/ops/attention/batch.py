"""A planned batch: checked, described on the device, scheduled; then run for every layer that shares the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flashinfer._core import env
from flashinfer._core.checks import as_dtype, dtype_name, indptr_values, is_aligned, require
from flashinfer._core.dispatch import Choice
from flashinfer._core.target import target_of
from flashinfer.ops.attention import masks
from flashinfer.ops.attention.decode import decode
from flashinfer.ops.attention.prefill import prefill
from flashinfer.ops.attention.problem import POS_ENCODINGS, Inputs, Problem, Scalars, Table, alibi_slopes

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(eq=False)
class Request:
    """What a plan() asks for, in the names of the public API.

    Tensors may be on the CPU or on the compute device. `q_len` is the query length of every request where they are all
    alike, `longest_q` a bound on them (0: unknown); a qo_indptr on the host tells both.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor | None
    last_page_len: torch.Tensor | None
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    causal: bool = False
    window_left: int = -1
    logits_soft_cap: float | None = None
    sm_scale: float | None = None
    pos_encoding_mode: str = "NONE"
    rope_scale: float | None = None
    rope_theta: float | None = None
    custom_mask: torch.Tensor | None = None
    packed_custom_mask: torch.Tensor | None = None
    fixed_split_size: int | None = None
    disable_split_kv: bool = False
    q_len: int = 0
    longest_q: int = 0

    def check(self) -> None:
        require(self.num_kv_heads > 0, "num_kv_heads", self.num_kv_heads, "at least 1")
        divides = self.num_qo_heads > 0 and self.num_qo_heads % self.num_kv_heads == 0
        require(divides, "num_qo_heads", self.num_qo_heads, f"a multiple of num_kv_heads = {self.num_kv_heads}")
        group = self.num_qo_heads // self.num_kv_heads
        require(group <= 128, "num_qo_heads", self.num_qo_heads, f"at most 128 x num_kv_heads = {self.num_kv_heads}")
        require(self.head_dim_qk > 0, "head_dim_qk", self.head_dim_qk, "at least 1")
        require(self.head_dim_vo > 0, "head_dim_vo", self.head_dim_vo, "at least 1")
        if self.kv_indices is not None:
            require(self.page_size > 0, "page_size", self.page_size, "at least 1")
        known = self.pos_encoding_mode in POS_ENCODINGS
        require(known, "pos_encoding_mode", repr(self.pos_encoding_mode), ", ".join(POS_ENCODINGS))
        require(self.window_left >= -1, "window_left", self.window_left, "-1 (no window) or the keys before a query")
        cap = self.logits_soft_cap
        require(cap is None or cap >= 0, "logits_soft_cap", cap, "None or 0 (no cap), or a positive number")
        fixed = self.fixed_split_size
        require(fixed is None or fixed > 0 or fixed == -1, "fixed_split_size", fixed, "None, -1, or a number of keys")
        self._check_lengths()

    def _check_lengths(self) -> None:
        """Check indptrs that are on the host; those on a GPU only in debug mode, since looking at them waits for it."""
        batch = self.qo_indptr.shape[0] - 1
        require(batch >= 0, "qo_indptr", tuple(self.qo_indptr.shape), "[batch_size + 1]")
        require(self.kv_indptr.shape[0] == batch + 1, "kv_indptr", tuple(self.kv_indptr.shape), f"[{batch + 1}]")
        if self.last_page_len is not None:
            given = tuple(self.last_page_len.shape)
            require(given == (batch,), "last_page_len", given, f"[{batch}]")
        for name, indptr in (("qo_indptr", self.qo_indptr), ("kv_indptr", self.kv_indptr)):
            if indptr.is_cuda and not env.DEBUG.is_on():
                continue
            paged = name == "kv_indptr" and self.kv_indices is not None
            indptr_values(name, indptr, self.kv_indices.shape[0] if paged else None, "the length of kv_indices")
        last = self.last_page_len
        if last is not None and batch and (not last.is_cuda or env.DEBUG.is_on()):
            lo, hi = int(last.min()), int(last.max())
            require(lo >= 0 and hi <= self.page_size, "last_page_len", f"{lo} ... {hi}", f"0 ... {self.page_size}")


@dataclass
class Limits:
    """Host-side upper bounds of a batch, from shapes alone: what buffers and grids are sized by.

    Attributes
    ----------
    batch : int
        Requests.
    q_rows : int
        Query rows in all; -1 where only the call will tell.
    kv_tokens : int
        Keys in all; -1 where only the call will tell.
    """

    batch: int
    q_rows: int
    kv_tokens: int

    @property
    def known(self) -> bool:
        return self.q_rows >= 0 and self.kv_tokens >= 0


@dataclass
class Call:
    """The per-call arguments of run(), in the names of the public API."""

    q_scale: float | torch.Tensor | None = None
    k_scale: float | torch.Tensor | None = None
    v_scale: float | torch.Tensor | None = None
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    return_lse: bool = False
    window_left: int | None = None
    sinks: torch.Tensor | None = None


def longest_query(request: Request) -> int:
    """A bound on query lengths that costs no wait for the device; 0 where there is none."""
    if request.q_len or request.longest_q:
        return request.q_len or request.longest_q
    if request.qo_indptr.is_cuda:
        return 0
    values = request.qo_indptr.tolist()
    return max((b - a for a, b in zip(values, values[1:])), default=1) or 1


def tile_rows(longest_q: int, group: int) -> int:
    """Rows a tile should hold: the power of two that takes the longest query, 16 to 128; 128 if it is unknown."""
    if longest_q <= 0:
        return 128
    return min(128, max(16, 1 << (longest_q * group - 1).bit_length()))


class Batch:
    """A planned batch of attention on one device.

    Parameters
    ----------
    request : Request
        Checked here.
    table : Table
        The request's tensors on the compute device.
    backend : str
        As upstream names it.
    scratch : callable (bytes) -> uint8 Tensor
        Where partial results go.
    rows : int, optional
        Tile rows, for a batch that must keep the tile of an earlier one (a captured graph).
    limits : Limits, optional
        Bounds to allocate by; default from the request's shapes.
    schedules : dict of config to Schedule, optional
        Those of the earlier batch, to refill.
    """

    def __init__(self, request, table: Table, backend: str, scratch, rows: int = 0, limits=None, schedules=None):
        self.request = request
        self.table = table
        self.device = table.qo_indptr.device
        self.backend = backend
        self.scratch = scratch
        self.scratch_bytes = 0
        self.group = request.num_qo_heads // request.num_kv_heads
        self.problem = self._problem(rows or tile_rows(longest_query(request), self.group))
        self.op = decode if self.problem.rows <= 32 else prefill
        self.choice: Choice = self.op(self.problem, self.device, backend)
        self.limits = limits or self._limits()
        # A work list is cut to the tiles of one config. What a call brings may need another config than was planned
        # with (narrower tiles for rows that are not aligned), and so a work list of its own.
        self.schedules = schedules or {}
        self._ready: dict[tuple, dict] = {}
        self._debug = env.DEBUG.is_on()
        self._scalars = Scalars(
            sm_scale=request.sm_scale if request.sm_scale is not None else request.head_dim_qk**-0.5,
            soft_cap=float(request.logits_soft_cap or 0.0),
            window_left=request.window_left,
            rope_scale=1.0 if request.rope_scale is None else float(request.rope_scale),
            rope_theta=1e4 if request.rope_theta is None else float(request.rope_theta),
        )
        self._slopes = None
        if self.problem.pos_encoding == "ALIBI":
            self._slopes = torch.tensor(alibi_slopes(request.num_qo_heads), device=self.device)
        for config in self.schedules:
            self._fill_schedule(config)
        if self.limits.known:
            self._schedule_of(self.choice)

    def _problem(self, rows: int) -> Problem:
        r = self.request
        custom = r.custom_mask is not None or r.packed_custom_mask is not None or self.table.mask is not None
        return Problem(
            source="paged" if r.kv_indices is not None else "ragged",
            q_dtype=dtype_name(r.q_dtype),
            kv_dtype=dtype_name(r.kv_dtype),
            o_dtype=dtype_name(r.o_dtype),
            head_dim_qk=r.head_dim_qk,
            head_dim_vo=r.head_dim_vo,
            group=self.group,
            page_size=r.page_size if r.kv_indices is not None else 0,
            # A custom mask stands in the place of the causal one, as upstream has it.
            mask="custom" if custom else "causal" if r.causal else "full",
            window=r.window_left >= 0,
            soft_cap=bool(r.logits_soft_cap),
            pos_encoding=r.pos_encoding_mode,
            split=not r.disable_split_kv,
            rows=rows,
        )

    def _limits(self) -> Limits:
        r = self.request
        batch = self.table.batch_size
        longest = r.q_len or r.longest_q
        q_rows = int(r.qo_indptr[-1]) if not r.qo_indptr.is_cuda else batch * longest if longest else -1
        if r.kv_indices is not None:
            kv_tokens = r.kv_indices.shape[0] * r.page_size
        else:
            kv_tokens = -1 if r.kv_indptr.is_cuda else int(r.kv_indptr[-1])
        return Limits(batch, q_rows, kv_tokens)

    def _schedule_of(self, choice: Choice):
        """The work list of the tiles that `choice` has, made at its first use; None for the reference."""
        if choice.variant.name == "reference":
            return None
        if choice.config not in self.schedules:
            from flashinfer.ops.attention import planner

            self.schedules[choice.config] = planner.allocate(
                self.problem, choice.config, self.limits, self._splitting(choice.config), self.request.num_kv_heads,
                self._take, self.device,
            )  # fmt: skip
            self._fill_schedule(choice.config)
        return self.schedules[choice.config]

    def _fill_schedule(self, config) -> None:
        """Write the work list on the device. Nothing waits for it."""
        from flashinfer.ops.attention import planner

        if self.table.batch_size:
            schedule, how = self.schedules[config], self._splitting(config)
            planner.make(self.problem, config, self.table, schedule, how, self.request.window_left)

    def _splitting(self, config):
        from flashinfer.ops.attention import planner

        r = self.request
        fixed = r.fixed_split_size if r.fixed_split_size and r.fixed_split_size > 0 else None
        return planner.splitting(self.problem, config, target_of(self.device), r.num_kv_heads, fixed)

    def _take(self, count: int) -> torch.Tensor:
        self.scratch_bytes = count
        return self.scratch(count)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call):
        """Attention of `q` over k and v, which are views as `Inputs` takes them. Returns out, or (out, lse)."""
        scalars, qk_scale, v_scale = self._scales(call)
        sinks = self._sinks(call.sinks)
        # What a kernel and the checks depend on; layers of a model share it, so that it is looked at once per plan.
        alike = (
            q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype,
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16, call.return_lse, sinks is None, qk_scale is None,
            scalars.window_left >= 0,
        )  # fmt: skip
        known = alike in self._ready
        if not known:
            self._check(q, k, v)
        elif self._debug:
            self._check_on_device(q, k)
        r = self.request
        out = self._output(call.out, "out", (q.shape[0], r.num_qo_heads, r.head_dim_vo), r.o_dtype)
        lse = None
        if call.return_lse:
            lse = self._output(call.lse, "lse", (q.shape[0], r.num_qo_heads), torch.float32)
        aligned_out = call.out is None or is_aligned(out)
        if not known:
            self._ready[alike] = {}
        if not self.limits.known:
            self.limits = Limits(self.table.batch_size, q.shape[0], k.shape[0] * max(self.problem.page_size, 1))
        if aligned_out not in self._ready[alike]:
            self._ready[alike][aligned_out] = self._bind(
                lse=lse is not None,
                sinks=sinks is not None,
                head_scales=qk_scale is not None,
                aligned=is_aligned(q, k, v, out),
                window=scalars.window_left >= 0,
            )
        kernel, schedule = self._ready[alike][aligned_out]
        if q.shape[0] and self.table.batch_size:
            x = Inputs(q, k, v, out, lse, self.table, schedule, scalars, sinks, qk_scale, v_scale, self._slopes)
            if schedule is None:
                kernel(x)
            else:
                kernel.hold(x)(*x.addresses())
        return (out, lse) if call.return_lse else out

    def _bind(self, **facts):
        """What computes the planned problem under the facts that only a call knows, and its work list."""
        choice = self.op(replace(self.problem, **facts), self.device, self.backend)
        return choice.bind(self.device), self._schedule_of(choice)

    def _check(self, q, k, v) -> None:
        r = self.request
        require(q.device == self.device, "q", f"a tensor on {q.device}", f"{self.device}, where the plan is")
        expected = (r.num_qo_heads, r.head_dim_qk)
        require(q.dim() == 3 and tuple(q.shape[1:]) == expected, "q", tuple(q.shape), f"[rows, {expected}], as planned")
        require(q.dtype == r.q_dtype, "q", q.dtype, f"{r.q_dtype}, as planned (q_data_type)")
        for name, t, dim in (("k", k, r.head_dim_qk), ("v", v, r.head_dim_vo)):
            require(t.device == self.device, name, f"a tensor on {t.device}", f"{self.device}, where q is")
            require(t.dtype == r.kv_dtype, name, t.dtype, f"{r.kv_dtype}, as planned (kv_data_type)")
            got = tuple(t.shape[-2:])
            require(got == (r.num_kv_heads, dim), name, f"{got} heads and dim", f"{(r.num_kv_heads, dim)}, as planned")
            require(t.stride(-1) == 1, name, f"stride {t.stride(-1)} of head_dim", "1")
            if self.problem.page_size:
                paged = t.dim() == 4 and t.shape[1] == r.page_size
                require(paged, name, tuple(t.shape), f"pages of {r.page_size} tokens, as planned")
        require(k.shape[:-2] == v.shape[:-2], "v", tuple(v.shape), f"as many rows as k: {tuple(k.shape)}")
        require(q.stride(-1) == 1, "q", f"stride {q.stride(-1)} of head_dim", "1")
        if self._debug:
            self._check_on_device(q, k)

    def _check_on_device(self, q, k) -> None:
        """What only the device knows; waits for it, so in debug mode alone."""
        rows = int(self.table.qo_indptr[-1])
        require(rows <= q.shape[0], "qo_indptr", f"{rows} last", f"at most {q.shape[0]}, the rows of q")
        used = int(self.table.kv_indptr[-1])
        if self.problem.page_size:
            indices = self.table.kv_indices[:used]
            worst = (int(indices.min()), int(indices.max())) if used else (0, 0)
            ok = worst[0] >= 0 and (not used or worst[1] < k.shape[0])
            require(ok, "paged_kv_indices", f"{worst[0]} ... {worst[1]}", f"pages 0 ... {k.shape[0] - 1}")
        else:
            require(used <= k.shape[0], "kv_indptr", f"{used} last", f"at most {k.shape[0]}, the rows of k")

    def _output(self, given, name: str, shape: tuple, dtype: torch.dtype) -> torch.Tensor:
        if given is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        require(tuple(given.shape) == shape, name, tuple(given.shape), str(shape))
        require(given.dtype == dtype, name, given.dtype, str(dtype))
        require(given.device == self.device, name, f"a tensor on {given.device}", str(self.device))
        require(given.stride(-1) == 1, name, f"stride {given.stride(-1)} of the last axis", "1")
        if name == "lse":
            require(given.is_contiguous(), name, f"strides {given.stride()}", "contiguous")
        return given

    def _sinks(self, sinks) -> torch.Tensor | None:
        if sinks is None:
            return None
        heads = self.request.num_qo_heads
        require(tuple(sinks.shape) == (heads,), "sinks", tuple(sinks.shape), f"[{heads}], one logit per query head")
        require(sinks.device == self.device, "sinks", f"a tensor on {sinks.device}", str(self.device))
        return sinks.float().contiguous()

    def _scales(self, call: Call):
        """Scalars of the call, and vectors per query head where a scale is a tensor."""
        if call.q_scale is None and call.k_scale is None and call.v_scale is None and call.window_left is None:
            return self._scalars, None, None
        r = self.request
        numbers, vectors = {}, {}
        for name in ("q_scale", "k_scale", "v_scale"):
            value = getattr(call, name)
            if isinstance(value, torch.Tensor) and not (value.numel() == 1 and not value.is_cuda):
                vectors[name] = self._per_head(value, name)
                value = 1.0
            numbers[name] = 1.0 if value is None else float(value)
        window = r.window_left if call.window_left is None else call.window_left
        # The schedule leaves out keys that no query sees in the planned window.
        ok = r.window_left < 0 or 0 <= window <= r.window_left
        require(ok and window >= -1, "window_left", window, f"at most the planned {r.window_left}")
        scalars = replace(
            self._scalars,
            sm_scale=self._scalars.sm_scale * numbers["q_scale"] * numbers["k_scale"],
            out_scale=numbers["v_scale"],
            window_left=window,
        )
        if not vectors:
            return scalars, None, None
        one = torch.ones(r.num_qo_heads, device=self.device)
        qk = vectors.get("q_scale", one) * vectors.get("k_scale", one)
        return scalars, qk.contiguous(), vectors.get("v_scale", one).contiguous()

    def _per_head(self, value: torch.Tensor, name: str) -> torch.Tensor:
        """A scale tensor as one float32 per query head; per-KV-head scales are repeated over their group."""
        heads, kv_heads = self.request.num_qo_heads, self.request.num_kv_heads
        value = value.to(self.device, torch.float32).flatten()
        if value.shape[0] == 1:
            return value.expand(heads)
        if value.shape[0] == kv_heads:
            return value.repeat_interleave(self.group)
        require(value.shape[0] == heads, name, tuple(value.shape), f"1, {kv_heads} or {heads} elements")
        return value


def default_o_dtype(q_dtype: torch.dtype, o_dtype: str | torch.dtype | None) -> torch.dtype:
    """Output type: as asked, else q's; bfloat16 for fp8 q, whose range an output has no scale for."""
    given = as_dtype(o_dtype)
    if given is not None:
        return given
    return torch.bfloat16 if q_dtype in _FP8 else q_dtype


def custom_mask_table(request: Request, table: Table) -> None:
    """Bring the request's custom mask onto the device as packed bits, into `table`."""
    if request.custom_mask is None and request.packed_custom_mask is None:
        return
    q_len = table.qo_indptr[1:] - table.qo_indptr[:-1]
    bits = q_len.long() * table.kv_lens(request.page_size if request.kv_indices is not None else 0).long()
    device = table.qo_indptr.device
    if request.packed_custom_mask is not None:
        packed = request.packed_custom_mask.to(device)
        require(packed.dtype == torch.uint8, "packed_custom_mask", packed.dtype, "uint8")
        table.mask, table.mask_indptr = packed.contiguous(), masks.packed_indptr(bits)
        if not packed.is_cuda:
            most = int(table.mask_indptr[-1])
            require(packed.numel() >= most, "packed_custom_mask", f"{packed.numel()} bytes", f"at least {most}")
        if not packed.numel():
            table.mask = torch.zeros(1, dtype=torch.uint8, device=device)
        return
    mask = request.custom_mask.to(device, torch.bool)
    if not mask.is_cuda:
        masks.check_bits(mask, int(bits.sum()))
    table.mask, table.mask_indptr = masks.pack(mask, bits)


def multi_item_mask(request: Request, prefix_len: torch.Tensor, positions: torch.Tensor | None, most: int):
    """The multi-item mask of a batch. It is built from lengths on the host: with tables on a GPU this waits for it."""
    require(positions is not None, "token_pos_in_items_ptr", None, "a tensor, with prefix_len_ptr")
    q_indptr, kv_indptr = request.qo_indptr.tolist(), request.kv_indptr.tolist()
    kv_lens = [b - a for a, b in zip(kv_indptr, kv_indptr[1:])]
    if request.last_page_len is not None:
        last = request.last_page_len.tolist()
        kv_lens = [max((pages - 1) * request.page_size + tail, 0) for pages, tail in zip(kv_lens, last)]
    q_lens = [b - a for a, b in zip(q_indptr, q_indptr[1:])]
    return masks.multi_item(q_lens, kv_lens, prefix_len.tolist(), positions.to(torch.int64), most)
