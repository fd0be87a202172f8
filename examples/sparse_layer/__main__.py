"""One layer of sparse attention as DeepSeek-V3.2 has it, from hidden states to output: prefill, decode, verification.

An indexer scores every key of a request in FP8, each query keeps the top_k of them, and latent attention reads those
alone. The same layer in plain torch computes all logits in float64, from latents that are projected up to heads.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

import flashinfer
from flashinfer.dense_mqa import fp8_mqa_logits
from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Sizes:
    """Of the layer; DeepSeek-V3.2's in comments."""

    hidden: int = 128  # 7168
    q_lora: int = 64  # 1536
    heads: int = 8  # 128
    nope: int = 32  # 128
    rope: int = 16  # 64
    latent: int = 64  # 512
    value: int = 32  # 128
    index_heads: int = 4  # 64
    index_dim: int = 32  # 128
    top_k: int = 12  # 2048
    page: int = 16  # 64


@dataclass
class Projected:
    """What attention is given of some tokens.

    q_nope [tokens, heads, nope], q_pe [tokens, heads, rope], row [tokens, latent + rope]: the latent and its position.
    index_q, index_k: FP8 [tokens, index_heads, index_dim] and [tokens, index_dim], index_scale [tokens] of index_k;
    index_w [tokens, index_heads]: weights of the heads, the scales of index_q and of the products in them.
    """

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    row: torch.Tensor
    index_q: torch.Tensor
    index_w: torch.Tensor
    index_k: torch.Tensor
    index_scale: torch.Tensor


class Layer:
    """Weights, and what both ways of attention share: the projections."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype):
        s = self.sizes = sizes
        new = lambda *shape: (torch.randn(*shape, device=device) / shape[-1] ** 0.5).to(dtype)
        self.q_down, self.q_up = new(s.q_lora, s.hidden), new(s.heads * (s.nope + s.rope), s.q_lora)
        self.kv_down = new(s.latent + s.rope, s.hidden)
        self.k_up, self.v_up = new(s.heads, s.nope, s.latent), new(s.heads, s.value, s.latent)
        self.out = new(s.hidden, s.heads * s.value)
        self.index_q_up, self.index_k = new(s.index_heads * s.index_dim, s.q_lora), new(s.index_dim, s.hidden)
        self.index_w = new(s.index_heads, s.hidden)
        self.ones = {n: torch.ones(n, dtype=dtype, device=device) for n in (s.q_lora, s.latent)}

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projected:
        """x [tokens, hidden] at these positions of their requests."""
        s = self.sizes
        low = flashinfer.rmsnorm(x @ self.q_down.t(), self.ones[s.q_lora])
        q = (low @ self.q_up.t()).unflatten(1, (s.heads, -1))
        latent, k_pe = (x @ self.kv_down.t()).split((s.latent, s.rope), 1)
        latent = flashinfer.rmsnorm(latent.contiguous(), self.ones[s.latent])
        index_q = (low @ self.index_q_up.t()).unflatten(1, (s.index_heads, -1))
        index_k = x @ self.index_k.t()
        turn = lambda t: rotated(t, positions)
        index_q = torch.cat((turn(index_q[..., : s.rope]), index_q[..., s.rope :]), -1)
        index_k = torch.cat((turn(index_k[:, None, : s.rope])[:, 0], index_k[:, s.rope :]), -1)
        (index_q, q_scale), (index_k, k_scale) = quantised(index_q), quantised(index_k)
        weights = (x @ self.index_w.t()).float() * q_scale * (s.index_heads * s.index_dim) ** -0.5
        row = torch.cat((latent, turn(k_pe[:, None])[:, 0]), 1)
        return Projected(q[..., : s.nope], turn(q[..., s.nope :]), row, index_q, weights, index_k, k_scale)

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        """Hidden states of attention's output [tokens, heads, value]."""
        return out.flatten(1) @ self.out.t().to(out.dtype)


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [tokens, heads, dim], halves side by side."""
    half = x.shape[-1] // 2
    angle = positions[:, None].float() * 10000.0 ** (-torch.arange(half, device=x.device).float() / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 and the scale of each row."""
    scale = x.float().abs().amax(-1).clamp(min=1e-4) / 448
    return (x.float() / scale[..., None]).to(FP8), scale


