"""Dense products against float64."""

import pytest
import torch

import flashinfer
from flashinfer import gemm
from flashinfer._core import target
from flashinfer._core.checks import UnsupportedConfig
from flashinfer._core.target import named
from flashinfer.ops.gemm import dense as room
from flashinfer.ops.gemm.operands import bucket
from flashinfer.ops.gemm.slices import choose_split
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# On a GPU the first that takes the problem runs, too; in the interpreter there is only the portable one.
kernels = pytest.mark.parametrize("backend", ["reference", "portable", pytest.param("auto", marks=pytest.mark.gpu)])


def truth(a, b, bias=None, scale=1.0):
    y = a.double() @ b.double() * scale
    return y if bias is None else y + bias.double()


def peer(a, b, dtype, bias=None, scale=1.0):
    """As plain torch would: float32 sums, one rounding; on a GPU the sums of its tensor cores."""
    on_tensor_cores = a.is_cuda and a.dim() == 2 and a.dtype in (BF16, FP16)
    y = (torch.mm(a, b, out_dtype=FP32) if on_tensor_cores else a.float() @ b.float()) * scale
    return (y if bias is None else y + bias.float()).to(dtype)


def matrix(*shape, dtype, device, major):
    """Random, its last dimension contiguous, or, if not `major`, the one before it."""
    if major:
        return generate.randn(*shape, dtype=dtype, device=device)
    *outer, rows, columns = shape
    return generate.randn(*outer, columns, rows, dtype=dtype, device=device).mT


