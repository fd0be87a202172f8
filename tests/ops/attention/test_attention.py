"""Decode and prefill through the public wrappers, against attention written from its definition in float64."""

import itertools

import pytest
import torch

import flashinfer
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.attention import oracle
from tests.ops.attention.cases import backends, check, run_decode, run_paged, run_ragged, workspace
from tests.ops.attention.oracle import Extras, Options

# float16 under the interpreter, whose dot does not take bfloat16; the GPU suite runs both.
HALF = torch.float16
HEAD_DIMS = (64, 72, 80, 96, 112, 128, 192, 256, 512)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 16, 32)
OPTIONS = {
    "full": Options(),
    "causal": Options(causal=True),
    "window": Options(causal=True, window_left=9),
    "window of a full mask": Options(window_left=4),
    "window of one": Options(causal=True, window_left=0),
    "soft cap": Options(causal=True, logits_soft_cap=1.5),
    "scale": Options(sm_scale=0.37),
    "rope": Options(causal=True, pos_encoding_mode="ROPE_LLAMA"),
    "rope of another base": Options(pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=1e6),
    "alibi": Options(causal=True, pos_encoding_mode="ALIBI"),
    "alibi under a cap": Options(pos_encoding_mode="ALIBI", logits_soft_cap=4.0, window_left=11),
}


