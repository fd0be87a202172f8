"""An indexer's scores in upstream's paged layouts and over keys side by side, against their definition in float64."""

import pytest
import torch

import flashinfer
from flashinfer.dense_mqa import fp8_mqa_logits
from flashinfer.testing.compare import assert_close
from tests.ops.attention.mqa_logits.test_mqa_logits import Case, run_by
from tests.ops.quantize import truth as formats
from tests.ops.tensor_cores import fp8_dots

FP8 = torch.float8_e4m3fn
BACKENDS = ("auto", "portable", "sm90")


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """The variant for the device, and each of the others, on a CPU in the interpreter."""
    if request.param != "auto":
        for module in ("paged_mqa", "attn_scores", "dense_mqa"):
            monkeypatch.setattr(f"flashinfer.{module}.mqa_logits", run_by(request.param))
    return request.param


def seen_of(lens, tokens):
    return (lens[:, None] - torch.arange(tokens - 1, -1, -1)).flatten().clamp(min=0)


def compare(got, truth, same, seen):
    there = torch.arange(got.shape[1])[None] < seen[:, None]
    zero = torch.zeros((), dtype=got.dtype)
    assert_close(torch.where(there, got, zero), torch.where(there, same, 0.0).to(got.dtype),
                 torch.where(there, truth, 0.0), "logits")  # fmt: skip


