"""Upstream's names for timing a function on the GPU, and what attention's figures are worked out by."""

from __future__ import annotations

import math
import random
import time as clock

import numpy as np
import torch

from flashinfer._core.checks import require
from flashinfer.testing.bench import bench_gpu_time


def bench_gpu_time_with_cuda_event(
    fn,
    dry_run_iters=None,
    repeat_iters=None,
    dry_run_time_ms=25,
    repeat_time_ms=100,
    l2_flush=None,
    l2_flush_size_mb=None,
    l2_flush_device=None,
    sleep_after_run=False,
    input_args=(),
    input_kwargs=None,
    cold_l2_cache=True,
    aggregate_op=max,
) -> list[float]:
    """`bench_gpu_time` by events around each call.

    Parameters
    ----------
    fn, dry_run_iters, repeat_iters, dry_run_time_ms, repeat_time_ms, l2_flush, l2_flush_size_mb
        As in `bench_gpu_time`.
    l2_flush_device, sleep_after_run, input_args, input_kwargs, cold_l2_cache, aggregate_op
        As in `bench_gpu_time`.

    Returns
    -------
    list of float
        Milliseconds of one call, an entry for each measured call or replay.

    Raises
    ------
    ValueError
        There is no CUDA device, or a count is not positive.
    """
    return bench_gpu_time(
        fn, dry_run_iters, repeat_iters, dry_run_time_ms, repeat_time_ms, l2_flush, l2_flush_size_mb, l2_flush_device,
        sleep_after_run, input_args=input_args, input_kwargs=input_kwargs, cold_l2_cache=cold_l2_cache,
        aggregate_op=aggregate_op,
    )  # fmt: skip


def bench_gpu_time_with_cudagraph(
    fn,
    dry_run_iters=None,
    repeat_iters=None,
    dry_run_time_ms=25,
    repeat_time_ms=100,
    num_iters_within_graph=10,
    l2_flush=None,
    l2_flush_size_mb=None,
    l2_flush_device=None,
    sleep_after_run=False,
    input_args=(),
    input_kwargs=None,
    cold_l2_cache=True,
    aggregate_op=max,
) -> list[float]:
    """`bench_gpu_time` by replays of a CUDA graph.

    Parameters
    ----------
    fn, dry_run_iters, repeat_iters, dry_run_time_ms, repeat_time_ms, num_iters_within_graph, l2_flush
        As in `bench_gpu_time`.
    l2_flush_size_mb, l2_flush_device, sleep_after_run, input_args, input_kwargs, cold_l2_cache, aggregate_op
        As in `bench_gpu_time`.

    Returns
    -------
    list of float
        Milliseconds of one call, an entry for each measured call or replay.

    Raises
    ------
    ValueError
        There is no CUDA device, or a count is not positive.
    """
    return bench_gpu_time(
        fn, dry_run_iters, repeat_iters, dry_run_time_ms, repeat_time_ms, l2_flush, l2_flush_size_mb, l2_flush_device,
        sleep_after_run, use_cuda_graph=True, num_iters_within_graph=num_iters_within_graph, input_args=input_args,
        input_kwargs=input_kwargs, cold_l2_cache=cold_l2_cache, aggregate_op=aggregate_op,
    )  # fmt: skip


def bench_gpu_time_with_cupti(
    fn,
    dry_run_iters=None,
    repeat_iters=None,
    dry_run_time_ms=25,
    repeat_time_ms=100,
    l2_flush=None,
    l2_flush_size_mb=None,
    l2_flush_device=None,
    sleep_after_run=False,
    use_cuda_graph=False,
    input_args=(),
    input_kwargs=None,
    cold_l2_cache=True,
    aggregate_op=max,
) -> list[float]:
    """`bench_gpu_time(enable_cupti=True)`: a warning says that events or a graph time the call in CUPTI's place.

    Parameters
    ----------
    fn, dry_run_iters, repeat_iters, dry_run_time_ms, repeat_time_ms, l2_flush, l2_flush_size_mb
        As in `bench_gpu_time`.
    l2_flush_device, sleep_after_run, use_cuda_graph, input_args, input_kwargs, cold_l2_cache, aggregate_op
        As in `bench_gpu_time`.

    Returns
    -------
    list of float
        Milliseconds of one call, an entry for each measured call or replay.

    Raises
    ------
    ValueError
        There is no CUDA device, or a count is not positive.
    """
    return bench_gpu_time(
        fn, dry_run_iters, repeat_iters, dry_run_time_ms, repeat_time_ms, l2_flush, l2_flush_size_mb, l2_flush_device,
        sleep_after_run, enable_cupti=True, use_cuda_graph=use_cuda_graph, input_args=input_args,
        input_kwargs=input_kwargs, cold_l2_cache=cold_l2_cache, aggregate_op=aggregate_op,
    )  # fmt: skip


