"""BatchDecodeWithPagedKVCache and BatchPrefillWithRaggedKVCache against attention over the tokens appended."""

import pytest
import torch

import flashinfer
from flashinfer.testing.compare import assert_close
from tests.ops.attention import oracle


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


class Filled:
    """A cache with its decoder, and the keys and values that were appended, kept beside it."""

    def __init__(
        self, device, dtype=torch.float16, layers=2, heads=(4, 2), dim=64, page_size=4, pages=64, sm_scale=None
    ):
        self.cache = flashinfer.PagedKVCache(layers, heads[1], dim, page_size, pages, device, dtype)
        self.decoder = flashinfer.BatchDecodeWithPagedKVCache(self.cache, *heads, dim, sm_scale, dtype)
        self.heads, self.dim, self.dtype, self.device, self.sm_scale = heads, dim, dtype, device, sm_scale
        self.kv = {}

    def randn(self, *shape):
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def append(self, count, sequence=None, keep=None):
        sequence = self.cache.begin_forward(count, sequence)
        new = self.randn(self.cache.num_layers, 2, count, self.heads[1], self.dim)
        for layer in range(self.cache.num_layers):
            self.cache.append(*new[layer], layer, sequence)
        self.cache.end_forward(sequence, keep)
        kept = new[:, :, : count if keep is None else keep]
        self.kv[sequence] = torch.cat((self.kv[sequence], kept), 2) if sequence in self.kv else kept
        return sequence

    def fork(self, sequence, length):
        child = self.cache.fork(sequence, length)
        self.kv[child] = self.kv[sequence][:, :, :length].clone()
        return child

    def check(self, sequences, layer):
        q = self.randn(len(sequences), 1, self.heads[0], self.dim)
        out = self.decoder.decode(q, layer, sequences)
        assert out.shape == q.shape and out.dtype == q.dtype
        options = oracle.Options(sm_scale=self.sm_scale)
        truth, same = (
            torch.stack([oracle.request(q[i], *self.kv[s][layer], options, d)[0] for i, s in enumerate(sequences)])
            for d in (torch.float64, self.dtype)
        )
        assert_close(out, same, truth)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_the_program_of_the_documentation(dtype, device):
    cache = flashinfer.PagedKVCache(
        num_layers=1,
        num_kv_heads=32,
        head_dim=128,
        page_size=16,
        max_num_pages=2048 // 16,
        device=device.type,
        data_type=dtype,
    )
    wrapper = flashinfer.BatchDecodeWithPagedKVCache(cache, 32, 32, 128, 128**-0.5, dtype)
    sequence = cache.begin_forward(50)
    cache.end_forward(sequence, 50)
    q = torch.randn(1, 1, 32, 128, device=device, dtype=dtype)
    assert wrapper.decode(q).shape == (1, 1, 32, 128)
    # Nothing was appended: keys and values are zeros.
    assert not wrapper.decode(q).any()


@pytest.mark.parametrize("heads", ((4, 4), (8, 2), (5, 1)))
@pytest.mark.parametrize("page_size", (1, 3, 16))
def test_decode(heads, page_size, device):
    x = Filled(device, heads=heads, page_size=page_size, pages=160)
    sequences = [x.append(n) for n in (5, 1, 0, 17, 64)]
    for layer in range(2):
        x.check(sequences, layer)
        x.check(sequences[::-2], layer)


def test_decode_between_steps_forks_and_truncations(device):
    x = Filled(device, sm_scale=0.3)
    a = x.append(10)
    b = x.fork(a, 8)
    c = x.fork(a, 10)
    x.check([a, b, c], 0)
    for sequence in (a, b, c):
        x.append(1, sequence)
    x.check([c, a, b], 1)
    x.append(6, b, keep=2)
    x.cache.truncate(a, 3)
    x.kv[a] = x.kv[a][:, :, :3]
    x.check([a, b, c], 1)
    x.cache.free(a)
    d = x.append(9)
    x.check([b, c, d], 0)


def test_reserved_tokens_count_as_present(device):
    x = Filled(device, layers=1)
    sequence = x.append(6)
    x.cache.begin_forward(1, sequence)
    k, v = x.randn(1, 2, 64), x.randn(1, 2, 64)
    x.cache.append(k, v)
    x.kv[sequence] = torch.cat((x.kv[sequence], torch.stack((k, v))[None]), 2)
    x.check([sequence], 0)
    x.cache.end_forward(sequence)
    x.check([sequence], 0)


