"""What prefills of state-space layers are given, checked: sizes, packed sequences, states on the way."""

from __future__ import annotations

import torch

from flashinfer._core.checks import check_both, check_indptr, require
from flashinfer.mamba._operands import check_tensor
from flashinfer.ops.recurrent import ssd as room

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INDEX = (torch.int32, torch.int64)


def require_dtype(name: str, value: torch.Tensor | None, dtype) -> None:
    if value is not None:
        require(value.dtype == dtype, name, value.dtype, f"{dtype}")


def check_chunk(size: int) -> None:
    require(size >= 64 and size % 64 == 0, "chunk_size", size, "a multiple of 64")


def check_inputs(x, dt, A, B, C, D, z, dt_bias, out) -> torch.Tensor:
    """The tensor that receives the result."""
    require(x.dim() == 4, "x", f"shape {tuple(x.shape)}", "[batch, tokens, heads, dim]")
    require(x.dtype in FLOATS, "x", x.dtype, ", ".join(map(str, FLOATS)))
    batch, length, heads, dim = x.shape
    check_tensor("dt", dt, (batch, length, heads), FLOATS)
    check_tensor("A", A, (heads,), FLOATS)
    groups = B.shape[2] if B.dim() == 4 else 0
    fits = groups > 0 and heads % groups == 0 and B.shape[3] > 0
    require(fits, "B", f"shape {tuple(B.shape)}", f"[{batch}, {length}, groups, dstate], groups a divisor of {heads}")
    for name, value in (("B", B), ("C", C)):
        check_tensor(name, value, (batch, length, groups, B.shape[3]), (x.dtype,))
    wide = D is not None and D.dim() == 2
    check_tensor("D", D, (heads, dim) if wide else (heads,), FLOATS)
    check_tensor("z", z, x.shape, (x.dtype,))
    check_tensor("dt_bias", dt_bias, (heads,), FLOATS)
    check_tensor("out", out, x.shape, (x.dtype,))
    return torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out


def check_sequences(tables: dict, x, initial_states, num_seqs, update: bool) -> int:
    """How many sequences there are."""
    seq_idx, offsets, slots = (tables[name] for name in ("seq_idx", "cu_seqlens", "state_indices"))
    packed = seq_idx is not None or offsets is not None
    require(offsets is None or seq_idx is None, "cu_seqlens", "a tensor", "None with seq_idx")
    require(not packed or x.shape[0] == 1, "x", f"{x.shape[0]} rows", "1 row with seq_idx or cu_seqlens")
    check_tensor("seq_idx", seq_idx, x.shape[:2], INDEX)
    for name in ("chunk_indices", "chunk_offsets", "seq_chunk_cumsum"):
        require(tables[name] is None or seq_idx is not None, name, "a tensor", "None without seq_idx")
    segments = tables["chunk_indices"], tables["chunk_offsets"]
    check_both("chunk_offsets", segments[1], "chunk_indices", segments[0])
    for name, value in zip(("chunk_indices", "chunk_offsets"), segments):
        check_tensor(name, value, segments[0].shape[:1] if value is not None else (), (torch.int32,))
    for name in ("cu_seqlens", "state_indices", "seq_chunk_cumsum"):
        value = tables[name]
        dtypes = (torch.int32,) if name == "seq_chunk_cumsum" else INDEX
        check_tensor(name, value, (value.numel(),) if value is not None else (), dtypes)
    require(slots is None or initial_states is not None, "initial_states", None, "a pool with state_indices")
    known = counts_of(tables, x, initial_states, num_seqs)
    require(bool(known), "num_seqs", None, "the count of sequences, which nothing else says")
    if offsets is not None and offsets.device.type == "cpu":
        check_indptr("cu_seqlens", offsets.numpy(), x.shape[1], "the tokens of x", sliced=True)
    n = next(iter(known.values()))
    for name, count in known.items():
        require(count == n and n >= 0, name, f"{count} sequences", f"{max(n, 0)}")
    if update:
        for name in ("seq_chunk_cumsum", "chunk_indices"):
            require(tables[name] is not None, name, None, "a tensor with update_seq_chunk_cumsum")
    return n


def counts_of(tables: dict, x, initial_states, num_seqs) -> dict[str, int]:
    """How many sequences there are, by the names of those that say it."""
    slots, packed = tables["state_indices"], tables["seq_idx"] is not None or tables["cu_seqlens"] is not None
    counts = {"x": None if packed else x.shape[0], "num_seqs": num_seqs}
    for name in ("cu_seqlens", "seq_chunk_cumsum"):
        counts[name] = None if tables[name] is None else len(tables[name]) - 1
    counts["state_indices"] = None if slots is None else len(slots)
    if slots is None and initial_states is not None and initial_states.dim():
        counts["initial_states"] = len(initial_states)
    return {name: count for name, count in counts.items() if count is not None}


def check_marks(tables: dict, states, n: int, dtype) -> room.Marks | None:
    tokens, slots = tables["checkpoint_token_indices"], tables["checkpoint_state_slots"]
    given = {"checkpoint_token_indices": tokens, "checkpoint_state_slots": slots, "checkpoint_states": states}
    if all(value is None for value in given.values()):
        return None
    for name, value in given.items():
        require(value is not None, name, None, "a tensor, as the other two of checkpoints")
    check_tensor("checkpoint_token_indices", tokens, (n, *tokens.shape[1:2]), (torch.int32,))
    check_tensor("checkpoint_state_slots", slots, tokens.shape, (torch.int32,))
    require(states.dtype == dtype, "checkpoint_states", states.dtype, f"{dtype}, that of initial_states")
    require(states.is_contiguous(), "checkpoint_states", f"strides {states.stride()}", "contiguous")
    both = [(t if t.dim() == 2 else t[:, None]).contiguous() for t in (tokens, slots)]
    return room.Marks(states, *both) if both[0].numel() else None


def offsets_of(tables: dict, n: int, chunk_size: int, update: bool) -> torch.Tensor:
    """The first token of each sequence, and the end of the last; also writes what is wanted of segments."""
    of_tokens = tables["seq_idx"][0].contiguous()
    numbers = torch.arange(n + 1, dtype=of_tokens.dtype, device=of_tokens.device)
    if update and tables["seq_chunk_cumsum"] is not None:
        begins = tables["chunk_indices"], tables["chunk_offsets"]
        tables["seq_chunk_cumsum"].copy_(first_segments(of_tokens, numbers, *begins, chunk_size))
    return torch.searchsorted(of_tokens, numbers, out_int32=True)


def first_segments(of_tokens, numbers, chunk_indices, chunk_offsets, chunk_size: int) -> torch.Tensor:
    """The first segment of each sequence, and their count."""
    begins = chunk_indices.long() * chunk_size + chunk_offsets
    return torch.searchsorted(of_tokens[begins.clamp(0, max(len(of_tokens) - 1, 0))], numbers)
