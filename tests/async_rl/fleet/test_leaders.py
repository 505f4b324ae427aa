"""What other leaders have under way counts as long as they say so."""

import asyncio
import math
from random import Random

from async_rl.fleet.leaders import REPORT_TIMEOUT_S, LeaderReports
from async_rl.protocol.fleet import SyncRequest
from benchmarks.common import virtual_time


def test_members_count_the_sum_of_the_last_reports(make_pool) -> None:
    async def scenario() -> None:
        rng = Random(0)
        roster = make_pool(*(f"http://m{i}:8000" for i in range(4)))
        reports = LeaderReports(roster, timeout_s=60.0)
        assert roster.drains_known_elsewhere == math.inf
        last: dict[int, SyncRequest] = {}
        for _ in range(200):
            urls = rng.sample([*(member.url for member in roster.members), "http://gone:1"], rng.randrange(5))
            leader = rng.randrange(1, 4)
            tokens = {url: rng.randrange(1000) for url in urls}
            last[leader] = SyncRequest(leader=leader, outstanding_tokens=tokens, num_drains=rng.randrange(9))
            reports.note(last[leader])
            for member in roster.members:
                told = sum(each.outstanding_tokens.get(member.url, 0) for each in last.values())
                assert member.outstanding_elsewhere == told
            assert roster.drains_known_elsewhere == min(each.num_drains for each in last.values())
        reports.close()

    asyncio.run(scenario())


def test_a_leader_that_is_silent_counts_as_idle_and_one_that_goes_on_does_not(make_pool) -> None:
    async def scenario() -> None:
        roster = make_pool("http://a:8000")
        (member,) = roster.members
        reports = LeaderReports(roster)
        reports.note(SyncRequest(leader=1, outstanding_tokens={member.url: 5}))
        counted = []
        for _ in range(8):
            reports.note(SyncRequest(leader=2, outstanding_tokens={member.url: 7}, num_drains=2))
            await asyncio.sleep(REPORT_TIMEOUT_S / 2 + 0.1)
            counted.append(member.outstanding_elsewhere)
        assert counted == [12, *[7] * 7], "the first is forgotten, the second has reported all the while"
        assert roster.drains_known_elsewhere == 2
        await asyncio.sleep(REPORT_TIMEOUT_S)
        assert roster.is_idle and roster.drains_known_elsewhere == math.inf
        reports.close()

    virtual_time.run(scenario())
