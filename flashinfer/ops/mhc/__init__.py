"""Manifold-constrained hyper-connections: a residual of four streams, mixed before and after a layer.

Before a layer, 24 logits of a token give three mixes: pre [4], what the layer reads of each stream; post [4], what each
stream takes of the layer's output; comb [4, 4], how the streams mix with each other. After the layer the streams are
renewed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer._core.dispatch import Op, portable_only
from flashinfer.ops.mhc import config

STREAMS = 4
LOGITS = STREAMS * (2 + STREAMS)


@dataclass(frozen=True)
class Pre:
    """Mixes from logits, and the layer's input, sum_i pre_i residual_i.

    With r = 1 / sqrt(sqrsum / k + rms_eps) and the logits l = dot_mix * r * scale + base, scale[0] of the first 4,
    scale[1] of the next 4 and scale[2] of the last 16::

        pre = sigmoid(l[0:4]) + pre_eps
        post = mult * sigmoid(l[4:8])
        comb = softmax of each row of l[8:24] as [4, 4], + sinkhorn_eps; then columns over their sum + sinkhorn_eps;
            then, repeat - 1 times, rows over their sum + sinkhorn_eps, and columns

    Attributes
    ----------
    dtype : str
        Of the residual and of the layer's input.
    splits : int
        Parts of dot_mix and sqrsum that are summed first.
    prenorm : bool
        sqrsum is computed from the residual, and k is its number of elements.
    aligned : bool
        Rows can be read and written 16 bytes at a time.
    """

    dtype: str
    splits: int = 1
    prenorm: bool = False
    aligned: bool = True


@dataclass(frozen=True)
class Post:
    """out_j = x post_j + sum_i residual_i comb[i, j].

    Attributes
    ----------
    dtype : str
        Of x, residual and out.
    mix_dtype : str
        Of post and comb.
    aligned : bool
        Rows can be read and written 16 bytes at a time.
    """

    dtype: str
    mix_dtype: str = "fp32"
    aligned: bool = True


def _pre() -> Iterator[Pre]:
    yield Pre("bf16")
    yield Pre("bf16", splits=16)
    yield Pre("bf16", prenorm=True)
    yield Pre("fp16", aligned=False)


def _post() -> Iterator[Post]:
    yield Post("bf16")
    yield Post("fp32", "bf16", aligned=False)


pre = Op("mhc_pre", Pre, portable_only(__name__, config.pre), _pre)
post = Op("mhc_post", Post, portable_only(__name__, config.post), _post)
