"""Launching: through the interpreter here, through a driver that records, and (-m gpu) on a GPU."""

import ctypes
import os
import re
import struct
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flashinfer._core import kernel_cache
from tests.core.card import config_of
from tests.core.samples import (
    Config, Problem, build_record, build_scale, copy, described, kinds, record, scale, scale_kernel, tile,
)  # fmt: skip

PROBLEM, CONFIG = Problem("bf16", offset=3), Config(128)


def scaled(x, n, by, offset=3, weight=1.0):
    """What scale_kernel does, in float64."""
    return ((x[:n].double() * by + offset) * weight).float()


def arguments(n=300, device="cpu"):
    x = torch.randn(n, device=device).to(torch.bfloat16)
    return x, None, torch.full((n,), float("nan"), device=device), n, 0.5


def refusal(kind, *args, **kwargs):
    with pytest.raises(kind) as caught:
        scale(PROBLEM, CONFIG, (1, 1, 1), *args, **kwargs)
    return str(caught.value)


# -- builds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda types, constants: types.pop("n"),
        lambda types, constants: types.update(m="i32"),
        lambda types, constants: constants.pop("BLOCK"),
        lambda types, constants: constants.update(SPLIT=1),
        lambda types, constants: constants.update(n=300),
        lambda types, constants: types.update(x=types.pop("x")),
        lambda types, constants: types.update(n="int"),
        lambda types, constants: types.update(n="i32:0"),
        lambda types, constants: types.update(scale="bf16"),
    ],
)
def test_build_must_cover_the_kernel(change):
    build = build_scale(PROBLEM, CONFIG)
    types, constants = dict(build.types), dict(build.constants)
    change(types, constants)
    with pytest.raises(TypeError, match="scale_kernel"):
        replace(build, types=types, constants=constants)


def test_a_parameter_of_no_type_is_a_constant_none():
    build = build_scale(PROBLEM, CONFIG)
    absent = replace(build, types=build.types | {"weight": None})
    assert list(absent.types) == ["x", "out", "n", "scale"]
    assert absent.constants == {"weight": None} | build.constants
    with pytest.raises(TypeError, match="scale_kernel"):
        replace(build, types=build.types | {"no_such": None})