def batch(device, qo=(3, 0, 17, 1), kv=(5, 7, 40, 0), heads=(4, 2), dim=64, dtype=HALF, **kwargs):
    return generate.ragged_batch(list(qo), list(kv), *heads, dim, dtype=dtype, device=device, **kwargs)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_ragged(name, device):
    x = batch(device, kv=(5, 7, 40, 2))
    for backend in backends(device):
        check(run_ragged(x, OPTIONS[name], backend), x, OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_options_paged(name, device):
    x = batch(device)
    for backend in backends(device):
        check(run_paged(x, OPTIONS[name], backend, page_size=4), x, OPTIONS[name])


@pytest.mark.parametrize("name", [n for n in OPTIONS if not OPTIONS[n].causal] + ["window"])
def test_options_decode(name, device):
    x = batch(device, qo=(1,) * 8, kv=(5, 1, 40, 0, 33, 17, 64, 9))
    for backend in backends(device):
        check(run_decode(x, OPTIONS[name], backend, page_size=8), x, OPTIONS[name])


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_layout", ("NHD", "HND"))
def test_head_dims(dim, kv_layout, device):
    x = batch(device, qo=(2, 5), kv=(33, 20), dim=dim, dtype=HALF)
    for backend in backends(device):
        check(run_paged(x, OPTIONS["causal"], backend, kv_layout=kv_layout), x, OPTIONS["causal"])


@pytest.mark.parametrize("dims", ((192, 128), (64, 256), (24, 16)))
def test_value_dim_differs(dims, device):
    x = batch(device, dim=dims[0], head_dim_vo=dims[1])
    for backend in backends(device):
        check(run_ragged(x, OPTIONS["causal"], backend), x, OPTIONS["causal"])
        check(run_paged(x, OPTIONS["causal"], backend), x, OPTIONS["causal"])


@pytest.mark.parametrize("group", GROUPS)
def test_groups(group, device):
    x = batch(device, qo=(1, 1, 1), kv=(9, 0, 30), heads=(2 * group, 2))
    y = batch(device, qo=(4, 9), kv=(9, 30), heads=(group, 1))
    for backend in backends(device):
        check(run_decode(x, OPTIONS["full"], backend), x, OPTIONS["full"])
        check(run_ragged(y, OPTIONS["causal"], backend), y, OPTIONS["causal"])


@pytest.mark.parametrize("page_size", (1, 2, 3, 5, 7, 16, 33, 64, 128, 1024))
@pytest.mark.parametrize("kv_layout", ("NHD", "HND"))
def test_page_sizes(page_size, kv_layout, device):
    x = batch(device, qo=(1, 1, 1, 1), kv=(1, 16, 0, 67))
    for backend in backends(device):
        check(run_decode(x, OPTIONS["full"], backend, page_size=page_size, kv_layout=kv_layout), x, OPTIONS["full"])


@pytest.mark.parametrize("length", (1, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129))
def test_lengths_around_tiles(length, device):
    x = batch(device, qo=(length, 1), kv=(length, length), heads=(2, 1), dim=16)
    for backend in backends(device):
        check(run_ragged(x, OPTIONS["causal"], backend), x, OPTIONS["causal"])


def test_more_queries_than_keys(device):
    x = batch(device, qo=(9, 4), kv=(3, 0))
    for backend in backends(device):
        for name in ("full", "causal", "window"):
            check(run_ragged(x, OPTIONS[name], backend), x, OPTIONS[name])


@pytest.mark.parametrize("source", ("ragged", "paged"))
def test_custom_mask(source, device):
    qo, kv = (3, 0, 17, 1), (5, 7, 40, 0)
    x = batch(device, qo, kv)
    mask = generate.random_mask(qo, kv, device=device)
    masks = list(mask.split([a * b for a, b in zip(qo, kv)]))
    packed, _ = generate.pack_mask(mask, qo, kv)
    run = run_ragged if source == "ragged" else run_paged
    for backend in backends(device):
        check(run(x, Options(), backend, mask=mask), x, Options(), Extras(masks))
        check(run(x, Options(), backend, plan=dict(packed_custom_mask=packed)), x, Options(), Extras(masks))
        windowed = Options(window_left=3)
        check(run(x, windowed, backend, mask=mask), x, windowed, Extras(masks))


def test_sinks_and_their_effect_on_rows_without_keys(device):
    x = batch(device)
    sinks = torch.tensor([0.3, -2.0, 5.0, -float("inf")], device=device)
    for backend in backends(device):
        check(
            run_paged(x, OPTIONS["window"], backend, run=dict(sinks=sinks)), x, OPTIONS["window"], Extras(sinks=sinks)
        )


@pytest.mark.parametrize("given_as", ("float", "one", "per KV head", "per query head"))
def test_scales(given_as, device):
    x = batch(device, dtype=HALF)
    number = dict(q_scale=0.5, k_scale=1.7, v_scale=3.0)
    count = {"float": 0, "one": 1, "per KV head": 2, "per query head": 4}[given_as]
    given = {n: v if not count else torch.full((count,), v, device=device) for n, v in number.items()}
    for backend in backends(device):
        check(run_paged(x, OPTIONS["causal"], backend, run=given), x, OPTIONS["causal"], Extras(**number))


def test_scales_that_differ_between_heads(device):
    x = batch(device)
    scale = torch.tensor([0.5, 1.0, 2.0, 4.0], device=device)
    parts = [oracle.batch(x, Options(), torch.float64, Extras(k_scale=s, v_scale=2 * s))[0] for s in scale.tolist()]
    same = [oracle.batch(x, Options(), HALF, Extras(k_scale=s, v_scale=2 * s))[0] for s in scale.tolist()]
    truth, same = (torch.stack([p[:, h] for h, p in enumerate(group)], 1) for group in (parts, same))
    for backend in backends(device):
        out, _ = run_paged(x, Options(), backend, run=dict(k_scale=scale, v_scale=2 * scale))
        assert_close(out, same, truth)


@pytest.mark.parametrize("kv_dtype", (torch.float8_e4m3fn, torch.float8_e5m2))
def test_fp8_cache(kv_dtype, device):
    x = batch(device, qo=(1, 1, 1, 1), dtype=HALF, kv_dtype=kv_dtype)
    y = batch(device, dtype=HALF, kv_dtype=kv_dtype)
    for backend in backends(device):
        check(run_decode(x, Options(), backend, run=dict(k_scale=0.5, v_scale=2.0)), x, Options(),
              Extras(k_scale=0.5, v_scale=2.0))  # fmt: skip
        check(run_paged(y, OPTIONS["causal"], backend, kv_layout="HND"), y, OPTIONS["causal"])


def test_fp8_queries(device):
    x = batch(device, dtype=torch.float8_e4m3fn)
    # Hopper's own kernel, whose weights are e4m3 too, has another truth: test_fp8_prefill.py.
    for backend in {"portable", *backends(device)} - {"auto"}:
        result = run_ragged(x, OPTIONS["causal"], backend, plan=dict(o_data_type=torch.float16))
        check(result, x, OPTIONS["causal"], o_dtype=torch.float16)


@pytest.mark.parametrize("run", (run_ragged, run_paged, run_decode))
def test_scales_of_fp8_by_position(run, device):
    """As callers of FlashInfer's FA3 backend have them: after keys and values, a tensor with one a head each."""
    x = batch(device, dtype=torch.float8_e4m3fn, **({"qo": (1, 1, 1, 1)} if run is run_decode else {}))
    scales = [torch.full((count,), value, device=device) for count, value in ((4, 0.5), (2, 1.7), (2, 3.0))]
    extras, plan = Extras(q_scale=0.5, k_scale=1.7, v_scale=3.0), dict(o_data_type=HALF)
    for backend in {"portable", *backends(device)} - {"auto"}:
        check(run(x, Options(), backend, plan=plan, scales=scales), x, Options(), extras, HALF)
        half = [*scales[:2], scales[2] / 2]
        check(run(x, Options(), backend, plan=plan, scales=half, run=dict(v_scale=2.0)), x, Options(), extras, HALF)
        with pytest.raises(ValueError, match="3 of FP8 queries: the scales of q, k and v"):
            run(x, Options(), backend, plan=plan, scales=scales[:2])


@pytest.mark.parametrize(
    "split", (dict(fixed_split_size=8), dict(fixed_split_size=64), dict(disable_split_kv=True), {})
)
def test_split_changes_no_result(split, device):
    x = batch(device, qo=(1, 1, 1), kv=(100, 3, 0))
    y = batch(device, qo=(5, 20), kv=(70, 33))
    sinks = torch.tensor([0.3, -2.0, 5.0, 1.0], device=device)
    for backend in backends(device):
        check(run_decode(x, Options(), backend, plan=split), x, Options())
        for name in ("causal", "window"):
            result = run_paged(y, OPTIONS[name], backend, plan=split, run=dict(sinks=sinks))
            check(result, y, OPTIONS[name], Extras(sinks=sinks))


def test_fixed_split_is_bitwise_alike_in_any_batch(device):
    x = batch(device, qo=(1, 1, 1, 1), kv=(100, 3, 0, 57))
    for backend in backends(device):
        for split in (dict(fixed_split_size=16), dict(disable_split_kv=True)):
            if backend == "reference":
                continue  # torch's matmul promises nothing across shapes
            together, _ = run_decode(x, Options(), backend, plan=split)
            for i in range(4):
                q, k, v = x.request(i)
                one = generate.Ragged(q, k, v, *(generate.indptr([n], device) for n in (1, k.shape[0])))
                alone, _ = run_decode(one, Options(), backend, plan=split)
                assert_bitwise(alone, together[i : i + 1])


def test_strided_inputs_and_outputs(device):
    x = batch(device)
    o = OPTIONS["causal"]
    strided = generate.Ragged(
        generate.strided(x.q), generate.strided(x.k, 1), generate.strided(x.v), x.qo_indptr, x.kv_indptr
    )
    for backend in backends(device):
        out = generate.strided(torch.zeros_like(x.q), 1)
        result = run_ragged(strided, o, backend, run=dict(out=out))
        assert result[0].data_ptr() == out.data_ptr()
        check(result, x, o)
        paged = generate.paged(x, 4)
        k, v = paged.caches
        wide = generate.Paged(
            (generate.strided(k, 1), generate.strided(v, 2)), paged.indptr, paged.indices, paged.last_page_len, 4, "NHD"
        )
        check(run_paged(x, o, backend, page_size=4, paged=wide), x, o)


def test_unaligned_rows_fill_tiles_planned_for_aligned_ones(device):
    """A plan takes rows for aligned; a call whose rows are not runs on narrower tiles."""
    x = batch(device, qo=(70, 3), kv=(70, 9))
    odd = generate.Ragged(*(off_by_one(t) for t in (x.q, x.k, x.v)), x.qo_indptr, x.kv_indptr)
    for backend in backends(device):
        out = torch.full_like(x.q, float("nan"))
        check(run_ragged(odd, OPTIONS["causal"], backend, run=dict(out=out)), x, OPTIONS["causal"])
        out = off_by_one(torch.full_like(x.q, float("nan")))
        check(run_ragged(x, OPTIONS["causal"], backend, run=dict(out=out)), x, OPTIONS["causal"])


def off_by_one(t):
    """The same values one element after a 16-byte boundary."""
    return torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape)


