"""Numbers of tokens for which callers prepare mixtures of experts."""

from __future__ import annotations

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require

__all__ = ["get_hybrid_num_tokens_buckets"]

# Up to the bound: the step, or 0 for doubling.
_PHASES = ((256, 0), (2048, 256), (4096, 512))


@checked
def get_hybrid_num_tokens_buckets(max_num_tokens: int, min_num_tokens: int = 1) -> tuple[int, ...]:
    """Numbers of tokens that are dense where the tiles of experts change.

    Parameters
    ----------
    max_num_tokens : int
        The last bucket.
    min_num_tokens : int
        The first bucket, from which on they double up to 256.

    Returns
    -------
    tuple of int
        Ascending: doubling up to 256, then every 256 up to 2048, every 512 up to 4096, doubling again from there.

    Raises
    ------
    ValueError
        Less than one token, or a maximum below the minimum.
    """
    require(min_num_tokens >= 1, "min_num_tokens", min_num_tokens, "1 or more")
    require(max_num_tokens >= min_num_tokens, "max_num_tokens", max_num_tokens, f"{min_num_tokens} or more")
    buckets, tokens = [], min_num_tokens
    while tokens < max_num_tokens:
        buckets.append(tokens)
        step = next((step for bound, step in _PHASES if tokens < bound), 0)
        tokens = (tokens // step + 1) * step if step else 2 * tokens
    return (*buckets, max_num_tokens)
