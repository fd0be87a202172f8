"""The decorators of flashinfer.utils, and what its functions say of chips: callers' own functions, checked by them."""

import logging
from types import SimpleNamespace

import pytest
import torch

from flashinfer import utils
from flashinfer._core import target
from flashinfer.utils import BackendSupportedError, backend_requirement, supported_compute_capability
from flashinfer.utils import requirements

NONE = utils.PosEncodingMode.NONE.value


@pytest.fixture
def hopper(monkeypatch):
    """Tensors of the CPU pass for those of an H100, and "cuda" is one."""
    monkeypatch.setattr(requirements, "_capability_of", lambda *values: 90)
    monkeypatch.setattr(utils.devices, "target_of", lambda device: target.named("90a"))


def narrow(x, scale=1.0, backend="a"):
    return x.shape[-1] <= 8


def wide(x, scale=1.0, backend="a"):
    if x.shape[-1] < 4:
        raise ValueError("x: too narrow")
    return True


def decorated(**more):
    a, b = supported_compute_capability([80, 90])(narrow), supported_compute_capability([100])(wide)

    @backend_requirement({"a": a, "b": b}, **more)
    def times(x, scale=1.0, backend="a"):
        """Doc."""
        return x * scale

    return times


def test_capabilities_are_marked():
    @supported_compute_capability(iter([80, 90]))
    def function():
        return 3

    assert function() == 3 and function._supported_ccs == {80, 90}
    assert function.is_compute_capability_supported(80) and not function.is_compute_capability_supported(75)
    for bad in (5, [80, "90"], [True], [9.0]):
        with pytest.raises(TypeError, match="^supported_ccs"):
            supported_compute_capability(bad)


def test_backends_are_answered_for():
    times = decorated()
    assert times.__name__ == "times" and times.__doc__ == "Doc."
    assert times.is_backend_supported("a") and times.is_backend_supported("a", 90)
    assert not times.is_backend_supported("a", 75) and not times.is_backend_supported("c")
    assert times.is_compute_capability_supported(100) and not times.is_compute_capability_supported(75)
    assert times.has_backend("b") and not times.has_backend("c") and times.has_backend_choices()


def test_calls_are_checked(hopper):
    times, x = decorated(), torch.ones(2, 8)
    assert torch.equal(times(x, 3.0), 3 * x) and torch.equal(times(x=x, scale=3.0, backend="a"), 3 * x)
    with pytest.raises(BackendSupportedError, match="backend: got 'b'; allowed for times on .* 9.0: a"):
        times(x, backend="b")
    with pytest.raises(BackendSupportedError, match="got 'c'"):
        times(x, backend="c")
    with pytest.raises(ValueError, match="times: a check refuses"):
        times(torch.ones(2, 9))
    assert torch.equal(times(torch.ones(2, 9), backend="c", skip_check=True), torch.ones(2, 9))
    with pytest.raises(TypeError):
        times()


def test_a_check_of_all_backends(hopper):
    times = decorated(common_check=lambda x, scale, backend: scale > 0)
    assert torch.equal(times(torch.ones(2)), torch.ones(2))
    with pytest.raises(ValueError, match="times: a check refuses"):
        times(torch.ones(2), -1.0)


def test_auto_is_what_the_heuristic_likes_best(monkeypatch):
    seen = []

    def heuristic(able, x, scale, backend):
        seen.append((able, scale, backend))
        return able[::-1]

    times = decorated(heuristic_func=heuristic)
    times(torch.ones(8), backend="auto")
    assert seen.pop() == (["a", "b"], 1.0, "auto") and times.suitable_auto_backends == ["b", "a"]
    times(torch.ones(2), backend="auto")  # `wide` refuses by an error.
    assert seen.pop()[0] == ["a"] and times.suitable_auto_backends == ["a"]
    monkeypatch.setattr(requirements, "_capability_of", lambda *values: 100)
    times(x=torch.ones(8), scale=2.0, backend="auto", skip_check=True)
    assert seen.pop() == (["b"], 2.0, "auto")
    monkeypatch.setattr(requirements, "_capability_of", lambda *values: 75)
    with pytest.raises(BackendSupportedError, match="got 'auto'"):
        times(torch.ones(8), backend="auto")
    with pytest.raises(ValueError, match="^backend: got 'auto'; allowed for times: a, b"):
        decorated()(torch.ones(8), backend="auto")


def test_a_parameter_may_be_called_as_ours_are():
    takes = supported_compute_capability([80, 90])(lambda x, cc, backend: cc == 3)

    @backend_requirement({"a": takes}, heuristic_func=lambda able, x, cc, backend: able)
    def times(x, cc, backend="auto"):
        return cc * x

    assert times(2, 3) == 6 and times(2, cc=3) == 6
    with pytest.raises(BackendSupportedError):
        times(2, 4)


def test_functions_without_backends(hopper):
    @supported_compute_capability([90])
    def positive(x, scale):
        return scale > 0

    def times(x, scale=1.0):
        return x * scale

    call = backend_requirement({}, common_check=positive)(times)
    assert torch.equal(call(torch.ones(2), 2.0), 2 * torch.ones(2)) and not call.has_backend_choices()
    assert call.is_compute_capability_supported(90) and not call.is_compute_capability_supported(80)
    with pytest.raises(ValueError, match="a check refuses"):
        call(torch.ones(2), 0.0)
    with pytest.raises(ValueError, match="^backend: got 'a'"):
        call.is_backend_supported("a")
    elsewhere = backend_requirement({}, common_check=supported_compute_capability([100])(lambda x, scale: True))(times)
    with pytest.raises(BackendSupportedError, match="9.0"):
        elsewhere(torch.ones(2))
    for check in (None, lambda x, scale: True):
        with pytest.raises(ValueError, match="common_check"):
            backend_requirement({}, common_check=check)(times)(torch.ones(2))


