"""What tests and benchmarks share: the error rules, case generators and GPU timing."""

from flashinfer.testing.bench import bench_gpu_time
from flashinfer.testing.compare import assert_bitwise, assert_close

__all__ = ["assert_bitwise", "assert_close", "bench_gpu_time"]
