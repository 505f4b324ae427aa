"""The fields of TRL 1.16's `GRPOConfig` and `RLOOConfig`, those of transformers' TrainingArguments included.

Each is mapped (`mapping.py`), has no effect here, or is refused unless it has its default. A test compares names and
defaults with TRL's own.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field, fields, make_dataclass
from functools import wraps
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from async_rl.config.keys import nearest
from async_rl.config.other_names import TRL, translated
from async_rl.errors import ConfigError

Default = Any
"""Of a field; a type stands for None as the default of a field of that type."""

MAPPED: Final[Mapping[str, Default]] = {
    "output_dir": str,
    # The batch.
    **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "generation_batch_size": int},
    **{"steps_per_generation": int, "num_generations": 8, "num_train_epochs": 3.0, "max_steps": -1, "seed": 42},
    # Rollouts.
    **{"max_completion_length": 512, "temperature": 1.0, "chat_template_kwargs": dict},
    # Instances.
    **{"use_vllm": False, "vllm_mode": "colocate", "vllm_server_base_url": str, "vllm_server_host": "0.0.0.0"},
    **{"vllm_server_port": 8000, "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": int},
    **{"vllm_tensor_parallel_size": 1, "vllm_enable_sleep_mode": False},
    # The algorithm.
    **{"loss_type": "dapo", "beta": 0.0, "use_bias_correction_kl": True, "epsilon": 0.2, "epsilon_high": float},
    **{"importance_sampling_level": "token", "scale_rewards": "group", "reward_weights": list},
    **{"multi_objective_aggregation": "sum_then_normalize", "mask_truncated_completions": False, "entropy_coef": 0.0},
    **{"sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0, "vllm_importance_sampling_correction": True},
    **{"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0},
    "vllm_importance_sampling_clip_min": float,
    # The optimizer and the model.
    **{"learning_rate": 1e-6, "lr_scheduler_type": "linear", "lr_scheduler_kwargs": dict, "warmup_steps": 0.0},
    **{"optim": "adamw_torch_fused", "weight_decay": 0.0, "adam_beta2": 0.999, "max_grad_norm": 1.0},
    "router_aux_loss_coef": float,
    **{"bf16": bool, "use_cpu": False, "gradient_checkpointing": True},
    **{"activation_checkpointing": bool, "model_init_kwargs": dict},
    # What is written.
    **{"report_to": "none", "project": "huggingface", "logging_strategy": "steps", "logging_steps": 10.0},
    **{"eval_strategy": "no", "eval_steps": float, "num_generations_eval": int},
    **{"save_strategy": "steps", "save_steps": 500.0, "save_total_limit": int, "resume_from_checkpoint": str},
}

WITHOUT_EFFECT: Final[Mapping[str, Default]] = {
    # How it is computed.
    **{"average_tokens_across_devices": True, "bf16_full_eval": False, "fp16_full_eval": False, "tf32": bool},
    **{"activation_checkpointing_kwargs": dict, "torch_compile": False},
    **{"gradient_checkpointing_kwargs": dict, "torch_compile_backend": str, "torch_compile_mode": str},
    **{"use_liger_kernel": False, "liger_kernel_config": dict, "use_cache": False, "torch_empty_cache_steps": int},
    **{"full_determinism": False, "pad_to_multiple_of": "auto", "cache_implementation": str, "disable_dropout": False},
    **{"ds3_gather_for_generation": True, "use_transformers_continuous_batching": False},
    **{"transformers_continuous_batching_config": dict, "use_transformers_paged": False},
    **{"vllm_server_timeout": 240.0, "vllm_group_port": 51216, "vllm_model_impl": "vllm"},
    **{"dataloader_num_workers": 0, "dataloader_pin_memory": True, "dataloader_persistent_workers": False},
    **{"dataloader_prefetch_factor": int, "dataloader_multiprocessing_context": str, "dataloader_in_order": True},
    **{"dataloader_drop_last": False, "remove_unused_columns": False, "length_column_name": "length"},
    **{"ddp_find_unused_parameters": bool, "ddp_bucket_cap_mb": int, "ddp_broadcast_buffers": bool},
    **{"ddp_static_graph": bool, "ddp_backend": str, "ddp_timeout": 1800, "local_rank": -1},
    # What is shown and kept.
    **{"logging_first_step": False, "log_on_each_node": True, "logging_nan_inf_filter": True},
    **{"include_num_input_tokens_seen": "no", "log_level": "passive", "log_level_replica": "warning"},
    **{"disable_tqdm": bool, "run_name": str, "debug": "", "skip_memory_metrics": True, "log_completions": False},
    **{"log_multimodal": True, "num_completions_to_print": int, "log_unique_prompts": False},
    **{"trackio_space_id": str, "trackio_bucket_id": str, "trackio_static_space_id": str},
    **{"per_device_eval_batch_size": 8, "prediction_loss_only": False, "eval_on_start": False},
    **{"eval_do_concat_batches": True, "eval_use_gather_object": False, "eval_accumulation_steps": int},
    **{"include_for_metrics": list, "batch_eval_metrics": False, "save_only_model": False, "label_names": list},
    **{"save_on_each_node": False, "enable_jit_checkpoint": False, "do_train": False, "do_eval": False},
    **{"do_predict": False, "restore_callback_states_from_checkpoint": False, "ignore_data_skip": False},
    # Of what is refused, or has no effect where it is not.
    **{"hub_token": str, "hub_private_repo": bool, "hub_model_id": str, "hub_strategy": "every_save"},
    **{"hub_always_push": False, "hub_revision": str, "metric_for_best_model": str, "greater_is_better": bool},
    **{"ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0},
    **{"entropy_coef_delta": 0.005, "entropy_target": 0.2, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0},
    **{"vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "optim_args": str},
}

_SAMPLING = TRL["top_p"].note
_LAUNCH = "processes and devices are async-rl's own: see settings={'trainer': {...}} and docs/deployment.md"
_NO_HUB = "nothing is sent to the hub: trainer.save_model(FOLDER), and upload that"

REFUSED: Final[Mapping[str, tuple[Default, str]]] = {
    **dict.fromkeys(("top_p", "repetition_penalty"), (1.0, _SAMPLING)),
    **{"top_k": (0, _SAMPLING), "min_p": (float, _SAMPLING), "generation_kwargs": (dict, _SAMPLING)},
    "vllm_structured_outputs_regex": (str, _SAMPLING),
    "num_iterations": (1, "each batch is passed through once: later passes train samples of older weights"),
    "shuffle_dataset": (True, "each epoch has its own order, by the seed"),
    "train_sampling_strategy": ("random", "each epoch has its own order, by the seed"),
    "data_seed": (int, "seed decides the order, too"),
    "delta": (float, "ratios are clipped on one side, by epsilon and epsilon_high"),
    "off_policy_mask_threshold": (float, "nothing is off-policy"),
    "vllm_importance_sampling_cap": (float, "say vllm_importance_sampling_clip_max"),
    "top_entropy_quantile": (1.0, "all tokens count"),
    "use_adaptive_entropy": (False, "the coefficient is constant"),
    "sync_ref_model": (False, "the reference is the initial policy"),
    "cast_lm_head_to_fp32": (False, "all weights have one dtype"),
    "trust_remote_code": (False, "code of checkpoints is not run (docs/models.md)"),
    **{"adam_beta1": (0.9, TRL["adam_beta1"].note), "adam_epsilon": (1e-8, TRL["adam_epsilon"].note)},
    "optim_target_modules": (list, TRL["optim"].note),
    "label_smoothing_factor": (0.0, "there are no labels"),
    "neftune_noise_alpha": (float, "embeddings have no noise"),
    "fp16": (False, TRL["fp16"].note),
    "eval_delay": (0.0, "evaluations begin before the first iteration"),
    "auto_find_batch_size": (False, "memory is set by settings={'trainer': {'micro_batch_tokens': ...}}"),
    "push_to_hub": (False, _NO_HUB),
    "log_completions_hub_repo": (str, _NO_HUB),
    "load_best_model_at_end": (False, "the newest checkpoint is the result: evaluate the others with run.evaluate"),
    "max_tool_calling_iterations": (int, "tools are a rollout program: docs/rollouts.md"),
    **dict.fromkeys(("fsdp", "accelerator_config", "parallelism_config", "fsdp_config", "deepspeed"), (str, _LAUNCH)),
}
"""Fields that must have their default: it, and why there is no other value."""

RLOO_OWN: Final[Mapping[str, Default]] = {"num_generations": 2, "beta": 0.05}
RLOO_REFUSED: Final[Mapping[str, tuple[Default, str]]] = {
    "normalize_advantages": (False, "advantages are not normalized over the batch"),
    "reward_clip_range": (list, "clip rewards in the function"),
}
NOT_OF_RLOO: Final = frozenset(
    name
    for name in (*MAPPED, *WITHOUT_EFFECT, *REFUSED)
    if name.startswith(("vespo_", "sapo_", "entropy_", "vllm_importance_"))
    or name
    in (
        *("loss_type", "delta", "importance_sampling_level", "multi_objective_aggregation", "scale_rewards"),
        *("top_entropy_quantile", "use_adaptive_entropy", "max_tool_calling_iterations", "use_bias_correction_kl"),
        *("off_policy_mask_threshold", "cast_lm_head_to_fp32", "log_completions_hub_repo"),
    )
)

LISTS_OF_NUMBERS = ("reward_weights", "reward_clip_range")
NONE_TOO = ("max_grad_norm", "max_completion_length")
"""Numbers with a default that may be None: no clipping; and an error of its own."""

KINDS: Final[Mapping[type, tuple[type | tuple[type, ...], str]]] = {
    bool: (bool, "True or False"),
    int: (Real, "a whole number"),
    float: (Real, "a number"),
    dict: (Mapping, "a dictionary"),
    list: (Collection, "a list"),
}
STEPS = {"logging_steps": "logging_strategy", "save_steps": "save_strategy", "eval_steps": "eval_strategy"}


def _fields(names: Mapping[str, Default]) -> Iterator[tuple[str, Any, Any]]:
    """As `make_dataclass` takes them."""
    for name, default in names.items():
        if not isinstance(default, type):
            # Yes and no are values of scale_rewards, too.
            yield name, type(default), field(default=default)
        elif default is dict:
            # From a command line as JSON.
            yield name, str | None, field(default=None)
        elif default is list:
            # From a command line as several words.
            yield name, (list[float] if name in LISTS_OF_NUMBERS else list[str]) | None, field(default=None)
        else:
            yield name, default | None, field(default=None)


class Arguments:
    """What both have; `refused` are their names with a default, and why there is no other value."""

    refused: Mapping[str, tuple[Default, str]] = REFUSED

    # What callbacks ask of the one process that they are in.
    world_size, process_index, local_process_index, should_log, should_save = 1, 0, 0, True, True

    if TYPE_CHECKING:

        def __init__(self, output_dir: str | None = None, **fields: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if isinstance(value, str) and value[:1] in ("{", "["):
                try:
                    setattr(self, each.name, json.loads(value))
                except ValueError as error:
                    raise ConfigError(f"{each.name} is {value!r:.200}: expected JSON ({error})") from error
            elif hasattr(value, "value"):
                # An enumeration of transformers.
                setattr(self, each.name, value.value)
        given: Any = self
        if given.output_dir:
            given.output_dir = str(Path(given.output_dir).expanduser())
        if given.greater_is_better is None and given.metric_for_best_model is not None:
            given.greater_is_better = not given.metric_for_best_model.endswith("loss")

    def faults_of_values(self) -> Iterator[str]:
        """Mapped values that TRL could not use either, by their types and sizes, a sentence each."""
        for name, default in MAPPED.items():
            value: Any = getattr(self, name, None)
            kind = default if isinstance(default, type) else type(default)
            may_be_none = isinstance(default, type) or name in NONE_TOO or not hasattr(self, name)
            if kind is str or (value is None and may_be_none):
                continue
            types, expected = KINDS[kind]
            is_of_kind = isinstance(value, types) and not isinstance(value, str)
            is_number = kind in (int, float)
            if (
                not is_of_kind
                or (is_number and (isinstance(value, bool) or not math.isfinite(value)))
                or (kind is int and value != int(value))
            ):
                yield f"{name} is {value!r:.200}: expected {expected}"
            elif not is_number:
                continue
            elif name in ("learning_rate", "steps_per_generation", "generation_batch_size") and value <= 0:
                yield f"{name} is {value}: expected {expected} above 0"
            elif name == "num_train_epochs" and value <= 0 and not self._has_max_steps:
                yield f"{name} is {value}, and max_steps {self.max_steps!r}: expected one of them above 0"
            elif name in STEPS and getattr(self, STEPS[name]) == "steps" and not _is_interval(name, value):
                yield f"{name} is {value}: expected a whole number above 0, or a share of all steps, below 1"
            elif name == "warmup_steps" and value < 0:
                yield f"{name} is {value}: expected 0, a number of steps, or a share of all, below 1"

    @property
    def _has_max_steps(self) -> bool:
        return bool(isinstance(self.max_steps, int | float) and self.max_steps > 0)

    def faults(self) -> Iterator[str]:
        """What is refused of it, a sentence each."""
        for name, (default, reason) in self.refused.items():
            value, usual = getattr(self, name), None if isinstance(default, type) else default
            if value != usual and value not in ({}, []):
                yield f"{name} is {value!r:.200}: {reason}; leave it at {usual!r}"

    def to_dict(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]

    def to_sanitized_dict(self) -> dict[str, Any]:
        return {name: v if isinstance(v, bool | int | float | str) else str(v) for name, v in self.to_dict().items()}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)


def _is_interval(name: str, value: float) -> bool:
    # Evaluations have the interval of the log, if they have none.
    return value == int(value) > 0 if value >= 1 else value > 0 or (name == "eval_steps" and value == 0)


def _made(name: str, names: Mapping[str, Default], refused: Mapping[str, tuple[Default, str]]) -> Any:
    own = {"refused": refused, "__module__": __name__}
    found = make_dataclass(name, _fields(names), bases=(Arguments,), namespace=own)
    init: Any = found.__dict__["__init__"]

    @wraps(init)
    def checked(self: Any, *arguments: Any, **given: Any) -> None:
        for each in given.keys() - names.keys():
            near = nearest(each, list(names))
            also = f": did you mean {near!r}?" if near else " of TRL 1.16"
            if each in TRL:
                also = f" of TRL 1.16: {translated(each)}; give it with settings={{...}}"
            raise ConfigError(f"{name} has no argument {each!r}{also}")
        init(self, *arguments, **given)

    setattr(found, "__init__", checked)  # noqa: B010
    return found


_OF_GRPO = {**MAPPED, **WITHOUT_EFFECT, **{name: default for name, (default, _) in REFUSED.items()}}
_OF_RLOO = {name: default for name, default in _OF_GRPO.items() if name not in NOT_OF_RLOO} | dict(RLOO_OWN)
_REFUSED_OF_RLOO = {name: each for name, each in REFUSED.items() if name not in NOT_OF_RLOO} | dict(RLOO_REFUSED)

if TYPE_CHECKING:

    class GRPOConfig(Arguments): ...

    class RLOOConfig(Arguments): ...

else:
    GRPOConfig = _made("GRPOConfig", _OF_GRPO, REFUSED)
    RLOOConfig = _made(
        "RLOOConfig", _OF_RLOO | {name: default for name, (default, _) in RLOO_REFUSED.items()}, _REFUSED_OF_RLOO
    )
