"""`python -m benchmarks.producer.drain WORK`: replicas of a trainer that only take their groups, a thread for each.

`WORK` is JSON of `Work`. It prints the number of responses that each of its replicas took, and ends.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from async_rl.producer.client import RemoteRolloutSource
from async_rl.producer.process import ProducerAddress
from benchmarks.producer.rig import VERSION, make_batch

LOST_AFTER_S = 120.0
MAX_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class Work:
    """The replicas of one process, of `num_replicas` in all; each takes its part of `num_batches` batches."""

    address: tuple[str, int, str]
    replicas: Sequence[int]
    num_replicas: int
    num_batches: int
    num_prompts: int

    def drain(self, replica: int) -> int:
        """Takes all groups of one replica; returns how many responses they had."""
        connection = ProducerAddress(*self.address).connect(LOST_AFTER_S, replica=replica)
        rollouts = RemoteRolloutSource(connection, lambda: None, replica, self.num_replicas)
        taken = 0
        for iteration in range(self.num_batches):
            with rollouts.start([make_batch(iteration, self.num_prompts)], VERSION) as run:
                while groups := run.ready(wait=True):
                    taken += sum(len(group.responses) for group in groups)
                    run.begin(groups)
                run.begin([])
        connection.close()
        return taken


def drain_elsewhere(address: ProducerAddress, num_replicas: int, num_batches: int, num_prompts: int) -> list[int]:
    """Has some processes take all batches; returns how many responses each replica took."""
    num_processes = min(num_replicas, MAX_PROCESSES)
    works = [
        Work(
            (address.host, address.port, address.secret),
            [*range(number, num_replicas, num_processes)],
            num_replicas,
            num_batches,
            num_prompts,
        )
        for number in range(num_processes)
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.producer.drain", json.dumps(asdict(work))],
            stdout=subprocess.PIPE,
        )
        for work in works
    ]
    return [taken for process in processes for taken in json.loads(process.communicate()[0])]


def main(given: str) -> None:
    work = Work(**json.loads(given))
    with ThreadPoolExecutor(len(work.replicas)) as threads:
        print(json.dumps(list(threads.map(work.drain, work.replicas))))


if __name__ == "__main__":
    main(sys.argv[1])
