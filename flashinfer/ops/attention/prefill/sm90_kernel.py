"""Prefill attention on Hopper: out = softmax(mask(scale Q K^T)) V, and its LSE, over ragged or paged keys.

Grid: as many persistent thread blocks as multiprocessors, or fewer. A thread block takes tasks until none is left
(sm90_queue.py); a task is a pair of a work item (128 query rows, a range of keys) and a KV head.

Warps: 4 a warpgroup;

- two consumer warpgroups of 64 query rows each: products, softmax, results (sm90_softmax.py, sm90_finish.py);
- a producer warp for K, which also publishes the next task, and one for V, by TMA (sm90_loads.produce), or
  two for each where pages are small; or four warps that copy both row by row (sm90_loads.gather); or, of FP8 caches
  under bf16 or fp16 queries, two that widen K and two that widen V (sm90_widen.py);
- in FP8, two more that transpose values (sm90_values.py).

Shared memory: the 128 query rows, rings of STAGES tiles of K and of V (in FP8, of transposed V too), and, if STAGED,
the output rows. At head_dim 128 in bf16: 32 KiB of Q, 128 KiB of K and V, 32 KiB of output.

Inputs: q [tokens, heads, head_dim_qk]; keys and values as matrices whose rows TMA copies, or as pointers; work items of
schedule.py. Outputs: out [tokens, heads, head_dim_vo], lse [tokens, heads] float32 in base 2; for split work items
partial_out [slots, kv_heads, 128, head_dim_vo] and partial_lse [slots, kv_heads, 128], float32, which the last split of
a tile combines.

Method: FlashAttention-3 (Shah et al., 2024), with a fixed shift for blocks without a mask.
docs/rooms/attention-prefill.md has the schedule and its measurements.
"""

import triton.language as tl

