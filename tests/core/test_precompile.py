"""Compiling ahead: what is enumerated, where it goes, that it is found again, and what a failure costs."""

import os
import threading
from dataclasses import asdict, dataclass, replace

import pytest

from flashinfer._core import kernel_cache, precompile
from flashinfer._core.dispatch import Op, Variant
from flashinfer._core.precompile import Job, cached_jobs, catalog_jobs
from flashinfer._core.target import named
from tests.core import samples
from tests.core.samples import Config, Problem

OPS = {"scaling": samples.scaling}


# -- a module whose launchers take problems of different types ---------------------------------------------------------


@dataclass(frozen=True)
class Half:
    doubled: int


class Named:
    """As much of a Launcher as enumerating needs."""

    def __init__(self, name):
        self.name = name


first, second = Named("first"), Named("second")
LAUNCHERS = (first, second)


def kernels(problem, config):
    yield first, problem, config
    if problem.weighted:
        yield second, Half(problem.offset * 2), None


def two_kinds(problem, target):
    return Config(32)


SPLIT = Op(
    "split",
    Problem,
    (Variant("portable", "tests.core.test_precompile", config=two_kinds), Variant("reference", "nowhere")),
    lambda: (Problem("bf16", offset=5), Problem("bf16", True, 5)),
)


def test_catalog_by_variant_and_architecture():
    jobs = list(catalog_jobs(OPS, ["80", "90a"]))
    wanted = {
        ("80", Problem("bf16"), Config(128)),
        ("80", Problem("bf16", True), Config(128)),
        ("90a", Problem("bf16"), Config(256)),
        ("90a", Problem("bf16", True), Config(256)),
        ("90a", Problem("fp32"), Config(256)),
    }
    assert {(job.arch, job.problem, job.config) for job in jobs} == wanted and len(jobs) == len(wanted)
    assert {(job.op, job.variant, job.launcher) for job in jobs} == {("scaling", "portable", "scale")}


def test_module_may_say_which_kernels_a_problem_needs():
    jobs = [(job.launcher, job.problem, job.config) for job in catalog_jobs({"split": SPLIT}, ["80"])]
    plain, weighted = SPLIT.catalog()
    assert jobs == [("first", plain, Config(32)), ("first", weighted, Config(32)), ("second", Half(10), None)]


def test_unknown_architecture():
    with pytest.raises(ValueError, match="arch: got '75'; allowed: .*90a"):
        list(catalog_jobs(OPS, ["75"]))


def test_kernels_go_out_and_are_found_again(tmp_path, base, monkeypatch, in_triton):
    out = tmp_path / "out"
    jobs = list(catalog_jobs(OPS, ["80", "90a"]))
    seen = []
    records = precompile.precompile(jobs + jobs, out, workers=2, on_record=seen.append)
    assert records == seen and len(records) == 5
    for job, record in zip(jobs, records, strict=True):
        assert (record.arch, record.problem, record.config) == (job.arch, asdict(job.problem), asdict(job.config))
        assert not record.error and not record.cached and record.seconds > 0
        assert 0 < record.registers <= 255 and record.stack_bytes == 0 and record.shared == 0
        assert os.path.commonpath([record.path, out]) == str(out)
    assert {entry["path"] for entry in kernel_cache.entries(out)} == {record.path for record in records}
    assert kernel_cache.verify(out) == [] and not base.exists()

    assert all(record.cached for record in precompile.precompile(jobs, out, workers=1))

    for place in ("FLASHINFER_PRECOMPILED_DIR", "FLASHINFER_WORKSPACE_BASE"):
        found = in_triton(from_frozen, {place: str(out)}, jobs)
        assert found == [record.path for record in records]


def from_frozen(variables, jobs):
    os.environ.update(variables | {"FLASHINFER_FROZEN": "1"})
    try:
        return [str(samples.scale.entry(job.problem, job.config, job.arch).path) for job in jobs]
    finally:
        for name in (*variables, "FLASHINFER_FROZEN"):
            del os.environ[name]


def test_what_a_cache_holds_is_compiled_for_another_architecture(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    met = Problem("bf16", weighted=True, offset=9)
    (job,) = [job for job in catalog_jobs(OPS, ["90a"]) if job.problem.weighted]
    precompile.precompile([replace(job, problem=met)], run, workers=1)
    jobs = list(cached_jobs(OPS, ["80", "100a"], run))
    wanted = [("80", met, Config(128)), ("100a", met, Config(256))]
    assert [(job.arch, job.problem, job.config) for job in jobs] == wanted
    assert [record.error for record in precompile.precompile(jobs, out, workers=1)] == ["", ""]
    assert list(cached_jobs({"split": SPLIT}, ["80"], run)) == []


def test_stored_config_is_kept_where_no_variant_chooses_one(tmp_path, monkeypatch):
    stored = {"op": "second", "fault": "", "key": {"problem": {"doubled": 44}, "config": None}}
    monkeypatch.setattr(kernel_cache, "entries", lambda base: [stored])
    assert list(cached_jobs({"split": SPLIT}, ["89"], tmp_path)) == [
        Job("split", "portable", "tests.core.test_precompile", "second", "89", Half(44), None)
    ]


def test_failure_costs_one_job(tmp_path):
    good = next(catalog_jobs(OPS, ["90a"]))
    unsupported = replace(good, problem=Problem("nonsense"))
    missing = replace(good, launcher="missing")
    dies = replace(good, module="tests.core.dies")
    records = precompile.precompile([unsupported, dies, missing, good], tmp_path / "out", workers=1)
    errors = [record.error for record in records]
    assert "nonsense" in errors[0] and "status 7" in errors[1] and "missing" in errors[2] and errors[3] == ""
    assert [entry["op"] for entry in kernel_cache.entries(tmp_path / "out")] == ["scale"]


def test_workers_end(tmp_path):
    before = threading.active_count()
    assert precompile.precompile([], tmp_path / "out") == []
    assert threading.active_count() == before
    assert named("90a").arch == "90a"
