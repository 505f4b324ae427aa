"""The `[reward]` section: parts and what they take over, and mistakes by their names."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.checks.preflight.reward import require_reward
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

        [[reward.parts]]
        name = "math"

        [[reward.parts]]
        name = "regex"
        label = "format"
        weight = 0.2
        num_workers = 1
        options = { pattern = "a" }
        """,
    )
    assert reward.is_given and reward.weights == {"math": 1.0, "format": 0.2}
    math, regex = reward.single_rewards.values()
    assert list(reward.single_rewards) == ["math", "format"]
    assert (math.name, math.timeout_s, math.num_workers) == ("math", 60.0, 4)
    assert (regex.name, regex.timeout_s, regex.num_workers, regex.options) == ("regex", 60.0, 1, {"pattern": "a"})
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


def of(name: str, **options: object) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in options.items()]
    return "\n".join(["[reward]", f'name = "{name}"', "[reward.options]", *lines])


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ('[reward]\nname="math"\n[[reward.parts]]\nname="exact"', r"reward\.name is 'math', but there are also"),
        ('[[reward.parts]]\nname="math"\n[[reward.parts]]\nname="math"', r"\[\[reward\.parts\]\] are called 'math'"),
        (
            '[reward]\nname="math"\ncolumn="r"',
            r"reward\.column is \"r\" and has no effect here: set \[\[reward\.parts\]\]",
        ),
        ('[[reward.parts]]\nname="math"\nweigth=2', r"unknown key 'reward\.parts\.0\.weigth'.*mean 'weight'"),
        ("[[reward.parts]]\nweight=2", r"missing key 'reward\.parts\.0\.name'"),
        ('[[reward.parts]]\nname="math"\nweight=inf', r"reward\.parts\.0\.weight: Input should be"),
        ('[[reward.parts]]\nname="math"\nlabel="a b"', r"reward\.parts\.0\.label"),
        (of("regex", pattern="("), r"reward\.options\.pattern: it is no regular expression: missing \)"),
        (of("regex", match="some"), r"reward\.options\.match: Input should be 'full' or 'search' \(got 'some'\)"),
        (of("code", test_timeout_s=0), r"reward\.options\.test_timeout_s: Input should be greater than 0"),
        (of("judge", score_pattern="a"), r"reward\.options\.score_pattern: it has 0 groups: put the number"),
        (of("judge", score_pattern=""), r"reward\.options\.score_pattern: it has 0 groups: put the number"),
        (of("judge", url="http://a"), r"reward\.options\.model: it is missing, .*\.rubric: it is missing"),
        (of("judge", url="http://a", model="m", rubric="", min_score=1), "min_score is 1 and max_score 1: the first"),
        (of("http"), r"'http' has the options url, token_from, correct_at: .*reward\.options\.url: it is missing"),
        (of("http", url="host:9000/x"), r"reward\.options\.url: it is no URL: write http://HOST:PORT/PATH"),
        (of("http", url=""), r"reward\.options\.url: it is no URL"),
        (of("http", url="http://a:99999"), r"reward\.options\.url: it is no URL"),
        (of("http", url="http://u:p@a"), r"options\.url: it contains a user or a password.*got 'http://\*\*\*@a'"),
        (
            of("http", token_from="abc"),
            r"reward\.options\.token_from: expected env:VARIABLE or .* \(got '\*\*\*'\)",
        ),
        (of("math", url="http://a"), r"'math' has the options none: correct reward\.options\.url: Extra"),
        (
            '[reward.options]\na=1\n[[reward.parts]]\nname="regex"',
            r"'regex': \[reward\.options\], which it takes over: .*\.options\.a: Extra",
        ),
        (
            '[reward.options]\ntest_timeout_s=1\n[[reward.parts]]\nname="code"\n[[reward.parts]]\nname="f1"',
            r"^[^\n]*'f1': \[reward\.options\], which it takes over: [^\n]* write options of one part below it[^\n]*$",
        ),
        ('[[reward.parts]]\nname="http"\noptions.url="a"', r"'http': .* reward\.options\.url: it is no URL"),
        (
            '[reward]\nname="http"\nurl="http://a"',
            r"an earlier async-rl's reward\.url is 'reward\.options\.url'",
        ),
        ("[reward]\ntimeout_s=3", r"reward\.name is not set, but rollout\.program"),
    ],
)
def test_a_mistake_is_named_with_its_key_and_once(tmp_path: Path, reward: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_reward(load(tmp_path, reward))