def test_writes_every_row_and_nothing_else(device):
    x = batch(device)
    for backend in backends(device):
        out = generate.Guarded(x.q.shape, x.q.dtype, device)
        lse = generate.Guarded(x.q.shape[:2], torch.float32, device)
        check(run_paged(x, OPTIONS["window"], backend, run=dict(out=out.out, lse=lse.out)), x, OPTIONS["window"])
        out.check()
        lse.check()


def test_no_requests_and_no_tokens(device):
    for backend in backends(device):
        for qo, kv in (((), ()), ((0, 0), (3, 0))):
            x = batch(device, qo, kv)
            out, lse = run_ragged(x, Options(), backend)
            assert out.shape == (0, 4, 64) and lse.shape == (0, 4)
            out, lse = run_paged(x, Options(), backend)
            assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


def test_single_request_functions(device):
    x = batch(device, qo=(7,), kv=(20,))
    one = batch(device, qo=(1,), kv=(20,))
    mask = generate.random_mask((7,), (20,), device=device).view(7, 20)
    for layout in ("NHD", "HND"):
        k, v, ok, ov = (t if layout == "NHD" else t.transpose(0, 1).contiguous() for t in (x.k, x.v, one.k, one.v))
        for name in ("causal", "soft cap", "rope", "alibi", "window"):
            o = OPTIONS[name]
            for backend in backends(device):
                result = flashinfer.single_prefill_with_kv_cache_return_lse(
                    x.q, k, v, kv_layout=layout, backend=backend, **o.as_kwargs()
                )
                check(result, x, o)
            kwargs = o.as_kwargs()
            kwargs.pop("causal")
            out, lse = flashinfer.single_decode_with_kv_cache(
                one.q[0], ok, ov, kv_layout=layout, return_lse=True, **kwargs
            )
            check((out[None], lse[None]), one, o)
        result = flashinfer.single_prefill_with_kv_cache(x.q, k, v, custom_mask=mask, kv_layout=layout, return_lse=True)
        check(result, x, Options(), Extras([mask]))
        out = flashinfer.single_prefill_with_kv_cache(
            x.q, k, v, kv_layout=layout, o_dtype=torch.float16, scale_v=torch.tensor([2.0], device=device)
        )
        assert out.dtype == torch.float16
        truth, _ = oracle.batch(x, Options(), torch.float64, Extras(v_scale=2.0))
        assert_close(out, truth.half(), truth)


