"""Helpers around the kernels: of devices, sizes and weights."""

import pytest
import torch

import flashinfer
from flashinfer import utils
from flashinfer._core.target import named, override
from flashinfer.fused_moe import utils as moe_utils
from flashinfer.fused_moe.utils import get_hybrid_num_tokens_buckets
from flashinfer.testing.compare import assert_bitwise


@pytest.mark.parametrize(
    ("arch", "capability", "pdl", "sm100"),
    [("89", (8, 9), False, False), ("90a", (9, 0), True, False), ("103a", (10, 3), True, True),
     ("120a", (12, 0), True, False)],
)  # fmt: skip
def test_devices(arch, capability, pdl, sm100):
    with override(named(arch)):
        for device in (torch.device("cuda:0"), "cuda:0"):
            assert utils.get_compute_capability(device) == capability
            assert utils.get_device_sm_count(device) == named(arch).sms
            assert utils.device_support_pdl(device) is pdl and utils.is_sm100a_supported(device) is sm100


@pytest.mark.parametrize(
    ("arch", "named_by"),
    [("80", ""), ("89", ""), ("90a", "90a"), ("100a", "100a 100f"), ("103a", "100a 100f"),
     ("120a", "120a"), (None, "")],
)  # fmt: skip
def test_names_of_chips(arch, named_by):
    device = "cpu" if arch is None else "cuda:0"
    with override(named(arch or "90a")):
        for name in ("90a", "100a", "100f", "110a", "120a", "121a"):
            assert getattr(utils, f"is_sm{name}_supported")(torch.device(device)) is (name in named_by.split())


def test_a_cpu_is_no_cuda_device():
    assert not utils.device_support_pdl("cpu") and not utils.is_sm100a_supported(torch.device("cpu"))
    for function in (utils.get_compute_capability, utils.get_device_sm_count):
        with pytest.raises(ValueError, match="^device: got cpu; allowed: a CUDA device"):
            function(torch.device("cpu"))


def test_powers_of_two():
    numbers = [-3, 0, 1, 2, 3, 4, 5, 1023, 1024, 1025]
    assert [utils.next_positive_power_of_2(n) for n in numbers] == [1, 1, 1, 2, 4, 4, 8, 1024, 1024, 2048]


def test_counter_bytes():
    count = utils.get_trtllm_gen_multi_ctas_kv_counter_bytes
    assert count(1, 8, 132) == 528 and count(64, 32, 132) == 8192 and count(1, 3, 0) == 16 and count(0, 8, 0) == 16
    with pytest.raises(ValueError, match="^batch_size: got -1"):
        count(-1, 8, 132)


def test_token_buckets():
    powers = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert get_hybrid_num_tokens_buckets(256) == powers and get_hybrid_num_tokens_buckets(1) == (1,)
    assert get_hybrid_num_tokens_buckets(100, 4) == (4, 8, 16, 32, 64, 100)
    middle = (512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)
    assert get_hybrid_num_tokens_buckets(16384) == (*powers, *middle, 8192, 16384)
    assert get_hybrid_num_tokens_buckets(5000, 3072) == (*middle, 5000)
    assert get_hybrid_num_tokens_buckets(600, 100) == (100, 200, 512, 600)
    assert get_hybrid_num_tokens_buckets(4, 5) == (4,) and get_hybrid_num_tokens_buckets(4, 0) == (1, 2, 4)
    with pytest.raises(ValueError, match="^max_num_tokens: got 0; allowed: "):
        get_hybrid_num_tokens_buckets(0)


@pytest.mark.parametrize("most", [1, 100, 256, 700, 4096, 9000, 16384])
def test_buckets_of_numbers_of_tokens(most):
    """A number's bucket is the least that holds it: a tuner finds the profile that it measured."""
    buckets = get_hybrid_num_tokens_buckets(most)
    for x in {*range(-1, 20), *(b + d for b in buckets for d in (-1, 0, 1)), 2 * most}:
        expected = min((b for b in buckets if b >= x), default=most)
        assert moe_utils.map_to_hybrid_bucket(x, most) == expected
        assert moe_utils.make_hybrid_bucket_mapper(most)(x) == expected
        if x <= most:
            assert min(moe_utils.map_to_hybrid_bucket_uncapped(x), most) == expected
    assert moe_utils.make_hybrid_bucket_mapper(most) is moe_utils.make_hybrid_bucket_mapper(most)
    assert moe_utils.map_to_hybrid_bucket_uncapped(16385) == 32768


def test_shared_buffers():
    """One for each name, which grows; the memory of one that was outgrown stays as it was."""
    from flashinfer.compat import buffers
    from flashinfer.gemm import gemm_base

    get, device = gemm_base._get_cache_buf, torch.device("cpu")
    first = get("a test", 64, device, zero_init=True)
    assert first.dtype == torch.uint8 and first.shape == (64,) and not first.any()
    first += 3
    assert get("a test", 16, device) is first and get("another", 64, device) is not first
    grown = get("a test", 65, device)
    assert len(grown) == 65 and get("a test", 1, device) is grown and (first == 3).all()
    assert any(kept is first for kept in buffers._outgrown)


def test_low_latency_weights():
    w = torch.randint(0, 255, (64, 256), dtype=torch.uint8).view(torch.float8_e4m3fn)
    cache = {}
    out = flashinfer.prepare_low_latency_gemm_weights(w, cache)
    shuffled = flashinfer.shuffle_matrix_a(w.view(torch.uint8), 128)
    assert out.shape == (2, 64, 128) and out.dtype == w.dtype and len(cache) == 1
    for block in range(2):
        assert_bitwise(out[block].view(torch.uint8), shuffled[:, 128 * block : 128 * (block + 1)])
    for bad in (w[:40], w[:, :64], w.view(torch.uint8), w[0]):
        with pytest.raises(ValueError, match="^w: got .*allowed: "):
            flashinfer.prepare_low_latency_gemm_weights(bad, {})
