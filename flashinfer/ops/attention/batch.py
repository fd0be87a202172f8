"""A planned batch: lengths on the device, a work list, and launches held for every layer that shares the plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from flashinfer._core.alike import like
from flashinfer._core.checks import is_aligned, require
from flashinfer._core.dispatch import Choice
from flashinfer._core.kv_layout import as_matrix
from flashinfer._core.target import target_of
from flashinfer.ops.attention.config import factor_alignment
from flashinfer.ops.attention.kind import Kind
from flashinfer.ops.attention.options import NVFP4, is_finite
from flashinfer.ops.attention.problem import Inputs, Table
from flashinfer.ops.attention.request import Request
from flashinfer.ops.attention.split import Limits, SplitPolicy
from flashinfer.ops.attention.tables import KV_INDICES, KV_INDPTR, LENGTHS, QO_INDPTR
from flashinfer.ops.attention.variants import identity_of

# Launches held per plan. Layers share one; scales, windows and sinks of their own make one for each, shapes one of
# those that are tried one after the other.
_MOST_HELD, _MOST_ALIKE = 256, 16
# Sizes of batches whose launches are kept: requests come and go.
_MOST_SIZES = 64


@dataclass
class Call:
    """The per-call arguments of run() that are no inputs or outputs, in the names of the public API."""

    q_scale: float | torch.Tensor | None = None
    k_scale: float | torch.Tensor | None = None
    v_scale: float | torch.Tensor | None = None
    window_left: int | None = None
    sinks: torch.Tensor | None = None
    params: dict | None = None
    k_factors: torch.Tensor | None = None
    v_factors: torch.Tensor | None = None


@dataclass
class _Held:
    """A launch that serves every call of one kind.

    Attributes
    ----------
    launch : callable (q, k, v, out, lse, kv_indices)
        Takes addresses.
    v_offset : int
        Bytes from the K of a cache in one tensor to its V.
    like_q : bool
        Whether the output has q's shape and dtype, and q is contiguous.
    like : callable
        Whether tensors of a call are like those that the launch was made for.
    """

    launch: Callable
    v_offset: int
    like_q: bool
    like: Callable[..., bool]


def limits_of(request: Request, table: Table) -> Limits:
    """Bounds of a batch that cost no wait for the device."""
    batch, page_size = table.batch_size, request.options.page_size
    rows = batch * request.q_len if request.q_len else request.rows
    if rows < 0 and request.longest_q:
        rows = batch * request.longest_q
    keys = table.kv_indices.shape[0] * page_size if page_size else request.kv_entries
    return Limits(batch, rows, keys, request.q_len)


class Batch:
    """A planned batch of attention on one device.

    Parameters
    ----------
    kind : Kind
    scratch : callable (bytes) -> uint8 Tensor
        Where partial results go.
    slopes : float32 Tensor [num_qo_heads], optional
        Of ALiBi.
    debug : bool
        Check what only the device knows, at every call.
    padded : bool
        Whether q may have more rows than a plan has, whose outputs are then those of rows without keys: in CUDA-graph
        mode, where the tensors of a capture serve smaller batches. Elsewhere such rows are refused.
    """

    # As the caller has it; views of it are all alike.
    kv_layout = "NHD"

    def __init__(self, kind: Kind, scratch, slopes: torch.Tensor | None = None, debug: bool = False,
                 padded: bool = False):  # fmt: skip
        self.kind = kind
        self.options = kind.options
        self.device = kind.device
        self.debug, self.padded = debug, padded
        # On a CPU, looking at tables waits for nothing.
        self.looks = debug or kind.device.type == "cpu"
        # Whether some rows of q may be of no request.
        self._gaps = False
        self.request = self.table = self.limits = None
        self.scratch_bytes = 0
        self._scratch = scratch
        self._slopes = slopes
        # A work list is cut to the tiles of one config. What a call brings may need another config than was planned
        # with (narrower tiles for rows that are not aligned), and so a work list of its own.
        self._lists: dict = {}
        # Launches held for calls that are alike, of batches of each size.
        self._held_for: dict[tuple, dict] = {}
        self._held: dict[tuple, list] = {}
        self._needs = None
        self._pages_at = 0

    def fill(self, request: Request, table: Table, limits: Limits) -> None:
        """Describe a batch, or another one in the buffers of the last, where they suffice.

        Held launches stay if nothing that they refer to has changed.

        Parameters
        ----------
        request : Request
            Checked.
        table : Table
            Its tensors on the compute device.
        limits : Limits
            Bounds to allocate by.
        """
        # Rows that q, and ragged k and v, must have at least.
        rows = limits.batch * request.q_len if request.q_len else request.rows
        needs = rows, -1 if self.options.page_size else request.kv_entries
        if not limits.known or limits != self.limits:
            # Bounds that only the call will tell may be larger than those that the buffers were made for.
            if not (limits.known and all([work.fits(limits) for work in self._lists.values()])):
                self._lists = {}
        if not (self._lists and _same_tables(table, self.table)):
            self._held_for, self._held = {}, {}
        self.request, self.table, self.limits, self._needs = request, table, limits, needs
        self._gaps = self.padded or request.first_row > 0
        self._pages_at = 0 if table.kv_indices is None else table.kv_indices.data_ptr()
        for work in self._lists.values():
            work.fill(table)
        if not self._lists and limits.known:
            self._schedule_of(self.kind.latest)
        size = self._size()
        self._held = self._held_for.get(size)
        if self._held is None:
            if len(self._held_for) >= _MOST_SIZES:
                self._held_for.clear()
            self._held = self._held_for[size] = {}

    def _size(self) -> tuple:
        """What held launches hang on: grids on the sizes of work lists, their checks on the rows that are needed."""
        return self._needs, *[work.size for work in self._lists.values()]

    def refill(self, table: Table, limits: Limits, addresses: list[int]) -> None:
        """Describe a batch of as many requests and rows as the last, told in the same way by tables at `addresses`."""
        self.table, self.limits = table, limits
        self._gaps = self.padded or self.request.first_row > 0
        self._pages_at = 0 if table.kv_indices is None else table.kv_indices.data_ptr()
        for work in self._lists.values():
            work.refill(*addresses)

    @property
    def is_scheduled(self) -> bool:
        """Whether a launch has filled its work list."""
        return bool(self._lists) and self.table.batch_size > 0

    def _schedule_of(self, choice: Choice):
        """The work list of the tiles that `choice` has, made at its first use; None for the reference."""
        if choice.variant.name == "reference":
            return None
        work = self._lists.get(choice.config)
        if work is None:
            work = self._lists[choice.config] = self._new_list(choice.config)
            work.fill(self.table)
            self._held_for[self._size()] = self._held
        return work

    def _new_list(self, config):
        from flashinfer.ops.attention.worklist import WorkList

        o, problem = self.options, self.kind.problem
        policy = SplitPolicy()
        if problem.split:
            policy = SplitPolicy.of(config, target_of(self.device).sms, o.num_kv_heads, config.block_n, o.splits)
        return WorkList(
            problem, config, policy, self.limits, o.num_kv_heads, self._take, self.device, o.window_left, o.mixed
        )

    def _take(self, count: int) -> torch.Tensor:
        # Work lists take turns in one buffer.
        self.scratch_bytes = max(self.scratch_bytes, count)
        return self._scratch(count)

    def run(self, q: torch.Tensor, kv, views, *, out=None, lse=None, return_lse=False, q_scale=None, k_scale=None,
            v_scale=None, window_left=None, **others):  # fmt: skip
        """`call` with its numbers by name."""
        return self.call(q, kv, views, out, lse, (return_lse, q_scale, k_scale, v_scale, window_left), **others)

    def call(self, q: torch.Tensor, kv, views, out, lse, numbers: tuple, *, sinks=None, params=None, k_factors=None,
             v_factors=None):  # fmt: skip
        """Attention of `q`. Returns out, or (out, lse) with return_lse; those given are written and returned.

        `kv` is the cache as the caller has it, one tensor or a pair, and `views(kv)` gives k and v as `Inputs` takes
        them. `numbers` are return_lse, q_scale, k_scale, v_scale and window_left. Calls that are alike in all a kernel
        or a check depends on are checked once per plan.
        """
        q_at, out_at = q.data_ptr(), 0 if out is None else out.data_ptr()
        in_one = isinstance(kv, torch.Tensor)
        if in_one:
            k_at = v_at = kv.data_ptr()
            given = (q, kv)
        else:
            k, v = kv if len(kv) == 2 else views(kv)
            k_at, v_at = k.data_ptr(), v.data_ptr()
            given = (q, k, v)
        low, more = (q_at | k_at | v_at | out_at) % 16, None
        if out is not None or lse is not None:
            given += (out,) if lse is None else (lse,) if out is None else (out, lse)
        if sinks is not None or params is not None or k_factors is not None or v_factors is not None:
            more = facts(sinks), identity_of(params), facts(k_factors), facts(v_factors)
        key = numbers, in_one, out is None, lse is None, low, more
        for held in self._held.get(key, ()):
            if held.like(*given):
                break
        else:
            return_lse, *scalars = numbers
            call = Call(*scalars, sinks, params, k_factors, v_factors)
            return self._run_anew(q, *views(kv), out, lse, return_lse, call, (key, given))
        if out is None:
            out = torch.empty_like(q) if held.like_q else self._new_out(q)
            out_at = out.data_ptr()
        if self._gaps:
            if lse is None and numbers[0]:
                lse = self._new_lse(q)
            self._fill_gaps(out, lse, key)
        if lse is None:
            if not numbers[0]:
                held.launch(q_at, k_at, v_at + held.v_offset, out_at, 0, self._pages_at)
                return out
            lse = self._new_lse(q)
        held.launch(q_at, k_at, v_at + held.v_offset, out_at, lse.data_ptr(), self._pages_at)
        return (out, lse) if numbers[0] else out

    def _run_anew(self, q, k, v, out, lse, return_lse: bool, call: Call, alike: tuple):
        """The first call of its kind: checked, bound to a kernel, and its launch held for those that follow."""
        self._check(q, k, v)
        scalars, qk_scale, v_scale = self._scales(call)
        sinks = self._sinks(call.sinks)
        # One that is given is written, whether it is to be returned or not.
        wants_lse = return_lse or lse is not None
        params = self._params(call, wants_lse)
        factors = self._factors(call, k, v)
        out = self._new_out(q) if out is None else self._given(out, "out", (*q.shape[:2], self.options.head_dim_vo))
        if wants_lse:
            lse = self._new_lse(q) if lse is None else self._given(lse, "lse", q.shape[:2])
        if not self.limits.known:
            keys = k.shape[0] * max(self.options.page_size, 1)
            self.limits = Limits(self.table.batch_size, q.shape[0], keys, self.limits.longest_q)
        matrix = all(as_matrix(t, bool(self.options.page_size)) for t in (k, v))
        kernel, choice = self.kind.bind(
            wants_lse, sinks is not None, qk_scale is not None, is_aligned(q, k, v, out) and _aligned(factors), matrix,
            scalars.window_left >= 0,
        )  # fmt: skip
        schedule = self._schedule_of(choice)
        if self._gaps:
            self._fill_gaps(out, lse, alike[0])
        if q.shape[0] and self.table.batch_size:
            x = Inputs(
                q, k, v, out, lse, self.table, schedule, scalars, sinks, qk_scale, v_scale, self._slopes, params,
                *factors,
            )  # fmt: skip
            if schedule is None:
                kernel(x)
            else:
                launch = kernel.hold(x)
                self._hold(alike, launch, x, call)
                launch(*x.addresses())
        return (out, lse) if return_lse else out

    def _fill_gaps(self, out: torch.Tensor, lse: torch.Tensor | None, key: tuple) -> None:
        """Give the rows of no request what rows without keys have, in outputs that `key` says are new.

        With `padded`, those past the last request are written in any output. In a captured stream that is all rows,
        before the kernel writes its own: a later plan may have fewer.
        """
        rows, _, _, new_out, new_lse, *_ = self._needs[0], *key
        if self.padded and not self.request.q_len and self.device.type == "cuda":
            rows = 0 if torch.cuda.is_current_stream_capturing() else rows
        for x, is_new, blank in ((out, new_out, 0), (lse, new_lse, -math.inf)):
            if x is None:
                continue
            x = x.view(torch.uint8) if x.element_size() == 1 else x
            if 0 <= rows < x.shape[0] and (is_new or self.padded):
                x[rows:] = blank
            if is_new and self.request.first_row:
                x[: self.request.first_row] = blank

    def _hold(self, alike: tuple, launch: Callable, x: Inputs, call: Call) -> None:
        """Keep a launch for the calls that are alike. What was read or copied from a tensor may change under it."""
        of_tensors = any(isinstance(scale, torch.Tensor) for scale in (call.q_scale, call.k_scale, call.v_scale))
        if self.debug or of_tensors or x.sinks is not call.sinks:
            return
        key, given = alike
        v_offset = x.v.data_ptr() - x.k.data_ptr() if key[1] else 0
        like_q = x.out.shape == x.q.shape and x.out.dtype == x.q.dtype and x.q.is_contiguous()
        self._keep(key, _Held(launch, v_offset, like_q, like(*given)))

    def _keep(self, key: tuple, held) -> None:
        if len(self._held) >= _MOST_HELD:
            self._held.clear()
        latest = self._held.setdefault(key, [])
        latest.insert(0, held)
        del latest[_MOST_ALIKE:]

    def _new_out(self, q: torch.Tensor) -> torch.Tensor:
        shape = q.shape[0], self.options.num_qo_heads, self.options.head_dim_vo
        return torch.empty(shape, dtype=self.options.o_dtype, device=self.device)

    def _new_lse(self, q: torch.Tensor) -> torch.Tensor:
        return torch.empty(q.shape[:2], dtype=torch.float32, device=self.device)

    def _given(self, tensor: torch.Tensor, name: str, shape: tuple) -> torch.Tensor:
        dtype = torch.float32 if name == "lse" else self.options.o_dtype
        require(tuple(tensor.shape) == tuple(shape), name, tuple(tensor.shape), str(tuple(shape)))
        require(tensor.dtype == dtype, name, tensor.dtype, str(dtype))
        require(tensor.device == self.device, name, f"a tensor on {tensor.device}", str(self.device))
        require(tensor.stride(-1) == 1, name, f"stride {tensor.stride(-1)} of the last axis", "1")
        if name == "lse":
            require(tensor.is_contiguous(), name, f"strides {tensor.stride()}", "contiguous")
        return tensor

    def _check(self, q, k, v) -> None:
        o = self.options
        require(q.device == self.device, "q", f"a tensor on {q.device}", f"{self.device}, where the plan is")
        expected = (o.num_qo_heads, o.head_dim_qk)
        require(q.dim() == 3 and tuple(q.shape[1:]) == expected, "q", tuple(q.shape), f"[rows, {expected}], as planned")
        require(q.dtype == o.q_dtype, "q", q.dtype, f"{o.q_dtype}, as planned (q_data_type)")
        packed = 2 if o.kv_dtype == NVFP4 else 1
        for name, t, dim in (("k", k, o.head_dim_qk // packed), ("v", v, o.head_dim_vo // packed)):
            require(t.device == self.device, name, f"a tensor on {t.device}", f"{self.device}, where q is")
            require(t.dtype == o.kv_dtype, name, t.dtype, f"{o.kv_dtype}, as planned (kv_data_type)")
            got = tuple(t.shape[-2:])
            allowed = f"{(o.num_kv_heads, dim)}, as planned"
            if t.dim() == 4 and t.shape[1:3] == (o.num_kv_heads, o.page_size):
                other = "NHD" if self.kv_layout == "HND" else "HND"
                allowed += f"; heads and tokens stand in each other's places: is this kv_layout={other!r}?"
            require(got == (o.num_kv_heads, dim), name, f"{got} heads and dim", allowed)
            require(t.stride(-1) == 1, name, f"stride {t.stride(-1)} of head_dim", "1: call .contiguous()")
            if o.page_size:
                paged = t.dim() == 4 and t.shape[1] == o.page_size
                require(paged, name, tuple(t.shape), f"pages of {o.page_size} tokens, as planned")
        require(k.shape[:-2] == v.shape[:-2], "v", tuple(v.shape), f"as many rows as k: {tuple(k.shape)}")
        require(q.stride(-1) == 1, "q", f"stride {q.stride(-1)} of head_dim", "1: call .contiguous()")
        rows, keys = self._needs
        names = self.request.names
        allowed = f"the last offset of {names[QO_INDPTR]}" if not self.request.q_len else "as planned"
        require(rows <= q.shape[0], "q", f"{q.shape[0]} rows", f"at least {rows}, {allowed}")
        # Beside a first offset that is not 0, q is that of a larger batch.
        whole = rows < 0 or rows == q.shape[0] or self.padded or self.request.first_row > 0
        require(whole, "q", f"{q.shape[0]} rows", f"{rows}, {allowed}: further rows are of no request")
        allowed = f"at least {keys}, the last offset of {names[KV_INDPTR]}"
        require(keys <= k.shape[0], "k", f"{k.shape[0]} rows", allowed)
        if self.looks:
            self._check_on_device(q, k)

    def _check_on_device(self, q, k) -> None:
        """What only the device knows; waits for it, so on the CPU and in debug mode alone."""
        page_size, names = self.options.page_size, self.request.names
        if not self.table.batch_size:
            return
        (q_begin, q_len), (kv_begin, kv_len) = self.table.q_spans(), self.table.kv_spans(page_size)
        rows = int((q_begin + q_len).max())
        require(rows <= q.shape[0], names[QO_INDPTR], f"{rows} last", f"at most {q.shape[0]}, the rows of q")
        pages = (kv_len + page_size - 1) // page_size if page_size else kv_len
        used = int((kv_begin + pages).max())
        if not page_size:
            require(used <= k.shape[0], names[KV_INDPTR], f"{used} last", f"at most {k.shape[0]}, the rows of k")
            return
        table = self.table.kv_indices
        most = f"at most {len(table)} in all" if not self.table.kv_stride else f"at most {self.table.kv_stride} each"
        fits = used <= len(table) and not (self.table.kv_stride and int(pages.max()) > self.table.kv_stride)
        require(fits, names[LENGTHS], f"{int(pages.max())} pages, {used} last", most)
        ends = pages.cumsum(0)
        within = torch.arange(int(pages.sum()), dtype=torch.int64, device=table.device)
        entries = table[within + (kv_begin - ends + pages).repeat_interleave(pages)]
        wrong = ((entries < 0) | (entries >= k.shape[0])).nonzero()
        if len(wrong):
            at = int(wrong[0])
            request = int(torch.searchsorted(ends, at, right=True))
            require(False, names[KV_INDICES], f"page {int(entries[at])} of request {request}",
                    f"0 ... {k.shape[0] - 1}, the pages of the cache")  # fmt: skip

    def _sinks(self, sinks) -> torch.Tensor | None:
        if sinks is None:
            return None
        heads = self.options.num_qo_heads
        require(tuple(sinks.shape) == (heads,), "sinks", tuple(sinks.shape), f"[{heads}], one logit per query head")
        require(sinks.device == self.device, "sinks", f"a tensor on {sinks.device}", str(self.device))
        return sinks.float().contiguous()

    def _params(self, call: Call, wants_lse: bool) -> tuple:
        """What the planned variant's functions are given. Checks what cannot go with it."""
        variant = self.options.variant
        if variant is None:
            require(not call.params, "params", list(call.params or ()), "None: no variant was planned")
            return ()
        if not variant.use_softmax:
            require(not wants_lse, "return_lse", True, "False: without a softmax (use_softmax) there is no LSE")
            require(call.sinks is None, "sinks", "a tensor", "None: without a softmax (use_softmax) there is no sink")
        if variant.owns_mask:
            require(call.window_left in (None, -1), "window_left", call.window_left, "-1: the variant owns the mask")
        return variant.values(call.params, self.device)

    def _factors(self, call: Call, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The e4m3 factors of nvfp4 keys and values, laid out as those."""
        given = (call.k_factors, k), (call.v_factors, v)
        if self.options.kv_dtype != NVFP4:
            has = any(factors is not None for factors, _ in given)
            require(not has, "kv_block_scales", "tensors", f"None, of {self.options.kv_dtype} keys and values")
            return None, None
        for i, (factors, x) in enumerate(given):
            name = f"kv_block_scales[{i}]"
            require(factors is not None, name, None, "e4m3 factors, of nvfp4 keys and values")
            shape = *x.shape[:-1], x.shape[-1] // 8
            require(tuple(factors.shape) == shape, name, tuple(factors.shape), f"{shape} (page, token, head, factor)")
            stored = factors.dtype in (torch.float8_e4m3fn, torch.uint8)
            require(stored, name, factors.dtype, "float8_e4m3fn, uint8")
            require(factors.device == self.device, name, f"a tensor on {factors.device}", str(self.device))
            dense = factors.stride(-1) == 1 or shape[-1] == 1
            require(dense, name, f"stride {factors.stride(-1)} of the last axis", "1")
        return tuple(factors.view(torch.float8_e4m3fn) for factors, _ in given)

    def _scales(self, call: Call):
        """Scalars of the call, and vectors per query head where a scale is a tensor."""
        planned = self.kind.scalars
        if call.q_scale is None and call.k_scale is None and call.v_scale is None and call.window_left is None:
            return planned, None, None
        numbers, vectors = {}, {}
        for name in ("q_scale", "k_scale", "v_scale"):
            value = getattr(call, name)
            if isinstance(value, torch.Tensor) and not (value.numel() == 1 and not value.is_cuda):
                vectors[name] = self._per_head(value, name)
                value = 1.0
            numbers[name] = 1.0 if value is None else float(value)
            require(is_finite(numbers[name]), name, numbers[name], "a finite number")
        window = planned.window_left if call.window_left is None else call.window_left
        # The schedule leaves out keys that no query sees in the planned window.
        ok = planned.window_left < 0 or 0 <= window <= planned.window_left
        require(ok and window >= -1, "window_left", window, f"at most the planned {planned.window_left}")
        scalars = replace(
            planned,
            sm_scale=planned.sm_scale * numbers["q_scale"] * numbers["k_scale"],
            out_scale=numbers["v_scale"],
            window_left=window,
        )
        if not vectors:
            return scalars, None, None
        one = torch.ones(self.options.num_qo_heads, dtype=torch.float32, device=self.device)
        qk = vectors.get("q_scale", one) * vectors.get("k_scale", one)
        return scalars, qk.contiguous(), vectors.get("v_scale", one).contiguous()

    def _per_head(self, value: torch.Tensor, name: str) -> torch.Tensor:
        """A scale tensor as one float32 per query head; per-KV-head scales are repeated over their group."""
        heads, kv_heads = self.options.num_qo_heads, self.options.num_kv_heads
        value = value.to(self.device, torch.float32, non_blocking=True).flatten()
        if value.shape[0] == 1:
            return value.expand(heads)
        if value.shape[0] == kv_heads:
            return value.repeat_interleave(self.options.group)
        require(value.shape[0] == heads, name, tuple(value.shape), f"1, {kv_heads} or {heads} elements")
        return value


def facts(t: torch.Tensor | None) -> tuple | None:
    """What a held launch depends on of a tensor that does not move."""
    return None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype, t.device)


def _aligned(factors: tuple[torch.Tensor | None, torch.Tensor | None]) -> bool:
    """Whether rows of nvfp4 factors start where loads of all their bytes may."""
    for t in factors:
        if t is not None and any(n % factor_alignment(16 * t.shape[-1]) for n in (t.data_ptr(), *t.stride()[:-1])):
            return False
    return True


def _same_tables(a: Table, b: Table) -> bool:
    """Whether what launches refer to of the tables of two batches is in the same memory. Page ids may move."""
    if a.mask is None and b.mask is None:
        return True
    pairs = (a.mask, b.mask), (a.mask_indptr, b.mask_indptr)
    return all([x is y or (x is not None and y is not None and x.data_ptr() == y.data_ptr()) for x, y in pairs])