def test_several_queries_per_request_in_decode(device):
    x = batch(device, qo=(3, 3, 3), kv=(20, 3, 65))
    for backend in backends(device):
        check(run_decode(x, Options(causal=True), backend, plan=dict(q_len_per_req=3)), x, Options(causal=True))


def test_multi_item_scoring(device):
    """Two requests: a prefix of 4 and items of 2 and 3 tokens behind delimiters; and a prefix of 6 and one of 1."""
    prefix, items = (4, 6), ((2, 3), (1,))
    positions = [[0] + [p for n in item for p in (*range(1, n + 1), 0)] for item in items]
    lens = [n + len(p) for n, p in zip(prefix, positions)]
    x = batch(device, lens, lens)
    masks = []
    for n, within in zip(prefix, positions):
        mask = torch.zeros(n + len(within), n + len(within), dtype=torch.bool)
        for row, col in itertools.product(range(len(mask)), repeat=2):
            own = row < n or col > row - within[row - n]
            mask[row, col] = col <= row and (col < n or own)
        masks.append(mask.to(device))
    most = max(map(len, positions))
    padded = torch.tensor([p + [0] * (most - len(p)) for p in positions], dtype=torch.int32).flatten()
    plan = dict(
        prefix_len_ptr=torch.tensor(prefix), token_pos_in_items_ptr=padded.to(device), token_pos_in_items_len=most,
        max_item_len_ptr=torch.tensor([3, 1]),
    )  # fmt: skip
    for backend in backends(device):
        check(run_paged(x, OPTIONS["causal"], backend, plan=plan), x, Options(), Extras(masks))


def test_older_forward_takes_over_options(device):
    x = batch(device)
    paged = generate.paged(x, 4)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.begin_forward(
        x.qo_indptr, paged.indptr, paged.indices, paged.last_page_len, 4, 2, 64, 4, q_data_type=x.q.dtype
    )
    for o in (OPTIONS["causal"], OPTIONS["soft cap"], OPTIONS["full"]):
        check(wrapper.forward_return_lse(x.q, paged.kv_cache, **o.as_kwargs()), x, o)
    wrapper.end_forward()


def test_run_narrows_the_planned_window(device):
    x = batch(device, qo=(1, 1), kv=(30, 4))
    for backend in backends(device):
        check(run_decode(x, Options(window_left=20), backend, run=dict(window_left=5)), x, Options(window_left=5))
        with pytest.raises(ValueError, match="window_left"):
            run_decode(x, Options(window_left=5), backend, run=dict(window_left=20))


