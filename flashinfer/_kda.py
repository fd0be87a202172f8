"""What the functions of Kimi delta attention share: their gates, checks, and the two ways to run them."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require
from flashinfer._delta import INPUTS, default_scale, require_dtype, require_shape, require_tokens
from flashinfer._delta_prefill import check_states, marks_of, run_chunks
from flashinfer.ops.recurrent.delta.operands import Gates, Pool, Tokens

BACKENDS = ("cute-dsl", "cute-dsl-persistent", "tirx", "ptx", "cake", "small-bh", "cudnn")


def check_inputs(q, k, v, g, beta) -> None:
    """Shapes and dtypes of the inputs, [rows, tokens, heads, ...]."""
    heads = require_tokens(q, k, v, "batch, T, heads, head_dim")
    rows, tokens, _, key_dim = q.shape
    require(v.shape[2] == heads, "v", f"{v.shape[2]} heads", f"{heads}, or a multiple of those of q")
    require_shape("k", k, rows, tokens, q.shape[2], key_dim)
    require_shape("g", g, rows, tokens, heads, key_dim)
    require_shape("beta", beta, rows, tokens, heads)
    require_dtype("g", g, INPUTS)
    require_dtype("beta", beta, INPUTS)


def gates_of(raw_gate: bool, A_log, dt_bias, lower_bound, heads: tuple[int, int], key_dim: int) -> tuple[str, Gates]:
    """The kind of the gate, and its parameters. A_log and dt_bias are those of query heads, or of all heads."""
    if not raw_gate:
        require(lower_bound is None, "lower_bound", lower_bound, "None without use_gate_in_kernel")
        return "log", Gates()
    require(A_log is not None, "A_log", None, "a tensor with use_gate_in_kernel")
    require(A_log.numel() in heads, "A_log", f"shape {tuple(A_log.shape)}", f"{heads[0]} or {heads[1]} elements")
    require_dtype("A_log", A_log, INPUTS)
    require(lower_bound is None or lower_bound < 0, "lower_bound", lower_bound, "None, or less than 0")
    if dt_bias is not None:
        sizes = [count * key_dim for count in heads]
        require(
            dt_bias.numel() in sizes,
            "dt_bias",
            f"shape {tuple(dt_bias.shape)}",
            f"[heads, {key_dim}] or [heads * {key_dim}] of {heads[0]} or {heads[1]} heads",
        )
        require_dtype("dt_bias", dt_bias, INPUTS)
        dt_bias = dt_bias.reshape(-1, key_dim)
    kind = "softplus" if lower_bound is None else "bounded"
    return kind, Gates(A_log.reshape(-1), dt_bias, 0.0 if lower_bound is None else float(lower_bound))


def kda_chunks(
    q,
    k,
    v,
    g,
    beta,
    out,
    initial_state,
    final_state,
    *,
    A_log,
    dt_bias,
    lower_bound,
    raw_gate,
    beta_is_logit,
    normalize,
    scale,
    offsets,
    slots,
    backend,
    marks,
) -> torch.Tensor | None:
    """Whole prompts. marks : states on the way, their starts, their interval, and their slots. Returns the first."""
    check_inputs(q, k, v, g, beta)
    require_shape("output", out, *q.shape[:2], *v.shape[2:], dtypes=INPUTS)
    require(offsets is None or q.shape[0] == 1, "q", f"{q.shape[0]} rows", "1 with cu_seqlens")
    require_shape("cu_seqlens", offsets, None)
    tokens = Tokens(q, k, v, g, beta, offsets)
    kind, gates = gates_of(raw_gate, A_log, dt_bias, lower_bound, (q.shape[2], v.shape[2]), q.shape[3])
    pool = Pool(initial_state, final_state, slots)
    check_states(tokens, pool, ("initial_state", "final_state", "ssm_state_indices"))
    states, starts, every, mark_slots = marks
    first = mark_slots is None
    if every:
        starts = _starts(tokens, every, first) if starts is None else starts
        if states is None:
            like = torch.bfloat16 if initial_state is None else initial_state.dtype
            shape = int(starts[-1]), tokens.heads, v.shape[3], k.shape[3]
            states = torch.empty(shape, dtype=like, device=q.device)
    marked = marks_of(tokens, states, starts, every, smallest=16, first=first, slots=mark_slots)
    run_chunks(
        tokens,
        gates,
        pool,
        out,
        default_scale(scale, q.shape[3]),
        gate=kind,
        beta="logit" if beta_is_logit else "value",
        normalize=normalize,
        backend=backend,
        marks=marked,
    )
    return states


def _starts(tokens: Tokens, every: int, first: bool) -> torch.Tensor:
    """Where each sequence's states on the way begin: ceil(length / every) of them with the first one, else floor."""
    device = tokens.k.device
    if tokens.offsets is None:
        lengths = torch.full((tokens.sequences,), tokens.k.shape[1], dtype=torch.int64, device=device)
    else:
        lengths = tokens.offsets.to(torch.int64).diff()
    counts = (lengths + (every - 1 if first else 0)) // every
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
