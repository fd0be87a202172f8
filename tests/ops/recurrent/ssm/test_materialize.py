"""States in the middle of a ring against float64, of several layers by their addresses."""

import pytest
import torch

from flashinfer.mamba import replayssm_materialize
from flashinfer.testing.compare import assert_bitwise
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.recurrent.ssm.test_layouts import CODES, encoded, near_codes
from tests.ops.recurrent.ssm.test_ssm import DIM, DSTATE, GROUPS, HEADS, truth_of

SLOTS, LENGTH, LAYERS = 6, 5, 2
REPEAT = HEADS // GROUPS


def layer(device, dtype):
    """A layer's state, rings, A and scales; a row of another tensor stands between slots."""
    wide = torch.randn(SLOTS, 2, HEADS, DIM, DSTATE, device=device)
    state, scale, _ = encoded(wide, dtype)
    x = torch.randn(SLOTS, HEADS, LENGTH, DIM, device=device, dtype=torch.bfloat16)
    B = torch.randn(SLOTS, GROUPS, LENGTH, DSTATE, device=device, dtype=torch.bfloat16)
    dt = torch.rand(SLOTS, HEADS, LENGTH, device=device)
    return dict(state=state, x=x, B=B, dt=dt, A=-torch.rand(HEADS, device=device), scale=scale)


def tables(layers, device):
    def of(read):
        return torch.tensor([read(given) for given in layers], device=device)

    def pointer(name):
        return of(lambda given: 0 if given[name] is None else given[name].data_ptr())

    def stride(name):
        return of(lambda given: 0 if given[name] is None else given[name].stride(0))

    names = ("state", "x", "B", "dt")
    return [f(name) for name in names for f in (pointer, stride)] + [pointer("A"), pointer("scale"), stride("scale")]


@pytest.mark.parametrize("rounds", [0, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, *CODES], ids=str)
def test_against_float64(variant, device, dtype, rounds):
    layers = [layer(device, dtype) for _ in range(LAYERS)]
    before = [{name: None if t is None else t.clone() for name, t in given.items()} for given in layers]
    source = torch.tensor([[0, 1, 2, -1], [3, 1, 0, 2]], dtype=torch.int32, device=device)
    goal = torch.tensor([[4, 5, 3, 4], [4, 5, -1, 5]], dtype=torch.int32, device=device)
    start, count = (torch.tensor(t, dtype=torch.int32, device=device) for t in ([4, 0, 1, 2], [3, 0, 2, 1]))
    active = torch.tensor([2, 0, 1, -1], dtype=torch.int32, device=device)
    replayssm_materialize(
        *tables(layers, device), source, goal, start, count, active, state_dtype=dtype, input_dtype=torch.bfloat16,
        matrixA_dtype=torch.float32, dim=DIM, dstate=DSTATE, num_heads=HEADS, heads_per_group=REPEAT, max_window=4,
        ring_buffer_len=LENGTH, philox_rounds=rounds, rand_seed=torch.tensor([3], device=device) if rounds else None,
    )  # fmt: skip
    for number, (given, old) in enumerate(zip(layers, before, strict=True)):
        written = {}
        for b in (2, 0, 1):
            if min(source[number, b], goal[number, b]) >= 0:
                written[int(goal[number, b])] = b
        for name in ("x", "B", "dt", "A"):
            assert_bitwise(given[name], old[name])
        for slot in range(SLOTS):
            assert_bitwise(given["state"][slot, 1], old["state"][slot, 1])
            if slot not in written:
                assert_bitwise(given["state"][slot], old["state"][slot])
                continue
            b = written[slot]
            first = int(source[number, b])
            if not count[b]:
                assert_bitwise(given["state"][slot, 0], old["state"][first, 0])
                continue
            wide = old["state"][first, 0].double()
            if dtype in CODES:
                wide = wide * old["scale"][first, 0].double()[..., None]
            rows = [(int(start[b]) + t) % LENGTH for t in range(int(count[b]))]
            tokens = dict(x=old["x"][first].transpose(0, 1), B=old["B"][first].transpose(0, 1))
            tokens |= dict(C=tokens["B"], dt=old["dt"][first].T[..., None].expand(LENGTH, HEADS, DIM), z=None, D=None)
            tokens |= dict(A=old["A"][:, None, None].expand(HEADS, DIM, DSTATE), dt_bias=None)
            truth = truth_of(wide, tokens, rows, softplus=False)
            scale = given["scale"][slot, 0] if dtype in CODES else None
            units = 1.01 if rounds else 0.51
            near_codes(given["state"][slot, 0], scale, truth.states[-1], truth.state_error[-1], units)


def test_bad_input():
    device = "cpu"
    given = tables([layer(device, torch.float32)], device)
    slots, one = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    options = dict(state_dtype=torch.float32, input_dtype=torch.bfloat16, matrixA_dtype=torch.float32, dim=DIM)
    options |= dict(dstate=DSTATE, num_heads=HEADS, heads_per_group=REPEAT, max_window=4, ring_buffer_len=LENGTH)
    for changed, name in (
        (dict(state_dtype=torch.float64), "state_dtype"), (dict(heads_per_group=3), "heads_per_group"),
        (dict(max_window=17), "max_window"), (dict(philox_rounds=10), "rand_seed"), (dict(dim=0), "dim"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}: got "):
            replayssm_materialize(*given, slots, slots, one, one, one, **options | changed)
    with pytest.raises(ValueError, match="^src_slots: got "):
        replayssm_materialize(*given, slots[:, :1], slots, one, one, one, **options)
