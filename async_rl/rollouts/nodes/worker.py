"""The worker process of a node: `python -m async_rl.rollouts.nodes.worker NODE MARK`, the node's section as JSON."""

import inspect
from collections.abc import Mapping
from typing import Any

from async_rl.config.pipeline_section import NODE, PipelineNode
from async_rl.errors import ConfigError
from async_rl.rollouts.nodes.results import NotNumbers, numbers_of
from async_rl.shared.programs.user_file import is_async, load_from_file, traceback_of_user
from async_rl.shared.workers.child import Channel, Served, serve

Value = tuple[Mapping[str, Any], int, tuple[int, ...]]
"""(arguments by name, number of rollouts, sampled tokens of each response)"""


def load(section: str) -> Served:
    node = PipelineNode.model_validate_json(section)
    function = load_from_file(NODE, node.function)
    try:
        inspect.signature(function).bind(**dict.fromkeys(node.reads))
    except TypeError as error:
        raise ConfigError(
            f"{NODE} {node.function!r} is called with what the node reads, {', '.join(node.reads)}: {error}"
        ) from error

    def run(value: Value, channel: Channel) -> list[Any]:
        arguments, num_rollouts, lengths = value
        return numbers_of(node.written, function(**arguments), num_rollouts, lengths)

    async def run_async(value: Value, channel: Channel) -> list[Any]:
        arguments, num_rollouts, lengths = value
        return numbers_of(node.written, await function(**arguments), num_rollouts, lengths)

    of_call = is_async(function)
    return Served(run_async if of_call else run, of_call, _described, [of_call])


def _described(error: BaseException) -> list[str]:
    return [str(error) if isinstance(error, NotNumbers) else traceback_of_user(error)]


if __name__ == "__main__":
    serve(load)
