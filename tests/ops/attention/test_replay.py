"""What wrappers keep between plans, on a card that is not there: what other batches launch is what a new one would."""

import ctypes
import gc
import weakref

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


def batches_that_come_again(card):
    """Requests come and go: what was prepared for as many serves again."""
    pages = {n: (on_host(*range(0, 3 * n + 1, 3)), on_host(*[5] * n), table(*range(3 * n))) for n in (2, 3, 4)}
    kept = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    for turn, n in enumerate((2, 3, 4, 3, 2, 2, 2, 4)):
        indptr, last, ids = pages[n]
        q, out = halves(n, HEADS[0], DIM), halves(n, HEADS[0], DIM)

        def step(wrapper, indptr=indptr, ids=ids, last=last, q=q, out=out):
            wrapper.plan(indptr, ids, last, *HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
            wrapper.run(q, CACHE, out=out)

        launches = []
        times = holds(lambda step=step: launches.extend(card.made(lambda: step(kept))))
        assert times == (2 if turn < 3 else 0)
        fresh = card.made(lambda step=step: step(flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())))
        assert [launch[:2] for launch in launches] == [launch[:2] for launch in fresh]
        assert read(words(launches[0])[5], n + 1) == indptr.tolist() and words(launches[0])[0] in words(launches[1])


def batches_that_only_the_device_knows(card):
    """A plan whose rows only the device knows must not go into the work list of a smaller one."""
    kept = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="portable")

    def grid(wrapper, rows):
        tables = table(0, rows, 2 * rows), table(0, 8, 16), table(*range(16)), table(16, 16)
        wrapper.plan(*tables, *HEADS, DIM, PAGE, causal=True, q_data_type=torch.bfloat16)
        schedule, attend = card.made(lambda: wrapper.run(halves(2 * rows, HEADS[0], DIM), CACHE))
        assert words(schedule)[0] in words(attend)
        return attend[1]

    for rows in (32, 32, 1024, 16, 2048):
        fresh = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="portable")
        assert grid(kept, rows) == grid(fresh, rows)


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
    with pytest.raises(ValueError, match="indices: got 9 elements; allowed: at most 8"):
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


def read(at, count):
    return list((ctypes.c_int32 * count).from_address(at))


class Planner:
    """A wrapper's plan() and run() as functions of the values of tables, of two requests where none are given."""

    def __init__(self, kind, where, graph=False):
        self.kind, self.put = kind, on_host if where != "device" else table
        self.put_ids = on_host if where == "host and ids" else table
        self.options = dict(q_data_type=torch.bfloat16)
        buffers = dict(
            qo_indptr_buf=table(0, 0, 0), paged_kv_indptr_buf=table(0, 0, 0), paged_kv_indices_buf=table(*[0] * 40),
            paged_kv_last_page_len_buf=table(1, 1),
        )  # fmt: skip
        if kind == "decode":
            names = ("indptr", "indices", "last_page_len")
            given = {f"paged_kv_{x}_buffer": buffers[f"paged_kv_{x}_buf"] for x in names}
            self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace(), use_cuda_graph=graph, **given if graph else {}
            )
        elif kind == "prefill":
            self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace(), use_cuda_graph=graph, **buffers if graph else {}
            )
        elif kind == "ragged":
            self.wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
        elif kind == "mixed":
            self.wrapper = flashinfer.BatchAttention(device="cuda")
        else:
            fixed = dict(zip(("qo_indptr", "kv_indptr", "kv_indices"), buffers.values()), kv_len_arr=table(0, 0))
            self.wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace(), graph, **fixed if graph else {})

    def plan(self, qo=(0, 4, 8), **others):
        self.plan_tables(qo, **others)
        self.rows = qo[-1]

    def plan_tables(self, qo, kv=(0, 3, 7), last=(5, 16), lens=(37, 64), ids=range(7), **options):
        self.requests = len(kv) - 1
        qo, kv, last, lens, ids = *map(lambda x: self.put(*x), (qo, kv, last, lens)), self.put_ids(*ids)
        given, paged = self.options | options, (*HEADS, DIM, PAGE)
        if self.kind == "decode":
            return self.wrapper.plan(kv, ids, last, *paged, **given)
        if self.kind == "prefill":
            return self.wrapper.plan(qo, kv, ids, last, *paged, **given)
        if self.kind == "ragged":
            return self.wrapper.plan(qo, kv, *HEADS, DIM, **given)
        if self.kind == "mixed":
            return self.wrapper.plan(qo, kv, ids, lens, *HEADS, DIM, DIM, PAGE, **given)
        return self.wrapper.plan(qo, kv, ids, lens, 4, 64, 16, PAGE, **dict(causal=False, sm_scale=0.1) | given)

    def run(self, rows=None, **outputs):
        rows = rows or self.rows
        if self.kind == "latent":
            q = halves(rows, 4, 64), halves(rows, 4, 16)
            return self.wrapper.run(*q, halves(200, PAGE, 64), halves(200, PAGE, 16), **outputs)
        q = halves(self.requests if self.kind == "decode" else rows, HEADS[0], DIM)
        keys = (halves(112, HEADS[1], DIM),) * 2 if self.kind == "ragged" else (CACHE,)
        return self.wrapper.run(q, *keys, **outputs)


