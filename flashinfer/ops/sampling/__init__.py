"""Drawing tokens from rows of probabilities or logits, and the filters of such rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer._core.dispatch import Op, portable_only
from flashinfer.ops.sampling import config

# Where a seed or an offset is: an int, a tensor of one element, or a tensor with one for each row.
SCALAR, SHARED, PER_ROW = 0, 1, 2


@dataclass(frozen=True)
class Softmax:
    """Logits to float32 probabilities.

    Attributes
    ----------
    dtype : str
        Of the logits.
    temperature : str
        Dtype of the tensor that has one for each row, "scalar", or "".
    aligned : bool
        Rows can be read and written 16 bytes at a time.
    """

    dtype: str
    temperature: str = ""
    aligned: bool = True


@dataclass(frozen=True)
class Draw:
    """A token from each row, of all columns or of those that reach a share of the row's largest.

    Attributes
    ----------
    source, dtype : str
        "probs" or "logits", and their dtype.
    min_p : str
        Dtype of the tensor that has a share for each row, "scalar", or "" for all columns.
    seed, offset : int
        SCALAR, SHARED or PER_ROW.
    indices : str
        Dtype of the tensor that maps rows of the output to rows of the input, or "".
    out : str
        Dtype of the tokens, "i32" or "i64".
    aligned : bool
        Rows can be read 16 bytes at a time.
    """

    source: str
    dtype: str
    min_p: str = ""
    seed: int = SCALAR
    offset: int = SCALAR
    indices: str = ""
    out: str = "i32"
    aligned: bool = True


@dataclass(frozen=True)
class Prefix:
    """The columns that top-k, top-p or both keep: the fewest largest values that are k, or sum to p, and all that equal
    the least of them.

    Attributes
    ----------
    use : str
        "draw" a token from them, "renorm": divide them by their sum and zero the others, or "mask": the others to -inf.
    source, dtype, seed, offset, indices, out, aligned
        As those of Draw; "scores" is a source without distribution.
    top_k, top_p : str
        Dtype of the filter's tensor with an element for each row, "scalar", or "" where it is not applied.
    top_k_first : bool
        p is a share of the k first, not of the whole.
    """

    use: str
    source: str
    dtype: str
    top_k: str = ""
    top_p: str = ""
    top_k_first: bool = False
    seed: int = SCALAR
    offset: int = SCALAR
    indices: str = ""
    out: str = "i32"
    aligned: bool = True


@dataclass(frozen=True)
class Chain:
    """Speculative sampling: accept draft tokens up to the first that the target refuses, and draw one more.

    Attributes
    ----------
    dtype : str
        Of both distributions.
    ids : str
        Dtype of the tokens, "i32" or "i64".
    seed, offset : int
        SCALAR, SHARED or PER_ROW.
    aligned : bool
        Rows can be read 16 bytes at a time.
    """

    dtype: str
    ids: str = "i32"
    seed: int = SCALAR
    offset: int = SCALAR
    aligned: bool = True


def _softmaxes() -> Iterator[Softmax]:
    yield Softmax("fp32")
    yield Softmax("bf16", "fp32")
    yield Softmax("fp16", "scalar", aligned=False)


def _draws() -> Iterator[Draw]:
    yield Draw("probs", "fp32", seed=SHARED, offset=SHARED)
    yield Draw("logits", "bf16", seed=PER_ROW, offset=PER_ROW, indices="i32")
    yield Draw("probs", "fp32", "fp32", indices="i64", out="i64")
    yield Draw("probs", "fp16", "scalar", aligned=False)


def _prefixes() -> Iterator[Prefix]:
    yield Prefix("draw", "probs", "fp32", "i32", "fp32", True, SHARED, SHARED)
    yield Prefix("draw", "logits", "bf16", "scalar", "scalar", False, PER_ROW, PER_ROW, "i32", "i64")
    yield Prefix("renorm", "probs", "fp32", "", "fp32")
    yield Prefix("mask", "scores", "fp16", "i64", aligned=False)
    yield Prefix("draw", "probs", "fp32", "i32", indices="i64")


def _chains() -> Iterator[Chain]:
    yield Chain("fp32", seed=SHARED, offset=SHARED)
    yield Chain("bf16", "i64", SCALAR, PER_ROW, aligned=False)


softmax = Op("softmax", Softmax, portable_only(__name__, config.portable), _softmaxes)
draw = Op("sampling", Draw, portable_only(__name__, config.portable), _draws)
prefix = Op("prefix_sampling", Prefix, portable_only(__name__, config.portable), _prefixes)
chain = Op("chain_speculative_sampling", Chain, portable_only(__name__, config.portable, "speculative"), _chains)
