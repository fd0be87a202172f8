"""Variables that stand for others, in a process of their own: they are read at the import."""

import os
import subprocess
import sys

import pytest

SHOWS = "import flashinfer; from flashinfer._core import env; print(env.DEBUG.is_on())"


@pytest.mark.parametrize(
    "given, on",
    [({}, False), ({"VALIDATE_INPUTS": "1"}, True), ({"VALIDATE_INPUTS": "true"}, True),
     ({"VALIDATE_INPUTS": "0"}, False), ({"VALIDATE_INPUTS": "1", "DEBUG": "0"}, False)],
    ids=str,
)  # fmt: skip
def test_upstreams_validation_of_inputs_is_the_debug_mode(given, on):
    """Checks of what only the device knows; FLASHINFER_DEBUG itself, where it is set, is what counts."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("FLASHINFER_")}
    named = {f"FLASHINFER_{name}": value for name, value in given.items()}
    done = subprocess.run([sys.executable, "-c", SHOWS], env=bare | named, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(on)