def plans_expect_what_runs(card):
    from flashinfer._core.launch import Launcher
    from flashinfer.ops.attention import kernels

    for kind in ("decode", "prefill", "ragged", "mixed", "latent"):
        kernels._kernels_of.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            expected = []
            patch.setattr(Launcher, "expect", lambda *key: expected.append(key))
            planner = Planner(kind, "host")
            planner.plan()
        assert expected and all(device == planner.wrapper.device for *_, device in expected)
        names = [launch[0].split()[0] for launch in card.made(planner.run)]
        # All that a run launches, and nothing else; the work list's kernel is needed before.
        assert sorted(names) == sorted(launcher.build(*key).kernel.__name__ for launcher, *key, _ in expected)
        assert all((*key, 0) in launcher._bound for launcher, *key, _ in expected)


CASES = [(kind, where, False) for kind in ("decode", "prefill", "ragged", "mixed", "latent")
         for where in ("host", "host and ids", "device")]  # fmt: skip
CASES += [(kind, where, True) for kind in ("decode", "prefill", "latent") for where in ("host", "host and ids")]
VALUES = [dict(), dict(), dict(), dict(kv=(0, 1, 7), last=(1, 2), lens=(16, 90)), dict(ids=range(9, 30)),
          dict(ids=range(8)), dict(qo=(0, 3, 8)), dict(qo=(0, 3, 7)), dict(qo=(0, 3, 7), kv=(0, 7, 7), lens=(100, 0)),
          dict()]  # fmt: skip


def plans_like_the_last(card, kind, where, graph):
    """What a plan launches reads the values that it was given, and what a new wrapper would launch is launched."""
    kept = Planner(kind, where, graph)
    for change in VALUES:
        new = Planner(kind, where, graph)
        if graph:
            # Its first plan says how large a grid is.
            new.plan()
        launches_as_new(card, kept, new, change)


def launches_as_new(card, kept, new, change, **outputs):
    """What a plan with these values and its run launch is what a new wrapper launches, and it reads these values.
    Returns the addresses of lengths and items."""
    made, fresh = (card.made(lambda x=x: (x.plan(**change), x.run(**outputs))) for x in (kept, new))
    assert [launch[:3] for launch in made] == [launch[:3] for launch in fresh]
    kind, given = kept.kind, dict(qo=(0, 4, 8), kv=(0, 3, 7), last=(5, 16), lens=(37, 64), ids=range(7)) | change
    n = len(given["kv"]) - 1
    items, _, _, qo_at, _, kv_at, lens_at, *sizes = words(made[0])
    # Numbers of requests, tiles and heads, and all that splits are made by.
    assert sizes == words(fresh[0])[7:] and items in words(made[1])
    assert read(kv_at, n + 1) == list(given["kv"])
    if kind != "decode":
        assert read(qo_at, n + 1) == list(given["qo"])
    if kind != "ragged":
        assert read(lens_at, n) == list(given["lens" if kind in ("mixed", "latent") else "last"])
        name = "_kv_indices_buf" if kind == "latent" else "_paged_kv_indices_buf"
        shown = getattr(kept.wrapper, name) if kind != "mixed" else kept.wrapper._shown.kv_indices
        assert shown[: len(given["ids"])].tolist() == list(given["ids"]) and shown.data_ptr() in words(made[1])
    return {items, kv_at}


