"""Dense matrix products: bfloat16, and FP8 with one scale for a whole operand."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import aligned_rows, as_dtype, dtype_name, require, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer._core.replay import replayed
from flashinfer._core.scalars import scales
from flashinfer._core.target import target_of
from flashinfer.compat.queries import answering
from flashinfer.gemm._operands import choice_of
from flashinfer.ops.gemm import dense as room
from flashinfer.ops.gemm.slices import choose_split
from flashinfer.ops.gemm.operands import bucket

_HALVES = (torch.bfloat16, torch.float16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_OUT = (torch.bfloat16, torch.float16, torch.float32)
# Names of libraries that upstream calls: each promises a result, which any variant of ours gives.
_THEIRS = (
    "auto", "cudnn", "cublas", "cublaslt", "cutlass", "cute-dsl", "cutedsl_low_latency", "cutile", "tgv", "tinygemm",
    "trtllm_low_latency", "cake",
)  # fmt: skip
_OURS = ("sm90", "portable", "reference")
_BACKENDS = ", ".join(_THEIRS + _OURS)
_OUT_NAMES = ", ".join(map(str, _OUT))


@replayed
@answering("auto", "cudnn", "cublaslt", "cutlass", "tgv", "tinygemm", denied=("cute-dsl", "cutile"))
def mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "cudnn",
) -> torch.Tensor:
    """Matrix product: ``out = a @ b + bias``, summed in float32 and rounded once.

    Parameters
    ----------
    a : torch.Tensor
        [m, k]; bfloat16 (or float16), any strides; rows that are contiguous and 16-byte aligned are fast.
    b : torch.Tensor
        [k, n]; dtype of `a`, any strides. Upstream takes column-major ones, as a weight [n, k] transposed is.
    bias : torch.Tensor, optional
        [n]; bfloat16, float16 or float32.
    pdl : bool
        Programmatic dependent launch. It has no effect on results, and none on the launch yet.
    out : torch.Tensor, optional
        [m, n], receives the result; dtype `out_dtype`, any strides.
    out_dtype : torch.dtype
        bfloat16, float16 or float32; of `out`, where that is given.
    backend : str
        Upstream's names ("auto", "cudnn", "cutlass", "tgv", "cublaslt", "tinygemm", "cutile", "cute-dsl") promise a
        result, and any kernel of ours may give it. "sm90", "portable" and "reference" ask for one.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor [m, n].

    Raises
    ------
    ValueError
        A shape, dtype, device or backend other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.ones(2, 64).bfloat16(), torch.ones(32, 64).bfloat16().T
    >>> flashinfer.mm_bf16(a, b)[0, 0]
    tensor(64., dtype=torch.bfloat16)
    """
    _check_operands("a", a, "b", b, 2, _HALVES)
    out = _result(out, (a.shape[0], b.shape[1]), out_dtype, a.device)
    _check_bias(bias, b.shape[1])
    _product(a, b, out, bias, None, None, _variant(backend))
    return out


@replayed
@answering("auto", "cudnn", "cutlass", "cutile", denied=("tgv", "cake"))
def bmm_bf16(
    A: torch.Tensor,
    B: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "cudnn",
) -> torch.Tensor:
    """Batched matrix product: ``out[i] = A[i] @ B[i]``, summed in float32 and rounded once.

    Parameters
    ----------
    A : torch.Tensor
        [batch, m, k]; bfloat16 (or float16), any strides.
    B : torch.Tensor
        [batch, k, n]; dtype of `A`, any strides.
    out : torch.Tensor, optional
        [batch, m, n], receives the result; dtype `out_dtype`, any strides.
    out_dtype, backend
        As in `mm_bf16`.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor [batch, m, n].

    Raises
    ------
    ValueError
        A shape, dtype, device or backend other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.ones(2, 3, 64).bfloat16(), torch.ones(2, 32, 64).bfloat16().mT
    >>> flashinfer.bmm_bf16(a, b).shape
    torch.Size([2, 3, 32])
    """
    _check_operands("A", A, "B", B, 3, _HALVES)
    out = _result(out, (*A.shape[:2], B.shape[2]), out_dtype, A.device)
    _product(A, B, out, None, None, None, _variant(backend))
    return out


@replayed
@answering("auto", "cublas", "cudnn", "cutlass", denied=("cute-dsl",))
def bmm_fp8(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    backend: str = "cublas",
) -> torch.Tensor:
    """Batched FP8 product with one scale an operand: ``out[i] = A[i] @ B[i] * A_scale * B_scale``.

    On Hopper's tensor cores sums of FP8 products keep about 14 bits, what cuBLAS calls fast accumulation.

    Parameters
    ----------
    A : torch.Tensor
        [batch, m, k]; float8_e4m3fn or float8_e5m2, any strides.
    B : torch.Tensor
        [batch, k, n]; float8_e4m3fn or float8_e5m2, any strides; column-major is fast.
    A_scale, B_scale : torch.Tensor
        One element (float32, float16 or bfloat16) on either device: what a code of 1 stands for.
    dtype : torch.dtype
        Of the result: bfloat16, float16 or float32.
    out : torch.Tensor, optional
        [batch, m, n] of `dtype`, receives the result; any strides.
    backend : str
        As in `mm_bf16`; "cublas" too.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor [batch, m, n].

    Raises
    ------
    ValueError
        A shape, dtype, device or backend other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.ones(2, 3, 64).to(torch.float8_e4m3fn), torch.ones(2, 32, 64).to(torch.float8_e4m3fn).mT
    >>> flashinfer.bmm_fp8(a, b, torch.tensor(2.0), torch.tensor(0.5), torch.bfloat16)[0, 0, 0]
    tensor(64., dtype=torch.bfloat16)
    """
    _check_operands("A", A, "B", B, 3, _FP8)
    out = _result(out, (*A.shape[:2], B.shape[2]), dtype, A.device, "dtype")
    factors = _scale("A_scale", A_scale, A.device), _scale("B_scale", B_scale, A.device)
    _product(A, B, out, None, *factors, _variant(backend))
    return out


@replayed
@answering("auto", "trtllm_low_latency", "cutedsl_low_latency", "cublas", "cudnn", "cutlass")
def mm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    backend: str = "trtllm_low_latency",
) -> torch.Tensor:
    """FP8 product with a weight: ``out = a @ weight.T * alpha``.

    Parameters
    ----------
    a : torch.Tensor
        [m, k]; float8_e4m3fn or, for a weight [n, k], float8_e5m2; any strides.
    b : torch.Tensor
        The weight [n, k] as it is, float8_e4m3fn or float8_e5m2, any strides. Or [k / 128, n, 128], contiguous,
        float8_e4m3fn, k a multiple of 128 and n of 32: as `prepare_low_latency_gemm_weights` arranges it. Every
        backend takes both.
    alpha : torch.Tensor, optional
        One element (float32, float16 or bfloat16) on either device; None is 1.
    out_dtype : torch.dtype
        bfloat16, float16 or float32; of `out`, where that is given.
    out : torch.Tensor, optional
        [m, n], receives the result; any strides.
    backend : str
        As in `mm_bf16`; "trtllm_low_latency", "cutedsl_low_latency" and "cublas" too.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor [m, n].

    Raises
    ------
    ValueError
        A shape, dtype, device or backend other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.ones(2, 128).to(torch.float8_e4m3fn), torch.ones(128, 128).to(torch.float8_e4m3fn)
    >>> flashinfer.mm_fp8(a, flashinfer.prepare_low_latency_gemm_weights(b, {}), torch.tensor(0.5))[0, 0]
    tensor(64., dtype=torch.bfloat16)
    >>> flashinfer.mm_fp8(a, b, torch.tensor(0.5))[0, 0]
    tensor(64., dtype=torch.bfloat16)
    """
    if b.dim() == 2:
        _check_operands("a", a, "b", b, 2, _FP8, transposed=True)
        n, b = b.shape[0], b.mT
    else:
        _check_blocks(a, b)
        n = b.shape[1]
    out = _result(out, (a.shape[0], n), out_dtype, a.device)
    alpha = None if alpha is None else _scale("alpha", alpha, a.device)
    _product(a, b, out, None, alpha, None, _variant(backend))
    return out


@checked
@answering()
def tinygemm_bf16(
    input: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    use_pdl: bool = False,
) -> None:
    """Linear layer for few rows: ``out = input @ weight.T + bias``.

    Parameters
    ----------
    input : torch.Tensor
        [m, k]; bfloat16, any strides. Upstream wants k a multiple of 64; here any will do.
    weight : torch.Tensor
        [n, k]; bfloat16, any strides. Upstream wants n a multiple of 16; here any will do.
    out : torch.Tensor
        [m, n], bfloat16, receives the result; any strides.
    bias : torch.Tensor, optional
        [n]; bfloat16.
    use_pdl : bool
        Programmatic dependent launch. It has no effect on results, and none on the launch yet.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, weight, out = torch.ones(2, 64).bfloat16(), torch.ones(32, 64).bfloat16(), torch.empty(2, 32).bfloat16()
    >>> flashinfer.gemm.tinygemm_bf16(x, weight, out)
    >>> out[0, 0]
    tensor(64., dtype=torch.bfloat16)
    """
    require(weight.dim() == 2, "weight", tuple(weight.shape), "[N, K]")
    _check_bias(bias, weight.shape[0], (torch.bfloat16,))
    linear("input", input, "weight", weight.mT, out, torch.bfloat16, bias)


def linear(a_name, a, b_name, b, out, dtype, bias) -> None:
    """out = a @ b + bias of bfloat16 operands, checked under the caller's names."""
    _check_operands(a_name, a, b_name, b, 2, (torch.bfloat16,))
    _result(out, (a.shape[0], b.shape[1]), dtype, a.device)
    _product(a, b, out, bias, None, None, "auto")


