"""Linear layers of NVFP4 whose weight and scales are given once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import present, require
from flashinfer.gemm._epilogues import Rotation, check_heads, finished, fp4_product, gated, rotated

__all__ = [
    "PreparedFp4Linear",
    "PrimsTsGemmConfig",
    "prepare_fp4_linear",
    "prepare_fp4_linear_swiglu",
    "prepare_fp4_qkv_qknorm_rope",
]

_EPILOGUES = ("linear", "swiglu", "qkv_qknorm_rope")


@dataclass(frozen=True)
class PrimsTsGemmConfig:
    """Upstream's choices of a kernel. They have no effect on results here, but separate_qkv_output is refused.

    Examples
    --------
    >>> from flashinfer.prims_ts.gemm import PrimsTsGemmConfig
    >>> PrimsTsGemmConfig(100, "nvfp4_e2m1", "bf16", "linear", False, None, None).tile_m
    256
    """

    arch: int
    operand_format: str
    output_format: str
    epilogue: str
    has_bias: bool
    head_dim: int | None
    is_neox: bool | None
    tile_m: int = 256
    tile_n: int = 256
    tile_k: int = 128
    cluster_shape: tuple[int, int, int] = (2, 2, 1)
    scheduler: str = "clc_dynamic"
    shape_bucket: tuple[int, int, int] | None = None
    has_qkv_scale: bool = False
    nvfp4_mma_k: int = 64
    epilogue_warps: int | None = None
    tmem_overlap: bool = False
    ab_stages: int | None = None
    use_tma_store: bool = False
    separate_qkv_output: bool = False


class PreparedFp4Linear:
    """A linear layer of NVFP4: what `prepare_fp4_linear` and its kin return.

    Parameters
    ----------
    weight_packed, weight_block_scale : torch.Tensor
        As in `flashinfer.gemm.fp4_linear`; kept by reference, as all tensors are.
    input_global_scale, weight_global_scale : float
        Factors of the product.
    epilogue : str
        "linear", "swiglu" or "qkv_qknorm_rope".
    out_dtype : torch.dtype
        As in the function of that name.
    output_quant_scale, bias, q_norm, k_norm, qkv_scale : torch.Tensor, optional
        As in the function of that name.
    head_dim, is_neox : optional
        128 and False with "qkv_qknorm_rope".
    mma_k, tile_k, tmem_overlap
        Upstream's choices of a kernel; they have no effect.
    config : PrimsTsGemmConfig, optional
        Has no effect on results; one with separate_qkv_output is refused.

    Raises
    ------
    ValueError
        Another epilogue or head_dim, or norms with an epilogue that has none.

    Examples
    --------
    >>> import torch, flashinfer
    >>> from flashinfer.prims_ts.gemm import prepare_fp4_linear
    >>> codes, factors = flashinfer.nvfp4_quantize(torch.full((128, 64), 6.0).bfloat16(), torch.ones(1))
    >>> prepare_fp4_linear(codes, factors, 0.5, 1.0)(codes, factors)[0, 0]  # 64 x 36 / 2
    tensor(1152., dtype=torch.bfloat16)
    """

    @checked
    def __init__(
        self,
        weight_packed: torch.Tensor,
        weight_block_scale: torch.Tensor,
        input_global_scale: float,
        weight_global_scale: float,
        *,
        epilogue: str,
        out_dtype: torch.dtype = torch.bfloat16,
        output_quant_scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        qkv_scale: torch.Tensor | None = None,
        head_dim: int | None = None,
        is_neox: bool | None = None,
        mma_k: int = 64,
        tile_k: int = 256,
        tmem_overlap: bool = False,
        config=None,
    ):
        require(epilogue in _EPILOGUES, "epilogue", repr(epilogue), ", ".join(_EPILOGUES))
        require(not getattr(config, "separate_qkv_output", False), "config", config, "one without separate_qkv_output")
        require(head_dim in (None, 128), "head_dim", head_dim, "None, 128")
        for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
            alone = weight is None or epilogue == "qkv_qknorm_rope"
            require(alone, name, "a tensor", "None, but with epilogue 'qkv_qknorm_rope'")
        self.weight_packed, self.weight_block_scale = weight_packed, weight_block_scale
        self.alpha = float(input_global_scale) * float(weight_global_scale)
        self.bias, self.q_norm, self.k_norm, self.qkv_scale = bias, q_norm, k_norm, qkv_scale
        self.head_dim, self.is_neox, self.config = head_dim, is_neox, config
        self.output_quant_scale = output_quant_scale
        self._epilogue, self._out_dtype = epilogue, out_dtype

    @checked
    @torch.no_grad()
    def __call__(
        self,
        a_packed: torch.Tensor,
        a_block_scale: torch.Tensor,
        *,
        cos_sin: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The layer of some rows.

        Parameters
        ----------
        a_packed, a_block_scale, out : torch.Tensor
            As in `flashinfer.gemm.fp4_linear` and its kin.
        cos_sin, positions : torch.Tensor
            As in `flashinfer.gemm.fp4_qkv_qknorm_rope`, which alone needs them.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            As of the function of the same name, but of FP8 only `out`.

        Raises
        ------
        ValueError
            A shape, dtype or device that the function refuses.
        """
        weight = (self.weight_packed, self.weight_block_scale)
        y = fp4_product(a_packed, a_block_scale, *weight, self.alpha, self.bias, self.qkv_scale)
        if self._epilogue == "swiglu":
            y = gated("weight_packed", y)
        elif self._epilogue == "qkv_qknorm_rope":
            require(self._out_dtype == torch.bfloat16, "out_dtype", self._out_dtype, "bfloat16")
            norms = present("q_norm", self.q_norm), present("k_norm", self.k_norm)
            rotation = Rotation(*norms, present("cos_sin", cos_sin), present("positions", positions))
            rotated(y, rotation, bool(self.is_neox), self._out_dtype)
        narrow = self._epilogue == "swiglu"
        made = finished(y, self._out_dtype, self.output_quant_scale, out, narrow=narrow)
        return made[0] if self._out_dtype == torch.float8_e4m3fn and isinstance(made, tuple) else made


