"""`CuteDslMoEWrapper` and `cute_dsl_fused_moe`: experts with weights of four bits, already chosen."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import as_dtype, present, require, same_device
from flashinfer.compat.queries import answering
from flashinfer.fused_moe import experts
from flashinfer.ops import layouts
from flashinfer.ops.formats import FACTOR_DTYPES
from flashinfer.tllm_enums import (
    DEFAULT_SWIGLU_ALPHA,
    DEFAULT_SWIGLU_BETA,
    DEFAULT_SWIGLU_LIMIT,
    ActivationType,
)

__all__ = ["CuteDslMoEWrapper", "cute_dsl_fused_moe", "cute_dsl_fused_moe_nvfp4"]

# Formats of the rows, of the weights, and between the products.
_MODES = {"w4a4": ("nvfp4", "nvfp4", "nvfp4"), "w4a8": ("mxfp8", "mxfp4", "mxfp8"), "w4a16": ("bf16", "nvfp4", "")}
_ROWS = {
    "w4a4": (torch.uint8, torch.float4_e2m1fn_x2),
    "w4a8": (torch.float8_e4m3fn,),
    "w4a16": (torch.bfloat16,),
}
_FP4 = (torch.uint8, torch.float4_e2m1fn_x2)
# Rows of the up-projection, then as many of the gate, in a gated w1.
_GROUP = 64
# Rows of a tile that a caller may choose.
_TILES = (16, 32, 64, 128)


class _Layer(NamedTuple):
    """What all calls of a layer have in common. experts, offset : this rank's. hidden, intermediate : 0 is any."""

    mode: str
    top_k: int
    experts: int
    offset: int
    dtype: torch.dtype
    activation: experts.Activation
    hidden: int = 0
    intermediate: int = 0
    device: torch.device | None = None


