"""Compiling ahead: what is enumerated, where it goes, that it is found again, and what a failure costs."""

import os
import sys
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

import flashinfer
from flashinfer._core import kernel_cache, precompile
from flashinfer._core.checks import UnsupportedConfig
from flashinfer._core.dispatch import Op, Variant
from flashinfer._core.implementation import Implementation
from flashinfer._core.precompile import Job, cached_jobs, catalog_jobs
from flashinfer._core.target import named
from flashinfer.ops import all_ops
from flashinfer.ops.attention.variants import find
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


def kernels(problem, config):
    yield first, problem, config
    if problem.weighted:
        yield second, Half(problem.offset * 2), None


IMPLEMENTATION = Implementation(print, (first, second), kernels=kernels)


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


def test_an_implementation_may_say_which_kernels_a_problem_needs():
    jobs = [(job.launcher, job.problem, job.config) for job in catalog_jobs({"split": SPLIT}, ["80"])]
    plain, weighted = SPLIT.catalog()
    assert jobs == [("first", plain, Config(32)), ("first", weighted, Config(32)), ("second", Half(10), None)]


def test_unknown_architecture():
    with pytest.raises(ValueError, match="arch: got '75'; allowed: .*90a"):
        list(catalog_jobs(OPS, ["75"]))


@pytest.mark.matrix
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


@pytest.mark.matrix
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


@pytest.mark.matrix
def test_failure_costs_one_job(tmp_path):
    good = next(catalog_jobs(OPS, ["90a"]))
    unsupported = replace(good, problem=Problem("nonsense"))
    missing = replace(good, launcher="missing")
    dies = replace(good, module="tests.core.dies")
    records = precompile.precompile([unsupported, dies, missing, good], tmp_path / "out", workers=1)
    errors = [record.error for record in records]
    assert "nonsense" in errors[0] and "status 7" in errors[1] and "missing" in errors[2] and errors[3] == ""
    assert [entry["op"] for entry in kernel_cache.entries(tmp_path / "out")] == ["scale"]


def test_workers_import_nothing_from_the_current_folder(tmp_path, monkeypatch):
    """Modules that Python, torch and Triton import by name lie there, and would leave a mark."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("json", "torch", "triton", "numpy", "dataclasses", "sitecustomize", "typing_extensions"):
        (here / f"{name}.py").write_text(f"open({str(here / 'ran')!r}, 'a').write(__name__); raise SystemExit(3)")
    (job, *_) = catalog_jobs(OPS, ["80"])
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", ["", str(here), *sys.path])
    (record,) = precompile.precompile([job], tmp_path / "out", workers=1)
    assert not record.error and not (here / "ran").exists()


def test_package_in_the_current_folder_hides_no_module(monkeypatch):
    root = Path(flashinfer.__file__).parents[1]
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "path", [str(root), "", "/usr/lib"])
    assert precompile._module_folders() == ["/usr/lib", str(root)]


@pytest.mark.parametrize(
    "field, value",
    [
        ("variant", "planted:logits|0||||softmax|"),
        ("variant", "planted:f.g|0|os:system|1|a:fp32|softmax|1"),
        ("variant", "|"),
        ("head_dim_qk", "128"),
        ("head_dim_qk", [128]),
        ("page_size", -1),
        ("q_dtype", "planted"),
    ],
)
def test_entry_names_no_module_to_import(field, value, tmp_path, monkeypatch):
    """An entry that a writer of the cache made up, checksums and all, costs itself."""
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    job = next(job for job in catalog_jobs({"decode": all_ops()["decode"]}, ["90a"]) if job.variant == "portable")
    entry = {"op": job.launcher, "fault": "", "key": {"problem": asdict(job.problem), "config": asdict(job.config)}}
    forged = {**entry, "key": {**entry["key"], "problem": {**asdict(job.problem), field: value}}}
    monkeypatch.setattr(kernel_cache, "entries", lambda base: [{**entry, "key": {}}, forged, entry])
    jobs = [job for job in cached_jobs({"decode": all_ops()["decode"]}, ["90a"], tmp_path)]
    assert job.problem in [found.problem for found in jobs]
    with pytest.raises(UnsupportedConfig, match="not met|allowed"):
        find("planted:logits|0||||softmax|")
    assert not (tmp_path / "ran").exists() and "planted" not in sys.modules


def test_workers_end(tmp_path):
    before = threading.active_count()
    assert precompile.precompile([], tmp_path / "out") == []
    assert threading.active_count() == before
    assert named("90a").arch == "90a"
