"""Hopper's products in the emulator, against float64."""

import pytest
import torch

from flashinfer.ops.gemm.blockscaled import config
from flashinfer.ops.gemm.dense import Inputs, Problem, dense
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_close
from flashinfer.testing.emulator import emulate
from tests.ops.gemm.blockscaled import test_hopper as blockscaled
from tests.ops.gemm.blockscaled import test_sm90_widened as widened
from tests.ops.gemm.grouped import test_hopper as grouped
from tests.ops.tensor_cores import fp8_product

SEEDS = (0, 1)
CPU = torch.device("cpu")
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
         torch.float32: "fp32"}  # fmt: skip


def check_dense(m, n, k, seed, dtype=torch.bfloat16, out=torch.bfloat16, columns=128, b_major="k", slices=1, batch=2,
                bias=False, watch=None):  # fmt: skip
    rows = 16
    while rows < min(m, 256):
        rows *= 2
    a = generate.randn(batch, m, k).to(dtype)
    b = generate.randn(batch, k, n).to(dtype)
    b = b.mT.contiguous().mT if b_major == "k" else b
    extra = generate.randn(n, dtype=out) if bias else None
    problem = Problem(NAMES[dtype], NAMES[dtype], NAMES[out], "k", b_major, "n", rows, columns, split=slices > 1,
                      bias=NAMES[out] if bias else "")  # fmt: skip
    result = torch.empty(batch, m, n, dtype=out)
    with emulate("90a", seed=seed, watch=watch):
        choice = dense(problem, result.device)
        assert choice.variant.name == "sm90"
        choice.run(Inputs(a, b, result, bias=extra, slices=slices))
    truth = a.double() @ b.double() + (extra.double() if bias else 0)
    same = (a.float() @ b.float() + (extra.float() if bias else 0)).to(out)
    assert_close(result, same, truth, "out")


def test_dense_quickly():
    check_dense(200, 264, 320, 1)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "case",
    (
        dict(m=136, n=264, k=1024, columns=256, batch=1),
        dict(m=3, n=136, k=768, columns=32),
        dict(m=40, n=136, k=264, columns=64, bias=True),
        dict(m=130, n=136, k=1032, slices=3),
        dict(m=5, n=72, k=2048, columns=64, slices=4, out=torch.float32),
        dict(m=130, n=264, k=192, b_major="n", dtype=torch.float16, out=torch.float16),
        dict(m=130, n=264, k=512, dtype=torch.float8_e4m3fn),
        dict(m=20, n=72, k=512, dtype=torch.float8_e5m2, columns=32),
    ),
    ids=str,
)
def test_dense(case, seed):
    check_dense(seed=seed, **case)


def test_scaled_quickly():
    with emulate("90a", seed=1) as launched:
        blockscaled.test_shapes(CPU, 130, 136, 400, 1)
        grouped.test_groups(CPU, [70, 0, 3], 136, 256, "shuffled")
        grouped.test_unscaled(CPU, [200, 60], 136, 192, "lengths")
    assert set(launched) == {"blockscaled_sm90_kernel", "grouped_sm90_kernel", "unscaled_sm90_kernel"}


@pytest.mark.matrix
@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("m, n, k", [(300, 648, 1168), (300, 648, 112), (64, 264, 640), (1, 264, 2048),
                                     (17, 520, 1040), (520, 520, 512)])  # fmt: skip
def test_blockscaled(m, n, k, rows):
    with emulate("90a", seed=m + rows) as launched:
        blockscaled.test_shapes(CPU, m, n, k, rows)
    assert set(launched) == {"blockscaled_sm90_kernel"}


def test_widened_quickly():
    with emulate("90a", seed=1) as launched:
        widened.check(CPU, 130, 264, 256, "nvfp4", batch=1)
        widened.check(CPU, 130, 136, 128, "mxfp8", batch=1, slices=1)
        widened.check(CPU, 20, 136, 640, "nvfp4", batch=1, slices=2)
    assert set(launched) == {"widened_sm90_kernel"}


