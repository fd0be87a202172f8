"""The log of calls: what each level writes, where, and dumps that are read without being trusted."""

import json
import os
import pickle
import re
from pathlib import Path

import pytest
import torch

import flashinfer
from flashinfer import api_logging
from flashinfer._core import call_dump, call_log, env
from tests.cli.test_cli import document, invoke

CALLS = """
import torch, flashinfer
from flashinfer.norm import fused_add_rmsnorm
x = torch.arange(256.0).view(4, 64).T.contiguous().T
x[0, 0], x[1, 1] = torch.nan, torch.inf
weight, out = torch.ones(64), torch.empty(4, 64)
flashinfer.rmsnorm(x, weight, out=out)
fused_add_rmsnorm(x, x.clone(), weight)
wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 16, dtype=torch.uint8))
table = lambda *values: torch.tensor(values, dtype=torch.int32)
wrapper.plan(table(0, 1, 3), table(0, 1, 2), table(3, 4), 4, 2, 64, 16, q_data_type=torch.float32)
wrapper.run(torch.randn(2, 4, 64), torch.randn(3, 2, 16, 2, 64))
try:
    flashinfer.rmsnorm(x, weight[:3])
except ValueError:
    pass
# A name with an argument filled in.
flashinfer.single_prefill_with_kv_cache_return_lse(torch.randn(3, 2, 64), *torch.randn(2, 5, 2, 64))
"""
NAMES = [
    "rmsnorm", "fused_add_rmsnorm", "BatchDecodeWithPagedKVCacheWrapper.__init__",
    "BatchDecodeWithPagedKVCacheWrapper.plan", "BatchDecodeWithPagedKVCacheWrapper.run", "rmsnorm",
    "single_prefill_with_kv_cache",
]  # fmt: skip


@pytest.fixture(scope="session")
def run(run_python):
    def ran(program=CALLS, **variables):
        done = run_python(program, **{f"FLASHINFER_{name}": str(value) for name, value in variables.items()})
        assert done.returncode == 0, done.stderr
        return done

    return ran


def calls(text):
    return re.findall(r"^\[\d{4}-\d\d-\d\d [\d:]{8}\] FlashInfer API Call: (.*)$", text, re.MULTILINE)


def test_level_1_names_the_calls_of_callers(run):
    out = run(LOGLEVEL=1).stdout
    assert calls(out) == NAMES and "Tensor" not in out
    assert "Error: rmsnorm: WrongArgument: weight: got (3,)" in out


def test_level_5_adds_shapes_values_and_what_ran(tmp_path, run):
    done = run(LOGLEVEL=5, LOGDEST=tmp_path / "log%i")
    (log,) = tmp_path.iterdir()
    assert log.name.removeprefix("log").isdecimal() and not done.stdout
    text = log.read_text()
    assert calls(text) == NAMES
    first = text.split("FlashInfer API Return")[0]
    given = "input input: Tensor shape=(4, 64) stride=(1, 4) dtype=torch.float32 device=cpu strided"
    assert f"{given} min=1 max=255 mean=" in first and "nan=1 inf=1" in first
    assert "ran rmsnorm on cpu: variant reference" in text and "Problem(kind='rmsnorm'" in text


def test_level_3_writes_before_the_call(run):
    """Nothing of it is lost if the call ends the process."""
    program = "import os, torch\nfrom flashinfer.api_logging import flashinfer_api\n"
    program += "@flashinfer_api\ndef ends(weight):\n    os._exit(0)\nends(torch.ones(64))"
    out = run(program, LOGLEVEL=3).stdout
    assert "input weight: Tensor shape=(64,) stride=(1,)" in out and "min=" not in out and "Return" not in out


@pytest.mark.parametrize("value, level", [("0", 0), ("", 0), ("1", 1), ("2", 1), ("4", 3), ("5", 5), ("99", 10),
                                          ("-1", 0), ("yes", 0), ("debug", 0), ("1.5", 0), (" 3 ", 3)])  # fmt: skip
def test_any_value_is_a_level(value, level, monkeypatch):
    monkeypatch.setenv("FLASHINFER_LOGLEVEL", value)
    assert env.api_level() == level


