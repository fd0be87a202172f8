"""Routing by token id: a table names each token's experts, and router logits weigh them (DeepSeek-V4's first layers).

weight_i = s_i / sum_j s_j with s = sqrt(softplus(logit)) of the experts that the table names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer._core.dispatch import Op, portable_only
from flashinfer.ops.moe.hash_routing import config


@dataclass(frozen=True)
class Problem:
    """ids and weights [tokens, top_k + shared] of logits [tokens, experts], token ids and a table [vocabulary, top_k].

    Attributes
    ----------
    dtype : str
        Of the logits.
    token, expert : str
        Types of the token ids, and of the table.
    slots : int
        Experts of a token, shared ones included, rounded up to a power of two.
    """

    dtype: str
    token: str
    expert: str
    slots: int


def _catalog() -> Iterator[Problem]:
    yield Problem("fp32", "i64", "i32", 8)
    yield Problem("bf16", "i32", "i64", 16)


hash_route = Op("moe_hash_route", Problem, portable_only(__name__, config.portable), _catalog)
