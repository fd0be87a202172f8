"""Copies of classes that are made of wrappers."""

from copy import copy

import torch

from flashinfer.ops.attention.wrapper import AttentionWrapper


class MadeOfWrappers:
    """A class whose attributes are wrappers, or lists of them: a copy has copies of those."""

    def __copy__(self):
        new = object.__new__(type(self))
        new.__dict__.update({name: _copied(value) for name, value in self.__dict__.items()})
        return new


class OneWorkspace(MadeOfWrappers):
    """A class made of wrappers, one of which has the workspace: that of the attribute `_workspace_of`."""

    _workspace_of: str

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replace the workspace buffers.

        The wrapper keeps both by reference. Partial results go into the new one from the next plan on; a captured graph
        keeps the old one.

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
        getattr(self, self._workspace_of).reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def end_forward(self) -> None:
        """Do nothing; kept for callers of older versions. There is nothing to release."""


def _copied(value):
    if isinstance(value, list):
        return [_copied(x) for x in value]
    return copy(value) if isinstance(value, AttentionWrapper) else value
