"""Sizes of tiles and blocks."""


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is no less than n and no less than `least`, which is one itself."""
    return max(least, 1 << max(n - 1, 0).bit_length())
