"""What changed is sent where that takes less time than all weights, whatever the link, and however it goes on."""

import random
from dataclasses import dataclass

import pytest

from async_rl.shared.weights.choice import FEWEST, Choice
from tests.support.clock import Clock
from tests.support.fresh_seed import fresh_seed

NUM_BYTES, NUM_PIECES = 10**9, 1000
PIECE_BYTES = NUM_BYTES // NUM_PIECES


@dataclass
class Costs:
    """Seconds of a publish of all; of finding what changed, of which this is the share; of what is done with it."""

    all_s: float
    finding_s: float = 1.0
    share: float = 0.07
    applying_s: float = 0.2
    noise: float = 0.0

    @property
    def changes_s(self) -> float:
        return self.finding_s + self.share * self.all_s + self.applying_s

    @property
    def least_s(self) -> float:
        return min(self.all_s, self.changes_s)


class Publishes:
    """Of one group, whose times pass as `costs` says."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.clock = Clock()
        self.choice = Choice(self.clock)
        self.rng = random.Random(fresh_seed())
        self.holds = False
        """Whether the receivers are known to hold what was sent last."""

    def publish(self) -> tuple[str, float]:
        """Which way was taken, and the seconds of all."""
        began_s, costs = self.clock.now_s, self.costs
        way = "all"
        keeps = True
        if self.holds and self.choice.begin(NUM_BYTES):
            way = "changes"
            for _ in range(NUM_PIECES):
                self.passes(costs.finding_s / NUM_PIECES)
                if not self.choice.goes_on(PIECE_BYTES, int(PIECE_BYTES * costs.share)):
                    way = "given up"
                    break
        if way == "all":
            keeps = self.choice.keeps
        if way == "changes":
            self.passes(costs.share * costs.all_s + costs.applying_s)
            self.choice.sent_changes()
        else:
            lost_s = self.choice.begin_all()
            self.passes(costs.all_s)
            self.choice.sent_all(lost_s)
        self.holds = keeps
        return way, self.clock.now_s - began_s

    def passes(self, seconds: float) -> None:
        self.clock.now_s += seconds * self.rng.lognormvariate(0, self.costs.noise)

    def many(self, number: int) -> tuple[list[str], float]:
        """Which ways, and the mean seconds."""
        ways, seconds = zip(*(self.publish() for _ in range(number)), strict=True)
        return list(ways), sum(seconds) / number


# From loopback of one machine to a link of some 100 Mbit/s.
LINKS = [0.05, 0.2, 0.5, 0.9, 1.2, 1.3, 1.5, 4.0, 8.0, 80.0]


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("all_s", LINKS)
def test_over_any_link_publishes_take_hardly_longer_than_the_shorter_of_both_ways(all_s: float, noise: float) -> None:
    publishes = Publishes(Costs(all_s, noise=noise))
    assert publishes.publish()[0] == "all"
    # Once more than it would have to be, as nothing is known of changes.
    assert publishes.publish()[1] <= 3 * publishes.costs.all_s * (1 + 3 * noise)
    _, mean_s = publishes.many(300)
    # Of lognormal times the mean is exp(noise^2 / 2) times the median; a tie costs nothing, whichever is taken.
    assert mean_s <= publishes.costs.least_s * (1.07 + noise)


@pytest.mark.parametrize("all_s", [0.05, 0.2, 0.5])
def test_where_all_are_far_shorter_changes_are_given_up_after_a_small_part(all_s: float) -> None:
    publishes = Publishes(Costs(all_s))
    publishes.publish()
    ways, _ = publishes.many(100)
    assert set(ways) == {"all", "given up"} and 1 <= ways.count("given up") < 50
    # What is never compared need not be kept.
    assert sum(publishes.publish()[0] == "all" and not publishes.holds for _ in range(100)) > 40


@pytest.mark.parametrize("all_s", [4.0, 80.0])
def test_over_slow_links_changes_are_sent_from_the_second_publish_on(all_s: float) -> None:
    publishes = Publishes(Costs(all_s))
    publishes.publish()
    ways, _ = publishes.many(300)
    assert ways[:FEWEST] == ["changes"] * FEWEST and ways.count("changes") > 290


def test_steps_that_change_all_cost_little_and_changes_are_sent_again_soon_after() -> None:
    publishes = Publishes(Costs(4.0))
    publishes.publish()
    publishes.many(20)
    publishes.costs = Costs(4.0, share=1.0)
    way, seconds = publishes.publish()
    assert way == "given up" and seconds < 1.15 * 4.0
    publishes.costs = Costs(4.0)
    assert "changes" in publishes.many(2)[0]


def test_a_publish_that_was_long_for_once_is_not_remembered_for_long() -> None:
    publishes = Publishes(Costs(4.0))
    publishes.publish()
    publishes.many(20)
    publishes.costs = Costs(4.0, applying_s=40.0)
    assert publishes.publish()[0] == "changes"
    publishes.costs = Costs(4.0)
    assert publishes.many(4)[0][-1] == "changes"


@pytest.mark.parametrize(("before_s", "after_s"), [(0.2, 8.0), (2.0, 0.2), (8.0, 1.0)])
def test_a_link_that_becomes_another_one_is_noticed(before_s: float, after_s: float) -> None:
    publishes = Publishes(Costs(before_s))
    publishes.publish()
    publishes.many(100)
    publishes.costs = Costs(after_s)
    publishes.many(400)
    assert publishes.many(100)[1] <= 1.07 * publishes.costs.least_s


def test_what_is_done_once_does_not_count() -> None:
    publishes = Publishes(Costs(0.5))
    publishes.choice.begin_all()
    publishes.choice.do_once(lambda: publishes.passes(30.0))
    publishes.passes(0.5)
    publishes.choice.sent_all(0.0)
    publishes.holds = True
    assert publishes.publish()[0] == "given up"


def test_the_log_says_what_is_sent_and_why_whenever_that_becomes_another_way(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    publishes = Publishes(Costs(0.2))
    publishes.publish()
    publishes.many(50)
    publishes.costs = Costs(4.0)
    publishes.many(50)
    assert [record.getMessage() for record in caplog.records] == [
        "publishes send all weights from now on: all weights took 0.20 s, changes were given up after 0.03 s",
        "publishes send what has changed from now on: all weights took 4.00 s, changes 1.48 s",
    ]
