"""Programmatic dependent launch: a kernel starts while those before it on the stream run, and waits for them itself."""

import triton
import triton.language as tl


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait for the kernels before this one, then allow the launch of the next. Call it before all loads and stores.

    A kernel that begins with this call may be launched while earlier kernels run (`begins_waiting` in
    flashinfer/_core/compiler.py recognizes such kernels, and says why that is safe). The next kernel may be another
    library's and may read memory before it waits. It is therefore allowed only after this kernel has waited: all
    kernels before this one have ended then, as they would have without dependent launch.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
