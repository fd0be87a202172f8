"""Batches that only the device knows, run without a plan: block tables and lengths in every encoding."""

import pytest
import torch

from flashinfer.ops.attention.direct import run_direct
from flashinfer.ops.attention.options import PlanOptions
from flashinfer.ops.attention.tables import Table, block_table
from flashinfer.ops.kv_layout import paged_views, ragged_views
from flashinfer.testing import generate
from tests.ops.attention.cases import backends, check
from tests.ops.attention.oracle import Options

HALF = torch.float16
NO_PAGE = -(1 << 20)


def blocks(paged, kv_lens, width, *, gap=0):
    """A rectangular block table of a paged cache, with what is no page past each request's end."""
    device = paged.indices.device
    table = torch.full((len(kv_lens), width + gap), NO_PAGE, dtype=torch.int32, device=device)
    ends = paged.indptr.tolist()
    for i, (first, last) in enumerate(zip(ends, ends[1:])):
        table[i, : last - first] = paged.indices[first:last]
    return table[:, :width]


def lens(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def run(x, table, kv, views, backend, *, page_size=0, longest_q=0, o: Options, **call):
    asked = PlanOptions(
        source="paged" if page_size else "ragged", num_qo_heads=x.q.shape[1], num_kv_heads=x.k.shape[1],
        head_dim_qk=x.q.shape[2], head_dim_vo=x.v.shape[2], page_size=page_size, q_dtype=x.q.dtype,
        kv_dtype=x.k.dtype, causal=o.causal, window_left=o.window_left,
    ).checked()  # fmt: skip
    return run_direct(
        asked, table, x.q, kv, views, kv_tokens=4096, longest_q=longest_q, backend=backend, return_lse=True, **call
    )


@pytest.mark.parametrize(("encoding", "layout"), (("indptr", "NHD"), ("packed", "HND"), ("uniform", "NHD")))
def test_block_tables(encoding, layout, device):
    kv = [5, 0, 40, 33, 64, 1]
    qo = [2] * 6 if encoding == "uniform" else [3, 0, 17, 1, 2, 0]
    x = generate.ragged_batch(qo, kv, 4, 2, 64, dtype=HALF, device=device)
    paged = generate.paged(x, 8, layout)
    queries = {
        "indptr": dict(qo_indptr=x.qo_indptr), "packed": dict(q_lens=lens(qo, device)), "uniform": dict(q_len=2),
    }[encoding]  # fmt: skip
    table = block_table(blocks(paged, kv, 9, gap=3), lens(kv, device), **queries)
    views = lambda cache: paged_views(cache, layout)
    for o in (Options(causal=True), Options(causal=True, window_left=7)):
        for backend in backends(device):
            check(run(x, table, paged.kv_cache, views, backend, page_size=8, longest_q=17, o=o), x, o)


@pytest.mark.parametrize("source", ("paged", "ragged", "packed"))
def test_lengths_beside_offsets(source, device):
    """A request of kv_lens keys, of the more that its entries hold."""
    qo, kv, room = [3, 1, 0, 9], [5, 0, 16, 33], [8, 8, 16, 40]
    x = generate.ragged_batch(qo, kv, 4, 2, 32, dtype=HALF, device=device)
    page_size = 8 if source == "paged" else 0
    for backend in backends(device):
        if source == "packed":
            table, cache = Table(x.qo_indptr, kv_lens=lens(kv, device)), (x.k, x.v)
        elif source == "ragged":
            cache = tuple(torch.full((sum(room), 2, 32), float("nan"), dtype=HALF, device=device) for _ in "kv")
            at = 0
            for n, most, first in zip(kv, room, x.kv_indptr.tolist()):
                for t, rows in zip(cache, (x.k, x.v)):
                    t[at : at + n] = rows[first : first + n]
                at += most
            table = Table(x.qo_indptr, generate.indptr(room, device), kv_lens=lens(kv, device))
        else:
            paged = generate.paged(x, 8)
            cache = paged_views(paged.kv_cache, "NHD")
            indices, at = [], paged.indptr.tolist()
            for i, most in enumerate(room):
                used = paged.indices[at[i] : at[i + 1]].tolist()
                indices += used + [NO_PAGE] * (most // 8 + 1 - len(used))
            table = Table(
                x.qo_indptr, generate.indptr([n // 8 + 1 for n in room], device),
                kv_indices=lens(indices, device), kv_lens=lens(kv, device),
            )  # fmt: skip
        o = Options(causal=True)
        check(run(x, table, cache, lambda kv: ragged_views(*kv, "NHD") if not page_size else kv, backend,
                  page_size=page_size, o=o), x, o)  # fmt: skip


def test_kept_batches_serve_others(device):
    """One kind, one call after another: larger, smaller, none, other tables in the same memory."""
    shared = torch.zeros(8, 8, dtype=torch.int32, device=device)
    for batch, longest in ((2, 20), (5, 64), (3, 9), (0, 0), (5, 63)):
        kv = [max(longest - 3 * i, 0) for i in range(batch)]
        x = generate.ragged_batch([1] * batch, kv, 4, 2, 64, dtype=HALF, device=device)
        paged = generate.paged(x, 8)
        shared[:batch] = blocks(paged, kv, 8)
        table = block_table(shared[:batch], lens(kv, device), q_len=1)
        for backend in backends(device):
            out = run(x, table, paged.kv_cache, lambda c: paged_views(c, "NHD"), backend, page_size=8, o=Options())
            if batch:
                check(out, x, Options())
            else:
                assert out[0].shape == (0, 4, 64)


def test_what_only_the_device_knows_is_checked_in_debug_mode(device, monkeypatch):
    kv = [5, 0, 40]
    x = generate.ragged_batch([1] * 3, kv, 4, 2, 64, dtype=HALF, device=device)
    paged = generate.paged(x, 8)
    tables, views = blocks(paged, kv, 6), lambda cache: paged_views(cache, "NHD")
    call = lambda t, n, **q: run(
        x, block_table(t, lens(n, device), **q), paged.kv_cache, views, "auto", page_size=8, o=Options()
    )
    call(tables, kv, q_len=1)
    monkeypatch.setenv("FLASHINFER_DEBUG", "1")
    check(call(tables, kv, q_len=1), x, Options())
    for name, lengths in (("kv_lens", [5, 0, 49]), ("kv_indices", [5, 1, 40]), ("kv_indices", [9, 0, 40])):
        with pytest.raises(ValueError, match=f"^{name}:"):
            call(tables, lengths, q_len=1)
    with pytest.raises(ValueError, match="^qo_indptr:"):
        call(tables, kv, q_lens=lens([1, 2, 1], device))


@pytest.mark.gpu
def test_captured(device):
    """A graph follows tables and lengths that change in place, and out-lives what was allocated in its capture."""
    kv = [5, 0, 40, 33]
    x = generate.ragged_batch([1] * 4, kv, 8, 2, 64, dtype=HALF, device=device)
    paged = generate.paged(x, 8)
    tables = torch.zeros(4, 8, dtype=torch.int32, device=device)
    lengths = torch.ones(4, dtype=torch.int32, device=device)
    table = block_table(tables, lengths, q_len=1)
    views = lambda c: paged_views(c, "NHD")
    call = lambda: run(x, table, paged.kv_cache, views, "auto", page_size=8, o=Options())
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    tables.copy_(blocks(paged, kv, 8))
    lengths.copy_(lens(kv, device))
    torch.empty(1 << 20, device=device).fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    check(captured, x, Options())
