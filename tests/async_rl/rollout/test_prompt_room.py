import pytest

from async_rl.config.rollout_section import RolloutSection
from async_rl.errors import ConfigError
from async_rl.rollout.prompt_room import require_fit, require_len, require_room
from async_rl.types import Prompt

PROMPT = Prompt("row-7", (1, 2, 3), {})


def test_a_prompt_and_its_longest_response_must_fit_into_the_instances_model() -> None:
    rollout = RolloutSection(max_response_tokens=8)
    require_fit(rollout, PROMPT, 11)
    require_fit(rollout, PROMPT, None)
    with pytest.raises(ConfigError, match=r"prompt row-7 has 3 tokens; .* that is 11, but .* takes 10: lower .* to 2"):
        require_fit(rollout, PROMPT, 10)


def test_a_program_needs_room_for_a_turn_and_instances_that_take_all_that_may_be_before_it() -> None:
    rollout = RolloutSection(program="python:x.py:f", max_response_tokens=1000)
    assert require_room(rollout, PROMPT, 4) == 4
    assert require_room(rollout, PROMPT, None) == 4
    assert require_room(rollout.model_copy(update={"max_context_tokens": 90}), PROMPT, 100) == 90
    with pytest.raises(ConfigError, match=r"prompt row-7 has 3 tokens, .* at most 3 .*: lower .* to 2"):
        require_room(rollout, PROMPT, 3)


def test_what_an_instance_has_to_take_is_a_response_or_of_a_program_a_turn() -> None:
    assert require_len(RolloutSection(max_response_tokens=8), PROMPT, 11) == 11
    with pytest.raises(ConfigError, match="that is 11"):
        require_len(RolloutSection(max_response_tokens=8), PROMPT, 10)
    program = RolloutSection(program="python:x.py:f", max_response_tokens=1000, max_context_tokens=90)
    assert require_len(program, PROMPT, 90) == 90
