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
    """A tensor and what it means. Functions of torch take it for the tensor and give a tensor.

    Attributes
    ----------
    data : torch.Tensor
        Kept by reference.
    type : TensorType
        What it holds.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.logits_processor import TaggedTensor
    >>> TaggedTensor.probs(torch.ones(1, 1)).type.name
    'PROBS'
    """

    data: torch.Tensor
    type: TensorType

    @classmethod
    def logits(cls, t: torch.Tensor) -> TaggedTensor:
        """A tensor of logits.

        Parameters
        ----------
        t : torch.Tensor
            [batch, vocabulary]; kept by reference.

        Returns
        -------
        TaggedTensor
        """
        return cls(t, TensorType.LOGITS)

    @classmethod
    def probs(cls, t: torch.Tensor) -> TaggedTensor:
        """A tensor of probabilities.

        Parameters
        ----------
        t : torch.Tensor
            [batch, vocabulary]; kept by reference.

        Returns
        -------
        TaggedTensor
        """
        return cls(t, TensorType.PROBS)

    @classmethod
    def indices(cls, t: torch.Tensor) -> TaggedTensor:
        """A tensor of tokens.

        Parameters
        ----------
        t : torch.Tensor
            [batch]; kept by reference.

        Returns
        -------
        TaggedTensor
        """
        return cls(t, TensorType.INDICES)

    @property
    def device(self) -> torch.device:
        """The device of `data`."""
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `data`."""
        return self.data.dtype

    @property
    def shape(self) -> torch.Size:
        """The shape of `data`."""
        return self.data.shape

    def size(self, dim: int | None = None):
        """The shape of `data`, or one of its sizes, as `torch.Tensor.size`.

        Parameters
        ----------
        dim : int, optional
            None: all.

        Returns
        -------
        torch.Size or int

        Raises
        ------
        IndexError
            There is no such dimension.
        """
        return self.data.size() if dim is None else self.data.size(dim)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict | None = None) -> Any:
        return func(*(x.data if isinstance(x, TaggedTensor) else x for x in args), **(kwargs or {}))