def batch_of(n, each=3, rows=4):
    """Values of tables of n requests, each of so many pages and query rows."""
    return dict(qo=range(0, rows * n + 1, rows), kv=range(0, each * n + 1, each), last=[5] * n, lens=[20] * n,
                ids=range(each * n))  # fmt: skip


def sizes_in_turn(card, kind, where):
    """Plans of several numbers of requests in turn replay, each with its own values."""
    kept = Planner(kind, where)
    rounds = [dict(), dict(), dict(), dict(each=2), dict(each=4), dict(rows=3), dict(rows=5), dict(), dict()]
    # Where only the device has rows, the call shows them: such plans have work lists of their own.
    replays = kind == "decode" or where != "device"
    for turn, change in enumerate(rounds):
        for n in (2, 5, 3):
            launches_as_new(card, kept, Planner(kind, where), batch_of(n, **change))
        assert set(kept.wrapper._replays.replays) == ({3, 4, 6} if replays and turn else set())
    # A run unlike those before is bound to what the size at hand needs, after a plan that was a replay.
    for n in (2, 5, 3):
        lse = {} if kind == "mixed" else dict(return_lse=True)
        launches_as_new(card, kept, Planner(kind, where), batch_of(n), **lse)
    for n in (2, 3, 5, 2):
        assert not replays or holds(lambda n=n: (kept.plan(**batch_of(n)), kept.run())) == 0


def buffers_that_grow_between(card):
    """A large batch has the work lists made again: plans of small ones must not go on in those of before."""
    kept = Planner("decode", "host")
    for n, lse in ((2, False), (2, False), (2, False), (600, False), (2, False), (2, True), (600, True), (2, True)):
        launches_as_new(card, kept, Planner("decode", "host"), batch_of(n), return_lse=lse)


def streams_in_turn(card, kind):
    """What the device reads on one stream is not written on another: each size has other buffers there."""
    kept = Planner(kind, "host")
    used = {}
    for stream in (7, 7, 7, 8, 8, 8, 7):
        card.stream, used[stream] = stream, used.get(stream, set())
        try:
            for n in (2, 3):
                used[stream] |= launches_as_new(card, kept, Planner(kind, "host"), batch_of(n))
        finally:
            card.stream = 7
    assert not used[7] & used[8]


def sizes_in_turn_with_others_between(card, kind, where):
    """Between plans that replay come others, which have to be seen: other options, dtypes, places, streams, captures,
    plans that are refused, and plans by an engine."""

    def on(stream, planner, values):
        card.stream = stream
        try:
            launches_as_new(card, planner, Planner(kind, where), values)
        finally:
            card.stream = 7

    kept = Planner(kind, where)

    def turns(times=3, **change):
        for _ in range(times):
            for n in (2, 3):
                launches_as_new(card, kept, Planner(kind, where), batch_of(n, **change))

    def wide(planner):
        before = planner.put
        planner.put = lambda *values: before(*values).long()
        kept.plan(**batch_of(2))
        planner.put = before

    def elsewhere():
        before, kept.put = kept.put, on_host if where == "device" else table
        kept.plan(**batch_of(3))
        kept.put = before

    def options():
        new = Planner(kind, where)
        change = batch_of(2) | (dict(logits_soft_cap=5.0) if kind != "latent" else dict(causal=True))
        launches_as_new(card, kept, new, change)

    def capture():
        if where == "device":
            card.capture = 1
            try:
                launches_as_new(card, kept, Planner(kind, where), batch_of(2))
            finally:
                card.capture = None

    def refused():
        if where != "device":
            with pytest.raises(ValueError, match="indptr: got a decrease"):
                kept.plan(**batch_of(3) | dict(kv=(0, 6, 3, 9)))

    def engine():
        if kind in ("decode", "prefill"):
            kept.wrapper._paged_kv_indices_buf = table(*range(20, 60))
            kept.run()

    turns()
    for between in (lambda: wide(kept), elsewhere, options, capture, refused, engine, lambda: on(8, kept, batch_of(3))):
        between()
        turns(1, each=2)
        turns(2)


