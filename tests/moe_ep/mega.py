"""A layer of experts over ranks: its sizes and inputs, in float64 as it is defined, and with the roundings it cannot
avoid."""

import torch
import torch.distributed as dist
from torch.nn.functional import silu

from flashinfer.moe_ep import (
    Bf16MegaMoeConfig,
    BootstrapConfig,
    FleetParams,
    Fp8MegaMoeConfig,
    MegaConfig,
    MoEEpMegaLayer,
    MoEEpTensors,
    MoEWeightPack,
)
from flashinfer.ops.comm import symmetric
from flashinfer.testing import guard
from flashinfer.testing.compare import assert_bitwise, assert_close

HIDDEN, MIDDLE, PER, TOP_K, MOST = 256, 128, 3, 2, 9
E4M3 = torch.float8_e4m3fn
# Of rows before each product: what the inputs of these tests stay within.
STATIC = {"fc1_activation_dequant_scale": 6 / 448, "fc2_activation_dequant_scale": 8 / 448}
KINDS = ("bf16", "blockwise", "per_tensor")
CLAMP = 1.25


def kernel(kind, clamp=None, **sizes):
    sizes = {"intermediate_size": MIDDLE, "top_k": TOP_K, "gate_up_clamp": clamp} | sizes
    if kind == "bf16":
        return Bf16MegaMoeConfig(**sizes)
    return Fp8MegaMoeConfig(fp8_scale_mode=kind, **sizes, **(STATIC if kind == "per_tensor" else {}))


def weights_of(experts, device):
    """bfloat16 weights of all experts, the gate's rows first; some experts and columns far larger than others."""
    same = torch.Generator().manual_seed(5)
    w13 = torch.randn(experts, 2 * MIDDLE, HIDDEN, generator=same) / HIDDEN**0.5
    w2 = torch.randn(experts, HIDDEN, MIDDLE, generator=same) / MIDDLE**0.5
    w2 *= (1 + torch.arange(experts))[:, None, None]
    return w13.to(device, torch.bfloat16), w2.to(device, torch.bfloat16)


def inputs(rank, experts, tokens, seed, device):
    mine = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(tokens, HIDDEN, generator=mine).clamp(-5, 5).bfloat16()
    # Distinct experts, as routers give them; some ids are no expert's.
    ids = torch.rand(tokens, experts, generator=mine).argsort(1)[:, :TOP_K]
    ids = torch.where(torch.rand(ids.shape, generator=mine) < 0.1, experts + 7, ids)
    return x.to(device), ids.to(device), torch.rand(tokens, TOP_K, generator=mine).to(device)


def blocks(x, side):
    """e4m3 codes and float32 scales [.., rows / side, columns / 128] of the largest magnitude over 448."""
    rows, columns = x.shape[-2] // side, x.shape[-1] // 128
    tiles = x.float().reshape(*x.shape[:-2], rows, side, columns, 128)
    scale = (tiles.abs().amax((-3, -1)) / 448).clamp(min=2.0**-126)
    return (tiles / scale[..., None, :, None]).to(E4M3).reshape(x.shape), scale


def spread(scale, side):
    return scale.repeat_interleave(side, -2).repeat_interleave(128, -1)


def quantised(kind, w13, w2):
    """The weights as e4m3 with their scales, of which the layer is given the codes."""
    if kind == "blockwise":
        (c13, s13), (c2, s2) = blocks(w13, 128), blocks(w2, 128)
    else:
        s13, s2 = (w.float().abs().amax((1, 2)) / 448 for w in (w13, w2))
        c13, c2 = ((w.float() / s[:, None, None]).to(E4M3) for w, s in ((w13, s13), (w2, s2)))
    return MoEWeightPack(c13, c2, s13, s2)


def decoded(kind, pack, dtype):
    """The weights that a pack means."""
    if pack.w13_scale is None:
        return pack.w13.to(dtype), pack.w2.to(dtype)
    pairs = (pack.w13, pack.w13_scale), (pack.w2, pack.w2_scale)
    if kind == "blockwise":
        return [c.to(dtype) * spread(s, 128).to(dtype) for c, s in pairs]
    return [c.to(dtype) * s[:, None, None].to(dtype) for c, s in pairs]


def rounded_rows(kind, x, step):
    """float32 rows through their format, before product `step`."""
    if kind == "bf16":
        return x.bfloat16().float()
    x = x.bfloat16().float()
    if kind == "blockwise":
        codes, scale = blocks(x, 1)
        return codes.float() * spread(scale, 1)
    scale = list(STATIC.values())[step]
    return (x * (1 / scale)).clamp(-448, 448).to(E4M3).float() * scale


