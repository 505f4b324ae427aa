"""When a group gives up: against a model that counts again from the list of all failures."""

from collections import Counter
from random import Random

import pytest

from async_rl.errors import BrokenAnswer, ConnectionLost, InstanceError, InstanceRefused, InstanceTooSlow, StaleWeights
from async_rl.rollouts.pool.group_rollout import MAX_FAILURES, MAX_REFUSALS, MAX_REFUSING_INSTANCES, Attempts

REFUSALS = [InstanceRefused("engine is broken", status) for status in (500, 501, 502, 504)]
OTHERS: list[InstanceError] = [
    InstanceRefused("busy", 503),
    InstanceRefused("busy", 429),
    ConnectionLost("reset"),
    InstanceTooSlow("slow"),
    StaleWeights("v0"),
    BrokenAnswer("flood"),
]


def gives_up(failures: list[tuple[str, InstanceError]]) -> bool:
    of = Counter(url for url, _ in failures)
    refused = Counter(url for url, error in failures if error in REFUSALS)
    return (
        len(refused) >= MAX_REFUSING_INSTANCES
        or any(num >= MAX_REFUSALS for num in refused.values())
        or any(num >= MAX_FAILURES for num in of.values())
    )


@pytest.mark.parametrize("num_instances", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "errors", [OTHERS, [*OTHERS, *OTHERS, *REFUSALS], REFUSALS], ids=["others", "mixed", "refusals"]
)
def test_the_verdict_follows_from_the_failures_since_the_last_tokens(
    num_instances: int, errors: list[InstanceError]
) -> None:
    for seed in range(60):
        rng = Random(seed)
        attempts, since_tokens = Attempts(), list[tuple[str, InstanceError]]()
        for number in range(1, 60):
            url, error = f"http://{rng.randrange(num_instances)}", rng.choice(errors)
            num_tokens = rng.choice([0] * 15 + [1])
            attempts.failed(url, error, num_tokens)
            since_tokens = [] if num_tokens else [*since_tokens, (url, error)]
            assert attempts.num_failures == number
            assert attempts.refused_by == {url for url, error in since_tokens if error in REFUSALS}
            assert (attempts.verdict is not None) == gives_up(since_tokens)
            if attempts.verdict is not None:
                urls = {url for url, _ in since_tokens}
                assert f"failed {len(since_tokens)} times in a row, on {len(urls)} instances" in attempts.verdict
                last = dict(since_tokens)
                assert all(f"\n  {url}: {last[url]}" in attempts.verdict for url in urls), "the last reason of each"
                break


def test_what_the_pool_ends_counts_as_an_attempt_and_blames_nobody() -> None:
    attempts = Attempts()
    for _ in range(10 * MAX_FAILURES):
        attempts.interrupted()
    assert attempts.num_failures == 10 * MAX_FAILURES and attempts.verdict is None and not attempts.refused_by
