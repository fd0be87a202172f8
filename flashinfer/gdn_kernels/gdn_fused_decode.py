"""One token of a whole layer of Qwen3-Next's kind: projection of its gates, convolution, and gated delta rule."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import named
from flashinfer._core.checks import check_apart, check_values, require
from flashinfer._core.custom_op import one_op
from flashinfer._delta import INDICES, INPUTS, STATES, require_dtype, require_shape, scale_or_unset
from flashinfer.causal_conv1d import run_conv
from flashinfer.gdn_decode import decode_tokens
from flashinfer.gemm import mm_bf16
from flashinfer.ops.recurrent.conv import Call
from flashinfer.ops.recurrent.delta.operands import Pool

__all__ = ["gdn_fused_decode_step", "gdn_fused_decode_step_supported"]


def _output(its: dict) -> torch.Tensor:
    heads, value_dim = its["ssm_state"].shape[1:3]
    shape = its["mixed_qkv"].shape[0], 1, heads, value_dim
    return its["mixed_qkv"].new_empty(shape) if its["out"] is None else its["out"]


@one_op(
    written=("conv_state", "ssm_state", "out"), given={"out": _output},
    returned=lambda its: (its["out"], its["conv_state"], its["ssm_state"]),
)
@named(
    conv_state_indices="state_indices", initial_state_indices="state_indices", initial_state="ssm_state",
    state="ssm_state", x="mixed_qkv", weight="conv_weight", bias="conv_bias", a="hidden_states", b="w_ba", output="out",
)
def gdn_fused_decode_step(
    hidden_states: torch.Tensor,
    w_ba: torch.Tensor,
    mixed_qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float | None,
    ssm_state: torch.Tensor,
    state_indices: torch.Tensor,
    use_qk_l2norm: bool = True,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The next token of each sequence, in place on both pools; three launches.

    ``b, a = hidden_states @ w_ba`` (rounded to their dtype); q, k and v are ``mixed_qkv`` after a causal convolution
    and SiLU; then the gated delta rule of `gated_delta_rule_decode_pretranspose`.

    Parameters
    ----------
    hidden_states : torch.Tensor
        [batch, hidden], bfloat16 or float16.
    w_ba : torch.Tensor
        [hidden, 2 heads] of that dtype: beta's columns, then the decay's.
    mixed_qkv : torch.Tensor
        [batch, (2 query heads + heads) K]: q, k and v of all heads.
    conv_weight : torch.Tensor
        [channels of mixed_qkv, width], width 2 to 4.
    conv_bias : torch.Tensor, optional
        [channels]; None for none.
    conv_state : torch.Tensor
        [slots, channels, width - 1], any strides.
    A_log, dt_bias : torch.Tensor
        [heads].
    scale : float, optional
        Of the output; 1 / sqrt(K) if not given or 0.
    ssm_state : torch.Tensor
        [slots, heads, V, K], any strides; any dtype of states.
    state_indices : torch.Tensor
        [batch], int32 or int64: the slot of each sequence in both pools; they differ. A negative one is padding:
        nothing is read or written, and the output is 0.
    use_qk_l2norm : bool
        q and k are divided by sqrt(sum of squares + 1e-6) first.
    out : torch.Tensor, optional
        [batch, 1, heads, V]; receives the result.

    Returns
    -------
    (torch.Tensor, torch.Tensor, torch.Tensor)
        `out`, or a new tensor in the dtype of mixed_qkv; `conv_state`; `ssm_state`.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, w_ba, qkv = torch.randn(2, 32).bfloat16(), torch.randn(32, 8).bfloat16(), torch.randn(2, 8 * 64).bfloat16()
    >>> conv, state = torch.zeros(3, 8 * 64, 3).bfloat16(), torch.zeros(3, 4, 64, 64)  # 2 query heads, 4 heads
    >>> out, *_ = flashinfer.gdn_fused_decode_step(x, w_ba, qkv, torch.randn(8 * 64, 4).bfloat16(), None, conv,
    ...     torch.zeros(4), torch.zeros(4), None, state, torch.tensor([0, 2]))
    >>> out.shape
    torch.Size([2, 1, 4, 64])
    """
    require_shape("ssm_state", ssm_state, None, None, None, None)
    require_shape("mixed_qkv", mixed_qkv, None, None)
    heads, value_dim, key_dim = ssm_state.shape[1:]
    require(heads * value_dim * key_dim > 0, "ssm_state", f"shape {tuple(ssm_state.shape)}", "states with elements")
    batch, channels = mixed_qkv.shape
    keys = channels - heads * value_dim
    require(keys > 0 and keys % (2 * key_dim) == 0, "mixed_qkv", f"{channels} channels",
            f"{heads} heads of {value_dim} values, and pairs of {key_dim} keys")  # fmt: skip
    require_shape("hidden_states", hidden_states, batch, None)
    require_shape("w_ba", w_ba, hidden_states.shape[1], 2 * heads)
    require_shape("conv_weight", conv_weight, channels, None)
    require_shape("conv_state", conv_state, None, channels, conv_weight.shape[1] - 1)
    require_shape("state_indices", state_indices, batch, dtypes=INDICES)
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        require_shape(name, x, heads, dtypes=INPUTS)
    require_dtype("ssm_state", ssm_state, STATES)
    check_values("state_indices", state_indices.clamp(min=-1), -1, min(len(ssm_state), len(conv_state)) - 1)
    read = dict(hidden_states=hidden_states, w_ba=w_ba, mixed_qkv=mixed_qkv, conv_weight=conv_weight,
                conv_bias=conv_bias, A_log=A_log, dt_bias=dt_bias, state_indices=state_indices)  # fmt: skip
    check_apart([("conv_state", conv_state), ("ssm_state", ssm_state), ("out", out)], read.items())
    ba = mm_bf16(hidden_states, w_ba, out_dtype=hidden_states.dtype, backend="auto")
    mixed = torch.empty(mixed_qkv.shape, dtype=mixed_qkv.dtype, device=mixed_qkv.device)
    call = Call(mixed_qkv[:, None], conv_weight.T[None], conv_bias, conv_state, mixed[:, None], state_indices)
    run_conv(call, "silu", rolling=False, long=False, backend="auto")
    q, k, v = mixed.split([keys // 2, keys // 2, heads * value_dim], 1)
    q, k = (x.view(batch, 1, x.shape[1] // key_dim, key_dim) for x in (q, k))
    gates = A_log, ba[:, None, heads:], dt_bias, ba[:, None, :heads]
    pool = Pool(ssm_state, ssm_state, state_indices)
    result = decode_tokens(q, k, v.view(batch, 1, heads, value_dim), gates, pool, scale_or_unset(scale, key_dim), out,
                           use_qk_l2norm, True, "auto")  # fmt: skip
    return result, conv_state, ssm_state


def gdn_fused_decode_step_supported(
    batch_size: int,
    hidden_size: int = 5120,
    n_ba: int = 96,
    qkv_dim: int = 10240,
    num_qk_heads: int = 16,
    num_v_heads: int = 48,
    head_dim: int = 128,
    conv_width: int = 4,
    conv_state_len: int = 3,
    device: torch.device | None = None,
    conv_state_layout: str = "SD",
) -> bool:
    """Whether one kernel of its own serves a layer of these sizes: no, on any device.

    `gdn_fused_decode_step` takes every size that its documentation states, in three launches. A caller that has
    a faster composition keeps it.

    Parameters
    ----------
    batch_size, hidden_size, n_ba, qkv_dim, num_qk_heads, num_v_heads, head_dim, conv_width, conv_state_len : int
        Sizes of the arguments: n_ba is 2 num_v_heads, qkv_dim is (2 num_qk_heads + num_v_heads) head_dim.
    device : torch.device, optional
        Where the tensors are.
    conv_state_layout : str
        "SD", channels contiguous, or "DS".

    Returns
    -------
    bool
        False.

    Examples
    --------
    >>> import flashinfer
    >>> flashinfer.gdn_fused_decode_step_supported(4)
    False
    """
    return False
