"""`python -m async_rl.evaluation.harness CONFIG --out DIR --tasks NAMES ...`: tasks of lm-eval at running instances.

For `async-rl eval --harness`. Loads the tasks, then appends a line to DIR/progress.jsonl; then waits for
`pool.instances`, whose `/v1/completions` lm-eval asks, and writes lm-eval's results to DIR/harness.json. With --results
it also writes the files of `lm_eval --output_path`.

Exit codes: 0 all evaluated, 1 an error, 2 invalid input.
"""

import asyncio
import difflib
import itertools
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lm_eval.evaluator import simple_evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable

from async_rl.config.file import load_config
from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError, ConfigError, InstanceError, WriteFailed
from async_rl.evaluation.__main__ import end, put_in_service
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.tokenizer import load_tokenizer
from async_rl.shared.files import write_file
from async_rl.shared.programs.command_line import USAGE_ERROR, Parser
from async_rl.shared.programs.failure_report import report_failure

log = logging.getLogger("async_rl.evaluation.harness")

REQUEST_TIMEOUT_S: Final = 6 * 3600
"""A request gets all its tokens in this time, however busy its instance is; lost instances end the program earlier."""

FIRST_SEED: Final = 1234
"""As lm-eval's own."""

CONCURRENCY: Final = 64
"""Requests to an instance that does not say how many it takes."""


class Tasks(TaskManager):  # type: ignore[misc]
    """Loads the named tasks, groups and tags once, with their data, before there is a model."""

    def __init__(self, names: Sequence[str], folder: Path | None) -> None:
        """
        Raises:
            ConfigError: a name is unknown, its data cannot be loaded, or it runs code of the model.
        """
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"--harness-tasks {str(folder)!r} is not a directory: name one with task files (*.yaml)")
        own = None if folder is None else TaskManager(include_path=str(folder), include_defaults=False)
        # lm-eval's own fourteen thousand files take long to read.
        is_own = own is not None and set(names) <= set(own.all_subtasks)
        super().__init__(include_path=None if folder is None else str(folder), include_defaults=not is_own)
        for name in names:
            if not self.match_tasks([name]):
                near = ", ".join(difflib.get_close_matches(name, self.all_tasks, n=5)) or "nothing"
                raise ConfigError(
                    f"--harness has {name!r}, which is no task of lm-eval; near it is {near}: name one of those that "
                    "`lm-eval ls tasks` lists, or with --harness-tasks a directory that has it"
                )
        self.names = self.match_tasks(list(names))
        try:
            self._loaded = super().load(self.names)
        # Whatever a task's file or its data's library raises.
        except Exception as error:
            raise ConfigError(f"--harness {','.join(names)}: lm-eval cannot load it: {error!r}") from error
        for name, task in self._loaded["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False):
                raise ConfigError(
                    f"--harness has {name!r}, which runs what the model writes on this machine, without a sandbox: "
                    "leave it out, and use --reward code"
                )

    def load(self, task_list: object) -> Any:
        return self._loaded


@dataclass(frozen=True, slots=True)
class Served:
    """The URLs of instances, their limit of a prompt and its response, and how many requests they take together."""

    urls: Sequence[str]
    max_model_len: int
    concurrency: int


async def wait_for_instances(config: Config, token: str | None) -> Served:
    """
    Raises:
        NoInstanceLeft, StaleWeights: no instance was healthy in time, or they do not serve one version.
    """
    pool = InferencePool(config.pool, token)
    try:
        await pool.wait_until_ready(publishes=False)
        urls = [*(await put_in_service(pool))[1]]
        clients = [member.client for member in pool.members if member.url in urls]
        lengths = [await client.max_model_len() for client in clients]
        concurrency = sum(client.max_concurrency or CONCURRENCY for client in clients)
        return Served(urls, min(lengths), concurrency)
    finally:
        await pool.close()


class Instances(LocalCompletionsAPI):  # type: ignore[misc]
    """lm-eval's client of completions, over several instances in turn; a retry asks another one."""

    def __init__(self, config: Config, served: Served, token: str | None, template: Mapping[str, Any] | None) -> None:
        """`template`: further arguments of the chat template; None without one."""
        self._urls = itertools.cycle([f"{url}/v1/completions" for url in served.urls])
        self._seeds = itertools.count(FIRST_SEED)
        self._token = token
        self._template = template or {}
        super().__init__(
            tokenizer=config.model.path,
            tokenizer_backend="huggingface",
            num_concurrent=max(2, served.concurrency),
            max_length=served.max_model_len,
            max_gen_toks=config.rollout.max_response_tokens,
            timeout=REQUEST_TIMEOUT_S,
        )
        # As the tokenizer itself begins a text; a chat template has it.
        first = self.tokenizer("a").input_ids[0]
        self.add_bos_token = template is None and first == self.tokenizer.bos_token_id

    @property
    def base_url(self) -> str:
        return next(self._urls)

    @base_url.setter
    def base_url(self, url: object) -> None:
        """The base class sets its own."""

    @property
    def api_key(self) -> str:
        return self._token or ""

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._template,
        )
        return str(text)

    def _create_payload(self, *args: Any, seed: int = 0, **others: Any) -> dict[str, Any]:
        """Each request has a seed of its own: with the same one, repeated samples would be the same."""
        payload: dict[str, Any] = super()._create_payload(*args, seed=next(self._seeds), **others)
        if payload.get("stop"):
            payload["stop"] = [each for each in payload["stop"] if each]
        return payload

    async def amodel_call(self, *args: Any, generate: bool = True, gen_kwargs: Any = None, **others: Any) -> Any:
        """Texts end before what stops them, which the embedded engine includes."""
        answers = await super().amodel_call(*args, generate=generate, gen_kwargs=gen_kwargs, **others)
        stops = (gen_kwargs or {}).get("until")
        return [postprocess_generated_text(text, stops, None) for text in answers] if generate else answers