def arranged(weight):
    """The weight [n, k] as mm_fp8 takes it, by the words of upstream's documentation: shuffled rows, blocks of 128."""
    n, k = weight.shape
    shuffled = flashinfer.shuffle_matrix_a(weight.view(torch.uint8), 128)
    return shuffled.view(n, k // 128, 128).transpose(0, 1).contiguous().view(weight.dtype)


@kernels
@pytest.mark.parametrize("m, n, k", [(1, 17, 33), (5, 40, 64), (70, 136, 200), (130, 264, 72), (3, 8, 1)])
@pytest.mark.parametrize("a_rows, b_columns", [(True, True), (False, False), (True, False)])
def test_mm_bf16(backend, device, m, n, k, a_rows, b_columns):
    # Triton 3.6's interpreter multiplies bfloat16 wrongly.
    dtype = FP16 if backend == "portable" and device.type == "cpu" else BF16
    a = matrix(m, k, dtype=dtype, device=device, major=a_rows)
    b = matrix(k, n, dtype=dtype, device=device, major=not b_columns)
    out = gemm.mm_bf16(a, b, out_dtype=dtype, backend=backend)
    assert_close(out, peer(a, b, dtype), truth(a, b))


@pytest.mark.parametrize(
    "backend", ["auto", "cudnn", "cutlass", "tgv", "cublaslt", "tinygemm", "cutile", "cute-dsl", "cake"]
)
def test_names_that_upstream_has(backend, device):
    a, b = generate.randn(5, 64, dtype=BF16, device=device), generate.randn(40, 64, dtype=BF16, device=device).T
    assert_close(gemm.mm_bf16(a, b, backend=backend), peer(a, b, BF16), truth(a, b))


@kernels
@pytest.mark.parametrize("out_dtype", [FP16, FP32])
@pytest.mark.parametrize("bias_dtype", [FP16, FP32])
def test_bias_and_out(backend, device, out_dtype, bias_dtype):
    a, b = generate.randn(9, 48, dtype=FP16, device=device), generate.randn(40, 48, dtype=FP16, device=device).T
    bias = generate.randn(40, dtype=bias_dtype, device=device)
    guard = generate.Guarded((9, 40), out_dtype, device)
    assert gemm.mm_bf16(a, b, bias, out=guard.out, out_dtype=out_dtype, backend=backend) is guard.out
    assert_close(guard.out, peer(a, b, out_dtype, bias), truth(a, b, bias))
    guard.check()


@kernels
def test_heads_between_tokens(backend, device):
    """The projections of latent attention: heads are the batch, and lie between tokens, of the result too."""
    a = generate.randn(5, 3, 64, dtype=FP16, device=device).transpose(0, 1)
    b = generate.randn(3, 40, 64, dtype=FP16, device=device).mT
    out = torch.full((5, 3, 40), float("nan"), dtype=FP16, device=device).transpose(0, 1)
    gemm.bmm_bf16(a, b, out=out, out_dtype=FP16, backend=backend)
    assert_close(out, peer(a, b, FP16), truth(a, b))


@kernels
def test_one_matrix_for_all(backend, device):
    a = generate.randn(3, 5, 64, dtype=FP16, device=device)
    b = generate.randn(40, 64, dtype=FP16, device=device).T.expand(3, 64, 40)
    assert_close(gemm.bmm_bf16(a, b, out_dtype=FP16, backend=backend), peer(a, b, FP16), truth(a, b))


@kernels
@pytest.mark.parametrize("a_dtype, b_dtype", [(E4M3, E4M3), (E5M2, E4M3)])
def test_bmm_fp8(backend, device, a_dtype, b_dtype):
    a = generate.randn(2, 20, 256, dtype=a_dtype, device=device)
    b = generate.randn(2, 48, 256, dtype=b_dtype, device=device).mT
    scales = torch.tensor([0.5], device=device), torch.tensor(0.25, device=device)
    out = flashinfer.bmm_fp8(a, b, *scales, BF16, backend=backend)
    assert_close(out, peer(a, b, BF16, scale=0.125), truth(a, b, scale=0.125))
    # One element is one scale, of any float and on either device.
    others = torch.tensor([[0.5]]), torch.tensor(0.25, device=device, dtype=BF16)
    assert_bitwise(flashinfer.bmm_fp8(a, b, *others, BF16, backend=backend), out)


@kernels
def test_mm_fp8(backend, device):
    a, weight = generate.randn(6, 256, dtype=E4M3, device=device), generate.randn(64, 256, dtype=E4M3, device=device)
    alpha = torch.tensor([0.125], device=device)
    for given, scale in ((alpha, 0.125), (None, 1.0)):
        out = flashinfer.mm_fp8(a, arranged(weight), given, backend=backend)
        assert_close(out, peer(a, weight.T, BF16, scale=scale), truth(a, weight.T, scale=scale))


@kernels
def test_a_weight_in_blocks_may_begin_anywhere(backend, device):
    a, weight = generate.randn(6, 256, dtype=E4M3, device=device), generate.randn(64, 256, dtype=E4M3, device=device)
    blocks = arranged(weight)
    moved = torch.empty(blocks.numel() + 1, dtype=torch.uint8, device=device)[1:].view(E4M3).view(blocks.shape)
    out = flashinfer.mm_fp8(a, moved.copy_(blocks), None, backend=backend)
    assert_bitwise(out, flashinfer.mm_fp8(a, blocks, None, backend=backend))


@kernels
@pytest.mark.parametrize("laid", ("moved", "gaps", "columns", "one"))
def test_rows_beside_a_weight_in_blocks_have_any_strides(laid, backend, device):
    a, weight = generate.randn(6, 256, dtype=E4M3, device=device), generate.randn(64, 256, dtype=E4M3, device=device)
    given = {
        "moved": lambda x: x.new_empty(6 * 256 + 1)[1:].view(6, 256).copy_(x),
        "gaps": lambda x: x.new_empty(6, 257)[:, :256].copy_(x),
        "columns": lambda x: x.T.contiguous().T,
        "one": lambda x: x[:1].expand(6, 256),
    }[laid](a.view(torch.uint8)).view(E4M3)  # fmt: skip
    out = flashinfer.mm_fp8(given, arranged(weight), None, backend=backend)
    assert_close(out, peer(given, weight.T, BF16), truth(given, weight.T))


@kernels
@pytest.mark.parametrize("a_dtype, b_dtype", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)])
def test_mm_fp8_of_a_weight_as_it_is(backend, device, a_dtype, b_dtype):
    """[n, k], of any n and k and any strides; with any of upstream's names, too."""
    a = generate.randn(6, 144, dtype=a_dtype, device=device)
    weight = generate.randn(40, 144, dtype=b_dtype, device=device)
    alpha = torch.tensor(0.125)
    out = flashinfer.mm_fp8(a, weight, alpha, backend=backend)
    assert_close(out, peer(a, weight.T, BF16, scale=0.125), truth(a, weight.T, scale=0.125))
    if backend == "reference":
        for name in ("auto", "trtllm_low_latency", "cutedsl_low_latency", "cublas", "cudnn", "cutlass"):
            assert_close(flashinfer.mm_fp8(a, weight, alpha, backend=name), out, truth(a, weight.T, scale=0.125))
            assert flashinfer.mm_fp8.has_backend(name) or name == "auto"
    columns = generate.strided(weight.T.contiguous(), gap=3).T
    out = flashinfer.mm_fp8(a, columns, alpha, backend=backend)
    assert_close(out, peer(a, weight.T, BF16, scale=0.125), truth(a, weight.T, scale=0.125))
    with pytest.raises(ValueError, match=r"^b: got .*allowed: \[n, 144\]"):
        flashinfer.mm_fp8(a, weight.T)


