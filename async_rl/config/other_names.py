"""What settings of other trainers are called here: for errors about unknown keys, and for the pages about migration."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OtherName:
    """`keys` are those here that take its place; none where there is no such setting, `note` then says why."""

    trainer: str
    keys: tuple[str, ...]
    note: str = ""


def _names_of(trainer: str, *rows: tuple[str, tuple[str, ...], str]) -> dict[str, OtherName]:
    return {name: OtherName(trainer, keys, note) for name, keys, note in rows}


_ADAMW = "it is always AdamW; why not Muon: docs/decisions.md"
_ALL_TOKENS = "tokens would have other probabilities than the trainer computes; sets of [[evaluation.sets]] have it"
_OF_ADAPTERS = ("adapter.rank", "adapter.alpha", "adapter.targets")

TRL = _names_of(
    "TRL",
    ("model_name_or_path", ("model.path",), ""),
    ("train_dataset", ("prompts.source",), ""),
    ("dataset_name", ("prompts.source",), ""),
    ("reward_funcs", ("reward.name",), ""),
    ("reward_weights", ("reward.parts",), ""),
    ("output_dir", ("run.dir",), ""),
    ("per_device_train_batch_size", ("prompts.prompts_per_batch",), "of all devices together"),
    ("gradient_accumulation_steps", ("prompts.prompts_per_batch", "trainer.micro_batch_tokens"), ""),
    ("num_generations", ("rollout.responses_per_prompt",), ""),
    ("max_prompt_length", ("prompts.max_prompt_tokens",), ""),
    ("max_completion_length", ("rollout.max_response_tokens",), ""),
    ("beta", ("algorithm.kl_coef",), ""),
    ("epsilon", ("algorithm.clip_low", "algorithm.clip_high"), ""),
    ("epsilon_high", ("algorithm.clip_high",), ""),
    ("loss_type", ("algorithm.name", "algorithm.normalize"), ""),
    ("scale_rewards", ("algorithm.scale_by_std",), ""),
    ("num_train_epochs", ("train.epochs",), ""),
    ("max_steps", ("train.iterations",), ""),
    ("num_iterations", (), "each batch is passed through once"),
    ("steps_per_generation", ("train.steps_per_batch",), ""),
    (
        "lr_scheduler_type",
        ("optimizer.schedule", "optimizer.min_learning_rate_ratio"),
        "linear, cosine or constant, and where it ends",
    ),
    ("warmup_steps", ("optimizer.warmup_iterations",), ""),
    ("adam_beta2", ("optimizer.beta2",), ""),
    ("adam_beta1", (), "it is always 0.9"),
    ("adam_epsilon", (), "it is always 1e-8"),
    ("optim", (), _ADAMW),
    ("max_grad_norm", ("optimizer.clip_grad_norm",), ""),
    ("bf16", ("model.dtype",), ""),
    ("fp16", ("model.dtype",), "bfloat16 or float32"),
    ("gradient_checkpointing", ("trainer.recompute",), ""),
    ("save_steps", ("checkpoint.every",), ""),
    ("save_total_limit", ("checkpoint.keep",), ""),
    ("resume_from_checkpoint", ("run.resume",), ""),
    ("chat_template_kwargs", ("prompts.chat_template",), "a table of them"),
    ("vllm_mode", ("pool.instances", "run.placement"), "servers, or on the trainer's devices"),
    ("report_to", ("tracking.trackers",), ""),
    ("peft_config", _OF_ADAPTERS, ""),
    ("top_p", (), _ALL_TOKENS),
    ("top_k", (), _ALL_TOKENS),
    ("min_p", (), _ALL_TOKENS),
)

VERL = _names_of(
    "verl",
    ("train_files", ("prompts.source",), ""),
    ("val_files", ("evaluation.sets",), ""),
    ("test_freq", ("evaluation.every",), ""),
    ("train_batch_size", ("prompts.prompts_per_batch",), ""),
    ("lora_rank", ("adapter.rank",), ""),
    ("lora_alpha", ("adapter.alpha",), ""),
    ("target_modules", ("adapter.targets",), ""),
    ("lora_adapter_path", ("adapter.path",), ""),
    ("max_response_length", ("rollout.max_response_tokens",), ""),
    ("ppo_mini_batch_size", ("train.steps_per_batch",), "prompts.prompts_per_batch divided by it"),
    ("ppo_epochs", (), "each batch is passed through once"),
    ("ppo_max_token_len_per_gpu", ("trainer.micro_batch_tokens",), ""),
    ("adv_estimator", ("algorithm.name",), ""),
    ("kl_loss_coef", ("algorithm.kl_coef",), ""),
    ("clip_ratio", ("algorithm.clip_low", "algorithm.clip_high"), ""),
    ("clip_ratio_high", ("algorithm.clip_high",), ""),
    ("loss_agg_mode", ("algorithm.normalize",), ""),
    ("max_num_seqs", ("inference.max_concurrency",), ""),
    ("gpu_memory_utilization", ("inference.engine_options",), ""),
    ("tensor_model_parallel_size", ("trainer.tensor_parallel",), "inference.tensor_parallel of the instances"),
    ("virtual_pipeline_model_parallel_size", ("trainer.virtual_pipeline_parallel",), ""),
    ("ulysses_sequence_parallel_size", ("trainer.context_parallel",), ""),
    ("total_epochs", ("train.epochs",), ""),
    ("total_training_steps", ("train.iterations",), ""),
    ("save_freq", ("checkpoint.every",), ""),
    ("default_local_dir", ("run.dir",), ""),
)

PRIME_RL = _names_of(
    "prime-rl",
    ("rollouts_per_example", ("rollout.responses_per_prompt",), ""),
    ("batch_size", ("prompts.prompts_per_batch",), "of prompts, not of rollouts"),
    ("seq_len", ("rollout.options.max_context_tokens",), ""),
    ("max_async_level", (), "nothing is older than the weights in training"),
    ("lr", ("optimizer.learning_rate",), ""),
    ("optimizer.type", (), _ADAMW),
)

OTHER_NAMES = PRIME_RL | VERL | TRL

_OF_REWARDS = (
    *("test_timeout_s", "test_memory_bytes", "pattern", "match", "url", "token_from", "model", "rubric"),
    *("score_pattern", "min_score", "max_score", "unreadable_reward"),
)

_OF_PROGRAMS = (
    *("max_turns", "max_context_tokens", "renderer", "timeout_s", "max_attempts", "max_concurrent"),
    *("max_concurrent_per_environment", "num_workers", "gateway_host"),
)

_OF_CRITICS = ("learning_rate", "path", "iterations_alone")

_GONE = (
    *("train.on_nonfinite", "evaluation.max_delay_s", "publish.bucket_bytes", "publish.max_probe_gap"),
    *("cluster.restart_delay_s", "cluster.instance_cores", "rollout.gateway_port"),
    *("algorithm.overlong_penalty", "algorithm.kl_clamp"),
    *("optimizer.beta1", "optimizer.eps", "trainer.distributed_optimizer"),
    *(
        "cluster.training_cores",
        "cluster.placement_timeout_s",
        "cluster.scale_up_after_s",
        "cluster.scale_down_after_s",
    ),
    *("cluster.patience_s", "cluster.lease_s", "prompts.cache_dir", "rollout.truncated_reward"),
    *("pool.heartbeat_timeout_s", "pool.stream_interval"),
)

EARLIER = _names_of(
    "an earlier async-rl",
    *((f"reward.{name}", (f"reward.options.{name}",), "") for name in _OF_REWARDS),
    *((f"rollout.{name}", (f"rollout.options.{name}",), "") for name in _OF_PROGRAMS),
    (
        "reward.correct_at",
        ("reward.options.correct_at",),
        "of http and judge; a function of yours says it itself, FUNCTION.correct_at = 1.0",
    ),
    ("reward.on_error", ("reward.max_attempts",), "1 where it was fail"),
    ("prompts.template_arguments", ("prompts.chat_template",), ""),
    ("rollout.stop_token_ids", ("rollout.stop",), ""),
    ("prompts.column", ("prompts.columns.prompt",), ""),
    ("prompts.pass_over", ("prompts.reserve",), "chosen after the rollouts"),
    (
        "prompts.curriculum_order",
        ("prompts.columns.difficulty",),
        "low numbers first: name a column of negated ones",
    ),
    ("reward.skip_special_tokens", (), "the text has none; response.token_ids has them"),
    ("prompts.num_rows", ("prompts.task_options.size",), ""),
    ("critic", ("algorithm.options",), f"{', '.join(_OF_CRITICS)} as critic_{_OF_CRITICS[0]} and so on"),
    ("algorithm.importance_low", ("algorithm.importance_high",), "1 divided by it"),
    ("pool.dns", ("pool.instances",), "one of them, as dns:HOST:PORT"),
    ("pool.join", ("publish.snapshot_dir",), "instances join at once where it is set"),
    ("publish.probe_tokens", ("publish.canary",), "off where it was 0"),
    ("tracking.name", ("run.dir",), "its last part"),
    ("trainer.sequence_parallel", ("trainer.tensor_parallel",), "above 1 its ranks always share rows, too"),
    ("cluster.slurm_training_options", ("cluster.slurm_options.training",), ""),
    ("cluster.slurm_instance_options", ("cluster.slurm_options.instances",), ""),
    ("cluster.master_port", ("pool.fleet_address",), "the next one after its port, or 29500 without it"),
    ("pool.fleet_host", ("pool.fleet_address",), "HOST:PORT"),
    ("pool.fleet_port", ("pool.fleet_address",), "HOST:PORT"),
    *((name, (), "what it was by default holds") for name in _GONE),
)
"""Keys that have moved or are gone, with their sections."""


def translated(name: str) -> str | None:
    """What the setting `name` of another trainer is here, in words; None if it is not known as one."""
    found = EARLIER.get(name) or OTHER_NAMES.get(name)
    if found is None:
        return None
    if not found.keys:
        return f"{found.trainer}'s {name} has no counterpart: {found.note}"
    note = f" ({found.note})" if found.note else ""
    return f"{found.trainer}'s {name} is {' and '.join(map(repr, found.keys))} here{note}"
