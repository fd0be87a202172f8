"""Kimi delta attention of one step: by upstream's older name, and fused with what is around it in a layer."""

from __future__ import annotations

from typing import Any, cast

import torch

from flashinfer import kda
from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import check_apart, check_values, dtype_name, present, require, rows_of, same_device
from flashinfer._core.custom_op import one_op
from flashinfer._delta import (
    INDICES,
    INPUTS,
    STATES,
    check_longest,
    output_like,
    require_dtype,
    require_shape,
    run_step,
    variant_for,
)
from flashinfer._kda import check_inputs, gates_of
from flashinfer.causal_conv1d import run_conv
from flashinfer.ops.recurrent import delta as room
from flashinfer.ops.recurrent.conv import Call
from flashinfer.ops.recurrent.delta.operands import LayerStates, LayerTokens, Norm, Pool, Tokens
from flashinfer.ops.recurrent.layouts import state_layout, whole_rows

__all__ = ["fused_kda_decode", "packed_fused_kda_decode", "packed_kda_decode", "recurrent_kda"]

_MODES = (None, "positive_unique", "unique_or_null", "repeated_positive")


@checked
@named(state="initial_state")
def recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_spec_tokens: int | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    initial_state_source: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    beta_is_logit: bool = False,
    *,
    disable_state_update: bool = False,
    correction_cache: torch.Tensor | None = None,
    kg_cache: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`flashinfer.recurrent_kda` without checkpoints, by the name that it had before: same parameters, same results.

    Parameters
    ----------
    q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel
        As in `flashinfer.recurrent_kda`.
    use_gate_in_kernel, lower_bound, cu_seqlens, ssm_state_indices, num_spec_tokens, num_accepted_tokens
        As in `flashinfer.recurrent_kda`.
    output, initial_state_source, initial_state_indices, beta_is_logit, disable_state_update, correction_cache
        As in `flashinfer.recurrent_kda`.
    kg_cache, backend
        As in `flashinfer.recurrent_kda`.

    Returns
    -------
    (torch.Tensor, torch.Tensor or None)
        The output, and the final states with output_final_state.

    Raises
    ------
    ValueError
        As `flashinfer.recurrent_kda` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, v, g = torch.randn(4, 2, 1, 4, 64).unbind(0)
    >>> out, state = flashinfer.kda_decode.recurrent_kda(
    ...     q, k, v, -g.abs(), g[..., 0].sigmoid(), output_final_state=True)
    >>> out.shape, state.shape
    (torch.Size([2, 1, 4, 64]), torch.Size([2, 4, 64, 64]))
    """
    return kda.recurrent_kda(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, lower_bound, cu_seqlens, ssm_state_indices, num_spec_tokens, num_accepted_tokens, output,
        initial_state_source, initial_state_indices, beta_is_logit, disable_state_update=disable_state_update,
        correction_cache=correction_cache, kg_cache=kg_cache, backend=cast(Any, backend or "auto"),
    )  # fmt: skip


def _result(its: dict) -> torch.Tensor:
    shape = len(its["mixed_qkv"]), 1, its["state"].shape[1], its["state"].shape[3]
    return its["mixed_qkv"].new_empty(shape) if its["output"] is None else its["output"]


@one_op(written=("state", "output"), given={"output": _result}, returned=lambda its: its["output"])
@named(q="mixed_qkv", k="mixed_qkv", v="mixed_qkv", g="raw_gate", beta="raw_beta")
def packed_kda_decode(
    mixed_qkv: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """The next token of each sequence through Kimi delta attention with K3's gate, bounded by exp(-5).

    Parameters
    ----------
    mixed_qkv : torch.Tensor
        [batch, 3 heads K]: q, k and v of all heads, after the convolution; bfloat16, float16 or float32.
    raw_gate : torch.Tensor
        [batch, heads K].
    raw_beta : torch.Tensor
        [batch, heads], of which the sigmoid is taken.
    A_log : torch.Tensor
        [heads].
    dt_bias : torch.Tensor
        [heads K].
    state : torch.Tensor
        [slots, heads, K, K], any strides, any dtype of states; updated in place.
    state_indices : torch.Tensor
        [batch], int32 or int64: the slot of each sequence; they differ. A negative one is padding: nothing is read or
        written, and the output is 0.
    output : torch.Tensor, optional
        [batch, 1, heads, K]; receives the result.

    Returns
    -------
    torch.Tensor
        `output`, or a new tensor in the dtype of mixed_qkv.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> mixed, gate, beta = (torch.randn(2, width).bfloat16() for width in (3 * 2 * 64, 2 * 64, 2))
    >>> state, slots = torch.zeros(4, 2, 64, 64), torch.tensor([3, 0]).int()
    >>> flashinfer.packed_kda_decode(mixed, gate, beta, torch.zeros(2), torch.zeros(128), state, slots).shape
    torch.Size([2, 1, 2, 64])
    """
    require_shape("state", state, None, None, None, None)
    heads, dim = state.shape[1], state.shape[3]
    require_shape("mixed_qkv", mixed_qkv, None, 3 * heads * dim)
    batch = mixed_qkv.shape[0]
    require_shape("raw_gate", raw_gate, batch, heads * dim)
    require_shape("raw_beta", raw_beta, batch, heads)
    require_shape("state_indices", state_indices, batch)
    q, k, v = _split(mixed_qkv[:, None], heads, dim)
    tokens = Tokens(q, k, v, raw_gate.view(batch, 1, heads, dim), raw_beta[:, None])
    out = output_like(output, (batch, 1, heads, dim), mixed_qkv.dtype, mixed_qkv.device)
    _step(tokens, Pool(state, state, state_indices), out, (A_log, dt_bias, -5.0))
    return out


def _layer_result(its: dict) -> torch.Tensor:
    return its["x"].new_empty(its["raw_gate"].shape) if its["output"] is None else its["output"]


_WRITTEN = "conv_state", "state", "output"


@one_op(written=_WRITTEN, given={"output": _layer_result}, returned=lambda its: its["output"])
@named(conv_state_indices="state_indices", query_start_loc="cu_seqlens")
def fused_kda_decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state_indices: torch.Tensor,
    state: torch.Tensor,
    output_gate: torch.Tensor,
    norm_weight: torch.Tensor,
    lower_bound: float | None = -5.0,
    norm_eps: float = 1e-5,
    output: torch.Tensor | None = None,
    *,
    backend: str = "cute-dsl",
    state_indices_mode: str | None = None,
) -> torch.Tensor:
    """One token of a whole layer of Kimi Linear's kind: convolution, recurrence, gated RMSNorm; one launch.

    Slot 0 is null: for an index of 0 or less nothing is read or written, and the output is 0.

    Parameters
    ----------
    x : torch.Tensor
        [rows, 3 heads K]: q, k and v of all heads; bfloat16, float16 or float32.
    weight : torch.Tensor
        [3, width, heads K], width 2 to 4: the convolution of q, k and v, which SiLU follows.
    conv_state : torch.Tensor
        [slots, 3 heads K, width - 1], any strides; updated in place.
    raw_gate : torch.Tensor
        [1, rows, heads, K].
    raw_beta : torch.Tensor
        [1, rows, heads], of which the sigmoid is taken.
    A_log, dt_bias, state
        As in `packed_kda_decode`.
    state_indices : torch.Tensor
        [rows], int32 or int64.
    output_gate : torch.Tensor
        [rows, heads, K] or [1, rows, heads, K]: the norm's result is multiplied by its sigmoid.
    norm_weight : torch.Tensor
        [K].
    lower_bound : float, optional
        The decay is exp(lower_bound sigmoid(exp(A_log) (raw_gate + dt_bias))); None:
        exp(-exp(A_log) softplus(raw_gate + dt_bias)).
    norm_eps : float
        Added to the mean square.
    output : torch.Tensor, optional
        [1, rows, heads, K]; receives the result.
    backend : str
        "auto", "cute-dsl", "cake" (all of which are ours), "portable" or "reference".
    state_indices_mode : str, optional
        What upstream may assume of indices: "positive_unique", "unique_or_null" or "repeated_positive". No effect here.

    Returns
    -------
    torch.Tensor
        `output`, or a new tensor in the dtype of x.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, weight, gate = torch.randn(2, 3 * 4 * 64), torch.randn(3, 4, 4 * 64), torch.randn(1, 2, 4, 64)
    >>> conv, state, slots = torch.zeros(3, 3 * 4 * 64, 3), torch.zeros(3, 4, 64, 64), torch.tensor([1, 2])
    >>> out = flashinfer.fused_kda_decode(x, weight, conv, gate, gate[..., 0], torch.zeros(4),
    ...     torch.zeros(4 * 64), slots, state, gate[0], torch.ones(64))
    >>> out.shape
    torch.Size([1, 2, 4, 64])
    """
    require(state_indices_mode in _MODES, "state_indices_mode", repr(state_indices_mode), ", ".join(map(repr, _MODES)))
    require(x.dim() == 2, "x", f"shape {tuple(x.shape)}", "[rows, channels]")
    require_shape("state_indices", state_indices, len(x))
    tables = state_indices, None, None
    layer = weight, conv_state, raw_gate, raw_beta, state, output_gate
    variant = variant_for(backend, "cute-dsl", "cake")
    return _layer(
        x, layer, (A_log, dt_bias, lower_bound), Norm(output_gate, norm_weight, norm_eps), tables, output, variant
    )


@one_op(written=_WRITTEN, given={"output": _layer_result}, returned=lambda its: its["output"])
@named(conv_state_indices="state_indices", cu_seqlens="query_start_loc", g="raw_gate", beta="raw_beta")
def packed_fused_kda_decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state_indices: torch.Tensor,
    state: torch.Tensor,
    output_gate: torch.Tensor,
    norm_weight: torch.Tensor,
    lower_bound: float | None = -5.0,
    norm_eps: float = 1e-5,
    output: torch.Tensor | None = None,
    *,
    query_start_loc: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    t1_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fused_kda_decode` of packed sequences of up to T tokens, with the state after each token.

    Parameters
    ----------
    x, weight, raw_gate, raw_beta, output_gate, norm_weight, lower_bound, norm_eps, output
        As in `fused_kda_decode`.
    conv_state : torch.Tensor
        [slots, 3 heads K, width - 2 + T]: of each sequence a window of inputs in slot state_indices[:, 0], read from
        column num_accepted_tokens - 1 on.
    A_log, dt_bias, state
        As in `packed_kda_decode`.
    state_indices : torch.Tensor
        [sequences, T], int32 or int64: a sequence begins with the state in column num_accepted_tokens - 1; the state
        after token t goes to the slot in column t.
    query_start_loc : torch.Tensor
        [sequences + 1]: sequence i is the rows query_start_loc[i] to query_start_loc[i + 1]. Rows of no sequence have
        output 0.
    num_accepted_tokens : torch.Tensor
        [sequences], 1 to T.
    t1_state_indices : torch.Tensor, optional
        [rows], T = 1: the slot of each row; then query_start_loc is not read.

    Returns
    -------
    torch.Tensor
        As of `fused_kda_decode`, a row for each of x.

    Raises
    ------
    ValueError
        As `fused_kda_decode` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, weight, gate = torch.randn(2, 3 * 4 * 64), torch.randn(3, 4, 4 * 64), torch.randn(1, 2, 4, 64)
    >>> conv, state, slots = torch.zeros(3, 3 * 4 * 64, 3), torch.zeros(3, 4, 64, 64), torch.tensor([[1], [2]])
    >>> out = flashinfer.packed_fused_kda_decode(x, weight, conv, gate, gate[..., 0], torch.zeros(4),
    ...     torch.zeros(4 * 64), slots, state, gate[0], torch.ones(64), query_start_loc=torch.arange(3),
    ...     num_accepted_tokens=torch.ones(2).int())
    >>> out.shape
    torch.Size([1, 2, 4, 64])
    """
    require(x.dim() == 2, "x", f"shape {tuple(x.shape)}", "[rows, channels]")
    require_shape("state_indices", state_indices, None, None)
    n, longest = state_indices.shape
    require_shape("query_start_loc", query_start_loc, n + 1)
    require_shape("num_accepted_tokens", num_accepted_tokens, n)
    require(t1_state_indices is None or longest == 1, "t1_state_indices", "a tensor", f"None for T = {longest}")
    require_shape("t1_state_indices", t1_state_indices, x.shape[0])
    tables = state_indices, query_start_loc, num_accepted_tokens
    if t1_state_indices is not None:
        tables = t1_state_indices, None, None
    layer = weight, conv_state, raw_gate, raw_beta, state, output_gate
    return _layer(
        x, layer, (A_log, dt_bias, lower_bound), Norm(output_gate, norm_weight, norm_eps), tables, output, "auto"
    )


