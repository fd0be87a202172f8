"""The path by which callers of upstream reach its kernels in CuTe DSL; the kernels here are Triton's."""

from flashinfer.cute_dsl.utils import convert_sf_to_mma_layout, is_cute_dsl_available
from flashinfer.gemm.masked import grouped_gemm_nt_masked
from flashinfer.norm import add_rmsnorm_fp4quant, qk_rmsnorm_cute, rmsnorm_fp4quant

__all__ = [
    "add_rmsnorm_fp4quant",
    "convert_sf_to_mma_layout",
    "grouped_gemm_nt_masked",
    "is_cute_dsl_available",
    "qk_rmsnorm_cute",
    "rmsnorm_fp4quant",
]
