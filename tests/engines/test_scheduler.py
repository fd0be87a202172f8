"""A scheduler's loop as engines run one: chunked prefill, mixed batches, shared prefixes, slots that are used again.

Each convention has the tables and the cache of one engine; what comes out of every step is compared with attention of
the request's whole history in float64.
"""

import pytest
import torch

import flashinfer
from flashinfer.testing.compare import assert_close
from tests.ops.attention import oracle
from tests.ops.attention.cases import workspace

HEADS, DIM, CHUNK = (4, 2), 32, 6
# Prompt, tokens to decode, and the request and number of tokens of a shared prefix.
REQUESTS = [(9, 3, None, 0), (4, 1, None, 0), (14, 2, None, 0), (11, 2, 0, 8), (1, 5, None, 0)]
OPTIONS = oracle.Options(causal=True)


def ints(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


class Request:
    def __init__(self, number, device):
        self.prompt, self.decodes, self.parent, self.shared = REQUESTS[number]
        total = self.prompt + self.decodes
        rows = lambda heads: torch.randn(total, heads, DIM, dtype=torch.float16, device=device)
        self.q, self.k, self.v = rows(HEADS[0]), rows(HEADS[1]), rows(HEADS[1])
        # Tokens in the cache, and the slots they are in.
        self.done, self.slots = 0, []

    @property
    def is_decoding(self):
        return self.done >= self.prompt

    @property
    def is_over(self):
        return self.done == len(self.q)

    def next(self):
        """Tokens of the next step."""
        return 1 if self.is_decoding else min(CHUNK, self.prompt - self.done)


class SGLang:
    """Pages of one token without an axis for them, tables on the device, wrappers planned by begin_forward."""

    page_size = 1

    def __init__(self, device):
        self.device = device
        self.cache = tuple(torch.full((40, HEADS[1], DIM), float("nan"), dtype=torch.float16, device=device)
                           for _ in range(2))  # fmt: skip
        self.prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend="fa2")
        self.decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), "NHD", use_tensor_cores=True)

    def write(self, k, v, slots):
        for cache, rows in zip(self.cache, (k, v)):
            cache[slots.to(self.device)] = rows

    def attend(self, batch, q, counts):
        """Rows of q for each request: prefills and decodes in two calls, as they stand."""
        outs = []
        for kind, requests, rows in batch:
            lens = [r.done + n for r, n in zip(requests, counts[kind])]
            kv_indptr = ints([0, *torch.tensor(lens).cumsum(0).tolist()], self.device)
            indices = ints([slot for r, n in zip(requests, lens) for slot in r.slots[:n]], self.device)
            last = torch.ones(len(requests), dtype=torch.int32, device=self.device)
            if kind == "decode":
                self.decode.begin_forward(kv_indptr, indices, last, *HEADS, DIM, 1, data_type=torch.float16)
                outs.append(self.decode.forward(q[rows], self.cache))
            else:
                qo_indptr = ints([0, *torch.tensor(counts[kind]).cumsum(0).tolist()], self.device)
                self.prefill.begin_forward(qo_indptr, kv_indptr, indices, last, *HEADS, DIM, 1,
                                           q_data_type=torch.float16)  # fmt: skip
                outs.append(self.prefill.forward(q[rows], self.cache, causal=True))
        return torch.cat(outs)


