"""Reads that the compiler does not hoist, so that their values are not kept in registers; and a read ahead."""

from flashinfer._core.gluon_compat import gl, gluon


@gluon.jit
def opaque(x):
    """The int32 `x` through inline assembly: values derived from the result are not hoisted out of loops."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def lane():
    """A thread's number in its warp, 0 to 31."""
    return gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def program():
    """gl.program_id(0), read again at each use instead of kept in a register."""
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def programs():
    """gl.num_programs(0), read again at each use instead of kept in a register."""
    return gl.inline_asm_elementwise("mov.u32 $0, %nctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def prefetch(pointer):
    """Start to bring the line at `pointer` into L2. Nothing waits for it, and no register holds it."""
    return gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1
    )
