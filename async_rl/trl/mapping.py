"""What TRL's arguments are here: sections of a config, or errors that say why not.

`benchmarks/peers/loss_cases.py` compares losses and gradients of the algorithms that this gives with TRL's own.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config.algorithm_traits import TRAITS
from async_rl.config.other_names import TRL
from async_rl.errors import ConfigError
from async_rl.trl.arguments import Arguments

Section = dict[str, Any]

ACCELERATORS = {"cuda": "/dev/nvidiactl", "npu": "/dev/davinci_manager"}
"""Devices by a file that their drivers make."""

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
SCHEDULES = {
    **{"linear": "linear", "cosine": "cosine", "constant": "linear", "constant_with_warmup": "linear"},
    **dict.fromkeys(("cosine_with_min_lr", "cosine_warmup_with_min_lr"), "cosine"),
}
ALL_CHECKPOINTS = 10**6
NO_CLIPPING = 1e9
"""A norm that no gradient has."""

STRATEGIES = {
    **dict.fromkeys(("logging_strategy", "eval_strategy"), ("no", "steps", "epoch")),
    "save_strategy": ("no", "steps", "epoch", "best"),
}
DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}
INIT_WITHOUT_EFFECT = ("attn_implementation", "device_map", "use_cache", "low_cpu_mem_usage")


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts of an iteration, responses to each, and the optimizer steps that it takes."""

    prompts: int
    responses: int
    steps: int

    def iterations_of(self, steps: float, total_steps: float) -> int:
        """So many optimizer steps, or a share of all, rounded up."""
        return max(1, math.ceil((steps if steps >= 1 else steps * total_steps) / self.steps))


def is_rloo(args: Arguments) -> bool:
    return not hasattr(args, "loss_type")


def require_mapped(args: Arguments) -> None:
    """
    Raises:
        ConfigError: values that would mean something else here, all of them.
    """
    faults = [*args.faults_of_values()] or [*args.faults(), *_faults(args)]
    if faults:
        raise ConfigError("\n".join([f"{type(args).__name__} cannot be run as it is:", *faults]))


def _faults(args: Arguments) -> Iterator[str]:
    if args.router_aux_loss_coef:
        yield f"router_aux_loss_coef is {args.router_aux_loss_coef:g}: there is no auxiliary loss; set it to 0"
    if args.optim not in ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"):
        yield f"optim is {args.optim!r}: {TRL['optim'].note}"
    if args.lr_scheduler_type not in SCHEDULES:
        yield f"lr_scheduler_type is {args.lr_scheduler_type!r}: expected one of {', '.join(SCHEDULES)}"
    elif "_min_lr" in args.lr_scheduler_type:
        if not _floor(more := dict(args.lr_scheduler_kwargs or {})):
            yield f"lr_scheduler_kwargs is {more!r}: expected min_lr_rate or min_lr, the cosine's minimum"
    elif args.lr_scheduler_kwargs:
        yield f"lr_scheduler_kwargs is {args.lr_scheduler_kwargs!r}: {args.lr_scheduler_type!r} takes none here"
    for name, among in STRATEGIES.items():
        if (value := getattr(args, name)) not in among:
            yield f"{name} is {value!r}: expected one of {', '.join(among)}"
    if args.max_completion_length is None:
        yield "max_completion_length is None: responses need a limit; name it"
    if args.save_strategy == "best":
        yield "save_strategy is 'best': the newest checkpoints are kept; take 'steps', and save_total_limit"
    if args.use_vllm and args.vllm_mode not in ("server", "colocate"):
        yield f"vllm_mode is {args.vllm_mode!r}: expected 'server' or 'colocate'"
    names = _listed(args.report_to)
    if unknown := [name for name in names if name not in (*TRACKERS, "none")]:
        yield f"report_to has {unknown[0]!r}: expected some of {', '.join(TRACKERS)}, or 'none'"
    for name in (args.model_init_kwargs or {}).keys() - {"dtype", "torch_dtype", *INIT_WITHOUT_EFFECT}:
        # TRL's own scripts name the branch.
        if (value := args.model_init_kwargs[name]) not in (None, False) and (name, value) != ("revision", "main"):
            yield f"model_init_kwargs has {name} = {value!r}: the checkpoint is read as it is; save it that way"
    yield from _faults_of_loss(args)


