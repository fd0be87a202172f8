"""States after some of a ring's tokens in torch; layers' tensors are found by their addresses."""

import torch

from flashinfer._core.addresses import tensor_at
from flashinfer._core.checks import torch_dtype
from flashinfer._core.implementation import Implementation
from flashinfer.ops.recurrent.ssm import Pool
from flashinfer.ops.recurrent.ssm.reference import store, widened


def run(problem, config, layers, requests, heads, groups, length):
    """As `flashinfer/ops/recurrent/ssm/__init__.py` states it."""
    active = requests.active.tolist()
    active = active[: active.index(-1)] if -1 in active else active
    for layer in range(len(layers.state)):
        at = {name: int(table[layer]) for name, table in layers._asdict().items()}
        for b in active:
            source, goal = int(requests.source[layer, b]), int(requests.goal[layer, b])
            if requests.pad in (source, goal) or min(source, goal) < 0:
                continue
            _one(problem, at, requests, b, (source, goal), (heads, groups, length))


def _one(problem, at, requests, b, slots, sizes):
    (source, goal), (heads, groups, length) = slots, sizes
    dim, dstate, dtype, device = problem.dim, problem.dstate, torch_dtype(problem.dtype), requests.source.device

    def seen(name, dtype, slot, *shape):
        return tensor_at(at[name] + slot * at[f"{name}_stride"] * dtype.itemsize, dtype, shape, device)

    states = [seen("state", torch_dtype(problem.state_dtype), slot, 1, heads, dim, dstate) for slot in slots]
    scales = [seen("scale", torch.float32, slot, 1, heads, dim) if at["scale"] else None for slot in slots]
    count = int(requests.count[b])
    if not count:
        states[1].copy_(states[0])
        if at["scale"]:
            scales[1].copy_(scales[0])
        return
    h = widened(states[0], scales[0], 0)
    x, B = seen("x", dtype, source, heads, length, dim), seen("B", dtype, source, groups, length, dstate)
    dt = seen("dt", torch.float32, source, heads, length)
    A = tensor_at(at["A"], torch_dtype(problem.a_dtype), (heads,), device)
    for t in range(count):
        row = (int(requests.start[b]) + t) % length
        step = dt[:, row, None]
        wide = B[:, row].float().repeat_interleave(heads // groups, 0)[:, None]
        h = h * torch.exp(step * A.float()[:, None])[..., None] + (step * x[:, row].float())[..., None] * wide
    pool = Pool(states[1], scales[1], None, None, None, None, None, None, -1, requests.seed)
    store(problem, pool, states[1], scales[1], 0, h, goal)


IMPLEMENTATION = Implementation(run)