def evaluate(config: Config, tasks: Tasks, options: Any, token: str | None) -> dict[str, Any]:
    """lm-eval's results, which are written as it does where the options name a place.

    Raises:
        NoInstanceLeft, StaleWeights, InstanceError: as the instances fail.
        WriteFailed: the results cannot be written.
    """
    served = asyncio.run(wait_for_instances(config, token))
    template = config.prompts.template_arguments if options.chat_template else None
    model = Instances(config, served, token, template)
    tracker = EvaluationTracker(output_path=None if options.results is None else str(options.results))
    try:
        results: dict[str, Any] = simple_evaluate(
            model,
            {"model": options.name},
            tasks.names,
            limit=options.limit,
            apply_chat_template=options.chat_template,
            evaluation_tracker=tracker,
            task_manager=tasks,
        )
    except (OSError, RuntimeError) as error:
        raise InstanceError(f"a request of lm-eval failed: {error!r}; the log has the answer") from error
    samples = results.pop("samples")
    if options.results is not None:
        tracker.save_results_aggregated(results=results, samples=samples)
        for name in results["configs"]:
            tracker.save_results_samples(task_name=name, samples=samples[name])
        # It only logs what goes wrong.
        if not list(options.results.glob(f"*/results_{tracker.date_id}.json")):
            raise WriteFailed(f"cannot write the results into {str(options.results)!r}: the log says why")
    return results


def main(arguments: Sequence[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGTERM, end)
    parser = Parser(
        "python -m async_rl.evaluation.harness",
        "Runs tasks of lm-eval at running instances.",
        "CONFIG --out DIR --tasks NAMES [--section.key VALUE ...]",
        Config,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, as that of a run")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of progress.jsonl and harness.json")
    parser.add_argument("--tasks", required=True, metavar="NAMES", help="tasks, groups and tags, with commas between")
    parser.add_argument("--include", type=Path, metavar="DIR", help="task files of one's own")
    parser.add_argument("--limit", type=int, help="take the first so many rows of each task")
    parser.add_argument("--chat-template", action="store_true", help="apply the tokenizer's chat template")
    parser.add_argument("--results", type=Path, metavar="DIR", help="where lm-eval writes its own files")
    parser.add_argument("--name", help="the model's name in the results")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config, parser.overrides)
        tokenizer, _ = load_tokenizer(config.model.path, config.model.path)
        if options.chat_template and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(f"the tokenizer of {options.name!r} has no chat template: leave it out")
        tasks = Tasks(options.tasks.split(","), options.include)
        with (options.out / "progress.jsonl").open("a") as progress:
            progress.write(json.dumps({"tasks": tasks.names}) + "\n")
        results = evaluate(config, tasks, options, os.environ.get("ASYNC_RL_TOKEN"))
    except AsyncRLError as error:
        report_failure(error, os.environ)
        log.error("%s: %s", type(error).__name__, error)
        return USAGE_ERROR if isinstance(error, ConfigError) else 1
    write_file(options.out / "harness.json", json.dumps(results, default=handle_non_serializable))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
