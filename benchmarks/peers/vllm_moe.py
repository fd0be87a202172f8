"""vLLM's Triton kernels for experts, with its tuned tables where it has one for the shape and the card."""

import peer_vllm_moe as peer
import torch


def experts(given: dict) -> dict:
    """The way says whether vLLM has a tuned table. It sorts, and quantises x, by itself."""
    fp8 = "of_up" in given
    up, down = gates_first(given["up"]), given["down"]
    scales = (gates_first(given["of_up"]), given["of_down"]) if fp8 else ()
    table = peer.vllm_moe_table(len(up), down.shape[2], fp8)

    def run():
        return peer.vllm_moe(given["x"], up, down, given["s"], given["ids"], *scales)

    return {"tuned" if table else "not tuned": run}


def gates_first(rows: torch.Tensor) -> torch.Tensor:
    """Rows of up-projection, then of gate -> the other way round."""
    return torch.cat(rows.chunk(2, 1)[::-1], 1)


PROBLEMS = {"experts bf16": experts, "experts fp8 blocks": experts}
