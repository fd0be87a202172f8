"""What the public functions of the delta rule share: checks of their arguments, and their Problem."""

from __future__ import annotations

import math

import torch

from flashinfer._core.checks import (
    check_apart,
    check_indptr,
    check_values,
    dtype_name,
    present,
    require,
    rows_of,
    same_device,
)
from flashinfer._core.sizes import power_of_two
from flashinfer.ops.recurrent import delta as room
from flashinfer.ops.recurrent.delta.operands import Gates, Kept, Norm, Pool, Tokens
from flashinfer.ops.recurrent.layouts import dense_rows, state_layout, whole_rows

INPUTS = (torch.bfloat16, torch.float16, torch.float32)
STATES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
INDICES = (torch.int32, torch.int64)
# Upstream's names promise a result, and any variant of ours gives it; our own names pin a variant.
_OURS = ("portable", "reference", "sm90")

MOST_TREE_TOKENS = 64


def variant_for(backend: str | None, *upstream: str) -> str:
    """The backend for an Op, of a name that upstream allows in this place or of our own."""
    allowed = ("auto", *upstream, *_OURS)
    require(backend is None or backend in allowed, "backend", repr(backend), ", ".join(allowed))
    return backend if backend in _OURS else "auto"


def require_dtype(name: str, x: torch.Tensor | None, allowed: tuple) -> None:
    if x is not None:
        require(x.dtype in allowed, name, f"dtype {x.dtype}", ", ".join(map(str, allowed)))


def require_shape(name: str, x: torch.Tensor | None, *shape: int | None, dtypes: tuple = ()) -> None:
    """Shape equals `shape`, in which None is any size; and the dtype is one of `dtypes`, if any are given."""
    if x is None:
        return
    fits = x.dim() == len(shape) and all(want is None or want == size for want, size in zip(shape, x.shape))
    wanted = ", ".join("any" if want is None else str(want) for want in shape)
    require(fits, name, f"shape {tuple(x.shape)}", f"[{wanted}]")
    if dtypes:
        require_dtype(name, x, dtypes)


def require_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dim: int) -> int:
    """The heads of the state: one of the counts is the largest, and a multiple of the others."""
    counts = {"q": q.shape[dim], "k": k.shape[dim], "v": v.shape[dim]}
    heads = max(counts.values())
    for name, count in counts.items():
        require(
            count > 0 and heads % count == 0, name, f"{count} heads", f"a divisor of {heads}, the most heads of all"
        )
    require(
        counts["k"] in (counts["q"], counts["v"]),
        "k",
        f"{counts['k']} heads",
        f"the {counts['q']} of q or the {counts['v']} of v",
    )
    return heads


def require_tokens(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dims: str) -> int:
    """The heads of the state. q, k and v have one dtype and the dimensions `dims`, the same up to their heads."""
    count = dims.count(",") + 1
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(x.dim() == count, name, f"shape {tuple(x.shape)}", f"[{dims}]")
        require_dtype(name, x, INPUTS)
        require(x.dtype == q.dtype, name, f"dtype {x.dtype}", f"{q.dtype}, that of q")
    heads = require_heads(q, k, v, count - 2)
    require_shape("k", k, *q.shape[:-2], None, q.shape[-1])
    require_shape("v", v, *q.shape[:-2], None, None)
    return heads


