"""Programs in processes that have torch and Triton already: each is forked from one that imported them, and no more."""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

SERVER = """
import json, os, sys
import torch, triton
for line in sys.stdin:
    program, environment, out, err = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.environ.clear()
os.environ.update(environment)
for name, place in ((out, 1), (err, 2)):
    os.dup2(os.open(name, os.O_WRONLY), place)
exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
"""


@contextmanager
def python_with_torch():
    """Gives what runs a program with the variables given, as `python -c` would, and returns what became of it."""
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FLASHINFER_")} | paths
    command = [sys.executable, "-c", SERVER]
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(
        command, env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:

        def run(program, **variables):
            said = [Path(folder, name) for name in ("out", "err")]
            for path in said:
                path.write_text("")
            server.stdin.write(json.dumps([program, clean | variables, *map(str, said)]) + "\n")
            server.stdin.flush()
            status = int(server.stdout.readline())
            return subprocess.CompletedProcess(command, status, *(path.read_text() for path in said))

        yield run
        server.stdin.close()
