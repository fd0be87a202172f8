"""Packed libraries beside our rows: right, wrong, raising, dying, hanging and slow ones, on a CPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashinfer.cli import main
from flashinfer.testing import interleaved

ROOT = Path(__file__).resolve().parents[2]

ROWS = """
import torch
from flashinfer.testing.bench import Case, Target, Work

def doubled(device, row="double"):
    x = torch.randn(64)
    def check(out):
        assert torch.equal(out, 2 * x), "wrong result"
    return Work(lambda x: x + x, (x,), bytes=512, check=check, given={"x": x, "row": row})

def cases(device):
    yield Case("double", doubled, "group", (Target("good", 0.0001),), problem="double")
    def brings(device):
        work = doubled(device, "again")
        peers = {"its own": lambda x: x * 2, "its wrong one": Work(lambda x: x, work.inputs, check=work.check)}
        return Work(work.run, work.inputs, check=work.check, given=work.given, peers=peers)
    yield Case("double again", brings, problem="double")
    yield Case("nobody's", doubled, problem="nobody's")
    yield Case("plain", doubled)
    def wrong(device):
        work = doubled(device)
        return Work(lambda x: x, work.inputs, check=work.check, given=work.given)
    yield Case("ours is wrong", wrong, problem="other")
"""
LIBRARIES = {
    "good": "def double(x): return 2 * x",
    "also-good": "print('noise'); import os; os.system('echo noise')\ndef double(x): return x.add(x)",
    "wrong": "def double(x): return 3 * x",
    "raising": "def double(x): raise ValueError('x: only on ' + __file__)",
    "dying": "import os\ndef double(x): os._exit(7)",
    "hanging": "import time\ndef double(x): time.sleep(1000)",
    "slow": "import time\ndef double(x): time.sleep(0.02); return 2 * x",
    "unloadable": "import a_module_that_is_not_there",
    "without-adapter": "",
}
ADAPTER = """
import peer_{0} as peer

def double(given):
    return {{"": lambda: peer.double(given["x"])}}

PROBLEMS = {{"double": double}}
"""
# Two ways, one of which is wrong; and a row that ours gets wrong.
TWO_WAYS = """
import peer_also_good as peer

