"""The commands: what they print for programs, their exit status, and their errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click import Group
from click.testing import CliRunner

import flashinfer
from flashinfer._core import env
from flashinfer.cli import checkout, main
from flashinfer.ops import all_ops

COMMANDS = (
    "demo", "show-config", "explain", "precompile", "cache", "bench", "doctor", "collect-env", "replay", "list-modules",
    "module-status", "clear-cache", "export-compile-commands", "download-kernels", "download-cubin",
    "install-cubin-wheel", "install-jit-cache-wheel", "list-cubins", "clear-cubin",
)  # fmt: skip


def invoke(*words, status=0):
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == status, result.output
    return result


def document(*words, status=0):
    """What a command prints with --json: stdout is one JSON document and nothing else."""
    return json.loads(invoke(*words, "--json", status=status).stdout)


def leaves(command=main, words=()):
    if not isinstance(command, Group):
        yield words
        return
    context = command.make_context("flashinfer", [], resilient_parsing=True)
    for name in command.list_commands(context):
        yield from leaves(command.get_command(context, name), (*words, name))


def test_the_commands_are_those_that_the_help_lists():
    listed = re.findall(r"^  ([a-z-]+)  ", invoke("--help").stdout.split("Commands:")[1], re.MULTILINE)
    assert tuple(listed) == COMMANDS


@pytest.mark.parametrize("words", list(leaves()), ids=" ".join)
def test_every_command_has_help_and_json(words):
    text = invoke(*words, "--help").stdout
    assert "--json" in text and "Usage: " in text


@pytest.mark.parametrize(
    "program", [[sys.executable, "-m", "flashinfer"], [sys.executable, "-c", "from flashinfer.cli import main; main()"]]
)
def test_both_ways_to_start(program):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*program, "--version"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and flashinfer.__version__ in done.stdout


def test_unknown_command_is_a_usage_error():
    assert "nothing" in invoke("nothing", status=2).stderr
    assert "did you mean precompile?" in invoke("precompil", status=2).stderr


@pytest.mark.parametrize("words", [("bench", "norm"), ("replay", "--dir", "nowhere")])
@pytest.mark.parametrize("device", ["tpu", "cuda:99", "gpu"])
def test_an_unknown_device_is_a_value_that_is_not_allowed(words, device):
    error = document(*words, "--device", device, status=2)["error"]
    assert error.startswith(f"--device: got '{device}'; allowed: cpu")


def test_show_config(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    found = document("show-config")
    assert found["flashinfer"] == flashinfer.__version__
    assert found["cache"] == str(tmp_path / ".cache" / "flashinfer" / flashinfer.__version__)
    values = {variable["name"]: variable["value"] for variable in found["environment"]}
    assert values.keys() == {v.name for v in env.VARIABLES} and values["FLASHINFER_WORKSPACE_BASE"] == str(tmp_path)
    assert found["devices"][0]["arch"]
    assert str(tmp_path) in invoke("show-config").stdout.replace("\n", "")


class TestExplain:
    def test_lists_the_ops(self):
        listed = {entry["op"]: entry for entry in document("explain")}
        assert {"decode", "prefill", "rmsnorm"} <= listed.keys()
        assert listed["rmsnorm"]["variants"][-1] == "reference"
        assert listed["rmsnorm"]["fields"].keys() == listed["rmsnorm"]["example"].keys()
        assert "rmsnorm" in invoke("explain").stdout

    def test_says_what_runs_on_each_kind_of_device(self):
        on_gpu = document("explain", "rmsnorm", "block=2048", "gemma=true", "--arch", "90a")
        assert (on_gpu["variant"], on_gpu["arch"]) == ("portable", "90a")
        assert on_gpu["problem"]["block"] == 2048 and on_gpu["problem"]["gemma"] is True
        assert on_gpu["config"]["num_warps"] > 0
        on_cpu = document("explain", "rmsnorm", "--arch", "cpu")
        assert on_cpu["variant"] == "reference" and "CPU" in on_cpu["refused"]["portable"]
        text = invoke("explain", "rmsnorm", "block=2048", "--arch", "90a").stdout
        assert "rmsnorm on 90a: portable" in text and re.search(r"block +2048 +given", text)

    @pytest.mark.parametrize("op", sorted(all_ops()))
    def test_catalog_values_are_known_and_fields_documented(self, op):
        rows = {row["field"]: row for row in document("explain", op, "--fields")}
        for problem in all_ops()[op].catalog():
            for name, row in rows.items():
                value = getattr(problem, name)
                assert not isinstance(value, str) or not row["values"] or value in row["values"], (name, value)
        if op in ("prefill", "decode", "mla", "rmsnorm"):
            assert all(row["meaning"] for row in rows.values()), op

    @pytest.mark.parametrize(
        ("words", "named"),
        [
            (["nothing"], ["op", "'nothing'", "rmsnorm"]),
            (["decod"], ["op", "'decod'", "did you mean decode?"]),
            (["decode", "group"], ["setting", "'group'", "allowed: FIELD=VALUE, the fields aligned"]),
            (["decode", "head_dim_kq=64"], ["head_dim_kq=64", "did you mean head_dim_qk"]),
            (["decode", "mask=casual"], ["mask", "'casual'", "did you mean causal?"]),
            (["decode", "q_dtype=bfloat16"], ["q_dtype", "'bfloat16'", "bf16"]),
            (["decode", "source=heap"], ["source", "'heap'", "paged, ragged"]),
            (["decode", "group=-4"], ["group", "-4"]),
            (["rmsnorm", "dtype=fp99"], ["dtype", "'fp99'", "allowed: bf16"]),
            (["rmsnrom"], ["op", "allowed: (did you mean rmsnorm?) act_and_mul"]),
            (["rmsnorm", "blok=1"], ["'blok=1'", "block"]),
            (["rmsnorm", "block"], ["'block'"]),
            (["rmsnorm", "block=x"], ["block", "'x'", "int"]),
            (["rmsnorm", "gemma=perhaps"], ["gemma", "'perhaps'", "true"]),
            (["rmsnorm", "--backend", "nothing"], ["backend", "'nothing'", "fa2"]),
            (["rmsnorm", "--arch", "90a", "--backend", "sm90"], ["backend: got 'sm90'", "portable"]),
        ],
    )
    def test_errors_name_what_is_wrong(self, words, named):
        message = document("explain", *words, status=2)["error"]
        assert all(word in message for word in named), message
        assert "Traceback" not in invoke("explain", *words, status=2).output


@pytest.mark.matrix
def test_precompile_then_the_cache_commands(tmp_path):
    out = tmp_path / "kernels"
    words = ("precompile", "--arch", "80,90a", "--op", "get_seq_lens", "--out", out, "--workers", 1)
    records = document(*words)
    assert {record["arch"] for record in records} == {"80", "90a"}
    assert all(record["error"] == "" and not record["cached"] and Path(record["path"]).exists() for record in records)
    assert all(record["cached"] for record in document(*words))
    assert {r["arch"] for r in document("precompile", "--arch", "89", "--from-cache", out, "--out", out)} == {"89"}

    stderr = invoke(*words).stderr.splitlines()
    assert 1 <= len(stderr) <= 10 and stderr[-1].startswith(f"{len(records)} of {len(records)} kernels")

    entries = document("cache", "list", "--base", out)
    assert len(entries) == len({entry["digest"] for entry in entries}) == len(records) * 3 // 2
    assert all(entry["fault"] == "" and entry["bytes"] > 0 for entry in entries)
    assert "get_seq_lens" not in invoke("cache", "list", "--base", tmp_path / "empty").stdout
    assert document("cache", "verify", "--base", out) == {"entries": len(entries), "faults": []}
    assert "no entries" in document("cache", "verify", "--base", tmp_path / "empty", status=1)["error"]

    broken = Path(entries[0]["path"]).with_suffix(".cubin")
    broken.write_bytes(broken.read_bytes()[:-1] + b"?")
    faults = document("cache", "verify", "--base", out, status=1)["faults"]
    assert [fault["path"] for fault in faults] == [entries[0]["path"]]
    assert "1 faults" in invoke("cache", "verify", "--base", out, status=1).stdout

    for bad in (["--arch", "90"], ["--op", "get_seq_len"]):
        assert "did you mean" in document("cache", "clear", "--base", out, *bad, status=2)["error"]
    assert document("cache", "clear", "--base", out, "--arch", "90a", "--op", "rmsnorm")["files"] == 0
    removed = document("cache", "clear", "--base", out, "--arch", "90a", "--op", "get_seq_lens")
    left = document("cache", "list", "--base", out)
    assert removed["files"] == 2 * (len(entries) - len(left)) and {e["arch"] for e in left} == {"80", "89"}
    invoke("cache", "clear", "--base", out)
    assert document("cache", "list", "--base", out) == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--arch", "42"], ["--arch", "'42'", "90a"]),
        (["--arch", "cpu"], ["--arch", "'cpu'"]),
        (["--arch", "90a", "--op", "nothing"], ["--op", "'nothing'", "rmsnorm"]),
    ],
)
def test_precompile_errors_name_what_is_wrong(words, named):
    message = document("precompile", *words, status=2)["error"]
    assert all(word in message for word in named), message


BENCHMARK = """
import torch
from flashinfer.testing.bench import Case, Work

