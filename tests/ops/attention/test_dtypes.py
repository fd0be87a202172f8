"""Which dtypes attention takes: one rule on every device, by name; and that every combination has a variant on each."""

import itertools
from functools import partial

import pytest
import torch

import flashinfer
from flashinfer._core.target import CPU, GPU_ARCHS, named
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashinfer.ops.attention.config import _shared_bytes
from flashinfer.ops.attention.decode import decode
from flashinfer.ops.attention.mla import mla
from flashinfer.ops.attention.mla.problem import Problem as LatentProblem
from flashinfer.ops.attention.prefill import prefill
from flashinfer.ops.attention.problem import POS_ENCODINGS, Problem
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_close
from tests.ops.attention import oracle
from tests.ops.attention.cases import run_paged, run_ragged, workspace
from tests.ops.attention.oracle import Options

HALF, E4M3, E5M2 = torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
# (q, k and v, out, the argument that is wrong)
WRONG = (
    (torch.int8, torch.int8, HALF, "q_data_type"), (torch.int32, torch.int32, HALF, "q_data_type"),
    (torch.bool, torch.bool, HALF, "q_data_type"), (torch.float64, torch.float64, HALF, "q_data_type"),
    (torch.complex64, torch.complex64, HALF, "q_data_type"), (torch.uint8, HALF, HALF, "q_data_type"),
    (HALF, torch.float32, HALF, "kv_data_type"), (HALF, torch.bfloat16, HALF, "kv_data_type"),
    (HALF, torch.int8, HALF, "kv_data_type"), (E4M3, HALF, HALF, "kv_data_type"),
    (torch.bfloat16, torch.float64, HALF, "kv_data_type"), (HALF, HALF, torch.int8, "o_data_type"),
    (HALF, HALF, torch.bool, "o_data_type"), (HALF, HALF, torch.float64, "o_data_type"),
    (HALF, HALF, torch.uint8, "o_data_type"),
)  # fmt: skip


def test_wrappers_name_the_argument(device):
    indptr = torch.tensor([0, 2], dtype=torch.int32, device=device)
    ones, indices = torch.ones(1, dtype=torch.int32, device=device), torch.arange(2, dtype=torch.int32, device=device)
    for q, kv, o, name in WRONG:
        types = dict(q_data_type=q, kv_data_type=kv, o_data_type=o)
        with pytest.raises(ValueError, match=name):
            flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device)).plan(indptr, indptr, 2, 1, 64, **types)
        with pytest.raises(ValueError, match=name):
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device)).plan(
                indptr, indptr, indices, ones, 2, 1, 64, 4, **types
            )
        with pytest.raises(ValueError, match=name):
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device)).plan(
                indptr, indices, ones, 2, 1, 64, 4, **types
            )
    for q, kv, name in ((torch.float32, torch.float32, "q_data_type"), (HALF, torch.float32, "kv_data_type")):
        with pytest.raises(ValueError, match=name):
            BatchMLAPagedAttentionWrapper(workspace(device)).plan(
                indptr, indptr, indices, ones, 2, 64, 16, 4, False, 1.0, q, kv
            )


@pytest.mark.parametrize("dtype", (torch.int8, torch.int32, torch.bool, torch.float64))
def test_single_requests(dtype, device):
    q, k = torch.zeros(3, 2, 64, device=device).to(dtype), torch.zeros(5, 1, 64, device=device).to(dtype)
    for call in (
        lambda: flashinfer.single_prefill_with_kv_cache(q, k, k),
        lambda: flashinfer.single_decode_with_kv_cache(q[0], k, k),
        lambda: flashinfer.single_prefill_with_kv_cache(q.half(), k, k),
        lambda: flashinfer.single_prefill_with_kv_cache(q.half(), k.half(), k),
    ):
        with pytest.raises(ValueError, match="dtype|k:|v:"):
            call()


def test_the_cpu_refuses_what_chips_refuse():
    for q, kv, o in itertools.product(("bf16", "fp16", "fp32", "fp64", "i8", "i32", "i1", "u8", "fp8e4nv"), repeat=3):
        for op, p in (
            (prefill, Problem("ragged", q, kv, o, 64, 64, 2)),
            (decode, Problem("ragged", q, kv, o, 64, 64, 2, rows=16)),
            (mla, LatentProblem(q, kv, o, 16, 512, 64, 16)),
        ):  # fmt: skip
            on_chips = any(not v.refuses(p, named("90a")) for v in op.variants if v.name != "reference")
            reference = next(v for v in op.variants if v.name == "reference")
            assert on_chips == (not reference.refuses(p, CPU)), p


