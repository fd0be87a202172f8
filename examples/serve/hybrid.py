"""A hybrid of Qwen3-Next's shape in the same engine: layers with gated delta rules between layers of attention.

    python -m examples.serve.hybrid     # a tiny model of random weights, beside transformers' own

A request has pages of keys and values, as in `engine.py`, and a slot in pools of states: of each recurrent layer the
last inputs of its convolution and a matrix a head. Pages can be shared from any page on, states only where they were
kept: at every `checkpoint` tokens a step ends, and the request's slot is copied to another one. A prompt goes on from
the longest such checkpoint. Matrix products are torch's; every other op of a layer but gates is flashinfer's.
"""

import argparse
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import flashinfer
from flashinfer.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

from .engine import Engine, Request
from .model import PagedAttention


@dataclass(frozen=True)
class HybridConfig:
    """Shape of a model; names as in `model.Config`. `full_layers` are the layers with attention."""

    hidden: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    norm_eps: float
    full_layers: tuple[int, ...]
    num_layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    window: int | None = None

    @property
    def sm_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def is_full(self, layer: int) -> bool:
        return True


def load(model, device, dtype) -> tuple[HybridConfig, dict]:
    """Shape and weights of transformers' Qwen3NextForCausalLM without experts."""
    c, rope = model.config, model.config.rope_parameters
    full = tuple(i for i, kind in enumerate(c.layer_types) if kind == "full_attention")
    config = HybridConfig(
        c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim,
        int(c.head_dim * rope["partial_rotary_factor"]), rope["rope_theta"], c.rms_norm_eps, full, c.num_hidden_layers,
        c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim,
        c.linear_conv_kernel_dim,
    )  # fmt: skip
    tensors = {name: t.detach().to(device, dtype) for name, t in model.state_dict().items()}
    layers = []
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        own["mlp.gate_up"] = torch.cat([own.pop("mlp.gate_proj.weight"), own.pop("mlp.up_proj.weight")])
        if i not in full:
            per_key = config.value_heads // config.key_heads
            parts = [config.key_dim] * 2 + [per_key * config.value_dim] * 2
            own["qkvz"] = _by_kind(own.pop("linear_attn.in_proj_qkvz.weight"), config.key_heads, parts)
            own["ba"] = _by_kind(own.pop("linear_attn.in_proj_ba.weight"), config.key_heads, [per_key] * 2)
        layers.append(own)
    names = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight", "head": "lm_head.weight"}
    return config, {name: tensors[old] for name, old in names.items()} | {"layers": layers}


def _by_kind(weight: torch.Tensor, heads: int, parts: list[int]) -> torch.Tensor:
    """Rows that stand by key head, as rows by kind: all queries, all keys, and so on."""
    return torch.cat([part.flatten(0, 1) for part in weight.unflatten(0, (heads, -1)).split(parts, 1)])


class States:
    """Pools of states, one slot a request and one a checkpoint, and which of them a step works on."""

    def __init__(self, config: HybridConfig, slots: int, like: torch.Tensor):
        c, layers = config, config.num_layers - len(config.full_layers)
        self.conv = torch.zeros(layers, slots, c.channels, c.conv_width - 1, dtype=like.dtype, device=like.device)
        shape = layers, slots, c.value_heads, c.value_dim, c.key_dim
        self.delta = torch.zeros(shape, dtype=torch.float32, device=like.device)
        self.free = list(range(slots))

    def take(self, source: int | None = None) -> int:
        """A slot that begins with the state of another one, or with zeros."""
        slot = self.free.pop()
        for pool in (self.conv, self.delta):
            pool[:, slot] = 0 if source is None else pool[:, source]
        return slot

    def plan(self, slots: list[int], counts: list[int]) -> None:
        """Prepare a step of `counts[i]` tokens for slot `slots[i]`; requests of one token come first."""
        self.num_steps = next((i for i, count in enumerate(counts) if count > 1), len(counts))
        indices = torch.tensor(slots, dtype=torch.int32, device=self.conv.device)
        self.stepping, self.chunking = indices.split([self.num_steps, len(slots) - self.num_steps])
        offsets = torch.tensor([0, *counts[self.num_steps :]], device=self.conv.device)
        self.offsets = offsets.cumsum(0).int()