def test_level_that_is_none_of_them_is_said_once(run):
    done = run("import flashinfer, flashinfer.norm", LOGLEVEL="loud")
    assert done.stderr.count("FLASHINFER_LOGLEVEL: got 'loud', which is taken for 0") == 1


def test_off_means_nothing_is_wrapped_or_imported(run):
    program = "import sys, flashinfer; {}; print('flashinfer.api_logging' in sys.modules)"
    assert run(program.format("flashinfer.rmsnorm"), LOGLEVEL="0").stdout.strip() == "False"

    def plain():
        return 3

    assert api_logging.flashinfer_api(plain) is plain
    assert api_logging.flashinfer_api(trace=5)(plain) is plain and plain.trace_template == 5
    assert not hasattr(flashinfer.rmsnorm, "is_logged")


def test_statistics_of_parts(monkeypatch):
    x = torch.randn(3, 50, 7).transpose(0, 2)
    x[0, 0, 0] = torch.nan
    whole = call_log._statistics(x)
    monkeypatch.setattr(call_log, "_PART", 16)
    assert call_log._statistics(x)[:30] == whole[:30] and "nan=1" in whole
    assert sorted(v for part in call_log._parts(x) for v in part.flatten().tolist() if v == v) == sorted(
        v for v in x.flatten().tolist() if v == v
    )


def test_statistics_without_values():
    """What has no values to read is named, and the fault of a kernel before it is not hidden by that."""
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert "does not read values of torch.float4_e2m1fn_x2" in call_log._statistics(packed)
    assert "meta" in call_log._statistics(torch.empty(3, device="meta"))


