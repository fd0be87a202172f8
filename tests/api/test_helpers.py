"""Helpers that callers import from flashinfer.utils and flashinfer.testing.utils."""

import os
from types import SimpleNamespace

import pytest
import torch

from flashinfer import utils
from flashinfer.testing.compare import assert_bitwise
from flashinfer.testing.utils import (
    aggregate_gpu_time_across_ranks,
    bench_kineto,
    calculate_rotation_count,
    count_bytes,
    dequantize_fp8,
    empty_suppress,
    get_l2_cache_size,
    per_block_cast_to_fp8,
    per_token_cast_to_fp8,
    quantize_fp8,
    suppress_stdout_stderr,
)


def numbers(kind):
    return {member.name: member.value for member in kind}


def test_enumerations():
    assert numbers(utils.PosEncodingMode) == dict(NONE=0, ROPE_LLAMA=1, ALIBI=2)
    assert numbers(utils.MaskMode) == dict(NON_CAUSAL=0, CAUSAL=1, CUSTOM=2, MULTIITEMSCORING=3)
    assert numbers(utils.TensorLayout) == dict(NHD=0, HND=1)


def test_arithmetic():
    assert [utils.last_positive_power_of_2(x) for x in (1, 2, 3, 4, 7, 8, 1000)] == [1, 2, 2, 4, 4, 8, 512]
    assert [utils.ceil_div(x, 4) for x in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [utils.round_up(x, 128) for x in (0, 1, 128, 129)] == [0, 128, 128, 256]
    with pytest.raises(ValueError, match="^x: got 0; allowed: 1 or more"):
        utils.last_positive_power_of_2(0)


def test_tensors_and_dtypes(device):
    lengths = torch.tensor([3, 0, 2], dtype=torch.int32, device=device)
    assert_bitwise(utils.get_indptr(lengths), torch.tensor([0, 3, 3, 5], device=device))
    # The paper's: 8 heads have 1/2 ... 1/256; of 12, the last four lie between the first of 16.
    eight = 2.0 ** -torch.arange(1, 9, device=device).float()
    assert_bitwise(utils.get_alibi_slopes(8, device), eight)
    assert_bitwise(utils.get_alibi_slopes(12, device), torch.cat([eight, 2.0 ** -torch.arange(0.5, 4).to(device)]))
    assert utils.canonicalize_torch_dtype("float16") is utils.canonicalize_torch_dtype(torch.float16) is torch.float16
    for bad in ("half_float", 16, "Tensor"):
        with pytest.raises(ValueError, match="^dtype: got "):
            utils.canonicalize_torch_dtype(bad)
    assert utils.is_float8(torch.empty(1, dtype=torch.float8_e5m2)) and not utils.is_float8(lengths)
    assert utils.get_native_fp4_dtype().itemsize == 1


@pytest.mark.parametrize("shape, tile", [((6, 256), (1, 128)), ((256, 384), (128, 128)), ((2, 6, 256), (1, 1, 128))])
@pytest.mark.parametrize("mode", ["K", "MN"])
def test_tiles_in_fp8(shape, tile, mode, device):
    x = torch.randn(shape, device=device)
    x[..., :128] = 0
    tiles = [n // t for n, t in zip(shape, tile)]
    given = (*tiles[:-2], tiles[-1], tiles[-2]) if mode == "MN" else tuple(tiles)
    codes, scales = quantize_fp8(x, given, tile, mode)
    assert codes.dtype == torch.float8_e4m3fn and codes.is_contiguous() and tuple(scales.shape) == given
    each = scales.transpose(-1, -2) if mode == "MN" else scales
    for axis, t in enumerate(tile):
        each = each.repeat_interleave(t, axis)
    assert_bitwise(dequantize_fp8(codes, scales, mode), codes.float() * each)
    # Half a unit in the last place of e4m3: 2^-4 of the value, or 2^-10 of the scale where codes are subnormal.
    assert ((codes.float() * each - x).abs() <= (x.abs() * 2.0**-4).maximum(each * 2.0**-10)).all()
    assert ((torch.log2(scales) % 1) == 0).all() and (x.abs() <= 448 * each).all()
    largest = codes.float().abs().amax()
    assert 224 < largest <= 448
    with pytest.raises(ValueError, match="^scale_shape: got "):
        quantize_fp8(x, [n + 1 for n in given], tile, mode)
    with pytest.raises(ValueError, match="^scale_major_mode: got "):
        quantize_fp8(x, given, tile, "N")


def test_operands_of_deepgemm(device):
    x = torch.randn(130, 256, device=device)
    codes, scales = per_token_cast_to_fp8(x)
    again = quantize_fp8(x, (130, 2), (1, 128), "K")
    assert_bitwise(codes, again[0])
    assert_bitwise(scales, again[1])
    codes, scales = per_block_cast_to_fp8(x[:, :200])
    assert tuple(codes.shape) == (130, 200) and tuple(scales.shape) == (2, 2)
    each = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:130, :200]
    assert ((codes.float() * each - x[:, :200]).abs() <= (x[:, :200].abs() * 2.0**-4).maximum(each * 2.0**-10)).all()


@pytest.mark.parametrize("cast", [per_token_cast_to_fp8, per_block_cast_to_fp8])
def test_operands_without_tokens(cast, device):
    codes, scales = cast(torch.randn(0, 256, device=device))
    assert codes.dtype == torch.float8_e4m3fn and tuple(codes.shape) == (0, 256)
    assert scales.dtype == torch.float32 and tuple(scales.shape) == (0, 2)
    if cast is per_token_cast_to_fp8:
        assert tuple(dequantize_fp8(codes, scales, "K").shape) == (0, 256)
    with pytest.raises(ValueError, match="^x_scale: got "):
        dequantize_fp8(torch.ones(4, 4), torch.ones(0, 4), "K")


def test_sizes_of_cold_measurements(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1000))
    assert count_bytes() == count_bytes(None) == 0 and get_l2_cache_size() == 1000
    assert count_bytes(torch.ones(2, 3), (torch.ones(4).half(), [torch.ones(1, dtype=torch.int8)]), None) == 24 + 8 + 1
    # Five caches are 5000 bytes: 13 copies of 400, and the one in use.
    assert calculate_rotation_count([torch.ones(100)]) == 14
    assert calculate_rotation_count([torch.ones(1000)]) == 3
    assert calculate_rotation_count([torch.ones(1000)], min_rotations=8) == 8
    assert calculate_rotation_count([torch.ones(1250)]) == calculate_rotation_count([]) == 1


