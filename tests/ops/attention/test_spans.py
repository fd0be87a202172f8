"""Bidirectional spans inside a causal prompt, against the mask written out and attention in float64."""

import pytest
import torch

import flashinfer
from flashinfer.testing import generate
from tests.ops.attention.cases import backends, check, workspace
from tests.ops.attention.oracle import Extras, Options

Wrapper = flashinfer.BatchPrefillWithCausalBidirectionalRangesWrapper
QO, KV = (30, 0, 1, 17), (41, 7, 40, 17)


def spans(qo, kv, device):
    """Per row of q a span that has it, one that does not, or none."""
    rows = []
    for n, m in zip(qo, kv):
        for i in range(n):
            at = i + m - n
            first = at // 8 * 8
            kinds = (-1, -1), (first, min(first + 7, m - 1)), (2, min(11, m - 1)), (first, m + 50)
            rows.append(kinds[first // 8 % 4])
    return torch.tensor(rows, dtype=torch.int32, device=device).view(-1, 2)


def masks(qo, kv, ranges, causal_window, range_window):
    result, row = [], 0
    for n, m in zip(qo, kv):
        mask = torch.zeros(n, m, dtype=torch.bool)
        for i in range(n):
            at, (first, last) = i + m - n, ranges[row].tolist()
            for key in range(m):
                near = causal_window < 0 or at - key <= causal_window
                in_span = first <= key <= last and (range_window <= 0 or at - key < range_window)
                mask[i, key] = (key <= at and near) or in_span
            row += 1
        result.append(mask.flatten().to(ranges.device))
    return result


def planned(x, paged, backend, layout="NHD", **plan):
    wrapper = Wrapper(
        workspace(x.q.device), layout, q_data_type=x.q.dtype, kv_data_type=x.k.dtype, head_dim_qk=64, head_dim_vo=64
    )
    wrapper._backend = backend
    wrapper.plan(
        x.qo_indptr, paged.indptr, paged.indices, paged.last_page_len, x.q.shape[1], x.k.shape[1], 64, paged.page_size,
        **plan,
    )  # fmt: skip
    return wrapper


@pytest.mark.parametrize("windows", ((-1, -1), (3, 0), (0, 4), (-1, 1), (5, 100)))
@pytest.mark.parametrize("page_size, layout", ((1, "NHD"), (16, "HND"), (5, "NHD")))
def test_against_the_mask(page_size, layout, windows, device):
    x = generate.ragged_batch(list(QO), list(KV), 4, 2, 64, dtype=torch.float16, device=device)
    ranges = spans(QO, KV, device)
    extras = Extras(masks(QO, KV, ranges, *windows))
    paged = generate.paged(x, page_size, layout)
    for backend in backends(device):
        wrapper = planned(x, paged, backend, layout)
        check(wrapper.run(x.q, paged.kv_cache, ranges, *windows, return_lse=True), x, Options(), extras)
        check(wrapper.run_return_lse(x.q, paged.kv_cache, ranges, *windows), x, Options(), extras)


def test_splits_of_long_requests(device):
    x = generate.ragged_batch([9, 2], [300, 120], 4, 2, 64, dtype=torch.float16, device=device)
    ranges = torch.tensor([[150, 299]] * 5 + [[-1, -1]] * 4 + [[0, 119], [200, 210]], dtype=torch.int32, device=device)
    extras = Extras(masks((9, 2), (300, 120), ranges, 20, 0))
    paged = generate.paged(x, 16)
    for backend in backends(device):
        wrapper = planned(x, paged, backend, fixed_split_size=64)
        check(wrapper.run(x.q, paged.kv_cache, ranges, 20, return_lse=True), x, Options(), extras)


def test_bad_input_names_the_argument(device):
    x = generate.ragged_batch(list(QO), list(KV), 4, 2, 64, dtype=torch.float16, device=device)
    paged, ranges = generate.paged(x, 16), spans(QO, KV, device)
    for name, value in (
        ("causal", True), ("window_left", 3), ("logits_soft_cap", 5.0), ("pos_encoding_mode", "ALIBI"),
        ("custom_mask", torch.ones(1, dtype=torch.bool)), ("head_dim_vo", 32), ("q_data_type", torch.bfloat16),
        ("max_sequence_kv", 50), ("prefix_len_ptr", torch.ones(4)), ("token_pos_in_items_len", 2),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            planned(x, paged, "auto", **{name: value})
    with pytest.raises(ValueError, match="pos_encoding_mode"):
        Wrapper(workspace(device), pos_encoding_mode="ROPE_LLAMA")
    wrapper = planned(x, paged, "auto")
    for wrong in (ranges[1:], ranges.long(), ranges.flatten(), ranges.repeat(1, 2)[:, ::2], None):
        with pytest.raises(ValueError, match="bidirectional_ranges"):
            wrapper.run(x.q, paged.kv_cache, wrong)
    tables = x.qo_indptr, paged.indptr, paged.indices, paged.last_page_len
    assert wrapper.workspace_size(*tables, 4, 2, 64, 16)[1] == 0
    with pytest.raises(ValueError, match="window_left"):
        wrapper.workspace_size(*tables, 4, 2, 64, 16, window_left=1)
