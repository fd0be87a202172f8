"""Top-k against Python's sorted."""

import pytest
import torch

from flashinfer import TopKTieBreak, top_k, top_k_page_table_transform, top_k_ragged_transform
from flashinfer.ops import topk as room
from flashinfer.ops._device import tiles as tile_sizes
from flashinfer.ops.topk import config
from flashinfer.testing import generate
from flashinfer.ops.topk import order
from flashinfer.testing.compare import assert_bitwise
from tests.ops.norm.variants import variant  # the fixture

LARGE = TopKTieBreak.LARGE


@pytest.fixture(autouse=True)
def small_tiles(device, monkeypatch):
    """In the interpreter tiles of 64, so that short rows have several tiles and programs; both ways, by k."""
    if device.type == "cpu":
        use_sizes(monkeypatch)


def use_sizes(monkeypatch, short_k=30, tile=64):
    monkeypatch.setattr(tile_sizes, "TILE", tile)
    sizes = {"SHORT_TILE": tile, "LIST_TILE": tile, "GROUPS": 16, "MEMBERS": 4, "SHORT_K": short_k}
    for name, size in sizes.items():
        monkeypatch.setattr(config, name, size)
    monkeypatch.setattr(room.top_k, "_choices", {})


def best(row, k, last=False):
    """Indices of the k largest in order, worked out element by element: NaN first, of equal ones the first or last."""
    sign = -1 if last else 1

    def place(i):
        value = float(row[i])
        return (0, 0.0, sign * i) if value != value else (1, -value, sign * i)

    return sorted(range(len(row)), key=place)[:k]


def scores(rows, columns, dtype=torch.float32, device="cpu"):
    """Values with many ties, both zeros, infinities and NaN."""
    x = (torch.randn(rows, columns, device=device) * 4).round().div(2).to(dtype)
    x[:, 3::17] = -0.0
    if columns > 10:
        x[0, 7], x[0, 9], x[-1, 5] = torch.nan, torch.inf, -torch.inf
    return x


@pytest.mark.parametrize(
    "columns, k, tie_break",
    [
        (1, 1, TopKTieBreak.NONE),
        (200, 1, TopKTieBreak.NONE),
        (200, 37, TopKTieBreak.SMALL),
        (200, 37, LARGE),
        (200, 200, TopKTieBreak.NONE),
        (129, 64, LARGE),
    ],
)
def test_top_k(variant, device, columns, k, tie_break):
    x = scores(2, columns, torch.float16 if columns == 129 else torch.float32, device)
    for order in (True, False) if k in (37, 64) else (k == 1,):
        values, indices = top_k(x, k, sorted=order, tie_break=tie_break, deterministic=order, dsa_graph_safe=order)
        expected = [best(row, k, tie_break == LARGE) for row in x]
        expected = [indices if order else sorted(indices) for indices in expected]
        assert indices.tolist() == expected and indices.dtype == torch.int64
        assert_bitwise(values, x.gather(1, indices))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("columns", [190, pytest.param(9001, marks=pytest.mark.gpu)])
def test_rows_of_equal_values(variant, device, columns, last):
    """More are equal to the k-th than a list holds, on a GPU."""
    x = torch.ones(3, columns, device=device)
    x[1, columns // 2 :] = 0
    x[2] = torch.arange(columns, device=device)
    _, indices = top_k(x, 20, tie_break=LARGE if last else TopKTieBreak.SMALL)
    ends = columns, columns // 2
    expected = [list(range(end - 20, end) if last else range(20)) for end in ends]
    assert indices.tolist() == [*expected, list(range(columns - 20, columns))]


def test_top_k_of_strided_rows(variant, device):
    x = scores(2, 70, device=device)
    expected = top_k(x, 9)
    for strided in (generate.strided(x, 0, 5), generate.strided(x, 1, 1)):
        for result, truth in zip(top_k(strided, 9), expected):
            assert_bitwise(result, truth)


def windows(device):
    """Scores with poison outside their windows; starts, lengths (empty, negative, past the end, short, long)."""
    starts = torch.tensor([0, 3, 140, 10, 149, 5], dtype=torch.int32, device=device)
    lengths = torch.tensor([150, 0, 99, 4, -7, 100], dtype=torch.int32, device=device)
    whole = torch.full((6, 150), torch.nan, device=device)
    for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist())):
        whole[i, start : start + max(length, 0)] = scores(1, 150, device=device)[0, start : start + max(length, 0)]
    whole[0, 7] = 1.0
    return whole, starts, lengths


def window_of(x, start, length):
    return x[start : start + max(length, 0)]


@pytest.mark.parametrize("tie_break", [TopKTieBreak.SMALL, LARGE])
def test_ragged_transform(variant, device, tie_break):
    x, starts, lengths = windows(device)
    offsets = torch.arange(6, dtype=torch.int32, device=device) * 1000
    k = 20
    out = top_k_ragged_transform(x, offsets, lengths, k, tie_break=tie_break, row_starts=starts)
    for i in range(6):
        local = sorted(best(window_of(x[i], int(starts[i]), int(lengths[i])), k, tie_break == LARGE))
        assert out[i].tolist() == [j + 1000 * i for j in local] + [-1] * (k - len(local))
    full = torch.full_like(lengths, 150)
    assert_bitwise(
        top_k_ragged_transform(x[:1], offsets[:1], full[:1], 200)[:, 150:],
        torch.full((1, 50), -1, dtype=torch.int32, device=device),
    )


