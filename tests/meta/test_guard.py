"""Canaries and poison: what the suite's own fixture sees, with kernels that are wrong on purpose."""


import pytest
import torch
import triton
import triton.language as tl

from flashinfer.testing import guard


@triton.jit
def shifted(x, out, n, shift, SIZE: tl.constexpr):
    """Writes n elements of x to out, `shift` places too far."""
    at = tl.arange(0, SIZE)
    tl.store(out + at + shift, tl.load(x + at, at < n), at < n)


def run_shifted(out, shift):
    shifted[(1,)](torch.arange(out.numel(), device=out.device).to(out.dtype), out, out.numel(), shift, SIZE=64)


MAKES = {
    "empty": lambda d: torch.empty(40, dtype=torch.float16, device=d),
    "empty_like": lambda d: torch.empty_like(torch.ones(40, dtype=torch.float16, device=d)),
    "new_empty": lambda d: torch.ones(40, dtype=torch.float16, device=d).new_empty(40),
    "empty_strided": lambda d: torch.empty_strided((40,), (1,), dtype=torch.float16, device=d),
    "zeros": lambda d: torch.zeros(40, dtype=torch.float16, device=d),
    "new_zeros": lambda d: torch.ones(40, dtype=torch.float16, device=d).new_zeros(40),
    "guarded": lambda d: guard.guarded((40,), torch.float16, d),
}


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize(("shift", "byte"), [(1, 80), (-1, -2), (300, 600), (0, None)])
@pytest.mark.parametrize("alive", [True, False])
def test_sees_a_wrong_write(device, make, shift, byte, alive):
    out = MAKES[make](device)
    run_shifted(out, shift)
    if not alive:
        del out
    if byte is None:
        guard.check()
        return
    with pytest.raises(AssertionError, match=rf"test_guard.py:\d+ was written at byte {byte} of 80"):
        guard.check()
    guard.check()


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_undefined_floats_are_nan(device, dtype):
    for out in (torch.empty(3, 5, dtype=dtype, device=device), guard.guarded((3, 5), dtype, device)):
        assert out.float().isnan().all() and out.dtype == dtype and out.shape == (3, 5)


def test_undefined_integers_are_far_out_of_range(device):
    assert (torch.empty(7, dtype=torch.int32, device=device) == 0x7F7F7F7F).all()
    assert (torch.empty(7, dtype=torch.int64, device=device) == 0x7F7F7F7F7F7F7F7F).all()
    assert torch.empty(7, dtype=torch.bool, device=device).all()
    assert (torch.zeros(7, device=device) == 0).all()


@pytest.mark.parametrize("shape", [(), (1,), (3, 1, 5), (0, 4), (2, 0)], ids=str)
def test_tensors_are_as_torch_makes_them(device, shape):
    out = torch.empty(shape, dtype=torch.float16, device=device)
    assert out.is_contiguous() and out.storage_offset() == 0 and not out._is_view() and not out.requires_grad
    assert out.untyped_storage().nbytes() == out.nbytes and out.data_ptr() % 256 == 0
    assert out.device.type == device.type


def test_strides_are_kept(device):
    x = torch.ones(3, 4, 5, device=device).transpose(0, 2)
    assert torch.empty_like(x).stride() == x.stride()
    assert torch.empty(2, 3, 4, 5, memory_format=torch.channels_last, device=device).stride() == (60, 1, 15, 3)


def test_default_devices_and_dtypes_are_honoured():
    with torch.device("meta"):
        assert torch.empty(3).device.type == "meta" and torch.zeros(3).device.type == "meta"
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.empty(3).dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


def test_memory_that_ended_is_free(device):
    before = len(guard._rooms)
    for _ in range(20):
        torch.empty(1000, device=device)
    assert len(guard._rooms) <= before + 1


def test_all_is_as_before_afterwards():
    assert torch.empty.__name__ == "guarding"
    makes = torch.empty
    with guard.watch():
        assert torch.empty is not makes
    assert torch.empty is makes


def test_the_compiler_of_torch_sees_its_own_factories():
    assert torch.empty.__name__ == "guarding"
    step = torch.compile(lambda x: torch.empty_like(x).zero_() + x, fullgraph=True, backend="eager")
    assert (step(torch.ones(3)) == 1).all()


@pytest.mark.gpu
def test_a_capture_is_left_alone(device):
    x, graph = torch.ones(40, device=device), torch.cuda.CUDAGraph()
    out = torch.empty(40, device=device)
    with torch.cuda.graph(graph):
        inner = torch.empty(40, device=device)
        inner.copy_(x)
        out.copy_(inner * 2)
    graph.replay()
    assert (out == 2).all()
    guard.check()


def test_a_tensor_may_end_while_it_is_looked_at(monkeypatch):
    """A collection may begin wherever something is allocated."""
    out = [torch.empty(40)]
    join = guard.np.concatenate

    def concatenate(parts):
        out.clear()
        return join(parts)

    monkeypatch.setattr(guard.np, "concatenate", concatenate)
    guard.check()
    assert not out


@pytest.mark.gpu
def test_margins_of_another_stream_are_waited_for(device):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        out = torch.empty(40, device=device)
        torch.cuda._sleep(1 << 28)
    guard.check()
    run_shifted(out, 1)
    with pytest.raises(AssertionError, match="was written at byte 160 of 160"):
        guard.check()