def _layer(x, layer: tuple, raw: tuple, norm: Norm, tables: tuple, output, backend: str) -> torch.Tensor:
    """Convolution, then recurrence and norm; rows are sequences, or packed by the second table."""
    weight, conv_state, raw_gate, raw_beta, state, output_gate = layer
    slots, offsets, accepted = tables
    require_shape("state", state, None, None, None, None)
    heads, dim = state.shape[1], state.shape[3]
    rows, channels = x.shape[0], 3 * heads * dim
    require_shape("x", x, None, channels)
    require_shape("weight", weight, 3, None, heads * dim)
    longest = 1 if offsets is None else slots.shape[1]
    require_shape("conv_state", conv_state, state.shape[0], channels, weight.shape[1] - 2 + longest)
    require_shape("raw_gate", raw_gate, 1, rows, heads, dim)
    require_shape("raw_beta", raw_beta, 1, rows, heads)
    output_gate = output_gate[None] if output_gate.dim() == 3 else output_gate
    require_shape("output_gate", output_gate, 1, rows, heads, dim)
    require(output_gate.dtype == x.dtype, "output_gate", f"dtype {output_gate.dtype}", f"{x.dtype}, that of x")
    require_shape("norm_weight", norm.weight, dim)
    require(norm.eps >= 0, "norm_eps", norm.eps, "at least 0")
    out = output_like(output, (1, rows, heads, dim), x.dtype, x.device)
    require(2 <= weight.shape[1] <= 4, "weight", f"width {weight.shape[1]}", "a width of 2 to 4")
    given = {"x": x, "weight": weight, "conv_state": conv_state, "raw_gate": raw_gate, "raw_beta": raw_beta}
    for name, tensor in given.items():
        require_dtype(name, tensor, INPUTS)
    require_dtype("output", out, INPUTS)
    require_shape("state", state, None, heads, dim, dim, dtypes=STATES)
    require_dtype("state_indices", slots, INDICES)
    require_dtype("query_start_loc", offsets, INDICES)
    require_dtype("num_accepted_tokens", accepted, INDICES)
    A_log, dt_bias, lower_bound = raw
    gates_of(True, A_log, dt_bias, lower_bound, (heads, heads), dim)
    # All of it before the convolution writes its state.
    given |= dict(output_gate=output_gate, norm_weight=norm.weight, A_log=A_log, dt_bias=dt_bias)
    given |= dict(state_indices=slots, query_start_loc=offsets, num_accepted_tokens=accepted)
    check_apart([("conv_state", given.pop("conv_state")), ("state", state), ("output", out)], given.items())
    apart = out.data_ptr() != raw_gate.data_ptr() or not out.numel()
    require(apart, "output", "the memory of raw_gate", "memory of its own")
    check_values("state_indices", slots.clamp(min=0), 0, len(state) - 1)
    check_longest("query_start_loc", offsets, longest)
    if offsets is None:
        one = LayerTokens(x, weight, rows_of(raw_gate[0]), raw_beta[0])
        _one_token(one, LayerStates(conv_state, state, slots, 0), out, raw, norm._replace(gate=output_gate[0]), backend)
        return out
    mixed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    wide = [x[None], mixed[None], raw_gate, raw_beta, output_gate, out]
    pool = Pool(state, state, slots, accepted, rows=slots, null=0)
    call = Call(wide[0], weight, None, conv_state, wide[1], slots[:, 0], accepted, None, offsets, 0)
    run_conv(call, "silu", rolling=longest > 1, long=False, backend=backend)
    q, k, v = _split(wide[1], heads, dim)
    tokens = Tokens(q, k, v, wide[2], wide[3], offsets)
    _step(tokens, pool, wide[5], raw, norm._replace(gate=wide[4]), backend)
    return out


