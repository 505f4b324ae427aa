"""Every field of TRL's configs: mapped to something that changes, without an effect, or refused by name."""

import json
import pickle
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from async_rl.api.settings import Config
from async_rl.errors import ConfigError
from async_rl.trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from async_rl.trl.arguments import MAPPED, REFUSED, RLOO_OWN, RLOO_REFUSED, WITHOUT_EFFECT
from async_rl.trl.mapping import inference_of
from tests.support import ROOT
from tests.support.tiny_model import make_tiny_model

TRL_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
ROWS = [{"prompt": f"What is {n}?", "answer": str(n)} for n in range(64)]


def length(completions: Any, **_: Any) -> list[float]:
    return [float(len(each)) for each in completions]


def other(completions: Any, **_: Any) -> list[float]:
    return [1.0 for _ in completions]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("trl"), "qwen3"))


def config_of(model: str, cls: Any = GRPOConfig, rewards: Any = (length, other), **given: Any) -> Config:
    trainer = RLOOTrainer if cls is RLOOConfig else GRPOTrainer
    args = cls(**{"output_dir": "out", "max_completion_length": 16, "report_to": []} | given)
    config: Config = trainer(model, list(rewards), args, ROWS, eval_dataset=ROWS[:4]).config
    return config


OTHERS: dict[str, Any] = {
    "output_dir": "elsewhere",
    "generation_batch_size": 16,
    "steps_per_generation": 2,
    "num_generations": 4,
    "max_steps": 5,
    "chat_template_kwargs": None,
    "use_vllm": True,
    "vllm_mode": {"use_vllm": True, "vllm_mode": "server"},
    "vllm_server_base_url": {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://a:1"},
    "vllm_server_host": {"use_vllm": True, "vllm_mode": "server", "vllm_server_host": "b"},
    "vllm_server_port": {"use_vllm": True, "vllm_mode": "server", "vllm_server_port": 9},
    "vllm_gpu_memory_utilization": {"use_vllm": True, "vllm_gpu_memory_utilization": 0.5},
    "vllm_max_model_length": {"use_vllm": True, "vllm_max_model_length": 99},
    "vllm_tensor_parallel_size": {"use_vllm": True, "vllm_tensor_parallel_size": 2},
    "vllm_enable_sleep_mode": None,
    "vllm_importance_sampling_correction": {"use_vllm": True, "vllm_importance_sampling_correction": False},
    "vllm_importance_sampling_mode": {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
    "vllm_importance_sampling_clip_max": {"use_vllm": True, "vllm_importance_sampling_clip_max": 2.0},
    "vllm_importance_sampling_clip_min": None,
    "loss_type": "dr_grpo",
    "epsilon_high": 0.28,
    "beta": 0.1,
    "entropy_coef": 0.02,
    "weight_decay": 0.1,
    "adam_beta2": 0.99,
    "use_bias_correction_kl": {"beta": 0.1, "use_bias_correction_kl": False},
    "importance_sampling_level": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "scale_rewards": "none",
    "reward_weights": [1.0, 0.5],
    "multi_objective_aggregation": "normalize_then_sum",
    "sapo_temperature_neg": {"loss_type": "sapo", "sapo_temperature_neg": 1.2},
    "sapo_temperature_pos": {"loss_type": "sapo", "sapo_temperature_pos": 1.2},
    "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 2,
    "optim": None,
    "bf16": True,
    "use_cpu": None,
    "gradient_checkpointing": None,
    "activation_checkpointing": None,
    "model_init_kwargs": {"dtype": "bfloat16"},
    "report_to": ["wandb"],
    "logging_strategy": None,
    "logging_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "num_generations_eval": {"eval_strategy": "steps", "num_generations_eval": 2},
    "save_strategy": "no",
    "save_total_limit": 3,
    "resume_from_checkpoint": None,
    "router_aux_loss_coef": None,
}
"""Values that must change the config, with what they need; None: it shows elsewhere, or not on a CPU."""

BESIDE = {"use_bias_correction_kl": {"beta": 0.1}, "num_generations_eval": {"eval_strategy": "steps"}}


@pytest.mark.parametrize("name", MAPPED)
def test_a_mapped_field_changes_the_config(name: str, model: str) -> None:
    default = MAPPED[name]
    given = OTHERS.get(
        name, not default if isinstance(default, bool) else default if isinstance(default, type) else 2 * default
    )
    if given is None:
        return
    beside = given if isinstance(given, dict) and name in given else {name: given}
    without = {key: value for key, value in beside.items() if key != name}
    if name == "num_train_epochs":
        beside = {name: 6.0}
    assert config_of(model, **beside).toml() != config_of(model, **without).toml()


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_field_without_an_effect_changes_nothing(name: str, model: str) -> None:
    default = WITHOUT_EFFECT[name]
    other = (
        {bool: True, int: 3, str: "x", list: ["x"], dict: {"x": 1}}.get(default)
        if isinstance(default, type)
        else (not default if isinstance(default, bool) else f"{default}x" if isinstance(default, str) else default + 1)
    )
    assert config_of(model, **{name: other}).toml() == config_of(model).toml()


@pytest.mark.parametrize("name", [*REFUSED, *RLOO_REFUSED])
def test_a_refused_field_is_named_with_its_reason(name: str, model: str) -> None:
    cls = RLOOConfig if name in RLOO_REFUSED else GRPOConfig
    default, reason = {**REFUSED, **RLOO_REFUSED}[name]
    other: Any = {"x": 1} if isinstance(default, type) else not default if isinstance(default, bool) else "x"
    with pytest.raises(ConfigError) as caught:
        config_of(model, cls, **{name: other})
    assert f"{name} is {other!r}: {reason}; leave it at" in str(caught.value)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "optim": ({"optim": "adafactor"}, "optim is 'adafactor': it is always AdamW"),
    "a schedule": ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type is 'polynomial': expected one of linear"),
    "its arguments": ({"lr_scheduler_kwargs": {"power": 2}}, "lr_scheduler_kwargs is {'power': 2}"),
    "a loss": ({"loss_type": "bnpo"}, "loss_type is 'bnpo': expected one of grpo, dapo"),
    "cispo": ({"loss_type": "cispo"}, "epsilon_high is None: of cispo it is the largest ratio"),
    "gspo": ({"importance_sampling_level": "sequence"}, "GSPO's is 'grpo'"),
    "groups": ({"num_generations": 3}, "not whole groups of num_generations 3"),
    "steps": (
        {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
        "expected a multiple of an optimizer step's",
    ),
    "both": ({"steps_per_generation": 2, "generation_batch_size": 8}, "say the same"),
    "max_steps": ({"steps_per_generation": 2, "max_steps": 3}, "max_steps is 3"),
    "the KL of several steps": ({"steps_per_generation": 2, "beta": 0.1}, "set use_bias_correction_kl=False"),
    "few rows": ({"per_device_train_batch_size": 1024}, "train_dataset has 64 rows, and a batch takes 128 prompts"),
    "a tracker": ({"report_to": "comet_ml"}, "report_to has 'comet_ml'"),
    "loading": ({"model_init_kwargs": {"load_in_4bit": True}}, "model_init_kwargs has load_in_4bit = True"),
    "a dtype": ({"model_init_kwargs": {"dtype": "float16"}}, "dtype 'float16': expected 'float32' or 'bfloat16'"),
    "weights": ({"reward_weights": [1.0]}, "reward_weights has 1 numbers, reward_funcs 2"),
    "a batch of several generations": (
        {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
        "expected a multiple of an optimizer step's",
    ),
    "masks that count": ({"loss_type": "grpo", "mask_truncated_completions": True}, "there TRL counts what it masks"),
    "entropy by micro-batch": ({"entropy_coef": 0.1, "gradient_accumulation_steps": 2}, "a mean over each micro-batch"),
    "a loss of the router": ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef is 0.1: there is no auxiliary loss"),
    "a setting of ours": ({"max_prompt_length": 99}, "TRL's max_prompt_length is 'prompts.max_prompt_tokens' here"),
    "a typo": ({"num_generation": 4}, "GRPOConfig has no argument 'num_generation': did you mean 'num_generations'?"),
    "several": ({"top_p": 0.9, "optim": "sgd"}, "optim is 'sgd'"),
    "the best": ({"save_strategy": "best"}, "save_strategy is 'best'"),
    "a number as text": ({"learning_rate": "1e-5"}, "learning_rate is '1e-5': expected a number"),
    "none": ({"logging_steps": None, "beta": None}, "logging_steps is None: expected a number"),
    "half a step": (
        {"gradient_accumulation_steps": 2.5},
        "gradient_accumulation_steps is 2.5: expected a whole number",
    ),
    "no number": ({"num_train_epochs": float("nan")}, "num_train_epochs is nan: expected a number"),
    "no epochs": ({"num_train_epochs": 0}, "num_train_epochs is 0, and max_steps -1: expected one of them above 0"),
    "no steps of a generation": (
        {"steps_per_generation": 0},
        "steps_per_generation is 0: expected a whole number above",
    ),
    "yes as text": ({"use_vllm": "no"}, "use_vllm is 'no': expected True or False"),
    "one weight": ({"reward_weights": 1.0}, "reward_weights is 1.0: expected a list"),
    "text for a dictionary": ({"lr_scheduler_kwargs": "cosine"}, "lr_scheduler_kwargs is 'cosine': expected a dict"),
    "an interval": ({"save_steps": 0}, "save_steps is 0: expected a whole number above 0, or a share"),
    "part of a step": ({"logging_steps": 1.5}, "logging_steps is 1.5: expected a whole number above 0"),
    "a negative warm-up": ({"warmup_steps": -1}, "warmup_steps is -1: expected 0, a number of steps"),
    "a strategy": ({"eval_strategy": "step"}, "eval_strategy is 'step': expected one of no, steps, epoch"),
    "no minimum": ({"lr_scheduler_type": "cosine_with_min_lr"}, "expected min_lr_rate or min_lr, the cosine's minimum"),
    "a revision": ({"model_init_kwargs": {"revision": "v1"}}, "model_init_kwargs has revision = 'v1'"),
    "JSON": ({"model_init_kwargs": "{x"}, "expected JSON"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_would_mean_something_else_is_refused(what: str, model: str) -> None:
    given, message = WRONG[what]
    with pytest.raises(ConfigError) as caught:
        config_of(model, **given)
    assert message in str(caught.value)


@pytest.mark.parametrize("norm", [None, 0.0])
def test_no_largest_norm_clips_nothing(norm: float | None, model: str) -> None:
    assert config_of(model, max_grad_norm=norm).optimizer.clip_grad_norm == 1e9


def test_a_cosine_has_its_minimum(model: str) -> None:
    given = {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-4, "lr_scheduler_kwargs": {"min_lr": 1e-5}}
    assert config_of(model, **given).optimizer.min_learning_rate_ratio == pytest.approx(0.1)


def test_callbacks_ask_it_what_they_ask_theirs() -> None:
    args = GRPOConfig("~/run", metric_for_best_model="reward")
    assert (args.world_size, args.process_index, args.should_save, args.greater_is_better) == (1, 0, True, True)
    assert args.output_dir == str(Path.home() / "run") and json.loads(args.to_json_string())["beta"] == 0.0
    assert pickle.loads(pickle.dumps(args)) == args == replace(args) and args.to_sanitized_dict()["min_p"] == "None"


def test_what_balances_experts_is_left_out_only_if_that_is_said(tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path / "model", "qwen3_moe"))
    with pytest.raises(ConfigError, match=r"set router_aux_loss_coef=0\.0"):
        config_of(model)
    assert config_of(model, router_aux_loss_coef=0.0).model.path == model


def test_a_deviation_of_the_batch_waits_for_it(model: str) -> None:
    modes = [
        config_of(model, scale_rewards=scale, beta=beta, use_bias_correction_kl=False).train.mode
        for scale, beta in (("group", 0.1), ("batch", 0.0), ("batch", 0.1))
    ]
    assert modes == ["periodic", "periodic", "synchronous"]


def test_rloo_is_a_sum_over_tokens(model: str) -> None:
    config = config_of(model, RLOOConfig, max_grad_norm=2.0)
    assert (config.algorithm.name, config.algorithm.normalize, config.algorithm.kl_in) == ("rloo", "constant", "reward")
    assert (config.algorithm.kl_coef, config.rollout.responses_per_prompt) == (0.05, 2)
    assert config.optimizer.clip_grad_norm == 2.0 / 16


@pytest.mark.parametrize(
    ("given", "batch"),
    [
        ({}, (1, 8, 1)),
        ({"gradient_accumulation_steps": 4}, (4, 8, 1)),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 8, "num_generations": 4}, (16, 4, 4)),
        ({"generation_batch_size": 32, "num_generations": 2}, (16, 2, 4)),
    ],
)
def test_a_batch_has_as_many_prompts_as_there(given: dict[str, Any], batch: tuple[int, int, int], model: str) -> None:
    config = config_of(model, **given)
    found = (config.prompts.prompts_per_batch, config.rollout.responses_per_prompt, config.train.steps_per_batch)
    assert found == batch and config.algorithm.old_policy == ("model" if batch[2] > 1 else "reuse")


def test_a_linear_schedule_is_theirs_step_by_step(model: str) -> None:
    from async_rl.config.train_section import OptimizerSection
    from trainer.policy.optimizer import LearningRate

    config = config_of(model, max_steps=10, warmup_steps=3, learning_rate=1e-3)
    section = OptimizerSection(**config.optimizer.model_dump())
    ours = [LearningRate(section, 10).at_iteration(step) for step in range(3, 10)]
    assert ours == pytest.approx([1e-3 * (10 - step) / 7 for step in range(3, 10)])


def test_colocated_instances_share_the_devices_of_the_trainer() -> None:
    shared, turns = (GRPOConfig("o", use_vllm=True, vllm_enable_sleep_mode=sleeps) for sleeps in (False, True))
    assert "run" not in inference_of(shared, "cpu", "o")
    found = inference_of(shared, "cuda", "o")
    assert (found["run"], found["publish"]) == ({"placement": "shared"}, {"transport": "ipc"})
    found = inference_of(turns, "npu", "o")
    assert found["run"] == {"placement": "turns"} and found["publish"]["snapshot_dir"].startswith("/dev/shm/async-rl-")


@pytest.mark.distributed
@pytest.mark.skipif(not TRL_PYTHON.exists(), reason=f"{TRL_PYTHON} is missing: `make test-peers` makes it")
def test_names_and_defaults_are_those_of_trl() -> None:
    code = """
import dataclasses, json, trl
def of(f):
    made = f.default_factory() if f.default is dataclasses.MISSING else f.default
    return getattr(made, "value", made)
both = trl.GRPOConfig, trl.RLOOConfig
print(json.dumps({c.__name__: {f.name: of(f) for f in dataclasses.fields(c)} for c in both}))
"""
    done = subprocess.run([str(TRL_PYTHON), "-c", code], capture_output=True, text=True, timeout=120)
    theirs = json.loads(done.stdout.splitlines()[-1])
    for cls in (GRPOConfig, RLOOConfig):
        ours = {each.name: each.default for each in fields(cls)}
        assert ours | {"include_for_metrics": []} == theirs[cls.__name__]


@pytest.mark.distributed
@pytest.mark.skipif(not TRL_PYTHON.exists(), reason=f"{TRL_PYTHON} is missing: `make test-peers` makes it")
def test_trls_parser_fills_it_from_a_command_line() -> None:
    words = ["--output_dir", "o", "--beta", "0.1", "--bf16", "false", "--scale_rewards", "batch", "--max_steps", "7"]
    words += ["--model_init_kwargs", '{"dtype": "float32"}', "--log_completions", "--lr_scheduler_type", "cosine"]
    words += ["--reward_weights", "1.0", "0.5"]
    code = f"""
import json, sys
from trl import TrlParser
sys.path.insert(0, {str(ROOT)!r})
from async_rl.trl import GRPOConfig
(args,) = TrlParser((GRPOConfig,)).parse_args_and_config({words!r})
print(json.dumps(args.to_dict()))
"""
    done = subprocess.run([str(TRL_PYTHON), "-c", code], capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["beta"], found["bf16"], found["scale_rewards"], found["max_steps"]) == (0.1, False, "batch", 7)
    assert found["reward_weights"] == [1.0, 0.5]
    assert found["model_init_kwargs"] == {"dtype": "float32"} and found["lr_scheduler_type"] == "cosine"


@pytest.mark.distributed
def test_importing_loads_neither_torch_nor_transformers() -> None:
    code = "import sys; import async_rl.trl; print({'torch', 'transformers', 'numpy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


def test_of_rloo_other_defaults_hold() -> None:
    assert {name: getattr(RLOOConfig(), name) for name in RLOO_OWN} == RLOO_OWN