def what_replays_keep(card):
    """No tensor of the caller's but those of the last plan, and no more than 64 sizes."""
    kept = Planner("decode", "device")
    tables = []
    kept.put = kept.put_ids = lambda *values: tables.append(weakref.ref(made := table(*values))) or made
    for n in (1, 2, 3) * 4:
        kept.plan(**batch_of(n))
        kept.run()
    gc.collect()
    # Offsets, last pages and page ids; qo_indptr and lens are not decode's.
    assert sum(ref() is not None for ref in tables) == 3
    for _ in range(2):
        for n in range(1, 100):
            kept.plan(**batch_of(n))
            kept.plan(**batch_of(n))
    assert len(kept.wrapper._replays.replays) == 64
    assert holds(lambda: kept.plan(**batch_of(99))) == 0


def graph_buffers_of_sizes_in_turn(card):
    """A shorter batch leaves its padding in the buffers: the longer one's offsets must not stay behind it."""
    for put in (table, on_host):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(), use_cuda_graph=True, paged_kv_indptr_buffer=table(0, 0, 0, 0),
            paged_kv_indices_buffer=table(*[0] * 9), paged_kv_last_page_len_buffer=table(1, 1, 1),
        )  # fmt: skip
        for n in (3, 3, 3, 2, 2, 2, 3, 2, 3, 2, 1, 2, 1):
            given = batch_of(n)
            wrapper.plan(put(*given["kv"]), put(*given["ids"]), put(*given["last"]), *HEADS, DIM, PAGE,
                         q_data_type=torch.bfloat16)  # fmt: skip
            assert wrapper._paged_kv_indptr_buf.tolist() == [*given["kv"], *[3 * n] * (3 - n)]


def other_workspaces(card):
    """Partial results go where the workspace of the plan is."""
    kept = Planner("decode", "host")
    first, second = (torch.empty(1 << 24, dtype=torch.uint8) for _ in range(2))

    def used(memory):
        launches = card.made(lambda: (kept.plan(), kept.run()))
        return any(0 <= word - memory.data_ptr() < memory.numel() for launch in launches for word in words(launch))

    kept.wrapper.reset_workspace_buffer(first, first)
    assert all([used(first) for _ in range(3)])
    kept.wrapper.reset_workspace_buffer(second, second)
    for _ in range(3):
        assert used(second) and not used(first)


def errors_between(card):
    """A plan that ends with an error leaves nothing of itself to the next."""
    from flashinfer.ops.attention.worklist import WorkList

    fill = WorkList.fill

    def no_memory(*args):
        raise MemoryError

    few = batch_of(2, rows=200)
    for rows in (400, 20000):
        many = batch_of(2, rows=rows)
        for after in ((few, many), (many, few)):
            kept = Planner("prefill", "host")
            for _ in range(3):
                launches_as_new(card, kept, Planner("prefill", "host"), few)
            WorkList.fill = no_memory
            try:
                with pytest.raises(MemoryError):
                    kept.plan(**many)
                with pytest.raises(ValueError, match="got no plan|not planned|after plan"):
                    kept.run()
            finally:
                WorkList.fill = fill
            for values in after:
                new = Planner("prefill", "host")
                launches_as_new(card, kept, new, values)
                # Grids end at the number of multiprocessors.
                assert cuts(kept) == cuts(new)


def cuts(planner):
    return [work.size for work in planner.wrapper._base._lists.values()]


