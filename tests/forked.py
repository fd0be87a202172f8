"""Processes that have torch already, or torch and Triton: each is forked from one that imported them, and no more."""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
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


def _context():
    """Of multiprocessing. Its processes have torch, and the environment of the first of them until another is taken."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    return context


def _take(environment):
    os.environ.clear()
    os.environ.update(environment)


@contextmanager
def process(begin, *arguments):
    """Gives what calls functions of modules in a process with torch, in the environment of the first call, after
    `begin` there."""
    with ExitStack() as stack:

        @cache
        def executor():
            given = dict(os.environ), begin, arguments
            made = ProcessPoolExecutor(1, mp_context=_context(), initializer=_begin, initargs=given)
            return stack.enter_context(made)

        yield lambda function, *args, **named: executor().submit(function, *args, **named).result()


def _begin(environment, begin, arguments):
    _take(environment)
    begin(*arguments)


def start(function, *arguments, out, **variables):
    """A process that calls a function of a module, in this one's environment with the variables given; it writes to the
    file `out`."""
    started = _context().Process(target=_write, args=(os.environ | variables, str(out), function, arguments))
    started.start()
    return started


def _write(environment, out, function, arguments):
    _take(environment)
    file = os.open(out, os.O_WRONLY | os.O_CREAT)
    for place in (1, 2):
        os.dup2(file, place)
    function(*arguments)