def test_times_of_ranks(monkeypatch):
    assert aggregate_gpu_time_across_ranks(3.0, max) == 3.0
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)

    def gather(found, x):
        found[:] = [x, [9.0, 0.5] if isinstance(x, list) else 5.0]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert aggregate_gpu_time_across_ranks(3.0, max) == 5.0
    assert aggregate_gpu_time_across_ranks([1.0, 2.0], max) == [9.0, 2.0]


def test_nothing_is_printed(capfd):
    with suppress_stdout_stderr():
        print("python")
        os.write(2, b"a library")
    with empty_suppress():
        print("seen")
    assert capfd.readouterr() == ("seen\n", "")


def test_times_of_kernels_by_their_names(monkeypatch):
    """The profiler is a stand-in: its events are those of a run."""
    calls, kernel = [], SimpleNamespace
    figures = [("norm_kernel", 60.0, 3), ("memset", 1.0, 3), ("norm_other", 20.0, 1), ("cpu", 0.0, 9)]
    events = [kernel(key=key, device_time_total=us, count=count) for key, us, count in figures]

    class Profile:
        def __init__(self, **options):
            self.steps = 0

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        step = export_chrome_trace = lambda self, *args: calls.append(args)
        key_averages = lambda self: events

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runs = []

    def bench(names, **more):
        return bench_kineto(lambda: runs.append(0), names, num_tests=3, flush_l2=False, **more)

    assert bench("norm_kernel") == pytest.approx(20e-6) and len(runs) == 7
    assert bench(("norm_kernel", "memset"), trace_path="trace.json") == pytest.approx((20e-6, 1e-6 / 3))
    assert ("trace.json",) in calls
    assert bench("norm", with_multiple_kernels=True) == pytest.approx(20e-6)
    for name in ("norm", "nothing"):
        with pytest.raises(ValueError, match=f"^kernel_names: got '{name}'; allowed: "):
            bench(name)
