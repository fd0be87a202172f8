"""Mapping, the ways that processes talk while a workspace is set up, and what a machine without GPUs answers."""

import pytest
import torch
import torch.distributed as dist

from flashinfer import comm
from flashinfer.comm._workspaces import MNNVLAllreduceFusionStrategy
from flashinfer.comm.mnnvl import MnnvlMemory
from flashinfer.comm.quantized_allreduce import quantized_all_reduce


def test_every_rank_has_one_place_and_groups_partition_ranks():
    made = [
        comm.Mapping(24, rank, 4, tp_size=4, pp_size=3, cp_size=2, moe_ep_size=2, moe_tp_size=2) for rank in range(24)
    ]
    places = {(m.pp_rank, m.cp_rank, m.tp_rank) for m in made}
    assert places == {(p, c, t) for p in range(3) for c in range(2) for t in range(4)}
    for kind, size in (("tp", 4), ("cp", 2), ("pp", 3), ("moe_ep", 2), ("moe_tp", 2)):
        groups = {tuple(getattr(m, f"{kind}_group")) for m in made}
        assert sorted(rank for group in groups for rank in group) == list(range(24))
        for m in made:
            group = getattr(m, f"{kind}_group")
            assert len(group) == size and group[getattr(m, f"{kind}_rank")] == m.rank
    m = made[13]
    assert (m.tp_rank, m.cp_rank, m.pp_rank) == (1, 1, 1)
    assert (m.node_rank, m.local_rank, m.is_multi_node()) == (3, 1, True)
    assert (m.prev_pp_rank(), m.next_pp_rank(), made[23].next_pp_rank()) == (5, 21, 7)
    assert [made[r].pp_layers(7) for r in (0, 8, 16)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert m.ep_experts(6) == [3, 4, 5]
    assert m.has_tp() and m.has_cp() and m.has_pp() and m.has_moe_ep() and not m.has_moe_cluster()
    assert made[17].is_last_pp_rank() and m.is_second_last_pp_rank() and made[0].is_first_pp_rank()
    assert comm.Mapping.from_dict(m.to_dict()) == m != made[12]
    assert len({*made, comm.Mapping.from_dict(m.to_dict())}) == 24


def test_groups_are_those_of_the_layout():
    """Ranks of a job are tensor-parallel in their lowest digits, then context-parallel, then stages."""
    m = comm.Mapping(8, 5, tp_size=2, cp_size=2, pp_size=2)
    assert m.tp_groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert m.cp_groups == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert m.pp_groups == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert (m.tp_group, m.cp_group, m.pp_group) == ([4, 5], [5, 7], [1, 5])
    m = comm.Mapping(16, 9, 8, tp_size=8, pp_size=2, moe_tp_size=2, moe_ep_size=4)
    assert m.moe_tp_groups == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert m.moe_ep_groups == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert (m.moe_tp_group, m.moe_ep_group) == ([9, 13], [8, 9, 10, 11])
    m = comm.Mapping(8, 7, tp_size=8, moe_cluster_size=4)
    assert m.moe_cluster_groups == [[0, 1, 2, 3], [4, 5, 6, 7]] and m.moe_cluster_group == [4, 5, 6, 7]


def test_attention_heads_are_split_over_all_ranks_of_a_stage_where_nothing_else_is_said():
    m = comm.Mapping(8, 0, tp_size=2, cp_size=4)
    assert (m.attn_tp_size, m.attn_cp_size) == (8, 1)
    m = comm.Mapping(8, 0, tp_size=2, cp_size=4, attn_cp_size=4)
    assert (m.attn_tp_size, m.attn_cp_size) == (2, 4)


def test_a_split_that_is_not_known_yet_has_one_place():
    m = comm.Mapping(4, 3, auto_parallel=True)
    assert (m.rank, m.tp_rank, m.cp_rank, m.pp_rank, m.moe_ep_rank) == (3, 0, 0, 0, 0)
    assert (m.tp_group, m.cp_group, m.pp_group) == ([0], [0], [0, 1, 2, 3])
    with pytest.raises(ValueError, match="tp_size: got 4; allowed: 1, with auto_parallel"):
        comm.Mapping(4, 3, tp_size=4, auto_parallel=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 4, "tp_size": 2}, "world_size: got 4; allowed: 2"),
        ({"world_size": 4, "tp_size": 4, "moe_ep_size": 3, "moe_tp_size": 1}, "moe_tp_size \\* moe_ep_size"),
        ({"world_size": 2, "tp_size": 2, "attn_tp_size": 2, "attn_cp_size": 2}, "attn_tp_size \\* attn_cp_size: got 4"),
        ({"world_size": 2, "tp_size": 2, "moe_cluster_size": 4}, "moe_tp_size \\* moe_ep_size.* got 0; allowed: 2"),
        ({"rank": 1}, "rank: got 1; allowed: 0 to 0"),
        ({"tp_size": 0}, "^tp_size: got 0; allowed: 1 or more"),
        ({"moe_ep_size": 0}, "^moe_ep_size: got 0"),
        ({"cp_size": "2"}, "^cp_size: got '2'; allowed: an integer"),
        ({"gpus_per_node": None}, "^gpus_per_node: got None"),
    ],
)
def test_sizes_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        comm.Mapping(**options)


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (comm.Mapping(2, tp_size=2).pp_layers, (2.0,), "num_layers"),
        (comm.Mapping(2, tp_size=2).get_node_rank, (None,), "rank"),
        (comm.get_pcie_ipc_launch_config, (2, "8192", 2), "numel"),
        (comm.get_pcie_ipc_all_gather_launch_config, (float("nan"), 8), "world_size"),
        (comm.decode_cp_a2a_workspace_size, ("2",), "cp_size"),
        (comm.compute_fp4_swizzled_layout_sf_size, (None, 16), "total_row"),
        (comm.decide_ulysses_backend, ("auto", "nothing"), "topologies"),
    ],
)
def test_what_is_no_number_is_refused_by_name(function, arguments, name):
    with pytest.raises(ValueError, match=f"^{name}: got "):
        function(*arguments)


