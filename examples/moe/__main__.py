"""A Mixtral-shaped mixture of experts with random weights, compared with Hugging Face's block of the same weights.

    python -m examples.moe --tokens 1 16 300 --device cuda

`MixtralSparseMoeBlock` takes the softmax of the chosen logits: RoutingMethodType.Renormalize. Its weights hold the
gate's rows first; this library expects the up-projection's rows first. Nothing else differs. Without transformers
(`pip install transformers`) the reference is the same layer in plain torch.
"""

import argparse
import time
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from flashinfer.fused_moe import RoutingMethodType, WeightLayout, trtllm_bf16_moe


@dataclass
class Layer:
    """router [experts, hidden]; gate_up [experts, 2 * intermediate, hidden], the gate's rows first; down [experts,
    hidden, intermediate]. Of one dtype."""

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    top_k: int

    @classmethod
    def random(cls, hidden: int, intermediate: int, experts: int, top_k: int, device):
        normal = lambda *shape: (torch.randn(shape, device=device) * shape[-1] ** -0.5).bfloat16()
        gate_up, down = normal(experts, 2 * intermediate, hidden), normal(experts, hidden, intermediate)
        return cls(normal(experts, hidden) * 4, gate_up, down, top_k)


def prepared(layer: Layer) -> torch.Tensor:
    """The first weights as the library has them, once for a model: the up-projection's rows first."""
    gate, up = layer.gate_up.chunk(2, 1)
    return torch.cat((up, gate), 1)


def run(layer: Layer, up_gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x, bfloat16 [tokens, hidden], through the layer."""
    experts, hidden, intermediate = layer.down.shape
    logits = x @ layer.router.T
    return trtllm_bf16_moe(
        logits, None, x, up_gate, layer.down, experts, layer.top_k, None, None, intermediate, 0, experts,
        routing_method_type=RoutingMethodType.Renormalize, use_shuffled_weight=False,
        weight_layout=WeightLayout.MajorK,
    )  # fmt: skip


def by_hugging_face(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """x through Hugging Face's block, in float32."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    experts, hidden, intermediate = layer.down.shape
    config = MixtralConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_local_experts=experts, num_experts_per_tok=layer.top_k
    )
    config._experts_implementation = "eager"
    block = MixtralSparseMoeBlock(config).to(x.device)
    names = {"gate.weight": layer.router, "experts.gate_up_proj": layer.gate_up, "experts.down_proj": layer.down}
    block.load_state_dict({name: weight.float() for name, weight in names.items()})
    with torch.no_grad():
        return block(x.float()[None])[0]


def by_torch(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """x through the same layer in plain torch, in float32."""
    x = x.float()
    logits, chosen = (x @ layer.router.float().T).topk(layer.top_k)
    out = torch.zeros_like(x)
    for expert in range(len(layer.down)):
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ layer.gate_up[expert].float().T).chunk(2, 1)
        rows = (torch.nn.functional.silu(gate) * up) @ layer.down[expert].float().T
        out.index_add_(0, token, rows * logits.softmax(1)[token, choice, None])
    return out


def main(arguments=None) -> float:
    """The largest relative error."""
    parser = argparse.ArgumentParser(prog="python -m examples.moe", description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 300], help="one run for each number of tokens")
    parser.add_argument("--hidden", type=int, default=256, help="elements of a token (default 256)")
    parser.add_argument("--intermediate", type=int, default=512, help="elements between the products (default 512)")
    parser.add_argument("--experts", type=int, default=8, help="experts (default 8)")
    parser.add_argument("--top-k", type=int, default=2, help="experts of a token (default 2)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    layer = Layer.random(given.hidden, given.intermediate, given.experts, given.top_k, device)
    up_gate = prepared(layer)
    name, reference = ("Hugging Face", by_hugging_face) if find_spec("transformers") else ("torch", by_torch)
    worst = 0.0
    for tokens in given.tokens:
        x = torch.randn(tokens, given.hidden, device=device).bfloat16()
        expected = reference(layer, x)
        out = run(layer, up_gate, x)
        start = time.perf_counter()
        out = run(layer, up_gate, x)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        error = float((out.float() - expected).norm() / expected.norm())
        worst = max(worst, error)
        print(f"{tokens:6} tokens: {1e3 * seconds:9.3f} ms, relative error {error:.1e} against {name}")
    return worst


if __name__ == "__main__":
    main()
