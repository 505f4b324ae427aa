"""The prompts of a run by their names, on every rank: the producer reads and tokenizes them."""

from collections.abc import Mapping
from typing import Any

from async_rl.checks.preflight.adapter import first_adapters
from async_rl.checks.preflight.model import find_checkpoint, read_shape
from async_rl.checks.preflight.resume import Contents
from async_rl.config.pipeline_section import NODE
from async_rl.config.sections import Config
from async_rl.errors import ConfigError, WriteFailed
from async_rl.producer.client import Control
from async_rl.rollouts.data.prompts import PromptSource
from async_rl.rollouts.rewards.identity import reward_identity
from async_rl.shared.programs.user_command import COMMAND
from async_rl.shared.programs.user_file import PREFIX, file_identity
from trainer.hf.adapters import require_base, weights_digest
from trainer.parallel import Parallel

CACHE = "prompts"
"""The directory of tokenized prompts, below that of the run."""


def begin_loading(config: Config, control: Control) -> None:
    """Has the producer read the sources, beside whatever the main rank does meanwhile.

    Raises:
        ConfigError: there is no such model.
    """
    control.begin("load", str(find_checkpoint(config.model.path)), str(config.run.dir / CACHE))


def load_prompts_and_contents(
    config: Config, parallel: Parallel, control: Control | None
) -> tuple[PromptSource, Contents]:
    """The prompts by their names, and what a checkpoint records of them, of the reward and of the algorithm.

    All ranks call it and wait for the main rank, which has begun the producer's call `load`, see `begin_loading`.

    Raises:
        ConfigError: on all ranks; a source, the tokenizer or a file of the user's cannot be read, or the algorithm's
            differs between the hosts of replicas.
        WriteFailed: on all ranks; there is no room for the tokenized prompts.
    """
    outlines: list[dict[str, str]] | None = None
    said: dict[str, Any] = {}
    try:
        if parallel.is_leader:
            said["algorithm"] = _algorithm_identity(config)
        if control is not None:
            loaded = control.result()
            outlines = loaded["outlines"]
            said["contents"] = contents_of(config, loaded, said["algorithm"]).as_json()
    except (ConfigError, WriteFailed) as error:
        said["failure"] = [str(error), isinstance(error, WriteFailed)]
    reported = parallel.gather_json(said)
    for each in reported:
        if "failure" in each:
            message, no_room = each["failure"]
            raise WriteFailed(message) if no_room else ConfigError(message)
    if len({each["algorithm"] for each in reported if "algorithm" in each}) > 1:
        raise ConfigError(f"the file of algorithm.name {config.algorithm.name!r} is not the same on all hosts")
    (contents,) = (each["contents"] for each in reported if "contents" in each)
    outlines = parallel.broadcast_json(outlines)
    assert outlines is not None
    return PromptSource.by_outlines(outlines, config.prompts, config.run.seed), Contents(**contents)


def contents_of(config: Config, loaded: Mapping[str, Any], algorithm: str) -> Contents:
    """What a checkpoint records, of what the producer has `loaded` and the identity of the algorithm.

    Raises:
        ConfigError: the file of the reward or of the rollout program cannot be read, or adapters that the run starts
            from belong to other weights.
    """
    below_adapters = (config.model.path, config.algorithm.critic.critic_path) if config.adapter.is_given else ()
    bases = ["" if path is None else weights_digest(find_checkpoint(path)) for path in below_adapters]
    if (path := first_adapters(config)) is not None:
        require_base(path, lambda: bases[0], f"model.path {config.model.path!r}")
    base, critic_base = bases or ("", "")
    shape = read_shape(find_checkpoint(config.model.path)).as_json()
    return Contents(loaded["digests"], _scoring_identity(config), algorithm, base, critic_base, shape)


def _scoring_identity(config: Config) -> str:
    """Of the reward and of the nodes after it, and of the rollout program: of its file, or of a command its words."""
    nodes = [f", node {node.name}: {file_identity(NODE, node.function)}" for node in config.pipeline.nodes]
    reward, program = reward_identity(config.reward) + "".join(nodes), config.rollout.program
    if program.startswith(COMMAND):
        return f"{reward}, rollouts by {program}"
    if not program.startswith(PREFIX):
        return reward
    return f"{reward}, rollouts by {file_identity('rollout.program', program)}"


def _algorithm_identity(config: Config) -> str:
    return file_identity("algorithm.name", config.algorithm.name) if config.algorithm.is_own else ""