def test_a_rank_may_be_set_within_the_world():
    m = comm.Mapping(2, tp_size=2)
    m.rank = 1
    assert m.tp_rank == 1
    with pytest.raises(ValueError, match="rank: got 2"):
        m.rank = 2


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_nothing_is_recorded_for_gradients(group, device):
    """Of rows and weights that learn: results do not, and a workspace's memory keeps no graph."""
    if device.type == "cuda":
        torch.cuda.set_device(device)

    def learning(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    one, ids = comm.Mapping(), torch.randint(4, (5, 2), dtype=torch.int32, device=device)
    reducing = comm.create_allreduce_fusion_workspace("auto", 1, 0, 8, 64, torch.bfloat16)
    exchange = comm.MoeAlltoAll(one, 8, 2, 4, hidden_size=64)
    heads = comm.decode_cp_a2a_allocate_mnnvl_workspace(one)
    sequences = comm.UlyssesCommunicator(max_elems=4096, dtype=torch.bfloat16)
    results = [
        comm.allreduce_fusion(
            learning(5, 64), reducing, comm.AllReduceFusionPattern.kARResidualRMSNorm, residual_in=learning(5, 64),
            rms_gamma=torch.nn.Parameter(torch.ones(64, device=device)),
        ),
        *exchange.dispatch(ids, [learning(5, 64), ids], 8),
        exchange.combine(learning(1, 8, 64), 8),
        *comm.decode_cp_a2a_alltoall(learning(3, 1, 64), learning(3, 1, 2, dtype=torch.float32), heads, 0, 1),
        comm.decode_cp_a2a_lse_reduce(learning(3, 1, 64), learning(3, 1, dtype=torch.float32), heads, 0, 1),
        sequences.scatter_heads(learning(1, 4, 2, 8), out=learning(1, 4, 2, 8).detach()),
        quantized_all_reduce(learning(512), group),
    ]  # fmt: skip
    assert not [result for result in results if result.requires_grad]
    # Again, in the memory of before.
    assert not exchange.dispatch(ids, [learning(5, 64)], 8)[0].requires_grad


def test_a_group_of_torch(group):
    backend = comm.TorchDistBackend()
    assert (backend.Get_rank(), backend.Get_size()) == (0, 1)
    assert backend.allgather({"a": 1}) == [{"a": 1}] and backend.bcast([2], 0) == [2]
    backend.barrier()
    assert backend.Split(3, 0).Get_size() == 1
    assert comm.all_ranks_agree(backend, 1) and not comm.all_ranks_agree(backend, 0)


def test_memory_is_freed_by_a_destroy_that_raises(group, monkeypatch):
    """What went wrong in an all-reduce does not keep the memory of the other collectives."""
    ws, freed = comm.PcieIpcAllReduceWorkspace(group, 64), []

    def late():
        raise TimeoutError("all-reduce: rank 1")

    monkeypatch.setattr(ws._reduce.link, "settle", late)
    monkeypatch.setattr(ws._blocks, "close", lambda: freed.append("blocks"))
    monkeypatch.setattr(ws._reduce.link, "close", lambda: freed.append("reduce"))
    with pytest.raises(TimeoutError, match="rank 1"):
        ws.destroy()
    assert sorted(freed) == ["blocks", "reduce"]


def test_without_torch_distributed():
    with pytest.raises(RuntimeError, match="init_process_group"):
        comm.TorchDistBackend()


class Alone(comm.CommBackend):
    """A backend of one's own, which is no process group."""

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 1

    def allgather(self, data):
        return [data]

    def bcast(self, data, root):
        return data

    def barrier(self):
        pass

    def Split(self, color, key):
        return self


def test_a_backend_of_ones_own(device):
    ws = comm.create_allreduce_fusion_workspace(
        max_token_num=4, hidden_dim=64, dtype=torch.float32, comm_backend=Alone(), world_size=1
    )
    x = torch.randn(4, 64, device=device)
    assert torch.equal(comm.allreduce_fusion(x, ws, comm.AllReduceFusionPattern.kAllReduce), x)


def test_results_of_an_all_reduce_are_apart(device):
    """In the place of an input, or in memory of their own."""
    kinds = comm.AllReduceFusionPattern
    ws = comm.create_allreduce_fusion_workspace("trtllm", 1, 0, 8, 64, torch.float32)
    memory = torch.zeros(3, 6, 64, device=device)
    x, residual, normed = memory[:, :5]

    def run(**given):
        x.copy_(torch.arange(5.0)[:, None])
        return comm.allreduce_fusion(
            input=x, workspace=ws, residual_in=residual, rms_gamma=torch.ones(64, device=device),
            **dict(pattern=kinds.kARResidualRMSNorm) | given,
        )  # fmt: skip

    expected = run(residual_out=torch.empty_like(x), norm_out=normed).clone()
    assert torch.equal(run(residual_out=residual, norm_out=x), expected)
    residual.zero_()
    for name, given in (
        ("norm_out", dict(norm_out=normed, residual_out=normed)), ("norm_out", dict(norm_out=memory[0, 1:])),
        ("residual_out", dict(norm_out=normed, residual_out=memory[1, 1:])),
        ("output", dict(norm_out=normed, output=memory[0, 1:])),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}: got .*the memory of "):
            run(**given)
    order = torch.arange(5, dtype=torch.int32, device=device).flip(0)[:, None].contiguous()
    with pytest.raises(ValueError, match="^norm_out: got some of the memory of input"):
        run(norm_out=x, pattern=kinds.kMoEFinalizeARResidualRMSNorm, expanded_idx_to_permuted_idx=order)


def test_memory_of_one_rank(device):
    memory = comm.McastGPUBuffer(64, 1, 0, device)
    memory.lamport_initialize(0, torch.float32)
    values = memory.get_unicast_buffer((2, 3), torch.float32, 4)
    assert values.shape == (2, 3) and bool((values == 0).all()) and bool(values.signbit().all())
    assert values.data_ptr() == memory.get_unicast_ptr(0) + 16
    assert memory.get_buffer_ptrs_dev() != 0
    with pytest.raises(ValueError, match="sizes: got"):
        memory.get_unicast_buffer((17,), torch.float32)
    for ask in (memory.get_multicast_ptr, lambda: memory.get_multicast_buffer((1,), torch.float32)):
        with pytest.raises(RuntimeError, match="no multicast address"):
            ask()


def test_workspaces_by_upstreams_names():
    made = comm.TRTLLMAllReduceFusionWorkspace(1, 0, 8, 64, torch.float32)
    assert isinstance(made, comm.AllReduceFusionWorkspace) and (made.backend, made.tp_size) == ("trtllm", 1)
    known = {"tp_rank": 0, "tp_size": 1, "max_token_num": 8, "hidden_dim": 64, "use_fp32_lamport": True}
    assert made.metadata == known and (made.mc_ptr != 0) == torch.cuda.is_available()
    need = comm.MNNVLAllReduceFusionWorkspace.get_required_buffer_size_bytes(1, 8, 64, torch.bfloat16)
    sized = comm.MNNVLAllReduceFusionWorkspace(comm.Mapping(), buffer_size_in_bytes=need)
    assert sized.backend == "mnnvl" and sized.is_buffer_size_sufficient(1, 8, 64, torch.bfloat16)
    strategy = MNNVLAllreduceFusionStrategy.ONESHOT
    assert sized.is_buffer_size_sufficient(1, 8, 64, torch.bfloat16, strategy)
    assert not comm.MNNVLAllReduceFusionWorkspace(comm.Mapping(), 8, 64, torch.bfloat16).is_buffer_size_sufficient(
        1, 1 << 20, 64, torch.bfloat16
    )
    auto = comm.create_allreduce_fusion_workspace("mnnvl", 1, 0, 8, 64, torch.float16)
    assert isinstance(auto, comm.MNNVLAllReduceFusionWorkspace)
    for options in ({"max_num_tokens": 8}, {"buffer_size_in_bytes": 0}):
        with pytest.raises(ValueError, match="hidden_dim: got None|buffer_size_in_bytes: got 0"):
            comm.MNNVLAllReduceFusionWorkspace(comm.Mapping(), **options)


def test_mnnvl_memory_of_one_rank():
    MnnvlMemory.initialize()
    MnnvlMemory.set_comm_from_config(comm.Mapping(), comm.MnnvlConfig(comm_backend=Alone()))
    assert MnnvlMemory.initialized and isinstance(MnnvlMemory.get_comm(comm.Mapping()), Alone)
    memory = MnnvlMemory(comm.Mapping(), 4096)
    values = memory.as_torch_strided_tensor(torch.float32)
    assert values.shape == (1, 1024) and values.data_ptr() == memory.ptr == memory.addresses[0]
    assert not bool(values.any()) and memory.mapped and memory.rank_stride == 0
    MnnvlMemory.new_mnnvl_memory_address(comm.Mapping(), 1)
    assert MnnvlMemory.current_rank_stride == MnnvlMemory.fabric_page_size
    MnnvlMemory.close_mnnvl_memory(memory.ptr)
    assert not memory.mapped
    with pytest.raises(ValueError, match="size: got 0"):
        MnnvlMemory.open_mnnvl_memory(comm.Mapping(), 0)
    with pytest.raises(ValueError, match="mapping.tp_size: got 2"):
        MnnvlMemory.open_mnnvl_memory(comm.Mapping(2, tp_size=2), 16)
    MnnvlMemory.comm = None
    if not torch.cuda.is_available():
        assert not MnnvlMemory.supports_mnnvl()
        with pytest.raises(RuntimeError, match="there is no GPU"):
            MnnvlMemory.get_allocation_granularity(0)


def test_a_machine_without_gpus_has_no_fabric():
    if not torch.cuda.is_available():
        assert not comm.is_mnnvl_fabric_supported(0) and not comm.is_multicast_supported(0)
        assert comm.probe().transport == "collective"


@pytest.mark.gpu
def test_what_the_driver_says():
    assert comm.is_mnnvl_fabric_supported(0) in (True, False)
    assert comm.is_multicast_supported(0) in (True, False)
    with pytest.raises(ValueError, match="device_idx"):
        comm.is_multicast_supported(99)
    assert comm.probe().transport == "peer"
