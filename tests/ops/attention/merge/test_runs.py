"""variable_length_merge_states: runs of states, each merged by the formula in float64."""

import pytest
import torch

from flashinfer.testing.compare import assert_bitwise, assert_close
from flashinfer.triton.cascade import variable_length_merge_states
from tests.ops.attention.merge.test_merge import INF, device, formula, states, variant  # device, variant: fixtures


def runs(lengths, heads, dim, dtype, device, first=0):
    """v and s of all states, and the offsets of the tokens' runs; `first` states before them are no token's."""
    v, s = (x[:, 0] for x in states(first + sum(lengths), 1, heads, dim, dtype, device))
    indptr = torch.tensor([0, *lengths], device=device).cumsum(0) + first
    return v, s, indptr


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("dim", (24, 128, 600))
@pytest.mark.parametrize("lengths", ([1], [3, 0, 1, 9, 4], [0, 0], [17, 2, 2, 2, 2, 2, 2]))
def test_runs(dtype, dim, lengths, variant, device):
    v, s, indptr = runs(lengths, 3, dim, dtype, device)
    out, lse = variable_length_merge_states(v, s, indptr.int())
    assert out.shape == (len(lengths), 3, dim) and out.dtype == dtype and lse.dtype == torch.float32
    for token, (begin, end) in enumerate(zip(indptr[:-1], indptr[1:])):
        part = v[None, begin:end], s[None, begin:end]
        (truth, truth_lse), (same, same_lse) = formula(*part, torch.float64), formula(*part, dtype)
        assert_close(out[token : token + 1], same, truth, "v")
        assert_close(lse[token : token + 1], same_lse, truth_lse, "s")


def test_offsets_of_a_larger_batch_strides_and_other_types(variant, device):
    v, s, indptr = runs([2, 5], 4, 64, torch.bfloat16, device, first=3)
    plain = variable_length_merge_states(v[3:].contiguous(), s[3:].contiguous(), indptr - 3)
    wide = torch.full((10, 8, 80), 9.0, dtype=torch.bfloat16, device=device)
    wide[:, ::2, 8:72] = v
    strided = variable_length_merge_states(wide[:, ::2, 8:72], s.T.contiguous().T, indptr)
    for a, b in zip(strided, plain):
        assert_bitwise(a, b)
    rounded = variable_length_merge_states(v, s.half(), indptr)
    again = variable_length_merge_states(v, s.half().float(), indptr)
    for a, b in zip(rounded, again):
        assert_bitwise(a, b)


def test_no_states(variant, device):
    v, s, indptr = runs([0, 0, 0], 2, 16, torch.float16, device)
    out, lse = variable_length_merge_states(v, s, indptr)
    assert_bitwise(out, torch.zeros(3, 2, 16, dtype=torch.float16, device=device))
    assert_bitwise(lse, torch.full((3, 2), -INF, device=device))
    out, lse = variable_length_merge_states(v, s, indptr[:1])
    assert out.shape == (0, 2, 16) and lse.shape == (0, 2)


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        (dict(v=torch.ones(4, 8)), "v"), (dict(v=torch.ones(4, 2, 8).double()), "v"), (dict(s=torch.ones(4, 3)), "s"),
        (dict(s=torch.ones(4, 2).int()), "s"), (dict(indptr=torch.tensor([0.0, 4.0])), "indptr"),
        (dict(indptr=torch.tensor([[0, 4]])), "indptr"), (dict(indptr=torch.tensor([0, 5])), "indptr"),
        (dict(indptr=torch.tensor([0, 3, 2])), "indptr"), (dict(indptr=torch.tensor([], dtype=torch.int32)), "indptr"),
    ],
)  # fmt: skip
def test_bad_input(changed, argument):
    good = dict(v=torch.ones(4, 2, 8), s=torch.ones(4, 2), indptr=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        variable_length_merge_states(**(good | changed))


def test_is_a_registered_op():
    from flashinfer.triton import cascade

    v, s, indptr = runs([1, 3], 2, 16, torch.float32, "cpu")
    args = v.nan_to_num(), s, indptr.int(), torch.empty(2, 2, 16), torch.empty(2, 2)
    torch.library.opcheck(cascade._merge_runs.op, args)


@pytest.mark.gpu
def test_many_runs_on_a_gpu(variant, device):
    lengths = torch.randint(0, 40, (3000,)).tolist()
    v, s, indptr = runs(lengths, 8, 128, torch.bfloat16, device)
    out, lse = variable_length_merge_states(v, s, indptr)
    for token in range(0, 3000, 97):
        part = v[None, indptr[token] : indptr[token + 1]], s[None, indptr[token] : indptr[token + 1]]
        (truth, truth_lse), (same, same_lse) = formula(*part, torch.float64), formula(*part, torch.bfloat16)
        assert_close(out[token : token + 1], same, truth, "v")
        assert_close(lse[token : token + 1], same_lse, truth_lse, "s")
