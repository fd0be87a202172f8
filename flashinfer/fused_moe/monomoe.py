"""A mixture of experts in block FP8 from router logits, for few tokens, by the name of upstream's single kernel."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import require, same_device
from flashinfer.fused_moe import experts, routing
from flashinfer.tllm_enums import RoutingMethodType

# By scoring_func and renormalize.
_METHODS = {
    ("softmax", True): RoutingMethodType.Renormalize,
    ("softmax", False): RoutingMethodType.Default,
    ("sigmoid", True): RoutingMethodType.SigmoidRenorm,
    ("sigmoid", False): RoutingMethodType.Sigmoid,
}
# The attribute of a weight that keeps its copy with the up-projection first.
_KEPT = "_flashinfer_up_first"


def has_monomoe() -> bool:
    """Whether `mono_moe` can be called.

    Returns
    -------
    bool
        True.

    Examples
    --------
    >>> import flashinfer
    >>> flashinfer.fused_moe.has_monomoe()
    True
    """
    return True


def get_scratchpad_size_bytes() -> int:
    """Bytes of scratch memory of `mono_moe`, which needs none here.

    Returns
    -------
    int
        16, so that what is allocated has an address.

    Examples
    --------
    >>> import flashinfer
    >>> flashinfer.fused_moe.get_scratchpad_size_bytes()
    16
    """
    return 16


@checked
def alloc_scratchpad(device: torch.device | str) -> torch.Tensor:
    """Scratch memory for `mono_moe`.

    Parameters
    ----------
    device : torch.device
        Where it is allocated.

    Returns
    -------
    torch.Tensor
        uint8 [get_scratchpad_size_bytes()], zeros.

    Raises
    ------
    RuntimeError
        torch's own, of a device that is not there.

    Examples
    --------
    >>> import flashinfer
    >>> flashinfer.fused_moe.alloc_scratchpad("cpu").shape
    torch.Size([16])
    """
    return torch.zeros(get_scratchpad_size_bytes(), dtype=torch.uint8, device=device)


@checked
def interleave_for_tma_wgmma_up(w_fp8: torch.Tensor) -> torch.Tensor:
    """Rows of the gate and of the up-projection by turns, 8 of each, as upstream's kernel reads them.

    Parameters
    ----------
    w_fp8 : torch.Tensor
        [experts, 2 * intermediate, hidden], float8_e4m3fn or its bytes in uint8 or int8: the gate's rows, then
        the up-projection's. `intermediate` a multiple of 64.

    Returns
    -------
    torch.Tensor
        A new tensor of the same shape and dtype. Upstream keeps it as an attribute of `w_fp8`; here it is not kept.

    Raises
    ------
    ValueError
        A shape or dtype other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> w = torch.arange(128)[None, :, None].expand(1, 128, 16).to(torch.float8_e4m3fn)
    >>> flashinfer.fused_moe.interleave_for_tma_wgmma_up(w)[0, :16, 0].int().tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 64, 64, 64, 64, 64, 72, 72, 72]
    """
    fits = w_fp8.dim() == 3 and w_fp8.shape[1] % 128 == 0
    require(fits, "w_fp8", tuple(w_fp8.shape), "[experts, 2 * intermediate, hidden], intermediate a multiple of 64")
    codes = (torch.float8_e4m3fn, torch.uint8, torch.int8)
    require(w_fp8.dtype in codes, "w_fp8", w_fp8.dtype, ", ".join(map(str, codes)))
    halves = w_fp8.view(torch.uint8).unflatten(1, (2, -1, 8))
    return halves.transpose(1, 2).reshape(w_fp8.shape).view(w_fp8.dtype)


@checked
@named(routing_logits="router_logits")
def mono_moe(
    activations_in: torch.Tensor,
    router_logits: torch.Tensor,
    expert_weights_up: torch.Tensor,
    expert_scales_up: torch.Tensor,
    expert_weights_down: torch.Tensor,
    expert_scales_down: torch.Tensor,
    top_k: int,
    scoring_func: str = "softmax",
    renormalize: bool = True,
    out: torch.Tensor | None = None,
    scratchpad: torch.Tensor | None = None,
    interleave_up: bool = True,
) -> torch.Tensor:
    """A mixture of SwiGLU experts in FP8 with scales for 128 x 128, from router logits.

    Upstream has it for 256 experts, a hidden size of 2048, 512 between the products and up to 8 tokens. Here any number
    of each is taken.

    Parameters
    ----------
    activations_in : torch.Tensor
        bfloat16 [tokens, hidden], contiguous rows; quantised here, each 128 of a row with a scale.
    router_logits : torch.Tensor
        [tokens, experts]; bfloat16, float16 or float32.
    expert_weights_up : torch.Tensor
        float8_e4m3fn [experts, 2 * intermediate, hidden], contiguous: the gate's rows, then the up-projection's;
        without `interleave_up` as `interleave_for_tma_wgmma_up` gives them. hidden and intermediate are multiples of
        128.
    expert_scales_up : torch.Tensor
        float32 [experts, 2 * intermediate / 128, hidden / 128], the gate's first.
    expert_weights_down, expert_scales_down : torch.Tensor
        float8_e4m3fn [experts, hidden, intermediate], contiguous rows; float32 [experts, hidden / 128,
        intermediate / 128], contiguous rows.
    top_k : int
        Experts of each token.
    scoring_func : str
        "softmax" over all experts, or "sigmoid".
    renormalize : bool
        The weights of the chosen experts are divided by their sum.
    out : torch.Tensor, optional
        bfloat16 [tokens, hidden], contiguous rows.
    scratchpad : torch.Tensor, optional
        uint8, of `alloc_scratchpad`; it is left alone.
    interleave_up : bool
        The rows of expert_weights_up are not interleaved yet.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.

    Notes
    -----
    The experts' kernels read the up-projection first. A copy of expert_weights_up in that order is kept as an attribute
    of that tensor, and made again after a write that torch counts, which one through `.data` is not. While a CUDA graph
    is captured, it is not kept, nor is that of an inference tensor, whose writes torch does not count.

    References
    ----------
    DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.3, https://arxiv.org/abs/2412.19437

    Examples
    --------
    >>> import torch, flashinfer
    >>> up, down = torch.ones(4, 256, 128).to(torch.float8_e4m3fn), torch.ones(4, 128, 128).to(torch.float8_e4m3fn)
    >>> scales = torch.full((4, 2, 1), 0.01), torch.full((4, 1, 1), 0.01)
    >>> x, logits = torch.ones(2, 128, dtype=torch.bfloat16), torch.randn(2, 4, dtype=torch.bfloat16)
    >>> flashinfer.fused_moe.mono_moe(x, logits, up, scales[0], down, scales[1], 2).shape
    torch.Size([2, 128])
    """
    x, up, down = activations_in, expert_weights_up, expert_weights_down
    require(x.dim() == 2 and x.dtype == torch.bfloat16, "activations_in", f"{x.dtype} {tuple(x.shape)}",
            "bfloat16 [tokens, hidden]")  # fmt: skip
    require((scoring_func, True) in _METHODS, "scoring_func", repr(scoring_func), "'softmax', 'sigmoid'")
    tokens, hidden = x.shape
    require(x.stride(1) == 1 or hidden == 1, "activations_in", f"strides {x.stride()}", "contiguous rows")
    fits = up.dim() == 3 and up.shape[1] % 256 == 0 and up.shape[2] == hidden and hidden % 128 == 0
    allowed = f"[experts, 2 * intermediate, {hidden}], sizes multiples of 128"
    require(fits and up.is_contiguous(), "expert_weights_up", tuple(up.shape), f"{allowed}, contiguous")
    count, middle = len(up), up.shape[1] // 2
    given = {
        "expert_weights_down": (down, torch.float8_e4m3fn, (count, hidden, middle)),
        "expert_scales_up": (expert_scales_up, torch.float32, (count, middle // 64, hidden // 128)),
        "expert_scales_down": (expert_scales_down, torch.float32, (count, hidden // 128, middle // 128)),
    }
    require(up.dtype == torch.float8_e4m3fn, "expert_weights_up", up.dtype, "float8_e4m3fn")
    for name, (tensor, dtype, shape) in given.items():
        require(tensor.dtype == dtype, name, tensor.dtype, str(dtype))
        require(tuple(tensor.shape) == shape, name, tuple(tensor.shape), str(list(shape)))
        contiguous = tensor.stride(2) == 1 or shape[2] == 1
        require(contiguous, name, f"strides {tensor.stride()}", "contiguous rows")
    fits = tuple(router_logits.shape) == (tokens, count)
    require(fits, "router_logits", tuple(router_logits.shape), f"[{tokens}, {count}]")
    if scratchpad is not None:
        require(scratchpad.dtype == torch.uint8, "scratchpad", scratchpad.dtype, "uint8")
    same_device(activations_in=x, router_logits=router_logits, expert_weights_up=up, expert_scales_up=expert_scales_up,
                expert_weights_down=down, expert_scales_down=expert_scales_down, out=out,
                scratchpad=scratchpad)  # fmt: skip
    out = experts.result("out", out, tokens, hidden, torch.bfloat16, x.device)
    ids, weights = routing.route(router_logits, None, _METHODS[scoring_func, bool(renormalize)], top_k)
    codes, factors = experts.quantized_tokens(x, "fp8_block", None)
    scales = expert_scales_up.unflatten(1, (2, -1)).flip(1).flatten(1, 2)
    first = experts.Weight("expert_weights_up", _up_first(up, not interleave_up), "fp8_block", scales)
    second = experts.Weight("expert_weights_down", down, "fp8_block", expert_scales_down)
    routed = experts.Routed(ids, weights, 0, count, by_logits=True, ids_name="router_logits")
    return experts.run(
        experts.Tokens(codes, "fp8_block", factors), routed, first, experts.Activation("swiglu"),
        experts.Between("fp8_block"), second, out,
    )[0]  # fmt: skip


def _up_first(up: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The weights with the up-projection's rows first, kept with the tensor where torch counts the writes to it."""
    counted = not up.is_inference()
    state = (up.data_ptr(), up._version if counted else 0, tuple(up.shape), interleaved)
    kept = getattr(up, _KEPT, None) if counted else None
    if kept is not None and kept[0] == state:
        return kept[1]
    codes = up.view(torch.uint8)
    halves = codes.unflatten(1, (-1, 2, 8)).transpose(1, 2) if interleaved else codes.unflatten(1, (2, -1, 8))
    made = halves.flip(1).reshape(up.shape).view(up.dtype)
    if counted and not (up.is_cuda and torch.cuda.is_current_stream_capturing()):
        setattr(up, _KEPT, (state, made))
    return made