def require_offsets(cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Offsets of packed sequences, which are there, and say where the first begins."""
    cu_seqlens = present("cu_seqlens", cu_seqlens, "a tensor [sequences + 1]")
    require_shape("cu_seqlens", cu_seqlens, None, dtypes=INDICES)
    require(cu_seqlens.shape[0] > 0, "cu_seqlens", "shape (0,)", "[sequences + 1]")
    return cu_seqlens


def require_tree(parents: torch.Tensor | None, sequences: int, tokens: int) -> None:
    """Parents of a tree's tokens are [sequences, tokens] integers, and the tree fits into registers."""
    if parents is not None:
        require(tokens <= MOST_TREE_TOKENS, "parents", f"a tree of {tokens} tokens", f"{MOST_TREE_TOKENS} at most")
        require_shape("parents", parents, sequences, tokens, dtypes=INDICES)


def check_longest(name: str, offsets: torch.Tensor | None, most: int) -> None:
    """Refuse offsets on the host of a sequence with more than `most` tokens; those on a GPU are not waited for."""
    if offsets is not None and offsets.device.type == "cpu" and offsets.numel() > 1:
        longest = int(offsets.diff().max())
        require(longest <= most, name, f"a sequence of {longest} tokens", f"{most} at most, a slot for each")


def default_scale(scale: float | None, key_dim: int) -> float:
    return 1 / math.sqrt(key_dim) if scale is None else float(scale)


def scale_or_unset(scale: float | None, key_dim: int) -> float:
    """As upstream's prefill has it: 0 is no scale given."""
    return default_scale(scale or None, key_dim)


def output_like(output: torch.Tensor | None, shape: tuple, dtype: torch.dtype, device) -> torch.Tensor:
    if output is None:
        return torch.empty(shape, dtype=dtype, device=device)
    require_shape("output", output, *shape, dtypes=INPUTS)
    return output


# What errors call the tables of a pool.
_TABLES = {
    "read": "initial_state_indices", "accepted": "num_accepted_tokens", "write": "output_state_indices",
    "stop": "accepted_steps", "rows": "ssm_state_indices", "offsets": "cu_seqlens",
}  # fmt: skip


def check_tables(pool: Pool, tokens: Tokens, slots_name: str = "", state_name: str = "state") -> None:
    """Values of tables on the host: slots and offsets that are there. A table on a GPU is not waited for."""
    names = _TABLES | ({"read": slots_name} if slots_name else {})
    # Of one pool, what is read and what is written may be one tensor.
    for name, states in ((state_name, pool.state), ("intermediate_states_buffer", pool.each)):
        check_apart([(name, states)])
    if tokens.offsets is not None and tokens.offsets.device.type == "cpu":
        check_indptr(names["offsets"], tokens.offsets.numpy(), tokens.k.shape[1], "the tokens", sliced=True)
    for field, states in (("read", pool.source), ("write", pool.state), ("rows", pool.state)):
        table = getattr(pool, field)
        if table is not None and states is not None:
            require_dtype(names[field], table, INDICES)
            check_values(names[field], table.clamp(min=pool.null), pool.null, len(states) - 1)
    if pool.rows is not None:
        check_longest(names["offsets"], tokens.offsets, pool.rows.shape[1])


def _one_index_type(pool: Pool, tokens: Tokens):
    """All tables of slots, and the offsets, in one integer type."""
    tables = {name: getattr(pool, name) for name in ("read", "accepted", "write", "stop", "rows")} | {
        "offsets": tokens.offsets
    }
    given = {name: x for name, x in tables.items() if x is not None}
    for name, x in given.items():
        require_dtype(_TABLES[name], x, INDICES)
    dtype = torch.int64 if any(x.dtype == torch.int64 for x in given.values()) else torch.int32
    given = {name: x.to(dtype) for name, x in given.items()}
    # Tables of one entry a sequence are read one after another.
    for name in ("accepted", "write", "stop", "offsets"):
        if name in given:
            given[name] = given[name].contiguous()
    offsets = given.pop("offsets", None)
    return pool._replace(**given), tokens._replace(offsets=offsets), dtype


def run_step(
    tokens: Tokens,
    gates: Gates,
    pool: Pool,
    out: torch.Tensor,
    scale: float,
    *,
    gate: str,
    beta: str,
    normalize: bool,
    final: bool,
    backend: str = "auto",
    keep: str = "",
    kept: Kept | None = None,
    norm: Norm | None = None,
    parents: torch.Tensor | None = None,
    slots_name: str = "",
) -> None:
    """Run tokens one after another; the arguments are those of the room's operands, checked. slots_name : the caller's
    argument for the slots that are read."""
    check_tables(pool, tokens, slots_name)
    read = dict(
        q=tokens.q, k=tokens.k, v=tokens.v, gate=tokens.gate, beta=tokens.beta, A_log=gates.a_log, dt_bias=gates.bias,
        state=pool.source, indices=pool.read, output_state_indices=pool.write, accepted_steps=pool.stop,
        num_accepted_tokens=pool.accepted, ssm_state_indices=pool.rows, cu_seqlens=tokens.offsets, parents=parents,
    )  # fmt: skip
    of_state = "state" if pool.state is pool.source else "output_state"
    written = {of_state: pool.state, "output": out, "intermediate_states_buffer": pool.each}
    if kept is not None:
        written |= {"cache of values": kept.v, "cache of keys": kept.k}
    # Blocks of one head share its q, k and gate.
    check_apart(written.items(), read.items(), in_place=("v", "state"))
    device = same_device(**read | written)
    channels = tokens.gate is not None and tokens.gate.dim() == 4
    q, k, v = rows_of(tokens.q), rows_of(tokens.k), rows_of(tokens.v)
    tokens = tokens._replace(q=q, k=k, v=v, gate=rows_of(tokens.gate) if channels else tokens.gate)
    if gates.a_log is not None:
        gates = gates._replace(a_log=gates.a_log.float().contiguous())
    if gates.bias is not None:
        gates = gates._replace(bias=gates.bias.contiguous())
    norm = None if norm is None else norm._replace(gate=rows_of(norm.gate), weight=norm.weight.float().contiguous())
    pool, tokens, index = _one_index_type(pool, tokens)
    result = (
        out
        if out.stride(-1) == 1 or out.shape[-1] == 1
        else torch.empty_like(out, memory_format=torch.contiguous_format)
    )
    written = pool.state if final or pool.rows is not None else pool.each
    layout = state_layout(pool.source, pool.state)
    rows = (q, k, v, tokens.gate if channels else None, pool.source, pool.state, pool.each, result)
    problem = room.Step(
        key_dim=k.shape[3],
        value_dim=v.shape[3],
        dtype=dtype_name(k.dtype),
        out_dtype=dtype_name(out.dtype),
        gate=gate if tokens.gate is not None else "",
        channels=channels,
        gate_dtype=_name(tokens.gate),
        bias_dtype=_name(gates.bias),
        beta=beta if tokens.beta is not None else "",
        beta_dtype=_name(tokens.beta),
        source_dtype=_name(pool.source),
        state_dtype=_name(written),
        layout=layout,
        index=dtype_name(index),
        packed=tokens.offsets is not None,
        single=tokens.offsets is None and k.shape[1] == 1,
        normalize=bool(normalize),
        each="buffer" if pool.each is not None else "pool" if pool.rows is not None else "",
        final=final,
        keep=keep,
        kept_dtype="" if kept is None else dtype_name(kept.k.dtype),
        norm=norm is not None,
        tokens=0 if parents is None else power_of_two(parents.shape[1], 16),
        read=pool.read is not None,
        accepted=pool.accepted is not None,
        write=pool.write is not None,
        stop=pool.stop is not None,
        aligned=bool(layout) and whole_rows(*rows, None if norm is None else norm.gate),
        dense=dense_rows(pool.source, pool.state),
    )
    if not tokens.sequences:
        result.zero_()
    elif out.numel() or pool.state is not None:
        parents = None if parents is None else parents.to(torch.int32).contiguous()
        room.delta_step(problem, device, backend).run(tokens, gates, pool, result, scale, kept, norm, parents)
    if result is not out:
        out.copy_(result)


def _name(x: torch.Tensor | None) -> str:
    return "" if x is None else dtype_name(x.dtype)
