"""PagedKVCache against a model that keeps plain lists of tokens."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import flashinfer
from flashinfer.core import OutOfPages, PagedKVCache

LAYERS, HEADS, DIM = 2, 2, 4


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


def make(pages=8, page_size=4, device="cpu"):
    return PagedKVCache(LAYERS, HEADS, DIM, page_size, pages, device, torch.float32)


def rows(tokens, layer, device="cpu"):
    """Keys and values of tokens, different in each token, layer, head and element, and between keys and values."""
    grid = torch.arange(HEADS * DIM, dtype=torch.float32, device=device).view(1, HEADS, DIM) / 16 + layer * 1000
    k = torch.tensor(tokens, dtype=torch.float32, device=device).view(-1, 1, 1) + grid
    return k, -k


def write(cache, sequences, tokens):
    for layer in range(LAYERS):
        cache.append(*rows(tokens, layer, cache.device), layer, sequences)


def grow(cache, tokens, sequence=None):
    sequence = cache.begin_forward(len(tokens), sequence)
    write(cache, sequence, tokens)
    cache.end_forward(sequence, len(tokens))
    return sequence


def read(cache, tables, i, layer):
    """Keys and values of sequence i of a batch, [tokens, heads, dim] each, as page tables are defined."""
    first, last = tables.kv_indptr[i : i + 2].tolist()
    pages = cache.layer(layer)[tables.kv_indices[first:last].long()]
    length = max(last - first - 1, 0) * cache.page_size + int(tables.last_page_len[i])
    return (pages[:, j].reshape(-1, HEADS, DIM)[:length] for j in (0, 1))


def check_contents(cache, sequences, contents):
    """The tables of `sequences` read back as `contents`; None stands for a token not written yet."""
    tables = cache.tables(sequences)
    assert tables.kv_indptr.dtype == tables.kv_indices.dtype == tables.last_page_len.dtype == torch.int32
    assert tables.seq_lens.tolist() == [len(tokens) for tokens in contents]
    for i, tokens in enumerate(contents):
        known = [j for j, token in enumerate(tokens) if token is not None]
        for layer in range(LAYERS):
            expected = rows([tokens[j] for j in known], layer, cache.device)
            for got, want in zip(read(cache, tables, i, layer), expected):
                assert got.shape[0] == len(tokens)
                assert torch.equal(got[known], want)


class AgainstLists(RuleBasedStateMachine):
    """Random life of sequences: the cache must behave as lists of tokens do, and count its pages exactly."""

    @initialize(page_size=st.integers(1, 5), pages=st.integers(1, 24))
    def start(self, page_size, pages):
        self.cache = make(pages, page_size)
        self.tokens = {}  # live sequence -> tokens that it has
        self.open = {}  # sequence with a reservation -> reserved tokens, None until written
        self.dead = []
        self.next_token = 1

    def new_tokens(self, count):
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def pick(self, data, pool):
        return data.draw(st.sampled_from(sorted(pool, key=lambda s: s.id)))

    def begin(self, length, sequence):
        free, needed = self.cache.num_free_pages, self.cache.pages_needed(length, sequence)
        before = self.snapshot()
        try:
            sequence = self.cache.begin_forward(length, sequence)
        except OutOfPages as error:
            assert (error.needed, error.free, error.total) == (needed, free, self.cache.max_num_pages)
            assert needed > free and all(str(n) in str(error) for n in (needed, free, self.cache.max_num_pages))
            assert self.snapshot() == before
            return
        assert self.cache.num_free_pages == free - needed
        self.tokens.setdefault(sequence, [])
        self.open[sequence] = [None] * length

    def snapshot(self):
        held = {s: (s.length, s.reserved, s.pages) for s in self.cache.sequences}
        return held, self.cache.num_free_pages, self.cache.data.clone().numpy().tobytes()

    @rule(length=st.integers(0, 12))
    def begin_new(self, length):
        self.begin(length, None)

    @precondition(lambda self: self.tokens.keys() - self.open.keys())
    @rule(data=st.data(), length=st.integers(0, 12))
    def begin_again(self, data, length):
        self.begin(length, self.pick(data, self.tokens.keys() - self.open.keys()))

    @precondition(lambda self: self.tokens.keys() - self.open.keys())
    @rule()
    def step(self):
        """One decode step of every closed sequence, as long as there are pages."""
        for sequence in sorted(self.tokens.keys() - self.open.keys(), key=lambda s: s.id):
            self.begin(1, sequence)
            if sequence in self.open:
                self.finish(sequence, 1)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def append(self, data):
        order = data.draw(st.permutations(sorted(self.open, key=lambda s: s.id)))
        batch = order[: data.draw(st.integers(1, len(order)))]
        written = [self.new_tokens(len(self.open[s])) for s in batch]
        write(self.cache, batch, [token for tokens in written for token in tokens])
        self.open.update(zip(batch, written))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), everything=st.booleans())
    def end(self, data, everything):
        sequence = self.pick(data, self.open)
        self.finish(sequence, None if everything else data.draw(st.integers(0, sequence.reserved)))

    def finish(self, sequence, keep):
        reserved = self.open.pop(sequence)
        if None in reserved:
            reserved = self.new_tokens(len(reserved))
            write(self.cache, sequence, reserved)
        self.cache.end_forward(sequence, keep)
        self.tokens[sequence] += reserved[:keep]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), whole=st.booleans())
    def fork(self, data, whole):
        parent = self.pick(data, self.tokens)
        length = len(self.tokens[parent]) if whole else data.draw(st.integers(0, len(self.tokens[parent])))
        free = self.cache.num_free_pages
        child = self.cache.fork(parent, None if whole else length)
        assert child.pages == parent.pages[: len(child.pages)] and self.cache.num_free_pages == free
        self.tokens[child] = self.tokens[parent][:length]

    @precondition(lambda self: self.tokens.keys() - self.open.keys())
    @rule(data=st.data())
    def truncate(self, data):
        sequence = self.pick(data, self.tokens.keys() - self.open.keys())
        length = data.draw(st.integers(0, len(self.tokens[sequence])))
        self.cache.truncate(sequence, length)
        del self.tokens[sequence][length:]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data):
        sequence = self.pick(data, self.tokens)
        self.cache.free(sequence)
        del self.tokens[sequence]
        self.open.pop(sequence, None)
        self.dead.append(sequence)

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def touch_what_was_freed(self, data):
        dead, before = data.draw(st.sampled_from(self.dead)), self.snapshot()
        for call in (
            lambda: self.cache.begin_forward(1, dead),
            lambda: self.cache.end_forward(dead),
            lambda: self.cache.fork(dead),
            lambda: self.cache.truncate(dead, 0),
            lambda: self.cache.free(dead),
            lambda: self.cache.tables([dead]),
            lambda: self.cache.pages_needed(1, dead),
        ):
            with pytest.raises(ValueError, match="allowed: a live sequence"):
                call()
        assert self.snapshot() == before

    @invariant()
    def contents_are_those_of_the_lists(self):
        everything = [self.tokens[s] + self.open.get(s, []) for s in self.tokens]
        assert list(self.cache.sequences) == list(self.tokens)
        check_contents(self.cache, None, everything)

    @invariant()
    def pages_are_counted_exactly(self):
        users = Counter(page for s in self.tokens for page in s.pages)
        assert self.cache.num_used_pages == len(users)
        assert self.cache.num_shared_pages == sum(count > 1 for count in users.values())
        assert self.cache.num_free_pages == self.cache.max_num_pages - len(users)
        assert all(0 <= page < self.cache.max_num_pages for page in users)
        for s in self.tokens:
            assert len(set(s.pages)) == len(s.pages) == -(-(s.length + s.reserved) // self.cache.page_size)


AgainstLists.TestCase.settings = settings(max_examples=15, stateful_step_count=40, deadline=None, derandomize=True)
test_against_lists = AgainstLists.TestCase


def test_every_page_can_be_taken_and_comes_back(device):
    cache = make(8, 4, device)
    sequence = grow(cache, list(range(32)))
    assert cache.num_free_pages == 0 and sorted(sequence.pages) == list(range(8))
    cache.free(sequence)
    assert cache.num_free_pages == 8 and cache.sequences == ()
    check_contents(cache, [grow(cache, list(range(50, 82)))], [list(range(50, 82))])


def test_a_reservation_that_is_too_large_names_the_numbers_and_changes_nothing(device):
    cache = make(8, 4, device)
    held = grow(cache, list(range(10)))
    with pytest.raises(OutOfPages, match="needs 6 pages; allowed: up to the 5 free ones of 8"):
        cache.begin_forward(21)
    with pytest.raises(ValueError, match="needs 6 pages; allowed: up to the 5 free ones of 8"):
        cache.begin_forward(23, held)
    assert cache.num_free_pages == 5 and cache.sequences == (held,) and held.reserved == 0
    check_contents(cache, [held], [list(range(10))])
    cache.end_forward(cache.begin_forward(22, held))
    assert cache.num_free_pages == 0


def test_forks_copy_a_shared_page_only_when_they_write_into_it(device):
    cache = make(8, 4, device)
    parent = grow(cache, list(range(6)))
    child = cache.fork(parent)
    assert child.pages == parent.pages and cache.num_shared_pages == 2 and cache.num_used_pages == 2
    assert cache.pages_needed(1, child) == cache.pages_needed(1, parent) == 1
    grow(cache, [100, 101, 102], child)
    assert cache.num_shared_pages == 1 and cache.num_used_pages == 4 and child.pages[0] == parent.pages[0]
    assert cache.pages_needed(1, parent) == 0
    grow(cache, [200], parent)
    assert cache.num_used_pages == 4
    check_contents(cache, [parent, child], [[*range(6), 200], [*range(6), 100, 101, 102]])
    cache.free(parent)
    check_contents(cache, [child], [[*range(6), 100, 101, 102]])


def test_either_side_of_a_fork_copies(device):
    cache = make(8, 4, device)
    parent = grow(cache, list(range(6)))
    child = cache.fork(parent)
    grow(cache, [200], parent)
    grow(cache, [100], child)
    check_contents(cache, [parent, child], [[*range(6), 200], [*range(6), 100]])


def test_requests_share_the_full_pages_of_a_prompt(device):
    cache = make(16, 4, device)
    prompt = grow(cache, list(range(11)))
    requests = [cache.fork(prompt, 8) for _ in range(3)]
    for i, request in enumerate(requests):
        assert request.pages == prompt.pages[:2] and cache.pages_needed(2, request) == 1
        grow(cache, [100 + i, 200 + i], request)
    assert cache.num_used_pages == 3 + 3 and cache.num_shared_pages == 2
    check_contents(cache, requests, [[*range(8), 100 + i, 200 + i] for i in range(3)])
    check_contents(cache, [prompt], [list(range(11))])


def test_a_shorter_fork_of_a_partly_filled_page_does_not_touch_its_parent(device):
    cache = make(8, 4, device)
    parent = grow(cache, list(range(7)))
    child = cache.fork(parent, 5)
    grow(cache, [100, 101], child)
    check_contents(cache, [parent, child], [list(range(7)), [*range(5), 100, 101]])


def test_rejected_tokens_give_their_room_back(device):
    cache = make(8, 4, device)
    sequence = cache.begin_forward(9)
    write(cache, sequence, list(range(9)))
    assert cache.num_used_pages == 3 and sequence.length == 0 and sequence.reserved == 9
    cache.end_forward(sequence, 3)
    assert cache.num_used_pages == 1 and sequence.length == 3 and sequence.reserved == 0
    grow(cache, [50, 51], sequence)
    check_contents(cache, [sequence], [[0, 1, 2, 50, 51]])


def test_tables_of_a_step(device):
    cache = make(16, 4, device)
    a, b, c = grow(cache, list(range(5))), grow(cache, []), grow(cache, list(range(8)))
    cache.begin_forward(3, a)
    cache.begin_forward(2, b)
    t = cache.tables([c, a, b])
    assert t.kv_indptr.tolist() == [0, 2, 4, 5]
    assert t.kv_indices.tolist() == [*c.pages, *a.pages, *b.pages]
    assert t.last_page_len.tolist() == [4, 4, 2] and t.seq_lens.tolist() == [8, 8, 2]
    assert t.qo_indptr.tolist() == [0, 0, 3, 5] and (t.num_reserved, t.max_reserved) == (5, 3)
    assert t.batch_indices.tolist() == [1, 1, 1, 2, 2] and t.positions.tolist() == [5, 6, 7, 0, 1]
    assert {x.device.type for x in (t.kv_indptr, t.kv_indices, t.positions)} == {device.type}
    assert cache.tables([c, a, b]) is t and cache.tables((a, b)) is not t
    cache.end_forward(a)
    assert cache.tables([c, a, b]) is not t
    assert cache.tables([c, a, b]).batch_indices.tolist() == [2, 2]


def test_tables_of_one_of_none_and_of_all(device):
    cache = make(8, 4, device)
    assert cache.tables().kv_indptr.tolist() == [0] and cache.tables([]).seq_lens.tolist() == []
    assert cache.tables().num_reserved == cache.tables().max_reserved == 0
    a, empty = grow(cache, [1, 2]), grow(cache, [])
    assert cache.tables(a).seq_lens.tolist() == [2]
    t = cache.tables()
    assert t.seq_lens.tolist() == [2, 0] and t.last_page_len.tolist() == [2, 0] and t.kv_indptr.tolist() == [0, 1, 1]
    assert cache.tables(s for s in (empty, a)).seq_lens.tolist() == [0, 2]


def test_index_tables_are_those_of_the_page_module(device):
    cache = make(32, 4, device)
    batch = [grow(cache, list(range(n))) for n in (5, 0, 12, 3)]
    for sequence, n in zip(batch, (2, 7, 0, 1)):
        cache.begin_forward(n, sequence)
    t = cache.tables(batch)
    assert torch.equal(t.seq_lens, flashinfer.get_seq_lens(t.kv_indptr, t.last_page_len, cache.page_size))
    indices, positions = flashinfer.get_batch_indices_positions(t.qo_indptr, t.seq_lens, t.num_reserved)
    assert torch.equal(t.batch_indices, indices) and torch.equal(t.positions, positions)


def test_lengths_may_be_numpy_integers():
    cache = make()
    sequence = cache.begin_forward(np.int64(5))
    cache.end_forward(sequence, np.int32(3))
    assert sequence.length == 3 and type(sequence.length) is int


def refusals(cache, other):
    """(what the message begins with, call) of all that is refused on a cache with a closed and an open sequence."""
    closed, opened = cache.sequences
    k = torch.zeros(2, HEADS, DIM)
    return {
        "negative length": ("length", lambda: cache.begin_forward(-1)),
        "fractional length": ("length", lambda: cache.begin_forward(1.5)),
        "begin twice": ("sequence", lambda: cache.begin_forward(1, opened)),
        "end without begin": ("sequence", lambda: cache.end_forward(closed, 0)),
        "more than reserved": ("length", lambda: cache.end_forward(opened, 3)),
        "negative end": ("length", lambda: cache.end_forward(opened, -1)),
        "truncate to more": ("length", lambda: cache.truncate(closed, 6)),
        "truncate while open": ("sequence", lambda: cache.truncate(opened, 0)),
        "fork of more": ("length", lambda: cache.fork(closed, 6)),
        "another cache's": ("sequence", lambda: cache.free(other.sequences[0])),
        "no sequence": ("sequence", lambda: cache.free(0)),
        "twice in a batch": ("sequences", lambda: cache.tables([closed, closed])),
        "a number for a batch": ("sequences", lambda: cache.tables(1)),
        "append beyond reserved": ("k", lambda: cache.append(torch.zeros(3, HEADS, DIM), k, 0, opened)),
        "append of too few": ("v", lambda: cache.append(k, k[:1], 0, opened)),
        "append without reservation": ("k", lambda: cache.append(k, k, 0, closed)),
        "append of other heads": ("k", lambda: cache.append(k[:, :1], k, 0, opened)),
        "append of another dtype": ("", lambda: cache.append(k.double(), k.double(), 0, opened)),
        "append to no layer": ("layer_idx", lambda: cache.append(k, k, LAYERS, opened)),
        "no layer": ("layer_idx", lambda: cache.layer(-1)),
    }


@pytest.mark.parametrize("name", refusals(*[type("", (), {"sequences": (None, None)})()] * 2))
def test_misuse_is_refused_by_name_and_changes_nothing(name):
    cache, other = make(), make()
    closed = grow(cache, [1, 2, 3, 4, 5])
    cache.begin_forward(2)
    grow(other, [9])
    before = [(s.length, s.reserved, s.pages) for s in cache.sequences], cache.num_free_pages, cache.data.clone()
    begins, call = refusals(cache, other)[name]
    with pytest.raises(ValueError, match=f"^{begins}.*: got .*; allowed: "):
        call()
    assert before[:2] == ([(s.length, s.reserved, s.pages) for s in cache.sequences], cache.num_free_pages)
    assert torch.equal(before[2], cache.data)
    check_contents(cache, [closed], [[1, 2, 3, 4, 5]])


def test_sizes_are_refused_by_name():
    good = dict(num_layers=1, num_kv_heads=1, head_dim=8, page_size=4, max_num_pages=2, device="cpu")
    for name in list(good)[:-1]:
        for bad in (0, -1, 2.0, 1 << 40, 1 << 63):
            with pytest.raises(ValueError, match=f"^{name}: got {bad}; allowed: "):
                PagedKVCache(**good | {name: bad})


@pytest.mark.parametrize("data_type", ("bfloat16", torch.float8_e4m3fn, torch.float32), ids=str)
def test_storage(data_type, device):
    cache = PagedKVCache(2, 3, 16, 4, 5, device, data_type)
    assert cache.data.shape == (2, 5, 2, 4, 3, 16) and cache.layer(1).shape == (5, 2, 4, 3, 16)
    assert cache.layer(1).data_ptr() == cache.data[1].data_ptr() and not cache.data.float().any()
    parent = grow_any(cache, torch.ones(3, 3, 16))
    grow_any(cache, torch.full((2, 3, 16), 2.0), cache.fork(parent))
    t = cache.tables()
    for i, expected in enumerate(([1, 1, 1], [1, 1, 1, 2, 2])):
        pages = t.kv_indices[t.kv_indptr[i] : t.kv_indptr[i + 1]].long()
        for layer in range(2):
            stored = cache.layer(layer).float()[pages].transpose(0, 1).reshape(2, -1, 3, 16)[:, : len(expected)]
            assert torch.equal(
                stored, torch.tensor(expected, device=device).view(1, -1, 1, 1).expand_as(stored).float()
            )


def grow_any(cache, x, sequence=None):
    x = x.to(cache.device).to(cache.data_type)
    sequence = cache.begin_forward(x.shape[0], sequence)
    for layer in range(cache.num_layers):
        cache.append(x, x, layer, sequence)
    cache.end_forward(sequence)
    return sequence