@answering()
@checked
@named(weights="token_final_scales")
def cute_dsl_fused_moe(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    w1_weight: torch.Tensor,
    w1_weight_sf: torch.Tensor,
    w1_alpha: torch.Tensor,
    fc2_input_scale: torch.Tensor | None,
    w2_weight: torch.Tensor,
    w2_weight_sf: torch.Tensor,
    w2_alpha: torch.Tensor,
    num_experts: int,
    top_k: int,
    num_local_experts: int | None = None,
    local_expert_offset: int = 0,
    output_dtype: torch.dtype = torch.bfloat16,
    use_fused_finalize: bool = True,
    moe_output: torch.Tensor | None = None,
    aux_stream: torch.cuda.Stream | None = None,
    enable_pdl: bool = True,
    activation_type: int = ActivationType.Swiglu.value,
    swiglu_alpha: float = DEFAULT_SWIGLU_ALPHA,
    swiglu_beta: float = DEFAULT_SWIGLU_BETA,
    swiglu_limit: float = DEFAULT_SWIGLU_LIMIT,
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
    *,
    quant_mode: str = "w4a4",
    per_token_scale: torch.Tensor | None = None,
    tactic: tuple[int, ...] | None = None,
    localized_weights=None,
    localized_streams=None,
    localized_sm_count=None,
    localized_memset_stream=None,
    localized_allow_nonlocalized: bool = False,
    autotune_use_cuda_graph: bool = False,
) -> torch.Tensor:
    """A mixture of experts that are already chosen, with weights of four bits, on every chip.

    With experts e of a token, their weights s, and d1, d2, p the elements of w1_alpha, w2_alpha and per_token_scale::

        h = act(p * d1_e * (x @ w1[e].T))
        output = sum_e s_e * d2_e * (h @ w2[e].T)

    ==========  =============================  ========  ====================================
    quant_mode  x                              weights   h
    ==========  =============================  ========  ====================================
    w4a4        NVFP4, uint8 with x_sf         NVFP4     NVFP4 with fc2_input_scale
    w4a8        MXFP8, float8_e4m3fn, x_sf     MXFP4     MXFP8
    w4a16       bfloat16                       NVFP4     rounded to output_dtype
    ==========  =============================  ========  ====================================

    Parameters
    ----------
    x : torch.Tensor
        [tokens, hidden], contiguous rows; NVFP4 [tokens, hidden / 2], two codes a byte with the first in the low half.
        Zero tokens are valid.
    x_sf : torch.Tensor, optional
        Bytes, row-major, contiguous, [tokens, hidden / 16] or [tokens, hidden / 16, 1] of e4m3; with w4a8 ue8m0 for 32
        elements; with w4a16 None.
    token_selected_experts, token_final_scales, num_experts, top_k, num_local_experts, local_expert_offset
        As in `flashinfer.cute_dsl_fused_moe_bf16`.
    activation_type
        As in `flashinfer.cute_dsl_fused_moe_bf16`.
    w1_weight : torch.Tensor
        uint8 [local experts, 2 * intermediate, hidden / 2] of a gated activation, whose rows alternate in groups of 64:
        64 of the up-projection, then the gate's 64, and so on, so that intermediate is a multiple of 64. Rows of halves
        w, up first, come so by ``w.unflatten(1, (2, -1, 64)).transpose(1, 2).flatten(1, 3)``. Of another activation
        [., intermediate, .].
    w1_weight_sf : torch.Tensor
        Bytes, for the rows where they are, of each expert in 128x4 tiles: contiguous, as
        `flashinfer.block_scale_interleave` gives them, or six-dimensional, as
        `flashinfer.cute_dsl.utils.convert_sf_to_mma_layout` does.
    w1_alpha : torch.Tensor
        d1, float32 [local experts]; holds the global scales of x and of the weights.
    fc2_input_scale : torch.Tensor, optional
        With w4a4 NVFP4's global scale of h, float32 [1] or [local experts]; w2_alpha holds its inverse. With
        `per_token_scale` 1 / (448 * 6), as `flashinfer.nvfp4_quantize` has it with per_token_activation: times a row's
        largest magnitude it is the row's scale, by which the row is divided, and then its product with w2 multiplied.
        With the others None.
    w2_weight, w2_weight_sf, w2_alpha : torch.Tensor
        The same, of [local experts, hidden, intermediate], in plain order of rows.
    output_dtype : torch.dtype
        bfloat16, float16 or float32.
    use_fused_finalize, aux_stream, enable_pdl, localized_allow_nonlocalized, autotune_use_cuda_graph
        Have no effect on results, and none on the launches.
    moe_output : torch.Tensor, optional
        Receives the result; [tokens, hidden] of `output_dtype`, contiguous rows.
    swiglu_alpha, swiglu_beta, swiglu_limit : float
        Of Swiglu: gate * sigmoid(alpha * gate) * (up + beta), the gate first clamped to at most the limit and up to
        -limit ... limit. Others take the defaults, 1, 0 and float32's largest number, only.
    situ_beta, situ_linear_beta : float, optional
        With a = situ_beta, Swiglu is SiTU instead: a * tanh(gate / a) * sigmoid(gate) * up, with b = situ_linear_beta
        b * tanh(up / b) in place of up.
    quant_mode : str
        A row of the table; "nvfp4" is w4a4.
    per_token_scale : torch.Tensor, optional
        p, float32 [tokens], with w4a4 only; 1 without.
    tactic : tuple, optional
        One of `CuteDslMoEWrapper.get_valid_tactics`, the rows of a tile; None chooses by the number of tokens. Results
        differ by roundings of sums.
    localized_weights, localized_streams, localized_sm_count, localized_memset_stream
        Only None: no chip here has domains of memory.

    Returns
    -------
    torch.Tensor
        [tokens, hidden] of `output_dtype`; moe_output if given.

    Raises
    ------
    ValueError
        A shape, dtype, device, stride, number or combination other than the above.

    Notes
    -----
    Codes are multiplied exactly, in bfloat16 with their block scales, and summed in float32; h is rounded to
    `output_dtype` before it is quantised, and so is each expert's result before the sum. Sums over a token's experts
    are in the order of its choices, so results repeat bit for bit.

    References
    ----------
    OCP Microscaling Formats Specification 1.0; NVIDIA, PTX ISA, block scaling of mma (NVFP4 and the tiles of scale
    factors)

    Examples
    --------
    >>> import torch, flashinfer
    >>> w1, w2 = torch.zeros(4, 256, 64).byte(), torch.zeros(4, 128, 64).byte()  # 4 experts, 128 columns each way
    >>> s1, s2 = torch.zeros(4, 256, 8).byte(), torch.zeros(4, 128, 8).byte()
    >>> x, experts, ones = torch.randn(2, 128).bfloat16(), torch.tensor([[0, 1], [2, 3]]), torch.ones(4)
    >>> out = flashinfer.cute_dsl_fused_moe_nvfp4(x, None, experts, torch.full((2, 2), 0.5), w1, s1, ones, None, w2, s2,
    ...     ones, 4, 2, quant_mode="w4a16")
    >>> out.shape
    torch.Size([2, 128])
    """
    for name, value in (("localized_weights", localized_weights), ("localized_streams", localized_streams),
                        ("localized_sm_count", localized_sm_count),
                        ("localized_memset_stream", localized_memset_stream)):  # fmt: skip
        require(value is None, name, type(value).__name__, "None")
    layer = _layer(
        num_experts, top_k, num_local_experts, local_expert_offset, output_dtype, quant_mode, activation_type,
        (swiglu_alpha, swiglu_beta, swiglu_limit), (situ_beta, situ_linear_beta),
    )  # fmt: skip
    first, second = (w1_weight, w1_weight_sf, w1_alpha), (w2_weight, w2_weight_sf, w2_alpha)
    return _run(
        layer, (x, x_sf, per_token_scale), token_selected_experts, token_final_scales, first, fc2_input_scale, second,
        moe_output, _tile(tactic),
    )  # fmt: skip


