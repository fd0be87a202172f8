"""What flows through a pipeline: tensors that know whether they hold logits, probabilities or tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class TensorType(Enum):
    """What a tensor means.

    LOGITS: scores, raw or masked. PROBS: probabilities, perhaps not normalised. INDICES: tokens, the end of a pipeline.
    """

    LOGITS = "logits"
    PROBS = "probs"
    INDICES = "indices"


@dataclass(frozen=True, eq=False)
class TaggedTensor:
    """A tensor and what it means."""

    data: torch.Tensor
    type: TensorType

    @classmethod
    def logits(cls, t: torch.Tensor) -> TaggedTensor:
        return cls(t, TensorType.LOGITS)

    @classmethod
    def probs(cls, t: torch.Tensor) -> TaggedTensor:
        return cls(t, TensorType.PROBS)

    @classmethod
    def indices(cls, t: torch.Tensor) -> TaggedTensor:
        return cls(t, TensorType.INDICES)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def size(self, dim: int | None = None):
        return self.data.size() if dim is None else self.data.size(dim)
