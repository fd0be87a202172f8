"""MXFP8 as upstream's kernel in CuTe DSL is called."""

from flashinfer.quantization.cute_dsl import mxfp8_quantize_cute_dsl

__all__ = ["mxfp8_quantize_cute_dsl"]
