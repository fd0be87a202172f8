"""What test_variants.py does in a process whose Triton compiles."""

from dataclasses import asdict, replace

from flashinfer import AttentionVariant
from flashinfer._core.compiler import CompileError
from flashinfer._core.precompile import Job, precompile
from flashinfer._core.target import named
from flashinfer.ops.attention.decode import decode
from flashinfer.ops.attention.prefill import prefill
from flashinfer.ops.attention.problem import Problem
from tests.ops.attention.samples_variants import VARIANTS

VARIANTS_MODULE = "tests.ops.attention.samples_variants"
PAGED = Problem("paged", "bf16", "bf16", "bf16", 128, 128, 4, page_size=16)


def problem_of(variant: AttentionVariant, **changes) -> Problem:
    return replace(PAGED, variant=variant.key, softmax=variant.use_softmax, **changes)


def compiled(variants, op, name: str, arch: str, base, **changes) -> list[dict]:
    """Records of the kernel `name` of an op, compiled in a worker for each of the user variants named."""
    op, target = {"prefill": prefill, "decode": decode}[op], named(arch)
    kernel = next(v for v in op.variants if v.name == name)
    jobs = []
    for variant in map(VARIANTS.get, variants):
        problem = problem_of(variant, **changes)
        assert not kernel.refuses(problem, target), kernel.refuses(problem, target)
        config = kernel.config(problem, target)
        jobs.append(Job(op.name, name, kernel.module, kernel.load().launchers[0].name, arch, problem, config))
    return [asdict(record) for record in precompile(jobs, base, 1, imports=[VARIANTS_MODULE])]


def key_of(variant: str) -> str:
    return VARIANTS[variant].key


def compile_error(variant: str) -> str:
    problem = problem_of(VARIANTS[variant], rows=16)
    portable = next(v for v in decode.variants if v.name == "portable")
    try:
        portable.load().launchers[0].entry(problem, portable.config(problem, named("90a")), "90a")
    except CompileError as error:
        return str(error)
    return ""
