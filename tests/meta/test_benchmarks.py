"""How benchmarks count, compare and quote: operations, bytes, checks of results, targets, docs/performance.md."""

import importlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo

from flashinfer.cli import figures, plots
from flashinfer.cli.bench import rooms
from flashinfer.testing import bench

# Torch's compiler knows factories by identity: it is there before guards stand in their place.
assert torch._dynamo
ROOT = Path(__file__).resolve().parents[2]


ROOMS = rooms(ROOT / "benchmarks")
# Peers that compute on GPUs alone: torch's block scales, alone and in groups, and cuDNN.
GPU_PEERS = ("fp8 1x128, 128x128 4x128x256: torch", "torch/one by one", "torch/scales of rows", "cudnn")


@pytest.mark.matrix
@pytest.mark.parametrize("room", ROOMS)
def test_rows_compute_and_are_right(room):
    device = torch.device("cpu")
    for case in bench.load(ROOMS[room])["cases"](device):
        work = case.make(device)
        result = work.run(*work.inputs)
        if work.check is not None:
            work.check(result)
        for name, peer in work.peers.items():
            peer = peer if isinstance(peer, bench.Work) else bench.Work(peer, work.inputs)
            if not (f"{case.name}: {name}" in GPU_PEERS or name.startswith(GPU_PEERS)):
                result = peer.run(*peer.inputs)
                if peer.check is not None:
                    peer.check(result)


def test_files_that_benchmarks_import_have_different_names():
    names = [file.stem for file in (ROOT / "benchmarks").rglob("*.py")]
    assert len(names) == len(set(names))


