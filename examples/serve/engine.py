"""Continuous batching over a paged KV cache: admission, chunked prefill, prefix reuse by page sharing, sampling."""

import time
from collections import namedtuple
from dataclasses import dataclass, field

import torch

import flashinfer

from .model import Gemma3, PagedAttention


@dataclass(eq=False)
class Request:
    """A prompt that becomes a text. `sequence` holds the keys and values of its first tokens, from admission on.

    `arrival` is a step.
    """

    prompt: list[int]
    max_new_tokens: int
    arrival: int = 0
    output: list[int] = field(default_factory=list)
    sequence: flashinfer.core.Sequence = field(init=False, repr=False)
    shared: int = 0

    @property
    def pending(self) -> int:
        """Tokens still to be computed: one in decode, more in prefill."""
        return len(self.prompt) + len(self.output) - self.sequence.length

    @property
    def limit(self) -> int:
        """Most tokens that the sequence can hold: the last one sampled is never fed back."""
        return len(self.prompt) + self.max_new_tokens - 1


Step = namedtuple("Step", "seconds prompt_tokens new_tokens used_pages shared_pages")


class Engine:
    """Serves requests that arrive over time; time is counted in steps, so that a run can be repeated.

    A step takes at most `token_budget` tokens: one of each decoding request, then prompts, in chunks, in the order of
    admission. A request enters when there are pages for its longest text, so none is ever stopped halfway. Those that
    are done leave their pages behind, as a prefix cache, until the room is needed.
    """

    def __init__(self, config, weights: dict, num_pages, page_size, max_length, token_budget, eos_id, sample):
        self._build(config, weights, num_pages, page_size, max_length)
        # Prefixes are shared in multiples of so many tokens.
        self.grain = page_size
        self.longest = min(max_length, num_pages * page_size)
        self.token_budget, self.eos_id, self.sample = token_budget, eos_id, sample
        self.waiting, self.running, self.finished, self.steps, self.clock = [], [], [], [], 0

    def _build(self, config, weights: dict, num_pages: int, page_size: int, max_length: int) -> None:
        """Make the cache, the model and its attention."""
        layers, like = len(weights["layers"]), weights["token_embd"]
        sizes = layers, config.num_kv_heads, config.head_dim, page_size, num_pages
        self.cache = flashinfer.PagedKVCache(*sizes, device=like.device, data_type=like.dtype)
        self.model = Gemma3(config, weights, max_length)
        self.attention = PagedAttention(config, self.cache)

    def serve(self, requests: list[Request], after_step=lambda: None) -> None:
        """Run until every request is done."""
        for request in requests:
            self.check(request)
        self.waiting += sorted(requests, key=lambda request: request.arrival)
        while self.waiting or self.running:
            self.step()
            after_step()

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that can never be served."""
        if not request.prompt or request.limit > self.longest:
            raise ValueError(f"request: got up to {request.limit} tokens; allowed: a prompt, up to {self.longest}")

    def cancel(self, request: Request) -> None:
        """End a request where it is; what it has computed stays in the prefix cache."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self._finish(request)

    def choose(self, logits: torch.Tensor, ready: list[Request]) -> list[int]:
        """The next token of each request in `ready`."""
        return self.sample(logits).tolist()

    def reset(self) -> None:
        """Forget the requests that are done, and with them the prefix cache."""
        for request in self.finished:
            self._forget(request)
        self.finished, self.steps, self.clock = [], [], 0

    @torch.inference_mode()
    def step(self) -> None:
        start = time.perf_counter()
        self._admit()
        self.clock += 1
        batch = self._schedule()
        if not batch:
            return
        prompt_tokens = sum(max(min(count, len(r.prompt) - r.sequence.length), 0) for r, count in batch)
        ready = [request for request, count in batch if count == request.pending]
        logits = self._forward(batch, ready)
        for request, token in zip(ready, self.choose(logits, ready) if ready else ()):
            request.output.append(token)
            if token == self.eos_id or len(request.output) == request.max_new_tokens:
                self._finish(request)
        pages = self.cache.num_used_pages, self.cache.num_shared_pages
        self.steps.append(Step(time.perf_counter() - start, prompt_tokens, len(ready), *pages))

    def _finish(self, request: Request) -> None:
        """A request runs no more; what it has computed is a prefix for others."""
        self.running.remove(request)
        self.finished.append(request)

    def _forget(self, request: Request) -> None:
        """Give back what a request has kept as a prefix for others."""
        self.cache.free(request.sequence)

    def _admit(self) -> None:
        for request in [request for request in self.waiting if request.arrival <= self.clock]:
            donor, shared, soon = self._longest_prefix(request.prompt)
            if soon > shared:
                continue  # another request is computing more of this prefix: wait, and do not compute it twice
            if not self._make_room(request, donor, shared):
                return
            request.shared = shared
            self.waiting.remove(request)
            self.running.append(request)

    def _longest_prefix(self, prompt: list[int]) -> tuple[Request | None, int, int]:
        """Who has most of a prompt, how many tokens of it, and how many a running request will have soon.

        Short of the prompt's last token, whose logits are wanted.
        """
        donor, shared, soon = None, 0, 0
        for other in self.finished + self.running:
            common = common_prefix(prompt[:-1], other.prompt + other.output)
            computed = self._shareable(other, common)
            if computed > shared:
                donor, shared = other, computed
            ahead = common // self.grain * self.grain
            if other in self.running and other.sequence.length < ahead:
                soon = max(soon, ahead)
        return donor, shared, soon

    def _shareable(self, donor: Request, common: int) -> int:
        """How many of a donor's first `common` tokens can be shared: whole pages, which are never written again."""
        return min(common, donor.sequence.length) // self.grain * self.grain

    def _make_room(self, request: Request, donor: Request | None, shared: int) -> bool:
        """Give the request its sequence if it can have pages for its longest text; drop prefixes to that end."""
        if donor in self.finished:
            self.finished.append(self.finished.pop(self.finished.index(donor)))
        if donor:
            request.sequence = self.cache.fork(donor.sequence, shared)
        else:
            request.sequence = self.cache.begin_forward(0)
            self.cache.end_forward(request.sequence)
        # The donor is dropped last, and only if no running request can make room by finishing.
        while self._lacks_pages(request) and self.finished and (self.finished[0] is not donor or not self.running):
            self._forget(self.finished.pop(0))
        if self._lacks_pages(request):
            self.cache.free(request.sequence)
            return False
        return True

    def _lacks_pages(self, request: Request) -> bool:
        """Whether the free pages are too few for what the running requests, and this one, may still take."""
        growing = (*self.running, request)
        claims = sum(self.cache.pages_needed(r.limit - r.sequence.length, r.sequence) for r in growing)
        return claims > self.cache.num_free_pages

    def _schedule(self) -> list[tuple[Request, int]]:
        """Which requests take part in this step, with how many tokens: decoding ones first."""
        batch, budget = [], self.token_budget
        for request in sorted(self.running, key=lambda request: request.pending > 1):
            if budget:
                batch.append((request, min(self._most(request), budget)))
                budget -= batch[-1][1]
        return batch

    def _most(self, request: Request) -> int:
        """Most tokens that one step may compute of a request."""
        return request.pending

    def _forward(self, batch: list[tuple[Request, int]], ready: list[Request]) -> torch.Tensor:
        """Logits of the last token of each request in `ready`; the batch's tokens enter their sequences."""
        tokens, rows = [], []
        for request, count in batch:
            start = request.sequence.length
            tokens += (request.prompt + request.output)[start : start + count]
            if request in ready:
                rows.append(len(tokens) - 1)
            self.cache.begin_forward(count, request.sequence)
        positions = self.attention.plan([request.sequence for request, _ in batch])
        tokens, rows = (torch.tensor(ids, dtype=torch.int64, device=self.cache.device) for ids in (tokens, rows))
        logits = self.model(tokens, positions, self.attention, rows)
        for request, _ in batch:
            self.cache.end_forward(request.sequence)
        return logits


def common_prefix(a: list[int], b: list[int]) -> int:
    """Tokens up to the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def top_p(logits: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor:
    """Sample from the smallest set of tokens whose probabilities sum to p (Holtzman et al., arXiv:1904.09751)."""
    return flashinfer.top_p_sampling_from_probs(flashinfer.softmax(logits), p, generator=generator)
