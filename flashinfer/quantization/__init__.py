"""Quantisation: NVFP4, MXFP4 and MXFP8 of activations, weights and KV caches, and packing of masks."""

from flashinfer.quantization.cute_dsl import (
    mxfp4_quantize_cute_dsl,
    mxfp8_quantize_cute_dsl,
    nvfp4_quantize_cute_dsl,
    nvfp4_quantize_per_token_cute_dsl,
)
from flashinfer.quantization.fp4_quantization import (
    block_scale_interleave,
    e2m1_and_ufp8sf_scale_to_float,
    fp4_quantize,
    mxfp4_dequantize,
    mxfp4_dequantize_host,
    mxfp4_quantize,
    nvfp4_batched_quantize,
    nvfp4_block_scale_interleave,
    nvfp4_kv_dequantize,
    nvfp4_kv_dequantize_paged,
    nvfp4_kv_quantize,
    nvfp4_quantize,
    nvfp4_quantize_paged_kv_cache,
    scaled_fp4_grouped_quantize,
    shuffle_matrix_a,
    shuffle_matrix_sf_a,
)
from flashinfer.quantization.fp8_quantization import (
    mxfp8_dequantize_host,
    mxfp8_grouped_quantize,
    mxfp8_quantize,
    per_token_group_quant_8bit,
)
from flashinfer.quantization.gated import silu_and_mul_nvfp4_quantize
from flashinfer.quantization.kv_cache import kv_dequantize_paged
from flashinfer.quantization.nvfp4_quantization_utils import (
    NVFP44Over6Config,
    NVFP44Over6ErrMode,
    make_nvfp4_global_scale,
    nvfp4_4over6_code,
    nvfp4_4over6_from_code,
    nvfp4_e4m3_max,
    resolve_nvfp4_4over6,
)
from flashinfer.quantization.packbits import packbits, segment_packbits
from flashinfer.tllm_enums import SfLayout

__all__ = [
    "NVFP44Over6Config",
    "NVFP44Over6ErrMode",
    "SfLayout",
    "block_scale_interleave",
    "e2m1_and_ufp8sf_scale_to_float",
    "fp4_quantize",
    "kv_dequantize_paged",
    "make_nvfp4_global_scale",
    "mxfp4_dequantize",
    "mxfp4_dequantize_host",
    "mxfp4_quantize",
    "mxfp4_quantize_cute_dsl",
    "mxfp8_dequantize_host",
    "mxfp8_grouped_quantize",
    "mxfp8_quantize",
    "mxfp8_quantize_cute_dsl",
    "nvfp4_4over6_code",
    "nvfp4_4over6_from_code",
    "nvfp4_batched_quantize",
    "nvfp4_block_scale_interleave",
    "nvfp4_e4m3_max",
    "nvfp4_kv_dequantize",
    "nvfp4_kv_dequantize_paged",
    "nvfp4_kv_quantize",
    "nvfp4_quantize",
    "nvfp4_quantize_cute_dsl",
    "nvfp4_quantize_per_token_cute_dsl",
    "nvfp4_quantize_paged_kv_cache",
    "packbits",
    "per_token_group_quant_8bit",
    "resolve_nvfp4_4over6",
    "scaled_fp4_grouped_quantize",
    "segment_packbits",
    "shuffle_matrix_a",
    "shuffle_matrix_sf_a",
    "silu_and_mul_nvfp4_quantize",
]