@pytest.mark.parametrize("sms, dtype", [(1, FP16), (132, FP32)])
def test_k_slices(device, sms, dtype):
    """132 multiprocessors have one tile to share: K is split, and the sum of the slices is the same every time.

    One sum of 8200 is rounded to float16: tensor cores cut each addition, so its last places are not those of float32.
    """
    a, b = generate.randn(20, 8200, dtype=FP16, device=device), generate.randn(48, 8200, dtype=FP16, device=device).T
    here = target.target_of(device)
    with target.override(target.Target(here.arch, sms, here.smem, here.l2)):
        assert (choose_split(1, 20, 48, 8200 * 2, sms)[1] > 1) == (sms > 1)
        outs = [gemm.mm_bf16(a, b, out_dtype=dtype, backend="portable") for _ in range(2)]
    assert_close(outs[0], peer(a, b, dtype), truth(a, b))
    assert_bitwise(*outs)


def test_router_and_tiny(device):
    a = generate.randn(3, 7168, dtype=BF16, device=device)
    for run, n, dtype in ((gemm.mm_M1_16_K7168_N128, 128, BF16), (gemm.mm_M1_16_K7168_N256, 256, FP32)):
        weight, out = generate.randn(n, 7168, dtype=BF16, device=device), torch.empty(3, n, dtype=dtype, device=device)
        assert run(a, weight.T, out) is None
        assert_close(out, peer(a, weight.T, dtype), truth(a, weight.T))
    weight = generate.randn(72, 7168, dtype=BF16, device=device)
    for few, dtype in ((a, BF16), (a[:1], FP32), (a.repeat(5, 1), FP32)):
        out = torch.empty(len(few) + 1, 72, dtype=dtype, device=device).fill_(7)
        assert gemm.mm_M1_16(few, weight.T, out[:-1]) is None and (out[-1] == 7).all()
        assert_close(out[:-1], peer(few, weight.T, dtype), truth(few, weight.T))
    a, weight, bias = (generate.randn(*s, dtype=BF16, device=device) for s in ((3, 128), (32, 128), (32,)))
    out = torch.empty(3, 32, dtype=BF16, device=device)
    assert gemm.tinygemm_bf16(a, weight, out, bias) is None
    assert_close(out, peer(a, weight.T, BF16, bias), truth(a, weight.T, bias))
    assert_bitwise(gemm.tgv_gemm_sm100(a, weight.T, bias), out)
    a, weight, scale = a.to(E4M3), weight.to(E4M3), torch.tensor([0.5], device=device)
    out = flashinfer.tgv_gemm_sm100(a, weight.T, bias, a_descale=scale, b_descale=scale)
    assert_close(out, peer(a, weight.T, BF16, bias, 0.25), truth(a, weight.T, bias, 0.25))


