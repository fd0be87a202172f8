"""Every kernel compiles for every architecture on the lowest and the highest Triton, within the chip's limits.

Of each op's catalog it takes for each variant problems that show every value of every field in it, so that each branch
of each kernel is there. The two Tritons share them, and deal them to the chips in turn. Both compile every kernel
for Hopper and for a chip before it: the lowest writes the same PTX for all of those, which samples show. After Hopper
one of them compiles it for a chip with tcgen05 (100a and 103a in turn), the other for 120a. A chip's own kernels are
compiled for all of their problems by the lowest, and for every second one by the highest.
`make matrix` runs it; FLASHINFER_TEST_TRITON names the folder of the highest Triton.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache
from importlib import import_module
from itertools import zip_longest
from pathlib import Path

import pytest

from flashinfer._core.parameters import Layout
from flashinfer._core.precompile import catalog_jobs, precompile
from flashinfer._core.target import GPU_ARCHS, named
from flashinfer.ops import all_ops

pytestmark = [pytest.mark.matrix, pytest.mark.minutes]

OTHER = os.environ.get("FLASHINFER_TEST_TRITON", "")

# Chips before Hopper, for which the lowest Triton writes the same PTX but for its target's name, and after it.
OLDER, NEWER = ("80", "86", "89"), ("100a", "103a", "120a")
# Of NEWER what the lowest Triton has, and the highest, from kernel to kernel: on one of them a chip with tcgen05.
TURNS = ("100a", "120a"), ("120a", "103a"), ("103a", "120a"), ("120a", "100a")
# Launchers that show it: reductions, exponentials, scans, gathers, matrix products in a pipeline.
SAMPLES = {"norm", "sampling_statistics", "top_k_sort", "moe_finalize", "dense_gemm"}

# Launchers of one config, all of whose kernels wait or none.
EARLY = ("prefix_bracket", "prefix_gather", "prefix_resolve")


class Covering:
    """An op with one of its variants, and few problems of its catalog: they show every value of every field in it, and
    every config if it is for one chip."""

    def __init__(self, op, variant):
        self.name, self.problem_type, self.variants = op.name, op.problem_type, (variant,)
        self._op, self._variant = op, variant

    def catalog(self):
        shows = {problem: self._shown(problem) for problem in self._op.catalog()}
        left, taken = set().union(*shows.values()), []
        while left:
            taken.append(max(shows, key=lambda problem: len(shows[problem] & left)))
            left -= shows[taken[-1]]
        # What was taken first may show nothing that those after it do not.
        for problem in list(taken):
            if shows[problem] <= set().union(*(shows[other] for other in taken if other != problem)):
                taken.remove(problem)
        return taken

    def _shown(self, problem):
        """What the variant does for this problem, on the chips where it is the op's choice."""
        shown, variant = set(), self._variant
        for chip in map(named, GPU_ARCHS):
            able = (v for v in self._op.variants if v.name != "reference" and not v.refuses(problem, chip))
            if next(able, None) is variant:
                shown |= {("", ""), *asdict(problem).items()}
                if variant.name != "portable":
                    shown.add(("config", variant.config(problem, chip)))
        return shown


@lru_cache(maxsize=None)
def jobs_by_kernel():
    """{kernel: {problem: {arch: job}}}."""
    kernels = defaultdict(lambda: defaultdict(dict))
    for name, op in all_ops().items():
        for variant in op.variants:
            for job in catalog_jobs({name: Covering(op, variant)}, GPU_ARCHS):
                # Several ops may run one launcher, whose name is its own; it has a kernel for each type of problem.
                kernels[job.launcher, type(job.problem)][of_any_chip(job.problem)].setdefault(job.arch, job)
    return kernels


def all_jobs(highest):
    for place, problems in enumerate(jobs_by_kernel().values()):
        by_op = defaultdict(list)
        for by_arch in problems.values():
            by_op[next(iter(by_arch.values())).op].append(chips_of(by_arch, highest, place))
        if highest or any(len(by_arch) > 1 for by_arch in problems.values()):
            by_op = {op: its[highest::2] or its for op, its in by_op.items()}
        # Ops take turns, so that each of them has a chip.
        turns = [by_arch for turn in zip_longest(*by_op.values()) for by_arch in turn if by_arch]
        yield from dealt(turns, highest)


def of_any_chip(problem):
    """The problem, without the chip's capability if that is part of it."""
    return replace(problem, capability=0) if hasattr(problem, "capability") else problem


def alike(by_arch):
    """Of {arch: job} the jobs of OLDER that are one but for the chip."""
    jobs = [by_arch[arch] for arch in OLDER if arch in by_arch]
    return [job for job in jobs if replace(job, arch="") == replace(jobs[0], arch="")]


def chips_of(by_arch, highest, place):
    """{arch: job} with the chips that a Triton compiles it for, in turn by `place`."""
    older, newer = ([arch for arch in archs if arch in by_arch] for archs in (OLDER, NEWER))
    left_out = set(newer) - {TURNS[place % len(TURNS)][highest] if len(newer) > 1 else "".join(newer)}
    if not highest:
        older = [job.arch for job in alike(by_arch)]
    if older:
        left_out |= set(older) - {older[place % len(older)]}
    return {arch: job for arch, job in by_arch.items() if arch not in left_out}


