"""What tests and benchmarks share: the error rules, case generators and GPU timing."""

from flashinfer.testing.bench import bench_gpu_time
from flashinfer.testing.compare import assert_bitwise, assert_close
from flashinfer.testing.timers import (
    attention_flops,
    attention_flops_with_actual_seq_lens,
    attention_tb_per_sec,
    attention_tb_per_sec_with_actual_seq_lens,
    attention_tflops_per_sec,
    attention_tflops_per_sec_with_actual_seq_lens,
    bench_gpu_time_with_cuda_event,
    bench_gpu_time_with_cudagraph,
    bench_gpu_time_with_cupti,
    set_seed,
    sleep_after_kernel_run,
)

__all__ = [
    "assert_bitwise",
    "assert_close",
    "attention_flops",
    "attention_flops_with_actual_seq_lens",
    "attention_tb_per_sec",
    "attention_tb_per_sec_with_actual_seq_lens",
    "attention_tflops_per_sec",
    "attention_tflops_per_sec_with_actual_seq_lens",
    "bench_gpu_time",
    "bench_gpu_time_with_cuda_event",
    "bench_gpu_time_with_cudagraph",
    "bench_gpu_time_with_cupti",
    "set_seed",
    "sleep_after_kernel_run",
]
