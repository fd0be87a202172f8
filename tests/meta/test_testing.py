"""The instruments that other tests trust: the error rules, the case generators, the timing."""

import itertools
import math

import numpy as np
import pytest
import torch

from flashinfer.testing import assert_bitwise, assert_close, bench_gpu_time
from flashinfer.testing import generate as g
from tests.pairs import pairs

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def product(dtype, rows=64, columns=48, inner=96):
    """A matrix product: an exact result, torch's in `dtype`, and one that accumulates in float32."""
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    return (a.float() @ b.float()).to(dtype), a @ b, a.double() @ b.double()


class TestAssertClose:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_takes_what_is_as_good_as_torch(self, dtype):
        out, same, truth = product(dtype)
        assert_close(out, same, truth)
        assert_close(same, same, truth)
        assert_close(truth.to(dtype), same, truth)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("spoil", ["element", "row", "sign", "swap", "drop"])
    def test_refuses_what_is_worse(self, dtype, spoil):
        out, same, truth = product(dtype)
        if spoil == "element":
            out[5, 7] += 0.2 * out.abs().max()
        elif spoil == "row":
            out[5] *= 1.05
        elif spoil == "sign":
            out[5, 7] = -out[5, 7] - 1
        elif spoil == "swap":
            out[[3, 4]] = out[[4, 3]]
        else:
            out[:, 1:] = out[:, :-1].clone()
        with pytest.raises(AssertionError, match=r"out: error .* allowed .* worst element \(\d+, \d+\)"):
            assert_close(out, same, truth)

    @pytest.mark.parametrize("dtype", [torch.float64, *DTYPES, torch.float8_e4m3fn])
    @pytest.mark.parametrize("shape", [(1, 96), (64, 48), (3, 5), (2, 3, 32)], ids=str)
    @pytest.mark.parametrize("wrong", [lambda x: 0 * x, lambda x: math.nan * x, lambda x: 2 * x, lambda x: 1.1 * x])
    def test_zeros_nan_twice_and_ten_percent_fail(self, dtype, shape, wrong):
        """By each rule, also where the peer errs by nothing, and by as much as it may."""
        truth = torch.randn(shape, dtype=torch.float64)
        right = truth.to(dtype)
        for peer in (right, (truth * 1.015).to(dtype)):
            assert_close(right, peer, truth)
            with pytest.raises(AssertionError):
                assert_close(wrong(right.double()).to(dtype), peer, truth)

    @pytest.mark.parametrize("wrong", [lambda x: 0 * x, lambda x: math.nan * x, lambda x: 2 * x, lambda x: 1.1 * x])
    def test_they_fail_where_values_pass_a_coarser_format(self, wrong):
        truth = torch.randn(20, 64, dtype=torch.float64)
        peer = truth.to(torch.float8_e4m3fn).float()
        with pytest.raises(AssertionError, match="no bound"):
            assert_close(peer, peer, truth)
        assert_close(peer, peer, truth, through=2**-3)
        with pytest.raises(AssertionError, match="error|NaN"):
            assert_close(wrong(peer), peer, truth, through=2**-3)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_peer_that_errs_by_more_than_2_percent_is_refused(self, dtype):
        out, same, truth = product(dtype)
        with pytest.raises(AssertionError, match="no bound"):
            assert_close(out, (same * 1.03).to(dtype), truth)
        with pytest.raises(AssertionError, match="no bound"):
            assert_close(torch.zeros_like(out), torch.zeros_like(out), truth)

    def test_float32_is_bounded_by_the_format_and_not_by_a_peer_that_was_lucky(self):
        truth = torch.rand(40, 4, dtype=torch.float64) + 3
        same = truth.float()
        ulp = torch.nextafter(same, same + 9) - same
        assert_close(same + 4 * ulp, same, truth)
        out = same.clone()
        out[7, 2] += 40 * ulp[7, 2]
        with pytest.raises(AssertionError, match=r"error of one element .*\(7, 2\)"):
            assert_close(out, same, truth)

    def test_a_wrong_small_row_does_not_hide_behind_a_large_one(self):
        out, same, truth = product(torch.bfloat16)
        scale = torch.ones(64, 1, dtype=torch.float64)
        scale[1::2] = 2.0**-9
        out, same, truth = (out * scale).bfloat16(), (same * scale).bfloat16(), truth * scale
        assert_close(out, same, truth)
        out[3] = 0
        assert (out - truth).abs().max() < 2 * (same - truth).abs().max()
        with pytest.raises(AssertionError, match="error norm of row 3"):
            assert_close(out, same, truth)

    def test_rows_whose_truth_is_zero_are_zero(self):
        out, same, truth = product(torch.float16)
        out[5], same[5], truth[5] = 0, 0, 0
        assert_close(out, same, truth)
        out[5, 0] = 1e-4
        with pytest.raises(AssertionError, match="row 5"):
            assert_close(out, same, truth)

    @pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
    def test_specials_stand_where_the_truth_has_them(self, special):
        out, same, truth = product(torch.float32)
        truth[2, 3] = same[2, 3] = special
        with pytest.raises(AssertionError, match=r"first at \(2, 3\)"):
            assert_close(out, same, truth)
        out[2, 3] = special
        assert_close(out, same, truth)
        out[4, 4] = special
        with pytest.raises(AssertionError, match=r"first at \(4, 4\)"):
            assert_close(out, same, truth)

    def test_overflow_is_that_of_the_dtype(self):
        truth = torch.full((16,), 1e5, dtype=torch.float64)
        out = torch.full((16,), math.inf, dtype=torch.float16)
        assert_close(out, out, truth)

    def test_a_peer_that_overflows_gives_no_bound(self):
        truth = torch.ones(16, dtype=torch.float64)
        with pytest.raises(AssertionError, match="no bound"):
            assert_close(truth.half(), torch.full((16,), math.inf).half(), truth)

    def test_shapes_and_dtypes_are_the_same(self):
        out, same, truth = product(torch.float32)
        for arguments in ((out[1:], same, truth), (out, same.half(), truth), (out, same, truth[1:]), (out, same, same)):
            with pytest.raises(AssertionError, match=r"shape|dtype|float64"):
                assert_close(*arguments)
        assert_close(out[:0], same[:0], truth[:0])

    def test_integers_are_equal(self):
        truth = torch.arange(5, dtype=torch.float64)
        assert_close(truth.int(), truth.int(), truth)
        with pytest.raises(AssertionError, match="1 of 5"):
            assert_close(torch.tensor([0, 1, 2, 3, 5], dtype=torch.int32), truth.int(), truth)