class VLLM(SGLang):
    """Decodes first, one page table of the whole batch on the host, whose offsets each wrapper gets a slice of."""

    page_size = 4

    def __init__(self, device, kv_layout="HND"):
        super().__init__(device)
        shape = (10, 2, HEADS[1], 4, DIM) if kv_layout == "HND" else (10, 2, 4, HEADS[1], DIM)
        self.layout, self.one = kv_layout, torch.full(shape, float("nan"), dtype=torch.float16, device=device)
        self.prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), kv_layout)
        self.decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), kv_layout)

    def write(self, k, v, slots):
        tokens = self.one.transpose(2, 3) if self.layout == "HND" else self.one
        for i, rows in enumerate((k, v)):
            tokens[(slots // 4).to(self.device), i, (slots % 4).to(self.device)] = rows

    def attend(self, batch, q, counts):
        everyone = [(r, n) for kind, requests, _ in batch for r, n in zip(requests, counts[kind])]
        pages = [[slot // 4 for slot in r.slots[: r.done + n : 4]] for r, n in everyone]
        kv_indptr = ints([0, *torch.tensor([len(p) for p in pages]).cumsum(0).tolist()])
        qo_indptr = ints([0, *torch.tensor([n for _, n in everyone]).cumsum(0).tolist()])
        last = ints([(r.done + n - 1) % 4 + 1 for r, n in everyone])
        indices = ints([page for p in pages for page in p], self.device)
        decodes = sum(len(requests) for kind, requests, _ in batch if kind == "decode")
        out = torch.full_like(q, float("nan"))
        if decodes:
            self.decode.plan(kv_indptr[: decodes + 1], indices, last[:decodes], *HEADS, DIM, 4, data_type=torch.float16)
            self.decode.run(q[:decodes], self.one, out=out[:decodes])
        if decodes < len(everyone):
            offsets = qo_indptr[decodes:] - qo_indptr[decodes], kv_indptr[decodes:]
            self.prefill.plan(*offsets, indices, last[decodes:], *HEADS, DIM, 4, causal=True, q_data_type=torch.float16)
            self.prefill.run(q[decodes:], self.one, out=out[decodes:])
        return out


class Mixed(VLLM):
    """The same tables, and one launch for prefills and decodes."""

    def __init__(self, device):
        super().__init__(device, "NHD")
        self.both = flashinfer.BatchAttention("NHD", device)

    def attend(self, batch, q, counts):
        everyone = [(r, n) for kind, requests, _ in batch for r, n in zip(requests, counts[kind])]
        pages = [[slot // 4 for slot in r.slots[: r.done + n : 4]] for r, n in everyone]
        counted = [n for _, n in everyone], [len(p) for p in pages]
        offsets = ([0, *torch.tensor(x).cumsum(0).tolist()] for x in counted)
        tables = (ints(x) for x in (*offsets, sum(pages, []), [r.done + n for r, n in everyone]))
        self.both.plan(*tables, *HEADS, DIM, DIM, 4, causal=True, q_data_type=torch.float16, kv_data_type=torch.float16)
        return self.both.run(q, self.one)[0]


def check(request, count, out):
    """The next `count` rows of a request against attention over its whole history."""
    end = request.done + count
    rows = request.q[request.done : end], request.k[:end], request.v[:end]
    truth = oracle.request(*(t.double() for t in rows), OPTIONS, torch.float64)[0]
    same = oracle.request(*rows, OPTIONS, torch.float16)[0]
    assert_close(out, same.to(out.dtype), truth, "out")


@pytest.mark.parametrize("engine", [SGLang, VLLM, Mixed], ids=lambda engine: engine.__name__)
def test_a_loop_of_steps(engine, device):
    engine = engine(device)
    size = engine.page_size
    requests = [Request(i, device) for i in range(len(REQUESTS))]
    for r in requests:
        if r.parent is not None:
            for mine, others in ((r.k, requests[r.parent].k), (r.v, requests[r.parent].v)):
                mine[: r.shared] = others[: r.shared]
    free, waiting, running, steps = list(range(40 // size)), list(requests), [], 0
    users, shared = {}, 0
    while waiting or running:
        steps += 1
        while waiting and len(running) < 3:
            r = waiting.pop(0)
            running.append(r)
            if r.parent is not None and requests[r.parent].done >= r.shared and requests[r.parent].slots:
                # The prefix is in the cache: its pages are shared, and its tokens are not computed again.
                r.slots, r.done = requests[r.parent].slots[: r.shared], r.shared
                shared += r.shared
                for page in {slot // size for slot in r.slots}:
                    users[page] += 1
        running.sort(key=lambda r: not r.is_decoding)
        groups = [(kind, [r for r in running if r.is_decoding == (kind == "decode")]) for kind in ("decode", "prefill")]
        counts = {kind: [r.next() for r in group] for kind, group in groups}
        batch, at = [], 0
        for kind, group in groups:
            if group:
                batch.append((kind, group, slice(at, at + sum(counts[kind]))))
                at += sum(counts[kind])
        taking = [(r, n) for kind, group, _ in batch for r, n in zip(group, counts[kind])]
        for r, n in taking:
            while len(r.slots) < r.done + n:
                page = free.pop()
                users[page] = 1
                r.slots += range(page * size, (page + 1) * size)
        tokens = [slice(r.done, r.done + n) for r, n in taking]
        slots = torch.tensor([slot for (r, _), part in zip(taking, tokens) for slot in r.slots[part]])
        q, k, v = (torch.cat([getattr(r, name)[part] for (r, _), part in zip(taking, tokens)]) for name in "qkv")
        engine.write(k, v, slots)
        out = engine.attend(batch, q, counts)
        for (r, n), rows in zip(taking, out.split([n for _, n in taking])):
            check(r, n, rows)
            r.done += n
        for r in [r for r in running if r.is_over]:
            running.remove(r)
            for page in {slot // size for slot in r.slots}:
                users[page] -= 1
                if not users[page]:
                    free.append(page)
            r.slots = []
    assert steps >= 6 and shared == 8 and len(free) == 40 // size
