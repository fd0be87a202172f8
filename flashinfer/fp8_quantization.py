"""FP8 quantisation under upstream's older module name; `flashinfer.quantization` is the home of these functions."""

from flashinfer.quantization.fp8_quantization import (
    mxfp8_dequantize_host,
    mxfp8_grouped_quantize,
    mxfp8_quantize,
    per_token_group_quant_8bit,
)

__all__ = ["mxfp8_dequantize_host", "mxfp8_grouped_quantize", "mxfp8_quantize", "per_token_group_quant_8bit"]