def make(device):
    x = torch.ones(1 << 16, device=device)
    return Work(lambda x: x + x, (x,), bytes=1 << 19, flops=1 << 16, peers={"mul": lambda x: x * 2}, plan=lambda: None)

def cases(device):
    return [Case("add", make), Case("other", make)]
"""


@pytest.fixture
def benchmarks(tmp_path):
    room = tmp_path / "benchmarks" / "toy" / "sum"
    room.mkdir(parents=True)
    (room / "bench_sum.py").write_text(BENCHMARK)
    (room / "helper.py").write_text("")
    return tmp_path / "benchmarks"


def test_bench_measures_and_keeps_what_it_measured(benchmarks, tmp_path, monkeypatch):
    words = ("bench", "toy/sum", "--benchmarks", benchmarks, "--out", tmp_path / "results", "--device", "cpu")
    with monkeypatch.context() as patch:
        patch.setattr(checkout, "folder", lambda name: benchmarks)
        stderr = invoke("bench", "toy/sum", "--device", "cpu").stderr
        assert "say nothing of kernels" in stderr and "nothing is written" in stderr
        assert not (benchmarks / "results").exists()
    result = document(*words, "--match", "add")
    (case,) = result["cases"]
    assert case["name"] == "add" and case["us"] > 0 and case["host_us"] > 0 and case["plan_us"] > 0
    assert case["gb_s"] == pytest.approx((1 << 19) / case["us"] / 1e3)
    assert case["tflop_s"] == pytest.approx((1 << 16) / case["us"] / 1e6)
    assert case["peers"]["mul"]["ratio"] == pytest.approx(case["peers"]["mul"]["us"] / case["us"])
    assert result["versions"]["flashinfer"] == flashinfer.__version__ and min(result["ceilings"].values()) > 0
    data, picture = sorted((tmp_path / "results").iterdir())
    assert json.loads(data.read_text()) == result
    assert "<svg" in picture.read_text()
    assert "other" in invoke(*words).stdout


def test_bench_lists_rooms_and_names_what_is_wrong(benchmarks):
    assert document("bench", "--benchmarks", benchmarks) == ["toy/sum"]
    assert "toy/sum" in document("bench", "nothing", "--benchmarks", benchmarks, status=2)["error"]
    words = ("bench", "toy/sum", "--benchmarks", benchmarks, "--match", "nothing", "--device", "cpu")
    assert "'nothing'" in document(*words, status=2)["error"]


def test_demo_runs_the_example_of_a_checkout(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(flashinfer, "__file__", str(tmp_path / "flashinfer" / "__init__.py"))
    assert "examples/" in document("demo", status=1)["error"]
    serve = tmp_path / "examples" / "serve"
    serve.mkdir(parents=True)
    # A package, as the checkout's is: it stands before one of that name on PYTHONPATH.
    (serve / "__init__.py").touch()
    (serve / "__main__.py").write_text(
        "import json, sys\n"
        "print('text as it comes')\n"
        "if '--json' in sys.argv: json.dump({'words': sys.argv[1:3]}, open(sys.argv[-1], 'w'))\n"
        "sys.exit(3 if '--fail' in sys.argv else 0)\n"
    )
    assert document("demo", "--requests", "2") == {"words": ["--requests", "2"]}
    assert "text as it comes" in capfd.readouterr().err
    invoke("demo", "--fail", status=3)
    assert "text as it comes" in capfd.readouterr().out


def dist_info(folder, name, version, record=""):
    place = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (place / "RECORD").write_text(record)


class TestDoctor:
    @pytest.fixture(autouse=True)
    def base(self, monkeypatch, tmp_path):
        monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "base"))

    def findings(self, status=0):
        found = document("doctor", status=status)
        assert found["ok"] is (status == 0)
        return {(f["subject"], f["state"], f["detail"]) for f in found["findings"]}

    def detail(self, subject, state, status=0):
        return "\n".join(d for s, t, d in sorted(self.findings(status)) if (s, t) == (subject, state))

    def test_a_sound_installation(self, tmp_path):
        subjects = {(subject, state) for subject, state, _ in self.findings()}
        assert {("python", "ok"), ("torch", "ok"), ("triton", "ok"), ("cache", "ok"), ("identity", "ok")} <= subjects
        assert str(tmp_path) in self.detail("cache", "ok")
        assert "the tests run kernels" in self.detail("sm_90a", "ok")
        assert all("were not run on it" in self.detail(f"sm_{arch}", "ok") for arch in ("80", "100a", "120a"))

    @pytest.mark.parametrize(("name", "version"), [("torch", "2.8.0"), ("triton", "3.10.0")])
    def test_unsupported_versions(self, monkeypatch, tmp_path, name, version):
        dist_info(tmp_path / "site", name, version)
        monkeypatch.syspath_prepend(tmp_path / "site")
        assert self.detail(name, "error", status=1).startswith(f"{version}; supported: >=")

    def test_the_original_beside_this_package(self, monkeypatch, tmp_path):
        dist_info(tmp_path / "site", "flashinfer-python", "0.7.2.post1", "flashinfer/__init__.py,,\n")
        dist_info(tmp_path / "site", "flashinfer-cubin", "0.7.2.post1")
        monkeypatch.syspath_prepend(tmp_path / "site")
        detail = self.detail("identity", "error", status=1)
        assert "flashinfer-python 0.7.2.post1 is installed beside" in detail and str(tmp_path / "site") in detail
        assert "flashinfer-cubin" in self.detail("identity", "warning", status=1)

    def test_the_original_over_this_package(self, monkeypatch, tmp_path):
        dist_info(tmp_path / "site", "flashinfer-python", "0.7.2.post1", "flashinfer/__init__.py,,\n")
        monkeypatch.syspath_prepend(tmp_path / "site")
        monkeypatch.setattr(flashinfer, "__file__", str(tmp_path / "site" / "flashinfer" / "__init__.py"))
        assert "0.7.2.post1 is installed over this package" in self.detail("identity", "error", status=1)

    def test_files_that_are_not_ours_any_more(self, monkeypatch, tmp_path):
        record = "flashinfer/norm.py,sha256=AAAA,1\nflashinfer/gone.py,sha256=AAAA,1\n"
        dist_info(tmp_path / "site", "flashinfer-python", flashinfer.__version__, record)
        (tmp_path / "site" / "flashinfer").mkdir()
        (tmp_path / "site" / "flashinfer" / "norm.py").write_text("theirs")
        monkeypatch.syspath_prepend(tmp_path / "site")
        detail = self.detail("identity", "error", status=1)
        assert "flashinfer/norm.py is not" in detail and "flashinfer/gone.py is not" in detail

    def test_a_cache_that_others_can_write_is_named(self, tmp_path):
        folder = tmp_path / "base" / ".cache" / "flashinfer"
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        assert str(folder) in self.detail("cache", "warning")

    def test_switches_and_variables(self, monkeypatch):
        monkeypatch.setenv("FLASHINFER_LOGLEVEL", "3")
        assert not self.detail("FLASHINFER_LOGLEVEL", "error")
        monkeypatch.setenv("FLASHINFER_DEBUG", "yes")
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
        assert "'yes'" in self.detail("FLASHINFER_DEBUG", "error", status=1)
        assert "does not read" in self.detail("FLASHINFER_CUDA_ARCH_LIST", "warning", status=1)
