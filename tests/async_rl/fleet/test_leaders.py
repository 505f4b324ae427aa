"""What other leaders have under way counts as long as they say so."""

import asyncio
from random import Random

from async_rl.fleet.leaders import LeaderReports
from tests.support.members import ready_member


def test_members_count_the_sum_of_the_last_reports() -> None:
    async def scenario() -> None:
        rng = Random(0)
        members = [ready_member(f"m{i}") for i in range(4)]
        reports = LeaderReports(lambda: members, timeout_s=60.0)
        last: dict[int, dict[str, int]] = {}
        for _ in range(200):
            urls = rng.sample([*(member.url for member in members), "http://gone:1"], rng.randrange(5))
            leader = rng.randrange(3)
            last[leader] = {url: rng.randrange(1000) for url in urls}
            reports.note(leader, last[leader])
            for member in members:
                assert member.outstanding_elsewhere == sum(each.get(member.url, 0) for each in last.values())
        reports.close()

    asyncio.run(scenario())


def test_a_leader_that_is_silent_counts_as_idle_and_one_that_goes_on_does_not() -> None:
    async def scenario() -> None:
        member = ready_member("a")
        reports = LeaderReports(lambda: [member], timeout_s=0.3)
        reports.note(1, {member.url: 5})
        for _ in range(8):
            reports.note(2, {member.url: 7})
            await asyncio.sleep(0.08)
        assert member.outstanding_elsewhere == 7, "the first is forgotten, the second has reported all the while"
        reports.close()

    asyncio.run(scenario())
