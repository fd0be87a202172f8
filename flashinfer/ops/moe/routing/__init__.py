"""Routing: each token's experts with their weights, and the map that groups the tokens by expert.

`route` chooses experts; `token_map` turns the choices into a `flashinfer.ops.moe.token_map.TokenMap`. A token's choices
are in the order of their scores: best first, of equal scores the lower index first, NaN before all numbers. The experts
of one token differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer._core.dispatch import Op, portable_only
from flashinfer.ops.moe.routing import config


@dataclass(frozen=True)
class Route:
    """How experts are chosen and weighted.

    Attributes
    ----------
    dtype : str
        Of the logits.
    rank : str
        The score by which experts are chosen: "logit", or "sigmoid" of the logit plus a bias.
    weight : str
        The weight of a chosen expert, before the scaling factor: its "logit"; its "sigmoid"; "sigmoid_sum", the sigmoid
        over the sum of the chosen experts' sigmoids (plus 1e-20); "softmax" over all experts; or "softmax_kept", over
        the chosen experts. The bias is not part of the weight.
    bias : str
        Dtype of the bias, or "".
    groups, size : int
        Groups of experts, and experts of a group, both rounded up to a power of two. With several groups experts are
        chosen from the best groups only, by the sum of each group's two best scores.
    slots : int
        Choices of a token, shared experts included, rounded up to a power of two.
    ids, weights : str
        Dtypes of the result.
    replay : bool
        The ids are also written as int16.
    """

    dtype: str
    rank: str
    weight: str
    bias: str = ""
    groups: int = 1
    size: int = 8
    slots: int = 1
    ids: str = "i32"
    weights: str = "fp32"
    replay: bool = False


@dataclass(frozen=True)
class Map:
    """Grouping pairs by expert.

    Attributes
    ----------
    ids : str
        "i32", "i64", or "packed": int32 with the expert in the upper half and its weight, as bfloat16, in the lower.
        Of packed ids the weights are written apart, in float32; those of pairs without a row are not.
    experts : int
        Experts of this rank, rounded up to a power of two.
    few : bool
        There are at most config.FEW pairs.
    """

    ids: str
    experts: int
    few: bool


def _routes() -> Iterator[Route]:
    yield Route("fp32", "sigmoid", "sigmoid_sum", "fp32", groups=8, size=32, slots=8)
    yield Route("bf16", "logit", "softmax_kept", size=128, slots=8)
    yield Route("fp32", "logit", "softmax", size=512, slots=16, replay=True)
    yield Route("bf16", "sigmoid", "sigmoid_sum", "bf16", size=256, slots=8, ids="i64", weights="bf16")


def _maps() -> Iterator[Map]:
    yield Map("i32", 8, few=True)
    yield Map("packed", 256, few=True)
    yield Map("i32", 512, few=False)


route = Op("moe_route", Route, portable_only(__name__, config.route), _routes)
token_map = Op("moe_token_map", Map, portable_only(__name__, config.token_map, "portable_map", "reference_map"), _maps)