def combinations():
    """What upstream takes: FP8 queries with FP8 keys, 16-bit queries with their own or FP8 keys, float32."""
    fp8 = ("fp8e4nv", "fp8e5")
    for kv in fp8:
        yield from ((q, kv, o) for q in fp8 for o in ("fp16", "bf16", "fp8e4nv"))
        yield from ((q, kv, o) for q in ("fp16", "bf16") for o in ("fp16", "bf16"))
    yield from ((x, x, x) for x in ("fp16", "bf16", "fp32"))


def shapes():
    """head_dim of q and of v, page_size (0: ragged), aligned rows."""
    for dim in range(16, 513, 8):
        for page in (0, 1, 16, 24):
            yield dim, dim, page, dim % 16 == 0
    for dim, page in itertools.product((64, 128, 256), (2, 3, 5, 7, 8, 32, 64, 128, 256, 512, 1024)):
        yield dim, dim, page, True
    yield from ((192, 128, page, True) for page in (0, 1, 16))


OPTIONS = (
    {}, dict(mask="causal"), dict(mask="custom"), dict(window=True, mask="causal"), dict(soft_cap=True),
    dict(sinks=True), dict(head_scales=True), dict(matrix=False), dict(lse=True, split=False),
    dict(mask="causal", window=True, soft_cap=True, sinks=True, head_scales=True),
) + tuple(dict(pos_encoding=encoding) for encoding in POS_ENCODINGS[1:])  # fmt: skip


@pytest.mark.parametrize("arch", ("80", "90a", "100a", "120a"))
def test_every_combination_has_a_variant(arch):
    """No chip is left without a kernel for a type, head_dim, page size, mask or backend's name; nothing is compiled."""
    target = named(arch)
    backends = ("auto", "fa2", "cutlass", "cudnn", "trtllm-gen", "xqa")
    count = 0
    for q, kv, o in combinations():
        if o == "fp8e4nv" and target.capability < 89:
            continue
        for place, (dim, dim_vo, page, aligned) in enumerate(shapes()):
            # All options at some shapes, some options at all.
            some = OPTIONS if dim in (64, 128, 256) and page in (0, 1, 16) else [OPTIONS[place % len(OPTIONS)]]
            for options in some:
                source = "paged" if page else "ragged"
                p = Problem(source, q, kv, o, dim, dim_vo, 4, page, aligned=aligned, **options)
                for op, rows in ((prefill, 128), (decode, 16)):
                    asked = Problem(**{**vars(p), "rows": rows})
                    chosen = op.select(asked, target, backends[count % len(backends)])
                    assert chosen.variant.name != "reference"
                    c = chosen.config
                    # Of rotated float32 keys, which it counts twice, the estimate is half as much again as is taken.
                    if chosen.variant.name == "portable" and (q != "fp32" or p.pos_encoding != "ROPE_LLAMA"):
                        assert _shared_bytes(asked, c.block_m, c.block_n, c.num_stages) <= target.smem, asked
                    count += 1
    assert count > 10_000


@pytest.mark.parametrize("dim, page", ((64, 1), (128, 24), (256, 16), (72, 5)))
@pytest.mark.parametrize("q, kv", ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2), (HALF, E5M2)))
def test_fp8_of_every_kind(q, kv, dim, page, device):
    """Products of FP8 are exact in float16, so that only weights and outputs are rounded."""
    x = generate.ragged_batch([3, 0, 9], [30, 5, 9], 4, 2, dim, dtype=q, kv_dtype=kv, device=device)
    o = Options(causal=True)
    truth, truth_lse = oracle.batch(x, o, torch.float64)
    _, same_lse = oracle.batch(x, o, torch.float32)
    for backend in ("auto", "portable") if device.type == "cuda" and (q, kv) != (E4M3, E4M3) else ("portable",):
        for out_dtype in (HALF, torch.bfloat16):
            plan = dict(o_data_type=out_dtype)
            for run in (partial(run_paged, page_size=page), run_ragged):
                out, lse = run(x, o, backend, plan=plan)
                assert out.dtype == out_dtype
                # Weights are rounded to float16, outputs to their own type.
                rounded = oracle.batch(x, o, HALF)[0].to(out_dtype)
                assert_close(out, rounded, truth, "out")
                assert_close(lse, same_lse, truth_lse, "lse")
