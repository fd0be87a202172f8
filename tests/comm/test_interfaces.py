"""Upstream's other functions: ranks as processes, handles over buffers in one process, launches, bad input."""

import ctypes
import re
from functools import partial

import pytest
import torch

from flashinfer import comm
from flashinfer.comm import allreduce, dcp_alltoall, pcie_ipc_tuning
from flashinfer.ops.comm import symmetric
from tests.ops.comm import processes, simulate

CALLS = "tests.comm.ranks:calls"


def test_calls_over_processes(tmp_path):
    processes.run(2, CALLS, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_calls_over_processes_that_share_a_gpu(tmp_path, world):
    processes.run(world, CALLS, tmp_path, device="cuda:0")


def shared(world, nbytes):
    """Buffers of all ranks on the host, as a tensor and their addresses."""
    buffers = torch.zeros(world, nbytes, dtype=torch.uint8)
    return buffers, [buffer.data_ptr() for buffer in buffers]


@pytest.mark.skipif(torch.cuda.is_available(), reason="buffers on the host, for a machine without a GPU")
def test_vllms_all_reduce_over_addresses(monkeypatch):
    recorder = simulate.Recorder(allreduce.op)
    monkeypatch.setattr(allreduce, "op", recorder)
    buffers, addresses = shared(2, comm.vllm_meta_size())
    handles = [comm.vllm_init_custom_ar(addresses, torch.empty(0), rank, True) for rank in range(2)]
    for size in (1000, 4096):
        xs = [torch.randn(size) for _ in handles]
        outs = [torch.zeros(size) for _ in handles]
        for fa, x, out in zip(handles, xs, outs, strict=True):
            comm.vllm_register_buffer(fa, addresses)
            comm.vllm_all_reduce(fa, x, out, 0, 0, 36)
        recorder.run()
        assert all(torch.equal(out, xs[0] + xs[1]) for out in outs)
    assert comm.vllm_get_graph_buffer_ipc_meta(handles[0]) == ([], [])
    comm.vllm_register_graph_buffers(handles[0], [[], []], [[], []])
    with pytest.raises(ValueError, match="num_ctas: got 37"):
        comm.vllm_all_reduce(handles[0], xs[0], outs[0], 0, 0, 37)
    comm.vllm_dispose(handles[0])
    with pytest.raises(ValueError, match="fa: got"):
        comm.vllm_all_reduce(handles[0], xs[0], outs[0], 0, 0, 1)
    assert buffers[0].any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="buffers on the host, for a machine without a GPU")
def test_ulysses_over_addresses(monkeypatch):
    recorder = simulate.Recorder(dcp_alltoall.room.alltoall)
    monkeypatch.setattr(dcp_alltoall.room, "alltoall", recorder)
    buffers, addresses = shared(1, comm.vllm_meta_size())
    fa = comm.init_ulysses_a2a(addresses, addresses, 0, 1, True)
    x, out = torch.randn(2, 3, 4, 8), torch.zeros(2, 3, 4, 8)
    real = simulate.Recorder.__call__

    def at_once(self, *given):
        choice = real(self, *given)

        class Now:
            def run(self, *args):
                choice.run(*args)
                recorder.run()

        return Now()

    # The result is read in the same call.
    monkeypatch.setattr(simulate.Recorder, "__call__", at_once)
    for mode in (0, 1):
        comm.ulysses_a2a(fa, x, out.zero_(), 2, 3, 4, 8, mode)
        assert torch.equal(out, x)
    with pytest.raises(ValueError, match="mode: got 2"):
        comm.ulysses_a2a(fa, x, out, 2, 3, 4, 8, 2)
    comm.dispose_ulysses_a2a(fa)
    assert buffers.any()


