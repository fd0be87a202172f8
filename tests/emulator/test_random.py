"""Random calls of each kernel, each from its own seed, which also decides the order in which warps run."""

import random
import time

import pytest
import torch

from flashinfer.testing import generate
from flashinfer.testing.emulator import emulate
from tests.emulator import test_decode, test_gemm, test_mla, test_prefill
from tests.ops.attention.oracle import Options

CPU = torch.device("cpu")
BF16, HALF, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
LENGTHS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 200, 333, 600)
# Of each kernel, as many calls as fit.
SECONDS = 4


def options_of(r):
    o = Options(causal=r.random() < 0.6)
    other = r.random()
    if other < 0.25:
        o.window_left = r.choice((0, 1, 30, 64, 200))
    elif other < 0.4:
        o.logits_soft_cap = r.choice((1.5, 30.0))
    elif other < 0.5:
        o.pos_encoding_mode = "ALIBI"
    if r.random() < 0.3:
        o.sm_scale = r.choice((0.0, -0.3, 1.0, 0.02))
    return o


def prefill(r, seed):
    n, heads = r.randint(1, 4), r.choice((1, 2, 3))
    # Few rows would be decode's.
    qo, kv = [200] + [min(r.choice(LENGTHS), 200) for _ in range(n - 1)], [r.choice(LENGTHS) for _ in range(n)]
    is_fp8 = r.random() < 0.25
    dim = r.choice((64, 128) if is_fp8 else (64, 72, 80, 96, 104, 128, 192, 256))
    dtype = E4M3 if is_fp8 else r.choice((BF16, BF16, HALF))
    narrow = dtype != E4M3 and (dim == 64 or dim == 128 and dtype == BF16) and r.random() < 0.5
    x = generate.ragged_batch(
        qo, kv, r.choice((1, 2, 3, 5, 8)) * heads, heads, dim, head_dim_vo=min(dim, 128) if dim == 192 else dim,
        dtype=dtype, kv_dtype=r.choice((E4M3, E5M2)) if narrow else None,
    )  # fmt: skip
    if not is_fp8 and not narrow and r.random() < 0.3:
        x.k[: len(x.k) // 2] *= 30
    o, page_size, layout = options_of(r), r.choice((0, 0, 16, 64, 256) if is_fp8 else (0, 0, 1, 3, 16, 64, 256)), "NHD"
    plan = test_prefill.fp8.OUT if is_fp8 else None
    with emulate("90a", seed=seed, sms=r.randint(1, 3)) as launched:
        if page_size:
            layout = r.choice(("NHD", "HND"))
            result = test_prefill.run_paged(x, o, "sm90", page_size=page_size, kv_layout=layout, plan=plan)
        else:
            result = test_prefill.run_ragged(x, o, "sm90", plan=plan)
    (test_prefill.fp8.check if is_fp8 else test_prefill.check)(result, x, o)
    return launched


def latents(r, seed):
    n = r.randint(1, 4)
    case = ([1] + [r.choice((0, 1, 1, 2, 5, 17)) for _ in range(n - 1)], [r.choice(LENGTHS) for _ in range(n)],
            r.choice((1, 5, 16, 21, 64)), r.choice((1, 2, 5, 16, 64, 128)), r.random() < 0.6, r.choice((BF16, HALF)),
            r.choice((0, 64)))  # fmt: skip
    with emulate("90a", seed=seed, sms=r.randint(1, 3)) as launched:
        test_mla.mla._check_batch(case, r.choice((case[5], E4M3, E5M2)), r.random() < 0.5, CPU)
    return launched


def decode(r, seed):
    heads = r.choice((1, 2))
    test_decode.check_decode(
        seed, Options(window_left=r.choice((-1, -1, 0, 5, 100))), r.choice((BF16, HALF)),
        r.choice((None, None, E4M3, E5M2)), r.choice((64, 80, 128)), (r.choice((1, 3, 8, 20)) * heads, heads),
        r.choice((1, 5, 16, 64)), [r.choice(LENGTHS) for _ in range(r.randint(1, 4))], r.choice(("80", "89", "90a")),
        r.choice(("NHD", "HND")),
    )  # fmt: skip


def grouped(r, seed):
    lengths = [r.choice((0, 1, 3, 64, 65, 127, 128, 129, 200)) for _ in range(r.randint(1, 9))]
    kind = r.choice(("offsets", "counts", "sorted", "shuffled"))
    with emulate("90a", seed=seed, sms=r.randint(2, 3)) as launched:
        test_gemm.grouped.test_groups(CPU, lengths, r.choice((136, 264, 520)), r.choice((128, 144, 400, 640)), kind)
    return launched


def scaled(r, seed):
    m, n, k = r.choice((1, 17, 64, 65, 130, 300)), r.choice((136, 264, 648)), r.choice((128, 144, 400, 1040))
    with emulate("90a", seed=seed, sms=r.randint(2, 3)) as launched:
        test_gemm.blockscaled.test_shapes(CPU, m, n, k, r.choice((1, 128)))
    return launched


@pytest.mark.matrix
@pytest.mark.parametrize("kernel", (prefill, latents, decode, grouped, scaled), ids=lambda kernel: kernel.__name__)
def test_random_calls(kernel, pytestconfig):
    end, seed = time.monotonic() + SECONDS, pytestconfig.getoption("fuzz_seed")
    while time.monotonic() < end:
        seed += 1
        torch.manual_seed(seed)
        try:
            launched = kernel(random.Random(seed), seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        assert launched != [], f"seed {seed}"