def _one_token(tokens: LayerTokens, states: LayerStates, out, raw: tuple, norm: Norm, backend: str) -> None:
    """One token of each sequence, in one launch."""
    x, weight, gate, beta = tokens
    rows, heads, dim = gate.shape
    A_log, dt_bias, lower_bound = raw
    kind, gates = gates_of(True, A_log, dt_bias, lower_bound, (heads, heads), dim)
    given = {"x": x, "weight": weight, "conv_state": states.conv, "raw_gate": gate, "raw_beta": beta, "output": out}
    given |= {"state": states.state, "state_indices": states.slots, "A_log": gates.a_log, "dt_bias": gates.bias}
    device = same_device(**given, output_gate=norm.gate, norm_weight=norm.weight)
    gates = gates._replace(
        a_log=present("A_log", gates.a_log).float().contiguous(),
        bias=None if gates.bias is None else gates.bias.contiguous(),
    )
    norm = norm._replace(gate=rows_of(norm.gate), weight=norm.weight.float().contiguous())
    layout = state_layout(states.state)
    problem = room.Layer(
        dim=dim,
        width=weight.shape[1],
        dtype=dtype_name(x.dtype),
        out_dtype=dtype_name(out.dtype),
        weight_dtype=dtype_name(weight.dtype),
        conv_dtype=dtype_name(states.conv.dtype),
        gate_dtype=dtype_name(gate.dtype),
        beta_dtype=dtype_name(beta.dtype),
        state_dtype=dtype_name(states.state.dtype),
        bias_dtype="" if gates.bias is None else dtype_name(gates.bias.dtype),
        gate=kind,
        layout=layout,
        index=dtype_name(states.slots.dtype),
        aligned=bool(layout) and whole_rows(states.state),
    )
    direct = out.stride(-1) == 1 or dim == 1
    result = out[0] if direct else torch.empty(rows, heads, dim, dtype=out.dtype, device=device)
    if out.numel():
        states = states._replace(slots=states.slots.contiguous())
        room.delta_layer(problem, device, backend).run(tokens, gates, states, result, dim**-0.5, norm)
        if not direct:
            out[0] = result


def _split(mixed: torch.Tensor, heads: int, dim: int) -> list:
    """q, k and v [rows, tokens, heads, K] of rows of all three."""
    return [x.unflatten(2, (heads, dim)) for x in mixed.split(heads * dim, 2)]


def _step(tokens: Tokens, pool: Pool, out, raw: tuple, norm: Norm | None = None, backend: str = "auto") -> None:
    q, k, v, g, beta, _ = tokens
    check_inputs(q, k, v, g, beta)
    require_shape("state", pool.source, None, v.shape[2], v.shape[3], k.shape[3], dtypes=STATES)
    require_dtype("state_indices", pool.read, INDICES)
    require_dtype("output", out, INPUTS)
    A_log, dt_bias, lower_bound = raw
    kind, gates = gates_of(True, A_log, dt_bias, lower_bound, (k.shape[2], v.shape[2]), k.shape[3])
    run_step(tokens, gates, pool, out, k.shape[3] ** -0.5, gate=kind, beta="logit", normalize=True,
             final=pool.rows is None, backend=backend, norm=norm, slots_name="state_indices")  # fmt: skip