def plans_that_are_refused(card, kind, where, graph):
    """By name, after plans that were right; and they leave nothing behind."""
    wrong = {"indptr: got a decrease": dict(kv=(0, 7, 3)), "indptr: got -1 first": dict(kv=(-1, 3, 7))}
    if kind != "decode":
        wrong["qo_indptr: got a decrease"] = dict(qo=(0, 9, 8))
    if kind in ("mixed", "latent"):
        wrong |= {"kv_len_arr: got 49 of request 0": dict(lens=(49, 64)), "kv_len_arr: got -1": dict(lens=(5, -1))}
    elif kind != "ragged":
        wrong |= {"last_page_len: got 5 ... 17": dict(last=(5, 17)), "last_page_len: got -1": dict(last=(-1, 5))}
    if kind != "ragged":
        wrong["indptr: got 9 last; allowed: at most 7"] = dict(kv=(0, 3, 9))
    kept = Planner(kind, where, graph)
    for _ in range(3):
        kept.plan()
    for _ in range(2):
        before = card.made(kept.run)
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            kept.plan(**change)
        after = card.made(kept.run)
        assert [launch[:2] for launch in after] == [launch[:2] for launch in before]
        kept.plan()


def rows_past_the_plan(card, kind, where):
    """Of no request in CUDA-graph mode: before the kernel writes its rows, those have what rows without keys have."""
    kept = Planner(kind, where, True)
    kept.plan()
    for qo, last in ((0, 4, 8), 8), ((0, 3, 5), 5), ((0, 3, 5), 5), ((0, 3, 5), 5):
        kept.plan(qo=qo)
        out, lse = torch.full((8, 4, 64), 7.0, dtype=torch.bfloat16), torch.full((8, 4), 7.0)
        kept.run(8, out=out, lse=lse, return_lse=True)
        # Where the plan ends is not known here of offsets on the device: then all rows wait for the kernel's.
        last = 0 if where == "device" else last
        assert (out[last:] == 0).all() and (lse[last:] == -torch.inf).all()
        assert (out[:last] == 7).all() and (lse[:last] == 7).all()


def plans_that_differ(card):
    """In one thing each from the two before, which were alike."""
    for change in (dict(window_left=3), dict(o_data_type=torch.float16), dict(logits_soft_cap=5.0), dict(causal=True),
                   dict(fixed_split_size=16), dict(disable_split_kv=True)):  # fmt: skip
        kept, new = Planner("prefill", "host"), Planner("prefill", "host")
        for _ in range(3):
            kept.plan()
            kept.run()
        made, fresh = (card.made(lambda x=x: (x.plan(**change), x.run())) for x in (kept, new))
        assert [launch[:2] for launch in made] == [launch[:2] for launch in fresh]
    kept = Planner("decode", "host")
    for stream in (7, 7, 7, 8, 8, 8, 7):
        card.stream = stream
        try:
            made = card.made(kept.plan)
        finally:
            card.stream = 7
        assert [launch[2] for launch in made] == [stream]
    for _ in range(3):
        kept.plan()
    kept.put = lambda *values: on_host(*values).long()
    made = card.made(kept.plan)
    assert read(words(made[0])[5], 3) == [0, 3, 7]


@pytest.mark.parametrize("kind, where, graph", CASES)
def test_plans_like_the_last(kind, where, graph, on_card):
    on_card(plans_like_the_last, kind, where, graph)
    if where != "device":
        on_card(plans_that_are_refused, kind, where, graph)


@pytest.mark.parametrize("where", ["host", "host and ids", "device"])
@pytest.mark.parametrize("kind", ["decode", "prefill", "ragged", "mixed", "latent"])
def test_sizes_in_turn(kind, where, on_card):
    on_card(sizes_in_turn, kind, where)
    if where == "host":
        on_card(streams_in_turn, kind)
    on_card(sizes_in_turn_with_others_between, kind, where)


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("kind", ["prefill", "latent"])
def test_rows_past_the_plan(kind, where, on_card):
    on_card(rows_past_the_plan, kind, where)


@pytest.mark.parametrize("where", ["host", "device"])
def test_growing_batches(where, on_card):
    on_card(growing_batches, where)


@pytest.mark.parametrize(
    "check",
    [batches_that_come_again, batches_that_only_the_device_knows, graph_buffers_end_where_they_end, latent_plans,
     plans_expect_what_runs, plans_that_differ, what_replays_keep, buffers_that_grow_between,
     graph_buffers_of_sizes_in_turn, errors_between, other_workspaces],
)  # fmt: skip
def test_plans(check, on_card):
    on_card(check)
