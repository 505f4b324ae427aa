"""`GRPOTrainer` and `RLOOTrainer` with TRL's arguments and methods, whose work a run does: `run` has all of it."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

from async_rl.api.inputs import FOLDER, Inputs, require_rows
from async_rl.api.run import Run, open_run, train
from async_rl.api.settings import Config, tree_of
from async_rl.checks.preflight.model import ModelFiles
from async_rl.errors import ConfigError
from async_rl.trl.adapters import adapter_of
from async_rl.trl.arguments import Arguments, GRPOConfig, RLOOConfig
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
)
from async_rl.trl.rewards import MODEL_TIMEOUT_S, parts_of

DEFAULT_DIR = "trainer_output"
ROOM, TEMPLATE_ROOM = 8, 1024
"""Tokens that a tokenizer, or a chat template, may put around a prompt; its own have at least a byte each."""


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
        self.args: Arguments = self.args_class() if args is None else args
        if not isinstance(self.args, self.args_class):
            raise ConfigError(
                f"args is a {type(self.args).__module__}.{type(self.args).__name__}: import "
                f"{self.args_class.__name__} from async_rl.trl, too"
            )
        _refuse(
            reward_processing_classes=(reward_processing_classes, "the tokenizers of reward models are their own"),
            optimizers=(None if optimizers == (None, None) else optimizers, "it is always AdamW"),
            quantization_config=(quantization_config, "quantized base models are not trained (docs/decisions.md)"),
            tools=(tools, "tools are a rollout program: docs/rollouts.md"),
            rollout_func=(rollout_func, "it is a rollout program here: docs/rollouts.md"),
            environment_factory=(environment_factory, "environments are rollout programs: docs/rollouts.md"),
        )
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                "WORLD_SIZE is above 1: start the script once, with python; processes are those of "
                "settings={'trainer': {'num_processes': N}}"
            )
        name = _model_name(model, processing_class)
        rows = _rows("train_dataset", train_dataset)
        self._eval_rows = None if eval_dataset is None else _rows("eval_dataset", eval_dataset)
        template = self.args.chat_template_kwargs or {}
        self._parts = parts_of(reward_funcs, self.args.reward_weights, template)
        self._batch = batch_of(self.args)
        iterations = iterations_of(self.args, self._batch, len(rows))
        sections = self._sections(name, rows, iterations, peft_config)
        for section, keys in (settings or {}).items():
            sections[section] = {**sections.get(section, {}), **keys}
        self._given = {**sections, "reward": {**sections.get("reward", {}), "parts": self._parts}}
        self._rows = rows
        # All that is known before the processes start; nothing is written.
        tree = tree_of(None, self._given, data=rows, out=self._dir)
        self.config = Config(**Inputs(Path(self._dir) / FOLDER).take(tree))
        self.run: Run | None = None
        self.state = SimpleNamespace(
            **{"global_step": 0, "max_steps": iterations * self._batch.steps, "epoch": 0.0, "log_history": []},
            is_world_process_zero=True,
        )
        self.accelerator = SimpleNamespace(print=print, is_main_process=True, wait_for_everyone=lambda: None)
        self.callbacks = [each() if isinstance(each, type) else each for each in callbacks or ()]

    def _sections(self, model: str, rows: Any, iterations: int, peft_config: Any) -> dict[str, Section]:
        args, batch = self.args, self._batch
        device = device_of(args)
        is_chat = not isinstance(rows[0]["prompt"], str)
        algorithm = algorithm_of(args, [part["label"] for part in self._parts])
        sections: dict[str, Section] = {
            "model": {"path": model, "dtype": dtype_of(args, device)},
            "run": {"seed": args.seed},
            "prompts": {
                "prompts_per_batch": batch.prompts,
                "max_prompt_tokens": _room_for_prompts(
                    model, [rows, self._eval_rows or ()], args.max_completion_length
                ),
                "chat_template": (args.chat_template_kwargs or True) if is_chat else False,
            },
            "rollout": {
                "responses_per_prompt": batch.responses,
                "max_response_tokens": args.max_completion_length,
                "temperature": args.temperature,
            },
            "algorithm": algorithm,
            "optimizer": optimizer_of(args, batch, iterations),
            "train": {"iterations": iterations, "steps_per_batch": batch.steps},
            "trainer": {
                "device": device,
                "recompute": "full" if args.gradient_checkpointing and device != "cpu" else "none",
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
        if any(isinstance(part["name"], str) for part in self._parts):
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
        state, control = self.state, SimpleNamespace(should_training_stop=False)
        labels, losses, waiting = [part["label"] for part in self._parts], [], []
        num_tokens, num_evaluations, seconds = 0.0, 0, 0.0
        self._call("on_train_begin", control)
        try:
            for record in run:
                state.global_step = (record["iteration"] + 1) * self._batch.steps
                state.epoch = (record["iteration"] + 1) * self._batch.prompts / len(self._rows)
                logs = logs_of(record, labels, self._batch, self._loss_scale)
                num_tokens += logs.pop("num_tokens")
                losses.append(logs.get("loss", 0.0))
                seconds += record["seconds"]
                waiting.append(logs)
                self._call("on_step_end", control)
                if self._logs_at(state.global_step):
                    self._log({**_means(waiting), "num_tokens": num_tokens}, control)
                    waiting.clear()
                for evaluated in _records(run.evaluations)[num_evaluations:]:
                    num_evaluations += 1
                    self._log(evaluation_logs_of(evaluated, labels), control, "on_evaluate")
                if control.should_training_stop:
                    run.stop()
                    break
        except BaseException:
            run.stop()
            raise
        self._call("on_train_end", control)
        return TrainOutput(state.global_step, fmean(losses or [0.0]), {"train_runtime": seconds})

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

    def _log(self, logs: dict[str, float], control: Any, event: str = "on_log") -> None:
        line = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**line, "step": self.state.global_step})
        self._call(event, control, **({"metrics": line} if event == "on_evaluate" else {"logs": line}))

    def _call(self, event: str, control: Any, **more: Any) -> None:
        for callback in self.callbacks:
            if (method := getattr(callback, event, None)) is not None:
                # They may return another control, as transformers' own do.
                changed = method(self.args, self.state, control, **more)
                if changed is not None and getattr(changed, "should_training_stop", False):
                    control.should_training_stop = True

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Scores the newest checkpoint on these rows, by default `eval_dataset`.

        Raises:
            ConfigError: there are none, or nothing is trained yet.
        """
        rows = self._eval_rows if eval_dataset is None else _rows("eval_dataset", eval_dataset)
        if rows is None:
            raise ConfigError("eval_dataset is missing: give it")
        figures = self._trained().evaluate(rows, samples=self._num_eval, temperature=self.args.temperature)
        logs = evaluation_logs_of(figures, [part["label"] for part in self._parts])
        self._log(logs, SimpleNamespace(should_training_stop=False), "on_evaluate")
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
        return self.run or open_run(self._dir)

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError("nothing is sent to the hub: trainer.save_model(FOLDER), and upload that")

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

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


