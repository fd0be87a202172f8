"""The gated delta rule by the names that upstream gives its kernels."""

from flashinfer.gdn_kernels.gdn_decode_bf16_state import gated_delta_rule_bf16state_cooprow_mtp, gated_delta_rule_mtp

__all__ = ["gated_delta_rule_bf16state_cooprow_mtp", "gated_delta_rule_mtp"]
