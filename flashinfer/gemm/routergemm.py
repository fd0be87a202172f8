"""The path by which callers of upstream reach products of few rows, which are among the names of `flashinfer.gemm`."""

from flashinfer.compat.paths import names_of

__getattr__ = names_of("flashinfer.gemm", __name__)
