import gc

from async_rl.rollouts.groups.garbage_collection import NEVER, YOUNG, Collections


def num_full() -> int:
    return gc.get_stats()[2]["collections"]


def test_full_collections_wait_for_the_end_of_a_batch_also_if_another_one_has_begun() -> None:
    before = gc.get_threshold()
    collections = Collections()
    collections.hold()
    try:
        assert gc.get_threshold() == (YOUNG, before[1], NEVER)
        num_before = num_full()
        cycles: list[list[object]] = []
        for _ in range(200_000):
            cycle: list[object] = []
            cycle.append(cycle)
            cycles.append(cycle)
        assert num_full() == num_before
        collections.hold()
        collections.make_up()
        assert gc.get_threshold()[2] == NEVER and num_full() == num_before + 1
    finally:
        collections.make_up()
    assert gc.get_threshold() == before and num_full() == num_before + 2
