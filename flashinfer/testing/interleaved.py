"""Other libraries beside our rows: each in a process of its own on the same card, timed in turn with ours.

Of a row, ours runs for some milliseconds, then the library, then ours again, over several rounds; whoever does not run
waits for its input. Both are timed by one rule: one call a CUDA graph, behind a flush of L2. So the clock of the card,
which sinks as it warms, is the same for both.

This file imports torch alone, and starts `benchmarks/packed.py` for each library; `flashinfer bench --peers` and
`benchmarks/beside.py`, which needs neither click nor rich, run it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from flashinfer.testing import bench

ROUNDS, ROUND_MS = 5, 20.0
# Samples of a round, whatever they take.
_FEWEST, _MOST = 4, 40
# The part of the time in which all libraries compile at once, before any is timed.
_WARM = 0.5

Row = tuple[Path, bench.Case]


class Sampler:
    """Times calls of `run`, each behind a flush of L2.

    Attributes
    ----------
    driven : str
        "graph": replays of a CUDA graph of one call. "calls": the calls as they are, where a graph cannot hold them;
        what their launches take beyond 0.3 ms is in the time. "wall": on a CPU.
    """

    def __init__(self, run: Callable, device: torch.device):
        run()
        if device.type != "cuda":
            self._timed, self.driven = lambda: _wall_ms(run), "wall"
            return
        flush = bench._Flush(None, device)
        try:
            self._timed, self.driven = bench._GraphTimer(run, ((), {}), flush, 1), "graph"
        except Exception:
            torch.cuda.synchronize(device)
            self._timed, self.driven = bench._EventTimer(run, ((), {}), flush), "calls"

    def __call__(self, milliseconds: float = ROUND_MS) -> list[float]:
        """Microseconds of single calls, as many as fill the time."""
        self._timed()
        first = self._timed()
        count = max(_FEWEST, min(_MOST, int(milliseconds / max(first, 1e-3))))
        return [1e3 * self._timed() for _ in range(count)]


def _wall_ms(run: Callable) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def spread(samples: list[float]) -> dict[str, float]:
    """`us` (the median), `p10` and `p90` of samples."""
    ordered = sorted(samples)
    at = {name: ordered[round(part * (len(ordered) - 1))] for name, part in (("p10", 0.1), ("us", 0.5), ("p90", 0.9))}
    return {"us": at["us"], "p10": at["p10"], "p90": at["p90"]}


def packed(folder: Path, benchmarks: Path, names: tuple[str, ...] = ()) -> dict[str, tuple[Path, Path]]:
    """Libraries under `folder` that have an adapter: name -> its folder and the adapter.

    A library NAME is a folder `NAME/` with a module `peer_NAME.py`, its adapter `benchmarks/peers/NAME.py`; dashes of a
    name are underscores in modules.

    Raises
    ------
    ValueError
        A name that is not there, or no library at all.
    """
    adapters = {file.stem: file for file in sorted((benchmarks / "peers").glob("*.py"))}
    found = {}
    for place in sorted(Path(folder).resolve().glob("*/peer_*.py")):
        stem = place.parent.name.replace("-", "_")
        if place.stem == f"peer_{stem}" and stem in adapters:
            found[place.parent.name] = place.parent, adapters[stem]
    missing = set(names) - set(found)
    if missing or not found:
        there = ", ".join(found) or f"a folder of libraries with adapters: {', '.join(adapters)}"
        raise ValueError(f"peers: got {', '.join(sorted(missing)) or Path(folder).name!r}; allowed: {there}")
    return {name: found[name] for name in names or found}


class Library:
    """A packed library in a process of its own, which is started when it is asked, and again after it died.

    Attributes
    ----------
    takes : list of str
        The problems that its adapter states; empty until `start`.
    """

    def __init__(self, name: str, folder: Path, adapter: Path, device: torch.device):
        self.name, self._folder, self._adapter, self._device = name, folder, adapter, str(device)
        self.takes: list[str] = []
        self._process, self._answers = None, queue.Queue()

    def start(self, limit: float) -> None:
        """Start the process and load the library.

        Raises
        ------
        RuntimeError
            It does not load, or does not within `limit` seconds.
        """
        package = Path(bench.__file__).resolve().parents[2]
        script = package / "benchmarks" / "packed.py"
        path = os.pathsep.join([str(self._folder), str(package)])
        # its own files of tuning results would be of another machine
        settings = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "FLA_CACHE_RESULTS": "0"}
        self._answers = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(self._adapter), self._device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=settings, start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._listen, args=(self._process, self._answers), daemon=True).start()
        answer = self._answer(limit)
        if "error" in answer:
            self.end()
            raise RuntimeError(answer["error"])
        self.takes = answer["takes"]

    def ask(self, limit: float, **request) -> dict:
        """What it answers; RuntimeError where it dies, or does not answer within `limit` seconds and is ended."""
        if self._process is None or self._process.poll() is not None:
            self.start(limit)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._answer(limit)

    def end(self) -> None:
        """End the process, with what it started."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process = None

    def _answer(self, limit: float) -> dict:
        try:
            answer = self._answers.get(timeout=max(limit, 0.1))
        except queue.Empty:
            self.end()
            raise RuntimeError(f"its process ended: no answer in {limit:.0f} s") from None
        if answer is None:
            status = self._process.wait()
            self.end()
            raise RuntimeError(f"its process ended: status {status}")
        if answer.pop("last", False):
            self.end()
        return answer

    @staticmethod
    def _listen(process: subprocess.Popen, answers: queue.Queue) -> None:
        for line in process.stdout:
            answers.put(json.loads(line))
        answers.put(None)


