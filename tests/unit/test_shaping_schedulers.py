"""The pure schedulers as state machines: fairness, rates, key lanes."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict, deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eventbus.errors import ConfigError
from eventbus.scheduling.fairness import Turns
from eventbus.scheduling.keys import KeyLanes
from eventbus.scheduling.rate import GRAINS, Window
from eventbus.scheduling.shaped import ShapedLane, TenantLimits
from eventbus.shaping import Fairness, Idempotency, Rate

TENANTS = st.sampled_from(["", "acme", "globex", "initech", "umbrella", "hooli"])
WEIGHTS = {"acme": 2.0, "hooli": 0.3}


class FairTurns(RuleBasedStateMachine):
    """Whatever arrives: at most a turn in a row, first in first out within a tenant, nobody waits past their turn."""

    def __init__(self) -> None:
        super().__init__()
        self.fairness = Fairness(weights=WEIGHTS)
        self.turns: Turns[tuple[str, int]] = Turns(self.fairness)
        self.model: dict[str, deque[tuple[str, int]]] = defaultdict(deque)
        self.paused: set[str] = set()
        self.waited: Counter[str] = Counter()
        self.ahead: dict[str, int] = {}
        self.number = 0
        self.run: list[str] = []
        self.begun: str | None = None
        """Whose turn is under way."""

    def row(self) -> list[str]:
        return [tenant for tenant, items in self.model.items() if items and tenant not in self.paused]

    @rule(tenant=TENANTS, number=st.integers(1, 8))
    def push(self, tenant: str, number: int) -> None:
        for _ in range(number):
            self.number += 1
            if tenant not in self.row() and tenant not in self.paused:
                self.ahead[tenant] = sum(map(self.fairness.turn, self.row()))
            self.model[tenant].append((tenant, self.number))
            self.turns.push(tenant, (tenant, self.number), 0.0)

    @precondition(lambda self: self.row())
    @rule()
    def pop(self) -> None:
        others = self.row()
        urgent = {turn.tenant: turn.current_priority for turn in self.turns.snapshot()}
        first = self.turns.first()
        assert first is not None
        assert urgent[first] == min(urgent[tenant] for tenant in others) or self.begun == first
        item = self.turns.pop(float(self.number))
        tenant = item[0]
        assert tenant == first
        assert item == self.model[tenant].popleft()
        self.begun = tenant if self.turns.first() == tenant else None
        if len(others) > 1:
            self.run = [*self.run, tenant] if self.run[-1:] == [tenant] else [tenant]
            assert len(self.run) <= self.fairness.turn(tenant)
        else:
            self.run = []
        for other in others:
            if other != tenant:
                self.waited[other] += 1
                assert self.waited[other] <= self.ahead[other], "it waited for longer than the turns before it"
        self.waited[tenant] = 0
        self.ahead[tenant] = sum(self.fairness.turn(other) for other in self.row() if other != tenant)

    @precondition(lambda self: self.row())
    @rule()
    def pause(self) -> None:
        first = self.turns.first()
        assert first is not None
        self.turns.pause(first)
        self.paused.add(first)
        self.run = []

    @precondition(lambda self: self.paused)
    @rule()
    def resume(self) -> None:
        tenant = sorted(self.paused)[0]
        self.turns.resume(tenant)
        self.paused.discard(tenant)
        self.waited[tenant] = 0
        self.ahead[tenant] = sum(self.fairness.turn(other) for other in self.row() if other != tenant)
        self.run = []

    @precondition(lambda self: len(self.turns) > 3)
    @rule(number=st.integers(1, 3), paused=st.booleans())
    def give_away(self, number: int, paused: bool) -> None:
        taken = self.turns.newest(number, paused=paused)
        for item in taken:
            assert item == self.model[item[0]].pop()
            assert not paused or item[0] in self.paused
        assert len(taken) == number or paused
        self._forget_empty()

    @rule(tenant=TENANTS)
    def lose(self, tenant: str) -> None:
        gone = set(list(self.model[tenant])[::2])
        assert set(self.turns.drop(gone)) == gone
        self.model[tenant] = deque(item for item in self.model[tenant] if item not in gone)
        self._forget_empty()

    def _forget_empty(self) -> None:
        for tenant, items in self.model.items():
            if not items:
                self.paused.discard(tenant)
                self.waited[tenant] = 0
        self.run = []

    @invariant()
    def counts(self) -> None:
        assert len(self.turns) == sum(map(len, self.model.values()))
        assert self.turns.paused == sum(len(self.model[tenant]) for tenant in self.paused)
        assert (self.turns.first() is None) == (not self.row())


class Rates(RuleBasedStateMachine):
    """Whatever the clock does: never more than the limit in any period, and never less than is free for long."""

    LIMIT, PERIOD = 7, 10.0

    def __init__(self) -> None:
        super().__init__()
        self.window = Window(self.LIMIT, self.PERIOD)
        self.now = 1000.0
        self.passed: list[float] = []

    @rule(step=st.floats(0.0, 12.0))
    def time_passes(self, step: float) -> None:
        self.now += step

    @rule(number=st.integers(1, 9))
    def take(self, number: int) -> None:
        number = min(number, self.window.free(self.now))
        if number:
            self.window.take(self.now, number)
            self.passed += [self.now] * number

    @precondition(lambda self: self.window.free(self.now) == 0)
    @rule()
    def wait_until_open(self) -> None:
        opens = self.window.opens_at()
        assert self.now < opens <= self.now + self.PERIOD
        self.now = opens
        assert self.window.free(self.now) > 0

    @invariant()
    def never_over(self) -> None:
        for at in self.passed[-40:]:
            assert sum(at <= other < at + self.PERIOD for other in self.passed) <= self.LIMIT

    @invariant()
    def nothing_is_withheld(self) -> None:
        grain = self.PERIOD / GRAINS
        used = sum(self.now - self.PERIOD - grain < at for at in self.passed)
        assert self.window.free(self.now) >= self.LIMIT - used


class Keys(RuleBasedStateMachine):
    """Whatever finishes when: never two of one key at once, never out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes: KeyLanes[tuple[str, int]] = KeyLanes()
        self.arrived: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self.running: dict[str, tuple[str, int]] = {}
        self.finished: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self.number = 0

    @rule(key=st.sampled_from("abc"))
    def arrive(self, key: str) -> None:
        self.number += 1
        item = (key, self.number)
        self.arrived[key].append(item)
        if self.lanes.enter(key, item):
            assert key not in self.running
            self.running[key] = item
            assert self.lanes.enter(key, item), "a leader that comes again, after a wait, still leads"

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        item = self.running.pop(key)
        assert self.lanes.leads(key, item)
        self.finished[key].append(item)
        following = self.lanes.leave(key, item)
        if following is not None:
            self.running[key] = following

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def lose_the_leader(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        item = self.running.pop(key)
        waiting = self.lanes.scatter(key, item)
        assert waiting == [x for x in self.arrived[key] if x not in self.finished[key] and x != item]
        self.arrived[key] = list(self.finished[key])

    @precondition(lambda self: self.lanes.waiting)
    @rule(key=st.sampled_from("abc"))
    def lose_followers(self, key: str) -> None:
        waiting = [x for x in self.arrived[key] if x not in self.finished[key] and x != self.running.get(key)]
        gone = set(waiting[::2])
        assert self.lanes.drop(gone) == waiting[::2]
        self.arrived[key] = [x for x in self.arrived[key] if x not in gone]

    @invariant()
    def in_order(self) -> None:
        for key, items in self.finished.items():
            assert items == self.arrived[key][: len(items)]
            assert self.running.get(key) is None or self.arrived[key][len(items)] == self.running[key]


for machine in (FairTurns, Rates, Keys):
    machine.TestCase.settings = settings(
        max_examples=120,
        stateful_step_count=60,
        suppress_health_check=[HealthCheck.too_slow],  # of the machine, not of the code
    )
TestFairTurns = FairTurns.TestCase
TestRates = Rates.TestCase
TestKeys = Keys.TestCase


def test_the_numbers_of_the_turns() -> None:
    """Three in a row, base 5, one more urgent each round, 1 the most urgent; the six figures say so."""
    fairness = Fairness()
    assert [fairness.priority(rounds) for rounds in range(7)] == [5, 4, 3, 2, 1, 1, 1]
    turns: Turns[str] = Turns(fairness)
    for tenant in "abc":
        for _ in range(10):
            turns.push(tenant, tenant, 0.0)
    assert "".join(turns.pop(n) for n in range(12)) == "aaabbbcccaaa"
    turns.pop(12.0)
    found = {turn.tenant: dataclasses.astuple(turn)[1:] for turn in turns.snapshot()}
    assert found == {"a": (11.0, 0, 5, 6, 0), "b": (12.0, 0, 5, 4, 1), "c": (8.0, 1, 4, 3, 0)}
    assert next(iter(turns.snapshot())).as_dict().keys() == {
        "companyId",
        "lastProcessedAt",
        "roundsWithoutProcessing",
        "currentPriority",
        "totalProcessed",
        "consecutiveBatchCount",
    }


def test_a_weight_makes_a_turn_longer() -> None:
    """A tenant of weight 2 gets twice as many in a row; a small one still gets one."""
    turns: Turns[str] = Turns(Fairness(weights={"a": 2, "b": 0.1}))
    for tenant in "abc":
        for _ in range(12):
            turns.push(tenant, tenant, 0.0)
    assert "".join(turns.pop(0.0) for _ in range(20)) == "aaaaaabcccaaaaaabccc"


def test_a_stranger_cannot_starve_a_tenant_by_new_names() -> None:
    """Ever new tenants stand behind who waits already."""
    turns: Turns[str] = Turns(Fairness())
    turns.push("old", "old", 0.0)
    for number in range(5):
        turns.push(f"new-{number}", "new", 0.0)
    assert turns.pop(0.0) == "old"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Fairness(in_a_row=0), "fairness.in_a_row = 0: must be a whole number from 1"),
        (lambda: Fairness(weights={"a": 0}), "fairness.weights.a = 0: must be a number above 0, at most 1000"),
        (lambda: Fairness(base=1, highest=2), "fairness.highest = 2: must not be above base = 1"),
        (lambda: Rate(0, "1s"), "rate.limit = 0: must be a whole number from 1"),
        (lambda: Rate(1, 0), "rate.period = 0: must be longer than 0.01 s"),
        (lambda: Rate(1, tenants={"a": 2}), 'rate.tenants: needs by = "tenant"'),
        (lambda: Rate(1, by="tenant", tenants={"a": 0}), "rate.tenants.a = 0: must be a whole number from 1"),
        (lambda: Rate(1, by="key"), "rate.by = 'key': must be 'all' or 'tenant'"),
        (lambda: Rate(1, store="redis://x"), 'needs scope = "service"'),
        (lambda: Idempotency(window=0), "idempotency.window = 0: must be longer than zero"),
        (lambda: Idempotency(claim="-1s"), "is not a duration"),
    ],
)
def test_impossible_settings_say_what_is_allowed(make: object, text: str) -> None:
    """A wrong number is an error where it is written, with name, value and what is allowed."""
    with pytest.raises(ConfigError) as error:
        make()  # type: ignore[operator]
    assert text in str(error.value)


def test_the_watch_is_told_of_the_next_tenant_when_one_may_go_on() -> None:
    """Two tenants wait for times that are close together: when the first is over, the clock is set to the second."""
    now, told = 0.0, 0

    def tell() -> None:
        nonlocal told
        told += 1

    rates = TenantLimits(Rate(1, 1.0, by="tenant"), lambda limit, tenant: Window(limit, 1.0))
    lane: ShapedLane[str] = ShapedLane(9, 9, Turns(Fairness()), lambda item: item, [], [rates], lambda: now, tell)
    for now, tenant in ((0.0, "gold"), (0.0, "gold"), (0.5, "tin"), (0.5, "tin")):
        lane.push(tenant, now)
        lane.take()
    assert (lane.opens_at, told) == (1.0, 2)
    now = 1.0  # the clock woke for gold, looked at the moments there were, and set the pool to work
    assert lane.take() == "gold"
    assert (lane.opens_at, told) == (1.5, 3)
