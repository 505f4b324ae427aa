import gc

from async_rl.rollout.garbage import NEVER, FullCollections


def test_full_collections_wait_for_the_end_of_a_batch() -> None:
    before = gc.get_threshold()
    full = FullCollections()
    full.make_up()
    full.hold()
    try:
        assert gc.get_threshold() == (*before[:2], NEVER)
        num_before = gc.get_stats()[2]["collections"]
        cycles: list[list[object]] = []
        for _ in range(200_000):
            cycle: list[object] = []
            cycle.append(cycle)
            cycles.append(cycle)
        assert gc.get_stats()[2]["collections"] == num_before
    finally:
        full.make_up()
    assert gc.get_threshold() == before and gc.get_stats()[2]["collections"] == num_before + 1
