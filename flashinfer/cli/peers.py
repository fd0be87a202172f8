"""FlashInfer beside this package: it shares our import name, so its rows run in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flashinfer.cli import checkout

# module -> case -> kind
Rows = dict[Path, dict[str, str]]
Answers = dict[Path, dict[str, dict[str, dict]]]


def run(rows: Rows, device, peer: str, report: Callable, *, build=False, tune=False, limit=None) -> tuple[str, Answers]:
    """Run rows with the FlashInfer that is installed in the folders `peer`, joined as in PYTHONPATH.

    Parameters
    ----------
    rows : dict
        Benchmark module -> names of its cases, and the kind of each.
    report : callable
        `report(name, ways)` hears of each row once it is done.
    build : bool
        Build what the rows need, and time nothing.
    tune : bool
        Let FlashInfer's tuner have the first call of each row.
    limit : float, optional
        Seconds that one row may take. A process that takes longer is killed, and rows of its kind are not tried again.

    Returns
    -------
    tuple
        The peer's version, and module -> case -> way through FlashInfer -> {"us"}, {"built"} or {"error"}. A row whose
        process died has that for an error; the rows after it run in another one.

    Raises
    ------
    RuntimeError
        The peer cannot be imported.
    """
    left = {module: dict(kinds) for module, kinds in rows.items()}
    found: Answers = {module: {} for module in rows}
    version = ""

    def keep(module: Path, name: str, ways: dict) -> None:
        del left[module][name]
        found[module][name] = ways
        report(name, ways)

    while any(left.values()):
        begun, count = None, sum(map(len, left.values()))
        request = {"device": str(device), "build": build, "tune": tune}
        request["rows"] = [[str(module), list(kinds)] for module, kinds in left.items() if kinds]
        process = _start(request, peer)
        for answer in _answers(process, None if build else limit):
            if "version" in answer:
                version = answer["version"]
                continue
            begun = Path(answer["row"][0]), answer["row"][1]
            if "ways" in answer:
                keep(*begun, answer["ways"])
                begun = None
        status = process.wait()
        late = limit is not None and status in (-signal.SIGTERM, -signal.SIGKILL)
        why = f"no answer in {limit:g} s" if late else f"status {status}"
        lost = []
        if begun:
            module, name = begun
            alike = [other for other, kind in left[module].items() if late and kind == rows[module][name]]
            lost = [(module, other) for other in {name, *alike}]
        elif sum(map(len, left.values())) == count:
            if not version:
                raise RuntimeError(f"--peer: {peer} cannot be imported ({why}); what its process says stands above")
            lost = [(module, name) for module, kinds in left.items() for name in kinds]
        for module, name in lost:
            keep(module, name, {"": {"error": f"its process ended: {why}"}})
    return version, found


def _start(request: dict, peer: str) -> subprocess.Popen:
    settings = os.environ | {"PYTHONPATH": peer, "FLASHINFER_DISABLE_VERSION_CHECK": "1"}
    # compilers at a time, for each operator that is built
    settings.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    script = checkout.folder("benchmarks") / "peer.py"
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=settings
    )
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(json.dumps(request))
    return process


def _answers(process: subprocess.Popen, limit: float | None) -> Iterator[dict]:
    """The documents that it prints; it is killed where a row that has begun takes longer than `limit` seconds."""
    begun = False
    try:
        while True:
            watch = threading.Timer(limit or 0, _end, [process])
            if begun and limit:
                watch.start()
            line = process.stdout.readline()
            watch.cancel()
            if not line.endswith("\n"):
                return
            answer = json.loads(line)
            begun = "row" in answer and "ways" not in answer
            yield answer
    except BaseException:
        _end(process)
        raise
    finally:
        process.stdout.close()


def _end(process: subprocess.Popen) -> None:
    """With the compilers that it runs: ninja ends them where it is asked to end, but not where it is killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(1)
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