def _faults_of_loss(args: Arguments) -> Iterator[str]:
    if is_rloo(args):
        if args.mask_truncated_completions:
            yield "mask_truncated_completions is True: TRL's RLOO counts what it masks; leave it at False"
        return
    losses = ("grpo", "dapo", "dr_grpo", "cispo", "sapo")
    if args.loss_type not in losses:
        yield (
            f"loss_type is {args.loss_type!r}: expected one of {', '.join(losses)}; 'dapo' is a mean over all tokens "
            "of the batch"
        )
    elif args.loss_type == "cispo" and (args.epsilon_high or 0) < 1:
        yield f"epsilon_high is {args.epsilon_high}: of cispo it is the largest ratio; name a number above 1, such as 5"
    if args.mask_truncated_completions and args.loss_type not in ("dapo", "cispo"):
        yield (
            f"mask_truncated_completions is True and loss_type {args.loss_type!r}: there TRL counts what it masks; "
            "take 'dapo'"
        )
    if args.entropy_coef and (args.loss_type != "dapo" or args.gradient_accumulation_steps > 1):
        yield (
            f"entropy_coef is {args.entropy_coef:g}: TRL's is a mean over each micro-batch; take loss_type 'dapo', and "
            "gradient_accumulation_steps 1 with a larger per_device_train_batch_size"
        )
    if args.importance_sampling_level not in ("token", "sequence"):
        yield f"importance_sampling_level is {args.importance_sampling_level!r}: expected 'token' or 'sequence'"
    elif args.importance_sampling_level == "sequence" and args.loss_type != "grpo":
        yield f"importance_sampling_level is 'sequence' and loss_type {args.loss_type!r}: GSPO's is 'grpo'"
    if args.scale_rewards not in (True, False, "group", "batch", "none"):
        yield f"scale_rewards is {args.scale_rewards!r}: expected 'group', 'batch' or 'none'"
    aggregation = args.multi_objective_aggregation
    if aggregation not in ("sum_then_normalize", "normalize_then_sum"):
        yield f"multi_objective_aggregation is {aggregation!r}: expected 'sum_then_normalize' or 'normalize_then_sum'"
    elif aggregation == "normalize_then_sum" and (
        args.loss_type != "dapo" or args.scale_rewards not in (True, "group")
    ):
        yield (
            "multi_objective_aggregation is 'normalize_then_sum' (GDPO): expected with it loss_type 'dapo' and "
            "scale_rewards 'group'"
        )
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    if _corrects(args) and (high is None or (low is not None and not math.isclose(low * high, 1))):
        yield (
            f"vllm_importance_sampling_clip_min is {low} and clip_max {high}: a mask leaves in what is between "
            "1 / clip_max and clip_max; leave clip_min out"
        )


def _floor(given: dict[str, Any]) -> bool:
    return len(given) == 1 and isinstance(given.get("min_lr_rate", given.get("min_lr")), int | float)