def test_all_live_sequences_are_the_default_batch(device):
    x = Filled(device)
    sequences = [x.append(n) for n in (3, 9, 4)]
    x.cache.free(sequences.pop(1))
    q = x.randn(2, 1, 4, 64)
    assert torch.equal(x.decoder.decode(q), x.decoder.decode(q, 0, sequences))
    assert not torch.equal(x.decoder.decode(q), x.decoder.decode(q, 1))


@pytest.mark.parametrize("causal", (True, False))
def test_ragged_prefill(causal, device):
    cache = flashinfer.PagedKVCache(1, 2, 32, 4, 4, device, torch.float16)
    prefill = flashinfer.BatchPrefillWithRaggedKVCache(cache, 6, 2, 32, 0.2, torch.float16)
    qo, kv = [0, 3, 3, 8], [0, 7, 9, 14]
    q, k, v = (torch.randn(n, h, 32, device=device).half() for n, h in ((8, 6), (14, 2), (14, 2)))
    qo_indptr, kv_indptr = (torch.tensor(x, dtype=torch.int32, device=device) for x in (qo, kv))
    out = prefill.prefill(q, k, v, qo_indptr, kv_indptr, causal)
    options = oracle.Options(causal=causal, sm_scale=0.2)
    parts = [(slice(qo[i], qo[i + 1]), slice(kv[i], kv[i + 1])) for i in range(3)]
    truth, same = (
        torch.cat([oracle.request(q[rows], k[keys], v[keys], options, d)[0] for rows, keys in parts])
        for d in (torch.float64, torch.float16)
    )
    assert_close(out, same, truth)
    own = prefill.prefill(q, k[:8], v[:8], qo_indptr)
    assert torch.equal(own, prefill.prefill(q, k[:8], v[:8], qo_indptr, qo_indptr, causal=True))


BAD_SIZES = {"kv_heads": (32, 16, 128), "head_dim": (32, 8, 64), "num_heads": (12, 8, 128), "num_heads ": (0, 8, 128)}


@pytest.mark.parametrize("name", BAD_SIZES)
@pytest.mark.parametrize(
    "kind", (flashinfer.BatchDecodeWithPagedKVCache, flashinfer.BatchPrefillWithRaggedKVCache), ids=lambda c: c.__name__
)
def test_sizes_other_than_the_caches_are_refused(name, kind):
    cache = flashinfer.PagedKVCache(1, 8, 128, 16, 2, "cpu", torch.float16)
    with pytest.raises(ValueError, match=f"^{name.strip()}: got .*; allowed: "):
        kind(cache, *BAD_SIZES[name])


def test_bad_calls_of_decode_are_refused_by_name():
    x = Filled(torch.device("cpu"))
    a, b = x.append(3), x.append(4)
    q = x.randn(2, 1, 4, 64)
    calls = {
        "q": [lambda: x.decoder.decode(q[:1]), lambda: x.decoder.decode(q[:, 0]), lambda: x.decoder.decode(q.float())],
        "layer_idx": [lambda: x.decoder.decode(q, 2)],
        "sequences": [lambda: x.decoder.decode(q, 0, [a, a])],
    }
    for name, bad in calls.items():
        for call in bad:
            with pytest.raises(ValueError, match=f"^{name}: got .*; allowed: "):
                call()
    x.cache.free(b)
    with pytest.raises(ValueError, match="^sequences: got sequence 1 .*; allowed: a live sequence"):
        x.decoder.decode(q, 0, [a, b])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_decode_of_a_served_batch(dtype, device):
    x = Filled(device, dtype=dtype, layers=3, heads=(32, 8), dim=128, page_size=16, pages=4096)
    prompt = x.append(700)
    sequences = [x.fork(prompt, 688) for _ in range(60)] + [x.append(n) for n in (1, 0, 1023, 1024)]
    for step in range(3):
        for i, sequence in enumerate(sequences):
            x.append(1 + (i + step) % 5, sequence)
        x.check(sequences[:: 7 - step], step)
