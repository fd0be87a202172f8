"""States and rows go 16 bytes at a time: what bounds these kernels is bytes."""

import re
from importlib import import_module

import pytest

from flashinfer._core.compiler import compile_kernel
from flashinfer._core.precompile import catalog_jobs
from flashinfer.ops.recurrent import delta, ssd


def accesses(card, launcher):
    """Bytes of global accesses of 16 bytes, and of smaller ones, of a kernel of the first problem that has it."""
    ops = {op.name: op for op in (delta.delta_step, delta.delta_commit, delta.delta_chunks, ssd.prefill)}
    job = next(job for job in catalog_jobs(ops, ["90a"]) if job.launcher == launcher)
    kernel = next(x for x in import_module(job.module).IMPLEMENTATION.launchers if x.name == launcher)
    ptx = compile_kernel(kernel.build(job.problem, job.config), "90a")[0].decode()
    found = re.findall(r"(?:ld|st)\.global(?:\.v(\d))?\.b(\d+)", ptx)
    sizes = [int(many or 1) * int(bits) // 8 for many, bits in found]
    sizes += [int(size, 16) for size in re.findall(r"cp\.async\.c\w\.shared\.global.*?, 0x(\w+)", ptx)]
    return sum(size for size in sizes if size == 16), sum(size for size in sizes if size < 16)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "launcher", ["delta_step", "delta_commit", "delta_scan", "delta_prepare", "ssd_states", "ssd_results"]
)
def test_most_bytes_go_in_wide_accesses(launcher, on_card):
    wide, narrow = on_card(accesses, launcher, whole=True)
    assert wide > narrow > 0
