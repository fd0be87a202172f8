"""What wrappers keep between plans, on a card that is not there: what other batches launch is what a new one would."""

import pytest
import torch

import flashinfer

PAGE, HEADS, DIM = 16, (4, 2), 64


def table(*values):
    return torch.tensor(values, dtype=torch.int32)


def on_host(*values):
    from tests.core import card

    return card.on_host(table(*values))


def workspace():
    return torch.empty(1 << 20, dtype=torch.uint8)


def halves(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


CACHE = halves(200, 2, PAGE, HEADS[1], DIM)


def words(launch):
    return [int.from_bytes(value[:8], "little") for value in launch[3]]


def holds(made):
    """How often `made` prepares a launch."""
    from flashinfer._core.launch import _Loaded

    times, hold = [], _Loaded.hold

    def counted(*args):
        times.append(1)
        return hold(*args)

    _Loaded.hold = counted
    try:
        made()
    finally:
        _Loaded.hold = hold
    return len(times)


def growing_batches(card, where):
    """Page ids grow and move from plan to plan: launches follow, and none is prepared again."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    q, out = halves(2, HEADS[0], DIM), halves(2, HEADS[0], DIM)
    indptr, last = (on_host(0, 3, 7), on_host(5, 16)) if where == "host" else (table(0, 3, 7), table(5, 16))

    def step(pages):
        wrapper.plan(indptr, pages, last, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
        wrapper.run(q, CACHE, out=out)

    step(on_host(*range(9)) if where == "host" else table(*range(9)))
    for n in (10, 20, 21, 100, 7):
        values = range(n, 2 * n)
        pages = on_host(*values) if where == "host" else table(*values)
        launches = []
        assert holds(lambda pages=pages: launches.extend(card.made(lambda: step(pages)))) == 0
        published = wrapper._paged_kv_indices_buf
        assert published.tolist() == list(values)
        assert len(launches) == 2 and published.data_ptr() in words(launches[1])


def batches_that_only_the_device_knows(card):
    """A plan whose rows no one has told must not go into the work list of a smaller one."""
    kept = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="portable")

    def grid(wrapper, rows):
        tables = table(0, rows, 2 * rows), table(0, 8, 16), table(*range(16)), table(16, 16)
        wrapper.plan(*tables, *HEADS, DIM, PAGE, causal=True, q_data_type=torch.bfloat16)
        schedule, attend = card.made(lambda: wrapper.run(halves(2 * rows, HEADS[0], DIM), CACHE))
        assert words(schedule)[0] in words(attend)
        return attend[1]

    for rows in (32, 32, 1024, 16, 2048):
        anew = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="portable")
        assert grid(kept, rows) == grid(anew, rows)


def graph_buffers_end_where_they_end(card):
    indices = torch.full((12,), -7, dtype=torch.int32)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), use_cuda_graph=True, paged_kv_indptr_buffer=torch.zeros(4, dtype=torch.int32),
        paged_kv_indices_buffer=indices[:8], paged_kv_last_page_len_buffer=torch.zeros(3, dtype=torch.int32),
    )  # fmt: skip
    for n in (5, 6, 8, 4):
        wrapper.plan(on_host(0, 2, n), on_host(*range(n)), on_host(1, 1), *HEADS, DIM, PAGE,
                     q_data_type=torch.bfloat16)  # fmt: skip
        assert indices[:n].tolist() == list(range(n)) and indices[8:].tolist() == [-7] * 4
        assert wrapper._paged_kv_indptr_buf.tolist() == [0, 2, n, n]
    with pytest.raises(ValueError, match="kv_indices: got 9 elements; allowed: at most 8"):
        wrapper.plan(on_host(0, 2, 9), on_host(*range(9)), on_host(1, 1), *HEADS, DIM, PAGE,
                     q_data_type=torch.bfloat16)  # fmt: skip


def latent_plans(card):
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace())
    q, q_pe, out = halves(2, 4, 64), halves(2, 4, 16), halves(2, 4, 64)
    ckv, kpe = halves(200, PAGE, 64), halves(200, PAGE, 16)

    def plan(pages, lens=(33, 64), indptr=(0, 3, 7)):
        wrapper.plan(on_host(0, 1, 2), on_host(*indptr), table(*pages), on_host(*lens), 4, 64, 16, PAGE, False, 0.1,
                     torch.bfloat16)  # fmt: skip

    def step(pages):
        plan(pages)
        wrapper.run(q, q_pe, ckv, kpe, out=out)

    step(range(7))
    for n in (8, 30, 31):
        launches = []
        assert holds(lambda n=n: launches.extend(card.made(lambda: step(range(n))))) == 0
        assert wrapper._kv_indices_buf.data_ptr() in words(launches[1])
        assert wrapper._kv_len_arr_buf.tolist() == [33, 64]
    wrong = {
        "kv_len_arr: got 49 of request 0; allowed: what its": dict(lens=(49, 64)),
        "kv_len_arr: got -1; allowed: no negative": dict(lens=(33, -1)),
        "kv_indptr: got a decrease at index 2": dict(indptr=(0, 7, 3)),
        r"kv_indptr: got \[2\]; allowed: \[3\]": dict(indptr=(0, 7)),
        "kv_indptr: got 9 last; allowed: at most 7": dict(indptr=(0, 3, 9)),
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            plan(range(7), **change)
    plan(range(7), lens=(0, 0))


@pytest.mark.parametrize("where", ["host", "device"])
def test_growing_batches(where, on_card):
    on_card(growing_batches, where)


@pytest.mark.parametrize(
    "check", [batches_that_only_the_device_knows, graph_buffers_end_where_they_end, latent_plans]
)
def test_plans(check, on_card):
    on_card(check)