def set_seed(random_seed) -> None:
    """Seed torch on every device, Python's `random` and numpy.

    Parameters
    ----------
    random_seed : int
        0 to 2^32 - 1, which numpy takes.

    Raises
    ------
    ValueError
        numpy's own, of a seed out of that range.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.testing import set_seed
    >>> set_seed(3)
    >>> first = torch.rand(2)
    >>> set_seed(3)
    >>> bool((torch.rand(2) == first).all())
    True
    """
    torch.manual_seed(random_seed)
    random.seed(random_seed)
    np.random.seed(random_seed)


def sleep_after_kernel_run(execution_time) -> None:
    """Sleep five times as long as a kernel ran, a second at most, so that a hot card does not throttle.

    Parameters
    ----------
    execution_time : float
        Milliseconds; infinite for a run that failed, which is followed by 10 ms.

    Raises
    ------
    ValueError
        Python's own, of a negative time.

    Examples
    --------
    >>> from flashinfer.testing import sleep_after_kernel_run
    >>> sleep_after_kernel_run(0.01)
    """
    clock.sleep(0.01 if math.isinf(execution_time) else min(execution_time / 200, 1.0))


def attention_flops(batch_size, qo_seqlen, kv_seqlen, head_dim_qk, head_dim_vo, num_qo_heads, causal) -> int:
    """Floating-point operations of attention over requests of one length.

    Each pair of a query and a key that it sees costs 2 head_dim_qk for the logit and 2 head_dim_vo for the output. The
    last query stands at the last key; on the causal diagonal a pair counts half.

    Parameters
    ----------
    batch_size : int
    qo_seqlen, kv_seqlen : int
        Queries and keys of each request.
    head_dim_qk, head_dim_vo : int
    num_qo_heads : int
    causal : bool
        Needs at least as many keys as queries.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        A causal request with more queries than keys.

    Examples
    --------
    >>> from flashinfer.testing import attention_flops
    >>> attention_flops(1, 2, 4, 64, 64, 1, causal=False)
    2048
    >>> attention_flops(1, 2, 4, 64, 64, 1, causal=True)
    1536
    """
    require(not causal or qo_seqlen <= kv_seqlen, "qo_seqlen", qo_seqlen, f"at most kv_seqlen, {kv_seqlen}, if causal")
    pairs = qo_seqlen * (2 * kv_seqlen - qo_seqlen if causal else 2 * kv_seqlen)
    return batch_size * num_qo_heads * pairs * (head_dim_qk + head_dim_vo)


def attention_flops_with_actual_seq_lens(
    actual_seq_lens_q, actual_seq_lens_kv, head_dim_qk, head_dim_vo, num_qo_heads, causal
) -> torch.Tensor:
    """As `attention_flops`, with a length to each request.

    Parameters
    ----------
    actual_seq_lens_q, actual_seq_lens_kv : Tensor
        [batch], integers of one device. Further axes of 1 are taken.
    head_dim_qk, head_dim_vo, num_qo_heads, causal
        As in `attention_flops`.

    Returns
    -------
    Tensor
        float64, of no axes.

    Raises
    ------
    ValueError
        Lengths of different shapes, or a causal request with more queries than keys.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.testing import attention_flops_with_actual_seq_lens
    >>> attention_flops_with_actual_seq_lens(torch.tensor([2]), torch.tensor([4]), 64, 64, 1, False).item()
    2048.0
    """
    q, kv = _lengths(actual_seq_lens_q, actual_seq_lens_kv)
    allowed = "at most actual_seq_lens_kv, if causal"
    require(not causal or bool((q <= kv).all()), "actual_seq_lens_q", q.tolist(), allowed)
    pairs = q @ (2 * kv - q if causal else 2 * kv)
    return pairs * num_qo_heads * (head_dim_qk + head_dim_vo)


def attention_tflops_per_sec(
    batch_size, qo_seqlen, kv_seqlen, head_dim_qk, head_dim_vo, num_qo_heads, causal, time
) -> float:
    """TFLOP/s of `attention_flops`.

    Parameters
    ----------
    batch_size : int
    qo_seqlen, kv_seqlen, causal
        As in `attention_flops`.
    head_dim_qk, head_dim_vo : int
    num_qo_heads : int
    time : float
        Milliseconds; NaN gives 0.

    Returns
    -------
    float
        10^12 operations a second.

    Raises
    ------
    ValueError
        As `attention_flops` raises it.

    Examples
    --------
    >>> from flashinfer.testing import attention_tflops_per_sec
    >>> attention_tflops_per_sec(1, 2, 4, 64, 64, 1, causal=False, time=1.0)
    2.048e-06
    """
    flops = attention_flops(batch_size, qo_seqlen, kv_seqlen, head_dim_qk, head_dim_vo, num_qo_heads, causal)
    return _rate(flops, time)


