"""A training rank's connection to the producer: frames, read by the thread that waits for them."""

import select
import socket
import time
from pathlib import Path

from async_rl.errors import ProducerLost
from async_rl.producer.frames import LENGTHS, Message, decode_message, error_from_data, frame

CONNECT_TIMEOUT_S = 10.0
RECEIVE_BYTES = 2**20
ALIVE = "alive"
"""A message that only says so: the producer sends one each second in which it has nothing else to say."""


class Connection:
    """Not for several threads at once.

    Args:
        address: of the producer.
        greeting: says who connects; see `producer.server`.
        lost_after_s: a producer that says nothing for so long, while it is waited for, counts as lost.

    Raises:
        ProducerLost: it does not answer.
    """

    def __init__(self, address: tuple[str, int], greeting: Message, lost_after_s: float) -> None:
        self._where = f"the producer at {address[0]} port {address[1]}"
        self._lost_after_s = lost_after_s
        self._buffer = bytearray()
        self._start = 0
        self._silent_s = 0.0
        """How long it has been waited for without a word."""
        try:
            self._socket = socket.create_connection(address, CONNECT_TIMEOUT_S)
        except OSError as error:
            raise ProducerLost(f"{self._where} cannot be reached: {error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(lost_after_s)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.send(greeting)
        self.clock_offset_s = self._meet()
        """Our `time.monotonic()` minus the producer's; 0 on its host."""

    def send(self, message: Message) -> None:
        """
        Raises:
            ProducerLost: it has ended, or takes nothing for `lost_after_s`.
        """
        try:
            self._socket.sendall(b"".join(frame(message)))
        except OSError as error:
            raise ProducerLost(f"{self._where} was lost: {error}") from error

    def receive(self, wait_s: float) -> tuple[Message, bytes] | None:
        """The next frame, or None if none came within `wait_s`.

        Raises:
            ProducerLost: it has ended, or has said nothing for `lost_after_s`.
        """
        deadline = time.monotonic() + wait_s
        while True:
            if (found := self._take()) is not None:
                if ALIVE not in found[0]:
                    return found
                continue
            left_s = deadline - time.monotonic()
            if not self._fill(max(0.0, left_s)) and left_s <= 0:
                return None

    def close(self) -> None:
        self._socket.close()

    def _meet(self) -> float:
        """Waits for the answer to the greeting; returns the offset of the clocks."""
        asked_s = time.monotonic()
        answer = self.receive(self._lost_after_s)
        if answer is None:
            raise ProducerLost(f"{self._where} does not answer")
        message, _ = answer
        if "failed" in message:
            raise error_from_data(message["failed"])
        # Between hosts half of the way there and back is the error; on one host the clock is the same.
        same_host = message["boot_id"] == boot_id()
        return 0.0 if same_host else (asked_s + time.monotonic()) / 2 - message["clock_s"]

    def _fill(self, wait_s: float) -> bool:
        """Whether bytes came within `wait_s`."""
        began_s = time.monotonic()
        if not self._poll.poll(1000 * min(wait_s, self._lost_after_s)):
            self._silent_s += time.monotonic() - began_s
            if self._silent_s > self._lost_after_s:
                raise ProducerLost(
                    f"{self._where} has said nothing for trainer.lost_after_s = {self._lost_after_s:g} s: it hangs, or "
                    "its host is cut off"
                )
            return False
        try:
            received = self._socket.recv(RECEIVE_BYTES)
        except OSError as error:
            raise ProducerLost(f"{self._where} was lost: {error}") from error
        if not received:
            raise ProducerLost(f"{self._where} has ended; its last words are in the log")
        self._silent_s = 0.0
        self._buffer += received
        return True

    def _take(self) -> tuple[Message, bytes] | None:
        """The first frame of what has been received, if it is whole."""
        have = len(self._buffer) - self._start
        if have >= LENGTHS.size:
            length, num_bytes = LENGTHS.unpack_from(self._buffer, self._start)
            first = self._start + LENGTHS.size
            if have >= LENGTHS.size + length + num_bytes:
                with memoryview(self._buffer) as view:
                    message = decode_message(view[first : first + length])
                    body = bytes(view[first + length : first + length + num_bytes])
                self._start = first + length + num_bytes
                return message, body
        del self._buffer[: self._start]
        self._start = 0
        return None


def boot_id() -> str:
    """Of this host's kernel: the same in all processes that share a monotonic clock; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
