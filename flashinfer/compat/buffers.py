"""Scratch memory that callers of upstream take by name. Nothing here reads or writes it."""

from __future__ import annotations

import torch

from flashinfer.utils.arithmetic import get_trtllm_gen_multi_ctas_kv_counter_bytes

# By name and device; and those that grew too small, whose memory captured graphs may still name.
_buffers: dict[tuple[str, torch.device], torch.Tensor] = {}
_outgrown: list[torch.Tensor] = []


def _get_cache_buf(name: str, num_bytes: int, device: torch.device, zero_init: bool = False) -> torch.Tensor:
    """Bytes that all callers of a name share: as many as asked for, or more. `zero_init` : zeros in new ones."""
    buffer = _buffers.get((name, device))
    if buffer is None or len(buffer) < num_bytes:
        if buffer is not None:
            _outgrown.append(buffer)
        allocate = torch.zeros if zero_init else torch.empty
        buffer = _buffers[name, device] = allocate(num_bytes, dtype=torch.uint8, device=device)
    return buffer


def _get_trtllm_gen_multi_ctas_kv_counter_buffer(
    batch_size: int, num_qo_heads: int, sm_count: int, device: torch.device
) -> torch.Tensor:
    """New zeros of `get_trtllm_gen_multi_ctas_kv_counter_bytes`, a `multi_ctas_kv_counter_buffer`.

    Nothing here calls it: engines that put a function of theirs in its place have no effect on attention, which keeps
    no counters between launches.
    """
    nbytes = get_trtllm_gen_multi_ctas_kv_counter_bytes(batch_size, num_qo_heads, sm_count)
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)
