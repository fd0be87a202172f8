"""Scratch memory: whose it is, how large, and that a captured graph keeps its own."""

import pytest
import torch

from flashinfer._core import workspace

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64])
def test_given_workspace_is_used_if_it_is_large_enough(dtype):
    given = torch.zeros(64, 2, dtype=dtype)
    nbytes = given.numel() * given.element_size()
    for need in (0, 1, nbytes):
        taken = workspace.take(CPU, need, given)
        assert taken.dtype == torch.uint8 and taken.shape == (need,)
        assert need == 0 or taken.data_ptr() == given.data_ptr()
    assert workspace.take(CPU, nbytes + 1, given).data_ptr() != given.data_ptr()


def test_own_workspace_has_the_size_asked_for():
    first, second = (workspace.take(CPU, 1000) for _ in range(2))
    assert first.shape == second.shape == (1000,) and first.dtype == torch.uint8
    assert first.data_ptr() % 16 == 0
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.gpu
def test_one_buffer_a_stream(device):
    first = workspace.take(device, 1 << 20)
    assert workspace.take(device, 1 << 10).data_ptr() == first.data_ptr()
    assert first.data_ptr() % 256 == 0
    with torch.cuda.stream(torch.cuda.Stream(device)):
        assert workspace.take(device, 1 << 10).data_ptr() != first.data_ptr()
    assert workspace.take(device, 3 << 20).shape == (3 << 20,)


@pytest.mark.gpu
def test_capture_neither_grows_nor_loses_its_buffer(device):
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        before = workspace.take(device, 1 << 20)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        inside = workspace.take(device, 1 << 20)
        inside.fill_(7)
        with pytest.raises(RuntimeError, match=f"workspace: got {1 << 20} bytes.*at least {1 << 21}"):
            workspace.take(device, 1 << 21)
    address = before.data_ptr()
    assert inside.data_ptr() == address
    del before, inside
    with torch.cuda.stream(stream):
        larger = workspace.take(device, 1 << 22)
        larger.zero_()
        fresh = [torch.zeros(1 << 20, dtype=torch.uint8, device=device) for _ in range(8)]
        graph.replay()
    stream.synchronize()
    assert not larger.any() and not any(tensor.any() for tensor in fresh)
    assert address not in [tensor.data_ptr() for tensor in (larger, *fresh)]
