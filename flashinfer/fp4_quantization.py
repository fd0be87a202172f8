"""FP4 quantisation under upstream's older module name; `flashinfer.quantization` is the home of these functions."""

from flashinfer.quantization import fp4_quantization
from flashinfer.quantization.fp4_quantization import *
from flashinfer.quantization.gated import silu_and_mul_nvfp4_quantize
from flashinfer.tllm_enums import SfLayout

__all__ = ["SfLayout", "silu_and_mul_nvfp4_quantize"]
__all__ += fp4_quantization.__all__
