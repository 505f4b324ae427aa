"""`python -m async_rl.evaluation CONFIG --out DIR [--section.key VALUE ...]`: evaluates running instances.

Takes the config of a run: its `[[evaluation.sets]]` are sampled at `pool.instances`, whose weights are not changed,
and scored as in that run; where it has a rollout program, by that. Writes into DIR progress.jsonl, a line per finished
prompt, results.jsonl, a line per set, and responses.jsonl, the responses to the first prompts of each set.

Exit codes: 0 all evaluated, 1 an error, including that of a prompt, 2 invalid input.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import FrameType

from async_rl.config.evaluation_section import EvaluationSection
from async_rl.config.file import load_config
from async_rl.config.rollout_section import RolloutSection
from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError, ConfigError, InstanceError, NoInstanceLeft, StaleWeights
from async_rl.evaluation.evaluator import Evaluator
from async_rl.evaluation.recorder import Output, SetResult
from async_rl.evaluation.sets import LoadedSet, load_sets
from async_rl.method.types import WeightVersion
from async_rl.rollouts.agents.program_rollouts import make_group_maker
from async_rl.rollouts.groups.prompt_length import require_len
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.rewards import make_reward
from async_rl.rollouts.rewards.readable_answers import answer_check
from async_rl.rollouts.tokenizer import load_tokenizer
from async_rl.shared.programs.command_line import USAGE_ERROR, Parser
from async_rl.shared.programs.extras import require_extras
from async_rl.shared.programs.failure_report import report_failure

log = logging.getLogger("async_rl.evaluation")


def main(arguments: Sequence[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGTERM, end)
    parser = Parser(
        "python -m async_rl.evaluation",
        "Evaluates what running instances serve.",
        "CONFIG --out DIR [--section.key VALUE ...]",
        Config,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, as that of a run")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the results go")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config, parser.overrides)
        require_extras("python -m async_rl.evaluation", "trainer")
        asyncio.run(evaluate(config, options.out, os.environ.get("ASYNC_RL_TOKEN")))
    except AsyncRLError as error:
        report_failure(error, os.environ)
        log.error("%s: %s", type(error).__name__, error)
        return USAGE_ERROR if isinstance(error, ConfigError) else 1
    return 0


async def evaluate(config: Config, out: Path, token: str | None) -> None:
    """Evaluates all sets, and writes the results as described above.

    Raises:
        ConfigError: there is no set, a set or the reward cannot be loaded, or a prompt leaves no room for a response.
        NoInstanceLeft, InstanceError: no instance was healthy, or they do not serve one version, or prompts failed.
    """
    if not config.evaluation.sets:
        raise ConfigError("evaluation.sets is empty: add an [[evaluation.sets]] with a name and a source")
    tokenizer, model_tokens = load_tokenizer(config.model.path, config.model.path)
    sets = load_sets(config.evaluation, config.prompts, tokenizer, config.run.seed, answers=answer_check(config.reward))
    reward = make_reward(config.reward)
    results: list[SetResult] = []
    async with AsyncExitStack() as closing:
        output = closing.enter_context(Output(out, sets))
        pool = InferencePool(config.pool, token)
        pool.model_tokens = model_tokens
        closing.push_async_callback(pool.close)
        await pool.wait_until_ready(publishes=False)
        for loaded in sets:
            _require_room(config.rollout, loaded, pool.max_model_len)
        version, _ = await put_in_service(pool)
        maker = make_group_maker(config, pool, tokenizer, reward)
        closing.push_async_callback(maker.close)
        await maker.start()
        once = EvaluationSection(sets=config.evaluation.sets, every=1)
        evaluator = Evaluator(pool, maker, reward, sets, once, results.extend, output.on_scored)
        await evaluator.run(0, version)
    _require_complete(results, evaluator.first_failure)
    output.finish(results)


def _require_room(rollout: RolloutSection, loaded: LoadedSet, max_model_len: int | None) -> None:
    longest = max(loaded.prompts, key=lambda prompt: len(prompt.token_ids))
    try:
        require_len(rollout, longest, max_model_len)
    except ConfigError as error:
        raise ConfigError(f"evaluation set {loaded.name!r}: {error}") from error


def _require_complete(results: Sequence[SetResult], first_failure: str) -> None:
    total = sum(result.total_prompts for result in results)
    num_missing = total - sum(result.num_prompts for result in results)
    if num_missing:
        raise InstanceError(f"{num_missing} of {total} prompts could not be evaluated; the first one: {first_failure}")


async def put_in_service(pool: InferencePool) -> tuple[WeightVersion, Collection[str]]:
    """Sets the version that the instances serve, which must be one, as the version to evaluate; returns it and their
    URLs. Instances that were not healthy in time are left out."""
    members = [member for member in await pool.begin_publish() if member.client.knows_its_server]
    versions = {}
    for member in members:
        try:
            versions[member.url] = await member.client.weight_version()
        except InstanceError as error:
            log.warning("going on without %s: %s", member.url, error)
    if not versions:
        raise NoInstanceLeft(pool.describe("no instance says which weights it serves"))
    if len(set(versions.values())) > 1:
        raise StaleWeights(f"the instances serve different weight versions, {versions}: evaluate one at a time")
    version = next(iter(versions.values()))
    await pool.end_publish(version, versions)
    return version, versions


def end(signum: int, frame: FrameType | None) -> None:
    """SIGTERM ends the program by an exception, so that everything it opened is closed."""
    sys.exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
