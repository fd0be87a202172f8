"""`replayssm_materialize`: states in the middle of a ring, of all layers in one launch, for prefix caches."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import dtype_name, require, same_device
from flashinfer.mamba._operands import check_seed
from flashinfer.ops.recurrent import ssm as room

__all__ = ["replayssm_materialize"]

_STATES = (torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.int8, torch.float8_e4m3fn)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@checked
def replayssm_materialize(
    state_ptrs: torch.Tensor,
    state_slot_strides: torch.Tensor,
    x_cache_ptrs: torch.Tensor,
    x_cache_slot_strides: torch.Tensor,
    B_cache_ptrs: torch.Tensor,
    B_cache_slot_strides: torch.Tensor,
    dt_cache_ptrs: torch.Tensor,
    dt_cache_slot_strides: torch.Tensor,
    A_ptrs: torch.Tensor,
    state_scale_ptrs: torch.Tensor,
    state_scale_slot_strides: torch.Tensor,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    ring_start: torch.Tensor,
    replay_prefix_len: torch.Tensor,
    active_request_indices: torch.Tensor,
    *,
    state_dtype: torch.dtype,
    input_dtype: torch.dtype,
    matrixA_dtype: torch.dtype,
    dim: int,
    dstate: int,
    num_heads: int,
    heads_per_group: int,
    max_window: int,
    ring_buffer_len: int,
    pad_slot_id: int = -1,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 0,
    dependency_inputs: list[torch.Tensor] | None = None,
    dependency_outputs: list[torch.Tensor] | None = None,
) -> None:
    """Write the state after the first tokens of a ring to another slot: of every layer, for the requests that count.

    State, ring and scales are those of `flashinfer.mamba.checkpointing_ssu`, each contiguous but from slot to slot.
    Sources and rings are not changed. No tokens is a copy of the bits.

    Parameters
    ----------
    state_ptrs, x_cache_ptrs, B_cache_ptrs, dt_cache_ptrs, A_ptrs, state_scale_ptrs : torch.Tensor
        int64 [layers]: addresses of each layer's tensors. A is [heads]. Scales are 0 for states that are no codes.
    state_slot_strides, x_cache_slot_strides, B_cache_slot_strides, dt_cache_slot_strides, state_scale_slot_strides : \
torch.Tensor
        int64 [layers]: elements from slot to slot.
    src_slots, dst_slots : torch.Tensor
        int32 [layers, batch]. A pair with `pad_slot_id`, or with a negative slot, is skipped.
    ring_start, replay_prefix_len : torch.Tensor
        int32 [batch]: the first row, below `ring_buffer_len`, and how many tokens, up to `max_window`.
    active_request_indices : torch.Tensor
        int32 [batch]: the requests that count, up to the first -1.
    state_dtype, input_dtype, matrixA_dtype : torch.dtype
        Of the states; of x and B; of A.
    dim, dstate, num_heads, heads_per_group, ring_buffer_len : int
        Sizes of the layers' tensors.
    max_window : int
        1 to 16.
    pad_slot_id : int
        See above.
    rand_seed : torch.Tensor, optional
        int64 of one element; needed with `philox_rounds`.
    philox_rounds : int
        Rounds of stochastic rounding; 0 rounds to nearest.
    dependency_inputs, dependency_outputs : list of torch.Tensor, optional
        The memory behind the addresses. Kept alive by the caller; not read here.

    Raises
    ------
    ValueError
        A shape, dtype, device or number other than the above. What addresses point to is not checked.
    """
    layers = room.Layers(
        state_ptrs, state_slot_strides, x_cache_ptrs, x_cache_slot_strides, B_cache_ptrs, B_cache_slot_strides,
        dt_cache_ptrs, dt_cache_slot_strides, A_ptrs, state_scale_ptrs, state_scale_slot_strides,
    )  # fmt: skip
    names = (
        "state_ptrs", "state_slot_strides", "x_cache_ptrs", "x_cache_slot_strides", "B_cache_ptrs",
        "B_cache_slot_strides", "dt_cache_ptrs", "dt_cache_slot_strides", "A_ptrs", "state_scale_ptrs",
        "state_scale_slot_strides",
    )  # fmt: skip
    count, batch = len(state_ptrs), len(ring_start)
    for name, table in zip(names, layers, strict=True):
        _check(name, table, (count,), torch.int64)
    for name, table in (("src_slots", src_slots), ("dst_slots", dst_slots)):
        _check(name, table, (count, batch), torch.int32)
    per_request = {"ring_start": ring_start, "replay_prefix_len": replay_prefix_len}
    per_request["active_request_indices"] = active_request_indices
    for name, table in per_request.items():
        _check(name, table, (batch,), torch.int32)
    for name, dtype, allowed in (("state_dtype", state_dtype, _STATES), ("input_dtype", input_dtype, _FLOATS),
                                 ("matrixA_dtype", matrixA_dtype, _FLOATS)):  # fmt: skip
        require(dtype in allowed, name, dtype, ", ".join(map(str, allowed)))
    sizes = {"dim": dim, "dstate": dstate, "num_heads": num_heads, "ring_buffer_len": ring_buffer_len}
    for name, value in sizes.items():
        require(value >= 1, name, value, "1 or more")
    divides = heads_per_group >= 1 and num_heads % heads_per_group == 0
    require(divides, "heads_per_group", heads_per_group, f"a divisor of {num_heads}")
    require(1 <= max_window <= 16, "max_window", max_window, "1 to 16")
    require(philox_rounds >= 0, "philox_rounds", philox_rounds, "0 or more")
    require((philox_rounds == 0) or rand_seed is not None, "rand_seed", None, "a tensor with philox_rounds")
    if philox_rounds:
        check_seed(rand_seed, philox_rounds)
    same_device(**dict(zip(names, layers, strict=True)), src_slots=src_slots, dst_slots=dst_slots, **per_request)
    if not count or not batch:
        return
    problem = room.Materialize(
        dim, dstate, dtype_name(input_dtype), dtype_name(matrixA_dtype), dtype_name(state_dtype), philox_rounds
    )
    tables = [table.contiguous() for table in (src_slots, dst_slots, *per_request.values())]
    requests = room.Requests(*tables, pad=pad_slot_id, seed=rand_seed)
    layers = room.Layers(*(table.contiguous() for table in layers))
    groups = num_heads // heads_per_group
    room.materialize(problem, state_ptrs.device).run(layers, requests, num_heads, groups, ring_buffer_len)


def _check(name: str, table: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    require(tuple(table.shape) == shape, name, tuple(table.shape), f"{shape}")
    require(table.dtype == dtype, name, table.dtype, str(dtype))