class Sparse:
    """The layer's cache and its attention, through the library.

    Both pools have the same pages: one of latents with their positions, and one of the indexer's keys, in which a page
    holds all keys and then their scales.
    """

    def __init__(self, layer: Layer, lengths: list[int]):
        """Pages for requests that grow to these lengths, in random order."""
        s, weight = layer.sizes, layer.out
        self.layer, self.lengths = layer, [0] * len(lengths)
        counts = [-(-n // s.page) for n in lengths]
        order = torch.randperm(sum(counts)).split(counts)
        self.table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for row, pages in zip(self.table, order):
            row[: len(pages)] = pages
        self.table = self.table.to(weight.device)
        self.latents = torch.zeros(sum(counts), s.page, s.latent + s.rope, dtype=weight.dtype, device=weight.device)
        index = torch.zeros(sum(counts), s.page * (s.index_dim + 4), dtype=torch.uint8, device=weight.device)
        self.index = index.view(-1, s.page, 1, s.index_dim + 4)
        self.index_k = index[:, : s.page * s.index_dim].unflatten(1, (s.page, s.index_dim))
        self.index_scale = index.view(torch.float32)[:, s.page * s.index_dim // 4 :]
        self.scratch = torch.empty(1 << 20, dtype=torch.uint8, device=weight.device)

    def __call__(self, x: torch.Tensor, counts: list[int], prefill: bool) -> torch.Tensor:
        """The layer's output of `counts` new tokens of each request, side by side in x [tokens, hidden].

        `prefill` scores keys side by side, gathered once for all tokens; decode and verification, of as many tokens of
        each request, score the pages.
        """
        s, device = self.layer.sizes, x.device
        before = self.lengths
        self.lengths = [n + new for n, new in zip(before, counts)]
        request = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(device)
        positions = torch.cat([torch.arange(a, b) for a, b in zip(before, self.lengths)]).to(device)
        p = self.layer.project(x, positions)
        page, slot = self.table[request, positions // s.page].long(), positions % s.page
        self.latents[page, slot] = p.row
        self.index_k[page, slot], self.index_scale[page, slot] = p.index_k.view(torch.uint8), p.index_scale
        scores, first = self._score_rows(p, request, positions) if prefill else self._score_pages(p, counts)
        tokens = flashinfer.top_k_page_table_transform(
            scores, self.table, (positions + 1).int(), s.top_k, request.int(), row_starts=first,
            tie_break=flashinfer.TopKTieBreak.SMALL, page_table_row_starts=torch.zeros_like(first), page_size=s.page,
        )  # fmt: skip
        # Keys' up-projection is absorbed into queries, and values' is applied to the latent outputs.
        query = torch.cat((torch.einsum("thn,hnl->thl", p.q_nope, self.layer.k_up), p.q_pe), -1)
        out = trtllm_batch_decode_with_kv_cache_mla(
            query[:, None], self.latents, self.scratch, s.nope, s.latent, s.rope, tokens[:, None], None, 0,
            sparse_mla_top_k=s.top_k, bmm1_scale=(s.nope + s.rope) ** -0.5,
        )  # fmt: skip
        return self.layer.finish(torch.einsum("thl,hvl->thv", out[:, 0], self.layer.v_up))

    def _score_rows(self, p: Projected, request, positions):
        starts = torch.tensor([0, *self.lengths[:-1]]).cumsum(0).to(positions.device)
        every = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths)).to(request.device)
        at = torch.arange(len(every), device=request.device) - starts[every]
        page, slot = self.table[every, at // self.layer.sizes.page].long(), at % self.layer.sizes.page
        keys = self.index_k[page, slot].view(FP8), self.index_scale[page, slot]
        first = starts[request].int()
        return fp8_mqa_logits(p.index_q, keys, p.index_w, first, first + positions.int() + 1), first

    def _score_pages(self, p: Projected, counts: list[int]):
        lens = torch.tensor(self.lengths, dtype=torch.int32).to(p.index_w.device)
        queries = p.index_q.unflatten(0, (len(counts), counts[0]))
        most = max(self.lengths)
        scores = flashinfer.fp8_paged_mqa_logits(queries, self.index, p.index_w, self.table, lens, most)
        return scores, torch.zeros(len(scores), dtype=torch.int32, device=scores.device)


def plain(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """The same layer of one whole request x [tokens, hidden], all logits in float64."""
    s, count = layer.sizes, x.shape[0]
    p = layer.project(x, torch.arange(count, device=x.device))
    scores = torch.einsum("thd,kd->thk", p.index_q.double(), p.index_k.double()).relu()
    scores = torch.einsum("thk,th->tk", scores, p.index_w.double()) * p.index_scale.double()
    future = torch.ones(count, count, dtype=torch.bool, device=x.device).triu(1)
    # Scores of 0 are many: of equal ones the earlier key is taken, here and there.
    order = scores.masked_fill(future, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    chosen = order[:, : s.top_k]
    seen = torch.zeros_like(future).scatter_(1, chosen, True) & ~future
    latent, k_pe = p.row.double().split((s.latent, s.rope), 1)
    k = torch.einsum("kl,hnl->khn", latent, layer.k_up.double())
    v = torch.einsum("kl,hvl->khv", latent, layer.v_up.double())
    logits = torch.einsum("thn,khn->thk", p.q_nope.double(), k) + torch.einsum("thr,kr->thk", p.q_pe.double(), k_pe)
    logits = (logits * (s.nope + s.rope) ** -0.5).masked_fill(~seen[:, None], -torch.inf)
    return layer.finish(torch.einsum("thk,khv->thv", logits.softmax(-1), v))


def run(prompts: list[int], steps: list[int], device: torch.device, dtype: torch.dtype, sizes: Sizes = Sizes()):
    """Prefill prompts, then decode or verify so many tokens at each step. Yields a name and the relative error of each.

    The error is the largest difference from the plain layer over the largest of its outputs.
    """
    layer = Layer(sizes, device, dtype)
    total = sum(steps)
    x = [torch.randn(n + total, sizes.hidden, device=device).to(dtype) for n in prompts]
    truth = [plain(layer, request) for request in x]
    sparse = Sparse(layer, [len(request) for request in x])
    at = [0] * len(prompts)
    for step in (None, *steps):
        counts = prompts if step is None else [step] * len(prompts)
        spans = [slice(a, a + n) for a, n in zip(at, counts)]
        out = sparse(torch.cat([request[span] for request, span in zip(x, spans)]), counts, prefill=step is None)
        at = [span.stop for span in spans]
        want = torch.cat([t[span] for t, span in zip(truth, spans)])
        name = "prefill" if step is None else "decode" if step == 1 else f"verify {step}"
        yield name, float((out.double() - want).abs().max() / want.abs().max())


def main(arguments: list[str] | None = None) -> float:
    """Run, print a line a step, and return the largest relative error."""
    parser = argparse.ArgumentParser(prog="python -m examples.sparse_layer", description=str(__doc__).split(",")[0])
    parser.add_argument("--prompts", type=int, nargs="+", default=[70, 5, 131], help="tokens of each request")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 1, 4, 1], help="tokens of each step that follows")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    worst = 0.0
    for name, error in run(given.prompts, given.steps, torch.device(given.device), torch.float16):
        print(f"{name:>9}: off by {error:.1e} of the largest output")
        worst = max(worst, error)
    return worst


if __name__ == "__main__":
    main()
