"""Compile ahead, for any architecture, on any machine: every op's catalog, or the kernels that a cache already holds.

The compiling is done in worker processes that take one job a line and answer with one record a line. They have an
environment of their own, so it works the same in a process whose Triton interprets, and a compiler that crashes costs
one job.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from queue import Queue
from typing import Any

from flashinfer._core import env, kernel_cache
from flashinfer._core.dispatch import Op, Variant
from flashinfer._core.env import logger
from flashinfer._core.target import Target, named


@dataclass(frozen=True)
class Job:
    """One kernel to compile: a launcher of `module`, for a problem and a config, on an architecture."""

    op: str
    variant: str
    module: str
    launcher: str
    arch: str
    problem: Any
    config: Any


@dataclass(frozen=True)
class Record:
    """The outcome of a job.

    Attributes
    ----------
    op, variant, launcher, arch : str
    problem, config : dict
        The fields of the compile key.
    cached : bool
        It was there already.
    seconds : float
        Of compiling; 0 if it was there.
    shared : int
        Shared memory of a block, bytes.
    registers, stack_bytes : int
        Of a thread. The stack holds what was spilled, and arrays of libdevice's slow paths.
    waits : bool
        It waits for the kernels before it before all else, and may be launched before they end.
    path : str
        Of the entry's JSON.
    error : str
        Why there is no kernel; '' if there is.
    """

    op: str
    variant: str
    launcher: str
    arch: str
    problem: dict
    config: dict
    cached: bool = False
    seconds: float = 0.0
    shared: int = 0
    registers: int = 0
    stack_bytes: int = 0
    waits: bool = False
    path: str = ""
    error: str = ""


def catalog_jobs(ops: dict[str, Op], archs: Iterable[str]) -> Iterator[Job]:
    """Every problem of every op's catalog, for each GPU variant that takes it on each architecture.

    A variant's `Implementation.kernels` says which they are.
    """
    for arch in archs:
        target = named(arch)
        for name, op in ops.items():
            for problem in op.catalog():
                for variant in op.variants:
                    yield from _jobs_of(name, variant, problem, target)


def cached_jobs(ops: dict[str, Op], archs: Iterable[str], base: Path) -> Iterator[Job]:
    """The kernels that a cache at `base` holds, for each architecture: what a run met, for other chips too.

    An op's own problem gets the config that its variant chooses on that architecture; a kernel that only `kernels`
    names gets the config that it was stored with. Entries of launchers that the ops do not have are passed over, and
    so are those that an op cannot take. An entry's text decides nothing but values of the ops' own records: a function
    of a user's that it names is looked for among modules that are imported already.
    """
    stored = [(entry["op"], entry["key"]) for entry in kernel_cache.entries(base) if not entry["fault"]]
    for arch in archs:
        known: dict[tuple, Job] = {}
        for job in catalog_jobs(ops, [arch]):
            known.setdefault((job.op, job.variant, job.launcher, type(job.problem), type(job.config)), job)
        for launcher, key in stored:
            for like in known.values():
                if like.launcher == launcher and _takes(like.problem, key.get("problem")):
                    try:
                        jobs = list(_jobs_like(like, ops[like.op], key))
                    except (ValueError, TypeError, ArithmeticError) as error:
                        logger.warning("an entry of %s is passed over: %s", launcher, error)
                        continue
                    yield from jobs


def _takes(like, stored: dict | None) -> bool:
    """Whether `stored` are the fields of a record of the same type as `like`; None stands for no record."""
    if like is None or stored is None:
        return like is stored
    values = {field.name: getattr(like, field.name) for field in fields(like)}
    return (
        isinstance(stored, dict)
        and stored.keys() == values.keys()
        and all(type(stored[name]) is type(value) for name, value in values.items())
    )


def _jobs_like(like: Job, op: Op, key: dict) -> Iterator[Job]:
    problem = type(like.problem)(**key["problem"])
    if isinstance(problem, op.problem_type):
        variant = next(variant for variant in op.variants if variant.name == like.variant)
        for job in _jobs_of(like.op, variant, problem, named(like.arch)):
            if job.launcher == like.launcher:
                yield job
    elif _takes(like.config, key.get("config")):
        config = like.config and type(like.config)(**key["config"])
        yield replace(like, problem=problem, config=config)


def _jobs_of(op: str, variant: Variant, problem, target: Target) -> Iterator[Job]:
    if variant.name == "reference" or variant.refuses(problem, target):
        return
    config = variant.config(problem, target)
    for launcher, its_problem, its_config in variant.load().kernels(problem, config):
        yield Job(op, variant.name, variant.module, launcher.name, target.arch, its_problem, its_config)


def precompile(
    jobs: Iterable[Job],
    out: Path | None = None,
    workers: int | None = None,
    on_record: Callable[[Record], None] | None = None,
    imports: Iterable[str] = (),
) -> list[Record]:
    """Compile every job once and keep the kernels.

    Parameters
    ----------
    jobs : iterable of Job
        Jobs of several ops for the same kernel are done once.
    out : Path, optional
        A folder for the kernels, to be named in FLASHINFER_PRECOMPILED_DIR or used as FLASHINFER_WORKSPACE_BASE. By
        default they go to the cache.
    workers : int, optional
        Processes; by default one per core.
    on_record : callable, optional
        Called with each Record, in the order of the jobs.
    imports : iterable of str
        Modules that each process imports first: those with a user's own functions that problems name.

    Returns
    -------
    list of Record
        One per kernel, in the order of the jobs. A job that failed has its `error`.
    """
    unique = list({(job.module, job.launcher, job.arch, job.problem, job.config): job for job in jobs}.values())
    count = max(1, min(workers or os.cpu_count() or 1, len(unique)))
    idle: Queue[_Worker] = Queue()
    records = []

    def do(job: Job) -> Record:
        worker = idle.get()
        try:
            return worker.do(job)
        finally:
            idle.put(worker)

    with ExitStack() as stack:
        for _ in range(count):
            idle.put(stack.enter_context(_Worker(out, tuple(imports))))
        threads = stack.enter_context(ThreadPoolExecutor(count))
        for record in threads.map(do, unique):
            records.append(record)
            if on_record:
                on_record(record)
    return records


class _Worker:
    """A process that compiles; started at its first job, and again after it died."""

    def __init__(self, out: Path | None, imports: tuple[str, ...] = ()):
        self._environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", env.FROZEN.name)}
        self._imports = imports
        if out is not None:
            self._environment[env.WORKSPACE_BASE.name] = str(Path(out).absolute())
            self._environment.pop(env.PRECOMPILED_DIR.name, None)
        self._process: subprocess.Popen | None = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self._process is not None:
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.wait()

    def do(self, job: Job) -> Record:
        if self._process is None:
            # -I: neither the current folder nor a variable says where modules come from.
            command = [sys.executable, "-I", "-c", _BEGIN, *_module_folders(), "--", *self._imports]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=self._environment)
        problem, config = (kernel_cache.fields_of(part) for part in (job.problem, job.config))
        request = {
            "module": job.module,
            "launcher": job.launcher,
            "arch": job.arch,
            "problem": [*_type_of(job.problem), problem],
            "config": [*_type_of(job.config), config],
        }
        answer = self._ask(json.dumps(request))
        return Record(job.op, job.variant, job.launcher, job.arch, problem, config, **answer)

    def _ask(self, line: str) -> dict:
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return json.loads(answer)
        status = self._process.wait()
        self._process = None
        return {"error": f"the compiler's process ended with status {status}"}


# Arguments: the folders of modules, "--", modules to import.
_BEGIN = f"""
import sys
bar = sys.argv.index("--")
sys.path[:], imports = sys.argv[1:bar], sys.argv[bar + 1 :]
from {__name__} import work
work(imports)
"""


def _module_folders() -> list[str]:
    """Where a worker looks for modules: where this process does, without the current folder.

    If this package lies in the current folder, that comes last: what else lies there hides no other module.
    """
    here, root = os.path.realpath(os.getcwd()), str(Path(__file__).resolve().parents[2])
    folders = [path for path in sys.path if path and os.path.realpath(path) != here]
    return folders if root in map(os.path.realpath, folders) else [*folders, root]


def _type_of(record) -> tuple[str, str]:
    return type(record).__module__, type(record).__qualname__


def work(imports: Iterable[str] = ()) -> None:
    """The loop of a worker: a job a line on standard input, its outcome a line on standard output."""
    for name in imports:
        import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    # What the compiler prints is for people: it must not stand between the answers.
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_outcome(json.loads(line))) + "\n")
        answers.flush()


def _outcome(request: dict) -> dict:
    start = time.perf_counter()
    try:
        implementation = import_module(request["module"]).IMPLEMENTATION
        launchers = {launcher.name: launcher for launcher in implementation.launchers}
        problem, config = (_made(*request[part]) for part in ("problem", "config"))
        entry = launchers[request["launcher"]].entry(problem, config, request["arch"])
    except Exception as error:  # any failure to compile is this job's outcome, with its type
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.perf_counter() - start}
    kept = {name: entry.kernel[name] for name in ("shared", "registers", "stack_bytes", "waits")}
    return {"cached": entry.cached, "seconds": entry.seconds, "path": str(entry.path or ""), **kept}


def _made(module: str, name: str, values: dict | None):
    return None if values is None else getattr(import_module(module), name)(**values)
