"""What the emulator holds kernels to, on kernels of a few lines."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flashinfer._core.gluon_compat import (
    block_barrier,
    cp_async,
    cp_async_commit,
    cp_async_wait,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tensordesc,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashinfer._core.launch import Build, Launcher, TensorMap
from flashinfer.testing.emulator import BarrierError, Deadlock, EmulationError, Hazard, OutOfBounds, emulate
from flashinfer.testing.emulator.values import decode, encode, rounded


def launch(kernel, types, *args, grid=(1, 1, 1), seed=0, **constants):
    with emulate("90a", seed=seed):
        Launcher("rules", lambda p, c: Build(kernel, types, constants))(None, SimpleNamespace, grid, *args)


def numbers(n, dtype=torch.int32):
    return torch.from_numpy(np.arange(n, dtype=np.int32)).to(dtype)


@gluon.jit
def _copy_numbers(x, y, first, count, SIZE: gl.constexpr):
    i = first + gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(y + i, gl.load(x + i, mask=i < count, other=-1), mask=i < count)


TYPES = dict(x="*i32", y="*i32", first="i32", count="i32")


def test_masked_lanes_touch_nothing():
    memory = torch.full((40,), 7, dtype=torch.int32)
    launch(_copy_numbers, TYPES, numbers(20), memory[10:30], 0, 20, SIZE=64)
    assert memory.tolist() == [7] * 10 + list(range(20)) + [7] * 10


@pytest.mark.parametrize("first, count", [(0, 21), (-1, 20)])
def test_elements_outside_an_argument_are_refused(first, count):
    memory = torch.full((40,), 7, dtype=torch.int32)
    with pytest.raises(OutOfBounds, match=r"byte (80|-4) of x, which has 80 .*test_rules.py:\d+ in _copy_numbers"):
        launch(_copy_numbers, TYPES, numbers(20), memory[10:30], first, count, SIZE=64)


def test_null_pointers_are_refused():
    with pytest.raises(OutOfBounds, match="null"):
        launch(_copy_numbers, TYPES, None, numbers(4), 0, 4, SIZE=4)


@gluon.jit
def _arithmetic(out, a, b, x):
    gl.store(out, a // b)
    gl.store(out + 1, a % b)
    gl.store(out + 2, a >> 1)
    gl.store(out + 3, a * 1000000007)
    gl.store(out + 4, (a / b).to(gl.int32))
    gl.store(out + 5, (x * 3).to(gl.int32))
    gl.store(out + 6, gl.cdiv(a, b))
    total = 0
    for i in range(b):
        total -= i
    gl.store(out + 7, total // 4)


@pytest.mark.parametrize("a, b", [(17, 5), (-17, 5), (-20, 5), (123456789, 7)])
def test_integers_wrap_and_divide_towards_zero(a, b):
    out = torch.zeros(8, dtype=torch.int32)
    launch(_arithmetic, dict(out="*i32", a="i32", b="i32", x="fp32"), out, a, b, -2.5)
    quotient = int(a / b)
    wrapped = (a * 1000000007 + 2**31) % 2**32 - 2**31
    up = int((a + b - 1) / b)
    total = int(-(b * (b - 1) // 2) / 4)
    assert out.tolist() == [quotient, a - quotient * b, a >> 1, wrapped, int(a / b), -7, up, total]


@pytest.mark.parametrize("dtype, name", [(torch.bfloat16, "bf16"), (torch.float16, "fp16"),
                                         (torch.float8_e4m3fn, "fp8e4nv"), (torch.float8_e5m2, "fp8e5")])  # fmt: skip
def test_floats_are_rounded_as_torch_rounds_them(dtype, name):
    kind = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp8e4nv": gl.float8e4nv, "fp8e5": gl.float8e5}[name]
    x = torch.randn(5000) * torch.exp2(torch.randint(-30, 9, (5000,)))
    x = torch.cat((x, torch.tensor([0.0, -0.0, float("nan"), 448.0, 2.0**-9, 2.0**-10, 1.0 + 2.0**-8])))
    limit = torch.finfo(dtype).max
    expected = x.clamp(-limit, limit).to(dtype)
    found = rounded(x.numpy(), kind)
    np.testing.assert_array_equal(found, expected.float().numpy())
    bits = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    raw = encode(found, kind)
    there = ~np.isnan(found)
    np.testing.assert_array_equal(raw[there], expected.view(bits).numpy().view(raw.dtype)[there])
    np.testing.assert_array_equal(decode(raw, kind), found)


@gluon.jit
def _box(x_map, out, row, column, BYTES: gl.constexpr, WAITS: gl.constexpr, PHASE: gl.constexpr, COUNT: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.int32, [8, 8], x_map.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=COUNT)
    mbarrier.expect(bar, BYTES)
    tma_load(x_map, [row, column], bar, tile)
    if WAITS:
        mbarrier.wait(bar, PHASE)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))[:, None] * 8 + gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(out + i, tile.load(LAYOUT))


def box(row, column, seed=0, BYTES=256, WAITS=True, PHASE=0, COUNT=1):
    x, out = numbers(10 * 12).view(10, 12), torch.empty(8, 8, dtype=torch.int32)
    types = dict(x_map=tensordesc("i32", (8, 8)), out="*i32", row="i32", column="i32")
    constants = dict(BYTES=BYTES, WAITS=WAITS, PHASE=PHASE, COUNT=COUNT)
    launch(_box, types, TensorMap(x, (8, 8)), out, row, column, seed=seed, **constants)
    return x, out


@pytest.mark.parametrize("row, column", [(0, 0), (1, 3), (5, 7), (-3, -2), (20, 0), (-9, 4)])
def test_boxes_are_zero_outside_of_the_tensor(row, column):
    x, out = box(row, column)
    expected = torch.zeros(30, 32, dtype=torch.int32)
    expected[10:20, 10:22] = x
    row, column = row + 10, column + 10
    assert torch.equal(out, torch.nn.functional.pad(expected, (0, 20, 0, 20))[row : row + 8, column : column + 8])


@pytest.mark.parametrize(
    "change, kind, words",
    [
        (dict(BYTES=128), (Deadlock, Hazard), "bytes missing|on its way"),
        (dict(BYTES=272), Deadlock, "parity 0 of bar .*16 bytes missing"),
        (dict(COUNT=2), Deadlock, "1 of 2 arrivals"),
        (dict(WAITS=False), Hazard, "tile .*is read while a copy to it is on its way"),
        (dict(PHASE=1), Hazard, "on its way"),
    ],
    ids=str,
)
def test_barriers_count_arrivals_and_bytes(change, kind, words):
    with pytest.raises(kind, match=words):
        box(0, 0, **change)


def test_copies_on_their_way_when_a_block_ends_are_refused():
    @gluon.jit
    def kernel(x_map):
        tile = gl.allocate_shared_memory(gl.int32, [8, 8], x_map.layout)
        bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(bar, count=1)
        mbarrier.expect(bar, 256)
        tma_load(x_map, [0, 0], bar, tile)

    x = numbers(64).view(8, 8)
    with pytest.raises(EmulationError, match="ends while the copy of x_map"):
        launch(kernel, dict(x_map=tensordesc("i32", (8, 8))), TensorMap(x, (8, 8)))


@gluon.jit
def _arrive_too_often(out):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=2)
    mbarrier.arrive(bar, count=3)
    gl.store(out, 1)


@gluon.jit
def _no_barrier(out):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.arrive(bar, count=1)
    gl.store(out, 1)


@pytest.mark.parametrize("kernel, words", [(_arrive_too_often, "3 more arrive"), (_no_barrier, "no barrier")])
def test_barriers_are_used_by_their_rules(kernel, words):
    with pytest.raises(BarrierError, match=words):
        launch(kernel, dict(out="*i32"), numbers(1))


@gluon.jit
def _multiply(a, b, out, FENCE: gl.constexpr, WAIT: gl.constexpr, OVERWRITE: gl.constexpr, CP: gl.constexpr):
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    right = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    i = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))[None, :]
    left.store(gl.load(a + i))
    if CP:
        cp_async(right, b + i)
        cp_async_commit()
        cp_async_wait(0)
    else:
        right.store(gl.load(b + i))
    if FENCE:
        fence_async_shared()
    block_barrier()
    acc = warpgroup_mma(left, right, gl.zeros([64, 64], gl.float32, ACC), is_async=True)
    if OVERWRITE:
        left.store(gl.zeros([64, 64], gl.bfloat16, LAYOUT))
    if WAIT:
        acc = warpgroup_mma_wait(0, [acc])
    i = gl.arange(0, 64, gl.SliceLayout(1, ACC))[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, ACC))[None, :]
    gl.store(out + i, acc)


def multiply(FENCE=True, WAIT=True, OVERWRITE=False, CP=False):
    a, b = (torch.randn(64, 64).bfloat16() for _ in range(2))
    out = torch.empty(64, 64)
    types = dict(a="*bf16", b="*bf16", out="*fp32")
    launch(_multiply, types, a, b, out, FENCE=FENCE, WAIT=WAIT, OVERWRITE=OVERWRITE, CP=CP)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cp", (False, True))
def test_products(cp):
    multiply(CP=cp)
    with pytest.raises(Hazard, match="no fence stands behind"):
        multiply(CP=cp, FENCE=False)
    with pytest.raises(Hazard, match="used before it was waited for"):
        multiply(CP=cp, WAIT=False)
    with pytest.raises(Hazard, match="is written while a product"):
        multiply(CP=cp, OVERWRITE=True)


@gluon.jit
def _take_turns(WG: gl.constexpr, out, bars, order):
    for i in range(4):
        mbarrier.wait(bars.index(WG), i & 1 ^ 1 ^ WG)
        at = gl.atomic_add(order, 1)
        gl.store(out + at, WG)
        mbarrier.arrive(bars.index(1 - WG), count=1)


@gluon.jit
def _two_partitions(out, order):
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    gl.warp_specialize(
        [(_take_turns, (gl.constexpr(0), out, bars, order)), (_take_turns, (gl.constexpr(1), out, bars, order))],
        [4], [64],
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_partitions_take_turns_by_the_phases_of_barriers(seed):
    out, order = torch.full((8,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    launch(_two_partitions, dict(out="*i32", order="*i32"), out, order, seed=seed)
    assert out.tolist() == [0, 1] * 4


@gluon.jit
def _give(word, bars, TELL: gl.constexpr, LISTEN: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    word.store(gl.full([32], 5, gl.int32, LAYOUT))
    if TELL:
        mbarrier.arrive(bars.index(0), count=1)
    if LISTEN:
        mbarrier.wait(bars.index(1), 0)
    word.store(gl.full([32], 6, gl.int32, LAYOUT))


@gluon.jit
def _take(word, bars, out, TELL: gl.constexpr, LISTEN: gl.constexpr):
    if TELL:
        mbarrier.wait(bars.index(0), 0)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.store(out + gl.arange(0, 32, LAYOUT), word.load(LAYOUT))
    if LISTEN:
        mbarrier.arrive(bars.index(1), count=1)


@gluon.jit
def _hand_over(out, TELL: gl.constexpr, LISTEN: gl.constexpr):
    word = gl.allocate_shared_memory(gl.int32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    T: gl.constexpr = gl.constexpr(TELL)
    L: gl.constexpr = gl.constexpr(LISTEN)
    gl.warp_specialize([(_give, (word, bars, T, L)), (_take, (word, bars, out, T, L))], [4], [64])


def hand_over(seed, TELL=True, LISTEN=True):
    out = torch.zeros(32, dtype=torch.int32)
    launch(_hand_over, dict(out="*i32"), out, seed=seed, TELL=TELL, LISTEN=LISTEN)
    return out.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_what_barriers_do_not_order_is_not_known_to_others(seed):
    """Whoever happens to run first: what is read is all bits, or an error says that it was read."""
    assert hand_over(seed) == [5] * 32
    for missing in ("TELL", "LISTEN"):
        try:
            assert hand_over(seed, **{missing: False}) == [-1] * 32
        except Hazard as error:
            assert "nothing orders that behind partition" in str(error)


def test_unknown_assembly_is_refused_by_its_text():
    @gluon.jit
    def kernel(out):
        gl.store(out, gl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], gl.int32, False, 1))

    with pytest.raises(EmulationError, match="%smid"):
        launch(kernel, dict(out="*i32"), numbers(1))


def test_outside_of_the_emulator_the_cpu_is_refused():
    out = numbers(1)
    launcher = Launcher("rules", lambda p, c: Build(_arrive_too_often, dict(out="*i32"), {}))
    with pytest.raises(ValueError, match="CPU tensors"):
        launcher(None, SimpleNamespace, (1, 1, 1), out)
    with emulate("90a"), pytest.raises(BarrierError):
        launcher(None, SimpleNamespace, (1, 1, 1), out)
    with pytest.raises(ValueError, match="CPU tensors"):
        launcher(None, SimpleNamespace, (1, 1, 1), out)
