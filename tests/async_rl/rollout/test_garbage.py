import gc

from async_rl.rollout.garbage import NEVER, YOUNG, Collections


def test_full_collections_wait_for_the_end_of_the_last_batch() -> None:
    before = gc.get_threshold()
    collections = Collections()
    collections.hold()
    collections.hold()
    try:
        assert gc.get_threshold() == (YOUNG, before[1], NEVER)
        num_before = gc.get_stats()[2]["collections"]
        cycles: list[list[object]] = []
        for _ in range(200_000):
            cycle: list[object] = []
            cycle.append(cycle)
            cycles.append(cycle)
        collections.make_up()
        assert gc.get_threshold()[2] == NEVER and gc.get_stats()[2]["collections"] == num_before
    finally:
        collections.make_up()
    assert gc.get_threshold() == before and gc.get_stats()[2]["collections"] == num_before + 1
