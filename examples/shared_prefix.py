"""Parallel sampling: many continuations of one prompt. The cache holds the prompt's keys once; a step reads them once.

    python -m examples.shared_prefix --samples 8 --prompt 500

`MultiLevelCascadeAttentionWrapper` sees two levels. On the first, the queries of all samples are rows of one request
over the prompt's pages; on the second, each sample is a request over pages of its own. The model is one attention layer
with random weights: what matters is which keys are where.
"""

import argparse
from dataclasses import dataclass

import torch

import flashinfer

HEADS, KV_HEADS, DIM, VOCABULARY = 8, 2, 64, 256


@dataclass
class Model:
    """One layer of grouped-query attention between an embedding and its transpose. No position encoding."""

    embedding: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor

    @classmethod
    def random(cls, device="cpu", seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        width = HEADS * DIM
        normal = lambda *shape: (torch.randn(*shape, generator=generator) * shape[0] ** -0.5).to(device)
        kv = KV_HEADS * DIM
        return cls(normal(VOCABULARY, width) * 8, normal(width, width), normal(width, kv), normal(width, kv),
                   normal(width, width))  # fmt: skip


class Samples:
    """The cache of one prompt and its continuations: the prompt's pages, then `room` pages for each sample."""

    def __init__(self, prompt: int, samples: int, tokens: int, page_size: int, device):
        self.page_size, self.samples = page_size, samples
        self.prompt_pages, self.room = -(-prompt // page_size), -(-tokens // page_size)
        self.prompt, self.length = prompt, 0
        pages = self.prompt_pages + samples * self.room
        self.cache = torch.empty(pages, 2, page_size, KV_HEADS, DIM, device=device)
        self.device = device

    def tables(self):
        """Page table of the prompt, and of the samples: indptr, indices, tokens in the last page."""
        used = -(-self.length // self.page_size)
        own = torch.arange(self.samples)[:, None] * self.room + self.prompt_pages + torch.arange(used)
        prompt = _table([self.prompt_pages], torch.arange(self.prompt_pages), self.prompt, self.page_size)
        return prompt, _table([used] * self.samples, own.flatten(), self.length, self.page_size)

    def append(self, table, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
        """Write keys and values [requests, tokens, ...] at `positions` of the requests that `table` describes."""
        requests = torch.arange(len(keys)).repeat_interleave(keys.shape[1])
        positions = positions.repeat(len(keys))
        indptr, indices, last = (t.to(self.device) for t in table)
        flashinfer.append_paged_kv_cache(
            keys.reshape(-1, KV_HEADS, DIM), values.reshape(-1, KV_HEADS, DIM), requests.int().to(self.device),
            positions.int().to(self.device), self.cache, indices, indptr, last,
        )  # fmt: skip


def _table(pages, indices, length, page_size):
    indptr = torch.tensor([0, *pages]).cumsum(0).int()
    return indptr, indices.int(), torch.full((len(pages),), (length - 1) % page_size + 1, dtype=torch.int32)


def generate(model: Model, prompt: list[int], first: list[int], tokens: int, page_size: int = 16) -> list[list[int]]:
    """Continue `prompt` greedily by `tokens` tokens, once from each token of `first`."""
    device, samples = model.embedding.device, len(first)
    cache = Samples(len(prompt), samples, tokens, page_size, device)
    # With one layer, a key depends on its token alone.
    x = model.embedding[torch.tensor(prompt, device=device)]
    cache.append(cache.tables()[0], (x @ model.key)[None], (x @ model.value)[None], torch.arange(len(prompt)))

    workspace = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    attention = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace)
    together, apart = torch.tensor([0, samples]).int(), torch.arange(samples + 1).int()
    token, texts = torch.tensor(first, device=device), [[t] for t in first]
    for step in range(tokens - 1):
        x = model.embedding[token]
        cache.length += 1
        of_prompt, of_samples = cache.tables()
        cache.append(of_samples, (x @ model.key)[:, None], (x @ model.value)[:, None], torch.tensor([step]))
        indptr, pages, last = (list(level) for level in zip(of_prompt, of_samples))
        shape = HEADS, KV_HEADS, DIM, page_size
        attention.plan([together, apart], indptr, pages, last, *shape, q_data_type="float32")
        out = attention.run((x @ model.query).view(samples, HEADS, DIM), cache.cache)
        token = ((x + out.flatten(1) @ model.output) @ model.embedding.T).argmax(1)
        for text, t in zip(texts, token.tolist()):
            text.append(t)
    return texts


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.shared_prefix", description=str(__doc__).splitlines()[0])
    parser.add_argument("--samples", type=int, default=8, help="continuations (default 8)")
    parser.add_argument("--prompt", type=int, default=500, help="tokens of the prompt (default 500)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of a continuation (default 24)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a KV page (default 16)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    prompt = torch.randint(VOCABULARY, (args.prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    first = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))[: args.samples].tolist()
    for text in generate(Model.random(args.device), prompt, first, args.tokens, args.page_size):
        print(" ".join(map(str, text)))
    own = args.samples * args.tokens
    flat, shared = args.samples * args.prompt + own, args.prompt + own
    print(f"keys in the cache: {shared} instead of {flat}; the last step read as many, {flat / shared:.1f} times fewer")


if __name__ == "__main__":
    main()
