"""A chain of several receivers, each a process: what the sender's link carries, and who fails when."""

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from async_rl.errors import PublishError
from async_rl.shared.weights import links
from async_rl.shared.weights.fingerprint import TensorSpec
from tests.support.stream_receiver import make_tensors
from tests.support.stream_workers import Workers

pytestmark = pytest.mark.distributed

BUCKET_BYTES = 1 << 20
TCP_INFO_BYTES_ACKED = 120
"""In Linux's struct tcp_info, 64 bits."""
MODEL_BYTES = sum(spec.num_bytes for spec, _ in make_tensors())


def num_bytes_acknowledged() -> int:
    """Of all that this process has sent by its present TCP connections."""
    total = 0
    for path in Path("/proc/self/fd").iterdir():
        # What is not of TCP, or is closed by now.
        with suppress(OSError):
            if str(path.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", info, TCP_INFO_BYTES_ACKED)[0]
    return total


def test_the_sender_sends_the_weights_once_however_many_receive_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP, as to another host."""
    monkeypatch.setattr(links, "NAMES_SOCKETS", False)
    workers = Workers(3, BUCKET_BYTES)
    workers.tell("receive, stay")
    workers.wait_until_announced()
    before = num_bytes_acknowledged()
    sent = workers.group.send(make_tensors(), BUCKET_BYTES)
    assert [pipe.recv() for pipe in workers.pipes] == [(True, sent)] * 3
    assert MODEL_BYTES <= num_bytes_acknowledged() - before < 1.2 * MODEL_BYTES
    workers.tell("end")
    workers.group.close()


@pytest.mark.parametrize("how", ["kill", "stop", "fail"])
def test_one_amid_the_chain_ends_the_broadcast_for_all_in_time(how: str) -> None:
    """At once where it is gone or has failed, and after the timeout where it has stopped."""
    timeout_s = 2.0 if how == "stop" else 120.0
    workers = Workers(3, BUCKET_BYTES, timeout_s)
    for number, pipe in enumerate(workers.pipes):
        pipe.send("endless, fails" if how == "fail" and number == 1 else "endless")
    workers.wait_until_announced()
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

    def without_end() -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        yield from make_tensors()
        if how in signals:
            workers.processes[1].send_signal(signals[how])
        while True:
            yield from make_tensors()

    begun = time.monotonic()
    with pytest.raises(PublishError, match="weight broadcast broke"):
        workers.group.send(without_end(), BUCKET_BYTES)
    workers.group.close()
    for pipe in (workers.pipes[0], workers.pipes[2]):
        assert "weight broadcast broke" in pipe.recv()
    assert time.monotonic() - begun < 60.0, "nobody waits for a timeout of 120 s"
    for process in workers.processes:
        process.kill()
        process.wait()
