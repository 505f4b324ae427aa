"""What `async-rl check` tries: it renders and measures rows as a run does, and calls the reward once, in its worker.

`python -m async_rl.checks.preflight.trial CONFIG [--section.key=VALUE ...]` prints a `Trial` as JSON. It imports
transformers, which takes seconds, so `async-rl run` leaves it out: the trainer measures all rows, and its first batch
calls the reward.
"""

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from async_rl.config.file import load_config
from async_rl.config.reward_section import RewardSection
from async_rl.config.sections import Config
from async_rl.errors import ConfigError, NodeFailed, RewardError
from async_rl.method.token_arrays import Logprobs, TokenIds
from async_rl.method.types import Group, Prompt, Response
from async_rl.rollouts.data.evaluation_prompts import HELD_OUT, prompts_of_set
from async_rl.rollouts.data.part import SourcePart, parts_of
from async_rl.rollouts.data.rendering import Tokenizer
from async_rl.rollouts.data.table_files import MeasuredPart, measure_part
from async_rl.rollouts.nodes.maker import NodeCalls
from async_rl.rollouts.rewards.process_reward import ProcessReward
from async_rl.rollouts.rewards.readable_answers import answer_check
from async_rl.rollouts.rewards.row_parts import labels_of
from async_rl.rollouts.tokenizer import load_tokenizer
from async_rl.shared.workers.function import NotInTime

MADE_UP = ("", "I do not know.", "The answer is 42.", "<think>1 + 1</think> \\boxed{7}")
"""Responses as a model may give them before it has learned anything, the empty one included."""

CALL_S = 10.0
"""For the call of the reward: whoever checks a config waits for it."""

SERVICES = ("http", "judge")
"""Rewards that would ask a service, which is looked for and not asked."""