@checked
def prepare_fp4_linear(
    weight_packed: torch.Tensor,
    weight_block_scale: torch.Tensor,
    input_global_scale: float,
    weight_global_scale: float,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    output_quant_scale: torch.Tensor | None = None,
    mma_k: int = 64,
    tile_k: int = 256,
    tmem_overlap: bool = False,
    config=None,
) -> PreparedFp4Linear:
    """`flashinfer.gemm.fp4_linear` with all but the rows given once.

    Parameters
    ----------
    weight_packed, weight_block_scale, input_global_scale, weight_global_scale, bias, out_dtype, output_quant_scale
        As there; input_global_scale is a_global_scale.
    mma_k, tile_k, tmem_overlap, config
        As in `PreparedFp4Linear`.

    Returns
    -------
    PreparedFp4Linear

    Raises
    ------
    ValueError
        As `PreparedFp4Linear` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> from flashinfer.prims_ts.gemm import prepare_fp4_linear
    >>> codes, factors = flashinfer.nvfp4_quantize(torch.full((128, 64), 6.0).bfloat16(), torch.ones(1))
    >>> prepare_fp4_linear(codes, factors, 0.5, 1.0)(codes, factors).shape
    torch.Size([128, 128])
    """
    return PreparedFp4Linear(
        weight_packed, weight_block_scale, input_global_scale, weight_global_scale, epilogue="linear", bias=bias,
        out_dtype=out_dtype, output_quant_scale=output_quant_scale, config=config,
    )  # fmt: skip