CASES = {
    "one query": (dict(lens=[33, 0, 1, 16, 17]), torch.float32),
    "eight queries": (dict(lens=[33, 8, 15], tokens=8, heads=4), torch.float32),
    "odd heads, one page a key": (dict(lens=[7, 19], page=1, dim=48, tokens=2, heads=5), torch.float16),
    "pages apart": (dict(lens=[40, 100], page=32, gap=64, heads=64, dim=128), torch.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_fp8_pages(name, backend, device):
    """Strided lengths and tables, rows of a wider buffer, and canaries beside what is written."""
    case, dtype = CASES[name]
    x = Case(**case, device=device)
    most, tokens = max(case["lens"]) + 3, x.q.shape[1]
    rows, columns = len(x.lens) * tokens, flashinfer.padded_seq_len(most)
    buffer = torch.full((rows + 2, columns + 7), 777.0, dtype=dtype, device=device)
    lens = torch.stack((x.lens, x.lens * 0 - 9), 1).flatten().to(device)[::2]
    tables = torch.stack((x.tables, x.tables * 0 - 9), 1).flatten(0, 1).to(device)[::2]
    with torch.device("meta"):
        got = flashinfer.fp8_paged_mqa_logits(
            x.q.to(device), x.cache, x.weights.to(device), tables, lens, most, output_dtype=dtype,
            out=buffer[1:-1, :-7],
        )  # fmt: skip
    assert got.shape == (rows, most) and got.data_ptr() == buffer[1].data_ptr()
    assert (buffer[0] == 777).all() and (buffer[-1] == 777).all() and (buffer[:, most:] == 777).all()
    truth, same = (x.truth(t, most) for t in (torch.float64, torch.float32))
    compare(got.cpu(), truth, same, seen_of(x.lens, tokens))


def test_nan_rows_stay_in_their_rows(backend, device):
    x = Case([20, 17], heads=4, device=device)
    weights = x.weights.clone()
    weights[0] = float("nan")
    run = lambda w: flashinfer.fp8_paged_mqa_logits(x.q.to(device), x.cache, w.to(device), x.tables.to(device),
                                                    x.lens.to(device), 20)  # fmt: skip
    got, clean = run(weights).cpu(), run(x.weights).cpu()
    assert got[0].isnan().all() and torch.equal(got[1, :17], clean[1, :17])


@pytest.mark.parametrize("tokens", (1, 3))
@pytest.mark.parametrize("interleaved", (False, True))
def test_mxfp4_pages(tokens, interleaved, backend, device):
    """Codes and factors are read by the formats' tables; factors of 2^-127 and of 2^100 among them."""
    torch.manual_seed(0)
    lens, heads, dim, page, pages = torch.tensor([19, 0, 5], dtype=torch.int32), 3, 64, 8, 7
    q = torch.randint(256, (3, tokens, heads, dim // 2), dtype=torch.uint8)
    q_sf = torch.randint(120, 132, (3, tokens, heads, dim // 32), dtype=torch.uint8)
    keys = torch.randint(256, (pages, page, dim // 2), dtype=torch.uint8)
    factors = torch.randint(110, 140, (pages, page, dim // 32), dtype=torch.uint8)
    factors[3, 1], factors[0, 2] = 0, 227
    stored = factors
    if interleaved:
        stored = torch.empty_like(factors)
        for t in range(page):
            stored[:, t % (page // 4) * 4 + t // (page // 4)] = factors[:, t]
    pool = torch.cat((keys.flatten(1), stored.flatten(1)), 1).view(pages, page, 1, dim // 2 + dim // 32)
    tables = torch.tensor([[3, 0, 5], [-1, -1, -1], [6, -1, -1]], dtype=torch.int32)
    weights = torch.randn(3 * tokens, heads)
    given = [t.to(device) for t in (q, q_sf, pool, weights, tables, lens)]
    for dtype in (torch.bfloat16, torch.float32):
        got = flashinfer.fp4_paged_mqa_logits(*given, 24, output_dtype=dtype, is_kv_sf_interleaved=interleaved)
        assert got.shape == (3 * tokens, 24) and got.dtype == dtype
        wide = lambda codes, sf: (formats.decode("e2m1", formats.unpack(codes)).unflatten(-1, (-1, 32))
                                  * formats.ue8m0(sf)[..., None]).flatten(-2)  # fmt: skip
        truth = torch.zeros(3 * tokens, 24, dtype=torch.float64)
        for row in range(3 * tokens):
            b, t = divmod(row, tokens)
            for at in range(int(lens[b])):
                where = int(tables[b, at // page]), at % page
                dots = wide(q[b, t], q_sf[b, t]) @ wide(keys[where], factors[where])
                truth[row, at] = (dots.relu() * weights[row].double()).sum()
        compare(got.cpu(), truth, truth.float(), seen_of(lens, tokens))


@pytest.mark.parametrize("heads, keys", ((1, 70), (5, 70), (32, 70), (16, 2600)))
def test_keys_side_by_side(heads, keys, backend, device):
    """Every element is written: -inf beside a query's keys; windows may be empty, or reach past the keys."""
    torch.manual_seed(1)
    queries, dim, far = 6, 32, keys - 1
    q, k = torch.randn(queries, heads, dim).to(FP8), torch.randn(keys, dim).to(FP8)
    scales, weights = torch.rand(keys), torch.randn(queries, heads)
    ks = torch.tensor([0, 5, far, 0, 40, 7], dtype=torch.int32) + (keys > 70) * 70
    ke = torch.tensor([keys, 5, keys, 90, far, 3 * keys], dtype=torch.int64)
    given = [t.to(device) for t in (q, k, scales, weights, ks, ke)]
    got = fp8_mqa_logits(given[0], (given[1], given[2][:, None]), *given[3:])
    at = torch.arange(keys)
    seen = (at >= ks[:, None]) & (at < ke[:, None])
    results = []
    for dtype in (torch.float64, torch.float32):
        dots = fp8_dots(q.flatten(0, 1), k.T, dtype, device).view(queries, heads, keys).relu()
        value = torch.einsum("qhk,qh->qk", dots, weights.to(dtype)) * scales.to(dtype)
        results.append(torch.where(seen, value, -torch.inf))
    assert_close(got.cpu(), results[1], results[0], "logits")


def moved(x):
    """A contiguous tensor of the same values, a byte past what is aligned."""
    memory = torch.empty(x.numel() + 1, dtype=torch.uint8, device=x.device)[1:]
    return memory.view(x.dtype).view(x.shape).copy_(x)


def test_rows_at_any_address(backend, device):
    q, k, scales, weights = torch.randn(5, 3, 32), torch.randn(70, 32), torch.rand(70), torch.randn(5, 3)
    q, k, scales, weights = q.to(device, FP8), k.to(device, FP8), scales.to(device), weights.to(device)
    ks, ke = (torch.full((5,), n, dtype=torch.int32, device=device) for n in (0, 70))
    expected = fp8_mqa_logits(q, (k, scales), weights, ks, ke)
    for given in ((moved(q), k), (q, moved(k))):
        assert torch.equal(fp8_mqa_logits(given[0], (given[1], scales), weights, ks, ke), expected)
    x = Case([20], heads=4, device=device)
    rest = [t.to(device) for t in (x.weights, x.tables, x.lens)]
    expected = flashinfer.fp8_paged_mqa_logits(x.q.to(device), x.cache, *rest, 20)
    # The step of the only request is any.
    apart = torch.empty(256, dtype=torch.uint8, device=device).view(FP8).as_strided((1, 1, 4, 64), (261, 256, 64, 1))
    for q in (moved(x.q.to(device)), apart.copy_(x.q)):
        assert torch.equal(flashinfer.fp8_paged_mqa_logits(q, x.cache, *rest, 20), expected)


BAD = {
    "q": dict(q=torch.zeros(2, 1, 4, 64)),
    "kv_fused": dict(kv_fused=torch.zeros(3, 16, 1, 67, dtype=torch.uint8)),
    "weights": dict(weights=torch.zeros(4, 2)),
    "block_tables": dict(block_tables=torch.zeros(2, dtype=torch.int32)),
    "seq_lens": dict(seq_lens=torch.zeros(3, dtype=torch.int32)),
    "max_seq_len": dict(max_seq_len=1.5),
    "output_dtype": dict(output_dtype=torch.bfloat16),
    "acc_dtype": dict(acc_dtype=torch.float64),
    "out": dict(out=torch.zeros(2, 20)),
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_input_is_refused_by_name(argument):
    x = Case([20, 17], heads=4)
    call = dict(q=x.q, kv_fused=x.cache, weights=x.weights, block_tables=x.tables, seq_lens=x.lens, max_seq_len=20)
    with pytest.raises(ValueError, match=f"^{argument}: got "):
        flashinfer.fp8_paged_mqa_logits(**call | BAD[argument])


def test_nothing_to_compile_without_a_device():
    flashinfer.precompile_paged_mqa_logits("cpu")
    with pytest.raises(ValueError, match="variants"):
        flashinfer.precompile_paged_mqa_logits("cpu", ("fp6",))
    assert flashinfer.min_block_table_width(33, 32) == 2 and flashinfer.padded_seq_len(257) == 512
