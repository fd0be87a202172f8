"""MXFP4 as upstream's kernel in CuTe DSL is called."""

from flashinfer.quantization.cute_dsl import mxfp4_quantize_cute_dsl

__all__ = ["mxfp4_quantize_cute_dsl"]