def test_nothing(device):
    """No rows, no columns, no batch; and a sum of nothing is the bias."""
    for m, n in ((0, 8), (3, 0)):
        out = gemm.mm_bf16(torch.ones(m, 16, dtype=BF16, device=device), torch.ones(16, n, dtype=BF16, device=device))
        assert out.shape == (m, n)
    assert gemm.bmm_bf16(torch.ones(0, 3, 4, dtype=BF16), torch.ones(0, 4, 5, dtype=BF16)).shape == (0, 3, 5)
    bias = torch.arange(8.0, device=device)
    a, b = torch.empty(3, 0, dtype=BF16, device=device), torch.empty(0, 8, dtype=BF16, device=device)
    assert_bitwise(gemm.mm_bf16(a, b, bias, out_dtype=FP32), bias.expand(3, 8))


def _ones(*shape, dtype=BF16):
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    "call, argument",
    [
        (lambda: gemm.mm_bf16(_ones(3), _ones(3, 4)), "a"),
        (lambda: gemm.mm_bf16(_ones(3, 5), _ones(4, 4)), "b"),
        (lambda: gemm.mm_bf16(_ones(3, 4, dtype=FP32), _ones(4, 4, dtype=FP32)), "a"),
        (lambda: gemm.mm_bf16(_ones(3, 4), _ones(4, 4, dtype=FP16)), "b"),
        (lambda: gemm.mm_bf16(_ones(3, 4), _ones(4, 4), bias=_ones(3)), "bias"),
        (lambda: gemm.mm_bf16(_ones(3, 4), _ones(4, 4), bias=_ones(4, dtype=torch.int32)), "bias"),
        (lambda: gemm.mm_bf16(_ones(3, 4), _ones(4, 4), out=_ones(3, 5)), "out"),
        (lambda: gemm.mm_bf16(_ones(3, 4), _ones(4, 4), out=_ones(3, 4, dtype=FP16)), "out"),
        (lambda: gemm.mm_bf16(_ones(3, 4), _ones(4, 4), out_dtype=torch.int32), "out_dtype"),
        (lambda: gemm.mm_bf16(_ones(3, 4), _ones(4, 4), backend="no such"), "backend"),
        (lambda: gemm.bmm_bf16(_ones(2, 3, 4), _ones(3, 4, 4)), "B"),
        (lambda: gemm.bmm_fp8(_ones(2, 3, 4), _ones(2, 4, 4), _ones(1), _ones(1), BF16), "A"),
        (lambda: gemm.bmm_fp8(*_ones(2, 1, 4, 4).to(E4M3), _ones(2), _ones(1), BF16), "A_scale"),
        (lambda: gemm.mm_fp8(_ones(2, 128).to(E4M3), _ones(1, 48, 128).to(E4M3)), "b"),
        (lambda: gemm.tgv_gemm_sm100(_ones(2, 8), _ones(8, 8), None, a_descale=_ones(1)), "a_descale"),
        (lambda: gemm.tgv_gemm_sm100(_ones(2, 8).to(E4M3), _ones(8, 8).to(E4M3), None), "a_descale"),
        (lambda: gemm.mm_M1_16(_ones(17, 8), _ones(8, 4), _ones(17, 4)), "mat_a"),
        (lambda: gemm.mm_M1_16(_ones(1, 8), _ones(9, 4), _ones(1, 4)), "mat_b"),
        (lambda: gemm.mm_M1_16(_ones(1, 8), _ones(8, 4), _ones(1, 4).half()), "out"),
        (lambda: gemm.mm_M1_16_K7168_N256(_ones(17, 7168), _ones(7168, 256), _ones(17, 256)), "mat_a"),
        (lambda: gemm.mm_M1_16_K7168_N256(_ones(1, 7168), _ones(7168, 256), _ones(1, 256)), "out"),
    ],
)
def test_bad_input(call, argument):
    with pytest.raises(ValueError, match=rf"^{argument}: "):
        call()


