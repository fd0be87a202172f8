"""The example engine with a hybrid model: greedy tokens are those of transformers' Qwen3-Next, of the same weights."""

from functools import cache

import pytest
import torch

from examples.serve.engine import Request
from examples.serve.hybrid import HybridEngine, load, main, tiny_model

VOCABULARY, NEW_TOKENS = 97, 8
PAGE, CHECKPOINT = 16, 64


@cache
def whole_model():
    return tiny_model(VOCABULARY)


@cache
def expected(prompt: tuple[int, ...], count: int = NEW_TOKENS) -> list[int]:
    """Greedy tokens, whose choices must be clear enough for float32."""
    ids = torch.tensor([prompt])
    found = whole_model().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    assert min(float(-logits[0].topk(2).values.diff()) for logits in found.logits) > 1e-3
    return found.sequences[0, len(prompt) :].tolist()


def text(seed, length):
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_on(device, num_pages=60, budget=48, slots=16):
    config, weights = load(whole_model(), device, torch.float32)

    def greedy(logits):
        return logits.argmax(-1)

    return HybridEngine(config, weights, num_pages, PAGE, 256, budget, -1, greedy, checkpoint=CHECKPOINT, slots=slots)


def check(engine, requests):
    engine.serve(requests)
    for request in requests:
        assert request.output == expected(tuple(request.prompt), request.max_new_tokens)
    engine.reset()
    assert engine.cache.num_used_pages == 0
    assert sorted(engine.states.free) == list(range(engine.states.conv.shape[1]))


@pytest.mark.parametrize("budget", [7, 48, 500])
def test_texts_are_those_of_transformers(budget, device):
    """Prompts in chunks beside requests that decode."""
    lengths = (1, 90, 3, 150)
    check(engine_on(device, budget=budget), [Request(text(i, n), NEW_TOKENS, 2 * i) for i, n in enumerate(lengths)])


def test_a_prompt_goes_on_from_a_checkpoint_of_another(device):
    document = text(1, 140)
    prompts = [document + text(2, 3), document + text(3, 9), document[:70] + text(4, 5), document[:40]]
    requests = [Request(prompt, NEW_TOKENS, 12 * i) for i, prompt in enumerate(prompts)]
    check(engine_on(device), requests)
    assert [request.shared for request in requests] == [0, 128, 64, 0]


def test_a_text_that_is_done_is_a_prefix_to_go_on_from(device):
    first = Request(text(5, 60), 10)
    engine = engine_on(device)
    engine.serve([first])
    second = Request(first.prompt + first.output + text(6, 4), NEW_TOKENS)
    engine.serve([second])
    assert second.shared == CHECKPOINT
    assert second.output == expected(tuple(second.prompt))


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_checkpoints_yield_to_requests(slots, device):
    document = text(1, 140)
    prompts = [document + text(2, 3), text(7, 30), document + text(3, 9), text(8, 70)]
    check(engine_on(device, slots=slots), [Request(prompt, NEW_TOKENS, i) for i, prompt in enumerate(prompts)])


def test_requests_wait_for_pages(device):
    check(engine_on(device, num_pages=12), [Request(text(10 + i, 100), NEW_TOKENS) for i in range(3)])


def test_a_checkpoint_is_a_multiple_of_pages():
    config, weights = load(whole_model(), "cpu", torch.float32)
    with pytest.raises(ValueError, match="checkpoint: got 40; allowed: multiples of 16"):
        HybridEngine(config, weights, 10, PAGE, 64, 8, -1, None, checkpoint=40)


def test_the_command_compares_with_transformers(capsys):
    assert main(["--requests", "2", "--max-new-tokens", "4"]) == 0
    assert "the same tokens as transformers" in capsys.readouterr().out
