"""Sampling in torch: sort, add up, and let the kept columns race."""

import math

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops.sampling import Chain, Draw, Prefix, Softmax

# A row's largest probability is at most 2^41 units; see flashinfer/ops/_device/prefix.py.
_UNITS = 40


def _softmax(problem, logits, temperature, out):
    logits = logits.float()
    if temperature is not None:
        scale = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).reshape(-1, 1)
        # Upstream multiplies by 0 where the temperature is 0.
        scale = scale.where(scale != 0, math.inf).where(scale >= 0, math.nan)
        below = (logits - logits.amax(-1, keepdim=True)) / scale
        # Also at a temperature of infinity.
        logits = below.where((logits != -math.inf) | scale.isnan(), -math.inf)
    torch.softmax(logits, -1, out=out)


def _draw(problem, x, min_p, randomness, indices, samples, valid):
    values, weights = _weights(problem, x, indices)
    kept = torch.ones_like(weights, dtype=torch.bool)
    possible = _is_distribution(values, weights)
    if min_p is not None:
        share = torch.as_tensor(min_p, dtype=torch.float32, device=x.device).reshape(-1, 1)
        kept = weights >= share * weights.amax(-1, keepdim=True)
        possible &= ((share >= 0) & (share <= 1)).expand(len(weights), 1).squeeze(1)
    _race(problem, values, weights, kept & possible[:, None], randomness, samples, valid)


def _prefix(problem, x, k, p, randomness, indices, out, valid):
    values, weights = _weights(problem, x, indices)
    kept = keep_prefix(problem, values, weights, k, p)
    if problem.use == "draw":
        _race(problem, values, weights, kept, randomness, out, valid)
    elif problem.use == "mask":
        out.copy_(x.where(kept, -math.inf))
    else:
        total = (weights.double() * kept).sum(-1, keepdim=True)
        shares = torch.where(kept, weights / total.float(), 0)
        out.copy_(shares.where(~_is_broken(values)[:, None], math.nan))


def _chain(problem, draft, ids, target, randomness, tokens, accepted, emitted):
    batch, count, columns = draft.shape
    draft, target, ids = draft.float().clamp(min=0), target.float().clamp(min=0), ids.long()
    row, at = torch.arange(batch, device=ids.device), torch.arange(count, device=ids.device)
    known = (ids >= 0) & (ids < columns)
    place = ids.where(known, 0)[..., None]
    p, q = (x.gather(2, place).squeeze(2) for x in (draft, target[:, :count]))
    numbers = _uniform(_words(randomness, row[:, None].expand(-1, count).flatten(), at.repeat(batch) + (1 << 30))[0])
    agreed = (numbers.view(batch, count) * p < q) & known
    stop = agreed.int().cumprod(1).sum(1)
    accepted += agreed.sum(1).to(accepted.dtype)
    emitted += stop.to(emitted.dtype)
    aim = target[row, stop]
    unmet = aim if not count else torch.where(
        (stop < count)[:, None], (aim - draft[row, stop.clamp(max=count - 1)]).clamp(min=0), aim
    )  # fmt: skip
    # Where draft and target differ by rounding alone, no probability may be left; the target is drawn from then.
    weights = torch.where((unmet > 0).any(1, keepdim=True), unmet, aim)
    last, valid = torch.empty_like(stop), torch.empty_like(stop, dtype=torch.bool)
    finite = _is_distribution(aim, aim)[:, None]
    probs = Draw("probs", problem.dtype)
    _race(probs, weights, weights, (weights > 0) & finite, randomness, last, valid)
    steps = torch.arange(count + 1, device=ids.device)
    tokens.fill_(-1)
    tokens[:, :count] = ids.masked_fill(at >= stop[:, None], -1).to(tokens.dtype)
    tokens.copy_(torch.where(steps == stop[:, None], last.where(valid, -1)[:, None].to(tokens.dtype), tokens))


def keep_prefix(problem, values, weights, k, p):
    """Which columns the filters keep, bool [rows, columns]."""
    rows, columns = values.shape
    values = values.where(values != 0, 0)
    ranked, order = values.sort(dim=-1, descending=True, stable=True)
    # The rank of each value's first equal: of equal values all are kept, or none. NaN is equal to NaN.
    rank = torch.arange(columns, device=values.device).expand(rows, -1)
    new = (ranked[:, 1:] != ranked[:, :-1]) & ~(ranked[:, 1:].isnan() & ranked[:, :-1].isnan())
    rank = torch.nn.functional.pad(rank[:, 1:] * new, (1, 0)).cummax(-1).values
    possible = torch.ones(rows, 1, dtype=torch.bool, device=values.device)
    if problem.source != "scores":
        possible = _is_distribution(values, weights)[:, None]
    kept = possible.expand(rows, columns)
    if k is not None:
        k = torch.as_tensor(k, device=values.device).reshape(-1, 1)
        kept = kept & (rank < k)
    if p is not None:
        p = torch.as_tensor(p, dtype=torch.float32, device=values.device).reshape(-1, 1)
        units = _units(problem, weights)
        mass = (weights * units).nan_to_num(0, posinf=0).to(torch.int64).gather(1, order)
        share, whole = p.double(), weights.double().sum(-1, keepdim=True).float()
        goal = share * units if problem.source == "probs" else share * units * whole
        if problem.top_k_first:
            first = (mass * kept).sum(-1, keepdim=True)
            goal = torch.where(k >= columns, share * units * whole, share * first)
        goal = goal.nan_to_num(0).clamp(1, 2.0**62).to(torch.int64)
        before = (mass.cumsum(-1) - mass).gather(1, rank)
        kept = kept & ((before < goal) | (p >= 1)) & (p > 0)
    return torch.zeros_like(kept).scatter(1, order, kept)


