"""Parts of a GPU. On a CPU the driver is a stand-in that follows the CUDA Driver API's page of green contexts."""

from types import SimpleNamespace

import pytest
import torch

import flashinfer
from flashinfer import green_ctx
from flashinfer._core import driver, target

H100 = 132


class Driver:
    """Of one H100: contexts are tuples ("context", resource), and a remainder is split only after it had one."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM="sm")
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM="default")
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING="non blocking")

    def __init__(self):
        self.streams = []

    def cuDeviceGet(self, index):
        return 0, f"device {index}"

    def cuDeviceGetDevResource(self, device, kind):
        assert kind == "sm"
        return 0, SimpleNamespace(sm=SimpleNamespace(smCount=H100), whole=True)

    def cuDevSmResourceSplitByCount(self, groups, resource, flags, least):
        if not resource.whole or groups * least > resource.sm.smCount or least % 8:
            return 915, None, None, None
        parts = [SimpleNamespace(sm=SimpleNamespace(smCount=least), whole=True) for _ in range(groups)]
        left = SimpleNamespace(sm=SimpleNamespace(smCount=resource.sm.smCount - groups * least), whole=False)
        return 0, parts, groups, left

    def cuDevResourceGenerateDesc(self, resources, count):
        assert len(resources) == count
        return 0, resources[0]

    def cuGreenCtxCreate(self, described, device, flags):
        assert flags == "default"
        return 0, ("context", described)

    def cuGreenCtxGetDevResource(self, context, kind):
        return 0, SimpleNamespace(sm=context[1].sm, whole=True)

    def cuGreenCtxStreamCreate(self, context, flags, priority):
        assert flags == "non blocking"
        self.streams.append(context[1].sm.smCount)
        return 0, 1000 + len(self.streams)

    def cuGetErrorName(self, status):
        return 0, b"CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"

    cuGetErrorString = cuGetErrorName


@pytest.fixture
def card(monkeypatch):
    """The stand-in as the driver."""
    made = Driver()
    for module in (driver, green_ctx):
        monkeypatch.setattr(module, "bindings", lambda: made)
    monkeypatch.setattr(green_ctx, "use_context", lambda index: None)
    monkeypatch.setattr(green_ctx, "target_of", lambda device: target.named("90a"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda number, device: (number, device))
    return made


def counts(resources):
    return [resource.sm.smCount for resource in resources]


@pytest.mark.parametrize(
    ("groups", "least", "expected"),
    [(2, 16, [16, 16, 100]), (1, 7, [8, 124]), (3, 10, [16, 16, 16, 84]), (4, 17, [24, 24, 24, 24, 36])],
)
def test_like_parts(card, groups, least, expected):
    streams, resources = green_ctx.split_device_green_ctx(torch.device("cuda:0"), groups, least)
    assert counts(resources) == card.streams == expected
    assert streams == [(1001 + i, torch.device("cuda", 0)) for i in range(groups + 1)]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [([8, 16, 24], [8, 16, 24, 84]), ([7], [8, 124]), ((10, 100), [16, 104, 12]), ([1] * 16, [8] * 16 + [4])],
)
def test_parts_of_their_own_size(card, asked, expected):
    streams, resources = green_ctx.split_device_green_ctx_by_sm_count(torch.device("cuda"), asked)
    assert counts(resources) == card.streams == expected and len(streams) == len(expected)


def test_too_large_parts(card):
    cuda = torch.device("cuda")
    with pytest.raises(RuntimeError, match="^min_count: got .*allowed: 132 together"):
        green_ctx.split_device_green_ctx(cuda, 2, 67)
    with pytest.raises(RuntimeError, match="^sm_counts: got .*allowed: 132 together"):
        green_ctx.split_device_green_ctx_by_sm_count(cuda, [64, 64, 8])
    card.cuDevSmResourceSplitByCount = lambda *args: (915, None, None, None)
    with pytest.raises(RuntimeError, match="a part of 8 multiprocessors: CUDA_ERROR_INVALID_RESOURCE"):
        green_ctx.split_device_green_ctx(cuda, 1, 8)


def test_bad_input():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for argument, call in {
        "dev": lambda: green_ctx.split_device_green_ctx(cpu, 1, 8),
        "num_groups": lambda: green_ctx.split_device_green_ctx(cuda, 0, 8),
        "sm_counts": lambda: green_ctx.split_device_green_ctx_by_sm_count(cuda, []),
    }.items():
        with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
            call()
    for bad in ([0], [8, -8]):
        with pytest.raises(ValueError, match="^sm_counts: got .*allowed: 1 or more"):
            green_ctx.split_device_green_ctx_by_sm_count(cuda, bad)


def test_constraints():
    """CUDA Driver API, cuDevSmResourceSplitByCount."""
    chips = [(6, 1), (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]
    expected = [(1, 1), (2, 2), (2, 2), (4, 2), (4, 2), (8, 8), (8, 8), (8, 8)]
    assert [green_ctx.get_sm_count_constraint(*chip) for chip in chips] == expected
    with pytest.raises(ValueError, match="^major: got 5"):
        green_ctx.get_sm_count_constraint(5, 0)


def test_one_die(device):
    assert green_ctx.get_locality_domain_count(device) == 1
    with pytest.raises(RuntimeError, match="one locality domain"):
        green_ctx.split_device_green_ctx_by_locality_domain(device)
    with pytest.raises(RuntimeError, match="one locality domain"):
        green_ctx.empty_per_locality_domain((2, 3), torch.float16, device)


@pytest.mark.gpu
def test_products_on_parts_of_a_card(device):
    streams, resources = green_ctx.split_device_green_ctx(device, 2, 16)
    assert len(streams) == len(resources) == 3 and counts(resources)[:2] == [16, 16]
    x = torch.randn(512, 512, dtype=torch.float32, device=device)
    torch.cuda.synchronize(device)
    results = []
    for stream in streams:
        with torch.cuda.stream(stream):
            results.append(x @ x.T)
        stream.synchronize()
    for result in results:
        torch.testing.assert_close(result, x @ x.T)


@pytest.mark.gpu
def test_kernels_of_ours_on_a_part_of_a_card(device):
    streams, _ = green_ctx.split_device_green_ctx_by_sm_count(device, [8])
    x, w = (torch.randn(*shape, dtype=torch.float32, device=device) for shape in ((300, 640), (640,)))
    expected = torch.nn.functional.rms_norm(x, w.shape, w, 1e-6)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(streams[0]):
        out = flashinfer.rmsnorm(x, w)
    streams[0].synchronize()
    torch.testing.assert_close(out, expected)
