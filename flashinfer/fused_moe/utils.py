"""Numbers of tokens that callers tune mixtures of experts for."""

from __future__ import annotations

from flashinfer._core.checks import require

__all__ = ["get_hybrid_num_tokens_buckets"]


def get_hybrid_num_tokens_buckets(max_num_tokens: int, min_num_tokens: int = 1) -> tuple[int, ...]:
    """Numbers of tokens between two bounds: powers of two up to 256 and from 4096 on; between them steps of 256 up to
    2048, and of 512 beyond.

    Parameters
    ----------
    max_num_tokens, min_num_tokens : int
        The bounds. The upper one is always among the numbers.

    Returns
    -------
    tuple of int
        In ascending order.

    Raises
    ------
    ValueError
        Bounds below 1 or in the wrong order.
    """
    require(1 <= min_num_tokens, "min_num_tokens", min_num_tokens, "1 or more")
    require(min_num_tokens <= max_num_tokens, "max_num_tokens", max_num_tokens, f"{min_num_tokens} or more")
    powers = [1 << i for i in range(max_num_tokens.bit_length())]
    numbers = {n for n in powers if n <= 256 or n >= 4096}
    numbers.update(range(512, 2048, 256), range(2048, 4096, 512), [max_num_tokens])
    return tuple(sorted(n for n in numbers if min_num_tokens <= n <= max_num_tokens))
