"""Top-k of a small k over any range of keys: exact, and never outside the row's k places."""

import pytest
import torch
import triton
import triton.language as tl

from flashinfer.ops import topk as room
from flashinfer.ops.topk import short_emit as short
from flashinfer.testing.compare import assert_bitwise
from tests.ops.topk.test_topk import use_sizes

INF, NAN = torch.inf, torch.nan
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def between_canaries(rows, k, dtype, device):
    """A tensor [rows, k] inside a larger one that is 77 throughout, and the larger one."""
    whole = torch.full((rows * k + 128,), 77, dtype=dtype, device=device)
    return whole[64 : 64 + rows * k].view(rows, k), whole


def assert_canaries(whole):
    assert (whole[:64] == 77).all() and (whole[-64:] == 77).all()


def in_poison(x):
    """The same rows with NaN, the largest of all values, in front of them and behind them."""
    whole = torch.full((x.numel() + 16,), NAN, dtype=x.dtype, device=x.device)
    whole[8 : 8 + x.numel()] = x.flatten()
    return whole[8 : 8 + x.numel()].view(x.shape)


def first(x, k, last):
    """Columns of the k largest in their order, NaN above all: by a stable sort, of the row or of the row turned.

    On the CPU: the sort of a GPU puts NaN with a sign bit, as torch makes of float32 in bfloat16, below all.
    """
    x = x.double().cpu()
    order = (x.flip(-1) if last else x).sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return (x.shape[-1] - 1 - order if last else order).sort(dim=-1).values


def check(x, k, last=False):
    x = in_poison(x)
    (values, v), (indices, i) = (between_canaries(len(x), k, dtype, x.device) for dtype in (x.dtype, torch.int64))
    problem = room.TopK("values", _DTYPES[x.dtype], last, aligned=False)
    backend = "portable" if x.device.type == "cpu" else "auto"
    room.top_k(problem, x.device, backend).run(x, k, None, None, (), (values, indices))
    assert_bitwise(indices, first(x, k, last))
    same = values == x.gather(1, indices)
    assert (same | (values.isnan() & x.gather(1, indices).isnan())).all()
    assert_canaries(v)
    assert_canaries(i)


def log_probabilities(columns):
    return torch.log_softmax(torch.randn(1, columns) * 2, dim=-1)


@pytest.mark.parametrize(
    "x, k",
    [
        (lambda: torch.randn(2, 1000) - 10, 5),
        (lambda: log_probabilities(4096), 50),
        (lambda: torch.randn(1, 1000) - 10, 64),
        (lambda: torch.randn(1, 2048), 2040),
        (lambda: torch.full((1, 100), -INF), 5),
    ],
    ids=["negative", "log-probabilities", "negative-64", "nearly-all", "none-possible"],
)
def test_rows_whose_keys_span_every_bit(device, x, k):
    """The k-th is looked for among 2^32 - 1 keys: with the sizes that are compiled."""
    check(x().to(device), k)


def mixtures(columns):
    """Rows of ordinary and of odd values, one kind a row."""
    x = torch.randn(10, columns)
    x[0] = -INF
    x[1] = NAN
    x[2], x[2, ::7] = -INF, torch.randn(len(range(0, columns, 7)))
    x[3, ::3], x[3, 1::3] = INF, -INF
    x[4] = torch.randint(-9, 9, (columns,)) * 2.0**-149
    x[5] = torch.randint(0, 2, (columns,)) * -0.0
    x[6] = torch.randn(columns) * 10.0 ** torch.randint(-44, 38, (columns,))
    x[7] = torch.randint(-(1 << 31), (1 << 31) - 1, (columns,)).to(torch.int32).view(torch.float32)
    x[8, ::2] = NAN
    x[9] = -7.5
    return x


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_mixtures(device, monkeypatch, dtype):
    if device.type == "cpu":
        use_sizes(monkeypatch, short_k=300)
    x = mixtures(130)
    if dtype != torch.float32:
        x = x.to(dtype)
    k, last = {torch.float32: (5, False), torch.bfloat16: (120, True), torch.float16: (40, False)}[dtype]
    check(x.to(device), k, last)


