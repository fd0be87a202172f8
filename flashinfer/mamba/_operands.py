"""What the calls of state-space layers are given, checked, with all their dimensions."""

from __future__ import annotations

import torch

from flashinfer._core.checks import check_indptr, require, require_fit, rows_of
from flashinfer.ops.recurrent import ssm as room

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CODES = (torch.int16, torch.int8, torch.float8_e4m3fn)
_INDEX = (torch.int32, torch.int64)


def operands(state, x, dt, A, B, C, D, z, dt_bias, state_scale, out, cu_seqlens):
    """The result; and tokens, layer, pool and scales with all their dimensions."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    seen = result
    # One head, or one group, may be left out; a scale may keep the axis that it is for.
    state = state[:, None] if state.dim() == 3 else state
    A = A[None] if A.dim() == 2 else A
    D, dt_bias = (t[None] if t is not None and t.dim() == 1 else t for t in (D, dt_bias))
    if state_scale is not None and state_scale.dim() == 4 and state_scale.shape[3] == 1:
        state_scale = state_scale[..., 0]
    if state_scale is not None and state_scale.dim() == 2:
        state_scale = state_scale[:, None]
    if cu_seqlens is None:
        x, dt, seen, B, C = (t[:, None] if t.dim() == 2 else t for t in (x, dt, seen, B, C))
        z = z[:, None] if z is not None and z.dim() == 2 else z
    _check_state(state, state_scale)
    _, heads, dim, dstate = state.shape
    packed = cu_seqlens is not None
    wanted = "[tokens, heads, dim]" if packed else "[batch, heads, dim] or [batch, tokens, heads, dim]"
    fits = x.dim() == 3 if packed else x.dim() in (3, 4)
    require(fits and x.shape[-2:] == (heads, dim), "x", tuple(x.shape), f"{wanted} with {heads} heads of {dim}")
    check_tensor("x", x, x.shape, _FLOATS)
    check_tensor("dt", dt, x.shape, _FLOATS)
    check_tensor("z", z, x.shape, (x.dtype,))
    check_tensor("out", seen, x.shape, (x.dtype,))
    check_tensor("A", A, (heads, dim, dstate), _FLOATS)
    check_tensor("D", D, (heads, dim), _FLOATS)
    check_tensor("dt_bias", dt_bias, (heads, dim), _FLOATS)
    groups = B.shape[-2] if B.dim() == x.dim() else 0
    fits = groups > 0 and heads % groups == 0
    require(fits, "B", tuple(B.shape), f"[..., groups, {dstate}] as x, groups a divisor of {heads}")
    for name, value in (("B", B), ("C", C)):
        check_tensor(name, value, (*x.shape[:-2], groups, dstate), (x.dtype,))
    B, C = rows_of(B), rows_of(C)
    if packed:
        require_fit("cu_seqlens", cu_seqlens, cu_seqlens.dim() == 1 and len(cu_seqlens) >= 1, "[batch + 1]", *_INDEX)
    axis = 0 if packed else 1
    x, dt, B, C, seen = (t if t.dim() == 4 else t.unsqueeze(axis) for t in (x, dt, B, C, seen))
    z = z if z is None or z.dim() == 4 else z.unsqueeze(axis)
    return result, room.Tokens(x, dt, B, C, z, seen, cu_seqlens), room.Layer(A, D, dt_bias), state, state_scale


def check_tensor(name: str, value: torch.Tensor | None, shape, dtypes) -> None:
    """Refuse a tensor of another shape, or of none of the dtypes; None passes."""
    if value is not None:
        require(tuple(value.shape) == tuple(shape), name, f"shape {tuple(value.shape)}", f"{tuple(shape)}")
        require(value.dtype in dtypes, name, value.dtype, ", ".join(map(str, dtypes)))


def _check_state(state, scale) -> None:
    require(state.dim() == 4, "state", tuple(state.shape), "[slots, heads, dim, dstate]")
    require(state.dtype in _FLOATS + _CODES, "state", state.dtype, ", ".join(map(str, _FLOATS + _CODES)))
    require(state.stride(3) == 1 or state.shape[3] == 1, "state", f"strides {state.stride()}", "contiguous rows")
    _check_scale("state_scale", scale, state, state.shape[:3])


def _check_scale(name: str, scale, states, shape) -> None:
    coded = states.dtype in _CODES
    given = "None" if scale is None else "a tensor"
    allowed = f"a tensor with int16, int8 and float8_e4m3fn, None with others; states are {states.dtype}"
    require(coded == (scale is not None), name, given, allowed)
    check_tensor(name, scale, shape, (torch.float32,))


def check_tables(tables: dict, tokens: room.Tokens) -> torch.dtype:
    """The dtype of all tables: int64 if one of them has it."""
    n, found = tokens.sequences, {None if tokens.offsets is None else tokens.offsets.dtype}
    for name, table in tables.items():
        if table is None:
            continue
        both = name.endswith("batch_indices")
        # Upstream takes tables with more rows than sequences, but for that of buffers.
        rows = table.shape[0] if table.dim() else 0
        enough = rows == n if name == "intermediate_state_indices" else rows >= n
        fits = enough and table.dim() in ((1, 2) if both else (1,)) and (table.numel() or not n)
        require_fit(name, table, fits, f"[{n}] or [{n}, columns]" if both else f"[{n}]", *_INDEX)
        found.add(table.dtype)
    if tables.get("num_accepted_tokens") is not None:
        table = tables["state_batch_indices"]
        fits = table is not None and table.dim() == 2
        require(fits, "state_batch_indices", None if table is None else tuple(table.shape), f"[{n}, columns]")
    if tokens.offsets is not None and tokens.offsets.device.type == "cpu":
        check_indptr("cu_seqlens", tokens.offsets.numpy(), tokens.x.shape[1], "the tokens", sliced=True)
    return torch.int64 if torch.int64 in found else torch.int32


def check_each(each, scale, tokens: room.Tokens, state) -> None:
    steps = tokens.x.shape[1] if tokens.offsets is None else 1
    fits = each.dim() == 5 and each.shape[2:] == state.shape[1:] and each.shape[1] >= steps and each.is_contiguous()
    name = "intermediate_states_buffer"
    require(fits, name, tuple(each.shape), f"[buffers, {steps} or more, *{tuple(state.shape[1:])}], contiguous")
    require(each.dtype in _FLOATS + _CODES, name, each.dtype, ", ".join(map(str, _FLOATS + _CODES)))
    _check_scale("intermediate_state_scales", scale, each, each.shape[:4])
    if scale is not None:
        require(scale.is_contiguous(), "intermediate_state_scales", f"strides {scale.stride()}", "contiguous")


def check_seed(seed, rounds: int) -> None:
    if seed is not None:
        fits = seed.numel() == 1 and seed.dtype == torch.int64
        require(fits, "rand_seed", f"{seed.dtype} {tuple(seed.shape)}", "int64 of one element")
        require(rounds >= 1, "philox_rounds", rounds, "1 or more")


def is_tied(dt: torch.Tensor, layer: room.Layer) -> bool:
    """Whether dt, A and the bias repeat one value for a head."""
    axes = [(dt, 3), (layer.A, 1), (layer.A, 2), *([] if layer.bias is None else [(layer.bias, 1)])]
    return all(t.stride(axis) == 0 or t.shape[axis] == 1 for t, axis in axes)
