"""`python -m benchmarks.producer.beside DIRECTORY SCRIPT RESPONSES`: the producer of the case beside training.

In a process of its own, as in a run. It prints its address as JSON, and ends with its standard input.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from async_rl.method.types import Batch, Prompt
from async_rl.producer.client import RemoteRun
from async_rl.producer.frames import Message
from async_rl.producer.process import ProducerAddress
from benchmarks.common.local_producer import LocalProducer, start_alone
from benchmarks.producer.mock_instance import Script
from benchmarks.producer.rig import make_batch, open_producer


class OwnBatches(LocalProducer):
    """Makes the batches that it is asked for."""

    def prompts_of(self, message: Message) -> list[dict[int, Prompt]]:
        (prompts,) = message["mini_batches"]
        return [dict(make_batch(message["start"], len(prompts)).prompts)]


class Elsewhere:
    """The producer in its process, for the trainer's."""

    def __init__(self, address: ProducerAddress) -> None:
        self._address = address

    def start(self, batch: Batch, version: str) -> RemoteRun:
        return start_alone(self._address, batch, version)


@contextmanager
def producer_elsewhere(directory: Path, script: Script, responses_per_prompt: int) -> Iterator[Elsewhere]:
    """A producer in a process of its own whose instances are in service and follow `script`."""
    arguments = [str(directory), json.dumps(asdict(script)), str(responses_per_prompt)]
    command = [sys.executable, "-m", "benchmarks.producer.beside", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        yield Elsewhere(ProducerAddress(**json.loads(process.stdout.readline())))
        process.stdin.close()


def main(directory: str, script: str, responses_per_prompt: str) -> None:
    with open_producer(
        Path(directory), Script(**json.loads(script)), int(responses_per_prompt), kind=OwnBatches
    ) as producer:
        print(json.dumps(asdict(producer.address)), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
