"""Gated delta rule, token by token: decode, verification of drafts, and the commit of what was accepted."""

from __future__ import annotations

import warnings
from typing import Literal

import torch

from flashinfer._core.arguments import named
from flashinfer._core.checks import check_both, present, require
from flashinfer._core.custom_op import one_op
from flashinfer._core.literals import OwnBackend
from flashinfer._delta import (
    INPUTS,
    STATES,
    default_scale,
    output_like,
    require_dtype,
    require_shape,
    require_tokens,
    require_tree,
    run_step,
    variant_for,
)
from flashinfer._delta_commit import gated_delta_rule_replayssm_commit
from flashinfer.ops.recurrent.delta.operands import Gates, Kept, Pool, Tokens

__all__ = [
    "gated_delta_rule_decode",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp",
    "gated_delta_rule_replayssm_commit",
    "ugpu_state_pool",
]

_UPSTREAM = ("flashinfer", "cake_gdn", "rubin")


def _output(its: dict) -> torch.Tensor:
    return its["q"].new_empty(its["v"].shape) if its["output"] is None else its["output"]


@one_op(
    written=("state", "output", "initial_state", "intermediate_states_buffer"),
    given={"output": _output},
    returned=lambda its: (its["output"], its["state"] if its["initial_state"] is None else its["initial_state"]),
)
def gated_delta_rule_decode_pretranspose(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    disable_state_update: bool = False,
    backend: OwnBackend | Literal["flashinfer", "cake_gdn", "rubin"] = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next tokens of each sequence through a gated delta rule whose states are stored K last.

    Per head, with decay exp(-exp(A_log) softplus(a + dt_bias)) and beta = sigmoid(b):
    ``S = decay S; S += beta (v - S k) k^T; out = scale S q``.

    Parameters
    ----------
    q, k : torch.Tensor
        [batch, T, query heads, K]; bfloat16, float16 or float32. K up to 256 on a GPU.
    v : torch.Tensor
        [batch, T, heads, V] of that dtype; heads is a multiple of the query heads.
    state : torch.Tensor, optional
        [batch, heads, V, K]; float32, bfloat16, float16, float8_e4m3fn or float8_e5m2, any strides. Updated in place.
        None where there is an `initial_state`.
    A_log : torch.Tensor
        [heads].
    a, b : torch.Tensor
        [batch, T, heads]: the raw decay and the raw beta.
    dt_bias : torch.Tensor
        [heads].
    scale : float, optional
        Of the output; 1 / sqrt(K) if not given.
    output : torch.Tensor, optional
        [batch, T, heads, V]; receives the result.
    use_qk_l2norm : bool
        q and k are divided by sqrt(sum of squares + 1e-6) first.
    initial_state : torch.Tensor, optional
        A pool [slots, heads, V, K] in place of `state`.
    initial_state_indices : torch.Tensor, optional
        [batch], int32 or int64: the slot of each sequence. A negative one is padding: nothing is read or written, and
        the output is 0. Slots that are written have to differ.
    output_state_indices : torch.Tensor, optional
        [batch]: the slots that are written, if not those that were read. Nothing is written for a negative one.
    intermediate_states_buffer : torch.Tensor, optional
        [batch or more, T or more, heads, V, K] of the state's dtype, T > 1: receives the state after every token.
    disable_state_update : bool
        T > 1: states are read only, as verification of drafts wants it.
    backend : str
        "auto", "flashinfer", "cake_gdn", "rubin" (all of which are ours), "portable" or "reference".

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        `output`, or a new tensor in the dtype of q, and the states.

    Raises
    ------
    ValueError
        A shape, dtype, device or combination other than the above.

    References
    ----------
    Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024, https://arxiv.org/abs/2412.06464

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, v = torch.randn(3, 2, 1, 4, 64).unbind(0)
    >>> state, per_head = torch.zeros(2, 4, 64, 64), torch.zeros(2, 1, 4)
    >>> out, state = flashinfer.gdn_decode.gated_delta_rule_decode_pretranspose(
    ...     q, k, v, state, torch.zeros(4), per_head, torch.zeros(4), per_head)
    >>> out.shape
    torch.Size([2, 1, 4, 64])
    """
    tokens = q.shape[1] if q.dim() == 4 else 0
    pooled = initial_state is not None
    states = present("state", initial_state if pooled else state, "a tensor where initial_state is None")
    require(not (pooled and state is not None), "state", "a tensor", "None where initial_state is given")
    check_both("initial_state_indices", initial_state_indices, "initial_state", initial_state)
    require(pooled or output_state_indices is None, "output_state_indices", "a tensor", "None without initial_state")
    require(
        tokens > 1 or intermediate_states_buffer is None, "intermediate_states_buffer", "a tensor", "None for T = 1"
    )
    require(tokens > 1 or not disable_state_update, "disable_state_update", True, "False for T = 1")
    pool = Pool(states, states, initial_state_indices, write=output_state_indices, each=intermediate_states_buffer)
    final, variant = not disable_state_update, variant_for(backend, *_UPSTREAM)
    out = decode_tokens(q, k, v, (A_log, a, dt_bias, b), pool, scale, output, use_qk_l2norm, final, variant)
    return out, states


@one_op(written=("state", "output"), given={"output": _output}, returned=lambda its: (its["output"], its["state"]))
def gated_delta_rule_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    backend: OwnBackend | Literal["flashinfer", "cake_gdn", "rubin"] = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of each sequence through a gated delta rule whose states are stored V last: [batch, heads, K, V].

    Parameters
    ----------
    q, k, v, A_log, a, b, dt_bias, scale, output, use_qk_l2norm, backend
        As in `gated_delta_rule_decode_pretranspose`.
    state : torch.Tensor
        [batch, heads, K, V], updated in place; as in `gated_delta_rule_decode_pretranspose` but for the order of axes.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        The output [batch, 1, heads, V], and state.

    Raises
    ------
    ValueError
        As `gated_delta_rule_decode_pretranspose` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, v = torch.randn(3, 2, 1, 4, 64).unbind(0)
    >>> state, per_head = torch.zeros(2, 4, 64, 64), torch.zeros(2, 1, 4)
    >>> out, state = flashinfer.gdn_decode.gated_delta_rule_decode(
    ...     q, k, v, state, torch.zeros(4), per_head, torch.zeros(4), per_head)
    >>> out.shape
    torch.Size([2, 1, 4, 64])
    """
    require(q.dim() != 4 or q.shape[1] == 1, "q", f"{q.shape[1] if q.dim() > 1 else 0} tokens", "1 token a sequence")
    require(state.dim() == 4, "state", f"shape {tuple(state.shape)}", "[batch, heads, K, V]")
    pool = Pool(state.transpose(-1, -2), state.transpose(-1, -2))
    variant = variant_for(backend, *_UPSTREAM)
    return decode_tokens(q, k, v, (A_log, a, dt_bias, b), pool, scale, output, use_qk_l2norm, True, variant), state


@one_op(
    written=("initial_state", "output", "intermediate_states_buffer", "replayssm_rawv", "replayssm_rawk", "replayssm_g",
             "replayssm_beta"),
    given={"output": _output},
    returned=lambda its: (its["output"], its["initial_state"]),
)
@named(state="initial_state")
def gated_delta_rule_mtp(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: torch.Tensor | None = None,
    cache_replayssm: bool = False,
    replayssm_rawv: torch.Tensor | None = None,
    replayssm_rawk: torch.Tensor | None = None,
    replayssm_g: torch.Tensor | None = None,
    replayssm_beta: torch.Tensor | None = None,
    *,
    parents: torch.Tensor | None = None,
    backend: OwnBackend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Several drafted tokens of each sequence at once, for verification, from a pool of states stored K last.

    Parameters
    ----------
    q, k, v, A_log, a, dt_bias, b, scale, output, use_qk_l2norm
        As in `gated_delta_rule_decode_pretranspose`.
    initial_state : torch.Tensor
        A pool [slots, heads, V, K].
    initial_state_indices : torch.Tensor
        [batch], int32 or int64: the slot of each sequence; a negative one is padding, whose output is 0.
    intermediate_states_buffer : torch.Tensor, optional
        [batch or more, T or more, heads, V, K] of the pool's dtype; receives the state after every token.
    ssm_state_indices : torch.Tensor, optional
        [batch, T], T > 1: the slots of the pool that receive the state after every token; none for a negative one.
    disable_state_update : bool, optional
        States are read only. None is True, with a warning, as upstream has it until 0.8.
    output_state_indices : torch.Tensor, optional
        [batch]: slots for the state after the last token, if not those that were read; none for a negative one.
    cache_replayssm : bool
        Keep what `gated_delta_rule_replayssm_commit` needs, in the four tensors that follow; states are read only.
    replayssm_rawv : torch.Tensor, optional
        [slots, heads, T, V], bfloat16 or another dtype of inputs: v as it came.
    replayssm_rawk : torch.Tensor, optional
        [slots, query heads, T, K] of that dtype: k as it came.
    replayssm_g, replayssm_beta : torch.Tensor, optional
        [slots, heads, T], float32: the logarithm of the decay, and the sigmoid of b.
    parents : torch.Tensor, optional
        [batch, T], int32 or int64, ours: the drafts are a tree, and token t follows token parents[:, t] < t, or the
        initial state where that is negative. T up to 64. The initial state stays as it is.
    backend : str
        "auto", "portable" or "reference"; ours.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        `output`, or a new tensor in the dtype of q, and `initial_state`.

    Raises
    ------
    ValueError
        A shape, dtype, device or combination other than the above.

    References
    ----------
    Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024, https://arxiv.org/abs/2412.06464

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, v = torch.randn(3, 2, 3, 4, 64).unbind(0)  # 2 sequences, 3 tokens, 4 heads
    >>> pool, slots, raw = torch.zeros(3, 4, 64, 64), torch.tensor([2, 0]), torch.zeros(2, 3, 4)
    >>> out, pool = flashinfer.gdn_decode.gated_delta_rule_mtp(
    ...     q, k, v, pool, slots, torch.zeros(4), raw, torch.zeros(4), raw, disable_state_update=False)
    >>> out.shape
    torch.Size([2, 3, 4, 64])
    """
    if disable_state_update is None:
        warnings.warn("disable_state_update: None is True now and will be False in 0.8; give it", DeprecationWarning, 2)
        disable_state_update = True
    windows = {"rawv": replayssm_rawv, "rawk": replayssm_rawk, "g": replayssm_g, "beta": replayssm_beta}
    each, rows = intermediate_states_buffer, ssm_state_indices
    for name, x in windows.items():
        require(
            (x is not None) == cache_replayssm,
            f"replayssm_{name}",
            "None" if x is None else "a tensor",
            "given if and only if cache_replayssm is True",
        )
    if cache_replayssm:
        require(disable_state_update, "disable_state_update", False, "True with cache_replayssm")
        require(
            each is None and rows is None,
            "cache_replayssm",
            True,
            "False with intermediate_states_buffer or ssm_state_indices",
        )
    if rows is not None:
        require(each is None, "ssm_state_indices", "a tensor", "None with intermediate_states_buffer")
        require(not disable_state_update, "disable_state_update", True, "False with ssm_state_indices")
        require(q.dim() == 4 and q.shape[1] > 1, "ssm_state_indices", "a tensor", "None for T = 1")
    pool = Pool(initial_state, initial_state, initial_state_indices, write=output_state_indices, each=each, rows=rows)
    kept = None
    if cache_replayssm:
        v_window, k_window = present("replayssm_rawv", replayssm_rawv), present("replayssm_rawk", replayssm_rawk)
        kept = Kept(v_window, k_window, replayssm_g, replayssm_beta)
    if parents is not None:
        require(q.dim() == 4, "q", f"shape {tuple(q.shape)}", "[batch, T, heads, head_dim]")
        require(output_state_indices is None, "output_state_indices", "a tensor", "None with parents")
        require_tree(parents, *q.shape[:2])
    final = not disable_state_update and rows is None and parents is None
    gates = A_log, a, dt_bias, b
    out = decode_tokens(
        q, k, v, gates, pool, scale, output, use_qk_l2norm, final, variant_for(backend), kept=kept, parents=parents
    )
    return out, initial_state


def decode_tokens(
    q, k, v, gates, pool, scale, output, normalize, final, backend, *, kept=None, parents=None, soft=(1.0, 20.0)
):
    """Check the arguments that all functions here share, and run."""
    A_log, a, dt_bias, b = gates
    heads = require_tokens(q, k, v, "batch, T, heads, head_dim")
    batch, tokens, _, key_dim = q.shape
    value_dim = v.shape[3]
    for name, x in (("a", a), ("b", b)):
        require_shape(name, x, batch, tokens, heads, dtypes=INPUTS)
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        require_shape(name, x, heads, dtypes=INPUTS)
    slots = batch if pool.read is None else None
    require_shape("state" if pool.read is None else "initial_state", pool.source, slots, heads, value_dim, key_dim)
    require_dtype("state" if pool.read is None else "initial_state", pool.source, STATES)
    require_shape("initial_state_indices", pool.read, batch)
    require_shape("output_state_indices", pool.write, batch)
    require_shape("ssm_state_indices", pool.rows, batch, tokens)
    if pool.each is not None:
        check_buffer(pool.each, batch, tokens, (heads, value_dim, key_dim), pool.source.dtype)
    if kept is not None:
        _check_windows(kept, pool.source.shape[0], heads, k.shape[2], tokens, value_dim, key_dim)
    out = output_like(output, (batch, tokens, heads, value_dim), q.dtype, q.device)
    scale = default_scale(scale, key_dim)
    run_step(
        Tokens(q, k, v, a, b),
        Gates(A_log, dt_bias, 0.0, *soft),
        pool,
        out,
        scale,
        gate="softplus",
        beta="logit",
        normalize=normalize,
        final=final,
        backend=backend,
        keep="replay" if kept else "",
        kept=kept,
        parents=parents,
    )
    return out


def check_buffer(each, batch: int, tokens: int, state: tuple, dtype) -> None:
    name = "intermediate_states_buffer"
    require_shape(name, each, None, None, *state)
    require(
        each.shape[0] >= batch and each.shape[1] >= tokens,
        name,
        f"shape {tuple(each.shape)}",
        f"at least {batch} sequences and {tokens} tokens",
    )
    require_dtype(name, each, (dtype,))
    require(each.stride(4) == 1 and each.stride(3) == state[2], name, f"strides {each.stride()}", "contiguous states")


def _check_windows(kept: Kept, slots, heads, key_heads, tokens, value_dim, key_dim) -> None:
    longest = kept.v.shape[2] if kept.v.dim() == 4 else tokens
    require(longest >= tokens, "replayssm_rawv", f"{longest} tokens", f"at least {tokens}")
    require_shape("replayssm_rawv", kept.v, slots, heads, longest, value_dim)
    require_shape("replayssm_rawk", kept.k, slots, key_heads, longest, key_dim)
    require_shape("replayssm_g", kept.gate, slots, heads, longest)
    require_shape("replayssm_beta", kept.beta, slots, heads, longest)
    require_dtype("replayssm_rawv", kept.v, INPUTS)
    require_dtype("replayssm_rawk", kept.k, (kept.v.dtype,))
    for name, x in (("replayssm_g", kept.gate), ("replayssm_beta", kept.beta)):
        require_dtype(name, x, (torch.float32,))
    for name, x in zip(("rawv", "rawk", "g", "beta"), kept):
        if x is not None and slots:
            require(x[0].is_contiguous(), f"replayssm_{name}", f"strides {x.stride()}", "contiguous slots")


def ugpu_state_pool(pool_size: int, num_v_heads: int, head_size: int = 128, device=None) -> torch.Tensor:
    """Refused: pools in the memories of two dies are for a GPU that has two.

    Parameters
    ----------
    pool_size, num_v_heads, head_size : int
        Upstream's slots, heads and elements of a head.
    device : torch.device, optional
        Upstream's device.

    Returns
    -------
    NoReturn
        It always raises.

    Raises
    ------
    ValueError
        Always. On one die, a pool is a tensor [slots, heads, V, K] on the device.
    """
    raise ValueError(f"device: got {device}; allowed: a GPU of two dies, for which this library has no kernels")
