"""An indexer's scores against their definition in float64, by the reference and by the kernel."""

import pytest
import torch

from flashinfer._core.target import target_of
from flashinfer.attn_scores import compute_paged_mqa_logits_schedule
from flashinfer.ops.attention import mqa_logits as room
from flashinfer.paged_mqa import fp8_paged_mqa_logits
from flashinfer.testing.compare import assert_close
from tests.ops.tensor_cores import fp8_dots

FP8 = torch.float8_e4m3fn


class Case:
    """A batch, its keys in pages in random order; bytes that are nobody's are NaN."""

    def __init__(self, lens, heads=8, dim=64, page=16, tokens=1, gap=0, device="cpu"):
        batch, pages = len(lens), [-(-n // page) for n in lens]
        self.page, self.dim, total = page, dim, sum(pages) + 3
        self.keys = torch.randn(total, page, dim).to(FP8)
        self.scales = torch.rand(total, page) * 2
        body = torch.cat((self.keys.view(torch.uint8).view(total, -1), self.scales.view(torch.uint8)), 1)
        memory = torch.full((total, page * (dim + 4) + gap), 127, dtype=torch.uint8)
        memory[:, : body.shape[1]] = body
        self.memory = memory.to(device)
        self.cache = self.memory[:, : body.shape[1]].unflatten(1, (page, 1, dim + 4))
        order = torch.randperm(total)[: sum(pages)]
        self.tables = torch.full((batch, max(pages + [1])), -1, dtype=torch.int32)
        start = 0
        for row, n in zip(self.tables, pages):
            row[:n] = order[start : start + n]
            start += n
        self.q = torch.randn(batch, tokens, heads, dim).to(FP8)
        self.weights = torch.randn(batch * tokens, heads)
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.device = device

    def arguments(self, context, lens=None, **others):
        tensors = (self.q, self.weights, self.lens if lens is None else lens, self.tables)
        q, weights, lens, tables = (t.to(self.device) for t in tensors)
        meta = compute_paged_mqa_logits_schedule(lens.flatten())
        return dict(q=q, kv_cache=self.cache, weights=weights, context_lens=lens, block_table=tables,
                    schedule_meta=meta, max_context_len=context) | others  # fmt: skip

    def truth(self, dtype, context, seen=None):
        """[rows, context]: of all keys of a request, or of `seen` of each row with -inf after them."""
        batch, tokens = self.q.shape[:2]
        out = torch.full((batch * tokens, context), float("-inf") if seen is not None else 0.0, dtype=dtype)
        for row in range(batch * tokens):
            i, t = divmod(row, tokens)
            count = min(int(self.lens[i]) if seen is None else int(seen[row]), context)
            for at in range(max(count, 0)):
                page, slot = int(self.tables[i, at // self.page]), at % self.page
                dots = fp8_dots(self.q[i, t], self.keys[page, slot, :, None], dtype, torch.device(self.device))[:, 0]
                out[row, at] = (dots.relu() * self.weights[row].to(dtype)).sum() * self.scales[page, slot].to(dtype)
        return out


def run_by(backend):
    """The op with a variant of our choice; the portable one where that does not take the problem."""
    takes = {variant.name: variant.refuses for variant in room.mqa_logits.variants}

    def op(problem, device):
        refused = takes[backend](problem, target_of(device))
        return room.mqa_logits(problem, device, "portable" if refused else backend)

    return op


def run(backend, arguments, monkeypatch):
    """Through the public function, with a backend of our choice."""
    if backend != "auto":
        monkeypatch.setattr("flashinfer.paged_mqa.mqa_logits", run_by(backend))
    return fp8_paged_mqa_logits(**arguments)


CASES = {
    "one query": dict(lens=[33, 0, 1, 64, 17]),
    "several queries": dict(lens=[33, 3, 65], tokens=3, heads=5, page=5),
    "page 1": dict(lens=[7, 19], page=1, dim=48, tokens=2),
    "pages apart": dict(lens=[40, 100], page=8, gap=64, heads=64, dim=128),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("number", (0, 1, 2))
def test_logits(number, case, device, monkeypatch):
    x = Case(**CASES[case], device=device)
    backend = ("auto", "portable", "sm90")[number]
    context = max(CASES[case]["lens"]) + 9
    tokens = x.q.shape[1]
    got = run(backend, x.arguments(context), monkeypatch).cpu()
    assert got.shape == (len(x.lens) * tokens, context) and got.dtype == torch.float32
    written = torch.arange(context)[None] < x.lens.repeat_interleave(tokens)[:, None]
    same, truth = (x.truth(dtype, context) for dtype in (torch.float32, torch.float64))
    assert_close(torch.where(written, got, 0.0), same, truth, "logits")
    seen = (x.lens[:, None] - torch.arange(tokens - 1, -1, -1)).flatten()
    got = run(backend, x.arguments(context, clean_logits=True), monkeypatch).cpu()
    same, truth = (x.truth(dtype, context, seen) for dtype in (torch.float32, torch.float64))
    assert_close(got, same, truth, "clean logits")


@pytest.mark.parametrize("backend", ("auto", "portable", "sm90"))
def test_lengths_of_queries_and_a_short_result(backend, device, monkeypatch):
    x = Case([33, 20], tokens=2, device=device)
    each = torch.tensor([[33, 12], [0, 20]], dtype=torch.int32)
    got = run(backend, x.arguments(25, each, clean_logits=True), monkeypatch).cpu()
    same, truth = (x.truth(dtype, 25, each.flatten()) for dtype in (torch.float32, torch.float64))
    assert_close(got, same, truth, "logits")
    assert run(backend, x.arguments(0), monkeypatch).shape == (4, 0)


@pytest.mark.parametrize("clean", (False, True))
@pytest.mark.parametrize("backend", ("auto", "portable", "sm90"))
def test_lengths_past_the_table(backend, clean, device, monkeypatch):
    """A table is a view of a wider one. A card's lengths are not looked at, and what lies beside the view is not read:
    those keys are not there."""
    monkeypatch.setattr("flashinfer.paged_mqa.check_pages", lambda *_: None)
    x = Case([48, 33], device=device)
    arguments = x.arguments(48, clean_logits=clean)
    arguments["block_table"] = arguments["block_table"][:, :2]
    got = run(backend, arguments, monkeypatch).cpu()
    same, truth = (x.truth(dtype, 32) for dtype in (torch.float32, torch.float64))
    assert_close(got[:, :32], same, truth, "logits")
    if clean:
        assert (got[:, 32:] == -torch.inf).all()


def test_no_requests():
    x = Case([5])
    x.q, x.weights, x.lens, x.tables = x.q[:0], x.weights[:0], x.lens[:0], x.tables[:0]
    assert fp8_paged_mqa_logits(**x.arguments(9)).shape == (0, 9)


def test_a_schedule():
    lens = torch.tensor([5, 9], dtype=torch.int32)
    meta = compute_paged_mqa_logits_schedule(lens, torch.device("cpu"), next_n=2)
    assert meta.dtype == torch.int32 and meta.shape[1] == 2
    out = torch.empty_like(meta)
    assert compute_paged_mqa_logits_schedule(lens, "cpu", out=out) is out
    for argument, given in (("variant", dict(variant="fp6")), ("next_n", dict(next_n=0)), ("out", dict(out=lens))):
        with pytest.raises(ValueError, match=argument):
            compute_paged_mqa_logits_schedule(lens, "cpu", **given)


BAD = {
    "q": lambda x: dict(q=x.q.float()),
    "q: ": lambda x: dict(q=x.q[..., :24]),
    "kv_cache": lambda x: dict(kv_cache=x.cache[..., :60]),
    "weights": lambda x: dict(weights=x.weights[:, :3]),
    "weights: ": lambda x: dict(weights=x.weights.mT.contiguous()),
    "context_lens": lambda x: dict(context_lens=x.lens[:1]),
    "block_table": lambda x: dict(block_table=x.tables[:1]),
    "indices": lambda x: dict(indices=x.lens),
    "max_context_len": lambda x: dict(max_context_len=-1),
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_input_is_refused_by_name(argument):
    x = Case([5, 9])
    with pytest.raises(ValueError, match=argument):
        fp8_paged_mqa_logits(**x.arguments(16) | BAD[argument](x))


@pytest.mark.gpu
def test_a_captured_call_follows_its_lengths(device):
    x = Case([700, 31, 0, 257], heads=64, dim=128, page=64, device=device)
    arguments = x.arguments(1024, clean_logits=True)
    fp8_paged_mqa_logits(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fp8_paged_mqa_logits(**arguments)
    for lens in ([700, 31, 0, 257], [3, 1, 0, 200]):
        arguments["context_lens"].copy_(torch.tensor(lens))
        out.fill_(torch.nan)
        graph.replay()
        same, truth = (x.truth(dtype, 1024, lens) for dtype in (torch.float32, torch.float64))
        assert_close(out.cpu(), same, truth, "logits")
