"""OpenAI's triton_kernels: experts with MXFP4 weights."""

import peer_triton_kernels as peer
import torch


def experts(given: dict) -> dict:
    """`routed before` has the sort by experts outside of its time; `with routing` chooses experts and sorts."""
    up = peer.triton_kernels_pack_mxfp4(gates_between(given["up"]), gates_between(given["of_up"]))
    down = peer.triton_kernels_pack_mxfp4(given["down"], given["of_down"])
    biases = gates_between(given["up_bias"]).float(), given["down_bias"].float()
    top_k, logits = given["ids"].shape[1], logits_of(given["ids"], given["s"], len(given["up"]))
    routed = peer.routing(logits, top_k)
    return {
        "routed before": lambda: peer.triton_kernels_experts(given["x"], *routed, up, down, *biases),
        "with routing": lambda: peer.triton_kernels_moe(given["x"], logits, up, down, top_k, *biases),
    }


def gates_between(rows: torch.Tensor) -> torch.Tensor:
    """Rows of up-projection, then of gate -> a row of gate, its row of up-projection, the next of gate, ..."""
    up, gate = rows.chunk(2, 1)
    return torch.stack([gate, up], 2).flatten(1, 2)


def logits_of(ids: torch.Tensor, s: torch.Tensor, experts: int) -> torch.Tensor:
    """Logits of which the chosen experts are the largest, and whose softmax over these is `s`."""
    logits = torch.full((len(ids), experts), -60.0, device=ids.device)
    return logits.scatter_(1, ids.long(), s.log())


PROBLEMS = {"experts mxfp4": experts}