@pytest.fixture(scope="module")
def attention():
    """The modules of benchmarks/attention, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks" / "attention")
        yield importlib.import_module


CASES = {
    "full": dict(requests=2, q_len=5, kv_len=9),
    "causal": dict(requests=2, q_len=7, kv_len=7, causal=True),
    "chunk": dict(requests=1, q_len=3, kv_len=11, causal=True, head_dim_qk=24, head_dim_vo=16),
    "pages": dict(requests=3, q_len=20, kv_len=37, causal=True, page_size=16),
    "decode": dict(requests=3, q_len=1, kv_len=33, page_size=16),
    "window": dict(requests=2, q_len=9, kv_len=12, causal=True, window_left=3),
    "odd pages": dict(requests=2, q_len=2, kv_len=10, causal=True, page_size=3),
}
SMALL = dict(name="", qo_heads=4, kv_heads=2, head_dim_qk=16, head_dim_vo=16)


@pytest.fixture(params=CASES)
def case(request, attention):
    workload = attention("workload")
    a = workload.Attention(**{**SMALL, **CASES[request.param]})
    return workload, a, workload.tensors(a, torch.device("cpu"))


def visible(a, row, key):
    stands = a.kv_len - a.q_len + row
    return not a.causal or (key <= stands and (a.window_left < 0 or key >= stands - a.window_left))


def test_operations_and_bytes_are_those_of_a_count(case):
    workload, a, t = case
    pairs = a.requests * sum(visible(a, row, key) for row in range(a.q_len) for key in range(a.kv_len))
    assert workload.visible_pairs(a) == pairs
    assert workload.flops(a) == pairs * a.qo_heads * (2 * a.head_dim_qk + 2 * a.head_dim_vo)
    keys = a.requests * a.kv_len * a.kv_heads * (a.head_dim_qk + a.head_dim_vo) * t.keys[0].itemsize
    assert workload.moved_bytes(a) == keys + t.q.nbytes + workload.poisoned_out(a, t.q.device).nbytes


def loops(workload, a, t):
    """float64 attention, row by row."""
    out = torch.empty(len(t.q), a.qo_heads, a.head_dim_vo, dtype=torch.float64)
    for request in range(a.requests):
        k, v = workload.rows_of_keys(a, t, request)
        for row in range(a.q_len):
            seen = [key for key in range(a.kv_len) if visible(a, row, key)]
            for head in range(a.qo_heads):
                kv_head = head * a.kv_heads // a.qo_heads
                q = t.q[request * a.q_len + row, head].double()
                weights = (k[seen, kv_head].double() @ q * a.head_dim_qk**-0.5).softmax(0)
                out[request * a.q_len + row, head] = weights @ v[seen, kv_head].double()
    return out


def test_the_truth_is_attention(case):
    workload, a, t = case
    expected = loops(workload, a, t).view(a.requests, a.q_len, a.qo_heads, -1)
    assert torch.allclose(workload.truth(a, t).double(), expected, rtol=1e-4, atol=1e-5)


def test_a_wrong_result_is_seen(case):
    workload, a, t = case
    out = loops(workload, a, t).bfloat16()
    check = partial(workload.check, a, workload.truth(a, t))
    check(out)
    for spoil in (torch.nan, 0.0):
        for row, head in ((0, 0), (-1, -1)):
            wrong = out.clone()
            wrong[row, head] = spoil
            with pytest.raises(AssertionError, match="wrong result"):
                check(wrong)
    with pytest.raises(AssertionError, match="wrong result"):
        check(1.05 * out)


def test_what_is_not_written_is_seen(case, attention):
    workload, a, t = case
    check = partial(workload.check, a, workload.truth(a, t))
    run = attention("through_api").Runner(a, t, "auto")
    with pytest.raises(AssertionError, match="wrong result"):
        check(run.inputs[-1])
    check(run(*run.inputs))
    with pytest.raises(AssertionError, match="wrong result"):
        check(attention("through_api").Runner(a, t, "auto").inputs[-1])


def test_a_float8_row_is_right(attention):
    workload = attention("workload")
    types = dict(q_dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn")
    a = workload.Attention(**SMALL, requests=2, q_len=20, kv_len=33, causal=True, **types)
    t = workload.tensors(a, torch.device("cpu"))
    run = attention("through_api").Runner(a, t, "auto")
    workload.check(a, workload.truth(a, t), run(*run.inputs))


def test_every_tile_of_long_queries_is_checked(attention):
    workload = attention("workload")
    rows = workload.sampled_rows(workload.Attention("", 1, 16384, 16384))
    assert rows[0] == 0 and rows[-1] == 16383 and rows.diff().max() <= 64


def test_pages_hold_every_key_once(attention):
    workload = attention("workload")
    a = workload.Attention(**SMALL, requests=3, q_len=1, kv_len=33, page_size=16)
    t = workload.tensors(a, torch.device("cpu"))
    assert sorted(t.kv_indices.tolist()) == list(range(9)) and t.last_page_len.tolist() == [1, 1, 1]
    fp8 = replace(a, kv_dtype="float8_e4m3fn")
    keys = workload.rows_of_keys(fp8, workload.tensors(fp8, torch.device("cpu")), 1)
    assert all(x.shape == (33, 2, 16) and x.dtype == torch.float8_e4m3fn for x in keys)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_rows_have_names_and_targets_that_exist(attention, on_gpu):
    rows = attention("rows").rows(on_gpu)
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    known = {*names, "copy", "matmul", "TFLOP/s", "us", "peers", "flashinfer", "cudnn"}
    assert {of for row in rows for of, _ in row.targets} <= known


def test_torch_is_a_peer_where_it_can_state_the_row(attention):
    workload, sdpa = attention("workload"), attention("sdpa")
    a = workload.Attention(**SMALL, requests=2, q_len=64, kv_len=64, causal=True)
    t = workload.tensors(a, torch.device("cpu"))
    check = partial(workload.check, a, workload.truth(a, t))
    works = sdpa.works(a, t, check)
    ways = {f"{backend}/{heads}" for backend in ("cudnn", "flash") for heads in ("gqa", "expanded")}
    assert works.keys() == ways | {"naive"}
    works["naive"].check(works["naive"].run(*works["naive"].inputs))
    measured = bench.checked_time(works["flash/expanded"], torch.device("cpu"))
    assert measured.get("us", 0) > 0, measured
    several = workload.Attention(**SMALL, requests=2, q_len=1, kv_len=32, page_size=16)
    chunk = workload.Attention(**SMALL, requests=1, q_len=4, kv_len=32, causal=True)
    assert sdpa.works(several, workload.tensors(several, torch.device("cpu")), check) == {}
    t = workload.tensors(chunk, torch.device("cpu"))
    works = sdpa.works(chunk, t, partial(workload.check, chunk, workload.truth(chunk, t)))
    assert {name.split("/")[0] for name in works} == {"flash", "naive"}
    works["naive"].check(works["naive"].run(*works["naive"].inputs))


def settled(rows, targets, copy=1000.0, matmul=100.0):
    rows = [{"name": f"row {i}", "group": "", "headline": True, "peers": {}, **row} for i, row in enumerate(rows)]
    cases = [bench.Case(row["name"], None, targets=tuple(bench.Target(*t) for t in targets)) for row in rows]
    bench.settle(rows, cases, {"copy_gb_s": copy, "bf16_tflop_s": matmul})
    return rows


@pytest.mark.parametrize(
    ("of", "value", "reached"),
    [
        ("copy", 0.9, 0.5), ("matmul", 0.2, 0.3), ("TFLOP/s", 40, 30), ("us", 9, 10), ("us", 11, 10),
        ("peers", 1.5, 0.8), ("cudnn", 1.1, 2.0), ("nothing", 1.0, None), ("row 0", 1.0, 1.0),
    ],
)  # fmt: skip
def test_targets(of, value, reached):
    peers = {"cudnn/gqa": {"us": 30.0}, "cudnn/expanded": {"us": 20.0}, "flash": {"us": 8.0}, "other": {"error": "no"}}
    (row,) = settled([{"us": 10.0, "gb_s": 500.0, "tflop_s": 30.0, "peers": peers}], [(of, value)])
    (target,) = row["targets"]
    assert target["reached"] == (None if reached is None else pytest.approx(reached))
    assert target["met"] is (reached is not None and (reached <= value if of == "us" else reached >= value))
    assert (row["bound"], row["percent"]) == ("copy", pytest.approx(50))
    assert peers["cudnn/gqa"]["ratio"] == pytest.approx(3) and "ratio" not in peers["other"]


def test_a_row_without_a_time_meets_nothing():
    (row,) = settled([{"error": "UnsupportedConfig: no", "peers": {"cudnn": {"us": 1.0}}}], [("us", 9), ("peers", 1)])
    assert [(t["reached"], t["met"]) for t in row["targets"]] == [(None, False)] * 2
    assert "ratio" not in row["peers"]["cudnn"]


def test_what_is_wrong_or_refused_has_an_error_and_no_time():
    def wrong(result):
        assert result == 2, "wrong result"

    device = torch.device("cpu")
    found = bench.checked_time(bench.Work(lambda: 1, check=wrong), device)
    assert found.keys() == {"error"} and found["error"].startswith("AssertionError: wrong result")
    refused = bench.checked_time(bench.Work(lambda: torch.zeros(1).view(2)), device)
    assert refused.keys() == {"error"} and refused["error"].startswith("RuntimeError: ")
    assert bench.checked_time(bench.Work(lambda: 2, check=wrong), device)["us"] > 0


def result(rows):
    return {
        "room": "attention", "device": "card", "date": "2000-01-01", "versions": {"torch": "1", "cudnn": None},
        "ceilings": {"copy_gb_s": 1000.0, "bf16_tflop_s": 100.0}, "cases": rows,
    }  # fmt: skip


def test_figures_name_the_fastest_way_and_what_refused(tmp_path):
    peers = {"cudnn/gqa": {"us": 30.0}, "cudnn/expanded": {"us": 20.0}, "flashinfer": {"error": "not installed"}}
    rows = settled([{"us": 10.0, "gb_s": 500.0, "peers": peers}, {"error": "UnsupportedConfig: no", "peers": {}}], [])
    columns, lines = figures.table(rows)
    first, second = (dict(zip(columns, line)) for line in lines)
    assert first["cudnn"] == "2.00x, 20 us (expanded)" and first["flashinfer"] == "not installed"
    assert (first["time"], first["speed"], first["of ceiling"]) == ("10 us", "0.5 TB/s", "50.0 %")
    assert second["time"] == "UnsupportedConfig: no" and second["cudnn"] == ""

    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    (folder / "attention-card.json").write_text(json.dumps(result(rows)))
    text = figures.quoted(folder)
    assert "| row 0 | 10 us | 0.5 TB/s | 50.0 % | 2.00x (expanded) |  |" in text and "| row 1 | refused |" in text
    assert "## Attention, card\n\n2000-01-01; torch 1. " in text and "copy 1.00 TB/s, bf16 matmul 100 TFLOP/s" in text
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "performance.md").write_text(f"before\n{figures.BEGIN}\nold\n{figures.END}\nafter\n")
    assert figures.generated(tmp_path) == f"before\n{figures.BEGIN}\n\n{text}\n\n{figures.END}\nafter\n"


def test_a_library_counts_where_it_was_measured_last():
    """By row and card: what only the older result has beside a row stays."""
    peers = {"cudnn/gqa": {"us": 5.0}, "cudnn/expanded": {"us": 4.0}, "flashinfer": {"us": 5.0}}
    old = result(settled([{"us": 10.0, "peers": peers}], []))
    new = result(settled([{"us": 10.0, "peers": {"cudnn": {"us": 20.0}}}], [])) | {"date": "2000-01-02"}
    other = new | {"date": "2000-01-03", "device": "another card"}
    kept = figures.latest([old, new, other])
    assert [(x["date"], list(x["cases"][0]["peers"])) for x in kept] == [
        ("2000-01-01", ["flashinfer"]), ("2000-01-02", ["cudnn"]), ("2000-01-03", ["cudnn"])
    ]  # fmt: skip
    assert list(old["cases"][0]["peers"]) == list(peers)


def test_plots_show_each_library_and_leave_out_what_is_no_peer(tmp_path):
    peers = {"cudnn/gqa": {"us": 30.0}, "flashinfer": {"us": 20.0}, "copy of its bytes": {"us": 5.0}}
    alone = {"us": 10.0, "peers": {"torch loop, bf16": {"us": 99}}}
    rows = settled([{"us": 10.0, "gb_s": 500.0, "peers": peers}, alone], [])
    assert plots.draw(result(rows), tmp_path / "panel.svg") and plots.draw_ratios([result(rows)], tmp_path / "all.svg")
    panel, ratios = ((tmp_path / name).read_text() for name in ("panel.svg", "all.svg"))
    assert "row 0" in panel and "this package" in panel and "cudnn" in panel
    assert "row 0" in ratios and "2.00" in ratios and "row 1" not in ratios and "copy" not in ratios
    again = tmp_path / "again.svg"
    assert plots.draw(result(rows), again) and again.read_bytes() == (tmp_path / "panel.svg").read_bytes()


def test_rows_that_another_library_does_faster_are_listed_the_worst_first(tmp_path):
    times = {
        "first": {"cudnn/gqa": 9.0, "cudnn/expanded": 5.0, "flash": 8.0},  # the fastest way of the fastest library
        "second": {"flashinfer": 2.5},
        "as fast": {"cudnn": 9.9},
        "alone": {"copy of its bytes": 1.0, "torch loop, bf16": 1.0},  # no libraries
        "all-reduce, one shot, 1 MiB": {"nccl": 1.0},  # one call with the next row, which is faster than nccl
        "all-reduce, two shots, 1 MiB": {"nccl": 20.0},
    }
    rows = [{"us": 10.0, "peers": {name: {"us": us} for name, us in peers.items()}} for peers in times.values()]
    rows = [row | {"name": name, "headline": False} for row, name in zip(settled(rows, []), times)]
    (tmp_path / "attention-card.json").write_text(json.dumps(result(rows)))
    lines = [line for line in figures.quoted(tmp_path).splitlines() if line.startswith("|")]
    assert lines[2:] == [
        "| second | card | 10 us | flashinfer | 2.5 us | 0.25x |",
        "| first | card | 10 us | cudnn (expanded) | 5 us | 0.50x |",
    ]


def test_durations_are_written_for_readers():
    assert [figures.time(us) for us in (4.534, 372.4, 1250, 99_000, 3_140_000)] == [
        "4.53 us", "372 us", "1.25 ms", "99 ms", "3.14 s",
    ]  # fmt: skip


def test_the_page_quotes_the_results_of_the_repository():
    assert (ROOT / figures.PAGE).read_text() == figures.generated(ROOT), "run python -m flashinfer.cli.figures"
