"""Random numbers that depend on a seed, an offset and a column alone: Philox 4x32-10 (Salmon et al., SC 2011).

One call of Philox serves four neighbouring columns. Its key is the seed; its counter is (column // 4, stream, offset),
with `stream` the row where rows share one seed, and 0 where each has its own: such a row draws the same in any batch.
"""

import triton
import triton.language as tl

# How a seed or an offset is passed: as a scalar, as a tensor of one element, or as a tensor with an element for each
# row.
SCALAR = tl.constexpr(0)
SHARED = tl.constexpr(1)
PER_ROW = tl.constexpr(2)


@triton.jit
def source_of(random, row, SEED: tl.constexpr, OFFSET: tl.constexpr):
    """The seed, the offset (both 64 bits) and the stream (32 bits) of a row.

    random : scalars seed and offset, or pointers seeds and offsets in their place.
    """
    if SEED == SCALAR:
        seed = random.seed
    else:
        seed = tl.load(random.seeds + (row if SEED == PER_ROW else 0))
    if OFFSET == SCALAR:
        offset = random.offset
    else:
        offset = tl.load(random.offsets + (row if OFFSET == PER_ROW else 0))
    stream = row if SEED != PER_ROW else row * 0
    return seed.to(tl.int64), offset.to(tl.int64), stream.to(tl.uint32)


@triton.jit
def words(seed, offset, stream, group):
    """Four words of 32 random bits, for the columns 4 * group ... 4 * group + 3."""
    group = group.to(tl.uint32)
    zero = group * 0
    low = zero + (offset & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, group, zero + stream, low, high)


@triton.jit
def extra_uniforms(seed, offset, stream, number):
    """Uniform variates that no column uses: their counters are above those of all columns."""
    a, b, c, d = words(seed, offset, stream, number + (1 << 30))
    return uniform(a)


@triton.jit
def uniform(word):
    """Random bits as a uniform float32 above 0 and below 1. Values near 0 are spaced by 2^-32, the first is 2^-33."""
    u = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    return tl.minimum(u, 0.99999994)


@triton.jit
def exponential(word):
    """Random bits as an exponential variate, -log(1 - u).

    The smallest variates decide an exponential race over many columns. Where 1 - u would lose their bits, a series is
    used, with a relative error below 1e-8.
    """
    u = uniform(word)
    series = u * (1 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * (0.2 + u * 0.16666667)))))
    return tl.where(u < 0.0625, series, -tl.log(1 - u))


@triton.jit
def exponentials(seed, offset, stream, first_column, TILE: tl.constexpr):
    """Exponential variates of TILE columns from first_column on; both are multiples of 4."""
    group = first_column // 4 + tl.arange(0, TILE // 4)
    a, b, c, d = words(seed, offset, stream, group)
    word = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [TILE])
    return exponential(word)


@triton.jit
def exponentials_at(seed, offset, stream, column):
    """Exponential variates of any columns; the same as `exponentials` gives."""
    a, b, c, d = words(seed, offset, stream, column // 4)
    place = column % 4
    word = tl.where(place < 2, tl.where(place == 0, a, b), tl.where(place == 2, c, d))
    return exponential(word)