def _model_name(model: Any, processing_class: Any) -> str:
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(
            f"model is a {type(model).__name__}: give a folder, model.save_pretrained(FOLDER), or a name of the hub; "
            "ranks load it themselves"
        )
    name = str(model)
    tokenizer = getattr(processing_class, "name_or_path", name)
    if tokenizer != name and Path(tokenizer).absolute() != Path(name).absolute():
        raise ConfigError(
            f"processing_class is of {tokenizer!r}, model is {name!r}: prompts have the model's own tokenizer; save "
            "both to one folder, and name that"
        )
    return name


def _rows(name: str, given: Any) -> Any:
    """A data set whose rows have a prompt.

    Raises:
        ConfigError: it is none.
    """
    if given is None:
        raise ConfigError(f"{name} is missing: give rows with a prompt")
    require_rows(name, given)
    first = next(iter(given))
    if not isinstance(first, Mapping) or not isinstance(first.get("prompt"), str | list):
        raise ConfigError(f"{name} has the row {first!r:.200}: expected a dictionary with a prompt, text or messages")
    return given


def _room_for_prompts(model: str, rows: Any, responses: int) -> int:
    """Tokens that the longest prompt may have, as far as its bytes and the model's positions say."""
    positions = ModelFiles.find(model, is_whole=False).config.get("max_position_embeddings")
    prompts = [row["prompt"] for some in rows for row in some]
    longest = max(len((p if isinstance(p, str) else json.dumps(p, ensure_ascii=False)).encode()) for p in prompts)
    longest += ROOM if isinstance(prompts[0], str) else TEMPLATE_ROOM
    return max(1, min(longest, positions - responses)) if isinstance(positions, int) else longest


def _means(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: fmean(line[name] for line in lines if name in line) for name in names}


def _records(table: Any) -> list[Any]:
    return table.to_dict("records") if hasattr(table, "to_dict") else list(table)