def dealt(problems, highest):
    """Of each problem ({arch: job}) the job of one chip, and for each chip that has any at least one."""
    left = {arch: None for by_arch in problems for arch in by_arch}
    for place, by_arch in enumerate(problems):
        archs = [arch for arch in GPU_ARCHS if arch in by_arch]
        arch = next((arch for arch in archs if arch in left), archs[place % len(archs)])
        left.pop(arch, None)
        yield by_arch[arch]
    for place, arch in enumerate(left):
        taking = [by_arch for by_arch in problems if arch in by_arch]
        yield taking[(place + highest) % len(taking)][arch]


class Written(Exception):
    """A kernel is PTX."""


def ptx_of(job):
    """What Triton writes for a job, without its target's name."""
    ptx = ptx_of_build(launcher_of(job).build(job.problem, job.config), job.arch)
    return re.sub(r"^\.target .*$", "", ptx, flags=re.MULTILINE)


@contextmanager
def ptx_given_to(see):
    """What is compiled meanwhile calls `see` with its PTX."""
    from triton import knobs

    def add(backend, stages, *others):
        write = stages["ptx"]

        def written(*args):
            ptx = write(*args)
            see(ptx)
            return ptx

        stages["ptx"] = written

    with knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = add
        yield


def ptx_of_build(build, arch):
    from flashinfer._core.compiler import compile_kernel

    def end_there(ptx):
        raise Written(ptx)

    with ptx_given_to(end_there):
        try:
            compile_kernel(build, arch)
        except Written as written:
            return written.args[0]
    raise AssertionError(f"{build.kernel.__name__} did not become PTX for {arch}")


def compare_alike():
    """[launcher, chip, one like it, whether both get the same PTX] for a problem of each sample."""
    found = []
    for (launcher, _), problems in jobs_by_kernel().items():
        if launcher in SAMPLES:
            same = max(map(alike, problems.values()), key=len)
            texts = [ptx_of(job) for job in same]
            found += [[launcher, same[0].arch, job.arch, text == texts[0]] for job, text in zip(same, texts)][1:]
    return found


def launcher_of(job):
    return next(x for x in import_module(job.module).IMPLEMENTATION.launchers if x.name == job.launcher)


def misfit(job, record):
    """What is wrong with a compiled kernel's parameters, which a launch writes by its launcher's list; or nothing."""
    kernel = json.loads(Path(record.path).read_text())["kernel"]
    try:
        Layout(job.launcher, launcher_of(job).build(job.problem, job.config), kernel)
    except RuntimeError as error:
        return str(error)
    return ""


def main(folder, highest):
    """Compile into `folder`; print the records, and for the lowest Triton how alike chips are, as JSON."""
    start, done = time.perf_counter(), []
    jobs = {(job.module, job.launcher, job.arch, job.problem, job.config): job for job in all_jobs(highest)}
    jobs, total = list(jobs.values()), len(jobs)
    # The workers of pytest share the cores.
    processes = max(1, os.cpu_count() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))

    def show(record):
        if not record.error:
            record = replace(record, error=misfit(jobs[len(done)], record))
        done.append(record)
        if len(done) % 50 == 0 or len(done) == total:
            failed, minutes = sum(bool(r.error) for r in done), (time.perf_counter() - start) / 60
            print(f"{len(done)} of {total} kernels, {failed} failed, {minutes:.1f} min", file=sys.stderr, flush=True)

    precompile(jobs, Path(folder), processes, on_record=show)
    print(json.dumps([[asdict(record) for record in done], [] if highest else compare_alike()]))


def compile_all(folder, first_on_path=""):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [first_on_path, os.getcwd(), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    program = f"from tests.meta.test_compile_matrix import main; main({str(folder)!r}, {bool(first_on_path)})"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    return json.loads(done.stdout)


def check(records):
    ops = all_ops()
    budgets = {}
    for op in ops.values():
        for variant in op.variants:
            if variant.name != "reference":
                budgets[op.name, variant.name] = variant.load().stack_budget
    assert {(r["op"], r["variant"]) for r in records} == set(budgets)
    assert {r["arch"] for r in records} == set(GPU_ARCHS)
    faults = []
    for r in records:
        where = f"{r['op']} {r['launcher']} for sm_{r['arch']}, {r['problem']} {r['config']}"
        if r["error"]:
            faults.append(f"{where}: {r['error']}")
        elif r["shared"] > named(r["arch"]).smem:
            faults.append(f"{where}: {r['shared']} bytes of shared memory, the chip has {named(r['arch']).smem}")
        elif r["stack_bytes"] > budgets[r["op"], r["variant"]]:
            faults.append(f"{where}: {r['stack_bytes']} bytes of stack, more than the room allows")
        elif r["waits"] != (r["config"] or {}).get("early" if r["launcher"] in EARLY else "pdl", False):
            faults.append(f"{where}: begins by waiting: {r['waits']}, which is not what its config says")
    assert not faults, "\n".join(faults)


def test_on_this_triton(tmp_path):
    records, found = compile_all(tmp_path)
    check(records)
    assert {launcher for launcher, *_ in found} == SAMPLES
    assert all(same for *_, same in found), found


@pytest.mark.skipif(not OTHER, reason="FLASHINFER_TEST_TRITON names no second Triton (no GPU is needed)")
def test_on_the_highest_triton(tmp_path):
    probe = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    version = subprocess.run(probe, env=os.environ | {"PYTHONPATH": OTHER}, capture_output=True, text=True, check=True)
    assert version.stdout.strip() == ("3.9.0" if sys.version_info >= (3, 11) else "3.8.0")
    check(compile_all(tmp_path, OTHER)[0])
