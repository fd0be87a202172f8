"""The engine with its model split over ranks, beside the whole model on one: the same tokens, and the speed of both.

    torchrun --nproc-per-node 2 -m examples.serve.parallel     # a GPU a rank, or gloo without GPUs

Each rank has a share of the heads and of the feed-forward columns, and the sums over ranks are flashinfer's all-reduce.
"""

import argparse
import os
import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from flashinfer import comm

from .engine import Engine, Request
from .model import Config


def shard(config: Config, weights: dict, rank: int, ranks: int) -> tuple[Config, dict]:
    """A rank's share of a model: heads and feed-forward columns. Ranks that share a key head have it each."""
    c = config
    if c.num_qo_heads % ranks or c.num_kv_heads % ranks and ranks % c.num_kv_heads:
        raise ValueError(f"ranks: got {ranks}; allowed: divisors of {c.num_qo_heads} heads that share key heads evenly")
    qo, kv = c.num_qo_heads // ranks, max(c.num_kv_heads // ranks, 1)
    first = rank * c.num_kv_heads // ranks

    def of_layer(layer: dict) -> dict:
        heads = layer["attn_qkv"].unflatten(0, (-1, c.head_dim))
        q, k, v = heads.split([c.num_qo_heads, c.num_kv_heads, c.num_kv_heads])
        mine = [q[rank * qo : (rank + 1) * qo], k[first : first + kv], v[first : first + kv]]
        gate_up = layer["ffn_gate_up"].unflatten(0, (2, ranks, -1))
        return layer | {
            "attn_qkv": torch.cat(mine).flatten(0, 1),
            "attn_output": layer["attn_output"].chunk(ranks, 1)[rank].contiguous(),
            "ffn_gate_up": gate_up[:, rank].flatten(0, 1).contiguous(),
            "ffn_down": layer["ffn_down"].chunk(ranks, 1)[rank].contiguous(),
        }

    return replace(c, num_qo_heads=qo, num_kv_heads=kv), weights | {"layers": list(map(of_layer, weights["layers"]))}


def serve_both(rank: int, ranks: int, config: Config, weights: dict, prompts, new_tokens: int, chunk: int) -> dict:
    """Serve greedily with the split model, and on rank 0 with the whole one. Every rank makes the same calls."""
    like = weights["token_embd"]
    longest = max(map(len, prompts)) + new_tokens
    sizes = sum(-(-(len(prompt) + new_tokens) // 16) for prompt in prompts), 16, longest, chunk, -1
    workspace = comm.create_allreduce_fusion_workspace(
        world_size=ranks, rank=rank, max_token_num=chunk, hidden_dim=config.hidden, dtype=like.dtype,
        group=dist.group.WORLD if ranks > 1 else None,
    )  # fmt: skip

    def reduce(x: torch.Tensor) -> torch.Tensor:
        return comm.allreduce_fusion(x, workspace, comm.AllReduceFusionPattern.kAllReduce, output=x)

    greedy = partial(torch.argmax, dim=-1)
    outputs, speeds = {}, {}
    for name in ("split", "whole")[: 2 if rank == 0 else 1]:
        shares = shard(config, weights, rank, ranks) if name == "split" else (config, weights)
        engine = Engine(*shares, *sizes, greedy)
        if name == "split":
            engine.model.reduce = reduce
        requests = [Request(prompt, new_tokens, arrival) for arrival, prompt in enumerate(prompts)]
        start = time.perf_counter()
        engine.serve(requests)
        outputs[name] = [request.output for request in requests]
        speeds[name] = sum(map(len, outputs[name])) / (time.perf_counter() - start)
    workspace.check()
    return {"outputs": outputs, "tokens/s": speeds, "how": workspace.explain()}


def main(arguments=None) -> int:
    from . import weights
    from .prompts import demo_prompts

    parser = argparse.ArgumentParser(prog="python -m examples.serve.parallel", description=str(__doc__).split(":")[0])
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    given = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    path = weights.gguf_file()
    tokenizer = weights.load_tokenizer(path)
    prompts = [weights.encode(tokenizer, prompt) for prompt in demo_prompts(given.requests)]
    # In float32, for sums of other shares round otherwise.
    tensors = weights.load_weights(path, device, torch.float32)
    found = serve_both(rank, ranks, Config(), tensors, prompts, given.max_new_tokens, 256)
    same = True
    if rank == 0:
        same = found["outputs"]["split"] == found["outputs"]["whole"]
        speeds = ", ".join(f"{name} {speed:.1f} tokens/s" for name, speed in found["tokens/s"].items())
        print(f"{ranks} ranks, {found['how']}: {'the same' if same else 'other'} tokens; {speeds}")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
