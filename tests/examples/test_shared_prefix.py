"""The shared-prefix example against a plain pass over the whole text of each sample, in float64, with no cache."""

import pytest
import torch

from examples import shared_prefix
from examples.shared_prefix import DIM, HEADS, KV_HEADS, Model


def continued(model, prompt, first, tokens):
    """One sample, from the definition of attention; and the least lead of a chosen token over the next best."""
    m = Model(*(t.cpu().double() for t in vars(model).values()))
    text, lead = [first], float("inf")
    while len(text) < tokens:
        x = m.embedding[torch.tensor(prompt + text)]
        q = (x[-1] @ m.query).view(KV_HEADS, HEADS // KV_HEADS, DIM)
        k, v = ((x @ w).view(-1, KV_HEADS, DIM) for w in (m.key, m.value))
        p = torch.softmax(torch.einsum("hgd,nhd->hgn", q, k) * DIM**-0.5, -1)
        out = torch.einsum("hgn,nhd->hgd", p, v).flatten()
        logits = (x[-1] + out @ m.output) @ m.embedding.T
        best, second = logits.topk(2).values.tolist()
        lead = min(lead, best - second)
        text.append(int(logits.argmax()))
    return text, lead


@pytest.mark.parametrize("page_size", (1, 5, 16))
def test_samples_are_those_of_the_whole_text(page_size, device):
    model = Model.random(device)
    prompt, first = torch.randint(256, (37,)).tolist(), [3, 77, 200]
    expected, leads = zip(*(continued(model, prompt, t, 12) for t in first))
    # Else rounding could choose.
    assert min(leads) > 1e-3
    assert shared_prefix.generate(model, prompt, first, 12, page_size) == list(expected)


def test_the_program_runs(device, capsys):
    shared_prefix.main(["--samples", "3", "--prompt", "20", "--tokens", "5", "--device", str(device)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(len(line.split()) == 5 for line in lines[:3])
    assert lines[3].startswith("keys in the cache: 35 instead of 75")
