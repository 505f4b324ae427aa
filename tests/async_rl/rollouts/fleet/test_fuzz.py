"""Bad requests by the thousand against a fleet endpoint."""

import pytest

from async_rl.rollouts.fleet.app import OPEN_PATHS
from tests.support.fuzzing import fuzz

A = "http://10.0.0.1:8000"


@pytest.mark.computes
def test_no_bad_request_breaks_the_endpoint_or_changes_the_fleet(make_pool, serve) -> None:
    pool = make_pool(A)
    endpoint = serve(pool, token="secret")
    _, document = endpoint.ask("/openapi.json")
    before = endpoint.ask("/fleet")
    statuses = fuzz(endpoint.url, document, "secret", frozenset(OPEN_PATHS), num_requests=1000)
    assert sum(statuses.values()) >= 1000 and {400, 401, 404, 405} <= set(statuses)
    assert endpoint.ask("/fleet") == before
    assert pool.is_idle
