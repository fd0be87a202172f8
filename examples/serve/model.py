"""Gemma 3 over a paged KV cache. Matrix products are torch's; every other op of a layer is flashinfer's."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import flashinfer


@dataclass(frozen=True)
class Config:
    """Shape of a Gemma 3 text model, at first that of 270M. `window` counts the token itself."""

    hidden: int = 640
    num_qo_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 256
    window: int | None = 512
    layers_per_full_layer: int = 6
    local_rope_theta: float = 10_000.0
    global_rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6
    sm_scale: float = 256**-0.5

    def is_full(self, layer: int) -> bool:
        """Whether a layer attends to everything before it; the others see a window."""
        return (layer + 1) % self.layers_per_full_layer == 0


class PagedAttention:
    """Appends keys and values to the cache's pages and attends over them.

    A step makes a plan for the full layers and one for the windowed, if any, and every layer runs one of them.
    A step of single tokens takes the decode wrappers; any other, mixed or not, the prefill wrappers.
    """

    def __init__(self, config, cache: flashinfer.PagedKVCache, workspace_bytes: int = 128 << 20):
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=cache.device)
        self.config, self.cache = config, cache
        self.window_left = {True: -1}  # by Config.is_full
        if config.window is not None:
            self.window_left[False] = config.window - 1
        self.prefill = {full: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace) for full in self.window_left}
        self.decode = {full: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace) for full in self.window_left}

    def plan(self, sequences: list) -> torch.Tensor:
        """Prepare a step over sequences that hold reservations; gives the positions of the reserved tokens."""
        c, dtype, tables = self.config, self.cache.data_type, self.cache.tables(sequences)
        pages = (tables.kv_indptr, tables.kv_indices, tables.last_page_len)
        shape = (c.num_qo_heads, c.num_kv_heads, c.head_dim, self.cache.page_size)
        self.sequences = sequences
        self.planned = self.decode if tables.num_reserved == len(sequences) else self.prefill
        for full, window_left in self.window_left.items():
            options: dict = dict(window_left=window_left, sm_scale=c.sm_scale, q_data_type=dtype, kv_data_type=dtype)
            if self.planned is self.decode:
                self.decode[full].plan(*pages, *shape, **options)
            else:
                self.prefill[full].plan(tables.qo_indptr, *pages, *shape, causal=True, **options)
        return tables.positions

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [tokens, qo heads, head_dim], k and v [tokens, kv heads, head_dim] -> [tokens, qo heads, head_dim]."""
        self.cache.append(k, v, layer, self.sequences)
        return self.planned[self.config.is_full(layer)].run(q, self.cache.layer(layer))


class Gemma3:
    """The forward pass. `weights` is as weights.load_weights gives it; norm weights are stored minus one."""

    def __init__(self, config: Config, weights: dict, max_length: int):
        self.config, self.embedding, self.layers = config, weights["token_embd"], weights["layers"]
        # The vocabulary in blocks: MKL does not thread one product of few rows and 262144 columns.
        self.head = self.embedding.view(math.gcd(len(self.embedding), 512), -1, config.hidden).mT
        # The norm after a layer's last addition is the next layer's first, or the final one.
        self.next_norms = [layer["attn_norm"] for layer in self.layers[1:]] + [weights["output_norm"]]
        # Of a model that is split over ranks, the sum over them.
        self.reduce = lambda x: x
        self.scale = torch.tensor(config.hidden**0.5).to(self.embedding)
        thetas = {True: config.global_rope_theta, False: config.local_rope_theta}  # by Config.is_full
        exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = {full: torch.arange(max_length)[:, None] * (1.0 / theta**exponents) for full, theta in thetas.items()}
        self.cos_sin = {full: torch.cat([a.cos(), a.sin()], -1).to(self.embedding.device) for full, a in angles.items()}

    def __call__(self, tokens, positions, attention: PagedAttention, rows) -> torch.Tensor:
        """Logits [len(rows), vocabulary] of the batch's tokens at `rows`; the K/V of all tokens enter the pages."""
        eps = self.config.norm_eps
        residual = F.embedding(tokens, self.embedding) * self.scale
        x = flashinfer.gemma_rmsnorm(residual, self.layers[0]["attn_norm"], eps)
        for i, (layer, next_norm) in enumerate(zip(self.layers, self.next_norms, strict=True)):
            x = self._attend(i, layer, x, positions, attention)
            x = flashinfer.gemma_rmsnorm(x, layer["post_attention_norm"], eps)
            flashinfer.gemma_fused_add_rmsnorm(x, residual, layer["ffn_norm"], eps)
            x = F.linear(flashinfer.gelu_tanh_and_mul(F.linear(x, layer["ffn_gate_up"])), layer["ffn_down"])
            x = self.reduce(x)
            x = flashinfer.gemma_rmsnorm(x, layer["post_ffw_norm"], eps)
            flashinfer.gemma_fused_add_rmsnorm(x, residual, next_norm, eps)
        return (x[rows] @ self.head).transpose(0, 1).flatten(1)

    def _attend(self, i, layer, x, positions, attention) -> torch.Tensor:
        c, n = self.config, len(x)
        heads = F.linear(x, layer["attn_qkv"]).view(n, -1, c.head_dim)
        q, k, v = heads.split([c.num_qo_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        q = flashinfer.gemma_rmsnorm(q, layer["attn_q_norm"], c.norm_eps)
        k = flashinfer.gemma_rmsnorm(k, layer["attn_k_norm"], c.norm_eps)
        rotate = flashinfer.apply_rope_with_cos_sin_cache_inplace
        rotate(positions, q.view(n, -1), k.view(n, -1), c.head_dim, self.cos_sin[c.is_full(i)])
        return self.reduce(F.linear(attention.run(i, q, k, v).view(n, -1), layer["attn_output"]))
