"""Kernels that are broken on purpose, at each place where they order what happens: the emulator has to say so.

Not every fault shows in every order, so that several seeds look for it. A few do no harm: a wait for what another one
has waited for, taking turns, which saves time alone, an arrival that nobody waits for any more.
"""

import pytest
import torch

from flashinfer.ops.gemm.dense import Inputs, Problem, dense
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_close
from flashinfer.testing.emulator import EmulationError, emulate
from tests.emulator import test_decode, test_gemm, test_mla, test_prefill
from tests.ops.attention.oracle import Options

FAULTS = {
    "wait": ("skip", "phase"), "arrive": ("skip", "twice"), "expect": ("fewer", "more"), "fence": ("skip",),
    "product wait": ("skip",), "copy wait": ("skip",), "block barrier": (),
}  # fmt: skip


def product():
    """More blocks of K than there are stages."""
    a, b = (generate.randn(1, n, 1400, dtype=torch.bfloat16) for n in (136, 264))
    out, truth = torch.empty(1, 136, 264, dtype=torch.bfloat16), a.double() @ b.double().mT

    def call():
        out.fill_(float("nan"))
        dense(Problem("bf16", "bf16", "bf16", "k", "k", "n", 256, 128), out.device).run(Inputs(a, b.mT, out))
        assert_close(out, truth.to(out.dtype), truth)

    return call


def prefill():
    x = test_prefill.batch(qo=(130, 3), kv=(700, 70))
    return lambda: test_prefill.check(test_prefill.run_ragged(x, Options(causal=True), "sm90"), x, Options(causal=True))


def fp8():
    x, options = test_prefill.fp8.batch("cpu", (130, 3), (700, 70), heads=(2, 1), dim=64), Options(causal=True)
    return lambda: test_prefill.fp8.check(
        test_prefill.run_ragged(x, options, "sm90", plan=test_prefill.fp8.OUT), x, options
    )


def latents():
    case = ([2, 1, 1], [400, 33, 0], 16, 32, True, torch.bfloat16, 64)
    return lambda: test_mla.mla._check_batch(case, torch.bfloat16, True, test_mla.CPU)


def scaled():
    return lambda: test_gemm.blockscaled.test_shapes(test_gemm.CPU, 130, 136, 1408, 1)


def undetected(call, seeds):
    """(fault, operation, place) that no seed shows, and the number of all."""
    sites = set()
    for seed in range(2):
        with emulate("90a", seed=seed, watch=lambda *site: sites.add(site)):
            call()
    faults = [(fault, *site) for site in sorted(sites) for fault in FAULTS[site[0]]]
    return [fault for fault in faults if not any(_shows(call, seed, *fault) for seed in range(seeds))], len(faults)


def _shows(call, seed, fault, operation, place) -> bool:
    try:
        with emulate("90a", seed=seed, watch=lambda *site: fault if site == (operation, place) else None):
            call()
    except (EmulationError, AssertionError):
        return True
    return False


def test_faults_of_a_product_are_found():
    found, count = undetected(product(), 4)
    assert count >= 10 and found == []


@pytest.mark.matrix
@pytest.mark.parametrize("kernel", (prefill, fp8, latents, scaled), ids=lambda kernel: kernel.__name__)
def test_faults_are_found(kernel):
    found, count = undetected(kernel(), 5)
    assert count >= 12 and len(found) <= count // 5, "\n".join(map(str, found))


def test_a_missing_wait_of_decode_is_found():
    with pytest.raises((EmulationError, AssertionError)):
        with emulate("90a", watch=lambda operation, place: "skip" if operation == "copy wait" else None):
            test_decode.run_decode(
                generate.ragged_batch([1], [900], 8, 2, 64, dtype=torch.bfloat16), Options(), "sm80", page_size=16
            )


@pytest.mark.parametrize("kernel", ("prefill", "decode", "dense"))
def test_sums_that_are_released_without_a_barrier_are_found(kernel):
    """Of split keys, and of split K."""

    def watch(operation, place):
        return "skip" if operation == "block barrier" else None

    with pytest.raises(EmulationError, match="no barrier of theirs between"):
        if kernel == "dense":
            test_gemm.check_dense(130, 136, 1032, 0, slices=3, watch=watch)
        elif kernel == "decode":
            test_decode.check_decode(0, kv=(3000,), watch=watch)
        else:
            test_prefill.check_ragged(
                test_prefill.batch(qo=(40,), kv=(1100,)), Options(causal=True), 0, watch=watch
            )


def test_a_message_names_line_barrier_and_warps():
    with pytest.raises(EmulationError) as error:
        with emulate("90a", watch=lambda operation, place: "more" if operation == "expect" else None):
            product()()
    assert "partition 2 (produce) waits for parity" in str(error.value) and "16 bytes missing" in str(error.value)
    assert ".py:" in str(error.value) and "from ops/" in str(error.value)
