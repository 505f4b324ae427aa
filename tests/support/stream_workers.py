"""Processes that receive a stream, and the weight group that this process sends it to."""

import subprocess
import sys
from multiprocessing.connection import Connection, Listener

from async_rl.shared.weights.store import StoreServer
from async_rl.shared.weights.stream import WeightGroup
from tests.support import stream_receiver
from tests.support.stream_receiver import HOST, KEY, SECRET


class Workers:
    """Receivers of ranks 1 to `number`, and the sender's end of their group."""

    def __init__(self, number: int, bucket_bytes: int, timeout_s: float = 120.0) -> None:
        self.world_size = number + 1
        self.server = StoreServer(HOST, [SECRET] * number)
        self.pipes: list[Connection] = []
        self.processes = []
        with Listener(authkey=KEY) as listener:
            for rank in range(1, self.world_size):
                numbers = (self.server.port, rank, self.world_size, bucket_bytes, timeout_s)
                command = [sys.executable, "-m", stream_receiver.__name__, str(listener.address), *map(str, numbers)]
                self.processes.append(subprocess.Popen(command))
                self.pipes.append(listener.accept())
        self.group = WeightGroup(self.server.store(timeout_s), 0, self.world_size, "sockets", timeout_s)

    def tell(self, command: str) -> None:
        for pipe in self.pipes:
            pipe.send(command)

    def wait_until_announced(self) -> None:
        assert not self.group.wait_accepted(120.0)
