"""The paged cache's operations against loops over tokens and requests."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch

import flashinfer
from flashinfer.ops import page as room
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.norm.variants import in_turn, variant  # variant is a fixture

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, *FP8)
ARRANGED = list(product(("NHD", "HND"), ("pair", "tensor")))


@dataclass
class Scene:
    """New tokens, where they go, and a cache of random values whose pages lie in random order among unused ones."""

    key: torch.Tensor
    value: torch.Tensor
    batch_indices: torch.Tensor
    positions: torch.Tensor
    k_cache: torch.Tensor  # [pages, page_size, heads, dim], whatever the layout
    v_cache: torch.Tensor
    kv_indices: torch.Tensor
    kv_indptr: torch.Tensor
    kv_last_page_len: torch.Tensor

    @property
    def tables(self):
        return self.kv_indices, self.kv_indptr, self.kv_last_page_len

    def expected(self):
        """Both caches after the append, token by token."""
        k, v = self.k_cache.clone(), self.v_cache.clone()
        page_size = k.shape[1]
        for t, (request, position) in enumerate(zip(self.batch_indices.tolist(), self.positions.tolist())):
            if request < 0 or position < 0:
                continue
            page = int(self.kv_indices[int(self.kv_indptr[request]) + position // page_size])
            k[page, position % page_size] = self.key[t]
            v[page, position % page_size] = self.value[t]
        return k, v


def make(
    device, page_size=5, appended=(3, 0, 1, 9), lengths=(7, 4, 1, 11), heads=2, dims=(64, 64), dtype=torch.float16
):
    pages = [-(-n // page_size) for n in lengths]
    total = sum(pages) + 3
    starts = [n - a for n, a in zip(lengths, appended)]
    rows = [(i, start + j) for i, (start, a) in enumerate(zip(starts, appended)) for j in range(a)]
    rows = torch.tensor(rows, dtype=torch.int32, device=device).reshape(-1, 2)
    last = [n - (p - 1) * page_size if p else 0 for n, p in zip(lengths, pages)]
    return Scene(
        *(generate.randn(len(rows), heads, dim, dtype=dtype, device=device) for dim in dims),
        rows[:, 0].clone(),
        rows[:, 1].clone(),
        *(generate.randn(total, page_size, heads, dim, dtype=dtype, device=device) for dim in dims),
        torch.randperm(total)[: sum(pages)].to(torch.int32).to(device),
        generate.indptr(pages, device),
        torch.tensor(last, dtype=torch.int32, device=device),
    )


def append_and_check(x: Scene):
    """Append to both caches as a pair in layout NHD; they are what the loop gives, bit for bit."""
    k, v = x.expected()
    cache = x.k_cache, x.v_cache
    assert flashinfer.append_paged_kv_cache(x.key, x.value, x.batch_indices, x.positions, cache, *x.tables) is None
    assert_bitwise(x.k_cache, k, "keys")
    assert_bitwise(x.v_cache, v, "values")


@pytest.mark.parametrize(("page_size", "arranged"), in_turn([1, 5, 16, 128, 1024], ARRANGED))
def test_layouts(variant, device, page_size, arranged):
    kv_layout, arrangement = arranged
    x = make(device, page_size, appended=(3, 0, 17, 1, 1), lengths=(7, 4, 40, 1, 1025 if page_size == 1024 else 33))
    k, v = x.expected()
    caches = x.k_cache, x.v_cache
    if kv_layout == "HND":
        caches = tuple(c.transpose(1, 2).contiguous() for c in caches)
    cache = caches if arrangement == "pair" else torch.stack(caches, 1)
    flashinfer.append_paged_kv_cache(x.key, x.value, x.batch_indices, x.positions, cache, *x.tables, kv_layout)
    caches = cache if arrangement == "pair" else (cache[:, 0], cache[:, 1])
    if kv_layout == "HND":
        caches = tuple(c.transpose(1, 2) for c in caches)
    assert_bitwise(caches[0], k, "keys")
    assert_bitwise(caches[1], v, "values")


@pytest.mark.parametrize(("dtype", "dim"), in_turn(DTYPES, [1, 7, 72, 128]), ids=str)
def test_dtypes(variant, device, dtype, dim):
    append_and_check(make(device, heads=3, dims=(dim, dim), dtype=dtype))


@pytest.mark.parametrize(
    ("dims", "heads"), in_turn([(64, 64), (512, 512), (256, 256), (80, 80), (24, 64), (192, 128)], [8, 1]), ids=str
)
def test_head_dims(variant, device, dims, heads):
    append_and_check(make(device, dims=dims, heads=heads))


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 13, 64])
@pytest.mark.parametrize("heads", [1, 7, 128])
def test_large(variant, device, page_size, heads):
    append_and_check(make(device, page_size, (1024, 0, 1, 777), (4096, 5, 1, 1023), heads, (128, 128), torch.bfloat16))


@pytest.mark.parametrize("dims", [(512, 64), (96, 40), (7, 3), (16, 0)], ids=str)
@pytest.mark.parametrize("page_size", [1, 6])
def test_mla(variant, device, dims, page_size):
    x = make(device, page_size, heads=1, dims=dims, dtype=torch.bfloat16)
    ckv, kpe = x.expected()
    caches = x.k_cache[:, :, 0], x.v_cache[:, :, 0]
    new = x.key[:, 0], x.value[:, 0]
    assert flashinfer.append_paged_mla_kv_cache(*new, x.batch_indices, x.positions, *caches, *x.tables) is None
    assert_bitwise(x.k_cache, ckv, "ckv")
    assert_bitwise(x.v_cache, kpe, "kpe")


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_strided_rows(variant, device, axis):
    x = make(device)
    x.key, x.value = generate.strided(x.key, axis), generate.strided(x.value, axis)
    append_and_check(x)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_strided_caches(variant, device, axis):
    x = make(device)
    x.k_cache, x.v_cache = generate.strided(x.k_cache, axis, gap=3), generate.strided(x.v_cache, axis, gap=3)
    gaps = int(x.k_cache._base.isnan().sum())
    append_and_check(x)
    assert int(x.k_cache._base.isnan().sum()) == gaps


def test_slices_of_a_fused_projection(variant, device):
    x = make(device, heads=2, dims=(32, 32))
    qkv = generate.randn(len(x.key), 8 + 2 + 2, 32, dtype=torch.float16, device=device)
    x.key, x.value = qkv[:, 8:10], qkv[:, 10:]
    append_and_check(x)


def test_any_order_of_tokens(variant, device):
    x = make(device)
    order = torch.randperm(len(x.key), device=device)
    x.batch_indices, x.positions = x.batch_indices[order], x.positions[order]
    append_and_check(x)


def test_padding_is_not_written(variant, device):
    x = make(device)
    x.batch_indices[0], x.batch_indices[5], x.positions[5] = -1, -9, 1000
    x.positions[7] = -1
    append_and_check(x)
    x.batch_indices.fill_(-1)
    append_and_check(x)


@pytest.mark.parametrize("heads", [0, 2])
def test_no_tokens(variant, device, heads):
    append_and_check(make(device, appended=(0, 0), lengths=(3, 0), heads=heads))
    append_and_check(make(device, appended=(), lengths=(), heads=heads))


def test_int64_tables(variant, device):
    x = make(device)
    for name in ("batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len"):
        setattr(x, name, getattr(x, name).long())
    append_and_check(x)


def test_offsets_beyond_2_31(variant, device):
    """A cache of 4.5 * 2 ** 30 elements, of which the system backs what is written."""
    page = 1 << 29
    caches = [torch.empty(9, page // 8, 1, 8, dtype=torch.float8_e5m2, device=device) for _ in range(2)]
    key, value = (generate.randn(2, 1, 8, dtype=torch.float8_e5m2, device=device) for _ in range(2))
    index = dict(dtype=torch.int32, device=device)
    last = torch.tensor([page // 8], **index)
    table = torch.tensor([8, 5], **index), torch.tensor([0, 2], **index), last
    positions = torch.tensor([7, 2 * (page // 8) - 1], **index)
    flashinfer.append_paged_kv_cache(key, value, torch.zeros(2, **index), positions, tuple(caches), *table)
    for cache, rows in zip(caches, (key, value)):
        assert_bitwise(cache[8, 7], rows[0])
        assert_bitwise(cache[5, -1], rows[1])


@pytest.mark.parametrize("where", ["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_nothing_outside_the_cache_is_touched(device, where):
    """The kernel leaves out what the checks on the CPU, and on a GPU in debug mode, refuse."""
    x = make(device, page_size=4, appended=(1,) * 7, lengths=(9,) * 7, dims=(16, 16))
    buffers = [generate.randn(len(x.k_cache) + 2, 4, 2, 16, dtype=torch.float16, device=device) for _ in range(2)]
    x.k_cache, x.v_cache = (buffer[1:-1] for buffer in buffers)
    entry = [int(i) + 2 for i in x.kv_indptr[:-1]]
    x.batch_indices[0] = 6
    x.positions[1] = 12  # on the first page of the next request, were it not checked
    x.kv_indices[entry[2]] = len(x.k_cache)  # the page after the cache
    x.kv_indices[entry[3]] = -1  # the page before it
    expected = [buffer.clone() for buffer in buffers]
    for caches, rows in zip(expected, (x.key, x.value)):
        for t in (4, 5):
            caches[1 + int(x.kv_indices[entry[t]]), 0] = rows[t]
    choice = room.append(room.Append("fp16", 16, 16), device, "portable")
    new, tokens = ((x.key, x.value), (x.k_cache, x.v_cache)), (x.batch_indices, x.positions)
    choice.run(*new, room.PageTable(*tokens, x.kv_indices, x.kv_indptr[:-1]))  # without request 6
    choice.run(*new, room.PageTable(*tokens, x.kv_indices[: entry[6]], x.kv_indptr))  # without its last page
    assert_bitwise(buffers[0], expected[0], "keys")
    assert_bitwise(buffers[1], expected[1], "values")


def shaped(*shape, dtype=torch.float16, device="cpu"):
    return torch.ones(*shape, device=device).to(dtype)


BAD = {
    "key of two dimensions": (dict(append_key=shaped(3, 8)), "append_key"),
    "key of other heads": (dict(append_key=shaped(3, 1, 8)), "append_key"),
    "key of another dim": (dict(append_key=shaped(3, 2, 4)), "append_key"),
    "key of another dtype": (dict(append_key=shaped(3, 2, 8, dtype=torch.bfloat16)), "append_key"),
    "value of other tokens": (dict(append_value=shaped(2, 2, 8)), "append_value"),
    "value of another dtype": (dict(append_value=shaped(3, 2, 8, dtype=torch.float32)), "append_value"),
    "value elsewhere": (dict(append_value=shaped(3, 2, 8, device="meta")), "append_value"),
    "batch_indices too few": (dict(batch_indices=torch.zeros(2, dtype=torch.int32)), "batch_indices"),
    "batch_indices of floats": (dict(batch_indices=torch.zeros(3)), "batch_indices"),
    "batch_indices past the batch": (dict(batch_indices=torch.tensor([0, 1, 2], dtype=torch.int32)), "batch_indices"),
    "positions too many": (dict(positions=torch.zeros(4, dtype=torch.int32)), "positions"),
    "positions past the request": (dict(positions=torch.tensor([0, 0, 3], dtype=torch.int32)), "positions"),
    "positions past the pages": (dict(positions=torch.tensor([0, 0, 9], dtype=torch.int32)), "positions"),
    "cache of one tensor": (dict(paged_kv_cache=(shaped(4, 4, 2, 8),)), "paged_kv_cache"),
    "cache without two": (dict(paged_kv_cache=shaped(4, 3, 4, 2, 8)), "paged_kv_cache"),
    "cache of other pages": (dict(paged_kv_cache=(shaped(4, 4, 2, 8), shaped(5, 4, 2, 8))), "paged_kv_cache"),
    "cache of empty pages": (dict(paged_kv_cache=shaped(4, 2, 0, 2, 8)), "paged_kv_cache"),
    "kv_indices of floats": (dict(kv_indices=torch.ones(3)), "kv_indices"),
    "kv_indices past the cache": (dict(kv_indices=torch.tensor([1, 4, 2], dtype=torch.int32)), "kv_indices"),
    "kv_indices below 0": (dict(kv_indices=torch.tensor([1, -1, 2], dtype=torch.int32)), "kv_indices"),
    "kv_indptr that decreases": (dict(kv_indptr=torch.tensor([0, 3, 2], dtype=torch.int32)), "kv_indptr"),
    "kv_indptr from -1": (dict(kv_indptr=torch.tensor([-1, 2, 3], dtype=torch.int32)), "kv_indptr"),
    "kv_indptr past kv_indices": (dict(kv_indptr=torch.tensor([0, 2, 4], dtype=torch.int32)), "kv_indptr"),
    "kv_indptr of nothing": (dict(kv_indptr=torch.zeros(0, dtype=torch.int32)), "kv_last_page_len"),
    "kv_last_page_len too few": (dict(kv_last_page_len=torch.ones(1, dtype=torch.int32)), "kv_last_page_len"),
    "kv_last_page_len past the page": (
        dict(kv_last_page_len=torch.tensor([5, 3], dtype=torch.int32)),
        "kv_last_page_len",
    ),
    "kv_layout": (dict(kv_layout="NDH"), "kv_layout"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    changed, argument = BAD[name]
    index = dict(dtype=torch.int32)
    good = dict(
        append_key=shaped(3, 2, 8),
        append_value=shaped(3, 2, 8),
        batch_indices=torch.tensor([0, 0, 1], **index),
        positions=torch.tensor([3, 4, 2], **index),
        paged_kv_cache=(shaped(4, 4, 2, 8), shaped(4, 4, 2, 8)),
        kv_indices=torch.tensor([3, 1, 2], **index),
        kv_indptr=torch.tensor([0, 2, 3], **index),
        kv_last_page_len=torch.tensor([1, 3], **index),
    )
    flashinfer.append_paged_kv_cache(**good)
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        flashinfer.append_paged_kv_cache(**(good | changed))


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        (dict(append_ckv=shaped(1, 1, 8)), "append_ckv"),
        (dict(append_ckv=shaped(1, 7)), "append_ckv"),
        (dict(append_kpe=shaped(4)), "append_kpe"),
        (dict(append_kpe=shaped(2, 4)), "append_kpe"),
        (dict(append_kpe=shaped(1, 4, dtype=torch.float32)), "append_kpe"),
        (dict(append_kpe=shaped(1, 4, device="meta")), "append_kpe"),
        (dict(ckv_cache=shaped(4, 4, 1, 8)), "ckv_cache"),
        (dict(ckv_cache=shaped(4, 4, 8, dtype=torch.bfloat16)), "ckv_cache"),
        (dict(kpe_cache=shaped(4, 4)), "kpe_cache"),
        (dict(kpe_cache=shaped(4, 5, 4)), "kpe_cache"),
        (dict(batch_indices=torch.zeros(2, dtype=torch.int32)), "batch_indices"),
    ],
)
def test_bad_input_of_mla(changed, argument):
    index = torch.zeros(1, dtype=torch.int32)
    good = dict(append_ckv=shaped(1, 8), append_kpe=shaped(1, 4), batch_indices=index, positions=index)
    good |= dict(ckv_cache=shaped(4, 4, 8), kpe_cache=shaped(4, 4, 4), kv_indices=index)
    good |= dict(kv_indptr=torch.tensor([0, 1], dtype=torch.int32), kv_last_page_len=index + 1)
    flashinfer.append_paged_mla_kv_cache(**good)
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        flashinfer.append_paged_mla_kv_cache(**(good | changed))


CASES = {
    "documented": ((1, 2, 3), (5, 5, 5), 6),
    "empty requests": ((0, 2, 0, 0, 3, 0), (4, 2, 0, 7, 9, 0), 5),
    "padding": ((2, 0, 1), (2, 3, 8), 7),
    "all padding": ((0, 0), (3, 0), 4),
    "no request": ((), (), 3),
    "nothing": ((), (), 0),
    "many requests": (tuple(i % 3 for i in range(300)), tuple(i % 3 + i for i in range(300)), 310),
    "one long request": ((700,), (100000,), 700),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_batch_indices_positions(variant, device, name, dtype):
    appended, lengths, nnz = CASES[name]
    expected = [(i, n - a + j) for i, (a, n) in enumerate(zip(appended, lengths)) for j in range(a)]
    expected += [(-1, 0)] * (nnz - len(expected))
    expected = torch.tensor(expected, dtype=torch.int32, device=device).reshape(-1, 2)
    given = generate.indptr(appended, device).to(dtype), torch.tensor(lengths, dtype=dtype, device=device)
    batch_indices, positions = flashinfer.get_batch_indices_positions(*given, nnz)
    assert_bitwise(batch_indices, expected[:, 0])
    assert_bitwise(positions, expected[:, 1])

    for result, column in zip(flashinfer.get_batch_indices_positions(given[0], given[1].cpu(), nnz), expected.T):
        assert_bitwise(result, column.contiguous())
    buffers = [torch.full((nnz,), 77, dtype=torch.int32, device=device) for _ in range(2)]
    result = flashinfer.get_batch_indices_positions(*given, nnz, *buffers)
    assert result[0] is buffers[0] and result[1] is buffers[1]
    assert_bitwise(torch.stack(buffers, 1), expected)


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        (dict(append_indptr=torch.tensor([[0, 2, 3]])), "append_indptr"),
        (dict(append_indptr=torch.tensor([0.0, 2.0, 3.0])), "append_indptr"),
        (dict(append_indptr=torch.tensor([0, 4, 3])), "append_indptr"),
        (dict(append_indptr=torch.tensor([-1, 2, 3])), "append_indptr"),
        (dict(append_indptr=torch.tensor([0, 2, 4])), "append_indptr"),
        (dict(seq_lens=torch.tensor([5])), "seq_lens"),
        (dict(seq_lens=torch.tensor([5, 0])), "seq_lens"),
        (dict(seq_lens=torch.tensor([5.0, 5.0])), "seq_lens"),
        (dict(nnz=-1), "nnz"),
        (dict(batch_indices=torch.zeros(2, dtype=torch.int32)), "batch_indices"),
        (dict(positions=torch.zeros(3, dtype=torch.int64)), "positions"),
        (dict(positions=torch.zeros(6, dtype=torch.int32)[::2]), "positions"),
        (dict(positions=torch.zeros(3, dtype=torch.int32, device="meta")), "positions"),
    ],
)
def test_bad_input_of_batch_indices_positions(changed, argument):
    good = dict(append_indptr=torch.tensor([0, 2, 3]), seq_lens=torch.tensor([5, 5]), nnz=3)
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        flashinfer.get_batch_indices_positions(**(good | changed))


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_seq_lens(variant, device, page_size, dtype):
    lengths = [0, 1, page_size - 1, page_size, page_size + 1, 0, 7 * page_size + 1] * 30
    pages = [-(-n // page_size) for n in lengths]
    last = [n - (p - 1) * page_size if p else 3 for n, p in zip(lengths, pages)]  # 3 of no page: not looked at
    table = generate.indptr(pages, device).to(dtype), torch.tensor(last, dtype=dtype, device=device)
    out = flashinfer.get_seq_lens(*table, page_size)
    assert_bitwise(out, torch.tensor(lengths, dtype=dtype, device=device))
    assert flashinfer.get_seq_lens(table[0][:1], table[1][:0], page_size).shape == (0,)
    out = flashinfer.get_seq_lens(table[0].int(), table[1].long(), page_size)
    assert_bitwise(out, torch.tensor(lengths, dtype=torch.int64, device=device))


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        (dict(kv_indptr=torch.tensor([0, 1])), "kv_last_page_len"),
        (dict(kv_indptr=torch.tensor([0.0, 1.0, 2.0])), "kv_indptr"),
        (dict(kv_last_page_len=torch.tensor([1, 1], dtype=torch.int16)), "kv_last_page_len"),
        (dict(page_size=0), "page_size"),
    ],
)
def test_bad_input_of_seq_lens(changed, argument):
    good = dict(kv_indptr=torch.tensor([0, 1, 2]), kv_last_page_len=torch.tensor([1, 1]), page_size=4)
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        flashinfer.get_seq_lens(**(good | changed))


def test_are_registered_ops():
    """torch.compile sees one op that writes what it says it writes."""
    from flashinfer.page import append, tables

    x = make("cpu", dims=(8, 8))
    given = x.key, x.value, x.batch_indices, x.positions, x.k_cache, x.v_cache, *x.tables
    torch.library.opcheck(append._append_paged_kv_cache.op, given)
    appended = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([5, 5], dtype=torch.int32)
    made = torch.zeros(2, 3, dtype=torch.int32)
    torch.library.opcheck(tables._batch_indices_positions.op, (*appended, *made.unbind()))
    lengths = torch.zeros_like(x.kv_last_page_len)
    torch.library.opcheck(tables._seq_lens.op, (x.kv_indptr, x.kv_last_page_len, lengths, 5))


@pytest.mark.gpu
def test_checks_of_values_on_a_gpu_are_made_in_debug_mode(device, monkeypatch):
    x = make(device)
    x.kv_indices[1] = 1000
    given = x.key, x.value, x.batch_indices, x.positions, (x.k_cache, x.v_cache), *x.tables
    flashinfer.append_paged_kv_cache(*given)
    monkeypatch.setenv("FLASHINFER_DEBUG", "1")
    with pytest.raises(ValueError, match="^kv_indices: got .*allowed: "):
        flashinfer.append_paged_kv_cache(*given)


@pytest.mark.gpu
def test_graph_serves_every_batch_up_to_its_size(device):
    """Positions and append are captured once, for 64 tokens; replays append batches of other sizes and lengths."""
    x = make(device, appended=(30, 30, 4), lengths=(40, 40, 40), dtype=torch.bfloat16)
    appended, lengths = generate.indptr([30, 30, 4], device), torch.full((3,), 40, dtype=torch.int32, device=device)
    cache = x.k_cache, x.v_cache

    def step():
        batch_indices, positions = flashinfer.get_batch_indices_positions(appended, lengths, 64)
        flashinfer.append_paged_kv_cache(x.key, x.value, batch_indices, positions, cache, *x.tables)

    before = x.k_cache.clone(), x.v_cache.clone()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for counts, ends in (((30, 30, 4), (40, 40, 40)), ((1, 1, 1), (40, 3, 17)), ((0, 50, 0), (9, 40, 0))):
        appended.copy_(generate.indptr(counts, device))
        lengths.copy_(torch.tensor(ends))
        for tensor, value in zip(cache, before):
            tensor.copy_(value)
        rows = [(i, n - a + j) for i, (a, n) in enumerate(zip(counts, ends)) for j in range(a)]
        rows += [(-1, 0)] * (64 - len(rows))
        rows = torch.tensor(rows, dtype=torch.int32, device=device)
        x.batch_indices, x.positions = rows[:, 0], rows[:, 1]
        k, v = x.expected()
        graph.replay()
        assert_bitwise(x.k_cache, k)
        assert_bitwise(x.v_cache, v)


@pytest.mark.gpu
def test_side_stream(device):
    x = make(device)
    k, v = x.expected()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    given = x.key, x.value, x.batch_indices, x.positions, (x.k_cache, x.v_cache), *x.tables
    with torch.cuda.stream(stream):
        flashinfer.append_paged_kv_cache(*given)
    stream.synchronize()
    assert_bitwise(x.k_cache, k)
    assert_bitwise(x.v_cache, v)