def test_statistics_raise_faults(monkeypatch):
    def fails(x):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(call_log, "_parts", fails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        call_log._statistics(torch.ones(3))


# -- dumps ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dumps(tmp_path_factory, run):
    folder = tmp_path_factory.mktemp("dumps")
    run(LOGLEVEL=10, LOGDEST="stderr", DUMP_DIR=folder)
    return folder


def test_dumped_calls_run_again(dumps):
    found = document("replay", "--dir", dumps, "--device", "cpu")
    assert [row["function"] for row in found] == NAMES and {row["state"] for row in found} == {"equal"}
    assert "weight: got (3,)" in found[-2]["detail"]
    one = next(path for path in dumps.iterdir() if "fused" in path.name)
    assert [row["state"] for row in document("replay", "--dir", one)] == ["equal"]


def test_another_result_is_reported(dumps, tmp_path):
    folder = tmp_path / "altered"
    for path in dumps.glob("*_call*"):
        if "rmsnorm_call0001" in path.name:
            (folder / path.name).mkdir(parents=True)
            for part in path.iterdir():
                (folder / path.name / part.name).write_bytes(part.read_bytes())
    for path in folder.glob("*_call*"):
        tensors = torch.load(path / "outputs.pt", weights_only=True)
        torch.save({name: x + 1 for name, x in tensors.items()}, path / "outputs.pt")
    found = document("replay", "--dir", folder, status=1)
    assert {row["state"] for row in found} == {"different"} and "written" in found[-1]["detail"]


def test_limits(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FLASHINFER_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_DUMP_MAX_COUNT", "2")
    dumps = call_dump.Dumps()
    made = [dumps.begin(name, f"m:{name}", {"x": torch.ones(3)}, None) for name in ("a", "a", "b")]
    assert made[2] is None and [made[i].folder.name[-6:] for i in (0, 1)] == ["ll0001", "ll0002"]
    assert len(list(tmp_path.glob("*_call*"))) == 2 and "no more calls are dumped" in caplog.text
    monkeypatch.setenv("FLASHINFER_DUMP_MAX_SIZE_GB", "1e-6")
    dumps = call_dump.Dumps()
    assert dumps.begin("big", "m:big", {"x": torch.ones(300)}, None) is None
    small = dumps.begin("small", "m:small", {"x": torch.ones(200)}, None)
    small.end(torch.ones(200))
    assert not (small.folder / "outputs.pt").exists()
    assert "result not saved" in (small.folder / "metadata.jsonl").read_text().splitlines()[-1]


def test_patterns(monkeypatch):
    names = ("rmsnorm", "fused_add_rmsnorm", "Wrapper.plan", "Wrapper.run")
    monkeypatch.setenv("FLASHINFER_DUMP_EXCLUDE", "fused*")
    assert [name for name in names if call_dump.wanted(name)] == ["rmsnorm", "Wrapper.plan", "Wrapper.run"]
    monkeypatch.setenv("FLASHINFER_DUMP_INCLUDE", "*rmsnorm, *.run")
    assert [name for name in names if call_dump.wanted(name)] == ["rmsnorm", "Wrapper.run"]


def test_log_that_cannot_be_written_never_costs_the_call(tmp_path, run):
    (tmp_path / "file").write_text("")
    program = "import torch, flashinfer; print(flashinfer.rmsnorm(torch.ones(2, 64), torch.ones(64)).sum().item())"
    done = run(program, LOGLEVEL=10, LOGDEST=tmp_path / "file" / "log", DUMP_DIR=tmp_path / "file")
    assert done.stderr.count("a call of rmsnorm could not be logged") == 3
    assert float(done.stdout) == pytest.approx(128, 1e-3)


class Planted:
    def __reduce__(self):
        return os.mkdir, (os.environ["PLANTED"],)


@pytest.mark.parametrize("change", ["pickle", "place", "private", "enum", "deep", "record"])
def test_dump_is_not_trusted(change, dumps, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED", str(tmp_path / "planted"))
    (source,) = (path for path in dumps.iterdir() if re.search(r"pid\d+_rmsnorm_call0001", path.name))
    call = tmp_path / "call"
    call.mkdir()
    for part in source.iterdir():
        (call / part.name).write_bytes(part.read_bytes())
    record = json.loads((call / "metadata.jsonl").read_text().splitlines()[-1])
    if change == "pickle":
        (call / "inputs.pt").write_bytes(pickle.dumps({"input": Planted()}, protocol=2))
    elif change == "place":
        record["place"] = "os:mkdir"
    elif change == "private":
        record["place"] = "flashinfer._core.kernel_cache:clear"
    elif change == "enum":
        record["inputs"]["eps"] = {"enum": "Planted", "name": "x"}
    elif change == "deep":
        record["inputs"] = [1]
    (call / "metadata.jsonl").write_text(json.dumps(record) if change != "record" else "[" * 100_000)
    (row,) = document("replay", "--dir", tmp_path, status=1)
    assert row["state"] == "skipped" and row["detail"] and not (tmp_path / "planted").exists()


def test_no_dump_is_an_error(tmp_path):
    assert "no dump" in document("replay", "--dir", tmp_path, status=1)["error"]
    assert "--dir" in invoke("replay", status=2).stderr


def test_arguments_survive_the_way_through_a_file():
    view = torch.arange(24.0).view(4, 6)[:, ::2]
    given = {
        "same": (view, view), "list": [1, 2.5, float("inf"), None, True, "text"], "dtype": torch.float8_e4m3fn,
        "dict": {"a": torch.ones(2, dtype=torch.bfloat16)}, "device": torch.device("cpu"),
        "enum": flashinfer.SfLayout.layout_linear,
    }  # fmt: skip
    tensors = {}
    tree = json.loads(json.dumps({name: call_dump._encoded(value, name, tensors) for name, value in given.items()}))
    assert len(tensors) == 2
    kept = {name: call_dump._copied(x) for name, x in tensors.items()}
    enums = {"SfLayout": flashinfer.SfLayout}
    back = {name: call_dump.decoded(value, kept, enums, torch.device("cpu")) for name, value in tree.items()}
    assert back["same"][0] is back["same"][1] and torch.equal(back["same"][0], view)
    assert back["same"][0].shape == view.shape and isinstance(back["same"], tuple)
    assert back["list"] == given["list"] and type(back["list"][4]) is bool
    assert (back["dtype"], back["device"], back["enum"]) == (given["dtype"], given["device"], given["enum"])
    with pytest.raises(call_dump.NotKept, match="object"):
        call_dump.decoded(call_dump._encoded(object(), "x", {}), {}, {}, torch.device("cpu"))


def test_package_path_is_not_in_a_dump(dumps):
    assert not any(str(Path(flashinfer.__file__).parent) in p.read_text() for p in dumps.glob("*/metadata.jsonl"))
