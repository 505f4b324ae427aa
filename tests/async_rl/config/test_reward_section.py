"""The `[reward]` section: parts and what they take over, and mistakes by their names."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.file import load_config
from async_rl.config.reward_section import RewardPart, RewardSection
from async_rl.errors import ConfigError
from tests.support.minimal_config import MINIMAL


def load(folder: Path, reward: str) -> RewardSection:
    path = folder / "run.toml"
    path.write_text(MINIMAL.replace('[reward]\nname = "math"\n', reward + "\n"))
    return load_config(path).reward


def test_parts_have_the_settings_of_the_reward_and_their_own(tmp_path: Path) -> None:
    reward = load(
        tmp_path,
        """
        [reward]
        timeout_s = 60
        num_workers = 4
        correct_at = 0.5

        [[reward.parts]]
        name = "math"

        [[reward.parts]]
        name = "regex"
        label = "format"
        weight = 0.2
        pattern = "a"
        num_workers = 1
        """,
    )
    assert reward.is_given and reward.weights == {"math": 1.0, "format": 0.2}
    math, regex = reward.single_rewards.values()
    assert list(reward.single_rewards) == ["math", "format"]
    assert (math.name, math.timeout_s, math.num_workers, math.correct_at) == ("math", 60.0, 4, None)
    assert (regex.name, regex.timeout_s, regex.num_workers, regex.pattern) == ("regex", 60.0, 1, "a")
    assert not math.parts and RewardSection.model_validate_json(regex.model_dump_json()) == regex


def test_a_reward_without_parts_is_its_own_only_one() -> None:
    reward = RewardSection(name="math", timeout_s=3)
    assert reward.single_rewards == {"math": reward} and reward.weights == {}
    assert RewardSection().single_rewards == {} and not RewardSection().is_given


@given(st.builds(RewardSection, timeout_s=st.floats(0.1, 99), num_workers=st.integers(1, 9)), st.integers(1, 9))
def test_what_a_part_sets_comes_first(section: RewardSection, num_workers: int) -> None:
    parts = (RewardPart(name="a"), RewardPart(name="b", num_workers=num_workers))
    a, b = section.model_copy(update={"parts": parts}).single_rewards.values()
    assert (a.timeout_s, b.timeout_s) == (section.timeout_s,) * 2
    assert (a.num_workers, b.num_workers) == (section.num_workers, num_workers)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ('[reward]\nname="math"\n[[reward.parts]]\nname="exact"', r"reward\.name is 'math', but there are also"),
        ('[[reward.parts]]\nname="math"\n[[reward.parts]]\nname="math"', r"\[\[reward\.parts\]\] are called 'math'"),
        ('[reward]\nname="math"\ncolumn="r"', r"reward\.column is 'r', but there are no \[\[reward\.parts\]\]"),
        ('[[reward.parts]]\nname="math"\nweigth=2', r"unknown key 'reward\.parts\.0\.weigth'.*mean 'weight'"),
        ("[[reward.parts]]\nweight=2", r"missing key 'reward\.parts\.0\.name'"),
        ('[[reward.parts]]\nname="math"\nweight=inf', r"reward\.parts\.0\.weight: Input should be"),
        ('[[reward.parts]]\nname="math"\nlabel="a b"', r"reward\.parts\.0\.label"),
        ('[reward]\nname="regex"\npattern="("', r"reward\.pattern: it is no regular expression: missing \)"),
        ('[reward]\nname="judge"\nscore_pattern="a"', r"reward\.score_pattern: it has 0 groups: put the number"),
        ('[reward]\nname="http"\nurl="host:9000/x"', r"reward\.url: it is no URL: write http://HOST:PORT/PATH"),
        ('[reward]\nname="judge"\nscore_pattern=""', r"reward\.score_pattern: it has 0 groups: put the number"),
        ('[reward]\nname="http"\nurl=""', r"reward\.url: it is no URL"),
        ('[reward]\nname="http"\nurl="http://a:99999"', r"reward\.url: it is no URL"),
        ('[reward]\nname="http"\nurl="http://u:p@a"', r"reward\.url: it contains a user or a password"),
        ('[reward]\nname="http"\ntoken_from="abc"', r"reward\.token_from: .*env:VARIABLE or file:PATH"),
        ("[reward]\ntimeout_s=3", r"reward\.name is not set, but rollout\.program"),
    ],
)
def test_a_mistake_is_named_with_its_key(tmp_path: Path, reward: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, reward)
