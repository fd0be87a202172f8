"""What the public prefills of the delta rule share: the problem that they are."""

from __future__ import annotations

import math

import torch

from flashinfer._core.checks import check_apart, dtype_name, require, rows_of, same_device
from flashinfer._delta import INDICES, STATES, check_tables, require_shape
from flashinfer.ops.recurrent import delta as room
from flashinfer.ops.recurrent.delta.operands import Gates, Marks, Pool, Tokens
from flashinfer.ops.recurrent.layouts import whole_rows

# The least bound of a bounded gate for which 16 tokens of decay stay within the range of the operands.
BOUND = -5.0


def check_states(tokens: Tokens, pool: Pool, names: tuple[str, str, str]) -> None:
    """Shapes and dtypes of the states, and of the table of slots, whose argument names are given."""
    n, shape = tokens.sequences, (tokens.heads, tokens.v.shape[3], tokens.k.shape[3])
    for name, x in zip(names, (pool.source, pool.state)):
        require_shape(name, x, None if pool.read is not None else n, *shape, dtypes=STATES)
    require_shape(names[2], pool.read, n, dtypes=INDICES)
    check_tables(pool, tokens, names[2], names[1])


def marks_of(
    tokens: Tokens, out, starts, every: int, *, smallest: int, first: bool = False, slots: torch.Tensor | None = None
) -> Marks | None:
    """States on the way, checked; None where none are asked for."""
    name = "checkpoint_every_n_tokens"
    require(every >= 0 and every % smallest == 0, name, every, f"0, or a multiple of {smallest}")
    for argument, x in (("state_checkpoints", out), ("checkpoint_cu_starts", starts)):
        require((x is not None) == (every > 0), argument, "None" if x is None else "a tensor",
                f"given if and only if {name} is positive")  # fmt: skip
    if not every:
        require(slots is None, "checkpoint_state_indices", "a tensor", f"None where {name} is 0")
        return None
    require_shape("state_checkpoints", out, None, tokens.heads, tokens.v.shape[3], tokens.k.shape[3], dtypes=STATES)
    require_shape("checkpoint_cu_starts", starts, tokens.sequences + 1, dtypes=INDICES)
    require_shape("checkpoint_state_indices", slots, None, dtypes=INDICES)
    return Marks(out, starts, every, first, slots)


def run_chunks(
    tokens: Tokens,
    gates: Gates,
    pool: Pool,
    out: torch.Tensor,
    scale: float,
    *,
    gate: str,
    beta: str,
    normalize: bool,
    backend: str = "auto",
    marks: Marks | None = None,
    write: torch.Tensor | None = None,
    segment: int = 0,
) -> None:
    """Run whole prompts; the arguments are those of the room's operands, shapes checked.

    segment : tokens of the parts of sequences that go in parallel, whole chunks; 0: each sequence in one go.
    """
    read = dict(q=tokens.q, k=tokens.k, v=tokens.v, g=tokens.gate, beta=tokens.beta, A_log=gates.a_log,
                dt_bias=gates.bias, initial_state=pool.source, state_indices=pool.read,
                cu_seqlens=tokens.offsets)  # fmt: skip
    written = {"output": out, "initial_state" if pool.state is pool.source else "output_state": pool.state}
    if marks is not None:
        read |= dict(checkpoint_cu_starts=marks.starts, checkpoint_state_indices=marks.slots)
        written |= dict(state_checkpoints=marks.out)
    check_apart(written.items(), read.items(), in_place=("initial_state",))
    device = same_device(**read | written)
    if not tokens.sequences:
        out.zero_()
        return
    channels = tokens.gate is not None and tokens.gate.dim() == 4
    q, k, v = rows_of(tokens.q), rows_of(tokens.k), rows_of(tokens.v)
    tokens = tokens._replace(q=q, k=k, v=v, gate=rows_of(tokens.gate) if channels else tokens.gate)
    if beta == "channels":
        tokens, write = tokens._replace(beta=rows_of(tokens.beta)), rows_of(write)
    a_log, bias = gates.a_log, gates.bias
    gates = gates._replace(a_log=None if a_log is None else a_log.float().contiguous(),
                           bias=None if bias is None else bias.contiguous())  # fmt: skip
    tables = [tokens.offsets, pool.read, *((marks.starts, marks.slots) if marks else ())]
    wide = any(x is not None and x.dtype == torch.int64 for x in tables)
    index = torch.int64 if wide else torch.int32

    def table(x):
        return None if x is None else x.to(index).contiguous()

    tokens, pool = tokens._replace(offsets=table(tokens.offsets)), pool._replace(read=table(pool.read))
    if marks is not None:
        marks = marks._replace(starts=table(marks.starts), slots=table(marks.slots))
    contiguous = out.stride(-1) == 1 or out.shape[-1] == 1
    result = out if contiguous else torch.empty(out.shape, dtype=out.dtype, device=device)

    def name(x):
        return "" if x is None else dtype_name(x.dtype)

    problem = room.Chunks(
        key_dim=k.shape[3],
        value_dim=v.shape[3],
        dtype=name(k),
        out_dtype=name(out),
        gate=gate if tokens.gate is not None else "",
        channels=channels,
        bounded=channels and gate == "bounded" and gates.lower >= BOUND,
        gate_dtype=name(tokens.gate),
        bias_dtype=name(gates.bias),
        beta=beta if tokens.beta is not None else "",
        beta_dtype=name(tokens.beta),
        source_dtype=name(pool.source),
        state_dtype=name(pool.state),
        index=dtype_name(index),
        packed=tokens.offsets is not None,
        normalize=bool(normalize),
        read=pool.read is not None,
        marks_dtype=name(marks.out) if marks else "",
        first_mark=bool(marks and marks.first),
        mark_slots=bool(marks and marks.slots is not None),
        stride=math.gcd(marks.every, room.CHUNK) if marks else room.CHUNK,
        write_dtype=name(write),
        segments=segment > 0,
        aligned=whole_rows(q, k, v, tokens.gate if channels else None, result),
    )
    room.delta_chunks(problem, device, backend).run(tokens, gates, pool, result, scale, marks, write, segment)
    if result is not out:
        out.copy_(result)
