"""Upstream's commands: each does what its name says, or says in one line that there is nothing to do."""

import json
import subprocess
import sys

import pytest

import flashinfer
from flashinfer import collect_env
from flashinfer._core import kernel_cache
from flashinfer.cli.upstream import NOTHING_TO_DO
from tests.cli.test_cli import document, invoke


@pytest.fixture(autouse=True)
def base(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "base"))


@pytest.mark.parametrize("name", NOTHING_TO_DO)
@pytest.mark.parametrize("words", [[], ["--dry-run", "--cuda-version", "12.9"]], ids=len)
def test_commands_with_nothing_to_do_say_so(name, words):
    lines = invoke(name, *words).stdout.splitlines()
    assert len(lines) == 1 and ("nothing" in lines[0] or "no cubins" in lines[0])
    assert all(word in lines[0] for word in words)
    assert document(name, *words)["done"] is False


@pytest.mark.parametrize("words", ["download-kernels", "download-cubin", "--download-cubin"])
def test_as_engines_call_it(words):
    """vLLM's command, and what SGLang's images and scripts run."""
    done = subprocess.run([sys.executable, "-m", "flashinfer", words], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("nothing to download") and done.stdout.count("\n") == 1


def test_no_command_is_the_help():
    assert "list-modules" in invoke().stdout


def test_modules_their_state_and_their_removal(monkeypatch):
    listed = document("list-modules")
    assert {"decode", "rmsnorm"} <= {row["module"] for row in listed}
    assert [row["variant"] for row in document("list-modules", "rmsnorm")][-1] == "reference"
    assert "did you mean rmsnorm?" in document("list-modules", "rmsnrom", status=2)["error"]
    assert document("module-status", "--filter", "compiled") == [] == document("module-status", "--filter", "aot")
    invoke("precompile", "--arch", "90a", "--op", "get_seq_lens", "--workers", 1)
    compiled = {row["module"]: row["compiled"] for row in document("module-status", "--filter", "compiled")}
    count = len(kernel_cache.entries())
    assert compiled["get_seq_lens"] == count > 0 and "rmsnorm" not in compiled
    assert "get_seq_lens" in invoke("module-status", "--detailed").stdout
    assert document("clear-cache")["files"] == 2 * count and kernel_cache.entries() == []


def test_compile_commands_are_an_empty_list(tmp_path):
    path = tmp_path / "commands.json"
    assert "0 commands" in invoke("export-compile-commands", "-o", path).stdout
    assert json.loads(path.read_text()) == []


def test_report_of_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "hidden words")
    report = document("collect-env")
    assert report["FlashInfer"]["version"] == flashinfer.__version__
    assert report["Environment"]["VLLM_API_KEY"] == "(set)" and "hidden words" not in invoke("collect-env").stdout
    done = subprocess.run([sys.executable, "-m", "flashinfer.collect_env"], capture_output=True, text=True)
    assert done.returncode == 0 and flashinfer.__version__ in done.stdout


def test_broken_section_is_a_line_of_the_report(monkeypatch):
    def broken():
        raise RuntimeError("no driver")

    monkeypatch.setattr(collect_env, "_torch", broken)
    report = collect_env.collect_env_info()
    assert report["PyTorch"] == {"error": "RuntimeError: no driver"}
    assert "error  RuntimeError: no driver" in collect_env.format_report(report)
