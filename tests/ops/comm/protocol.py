"""The protocol of `flashinfer/ops/comm/_device/exchange.py` as a model that runs on random schedules.

    python -m tests.ops.comm.protocol --schedules 1000000 --seed 0

A schedule is a seed. Ranks have programs (channels), which store rows to peers, store flags, wait for flags and read. A
store arrives when the schedule says, in any order, but a flag after all rows that its program stored before. Ranks are
late, stop, or end with what they had under way; links lose everything from some moment on; calls have any number of
programs, one shot or two, or are dispatches and combines; sizes differ; hosts see a failure at once or calls later;
resets stand between. What has to hold: every program ends, and what a call wrote is the sum of that call's rows of all
ranks, or NaN.

`Rules` can be broken one by one, which shows that the model finds what each is for.
"""

import argparse
import random
import sys
import time
from dataclasses import dataclass, replace

NAN = "nan"
# Events that a wait may take, and those in which everything has to end.
LIMIT, MOST_EVENTS = 400, 40_000
RESET = 3


@dataclass(frozen=True)
class Rules:
    """alternate : slots do, by the epoch. release : a flag arrives after the rows before it. silent : nothing is sent
    after a failure. deadline : a wait ends. sized : flags carry the sizes of a call. wait_combine : a combine waits."""

    alternate: bool = True
    release: bool = True
    silent: bool = True
    deadline: bool = True
    sized: bool = True
    wait_combine: bool = True


class Wrong(AssertionError):
    pass


class Rank:
    def __init__(self, channels):
        self.epoch, self.flags, self.slots, self.area = [0] * channels, {}, {}, {}
        self.lost, self.state, self.paused_until = False, "alive", 0
        self.call, self.active, self.host = 0, [], None


