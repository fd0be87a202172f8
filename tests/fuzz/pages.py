"""Random calls of what writes and counts paged keys and values."""

import torch

import flashinfer
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from flashinfer.testing.fuzz import HEAD_DIMS, PAGE_SIZES, Call


def table_of(draw, lens, page_size):
    """(indptr, indices, last_page_len) as lists for requests of these lengths, and the number of pages with spares."""
    pages = [-(-n // page_size) for n in lens]
    total = sum(pages) + 3
    indptr = generate.indptr(pages).tolist()
    indices = torch.randperm(total)[: sum(pages)].tolist()
    return indptr, indices, [n - (used - 1) * page_size if used else 0 for n, used in zip(lens, pages)], total


def append(draw):
    page_size, (heads, dim) = draw.pick(*PAGE_SIZES), (draw.pick(1, 2, 5), draw.fitting(HEAD_DIMS, 100))
    dtype, layout = draw.pick(torch.float16, torch.bfloat16, torch.float8_e4m3fn), draw.pick("NHD", "HND")
    batch = draw.pick(0, 1, 3)
    lens = [draw.pick(1, 5, 24, 25, 60) for _ in range(batch)]
    new = [draw.integer(0, min(n, 9)) for n in lens]
    indptr, indices, last, total = table_of(draw, lens, page_size)
    shape = (total, 2, page_size, heads, dim) if layout == "NHD" else (total, 2, heads, page_size, dim)
    cache = draw.values(*shape, dtype=dtype, kinds=("normal",))
    key, value = (draw.tensor(sum(new), heads, dim, dtype=dtype, kinds=("normal",)) for _ in range(2))
    of, positions = [], []
    for request, (n, count) in enumerate(zip(lens, new)):
        of += [request] * count
        positions += range(n - count, n)
    expected = cache.clone()
    for row, (request, position) in enumerate(zip(of, positions)):
        page, slot = indices[indptr[request] + position // page_size], position % page_size
        for part, source in enumerate((key, value)):
            place = expected[page, part, slot] if layout == "NHD" else expected[page, part, :, slot]
            place.copy_(source[row])
    split = draw.chance()
    given = tuple(cache[:, part] for part in (0, 1)) if split else cache
    kind = torch.int32
    return Call(
        flashinfer.append_paged_kv_cache,
        dict(
            append_key=key, append_value=value, batch_indices=draw.ints(of, kind), positions=draw.ints(positions, kind),
            paged_kv_cache=given, kv_indices=draw.ints(indices, kind), kv_indptr=draw.ints(indptr, kind),
            kv_last_page_len=draw.ints(last, kind), kv_layout=layout,
        ),
        lambda result: assert_bitwise(cache, expected),
    )  # fmt: skip


def positions(draw):
    batch = draw.pick(0, 1, 3, 8)
    lens = draw.lengths(batch, 4097)
    new = [draw.integer(0, min(n, 50)) for n in lens]
    indptr = generate.indptr(new).tolist()
    of = [request for request, count in enumerate(new) for _ in range(count)]
    at = [n - count + i for n, count in zip(lens, new) for i in range(count)]

    def check(result):
        assert result[0].tolist() == of and result[1].tolist() == at

    arguments = dict(append_indptr=draw.ints(indptr, torch.int32), seq_lens=draw.ints(lens, torch.int32), nnz=sum(new))
    return Call(flashinfer.get_batch_indices_positions, arguments, check)


def lengths(draw):
    page_size, lens = draw.pick(*PAGE_SIZES), draw.lengths(draw.pick(0, 1, 5), 33333)
    indptr, _, last, _ = table_of(draw, lens, page_size)
    given = dict(kv_indptr=draw.ints(indptr, torch.int32), kv_last_page_len=draw.ints(last, torch.int32))

    def check(result):
        assert result.tolist() == lens

    return Call(flashinfer.get_seq_lens, given | dict(page_size=page_size), check)


FAMILIES = (append, positions, lengths)