@checked
def prepare_fp4_linear_swiglu(
    weight_packed: torch.Tensor,
    weight_block_scale: torch.Tensor,
    input_global_scale: float,
    weight_global_scale: float,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    output_quant_scale: torch.Tensor | None = None,
    mma_k: int = 64,
    tile_k: int = 256,
    tmem_overlap: bool = False,
    config=None,
) -> PreparedFp4Linear:
    """`flashinfer.gemm.fp4_linear_swiglu` with all but the rows given once.

    Parameters
    ----------
    weight_packed, weight_block_scale, input_global_scale, weight_global_scale, bias, out_dtype, output_quant_scale
        As there; input_global_scale is a_global_scale.
    mma_k, tile_k, tmem_overlap, config
        As in `PreparedFp4Linear`.

    Returns
    -------
    PreparedFp4Linear

    Raises
    ------
    ValueError
        As `PreparedFp4Linear` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> from flashinfer.prims_ts.gemm import prepare_fp4_linear_swiglu
    >>> codes, factors = flashinfer.nvfp4_quantize(torch.full((128, 64), 6.0).bfloat16(), torch.ones(1))
    >>> prepare_fp4_linear_swiglu(codes, factors, 0.5, 1.0)(codes, factors).shape
    torch.Size([128, 64])
    """
    return PreparedFp4Linear(
        weight_packed, weight_block_scale, input_global_scale, weight_global_scale, epilogue="swiglu", bias=bias,
        out_dtype=out_dtype, output_quant_scale=output_quant_scale, config=config,
    )  # fmt: skip


@checked
def prepare_fp4_qkv_qknorm_rope(
    weight_packed: torch.Tensor,
    weight_block_scale: torch.Tensor,
    input_global_scale: float,
    weight_global_scale: float,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    is_neox: bool = False,
    mma_k: int = 64,
    tile_k: int = 256,
    tmem_overlap: bool = False,
    qkv_scale: torch.Tensor | None = None,
    config=None,
) -> PreparedFp4Linear:
    """`flashinfer.gemm.fp4_qkv_qknorm_rope` with all but the rows, `cos_sin` and `positions` given once.

    Parameters
    ----------
    weight_packed, weight_block_scale, input_global_scale, weight_global_scale, q_norm_weight, k_norm_weight
        As there; input_global_scale is a_global_scale.
    num_q_heads, num_kv_heads, head_dim, is_neox, qkv_scale
        As there.
    mma_k, tile_k, tmem_overlap, config
        As in `PreparedFp4Linear`.

    Returns
    -------
    PreparedFp4Linear

    Raises
    ------
    ValueError
        Numbers of heads that differ, another head_dim, or a weight of other rows.

    Examples
    --------
    >>> import torch, flashinfer
    >>> from flashinfer.prims_ts.gemm import prepare_fp4_qkv_qknorm_rope
    >>> codes, factors = flashinfer.nvfp4_quantize(torch.full((384, 64), 6.0).bfloat16(), torch.ones(1))
    >>> one, table = torch.ones(128).bfloat16(), torch.cat((torch.ones(128, 64), torch.zeros(128, 64)), 1)
    >>> heads = dict(num_q_heads=1, num_kv_heads=1, head_dim=128)
    >>> layer = prepare_fp4_qkv_qknorm_rope(codes, factors, 0.5, 1.0, one, one, **heads)
    >>> layer(codes[:128], factors[:128], cos_sin=table, positions=torch.arange(128)).shape
    torch.Size([128, 384])
    """
    check_heads("weight_packed", weight_packed, num_q_heads, num_kv_heads, head_dim)
    return PreparedFp4Linear(
        weight_packed, weight_block_scale, input_global_scale, weight_global_scale, epilogue="qkv_qknorm_rope",
        q_norm=q_norm_weight, k_norm=k_norm_weight, qkv_scale=qkv_scale, head_dim=head_dim, is_neox=is_neox,
        config=config,
    )  # fmt: skip