def _variant(backend: str) -> str:
    if backend in _THEIRS:
        return "auto"
    require(backend in _OURS, "backend", repr(backend), _BACKENDS)
    return backend


def _check_operands(a_name, a, b_name, b, dim: int, dtypes, transposed: bool = False) -> None:
    along = -1 if transposed else -2
    fits = b.dim() == dim and a.dim() == dim and b.shape[:-2] == a.shape[:-2] and b.shape[along] == a.shape[-1]
    same = b.dtype == a.dtype or (a.dtype in _FP8 and b.dtype in _FP8 and b.dtype in dtypes)
    if fits and same and a.dtype in dtypes:
        return
    # Words only where they are needed: they take longer than the checks.
    require(a.dim() == dim, a_name, tuple(a.shape), "[batch, m, k]" if dim == 3 else "[m, k]")
    k = a.shape[-1]
    shape = f"{f'[n, {k}]' if transposed else f'{(*a.shape[:-2], k)} and n'}, for {a_name} {tuple(a.shape)}"
    require(fits, b_name, tuple(b.shape), shape)
    allowed = ", ".join(map(str, dtypes))
    require(a.dtype in dtypes, a_name, a.dtype, allowed)
    require(same, b_name, b.dtype, allowed if a.dtype in _FP8 else f"{a.dtype}, the dtype of {a_name}")