@pytest.mark.parametrize("m, n, k, slices", [(20, 520, 640, 0), (130, 264, 256, 2)])
def test_widened_tokens(monkeypatch, m, n, k, slices):
    """NVFP4 times NVFP4 is widened to float16. The launch for the tokens runs in Triton's interpreter, as on a CPU."""
    monkeypatch.setattr(config, "widen", lambda problem, target: config.Widen(16, 256, 4, 0))
    with emulate("90a", seed=m) as launched:
        widened.check(CPU, m, n, k, "nvfp4", batch=1, both=True, slices=slices, alpha=0.5)
    assert set(launched) == {"widened_sm90_kernel"}


@pytest.mark.parametrize("name, both", [("nvfp4", False), ("nvfp4", True), ("mxfp4", False)], ids=str)
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize(
    "case",
    [dict(m=16, n=264, k=384), dict(m=3, n=520, k=1280, slices=3, layout="8x4", out_dtype=torch.float32),
     dict(m=1, n=256, k=128, layout="linear", out_dtype=torch.float16), dict(m=9, n=288, k=640, shuffled=True)],
    ids=str,
)  # fmt: skip
def test_widened_rows(monkeypatch, case, rows, name, both):
    """Up to 16 tokens, with 64 and with 128 rows of the weight in a warpgroup."""
    monkeypatch.setattr(config, "widen", lambda problem, target: config.Widen(16, 256, 4, 0))

    def chosen(problem, *sizes):
        return next(c for c in config.widened_tiles(problem) if c.rows == rows), 1

    monkeypatch.setattr(config, "widened_tile", chosen)
    with emulate("90a", seed=rows) as launched:
        widened.check(CPU, name=name, both=both, **case)
    assert set(launched) == {"widened_sm90_kernel"}


@pytest.mark.matrix
@pytest.mark.parametrize("name", widened.FORMATS)
@pytest.mark.parametrize(
    "case",
    (
        dict(m=130, n=264, k=640, layout="8x4"),
        dict(m=260, n=136, k=512, layout="linear", out_dtype=torch.float16),
        dict(m=130, n=256, k=1152, shuffled=True, alpha=3.0, slices=3),
        dict(m=200, n=520, k=256, alpha=0.5, out_dtype=torch.float32),
        dict(m=18, n=136, k=1152, layout="linear"),
        dict(m=40, n=256, k=768, shuffled=True, alpha=3.0, slices=5),
        dict(m=64, n=264, k=256, layout="8x4", slices=1, out_dtype=torch.float32),
    ),
    ids=str,
)
def test_widened(case, name):
    with emulate("90a", seed=len(name)) as launched:
        widened.check(CPU, name=name, **case)
    assert set(launched) == {"widened_sm90_kernel"}


LENGTHS = ([130, 0, 1, 64, 20, 0], [0, 3, 1] * 12, [2, 260])


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["offsets", "counts", "sorted", "shuffled"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: str(x)[:24])
def test_grouped(lengths, kind):
    with emulate("90a", seed=len(kind)) as launched:
        grouped.test_groups(CPU, lengths, 264, 400, kind)
    assert set(launched) == {"grouped_sm90_kernel"}


@pytest.mark.matrix
@pytest.mark.parametrize("case", ["offsets", "fp32", "fp8", "lengths", "columns first"])
@pytest.mark.parametrize("lengths", [[300, 100], [2, 260, 0, 400]], ids=str)
def test_unscaled(lengths, case):
    with emulate("90a", seed=len(case)) as launched:
        grouped.test_unscaled(CPU, lengths, 264, 320, case)
    assert set(launched) == {"unscaled_sm90_kernel"}


@pytest.mark.matrix
def test_short_sums_of_fp8_are_those_of_the_published_model():
    a, b = (generate.randn(1, n, 256).to(torch.float8_e4m3fn) for n in (130, 72))
    outs = []
    for places in (None, 13):
        out = torch.empty(1, 130, 72, dtype=torch.float32)
        problem = Problem("fp8e4nv", "fp8e4nv", "fp32", "k", "k", "n", 256, 128)
        with emulate("90a", fp8_places=places):
            dense(problem, out.device).run(Inputs(a, b.mT, out))
        outs.append(out[0])
    truth = a[0].double() @ b[0].double().mT
    torch.testing.assert_close(outs[0].double(), truth, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(outs[1].double(), fp8_product(a[0], b[0].mT), rtol=1e-6, atol=0)
    assert (outs[1].double() - truth).abs().max() > 1e-3
