"""Tests whether tensors equal others in everything but memory, with one call into torch instead of a dozen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._C._dynamo.guards import TensorGuards


def like(*examples: torch.Tensor, free: Sequence[int] = ()) -> Callable[..., bool]:
    """A function that tells whether its arguments are tensors of the class, dtype, device, shape and strides of the
    examples.

    It may return False for such tensors, if requires_grad or torch's mode at their creation differ. Arguments have to
    be the same tensor exactly where the examples are.

    Parameters
    ----------
    *examples : Tensor
    free : sequence of int
        Indices of examples whose first axis may have any length.
    """
    firsts = [next(i for i, y in enumerate(examples) if y is x) for x in examples]
    different = [i for i, first in enumerate(firsts) if i == first]
    shapes = [[None if i in free and not axis else n for axis, n in enumerate(examples[i].shape)] for i in different]
    strides = [list(examples[i].stride()) for i in different]
    check = TensorGuards(
        *[examples[i] for i in different], dynamic_dims_sizes=shapes, dynamic_dims_strides=strides
    ).check  # fmt: skip
    if len(different) == len(examples):
        return check
    twice = [(i, first) for i, first in enumerate(firsts) if i != first]
    return lambda *given: all([given[i] is given[j] for i, j in twice]) and check(*[given[i] for i in different])