def test_memory_by_address():
    if torch.cuda.is_available():
        pytest.skip("addresses of the host; this machine has a GPU")
    memory = (ctypes.c_float * 24)(*range(24))
    address = ctypes.addressof(memory)
    view = comm.pack_strided_memory(address, 8, 32, 3, torch.float32, 0)
    assert view.tolist() == [[0, 1], [8, 9], [16, 17]]
    comm.trtllm_lamport_initialize_all(address, address + 32, address + 64, 2, torch.float32)
    assert not view.any() and bool(view.signbit().all()) and memory[2] == 2.0
    pointers = comm.create_shared_buffer(64)
    comm.free_shared_buffer(pointers)
    with pytest.raises(ValueError, match="pointers: got"):
        comm.free_shared_buffer(pointers)
    with pytest.raises(RuntimeError, match="so_file"):
        comm.CudaRTLibrary()


@pytest.mark.gpu
def test_the_run_time_library(device):
    cuda = comm.CudaRTLibrary()
    cuda.cudaSetDevice(device.index or 0)
    address = cuda.cudaMalloc(64)
    cuda.cudaMemset(address, 3, 64)
    cuda.cudaDeviceSynchronize()
    assert comm.pack_strided_memory(address.value, 64, 64, 1, torch.uint8, device.index or 0).tolist() == [[3] * 64]
    cuda.cudaIpcGetMemHandle(address)
    cuda.cudaFree(address)


def test_launches_over_pcie():
    one = comm.get_pcie_ipc_launch_config(2, 8192, 2)
    assert (one.blocks, one.variant) == (8, comm.PcieIpcVariant.UNSTAGED)
    assert comm.get_pcie_ipc_launch_config(8, 1 << 22, 2).variant == comm.PcieIpcVariant.STAGED
    assert comm.get_pcie_ipc_launch_config(2, 1 << 20, 2, max_blocks=4).blocks == 4
    for world, numel, item in ((3, 8192, 2), (2, 8192, 4), (2, 7, 2), (4, 16, 2)):
        assert comm.get_pcie_ipc_launch_config(world, numel, item) is None
    for function in (comm.get_pcie_ipc_all_gather_launch_config, comm.get_pcie_ipc_reduce_scatter_launch_config):
        assert function(4, 4096).blocks == 4 and function(4, 7) is None
    assert "ws4" in pcie_ipc_tuning.default_cache_path(4)
    assert comm.probe_pcie_ipc_rank_topology(1).rank == 1
    with pytest.raises(ValueError, match="max_blocks: got 0"):
        comm.get_pcie_ipc_launch_config(2, 8, 2, 0)


def test_which_backend_ulysses_takes():
    def gpu(rank, uuid, **reached):
        return comm.UlyssesRankTopology(rank, "host", rank, uuid, "", reached, reached)

    both = [gpu(0, "a", b=True), gpu(1, "b", a=True)]
    assert comm.decide_ulysses_backend("auto", both).backend == "nvlink"
    assert comm.decide_ulysses_backend("nccl", both) == comm.UlyssesBackendDecision("nccl", "requested")
    for other in ([gpu(0, "a"), gpu(1, "b", a=True)], both[:1], [gpu(0, "a"), comm.UlyssesRankTopology(1)]):
        assert comm.decide_ulysses_backend("auto", other).backend == "nccl"
        with pytest.raises(comm.UlyssesBackendError):
            comm.decide_ulysses_backend("nvlink", other)
    assert comm.decide_ulysses_backend("nvlink", both[::-1]).backend == "nvlink"
    with pytest.raises(ValueError, match="requested: got 'x'"):
        comm.decide_ulysses_backend("x", both)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"peer_p2p": {"b": False}}, "no P2P from rank 0 to rank 1"),
        ({"peer_nvlink": {}, "pair_errors": {"b": "unknown"}}, "no NVLink from rank 0 to rank 1: unknown"),
        ({"rank": 1}, "ranks .1, 1. are not 0 to 1"),
        ({"probe_error": "lost"}, "the probe of rank 0 failed: lost"),
        ({"hostname": "there"}, "multiple hosts"),
        ({"device_uuid": ""}, "the GPU of rank 0 is unknown"),
        ({"device_uuid": "b"}, "ranks 0 and 1 have the same GPU b"),
    ],
)
def test_what_keeps_ulysses_from_peers_memory(change, reason):
    first, second = (
        comm.UlyssesRankTopology(rank, "host", rank, "ab"[rank], "", {"ba"[rank]: True}, {"ba"[rank]: True})
        for rank in range(2)
    )
    assert comm.decide_ulysses_backend("auto", [first, second]).backend == "nvlink"
    for name, value in change.items():
        setattr(first, name, value)
    found = comm.decide_ulysses_backend("auto", [first, second])
    assert found.backend == "nccl" and re.search(reason, found.reason)
    with pytest.raises(comm.UlyssesBackendError, match=reason):
        comm.decide_ulysses_backend("nvlink", [first, second])


