"""Hopper prefill: exponentials, some of them on the units of multiply-adds.

At head_dim 64 a block's exponentials take the special-function unit as long as its products take the tensor cores. So a
share of them is a polynomial, as in FlashAttention-4 on Blackwell.
"""

from flashinfer._core.gluon_compat import gl, gluon


@gluon.constexpr_function
def assembly(pack):
    """2^x of `pack` numbers, $pack to $(2 pack - 1), of which the last by a polynomial; to $0 to $(pack - 1).

    x is n + f, n the nearest integer, which 1.5 * 2^23 + x has in its low bits. 2^f is a polynomial of degree 5 with an
    error of 2.1e-7, as ex2's: sums of weights keep their digits for the LSE. n is added to its exponent. x is kept in
    -126 to 127: more is a failure of the fixed shift with 2^127, too. NaN becomes NaN or 2^127 and more.
    """
    last = pack - 1
    lines = [f"ex2.approx.ftz.f32 ${i}, ${i + pack};" for i in range(last)]
    return "\n".join((
        "{", ".reg .f32 t, r, n;", ".reg .b32 a, b;", *lines,
        f"max.NaN.f32 t, ${last + pack}, 0fC2FC0000;", "min.NaN.f32 t, t, 0f42FE0000;",
        "add.rn.f32 r, t, 0f4B400000;", "sub.rn.f32 n, r, 0f4B400000;", "sub.rn.f32 t, t, n;",
        # 0.00132765, 0.00967554, 0.05550713, 0.2402212, 0.69314694, 1: the least relative error from -1/2 to 1/2.
        "fma.rn.f32 n, t, 0f3AAE0472, 0f3C1E8629;", "fma.rn.f32 n, n, t, 0f3D635B72;",
        "fma.rn.f32 n, n, t, 0f3E75FC8C;", "fma.rn.f32 n, n, t, 0f3F317214;", "fma.rn.f32 n, n, t, 0f3F800000;",
        "mov.b32 a, r;", "shl.b32 a, a, 23;", "mov.b32 b, n;", "add.s32 b, b, a;",
        f"mov.b32 ${last}, b;", "}",
    ))  # fmt: skip


@gluon.constexpr_function
def _constraints(pack):
    return ",".join(["=f"] * pack + ["f"] * pack)


@gluon.jit
def exponentials(x, BY_FMA: gl.constexpr):
    """2^x; one of BY_FMA by a polynomial, none for 0."""
    if BY_FMA == 0:
        return gl.exp2(x)
    else:
        return gl.inline_asm_elementwise(
            assembly(BY_FMA), _constraints(BY_FMA), [x], dtype=gl.float32, is_pure=True, pack=BY_FMA
        )