# -- the interpreter --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 128, 300])
def test_interpreted(n):
    x, weight, out, _, by = arguments()
    scale(PROBLEM, CONFIG, (-(-n // 128), 1, 1), x, weight, out, n, by)
    torch.testing.assert_close(out[:n], scaled(x, n, by), rtol=1e-6, atol=1e-6)
    assert out[n:].isnan().all()


def test_interpreted_with_another_problem_and_weights():
    x, _, out, n, by = arguments()
    weight = torch.randn(n)
    scale(Problem("bf16", weighted=True, offset=-1), Config(64), (5, 1, 1), x, weight, out, n, by)
    torch.testing.assert_close(out, scaled(x, n, by, -1, weight.double()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_empty_grid_launches_nothing(grid):
    x, weight, out, n, by = arguments()
    scale(PROBLEM, CONFIG, grid, x, weight, out, n, by)
    assert out.isnan().all()


def test_records_have_fields_that_are_constants_or_absent():
    x, y, out = torch.arange(100.0), torch.ones(100), torch.zeros(100)
    record(Problem("fp32", weighted=True), CONFIG, (1, 1, 1), x, y, out, 100)
    torch.testing.assert_close(out, 3 * (x + 1))
    record(Problem("fp32"), CONFIG, (1, 1, 1), x, out, 99)
    torch.testing.assert_close(out, torch.cat((3 * x[:99], 3 * (x[99:] + 1))))


@pytest.mark.parametrize(
    "change",
    [
        lambda types, constants: constants.pop("none.value", constants),
        lambda types, constants: constants.update({"no_such.x": 1}),
        lambda types, constants: constants.update({"x.first": None}),
    ],
)
def test_build_must_cover_records(change):
    build = build_record(Problem("fp32"), CONFIG)
    types, constants = dict(build.types), dict(build.constants)
    change(types, constants)
    with pytest.raises(TypeError, match="record_kernel"):
        replace(build, types=types, constants=constants)


def test_prepared_is_the_same_kernel():
    x, weight, out, n, by = arguments()
    bound = scale.prepare(PROBLEM, CONFIG, torch.device("cpu"))
    assert scale.prepare(PROBLEM, CONFIG, torch.device("cpu")) is bound
    bound((3, 1, 1), x, weight, out, n, by)
    torch.testing.assert_close(out, scaled(x, n, by), rtol=1e-6, atol=1e-6)


def test_interpreted_and_held():
    x, weight, out, n, by = arguments()
    bound = scale.prepare(PROBLEM, CONFIG, torch.device("cpu"))
    launch = bound.hold((3, 1, 1), (x, weight, out, n, by), ("x", "weight", "out"))
    for _ in range(2):
        other, _, elsewhere, _, _ = arguments()
        launch(other.data_ptr(), 0, elsewhere.data_ptr())
        torch.testing.assert_close(elsewhere, scaled(other, n, by), rtol=1e-6, atol=1e-6)
    assert out.isnan().all()
    with pytest.raises(ValueError, match="x: got a tensor at"):
        launch(other.data_ptr() + 2, 0, elsewhere.data_ptr())


def test_interpreted_from_threads():
    outs = [arguments()[2] for _ in range(4)]
    x, weight, _, n, by = arguments()
    launches = [
        threading.Thread(target=scale, args=(PROBLEM, CONFIG, (3, 1, 1), x, weight, out, n, by)) for out in outs
    ]
    for launch in launches:
        launch.start()
    for launch in launches:
        launch.join()
    for out in outs:
        torch.testing.assert_close(out, scaled(x, n, by), rtol=1e-6, atol=1e-6)


def test_tensor_map_interpreted():
    from flashinfer._core.launch import TensorMap

    x = torch.randn(40, 96)[:, :48]
    out = torch.empty(40, 48)
    described(Problem("fp32"), Config(32), (2, 2, 1), TensorMap(x, (32, 32)), out, 40, 48)
    assert torch.equal(out, x)


# -- broken promises: always checked in the interpreter, and on a GPU with FLASHINFER_DEBUG=1 -------------------------


def test_argument_of_another_dtype():
    x, weight, out, n, by = arguments()
    assert "scale: x: got a fp32 tensor; allowed: bf16" in refusal(ValueError, x.float(), weight, out, n, by)


def test_unaligned_argument():
    x, weight, out, n, by = arguments()
    assert "x: got a tensor at" in refusal(ValueError, x[1:], weight, out, n - 1, by)


def test_argument_on_another_device():
    x, weight, out, n, by = arguments()
    assert "out: got a tensor on meta" in refusal(ValueError, x, weight, out.to("meta"), n, by)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**40])
def test_integer_that_does_not_fit(value):
    x, weight, out, _, by = arguments()
    assert refusal(OverflowError, x, weight, out, value, by) == f"scale: n: got {value}; allowed: i32"


@pytest.mark.parametrize("value", [1.5, "3", None, torch.ones(2)])
def test_argument_that_is_no_integer(value):
    x, weight, out, _, by = arguments()
    assert "scale: n: got" in refusal(TypeError, x, weight, out, value, by)


def test_pointer_that_is_none():
    x, _, out, n, by = arguments()
    assert "weight: got 1.5" in refusal(ValueError, x, 1.5, out, n, by)


def test_stride_that_breaks_its_promise():
    byte, out = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.float64)
    with pytest.raises(ValueError, match="kinds: wide: got 12; allowed: a multiple of 8"):
        kinds(PROBLEM, CONFIG, (1, 1, 1), byte, True, 1, 2, 3, 4, 12, 5.0, 6.0, out)
    kinds(PROBLEM, CONFIG, (1, 1, 1), byte, True, 1, 2, 3, 4, 16, 5.0, 6.0, out)
    assert out.item() == 0 + 1 + 1 + 2 + 3 + 4 + 16 + 5 + 6


def test_too_few_and_too_many_arguments():
    args = arguments()
    assert "got 4; allowed: 5" in refusal(ValueError, *args[:4])
    assert "got 6; allowed: 5" in refusal(ValueError, *args, 1)


def test_launch_without_a_tensor():
    assert "at least one tensor" in refusal(ValueError, None, None, None, 3, 0.5)


def compiled_on_cpu_tensors():
    try:
        scale(PROBLEM, CONFIG, (1, 1, 1), *arguments())
    except ValueError as error:
        return str(error)


def test_compiled_kernel_refuses_cpu_tensors(in_triton):
    assert "got CPU tensors; allowed: CUDA tensors" in in_triton(compiled_on_cpu_tensors)


# -- the launch path, against a driver that records -------------------------------------------------------------------


class Words:
    """Any enumeration of the driver: a member is its name, a call makes a member of a value."""

    def __getattr__(self, name):
        return SimpleNamespace(name=name)

    def __call__(self, value):
        return SimpleNamespace(name=str(value))


class RecordingDriver:
    """Answers as the CUDA driver does, and keeps what a launch hands over, read from memory at the launch."""

    cuuint32_t = cuuint64_t = CUtensorMap = CUlaunchConfig = int
    CUstreamCaptureMode = CUfunction_attribute = Words()
    CUtensorMapDataType = CUtensorMapInterleave = CUtensorMapSwizzle = Words()
    CUtensorMapL2promotion = CUtensorMapFloatOOBfill = Words()

    def __init__(self, sizes):
        self._sizes = sizes
        self.launches, self.attributes, self.contexts, self.maps = [], [], [], []
        self.attributes_of_launches = []
        self.status = 0

    def cuCtxGetCurrent(self):
        return 0, 0

    def cuDeviceGet(self, index):
        return 0, index

    def cuDevicePrimaryCtxRetain(self, device):
        return 0, ("context", device)

    def cuCtxSetCurrent(self, context):
        self.contexts.append((context, threading.get_ident()))
        return (0,)

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return 0, mode

    def cuModuleLoadData(self, cubin):
        assert cubin.startswith(b"\x7fELF")
        return 0, "module"

    def cuModuleGetFunction(self, module, name):
        return 0, (module, name)

    def cuFuncSetAttribute(self, function, attribute, value):
        self.attributes.append((attribute, value))
        return (0,)

    def cuGetErrorName(self, status):
        return 0, b"CUDA_ERROR_INVALID_VALUE"

    def cuGetErrorString(self, status):
        return 0, b"invalid argument"

    def cuTensorMapEncodeTiled(self, *wish):
        self.maps.append(wish)
        self._encoded = ctypes.create_string_buffer(bytes([len(self.maps)] * 128), 128)
        return 0, SimpleNamespace(getPtr=lambda: ctypes.addressof(self._encoded))

    def cuTensorMapReplaceAddress(self, tensor_map, address):
        ctypes.c_uint64.from_address(tensor_map).value = address
        return (address % 16,)

    def cuLaunchKernelEx(self, config, function, slots, extra):
        grid, block, shared, stream, attributes = config_of(config)
        self.attributes_of_launches.append(attributes)
        pointers = (ctypes.c_void_p * len(self._sizes)).from_address(slots)
        values = [ctypes.string_at(at, size) for at, size in zip(pointers, self._sizes, strict=True)]
        self.launches.append((function, grid, block, shared, stream, values, threading.get_ident(), list(pointers)))
        return (self.status,)


class FakeDevice:
    current = 0

    def __init__(self, index):
        self.index = index

    def __enter__(self):
        self.before, FakeDevice.current = FakeDevice.current, self.index

    def __exit__(self, *exception):
        FakeDevice.current = self.before


def recorded(launcher, problem, config, arch="90a", index=0):
    """(kernel bound to a driver that records, the driver)."""
    from flashinfer._core import driver
    from flashinfer._core.launch import _Loaded

    entry = launcher.entry(problem, config, arch)
    recorder = RecordingDriver([size for _, size, _ in entry.kernel["parameters"]])
    driver.bindings = lambda: recorder
    torch.cuda.device = FakeDevice  # this process runs these checks and no others that need the real one
    torch._C._cuda_getDevice = lambda: FakeDevice.current
    torch._C._cuda_getCurrentRawStream = lambda index: 1000 + index
    return _Loaded(launcher.name, launcher.build(problem, config), entry, index, 227 << 10), recorder


def launch_scale():
    bound, driver = recorded(scale, PROBLEM, CONFIG)
    x, weight, out, n, by = arguments()
    bound((3, 2, 1), x, weight, out, n, by)
    for empty in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        bound(empty, x, weight, out, n, by)
    ((function, grid, block, shared, stream, values, _, _),) = driver.launches
    assert (function, grid, block, shared, stream) == (("module", b"scale_kernel"), (3, 2, 1), (128, 1, 1), 0, 1000)
    pointer = struct.Struct("<Q")
    assert [pointer.unpack(value)[0] for value in values[:3]] == [x.data_ptr(), 0, out.data_ptr()]
    assert struct.unpack("<i", values[3])[0] == n and struct.unpack("<f", values[4])[0] == by
    assert values[5:] == [bytes(8)] * len(values[5:])
    assert not driver.attributes


def launch_early():
    """Programmatic stream serialization (6 in cuda.h) belongs to small launches of kernels that begin by waiting."""
    for offset, attributes in ((0, {6: 1}), (1, {})):
        bound, driver = recorded(copy, Problem("bf16", offset=offset), CONFIG)
        x = torch.zeros(300, dtype=torch.bfloat16)
        bound((3, 1, 1), x, x, 300)
        bound.hold((3, 1, 1), (x, x, 300), ("x",))(x.data_ptr())
        assert driver.attributes_of_launches == [attributes] * 2
        for grid, expected in (((8, 8, 8), attributes), ((9, 19, 3), {}), ((512, 1, 1), attributes)):
            bound(grid, x, x, 300)
            bound.hold(grid, (x, x, 300), ("x",))(x.data_ptr())
            assert driver.attributes_of_launches[-2:] == [expected] * 2
    for arch, waits in (("80", False), ("90a", True), ("120a", True)):
        assert copy.entry(Problem("bf16", offset=0 if waits else 1), CONFIG, arch).kernel["waits"] is waits


def launch_kinds():
    bound, driver = recorded(kinds, PROBLEM, CONFIG)
    byte, out = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.float64)
    bound((1, 1, 1), byte, True, -128, 255, -32768, -(2**31), 2**62, 0.1, 0.1, 0x1234)
    values = driver.launches[0][5]
    codes = "Q?bBhiqfdQ"
    got = [struct.unpack(f"<{code}", value)[0] for code, value in zip(codes, values, strict=False)]
    single = torch.tensor(0.1, dtype=torch.float32).item()
    assert got == [byte.data_ptr(), True, -128, 255, -32768, -(2**31), 2**62, single, 0.1, 0x1234]
    for place, code, wrong in ((2, "i8", 128), (3, "u8", -1), (4, "i16", 2**15), (5, "i32", 2**31), (6, "i64", 2**63)):
        args = [byte, True, 0, 0, 0, 0, 0, 0.0, 0.0, out]
        args[place] = wrong
        with pytest.raises(OverflowError, match=f"got {wrong}; allowed: {code}"):
            bound((1, 1, 1), *args)
    assert len(driver.launches) == 1


def launch_wrongly():
    bound, driver = recorded(scale, PROBLEM, CONFIG)
    x, weight, out, n, by = arguments()
    for wrong in (1.5, "3", None, x):
        with pytest.raises(TypeError, match="scale: n: got"):
            bound((1, 1, 1), x, weight, out, wrong, by)
    with pytest.raises(ValueError, match="weight: got 1.5"):
        bound((1, 1, 1), x, 1.5, out, n, by)
    with pytest.raises(TypeError, match="takes 5 arguments, got 4"):
        bound((1, 1, 1), x, weight, out, n)
    assert not driver.launches
    driver.status = 1
    with pytest.raises(RuntimeError, match=r"scale.*scale_kernel.*\(9, 1, 1\).*CUDA_ERROR_INVALID_VALUE.*invalid arg"):
        bound((9, 1, 1), x, weight, out, n, by)


def launch_from_threads():
    bound, driver = recorded(scale, PROBLEM, CONFIG, index=1)
    assert FakeDevice.current == 0
    x, weight, out, n, by = arguments()
    meet = threading.Barrier(4)

    def launch(number):
        meet.wait()
        for _ in range(50):
            bound((1, 1, 1), x, weight, out, number, by)
        meet.wait()

    threads = [threading.Thread(target=launch, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    blocks = {}
    for *_, stream, values, thread, pointers in driver.launches:
        assert stream == 1001
        blocks.setdefault(thread, set()).update(pointers)
        blocks.setdefault((thread, "n"), set()).add(struct.unpack("<i", values[3])[0])
    idents = [key for key in blocks if isinstance(key, int)]
    assert len(driver.launches) == 200 and len(idents) == 4
    assert sum(len(blocks[ident]) for ident in idents) == len(set().union(*(blocks[ident] for ident in idents)))
    assert sorted(n for ident in idents for n in blocks[ident, "n"]) == [0, 1, 2, 3]
    assert {thread for _, thread in driver.contexts} >= set(idents)


def launch_held():
    bound, driver = recorded(scale, PROBLEM, CONFIG)
    x, weight, out, n, by = arguments()
    launch = bound.hold((3, 2, 1), (x, weight, out, n, by), ("out", "x"))
    other, _, elsewhere, _, _ = arguments()
    for moved in ((elsewhere, other), (out, x)):
        launch(*(t.data_ptr() for t in moved))
    bound((1, 1, 1), x, weight, out, 7, by)  # has a block of its own
    launch(elsewhere.data_ptr(), other.data_ptr())
    held = [driver.launches[i] for i in (0, 1, 3)]
    expected = [(other, elsewhere), (x, out), (other, elsewhere)]
    for (_, grid, block, _, stream, values, _, _), pair in zip(held, expected, strict=True):
        assert (grid, block, stream) == ((3, 2, 1), (128, 1, 1), 1000)
        got = struct.unpack("<QQQif", b"".join(values[:5]))
        assert got == (pair[0].data_ptr(), 0, pair[1].data_ptr(), n, by)
    assert held[0][7] == held[2][7] != driver.launches[2][7]
    bound.hold((1, 0, 1), (x, weight, out, n, by), ("x",))(0)
    assert len(driver.launches) == 4
    for wrong in ((1,), (1, 2, 3)):
        with pytest.raises((ValueError, struct.error)):
            launch(*wrong)
    # side by side
    bound.hold((1, 1, 1), (x, weight, out, n, by), ("x", "weight", "out"))(1, 2, 3)
    assert struct.unpack("<QQQif", b"".join(driver.launches.pop()[5][:5])) == (1, 2, 3, n, by)
    with pytest.raises(ValueError, match="scale: n: got i32; allowed: a pointer"):
        bound.hold((1, 1, 1), (x, weight, out, n, by), ("n",))
    with pytest.raises(OverflowError, match=f"n: got {2**31}"):
        bound.hold((1, 1, 1), (x, weight, out, 2**31, by), ("x",))
    with pytest.raises(TypeError, match="takes 5 arguments, got 1"):
        bound.hold((1, 1, 1), (x,), ("x",))
    driver.status = 1
    with pytest.raises(RuntimeError, match=r"scale.*scale_kernel.*\(3, 2, 1\).*CUDA_ERROR_INVALID_VALUE"):
        launch(out.data_ptr(), x.data_ptr())


def launch_held_from_threads():
    bound, driver = recorded(scale, PROBLEM, CONFIG, index=1)
    x, weight, out, n, by = arguments()
    launch = bound.hold((1, 1, 1), (x, weight, out, n, by), ("x",))
    meet = threading.Barrier(4)

    def many(number):
        meet.wait()
        for _ in range(50):
            launch(number)
        meet.wait()

    threads = [threading.Thread(target=many, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    blocks = {}
    for *_, values, thread, pointers in driver.launches:
        blocks.setdefault(thread, set()).add((struct.unpack("<Q", values[0])[0], pointers[0]))
    assert len(driver.launches) == 200 and all(len(seen) == 1 for seen in blocks.values())
    numbers, places = zip(*(next(iter(seen)) for seen in blocks.values()), strict=True)
    assert sorted(numbers) == [0, 1, 2, 3] and len(set(places)) == 4


def launch_held_keeps_what_stays():
    import gc
    import weakref

    bound, _ = recorded(scale, Problem("bf16", weighted=True), CONFIG)
    x, _, out, n, by = arguments()
    weight = torch.ones(n)
    launch = bound.hold((1, 1, 1), (x, weight, out, n, by), ("x", "out"))
    moves, stays = weakref.ref(x), weakref.ref(weight)
    gc.disable()
    del x, weight
    assert moves() is None and stays() is not None
    del launch
    assert stays() is None
    gc.enable()


def launch_held_with_a_tensor_map():
    from flashinfer._core.launch import TensorMap

    bound, driver = recorded(described, Problem("bf16"), Config(32))
    x, out = torch.zeros(200, 96, dtype=torch.bfloat16), torch.zeros(200, 96, dtype=torch.bfloat16)
    launch = bound.hold((7, 3, 1), (TensorMap(x, (32, 32)), out, 200, 96), ("source", "out"))
    other = torch.zeros_like(x)
    launch(other.data_ptr(), x.data_ptr())
    assert len(driver.maps) == 1
    encoded, *values = driver.launches[0][5]
    assert encoded == struct.pack("<Q", other.data_ptr()) + bytes([1] * 120) and driver.launches[0][7][0] % 64 == 0
    got = [struct.unpack(f"<{code}", value)[0] for code, value in zip("iiqqQii", values, strict=False)]
    assert got == [200, 96, 96, 1, x.data_ptr(), 200, 96]
    with pytest.raises(RuntimeError, match="described: source: tensor map at"):
        launch(other.data_ptr() + 2, x.data_ptr())


def launch_with_much_shared_memory():
    bound, driver = recorded(tile, Problem("bf16"), Config(128))
    shared = tile.entry(Problem("bf16"), Config(128), "90a").kernel["shared"]
    assert shared > 48 << 10
    ((attribute, value),) = driver.attributes
    assert attribute.name == "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES" and value == shared
    x = torch.zeros(128, 128, dtype=torch.bfloat16)
    bound((1, 1, 1), x, x, x.float(), 128)
    assert driver.launches[0][3] == shared and driver.launches[0][2] == (256, 1, 1)


def launch_with_a_tensor_map():
    from flashinfer._core.launch import TensorMap

    bound, driver = recorded(described, Problem("bf16"), Config(32))
    x = torch.zeros(200, 96, dtype=torch.bfloat16)[3:, :80]
    out = torch.zeros(197, 80, dtype=torch.bfloat16)
    bound((7, 3, 1), TensorMap(x, (32, 32)), out, 197, 80)
    ((kind, rank, address, sizes, strides, box, steps, interleave, swizzle, _, fill),) = driver.maps
    assert (kind.name, rank, address) == ("CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", 2, x.data_ptr())
    assert [list(map(int, part)) for part in (sizes, strides, box, steps)] == [[80, 197], [192], [32, 32], [1, 1]]
    assert interleave.name.endswith("INTERLEAVE_NONE") and fill.name.endswith("OOB_FILL_NONE")
    assert swizzle.name == "2"  # CU_TENSOR_MAP_SWIZZLE_64B: a row of the block is 64 bytes
    encoded, *values = driver.launches[0][5]
    assert encoded == bytes([1] * 128) and driver.launches[0][7][0] % 64 == 0
    got = [struct.unpack(f"<{code}", value)[0] for code, value in zip("iiqqQii", values, strict=False)]
    assert got == [197, 80, 96, 1, out.data_ptr(), 197, 80]
    wrong = {
        "block": TensorMap(x, (16, 32)),
        "dtype": TensorMap(x.half(), (32, 32)),
        "strides": TensorMap(x[:, 1:], (32, 32)),
        "last stride": TensorMap(x.t(), (32, 32)),
        "rank": TensorMap(x[None], (32, 32)),
        "shape": TensorMap(x[:0], (32, 32)),
    }
    for what, tensor_map in wrong.items():
        with pytest.raises(ValueError, match=f"described: source {what}: got"):
            bound((7, 3, 1), tensor_map, out, 197, 80)
    with pytest.raises(ValueError, match="described: source: got Tensor; allowed: a TensorMap"):
        bound((7, 3, 1), x, out, 197, 80)
    assert len(driver.launches) == 1
    # The driver gets a whole stride of one row, whatever stride that has.
    bound((1, 3, 1), TensorMap(x.as_strided((1, 80), (7, 1)), (32, 32)), out[:1], 1, 80)
    assert [list(map(int, part)) for part in driver.maps[-1][3:5]] == [[80, 1], [32]]


def refused_kernels():
    from flashinfer._core.launch import _Loaded
    from flashinfer._core.parameters import Layout

    build = scale.build(PROBLEM, CONFIG)
    entry = scale.entry(PROBLEM, CONFIG, "90a")

    def altered(**change):
        return replace(entry, kernel=entry.kernel | change)

    with pytest.raises(RuntimeError, match="scratch"):
        _Loaded("scale", build, altered(global_scratch=128), 0, 227 << 10)
    with pytest.raises(RuntimeError, match="needs 200000 bytes of shared memory, the device has 101376"):
        _Loaded("scale", build, altered(shared=200000), 0, 99 << 10)
    parameters = entry.kernel["parameters"]
    swapped = [parameters[0], parameters[3], *parameters[1:3], *parameters[4:]]
    floats = [*parameters[:3], ["f32", 4, 4], *parameters[4:]]
    for other in (parameters[:4], [*parameters, ["u64", 8, 8]], [*parameters[:-1], ["u32", 4, 4]], swapped, floats):
        with pytest.raises(RuntimeError, match="scale: the compiled kernel takes"):
            Layout("scale", build, entry.kernel | {"parameters": other})


def debug_checks(switch):
    os.environ["FLASHINFER_DEBUG"] = switch
    try:
        bound, driver = recorded(scale, PROBLEM, CONFIG)
    finally:
        del os.environ["FLASHINFER_DEBUG"]
    x, weight, out, n, by = arguments()
    try:
        bound((1, 1, 1), x, weight, out, n, by)
    except ValueError as error:
        return str(error)
    return f"{len(driver.launches)} launches"


@pytest.mark.parametrize(
    "check",
    [
        launch_scale, launch_early, launch_kinds, launch_wrongly, launch_from_threads,
        launch_with_much_shared_memory, launch_with_a_tensor_map, launch_held, launch_held_from_threads,
        launch_held_keeps_what_stays, launch_held_with_a_tensor_map, refused_kernels,
    ],
)  # fmt: skip
def test_loaded_kernel(check, in_triton):
    in_triton(check)


def test_debug_checks_each_launch(in_triton):
    assert in_triton(debug_checks, "1") == "scale: x: got a tensor on cpu; allowed: cuda:0, where the others are"
    assert in_triton(debug_checks, "0") == "1 launches"


def names_of_the_driver():
    import ast
    import inspect

    from cuda.bindings import driver as real

    from flashinfer._core import driver, launch

    names = set()
    for module in (driver, launch):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Attribute) and re.match("cu[A-Z]|cuuint|CU[a-z_]", node.attr):
                names.add(node.attr)
    members = {name for name in names if name.startswith("CU_")}
    kinds = [getattr(real, name) for name in names if name.startswith("CU") and name not in members]
    assert len(names) > 15
    assert not [name for name in names - members if not hasattr(real, name)]
    assert not [name for name in members if not any(hasattr(kind, name) for kind in kinds)]
    types = [f"CU_TENSOR_MAP_DATA_TYPE_{kind}" for kind in driver._MAP_TYPES.values()]
    assert all(hasattr(real.CUtensorMapDataType, name) for name in types)


@pytest.mark.gpu
def test_cuda_bindings_has_every_name_we_use(in_triton):
    in_triton(names_of_the_driver)


def frozen_launch():
    kernel_cache.freeze()
    try:
        scale.entry(Problem("fp16", offset=77), CONFIG, "90a")
    except kernel_cache.FrozenError as error:
        return str(error)
    finally:
        kernel_cache.freeze(False)


def test_frozen_launch_does_not_compile(in_triton):
    assert "scale" in in_triton(frozen_launch)


def expected_kernels():
    from flashinfer._core import compiler, launch, target

    def problem(i):
        return Problem("bf16", offset=i)

    device = torch.device("cuda", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(target._by_index, 0, target.NAMED["90a"])
        patch.setattr(launch, "_Loaded", lambda name, build, entry, index, shared: entry)
        parsed, parsing = compiler.parsed, []
        patch.setattr(compiler, "parsed", lambda *args: parsing.append(threading.current_thread()) or parsed(*args))
        scale.expect(problem(76), CONFIG, torch.device("cpu"))
        for _ in range(2):
            scale.expect(problem(76), CONFIG, device)
        assert parsing == [threading.current_thread()], parsing
        (coming,) = scale._coming.values()
        entry = scale.prepare(problem(76), CONFIG, device)
        assert entry is coming.result() and not entry.cached
        scale.expect(problem(76), CONFIG, device)
        assert not scale._coming and scale.entry(problem(76), CONFIG, "90a").cubin == entry.cubin
        # What goes wrong is raised to who needs the kernel.
        patch.setenv("FLASHINFER_FROZEN", "1")
        scale.expect(problem(75), CONFIG, device)
        with pytest.raises(kernel_cache.FrozenError):
            scale.prepare(problem(75), CONFIG, device)
        patch.delenv("FLASHINFER_FROZEN")
        # Where no thread starts, it is compiled when it is needed.
        patch.setattr(threading.Thread, "start", no_thread)
        scale.expect(problem(74), CONFIG, device)
        assert not scale._coming and not scale.prepare(problem(74), CONFIG, device).cached


def no_thread(self):
    raise RuntimeError("can't start new thread")


def test_expected_kernels_are_compiled_beside_others(in_triton):
    in_triton(expected_kernels)


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 127, 128, 1023, 100_000])
def test_launched(n, device):
    x, weight, out, _, by = arguments(n + 5, device)
    scale(PROBLEM, CONFIG, (-(-n // 128), 1, 1), x, weight, out, n, by)
    torch.testing.assert_close(out[:n], scaled(x, n, by), rtol=1e-6, atol=1e-6)
    assert out[n:].isnan().all()


@pytest.mark.gpu
def test_launched_with_every_kind_of_scalar(device):
    byte = torch.tensor([7], dtype=torch.uint8, device=device)
    out = torch.zeros(1, dtype=torch.float64, device=device)
    kinds(PROBLEM, CONFIG, (1, 1, 1), byte, True, -128, 255, -32768, -(2**31), 2**40, 0.5, 0.25, out)
    assert out.item() == 7 + 1 - 128 + 255 - 32768 - 2**31 + 2**40 + 0.5 + 0.25


@pytest.mark.gpu
def test_launched_with_much_shared_memory(device):
    x, y = (torch.randn(128, 128, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.full((128, 128), float("nan"), device=device)
    tile(Problem("bf16"), Config(128), (1, 1, 1), x, y, out, 100)
    torch.testing.assert_close(out[:100].double(), x[:100].double() @ y.double(), rtol=1e-4, atol=1e-4)
    assert out[100:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_launched_with_a_tensor_map(dtype, device):
    from flashinfer._core.checks import torch_dtype
    from flashinfer._core.launch import TensorMap

    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("needs a Hopper GPU or later, which has the copy engine")
    x = torch.randn(200, 96, device=device).to(torch_dtype(dtype))[3:, :80]
    out = torch.empty(197, 80, dtype=x.dtype, device=device)
    described(Problem(dtype), Config(32), (7, 3, 1), TensorMap(x, (32, 32)), out, 197, 80)
    assert torch.equal(out, x)
    with pytest.raises(ValueError, match="source block"):
        described(Problem(dtype), Config(32), (7, 3, 1), TensorMap(x, (16, 32)), out, 197, 80)
    with pytest.raises(ValueError, match="source strides"):
        described(Problem(dtype), Config(32), (7, 3, 1), TensorMap(x[:, 1:], (32, 32)), out, 197, 79)


@pytest.mark.gpu
def test_held_launches_again_at_other_addresses(device):
    x, weight, out, n, by = arguments(3000, device)
    launch = scale.prepare(PROBLEM, CONFIG, device).hold((24, 1, 1), (x, weight, out, n, by), ("x", "out"))
    del x, out
    stream = torch.cuda.Stream(device)
    for _ in range(3):
        x, _, out, _, _ = arguments(3000, device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            launch(x.data_ptr(), out.data_ptr())
        stream.synchronize()
        torch.testing.assert_close(out, scaled(x, n, by), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_held_tensor_map_is_readdressed(device):
    from flashinfer._core.launch import TensorMap

    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("needs a Hopper GPU or later, which has the copy engine")
    tensors = [torch.randn(197, 80, device=device).to(torch.bfloat16) for _ in range(3)]
    bound = described.prepare(Problem("bf16"), Config(32), device)
    out = torch.empty_like(tensors[0])
    launch = bound.hold((7, 3, 1), (TensorMap(tensors[0], (32, 32)), out, 197, 80), ("source", "out"))
    for x in tensors[::-1]:
        out = torch.empty_like(x)
        launch(x.data_ptr(), out.data_ptr())
        assert torch.equal(out, x)
    with pytest.raises(RuntimeError, match="described: source: tensor map"):
        launch(x.data_ptr() + 2, out.data_ptr())


@pytest.mark.gpu
def test_second_launch_neither_looks_up_nor_compiles(device, monkeypatch):
    x, weight, out, n, by = arguments(300, device)
    scale(PROBLEM, CONFIG, (3, 1, 1), x, weight, out, n, by)
    monkeypatch.setattr(scale, "build", None)
    monkeypatch.setenv("FLASHINFER_FROZEN", "1")
    out.fill_(float("nan"))
    scale(PROBLEM, CONFIG, (3, 1, 1), x, weight, out, n, by)
    torch.testing.assert_close(out, scaled(x, n, by), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_captured_in_a_graph_and_replayed(device):
    x, weight, out, n, by = arguments(5000, device)
    scale(PROBLEM, CONFIG, (40, 1, 1), x, weight, out, n, by)
    eager = out.clone()
    out.fill_(float("nan"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale(PROBLEM, CONFIG, (40, 1, 1), x, weight, out, n, by)
    assert out.isnan().all()
    graph.replay()
    assert torch.equal(out, eager)
    x.mul_(2)
    graph.replay()
    torch.testing.assert_close(out, scaled(x, n, by), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_first_launch_may_stand_in_a_capture(device):
    x, weight, out, n, by = arguments(300, device)
    problem = Problem("bf16", offset=41)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale(problem, CONFIG, (3, 1, 1), x, weight, out, n, by)
    graph.replay()
    torch.testing.assert_close(out, scaled(x, n, by, 41), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_launched_on_the_current_stream(device):
    x, weight, out, n, by = arguments(1 << 20, device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(2.0)
        scale(PROBLEM, CONFIG, (n // 128, 1, 1), x, weight, out, n, by)
    stream.synchronize()
    assert torch.equal(out, torch.full_like(out, 4.0))


@pytest.mark.gpu
def test_launched_from_threads_that_never_used_cuda(device):
    scale.prepare(PROBLEM, CONFIG, device)
    inputs = [arguments(3000, device) for _ in range(8)]

    def launch(x, weight, out, n, by):
        for _ in range(100):
            scale(PROBLEM, CONFIG, (24, 1, 1), x, weight, out, n, by)

    threads = [threading.Thread(target=launch, args=args) for args in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize(device)
    for x, _, out, n, by in inputs:
        torch.testing.assert_close(out, scaled(x, n, by), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_launched_on_a_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for index in (1, 0):
        x, weight, out, n, by = arguments(300, torch.device("cuda", index))
        with torch.cuda.device(1 - index):
            scale(PROBLEM, CONFIG, (3, 1, 1), x, weight, out, n, by)
            assert torch.cuda.current_device() == 1 - index
        torch.testing.assert_close(out, scaled(x, n, by), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_driver_says_what_it_refuses(device):
    x, weight, out, n, by = arguments(300, device)
    with pytest.raises(RuntimeError, match=r"scale.*scale_kernel.*\(1, 70000, 1\).*CUDA_ERROR_INVALID_VALUE"):
        scale(PROBLEM, CONFIG, (1, 70000, 1), x, weight, out, n, by)
    scale(PROBLEM, CONFIG, (3, 1, 1), x, weight, out, n, by)
    torch.testing.assert_close(out, scaled(x, n, by), rtol=1e-6, atol=1e-6)
    with pytest.raises(OverflowError, match=f"n: got {2**31}; allowed: i32"):
        scale(PROBLEM, CONFIG, (3, 1, 1), x, weight, out, 2**31, by)
    assert scale_kernel.arg_names[:3] == ["x", "weight", "out"]
