"""Replay of calls without a plan, on a card that is not there: what a later call launches is what it would in full."""

import random
import threading

import pytest
import torch

import flashinfer
from flashinfer.ops.attention import direct
from tests.core.card_process import card_process
from tests.ops.attention.test_replay import halves, holds, table, words, workspace

PAGE, BATCH, WIDTH = 16, 3, 4


@pytest.fixture(scope="module")
def on_card(card_cache):
    """A process of its own: what its calls keep is not kept for others."""
    with card_process(card_cache) as call:
        yield call


def blocks(batch=BATCH, width=WIDTH):
    return torch.arange(batch * width, dtype=torch.int32).view(batch, width)


def lengths(batch=BATCH):
    return torch.full((batch,), 33, dtype=torch.int32)


def caches(layout="NHD", heads=2):
    shape = (20, PAGE, heads, 64) if layout == "NHD" else (20, heads, PAGE, 64)
    return halves(*shape), halves(*shape)


def decode(function="trtllm_batch_decode_with_kv_cache", batch=BATCH, width=WIDTH, most=40, **others):
    q, out = halves(batch, 4, 64), halves(batch, 4, 64)
    given = dict(max_seq_len=most, bmm1_scale=0.125, bmm2_scale=0.5, out=out, kv_layout="NHD") | others
    return getattr(flashinfer.decode, function), (q, caches(), workspace(), blocks(batch, width), lengths(batch)), given


def xqa(batch=BATCH, **others):
    q, out = halves(batch, 1, 4, 64), halves(batch, 1, 4, 64)
    tensors = q, *caches(), blocks(batch), lengths(batch).view(batch, 1), out, workspace(), workspace()
    return flashinfer.xqa.__call__.__globals__["xqa"], (*tensors, 2, PAGE), others


def context(batch=BATCH, most=40, **others):
    q, out, indptr = halves(4 * batch, 4, 64), halves(4 * batch, 4, 64), torch.arange(batch + 1, dtype=torch.int32) * 4
    tensors = q, caches(), workspace(), blocks(batch), lengths(batch)
    given = dict(out=out, kv_layout="NHD") | others
    return flashinfer.prefill.trtllm_batch_context_with_kv_cache, (
        *tensors, 4, most, 0.125, 1.0, batch, indptr, indptr,
    ), given  # fmt: skip


def cudnn(batch=BATCH, most=40, **others):
    given = dict(max_sequence_kv=most, actual_seq_lens_kv=lengths(batch), block_tables=blocks(batch),
                 out=halves(batch, 4, 64)) | others  # fmt: skip
    tensors = halves(batch, 4, 64), *caches("HND"), 0.125, workspace()
    return flashinfer.cudnn_batch_decode_with_kv_cache, tensors, given


def cudnn_prefill(batch=BATCH, most=40, **others):
    lens = torch.full((batch,), 4, dtype=torch.int32)
    given = dict(
        max_token_per_sequence=4, max_sequence_kv=most, actual_seq_lens_q=lens, actual_seq_lens_kv=lens.clone(),
        block_tables=blocks(batch), causal=True, return_lse=False, out=halves(4 * batch, 4, 64),
    ) | others  # fmt: skip
    return flashinfer.prefill.cudnn_batch_prefill_with_kv_cache, (
        halves(4 * batch, 4, 64), *caches("HND"), 0.125, workspace(),
    ), given  # fmt: skip


def latent(batch=BATCH, most=40, **others):
    q, out = halves(batch, 1, 4, 80), halves(batch, 1, 4, 64)
    given = dict(bmm1_scale=0.1, bmm2_scale=0.5, out=out) | others
    return flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla, (
        q, halves(20, PAGE, 80), workspace(), 64, 64, 16, blocks(batch), lengths(batch), most,
    ), given  # fmt: skip


def xqa_latent(batch=BATCH):
    cache = halves(20, PAGE, 128)
    return flashinfer.xqa_mla, (
        halves(batch, 1, 4, 128), cache, cache, blocks(batch), lengths(batch), halves(batch, 1, 4, 64), workspace(),
        workspace(), PAGE,
    ), {}  # fmt: skip


