"""What stands for `gl`, `tl` and Gluon's Hopper functions in an emulated kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.language.core import pointer_type
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from flashinfer._core import gluon_compat
from flashinfer._core.gluon_compat import gl, mbarrier
from flashinfer.testing.emulator import memory, products, shared
from flashinfer.testing.emulator.assembly import inline_assembly
from flashinfer.testing.emulator.errors import EmulationError, Hazard, here
from flashinfer.testing.emulator.barriers import MOST_PARTITIONS, Barrier, Clock
from flashinfer.testing.emulator.schedule import Copy, Schedule, Task, wait_for_barrier
from flashinfer.testing.emulator.shared import Allocation, Shared
from flashinfer.testing.emulator.values import Tensor, cast, encode, pair, rounded, scalar, stored


def _elementwise(function):
    def operation(x, *ignored, **options):
        x = x if isinstance(x, Tensor) else scalar(x)
        if not x.dtype.is_floating():
            raise EmulationError(f"{function.__name__} of {x.dtype}, at {here()}")
        return Tensor(rounded(function(x.a), x.dtype), x.dtype, x.layout)

    return operation


def _extremum(of_floats, of_numbers, with_nan):
    def operation(x, y, propagate_nan=tl.PropagateNan.NONE):
        if not isinstance(x, Tensor) and not isinstance(y, Tensor):
            return max(x, y) if of_numbers is np.maximum else min(x, y)
        a, b, dtype, layout, kind = pair(x, y)
        if dtype.is_floating():
            function = with_nan if propagate_nan == tl.PropagateNan.ALL else of_floats
        else:
            function = of_numbers
        return kind(function(a, b), dtype, layout)

    return operation


def _reduction(function, is_sum=False):
    def operation(x, axis=None, keep_dims=False, return_indices=False, **ignored):
        if return_indices:
            raise EmulationError(f"a reduction that returns indices, at {here()}")
        a, dtype = x.a, x.dtype
        if is_sum and not dtype.is_floating() and dtype.primitive_bitwidth < 32:
            dtype = tl.uint32 if dtype.name.startswith("u") else tl.int32
        axis = None if axis is None else int(axis)
        found = function(a.astype(stored(dtype), copy=False), axis=axis, keepdims=bool(keep_dims))
        if dtype.is_floating():
            found = rounded(found, dtype)
        return Tensor(found, dtype)

    return operation


def _max(a, **kwargs):
    return (np.fmax if a.dtype.kind == "f" else np.maximum).reduce(a, **kwargs)


def _min(a, **kwargs):
    return (np.fmin if a.dtype.kind == "f" else np.minimum).reduce(a, **kwargs)


def _sum(a, **kwargs):
    return np.add.reduce(a, dtype=a.dtype, **kwargs)


def arange(start, end, layout=None) -> Tensor:
    if (end - start) & (end - start - 1) or end <= start:
        raise EmulationError(f"arange({start}, {end}): its length has to be a power of two, at {here()}")
    return Tensor(np.arange(start, end, dtype=np.int32), tl.int32, layout)


def full(shape, value, dtype, layout=None) -> Tensor:
    value = cast(value, dtype)
    return Tensor(np.full([int(n) for n in shape], value.a), dtype, layout)


def zeros(shape, dtype, layout=None) -> Tensor:
    return full(shape, 0, dtype, layout)


def where(condition, x, y) -> Tensor:
    if not isinstance(condition, Tensor):
        condition = scalar(bool(condition))
    if isinstance(x, Tensor) and x.dtype.is_ptr():
        return Tensor(np.where(condition.a, x.a, y.a), x.dtype, None, x.memory)
    if not isinstance(x, Tensor) and not isinstance(y, Tensor):
        x = scalar(x)
    a, b, dtype, layout, kind = pair(x, y)
    return kind(np.where(condition.a, a, b), dtype, layout)


def convert_layout(x, layout, assert_trivial=False) -> Tensor:
    return Tensor(x.a, x.dtype, layout, x.memory)


def cdiv(x, div):
    if isinstance(x, Tensor) or isinstance(div, Tensor):
        return (x + (div - 1)) // div
    return -(-x // div)


def join(x, y) -> Tensor:
    a, b, dtype, _, _ = pair(x, y)
    return Tensor(np.stack(np.broadcast_arrays(a, b), -1), dtype)


def broadcast(x, y) -> tuple[Tensor, Tensor]:
    shape = np.broadcast_shapes(np.shape(x.a), np.shape(y.a))
    return tuple(Tensor(np.broadcast_to(z.a, shape), z.dtype, z.layout, z.memory) for z in (x, y))


def static_assert(condition, message="") -> None:
    if not condition:
        raise EmulationError(f"static_assert: {message}, at {here()}")


def _nothing(*args, **kwargs) -> None:
    pass


def _itself(x, *args, **kwargs):
    return x


def _as_method(name):
    def operation(x, *args, **kwargs):
        return getattr(x, name)(*args, **kwargs)

    return operation


class Language:
    """The functions of a launch, which know who calls them.

    A function that others may run in between is a generator.
    """

    def __init__(
        self, schedule: Schedule, watch: Callable[[str, str], str | None] | None, fp8_places: int | None
    ):
        self._schedule = schedule
        self._fp8_places = fp8_places
        self._watch = watch
        # What translates device functions, Triton's own among them.
        self.translate: Callable = _itself
        self._names = self._plain() | {
            name: getattr(self, name)
            for name in (
                "program_id", "num_programs", "num_warps", "allocate_shared_memory", "warp_specialize", "atomic_add",
                "store", "inline_asm_elementwise", "associative_scan",
            )
        }  # fmt: skip
        self._hopper = {
            name: getattr(self, name)
            for name in (
                "block_barrier", "cp_async", "cp_async_arrive", "cp_async_commit", "cp_async_wait",
                "fence_async_shared", "mma_v2", "tma_load", "tma_store", "tma_store_wait", "warpgroup_mma",
                "warpgroup_mma_wait",
            )
        } | {"reinterpret": _as_method("reinterpret"), "warpgroup_mma_init": _itself}  # fmt: skip
        space = _Space(self)
        barriers = SimpleNamespace(
            MBarrierLayout=mbarrier.MBarrierLayout, init=self.init, expect=self.expect, arrive=self.arrive,
            wait=self.wait, invalidate=_nothing,
        )  # fmt: skip
        self._of = {id(gl): space, id(tl): space, id(tl.math): space, id(mbarrier): barriers, id(gluon): space}
        for name, function in self._hopper.items():
            if hasattr(gluon_compat, name):
                self._of[id(getattr(gluon_compat, name))] = function
        self._of[id(triton)] = SimpleNamespace(cdiv=cdiv, next_power_of_2=triton.next_power_of_2)

    def of(self, value):
        """What stands for a module or function of Triton's; None for anything else."""
        return self._of.get(id(value))

    def named(self, name: str):
        if name in self._names:
            return self._names[name]
        if name in ("barrier", "thread_barrier", "debug_barrier"):
            return self.block_barrier
        for module in (gl, tl):
            found = getattr(module, name, None)
            if found is None:
                continue
            if isinstance(found, (tl.dtype, type)):
                return found
            if isinstance(found, (JITFunction, InterpretedFunction)):
                return self.translate(found)
        raise EmulationError(f"gl.{name} is not known to the emulator, at {here()}")

    @staticmethod
    def _plain() -> dict:
        methods = ("reshape", "permute", "trans", "split", "view")
        return {
            "abs": lambda x: Tensor(np.abs(x.a), x.dtype, x.layout),
            "arange": arange, "broadcast": broadcast, "cast": cast, "cdiv": cdiv, "condition": _itself,
            "constexpr": _itself, "convert_layout": convert_layout, "device_assert": _nothing, "device_print": _nothing,
            "expand_dims": lambda x, axis: Tensor(np.expand_dims(x.a, axis), x.dtype, None, x.memory),
            "exp": _elementwise(np.exp), "exp2": _elementwise(np.exp2), "log": _elementwise(np.log),
            "log2": _elementwise(np.log2), "sqrt": _elementwise(np.sqrt), "floor": _elementwise(np.floor),
            "ceil": _elementwise(np.ceil), "rsqrt": _elementwise(lambda a: np.float32(1) / np.sqrt(a)),
            "sin": _elementwise(np.sin), "cos": _elementwise(np.cos),
            "extra": SimpleNamespace(cuda=SimpleNamespace(gdc_wait=_nothing, gdc_launch_dependents=_nothing)),
            "fma": lambda x, y, z: x * y + z, "full": full, "full_like": lambda x, value: full(x.shape, value, x.dtype),
            "join": join, "load": _load, "max": _reduction(_max),
            "min": _reduction(_min),
            "sum": _reduction(_sum, True), "max_contiguous": _itself, "multiple_of": _itself, "max_constancy": _itself,
            "assume": _nothing, "maximum": _extremum(np.fmax, np.maximum, np.maximum),
            "minimum": _extremum(np.fmin, np.minimum, np.minimum), "pointer_type": pointer_type,
            "static_assert": static_assert, "static_print": _nothing,
            "static_range": lambda *bounds: map(int, range(*map(int, bounds))),
            "to_tensor": lambda x: x if isinstance(x, Tensor) else scalar(x), "where": where, "zeros": zeros,
            "zeros_like": lambda x: zeros(x.shape, x.dtype, x.layout),
            **{name: _as_method(name) for name in methods},
        }  # fmt: skip

    def _fault(self, operation: str) -> str | None:
        """What is to go wrong here."""
        return self._watch(operation, here()) if self._watch else None

    @property
    def _task(self) -> Task:
        return self._schedule.running

    # The grid.

    def program_id(self, axis) -> Tensor:
        return scalar(self._task.block.at[int(axis)])

    def num_programs(self, axis) -> Tensor:
        return scalar(self._task.block.grid[int(axis)])

    def num_warps(self) -> int:
        return self._task.num_warps

    def inline_asm_elementwise(self, asm, constraints, args, dtype, is_pure, pack):
        block = self._task.block
        return inline_assembly(asm, args, dtype, pack, block.at[0], block.grid[0])

    def associative_scan(self, x, axis, combine_fn, reverse=False):
        if reverse or isinstance(x, tuple):
            raise EmulationError(f"a scan of tuples, or in reverse, at {here()}")
        parts = [Tensor(part, x.dtype) for part in np.moveaxis(x.a, axis, 0)]
        found = [parts[0]]
        for part in parts[1:]:
            made = combine_fn(found[-1], part)
            if hasattr(made, "gi_frame"):
                made = yield from made
            found.append(made)
        return Tensor(np.stack([part.a for part in found], axis), found[0].dtype, x.layout)

    # Memory.

    def store(self, pointer, value, mask=None, **options) -> None:
        self._task.has_stored = True
        memory.store(pointer, value, mask)

    def atomic_add(self, pointer, val, mask=None, sem=None, scope=None):
        yield
        if sem in ("release", "acq_rel") and self._task.has_stored:
            raise Hazard(f"one thread releases what others stored, with no barrier of theirs between, at {here()}")
        return memory.add_atomically(pointer, val, mask)

    def allocate_shared_memory(self, element_ty, shape, layout, value=None) -> Shared:
        block = self._task.block
        where = here()
        name = where.rpartition(": ")[2].partition("=")[0].strip() or "shared memory"
        allocation = Allocation(f"{name} ({where.partition(' in ')[0]})", self._schedule)
        block.allocations.append(allocation)
        made = Shared.new(allocation, element_ty, [int(n) for n in shape], layout)
        if value is not None:
            made.store(value)
        return made

    def warp_specialize(self, functions_and_args, worker_num_warps, worker_num_regs):
        parent = self._task
        if len(functions_and_args) > MOST_PARTITIONS:
            raise EmulationError(f"{len(functions_and_args)} partitions; at most {MOST_PARTITIONS} are followed")
        if len(worker_num_warps) != len(functions_and_args) - 1 or len(worker_num_regs) != len(worker_num_warps):
            raise EmulationError(f"warps and registers of {len(functions_and_args) - 1} workers, at {here()}")
        results, workers = [], []
        for i, (function, args) in enumerate(functions_and_args):
            warps = int(worker_num_warps[i - 1]) if i else parent.num_warps
            name = f"partition {i} ({getattr(function, '__name__', 'a function')})"
            body = _body(function, args, results if i == 0 else None)
            task = Task(parent.block, Clock(i, parent.clock.known), warps, name, body)
            workers.append(task)
            self._schedule.start(task)
        tasks = self._schedule.tasks
        yield from self._schedule.wait(
            lambda: not any(worker in tasks for worker in workers), lambda: "its partitions"
        )
        for worker in workers:
            parent.clock.acquire(worker.clock.release())
        return results[0] if results else None

    # Barriers.

    def init(self, barrier, count) -> None:
        name = f"{barrier.allocation.name} + {self._number(barrier)}"
        barrier.allocation.barriers[barrier.address] = Barrier(name, int(count))

    @staticmethod
    def _number(barrier) -> int:
        base = barrier.raw
        while base.base is not None:
            base = base.base
        return (barrier.address - base.__array_interface__["data"][0]) // 8

    def expect(self, barrier, bytes, pred=True):
        yield
        fault = self._fault("expect")
        if pred:
            size = int(bytes) + {"fewer": -16, "more": 16}.get(fault, 0)
            barrier.barrier().expect(size, self._task.clock.release())

    def arrive(self, barrier, *, count=1, pred=True):
        yield
        fault = self._fault("arrive")
        if pred and fault != "skip":
            barrier.barrier().arrive(int(count) * (2 if fault == "twice" else 1), self._task.clock.release())

    def wait(self, barrier, phase, pred=True, deps=()):
        fault = self._fault("wait")
        if pred and fault != "skip":
            found = barrier.barrier()
            yield from wait_for_barrier(self._schedule, found, int(phase) & 1 ^ (fault == "phase"))

    def block_barrier(self):
        yield
        if self._fault("block barrier") != "skip":
            self._task.has_stored = False

    def fence_async_shared(self, cluster=False) -> None:
        if self._fault("fence") != "skip":
            shared.fence(self._task.block.allocations, self._task.clock.partition)

    # Copies.

    def tma_load(self, tensor_desc, coord, barrier, result, pred=True):
        yield
        if not pred:
            return
        coordinates, bar = [int(c) for c in coord], barrier.barrier()
        tensor_desc.box(coordinates)
        if result.raw.nbytes != tensor_desc.bytes or result.dtype != tensor_desc.dtype:
            raise EmulationError(f"a box of {tensor_desc.block_shape} {tensor_desc.dtype} to {result}, at {here()}")
        if result.shape[-1] != tensor_desc.block_shape[-1]:
            raise EmulationError(f"rows of a box {tensor_desc.block_shape} to {result}, at {here()}")
        result.begin_copy(True)
        where, released = here(), self._task.clock.release()

        def finish():
            result.land(tensor_desc.read(coordinates))
            bar.complete(tensor_desc.bytes, released)

        self._schedule.send(Copy(self._task.block, f"the copy of {tensor_desc.name} to {result} ({where})", finish))

    def tma_store(self, tensor_desc, coord, src):
        yield
        src.begin_reading("stored by the copy engine")
        coordinates, task = [int(c) for c in coord], self._task

        def finish():
            tensor_desc.write(coordinates, src.raw)
            src.end_reading(task.clock)

        copy = Copy(task.block, f"the store of {src}", finish)
        task.stores.append(self._schedule.send(copy))

    def tma_store_wait(self, pendings=0):
        yield
        stores = self._task.stores
        for copy in stores[: len(stores) - int(pendings)]:
            copy.land()

    def cp_async(self, smem, pointer, mask=None, **options):
        yield
        task = self._task
        if smem.shape != list(np.broadcast_shapes(np.shape(pointer.a), () if mask is None else np.shape(mask.a))):
            raise EmulationError(f"pointers of shape {pointer.shape} copied to {smem}, at {here()}")
        if mask is not None:
            pointer = broadcast(pointer, mask)[0]
        # Bounds are looked at now; what is there, when the copy lands.
        memory.load(pointer, mask, 0)
        smem.begin_copy(False)

        def finish():
            found = memory.load(pointer, mask, 0)
            smem.land(encode(found.a, found.dtype), task.clock.partition)

        task.copies.append(self._schedule.send(Copy(task.block, f"the copy to {smem} ({here()})", finish)))

    def cp_async_commit(self) -> None:
        task = self._task
        task.groups.append(task.copies)
        task.copies = []

    def cp_async_wait(self, num_outstanding=0):
        yield
        task = self._task
        count = 0 if self._fault("copy wait") == "skip" else len(task.groups) - int(num_outstanding)
        for group in task.groups[: max(count, 0)]:
            for copy in group:
                copy.land()
        task.groups = task.groups[max(count, 0) :]

    def cp_async_arrive(self, barrier, increment_count=True):
        """Each thread arrives when its copies so far have landed."""
        yield
        task, bar = self._task, barrier.barrier()
        threads = 32 * task.num_warps
        if increment_count:
            bar.announce(threads)
        # None may be waited for by group: then they are done here.
        earlier = tuple(copy for group in (*task.groups, task.copies) for copy in group if not copy.is_done)
        released = task.clock.release()
        self._schedule.send(Copy(task.block, f"an arrival at {bar}", lambda: bar.arrive(threads, released), earlier))

    # Products.

    def warpgroup_mma(self, a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
        yield
        product = products.start(a, b, acc, bool(use_acc), self._fp8_places)
        self._task.products.append(product)
        if not is_async:
            yield from self.warpgroup_mma_wait(0, [product.result])
        return product.result

    def warpgroup_mma_wait(self, num_outstanding=0, deps=None):
        task = self._task
        task.is_slow = len(task.products) > int(num_outstanding) and self._schedule.is_slow()
        yield
        count = max(len(task.products) - int(num_outstanding), 0)
        if self._fault("product wait") == "skip":
            count = 0
        for product in task.products[:count]:
            product.finish(task.clock)
        task.products = task.products[count:]
        return deps[0] if len(deps) == 1 else tuple(deps)

    def mma_v2(self, a, b, acc, input_precision=None) -> Tensor:
        return Tensor(np.matmul(a.a, b.a, dtype=np.float32) + acc.a, acc.dtype, acc.layout)


class _Space:
    """The module `gl`, or `tl`."""

    def __init__(self, language: Language):
        self._language = language

    def __getattr__(self, name: str):
        if name == "math":
            return self
        found = self._language.named(name)
        setattr(self, name, found)
        return found


def _body(function, args, results):
    made = function(*args)
    if hasattr(made, "gi_frame"):
        made = yield from made
    if results is not None:
        results.append(made)


def _load(pointer, mask=None, other=None, **options) -> Tensor:
    if "boundary_check" in options:
        raise EmulationError("block pointers are not known to the emulator")
    return memory.load(pointer, mask, other)
