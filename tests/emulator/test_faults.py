"""Kernels that are broken on purpose: the emulator has to say so."""

import pytest
import torch

from flashinfer.ops.gemm.dense import Inputs, Problem, dense
from flashinfer.testing import generate
from flashinfer.testing.emulator import BarrierError, Deadlock, EmulationError, Hazard, OutOfBounds, emulate
from tests.ops.attention.cases import run_ragged
from tests.ops.attention.oracle import Options

WAIT_EMPTY = "mbarrier.wait(self.empty.index(stage), self.phase(step) ^ 1)"
BYTES = "(settings.A_PARTS * settings.BOX + settings.BLOCK_N) * settings.BLOCK_K * BYTES"
RELEASE = "ring.channel.release(step + ring.settings.STAGES - 1)"


def product():
    """More blocks of K than there are stages, and more tiles than blocks of threads."""
    a, b = (generate.randn(1, n, 1024, dtype=torch.bfloat16) for n in (136, 264))
    out = torch.empty(1, 136, 264, dtype=torch.bfloat16)
    dense(Problem("bf16", "bf16", "bf16", "k", "k", "n", 256, 128), out.device).run(Inputs(a, b.mT, out))


def prefill():
    x = generate.ragged_batch([130, 3], [400, 70], 2, 1, 64, dtype=torch.bfloat16)
    run_ragged(x, Options(causal=True), "sm90")


def found(call, edit):
    """What three schedules say of the call with an edit."""
    errors = []
    for seed in range(3):
        try:
            with emulate("90a", seed=seed, edits=[edit]):
                call()
        except EmulationError as error:
            errors.append(error)
    return errors


FAULTS = {
    "no wait for a full stage": (product, ("sum_products", "ring.channel.wait(step)", "pass"), Hazard),
    "no wait for an empty stage": (product, ("acquire", WAIT_EMPTY, "pass"), (Hazard, BarrierError)),
    "a phase too early": (product, ("acquire", WAIT_EMPTY, WAIT_EMPTY.replace(" ^ 1", "")), Deadlock),
    "a stage released early": (product, ("sum_products", "warpgroup_mma_wait(1, [acc])", "acc"), Hazard),
    "a stage released twice": (product, ("sum_products", "pred=block > begin", "pred=True"), (Hazard, BarrierError)),
    "a stage never released": (product, ("sum_products", RELEASE, "pass"), Deadlock),
    "fewer bytes": (product, ("copy_blocks", BYTES, BYTES.replace("settings.A_PARTS * settings.BOX + ", "")),
                    (Hazard, BarrierError)),
    "more bytes": (product, ("copy_blocks", BYTES, BYTES + " + 16"), Deadlock),
    "a row too many": (product, ("_write_columns", "(rows < M)", "(rows < M + 1)"), OutOfBounds),
    "a sum used in flight": (product, ("sum_products", "acc = warpgroup_mma_wait(0, [acc])", "pass"), Hazard),
    "no fence behind stores": (prefill, ("_clear_tail", "fence_async_shared()", "pass"), Hazard),
    "no wait for keys": (prefill, ("_wait_full", "mbarrier.wait(", "("), Hazard),
    "queries not waited for": (prefill, ("_piece", "cp_async_wait(0)", "pass"), Hazard),
    "keys released early": (
        prefill, ("_steps", "s = warpgroup_mma_wait(1, [s])\n        mbarrier.arrive(k.empty.index(stage), count=1)",
                  "mbarrier.arrive(k.empty.index(stage), count=1)\n        s = warpgroup_mma_wait(1, [s])"), Hazard,
    ),
    "the next work not asked for": (prefill, ("take", "mbarrier.arrive(queue.full.index(at), count=1)", "pass"),
                                    Deadlock),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault):
    call, edit, kinds = FAULTS[fault]
    errors = found(call, edit)
    assert any(isinstance(error, kinds) for error in errors), errors


def test_without_an_edit_there_is_no_fault():
    for seed in range(3):
        with emulate("90a", seed=seed):
            product()
            prefill()


def test_a_message_names_line_barrier_and_warps():
    for error in found(product, FAULTS["more bytes"][1]):
        assert "partition 2 (produce) waits for parity" in str(error)
        assert "ring.py" in str(error) and "16 bytes missing" in str(error)


def test_an_edit_that_changes_nothing_is_refused():
    with pytest.raises(EmulationError, match="no such text"), emulate("90a", edits=[("nobody", "x", "y")]):
        product()


def test_without_emulator_a_gluon_kernel_refuses_the_cpu():
    with emulate("90a"):
        product()
    out = torch.empty(1, 136, 264, dtype=torch.bfloat16)
    problem = Problem("bf16", "bf16", "bf16", "k", "k", "n", 256, 128)
    with emulate("90a"):
        choice = dense(problem, out.device)
    a, b = (generate.randn(1, n, 1024, dtype=torch.bfloat16) for n in (136, 264))
    with pytest.raises(ValueError, match="CPU tensors"):
        choice.run(Inputs(a, b.mT, out))