class Qwen3Next:
    """The forward pass. `weights` is as `load` gives it; norm weights but a recurrent layer's are stored minus one."""

    def __init__(self, config: HybridConfig, weights: dict, max_length: int, states: States):
        self.config, self.weights, self.states = config, weights, states
        exponents = torch.arange(0, config.rotary_dim, 2) / config.rotary_dim
        angles = torch.arange(max_length)[:, None] * (1.0 / config.rope_theta**exponents)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(weights["token_embd"].device)

    def __call__(self, tokens, positions, attention: PagedAttention, rows) -> torch.Tensor:
        """Logits [len(rows), vocabulary] of the batch's tokens at `rows`; pages and states take in all tokens."""
        w, eps = self.weights, self.config.norm_eps
        residual = F.embedding(tokens, w["token_embd"])
        attended = recurrent = 0
        for i, layer in enumerate(w["layers"]):
            x = flashinfer.gemma_rmsnorm(residual, layer["input_layernorm.weight"], eps)
            if i in self.config.full_layers:
                x = self._attend(attended, layer, x, positions, attention)
                attended += 1
            else:
                x = self._recur(recurrent, layer, x)
                recurrent += 1
            flashinfer.gemma_fused_add_rmsnorm(x, residual, layer["post_attention_layernorm.weight"], eps)
            up = flashinfer.silu_and_mul(F.linear(x, layer["mlp.gate_up"]))
            residual = residual + F.linear(up, layer["mlp.down_proj.weight"])
        return F.linear(flashinfer.gemma_rmsnorm(residual[rows], w["output_norm"], eps), w["head"])

    def _attend(self, index: int, layer: dict, x, positions, attention: PagedAttention) -> torch.Tensor:
        """Attention whose output a gate of each channel scales. index : among the layers with attention."""
        c, n = self.config, len(x)
        q, gate = F.linear(x, layer["self_attn.q_proj.weight"]).view(n, c.num_qo_heads, -1).chunk(2, -1)
        k = F.linear(x, layer["self_attn.k_proj.weight"]).view(n, c.num_kv_heads, -1)
        v = F.linear(x, layer["self_attn.v_proj.weight"]).view(n, c.num_kv_heads, -1)
        q = flashinfer.gemma_rmsnorm(q, layer["self_attn.q_norm.weight"], c.norm_eps)
        k = flashinfer.gemma_rmsnorm(k, layer["self_attn.k_norm.weight"], c.norm_eps)
        rotate = flashinfer.apply_rope_with_cos_sin_cache_inplace
        q, k = q.contiguous(), k.contiguous()
        rotate(positions, q.view(n, -1), k.view(n, -1), c.head_dim, self.cos_sin)
        out = attention.run(index, q, k, v) * gate.sigmoid()
        return F.linear(out.flatten(1), layer["self_attn.o_proj.weight"])

    def _recur(self, index: int, layer: dict, x: torch.Tensor) -> torch.Tensor:
        """Convolution, gated delta rule and gated norm; single tokens and chunks of prompts by functions of their own.

        index : among the recurrent layers.
        """
        c, states = self.config, self.states
        of_values = c.value_heads * c.value_dim
        qkv, z = F.linear(x, layer["qkvz"]).split([c.channels, of_values], -1)
        b, a = F.linear(x, layer["ba"]).chunk(2, -1)
        gates = layer["linear_attn.A_log"].float(), layer["linear_attn.dt_bias"].float()
        kernel = layer["linear_attn.conv1d.weight"].squeeze(1)
        conv, delta, n = states.conv[index], states.delta[index], states.num_steps
        out = torch.empty(len(x), c.value_heads, c.value_dim, dtype=x.dtype, device=x.device)
        if n:
            mixed = causal_conv1d_update(qkv[:n], conv, kernel, None, "silu", conv_state_indices=states.stepping)
            q, k, v = (t[:, None] for t in self._heads(mixed))
            gated_delta_rule_decode_pretranspose(
                q, k, v, None, gates[0], a[:n, None], gates[1], b[:n, None],
                output=out[:n, None], initial_state=delta, initial_state_indices=states.stepping,
            )  # fmt: skip
        if n < len(x):
            mixed = causal_conv1d_fn(
                qkv[n:].T, kernel, conv_states=conv, query_start_loc=states.offsets, cache_indices=states.chunking,
                has_initial_state=torch.ones_like(states.chunking, dtype=torch.bool),
            )  # fmt: skip
            decay = (-gates[0].exp() * F.softplus(a[n:].float() + gates[1])).exp()
            flashinfer.chunk_gated_delta_rule(
                *self._heads(mixed.T), decay, b[n:].float().sigmoid(), initial_state=delta, output_final_state=True,
                cu_seqlens=states.offsets, use_qk_l2norm_in_kernel=True, output=out[n:], output_state=delta,
                state_indices=states.chunking,
            )  # fmt: skip
        normed = flashinfer.rmsnorm(out.flatten(0, 1), layer["linear_attn.norm.weight"], c.norm_eps)
        gated = flashinfer.silu_and_mul(torch.cat((z.reshape(normed.shape), normed), -1))
        return F.linear(gated.view(len(x), -1), layer["linear_attn.out_proj.weight"])

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [tokens, key heads, key_dim] and v [tokens, value heads, value_dim] of the convolution's output."""
        c = self.config
        of_keys = c.key_heads * c.key_dim
        q, k, v = mixed.split([of_keys, of_keys, c.channels - 2 * of_keys], -1)
        q, k = q.unflatten(-1, (c.key_heads, -1)), k.unflatten(-1, (c.key_heads, -1))
        return q, k, v.unflatten(-1, (c.value_heads, -1))


