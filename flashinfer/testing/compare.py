"""The rules by which a result is right. Every comparison of numbers in this repository uses one of these two."""

import torch

# A row of fewer elements has too few errors for its own statistics; such tensors are judged as one row.
_ROW = 16
# Units in the last place of float32 (of float64 in float64) that a result may err by, whatever its peer does: of the
# largest value for an element, of its own norm for a row. A sum of some dozens of rounded terms takes as many.
_ULPS = 8
# A peer that errs by more of the norm bounds nothing.
_PEER = 0.02


def assert_close(
    out: torch.Tensor,
    same_dtype: torch.Tensor,
    truth: torch.Tensor,
    what: str = "out",
    through: float = 0.0,
    terms: float = 0.0,
) -> None:
    """Assert that `out` is as near to the float64 truth as a computation in its own dtype can be asked to be.

    With err(x) = x - truth, in float64, over the elements where the truth is finite:

    - the largest |err(out)| is at most twice the largest |err(same_dtype)|, or 8 ulp of the largest |truth|, plus one
      rounding;
    - in every row (last dimension) the norm of err(out) is at most twice what the worst row of `same_dtype` errs
      relative to its size, plus 8 ulp and one rounding, at most 2 %. Rows are judged apart because a batch mixes
      rows of very different size, and a wrong small row hides behind the errors of a large one;
    - NaN, +inf and -inf stand where the truth, cast to the dtype of `out`, has them;
    - the norm of err(same_dtype) is at most 2 % of the norm of the truth, or half a rounding where that is more: a
      bound of some other peer would let zeros pass.

    One rounding is the relative spacing of the dtype of `out`. Rows whose truth is zero therefore have to be zero. An
    ulp is 2**-23 of the value, in float64 2**-52: kernels compute in float32. Where `out` is float32, the errors of
    both are a few ulp, and which is the larger hangs on the order in which a machine's BLAS adds; the 8 ulp do not.

    Parameters
    ----------
    out : torch.Tensor
        The result under test. Integers and booleans have to equal the truth.
    same_dtype : torch.Tensor
        The same result computed by plain torch with the roundings to the dtype of `out` that a kernel cannot avoid,
        and everything else in float32; same shape and dtype as `out`.
    truth : torch.Tensor
        The same result in float64; same shape.
    what : str
        The name of the result in the error message.
    through : float
        The relative spacing of the coarsest format that values pass on their way to `out`, where it is not that of
        `out`: 2**-3 for weights in e4m3, 2**-1 for codes in e2m1. The peer may err by half of it.
    terms : float
        The size of the largest term behind `out`, where terms cancel: a logit, of log-sum-exps near 0. The 8 ulp are of
        this if it is larger than every |truth|, for an element and for each of a row.

    Raises
    ------
    AssertionError
        With the worst element, its index and the bound.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.testing.compare import assert_close
    >>> truth = torch.tensor([1.0, 3.0], dtype=torch.float64) / 3
    >>> assert_close(truth.half(), truth.half(), truth)
    """
    _assert_alike(out, same_dtype, what)
    if out.shape != truth.shape:
        raise AssertionError(f"{what}: shape {tuple(out.shape)}, the truth has {tuple(truth.shape)}")
    if not out.dtype.is_floating_point:
        return assert_bitwise(out, truth.to(out.dtype), what)
    if truth.dtype != torch.float64:
        raise AssertionError(f"{what}: the truth is {truth.dtype}, not float64")
    if out.numel() == 0:
        return None
    truth = truth.to(out.device)
    expected = truth.to(out.dtype).double()
    result, peer = out.double(), same_dtype.to(out.device).double()
    finite = expected.isfinite()
    _assert_same_specials(result, expected, what)
    if not peer[finite].isfinite().all():
        raise AssertionError(f"{what}: the same-dtype computation overflows where the truth does not: no bound")
    zero = torch.zeros((), dtype=torch.float64, device=out.device)
    size = torch.where(finite, truth, zero).abs()
    error = torch.where(finite, result - truth, zero).abs()
    allowed = torch.where(finite, peer - truth, zero).abs()
    _assert_peer(allowed, size, torch.finfo(out.dtype), through, what)
    _assert_largest(error, allowed, size, (result, peer, truth), torch.finfo(out.dtype), terms, what)
    _assert_rows(error, allowed, size, (result, peer, truth), torch.finfo(out.dtype), terms, what)
    return None