def _listed(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _corrects(args: Arguments) -> bool:
    return bool(args.use_vllm and args.vllm_importance_sampling_correction)


def batch_of(args: Arguments) -> Batch:
    """
    Raises:
        ConfigError: the batch of generations is no whole number of groups, or of optimizer steps.
    """
    per_device, accumulated, responses = (
        int(getattr(args, name))
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
    )
    named = f"per_device_train_batch_size {per_device} x gradient_accumulation_steps {accumulated}"
    if min(per_device, accumulated, responses) < 1:
        raise ConfigError(f"{named} / num_generations {responses}: expected numbers from 1 on")
    generated = args.generation_batch_size
    if generated is not None and args.steps_per_generation is not None:
        raise ConfigError("generation_batch_size and steps_per_generation say the same: leave one of them out")
    if generated is None:
        generated = per_device * (args.steps_per_generation or accumulated)
    stepped, size = per_device * accumulated, int(generated)
    if size % stepped or not size:
        raise ConfigError(f"{named} and a generation batch of {generated}: expected a multiple of an optimizer step's")
    if size % responses:
        raise ConfigError(f"{named} makes {size} responses, not whole groups of num_generations {responses}")
    return Batch(size // responses, responses, size // stepped)


def algorithm_of(args: Arguments, labels: list[str]) -> Section:
    """The keys of [algorithm], but those that the algorithm does not read.

    Args:
        labels: of the reward's parts, in the order of `reward_weights`.

    Raises:
        ConfigError: see `require_mapped`; or what several steps of a batch would make another algorithm.
    """
    require_mapped(args)
    found = _algorithm(args, labels, batch_of(args).steps)
    unused = TRAITS[found["name"]].unused
    return {key: value for key, value in found.items() if value is not None and key not in unused}


def _algorithm(args: Arguments, labels: list[str], steps: int) -> Section:
    found: Section = {
        "clip_low": args.epsilon,
        "clip_high": args.epsilon if args.epsilon_high is None else args.epsilon_high,
        "kl_coef": args.beta,
        "mask_truncated": args.mask_truncated_completions,
        "old_policy": "model" if steps > 1 else "reuse",
    }
    if is_rloo(args):
        if steps > 1:
            raise ConfigError(
                f"a generation batch is trained in {steps} steps: TRL's RLOO has the ratio of a whole response, ours "
                "of a token, which are the same in the first step only; leave generation_batch_size and "
                "steps_per_generation out"
            )
        return found | {"name": "rloo", "normalize": "constant", "kl_in": "reward", "kl_estimator": "k1"}
    scale = {"group": True, True: True, "batch": "batch"}.get(args.scale_rewards, False)
    found |= {"scale_by_std": scale, "entropy_coef": args.entropy_coef}
    if args.beta and args.use_bias_correction_kl:
        if steps > 1:
            raise ConfigError(
                f"beta is {args.beta:g}, use_bias_correction_kl True, and a generation batch is trained in {steps} "
                "steps: the KL has no ratio as a factor here; set use_bias_correction_kl=False"
            )
        # (ratio x k3) has the gradient (log p - log ref) d log p where the ratio is 1, which is that of k2.
        found["kl_estimator"] = "k2"
    if _corrects(args):
        found |= {
            "importance": args.vllm_importance_sampling_mode,
            "importance_high": args.vllm_importance_sampling_clip_max,
        }
    if args.importance_sampling_level == "sequence":
        return found | {"name": "gspo", "normalize": "sequence"}
    if args.multi_objective_aggregation == "normalize_then_sum":
        weights = dict(zip(labels, args.reward_weights or [1.0] * len(labels), strict=True))
        # It has its own deviations: of the group for each reward, and of the batch for their sum.
        return found | {"name": "gdpo", "options": {"weights": weights}, "scale_by_std": None}
    return found | _loss_of(args)


def _loss_of(args: Arguments) -> Section:
    match args.loss_type:
        case "dr_grpo":
            return {"name": "dr_grpo", "normalize": "constant"}
        case "cispo":
            # Its epsilon_high is the largest ratio.
            return {"name": "cispo", "clip_low": None, "clip_high": (args.epsilon_high or args.epsilon) - 1}
        case "sapo":
            options = {"tau_negative": args.sapo_temperature_neg, "tau_positive": args.sapo_temperature_pos}
            return {"name": "sapo", "options": options}
        case kind:
            return {"name": "grpo", "normalize": "token" if kind == "dapo" else "sequence"}


def optimizer_of(args: Arguments, batch: Batch, iterations: int) -> Section:
    """The keys of [optimizer]."""
    warmup = batch.iterations_of(args.warmup_steps, iterations * batch.steps) if args.warmup_steps else 0
    # Theirs would reach 0 one step after the last one.
    least = 1 / max(1, iterations - warmup) if args.lr_scheduler_type == "linear" else 0.0
    if args.lr_scheduler_type.startswith("constant"):
        least = 1.0
    if more := dict(args.lr_scheduler_kwargs or {}):
        least = more.get("min_lr_rate", more.get("min_lr", 0.0) / args.learning_rate)
    scale = args.max_completion_length if is_rloo(args) else 1
    return {
        "learning_rate": args.learning_rate,
        "schedule": SCHEDULES[args.lr_scheduler_type],
        "min_learning_rate_ratio": least,
        "warmup_iterations": 0 if args.lr_scheduler_type == "constant" else warmup,
        "weight_decay": args.weight_decay,
        "beta2": args.adam_beta2,
        # Its loss is a sum over tokens where ours is divided by the limit of a response.
        "clip_grad_norm": (args.max_grad_norm if (args.max_grad_norm or 0) > 0 else NO_CLIPPING) / scale,
    }


def iterations_of(args: Arguments, batch: Batch, num_rows: int) -> int:
    """
    Raises:
        ConfigError: there are not enough rows for a batch, or max_steps ends in the middle of one.
    """
    if args.max_steps > 0:
        if args.max_steps % batch.steps:
            raise ConfigError(
                f"max_steps is {args.max_steps}, and a generation batch is trained in {batch.steps} steps: name a "
                "multiple"
            )
        return int(args.max_steps) // batch.steps
    if num_rows < batch.prompts:
        raise ConfigError(
            f"train_dataset has {num_rows} rows, and a batch takes {batch.prompts} prompts: lower "
            "per_device_train_batch_size or gradient_accumulation_steps, or raise num_generations"
        )
    return max(1, math.ceil(num_rows // batch.prompts * float(args.num_train_epochs)))


def require_no_auxiliary_loss(args: Arguments, config: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: TRL would add the loss that balances the experts of a model with this config.json.
    """
    if args.router_aux_loss_coef is None and (coefficient := config.get("router_aux_loss_coef")):
        raise ConfigError(
            f"the model's router_aux_loss_coef is {coefficient:g}, by which TRL adds a loss that is not offered here: "
            "set router_aux_loss_coef=0.0, which leaves it out in both"
        )


def device_of(args: Arguments) -> str:
    if args.use_cpu:
        return "cpu"
    return next((name for name, file in ACCELERATORS.items() if Path(file).exists()), "cpu")


def dtype_of(args: Arguments, device: str) -> str:
    """
    Raises:
        ConfigError: it is neither float32 nor bfloat16.
    """
    given = dict(args.model_init_kwargs or {})
    dtype = given.get("dtype") or given.get("torch_dtype")
    if dtype is None or dtype == "auto":
        # TRL's own default computes in bfloat16.
        return "bfloat16" if args.bf16 or (args.bf16 is None and device != "cpu") else "float32"
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"model_init_kwargs has dtype {name!r}: expected 'float32' or 'bfloat16'")
    return DTYPES[name]


def inference_of(args: Arguments, device: str, run_dir: str) -> dict[str, Section]:
    """The sections of the instances, and where they are; colocated ones on a CPU are processes beside the trainer's."""
    if not args.use_vllm:
        return {}
    if args.vllm_mode == "server":
        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        return {"pool": {"instances": [url.replace("//0.0.0.0", "//127.0.0.1")]}, "inference": {"engine": "vllm"}}
    options = [f"--gpu-memory-utilization={args.vllm_gpu_memory_utilization}"]
    if args.vllm_max_model_length is not None:
        options.append(f"--max-model-len={args.vllm_max_model_length}")
    parallel = args.vllm_tensor_parallel_size
    found: dict[str, Section] = {
        "inference": {"engine": "vllm", "tensor_parallel": parallel, "engine_options": options}
    }
    if device == "cpu":
        return found
    if not args.vllm_enable_sleep_mode:
        return found | {"run": {"placement": "shared"}, "publish": {"transport": "ipc"}}
    name = hashlib.sha256(os.fsencode(Path(run_dir).absolute())).hexdigest()[:12]
    in_memory = {"transport": "snapshot", "snapshot_dir": f"/dev/shm/async-rl-{name}"}
    return found | {"run": {"placement": "turns"}, "publish": in_memory}


def records_of(args: Arguments, batch: Batch, iterations: int) -> dict[str, Section]:
    """The sections of checkpoints, evaluations and trackers."""
    total, epoch = iterations * batch.steps, max(1, round(iterations / args.num_train_epochs))
    # In any case the last one, which is what is evaluated and exported.
    every = {"no": iterations, "epoch": epoch, "steps": batch.iterations_of(args.save_steps, total)}[args.save_strategy]
    evaluated = batch.iterations_of(args.eval_steps or args.logging_steps, total)
    return {
        "checkpoint": {"every": every, "keep": args.save_total_limit or ALL_CHECKPOINTS},
        "evaluation": {"every": epoch if args.eval_strategy == "epoch" else evaluated},
        "tracking": {
            "trackers": [name for name in _listed(args.report_to) if name != "none"],
            "project": args.project,
        },
    }
