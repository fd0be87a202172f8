"""NVFP4 as upstream's kernel in CuTe DSL is called."""

from flashinfer.quantization.cute_dsl import nvfp4_quantize_cute_dsl, nvfp4_quantize_per_token_cute_dsl

__all__ = ["nvfp4_quantize_cute_dsl", "nvfp4_quantize_per_token_cute_dsl"]