def test_the_chip_is_that_of_the_first_tensor(monkeypatch):
    assert requirements._capability_of(3, None, "x") is None and requirements._capability_of(torch.ones(1)) is None
    on_gpu = SimpleNamespace(device=torch.device("cuda:1"))
    monkeypatch.setattr(requirements.torch, "Tensor", SimpleNamespace)
    monkeypatch.setattr(requirements, "get_compute_capability", {on_gpu.device: (12, 1)}.__getitem__)
    assert requirements._capability_of(3, on_gpu) == 121


def test_upstreams_choice_of_attention(hopper):
    cuda, cpu, half, fp8 = torch.device("cuda"), torch.device("cpu"), torch.float16, torch.float8_e4m3fn
    plain = NONE, False, False, half, half
    assert utils.determine_attention_backend(cuda, *plain) == "fa3"
    assert utils.determine_attention_backend(cpu, *plain) == "fa2"
    for dims, name in (((128, 128), "fa3"), ((192, 128), "fa3"), ((96, 96), "fa2"), ((64, 128), "fa2")):
        assert utils.determine_attention_backend(cuda, *plain, head_dim_qk=dims[0], head_dim_vo=dims[1]) == name
    others = [(1, False, False, half, half), (NONE, True, False, half, half), (NONE, False, True, half, half)]
    for problem in others:
        assert utils.determine_attention_backend(cuda, *problem) == "fa2"
        assert not utils.is_cutlass_backend_supported(*problem)
    for q, kv, taken in ((half, fp8, False), (fp8, fp8, True), (half, torch.uint8, False)):
        assert utils.is_fa3_backend_supported(NONE, False, False, q, kv) == taken
    assert utils.is_cutlass_backend_supported(*plain)
    assert not utils.is_cutlass_backend_supported(NONE, False, False, half, fp8)
    assert utils.determine_gemm_backend(cuda) == "sm90"


def test_what_a_device_is(hopper, monkeypatch):
    cuda = torch.device("cuda", 1)
    assert utils.get_shared_bytes_per_block_optin(cuda) == 227 << 10 and utils.get_device_index(cuda) == 1
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert utils.get_device_index(torch.device("cuda")) == 3
    # An H200: 6144 bits at 3201 MHz, two transfers a cycle.
    known = SimpleNamespace(memory_clock_rate=3201000, memory_bus_width=6144)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)
    assert utils.get_gpu_memory_bandwidth(cuda) == pytest.approx(4917, rel=1e-3)
    assert utils.get_device_properties(cuda) is known and not utils.is_cvt_rs_supported()
    assert utils.get_default_generators(torch.device("cpu")) is torch.default_generator
    for ask in (utils.get_gpu_memory_bandwidth, utils.get_shared_bytes_per_block_optin):
        with pytest.raises(ValueError, match="^device: got cpu"):
            ask(torch.device("cpu"))


def test_small_helpers():
    assert utils.log2e * utils.ln2 == pytest.approx(1)
    for name, check in (("lse_base", utils.check_lse_base), ("lse_layout", utils.check_lse_layout)):
        for good in ("log2", "ln") if name == "lse_base" else ("NH", "HN"):
            check(good)
        with pytest.raises(ValueError, match=f"^{name}: got 'e'; allowed: "):
            check("e")
    # 1024 tokens in 8 of 128 experts are 64 rows each, 83 with a third more, and 128 the power of two behind it.
    sizes = [(1024, 128, 8), (1, 128, 8), (100, 8, 2), (1 << 20, 8, 2)]
    assert [utils.calculate_tile_tokens_dim(*size) for size in sizes] == [128, 8, 32, 128]
    assert utils.calculate_tile_tokens_dim(1 << 20, 8, 2, max_tile_tokens_dim=256) == 256
    assert utils.version_at_least("2.10", "2.9") and not utils.version_at_least("12.8", "12.9")
    assert utils.get_shuffle_block_size(256) == 32 and utils.get_shuffle_block_size(64) == 16
    x = torch.ones(2, 3)
    utils.check_shape_dtype_device(x, (2, 3), torch.float32, torch.device("cpu"), "x")
    utils.check_shape_dtype_device(x, None, None, None, "x")
    for bad in (((2, 4), None, None), (None, torch.int32, None), (None, None, torch.device("cuda:0"))):
        with pytest.raises(ValueError, match="^x: got "):
            utils.check_shape_dtype_device(x, *bad, "x")
    function = utils.register_custom_op("flashinfer::made_up", mutates_args=("x",))(narrow)
    assert function is utils.register_fake_op("flashinfer::made_up")(narrow) is narrow
    assert utils.has_flashinfer_cubin() and utils.has_flashinfer_jit_cache() in (True, False)


def test_the_level_of_the_log():
    logger = logging.getLogger("flashinfer")
    before = logger.level
    try:
        for name, level in (("warn", logging.WARNING), ("trace", logging.DEBUG), ("critical", logging.CRITICAL)):
            utils.set_log_level(name)
            assert logger.level == level
        with pytest.raises(ValueError, match="^lvl_str: got 'loud'"):
            utils.set_log_level("loud")
    finally:
        logger.setLevel(before)
