"""Whether tensors are like others in all but memory: one call into torch, where their attributes take a dozen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._C._dynamo.guards import TensorGuards


def like(*examples: torch.Tensor, free: Sequence[int] = ()) -> Callable[..., bool]:
    """A function of as many objects: whether they are tensors of the class, dtype, device, shape and strides of these.

    It may say no to tensors that are: with another requires_grad, or made in another mode of torch. Where two examples
    are one tensor, so are those that are like them, and where they are two, those are.

    Parameters
    ----------
    *examples : Tensor
    free : sequence of int
        Which of them stand for any length of their first axis.
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
