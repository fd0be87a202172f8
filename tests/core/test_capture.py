"""A capture that the caller begins by the driver, on a stream of his own: torch's allocator does not know it."""

import pytest
import torch

import flashinfer


def _norm():
    # Made before the capture: of what the caller himself captures, the graph would write memory that is free again.
    weight = torch.ones(2048, dtype=torch.bfloat16, device="cuda")
    return lambda x: flashinfer.rmsnorm(x, weight)


def _top_k(x):
    return flashinfer.top_k(x, 300)[0]


def _experts():
    generator = torch.Generator("cpu").manual_seed(3)
    first, second = (
        torch.randn(8, *shape, generator=generator, dtype=torch.float32) / 30 for shape in ((512, 2048), (2048, 256))
    )
    weights = [w.to("cuda", torch.bfloat16) for w in (first, second)]
    ids = torch.arange(64, dtype=torch.int32, device="cuda").view(32, 2) % 8
    factors = torch.full((32, 2), 0.5, dtype=torch.float32, device="cuda")

    def call(x):
        found = flashinfer.cutlass_fused_moe(x, ids, factors, *weights, torch.bfloat16, quant_scales=None)
        return found[0] if isinstance(found, (tuple, list)) else found

    return call


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["norm", "top_k", "experts"])
def test_graph_of_the_drivers_own(name, device):
    from cuda.bindings import driver

    call = {"norm": _norm, "top_k": lambda: _top_k, "experts": _experts}[name]()
    stream = torch.cuda.Stream()

    def asked(status, *values):
        assert int(status) == 0, status
        return values[0] if values else None

    with torch.cuda.stream(stream):
        x = torch.randn(32, 2048, dtype=torch.bfloat16, device=device)
        call(x)
        stream.synchronize()
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        asked(*driver.cuStreamBeginCapture(stream.cuda_stream, mode))
        out = call(x)
        graph = asked(*driver.cuStreamEndCapture(stream.cuda_stream))
        program = asked(*driver.cuGraphInstantiate(graph, 0))
        # What the captured call freed is given out again, and is not the graph's to write.
        sizes = (1 << 9, 1 << 16, 1 << 21, 1 << 23)
        others = [torch.full((size,), 7, dtype=torch.uint8, device=device) for size in sizes]
        x.copy_(torch.randn_like(x))
        asked(*driver.cuGraphLaunch(program, stream.cuda_stream))
        stream.synchronize()
        assert torch.equal(out, call(x))
        assert all((other == 7).all() for other in others)
    asked(*driver.cuGraphExecDestroy(program))
    asked(*driver.cuGraphDestroy(graph))
