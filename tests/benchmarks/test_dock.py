"""The benchmark's processes meet over real sockets; each group is trained once, which it checks itself."""

import pytest

from benchmarks.dock import Case, measure

pytestmark = pytest.mark.distributed


def test_a_replica_that_is_half_as_fast_holds_the_other_one_up_less_than_with_fixed_shares() -> None:
    found = measure(Case(num_replicas=2, sigma=1.0, slowed=0.5), num_batches=1)
    assert found["lost"] < found["lost_with_fixed_shares"] / 2 and found["iteration"] < 0.95
