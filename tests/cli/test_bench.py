"""`flashinfer bench` on a CPU: rooms, folders of rooms, results, and a peer that shares this package's name."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashinfer.cli import main

ROOT = Path(__file__).resolve().parents[2]

# A peer whose functions are right, wrong, missing, refusing, dying or too slow. It and its compilers print a lot.
PEER = """
import contextlib, os, time
import torch

__version__ = "9.9"
os.system("echo noise of a compiler")
print("noise")
tuned = False

@contextlib.contextmanager
def autotune(*choice):
    global tuned
    tuned = True
    yield

def rmsnorm(x, w, out=None):
    return torch.nn.functional.rms_norm(x, w.shape, w, 1e-6)

def layernorm(x, gamma, beta):
    if not tuned:
        raise ValueError("x: only on a Blackwell")
    return x

def gemma_rmsnorm(x, w):
    return torch.zeros_like(x)

def silu_and_mul(x):
    os._exit(7)

def gelu_and_mul(x):
    time.sleep(100)
"""
ROWS = """
import flashinfer
import torch
from flashinfer.testing.bench import Case, Target, Work
from flashinfer.testing.compare import assert_close

X, W = torch.randn(4, 64), torch.rand(64)

def right(out):
    truth = torch.nn.functional.rms_norm(X.double(), [64], W.double(), 1e-6)
    assert_close(out, torch.nn.functional.rms_norm(X, [64], W, 1e-6), truth)

def cases(device):
    yield Case("right", lambda d: Work(flashinfer.rmsnorm, (X, W), bytes=2048, check=right), "group")
    yield Case("right too", lambda d: Work(flashinfer.rmsnorm, (X, W)))
    yield Case("missing", lambda d: Work(flashinfer.fused_add_rmsnorm, (X.clone(), X.clone(), W)))
    yield Case("refusing", lambda d: Work(flashinfer.layernorm, (X.bfloat16(), W, W)))
    yield Case("wrong", lambda d: Work(flashinfer.gemma_rmsnorm, (X, W - 1), check=right))
    yield Case("dying", lambda d: Work(flashinfer.silu_and_mul, (X,)))
    yield Case("slow", lambda d: Work(flashinfer.gelu_and_mul, (X,)))
    yield Case("slow too", lambda d: Work(flashinfer.gelu_and_mul, (X,)))
    two = {"a": lambda d: Work(flashinfer.rmsnorm, (X, W)), "b": lambda d: Work(flashinfer.layernorm, (X, W, W))}
    yield Case("two ways", two["a"], ways=lambda d: {name: make(d) for name, make in two.items()})
"""
UNLOADED = """
from flashinfer import gelu_tanh_and_mul
from helper import X
from flashinfer.testing.bench import Case, Work

def cases(device):
    yield Case("unloaded", lambda d: Work(gelu_tanh_and_mul, (X,), link=8))

def ceilings(device):
    return {"link_gb_s": 2.0}
"""
TIMED = ("right", "right too", "two ways")
ALONE = """
from flashinfer.testing.bench import Case, Work

def cases(device):
    yield Case("no device", lambda d: 1 / 0)
    yield Case("alone", lambda d: Work(abs, (1,)), ways=lambda d: {})
