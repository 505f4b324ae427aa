from deploy.ray.scaling import Scaler


def scaler() -> Scaler:
    return Scaler(least=2, most=5, up_after_s=30, down_after_s=300)


def test_a_number_that_is_desired_long_enough_becomes_the_target() -> None:
    asked = scaler()
    assert asked.target == 2
    assert [asked.update(4, now_s) for now_s in (0, 10, 29, 30)] == [2, 2, 2, 4]


def test_the_smallest_number_of_the_time_counts_upwards() -> None:
    asked = scaler()
    desired = ((0, 5), (10, 3), (30, 5), (59, 5), (60, 5))
    assert [asked.update(number, now_s) for now_s, number in desired] == [2, 2, 3, 3, 5]


def test_the_largest_number_of_the_time_counts_downwards() -> None:
    asked = scaler()
    for now_s in (0, 30):
        asked.update(5, now_s)
    assert asked.target == 5
    assert [asked.update(number, now_s) for now_s, number in ((100, 2), (399, 2), (400, 4), (401, 2))] == [5, 5, 4, 4]


def test_the_target_stays_between_least_and_most() -> None:
    asked = scaler()
    for now_s in (0, 30):
        asked.update(99, now_s)
    assert asked.target == 5
    for now_s in (100, 400):
        asked.update(1, now_s)
    assert asked.target == 2


def test_a_trainer_that_does_not_answer_has_desired_nothing() -> None:
    """After a restart the first number does not act at once with the help of one from before."""
    asked = scaler()
    asked.update(5, 0)
    asked.update(None, 20)
    assert [asked.update(5, now_s) for now_s in (40, 69, 70)] == [2, 2, 5]


def test_without_a_range_there_is_nothing_to_follow() -> None:
    assert not Scaler(least=2, most=2, up_after_s=30, down_after_s=300).follows
    assert scaler().follows


def test_numbers_that_flip_faster_than_they_would_count_change_nothing() -> None:
    asked = scaler()
    assert {asked.update(5 if i % 2 else 2, 5.0 * i) for i in range(500)} == {2}
    for now_s in (3000, 3030):
        asked.update(5, now_s)
    assert {asked.update(5 if i % 20 else 2, 3031 + 5.0 * i) for i in range(500)} == {5}