PROBLEMS = {
    "double": lambda given: {"right": lambda: peer.double(given["x"]), "wrong": lambda: given["x"]},
    "other": lambda given: {"alone": lambda: peer.double(given["x"])},
}
"""


@pytest.fixture
def folders(tmp_path):
    """A folder of packed libraries and one of benchmarks, with adapters for all but one of them."""
    files = {"rooms/doubles/bench_doubles.py": ROWS}
    for name, text in LIBRARIES.items():
        stem = name.replace("-", "_")
        files[f"packed/{name}/peer_{stem}.py"] = text
        if name != "without-adapter":
            files[f"rooms/peers/{stem}.py"] = TWO_WAYS if name == "also-good" else ADAPTER.format(stem)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def beside(folders, *words):
    """Run the script that needs no package of the command line; what it printed, and the result that it kept."""
    given = ["doubles", "--peers", "packed", "--benchmarks", "rooms", "--out", "out", "--device", "cpu", *words]
    # as on a machine where these are not installed
    hidden = "import sys, runpy; sys.modules.update(click=None, rich=None); sys.argv = sys.argv[1:]"
    script = f"{hidden}; runpy.run_path(sys.argv[0], run_name='__main__')"
    path = str(ROOT / "benchmarks" / "beside.py")
    done = subprocess.run(
        [sys.executable, "-c", script, path, *given], cwd=folders, text=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = (folders / "out").glob("doubles-*.json")
    return done.stdout, json.loads(file.read_text())


@pytest.mark.matrix
def test_each_library_has_its_time_or_the_name_of_its_error(folders):
    table, result = beside(folders, "--limit", "20", "--seconds", "200")
    rows = {row["name"]: row for row in result["cases"]}
    assert rows.keys() == {"double", "double again", "ours is wrong"}
    row = rows["double"]
    assert row["p10"] <= row["us"] <= row["p90"] and row["bound"] == "copy"
    timed = {name: peer for name, peer in row["peers"].items() if "us" in peer}
    assert timed.keys() == {"good", "also-good/right", "slow"}
    for peer in timed.values():
        assert peer["p10"] <= peer["us"] <= peer["p90"] and peer["driven"] == "wall"
        assert peer["samples"] >= interleaved.ROUNDS * 4
        assert peer["ratio"] == pytest.approx(peer["us"] / peer["ours"]["us"])
    assert timed["slow"]["us"] > 2e4 and timed["good"]["us"] < 2e4
    assert result["not_loaded"].keys() == {"unloadable"}
    assert result["not_loaded"]["unloadable"].startswith("ModuleNotFoundError: No module named")
    wrong = {name: peer["error"] for name, peer in row["peers"].items() if "error" in peer}
    for name, start in {
        "wrong": "AssertionError: wrong result", "also-good/wrong": "AssertionError: wrong result",
        "raising": "ValueError: x: only on peer_raising.py",
        "dying": "its process ended: status 7", "hanging": "its process ended: no answer in",
    }.items():  # fmt: skip
        assert wrong.pop(name).startswith(start)
    assert not wrong and str(folders) not in json.dumps(result)
    again = rows["double again"]["peers"]
    assert again["hanging"]["error"] == row["peers"]["hanging"]["error"]
    assert again["its own"]["us"] > 0 and again["its own"]["samples"] >= interleaved.ROUNDS * 4
    assert again["its wrong one"]["error"].startswith("AssertionError: wrong result")
    # ours gets it wrong, the library does not, and is timed alone
    alone = rows["ours is wrong"]
    assert alone["error"].startswith("AssertionError: wrong result") and "us" not in alone
    assert alone["peers"]["also-good/alone"]["us"] > 0 and "ratio" not in alone["peers"]["also-good/alone"]
    assert [target["met"] for target in row["targets"]] == [True]
    assert "ratio above 1" in table and "not there" not in table and "slow" in table


@pytest.mark.matrix
def test_what_there_is_no_time_for_says_so(folders):
    start = time.monotonic()
    _, result = beside(folders, "--names", "good,hanging", "--seconds", "8", "--limit", "60")
    assert time.monotonic() - start < 40
    assert "error" in result["cases"][-1]["peers"]["hanging"]


@pytest.mark.matrix
def test_the_command_adds_libraries_to_its_result(folders):
    for name in set(LIBRARIES) - {"good", "wrong"}:
        (folders / "rooms" / "peers" / f"{name.replace('-', '_')}.py").unlink(missing_ok=True)
    words = ["bench", "doubles", "--device", "cpu", "--benchmarks", str(folders / "rooms"), "--json"]
    done = CliRunner().invoke(main, [*words, "--peers", str(folders / "packed")])
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(done.stdout)["cases"]}
    assert rows["double"]["peers"]["good"]["ratio"] > 0 and rows["plain"]["us"] > 0
    assert rows["double"]["peers"]["wrong"]["error"].startswith("AssertionError")
    assert rows["plain"]["peers"] == rows["nobody's"]["peers"] == {}


def test_libraries_are_found_by_name(folders):
    packed, rooms = folders / "packed", folders / "rooms"
    found = interleaved.packed(packed, rooms)
    assert set(found) == set(LIBRARIES) - {"without-adapter"}
    assert list(interleaved.packed(packed, rooms, ("slow", "good"))) == ["slow", "good"]
    with pytest.raises(ValueError, match="peers: got 'without-adapter'; allowed: also-good"):
        interleaved.packed(packed, rooms, ("without-adapter",))
    with pytest.raises(ValueError, match="peers: got 'rooms'; allowed: a folder of libraries"):
        interleaved.packed(rooms, rooms)


def test_spread():
    assert interleaved.spread([float(x) for x in range(100, -1, -1)]) == {"us": 50, "p10": 10, "p90": 90}