@dataclass(slots=True)
class Trial:
    """What it found: `errors` would end the run, `warnings` leave rows out, or could not be decided; `notes` are what
    settings mean for these rows."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def try_out(config: Config) -> Trial:
    """Tries what the other checks have found sound."""
    trial = Trial()
    try:
        tokenizer, _ = load_tokenizer(config.model.path, config.model.path)
    except ConfigError as error:
        trial.errors.append(str(error))
        return trial
    trained = [each for part in parts_of(config.prompts) if (each := _measure(part, "", tokenizer, config, trial))]
    for of_set in config.evaluation.sets:
        if of_set.source != HELD_OUT:
            (part,) = parts_of(prompts_of_set(of_set, config.prompts))
            _measure(part, f"evaluation set {of_set.name!r}: ", tokenizer, config, trial, of_set.max_prompts)
    num_left = sum(measured.num_left for measured in trained) - int(config.prompts.held_out)
    if not trial.errors and all(measured.is_whole for measured in trained) and num_left < config.prompts.num_drawn:
        drawn = config.prompts.drawn_keys
        trial.errors.append(f"{max(num_left, 0)} prompts are left for {drawn}: give more rows or a smaller batch")
    if trained and not trial.errors and config.train.epochs is not None:
        _count_epochs(config, num_left if all(measured.is_whole for measured in trained) else None, trial)
    if trained:
        asyncio.run(_try_reward(config, trained[0].first, tokenizer, trial))
    if trained and config.pipeline.nodes and not trial.errors:
        asyncio.run(_try_nodes(config, trained[0].first, tokenizer, trial))
    return trial


def _count_epochs(config: Config, num_left: int | None, trial: Trial) -> None:
    """Says how many iterations the epochs are; `num_left` prompts are not held out by their number."""
    epochs, prompts = f"train.epochs = {config.train.epochs:g}", config.prompts
    if num_left is None:
        trial.notes.append(f"{epochs}: the start reads all rows, and makes a number of iterations of it")
        return
    share = prompts.held_out % 1
    num_prompts = round(num_left * (1 - share))
    about = "about " if share or prompts.deduplicate else ""
    try:
        iterations = config.with_iterations(num_prompts).train.num_iterations
    except ConfigError as error:
        trial.errors.append(str(error))
        return
    trial.notes.append(
        f"{epochs} of {about}{num_prompts} prompts, {prompts.num_drawn} a batch: {iterations} iterations"
    )


def _measure(
    part: SourcePart, what: str, tokenizer: Tokenizer, config: Config, trial: Trial, max_rows: int | None = None
) -> MeasuredPart | None:
    try:
        measured = measure_part(part, part.rows(config.run.seed), tokenizer, answer_check(config.reward), max_rows)
    except ConfigError as error:
        trial.errors.append(f"{what}{error}")
        return None
    trial.warnings += [f"{what}prompts.source {part.source!r}: {line}" for line in measured.report]
    return measured


async def _try_reward(config: Config, prompt: Prompt, tokenizer: Tokenizer, trial: Trial) -> None:
    """Loads each reward; those of the prompt score made-up responses to it."""
    try:
        labels = labels_of(config.reward, prompt.row, prompt.reward) or list(config.reward.single_rewards)
    except ValueError as error:
        trial.errors.append(f"row {prompt.prompt_id}: {error}")
        return
    responses = _made_up(config, tokenizer, MADE_UP)
    for label, alone in config.reward.single_rewards.items():
        if alone.name not in SERVICES:
            await _try(alone, label, prompt, responses if label in labels else [], trial)


async def _try_nodes(config: Config, prompt: Prompt, tokenizer: Tokenizer, trial: Trial) -> None:
    """Calls the nodes of the pipeline with made-up responses, of which every second one has the reward 1."""
    once = {"num_workers": 1, "max_attempts": 1}
    nodes = [
        node.model_copy(update=once | {"timeout_s": min(node.timeout_s, CALL_S)}) for node in config.pipeline.nodes
    ]
    # A response that was sampled has a token at least.
    responses = tuple(_made_up(config, tokenizer, [text for text in MADE_UP if text]))
    rewards = tuple(float(i % 2) for i in range(len(responses)))
    group = Group(
        iteration=0,
        index=0,
        prompt=prompt,
        responses=responses,
        rewards=rewards,
        reward_parts=tuple((label, rewards) for label in config.reward.weights),
        weight_version="",
        started_s=0.0,
        finished_s=0.0,
    )
    calls = NodeCalls(nodes)
    try:
        await calls.start()
        await calls.applied(group)
    except ConfigError as error:
        trial.errors.append(str(error))
    except NodeFailed as error:
        said = f"tried with made-up responses to row {prompt.prompt_id} (from 0), {error}"
        may_take_longer = any(node.timeout_s > CALL_S for node in config.pipeline.nodes)
        if may_take_longer and any(isinstance(each, NotInTime) for each in _causes(error)):
            trial.warnings.append(said)
        else:
            trial.errors.append(f"{said.rstrip()}\ncorrect the function of the node, or start what it asks")
    finally:
        await calls.close()


def _made_up(config: Config, tokenizer: Tokenizer, texts: Sequence[str]) -> list[Response]:
    return [_response(texts[i % len(texts)], tokenizer) for i in range(config.rollout.responses_per_prompt)]


def _response(text: str, tokenizer: Tokenizer) -> Response:
    (token_ids,) = tokenizer([text], add_special_tokens=False)["input_ids"]
    return Response(
        token_ids=TokenIds(token_ids),
        logprobs=Logprobs([-1.0] * len(token_ids)),
        text=text,
        finish_reason="stop",
        weight_spans=(),
        instance="",
    )


async def _try(config: RewardSection, label: str, prompt: Prompt, responses: list[Response], trial: Trial) -> None:
    """Loads one reward and, with responses, calls it."""
    timeout_s = min(config.timeout_s, CALL_S)
    once = config.model_copy(update={"num_workers": 1, "max_attempts": 1, "timeout_s": timeout_s})
    reward = ProcessReward(once, label)
    try:
        await reward.start()
        if responses:
            await reward.score(prompt, responses)
    except ConfigError as error:
        trial.errors.append(str(error))
    except RewardError as error:
        said = f"tried with made-up responses to row {prompt.prompt_id} (from 0), {error}"
        if config.timeout_s > CALL_S and any(isinstance(each, NotInTime) for each in _causes(error)):
            trial.warnings.append(said)
        else:
            remedy = "correct the reward, or name the columns that it reads in prompts.columns"
            trial.errors.append(f"{said.rstrip()}\n{remedy}")
    finally:
        await reward.close()


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


if __name__ == "__main__":
    tried = try_out(load_config(Path(sys.argv[1]), sys.argv[2:]))
    # On a line of its own, whatever was printed.
    print("\n" + json.dumps(asdict(tried)))
