"""The workspace that a caller gives to a wrapper, and may replace."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require


class CallerWorkspace:
    """A class with a workspace of its caller's, on its `device`."""

    device: torch.device

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replace the workspace buffers.

        Both are kept by reference. Partial results go into the new one from the next plan() on; in CUDA-graph mode,
        what the first plan has taken stays in use, and a captured graph keeps the old one.

        Parameters
        ----------
        float_workspace_buffer : uint8 Tensor
            On the wrapper's device, of any size.
        int_workspace_buffer : Tensor
            Not used: work lists belong to their plan.

        Raises
        ------
        ValueError
            float_workspace_buffer is not a tensor, or is on another device.
        """
        self._use_workspace(float_workspace_buffer, int_workspace_buffer)

    def _use_workspace(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        device = device_of(float_workspace_buffer)
        require(device == self.device, "float_workspace_buffer", f"a tensor on {device}", str(self.device))
        self._float_workspace_buffer, self._int_workspace_buffer = float_workspace_buffer, int_workspace_buffer

    def end_forward(self) -> None:
        """Do nothing; kept for callers of older versions. There is nothing to release."""


def device_of(float_workspace_buffer: torch.Tensor) -> torch.device:
    """The device of a wrapper: its workspace's."""
    allowed, value = "a uint8 tensor on the compute device, of any size", float_workspace_buffer
    shown = None if value is None else f"a {type(value).__name__}"
    require(isinstance(value, torch.Tensor), "float_workspace_buffer", shown, allowed)
    require(value.device.type in ("cpu", "cuda"), "float_workspace_buffer", f"a tensor on {value.device}", allowed)
    return float_workspace_buffer.device
