"""State-space layers of Mamba2: prefill by chunks; decode and verification, on states or on checkpoints of them."""

from flashinfer.mamba.checkpointing_ssu import allocate_checkpointing_ssu_scratch, checkpointing_ssu
from flashinfer.mamba.replayssm_materialize import replayssm_materialize
from flashinfer.mamba.selective_state_update import selective_state_update
from flashinfer.mamba.ssd_combined import SSDCombined, ssd_combined_fwd

__all__ = [
    "SSDCombined",
    "allocate_checkpointing_ssu_scratch",
    "checkpointing_ssu",
    "replayssm_materialize",
    "selective_state_update",
    "ssd_combined_fwd",
]
