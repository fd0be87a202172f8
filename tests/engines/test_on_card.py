"""What engines make wrappers launch, on a card that is not there: pointers of the tables in place, and of no others."""

import pytest
import torch

import flashinfer

HEADS, DIM = (4, 2), 64


def table(*values):
    return torch.tensor(values, dtype=torch.int32)


def on_host(*values):
    from tests.core import card

    return card.on_host(table(*values))


def halves(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


CACHE = halves(400, 2, 1, HEADS[1], DIM)


def words(launch):
    return [int.from_bytes(value[:8], "little") for value in launch[3]]


def pointers(launches):
    return {word for launch in launches for word in words(launch)}


def arguments(wrapper, qo, kv, lens):
    return (
        wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer,
        on_host(*qo), on_host(*kv), on_host(*lens), qo[-1], len(lens), *HEADS, 1, wrapper.is_cuda_graph_enabled, DIM,
        DIM, False, -1, -1, False, 0, 0,
    )  # fmt: skip


def buffers(paged=True):
    tables = dict(qo_indptr_buf=table(0, 0, 0), paged_kv_indptr_buf=table(0, 0, 0),
                  paged_kv_indices_buf=table(*[0] * 300), paged_kv_last_page_len_buf=table(1, 1))  # fmt: skip
    if not paged:
        _, *rest = tables.values()
        names = "paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"
        return dict(zip(names, rest, strict=True))
    return tables


def begin(wrapper, kv, lens, qo=None):
    tables = (table(*kv), table(*range(kv[-1])), table(*[1] * len(lens)))
    wrapper.begin_forward(*(() if qo is None else (table(*qo),)), *tables, *HEADS, DIM, 1, q_data_type=torch.bfloat16)


def decodes_by_the_module(card):
    """One launch plans, one runs; neither is prepared twice."""
    fixed = buffers(paged=False)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(1 << 20, dtype=torch.uint8), "NHD", True, True, backend="fa2", **fixed
    )
    q, out = halves(2, HEADS[0], DIM), halves(2, HEADS[0], DIM)
    begin(wrapper, (0, 9, 39), (9, 30))
    wrapper.run(q, CACHE, out=out)
    first = card.made(lambda: wrapper.run(q, CACHE, out=out))
    for kv, lens in (((0, 10, 41), (10, 31)), ((0, 50, 51), (50, 1))):
        fixed["paged_kv_indptr_buffer"].copy_(table(*kv))
        (planned,) = card.made(lambda: wrapper._cached_module.plan(*arguments(wrapper, (0, 1, 2), kv, lens)))
        assert {fixed[name].data_ptr() for name in ("paged_kv_indptr_buffer", "paged_kv_last_page_len_buffer")} <= set(
            words(planned)
        )
        again = card.made(lambda: wrapper.run(q, CACHE, out=out))
        # What a captured graph holds is what is planned and launched.
        assert again == first and words(planned)[0] in words(again[0])
        assert fixed["paged_kv_indices_buffer"].data_ptr() in words(again[0])


def verifies_by_the_module(card):
    """Layers asked forward() for other options than plan() knew: their work list is the one that is filled."""
    fixed = buffers()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(1 << 20, dtype=torch.uint8), use_cuda_graph=True, backend="portable", **fixed
    )
    q = halves(8, HEADS[0], DIM)

    def forward():
        return wrapper.forward(q, CACHE, causal=True, sm_scale=0.2)

    begin(wrapper, (0, 20, 40), (20, 20), (0, 4, 8))
    forward()
    attend = card.made(forward)
    for kv, lens in (((0, 21, 60), (21, 39)), ((0, 4, 8), (4, 4))):
        wrapper._paged_kv_indptr_buf.copy_(table(*kv))
        planned = card.made(lambda: wrapper._cached_module.plan(*arguments(wrapper, (0, 4, 8), kv, lens)))
        lists = {words(launch)[0] for launch in planned}
        assert lists & set(words(attend[0])), "the work list of the captured launch is filled"
        again = card.made(forward)
        # The first launch that is not captured is bound again; the same kernel on the same work list.
        assert [launch[0] for launch in again] == [launch[0] for launch in attend]
        assert lists & set(words(again[0])) == lists & set(words(attend[0]))


def tables_that_are_replaced(card):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), backend="fa2")
    q, out = halves(2, HEADS[0], DIM), halves(2, HEADS[0], DIM)
    begin(wrapper, (0, 9, 39), (9, 30))
    old = [getattr(wrapper, name) for name in ("_paged_kv_indptr_buf", "_paged_kv_indices_buf")]
    for _ in range(3):
        made = card.made(lambda: wrapper.run(q, CACHE, out=out))
    assert len(made) == 1 and old[1].data_ptr() in pointers(made)
    for kv in ((0, 10, 41), (0, 2, 90)):
        wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf = new = table(*kv), table(*range(kv[-1]))
        made = card.made(lambda: wrapper.run(q, CACHE, out=out))
        assert len(made) == 2 and {t.data_ptr() for t in new} <= pointers(made)
        assert not {t.data_ptr() for t in old} & pointers(made)
        assert len(card.made(lambda: wrapper.run(q, CACHE, out=out))) == 1
        old = list(new)


def tables_that_are_written(card):
    """Who asks for a table may write into it: the next run plans, once, and what was prepared serves it."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), backend="fa2")
    q, out = halves(2, HEADS[0], DIM), halves(2, HEADS[0], DIM)
    begin(wrapper, (0, 9, 39), (9, 30))
    first = [card.made(lambda: wrapper.run(q, CACHE, out=out)) for _ in range(2)][1]
    for kv in ((0, 20, 30), (0, 1, 2)):
        written = wrapper._paged_kv_indptr_buf
        written.copy_(table(*kv))
        plan, *run = card.made(lambda: wrapper.run(q, CACHE, out=out))
        assert written.data_ptr() in words(plan) and words(plan)[0] in words(run[0])
        assert run == first == card.made(lambda: wrapper.run(q, CACHE, out=out))
    for name in ("_paged_kv_indices_buf", "_custom_mask_buf", "_window_left", "_sm_scale"):
        getattr(wrapper, name)
    assert card.made(lambda: wrapper.run(q, CACHE, out=out)) == first, "kernels read these themselves"


def forwards_on_two_streams(card):
    """Buffers of a batch that forward() made on one stream are not those of a plan on another."""
    space = torch.empty(1 << 20, dtype=torch.uint8)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, backend="portable")
    q = halves(8, HEADS[0], DIM)

    def list_of(stream):
        card.stream = stream
        made = card.made(lambda: wrapper.forward(q, CACHE, causal=True, sm_scale=0.2))
        return words(made[0])[0]

    before = card.stream
    try:
        card.stream = 1
        begin(wrapper, (0, 20, 40), (20, 20), (0, 4, 8))
        other, in_flight = list_of(2), wrapper._active
        card.stream = 1
        begin(wrapper, (0, 20, 40), (20, 20), (0, 4, 8))
        assert list_of(1) != other and wrapper._active is not in_flight
    finally:
        card.stream = before


@pytest.mark.parametrize(
    "check",
    [decodes_by_the_module, verifies_by_the_module, tables_that_are_replaced, tables_that_are_written,
     forwards_on_two_streams],  # fmt: skip
)
def test_on_card(check, on_card):
    on_card(check)