def test_choice():
    """Hopper runs its own kernel where boxes can be copied, and says why where they cannot."""
    h100 = named("90a")
    fields = dict(a="bf16", b="bf16", out="bf16", a_major="k", b_major="n", out_major="n", rows=256, columns=256)
    assert room.dense.select(room.Problem(**fields), h100).variant.name == "sm90"
    for change in (
        dict(a_major="m"), dict(b_major=""), dict(out_major=""), dict(b="fp16"), dict(a="fp8e4nv", b="fp8e4nv"),
    ):  # fmt: skip
        choice = room.dense.select(room.Problem(**fields | change), h100)
        assert choice.variant.name == "portable" and choice.refused[0][1]
    assert room.dense.select(room.Problem(**fields), named("120a")).variant.name == "portable"
    with pytest.raises(UnsupportedConfig):
        room.dense.select(room.Problem(**fields), named("80"), "sm90")


@pytest.mark.parametrize(
    "m, n, k_bytes", [(8192, 8192, 16384), (1, 256, 14336), (64, 7168, 16384), (512, 4096, 8192)]
)
def test_cut(m, n, k_bytes):
    """Most multiprocessors have work, or nothing more could be cut; a slice has a pipeline's worth of K."""
    columns, slices = choose_split(1, m, n, k_bytes, 132)
    rows = min(bucket(m), 128)
    works = -(-m // rows) * -(-n // columns) * slices
    assert slices == 1 or k_bytes // 128 // slices >= 4
    assert works >= 0.8 * 132 or (columns == 32 and works >= 0.4 * 132)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "portable"])
@pytest.mark.parametrize("m, n, k", [(8192, 512, 1024), (1000, 1000, 1000), (64, 7168, 2048), (16, 256, 7168),
                                     (300, 512, 8192), (4224, 4096, 256), (17, 136, 8200)])  # fmt: skip
def test_large(backend, device, m, n, k):
    a, b = generate.randn(m, k, dtype=BF16, device=device), generate.randn(n, k, dtype=BF16, device=device).T
    out = torch.full((m, n), float("nan"), dtype=BF16, device=device)
    gemm.mm_bf16(a, b, out=out, backend=backend)
    assert_close(out, a @ b, truth(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", [(1024, 2048, 7168), (64, 7168, 16384), (129, 272, 528)])
def test_large_fp8(device, m, n, k):
    """Against torch with fast accumulation, whose sums keep as few bits."""
    a, b = generate.randn(1, m, k, dtype=E4M3, device=device), generate.randn(1, n, k, dtype=E4M3, device=device).mT
    one = torch.ones((), device=device)
    same = torch._scaled_mm(a[0], b[0], one, one, out_dtype=BF16, use_fast_accum=True)[None]
    assert_close(flashinfer.bmm_fp8(a, b, one, one, BF16), same, truth(a, b))


@pytest.mark.gpu
def test_graph(device):
    """A captured product whose K is split, replayed, with others between the replays on another stream."""
    a, weight = (generate.randn(rows, 7168, dtype=BF16, device=device) for rows in (16, 256))
    out, eager = torch.empty(2, 16, 256, device=device).unbind()
    gemm.mm_M1_16_K7168_N256(a, weight.T, eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm.mm_M1_16_K7168_N256(a, weight.T, out)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        again = torch.empty_like(out)
        gemm.mm_M1_16_K7168_N256(a, weight.T, again)
        torch.cuda.synchronize(device)
        assert_bitwise(out, eager)
        assert_bitwise(again, eager)