def _check_blocks(a, b) -> None:
    """Refuse what is no row of FP8, and no weight in blocks."""
    require(a.dim() == 2, "a", tuple(a.shape), "[m, k]")
    for name, x in (("a", a), ("b", b)):
        require(x.dtype == torch.float8_e4m3fn, name, x.dtype, "float8_e4m3fn, for a weight in blocks")
    blocks = a.shape[1] // 128
    fits = b.dim() == 3 and b.shape[::2] == (blocks, 128) and b.shape[1] % 32 == 0 and a.shape[1] % 128 == 0
    allowed = f"[n, k], or contiguous [k / 128, n, 128] for k {a.shape[1]}, n a multiple of 32"
    require(fits and b.is_contiguous(), "b", tuple(b.shape), allowed)


def _check_bias(bias, n: int, dtypes=_OUT) -> None:
    if bias is not None:
        require(bias.shape == (n,), "bias", tuple(bias.shape), f"[{n}]")
        require(bias.dtype in dtypes, "bias", bias.dtype, _OUT_NAMES if dtypes is _OUT else "bfloat16")


def _scale(name: str, scale: torch.Tensor, device: torch.device) -> torch.Tensor:
    near = isinstance(scale, torch.Tensor) and scale.dtype == torch.float32 and scale.device == device
    return scale if near and scale.numel() == 1 else scales(name, scale, device)