def ragged(batch=BATCH, most=40, dims=(192, 128), **others):
    q, out = halves(100 * batch, 4, dims[0]), halves(100 * batch, 4, dims[1])
    indptr = torch.arange(batch + 1, dtype=torch.int32) * 100
    tensors = q, halves(100 * batch, 4, dims[0]), halves(100 * batch, 4, dims[1]), workspace(), lengths(batch)
    return flashinfer.prefill.trtllm_ragged_attention_deepseek, (
        *tensors, 100, most, 0.1, 1.0, 1.0, batch, -1, indptr, indptr.clone(), False, True, False,
    ), dict(out=out) | others  # fmt: skip


def fmha(batch=BATCH, most=40, **others):
    qkv, indptr = halves(4 * batch, 3, 2, 64), torch.arange(batch + 1, dtype=torch.int32) * 4
    return flashinfer.trtllm_fmha_v2_prefill, (
        qkv, "PACKED_QKV", workspace(), lengths(batch), 4, most, 0.125, 1.0, batch, indptr, indptr.clone(),
    ), dict(out=halves(4 * batch, 2, 64)) | others  # fmt: skip


def fmha_paged(batch=BATCH, most=40, **others):
    qkv = halves(4 * batch, 4, 64), halves(20, 2, PAGE, 2, 64)
    indptr = torch.arange(batch + 1, dtype=torch.int32) * 4
    return flashinfer.trtllm_fmha_v2_prefill, (
        qkv, "Q_PAGED_KV_NHD", workspace(), lengths(batch), 4, most, 0.125, 1.0, batch, indptr, indptr.clone(),
        blocks(batch),
    ), dict(out=halves(4 * batch, 4, 64)) | others  # fmt: skip


CASES = dict(
    decode=decode, xqa_decode=lambda **others: decode("xqa_batch_decode_with_kv_cache", **others), xqa=xqa,
    context=context, cudnn=cudnn, cudnn_prefill=cudnn_prefill,
    latent=latent, xqa_latent=xqa_latent, ragged=ragged, fmha=fmha, fmha_paged=fmha_paged,
)  # fmt: skip


def tensors_in(given):
    for x in given:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from tensors_in(x)


