"""The functions of upstream's `flashinfer.triton`, by the kernels that its other names have here."""

from flashinfer.triton import activation, cascade, norm, sm_constraint_gemm

__all__ = ["activation", "cascade", "norm", "sm_constraint_gemm"]