"""


@pytest.fixture
def bench(tmp_path):
    """Runs the command on a folder of small benchmarks with that peer; gives what it prints."""
    files = {
        "peer/flashinfer/__init__.py": PEER,
        "peer/flashinfer/testing/__init__.py": "",
        "rooms/norms/rows/bench_rows.py": ROWS,
        "rooms/norms/unloaded/bench_unloaded.py": UNLOADED,
        "rooms/norms/helper.py": "import torch\nX = torch.randn(4, 64)\n",
        "rooms/alone/bench_alone.py": ALONE,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def run(*words, status=0):
        given = ["bench", "--device", "cpu", "--benchmarks", str(tmp_path / "rooms"), "--json", *words]
        done = CliRunner().invoke(main, given)
        assert done.exit_code == status, done.output
        return json.loads(done.stdout)

    return run


def kept(tmp_path, room):
    (file,) = tmp_path.glob(f"rooms/results/{room}-*.json")
    return json.loads(file.read_text())


@pytest.mark.matrix
def test_rooms_of_a_folder_are_one_result_beside_the_peer(bench, tmp_path):
    norms, alone = bench("norms", "alone", "--peer", str(tmp_path / "peer"), "--peer-limit", "3")
    assert kept(tmp_path, "norms") == norms and kept(tmp_path, "alone") == alone
    assert norms["versions"]["flashinfer (peer)"] == "9.9" and norms["ceilings"]["link_gb_s"] == 2
    rows = {row["name"]: row for row in norms["cases"]}
    assert [rows[name]["group"] for name in ("right", "missing", "unloaded")] == ["rows, group", "rows", "unloaded"]
    assert all(row["us"] > 0 for row in rows.values())
    assert rows["unloaded"]["bound"] == "link"
    assert rows["unloaded"]["percent"] == pytest.approx(100 * 8 / rows["unloaded"]["us"] / 1e3 / 2)

    peer = rows["right"]["peers"]["flashinfer"]
    assert peer["ratio"] == pytest.approx(peer["us"] / rows["right"]["us"])
    assert rows["two ways"]["peers"]["flashinfer/a"]["us"] > 0
    answers = {name: row["peers"]["flashinfer"] for name, row in rows.items() if name not in TIMED}
    answers["b"] = rows["two ways"]["peers"]["flashinfer/b"]
    for name, start in {
        "missing": "AttributeError: ", "refusing": "ValueError: x: only", "wrong": "AssertionError: ",
        "dying": "its process ended: status 7", "slow": "its process ended: no answer in 3 s",
        # of the same kind: not tried
        "slow too": "its process ended: no answer in 3 s",
        "unloaded": "ImportError: ", "b": "ValueError: x: only",
    }.items():  # fmt: skip
        assert answers.pop(name)["error"].startswith(start)
    assert not answers
    rows = {row["name"]: row for row in alone["cases"]}
    assert rows["no device"]["error"].startswith("ZeroDivisionError") and "us" not in rows["no device"]
    assert rows["alone"]["us"] > 0 and rows["alone"]["peers"] == {}


def test_building_times_nothing_and_survives_what_dies(bench, tmp_path):
    found = bench("alone", "norms/rows", "--match", "i", "--peer", str(tmp_path / "peer"), "--build-peer")
    assert not (tmp_path / "rooms" / "results").exists()
    rows = found["norms/rows"]
    assert rows.keys() == {"right", "right too", "missing", "refusing", "dying"}
    assert found["alone"].keys() == {"no device"}
    # of rows that begin with the same word one is built
    assert rows["right too"] == {}
    assert rows["dying"][""]["error"].startswith("its process ended")
    # what was running beside it ends with it, and is not lost
    for row, start in (("right", "its process"), ("refusing", "ValueError: x: only"), ("missing", "AttributeError")):
        (answer,) = rows[row].values()
        assert answer.get("built", -1) >= 0 or answer["error"].startswith((start, "its process ended"))


def test_the_peers_tuner_has_the_first_call(bench, tmp_path):
    words = ["--match", "two ways", "--peer", str(tmp_path / "peer"), "--tune-peer"]
    result = bench("norms", *words)
    assert result["versions"]["flashinfer (peer)"] == "9.9, tuned"
    assert result["cases"][0]["peers"]["flashinfer/b"]["us"] > 0


def test_what_is_no_room_row_or_peer_is_refused(bench, tmp_path):
    assert bench() == ["alone", "norms/rows", "norms/unloaded"]
    assert bench("norm", status=2)["error"].startswith("room: got 'norm'; allowed: alone, norms/rows")
    assert bench("alone", "--match", "x", status=2)["error"].startswith("--match: got 'x'")
    assert bench("alone", "--build-peer", status=2)["error"].startswith("--peer: got none")
    assert "cannot be imported" in bench("alone", "--peer", str(tmp_path / "nowhere"), status=1)["error"]
    # what was measured before is there
    assert [row["name"] for row in kept(tmp_path, "alone")["cases"]] == ["no device", "alone"]
    twice = tmp_path / "rooms" / "norms" / "again" / "bench_again.py"
    twice.parent.mkdir()
    twice.write_text(ALONE.replace("alone", "right"))
    assert bench("norms", status=2)["error"] == "room: 'norms' has rows of the same name: right"


@pytest.mark.matrix
def test_attention_in_this_package_twice(tmp_path):
    words = ["--device", "cpu", "--out", str(tmp_path), "--json", "--match", "paged decode", "--peer", str(ROOT)]
    done = CliRunner().invoke(main, ["bench", "attention", *words])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["cases"]
    assert row["us"] > 0 and row["group"] == "decode"
    for way in ("fa2", "fa3"):
        # A name of upstream's prefers: on a CPU both are the reference.
        peer = row["peers"][f"flashinfer/{way}"]
        assert peer["ratio"] == pytest.approx(peer["us"] / row["us"])
    assert [target["text"] for target in row["targets"]] == [">= 0.96 x copy"]