# Upstream's older name.
cute_dsl_fused_moe_nvfp4 = cute_dsl_fused_moe


class CuteDslMoEWrapper:
    """`cute_dsl_fused_moe` for a layer: what does not change from call to call is given, and checked, once.

    Parameters
    ----------
    num_experts, top_k, num_local_experts, local_expert_offset, output_dtype, activation_type, swiglu_alpha
        As in `cute_dsl_fused_moe`.
    hidden_size, intermediate_size : int
        Of the weights that `run` is given.
    use_cuda_graph, max_num_tokens, tile_size, enable_pdl, use_fused_finalize
        Have no effect on results, and none on the launches: every call can be captured, nothing is set aside for it,
        and tiles follow the number of tokens.
    sf_vec_size : int
        Elements that share a scale factor: 16; with w4a8, where it is 32, either.
    device : str or torch.device
        Where the tensors of `run` are.
    swiglu_beta, swiglu_limit, situ_beta, situ_linear_beta, quant_mode
        As in `cute_dsl_fused_moe`.

    Raises
    ------
    ValueError
        A number, dtype or combination other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> layer = flashinfer.CuteDslMoEWrapper(4, 2, 128, 128, device="cpu", quant_mode="w4a16")
    >>> layer.num_experts, layer.top_k
    (4, 2)
    """

    @checked
    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        use_cuda_graph: bool = False,
        max_num_tokens: int | None = None,
        num_local_experts: int | None = None,
        local_expert_offset: int = 0,
        tile_size: int = 128,
        sf_vec_size: int = 16,
        output_dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cuda",
        enable_pdl: bool = True,
        activation_type: int = ActivationType.Swiglu.value,
        swiglu_alpha: float = DEFAULT_SWIGLU_ALPHA,
        swiglu_beta: float = DEFAULT_SWIGLU_BETA,
        swiglu_limit: float = DEFAULT_SWIGLU_LIMIT,
        situ_beta: float | None = None,
        situ_linear_beta: float | None = None,
        use_fused_finalize: bool = True,
        quant_mode: str = "w4a4",
    ):
        self._layer = _layer(
            num_experts, top_k, num_local_experts, local_expert_offset, output_dtype, quant_mode, activation_type,
            (swiglu_alpha, swiglu_beta, swiglu_limit), (situ_beta, situ_linear_beta),
        )  # fmt: skip
        widths = (16, 32) if self._layer.mode == "w4a8" else (16,)
        require(sf_vec_size in widths, "sf_vec_size", sf_vec_size, " or ".join(map(str, widths)))
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            require(size >= 1, name, size, "1 or more")
        sizes = {"hidden": hidden_size, "intermediate": intermediate_size}
        self._layer = self._layer._replace(**sizes, device=torch.device(device))
        self.num_experts, self.top_k = num_experts, top_k
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_local_experts, self.local_expert_offset = self._layer.experts, local_expert_offset
        self.output_dtype, self.device, self.quant_mode = self._layer.dtype, device, self._layer.mode

    @checked
    @named(weights="token_final_scales")
    def run(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        token_selected_experts: torch.Tensor,
        token_final_scales: torch.Tensor,
        w1_weight: torch.Tensor,
        w1_weight_sf: torch.Tensor,
        w1_alpha: torch.Tensor,
        fc2_input_scale: torch.Tensor | None,
        w2_weight: torch.Tensor,
        w2_weight_sf: torch.Tensor,
        w2_alpha: torch.Tensor,
        tactic: tuple[int, ...] | None = None,
        *,
        per_token_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer.

        Parameters
        ----------
        x, x_sf, token_selected_experts, token_final_scales, w1_weight, w1_weight_sf, w1_alpha, fc2_input_scale
            As in `cute_dsl_fused_moe`, in the mode and the sizes of the layer.
        w2_weight, w2_weight_sf, w2_alpha, per_token_scale
            As in `cute_dsl_fused_moe`.
        tactic : tuple, optional
            One of `get_valid_tactics`; None chooses by the number of tokens. Results differ by roundings of sums.

        Returns
        -------
        torch.Tensor
            New, [tokens, hidden_size] of `output_dtype`.

        Raises
        ------
        ValueError
            A shape, dtype, stride or device other than the above or than the constructor's sizes, by name; another
            tactic.
        """
        first, second = (w1_weight, w1_weight_sf, w1_alpha), (w2_weight, w2_weight_sf, w2_alpha)
        return _run(
            self._layer, (x, x_sf, per_token_scale), token_selected_experts, token_final_scales, first,
            fc2_input_scale, second, None, _tile(tactic),
        )  # fmt: skip

    def get_valid_tactics(self) -> list[tuple[int]]:
        """What `run` takes as a tactic.

        Returns
        -------
        list of tuple of int
            The rows of a tile, one in each.
        """
        return [(tile,) for tile in _TILES]


def _tile(tactic) -> int:
    """Rows of a tile; 0 where the number of tokens decides."""
    allowed = (None, *((tile,) for tile in _TILES))
    require(tactic in allowed, "tactic", tactic, ", ".join(map(str, allowed)))
    return 0 if tactic is None else tactic[0]


def _layer(
    num_experts, top_k, num_local_experts, offset, output_dtype, quant_mode, activation_type, swiglu, situ, /
) -> _Layer:
    mode = str(quant_mode).lower()
    mode = "w4a4" if mode == "nvfp4" else mode
    require(mode in _MODES, "quant_mode", repr(quant_mode), f"{', '.join(map(repr, _MODES))}, 'nvfp4'")
    require(num_experts >= 1, "num_experts", num_experts, "1 or more")
    require(top_k >= 1, "top_k", top_k, "1 or more")
    count = num_experts if num_local_experts is None else num_local_experts
    require(1 <= count <= num_experts, "num_local_experts", count, f"1 to {num_experts}, num_experts")
    fits = 0 <= offset <= num_experts - count
    require(fits, "local_expert_offset", offset, f"0 to {num_experts - count}: {count} of {num_experts} experts")
    dtypes = "bfloat16, float16, float32"
    dtype = present("output_dtype", as_dtype(output_dtype, None, "output_dtype"), dtypes)
    require(dtype in (torch.bfloat16, torch.float16, torch.float32), "output_dtype", dtype, dtypes)
    return _Layer(mode, top_k, count, offset, dtype, _activation(activation_type, swiglu, situ))


def _activation(activation_type, swiglu, situ) -> experts.Activation:
    allowed = (ActivationType.Swiglu, ActivationType.GegluTanh, ActivationType.Relu2)
    known = {int(kind) for kind in allowed}
    names = ", ".join(f"{kind.name} ({int(kind)})" for kind in allowed)
    require(int(activation_type) in known, "activation_type", activation_type, names)
    act, _ = experts.activation_of("activation_type", activation_type)
    beta, linear = situ
    for name, value in (("situ_beta", beta), ("situ_linear_beta", linear)):
        fits = value is None or (act == "swiglu" and 0 < value < math.inf)
        require(fits, name, value, "None, or with Swiglu a number above 0")
    require(linear is None or beta is not None, "situ_linear_beta", linear, "None without situ_beta")
    by_number = ""
    for name, value, default in zip(
        ("alpha", "beta", "limit"), swiglu, (DEFAULT_SWIGLU_ALPHA, DEFAULT_SWIGLU_BETA, DEFAULT_SWIGLU_LIMIT)
    ):
        # No limit, and float32's largest number, clamp nothing.
        set_ = value != default and not (name == "limit" and value == math.inf)
        fits = not set_ or (act == "swiglu" and beta is None)
        require(fits, f"swiglu_{name}", value, f"{default}, but with Swiglu that is not SiTU")
        number = isinstance(value, (int, float)) and (value > 0 if name == "limit" else math.isfinite(value))
        require(number, f"swiglu_{name}", value, "a number above 0" if name == "limit" else "a finite number")
        by_number += name[0].upper() if set_ else ""
    if beta is not None:
        act = "situ_gate" if linear is None else "situ"
        return experts.Activation(act, numbers=experts.Numbers(float(beta), float(linear or 0)))
    return experts.Activation(act, numbers=experts.Numbers(*map(float, swiglu)), by_number=by_number)


def _run(layer: _Layer, rows, ids, scales, first, fc2_input_scale, second, out, tile=0) -> torch.Tensor:
    (x, x_sf, per_token_scale), (w1, sf1, alpha1), (w2, sf2, alpha2) = rows, first, second
    tensors = {"x": x, "token_selected_experts": ids, "token_final_scales": scales, "w1_weight": w1,
               "w1_weight_sf": sf1, "w1_alpha": alpha1, "w2_weight": w2, "w2_weight_sf": sf2,
               "w2_alpha": alpha2}  # fmt: skip
    for name, value in tensors.items():
        require(isinstance(value, torch.Tensor), name, type(value).__name__, "a tensor")
    device = same_device(**tensors, x_sf=x_sf, fc2_input_scale=fc2_input_scale, per_token_scale=per_token_scale,
                         moe_output=out)  # fmt: skip
    there = layer.device is None or (device.type == layer.device.type and layer.device.index in (None, device.index))
    require(there, "x", f"a tensor on {device}", f"{layer.device}, the wrapper's device")
    tokens = _tokens(layer.mode, x, x_sf, per_token_scale)
    _, encoding, between = _MODES[layer.mode]
    if layer.mode == "w4a4":
        require(fc2_input_scale is not None, "fc2_input_scale", None, "a tensor with w4a4")
        fc2_input_scale = experts.per_expert("fc2_input_scale", fc2_input_scale, layer.experts, device, one=True)
    require(layer.mode == "w4a4" or fc2_input_scale is None, "fc2_input_scale", "a tensor", f"None with {layer.mode}")
    shape = (len(x), layer.top_k)
    floats = (torch.float32, torch.bfloat16, torch.float16)
    for name, dtypes in (("token_selected_experts", (torch.int32, torch.int64)), ("token_final_scales", floats)):
        value = tensors[name]
        require(tuple(value.shape) == shape, name, tuple(value.shape), f"{shape}, a row of top_k for each token")
        require(value.dtype in dtypes, name, value.dtype, ", ".join(map(str, dtypes)))
    routed = experts.Routed(ids, scales, layer.offset, layer.experts)
    gated = layer.activation.act in experts.room.GATED
    weights = []
    for name, codes, sf, group, size in (
        ("w1_weight", w1, sf1, _GROUP if gated else 0, layer.intermediate * (2 if gated else 1)),
        ("w2_weight", w2, sf2, 0, layer.hidden),
    ):
        weights.append(_weight(name, codes, sf, encoding, layer.experts, group))
        n = codes.shape[1]
        require(size in (0, n), name, tuple(codes.shape), f"{size} rows for each expert, by the wrapper's sizes")
    alphas = [experts.per_expert(name, tensors[name], layer.experts, device) for name in ("w1_alpha", "w2_alpha")]
    between = experts.Between(between, fc2_input_scale, scale=alphas[0], second=alphas[1])
    out = experts.result("moe_output", out, len(x), w2.shape[1], layer.dtype, device)
    return experts.run(tokens, routed, weights[0], layer.activation, between, weights[1], out, tile=tile)[0]


def _tokens(mode: str, x, x_sf, per_token_scale) -> experts.Tokens:
    encoding, _, _ = _MODES[mode]
    require(x.dim() == 2, "x", tuple(x.shape), "[tokens, hidden]")
    require(x.dtype in _ROWS[mode], "x", x.dtype, f"{', '.join(map(str, _ROWS[mode]))} with {mode}")
    require(x.stride(1) == 1 or x.shape[1] == 1, "x", f"strides {x.stride()}", "contiguous rows")
    require(per_token_scale is None or mode == "w4a4", "per_token_scale", "a tensor", f"None with {mode}")
    if mode == "w4a16":
        require(x_sf is None, "x_sf", "a tensor", f"None with {mode}")
        return experts.Tokens(x, encoding)
    width = experts.room.WIDTH[encoding]
    hidden = x.shape[1] * (2 if mode == "w4a4" else 1)
    require(hidden % width == 0, "x", tuple(x.shape), f"rows of a multiple of {width} elements")
    tokens, blocks = len(x), hidden // width
    require(isinstance(x_sf, torch.Tensor), "x_sf", x_sf, f"a tensor with {mode}")
    fits = layouts.holds(x_sf, tokens, blocks, "linear") and x_sf.is_contiguous()
    fits = fits and x_sf.dtype in FACTOR_DTYPES
    require(fits, "x_sf", f"{x_sf.dtype} {tuple(x_sf.shape)}", f"bytes, [{tokens}, {blocks}], contiguous")
    factors = x_sf.view(torch.uint8).view(tokens, blocks)
    if per_token_scale is not None:
        require(per_token_scale.dtype == torch.float32, "per_token_scale", per_token_scale.dtype, "float32")
        shape = tuple(per_token_scale.shape)
        require(per_token_scale.numel() == tokens, "per_token_scale", shape, f"({tokens},), one for each token")
        per_token_scale = per_token_scale.reshape(-1).contiguous()
    return experts.Tokens(x.view(torch.uint8) if mode == "w4a4" else x, encoding, factors, row_scale=per_token_scale)


def _weight(name: str, codes, sf, encoding: str, count: int, group: int) -> experts.Weight:
    """Weights with their factors as a flat row of tiles for each expert."""
    require(codes.dtype in _FP4, name, codes.dtype, "uint8, two codes a byte")
    shape = tuple(codes.shape)
    require(len(shape) == 3 and shape[0] == count, name, shape, f"[{count}, rows, columns / 2], this rank's experts")
    _, n, half = shape
    fits = not group or n % (2 * group) == 0
    require(fits, name, shape, f"a multiple of {2 * group} rows: {group} of the up-projection, {group} of the gate")
    width = experts.room.WIDTH[encoding]
    require(2 * half % width == 0, name, shape, f"rows of a multiple of {width} elements")
    high, wide = layouts.padded(n, 2 * half // width, "128x4")
    if sf.dim() == 6:
        # As convert_sf_to_mma_layout sees them; in their own order they are one after another.
        seen, tiles = tuple(sf.shape), (32, 4, high // 128, 4, wide // 4, count)
        require(seen == tiles, f"{name}_sf", seen, f"{tiles}, as convert_sf_to_mma_layout gives them")
        sf = sf.permute(5, 2, 4, 0, 1, 3)
    fits = sf.dtype in FACTOR_DTYPES and sf.numel() == count * high * wide and sf.is_contiguous()
    require(fits, f"{name}_sf", f"{sf.dtype} {tuple(sf.shape)}", f"{count} x {high} x {wide} bytes, one after another")
    sf = sf.view(torch.uint8).view(count, high * wide)
    return experts.Weight(name, codes.view(torch.uint8), encoding, sf, "128x4", paired=group)