def _weights(problem, x, indices):
    """The values as float32, one row for each of the output, and what they weigh."""
    values = (x if indices is None else x[indices.long()]).float()
    if problem.source == "logits":
        return values, (values - values.amax(-1, keepdim=True)).exp()
    return values, values.clamp(min=0)


def _is_distribution(values, weights):
    """Rows without NaN and inf that weigh something."""
    return ~_is_broken(values) & (weights.nan_to_num(0) > 0).any(-1)


def _is_broken(values):
    """Rows with NaN or inf; -inf is a negative probability, or a logit that is never drawn."""
    return (values.isnan() | values.isposinf()).any(-1)


def _units(problem, weights):
    """Units of a weight of one, as float64: a power of two."""
    if problem.source == "logits":
        return torch.full_like(weights[:, :1], 2.0**_UNITS, dtype=torch.float64)
    _, exponent = weights.amax(-1, keepdim=True).frexp()
    return torch.ldexp(torch.ones_like(weights[:, :1], dtype=torch.float64), _UNITS + 1 - exponent.clamp(min=-126))


def _race(problem, values, weights, kept, randomness, samples, valid):
    """The kept column with the largest weight / variate is drawn in proportion to its weight (exponential race)."""
    kept = kept & (weights > 0)
    row, column = kept.nonzero(as_tuple=True)
    variate = exponentials(randomness, row, column)
    if problem.source == "logits":
        score, lowest = values[row, column] - variate.log(), -math.inf
    else:
        score, lowest = weights[row, column] / variate, 0.0
    scores = torch.full_like(weights, lowest)
    scores[row, column] = score
    alive = kept.any(-1)
    samples.copy_(scores.argmax(-1).where(alive, 0) if scores.shape[1] else 0)
    valid.copy_(alive)


def exponentials(randomness, row, column):
    """Exponential variates of the given elements; the same numbers as flashinfer/ops/_device/philox.py makes."""
    words = torch.stack(_words(randomness, row, column // 4))
    u = _uniform(words.gather(0, (column % 4)[None]).squeeze(0))
    series = u * (1 + u * (0.5 + u * (1 / 3 + u * (0.25 + u * (0.2 + u / 6)))))
    return torch.where(u < 0.0625, series, -(1 - u).log())


def _uniform(word):
    return (word.float() * 2.0**-32 + 2.0**-33).clamp(max=1 - 2.0**-24)


def _words(randomness, row, group):
    """Philox's four words for groups of columns of rows."""
    seed, seeds, offset, offsets = randomness
    own = seeds is not None and len(seeds) > 1
    if seeds is not None:
        seed = seeds[row if own else 0]
    if offsets is not None:
        offset = offsets[row if len(offsets) > 1 else 0]
    seed, offset = (torch.as_tensor(x, dtype=torch.int64, device=row.device) for x in (seed, offset))
    return philox(seed, (group, torch.zeros_like(row) if own else row, offset & _LOW, offset >> 32 & _LOW))


_LOW = 0xFFFFFFFF


def philox(key, counter):
    """Four words, as int64, of Philox 4x32-10 (Salmon et al., SC 2011): an int64 key and four counters below 2^32."""
    a, b, c, d = counter
    key_low, key_high = key & _LOW, key >> 32 & _LOW
    for _ in range(10):
        # Products of 64 bits wrap around in int64, bits intact.
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (
            second >> 32 & _LOW ^ b ^ key_low,
            second & _LOW,
            first >> 32 & _LOW ^ d ^ key_high,
            first & _LOW,
        )
        key_low, key_high = key_low + 0x9E3779B9 & _LOW, key_high + 0xBB67AE85 & _LOW
    return torch.broadcast_tensors(a, b, c, d)


# One module for four ops: they share weights, random numbers and the race.
IMPLEMENTATION = Implementation({Softmax: _softmax, Draw: _draw, Prefix: _prefix, Chain: _chain})