def one(x, gate, up, down, clamp, between=lambda x: x):
    gate, up = x @ gate.T, x @ up.T
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return between(silu(gate) * up) @ down.T


def truth(x, ids, weights, w13, w2, clamp):
    """The layer in float64, without a rounding."""
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for e in range(len(w13)):
        gate, up = w13[e].double().chunk(2)
        share = (weights.double() * (ids == e)).sum(1, keepdim=True)
        y += share * one(x.double(), gate, up, w2[e].double(), clamp)
    return y


def peer(kind, x, ids, weights, w13, w2, clamp):
    """The same in float32 with the roundings of rows, of an expert's result and of a rank's share."""
    rows, y = rounded_rows(kind, x, 0), torch.zeros(x.shape, device=x.device)
    for first in range(0, len(w13), PER):
        share = torch.zeros_like(y)
        for e in range(first, first + PER):
            gate, up = w13[e].float().chunk(2)
            out = one(rows, gate, up, w2[e].float(), clamp, lambda m: rounded_rows(kind, m, 1))
            share += (weights.float() * (ids == e)).sum(1, keepdim=True) * out.bfloat16().float()
        y += share.bfloat16().float()
    return y.bfloat16()


def check(kind, out, x, ids, weights, pack, clamp):
    """Against the layer of the weights that the pack means, or of what becomes of it for FP8 experts."""
    made = pack if kind == "bf16" or pack.w13_scale is not None else quantised(kind, pack.w13, pack.w2)
    exact = decoded(kind, made, torch.float64)
    same = peer(kind, x, ids, weights, *decoded(kind, made, torch.float32), clamp)
    # Rows pass e4m3, with its spacing of 1/8, before each of the two products.
    through = {} if kind == "bf16" else {"through": 2 * 2.0**-3}
    assert_close(out, same, truth(x, ids, weights, *exact, clamp), **through)


def cut(pack, rank):
    """The pack of a rank's experts."""
    mine = slice(rank * PER, (rank + 1) * PER)
    parts = (pack.w13, pack.w2, pack.w13_scale, pack.w2_scale)
    return MoEWeightPack(*(None if part is None else part[mine] for part in parts))


def layer_of(rank, world, kind, pack, clamp=None, group=None, **options):
    fleet = FleetParams(world * PER, MOST, HIDDEN)
    bootstrap = BootstrapConfig(world, rank, process_group=group)
    return MoEEpMegaLayer(bootstrap, fleet, cut(pack, rank), MegaConfig(kernel(kind, clamp), **options))


def layers(rank, world, device):
    """Every kind, uneven tokens and none at all, each way to call, against the whole layer in float64."""
    # A rank compiles experts between its exchanges, for longer than 10 s where a whole suite has the processors.
    symmetric.DEADLINE = 100.0
    with guard.watch():
        w13, w2 = weights_of(world * PER, device)
        for seed, kind in enumerate(KINDS):
            for pack in (MoEWeightPack(w13, w2), *([] if kind == "bf16" else [quantised(kind, w13, w2)])):
                every_call(rank, world, device, seed, kind, pack)


def every_call(rank, world, device, seed, kind, pack):
    clamp = CLAMP if seed % 2 else None
    layer = layer_of(rank, world, kind, pack, clamp, dist.group.WORLD)
    for step in range(2):
        counts = [(5, 0, MOST, 1)[(r + seed + step) % 4] for r in range(world)]
        x, ids, weights = inputs(rank, world * PER, counts[rank], 10 * seed + step, device)
        t = MoEEpTensors(x, ids.int() if step else ids, weights)
        out = layer(t)
        assert out.shape == x.shape and out.dtype == torch.bfloat16
        check(kind, out, x, ids, weights, pack, clamp)
        # Tight rows, and the result in the caller's memory.
        layer.stage_inputs(t, compile_tokens_per_rank=max(*counts, 1))
        x.fill_(torch.nan)
        given = torch.full((MOST + 1, HIDDEN), torch.nan, dtype=torch.bfloat16, device=device)
        for _ in range(2):
            again = layer.compute_staged(output=given)
            assert_bitwise(again, out)
            assert_bitwise(given[: len(out)], out)
            assert given[len(out) :].isnan().all()
    layer.destroy()
    layer.destroy()