def assert_alike(launches, full, given):
    """Launches are the same but for memory of ours, which may be elsewhere if it is so throughout."""
    launches, full = needed(launches), needed(full)
    assert [x[:3] for x in launches] == [x[:3] for x in full] and launches
    storages = [x.untyped_storage() for x in tensors_in(given)]
    callers = [(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages]
    ours = {}
    for mine, others in zip(launches, full, strict=True):
        for word, other in zip(words(mine), words(others), strict=True):
            if word != other:
                # No number is so large, and no address in the caller's tensors may differ.
                assert min(word, other) > 1 << 40
                assert not any(begin <= x < end for x in (word, other) for begin, end in callers)
            assert ours.setdefault(word, other) == other
    assert len(set(ours.values())) == len(ours)


def needed(launches):
    """Without work lists that no launch reads: those of kernels that other calls had."""
    read = {word for launch in launches if not launch[0].startswith("schedule") for word in words(launch)}
    return [x for x in launches if not x[0].startswith("schedule") or words(x)[0] in read]


def same_as_in_full(card, made, held=None):
    """A call launches what it launches in full, and prepares so many launches."""
    function, args, given = made
    launches = []
    count = holds(lambda: launches.extend(card.made(lambda: function(*args, **given))))
    assert held is None or count == held
    full = card.made(lambda: function.__wrapped__(*args, **given))
    assert_alike(launches, full, (*args, *given.values()))


def like_an_earlier_one(card, name):
    """From the third call on nothing is prepared, in new memory each time, whatever the longest request may be."""
    case = CASES[name]
    grows = [{}] * 4 if name in ("xqa", "xqa_latent") else [dict(most=most) for most in (48, 49, 1000, 1)]
    for change in grows[:2]:
        function, args, given = case(**change)
        function(*args, **given)
    keep = []
    for change in grows:
        made = case(**change)
        keep.append(made)
        # Latent attention takes partial results from the caller's workspace: that is part of what is kept.
        same_as_in_full(card, made, None if "latent" in name else 0)


def other_sizes(card, name):
    """Other batches and tables come between, each with launches of its own."""
    case = CASES[name]
    for batch in (3, 5, 1, 300, 5, 3, 300, 1):
        same_as_in_full(card, case(batch=batch))
    if name == "decode":
        for width in (4, 9, 4, 40, 9):
            same_as_in_full(card, case(width=width))


def repeated(made, times=3):
    function, args, given = made
    for _ in range(times):
        result = function(*args, **given)
    return result


def new_outputs(card):
    """Outputs that a function makes are new at each call, and what it launches writes them."""
    for made in (decode(out=None), decode(out=None, return_lse=True), latent(out=None, return_lse=True),
                 context(out=None), cudnn_prefill(out=None, return_lse=True)):  # fmt: skip
        function, args, given = made
        expected = function.__wrapped__(*args, **given)
        repeated(made)
        results = []
        launches = card.made(lambda: results.append(function(*args, **given)))
        before = repeated(made, 1)
        pairs = zip(*[x if isinstance(x, tuple) else (x,) for x in (results[0], before, expected)], strict=True)
        for x, other, like in pairs:
            assert x.data_ptr() != other.data_ptr() and x.shape == like.shape and x.dtype == like.dtype
            assert x.data_ptr() in {word for launch in launches for word in words(launch)}
    several = decode("xqa_batch_decode_with_kv_cache", out=None, q_len_per_req=2)
    several = several[0], (halves(2 * BATCH, 4, 64), *several[1][1:]), several[2]
    assert repeated(several, 4).shape == (BATCH, 2, 4, 64)


def what_is_refused(card):
    """A replay refuses what a call in full does."""
    made = decode()
    repeated(made)
    function, args, given = made
    q = args[0]
    shared = halves(BATCH + 1, 4, 64)
    for change, name in ((dict(max_seq_len=-1), "max_seq_len"), (dict(window_left="x"), "window_left"),
                         (dict(out=halves(BATCH, 4, 32)), "out"), (dict(bmm1_scale=float("nan")), "bmm1_scale"),
                         (dict(kv_layout="HDN"), "kv_layout")):  # fmt: skip
        for _ in range(3):
            with pytest.raises(ValueError, match=name):
                function(*args, **given | change)
    for _ in range(3):
        with pytest.raises(ValueError, match="out: got some of the memory of query"):
            function(shared[:-1], *args[1:], **given | dict(out=shared[1:]))
        with pytest.raises(ValueError, match="query: got 3 tokens; allowed: 4 requests"):
            function(*args[:4], lengths(BATCH + 1), **given)
    # In place is allowed, and written where it is.
    for _ in range(3):
        same_as_in_full(card, (function, args, given | dict(out=q)))


def what_moves_and_what_stays(card):
    """Sinks and scales in tensors are read where they are; lengths of another type are converted at each call."""
    for _ in range(4):
        same_as_in_full(card, decode(sinks=torch.zeros(4)))
    kept = torch.zeros(4)
    for _ in range(4):
        same_as_in_full(card, decode(sinks=kept))
    # Each layer has its own, and its replay.
    layers = [torch.zeros(4) for _ in range(20)]
    for turn in range(4):
        for sinks in layers:
            same_as_in_full(card, decode(sinks=sinks), 0 if turn > 1 else None)
    for change in (dict(bmm1_scale=torch.ones(1)), dict(bmm2_scale=0.0), dict(bmm2_scale=-0.0)):
        made = decode(**change)
        for _ in range(4):
            launches = card.made(lambda made=made: made[0](*made[1], **made[2]))
            full = card.made(lambda made=made: made[0].__wrapped__(*made[1], **made[2]))
            assert [x[:3] for x in launches] == [x[:3] for x in full]
    function, args, given = decode()
    wide = lengths().long()
    for _ in range(4):
        first = card.made(lambda: function(*args[:4], wide, **given))
        assert wide.data_ptr() not in {word for launch in first for word in words(launch)}
    # A window, a scale and a layout are part of what is asked for.
    for change in (dict(window_left=7), dict(bmm1_scale=0.5), dict(window_left=-1)) * 3:
        same_as_in_full(card, decode(**change))


def tensors_that_part(card):
    """Keys and values at one place, then apart: what reads the one does not go on reading the other."""
    function, (q, (k, v), *others), given = decode()
    for values in (k.view(k.shape), v, k.view(k.shape)):
        for _ in range(4):
            same_as_in_full(card, (function, (q, (k, values), *others), given))


def workspaces_of_latent_attention(card):
    """Partial results go to the workspace of the call."""
    for _ in range(2):
        for function, args, given in (latent(), latent()):
            room = torch.empty(1 << 24, dtype=torch.uint8)
            for _ in range(4):
                launches = card.made(lambda f=function, a=args, g=given, room=room: f(*a[:2], room, *a[3:], **g))
                begin, end = room.data_ptr(), room.data_ptr() + room.nbytes
                assert any(begin <= word < end for launch in launches for word in words(launch))


def chosen_tokens_without_lengths(card):
    """Their number is a tensor of ours, which a call like the last one reads where it is."""
    q, out, scratch = halves(BATCH, 1, 4, 80), halves(BATCH, 1, 4, 64), workspace()
    keep = []
    for held in (None, None, 0, 0):
        tokens = torch.arange(BATCH * 64, dtype=torch.int32).view(BATCH, 1, 64)
        keep.append(tokens)
        args = q, halves(20, PAGE, 80), scratch, 64, 64, 16, tokens, lengths(), 40
        given = dict(sparse_mla_top_k=64, bmm1_scale=0.1, out=out)
        same_as_in_full(card, (flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla, args, given), held)
        if held == 0:
            direct._constants.clear()


def equal_requests_that_are_not_divided(card):
    """Their work list is made at the first call, for all streams and captures: a call launches attention alone."""
    count = 300
    q, cache, out, scratch = halves(count, 1, 4, 80), halves(20, PAGE, 80), halves(count, 1, 4, 64), workspace()
    tokens = torch.arange(count * 48, dtype=torch.int32).view(count, 1, 48) % (20 * PAGE)
    lens = torch.full((count,), 40, dtype=torch.int32)

    def launched(rows=count, **more):
        args = q[:rows], cache, scratch, 64, 64, 16, tokens[:rows], lens[:rows], 40
        given = dict(sparse_mla_top_k=48, bmm1_scale=0.1, out=out[:rows], **more)
        return len(card.made(lambda: flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(*args, **given)))

    assert [launched() for _ in range(4)] == [2, 1, 1, 1]
    # Lengths that only the device knows, and requests that are too few to fill the chip.
    assert [launched(sparse_mla_top_k_lens=lens) for _ in range(4)] == [2] * 4
    assert [launched(8) for _ in range(4)] == [2] * 4
    assert launched() == 1
    card.stream = 9
    try:
        assert launched() == 1
    finally:
        card.stream = 7
    card.capture, card.known = 77, True
    try:
        assert launched() == 1
        # A list that is made in a capture is the graph's.
        assert launched(count - 1) == 2
    finally:
        card.capture, card.known = None, False
    assert [launched(count - 1) for _ in range(3)] == [2, 1, 1]


def equal_requests_on_hopper(card):
    """Splits are combined by a launch of its own, which counts no arrivals: divided requests share a list, too."""
    q, cache, out, scratch = halves(8, 1, 16, 576), halves(20, PAGE, 576), halves(8, 1, 16, 512), workspace()
    tokens = torch.arange(8 * 2048, dtype=torch.int32).view(8, 1, 2048) % (20 * PAGE)
    lens = torch.full((8,), 40, dtype=torch.int32)

    def launched(**more):
        args = q, cache, scratch, 128, 512, 64, tokens, lens, 40
        given = dict(sparse_mla_top_k=2048, bmm1_scale=0.1, out=out, **more)
        return len(card.made(lambda: flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(*args, **given)))

    assert [launched(backend="sm90") for _ in range(4)] == [3, 2, 2, 2]
    assert [launched(backend="sm90", sparse_mla_top_k_lens=lens) for _ in range(3)] == [3] * 3
    # The portable kernel combines by itself.
    assert [launched(backend="portable") for _ in range(3)] == [2] * 3


def streams_threads_and_captures(card):
    """Work lists and counters are of a stream and a thread; in a capture they are the graph's."""
    # A small batch has no list, but counters; both are the eighth parameter.
    for made, count in ((decode(), 1), (decode(batch=80), 2)):
        repeated(made)

        def memory(made=made, count=count):
            launches = card.made(lambda: made[0](*made[1], **made[2]))
            assert len(launches) == count
            return words(launches[-1])[7]

        mine = {memory() for _ in range(4)}
        assert len(mine) == 1
        card.stream = 9
        try:
            others = [memory() for _ in range(4)]
        finally:
            card.stream = 7
        card.capture, card.known = 5 + count, True
        try:
            others += [memory() for _ in range(4)]
            card.capture += 10
            others += [memory() for _ in range(4)]
        finally:
            card.capture, card.known = None, False
        if count == 1:
            # Calls of one capture run in turn. Those of another graph may run beside them.
            assert len({*others[4:8]}) == len({*others[8:]}) == 1 and others[4] != others[8]
        thread = threading.Thread(target=lambda memory=memory: others.extend([memory() for _ in range(4)]))
        thread.start()
        thread.join()
        assert len(others) == 16 and memory() in mine and not mine & {*others}


def elsewhere(x, draw):
    """A tensor of x's values in memory of another kind: less aligned, of a larger one, with other strides."""
    shape, way = [*x.shape], draw.randrange(5)
    if way < 2:
        begin = (1, 16 // x.element_size())[way]
        made = x.new_empty(x.numel() + begin)[begin:].view(shape)
    elif way == 2:
        made = x.new_empty([*shape[:-1], shape[-1] + 8])[..., : shape[-1]]
    elif way == 3:
        made = x.new_empty([shape[0] + 3, *shape[1:]])[2:-1]
    else:
        made = x.new_empty(shape[::-1]).permute(*reversed(range(len(shape))))
    made.copy_(x)
    return torch.nn.Parameter(made, requires_grad=True) if x.is_floating_point() and draw.random() < 0.2 else made


def other_calls(made, draw):
    """The call with some of its tensors in other memory, or one in the place of another."""
    function, args, given = made
    args, given = list(args), dict(given)
    for _ in range(draw.randrange(4)):
        kept, at = draw.choice([*((args, i) for i in range(len(args))), *((given, name) for name in given)])
        x = kept[at]
        if isinstance(x, torch.Tensor):
            kept[at] = elsewhere(x, draw)
        elif isinstance(x, tuple):
            first, second = x
            both = torch.stack((first, first), 1)
            kept[at] = draw.choice((
                (elsewhere(first, draw), second), (first, first), (first, first.view(first.shape)), [first, second],
                both, (both[:, 0], both[:, 1]),
            ))  # fmt: skip
    if "out" in given:
        q = next(tensors_in(args))
        given["out"] = draw.choice((None, q, q[:], *[given["out"]] * 9))
    return function, args, given


def calls_in_any_order(card):
    """Of tensors that lie in many ways, each call launches, or refuses, what it does in full."""
    draw, replayed = random.Random(3), 0
    calls = []
    for name in ("decode", "xqa", "context", "cudnn", "fmha_paged"):
        calls += [other_calls(CASES[name](batch=draw.choice((1, 3))), draw) for _ in range(12)]
    for _ in range(1500):
        function, args, given = draw.choice(calls)
        launches, full, refused = [], [], []
        for call, found in ((function, launches), (function.__wrapped__, full)):
            try:
                count = holds(lambda c=call, a=args, g=given, found=found: found.extend(card.made(lambda: c(*a, **g))))
                replayed += call is function and not count
            except ValueError as error:
                refused.append(str(error))
        assert not refused or refused == refused[:1] * 2
        if not refused:
            assert_alike(launches, full, (*args, *given.values()))
    assert replayed > 500


def workspaces_elsewhere(card):
    """A workspace on the host is not used, and no more of one is written than the call has given."""
    from tests.core.card import on_host

    function, args, given = latent()
    whole = torch.empty(1 << 24, dtype=torch.float32)
    for room, used in ((on_host(torch.empty(1 << 24, dtype=torch.uint8)), False), (whole, True),
                       (whole.view(torch.uint8)[: whole.numel()], True), (whole.view(torch.uint8)[:1000], False),
                       (whole.view(torch.uint8)[1:], False), (whole[::2], False)):  # fmt: skip
        launches = []
        for _ in range(3):
            launches += card.made(lambda room=room: function(*args[:2], room, *args[3:], **given))
        begin, end = room.data_ptr(), room.data_ptr() + room.nbytes
        inside = any(begin <= word < end for launch in launches for word in words(launch))
        assert inside == used, (room.dtype, room.shape)
    # As many elements at one place, of other sizes: what is written ends where the call's ends.
    count = 1 << 20
    for dtype in (torch.float32, torch.uint8):
        room = whole.view(dtype)[:count]
        launches = card.made(lambda room=room: function(*args[:2], room, *args[3:], **given))
        begin = room.data_ptr()
        inside = any(begin <= word < begin + 4 * count for launch in launches for word in words(launch))
        assert inside == (dtype == torch.float32)


def captures_that_torch_does_not_know(card):
    """What a captured call allocates stays, as its graph reads and writes it as long as it lives."""
    from flashinfer._core import capture
    from flashinfer.ops.attention import counters

    for number, name in enumerate(("decode", "latent", "context", "xqa")):
        function, args, given = CASES[name]()
        repeated((function, args, given))
        card.capture = 90 + number
        try:
            launches = card.made(lambda f=function, a=args, g=given: f(*a, **g))
        finally:
            card.capture = None
        ours = {word for launch in launches for word in words(launch) if word > 1 << 40}
        for x in tensors_in((*args, *given.values())):
            ours = {word for word in ours if not x.data_ptr() <= word < x.data_ptr() + x.nbytes}
        room, _ = counters._rooms[torch.device("cuda", 0)]
        kept = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in (*capture._kept, room)]
        assert len(ours) > 2 and all(any(begin <= word < end for begin, end in kept) for word in ours), name


@pytest.mark.parametrize("name", CASES)
def test_calls_like_an_earlier_one(name, on_card):
    on_card(like_an_earlier_one, name)


@pytest.mark.parametrize("name", CASES)
def test_other_sizes_between(name, on_card):
    on_card(other_sizes, name)


@pytest.mark.parametrize(
    "case",
    (
        new_outputs, what_is_refused, what_moves_and_what_stays, workspaces_of_latent_attention,
        tensors_that_part, streams_threads_and_captures, calls_in_any_order, workspaces_elsewhere,
        captures_that_torch_does_not_know, chosen_tokens_without_lengths,
        equal_requests_that_are_not_divided, equal_requests_on_hopper,
    ),
)  # fmt: skip
def test_replays(case, on_card):
    on_card(case)


def test_a_longest_request_is_a_bound(device):
    """On a CPU, and where kernels run: results do not depend on it."""
    q, (k, v) = torch.randn(2, 4, 64, device=device).half(), torch.randn(2, 8, PAGE, 2, 64, device=device).half()
    tables, lens = blocks(2).to(device), table(33, 64).to(device)
    scratch = torch.empty(0, dtype=torch.uint8, device=device)
    results = [
        flashinfer.decode.xqa_batch_decode_with_kv_cache(q, (k, v), scratch, tables, lens, most, 0.125)
        for most in (64, 65, 66, 1 << 20, 0)
    ]
    lens[0] = 5
    changed = flashinfer.decode.xqa_batch_decode_with_kv_cache(q, (k, v), scratch, tables, lens, 67, 0.125)
    assert all(torch.equal(results[0], x) for x in results)
    for request, count, x in ((0, 33, results[0]), (1, 64, results[0]), (0, 5, changed), (1, 64, changed)):
        rows = [t[tables[request].long()].flatten(0, 1)[:count].double().repeat_interleave(2, 1) for t in (k, v)]
        logits = torch.einsum("hd,nhd->hn", q[request].double(), rows[0]) * 0.125
        truth = torch.einsum("hn,nhd->hd", logits.softmax(-1), rows[1])
        assert (x[request].double() - truth).abs().max() < 2e-3
