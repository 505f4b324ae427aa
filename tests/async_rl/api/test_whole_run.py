"""A run from Python on real parts: what is given goes through all processes and comes back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import async_rl
from async_rl.errors import ConfigError, RewardError

pytestmark = pytest.mark.distributed

pytest.importorskip("cloudpickle")

ROWS = [{"prompt": f"Word {number}: ", "worth": number / 8} for number in range(8)]

SMALL: dict[str, Any] = {
    "prompts": {"prompts_per_batch": 2, "max_prompt_tokens": 64, "chat_template": False},
    "rollout": {"responses_per_prompt": 2, "max_response_tokens": 8},
    "checkpoint": {"every": 1},
    "tracking": {"trackers": []},
}


def worth_more(by: float) -> Callable[..., Any]:
    def reward(prompt: Any, responses: Any, row: Any) -> list[float]:
        return [row["worth"] + by + 0.01 * number for number, _ in enumerate(responses)]

    return reward


@pytest.fixture(scope="module")
def run(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("whole") / "run"
    model, settings = tiny_model("qwen3", tied=True), SMALL | {"train": {"iterations": 2}}
    return async_rl.train(model, iter_with_length(ROWS), worth_more(1.0), out, quiet=True, **settings).wait()


def iter_with_length(rows: list[Any]) -> Any:
    return type("Rows", (), {"__len__": lambda self: len(rows), "__iter__": lambda self: iter(rows)})()


def test_the_trainer_gets_the_rewards_of_a_closure(run: Any) -> None:
    assert [record["iteration"] for record in run] == [0, 1] and run.state == "finished"
    samples = run.samples(100).to_dict("records")
    assert samples and all(1.0 <= sample["reward"] <= 1.0 + 7 / 8 + 0.01 for sample in samples)
    assert {"reward_mean", "seconds"} <= set(run.metrics.columns)
    assert len(run.samples(1, order="worst")) == 1 and len(run.evaluations) == 0
    with pytest.raises(ConfigError, match="order is 'wrost'"):
        run.samples(order="wrost")


def test_its_page_is_one_file_in_a_frame(run: Any, tmp_path: Path) -> None:
    page = run.plot()
    assert page._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html') and "Word" in page.html
    assert page.save(tmp_path / "page.html").read_text() == page.html and repr(page).startswith("<Page of 0.1 MB")


@pytest.mark.nightly
def test_its_newest_checkpoint_is_evaluated_by_its_own_reward_exported_and_shown_live(run: Any, tmp_path: Path) -> None:
    figures = run.evaluate(ROWS[:2], samples=2, max_tokens=4, quiet=True)
    assert figures["reward_mean"] == pytest.approx(1.0 + 0.5 / 8 + 0.005)
    other = async_rl.evaluate(run.dir / "model", ROWS[:2], lambda p, r, row: [0.5] * len(r), max_tokens=4, quiet=True)
    assert other["reward_mean"] == 0.5
    assert (run.export(tmp_path / "exported") / "model.safetensors").is_file()
    dashboard = run.dashboard()
    assert dashboard.url.startswith("http://127.0.0.1:") and run.dashboard() is dashboard
    dashboard.close()
    assert not dashboard.is_served


@pytest.mark.nightly
def test_it_goes_on_with_its_own_reward_and_not_with_another(run: Any) -> None:
    opened = async_rl.open_run(run.dir)
    assert [record["iteration"] for record in opened.resume(quiet=True, train={"iterations": 3})] == [0, 1, 2]
    assert [record["iteration"] for record in opened.resume(reward=worth_more(1.0), train={"iterations": 4})][-1] == 3
    with pytest.raises(ConfigError, match=r"reward"):
        opened.resume(reward=worth_more(2.0), train={"iterations": 5}).wait()


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (lambda prompt, responses, row: [row["none"] for _ in responses], r"KeyError: 'none'"),
    "is NaN": (lambda prompt, responses, row: [float("nan") for _ in responses], r"it returned nan among its values"),
    "hangs": (lambda prompt, responses, row: __import__("time").sleep(300), r"no answer within reward.timeout_s = 2 s"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("wrong", WRONG)
def test_a_reward_that_is_wrong_ends_the_run_with_its_own_frames(
    wrong: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    reward, said = WRONG[wrong]
    section = {"name": reward, "timeout_s": 2, "max_attempts": 1}
    settings = SMALL | {"train": {"iterations": 1}}
    run = async_rl.train(tiny_model("qwen3", tied=True), ROWS, section, tmp_path / "run", quiet=True, **settings)
    with pytest.raises(RewardError, match=said) as raised:
        run.wait()
    assert ("test_whole_run.py" in str(raised.value)) == (wrong != "is NaN")