class HybridEngine(Engine):
    """The engine with states beside pages. `slots` are for running requests and checkpoints, which yield to them."""

    def __init__(self, config: HybridConfig, weights: dict, *args, checkpoint: int = 64, slots: int = 64, **kwargs):
        self.states = States(config, slots, weights["token_embd"])
        super().__init__(config, weights, *args, **kwargs)
        if checkpoint % self.grain:
            raise ValueError(f"checkpoint: got {checkpoint}; allowed: multiples of {self.grain}, the page size")
        self.grain = checkpoint
        # The slot of each running request, and those of the checkpoints of each one by their length.
        self.slot: dict[Request, int] = {}
        self.kept: dict[Request, dict[int, int]] = {}

    def _build(self, config, weights, num_pages: int, page_size: int, max_length: int) -> None:
        sizes = len(config.full_layers), config.num_kv_heads, config.head_dim, page_size, num_pages
        like = weights["token_embd"]
        self.cache = flashinfer.PagedKVCache(*sizes, device=like.device, data_type=like.dtype)
        self.model = Qwen3Next(config, weights, max_length, self.states)
        self.attention = PagedAttention(config, self.cache)

    def _shareable(self, donor: Request, common: int) -> int:
        return max((length for length in self.kept[donor] if length <= common), default=0)

    def _make_room(self, request: Request, donor: Request | None, shared: int) -> bool:
        # Before pages are looked for: the donor may have to go for them.
        if self.states.free or self._drop_checkpoints(donor):
            slot = self.states.take(None if donor is None else self.kept[donor][shared])
        elif donor is not None:
            slot = self.kept[donor].pop(shared)
        else:
            return False
        if not super()._make_room(request, donor, shared):
            self.states.free.append(slot)
            return False
        self.slot[request], self.kept[request] = slot, {}
        return True

    def _drop_checkpoints(self, donor: Request | None) -> bool:
        """Free the checkpoints of the request that has them for longest; not those of the donor."""
        oldest = next((r for r in [*self.finished, *self.running] if r is not donor and self.kept[r]), None)
        if oldest is None:
            return False
        self.states.free += self.kept[oldest].values()
        self.kept[oldest] = {}
        return True

    def _finish(self, request: Request) -> None:
        super()._finish(request)
        self.states.free.append(self.slot.pop(request))

    def _forget(self, request: Request) -> None:
        super()._forget(request)
        self.states.free += self.kept.pop(request).values()

    def _most(self, request: Request) -> int:
        """A step ends at a checkpoint."""
        return min(request.pending, self.grain - request.sequence.length % self.grain)

    def _forward(self, batch: list[tuple[Request, int]], ready: list[Request]) -> torch.Tensor:
        self.states.plan([self.slot[request] for request, _ in batch], [count for _, count in batch])
        logits = super()._forward(batch, ready)
        for request, _ in batch:
            if request.sequence.length % self.grain == 0 and self.states.free:
                self.kept[request][request.sequence.length] = self.states.take(self.slot[request])
        return logits


def tiny_model(vocabulary: int) -> Any:
    """transformers' Qwen3-Next of four layers and random weights, the same in every run."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    config = Qwen3NextConfig(
        vocab_size=vocabulary, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16,
        linear_value_head_dim=24, num_experts=0, layer_types=kinds, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(5)
    model = Qwen3NextForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(-4, 0)
        else:
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def main(arguments=None) -> int:
    """Serve prompts with a common beginning, and compare their greedy tokens with those of transformers."""
    parser = argparse.ArgumentParser(prog="python -m examples.serve.hybrid", description=main.__doc__)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    model, source = tiny_model(97), torch.Generator().manual_seed(0)
    document, *questions = (
        torch.randint(97, (length,), generator=source).tolist() for length in (200, *range(3, 3 + args.requests))
    )
    prompts = [document + question for question in questions]
    requests = [Request(prompt, args.max_new_tokens, 8 * i) for i, prompt in enumerate(prompts)]
    config, weights = load(model, args.device, torch.float32)
    most = max(map(len, prompts)) + args.max_new_tokens
    pages = len(prompts) * -(-most // 16)
    engine = HybridEngine(config, weights, pages, 16, most, 96, -1, partial(torch.argmax, dim=-1))
    start = time.perf_counter()
    engine.serve(requests)
    speed = sum(len(request.output) for request in requests) / (time.perf_counter() - start)
    same = True
    for request in requests:
        ids = torch.tensor([request.prompt])
        options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=args.max_new_tokens, do_sample=False)
        text = model.generate(ids, **options)[0, len(request.prompt) :].tolist()
        same = same and request.output == text
    shared = sum(request.shared for request in requests)
    print(
        f"{len(requests)} requests on {args.device}: {'the same' if same else 'other'} tokens as transformers; "
        f"{speed:.1f} tokens/s; {shared} of {sum(map(len, prompts))} prompt tokens from checkpoints of others"
    )
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
