"""The duration of one publish between two processes of this machine; run as a program, it is the receiver.

python -m benchmarks.gpu.publish PORT BACKEND NUM_UPDATES < SPECS
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from async_rl.shared.weights.fingerprint import TensorSpec
from async_rl.shared.weights.store import StoreServer, join_rendezvous
from async_rl.shared.weights.stream import WeightGroup

MakeStream = Callable[[], Iterable[tuple[TensorSpec, torch.Tensor]]]

HOST = "127.0.0.1"
SECRET = "of this benchmark"
TIMEOUT_S = 120.0
BUCKET_BYTES = 256 * 2**20
POLL_S = 0.1


def measure_publish(specs: Sequence[TensorSpec], make_stream: MakeStream, backend: str, repeats: int) -> dict[str, Any]:
    """Seconds of one publish, fingerprint included, once both ends are ready; or why it was skipped.

    Args:
        specs: the tensors of the stream, in its order.
        make_stream: starts the stream.
    """
    if backend == "nccl" and torch.cuda.device_count() < 2:
        return {"skipped": "NCCL needs a GPU for each end, and this machine has one"}
    server = StoreServer(HOST, [SECRET])
    command = [sys.executable, "-m", "benchmarks.gpu.publish", str(server.port), backend, str(repeats + 1)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as receiver:
        try:
            assert receiver.stdin is not None
            json.dump([asdict(spec) for spec in specs], receiver.stdin)
            receiver.stdin.close()
            group = WeightGroup(server.store(TIMEOUT_S), 0, 2, backend, TIMEOUT_S)
            # The first publish creates the connections.
            seconds = list(_send_all(group, make_stream, receiver, repeats + 1))[1:]
            group.close()
            server.close()
            receiver.wait(TIMEOUT_S)
        finally:
            receiver.kill()
    num_bytes = sum(spec.num_bytes for spec in specs)
    median = statistics.median(seconds)
    return {"publish_s": round(median, 5), "bytes": num_bytes, "gb_per_s": round(num_bytes / median / 1e9, 3)}


def _send_all(
    group: WeightGroup, make_stream: MakeStream, receiver: "subprocess.Popen[str]", num_updates: int
) -> Iterator[float]:
    for _ in range(num_updates):
        while group.wait_accepted(POLL_S):
            assert receiver.poll() is None, f"the receiver ended with exit code {receiver.returncode}"
        started = time.perf_counter()
        group.send(make_stream(), BUCKET_BYTES)
        yield time.perf_counter() - started


def main(port: int, backend: str, num_updates: int) -> None:
    specs = [TensorSpec(x["name"], x["dtype_name"], tuple(x["shape"])) for x in json.load(sys.stdin)]
    if backend == "nccl":
        # The sender uses the first GPU.
        torch.cuda.set_device(1)
    group = WeightGroup(join_rendezvous(HOST, port, SECRET, TIMEOUT_S), 1, 2, backend, TIMEOUT_S)
    for _ in range(num_updates):
        group.announce(1)
        for _ in group.receive(specs, BUCKET_BYTES):
            pass
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
