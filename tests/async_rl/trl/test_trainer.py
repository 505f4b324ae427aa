"""Runs of TRL's trainers here, on real parts: rewards of all kinds, logs, callbacks, evaluation, saving, going on."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PrinterCallback,
    TrainerCallback,
)

from async_rl.errors import ConfigError, RewardError
from async_rl.trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from async_rl.trl.rewards import MODEL_TIMEOUT_S, of_function, of_model
from tests.support import ROOT
from tests.support.chat_tokenizer import make_chat_model

pytest.importorskip("cloudpickle")

TRL = ROOT / ".venv-peers" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
ROWS = [{"prompt": f"Word {n}: ", "worth": n / 8} for n in range(16)]
CHATS = [{"prompt": [{"role": "user", "content": f"Word {n}"}], "worth": n / 8} for n in range(16)]
SMALL = {
    **{"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 12, "learning_rate": 1e-3},
    **{"max_steps": 2, "logging_steps": 1, "save_steps": 1, "report_to": [], "use_cpu": True},
}


def worth(completions: Any, worth: Any, **_: Any) -> list[float | None]:
    assert all(isinstance(each, str) for each in completions)
    return [None if value < 0 else value + 0.1 * place for place, value in enumerate(worth)]


async def half(prompts: Any, completion_ids: Any, **_: Any) -> list[float]:
    return [0.5 + 0.01 * len(ids) for ids in completion_ids]


class Kept(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("epoch", state.global_step))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("begin", state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        assert logs["epoch"] == state.epoch and "reward" in logs
        self.events.append(("log", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("step", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("end", state.global_step))


@pytest.mark.distributed
def test_two_weighted_rewards_train_and_are_logged_by_trls_names(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    args = GRPOConfig(str(tmp_path / "run"), reward_weights=[1.0, 0.5], **SMALL)
    kept = Kept()
    trainer = GRPOTrainer(
        str(tiny_model("qwen3", tied=True)), [worth, half], args, ROWS, callbacks=[kept, PrinterCallback]
    )
    for early in (lambda: trainer.evaluate(ROWS), trainer.save_model):
        with pytest.raises(ConfigError, match=r"nothing is trained yet in .*: call train\(\) first"):
            early()
    result = trainer.train()
    assert result.global_step == 2 and trainer.run is not None
    assert trainer.config.toml() == (trainer.run.dir / "inputs" / "run.toml").read_text()
    assert kept.events == [("begin", 0), *((e, n) for n in (1, 2) for e in ("step", "log")), ("epoch", 2), ("end", 2)]
    first, second = trainer.state.log_history
    assert first["reward"] == pytest.approx(first["rewards/worth/mean"] + 0.5 * first["rewards/half/mean"], rel=1e-5)
    assert {"loss", "grad_norm", "learning_rate", "entropy", "step_time", "completions/mean_length"} <= first.keys()
    assert (first["step"], second["step"], second["epoch"]) == (1, 2, 4 / 16)
    assert first["learning_rate"] == 1e-3 and second["learning_rate"] == 5e-4
    samples = [each for row in trainer.run.samples(100).to_dict("records") for each in [row]]
    assert len(samples) == 8 and second["num_tokens"] > first["num_tokens"] > 0
    assert trainer.save_model() == trainer.run.dir / "model" and (trainer.run.dir / "model" / "config.json").is_file()


@pytest.mark.distributed
@pytest.mark.nightly
def test_chats_are_evaluated_saved_and_go_on(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model")

    def of_messages(prompts: Any, completions: Any, **_: Any) -> list[float]:
        assert prompts[0][0]["role"] == "user" and completions[0][0]["role"] == "assistant"
        return [float(len(each[0]["content"]) % 7) for each in completions]

    def made(steps: int) -> GRPOTrainer:
        given = SMALL | {"max_steps": steps, "eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 3}
        args = GRPOConfig(str(tmp_path / "run"), lr_scheduler_type="constant", **given)
        return GRPOTrainer(str(model), of_messages, args, CHATS, eval_dataset=CHATS[:3])

    first = made(2)
    first.train()
    figures = first.evaluate()
    assert figures["eval_reward"] == figures["eval_rewards/of_messages/mean"]
    assert sum("eval_reward" in line for line in first.state.log_history) >= 2
    assert (first.save_model(str(tmp_path / "saved")) / "model.safetensors").is_file()
    second = made(4)
    assert second.train(resume_from_checkpoint=True).global_step == 4
    assert [line["step"] for line in second.state.log_history if "loss" in line] == [1, 2, 3, 4]


@pytest.mark.distributed
@pytest.mark.nightly
def test_rloo_with_adapters_is_stopped_by_a_callback(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from peft import LoraConfig

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = state.global_step == 2

    args = RLOOConfig(str(tmp_path / "run"), **SMALL | {"max_steps": 50})
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    trainer = RLOOTrainer(str(tiny_model("qwen3", tied=True)), half, args, ROWS, peft_config=lora, callbacks=[Stop])
    assert trainer.train().global_step < 50 and trainer.config.adapter.rank == 4
    logged = trainer.state.log_history[0]
    record = next(iter(trainer.run or []))
    assert logged["loss"] == pytest.approx(12 * record["loss"]) and logged["kl"] == record["kl"]


@pytest.mark.distributed
@pytest.mark.nightly
def test_a_run_is_rewarded_by_a_model_of_its_own(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("qwen3", tied=True)
    AutoModelForSequenceClassification.from_pretrained(source, num_labels=1).save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "judge")
    trainer = GRPOTrainer(
        str(source), [str(tmp_path / "judge"), half], GRPOConfig(str(tmp_path / "run"), **SMALL), ROWS
    )
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["reward"] == pytest.approx(first["rewards/judge/mean"] + first["rewards/half/mean"], rel=1e-5)


@pytest.mark.distributed
@pytest.mark.nightly
def test_the_users_error_arrives(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    def raises(completions: Any, **_: Any) -> list[float]:
        raise KeyError("mine")

    with pytest.raises(RewardError, match="mine"):
        GRPOTrainer(str(tiny_model("qwen3")), raises, GRPOConfig(str(tmp_path / "run"), **SMALL), ROWS).train()


@pytest.mark.distributed
@pytest.mark.nightly
@pytest.mark.skipif(not TRL.exists(), reason=f"{TRL} is missing: `make test-peers` makes it")
@pytest.mark.parametrize(("script", "name"), [("grpo.py", "GRPO"), ("rloo.py", "RLOO")])
def test_the_scripts_that_trl_ships_run_with_other_imports(
    script: str, name: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """In an environment that has both; the rest of TRL, its parser and its model's arguments, stays TRL's."""
    text = (TRL / "trl" / "scripts" / script).read_text()
    for each in (f"{name}Trainer", f"{name}Config"):
        theirs = re.compile(rf"( *)from trl import (.*)\b{each}(, )?")
        text, number = theirs.subn(rf"\1from async_rl.trl import {each}\n\1from trl import \2", text)
        assert number
    (tmp_path / script).write_text(text)
    (tmp_path / "mine.py").write_text("def score(completions, **_):\n    return [len(c) % 5.0 for c in completions]\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = [
        "--model_name_or_path",
        str(tiny_model("qwen3", tied=True)),
        "--dataset_name",
        "data",
        "--output_dir",
        "run",
    ]
    words += ["--reward_funcs", "mine.score", "--max_steps", "2", "--logging_steps", "1", "--report_to", "none"]
    words += ["--per_device_train_batch_size", "4", "--num_generations", "2", "--max_completion_length", "12"]
    path = os.pathsep.join([str(ROOT), str(TRL)])
    done = subprocess.run(
        [sys.executable, script, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Training completed" in done.stdout and (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_a_function_gets_what_it_takes_and_none_is_nothing() -> None:
    seen: list[dict[str, Any]] = []

    def takes_some(completions: list[str], worth: list[float], log_metric: Any) -> list[float | None]:
        log_metric("a", 1.0)
        seen.append({"completions": completions, "worth": worth})
        return [None, 2.0]

    assert of_function("", lambda **_: torch.tensor([float("nan"), 1.0]))([], [], []) == [0.0, 1.0]
    found = of_function("reward_funcs[0]", takes_some)(
        prompts=["p"] * 2, completions=["a", "b"], completion_ids=[[1]] * 2, worth=[1, 1]
    )
    assert found == [0.0, 2.0] and seen == [{"completions": ["a", "b"], "worth": [1, 1]}]
    with pytest.raises(ConfigError, match="takes trainer_state, which is in another process"):
        of_function("reward_funcs[0]", lambda completions, trainer_state: [])


def test_a_model_scores_prompt_and_completion_as_in_trl(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """The first logit of each sequence alone, without padding."""
    source = tiny_model("qwen3", tied=True)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    tokenizer = AutoTokenizer.from_pretrained(source)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = ["Word 1: a b c", "Word 22: d"]
    found = of_model(str(tmp_path), {})(prompts=["Word 1: ", "Word 22: "], completions=["a b c", "d"])
    model.config.pad_token_id = tokenizer.pad_token_id
    with torch.no_grad():
        expected = [
            float(model(**tokenizer(t, return_tensors="pt", add_special_tokens=False)).logits[0, 0]) for t in texts
        ]
    assert found == pytest.approx(expected, abs=1e-5)
    # Rows that can only be iterated over; the process that scores them loads the model first.
    rows = type("Rows", (), {"__len__": lambda _: len(ROWS), "__iter__": lambda _: iter(ROWS)})()
    trainer = GRPOTrainer(str(source), str(tmp_path), GRPOConfig("o", max_completion_length=16), rows)
    assert trainer.config.reward.timeout_s == MODEL_TIMEOUT_S


class Saves(TrainerCallback):  # type: ignore[misc]
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None: ...


class TakesModel:
    def on_log(self, args: Any, state: Any, control: Any, model: Any, logs: Any) -> None: ...


def test_another_tokenizer_in_memory_is_refused(tiny_model: Callable[..., Path]) -> None:
    """But for its padding, which no process here uses."""
    model = tiny_model("qwen3")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    args = GRPOConfig("o", max_completion_length=16)
    GRPOTrainer(str(model), half, args, ROWS, processing_class=tokenizer)
    tokenizer.chat_template = "other"
    with pytest.raises(ConfigError, match="processing_class has another chat_template"):
        GRPOTrainer(str(model), half, args, ROWS, processing_class=tokenizer)


def test_a_trainer_that_computes_something_else_is_refused(tiny_model: Callable[..., Path]) -> None:
    class Mine(GRPOTrainer):
        def compute_loss(self, *_: Any) -> None: ...

    with pytest.raises(ConfigError, match="Mine has compute_loss, which nothing calls here"):
        Mine(str(tiny_model("qwen3")), half, GRPOConfig("o", max_completion_length=16), ROWS)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a loaded model": ({"model": PretrainedConfig()}, "model is a PreTrainedConfig: give a folder"),
    "no rewards": ({"reward_funcs": []}, "reward_funcs is empty"),
    "a number": ({"reward_funcs": 3}, r"reward_funcs\[0\] is 3: expected a function"),
    "a loaded reward": (
        {"reward_funcs": SimpleNamespace(save_pretrained=1)},
        r"reward_funcs\[0\] is a loaded model: give its folder",
    ),
    "no rows": ({"train_dataset": None}, "train_dataset is missing"),
    "rows without prompts": ({"train_dataset": [{"text": "a"}]}, "expected a dictionary with a prompt"),
    "a stream": ({"train_dataset": iter(ROWS)}, "which has no length"),
    "another tokenizer": (
        {"processing_class": SimpleNamespace(name_or_path="other")},
        "processing_class is of 'other'",
    ),
    "tools": ({"tools": [print]}, "tools are a rollout program"),
    "an optimizer": ({"optimizers": (object(), None)}, "optimizers is .*: it is always AdamW"),
    "quantization": ({"quantization_config": {"load_in_4bit": True}}, "quantized base models are not trained"),
    "no LoRA": ({"peft_config": {"r": 4}}, "expected peft's LoraConfig"),
    "TRL's own config": ({"args": SimpleNamespace()}, "import GRPOConfig from async_rl.trl, too"),
    "no rows to evaluate": ({"args": GRPOConfig("o", eval_strategy="steps")}, "eval_dataset is missing: give it"),
    "a row without a prompt": ({"train_dataset": [*ROWS, {"prompt": None}]}, r"row 16 \(from 0\) is {'prompt': None}"),
    "a row of another kind": ({"train_dataset": [*ROWS, *CHATS]}, r"row 16 .* expected text in all of them"),
    "rows of another kind": ({"eval_dataset": CHATS}, r"eval_dataset, row 0 .* expected text in all of them"),
    "one callback": ({"callbacks": TrainerCallback()}, "expected a list of them"),
    "a callback on saving": ({"callbacks": [Saves]}, r"callbacks\[0\], Saves, has on_save, which does not come here"),
    "a callback with a model": ({"callbacks": [TakesModel()]}, "cannot be called at on_log: missing .* 'model'"),
    "a missing reward model": ({"reward_funcs": "/none/such"}, r"reward_funcs\[0\] '/none/such' does not exist"),
    "a section that is none": ({"settings": {"trainer": None}}, r"settings\['trainer'\] is None"),
    "a bad section": ({"settings": {"optimizer": {"learning_rat": 1}}}, "learning_rat"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_arguments_that_mean_something_else_are_refused(
    what: str, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given, message = REFUSED[what]
    usual: dict[str, Any] = {"model": str(tiny_model("qwen3")), "reward_funcs": half, "train_dataset": ROWS}
    with pytest.raises(ConfigError, match=message):
        GRPOTrainer(**usual | {"args": GRPOConfig("o", max_completion_length=16)} | given)
    assert not list(tmp_path.iterdir())


LORA: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"lora_dropout": 0.1}, "lora_dropout is 0.1: leave it at 0.0"),
    "rsLoRA": ({"use_rslora": True}, "use_rslora is True"),
    "DoRA": ({"use_dora": True}, "use_dora is True"),
    "modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    "frozen": ({"inference_mode": True}, "inference_mode is True: leave it at False"),
    "no targets": ({"target_modules": []}, "adapter.targets: "),
    "a pattern": ({"target_modules": ".*proj"}, "target_modules is '.*proj': expected 'all-linear'"),
}


@pytest.mark.parametrize("what", LORA)
def test_other_forms_of_adapters_are_refused(what: str, tiny_model: Callable[..., Path]) -> None:
    from peft import LoraConfig

    given, message = LORA[what]
    with pytest.raises(ConfigError) as caught:
        GRPOTrainer(str(tiny_model("qwen3")), half, GRPOConfig("o"), ROWS, peft_config=LoraConfig(**given))
    assert message in str(caught.value)


def test_a_script_that_was_started_as_several_processes_is_refused(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="start the script once, with python"):
        GRPOTrainer(str(tiny_model("qwen3")), half, GRPOConfig("o"), ROWS)
