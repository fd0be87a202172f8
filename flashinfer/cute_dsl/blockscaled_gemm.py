"""The path by which callers of upstream reach its masked product in CuTe DSL; the kernel here is Triton's."""

from flashinfer.gemm.masked import grouped_gemm_nt_masked

__all__ = ["grouped_gemm_nt_masked"]
