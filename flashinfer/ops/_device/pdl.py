"""Programmatic dependent launch: a kernel that is in place when those before it end."""

import triton
import triton.language as tl


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait for the kernels before this one, then have the next one launched. It stands before all loads and stores.

    A kernel that begins so is launched while those before it run (`begins_waiting` in flashinfer/_core/compiler.py says
    which do, and why that is safe). It lets the next one come only after it has waited itself: what that one reads
    before it waits, by rules that are not ours, is then no younger than without us.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
