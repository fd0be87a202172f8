from math import ceil, log2

from flashinfer._core.sizes import power_of_two


def test_powers_of_two():
    assert [power_of_two(n) for n in (-3, 0, 1, 2, 3, 4, 5)] == [1, 1, 1, 2, 4, 4, 8]
    assert all(power_of_two(n) == 2 ** ceil(log2(n)) for n in range(1, 5000))
    assert [power_of_two(n, 16) for n in (0, 1, 16, 17, 100)] == [16, 16, 16, 32, 128]
