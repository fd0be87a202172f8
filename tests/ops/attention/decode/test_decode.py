"""What decode adds to attention: its variants, splits combined in the launch that makes them, FP8 keys and values."""

from dataclasses import replace

import pytest
import torch

from flashinfer._core.checks import UnsupportedConfig
from flashinfer._core.target import GPU_ARCHS, named
from flashinfer.ops.attention.catalog import decode_problems
from flashinfer.ops.attention.decode import decode
from flashinfer.ops.attention.problem import Problem
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.attention.cases import backends, check, run_decode, run_paged
from tests.ops.attention.oracle import Options

BASE = Problem("paged", "bf16", "bf16", "bf16", 128, 128, 4, page_size=16, rows=16)
RING = decode.variants[0]


@pytest.mark.parametrize("change", (
    dict(head_dim_qk=520), dict(head_dim_vo=272, kv_dtype="fp8e4nv"), dict(head_dim_qk=512, rows=32),
    dict(head_dim_vo=20), dict(q_dtype="fp32", kv_dtype="fp32"), dict(kv_dtype="fp16"),
    dict(kv_dtype="fp8e4nv", head_dim_qk=72), dict(aligned=False), dict(rows=128), dict(pos_encoding="ROPE_LLAMA"),
))  # fmt: skip
def test_the_ring_kernel_refuses_by_name(change):
    reason = RING.why_not(replace(BASE, **change), named("90a"))
    assert any(str(value) in reason or name in reason for name, value in change.items()) or "16 bytes" in reason
    assert RING.why_not(BASE, named("90a")) == ""


def test_the_ring_kernel_refuses_wide_e4m3_values_where_chips_do_not_convert_them():
    wide = replace(BASE, head_dim_qk=256, head_dim_vo=256)
    for arch, refused in (("80", True), ("86", True), ("89", False), ("90a", False), ("120a", False)):
        assert bool(RING.why_not(replace(wide, kv_dtype="fp8e4nv"), named(arch))) is refused
        assert RING.why_not(replace(wide, kv_dtype="fp8e5"), named(arch)) == ""
        assert RING.why_not(replace(wide, head_dim_vo=128, kv_dtype="fp8e4nv"), named(arch)) == ""


