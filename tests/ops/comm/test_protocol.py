"""The protocol on random schedules; and without each of its rules, which shows what the model can find."""

from dataclasses import fields

import pytest

from tests.ops.comm import protocol


@pytest.mark.parametrize("count", [1000, pytest.param(3000, marks=pytest.mark.matrix)])
def test_no_hang_and_no_wrong_sum(count):
    schedules, failed, ended = protocol.explore(0, count)
    # Both kinds of schedules are there in numbers.
    assert schedules // 5 < failed < 4 * schedules // 5 and ended > 5 * schedules


@pytest.mark.parametrize("rule", [field.name for field in fields(protocol.Rules)])
def test_each_rule_is_needed(rule):
    assert protocol.breaks(rule, 2000) is not None


def test_a_schedule_is_its_seed():
    first, second = (protocol.Model(7, protocol.Rules()) for _ in range(2))
    assert (first.run(), first.clock, first.done) == (second.run(), second.clock, second.done)
