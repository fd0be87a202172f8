"""Decoding streams without end: a token sees the first few tokens and a window of the latest (StreamingLLM, Xiao et
al., 2024). The library has no such mask; four lines add it.

Streams of different windows are one batch over a paged KV cache, in an ordinary decode wrapper. Plain torch computes
the last step again, from the keys that it sees.
"""

from __future__ import annotations

import argparse

import torch
import triton
import triton.language as tl

import flashinfer

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 8, 2, 64, 16


@triton.jit
def first_and_latest(logits, batch, q_pos, kv_pos, head, params):
    window = tl.load(params.windows + batch)
    return (kv_pos < params.first) | (kv_pos > q_pos - window)


STREAM = flashinfer.AttentionVariant(mask=first_and_latest, params={"first": "i32", "windows": "*i32"})


def decode(steps: int, windows: list[int], first: int, device: torch.device, dtype: torch.dtype):
    """Decode random tokens. Returns q [batch, heads, dim], k and v [batch, steps, kv_heads, dim], and the last out."""
    batch, pages = len(windows), -(-steps // PAGE_SIZE)
    cache = torch.zeros(batch * pages, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
    table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(1 << 20, dtype=torch.uint8, device=device), variant=STREAM
    )
    params = {"first": first, "windows": torch.tensor(windows, dtype=torch.int32, device=device)}
    for step in range(steps):
        page, slot = divmod(step, PAGE_SIZE)
        cache[table[:, page].to(device), :, slot] = torch.randn(
            batch, 2, NUM_KV_HEADS, HEAD_DIM, dtype=dtype, device=device
        )
        q = torch.randn(batch, NUM_QO_HEADS, HEAD_DIM, dtype=dtype, device=device)
        wrapper.plan(
            torch.arange(batch + 1) * (page + 1), table[:, : page + 1].flatten().to(device),
            torch.full((batch,), slot + 1), NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, q_data_type=dtype,
        )  # fmt: skip
        out = wrapper.run(q, cache, params=params)
    k, v = cache.view(batch, pages, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM).unbind(2)
    return q, k.flatten(1, 2)[:, :steps], v.flatten(1, 2)[:, :steps], out


def seen(steps: int, window: int, first: int) -> torch.Tensor:
    """The keys that the last of `steps` tokens sees."""
    keys = torch.arange(steps)
    return keys[(keys < first) | (keys > steps - 1 - window)]


def plain(q, k, v, keys: torch.Tensor) -> torch.Tensor:
    """The same of one stream, in float32, from its keys alone."""
    keys = keys.to(q.device)
    q = q.float().view(NUM_KV_HEADS, -1, HEAD_DIM)
    weights = torch.softmax(torch.einsum("hgd,khd->hgk", q, k[keys].float()) / HEAD_DIM**0.5, -1)
    return torch.einsum("hgk,khd->hgd", weights, v[keys].float()).flatten(0, 1)


def main(arguments: list[str] | None = None) -> float:
    """Run, print a line a stream, and return the largest difference from plain torch."""
    parser = argparse.ArgumentParser(prog="python -m examples.stream", description=str(__doc__).split(":")[0])
    parser.add_argument("--steps", type=int, default=200, help="tokens to decode")
    parser.add_argument("--first", type=int, default=4, help="tokens at the beginning that all others see")
    parser.add_argument("--windows", type=int, nargs="+", default=[16, 64, 128], help="one for each stream")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q, k, v, out = decode(given.steps, given.windows, given.first, device, dtype)
    worst = 0.0
    for i, window in enumerate(given.windows):
        keys = seen(given.steps, window, given.first)
        difference = float((out[i].float() - plain(q[i], k[i], v[i], keys)).abs().max())
        print(f"window {window:4}: {len(keys)} of {given.steps} keys seen, off by {difference:.1e}")
        worst = max(worst, difference)
    return worst


if __name__ == "__main__":
    main()
