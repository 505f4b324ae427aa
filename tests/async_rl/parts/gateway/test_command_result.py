"""What the last line of an agent's output says of its reward; the agents themselves are in test_command_program.py."""

import pytest

from async_rl.parts.gateway.command_program import result_of
from async_rl.rollouts.agents.program import ProgramFailed, RolloutResult


def test_the_last_line_that_is_not_empty_gives_the_reward() -> None:
    output = b'{"reward": 9}\ndebug output\n{"reward": 3, "turn_rewards": [0.5]}\n \n\n'
    assert result_of(output) == RolloutResult(3.0, (0.5,))


@pytest.mark.parametrize(
    "last",
    [
        "nothing",
        "",
        '{"score": 1}',
        "[1]",
        '{"reward": null}',
        "{",
        "7",
        "[" * 5000,
        '{"reward": ' + "[" * 5000,
        "\xff",
    ],
)
def test_without_a_reward_in_the_last_line_reward_scores_it(last: str) -> None:
    assert result_of(f"{last}\n".encode("latin-1")) == RolloutResult()


@pytest.mark.parametrize("reward", ["NaN", '"much"', "[1]", "1e99", "Infinity"])
def test_a_reward_that_is_none_is_a_failure_that_names_the_line(reward: str) -> None:
    with pytest.raises(ProgramFailed, match=r"its last line is .*reward"):
        result_of(f'{{"reward": {reward}}}\n'.encode())
