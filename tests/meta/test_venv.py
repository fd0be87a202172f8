"""What `make demo` and `make test` do on machines that differ: which torch, or which sentence where there is none."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import venv

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = "torch==2.13.0\ntriton==3.6.0\n\nclick==8.5.1\n"
NO_VERSION = "ERROR: No matching distribution found for torch==2.13.0+cpu\n"
NO_NETWORK = (
    "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError': [Errno -3] Temporary failure "
    "in name resolution\nERROR: No matching distribution found for torch==2.13.0+cpu\n"
)
NO_SPACE = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
CONFLICT = "ERROR: ResolutionImpossible: for help visit https://pip.pypa.io\n"


class Fake:
    """A machine whose pip answers from a list."""

    def __init__(self, *answers, driver=False, index="", free=100e9):
        self.answers, self.has_driver, self.index, self.bytes = list(answers), driver, index, free
        self.asked, self.said = [], []

    def free(self):
        return self.bytes

    def say(self, line):
        self.said.append(line)

    def pip(self, arguments, constraints, quiet):
        self.asked.append((arguments, constraints, quiet))
        errors = self.answers.pop(0)
        return bool(errors), errors


def test_the_cpu_build_where_an_index_has_it():
    machine = Fake("")
    assert venv.install_torch(machine, CONSTRAINTS) == "cpu"
    assert machine.asked == [(["torch==2.13.0+cpu", "setuptools"], CONSTRAINTS, True)]
    assert not machine.said


@pytest.mark.parametrize("missing", [NO_VERSION, CONFLICT])
def test_else_the_default_build_and_one_line(missing):
    machine = Fake(missing, "", index="https://an.index/cpu")
    assert venv.install_torch(machine, CONSTRAINTS) == "default"
    arguments, constraints, quiet = machine.asked[1]
    assert arguments == ["--extra-index-url", "https://an.index/cpu", "torch==2.13.0,!=2.13.0+cpu", "setuptools"]
    # That build brings the Triton that it was made with, and its download takes long enough to be shown.
    assert "triton" not in constraints and "click==8.5.1" in constraints and not quiet
    assert len(machine.said) == 1 and "larger" in machine.said[0]


def test_a_driver_turns_the_order():
    machine = Fake("", driver=True)
    assert venv.install_torch(machine, CONSTRAINTS) == "default"
    assert "driver" in machine.said[0]
    machine = Fake(NO_VERSION, "", driver=True)
    assert venv.install_torch(machine, CONSTRAINTS) == "cpu"


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ((NO_NETWORK,), "no network: .*2.13.0"),
        ((NO_SPACE,), "no space: "),
        ((NO_VERSION, NO_VERSION), "no such version: .* have no torch==2.13.0 .*TORCH_INDEX"),
        ((NO_VERSION, NO_SPACE), "no space: "),
        ((NO_VERSION, NO_NETWORK), "no network: "),
        (("Traceback\nModuleNotFoundError: No module named 'pip'\n",), "pip could not install .* named 'pip'"),
    ],
)
def test_each_failure_has_its_own_line(answers, sentence):
    machine = Fake(*answers)
    with pytest.raises(venv.Failed, match="^" + sentence) as failed:
        venv.install_torch(machine, CONSTRAINTS)
    assert "\n" not in str(failed.value) and not machine.answers


@pytest.mark.parametrize(("answers", "free", "needs"), [((), 2.9e9, "3 GB"), ((NO_VERSION,), 8e9, "9 GB")])
def test_space_is_looked_at_first(answers, free, needs):
    machine = Fake(*answers, free=free)
    with pytest.raises(venv.Failed, match=f"no space: {needs} .*{free / 1e9:.1f} GB"):
        venv.install_torch(machine, CONSTRAINTS)
    assert not machine.answers


def test_the_pins_are_found_in_constraints_txt():
    machine = Fake("")
    venv.install_torch(machine, (ROOT / "constraints.txt").read_text())
    assert machine.asked[0][0][0].startswith("torch==2.")
    without = venv.constraints_for("default", (ROOT / "constraints.txt").read_text())
    assert "triton==" not in without and "torch==" in without


def test_usage():
    assert venv.main([]) == venv.main(["all"]) == 2


# The demo's own module stands for any moment of it: as it is imported, and as it runs.
@pytest.mark.parametrize("moment", ["raise KeyboardInterrupt", "def main(): raise KeyboardInterrupt"])
def test_ctrl_c_ends_the_demo_in_one_line(tmp_path, moment):
    package = tmp_path / "serve"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text((ROOT / "examples" / "serve" / "__main__.py").read_text())
    (package / "demo.py").write_text(moment + "\n")
    done = subprocess.run([sys.executable, "-m", "serve"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 130 and done.stderr.strip() == "Interrupted" and not done.stdout
