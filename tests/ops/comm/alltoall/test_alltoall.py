"""The all-to-all of experts and of blocks: kernels in one process, ranks as processes, faults, bad input."""

import re

import pytest
import torch

from flashinfer import comm
from flashinfer.comm import _exchange as public
from flashinfer.comm import comm_backend, dcp_alltoall
from flashinfer.ops.comm.alltoall import config, space
from tests.ops.comm import processes, simulate
from tests.ops.comm.alltoall import cases, ranks

RANKS = "tests.ops.comm.alltoall.ranks"


@pytest.fixture
def in_one_process(monkeypatch):
    """Exchanges of all ranks in this process, whose calls run when all have been made."""
    recorders = {name: simulate.Recorder(getattr(public.room, name)) for name in ("moe_dispatch", "moe_combine")}
    for name, recorder in recorders.items():
        monkeypatch.setattr(public.room, name, recorder)

    def make(world, most=8):
        monkeypatch.setattr(space, "connect", simulate.connector([]))
        made = []
        for rank in range(world):
            ranks = simulate.Ranks(rank, world)
            monkeypatch.setattr("flashinfer.comm.trtllm_moe_alltoall.ranks_of_experts", lambda *_, r=ranks: r)
            mapping = comm.Mapping(world_size=world, rank=rank, tp_size=world, moe_ep_size=world)
            made.append(
                comm.MoeAlltoAll(
                    mapping, most, cases.TOP_K, world * cases.PER, hidden_size=2 * cases.HIDDEN,
                    eplb_stats_num_experts=5,
                )  # fmt: skip
            )
        return made

    make.dispatch, make.combine = recorders["moe_dispatch"].run, recorders["moe_combine"].run
    return make


@pytest.mark.parametrize(("world", "tokens"), [(2, (5, 3)), (3, (8, 0, 1))])
def test_kernels_in_one_process(in_one_process, world, tokens):
    exchanges = in_one_process(world)
    for seed, dtype in enumerate((torch.float16, torch.float32)):
        everyone = [cases.inputs(rank, world, tokens[rank], dtype, seed=seed) for rank in range(world)]
        stats = torch.arange(5 * world, dtype=torch.int32).view(world, 5) + 100 * seed
        received = [
            a.dispatch(each[1], cases.payloads(*each), 8, eplb_local_stats=stats[rank])
            for rank, (a, each) in enumerate(zip(exchanges, everyone, strict=True))
        ]
        in_one_process.dispatch()
        assert all(torch.equal(a.eplb_gathered_stats, stats) for a in exchanges)
        results = []
        for rank, (a, got) in enumerate(zip(exchanges, received, strict=True)):
            a.check()
            comm.moe_a2a_sanitize_expert_ids(got[1], a.workspace, a.metainfo, rank, cases.INVALID)
            cases.check_received(got, rank, everyone)
            y = cases.compute(got, rank).to(dtype)
            in_place = seed == 1
            if in_place:
                y = a.get_combine_payload_tensor_in_workspace(8, cases.HIDDEN, dtype).copy_(y)
            results.append(a.combine(y, 8, payload_in_workspace=in_place, output_dtype=torch.float32))
        in_one_process.combine()
        for rank, (a, out) in enumerate(zip(exchanges, results, strict=True)):
            a.check()
            cases.check(out, rank, everyone, world)


def test_a_rank_that_does_not_come_is_named(in_one_process):
    exchanges = in_one_process(2)
    x, ids, _ = cases.inputs(0, 2, 4, torch.float32)
    received = exchanges[0].dispatch(ids, [x, ids], 4)
    in_one_process.dispatch()
    assert bool(received[0].isnan().all()) and bool((received[1] == -1).all())
    assert exchanges[0]._space.counts.tolist() == [0, 0]
    with pytest.raises(TimeoutError, match="dispatch: rank 0 waited 0.5 s for rank 1 in exchange 1"):
        exchanges[0].combine(torch.zeros(2, 4, cases.HIDDEN), 4)


