"""What keeps numbers out of a thread's registers that are cheaper to work out again."""

from flashinfer._core.gluon_compat import gl, gluon


@gluon.jit
def anew(x):
    """int32 `x`, of which the compiler does not know that it is always the same: else what follows from it is worked
    out before all loops, and waits in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def lane():
    """A thread's number in its warp, read where it stands."""
    return gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
