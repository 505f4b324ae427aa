from async_rl.rollouts.groups.expected_length import ExpectedLength


def test_the_longest_is_assumed_until_something_is_known_then_the_mean_of_all() -> None:
    expected = ExpectedLength(longest=512)
    assert expected.of("a") == 512
    expected.add_lengths("a", [10, 30])
    assert expected.of("b") == 20


def test_a_prompts_own_history_counts_more_than_that_of_others_and_the_newest_most() -> None:
    expected = ExpectedLength(longest=512)
    expected.add_lengths("a", [100])
    for _ in range(5):
        expected.add_lengths("b", [10])
    assert expected.of("a") == 100 and expected.of("b") == 10
    expected.add_lengths("a", [200])
    assert expected.of("a") == 150
