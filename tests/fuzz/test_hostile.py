"""Every room's calls with one argument wrong, drawn from a seed: refused by name, or as good as the right call.

    pytest tests/fuzz/test_hostile.py                      a few hundred
    pytest tests/fuzz/test_hostile.py --fuzz 20000 --fuzz-seed 7
    pytest tests/ops/norm --hostile 3                      three beside each public call of those tests
    pytest tests/ops/norm --hostile all                    every change of every argument, once a function
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashinfer
from flashinfer._core.checks import check_apart
from flashinfer.testing import fuzz
from tests import rooms
from tests.fuzz import hostile
from tests.fuzz.intercept import Hostile, intercepted

CALLS_ON_CPU = 500
TESTS = Path(__file__).parents[1]
# Whose public functions refuse, or answer rightly, every change of every argument.
EVERY = (
    "logits_processor", "ops/attention", "ops/gemm", "ops/mhc", "ops/norm", "ops/topk", "cascade core_api",
    "ops/moe ops/quantize", "ops/recurrent", "ops/activation ops/concat ops/page ops/rope ops/sampling",
    "autotuner comm fused_moe moe_ep ops/comm",
)  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("room", sorted(rooms.CALLS))
def test_room(room, pytestconfig):
    wanted = max(1, (pytestconfig.getoption("fuzz") or CALLS_ON_CPU) // len(rooms.CALLS))
    calls = Hostile(pytestconfig.getoption("fuzz_seed"), 1)
    call = rooms.CALLS[room](torch.device("cpu"))
    with rooms.by("reference"):
        while calls.made < wanted:
            before = calls.made
            with intercepted(calls.visit):
                call()
            calls.seed += 1
            assert calls.made > before, "the room calls no public function"
    assert not calls.wrong, f"{len(calls.wrong)} of {calls.made}:\n" + "\n".join(calls.wrong.values())
    print(f"{room}: {calls.made} calls, {calls.refused} refused")


@pytest.mark.matrix
@pytest.mark.parametrize("folders", EVERY)
def test_every_change_of_every_argument(folders):
    """Beside the public calls of the tests of some folders, one case of each."""
    paths = [TESTS / folder for folder in folders.split()]
    command = (sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:xdist", "--hostile", "all", *paths)
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    print(*done.stdout.splitlines()[-60:], sep="\n")
    assert done.returncode == 0, done.stderr[-2000:]


class TestTheJudge:
    """It sees what it should."""

    def attempt(self, function, change=hostile.Change("a change", 2), **arguments):
        given = dict(x=1) | arguments
        return hostile.attempt(function, given, "x", change, set(given), "function")

    def test_a_refusal_by_name(self):
        def refuses(x):
            raise ValueError("x: got 2; allowed: 1")

        assert self.attempt(refuses) is None and self.attempt(lambda x: x)[1] == 2

    @pytest.mark.parametrize("error", [ValueError("large"), TypeError("x"), IndexError("x"), KeyError("x")], ids=repr)
    def test_errors_that_are_no_refusal(self, error):
        def fails(x):
            raise error

        with pytest.raises(fuzz.Wrong):
            self.attempt(fails)

    def test_a_refusal_after_a_write(self):
        def writes(x, out):
            out.zero_()
            raise ValueError("x: got 2; allowed: 1")

        with pytest.raises(fuzz.Wrong, match="written already"):
            self.attempt(writes, out=torch.ones(3))

    def test_no_refusal_where_one_is_due(self):
        with pytest.raises(fuzz.Wrong, match="without a word"):
            self.attempt(lambda x: x, hostile.Change("a string", "2", hostile.REFUSED))

    def test_a_call_that_does_not_end(self, monkeypatch):
        monkeypatch.setattr(hostile, "LIMIT", 1)

        def waits(x):
            while True:
                pass

        with pytest.raises(fuzz.Wrong, match="not done after 1 s"):
            self.attempt(waits)

    def test_a_write_to_what_is_read(self):
        def writes(x, y):
            y.add_(1)

        change = hostile.Change("a change", 2)
        with pytest.raises(fuzz.Wrong, match="only read was written"):
            hostile.attempt(writes, dict(x=1, y=torch.ones(3)), "x", change, {"x", "y"}, "function", set())

    def judged(self, function, **arguments):
        calls = Hostile()
        calls.visit(function, None, (), arguments)
        return {what for _, _, what in calls.wrong}

    def test_codes_of_another_format(self):
        def reads_bytes(x: torch.Tensor):
            if not isinstance(x, torch.Tensor) or x.device.type != "cpu" or x.itemsize != 1 or x.dim() != 2:
                raise ValueError("x: got another; allowed: a tensor of bytes")
            return x.view(torch.uint8).float()

        x = torch.arange(6, dtype=torch.uint8).view(2, 3).view(torch.float8_e4m3fn)
        assert self.judged(reads_bytes, x=x) == {"torch.bool", "torch.float8_e5m2"}

    def test_a_view_that_is_not_one(self):
        def takes_strides_for_rows(x: torch.Tensor):
            if not isinstance(x, torch.Tensor) or x.device.type != "cpu" or x.dtype != torch.float32 or x.dim() != 2:
                raise ValueError("x: got another; allowed: a float32 matrix")
            return x.as_strided(x.shape, (x.shape[1], 1)).clone()

        wrong = self.judged(takes_strides_for_rows, x=torch.randn(4, 6))
        assert {"gaps along 0", "gaps along 1", "column-major"} <= wrong

    def test_one_tensor_for_two(self):
        def adds(out: torch.Tensor, x: torch.Tensor):
            for name, t in (("out", out), ("x", x)):
                if not isinstance(t, torch.Tensor) or t.device.type != "cpu" or t.shape != (3,) or t.dtype != x.dtype:
                    raise ValueError(f"{name}: got another; allowed: [3]")
            out.zero_()
            out += x

        assert "the same tensor as x" in self.judged(adds, out=torch.zeros(3), x=torch.ones(3))

    @pytest.mark.parametrize("checks", [True, False])
    def test_two_that_share_an_element(self, checks):
        """In place is taken; an output that has a part of an input, or the other way round, is not."""

        def doubles(out: torch.Tensor, x: torch.Tensor):
            for name, t in (("out", out), ("x", x)):
                if not isinstance(t, torch.Tensor) or t.device.type != "cpu" or t.shape != (3,) or t.dtype != x.dtype:
                    raise ValueError(f"{name}: got another; allowed: [3]")
            checks and check_apart([("out", out)], [("x", x)])
            out.copy_(x.clone() * 2)

        shared = {"an element of x", "an element of out"}
        assert self.judged(doubles, out=torch.zeros(3), x=torch.ones(3)) & shared == (set() if checks else shared)

    def test_copies_share_what_was_shared_and_nothing_else(self):
        x = torch.arange(12).view(3, 4)
        a, b = hostile.copied((x, x[1:, ::2]))
        assert a.stride() == (4, 1) and b.stride() == (4, 2) and torch.equal(b, x[1:, ::2])
        b.zero_()
        assert a[1, 0] == 0 and x[1, 0] == 4

    def test_every_kind_of_argument_has_changes(self):
        values = (torch.ones(2, 3), torch.ones(2, dtype=torch.int32), 1, 1.0, True, "a", None, (1, torch.ones(2)),
                  torch.float16, flashinfer.SfLayout.layout_128x4)  # fmt: skip
        for value in values:
            assert len(hostile.changes(value, True)) > 2, value

    def test_a_seed_draws_the_same(self):
        import inspect

        signature = inspect.signature(flashinfer.rmsnorm)
        given = dict(input=torch.ones(2, 8), weight=torch.ones(8), eps=1e-6)
        first, second = (hostile.drawn(given, signature, random.Random(5)) for _ in range(2))
        assert first[0] == second[0] and first[1].what == second[1].what
