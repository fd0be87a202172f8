"""Merging attention states: outputs and log-sum-exps over parts of the keys become those over all of them.

A state is (v, s): v the attention output over some keys, s the base-2 log-sum-exp of their scaled logits. They merge as

    s = log2(sum_i 2^s_i),   v = sum_i 2^(s_i - s) v_i

(Ye et al., FlashInfer, arXiv:2501.01005, section 2.2; the online softmax of Milakov and Gimelshein, arXiv:1805.02867).
A state with s = -inf saw no key: it is the identity, and its v is never read into the result, NaN or not.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.dispatch import Op, Variant
from flashinfer._core.sizes import power_of_two

from . import config

DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class PairProblem:
    """Merge two states held in tensors of their own, into a third pair of tensors or into the first.

    Attributes
    ----------
    dtype : str
        Of v_a, v_b and out; s is float32.
    head_dim : int
    masked : bool
        Tokens whose mask is false keep what out and lse hold.
    aligned : bool
        Rows can be read 16 bytes at a time.
    """

    dtype: str
    head_dim: int
    masked: bool
    aligned: bool


@dataclass(frozen=True)
class StackProblem:
    """Merge the states that lie along one dimension of one tensor: as many for each token, or a run of them.

    Attributes
    ----------
    dtype : str
        Of v and out; s is float32.
    head_dim : int
    states : int
        Most states that one step reads: a power of two from 2 to 16, as `states_class` gives it. Any count runs.
    aligned : bool
        Rows can be read 16 bytes at a time.
    ragged : bool
        Offsets say which states are a token's.
    """

    dtype: str
    head_dim: int
    states: int
    aligned: bool
    ragged: bool = False


def states_class(num_states: int) -> int:
    """The StackProblem.states that a stack of num_states states belongs to."""
    return min(power_of_two(num_states, 2), 16)


def _refuses(problem, target) -> str:
    if problem.dtype not in DTYPES:
        return f"dtype {problem.dtype} is not one of {', '.join(DTYPES)}"
    return ""


def _pair_catalog():
    for dtype in DTYPES:
        for head_dim in (64, 128, 192, 256, 512):
            for masked in (False, True):
                yield PairProblem(dtype, head_dim, masked, aligned=True)
    yield PairProblem("bf16", 72, masked=True, aligned=False)
    yield PairProblem("fp32", 576, masked=False, aligned=False)


def _stack_catalog():
    for dtype in DTYPES:
        for head_dim in (64, 128, 192, 256, 512):
            for states in (2, 4, 8, 16):
                yield StackProblem(dtype, head_dim, states, aligned=True)
    yield StackProblem("bf16", 128, 4, aligned=True, ragged=True)
    yield StackProblem("bf16", 72, 16, aligned=False)
    yield StackProblem("fp32", 576, 2, aligned=False)


def _variants(choose):
    return (
        Variant("portable", f"{__name__}.portable", _refuses, choose),
        Variant("reference", f"{__name__}.reference", _refuses),
    )


merge_pair = Op("merge_pair", PairProblem, _variants(config.pair), _pair_catalog)
merge_stack = Op("merge_stack", StackProblem, _variants(config.stack), _stack_catalog)
