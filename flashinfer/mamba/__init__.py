"""State-space layers of Mamba2: the recurrence of decode and verification, on states or on checkpoints of them."""

from flashinfer.mamba.checkpointing_ssu import allocate_checkpointing_ssu_scratch, checkpointing_ssu
from flashinfer.mamba.replayssm_materialize import replayssm_materialize
from flashinfer.mamba.selective_state_update import selective_state_update

__all__ = [
    "allocate_checkpointing_ssu_scratch",
    "checkpointing_ssu",
    "replayssm_materialize",
    "selective_state_update",
]
