"""Paths by which callers of upstream reach its kernels; the functions are in `flashinfer.quantization.cute_dsl`."""
