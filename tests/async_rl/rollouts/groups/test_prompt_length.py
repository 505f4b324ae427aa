import pytest

from async_rl.config.rollout_section import ProgramOptions, RolloutSection
from async_rl.errors import ConfigError
from async_rl.method.types import Prompt
from async_rl.rollouts.groups.prompt_length import require_len

PROMPT = Prompt("row-7", (1, 2, 3), {})


def test_a_prompt_and_its_longest_response_must_fit_into_the_instances_model() -> None:
    rollout = RolloutSection(max_response_tokens=8)
    assert require_len(rollout, PROMPT, 11) == require_len(rollout, PROMPT, None) == 11
    with pytest.raises(ConfigError, match=r"prompt row-7 has 3 tokens; .* that is 11, but .* takes 10: lower .* to 2"):
        require_len(rollout, PROMPT, 10)


def test_a_program_needs_room_for_a_turn_and_instances_that_take_all_that_may_be_before_it() -> None:
    rollout = RolloutSection(program="python:x.py:f", max_response_tokens=1000)
    assert require_len(rollout, PROMPT, 4) == require_len(rollout, PROMPT, None) == 4
    assert require_len(rollout.model_copy(update={"options": ProgramOptions(max_context_tokens=90)}), PROMPT, 100) == 90
    with pytest.raises(ConfigError, match=r"prompt row-7 has 3 tokens, .* at most 3 .*: lower .* to 2"):
        require_len(rollout, PROMPT, 3)