def test_a_device_that_is_not_there_is_an_answer_of_the_probe():
    for device in ("cuda:90", 90, None):
        found = comm.probe_ulysses_rank_topology(device, 3)
        assert found.rank == 3 and (found.probe_error or found.device_uuid)


def test_bytes_of_any_rank_are_seen_as_a_tensor():
    whole = torch.arange(3 * 40, dtype=torch.uint8).view(3, 40)
    for workspace in (whole[:, :32], whole[:, :32].view(torch.int64)):
        seen = comm.moe_a2a_wrap_payload_tensor_in_workspace(workspace, [2], 80 + 8, 80 + 24, torch.int32)
        assert seen.data_ptr() == whole[2].data_ptr() + 8
        torch.testing.assert_close(seen, whole[2, 8:24].view(torch.int32).view(2, 2), rtol=0, atol=0)
    row = comm.moe_a2a_wrap_payload_tensor_in_workspace(whole[1], [5], 0, 40, torch.int64)
    assert row.data_ptr() == whole[1].data_ptr() and row.shape == (5, 1)
    for start, end in ((120, 124), (80 + 24, 80 + 40)):
        with pytest.raises(ValueError, match="slice_"):
            comm.moe_a2a_wrap_payload_tensor_in_workspace(whole[:, :32], [1], start, end, torch.int32)


def test_sizes_of_workspaces():
    assert comm.compute_fp4_swizzled_layout_sf_size(130, 5) == 256 * 8
    assert comm.decode_cp_a2a_workspace_size(2) == symmetric.header(2, 64 << 10)
    wrapped = partial(comm.moe_a2a_wrap_payload_tensor_in_workspace, torch.zeros(1, 256, dtype=torch.uint8))
    assert wrapped([2, 4], 4, 68, torch.float16).shape == (2, 4, 4)
    size = comm.moe_a2a_get_workspace_size_per_rank
    prepared, ids = comm.MnnvlMoe.mnnvl_moe_alltoallv_prepare, torch.zeros(4, 2, dtype=torch.int32)
    for call, message in (
        (lambda: comm.trtllm_destroy_ipc_workspace_for_all_reduce([]), "workspace: got list"),
        (lambda: comm.trtllm_lamport_initialize(0, 4, torch.int32), "dtype: got torch.int32"),
        (lambda: comm.pack_strided_memory(0, 3, 4, 1, torch.float32, 0), "segment_size: got (3, 4)"),
        (lambda: size(0, 4, 256, 256), "ep_size: got 0"),
        (lambda: size(2, 4, -1, 256), "total_dispatch_payload_size_per_token: got -1"),
        (lambda: size(2, -4, 256, 256), "max_num_tokens: got -4"),
        (lambda: size(2, 4, 256, None), "combine_payload_size_per_token: got None"),
        (lambda: wrapped([1, 3], 0, 64, torch.float32), "leading_shape: got [1, 3]"),
        (lambda: wrapped([1, 4], 2, 66, torch.float32), "slice_end: got 66"),
        (lambda: wrapped([1, 4], 0, 512, torch.uint8), "slice_end: got 512"),
        (lambda: prepared(ids, None, ids, ids[:2].float(), 2, 4, 2, 0, 2), "gathered_scales: got (2, 2)"),
        (lambda: prepared(ids[:2], None, ids, None, 2, 4, 2, 0, 2), "gathered_target_rank_ids: got (2, 2)"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