@pytest.mark.parametrize("arch", GPU_ARCHS)
def test_rings_fit_the_chip(arch):
    target = named(arch)
    problems = [p for p in decode_problems() if not RING.why_not(p, target)]
    assert problems
    for p in problems:
        c = RING.config(p, target)
        size = 1 if p.kv_dtype.startswith("fp8") else 2
        assert c.num_stages * c.block_n * (p.head_dim_qk + p.head_dim_vo) * size <= target.smem
        assert c.block_m == p.rows and c.num_warps % (c.block_m // 16) == 0


@pytest.mark.gpu
def test_an_older_name_takes_the_ring_kernel_and_an_explicit_one_does_not_fall_back(device):
    assert decode(BASE, device, "fa2").variant.name == "sm80"
    assert decode(replace(BASE, head_dim_qk=256, head_dim_vo=256), device, "fa2").variant.name == "sm80"
    assert decode(replace(BASE, head_dim_qk=520, head_dim_vo=520), device, "fa2").variant.name == "portable"
    with pytest.raises(UnsupportedConfig, match="head_dim_qk 520"):
        decode(replace(BASE, head_dim_qk=520, head_dim_vo=520), device, "sm80")


# On a CPU the splits are of few keys: the interpreter runs one program after the other.
@pytest.mark.parametrize("heads", ((4, 4), (8, 2), (16, 1)))
@pytest.mark.parametrize("fixed", (None, 48))
def test_splits_are_combined(heads, fixed, device):
    kv = (5003, 17, 0, 1100) if device.type == "cuda" else (200, 17, 0, 90)
    x = generate.ragged_batch([1] * 4, list(kv), *heads, 64, dtype=torch.float16, device=device)
    plan = dict(fixed_split_size=fixed) if fixed else None
    for backend in backends(device):
        check(run_decode(x, Options(), backend, plan=plan), x, Options())


@pytest.mark.gpu
@pytest.mark.parametrize(("q_len", "heads", "page_size"), (
    (1, (5, 5), 16), (2, (16, 1), 5), (4, (32, 8), 16), (8, (32, 8), 1), (16, (32, 8), 64),
))  # fmt: skip
def test_few_query_tokens_over_many_keys(q_len, heads, page_size, device):
    kv = (4097, q_len, 1023, 300)
    x = generate.ragged_batch([q_len] * 4, list(kv), *heads, 128, dtype=torch.bfloat16, device=device)
    options = Options(causal=True)
    for backend in backends(device):
        check(run_paged(x, options, backend, page_size=page_size), x, options)


@pytest.mark.gpu
@pytest.mark.parametrize(("q_len", "heads", "page_size"), (
    (1, (16, 2), 16), (1, (32, 2), 1), (4, (16, 2), 24), (4, (32, 2), 16),
))  # fmt: skip
@pytest.mark.parametrize("dims", ((256, 256), (192, 192), (136, 136), (192, 128), (128, 256), (512, 512)))
@pytest.mark.parametrize("kv_dtype", (None, torch.float8_e4m3fn, torch.float8_e5m2))
def test_wide_heads(q_len, heads, page_size, dims, kv_dtype, device):
    kv = (4097, q_len, 1023, 300)
    x = generate.ragged_batch(
        [q_len] * 4, list(kv), *heads, dims[0], head_dim_vo=dims[1], dtype=torch.bfloat16, kv_dtype=kv_dtype,
        device=device,
    )  # fmt: skip
    options = Options(causal=True)
    for backend in backends(device):
        check(run_paged(x, options, backend, page_size=page_size), x, options)


@pytest.mark.gpu
def test_the_order_of_arrival_does_not_show(device):
    """Many splits, whichever is done last: every run gives the same bits, and leaves the counts as it found them."""
    x = generate.ragged_batch([1] * 3, [30011, 9000, 70], 32, 8, 128, dtype=torch.bfloat16, device=device)
    paged = generate.paged(x, 16)
    for backend in backends(device):
        first = run_decode(x, Options(), backend, paged=paged)
        for _ in range(20):
            for a, b in zip(run_decode(x, Options(), backend, paged=paged), first):
                assert_bitwise(a, b)


def test_nan_comes_out(device):
    """A NaN among a request's keys or values shows in its output, split or not, and in no other request's."""
    kv = (6000, 40, 33) if device.type == "cuda" else (100, 40, 33)
    x = generate.ragged_batch([1] * 3, list(kv), 4, 2, 64, dtype=torch.float16, device=device)
    x.k[50, 0, 3] = float("nan")
    x.v[kv[0] + 2, 1, 5] = float("nan")
    for backend in backends(device):
        out, lse = run_decode(x, Options(), backend)
        assert out[0, :2].isnan().all() and lse[0, :2].isnan().all()
        assert out[1, 2:, 5].isnan().all()
        out[0, :2] = 0
        out[1, 2:, 5] = 0
        assert out.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", (torch.float8_e4m3fn, torch.float8_e5m2))
@pytest.mark.parametrize("q_len", (1, 8))
def test_fp8_keys_keep_the_range_of_bfloat16_queries(kv_dtype, q_len, device):
    """Queries of any size: those that float16 cannot hold included."""
    x = generate.ragged_batch([q_len] * 3, [2049, 64, 17], 8, 2, 128, dtype=torch.bfloat16, device=device)
    x = replace(x, k=x.k.to(kv_dtype), v=x.v.to(kv_dtype))
    for size in (1.0, 2.0**60, 2.0**-60):
        y = replace(x, q=x.q * size)
        options = Options(causal=True, sm_scale=128**-0.5 / size)
        for backend in backends(device):
            check(run_paged(y, options, backend), y, options)


def test_more_splits_than_one_level_combines(device):
    """98 splits of 128 keys: right, the same bits again, and alone as in a batch."""
    kv = (97 * 128 + 5, 300)
    x = generate.ragged_batch([1] * 2, list(kv), 3, 1, 32, dtype=torch.float16, device=device)
    alone = generate.ragged_batch([1], [kv[0]], 3, 1, 32, dtype=torch.float16, device=device)
    alone = replace(alone, q=x.q[:1], k=x.k[: kv[0]], v=x.v[: kv[0]])
    plan = dict(fixed_split_size=128)
    for backend in backends(device):
        result = run_decode(x, Options(), backend, plan=plan)
        check(result, x, Options())
        for again in (run_decode(x, Options(), backend, plan=plan), run_decode(alone, Options(), backend, plan=plan)):
            for a, b in zip(again, result):
                assert_bitwise(a, b[: len(a)])
        windowed = Options(window_left=12000)
        check(run_decode(x, windowed, backend, plan=plan), x, windowed)