def test_assert_bitwise():
    x = torch.tensor([[0.0, math.nan], [1.0, 2.0]])
    assert_bitwise(x, x.clone())
    assert_bitwise(x.T, x.T.contiguous())
    for other, where in ((torch.tensor([[-0.0, math.nan], [1.0, 2.0]]), r"\(0, 0\)"), (x + 1, r"\(0, 0\)")):
        with pytest.raises(AssertionError, match=where):
            assert_bitwise(x, other)
    for other in (x.double(), x[:1]):
        with pytest.raises(AssertionError, match=r"shape|dtype"):
            assert_bitwise(x, other)


QO, KV = [3, 0, 5, 1], [33, 0, 17, 64]


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dim_vo", [None, 8])
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_pages_hold_the_ragged_rows_and_nothing_else(kv_dtype, head_dim_vo, page_size, kv_layout, device):
    ragged = g.ragged_batch(QO, KV, 4, 2, 16, head_dim_vo=head_dim_vo, kv_dtype=kv_dtype, device=device)
    cache = g.paged(ragged, page_size, kv_layout)
    assert cache.indices.unique().numel() == cache.indices.numel() == sum(-(-n // page_size) for n in KV)
    for part, pages in enumerate(cache.caches):
        rows = pages.transpose(1, 2) if kv_layout == "HND" else pages
        used = torch.zeros(rows.shape[:2], dtype=torch.bool, device=device)
        for i, n in enumerate(KV):
            table = cache.indices[cache.indptr[i] : cache.indptr[i + 1]].long()
            if n:
                assert (len(table) - 1) * page_size + int(cache.last_page_len[i]) == n
            for token in range(n):
                page, slot = table[token // page_size], token % page_size
                assert_bitwise(rows[page, slot], ragged.request(i)[1 + part][token])
                used[page, slot] = True
        assert used.sum() == sum(KV)
        assert rows.float()[~used].isnan().all() and not rows.float()[used].isnan().any()


def test_generated_values_follow_the_seed():
    def draw():
        torch.manual_seed(7)
        return g.ragged_batch(QO, KV, 4, 2, 16).k, g.lengths(9), g.random_mask(QO, KV)

    first, second = draw(), draw()
    assert_bitwise(first[0], second[0])
    assert first[1] == second[1] and torch.equal(first[2], second[2])
    assert max(first[1]) == 1025 and 0 in first[1]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_strided_keeps_values_and_guards_the_gaps(axis):
    x = torch.randn(3, 4, 5)
    view = g.strided(x, axis)
    assert_bitwise(view.contiguous(), x)
    assert not view.is_contiguous()
    storage = torch.empty(0).set_(view.untyped_storage())
    assert storage.isnan().sum() == storage.numel() - x.numel() > 0


def test_packed_masks_are_numpys_little_endian_bits():
    mask = g.random_mask(QO, KV)
    packed, offsets = g.pack_mask(mask, QO, KV)
    parts = mask.split([qo * kv for qo, kv in zip(QO, KV)])
    expected = [np.packbits(part.numpy(), bitorder="little") for part in parts]
    assert (np.concatenate(expected) == packed.numpy()).all()
    assert offsets.tolist() == [0, *np.cumsum([len(e) for e in expected])]
    assert not mask.split([qo * kv for qo, kv in zip(QO, KV)])[0].view(3, 33)[1].any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_gpu_timing_needs_a_gpu():
    with pytest.raises(ValueError, match="CUDA device"):
        bench_gpu_time(lambda: None)


@pytest.mark.gpu
class TestGpuTiming:
    SIZE = 64 << 20

    def copy(self, device, **options):
        source = torch.zeros(self.SIZE, dtype=torch.uint8, device=device)
        times = bench_gpu_time(lambda a, b: b.copy_(a), input_args=(source, source.clone()), **options)
        return sorted(times)[len(times) // 2]

    @pytest.mark.parametrize("graph", [False, True])
    def test_a_copy_takes_what_memory_allows(self, device, graph):
        gb_s = 2 * self.SIZE / self.copy(device, use_cuda_graph=graph) / 1e6
        assert 100 < gb_s < 10000

    def test_graph_and_events_agree_on_a_long_kernel(self, device):
        assert self.copy(device, use_cuda_graph=True) == pytest.approx(self.copy(device), rel=0.25)

    @pytest.mark.parametrize("graph", [False, True])
    def test_a_cold_cache_is_slower_than_a_warm_one(self, device, graph):
        # Scattered reads: of a line that they miss they use an eighth, where streams are nearly as fast from memory.
        x = torch.ones(4 << 20, device=device)
        at = torch.randperm(x.numel(), device=device)[: 1 << 20]

        def median(cold):
            options = {"use_cuda_graph": graph, "cold_l2_cache": cold, "input_args": (x, at)}
            return sorted(bench_gpu_time(torch.take, **options))

        cold, warm = median(True), median(False)
        assert cold[len(cold) // 2] > 1.2 * warm[len(warm) // 2]

    def test_counts_are_honoured(self, device):
        calls = []
        times = bench_gpu_time(lambda: calls.append(1), dry_run_iters=2, repeat_iters=3)
        assert len(times) == 3 and len(calls) == 5 + 2 + 3
        assert len(bench_gpu_time(lambda: torch.zeros(1, device=device), repeat_iters=4, use_cuda_graph=True)) == 4
        for name in ("repeat_iters", "num_iters_within_graph"):
            with pytest.raises(ValueError, match=name):
                bench_gpu_time(lambda: None, **{name: 0})
        with pytest.warns(UserWarning, match="CUPTI"):
            bench_gpu_time(lambda: None, repeat_iters=1, enable_cupti=True)


def test_pairs_of_values():
    values = (1, 2, 3), "ab", (True, False), range(4)
    rows = pairs(*values)
    assert len(rows) < 20 and set(rows) < set(itertools.product(*values))
    for i, j in itertools.combinations(range(4), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(values[i], values[j]))