class Model:
    """One schedule."""

    def __init__(self, seed, rules):
        self.random, self.rules = random.Random(seed), rules
        draw = self.random
        self.world, self.channels = draw.choice((2, 2, 3, 4)), draw.choice((1, 2))
        self.ranks = [Rank(self.channels) for _ in range(self.world)]
        # What each program has stored and has not arrived: [is a flag, to, key, value].
        self.under_way = {}
        self.dead_links, self.clock, self.written = set(), 0, {}
        self.barriers, self.failures, self.done = {}, 0, 0
        exchange = draw.random() < 0.3
        calls = draw.randint(2, 6)
        self.plan = [self._call(draw, exchange) for _ in range(calls)]
        if exchange:
            programs = draw.randint(1, self.channels)
            self.plan = [(kind, programs) for _ in range((calls + 1) // 2) for kind in ("dispatch", "combine")]
        self.misfit = None
        if draw.random() < 0.1:
            self.misfit = draw.randrange(self.world), draw.randrange(len(self.plan))
        if draw.random() < 0.5:
            self.plan.insert(draw.randint(1, len(self.plan)) // 2 * 2 if exchange else draw.randint(1, len(self.plan)),
                             ("reset", 0))  # fmt: skip
        self.faults = sorted(
            (draw.randrange(400), draw.choice(("late", "stop", "end", "link")), draw.randrange(self.world))
            for _ in range(draw.choice((0, 0, 1, 1, 2)))
        )
        for rank in range(self.world):
            self.ranks[rank].host = self._host(rank)

    def _call(self, draw, exchange):
        return draw.choice(("one shot", "one shot", "two shots")), draw.randint(1, self.channels)

    # What programs do.

    def store(self, program, flag, to, where, key, value):
        self.under_way.setdefault(program, []).append([flag, to, where, key, value])

    def _stores_row(self, program, to, where, key, value):
        self.store(program, False, to, where, key, value)

    def _slot(self, epoch, channel, source):
        return (epoch & 1 if self.rules.alternate else 0), channel, source

    def _arrive(self, program, rank, channel, epoch, sizes):
        for to in range(self.world):
            self.store(program, True, to, "flags", (channel, rank), (epoch, sizes))

    def _wait(self, rank, channel, epoch, sizes):
        """True when all have arrived, False at the deadline or with other sizes."""
        me, start = self.ranks[rank], self.clock
        while True:
            worst = True
            for source in range(self.world):
                seen, theirs = me.flags.get((channel, source), (0, 0))
                if seen == epoch and theirs != sizes and self.rules.sized:
                    return False
                worst = worst and seen >= epoch
            if worst:
                return True
            if self.rules.deadline and self.clock - start >= LIMIT:
                return False
            yield

    def _give_up(self, rank):
        self.ranks[rank].lost = True
        self.failures += 1
        return NAN

    def _one_shot(self, program, rank, channel, call, sizes):
        me = self.ranks[rank]
        before, failed = me.epoch[channel], me.lost
        epoch = before + 1
        if not failed or not self.rules.silent:
            for to in range(self.world):
                self._stores_row(program, to, "slots", self._slot(epoch, channel, rank), (rank, call))
            yield
            self._arrive(program, rank, channel, epoch, sizes)
            yield
        if failed:
            return NAN
        if not (yield from self._wait(rank, channel, epoch, sizes)):
            return self._give_up(rank)
        rows = []
        for source in range(self.world):
            rows.append(me.slots.get(self._slot(epoch, channel, source)))
            yield
        me.epoch[channel] = epoch
        return rows

    def _two_shots(self, program, rank, channel, call, sizes):
        me = self.ranks[rank]
        before, failed = me.epoch[channel], me.lost
        epoch = before + 1
        if not failed or not self.rules.silent:
            for to in range(self.world):
                self._stores_row(program, to, "slots", self._slot(epoch, channel, rank), (rank, call))
            yield
            self._arrive(program, rank, channel, epoch, sizes)
            yield
        if failed:
            return NAN
        if not (yield from self._wait(rank, channel, epoch, sizes)):
            return self._give_up(rank)
        mine = []
        for source in range(self.world):
            mine.append(me.slots.get(self._slot(epoch, channel, source)))
            yield
        epoch += 1
        for to in range(self.world):
            self._stores_row(program, to, "slots", self._slot(epoch, channel, rank), tuple(mine))
        yield
        self._arrive(program, rank, channel, epoch, sizes)
        if not (yield from self._wait(rank, channel, epoch, sizes)):
            return self._give_up(rank)
        rows = set()
        for source in range(self.world):
            rows.add(me.slots.get(self._slot(epoch, channel, source)))
            yield
        me.epoch[channel] = epoch
        return list(rows.pop()) if len(rows) == 1 else [f"other rows than another rank: {rows}"]

    def _dispatch(self, program, rank, channel, call, sizes):
        me = self.ranks[rank]
        epoch, failed = me.epoch[channel] + 1, me.lost
        if not failed or not self.rules.silent:
            for to in range(self.world):
                self._stores_row(program, to, "area", ("row", channel, rank), (rank, call))
            yield
            self._arrive(program, rank, channel, epoch, sizes)
            yield
        if failed:
            return NAN
        if not (yield from self._wait(rank, channel, epoch, sizes)):
            return self._give_up(rank)
        me.epoch[channel] = epoch
        return None

    def _combine(self, program, rank, channel, call, sizes):
        me = self.ranks[rank]
        epoch, failed = me.epoch[channel] + 1, me.lost
        if not failed or not self.rules.silent:
            self._arrive(program, rank, channel, epoch, sizes)
            yield
        if failed:
            return NAN
        if self.rules.wait_combine and not (yield from self._wait(rank, channel, epoch, sizes)):
            return self._give_up(rank)
        rows = []
        for source in range(self.world):
            rows.append(self.ranks[source].area.get(("made", channel, rank)))
            yield
        me.epoch[channel] = epoch
        return rows

    # What hosts do: calls of one stream, one after another.

    def _host(self, rank):
        me, draw = self.ranks[rank], self.random
        sees = draw.random() < 0.5
        number = 0
        for index, (kind, programs) in enumerate(self.plan):
            if kind == "reset":
                if not (yield from self._reset(rank, index)):
                    return
                continue
            # A host that has seen a failure makes no call until the reset.
            if sees and me.lost:
                continue
            sizes = 1 + (self.misfit == (rank, index))
            run = {
                "one shot": self._one_shot, "two shots": self._two_shots, "dispatch": self._dispatch,
                "combine": self._combine,
            }[kind]  # fmt: skip
            me.active = []
            for channel in range(programs):
                program = rank, number, channel
                # Rows of other sizes are those of no call.
                call = index if sizes == 1 else -1 - index
                me.active.append([program, run(program, rank, channel, call, sizes)])
            number += 1
            while me.active:
                yield
            if kind == "dispatch" and not me.lost:
                yield from self._experts(rank, index, programs)

    def _experts(self, rank, index, programs):
        """Between a dispatch and its combine: rows that came are read, and what is made of them is written."""
        me = self.ranks[rank]
        for channel in range(programs):
            for source in range(self.world):
                row = me.area.get(("row", channel, source))
                yield
                if row != (source, index):
                    raise Wrong(f"rank {rank} got {row} of rank {source}, and not call {index}'s")
                me.area["made", channel, source] = (rank, index + 1)

    def _reset(self, rank, index):
        """Wait for the device, for all, forget, wait for all. False if a rank did not come."""
        while any(program[0] == rank for program in self.under_way):
            yield
        for half in (0, 1):
            came = self.barriers.setdefault((index, half), set())
            came.add(rank)
            start = self.clock
            while len(came) < self.world:
                if self.clock - start >= RESET * LIMIT:
                    self.failures += 1
                    return False
                yield
            if half == 0:
                me = self.ranks[rank]
                me.flags, me.lost, me.epoch = {}, False, [0] * self.channels
        return True

    # The schedule.

    def run(self):
        """The number of failures that ranks saw; Wrong if one of them saw a wrong sum, or something hangs."""
        draw = self.random
        while True:
            self.clock += 1
            if self.clock > MOST_EVENTS:
                raise Wrong("a rank hangs")
            while self.faults and self.faults[0][0] <= self.clock:
                self._fault(*self.faults.pop(0)[1:])
            runnable = [r for r, rank in enumerate(self.ranks) if rank.host is not None and rank.state == "alive"]
            if not runnable:
                return self.failures
            if self.under_way and draw.random() < 0.5:
                self._deliver()
                continue
            rank = draw.choice(runnable)
            me = self.ranks[rank]
            if me.paused_until > self.clock:
                continue
            if me.active:
                self._step(rank, draw.choice(me.active))
            elif next(me.host, "end") == "end":
                me.host = None

    def _step(self, rank, entry):
        program, steps = entry
        try:
            next(steps)
        except StopIteration as end:
            self.ranks[rank].active.remove(entry)
            self._check(rank, program, end.value)

    def _check(self, rank, program, value):
        self.done += 1
        if value is None or value == NAN:
            return
        calls = {row[1] if isinstance(row, tuple) else row for row in value}
        sources = [row[0] for row in value if isinstance(row, tuple)]
        if len(calls) != 1 or sources != list(range(self.world)):
            raise Wrong(f"rank {rank}, program {program}: added {value}")
        # The call that this program is of: hosts skip calls after a failure, so ranks agree by the rows' own call.
        own = next(row[1] for row in value if row[0] == rank)
        if calls != {own}:
            raise Wrong(f"rank {rank} in call {own} added {value}")

    def _fault(self, kind, rank):
        me = self.ranks[rank]
        if kind == "late":
            me.paused_until = self.clock + self.random.choice((LIMIT // 2, 2 * LIMIT))
        elif kind == "link":
            self.dead_links.add((rank, self.random.randrange(self.world)))
        else:
            me.state = kind
            if kind == "end":
                for program in [p for p in self.under_way if p[0] == rank]:
                    del self.under_way[program]

    def _deliver(self):
        program = self.random.choice(list(self.under_way))
        stores = self.under_way[program]
        first_row = next((i for i, store in enumerate(stores) if not store[0]), len(stores))
        # A row goes at any time, a flag when no row stands before it.
        able = [i for i, store in enumerate(stores) if not store[0] or i < first_row or not self.rules.release]
        _, to, where, key, value = stores.pop(self.random.choice(able))
        if not stores:
            del self.under_way[program]
        if (program[0], to) not in self.dead_links:
            getattr(self.ranks[to], where)[key] = value


def explore(first, count, rules=Rules()):
    """(schedules, of these with a failure, programs that ended) from seed `first` on."""
    failed = ended = 0
    for seed in range(first, first + count):
        model = Model(seed, rules)
        try:
            failed += model.run() > 0
        except Wrong as wrong:
            raise Wrong(f"schedule {seed}: {wrong}") from None
        ended += model.done
    return count, failed, ended


def breaks(rule, count, first=0):
    """The first schedule that goes wrong without a rule, or None."""
    try:
        explore(first, count, replace(Rules(), **{rule: False}))
    except Wrong as wrong:
        return str(wrong)
    return None


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.ops.comm.protocol")
    parser.add_argument("--schedules", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    start = time.monotonic()
    count, failed, ended = explore(given.seed, given.schedules)
    seconds = time.monotonic() - start
    print(f"{count} schedules from seed {given.seed}: no hang, no wrong sum; {failed} with failures, {ended} programs, "
          f"{seconds:.0f} s")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
