"""What each rank of the expert-parallel tests does."""

import torch
import torch.distributed as dist

from flashinfer.fused_moe import QuantFormat
from flashinfer.moe_ep import BootstrapConfig, MoEEpCommParams, NVLinkOneSidedConfig, create_communication

HIDDEN, PER, TOP_K, MOST = 128, 2, 3, 9
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
# format, the global scale, and half the largest gap between neighbouring values over the block's largest, rounded up
FORMATS = {
    None: (None, 0.0),
    "BF16": (None, 0.0),
    "DeepSeekFp8": (None, 2.0**-4),
    "MXFP8": (None, 2.0**-4),
    "NVFP4": (64.0, 0.2),
    # A power of two may leave a block's largest value half of the range.
    "MXFP4": (None, 0.26),
    "FP8PerTensor": (0.125, 2.0**-4),
}


def weights_of(experts, device):
    same = torch.Generator().manual_seed(5)
    up = torch.randn(experts, 16, HIDDEN, generator=same) / HIDDEN**0.5
    down = torch.randn(experts, HIDDEN, 16, generator=same) / 4
    return up.to(device, torch.float64), down.to(device, torch.float64)


def inputs(rank, world, tokens, seed, device):
    mine = torch.Generator().manual_seed(100 * seed + rank)
    x = (3 * torch.randn(tokens, HIDDEN, generator=mine)).bfloat16()
    ids = torch.randint(-1, world * PER, (tokens, TOP_K), generator=mine)
    return x.to(device), ids.to(device), torch.rand(tokens, TOP_K, generator=mine).to(device)


def expert(e, x, up, down):
    return torch.relu(x @ up[e].T) @ down[e].T


def layer(x, ids, weights, up, down, own):
    """The plain layer in float64: for each row the weighted sum over its experts in `own`."""
    y = torch.zeros_like(x)
    for e in own:
        share = (weights.double() * (ids == e)).sum(1, keepdim=True)
        y += share * expert(e, x, up, down)
    return y


def decoded(name, codes, scale, global_scale):
    """Codes and scales as float64, by the formats' own definitions."""
    if scale is not None and name != "DeepSeekFp8":
        scale = scale.view(torch.uint8)
        scale = scale.view(torch.float8_e4m3fn).double() if name == "NVFP4" else 2.0 ** (scale.double() - 127)
    if name in ("NVFP4", "MXFP4"):
        values = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
        y = E2M1.to(codes.device)[values & 7].double() * torch.where(values > 7, -1.0, 1.0)
    else:
        y = codes.view(torch.float8_e4m3fn).double()
    if scale is not None:
        y = (y.unflatten(-1, (scale.shape[-1], -1)) * scale.double()[..., None]).flatten(-2)
    return y / global_scale if name == "NVFP4" else y * (global_scale or 1)


def layers(rank, world, device):
    """Every format, with uneven tokens, statistics, and both ways to size a call, against the plain layer."""
    up, down = weights_of(world * PER, device)
    own = range(rank * PER, (rank + 1) * PER)
    for seed, (name, (global_scale, bound)) in enumerate(FORMATS.items()):
        number_format = None if name is None else QuantFormat[name]
        params = MoEEpCommParams(world * PER, TOP_K, MOST, HIDDEN, dispatch_format=number_format)
        config = NVLinkOneSidedConfig(eplb_stats_num_experts=2)
        # As vLLM makes it: with the CPU as the default device.
        with torch.device("cpu"):
            ep = create_communication(BootstrapConfig(world, rank, process_group=dist.group.WORLD), params, config)
        counts = [(5, 0, 9, 1)[(r + seed) % 4] for r in range(world)]
        everyone = [inputs(r, world, counts[r], seed, device) for r in range(world)]
        x, ids, weights = everyone[rank]
        for tight in (True, False):
            most = max(counts) if tight and max(counts) else None
            stats = torch.tensor([seed, rank], dtype=torch.int32, device=device)
            given = (ids.int() if tight else ids), weights
            got = ep.dispatch(
                x, *given, max_tokens_per_rank=most, eplb_local_stats=stats, global_scale=global_scale
            )  # fmt: skip
            assert got.eplb_gathered_stats.tolist() == [[seed, r] for r in range(world)]
            assert got.tokens_per_rank == (most or MOST) and len(got.topk_ids) == world * got.tokens_per_rank
            real = (got.topk_ids != -1).any(1)
            if name in (None, "BF16"):
                rows = got.hidden_states.double()
            else:
                rows = decoded(name, got.hidden_states, got.hidden_states_scale, global_scale)
            check_rows(rows, real, got, rank, everyone, bound)
            rows = torch.where(real[:, None], rows, 0)
            out = layer(rows, got.topk_ids, torch.where(real[:, None], got.topk_weights, 0), up, down, own).bfloat16()
            if tight:
                out = ep.get_combine_input_buffer(torch.bfloat16).copy_(out)
            result = ep.combine(out)
            check_result(result, x, ids, weights, up, down, bound, world)
        ep.check()
        ep.destroy()
        ep.destroy()


def check_rows(rows, real, got, rank, everyone, bound):
    """Each rank's tokens that have an expert here, in order, near what was sent."""
    own = range(rank * PER, (rank + 1) * PER)
    for r, (x, ids, weights) in enumerate(everyone):
        block = slice(r * got.tokens_per_rank, (r + 1) * got.tokens_per_rank)
        sent = torch.stack([ids == e for e in own]).any(0).any(1)
        here = real[block]
        assert int(here.sum()) == int(sent.sum()) and bool(here[: int(sent.sum())].all())
        assert torch.equal(got.topk_ids[block][here].long(), ids[sent])
        assert torch.equal(got.topk_weights[block][here], weights[sent])
        truth = x[sent].double()
        error = (rows[block][here] - truth).abs()
        assert bool((error <= bound * truth.abs().amax(1, keepdim=True) if len(truth) else error <= 0).all())


def check_result(result, x, ids, weights, up, down, bound, world):
    truth = layer(x.double(), ids, weights, up, down, range(world * PER))
    assert result.shape == x.shape and result.dtype == torch.bfloat16
    if len(x):
        # Rows come back in bfloat16 from each rank.
        size = truth.norm() + 1e-30
        assert float((result.double() - truth).norm() / size) < bound + 2.0**-7
