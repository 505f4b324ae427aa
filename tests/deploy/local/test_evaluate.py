"""`async-rl eval` on real parts: a tiny model, the embedded engine and a reward in its worker process."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.config.file import load_config
from async_rl.errors import ConfigError
from deploy.local.evaluate import main, require_writable, show_results
from deploy.local.evaluate_options import config_path, config_text, export_words, parse, require_reward, set_names
from tests.support.minimal_config import MINIMAL

REWARD = """
def short(prompt, responses, row):
    return [1.0 if len(r.text) < row["limit"] else 0.0 for r in responses]


short.correct_at = 1.0
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "reward.py").write_text(REWARD)
    kinds = [{"limit": 99, "data_source": "even"}, {"limit": 8, "data_source": "odd"}]
    rows = [{"prompt": f"Word {i}: ", **kinds[i % 2]} for i in range(6)]
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluate(model: Path, data: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    reward = f"python:{data.parent / 'reward.py'}:short"
    command = [
        sys.executable,
        "-m",
        "deploy.local.evaluate",
        str(model),
        "--data",
        str(data),
        "--reward",
        reward,
        *arguments,
    ]
    command += ["--prompts.chat_template", "false"]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)


@pytest.mark.distributed
def test_a_model_is_evaluated_from_start_to_figures(tiny_model: Callable[..., Path], data: Path) -> None:
    before = set(psutil.pids())
    out = data.parent / "results.json"
    truncated = ("--top-p", "0.9", "--top-k", "20")
    more = ("--max-tokens", "16", "--max-prompts", "5", "--out", str(out), "--json")
    done = evaluate(tiny_model(), data, "--samples", "4", *truncated, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(out.read_text()) == result and result["model"] == str(tiny_model())
    (words,) = result["sets"]
    assert (words["top_p"], words["top_k"]) == (0.9, 20)
    assert (words["set"], words["num_prompts"], words["total_prompts"], words["num_samples"]) == ("words", 5, 5, 4)
    assert 3 / 5 <= words["pass@1"] <= words["pass@2"] <= words["pass@4"] <= 1.0
    assert words["reward_mean"] == pytest.approx(words["pass@1"]) == pytest.approx(words["avg@4"])
    low, high = words["intervals"]["avg@4"]
    assert 0 <= low < words["avg@4"] < high <= 1 or high == words["avg@4"] == 1
    assert words["sources"].keys() == {"even", "odd"} and words["sources"]["even"]["avg@4"] == 1.0
    assert 1 <= words["response_tokens_mean"] <= 16 and 0 <= words["truncated_share"] <= 1
    assert "pass@4" in done.stdout.rsplit("\n", 2)[0], "the table comes before the JSON object"
    ours = [pid for pid in set(psutil.pids()) - before if _works_on(pid, str(data))]
    assert ours == []


@pytest.mark.distributed
def test_adapters_are_evaluated_with_their_base(tiny_model: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    """Their greedy responses are those that peft and transformers give."""
    base = tiny_model()
    torch.manual_seed(int(os.environ.get("TEST_SEED", "0")))
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, factor in adapted.named_parameters():
            if "lora_B" in name:
                factor.normal_(0, 0.5)
    # The path that peft notes is relative, or gone, where they are evaluated elsewhere.
    adapted.peft_config["default"].base_model_name_or_path = "gone"
    adapted.save_pretrained(tmp_path / "adapters")
    (data.parent / "reward.py").write_text(
        "def short(prompt, responses, row):\n    return [float(sum(r.token_ids)) for r in responses]\n"
    )
    words = ("--temperature", "0", "--max-tokens", "8", "--base", str(base), "--json")
    done = evaluate(tmp_path / "adapters", data, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    tokenizer = AutoTokenizer.from_pretrained(base)

    def mean_of(model: Any) -> float:
        sums = []
        for line in data.read_text().splitlines():
            prompt = tokenizer(json.loads(line)["prompt"], return_tensors="pt").input_ids
            tokens = model.generate(input_ids=prompt, do_sample=False, max_new_tokens=8)[0, prompt.shape[1] :]
            sums.append(float(tokens.sum()))
        return sum(sums) / len(sums)

    assert result["model"] == str(tmp_path / "adapters")
    assert result["sets"][0]["reward_mean"] == pytest.approx(mean_of(adapted))
    with adapted.disable_adapter():
        assert mean_of(adapted) != pytest.approx(result["sets"][0]["reward_mean"])
    # A config that starts from them is evaluated with them, too.
    reward = f"python:{data.parent / 'reward.py'}:short"
    options = parse([str(base), "--data", str(data), "--reward", reward, *words[:4]])[0]
    config = tmp_path / "run.toml"
    config.write_text(
        f'{config_text(options, tmp_path / "run")}[adapter]\nrank = 2\nalpha = 8\npath = "{tmp_path / "adapters"}"\n'
    )
    command = [sys.executable, "-m", "deploy.local.evaluate", str(config), "--prompts.chat_template=false", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    again = json.loads(done.stdout.splitlines()[-1])
    assert again["model"] == str(config) and again["sets"][0]["reward_mean"] == result["sets"][0]["reward_mean"]


def test_adapters_of_a_config_that_do_not_fit_are_refused(
    tiny_model: Callable[..., Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_data = ("--data", str(data), "--reward", "exact", "--adapter.rank=2", "--adapter.path=gone")
    assert main([str(tiny_model()), *of_data]) == 2
    assert "'gone' (adapter.path) has no adapter_config.json" in capsys.readouterr().err
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main([str(tmp_path), *of_data]) == 2
    assert f"adapter.path 'gone' stands beside '{tmp_path}'" in capsys.readouterr().err


def test_of_runs_checkpoints_and_adapters_a_checkpoint_is_made(tmp_path: Path) -> None:
    def words(name: str, *options: str, files: Sequence[str] = (), folders: Sequence[str] = ()) -> list[str] | None:
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        for folder in folders:
            (path / folder).mkdir()
        for file in files:
            (path / file).touch()
        return export_words(parse([str(path), "--data", "x.jsonl", *options])[0])

    adapters = ["adapter_config.json", "adapter_model.safetensors"]
    run, model = ["config.json", "metrics.jsonl"], ["config.json", "model.safetensors"]
    named = str(tmp_path / "adapters")
    assert words("adapters", "--base", "b", files=adapters) == [named, "--merge", "--dtype", "float32", "--model", "b"]
    assert words("run", files=run, folders=["checkpoints"]) == [str(tmp_path / "run"), "--merge"]
    assert words("started", files=["config.json"], folders=["checkpoints"]) == [str(tmp_path / "started"), "--merge"]
    assert words("iteration-000010", files=["manifest.json"]) == [str(tmp_path / "iteration-000010"), "--merge"]
    assert words("model", files=model, folders=["checkpoints"]) is None
    assert export_words(parse(["Qwen/Qwen3-0.6B", "--data", "x.jsonl"])[0]) is None
    assert export_words(parse(["n" * 300, "--data", "x.jsonl"])[0]) is None
    with pytest.raises(ConfigError, match=r"--base is for adapters and runs, and '.*model' is neither: leave it out"):
        words("model", "--base", "b")
    with pytest.raises(ConfigError, match=r"--base stands beside the config 'my\.toml'"):
        config_path(parse(["my.toml", "--base", "b"])[0])


@pytest.mark.distributed
def test_the_log_that_an_error_names_is_there(tiny_model: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    nobody = ("--instances", "http://127.0.0.1:9", "--pool.timeout_s", "1")
    done = evaluate(tiny_model(), data, *nobody, TMPDIR=str(tmp_path))
    assert done.returncode == 1 and "NoInstanceLeft" in done.stderr, done.stderr
    (log,) = re.findall(r"its log is (\S+?)\)", done.stderr)
    assert "NoInstanceLeft" in Path(log).read_text()


@pytest.mark.distributed
def test_a_value_that_cannot_work_is_named_before_anything_starts(tmp_path: Path, data: Path) -> None:
    done = evaluate(tmp_path, data, "--samples", "0")
    assert done.returncode == 2
    assert "evaluation.sets.0.num_samples: Input should be greater than or equal to 1 (got 0)" in done.stderr


def test_options_become_a_config_with_one_set(tmp_path: Path) -> None:
    words = [
        '/models/"é𝄞"',
        "--data",
        "data/held out.jsonl",
        "--reward",
        "math",
        "--samples",
        "8",
        "--temperature",
        "0",
    ]
    options, overrides = parse([*words, "--instances", "http://a:1,http://b:2", "--prompts.columns.prompt", "question"])
    path = tmp_path / "evaluation.toml"
    path.write_text(config_text(options, tmp_path))
    config = load_config(path, overrides)
    assert (config.model.path, config.prompts.columns) == ('/models/"é𝄞"', {"prompt": "question"})
    assert config.pool.instances == ("http://a:1", "http://b:2")
    (the_set,) = config.evaluation.sets
    assert (the_set.name, the_set.num_samples, the_set.temperature, the_set.max_prompts) == ("held-out", 8, 0.0, None)


def test_a_program_that_rewards_itself_needs_no_reward(tmp_path: Path) -> None:
    words = ["model", "--data", "rows.jsonl", "--program", "python:environment.py:rollout", "--max-tokens", "99"]
    path = tmp_path / "evaluation.toml"
    path.write_text(config_text(parse(words)[0], tmp_path))
    config = load_config(path)
    assert (config.rollout.program, config.rollout.max_response_tokens) == ("python:environment.py:rollout", 99)
    assert config.reward.name is None
    path.write_text(config_text(parse(words[:3])[0], tmp_path))
    with pytest.raises(ConfigError, match=r"reward\.name is not set, but rollout\.program = 'single_turn' needs"):
        load_config(path)


def test_a_set_is_called_after_its_source_and_no_two_alike() -> None:
    sources = ["a/b/aime 24.parquet", "reasoning-gym:spell_backward", "x.jsonl", "y/x.jsonl", "z/x.jsonl", ""]
    sources += ["hf:a/b", "hf:a/b:main:test[:100]", "hf:a/b:test[10:20]"]
    names = ["aime-24", "spell_backward", "x", "x-2", "x-3", "data", "a-b", "test-100", "test-10-20"]
    assert set_names(sources) == names


def test_every_source_is_a_set_that_is_sampled_as_the_options_say(tmp_path: Path) -> None:
    options, _ = parse(["m", "--data", "a.jsonl", "--data", "b/a.jsonl", "--reward", "math", "--top-p", "0.95"])
    path = tmp_path / "evaluation.toml"
    path.write_text(config_text(options, tmp_path))
    sets = load_config(path).evaluation.sets
    assert [(each.name, each.source) for each in sets] == [("a", "a.jsonl"), ("a-2", "b/a.jsonl")]
    assert {(each.top_p, each.top_k, each.num_samples, each.temperature) for each in sets} == {(0.95, 0, 1, 1.0)}


def test_a_config_stands_for_all_options_that_set_keys() -> None:
    assert config_path(parse(["a/run.toml", "--model.path", "x", "--json"])[0]) == Path("a/run.toml")
    assert config_path(parse(["a/model", "--data", "x.jsonl"])[0]) is None
    with pytest.raises(ConfigError, match=r"--top-k stands beside the config 'run\.toml'.* set its key"):
        config_path(parse(["run.toml", "--top-k", "0"])[0])
    with pytest.raises(ConfigError, match="--data is missing: name what 'model' is evaluated on"):
        config_path(parse(["model"])[0])


def test_a_model_without_anything_that_scores_is_told_of_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--data", "x.jsonl"]) == 2
    assert "--reward is missing: name what scores the responses, such as --reward math" in capsys.readouterr().err
    for words in (["--reward", "math"], ["--program", "python:a.py:b"], ["--reward.parts", "[{name='math'}]"]):
        require_reward(*parse(["m", "--data", "x.jsonl", *words]))


def test_a_file_for_results_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    require_writable(tmp_path / "new.json")
    with pytest.raises(ConfigError, match="is a directory: name a file in it"):
        require_writable(tmp_path)
    with pytest.raises(ConfigError, match="its directory is not there or cannot be written to"):
        require_writable(tmp_path / "none" / "new.json")


def test_the_table_has_intervals_and_a_column_for_each_source() -> None:
    source = {"num_prompts": 2, "avg@4": 0.5, "intervals": {"avg@4": [0.25, 0.75]}}
    line = {
        "set": "[b]x",
        "num_prompts": 4,
        "avg@4": 0.25,
        "truncated_share": 0.0,
        "intervals": {"avg@4": [0.1, 1 / 3]},
    }
    console = Console(width=120, record=True, file=StringIO())
    show_results(console, [{**line, "sources": {"": source, "gsm8k": source}}, {"set": "y", "reward_mean": -0.5}])
    text = console.export_text()
    lines = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    rows = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}
    assert rows["avg@4"] == ["0.25 [0.1, 0.333]", "0.5 [0.25, 0.75]", "0.5 [0.25, 0.75]", ""]
    assert rows["reward_mean"] == ["", "", "", "-0.5"] and "intervals" not in rows
    assert "[b]x: other" in text and "[b]x: gsm8k" in text


def _works_on(pid: int, word: str) -> bool:
    try:
        return any(word in argument for argument in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


@pytest.mark.parametrize("option", ["--temperature", "--top-p"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_is_no_number_is_named_by_its_key(
    option: str, value: str, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--data", str(data), "--reward", "exact", option, value]) == 2
    said = capsys.readouterr().err
    assert option.removeprefix("--").replace("-", "_") in said and "not valid TOML" not in said


def test_a_config_without_a_set_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL.replace("runs/x", str(tmp_path / "run")))
    assert main([str(path)]) == 2
    assert "has no [[evaluation.sets]]" in capsys.readouterr().err and not (tmp_path / "run").exists()
