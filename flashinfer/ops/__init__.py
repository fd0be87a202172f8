"""The rooms: one folder per kernel."""

from __future__ import annotations

from importlib import import_module

_ROOMS = (
    "norm",
    "rope",
    "activation",
    "page",
    "concat",
    "mhc",
    "recurrent.ssd",
    "recurrent.ssm",
    "quantize",
    "sampling",
    "topk",
    "moe.routing",
    "moe.hash_routing",
    "moe.experts",
    "moe.finalize",
    "moe.lora",
    "attention.prefill",
    "attention.decode",
    "attention.merge",
    "attention.mla",
    "attention.mqa_logits",
    "attention.block_scores",
    "gemm.dense",
    "gemm.blockscaled",
    "gemm.grouped",
    "recurrent.conv",
    "recurrent.delta",
    "comm.allreduce_fusion",
    "comm.alltoall",
)


def all_ops() -> dict:
    """Every Op of every room, by name. Imports the doors only, no kernel."""
    from flashinfer._core.dispatch import Op

    found = {}
    for room in _ROOMS:
        door = import_module(f"flashinfer.ops.{room}")
        found.update((value.name, value) for value in vars(door).values() if isinstance(value, Op))
    return found