def test_int64_vectors(variant, device):
    """As int32; a length beyond it is beyond the row."""
    x, starts, lengths = windows(device)
    offsets = torch.arange(6, dtype=torch.int32, device=device) * 1000
    wide = lengths.long()
    wide[0] = 1 << 40
    expected = top_k_ragged_transform(x, offsets, lengths, 20, row_starts=starts)
    assert_bitwise(top_k_ragged_transform(x, offsets.long(), wide, 20, row_starts=starts.long()), expected)
    table = torch.randperm(6 * 300).reshape(6, 300).to(torch.int32).to(device)
    order = torch.tensor([3, 0, 0, 1, 2, 1], dtype=torch.int32, device=device)
    expected = top_k_page_table_transform(x, table, lengths, 20, order, row_starts=starts)
    given = wide, 20, order.long()
    assert_bitwise(top_k_page_table_transform(x, table, *given, row_starts=starts.long()), expected)


def test_upstreams_other_names():
    from flashinfer import topk

    assert topk.topk is topk.top_k and topk.can_implement_filtered_topk()


def test_tie_breaks_in_text():
    assert [f"{kind}" for kind in TopKTieBreak] == [str(kind) for kind in TopKTieBreak] == ["none", "small", "large"]
    assert f"{TopKTieBreak.LARGE:>6}" == " large" and int(TopKTieBreak.LARGE) == 2
    assert repr(LARGE) == "TopKTieBreak.LARGE"


