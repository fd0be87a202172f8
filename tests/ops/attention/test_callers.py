"""What callers of upstream's wrappers and functions send and get back beside numbers: older names of types, fixed
buffers, axes of results."""

from dataclasses import replace

import pytest
import torch

import flashinfer
from flashinfer.testing import generate
from tests.ops.attention.cases import check, workspace
from tests.ops.attention.oracle import Options
from tests.ops.attention.test_engines import HALF

E4M3 = torch.float8_e4m3fn
KV = [5, 0, 40, 33, 64, 7]


def decodes(device, dtype=HALF):
    """One query a request, over keys and values that FP8 has too; and the pages of an FP8 cache."""
    x = generate.ragged_batch([1] * len(KV), KV, 4, 2, 64, dtype=dtype, device=device)
    x = replace(x, k=x.k.to(E4M3).to(dtype), v=x.v.to(E4M3).to(dtype))
    pages = generate.paged(x, 8)
    return x, pages, pages.kv_cache.to(E4M3)


@pytest.mark.parametrize(
    "given, q_dtype, fp8",
    ((dict(data_type=E4M3), HALF, True), (dict(data_type="float8_e4m3fn", q_data_type="float16"), HALF, True),
     (dict(data_type=E4M3, q_data_type=torch.bfloat16), torch.bfloat16, True), (dict(data_type=HALF), HALF, False),
     (dict(data_type=torch.bfloat16), torch.bfloat16, False), (dict(data_type=HALF, kv_data_type=E4M3), HALF, True)),
)  # fmt: skip
def test_the_older_name_of_both_types(given, q_dtype, fp8, device):
    """An FP8 data_type is that of the cache: queries stay in float16, as they are by default."""
    x, pages, narrow = decodes(device, q_dtype)
    cache = narrow if fp8 else pages.kv_cache
    tables, sizes = (pages.indptr, pages.indices, pages.last_page_len), (4, 2, 64, 8)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    decode.plan(*tables, *sizes, **given)
    check(decode.run(x.q, cache, return_lse=True), x, Options())
    single = flashinfer.PODWithPagedKVCacheWrapper(workspace(device))
    single.plan(*tables, *sizes, **given)
    p = generate.ragged_batch([3], [9], 4, 2, 64, dtype=q_dtype, device=device)
    of_p, of_d = single.run(p.q, p.k, p.v, x.q, cache, return_lse_p=True, return_lse_d=True)
    check(of_p, p, Options())
    check(of_d, x, Options())
    both = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace(device))
    both.plan(*(x.qo_indptr, *tables) * 2, *sizes, **given)
    for part in both.run(x.q, cache, x.q, cache, return_lse=True):
        check(part, x, Options())


@pytest.mark.parametrize("wrapper", ("decode", "paged", "ragged"))
def test_fixed_buffers_of_another_number_of_requests(wrapper, device):
    def buffer(count):
        return torch.zeros(count, dtype=torch.int32, device=device)

    def made(qo, kv, last):
        if wrapper == "decode":
            tables = dict(paged_kv_indptr_buffer=buffer(kv), paged_kv_indices_buffer=buffer(20),
                          paged_kv_last_page_len_buffer=buffer(last))  # fmt: skip
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_cuda_graph=True, **tables)
        if wrapper == "ragged":
            tables = dict(qo_indptr_buf=buffer(qo), kv_indptr_buf=buffer(kv))
            return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), use_cuda_graph=True, **tables)
        tables = dict(qo_indptr_buf=buffer(qo), paged_kv_indptr_buf=buffer(kv), paged_kv_indices_buf=buffer(20),
                      paged_kv_last_page_len_buf=buffer(last))  # fmt: skip
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), use_cuda_graph=True, **tables)

    assert made(4, 4, 3).is_cuda_graph_enabled
    if wrapper != "decode":
        name = "kv_indptr_buf" if wrapper == "ragged" else "paged_kv_indptr_buf"
        with pytest.raises(ValueError, match=f"^{name}: got 5 elements; allowed: 4, as qo_indptr_buf has"):
            made(4, 5, 3)
    if wrapper != "ragged":
        name = "paged_kv_last_page_len_buf" + ("fer" if wrapper == "decode" else "")
        with pytest.raises(ValueError, match=f"^{name}: got 4 elements; allowed: 3, as "):
            made(4, 4, 4)
