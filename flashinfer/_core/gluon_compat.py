"""Gluon's names, the same under every supported Triton. Kernels and device code import them from here.

Between 3.6 and 3.9 Gluon renamed its TMA copies (`async_copy_global_to_shared` became `async_load`) and its block
barrier (`thread_barrier` became `barrier`). A name bound here to a Gluon builtin is resolved by Gluon's code generator
like the builtin itself.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate

__all__ = [
    "GluonASTSource",
    "aggregate",
    "block_barrier",
    "cp_async",
    "cp_async_arrive",
    "cp_async_commit",
    "cp_async_wait",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "mma_v2",
    "reinterpret",
    "tensordesc",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]

# (shared memory, pointers, mask): cp.async; elements that are masked off become zeros.
cp_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
# (barrier, increment_count): each thread arrives once its copies so far are done.
cp_async_arrive = async_copy.mbarrier_arrive
cp_async_commit = async_copy.commit_group
# (pendings): wait until at most this number of committed groups are in flight.
cp_async_wait = async_copy.wait_group
# (descriptor, coordinates, barrier, shared memory, pred=True): signals the barrier when the bytes are there.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# (descriptor, coordinates, shared memory)
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
# (pendings): wait until at most this number of stores still read shared memory.
tma_store_wait = tma.store_wait
# (shared memory, dtype, shape, layout): the same bytes seen as another tile.
_Shared = gl.shared_memory_descriptor
reinterpret = _Shared.reinterpret if hasattr(_Shared, "reinterpret") else _Shared._reinterpret
# (): all threads of the block.
block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

_DTYPES = {
    "bf16": gl.bfloat16,
    "fp16": gl.float16,
    "fp32": gl.float32,
    "fp8e4nv": gl.float8e4nv,
    "fp8e5": gl.float8e5,
    "u8": gl.uint8,
    "i8": gl.int8,
    "i32": gl.int32,
}


def aggregate(cls):
    """Triton's aggregate, a record of device values, which is constructed from its fields in order or by name.

    A field annotated with `gl.constexpr` takes any constant. Triton 3.6 requires an `__init__` in each class.
    """
    if "__init__" not in vars(cls):
        fields = dict(cls.__annotations__)

        def __init__(self, *values, **named):
            if len(values) > len(fields):
                raise TypeError(f"{cls.__name__} has {len(fields)} fields, not {len(values)}")
            for name, value in (dict(zip(fields, values)) | named).items():
                setattr(self, name, gl.constexpr(value) if fields[name] is gl.constexpr else value)

        __init__.__triton_builtin__ = True
        # The source text of this function in compile keys.
        __init__.raw_src = list(fields)
        cls.__init__ = __init__
    return _aggregate(cls)


def tensordesc(dtype: str, block: tuple[int, ...], layout: gl.NVMMASharedLayout | None = None) -> str:
    """The type, for `Build.types`, of a tensor map that copies `block` elements of `dtype` into `layout`.

    Without a layout it is Gluon's default for that block: the widest swizzle that fits. In the kernel the parameter's
    `.layout` gives it.
    """
    if layout is None:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype])
    return f"tensordesc<{dtype}[{', '.join(map(str, block))}],{layout!r}>"