from flashinfer._core.gluon_compat import (
    aggregate,
    block_barrier,
    cp_async_wait,
    fence_async_shared,
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashinfer.ops._device.sm90.registers import opaque, prefetch, program
from flashinfer.ops._device.sm90.ring import make_barriers
from flashinfer.ops.attention._device.logits import LOG2E
from flashinfer.ops.attention._device.schedule import ITEM_WIDTH
from flashinfer.ops.attention._device.sm90_fixed_shift import DOUBTFUL, FAILED, verdict
from flashinfer.ops.attention.prefill.sm90_finish import all_positive, finish, rows_of, rows_exist, view_of
from flashinfer.ops.attention.prefill.sm90_loads import fetch_queries, gather, produce
from flashinfer.ops.attention.prefill.sm90_queue import (
    TaskQueue,
    make_task_queue,
    read_next,
    report,
    span,
)
from flashinfer.ops.attention.prefill.sm90_settings import (
    ROWS,
    Ring,
    Scalars,
    Settings,
    Tensors,
    make_ring,
)
from flashinfer.ops.attention.prefill.sm90_softmax import (
    SHIFT,
    as_operand,
    attend,
    overflows,
    per_row,
    start_pv_fp8,
    wait_full,
)
from flashinfer.ops.attention.prefill.sm90_values import transpose_values
from flashinfer.ops.attention.prefill.sm90_widen import WARPS as WIDEN_WARPS
from flashinfer.ops.attention.prefill.sm90_widen import widen


@aggregate
class Shared:
    """The consumers' shared memory. `rest` is the second part of the queries, see Ring."""

    q: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    # One mbarrier for each consumer warpgroup: its turn to issue products.
    turn: gl.shared_memory_descriptor
    k: Ring
    v: Ring
    queue: TaskQueue


@gluon.jit
def _begin_task(WG, task, tasks, shared: Shared, tensors: Tensors, scalars: Scalars, settings: Settings):
    """Start copying the queries of a task, if `task` exists. Returns its work item and its KV head."""
    item = task // scalars.num_kv_heads
    kv_head = task % scalars.num_kv_heads
    fetch_queries(
        WG, shared.q, shared.rest, tensors.q, tensors.items, item, kv_head, task < tasks, scalars.q_stride_n,
        scalars.q_stride_h, settings,
    )  # fmt: skip
    return item, kv_head


@gluon.jit
def _next_task(WG, n, tasks, shared: Shared, tensors: Tensors, scalars: Scalars, settings: Settings):
    """Read the task of word n and begin it: the task, its work item, its KV head, and its retry flags."""
    task, retry = read_next(shared.queue, n)
    item, kv_head = _begin_task(WG, task, tasks, shared, tensors, scalars, settings)
    return task, item, kv_head, retry


@gluon.jit
def _run_task(
    WG, wave, n, task, item, kv_head, retry, tasks, step, cols, zeros, params, shared: Shared, tensors: Tensors,
    scalars: Scalars, settings: Settings,
):  # fmt: skip
    """Process one task, whose queries are being copied. Returns `_next_task` of word n, and the next `step`."""
    num_kv_heads = scalars.num_kv_heads
    k, v = shared.k, shared.v
    S_ROWS: gl.constexpr = gl.SliceLayout(1, zeros.type.layout)
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, settings.D_VO_PAD, settings.MMA_K])
    record = tensors.items + item * ITEM_WIDTH
    begin, blocks, plain_from, plain_to = span(record, scalars.window_left, zeros.shape[1], settings)
    if settings.FIXED:
        # A retry uses the maximum of each block: no block counts as one without a mask. A task without such a block
        # does, too: some of its rows may see no key in the first of its blocks, and have no shift.
        maxima = (retry > 0) | (gl.minimum(plain_to, blocks - 1) <= plain_from)
        plain_from = gl.where(maxima, 0, plain_from)
        plain_to = gl.where(maxima, 0, plain_to)
    failed = blocks < 0
    view = view_of(record, kv_head, rows_of(WG, S_ROWS), tensors, scalars, settings)
    factor = 1.0 if settings.TRANSFORM else scalars.sm_scale * LOG2E

    cp_async_wait(0)
    # Orders the threads' writes, including cp.async, before wgmma's reads.
    fence_async_shared()
    block_barrier()
    acc = gl.zeros([ROWS, settings.D_VO_PAD], gl.float32, O_LAYOUT)
    top = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
    total = gl.zeros([ROWS], gl.float32, S_ROWS)
    if blocks > 0:
        # Maxima of raw products are those of logits where all scales are positive.
        if settings.BY_ROW and all_positive(tensors, scalars, kv_head, settings):
            acc, p, keep, top, sums, step = attend(
                WG, begin, blocks, plain_from, plain_to, step, shared.q, shared.rest, k, v, shared.turn, zeros, cols,
                view.scale * LOG2E, view, params, True, settings,
            )  # fmt: skip
            top *= view.scale * LOG2E
        else:
            acc, p, keep, top, sums, step = attend(
                WG, begin, blocks, plain_from, plain_to, step, shared.q, shared.rest, k, v, shared.turn, zeros, cols,
                factor, view, params, False, settings,
            )  # fmt: skip
        used_fixed_shift = gl.minimum(plain_to, blocks - 1) > plain_from
        row_ok = total == 0
        if settings.FIXED:
            # Loaded before the last product, which hides the latency.
            row_ok = rows_exist(WG, record, S_ROWS, settings)
        before = v.channel.stage(step - 1)
        if settings.FP8:
            block_barrier()
            following = _next_task(WG, n, tasks, shared, tensors, scalars, settings)
            wait_full(v, step - 1, settings)
            pv = warpgroup_mma_wait(0, [start_pv_fp8(p, v, before, acc)])
        else:
            acc = acc * per_row(keep, acc)
            p = as_operand(p, shared.q) if settings.LATE else p
            wait_full(v, step - 1, settings)
            pv = warpgroup_mma(p, v.tiles.index(before), acc, is_async=True)
            # All warps have read these queries: the next task's queries are copied during the rest of this task.
            block_barrier()
            following = _next_task(WG, n, tasks, shared, tensors, scalars, settings)
        level = blocks * 0
        if settings.FIXED:
            total = gl.convert_layout(gl.sum(sums, 1), S_ROWS)
            level = verdict(total, row_ok)
        if not settings.FP8:
            acc = warpgroup_mma_wait(0, [pv])
        v.channel.release(step - 1)
        if not settings.FIXED:
            total = gl.convert_layout(gl.sum(sums, 1), S_ROWS)
        if settings.FP8:
            acc = (acc * per_row(keep, acc) + pv) * (1.0 / (1 << SHIFT))
            total *= 1.0 / (1 << SHIFT)
        if settings.FIXED:
            if used_fixed_shift & (level == DOUBTFUL):
                level = verdict(gl.convert_layout(gl.sum(sums + overflows(acc), 1), S_ROWS), row_ok)
            failed = used_fixed_shift & (level == FAILED)
    else:
        following = _next_task(WG, n, tasks, shared, tensors, scalars, settings)
    if settings.FIXED:
        report(shared.queue, WG, wave, task, failed)
    if settings.FP8:
        # Computed again instead of kept: the loop over keys has no registers left.
        task = opaque(task)
        record = tensors.items + task // num_kv_heads * ITEM_WIDTH
        kv_head = task % num_kv_heads
    if settings.FIXED:
        # A warpgroup that failed stores only on the retry; the other one has already stored.
        if ((retry == 0) & (failed == 0)) | ((retry >> WG & 1) != 0):
            finish(WG, acc, top * factor, total, record, kv_head, shared.out, tensors, scalars, settings)
    else:
        finish(WG, acc, top * factor, total, record, kv_head, shared.out, tensors, scalars, settings)
    return following, step


