"""The layer, spread over ranks and whole, and what a rank does with both."""

from __future__ import annotations

import torch
import torch.distributed as dist

from flashinfer.fused_moe import cutlass_fused_moe, fused_topk_deepseek
from flashinfer.moe_ep import BootstrapConfig, MoEEpCommParams, MoEEpCommunication, NVLinkOneSidedAlltoAll

HIDDEN, INTERMEDIATE, EXPERTS_OF_A_RANK, TOP_K = 256, 128, 4, 3
# What is in the place of an expert where a row is no token's: the experts' products pass it over.
NONE = -1


class Layer:
    """The weights of all experts, which every rank makes alike and keeps its slice of."""

    def __init__(self, ranks: int, device: torch.device, dtype: torch.dtype):
        experts = ranks * EXPERTS_OF_A_RANK
        same = torch.Generator().manual_seed(0)

        def randn(*shape):
            return (torch.randn(shape, generator=same) / shape[-1] ** 0.5).to(device, dtype)

        self.router, self.bias = randn(experts, HIDDEN), torch.zeros(experts, device=device)
        self.up_and_gate = randn(experts, 2 * INTERMEDIATE, HIDDEN)
        self.down = randn(experts, HIDDEN, INTERMEDIATE)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts of each token, and their weights; [tokens, top-k]."""
        ids = torch.empty(len(x), TOP_K, dtype=torch.int32, device=x.device)
        weights = torch.empty(len(x), TOP_K, device=x.device)
        fused_topk_deepseek(x @ self.router.T, self.bias, 1, 1, TOP_K, 1.0, weights, ids)
        return ids, weights

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """The layer on one rank."""
        ids, weights = self.route(x)
        return cutlass_fused_moe(x, ids, weights, self.up_and_gate, self.down, x.dtype, None)[0]


def spread(layer: Layer, ep: MoEEpCommunication, x: torch.Tensor, most: int) -> torch.Tensor:
    """The layer over all ranks. most : at least the tokens of any rank."""
    ids, weights = layer.route(x)
    # Rows, ids and weights travel together; a token goes to a rank once, however many of its experts are there.
    got = ep.dispatch(x, ids, weights, max_tokens_per_rank=most)
    mine = slice(ep.ep_rank * EXPERTS_OF_A_RANK, (ep.ep_rank + 1) * EXPERTS_OF_A_RANK)
    # The experts write where the combine reads.
    out = ep.get_combine_input_buffer(x.dtype)
    cutlass_fused_moe(
        got.hidden_states, got.topk_ids, got.topk_weights, layer.up_and_gate[mine], layer.down[mine], x.dtype, None,
        ep_size=ep.ep_size, ep_rank=ep.ep_rank, output=out,
    )  # fmt: skip
    return ep.combine(out)


def work(rank: int, ranks: int, tokens: int, device: torch.device) -> float:
    """What a rank does: three layers' worth of steps. The largest difference from the whole layer."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = Layer(ranks, device, dtype)
    params = MoEEpCommParams(ranks * EXPERTS_OF_A_RANK, TOP_K, tokens, HIDDEN, dtype, invalid_expert_id=NONE)
    ep = NVLinkOneSidedAlltoAll(BootstrapConfig(ranks, rank), params)
    own = torch.Generator().manual_seed(1 + rank)
    worst = 0.0
    for step in range(3):
        # Uneven on purpose, and none on the first rank in the last step.
        count = max(tokens - 3 * rank, 0) if step < 2 or rank else 0
        x = torch.randn(count, HIDDEN, generator=own).to(device, dtype)
        out, truth = spread(layer, ep, x, tokens), layer.whole(x)
        if count:
            worst = max(worst, float((out.float() - truth.float()).abs().max() / truth.float().abs().max()))
    ep.check()
    found = [worst] * ranks
    if ranks > 1:
        dist.all_gather_object(found, worst)
    if rank == 0:
        capability = ep.alltoall.capability
        means = f"{capability.transport} ({capability.means})"
        print(f"{ranks} ranks on {device.type}, through {means}: off by {max(found):.1e} of the largest value")
    return max(found)


def start(rank: int, ranks: int, tokens: int, folder: str) -> None:
    """A rank on the CPU, of processes that meet in a folder."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    worst = work(rank, ranks, tokens, torch.device("cpu"))
    dist.destroy_process_group()
    assert worst < 1e-5, worst
