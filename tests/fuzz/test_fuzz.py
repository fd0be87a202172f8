"""Random calls of public functions, each from its own seed.

    pytest tests/fuzz                                   700 calls on the CPU, nine tenths of them by the reference
    pytest tests/fuzz --fuzz 1500 --fuzz-seed 500       more of them, from other seeds, as `make matrix` does
    pytest tests/fuzz -m gpu --fuzz 100000 -n 16        as many by a GPU's kernels, in 16 processes
    pytest tests/fuzz --fuzz 1 --fuzz-seed N -k NAME    the call that a failure names
"""

import ctypes
import time
from collections import Counter

import pytest
import torch

from flashinfer._core.checks import UnsupportedConfig
from flashinfer.testing import fuzz
from tests import rooms
from tests.fuzz import (
    attend, coded, direct, experts, formats, latent, mixed, narrow, pages, products, recurrent, sampled, selective,
    tokens, wrappers,
)  # fmt: skip

FAMILIES = {
    f"{module.__name__.rpartition('.')[2]}.{family.__name__}": family
    for module in (
        attend, coded, direct, experts, formats, latent, mixed, narrow, pages, products, recurrent, sampled, selective,
        tokens, wrappers,
    )  # fmt: skip
    for family in module.FAMILIES
}
CALLS_ON_CPU = 700
# The families whose kernels take long in Triton's interpreter get few calls of it.
SLOW = {
    "sampled.top_k": 0.2, "sampled.sample": 0.3, "sampled.renorm": 0.3, "sampled.mask_logits": 0.3,
    "selective.ragged_transform": 0.2, "selective.table_transform": 0.2,
}  # fmt: skip
# Their results are bfloat16, which Triton 3.6's interpreter truncates.
NOT_INTERPRETED = {"experts.by_tensorrt_names"}
# On a GPU these compile a kernel in nearly every call, which takes a second and more, and get a share of calls.
COMPILING = {
    *(name for name in FAMILIES if name.startswith(("attend", "coded", "direct", "latent", "mixed", "narrow", "wrap"))),
    "recurrent.gdn_prompt", "recurrent.state_space_prompt", "selective.block_scores", "selective.cascade",
    "selective.indexer_logits",
}  # fmt: skip
SHARE_OF_COMPILING = 1 / 32
SHOWN = 5
# Calls of a test: processes of a long run share out a family's.
MOST = 100


def many(config, kind, name):
    """The calls of a family."""
    calls = config.getoption("fuzz") or CALLS_ON_CPU
    if kind != "gpu":
        return max(1, round(calls * {"reference": 0.9, "interpreter": 0.1}[kind] / len(FAMILIES)))
    weight = {each: SHARE_OF_COMPILING if each in COMPILING else 1 for each in FAMILIES}
    return max(1, round(calls * weight[name] / sum(weight.values())))


def pytest_generate_tests(metafunc):
    """A test for each family, and for each `MOST` calls of it."""
    if "shard" in metafunc.fixturenames:
        kind = metafunc.function.__name__.rpartition("_")[2]
        left_out = NOT_INTERPRETED if kind == "interpreter" else ()
        shards = {name: -(-many(metafunc.config, kind, name) // MOST) for name in FAMILIES if name not in left_out}
        cases = [(name, shard) for name, count in shards.items() for shard in range(count)]
        ids = [name if shards[name] == 1 else f"{name}-{shard}" for name, shard in cases]
        metafunc.parametrize(("name", "shard"), cases, ids=ids)


def part(config, kind, name, shard):
    """The seed of a shard's first call, and how many there are."""
    begin = shard * MOST
    return config.getoption("fuzz_seed") + begin, min(MOST, many(config, kind, name) - begin)


def calls(family, first, count, shape):
    """Make the calls; one sentence on each that was wrong."""
    outcomes, wrong, start = Counter(), [], time.perf_counter()
    for seed in range(first, first + count):
        draw = fuzz.Draw(seed, **shape)
        try:
            outcomes[fuzz.run(family, draw)] += 1
        except fuzz.Wrong as fault:
            wrong.append(f"seed {seed}: {str(fault)[:1500]}")
    seconds = time.perf_counter() - start
    print(f"{family.__name__}: {count} calls from seed {first}, {dict(outcomes)}, {len(wrong)} wrong, {seconds:.1f} s")
    # A family whose calls are all refused tests nothing.
    assert count < 20 or outcomes["right"] > count / 4 or wrong, outcomes
    assert not wrong, f"{len(wrong)} of {count} calls:\n" + "\n".join(wrong[:SHOWN])


def test_reference(name, shard, pytestconfig):
    """Against float64."""
    shape = dict(device=torch.device("cpu"), backend="reference")
    calls(FAMILIES[name], *part(pytestconfig, "reference", name, shard), shape)


def test_kernels_in_the_interpreter(name, shard, pytestconfig):
    # Triton 3.6's interpreter multiplies bfloat16 wrongly.
    multiplies = not name.startswith(("formats", "pages", "sampled", "tokens"))
    halves = (torch.float16,) if multiplies else fuzz.HALVES
    shape = dict(device=torch.device("cpu"), backend="portable", largest=1 << 10, halves=halves)
    with rooms.by("portable"):
        first, count = part(pytestconfig, "interpreter", name, shard)
        calls(FAMILIES[name], first, max(1, round(count * SLOW.get(name, 1))), shape)


@pytest.mark.gpu
def test_on_a_gpu(name, shard, pytestconfig, device):
    shape = dict(device=device, backend="auto", largest=1 << 20)
    calls(FAMILIES[name], *part(pytestconfig, "gpu", name, shard), shape)


class TestTheFuzzer:
    """It sees what it should."""

    @staticmethod
    def family(function, check=lambda result: None):
        return lambda draw: fuzz.Call(function, dict(x=1), check)

    def run(self, function, **options):
        return fuzz.run(self.family(function, **options), fuzz.Draw(0, torch.device("cpu")))

    def test_right_and_refused(self):
        def refuses(x):
            raise ValueError("x: got 1; allowed: 2")

        assert self.run(lambda x: x) == "right" and self.run(refuses) == "refused"

    @pytest.mark.parametrize("error", [ValueError("too large"), TypeError("x"), IndexError("x")], ids=repr)
    def test_errors_that_are_no_refusal(self, error):
        def fails(x):
            raise error

        with pytest.raises(fuzz.Wrong):
            self.run(fails)

    def test_wrong_results_and_writes(self):
        def differs(result):
            raise AssertionError("out: error")

        with pytest.raises(fuzz.Wrong, match="out: error"):
            self.run(lambda x: x, check=differs)

        def writes(x):
            out = torch.zeros(8)
            ctypes.memset(out.data_ptr() + 32, 0, 4)

        with pytest.raises(fuzz.Wrong, match="was written at byte 32 of 32"):
            self.run(writes)

    def test_a_seed_gives_the_same_call(self):
        for name, family in FAMILIES.items():
            first, second = (family(fuzz.Draw(11, torch.device("cpu"))) for _ in range(2))
            assert fuzz._described(first) == fuzz._described(second), name

    def test_refusals_are_value_errors(self):
        assert issubclass(UnsupportedConfig, ValueError)