def test_run_widens_the_window_of_trtllm_gen(device):
    """For one call, whatever its window; the next has the planned one."""
    x = batch(device, qo=(3, 2), kv=(30, 4))
    made = generate.paged(x, 4)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend="trtllm-gen")
    planned = Options(causal=True, window_left=5)
    wrapper.plan(x.qo_indptr, made.indptr, made.indices, made.last_page_len, 4, 2, 64, 4, q_data_type=x.q.dtype,
                 **planned.as_kwargs())  # fmt: skip
    for window in (20, -1, 2):
        result = wrapper.run(x.q, made.kv_cache, window_left=window, return_lse=True)
        check(result, x, Options(causal=True, window_left=window))
        check(wrapper.run(x.q, made.kv_cache, return_lse=True), x, planned)
    with pytest.raises(ValueError, match="^window_left: got -2"):
        wrapper.run(x.q, made.kv_cache, window_left=-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dim", (64, 128, 256))
def test_real_shapes(dtype, name, dim, device):
    o = OPTIONS[name] if "window" not in name else Options(causal=OPTIONS[name].causal, window_left=200)
    x = batch(device, (1, 129, 0, 400, 1024), (1023, 129, 77, 1025, 1024), (8, 2), dim, dtype)
    check(run_ragged(x, o, "portable"), x, o)
    check(run_paged(x, o, "portable", page_size=16, kv_layout="HND"), x, o)
    y = batch(device, (1,) * 6, (1023, 1, 0, 4097, 64, 509), (8, 2), dim, dtype)
    if not o.causal:
        check(run_decode(y, o, "portable", page_size=5), y, o)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
def test_every_dim_and_group(dim, group, device):
    x = batch(device, (1, 65, 0), (1023, 129, 77), (group * 2, 2), dim, torch.bfloat16)
    check(run_paged(x, OPTIONS["causal"], "portable", page_size=7), x, OPTIONS["causal"])
    y = batch(device, (1,) * 3, (1025, 1, 0), (group * 2, 2), dim, torch.bfloat16)
    check(run_decode(y, Options(), "portable", page_size=16), y, Options())


@pytest.mark.gpu
def test_pages_beyond_two_to_the_31_elements(device):
    page_size, heads, dim = 16, 8, 128
    pages = (1 << 31) // (page_size * heads * dim) + 64
    k = torch.empty(pages, page_size, heads, dim, dtype=torch.bfloat16, device=device)
    v = torch.empty_like(k)
    x = batch(device, (1, 1), (40, 100), (8, 8), 128, torch.bfloat16)
    used = [pages - 1 - 3 * i for i in range(10)]
    at = 0
    for i, n in enumerate((40, 100)):
        _, keys, values = x.request(i)
        for start in range(0, n, page_size):
            k[used[at], : n - start], v[used[at], : n - start] = keys[start:][:page_size], values[start:][:page_size]
            at += 1
    paged = generate.Paged(
        (k, v), generate.indptr([3, 7], device), torch.tensor(used, dtype=torch.int32, device=device),
        torch.tensor([8, 4], dtype=torch.int32, device=device), page_size, "NHD",
    )  # fmt: skip
    check(run_decode(x, Options(), "portable", page_size=page_size, paged=paged), x, Options())


def decode_with_rope(card, dim):
    q, k = torch.empty(4, dim, dtype=torch.bfloat16), torch.empty(2, 15, dim, dtype=torch.bfloat16)
    more = dict(kv_layout="HND", pos_encoding_mode="ROPE_LLAMA")
    return len(card.made(lambda: flashinfer.single_decode_with_kv_cache(q, k, k, **more)))


@pytest.mark.parametrize("dim", [8, 16, 24, 48])
def test_rope_of_small_heads_compiles(dim, on_card):
    """A product of Triton sums 16 elements at least, where the interpreter takes any number."""
    assert on_card(decode_with_rope, dim, whole=True) > 0


@pytest.mark.parametrize("dim", [8, 16, 24])
def test_rope_of_small_heads(dim, device):
    q, k, v = (torch.randn(*shape, device=device) for shape in ((4, dim), (15, 2, dim), (15, 2, dim)))

    def rotated(x, position):
        angle = position[:, None] * 1e4 ** (-torch.arange(0, dim, 2, device=device).to(x.dtype) / dim)
        low, high = x.chunk(2, -1)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def attend(dtype):
        position = torch.arange(15, device=device).to(dtype)
        last, keys = rotated(q[None].to(dtype), position[14:])[0], rotated(k.to(dtype), position)
        logits = torch.einsum("hd,nhd->hn", last, keys.repeat_interleave(2, 1)) * dim**-0.5
        return torch.einsum("hn,nhd->hd", logits.softmax(-1), v.to(dtype).repeat_interleave(2, 1))

    for backend in backends(device):
        out = flashinfer.single_prefill_with_kv_cache(q[None], k, v, pos_encoding_mode="ROPE_LLAMA", backend=backend)
        assert_close(out[0], attend(torch.float32), attend(torch.float64))