class Beside:
    """Rows of ours and the libraries beside them.

    Parameters
    ----------
    libraries : list of Library
    device : torch.device
    seconds : float
        All that may pass; what is not measured by then says so.
    limit : float
        Seconds of one answer of a library.
    tell : callable
        Hears of what happens, in a line.
    """

    def __init__(self, libraries: list[Library], device, seconds: float, limit: float, tell: Callable[[str], None]):
        self.libraries, self.device, self.limit, self.tell = libraries, device, limit, tell
        self.seconds, self._until = seconds, time.monotonic() + seconds
        # (library, problem) -> why it is not tried again
        self._lost: dict[tuple[str, str], str] = {}

    def warm(self, rows: list[Row]) -> dict[str, str]:
        """Load the libraries, and let each run and compile its rows once, all at the same time as ours.

        Returns
        -------
        dict
            Library -> why it does not load.
        """
        until, broken = time.monotonic() + _WARM * self.seconds, {}
        workers = [
            threading.Thread(target=self._warm_one, args=(library, rows, until, broken)) for library in self.libraries
        ]
        for worker in workers:
            worker.start()
        # which rows count is known once the libraries are there
        while not all(x.takes or x.name in broken for x in self.libraries) and time.monotonic() < until:
            time.sleep(0.1)
        self._warm_ours(rows, until)
        for worker in workers:
            worker.join()
        for library in self.libraries:
            with contextlib.suppress(RuntimeError):
                if library.name not in broken:
                    library.ask(self._limit(), do="retune")
        return broken

    def takes(self, case: bench.Case) -> list[Library]:
        return [library for library in self.libraries if case.problem and case.problem in library.takes]

    def measure(self, module: Path, case: bench.Case, row: dict) -> None:
        """Add the row's libraries to `row["peers"]`, and ours to the row where it has no time yet.

        So are the peers that the row brings, where they are not there: they run in this process, in turn with ours.
        """
        libraries, work = self.takes(case), None
        if self._left() <= 0:
            row["peers"] |= {library.name: {"error": "not measured: the time was used up"} for library in libraries}
            return
        try:
            work = made(case, self.device)
            ours = Sampler(lambda: work.run(*work.inputs), self.device)
        except Exception as error:
            ours = None
            row |= bench.failed(error) if "us" not in row else {}
        seen: list[float] = []
        for name, peer in (work.peers if ours is not None else {}).items():
            if name not in row["peers"]:
                peer = peer if isinstance(peer, bench.Work) else bench.Work(peer, work.inputs)
                row["peers"][name] = self._brought(peer, ours, seen)
                self.tell(f"{case.name}, {name}: {_line(row['peers'][name])}")
        for library in libraries:
            row["peers"] |= self._rounds(library, module, case, ours, seen)
        if ours is not None and "us" not in row:
            row |= spread(seen or ours()) | {"driven": ours.driven}
            row |= bench.speeds(work, row["us"])

    def end(self) -> None:
        for library in self.libraries:
            library.end()

    def _rounds(self, library: Library, module: Path, case: bench.Case, ours, seen: list[float]) -> dict[str, dict]:
        name, found = library.name, {}
        why = self._lost.get((name, case.problem))
        if why is not None:
            return {name: {"error": why}}
        try:
            ways = library.ask(self._limit(), do="prepare", module=str(module), row=case.name)["ways"]
            for way, answer in ways.items():
                label = f"{name}/{way}" if way else name
                found[label] = answer if "error" in answer else self._in_turn(library, way, ours, seen)
                self.tell(f"{case.name}, {label}: {_line(found[label])}")
            library.ask(self._limit(), do="drop")
        except RuntimeError as error:
            self._lose(library, case, error)
            found[name] = {"error": str(error)}
            self.tell(f"{case.name}, {name}: {_line(found[name])}")
        return found

    def _brought(self, peer: bench.Work, ours: Sampler, seen: list[float]) -> dict:
        try:
            result = peer.run(*peer.inputs)
            if peer.check is not None:
                peer.check(result)
            theirs = Sampler(lambda: peer.run(*peer.inputs), self.device)
            return self._turns(lambda: {"us": theirs(), "driven": theirs.driven}, ours, seen)
        except Exception as error:
            return bench.failed(error)

    def _in_turn(self, library: Library, way: str, ours, seen: list[float]) -> dict:
        return self._turns(
            lambda: library.ask(self._limit(), do="time", way=way, milliseconds=ROUND_MS), ours, seen
        )  # fmt: skip

    def _turns(self, times: Callable[[], dict], ours, seen: list[float]) -> dict:
        """Rounds of ours and of a peer, whose `times` are samples and how they were taken, or an error."""
        mine, theirs, driven = [], [], ""
        for _ in range(ROUNDS):
            if ours is not None:
                mine += ours()
            answer = times()
            if "error" in answer:
                return answer
            theirs += answer["us"]
            driven = answer["driven"]
        seen += mine
        result = spread(theirs) | {"driven": driven, "samples": len(theirs), "rounds": ROUNDS}
        return result | ({"ours": spread(mine)} if mine else {})

    def _warm_one(self, library: Library, rows: list[Row], until: float, broken: dict[str, str]) -> None:
        try:
            library.start(min(self.limit, self._left()))
        except RuntimeError as error:
            broken[library.name] = str(error)
            self.tell(f"{library.name}: {broken[library.name]}")
            return
        for module, case in rows:
            left = min(until - time.monotonic(), self.limit)
            if case.problem not in library.takes or (library.name, case.problem) in self._lost or left <= 0:
                continue
            try:
                library.ask(left, do="prepare", module=str(module), row=case.name)
                library.ask(left, do="drop")
            except RuntimeError as error:
                # a row that had less than the whole limit is tried again when its turn comes
                if left == self.limit or "no answer" not in str(error):
                    self._lose(library, case, error)
        self.tell(f"{library.name}: ready")

    def _warm_ours(self, rows: list[Row], until: float) -> None:
        for _, case in rows:
            if self.takes(case) and time.monotonic() < until:
                # what fails here fails again where it is measured, and is recorded there
                with contextlib.suppress(Exception):
                    made(case, self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _lose(self, library: Library, case: bench.Case, error: Exception) -> None:
        self._lost[library.name, case.problem] = str(error)

    def _left(self) -> float:
        return self._until - time.monotonic()

    def _limit(self) -> float:
        return max(0.1, min(self.limit, self._left()))


def made(case: bench.Case, device: torch.device) -> bench.Work:
    """The row's work with the same random operands in every process, after its check."""
    torch.manual_seed(0)
    work = case.make(device)
    result = work.run(*work.inputs)
    if work.check is not None:
        work.check(result)
    return work


def _line(answer: dict) -> str:
    if "error" in answer:
        return answer["error"]
    ours = f", ours {answer['ours']['us']:.1f} us" if "ours" in answer else ""
    return f"{answer['us']:.1f} us ({answer['driven']}){ours}"
