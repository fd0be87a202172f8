"""Normalisation layers: RMSNorm and LayerNorm over the last dimension, with gates, rotation and quantised results."""

from .dit import (
    fused_dit_gate_residual_layernorm_gamma_beta,
    fused_dit_gate_residual_layernorm_scale_shift,
    fused_dit_residual_layernorm_scale_shift,
)
from .gated import (
    gated_residual_next_rmsnorm,
    gated_residual_rmsnorm,
    rmsnorm_sigmoid_gate,
    supports_gated_residual_next_rmsnorm,
    supports_gated_residual_rmsnorm,
    supports_rmsnorm_sigmoid_gate,
)
from .plain import fused_add_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm, layernorm, qk_rmsnorm_cute, rmsnorm
from .fp4 import add_rmsnorm_fp4quant, rmsnorm_fp4quant
from .fp8 import (
    fused_add_rmsnorm_fp8_block_quant,
    fused_add_rmsnorm_quant,
    fused_rmsnorm_silu,
    layernorm_quant,
    rmsnorm_quant,
)
from .video import fused_qk_rmsnorm_rope
from flashinfer.trace.templates import describe

__all__ = [
    "add_rmsnorm_fp4quant",
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_fp8_block_quant",
    "fused_add_rmsnorm_quant",
    "fused_dit_gate_residual_layernorm_gamma_beta",
    "fused_dit_gate_residual_layernorm_scale_shift",
    "fused_dit_residual_layernorm_scale_shift",
    "fused_qk_rmsnorm_rope",
    "fused_rmsnorm_silu",
    "gated_residual_next_rmsnorm",
    "gated_residual_rmsnorm",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "layernorm",
    "layernorm_quant",
    "qk_rmsnorm_cute",
    "rmsnorm",
    "rmsnorm_fp4quant",
    "rmsnorm_quant",
    "rmsnorm_sigmoid_gate",
    "supports_gated_residual_next_rmsnorm",
    "supports_gated_residual_rmsnorm",
    "supports_rmsnorm_sigmoid_gate",
]

describe(__name__, globals())
