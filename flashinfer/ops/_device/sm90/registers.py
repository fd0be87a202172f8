"""Values that the compiler must not compute early and keep in registers."""

from flashinfer._core.gluon_compat import gl, gluon


@gluon.jit
def opaque(x):
    """int32 `x`, read where it stands: what is derived from it is not hoisted out of loops."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def lane():
    """A thread's number in its warp."""
    return gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def program():
    """gl.program_id(0), read where it stands."""
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def programs():
    """gl.num_programs(0), read where it stands."""
    return gl.inline_asm_elementwise("mov.u32 $0, %nctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