@pytest.mark.parametrize("kind", ["pages", "ragged"])
def test_transforms(device, monkeypatch, kind):
    """Windows of 0, 1, k - 1, k, k + 1 and all columns."""
    if device.type == "cpu":
        use_sizes(monkeypatch, short_k=300)
    k, columns = 20, 250
    lengths = torch.tensor([0, 1, k - 1, k, k + 1, columns, 200, -3], dtype=torch.int32, device=device)
    rows = len(lengths)
    x = in_poison((torch.randn(rows, columns) - 10).to(device))
    offsets = torch.arange(rows, dtype=torch.int32, device=device) * 1000
    (out, o), (raw, r) = (between_canaries(rows, k, torch.int32, device) for _ in range(2))
    table = torch.arange(rows * columns, dtype=torch.int32, device=device).view(rows, columns)
    pages = kind == "pages"
    problem = room.TopK(kind, "fp32", lengths=True, raw=pages, aligned=False)
    run = room.top_k(problem, device, "portable" if device.type == "cpu" else "auto").run
    run(x, k, None, lengths, (table, None, None, 1) if pages else (offsets,), (out, raw if pages else None))
    for i, length in enumerate(lengths.clamp(min=0).tolist()):
        column = first(x[i, :length], min(k, length), False).tolist()
        base = columns * i if pages else 1000 * i
        none = [-1] * (k - len(column))
        assert out[i].tolist() == [base + j for j in column] + none
        assert not pages or raw[i].tolist() == column + none
    assert_canaries(o)
    assert_canaries(r)


@triton.jit
def search_kernel(values, targets, found, count, lower, across, TILE: tl.constexpr):
    """found int32 [rows, 3]: what find_key gives for the keys above `lower` of a row, a list of one program."""
    row = tl.program_id(0)
    values += row * count
    ends = tl.full([short.PARTS], 0, tl.int32) + count
    least = tl.load(lower + row) + 1
    keys = short.listed_keys_at(0, ends, ends - count, ends, values, count, 1, TILE)
    reach = tl.full([], 0, tl.int32)
    for start in range(0, count, TILE):
        some = short.listed_keys_at(start, ends, ends - count, ends, values, count, 1, TILE)
        for j in tl.static_range(4):
            reach += tl.sum((some[j] >= least).to(tl.int32), 0)
    likely = tl.load(across + row).to(tl.uint32, bitcast=True)
    pivot, reached, above = short.find_key(
        keys, tl.load(targets + row), least, likely, reach, count, ends, ends - count, ends, values, count, 1, TILE
    )
    tl.store(found + row * 3, pivot)
    tl.store(found + row * 3 + 1, reached)
    tl.store(found + row * 3 + 2, above)


def keys_of(x):
    """Integers in the order of float32 values, by their definition: bits of the positive, negated bits of the rest."""
    bits = x.where(x != 0, 0).abs().view(torch.int32).long()
    return torch.where(x < 0, -1 - bits, bits).where(~x.isnan(), (1 << 31) - 1)


@pytest.mark.matrix
def test_search_of_any_range_of_keys(device):
    """Against sorting: gaps of 1 to 2^32 - 1 keys at either end and in the middle, every kind of rank and of guess."""
    rows, count = 24, 100
    generator = torch.Generator().manual_seed(5)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    width = 1 << draw(0, 33, rows, 1)
    width[:4] = 1 << 32
    low = (-(1 << 31) + ((1 << 32) - width) * draw(0, 3, rows, 1) // 2).clamp(-2139095041)
    key = low + (torch.rand(rows, count, generator=generator, dtype=torch.float64) * width).long()
    key = key.clamp(max=0x7F800000)
    key[::5, ::3] = key[::5, :1]
    bits = torch.where(key < 0, key ^ 0x7FFFFFFF, key)
    x = bits.to(torch.int32).view(torch.float32)
    key = keys_of(x)
    ordered = key.sort(dim=-1, descending=True).values
    target = draw(1, count + 1, rows, 1)
    kth = ordered.gather(1, target - 1)
    # A bound below the k-th: just below it, below all of the row, or below all keys.
    choices = torch.cat([kth - 1, ordered[:, -1:] - 1, torch.full_like(kth, -(1 << 31))], dim=1).clamp(-(1 << 31))
    lower = choices.gather(1, draw(0, 3, rows, 1))
    lower[:4] = -(1 << 31)
    across = torch.where(draw(0, 2, rows, 1) == 1, -1, draw(1, 1 << 31, rows, 1) >> draw(0, 31, rows, 1))
    narrow = [t.flatten().to(torch.int32).to(device) for t in (target, lower, across)]
    found = torch.empty(rows, 3, dtype=torch.int32, device=device)
    search_kernel[(rows,)](x.to(device), narrow[0], found, count, narrow[1], narrow[2], TILE=64)
    pivot, reached, above = found.long().cpu().unbind(1)
    assert ((key >= pivot[:, None]).sum(1) == reached).all()
    enough = reached == target[:, 0]
    assert (pivot[~enough] == kth[~enough, 0]).all() and (reached >= target[:, 0]).all()
    assert ((key > pivot[:, None]).sum(1) == above)[~enough].all()
    assert enough.any() and (~enough).any()