def attention_tflops_per_sec_with_actual_seq_lens(
    actual_seq_lens_q, actual_seq_lens_kv, head_dim_qk, head_dim_vo, num_qo_heads, causal, ms
) -> float:
    """TFLOP/s of `attention_flops_with_actual_seq_lens`.

    Parameters
    ----------
    actual_seq_lens_q, actual_seq_lens_kv : Tensor
        [batch], integers of one device. Further axes of 1 are taken.
    head_dim_qk, head_dim_vo, num_qo_heads, causal
        As in `attention_flops`.
    ms : float
        Milliseconds; NaN gives 0.

    Returns
    -------
    float
        10^12 operations a second.

    Raises
    ------
    ValueError
        As `attention_flops_with_actual_seq_lens` raises it.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.testing import attention_tflops_per_sec_with_actual_seq_lens
    >>> attention_tflops_per_sec_with_actual_seq_lens(torch.tensor([2]), torch.tensor([4]), 64, 64, 1, False, 1.0)
    2.048e-06
    """
    flops = attention_flops_with_actual_seq_lens(
        actual_seq_lens_q, actual_seq_lens_kv, head_dim_qk, head_dim_vo, num_qo_heads, causal
    )
    return _rate(float(flops), ms)


def attention_tb_per_sec(
    batch_size,
    qo_seqlen,
    kv_seqlen,
    head_dim_qk,
    head_dim_vo,
    num_qo_heads,
    num_kv_heads,
    time,
    q_dtype=torch.bfloat16,
    k_dtype=torch.bfloat16,
    v_dtype=torch.bfloat16,
    o_dtype=torch.bfloat16,
) -> float:
    """TB/s (10^12 bytes) of attention over requests of one length: Q, K and V are read once, the output is written.

    Parameters
    ----------
    batch_size, qo_seqlen, kv_seqlen, head_dim_qk, head_dim_vo, num_qo_heads, num_kv_heads : int
    time : float
        Milliseconds; NaN gives 0.
    q_dtype, k_dtype, v_dtype, o_dtype : torch.dtype

    Returns
    -------
    float
        10^12 bytes a second.

    Raises
    ------
    ZeroDivisionError
        A time of 0.

    Examples
    --------
    >>> from flashinfer.testing import attention_tb_per_sec
    >>> attention_tb_per_sec(1, 1, 1024, 128, 128, 32, 8, time=1e-3)
    4.21...
    """
    q, kv = batch_size * qo_seqlen, batch_size * kv_seqlen
    heads = num_qo_heads, num_kv_heads
    return _rate(_bytes(q, kv, head_dim_qk, head_dim_vo, heads, (q_dtype, k_dtype, v_dtype, o_dtype)), time)


def attention_tb_per_sec_with_actual_seq_lens(
    actual_seq_lens_q,
    actual_seq_lens_kv,
    head_dim_qk,
    head_dim_vo,
    num_qo_heads,
    num_kv_heads,
    time,
    q_dtype=torch.bfloat16,
    k_dtype=torch.bfloat16,
    v_dtype=torch.bfloat16,
    o_dtype=torch.bfloat16,
) -> float:
    """As `attention_tb_per_sec`, with a length to each request.

    Parameters
    ----------
    actual_seq_lens_q, actual_seq_lens_kv : Tensor
        [batch], integers of one device. Further axes of 1 are taken.
    head_dim_qk, head_dim_vo, num_qo_heads
        As in `attention_flops`.
    num_kv_heads : int
    time : float
        Milliseconds; NaN gives 0.
    q_dtype, k_dtype, v_dtype, o_dtype : torch.dtype

    Returns
    -------
    float
        10^12 bytes a second.

    Raises
    ------
    ValueError
        Lengths of different shapes.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.testing import attention_tb_per_sec_with_actual_seq_lens
    >>> attention_tb_per_sec_with_actual_seq_lens(torch.tensor([1]), torch.tensor([1024]), 128, 128, 32, 8, 1e-3)
    4.21...
    """
    q, kv = (float(lengths.sum()) for lengths in _lengths(actual_seq_lens_q, actual_seq_lens_kv))
    heads = num_qo_heads, num_kv_heads
    return _rate(_bytes(q, kv, head_dim_qk, head_dim_vo, heads, (q_dtype, k_dtype, v_dtype, o_dtype)), time)


def _lengths(q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    require(q.numel() == kv.numel(), "actual_seq_lens_kv", tuple(kv.shape), f"{tuple(q.shape)}, as actual_seq_lens_q")
    return q.flatten().double(), kv.flatten().double()


def _bytes(q: float, kv: float, dim_qk: int, dim_vo: int, heads: tuple[int, int], dtypes: tuple) -> float:
    sizes = [dtype.itemsize for dtype in dtypes]
    of_q = q * heads[0] * (dim_qk * sizes[0] + dim_vo * sizes[3])
    return of_q + kv * heads[1] * (dim_qk * sizes[1] + dim_vo * sizes[2])


def _rate(count: float, ms: float) -> float:
    """Of 10^12 a second."""
    return 0.0 if math.isnan(ms) else count / ms / 1e9
