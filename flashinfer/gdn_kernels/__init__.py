"""The gated delta rule by the names that upstream gives its kernels."""

from flashinfer.gdn_kernels.gdn_decode_bf16_state import gated_delta_rule_bf16state_cooprow_mtp, gated_delta_rule_mtp
from flashinfer.gdn_kernels.gdn_fused_decode import gdn_fused_decode_step, gdn_fused_decode_step_supported

__all__ = [
    "gated_delta_rule_bf16state_cooprow_mtp",
    "gated_delta_rule_mtp",
    "gdn_fused_decode_step",
    "gdn_fused_decode_step_supported",
]
