"""Publishes to many instances, against closed forms and against a walk from event to event."""

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from itertools import count

import pytest

from async_rl.shared.weights.choice import WORTH
from deploy.scaling.publish import (
    DELAY_S,
    ONCE_S,
    PIECE_BYTES,
    PIECE_S,
    Member,
    chain,
    passing_s,
    publish_s,
    star,
    tree,
)
from deploy.scaling.what_if import MOST_CHANGES
from tests.support.fresh_seed import fresh_seed

GBIT = 125e6
MEMBER = Member(GBIT)
PIECE_ON_LINK_S = PIECE_BYTES / GBIT
HOP_S = DELAY_S + PIECE_S


def walked(sources: Sequence[int], members: Sequence[Member], num_bytes: float) -> float:
    """The same from event to event: links and processors have queues."""
    num_pieces = max(1, math.ceil(num_bytes / PIECE_BYTES))
    receivers: list[list[int]] = [[] for _ in members]
    for to, source in enumerate(sources, 1):
        receivers[source].append(to)
    order, last_s = count(), 0.0
    events: list[tuple[float, int, str, int]] = []
    links: list[deque[int]] = [deque() for _ in members]
    queued, is_computing = [0] * len(members), [False] * len(members)

    def at(time_s: float, what: str, member: int) -> None:
        heapq.heappush(events, (time_s, next(order), what, member))

    def send_next(now_s: float, member: int) -> None:
        to = links[member][0]
        at(now_s + num_bytes / num_pieces / min(members[member].bytes_per_s, members[to].bytes_per_s), "sent", member)

    def has_piece(now_s: float, member: int) -> None:
        was_idle = not links[member]
        links[member].extend(receivers[member])
        if was_idle and links[member]:
            send_next(now_s, member)

    for _ in range(num_pieces):
        has_piece(0.0, 0)
    while events:
        now_s, _, what, member = heapq.heappop(events)
        last_s = max(last_s, now_s)
        if what == "sent":
            at(now_s + members[member].delay_s, "arrives", links[member].popleft())
            if links[member]:
                send_next(now_s, member)
            continue
        if what == "arrives":
            queued[member] += 1
        else:
            is_computing[member] = False
            has_piece(now_s, member)
        if queued[member] and not is_computing[member]:
            queued[member] -= 1
            is_computing[member] = True
            at(now_s + members[member].piece_s, "computed", member)
    return last_s


@pytest.mark.parametrize("shape", ["chain", "tree", "star", "any"])
def test_members_of_any_speed_have_everything_when_a_walk_says_so(shape: str) -> None:
    rng = random.Random(fresh_seed())
    for _ in range(30):
        number = rng.randint(1, 40)
        sources = {
            "chain": chain(number),
            "tree": tree(number),
            "star": star(number),
            "any": [rng.randrange(member) for member in range(1, number + 1)],
        }[shape]
        members = [
            Member(10 ** rng.uniform(6, 10), rng.choice((0.0, rng.uniform(0, 0.1))), 10 ** rng.uniform(-5, -1))
            for _ in range(number + 1)
        ]
        num_bytes = rng.randint(1, 20 * PIECE_BYTES)
        found = publish_s(sources, members, num_bytes)
        assert found == pytest.approx(walked(sources, members, num_bytes), rel=1e-9), (sources, members, num_bytes)


@pytest.mark.parametrize("number", [1, 2, 7, 1000])
def test_a_chain_carries_the_bytes_once_and_a_piece_more_for_each_member(number: int) -> None:
    taken = publish_s(chain(number), [MEMBER] * (number + 1), 1000 * PIECE_BYTES)
    assert taken == pytest.approx((1000 + number - 1) * PIECE_ON_LINK_S + number * HOP_S)


def test_one_after_the_other_carries_the_bytes_for_each() -> None:
    taken = publish_s(star(1000), [MEMBER] * 1001, 100 * PIECE_BYTES)
    assert taken == pytest.approx(100 * 1000 * PIECE_ON_LINK_S + HOP_S)


@pytest.mark.parametrize(("number", "copies"), [(1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (1023, 10)])
def test_by_a_tree_the_trainers_link_carries_the_logarithm_of_the_members(number: int, copies: int) -> None:
    taken = publish_s(tree(number), [MEMBER] * (number + 1), 1000 * PIECE_BYTES)
    assert 0 <= taken - 1000 * copies * PIECE_ON_LINK_S <= copies * HOP_S + 1e-9


def test_one_slow_member_slows_a_chain_down_wherever_it_is() -> None:
    rng = random.Random(fresh_seed())
    members = [MEMBER] * 501
    members[rng.randrange(1, 501)] = Member(GBIT / 2)
    usual = publish_s(chain(500), [MEMBER] * 501, 2000 * PIECE_BYTES)
    slow = publish_s(chain(500), members, 2000 * PIECE_BYTES)
    assert slow - usual == pytest.approx(2000 * PIECE_ON_LINK_S, rel=1e-3)


def test_what_a_further_member_adds_is_known_from_a_measured_publish() -> None:
    rng = random.Random(fresh_seed())
    for _ in range(20):
        number, num_bytes = rng.randint(1, 50), rng.randint(1, 500 * PIECE_BYTES)
        # A link on which a piece takes longer than at the processor.
        members = [Member(rng.uniform(1e6, 4e8))] * 1002
        took_s = publish_s(chain(number), members[: number + 1], num_bytes)
        if num_bytes < PIECE_BYTES and members[0].bytes_per_s > num_bytes / PIECE_S:
            continue
        added_s = publish_s(chain(1000), members[:1001], num_bytes) - took_s
        assert (1000 - number) * passing_s(num_bytes, ONCE_S + took_s, number) == pytest.approx(added_s)


def test_the_most_that_changes_may_have_is_what_a_sender_sends() -> None:
    assert MOST_CHANGES == WORTH
