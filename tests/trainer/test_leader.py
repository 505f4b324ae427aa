import pytest

from async_rl.config.sections import RolloutSection
from async_rl.errors import ConfigError
from async_rl.types import Prompt
from trainer.leader import require_fit

PROMPT = Prompt("row-7", (1, 2, 3), {})


def test_a_prompt_and_its_longest_response_must_fit_into_the_instances_model() -> None:
    rollout = RolloutSection(max_response_tokens=8)
    require_fit(rollout, PROMPT, 11)
    require_fit(rollout, PROMPT, None)
    with pytest.raises(ConfigError, match=r"prompt row-7 has 3 tokens; .* that is 11, but .* takes 10: lower .* to 2"):
        require_fit(rollout, PROMPT, 10)
