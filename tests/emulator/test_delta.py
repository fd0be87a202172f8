"""The scan of gated delta rules on Hopper in the emulator, against the recurrence in float64."""

import math
from contextlib import nullcontext

import pytest
import torch

from flashinfer._core.target import named
from flashinfer.ops.recurrent.delta import CHUNK, Chunks, config, sm90
from flashinfer.ops.recurrent.delta.chunks import Workspace
from flashinfer.ops.recurrent.delta.operands import Marks, Pool, Tokens
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from flashinfer.testing.emulator import emulate
from flashinfer.testing.emulator.memory import TensorMap
from tests.emulator.test_faults import undetected
from tests.ops.recurrent.oracle import recurrence
from tests.pairs import pairs

NAN = float("nan")
DIM = 128


def rounded(x):
    return x.bfloat16().double()


class Case:
    """Sequences packed, or rows of one length; what lies around them, and what the workspace does not hold, is NaN."""

    def __init__(self, lengths, heads=(1, 1, 2), values=64, channels=False, packed=True, decays=(0.6, 1), betas=(0, 1)):
        self.channels, self.packed, self.lengths = channels, packed, lengths
        self.heads_first = False
        hq, hk, hv = heads
        self.heads, self.scale = max(heads), 0.1
        around = 7 if packed else 0
        rows, tokens = (1, sum(lengths) + 2 * around) if packed else (len(lengths), lengths[0])
        starts = [around + sum(lengths[:i]) for i in range(len(lengths) + 1)]
        self.spans = [(0, slice(a, b)) for a, b in zip(starts, starts[1:])]
        if not packed:
            self.spans = [(i, slice(0, tokens)) for i in range(rows)]
        self.offsets = torch.tensor(starts, dtype=torch.int32) if packed else None
        self.q, self.k = (torch.full((rows, tokens, n, DIM), NAN, dtype=torch.bfloat16) for n in (hq, hk))
        self.v = torch.full((rows, tokens, hv, values), NAN, dtype=torch.bfloat16)
        shape = (rows, tokens, self.heads, DIM) if channels else (rows, tokens, self.heads)
        low, high = decays
        self.decay = low + (high - low) * torch.rand(shape, dtype=torch.float64)
        self.beta = betas[0] + (betas[1] - betas[0]) * torch.rand(shape[:3], dtype=torch.float64)
        for row, span in self.spans:
            for x in (self.q, self.k, self.v):
                x[row, span] = generate.randn(*x[row, span].shape, dtype=x.dtype)
        self.states = generate.randn(len(lengths), self.heads, values, DIM)

    def of(self, i):
        row, span = self.spans[i]
        return [x[row, span] for x in (self.q, self.k, self.v, self.decay, self.beta)]

    def truth(self, i, state):
        return recurrence(*self.of(i), state, self.scale, True)

    def systems(self, i):
        """Of each chunk of a sequence: A, P, and factors or decays and rows, float64 before they are rounded."""
        q, k, _, decay, beta = (x.double() for x in self.of(i))
        q, k = (x.repeat_interleave(self.heads // x.shape[1], 1).transpose(0, 1) for x in (q, k))
        logs = decay.clamp(min=math.exp(-64)).log().transpose(0, 1)
        logs, beta = logs if self.channels else logs[..., None], beta.T
        k_norm, q_norm = ((x * x).sum(-1, keepdim=True).add(1e-6).rsqrt() for x in (k, q))
        for begin in range(0, self.lengths[i], CHUNK):
            part = slice(begin, begin + CHUNK)
            g = logs[:, part].cumsum(1)
            keys, queries = k[:, part] * k_norm[:, part], q[:, part] * q_norm[:, part] * self.scale
            gap = (g[:, :, None] - g[:, None]).clamp(max=0).exp()
            lower = ((keys[:, :, None] * keys[:, None] * gap).sum(-1) * beta[:, part, None]).tril(-1)
            solved = torch.linalg.inv(torch.eye(g.shape[1], dtype=g.dtype) + lower) * beta[:, None, part]
            scores = (queries[:, :, None] * keys[:, None] * gap).sum(-1).tril()
            since, until = g.exp(), (g[:, -1:] - g).exp()
            if self.channels:
                yield solved, scores, since[:, -1], keys * since, queries * since, keys * until
            else:
                factors = since * k_norm[:, part], since * q_norm[:, part] * self.scale, until * k_norm[:, part]
                yield solved, scores, torch.cat([*factors, since[:, -1:].expand_as(since)], -1).mT

    def workspace(self):
        rows, length = self.q.shape[:2]
        chunks = -(-length // CHUNK)
        places = length // CHUNK + len(self.lengths) if self.packed else rows * chunks
        lead, narrow = (places, self.heads), {"dtype": torch.bfloat16}
        tensors = [torch.full((*lead, CHUNK, CHUNK), NAN, **narrow) for _ in range(2)]
        tensors.append(torch.full((*lead, *((DIM,) if self.channels else (4, CHUNK))), NAN))
        tensors += [torch.full((*lead, CHUNK, DIM), NAN, **narrow) for _ in range(3 * self.channels)]
        for i, (row, span) in enumerate(self.spans):
            place = span.start // CHUNK + i if self.packed else row * chunks
            for at, parts in enumerate(self.systems(i)):
                for x, part in zip(tensors, parts):
                    x[place + at] = 0
                    x[place + at][tuple(map(slice, part.shape))] = part.to(x.dtype)
                if not self.channels:
                    tensors[2][place + at, :, 3] = parts[2][:, 3, :1].float()
        return tensors, chunks

    def peer(self, i, state):
        """The chunks in float64 with the roundings that operands of products have."""
        q, k, v = (x.repeat_interleave(self.heads // x.shape[1], 1).transpose(0, 1).double() for x in self.of(i)[:3])
        s, outputs = state.double(), []
        for begin, parts in zip(range(0, self.lengths[i], CHUNK), self.systems(i)):
            part = slice(begin, begin + CHUNK)
            solved, scores = map(rounded, parts[:2])
            if self.channels:
                before, queries, until = map(rounded, parts[3:])
                decay, k_factor, q_factor, last = parts[2][:, None], 1, 1, 1
            else:
                before, queries, until = k[:, part], q[:, part], k[:, part]
                k_factor, q_factor, last, decay = (x[:, None] for x in parts[2].unbind(1))
                decay = decay[..., :1]
            x = v[:, part].mT - rounded(s) @ before.mT * k_factor
            c = rounded(x) @ solved.mT
            outputs.append(rounded(s) @ queries.mT * q_factor + rounded(c) @ scores.mT)
            s = s * decay + rounded(c * last) @ until
        return torch.cat(outputs, -1).permute(2, 0, 1) if outputs else self.truth(i, state)[0], s

    def problem(self, **more):
        known = {"source_dtype": "fp32", "state_dtype": "fp32"} | more
        gate = "log" if self.channels else "linear"
        return Chunks(DIM, self.v.shape[3], "bf16", "bf16", gate=gate, channels=self.channels, gate_dtype="fp32",
                      beta="value", beta_dtype="fp32", packed=self.packed, normalize=True, **known)  # fmt: skip

    def scan(self, pool, marks=None, seed=0, **more):
        """Runs the second kernel alone; returns the outputs, whose rows have canaries behind them. No seed: as it is
        emulated already."""
        shape = (*self.q.shape[:2], self.heads, self.v.shape[3])
        canvas = torch.full((*shape[:3], shape[3] + 8), NAN, dtype=torch.bfloat16)
        if self.heads_first:
            canvas = canvas.transpose(1, 2).contiguous().transpose(1, 2)
        out = canvas[..., : shape[3]]
        problem, target = self.problem(**more), named("90a")
        assert config.refuses_chunks_sm90(problem, target) == ""
        tokens = Tokens(self.q, self.k, self.v, self.decay, self.beta, self.offsets)
        work = Workspace(*self.workspace())
        with emulate("90a", seed=seed) if seed is not None else nullcontext(["scan_sm90_kernel"]) as launched:
            sm90.scan(problem, config.chunks_sm90(problem, target), tokens, work, pool, out, marks)
        assert launched == ["scan_sm90_kernel"]
        assert canvas[..., shape[3] :].isnan().all()
        return out

    def check(self, seed=0):
        """In place in a pool whose slots are in another order, one sequence without a state."""
        n, poison = len(self.lengths), 1
        slots = torch.arange(n, dtype=torch.int32).flip(0) + 1
        slots[poison] = -1
        pool = torch.full((n + 2, *self.states.shape[1:]), NAN)
        pool[1 : n + 1] = self.states
        before = pool.clone()
        out = self.scan(Pool(source=pool, state=pool, read=slots), seed=seed, read=True)
        assert not out[:, : self.spans[0][1].start].any()
        assert not self.packed or not out[:, self.spans[-1][1].stop :].any()
        for i, (row, span) in enumerate(self.spans):
            if i == poison:
                assert not out[row, span].any()
                continue
            state = before[slots[i]]
            expected, states, _ = self.truth(i, state)
            peer, last = self.peer(i, state)
            after = states[-1] if self.lengths[i] else state.double()
            assert_close(out[row, span], peer.to(out.dtype), expected, f"outputs of {i}")
            assert_close(pool[slots[i]], last.float(), after, f"state of {i}")
            before[slots[i]] = pool[slots[i]]
        assert_bitwise(pool, before)


def test_scan_quickly():
    Case([70, 5, 64]).check(1)


@pytest.mark.parametrize("channels", [False, True])
def test_bits_depend_on_nothing_else(channels):
    """Neither on the rest of the batch, nor on where a prompt is cut at a multiple of 64."""
    case = Case([30, 140], channels=channels, heads=(1, 1, 1))
    final = torch.full_like(case.states, NAN)
    out = case.scan(Pool(source=case.states, state=final))
    alone = Case([64, 76], channels=channels, heads=(1, 1, 1))
    parts = []
    state = case.states[1:]
    for span in (slice(0, 64), slice(64, 140)):
        alone = Case([span.stop - span.start], channels=channels, heads=(1, 1, 1), packed=False)
        alone.q, alone.k, alone.v, alone.decay, alone.beta = (x[span][None] for x in case.of(1))
        after = torch.full_like(state, NAN)
        parts.append(alone.scan(Pool(source=state, state=after))[0])
        state = after
    assert_bitwise(torch.cat(parts), out[0, case.spans[1][1]].contiguous())
    assert_bitwise(state[0], final[1])


@pytest.mark.parametrize("channels", [False, True])
def test_copies_of_outputs_stay_in_their_sequence(monkeypatch, channels):
    """Whole chunks but the last of a sequence leave by the copy engine, whatever order heads and tokens have."""
    copied, write = [], TensorMap.write

    def spy(self, coordinates, values):
        copied.append(tuple(coordinates))
        write(self, coordinates, values)

    monkeypatch.setattr(TensorMap, "write", spy)
    case = Case([64, 9, 128, 65, 63, 0, 192, 130], (1, 1, 2), 128, channels)
    case.heads_first = True
    case.check(2)
    expected = {(0, head, span.start + begin, value)
                for i, (_, span) in enumerate(case.spans) if i != 1 for head in range(2) for value in (0, 64)
                for begin in range(0, case.lengths[i] - CHUNK, CHUNK)}  # fmt: skip
    assert len(copied) == len(expected) and set(copied) == expected


def test_two_warpgroups_over_one_ring(monkeypatch):
    """Each has the bits of a program of its own."""
    case = Case([64, 9, 0, 200], (1, 1, 2), 128, True)
    results = []
    for paired in (False, True):
        monkeypatch.setattr(sm90, "fitting", lambda p, c, *_, paired=paired: config.paired_scan(p, c) if paired else c)
        final = torch.full_like(case.states, NAN)
        results.append((case.scan(Pool(source=case.states, state=final), seed=3), final))
    case.check(4)
    for alone, together in zip(*results, strict=True):
        assert_bitwise(together, alone)


@pytest.mark.parametrize("first", [False, True])
def test_states_on_the_way(first):
    case = Case([200, 64, 30], heads=(1, 1, 1))
    counts = [-(-n // CHUNK) if first else n // CHUNK for n in case.lengths]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    kept = torch.full((sum(counts) + 1, *case.states.shape[1:]), NAN)
    case.scan(Pool(source=case.states), Marks(kept, starts, CHUNK, first), state_dtype="", marks_dtype="fp32",
              first_mark=first)  # fmt: skip
    for i, count in enumerate(counts):
        states = [case.states[i].double(), *case.truth(i, case.states[i])[1][CHUNK - 1 :: CHUNK]]
        for j in range(count):
            truth = states[j if first else j + 1]
            error = (kept[starts[i] + j].double() - truth).norm() / truth.norm()
            assert error < 0.01, (i, j, error)
    assert kept[-1].isnan().all()


@pytest.mark.matrix
@pytest.mark.parametrize("seed, channels, heads", pairs(
    range(3), [False, True], [(2, 1, 2), (1, 2, 2), (2, 2, 1)]
), ids=str)  # fmt: skip
def test_scan(seed, channels, heads):
    Case([1, 3, 64, 0, 131, 192], heads, 128, channels).check(seed)


@pytest.mark.matrix
@pytest.mark.parametrize("channels", [False, True])
def test_rows(channels):
    Case([150, 150], channels=channels, packed=False).check()


@pytest.mark.matrix
@pytest.mark.parametrize(("decay", "beta"), [(0.0, 1.0), (1.0, 1.0), (1.0, 0.0), (0.5, 0.0)])
def test_extremes(decay, beta):
    Case([130, 2], decays=(decay, decay), betas=(beta, beta)).check()


@pytest.mark.matrix
def test_a_request_of_nan_stays_alone():
    case = Case([70, 9, 100], heads=(1, 1, 1))
    states = case.states.clone()
    clean = case.scan(Pool(source=states, state=torch.empty_like(states)))
    case.v[0, case.spans[1][1]] = NAN
    final = torch.full_like(states, 7.0)
    out = case.scan(Pool(source=states, state=final))
    for i in (0, 2):
        assert_bitwise(out[0, case.spans[i][1]].contiguous(), clean[0, case.spans[i][1]].contiguous())
        assert not final[i].isnan().any()
    assert out[0, case.spans[1][1]].isnan().all()


@pytest.mark.matrix
@pytest.mark.parametrize("channels", [False, True])
def test_faults_are_found(channels):
    case = Case([330, 9], (1, 1, 1), channels=channels)
    found, count = undetected(lambda: case.check(None), 4)
    # Of O another wait stands before each use; ptxas wants one on either side of a product's start.
    assert count >= 19 and len(found) <= 5, "\n".join(map(str, found))
    assert {operation for _, operation, _ in found} <= {"product wait"}