def _result(out, shape: tuple[int, ...], dtype, device, name: str = "out_dtype") -> torch.Tensor:
    dtype = as_dtype(dtype)
    require(dtype in _OUT, name, dtype, _OUT_NAMES)
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    require(out.shape == shape, "out", tuple(out.shape), str(tuple(shape)))
    require(out.dtype == dtype, "out", out.dtype, str(dtype))
    return out


@custom_op("flashinfer::dense_gemm", mutates_args=("out",), in_place=())
@replayed
def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    backend: str,
) -> None:
    """Run a product of checked operands; b of three dimensions beside a of two is in blocks."""
    same_device(a=a, b=b, out=out, bias=bias, a_scale=a_scale, b_scale=b_scale)
    if out.numel() == 0:
        return
    in_blocks = b.dim() > a.dim()
    if a.dim() == 2:
        a, b, out = a[None], aligned_rows(b) if in_blocks else b[None], out[None]
    if a.shape[2] == 0:
        # A sum of nothing; there is no block of K to start from.
        out.copy_(torch.zeros_like(out) if bias is None else bias.expand_as(out))
        return
    bias = None if bias is None else bias.contiguous()
    if in_blocks and _major(a, "mk") != "k":
        # The few rows beside a weight in blocks are copied where they are not read 16 bytes at a time.
        a = a.clone(memory_format=torch.contiguous_format)
    multiply(a, b, out, bias, a_scale, b_scale, in_blocks, backend)


def multiply(a, b, out, bias=None, a_scale=None, b_scale=None, in_blocks: bool = False, backend: str = "auto") -> None:
    """Run a product of operands with a batch axis, in which nothing is empty; for use within an op."""
    scales = (a_scale is not None) + (b_scale is not None)
    choice, slices = _plan(a, b, out, bias, scales, in_blocks, backend)
    choice.run(room.Inputs(a, b, out, bias, a_scale, b_scale, slices))


def _plan(a, b, out, bias, scales: int, in_blocks: bool, backend: str):
    """The Choice for such tensors, and the number of slices of K."""
    device = out.device
    batch, m, k = a.shape
    # A copy of a weight in blocks has 32 of its rows.
    least = 64 if in_blocks else 32
    columns, slices = choose_split(batch, m, out.shape[2], k * a.element_size(), target_of(device).sms, least)
    problem = room.Problem(
        a=dtype_name(a.dtype),
        b=dtype_name(b.dtype),
        out=dtype_name(out.dtype),
        a_major=_major(a, "mk"),
        b_major="blocks" if in_blocks else _major(b, "kn"),
        out_major="n" if _major(out, "mn") == "n" else "",
        rows=bucket(m),
        columns=columns,
        split=slices > 1,
        scales=scales,
        bias="" if bias is None else dtype_name(bias.dtype),
    )
    return choice_of(room.dense, problem, device, backend), slices


def _major(t: torch.Tensor, names: str) -> str:
    """The dimension of [batch, *names] along which memory is read 16 bytes at a time, "" if neither is."""
    unit = 16 // t.element_size()
    if t.data_ptr() % 16 or (t.shape[0] > 1 and (t.stride(0) % unit or t.stride(0) == 0)):
        return ""
    for along, across in ((2, 1), (1, 2)):
        if t.stride(along) == 1 and t.shape[along] % unit == 0 and t.stride(across) % unit == 0 and t.stride(across):
            return names[along - 1]
    return ""
