"""`async_rl.evaluation`, the program, against running instances."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.file import parse_config
from async_rl.config.sections import Config
from async_rl.errors import ConfigError, InstanceError, StaleWeights, WriteFailed
from async_rl.evaluation.__main__ import evaluate, main

REWARD = """
async def score(prompt, responses, row):
    return [row["reward"]] * len(responses)


score.correct_at = 1.0
"""


@pytest.fixture
def make_config(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Config]:
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"Word {i}", "reward": i % 2, "topic": "words"} for i in range(4)]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(*instances: Any, **sections: Any) -> Config:
        tree = {
            "run": {"dir": str(tmp_path / "run")},
            "model": {"path": str(tiny_model())},
            "prompts": {"source": "train.jsonl", "prompts_per_batch": 8, "chat_template": False},
            "rollout": {"max_response_tokens": 8},
            "reward": {"name": f"python:{tmp_path / 'reward.py'}:score"},
            "pool": {"instances": [instance.url for instance in instances], "timeout_s": 5},
            "train": {"iterations": 1},
            "evaluation": {"sets": [{"name": "words", "source": str(tmp_path / "words.jsonl"), "num_samples": 2}]},
        }
        return parse_config(tree | sections, source="test")

    return make


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.distributed
def test_what_running_instances_serve_is_evaluated_under_its_own_version(instances, make_config, tmp_path) -> None:
    config = make_config(*instances({"version": "step-9"}, {"version": "step-9"}))
    asyncio.run(evaluate(config, tmp_path / "out", None))
    (result,) = lines(tmp_path / "out" / "results.jsonl")
    assert (result["set"], result["weight_version"], result["num_prompts"]) == ("words", "step-9", 4)
    assert result["pass@1"] == result["pass@2"] == 0.5
    samples = lines(tmp_path / "out" / "responses.jsonl")
    assert [sample["row"]["prompt"] for sample in samples] == [f"Word {i}" for i in range(4)]
    assert [{each["reward"] for each in sample["responses"]} for sample in samples] == [{0}, {1}, {0}, {1}]
    assert all(len(sample["responses"]) == 2 and sample["responses"][0]["text"] for sample in samples)
    assert lines(tmp_path / "out" / "progress.jsonl") == [{"set": "words", "total_prompts": 4}] * 4


@pytest.mark.distributed
def test_only_a_prompt_that_leaves_no_room_for_a_response_is_refused(instances, make_config, tmp_path) -> None:
    config = make_config(*instances({"version": "step-9", "max_model_len": 16}))
    asyncio.run(evaluate(config, tmp_path / "fits", None))
    with (tmp_path / "words.jsonl").open("a") as rows:
        rows.write(json.dumps({"prompt": "Word Word Word 17", "reward": 1}) + "\n")
    with pytest.raises(ConfigError, match=r"set 'words': prompt 4 has .* tokens; .* model takes 16: lower"):
        asyncio.run(evaluate(config, tmp_path / "out", None))
    assert lines(tmp_path / "out" / "progress.jsonl") == [], "before anything is sampled"


def test_the_directory_of_a_run_is_left_alone(make_config, tmp_path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "samples.jsonl").write_text('{"iteration": 0}\n')
    with pytest.raises(ConfigError, match=r"run' is the directory of a run: name another one"):
        asyncio.run(evaluate(make_config(), run_dir, None))
    assert [path.name for path in run_dir.iterdir()] == ["samples.jsonl"]


@pytest.mark.distributed
def test_instances_of_different_versions_are_not_mixed(instances, make_config, tmp_path) -> None:
    config = make_config(*instances({"version": "step-9"}, {"version": "step-8"}))
    with pytest.raises(StaleWeights, match=r"different weight versions, .*step-9.*step-8"):
        asyncio.run(evaluate(config, tmp_path / "out", None))


@pytest.mark.distributed
def test_an_evaluation_goes_on_without_instances_that_do_not_serve(instances, make_config, tmp_path) -> None:
    sound, refusing, gone = instances({"version": "step-9"}, {"health": 503}, {})
    gone.kill()
    config = make_config(sound, refusing, gone)
    asyncio.run(evaluate(config, tmp_path / "out", None))
    (result,) = lines(tmp_path / "out" / "results.jsonl")
    assert (result["num_prompts"], result["weight_version"]) == (4, "step-9")
    assert len(sound.seen()["requests"]) == 4 and refusing.seen()["requests"] == []


@pytest.mark.distributed
def test_prompts_that_fail_fail_the_evaluation(instances, make_config, tmp_path) -> None:
    (tmp_path / "words.jsonl").write_text('{"prompt": "Word", "reward": "none"}\n{"prompt": "Word", "reward": 1}\n')
    with pytest.raises(InstanceError, match=r"1 of 2 prompts could not be evaluated; the first one: .*reward"):
        asyncio.run(evaluate(make_config(*instances({})), tmp_path / "out", None))
    assert not (tmp_path / "out" / "results.jsonl").exists()


def test_a_config_without_a_set_is_refused(make_config, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.sets is empty"):
        asyncio.run(evaluate(make_config(evaluation={}), tmp_path / "out", None))


def test_results_that_cannot_be_written_are_named(make_config, tmp_path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "out" / "progress.jsonl").mkdir(parents=True)
    for out in ("file", "file/out", "out"):
        with pytest.raises(WriteFailed, match=f"cannot write .*{out}"):
            asyncio.run(evaluate(make_config(), tmp_path / out, None))


def test_bad_input_ends_the_program_with_2(tmp_path) -> None:
    assert main([str(tmp_path / "none.toml"), "--out", str(tmp_path)]) == 2
