"""State-space layers of Mamba2: the recurrence of decode and verification."""

from flashinfer.mamba.selective_state_update import selective_state_update

__all__ = ["selective_state_update"]
