"""What flows through a pipeline: tensors that know whether they hold logits, probabilities or tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch


class TensorType(Enum):
    """What a tensor means.

    LOGITS: scores, raw or masked. PROBS: probabilities, perhaps not normalised. INDICES: tokens, the end of a pipeline.
    """

    LOGITS = auto()
    PROBS = auto()
    INDICES = auto()

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"TensorType.{self.name}"


@dataclass(frozen=True, eq=False)
class TaggedTensor:
    """A tensor and what it means. Functions of torch take it for the tensor and give a tensor."""

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

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict | None = None) -> Any:
        return func(*(x.data if isinstance(x, TaggedTensor) else x for x in args), **(kwargs or {}))
