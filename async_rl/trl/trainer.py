"""`GRPOTrainer` and `RLOOTrainer` with TRL's arguments and methods, whose work a run does: `run` has all of it."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

from async_rl.api.inputs import FOLDER, Inputs
from async_rl.api.run import Run, open_run, train
from async_rl.api.settings import Config, tree_of
from async_rl.checks.preflight.model import ModelFiles
from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.errors import ConfigError
from async_rl.records.run_records import RunRecords
from async_rl.shared.files import write_file
from async_rl.trl import callbacks as transformers_callbacks
from async_rl.trl.adapters import adapter_of
from async_rl.trl.arguments import Arguments, GRPOConfig, RLOOConfig
from async_rl.trl.callbacks import Control, State
from async_rl.trl.inputs import model_name, room_for_prompts, rows_of
from async_rl.trl.logs import evaluation_logs_of, logs_of
from async_rl.trl.mapping import (
    Section,
    algorithm_of,
    batch_of,
    device_of,
    dtype_of,
    inference_of,
    is_rloo,
    iterations_of,
    optimizer_of,
    records_of,
    require_mapped,
    require_no_auxiliary_loss,
)
from async_rl.trl.rewards import MODEL_TIMEOUT_S, has_model, parts_of

DEFAULT_DIR = "trainer_output"
OVERRIDDEN = (
    *("compute_loss", "_compute_loss", "training_step", "prediction_step", "create_optimizer", "create_scheduler"),
    *("create_optimizer_and_scheduler", "get_train_dataloader", "_get_train_sampler", "_calculate_rewards", "log"),
    *("_generate_and_score_completions", "_generate", "_get_per_token_logps_and_entropies"),
)
OVERRIDES = "algorithms, rewards and rollouts of one's own are settings (docs/python.md)"


class TrainOutput(NamedTuple):
    """As transformers' trainer returns it."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class Trainer:
    """What both have. Everything is checked where it is made; `train` starts the processes.

    Attributes:
        config: the settings of the run; `config.toml()` prints them.
        run: the run, once it has started.
        state: `global_step`, `max_steps`, `epoch` and `log_history`, as callbacks get them.
    """

    args_class: type[Any] = GRPOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """
        Args:
            model: a folder or a name of the hub; so are those of `reward_funcs` that are no functions.
            settings: sections of a config, whose keys replace what follows from the other arguments.

        Raises:
            ConfigError: an argument would mean something else here, or cannot work.
        """
        _refuse(
            reward_processing_classes=(reward_processing_classes, "the tokenizers of reward models are their own"),
            optimizers=(None if optimizers == (None, None) else optimizers, "it is always AdamW"),
            quantization_config=(quantization_config, "quantized base models are not trained (docs/decisions.md)"),
            tools=(tools, "tools are a rollout program: docs/rollouts.md"),
            rollout_func=(rollout_func, "it is a rollout program here: docs/rollouts.md"),
            environment_factory=(environment_factory, "environments are rollout programs: docs/rollouts.md"),
        )
        self.args: Arguments = self.args_class() if args is None else args
        self._require_own_arguments()
        self.callbacks = transformers_callbacks.checked(callbacks)
        name = model_name(model, processing_class)
        self.processing_class, self.train_dataset, self.eval_dataset = processing_class, train_dataset, eval_dataset
        rows = rows_of("train_dataset", train_dataset)
        self._eval_rows = None if eval_dataset is None else rows_of("eval_dataset", eval_dataset, like=rows)
        self._parts = parts_of(reward_funcs, self.args.reward_weights, self.args.chat_template_kwargs or {})
        self._batch = batch_of(self.args)
        iterations = iterations_of(self.args, self._batch, len(rows))
        sections = self._sections(name, rows, iterations, reward_funcs, peft_config)
        sections = _merged(sections, settings or {})
        self._given = {**sections, "reward": {**sections.get("reward", {}), "parts": self._parts}}
        self._rows = rows
        # All that is known before the processes start; nothing is written.
        tree = tree_of(None, self._given, data=rows, out=self._dir)
        self.config = Config(**Inputs(Path(self._dir) / FOLDER).take(tree))
        self.run: Run | None = None
        self.state = State(
            max_steps=iterations * self._batch.steps,
            **{name: getattr(self.args, name) for name in ("logging_steps", "eval_steps", "save_steps")},
            train_batch_size=self.args.per_device_train_batch_size,
            num_train_epochs=self.args.num_train_epochs,
        )
        self.accelerator = SimpleNamespace(print=print, is_main_process=True, wait_for_everyone=lambda: None)
        self._call("on_init_end", Control())

    def _require_own_arguments(self) -> None:
        """
        Raises:
            ConfigError: they are TRL's, or would mean something else; or the class or its processes would.
        """
        if not isinstance(self.args, self.args_class):
            raise ConfigError(
                f"args is a {type(self.args).__module__}.{type(self.args).__name__}: import "
                f"{self.args_class.__name__} from async_rl.trl, too"
            )
        if (size := os.environ.get("WORLD_SIZE", "1")) not in ("", "0", "1"):
            raise ConfigError(
                f"WORLD_SIZE is {size!r}: start the script once, with python; processes are those of "
                "settings={'trainer': {'num_processes': N}}"
            )
        require_mapped(self.args)
        for name in OVERRIDDEN:
            if hasattr(type(self), name):
                raise ConfigError(f"{type(self).__name__} has {name}, which nothing calls here: {OVERRIDES}")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__} has no {name!r} here: trainer.run is the run, and the model is in output_dir/model"
        )

    def _sections(
        self, model: str, rows: Any, iterations: int, reward_funcs: Any, peft_config: Any
    ) -> dict[str, Section]:
        args, batch = self.args, self._batch
        device = device_of(args)
        is_chat = not isinstance(next(iter(rows))["prompt"], str)
        require_no_auxiliary_loss(args, ModelFiles.find(model, is_whole=False).config)
        algorithm = algorithm_of(args, [part["label"] for part in self._parts])
        sections: dict[str, Section] = {
            "model": {"path": model, "dtype": dtype_of(args, device)},
            "run": {"seed": args.seed},
            "prompts": {
                "prompts_per_batch": batch.prompts,
                "max_prompt_tokens": room_for_prompts(model, [rows, self._eval_rows or ()], args.max_completion_length),
                "chat_template": (args.chat_template_kwargs or True) if is_chat else False,
            },
            "rollout": {
                "responses_per_prompt": batch.responses,
                "max_response_tokens": args.max_completion_length,
                "temperature": args.temperature,
            },
            "algorithm": algorithm,
            "optimizer": optimizer_of(args, batch, iterations),
            "train": {
                "iterations": iterations,
                "steps_per_batch": batch.steps,
                # Totals of a batch are needed before its first gradient.
                "mode": "synchronous" if AlgorithmSection(**algorithm).waits_for_batch else "periodic",
            },
            "trainer": {
                "device": device,
                "recompute": "full" if _recomputes(args) and device != "cpu" else "none",
            },
            **records_of(args, batch, iterations),
        }
        for name, section in inference_of(args, device, self._dir).items():
            sections[name] = {**sections.get(name, {}), **section}
        if peft_config is not None:
            sections["adapter"] = adapter_of(peft_config)
        if args.eval_strategy != "no":
            if self._eval_rows is None:
                raise ConfigError(f"eval_strategy is {args.eval_strategy!r}, and eval_dataset is missing: give it")
            held = {"name": "eval", "source": self._eval_rows, "num_samples": self._num_eval}
            sections["evaluation"]["sets"] = [held | {"temperature": args.temperature}]
        if has_model(reward_funcs):
            sections["reward"] = {"timeout_s": MODEL_TIMEOUT_S}
        return sections

    @property
    def _num_eval(self) -> int:
        return int(self.args.num_generations_eval or self.args.num_generations)

    @property
    def _dir(self) -> str:
        return str(self.args.output_dir or DEFAULT_DIR)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Trains to the end, and calls the callbacks' `on_train_begin`, `on_step_end`, `on_log` and `on_train_end`.

        Args:
            resume_from_checkpoint: go on from the newest checkpoint of the run in `output_dir`.

        Raises:
            ConfigError: something cannot work; AsyncRLError: what the run ended by.
        """
        resume = resume_from_checkpoint if resume_from_checkpoint is not None else self.args.resume_from_checkpoint
        if isinstance(resume, str) and Path(resume).absolute() != Path(self._dir).absolute():
            raise ConfigError(f"resume_from_checkpoint is {resume!r}: expected True, for the run in {self._dir!r}")
        given: dict[str, Any] = {
            name: section for name, section in self._given.items() if name not in ("model", "reward")
        }
        if resume:
            self.run = open_run(self._dir).resume(reward=self._given["reward"], **given)
        else:
            self.run = train(self._given["model"], self._rows, self._given["reward"], self._dir, **given)
        return self._follow(self.run)

    def _follow(self, run: Run) -> TrainOutput:
        state, control = self.state, Control()
        labels, losses, waiting = [part["label"] for part in self._parts], [], []
        evaluations, num_tokens, seconds = RunRecords(run.dir).evaluations, 0.0, 0.0

        def log_evaluations() -> None:
            for record in evaluations.new_records():
                # It is of the weights before its iteration, and arrives with a later one's record.
                step = int(record["iteration"]) * self._batch.steps
                self._log(evaluation_logs_of(record, labels), control, "on_evaluate", step)

        for event in ("on_train_begin", "on_epoch_begin", "on_step_begin"):
            self._call(event, control)
        try:
            for record in run:
                epoch = int(state.epoch)
                state.global_step = (record["iteration"] + 1) * self._batch.steps
                # As TRL counts: rows that fill no batch at an epoch's end are none of its steps.
                state.epoch = (record["iteration"] + 1) / max(1, len(self._rows) // self._batch.prompts)
                logs = logs_of(record, labels, self._batch, self._loss_scale)
                num_tokens += logs.pop("num_tokens")
                losses.append(logs.get("loss", 0.0))
                seconds += record["seconds"]
                waiting.append(logs)
                self._call("on_step_end", control)
                if self._logs_at(state.global_step) or control.should_log:
                    control.should_log = False
                    self._log({**_means(waiting), "num_tokens": num_tokens}, control)
                    waiting.clear()
                log_evaluations()
                is_last = state.global_step >= state.max_steps
                if int(state.epoch) > epoch or is_last:
                    self._call("on_epoch_end", control)
                if control.should_training_stop:
                    run.stop()
                    break
                if int(state.epoch) > epoch and not is_last:
                    self._call("on_epoch_begin", control)
                if not is_last:
                    self._call("on_step_begin", control)
            log_evaluations()
        except BaseException:
            run.stop()
            raise
        self._call("on_train_end", control)
        loss = fmean(losses or [0.0])
        return TrainOutput(state.global_step, loss, {"train_runtime": seconds, "train_loss": loss})

    @property
    def _loss_scale(self) -> float:
        return float(self.args.max_completion_length) if is_rloo(self.args) else 1.0

    def _logs_at(self, step: int) -> bool:
        every = self.args.logging_steps
        every = max(1, every if every >= 1 else every * self.state.max_steps)
        if self.args.logging_strategy == "epoch":
            every = max(1, self.state.max_steps / self.args.num_train_epochs)
        is_due = step // every > (step - self._batch.steps) // every
        return self.args.logging_strategy != "no" and bool(is_due or step >= self.state.max_steps)

    def _log(self, logs: dict[str, float], control: Control, event: str = "on_log", step: int | None = None) -> None:
        state, line = self.state, {**logs, "epoch": self.state.epoch}
        step = state.global_step if step is None else step
        state.log_history.append({**line, "step": step})
        self._call(event, control, **({"metrics": line} if event == "on_evaluate" else {"logs": line}))
        best, name = state.best_metric, self.args.metric_for_best_model or ""
        value = logs.get(name if name.startswith("eval_") else f"eval_{name}")
        if value is not None and (best is None or (value > best if self.args.greater_is_better else value < best)):
            state.best_metric, state.best_global_step = value, step

    def _call(self, event: str, control: Control, **more: Any) -> None:
        transformers_callbacks.call(self.callbacks, event, self.args, self.state, control, **more)

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Scores the newest checkpoint on these rows, by default `eval_dataset`.

        Raises:
            ConfigError: there are none, or nothing is trained yet.
        """
        rows = self._eval_rows if eval_dataset is None else rows_of("eval_dataset", eval_dataset, like=self._rows)
        if rows is None:
            raise ConfigError("eval_dataset is missing: give it")
        figures = self._trained().evaluate(rows, samples=self._num_eval, temperature=self.args.temperature)
        logs = evaluation_logs_of(figures, [part["label"] for part in self._parts])
        self._log(logs, Control(), "on_evaluate")
        return logs

    def save_model(self, output_dir: str | None = None) -> Path:
        """Writes the newest checkpoint as a Hugging Face one; of the run's own folder it is in `model/` there already.

        Raises:
            ConfigError: nothing is trained yet, or the folder is not empty.
        """
        run = self._trained()
        if output_dir is None or Path(output_dir).absolute() == run.dir:
            print(f"the model is in {run.dir / 'model'}")
            return run.dir / "model"
        return run.export(output_dir)

    def _trained(self) -> Run:
        if self.run is None and not Path(self._dir).is_dir():
            raise ConfigError(f"nothing is trained yet in {self._dir!r}: call train() first")
        return self.run or open_run(self._dir)

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError("nothing is sent to the hub: trainer.save_model(FOLDER), and upload that")

    def add_callback(self, callback: Any) -> None:
        self.callbacks += transformers_callbacks.checked([callback])

    def remove_callback(self, callback: Any) -> None:
        kind = callback if isinstance(callback, type) else type(callback)
        self.callbacks = [each for each in self.callbacks if each is not callback and type(each) is not kind]

    def is_world_process_zero(self) -> bool:
        return True

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        print("\n".join([f"***** {split} metrics *****", *(f"  {name} = {metrics[name]}" for name in sorted(metrics))]))

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        self._write(f"{split}_results.json", metrics)

    def save_state(self) -> None:
        self._write("trainer_state.json", asdict(self.state))

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        write_file(self._trained().dir / name, json.dumps(content, indent=2, default=str) + "\n")

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """`async-rl export` writes one."""

    def end(self) -> None:
        """Nothing is left to end."""


class GRPOTrainer(Trainer):
    """TRL's `GRPOTrainer`."""


class RLOOTrainer(Trainer):
    """TRL's `RLOOTrainer`."""

    args_class = RLOOConfig


def _refuse(**given: tuple[Any, str]) -> None:
    for name, (value, reason) in given.items():
        if value is not None and value != []:
            raise ConfigError(f"{name} is {value!r:.200}: {reason}; leave it out")


def _recomputes(args: Arguments) -> bool:
    newer = args.activation_checkpointing
    return bool(args.gradient_checkpointing if newer is None else newer)


def _merged(sections: Mapping[str, Section], settings: Mapping[str, Any]) -> dict[str, Section]:
    for name, keys in settings.items():
        if not isinstance(keys, Mapping):
            raise ConfigError(f"settings[{name!r}] is {keys!r:.200}: expected a section's keys, a dictionary")
    return {**sections, **{name: {**sections.get(name, {}), **keys} for name, keys in settings.items()}}


def _means(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: fmean(line[name] for line in lines if name in line) for name in names}