def test_page_table_transform(variant, device):
    x, starts, lengths = windows(device)
    k = 20
    row_to_batch = torch.tensor([3, 0, 0, 1, 2, 1], dtype=torch.int32, device=device)
    for page_size, page_starts in ((1, None), (16, torch.arange(6, dtype=torch.int32, device=device) * 2)):
        pages = -(-300 // page_size)
        table = torch.randperm(4 * pages).reshape(4, pages).to(torch.int32).to(device)
        table[1, 0] = -1
        out, raw = (generate.strided(torch.full((6, k), -9, dtype=torch.int32, device=device), 0, 3) for _ in range(2))
        result = top_k_page_table_transform(
            x, table, lengths, k, row_to_batch, row_starts=starts, page_table_row_starts=page_starts,
            page_size=page_size, out=out, out_raw_indices=raw,
        )  # fmt: skip
        assert result is out
        for i in range(6):
            local = sorted(best(window_of(x[i], int(starts[i]), int(lengths[i])), k))
            first = int(starts[i]) if page_starts is None else int(page_starts[i])
            slots = []
            for j in local:
                entry = int(table[row_to_batch[i], first + j // page_size])
                slots.append(entry * page_size + j % page_size if entry >= 0 else -1)
            assert out[i].tolist() == slots + [-1] * (k - len(local))
            assert raw[i].tolist() == local + [-1] * (k - len(local))


def test_plain_page_table_transform(variant, device):
    """Without windows and maps; positions past the table have no slot."""
    x = torch.randn(3, 80, device=device)
    table = torch.randperm(3 * 60).reshape(3, 60).to(torch.int32).to(device)
    lengths = torch.tensor([80, 80, 5], dtype=torch.int32, device=device)
    out = top_k_page_table_transform(x, table, lengths, 8)
    for i in range(3):
        local = sorted(best(x[i, : int(lengths[i])], 8))
        assert out[i].tolist() == [int(table[i, j]) if j < 60 else -1 for j in local] + [-1] * (8 - len(local))


def test_no_rows(variant, device):
    empty, none = torch.empty(0, 30, device=device), torch.empty(0, dtype=torch.int32, device=device)
    assert [x.shape for x in top_k(empty, 4)] == [(0, 4)] * 2
    assert top_k_ragged_transform(empty, none, none, 4).shape == (0, 4)
    table = torch.empty(0, 30, dtype=torch.int32, device=device)
    assert top_k_page_table_transform(empty, table, none, 4).shape == (0, 4)


def test_bad_input():
    x, row = torch.ones(2, 8), torch.ones(2, dtype=torch.int32)
    table = torch.ones(2, 8, dtype=torch.int32)
    for call, argument in (
        (lambda: top_k(torch.ones(8), 2), "input"),
        (lambda: top_k(x.double(), 2), "input"),
        (lambda: top_k(x, 0), "k"),
        (lambda: top_k(x, 9), "k"),
        (lambda: top_k(x, 2, tie_break=7), "tie_break"),
        (lambda: top_k(x, 2, tie_break=torch.tensor([1, 2])), "tie_break"),
        (lambda: top_k_ragged_transform(x, row[:1], row, 2), "offsets"),
        (lambda: top_k_ragged_transform(x, row.short(), row, 2), "offsets"),
        (lambda: top_k_ragged_transform(x, row, row.float(), 2), "lengths"),
        (lambda: top_k_ragged_transform(x, row, row, 0), "k"),
        (lambda: top_k_ragged_transform(x, row, row, 2, row_starts=row[:1]), "row_starts"),
        (lambda: top_k_page_table_transform(x, table[:1], row, 2), "src_page_table"),
        (lambda: top_k_page_table_transform(x, table.long(), row, 2), "src_page_table"),
        (lambda: top_k_page_table_transform(x, table.t().contiguous().t(), row, 2), "src_page_table"),
        (lambda: top_k_page_table_transform(x, table, row, 2, page_size=0), "page_size"),
        (lambda: top_k_page_table_transform(x, table, row, 2, page_size=3), "page_size"),
        (lambda: top_k_page_table_transform(x, table, row, 2, page_size=1 << 31), "page_size"),
        (lambda: top_k_page_table_transform(x, table, row, 2, page_size=4, row_starts=row), "page_table_row_starts"),
        (lambda: top_k_page_table_transform(x, table, row, 2, row_to_batch=row.short()), "row_to_batch"),
        (lambda: top_k_page_table_transform(x, table, row, 2, page_table_row_starts=table), "page_table_row_starts"),
        (lambda: top_k_page_table_transform(x, table, row, 2, out=table), "out"),
        (lambda: top_k_page_table_transform(x, table, row, 8, out_raw_indices=table.long()), "out_raw_indices"),
        (lambda: top_k_page_table_transform(x, table, row.to("meta"), 2), "lengths"),
    ):
        with pytest.raises(ValueError, match=f"^{argument}: got .*"):
            call()


def test_are_registered_ops():
    from flashinfer import topk

    x, row, table = torch.randn(2, 30), torch.full((2,), 20, dtype=torch.int32), torch.ones(2, 30, dtype=torch.int32)
    values, indices = torch.empty(2, 3), torch.empty(2, 3, dtype=torch.int64)
    slots, raw = torch.empty(2, 2, 3, dtype=torch.int32).unbind()
    torch.library.opcheck(topk._top_k.op, (x, 3, True, False, values, indices))
    torch.library.opcheck(topk._top_k_ragged.op, (x, 3, False, row, row, None, slots))
    torch.library.opcheck(topk._top_k_pages.op, (x, 3, False, table, 1, row, None, None, None, slots, raw.clone()))
    compiled = torch.compile(lambda x: top_k(x, 3, sorted=True)[1] + 1, fullgraph=True, backend="aot_eager")
    assert_bitwise(compiled(x), top_k(x, 3, sorted=True)[1] + 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rows, columns, k", [(4, 65536, 2048), (1, 1000003, 7), (300, 8192, 512), (9, 40000, 5000), (2, 131072, 131072)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_rows_on_a_gpu(device, rows, columns, k, dtype):
    x = torch.randn(rows, columns, device=device).to(dtype)
    order = x.float().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    values, indices = top_k(x, k, sorted=k < 10000)
    assert_bitwise(indices, order if k < 10000 else order.sort(dim=-1).values)
    assert_bitwise(values, x.gather(1, indices))


@pytest.mark.gpu
def test_graph(device):
    x, lengths = torch.randn(4, 9000, device=device), torch.full((4,), 5000, dtype=torch.int32, device=device)
    offsets = torch.zeros_like(lengths)
    top_k_ragged_transform(x, offsets, lengths, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = top_k_ragged_transform(x, offsets, lengths, 64)
    for length in (3, 9000):
        lengths.fill_(length)
        x.normal_()
        graph.replay()
        assert_bitwise(out, top_k_ragged_transform(x, offsets, lengths, 64))


@pytest.mark.parametrize("k, block", [(5, 8), (16, 16), (61, 16)])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_orders(device, k, block, last, dtype):
    """By one program, and in blocks that are merged: with ties, infinities, zeros of both signs, NaN."""
    rows = 3
    value = torch.randint(-3, 4, (rows, k), device=device).to(dtype)
    value[0, :5] = torch.tensor([-torch.inf, torch.nan, torch.inf, 0.0, -0.0])
    index = torch.arange(7, 7 + k, device=device).expand(rows, k).contiguous()
    # Of a flipped row a stable sort takes the last of equal values first.
    given = value.flip(1) if last else value
    keys = given.float().add(0.0).nan_to_num(nan=torch.inf, posinf=1e6)
    expected = keys.sort(dim=1, descending=True, stable=True).indices
    expected = k - 1 - expected if last else expected
    problem = order.Problem("fp32" if dtype == torch.float32 else "fp16", last)
    for config in (None, order.Config(block, 1)):
        out_value, out_index = torch.full_like(value, 77), torch.full_like(index, -77)
        order.run(problem, value, index, out_value, out_index, config)
        assert_bitwise(out_index, index.gather(1, expected))
        assert_bitwise(out_value, value.gather(1, expected))
