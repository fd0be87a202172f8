"""The example engine against a plain forward pass over the whole text, in float64, with no cache and no flashinfer."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

import flashinfer
from examples.serve.engine import Engine, Request, top_p
from examples.serve.model import Config

CONFIG = Config(
    hidden=48,
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=16,
    window=8,
    layers_per_full_layer=3,
    sm_scale=24**-0.5,
)
VOCABULARY, FFN, LAYERS, NO_EOS = 97, 40, 4, -1


@pytest.fixture(autouse=True)
def one_thread():
    """The model is too small to share between threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def random_weights() -> dict:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape, mean=0.0, std=1.0):
        return torch.randn(*shape, generator=generator) * std + mean

    c = CONFIG
    layer_shapes = {
        "attn_qkv": ((c.num_qo_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden),
        "attn_output": (c.hidden, c.num_qo_heads * c.head_dim),
        "ffn_gate_up": (2 * FFN, c.hidden),
        "ffn_down": (c.hidden, FFN),
    }
    norms = {"attn_norm": c.hidden, "ffn_norm": c.hidden, "attn_q_norm": c.head_dim, "attn_k_norm": c.head_dim}
    # Layers that outweigh the embedding, so that a text does not repeat one token.
    branch_ends = {"post_attention_norm": c.hidden, "post_ffw_norm": c.hidden}
    layers = [
        {name: normal(*shape) for name, shape in layer_shapes.items()}
        | {name: normal(size, std=0.3) for name, size in norms.items()}
        | {name: normal(size, mean=1.0, std=0.3) for name, size in branch_ends.items()}
        for _ in range(LAYERS)
    ]
    return {
        "token_embd": normal(VOCABULARY, c.hidden, std=0.1),
        "output_norm": normal(c.hidden, std=0.3),
        "layers": layers,
    }


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt() * (1 + weight.double())


def rotate(x, theta):
    """x [tokens, heads, head_dim], one complex number for each pair (i, i + head_dim / 2)."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None, None] * theta ** -(torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def last_logits(tokens, config) -> torch.Tensor:
    weights = random_weights()
    embedding = weights["token_embd"].double()
    x = embedding[torch.tensor(tokens)] * config.hidden**0.5
    place = torch.arange(len(tokens))
    distance = place[:, None] - place
    for i, layer in enumerate(weights["layers"]):
        full = i % config.layers_per_full_layer == config.layers_per_full_layer - 1
        theta = config.global_rope_theta if full else config.local_rope_theta
        visible = (distance >= 0) if full else (distance >= 0) & (distance < config.window)
        qkv = norm(x, layer["attn_norm"]) @ layer["attn_qkv"].double().T
        heads = qkv.unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split([config.num_qo_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        q, k = (rotate(norm(t, layer[f"attn_{name}_norm"]), theta) for t, name in ((q, "q"), (k, "k")))
        k, v = (t.repeat_interleave(config.num_qo_heads // config.num_kv_heads, dim=1) for t in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q, k) * config.sm_scale
        probs = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", probs, v).flatten(1)
        x = x + norm(attended @ layer["attn_output"].double().T, layer["post_attention_norm"])
        gate, up = (norm(x, layer["ffn_norm"]) @ layer["ffn_gate_up"].double().T).chunk(2, -1)
        down = (F.gelu(gate, approximate="tanh") * up) @ layer["ffn_down"].double().T
        x = x + norm(down, layer["post_ffw_norm"])
    return norm(x[-1], weights["output_norm"]) @ embedding.T


def expected(prompt, count, config=CONFIG) -> list[int]:
    """The greedy text; its choices must be clear enough for float32."""
    text = []
    for _ in range(count):
        logits = last_logits([*prompt, *text], config)
        best = logits.topk(2)
        assert best.values[0] - best.values[1] > 1e-4
        text.append(int(best.indices[0]))
    return text


def random_prompt(seed, length) -> list[int]:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(logits):
    return logits.argmax(-1)


def weights_on(device) -> dict:
    weights = random_weights()
    layers = [{name: tensor.to(device) for name, tensor in layer.items()} for layer in weights["layers"]]
    return {"layers": layers} | {name: weights[name].to(device) for name in ("token_embd", "output_norm")}


def make_engine(
    num_pages=200, page_size=4, max_length=80, token_budget=16, eos_id=NO_EOS, sample=greedy, device="cpu"
) -> Engine:
    return Engine(CONFIG, weights_on(device), num_pages, page_size, max_length, token_budget, eos_id, sample)


def serve(engine, requests) -> None:
    engine.serve(requests)
    assert engine.running == engine.waiting == []
    engine.reset()
    assert engine.cache.num_used_pages == 0


def prompts_with_shared_prefix() -> list[list[int]]:
    document = random_prompt(1, 37)
    return [
        document + random_prompt(2, 3),
        random_prompt(3, 1),
        document + random_prompt(4, 6),
        random_prompt(5, 21),
        document[:19] + random_prompt(6, 5),
        document + random_prompt(2, 3),
        random_prompt(7, 8),
    ]


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("token_budget", [3, 16, 512])
def test_texts_of_ragged_arrivals_are_those_of_a_plain_forward(page_size, token_budget, device):
    prompts = prompts_with_shared_prefix()
    requests = [Request(prompt, 9, arrival=3 * i // 2) for i, prompt in enumerate(prompts)]
    serve(make_engine(page_size=page_size, token_budget=token_budget, device=device), requests)
    assert [request.output for request in requests] == [expected(prompt, 9) for prompt in prompts]


def test_the_model_tells_windows_rope_bases_and_layer_pattern_apart():
    """Otherwise the test above would not see them ignored."""
    prompt = prompts_with_shared_prefix()[0]
    text = expected(prompt, 9)
    for change in (
        {"window": 7},
        {"window": 9},
        {"window": 1000},
        {"layers_per_full_layer": 4},
        {"local_rope_theta": CONFIG.global_rope_theta},
        {"global_rope_theta": CONFIG.local_rope_theta},
        {"sm_scale": 16**-0.5},
    ):
        assert expected(prompt, 9, replace(CONFIG, **change)) != text, change


def test_a_shared_prefix_is_computed_once():
    prompts = prompts_with_shared_prefix()
    requests = [Request(prompt, 5) for prompt in prompts]
    engine = make_engine(page_size=4)
    engine.serve(requests)
    # Whole pages of what an earlier prompt begins with, short of the last token of the prompt.
    assert [request.shared for request in requests] == [0, 0, 36, 0, 16, 36, 0]
    assert sum(step.prompt_tokens for step in engine.steps) == sum(map(len, prompts)) - 36 - 16 - 36
    assert max(step.shared_pages for step in engine.steps) == 9
    assert [request.output for request in requests] == [expected(prompt, 5) for prompt in prompts]


def test_a_finished_text_is_a_prefix_to_go_on_from():
    first = Request(random_prompt(8, 10), 7)
    engine = make_engine(page_size=4)
    engine.serve([first])
    second = Request(first.prompt + first.output + random_prompt(9, 2), 4)
    engine.serve([second])
    assert second.shared == 16  # all that was computed of the first, in whole pages
    assert second.output == expected(second.prompt, 4)


def test_steps_keep_the_token_budget_and_decode_goes_on_during_prefill():
    long, short = Request(random_prompt(1, 60), 4, arrival=2), Request(random_prompt(2, 2), 12)
    engine = make_engine(token_budget=10)
    engine.serve([long, short])
    mixed = [step for step in engine.steps if step.prompt_tokens and step.new_tokens]
    assert [step.prompt_tokens for step in mixed[1:]] == [9, 9, 9, 9, 9, 9, 6]
    assert [step.new_tokens for step in mixed[1:]] == [1, 1, 1, 1, 1, 1, 2]


def test_requests_wait_for_pages_and_prefixes_make_room():
    prompts = prompts_with_shared_prefix() * 2
    requests = [Request(prompt, 9, arrival=i) for i, prompt in enumerate(prompts)]
    # One page more than the longest text needs: no two long requests fit side by side without sharing.
    engine = make_engine(num_pages=14, page_size=4)
    engine.serve(requests)
    assert max(step.used_pages for step in engine.steps) <= 14
    assert [request.output for request in requests] == [expected(prompt, 9) for prompt in prompts]
    serve(engine, [])


def test_a_text_ends_at_the_end_of_sequence_token():
    prompt = random_prompt(10, 12)
    text = expected(prompt, 12)
    eos_id = text[6]
    request = Request(prompt, 12)
    serve(make_engine(eos_id=eos_id), [request])
    assert request.output == text[: text.index(eos_id) + 1]


@pytest.mark.parametrize("prompt_length, num_pages", [(0, 200), (76, 200), (40, 10)])
def test_a_request_that_can_never_fit_is_refused(prompt_length, num_pages):
    engine = make_engine(num_pages=num_pages, page_size=4, max_length=80)
    with pytest.raises(ValueError, match="request: got up to"):
        engine.serve([Request(random_prompt(1, prompt_length), 6)])
    serve(engine, [Request(random_prompt(1, 30), 6)])


def test_top_p_samples_the_smallest_set_that_holds_p():
    probs = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    logits = probs.log().expand(20000, -1)
    tokens = top_p(logits, 0.6, torch.Generator().manual_seed(0))
    frequency = torch.bincount(tokens, minlength=5) / len(tokens)
    # 0.4 and 0.3 are the fewest that reach 0.6; five standard deviations of 20000 draws.
    torch.testing.assert_close(frequency, torch.tensor([0, 4 / 7, 0, 3 / 7, 0]), atol=0.018, rtol=0)
    assert top_p(logits[:3], 1e-6, torch.Generator()).tolist() == [1, 1, 1]
    ran = {choice.op for choice in flashinfer.explain()}
    assert {"softmax", "prefix_sampling"} <= ran  # what the demo's report lists


def test_progress_is_seen_in_a_pipe():
    import io

    from rich.console import Console

    from examples.serve.report import serve_in_view

    class Steps:
        def serve(self, requests, after_step):
            for token in range(8):
                for request in requests:
                    request.output.append(token)
                after_step()

    class Words:
        def decode(self, output, skip_special_tokens):
            return "word " * len(output)

    piped = io.StringIO()
    serve_in_view(Console(file=piped), Steps(), [Request([1], 8), Request([1], 8)], Words())
    assert [line for line in piped.getvalue().splitlines() if "of 16 tokens" in line] == [
        f"{made} of 16 tokens" for made in range(2, 17, 2)
    ]


def test_the_last_sentence_says_what_a_run_has_shown():
    from examples.serve.report import summary

    figures = {"engine": {"all": {"new tokens/s": 64.4}}}
    assert summary(figures) == "In short: 64 tokens/s."
    speeds = {"flashinfer engine": 64.4, "generate, one by one": 11.6, "generate, padded batch": 19.3}
    figures["against Hugging Face"] = {name: {"tokens/s": speed} for name, speed in speeds.items()}
    figures["greedy tokens that agree"] = {"one by one": dict(agree=768, of=768), "padded": dict(agree=760, of=768)}
    assert summary(figures) == (
        "In short: 64 tokens/s, and 12 (generate, one by one) and 19 (generate, padded batch) of Hugging Face; of 768 "
        "greedy tokens 760 agree."
    )