@pytest.mark.parametrize("end", ["check", "checkpoint_prepare", "destroy"])
def test_a_combine_without_the_others_is_nan(in_one_process, end):
    exchanges = in_one_process(2)
    x, ids, _ = cases.inputs(0, 2, 4, torch.float32)
    for each in exchanges:
        each.dispatch(ids, [x], 4)
    in_one_process.dispatch()
    out = torch.full((4, cases.HIDDEN), 777.0)
    exchanges[0].combine(torch.zeros(2, 4, cases.HIDDEN), 4, output=out)
    in_one_process.combine()
    assert bool(out.isnan().all())
    with pytest.raises(TimeoutError, match="combine: rank 0 waited 0.5 s for rank 1 in exchange 2"):
        getattr(exchanges[0], end)()
    exchanges[0].destroy()


def test_blocks_in_one_process(monkeypatch):
    world, found = 3, []
    monkeypatch.setattr(dcp_alltoall, "connect", simulate.connector(found))
    recorder = simulate.Recorder(dcp_alltoall.room.alltoall)
    monkeypatch.setattr(dcp_alltoall.room, "alltoall", recorder)
    workspaces = []
    for rank in range(world):
        monkeypatch.setattr(comm_backend, "Ranks", lambda backend=None, r=rank: simulate.Ranks(r, world))
        monkeypatch.setattr(dcp_alltoall, "TorchDistBackend", lambda: simulate.Sized(world))
        mapping = comm.Mapping(world_size=world, rank=rank, cp_size=world)
        workspaces.append(comm.decode_cp_a2a_allocate_mnnvl_workspace(mapping))
    o, s = torch.randn(2, world, 40).half(), torch.randn(2, world, 2)
    out = torch.zeros_like(o), torch.zeros_like(s)
    comm.decode_cp_a2a_alltoall(o, s, workspaces[1], 1, world, out=out)
    recorder.run()
    assert all(bool(t.isnan().all()) for t in out)
    with pytest.raises(TimeoutError, match="all-to-all: rank 1 waited 0.5 s for rank [02] in exchange 1"):
        comm.decode_cp_a2a_alltoall(o, s, workspaces[1], 1, world)
    for link in found:
        link.reset()
    for d in (40, 5):
        o, s = torch.randn(world, 2, world, d).half(), torch.randn(world, 2, world, 2)
        got = [comm.decode_cp_a2a_alltoall(o[r], s[r], workspaces[r], r, world) for r in range(world)]
        recorder.run()
        for rank in range(world):
            assert torch.equal(got[rank][0], o[:, :, rank].transpose(0, 1))
            assert torch.equal(got[rank][1], s[:, :, rank].transpose(0, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_processes_on_gpus(tmp_path, world):
    _needs(world)
    assert processes.run(world, f"{RANKS}:layers", tmp_path, device="cuda") == [["peer"]] * world
    processes.run(world, f"{RANKS}:killed", tmp_path, 2.0, device="cuda", killed=(world - 1,))


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_processes_that_share_a_gpu(tmp_path, world):
    assert processes.run(world, f"{RANKS}:layers", tmp_path, device="cuda:0") == [["peer"]] * world


def _needs(world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, and there are {torch.cuda.device_count()}")


def alone(device, most=8, **options):
    mapping = comm.Mapping()
    options = {"hidden_size": 2 * cases.HIDDEN} | options
    return comm.MoeAlltoAll(mapping, most, cases.TOP_K, cases.PER, **options)


def test_a_group_of_one(device):
    a = alone(device)
    everyone = [cases.inputs(0, 1, 6, torch.bfloat16, device)]
    received = a.dispatch(everyone[0][1], cases.payloads(*everyone[0]), 8, cases.INVALID, 1)
    cases.check_received(received, 0, everyone)
    out = a.combine(cases.compute(received, 0).bfloat16(), 8)
    cases.check(out, 0, everyone, 1)
    a.checkpoint_prepare()
    a.checkpoint_restore(None)
    assert a.dispatch(everyone[0][1], [everyone[0][0]], 8)[0].shape == (1, 8, cases.HIDDEN)


def test_layers_take_turns_with_one_workspace(device):
    """SGLang makes an object for each layer, with the same sizes."""
    first, second, larger = alone(device), alone(device), alone(device, 9)
    at = first.workspace.data_ptr()
    assert second.workspace.data_ptr() == at != larger.workspace.data_ptr()
    everyone = [cases.inputs(0, 1, 6, torch.float32, device)]
    given = everyone[0][1], cases.payloads(*everyone[0]), 8
    y = torch.zeros(1, 8, cases.HIDDEN, device=device)
    for layer in (first, second, first, larger):
        received = layer.dispatch(*given, cases.INVALID, 1)
        cases.check_received(received, 0, everyone)
        cases.check(layer.combine(cases.compute(received, 0), 8), 0, everyone, 1)
    first.dispatch(*given)
    with pytest.raises(RuntimeError, match="a combine comes after a dispatch, the last one with the workspace"):
        second.combine(y, 8)
    received = second.dispatch(*given, cases.INVALID, 1)
    with pytest.raises(RuntimeError, match="a combine comes after a dispatch, the last one with the workspace"):
        first.combine(y, 8)
    with pytest.raises(RuntimeError, match="is known after a dispatch"):
        first.get_combine_payload_tensor_in_workspace(8, cases.HIDDEN, torch.float32)
    first.destroy()
    with pytest.raises(RuntimeError, match="its memory is given up"):
        first.dispatch(*given)
    cases.check(second.combine(cases.compute(received, 0), 8), 0, everyone, 1)
    first.destroy()
    second.destroy()
    with pytest.raises(RuntimeError, match="its memory is given up"):
        _ = second.workspace


def test_one_object_gives_memory_up_for_all_that_have_it(device):
    first, second = alone(device), alone(device)
    everyone = [cases.inputs(0, 1, 6, torch.float32, device)]
    given = everyone[0][1], cases.payloads(*everyone[0]), 8
    first.checkpoint_prepare()
    second.checkpoint_prepare()
    with pytest.raises(RuntimeError, match="its memory is given up"):
        second.dispatch(*given)
    meanwhile = alone(device)
    second.checkpoint_restore(None)
    at = first.workspace.data_ptr()
    first.checkpoint_restore(None)
    assert at == first.workspace.data_ptr() == second.workspace.data_ptr() != meanwhile.workspace.data_ptr()
    cases.check_received(first.dispatch(*given, cases.INVALID, 1), 0, everyone)


def test_the_older_function_alone(device):
    ranks.older(0, 1, device)


def test_functions(device):
    size = comm.moe_a2a_get_workspace_size_per_rank(1, 8, cases.HIDDEN * 4 + 12, cases.HIDDEN * 4)
    made = comm.MoeAlltoAll.get_workspace(size, 0, 1, 8, comm.Mapping())
    workspace, shape = made["workspace"], (1, 8, cases.HIDDEN)
    meta = comm.moe_a2a_initialize(workspace, 0, 1, 8)
    everyone = [cases.inputs(0, 1, 6, torch.float32, device)]
    x, ids, weights = everyone[0]
    got, at, none = comm.moe_a2a_dispatch(ids, [x, ids, weights], workspace, meta, 8, 0, 1, cases.TOP_K, cases.PER)
    assert none is None
    place = comm.moe_a2a_wrap_payload_tensor_in_workspace(workspace, [1, 8], at, at + 8 * cases.HIDDEN * 4, x.dtype)
    place.copy_(cases.compute(got, 0).view(shape))
    out = comm.moe_a2a_combine(place, 6, workspace, meta, 8, 0, 1, cases.TOP_K, at, payload_in_workspace=True)
    cases.check(out, 0, everyone, 1)


@pytest.mark.parametrize("in_place", [False, True])
def test_rows_may_be_rounded_before_they_are_added(in_one_process, in_place):
    """Two ranks' rows, each in e4m3; what is larger than e4m3 has becomes its largest."""
    exchanges, everyone = in_one_process(2), [cases.inputs(rank, 2, 5, torch.float32) for rank in range(2)]
    for a, (x, ids, _) in zip(exchanges, everyone, strict=True):
        a.dispatch(ids, [x, ids], 8, expert_id_payload_index=1)
    in_one_process.dispatch()
    rows = [torch.randn(2, 8, cases.HIDDEN) * 200 for _ in exchanges]
    outs = []
    for a, y in zip(exchanges, rows, strict=True):
        if in_place:
            y = a.get_combine_payload_tensor_in_workspace(8, cases.HIDDEN, y.dtype).copy_(y)
        outs.append(a.combine(y, 8, payload_in_workspace=in_place, use_low_precision=True))
    in_one_process.combine()
    narrow = [y.clamp(-448, 448).to(torch.float8_e4m3fn).double() for y in rows]
    for rank, (out, (_, ids, _)) in enumerate(zip(outs, everyone, strict=True)):
        # On each rank a token that went there has the next of this rank's rows.
        total = torch.zeros(5, cases.HIDDEN, dtype=torch.float64)
        for there, given in enumerate(narrow):
            went = ((ids >= 0) & (ids // cases.PER == there)).any(1)
            total[went] += given[rank, : int(went.sum())]
        torch.testing.assert_close(out.double(), total, rtol=1e-6, atol=0)


X = torch.zeros(4, cases.HIDDEN)
IDS = torch.zeros(4, cases.TOP_K, dtype=torch.int32)
BAD = [
    ((IDS.long(), [X], 4), "token_selected_experts: got torch.int64"),
    ((IDS[:, :2], [X], 4), "token_selected_experts: got (4, 2)"),
    ((IDS, [X], 3), "token_selected_experts: got 4 tokens; allowed: at most 3"),
    ((IDS, [X], 9), "runtime_max_tokens_per_rank: got 9; allowed: 1 to 8"),
    ((IDS, [], 4), "input_payloads: got 0 tensors"),
    ((IDS, [X[:3]], 4), "input_payloads[0]: got (3, 48)"),
    ((IDS, [X] * 5, 8), "workspace: got"),
    ((IDS, [X], 4, 99), "expert_id_payload_index: got None"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[m[:30] for _, m in BAD])
def test_bad_dispatches(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        alone("cpu").dispatch(*arguments)


def test_bad_combines():
    a, y = alone("cpu"), torch.zeros(1, 4, cases.HIDDEN)
    # Upstream asserts some of it, and raises for the rest.
    for kind in (RuntimeError, AssertionError):
        with pytest.raises(kind, match="a combine comes after a dispatch"):
            a.combine(y, 4)
    a.dispatch(IDS, [X], 4)
    for kind in (RuntimeError, AssertionError):
        with pytest.raises(kind, match="a dispatch waits for its combine"):
            a.dispatch(IDS, [X], 4)
    for change, message in (
        ({"payload": y[:, :3]}, "payload: got (1, 3, 48)"),
        ({"payload": y.int()}, "payload: got torch.int32"),
        ({"payload_in_workspace": True}, "payload_in_workspace: got True"),
        ({"output_scales": y}, "output_scales: got"),
        ({"output_scalar_scale": 2.0}, "output_scalar_scale: got 2.0; allowed: 1.0"),
        ({"output": torch.zeros(3, cases.HIDDEN)}, "output: got torch.float32 (3, 48)"),
        ({"runtime_max_tokens_per_rank": 5}, "runtime_max_tokens_per_rank: got 5; allowed: 4"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            a.combine(**{"payload": y, "runtime_max_tokens_per_rank": 4} | change)
    with pytest.raises(ValueError, match="workspace: got a tensor of another origin"):
        comm.moe_a2a_initialize(torch.zeros(1, 100), 0, 1, 8)


def test_large_rows_of_blocks_are_refused():
    ws = comm.decode_cp_a2a_allocate_mnnvl_workspace(comm.Mapping())
    o, s = torch.zeros(2, 1, config.ROUND // 2, dtype=torch.half), torch.zeros(2, 1, 2)
    with pytest.raises(ValueError, match="partial_o: got rows of"):
        comm.decode_cp_a2a_alltoall(o, s, ws, 0, 1)
    with pytest.raises(ValueError, match="softmax_stats: got torch.float16"):
        comm.decode_cp_a2a_alltoall(o[..., :8], s.half(), ws, 0, 1)
    with pytest.raises(ValueError, match="cp_rank: got 1; allowed: 0"):
        comm.decode_cp_a2a_init_workspace(ws, 1, 1)
    memory = torch.zeros(4, 1, 2)
    for i, out in enumerate(((memory[1:3], torch.zeros(2, 1, 2)), (memory[2:], memory[2:]))):
        with pytest.raises(ValueError, match=rf"^out\[{i}\]: got .*the memory of "):
            comm.decode_cp_a2a_alltoall(memory[:2], s, ws, 0, 1, out=out)


@pytest.mark.parametrize("name", ["top_k", "num_experts"])
@pytest.mark.parametrize("count", [0, -1, 1.5])
def test_counts_are_positive(name, count):
    counts = dict(top_k=2, num_experts=4) | {name: count}
    with pytest.raises(ValueError, match=f"^{name}: got {count}; allowed: an int"):
        comm.MoeAlltoAll(comm.Mapping(), 8, hidden_size=64, **counts)