@gluon.jit
def _consume(WG, params, shared: Shared, tensors: Tensors, scalars: Scalars, settings: Settings):
    """Consumer warpgroup WG: 64 rows of each tile, from row WG * 64 on."""
    BLOCK_N: gl.constexpr = shared.k.tiles.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, settings.MMA_K])
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    tasks = gl.load(tensors.counts) * scalars.num_kv_heads
    task = program()
    item, kv_head = _begin_task(WG, task, tasks, shared, tensors, scalars, settings)
    step = 0
    retry = 0
    wave = 0
    n = 0
    # Without loop-invariant code motion: values that all tasks share are recomputed for each, because the loop over
    # keys needs the registers.
    while tl.condition(task < tasks, disable_licm=True):
        following, step = _run_task(
            WG, wave, n, task, item, kv_head, retry, tasks, step, cols, zeros, params, shared, tensors, scalars,
            settings,
        )  # fmt: skip
        task, item, kv_head, retry = following
        wave += 1
        n += 1
        if settings.FIXED:
            if task >= tasks:
                # Not the end yet: a retry of the last task may follow.
                task, item, kv_head, retry = _next_task(WG, n, tasks, shared, tensors, scalars, settings)
                n += 1


@gluon.jit
def _tiles(DTYPE: gl.constexpr, COUNT: gl.constexpr, ROWS_IN: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory for COUNT tiles, swizzled as wgmma reads them."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS_IN, COLUMNS], DTYPE)
    return gl.allocate_shared_memory(DTYPE, [COUNT, ROWS_IN, COLUMNS], LAYOUT)


@gluon.jit
def attend_sm90_kernel(
    q, k_map, k_rest_map, v_map, out, lse, partial, work, kv_indices, mask, heads, num_kv_heads, q_by, out_by, k_by,
    v_by, numbers, params, dims, tiles, warps,
    GROUP: gl.constexpr, SCALE_FIRST: gl.constexpr, LSE: gl.constexpr, GATHER: gl.constexpr, LOGITS: gl.constexpr,
    MASK: gl.constexpr, SOFTMAX: gl.constexpr, BY_HEAD: gl.constexpr,
):  # fmt: skip
    """head_dim_qk is dims.D + dims.REST; tiles have dims.D and dims.REST_PAD columns, and tiles.M = 2 * ROWS rows.

    Keys and values are the rows of matrices (kv_layout.Matrix), where k_by.page and k_by.head are rows and k_by.step is
    columns from head to head; v_by likewise. BY_HEAD the maps have an axis of heads, and k_by.step is 1, or 0 where
    heads are rows. With GATHER the maps are pointers, page and step are bytes from page to page and row to row, and
    head is elements. LOGITS and MASK are functions of a user's variant, or None; `params` is a named tuple for them.
    Without SOFTMAX, logits are weights.
    """
    # Where L2 is cold, the number of tasks and the first task's record arrive together.
    prefetch(work.counts)
    prefetch(work.items + program() // num_kv_heads * ITEM_WIDTH)
    VARIED: gl.constexpr = LOGITS is not None or MASK is not None
    DTYPE: gl.constexpr = q.dtype.element_ty
    SCALED: gl.constexpr = numbers.SOFT_CAP or heads.ALIBI or SCALE_FIRST or VARIED
    TWO: gl.constexpr = dims.REST > 0
    FP8: gl.constexpr = DTYPE.primitive_bitwidth == 8
    FIXED: gl.constexpr = DTYPE == gl.bfloat16 and SOFTMAX and not mask.CUSTOM and MASK is None
    settings = Settings(
        CAUSAL=mask.CAUSAL, WINDOW=mask.WINDOW, CUSTOM=mask.CUSTOM, SOFT_CAP=numbers.SOFT_CAP, ALIBI=heads.ALIBI,
        SINKS=heads.SINKS, HEAD_SCALES=heads.SCALES, LSE=LSE,
        TRANSFORM=SCALED or heads.SCALES, BY_ROW=heads.SCALES and FP8 and not SCALED, GATHER=GATHER,
        WIDEN=warps.WIDEN, LEAD=warps.LEAD, BY_HEAD=BY_HEAD, COPIERS=warps.COPIERS, GROUP=GROUP,
        PAGE_SIZE=dims.PAGE_SIZE, D_VO=dims.VO, D_VO_PAD=dims.VO_PAD, BLOCK_M=tiles.M, STAGES=tiles.STAGES, TWO=TWO,
        REST=dims.REST, STAGED=tiles.STAGED, FP8=FP8, MMA_K=256 // DTYPE.primitive_bitwidth,
        TRANSPOSE_WARPS=warps.TRANSPOSE, LOGITS=LOGITS, MASK=MASK, VARIED=VARIED, SOFTMAX=SOFTMAX, FIXED=FIXED,
        TURNS=tiles.TURNS, LATE=tiles.LATE, BY_FMA=tiles.BY_FMA,
    )  # fmt: skip
    q_tiles = _tiles(DTYPE, 2, ROWS, dims.D)
    k_tiles = _tiles(DTYPE, tiles.STAGES, tiles.N, dims.D)
    v_tiles = _tiles(DTYPE, tiles.STAGES, tiles.N, dims.VO_PAD)
    q_rests = q_tiles
    k_rests = k_tiles
    if TWO:
        q_rests = _tiles(DTYPE, 2, ROWS, dims.REST_PAD)
        k_rests = _tiles(DTYPE, tiles.STAGES, tiles.N, dims.REST_PAD)
    # Not shared with the queries' tiles: the next task's queries are copied there while outputs are staged.
    o_tiles = _tiles(out.dtype.element_ty, 2, ROWS if tiles.STAGED else 8, dims.VO_PAD)
    # With cp.async each of 128 threads arrives at a stage's mbarrier; of warps that widen one thread does, and with TMA
    # one of each warp, and bytes are counted.
    WRITERS: gl.constexpr = 128 if GATHER and warps.WIDEN == "" else warps.COPIERS
    k = make_ring(k_tiles, k_rests, tiles.STAGES, WRITERS, 2)
    v = make_ring(v_tiles, v_tiles, tiles.STAGES, WRITERS, 1 if FP8 else 2)
    # Readers: the consumers, and the warps that copy or transpose values.
    queue = make_task_queue(4 if FP8 else 2 if WRITERS == 128 else 1 + 2 * warps.COPIERS, settings.FIXED)
    # Without turns there are no mbarriers for them. The compiler would let unused mbarriers share memory with tiles.
    turn = k.channel.full
    if tiles.TURNS:
        turn = make_barriers(2)
    tensors = Tensors(
        q, out, lse, partial.out, partial.lse, work.items, work.counts, work.arrivals, mask.bits, mask.indptr,
        heads.sinks, heads.qk_scale, heads.v_scale, heads.slopes,
    )  # fmt: skip
    scalars = Scalars(
        num_kv_heads, q_by.token, q_by.head, out_by.token, out_by.head, numbers.sm_scale, numbers.out_scale,
        numbers.soft_cap, numbers.window_left,
    )  # fmt: skip
    common = (queue, work.items, work.counts, kv_indices, num_kv_heads, numbers.window_left)
    of_k = common + (k_by.page, k_by.head, k_by.step)
    of_v = common + (v_by.page, v_by.head, v_by.step)
    if FP8:
        transposed_tiles = _tiles(DTYPE, tiles.STAGES, dims.VO_PAD, tiles.N)
        transposed = make_ring(transposed_tiles, transposed_tiles, tiles.STAGES, 1, 2)
        shared = Shared(q_tiles, q_rests, o_tiles, turn, k, transposed, queue)
        gl.warp_specialize(
            [
                (_consume, (gl.to_tensor(0), params, shared, tensors, scalars, settings)),
                (_consume, (gl.to_tensor(1), params, shared, tensors, scalars, settings)),
                (transpose_values, (
                    v, transposed, queue, work.items, work.counts, num_kv_heads, numbers.window_left, settings,
                )),
                (produce, (gl.constexpr("k"), gl.constexpr(0), (k_map, k_rest_map), k, of_k, settings)),
                (produce, (gl.constexpr("v"), gl.constexpr(0), (v_map,), v, of_v, settings)),
            ],
            [4, warps.TRANSPOSE, 1, 1],
            [warps.REGISTERS, warps.COPY_REGISTERS, warps.COPY_REGISTERS, warps.COPY_REGISTERS],
        )  # fmt: skip
    else:
        shared = Shared(q_tiles, q_rests, o_tiles, turn, k, v, queue)
        if warps.WIDEN != "":
            gl.warp_specialize(
                [
                    (_consume, (gl.to_tensor(0), params, shared, tensors, scalars, settings)),
                    (_consume, (gl.to_tensor(1), params, shared, tensors, scalars, settings)),
                    (widen, (gl.constexpr("k"), k_map, k, of_k, settings)),
                    (widen, (gl.constexpr("v"), v_map, v, of_v, settings)),
                ],
                [4, WIDEN_WARPS, WIDEN_WARPS],
                [warps.REGISTERS, warps.COPY_REGISTERS, warps.COPY_REGISTERS],
            )  # fmt: skip
        elif GATHER:
            gl.warp_specialize(
                [
                    (_consume, (gl.to_tensor(0), params, shared, tensors, scalars, settings)),
                    (_consume, (gl.to_tensor(1), params, shared, tensors, scalars, settings)),
                    (gather, (k_map, v_map, k, v) + of_k + (v_by.page, v_by.head, v_by.step, settings)),
                ],
                [4, 4],
                [warps.REGISTERS, warps.COPY_REGISTERS],
            )  # fmt: skip
        else:
            if warps.COPIERS == 1:
                gl.warp_specialize(
                    [
                        (_consume, (gl.to_tensor(0), params, shared, tensors, scalars, settings)),
                        (_consume, (gl.to_tensor(1), params, shared, tensors, scalars, settings)),
                        (produce, (gl.constexpr("k"), gl.constexpr(0), (k_map, k_rest_map), k, of_k, settings)),
                        (produce, (gl.constexpr("v"), gl.constexpr(0), (v_map,), v, of_v, settings)),
                    ],
                    [4, 1, 1],
                    [warps.REGISTERS, warps.COPY_REGISTERS, warps.COPY_REGISTERS],
                )  # fmt: skip
            else:
                gl.warp_specialize(
                    [
                        (_consume, (gl.to_tensor(0), params, shared, tensors, scalars, settings)),
                        (_consume, (gl.to_tensor(1), params, shared, tensors, scalars, settings)),
                        (produce, (gl.constexpr("k"), gl.constexpr(0), (k_map, k_rest_map), k, of_k, settings)),
                        (produce, (gl.constexpr("k"), gl.constexpr(1), (k_map, k_rest_map), k, of_k, settings)),
                        (produce, (gl.constexpr("v"), gl.constexpr(0), (v_map,), v, of_v, settings)),
                        (produce, (gl.constexpr("v"), gl.constexpr(1), (v_map,), v, of_v, settings)),
                    ],
                    [4, 1, 1, 1, 1],
                    [warps.REGISTERS] + [warps.COPY_REGISTERS] * 4,
                )