def assert_bitwise(out: torch.Tensor, expected: torch.Tensor, what: str = "out") -> None:
    """Assert that two tensors have the same shape, dtype and bits; the sign of zero and NaN payloads count.

    Parameters
    ----------
    out, expected : torch.Tensor
        Any shape and dtype; expected on any device.
    what : str
        The name of the result in the error message.

    Raises
    ------
    AssertionError
        With the number of differing elements and the first of them.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.testing.compare import assert_bitwise
    >>> assert_bitwise(torch.tensor([0.0]), torch.tensor([-0.0]))
    Traceback (most recent call last):
    AssertionError: out: 1 of 1 elements differ in bits; first at (0,): 0.0, expected -0.0
    """
    _assert_alike(out, expected, what)
    expected = expected.to(out.device)
    if out.numel() == 0:
        return
    itemsize = out.element_size()
    bits = [x.contiguous().view(-1).view(torch.uint8).view(-1, itemsize) for x in (out, expected)]
    differs = (bits[0] != bits[1]).any(1)
    count = int(differs.sum())
    if count:
        first = _index(int(differs.int().argmax()), out.shape)
        raise AssertionError(
            f"{what}: {count} of {out.numel()} elements differ in bits; first at {first}: "
            f"{out[first].item()!r}, expected {expected[first].item()!r}"
        )


def _assert_alike(out, other, what):
    if out.shape != other.shape:
        raise AssertionError(f"{what}: shape {tuple(out.shape)}, expected {tuple(other.shape)}")
    if out.dtype != other.dtype:
        raise AssertionError(f"{what}: dtype {out.dtype}, expected {other.dtype}")


def _assert_same_specials(result, expected, what):
    for name, has in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        differs = has(result) != has(expected)
        if differs.any():
            first = _index(int(differs.flatten().int().argmax()), result.shape)
            raise AssertionError(
                f"{what}: {name} at other places than the truth, {int(differs.sum())} of {result.numel()}; "
                f"first at {first}: {result[first].item()!r}, the truth has {expected[first].item()!r}"
            )


def _assert_peer(allowed, size, finfo, through, what):
    limit, tiny = max(_PEER, finfo.eps / 2, through / 2), finfo.smallest_normal * finfo.eps * size.numel() ** 0.5
    if allowed.norm() > limit * size.norm() + tiny:
        share = float(allowed.norm() / size.norm())
        raise AssertionError(f"{what}: the same-dtype computation errs by {share:.2g} of the norm: no bound")


def _ulps(finfo):
    return _ULPS * min(finfo.eps, torch.finfo(torch.float32).eps)


def _assert_largest(error, allowed, size, values, finfo, terms, what):
    bound = torch.maximum(2 * allowed.max(), _ulps(finfo) * size.max().clamp(min=terms)) + size * finfo.eps
    bound = bound + finfo.smallest_normal * finfo.eps
    if (error > bound).any():
        worst = _index(int((error - bound).argmax()), error.shape)
        _fail(what, "error of one element", error[worst], bound[worst], worst, values)


def _assert_rows(error, allowed, size, values, finfo, terms, what):
    width = error.shape[-1] if error.dim() and error.shape[-1] >= _ROW else error.numel()
    norm = [x.reshape(-1, width).norm(dim=1) for x in (error, allowed, size)]
    nonzero = norm[2] > 0
    worst_peer = (norm[1][nonzero] / norm[2][nonzero]).max() if nonzero.any() else 0.0
    tiny = (finfo.smallest_normal * finfo.eps + _ulps(finfo) * terms) * width**0.5
    bound = (2 * worst_peer + _ulps(finfo) + min(finfo.eps, _PEER)) * norm[2] + tiny
    if (norm[0] > bound).any():
        row = int((norm[0] / bound).argmax())
        worst = row * width + int(error.reshape(-1, width)[row].argmax())
        _fail(what, f"error norm of row {row}", norm[0][row], bound[row], _index(worst, error.shape), values)


def _fail(what, rule, error, bound, index, values):
    result, peer, truth = (x[index].item() for x in values)
    raise AssertionError(
        f"{what}: {rule} is {float(error):.4g}, allowed {float(bound):.4g}; worst element {index}: "
        f"{result:.9g}, same dtype {peer:.9g}, truth {truth:.9g}"
    )


def _index(flat, shape):
    index = []
    for n in reversed(shape):
        index.append(flat % n)
        flat //= n
    return tuple(reversed(index))
