"""Copies of classes that are made of wrappers."""

from copy import copy

import torch

from flashinfer.ops.attention.caller_workspace import CallerWorkspace
from flashinfer.ops.attention.wrapper import AttentionWrapper


class MadeOfWrappers:
    """A class whose attributes are wrappers, or lists of them: a copy has copies of those."""

    def __copy__(self):
        new = object.__new__(type(self))
        new.__dict__.update({name: _copied(value) for name, value in self.__dict__.items()})
        return new


class OneWorkspace(CallerWorkspace, MadeOfWrappers):
    """A class made of wrappers, one of which has the workspace: that of the attribute `_workspace_of`."""

    _workspace_of: str

    def _use_workspace(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        getattr(self, self._workspace_of).reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)


def _copied(value):
    if isinstance(value, list):
        return [_copied(x) for x in value]
    return copy(value) if isinstance(value, AttentionWrapper) else value
